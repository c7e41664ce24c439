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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pkgutil import resolve_name
from typing import Any, NamedTuple, Protocol

from anvil_mux.clock import YEAR_SECONDS
from anvil_mux.config.kinds import meant, show, unfit
from anvil_mux.scheduler.events import DECISIONS, POLICY, Cause, mistake

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
    longest: float = 0.0
    """How many requests the longest of its queues had, of late; 0: it had none."""

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


def ask(policy: Policy, seen: Snapshot) -> Decision:
    """Ask a policy; if it fails, or its answer is not sound as a whole, everything stays as it is.

    If it says ``Stay``, another replica of a busy model may still be worth a load.
    """
    try:
        decision = policy.decide(seen)
        if seen.spills and isinstance(decision, Stay):
            other = spill_over(seen)
            decision = _sooner(decision, other.until) if isinstance(other, Stay) else other
        _check(decision, seen)
        return decision
    except Exception as error:  # anybody's code; max_wait serves every queue all the same
        return Stay(cause=Cause("policy_failed", detail=mistake(error)))


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


def _check(decision: Decision, seen: Snapshot) -> None:
    """Raise TypeError or ValueError if any part of a decision is not what it has to be."""
    if isinstance(decision, Stay):
        for each in (decision.until, decision.leases, decision.again):
            if not isinstance(each, (int, float)) or math.isnan(each):
                raise TypeError(f"it says {decision!r}, and {each!r} is no number")
    elif isinstance(decision, SwapTo):
        _check_name(decision, [each.model for each in seen.queues] + [each.model for each in seen.spills])
    elif isinstance(decision, Unload):
        _check_name(decision, [each.model for each in seen.residents])
    else:
        raise TypeError(f"it answers {decision!r}, and none of Stay, SwapTo and Unload")
    if not is_decided(decision.cause):
        raise TypeError(f"its cause is {decision.cause!r}, and no Cause of a decision")


def _check_name(decision: SwapTo | Unload, models: list[str]) -> None:
    if not isinstance(decision.model, str) or decision.model not in models:
        raise ValueError(f"it says {decision!r}, and that is none of {', '.join(models) or 'no models'}")


_NUMBER = (int, float)
_FIGURES: tuple[Any, ...] = (str, str, str, tuple, str, _NUMBER, _NUMBER, _NUMBER, _NUMBER, str, str)
"""The types of a cause's figures, in their order."""


def is_decided(value: object) -> bool:
    """Whether a value is the cause of a decision, with figures of their types: a policy may be anybody's."""
    if (
        not isinstance(value, Cause)
        or value.kind not in DECISIONS
        or not all(map(isinstance, value, _FIGURES))
    ):
        return False
    return all(isinstance(each, str) for each in value.residents)


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

    def _why(self, queue: Queue, now: float) -> str:
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
    """Keep a model that answers for its turn, and an idle one until enough requests wait.

    Two models that take turns lose ``S`` seconds between two turns of one of them: both loads, both
    evictions, both drains.

    * A model that answers stays until its turn is over. A turn begins when the model is there and somebody
      waits for its GPUs, and lasts for 1.5 ``S``. Of clients who ask again once they are answered, the root
      of the mean square of their waits is least at ``S`` (docs/policies.md), and flat there: at 1.5 ``S`` it
      is 2 % more, and a fifth more requests are answered.
    * Once nobody else comes to the queue, all its clients are in it. Those of the model that answers are
      taken to be alike: they join its queue while it drains, so that a drain costs them nothing. Then ``S``
      counts the loads and evictions alone, and the turn is the number of whole answers next to that. A queue
      is complete when it is as long as its model's queues were of late, and has been quiet for longer than
      arrivals at random are: of ``n`` that came within ``span`` seconds, nobody follows for another ``t``
      with probability ``(span / (span + t)) ** (n - 1)``. The silence of one or two tells nothing: they are
      complete unless queues were longer, or the model that answers has more clients. How many it has, the
      rates tell: of ``n`` who wait for their answers all but one may join a queue, so that growth / rate is
      1 - 1/n, and 1 where requests come whatever is answered.
    * An idle model is evicted once enough requests wait. If a queue grows by ``l`` requests a second, and
      that of the model that goes by ``r`` once it is gone, the fewest request-seconds are lost when the
      queue has ``S * sqrt(l * r)`` requests at its model's arrival: the square root rule of lot sizes
      (Harris, 1913). Fewer are enough here, since nothing has to be drained. Where clients wait for their
      answers ``r`` says little of them: their next requests count as well, the less the longer the model
      has served. It is believed to be idle for good after twice its usual pause.
    * Which of several queues goes first is decided by the squares of their waits: see ``_most_urgent``.

    ``max_wait`` bounds all of it. Everything it goes by is measured (``Demand`` in model.py, costs.py).
    """

    pause: float = 0.25
    """Seconds after an answer in which its client may ask again; at most a tenth of a swap there and back."""

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
        queue = seen.queues[0] if len(seen.queues) == 1 else _most_urgent(seen.queues, seen.now)
        turn = _Turn(seen, queue)
        if not turn.leases and turn.expected >= turn.enough:
            pause = min(self.pause, turn.ways / 10)
            answered = min(queue.newest, turn.last_used) + pause
            if answered <= seen.now:
                return SwapTo(queue.model, _because("worth_it", queue))
            return Stay(min(answered, overdue), _because("in_use", queue))
        if turn.over <= seen.now:
            alike = [each for each in seen.queues if each.evicts == queue.evicts]
            queue = min(alike, key=lambda each: (-each.priority, each.oldest))
            return SwapTo(queue.model, _because("turn_over", queue))
        until, again = min(turn.over, overdue), seen.now + max(self.pause, turn.seconds / 5)
        if turn.leases:
            return Stay(until, _because("turn", queue), 1, again)
        cause = _because("too_few", queue)._replace(expected=turn.expected, required=turn.enough)
        return Stay(until, cause, again=min(again, turn.quiet))


def _because(kind: str, queue: Queue) -> Cause:
    return Cause(kind, residents=queue.evicts, waiting=queue.waiting)


def _most_urgent(queues: Sequence[Queue], now: float) -> Queue:
    """The queue that goes first: by priority, then so that the sum of the squares of all waits is least.

    Of two that are loaded one after the other that is the one with more of n * (w + s + t / 2) / s, where n
    requests have waited for w seconds at the mean, the load takes s seconds and that of the other t: exchange
    the two and compare. Of several, all others count as one.
    """
    total = sum([each.swap_seconds + ANSWER_SECONDS for each in queues])

    def order(queue: Queue) -> tuple[int, float]:
        seconds = queue.swap_seconds + ANSWER_SECONDS
        waited = now - (queue.oldest + queue.newest) / 2
        return queue.priority, queue.waiting * (waited + (seconds + total) / 2) / seconds

    return max(queues, key=order)


class _Turn:
    """The turn of the residents that a queue would evict: when it is over, and what may end it before.

    One is made for nearly every request, so it looks at each queue and each resident once.
    """

    __slots__ = ("enough", "expected", "last_used", "leases", "over", "quiet", "seconds", "ways")

    def __init__(self, seen: Snapshot, queue: Queue) -> None:
        now = seen.now
        leases, lost, service, pause, back = 0, 0.0, 0.0, 0.0, 0.0
        begun = last_used = -FOREVER
        quiet, clients, asked = FOREVER, 1.0, []
        for model, _, since, held, used, rate, growth, idle, answer, reload_seconds in seen.residents:
            if model not in queue.evicts:
                continue
            leases += held
            lost += growth
            service, pause, back = max(service, answer), max(pause, idle), max(back, reload_seconds)
            begun, last_used = max(begun, since), max(last_used, used)
            ends = used + PAUSES * max(idle, SHORTEST_PAUSE)
            if not held and now < ends < quiet:
                quiet = ends
            clients = max(clients, rate / (rate - growth) if growth < rate else FOREVER)
            if growth < rate and (held or now < ends):
                often = (held or 1) / (idle + (answer or 1.0))
                asked.append(((1.0 - growth / rate) * often, max(now - since, 0.0)))
        service = service or 1.0
        waiting, growth, oldest, complete = 0, 0.0, FOREVER, -FOREVER
        for each in seen.queues:
            waiting += each.waiting
            growth += each.growth
            complete = max(complete, _complete(each, clients))
            if each.evicts == queue.evicts:
                oldest = min(oldest, each.oldest)
        growth = max(growth, 1e-6)
        drain = service * math.log1p(leases)  # about the longest of so many leases
        swap_seconds = queue.evict_seconds + queue.load_seconds
        ways = swap_seconds + queue.evict_seconds + back  # loads and evictions there and back
        self.leases, self.last_used, self.quiet, self.ways = leases, last_used, quiet, ways
        self.expected = expected = waiting + growth * (drain + swap_seconds)
        """Requests that will wait when the model is loaded."""
        served = (queue.service_seconds or service) * math.log1p(expected)
        self.seconds = seconds = swap_seconds + back + service / 2 + served
        """Seconds that are lost between two turns of the residents."""
        self.enough = 0.0
        """Requests that have to be expected for an idle model to go."""
        if not leases:
            again = sum([often * seconds * seconds / (seconds + there) for often, there in asked])
            spared = math.sqrt(2 * growth * (lost * seconds + expected) * service)
            self.enough = max(seconds * math.sqrt(growth * lost) + again - spared, 0.0)
        begun = max(begun, oldest)
        self.over = begun + TURN * seconds
        """When the residents have had their turn."""
        if complete < self.over:
            answers = max(round(ways / (service + pause)), 1)
            ahead = service * leases / (leases + 1) / 2  # so that answers end about when the turn does
            self.over = min(self.over, max(complete, begun + answers * (service + pause) - ahead))


def _complete(queue: Queue, others: float) -> float:
    """The moment at which all clients of a queue are believed to be in it, if nobody else comes.

    ``others``: the clients of the model that answers.
    """
    if queue.waiting < queue.longest:
        return FOREVER
    if queue.waiting < FEW:
        return queue.newest if queue.longest and others < queue.waiting + 0.5 else FOREVER
    span = queue.newest - queue.oldest
    return queue.newest + span * (math.pow(RARE, -1 / (queue.waiting - 1)) - 1)


FEW = 3
"""The number of requests whose silence tells whether more will come."""
TURN = 1.5
"""The length of a turn, as a multiple of what is lost between two. At ``r`` the mean square of the waits is
``(1 + r) ** 2 / (4 * r)`` times its least, and a model answers for ``r / (1 + r)`` of the time."""
ANSWER_SECONDS = 1.0
"""About how long a model serves at the least once it is loaded; a load of no time is not worth everything."""
RARE = 0.1
"""The probability of a pause after which no more are expected to come."""
PAUSES = 2.0
"""The number of its usual pauses after which a resident is believed to be idle for good."""
SHORTEST_PAUSE = 0.02
"""The longest time that a client which does not think takes to read an answer and to ask again."""
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
