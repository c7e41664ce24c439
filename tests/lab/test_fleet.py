"""What an engine of the simulated fleet makes of its requests, checked by hand."""

import random
from collections.abc import Sequence

import pytest

from anvil_mux.lab.engines import SimulatedEngine
from anvil_mux.lab.fleet import Blocks, PromptOutcome, PromptTooLarge, simulate
from anvil_mux.lab.workload import Prompt

PLAIN = SimulatedEngine(
    ingress_seconds=0.0,
    ingress_token_seconds=0.0,
    step_seconds=1.0,
    token_seconds=0.01,
    attention_seconds=0.0,
    decode_seconds=0.0,
    context_token_seconds=0.0,
    step_tokens=100,
    kv_tokens=1000,
)
"""A step takes 1 s, and 10 ms for each token of a prompt."""


class Told:
    """Sends every request where it is told to, and writes down what it hears."""

    def __init__(self, *replicas: int) -> None:
        self.replicas = replicas
        self.chosen: list[tuple[int, float]] = []
        self.first: dict[int, float] = {}
        self.over: dict[int, tuple[float, int]] = {}

    def choose(self, key: int, prompt: Prompt, now: float) -> int:
        self.chosen.append((key, now))
        return self.replicas[key % len(self.replicas)]

    def first_byte(self, key: int, now: float) -> None:
        assert key not in self.first
        self.first[key] = now

    def ended(self, key: int, now: float, outcome: PromptOutcome) -> None:
        assert key in self.first
        assert key not in self.over
        self.over[key] = now, outcome.cached_tokens

    def take_back(self, idle: int, now: float) -> Sequence[int]:
        return ()


def times(
    prompts: Sequence[Prompt], engine: SimulatedEngine = PLAIN, block_tokens: int = 10
) -> list[tuple[float, float]]:
    answers = simulate(prompts, Told(0), 1, block_tokens, engine)
    return [(pytest.approx(answer.first_byte), pytest.approx(answer.finished)) for answer in answers]


def test_an_answer_takes_a_step_for_the_prompt_and_one_for_each_further_token():
    assert times([Prompt(5.0, 50, 3)]) == [(6.5, 8.5)]


def test_a_long_prompt_is_computed_in_parts():
    assert times([Prompt(0.0, 250, 1)]) == [(2 + 2 + 1.5, 5.5)]


def test_requests_are_served_in_their_order_and_share_a_step():
    # While the first is computed two more come: 60 + 40 tokens are in the next step, 20 in the last.
    prompts = [Prompt(0.0, 50, 1), Prompt(1.0, 60, 1), Prompt(1.0, 60, 1)]
    assert times(prompts) == [(1.5, 1.5), (3.5, 3.5), (4.7, 4.7)]


def test_a_request_waits_for_the_end_of_the_step_that_it_comes_in():
    # The first decodes for 100 s, in one sleep; the second comes at 10.3, and its step begins at 11.1.
    assert times([Prompt(0.0, 10, 101), Prompt(10.3, 10, 1)]) == [(1.1, 101.2), (12.2, 12.2)]


def test_the_answers_under_way_slow_each_other_down_by_their_number_and_their_context():
    engine = SimulatedEngine(**{**vars(PLAIN), "decode_seconds": 0.1, "context_token_seconds": 0.001})
    # Prompt 1.1 s; then two steps with a context of 11 and of 12 tokens.
    assert times([Prompt(0.0, 10, 3)], engine) == [(1.1, 1.1 + 1.1 + 0.011 + 1.1 + 0.012)]


def test_a_prompt_costs_more_the_longer_it_is():
    engine = SimulatedEngine(**{**vars(PLAIN), "attention_seconds": 0.0001})
    assert times([Prompt(0.0, 150, 1)], engine) == [(2 + 1.5 + 0.0001 * 150**2, 5.75)]


def test_getting_to_the_engine_takes_time_by_tokens():
    engine = SimulatedEngine(**{**vars(PLAIN), "ingress_seconds": 0.5, "ingress_token_seconds": 0.1})
    assert times([Prompt(0.0, 10, 1)], engine) == [(0.5 + 1.0 + 1.1, 2.6)]


def test_the_default_engine_is_the_one_that_was_measured():
    """On an H20: 0.08 s to the first byte for 1,024 tokens, 15.4 s for 65,536, 0.11 s if those are cached."""
    short, long = (simulate([Prompt(0.0, n, 1)], Told(0), 1, 64)[0] for n in (1024, 65_536))
    assert short.first_byte == pytest.approx(0.08, rel=0.12)
    assert long.first_byte == pytest.approx(15.4, rel=0.02)
    cached = simulate([Prompt(at, 65_536, 1, tuple(range(1024))) for at in (0.0, 20.0)], Told(0), 1, 64)[1]
    assert cached.first_byte - cached.arrived == pytest.approx(0.11, rel=0.03)


# Caches


def test_blocks_that_were_computed_are_not_computed_again():
    first, second = Prompt(0.0, 55, 1, (1, 2, 3, 4, 5)), Prompt(10.0, 55, 1, (1, 2, 3, 4, 6))
    answers = simulate([first, second], Told(0), 1, 10, PLAIN)
    assert [answer.cached_tokens for answer in answers] == [0, 40]
    assert answers[1].first_byte == pytest.approx(10.0 + 1.0 + 0.15)


def test_the_last_token_of_a_prompt_is_always_computed():
    prompts = [Prompt(at, 20, 1, (1, 2)) for at in (0.0, 10.0)]
    assert simulate(prompts, Told(0), 1, 10, PLAIN)[1].cached_tokens == 19


def test_blocks_are_shared_when_they_are_computed_not_before():
    prompts = [Prompt(0.0, 100, 1, tuple(range(10))) for _ in range(2)]
    assert [answer.cached_tokens for answer in simulate(prompts, Told(0), 1, 10, PLAIN)] == [0, 99]
    prompts = [Prompt(at, 50, 1, tuple(range(5))) for at in (1.0, 1.0)]
    before = Prompt(0.0, 90, 1)
    answers = simulate([before, *prompts], Told(0), 1, 10, PLAIN)
    assert [answer.cached_tokens for answer in answers] == [0, 0, 0]


def test_a_replica_does_not_know_what_another_one_holds():
    prompts = [Prompt(at, 20, 1, (1, 2)) for at in (0.0, 10.0)]
    assert simulate(prompts, Told(0, 1), 2, 10, PLAIN)[1].cached_tokens == 0


def test_a_request_waits_until_its_whole_input_and_output_fit():
    # The first holds 600 of 1,000 tokens until 501 tokens are out; the second needs 500, the third would fit.
    prompts = [Prompt(0.0, 100, 500), Prompt(1.0, 100, 400), Prompt(1.0, 10, 1)]
    (_, freed), (second, _), (third, _) = times(prompts)
    assert freed == 2.0 + 499
    assert second == 501 + 2.0
    assert third == 503 + 1.1


def test_what_never_fits_is_refused():
    with pytest.raises(PromptTooLarge, match="needs 101 KV blocks of 10 tokens; a replica has 100"):
        simulate([Prompt(0.0, 1000, 1)], Told(0), 1, 10, PLAIN)


def test_idle_blocks_go_first_used_first_and_the_end_of_a_prompt_before_its_beginning():
    blocks = Blocks(6)
    for ids in ([1, 2, 3], [4, 5]):
        assert blocks.reserve([], len(ids))
        assert blocks.share(ids) == ids
        blocks.release(ids, 0)
    assert blocks.reserve([], 3)  # one block was free
    assert (blocks.hit([1, 2, 3]), blocks.hit([4, 5])) == (1, 2)
    assert not blocks.reserve([], 4)
    assert blocks.used == 6


def test_pinned_blocks_stay():
    blocks = Blocks(4)
    assert blocks.reserve([], 3)
    blocks.share([1, 2, 3])
    blocks.release([3], 0)
    assert not blocks.reserve([], 3)
    assert blocks.reserve([], 2)
    assert blocks.hit([1, 2, 3]) == 2


class Naive:
    """The same, told by sets of users, without any counting."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.users: dict[int, set[int]] = {}
        self.idle: list[int] = []
        self.private: dict[int, int] = {}

    def reserve(self, who: int, hit: Sequence[int], private: int) -> bool:
        held = {block for block, users in self.users.items() if users} | set(hit)
        if len(held) + sum(self.private.values()) + private > self.capacity:
            return False
        for block in hit:
            self.users.setdefault(block, set()).add(who)
        self.idle = [block for block in self.idle if block not in hit]
        self.private[who] = private
        while len(held) + len(self.idle) + sum(self.private.values()) > self.capacity:
            self.idle.pop(0)
        return True

    def there(self) -> set[int]:
        return {block for block, users in self.users.items() if users} | set(self.idle)


@pytest.mark.parametrize("seed", range(5))
def test_blocks_do_what_sets_of_users_do(seed):
    draw = random.Random(seed)
    blocks, naive = Blocks(40), Naive(40)
    running: dict[int, tuple[list[int], int]] = {}
    for who in range(400):
        if running and draw.random() < 0.5:
            gone = draw.choice([*running])
            pinned, private = running.pop(gone)
            blocks.release(pinned, private)
            del naive.private[gone]
            for block in reversed(pinned):
                naive.users[block].discard(gone)
                if not naive.users[block]:
                    naive.idle.append(block)
        chain = [draw.randrange(3) * 100 + n for n in range(draw.randrange(1, 15))]
        hit = blocks.hit(chain)
        assert hit == next((n for n, block in enumerate(chain) if block not in naive.there()), len(chain))
        private = len(chain) - hit + draw.randrange(4)
        fits = blocks.reserve(chain[:hit], private)
        assert fits == naive.reserve(who, chain[:hit], private)
        if fits:
            fresh = blocks.share(chain[hit:])
            for block in fresh:
                naive.users.setdefault(block, set()).add(who)
                if block in naive.idle:
                    naive.idle.remove(block)
            naive.private[who] -= len(fresh)
            running[who] = chain[:hit] + fresh, private - len(fresh)
        assert blocks.used == len(naive.there()) + sum(naive.private.values()) <= 40


# Sessions, and the whole


def test_a_turn_of_a_session_waits_for_the_answer_before_it():
    prompts = [Prompt(0.0, 10, 11, (), "a"), Prompt(3.0, 10, 1, (), "a"), Prompt(50.0, 10, 1, (), "a")]
    answers = simulate(prompts, Told(0), 1, 10, PLAIN)
    assert [answer.arrived for answer in answers] == [0.0, pytest.approx(11.1), 50.0]


class TakesBack(Told):
    """Sends a session to the second replica, all else to the first, and one request there when it is idle."""

    def __init__(self, key: int) -> None:
        super().__init__(0, 1)
        self.key = key
        self.moved = -1

    def choose(self, key: int, prompt: Prompt, now: float) -> int:
        super().choose(key, prompt, now)
        return int(prompt.session != "" or key == self.moved)

    def take_back(self, idle: int, now: float) -> Sequence[int]:
        if idle == 0 or self.moved >= 0:
            return ()
        self.moved = self.key
        return (self.key,)


@pytest.mark.parametrize(
    ("key", "ingress", "third", "expected"),
    [
        (2, 0.0, 0.5, [(0, 6.0), (1, 1.1), (1, 3.1), (0, 38.0)]),  # it waits
        (0, 0.0, 0.5, [(1, 7.1), (1, 1.1), (0, 4.0), (0, 38.0)]),  # it is computed; its step ends
        (2, 0.5, 1.3, [(0, 6.5), (1, 1.6), (1, 4.1), (0, 38.5)]),  # it is on its way
    ],
)
def test_a_request_that_is_taken_back_is_served_elsewhere_and_holds_nothing_where_it_was(
    key, ingress, third, expected
):
    engine = SimulatedEngine(**{**vars(PLAIN), "ingress_seconds": ingress})
    prompts = [Prompt(0.0, 300, 1), Prompt(0.0, 10, 1, (), "s"), Prompt(third, 100, 1), Prompt(20.0, 900, 1)]
    answers = simulate(prompts, TakesBack(key), 2, 10, engine)
    assert [answer.replica for answer in answers] == [replica for replica, _ in expected]
    assert [answer.first_byte for answer in answers] == pytest.approx([first for _, first in expected])
    assert answers[key].arrived == prompts[key].at


def crowd(seed: int, count: int = 200) -> list[Prompt]:
    draw = random.Random(seed)
    found = []
    for number in range(count):
        tokens = draw.randrange(1, 400)
        ids = tuple(draw.randrange(4) * 1000 + n for n in range(tokens // 10))
        session = draw.choice(["", "", f"s{number % 7}"])
        found.append(Prompt(draw.uniform(0, 200), tokens, draw.randrange(1, 40), ids, session))
    return found


@pytest.mark.parametrize("seed", range(3))
def test_every_request_is_chosen_for_begins_and_ends_once(seed):
    prompts, router = crowd(seed), Told(0, 2, 1, 1)
    answers = simulate(prompts, router, 3, 10, PLAIN)
    assert sorted(answer.prompt for answer in answers) == sorted(prompts)
    keys = set(range(len(prompts)))
    assert [key for key, _ in router.chosen] == sorted(keys)
    assert router.first.keys() == router.over.keys() == keys
    for answer in answers:
        assert answer.prompt.at <= answer.arrived < answer.first_byte <= answer.finished
        assert 0 <= answer.cached_tokens < answer.prompt.tokens


def test_the_same_requests_end_the_same():
    first, again = (simulate(crowd(1), Told(0, 1), 2, 10, PLAIN) for _ in range(2))
    assert first == again
