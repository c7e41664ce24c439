"""The sender of a script: each request at its moment, whatever else happens.

The thread that plays waits for the next moment and begins a thread for each request, so a slow answer holds
up nobody: an open loop. What follows upon an answer (the next request of a session) is due when the script
says. ``most`` bounds how many are under way; one that is due beyond that is sent late, and its times count
from when it was due.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count

from anvil_mux.clock import Clock
from anvil_mux.lab.script import FollowPlayed, PlayedRequest, Script
from anvil_mux.lab.sending import PlayedAnswer

MOST = 512
TELL_SECONDS = 1.0

Ask = Callable[[], PlayedAnswer]
Prepare = Callable[[PlayedRequest, int, Callable[[], float]], Ask]
"""Makes what sends a request: of its number, with the clock of the run."""
TellPlayed = Callable[[int, int, float], object]
"""Takes how many were answered, how many are under way, and the seconds so far."""


class Player:
    """Plays one script."""

    def __init__(self, prepare: Prepare, clock: Clock, *, most: int = MOST) -> None:
        self._prepare = prepare
        self._clock = clock
        self._most = most
        self.answers: list[PlayedAnswer] = []
        self.was_interrupted = False
        self._began = 0.0
        self._numbers = count()
        self._order = count()
        self._next: tuple[int, Ask] | None = None
        """The next request by its order, made ready while its moment has not come."""
        # Guards what stands below it.
        self._changed = clock.condition(lock := clock.lock())
        self._lock = lock
        self._due: list[tuple[float, int, PlayedRequest]] = []
        self._under_way = 0

    def play(self, script: Script, tell: TellPlayed = lambda *_: None) -> list[PlayedAnswer]:
        """The answers, in the order in which they ended; those so far, if Ctrl-C came."""
        first, follow = script.begin()
        self._began = self._clock.now()
        with self._lock:
            for request in first:
                self._add(request)
        try:
            while self._turn(follow):
                tell(len(self.answers), self._under_way, self.now())
        except KeyboardInterrupt:
            self.was_interrupted = True
        return list(self.answers)

    def now(self) -> float:
        """Seconds from the beginning of the run."""
        return self._clock.now() - self._began

    def _add(self, request: PlayedRequest) -> None:
        heappush(self._due, (request.at, next(self._order), request))

    def _turn(self, follow: FollowPlayed) -> bool:
        """Wait a while for the next moment, and send what is due then; False: all is done."""
        with self._lock:
            if not self._due and not self._under_way:
                return False
            at, order, request = self._due[0] if self._due else (math.inf, -1, None)
            wait = at - self.now()
            is_ready = self._next is not None and self._next[0] == order
            if request is None or (is_ready and wait > 0) or self._under_way >= self._most:
                self._changed.wait(min(wait, TELL_SECONDS) if wait > 0 else TELL_SECONDS)
                return True
            if is_ready or wait <= 0:
                heappop(self._due)
                self._under_way += 1
        if not is_ready:
            self._next = order, self._prepare(request, next(self._numbers), self.now)
        if self._next and (is_ready or wait <= 0):
            self._send(request, self._next[1], follow)
        return True

    def _send(self, request: PlayedRequest, ask: Ask, follow: FollowPlayed) -> None:
        self._next = None
        self._clock.spawn(lambda: self._ask(request, ask, follow), f"replay-{request.model}")

    def _ask(self, request: PlayedRequest, ask: Ask, follow: FollowPlayed) -> None:
        """Send one request and wait for its answer, in its thread."""
        try:
            answer = ask()
            with self._lock:
                self.answers.append(answer)
                for later in follow(request, answer.ended):
                    self._add(later)
        finally:
            with self._lock:
                self._under_way -= 1
                self._changed.notify_all()
