"""Commands find the anvil-mux that runs, and say plainly if there is none, or more than one."""

import fcntl
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from anvil_mux.serve.remote import NotRunning, RunningMux, announced, choose, places, query

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


def test_a_query_says_any_name():
    assert query("/why", model="org/a b") == "/why?model=org%2Fa+b"
