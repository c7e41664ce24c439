"""Bytes both ways between two connections, once both have agreed to speak no HTTP any more but a websocket's
frames.

One thread, the request's own. A side that does not read stops the reading of the other: at most one read is
held for each. The tunnel ends when a side closes, when neither has said anything for too long, or when it is
told to.

What passes is not changed, but the frames that the engine sends are followed: where it goes away without a
word, or is evicted, the client is told so in a frame of its own, which fits only between two others.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable
from dataclasses import dataclass
from socket import MSG_DONTWAIT, socket
from typing import Literal

from anvil_mux.proxy.connections import LEFT, Stall

READ = 65536
LOOK_SECONDS = 0.25
"""How often it is asked whether the tunnel must end."""
CLOSE = 8
"""The kind of a frame that says good-bye."""
RESTARTED, BROKEN = 1012, 1011
"""Codes of such frames: come again; something went wrong (RFC 6455 and its registry)."""
MAX_REASON = 123

Side = Literal["client", "engine"]


@dataclass(frozen=True, slots=True)
class Ended:
    """How a tunnel has ended."""

    by: Literal["client", "engine", "silence", "client_stalled", "order"]
    passed: int
    """Bytes that the client was sent."""
    open: bool
    """Whether the client has not been told, and can be."""


class _Frames:
    """The frames that the engine sends, whatever pieces they come in.

    None of them has a mask, which only a client's frames have.
    """

    def __init__(self) -> None:
        self._head = b""
        self._left = 0
        self._closed = False

    def follow(self, data: bytes) -> None:
        at = 0
        while at < len(data):
            if self._left:
                step = min(self._left, len(data) - at)
                self._left, at = self._left - step, at + step
            else:
                self._head, at = self._head + data[at : at + 1], at + 1
                self._begin()

    def _begin(self) -> None:
        if len(self._head) < 2:
            return
        kind, size = self._head[0] & 0x0F, self._head[1] & 0x7F
        longer = {126: 2, 127: 8}.get(size, 0)
        if len(self._head) < 2 + longer:
            return
        self._left = int.from_bytes(self._head[2:], "big") if longer else size
        self._closed = self._closed or kind == CLOSE
        self._head = b""

    @property
    def has_room(self) -> bool:
        """Whether another frame may follow here."""
        return not (self._closed or self._left or self._head)


class _Direction:
    """The bytes of one side on their way to the other."""

    def __init__(
        self,
        source: socket,
        sink: socket,
        ends: tuple[Side, Side],
        *,
        held: bytes = b"",
        frames: _Frames | None = None,
    ) -> None:
        self._source = source
        self._sink = sink
        self._ends = ends
        self._held = held
        """Bytes that the sink has not taken yet."""
        self._stall: Stall | None = None
        self._frames = frames
        self.passed = 0

    def is_stalled(self, now: float, patience: float) -> bool:
        """Whether the sink took nothing of what waits for it for more than ``patience`` seconds."""
        if not self._held:
            return False
        if self._stall is None:
            self._stall = Stall(self._sink, now)
        return self._stall.seconds(now) > patience

    @property
    def awaits(self) -> tuple[int, int]:
        """The descriptor and the event that it can go on with."""
        if self._held:
            return self._sink.fileno(), select.POLLOUT
        return self._source.fileno(), select.POLLIN

    def go_on(self) -> Side | None:
        """Reads and writes what there is; the side that has closed, if one has."""
        end = 0
        try:
            if not self._held:
                self._held = self._source.recv(READ, MSG_DONTWAIT)
                if not self._held:
                    return self._ends[0]
            end = 1
            sent = self._sink.send(self._held, MSG_DONTWAIT)
        except BlockingIOError:
            return None
        except OSError:
            return self._ends[end]
        self._stall = None
        if self._frames:
            self._frames.follow(self._held[:sent])
        self.passed += sent
        self._held = self._held[sent:]
        return None


def tunnel(
    client: socket,
    engine: socket,
    early: bytes,
    *,
    begun: bytes = b"",
    must_end: Callable[[], bool],
    silence: float,
    client_timeout: float,
) -> Ended:
    """Blocks until the tunnel has ended.

    ``early``: what the client has sent already; ``begun``: what it was sent already. ``silence``: seconds in
    which neither may send anything; ``client_timeout``: in which the client may take nothing of what waits
    for it.
    """
    frames = _Frames()
    frames.follow(begun)
    up = _Direction(client, engine, ("client", "engine"), held=early)
    down = _Direction(engine, client, ("engine", "client"), frames=frames)
    by = _pass_on(client, engine, (up, down), must_end=must_end, silence=silence, patience=client_timeout)
    return Ended(by, down.passed, by not in ("client", "client_stalled") and frames.has_room)


def _pass_on(
    client: socket,
    engine: socket,
    ways: tuple[_Direction, _Direction],
    *,
    must_end: Callable[[], bool],
    silence: float,
    patience: float,
) -> Literal["client", "engine", "silence", "client_stalled", "order"]:
    poll = select.poll()
    active = time.monotonic()
    sides: dict[int, Side] = {client.fileno(): "client", engine.fileno(): "engine"}
    while not must_end():
        now = time.monotonic()
        if ways[1].is_stalled(now, patience):
            return "client_stalled"
        if now - active >= silence:
            return "silence"
        masks = {client.fileno(): LEFT, engine.fileno(): 0}  # an engine that has ended may be read on
        awaited = {way: way.awaits for way in ways}
        for descriptor, event in awaited.values():
            masks[descriptor] |= event
        for descriptor, mask in masks.items():
            poll.register(descriptor, mask)
        events = dict(poll.poll(LOOK_SECONDS * 1000))
        moving = [way for way, (end, event) in awaited.items() if events.get(end, 0) & event]
        if moving:
            active = time.monotonic()
        for way in moving:
            if left := way.go_on():
                return left
        gone = [sides[descriptor] for descriptor, event in events.items() if event & LEFT]
        if gone and not moving:
            return gone[0]
    return "order"


def good_bye(code: int, reason: str) -> bytes:
    """A frame that closes a websocket and says why."""
    said = code.to_bytes(2, "big") + reason.encode()[:MAX_REASON].decode(errors="ignore").encode()
    return bytes((0x80 | CLOSE, len(said))) + said
