"""Clients that say which model they will ask for: a route, and a header of any request."""

import json
import logging

import pytest

from anvil_mux.config.config import Backend
from anvil_mux.config.values import AnyOf, Rule
from tests.fake_engine import ASK_A, JSON_OK, Answer, Rig, keyring, shows

WARM_B = b"X-Anvil-Warm: org/b\r\n"
TWO_GPUS = (Backend("a", "a", gpus=("0",)), Backend("b", "org/b", gpus=("1",)))


def hinted(rig: Rig, name: bytes, extra: bytes = b"") -> Answer:
    return rig.ask(b"", path=b"/v1/models/%b/load" % name, extra=extra)


def loads(rig: Rig) -> list[str]:
    return [event.backend for event in rig.events.of("loading")]


@pytest.mark.parametrize("name", [b"org/b", b"org%2Fb"])
def test_a_model_is_loaded_for_who_says_that_he_will_ask_for_it(rig, name):
    rig.mechanism.gate.clear()
    answer = hinted(rig, name)
    assert (answer.status, answer.json) == (
        202,
        {"model": "org/b", "status": {"value": "loading"}},
    )
    rig.mechanism.gate.set()
    rig.events.wait("ready")
    assert json.loads(hinted(rig, name).body)["status"] == {"value": "loaded"}
    assert loads(rig) == ["b"]


def test_a_name_for_several_means_the_one_that_would_serve(make_rig):
    rig = make_rig(any_of={"chat": AnyOf((Rule(("org/b", "a")),))})
    assert json.loads(hinted(rig, b"chat").body)["model"] == "org/b"


def test_a_name_that_there_is_not_is_an_error_of_the_route(rig):
    answer = hinted(rig, b"org/c")
    assert (answer.status, answer.code) == (404, "model_not_found")
    assert b"Did you mean `org/b`?" in answer.body
    assert rig.get(b"/v1/models/org/b/load").status == 404  # there is no model of that name
    assert rig.ask(b"", path=b"/v1/models/a").status == 405


def test_a_key_that_may_use_a_model_may_say_so(make_rig):
    rig = make_rig(keys=keyring("key-of-guest models=a", "key-that-waits models=a swap=never"))
    guest, waits = shows("key-of-guest"), shows("key-that-waits")
    assert [hinted(rig, b"a", each).status for each in (b"", waits)] == [401, 403]
    assert hinted(rig, b"org/b", guest).status == 404
    assert loads(rig) == []
    assert hinted(rig, b"a", guest).status == 202
    assert rig.ask(ASK_A, path=b"/models/load", extra=guest).status == 403


def test_the_header_of_a_request_says_so_too_and_reaches_no_engine(make_rig):
    rig = make_rig(backends=TWO_GPUS)
    client, asked = rig.asked(ASK_A, extra=WARM_B)
    rig.events.wait("ready", 2)  # while the request runs
    assert loads(rig) == ["a", "b"]
    assert b"warm" not in asked.head.lower()
    asked.send(JSON_OK)
    assert client.read().status == 200


def test_it_does_not_evict_the_model_of_its_own_request(rig):
    assert rig.serve(ASK_A).ask(ASK_A, extra=WARM_B).status == 200
    rig.events.wait("ready", 2)
    assert loads(rig) == ["a", "b"]


def test_a_request_that_asks_no_engine_may_have_it(rig):
    assert rig.get(b"/v1/models", extra=WARM_B).status == 200
    rig.events.wait("loading")
    assert loads(rig) == ["b"]


@pytest.mark.parametrize(
    ("path", "extra"), [(b"/livez", b""), (b"/readyz", b""), (b"/", b"Accept: text/html\r\n"), (b"/ui", b"")]
)
def test_whoever_shows_no_key_where_there_are_keys_has_nothing_loaded(make_rig, path, extra):
    rig = make_rig(keys=keyring("key-of-guest models=a", "key-of-both models=*"))
    rig.get(path, extra=extra + WARM_B)
    assert rig.get(path, extra=extra + b"X-Anvil-Warm: a\r\n" + shows("key-of-both")).status in (200, 307)
    rig.events.wait("ready")
    assert loads(rig) == ["a"]


@pytest.mark.parametrize("name", [b"org/c", b"", b"\xff\xfe"])
def test_no_request_fails_for_it(rig, caplog, name):
    caplog.set_level(logging.DEBUG, "anvil_mux.proxy.question")
    assert rig.get(b"/v1/models", extra=b"X-Anvil-Warm: %b\r\n" % name).status == 200
    assert "X-Anvil-Warm is ignored" in caplog.text
    assert loads(rig) == []
