"""Requests that come back to the anvil-mux that sent them on."""

import re

import pytest

from anvil_mux.config.config import Backend, Config
from anvil_mux.multiplexer.circuits import MOST_FAILURES
from anvil_mux.proxy.question import MOST_HOPS
from anvil_mux.serve.files import own_address
from tests.fake_engine import ASK_A, JSON_OK
from tests.proxy.test_elsewhere import status, world  # noqa: F401

ASK = b'{"model":"gpt","messages":[{"role":"user","content":"x"}]}'
CHAT = b"/v1/chat/completions"


def way_in(head):
    """The way of a request, as its engine is told."""
    [way] = re.findall(rb"X-Anvil-Via: ([^\r]*)\r\n", head)
    return way


def field(way):
    return b"x-anvil-via: %b\r\n" % way


@pytest.mark.parametrize("path", [CHAT, b"/api/chat", b"/upstream/gpt/v1/chat/completions", b"/v1/responses"])
def test_request_that_comes_back_is_508_and_goes_nowhere(world, path):  # noqa: F811
    rig = world()
    heard = rig.other.answers()
    rig.ask(ASK, path)
    way = way_in(heard[0].head)
    answer = rig.ask(ASK, path, field(way))
    assert answer.status == 508
    assert b"gpt here -> here" in answer.body
    assert len(heard) == 1


def test_own_engine_gets_the_way_too(rig):
    rig.engine.answer = lambda _: JSON_OK
    heard = rig.engine.answers()
    rig.ask(ASK_A)
    answer = rig.ask(ASK_A, CHAT, field(way_in(heard[0].head)))
    assert (answer.status, answer.code, answer.header(b"x-should-retry")) == (508, "loop_detected", b"false")
    assert len(heard) == 1


def test_way_names_all_places_and_goes_on_behind_them(world):  # noqa: F811
    rig = world()
    heard = rig.other.answers()
    assert rig.ask(ASK, CHAT, field(b"1234abcd:org/x%2Cy")).status == 200
    first, own = way_in(heard[0].head).split(b", ")
    assert first == b"1234abcd:org/x%2Cy"
    assert own.endswith(b":gpt")
    answer = rig.ask(ASK, CHAT, field(own + b",1234abcd:org/x%2Cy"))
    assert "gpt here -> org/x,y at 1234abcd -> here" in answer.error["message"]


def test_way_without_end_is_508(rig):
    assert rig.ask(ASK_A, CHAT, field(b",".join([b"1:x"] * MOST_HOPS))).status == 508


def test_reload_keeps_its_place_on_the_way(world):  # noqa: F811
    rig = world()
    heard = rig.other.answers()
    rig.ask(ASK)
    rig.handler.reconfigure(rig.config, rig.handler._access.keys)
    assert rig.ask(ASK, CHAT, field(way_in(heard[0].head))).status == 508


def test_508_of_a_server_is_passed_on_and_opens_no_circuit(world):  # noqa: F811
    rig = world()
    rig.other.answer = lambda _: status(508)
    assert [rig.ask(ASK).status for _ in range(MOST_FAILURES + 1)] == [508] * (MOST_FAILURES + 1)
    assert rig.mux.circuits.state("gpt") == "closed"


def test_508_of_a_server_falls_back(world):  # noqa: F811
    rig = world(gpt={"fallback": ("a",)})
    rig.other.answer = lambda _: status(508)
    assert rig.ask(ASK).status == 200
    assert rig.mux.circuits.state("gpt") == "closed"


@pytest.mark.parametrize(
    ("url", "host", "is_own"),
    [
        ("http://127.0.0.1:9292/v1", "127.0.0.1", True),
        ("http://localhost:9292/v1", "127.0.0.1", True),
        ("http://127.0.0.1:9292", "0.0.0.0", True),
        ("http://localhost:9292", "localhost", True),
        ("http://[::1]:9292/v1", "::1", True),
        ("http://mux.example:9292/v1", "mux.example", True),
        ("http://127.0.0.1:9293/v1", "127.0.0.1", False),
        ("http://192.0.2.7:9292/v1", "0.0.0.0", False),
        ("http://192.0.2.7:9292/v1", "127.0.0.1", False),
        ("https://api.example/v1", "127.0.0.1", False),
    ],
)
def test_url_that_is_the_own_address_is_a_warning(url, host, is_own):
    config = Config(backends=(Backend("me", "me", url=url),), host=host, port=9292)
    warnings = list(own_address(config))
    assert len(warnings) == is_own
    assert all(f"me: url: {url} is the address of this anvil-mux" in warning for warning in warnings)
