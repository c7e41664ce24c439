"""What the caches of replicas hold, as far as can be told."""

import json
import random
from typing import Any

import pytest

from anvil_mux.routing.prefix import BLOCK_BYTES, Prefixes, read
from anvil_mux.routing.routing import Work


def test_a_hit_is_as_long_as_the_beginning_that_is_there():
    prefixes = Prefixes("ab")
    prefixes.use("a", (1, 2, 3), 10)
    prefixes.use("b", (1, 9), 10)
    assert prefixes.hits((1, 2, 3, 4), "ab") == {"a": 3, "b": 1}
    assert prefixes.hits((1, 2), "ab") == {"a": 2, "b": 1}
    assert prefixes.hits((1, 2), "b") == {"b": 1}


def test_a_block_without_those_before_it_is_no_hit():
    prefixes = Prefixes("a")
    prefixes.use("a", (1, 2, 3), 10)
    assert prefixes.hits((7, 2, 3), "a") == {}
    assert prefixes.hits((1, 7, 3), "a") == {"a": 1}


def test_what_was_used_longest_ago_goes_first_and_the_end_of_a_request_before_its_beginning():
    prefixes = Prefixes("a")
    prefixes.use("a", (1, 2, 3), 5)
    prefixes.use("a", (7, 8), 5)
    prefixes.use("a", (1,), 5)
    prefixes.use("a", (9,), 4)
    assert prefixes.hits((1, 2, 3), "a") == {"a": 1}
    assert prefixes.hits((7, 8), "a") == {"a": 2}
    assert prefixes.size("a") == 4


def test_a_request_that_is_larger_than_the_cache_leaves_its_beginning():
    prefixes = Prefixes("a")
    prefixes.use("a", (1, 2, 3, 4), 3)
    assert prefixes.hits((1, 2, 3, 4), "a") == {"a": 3}


def test_a_cleared_replica_holds_nothing_and_the_others_keep_theirs():
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


def test_it_agrees_with_lists_over_random_histories():
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


# A request as blocks

LONG = "All work and no play makes Jack a dull boy. " * 200


def chat(*contents: str, **more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": each} for each in contents], **more}


def work(document: object, session: str = "", model: str = "m") -> Work:
    return read(model, json.dumps(document).encode(), 4.0, session)


def common(one: Work, other: Work) -> int:
    pairs = zip(one.blocks, other.blocks, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one.blocks), len(other.blocks)))


def test_blocks_are_the_full_ones_of_the_prompt_and_tokens_a_quarter_of_its_bytes():
    made = work(chat(LONG))
    assert len(made.blocks) == made.size // BLOCK_BYTES == 4
    assert made.tokens == round(made.size / 4)
    assert made.block_tokens == 512
    assert len(set(made.blocks)) == 4


def test_a_conversation_that_goes_on_begins_with_the_same_blocks():
    one, more = work(chat(LONG)), work(chat(LONG, "And then?", LONG))
    assert common(one, more) == 4
    assert len(more.blocks) == 8


def test_what_is_not_in_the_prompt_changes_nothing():
    plain = work(chat(LONG))
    assert work(chat(LONG, stream=True, temperature=0.1, max_tokens=3)).blocks == plain.blocks
    swapped = json.dumps({"messages": [{"content": LONG, "role": "user"}], "model": "m"}, indent=1)
    assert read("m", swapped.encode(), 4.0).blocks == plain.blocks


@pytest.mark.parametrize("part", [{"tools": [{"name": "t"}]}, {"system": "s"}, {"cache_salt": "x"}])
def test_what_comes_first_in_the_prompt_changes_every_block(part):
    assert common(work(chat(LONG)), work(chat(LONG, **part))) == 0


def test_models_do_not_share_blocks():
    assert common(work(chat(LONG)), work(chat(LONG), model="other")) == 0


def test_a_difference_changes_all_blocks_after_it():
    changed = LONG[:5000] + "x" + LONG[5001:]
    assert common(work(chat(LONG)), work(chat(changed))) == 2


def test_text_of_completions_and_other_apis_counts_too():
    for document in (
        {"prompt": LONG},
        {"input": LONG},
        {"prompt": list(range(3000))},
        {"instructions": LONG},
    ):
        assert work(document).blocks


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,DATA"}},
        {"type": "video_url", "video_url": {"url": "data:video/jpeg;base64,DATA,DATA"}},
        {"type": "input_audio", "input_audio": {"data": "DATA", "format": "wav"}},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "DATA"}},
        {"images": ["DATA", "DATA"]},
        {"prompt_string": "what is it?", "multimodal_data": ["DATA"]},
    ],
)
def test_an_image_or_a_sound_counts_little_but_is_told_from_another(part):
    text = json.dumps({"tools": chat(LONG)["messages"], "messages": [part]})

    def holding(data: str) -> Work:
        return read("m", text.replace("DATA", data).encode(), 4.0)

    one, other = holding("A+/" * 30_000), holding("B+/" * 30_000)
    assert one.tokens == other.tokens < len(LONG) / 4 + 100
    assert common(one, other) == 4
    assert holding("A+\\/" * 30_000).tokens == one.tokens, "as PHP writes a slash"


def test_text_that_holds_base64_is_text():
    for text in ("A" * 9000, f'base64: "data:image/png;base64,{"A" * 9000}"'):
        assert work(chat(text)).tokens > 9000 / 4


@pytest.mark.parametrize("body", [b"", b"[1]", b"\xff", b"{", b"[" * 100_000])
def test_what_is_no_request_counts_by_its_length(body):
    assert read("m", body, 4.0, "s") == Work(tokens=round(len(body) / 4), session="s", size=len(body))


@pytest.mark.parametrize(
    ("more", "session"),
    [
        ({}, ""),
        ({"prompt_cache_key": "k"}, "k"),
        ({"prompt_cache_key": 3}, ""),
        ({"metadata": {"user_id": "u"}}, "u"),
        ({"metadata": "x"}, ""),
    ],
)
def test_a_session_is_what_the_client_calls_it(more, session):
    assert work(chat("hi", **more)).session == session
    assert work(chat("hi", **more), session="header").session == "header"
