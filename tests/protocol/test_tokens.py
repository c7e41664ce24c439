"""The token counts of whole answers."""

import json

import pytest

from anvil_mux.protocol.tokens import NO_TOKENS, TailReader, tokens_in

VLLM = {
    "choices": [{"message": {"content": "x"}}],
    "service_tier": None,
    "usage": {"prompt_tokens": 1010, "total_tokens": 1020, "completion_tokens": 10},
    "prompt_logprobs": None,
    "prompt_token_ids": list(range(1000, 2000)),
    "kv_transfer_params": None,
}
ECHO = {"usage": {"prompt_tokens": 0, "completion_tokens": 0}}


@pytest.mark.parametrize(
    ("members", "tokens"),
    [
        (
            b'"usage": {"prompt_tokens": 12, "prompt_tokens_details": {"cached_tokens": 8}}',
            (None, 12, 8),
        ),
        (b'"usage":{"prompt_tokens":12,"completion_tokens":3}', (3, 12, None)),
        (b'"usage":{"input_tokens":5,"cache_read_input_tokens":90,"output_tokens":1}', (1, 95, 90)),
        (b'"usage":{"input_tokens":50,"input_tokens_details":{"cached_tokens":32}}', (None, 50, 32)),
        (b'"timings":{"cache_n":236,"prompt_n":1},"usage":{"prompt_tokens":237}', (None, 237, 236)),
        (b'"timings":{"cache_n":236,"prompt_n":1,"prompt_ms":9.5,"predicted_n":64}', (64, 237, 236)),
        (b'"timings":{"prompt_n":12,"predicted_n":3}', (3, 12, 0)),
        (b'"timings":{"prompt_ms":12}', (None, None, None)),
        (b'"content":"\\"usage\\": {\\"prompt_tokens\\": 3}"', (None, None, None)),
        (b'"usage":{"content":"\\"prompt_tokens\\": 3"}', (None, None, None)),
        (b'"usage":{"prompt_tokens":99999999999}', (None, None, None)),
        (b'"usage":{"prompt_tokens":true,"completion_tokens":-1}', (None, None, None)),
        (b'"usage":null,"timings":[]', (None, None, None)),
        (b'"input_tokens":7', (None, None, None)),
        (b"", (None, None, None)),
    ],
)
def test_a_whole_answer_reports_its_tokens(members, tokens):
    assert tokens_in(b'{"id":"x",%b}' % members if members else b"{}") == tokens


def test_lists_of_tokens_behind_usage_hide_nothing():
    assert tokens_in(json.dumps(VLLM).encode()) == (10, 1010, None)


@pytest.mark.parametrize("place", ["metadata", "choices"])
def test_an_echo_further_in_counts_for_nothing(place):
    usage = {"usage": {"prompt_tokens": 12, "completion_tokens": 3}}
    for answer in ({place: ECHO, **usage}, {**usage, place: ECHO}, {**usage, place: [ECHO]}):
        assert tokens_in(json.dumps(answer).encode()) == (3, 12, None)
    assert tokens_in(json.dumps({place: ECHO}).encode()) == NO_TOKENS


@pytest.mark.parametrize("size", [7, 16384])
def test_tokens_are_read_from_long_answers_that_pass_in_pieces(size):
    long = {**VLLM, "data": list(range(50_000)), "metadata": ECHO, "prompt_token_ids": list(range(100_000))}
    for answer in (VLLM, long):
        body = json.dumps(answer).encode()
        reader = TailReader()
        for start in range(0, len(body), size):
            reader.feed(body[start : start + size])
        assert reader.tokens == (10, 1010, None)
