"""Bytes both ways between two connections, once both have agreed to speak something other than HTTP.

One thread, the request's own. A side that does not read stops the reading of the other: at most one read is
held for each. The tunnel ends when a side closes, when neither has said anything for too long, or when it is
told to.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable
from socket import MSG_DONTWAIT, socket

READ = 65536
LOOK_SECONDS = 0.25
"""How often it is asked whether the tunnel must end."""
GONE = select.POLLHUP | select.POLLERR


class _Way:
    """One direction."""

    def __init__(self, source: socket, sink: socket, held: bytes = b"") -> None:
        self._source = source
        self._sink = sink
        self._held = held
        """What the sink has not taken yet."""
        self.passed = 0

    @property
    def awaits(self) -> tuple[int, int]:
        """The descriptor and the event that it can go on with."""
        if self._held:
            return self._sink.fileno(), select.POLLOUT
        return self._source.fileno(), select.POLLIN

    def go_on(self) -> bool:
        """Reads and writes what there is; False when a side has closed."""
        try:
            if not self._held:
                self._held = self._source.recv(READ, MSG_DONTWAIT)
                if not self._held:
                    return False
            sent = self._sink.send(self._held, MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            return False
        self._held, self.passed = self._held[sent:], self.passed + sent
        return True


def tunnel(
    client: socket, engine: socket, said: bytes, *, must_end: Callable[[], bool], silence: float
) -> int:
    """Blocks until the tunnel has ended; how many bytes the client was sent. ``said``: by it, already."""
    up, down = _Way(client, engine, said), _Way(engine, client)
    poll = select.poll()
    active = time.monotonic()
    while not must_end() and time.monotonic() - active < silence:
        masks = dict.fromkeys((client.fileno(), engine.fileno()), 0)
        awaited = {way: way.awaits for way in (up, down)}
        for descriptor, event in awaited.values():
            masks[descriptor] |= event
        for descriptor, mask in masks.items():
            poll.register(descriptor, mask)
        events = dict(poll.poll(LOOK_SECONDS * 1000))
        moving = [way for way, (end, event) in awaited.items() if events.get(end, 0) & event]
        if moving:
            active = time.monotonic()
        if not all(way.go_on() for way in moving):
            break
        if not moving and any(event & GONE for event in events.values()):
            break
    return down.passed
