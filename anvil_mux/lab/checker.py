"""The checker of logs: which invariants a log, simulated or of a running program, breaks.

It is a fold over events that judges each one by the situation in which it comes; group.py says what the
invariants are. It shares no state with the scheduler, and computes the bounds of queues again.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from itertools import takewhile
from types import MappingProxyType
from typing import Any

from anvil_mux.config.config import EITHER, STAGES, Config
from anvil_mux.scheduler.admission import bound_seconds, in_round
from anvil_mux.scheduler.events import BY_HAND, FOUND, PRELOADS, Event
from anvil_mux.scheduler.layout import gpu_groups
from anvil_mux.scheduler.memory import LeastRecentlyUsed, Placement
from anvil_mux.scheduler.model import model_settings
from anvil_mux.scheduler.policies import FOREVER
from anvil_mux.scheduler.slot import HOLDING, TRANSITIONS, Slot
from anvil_mux.telemetry.eventlog import BackendRecord, Situation

ROUNDING = 1e-6
"""Seconds by which sums of moments may be off."""
_BACKEND_MOVES = {(before, after) for (before, _), after in TRANSITIONS.items()}
_FLAGS = {
    "host_drained": True,
    "host_undrained": False,
    "host_away": True,
    "host_heard": False,
    "resumed": False,
}
_TICKET_ENDS = ("leased", "failed", "gone")
_OF_NO_MODEL = frozenset((*_FLAGS, "host_lost", "host_back", "paused", "plugin_failed"))
_OF_NO_BACKEND = frozenset(("queued", "failed", "gone", "deferred", "pinned", "unpinned"))


def check(
    log: Iterable[Event],
    config: Config,
    slack: float = 0.0,
    begins: Mapping[str, Any] = MappingProxyType({}),
    *,
    is_its_own: bool = True,
) -> list[str]:
    """Find what in ``log`` breaks an invariant. ``slack``: seconds that a real program's threads may be late.

    ``begins``: the situation in which the log begins, as JSON; {} where it begins with the program. From the
    first reload on ``config`` holds no longer, and what comes then is not checked. ``is_its_own``: ``log``
    was written under ``config``, so that the bounds of queues follow from it.
    """
    checker = _Checker(config, slack, begins)
    if not is_its_own:
        checker.rounds.clear()
    for event in takewhile(lambda event: event.kind != "reloaded", log):
        if event.kind != "reload_failed":
            checker.read_known(event)
    return checker.wrong


def _groups(config: Config) -> list[set[str]]:
    """The backends that may wait for each other: of one GPU group, or of one host whose memory is bounded."""
    found = [{backend.name for backend in group} for _, group in gpu_groups(config.backends)]
    for host in {backend.host for backend in config.backends}:
        if config.memory_of(host) is not None:
            own = {backend.name for backend in config.backends if backend.host == host}
            found = [group for group in found if not group <= own] + [own]
    return found


def _rounds(config: Config) -> dict[str, set[str]]:
    """Model -> the models that may be in its round, where none of these has several GPU groups."""
    groups = [{backend.model for backend in group} for _, group in gpu_groups(config.backends)]
    count = Counter(model for group in groups for model in group)
    alone = [group for group in groups if all(count[model] == 1 for model in group)]
    return {model: group for group in alone for model in group}


def _by(slots: Iterable[Slot], keys: Callable[[Slot], Iterable[str]]) -> dict[str, list[str]]:
    """The backends by the keys that their slots have."""
    found: dict[str, list[str]] = {}
    for slot in slots:
        for key in keys(slot):
            found.setdefault(key, []).append(slot.name)
    return found


class _Checker:
    """Judges each event by the situation in which it comes."""

    def __init__(self, config: Config, slack: float, begins: Mapping[str, Any]) -> None:
        self.wrong: list[str] = []
        self._config, self._slack = config, slack + ROUNDING
        placement = Placement(config.backends, config.gpus, LeastRecentlyUsed)
        self._capacity, self._slots = placement.capacity, placement.slots
        self._settings = model_settings(config)
        self.rounds = _rounds(config)
        """Model -> the models of which its round may be; of others no bound is computed."""
        self._then = Situation.parse(begins, self._slack)
        self._backends = {name: self._then.backend(name, slot.model) for name, slot in self._slots.items()}
        self._queues = {slot.model: self._then.queue(slot.model) for slot in self._slots.values()}
        self._ended: set[int] = set()
        self._admitting = ""
        self._limited = {s.model for s in self._slots.values() if s.backend.concurrency}
        self._calm_until = 0.0  # before it no queue is overdue
        self._groups = _groups(config)
        self._host = {backend.name: backend.host for backend in config.backends}
        self._of_model = _by(self._slots.values(), lambda slot: [slot.model])
        self._of_gpu = _by(self._slots.values(), lambda slot: slot.holds)
        self._on_host = _by(self._slots.values(), lambda slot: [slot.backend.host])
        self._lost: set[str] = set()
        self._drained: set[str] = set()
        self._away: set[str] = set()
        self._heard: dict[str, float] = {}
        """Host -> when it was last heard of again after it was away."""
        self._unfound: set[str] = set()
        """Backends of a host that is back of which nothing was said yet."""

    def read_known(self, event: Event) -> None:
        """Judge an event, if it is about what the configuration has."""
        if event.kind in _OF_NO_MODEL or self._knows(event):
            self.read(event)
        else:
            self._claim(False, event, "the configuration has no such backend or model")

    def _knows(self, event: Event) -> bool:
        models = event.model in self._queues and (not event.target or event.target in self._queues)
        needs_none = event.kind in _OF_NO_BACKEND and not event.backend
        return models and (needs_none or event.backend in self._backends)

    def read(self, event: Event) -> None:
        self._claim(event.at >= self._then.at, event, "time goes backwards")
        if event.at > self._then.at:
            self._look_for_overdue(event)
            if self._lost or self._unfound or self._cleared:
                self._look_at_hosts(event)
        admitted = event.kind == "leased" and event.model == self._admitting
        still = not admitted and self._could_be_served(self._admitting)
        self._claim(not still, event, f"{self._admitting} still waits")
        self._admitting = self._admitting if admitted else ""
        if event.kind in _TICKET_ENDS:
            self._judge_end(event)
        elif event.kind == "queued":
            self._claim(event.ticket not in self._ended, event, "the ticket has ended")
            self._judge_bound(event)
        elif event.kind in ("released", "severed"):
            self._judge_release(event)
        elif event.kind in ("host_lost", "host_back"):
            self._judge_host(event)
        elif event.kind in _FLAGS:
            self._judge_flag(event, _FLAGS[event.kind])
        elif event.kind not in ("pinned", "unpinned", "deferred", "paused", "plugin_failed"):
            self._judge_move(event)
        self._then.read(event)
        if event.kind == "queued":
            self._calm_until = min(self._calm_until, self._overdue(event.model, event.at))

    def _claim(self, fine: bool, event: Event, problem: str) -> None:
        if not fine:
            self.wrong.append(f"{event.at:.6f} {event.kind} {event.backend or event.model}: {problem}")

    # Hosts

    def _judge_host(self, event: Event) -> None:
        host = event.cause.host if event.cause else ""
        self._away.discard(host)
        if event.kind == "host_lost":
            self._claim(host not in self._lost, event, f"{host} was lost already")
            self._lost.add(host)
            for name in self._on_host.get(host, ()):
                if self._backends[name].state == "ready":
                    self._queues[self._slots[name].model].unready = event.at
            return
        self._claim(host in self._lost, event, f"{host} was not lost")
        self._lost.discard(host)
        names = [name for name in self._on_host.get(host, ()) if not self._is_lost(name)]
        self._unfound |= {name for name in names if self._backends[name].state != "stopped"}

    def _judge_flag(self, event: Event, is_set: bool) -> None:
        if event.kind == "resumed":
            self._claim(self._then.is_paused, event, "it was not paused")
            return
        host = event.cause.host if event.cause else ""
        flagged = self._drained if "drained" in event.kind else self._away
        self._claim(is_set is not (host in flagged), event, f"{host} was so already")
        flagged ^= {host}
        if event.kind == "host_heard":
            self._heard[host] = event.at

    def _look_at_hosts(self, event: Event) -> None:
        """Before time goes on: nothing is leased on a lost host, nothing is ready on a drained one in reach.

        And of what is on a host that is back it is known what it is.
        """
        for name in sorted(self._unfound):
            self._claim(False, event, f"nobody says what {name} is, whose host is back")
        self._unfound.clear()
        for name in self._on_hosts(self._cleared - self._away - self._lost):
            stays = self._backends[name].state == "ready" and not self._is_lost(name)
            self._claim(not stays, event, f"{name} is ready, whose host is drained or paused")
        for name in self._on_hosts(self._lost):
            self._claim(not self._backends[name].leases, event, f"{name} is leased, whose host is lost")

    @property
    def _cleared(self) -> Set[str]:
        """The hosts on which nothing may stay: those that are drained, or all of them during a pause."""
        return self._on_host.keys() if self._then.is_paused else self._drained

    @property
    def _deserted(self) -> Set[str]:
        """The hosts whose backends serve nobody: those that are lost, or to be empty."""
        return self._lost | self._cleared

    def _on_hosts(self, hosts: Iterable[str]) -> Iterator[str]:
        return (name for host in hosts for name in self._on_host.get(host, ()))

    def _is_lost(self, backend: str) -> bool:
        """Whether its host is lost."""
        return self._host[backend] in self._lost

    def _judge_end(self, event: Event) -> None:
        self._claim(event.ticket not in self._ended, event, f"ticket {event.ticket} ends twice")
        self._ended.add(event.ticket)
        since = self._queues[event.model].tickets.get(event.ticket, event.at)
        late = event.at - since > self._config.queue_timeout + self._slack
        self._claim(not late, event, f"ticket {event.ticket} waited longer than queue_timeout")
        if event.kind == "leased":
            backend = self._backends[event.backend]
            self._claim(backend.state == "ready", event, "leased, but not ready")
            if self._lost:
                self._claim(not self._is_lost(event.backend), event, "leased, but its host is lost")
            if event.size > len(backend.leases):
                self._claim(self._has_place(event.model, event.backend), event, "all its places are taken")

    def _judge_release(self, event: Event) -> None:
        backend = self._backends[event.backend]
        self._claim(event.ticket in backend.leases, event, "the ticket held no lease")
        if event.model in self._limited and backend.state == "ready":
            self._admitting = event.model

    def _could_be_served(self, model: str) -> bool:
        """Whether anybody waits for ``model`` although there is a place."""
        queue = self._queues.get(model)
        if not queue or not queue.tickets:
            return False
        needed = {queue.only.get(ticket, "") for ticket in queue.tickets} if queue.only else {""}
        return any(self._has_place(model, each) for each in needed)

    def _has_place(self, model: str, backend: str = "") -> bool:
        """Whether there is a place at any backend that is ready, or this one; of two stages one for each."""
        ready = [
            name
            for name in self._of_model.get(model, ())
            if backend in ("", name)
            and self._backends[name].state == "ready"
            and self._host[name] not in self._deserted
        ]
        free = [name for name in ready if self._is_free(name)]
        stages = [self._takers(ready, stage) for stage in STAGES]
        if self._settings[model].staged and not backend and all(stages):
            return all(not free_of.isdisjoint(free) for free_of in stages)
        return bool(free)

    def _is_free(self, name: str) -> bool:
        limit = self._slots[name].backend.concurrency
        return limit is None or len(self._backends[name].leases) < limit

    def _takers(self, names: Iterable[str], stage: str) -> set[str]:
        return {name for name in names if self._slots[name].backend.infer_type in (stage, EITHER)}

    def _judge_move(self, event: Event) -> None:
        backend = self._backends[event.backend]
        before = backend.state
        found = event.cause is not None and event.cause.kind in FOUND
        gone = event.cause is not None and event.cause.kind == "host_gone"
        # The GPUs of a lost host are held by what may still run there, and nobody hears of it.
        self._claim(gone or not self._is_lost(event.backend), event, "its host is lost")
        if event.backend in self._unfound or (found and event.kind == "stuck"):  # whatever it was
            self._unfound.discard(event.backend)
            self._claim((event.kind in ("ready", "standby", "stuck", "stopped")), event, "it was looked at")
        else:
            self._claim(self._may_follow(backend, event), event, f"it was {before}")
        if before == "draining" and not found:
            in_time = event.at - backend.since <= backend.limit + self._slack
            host = self._host[event.backend]
            unreached = host in self._away or self._heard.get(host) == event.at
            self._claim(in_time or unreached, event, "the drain lasted longer than drain_timeout")
            if event.kind == "evicting" and backend.target:
                self._judge_begin(backend.target, event)
        if event.kind == "loading":
            host = self._host[event.backend]
            self._claim(host not in self._cleared, event, "its host is drained or paused")
            self._claim(host not in self._away, event, "its host is away")
            self._judge_load(event)
        elif event.kind == "ready":
            self._admitting = event.model
        elif event.kind == "draining":
            self._claim(not event.target or self._is_wanted(event.target), event, "for nobody")
            self._claim(not (event.target and self._is_pinned(event)), event, "it is pinned")
            fine = event.seconds <= self._drain_timeout(event) + self._slack
            self._claim(fine, event, "for longer than its drain_timeout")
            for_a_preload = event.cause is not None and event.cause.kind == "make_room"
            self._claim(not (for_a_preload and event.size), event, "it has leases, and nobody waits for them")
        elif event.kind == "demoting" and event.target:
            self._judge_begin(event.target, event)
        elif event.kind == "cancelling":
            goes_elsewhere = self._host[event.backend] in self._cleared
            waited_for = self._queues[event.model].tickets and not goes_elsewhere
            self._claim(not waited_for, event, "somebody waits for it")
            self._claim(not event.target or self._is_wanted(event.target), event, "for nobody")

    def _may_follow(self, backend: BackendRecord, event: Event) -> bool:
        """Whether a backend may enter a state; a drain may be for another model, and last no longer then."""
        if backend.state == event.kind == "draining":
            left = backend.since + backend.limit - event.at
            return backend.target not in ("", event.target) and event.seconds <= left + self._slack
        return (backend.state, event.kind) in _BACKEND_MOVES

    def _drain_timeout(self, event: Event) -> float:
        """How long a backend may drain: its own time, unless people ask for that."""
        by_hand = event.cause is not None and event.cause.kind in BY_HAND
        return self._config.drain_timeout if by_hand else self._slots[event.backend].backend.drain_timeout

    def _is_pinned(self, event: Event) -> bool:
        return self._then.pins.get(event.model, self._slots[event.backend].pinned)

    def _is_beside_pinned(self, backend: str) -> bool:
        """Return whether pinned residents leave a backend no room on one of its GPUs."""
        pinned = [
            slot
            for name, slot in self._slots.items()
            if name != backend
            and self._backends[name].state == "ready"
            and self._then.pins.get(slot.model, slot.pinned)
        ]
        need = self._slots[backend].holds
        return any(
            need[gpu] + sum(slot.holds.get(gpu, 0) for slot in pinned) > self._capacity[gpu] for gpu in need
        )

    def _judge_begin(self, target: str, event: Event) -> None:
        self._claim(self._is_wanted(target), event, f"nobody waits for {target}")

    def _judge_load(self, event: Event) -> None:
        preload = event.cause is not None and event.cause.kind in PRELOADS
        self._claim(preload or self._is_wanted(event.model), event, "nobody waits for it")
        self._claim(event.at >= self._backends[event.backend].retry_at, event, "before its cool-down ended")
        for gpu in self._slots[event.backend].holds:
            there = [n for n in self._of_gpu[gpu] if n == event.backend or self._backends[n].state in HOLDING]
            amount = sum(self._slots[name].holds[gpu] for name in there)
            self._claim(amount <= self._capacity[gpu], event, f"GPU {gpu} is overfull")
        most, others = self._slots[event.backend].backend.most, self._others_like(event.backend)
        self._claim(most is None or others < most, event, f"{others} of its model are resident or loading")
        host = self._host[event.backend]
        if (budget := self._config.memory_of(host)) is not None:
            there = self._on_host[host]
            runs = [n for n in there if n == event.backend or self._backends[n].state in HOLDING]
            ram = sum(self._slots[name].least_ram for name in runs)
            self._claim(ram <= budget, event, "the engines need more host memory than there is")

    def _others_like(self, backend: str) -> int:
        """How many other backends of its model, and for the same stage, are resident or loading."""
        this = self._slots[backend].backend
        names = [name for name in self._of_model[this.model] if name != backend]
        return sum(
            self._slots[name].backend.infer_type == this.infer_type
            and self._backends[name].state in ("ready", "loading")
            and self._host[name] not in self._deserted
            for name in names
        )

    def _is_wanted(self, model: str) -> bool:
        """Whether it has a queue, or a replica at which requests wait behind each other."""
        backends = [self._backends[name] for name in self._of_model.get(model, ())]
        leases = [len(each.leases) for each in backends if each.state == "ready"]
        return bool(self._queues[model].tickets) or any(count > 1 for count in leases)

    def _is_resident(self, model: str) -> bool:
        names = self._of_model.get(model, ())
        return any(self._backends[name].state == "ready" and not self._is_lost(name) for name in names)

    def _judge_bound(self, event: Event) -> None:
        """Compute the bound of a queue that begins again, from the loads of all that wait.

        Logs of old tell of bounds, and not what they were computed from.
        """
        if self._queues[event.model].tickets:
            self._claim(event.bound == FOREVER, event, "its queue has a bound already")
            return
        others = self.rounds.get(event.model, set()) - {event.model}
        waiting = [each for each in others if self._queues[each].tickets and not self._is_resident(each)]
        gpus = {each: self._gpus_of(each) for each in waiting}
        before = in_round(self._gpus_of(event.model), gpus)
        loads = [event.load, *[self._queues[each].load for each in before]]
        if event.model not in self.rounds or min(loads) <= 0.0:
            return
        latest = self._config.queue_timeout - event.seconds
        bound = bound_seconds(self._settings[event.model], math.fsum(loads), latest)
        fine = event.bound == bound or abs(event.bound - bound) <= ROUNDING
        self._claim(fine, event, f"its bound is {event.bound:g} s, and by its round {bound:g} s")

    def _gpus_of(self, model: str) -> set[str]:
        return {gpu for name in self._of_model[model] for gpu in self._slots[name].holds}

    def _overdue(self, model: str, since: float) -> float:
        bound = min(self._queues[model].bound, self._settings[model].max_wait)  # logs of old have no bounds
        return since + bound + self._slack

    def _look_for_overdue(self, event: Event) -> None:
        """Before time goes on: where nothing moves, no queue may be overdue."""
        if event.at <= self._calm_until or self._then.is_paused:
            return
        self._calm_until = FOREVER
        for model, queue in self._queues.items():
            since = next(iter(queue.tickets.values()), FOREVER)
            last = queue.unready if model in self._limited else since
            overdue = self._overdue(model, max(since, last))
            self._calm_until = min(self._calm_until, overdue)
            if event.at <= overdue or (model in self._limited and self._is_resident(model)):
                continue
            if any(self._backends[name].state == "loading" for name in self._of_model[model]):
                continue  # perhaps on a host that is away
            away = self._lost | self._drained | self._away
            groups = [g for g in self._groups if any(self._slots[name].model == model for name in g)]
            there = [name for group in groups for name in group if self._host[name] not in away]
            still = all(self._backends[name].state in ("ready", "stopped", "standby") for name in there)
            own = [name for name in there if self._slots[name].model == model]
            could = any(
                self._backends[name].retry_at < event.at and not self._is_beside_pinned(name) for name in own
            )
            self._claim(not (still and could), event, f"{model} is overdue, and its swap has not begun")
