"""What replicas have to do, as counted from leases and streams."""

import random
import sys
from collections.abc import Callable, Sequence

import pytest

from anvil_mux.config.config import Backend
from anvil_mux.routing import pipeline
from anvil_mux.routing.in_flight import EngineLoad, InFlightTracker
from anvil_mux.routing.routing import Replica, Work, kv_cache_usage_ratio_projected

NAMES = ("a", "b", "c")


LONG = Work(2048, (1, 2, 3, 4))


SHORT = Work(100)


def in_flight(policy: str = "least_prefill_work", **settings: int) -> InFlightTracker:
    return InFlightTracker(pipeline.build(policy), [Backend(name, "m", **settings) for name in NAMES])


def chosen(made: InFlightTracker, key: object, work: Work = LONG, among: tuple[str, ...] = NAMES) -> str:
    choice = made.choose(key, work, among)
    assert choice is not None
    return choice.backend


def state(made: InFlightTracker, work: Work = LONG) -> dict[str, Replica]:
    """What they have to do, without what is learned and what went before."""
    forgotten = {"cache_tokens": Replica("").cache_tokens, "share": 1.0, "usual_tokens": 0.0}
    return {replica.backend: replica._replace(**forgotten) for replica in made.view(work, NAMES)}


def test_a_choice_is_charged_before_the_next_one_looks():
    made = in_flight()
    assert [chosen(made, key, SHORT) for key in range(4)] == ["a", "b", "c", "a"]
    assert state(made)["a"] == Replica("a", num_requests=2, num_waiting_requests=2, prefill_tokens=200,
                                       num_tokens=200)  # fmt: skip


def test_the_first_byte_turns_prefill_into_decode_and_the_end_releases_both():
    made = in_flight()
    chosen(made, 1, among=("a",))
    made.first_byte(1)
    made.first_byte(1)
    held = state(made)["a"]
    assert (held.prefill_tokens, held.decode_tokens, held.decode_batch, held.num_tokens) == (0, 2048, 1, 2048)
    assert (held.num_requests, held.num_waiting_requests, held.hit_tokens) == (1, 0, 2048)
    made.ended(1)
    made.ended(1)
    assert state(made)["a"] == Replica("a", hit_tokens=2048)


def test_only_what_is_not_cached_counts_as_prefill():
    made = in_flight()
    chosen(made, 1, among=("a",))
    chosen(made, 2, Work(2600, (1, 2, 3, 4, 5)), among=("a",))
    assert state(made)["a"].prefill_tokens == 2048 + 552


def test_the_share_of_a_replica_is_its_part_of_the_latest_requests():
    made = in_flight()
    assert [round(replica.share, 6) for replica in made.view(SHORT, NAMES)] == [0.333333] * 3
    for key in range(1000):
        chosen(made, key, SHORT, among=("a",))
    assert [round(replica.share, 6) for replica in made.view(SHORT, NAMES)] == [1.0, 0.0, 0.0]
    made.forget("a")
    assert round(made.view(SHORT, NAMES)[0].share, 6) == 0.333333


def test_a_replica_has_the_cache_that_is_learned_where_nothing_is_said_of_it():
    made = in_flight()
    room(made)
    told(made, lambda hit: hit + 50_000)
    assert made.view(SHORT, NAMES)[1].cache_tokens == 131_072 + 50_000
    assert in_flight(kv_tokens=8192).view(SHORT, NAMES)[1].cache_tokens == 8192


def test_usual_tokens_are_the_mean_of_what_was_not_cached_lately():
    made = in_flight()
    for key, tokens in enumerate((100, 200, 600)):
        chosen(made, key, Work(tokens), among=("a",))
    assert made.view(SHORT, NAMES)[2].usual_tokens == 300
    for key in range(3, 1000):
        chosen(made, key, SHORT)
    assert round(made.view(SHORT, NAMES)[2].usual_tokens, 3) == 100


def test_the_choice_of_the_documentation():
    """docs/routing.md, "A choice, step by step"."""
    made = in_flight()
    known = tuple(range(20))
    for key, (tokens, backend) in enumerate([(12_000, "a"), (4_500, "a"), (4_500, "a"), (3_000, "b")]):
        chosen(made, key, Work(tokens, known if tokens == 12_000 else ()), among=(backend,))
    made.ended(0)
    made.first_byte(3)
    choice = made.choose("new", Work(12_000, (*known, 20, 21)), ("a", "b"))
    assert choice is not None
    assert choice.backend == "a"
    assert choice.reason == "cache_aware_all_prefills_tokens_num 10760, num_requests 2"


def test_a_returning_request_follows_its_cache():
    made = in_flight()
    assert chosen(made, 1) == "a"
    made.ended(1)
    assert [chosen(made, 2), chosen(made, 3, SHORT)] == ["a", "b"]


def test_a_replica_that_is_forgotten_has_nothing_to_do_and_nothing_cached():
    made = in_flight()
    chosen(made, 1, LONG._replace(session="s"), among=("a",))
    chosen(made, 2, among=("b",))
    made.forget("a")
    made.first_byte(1)
    made.ended(1)
    assert state(made)["a"] == Replica("a")
    assert state(made)["b"].num_requests == 1


def test_a_session_is_not_sent_back_to_a_replica_that_lost_its_cache():
    made = in_flight("sticky")
    session = SHORT._replace(session="s")
    assert chosen(made, 1, session) == "a"
    assert chosen(made, 2, session) == "a"
    made.forget("a")
    chosen(made, 3, among=("a",))
    assert chosen(made, 4, session) == "b"


def streams(made: InFlightTracker, *sizes: int, backend: str = "a") -> None:
    """Streamed requests at a replica, with their sizes as keys."""
    for size in sizes:
        chosen(made, size, Work(size, stream=True), among=(backend,))


def test_an_idle_replica_takes_requests_that_wait_behind_others_until_both_have_as_many():
    made = in_flight()
    streams(made, 1000, 1001, 1002, 1003, 1004)
    assert made.better_off("b", NAMES, 0.0) == [1004, 1003]
    streams(made, 900, 901, backend="b")
    assert made.better_off("b", NAMES, 0.0) == [1004]


def calls_of_better_off(waiting: int) -> int:
    """The functions that are called where so many streams wait at one replica, and another is idle."""
    made, calls = in_flight(), 0
    for key in range(waiting):
        chosen(made, key, Work(1000, stream=True), among=("a",))

    def count(frame: object, event: str, about: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        moved = made.better_off("b", NAMES, 0.0)
    finally:
        sys.setprofile(None)
    assert len(moved) == waiting // 2
    return calls


def test_better_off_takes_time_in_proportion_to_the_line():
    assert calls_of_better_off(400) < 2.2 * calls_of_better_off(200)


def test_left_waiting_views_the_replicas_once_for_a_whole_line():
    made = InFlightTracker(pipeline.build("load_balance"), [Backend(name, "m") for name in NAMES], full=True)
    for name in NAMES:
        made.observe(name, EngineLoad(0, 0), 0.0)
    streams(made, *range(1000, 1100))
    for name in ("b", "c"):
        made.observe(name, EngineLoad(0, 0), 100.0)
    views, view = [], made.view
    made.view = lambda *about: views.append(about) or view(*about)  # type: ignore[assignment]
    assert made.left_waiting("a", NAMES, 100.0) == [*range(1000, 1100)]
    assert len(views) == 1


def test_a_request_stays_where_the_policy_would_send_it_again():
    made = in_flight()
    chosen(made, "first", LONG, among=("a",))
    made.first_byte("first")
    chosen(made, 1, Work(100), among=("a",))
    chosen(made, 2, LONG._replace(stream=True), among=("a",))
    assert made.better_off("b", NAMES, 0.0) == []  # all of it is cached here


def test_what_is_answered_not_streamed_or_first_in_line_is_not_taken_back():
    made = in_flight()
    streams(made, 1000, 1001)
    made.first_byte(1001)
    chosen(made, "whole", Work(5000), among=("a",))
    assert made.better_off("b", NAMES, 0.0) == []


def test_what_is_cached_is_bounded_by_what_the_engine_holds():
    made = in_flight(kv_tokens=1024)
    chosen(made, 1, among=("a",))
    assert state(made)["a"].hit_tokens == 1024


@pytest.mark.parametrize("policy", pipeline.shipped())
def test_a_replica_that_failed_is_chosen_by_no_policy(policy):
    made = in_flight(policy)
    for key in range(20):
        choice = made.choose(key, SHORT, ("b", "c"), failed=("a",))
        assert choice is None or choice.backend != "a"


def test_replicas_that_failed_are_seen_and_not_chosen():
    made = in_flight("least_prefill_work")
    choice = made.choose(1, SHORT, ("b", "c"), failed=("a",))
    assert choice is not None
    assert (choice.backend, choice.removed) == ("b", (("c", "metric"), ("a", "schedulability")))


def test_nothing_is_charged_when_nobody_is_left():
    made = in_flight()
    assert made.choose(1, SHORT, (), failed=NAMES) is None
    assert all(replica.num_requests == 0 for replica in made.view(SHORT, NAMES))


def test_counts_are_never_negative_and_nothing_is_left_of_any_history():
    for seed in range(40):
        rng = random.Random(seed)
        made = in_flight(rng.choice(list(pipeline.shipped())))
        for key in range(150):
            chain = rng.choice([(1, 2, 3, 4), (1, 2, 7), ()])
            session, stream = rng.choice(["", "s", "t"]), rng.choice([True, False])
            work = Work(rng.randrange(4000), chain, session=session, stream=stream)
            made.choose(key, work, rng.sample(NAMES, rng.randrange(1, 4)), now=key)
            for _ in range(rng.randrange(3)):
                if rng.random() < 0.3:
                    made.first_byte(rng.randrange(150), key)
                else:
                    made.ended(rng.randrange(150), prompt_tokens=rng.choice([None, 1000]), now=key)
            if rng.random() < 0.05:
                made.forget(rng.choice(NAMES))
            for held in made.view(work, NAMES, now=key + rng.random()):
                counts = held[6:12]
                assert all(isinstance(count, int) and count >= 0 for count in counts)
                assert held.num_requests == held.num_waiting_requests + held.decode_batch
        for key in rng.sample(range(150), 150):
            made.ended(key)
        assert [held[6:12] for held in made.view(SHORT, NAMES)] == [(0,) * 6] * 3


def test_the_same_history_gives_the_same_choices():
    def run() -> list[str]:
        rng, made, found = random.Random(2), in_flight("power_of_two"), []
        for key in range(200):
            found.append(chosen(made, key, Work(rng.randrange(4000))))
            made.ended(rng.randrange(key + 1))
        return found

    assert run() == run()


def test_the_length_of_a_token_is_learned_from_what_engines_count():
    made = in_flight()
    for key in range(100):
        chosen(made, key, Work(1000, size=4000))
        made.ended(key, prompt_tokens=1600)
    assert abs(made.bytes_per_token - 2.5) < 0.01
    made.choose("odd", Work(1000, size=4000), NAMES)
    made.ended("odd", prompt_tokens=1)  # an engine that counts differently does not spoil it
    assert made.bytes_per_token < 4.0


def test_a_cache_that_holds_less_than_was_thought_is_thought_smaller_and_recovers():
    made = in_flight(kv_tokens=8 * 512)
    blocks = tuple(range(8))
    for key in range(4):
        chosen(made, key, Work(4096, blocks), among=("a",))
        made.ended(key, cached_tokens=0)
    assert state(made, Work(4096, blocks))["a"].hit_tokens == 6 * 512
    for key in range(4, 8):
        chosen(made, key, Work(4096, blocks), among=("a",))
        made.ended(key, cached_tokens=3072)
    assert state(made, Work(4096, blocks))["a"].hit_tokens == 7 * 512


def room(made: InFlightTracker, name: str = "a") -> int:
    """How many tokens of a prompt without end that cache is thought to hold once it has it."""
    work = Work(1_000_000, tuple(range(10_000, 12_000)))
    made.choose("endless", work, (name,))
    made.ended("endless")
    return made.view(work, (name,))[0].hit_tokens


def told(
    made: InFlightTracker, cached: Callable[[int], int], times: int = 1, among: Sequence[str] = ("a",)
) -> None:
    """Requests that fill all that the cache is thought to hold; what was cached of each, given our guess."""
    for number in range(times):
        work = Work(300_000, tuple(range(number * 1000, number * 1000 + 600)))
        choice = made.choose("told", work, among)
        assert choice is not None
        made.ended("told", cached_tokens=cached(choice.hit_tokens))


def test_a_cache_that_holds_more_than_could_be_remembered_is_thought_larger():
    made = in_flight()
    assert room(made) == 131_072
    told(made, lambda hit: hit + 50_000)
    assert room(made) == 131_072 + 50_000 - 50_000 % 512
    told(made, lambda hit: hit + 1000)  # as prompts end within a block
    assert room(made) == 131_072 + 50_000 - 50_000 % 512


def test_what_one_replica_teaches_holds_for_all_that_say_nothing_of_their_cache():
    backends = [Backend("a", "m"), Backend("b", "m"), Backend("c", "m", kv_tokens=8192)]
    made = InFlightTracker(pipeline.build("least_prefill_work"), backends)
    room(made)
    told(made, lambda hit: hit + 50_000)
    assert (room(made, "b") // 1000, room(made, "c")) == (180, 8192)
    made.forget("a")  # it was stopped: its cache is empty, and as large as before
    assert room(made) // 1000 == 180
    told(made, lambda hit: hit + 50_000, among=("c",))
    assert room(made) // 1000 == 180


def test_a_cache_that_is_not_full_says_nothing_of_its_size():
    made = in_flight()
    made.choose(1, Work(4096, tuple(range(8))), ("a",))
    made.ended(1, cached_tokens=4096)  # what others had sent there
    assert room(made) == 131_072


def test_a_full_cache_that_held_less_is_thought_smaller_by_a_sixteenth_at_most():
    made = in_flight()
    room(made)
    made.choose("again", Work(1_000_000, tuple(range(10_000, 12_000))), ("a",))
    made.ended("again", cached_tokens=0)
    assert room(made) == 131_072 * 15 // 16


def test_what_a_service_says_of_its_cache_is_not_exceeded():
    made = in_flight(kv_tokens=8192)
    room(made)
    told(made, lambda hit: hit + 50_000, times=5)
    assert room(made) == 8192


# The mode full


def full(policy: str = "num_requests", **settings: int) -> InFlightTracker:
    backends = [Backend(name, "m", **settings) for name in NAMES]
    return InFlightTracker(pipeline.build(policy), backends, full=True)


def test_what_an_engine_says_is_merged_with_what_was_sent_since():
    made = full(kv_tokens=1000)
    made.choose(1, SHORT, ("a",), now=1.0)
    made.observe("a", EngineLoad(running=3, waiting=2, usage=0.7), 2.0)
    made.choose(2, SHORT, ("a",), now=3.0)
    seen = made.view(SHORT, ("a",), now=4.0)[0]
    assert (seen.num_requests, seen.num_waiting_requests, seen.decode_batch) == (6, 3, 3)
    assert (seen.age_seconds, seen.prefill_tokens) == (2.0, 200)
    # 0.7 are in use; 100 tokens of each of ours are to be computed, also of the one that came after that.
    assert kv_cache_usage_ratio_projected(SHORT, seen) == pytest.approx(0.9)
    made.first_byte(1)
    made.first_byte(2)
    seen = made.view(SHORT, ("a",), now=4.0)[0]
    assert (seen.prefill_tokens, seen.unreported_tokens) == (0, 100)
    assert kv_cache_usage_ratio_projected(SHORT, seen) == pytest.approx(0.8)


def test_what_an_engine_says_of_our_own_requests_is_no_news():
    """A prompt that it computes is no answer under way, and what ended is not there because it was."""
    made = full()
    made.choose(1, SHORT, ("a",), now=0.0)
    made.observe("a", EngineLoad(running=1, waiting=0), 1.0)
    seen = made.view(SHORT, ("a",), now=1.5)[0]
    assert (seen.num_requests, seen.num_waiting_requests, seen.decode_batch) == (1, 1, 0)
    made.first_byte(1)
    assert made.view(SHORT, ("a",), now=1.5)[0].decode_batch == 1
    made.choose(2, SHORT, ("a",), now=1.6)
    made.ended(2)  # it came and went unseen
    made.ended(1)
    seen = made.view(SHORT, ("a",), now=1.7)[0]
    assert (seen.num_requests, seen.decode_batch) == (0, 0)
    made.observe("a", EngineLoad(running=1, waiting=0), 2.0)  # somebody else's
    seen = made.view(SHORT, ("a",), now=2.0)[0]
    assert (seen.num_requests, seen.decode_batch) == (1, 1)


def test_of_what_an_engine_does_not_say_our_own_counts_hold():
    made = full("load_balance")
    for key in (1, 2):
        made.choose(key, SHORT, ("a",), now=1.0)
    made.first_byte(1)
    made.observe("a", EngineLoad(running=3), 2.0)
    seen = made.view(SHORT, ("a",), now=3.0)[0]
    assert (seen.num_requests, seen.num_waiting_requests, seen.decode_batch) == (3, 1, 2)
    made.observe("a", None, 100.0)
    seen = made.view(SHORT, ("a",), now=160.0)[0]
    assert (seen.num_requests, seen.num_waiting_requests, seen.age_seconds) == (2, 1, 60.0)
    assert made.choose(3, SHORT, ("a",), now=160.0)


def test_in_the_mode_lite_nobody_is_stale_and_in_full_whoever_is_silent():
    lite, strict = in_flight("load_balance"), full("load_balance")
    for made in (lite, strict):
        assert made.choose(1, SHORT, NAMES, now=0.0)
    strict.observe("b", EngineLoad(0, 0), 50.0)
    assert lite.choose(2, SHORT, NAMES, now=100.0)
    choice = strict.choose(2, SHORT, NAMES, now=100.0)
    assert choice is not None
    assert choice.backend == "b"
    assert dict(choice.removed) == {"a": "staleness", "c": "staleness"}
    assert strict.choose(3, SHORT, NAMES, now=200.0) is None


def test_a_replica_that_comes_back_is_given_time_to_say_something():
    made = full("load_balance")
    made.choose(1, SHORT, NAMES, now=0.0)
    for name in NAMES:
        made.forget(name)
    assert made.choose(2, SHORT, NAMES, now=1000.0)


def went_on_with(made, *members):
    """The same tracker without b and c, and with these members."""
    for name in "bc":
        made.leave(name)
    for member in members:
        made.join(member)
    return made


def test_what_is_in_flight_goes_on_when_the_members_are_others():
    made = in_flight()
    for key, name in enumerate(("a", "a", "b")):
        chosen(made, key, among=(name,))
    made.first_byte(0)
    after = went_on_with(made, Backend("d", "m"))
    went_on, new = after.view(LONG, ("a", "d"))
    assert (went_on.num_requests, went_on.num_waiting_requests, went_on.hit_tokens) == (2, 1, 2048)
    assert (new.num_requests, new.hit_tokens) == (0, 0)
    assert went_on.prefill_tokens == 0  # all of it is in the cache
    chosen(after, 3, SHORT, among=("a",))
    for key in range(4):
        after.first_byte(key)
        after.ended(key)
    went_on, _ = after.view(SHORT, ("a", "d"))
    assert (went_on.num_requests, went_on.num_tokens, went_on.prefill_tokens) == (0, 0, 0)


def test_what_waits_at_a_replica_weighs_on_it_still():
    made = in_flight()
    chosen(made, 1, SHORT, among=("a",))
    after = went_on_with(made, Backend("a", "m", kv_tokens=4096), Backend("d", "m"))
    assert after.view(SHORT, ("a",))[0].prefill_tokens == 100
    assert chosen(after, 2, SHORT, among=("a", "d")) == "d"
    for key in range(3, 9):
        chosen(after, key, Work(2048, (key, 100 + key, 200 + key, 300 + key)), among=("a",))
    assert after.prefixes.size("a") == 4096 // Work().block_tokens
