"""All GPU groups of one configuration behind one interface: facts in, ``Effects`` out.

The threaded multiplexer, the simulator and the tests drive it: they say what has happened and when, and do
what the ``Effects`` say. One fact settles all GPU groups that it affects, in the order of their names, until
nothing changes any more: also those that share no GPU with it but the host's memory. A step has a number; a
report of one that is no longer under way is ignored.

A reload changes the configuration while requests run. A backend that goes on (change.py) keeps its slot with
all that hangs on it: state, leases, memory. One that was changed or removed is leaving (group.py): its slot
keeps the description by which it was started until it holds nothing any more, and is then given to the new
description, or taken away. Queues belong to models, so a request for a backend that changed waits on, and one
for a model that is served no longer fails at once. No GPU group is altered: another one takes its place
and goes on from it, so what follows from the configuration is computed in one place. GPU groups that a new
backend ties together become one, and stay one: swaps that are under way may not be cut.

No lock, no clock and no I/O: the multiplexer calls it under its lock, the simulator from its loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from operator import attrgetter
from typing import Any, NamedTuple

from anvil_mux.config.change import compare
from anvil_mux.config.config import Backend, Config, gpu_name
from anvil_mux.errors import LoadError, MuxError
from anvil_mux.routing.in_flight import EngineLoad, Report
from anvil_mux.scheduler.building import Common, Draft, build_models, build_state, place
from anvil_mux.scheduler.causes import Cause, Leaving
from anvil_mux.scheduler.costs import Costs
from anvil_mux.scheduler.events import Event
from anvil_mux.scheduler.eviction import build_eviction
from anvil_mux.scheduler.footprint import Footprints
from anvil_mux.scheduler.group import GpuGroup
from anvil_mux.scheduler.host_facts import FoundBackend
from anvil_mux.scheduler.hosts import HostRecord
from anvil_mux.scheduler.model import Model
from anvil_mux.scheduler.placement import gpu_groups
from anvil_mux.scheduler.planner import nearest
from anvil_mux.scheduler.policies import FOREVER, build_policy
from anvil_mux.scheduler.slot import Slot
from anvil_mux.scheduler.standby import HostMemory
from anvil_mux.scheduler.state import GroupState
from anvil_mux.scheduler.steps import (
    NO_USAGE,
    NOTHING,
    Cancel,
    Effects,
    Evict,
    Step,
    Ticket,
    TokenUsage,
    Wait,
)

_NAME = attrgetter("name")


class _Gathered(NamedTuple):
    """The effects of a fact, while its groups are asked: see ``Effects``."""

    woken: list[Ticket]
    cut: list[Ticket]
    steps: list[Step]


class _SharedState(NamedTuple):
    """What the GPU groups of one model have in common."""

    version: int
    home: str
    waits: bool
    ready: int
    is_coming: bool


_UNSEEN = _SharedState(-1, "", waits=False, ready=0, is_coming=False)


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
        self.models: dict[str, Model] = {}
        """Also those that are about to go."""
        self.of_model: dict[str, GpuGroup] = {}
        """Model -> the group in which its queue stands."""
        self.of_backend: dict[str, GpuGroup] = {}
        self.groups: list[GpuGroup] = []
        self._states: dict[str, list[GroupState]] = {}
        self._groups_of: dict[str, list[GpuGroup]] = {}
        """Model -> the groups that have backends of it; by their names, like its states."""
        self._hosts: dict[str, HostRecord] = {}
        self._memories: dict[str, HostMemory] = {}
        self._emit = emit
        self._emit_leases = emit_leases
        self._take(config)
        self._ask_at: dict[GpuGroup, float] = {}
        """When each group is asked again without a new fact."""
        self._numbers = count(1)
        self._under_way: dict[str, int] = {}
        """Backend -> the number of its step that has not been reported yet."""
        self._memory_changes: dict[str, int] = {}
        self._is_closed = False
        groups = gpu_groups(config.backends)
        self._build([Draft(name, members[0].host, members) for name, members in groups], [])

    def _take(self, config: Config) -> None:
        self.config = config
        self._wanted = {backend.name: backend for backend in config.backends}
        self.served = {backend.model for backend in config.backends}
        for name in ("", *{backend.host for backend in config.backends}):
            self._hosts.setdefault(name, HostRecord(name))
            memory = self._memories.setdefault(name, HostMemory(None, self.footprints))
            memory.budget = config.memory_of(name)
        self._bounded = {name: each for name, each in self._memories.items() if each.budget is not None}
        """The memories of the hosts where it is bounded."""
        self._common = Common(
            config=config,
            policy=build_policy(config.policy, config.policy_settings),
            eviction=build_eviction(config.eviction, config.eviction_settings),
            emit=self._emit,
            emit_leases=self._emit_leases,
            costs=self.costs,
            footprints=self.footprints,
            hosts=self._hosts,
            memories=self._memories,
            states=self._states,
        )

    @property
    def memory(self) -> HostMemory:
        """That of the host that anvil-mux runs on."""
        return self._memories[""]

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
        model = self.models.get(ticket.model)
        return model is not None and ticket in model.queue

    def waiting(self, model: str) -> Iterable[Ticket]:
        """The tickets in the queue of a model, the first first."""
        return self.models[model].queue

    def reports(self, now: float) -> dict[str, Report]:
        """The reports for other anvil-mux on the replicas here."""
        trackers = [model.replicas.in_flight for model in self.models.values() if model.replicas]
        return {name: each for in_flight in trackers for name, each in in_flight.reports(now).items()}

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
        usage: TokenUsage = NO_USAGE,
        *,
        whole: bool = True,
    ) -> Effects:
        """A lease ended. Late after a severed drain, twice, or after its model was removed, is harmless.

        ``usage``: tokens of the input and how many of them were cached, if the engine said so. ``whole``: the
        engine gave its answer to the end.
        """
        group = self.of_backend.get(ticket.backend or "")
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
            group = self.of_backend.get(name)
            if group and not group.host.is_lost:
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
        if group is None or group.host.is_lost or not fact(group):
            return NOTHING
        return self._settle([group], now)

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
        for model in self.models.values():
            if model.replicas:
                model.replicas.in_flight.hear(reports, now)
        return NOTHING

    def memory_seen(self, held: Mapping[str, int], now: float, host: str = "") -> Effects:
        """Other processes hold so many bytes of these GPUs of a host."""
        named = {gpu_name(host, id): amount for id, amount in held.items()} if host else held
        there = [group for group in self._groups_on(host) if not group.host.is_lost]
        return self._settle([group for group in there if group.memory_seen(named)], now)

    # Facts about hosts

    def host_lost(self, host: str, now: float) -> Effects:
        """Nobody hears of a host: its leases are severed, and nothing is begun there.

        How its steps under way end, nobody will know. Its GPUs go to nobody else: what ran there may run.
        """
        record = self._hosts.get(host)
        if record is None or record.is_lost:
            return NOTHING
        record.is_lost = True
        self._emit(Event(now, "host_lost", "", cause=Cause("host_lost", host=host)))
        groups = self._groups_on(host)
        for group in groups:
            for name in group.slots:
                self._under_way.pop(name, None)
            group.host_lost(now)
        return self._settle(groups, now)

    def host_back(self, host: str, now: float, found: Mapping[str, FoundBackend]) -> Effects:
        """A lost host is heard of again; ``found``: its backends that run or are in standby, and how.

        What was not found holds nothing. What was and cannot stay is stopped.
        """
        record = self._hosts.get(host)
        if record is None or not record.is_lost:
            return NOTHING
        record.is_lost = False
        self._emit(Event(now, "host_back", "", cause=Cause("host_back", host=host)))
        groups = self._groups_on(host)
        for group in groups:
            group.host_back(now, found)
        return self._settle(groups, now)

    def host_gone(self, host: str, now: float) -> Effects:
        """Somebody says that nothing runs on a lost host any more; it stays lost until it is back."""
        groups = [group for group in self._groups_on(host) if group.host.is_lost]
        for group in groups:
            group.host_gone(now)
        return self._settle(groups, now) if groups else NOTHING

    def _groups_on(self, host: str) -> list[GpuGroup]:
        return sorted([group for group in self.groups if group.host.name == host], key=_NAME)

    # Facts from people

    def unload_asked(self, model: str, now: float, *, when_idle: bool = False) -> Effects:
        """The model is to be unloaded; ``when_idle``: once nobody uses it, unless it is asked for before.

        NOTHING if there is nothing to be done now.
        """
        groups = self._groups_of[model]
        if when_idle:
            is_now = groups[0].unload_when_idle(model, now)
        else:
            is_now = groups[0].unload_requested(model, now)
        return self._settle(groups, now) if is_now else NOTHING

    def pinned(self, model: str, now: float, pinned: bool) -> Effects:
        """Whether a model, once it is resident, is kept from being evicted for others."""
        groups = self._groups_of[model]
        groups[0].pin_requested(model, now, pinned)
        return self._settle(groups, now)

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
        before, of_backend = self.groups, self.of_backend
        self._ask_at = {}
        staying = {slot.name: slot.backend for each in before for slot in each.leaving}

        def homes(backend: Backend) -> list[GpuGroup]:
            """Where it was."""
            group = of_backend.get(backend.name)
            return [group] if group and group.host.name == backend.host else []

        gone = dict.fromkeys(before)
        drafts = []
        backends = [*staying.values(), *self.config.backends]
        for name, together in gpu_groups(backends, lambda backend: [each.name for each in homes(backend)]):
            members = {each.name: staying.get(each.name, each) for each in together}
            merged = list(dict.fromkeys(group for each in together for group in homes(each)))
            before_it = [group.state for group in merged]
            drafts.append(Draft(name, together[0].host, list(members.values()), before_it))
            for group in merged:
                gone.pop(group, None)
        self._build(drafts, [])
        return [ticket for group in gone for ticket in group.state.settled]

    def time_passed(self, now: float) -> Effects:
        """The moment ``Effects.ask_at`` has come, or a later one."""
        due = [group for group in self.groups if self._ask_at.get(group, -FOREVER) <= now]
        return self._settle(due, now)

    # From facts to effects

    def _told(self, backend: str, now: float, fact: Callable[[GpuGroup], object]) -> Effects:
        group = self.of_backend.get(backend)
        if group is None or group.host.is_lost:
            return NOTHING
        fact(group)
        return self._settle([group], now)

    def _settle(self, groups: Iterable[GpuGroup], now: float) -> Effects:
        """Asks these groups what is to be done now, and all that this affects, until nothing changes.

        Those are the groups of one host, where its memory is bounded, and the groups of one model.
        """
        found = _Gathered([], [], [])
        asked = sorted(groups, key=_NAME)
        if self._spread:
            asked = self._with_siblings(asked, now)
        while asked:
            for group in asked:
                self._ask(group, now, found)
            asked = self._affected(now) if self._bounded or self._spread else []
        return Effects(*found, ask_at=min(self._ask_at.values(), default=FOREVER))

    def _affected(self, now: float) -> list[GpuGroup]:
        """The groups that are to be asked again since others have changed what they share."""
        hosts = set()
        for name, memory in self._bounded.items():
            if memory.changes != self._memory_changes.get(name, 0):
                self._memory_changes[name] = memory.changes
                hosts.add(name)
        found = [group for group in self.groups if group.host.name in hosts] if hosts else []
        if self._spread:
            found += [group for name in self._moved(now) for group in self._groups_of[name]]
        return sorted(dict.fromkeys(found), key=_NAME)

    def _with_siblings(self, groups: Iterable[GpuGroup], now: float) -> list[GpuGroup]:
        """``groups``, and those that have backends of the same models."""
        moved = self._moved(now)
        models = [name for group in groups for name in group.queues if name in self._spread]
        found = [*groups, *(group for name in (*models, *moved) for group in self._groups_of[name])]
        return sorted(dict.fromkeys(found), key=_NAME)

    def _moved(self, now: float) -> list[str]:
        """The models with backends in several groups that are not as they were when these were last asked.

        Where a queue stands is chosen here: anew when the state of one of the groups has changed.
        """
        changed = []
        for name, before in self._spread.items():
            model, states = self.models[name], self._states[name]
            version = sum([state.version for state in states])
            if model.queue.tickets and version != before.version:
                home = nearest(states, model, now)
                model.home = home.name
                self.of_model[name] = next(each for each in self._groups_of[name] if each.state is home)
            seen = _SharedState(
                version, model.home, bool(model.queue.tickets), len(model.ready), model.is_coming
            )
            if seen[1:] != before[1:]:
                changed.append(name)
            self._spread[name] = seen
        return changed

    def _ask(self, group: GpuGroup, now: float, found: _Gathered) -> None:
        group = self._renewed(group, now)
        if self._is_closed:
            self._collect(group, found)
            return
        while not isinstance(step := group.next_step(now), Wait):
            self._collect(group, found)
            if isinstance(step, Evict):
                found.cut.extend(step.severed)
            found.steps.append(self._numbered(step))
        self._collect(group, found)
        self._ask_at[group] = step.until

    def _numbered(self, step: Step) -> Step:
        """``step`` with its number: that of the load that it cancels, or one of its own."""
        if not isinstance(step, Cancel):
            self._under_way[step.backend] = next(self._numbers)
        return replace(step, number=self._under_way[step.backend])

    def _collected(self, group: GpuGroup) -> Effects:
        found = _Gathered([], [], [])
        self._collect(group, found)
        return Effects(*found)

    def _collect(self, group: GpuGroup, found: _Gathered) -> None:
        state = group.state
        if state.settled:
            found.woken.extend(state.settled)
            state.settled = []
        if state.taken_back:
            found.cut.extend(state.taken_back)
            state.taken_back = []

    # GPU groups

    def _build(self, drafts: Sequence[Draft], others: Sequence[GpuGroup]) -> None:
        """From now on the groups are those of ``drafts``, and ``others`` that go on as they are."""
        placed = [place(each, self._common) for each in drafts]
        slots = [slot for placement in placed for slot in placement.slots.values()]
        affected = {model for draft in drafts for state in draft.before for model in state.models}
        slots_there = [slot for group in others for slot in group.slots.values()]
        coming = self._coming([*slots, *slots_there])
        affected |= {slot.model for slot in slots} | {coming.get(slot.name, slot.model) for slot in slots}
        shared = [s for s in slots_there if s.model in affected or coming.get(s.name) in affected]
        models = build_models([*slots, *shared], self.config, coming, self.models)
        models = {name: model for name, model in models.items() if name in affected} if others else models
        self.models = {**{n: m for n, m in self.models.items() if others and n not in affected}, **models}
        made = []
        for draft, placement in zip(drafts, placed, strict=True):
            state = build_state(draft, placement, models, self._common)
            made.append(GpuGroup(state, self._groups_of))
        for group in others:
            group.state.models.update({name: models[name] for name in group.queues if name in models})
        self.groups = [*others, *made]
        self._index()

    def _coming(self, slots: Iterable[Slot]) -> dict[str, str]:
        """Slot that is about to be left -> the model that it will be of then."""
        wanted = {slot.name: self._wanted[slot.name].model for slot in slots if slot.name in self._wanted}
        return {
            slot.name: wanted[slot.name] for slot in slots if wanted.get(slot.name, slot.model) != slot.model
        }

    def _index(self) -> None:
        """Who is where, now that there are other groups than before."""
        self.of_backend = {name: group for group in self.groups for name in group.slots}
        self._groups_of.clear()  # the groups have it too, and the states
        for group in sorted(self.groups, key=_NAME):
            for name in group.queues:
                self._groups_of.setdefault(name, []).append(group)
        self._states.clear()
        self._states.update({name: [each.state for each in own] for name, own in self._groups_of.items()})
        self.of_model = {}
        for name, own in self._groups_of.items():
            home = next((each for each in own if each.name == self.models[name].home), own[0])
            self.models[name].home = home.name if len(own) > 1 else ""
            self.of_model[name] = home
        self._spread = {name: _UNSEEN for name, own in self._groups_of.items() if len(own) > 1}
        """The models with backends in several groups, as they were when these were last asked."""
        for group in self.groups:
            group.remodelled()

    def _renewed(self, group: GpuGroup, now: float) -> GpuGroup:
        """``group``, or the one that takes its place because a slot was left for good."""
        if not group.is_outgrown:
            return group
        staying = {slot.name: slot.backend for slot in group.leaving}
        members = [staying.get(name) or self._wanted.get(name) for name in group.slots]
        draft = Draft(group.name, group.host.name, [each for each in members if each], [group.state])
        position = self.groups.index(group)
        self._build([draft], [each for each in self.groups if each is not group])
        made = self.groups.pop()
        self.groups.insert(position, made)
        self._ask_at.pop(group, None)
        made.resumed(now)
        return made
