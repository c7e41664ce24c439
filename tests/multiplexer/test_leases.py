"""A request waits for its lease, holds it, is cut, and leaves it; in virtual time."""

import gc
import weakref
from dataclasses import replace

import pytest

from anvil_mux import errors
from anvil_mux.config.config import Config
from anvil_mux.config.machines import Gpu
from anvil_mux.errors import (
    ClientGone,
    LoadError,
    Overloaded,
    Severed,
    WaitedTooLong,
)
from anvil_mux.lab.engines import Outcome
from anvil_mux.multiplexer.multiplexer import Multiplexer
from anvil_mux.scheduler.events import Cause
from anvil_mux.scheduler.waits import WaitEstimate
from tests.lab.test_simulate import one
from tests.multiplexer.stage import (
    SEEDS,
    A,
    B,
    GatedEngines,
    Stage,
    interleavings,
    leave_at,
)


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


@interleavings(5, of=20)
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


@interleavings(5, of=20)
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


@interleavings(5, of=20)
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
def test_an_error_that_ends_a_queue_is_raised_by_each_as_its_own(seed):
    def main(stage):
        waiting = [stage.request(0.0, "a") for _ in range(3)]
        stage.clock.sleep(50.0)
        errors = [each.error for each in waiting]
        assert len({error.message for error in errors}) == 1
        assert len({id(error) for error in errors}) == 3

    failing = Outcome(1.0, LoadError("it fell over"))
    Stage(perform=lambda *_: failing, seed=seed).play(main)


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
