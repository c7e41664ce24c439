"""What each API key has used, from the request to the table."""

import json
import os

from anvil_mux.cli.main import main
from anvil_mux.config.config import Backend
from tests.cli.demo import compose, state
from tests.fake_engine import JSON_OK, keyring
from tests.running import Running, seen, serving

__all__ = ["state"]

KEYS = "key-of-alice name=alice models=*;key-of-bob name=bob models=* state;key-of-nobody models=*"


def ask(mux: Running, key: str) -> int:
    messages = [{"role": "user", "content": "Say hello."}]
    headers = {"Authorization": f"Bearer {key}"}
    body = {"model": "a", "messages": messages}
    return mux.request("POST", "/v1/chat/completions", body, headers=headers)[0]


def test_it_is_told_by_key_and_model_and_in_the_log_and_outlives_the_program(
    tmp_path, state, monkeypatch, capsys
):
    file = compose(tmp_path, "a")
    environ = {**os.environ, "ANVIL_API_KEYS": KEYS}
    monkeypatch.setenv("ANVIL_API_KEY", "key-of-bob")
    flags = ("--log-format", "json")
    with serving(file, *flags, state=state, environ=environ) as mux:
        for key in ("alice", "bob", "alice", "nobody"):
            assert ask(mux, f"key-of-{key}") == 200
        metrics = seen(
            lambda: mux.request("GET", "/metrics", headers={"X-Api-Key": "key-of-bob"})[2],
            lambda text: 'anvil_key_requests_total{key="unnamed",model="a"} 1.0' in text,
        )
        assert 'anvil_key_requests_total{key="alice",model="a"} 2.0' in metrics
        assert mux.request("GET", "/usage", headers={"X-Api-Key": "key-of-alice"})[0] == 403
        line = json.loads(mux.tells(r'^\{.*"path":"/v1/chat/completions".*$')[0])
        assert line["key"] == "alice"
        assert line["gpu_s"] >= 0
        assert not any("key-of-alice" in each for each in mux.output)
    with serving(file, *flags, state=state, environ=environ) as mux:
        url = f"http://127.0.0.1:{mux.port}"
        assert ask(mux, "key-of-alice") == 200
        told = seen(
            lambda: json.loads(mux.request("GET", "/usage", headers={"X-Api-Key": "key-of-bob"})[2])["usage"],
            lambda rows: [row["requests"] for row in rows if row["key"] == "alice"] == [3],
        )
        assert {(row["key"], row["model"]): row["requests"] for row in told} == {
            ("alice", "a"): 3,
            ("bob", "a"): 1,
            ("unnamed", "a"): 1,
        }
        assert all(row["gpu_seconds"] >= 0 and row["seconds"] >= 0 for row in told)
        assert main(["usage", "--since", "1d", "--url", url]) == 0
        head, *rows = capsys.readouterr().out.splitlines()
        assert head.split()[:3] == ["KEY", "MODEL", "REQUESTS"]
        assert sorted(row.split()[:3] for row in rows) == [
            ["alice", "a", "3"],
            ["bob", "a", "1"],
            ["unnamed", "a", "1"],
        ]
        assert main(["usage", "--csv", "--url", url]) == 0
        assert capsys.readouterr().out.splitlines()[0] == (
            "key,model,requests,failed,prompt_tokens,cached_tokens,tokens,seconds,gpu_seconds"
        )
        assert main(["usage", "--since", "yesterday", "--url", url]) == 1
        assert "`since` must be a time such as 12h or 7d, not 'yesterday'" in capsys.readouterr().err


def test_where_no_key_is_asked_for_it_is_counted_by_model(rig):
    rig.engine.answer = lambda _: JSON_OK
    assert rig.ask(b'{"model":"a"}', path=b"/v1/chat/completions").status == 200
    record = rig.events.record()
    assert record.key == ""
    assert record.gpu_seconds > 0


def test_a_request_on_two_gpus_uses_both_and_one_on_none_uses_none(make_rig):
    two, none = Backend("a", "a", ("0", "1")), Backend("b", "b")
    rig = make_rig(backends=(two, none))
    with rig.mux.lease("a") as lease, rig.mux.lease("b") as other:
        pass
    assert lease.gpu_seconds == 2 * lease.ticket.share > 0
    assert other.gpu_seconds == 0


def test_a_key_has_the_name_that_it_was_given():
    keys = keyring(KEYS)
    named = [keys.of({b"x-api-key": f"key-of-{who}".encode()}).name for who in ("alice", "bob", "nobody")]
    assert named == ["alice", "bob", "unnamed"]
