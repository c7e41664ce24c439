"""Commands find the anvil-mux that runs, and say plainly if there is none, or more than one."""

import fcntl
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from anvil_mux.serve import remote
from anvil_mux.serve.remote import NotRunning, RunningMux, announced, ask, choose, greet, places, query
from tests.running import seen

ONE = RunningMux("http://127.0.0.1:1", ("/x/compose.yaml",))
TWO = RunningMux("http://127.0.0.1:2", ("/y/compose.yaml", "/y/more.yaml"))


@contextmanager
def serving(home: Path, name: str, place: RunningMux) -> Iterator[None]:
    folder = home / name
    folder.mkdir(parents=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with announced(folder, place):
            yield


def test_one_that_serves_is_found_as_long_as_it_does(tmp_path):
    with serving(tmp_path, "one", ONE):
        assert places(tmp_path) == [ONE]
    assert places(tmp_path) == []


def test_one_that_was_killed_is_not_taken_for_one_that_serves(tmp_path):
    with ExitStack() as killed:
        killed.enter_context(serving(tmp_path, "one", ONE))
        address = (tmp_path / "one" / "address").read_text()
    (tmp_path / "one" / "address").write_text(address)
    assert places(tmp_path) == []


@pytest.mark.parametrize("text", ["", "[]", '{"url": 1}', '{"url": "x", "files": 3}'])
def test_a_damaged_note_is_passed_over(tmp_path, text):
    with serving(tmp_path, "one", ONE):
        (tmp_path / "one" / "address").write_text(text)
        assert places(tmp_path) == []


def test_the_one_that_serves_the_file_at_hand_is_chosen():
    assert choose([ONE, TWO], ["/y/more.yaml"]) == TWO.url
    assert choose([ONE], ["/y/more.yaml"]) is None


def test_without_a_file_the_only_one_is_chosen():
    assert choose([ONE], []) == ONE.url
    assert choose([], []) is None
    with pytest.raises(NotRunning, match=r"several .* --url: http://127.0.0.1:1 .*http://127.0.0.1:2"):
        choose([ONE, TWO], [])


@pytest.fixture
def silent():
    """The address of a program that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@pytest.fixture
def sleeper():
    with subprocess.Popen(["sleep", "1000"]) as process:
        yield process
        process.kill()


def test_one_that_serves_and_does_not_answer_is_named_with_what_to_do(tmp_path, monkeypatch, silent, sleeper):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with serving(tmp_path / "anvil-mux", "one", RunningMux(silent, ())):
        (tmp_path / "anvil-mux" / "one" / "lock").write_text(str(sleeper.pid))
        does = f"process {sleeper.pid} serves the project one and does not answer: wait, or end it with kill"
        with pytest.raises(NotRunning, match=does):
            ask(silent, "GET", "/healthz", timeout=0.01)
        os.kill(sleeper.pid, signal.SIGSTOP)
        seen(lambda: Path(f"/proc/{sleeper.pid}/stat").read_text(), lambda text: ") T " in text)
        monkeypatch.setattr(remote, "ASK_SECONDS", 0.01)
        is_stopped = (
            f"process {sleeper.pid} serves the project one and is stopped: continue it with kill -CONT"
        )
        with pytest.raises(NotRunning, match=is_stopped):
            greet(silent)
        (tmp_path / "anvil-mux" / "one" / "lock").write_text("x")
        with pytest.raises(NotRunning, match="the project one is locked by a process that does not answer"):
            greet(silent)


def test_an_address_where_none_serves_is_told_by_what_is_there(tmp_path, monkeypatch, silent):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with pytest.raises(NotRunning, match="a program listens there that does not answer in time"):
        ask(silent, "GET", "/healthz", timeout=0.01)
    with pytest.raises(NotRunning, match="start one: anvil-mux serve FILE"):
        ask("http://127.0.0.1:1", "GET", "/healthz")


def test_a_query_says_any_name():
    assert query("/why", model="org/a b") == "/why?model=org%2Fa+b"
