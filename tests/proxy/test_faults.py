"""What must hold whatever fails: the real threaded program in virtual time, on engines that do anything.

Every test ends with ``World.assert_sound``: no invariant of the GPU group is broken in the event log, every
request was answered or refused with a reason, no engine ran into another's memory, none was asked while it
slept, and whatever runs is known.
"""

import random
from collections.abc import Callable
from dataclasses import replace
from math import inf

import pytest

from anvil_mux.config.config import Backend, Config
from anvil_mux.errors import BackendError, LoadError, Stuck
from tests.seeds import ALL, seeds
from tests.sleepy_engine import FAULTS, GIB
from tests.virtual_house import TOTAL, World, sleeper

A, B = sleeper("a"), sleeper("b")
SEEDS = pytest.mark.parametrize("seed", range(5))
Make = Callable[..., World]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Make:
    def made(*backends: Backend, seed: int = 0, **settings: object) -> World:
        config = Config(backends=backends or (A, B), **{"policy": "eager", **settings})
        return World(monkeypatch, config, seed)

    return made


def standby(world: World, name: str = "a") -> None:
    """``name`` has served, and rests while b serves."""
    assert world.ask(name).served
    assert world.ask("b").served
    assert world.state(name) == "standby"


# A wake that fails


def faulty_wake(fault: str) -> Callable[[World], None]:
    def spoil(world: World) -> None:
        if fault == "refuses connections":
            world.engine("a").unreachable = True
        else:
            world.engine("a").faults.add(fault)

    return spoil


@SEEDS
@pytest.mark.parametrize("kind", ["vllm", "sglang", "ollama", "llamacpp"])
@pytest.mark.parametrize(
    "fault", ["wake answers 500", "wake hangs", "wake dies", "answers nothing", "refuses connections"]
)
def test_a_wake_that_fails_is_a_cold_start_within_the_same_swap(make, kind, fault, seed):
    world = make(replace(A, engine=kind), B, seed=seed)

    def main() -> None:
        standby(world)
        faulty_wake(fault)(world)
        line = [world.request(world.clock.now(), "a", 1.0) for _ in range(5)]
        world.wait(300.0)
        assert all(result.served for (result,) in line)
        assert world.house.calls == ["start a", "start b", "stop a", "start a"]

    world.play(main)
    assert world.kinds("stopped", "stuck") == []


@SEEDS
def test_a_sleeper_that_neither_wakes_nor_stops_is_stuck_and_nothing_is_built_upon_it(make, seed):
    world = make(seed=seed)

    def main() -> None:
        standby(world)
        engine = world.engine("a")
        engine.faults |= {"wake answers 500", "refuses to stop", "refuses to be killed"}
        assert isinstance(world.ask("a").error, (BackendError, Stuck))
        assert isinstance(world.ask("b").error, Stuck)
        assert world.state("a") == "stuck"
        engine.faults.clear()
        world.wait(70.0)
        assert world.state("a") == "stopped"
        assert world.ask("b").served

    world.play(main)
    starts = [call for call in world.house.calls if call.startswith("start")]
    assert starts == ["start a", "start b", *starts[2:]]


# A sleep that fails


@SEEDS
@pytest.mark.parametrize("fault", ["sleep frees nothing", "sleep answers 500", "sleep hangs", "sleep dies"])
def test_who_says_200_and_frees_nothing_is_stopped_before_anybody_is_loaded(make, fault, seed):
    world = make(seed=seed)

    def main() -> None:
        assert world.ask("a").served
        world.engine("a").faults.add(fault)
        assert world.ask("b").served
        assert world.house.calls == ["start a", "stop a", "start b"]
        assert world.state("a") == "stopped"

    world.play(main)


@SEEDS
@pytest.mark.parametrize(
    "worker", [("worker survives stop",), ("worker survives stop", "worker survives kill")]
)
def test_memory_that_outlives_its_engine_is_seen_and_waited_for(make, worker, seed):
    world = make(seed=seed)
    killed = "worker survives kill" not in worker

    def main() -> None:
        world.house.faults["a"] = {*worker, "sleep frees nothing"}
        assert world.ask("a").served
        answer = world.ask("b")
        if not killed:
            assert isinstance(answer.error, Stuck)
            assert "may still hold its GPUs" in answer.error.message
            world.engine("a").faults.clear()
            world.wait(70.0)
            answer = world.ask("b")
        assert answer.served

    world.play(main)


# Containers and engines that go away


@SEEDS
@pytest.mark.parametrize("told_after", [0.0, 0.75, 1000.0])
def test_who_is_killed_while_standby_is_started_anew(make, told_after, seed):
    world = make(seed=seed)

    def main() -> None:
        standby(world)
        world.kill("a", told_after=told_after)
        assert world.ask("a").served
        assert world.house.calls.count("start a") == 2
        world.wait(2000.0)

    world.play(main)


@SEEDS
def test_who_is_killed_under_its_requests_breaks_them_off_and_answers_the_next(make, seed):
    world = make(seed=seed)

    def main() -> None:
        streams = [world.request(0.0, "a", 50.0) for _ in range(3)]
        world.until(40.0)
        world.kill("a", told_after=0.5)
        again = world.request(40.25, "a")
        world.wait(60.0)
        assert [result.broke_off for (result,) in streams] == ["the engine was killed (code 137)"] * 3
        assert again[0].served

    world.play(main)
    assert world.kinds("severed") == []


@SEEDS
@pytest.mark.parametrize("moment", [6.25, 7.0, 7.25, 8.0, 9.0, 13.0])
def test_who_is_killed_in_any_moment_of_a_swap_costs_a_start_and_no_more(make, moment, seed):
    """a loads until 6, b waits from 6, sleeps take 0.5 and a load 6 seconds."""
    for name in "ab":
        world = make(seed=seed)

        def main(world: World = world, name: str = name) -> None:
            world.request(0.0, "a", 1.0)
            asked = world.request(6.0, "b", 1.0)
            world.later(moment, lambda: world.kill(name, told_after=0.25))
            world.wait(120.0)
            assert len(asked) == 1
            for model in "ab":
                assert world.ask(model).served

        world.play(main)


@SEEDS
def test_while_docker_is_away_requests_are_refused_with_the_reason_and_afterwards_all_is_as_before(
    make, seed
):
    pauses = [replace(each, evict_to=("freeze", "stop")) for each in (A, B)]
    world = make(*pauses, seed=seed)

    def main() -> None:
        standby(world)
        world.house.docker_away = True
        refused = world.ask("a").error
        assert refused is not None
        assert "Cannot connect to the Docker daemon" in str(refused)
        world.bring_docker_back()
        world.wait(400.0)
        for model in "ab":
            assert world.ask(model).served

    world.play(main)


# Other processes


@SEEDS
def test_a_other_process_that_takes_the_memory_of_a_sleeper_makes_nobody_stuck(make, seed):
    world = make(seed=seed)

    def main() -> None:
        standby(world)
        assert world.mux.facts.unload("b")
        world.wait(3.0)
        leave = world.other_process(TOTAL)
        for model in "ab":
            refused = world.ask(model).error
            assert isinstance(refused, LoadError)
            assert "CUDA out of memory" in refused.message
            assert world.state(model) == "stopped"
        assert not [name for name in "ab" if world.runs(name)]
        leave()
        world.wait(400.0)
        for model in "ab":
            assert world.ask(model).served

    world.play(main)


# Checkpoints


STANDBY = tuple(replace(each, evict_to=("checkpoint", "stop")) for each in (A, B))


@SEEDS
@pytest.mark.parametrize("action", ["lock", "checkpoint"])
@pytest.mark.parametrize("left", [None, "failed"])
def test_half_a_checkpoint_is_put_back_and_its_engine_stopped(make, action, left, seed):
    world = make(*STANDBY, seed=seed, drain_timeout=5.0)

    def main() -> None:
        assert world.ask("a").served
        first = world.engine("a")
        second = world.helper("a", GIB)
        world.house.driver.faults[action, second] = left
        assert world.ask("b").served
        assert world.state("a") == "stopped"
        undone = {"lock": ["lock", "unlock"], "checkpoint": ["checkpoint", "restore", "unlock"]}[action]
        assert [what for what, pid in world.house.driver.log if pid == first.pid][-len(undone) :] == undone
        assert "pause a" not in world.house.calls
        assert world.ask("a").served

    world.play(main)


@SEEDS
@pytest.mark.parametrize("action", ["restore", "unlock"])
def test_who_is_not_restored_is_started_anew_within_the_swap(make, action, seed):
    world = make(*STANDBY, seed=seed)

    def main() -> None:
        standby(world)
        world.house.driver.faults[action, world.engine("a").pid] = None
        assert world.ask("a").served
        assert world.house.calls[-2:] == ["stop a", "start a"]

    world.play(main)


# Two GPU groups


@SEEDS
def test_two_drivers_swap_at_once_and_what_is_stuck_on_one_delays_nobody_on_the_other(make, seed):
    c, d = sleeper("c", "1"), sleeper("d", "1")
    world = make(A, B, c, d, seed=seed)

    def main() -> None:
        for name in "ac":
            world.request(0.0, name)
        world.until(10.0)
        world.engine("a").faults |= {"sleep hangs", "refuses to stop", "refuses to be killed"}
        blocked = world.request(10.0, "b")
        quick = [world.request(10.0 + 10 * n, "dc"[n % 2], 1.0) for n in range(12)]
        world.until(200.0)
        assert isinstance(blocked[0].error, Stuck)
        first, *others = [result for (result,) in quick]
        assert first.waited < 7.0  # a sleep and a load
        assert all(result.waited < 1.5 for result in others)  # a sleep and a wake
        world.engine("a").faults.clear()
        world.until(400.0)

    world.play(main)


# A pair beside two single ones, for a few minutes, or all of an hour

SECONDS = 3600 if ALL else 225


@pytest.mark.seeds
@pytest.mark.parametrize("way", ["sleep", "checkpoint", "stop"])
def test_a_pair_and_two_single_ones_under_constant_load_share_two_gpus(make, way, capsys):
    evict_to = (way, "stop") if way != "stop" else ("stop",)
    singles = sleeper("a", "0", evict_to=evict_to), sleeper("b", "1", evict_to=evict_to)
    pair = sleeper("t", "0", "1", evict_to=evict_to, checkpoint_anyway=True)
    world = make(*singles, pair, max_wait=60.0, drain_timeout=30.0)
    world.house.load_seconds = {"a": 8.0, "b": 5.0, "t": 20.0}

    def main() -> None:
        for n in range(SECONDS):
            world.until(float(n))
            world.request(float(n), "abt"[n % 3], 1.0 + n % 7)
        world.until(SECONDS + 400.0)

    world.play(main)
    assert len(world.results) == SECONDS
    assert all(result.served for result in world.results)
    worst = max(result.waited for result in world.results)
    with capsys.disabled():
        print(f"\n{way}: longest wait {worst:.1f} s, {len(world.kinds('loading'))} swaps")
    # max_wait, what is under way, and a swap each for the lines that are older.
    assert worst <= 60.0 + 3 * (30.0 + 1.0 + 20.0)


# Anything at any moment

LEVELS = {
    "vllm": (("sleep", "stop"), ("sleep-2", "stop"), ("checkpoint", "sleep", "stop"), ("checkpoint", "stop")),
    "sglang": (("sleep", "stop"), ("checkpoint", "stop")),
    "ollama": (("sleep", "stop"),),
    "llamacpp": (("sleep", "stop"),),
    "openai": (("stop",), ("freeze", "stop"), ("checkpoint", "stop")),
}
MISHAPS = sorted(FAULTS)
HORIZON = 120.0
SEEDS_EACH = 10


def some_backends(draw: random.Random) -> tuple[Backend, ...]:
    """Two or three models on a GPU, or a pair beside single ones, that rest in all kinds of ways."""
    layout = draw.choice((["0", "0"], ["0", "0", "0"], ["0", "1", "01"], ["0", "0", "1", "1"]))
    backends = []
    for name, gpus in zip("abcd", layout, strict=False):
        engine = draw.choice(tuple(LEVELS))
        rest = draw.choice(LEVELS[engine])
        demote = draw.choice((None, None, 15.0))
        about = {"engine": engine, "evict_to": rest, "demote_after": demote, "checkpoint_anyway": True}
        backends.append(sleeper(name, *gpus, **about, load_timeout=30.0))
    return tuple(backends)


def some_trouble(world: World, name: str) -> None:
    """One thing goes wrong, for a while."""
    draw, house = world.random, world.house
    for_seconds = draw.uniform(1.0, 30.0)
    until = world.clock.now() + for_seconds
    match draw.randrange(7):
        case 0:
            world.kill(name, told_after=draw.choice((0.0, 0.3, 3.0)))
        case 1 | 2 if name in house.engines:
            faults = world.engine(name).faults
            fault = draw.choice(MISHAPS)
            faults.add(fault)
            world.later(until, lambda: faults.discard(fault))
        case 3:
            house.faults[name] = {draw.choice(MISHAPS)}
        case 4:
            world.later(until, world.other_process(TOTAL, draw.choice(world.backends[name].gpus)))
        case 5:
            world.house.docker_away = True
            world.later(min(until, world.clock.now() + 5.0), world.bring_docker_back)
        case 6 if name in house.engines:
            key = draw.choice(("lock", "checkpoint", "restore", "unlock")), world.engine(name).pid
            house.driver.faults[key] = draw.choice((None, "failed"))
            world.later(until, lambda: house.driver.faults.pop(key, None))


@pytest.mark.seeds
@pytest.mark.parametrize("chunk", seeds(2, of=40))
def test_whatever_fails_at_whatever_moment_nothing_is_lost_and_all_is_well_afterwards(make, chunk):
    for seed in range(chunk * SEEDS_EACH, (chunk + 1) * SEEDS_EACH):
        survive(make, seed)


def survive(make: Make, seed: int) -> None:
    draw = random.Random(seed)
    world = make(
        *some_backends(draw),
        seed=seed,
        policy=draw.choice(("eager", "debounce", "cost_aware", "adaptive")),
        drain_timeout=draw.choice((0.0, 2.0, 30.0)),
        queue_timeout=draw.choice((20.0, 600.0)),
        max_wait=draw.choice((5.0, 60.0)),
    )
    names = tuple(world.backends)

    def main() -> None:
        while world.clock.now() < HORIZON:
            world.wait(draw.expovariate(0.5))
            if draw.random() < 0.15:
                some_trouble(world, draw.choice(names))
            elif draw.random() < 0.03:
                world.attempt_unload(draw.choice(names))
            else:
                patience = draw.choice((inf, inf, 4.0))
                world.request(world.clock.now(), draw.choice(names), draw.expovariate(0.5), patience)
        world.until(HORIZON + 60.0)
        for run in world.house.runs:
            run.faults.clear()
        world.house.faults.clear()
        world.wait(700.0)
        for name in names:
            assert world.ask(name).served, (name, world.results[-1])

    try:
        world.play(main)
    except BaseException:
        print(f"seed {seed}: {[(b.name, b.engine, b.gpus, b.evict_to) for b in world.config.backends]}")
        raise
