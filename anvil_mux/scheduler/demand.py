"""How often a model is asked for, and for how long: what a policy knows of the future.

Two rates matter. ``rate`` is that of all arrivals. ``growth`` is that of arrivals while others wait already:
it says how fast a queue grows, and is far lower where clients wait for one answer before they ask again.
Before there were queues, arrivals while others are answered tell the same: a lone client never comes then.
A model that falls silent is believed to go on at most as often as its silence allows.

What was seen is forgotten: arrivals with time, queues with each queue, answers and pauses with each of them.
All of it depends on the facts alone, not on when it is asked: the simulator and the program see the same.
"""

from __future__ import annotations

from math import exp, inf

MEMORY_SECONDS = 60.0
"""Arrivals this long ago count 1/e."""
FIRST_SECONDS = 6.0
"""The first arrival counts as one in so many seconds."""
QUEUES_KEPT = 0.8
"""The weight of all earlier queues, and the share of their length, when another has ended."""
TRUST_SECONDS = 5.0
"""Seconds of queues after which they count as much as the rate of all arrivals."""
TRUST_ARRIVALS = 4.0
"""Arrivals that weigh as much as what was seen while others were answered."""
PAUSE_ALPHA = 0.2
SERVICE_ALPHA = 0.1
"""Weights of the newest pause and the newest answer."""
SHORTEST_SILENCE = 1e-3


class Demand:
    """One model's arrivals, queues, answers and pauses."""

    __slots__ = (
        "_busy_seconds",
        "_busy_since",
        "_first",
        "_joined",
        "_last",
        "_overlaps",
        "_queue_seconds",
        "_weight",
        "longest",
        "overlapping",
        "pause_seconds",
        "service_seconds",
    )  # fmt: skip

    def __init__(self) -> None:
        self._first = self._last = -inf
        self._weight = 0.0  # arrivals, those before the last one faded to its moment
        self._joined = self._queue_seconds = 0.0
        self._overlaps = self._busy_seconds = 0.0  # arrivals while others were answered, and how long
        self._busy_since = inf
        self.longest = 0.0
        """How many requests the longest of its queues had, of late; 0: it had none."""
        self.overlapping = 0
        """Requests that came since the model was last idle, while others were answered."""
        self.pause_seconds = 0.0
        """How long the model is resident and idle before the next request comes."""
        self.service_seconds = 0.0
        """How long a lease lasts; 0 before the first has ended."""

    # Facts

    def arrived(self, now: float) -> None:
        if self._weight:
            self._weight = 1.0 + self._weight * exp((self._last - now) / MEMORY_SECONDS)
        else:
            self._first, self._weight = now, 1.0
        self._last = now

    def returned(self, pause_seconds: float, now: float = inf) -> None:
        """A request came after the model had been idle for so long; ``now``: when it began to answer."""
        self.pause_seconds += PAUSE_ALPHA * (pause_seconds - self.pause_seconds)
        self._busy_since, self.overlapping = now, 0

    def admitted(self, count: int, seconds: float) -> None:
        """A queue of ``count`` was admitted, so many seconds after the first of it came."""
        self.longest = max(float(count), QUEUES_KEPT * self.longest)
        self._joined = QUEUES_KEPT * self._joined + count - 1
        self._queue_seconds = QUEUES_KEPT * self._queue_seconds + seconds

    def served(self, seconds: float) -> None:
        """A lease of so many seconds ended."""
        if self.service_seconds:
            seconds = self.service_seconds + SERVICE_ALPHA * (seconds - self.service_seconds)
        self.service_seconds = seconds

    def idle(self, now: float) -> None:
        """The last request was answered."""
        seconds = now - self._busy_since
        if seconds >= 0.0:
            kept = MEMORY_SECONDS / (MEMORY_SECONDS + seconds)
            self._overlaps = (self._overlaps + self.overlapping) * kept
            self._busy_seconds = (self._busy_seconds + seconds) * kept
            self._busy_since = inf

    # Questions

    def rate(self, now: float) -> float:
        """Arrivals per second."""
        return self.rates(now)[0]

    def growth(self, now: float, count: int = 0, seconds: float = 0.0) -> float:
        """Arrivals per second while others wait; ``count`` wait now, the first for ``seconds``."""
        return self.rates(now, count, seconds)[1]

    def rates(self, now: float, count: int = 0, seconds: float = 0.0) -> tuple[float, float]:
        """``rate`` and ``growth``."""
        if not self._weight:
            return 0.0, 0.0
        silence = now - self._last
        most = 1.0 / (silence if silence > SHORTEST_SILENCE else SHORTEST_SILENCE)
        faded = self._weight * exp(-silence / MEMORY_SECONDS)
        seen = 1.0 - exp((self._first - FIRST_SECONDS - now) / MEMORY_SECONDS)
        rate = faded / (MEMORY_SECONDS * seen)
        if rate > most:
            rate = most
        believed = (self._overlaps + TRUST_ARRIVALS) / (self._busy_seconds * rate + TRUST_ARRIVALS)
        guess = rate * believed if believed < 1.0 else rate  # before there were queues
        joined = self._joined + (count - 1 if count else 0) + guess * TRUST_SECONDS
        growth = joined / (self._queue_seconds + seconds + TRUST_SECONDS)
        return rate, growth if growth < most else most
