"""Standby levels, through the Swapper, with engines that sleep and fail as the real ones."""

import os
import re
import threading
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from anvil_mux.config.config import Backend
from anvil_mux.errors import BackendError, LoadError
from anvil_mux.host import engines, levels
from anvil_mux.host.cuda_checkpoint import Checkpointer
from anvil_mux.host.gpus import Gpus
from anvil_mux.host.levels import PATIENCE, Swapper
from anvil_mux.host.local import Adopter, Awake, Notes
from anvil_mux.host.seam import Evicted, Loaded, Unfit
from tests.host.test_cuda_checkpoint import Driven
from tests.host.test_engines import Waiting
from tests.sleepy_engine import CONTEXT, GIB, GUARD, House, Ledger, SleepyEngine

A = Backend("a", "model-a", ("0",), engine="vllm", evict_to=("sleep", "stop"), load_timeout=20.0)
B = replace(A, name="b", model="model-b")
STANDBY = replace(A, evict_to=("checkpoint", "stop"))
KINDS = tuple([name for name, each in engines.ENGINES.items() if each.sleeps])
ROOT = Path(__file__).resolve().parent.parent.parent


class Parker(Driven):
    """A CUDA driver of which the engines of a house are the processes; they all hold memory of GPU 0."""

    def __init__(self, house: House) -> None:
        super().__init__()
        self.states = {}
        self.frees = True
        self._house = house
        self._moved: dict[int, int] = {}

    def __enter__(self) -> Driven:
        for engine in self._house.engines.values():
            self.states.setdefault(engine.pid, "running")
        return super().__enter__()

    def act(self, action: str, pid: int) -> None:
        super().act(action, pid)
        self._house.calls.append(action)
        ledger = self._house.ledger
        if action == "checkpoint":
            self._moved[pid] = sum(
                used or 0 for each in ledger.probe().readings for p, used in each.processes if p == pid
            )
        if action in ("checkpoint", "restore") and self.frees:
            ledger.hold(pid, ("0",), 0 if action == "checkpoint" else self._moved[pid])


def checkpointer(driver: Parker) -> Checkpointer:
    return Checkpointer(cast(Any, lambda: driver), driver._house.ledger.probe, wait=lambda _: None)


class Scene:
    """A swapper on a house of sleepy engines with one GPU, in virtual time but for what HTTP takes."""

    def __init__(self, ledger: Ledger | None = None) -> None:
        self.house = House(ledger)
        self.time = Waiting()
        self.phases: list[str] = []
        self.driver = Parker(self.house)
        self.tells_reads = False
        self.swapper = Swapper(
            self.house,
            probe=self.read,
            report=lambda backend, phase, seconds: self.phases.append(f"{phase} {backend.name}"),
            now=self.time.now,
            sleep=self.time.sleep,
            checkpointer=checkpointer(self.driver),
        )

    def read(self, pids: Collection[int] | None = None) -> Gpus:
        if self.tells_reads and self.house.calls[-1:] != ["read"]:
            self.house.calls.append("read")
        return self.house.ledger.probe()

    def resident(self, backend: Backend, *faults: str) -> SleepyEngine:
        self.house.faults[backend.name] = set(faults)
        assert self.swapper.load(backend, "stop").level == "stop"
        self.house.calls.clear()
        self.phases.clear()
        return self.house.engines[backend.name]

    @property
    def used(self) -> int:
        return self.house.ledger.used()


@pytest.fixture
def scene() -> Iterator[Scene]:
    made = Scene()
    yield made
    made.house.close()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From its call on engines that hang are given up at once."""

    def give_up() -> None:
        for limit in ("SLEEP_TIMEOUT", "WAKE_TIMEOUT", "PROBE_TIMEOUT"):
            monkeypatch.setattr(engines, limit, 0.2)

    return give_up


# As it should be


@pytest.mark.parametrize("kind", KINDS)
def test_two_models_take_turns_by_sleeping_and_neither_is_started_again(scene, kind):
    first, second = replace(A, engine=kind), replace(B, engine=kind)
    scene.resident(first)
    scene.swapper.evict(first, "sleep")
    scene.resident(second)
    for out, back in [(second, first), (first, second)] * 2:
        assert scene.swapper.evict(out, "sleep") == Evicted("sleep", {"0": CONTEXT})
        loaded = scene.swapper.load(back, "sleep")
        assert loaded == Loaded(scene.house.engines[back.name].url, "sleep")
    assert scene.house.calls == []
    assert scene.house.ledger.most <= 24 * GIB


@pytest.mark.parametrize(
    ("level", "phases"),
    [
        ("stop", ["evict", "verify", "load", "ready"]),
        ("sleep", ["evict", "verify", "load", "probe"]),
        ("checkpoint", ["evict", "verify", "freeze", "load", "probe"]),
    ],
)
def test_the_phases_of_a_swap_are_told(scene, level, phases):
    scene.resident(STANDBY)
    scene.swapper.evict(STANDBY, level)
    scene.swapper.load(STANDBY, level)
    assert scene.phases == [f"{phase} a" for phase in phases]


def test_a_model_answers_a_token_by_its_own_name_before_its_wake_counts(scene):
    backend = replace(A, served_model="org/inside")
    engine = scene.resident(backend)
    scene.swapper.evict(backend, "sleep")
    engine.asked.clear()
    assert scene.swapper.load(backend, "sleep").level == "sleep"
    assert engine.asked[-1] == "POST /v1/chat/completions"


def test_a_paused_service_is_frozen_and_let_go_on_and_keeps_what_it_holds(scene):
    scene.resident(A)
    assert scene.swapper.evict(A, "freeze") == Evicted("freeze", {"0": 18 * GIB + CONTEXT})
    assert scene.house.frozen == {"a"}
    assert scene.swapper.load(A, "freeze").level == "freeze"
    assert scene.house.calls == ["pause a", "resume a"]


def test_a_frozen_service_that_is_found_at_the_start_stays_so_whatever_it_holds(scene, tmp_path):
    backend = replace(A, evict_to=("freeze", "stop"))
    url = scene.resident(backend).url
    scene.swapper.evict(backend, "freeze")
    found = Adopter(scene.swapper, Notes(tmp_path)).look(backend, url)
    assert found == Evicted("freeze", {"0": 18 * GIB + CONTEXT})


def test_a_slow_first_sleep_is_waited_for(scene):
    engine = scene.resident(A)
    engine.may_sleep = threading.Event()
    with ThreadPoolExecutor() as pool:
        evicted = pool.submit(scene.swapper.evict, A, "sleep")
        assert not evicted.done()
        engine.may_sleep.set()
        assert evicted.result(GUARD).level == "sleep"


@pytest.mark.parametrize("level", ["stop", "sleep-2"])
def test_a_sleeper_cannot_sink_deeper_without_waking_and_is_stopped(scene, level, caplog):
    scene.resident(A)
    scene.swapper.evict(A, "sleep")
    assert scene.swapper.demote(A, "sleep", level) == Evicted("stop")
    why = "a cannot be demoted from sleep to sleep-2: stopped"
    assert [each.getMessage() for each in caplog.records] == [why] * (level != "stop")
    assert (scene.house.calls, scene.used) == (["stop a"], 0)


def test_who_was_stopped_while_it_rested_is_not_taken_for_a_sleeper_when_it_is_found_again(scene, tmp_path):
    sglang = replace(A, engine="sglang")  # it does not say whether it sleeps
    notes = Notes(tmp_path)
    swapper = Swapper(scene.house, note=notes.note_level)
    swapper.load(sglang)
    swapper.evict(sglang, "sleep")
    swapper.demote(sglang, "sleep", "stop")
    url = swapper.load(sglang).url
    assert Adopter(swapper, notes).look(sglang, url) == Awake(url)


def test_who_was_being_woken_when_the_program_was_killed_is_no_sleeper(scene, tmp_path, monkeypatch):
    def killed(*about: object) -> None:
        raise KeyboardInterrupt

    notes = Notes(tmp_path)
    swapper = Swapper(scene.house, note=notes.note_level)
    url = swapper.load(A).url
    swapper.evict(A, "sleep")
    with monkeypatch.context() as patched:
        patched.setattr(engines, "wake", killed)
        with pytest.raises(KeyboardInterrupt):
            swapper.load(A, "sleep")
    found = Adopter(swapper, notes).look(A, url)
    assert found == Unfit("it was being woken when anvil-mux ended")
    assert swapper.load(A, "sleep").level == "sleep"
    assert Adopter(swapper, notes).look(A, url) == Awake(url)
    swapper.evict(A, "sleep")
    assert Adopter(swapper, notes).look(A, url) == Evicted("sleep", {"0": 0})


def test_a_sleeper_has_given_up_what_is_declared_for_it_and_is_not_waited_for_again():
    scene = Scene(Ledger(processes=False))
    backend = replace(A, vram=18 * GIB)
    scene.resident(backend)
    scene.swapper.evict(backend, "sleep")
    before = scene.time.now()
    scene.swapper.demote(backend, "sleep", "stop")
    assert scene.time.now() == before
    scene.house.close()


@pytest.mark.parametrize(
    ("how", "freed"),
    [("sleep", 18 * GIB), ("checkpoint", 18 * GIB + CONTEXT), ("freeze", 0), ("stop", 18 * GIB + CONTEXT)],
)
def test_what_was_given_back_is_measured(scene, how, freed):
    scene.resident(A)
    evicted = scene.swapper.evict(A, how)
    assert (evicted.level, evicted.freed) == (how, {"0": freed})


def test_who_is_stopped_because_it_did_not_sleep_gave_back_all_that_it_held(scene):
    engine = scene.resident(A)
    engine.faults.add("sleep dies")
    assert scene.swapper.evict(A, "sleep").freed == {"0": 18 * GIB + CONTEXT}


@pytest.mark.parametrize("reads", [True, False])
def test_what_a_sleeper_keeps_in_host_memory_is_told_whether_gpus_can_be_read_or_not(
    scene, monkeypatch, reads
):
    engine = scene.resident(A)
    monkeypatch.setattr(levels, "host_bytes", lambda pids: {engine.pid: 16 * GIB}[pids[0]])
    swapper = scene.swapper if reads else Swapper(scene.house)
    assert swapper.evict(A, "sleep").host_bytes == 16 * GIB
    assert swapper.demote(A, "sleep", "stop").host_bytes == 0


# Sleeps that fail


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fault", ["sleep hangs", "sleep dies", "has no sleep routes"])
def test_who_does_not_fall_asleep_is_stopped(scene, impatient, kind, fault):
    backend = replace(A, engine=kind)
    engine = scene.resident(backend)
    engine.faults.add(fault)
    if fault == "sleep hangs":
        impatient()
    died = "exited with code 1" if fault == "sleep dies" else ""
    assert scene.swapper.evict(backend, "sleep") == Evicted("stop", died=died)
    assert (scene.house.calls, scene.used) == (["stop a"], 0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_sleep_that_frees_nothing_is_no_sleep(scene, kind, caplog):
    backend = replace(A, engine=kind)
    engine = scene.resident(backend)
    engine.faults.add("sleep frees nothing")
    before = scene.time.now()
    assert scene.swapper.evict(backend, "sleep") == Evicted("stop")
    assert scene.time.now() - before == PATIENCE
    assert set(scene.time.pauses[-20:]) == {0.25}
    assert (scene.house.calls, scene.used) == (["stop a"], 0)
    assert "still holds 18.5 GiB of 18.5 GiB on GPU 0" in caplog.text


def test_memory_that_comes_back_late_is_waited_for(scene):
    engine = scene.resident(A)
    engine.faults.add("sleep frees nothing")
    scene.time._then = [lambda: None, lambda: None, engine._account]
    assert scene.swapper.evict(A, "sleep") == Evicted("sleep", {"0": CONTEXT})
    assert scene.time.pauses[-3:] == [0.25] * 3


def test_where_no_gpu_can_be_read_the_engine_is_believed_and_nothing_measured(scene):
    engine = scene.resident(A)
    engine.faults.add("sleep frees nothing")
    evicted = Swapper(scene.house).evict(A, "sleep")
    assert (evicted, evicted.freed) == (Evicted("sleep", {"0": 0}), {})


def test_where_processes_cannot_be_read_what_is_declared_must_become_free():
    scene = Scene(Ledger(processes=False))
    backend = replace(A, vram=18 * GIB)
    scene.resident(backend)
    assert scene.swapper.evict(backend, "sleep") == Evicted("sleep", {"0": 0})
    scene.swapper.load(backend, "sleep")
    scene.house.engines["a"].faults.add("sleep frees nothing")
    assert scene.swapper.evict(backend, "sleep") == Evicted("stop")
    scene.house.close()


@pytest.mark.parametrize("fault", ["refuses to stop", "worker survives stop"])
def test_who_cannot_be_stopped_is_killed(scene, impatient, fault):
    scene.resident(A, fault, "sleep hangs")
    impatient()
    assert scene.swapper.evict(A, "sleep") == Evicted("stop")
    assert (scene.house.calls, scene.used) == (["stop a", "kill a"], 0)


@pytest.mark.parametrize(
    "faults",
    [("refuses to stop", "refuses to be killed"), ("worker survives stop", "worker survives kill")],
)
def test_who_survives_even_that_may_still_hold_its_gpus(scene, faults):
    scene.resident(A, *faults)
    with pytest.raises(BackendError, match="a may still hold its GPUs"):
        scene.swapper.evict(A, "stop")


def test_a_other_process_that_takes_the_memory_at_once_makes_nobody_stuck(scene, monkeypatch, caplog):
    scene.resident(A)
    stop = scene.house.stop

    def stop_and_take(backend: Backend) -> None:
        stop(backend)
        scene.house.ledger.hold(100_000_999, ("0",), 20 * GIB)

    monkeypatch.setattr(scene.house, "stop", stop_and_take)
    assert scene.swapper.evict(A, "stop") == Evicted("stop")
    assert "memory of an engine that has ended is not free" in caplog.text


def test_a_load_that_fails_for_want_of_memory_names_who_else_has_it(scene, monkeypatch):
    scene.house.ledger.hold(os.getpid(), ("0",), 20 * GIB)
    monkeypatch.setattr(scene.house, "start", lambda backend: failing("exited with code 1"))
    monkeypatch.setattr(scene.house, "log_tail", lambda *_: ["torch.OutOfMemoryError: CUDA out of memory."])
    with pytest.raises(LoadError) as caught:
        scene.swapper.load(A, "stop")
    assert re.fullmatch(
        r"torch.OutOfMemoryError: CUDA out of memory.; it needs more GPU memory .+"
        rf"; process {os.getpid()} .+ holds 20.0 GiB of GPU 0 \(exited with code 1\)",
        caught.value.message,
    )
    monkeypatch.setattr(scene.house, "log_tail", lambda *_: ["its last words"] * 300)
    with pytest.raises(LoadError) as caught:
        scene.swapper.load(A, "stop")
    assert (caught.value.message, len(caught.value.log)) == ("exited with code 1", 20)


def failing(why: str) -> str:
    raise LoadError(why)


def test_who_sleeps_on_the_same_gpu_is_no_other_process(scene, monkeypatch):
    engine = scene.resident(B)
    monkeypatch.setattr(engine, "pid", os.getpid())
    scene.house.ledger.hold(os.getpid(), ("0",), GIB)
    monkeypatch.setattr(scene.house, "start", lambda backend: failing("CUDA out of memory"))
    with pytest.raises(LoadError) as caught:
        scene.swapper.load(A, "stop")
    assert caught.value.message == "CUDA out of memory"


def test_an_engine_that_crashed_before_it_was_put_out_is_cleaned_up(scene):
    engine = scene.resident(A)
    engine.end("was killed (code 137)")
    assert scene.swapper.evict(A, "sleep") == Evicted("stop", died="was killed (code 137)")


# Wakes that fail


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fault", ["wake answers 500", "wake hangs", "wake dies", "answers nothing"])
def test_who_does_not_wake_is_stopped_and_started_anew_within_the_load(scene, impatient, kind, fault, caplog):
    backend = replace(A, engine=kind)
    first = scene.resident(backend)
    scene.swapper.evict(backend, "sleep")
    first.faults.add(fault)
    impatient()
    loaded = scene.swapper.load(backend, "sleep")
    second = scene.house.engines["a"]
    assert second is not first
    assert loaded == Loaded(second.url, "stop")
    assert scene.house.calls == ["stop a", "start a"]
    assert "a could not be woken from standby (sleep) and is restarted" in caplog.text


@pytest.mark.parametrize(
    "happens",
    [
        lambda engine: engine.faults.add("wake is partial"),
        lambda engine: engine.faults.add("status is nonsense"),
        lambda engine: engine.asleep.clear(),  # somebody else woke it
        lambda engine: engine.end("was killed (code 137)"),
    ],
)
def test_a_wake_of_which_it_is_not_sure_that_it_is_whole_is_a_cold_start(scene, happens):
    engine = scene.resident(A)
    scene.swapper.evict(A, "sleep")
    happens(engine)
    assert scene.swapper.load(A, "sleep").level == "stop"
    assert scene.used == 18 * GIB + CONTEXT


def test_dropped_weights_are_read_again_and_a_later_wake_that_fails_is_a_cold_start(scene):
    engine = scene.resident(A)
    for _ in range(2):
        scene.swapper.evict(A, "sleep-2")
        assert engine.garbage
        assert scene.swapper.load(A, "sleep-2").level == "sleep-2"
        assert not engine.garbage
    scene.swapper.evict(A, "sleep-2")
    engine.faults.add("wake answers 500")
    assert scene.swapper.load(A, "sleep-2").level == "stop"


def test_a_wake_whose_engine_cannot_be_stopped_may_still_hold_its_gpus(scene):
    engine = scene.resident(A)
    scene.swapper.evict(A, "sleep")
    engine.faults |= {"wake answers 500", "refuses to stop", "refuses to be killed"}
    with pytest.raises(BackendError, match=r"POST /wake_up answers 500.*could not be stopped"):
        scene.swapper.load(A, "sleep")
    assert "start a" not in scene.house.calls


def test_a_cold_start_after_a_failed_wake_may_fail_as_any_other(scene, monkeypatch):
    engine = scene.resident(A)
    scene.swapper.evict(A, "sleep")
    engine.faults.add("wake dies")

    def start(backend: Backend) -> str:
        raise LoadError("no image")

    monkeypatch.setattr(scene.house, "start", start)
    with pytest.raises(LoadError, match="no image"):
        scene.swapper.load(A, "sleep")


def test_a_paused_service_that_does_not_answer_again_is_started_anew(scene, impatient):
    engine = scene.resident(A)
    scene.swapper.evict(A, "freeze")
    engine.faults.add("answers nothing")
    impatient()
    assert scene.swapper.load(A, "freeze").level == "stop"


# Found asleep


@pytest.mark.parametrize("kind", ["vllm", "ollama", "llamacpp"])
def test_a_service_that_is_found_asleep_when_it_is_started_is_woken(scene, kind):
    backend = replace(A, engine=kind)
    engine = scene.resident(backend)
    engines.sleep(backend, engine.url, 1)
    assert scene.swapper.load(backend, "stop").level == "stop"
    assert not engine.asleep
    assert scene.house.engines["a"] is engine


@pytest.mark.parametrize(("kind", "level"), [("vllm", "sleep-2"), ("ollama", "sleep"), ("llamacpp", "sleep")])
def test_weights_are_read_anew_where_an_engine_may_have_dropped_them(scene, tmp_path, kind, level):
    backend = replace(A, engine=kind)
    engine = scene.resident(backend)
    engines.sleep(backend, engine.url, 1)
    found = Adopter(scene.swapper, Notes(tmp_path)).look(backend, engine.url)
    assert isinstance(found, Evicted)
    assert found.level == level


def test_one_that_was_adopted_can_be_put_to_sleep(scene):
    engine = scene.resident(A)
    swapper = Swapper(scene.house, probe=scene.house.ledger.probe)
    assert swapper.evict(A, "sleep").level == "sleep"
    assert swapper.load(A, "sleep") == Loaded(engine.url, "sleep")
