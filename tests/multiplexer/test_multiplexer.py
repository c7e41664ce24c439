"""The threaded multiplexer writes the log that was simulated; and single situations, virtual and real."""

import gc
import logging
import threading
import weakref
from dataclasses import replace
from math import inf
from types import SimpleNamespace

import pytest

from anvil_mux import errors
from anvil_mux.config.config import Config
from anvil_mux.config.machines import Gpu
from anvil_mux.errors import (
    BackendError,
    Cancelled,
    ClientGone,
    Draining,
    LoadError,
    Overloaded,
    Severed,
    UnknownModel,
    WaitedTooLong,
)
from anvil_mux.host.seam import Evicted, Loaded
from anvil_mux.lab.checker import check
from anvil_mux.lab.engines import Engines, Outcome
from anvil_mux.lab.simulate import Arrival, simulate
from anvil_mux.multiplexer import multiplexer
from anvil_mux.multiplexer.facts import KNOWN_SECONDS, REFUSED_SECONDS
from anvil_mux.multiplexer.multiplexer import Multiplexer
from anvil_mux.scheduler import group
from anvil_mux.scheduler.costs import Cost, Footprint
from anvil_mux.scheduler.events import Cause
from anvil_mux.scheduler.steps import Cancel, Crash, Demote, Evict, Load
from anvil_mux.scheduler.waits import LogProgress, Progress, WaitEstimate
from tests.baton import BatonClock, Deadlock
from tests.lab.facts import (
    Death,
    HostBack,
    HostDrained,
    HostGone,
    HostLost,
    PauseBegun,
    PauseEnded,
    Reload,
    Unloading,
)
from tests.lab.hosts import FLEETS, world_of_hosts, world_of_pauses
from tests.lab.test_simulate import LAYOUTS, POLICIES, one, world
from tests.seeds import seeds

PACKAGE = SimpleNamespace(errors=errors, multiplexer=multiplexer, group=group)
A, B = one("a", "0"), one("b", "0")
TWO = Config(policy="eager", backends=(A, B))
TEN = (Gpu("0", vram=10),)


class VirtualEngines:
    """What the workers call: the simulator's outcomes, slept in virtual time."""

    def __init__(self, clock, perform, package=PACKAGE):
        self._clock = clock
        self._perform = perform
        self._package = package
        self._steps = {}
        self._latches = {}
        self.calls = []

    def _cancelled(self, backend, number):
        return self._latches.setdefault((backend.name, number), self._clock.latch())

    def cancel(self, backend, number):
        self._cancelled(backend, number).set()

    def load(self, backend, how, number):
        begun, outcome = self._clock.now(), self._begin(Load(backend.name, how))
        if self._cancelled(backend, number).wait(outcome.seconds):
            outcome = self._cut_short(backend.name, outcome, begun + outcome.seconds)
        self._raise(outcome)
        return Loaded(f"http://127.0.0.1:{1000 + len(self.calls)}", outcome.how or how)

    def evict(self, backend, how):
        outcome = self._do(Evict(backend.name, how))
        return Evicted(outcome.how or how, outcome.residual, outcome.host_bytes)

    def demote(self, backend, how, to):
        outcome = self._do(Demote(backend.name, how, to))
        return Evicted(outcome.how or to, outcome.residual, outcome.host_bytes)

    def ended(self, backend):
        return "killed"

    def answers(self, backend, limit):
        return True

    def log_tail(self, backend):
        return []

    def _cut_short(self, name, outcome, ends):
        """A load that is cancelled, and takes a while to notice; it may end before that as it would have."""
        now, cancel = self._clock.now(), self._begin(Cancel(name))
        self._clock.sleep(min(cancel.seconds, ends - now))
        if now + cancel.seconds >= ends:
            return outcome
        return cancel if cancel.error else Outcome(0.0, Cancelled("it was cancelled"))

    def _do(self, step):
        outcome = self._begin(step)
        self._clock.sleep(outcome.seconds)
        self._raise(outcome)
        return outcome

    def _begin(self, step):
        nth = self._steps[step.backend] = self._steps.get(step.backend, -1) + 1
        self.calls.append((self._clock.now(), f"{type(step).__name__.lower()} {step.backend}"))
        return self._perform(step, nth)

    def _raise(self, outcome):
        if outcome.error:
            kind = getattr(self._package.errors, type(outcome.error).__name__)
            raise kind(outcome.error.message)


class Player:
    """Plays a trace on the real multiplexer, every request in a thread of its own."""

    def __init__(self, config, perform, seed=0, package=PACKAGE, *, resident=(), costs=(), follow=None):
        self._clock, self.log, self._errors = BatonClock(seed), [], package.errors
        self._follow = follow
        self._resident = {name: f"http://127.0.0.1:{9000 + n}" for n, name in enumerate(resident)}
        self._mux = package.multiplexer.Multiplexer(
            config,
            VirtualEngines(self._clock, perform, package),
            log=self.log.append,
            costs=costs,
            clock=self._clock,
        )

    def play(self, trace, until):
        def main():
            self._mux.facts.adopt(self._resident)
            self._mux.start()
            for entry in trace:
                self._clock.sleep(entry.at - self._clock.now())
                self._clock.spawn(lambda entry=entry: self._act(entry), str(entry))
            self._clock.sleep(max(until - self._clock.now(), 0.0) + 2**-21)
            self._mux.close()

        self._clock.run(main)
        return [tuple(event) for event in self.log if event.at <= until]

    def _act(self, entry):
        try:
            match entry:
                case Arrival():
                    self._request(entry)
                case Unloading(_, model):
                    self._mux.facts.unload(model)
                case Death(_, backend):
                    self._mux.facts.died(backend, "killed")
                case Reload(_, config):
                    self._mux.facts.reconfigure(config, {})
                case PauseBegun(_, seconds):
                    self._mux.facts.paused(seconds)
                case PauseEnded():
                    self._mux.facts.resumed()
                case _:
                    self._tell_of_host(entry)
        except self._errors.MuxError:
            pass

    def _tell_of_host(self, entry):
        match entry:
            case HostLost(_, host):
                self._mux.facts.host_lost(host)
            case HostBack(_, host, found):
                running = {name: f"http://127.0.0.1:{8000 + n}" for n, name in enumerate(found)}
                standby = {
                    name: Evicted(how.level, how.residual, how.host_bytes)
                    for name, how in found.items()
                    if how.level
                }
                self._mux.facts.host_back(
                    host, {n: u for n, u in running.items() if n not in standby}, standby
                )
            case HostGone(_, host):
                self._mux.tell(self._mux.scheduler.host_gone, host)
            case HostDrained(_, host, drained):
                self._mux.tell(self._mux.scheduler.host_drained, host, drained=drained)

    def _request(self, request):
        def tend(now):
            if now >= request.at + request.patience:
                raise self._errors.ClientGone("left")

        tended = tend if request.patience < inf else None
        if not request.leases:
            self._mux.load(request.model, tended)
            return
        with self._mux.lease(request.model, tended, key=request.sender):
            self._clock.sleep(request.seconds)
        for later in self._follow(request, self._clock.now()) if self._follow else ():
            self._clock.block(later.at)
            self._request(later)


class Mistakes(logging.Handler):
    """The log of exceptions that somebody caught and did not expect."""

    def __init__(self):
        super().__init__()
        self.records = []

    def emit(self, record):
        if record.exc_info:
            self.records.append(record)


def differences(config, trace, perform, *, seed=0, package=PACKAGE, **before):
    """The first event in which the two logs differ, as (simulated, real); None if they are equal.

    A mistake that a thread logged is a difference, too: the program goes on after it.

    ``before``: who runs already (``resident``), what is known of swaps (``costs``), and clients that wait for
    their answers (``follow``).
    """
    expected = [tuple(event) for event in simulate(config, trace, perform, **before)]
    until = max([trace[-1].at, *(event[0] for event in expected[-1:])])
    mistakes = Mistakes()
    logging.getLogger().addHandler(mistakes)
    try:
        real = Player(config, perform, seed, package, **before).play(trace, until)
    finally:
        logging.getLogger().removeHandler(mistakes)
    if mistakes.records:
        return None, mistakes.records[0]
    for pair in zip(expected + [None] * len(real), real + [None] * len(expected), strict=True):
        if pair[0] != pair[1]:
            return pair
    return None


# Equality with the simulator


@pytest.mark.seeds
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_threads_write_the_log_that_was_simulated(layout, policy):
    for seed in seeds(1, of=30):
        config, trace, perform = world(layout, policy, seed, requests=50)
        assert differences(config, trace, perform, seed=seed) is None, seed
        assert check(simulate(config, trace, perform), config) == [], seed


@pytest.mark.seeds
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("fleet", FLEETS)
def test_they_do_so_too_on_three_hosts_that_are_lost_and_come_back(fleet, policy):
    for seed in seeds(1, of=30):
        config, trace, perform = world_of_hosts(fleet, policy, seed, requests=50)
        assert differences(config, trace, perform, seed=seed) is None, seed


@pytest.mark.seeds
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("fleet", FLEETS)
def test_they_do_so_too_while_it_is_paused_now_and_then(fleet, policy):
    for seed in seeds(1, of=30):
        config, trace, perform = world_of_pauses(fleet, policy, seed, requests=50)
        assert differences(config, trace, perform, seed=seed) is None, seed


@pytest.mark.parametrize("policy", POLICIES)
def test_they_do_so_too_with_a_model_that_ran_before_and_with_what_was_learned(policy):
    for seed, layout in enumerate(LAYOUTS):
        config, trace, perform = world(layout, policy, seed, requests=40)
        first, *others = config.backends
        costs = [Cost(other.model, first.model, "stop", 1.5, 3.25, 4) for other in others]
        before = {"resident": [first.name], "costs": costs}
        assert differences(config, trace, perform, seed=seed, **before) is None, layout


@pytest.mark.parametrize("policy", ["eager", "adaptive"])
@pytest.mark.parametrize("service", [2.0**-5, 0.5])
def test_they_do_so_too_for_clients_that_ask_again_once_they_are_answered(policy, service):
    def follow(request, now):
        return [request._replace(at=now + 2.0**-8 * (1 + (request.model == "b")))] if now < 20.0 else []

    config = Config(policy=policy, backends=(A, B))
    # No request of a comes a second after b's, when it is told that the swap is held back.
    trace = [Arrival(0.25, "a", service), Arrival(0.375 + 2.0**-9, "b", service)]
    before = {"resident": ["a"], "costs": Engines({"a": 1.0, "b": 3.0}, 0.25).costs(config), "follow": follow}
    engines = Engines({"a": 1.0, "b": 3.0}, 0.25)
    assert differences(config, trace, engines, seed=3, **before) is None
    log = simulate(config, trace, engines, **before)
    answers = [sum(event.kind == "released" and event.model == model for event in log) for model in "ab"]
    assert min(answers) * 3 >= max(answers)


@pytest.mark.seeds
@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_interleaving_of_the_threads_changes_the_log(layout):
    config, trace, perform = world(layout, "eager", 7, requests=30)
    for seed in seeds(4, of=8):
        assert differences(config, trace, perform, seed=seed) is None


@pytest.mark.seeds
def test_requests_of_one_moment_may_come_in_any_order_and_all_is_kept():
    trace = [Arrival(float(n // 12), "abc"[n % 3], 0.5) for n in range(48)]
    config = Config(policy="eager", backends=LAYOUTS["three on one GPU"][0], drain_timeout=2.0)
    for seed in seeds(8, of=20):
        player = Player(config, Engines({}, 3.0), seed)
        player.play(trace, 500.0)
        assert check(player.log, config) == []
        assert sorted(event.ticket for event in player.log if event.kind == "released") == list(range(1, 49))


# Single situations, in virtual time


class Stage:
    """A multiplexer on a baton clock: ``main(stage)`` runs as a thread among its workers and requests."""

    def __init__(self, config=TWO, perform=None, seed=0, footprints=()):
        self.clock = BatonClock(seed)
        self.log = []
        self.engines = VirtualEngines(self.clock, perform or Engines({"a": 4.0, "b": 6.0}, stop_seconds=1.0))
        self.mux = Multiplexer(
            config, self.engines, log=self.log.append, footprints=footprints, clock=self.clock
        )
        self.config = config

    def play(self, main):
        def whole():
            self.mux.start()
            main(self)
            self.mux.close()

        self.clock.run(whole)
        assert check(self.log, self.config) == []
        return self

    def later(self, at, run):
        def wait_then_run():
            self.clock.sleep(at)
            run()

        self.clock.spawn(wait_then_run, f"at {at}")

    def request(self, at, model, seconds=0.0, tend=None):
        """A request in a thread of its own; its result fills in: leased, over, error."""
        result = SimpleNamespace(leased=None, over=None, error=None, lease=None)

        def run():
            try:
                with self.mux.lease(model, tend) as result.lease:
                    result.leased = self.clock.now()
                    self.clock.sleep(seconds)
            except Exception as error:
                result.error = error
            result.over = self.clock.now()

        self.later(at, run)
        return result

    def states(self):
        return {model.model: model.state for model in self.mux.overview.status().models}

    def kinds(self, *kinds):
        return [f"{e.kind} {e.backend or e.model}" for e in self.log if e.kind in kinds]


@pytest.mark.parametrize("seed", range(5))
def test_who_comes_before_it_is_known_what_runs_is_served_by_that_and_starts_nothing_beside(seed):
    def main(stage):
        stage.mux.facts.expect("ab")
        early, other = stage.request(1.0, "a", 1.0), stage.request(1.0, "b", 1.0)
        stage.clock.sleep(5.0)
        assert stage.mux.overview.unseen == ["a", "b"]
        assert stage.engines.calls == []
        assert stage.mux.facts.adopt({"a": "http://127.0.0.1:1"}) == []
        stage.clock.sleep(2.0)
        assert (early.leased, other.leased) == (5.0, None)
        assert stage.mux.overview.unseen == ["b"]
        assert stage.engines.calls == []
        stage.mux.facts.looked_at(["b"])
        stage.clock.sleep(20.0)
        assert stage.engines.calls == [(7.0, "evict a"), (8.0, "load b")]
        assert other.leased == 14.0
        assert stage.mux.overview.unseen == []

    Stage(seed=seed).play(main)


def test_a_gpu_is_reserved_from_the_beginning_of_its_swap_until_it_is_the_targets():
    stage, seen = Stage(), {}

    def promised():
        [gpu] = stage.mux.overview.status().gpus
        seen[stage.clock.now()] = gpu.reserved_for

    stage.request(0.0, "a", 10.0)  # ready at 4, released at 14
    stage.request(6.0, "b")  # a is stopped from 14 to 15, b is loaded from 15 to 21
    for moment in (5.0, 7.0, 14.5, 16.0, 30.0):
        stage.later(moment, promised)
    stage.play(lambda stage: stage.clock.sleep(40.0))
    assert seen == {5.0: (), 7.0: ("b",), 14.5: ("b",), 16.0: (), 30.0: ()}


def test_what_a_backend_held_is_learned_when_it_leaves():
    stage = Stage()
    stage.engines.evict = lambda backend, how: Evicted("sleep", {"0": 2}, 16, {"0": 18})
    stage.request(0.0, "a")
    stage.request(10.0, "b")
    seen = []

    def main(stage):
        stage.clock.sleep(30.0)
        seen.extend(stage.mux.overview.footprints())

    stage.play(main)
    assert seen == [Footprint("a", "sleep", {"0": 20}, {"0": 2}, 16, 1)]


@pytest.mark.parametrize(("host_bytes", "state"), [(8, "standby"), (16, "stopped")])
def test_what_a_sleeper_kept_of_host_memory_is_known_after_a_restart(host_bytes, state):
    backends = (replace(A, evict_to=("sleep", "stop")), B)
    config = Config(policy="eager", backends=backends, host_memory=10)
    stage, seen = Stage(config, footprints=[Footprint("a", "sleep", host_bytes=host_bytes)]), []

    def main(stage):
        stage.clock.sleep(30.0)
        seen.append(stage.states()["a"])

    stage.request(0.0, "a")
    stage.request(10.0, "b")
    stage.play(main)
    assert seen == [state]


def test_however_many_are_demoted_at_once_a_swap_waits_for_none_of_them():
    sleepers = [one(name, "0", evict_to=("sleep",), demote_after=10.0) for name in "abc"]

    def perform(step, nth):
        return Outcome(100.0 if isinstance(step, Demote) else 1.0)

    def main(stage):
        for name in "abc":
            stage.mux.load(name)
        stage.clock.sleep(20.0)
        asked = stage.request(0.0, "d")
        stage.clock.sleep(5.0)
        assert asked.leased == 27.0

    stage = Stage(Config(policy="eager", backends=(*sleepers, one("d", "0"))), perform).play(main)
    assert [e.backend for e in stage.log if e.kind == "demoting"] == ["a", "b"]


def test_a_sleeper_is_stopped_by_hand_and_loaded_anew():
    def main(stage):
        stage.mux.load("a")
        for _ in range(2):
            assert stage.mux.facts.unload("a")
            stage.clock.sleep(3.0)
        assert not stage.mux.facts.unload("a")
        stage.mux.load("a")
        assert stage.mux.facts.unload("a", when_idle=True)
        stage.clock.sleep(3.0)
        assert not stage.mux.facts.unload("a", when_idle=True)

    stage = Stage(Config(policy="eager", backends=(one("a", "0", evict_to=("sleep",)),))).play(main)
    assert [call for _, call in stage.engines.calls] == ["load a", "evict a", "demote a", "load a", "evict a"]


def calls(stage):
    return [call for _, call in stage.engines.calls]


def test_a_load_is_cancelled_by_hand_while_its_keeper_is_in_it_and_the_other_model_is_loaded():
    def main(stage):
        waiting, other = stage.request(1.0, "a"), stage.request(4.5, "b")
        stage.clock.sleep(3.0)
        assert stage.mux.facts.unload("a")
        stage.clock.sleep(0.5)
        assert stage.states()["a"] == "cancelling"
        stage.clock.sleep(30.0)
        assert (waiting.over, waiting.error.code, waiting.leased) == (3.0, "cancelled", None)
        assert (stage.states(), other.leased) == ({"a": "stopped", "b": "ready"}, 4.5 + 6.0)

    stage = Stage(perform=Engines({"a": 600.0, "b": 6.0}, stop_seconds=1.0)).play(main)
    assert stage.engines.calls == [(1.0, "load a"), (3.0, "cancel a"), (4.5, "load b")]


def test_a_load_is_cancelled_for_another_line_once_its_client_has_left():
    def leave(now):
        if now >= 5.0:
            raise ClientGone("left")

    def main(stage):
        stage.request(0.0, "a", tend=leave)
        other = stage.request(2.0, "b")
        stage.clock.sleep(30.0)
        assert other.leased == 5.0 + 1.0 + 6.0

    stage = Stage(perform=Engines({"a": 600.0, "b": 6.0}, stop_seconds=1.0)).play(main)
    assert [(e.at, e.kind, e.target) for e in stage.log if e.backend == "a"] == [
        (0.0, "loading", ""),
        (5.0, "cancelling", "b"),
        (6.0, "stopped", ""),
    ]


@pytest.mark.parametrize("late", [0.0, 0.5])
def test_a_cancel_that_comes_when_the_load_has_succeeded_does_no_harm(late):
    def main(stage):
        stage.request(0.0, "a")
        stage.clock.sleep(4.0 - 0.25 + late)
        assert stage.mux.facts.unload("a")
        stage.clock.sleep(10.0)
        assert stage.states()["a"] == "stopped"
        again = stage.request(0.0, "a")
        stage.clock.sleep(10.0)
        assert again.leased == 13.75 + late + 4.0  # the cancel of the first load is not that of the second

    stage = Stage(perform=Engines({"a": 4.0}, stop_seconds=1.0)).play(main)
    assert [call for _, call in stage.engines.calls if call != "cancel a"] == ["load a", "evict a", "load a"]


def test_what_is_not_kept_goes_with_its_last_lease_unless_somebody_asks_for_it_again():
    def main(stage):
        with stage.mux.lease("a"):
            with stage.mux.lease("a"):
                assert not stage.mux.facts.unload("a", when_idle=True)
            stage.clock.sleep(5.0)
            assert calls(stage) == ["load a"]
        stage.clock.sleep(3.0)
        assert calls(stage) == ["load a", "evict a"]
        with stage.mux.lease("a"):
            assert not stage.mux.facts.unload("a", when_idle=True)
            with stage.mux.lease("a"):
                pass
        stage.clock.sleep(3.0)

    stage = Stage(Config(policy="eager", backends=(one("a", "0"),))).play(main)
    assert calls(stage) == ["load a", "evict a", "load a"]


def test_what_a_demotion_frees_is_not_all_that_a_backend_held():
    backends = (replace(A, evict_to=("sleep", "checkpoint"), demote_after=5.0), B)
    stage = Stage(Config(policy="eager", backends=backends))
    stage.engines.evict = lambda backend, how: Evicted("sleep", {"0": 2}, 16, {"0": 18})
    stage.engines.demote = lambda backend, how, to: Evicted(to, {"0": 0}, 18 * (to != "stop"), {"0": 2})
    stage.request(0.0, "a")
    stage.request(10.0, "b")
    seen = []

    def main(stage):
        stage.clock.sleep(30.0)
        seen.extend(stage.mux.overview.footprints())

    stage.play(main)
    assert seen == [
        Footprint("a", "sleep", {"0": 20}, {"0": 2}, 16, 1),
        Footprint("a", "checkpoint", {}, {}, 18, 1),
    ]


def test_nothing_is_learned_from_what_one_held_that_could_not_be_stopped_at_first():
    stage, answers = Stage(), [BackendError("still runs"), Evicted("stop", freed={"0": 3})]

    def evict(backend, how):
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def main(stage):
        stage.clock.sleep(60.0)
        assert (answers, stage.mux.overview.footprints()) == ([], [])

    stage.engines.evict = evict
    stage.request(0.0, "a")
    stage.request(10.0, "b")
    stage.play(main)


SEEDS = pytest.mark.parametrize("seed", range(5))


@SEEDS
def test_an_unknown_model_is_known_to_be_unknown_at_once_while_another_loads(seed):
    def main(stage):
        stage.request(0.0, "a")
        stage.clock.sleep(2.0)
        with pytest.raises(UnknownModel, match="Known models: a, b"):
            stage.mux.resolve("c")
        assert stage.states() == {"a": "loading", "b": "stopped"}
        assert stage.clock.now() == 2.0
        stage.clock.sleep(5.0)

    Stage(seed=seed).play(main)


@SEEDS
def test_the_release_of_a_severed_lease_does_not_wait_for_the_load(seed):
    def main(stage):
        held = stage.request(0.0, "a", seconds=13.0)
        served = stage.request(5.0, "b")
        stage.clock.sleep(30.0)
        assert held.lease.severed
        assert (held.over, served.leased) == (17.0, 19.0)  # b loads from 13 to 19

    Stage(Config(policy="eager", backends=(A, B), drain_timeout=7.0), seed=seed).play(main)


@SEEDS
def test_an_old_severed_lease_does_not_hold_up_the_second_eviction_of_its_model(seed):
    def main(stage):
        stage.request(0.0, "a", seconds=500.0)
        for at, model in ((10.0, "b"), (100.0, "a"), (200.0, "b")):
            stage.request(at, model)
        stage.clock.sleep(600.0)

    stage = Stage(Config(policy="eager", backends=(A, B), drain_timeout=30.0), seed=seed).play(main)
    assert [event.seconds for event in stage.log if event.kind == "evicting"] == [30.0, 0.0, 0.0]


@SEEDS
def test_a_swap_whose_only_waiter_left_is_not_made(seed):
    config = Config(backends=(A, B), policy="debounce", policy_settings={"quiet": 3.0, "max_hold": 3.0})

    def main(stage):
        stage.request(0.0, "a")
        left = stage.request(10.0, "b", tend=leave_at(12.0))
        stage.clock.sleep(40.0)
        assert isinstance(left.error, ClientGone)
        assert left.over == 12.0
        assert stage.states() == {"a": "ready", "b": "stopped"}
        assert stage.mux.overview.status().waiting == 0

    stage = Stage(config, seed=seed).play(main)
    assert stage.kinds("loading", "gone") == ["loading a", "gone b"]


def leave_at(moment):
    def tend(now):
        if now >= moment:
            raise ClientGone("left")

    return tend


@SEEDS
def test_a_load_outlives_the_client_that_asked_for_it(seed):
    def main(stage):
        left = stage.request(0.0, "a", tend=leave_at(1.0))
        stage.clock.sleep(10.0)
        assert isinstance(left.error, ClientGone)
        assert stage.states()["a"] == "ready"
        assert stage.request(0.0, "a").leased is None
        stage.clock.sleep(1.0)

    stage = Stage(seed=seed).play(main)
    assert stage.engines.calls == [(0.0, "load a")]


@SEEDS
def test_retries_of_a_client_join_the_one_load(seed):
    def main(stage):
        results = [stage.request(at, "a") for at in (0.0, 1.0, 2.0)]
        stage.clock.sleep(10.0)
        assert [result.leased for result in results] == [4.0, 4.0, 4.0]
        assert results[1].lease.waited == 3.0

    stage = Stage(seed=seed).play(main)
    assert stage.kinds("loading") == ["loading a"]


@SEEDS
def test_whatever_tend_raises_ends_the_wait_and_leaves_no_trace(seed):
    def broken(now):
        if now >= 2.0:
            raise RuntimeError("boom")

    def impatient(now):
        if now >= 3.0:
            raise errors.ModelLoading("not yet")

    def main(stage):
        first, second = stage.request(0.0, "a", tend=broken), stage.request(0.0, "a", tend=impatient)
        stage.clock.sleep(10.0)
        assert (type(first.error), first.over) == (RuntimeError, 2.0)
        assert (type(second.error), second.over) == (errors.ModelLoading, 3.0)
        assert (stage.mux.overview.status().waiting, stage.mux.overview.status().leases) == (0, 0)

    stage = Stage(seed=seed).play(main)
    assert [(e.kind, e.cause) for e in stage.log if e.kind in ("gone", "failed")] == [
        ("gone", None),
        ("failed", Cause("error", detail="model_loading")),
    ]


@pytest.mark.parametrize("seed", range(20))
def test_a_client_that_leaves_in_the_moment_of_its_lease_gives_it_back(seed):
    def main(stage):
        stage.request(0.0, "a", tend=leave_at(4.0))  # ready at 4.0
        stage.clock.sleep(10.0)
        assert (stage.mux.overview.status().waiting, stage.mux.overview.status().leases) == (0, 0)

    Stage(seed=seed).play(main)


@SEEDS
def test_nobody_waits_longer_than_the_queue_timeout(seed):
    def main(stage):
        result = stage.request(1.0, "a")
        stage.clock.sleep(10.0)
        assert isinstance(result.error, WaitedTooLong)
        assert result.over == 4.0

    Stage(Config(policy="eager", backends=(A, B), queue_timeout=3.0), seed=seed).play(main)


@SEEDS
def test_above_max_queue_requests_are_refused_but_not_those_for_a_resident(seed):
    def main(stage):
        stage.request(0.0, "a", seconds=30.0)
        waiting = [stage.request(10.0, "b") for _ in range(2)]
        refused = stage.request(11.0, "b")
        stage.clock.sleep(20.0)
        assert isinstance(refused.error, Overloaded)
        said = "overloaded: the queues of all models together are full: 2 waiting (max_queue). Try again."
        assert refused.error.message == said
        assert refused.over == 11.0
        assert stage.mux.overview.status().waiting == 2
        stage.clock.sleep(60.0)
        assert all(result.leased for result in waiting)

    Stage(Config(policy="eager", backends=(A, B), max_queue=2), seed=seed).play(main)


@SEEDS
def test_above_max_queue_one_may_wait_for_each_other_model_since_its_gpu_may_be_free(seed):
    def main(stage):
        stage.request(0.0, "a", seconds=30.0)
        for _ in range(2):
            stage.request(10.0, "b")
        others = [stage.request(moment, "c") for moment in (11.0, 11.5)]
        stage.clock.sleep(29.0)
        assert others[0].leased
        assert isinstance(others[1].error, Overloaded)

    backends = (A, B, replace(B, name="c", model="c", gpus=("1",)))
    gpus = (Gpu("0"), Gpu("1"))
    Stage(Config(policy="eager", backends=backends, gpus=gpus, max_queue=2), seed=seed).play(main)


@SEEDS
def test_above_its_own_max_queue_a_model_refuses_while_another_still_queues(seed):
    def main(stage):
        stage.request(0.0, "a", seconds=30.0)
        waiting = [stage.request(10.0, "b") for _ in range(2)]
        refused, other = stage.request(11.0, "b"), stage.request(12.0, "c")
        stage.clock.sleep(20.0)
        said = "overloaded: the queue of b is full: 2 waiting (its max_queue). Try again."
        assert (refused.over, refused.error.message, refused.error.retry_after) == (11.0, said, 5.0)
        assert stage.mux.overview.wait_estimate("b") == WaitEstimate("b", "refused", None, None, said)
        assert stage.mux.overview.wait_estimate("c").verdict == "waits"
        assert stage.mux.overview.model("b").max_queue == 2
        assert stage.mux.overview.model("c").max_queue is None
        stage.clock.sleep(100.0)
        assert all(result.leased for result in [*waiting, other])

    backends = (A, replace(B, max_queue=2), replace(B, name="c", model="c"))
    Stage(Config(policy="eager", backends=backends), seed=seed).play(main)


@SEEDS
def test_a_reload_gives_a_queue_another_length_and_sends_nobody_away(seed):
    def main(stage):
        stage.request(0.0, "a", seconds=30.0)
        waiting = [stage.request(10.0, "b") for _ in range(3)]
        stage.clock.sleep(11.0)
        backends = (A, replace(B, max_queue=2))
        stage.config = replace(stage.config, backends=backends)
        stage.mux.facts.reconfigure(stage.config, {})
        refused = stage.request(stage.clock.now() + 1.0, "b")
        stage.clock.sleep(100.0)
        assert "(its max_queue)" in refused.error.message
        assert all(result.leased for result in waiting)

    Stage(Config(policy="eager", backends=(A, B)), seed=seed).play(main)


@SEEDS
def test_of_several_models_one_with_room_in_its_queue_is_chosen(seed):
    def main(stage):
        stage.request(0.0, "a", seconds=30.0)
        stage.request(10.0, "b")
        stage.clock.sleep(11.0)
        assert stage.mux.overview.choose(["b", "c"]) == "c"
        assert stage.mux.overview.choose(["b"]) == "b"
        stage.clock.sleep(100.0)

    backends = (A, replace(B, max_queue=1), replace(B, name="c", model="c"))
    Stage(Config(policy="eager", backends=backends), seed=seed).play(main)


@SEEDS
def test_a_severed_lease_is_cut_once_the_drain_has_ended(seed):
    def main(stage):
        cuts = []

        def hold():
            with stage.mux.lease("a") as lease:
                lease.on_severed(lambda: cuts.append(stage.clock.now()))
                stage.clock.sleep(100.0)
                assert lease.severed
                error = lease.severed_error()
                assert isinstance(error, Severed)
                said = "a was evicted for b before this request ended, after a drain of 5.0 s. Send it again."
                assert error.message == said
                lease.on_severed(lambda: cuts.append("late"))

        stage.later(0.0, hold)
        stage.request(10.0, "b")
        stage.clock.sleep(200.0)
        assert cuts == [15.0, "late"]

    stage = Stage(Config(policy="eager", backends=(A, B), drain_timeout=5.0), seed=seed).play(main)
    assert stage.kinds("severed") == ["severed a"]


@pytest.mark.parametrize("seed", range(20))
def test_a_lease_severed_while_it_says_how_to_cut_it_is_cut(seed):
    def main(stage):
        cuts = []

        def hold():
            with stage.mux.lease("a") as lease:
                stage.clock.sleep(10.0 - stage.clock.now())  # the drain of length 0 comes at 10 too
                lease.on_severed(lambda: cuts.append(1))
                stage.clock.sleep(5.0)

        stage.later(0.0, hold)
        stage.request(10.0, "b")
        stage.clock.sleep(40.0)
        assert cuts

    Stage(Config(policy="eager", backends=(A, B), drain_timeout=0.0), seed=seed).play(main)


@SEEDS
def test_a_cut_that_raises_ends_no_keeper(seed, caplog):
    def main(stage):
        def hold():
            with stage.mux.lease("a") as lease:
                lease.on_severed(lambda: 1 / 0)
                stage.clock.sleep(50.0)

        stage.later(0.0, hold)
        served = stage.request(10.0, "b")
        stage.clock.sleep(80.0)
        assert served.leased
        assert "cutting a severed request for a" in caplog.text

    Stage(Config(policy="eager", backends=(A, B), drain_timeout=0.0), seed=seed).play(main)


def test_what_a_lease_was_used_for_is_freed_with_it_and_waits_for_no_collector():
    class Use:
        def __init__(self, lease):
            self.lease = lease

        def cut(self):
            raise AssertionError

    def main(stage):
        gc.disable()
        try:
            with stage.mux.lease("a") as lease:
                use = Use(lease)
                lease.on_severed(use.cut)
            used = weakref.ref(use)
            del use, lease
            assert used() is None
        finally:
            gc.enable()

    Stage().play(main)


@SEEDS
def test_a_backend_that_refuses_all_it_is_asked_is_stopped_and_loaded_anew(seed):
    def main(stage):
        stage.engines.ended = lambda backend: None
        stage.engines.answers = lambda backend, limit: False
        with stage.mux.lease("a") as lease:
            assert stage.mux.facts.doubts.raised_by(lease) is None
            assert stage.clock.now() == 4.0 + KNOWN_SECONDS
            stage.clock.sleep(REFUSED_SECONDS - KNOWN_SECONDS - 1.0)
            assert not lease.severed
            stage.clock.sleep(3.0)
            assert lease.severed
        again = stage.request(0.0, "a")
        stage.clock.sleep(20.0)
        assert again.leased

    stage = Stage(Config(policy="eager", backends=(replace(A, evict_to=("freeze",)), B)), seed=seed).play(
        main
    )
    assert [call for _, call in stage.engines.calls] == ["load a", "evict a", "load a"]
    assert [e.cause for e in stage.log if e.kind == "draining"] == [Cause("silent")]
    assert [e.at for e in stage.log if e.kind == "evicting"] == [
        pytest.approx(4.0 + REFUSED_SECONDS, abs=1.0)
    ]
    assert [e.cause for e in stage.log if e.kind == "loading"][1] is not None


def test_a_backend_that_cannot_be_asked_for_want_of_files_is_left_alone():
    def main(stage):
        def none_left(backend, limit):
            raise OSError("it cannot be asked now")

        stage.engines.ended, stage.engines.answers = (lambda backend: None), none_left
        with stage.mux.lease("a") as lease:
            assert stage.mux.facts.doubts.raised_by(lease) is None
            assert stage.mux.facts.doubts._open == {}
        stage.clock.sleep(1000.0)

    stage = Stage()
    stage.play(main)
    assert [call for _, call in stage.engines.calls] == ["load a"]


def test_what_was_known_of_a_backend_that_is_gone_is_forgotten_at_the_next_reload():
    def main(stage):
        stage.mux.load("a")
        stage.mux.load("b")
        stage.mux.overview.report("a", LogProgress("half", 0.5))
        for _ in range(2):
            stage.mux.facts.reconfigure(Config(policy="eager", backends=(B,)), {})
            stage.clock.sleep(30.0)
        driver = stage.mux._driver
        assert [*driver.backends] == [*driver.runs] == [*driver.loads] == ["b"]
        assert [cost.target for cost in stage.mux.overview.costs()] == []
        assert driver.reported == {}
        assert not stage.mux.facts.is_heard("a", 0.0)

    Stage().play(main)


@pytest.mark.parametrize("waits", [False, True])
def test_a_lease_is_on_what_it_was_granted_however_late_its_thread_goes_on(waits, monkeypatch):
    """Between the grant and its thread's next line ``a`` is taken away, is evicted, and is forgotten."""
    ask = Multiplexer._ask_for

    def ask_and_go_on_late(mux, ticket, *about, **more):
        ask(mux, ticket, *about, **more)
        if ticket.takes_lease:
            for _ in range(2):
                mux.facts.reconfigure(Config(policy="eager", backends=(B,)), {})
                mux._clock.sleep(60.0)

    def main(stage):
        if not waits:
            stage.mux.load("a")
        monkeypatch.setattr(Multiplexer, "_ask_for", ask_and_go_on_late)
        with stage.mux.lease("a") as lease:
            assert stage.mux.overview.backend("a") is None
            assert (lease.backend, lease.address, lease.severed) == (A, ("127.0.0.1", 1001), True)

    Stage().play(main)


def test_where_no_thread_can_look_for_a_backend_nothing_is_in_doubt_and_the_next_request_looks_anew():
    def main(stage):
        stage.engines.ended = lambda backend: "exited with code 139"
        spawn, refused = stage.clock.spawn, []

        def spawn_once_in_vain(run, name):
            if name == "doubt-a" and not refused:
                refused.append(name)
                raise RuntimeError("can't start new thread")
            return spawn(run, name)

        stage.clock.spawn = spawn_once_in_vain
        with stage.mux.lease("a") as lease:
            before = stage.clock.now()
            assert stage.mux.facts.doubts.raised_by(lease) is None
            assert stage.clock.now() == before
            assert stage.mux.facts.doubts._open == {}
            assert "exited with code 139" in stage.mux.facts.doubts.raised_by(lease).why

    Stage().play(main)


@pytest.mark.parametrize("seed", range(20))
def test_a_request_in_two_stages_that_gives_up_as_its_turn_comes_leaves_no_lease(seed):
    """At 10 the first one ends, and the second, which waits for its places, has nobody any more."""

    def leave(now):
        if now >= 10.0:
            raise ClientGone("it left")

    def main(stage):
        for model in ("prefill", "decode"):
            assert stage.mux.facts.adopt({model: "http://127.0.0.1:1000"}) == []
        first = stage.mux.lease("m", staged=True)
        assert first.prefill is not None

        def second():
            with pytest.raises(ClientGone), stage.mux.lease("m", leave, staged=True):
                raise ClientGone("it left")  # it may have its lease just before

        stage.later(0.0, second)
        stage.clock.sleep(10.0)
        first.release()
        stage.clock.sleep(10.0)
        slots = stage.mux._layout.slots
        assert {slot.name: len(slot.holders) for slot in slots} == {"prefill": 0, "decode": 0}

    stages = [
        replace(one(kind, gpu), model="m", infer_type=kind, concurrency=1)
        for kind, gpu in zip(("prefill", "decode"), "01", strict=True)
    ]
    Stage(Config(policy="eager", backends=tuple(stages)), seed=seed).play(main)


@SEEDS
@pytest.mark.parametrize("answer", [True, None, False])
def test_a_backend_that_answers_in_the_end_stays_as_it_is(answer, seed):
    """It answers the question, or, while that is not answered, a neighbour of who failed."""

    def answers(backend, limit):
        stage.clock.sleep(25.0)
        return answer

    def main(stage):
        stage.engines.ended, stage.engines.answers = lambda backend: None, answers
        failed = stage.mux.lease("a")
        stage.request(0.0, "a", seconds=10.0 if not answer else 1000.0)
        assert stage.mux.facts.doubts.raised_by(failed) is None
        failed.release()
        stage.clock.sleep(900.0)
        assert stage.states()["a"] == "ready"
        assert stage.mux.facts.doubts._open == {}

    stage = Stage(seed=seed)
    stage.play(main)
    assert stage.kinds("draining", "severed") == []


@SEEDS
def test_a_backend_that_is_silent_has_as_long_as_a_request_would_have(seed):
    def answers(backend, limit):
        stage.clock.sleep(limit)

    def main(stage):
        stage.engines.ended, stage.engines.answers = lambda backend: None, answers
        failed = stage.mux.lease("a")
        stage.mux.facts.doubts.raised_by(failed)
        failed.release()
        neighbour = stage.request(0.0, "a", seconds=599.0)
        stage.clock.sleep(598.0 - KNOWN_SECONDS)
        assert stage.states()["a"] == "ready"
        stage.clock.sleep(20.0)
        assert neighbour.over

    stage = Stage(seed=seed)
    stage.play(main)
    assert [e.at for e in stage.log if e.kind == "evicting"] == [604.0]


@SEEDS
def test_how_a_backend_ended_is_waited_for_where_that_is_known_late(seed):
    """Docker knows it a moment after its connections are closed; all who failed are told, once."""

    def main(stage):
        with stage.mux.lease("a"):
            pass
        known = stage.clock.now() + 0.5
        stage.engines.ended = lambda backend: "exited with code 139" if stage.clock.now() >= known else None
        stage.engines.answers = lambda backend, limit: False
        stage.engines.log_tail = lambda backend: ["segmentation fault"]
        crashes = []

        def fail():
            with stage.mux.lease("a") as lease:
                crashes.append(stage.mux.facts.doubts.raised_by(lease))

        for _ in range(3):
            stage.later(0.0, fail)
        stage.clock.sleep(1.5)
        assert crashes == [Crash("a", "exited with code 139", ("segmentation fault",))] * 3
        [model] = [model for model in stage.mux.overview.status().models if model.model == "a"]
        assert model.last_error == "exited with code 139"
        assert model.backends[0].log == stage.mux.overview.last_words("a") == ("segmentation fault",)

    stage = Stage(seed=seed).play(main)
    assert [e.cause for e in stage.log if e.kind == "stopped"] == [
        Cause("died", detail="exited with code 139")
    ]


@SEEDS
def test_a_backend_that_ended_is_loaded_anew_without_a_stop(seed):
    def main(stage):
        with stage.mux.lease("a"):
            pass
        with stage.mux.lease("a") as lease:
            stage.mux.facts.doubts.raised_by(lease)
        with stage.mux.lease("a"):
            assert stage.clock.now() == 8.0

    stage = Stage(seed=seed).play(main)
    assert [call for _, call in stage.engines.calls] == ["load a", "load a"]


@pytest.mark.parametrize("ended", [None, "killed"])
def test_a_late_word_of_an_old_backend_does_not_disturb_the_new_one(ended):
    def main(stage):
        stage.engines.ended = lambda backend: ended
        with stage.mux.lease("a"):
            pass
        with stage.mux.lease("a") as old:
            stage.mux.facts.died("a", "killed")
            with stage.mux.lease("a"):
                stage.mux.facts.doubts.raised_by(old)
                assert stage.states()["a"] == "ready"
                assert stage.mux.overview.status().leases == 1

    Stage().play(main)


@SEEDS
def test_an_error_that_ends_a_line_is_raised_in_every_thread_with_its_own_frames(seed):
    def perform(step, nth):
        return Outcome(2.0, LoadError("exited with code 1"))

    def main(stage):
        results = [stage.request(0.0, "a") for _ in range(3)]
        stage.clock.sleep(5.0)
        for result in results:
            assert isinstance(result.error, LoadError)
            assert result.over == 2.0

    Stage(perform=perform, seed=seed).play(main)


@SEEDS
def test_a_drain_is_bounded_even_while_its_gpu_is_busy_with_another_step(seed):
    small = tuple(one(name, "0", vram=5) for name in "ab")
    config = Config(policy="eager", backends=(*small, one("c", "0", vram=10)), gpus=TEN, drain_timeout=5.0)

    def main(stage):
        stage.request(0.0, "a")
        stage.request(0.0, "b", seconds=100.0)
        stage.request(20.0, "c")
        stage.clock.sleep(200.0)

    stage = Stage(config, Engines({}, 4.0, stop_seconds=30.0), seed=seed).play(main)
    assert [(e.at, e.kind) for e in stage.log if e.kind in ("evicting", "severed")] == [
        (20.0, "evicting"),
        (25.0, "severed"),
        (25.0, "evicting"),
    ]


@SEEDS
def test_load_and_unload_from_outside(seed):
    def main(stage):
        stage.mux.load("a")
        assert stage.clock.now() == 4.0
        assert stage.mux.overview.status().leases == 0
        assert stage.mux.facts.unload("a")
        stage.clock.sleep(2.0)
        assert stage.states()["a"] == "stopped"
        assert not stage.mux.facts.unload("a")

    Stage(seed=seed).play(main)


@SEEDS
@pytest.mark.parametrize("fact", ["loaded", "evicted", "load_failed", "evict_failed", "load_cancelled"])
def test_a_step_whose_report_is_a_mistake_has_failed_and_wedges_nothing(fact, seed, monkeypatch, caplog):
    perform = {
        "load_failed": lambda step, nth: Outcome(1.0, LoadError("no") if nth == 0 else None),
        "evict_failed": lambda step, nth: Outcome(1.0, BackendError("no") if nth == 1 else None),
        "load_cancelled": lambda step, nth: Outcome(1.0, Cancelled("by whom?") if nth == 0 else None),
    }.get(fact, lambda step, nth: Outcome(1.0))

    def main(stage):
        outcomes, fail = type(stage.mux.overview._driver.scheduler), [True]
        right = getattr(outcomes, fact)

        def once(self, step, now, *about, **left):
            if fail.pop() if fail else False:
                assert self._settling.ends(step)
                raise KeyError("a mistake")
            return right(self, step, now, *about, **left)

        monkeypatch.setattr(outcomes, fact, once)
        stage.request(0.0, "a")
        stage.request(10.0, "b")
        stage.clock.sleep(100.0)
        last = stage.request(0.0, "a")
        stage.clock.sleep(100.0)
        assert last.leased
        assert not fail
        assert "could not be reported" in caplog.text

    Stage(perform=perform, seed=seed).play(main)


@SEEDS
def test_what_ran_before_is_leased_without_a_load(seed):
    def main(stage):
        running = {"a": "http://127.0.0.1:9001", "b": "http://127.0.0.1:9002", "x": "http://127.0.0.1:9003"}
        assert stage.mux.facts.adopt(running) == ["b"]
        with stage.mux.lease("a") as lease:
            assert lease.address == ("127.0.0.1", 9001)

    stage = Stage(seed=seed).play(main)
    assert stage.engines.calls == []


@SEEDS
def test_at_the_end_waiting_and_new_requests_are_refused_and_leases_run_on(seed):
    def main(stage):
        held = stage.request(0.0, "a", seconds=20.0)
        waiting, late = stage.request(10.0, "b"), stage.request(12.0, "a")
        stage.clock.sleep(11.0)
        stage.mux.refuse()
        stage.clock.sleep(0.5)
        assert isinstance(waiting.error, Draining)
        assert waiting.over == 11.0
        assert stage.states() == {"a": "ready", "b": "stopped"}  # reprieved: nobody waits for b
        stage.clock.sleep(1.0)
        assert isinstance(late.error, Draining)
        assert held.over is None
        stage.clock.sleep(20.0)
        assert (held.over, held.lease.severed) == (24.0, False)

    Stage(seed=seed).play(main)


@SEEDS
def test_the_status_shows_a_drain(seed):
    def main(stage):
        stage.request(0.0, "a", seconds=50.0)
        stage.request(10.0, "b")
        stage.clock.sleep(15.0)
        status = stage.mux.overview.status()
        (gpu,) = status.gpus
        assert (gpu.gpu, gpu.residents, gpu.state) == ("0", ("a",), "draining")
        assert (gpu.draining_target, gpu.draining_leases, gpu.drain_seconds_left) == ("b", 1, 25.0)
        assert [(m.model, m.state, m.waiting, m.leases) for m in status.models] == [
            ("a", "draining", 0, 1),
            ("b", "stopped", 1, 0),
        ]
        assert "a: draining 1 leases" in repr(stage.mux)
        stage.clock.sleep(100.0)

    Stage(seed=seed).play(main)


@SEEDS
def test_how_long_a_load_will_take_is_known_from_the_last_one(seed):
    def main(stage):
        assert stage.mux.overview.eta("a") is None
        stage.request(0.0, "a")
        stage.clock.sleep(1.0)
        assert stage.mux.overview.eta("a") is None
        stage.request(9.0, "b")
        stage.clock.sleep(15.0)
        assert stage.mux.overview.eta("a") == 4.0
        stage.request(0.0, "a")  # b is ready at 17.0 and evict until 18.0
        stage.clock.sleep(4.0)
        assert stage.mux.overview.eta("a") == 2.0
        stage.clock.sleep(10.0)

    Stage(seed=seed).play(main)


@SEEDS
def test_an_error_that_ends_a_queue_is_raised_by_each_as_its_own(seed):
    def main(stage):
        waiting = [stage.request(0.0, "a") for _ in range(3)]
        stage.clock.sleep(50.0)
        errors = [each.error for each in waiting]
        assert len({error.message for error in errors}) == 1
        assert len({id(error) for error in errors}) == 3

    failing = Outcome(1.0, LoadError("it fell over"))
    Stage(perform=lambda *_: failing, seed=seed).play(main)


@SEEDS
def test_how_far_a_load_is_is_known_from_the_last_one_and_from_what_its_log_says(seed):
    def far():
        return {model.model: model.progress for model in stage.mux.overview.status().models}

    def main(stage):
        stage.request(0.0, "a")
        stage.clock.sleep(1.0)
        assert (far()["a"], far()["b"]) == (Progress(None, None, ""), None)
        stage.mux.overview.report("a", LogProgress("reading weights", 0.5, 3.0))
        assert stage.mux.overview.how_far("a") == "loading a 50%, 3 s left, reading weights"
        stage.request(4.0, "b")
        stage.clock.sleep(14.0)
        assert far()["a"] is None
        stage.request(0.0, "a")  # b is evicted until 16.0
        stage.clock.sleep(2.0)
        assert far()["a"] == Progress(0.25, 3.0, "")
        assert stage.mux.overview.how_far("a") == "loading a 25%, 3 s left"
        stage.clock.sleep(10.0)

    stage = Stage(seed=seed)
    stage.play(main)


@SEEDS
def test_what_is_being_loaded_is_known(seed):
    def main(stage):
        stage.request(0.0, "a")
        stage.clock.sleep(2.0)
        assert stage.mux.overview.loading() == ["a"]
        stage.clock.sleep(4.0)
        assert stage.mux.overview.loading() == []

    Stage(seed=seed).play(main)


def test_aliases_stand_for_their_model():
    mux = Stage(Config(policy="eager", backends=(one("a", "0", aliases=("gpt", "small")), B))).mux
    assert [mux.resolve(name) for name in ("a", "gpt", "small", "b")] == ["a", "a", "a", "b"]


def test_a_deadlock_is_reported_with_who_waits_where():
    clock = BatonClock()
    first, second = clock.lock(), clock.lock()

    def take(one_lock, other_lock):
        with one_lock:
            clock.sleep(1.0)
            with other_lock:
                pass

    def main():
        clock.spawn(lambda: take(first, second), "left")
        clock.spawn(lambda: take(second, first), "right")

    with pytest.raises(Deadlock, match=r"(?s)left.*right"):
        clock.run(main)


# Real threads, real time; gates instead of sleeps


class GatedEngines:
    """Every load waits for its gate; every call is recorded."""

    def __init__(self):
        self.loading = {name: threading.Event() for name in "ab"}
        self.may_load = {name: threading.Event() for name in "ab"}
        self.calls = []

    def load(self, backend, how, number):
        self.calls.append(f"load {backend.name}")
        self.loading[backend.name].set()
        if not self.may_load[backend.name].wait(30.0):
            raise LoadError("the gate stayed shut")
        return Loaded("http://127.0.0.1:9000", how)

    def evict(self, backend, how):
        self.calls.append(f"evict {backend.name}")
        return Evicted(how)

    def ended(self, backend):
        return None


@pytest.fixture
def real():
    engines, log, queued = GatedEngines(), [], threading.Semaphore(0)
    config = Config(policy="eager", backends=(A, B), drain_timeout=30.0)

    def take(event):
        log.append(event)
        if event.kind == "queued":
            queued.release()

    mux = Multiplexer(config, engines, log=take)
    mux.start()
    yield SimpleNamespace(mux=mux, engines=engines, queued=queued)
    mux.refuse()
    mux.close()
    assert check(log, config, slack=30.0) == []


def test_leases_are_logged_only_for_those_who_want_them():
    for wanted in (True, False):
        engines, log = GatedEngines(), []
        engines.may_load["a"].set()
        mux = Multiplexer(Config(backends=(A, B)), engines, log=log.append, log_leases=wanted)
        mux.start()
        for _ in range(2):
            with mux.lease("a"):
                assert mux.overview.status().leases == 1
        mux.close()
        kinds = ["queued", "loading", "ready", *["leased", "released"] * 2]
        assert [event.kind for event in log] == (kinds if wanted else kinds[:3])


def in_threads(number, run):
    threads = [threading.Thread(target=run, daemon=True) for _ in range(number)]
    for thread in threads:
        thread.start()
    return threads


def join(threads):
    for thread in threads:
        thread.join(30.0)
        assert not thread.is_alive()


def test_five_hundred_waiting_requests_are_admitted_by_one_load(real):
    addresses = []

    def ask():
        with real.mux.lease("a") as lease:
            addresses.append(lease.address)

    threads = in_threads(500, ask)
    assert real.engines.loading["a"].wait(30.0)
    real.engines.may_load["a"].set()
    join(threads)
    assert addresses == [("127.0.0.1", 9000)] * 500
    assert real.engines.calls == ["load a"]
    assert real.mux.overview.status().leases == 0


def test_a_swap_of_real_threads_waits_for_the_lease_and_then_happens(real):
    real.engines.may_load["a"].set()
    real.engines.may_load["b"].set()
    with real.mux.lease("a"):
        threads = in_threads(3, lambda: real.mux.lease("b").__exit__())
        for _ in range(1 + 3):
            assert real.queued.acquire(timeout=30.0)
        assert real.engines.calls == ["load a"]
    join(threads)
    assert real.engines.calls == ["load a", "evict a", "load b"]


def test_nothing_but_the_load_itself_waits_for_a_load(real):
    threads = in_threads(1, lambda: real.mux.lease("a").__exit__())
    assert real.engines.loading["a"].wait(30.0)
    with pytest.raises(UnknownModel):
        real.mux.resolve("c")
    assert real.mux.overview.status().models[0].state == "loading"
    assert not real.mux.facts.unload("b")
    real.engines.may_load["a"].set()
    join(threads)


def test_many_clients_hammer_two_models_and_every_lease_is_given_back(real):
    real.engines.may_load["a"].set()
    real.engines.may_load["b"].set()
    turn = iter(range(10_000))
    done = []

    def ask():
        for _ in range(25):
            with real.mux.lease("ab"[next(turn) % 2]) as lease:
                assert not lease.severed
                done.append(lease.backend.name)

    join(in_threads(16, ask))
    assert len(done) == 400
    assert (real.mux.overview.status().waiting, real.mux.overview.status().leases) == (0, 0)
