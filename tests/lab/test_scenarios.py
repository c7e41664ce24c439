"""What a user sees from outside: situations that go through several rooms, over real sockets."""

import json
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from anvil_mux.config.config import Backend, Config
from anvil_mux.errors import BackendError, LoadError
from anvil_mux.host.seam import Evicted
from anvil_mux.lab.engines import Outcome
from anvil_mux.lab.simulate import Arrival, simulate
from anvil_mux.scheduler.events import Event
from anvil_mux.scheduler.slot import Load, Step
from tests.fake_engine import GUARD, JSON_OK, SSE_HEAD, Answer, Asked, RawClient, Rig, chunk

ASK_A = b'{"model":"a"}'
ASK_B = b'{"model":"org/b"}'
STREAM_A = b'{"model":"a","stream":true}'
LAST_CHUNK = b"0\r\n\r\n"


def healthz(rig: Rig) -> dict[str, dict[str, dict[str, object]]]:
    return json.loads(rig.client().get(b"/healthz").body)


def error_code(answer: Answer) -> str:
    return json.loads(answer.body)["error"]["code"]


# Looking


def test_looking_loads_nothing(rig):
    connection = rig.client()
    for path in (
        b"/",
        b"/health",
        b"/healthz",
        b"/livez",
        b"/readyz",
        b"/metrics",
        b"/models",
        b"/v1/models",
    ):
        assert connection.get(path).status == 200
    assert connection.get(b"/v1/models/org/b").status == 200
    assert connection.get(b"/v1/models", b"HEAD").status == 200
    assert rig.events.seen == [each for each in rig.events.seen if not isinstance(each, Event)]


def test_the_state_shows_who_waits_and_how_the_last_load_failed(rig):
    rig.mechanism.gate.clear()
    waiting = [rig.client() for _ in range(3)]
    for client in waiting:
        client.post(ASK_A)
    rig.events.wait("queued", 3)
    rig.events.wait("loading")
    state = healthz(rig)["models"]["a"]
    assert (state["state"], state["waiting"], state["leases"]) == ("loading", 3, 0)
    rig.mechanism.failure = LoadError("out of memory")
    rig.mechanism.gate.set()
    assert [client.read().status for client in waiting] == [503] * 3
    state = healthz(rig)["models"]["a"]
    assert (state["state"], state["waiting"]) == ("stopped", 0)
    assert "out of memory" in str(state["last_error"])


# Failing


def test_what_cannot_be_stopped_is_shown_and_nothing_is_started_on_top(rig, monkeypatch):
    def evict(backend: Backend, how: str) -> Evicted:
        raise BackendError("the container does not stop")

    monkeypatch.setattr(rig.mechanism, "evict", evict)
    rig.engine.answer = lambda _: JSON_OK
    connection = rig.client()
    connection.post(ASK_A)
    assert connection.read().status == 200
    connection.post(ASK_B)
    answer = connection.read()
    assert (answer.status, error_code(answer)) == (503, "stuck")
    assert [event.backend for event in rig.events.of("loading")] == ["a"]
    state = healthz(rig)
    assert state["models"]["a"]["state"] == state["gpus"]["0"]["state"] == "stuck"
    assert "does not stop" in str(state["models"]["a"]["last_error"])


def test_a_model_that_fails_to_load_does_not_take_the_other_with_it(rig):
    rig.engine.answer = lambda _: JSON_OK
    connection = rig.client()
    connection.post(ASK_A)
    assert connection.read().status == 200
    rig.mechanism.failure = LoadError("exited with code 1")
    connection.post(ASK_B)
    assert error_code(connection.read()) == "load_failed"
    rig.mechanism.failure = None
    connection.post(ASK_A)
    assert connection.read().status == 200
    connection.post(ASK_B)  # within its cool-down
    assert error_code(connection.read()) == "load_failed"
    assert [event.backend for event in rig.events.of("loading")] == ["a", "b", "a"]


def test_one_call_of_a_client_that_retries_puts_the_resident_out_once(rig):
    rig.engine.answer = lambda _: JSON_OK
    connection = rig.client()
    connection.post(ASK_A)
    assert connection.read().status == 200
    rig.mechanism.failure = LoadError("exited with code 1")
    url = "http://{}:{}/v1".format(*rig.address)
    client = openai.OpenAI(base_url=url, api_key="x", timeout=GUARD)
    with client, pytest.raises(openai.InternalServerError) as caught:
        client.chat.completions.create(model="org/b", messages=[])
    assert caught.value.code == "load_failed"
    assert [event.backend for event in rig.events.of("loading")] == ["a", "b"]


# Waiting


@pytest.mark.parametrize("policy", ["eager", "debounce"])
def test_one_very_slow_load_does_not_freeze_switching(policy):
    def engines(step: Step, nth: int) -> Outcome:
        return Outcome(
            (500.0 if step.backend == "b" and nth == 0 else 5.0) if isinstance(step, Load) else 1.0
        )

    backends = (Backend("a", "a", gpus=("0",)), Backend("b", "b", gpus=("0",)))
    config = Config(backends, policy=policy)
    trace = [Arrival(1000.0 * n, "ab"[n % 2], 1.0) for n in range(6)]
    waits = [event.seconds for event in simulate(config, trace, engines) if event.kind == "leased"]
    hold = 1.0 if policy == "debounce" else 0.0
    assert waits == [5.0, hold + 1.0 + 500.0, *[hold + 1.0 + 5.0] * 4]


# Endurance


def test_thirty_random_rounds_lose_no_request_and_leave_nothing_behind(monkeypatch):
    monkeypatch.setattr("anvil_mux.proxy.server.SPARE_SECONDS", 0.1)
    before = set(threading.enumerate())
    rig = Rig()
    try:
        play_rounds(rig)
    finally:
        rig.close()
    for thread in set(threading.enumerate()) - before:
        thread.join(GUARD)
        assert not thread.is_alive(), thread


def play_rounds(rig: Rig) -> None:
    rig.engine.answer = rig.other.answer = answer
    draw = random.Random(43)
    with ThreadPoolExecutor(40) as pool:
        for _ in range(30):
            bodies = [draw.choice((ASK_A, ASK_B, STREAM_A)) for _ in range(draw.randint(10, 40))]
            assert [flaw for flaw in pool.map(lambda body: ask(rig, body), bodies) if flaw] == []
    rig.events.wait("released", len(rig.events.of("leased")))
    state = rig.mux.overview.status()
    assert (state.leases, state.waiting) == (0, 0)
    assert sum(model.state == "ready" for model in state.models) == 1
    assert len(rig.events.of("ready")) == len(rig.events.of("stopped")) + 1
    assert rig.events.of("severed") == rig.events.of("failed") == rig.events.of("gone") == []


def answer(asked: Asked) -> bytes:
    if b"stream" not in asked.body:
        return JSON_OK
    return SSE_HEAD + chunk(b"data: 1\n\n") + chunk(b"data: [DONE]\n\n") + LAST_CHUNK


def ask(rig: Rig, body: bytes) -> str:
    """What is wrong with the answer; nothing if it is whole."""
    client = RawClient(rig.address)
    try:
        client.post(body)
        got = client.read()
    finally:
        client.leave()
    whole = b"data: 1\n\ndata: [DONE]\n\n" if body == STREAM_A else b"{}"
    return "" if (got.status, got.clean, got.body) == (200, True, whole) else repr(got)
