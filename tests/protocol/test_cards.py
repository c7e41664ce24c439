"""Model cards: what engines say of their models, as they really say it, and what lists show of it."""

import json
from typing import Any

import pytest

from anvil_mux.protocol import api, ollama
from anvil_mux.protocol.cards import CAPABILITIES, NOTHING_KNOWN, ModelCard, read, together

VLLM = {
    "object": "list",
    "data": [
        {"id": "qwen", "object": "model", "owned_by": "vllm", "parent": None, "max_model_len": 32768},
        {"id": "sql", "object": "model", "owned_by": "vllm", "parent": "qwen", "max_model_len": None},
    ],
}
LLAMACPP_LIST = {
    "models": [{"name": "/m/tiny.gguf", "capabilities": ["completion"]}],
    "data": [
        {
            "id": "/m/tiny.gguf",
            "architecture": {"input_modalities": ["text", "image"], "output_modalities": ["text"]},
            "meta": {"vocab_type": 1, "n_ctx": 512, "n_ctx_train": 4096},
        }
    ],
}
LLAMACPP = {
    "default_generation_settings": {"params": {"max_tokens": -1, "n_ctx": "?"}, "n_ctx": 2048},
    "total_slots": 4,
    "modalities": {"vision": False, "video": False, "audio": True},
    "chat_template_caps": {"supports_tools": True, "supports_preserve_reasoning": True, "supports_x": 1},
    "is_sleeping": False,
}
SHOW = {
    "parameters": "num_ctx 8192",
    "model_info": {"general.architecture": "llama", "llama.context_length": 131072},
    "capabilities": ["completion", "tools", "thinking"],
}
SGLANG = {"is_generation": False, "has_image_understanding": True, "has_audio_understanding": False}
OLLAMA_CARD = {name: name in ("completion", "tools", "thinking") for name in CAPABILITIES}


@pytest.mark.parametrize(
    ("found", "context", "capabilities"),
    [
        (VLLM, 32768, {}),
        (LLAMACPP_LIST, 512, {"vision": True, "audio": False}),
        (LLAMACPP, 2048, {"tools": True, "thinking": True, "vision": False, "audio": True}),
        (
            {"models": [{"name": "x", "context_length": 1}, {"name": "qwen:latest", "context_length": 4096}]},
            4096,
            {},
        ),
        (SHOW, None, OLLAMA_CARD),
        (SGLANG, None, {"vision": True, "audio": False, "embeddings": True}),
        ({"id": "m", "parameters": {"max_seq_len": 8192, "use_vision": True}}, 8192, {"vision": True}),
        ({"data": [{"id": "qwen", "max_context_length": 9, "loaded_context_length": 8}]}, 8, {}),
        ({"data": [{"id": "qwen", "capabilities": ["tool_use", "?", 7]}]}, None, {"tools": True}),
    ],
    ids=[
        "vllm",
        "llamacpp list",
        "llamacpp",
        "ollama ps",
        "ollama show",
        "sglang",
        "tabby",
        "lmstudio",
        "words",
    ],
)
def test_every_engine_is_understood(found, context, capabilities):
    assert read(json.loads(json.dumps(found)), "qwen") == ModelCard(context, capabilities)


@pytest.mark.parametrize(
    "found",
    [
        *(None, [], {}, "x", {"data": None}, {"data": [7, None]}, {"models": []}, {"capabilities": [[]]}),
        *({"max_model_len": each} for each in (0, -1, True, 1.5, "4096", 10**30, None)),
        {"data": [{"id": "one", "max_model_len": 1}, {"id": "two", "max_model_len": 2}]},
        {"architecture": {"input_modalities": "image"}, "modalities": [], "meta": 7, "parameters": "n_ctx 1"},
        {"modalities": {"vision": 1, "audio": None}, "chat_template_caps": {"supports_tools": "yes"}},
    ],
)
def test_what_says_nothing_of_the_model_is_not_taken_for_it(found):
    assert read(found, "qwen") == NOTHING_KNOWN


def test_of_what_another_machine_wrote_only_what_can_be_is_kept():
    odd = ModelCard(-5, {"tools": True, "flies": True})
    assert odd.sound() == ModelCard(None, {"tools": True})
    assert ModelCard(4096, {"audio": False}).sound() == ModelCard(4096, {"audio": False})


def test_what_is_set_wins_and_of_replicas_what_holds_for_each_counts():
    said = ModelCard(8192, {"tools": True, "vision": True})
    assert ModelCard(4096, {"vision": False}).over(said) == ModelCard(4096, {"tools": True, "vision": False})
    other = ModelCard(4096, {"tools": False})
    assert together([said, other, NOTHING_KNOWN]) == ModelCard(4096, {"tools": False, "vision": True})
    assert together([]) == NOTHING_KNOWN


# In the lists


def entry(card: ModelCard, **more: bool) -> dict[str, Any]:
    made = api.model_entry("m", created=0, state="stopped", card=card, **more)
    return {key: made[key] for key in made if key not in api.model_entry("m", created=0, state="stopped")}


SEES = ModelCard(4096, {"tools": True, "vision": True, "audio": False})
EMBEDS = ModelCard(512, {"embeddings": True})


def test_the_length_is_told_by_every_name_that_clients_look_for():
    said = entry(ModelCard(4096))
    assert said == {
        "max_model_len": 4096,
        "context_length": 4096,
        "max_input_tokens": 4096,
        "meta": {"n_ctx": 4096},
    }
    assert entry(NOTHING_KNOWN) == {}


def test_what_a_model_can_do_is_told_where_it_is_known():
    said = entry(SEES)
    assert said["capabilities"] == ["completion", "tools", "vision"]
    assert entry(EMBEDS)["capabilities"] == ["embeddings"]
    assert said["architecture"] == {"input_modalities": ["text", "image"], "output_modalities": ["text"]}
    assert entry(EMBEDS)["architecture"]["output_modalities"] == ["embeddings"]
    assert "capabilities" not in entry(SEES, anthropic=True)
    assert entry(SEES, anthropic=True)["max_input_tokens"] == 4096


@pytest.mark.parametrize(
    ("card", "state", "expected"),
    [
        (NOTHING_KNOWN, "ready", {"type": "llm"}),
        (SEES, "stopped", {"type": "vlm", "max_context_length": 4096, "capabilities": ["tool_use"]}),
        (EMBEDS, "ready", {"type": "embeddings", "max_context_length": 512, "loaded_context_length": 512}),
    ],
)
def test_lm_studios_list_has_its_words(card, state, expected):
    [said] = json.loads(api.lmstudio_list({"m": (state, card)}))["data"]
    assert {key: said[key] for key in said if key not in ("id", "object", "publisher", "state")} == expected


@pytest.mark.parametrize(
    ("card", "expected"),
    [
        (NOTHING_KNOWN, ["completion", "tools", "vision", "thinking"]),
        (SEES, ["completion", "tools", "vision", "thinking"]),
        (ModelCard(1, {"tools": False, "audio": True}), ["completion", "vision", "thinking", "audio"]),
        (EMBEDS, ["embedding"]),
        (ModelCard(1, {"embeddings": True, "completion": True, "vision": False, "thinking": False}), None),
        (ModelCard(1, {"reranking": True}), []),
    ],
)
def test_ollamas_clients_are_kept_from_nothing_that_may_work(card, expected):
    shown = json.loads(ollama.show("m", 0.0, card))
    assert shown["capabilities"] == (["completion", "tools"] if expected is None else expected)


def test_ollamas_clients_find_the_length_below_the_architecture_and_among_the_parameters():
    shown = json.loads(ollama.show("m", 0.0, SEES))
    architecture = shown["model_info"]["general.architecture"]
    assert shown["model_info"][f"{architecture}.context_length"] == 4096
    assert shown["parameters"] == "num_ctx 4096"
    [running] = json.loads(ollama.running({"m": (9.0, SEES)}, 0.0))["models"]
    assert running["context_length"] == 4096
    assert "context_length" not in json.loads(ollama.running({"m": (9.0, NOTHING_KNOWN)}, 0.0))["models"][0]
