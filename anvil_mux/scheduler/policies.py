"""WHEN a swap is worth its cost.

A policy is a frozen dataclass whose fields are its settings and whose ``decide`` is a pure function from a
``Snapshot`` of one GPU group to a ``Decision``. It never waits, draws no random numbers and keeps no state,
so that the simulator, the tests and the program ask exactly the same question. ``Stay(until)`` is how a
policy waits: the question is asked again then (or at ``Stay.again``), and before it whenever a queue or a
swap has changed, or a lease has ended while a queue waits (``Stay.leases`` says for which leases that would
change nothing).

The policy proposes, the GPU group disposes: bounded drains, ``max_wait``, gates and cool-downs hold under
any policy, even a wrong one.

To add one: a dataclass with ``decide`` and an entry in ``POLICIES``; it may also be named as
``package.module:Class`` in a configuration.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from pkgutil import resolve_name
from typing import NamedTuple, Protocol

from anvil_mux.clock import YEAR_SECONDS
from anvil_mux.config.settings import meant, show, unfit
from anvil_mux.scheduler.causes import POLICY, Cause, Kind

FOREVER = math.inf


class Queue(NamedTuple):
    """The requests that wait for one model whose swap could begin now."""

    model: str
    waiting: int
    """The number of requests."""
    oldest: float
    """The moment at which the first of them arrived."""
    newest: float
    evicts: tuple[str, ...] = ()
    """The models that would be evicted; empty when there is room."""
    evict_seconds: float = 0.0
    """How long evicting them will take, without the drain, as far as is known."""
    load_seconds: float = 10.0
    """How long loading it after that will take, as far as is known."""
    learned: bool = False
    """A swap in this direction was made before."""
    growth: float = 0.0
    """Arrivals per second while others wait, of late."""
    service_seconds: float = 0.0
    """How long its requests hold a lease, of late; 0: not known yet."""
    max_wait: float = FOREVER
    """Seconds after ``oldest`` at which the swap begins whatever the policy says."""
    priority: int = 0

    @property
    def swap_seconds(self) -> float:
        return self.evict_seconds + self.load_seconds


class Resident(NamedTuple):
    """One backend that holds GPUs and may be leased."""

    model: str
    backend: str
    since: float
    leases: int
    last_used: float
    rate: float = 0.0
    """Arrivals per second for its model, of late."""
    growth: float = 0.0
    """The same while others wait: how fast its queue would grow."""
    pause_seconds: float = 0.0
    """How long it is idle before the next request comes, of late."""
    service_seconds: float = 0.0
    """How long its requests hold a lease, of late; 0: not known yet."""
    reload_seconds: float = 10.0
    """How long loading it again will take, as far as is known."""


class Swapping(NamedTuple):
    """A swap under way on this GPU group."""

    model: str
    """The model that is coming."""
    evicts: tuple[str, ...]
    state: str
    """The state of a victim or of the target: draining, evicting, loading or cancelling."""
    since: float
    """When it entered that state."""


class Spill(NamedTuple):
    """A resident model with more to do than it can, and another replica of it that could be loaded now.

    Its GPUs are free, or held by idle backends of other models, and no queue waits for them.
    """

    model: str
    backend: str
    waiting: int
    """Requests that wait at a replica, behind another one, for the first byte of their answers."""
    waited_seconds: float
    """Seconds that all of them have waited, added up."""
    evicts: tuple[str, ...] = ()
    """The models that would be evicted; empty when there is room."""
    evict_seconds: float = 0.0
    load_seconds: float = 10.0
    reload_seconds: float = 0.0
    """How long loading the evicted models again would take."""

    @property
    def cost_seconds(self) -> float:
        return self.evict_seconds + self.load_seconds + self.reload_seconds


class Snapshot(NamedTuple):
    """The picture of a GPU group that a policy decides by."""

    now: float
    group: str
    residents: tuple[Resident, ...]
    queues: tuple[Queue, ...]
    """Highest priority first, then oldest first; only those whose swap could begin now."""
    swapping: tuple[Swapping, ...] = ()
    """Swaps under way, on other GPUs than those the queues need."""
    spills: tuple[Spill, ...] = ()


class Stay(NamedTuple):
    """The swap is held back, until ``until`` at the latest if nothing changes."""

    until: float = FOREVER
    cause: Cause = POLICY
    leases: float = FOREVER
    """While each resident keeps so many leases, the end of one is no reason to ask again: the answer holds,
    or the policy is content with it. 0: leases do not matter; by default each may. A hint: no part of the
    answer."""
    again: float = FOREVER
    """The moment to ask again, if that is before ``until``: the swap may be worth it sooner. No part of the
    answer either."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stay) and self[:2] == other[:2]

    def __hash__(self) -> int:
        return hash(self[:2])


@dataclass(frozen=True, slots=True)
class SwapTo:
    """Load ``model`` now, one of the queues."""

    model: str
    cause: Cause = POLICY


@dataclass(frozen=True, slots=True)
class Unload:
    """Evict ``model`` although nobody waits for its GPUs."""

    model: str
    cause: Cause = POLICY


Decision = Stay | SwapTo | Unload


class Policy(Protocol):
    def decide(self, seen: Snapshot) -> Decision: ...


def decide(policy: Policy, seen: Snapshot) -> Decision:
    """Ask a policy. If it says ``Stay``, another replica of a busy model may still be worth a load."""
    decision = policy.decide(seen)
    if not seen.spills or not isinstance(decision, Stay):
        return decision
    other = spill_over(seen)
    return _sooner(decision, other.until) if isinstance(other, Stay) else other


def _sooner(stay: Stay, until: float) -> Stay:
    return Stay(min(stay.until, until), stay.cause, again=stay.again)


def spill_over(seen: Snapshot) -> SwapTo | Stay:
    """Load another replica once the requests that wait have together waited for as long as that takes.

    Whatever comes after, the cost is at most twice that of the best choice.
    """
    soonest = FOREVER
    for spill in seen.spills:
        missing = spill.cost_seconds - spill.waited_seconds
        if missing <= TINY_SECONDS:
            return SwapTo(spill.model, Cause("replicas_busy", waiting=spill.waiting))
        soonest = min(soonest, seen.now + missing / spill.waiting)
    return Stay(soonest)


TINY_SECONDS = 1e-6


@dataclass(frozen=True)
class Eager:
    """Swap at once, for the queue that has waited longest. Batches form while a load runs (ADR-0006)."""

    def decide(self, seen: Snapshot) -> Decision:
        if not seen.queues:
            return Stay()
        first = seen.queues[0]
        return SwapTo(first.model, Cause("oldest_first", waiting=first.waiting))


@dataclass(frozen=True)
class Debounce:
    """Swap when no request has arrived for a moment, so that a burst is served together (ADR-0006)."""

    quiet: float = 1.0
    """Seconds without a new request after which the swap begins."""
    max_hold: float = 10.0
    """Seconds after the first request at which it begins in any case."""

    def decide(self, seen: Snapshot) -> Decision:
        due = [(self._due(queue), queue) for queue in seen.queues]
        for moment, queue in due:
            if moment <= seen.now:
                return SwapTo(queue.model, Cause(self._why(queue, seen.now), waiting=queue.waiting))
        if not due:
            return Stay()
        until = min([moment for moment, _ in due])
        return Stay(until, Cause("not_quiet", seconds=self.quiet), leases=0)

    def _due(self, queue: Queue) -> float:
        if not queue.evicts:
            return queue.oldest
        return min(queue.newest + self.quiet, queue.oldest + self.max_hold, queue.oldest + queue.max_wait)

    def _why(self, queue: Queue, now: float) -> Kind:
        if not queue.evicts:
            return "room_free"
        return "quiet" if queue.newest + self.quiet <= now else "held_longest"


@dataclass(frozen=True)
class CostAware:
    """Swap when enough requests wait to be worth its cost (the policy of llmux v0.9).

    Differs where llmux was at fault: each deferral is decided anew when its time has come, and nothing is
    decided from half a swap. A cost is evict + load, without the drain.
    """

    amortization: float = 0.5
    """Requests that must wait, for each second that the swap costs."""
    window: float = 2.0
    """Seconds to wait for more requests after the first."""
    max_wait: float = 15.0
    """Seconds after the first request at which the swap begins in any case."""
    prior: float = 10.0
    """Seconds that a swap is assumed to cost before the first one was measured."""
    cap: float = 60.0
    """Seconds that a swap is assumed to cost at most."""
    serving_window: bool = True
    """Whether a model serves for at least as long as the swap costs (llmux v3) or not (v2)."""

    def decide(self, seen: Snapshot) -> Decision:
        since: dict[tuple[str, ...], float] = {}
        stays = []
        for queue in seen.queues:
            if queue.evicts not in since:
                since[queue.evicts] = _since(queue.evicts, seen)
            until, cause = self._until(queue, since[queue.evicts], seen.now)
            if until <= seen.now:
                return SwapTo(queue.model, cause)
            stays.append((until, cause))
        return Stay(*min(stays), leases=0) if stays else Stay()

    def _until(self, queue: Queue, since: float, now: float) -> tuple[float, Cause]:
        """When the queue may have its swap, and why then; ``since``: when its victims became resident."""
        if not queue.evicts:
            return now, Cause("room_free", waiting=queue.waiting)
        limit = queue.oldest + min(self.max_wait, queue.max_wait)
        if limit <= now:
            return limit, Cause("waited_enough", waiting=queue.waiting)
        cost = min(queue.evict_seconds + queue.load_seconds, self.cap) if queue.learned else self.prior
        if self.serving_window and since + cost > now:
            return min(since + cost, limit), Cause("swap_cost")
        required = max(1, math.ceil(self.amortization * cost))
        if queue.waiting >= required:
            return now, Cause("enough_wait", waiting=queue.waiting, required=required, seconds=cost)
        until = min(queue.oldest + self.window, limit)
        if until > now:
            return until, Cause("more_awaited")
        return until, Cause("none_awaited", waiting=queue.waiting)


def _since(evicts: tuple[str, ...], seen: Snapshot) -> float:
    """When the last of these became resident."""
    return max([resident.since for resident in seen.residents if resident.model in evicts], default=-FOREVER)


@dataclass(frozen=True)
class TimeSlice:
    """Swap when the model's time slice is over; slices are proportional to the shares of requests (llmux)."""

    period: float = 20.0
    """Seconds that are divided among the model that serves and those that wait."""
    least: float = 3.0
    """The shortest slice, as a multiple of the load time of the model that serves."""
    max_wait: float = 60.0
    """Seconds after the first request of a queue at which its swap begins in any case."""

    def decide(self, seen: Snapshot) -> Decision:
        for queue in seen.queues:
            if not queue.evicts:
                return SwapTo(queue.model, Cause("room_free", waiting=queue.waiting))
        oldest = min(seen.queues, key=lambda queue: queue.oldest, default=None)
        if oldest and oldest.oldest + self.max_wait <= seen.now:
            return SwapTo(oldest.model, Cause("waited_enough", waiting=oldest.waiting))
        waiting = sum([queue.waiting for queue in seen.queues])
        slices: dict[tuple[str, ...], tuple[float, float]] = {}
        ends, least = [], FOREVER
        for queue in seen.queues:
            if queue.evicts not in slices:
                slices[queue.evicts] = self._ends(queue.evicts, seen, waiting)
            end, shortest = slices[queue.evicts]
            ends.append((min(end, queue.oldest + min(self.max_wait, queue.max_wait)), queue))
            least = min(least, shortest)
        over = [queue for end, queue in ends if end <= seen.now]
        if over:
            most = max(over, key=lambda queue: (queue.priority, queue.waiting))
            return SwapTo(most.model, Cause("slice_over", waiting=most.waiting, residents=most.evicts))
        if not ends:
            return Stay()
        end, queue = min(ends, key=lambda pair: pair[0])
        leases = 0 if end <= least else FOREVER
        return Stay(end, Cause("slice", residents=queue.evicts), leases)

    def _ends(self, evicts: tuple[str, ...], seen: Snapshot, waiting: int) -> tuple[float, float]:
        """When the slice of the last of the victims ends, and when it would end without leases."""
        end = least = -FOREVER
        for each in seen.residents:
            if each.model in evicts:
                shortest = self.least * each.reload_seconds
                end = max(end, each.since + max(self._share(each, waiting), shortest))
                least = max(least, each.since + shortest)
        return (end, least) if end > -FOREVER else (seen.now, seen.now)

    def _share(self, resident: Resident, waiting: int) -> float:
        return self.period * (resident.leases / (resident.leases + waiting))


@dataclass(frozen=True)
class Adaptive:
    """Swap when enough requests wait to pay for the swap and the way back, while few requests run.

    Two models that take turns lose ``S`` seconds per turn: both loads, both evictions, both drains. If a
    queue grows by ``l`` requests a second, and that of the model that goes by ``r`` once it is gone, the
    fewest request-seconds are lost when the queue has ``S * sqrt(l * r)`` requests at its model's arrival:
    the square root rule of lot sizes (Harris, 1913). Three things move that threshold:

    * A moment with few leases is worth waiting for, and taking when it is there. How long the next lower
      number of leases will take to come, on average, is that of an M/M/infinity queue; what it saves is the
      part of the drain that nobody has to wait for any more.
    * Clients that wait for an answer before they ask again do not fill a queue while they wait, so ``r`` says
      little of them. Where queues grow more slowly than requests arrive, the resident's next requests count
      as well, the less the longer it has served. It is believed to be idle for good after twice its usual
      pause. By that alone one quick client would keep its model for ever. So a swap is paid for once the
      queues have lost, since the resident came, as many request-seconds as it costs the resident's clients:
      half of the way there and back for each of them. A policy that pays for a swap when waiting has cost as
      much loses at most four times as much as the best choice, whatever comes (two states of a metrical task
      system: Borodin, Linial and Saks, 1992; ski rental is the simplest). A turn is no shorter than
      ``WORTHWHILE`` answers, though: clients that think would get little else than swaps. How many clients
      there are, the rates tell: of ``n`` all but the one who is answered may join a queue, so that growth /
      rate is 1 - 1/n. Where requests come whatever is answered that is 1, and the rule of lot sizes holds
      without this bound.
    * A resident that nobody has asked for of late costs nothing to evict: then the swap begins at once.

    ``max_wait`` bounds all of it. Everything it goes by is measured (demand.py, costs.py).
    """

    pause: float = 0.25
    """Seconds that a model in use is kept after its last answer, in case its client asks again."""

    def decide(self, seen: Snapshot) -> Decision:
        if not seen.queues:
            return Stay()
        overdue = FOREVER
        for queue in seen.queues:
            if not queue.evicts:
                return SwapTo(queue.model, Cause("room_free", waiting=queue.waiting))
            limit = queue.oldest + queue.max_wait
            if limit <= seen.now:
                return SwapTo(queue.model, Cause("waited_enough", waiting=queue.waiting))
            if limit < overdue:
                overdue = limit
        queue = max(seen.queues, key=_urgency) if len(seen.queues) > 1 else seen.queues[0]
        turn = _Turn(seen, queue)
        if turn.expected < turn.enough:
            if turn.over <= seen.now:
                alike = [(_lost(each, seen.now), each) for each in seen.queues if each.evicts == queue.evicts]
                queue = max(alike)[1]
                return SwapTo(queue.model, Cause("paid_for", waiting=queue.waiting))
            again = min(seen.now + max(self.pause, turn.seconds / 5), turn.quiet)
            leases = 2 * turn.leases if turn.leases <= FEW else max(turn.leases // 2, FEW)
            return Stay(min(turn.over, overdue), _worth("too_few", queue, turn), leases, again)
        answered = min(queue.newest, turn.last_used) + self.pause
        if answered <= seen.now:
            return SwapTo(queue.model, _worth("worth_it", queue, turn))
        return Stay(min(answered, overdue), _worth("in_use", queue, turn, queue.evicts))


def _worth(kind: Kind, queue: Queue, turn: _Turn, residents: tuple[str, ...] = ()) -> Cause:
    required = turn.enough if turn.enough > 0.0 else 0.0
    return Cause(kind, residents=residents, waiting=queue.waiting, expected=turn.expected, required=required)


def _urgency(queue: Queue) -> tuple[int, float]:
    """The order of queues: by priority, then by how many requests are served how soon."""
    return queue.priority, queue.waiting / (queue.evict_seconds + queue.load_seconds + 1.0)


def _lost(queue: Queue, now: float) -> tuple[int, float]:
    """The order of queues that have waited long enough: by priority, then by the request-seconds lost."""
    return queue.priority, queue.waiting * (now - (queue.oldest + queue.newest) / 2)


class _Turn:
    """The cost of a turn of one queue, and of the residents' next turn after that.

    One is made for nearly every request, so it looks at each queue and each resident once.
    """

    __slots__ = ("enough", "expected", "last_used", "leases", "over", "quiet", "seconds")

    def __init__(self, seen: Snapshot, queue: Queue) -> None:
        going = [resident for resident in seen.residents if resident.model in queue.evicts]
        leases, lost, service, back, self.last_used, self.quiet, clients = _together(going, seen.now)
        self.leases = leases
        waiting, growth = 0, 0.0
        for each in seen.queues:
            waiting += each.waiting
            growth += each.growth
        if growth < 1e-6:
            growth = 1e-6
        drain = service * math.log1p(leases)  # about the longest of so many leases
        swap_seconds = queue.evict_seconds + queue.load_seconds
        self.expected = expected = waiting + growth * (drain + swap_seconds)
        """Requests that will wait when the model is loaded."""
        served = (queue.service_seconds or service) * math.log1p(expected)
        self.seconds = seconds = swap_seconds + back + service / 2 + served
        """Seconds that are lost between two turns of the residents."""
        enough = seconds * math.sqrt(growth * lost)
        for rate, resident_for in clients:
            enough += rate * seconds * seconds / (seconds + resident_for)
        drained = lost * seconds + expected  # request-seconds lost per second of a drain
        if not leases:
            enough -= math.sqrt(2 * growth * drained * service)
        elif enough <= expected:  # else it is not the moment, whatever else it takes
            enough += _patience(leases, lost, service, growth, drained)
        self.enough = enough
        """Requests that have to wait then; if more than are expected, at least so many."""
        self.over = FOREVER
        """When the swap is paid for although fewer requests are expected."""
        if expected < enough:
            self.over = seen.now + _left(seen, going, waiting, swap_seconds + back) - drain


def _left(seen: Snapshot, going: list[Resident], waiting: int, way_seconds: float) -> float:
    """Seconds until the queues have lost what a swap costs the clients of the residents.

    ``way_seconds``: of the way there and back. Each request that waits counts once for each client, at most:
    a long queue makes no turn shorter than one swap is worth.
    """
    clients, turn, since = 0.0, way_seconds / 2, -FOREVER
    for resident in going:
        rate, growth, service_seconds = resident[5], resident[6], resident[8]
        if growth >= rate or not service_seconds:
            return FOREVER
        held, there = resident[3], rate / (rate - growth)
        clients += held if held > there else there
        answers = WORTHWHILE * (resident[7] + service_seconds)
        if answers > turn:
            turn = answers
        if resident[2] > since:
            since = resident[2]
    if not going:
        return FOREVER
    lost = 0.0
    for queue in seen.queues:
        begun = (queue[2] + queue[3]) / 2
        lost += queue[1] * (seen.now - (begun if begun > since else since))
    return turn * (clients / waiting if clients > waiting else 1.0) - lost / waiting


_Clients = list[tuple[float, float]]
"""Clients: how often they ask while they are answered, and for how long their model has served."""


def _together(going: list[Resident], now: float) -> tuple[int, float, float, float, float, float, _Clients]:
    """Add up the victims.

    Leases, growth, the longest answer and load, the last use, the next moment at which one is believed to be
    idle for good, and the clients that ask only if they are answered.
    """
    leases, lost, service, back, last_used, quiet = 0, 0.0, 0.0, 0.0, -FOREVER, FOREVER
    clients = []
    for _, _, since, held, used, rate, growth, pause, service_seconds, reload_seconds in going:
        leases += held
        lost += growth
        if service_seconds > service:
            service = service_seconds
        if reload_seconds > back:
            back = reload_seconds
        if used > last_used:
            last_used = used
        idle = used + (PAUSES * pause if pause > SHORTEST_PAUSE else PAUSES * SHORTEST_PAUSE)
        if not held and now < idle < quiet:
            quiet = idle
        if growth < rate and (held or now < idle):
            asked = (held or 1) / (pause + (service_seconds or 1.0))
            clients.append(((1.0 - growth / rate) * asked, max(now - since, 0.0)))
    return leases, lost, service or 1.0, back, last_used, quiet, clients


def _patience(leases: int, lost: float, service: float, growth: float, drained: float) -> float:
    """The gain per second of waiting for one lease fewer; each further one takes longer to come."""
    load, seconds = lost * service, 0.0  # until there is one lease fewer, while more come
    for held in range(leases + 10, leases - 1, -1):
        seconds = (service + load * seconds) / held
    seconds = min(seconds, 1e4)
    saved = drained * service / leases
    return max((saved - growth * seconds * seconds / 2) / seconds, 0.0)


FEW = 4
"""Up to so many leases the end of each may make the moment to swap; of more, only that of half of them."""
PAUSES = 2.0
"""The number of its usual pauses after which a resident is believed to be idle for good."""
SHORTEST_PAUSE = 0.02
"""The longest time that a client which does not think takes to read an answer and to ask again."""
WORTHWHILE = 10
"""Answers that each client gets in its turn before a swap can be paid for."""


POLICIES: dict[str, type] = {
    "eager": Eager,
    "debounce": Debounce,
    "cost_aware": CostAware,
    "time_slice": TimeSlice,
    "adaptive": Adaptive,
}


def build_policy(name: str, settings: Mapping[str, object] | None = None) -> Policy:
    """The policy called ``name`` with ``settings``; ValueError says what is wrong and what is known."""
    made = build(POLICIES, "policy", name, settings or {})
    if not callable(getattr(made, "decide", None)):
        raise ValueError(f"policy {name}: has no method `decide`")
    return made  # type: ignore[return-value]


def build(registry: Mapping[str, type], what: str, name: str, settings: Mapping[str, object]) -> object:
    """An instance of a registered (or dotted) frozen dataclass with ``settings`` as its fields."""
    cls = registry.get(name)
    if cls is None and ":" in name:
        try:
            cls = resolve_name(name)
        except (ImportError, AttributeError, ValueError) as error:
            raise ValueError(f"{what} {name}: cannot be imported: {error}") from None
    if cls is None:
        text = f"unknown {what} {name!r}; known: {', '.join(registry)} (or package.module:Class)"
        raise unfit(text, meant(name, registry))
    if not is_dataclass(cls):
        raise ValueError(f"{what} {name}: is not a dataclass")
    known = {each.name: each for each in fields(cls)}
    for key, value in settings.items():
        if key not in known:
            raise ValueError(f"{what} {name}: unknown setting {key!r}; known: {', '.join(known) or 'none'}")
        if isinstance(known[key].default, float) and not _is_seconds(value):
            text = f"must be a number of at least 0 and at most {YEAR_SECONDS:.0f}, a year, not {show(value)}"
            raise ValueError(f"{what} {name}: {key} {text}")
        if isinstance(known[key].default, bool) and not isinstance(value, bool):
            raise ValueError(f"{what} {name}: {key} must be true or false, not {value!r}")
    return cls(**settings)


def _is_seconds(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= YEAR_SECONDS
