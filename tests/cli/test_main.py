"""The commands as a user calls them: what they are, how they end, which anvil-mux they mean."""

import argparse
import json
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from anvil_mux import __version__
from anvil_mux.cli import arguments
from anvil_mux.cli.main import COMMANDS, EXIT_CODES, VARIABLES, main
from tests.cli.demo import TIMEOUT, cli, mux, state, url

__all__ = ["cli", "mux", "state", "url"]


@pytest.mark.parametrize(
    ("known", "shown", "told"),
    [("a1b2c3d", " (a1b2c3d)", "a1b2c3d"), ("", "", None)],
    ids=["known", "unknown"],
)
def test_version_says_the_version_and_the_commit(known, shown, told, cli, monkeypatch):
    monkeypatch.setattr("anvil_mux.cli.main.commit", lambda: known)
    for word in ("version", "--version"):
        assert cli(word).out == f"anvil-mux {__version__}{shown}\n"
    found = json.loads(cli("version", "--json").out)
    assert (found["version"], found["commit"]) == (__version__, told)


def test_an_unknown_option_is_answered_with_the_usage_of_its_command(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--key-file", "keys.txt"])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("usage: anvil-mux serve ")
    assert said.endswith("anvil-mux serve: error: unrecognized arguments: --key-file\n")


def test_the_demo_has_a_file_of_its_own(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--demo", "compose.yaml"])
    assert ended.value.code == 2
    assert "leave out either --demo or FILE" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", [["ps"], ["load", "a"], ["unload", "a"], ["why", "a"], ["events"], ["top"]], ids=" ".join
)
def test_without_an_anvil_mux_the_exit_code_is_3(words, cli):
    with socket.socket() as bound:  # and does not listen
        bound.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{bound.getsockname()[1]}"
        seen = cli(*words, "--url", url, code=3)
    assert seen.out == ""
    assert f"no anvil-mux answers at {url}" in seen.err


def interrupted(given: object) -> int:
    raise KeyboardInterrupt


@pytest.mark.parametrize("code", sorted(EXIT_CODES.keys() - {70}))  # of `serve`: test_threads.py
def test_a_command_ends_as_the_table_of_exit_codes_says(code, tmp_path, monkeypatch):
    (tmp_path / "broken.yaml").write_text("services: {a: {image: x, x-anvil: {polcy: eager}}}")
    monkeypatch.setitem(COMMANDS, "version", ("", interrupted, COMMANDS["version"][2]))
    words = {
        0: ["config", "--docs"],
        1: ["simulate", "--log", str(tmp_path / "nowhere.jsonl")],
        2: ["ps", "--no-such-flag"],
        3: ["ps", "--url", "http://:80"],
        78: ["check", str(tmp_path / "broken.yaml")],
        130: ["version"],
    }
    try:
        ended = main(words[code])
    except SystemExit as left:  # argparse does
        ended = left.code
    assert ended == code


def test_help_tells_of_exit_codes_and_variables(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    told = capsys.readouterr().out
    for name in (*COMMANDS, *VARIABLES, *map(str, EXIT_CODES)):
        assert re.search(rf"^ +{re.escape(name)}\b", told, re.M), name


@pytest.mark.parametrize("url", ["ftp://127.0.0.1", "http://127.0.0.1:99999", "http://[::1", "http://:80"])
def test_what_is_no_address_is_told_so(url, cli):
    assert f"{url} is no address of an anvil-mux" in cli("ps", "--url", url, code=3).err


def test_a_reader_that_has_enough_is_no_error():
    command = [sys.executable, "-m", "anvil_mux", "config", "--docs"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout
        assert process.stderr
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(TIMEOUT) == 1


def test_commands_find_the_one_that_serves_the_file_at_hand(mux, monkeypatch, cli):
    folder = Path(mux.command[4]).parent
    monkeypatch.setenv("XDG_STATE_HOME", str(folder))
    monkeypatch.delenv("ANVIL_URL", raising=False)
    monkeypatch.chdir(folder)
    assert set(json.loads(cli("ps", "--json").out)["models"]) == {"a", "b"}


@pytest.mark.parametrize("command", [["unload", "--all"], ["ps"], ["reload"]])
def test_commands_do_not_ask_one_that_is_known_to_serve_other_files(
    mux, url, command, monkeypatch, tmp_path, cli
):
    monkeypatch.setenv("XDG_STATE_HOME", str(Path(mux.command[4]).parent))
    monkeypatch.setenv("ANVIL_URL", url)  # a file that is named counts more
    file = tmp_path / "compose.yaml"
    file.write_text(f"x-anvil: {{listen: '{url.removeprefix('http://')}'}}\nservices: {{}}")
    said = cli(*command, "--file", str(file), code=3).err
    assert f"no anvil-mux serves {file}: the one at {url} serves {mux.command[4]}. Start one" in said
    monkeypatch.delenv("ANVIL_URL")
    monkeypatch.chdir(tmp_path)
    assert "no anvil-mux serves" in cli(*command, code=3).err


@pytest.mark.parametrize(("word", "hint"), [("unlaod", "; did you mean unload?\n"), ("x", "file: x\n")])
def test_a_word_that_is_no_command_and_no_file_is_wrong_usage(word, hint, capsys):
    with pytest.raises(SystemExit, match="2"):
        main([word])
    assert capsys.readouterr().err.endswith(hint)


def test_the_address_is_that_of_the_last_file_that_names_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for variable in ("ANVIL_URL", "ANVIL_LISTEN", "COMPOSE_FILE"):
        monkeypatch.delenv(variable, raising=False)
    (tmp_path / "compose.yaml").write_text("x-anvil: {listen: '127.0.0.1:${AT:-81}'}\nservices: {}")
    (tmp_path / "compose.override.yaml").write_text("x-anvil: {max_queue: 5}")
    given = argparse.Namespace(url=None)
    assert arguments.address(given) == "http://127.0.0.1:81"
    (tmp_path / "compose.override.yaml").write_text("x-anvil: {listen: '127.0.0.1:82'}")
    assert arguments.address(given) == "http://127.0.0.1:82"
