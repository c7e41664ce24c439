"""What is seen of a host that is lost, and of the requests that it had; in virtual time."""

from dataclasses import replace

import pytest

from anvil_mux.config.config import Config
from anvil_mux.config.machines import Gpu
from anvil_mux.errors import GpuMemoryShort, HostUnavailable
from anvil_mux.scheduler.status import HostState, KeptPrompts
from anvil_mux.telemetry import healthz
from tests.lab.test_simulate import one
from tests.multiplexer.stage import SEEDS, Stage

M = one("m0", "0", model="m"), one("m1", "0", model="m", host="h1")
FLEET = Config(policy="eager", backends=(*M, one("c", "1", host="h1")))


@SEEDS
def test_a_lost_host_is_marked_with_all_that_is_there_until_it_is_back(seed):
    def main(stage):
        stage.request(0.0, "c")
        stage.clock.sleep(20.0)
        assert stage.mux.overview.status().hosts == (HostState("h1"),)
        stage.mux.facts.host_lost("h1")
        stage.clock.sleep(12.0)
        status = stage.mux.overview.status()
        models = {model.model: model for model in status.models}
        assert status.hosts == (HostState("h1", 12.0),)
        assert {gpu.gpu: gpu.host and gpu.host.is_lost for gpu in status.gpus} == {
            "0": None,
            "h1/0": True,
            "h1/1": True,
        }
        assert {each.backend: each.is_lost for each in models["m"].backends} == {"m0": False, "m1": True}
        assert [(m.state, m.is_lost, m.offered_state) for m in (models["c"], models["m"])] == [
            ("ready", True, "stopped"),
            ("stopped", False, "stopped"),
        ]
        stage.mux.facts.host_back("h1", {"c": "http://127.0.0.1:1"})
        status = stage.mux.overview.status()
        assert status.hosts == (HostState("h1"),)
        assert {m.model: m.offered_state for m in status.models} == {"m": "stopped", "c": "ready"}

    Stage(FLEET, seed=seed).play(main)


@SEEDS
def test_a_request_without_an_answer_waits_to_learn_that_its_host_is_lost(seed):
    def main(stage):
        def lose():
            stage.clock.sleep(7.0)
            stage.mux.facts.host_lost("h1")

        stage.engines.ended = lambda backend: None
        stage.engines.answers = lambda backend, limit: False
        with stage.mux.lease("c") as lease:
            stage.clock.spawn(lose, "lose")
            begun = stage.clock.now()
            stage.mux.facts.doubts.raised_by(lease.ticket)
            assert lease.is_host_lost
            assert stage.clock.now() == begun + 7.0

    Stage(FLEET, seed=seed).play(main)


def test_of_several_backends_the_one_that_can_serve_stands_for_its_model():
    def main(stage):
        stage.mux.facts.adopt({"m1": "http://127.0.0.1:1"})
        stage.mux.facts.host_lost("h1")
        [model] = [model for model in stage.mux.overview.status().models if model.model == "m"]
        assert (model.backend, model.state) == ("m0", "stopped")

    Stage(FLEET).play(main)


def test_a_host_is_drained_by_hand_and_used_again():
    def main(stage):
        stage.mux.facts.adopt({"c": "http://127.0.0.1:1"})
        stage.mux.tell(stage.mux.scheduler.host_drained, "h1", drained=True)
        stage.clock.sleep(2.0)
        status = stage.mux.overview.status()
        assert status.hosts == (HostState("h1", None, is_drained=True),)
        assert {m.model: m.state for m in status.models} == {"m": "stopped", "c": "stopped"}
        assert healthz.host_state(status.hosts[0]) == {
            "lost": False,
            "lost_seconds": None,
            "away": False,
            "drained": True,
        }
        with pytest.raises(HostUnavailable, match="h1 is drained"):
            stage.mux.lease("c")
        stage.mux.tell(stage.mux.scheduler.host_drained, "h1", drained=False)
        stage.mux.lease("c").release()

    Stage(FLEET).play(main)


def test_memory_of_other_processes_is_that_of_a_gpu_of_their_host():
    def main(stage):
        stage.mux.tell(stage.mux.scheduler.memory_seen, {"0": 8}, host="h1")
        stage.mux.lease("a").release()
        with pytest.raises(GpuMemoryShort):
            stage.mux.lease("b")

    gpus = Gpu("0", vram=10), Gpu("0", vram=10, host="h1")
    backends = one("a", "0", vram=5), one("b", "0", vram=5, host="h1")
    Stage(Config(policy="eager", max_wait=1.0, backends=backends, gpus=gpus)).play(main)


def test_healthz_names_hosts_only_where_there_are_some_beside_our_own():
    def told(stage):
        status = stage.mux.overview.status()
        models = [healthz.model_state(model) for model in status.models]
        backends = [backend for model in models for backend in model["backends"].values()]
        gpus = [healthz.gpu_state(gpu, healthz.GpuUse()) for gpu in status.gpus]
        return [healthz.host_state(host) for host in status.hosts], models, backends, gpus

    def alone(stage):
        hosts, *rest = told(stage)
        assert hosts == []
        assert not [key for part in rest for each in part for key in each if "host" in key]

    def with_others(stage):
        stage.mux.facts.host_lost("h1")
        stage.clock.sleep(2.5)
        hosts, models, backends, gpus = told(stage)
        assert hosts == [{"lost": True, "lost_seconds": 2.5, "away": False, "drained": False}]
        assert [model["host_lost"] for model in models] == [False, True]
        places = [(each.get("host"), each.get("host_lost")) for each in (*backends, *gpus)]
        assert places == [(None, None), ("h1", True), ("h1", True)] * 2

    Stage().play(alone)
    Stage(FLEET).play(with_others)


def test_prompts_on_disk_are_told_of_the_backends_that_keep_some():
    kept = KeptPrompts(2, 900, 4096)
    backends = (replace(one("a", "0"), prompt_cache=1 << 30), one("b", "0"))

    def main(stage):
        for name in ("a", "b", "gone"):
            stage.mux.overview.note_prompts(name, kept)
        a, b = stage.mux.overview.status().models
        assert [each.kept_prompts for each in (*a.backends, *b.backends)] == [kept, None]
        assert healthz.model_state(a)["backends"]["a"]["kept_prompts"] == kept._asdict()
        assert "kept_prompts" not in healthz.model_state(b)["backends"]["b"]

    Stage(Config(policy="eager", backends=backends)).play(main)


@SEEDS
def test_failing_cancel_loses_no_step_of_the_same_fact(seed, caplog):
    """A pause cancels the load of slow, which raises, and evicts b all the same."""

    def main(stage):
        def cancel(backend, number):
            raise RuntimeError("can't start new thread")

        stage.engines.cancel = cancel
        stage.mux.load("b")
        stage.request(0.0, "a")
        stage.clock.sleep(1.0)
        stage.mux.facts.paused(None)
        stage.clock.sleep(20.0)
        assert stage.states() == {"a": "stopped", "b": "stopped"}
        stage.mux.facts.resumed()
        stage.mux.load("b")

    Stage(Config(policy="eager", backends=(one("a", "0"), one("b", "1"))), seed=seed).play(main)
    assert "a step on a could not be prepared" in caplog.text
