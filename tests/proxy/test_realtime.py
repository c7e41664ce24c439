"""The realtime API over real websockets: OpenAI's client, anvil-mux, and an engine in a process of its own.

The engine and the client have their sockets of PyPI's `websockets`: handshake, masks, compression, pings and
closing frames are those that people use.
"""

import base64
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
import yaml
from websockets.exceptions import ConnectionClosedError, InvalidStatus

from tests.running import Running, seen, serving

ENGINE = Path(__file__).resolve().parent.parent / "realtime_engine.py"
PATIENCE = 60.0

pytestmark = pytest.mark.filterwarnings("ignore:connect.. must be used as a context manager")
"""OpenAI's client does not, which `websockets` deprecates."""


@pytest.fixture(scope="module")
def mux(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("realtime")

    def engine(model: str, gpu: str, **more: Any) -> dict[str, Any]:
        command = f"{sys.executable} {ENGINE} $$PORT {model}-inside"
        about = {"gpus": [gpu], "served_model": f"{model}-inside", "aliases": [f"{model}/other"], **more}
        return {"command": command, "x-anvil": about}

    services = {"voice": engine("voice", "0"), "other": engine("other", "0"), "frail": engine("frail", "1")}
    settings = {"runtime": "process", "policy": "eager", "drain_timeout": 0.5}
    file = folder / "compose.yaml"
    file.write_text(yaml.safe_dump({"name": "realtime", "x-anvil": settings, "services": services}))
    with serving(file, state=folder) as running:
        yield running


@contextmanager
def connected(mux: Running, model: str) -> Iterator[Any]:
    url = f"http://127.0.0.1:{mux.port}/v1"
    with (
        closing(openai.OpenAI(base_url=url, api_key="none", timeout=PATIENCE, max_retries=0)) as client,
        client.realtime.connect(model=model) as connection,
    ):
        yield connection


def greeted(connection: Any) -> str:
    first = connection.recv()
    assert first.type == "session.created"
    return str(first.session.model)


def leases(mux: Running, model: str, count: int) -> int:
    """How many hold ``model``, once these are ``count``."""
    return seen(lambda: mux.get("/healthz")["models"][model]["leases"], lambda found: found == count)


def error_of(connection: Any) -> ConnectionClosedError:
    try:
        while True:
            connection.recv()
    except ConnectionClosedError as error:
        return error


@pytest.mark.parametrize("name", ["voice", "voice/other"])
def test_openais_client_speaks_with_the_engine(mux, name):
    with connected(mux, name) as connection:
        assert greeted(connection) == "voice-inside"
        assert leases(mux, "voice", 1) == 1
        content = [{"type": "input_text", "text": "Say hello to all"}]
        connection.conversation.item.create(item={"type": "message", "role": "user", "content": content})
        connection.response.create()
        told = [connection.recv() for _ in range(5)]
        assert [each.delta for each in told[:-1]] == ["Say ", "hello ", "to ", "all "]
        assert told[-1].type == "response.done"
    assert leases(mux, "voice", 0) == 0
    good_bye = "closed with 1000"
    assert good_bye in seen(lambda: mux.request("GET", "/logs?model=voice")[2], lambda log: good_bye in log)


def test_audio_of_megabytes_passes(mux):
    sound = base64.b64encode(bytes(3 << 20)).decode()
    with connected(mux, "voice") as connection:
        greeted(connection)
        for _ in range(3):
            connection.input_audio_buffer.append(audio=sound)
        assert [connection.recv().audio_start_ms for _ in range(3)] == [len(sound)] * 3


def test_an_open_socket_is_drained_and_then_told_that_another_model_is_wanted(mux):
    with connected(mux, "voice") as connection:
        greeted(connection)
        with connected(mux, "other") as other:
            assert greeted(other) == "other-inside"
        error = error_of(connection)
    assert error.rcvd
    assert error.rcvd.code == 1012
    assert "voice was evicted for other" in error.rcvd.reason


def test_who_has_closed_before_the_drain_ends_holds_up_nothing(mux):
    with connected(mux, "voice") as connection:
        greeted(connection)
    with connected(mux, "other") as other:
        greeted(other)


def test_an_engine_that_dies_under_an_open_socket_is_told(mux):
    with connected(mux, "frail") as connection:
        greeted(connection)
    assert leases(mux, "frail", 0) == 0  # so that its end is not one right after its load
    with connected(mux, "frail") as connection:
        greeted(connection)
        connection.response.cancel()
        error = error_of(connection)
        assert error.rcvd
        why = "The engine of frail broke off the connection: frail exited with code 1."
        assert (error.rcvd.code, error.rcvd.reason.partition("\n")[0]) == (1011, why)
    assert leases(mux, "frail", 0) == 0
    with connected(mux, "frail") as again:
        assert greeted(again) == "frail-inside"


def test_a_model_that_nobody_has_is_refused_in_the_handshake(mux):
    with pytest.raises(InvalidStatus) as refused, connected(mux, "nobody"):
        pass
    assert refused.value.response.status_code == 404
    assert b"Known models" in refused.value.response.body
