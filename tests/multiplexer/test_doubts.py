"""A request got no whole answer: what becomes of its engine is looked into, and followed."""

from dataclasses import replace

import pytest

from anvil_mux.config.config import Config
from anvil_mux.multiplexer.driver import KNOWN_SECONDS, REFUSED_SECONDS
from anvil_mux.scheduler.events import Cause
from anvil_mux.scheduler.slot import Crash
from tests.multiplexer.stage import SEEDS, A, B, Stage


@SEEDS
def test_a_backend_that_refuses_all_it_is_asked_is_stopped_and_loaded_anew(seed):
    def main(stage):
        stage.engines.ended = lambda backend: None
        stage.engines.answers = lambda backend, limit: False
        with stage.mux.lease("a") as lease:
            assert stage.mux.facts.doubts.raised_by(lease.ticket) is None
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
            assert stage.mux.facts.doubts.raised_by(lease.ticket) is None
            assert stage.mux.facts.doubts._open == {}
        stage.clock.sleep(1000.0)

    stage = Stage()
    stage.play(main)
    assert [call for _, call in stage.engines.calls] == ["load a"]


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
            assert stage.mux.facts.doubts.raised_by(lease.ticket) is None
            assert stage.clock.now() == before
            assert stage.mux.facts.doubts._open == {}
            assert "exited with code 139" in stage.mux.facts.doubts.raised_by(lease.ticket).why

    Stage().play(main)


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
        assert stage.mux.facts.doubts.raised_by(failed.ticket) is None
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
        stage.mux.facts.doubts.raised_by(failed.ticket)
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
                crashes.append(stage.mux.facts.doubts.raised_by(lease.ticket))

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
            stage.mux.facts.doubts.raised_by(lease.ticket)
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
                stage.mux.facts.doubts.raised_by(old.ticket)
                assert stage.states()["a"] == "ready"
                assert stage.mux.overview.status().leases == 1

    Stage().play(main)


@SEEDS
def test_late_finding_about_a_backend_does_not_end_the_one_adopted_since(seed):
    """Somebody restarts its container while its log is read for the request that it has lost."""

    def main(stage):
        stage.engines.ended = lambda backend: "was killed (code 137)"

        def log_tail(backend):
            stage.clock.sleep(5.0)
            return []

        stage.engines.log_tail = log_tail
        lost = stage.mux.lease("a")
        stage.later(0.0, lambda: stage.mux.facts.doubts.raised_by(lost.ticket))
        stage.clock.sleep(1.0)
        stage.mux.facts.died("a", "ended, and somebody started it again")
        stage.mux.facts.adopt({"a": "http://127.0.0.1:1"})
        stage.clock.sleep(30.0)
        assert stage.states()["a"] == "ready"

    Stage(seed=seed).play(main)
