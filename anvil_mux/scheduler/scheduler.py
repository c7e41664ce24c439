"""All GPU groups of one configuration behind one interface: facts in, ``Effects`` out.

The threaded multiplexer, the simulator and the tests drive it: they say what has happened and when, and do
what the ``Effects`` say. One fact settles all GPU groups that it affects, in the order of their names, until
nothing changes any more: also those that share no GPU with it but the host's memory (settling.py). Where
backends, queues and hosts are is kept in ``Scheduler.layout`` (layout.py), which drivers may read.

No lock, no clock and no I/O: the multiplexer calls it under its lock, the simulator from its loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec

from anvil_mux.config.change import compare
from anvil_mux.config.config import Config
from anvil_mux.config.machines import gpu_name
from anvil_mux.errors import LoadError, MuxError
from anvil_mux.routing.in_flight import EngineLoad, Report
from anvil_mux.scheduler.costs import Costs, Footprints
from anvil_mux.scheduler.events import PAUSED, Cause, Event, Leaving
from anvil_mux.scheduler.group import GpuGroup
from anvil_mux.scheduler.layout import Layout, shared_settings
from anvil_mux.scheduler.policies import FOREVER
from anvil_mux.scheduler.settling import Settling
from anvil_mux.scheduler.slot import TRANSITIONS, Slot
from anvil_mux.scheduler.steps import NO_USAGE, NOTHING, RUNS, Effects, FoundBackend, Step, Ticket, TokenUsage

P = ParamSpec("P")
BackendFact = Callable[Concatenate[GpuGroup, Slot, float, P], object]
"""A fact about a backend that its GPU group takes."""


class Scheduler:
    """The facts about one configuration's GPU groups. Each comes with the moment at which it became true.

    ``first_step``: the number of the first step. Hosts outlive a scheduler: its numbers are to be its own.
    """

    def __init__(
        self,
        config: Config,
        emit: Callable[[Event], object],
        costs: Costs,
        footprints: Footprints,
        *,
        emit_leases: bool = True,
        first_step: int = 1,
    ) -> None:
        self.costs, self.footprints = costs, footprints
        self.layout = Layout(config, emit, costs, footprints, emit_leases=emit_leases)
        self._settling = Settling(self.layout, first_step)
        self._emit = emit

    # Facts from requests

    def requested(self, ticket: Ticket, now: float) -> Effects:
        """A request arrived: it is leased, failed or queued, as the ticket says afterwards."""
        group = self.layout.of_model[ticket.model]
        if not group.request(ticket, now):
            return NOTHING
        effects = self._settling.settle([group], now)
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
        group = self.layout.of_backend.get(ticket.backend or "")
        if group is None:
            return NOTHING
        if group.release(ticket, now, usage, whole=whole):
            return self._settling.settle([group], now)
        return self._settling.collected(group) if group.woken or group.cut else NOTHING

    def keep_alive_asked(self, ticket: Ticket, seconds: float, now: float) -> Effects:
        """A leased request says for how long its backend is to stay once nobody uses it."""
        group = self.layout.of_backend.get(ticket.backend or "")
        slot = group.slots[ticket.backend or ""] if group else None
        if group and slot and ticket in slot.holders:
            group.keep_alive(slot, seconds)
        return NOTHING

    def abandoned(self, ticket: Ticket, now: float, error: MuxError | None = None) -> Effects:
        """A request that waited ended by itself: its client left, or ``error`` says why it fails."""
        model = self.layout.models.get(ticket.model)
        if model is None or ticket not in model.queue:
            return NOTHING
        group = self.layout.of_model[ticket.model]
        group.abandoned(ticket, now, error)
        return self._settling.settle([group], now)

    def first_byte(self, ticket: Ticket, now: float) -> bool:
        """The first byte of an answer came; False: too late, the request is sent to another replica."""
        model = self.layout.models.get(ticket.model)
        if model and model.replicas:
            model.replicas.in_flight.first_byte(ticket, now)
        return not ticket.severed

    # Facts from steps

    def loaded(self, step: Step, now: float, level: str) -> Effects:
        """The backend answers; ``level``: the standby level that it really came back from."""
        return self._reported(step, now, GpuGroup.loaded, level)

    def load_failed(self, step: Step, now: float, error: LoadError) -> Effects:
        """The backend did not become ready, and holds nothing."""
        return self._reported(step, now, GpuGroup.load_failed, error)

    def load_cancelled(self, step: Step, now: float) -> Effects:
        """The load ended before its time, and what it had begun was stopped."""
        return self._reported(step, now, GpuGroup.load_cancelled)

    def evicted(self, step: Step, now: float, **left: Any) -> Effects:
        """The backend left its GPUs, or reached a deeper standby level; ``left``: see ``GroupFacts``."""
        return self._reported(step, now, GpuGroup.evicted, **left)

    def evict_failed(self, step: Step, now: float, why: str) -> Effects:
        """The backend may still hold its GPUs."""
        return self._reported(step, now, GpuGroup.evict_failed, why)

    def report_failed(self, step: Step, now: float, why: str) -> Effects:
        """The report of a step was a mistake: if its backend is still as it was, it is to be stopped."""
        slot = self.layout.slot(step.backend)
        if slot is None or (slot.state, "evict_failed") not in TRANSITIONS:
            return NOTHING
        self._settling.forget_steps([step.backend])
        return self._told(step.backend, now, GpuGroup.evict_failed, why)

    def _reported(
        self, step: Step, now: float, fact: BackendFact[P], *about: P.args, **more: P.kwargs
    ) -> Effects:
        """The group of its backend takes how a step ended, if the step is still under way."""
        ends = self._settling.ends(step)
        return self._told(step.backend, now, fact, *about, **more) if ends else NOTHING

    def _told(
        self, backend: str, now: float, fact: BackendFact[P], *about: P.args, **more: P.kwargs
    ) -> Effects:
        """The group of a backend takes a fact, if it is known what runs on its host."""
        group = self.layout.of_backend.get(backend)
        if group is None or group.slots[backend].host.is_cut_off:
            return NOTHING
        fact(group, group.slots[backend], now, *about, **more)
        return self._settling.settle([group], now)

    # Facts from engines and hosts

    def expected(self, backends: Iterable[str]) -> Effects:
        """Backends may run already: nothing is begun beside them until each was adopted or ``looked_at``."""
        for name in backends:
            group = self.layout.of_backend.get(name)
            if group and not group.slots[name].host.is_lost:
                group.unseen.add(name)
        return NOTHING

    def looked_at(self, backend: str, now: float) -> Effects:
        """The backend was looked at: if it was not adopted it holds nothing (any more)."""
        return self._told(backend, now, GpuGroup.looked_at)

    def adopted(self, backend: str, now: float, found: FoundBackend = RUNS) -> Effects:
        """The backend ran, or was in standby, before this program did; NOTHING if it cannot stay so."""
        group = self.layout.of_backend.get(backend)
        if group is None or group.slots[backend].host.is_lost:
            return NOTHING
        stays = group.adopt(group.slots[backend], now, found)
        return self._settling.settle([group], now) if stays else NOTHING

    def died(self, backend: str, now: float, why: str, log: Iterable[str] = ()) -> Effects:
        """The backend ended without being told to; ``log``: what its engine had printed last."""
        return self._told(backend, now, GpuGroup.died, why, log)

    def unanswering(self, backend: str, now: float) -> Effects:
        """The engine of the backend does not answer: it is to be stopped without a drain."""
        return self._told(backend, now, GpuGroup.unanswering)

    def silent(self, backend: str, now: float) -> Effects:
        """The engine of a replica was asked for its figures, and did not answer."""
        return self._told(backend, now, GpuGroup.silent)

    def observed(self, backend: str, load: EngineLoad | None, now: float) -> Effects:
        """The engine of a replica reported its load; None: it answered, and has no figures."""
        slot = self.layout.slot(backend)
        if slot and (replicas := self.layout.models[slot.model].replicas):
            replicas.in_flight.observe(backend, load, now)
        return NOTHING

    def reports(self, model: str, now: float) -> dict[str, Report]:
        """The reports for other anvil-mux on the replicas of a model; a question, and no fact."""
        found = self.layout.models.get(model)
        return found.replicas.in_flight.reports(now) if found and found.replicas else {}

    def heard(self, model: str, reports: Mapping[str, Sequence[Report]], now: float) -> Effects:
        """Other anvil-mux reported what they do at the replicas of a model."""
        found = self.layout.models.get(model)
        if found and found.replicas:
            found.replicas.in_flight.hear(reports, now)
        return NOTHING

    def memory_seen(self, held: Mapping[str, int], now: float, host: str = "") -> Effects:
        """Other processes hold so many bytes of these GPUs of a host."""
        named = {gpu_name(host, id): amount for id, amount in held.items()} if host else held
        record = self.layout.hosts.get(host)
        there = [] if record is None or record.is_lost else self.layout.on_host(host)
        return self._settling.settle([each for each in there if each.memory_seen(named, now)], now)

    # Facts about hosts

    def host_away(self, host: str, now: float, away: bool) -> Effects:
        """A host cannot be steered for now, but its engines answer; not ``away``: it can be again."""
        record = self.layout.hosts.get(host)
        if record is None or record.is_away is away:
            return NOTHING
        record.is_away = away
        kind = "host_away" if away else "host_heard"
        groups = self._host_is(kind, host, now)
        for group in groups:
            group.changed()
        return self._settling.settle(groups, now)

    def _host_is(self, kind: str, host: str, now: float) -> list[GpuGroup]:
        """Emit what has become of a host; its groups."""
        self._emit(Event(now, kind, "", cause=Cause(kind, host=host)))
        return self.layout.on_host(host)

    def host_lost(self, host: str, now: float) -> Effects:
        """A host does not answer: its leases are severed, and nothing is begun there.

        How its steps under way end will not be known. What ran there may still run, and keeps its GPUs.
        """
        record = self.layout.hosts.get(host)
        if record is None or record.is_lost:
            return NOTHING
        record.is_lost, record.is_away = True, False
        record.since = now
        groups = self._host_is("host_lost", host, now)
        for group in groups:
            self._settling.forget_steps(group.slots)
            group.host_lost(now)
        return self._settling.settle(groups, now)

    def host_back(self, host: str, now: float, found: Mapping[str, FoundBackend]) -> Effects:
        """A lost host answers again; ``found``: its backends that run or are in standby, and how.

        A backend that was not found holds nothing. One that was found and cannot stay is stopped.
        """
        record = self.layout.hosts.get(host)
        if record is None or not record.is_lost:
            return NOTHING
        groups = self.layout.on_host(host)
        held = [(group, group.host_freed(now)) for group in groups]
        record.is_lost, record.is_gone = False, False
        self._host_is("host_back", host, now)
        for group, slots in held:
            self._settling.forget_steps([slot.name for slot in slots])
            group.host_back(now, found, slots)
        return self._settling.settle(groups, now)

    def host_gone(self, host: str, now: float) -> Effects:
        """An operator declares that nothing runs on a lost host any more; it stays lost until it is back."""
        record = self.layout.hosts.get(host)
        if record is None or not record.is_lost or record.is_gone:
            return NOTHING
        record.is_gone = True
        groups = self.layout.on_host(host)
        for group in groups:
            group.host_gone(now)
        return self._settling.settle(groups, now)

    # Facts from people

    def host_drained(self, host: str, now: float, drained: bool) -> Effects:
        """A host is to have nothing on it, and to get nothing; not ``drained``: it may have again."""
        record = self.layout.hosts.get(host)
        if record is None or record.is_drained is drained:
            return NOTHING
        record.is_drained = drained
        kind = "host_drained" if drained else "host_undrained"
        groups = self._host_is(kind, host, now)
        for group in groups:
            group.host_cleared(now, cleared=drained)
        return self._settling.settle(groups, now)

    def paused(self, now: float, until: float = FOREVER) -> Effects:
        """Nothing is to stay or be loaded on any host until a moment, or until ``resumed`` is said."""
        pause = self.layout.pause
        if pause.is_on and pause.until == until:
            return NOTHING
        was_on = pause.is_on
        pause.begin(now, until)
        self._emit(Event(now, "paused", "", seconds=until - now, cause=PAUSED))
        return self._settling.settle((), now) if was_on else self._clear(now, cleared=True)

    def resumed(self, now: float) -> Effects:
        """Models may be loaded again; NOTHING if that is so already."""
        return self._resume(now, Cause("resumed")) if self.layout.pause.is_on else NOTHING

    def _resume(self, now: float, cause: Cause) -> Effects:
        self.layout.pause.end()
        self._emit(Event(now, "resumed", "", cause=cause))
        return self._clear(now, cleared=False)

    def _clear(self, now: float, *, cleared: bool) -> Effects:
        """Have all go that is on any host, or stay."""
        for group in self.layout.groups:
            group.host_cleared(now, cleared=cleared)
        return self._settling.settle(self.layout.groups, now)

    def unload_asked(self, model: str, now: float, *, when_idle: bool = False) -> Effects:
        """The model is to be unloaded; ``when_idle``: once nobody uses it, unless it is asked for before.

        NOTHING if there is nothing to be done now; UnknownModel if it was served until a moment ago.
        """
        group, found = self.layout.find(model)
        is_now = group.unload_when_idle(found, now) if when_idle else group.unload(found, now)
        return self._settling.settle(self.layout.groups_of[model], now) if is_now else NOTHING

    def pinned(self, model: str, now: float, pinned: bool) -> Effects:
        """Whether a model, once it is resident, is kept from being evicted for others; or UnknownModel."""
        group, found = self.layout.find(model)
        group.pin(found, now, pinned=pinned)
        return self._settling.settle(self.layout.groups_of[model], now)

    def refused(self, error: MuxError, now: float) -> Effects:
        """Every request that waits fails with ``error``: the program ends."""
        for group in self.layout.groups:
            group.fail_all(error, now)
        return self._settling.settle(self.layout.groups, now)

    def severed(self, now: float) -> Effects:
        """Every request that runs is cut: the program ends."""
        return Effects(cut=[ticket for group in self.layout.groups for ticket in group.sever_all(now)])

    def closed(self) -> Effects:
        """The program ends: facts are still taken, but nothing is begun any more."""
        self._settling.close()
        return NOTHING

    def reconfigured(self, config: Config, now: float, expected: Iterable[str] = ()) -> Effects:
        """Another configuration holds from now on; ``expected``: backends that may run already."""
        change, settings = compare(self.layout.config, config), shared_settings(config)
        self._emit(Event(now, "reloaded", "", cause=Cause("reconfigured", detail=str(change))))
        leaving: dict[str, Leaving] = dict.fromkeys(change.changed, "changed")
        leaving |= dict.fromkeys(change.removed, "removed")
        for group in self.layout.groups:
            group.retire(leaving, settings.models.keys(), now)
        if not self.layout.served <= settings.models.keys():
            self.costs.keep(settings.models.__contains__)
        self.layout.take(settings)
        exchange = self.layout.regroup()
        self.expected(expected)
        return self._settling.settle(self._settling.exchanged(exchange, now), now, exchange.gone)

    def time_passed(self, now: float) -> Effects:
        """The moment ``Effects.ask_at`` has come, or a later one."""
        pause = self.layout.pause
        if pause.until <= now:
            return self._resume(now, Cause("pause_over", seconds=now - pause.since))
        return self._settling.settle(self._settling.due(now), now)
