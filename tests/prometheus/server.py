"""A real Prometheus: Debian's package."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import threading
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from urllib.request import urlopen

import yaml

GUARD = 120.0
PROGRAM = shutil.which("prometheus")

Samples = dict[str, float]
"""The value of a query's one label, "" without any -> the sample."""


class Prometheus:
    """A Prometheus that scrapes one anvil-mux every second."""

    def __init__(self, folder: Path, target: int) -> None:
        assert PROGRAM
        job = {"job_name": "anvil-mux", "static_configs": [{"targets": [f"127.0.0.1:{target}"]}]}
        config = {"global": {"scrape_interval": "1s"}, "scrape_configs": [job]}
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        self._process = subprocess.Popen(
            [
                PROGRAM,
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                "--web.listen-address=127.0.0.1:0",
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._lines: list[str] = []
        self._address = ""
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        assert self._ready.wait(GUARD)
        assert self._address, "".join(self._lines)

    def _read(self) -> None:
        assert self._process.stderr
        with self._process.stderr as lines:
            for line in lines:
                self._lines.append(line)
                found = re.search(r'"Listening on" address=(\S+)', line)
                if found:
                    self._address = found[1]
                if "ready to receive web requests" in line:
                    self._ready.set()
        self._ready.set()

    def ask(self, query: str) -> Samples:
        url = f"http://{self._address}/api/v1/query?{urlencode({'query': query})}"
        with urlopen(url, timeout=GUARD) as answer:
            found: Any = json.load(answer)
        assert found["status"] == "success", found
        return {"".join(each["metric"].values()): float(each["value"][1]) for each in found["data"]["result"]}

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(GUARD)
        self._reader.join(GUARD)
