"""The explorer: every history of facts in small worlds, breadth first, judged after each fact.

A state that comes again is not looked at again (form.py). From each new state everything is let go well, so
that it is seen whether all ends. The worlds, each under each policy, take turns by depth: what is wrong after
few facts is found first. It ends when its time is over, or when there is no state left that is new.

``python -m tests.explorer.explore --minutes 2`` prints how far it came, and of each violation the shortest
history as a test.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field

from anvil_mux.scheduler.scheduler import Scheduler
from tests.explorer.saved import SavedState
from tests.explorer.subject import MakeScheduler
from tests.explorer.trial import Trial
from tests.explorer.witness import Violation
from tests.explorer.worlds import WORLDS, Fact, SmallWorld

AT_ONCE = 16
"""How many states of one world are gone on from before it is another's turn."""


@dataclass(frozen=True)
class Breach:
    """A violation, and the shortest history that leads to it."""

    world: str
    policy: str
    depth: int
    """How many facts it takes until everything is let go well, or until the violation."""
    seconds: float
    """When it was found."""
    history: tuple[Fact, ...]
    violation: Violation

    def as_test(self) -> str:
        """The history as a test to paste."""
        facts = "".join([f"        {fact!r},\n" for fact in self.history])
        return (
            f"def test_explored_history():  # {self.violation}\n    facts = (\n{facts}    )\n"
            f"    assert replay(WORLDS[{self.world!r}], {self.policy!r}, facts) == []\n"
        )


@dataclass
class Explored:
    """How far one world was explored under one policy."""

    world: str
    policy: str
    states: int = 1
    depth: int = 0
    """All histories of so many facts were looked at."""
    seconds: float = 0.0
    is_whole: bool = False
    """Whether there is no further state."""
    breaches: list[Breach] = field(default_factory=list)
    """The first violation of each invariant."""


class Exploration:
    """The exploration of one world under one policy."""

    def __init__(self, world: SmallWorld, policy: str, make: MakeScheduler = Scheduler) -> None:
        self.result = Explored(world.name, policy)
        self._trial = Trial(world, policy, make)
        self._begin = SavedState(self._trial)
        self._seen = {self._trial.form()}
        self._left: deque[tuple[Fact, ...]] = deque([()])
        self._facts: dict[Fact, Fact] = {}
        self._note((), self._trial.judge())

    @property
    def rank(self) -> tuple[int, float]:
        """The order in which explorations go on: the lowest depth first."""
        return self.depth, self.result.seconds

    @property
    def depth(self) -> int:
        """The number of facts of the next history."""
        return len(self._left[0]) if self._left else sys.maxsize

    def go_on(self, most: int = AT_ONCE) -> None:
        """Look at what follows from the next few states."""
        began = time.monotonic()
        for _ in range(min(most, len(self._left))):
            self._expand(self._left.popleft())
        self.result.seconds += time.monotonic() - began
        self.result.is_whole = not self._left
        self.result.depth = self.depth if self._left else self.result.depth

    def until(self, depth: int) -> Explored:
        """Look at all histories of so many facts."""
        while self.depth < depth:
            self.go_on()
        return self.result

    def _expand(self, history: tuple[Fact, ...]) -> None:
        trial = self._trial
        self._begin.put_back()
        trial.play(*history)
        here = SavedState(trial)
        for each in list(trial.facts()):
            fact = self._facts.setdefault(each, each)
            here.put_back()
            trial.tell(fact)
            if trial.is_over or trial.wrong:
                self._note((*history, fact), trial.judge())
                continue
            form = trial.form()
            if form in self._seen:
                continue
            self._seen.add(form)
            self.result.states += 1
            trial.complete()
            if not self._note((*history, fact), trial.judge()):
                self._left.append((*history, fact))

    def _note(self, history: tuple[Fact, ...], wrong: Iterable[Violation]) -> bool:
        """Note what is wrong, the first of each kind; whether anything is."""
        found = list(wrong)
        known = {breach.violation.invariant for breach in self.result.breaches}
        for each in found:
            if each.invariant not in known:
                known.add(each.invariant)
                result = self.result
                breach = Breach(
                    world=result.world,
                    policy=result.policy,
                    depth=len(history),
                    seconds=result.seconds,
                    history=history,
                    violation=each,
                )
                result.breaches.append(breach)
        return bool(found)


def explore(pairs: Sequence[tuple[str, str]], until: float) -> list[Explored]:
    """Explore worlds, each under a policy, by turns, until a moment of ``time.monotonic``."""
    explorations = [Exploration(WORLDS[world], policy) for world, policy in pairs]
    while time.monotonic() < until:
        each = min(explorations, key=lambda each: each.rank)
        if each.result.is_whole:
            break
        each.go_on()
    return [each.result for each in explorations]


def explore_all(pairs: Sequence[tuple[str, str]], seconds: float, workers: int) -> list[Explored]:
    """The same on several processors."""
    until = time.monotonic() + seconds
    shares = [pairs[nth::workers] for nth in range(workers)]
    if workers == 1:
        return explore(pairs, until)
    with ProcessPoolExecutor(workers) as pool:
        return [each for found in pool.map(explore, shares, [until] * workers) for each in found]


def told(results: Sequence[Explored]) -> Iterator[str]:
    """The report: how far each world was explored, and what is wrong."""
    yield f"{'world':24} {'states':>8} {'depth':>5} {'seconds':>8}"
    for world in dict.fromkeys(each.world for each in results):
        own = [each for each in results if each.world == world]
        states, seconds = sum([each.states for each in own]), sum([each.seconds for each in own])
        depth, whole = min([each.depth for each in own]), all(each.is_whole for each in own)
        yield f"{world:24} {states:8} {depth:5} {seconds:8.1f}{'  all there are' if whole else ''}"
    states, seconds = sum([each.states for each in results]), sum([each.seconds for each in results])
    yield f"{'all':24} {states:8} {min([each.depth for each in results]):5} {seconds:8.1f}"
    breaches = [breach for each in results for breach in each.breaches]
    for breach in shortest(breaches):
        kind = breach.violation.invariant
        like = [each for each in breaches if each.violation.invariant == kind and each.world == breach.world]
        policies = ", ".join(dict.fromkeys(each.policy for each in like))
        yield f"\nviolation in {breach.world!r} under {policies}, after {breach.depth} facts"
        yield breach.as_test()
    yield f"violations: {len(breaches)}"


def shortest(breaches: Sequence[Breach]) -> list[Breach]:
    """The shortest of each world and kind."""
    found: dict[tuple[str, str], Breach] = {}
    for each in sorted(breaches, key=lambda each: (each.depth, len(each.history))):
        found.setdefault((each.world, each.violation.invariant), each)
    return list(found.values())


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="explore", description="Every history of facts in small worlds.")
    parser.add_argument("--minutes", type=float, default=2.0, help="how long, for all worlds together")
    parser.add_argument("--world", action="append", choices=WORLDS, help="only this world; may be repeated")
    parser.add_argument("--policy", action="append", help="only this policy; may be repeated")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args(words)
    worlds = [WORLDS[name] for name in options.world or WORLDS]
    pairs = [(w.name, p) for w in worlds for p in w.policies if p in (options.policy or w.policies)]
    results = explore_all(pairs, options.minutes * 60.0, min(options.workers, len(pairs)))
    for text in told(results):
        print(text)
    return int(any(each.breaches for each in results))


if __name__ == "__main__":
    sys.exit(main())
