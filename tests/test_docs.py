"""The documents say what is so."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from anvil_mux import plugins
from anvil_mux.scheduler import events
from tests import reference

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.M | re.S)


def test_the_reference_is_what_the_program_says() -> None:
    assert reference.PATH.read_text() == reference.text(), "run `make docs`"


def test_the_readme_stays_short() -> None:
    assert README.count("\n") < 200


def test_each_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    pages = {file.name for file in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert set(re.findall(r"^\| \[([\w.]+)\]\(\1\) \|", index, re.M)) == pages


@pytest.mark.parametrize(
    "file", [ROOT / "README.md", *(ROOT / "docs").glob("*.md")], ids=lambda file: file.name
)
def test_what_pages_link_to_is_there(file: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", file.read_text()):
        path, _, section = target.partition("#")
        if re.match(r"\w+://", path):
            continue
        linked = (file.parent / path).resolve() if path else file
        assert linked.exists(), target
        if section:
            assert section in {
                _anchor(title) for title in re.findall(r"^#+ (.*)$", linked.read_text(), re.M)
            }, target


def _anchor(title: str) -> str:
    """The name that a section has in links."""
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")


def test_each_error_is_in_the_page_on_troubleshooting() -> None:
    said = re.compile(r"^\| `(\w+)` \| (\d+) \|", re.M)
    errors = reference.PATH.read_text().partition("## Errors")[2]
    page = (ROOT / "docs" / "troubleshooting.md").read_text().partition("## Errors")[2]
    assert said.findall(page) == said.findall(errors)


def test_the_diagram_is_the_transition_table() -> None:
    [diagram] = re.findall(r"```mermaid\n(.*?)```", (ROOT / "docs/design.md").read_text(), re.S)
    drawn = re.findall(r"^ *(\w+) --> (\w+): (\w+)$", diagram, re.M)
    assert {(start, what): end for start, end, what in drawn} == events.TRANSITIONS


WITH_EXAMPLES = """
    clients
    cluster
    elsewhere
    gpus
    presets
    routing
    sharing
    staying
    swaps
"""
PAGES = (README, *((ROOT / "docs" / f"{name}.md").read_text() for name in WITH_EXAMPLES.split()))
EXAMPLES = [text for page in PAGES for text in re.findall(r"^```yaml\n(.*?)^```$", page, re.M | re.S)]


@pytest.mark.parametrize("snippet", EXAMPLES)
def test_compose_files_in_the_documents_load(snippet: str, tmp_path: Path) -> None:
    file = tmp_path / "compose.yaml"
    file.write_text(snippet)
    assert plugins.load([file], environ={"OPENAI_API_KEY": "sk-of-nobody"}, compose=None).backends


EXTENDING = (ROOT / "docs" / "extending.md").read_text()
SECTIONS = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", EXTENDING, re.M | re.S))


@pytest.mark.parametrize("title", SECTIONS)
def test_what_the_page_on_extending_shows_runs(title: str, tmp_path: Path) -> None:
    blocks = re.findall(r"^```(\w+)\n(.*?)^```$", SECTIONS[title], re.M | re.S)
    written = [text for kind, text in blocks if kind != "sh"]
    for text in written:
        (tmp_path / text.partition("\n")[0].removeprefix("# ")).write_text(text)
    command = tmp_path / "bin" / "anvil-mux"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m anvil_mux "$@"\n')
    command.chmod(0o755)
    here = f"{tmp_path}:{ROOT}"
    env = {**os.environ, "PYTHONPATH": here, "PATH": f"{command.parent}:{os.environ['PATH']}"}
    tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", tmp_path, tmp_path]
    runs = [tests] if any("# test_" in text for text in written) else []
    runs += [
        ["sh", "-ec", text.replace("PYTHONPATH=.", f"PYTHONPATH={here}")] for k, text in blocks if k == "sh"
    ]
    assert runs
    for run in runs:
        done = subprocess.run(run, cwd=tmp_path, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def test_what_the_readme_names_is_there() -> None:
    for name in set(re.findall(r"`((?:bin|compose|docs|tests)/[\w./-]+)`", README)):
        assert (ROOT / name).exists(), name


def _name_of_thread(node: ast.AST) -> str:
    """The name that a call gives to a thread, with * for what varies; "" if it makes none."""
    if not isinstance(node, ast.Call):
        return ""
    maker = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    named = [keyword.value for keyword in node.keywords if maker == "Thread" and keyword.arg == "name"]
    named += node.args[1:2] if maker == "spawn" else node.args[:1] if maker in ("Worker", "worker") else []
    if named and isinstance(named[0], ast.JoinedStr):
        parts = [each.value if isinstance(each, ast.Constant) else "*" for each in named[0].values]
        return re.sub(r"\*.*", "*", "".join(map(str, parts)))
    return str(named[0].value) if named and isinstance(named[0], ast.Constant) else ""


def test_every_thread_is_in_the_list_of_threads() -> None:
    table = (ROOT / "CONTRIBUTING.md").read_text().partition("## The threads")[2].partition("\n## ")[0]
    listed = set(re.findall(r"`([\w*-]+)`", "".join(re.findall(r"^\|([^|]*)\|", table, re.M))))
    modules = [ast.parse(module.read_text()) for module in (ROOT / "anvil_mux").rglob("*.py")]
    named = {_name_of_thread(node) for module in modules for node in ast.walk(module)} - {""}
    assert {"journal", "hook-*", "notify"} <= named
    assert named == listed


def test_every_room_is_in_the_list_of_rooms() -> None:
    listed = (ROOT / "CONTRIBUTING.md").read_text()
    for module in (ROOT / "anvil_mux").rglob("[a-z]*.py"):
        assert f"`{module.name}`" in listed, module.name
