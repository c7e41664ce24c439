"""All GPU groups of one configuration behind one interface: facts in, ``Effects`` out.

The threaded multiplexer, the simulator and the tests drive it: they say what has happened and when, and do
what the ``Effects`` say. One fact settles all GPU groups that it affects, in the order of their names, until
nothing changes any more: also those that share no GPU with it but the host's memory. A step has a number; a
report of one that is no longer under way is ignored.

A reload changes the configuration while requests run. A backend that goes on (change.py) keeps its slot with
all that hangs on it: state, leases, memory. One that was changed or removed is leaving (group.py): its slot
keeps the description by which it was started until it holds nothing any more, and is then given to the new
description, or taken away. Queues belong to models, so a request for a backend that changed waits on, and one
for a model that is served no longer is told so at once. No GPU group is altered: another one takes its place
and goes on from it, so what follows from the configuration is computed in one place. GPU groups that a new
backend ties together become one, and stay one: swaps that are under way may not be cut.

No lock, no clock and no I/O: the multiplexer calls it under its lock, the simulator from its loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from operator import attrgetter
from typing import Any

from anvil_mux.config.change import compare
from anvil_mux.config.config import Backend, Config
from anvil_mux.errors import LoadError, MuxError
from anvil_mux.routing.in_flight import EngineLoad, Report
from anvil_mux.scheduler.causes import Cause, Leaving
from anvil_mux.scheduler.costs import Costs
from anvil_mux.scheduler.events import Event
from anvil_mux.scheduler.eviction import build_eviction
from anvil_mux.scheduler.footprint import Footprints
from anvil_mux.scheduler.group import GpuGroup
from anvil_mux.scheduler.placement import gpu_groups
from anvil_mux.scheduler.policies import FOREVER, build_policy
from anvil_mux.scheduler.slot import Slot
from anvil_mux.scheduler.standby import HostMemory
from anvil_mux.scheduler.steps import NOTHING, Cancel, Effects, Evict, Step, Ticket, Wait

_NAME = attrgetter("name")
NO_USAGE: tuple[int | None, int | None] = (None, None)


class Scheduler:
    """The GPU groups of one configuration. Each fact comes with the moment at which it became true."""

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
        self.memory = HostMemory(config.host_memory, footprints)
        self.of_model: dict[str, GpuGroup] = {}
        """Also of models that are about to go."""
        self.of_backend: dict[str, GpuGroup] = {}
        self._emit = emit
        self._emit_leases = emit_leases
        self._take(config)
        self.groups = [self._make(name, members) for name, members in gpu_groups(config.backends)]
        self._ask_at: dict[GpuGroup, float] = {}
        """When each group is asked again without a new fact."""
        self._numbers = count(1)
        self._under_way: dict[str, int] = {}
        """Backend -> the number of its step that has not been reported yet."""
        self._memory_changes = 0
        self._is_closed = False

    def _take(self, config: Config) -> None:
        self.config = config
        self._wanted = {backend.name: backend for backend in config.backends}
        self.served = {backend.model for backend in config.backends}
        self._policy = build_policy(config.policy, config.policy_settings)
        self._eviction = build_eviction(config.eviction, config.eviction_settings)

    # What is asked of it, and changes nothing

    def slot(self, backend: str) -> Slot | None:
        """The slot of a backend, also of one that is leaving; None if there is none of that name."""
        group = self.of_backend.get(backend)
        return group.slots[backend] if group else None

    @property
    def slots(self) -> Iterator[Slot]:
        return (slot for group in self.groups for slot in group.slots.values())

    @property
    def leaving(self) -> list[Slot]:
        """The slots whose backends the configuration has no longer, or not as they are."""
        return [slot for group in self.groups for slot in group.leaving]

    @property
    def unseen(self) -> list[str]:
        """The backends of which it is not known yet whether they run."""
        return sorted(name for group in self.groups for name in group.unseen)

    def takes(self, model: str, owner: str = "") -> bool:
        """Whether a request for a model would be leased at once; one that needs ``owner`` waits for it."""
        return self.of_model[model].takes(model, owner)

    def is_waiting(self, ticket: Ticket) -> bool:
        group = self.of_model.get(ticket.model)
        return group is not None and ticket in group.queues[ticket.model]

    def waiting(self, model: str) -> Iterable[Ticket]:
        """The tickets in the queue of a model, the first first."""
        return self.of_model[model].queues[model]

    def reports(self, now: float) -> dict[str, Report]:
        """What other anvil-mux are told of the replicas here."""
        return {name: each for group in self.groups for name, each in group.reports(now).items()}

    # Facts from requests

    def requested(self, ticket: Ticket, now: float) -> Effects:
        """A request arrived: it is leased, failed or queued, as the ticket says afterwards."""
        group = self.of_model[ticket.model]
        if not group.request(ticket, now):
            return NOTHING
        effects = self._settle([group], now)
        if ticket.settled and ticket in effects.woken:
            effects = effects._replace(woken=[each for each in effects.woken if each is not ticket])
        return effects

    def released(
        self,
        ticket: Ticket,
        now: float,
        usage: tuple[int | None, int | None] = NO_USAGE,
        *,
        whole: bool = True,
    ) -> Effects:
        """A lease ended. Late after a severed drain, twice, or after its model was removed, is harmless.

        ``usage``: tokens of the input and how many of them were cached, if the engine said so. ``whole``: the
        engine gave its answer to the end.
        """
        group = self.of_model.get(ticket.model)
        if group is None:
            return NOTHING
        if group.release(ticket, now, usage, whole=whole):
            return self._settle([group], now)
        state = group.state
        return self._collected(group) if state.settled or state.taken_back else NOTHING

    def abandoned(self, ticket: Ticket, now: float, error: MuxError | None = None) -> Effects:
        """A request that waited ended by itself: its client left, or ``error`` says why it fails."""
        if not self.is_waiting(ticket):
            return NOTHING
        group = self.of_model[ticket.model]
        group.give_up(ticket, now, error)
        return self._settle([group], now)

    def first_byte(self, ticket: Ticket) -> bool:
        """The first byte of an answer came; False: too late, the request is sent to another replica."""
        group = self.of_model.get(ticket.model)
        return not ticket.severed if group is None else group.first_byte(ticket)

    # Facts from steps

    def loaded(self, step: Step, now: float, how: str) -> Effects:
        """The backend answers; ``how``: the standby level that it really came back from."""
        return self._reported(step, now, lambda group: group.loaded(step.backend, now, how))

    def load_failed(self, step: Step, now: float, error: LoadError) -> Effects:
        """The backend did not become ready, and holds nothing."""
        return self._reported(step, now, lambda group: group.load_failed(step.backend, now, error))

    def load_cancelled(self, step: Step, now: float) -> Effects:
        """The load ended before its time, and what it had begun was stopped."""
        return self._reported(step, now, lambda group: group.load_cancelled(step.backend, now))

    def evicted(self, step: Step, now: float, **left: Any) -> Effects:
        """The backend left its GPUs, or reached a deeper standby level; ``left``: see GpuGroup.evicted."""
        return self._reported(step, now, lambda group: group.evicted(step.backend, now, **left))

    def evict_failed(self, step: Step, now: float, why: str) -> Effects:
        """The backend may still hold its GPUs."""
        return self._reported(step, now, lambda group: group.evict_failed(step.backend, now, why))

    def _reported(self, step: Step, now: float, fact: Callable[[GpuGroup], object]) -> Effects:
        if self._under_way.get(step.backend) != step.number:
            return NOTHING
        del self._under_way[step.backend]
        return self._told(step.backend, now, fact)

    # Facts from engines and hosts

    def expected(self, backends: Iterable[str]) -> Effects:
        """They may run already: nothing is begun beside them until each was adopted or ``looked_at``."""
        for name in backends:
            if group := self.of_backend.get(name):
                group.expected(name)
        return NOTHING

    def looked_at(self, backend: str, now: float) -> Effects:
        """It is known whether the backend ran: what was not adopted holds nothing (any more)."""
        return self._told(backend, now, lambda group: group.looked_at(backend))

    def adopted(self, backend: str, now: float) -> Effects:
        """The backend ran before this program did; NOTHING if it cannot stay beside the others."""
        return self._took_over(backend, now, lambda group: group.adopt(backend, now))

    def adopted_standby(
        self, backend: str, now: float, how: str, residual: Mapping[str, int], host_bytes: int = 0
    ) -> Effects:
        """The backend was in standby, at the level ``how``; NOTHING if there is no room for ``residual``."""

        def fact(group: GpuGroup) -> bool:
            return group.adopt_standby(backend, now, how, residual, host_bytes)

        return self._took_over(backend, now, fact)

    def _took_over(self, backend: str, now: float, fact: Callable[[GpuGroup], bool]) -> Effects:
        group = self.of_backend.get(backend)
        return self._settle([group], now) if group is not None and fact(group) else NOTHING

    def died(self, backend: str, now: float, why: str, log: Iterable[str] = ()) -> Effects:
        """The backend ended without being told to; ``log``: what its engine had printed last."""
        return self._told(backend, now, lambda group: group.died(backend, now, why, log))

    def unanswering(self, backend: str, now: float) -> Effects:
        """The engine of the backend answers nobody: it is to be stopped without a drain."""
        return self._told(backend, now, lambda group: group.unanswering(backend, now))

    def silent(self, backend: str, now: float) -> Effects:
        """The engine of a replica was asked for its figures, and did not answer."""
        return self._told(backend, now, lambda group: group.silent(backend, now))

    def observed(self, backend: str, load: EngineLoad | None, now: float) -> Effects:
        """The engine of a replica said this of itself; None: it answered, and has no figures."""
        if group := self.of_backend.get(backend):
            group.observed(backend, load, now)
        return NOTHING

    def heard(self, reports: Mapping[str, Sequence[Report]], now: float) -> Effects:
        """Other anvil-mux said this of the replicas here."""
        for group in self.groups:
            group.hear(reports, now)
        return NOTHING

    def memory_seen(self, held: Mapping[str, int], now: float) -> Effects:
        """Other processes hold so many bytes of these GPUs."""
        return self._settle([group for group in self.groups if group.memory_seen(held)], now)

    # Facts from people

    def unload_asked(self, model: str, now: float, *, when_idle: bool = False) -> Effects:
        """The model is to be unloaded; ``when_idle``: once nobody uses it, unless it is asked for before.

        NOTHING if there is nothing to be done now.
        """
        group = self.of_model[model]
        unload = group.unload_when_idle if when_idle else group.unload_requested
        return self._settle([group], now) if unload(model, now) else NOTHING

    def pinned(self, model: str, now: float, pinned: bool) -> Effects:
        """Whether a model, once it is resident, is kept from being evicted for others."""
        group = self.of_model[model]
        group.pin_requested(model, now, pinned)
        return self._settle([group], now)

    def refused(self, error: MuxError, now: float) -> Effects:
        """Every request that waits fails with ``error``: the program ends."""
        for group in self.groups:
            group.fail_all(error, now)
        return self._settle(self.groups, now)

    def severed(self, now: float) -> Effects:
        """Every request that runs is cut: the program ends."""
        return Effects(cut=[ticket for group in self.groups for ticket in group.sever_all(now)])

    def closed(self) -> Effects:
        """The program ends: facts are still taken, but nothing is begun any more."""
        self._is_closed = True
        return NOTHING

    def reconfigured(self, config: Config, now: float, expected: Iterable[str] = ()) -> Effects:
        """From now on ``config`` holds; ``expected``: see there."""
        change = compare(self.config, config)
        self._emit(Event(now, "reloaded", "", cause=Cause("reconfigured", detail=str(change))))
        leaving: dict[str, Leaving] = dict.fromkeys(change.changed, "changed")
        leaving |= dict.fromkeys(change.removed, "removed")
        self._take(config)
        for group in self.groups:
            group.retired(leaving, self.served, now)
        self.memory.budget = config.host_memory
        orphans = self._regroup()
        self.expected(expected)
        for group in self.groups:
            group.resumed(now)
        effects = self._settle(self.groups, now)
        return effects._replace(woken=[*orphans, *effects.woken]) if orphans else effects

    def _regroup(self) -> list[Ticket]:
        """Builds the groups anew, each from those that it takes the place of.

        Returns the tickets that ended in a group of which nothing goes on.
        """
        before, of_backend, of_model = self.groups, self.of_backend, self.of_model
        self.of_model, self.of_backend, self.groups, self._ask_at = {}, {}, [], {}
        staying = {slot.name: slot.backend for each in before for slot in each.leaving}

        def homes(backend: Backend) -> list[GpuGroup]:
            """Where it was, and where others wait for its model."""
            found = of_backend.get(backend.name), of_model.get(backend.model)
            return [group for group in found if group]

        gone = dict.fromkeys(before)
        backends = [*staying.values(), *self.config.backends]
        for name, together in gpu_groups(backends, lambda backend: [each.name for each in homes(backend)]):
            members = {each.name: staying.get(each.name, each) for each in together}
            merged = list(dict.fromkeys(group for each in together for group in homes(each)))
            self.groups.append(self._make(name, members.values(), merged))
            for group in merged:
                gone.pop(group, None)
        return [ticket for group in gone for ticket in group.settled]

    def time_passed(self, now: float) -> Effects:
        """The moment ``Effects.ask_at`` has come, or a later one."""
        due = [group for group in self.groups if self._ask_at.get(group, -FOREVER) <= now]
        return self._settle(due, now)

    # From facts to effects

    def _told(self, backend: str, now: float, fact: Callable[[GpuGroup], object]) -> Effects:
        group = self.of_backend.get(backend)
        if group is None:
            return NOTHING
        fact(group)
        return self._settle([group], now)

    def _settle(self, groups: Iterable[GpuGroup], now: float) -> Effects:
        """Asks these groups what is to be done now, and all of them again while host memory changes."""
        effects = Effects([], [], [])
        for group in sorted(groups, key=_NAME):
            self._ask(group, now, effects)
        while self.memory.budget is not None and self.memory.changes != self._memory_changes:
            self._memory_changes = self.memory.changes
            for group in sorted(self.groups, key=_NAME):
                self._ask(group, now, effects)
        return effects._replace(ask_at=min(self._ask_at.values(), default=FOREVER))

    def _ask(self, group: GpuGroup, now: float, effects: Effects) -> None:
        group = self._renewed(group, now)
        if self._is_closed:
            self._collect(group, effects)
            return
        while not isinstance(step := group.next_step(now), Wait):
            self._collect(group, effects)
            if isinstance(step, Evict):
                effects.cut.extend(step.severed)  # type: ignore[attr-defined]
            effects.steps.append(self._numbered(step))  # type: ignore[attr-defined]
        self._collect(group, effects)
        self._ask_at[group] = step.until

    def _numbered(self, step: Step) -> Step:
        """``step`` with its number: that of the load that it cancels, or one of its own."""
        if not isinstance(step, Cancel):
            self._under_way[step.backend] = next(self._numbers)
        return replace(step, number=self._under_way[step.backend])

    def _collected(self, group: GpuGroup) -> Effects:
        effects = Effects([], [])
        self._collect(group, effects)
        return effects

    def _collect(self, group: GpuGroup, effects: Effects) -> None:
        if group.settled:
            effects.woken.extend(group.settled)  # type: ignore[attr-defined]
            group.settled = []
        if group.taken_back:
            effects.cut.extend(group.taken_back)  # type: ignore[attr-defined]
            group.taken_back = []

    # GPU groups

    def _make(self, name: str, members: Iterable[Backend], before: Sequence[GpuGroup] = ()) -> GpuGroup:
        members = list(members)
        coming = {
            each.name: self._wanted[each.name].model
            for each in members
            if each.name in self._wanted and self._wanted[each.name].model != each.model
        }
        made = GpuGroup(
            name,
            self.config,
            members,
            self._policy,
            self._eviction,
            self._emit,
            self.costs,
            self.memory,
            self.footprints,
            emit_leases=self._emit_leases,
            before=before,
            coming=coming,
        )
        self.of_model |= dict.fromkeys(made.queues, made)
        self.of_backend |= dict.fromkeys(made.slots, made)
        return made

    def _renewed(self, group: GpuGroup, now: float) -> GpuGroup:
        """``group``, or the one that takes its place because a slot was left for good."""
        if not group.is_outgrown:
            return group
        staying = {slot.name: slot.backend for slot in group.leaving}
        members = {name: staying.get(name) or self._wanted.get(name) for name in group.slots}
        for name in group.slots:
            del self.of_backend[name]
        for model in group.queues:
            del self.of_model[model]
        made = self._make(group.name, [each for each in members.values() if each], [group])
        self.groups[self.groups.index(group)] = made
        self._ask_at.pop(group, None)
        made.resumed(now)
        return made
