"""The witness: who holds what, kept from the facts that were told and from what came back.

It shares no belief with the scheduler: it asks it nothing, and computes needs, ties and room from the
configuration. What can be judged by events alone, the checker of logs does (lab/checker.py), and what events
say of cool-downs and of swaps that have begun is read by the fold that this checker uses.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from anvil_mux.config.config import Backend, Config
from anvil_mux.lab.checker import check
from anvil_mux.scheduler.events import Event
from anvil_mux.scheduler.slot import Cancel, Demote, Effects, Evict, Load, Step, Ticket
from anvil_mux.telemetry.eventlog import Situation
from tests.explorer.worlds import Fact, SmallWorld

_HOLDING = frozenset(("loading", "up", "evicting", "stuck"))
_MOVING = frozenset(("loading", "evicting", "demoting"))
_AFTER = {
    "loaded": "up",
    "load_failed": "stopped",
    "load_cancelled": "stopped",
    "up": "up",
    "standby": "standby",
    "died": "stopped",
}
"""The kind of a fact -> what its backend is then."""
_FOUND = {"ready": "up", "standby": "standby", "stuck": "stuck", "stopped": "stopped"}
"""The kind of an event about a backend of a host that is back or gone -> what the backend is then."""
_STEPS: dict[type, tuple[tuple[str, ...], str]] = {
    Load: (("stopped", "standby"), "loading"),
    Evict: (("up", "stuck"), "evicting"),
    Demote: (("standby",), "demoting"),
    Cancel: (("loading",), "loading"),
}
"""The kind of a step -> what its backend may be before it, and what it is then."""


class Violation(NamedTuple):
    """One thing that is wrong."""

    invariant: str
    """The number of the invariant, or a word."""
    text: str

    def __str__(self) -> str:
        return f"{self.invariant}: {self.text}"


class _Drained(NamedTuple):
    """The drain of a backend."""

    target: str
    ends: float


@dataclass
class _Holding:
    """One backend, as far as it was told."""

    backend: Backend
    state: str = "stopped"
    """One of stopped, loading, up, evicting, stuck, standby and demoting."""
    before: str = ""
    """Its state before the last step."""
    leases: dict[int, None] = field(default_factory=dict)
    residual: int = 0
    host_bytes: int = 0
    drain: _Drained | None = None

    @property
    def holds(self) -> bool:
        return self.state in _HOLDING

    @property
    def is_up(self) -> bool:
        """Whether it is resident, and not about to leave."""
        return self.state == "up" and self.drain is None


class Witness:
    """The witness of one history."""

    def __init__(self, config: Config, world: SmallWorld) -> None:
        self._config, self._world = config, world
        self.backends = {each.name: _Holding(each) for each in config.backends}
        self.waiting: dict[int, Ticket] = {}
        """The tickets that wait, the oldest first."""
        self.cut: dict[int, None] = {}
        """The tickets whose leases ended before their requests did."""
        self.unseen: dict[str, None] = {}
        """The backends that may run already."""
        self._known_at = -math.inf
        """When it was known last which of them run."""
        self.wrong: list[Violation] = []
        self._flags: dict[str, dict[str, None]] = {
            "lost": {},
            "gone": {},
            "away": {},
            "drained": {},
            "pin": {},
        }
        """The kind of a flag -> the hosts or models that have it."""
        self._news: dict[str, int] = {}
        """GPU -> bytes that other programs hold there, as was told last."""
        self._others: dict[str, int] = {}
        """The same as far as it is believed: not while a backend is moved on GPUs tied to that one."""
        self._is_paused = False
        self._situation = Situation()
        self._bounds: dict[str, float] = {}
        """Model -> after how many seconds its queue is overdue."""
        self._capacity = {gpu.name: max(gpu.vram - gpu.reserve, 1) for gpu in config.gpus if gpu.vram}

    def claim(self, fine: object, invariant: str, text: str) -> None:
        if not fine:
            self.wrong.append(Violation(invariant, text))

    # Questions

    def of_model(self, model: str) -> list[_Holding]:
        return [each for each in self.backends.values() if each.backend.model == model]

    def on_host(self, host: str) -> list[str]:
        return [name for name, each in self.backends.items() if each.backend.host == host]

    def waiting_for(self, model: str) -> list[int]:
        return [number for number, ticket in self.waiting.items() if ticket.model == model]

    @property
    def waiting_models(self) -> list[str]:
        return list(dict.fromkeys(ticket.model for ticket in self.waiting.values()))

    @property
    def tickets(self) -> set[int]:
        """The tickets that have not ended."""
        leased = [number for each in self.backends.values() for number in each.leases]
        return {*self.waiting, *self.cut, *leased}

    def summary(self, ranks: Mapping[int, int]) -> list[Any]:
        """The records, as far as they tell more than the scheduler; ``ranks``: of the tickets' numbers."""
        held = [
            (each.state, [ranks[number] for number in each.leases], each.residual, each.host_bytes)
            for each in self.backends.values()
        ]
        flags = [list(each) for each in self._flags.values()]
        others = [self._news, self._others]
        return [held, flags, list(self.unseen), others, self._is_paused, len(self.cut)]

    def _is(self, what: str, record: _Holding) -> bool:
        """Whether the host of a backend is lost, gone, away or drained."""
        return record.backend.host in self._flags[what]

    def _is_cleared(self, record: _Holding) -> bool:
        return self._is_paused or self._is("drained", record)

    def _is_left(self, record: _Holding) -> bool:
        """Whether a GPU of a backend is left to other programs."""
        least = self._config.yield_above
        return least is not None and any(
            self._others.get(gpu, 0) >= least for gpu in record.backend.gpu_names
        )

    @property
    def news(self) -> Fact | None:
        """What other programs hold, if that was told and could be believed only now: it is told again."""
        if all(self._news.get(gpu, 0) == self._others.get(gpu, 0) for gpu in self._believing()):
            return None
        return next((("others", gpu, str(held)) for gpu, held in self._news.items()))

    def _believing(self) -> list[str]:
        """The GPUs on which, and on those tied to them, no backend is being moved."""
        moved = [name for name, each in self.backends.items() if each.state in _MOVING]
        moving = {gpu for name in self._tied(moved) for gpu in self.backends[name].backend.gpu_names}
        return [gpu.name for gpu in self._config.gpus if gpu.name not in moving]

    def _tied(self, names: Iterable[str]) -> set[str]:
        """The backends that GPUs tie to these, and these: their GPU groups."""
        found = set(names)
        gpus = {gpu for name in found for gpu in self.backends[name].backend.gpu_names}
        while more := [
            name
            for name, each in self.backends.items()
            if name not in found and not gpus.isdisjoint(each.backend.gpu_names)
        ]:
            found.update(more)
            gpus.update(gpu for name in more for gpu in self.backends[name].backend.gpu_names)
        return found

    # Facts

    def facts(self) -> Iterator[Fact]:
        """The facts that may come next, besides reports of steps and time."""
        may = self._world.may
        begins = [kind for kind in ("request", "wish") if kind == "request" or kind in may]
        for model in self._world.models:
            waiting = len(self.waiting_for(model))
            yield from [(kind, model) for kind in begins if waiting < self._world.waiting]
            if waiting and "abandon" in may:
                yield ("abandon", model)
        for name, each in self.backends.items():
            if each.leases:
                yield ("release", name)
            if "died" in may and each.state in ("up", "standby", "stuck") and not self._is("lost", each):
                yield ("died", name)
        if "late" in may and self.cut:
            yield ("late",)
        for name in self.unseen:
            levels = self.backends[name].backend.evict_to
            yield from [("looked_at", name), ("up", name)]
            yield from [("standby", name)] if levels[0] != "stop" else []
        yield from self._orders()
        for host in dict.fromkeys(each.host for each in self._config.backends):
            yield from self._host_facts(host)

    def _orders(self) -> Iterator[Fact]:
        may = self._world.may
        for model in dict.fromkeys(each.model for each in self._config.backends):
            if "unload" in may:
                yield ("unload", model)
            if "hint" in may:
                yield ("hint", model)
            if "pin" in may:
                yield ("unpin" if model in self._flags["pin"] else "pin", model)
        if "pause" in may:
            yield ("resume",) if self._is_paused else ("pause", "100")
        for gpu in self._config.gpus if "others" in may else ():
            yield ("others", gpu.name, "0" if self._news.get(gpu.name) else "5")

    def _host_facts(self, host: str) -> Iterator[Fact]:
        may, flags = self._world.may, self._flags
        if host in flags["lost"]:
            running = [name for name in self.on_host(host) if self.backends[name].state in ("up", "loading")]
            yield from [("found", host, *running)] if running else []
            yield ("missing", host)
            if "gone" in may and host not in flags["gone"]:
                yield ("gone", host)
            if "unwoken" in may:
                yield ("unwoken", host)
            return
        if "lost" in may:
            yield ("lost", host)
        if "away" in may:
            yield ("heard" if host in flags["away"] else "away", host)
        elif host in flags["away"]:
            yield ("heard", host)
        if "drained" in may:
            yield ("undrained" if host in flags["drained"] else "drained", host)

    def mendings(self) -> list[Fact]:
        """The facts after which nothing is in the way any more."""
        flags = self._flags
        found: list[Fact] = [("missing", host) for host in flags["lost"]]
        found += [("heard", host) for host in flags["away"]]
        found += [("undrained", host) for host in flags["drained"]]
        found += [("resume",)] if self._is_paused else []
        found += [("looked_at", name) for name in self.unseen]
        return found + [("others", gpu, "0") for gpu, amount in self._news.items() if amount]

    def note(self, fact: Fact, number: int, level: str) -> None:
        """Note what a fact says by itself.

        ``number``: that of its ticket; ``level``: the standby level to which an eviction led.
        """
        kind, *what = fact
        record = self.backends.get(what[0]) if what else None
        for table in (self.waiting, self.cut, record.leases if record else {}):
            table.pop(number, None)
        if kind == "expected":
            self.unseen |= dict.fromkeys(what)
        elif kind in ("pause", "resume"):
            self._is_paused = kind == "pause"
        elif kind == "others":
            self._news = {what[0]: int(what[1])}
            self._others |= {gpu: self._news.get(gpu, 0) for gpu in self._believing()}
        elif kind in ("pin", "unpin"):
            self._set("pin", what[0], kind == "pin")
        elif record:
            self._note_backend(kind, record, level)
        elif what:
            self._note_host(kind, what[0])

    def _set(self, flag: str, name: str, is_set: bool) -> None:
        if is_set:
            self._flags[flag][name] = None
        else:
            self._flags[flag].pop(name, None)

    def _note_backend(self, kind: str, record: _Holding, level: str) -> None:
        if kind == "looked_at":
            self.unseen.pop(record.backend.name, None)
        elif kind == "evict_failed":
            record.state, record.drain = "standby" if record.state == "demoting" else "stuck", None
        elif kind == "not_begun":
            record.state = "standby" if record.state == "demoting" else record.before
            record.drain = None
            self._set("away", record.backend.host, True)
        elif kind in _AFTER:
            if kind == "died":
                self.cut |= record.leases
                record.leases.clear()
            self._enter(record, _AFTER[kind])
        elif level:
            self._enter(record, "stopped" if level == "stop" else "standby")

    def _enter(self, record: _Holding, state: str) -> None:
        record.state, record.drain = state, None
        in_standby = state == "standby"
        record.residual = self._world.residual if in_standby else 0
        record.host_bytes = self._world.host_bytes if in_standby else 0

    def _note_host(self, kind: str, host: str) -> None:
        if kind in ("lost", "found", "missing"):
            self._set("lost", host, kind == "lost")
            self._set("gone", host, False)
            self._set("away", host, False)
        elif kind == "gone":
            self._set("gone", host, True)
        elif kind in ("away", "heard"):
            self._set("away", host, kind == "away")
        elif kind in ("drained", "undrained"):
            self._set("drained", host, kind == "drained")

    # Answers

    def see(
        self, fact: Fact, ticket: Ticket | None, effects: Effects, events: Sequence[Event], now: float
    ) -> None:
        """See what came of a fact; ``ticket``: the one that it brought."""
        if ticket:
            self.waiting[ticket.id] = ticket
        self._see_found(fact, events)
        for event in events:
            self._see_event(event)
        for each in effects.cut:
            self._see_cut(each)
        if ticket and ticket.settled:
            self._see_end(ticket)
        for each in effects.woken:
            self.claim(each.id in self.waiting, "3", f"ticket {each.id} ends twice")
            self._see_end(each)
        for step in effects.steps:
            self._see_step(step, now)
        self._see_refusals(events)

    def _see_found(self, fact: Fact, events: Sequence[Event]) -> None:
        """See whether what was found stays: on a host that is back, or before the program began."""
        kind, *what = fact
        if kind in ("up", "standby"):
            if any(event.backend == what[0] for event in events):
                self.unseen.pop(what[0], None)
            else:
                self._enter(self.backends[what[0]], "stopped")  # by those who found it; they look again
        elif kind in ("found", "missing", "gone"):
            for event in events:
                if event.kind in _FOUND and event.backend in self.on_host(what[0]):
                    self._enter(self.backends[event.backend], _FOUND[event.kind])

    def _see_event(self, event: Event) -> None:
        self._situation.read(event)
        record = self.backends.get(event.backend)
        if event.kind == "resumed":
            self._is_paused = False  # a pause may end by itself
        if event.kind == "queued" and math.isfinite(event.bound):
            self._bounds[event.model] = event.bound
        if record is None:
            return
        if event.kind == "leased":
            fine = record.is_up and not self._is("lost", record)
            self.claim(fine, "2", f"ticket {event.ticket} is leased {event.backend}, which does not serve")
        elif event.kind == "draining":
            record.drain = _Drained(event.target, event.at + event.seconds)
        elif event.kind in (*_FOUND, "evicting"):
            record.drain = None

    def _see_refusals(self, events: Sequence[Event]) -> None:
        """See that nothing is drained for a model whose requests are refused."""
        refused = {event.model for event in events if event.kind == "failed"}
        for event in events if refused else ():
            cause = event.cause
            called = cause.model if cause and cause.kind == "host_memory_needed" else ""
            wanted = event.target or called if event.kind == "draining" else ""
            fine = wanted not in refused or self.waiting_for(wanted)
            self.claim(fine, "9", f"{event.backend} drains for {wanted}, which is refused")

    def _see_cut(self, ticket: Ticket) -> None:
        holders = [each for each in self.backends.values() if ticket.id in each.leases]
        self.claim(len(holders) == 1, "3", f"ticket {ticket.id} is cut, and has no lease")
        for record in holders:
            del record.leases[ticket.id]
            self.cut[ticket.id] = None

    def _see_end(self, ticket: Ticket) -> None:
        """A ticket ended that waited, or was never to wait."""
        self.waiting.pop(ticket.id, None)
        if ticket.backend and ticket.takes_lease:
            self.backends[ticket.backend].leases[ticket.id] = None
        is_one = (ticket.backend is None) is not (ticket.error is None)
        self.claim(is_one, "3", f"ticket {ticket.id} has ended, and is not either leased or failed")

    def _see_step(self, step: Step, now: float) -> None:
        record = self.backends[step.backend]
        what = f"{type(step).__name__} of {step.backend}, which is {record.state}"
        before, after = _STEPS[type(step)]
        self.claim(record.state in before, "1", what)
        out_of_reach = self._is("lost", record) and not self._is("gone", record)
        self.claim(not out_of_reach, "10", f"{what}: its host is lost")
        self.claim(not self._is("away", record), "10", f"{what}: its host is away")
        unseen = [name for name in self._tied([step.backend]) if name in self.unseen]
        self.claim(not unseen, "11", f"{what}: {unseen} may run")
        if isinstance(step, Load):
            cools = now < self._cools_until(record) and step.level == "stop"
            self.claim(not cools, "8", f"{what}: it cools down")
            self.claim(not self._is_cleared(record), "10", f"{what}: its host is drained or paused")
            self.claim(not self._is_left(record), "10", f"{what}: its GPU is left to other programs")
            record.residual = record.host_bytes = 0
        elif isinstance(step, Evict):
            self.claim(not record.leases, "3", f"{what}: its leases {[*record.leases]} are not cut")
        record.before, record.state = record.state, after

    # What is to hold after each fact

    def look(self, now: float) -> None:
        """Judge how things are once a fact was settled."""
        if self.unseen:
            self._known_at = math.inf
        elif self._known_at == math.inf:
            self._known_at = now
        for number, ticket in self.waiting.items():
            self.claim(not ticket.settled, "3", f"ticket {number} has ended, and nobody was told")
        for name, record in self.backends.items():
            late = record.drain and now >= record.drain.ends
            in_reach = not (self._is("lost", record) or self._is("away", record))
            self.claim(not (late and in_reach), "4", f"{name} drains although its time is over")
        for gpu in dict.fromkeys(gpu for each in self._config.backends for gpu in each.gpu_names):
            self._look_at_gpu(gpu)
        for model in self.waiting_models:
            self._look_at_queue(model, now)

    def _look_at_gpu(self, gpu: str) -> None:
        there = self._at(gpu)
        names = [each.backend.name for each in there if each.holds]
        self.claim(self._fits(gpu, there), "1", f"GPU {gpu} has no room for {names}")

    def _at(self, gpu: str) -> list[_Holding]:
        return [each for each in self.backends.values() if gpu in each.backend.gpu_names]

    def _fits(self, gpu: str, there: Sequence[_Holding], more: _Holding | None = None) -> bool:
        """Whether a GPU has room for what these hold, and for one more."""
        size = self._capacity.get(gpu)
        holders = [each for each in there if each.holds and each is not more] + ([more] if more else [])
        if len(holders) > 1 and (size is None or any(each.backend.vram is None for each in holders)):
            return False
        kept = sum([each.residual for each in there if each is not more])
        return size is None or sum([each.backend.vram or 0 for each in holders]) + kept <= size

    def _look_at_queue(self, model: str, now: float) -> None:
        """No request waits for a place that is free, or for a load that could begin."""
        own = self.of_model(model)
        serving = [e for e in own if e.is_up and not self._is("lost", e) and not self._is_cleared(e)]
        free = [e.backend.name for e in serving if len(e.leases) < (e.backend.concurrency or math.inf)]
        if all(each.backend.infer_type == "neutral" for each in own):
            self.claim(not free, "5", f"{model} waits, and {free} could serve it")
        loading = any(each.state == "loading" and not self._is("lost", each) for each in own)
        if serving or loading or model in self._situation.begun:
            return
        for record in own if not self._world.holds_back else ():
            fine = not self._could_be_loaded(record, now)
            self.claim(fine, "12", f"{model} waits, and nobody holds what {record.backend.name} needs")

    def _could_be_loaded(self, record: _Holding, now: float) -> bool:
        """Whether there is room for a backend without any eviction, and no reason why it is not loaded."""
        backend, like = record.backend, self.of_model(record.backend.model)
        if record.state not in ("stopped", "standby") or self._is_cleared(record) or backend.url:
            return False
        if (
            self._is("lost", record)
            or self._is("away", record)
            or self._tied([backend.name]) & {*self.unseen}
        ):
            return False
        if record.state == "stopped" and self._cools_until(record) > now:
            return False
        if backend.most is not None and sum([e.state in ("up", "loading") for e in like]) >= backend.most:
            return False
        there = {gpu: self._at(gpu) for gpu in backend.gpu_names}
        if any(each.holds and not (each.is_up or each is record) for own in there.values() for each in own):
            return False  # a swap is under way there, or nobody knows what it holds
        has_room = all(
            not self._others.get(gpu) and self._fits(gpu, own, record) for gpu, own in there.items()
        )
        has_room = has_room and self._has_memory(record)
        return has_room and there.keys().isdisjoint(self._reserved(backend.model, now))

    def _cools_until(self, record: _Holding) -> float:
        return self._situation.backend(record.backend.name, record.backend.model).retry_at

    def _swaps_to(self, other_than: str) -> set[str]:
        """The models to which swaps are under way whose loads have not begun, but for one."""
        drains = {each.drain.target for each in self.backends.values() if each.drain and each.drain.target}
        return (drains | self._situation.begun) - {other_than}

    def _has_memory(self, record: _Holding) -> bool:
        host = record.backend.host
        budget = self._config.memory_of(host)
        comes = self._swaps_to(record.backend.model)
        others = [self.backends[name] for name in self.on_host(host) if self.backends[name] is not record]
        used = sum(
            [
                (each.backend.ram or 0) if each.holds or each.backend.model in comes else each.host_bytes
                for each in others
            ]
        )
        return budget is None or used + (record.backend.ram or 0) <= budget

    def _reserved(self, model: str, now: float) -> set[str]:
        """The GPUs of other models' swaps under way, and of other queues that are overdue."""
        found: set[str] = set()
        victims = [each for each in self.backends.values() if each.drain]
        for other in [name for name in self.waiting_models if name != model]:
            since = self.waiting[self.waiting_for(other)[0]].since
            is_overdue = now >= since + self._bounds.get(other, math.inf)
            drained = {g for e in victims if e.drain and e.drain.target == other for g in e.backend.gpu_names}
            for each in self.of_model(other):
                if is_overdue or not drained.isdisjoint(each.backend.gpu_names):
                    found.update(each.backend.gpu_names)
        for other in self._situation.begun - {model}:
            found.update(gpu for each in self.of_model(other) for gpu in each.backend.gpu_names)
        return found

    def most_seconds(self, one: float) -> float:
        """The longest that a queue may wait from now on: its bound, the swap under way, and a round.

        ``one``: the seconds of a swap of which everything goes well, without the longest drain.
        """
        drains = [self._config.drain_timeout, *[each.drain_timeout or 0.0 for each in self._config.backends]]
        longest = max([each for each in drains if math.isfinite(each)], default=0.0)
        bound = max([self._bounds.get(model, 0.0) for model in self.waiting_models], default=0.0)
        return bound + (len(self.backends) + 2) * (longest + one)

    def judge_log(self, log: Sequence[Event]) -> None:
        """Have the log of events judged by itself, which does not say that nothing may be begun yet (11)."""
        for text in check(log, self._config):
            at, _, what = text.partition(" ")
            if not (what.endswith("is overdue, and its swap has not begun") and float(at) <= self._known_at):
                self.wrong.append(Violation("log", what))
