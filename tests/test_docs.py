"""The documents say what is so."""

import ast
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from anvil_mux import errors, plugins
from anvil_mux.cli import main
from anvil_mux.scheduler import slot
from tests import reference

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def test_the_reference_is_what_the_program_says():
    assert reference.PATH.read_text() == reference.text(), "run `make docs`"


def test_the_readme_stays_short():
    assert README.count("\n") < 200


def test_each_page_is_in_the_index():
    index = (ROOT / "docs" / "README.md").read_text()
    pages = {file.name for file in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert set(re.findall(r"^\| \[([\w.-]+)\]\(\1\) \|", index, re.M)) == pages


@pytest.mark.parametrize(
    "file", [ROOT / "README.md", *(ROOT / "docs").glob("*.md")], ids=lambda file: file.name
)
def test_what_pages_link_to_is_there(file):
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


def test_no_two_pages_say_the_same():
    told: dict[tuple[str, ...], str] = {}
    for file in sorted((ROOT / "docs").glob("*.md")):
        if file.name in ("README.md", "glossary.md", "reference.md"):
            continue  # what is looked up there, pages tell
        text = re.sub(r"^```.*?^```$", "", file.read_text(), flags=re.M | re.S)
        words = re.findall(r"[\w`'-]+", re.sub(r"\]\([^)]*\)", "]", text).lower())
        for some in zip(*(words[start:] for start in range(10)), strict=False):
            assert told.setdefault(some, file.name) == file.name, f"{' '.join(some)} ({file.name})"


def test_each_error_is_in_the_page_on_troubleshooting():
    known = [each for each in vars(errors).values() if isinstance(each, type)]
    told = {each.code: each.status for each in known if issubclass(each, errors.MuxError)}
    del told[errors.ConfigError.code]
    page = (ROOT / "docs" / "troubleshooting.md").read_text().partition("## Errors")[2]
    rows = re.findall(r"^\| `(\w+)` \| (\d+) \|", page, re.M)
    assert {code: int(status) for code, status in rows} == told


def test_the_diagram_is_the_transition_table():
    [diagram] = re.findall(r"```mermaid\n(stateDiagram.*?)```", (ROOT / "docs/design.md").read_text(), re.S)
    drawn = re.findall(r"^ *(\w+) --> (\w+): (\w+)$", diagram, re.M)
    assert {(start, what): end for start, end, what in drawn} == slot.TRANSITIONS


WITH_EXAMPLES = """
    clients
    cluster
    configuring
    elsewhere
    gpus
    policies
    presets
    processes
    routing
    sharing
    standby
"""
PAGES = (README, *((ROOT / "docs" / f"{name}.md").read_text() for name in WITH_EXAMPLES.split()))
EXAMPLES = [text for page in PAGES for text in re.findall(r"^```yaml\n(.*?)^```$", page, re.M | re.S)]


@pytest.mark.parametrize("snippet", EXAMPLES)
def test_compose_files_in_the_documents_load(snippet, tmp_path):
    file = tmp_path / "compose.yaml"
    file.write_text(snippet)
    assert plugins.load([file], environ={"OPENAI_API_KEY": "sk-of-nobody"}, compose=None).backends


EXTENDING = (ROOT / "docs" / "extending.md").read_text()
SECTIONS = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", EXTENDING, re.M | re.S))


@pytest.mark.parametrize("title", SECTIONS)
def test_what_the_page_on_extending_shows_runs(title, tmp_path):
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


DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


NAMING_FILES = [
    *DOCUMENTS,
    *ROOT.glob("C*.md"),
    *(file for folder in ("anvil_mux", "tests") for file in (ROOT / folder).rglob("README.md")),
    *(ROOT / "anvil_mux").rglob("*.py"),
    *(file for kind in ("service", "yaml") for file in (ROOT / "contrib").glob(f"*.{kind}")),
]
PATH = re.compile(r"(?<![\w./-])(?:anvil_mux|bin|compose|contrib|docs|grafana|tests)/[\w/-]+(?:\.\w+)*")


def test_files_of_the_repository_that_texts_name_are_there():
    named = {(file, name) for file in NAMING_FILES for name in PATH.findall(file.read_text())}
    assert [(str(file), name) for file, name in named if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("name", ["contrib/anvil-mux.service", "docs/cluster.md"])
def test_a_reload_of_the_service_checks_what_it_serves(name):
    text = (ROOT / name).read_text()
    [served] = re.findall(r"^ *ExecStart=\S+ serve (.*)$", text, re.M)
    assert re.findall(r"^ *ExecReload=\S+ check (.*)$", text, re.M) == [served]


def _commands(page: str) -> list[str]:
    """Every command of anvil-mux in the shell examples of a page."""
    blocks = re.findall(r"^```sh\n(.*?)^```$", page, re.M | re.S)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [line for line in lines if re.match(r"(bin/)?anvil-mux ", line)]


def _mentions(page: str) -> list[str]:
    """Every command of anvil-mux in the text of a page, which may lack its arguments."""
    return re.findall(r"`(anvil-mux [a-z][^`]*)`", page)


def _refusal(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Return what the command line says against a command; "" if nothing."""
    words = shlex.split(re.sub(r" [>|&].*|[][]", "", command), comments=True)[1:]
    try:
        main._parser().parse_args(main._with_command(words, pytest.fail))
    except SystemExit:
        return capsys.readouterr().err
    return ""


TEXTS = [(file.name, file.read_text()) for file in DOCUMENTS]
SHOWN = [(name, command) for name, text in TEXTS for command in _commands(text)]
MENTIONED = [(name, command) for name, text in TEXTS for command in _mentions(text)]


@pytest.mark.parametrize(("page", "command"), SHOWN)
def test_a_command_that_a_page_shows_is_one(page, command, capsys):
    assert _refusal(command, capsys) == ""


@pytest.mark.parametrize(("page", "command"), MENTIONED)
def test_a_command_that_a_page_mentions_is_one_or_lacks_only_arguments(page, command, capsys):
    refusal = _refusal(command, capsys)
    assert not refusal or "the following arguments are required" in refusal


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


def test_every_thread_is_in_the_list_of_threads():
    table = (ROOT / "CONTRIBUTING.md").read_text().partition("## The threads")[2].partition("\n## ")[0]
    listed = set(re.findall(r"`([\w*-]+)`", "".join(re.findall(r"^\|([^|]*)\|", table, re.M))))
    texts = [module.read_text() for module in (ROOT / "anvil_mux").rglob("*.py")]
    modules = (ast.parse(text) for text in texts if re.search("Thread|[Ww]orker|spawn", text))
    named = {_name_of_thread(node) for module in modules for node in ast.walk(module)} - {""}
    assert {"journal", "hook-*", "notify"} <= named
    assert named == listed


def test_every_room_is_in_the_list_of_rooms():
    listed = (ROOT / "CONTRIBUTING.md").read_text()
    for module in (ROOT / "anvil_mux").rglob("[a-z]*.py"):
        assert f"`{module.name}`" in listed, module.name


def test_each_threat_is_shown_by_tests_that_there_are():
    table = (ROOT / "docs" / "security.md").read_text().partition("\n## Threats\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (?!who |---)([^|]+) \|.*\| ([^|]+) \|$", table, re.M)
    assert len(rows) >= 8
    for who, shown in rows:
        file, named = "", re.findall(r"`((?:tests/[\w/]+\.py)?)::(\w+)`", shown)
        assert named or "mode 700" in shown, who
        for path, test in named:
            file = path or file
            assert f"def {test}(" in (ROOT / file).read_text(), (file, test)
