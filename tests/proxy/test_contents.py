"""What a request holds, in the shapes of every API, and which rule it fits."""

from typing import Any

import pytest

from anvil_mux.config.values import Rule
from anvil_mux.protocol import api, ollama
from anvil_mux.proxy.question import Contents, first_fit, form_contents, json_contents

BASE64 = "A" * 40_000


def asked(*content: object, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [*content]}], **fields}


def said(contents: Contents) -> str:
    return " ".join(name for name in ("images", "audio", "tools") if getattr(contents, name))


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"messages": [{"role": "user", "content": "an image_url, input_audio and tools"}]}, ""),
        (asked({"type": "text", "text": "image_url"}), ""),
        # OpenAI's chat completions, and vLLM's additions
        (asked({"type": "image_url", "image_url": {"url": "http://x/y.png"}}), "images"),
        (asked({"image_url": {"url": "http://x/y.png"}}), "images"),
        (asked({"type": "video_url", "video_url": {"url": "http://x/y.mp4"}}), "images"),
        (asked({"type": "input_audio", "input_audio": {"data": "UklGR", "format": "wav"}}), "audio"),
        (asked({"type": "audio_url", "audio_url": {"url": "http://x/y.wav"}}), "audio"),
        (asked(tools=[{"type": "function"}]), "tools"),
        (asked(functions=[{"name": "f"}]), "tools"),
        (asked(tools=[]), ""),
        (asked(tools=None), ""),
        # OpenAI's responses
        ({"input": "image"}, ""),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]}]},
            "images",
        ),
        (
            {"input": [{"type": "computer_call_output", "output": {"type": "computer_screenshot"}}]},
            "images",
        ),
        (
            {"input": [{"type": "function_call_output", "output": [{"type": "input_image"}]}]},
            "images",
        ),
        ({"input": "hi", "tools": [{"type": "web_search"}]}, "tools"),
        # Anthropic's messages
        (asked({"type": "image", "source": {"type": "base64", "data": "iVBOR"}}), "images"),
        (asked({"type": "tool_result", "content": [{"type": "image", "source": {}}]}), "images"),
        (asked({"type": "tool_use", "input": {"type": "image", "image": "x"}}), ""),
        (asked(system=[{"type": "text", "text": "x"}], tools=[{"name": "f"}]), "tools"),
        # embeddings, completions and llama.cpp's own
        ({"input": ["a", "b"]}, ""),
        ({"input": [1, 2, 3]}, ""),
        ({"input": [{"image": "http://x/y.png"}, {"text": "x"}]}, "images"),
        ({"prompt": "image"}, ""),
        ({"prompt": {"prompt_string": "x", "multimodal_data": ["iVBOR"]}}, "images"),
        # nonsense
        ({}, ""),
        ({"messages": 3, "input": None, "tools": False}, ""),
        ({"messages": [{"type": ["image"]}, None, [[{"type": {}}]]]}, ""),
    ],
)
def test_what_a_body_holds(body, expected):
    assert said(json_contents(body)) == expected


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        ("/api/chat", {"messages": [{"role": "user", "content": "x", "images": ["iVBOR"]}]}, "images"),
        ("/api/chat", {"messages": [{"role": "user", "content": "x"}], "tools": [{}]}, "tools"),
        ("/api/generate", {"prompt": "x", "images": ["/9j/"]}, "images"),
        ("/api/generate", {"prompt": "x"}, ""),
        ("/api/embed", {"input": ["x"]}, ""),
    ],
)
def test_what_a_body_of_ollamas_holds(path, body, expected):
    assert said(json_contents(ollama.TRANSLATE[path]({"model": "auto", **body}).question)) == expected


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/v1/audio/transcriptions", "audio"),
        ("/audio/translations", "audio"),
        ("/v1/images/edits", "images"),
    ],
)
def test_what_a_form_holds(path, expected):
    route = api.match("POST", path)
    assert route
    assert said(form_contents(route)) == expected


def test_four_bytes_of_a_prompt_are_a_token():
    assert json_contents({"prompt": "x" * 40_000, "stop": "y" * 4000}).tokens == 10_001
    assert json_contents({"input": "é" * 2000}).tokens == 1001
    assert json_contents({"input": [[1, 2, 3], [4, 5]]}).tokens == 8
    tools = [{"name": "f", "description": "x" * 4000}]
    assert 2000 < json_contents(asked("hi", tools=tools, system="y" * 4000)).tokens < 2030
    assert json_contents({"prompt": "\ud800"}).tokens == 2  # half a surrogate pair, which JSON can have


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{BASE64}"}},
        {"type": "image", "source": {"type": "base64", "data": BASE64}},
        {"type": "input_audio", "input_audio": {"data": BASE64, "format": "wav"}},
        {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": BASE64}},
        {"type": "file", "file": {"filename": "x.pdf", "file_data": BASE64}},
    ],
)
def test_what_is_no_text_is_next_to_no_tokens(part):
    assert 0 < json_contents(asked(part, {"type": "text", "text": "hi"})).tokens < 30


RULES = (
    Rule(("vision",), (("images", True),)),
    Rule(("long",), (("tools", False), ("tokens_over", 10))),
    Rule(("coder",), (("tools", True),)),
)


@pytest.mark.parametrize(
    ("contents", "expected"),
    [
        (Contents(), ""),
        (Contents(images=True, tools=True, tokens=99), "vision"),
        (Contents(tokens=11), "long"),
        (Contents(tokens=10), ""),
        (Contents(tokens=11, tools=True), "coder"),
    ],
)
def test_the_first_rule_whose_conditions_all_hold_chooses(contents, expected):
    rule = first_fit(RULES, contents)
    assert (rule.models[0] if rule else "") == expected
    assert first_fit((*RULES, Rule(("small",))), contents) == (rule or Rule(("small",)))
