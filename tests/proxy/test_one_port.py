"""Engines that follow each other at one address: nothing that was kept for one of them reaches the next."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from anvil_mux.config.config import Backend
from anvil_mux.config.keys import Keyring
from anvil_mux.config.service import Service
from anvil_mux.protocol import http1
from anvil_mux.proxy.connections import Pool
from tests.fake_engine import Asked, OnePort, RawClient, answer_of, keyring, shows

OURS = "k-of-clients"


def backend(name: str, *command: str, **settings: object) -> Backend:
    made = Backend(name, name, gpus=("0",), service=Service(command=("engine", *command)))
    return replace(made, **settings)


BACKENDS = (
    backend("one", "--api-key", "KEY-ONE"),
    backend("two", "--api-key=KEY-TWO"),
    backend("open"),
)


def shown(asked: Asked) -> bytes:
    """An answer that says which keys a request showed its engine."""
    lines = [
        line for line in asked.head.split(b"\r\n") if line.lower().startswith((b"auth", b"x-api", b"api-"))
    ]
    said = b"|".join(lines)
    return answer_of(said)


@pytest.fixture
def one_port() -> Iterator[OnePort]:
    mechanism = OnePort(shown)
    yield mechanism
    mechanism.close()


def ask(client: RawClient, model: str) -> bytes:
    answer = client.ask(b'{"model":"%b"}' % model.encode(), extra=shows(OURS))
    assert answer.status == 200
    return answer.body


def test_an_engine_is_shown_its_own_key_and_no_other(make_rig, one_port):
    client = make_rig(backends=BACKENDS, mechanism=one_port, keys=keyring(OURS)).client()
    expected = {"one": b"authorization: Bearer KEY-ONE", "two": b"authorization: Bearer KEY-TWO", "open": b""}
    models = ["one", "two", "one", "two", "open", "two", "open"]
    assert [ask(client, model) for model in models] == [expected[model] for model in models]


def test_a_connection_to_an_engine_that_was_replaced_serves_no_other(make_rig, one_port, monkeypatch):
    monkeypatch.setattr(Pool, "end", lambda *_: None)
    client = make_rig(backends=BACKENDS, mechanism=one_port, keys=keyring(OURS)).client()
    assert ask(client, "one")
    assert ask(client, "two")
    [gone] = one_port.ended_engines
    assert not gone.connections[0].ended.is_set(), "the old connection was open all the time"
    assert [len(engine.connections) for engine in (gone, one_port.engines["two"])] == [1, 1]


def test_engines_get_other_keys_once_clients_keys_are_ours(make_rig, one_port):
    rig = make_rig(backends=BACKENDS, mechanism=one_port)
    client = rig.client()
    assert ask(client, "one") == b"Authorization: Bearer %b" % OURS.encode()
    rig.handler.reconfigure(rig.config, keyring(OURS))
    assert ask(client, "one") == b"authorization: Bearer KEY-ONE"
    rig.handler.reconfigure(rig.config, Keyring())
    assert ask(client, "one") == b"Authorization: Bearer %b" % OURS.encode()


def test_a_head_of_an_earlier_configuration_that_comes_late_is_used_by_nobody(
    make_rig, one_port, monkeypatch
):
    rig = make_rig(backends=BACKENDS, mechanism=one_port)
    late, client = rig.client(), rig.client()
    write, calls = http1.forward_request_head, []

    def held(*args: Any, **kwargs: Any) -> bytes:
        """The first head is made, then comes a reload, and a request with the same head; then it is kept."""
        written = write(*args, **kwargs)
        calls.append(written)
        if len(calls) == 1:
            rig.handler.reconfigure(rig.config, keyring(OURS))
            assert ask(client, "one") == b"authorization: Bearer KEY-ONE"
        return written

    monkeypatch.setattr(http1, "forward_request_head", held)
    assert ask(late, "one") == b"Authorization: Bearer %b" % OURS.encode()
    assert ask(client, "one") == b"authorization: Bearer KEY-ONE"
