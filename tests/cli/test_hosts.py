"""What the commands say of hosts, as one that asks a running anvil-mux sees it."""

from collections.abc import Callable

import pytest

from anvil_mux.cli.main import main
from anvil_mux.config.config import Backend
from tests.fake_engine import Rig


@pytest.fixture
def rig(make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch) -> Rig:
    """A model that may run on twelve GPUs of three hosts and one of ours, and is loaded on one."""
    there = [Backend(f"m.h{host}.{gpu}", "m", (gpu,), host=f"h{host}") for host in "123" for gpu in "0123"]
    rig = make_rig(backends=[*there, Backend("m", "m", ("0",))])
    rig.mux.facts.adopt({"m.h2.1": rig.engine.url})
    monkeypatch.setenv("ANVIL_URL", "http://{}:{}".format(*rig.address))
    return rig


def test_ps_says_where_a_model_is(rig, capsys):
    rig.mux.tell(rig.mux.scheduler.host_drained, "h1", drained=True)
    assert main(["ps"]) == 0
    shown = capsys.readouterr()
    head, row = [line.split() for line in shown.out.splitlines()]
    assert head[:4] == ["MODEL", "STATE", "SIZE", "WHERE"]
    assert row[:3] == ["m", "ready", "h2/1"]
    assert "warning: host h1: drained\n" in shown.err


def test_why_sums_up_where_a_model_may_run(rig, capsys):
    rig.mux.tell(rig.mux.scheduler.host_drained, "h1", drained=True)
    assert main(["why", "m", "--explain"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "A request for m is served at once: it is resident on GPU h2/1, and idle."
    assert [line.split() for line in lines[1:4]] == [
        ["HOST", "BACKENDS", "LEFT", "OUT"],
        ["h1", "4", "stopped", "drained", "by", "hand"],
        ["h2", "3", "stopped,", "1", "ready"],
    ]
    assert lines[4] == "It may be loaded on local, h3."
    assert [line.split()[0] for line in lines[5:]] == ["REPLICA", "m.h2.1", "and"]
    assert lines[-1] == "and 12 that are stopped"


def test_of_several_anvil_mux_one_is_named_before_or_after_what_is_asked_of_a_host(rig, monkeypatch):
    url = "http://{}:{}".format(*rig.address)
    monkeypatch.setenv("ANVIL_URL", "http://127.0.0.1:1")
    assert main(["hosts", "--url", url, "drain", "h1"]) == 0
    assert [host.is_drained for host in rig.mux.overview.status().hosts] == [True, False, False]
    assert main(["hosts", "undrain", "h1", "--url", url]) == 0
    assert [host.is_drained for host in rig.mux.overview.status().hosts] == [False] * 3
    assert main(["hosts", "drain", "h1"]) == 3
