"""Services that run elsewhere, and fallbacks, as compose files say them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from anvil_mux.config.values import URL, site
from anvil_mux.plugins import load
from anvil_mux.proxy.access import FallbackStep as Step
from anvil_mux.proxy.access import chains
from tests.config.files import plain, problems, table

KEY = {"CLOUD_KEY": "sk-1234"}


def far(said: str = "") -> str:
    return f"{{image: scratch, profiles: [elsewhere], x-anvil: {{url: 'https://cloud.example/v1'{said}}}}}"


def test_a_service_with_a_url_is_a_model_that_needs_nothing_of_this_machine(tmp_path: Path) -> None:
    text = (
        f"services: {{gpt: {far(', api_key_env: CLOUD_KEY, model: org/gpt, aliases: [g], concurrency: 4')}}}"
    )
    found = plain(tmp_path, text, environ=KEY)
    [gpt] = found.backends
    assert (gpt.name, gpt.model, gpt.aliases, gpt.concurrency) == ("gpt", "org/gpt", ("g",), 4)
    assert (gpt.url, gpt.gpus, gpt.host) == ("https://cloud.example/v1", (), "")
    assert gpt.service.api_key == "sk-1234"
    assert "sk-1234" not in repr(found)
    assert found.warnings == ()


def test_where_every_model_is_preloaded_a_server_elsewhere_is_not(tmp_path: Path) -> None:
    [gpt] = plain(tmp_path, f"x-anvil: {{preload: true, max_wait: 5}}\nservices: {{gpt: {far()}}}").backends
    assert (gpt.preload, gpt.max_wait) == (False, 5.0)


def test_the_key_may_stand_in_the_env_file(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("CLOUD_KEY=sk-of-the-file\n")
    [gpt] = plain(tmp_path, f"services: {{gpt: {far(', api_key_env: CLOUD_KEY')}}}").backends
    assert gpt.service.api_key == "sk-of-the-file"


def test_a_process_needs_no_command_and_no_image(tmp_path: Path) -> None:
    text = "x-anvil: {runtime: process}\nservices: {gpt: {x-anvil: {url: 'http://10.0.0.7:8000'}}}"
    found = plain(tmp_path, text)
    assert found.backends[0].url == "http://10.0.0.7:8000"
    assert found.warnings == ()


@pytest.mark.parametrize(
    ("url", "name", "chat", "tokens"),
    [
        ("https://api.openai.com", "api.openai.com", "/v1/chat/completions", "/tokenize"),
        ("https://api.openai.com/v1/", "api.openai.com", "/v1/chat/completions", "/tokenize"),
        ("https://host/openai/v1", "host", "/openai/v1/chat/completions", "/openai/tokenize"),
        ("https://host:8443/v1beta/o", "host:8443", "/v1beta/o/chat/completions", "/v1beta/o/tokenize"),
        ("http://[::1]:80", "[::1]", "/v1/chat/completions", "/tokenize"),
        ("http://h:443", "h:443", "/v1/chat/completions", "/tokenize"),
    ],
)
def test_paths_below_a_base_url(url: str, name: str, chat: str, tokens: str) -> None:
    server = site(URL.read(url))
    assert server.name == name
    assert (server.path("/v1/chat/completions"), server.path("/tokenize")) == (chat, tokens)


WRONG = """
    url: api.openai.com -> must be an address such as https://api.openai.com/v1
    url: 'ftp://host/v1' -> must be an address such as
    url: 'https://host:99999/v1' -> must be an address such as
    url: 'https://me:secret@host/v1' -> must hold no key or password
    url: 'https://host/v1?key=abc' -> must end with its path
    url: 'https://host/v1/chat/completions' -> must be the base URL of the API
    URL, vram: 8GiB -> vram: says nothing about a server elsewhere (url)
    URL, hosts: [a], gpu_count: 2 -> gpu_count: says nothing about a server
    URL, home: true -> home: says nothing about a server
    URL, prompt_cache: 1GiB -> prompt_cache: says nothing about a server
    URL, loras: {law: /law} -> loras: says nothing about a server
    URL, drain_timeout: none -> drain_timeout: says nothing about a server
    URL, api_key_env: NO_KEY -> the variable NO_KEY is not set, here or in .env
    URL, api_key_env: TWO -> the variable TWO holds more than a key
    URL, ca_file: none.pem -> none.pem cannot be used
    URL, api_kye_env: A -> did you mean api_key_env?
    api_key_env: CLOUD_KEY -> x-anvil.api_key_env: needs url beside it
"""


@pytest.mark.parametrize(("said", "problem"), table(WRONG))
def test_what_is_wrong_with_a_service_elsewhere(tmp_path: Path, said: str, problem: str) -> None:
    said = said.replace("URL", "url: 'https://host/v1'")
    text = f"services: {{gpt: {{image: scratch, profiles: [a], x-anvil: {{{said}}}}}}}"
    [found] = [each for each in problems(tmp_path, text, environ={**KEY, "TWO": "a b"}) if problem in each]
    assert found.startswith("compose.yaml:1: services.gpt.x-anvil")
    assert "secret" not in found or "me:secret" not in found


def test_a_label_says_no_more_than_the_setting(tmp_path: Path) -> None:
    text = "services: {a: {image: x, labels: {anvil.gpus: '0'}, x-anvil: {url: 'http://h/v1'}}}"
    assert any("gpus" in each and "says nothing" in each for each in problems(tmp_path, text))


def test_what_bites(tmp_path: Path) -> None:
    text = (
        "services: {gpt: {image: scratch, x-anvil: {url: 'http://far.example/v1', api_key_env: CLOUD_KEY}}}"
    )
    up, unencrypted = plain(tmp_path, text, environ=KEY).warnings
    assert "add `profiles: [elsewhere]`" in up
    assert "go to far.example unencrypted; use https" in unencrypted


def test_a_model_is_elsewhere_or_here(tmp_path: Path) -> None:
    text = f"services: {{a: {far(', model: m')}, b: {{image: x, x-anvil: {{model: m}}}}}}"
    [found] = problems(tmp_path, text)
    assert "m has other services: give this one a name of its own" in found


def test_it_may_have_presets(tmp_path: Path) -> None:
    found = plain(tmp_path, f"services: {{gpt: {far(', presets: {cold: {set: {temperature: 0}}}')}}}")
    assert found.names == {"gpt": "gpt", "cold": "gpt"}


# Fallbacks


def file(**said: str) -> str:
    services = [f"{name}: {{image: x, x-anvil: {{{text}}}}}" for name, text in said.items()]
    return f"services: {{{', '.join(services)}}}"


def fallbacks(folder: Path, **said: str) -> Any:
    return chains(plain(folder, file(**said)).backends)


def test_a_fallback_in_both_forms(tmp_path: Path) -> None:
    found = plain(
        tmp_path, file(a="fallback: b", b="fallback: {models: [c], after: 20s}", c="", d="fallback: [b, c]")
    )
    assert [(each.fallback, each.fallback_after) for each in found.backends] == [
        (("b",), None),
        (("c",), 20.0),
        ((), None),
        (("b", "c"), None),
    ]


def test_what_a_fallback_falls_back_on_follows_it(tmp_path: Path) -> None:
    found = fallbacks(
        tmp_path,
        a="fallback: {models: [nick, d], after: 20s}",
        b="aliases: [nick], fallback: {models: [c], after: 5s}",
        c="",
        d="",
    )
    assert found == {
        "a": (Step("a", 20.0), Step("b", 5.0), Step("c", 5.0), Step("d", None)),
        "b": (Step("b", 5.0), Step("c", None)),
    }


def test_each_model_is_tried_once(tmp_path: Path) -> None:
    found = fallbacks(tmp_path, a="fallback: [b, c]", b="fallback: [c]", c="")
    assert [step.model for step in found["a"]] == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("said", "chains"),
    [
        ({"a": "fallback: a"}, ["a -> a"]),
        (
            {"a": "fallback: b", "b": "fallback: [c]", "c": "fallback: a"},
            ["a -> b -> c -> a", "b -> c -> a -> b"],
        ),
        ({"a": "fallback: [c, b]", "b": "fallback: a", "c": ""}, ["a -> b -> a", "b -> a -> b"]),
        ({"a": "fallback: nick", "b": "aliases: [nick], fallback: [a]"}, ["a -> b -> a", "b -> a -> b"]),
    ],
)
def test_a_circle_is_refused_with_its_chain(tmp_path: Path, said: dict[str, str], chains: list[str]) -> None:
    found = problems(tmp_path, file(**said))
    for chain in chains:
        [told] = [each for each in found if each.endswith(f"leads back to where it began: {chain}")]
        assert f"services.{chain[0]}.x-anvil.fallback" in told


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        ({"qwen": "", "a": "fallback: [qwne]"}, "no service serves qwne; did you mean qwen?"),
        ({"a": "fallback: {models: []}"}, "must name a model"),
        ({"a": "fallback: {after: 20s}"}, "must name a model"),
        ({"b": "", "a": "fallback: {models: [b], afetr: 20s}"}, "did you mean after?"),
        ({"b": "", "a": "fallback: {models: [b], after: soon}"}, "must be seconds, or a time such as"),
        ({"c": "", "a": "model: m, fallback: [c]", "b": "model: m"}, "differs from that of a, a replica"),
        (
            {"b": "presets: {b-hot: {system: Hi}}", "a": "fallback: b-hot"},
            "b-hot is a preset of b, not a model: name b",
        ),
    ],
)
def test_what_is_wrong_with_a_fallback(tmp_path: Path, said: dict[str, str], problem: str) -> None:
    found = problems(tmp_path, file(**said))
    assert any(problem in each and "fallback" in each for each in found), found


def test_compose_is_told_what_it_wants_of_a_service_elsewhere(tmp_path: Path) -> None:
    from anvil_mux.command import Done
    from anvil_mux.errors import ConfigError

    refused = Done(1, "", 'service "gpt" has neither an image nor a build context specified')
    (tmp_path / "compose.yaml").write_text("services: {gpt: {x-anvil: {url: 'https://h/v1'}}}")
    match = r"compose.yaml:1: services.gpt: Compose wants `image: scratch` and `profiles`"
    with pytest.raises(ConfigError, match=match):
        load([tmp_path / "compose.yaml"], environ={}, compose=lambda argv, environ: refused)


def test_a_name_for_several_models_is_no_fallback(tmp_path: Path) -> None:
    found = problems(tmp_path, "x-anvil: {any_of: {chat: [b, c]}}\n" + file(a="fallback: chat", b="", c=""))
    assert any("chat stands for several models: name b, c" in each for each in found)
