"""A real browser for tests: Chromium without a window, spoken to in its DevTools protocol over two pipes."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
IN_CHROMIUM = [
    pytest.mark.page,
    pytest.mark.skipif(PROGRAM is None, reason="needs Chromium (Debian's package chromium)"),
]
"""The marks of a test that needs one."""
GUARD = 60.0
FLAGS = (
    "--headless=new --no-sandbox --remote-debugging-pipe --no-first-run --disable-gpu "
    "--disable-dev-shm-usage --disable-background-networking --disable-component-update --disable-sync "
    "--no-default-browser-check --hide-scrollbars --force-color-profile=srgb"
)


class Chromium:
    """One page in one browser. Used by one thread; ``problems`` are what the page did wrong so far."""

    def __init__(self, folder: Path, environ: Mapping[str, str] | None = None) -> None:
        assert PROGRAM, "Debian's package `chromium` is needed"
        to_read, self._write = os.pipe()
        self._read, to_write = os.pipe()
        # The browser reads descriptor 3 and writes descriptor 4.
        shell = f'exec "$0" {FLAGS} --user-data-dir="$1" about:blank 3<&{to_read} 4>&{to_write}'
        self._process = subprocess.Popen(
            ["bash", "-c", shell, PROGRAM, str(folder)],
            pass_fds=(to_read, to_write),
            env={**os.environ, **(environ or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_read)
        os.close(to_write)
        self._buffer = b""
        self._number = 0
        self._session = ""
        self.problems: list[str] = []
        self.asked: list[str] = []
        """The addresses that the page asked for."""
        self.tab()

    def tab(self) -> None:
        """Goes on in a new tab, beside those that are open."""
        self._session = ""
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network", "Accessibility"):
            self._call(f"{domain}.enable")
        self._call("Emulation.setFocusEmulationEnabled", enabled=True)

    def close(self) -> None:
        os.close(self._write)
        os.close(self._read)
        self._process.terminate()
        self._process.wait(GUARD)

    def __enter__(self) -> Chromium:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def open(self, url: str) -> None:
        self._call("Page.navigate", url=url)

    def leave(self) -> None:
        """Leave the page, and forget what it did wrong: one whose server has ended would go on asking it."""
        self.open("about:blank")
        self.wait("document.readyState === 'complete' && location.href === 'about:blank'")
        self.problems.clear()

    def size(self, width: int, height: int, *, phone: bool = False) -> None:
        scale = 2 if phone else 1
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=phone,
        )

    def prefer(self, **features: str) -> None:
        named = [{"name": name.replace("_", "-"), "value": value} for name, value in features.items()]
        self._call("Emulation.setEmulatedMedia", features=named)

    def ask(self, script: str) -> Any:
        """What an expression comes to, in the page."""
        found = self._call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, script: str) -> Any:
        """Waits until an expression is true."""
        deadline = time.monotonic() + GUARD
        while not (found := self.ask(script)):
            assert time.monotonic() < deadline, (
                f"never came true: {script}\n{self.ask('document.body.innerText')}"
            )
        return found

    def press(self, key: str, code: int) -> None:
        for kind in ("keyDown", "keyUp"):
            text = {"text": "\r"} if key == "Enter" and kind == "keyDown" else {}
            self._call(
                "Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **text
            )

    def type(self, text: str) -> None:
        """Types into what has the focus."""
        self._call("Input.insertText", text=text)

    def tree(self) -> list[tuple[str, str]]:
        """(role, name) of everything that a screen reader meets."""
        nodes = self._call("Accessibility.getFullAXTree")["nodes"]
        told = [node for node in nodes if not node.get("ignored")]
        return [(node["role"]["value"], node.get("name", {}).get("value", "")) for node in told]

    def picture(self, file: Path, *, whole: bool = True) -> None:
        data = self._call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"]
        file.write_bytes(base64.b64decode(data))

    def _call(self, method: str, **params: Any) -> Any:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                if "navigated" in answer.get("error", {}).get("message", ""):
                    return {"result": {}}  # the page was left meanwhile, and says nothing
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]
            self._note(answer.get("method", ""), answer.get("params", {}))

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            data = os.read(self._read, 1 << 16)
            assert data, "the browser ended"
            self._buffer += data
        text, _, self._buffer = self._buffer.partition(b"\0")
        found: dict[str, Any] = json.loads(text)
        return found

    def _note(self, method: str, params: Mapping[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            self.problems.append(str(params["exceptionDetails"].get("exception", {}).get("description")))
        if method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.problems.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        if method == "Network.requestWillBeSent":
            self.asked.append(params["request"]["url"])
