"""A trial: one history of facts that a scheduler was told, and what the witness says of its answers.

Where a world has backends that nobody asks for, a second scheduler has them besides, is told the same, and is
to answer the same.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Iterator, Sequence
from random import Random
from types import FrameType
from typing import NamedTuple

from anvil_mux.scheduler.events import Event
from anvil_mux.scheduler.scheduler import Scheduler
from anvil_mux.scheduler.slot import Effects, Load, Ticket, Wait
from tests.explorer.form import EPOCH, form
from tests.explorer.saved import SavedState
from tests.explorer.subject import REQUESTS, MakeScheduler, Subject
from tests.explorer.witness import Violation, Witness
from tests.explorer.worlds import Fact, SmallWorld

MOST_CPU_SECONDS = 1.0
"""The CPU time of one call of the scheduler. It takes a thousandth of that; after it, it is endless."""
BY_GROUP = "13, by group"
"""The word for a violation of 13 that ends when queues stand in no GPU group."""
LOAD_SECONDS, EVICT_SECONDS, LEASE_SECONDS = 10.0, 1.0, 20.0
"""How long things take when everything goes well."""
MOST_FACTS = 400
"""The most facts until everything has ended, from any state; time may pass before each."""


class Endless(BaseException):
    """A call of the scheduler does not end."""


def _stop(number: int, frame: FrameType | None) -> None:
    raise Endless


class _Reaction(NamedTuple):
    """The effects of one fact, to be compared."""

    ended: tuple[tuple[int, str, str], ...]
    cut: tuple[int, ...]
    steps: tuple[tuple[str, str, str], ...]

    def __str__(self) -> str:
        return f"ended {[*self.ended]}, cut {[*self.cut]}, steps {[*self.steps]}"


class Trial:
    """One history, from the beginning of a world."""

    def __init__(
        self,
        world: SmallWorld,
        policy: str,
        make: MakeScheduler = Scheduler,
        early: Random | None = None,
    ) -> None:
        self.world, self.policy = world, policy
        self._early = early
        """Draws the moments at which the scheduler is asked before the one that it named; None: it is not."""
        self.history: list[Fact] = []
        self.now = EPOCH
        configs = world.under(policy)
        self.witness = Witness(configs[0], world)
        self._subjects = [Subject(each, world, make) for each in configs]
        self._main = self._subjects[0]
        self._numbers = 0
        self.is_over = False
        """Whether it cannot go on: a call failed, or did not end."""
        for fact in world.begins:
            self._tell_all(fact)
        self._tell_all(("time_passed",))

    @property
    def wrong(self) -> list[Violation]:
        return self.witness.wrong

    @property
    def log(self) -> list[Event]:
        return self._main.log

    def play(self, *facts: Fact) -> Trial:
        """Tell facts, one after another."""
        for fact in facts:
            if not self.is_over:
                self.tell(fact)
        return self

    def tell(self, fact: Fact) -> None:
        """Tell one fact, at the moment that it is now; ``time`` and ``pass`` come to later ones."""
        self.history.append(fact)
        match fact:
            case ("time",):
                self._wait_until(self._main.ask_at)
            case ("pass", seconds):
                self._wait_until(self.now + float(seconds))
            case _:
                self._tell_all(fact)

    def judge(self) -> list[Violation]:
        """All that is wrong so far, by the events as well."""
        self.witness.judge_log(self.log)
        return self.wrong

    def form(self) -> int:
        """The form of the whole state; see form.py."""
        numbers = self.witness.tickets
        ranks = {number: rank for rank, number in enumerate(sorted(numbers))}
        subjects = [(each.core, [*each.steps], [*each.cancelled]) for each in self._subjects]
        return form(self.now, numbers, subjects, self.witness.summary(ranks))

    # Time

    def _wait_until(self, moment: float) -> None:
        while not self.is_over:
            soonest = min([each.ask_at for each in self._subjects])
            if self._early:
                self._ask_early(min(soonest, moment))
            if soonest > moment:
                break
            is_past = soonest <= self.now
            self.now = max(self.now, soonest)
            self._tell_all(("time_passed",))
            if is_past and not self.is_over and min([each.ask_at for each in self._subjects]) <= self.now:
                self._fail("14", "time has passed, and the scheduler names the same moment again")
        self.now = max(self.now, moment)

    def _ask_early(self, until: float) -> None:
        """Ask all GPU groups at a random moment before ``until``: that changes nothing (15)."""
        if self.is_over or not self.now < until < math.inf:
            return
        assert self._early is not None
        moment, begins = self.now + (until - self.now) * self._early.random(), len(self.log)
        saved = SavedState(self._main)
        steps = [each.next_step(moment) for each in self._main.core.layout.groups]
        told = [str(step) for step in steps if not isinstance(step, Wait)]
        told += [f"{event.kind} {event.model}" for event in self.log[begins:] if event.kind != "deferred"]
        saved.put_back()
        if told:
            early = until - moment
            self._fail("15", f"asked {early:g} s before something is to be done: {', '.join(told)}")

    # Facts

    def facts(self) -> Iterator[Fact]:
        """The facts that may come next."""
        for name in self.witness.backends:
            yield from self._reports(name)
        yield from self.witness.facts()
        if math.isfinite(self._main.ask_at):
            yield ("time",)
        if "pass" in self.world.may and self.now + self.world.passes < self._main.ask_at:
            yield ("pass", f"{self.world.passes:g}")

    def _reports(self, name: str) -> Iterator[Fact]:
        if name not in self._main.steps:
            return
        may, is_load = self.world.may, isinstance(self._main.steps[name][0], Load)
        yield ("loaded" if is_load else "evicted", name)
        if is_load and (name in self._main.cancelled or "load_cancelled" in may):
            yield ("load_cancelled", name)
        if is_load and "load_failed" in may:
            yield ("load_failed", name)
        if not is_load and "stopped" in may and self._main.level_after(name, "") != "stop":
            yield ("stopped", name)
        if "evict_failed" in may:
            yield ("evict_failed", name)
        if not is_load and "not_begun" in may:
            yield ("not_begun", name)

    def _tell_all(self, fact: Fact) -> None:
        """Tell a fact to each scheduler, and judge what comes back."""
        if fact[0] in ("up", "standby") and fact[1] not in self.witness.unseen:
            self._tell_all(("expected", fact[1]))
        number, begins, answers = self._number(fact), len(self.log), []
        self._note(fact, number)
        for subject in self._subjects:
            effects = self._call(subject, fact, number)
            if effects is None:
                return
            if subject is self._main:
                ticket = subject.tickets[number] if fact[0] in REQUESTS else None
                self.witness.see(fact, ticket, effects, self.log[begins:], self.now)
            answers.append(_answer(subject, fact, number, effects))
        self.witness.look(self.now)
        if len(answers) == 2 and answers[0] != answers[1] and not self.witness.unseen:
            what = f"beside {self.world.extra[0].model}: {answers[1]}; without it: {answers[0]}"
            self._fail(self._differs(), what)
        elif news := self.witness.news:
            self._tell_all(news)

    def _differs(self) -> str:
        """Return 13, or ``BY_GROUP`` where the logs differ in what belongs to a queue's GPU group.

        That is the bound of a queue, and who takes over a drain: a queue stands in one group at a time, and
        sees neither the queues nor the drains of others in which its model has backends. All answers until
        this one were the same, so what differs there comes before what differs here.
        """
        logs = [[_of_group(event) for event in each.log if _of_group(event)] for each in self._subjects]
        return BY_GROUP if logs[0] != logs[1] else "13"

    def _note(self, fact: Fact, number: int) -> None:
        """Note what a fact says by itself."""
        kind, *what = fact
        level = self._main.level_after(what[0], kind) if kind in ("evicted", "stopped") else ""
        self.witness.note(fact, number, level)
        if kind == "lost":
            for subject in self._subjects:
                for name in self.witness.on_host(what[0]):
                    subject.lose(name)

    def _number(self, fact: Fact) -> int:
        """The number of the ticket that a fact is about."""
        match fact:
            case ("request" | "wish", _):
                self._numbers += 1
                return self._numbers
            case ("release", name):
                return next(iter(self.witness.backends[name].leases))
            case ("late",):
                return next(iter(self.witness.cut))
            case ("abandon", model):
                return self.witness.waiting_for(model)[-1]
        return 0

    def _call(self, subject: Subject, fact: Fact, number: int) -> Effects | None:
        """Tell a subject; None, and the trial is over, if the call fails or does not end."""
        signal.signal(signal.SIGVTALRM, _stop)
        signal.setitimer(signal.ITIMER_VIRTUAL, MOST_CPU_SECONDS)
        try:
            effects = subject.tell(fact, number, self.now)
        except Endless:
            self._fail("14", f"the call for {' '.join(fact)} does not end")
            return None
        except Exception as error:
            self._fail("error", f"{' '.join(fact)}: {error!r}")
            return None
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        for mistake in effects.mistakes:
            self._fail("error", f"{' '.join(fact)}: {mistake!r}")
        return effects

    def _fail(self, invariant: str, text: str) -> None:
        self.witness.claim(False, invariant, text)
        self.is_over = True

    # The end

    def complete(self) -> None:
        """Let everything go well, and nobody come any more: all tickets end in time."""
        self.play(*self.witness.mendings())
        began, most = self.now, self.witness.most_seconds(LEASE_SECONDS + EVICT_SECONDS + LOAD_SECONDS)
        leased: dict[int, float] = {}
        for _ in range(2 * MOST_FACTS):
            if self.is_over or self.wrong or not self.witness.waiting:
                return
            moment, fact = min(self._coming(leased), default=(math.inf, ()))
            if moment > began + most:
                what = f"still wait after {most:g} s" if fact else "wait, and nothing will happen"
                self._fail("14", f"{self.witness.waiting_models} {what}")
                return
            if fact == ("time",) or moment <= self.now:
                self.tell(fact)
            else:  # what was to come may be another thing by then
                self.tell(("pass", repr(moment - self.now)))
        self._fail("14", f"{self.witness.waiting_models} still wait after {MOST_FACTS} facts")

    def _coming(self, leased: dict[int, float]) -> Iterator[tuple[float, Fact]]:
        """The next facts if everything goes well; ``leased``: when the leases end."""
        for name, (step, since) in self._main.steps.items():
            kind, takes = "evicted", EVICT_SECONDS
            if name in self._main.cancelled:
                kind = "load_cancelled"
            elif isinstance(step, Load):
                kind, takes = "loaded", LOAD_SECONDS
            yield max(since + takes, self.now), (kind, name)
        for name, held in self.witness.backends.items():
            for number in held.leases:
                yield leased.setdefault(number, self.now + LEASE_SECONDS), ("release", name)
        if math.isfinite(self._main.ask_at):
            yield max(self._main.ask_at, self.now), ("time",)


def _of_group(event: Event) -> tuple[object, ...]:
    """What an event says of the bound of a queue, or of a drain that is taken over; nothing if of neither."""
    if event.kind == "queued" and math.isfinite(event.bound):
        return event.kind, event.ticket, event.bound
    is_taken_over = event.kind == "draining" and event.cause is not None and event.cause.kind == "outranked"
    return (event.kind, event.backend, event.target) if is_taken_over else ()


def _answer(subject: Subject, fact: Fact, number: int, effects: Effects) -> _Reaction:
    ended = [*effects.woken]
    if fact[0] in REQUESTS and subject.tickets[number].settled:
        ended.append(subject.tickets[number])
    return _Reaction(
        tuple(sorted([(t.id, _served_by(t), t.error.code if t.error else "") for t in ended])),
        tuple(sorted([ticket.id for ticket in effects.cut])),
        tuple(sorted([(type(s).__name__, s.backend, getattr(s, "level", "")) for s in effects.steps])),
    )


def _served_by(ticket: Ticket) -> str:
    """The backend of a ticket; of one that only wants its model loaded it is no matter which."""
    return (ticket.backend or "") if ticket.takes_lease else ""


def replay(
    world: SmallWorld, policy: str, facts: Sequence[Fact], make: MakeScheduler = Scheduler
) -> list[Violation]:
    """All that is wrong with a history, or when everything goes well after it."""
    trial = Trial(world, policy, make).play(*facts)
    trial.complete()
    return trial.judge()
