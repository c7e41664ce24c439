"""The schema for editors takes what the program takes, and points at what it refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft7Validator
from referencing import Registry
from referencing.jsonschema import DRAFT7

from anvil_mux import plugins
from anvil_mux.cli.main import main
from anvil_mux.config import interpolate
from anvil_mux.config.config import SERVICE_SETTINGS, SETTINGS
from anvil_mux.config.kinds import COMPOSE, Setting
from tests.test_docs import EXAMPLES

ROOT = Path(__file__).resolve().parent.parent.parent
SHIPPED = ROOT / "compose" / "anvil-mux.schema.json"
SCHEMA: dict[str, Any] = json.loads(SHIPPED.read_text())
ELSEWHERE: Registry[Any] = Registry().with_resource(COMPOSE, DRAFT7.create_resource({"type": "object"}))
VALIDATOR = Draft7Validator(SCHEMA, registry=ELSEWHERE)
FILES = [*sorted((ROOT / "compose").glob("*.yaml")), *(ROOT / "contrib").glob("compose*.yaml")]
ROWS = [("x-anvil", *row) for row in SETTINGS.items()]
ROWS += [("services", *row) for row in SERVICE_SETTINGS.items()]


def refused(content: object) -> list[str]:
    """The ways to what the schema refuses."""
    return [".".join(map(str, error.absolute_path)) for error in VALIDATOR.iter_errors(content)]


def placed(where: str, key: str, value: object) -> dict[str, Any]:
    """A compose file with one setting."""
    if where == "x-anvil":
        return {"x-anvil": {key: value}}
    return {"services": {"a": {"image": "x", "x-anvil": {key: value}}}}


def test_the_schema_file_is_what_the_program_prints(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--schema"]) == 0
    assert SHIPPED.read_text() == capsys.readouterr().out, "run `make docs`"


def test_the_schema_is_one() -> None:
    Draft7Validator.check_schema(SCHEMA)


@pytest.mark.parametrize(("where", "key", "setting"), ROWS)
def test_each_setting_has_a_shape_and_a_description(where: str, key: str, setting: Setting) -> None:
    part = SCHEMA["definitions"]["top" if where == "x-anvil" else "service"]["anyOf"][0]["properties"][key]
    assert setting.kind.shape
    assert part["description"].startswith(setting.doc)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_the_schema_takes_the_example_files(file: Path) -> None:
    assert refused(interpolate.read(file).content) == []


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_each_example_file_names_the_schema(file: Path) -> None:
    [named] = re.findall(r"^# yaml-language-server: \$schema=(\S+)$", file.read_text(), re.M)
    assert (file.parent / named).resolve() == SHIPPED


@pytest.mark.parametrize("snippet", EXAMPLES)
def test_the_schema_takes_the_compose_files_in_the_documents(snippet: str, tmp_path: Path) -> None:
    file = tmp_path / "compose.yaml"
    file.write_text(snippet)
    assert refused(interpolate.read(file).content) == []


VALUES: list[Any] = [
    *(None, True, False, "true", "off", 0, 1, -3, 8080, 70000, 0.5, 12.5, "0", "7", "-7", "0.5"),
    *("", " ", "x", "a,b", "x y", "measured", "all", "any", "default", "process", "keep", "file.json"),
    *("auto", "30s", "2m30s", "500ms", "20GiB", "1.5 GB", "64MiB", "1024", "20 Gigs", "30 seconds"),
    *("127.0.0.1:9292", "[::1]:80", "9292", "localhost", "https://app.example", "redis://h:6379/0"),
    *("vllm", "vlm", "prefill", "sleep", "sleep-1", "sleep, stop", "adaptive", "mine:Policy", "/docs"),
    *(
        [],
        ["0"],
        [0, 1],
        ["a", "b"],
        ["sleep", "stop"],
        ["stop", "nap"],
        ["tools", "vision"],
        [["0"], ["1"]],
        ["/docs", "/sdapi/"],
    ),
    *({}, {"0": None}, {"0": {"vram": "24GiB", "reserve": "1GiB"}}, {"0": {"ram": 1}}, {"gpu-b": None}),
    *({"gpu-b": {"gpus": ["0"], "host_memory": "64GiB"}}, {"zone": "b"}, {"temperature": 0.2, "stop": ["x"]}),
    *("wait", {"x-think": {"set": {"temperature": 0.2}, "strip": ["n"], "system": "T"}}, {"x-law": "/l"}),
    *({"name": "debounce", "quiet": 2}, {"quiet": 2}, {"default": "mine", "policies": {"mine": {"x": 1}}}),
    *({"mode": "full", "store": "redis://h"}, {"mode": "half"}, {"store": "h:1"}, '{"temperature": 0}'),
    *({"chat": ["a", "b"], "warm": {"models": "a", "swap": "never"}}, {"chat": "a"}),
    *({"chat": [{"model": "a", "when": {"images": "yes", "tokens_over": "9"}}, "b"]}, {"a": {"when": {}}}),
    {"chat": {"models": [{"model": ["a", "b"], "when": {"audio": None, "tools": False}}]}},
    *({"url": "http://x", "on": ["failed"]}, [{"run": ["notify", "x"], "timeout": "5s"}], {"run": "x"}),
    *({"when_others_hold": "4GiB"}, {"when_others_hold": "any"}),
    *("http://h:8000/v1", {"models": ["a", "b"], "after": "20s"}, {"models": "a"}),
]


@pytest.mark.parametrize(("where", "key", "setting"), ROWS)
def test_the_schema_takes_what_the_program_takes(where: str, key: str, setting: Setting) -> None:
    taken = []
    for value in VALUES:
        try:
            if value is not None:
                setting.kind.read(value)
        except ValueError:
            continue
        taken.append(value)
    assert len(taken) > 1
    assert [value for value in taken if refused(placed(where, key, value))] == []


MISTAKES = [
    ("x-anvil", "drain_timeout", "30 seconds"),
    ("x-anvil", "drain_timeout", -1),
    ("x-anvil", "drain_timeout", True),
    ("x-anvil", "max_queue", 0),
    ("x-anvil", "max_queue", "many"),
    ("x-anvil", "max_body", "20 Gigs"),
    ("x-anvil", "runtime", "docker"),
    ("x-anvil", "gpus", {"0": {"ram": "24GiB"}}),
    ("x-anvil", "machines", ["gpu-b"]),
    ("x-anvil", "policy", {"quiet": 2}),
    ("x-anvil", "routing", {"mode": "half"}),
    ("x-anvil", "hooks", [{"run": "notify-send"}]),
    ("x-anvil", "listen", "localhost"),
    ("x-anvil", "preload", "maybe"),
    ("x-anvil", "cors", ["app.example"]),
    ("x-anvil", "any_of", {"chat": {"models": ["a"], "swap": "no"}}),
    ("x-anvil", "any_of", ["a"]),
    ("x-anvil", "any_of", {"chat": [{"model": "a", "when": {"image": True}}]}),
    ("x-anvil", "any_of", {"chat": [{"models": ["a"], "when": {"images": True}}]}),
    ("x-anvil", "any_of", {"chat": [{"model": "a", "when": {"tokens_over": 0}}]}),
    ("x-anvil", "any_of", {"chat": [{"model": "a", "when": "images"}]}),
    ("services", "port", 70000),
    ("services", "priority", 101),
    ("services", "vram", "lots"),
    ("services", "engine", "vlm"),
    ("services", "evict_to", ["nap"]),
    ("services", "set", ["temperature"]),
    ("services", "presets", {"fast": {"temperature": 0.2}}),
    ("services", "loras", {"law": ["/law"]}),
    ("services", "upstream", ["docs"]),
    ("services", "pin", 2),
    ("services", "url", "api.openai.com"),
    ("services", "fallback", {"model": "a"}),
]


@pytest.mark.parametrize(("where", "key", "value"), MISTAKES)
def test_the_schema_refuses_what_the_program_refuses(where: str, key: str, value: Any) -> None:
    table = SETTINGS if where == "x-anvil" else SERVICE_SETTINGS
    with pytest.raises(ValueError, match=r"\w"):
        table[key].kind.read(value)
    assert refused(placed(where, key, value))


@pytest.mark.parametrize("where", ["x-anvil", "services"])
def test_the_schema_refuses_a_key_that_is_not_known(where: str) -> None:
    assert refused(placed(where, "drain_timout", 30))


@pytest.mark.parametrize(("where", "key", "setting"), ROWS)
def test_a_variable_may_stand_for_a_value(where: str, key: str, setting: Setting) -> None:
    whole = {"any_of", "hooks", "machines", "yield"}
    assert bool(refused(placed(where, key, "${VALUE}"))) == (key in whole)


def test_a_setting_may_be_left_empty(tmp_path: Path) -> None:
    file = tmp_path / "compose.yaml"
    file.write_text("x-anvil: {ttl: }\nservices: {a: {image: x, x-anvil: }}".replace("ttl", "preload"))
    assert refused(interpolate.read(file).content) == []
    assert plugins.load([file], environ={}, compose=None).backends
