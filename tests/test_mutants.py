"""Planted bugs: each is put into a copy of the package, and the comparison with the simulator must see it."""

import importlib
import itertools
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import anvil_mux
from anvil_mux.config.config import Config
from anvil_mux.lab.engines import Engines
from tests.baton import BatonClock
from tests.lab.hosts import FLEETS, world_of_hosts
from tests.lab.test_simulate import LAYOUTS, one, world
from tests.multiplexer.stage import VirtualEngines, differences
from tests.scheduler.test_scheduler import reports_of_old_steps_are_ignored
from tests.seeds import part

SOURCE = Path(anvil_mux.__file__).parent

MUTANTS = {
    "a release asks for nothing": (
        "scheduler",
        "        if group.release(ticket, now, usage, whole=whole):\n",
        "        if group.release(ticket, now, usage, whole=whole) and False:\n",
    ),
    "an admitted request is not woken": (
        "multiplexer/driver",
        "            ticket.wake.set()\n",
        "",
    ),
    "leases are granted while their backend drains": (
        "admission",
        "        ready = model.ready\n",
        '        ready = [s for s in model.slots if s.state in ("ready", "draining")]\n',
    ),
    "leases are counted, not identified": (
        "scheduler/facts",
        "        if slot is None or ticket not in slot.holders:\n            return False\n",
        "        if slot is None or not slot.holders:\n            return False\n"
        "        ticket = ticket if ticket in slot.holders else next(iter(slot.holders))\n",
    ),
    "only the first of a queue is admitted": (
        "admission",
        "            self._lease_or_fail(model, ticket, model.ready, now)\n"
        "        self.woken += queue.tickets\n        queue.clear()\n",
        "            self._lease_or_fail(model, ticket, model.ready, now)\n            break\n"
        "        self.woken += list(queue)[:1]\n"
        "        queue.tickets.pop(next(iter(queue), None), None)\n",
    ),
    "a place that becomes free is left free": (
        "scheduler/facts",
        "            self.fill_places(model, now)\n        if replicas and",
        "            pass\n        if replicas and",
    ),
    "those who wait for a place are taken as they came": (
        "scheduler/model",
        "            self.leave(ticket)\n            if",
        "            ticket = self.first\n            self.leave(ticket)\n            if",
    ),
    "a request that gets a place is not woken": (
        "scheduler",
        "return self._collected(group) if group.woken or group.cut else NOTHING",
        "return NOTHING",
    ),
    "a cancel is lost": (
        "multiplexer/driver",
        "                self._host.cancel(job.backend, job.step.number)\n",
        "                pass\n",
    ),
    "the timer is not set anew": (
        "multiplexer/driver",
        "            self.ask_at(effects.ask_at)\n",
        "            self.ask_at(max(effects.ask_at, self.clock.now() + 60.0))\n",
    ),
    "a stale timer moves the moment back": (
        "multiplexer/driver",
        "        if moment < self._ask_at:\n            self._changed.notify()\n",
        "",
    ),
    "a step is lost": (
        "multiplexer/driver",
        "                    self._jobs.extend(begun)\n",
        "                    self._jobs.extend(begun[:1])\n",
    ),
    "steps are performed at once, each after the other": (
        "multiplexer/driver",
        '            self.clock.spawn(partial(self._perform, job), f"step-{job.step.backend}")\n',
        "            self._perform(job)\n",
    ),
    "a queue that ended is offered twice": (
        "scheduler",
        "        group.woken = []\n",
        "        group.woken = group.woken[:]\n",
    ),
    "only the group of a fact is asked where host memory is shared": (
        "scheduler",
        "            if memory.is_changed:",
        "            if False:",
    ),
    "a load that nobody waits for any more is finished all the same": (
        "group",
        "or self._cancel_unwanted(models, now)",
        "",
    ),
    "a load that was cancelled counts as failed": (
        "scheduler/swaps",
        '        self.enter(slot, "cancelled", now)\n',
        '        self.enter(slot, "cancelled", now)\n        slot.note_load_failed(now, "", ())\n',
    ),
    "who waits for a place waits for a load": (
        "scheduler/state",
        "not (model.limited and model.ready)]",
        "model]",
    ),
    "a swap for nobody is not reprieved": (
        "scheduler/swaps",
        "            if not self._is_still_wanted(swap, now):\n",
        "            if False:\n",
    ),
    "the moment at which another replica is worth its load is forgotten": (
        "policies",
        "_sooner(decision, other.until) if",
        "decision if",
    ),
    "a replica that was evicted keeps its requests in the in-flight tracker": (
        "scheduler/swaps",
        "            model.replicas.in_flight.forget(slot.name)\n",
        "            pass\n",
    ),
    "a drain has no end": (
        "scheduler/swaps",
        "if self.reached(victim.drain_until, now) or is_empty:",
        "if is_empty:",
    ),
    "a load does not wait for sleepers that yield": (
        "scheduler/swaps",
        "if self.memory.has_room(target):",
        "if True:",
    ),
    "a sleeper that cannot be stopped counts as gone": (
        "scheduler/memory",
        "return slot.host_bytes if slot.failed_stops else 0",
        "return 0",
    ),
    "a victim does not wait for those that make way": (
        "scheduler/swaps",
        " or self.memory.makes_way(victim, now))",
        ")",
    ),
    "a sleeper that could not be stopped is left alone": (
        "scheduler/group",
        "if self.may_be_stopped(slot):",
        "if False:",
    ),
    "the most valuable sleeper yields": (
        "scheduler/memory",
        "(self._worth(slot, now), slot.name)):",
        "(self._worth(slot, now), slot.name), reverse=True):",
    ),
    "nobody is demoted while its time goes by": (
        "scheduler/group",
        "if not self.reached(until, now):",
        "if until > now:",
    ),
    "a preload may evict who has had work": (
        "scheduler/group",
        'if failed or any(each.state == "standby" or each.has_had_work for each in found or ()):',
        "if failed:",
    ),
    "the moment of an overdue queue is forgotten": (
        "group",
        "if not self.reached(model.queue.overdue_at, now):",
        "if model.queue.overdue_at > now:",
    ),
    "a backend that could not be stopped is taken for gone": (
        "slot",
        '"evicting", "stuck"))',
        '"evicting"))',
    ),
    "a cool-down is not kept": (
        "slot",
        "        self.failed_starts += 1\n        self.retry_at = now + cool_down(self.failed_starts)\n",
        "",
    ),
    "a queue that is overdue is loaded too late for its queue_timeout": (
        "scheduler/admission",
        "return max(min(most, latest), 0.0)",
        "return most",
    ),
    "the GPUs of an overdue queue are not kept for it": (
        "group",
        "                busy.update(slot.holds)\n",
        "                pass\n",
    ),
    "a model's own max_wait is ignored": (
        "scheduler/model",
        "waits = [each.max_wait for each in backends]",
        "waits = [config.max_wait]",
    ),
    "an idle model is evicted while it is leased": (
        "slot",
        'self.state != "ready" or self.holders or ttl is None',
        'self.state != "ready" or ttl is None',
    ),
    "the moment at which an idle model goes is forgotten": (
        "scheduler/group",
        "if self.reached(slot.idle_until, now)]",
        "if slot.idle_until <= now]",
    ),
    "a release does not set the timer of a ttl": (
        "scheduler/facts",
        'slot.state == "draining" or slot.ttl is not None or comes_back',
        'slot.state == "draining" or comes_back',
    ),
    "the drain timeout of a backend does not count": (
        "scheduler/state",
        "(self.config if by_hand else slot.backend).drain_timeout",
        "self.config.drain_timeout",
    ),
    "a min_residency holds overdue queues as well": (
        "group",
        "            if found := plan(self, model, busy, now):\n                self.begin(",
        "            if found := plan(self, model, busy, now, self.staying(now)):\n"
        "                self.begin(",
    ),
    "a min_residency is counted from the last use": (
        "slot",
        "return self.loaded + self.backend.min_residency",
        "return self.used + self.backend.min_residency",
    ),
    "the moment at which a min_residency ends is forgotten": (
        "scheduler/state",
        "if not self.reached(slot.stays_until, now)}",
        "if slot.stays_until > now}",
    ),
    "the queue with the lowest priority goes first": (
        "group",
        "key=lambda queue: -queue.priority",
        "key=lambda queue: queue.priority",
    ),
    "whoever has the highest priority is evicted": (
        "scheduler/memory",
        "return (one.priority, one.leases > 0,",
        "return (-one.priority, one.leases > 0,",
    ),
    "a cost includes the drain": (
        "scheduler/swaps",
        "swap.emptied = now",
        "swap.emptied = victim.since",
    ),
    "nothing is learned from a swap": (
        "scheduler/swaps",
        "        if swap := self.end_to(slot):\n",
        "        if not self.end_to(slot):\n",
    ),
    "costs are learned without their direction": (
        "costs",
        "        self._known[cost.host, cost.source, cost.target, cost.way] = cost\n",
        '        self._known[cost.host, "", cost.target, cost.way] = cost\n',
    ),
    "all arrivals are taken for those of a queue": (
        "scheduler/model",
        "count - 1\n",
        "count + 9\n",
    ),
}


HOST_MUTANTS = {
    "the GPUs of a lost host are given away": (
        "scheduler",
        "        record.is_lost, record.is_away = True, False\n",
        "",
    ),
    "a late report of a step on a lost host counts": (
        "scheduler",
        "            self._under_way.pop(name, None)\n",
        "            pass\n",
    ),
    "a queue is offered to two groups at once": (
        "scheduler/state",
        "if model.queues_in(state.name) and not model.is_coming]",
        "if model.name not in state.coming]",
    ),
    "what is on a lost host is leased": (
        "slot",
        'return self.state == "ready" and (bool(self.backend.url) or self.host.takes_loads)',
        'return self.state == "ready"',
    ),
    "what is found on a host that is back is left as it was": (
        "scheduler",
        "(group, group.host_freed(now))",
        "(group, [])",
    ),
    "more backends of a model are loaded than may be": (
        "scheduler/model",
        "return most is None or len(self._counted(slot)) < most",
        "return True",
    ),
}
"""Planted bugs that are seen on several hosts."""


def copied(folder, name, mutant=None):
    """The package under another name, imported from a folder, with a text of one module replaced."""
    target = folder / name
    target.mkdir()
    for path in SOURCE.rglob("*.py"):
        text = path.read_text()
        place = target / path.relative_to(SOURCE)
        place.parent.mkdir(exist_ok=True)
        if mutant and path.match(f"{mutant[0]}.py"):
            assert text.count(mutant[1]) == 1, f"the text to replace is not in {path.name} exactly once"
            text = text.replace(mutant[1], mutant[2])
        place.write_text(text.replace("anvil_mux", name))
    shutil.copy(SOURCE / "routing" / "routing.yaml", target / "routing")
    modules = ("errors", "scheduler.scheduler", "scheduler.group", "multiplexer.multiplexer")
    return SimpleNamespace(
        **{module.split(".")[-1]: importlib.import_module(f"{name}.{module}") for module in modules}
    )


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Makes copies of the package, and forgets them."""
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    yield lambda mutant=None, name="planted": copied(tmp_path, name, mutant)
    for name in set(sys.modules) - before:
        del sys.modules[name]


def a_lease_is_cut_before_its_engine_is_told_to_go(package):
    for seed in range(20):
        clock = BatonClock(seed)
        engines = VirtualEngines(clock, Engines(), package)
        config = Config(policy="eager", drain_timeout=0.0, backends=(one("a", "0"), one("b", "0")))
        mux = package.multiplexer.Multiplexer(config, engines, log=lambda event: None, clock=clock)

        def hold(mux=mux, clock=clock, engines=engines):
            with mux.lease("a") as lease:
                lease.on_severed(lambda: engines.calls.append((clock.now(), "cut")))
                clock.sleep(100.0)

        def main(mux=mux, clock=clock, hold=hold):
            mux.start()
            clock.spawn(hold, "hold")
            clock.sleep(50.0)
            mux.load("b")
            mux.close()

        clock.run(main)
        assert [call for _, call in engines.calls] == ["load a", "cut", "evict a", "load b"]


SCRIPTED = {
    "the report of an old step counts": (
        (
            "scheduler",
            "if self._under_way.get(step.backend) != step.number:",
            "if step.backend not in self._under_way:",
        ),
        lambda package: reports_of_old_steps_are_ignored(package.scheduler.Scheduler),
    ),
    "a cut comes after its eviction": (
        (
            "multiplexer/driver",
            "            for ticket in effects.cut:\n"
            "                cut(ticket)\n"
            "            for job in jobs:\n"
            "                self._prepare(job)\n"
            "        finally:  # a step that is lost would leave its backend as it is for ever\n"
            "            begun = [job for job in jobs if not isinstance(job.step, Cancel)]\n"
            "            if begun:\n"
            "                with self.lock:\n"
            "                    self._jobs.extend(begun)\n"
            "                    self._changed.notify()\n",
            "            for job in jobs:\n"
            "                self._prepare(job)\n"
            "        finally:  # a step that is lost would leave its backend as it is for ever\n"
            "            begun = [job for job in jobs if not isinstance(job.step, Cancel)]\n"
            "            if begun:\n"
            "                with self.lock:\n"
            "                    self._jobs.extend(begun)\n"
            "                    self._changed.notify()\n"
            "            for ticket in effects.cut:\n"
            "                cut(ticket)\n",
        ),
        a_lease_is_cut_before_its_engine_is_told_to_go,
    ),
}
"""Planted bugs that no comparison with the simulator sees, and the histories that do."""


@pytest.mark.parametrize("name", SCRIPTED)
def test_a_planted_bug_fails_its_history(package, name):
    mutant, history = SCRIPTED[name]
    history(package())
    with pytest.raises(AssertionError):
        history(package(mutant, "mutant"))


ASKED = ("eager", "debounce", "cost_aware", "adaptive")


def suspects(package, make, layouts, seeds=8, policies=ASKED):
    """The worlds that show a difference, an error or a deadlock, of those that ``make`` makes."""
    for seed, policy, layout in itertools.product(range(seeds), policies, layouts):
        try:
            shown = differences(*make(layout, policy, seed, requests=40), seed=seed, package=package)
        except Exception as error:
            shown = error
        if shown:
            yield layout, policy, seed, shown


@pytest.mark.seeds
@pytest.mark.parametrize("policy", part(ASKED, every=4))
@pytest.mark.parametrize(("make", "layouts"), [(world, LAYOUTS), (world_of_hosts, FLEETS)])
def test_the_copy_itself_shows_no_difference(package, make, layouts, policy):
    assert list(suspects(package(), make, part(layouts, every=4), seeds=1, policies=[policy])) == []


@pytest.mark.seeds
@pytest.mark.parametrize("name", part(HOST_MUTANTS, every=4))
def test_a_planted_bug_is_seen_on_three_hosts(package, name):
    assert next(suspects(package(HOST_MUTANTS[name]), world_of_hosts, FLEETS), None)


@pytest.mark.seeds
@pytest.mark.parametrize("name", part(MUTANTS, every=4))
def test_a_planted_bug_is_seen(package, name):
    assert next(suspects(package(MUTANTS[name]), world, LAYOUTS), None)
