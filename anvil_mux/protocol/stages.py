"""One request in two stages at two engines: its prompt is computed by one, its answer written by the other.

This is the protocol of vLLM's disaggregated prefill as its own proxy speaks it. The prefill engine is asked
for one token and told that somebody else will decode; it answers where the keys and values of the prompt
are (``kv_transfer_params``). The decode engine is asked what the client asked, with these parameters, and
fetches them. An engine that gives none (a prompt of less than a block) leaves nothing to fetch: the decode
engine computes the prompt itself. What a client says of such transfers is never passed on.
"""

from __future__ import annotations

from typing import Any

from anvil_mux.protocol import foreign
from anvil_mux.protocol.api import written

PATHS = ("/v1/chat/completions", "/v1/completions")
"""The paths that can be served in two stages."""
TRANSFER = "kv_transfer_params"
REMOTE_DECODE = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
WITHOUT = ("stream_options", "min_tokens", "min_completion_tokens")
"""The fields that do not go with a single token in one piece."""


def first(asked: dict[str, Any], model: str) -> bytes:
    """The body for the prefill engine."""
    kept = {key: value for key, value in asked.items() if key not in WITHOUT}
    if "max_completion_tokens" in kept:
        kept["max_completion_tokens"] = 1
    return written({**kept, "model": model, "stream": False, "max_tokens": 1, TRANSFER: REMOTE_DECODE})


def second(asked: dict[str, Any], said: bytes) -> dict[str, Any]:
    """The body for the decode engine, with the prefill engine's answer; ValueError if that is none."""
    answer = foreign.read(said)
    if not isinstance(answer, dict):
        raise ValueError("it is not an object")
    given = answer.get(TRANSFER)
    kept = {key: value for key, value in asked.items() if key != TRANSFER}
    return {**kept, TRANSFER: given} if given else kept
