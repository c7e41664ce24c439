"""A pause by hand: ``POST /pause`` has all models drained and stopped, ``POST /resume`` ends that.

What is asked for is in effect at once, and is kept for the next start of anvil-mux. ``for`` in the body of a
pause is how long it lasts (seconds, or text such as 2h); without it the pause lasts until it is resumed.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from anvil_mux.config.settings import read_seconds
from anvil_mux.errors import BadRequest
from anvil_mux.multiplexer.multiplexer import Multiplexer
from anvil_mux.protocol.completions import parse
from anvil_mux.proxy.asked import Asked
from anvil_mux.proxy.questions import read_json
from anvil_mux.proxy.reply import JSON, Reply
from anvil_mux.telemetry.accesslog import Served


class KeptPause(NamedTuple):
    """A pause, as the next start of anvil-mux finds it."""

    until: float | None
    """Unix time of its end; None: it is resumed by hand."""


Keep = Callable[[KeptPause | None], bool]
"""Keeps a pause for the next start, or that there is none; False if that cannot be written down."""


class Pausing:
    """Answers the routes of pauses. Any thread."""

    def __init__(self, mux: Multiplexer, keep: Keep) -> None:
        self._mux = mux
        self._keep = keep
        # Held until what was asked for last is in effect and written down.
        self._lock = threading.Lock()

    def pause(self, asked: Asked, reply: Reply, record: Served) -> None:
        seconds = _how_long(asked, reply)
        with self._lock:
            until = None if seconds is None else time.time() + seconds
            self._mux.facts.paused(seconds)
            kept = self._keep(KeptPause(until))
        _tell(reply, success=True, until=until, kept=kept)

    def resume(self, asked: Asked, reply: Reply, record: Served) -> None:
        with self._lock:
            was_paused = self._mux.facts.resumed()
            kept = self._keep(None)
        _tell(reply, success=True, paused=was_paused, kept=kept)


def _how_long(asked: Asked, reply: Reply) -> float | None:
    """The seconds that the body names; None: it names none, or there is no body."""
    if not asked.request.length and not asked.request.chunked:
        return None
    told = parse(read_json(asked, reply.client))
    if unknown := [key for key in told if key != "for"]:
        raise BadRequest(f"unknown: {unknown[0]}; a pause has nothing but `for`", param=unknown[0])
    value = told.get("for")
    if value is None:
        return None
    try:
        seconds = read_seconds(value)
    except ValueError as error:
        raise BadRequest(f"`for` {error}", param="for") from None
    if not seconds:
        raise BadRequest("`for` must be more than nothing", param="for")
    return seconds


def _tell(reply: Reply, **told: object) -> None:
    reply.whole(200, [JSON, (b"Cache-Control", b"no-store")], json.dumps(told).encode("ascii") + b"\n")
