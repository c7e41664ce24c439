"""All GPU groups of one configuration behind one interface: facts in, ``Effects`` out.

The threaded multiplexer, the simulator and the tests drive it: they say what has happened and when, and do
what the ``Effects`` say. Where backends, queues and hosts are is kept in ``Scheduler.layout`` (layout.py),
which drivers may read.

One fact settles all GPU groups that it affects, in the order of their names: they are asked for their next
steps until nothing changes any more. Asked are the groups of the fact, and those with which they share
something that has changed: the memory of a host, where it is bounded, or a model with backends in several
groups. Of a model only those are asked that it concerns: where its queue stands, a swap is to load it, it is
to be preloaded, too many of it are resident, or another replica may be worth a load. Steps are numbered, so
that a report of one that is no longer under way is recognized.

No lock, no clock and no I/O: the multiplexer calls it under its lock, the simulator from its loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any, Concatenate, NamedTuple, ParamSpec

from anvil_mux.config.change import compare
from anvil_mux.config.config import Config
from anvil_mux.config.machines import gpu_name
from anvil_mux.errors import LoadError, MuxError
from anvil_mux.routing.in_flight import EngineLoad, InFlightTracker, Report
from anvil_mux.scheduler.costs import Costs, Footprints
from anvil_mux.scheduler.events import PAUSED, Cause, Event, Leaving
from anvil_mux.scheduler.group import GpuGroup
from anvil_mux.scheduler.layout import BY_NAME, Exchanged, Layout, shared_settings
from anvil_mux.scheduler.model import Model
from anvil_mux.scheduler.policies import FOREVER
from anvil_mux.scheduler.slot import (
    NO_USAGE,
    NOTHING,
    RUNS,
    TRANSITIONS,
    Cancel,
    Effects,
    Evict,
    FoundBackend,
    HostRecord,
    Slot,
    Step,
    Ticket,
    TokenUsage,
    Wait,
)
from anvil_mux.scheduler.state import could_spill, with_room

UNWOKEN_SECONDS = 60.0
"""How long nobody wakes a host that did not wake."""
AFTER_MISTAKE_SECONDS = 1.0
"""When a GPU group is asked again in which something went wrong."""


class _Gathered(NamedTuple):
    """The effects of a fact, while its groups are asked: see ``Effects``."""

    woken: list[Ticket]
    cut: list[Ticket]
    steps: list[Step]
    mistakes: list[Exception]


class _SharedState(NamedTuple):
    """The state that all GPU groups of one model share."""

    queue_group: str
    waits: bool
    ready: int
    is_coming: bool
    counted: int


_UNSEEN = _SharedState("", waits=False, ready=0, is_coming=False, counted=0)


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
        self._emit = emit
        self._moments: dict[GpuGroup, float] = {}
        """When each group is to be asked again without a new fact. One that is missing was never asked."""
        self._numbers = count(first_step)
        self._under_way: dict[str, int] = {}
        """Backend -> the number of its step that has not been reported yet."""
        self._shared: dict[str, _SharedState] = {}
        """Models with backends in several groups, as they were when these were last asked."""
        self._is_closed = False

    # Facts from requests

    def requested(self, ticket: Ticket, now: float) -> Effects:
        """A request arrived: it is leased, failed or queued, as the ticket says afterwards."""
        group = self.layout.of_model[ticket.model]
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
        group = self.layout.of_backend.get(ticket.backend or "")
        if group is None:
            return NOTHING
        if group.release(ticket, now, usage, whole=whole):
            return self._settle([group], now)
        return self._collected(group) if group.woken or group.cut else NOTHING

    def keep_alive_asked(self, ticket: Ticket, seconds: float, now: float) -> Effects:
        """A leased request says for how long its backend is to stay once nobody uses it."""
        slot = self.layout.slot(ticket.backend or "")
        if slot and ticket in slot.holders:
            self.layout.of_backend[slot.name].keep_alive(slot, seconds)
        return NOTHING

    def abandoned(self, ticket: Ticket, now: float, error: MuxError | None = None) -> Effects:
        """A request that waited ended by itself: its client left, or ``error`` says why it fails."""
        model = self.layout.models.get(ticket.model)
        if model is None or ticket not in model.queue:
            return NOTHING
        group = self.layout.of_model[ticket.model]
        group.abandoned(ticket, now, error)
        return self._settle([group], now)

    def first_byte(self, ticket: Ticket, now: float) -> Effects:
        """The first byte of an answer came; one that was severed before is not to be shown.

        Where another replica is on its way, which may be loaded for nobody from now on, ``time_passed`` is to
        be said at once: whoever relays the answer has no time for what follows.
        """
        model = self.layout.models.get(ticket.model)
        if model is None or model.replicas is None:
            return NOTHING
        model.replicas.in_flight.first_byte(ticket, now)
        if not model.is_coming:
            return NOTHING
        for group in self.layout.groups_of[model.name]:
            self._moments[group] = now
        return Effects(ask_at=now)

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

    def evict_not_begun(self, step: Step, now: float, why: str) -> Effects:
        """Nothing of a step was done, since what stops services on its host does not answer; ``why``.

        The host is away until its watch says that it is heard again.
        """
        if self._under_way.get(step.backend) != step.number:
            return NOTHING
        del self._under_way[step.backend]
        group = self.layout.of_backend.get(step.backend)
        if group is None or group.slots[step.backend].host.is_cut_off:
            return NOTHING
        slot = group.slots[step.backend]
        group.evict_not_begun(slot, now, why)
        return self._settle({group, *self._note_away(slot.host, now, why, away=True)}, now)

    def report_failed(self, step: Step, now: float, why: str) -> Effects:
        """The report of a step was a mistake: if its backend is still as it was, it is to be stopped."""
        slot = self.layout.slot(step.backend)
        if slot is None or (slot.state, "evict_failed") not in TRANSITIONS:
            return NOTHING
        self._forget_steps([step.backend])
        return self._told(step.backend, now, GpuGroup.evict_failed, why)

    def _reported(
        self, step: Step, now: float, fact: BackendFact[P], *about: P.args, **more: P.kwargs
    ) -> Effects:
        """The group of its backend takes how a step ended, if the step is still under way."""
        if self._under_way.get(step.backend) != step.number:
            return NOTHING
        del self._under_way[step.backend]
        return self._told(step.backend, now, fact, *about, **more)

    def _told(
        self, backend: str, now: float, fact: BackendFact[P], *about: P.args, **more: P.kwargs
    ) -> Effects:
        """The group of a backend takes a fact, if it is known what runs on its host."""
        group = self.layout.of_backend.get(backend)
        if group is None or group.slots[backend].host.is_cut_off:
            return NOTHING
        fact(group, group.slots[backend], now, *about, **more)
        more_replicas = self._could_spill(now) if fact is GpuGroup.loaded else ()
        return self._settle(dict.fromkeys((group, *more_replicas)), now)

    def _could_spill(self, now: float) -> list[GpuGroup]:
        """Return the groups in which another replica of a busy model may be worth a load.

        They are asked after each load: what it took is learned, and may decide there.
        """
        layout = self.layout
        busy = [model for model in layout.models.values() if model.replicas and model.ready]
        return [group for model in busy for group in could_spill(layout.groups_of[model.name], model, now)]

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
        return self._settle([group], now) if stays else NOTHING

    def died(self, backend: str, now: float, why: str, log: Iterable[str] = ()) -> Effects:
        """The backend ended without being told to; ``log``: what its engine had printed last."""
        return self._told(backend, now, GpuGroup.died, why, log)

    def unanswering(self, backend: str, now: float) -> Effects:
        """The engine of the backend does not answer: it is to be stopped without a drain."""
        return self._told(backend, now, GpuGroup.unanswering)

    def service_paused(self, backend: str, container: str, now: float) -> Effects:
        """The container of the backend, which has this name, was paused by hand; "": it goes on."""
        return self._told(backend, now, GpuGroup.service_paused, container)

    def silent(self, backend: str, now: float) -> Effects:
        """The engine of a replica was asked for its figures, and did not answer."""
        return self._told(backend, now, GpuGroup.silent)

    def observed(self, backend: str, load: EngineLoad | None, now: float) -> Effects:
        """The engine of a replica reported its load; None: it answered, and has no figures."""
        slot = self.layout.slot(backend)
        if slot and (in_flight := self._in_flight(slot.model)):
            in_flight.observe(backend, load, now)
        return NOTHING

    def reports(self, model: str, now: float) -> dict[str, Report]:
        """The reports for other anvil-mux on the replicas of a model; a question, and no fact."""
        in_flight = self._in_flight(model)
        return in_flight.reports(now) if in_flight else {}

    def heard(self, model: str, reports: Mapping[str, Sequence[Report]], now: float) -> Effects:
        """Other anvil-mux reported what they do at the replicas of a model."""
        if in_flight := self._in_flight(model):
            in_flight.hear(reports, now)
        return NOTHING

    def _in_flight(self, model: str) -> InFlightTracker | None:
        """The tracker of the replicas of a model; None: it has one backend, or is gone."""
        found = self.layout.models.get(model)
        return found.replicas.in_flight if found and found.replicas else None

    def memory_seen(self, held: Mapping[str, int], now: float, host: str = "") -> Effects:
        """Other processes hold so many bytes of these GPUs of a host."""
        named = {gpu_name(host, id): amount for id, amount in held.items()} if host else held
        record = self.layout.hosts.get(host)
        there = [] if record is None or record.is_lost else self.layout.on_host(host)
        return self._settle([each for each in there if each.memory_seen(named, now)], now)

    # Facts about hosts

    def host_away(self, host: str, now: float, away: bool, why: str = "") -> Effects:
        """A host cannot be controlled for now, but its engines answer; not ``away``: it can be again.

        ``why``: the reason, for people.
        """
        record = self.layout.hosts.get(host)
        groups = self._note_away(record, now, why, away=away) if record else ()
        return self._settle(groups, now) if groups else NOTHING

    def _note_away(self, record: HostRecord, now: float, why: str, *, away: bool) -> Sequence[GpuGroup]:
        """Note whether a host can be controlled; return its groups if that is news."""
        if record.is_away is away:
            if away:
                record.why = why
            return ()
        record.is_away, record.why = away, why
        groups = self._host_is("host_away" if away else "host_heard", record.name, now)
        for group in groups:
            if away:
                group.host_away(now)
            else:
                group.changed()
        return groups

    def _host_is(self, kind: str, host: str, now: float) -> list[GpuGroup]:
        """Emit what has become of a host; its groups."""
        self._emit(Event(now, kind, "", cause=Cause(kind, host=host)))
        return self.layout.on_host(host)

    def host_lost(self, host: str, now: float, why: str = "") -> Effects:
        """A host does not answer: its leases are severed, and nothing is begun there.

        How its steps under way end will not be known. What ran there may still run, and keeps its GPUs.
        ``why``: the reason, for people.
        """
        record = self.layout.hosts.get(host)
        if record is None or record.is_lost:
            if record:
                record.why = why
            return NOTHING
        record.is_lost, record.is_away = True, False
        record.since, record.why = now, why
        groups = self._host_is("host_lost", host, now)
        for group in groups:
            self._forget_steps(group.slots)
            group.host_lost(now)
        return self._settle(groups, now)

    def host_back(self, host: str, now: float, found: Mapping[str, FoundBackend]) -> Effects:
        """A lost host answers again; ``found``: its backends that run or are in standby, and how.

        A backend that was not found holds nothing. One that was found and cannot stay is stopped.
        """
        record = self.layout.hosts.get(host)
        if record is None or not record.is_lost:
            return NOTHING
        groups = self.layout.on_host(host)
        held = [(group, group.host_freed(now)) for group in groups]
        record.is_lost, record.is_gone, record.why = False, False, ""
        record.no_wake_until, record.wake_error = -FOREVER, ""
        self._host_is("host_back", host, now)
        for group, slots in held:
            self._forget_steps([slot.name for slot in slots])
            group.host_back(now, found, slots)
        return self._settle(groups, now)

    def host_unwoken(self, host: str, now: float, why: str) -> Effects:
        """A lost host did not wake: the requests that wait for it fail, and nobody wakes it for a while."""
        record = self.layout.hosts.get(host)
        if record is None or not record.is_lost:
            return NOTHING
        record.no_wake_until, record.wake_error = now + UNWOKEN_SECONDS, why
        groups = self.layout.on_host(host)
        for group in groups:
            group.changed()
            group.fail_refused(now)
        return self._settle(groups, now)

    def host_gone(self, host: str, now: float) -> Effects:
        """An operator declares that nothing runs on a lost host any more; it stays lost until it is back."""
        record = self.layout.hosts.get(host)
        if record is None or not record.is_lost or record.is_gone:
            return NOTHING
        record.is_gone = True
        groups = self.layout.on_host(host)
        for group in groups:
            group.host_gone(now)
        return self._settle(groups, now)

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
        return self._settle(groups, now)

    def paused(self, now: float, until: float = FOREVER) -> Effects:
        """Nothing is to stay or be loaded on any host until a moment, or until ``resumed`` is said."""
        pause = self.layout.pause
        if pause.is_on and pause.until == until:
            return NOTHING
        was_on = pause.is_on
        pause.begin(now, until)
        self._emit(Event(now, "paused", "", seconds=until - now, cause=PAUSED))
        return self._settle((), now) if was_on else self._clear(now, cleared=True)

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
        return self._settle(self.layout.groups, now)

    def unload_asked(self, model: str, now: float, *, when_idle: bool = False) -> Effects:
        """The model is to be unloaded; ``when_idle``: once nobody uses it, unless it is asked for before.

        NOTHING if there is nothing to be done now; UnknownModel if it was served until a moment ago.
        """
        group, found = self.layout.find(model)
        is_now = group.unload_when_idle(found, now) if when_idle else group.unload(found, now)
        return self._settle(self.layout.groups_of[model], now) if is_now else NOTHING

    def hinted(self, model: str, now: float) -> Effects:
        """A client will ask for a model soon: it is preloaded if nobody is in the way; or UnknownModel.

        Overloaded: too many hints are pending.
        """
        group, found = self.layout.find(model)
        group.hint(found, now)
        return self._settle(self.layout.groups_of[model], now)

    def pinned(self, model: str, now: float, pinned: bool) -> Effects:
        """Whether a model, once it is resident, is kept from being evicted for others; or UnknownModel."""
        group, found = self.layout.find(model)
        group.pin(found, now, pinned=pinned)
        return self._settle(self.layout.groups_of[model], now)

    def refused(self, error: MuxError, now: float) -> Effects:
        """Every request that waits fails with ``error``: the program ends."""
        for group in self.layout.groups:
            group.fail_all(error, now)
        return self._settle(self.layout.groups, now)

    def severed(self, now: float) -> Effects:
        """Every request that runs is cut: the program ends."""
        return Effects(cut=[ticket for group in self.layout.groups for ticket in group.sever_all(now)])

    def closed(self) -> Effects:
        """The program ends: facts are still taken, but nothing is begun any more."""
        self._is_closed = True
        return NOTHING

    def reconfigured(self, config: Config, now: float, expected: Iterable[str] = ()) -> Effects:
        """Another configuration holds from now on; ``expected``: backends that may run already."""
        change, settings = compare(self.layout.settings.config, config), shared_settings(config)
        self._emit(Event(now, "reloaded", "", cause=Cause("reconfigured", detail=str(change))))
        leaving: dict[str, Leaving] = dict.fromkeys(change.changed, "changed")
        leaving |= dict.fromkeys(change.removed, "removed")
        for group in self.layout.groups:
            group.retire(leaving, settings.models.keys(), now)
        if not self.layout.settings.models.keys() <= settings.models.keys():
            self.costs.keep(settings.models.__contains__)
        self.layout.take(settings)
        exchange = self.layout.regroup()
        self.expected(expected)
        return self._settle(self._exchanged(exchange, now), now, exchange.gone)

    def time_passed(self, now: float) -> Effects:
        """The moment ``Effects.ask_at`` has come, or a later one."""
        pause = self.layout.pause
        if pause.until <= now:
            return self._resume(now, Cause("pause_over", seconds=now - pause.since))
        return self._settle(self._due(now), now)

    def _forget_steps(self, backends: Iterable[str]) -> None:
        """Take no report of the steps under way on these backends."""
        for name in backends:
            self._under_way.pop(name, None)

    def _exchanged(self, exchange: Exchanged, now: float) -> list[GpuGroup]:
        """Go on after an exchange of groups; returns those that are to be asked."""
        for group in [each for each in self._moments if self.layout.by_name.get(each.name) is not each]:
            del self._moments[group]
        for name in exchange.models:
            self._shared.pop(name, None)
        found = self.layout.waiting_for(exchange)
        for group in found:
            group.begin_anew(now)
        return found

    # From facts to effects

    def _due(self, now: float) -> list[GpuGroup]:
        """The groups that are to be asked although no fact concerns them."""
        found = [group for group in self.layout.groups if self._moments.get(group, now) <= now]
        for group in found:
            group.changed()  # a cool-down may be over: queues may have a better place there
        return found

    def _settle(self, groups: Iterable[GpuGroup], now: float, gone: Iterable[GpuGroup] = ()) -> Effects:
        """Ask these groups what is to be done now, and all that this affects, until nothing changes.

        ``gone``: groups that are not asked any more, in which tickets may have ended.
        """
        found = _Gathered([], [], [], [])
        if self.layout.moving and self.layout.moved:
            exchange = self.layout.regroup()
            still = [group for group in groups if self.layout.by_name.get(group.name) is group]
            gone, groups = exchange.gone, {*still, *self._exchanged(exchange, now)}
        for group in gone:
            _collect(group, found)
        layout = self.layout
        hinted = [group for name in layout.hints for group in layout.groups_of.get(name, ())]
        asked = sorted({*groups, *hinted}, key=BY_NAME)  # where a hinted model goes, others may decide
        if self.layout.spread:
            asked = self._with_siblings(asked, now)
        while asked:
            more: dict[GpuGroup, None] = {}
            for group in asked:
                try:
                    self._ask(group, now, found)
                except Exception as error:  # what is gathered from others is done all the same
                    found.mistakes.append(error)
                    _collect(group, found)
                    self._moments[group] = now + AFTER_MISTAKE_SECONDS
                if self.layout.bounded or self.layout.spread:  # a queue may go to a group that is asked next
                    more |= dict.fromkeys(self._affected(now))
            asked = sorted(more, key=BY_NAME)
        first = min(self._moments.values(), default=FOREVER)
        return Effects(*found, ask_at=min(first, self.layout.pause.until))

    def _collected(self, group: GpuGroup) -> Effects:
        """The tickets that ended in a group that need not be asked."""
        found = _Gathered([], [], [], [])
        _collect(group, found)
        return Effects(*found)

    def _affected(self, now: float) -> list[GpuGroup]:
        """The groups that are to be asked again since others have changed what they share."""
        found: list[GpuGroup] = []
        for name, memory in self.layout.bounded.items():
            if memory.is_changed:
                there = self.layout.on_host(name)
                found += there
                for group in there if memory.asked() else ():
                    group.changed()  # queues may have a better place there
        if self.layout.spread:
            found += [group for model in self._moved((), now) for group in self._concerned(model, now)]
        return found

    def _with_siblings(self, groups: Sequence[GpuGroup], now: float) -> list[GpuGroup]:
        """``groups``, and those that have backends of the same models, as far as it concerns them.

        It does where a queue stands, and where another replica of a busy model may be worth a load.
        """
        moved, layout = self._moved(groups, now), self.layout
        found = dict.fromkeys(groups)
        queues = {layout.of_model[model.name] for model in layout.models.values() if model.queue.tickets}
        for model in dict.fromkeys(each for group in groups for each in group.routed if each.is_spread):
            found.update((group, None) for group in layout.groups_of[model.name] if group in queues)
            found.update(dict.fromkeys(could_spill(layout.groups_of[model.name], model, now)))
        for model in moved:
            found.update(dict.fromkeys(self._concerned(model, now)))
        return sorted(found, key=BY_NAME)

    def _concerned(self, model: Model, now: float) -> Sequence[GpuGroup]:
        """The groups that are to be asked about a model with backends in several."""
        layout = self.layout
        slots = [slot for slot in model.active if slot.coming or slot.state == "standby" or model.bounded]
        where = [layout.of_model[model.name], *(layout.of_backend[slot.name] for slot in slots)]
        own = layout.groups_of[model.name]
        return where + [each for each in own if each.preloads or each.homes] + could_spill(own, model, now)

    def _moved(self, groups: Iterable[GpuGroup], now: float) -> list[Model]:
        """The models with backends in several groups that are not as they were when these were last asked.

        Where a queue stands is chosen here: anew when one of its groups is asked (``groups``), or the state
        of one has changed. A queue for which others drain may be better off where a GPU is free.
        """
        layout, changed = self.layout, []
        touched: dict[str, list[GpuGroup]] = {}
        for group in dict.fromkeys((*layout.touched, *groups)):
            for model in group.routed:
                if model.is_spread:
                    touched.setdefault(model.name, []).append(group)
        roomy = set(with_room(layout.touched))
        layout.touched.clear()
        for name, where in touched.items():
            model, before = layout.models[name], self._shared.get(name, _UNSEEN)
            waits, is_coming = bool(model.queue.tickets), model.is_coming
            if waits and not is_coming:
                layout.place_queue(model, now, where if before.waits and not before.is_coming else None)
            seen = _SharedState(model.queue_group, waits, len(model.ready), is_coming, model.counted)
            drains = seen.waits and seen.is_coming and not roomy.isdisjoint(where) and not model.is_loading
            if seen != before or drains:
                changed.append(model)
            self._shared[name] = seen
        return changed

    def _ask(self, group: GpuGroup, now: float, found: _Gathered) -> None:
        if group.is_outgrown:
            exchange = self.layout.renew(group)
            [group] = exchange.made
            self._exchanged(exchange, now)
        if self._is_closed:
            _collect(group, found)
            return
        while not isinstance(step := group.next_step(now), Wait):
            _collect(group, found)
            if isinstance(step, Evict):
                found.cut.extend(step.severed)
            found.steps.append(self._numbered(step))
        _collect(group, found)
        self._moments[group] = min(step)

    def _numbered(self, step: Step) -> Step:
        """``step`` with its number: that of the load that it cancels, or one of its own."""
        if not isinstance(step, Cancel):
            self._under_way[step.backend] = next(self._numbers)
        return replace(step, number=self._under_way[step.backend])


def _collect(group: GpuGroup, found: _Gathered) -> None:
    """Take the tickets that ended in a group, and the leases that ended there before their requests."""
    if group.woken:
        found.woken.extend(group.woken)
        group.woken = []
    if group.cut:
        found.cut.extend(group.cut)
        group.cut = []
