"""One model: its backends, which may be in several GPU groups, its queue, its demand, its settings.

It is there as long as any backend is its own: a reload changes it in place.

A queue is overdue some seconds, its bound, after its first request came. The bound is fixed when the queue
begins. Where a model takes only so many requests at once its queue is admitted in parts, and senders take
turns: a sender of a hundred requests at once delays only itself; the first request of another waits for one
of them, not for a hundred. A sender that comes back after its last request was taken comes last.

A backend with a ``most`` is loaded only while fewer backends of its model than that are resident or coming,
over all GPU groups and hosts; of a model that is served in two stages, fewer of the same stage. Counted are
the backends that are ready, and the targets of swaps. Not counted are those

- that drain or are being evicted, or whose load is being cancelled: they leave, and a queue that they were
  evicted for need not wait for them;
- in standby, or stuck;
- that the configuration has no longer, or not as it is;
- on a host that is lost or drained: what is there serves nobody, or is about to stop.

So there may be too many at times: a drain is reprieved, a host is back, two were adopted, ``most`` became
less. Then backends are given up until there are as many as there may be: first a swap whose load has not
begun, then a load that no request waits for, then the backend with the fewest requests in flight, which is
drained and evicted as for any other reason.

Of the backends that are ready and have a place, the routing policy (pipeline.py) takes one, by what the
in-flight tracker knows of each (``Replicas``). A model with backends for prefill and for decode is asked in
two stages: both are chosen in one go, or neither. One that takes either stage does all of a request if no
other is left for its prompt.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from anvil_mux.config.config import EITHER, STAGES, Backend, Config
from anvil_mux.config.kinds import AUTO
from anvil_mux.routing.in_flight import InFlightTracker
from anvil_mux.routing.prefix import BYTES_PER_TOKEN
from anvil_mux.routing.routing import Routing, Work
from anvil_mux.scheduler.slot import LOADING, Slot, Ticket

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


class ModelSettings(NamedTuple):
    """The settings of one model, from those of all its backends."""

    priority: int
    max_wait: float
    """After how many seconds its queue is overdue at the latest: the shortest that its backends ask for."""
    follows_load: bool
    """Whether any of them asks for ``auto``: the bound follows the load, and ``max_wait`` the others."""
    max_queue: float
    """The most requests that its queue may have, of what its backends say the least; infinite: no bound."""
    limited: bool
    """Whether any backend takes only so many requests at once."""
    bounded: bool
    """Whether only so many of its backends are resident at once."""
    staged: bool
    """Whether prefill and decode may be done by different backends."""
    routing: str
    """The name of its routing policy."""


def model_settings(config: Config) -> dict[str, ModelSettings]:
    """The settings of each model of a configuration."""
    found: dict[str, list[Backend]] = {}
    for each in config.backends:
        found.setdefault(each.model, []).append(each)
    return {name: settings_of(own, config) for name, own in found.items()}


def settings_of(backends: Sequence[Backend], config: Config) -> ModelSettings:
    """The settings of the model of these backends."""
    waits = [each.max_wait for each in backends]
    return ModelSettings(
        priority=max([each.priority for each in backends]),
        max_wait=min([each for each in waits if not isinstance(each, str)], default=math.inf),
        follows_load=AUTO in waits,
        max_queue=min([each.max_queue for each in backends if each.max_queue], default=math.inf),
        limited=any(each.concurrency for each in backends),
        bounded=any(each.most is not None for each in backends),
        staged=any(each.infer_type in ("prefill", EITHER) for each in backends),
        routing=backends[0].routing,
    )


class ModelQueue:
    """The requests that wait for one model."""

    def __init__(self) -> None:
        self.tickets: dict[Ticket, None] = {}
        """The tickets that wait, oldest first."""
        self.bound = math.inf
        """After how many seconds it is overdue."""
        self.load_seconds = 0.0
        """The time that the load of its model was expected to take when it began."""
        self.left = -math.inf
        """When a backend of a limited model last ceased to be ready: no request waited for a load before."""
        self._turns: dict[Hashable, dict[Ticket, None]] = {}
        """Sender -> the tickets that take a lease, oldest first; the senders in the order of their turns."""

    def __iter__(self) -> Iterator[Ticket]:
        return iter(self.tickets)

    def __len__(self) -> int:
        return len(self.tickets)

    def __contains__(self, ticket: object) -> bool:
        return ticket in self.tickets

    def __repr__(self) -> str:
        return f"<ModelQueue {[ticket.id for ticket in self.tickets]}>"

    @property
    def first(self) -> Ticket:
        return next(iter(self.tickets))

    @property
    def since(self) -> float:
        """Since when the first of its requests has waited for a load."""
        return max(self.first.since, self.left)

    @property
    def overdue_at(self) -> float:
        """When its swap begins, whatever the policy says."""
        return self.since + self.bound

    def join(self, ticket: Ticket) -> None:
        self.tickets[ticket] = None
        if ticket.takes_lease:
            self._turns.setdefault(ticket.sender, {})[ticket] = None

    def leave(self, ticket: Ticket) -> None:
        """Take out a ticket; no turn changes."""
        del self.tickets[ticket]
        own = self._turns.get(ticket.sender, {})
        own.pop(ticket, None)
        if not own:
            self._turns.pop(ticket.sender, None)

    def take(self, fits: Callable[[Ticket], bool]) -> Ticket | None:
        """Take out the next ticket by turns that ``fits``; its sender's next turn comes after all others'."""
        ticket = next((each for own in self._turns.values() for each in own if fits(each)), None)
        if ticket is not None:
            self.leave(ticket)
            if ticket.sender in self._turns:
                self._turns[ticket.sender] = self._turns.pop(ticket.sender)
        return ticket

    def clear(self) -> None:
        self.tickets.clear()
        self._turns.clear()


@dataclass(eq=False, slots=True)
class Demand:
    """How often a model is asked for, and for how long: what a policy knows of the future.

    Two rates matter. ``rate`` is that of all arrivals. ``growth`` is that of arrivals while others wait
    already: it says how fast a queue grows, and is far lower where clients wait for one answer before they
    ask again. Before there were queues, arrivals while others are answered tell the same: a lone client never
    comes then. A model that falls silent is believed to go on at most as often as its silence allows.

    What was seen is forgotten: arrivals with time, queues with each queue, answers and pauses with each of
    them. All of it depends on the facts alone, not on when it is asked: the simulator and the program see
    the same.
    """

    _first: float = -math.inf
    _last: float = -math.inf
    _weight: float = 0.0  # arrivals, those before the last one faded to its moment
    _joined: float = 0.0
    _queue_seconds: float = 0.0
    _overlaps: float = 0.0  # arrivals while others were answered
    _busy_seconds: float = 0.0  # and how long
    _busy_since: float = math.inf
    longest: float = 0.0
    """How many requests the longest of its queues had, of late; 0: it had none."""
    overlapping: int = 0
    """Requests that came since the model was last idle, while others were answered."""
    pause_seconds: float = 0.0
    """How long the model is resident and idle before the next request comes."""
    service_seconds: float = 0.0
    """How long a lease lasts; 0 before the first has ended."""

    # Facts

    def arrived(self, now: float) -> None:
        if self._weight:
            self._weight = 1.0 + self._weight * math.exp((self._last - now) / MEMORY_SECONDS)
        else:
            self._first, self._weight = now, 1.0
        self._last = now

    def returned(self, pause_seconds: float, now: float = math.inf) -> None:
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
            self._busy_since = math.inf

    # Questions

    def rate(self, now: float) -> float:
        """Arrivals per second."""
        return self.rates(now)[0]

    def rates(self, now: float, count: int = 0, seconds: float = 0.0) -> tuple[float, float]:
        """``rate`` and ``growth``; ``count`` wait now, the first of them for ``seconds``."""
        if not self._weight:
            return 0.0, 0.0
        silence = now - self._last
        most = 1.0 / (silence if silence > SHORTEST_SILENCE else SHORTEST_SILENCE)
        faded = self._weight * math.exp(-silence / MEMORY_SECONDS)
        seen = 1.0 - math.exp((self._first - FIRST_SECONDS - now) / MEMORY_SECONDS)
        rate = faded / (MEMORY_SECONDS * seen)
        if rate > most:
            rate = most
        believed = (self._overlaps + TRUST_ARRIVALS) / (self._busy_seconds * rate + TRUST_ARRIVALS)
        guess = rate * believed if believed < 1.0 else rate  # before there were queues
        joined = self._joined + (count - 1 if count else 0) + guess * TRUST_SECONDS
        growth = joined / (self._queue_seconds + seconds + TRUST_SECONDS)
        return rate, growth if growth < most else most


@dataclass(eq=False, slots=True)
class Model:
    """One model, and all that is kept by model."""

    name: str
    settings: ModelSettings
    routing: Routing
    full: bool = False
    """Whether routing uses the figures of engines, besides our own counts."""
    slots: list[Slot] = field(default_factory=list)
    """All backends of the model, and those that are about to become its own, ordered by their GPUs."""
    queue: ModelQueue = field(default_factory=ModelQueue)
    replicas: Replicas | None = None
    """The choice among its backends; None: it has one only."""
    demand: Demand = field(default_factory=Demand)
    ready: list[Slot] = field(default_factory=list)
    """The backends that may be leased."""
    active: dict[Slot, None] = field(default_factory=dict)
    """The backends that are not just stopped, in any GPU group, or that a swap is to load."""
    queue_group: str = ""
    """The name of the GPU group in which its queue stands; "": it has backends in one only."""
    unload_when_idle: bool = False
    """Whether it is evicted once nobody uses it, unless it is asked for before."""

    @property
    def priority(self) -> int:
        return self.settings.priority

    @property
    def limited(self) -> bool:
        """Whether its queue is admitted in parts, and may have requests although it is resident."""
        return self.settings.limited

    @property
    def bounded(self) -> bool:
        return self.settings.bounded

    @property
    def is_spread(self) -> bool:
        """Whether it has backends in several GPU groups."""
        return bool(self.queue_group)

    def queues_in(self, group: str) -> bool:
        """Whether its queue stands in this GPU group, which has a backend of it."""
        return self.queue_group in ("", group)

    @property
    def present(self) -> list[Slot]:
        """The backends that are the model's by now: others are another's until they are left."""
        return [slot for slot in self.slots if slot.model == self.name]

    # Changes

    def set(self, settings: ModelSettings, routing: Routing) -> None:
        """Go by these settings from now on."""
        self.settings, self.routing = settings, routing
        self.queue.bound = min(self.queue.bound, settings.max_wait)
        if self.replicas:
            self.replicas.in_flight.routing = routing

    def take(self, slots: Sequence[Slot]) -> None:
        """Have just these backends, in this order."""
        before, after = dict.fromkeys(self.slots), dict.fromkeys(slots)
        left = [slot for slot in before if slot not in after]
        come = [slot for slot in after if slot not in before]
        self.slots[:] = slots
        for slot in left:
            self.active.pop(slot, None)
        for slot in come:
            self.note(slot)
        self.renew_ready()
        if len(slots) < 2:
            self.replicas = None
        elif self.replicas:
            self.replicas.change(left, come)
        else:
            self.replicas = Replicas(self)

    def note(self, slot: Slot) -> None:
        """Note that a backend has entered a state, or is the target of a swap or is so no longer."""
        if slot.model == self.name and (slot.coming or slot.state != "stopped"):
            self.active[slot] = None
        else:
            self.active.pop(slot, None)

    def renew_ready(self) -> None:
        """Bring up to date which backends may be leased, in their order."""
        self.ready = [slot for slot in self.slots if slot.serves]

    def takes(self, owner: str = "") -> bool:
        """Whether a request would be leased at once; one that needs ``owner`` waits for it."""
        if owner and (only := self.needed(owner)):
            return not only.full
        if self.replicas:
            return self.replicas.take_one_more()
        return any(not slot.full for slot in self.ready)

    @property
    def is_queue_full(self) -> bool:
        """Whether as many requests wait for it as its own ``max_queue`` allows."""
        return len(self.queue.tickets) >= self.settings.max_queue

    def needed(self, owner: str) -> Slot | None:
        """The only backend that can serve a request, if that is ready: it has what the request refers to."""
        return next((slot for slot in self.ready if slot.name == owner), None) if owner else None

    @property
    def bytes_per_token(self) -> float:
        """The bytes of a prompt for each token, as was learned. Any thread may ask, at any time."""
        return self.replicas.in_flight.bytes_per_token if self.replicas else BYTES_PER_TOKEN

    @property
    def is_loading(self) -> bool:
        return any(slot.state in LOADING for slot in self.active)

    @property
    def is_used(self) -> bool:
        """Whether any request is leased."""
        return any(slot.holders for slot in self.active)

    @property
    def is_coming(self) -> bool:
        """Whether a swap under way will make it resident.

        What is still being loaded on a host that was drained, or when a pause began, does not count: it does
        not stay.
        """
        return any(slot.coming and not slot.host.is_cleared for slot in self.active)

    # How many are resident

    def may_come(self, slot: Slot) -> bool:
        """Whether one more backend like ``slot`` may be resident."""
        most = slot.backend.most
        return most is None or len(self._counted(slot)) < most

    @property
    def surplus(self) -> Slot | None:
        """The next backend to give up because more are resident or coming than may be; None: none is."""
        found = [slot for slot in reversed(self.active) if self._is_too_many(slot)]
        able = [slot for slot in found if slot.state != "loading" or not self.queue.tickets]
        return min(able, key=_loss, default=None)

    @property
    def counted(self) -> int:
        """How many backends are resident or coming, of a model of which only so many may be."""
        return sum([_counts(slot) for slot in self.active]) if self.bounded else 0

    def _is_too_many(self, slot: Slot) -> bool:
        most = slot.backend.most
        return most is not None and _counts(slot) and len(self._counted(slot)) > most

    def _counted(self, like: Slot) -> list[Slot]:
        """The backends that are resident or coming, for the same stage."""
        stage = like.backend.infer_type
        return [
            slot
            for slot in self.active
            if slot.model == like.model and slot.backend.infer_type == stage and _counts(slot)
        ]


def _loss(slot: Slot) -> tuple[int, int, float]:
    """How much is lost with a backend, the least first."""
    stage = 2 if slot.state == "ready" else int(slot.state == "loading")
    return stage, len(slot.holders), slot.used


def _counts(slot: Slot) -> bool:
    if slot.leaving or slot.paused_as or not slot.host.takes_loads:
        return False
    return slot.state in ("ready", "loading") or (slot.coming and slot.state != "cancelling")


# The choice among its backends


class Replicas:
    """The backends of one model, of which there are several."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._by_name = {slot.name: slot for slot in model.slots}
        backends = [slot.backend for slot in model.slots]
        self.in_flight = InFlightTracker(model.routing, backends, full=model.full)

    def change(self, gone: Iterable[Slot], come: Iterable[Slot]) -> None:
        """Do without the backends that are ``gone``, and with those that come or are described otherwise."""
        for slot in come:
            self._by_name[slot.name] = slot
            self.in_flight.join(slot.backend)
        for slot in gone:
            if self._by_name[slot.name] is slot:
                del self._by_name[slot.name]
                self.in_flight.leave(slot.name)

    def take_one_more(self) -> bool:
        """Whether a request would be leased at once by any of those that are ready."""
        free = [slot for slot in self._model.ready if not slot.full]
        if self._model.settings.staged and _serve_all_stages(self._model.ready):
            return _serve_all_stages(free)
        return bool(free)

    def lacking(self, now: float) -> list[Slot]:
        """The backends to load so that each stage has one; a second, if the only one takes both."""
        if not self._model.settings.staged:
            return []
        there = [slot for slot in self._model.slots if slot.host.takes_loads]
        loaded = [slot for slot in there if slot.state != "stopped"]
        able = [slot for slot in there if slot.state == "stopped" and slot.retry_at <= now]
        found: list[Slot] = []
        for stage in STAGES:
            if not any(_takes(slot, stage) for slot in loaded):
                found += [slot for slot in able if _takes(slot, stage) and slot not in found][-1:]
        if sum([_is_staged(slot) for slot in (*loaded, *found)]) == 1:
            found += [slot for slot in able if _is_staged(slot) and slot not in found][-1:]
        return found

    def route(self, ready: list[Slot], ticket: Ticket, now: float) -> tuple[Slot | None, Slot | None]:
        """The backend that gets a request, and the one that gets its prefill if it is asked in two stages.

        None: the routing policy lets none of ``ready`` take it.
        """
        of = self._stages(ready, staged=ticket.prefill is not None)
        if ticket.prefill and "decode" in of:
            return self._route_stages(of["prefill"], of["decode"], ticket, ticket.prefill, now)
        return self._choose(of["neutral"], ticket, now), None

    def explain(
        self, ready: list[Slot], work: Work, now: float, *, staged: bool
    ) -> dict[str, list[dict[str, Any]]]:
        """Stage -> how each replica would be judged, were this request to come now; nothing is changed."""
        of = self._stages(ready, staged=staged) if ready else {"neutral": []}
        if "decode" not in of:
            return {"neutral": self._explain(work, "neutral", of["neutral"], now)}
        decode = self._explain(work._replace(session="", stream=False), "decode", of["decode"], now)
        writes = [self._by_name[row["backend"]] for row in decode if row["chosen"]]
        others = [slot for slot in of["prefill"] if slot not in writes]
        if writes and writes[0] in of["prefill"] and all(slot.full for slot in others):
            return {"neutral": self._explain(work, "neutral", writes, now)}
        return {"prefill": self._explain(work, "prefill", others, now), "decode": decode}

    def take_back(self, ready: list[Slot], idle: Slot, now: float) -> Iterator[tuple[Ticket, Slot]]:
        """Take back the requests that wait behind others and would be better off at ``idle``."""
        return self._uncharged(self.in_flight.better_off(idle.name, _like(idle, ready), now), now)

    def take_from(self, ready: list[Slot], silent: Slot, now: float) -> Iterator[tuple[Ticket, Slot]]:
        """Take back the requests that wait at a stale replica and may go to another."""
        return self._uncharged(self.in_flight.left_waiting(silent.name, _like(silent, ready), now), now)

    def _uncharged(self, tickets: Iterable[Hashable], now: float) -> Iterator[tuple[Ticket, Slot]]:
        for ticket in tickets:
            assert isinstance(ticket, Ticket)
            assert ticket.backend is not None
            self.in_flight.ended(ticket, now=now)
            yield ticket, self._by_name[ticket.backend]

    def _stages(self, ready: list[Slot], *, staged: bool) -> dict[str, list[Slot]]:
        """Stage -> the backends that may get it; neutral: one backend does all of a request."""
        if not self._model.settings.staged:
            return {"neutral": ready}
        of = {stage: [slot for slot in ready if _takes(slot, stage)] for stage in STAGES}
        if staged and of["prefill"] and of["decode"] and len(ready) > 1:
            return of
        whole = [slot for slot in ready if slot.backend.infer_type == "neutral"]
        return {"neutral": [*whole, *of["decode"]] or ready}

    def _route_stages(
        self, prefills: list[Slot], decodes: list[Slot], ticket: Ticket, first: Ticket, now: float
    ) -> tuple[Slot | None, Slot | None]:
        whole = ticket.work
        ticket.work = whole._replace(infer_type="decode", session="", stream=False)
        slot = self._choose(decodes, ticket, now)
        others = [each for each in prefills if each is not slot and not each.full]
        if slot and slot in prefills and not others:
            self.in_flight.ended(ticket)
            ticket.work = whole
            return self._choose([slot], ticket, now), None
        leads = self._choose(others, first, now) if slot else None
        if leads is None:
            self.in_flight.ended(ticket)
            ticket.choice = None
            return None, None
        return slot, leads

    def _choose(self, among: list[Slot], ticket: Ticket, now: float) -> Slot | None:
        names = [slot.name for slot in among if not slot.full]
        if ticket.work.owner in names:
            names = [ticket.work.owner]
        choice = self.in_flight.choose(ticket, ticket.work, names, self._failed(now), now)
        ticket.choice = choice
        return self._by_name[choice.backend] if choice else None

    def _explain(self, work: Work, kind: str, among: list[Slot], now: float) -> list[dict[str, Any]]:
        names = [slot.name for slot in among if not slot.full]
        work = work._replace(infer_type=kind)
        rows = self.in_flight.explain(work, names, self._failed(now), now) if names else []
        shown = {row["backend"] for row in rows}
        for slot in self._model.slots:
            if slot.name not in shown:
                why = slot.state if slot.state != "ready" else self._left_out(slot, kind)
                why = "host_lost" if slot.host.is_lost else why
                why = "paused" if slot.paused_as else why
                rows.append({"backend": slot.name, "chosen": False, "removed_by": why, "metrics": {}})
        return rows

    def _left_out(self, slot: Slot, kind: str) -> str:
        """Why a backend that is ready may not get a stage."""
        able = slot.backend.infer_type != "prefill" if kind == "neutral" else _takes(slot, kind)
        if not able:
            return "infer_type"
        return "full" if slot.full else "decode"

    def _failed(self, now: float) -> list[str]:
        """The backends that could not be stopped, or loaded lately."""
        return [slot.name for slot in self._model.slots if slot.state == "stuck" or slot.retry_at > now]


def _takes(slot: Slot, stage: str) -> bool:
    return slot.backend.infer_type in (stage, EITHER)


def _serve_all_stages(slots: Sequence[Slot]) -> bool:
    return all(any(_takes(slot, stage) for slot in slots) for stage in STAGES)


def _like(one: Slot, ready: Iterable[Slot]) -> list[str]:
    """The backends that are ready for the same stage."""
    kind = one.backend.infer_type
    return [slot.name for slot in ready if slot.backend.infer_type == kind]


def _is_staged(slot: Slot) -> bool:
    return slot.backend.infer_type in (*STAGES, EITHER)
