"""A running anvil-mux whose work is counted, before stand-in engines, and what is wrong with its answers.

``House`` is the program, its file and its engines. ``House.judged`` plays one case, and tells what does not
hold of it. Before its colon a finding names a kind of mistake, behind it the case.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from tests.running import Running, seen
from tests.values.cases import MODELS, STREAMS, UNNAMED, Ask, request_of, said
from tests.values.engine import name_of

ROOT = Path(__file__).resolve().parent.parent.parent
PROJECT = "types-witness"
GUARD = 120.0
"""Seconds within which everything comes that is to come."""
CALLS, CALLS_PER_BYTE = 60_000, 8.0
"""Calls that a request may cost, and more for each of its bytes and those of its answer."""
LISTS, LISTS_PER_BYTE, LISTS_PER_CALL = 4_000_000, 6.0, 15
"""The same of what is computed, in empty lists; to count a call takes some too."""
STRETCH = 4_000_000
"""Empty lists that may be made while all others wait: a parser makes half a million values at most, of which
some take longer to make."""
OTHERS = 5
"""Cases after which somebody else asks something usual; after one that may change what is loaded, always."""
UNDONE: dict[str, tuple[tuple[str, dict[str, str]], ...]] = {
    "/pause": (("/resume", {}),),
    "/hosts/drain": (("/hosts/undrain", {"host": "local"}),),
    "/models/pin": tuple(("/models/unpin", {"model": model}) for model in MODELS),
}
"""A path by which something is done by hand -> what takes that back."""
WRONG_LINES = re.compile(
    r"Traceback|\bERROR\b|\bError: |RecursionError|Exception in|has ended|connection failed"
)


def strict(text: str) -> Any:
    """The value of a JSON text as strict parsers read it."""

    def refuse(constant: str) -> Any:
        raise ValueError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refuse)


def compose() -> dict[str, Any]:
    """The file of the program under test."""
    engine = {"command": [sys.executable, "-m", "tests.values.engine"], "working_dir": str(ROOT)}
    services: dict[str, Any] = {}
    about: dict[str, dict[str, Any]] = {
        "small": {"engine": "openai", "presets": {"small-p": {"set": {"temperature": 0}, "system": "s"}}},
        "twin": {"engine": "vllm", "model": "twin"},
        "twin2": {"engine": "vllm", "model": "twin", "served_model": "twin"},
        "llama": {"engine": "llamacpp", "prompt_cache": "1MiB", "upstream": ["/slots"]},
        "vllm": {"engine": "vllm", "evict_to": ["sleep", "stop"]},
        "sglang": {"engine": "sglang"},
        "ollama": {"engine": "ollama"},
    }
    for number, (name, given) in enumerate(about.items()):
        model = str(given.get("model", name))
        flags = ["--enable-sleep-mode"] if name == "vllm" else []
        flags += ["--slot-save-path", "FOLDER-saved"] if name == "llama" else []
        services[name] = {
            **engine,
            "command": [*engine["command"], model, "FOLDER", *flags],
            "environment": {"VLLM_SERVER_DEV_MODE": "1"},
            "x-anvil": {"gpus": [str(number)], "load_timeout": 12, "stop_timeout": 3, **given},
        }
    top = {
        "runtime": "process",
        "project": PROJECT,
        "gpus": [str(number) for number in range(len(about))],
        "queue_timeout": 15,
        "upstream_timeout": 20,
        "drain_timeout": 1,
        "capture": 5,
        "any_of": {"either": [{"model": "twin", "when": {"tools": True, "tokens_over": 9}}, "small"]},
        "routing": {"mode": "full", "default": "load_balance"},
    }
    return {"x-anvil": top, "services": services}


class House:
    """One running anvil-mux."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.answers = folder / "answers"
        self.answers.mkdir(exist_ok=True)
        self.file = folder / "compose.yaml"
        self.write(compose())
        self._number = self._lines = 0
        self.begin()

    def write(self, document: dict[str, Any]) -> None:
        text = yaml.safe_dump(document).replace("FOLDER", str(self.answers))
        self.file.write_text(text)

    def begin(self) -> None:
        self._number += 1
        place = str(self.folder / f"work{self._number}")
        command = [sys.executable, "-m", "tests.values.work", place, "serve", str(self.file), "--port", "0"]
        process = subprocess.Popen(
            [*command, "--on-exit", "stop"],
            cwd=ROOT,
            env={**os.environ, "XDG_STATE_HOME": str(self.folder)},
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        self.running = Running(process, command)
        self.running.wait_until_listening()
        self.running.wait_until_adopted()
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.connect(place)
        self._connection.settimeout(GUARD)
        self._work = self._connection.makefile("rw")
        self._watchers: list[Watcher] = []
        try:
            self._warm()
        except BaseException:
            self.close()
            raise
        self._watchers = [Watcher(self.running.port, path) for path in sorted(STREAMS)]

    def _warm(self) -> None:
        """Load all models at once; one that takes too long, on a busy machine, is asked for again."""

        def asked(model: str) -> tuple[int, dict[str, str], str]:
            return seen(lambda: self.running.chat(model), lambda answer: answer[0] not in (503, 504))

        with ThreadPoolExecutor(len(MODELS)) as pool:
            for status, _, text in pool.map(asked, MODELS):
                assert status == 200, text

    def _told(self, word: str) -> dict[str, Any]:
        self._work.write(word + "\n")
        self._work.flush()
        found: dict[str, Any] = json.loads(self._work.readline())
        return found

    def close(self) -> None:
        self._leave()
        if self.running.process.poll() is None:
            self.running.stop()

    def _leave(self) -> None:
        for watcher in self._watchers:
            watcher.close()
        self._work.close()
        self._connection.close()

    def kill(self) -> None:
        """End the program, which is beyond help, and begin anew."""
        self._leave()
        self.running.process.kill()
        self.running.process.wait()
        self.begin()

    # One case

    def judged(self, ask: Ask) -> list[str]:
        """All that does not hold of one case. What is too much work has to be so three times."""
        found = self._judged(ask)
        if found and all(each.startswith("work") for each in found):
            for _ in range(2):
                found = found and self._judged(ask)
        return found

    def _judged(self, ask: Ask) -> list[str]:
        try:
            if ask.reloads:
                self._unload(ask.model)
                self._settled(ask.model)
            self._tell_engines(ask)
            self._told("mark")
            data = request_of(ask)
            answer = Answer.of(self.running.port, data, ask)
            done = self._told("done")
            size = len(data) + len(answer.body) + sum(len(said(each, ask.model)) for each in ask.says)
            found = [*_wrong_answer(ask, answer), *_too_much(ask, done, size)]
            if ask.reloads:
                self._unload(ask.model)
        except (TimeoutError, OSError, http.client.HTTPException, ValueError) as error:
            found = [f"no answer ({type(error).__name__}): {ask!r}: {str(error)[:200]}"]
            if isinstance(error, TimeoutError) or self.running.process.poll() is not None:
                found += self._printed(ask)
                self._tell_engines(Ask())
                self.kill()
                return found
        finally:
            self._tell_engines(Ask())
        if ask.reloads:
            self._settled(ask.model)
        return [*found, *self._after(ask)]

    def judged_alive(self) -> list[str]:
        """What is wrong with the program, whatever was done with it."""
        return list(self._after(Ask(reloads=True)))

    def _tell_engines(self, ask: Ask) -> None:
        for file in self.answers.iterdir():
            file.unlink()
        for says in ask.says:
            text = said(says, ask.model)
            (self.answers / name_of(says.path)).write_text(text, "utf-8", "surrogatepass")

    def _unload(self, model: str) -> None:
        self.running.request("POST", "/models/unload", {"model": model}, timeout=GUARD)

    def _settled(self, model: str) -> None:
        """Return once nothing is done with a model any more."""
        seen(
            lambda: self.running.get("/healthz")["models"][model]["state"],
            lambda state: state not in ("draining", "evicting", "loading"),
        )

    def _after(self, ask: Ask) -> Iterator[str]:
        """What a case did to the program, and to others."""
        if (code := self.running.process.poll()) is not None:
            yield from self._printed(ask)
            yield f"the program ended with {code}: {ask!r}"
            self._leave()
            self.begin()
            return
        self._undo(ask)
        if ask.reloads or ask.path in UNNAMED or self._lines % OTHERS == 0:
            for model in MODELS if ask.reloads else MODELS[:2]:
                yield from self._other(model, ask)
        health = json.loads(self.running.request("GET", "/healthz", timeout=GUARD)[2])
        if threads := health["problems"].get("threads"):
            yield f"a thread's mistake: {threads}: {ask!r}"
        self._lines += 1
        self._told(f"print {self._lines}")
        self.running.tells(f"^print {self._lines}$")
        yield from self._printed(ask)
        for watcher in self._watchers:
            if watcher.over:
                yield f"a watcher's stream has ended: {watcher.path} {ask!r}"
                watcher.close()
                self._watchers.remove(watcher)
                self._watchers.append(Watcher(self.running.port, watcher.path))
        if threads:
            self.kill()

    def _undo(self, ask: Ask) -> None:
        """Take back what is done by hand."""
        for path, body in UNDONE.get(ask.path, ()):
            self.running.request("POST", path, body, timeout=GUARD)

    def _other(self, model: str, ask: Ask) -> Iterator[str]:
        """What is wrong with somebody else's answer."""
        try:
            status, _, text = self.running.chat(model)
            if status != 200 and ask.reloads and model == ask.model:
                # Its load failed by what its engine said before, and is tried again after a while.
                status, _, text = seen(lambda: self.running.chat(model), lambda answer: answer[0] == 200)
        except (OSError, http.client.HTTPException) as error:
            status, text = 0, repr(error)
        if status != 200:
            yield f"somebody else's answer: {model} {status} {text[:300]} after {ask!r}"

    def _printed(self, ask: Ask) -> Iterator[str]:
        """What the program calls a mistake of its own."""
        lines = self.running.output[:]
        del self.running.output[: len(lines)]
        for index, line in enumerate(lines):
            if WRONG_LINES.search(line):
                text = "\n      ".join(lines[max(0, index - 2) : index + 40])
                yield f"an error in its log: {ask!r}\n      {text}"
                return


class Watcher:
    """A client that follows what happens, and stays."""

    def __init__(self, port: int, path: str) -> None:
        self.path = path
        self.over = False
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.sendall(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
        self._socket.recv(1)  # it is served from now on
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        with suppress(OSError):
            while self._socket.recv(65536):
                pass
        self.over = True

    def close(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._socket.close()


class Answer:
    """What a client gets."""

    def __init__(self, status: int, kind: str, body: bytes) -> None:
        self.status, self.kind, self.body = status, kind, body

    @classmethod
    def of(cls, port: int, data: bytes, ask: Ask) -> Answer:
        with socket.create_connection(("127.0.0.1", port), GUARD) as connection:
            with suppress(BrokenPipeError, ConnectionResetError):  # refused before all of it was sent
                connection.sendall(data)
            response = http.client.HTTPResponse(connection, method=ask.method)
            response.begin()
            kind = response.headers.get("Content-Type", "")
            endless = ask.path.partition("?")[0] in STREAMS and response.status == 200
            body = response.read1(65536) if endless else _whole(response)
            return cls(response.status, kind, body)


def _whole(response: http.client.HTTPResponse) -> bytes:
    try:
        return response.read()
    except http.client.IncompleteRead as error:  # how a stream ends that went wrong
        return error.partial


def _api_of(path: str, answer: Answer) -> str:
    """The API whose shape an error has: a head that is too large has not been read."""
    return "openai" if answer.status in (414, 431) else api_of(path)


def api_of(path: str) -> str:
    if re.match(r"(/v1?)?/messages(/|\?|$)", path):
        return "anthropic"
    return "ollama" if re.match(r"/api/(?!v[01]/)", path) else "openai"


def _wrong_answer(ask: Ask, answer: Answer) -> Iterator[str]:
    path = ask.path.partition("?")[0]
    text = answer.body.decode("utf-8", "replace")
    if answer.status == 500:
        yield f"500: {ask!r}: {text[:300]}"
    is_probe = "readyz" in path or "healthz" in path
    if answer.status >= 400 and not is_probe and (why := _unlike(_api_of(path, answer), answer)):
        yield f"an error of another shape ({why}): {ask!r}: {answer.status} {text[:300]}"
    if answer.status >= 300 or (ask.says and api_of(path) == "openai"):
        return
    try:
        text = answer.body.decode()
        for each in _documents(answer.kind, text, path):
            strict(each)
    except ValueError as error:
        if not (path.startswith("/upstream") or path in ("/slots", "/props", "/lora-adapters")):
            yield f"what it says is no JSON ({str(error)[:80]}): {ask!r}: {text[:300]}"


def _documents(kind: str, text: str, path: str) -> list[str]:
    if "ndjson" in kind:
        return text.splitlines()
    if "event-stream" in kind:
        data = [line[5:].strip() for line in text.split("\n") if line.startswith("data:")]
        if path in STREAMS:
            data = data[:-1]  # it may have been read in part
        return [each for each in data if each != "[DONE]"]
    return [text] if "json" in kind and text else []


def _unlike(api: str, answer: Answer) -> str:
    """Why it is no error as an API's clients know it; empty if it is one."""
    try:
        told = strict(answer.body.decode())
    except ValueError as error:
        return str(error)[:80]
    error = told.get("error") if isinstance(told, dict) else None
    if api == "ollama":
        return "" if isinstance(error, str) and error else "no `error`"
    if not isinstance(error, dict):
        return "no `error`"
    if not isinstance(error.get("message"), str) or not isinstance(error.get("type"), str):
        return "no `message` or `type`"
    return "no `type: error`" if api == "anthropic" and told.get("type") != "error" else ""


def _too_much(ask: Ask, done: dict[str, Any], size: int) -> Iterator[str]:
    if (
        done["calls"] > (CALLS if ask.path != "/reload" else 10 * CALLS) + CALLS_PER_BYTE * size
    ):  # it reads files
        yield f"work, calls: {done} for {size} bytes: {ask!r}"
    if done["lists"] > LISTS + LISTS_PER_BYTE * size + LISTS_PER_CALL * done["calls"]:
        yield f"work, computed: {done} for {size} bytes: {ask!r}"
    if done["stretch"] > STRETCH:
        yield f"work, without a turn for others: {done} for {size} bytes: {ask!r}"
