"""The circuit breakers before external servers: whether one gets requests at all.

A circuit is closed while its server answers. It opens after ``MOST_FAILURES`` failures in a row, at once
where the server cannot be reached when it is asked how it is, and for as long as the server itself asks for
(429 with Retry-After). While it is open every request is refused at once. After a pause, which doubles from
one failure to the next, it is half-open: one request is let through as a trial, and how that is answered
decides.

Requests that are under way when a circuit opens go on. A lock of its own guards all circuits; it is taken by
requests to external servers alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from anvil_mux.clock import Clock
from anvil_mux.errors import CircuitOpen

MOST_FAILURES = 5
"""Failures in a row after which a circuit opens."""
FIRST_PAUSE, LONGEST_PAUSE = 5.0, 60.0
"""Seconds for which a circuit is open, after the first failure and at most."""
LONGEST_ASKED = 300.0
"""The longest pause that a server may ask for, seconds."""
TRIAL_SECONDS = 1.0
"""After which who was refused because of a trial should ask again."""

CircuitState = Literal["closed", "open", "half_open"]
CIRCUIT_STATES: tuple[CircuitState, ...] = ("closed", "open", "half_open")


@dataclass(frozen=True, slots=True)
class Circuit:
    """One circuit at one moment."""

    state: CircuitState = "closed"
    failures: int = 0
    """Failures in a row."""
    pauses: int = 0
    """How often it was opened in a row."""
    until: float = 0.0
    """The end of the pause, while it is open."""
    on_trial: bool = False
    """Whether the trial of a half-open circuit is under way."""
    why: str = ""
    """The last failure, for people; "" once something went well."""
    is_away: bool = False
    """Whether it opened because the server could not be reached: then it is asked how it is."""
    heard: float = -1e9
    """When it was last known how the server is."""

    def pause_left(self, now: float) -> float:
        return max(self.until - now, 0.0) if self.state == "open" else 0.0

    def refuses(self, now: float) -> bool:
        """Whether a request would be refused."""
        return self.state != "closed" and (self.on_trial or self.pause_left(now) > 0)


CircuitChange = Callable[[Circuit, float], Circuit]
"""A change of a circuit at a moment."""


@dataclass(slots=True)
class Permit:
    """One request to an external server. The first report of how it ended counts."""

    _circuits: Circuits
    _name: str
    is_trial: bool
    _is_over: bool = False

    def answered(self) -> None:
        """The server began an answer, which may take hours to end: that is what a trial is for."""
        if self.is_trial:
            self.is_trial = False
            self._circuits.change(self._name, lambda circuit, now: Circuit(heard=now))

    def succeeded(self) -> None:
        """The server answered, if only that the request is wrong.

        To a request from before the circuit opened that changes nothing.
        """

        def change(circuit: Circuit, now: float) -> Circuit:
            return Circuit(heard=now) if self.is_trial or circuit.state == "closed" else circuit

        self._end(change)

    def failed(self, why: str, *, pause: float | None = None, away: bool = False) -> None:
        """The server failed. ``pause``: for so many seconds it wants to be left alone. ``away``: it could not
        be reached."""

        def change(circuit: Circuit, now: float) -> Circuit:
            failures = circuit.failures + 1
            circuit = replace(circuit, failures=failures, why=why, heard=now)
            if circuit.state != "closed" and not self.is_trial:
                return circuit  # it was under way when the circuit opened
            if not self.is_trial and failures < MOST_FAILURES and not pause:
                return circuit
            return _opened(circuit, now, pause, away=away)

        self._end(change)

    def left(self) -> None:
        """The request ended for a reason that says nothing of the server; after a trial the next is one."""
        self._end(lambda circuit, now: replace(circuit, on_trial=circuit.on_trial and not self.is_trial))

    def _end(self, change: CircuitChange) -> None:
        if not self._is_over:
            self._is_over = True
            self._circuits.change(self._name, change)


class Circuits:
    """The circuits by backend. Any thread. ``tell`` is called, without the lock, when one opens or closes."""

    def __init__(self, clock: Clock, tell: Callable[[str, Circuit], object] = lambda name, to: None) -> None:
        self.now = clock.now
        self._lock = clock.lock()
        self.tell = tell
        self._circuits: dict[str, Circuit] = {}
        """Replaced entry by entry, under the lock; whoever reads one entry needs none."""

    def of(self, name: str) -> Circuit:
        """The circuit of a backend as it is now."""
        return self._circuits.get(name, _CLOSED)

    def pause_left(self, name: str) -> float:
        """Seconds until a request may be let through."""
        return self.of(name).pause_left(self.now())

    def state(self, name: str) -> CircuitState:
        """The state of a circuit now; half-open also while the request that is to try it has not come yet."""
        circuit = self.of(name)
        return "half_open" if circuit.state == "open" and not self.pause_left(name) else circuit.state

    def refuses(self, name: str) -> bool:
        """Whether a request would be refused now."""
        return self.of(name).refuses(self.now())

    def check(self, name: str) -> None:
        """Raise CircuitOpen if a request would be refused now."""
        self._check(name, self.of(name))

    def begin(self, name: str) -> Permit:
        """Let a request through, or raise CircuitOpen. Whoever began reports how it ended."""
        with self._lock:
            circuit = self.of(name)
            self._check(name, circuit)
            is_trial = circuit.state != "closed"
            if is_trial:
                self._circuits[name] = replace(circuit, state="half_open", on_trial=True)
        return Permit(self, name, is_trial)

    def _check(self, name: str, circuit: Circuit) -> None:
        now = self.now()
        if not circuit.refuses(now):
            return
        left = circuit.pause_left(now)
        text = f"{name} is not asked for now, since {circuit.why}"
        when = f"in {left:.0f} s" if left > 0 else "once the request that tries it has ended"
        raise CircuitOpen(f"{text}. Try again {when}.", retry_after=left or TRIAL_SECONDS)

    def asked(self, name: str, problem: str) -> None:
        """The server was asked how it is; ``problem``: why it cannot be used, "" if it is well."""

        def change(circuit: Circuit, now: float) -> Circuit:
            if circuit.on_trial:
                return circuit
            if problem:
                return _opened(replace(circuit, why=f"it {problem}", heard=now), now, None, away=True)
            if circuit.state == "closed":
                return replace(circuit, heard=now)
            # That it is there does not say that it does its work: what failed at that is tried by a request.
            return Circuit(heard=now) if circuit.is_away else circuit

        self.change(name, change)

    def change(self, name: str, change: CircuitChange) -> None:
        """Change a circuit, and tell if it opens or closes by that."""
        with self._lock:
            before = self.of(name)
            after = self._circuits[name] = change(before, self.now())
        if (before.state == "closed") != (after.state == "closed"):
            self.tell(name, after)

    def keep(self, names: frozenset[str]) -> None:
        """Forget the circuits of all but these backends."""
        with self._lock:
            self._circuits = {name: each for name, each in self._circuits.items() if name in names}


_CLOSED = Circuit()


def _opened(circuit: Circuit, now: float, pause: float | None, *, away: bool) -> Circuit:
    pauses = circuit.pauses + 1
    length = min(FIRST_PAUSE * 2.0 ** min(pauses - 1, 10), LONGEST_PAUSE)
    if pause is not None:
        length = min(max(pause, 1.0), LONGEST_ASKED)
    return replace(circuit, state="open", pauses=pauses, until=now + length, on_trial=False, is_away=away)
