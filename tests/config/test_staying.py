"""The settings by which models stay and come back: what is read, and what bad input gets."""

from __future__ import annotations

from math import inf
from pathlib import Path

import pytest

from anvil_mux.config.values import AnyOf, Rule
from tests.config.files import SERVICE, one, plain, problems, table

TWO = "x-anvil: {gpus: ['0', '1']%s}\nservices: {a: {image: x, x-anvil: {%s}}, b: {image: x, x-anvil: {%s}}}"


@pytest.mark.parametrize(
    ("said", "expected"),
    [("", 30.0), ("none", inf), ("0", 0.0), ("90", 90.0), ("20m", 1200.0), ("null", 30.0)],
)
def test_how_long_a_service_may_drain(tmp_path: Path, said: str, expected: float) -> None:
    (a,) = plain(tmp_path, SERVICE % f"drain_timeout: {said}").backends
    assert a.drain_timeout == expected


def test_labels_say_it_too(tmp_path: Path) -> None:
    a = one(tmp_path, "labels: {anvil.drain_timeout: none, anvil.home: 'yes', anvil.home_after: 1m}")
    assert (a.drain_timeout, a.home, a.home_after) == (inf, True, 60.0)


def test_homes_that_fit_beside_each_other_may_share_a_gpu(tmp_path: Path) -> None:
    sized = TWO % ("", "gpus: ['0'], vram: 4GiB, home: true", "gpus: ['0'], vram: 4GiB, home: true")
    text = sized.replace("gpus: ['0', '1']", "gpus: {'0': {vram: 8GiB}}", 1)
    assert [each.home for each in plain(tmp_path, text).backends] == [True, True]


def test_what_has_no_effect_is_a_warning(tmp_path: Path) -> None:
    found = plain(tmp_path, TWO % ("", "home: true", "home_after: 1m"))
    assert [each.partition("services.")[2] for each in found.warnings if "has no effect" in each] == [
        "b.x-anvil.home_after: has no effect without home: true",
        "a.x-anvil.home: has no effect: it needs no GPU, so it is evicted for no other",
    ]


# Names that stand for several models

ANY = """x-anvil: {any_of: {%s}}
services: {qwen: {image: x, x-anvil: {aliases: [q]}},
  gemma: {image: x, x-anvil: {presets: {fast: {set: {n: 1}}}}}}
"""


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("chat: [qwen, gemma]", AnyOf((Rule(("qwen", "gemma")),))),
        ("chat: gemma", AnyOf((Rule(("gemma",)),))),
        ("chat: [gemma, q, qwen]", AnyOf((Rule(("gemma", "qwen")),))),
        ("chat: {models: [qwen, gemma], swap: never}", AnyOf((Rule(("qwen", "gemma")),), swaps=False)),
        ("chat: {models: [qwen, gemma]}", AnyOf((Rule(("qwen", "gemma")),))),
    ],
)
def test_a_name_may_stand_for_several_models(tmp_path: Path, said: str, expected: AnyOf) -> None:
    assert plain(tmp_path, ANY % said).any_of == {"chat": expected}


def test_who_names_no_model_may_get_any_of_several(tmp_path: Path) -> None:
    text = (ANY % "chat: [qwen, gemma]").replace("any_of", "default_model: chat, any_of", 1)
    assert plain(tmp_path, text).default_model == "chat"


def test_a_variable_may_hold_it(tmp_path: Path) -> None:
    found = plain(tmp_path, ANY % "", environ={"ANVIL_ANY_OF": "{chat: [gemma]}"})
    assert found.any_of == {"chat": AnyOf((Rule(("gemma",)),))}


# Names that choose by the request

AUTO = """x-anvil: {any_of: {auto: %s}}
services:
  vision: {image: x, x-anvil: {}}
  long: {image: x, x-anvil: {aliases: [l]}}
  small: {image: x, x-anvil: {presets: {fast: {set: {n: 1}}}}}
"""
IMAGES, LONG = (("images", True),), (("tokens_over", 32000),)


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (
            "[{model: vision, when: {images: true}}, {model: l, when: {tokens_over: 32000}}, small]",
            (Rule(("vision",), IMAGES), Rule(("long",), LONG), Rule(("small",))),
        ),
        # neighbours with the same conditions are equals
        ("[{model: [vision, long], when: {images: yes}}]", (Rule(("vision", "long"), IMAGES),)),
        (
            "[{model: vision, when: {images: true}}, {model: [long, vision], when: {images: 'on'}}, l, fast]",
            (Rule(("vision", "long"), IMAGES), Rule(("long", "fast"))),
        ),
        (
            "[{model: vision, when: {tools: no, images: on}}, {model: long, when: {images: on, tools: no}}]",
            (Rule(("vision", "long"), (("images", True), ("tools", False))),),
        ),
        (
            "[{model: vision, when: {images: true}}, small, {model: long, when: {images: true}}]",
            (Rule(("vision",), IMAGES), Rule(("small",)), Rule(("long",), IMAGES)),
        ),
        ("[{model: vision}, {model: small, when: }]", (Rule(("vision", "small")),)),
        (
            "{models: [{model: vision, when: {images: true, audio: }}, small]}",
            (Rule(("vision",), IMAGES), Rule(("small",))),
        ),
    ],
)
def test_a_name_may_choose_by_the_request(tmp_path: Path, said: str, expected: tuple[Rule, ...]) -> None:
    assert plain(tmp_path, AUTO % said).any_of == {"auto": AnyOf(expected)}


@pytest.mark.parametrize(
    ("said", "warning"),
    [
        ("[{model: vision, when: {images: true}}, small]", None),
        (
            "[small, {model: vision, when: {images: true}}]",
            "any_of.auto: small has no conditions and takes every request before vision if images: true: put "
            "what has no `when` last",
        ),
        (
            "[{model: vision, when: {images: true}}]",
            "any_of.auto: a request that none of its conditions fits is refused: end it with a model that "
            "has no `when`",
        ),
    ],
)
def test_rules_that_may_not_be_meant_are_warned_of(tmp_path: Path, said: str, warning: str | None) -> None:
    found = [each for each in plain(tmp_path, AUTO % said).warnings if each.startswith("any_of")]
    assert found == ([warning] if warning else [])


# Presets among them

PRESETS = """x-anvil: {any_of: {%s}}
services:
  qwen: {image: x, x-anvil: {presets: {think: {set: {top_k: 1}}, fast: {set: {top_k: 2}}}}}
  gemma: {image: x, x-anvil: {presets: {law: {system: Yes.}}}}
"""


def test_it_may_name_presets_which_keep_their_names(tmp_path: Path) -> None:
    found = plain(tmp_path, PRESETS % "chat: [think, law, gemma]")
    assert found.any_of == {"chat": AnyOf((Rule(("think", "law", "gemma")),))}


def test_who_names_no_model_may_get_a_preset_of_any(tmp_path: Path) -> None:
    text = (PRESETS % "chat: [think, law]").replace("any_of", "default_model: chat, any_of", 1)
    assert plain(tmp_path, text).default_model == "chat"


# What cannot be

REFUSED = {
    SERVICE: """
        drain_timeout: never -> compose.yaml:1: services.a.x-anvil.drain_timeout: must be seconds, a time such
            as 30s or 2m, or none (as long as it takes), not 'never'
        drain_timout: none -> x-anvil.drain_timout: unknown key; did you mean drain_timeout?
        home: sometimes -> services.a.x-anvil.home: must be true or false, not 'sometimes'
        gpus: ['0'], home: true, ttl: 5m -> services.a.x-anvil.home: cannot hold with ttl
    """,
    "x-anvil: {%s}\n" + SERVICE % "": """
        drain_timeout: none -> x-anvil.drain_timeout: must be seconds
        any_of: [a] -> x-anvil.any_of: must hold {name: [models]}
    """,
    TWO.replace("%s", "", 1).replace("%s", "%s, home: true"): """
        gpus: ['0', '1'] | gpus: ['1'] -> services.b.x-anvil.home: a is at home on GPU 1 too, and both do not
            fit: one of them
    """,
    ANY: """
        chat: [qwem] -> compose.yaml:1: x-anvil.any_of.chat: no service serves qwem; did you mean qwen?
        qwen: [gemma] -> x-anvil.any_of.qwen: is a name of the model qwen already: call it otherwise
        q: [gemma] -> x-anvil.any_of.q: is a name of the model qwen already: call it otherwise
        fast: [qwen] -> x-anvil.any_of.fast: is a name of the model gemma already: call it otherwise
        a: [b], b: [qwen] -> x-anvil.any_of.a: b stands for several models itself: name the models
        a: [a] -> x-anvil.any_of.a: a stands for several models itself: name the models
        chat: [] -> x-anvil.any_of.chat: must name at least one model
        chat: 3.5 -> x-anvil.any_of.chat: must be text, not 3.5
        chat: {model: [qwen]} -> x-anvil.any_of.chat.model: unknown key; did you mean models?
        chat: {models: [qwen], swap: no} -> x-anvil.any_of.chat.swap: must be never or allowed, not 'no'
        chat: {swap: never} -> x-anvil.any_of.chat: must name at least one model
    """,
    AUTO: """
        [{model: vison, when: {images: true}}, small] ->
            compose.yaml:1: x-anvil.any_of.auto: no service serves vison; did you mean vision?
        [{model: auto, when: {images: true}}] ->
            x-anvil.any_of.auto: auto stands for several models itself: name the models
        [small, {model: vision, when: {image: true}}] ->
            compose.yaml:1: x-anvil.any_of.auto.1.when.image: unknown key; did you mean images?
        [{model: vision, when: {images: maybe}}] ->
            x-anvil.any_of.auto.0.when.images: must be true or false, not 'maybe'
        [{model: vision, when: {tokens_over: 32k}}] ->
            x-anvil.any_of.auto.0.when.tokens_over: must be a whole number of at least 1, not '32k'
        [{model: vision, when: images}] -> x-anvil.any_of.auto.0.when: must hold conditions, such as
            {images: true} or {tokens_over: 32000}, not 'images'
        [{model: vision, when: {images: }}] -> x-anvil.any_of.auto.0.when: must hold conditions
        [{when: {images: true}}] -> x-anvil.any_of.auto.0: must name a `model`
        [{models: [vision]}] -> x-anvil.any_of.auto.0.models: unknown key; did you mean model?
        {model: vision, when: {images: true}} -> x-anvil.any_of.auto.model: unknown key
    """,
    PRESETS: """
        chat: [thnk] -> x-anvil.any_of.chat: no service serves thnk; did you mean think?
        law: [qwen] -> x-anvil.any_of.law: is a name of the model gemma already: call it otherwise
    """,
}
"""File -> what stands in it, and what is said of that."""


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (file % tuple(said.split("|")), problem)
        for file, rows in REFUSED.items()
        for said, problem in table(rows)
    ],
)
def test_what_cannot_be_is_told(tmp_path: Path, text: str, problem: str) -> None:
    found = problems(tmp_path, text)
    assert any(problem in each for each in found), found
