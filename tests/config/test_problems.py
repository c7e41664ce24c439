"""The file and line of each problem, its page in the documentation, and mistakes in YAML in plain words."""

from __future__ import annotations

import json
import pickle
import re
from pathlib import Path

import pytest

from anvil_mux.cli.main import main
from anvil_mux.cli.output import print_diagnostics
from anvil_mux.config import reading
from anvil_mux.config.config import SERVICE_SETTINGS, SETTINGS
from anvil_mux.config.interpolate import read
from anvil_mux.config.kinds import Diagnostic, Position, advice
from anvil_mux.config.reading import FOLDER, OF_ALL, OF_COMPOSE, OF_SERVICES, Problems, page_of
from anvil_mux.errors import ConfigError
from anvil_mux.host import check, cuda_checkpoint
from anvil_mux.plugins import load
from tests.config.files import table

ROOT = Path(__file__).resolve().parent.parent.parent


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


OF_SETTINGS = [each.page for table in (SETTINGS, SERVICE_SETTINGS) for each in table.values() if each.page]


OF_PROBES = [
    check.LIMITS_PAGE,
    cuda_checkpoint.RIGHTS_PAGE,
    reading.PAGE,
    "cluster.md#setting-up",
    "cluster.md#in-the-file",
]


@pytest.mark.parametrize(
    "page", sorted({*OF_SETTINGS, *OF_COMPOSE.values(), OF_ALL, OF_SERVICES, *OF_PROBES})
)
def test_each_page_and_its_heading_is_there(page: str) -> None:
    file, _, anchor = page.partition("#")
    assert (ROOT / FOLDER / file).is_file()
    assert not anchor or anchor in anchors(ROOT / FOLDER / file)


@pytest.mark.parametrize(
    ("key", "page"),
    [
        ("services.a.x-anvil.vram", "gpus.md#what-a-model-needs"),
        ("services.a.x-anvil.presets.vram.set", "presets.md#presets"),
        ("services.a.x-anvil.load_timeout", OF_SERVICES),
        ("services.a.x-anvil.polici", OF_SERVICES),
        ("services.a.x-anvil", OF_SERVICES),
        ("x-anvil.routing.policies.mine", "routing.md"),
        ("x-anvil.max_body", OF_ALL),
        ("x-anvil.polici", OF_ALL),
        ("x-anvil", OF_ALL),
        ("services.a.ports.0", "reference.md#engines"),
        ("services.a", OF_SERVICES),
        ("services.vram", OF_SERVICES),  # a service's name is no setting
        ("services", OF_SERVICES),
        ("include", "running.md#docker-or-podman"),
        ("volumes", ""),
    ],
)
def test_the_page_of_a_finding_is_that_of_its_key(key: str, page: str) -> None:
    assert page_of(Diagnostic("is wrong", key=tuple(key.split(".")))) == (page and FOLDER + page)


def test_labels_have_the_pages_of_their_settings_and_mere_text_has_none() -> None:
    assert page_of(Diagnostic("no", key=("services", "a", "labels", "anvil.pin"))) == page_of(
        Diagnostic("no", key=("services", "a", "x-anvil", "pin"))
    )
    assert (
        page_of(Diagnostic("no", key=("services", "a.b", "x-anvil", "x"), page="gpus.md")) == "docs/gpus.md"
    )
    assert page_of("compose.yaml:3: services.a.x-anvil.vram: must be") == ""


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
        first, write, page = said.splitlines()[:3]
        assert first.startswith(f"anvil-mux: error: {file}:6: services.a.x-anvil.vram: must be a size")
        assert (write, page) == ("    write: vram: 20GiB", "    see docs/gpus.md#what-a-model-needs")
    assert main(["check", "--json", str(file)]) == 78
    told = json.loads(capsys.readouterr().out)
    assert told["pages"] == ["docs/gpus.md#what-a-model-needs"]
    [found] = told["diagnostics"]
    assert found.pop("text") == told["problems"][0]
    assert found == {
        "kind": "error",
        "file": str(file),
        "line": 6,
        "key": "services.a.x-anvil.vram",
        "write": "vram: 20GiB",
        "page": "docs/gpus.md#what-a-model-needs",
    }


def test_a_page_is_named_once(capsys: pytest.CaptureFixture[str]) -> None:
    keys = [("services", name, "x-anvil", key) for name in "ab" for key in ("vram", "pin")]
    print_diagnostics([("error", Diagnostic(f"{'.'.join(key)}: no", key=key)) for key in keys])
    shown = [
        line for line in capsys.readouterr().err.splitlines() if line.startswith(("    ", "anvil-mux: e"))
    ]
    assert shown == [
        "anvil-mux: error: services.a.x-anvil.vram: no",
        "    see docs/gpus.md#what-a-model-needs",
        "anvil-mux: error: services.a.x-anvil.pin: no",
        "    see docs/policies.md#pinning-a-model",
        "anvil-mux: error: services.b.x-anvil.vram: no",
        "anvil-mux: error: services.b.x-anvil.pin: no",
    ]


def test_a_diagnostic_is_text_and_keeps_its_parts_on_its_way_between_processes() -> None:
    found = advice("a", "b: 1").at(Position("f", 3), ("services", "a"), "services.a")
    assert found == "f:3: services.a: a; write b: 1"
    assert json.dumps([found]) == json.dumps(["f:3: services.a: a; write b: 1"])
    again = pickle.loads(pickle.dumps(found))
    assert (again, again.said, again.write) == (found, "f:3: services.a: a", "b: 1")
    assert (again.place, again.key) == (found.place, found.key)


def test_where_the_pages_are_is_said_to_those_who_stand_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    assert reading.where_pages_are() == ""
    monkeypatch.chdir(tmp_path)
    assert reading.where_pages_are() == f"docs/ is in {ROOT}"
    monkeypatch.setattr(
        reading, "__file__", str(tmp_path / "site-packages" / "anvil_mux" / "config" / "reading.py")
    )
    assert reading.where_pages_are().startswith("docs/ is a folder of anvil-mux's repository")


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
    found = places(tmp_path, text).place(tuple(key.split(".")))
    assert str(found) == f"{tmp_path}/{place}"


def test_with_several_files_the_line_is_of_the_one_that_holds(tmp_path: Path) -> None:
    found = places(
        tmp_path,
        "services:\n  a:\n    image: x\n    x-anvil:\n      vram: 1GiB\n",
        "services:\n  a:\n    x-anvil:\n      pin: true\n",
    )
    assert str(found.place(("services", "a", "image"))) == f"{tmp_path}/1.yaml:3"
    assert str(found.place(("services", "a", "x-anvil", "vram"))) == f"{tmp_path}/2.yaml:3"


MISTAKES = r"""
    a: b: c | a: 'b: c' -> 1: is not YAML: a second `: ` follows here
    a:\n\tb: 1 | b: 1 -> 2: is not YAML: a tab stands here: indent with spaces
    a: @x | a: '@x' -> 1: is not YAML: text may not begin with @: put it into quotes
    a:\n  b: 1\n c: 2 | -> 3: is not YAML: it is indented unlike what is above it
    a: [1, 2\nb: 1 | a: [1, 2] -> 1: is not YAML: a list or mapping that begins here does not end
    a:\n - [1, 2\nb: 1 | - [1, 2] -> 2: is not YAML: a list or mapping that begins here does not end
    a: 'x\nb: 1 | a: 'x' -> 1: is not YAML: a quote that is opened here does not end
    b: 1\na: 'x\nc: 2 | a: 'x' -> 2: is not YAML: a quote that is opened here does not end
    a: *nope | -> 1: is not YAML: *nope stands for nothing: write &nope above
    a: &x 1\nb: &x 2 | -> 2: is not YAML: the same &name stands twice
    a: "\\q" | a: '\\q' -> 1: is not YAML: in double quotes a backslash is an escape
    a: 1\n---\nb: 2 | -> 2: is not YAML: a second document begins
    a: 1\nb\nc: 1 | b: ... -> 2: is not YAML: a key without its colon
    a: !<x | -> 1: is not YAML: expected '>'
"""
"""File | line to write -> line of the mistake, and what is said of it."""


@pytest.mark.parametrize(("said", "told"), table(MISTAKES.replace("\\\\", "BACKSLASH")))
def test_mistakes_in_yaml_in_plain_words(tmp_path: Path, said: str, told: str) -> None:
    text, _, write = (
        each.replace(r"\n", "\n").replace(r"\t", "\t").replace("BACKSLASH", "\\")
        for each in said.partition(" |")
    )
    file = tmp_path / "compose.yaml"
    file.write_text(f"{text}\n")
    with pytest.raises(ConfigError) as caught:
        load([file], environ={}, compose=None)
    (problem,) = caught.value.problems
    assert problem.startswith(f"{file}:{told}")
    assert isinstance(problem, Diagnostic)
    assert problem.write == write.strip()
