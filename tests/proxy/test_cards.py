"""Lists say how long a context a model takes and what it can do, while it is loaded and while it is not."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from anvil_mux.config.config import Backend
from anvil_mux.config.service import Service
from anvil_mux.config.values import AnyOf, Rule
from anvil_mux.host.seam import CardRead
from anvil_mux.protocol.cards import ModelCard
from tests.fake_engine import ASK_A, JSON_OK, Rig

A = Backend("a", "a", ("0",), service=Service(digest="d"))
SAID = ModelCard(4096, {"tools": True, "vision": False})


def entries(rig: Rig, path: bytes = b"/v1/models", extra: bytes = b"") -> dict[str, Any]:
    return {each["id"]: each for each in rig.get(path, extra=extra).json["data"]}


def read(make_rig: Callable[..., Rig]) -> Rig:
    """A rig whose engine has said what its model is."""
    rig = make_rig(backends=(A,))
    rig.mux.overview.note_card(CardRead("a", "d", SAID))
    return rig


def test_every_list_shows_what_the_engine_said_while_it_is_not_loaded(make_rig):
    rig = make_rig(backends=(A, Backend("b", "b", ("0",))))
    rig.mux.overview.note_card(CardRead("a", "d", SAID))
    for path in (b"/v1/models", b"/models"):
        assert entries(rig, path)["a"]["meta"] == {"n_ctx": 4096}
        assert "context_length" not in entries(rig, path)["b"]
    assert rig.json(b"/v1/models/a")["context_length"] == 4096
    assert entries(rig, b"/api/v0/models")["a"]["max_context_length"] == 4096
    client = rig.client()
    assert client.ask(b'{"model":"a"}', path=b"/api/show").json["capabilities"] == [
        "completion",
        "tools",
        "thinking",
    ]
    tags = {each["name"]: each["capabilities"] for each in client.json(b"/api/tags")["models"]}
    assert tags == {
        "a": ["completion", "tools", "thinking"],
        "b": ["completion", "tools", "vision", "thinking"],
    }
    assert not rig.events.of("queued")


def test_a_loaded_model_is_among_those_that_run_with_its_length(make_rig):
    rig = read(make_rig)
    rig.engine.answer = lambda _: JSON_OK
    client = rig.client()
    assert client.ask(ASK_A).status == 200
    assert client.json(b"/api/ps")["models"][0]["context_length"] == 4096


def test_clients_of_anthropic_get_no_list_where_they_look_for_an_object(make_rig):
    rig = read(make_rig)
    shown = entries(rig, extra=b"anthropic-version: 2023-06-01\r\n")["a"]
    assert shown["max_input_tokens"] == 4096
    assert "capabilities" not in shown
    assert entries(rig)["a"]["capabilities"] == ["completion", "tools"]


def test_settings_win_and_show_before_the_first_load(make_rig):
    rig = make_rig(backends=(replace(A, context=1024, capabilities=("vision",)), replace(A, name="a-2")))
    assert entries(rig)["a"]["context_length"] == 1024
    rig.mux.overview.note_card(CardRead("a", "d", SAID))
    rig.mux.overview.note_card(CardRead("a-2", "d", ModelCard(2048, {"vision": True})))
    shown = entries(rig)["a"]
    assert (shown["context_length"], shown["capabilities"]) == (1024, ["completion", "vision"])


def test_presets_have_their_models_card_and_any_of_what_holds_for_each(make_rig):
    b = Backend("b", "b", ("0",), context=512)
    any_of = {"either": AnyOf((Rule(("a", "b")),))}
    rig = make_rig(backends=(A, b), any_of=any_of)
    rig.mux.overview.note_card(CardRead("a", "d", SAID))
    assert entries(rig)["either"]["context_length"] == 512
    assert entries(rig, b"/api/v0/models")["either"]["max_context_length"] == 512


def test_what_was_said_of_another_description_is_forgotten(make_rig):
    rig = read(make_rig)
    rig.mux.overview.note_card(CardRead("a", "of before", ModelCard(1)))
    rig.mux.overview.note_card(CardRead("gone", "d", ModelCard(1)))
    assert rig.mux.overview.cards() == {"a": SAID}
    changed = replace(A, service=Service(digest="e"))
    rig.mux.facts.reconfigure(replace(rig.config, backends=(changed,)), {})
    assert rig.mux.overview.cards() == {"a": ModelCard()}
    rig.mux.facts.reconfigure(rig.config, {})
    assert rig.mux.overview.cards() == {"a": SAID}


def test_a_hosts_word_counts_only_as_far_as_a_card_can_say_it(make_rig):
    rig = make_rig(backends=(A,))
    rig.mux.overview.note_card(CardRead("a", "d", ModelCard(-1, {"flies": True, "tools": True})))
    assert rig.mux.overview.cards() == {"a": ModelCard(None, {"tools": True})}


def test_the_props_of_a_model_that_is_not_loaded_load_nothing_where_they_are_known(make_rig):
    rig = make_rig(backends=(A,))
    rig.engine.answer = lambda _: JSON_OK
    rig.mux.overview.note_card(CardRead("a", "d", SAID))
    for query in (b"", b"&autoload=false"):
        said = rig.json(b"/props?model=a" + query)
        assert said["default_generation_settings"]["n_ctx"] == 4096
        assert said["chat_template_caps"] == {"supports_tools": True, "supports_tool_calls": True}
        assert said["modalities"] == {"vision": False, "audio": False}
    assert not rig.events.of("queued")
    assert rig.get(b"/props?model=a&autoload=true").body == rig.get(b"/props?model=a").body
    assert len(rig.events.of("loading")) == 1
