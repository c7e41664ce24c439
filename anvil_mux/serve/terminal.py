"""The notices and the banner, for whoever started the program."""

from __future__ import annotations

import io
import json
import os
import sys
import time
from contextlib import suppress

from anvil_mux import __version__
from anvil_mux.config.config import Backend, Config
from anvil_mux.config.elsewhere import site
from anvil_mux.telemetry.accesslog import Output, stamp
from anvil_mux.telemetry.journal import STDERR

MOST_PLACES = 4
"""How many of the places that a model may have are printed."""


def say(text: str, form: str = "human") -> None:
    """A message to whoever started the program; ``form``: as ``Options.log_format``."""
    line = f"anvil-mux: {text}"
    if form == "json":
        line = json.dumps({"ts": stamp(time.time()), "level": "info", "event": "notice", "text": text})
    print(f"{line}\n", end="", file=sys.stderr, flush=True)  # in one piece: several threads say


class StandardError(io.TextIOBase):
    """Standard error of a program that serves: what becomes of a line there must not stop or hold it."""

    def __init__(self) -> None:
        super().__init__()
        self._output = Output(STDERR)

    def write(self, text: str) -> int:
        self._output.write(text)
        return len(text)

    def fileno(self) -> int:
        return STDERR

    def isatty(self) -> bool:
        return os.isatty(STDERR)


def print_banner(config: Config, url: str, *, with_models: bool, with_key: bool) -> None:
    """Print where it is served and, ``with_models``, what and how to try it, to whoever reads it."""
    with suppress(OSError):
        print(f"anvil-mux {__version__} serves {url} ({', '.join(map(short, config.files))})")
        if with_models:
            places: dict[tuple[str, str], list[str]] = {}
            for backend in config.backends:
                places.setdefault((backend.model, backend.engine), []).append(_place(backend))
            width = max(len(backend.model) for backend in config.backends)
            for (model, engine), where in places.items():
                more = f" or {len(where) - MOST_PLACES} more" if len(where) > MOST_PLACES else ""
                print(f"  {model:{width}}  {engine} on {' or '.join(where[:MOST_PLACES])}{more}")
            print(f"Try it:\n  {_curl_line(url, config.backends[0].model, with_key=with_key)}")
        sys.stdout.flush()


def _place(backend: Backend) -> str:
    if backend.url:
        return site(backend.url).name
    if not backend.gpus:
        return f"{backend.host}, without a GPU" if backend.host else "no GPU"
    return f"GPU {', '.join(backend.gpu_names)}"


def _curl_line(url: str, model: str, *, with_key: bool) -> str:
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "Hello!"}]})
    quoted = body.replace("'", "'\\''")
    key = '-H "Authorization: Bearer $ANVIL_API_KEY" ' if with_key else ""
    return f"curl {url}/v1/chat/completions {key}-H 'Content-Type: application/json' -d '{quoted}'"


def short(file: str) -> str:
    """A path as people would type it here."""
    relative = os.path.relpath(file)
    return file if relative.startswith("..") or os.getcwd() == os.sep else relative
