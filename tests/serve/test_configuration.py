"""What the machine says of a configuration is in it before it is used, and a change of its files is seen."""

from __future__ import annotations

import resource
from dataclasses import replace
from pathlib import Path

import pytest

from anvil_mux.config.config import Config
from anvil_mux.serve import configuration
from anvil_mux.serve.configuration import WatchedFiles


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """One on which this program may open 1,024 files."""
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1024, 4096))


def test_there_are_no_more_connections_than_files_can_be_opened_for() -> None:
    bounded = configuration.bounded(Config((), warnings=("one",)), 16 << 30)
    assert bounded.max_connections == (1024 - 256) // 2
    assert bounded.warnings == (
        "one",
        "max_connections is 384 instead of 16384: this program may open 1024 files (ulimit -n)",
    )
    assert configuration.bounded(Config((), max_connections=100), 16 << 30).warnings == ()
    by_default = configuration.bounded(Config((), origins={"max_connections": "default"}), 16 << 30)
    assert (by_default.max_connections, by_default.warnings) == (384, ())
    assert configuration.bounded(Config((), tls_cert="/cert"), 16 << 30).max_connections == (1024 - 256) // 4


def test_without_a_limit_of_files_the_setting_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY,) * 2)
    assert configuration.bounded(Config((), max_connections=10**6), 16 << 30).max_connections == 10**6


def test_all_bodies_have_an_eighth_of_the_memory_and_at_least_room_for_one() -> None:
    config = Config((), max_connections=10)
    assert configuration.bounded(config, 16 << 30).max_bodies == 2 << 30
    assert configuration.bounded(replace(config, max_bodies=5 << 30), 16 << 30).max_bodies == 5 << 30
    assert configuration.bounded(replace(config, max_bodies=1 << 20), 16 << 30).max_bodies == config.max_body


def test_a_file_that_is_new_among_those_watched_is_no_news_until_it_changes(tmp_path: Path) -> None:
    file, keys = tmp_path / "compose.yaml", tmp_path / "keys"
    keys.write_text("1")
    files = [str(file)]
    watch = WatchedFiles(lambda: files, pytest.fail)
    files.append(str(keys))
    assert [watch.has_news() for _ in range(3)] == [False] * 3
    keys.write_text("12")
    assert [watch.has_news() for _ in range(3)] == [False, True, False]


def test_a_file_is_news_once_it_has_been_left_alone(tmp_path: Path) -> None:
    file, other = tmp_path / "compose.yaml", tmp_path / ".env"
    file.write_text("1")
    watch = WatchedFiles(lambda: [str(file), str(other)], pytest.fail)
    assert not watch.has_news()
    file.write_text("12")
    assert not watch.has_news()
    file.write_text("123")
    assert not watch.has_news()
    assert watch.has_news()
    assert not watch.has_news()
    other.write_text("")
    assert [watch.has_news() for _ in range(3)] == [False, True, False]
    other.unlink()
    other.write_text("")
    file.unlink()
    assert [watch.has_news() for _ in range(3)] == [False, True, False]
