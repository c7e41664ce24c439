"""The file and line of each problem, its page in the documentation, and mistakes in YAML in plain words."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from anvil_mux.cli.main import main
from anvil_mux.config.interpolate import read
from anvil_mux.config.pages import OF_ALL, OF_SERVICES, PAGES, page_of
from anvil_mux.config.problems import Problems
from anvil_mux.config.table import SERVICE_SETTINGS, SETTINGS
from anvil_mux.errors import ConfigError
from anvil_mux.plugins import load

ROOT = Path(__file__).resolve().parent.parent.parent


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", sorted({*PAGES.values(), OF_ALL, OF_SERVICES}))
def test_each_page_and_its_heading_is_there(page: str) -> None:
    file, _, anchor = page.partition("#")
    assert (ROOT / file).is_file()
    assert not anchor or anchor in anchors(ROOT / file)


def test_each_key_with_a_page_is_a_key() -> None:
    compose = {"deploy", "devices", "ports", "extends", "include", "env_file", "label_file"}
    known = {*SETTINGS, *SERVICE_SETTINGS, *compose, "reserve", "policies", "ANVIL_API_KEYS"}
    assert {key for keys in PAGES for key in keys.split()} <= known


@pytest.mark.parametrize(
    ("problem", "page"),
    [
        ("/a b/compose.yaml:3: services.a.x-anvil.vram: must be", "docs/gpus.md#what-a-model-needs"),
        ("compose.yaml:3: services.a.b-c.x-anvil.fallback: no", "docs/elsewhere.md#fallbacks"),
        ("compose.yaml:3: services.a.labels.anvil.pin: no", "docs/staying.md"),
        ("compose.yaml:3: x-anvil.routing.policies.mine: no", "docs/routing.md"),
        ("compose.yaml: services.a.x-anvil.loras.x: no", "docs/presets.md#lora-adapters"),
        ("compose.yaml:3: services.a: port 1 is taken", OF_SERVICES),
        ("compose.yaml:3: x-anvil.polici: unknown key; known: ...", OF_ALL),
        ("--drain-timeout: must be", OF_ALL),
        ("--policy: must be", "docs/policies.md"),
        ("ANVIL_POLICY: must be", "docs/policies.md"),
        ("ANVIL_API_KEYS: is too short", "docs/security.md"),
        ("listen: 0.0.0.0 can be reached by others", "docs/security.md"),
        ("compose.yaml:3: is not YAML: a tab stands here", ""),
        ("keys.txt:1: a key has at least 8 characters", ""),
    ],
)
def test_the_page_of_a_problem_is_that_of_its_key(problem: str, page: str) -> None:
    assert page_of(problem) == page


def test_check_and_serve_name_the_line_and_the_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "compose.yaml"
    file.write_text(
        "x-anvil: {runtime: process}\nservices:\n  a:\n    command: x\n    x-anvil:\n      vram: much\n"
    )
    for command in ("check", "serve"):
        assert main([command, str(file)]) == 78
        said = capsys.readouterr().err
        assert f"{file}:6: services.a.x-anvil.vram: " in said
        assert "(see docs/gpus.md#what-a-model-needs)" in said
    assert main(["check", "--json", str(file)]) == 78
    assert json.loads(capsys.readouterr().out)["pages"] == ["docs/gpus.md#what-a-model-needs"]


def places(folder: Path, *texts: str) -> Problems:
    documents = []
    for number, text in enumerate(texts, 1):
        file = folder / f"{number}.yaml"
        file.write_text(text)
        documents.append(read(file))
    return Problems(documents)


@pytest.mark.parametrize(
    ("key", "place"),
    [
        ("services.a.ports", "1.yaml:2"),  # of the anchor
        ("services.a.image", "1.yaml:6"),  # its own, though the anchor has one
        ("services.a.x-anvil.vram", "1.yaml:3"),
        ("services.a.x-anvil.pin", "1.yaml:3"),  # not given: its parent
        ("services.b.x-anvil.vram", "1.yaml:9"),  # its own x-anvil replaces the anchor's
        ("services.b.image", "1.yaml:4"),
        ("services.c.image", "1.yaml"),  # of a file that is included
        ("services.c", "1.yaml"),
        ("x-anvil.gpus", "1.yaml:1"),
    ],
)
def test_the_line_is_that_of_the_key_or_none(tmp_path: Path, key: str, place: str) -> None:
    text = """x-base: &base
  ports: [1]
  x-anvil: {vram: 1GiB}
  image: x
services:
  a: {image: y,
    <<: *base}
  b:
    x-anvil:
      pin: true
    <<: [*base]
"""
    found = places(tmp_path, text).where(tuple(key.split(".")))
    assert found == f"{tmp_path}/{place}: {key}"


def test_with_several_files_the_line_is_of_the_one_that_holds(tmp_path: Path) -> None:
    found = places(
        tmp_path,
        "services:\n  a:\n    image: x\n    x-anvil:\n      vram: 1GiB\n",
        "services:\n  a:\n    x-anvil:\n      pin: true\n",
    )
    assert found.where(("services", "a", "image")).startswith(f"{tmp_path}/1.yaml:3: ")
    assert found.where(("services", "a", "x-anvil", "vram")).startswith(f"{tmp_path}/2.yaml:3: ")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: b: c\n", "1: is not YAML: a second `: ` follows here"),
        ("a:\n\t- b\n", "2: is not YAML: a tab stands here: indent with spaces"),
        ("a: @x\n", "1: is not YAML: text may not begin with @: put it into quotes"),
        ("a:\n  b: 1\n c: 2\n", "3: is not YAML: it is indented unlike what is above it"),
        (
            "a:\n - [1, 2\nb: 1\n",
            "2: is not YAML: a list or mapping that begins here does not end",
        ),
        ("b: 1\na: 'x\nc: 2\n", "2: is not YAML: a quote that is opened here does not end"),
        ("a: *nope\n", "1: is not YAML: *nope stands for nothing: write &nope above"),
        ("a: &x 1\nb: &x 2\n", "2: is not YAML: the same &name stands twice"),
        ('a: "\\q"\n', "1: is not YAML: in double quotes a backslash is an escape"),
        ("a: 1\n---\nb: 2\n", "2: is not YAML: a second document begins"),
        ("a: 1\nb\nc: 1\n", "2: is not YAML: a key without its colon"),
        ("a: !<x\n", "1: is not YAML: expected '>'"),
    ],
)
def test_mistakes_in_yaml_in_plain_words(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "compose.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load([file], environ={}, compose=None)
    (problem,) = caught.value.problems
    assert problem.startswith(f"{file}:{said}")
