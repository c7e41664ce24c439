"""How many requests wait for models, and how many each API key has under way and waiting."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from anvil_mux.clock import Lock
from anvil_mux.config.keys import Key
from anvil_mux.errors import TooManyRequests
from anvil_mux.scheduler.steps import Ticket


class RequestCounts:
    """The counts of one multiplexer, whose lock guards them; of keys that have a limit only."""

    def __init__(self, lock: Lock) -> None:
        self._lock = lock
        # The lock guards what follows.
        self.waiting = 0
        """Requests that wait for any model."""
        self._under_way: Counter[Key] = Counter()
        self._waiting: Counter[Key] = Counter()

    @contextmanager
    def under_way(self, key: Key) -> Iterator[None]:
        """One of the requests that ``key`` may have at once, until the end; TooManyRequests."""
        with self._lock:
            count = self._under_way[key]
            if key.requests is not None and count >= key.requests:
                raise TooManyRequests(f"This API key has reached its limit of concurrent requests ({count}).")
            self._under_way[key] += 1
        try:
            yield
        finally:
            with self._lock:
                self._under_way[key] -= 1

    def check_waiting(self, key: Key, limit: int) -> None:
        """TooManyRequests if so many requests of ``key`` wait already. Under the lock."""
        count = self._waiting[key]
        if count >= limit:
            raise TooManyRequests(f"This API key has {count} requests waiting already, as many as it may.")

    def count_waiting(self, ticket: Ticket, change: int) -> None:
        """Count a ticket that waits, or waits no longer. Under the lock."""
        self.waiting += change
        if isinstance(ticket.sender, Key) and ticket.sender.waiting is not None:
            self._waiting[ticket.sender] += change
