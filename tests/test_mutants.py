"""Planted bugs: each is put into a copy of the package, and the comparison with the simulator must see it."""

import importlib
import itertools
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import anvil_mux
from tests.sim.test_simulate import world
from tests.test_multiplexer import ALONE, differences

SOURCE = Path(anvil_mux.__file__).parent

MUTANTS = {
    "a release wakes no keeper": (
        "multiplexer",
        "            if residency.release(ticket, self._clock.now(), usage, whole=whole):\n",
        "            if residency.release(ticket, self._clock.now(), usage, whole=whole) and False:\n",
    ),
    "an admitted request is not woken": (
        "multiplexer",
        "            ticket.wake.set()\n",
        "            pass\n",
    ),
    "leases are granted while their backend drains": (
        "residency",
        "ready = self._ready_of[ticket.model]\n",
        'ready = [s for s in self._replicas[ticket.model] if s.state in ("ready", "draining")]\n',
    ),
    "leases are counted, not identified": (
        "residency",
        "since = seat.holders.pop(ticket, None) if seat else None\n",
        "since = seat.holders.pop(ticket, None) if seat else None\n"
        "        if seat and seat.holders and since is None:\n"
        "            since = seat.holders.popitem()[1]\n",
    ),
    "only the first of a line is admitted": (
        "residency",
        "(model), now)\n        self.settled += line\n        line.clear()\n\n    def _fill_places(",
        "(model), now)\n            break\n        self.settled += list(line)[:1]\n"
        "        line.pop(next(iter(line), None), None)\n\n    def _fill_places(",
    ),
    "a place that becomes free is left free": (
        "residency",
        "            self._fill_places(ticket.model, now)\n        if routed",
        "            pass\n        if routed",
    ),
    "those who wait for a place are taken as they came": (
        "residency",
        "self._admit_one(ticket, places, now)",
        "self._admit_one(next(iter(line)), places, now)",
    ),
    "who gets a place is not woken": (
        "multiplexer",
        "            if residency.settled:\n",
        "            if False:\n",
    ),
    "a cancel is lost": (
        "multiplexer",
        "                    self._cancelled[step.backend].set()\n",
        "                    pass\n",
    ),
    "nobody is there to cancel a load": (
        "multiplexer",
        "for gpu in backend.gpus}) + 1\n",
        "for gpu in backend.gpus})\n",
    ),
    "a load that nobody waits for any more is finished all the same": (
        "residency",
        "or self._cancel_unwanted(waiting, now)",
        "",
    ),
    "a load that was cancelled counts as failed": (
        "residency",
        '        self._enter(seat, "cancelled", now)\n',
        '        self._enter(seat, "cancelled", now)\n'
        "        seat.failed_starts += 1\n        seat.retry_at = now + cool_down(seat.failed_starts)\n",
    ),
    "who waits for a place waits for a load": (
        "residency",
        "        if self._turns:\n            firsts =",
        "        if False:\n            firsts =",
    ),
    "a swap for nobody is not reprieved": (
        "residency",
        "            if swap.target and not (swap.begun or swap.errand or self.lines[swap.target.model]):\n",
        "            if False:\n",
    ),
    "the moment at which another replica is worth its load is forgotten": (
        "policy",
        "return _sooner(decision, other.until) if",
        "return decision if",
    ),
    "a replica that was put out keeps its requests in the ledger": (
        "residency",
        "            self._routed[seat.model].ledger.forget(seat.name)\n",
        "            pass\n",
    ),
    "a drain has no end": (
        "residency",
        "if now >= swap.until or not (victim.holders or",
        "if not (victim.holders or",
    ),
    "a load does not wait for sleepers that yield": (
        "residency",
        "elif self._host.has_room(swap.target):",
        "else:",
    ),
    "a sleeper that cannot be stopped counts as gone": (
        "ladder",
        "return seat.host_bytes if seat.failed_stops else 0",
        "return 0",
    ),
    "a victim does not wait for those that make way": (
        "residency",
        " or self._host.makes_way(victim, now))",
        ")",
    ),
    "a sleeper that could not be stopped is left alone": (
        "residency",
        'if seat.rung == "stop" and self._may_be_stopped(seat):',
        "if False:",
    ),
    "the most valuable sleeper yields": (
        "ladder",
        "for _, name in sorted(leaving):",
        "for _, name in sorted(leaving, reverse=True):",
    ),
    "nobody is demoted while its time goes by": (
        "residency",
        "moments += [until for seat in self._parkers if (until := demoted_at(seat)) is not None]",
        "",
    ),
    "what is prepared may put out who has had work": (
        "residency",
        'if failed or any(v.state == "standby" or _has_had_work(v) for v in victims or ()):',
        "if failed:",
    ),
    "the moment of an overdue line is forgotten": (
        "residency",
        "moments = [self._overdue_at(first) for first in waiting]",
        "moments = []",
    ),
    "a backend that could not be stopped is taken for gone": (
        "placement",
        '"evicting", "stuck"))',
        '"evicting"))',
    ),
    "a cool-down is not kept": (
        "residency",
        "        seat.failed_starts += 1\n        seat.retry_at = now + cool_down(seat.failed_starts)\n",
        "",
    ),
    "a line that is overdue is loaded too late for its queue_timeout": (
        "residency",
        "return max(min(self._max_wait[model], left), 0.0)",
        "return self._max_wait[model]",
    ),
    "the GPUs of an overdue line are not kept for it": (
        "residency",
        "                busy.update(seat.holds)\n",
        "                pass\n",
    ),
    "a model's own max_wait is ignored": (
        "residency",
        "own = config.max_wait if seat.backend.max_wait is None else seat.backend.max_wait",
        "own = config.max_wait",
    ),
    "an idle model is put out while it is leased": (
        "residency",
        'seat.state != "ready" or seat.holders or seat.backend.ttl is None',
        'seat.state != "ready" or seat.backend.ttl is None',
    ),
    "the moment at which an idle model goes is forgotten": (
        "residency",
        "moments.append(idle_until(seat))",
        "pass",
    ),
    "a release does not set the timer of a ttl": (
        "residency",
        ' or seat.state == "draining" or seat.backend.ttl is not None',
        ' or seat.state == "draining"',
    ),
    "a min_residency holds overdue lines as well": (
        "residency",
        "            if plan := self._plan(first.model, busy, now):\n"
        "                self._begin(plan.target, plan.victims, now,",
        "            stay = {s.name for s in self._stayers if _stays_until(s) > now}\n"
        "            if plan := self._plan(first.model, busy, now, stay):\n"
        "                self._begin(plan.target, plan.victims, now,",
    ),
    "a min_residency is counted from the last use": (
        "residency",
        "return seat.loaded + seat.backend.min_residency",
        "return seat.used + seat.backend.min_residency",
    ),
    "the moment at which a min_residency ends is forgotten": (
        "residency",
        "moments.append(_stays_until(seat))",
        "pass",
    ),
    "the line with the lowest priority goes first": (
        "residency",
        "key=lambda line: -line.priority",
        "key=lambda line: line.priority",
    ),
    "whoever has the highest priority is put out": (
        "preemption",
        "return (one.priority, one.leases > 0,",
        "return (-one.priority, one.leases > 0,",
    ),
    "plans are kept though another line has begun": (
        "residency",
        "            self._plans_hold_until = -FOREVER\n            self._note_pause(",
        "            self._note_pause(",
    ),
    "a cost includes the drain": (
        "residency",
        "swap.evict_seconds = max(now - swap.emptied, 0.0)",
        "swap.evict_seconds = max(now - (swap.until - self._config.drain_timeout), 0.0)",
    ),
    "nothing is learned from a swap": (
        "residency",
        "        self._learn(seat, how)\n",
        "",
    ),
    "costs are learned without their direction": (
        "costs",
        "        self._known[cost.source, cost.target, cost.way] = cost\n",
        '        self._known["", cost.target, cost.way] = cost\n',
    ),
    "all arrivals are taken for those of a line": (
        "demand",
        "count - 1\n",
        "count + 9\n",
    ),
}


def copied(folder, name, mutant=None):
    """The package under another name, imported from a folder, with one text replaced by another."""
    target = folder / name
    target.mkdir()
    for path in SOURCE.rglob("*.py"):
        text = path.read_text()
        place = target / path.relative_to(SOURCE)
        place.parent.mkdir(exist_ok=True)
        if mutant and path.stem == mutant[0]:
            assert text.count(mutant[1]) == 1, f"the text to replace is not in {path.name} exactly once"
            text = text.replace(mutant[1], mutant[2])
        place.write_text(text.replace("anvil_mux", name))
    shutil.copy(SOURCE / "routing" / "routing.yaml", target / "routing")
    modules = ("errors", "scheduler.residency", "multiplexer")
    return SimpleNamespace(
        **{module.split(".")[-1]: importlib.import_module(f"{name}.{module}") for module in modules}
    )


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Makes copies of the package, and forgets them."""
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    yield lambda mutant=None: copied(tmp_path, "planted", mutant)
    for name in set(sys.modules) - before:
        del sys.modules[name]


LEARNING = ("cost_aware", "adaptive")
"""Policies that go by what was learned."""


def suspects(package, seeds=8):
    """The worlds that show a difference, an error or a deadlock."""
    for seed, policy, layout in itertools.product(range(seeds), ("eager", "debounce", *LEARNING), ALONE):
        try:
            shown = differences(*world(layout, policy, seed, requests=40), seed=seed, package=package)
        except Exception as error:
            shown = error
        if shown:
            yield layout, policy, seed, shown


def test_the_copy_itself_shows_no_difference(package):
    assert list(suspects(package(), seeds=3)) == []


@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_bug_is_seen(package, name):
    assert next(suspects(package(MUTANTS[name])), None)
