"""What a request would wait for: histories of the GPU group in, words out; and how far a load is."""

import pytest

from anvil_mux.config.config import Config
from anvil_mux.config.machines import Gpu, Wake
from anvil_mux.errors import LoadError
from anvil_mux.scheduler.policies import Snapshot, Stay, build_policy
from anvil_mux.scheduler.state import expected_load
from anvil_mux.scheduler.waits import Progress, WaitEstimate, progress, span, wait_estimate
from tests.explorer.trial import Trial
from tests.explorer.worlds import WORLDS
from tests.scheduler.driver import DEBOUNCE, A, B, C, Driver, backend
from tests.scheduler.fleet import Fleet, on


def ask(driver: Driver, model: str, at: float, said: Progress | None = None) -> WaitEstimate:
    before = repr(driver.core), len(driver.log), repr(driver.core.queues)
    state = driver.core.state
    loading = [slot for slot in state.models[model].slots if slot.state == "loading"]
    far = progress(at - loading[0].since, expected_load(state, loading[0]), said) if loading else None
    found = wait_estimate(state, state.models[model], at, far)
    assert (repr(driver.core), len(driver.log), repr(driver.core.queues)) == before, "asking changes nothing"
    return found


def test_a_resident_model_serves_at_once():
    driver = Driver(A, B).with_resident("a")
    assert ask(driver, "a", 1.0).sentence == (
        "A request for a is served at once: it is resident on GPU 0, and idle."
    )
    driver.request("a", 2.0)
    assert ask(driver, "a", 3.0).because == "it is resident on GPU 0, with 1 request in flight."


def test_into_a_free_gpu_it_is_loaded_at_once():
    found = ask(Driver(A, B), "b", 0.0)
    assert (found.verdict, found.seconds, found.at_most) == ("waits", 10.0, 10.0)
    assert found.sentence == (
        "A request for b waits about 10 s: there is room (1 waiting, oldest first); "
        "then its load takes 10 s (a guess)."
    )


def test_a_resident_that_serves_makes_it_wait_for_its_drain():
    driver = Driver(A, B).with_resident("a")
    driver.request("a", 1.0)
    driver.costs.learn("a", "b", "stop", 1.0, 4.0)
    found = ask(driver, "b", 2.0)
    assert (found.seconds, found.at_most) == (None, 35.0)
    assert found.sentence == (
        "A request for b waits at most 35 s: a will be evicted now (1 waiting, oldest first)"
        "; 1 request still runs there, for at most 30 s (request #2 of a has run for 1.0 s); "
        "then its load takes 4.0 s."
    )


def test_an_answer_is_expected_to_last_as_long_as_is_usual():
    driver = Driver(A, B).with_resident("a")
    driver.costs.learn("a", "b", "stop", 1.0, 4.0)
    driver.core.release(driver.request("a", 1.0), 7.0)
    driver.request("a", 10.0)
    assert ask(driver, "b", 12.0).seconds == (6.0 - 2.0) + 5.0
    assert ask(driver, "b", 17.0).seconds is None  # it may end at any moment, or late


def test_what_the_policy_says_is_told_with_its_reason():
    driver = Driver(A, B, policy=DEBOUNCE, max_wait=60.0)
    driver.core.adopt("a", 0.0)
    found = ask(driver, "b", 5.0)
    assert (found.seconds, found.at_most) == (2.0 + 11.0, 60.0 + 11.0)
    assert found.because == (
        "a may stay for about 2.0 s more (its requests still arrive less than 2 s apart); "
        "then its load takes 10 s (a guess)."
    )


def test_another_line_may_come_first():
    driver = Driver(A, B, C, policy=DEBOUNCE).with_resident("a")
    driver.request("c", 1.0)
    found = ask(driver, "b", 3.5)
    assert found.seconds is None
    assert found.because.startswith("c comes first (1 waiting, queue quiet), for at most 60 s; then")


def test_a_request_joins_the_swap_that_is_under_way():
    driver = Driver(A, B)
    driver.core.adopt("a", 0.0)
    running = driver.request("a", 1.0)
    driver.asked("b", 2.0)
    found = ask(driver, "b", 12.0)
    assert found.sentence == (
        "A request for b waits at most 31 s: it waits for a to make room; 1 request still runs "
        "there, for at most 20 s (request #1 of a has run for 11 s)."
    )
    assert driver.release(running, 13.0) == ["evict a"]
    assert ask(driver, "b", 13.0).because == "it waits for a to be evicted, then it is loaded."


def test_a_load_under_way_says_how_much_is_left_of_it():
    driver = Driver(A, B)
    driver.costs.learn("", "a", "stop", 0.0, 20.0)
    driver.asked("a", 0.0)
    found = ask(driver, "a", 8.0)
    because = "it has been loading for 8.0 s (40%, 12 s left); loads have taken 20 s."
    assert (found.seconds, found.because) == (12.0, because)
    assert ask(driver, "a", 25.0).sentence == (
        "A request for a waits at most 10 min: it has been loading for 25 s (99%); loads have taken 20 s."
    )


def test_what_the_engine_says_of_its_first_load_is_better_than_a_guess():
    driver = Driver(A, B)
    driver.asked("a", 0.0)
    because = "it has been loading for 4.0 s{}; it was never loaded before."
    found = ask(driver, "a", 4.0)
    assert (found.seconds, found.at_most, found.because) == (None, 596.0, because.format(""))
    found = ask(driver, "a", 4.0, Progress("reading weights", 0.25, 30.0))
    said = " (25%, 30 s left, reading weights)"
    assert (found.seconds, found.because) == (30.0, because.format(said))


def test_a_load_from_elsewhere_is_better_than_a_guess():
    driver = Driver(A, B).with_resident("a")
    driver.costs.learn("c", "b", "stop", 1.0, 4.0)
    assert ask(driver, "b", 1.0).because.endswith("; then its load takes 4.0 s.")
    assert driver.asked("b", 1.0) == ["evict a"]
    assert driver.evicted("a", 2.0) == ["load b"]
    assert ask(driver, "b", 3.0).because == (
        "it has been loading for 1.0 s (25%, 3 s left); loads have taken 4.0 s."
    )


def test_one_that_leaves_comes_back_later():
    driver = Driver(A, B).with_resident("a")
    driver.request("a", 1.0)
    driver.asked("b", 2.0)
    assert ask(driver, "a", 3.0).because == (
        "it is being evicted for b, and can be loaded again after that; 1 request still runs there, for at "
        "most 29 s (request #2 of a has run for 2.0 s); its turn comes in 60 s at the latest."
    )


def test_it_is_told_what_makes_room_in_the_gpu_group_where_that_is():
    facts = (("request", "x"), ("evicted", "m0"), ("loaded", "x"), ("request", "y"))
    trial = Trial(WORLDS["busy replicas"], "eager").play(*facts)
    layout = trial._main.core.layout
    groups = layout.groups_of["m"]
    told = [wait_estimate(group, layout.models["m"], trial.now) for group in groups]
    assert len(groups) == 2
    assert told[0] == told[1]
    assert "x will be evicted now" in told[0].because


def test_a_host_is_not_waited_for_where_another_could_have_the_model():
    fleet = Fleet(on("g", "r0", model="m"), on("h", "r1", model="m"), wakes={"g": Wake()})
    fleet.take(fleet.core.host_lost("g", 1.0))
    layout = fleet.core.layout
    because = wait_estimate(layout.of_model["m"], layout.models["m"], 2.0).because
    assert because.startswith("there is room")
    fleet.take(fleet.core.host_lost("h", 3.0))
    because = wait_estimate(layout.of_model["m"], layout.models["m"], 4.0).because
    assert because == "its host g is not there, and is woken for it; that may take 3 min."


def test_the_gpu_may_be_in_another_swap():
    driver = Driver(A, B, C)
    driver.asked("a", 0.0)
    assert ask(driver, "c", 1.0).because.startswith("its GPUs are not free: a is loading; ")


def test_a_resident_may_stay_for_its_time():
    driver = Driver(backend("a", min_residency=30.0), B).with_resident("a")
    assert ask(driver, "b", 10.0).because == (
        "a may stay for 20 s more (min_residency); its turn comes in 60 s at the latest."
    )


def test_memory_that_other_programs_hold_is_named_as_what_it_waits_for():
    driver = Driver(backend("a", vram=5), B, gpus=(Gpu("0", vram=140),)).with_resident("a")
    driver.core.slots["b"].held_last = {"0": 24}
    driver.core.memory_seen({"0": 126})
    found = ask(driver, "b", 10.0)
    assert "when it last ran, where other programs hold" in found.because
    assert found.because.endswith("; it is refused in 60 s if that stays so.")


def test_a_refusal_says_what_the_client_would_read():
    driver = Driver(A, B)
    driver.asked("a", 0.0)
    driver.core.load_failed("a", 1.0, LoadError("exited with code 1"))
    found = ask(driver, "a", 2.0)
    assert found.verdict == "refused"
    assert found.sentence == (
        "A request for a is refused: a failed to load and is not tried again for 4 s: exited with code 1"
    )


def test_a_policy_that_fails_does_no_harm():
    class Broken:
        def decide(self, seen: object) -> object:
            raise ZeroDivisionError

    driver = Driver(A, B).with_resident("a")
    driver.core.set_policy(Broken())
    assert "the policy failed: ZeroDivisionError()" in ask(driver, "b", 1.0).sentence


@pytest.mark.parametrize("policy", ["adaptive", "cost_aware", "time_slice", "eager", "debounce"])
def test_every_policy_gives_a_sentence(policy):
    driver = Driver(A, B, C, policy=build_policy(policy, {})).with_resident("a")
    driver.request("a", 1.0)
    driver.request("b", 1.5)
    for model in "abc":
        sentence = ask(driver, model, 1.6).sentence
        assert sentence.startswith(f"A request for {model} ")
        assert sentence.endswith(".")
        assert "  " not in sentence


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0 s"), (9.94, "9.9 s"), (10.4, "10 s"), (119, "119 s"), (300, "5 min"), (9000, "2.5 h")],
)
def test_lengths_of_time_are_for_people(seconds, text):
    assert span(seconds) == text


def test_the_policy_is_shown_the_request_as_if_it_had_come_and_no_queue_has_it():
    class Looks:
        """Remembers what it was shown, and how long the queues were then."""

        def decide(self, seen: Snapshot) -> Stay:
            queues = {model: len(queue) for model, queue in driver.core.queues.items()}
            shown.append(([(each.model, each.waiting, each.oldest) for each in seen.queues], queues))
            return Stay()

    shown: list[object] = []
    driver = Driver(A, B, C).with_resident("a")
    driver.core.set_policy(Looks())
    driver.asked("b", 1.0)
    shown.clear()
    ask(driver, "c", 1.5)
    ask(driver, "b", 1.5)
    assert shown == [
        ([("b", 1, 1.0), ("c", 1, 1.5)], {"a": 0, "b": 1, "c": 0}),
        ([("b", 1, 1.0)], {"a": 0, "b": 1, "c": 0}),
    ]


def test_what_the_log_says_makes_it_longer_but_not_shorter():
    assert progress(8.0, 20.0, Progress("reading weights", 0.5, 72.0)) == Progress(
        "reading weights", 0.1, 72.0
    )
    assert progress(8.0, 20.0, Progress("reading weights", 0.9, 1.0)).seconds_left == 12.0


def test_of_a_first_load_only_the_log_is_known():
    far = progress(8.0, None, Progress("reading weights", 0.56, 11.0))
    assert far.words == "56%, 11 s left, reading weights"
    assert progress(8.0, None, None).words == ""


def test_a_load_that_takes_longer_than_ever_is_nearly_done_for_all_anybody_knows():
    assert progress(30.0, 20.0, Progress("warming up")).words == "99%, warming up"
    assert progress(1e9, 20.0, Progress("warming up", None, 1.0)).fraction == 0.99


def test_a_backend_that_is_another_models_yet_is_no_wait_of_the_one_that_it_goes_to() -> None:
    fleet = Fleet(on("", "a", "0"), on("", "c", "1", model="old"))
    fleet.with_resident("a", 0.0, 1.0)
    fleet.with_resident("c", 0.0, 1.0)
    backends = (on("", "a", "0", engine="vllm"), on("", "b", "0"), on("", "c", "1", model="b"))
    fleet.take(fleet.core.reconfigured(Config(backends, policy="eager", drain_timeout=5.0), 2.0))
    group, model = fleet.core.layout.find("b")
    assert (group.name, fleet.state("a"), fleet.state("c")) == ("0", "draining", "draining")
    assert wait_estimate(group, model, 3.0).because == (
        "its GPUs are not free: a is draining; 1 request still runs there, for at most 4.0 s (request #1 of "
        "a has run for 2.0 s); its turn comes in 60 s at the latest."
    )


def test_a_model_on_gpus_of_two_groups_waits_for_what_is_on_those_of_the_nearest() -> None:
    names = ("a0", "0"), ("a1", "1"), ("b0", "0"), ("b1", "1")
    others = [on("", name, gpu, vram=8 << 30) for name, gpu in names]
    replicas = [on("", f"m{gpu}", gpu, model="m", vram=8 << 30) for gpu in "01"]
    fleet = Fleet(*others, *replicas, gpus=tuple([Gpu(gpu, vram=10 << 30) for gpu in "01"]))
    for gpu in "01":
        fleet.with_resident(f"a{gpu}", 0.0, 1.0)
        fleet.request(f"b{gpu}", 2.0)
    group, model = fleet.core.layout.find("m")
    assert (fleet.state("a0"), fleet.state("a1")) == ("draining", "draining")
    assert wait_estimate(group, model, 3.0).because == (
        "its GPUs are not free: a0 is draining; 1 request still runs there, for at most 4.0 s (request #1 of "
        "a0 has run for 2.0 s); its turn comes in 60 s at the latest."
    )
