"""The commands of docs/measuring.md run, and its tables have the columns that the command prints."""

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from anvil_mux.cli.main import main
from anvil_mux.lab import report
from tests.cli.demo import compose
from tests.running import Running, serving

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "measuring.md").read_text()
COMMANDS = [
    line
    for block in re.findall(r"^```sh\n(.*?)^```$", PAGE, re.M | re.S)
    for line in block.splitlines()
    if line.startswith("anvil-mux replay ")
]
ELSEWHERE = "http://127.0.0.1:8080"
QUICK = ["--limit", "3", "--speed", "1000", "--warm-up", "0", "--tokens-per-second", "1", "--json"]
"""Flags that stand behind those of an example, and count in their place."""


@pytest.fixture(scope="module")
def mux(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """An anvil-mux that serves every model of the page, and writes the event log that one example reads."""
    folder = tmp_path_factory.mktemp("page")
    names = ["small", "large", "llama", "coder", "qwen", "gemma"]
    events = folder / "events.jsonl"
    with serving(compose(folder, *names), "--event-log", str(events), state=folder) as running:
        assert running.chat("small", max_tokens=1)[0] == 200
        running.folder = folder
        yield running


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_page_runs(command, mux, monkeypatch, capsys):
    folder: Path = mux.folder
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_STATE_HOME", str(folder))
    program, *words = shlex.split(command.replace(ELSEWHERE, f"http://127.0.0.1:{mux.port}"), comments=True)
    assert (program, words[0]) == ("anvil-mux", "replay")
    assert main([*words, *QUICK]) == 0
    measured = json.loads(capsys.readouterr().out)[0]
    assert measured["clients"]["requests"] > 0 == measured["clients"]["failed"]
    for flag in ("--csv", "--plot"):
        if flag in words:
            assert (folder / words[words.index(flag) + 1]).stat().st_size > 0


def test_there_are_commands_and_one_of_them_asks_another_server():
    assert len(COMMANDS) >= 5
    assert any(ELSEWHERE in command for command in COMMANDS)


@pytest.mark.parametrize("head", [report.REPLAY_HEAD, report.CLIENTS_HEAD])
def test_the_tables_of_the_page_have_the_columns_of_the_command(head):
    assert list(head) in [line.split() for line in PAGE.splitlines()]
