"""One sentence about what a request would wait for: histories of the residency in, words out."""

from __future__ import annotations

import pytest

from anvil_mux.errors import LoadError
from anvil_mux.scheduler.outlook import Outlook, outlook, span
from anvil_mux.scheduler.policy import build_policy
from anvil_mux.scheduler.progress import Said, progress
from tests.scheduler.test_residency import DEBOUNCE, TEN, A, B, C, Island, backend

DRAIN = 30.0


def ask(island: Island, model: str, at: float, said: Said | None = None) -> Outlook:
    before = repr(island.core), len(island.log), repr(island.core.lines)
    loading = [seat for seat in island.core.seats_of(model) if seat.state == "loading"]
    far = progress(at - loading[0].since, island.core.expected_load(loading[0]), said) if loading else None
    found = outlook(island.core, model, at, DRAIN, far)
    assert (repr(island.core), len(island.log), repr(island.core.lines)) == before, "asking changes nothing"
    return found


def test_a_resident_model_serves_at_once() -> None:
    island = Island(A, B).with_resident("a")
    assert ask(island, "a", 1.0).sentence == (
        "A request for a is served at once: it is resident on GPU 0, and idle."
    )
    island.request("a", 2.0)
    assert ask(island, "a", 3.0).because == "it is resident on GPU 0, with 1 request in flight."


def test_into_a_free_gpu_it_is_loaded_at_once() -> None:
    found = ask(Island(A, B), "b", 0.0)
    assert (found.verdict, found.seconds, found.at_most) == ("waits", 10.0, 10.0)
    assert found.sentence == (
        "A request for b waits about 10 s: there is room (1 waiting, oldest first); "
        "then its load takes 10 s (a guess)."
    )


def test_a_resident_that_serves_makes_it_wait_for_its_drain() -> None:
    island = Island(A, B).with_resident("a")
    island.request("a", 1.0)
    island.costs.learn("a", "b", "stop", 1.0, 4.0)
    found = ask(island, "b", 2.0)
    assert (found.seconds, found.at_most) == (5.0, 35.0)
    assert found.sentence == (
        "A request for b waits about 5.0 s, at most 35 s: a must make room at once (1 waiting, oldest first)"
        "; 1 request still runs there, for 30 s at the longest; then its load takes 4.0 s."
    )


def test_what_the_policy_says_is_told_with_its_reason() -> None:
    island = Island(A, B, policy=DEBOUNCE, max_wait=60.0).with_resident("a")
    found = ask(island, "b", 5.0)
    assert (found.seconds, found.at_most) == (2.0 + 11.0, 60.0 + 11.0)
    assert found.because == (
        "a may stay for now (no line has been quiet for 2 s yet), for 60 s at the longest; "
        "then its load takes 10 s (a guess)."
    )


def test_another_line_may_come_first() -> None:
    island = Island(A, B, C, policy=DEBOUNCE).with_resident("a")
    island.request("c", 1.0)
    found = ask(island, "b", 3.5)
    assert found.seconds is None
    assert found.because.startswith("c comes first (1 waiting, line quiet), for 60 s at the longest; then")


def test_a_request_joins_the_swap_that_is_under_way() -> None:
    island = Island(A, B).with_resident("a")
    running = island.request("a", 1.0)
    island.request("b", 2.0)
    island.steps(2.0)
    found = ask(island, "b", 12.0)
    assert found.sentence == (
        "A request for b waits about 11 s, at most 31 s: a must make room for it, where 1 request still runs,"
        " for 20 s at the longest."
    )
    island.core.release(running, 13.0)
    assert island.steps(13.0) == ["stop a"]
    assert ask(island, "b", 13.0).because == "a must leave, then it is loaded."


def test_a_load_under_way_says_how_much_is_left_of_it() -> None:
    island = Island(A, B)
    island.costs.learn("", "a", "stop", 0.0, 20.0)
    island.request("a", 0.0)
    island.steps(0.0)
    found = ask(island, "a", 8.0)
    because = "it has been loading for 8.0 s (40%, 12 s left); loads have taken 20 s."
    assert (found.seconds, found.because) == (12.0, because)
    assert ask(island, "a", 25.0).sentence == (
        "A request for a waits at most 10 min: it has been loading for 25 s (99%); loads have taken 20 s."
    )


def test_what_the_engine_says_of_its_first_load_is_better_than_a_guess() -> None:
    island = Island(A, B)
    island.request("a", 0.0)
    island.steps(0.0)
    because = "it has been loading for 4.0 s{}; it was never loaded before."
    found = ask(island, "a", 4.0)
    assert (found.seconds, found.at_most, found.because) == (None, 596.0, because.format(""))
    found = ask(island, "a", 4.0, Said("reading weights", 0.25, 30.0))
    said = " (25%, 30 s left, reading weights)"
    assert (found.seconds, found.because) == (30.0, because.format(said))


def test_a_load_from_elsewhere_is_better_than_a_guess() -> None:
    island = Island(A, B).with_resident("a")
    island.costs.learn("c", "b", "stop", 1.0, 4.0)
    assert ask(island, "b", 1.0).because.endswith("; then its load takes 4.0 s.")
    island.request("b", 1.0)
    assert island.steps(1.0) == ["stop a"]
    island.core.evicted("a", 2.0)
    assert island.steps(2.0) == ["start b"]
    assert ask(island, "b", 3.0).because == (
        "it has been loading for 1.0 s (25%, 3 s left); loads have taken 4.0 s."
    )


def test_one_that_leaves_comes_back_later() -> None:
    island = Island(A, B).with_resident("a")
    island.request("a", 1.0)
    island.request("b", 2.0)
    island.steps(2.0)
    assert ask(island, "a", 3.0).because == (
        "it is leaving its GPUs for b, and can come back after that; its turn comes in 60 s at the latest."
    )


def test_the_gpu_may_be_in_another_swap() -> None:
    island = Island(A, B, C)
    island.request("a", 0.0)
    island.steps(0.0)
    assert ask(island, "c", 1.0).because.startswith("its GPUs are not free: a is loading; ")


def test_a_resident_may_stay_for_its_time() -> None:
    island = Island(backend("a", min_residency=30.0), B).with_resident("a")
    assert ask(island, "b", 10.0).because == (
        "a may stay for min_residency, 20 s more; its turn comes in 60 s at the latest."
    )


def test_a_refusal_says_what_the_client_would_read() -> None:
    island = Island(A, B)
    island.request("a", 0.0)
    island.steps(0.0)
    island.core.load_failed("a", 1.0, LoadError("exited with code 1"))
    found = ask(island, "a", 2.0)
    assert found.verdict == "refused"
    assert found.sentence == (
        "A request for a is refused: a failed to load and is not tried again for 4 s: exited with code 1"
    )


def test_what_cannot_fit_is_refused() -> None:
    island = Island(backend("a", vram=8, pin=True), backend("b", vram=8), gpus=TEN).with_resident("a")
    assert "it does not fit on GPU 0 beside the pinned a" in ask(island, "b", 1.0).sentence


def test_a_policy_that_fails_does_no_harm() -> None:
    class Broken:
        def decide(self, seen: object) -> object:
            raise ZeroDivisionError

    island = Island(A, B).with_resident("a")
    island.core._policy = Broken()
    assert "the policy failed: ZeroDivisionError()" in ask(island, "b", 1.0).sentence


@pytest.mark.parametrize("policy", ["adaptive", "cost_aware", "time_slice", "eager", "debounce"])
def test_every_policy_gives_a_sentence(policy: str) -> None:
    island = Island(A, B, C, policy=build_policy(policy, {})).with_resident("a")
    island.request("a", 1.0)
    island.request("b", 1.5)
    for model in "abc":
        sentence = ask(island, model, 1.6).sentence
        assert sentence.startswith(f"A request for {model} ")
        assert sentence.endswith(".")
        assert "  " not in sentence


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.04, "0.0 s"), (9.94, "9.9 s"), (10.4, "10 s"), (119, "119 s"), (300, "5 min")]
)
def test_lengths_of_time_are_for_people(seconds: float, text: str) -> None:
    assert span(seconds) == text
