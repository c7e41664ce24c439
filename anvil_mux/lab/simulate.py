"""The same GPU groups, policies and eviction in virtual time.

``simulate`` does what the multiplexer does, with a heap of happenings in place of threads: it tells the
``Scheduler`` the facts of a trace, does what the effects say, and reports how each step ended after the
seconds that ``Engines`` name, and how each answer did after those that ``Batching`` gives it. Only the
engines and the passage of time are made up, so the log is the one that the threaded program writes for the
same trace.
"""

from __future__ import annotations

import gc
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from heapq import heappop, heappush
from itertools import count
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from anvil_mux.config.config import Config
from anvil_mux.errors import Cancelled, LoadError, MuxError, WaitedTooLong
from anvil_mux.host.seam import NotBegun
from anvil_mux.lab.engines import ALONE, Batch, Batching, Engines, NextEnd, Outcome, Perform
from anvil_mux.scheduler.admission import no_room_to_wait
from anvil_mux.scheduler.costs import Cost, Costs, Footprints
from anvil_mux.scheduler.events import Event
from anvil_mux.scheduler.policies import FOREVER
from anvil_mux.scheduler.scheduler import Scheduler
from anvil_mux.scheduler.slot import NOTHING, Cancel, Demote, Effects, Evict, Load, Step, Ticket


class Arrival(NamedTuple):
    """A request arrives ``at`` a moment, its answer takes ``seconds`` alone, and it leaves when out of
    patience.
    """

    at: float
    model: str
    seconds: float
    patience: float = FOREVER
    leases: bool = True
    """False: it only wants the model loaded."""
    sender: Hashable = None
    """The sender, for ``follow``, and for queues in which senders take turns."""


class Fact(Protocol):
    """Anything else that happens at a moment: an engine that dies, a reload, a host that is lost."""

    @property
    def at(self) -> float: ...
    def tell(self, scheduler: Scheduler) -> Effects: ...


Follow = Callable[[Arrival, float], Iterable[Arrival]]
"""The requests that the end of one, answered or not, leads to; they come at that moment or later."""


USUAL_ENGINES = Engines()


def simulate(
    config: Config,
    trace: Iterable[Arrival | Fact],
    perform: Perform = USUAL_ENGINES,
    *,
    resident: Iterable[str] = (),
    follow: Follow | None = None,
    costs: Iterable[Cost] = (),
    answers: Counter[Hashable] | None = None,
    batching: Mapping[str, Batching] = MappingProxyType({}),
) -> list[Event]:
    """The log of ``trace`` (sorted by moment), until every request has ended and no step is under way.

    ``resident``: backends that run at moment 0. ``follow`` makes clients that wait for their answers.
    ``costs``: what was learned of swaps before. ``answers``: where each sender's whole
    answers are counted. ``batching``: what the engine of each backend does at once; all answers of the others
    last as long as alone.
    """
    counts = Counter() if answers is None else answers
    simulation = _Simulation(config, perform, follow, Costs(costs), answers=counts, batching=batching)
    simulation.adopt(resident)
    with _no_collections():
        simulation.run(trace)
    return simulation.log


@contextmanager
def _no_collections() -> Iterator[None]:
    """A run makes a great many events and no garbage: looking for some takes up to 30 % of its time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


_Happening = tuple[float, int, Callable[[float, Any], None], Any]
"""An entry of the heap: (moment, order, what to call with moment and argument, argument)."""


_Performed = tuple[Load | Evict | Demote, Outcome]


class _Simulation:
    """The driver of a scheduler in virtual time.

    Of the time-outs, which come in the order of the requests, only the first is in the heap.
    """

    def __init__(
        self,
        config: Config,
        perform: Perform,
        follow: Follow | None,
        costs: Costs,
        *,
        answers: Counter[Hashable],
        batching: Mapping[str, Batching],
    ) -> None:
        self.log: list[Event] = []
        self._batching = batching
        self._batches: dict[str, Batch] = {}  # backend -> the answers that it makes
        self._answers = answers
        self._follow = follow
        self._perform = perform
        self._steps: Counter[str] = Counter()
        self._loads: dict[str, tuple[float, _Performed]] = {}  # backend -> when its load ends, and how
        self._heap: list[_Happening] = []
        self._time_outs: deque[_Happening] = deque()
        self._order = count()
        self._ids = count(1)
        self._open = 0  # requests that have not ended, and steps under way
        self._waiting = 0
        self._scheduler = Scheduler(config, self.log.append, costs, Footprints())
        self._ask_at = FOREVER  # when time is said to have passed
        self._rings = FOREVER  # when the heap looks at that, which has moved on by then more often than not

    def adopt(self, running: Iterable[str]) -> None:
        names = list(running)
        self._scheduler.expected(names)
        for name in names:
            effects = self._scheduler.adopted(name, 0.0)
            self._carry_out(effects if effects is not NOTHING else self._scheduler.looked_at(name, 0.0), 0.0)

    def run(self, trace: Iterable[Arrival | Fact]) -> None:
        self._carry_out(self._scheduler.time_passed(0.0), 0.0)
        heap = self._heap
        for entry in trace:
            while heap and heap[0][0] <= entry.at:
                now, _, call, argument = heappop(heap)
                call(now, argument)
            if isinstance(entry, Arrival):
                self._arrive(entry)
            else:
                self._carry_out(entry.tell(self._scheduler), entry.at)
        while heap and self._open:
            now, _, call, argument = heappop(heap)
            call(now, argument)

    def _at(self, moment: float, call: Callable[[float, Any], None], argument: object) -> None:
        heappush(self._heap, (moment, next(self._order), call, argument))

    # Requests

    def _arrive(self, request: Arrival) -> None:
        now, model, layout = request.at, request.model, self._scheduler.layout
        if model not in layout.settings.models:
            self._follow_up(now, request)
            return
        wanted, most = layout.models[model], layout.settings.config.max_queue
        if no_room_to_wait(wanted, self._waiting, most) and not wanted.takes():
            self._follow_up(now, request)  # overloaded
            return
        ticket = Ticket(next(self._ids), model, now, takes_lease=request.leases, sender=request.sender)
        ticket.wake = request
        self._open += 1
        effects = self._scheduler.requested(ticket, now)
        if ticket.settled:
            self._go_on(ticket, now)
        else:
            self._waiting += 1
            self._limit_wait(ticket, now)
            if request.patience < FOREVER:
                self._at(now + request.patience, self._leave, ticket)
        self._carry_out(effects, now)

    def _arrive_late(self, now: float, request: Arrival) -> None:
        self._open -= 1
        self._arrive(request)

    def _limit_wait(self, ticket: Ticket, now: float) -> None:
        limit = self._scheduler.layout.settings.config.queue_timeout
        self._time_outs.append((now + limit, next(self._order), self._time_out, ticket))
        if len(self._time_outs) == 1:
            heappush(self._heap, self._time_outs[0])

    def _time_out(self, now: float, ticket: Ticket) -> None:
        self._leave(now, ticket, WaitedTooLong("too long"))
        self._time_outs.popleft()
        while self._time_outs and self._time_outs[0][3].settled:
            self._time_outs.popleft()
        if self._time_outs:
            heappush(self._heap, self._time_outs[0])

    def _leave(self, now: float, ticket: Ticket, error: MuxError | None = None) -> None:
        model = self._scheduler.layout.models.get(ticket.model)
        if model and ticket in model.queue:
            effects = self._scheduler.abandoned(ticket, now, error)
            self._waiting -= 1
            self._end(ticket, now)
            self._carry_out(effects, now)

    def _go_on(self, ticket: Ticket, now: float) -> None:
        """A ticket ended waiting: its request is served, or over."""
        if ticket.backend and ticket.takes_lease:
            name = ticket.backend
            if name not in self._batches:
                self._batches[name] = Batch(self._batching.get(name, ALONE))
            batch = ticket.granted = self._batches[name]
            before = batch.next
            batch.add(ticket, ticket.wake.seconds, next(self._order), now)
            self._await_end(batch, before)
        else:
            self._end(ticket, now)

    def _await_end(self, batch: Batch, before: NextEnd | None) -> None:
        """Have the end of the answer come that ends next, unless it comes already."""
        if (coming := batch.next) and coming != before:
            heappush(self._heap, (coming.at, coming.order, self._release, coming.request))

    def _release(self, now: float, ticket: Ticket) -> None:
        coming = ticket.granted.next
        if coming is None or coming.request is not ticket or coming.at != now:
            return  # it ends at another moment, or has been severed
        self._take_out(ticket, now)
        effects = self._scheduler.released(ticket, now)
        self._answers[ticket.wake.sender] += 1
        self._end(ticket, now)
        self._carry_out(effects, now)

    def _take_out(self, ticket: Ticket, now: float) -> None:
        """The engine of a request makes its answer no longer."""
        batch: Batch = ticket.granted
        before = batch.next
        batch.remove(ticket, now)
        self._await_end(batch, before)

    def _end(self, ticket: Ticket, now: float) -> None:
        self._open -= 1
        self._follow_up(now, ticket.wake)

    def _follow_up(self, now: float, request: Arrival) -> None:
        """The request has ended."""
        if self._follow:
            for later in self._follow(request, now):
                self._open += 1
                self._at(later.at, self._arrive_late, later)

    # Effects

    def _carry_out(self, effects: Effects, now: float) -> None:
        for mistake in effects.mistakes:
            raise mistake
        for ticket in effects.woken:
            self._waiting -= 1
            self._go_on(ticket, now)
        for ticket in effects.cut:
            self._take_out(ticket, now)
            if not ticket.taken_back:  # else it is the proxy, no part of this, that sends it again
                self._end(ticket, now)
        for step in effects.steps:
            self._begin(step, now)
        if effects.ask_at is not None:
            self._ask_at = effects.ask_at
            self._wind_up()

    def _begin(self, step: Step, now: float) -> None:
        outcome = self._perform(step, self._steps[step.backend])
        self._steps[step.backend] += 1
        if isinstance(step, Cancel):
            self._cut_short(step.backend, outcome, now)
            return
        self._open += 1
        what, ends = (step, outcome), now + outcome.seconds
        if isinstance(step, Load):
            self._loads[step.backend] = ends, what
            self._batches.pop(step.backend, None)  # of an engine that died
        self._at(ends, self._performed, what)

    def _cut_short(self, backend: str, outcome: Outcome, now: float) -> None:
        ends, (start, _) = self._loads[backend]
        sooner = now + outcome.seconds
        if sooner < ends:
            what = start, Outcome(outcome.seconds, outcome.error or Cancelled("it was cancelled"))
            self._loads[backend] = sooner, what
            self._at(sooner, self._performed, what)

    def _performed(self, now: float, what: _Performed) -> None:
        step, outcome = what
        if isinstance(step, Load) and self._loads[step.backend][1] is not what:
            return  # it was cancelled
        self._open -= 1
        self._carry_out(self._report(step, outcome, now), now)

    def _report(self, step: Load | Evict | Demote, outcome: Outcome, now: float) -> Effects:
        error = outcome.error
        how = outcome.how or (step.to if isinstance(step, Demote) else step.level)
        if error is None and isinstance(step, Load):
            return self._scheduler.loaded(step, now, how)
        if error is None:
            left = {"residual": outcome.residual, "level": how, "host_bytes": outcome.host_bytes}
            return self._scheduler.evicted(step, now, **left)
        if isinstance(error, Cancelled):
            return self._scheduler.load_cancelled(step, now)
        if isinstance(step, Load) and isinstance(error, LoadError):
            return self._scheduler.load_failed(step, now, error)
        if isinstance(error, NotBegun) and not isinstance(step, Load):
            return self._scheduler.evict_not_begun(step, now, error.message)
        return self._scheduler.evict_failed(step, now, error.message)

    def _wind_up(self) -> None:
        if self._ask_at < self._rings:
            self._rings = self._ask_at
            self._at(self._rings, self._ring, None)

    def _ring(self, now: float, _: object) -> None:
        if now != self._rings:
            return  # it rang at an earlier moment instead
        self._rings = FOREVER
        if now < self._ask_at:
            self._wind_up()
        else:
            self._carry_out(self._scheduler.time_passed(now), now)
