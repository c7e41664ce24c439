"""All islands of one configuration, and how they become those of another while requests run.

A backend that goes on (change.py) keeps its seat with all that hangs on it: state, leases, memory. One that
was changed or removed is leaving (residency.py): its seat keeps the description by which it was started until
it holds nothing any more, and is then given to the new description, or taken away. Lines belong to models,
so whoever waits for a backend that changed waits on, and whoever waits for a model that is served no longer
is told so at once.

No residency is altered: another one takes its place and goes on from it (``reconfigure``, and ``settle`` each
time a seat was left), so what follows from the configuration is computed in one place only, its constructor.
Islands that a new backend ties together become one, and stay one: swaps that are under way may not be cut.

No lock, no clock and no I/O: the multiplexer calls it under its lock, the simulator from its loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from anvil_mux.config.change import compare
from anvil_mux.config.config import Backend, Config
from anvil_mux.scheduler.costs import Costs
from anvil_mux.scheduler.events import Event, Leaving
from anvil_mux.scheduler.footprint import Footprints
from anvil_mux.scheduler.ladder import Host
from anvil_mux.scheduler.placement import islands
from anvil_mux.scheduler.policy import build_policy
from anvil_mux.scheduler.preemption import build_preemption
from anvil_mux.scheduler.residency import Residency


class Layout:
    """The residencies of one configuration, and who belongs where."""

    def __init__(
        self,
        config: Config,
        emit: Callable[[Event], object],
        costs: Costs,
        footprints: Footprints,
        *,
        emit_leases: bool = True,
    ) -> None:
        self.costs, self.footprints = costs, footprints
        self.host = Host(config.host_memory, footprints)
        self.of_model: dict[str, Residency] = {}
        """Also of models that are about to go."""
        self.of_backend: dict[str, Residency] = {}
        self._emit = emit
        self._emit_leases = emit_leases
        self._take(config)
        self.residencies = [self._make(name, members) for name, members in islands(config.backends)]

    def _take(self, config: Config) -> None:
        self.config = config
        self._wanted = {backend.name: backend for backend in config.backends}
        self.served = {backend.model for backend in config.backends}
        self._policy = build_policy(config.policy, config.policy_settings)
        self._preemption = build_preemption(config.preemption, config.preemption_settings)

    def _make(self, name: str, members: Iterable[Backend], before: Sequence[Residency] = ()) -> Residency:
        members = list(members)
        coming = {
            each.name: self._wanted[each.name].model
            for each in members
            if each.name in self._wanted and self._wanted[each.name].model != each.model
        }
        made = Residency(
            name,
            self.config,
            members,
            self._policy,
            self._preemption,
            self._emit,
            self.costs,
            self.host,
            self.footprints,
            emit_leases=self._emit_leases,
            before=before,
            coming=coming,
        )
        self.of_model |= dict.fromkeys(made.lines, made)
        self.of_backend |= dict.fromkeys(made.seats, made)
        return made

    def reconfigure(self, config: Config, now: float) -> dict[Residency, Residency]:
        """From now on ``config`` holds. Residency -> the one that took its place."""
        change = compare(self.config, config)
        self._emit(Event(now, "reloaded", "", reason=str(change)))
        leaving: dict[str, Leaving] = dict.fromkeys(change.changed, "changed")
        leaving |= dict.fromkeys(change.removed, "removed")
        before, of_backend, of_model = self.residencies, self.of_backend, self.of_model
        self._take(config)
        for residency in before:
            residency.retired(leaving, self.served, now)
        self.host.budget = config.host_memory
        self.of_model, self.of_backend, self.residencies = {}, {}, []
        staying = {seat.name: seat.backend for each in before for seat in each.leaving}

        def homes(backend: Backend) -> list[Residency]:
            """Where it was, and where others wait for its model."""
            found = of_backend.get(backend.name), of_model.get(backend.model)
            return [residency for residency in found if residency]

        places: dict[Residency, Residency] = {}
        backends = [*staying.values(), *config.backends]
        for name, group in islands(backends, lambda backend: [each.name for each in homes(backend)]):
            members = {each.name: staying.get(each.name, each) for each in group}
            merged = list(dict.fromkeys(residency for each in group for residency in homes(each)))
            made = self._make(name, members.values(), merged)
            self.residencies.append(made)
            places |= dict.fromkeys(merged, made)
        for residency in before:
            if residency not in places:  # of those who waited there, somebody has to tell
                places[residency] = self.residencies[0]
                self.residencies[0].settled += residency.settled
        for residency in self.residencies:
            residency.resumed(now)
        return places

    def settle(self, residency: Residency, now: float) -> Residency:
        """``residency``, or the one that takes its place because a seat was left."""
        if not residency.is_outgrown:
            return residency
        staying = {seat.name: seat.backend for seat in residency.leaving}
        members = {name: staying.get(name) or self._wanted.get(name) for name in residency.seats}
        for name in residency.seats:
            del self.of_backend[name]
        for model in residency.lines:
            del self.of_model[model]
        made = self._make(residency.name, [each for each in members.values() if each], [residency])
        self.residencies[self.residencies.index(residency)] = made
        made.resumed(now)
        return made
