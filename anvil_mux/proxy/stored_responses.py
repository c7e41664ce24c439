"""A note of which backend has which answer of /v1/responses.

Engines keep these answers, each for itself, so that a client can go on from one (``previous_response_id``),
fetch it again or delete it. So a request that refers to an answer goes to the backend that gave it. Only the
answer's id and whose it is are kept here. An engine that was evicted since has lost the answer, and says so.
"""

from __future__ import annotations

import re
from threading import Lock
from typing import NamedTuple

MOST = 10_000
"""The most answers that are remembered, the newest."""

_ID = re.compile(rb'(?<!\\)"id" ?: ?"(resp_[A-Za-z0-9_-]{1,250})"')
_PREVIOUS = re.compile(rb'(?<!\\)"previous_response_id"[ \t\r\n]*:[ \t\r\n]*"(resp_[A-Za-z0-9_-]{1,250})"')
_MOST_READ = 64 * 1024


class Kept(NamedTuple):
    """The model and backend that gave an answer, and the API key that asked for it."""

    model: str
    backend: str
    key: object


class StoredResponses:
    """The answers that are remembered. Any thread."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._kept: dict[str, Kept] = {}

    def keep(self, id: str, model: str, backend: str, key: object) -> None:
        with self._lock:
            self._kept[id] = Kept(model, backend, key)
            if len(self._kept) > MOST:
                del self._kept[next(iter(self._kept))]

    def find(self, id: str, key: object) -> Kept | None:
        """The answer of that id, if ``key`` asked for it."""
        with self._lock:
            kept = self._kept.get(id)
        return kept if kept and kept.key == key else None


def id_in(answer: bytes) -> str:
    """The id of an answer that begins like this; "" if it is not in it."""
    found = _ID.search(answer)
    return found[1].decode("ascii") if found else ""


def previous(question: bytes | bytearray) -> str:
    """The id of the answer that a question refers to; "" for none."""
    found = _PREVIOUS.search(question)
    return found[1].decode("ascii") if found else ""


def says_no_more(events: bytes) -> bool:
    """Whether the id has come, or is not to be waited for: it stands in a stream's first event, if anywhere.

    ``events`` may be chunked: the last chunk and the end of an event in CRLF look alike.
    """
    ended = b"\n\n" in events or b"\r\n\r\n" in events
    return ended or len(events) > _MOST_READ or _ID.search(events) is not None
