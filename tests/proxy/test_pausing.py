"""A pause by hand, as clients and whoever asks for it see it."""

import math
from typing import Any

import pytest

from anvil_mux.cli.main import main
from anvil_mux.config.keys import Keyring
from anvil_mux.scheduler.slot import Pause
from tests.fake_engine import JSON_OK, Rig, keyring, shows


def post(rig: Rig, path: bytes, body: bytes = b"{}") -> tuple[int, Any]:
    answer = rig.ask(body, path=path)
    return answer.status, answer.json


def paused(rig: Rig) -> Pause | None:
    return rig.mux.overview.status().pause


def test_it_frees_the_gpus_and_ends_with_resume(rig):
    rig.engine.answer = lambda _: JSON_OK
    rig.mux.tell(rig.mux.scheduler.pinned, "a", pinned=True)
    rig.mux.lease("a").release()
    assert post(rig, b"/pause") == (200, {"success": True, "until": None, "kept": True})
    rig.events.wait("stopped")
    status, told = post(rig, b"/v1/chat/completions", b'{"model":"a"}')
    assert (status, told["error"]["code"]) == (503, "paused")
    state = rig.json(b"/healthz")
    assert state["status"] == "ok"
    assert state["paused"].items() >= {"until": None, "requests": "refused"}.items()
    assert post(rig, b"/resume") == (200, {"success": True, "paused": True, "kept": True})
    assert post(rig, b"/resume")[1]["paused"] is False
    assert post(rig, b"/v1/chat/completions", b'{"model":"a"}')[0] == 200
    assert rig.json(b"/healthz")["paused"] is None


def test_a_client_that_is_refused_is_told_when_to_ask_again(rig):
    rig.mux.facts.paused(30.0)
    assert b"\r\nretry-after: " in rig.ask(b'{"model":"a"}', path=b"/v1/chat/completions").head.lower()


@pytest.mark.parametrize("body", [b'{"for": "2h"}', b'{"for": 7200}', b'{"for": "120m"}'])
def test_it_may_last_for_a_time(rig, body):
    status, told = post(rig, b"/pause", body)
    assert status == 200
    now = paused(rig)
    assert now is not None
    assert now.until - now.since == pytest.approx(7200.0)
    assert told["until"] is not None


@pytest.mark.parametrize(
    ("body", "wrong"),
    [
        (b'{"for": "soon"}', "`for` must be seconds, or a time such as 30s or 2m, not 'soon'"),
        (b'{"for": 0}', "`for` must be more than nothing"),
        (b'{"for": 1e300}', "`for` must be at most a year (8760h), not 1e+300"),
        (b'{"fro": 1}', "unknown: fro; a pause has nothing but `for`"),
    ],
)
def test_what_is_no_time_is_refused(rig, body, wrong):
    status, told = post(rig, b"/pause", body)
    assert (status, told["error"]["message"]) == (400, wrong)
    assert paused(rig) is None


def test_it_is_written_down_for_the_next_start_and_so_is_its_end(make_rig):
    kept: list[float | None] = []
    rig = make_rig(keep_pause=lambda pause: kept.append(pause) or len(kept) > 1)
    assert post(rig, b"/pause")[1]["kept"] is False
    assert post(rig, b"/resume")[1]["kept"] is True
    assert kept == [math.inf, None]


def test_it_takes_a_key_with_the_right(make_rig, monkeypatch):
    keys: Keyring = keyring("only-models models=*;everything-there-is")
    rig = make_rig(keys=keys)
    assert rig.ask(b"", b"/pause", shows("only-models")).status == 403
    assert paused(rig) is None
    monkeypatch.setenv("ANVIL_API_KEY", "everything-there-is")
    assert main(["pause", "--url", "http://{}:{}".format(*rig.address)]) == 0
    assert paused(rig) is not None


def test_where_requests_wait_they_are_answered_after_it(make_rig):
    rig = make_rig(when_paused="wait")
    rig.engine.answer = lambda _: JSON_OK
    rig.mux.facts.paused(None)
    client = rig.client()
    client.post(b'{"model":"a"}', path=b"/v1/chat/completions")
    rig.events.wait("queued")
    assert rig.json(b"/healthz")["paused"]["requests"] == "wait"
    rig.mux.facts.resumed()
    assert client.read().status == 200


def test_the_commands_pause_and_resume(rig, monkeypatch, capsys):
    monkeypatch.setenv("ANVIL_URL", "http://{}:{}".format(*rig.address))
    assert main(["pause", "--for", "2h"]) == 0
    assert "paused until " in capsys.readouterr().err
    assert main(["ps"]) == 0
    assert ": nothing is loaded, and requests are refused" in capsys.readouterr().err
    assert main(["top"]) == 0
    assert "paused until " in capsys.readouterr().out
    assert main(["why", "a"]) == 0
    assert "A request for a is refused: anvil-mux is paused" in capsys.readouterr().out
    assert main(["resume"]) == 0
    assert main(["resume"]) == 0
    told = capsys.readouterr().err.splitlines()
    assert told == [
        "anvil-mux: resumed: models are loaded again when requests ask for them",
        "anvil-mux: it was not paused",
    ]
    with pytest.raises(SystemExit):
        main(["pause", "--for", "tomorrow"])
    assert "must be seconds, or a time such as 30s or 2m, not 'tomorrow'" in capsys.readouterr().err


def test_all_models_are_unloaded_at_once(rig, monkeypatch, capsys):
    monkeypatch.setenv("ANVIL_URL", "http://{}:{}".format(*rig.address))
    rig.mux.tell(rig.mux.scheduler.pinned, "a", pinned=True)
    rig.mux.lease("a").release()
    assert main(["unload", "--all"]) == 0
    rig.events.wait("stopped")
    assert main(["unload", "--all"]) == 0
    told = capsys.readouterr().err.splitlines()
    assert told[0].startswith("anvil-mux: a: evicted once")
    assert told[1] == "anvil-mux: nothing is loaded"
    with pytest.raises(SystemExit):
        main(["unload"])
