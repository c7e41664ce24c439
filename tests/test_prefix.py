"""What the caches of replicas hold, as far as can be told."""

from __future__ import annotations

import random

from anvil_mux.prefix import Prefixes


def test_a_hit_is_as_long_as_the_beginning_that_is_there() -> None:
    prefixes = Prefixes("ab")
    prefixes.use("a", (1, 2, 3), 10)
    prefixes.use("b", (1, 9), 10)
    assert prefixes.hits((1, 2, 3, 4), "ab") == {"a": 3, "b": 1}
    assert prefixes.hits((1, 2), "ab") == {"a": 2, "b": 1}
    assert prefixes.hits((1, 2), "b") == {"b": 1}


def test_a_block_without_those_before_it_is_no_hit() -> None:
    prefixes = Prefixes("a")
    prefixes.use("a", (1, 2, 3), 10)
    assert prefixes.hits((7, 2, 3), "a") == {}
    prefixes.cut("a", (2,))
    assert prefixes.hits((1, 2, 3), "a") == {"a": 1}


def test_what_was_used_longest_ago_goes_first_and_the_end_of_a_request_before_its_beginning() -> None:
    prefixes = Prefixes("a")
    prefixes.use("a", (1, 2, 3), 5)
    prefixes.use("a", (7, 8), 5)
    prefixes.use("a", (1,), 5)
    prefixes.use("a", (9,), 4)
    assert prefixes.hits((1, 2, 3), "a") == {"a": 1}
    assert prefixes.hits((7, 8), "a") == {"a": 2}
    assert prefixes.size("a") == 4


def test_a_request_that_is_larger_than_the_cache_leaves_its_beginning() -> None:
    prefixes = Prefixes("a")
    prefixes.use("a", (1, 2, 3, 4), 3)
    assert prefixes.hits((1, 2, 3, 4), "a") == {"a": 3}


def test_a_cleared_replica_holds_nothing_and_the_others_keep_theirs() -> None:
    prefixes = Prefixes("ab")
    for replica in "ab":
        prefixes.use(replica, (1, 2), 10)
    prefixes.clear("a")
    assert prefixes.hits((1, 2), "ab") == {"b": 2}
    prefixes.clear("b")
    assert len(prefixes) == prefixes.size("b") == 0


class Plain:
    """The same with a list for each replica."""

    def __init__(self) -> None:
        self.held: dict[str, list[int]] = {"a": [], "b": [], "c": []}

    def use(self, replica: str, blocks: tuple[int, ...], capacity: int) -> None:
        kept = [block for block in self.held[replica] if block not in blocks]
        self.held[replica] = (kept + list(reversed(blocks)))[-capacity:]

    def hits(self, blocks: tuple[int, ...], among: str) -> dict[str, int]:
        found = {}
        for replica in among:
            length = 0
            while length < len(blocks) and blocks[length] in self.held[replica]:
                length += 1
            if length:
                found[replica] = length
        return found


def test_it_agrees_with_lists_over_random_histories() -> None:
    for seed in range(30):
        rng = random.Random(seed)
        prefixes, plain = Prefixes("abc"), Plain()
        capacity = rng.randrange(3, 12)
        chains = [tuple(range(100 * i, 100 * i + rng.randrange(1, 9))) for i in range(6)]
        for _ in range(200):
            replica, blocks = rng.choice("abc"), rng.choice(chains)
            blocks = blocks[: rng.randrange(1, len(blocks) + 1)]
            if rng.random() < 0.03:
                prefixes.clear(replica)
                plain.held[replica] = []
            else:
                prefixes.use(replica, blocks, capacity)
                plain.use(replica, blocks, capacity)
            among = rng.choice(["abc", "ac", "b"])
            asked = rng.choice(chains)
            assert prefixes.hits(asked, among) == plain.hits(asked, among)
            assert prefixes.size(replica) <= capacity
