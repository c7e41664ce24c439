"""How much prefill is taken to be left: of answers that are not streamed, and as it is predicted."""

import pytest

from anvil_mux.config.config import Backend
from anvil_mux.config.values import Profile
from anvil_mux.routing import pipeline
from anvil_mux.routing.in_flight import EngineLoad, InFlightTracker
from anvil_mux.routing.routing import Work
from tests.routing.test_in_flight import LONG, NAMES, SHORT, in_flight

# Prefill of answers that are not streamed


def taught(*, streamed: bool = True, **settings: object) -> InFlightTracker:
    """A tracker that has seen a prompt of 1,000 tokens take two seconds, at the replica c."""
    backends = [Backend(name, "m", **settings) for name in NAMES]
    made = InFlightTracker(pipeline.build("least_prefill_work"), backends)
    made.choose("teacher", Work(1000, stream=streamed), ("c",), now=0.0)
    if streamed:
        made.first_byte("teacher", 2.0)
    made.ended("teacher", prompt_tokens=1000, now=2.0)
    return made


def waits(made: InFlightTracker, *moments: float) -> list[tuple[int, int, int]]:
    """What the replica a has to compute at each of the moments, of how many requests, and what it answers."""
    seen = [made.view(SHORT, ("a",), now=now)[0] for now in moments]
    return [(one.prefill_tokens, one.num_waiting_requests, one.decode_tokens) for one in seen]


@pytest.mark.parametrize("streamed", [True, False])
def test_what_is_not_streamed_counts_as_prefill_for_as_long_as_that_takes_by_the_learned_speed(streamed):
    made = taught(streamed=streamed)
    for key, tokens in enumerate((1000, 500)):
        made.choose(key, Work(tokens), ("a",), now=10.0)
    assert waits(made, 11.9, 12.0) == [(1500, 2, 0), (500, 1, 1000)]
    assert made.behind("a", 12.0) == []
    assert waits(made, 12.9, 13.0) == [(500, 1, 1000), (0, 0, 1500)]
    made.first_byte(0, 20.0)
    made.ended(0, prompt_tokens=1000, now=20.0)
    assert waits(made, 20.0) == [(0, 0, 500)]
    made.ended(1, now=20.0)
    assert waits(made, 20.0) == [(0, 0, 0)]


def test_while_no_speed_is_known_it_counts_until_its_end():
    made = in_flight()
    made.choose(1, Work(1000), ("a",), now=0.0)
    assert waits(made, 1000.0) == [(1000, 1, 0)]


def test_a_profile_says_more_than_what_was_learned():
    made = taught(profile=RATE)
    made.choose(1, Work(1000), ("a",), now=10.0)
    assert waits(made, 10.9, 11.0) == [(1000, 1, 0), (0, 0, 1000)]


def test_prompts_are_computed_in_their_order_and_a_stream_says_when_its_own_is_over():
    made = taught()
    made.choose("stream", Work(1000, stream=True), ("a",), now=10.0)
    made.choose("whole", Work(1000), ("a",), now=10.0)
    assert waits(made, 13.0) == [(2000, 2, 0)]
    made.first_byte("stream", 13.0)  # late: the other one is begun only now, and an engine takes longer
    assert waits(made, 15.5, 15.6) == [(1000, 1, 1000), (0, 0, 2000)]


def test_an_answer_that_is_not_streamed_teaches_only_what_is_faster_than_was_thought():
    for seconds, after in ((9.0, 12.0), (1.0, 11.48)):
        made = taught()
        made.choose("whole", Work(1000), ("b",), now=0.0)
        made.ended("whole", prompt_tokens=1000, now=seconds)
        made.choose("next", Work(1000), ("a",), now=10.0)
        assert waits(made, after - 0.01, after) == [(1000, 1, 0), (0, 0, 1000)]


def test_what_never_reached_an_engine_or_waited_for_another_prompt_teaches_no_speed():
    made = in_flight()
    made.choose("refused", Work(1000), ("a",), now=0.0)
    made.ended("refused", now=0.01)
    for key in ("first", "second"):
        made.choose(key, Work(1000, stream=True), ("b",), now=0.0)
    made.first_byte("second", 1.0)
    made.choose("next", Work(1000), ("a",), now=10.0)
    assert waits(made, 1000.0) == [(1000, 1, 0)]


def test_the_prefill_of_a_request_in_two_stages_counts_until_it_answers():
    made = taught()
    made.choose(1, Work(1000, infer_type="prefill"), ("a",), now=10.0)
    assert waits(made, 100.0) == [(1000, 1, 0)]


def test_what_is_taken_for_computed_is_sent_anew_all_the_same_if_its_engine_is_silent():
    made = InFlightTracker(pipeline.build("load_balance"), [Backend(name, "m") for name in "ab"], full=True)
    for name in "ab":
        made.observe(name, EngineLoad(0, 0), 0.0)
    made.choose("teacher", Work(1000, stream=True), ("b",), now=0.0)
    made.first_byte("teacher", 1.0)
    made.choose("whole", Work(1000), ("a",), now=0.0)
    made.observe("b", EngineLoad(0, 0), 100.0)
    assert waits(made, 100.0) == [(0, 0, 1000)]
    assert made.left_waiting("a", ("a", "b"), 100.0) == ["whole"]


# Prefill that is predicted


RATE = Profile(((0, 0.0), (9999, 9999.0)), ((1, ((0, 500.0), (9999, 500.0))),), 1000)

"""A token each millisecond; beside one answer 1,000 tokens take half a second longer."""


def predicting(*, on: bool = True, profile: Profile | None = RATE) -> InFlightTracker:
    written = {"like": "least_prefill_work", "predict_prefill": on}
    policy, problems = pipeline.compile("mine", written)
    assert problems == []
    return InFlightTracker(policy, [Backend(name, "m", profile=profile) for name in NAMES])


def charged(made: InFlightTracker, *moments: float) -> list[int]:
    """What the replica a has to compute at each of the moments."""
    return [made.view(SHORT, ("a",), now=now)[0].prefill_tokens for now in moments]


def test_the_charge_of_a_prompt_falls_as_fast_as_the_profile_says():
    made = predicting()
    made.choose(1, Work(3000, stream=True), ("a",), now=10.0)
    assert charged(made, 10.0, 10.25, 11.5, 12.999, 13.0, 99.0) == [3000, 2750, 1500, 1, 0, 0]
    made.first_byte(1, 11.0)
    assert charged(made, 11.0, 12.0) == [0, 0]


def test_without_the_setting_or_a_profile_it_stays_until_the_first_byte():
    for made in (predicting(on=False), predicting(profile=None)):
        made.choose(1, Work(3000), ("a",), now=10.0)
        assert charged(made, 10.0, 12.0) == [3000, 3000]
        made.first_byte(1, 12.0)
        assert charged(made, 12.0) == [0]


def test_a_first_byte_says_how_far_the_engine_is():
    made = predicting()
    for key, tokens in enumerate((1000, 2000)):
        made.choose(key, Work(tokens, stream=True), ("a",), now=0.0)
    assert charged(made, 1.5) == [1500]
    made.first_byte(0, 1.6)  # late: the other one is begun only now
    # beside an answer 1,000 tokens take 1.5 s
    assert charged(made, 1.6, 3.1) == [2000, 1000]


def test_a_first_byte_that_comes_with_the_end_of_its_answer_takes_back_its_own_part_only():
    made = predicting()
    for key, tokens in enumerate((1000, 2000)):
        made.choose(key, Work(tokens), ("a",), now=0.0)
    made.first_byte(0, 2.5)  # the other one was begun after 1 s; beside an answer 1,000 tokens take 1.5 s
    assert charged(made, 2.5) == [1000]
    made.ended(0, now=2.5)
    assert charged(made, 2.75) == [250]


def test_a_prompt_that_leaves_takes_its_part_with_it():
    made = predicting()
    for key, tokens in enumerate((1000, 2000, 500)):
        made.choose(key, Work(tokens, stream=True), ("a",), now=0.0)
    made.ended(2, now=0.4)  # the last one: of the first two 400 are computed
    assert charged(made, 0.4) == [2600]
    made.ended(0, now=0.4)  # the first one
    assert charged(made, 0.4, 0.9) == [2000, 1500]
    made.ended(1, now=1.0)
    assert charged(made, 1.0) == [0]
    made.choose("new", Work(700, stream=True), ("a",), now=50.0)
    assert charged(made, 50.0) == [700]


def test_what_is_cached_of_a_prompt_is_not_computed_and_its_end_takes_longer():
    made = predicting(profile=RATE._replace(ttft=((0, 0.0), (1024, 1000.0), (2048, 3000.0))))
    made.choose(1, Work(1024, (1, 2)), ("a",), now=0.0)
    made.ended(1, now=1.0)
    made.choose(2, LONG._replace(stream=True), ("a",), now=5.0)
    assert charged(made, 5.0, 6.0, 7.0) == [1024, 512, 0]


def test_of_a_prompt_longer_than_was_measured_no_more_than_that_is_predicted():
    made = predicting()
    for key, tokens in enumerate((1000, 20_000, 1000)):
        made.choose(key, Work(tokens, stream=True), ("a",), now=0.0)
    assert charged(made, 1.0, 5.0) == [21_000, 17_000]
    made.first_byte(0, 1.0)
    made.ended(0, now=1.0)
    made.ended(1, now=9.0)
    assert charged(made, 9.0, 9.5) == [1000, 500]


def test_others_are_told_what_is_left_to_compute():
    made = predicting()
    made.choose(1, Work(3000, stream=True), ("a",), now=0.0)
    assert made.reports(1.0)["a"].prefill_tokens == 2000
