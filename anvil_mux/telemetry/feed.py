"""The latest events and requests, for the status page, ``anvil-mux events`` and ``top``.

Two rings, of events and of requests that ended. Who looks on is no more than a place in each ring, so a slow
one holds up nobody and costs nothing: what left the ring before it came is counted as missed, and it is told
so. The journal's thread fills the rings, never a thread that holds the multiplexer's lock, and rings the bell
after each batch; watchers wait for it in threads of their own.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import NamedTuple, TypeVar

from anvil_mux.config.keys import Key
from anvil_mux.errors import Overloaded, TooManyRequests
from anvil_mux.scheduler.events import Event
from anvil_mux.telemetry.accesslog import Served

EVENTS = 500
REQUESTS = 100
WATCHERS = 32
BY_HAND = ("/models/", "/api/show")
"""Paths of what names a model and asks it nothing."""


class FeedPosition(NamedTuple):
    """The position of a reader: the numbers of the last event and the last request."""

    event: int = 0
    request: int = 0


class News(NamedTuple):
    """The events and requests after a position."""

    events: list[Event]
    requests: list[Served]
    missed: int
    """Events that are in the ring no more."""
    place: FeedPosition


class Feed:
    """The last events and requests. Any thread, but only one at a time may ``tell`` and ``ended``."""

    def __init__(self) -> None:
        # Whoever tells only appends, and whoever reads only copies: both are atomic, so neither takes a lock.
        self._events: deque[tuple[int, Event]] = deque(maxlen=EVENTS)
        self._requests: deque[tuple[int, Served]] = deque(maxlen=REQUESTS)
        self._numbers = count(1)
        self._request_numbers = count(1)
        # Guards what stands below it; held for microseconds.
        self._bell = threading.Condition(threading.Lock())
        self._watchers: Counter[Key | None] = Counter()
        """How many watch with each key."""
        self._closed = False

    @property
    def closed(self) -> bool:
        return self._closed

    def tell(self, event: Event) -> None:
        self._events.append((next(self._numbers), event))

    def ended(self, record: Served) -> None:
        """Takes the record of a request; those that no model was to answer are no news."""
        if record.model and not record.path.startswith(BY_HAND):
            self._requests.append((next(self._request_numbers), record))

    def ring(self) -> None:
        """Wakes those who wait for news, if there are any."""
        with self._bell:
            self._bell.notify_all()

    def close(self) -> None:
        """The program ends: nobody waits any more."""
        with self._bell:
            self._closed = True
            self._bell.notify_all()

    @contextmanager
    def watching(self, key: Key | None = None, *, shares: bool = False) -> Iterator[None]:
        """Counts a watcher, each of which holds a thread; Overloaded if there are too many.

        ``shares``: there are other keys than ``key``, which leaves half of the places to them
        (TooManyRequests).
        """
        with self._bell:
            if self._watchers.total() >= WATCHERS:
                text = f"overloaded: {WATCHERS} viewers are connected already (open pages count)"
                raise Overloaded(f"{text}. Try again.")
            if shares and self._watchers[key] >= (most := max(WATCHERS // 2, 1)):
                raise TooManyRequests(f"This API key has {most} viewers already, as many as it may.")
            self._watchers[key] += 1
        try:
            yield
        finally:
            with self._bell:
                self._watchers[key] -= 1
                self._watchers += Counter()  # without those that have none

    def news(self, after: FeedPosition, seconds: float | None = 0.0) -> News:
        """Return the news after ``after``; wait for some for at most ``seconds`` (None: for ever)."""
        if seconds != 0.0:
            with self._bell:
                self._bell.wait_for(lambda: self._closed or self._is_news(after), seconds)
        events, last_event = _after(self._events, after.event)
        requests, last_request = _after(self._requests, after.request)
        return News(
            events, requests, last_event - after.event - len(events), FeedPosition(last_event, last_request)
        )

    def _is_news(self, after: FeedPosition) -> bool:
        return _last(self._events) > after.event or _last(self._requests) > after.request

    def pause(self, seconds: float) -> None:
        """Waits, but for no longer than the program lives."""
        with self._bell:
            self._bell.wait_for(lambda: self._closed, seconds)


_T = TypeVar("_T")


def _last(ring: deque[tuple[int, _T]]) -> int:
    return ring[-1][0] if ring else 0


def _after(ring: deque[tuple[int, _T]], place: int) -> tuple[list[_T], int]:
    """The items of a ring after a position, and the number of the last."""
    entries = [(number, entry) for number, entry in ring.copy() if number > place]
    return [entry for _, entry in entries], entries[-1][0] if entries else place
