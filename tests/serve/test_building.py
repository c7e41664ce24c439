"""What the machine says of a configuration is in it before it is used."""

import resource
from dataclasses import replace

import pytest

from anvil_mux.config.config import Config
from anvil_mux.serve import building


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """One on which this program may open 1,024 files."""
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1024, 4096))


def test_there_are_no_more_connections_than_files_can_be_opened_for():
    bounded = building.bounded(Config((), warnings=("one",)), 16 << 30)
    assert bounded.max_connections == (1024 - 256) // 2
    assert bounded.warnings == (
        "one",
        "max_connections is 384 instead of 16384: this program may open 1024 files (ulimit -n)",
    )
    assert building.bounded(Config((), max_connections=100), 16 << 30).warnings == ()
    by_default = building.bounded(Config((), origins={"max_connections": "default"}), 16 << 30)
    assert (by_default.max_connections, by_default.warnings) == (384, ())
    assert building.bounded(Config((), tls_cert="/cert"), 16 << 30).max_connections == (1024 - 256) // 4


def test_without_a_limit_of_files_the_setting_holds(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY,) * 2)
    assert building.bounded(Config((), max_connections=10**6), 16 << 30).max_connections == 10**6


def test_all_bodies_have_an_eighth_of_the_memory_and_at_least_room_for_one():
    config = Config((), max_connections=10)
    assert building.bounded(config, 16 << 30).max_bodies == 2 << 30
    assert building.bounded(replace(config, max_bodies=5 << 30), 16 << 30).max_bodies == 5 << 30
    assert building.bounded(replace(config, max_bodies=1 << 20), 16 << 30).max_bodies == config.max_body
