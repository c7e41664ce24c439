"""The last requests with what was asked and answered: ``capture: 50``.

Bodies are kept in memory only, the first ``BODY_BYTES`` of each, and are gone with the program, or with a
reload that says ``capture: 0``.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any
from urllib.parse import parse_qs

from anvil_mux.errors import NotFound
from anvil_mux.protocol import http1
from anvil_mux.proxy.asked import Asked
from anvil_mux.proxy.capture import Capture
from anvil_mux.proxy.probes import Answer
from anvil_mux.proxy.reply import JSON
from anvil_mux.telemetry.accesslog import Served


class Captures:
    """The last requests that were captured, as many as are wanted. Any thread."""

    def __init__(self, most: int) -> None:
        # Guards what stands below it; held for microseconds.
        self._lock = threading.Lock()
        self._kept: deque[dict[str, Any]] = deque(maxlen=most)

    @property
    def most(self) -> int:
        """How many are kept."""
        return self._kept.maxlen or 0

    def resize(self, most: int) -> None:
        """Keep so many from now on, and no more of those that are here."""
        with self._lock:
            if most != self._kept.maxlen:
                self._kept = deque(self._kept, most)

    def keep(self, capture: Capture, request: http1.Request, record: Served) -> None:
        kept = capture.kept(request, record)
        with self._lock:
            self._kept.append(kept)

    # GET /requests, GET /requests?id=ID

    def answer(self, asked: Asked) -> Answer:
        """Answer with one request, or with a list of all that are kept."""
        with self._lock:
            kept = list(self._kept)
        id = parse_qs(asked.request.query).get("id", [""])[0]
        told = _one(kept, id, self.most) if id else {"capture": self.most, "requests": _list(kept)}
        return 200, JSON, json.dumps(told, indent=1).encode("ascii") + b"\n"


def _one(kept: Sequence[dict[str, Any]], id: str, most: int) -> dict[str, Any]:
    for each in reversed(kept):  # a client may use an id twice
        if each["record"].request_id == id:
            return {**_about(each["record"]), **{key: each[key] for key in each if key != "record"}}
    how = f"the last {most} are" if most else "none is; `capture: 50` in x-anvil keeps the last 50"
    raise NotFound(f"No request {id} is kept: {how}.")


def _list(kept: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return [_about(each["record"]) for each in kept]


def _about(record: Served) -> dict[str, Any]:
    return {
        "id": record.request_id,
        "ended": round(record.ended, 3),
        "key": record.key,
        "path": record.path,
        "model": record.model,
        "backend": record.backend,
        "status": record.status,
        "code": record.code,
        "waited": round(record.waited, 3),
        "first_byte": round(record.first_byte, 3),
        "seconds": round(record.seconds, 3),
        "prompt_tokens": record.prompt_tokens,
        "tokens": record.tokens,
    }
