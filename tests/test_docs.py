"""The documents say what is so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from anvil_mux import config, residency
from tests import reference

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.M | re.S)


def test_the_reference_is_what_the_program_says() -> None:
    assert reference.PATH.read_text() == reference.text(), "run `make docs`"


def test_the_readme_stays_short() -> None:
    assert README.count("\n") < 250


def test_the_diagram_is_the_transition_table() -> None:
    [diagram] = re.findall(r"```mermaid\n(.*?)```", (ROOT / "docs/design.md").read_text(), re.S)
    drawn = re.findall(r"^ *(\w+) --> (\w+): (\w+)$", diagram, re.M)
    assert {(start, what): end for start, end, what in drawn} == residency.TRANSITIONS


PAGES = (README, (ROOT / "docs" / "routing.md").read_text())
EXAMPLES = [text for page in PAGES for text in re.findall(r"^```yaml\n(.*?)^```$", page, re.M | re.S)]


@pytest.mark.parametrize("snippet", EXAMPLES)
def test_compose_files_in_the_documents_load(snippet: str, tmp_path: Path) -> None:
    file = tmp_path / "compose.yaml"
    file.write_text(snippet)
    assert config.load([file], environ={}, compose=None).backends


def test_what_the_readme_names_is_there() -> None:
    for name in set(re.findall(r"`((?:bin|compose|docs|tests)/[\w./-]+)`", README)):
        assert (ROOT / name).exists(), name


def test_every_room_is_in_the_list_of_rooms() -> None:
    listed = (ROOT / "CONTRIBUTING.md").read_text()
    for module in (ROOT / "anvil_mux").glob("[a-z]*.py"):
        assert f"`{module.name}`" in listed, module.name
