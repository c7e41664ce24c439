"""The watch over servers elsewhere: one of which nothing was heard for a while is asked how it is.

So an open circuit is seen before a client meets it, and a server that could not be reached serves again as
soon as it can be. Requests that are answered are news enough: while there are some, nothing is asked.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from anvil_mux.clock import Worker
from anvil_mux.config.config import Backend, Config
from anvil_mux.config.diagnostic import Diagnostic
from anvil_mux.host.elsewhere import Finding, asked
from anvil_mux.multiplexer.circuits import Circuit, Circuits
from anvil_mux.serve.adoption import side_by_side

LOOK_SECONDS = 5.0
"""Seconds between two looks which are to be asked."""
QUIET_SECONDS = 60.0
"""After which a server is asked of which nothing was heard."""


class ElsewhereWatch:
    """Watches the servers elsewhere of a configuration; no thread runs before there are any."""

    def __init__(
        self,
        circuits: Circuits,
        say: Callable[[str], object],
        *,
        ask: Callable[[Backend], Finding] = asked,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._circuits = circuits
        self._say = say
        self._ask = ask
        self._now = now
        self._backends: tuple[Backend, ...] = ()
        self._hints: dict[str, str] = {}
        self._has_begun = False
        self.worker = Worker("elsewhere", self.look)
        circuits.tell = self._tell

    def take(self, config: Config) -> None:
        """Watch the servers of this configuration from now on; those that are new are asked at once."""
        backends = tuple([backend for backend in config.backends if backend.url])
        kept = frozenset(each.name for each in backends if each in self._backends)
        self._backends = backends
        self._circuits.keep(kept)
        if self._has_begun:
            self.worker.wake()
        elif backends:
            self._has_begun = True
            self.worker.start()

    def look(self) -> float:
        """Ask those of which it is not known how they are; return the seconds until the next look."""
        due = [backend for backend in self._backends if self._is_due(self._circuits.of(backend.name))]
        for backend, finding in zip(due, side_by_side(self._ask, due), strict=True):
            self._circuits.asked(backend.name, finding.problem)
            if finding.hint and finding.hint != self._hints.get(backend.name):
                self._say(f"warning: {backend.name} {finding.hint}")
            self._hints[backend.name] = finding.hint
        return LOOK_SECONDS

    def close(self) -> None:
        self.worker.close()

    def _is_due(self, circuit: Circuit) -> bool:
        if circuit.state == "open":
            return circuit.is_away and circuit.pause_left(self._now()) <= 0
        return self._now() - circuit.heard > QUIET_SECONDS

    def _tell(self, name: str, circuit: Circuit) -> None:
        if circuit.state == "closed":
            self._say(f"{name}: its circuit is closed, its server answers again")
        else:
            left = circuit.pause_left(self._now())
            self._say(f"{name}: its circuit is open for {left:.0f} s, since {circuit.why}")


def warnings(backends: Iterable[Backend]) -> list[str]:
    """A warning for each server elsewhere that does not answer as it should, asked now."""
    found = [backend for backend in backends if backend.url]
    told = zip(found, side_by_side(asked, found), strict=True)
    return [
        Diagnostic(
            f"service {backend.name}: {backend.url} {finding.problem or finding.hint}",
            key=("services", backend.name, "x-anvil", "url"),
        )
        for backend, finding in told
        if any(finding)
    ]
