"""The commands that ask a running anvil-mux."""

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from anvil_mux import __version__
from anvil_mux.cli.main import main
from anvil_mux.serve import remote
from tests.cli.demo import TIMEOUT, cli, compose, eventually, mux, state, url
from tests.running import serving

__all__ = ["cli", "mux", "state", "url"]


def test_load_waits_until_the_model_is_ready_and_ps_shows_it(url, cli):
    assert "a is loaded" in cli("load", "a", "--url", url).err
    head, *rows = (line.split() for line in cli("ps", "--url", url).out.splitlines())
    columns = "MODEL STATE SIZE GPU IN FLIGHT WAITING LAST LOAD UNTIL LAST ERROR"
    assert head == columns.split()
    assert rows[0][:6] == ["a", "ready", "GPU", "0", "0", "0"]
    assert rows[0][-2:] == ["next", "swap"]
    assert rows[1] == ["b", "stopped", "GPU", "0", "0", "0"]


def test_ps_in_json_is_what_healthz_says(url, cli):
    seen = json.loads(cli("ps", "--json", "--url", url).out)
    assert seen["status"] == "ok"
    assert set(seen["models"]) == {"a", "b"}


def test_colours_are_only_for_those_who_can_see_them(url, monkeypatch, cli):
    assert main(["load", "a", "--url", url]) == 0
    monkeypatch.setenv("FORCE_COLOR", "1")
    painted = cli("ps", "--url", url).out
    monkeypatch.delenv("FORCE_COLOR")
    plain = cli("ps", "--url", url).out
    assert "\x1b[32mready\x1b[0m" in painted
    assert "\x1b" not in plain
    assert painted.replace("\x1b[32m", "").replace("\x1b[0m", "") == plain


def test_logs_are_found_without_a_compose_file_at_hand(mux, url, tmp_path, monkeypatch, cli):
    monkeypatch.setenv("XDG_STATE_HOME", str(Path(mux.command[4]).parent))
    monkeypatch.setenv("ANVIL_URL", url)
    monkeypatch.chdir(tmp_path)
    assert main(["load", "a"]) == 0
    assert "a: listens on" in cli("logs", "a").out
    monkeypatch.delenv("ANVIL_URL")
    assert "a: listens on" in cli("logs", "a", "--url", url).out
    monkeypatch.setenv("ANVIL_URL", "http://127.0.0.1:1")
    assert main(["logs", "a"]) == 3
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert main(["logs", "a", "--url", "127.0.0.1:1"]) == 3
    monkeypatch.delenv("ANVIL_URL")
    assert main(["logs", "a"]) == 78


def test_logs_of_one_that_runs_elsewhere_are_asked_for(url, tmp_path, monkeypatch, cli):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))  # it has told nobody here that it runs
    assert main(["load", "a", "--url", url]) == 0
    assert "a: listens on" in cli("logs", "a", "--url", url).out
    assert json.loads(cli("logs", "a", "--json", "-n", "1", "--url", url).out)["service"] == "a"
    assert (
        "The model `nope` does not exist. Known models: a, b."
        in cli("logs", "nope", "--url", url, code=1).err
    )
    assert (
        "-f follows a log only where both the engine and anvil-mux run"
        in cli("logs", "a", "-f", "--url", url, code=1).err
    )


def test_why_says_what_a_request_would_wait_for(url, cli, capsys):
    assert main(["load", "a", "--url", url]) == 0
    assert main(["why", "a", "--url", url]) == 0
    assert (
        capsys.readouterr().out == "A request for a is served at once: it is resident on GPU 0, and idle.\n"
    )
    assert json.loads(cli("why", "b", "--json", "--url", url).out)["verdict"] == "waits"
    assert "does not exist" in cli("why", "nope", "--url", url, code=1).err


def test_events_tell_what_happened_and_why(url, cli):
    assert main(["load", "a", "--url", url]) == 0
    cli("load", "b", "--url", url)

    def told(*words: str) -> str:
        return cli("events", *words, "--url", url).out

    eventually(lambda: "b: ready after" in told())
    lines = [line.partition(" ")[2] for line in told().splitlines()]
    assert any(line.startswith("a: draining for b (") for line in lines)
    assert any(line.startswith("b: loading (") for line in lines)
    assert {line.split()[1] for line in told("a").splitlines()} == {"a:"}
    assert {json.loads(line)["model"] for line in told("b", "--json").splitlines()} == {"b"}


heed = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
"""A shell's background jobs ignore the signal, and their children inherit that."""


def test_events_can_be_followed(mux, url):
    assert main(["load", "a", "--url", url]) == 0
    command = [sys.executable, "-m", "anvil_mux", "events", "-f", "b", "--json", "--url", url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=heed) as process:
        assert process.stdout
        assert main(["load", "b", "--url", url]) == 0
        for line in process.stdout:
            event = json.loads(line)
            if event["kind"] == "ready" and event["at"] > time.time() - TIMEOUT:
                break
        process.send_signal(signal.SIGINT)
        assert process.wait(TIMEOUT) == 130


def test_top_draws_one_picture_where_it_is_no_terminal(url, cli):
    assert main(["load", "a", "--url", url]) == 0
    shown = cli("top", "--url", url).out.splitlines()
    assert shown[0].startswith(f"anvil-mux {__version__}: ok, 0 in flight, 0 waiting")
    assert ["GPU", "0", "ready", "a"] in [line.split() for line in shown]


def test_top_draws_anew_on_a_terminal_until_it_is_interrupted(mux, url):
    terminal, its_end = os.openpty()
    command = [sys.executable, "-m", "anvil_mux", "top", "--url", url]
    environment = {**os.environ, "TERM": "xterm"}
    with subprocess.Popen(command, stdout=its_end, env=environment, preexec_fn=heed) as process:
        os.close(its_end)
        shown = b""
        while b"in flight" not in shown:
            shown += os.read(terminal, 65536)
        assert mux.chat("a")[0] == mux.chat("b")[0] == 200
        while shown.count(b"\x1b[H") < 2:
            shown += os.read(terminal, 65536)
        process.send_signal(signal.SIGINT)
        assert process.wait(TIMEOUT) == 130
    os.close(terminal)
    assert shown.startswith(b"\x1b[H")


def test_unload_puts_a_model_out(mux, url, cli, capsys):
    assert main(["load", "a", "--url", url]) == 0
    assert json.loads(cli("unload", "a", "--json", "--url", url).out) == {"model": "a", "success": True}
    assert main(["load", "b", "--url", url]) == 0
    assert mux.get("/healthz")["models"]["a"]["state"] == "stopped"
    capsys.readouterr()
    assert (
        cli("unload", "a", "--url", url).err == "anvil-mux: a is not resident, or is already being evicted\n"
    )


def test_unload_says_that_the_drain_timeout_aborts_requests(mux, url, cli, capsys):
    cli("load", "a", "--url", url)
    assert "drain_timeout" in cli("unload", "a", "--url", url).err
    with pytest.raises(SystemExit, match="0"):
        main(["unload", "--help"])
    assert "drain_timeout" in capsys.readouterr().out


def test_unload_of_a_model_that_is_loading_ends_its_process(state, cli):
    file = compose(state, "a", "b", load_seconds=600)
    with ThreadPoolExecutor(1) as pool, serving(file, state=state) as mux:
        url = f"http://127.0.0.1:{mux.port}"
        waiting = pool.submit(mux.chat, "a")
        mux.tells("a: loading")
        assert cli("unload", "a", "--url", url).err.startswith(
            "anvil-mux: a is evicted once its requests have ended"
        )
        status, _, text = waiting.result(TIMEOUT)
        assert (status, json.loads(text)["error"]["code"]) == (503, "cancelled")
        mux.tells("a: stopped")
        assert list(state.glob("**/a.json")) == []  # the record of its process


def test_a_pinned_model_stays_until_it_is_unpinned(mux, url, cli):
    assert main(["load", "a", "--url", url]) == 0
    assert "a is pinned until it is unpinned" in cli("pin", "a", "--url", url).err
    status, headers, text = mux.chat("b")
    assert (status, headers["x-should-retry"]) == (422, "false")
    assert "beside the pinned a (see `anvil-mux unpin`)" in json.loads(text)["error"]["message"]
    row = next(line.split() for line in cli("ps", "--url", url).out.splitlines() if line.startswith("a "))
    assert (row[1:3], row[-1]) == (["ready", "pinned"], "unpinned")
    assert main(["load", "b", "--url", url]) == 1
    assert json.loads(cli("unpin", "a", "--json", "--url", url).out) == {"model": "a", "success": True}
    assert mux.chat("b")[0] == 200


def test_what_the_server_refuses_is_told_in_its_own_words(url, cli):
    assert (
        "The model `nope` does not exist. Known models: a, b."
        in cli("load", "nope", "--url", url, code=1).err
    )


def test_logs_show_what_the_engine_printed(mux, url, monkeypatch, cli):
    file = mux.command[4]
    monkeypatch.setenv("XDG_STATE_HOME", str(Path(file).parent))
    cli("load", "a", "--url", url)
    assert "a: listens on http://127.0.0.1:" in cli("logs", "a", "--file", file).out
    assert json.loads(cli("logs", "a", "--json", "-n", "1", "--file", file).out)["service"] == "a"
    assert (
        "The model `nope` does not exist. Known models: a, b."
        in cli("logs", "nope", "--file", file, code=1).err
    )


def test_logs_are_those_of_the_anvil_mux_that_is_asked_whatever_compose_file_is_at_hand(
    url, tmp_path, monkeypatch, cli, capsys
):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    compose(tmp_path, "a", project="other")
    (tmp_path / "anvil-mux" / "other").mkdir(parents=True)
    (tmp_path / "anvil-mux" / "other" / "a.log").write_text("printed by another project's engine\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ANVIL_URL", url)
    assert main(["load", "a"]) == 0
    assert "a: listens on" in cli("logs", "a").out
    monkeypatch.delenv("ANVIL_URL")
    assert main(["logs", "a", "--file", "compose.yaml"]) == 0  # none runs for this one
    assert capsys.readouterr().out == "printed by another project's engine\n"


def test_what_an_engine_prints_steers_no_terminal(tmp_path, monkeypatch, cli):
    evil = "\x1b]0;owned\x07\x1b[2J\x1b[31mred\x1b[0m \x9b2Jbell\x07 tab\tkept"
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    compose(tmp_path, "a", project="other")
    (tmp_path / "anvil-mux" / "other").mkdir(parents=True)
    (tmp_path / "anvil-mux" / "other" / "a.log").write_text(evil + "\n")
    assert cli("logs", "a", "--file", "compose.yaml").out == "red \ufffd2Jbell\ufffd tab\tkept\n"


def test_what_an_engine_says_steers_no_terminal_of_a_command_that_asks():
    answer = json.dumps({"models": {"a\x1b[2J": ["\x1b[31mred", {"said": "\x1b]0;owned\x07"}]}}).encode()
    assert remote._answer("", 200, answer, (200,)) == {"models": {"a": ["red", {"said": ""}]}}


def test_logs_can_be_followed_until_the_engine_ends(mux, url):
    file = mux.command[4]
    assert main(["load", "a", "--url", url]) == 0
    command = [sys.executable, "-m", "anvil_mux", "logs", "-f", "a", "--file", file]
    env = {**os.environ, "XDG_STATE_HOME": str(Path(file).parent)}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stdout.readline().startswith("a: listens on ")
        assert mux.chat("a")[0] == 200
        assert main(["unload", "a", "--url", url]) == 0
        assert "a: POST /v1/chat/completions" in process.stdout.read()
        assert process.wait(TIMEOUT) == 0
