"""Single situations of the multiplexer in virtual time."""

from dataclasses import replace

import pytest

from anvil_mux.config.config import Config
from anvil_mux.errors import (
    BackendError,
    Cancelled,
    Draining,
    LoadError,
    UnknownModel,
)
from anvil_mux.host.seam import Evicted, NotBegun
from anvil_mux.lab.engines import Engines, Outcome
from anvil_mux.scheduler.costs import Footprint
from anvil_mux.scheduler.slot import Demote
from anvil_mux.scheduler.waits import Progress
from tests.baton import BatonClock, Deadlock
from tests.lab.test_simulate import one
from tests.multiplexer.stage import SEEDS, TEN, A, B, Stage, calls


@SEEDS
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


def test_what_a_reload_finds_and_cannot_stay_has_its_gpus_until_it_is_stopped():
    def main(stage):
        stage.mux.load("a")
        stage.mux.facts.reconfigure(Config(policy="eager", backends=(A,)), {})
        running = {"b": "http://127.0.0.1:2"}
        assert stage.mux.facts.reconfigure(Config(policy="eager", backends=(A, B)), running) == ["b"]
        waiting = stage.request(5.0, "b", 1.0)
        stage.clock.sleep(20.0)
        assert (waiting.leased, stage.mux.overview.unseen) == (None, ["b"])
        stage.mux.facts.looked_at(["b"])
        stage.clock.sleep(20.0)
        assert waiting.leased
        assert stage.mux.overview.unseen == []

    Stage().play(main)


def test_reload_that_the_scheduler_fails_leaves_what_is_served():
    def main(stage):
        def fail(*about, **more):
            raise ZeroDivisionError

        stage.mux.scheduler.reconfigured = fail
        with pytest.raises(ZeroDivisionError):
            stage.mux.facts.reconfigure(Config(policy="eager", backends=(A, new)), {})
        with pytest.raises(UnknownModel):
            stage.mux.resolve("new")
        stage.mux.load("b")

    new = replace(B, name="new", model="new")
    Stage(Config(policy="eager", backends=(A, B))).play(main)


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


def test_what_was_known_of_a_backend_that_is_gone_is_forgotten_at_the_next_reload():
    def main(stage):
        stage.mux.load("a")
        stage.mux.load("b")
        stage.mux.overview.report("a", Progress("half", 0.5))
        for _ in range(2):
            stage.mux.facts.reconfigure(Config(policy="eager", backends=(B,)), {})
            stage.clock.sleep(30.0)
        driver = stage.mux._driver
        assert [*driver.backends] == [*driver.runs] == [*driver.loads] == ["b"]
        assert [cost.target for cost in stage.mux.overview.costs()] == []
        assert driver.reported == {}
        assert not stage.mux.facts.is_heard("a", 0.0)

    Stage().play(main)


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
                assert self._under_way.pop(step.backend) == step.number
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
def test_step_that_cannot_begin_is_reported_although_a_report_fails(seed, monkeypatch, caplog):
    def main(stage):
        driver = stage.mux.overview._driver
        scheduler, spawn, fail = type(driver.scheduler), driver.clock.spawn, ["thread", "report"]
        load_failed = scheduler.load_failed

        def spawn_later(run, name):
            if name.startswith("step-") and "thread" in fail:
                fail.remove("thread")
                raise RuntimeError("can't start new thread")
            return spawn(run, name)

        def report_later(self, step, now, error):
            if "report" in fail:
                fail.remove("report")
                raise KeyError("a mistake")
            return load_failed(self, step, now, error)

        monkeypatch.setattr(driver.clock, "spawn", spawn_later)
        monkeypatch.setattr(scheduler, "load_failed", report_later)
        stage.request(0.0, "a")
        stage.clock.sleep(100.0)
        last = stage.request(0.0, "a")
        stage.clock.sleep(100.0)
        assert last.leased
        assert not fail
        assert "could not be reported" in caplog.text

    Stage(seed=seed).play(main)


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
        assert (gpu.drain, gpu.draining_leases) == (("b", 25.0), 1)
        assert [(m.model, m.state, m.waiting, m.leases) for m in status.models] == [
            ("a", "draining", 0, 1),
            ("b", "stopped", 1, 0),
        ]
        assert "a: draining 1 leases" in repr(stage.mux)
        stage.clock.sleep(100.0)

    Stage(seed=seed).play(main)


def test_eta_of_a_load_that_takes_longer_than_the_last_is_zero():
    def main(stage):
        stage.mux.scheduler.layout.slot("a").load_seconds = 1.0
        stage.request(0.0, "a")
        stage.clock.sleep(3.0)
        assert stage.mux.overview.eta("a") == 0.0

    Stage().play(main)


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
def test_how_far_a_load_is_is_known_from_the_last_one_and_from_what_its_log_says(seed):
    def far():
        return {model.model: model.progress for model in stage.mux.overview.status().models}

    def main(stage):
        stage.request(0.0, "a")
        stage.clock.sleep(1.0)
        assert (far()["a"], far()["b"]) == (Progress(), None)
        stage.mux.overview.report("a", Progress("reading weights", 0.5, 3.0))
        assert stage.mux.overview.how_far("a") == "loading a 50%, 3 s left, reading weights"
        stage.request(4.0, "b")
        stage.clock.sleep(14.0)
        assert far()["a"] is None
        stage.request(0.0, "a")  # b is evicted until 16.0
        stage.clock.sleep(2.0)
        assert far()["a"] == Progress("", 0.25, 3.0)
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


def test_a_load_of_the_model_that_a_backend_was_of_is_none_of_the_one_that_it_goes_to():
    old = one("b", "1")
    backends = (one("a", "0"), replace(old, model="a"))

    def main(stage):
        stage.request(0.0, "b")
        stage.clock.sleep(2.0)
        stage.mux.facts.reconfigure(Config(policy="eager", backends=backends), {})
        model = stage.mux.overview.model("a")
        assert [(each.backend, each.state) for each in model.backends] == [
            ("a", "stopped"),
            ("b", "cancelling"),
        ]
        assert (model.progress, stage.mux.overview.eta("a")) == (None, None)
        assert stage.mux.overview.wait_estimate("a").because.startswith("there is room")
        stage.clock.sleep(100.0)

    Stage(Config(policy="eager", backends=(old,))).play(main)


@SEEDS
def test_eviction_for_which_no_thread_can_be_started_leaves_the_resident_serving(seed, monkeypatch):
    def main(stage):
        clock = stage.mux.overview._driver.clock
        spawn, steps = clock.spawn, []

        def spawn_later(run, name):
            steps.extend([name] if name.startswith("step-") else [])
            if steps == ["step-a", "step-a"]:  # its load, then its eviction
                steps.append("none")
                raise RuntimeError("can't start new thread")
            return spawn(run, name)

        monkeypatch.setattr(clock, "spawn", spawn_later)
        stage.request(0.0, "a")
        for_b = stage.request(10.0, "b")
        again = stage.request(20.0, "a")
        stage.clock.sleep(30.0)
        assert "no thread can be started" in for_b.error.message
        assert again.error is None

    stage = Stage(Config(policy="eager", backends=(A, B)), seed=seed).play(main)
    assert "stuck" not in [event.kind for event in stage.log]


@SEEDS
def test_eviction_that_was_not_begun_leaves_the_resident_serving(seed):
    def perform(step, nth):
        return Outcome(1.0, NotBegun("Docker does not answer") if nth == 1 else None)

    def main(stage):
        stage.request(0.0, "a")
        for_b = stage.request(10.0, "b")
        again = stage.request(20.0, "a")
        stage.clock.sleep(30.0)
        assert for_b.error.message == "b cannot be loaded now: Docker does not answer"
        assert again.error is None
        stage.mux.tell(stage.mux.scheduler.host_away, "", away=False)

    stage = Stage(Config(policy="eager", backends=(A, B)), perform, seed=seed).play(main)
    assert [e.backend for e in stage.log if e.kind == "loading"] == ["a"]
