"""Servers elsewhere and fallbacks, over sockets: a stand-in fails in each way that servers do."""

import json
import shutil
import socket
import ssl
import threading
from collections.abc import Callable
from dataclasses import replace
from socket import IPPROTO_TCP, TCP_NODELAY
from typing import Any

import pytest

from anvil_mux.config.config import Backend
from anvil_mux.config.keys import load
from anvil_mux.config.machines import Gpu
from anvil_mux.config.service import Service
from anvil_mux.config.values import AnyOf, Preset, Rule
from anvil_mux.errors import BackendPaused, Cancelled, LoadError, WouldWaitTooLong
from anvil_mux.host.hosts import ExternalServer
from anvil_mux.host.seam import Loaded
from anvil_mux.multiplexer.circuits import LONGEST_ASKED, MOST_FAILURES
from anvil_mux.proxy import connections
from anvil_mux.proxy.dispatch import Patience, is_reason
from tests.fake_engine import (
    DONE,
    END,
    GUARD,
    JSON_OK,
    SSE_HEAD,
    STREAM_A,
    FakeEngine,
    Mechanism,
    RawClient,
    Rig,
    chunk,
    error_in,
    keyring,
    shows,
)
from tests.proxy.test_tls import make_certificate
from tests.proxy.test_upstream import SWITCHED, WISH
from tests.running import seen

OF_A_CLIENT = b"k-of-a-client"
CLIENT_KEYS = (
    b"Authorization: Bearer %b\r\nx-api-key: %b\r\nApi-Key: %b\r\nCookie: session=%b\r\n"
    b"X-Goog-Api-Key: %b\r\nX-My-Token: %b\r\nOpenAI-Organization: org\r\nAccept-Encoding: gzip\r\n"
)
EXTRA = CLIENT_KEYS % ((OF_A_CLIENT,) * 6)


def status(code: int, *fields: bytes) -> bytes:
    head = b"".join(b"%b\r\n" % field for field in fields)
    return b"HTTP/1.1 %d X\r\nContent-Type: application/json\r\n%bContent-Length: 2\r\n\r\n{}" % (code, head)


class WithElsewhere(Mechanism):
    """Loads ``a`` on its engine; ``gpt`` is at the URL that it has, as the real hosts have it."""

    def load(self, backend: Backend, how: str, number: int) -> Loaded:
        return (
            ExternalServer().load(backend, how, number) if backend.url else super().load(backend, how, number)
        )


World = Callable[..., Rig]


@pytest.fixture
def world(make_rig: Callable[..., Rig]) -> World:
    """A front with ``a`` on a GPU, and ``gpt`` on a server elsewhere, which is ``rig.other``."""

    def make(
        *,
        base: str = "/openai/v1",
        a: dict[str, object] | None = None,
        gpt: dict[str, object] | None = None,
        **settings: object,
    ) -> Rig:
        server = make_rig().other
        server.answer = lambda _: JSON_OK
        url = f"{server.url}{base}"
        far = Backend("gpt", "gpt", url=url, service=Service(key="sk-ours"))
        far = replace(far, **(gpt or {}))
        near = Backend("a", "a", gpus=("0",), **(a or {}))
        mechanism = WithElsewhere({})
        rig = make_rig(backends=(near, far), gpus=(Gpu("0"),), mechanism=mechanism, **settings)
        mechanism.engines = {"a": rig.engine}
        rig.engine.answer = lambda _: JSON_OK
        rig.other.close()
        rig.other = server
        rig.mux.facts.adopt({"gpt": url})
        return rig

    return make


def state_of(rig: Rig) -> str:
    return rig.mux.circuits.of("gpt").state


def ask(rig: Rig, model: str, extra: bytes = b"", client: RawClient | None = None) -> bytes:
    """The head of an answer."""
    return (client or rig.client()).ask(b'{"model":"%b"}' % model.encode(), extra=extra).head


def break_off(rig: Rig, model: str, engine: FakeEngine) -> None:
    """A stream that its server breaks off behind its first event."""
    client = rig.client()
    client.post(b'{"model":"%b","stream":true}' % model.encode())
    asked = engine.next()
    asked.send(SSE_HEAD + chunk(b"data: 1\n\n"))
    client.read_until(b"data: 1")
    asked.close()
    client.read_until(b"backend_unavailable")


# Its head, and its key


def test_no_key_of_a_client_reaches_it_and_ours_does(world):
    rig = world()
    heard = rig.other.answers()
    client = rig.client()
    assert client.ask(b'{"model":"gpt"}', b"/v1/chat/completions?key=k-of-a-client&x=1", EXTRA).status == 200
    client.ask(b'{"model":"gpt","messages":[{"role":"user","content":"Hi"}]}', b"/api/chat", EXTRA)
    heads = [asked.head for asked in heard]
    for head in heads:
        assert OF_A_CLIENT not in head
        assert b"org" not in head
        assert b"gzip" not in head
        assert head.count(b"accept-encoding: identity\r\n") == 1
        assert head.count(b"authorization: Bearer sk-ours\r\n") == 1
    assert heads[0].startswith(b"POST /openai/v1/chat/completions?x=1 HTTP/1.1\r\nHost: 127.0.0.1:")
    assert len(heads) == 2


def test_it_gets_no_key_where_it_needs_none(world):
    rig = world(gpt={"service": Service()})
    heard = rig.other.answers()
    ask(rig, "gpt", extra=EXTRA)
    assert OF_A_CLIENT not in heard[0].head
    assert b"uthorization" not in heard[0].head


def test_it_gets_the_headers_that_its_service_passes(world):
    rig = world(gpt={"pass_headers": ("openai-organization",)})
    heard = rig.other.answers()
    ask(rig, "gpt", extra=EXTRA + b"X-Odd: 1\r\n")
    assert b"\r\nOpenAI-Organization: org\r\n" in heard[0].head
    assert b"x-odd" not in heard[0].head.lower()
    assert OF_A_CLIENT not in heard[0].head


WITH_KEY_IN_SUBPROTOCOL = (
    b"Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Key: x\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Protocol: realtime, openai-insecure-api-key.k-of-a-client\r\n"
)


def test_a_browsers_key_for_a_websocket_stays_here(world):
    rig = world()
    heard = rig.other.answers(status(404))
    assert rig.get(b"/v1/realtime?model=gpt", extra=WITH_KEY_IN_SUBPROTOCOL).status == 404
    assert b"sec-websocket-protocol: realtime\r\n" in heard[0].head
    assert OF_A_CLIENT not in heard[0].head


def test_no_engine_gets_a_browsers_key_for_a_websocket(make_rig):
    rig = make_rig(keys=keyring("key-of-somebody"))
    heard = rig.engine.answers(status(404))
    fields = b"Authorization: Bearer key-of-somebody\r\n" + WITH_KEY_IN_SUBPROTOCOL
    assert rig.get(b"/v1/realtime?model=a", extra=fields).status == 404
    assert b"sec-websocket-protocol: realtime\r\n" in heard[0].head
    assert OF_A_CLIENT not in heard[0].head


# Faults, and the circuit


def test_what_it_says_is_passed_on_and_counted(world):
    rig = world()
    rig.other.answer = lambda _: status(500)
    for _ in range(MOST_FAILURES):
        assert b" 500 " in ask(rig, "gpt")
    assert state_of(rig) == "open"
    head = ask(rig, "gpt")
    assert b" 503 " in head
    assert b"Retry-After: 5\r\n" in head or b"retry-after: 5\r\n" in head.lower()
    # Records of different connections come in any order.
    codes = {rig.events.record(count).code for count in range(1, MOST_FAILURES + 2)}
    assert codes == {"", "circuit_open"}
    assert len(rig.other.connections) <= MOST_FAILURES


@pytest.mark.parametrize("path", [b"/v1/realtime?model=gpt", b"/v1/chat/completions"])
def test_one_that_has_begun_to_answer_gets_other_requests_however_long_the_answer_is(world, path):
    rig = world()
    rig.other.answer = lambda _: status(429, b"Retry-After: 30")
    ask(rig, "gpt")
    rig.mux.circuits.change("gpt", lambda circuit, now: replace(circuit, until=now))
    rig.other.answer = None
    client = rig.client()
    if path == b"/v1/chat/completions":
        client.post(b'{"model":"gpt","stream":true}')
        asked = rig.other.next()
        asked.send(SSE_HEAD, chunk(b"data: 1\n\n"))
    else:
        client.send(b"GET %b HTTP/1.1\r\nHost: localhost\r\n%b\r\n" % (path, WISH))
        asked = rig.other.next()
        asked.send(SWITCHED)
    client.read_until(b"\r\n\r\n")
    rig.other.answer = lambda _: JSON_OK
    assert b" 200 " in ask(rig, "gpt")
    asked.close()
    client.rest()
    rig.events.record(3)
    assert rig.mux.circuits.of("gpt").failures == 1


def test_a_bad_request_is_the_clients(world):
    rig = world()
    rig.other.answer = lambda _: status(400)
    for _ in range(MOST_FAILURES + 1):
        assert b" 400 " in ask(rig, "gpt")
    assert state_of(rig) == "closed"


def test_429_with_retry_after_opens_it_for_so_long(world):
    rig = world()
    rig.other.answer = lambda _: status(429, b"Retry-After: 30")
    assert b"Retry-After: 30" in ask(rig, "gpt")
    head = ask(rig, "gpt")
    assert b" 503 " in head
    assert 25 < rig.mux.circuits.pause_left("gpt") <= 30


def test_429_with_a_huge_retry_after_opens_it_for_the_longest_pause(world):
    rig = world()
    rig.other.answer = lambda _: status(429, b"Retry-After: 99999999999999999")
    ask(rig, "gpt")
    assert LONGEST_ASKED - 5 < rig.mux.circuits.pause_left("gpt") <= LONGEST_ASKED


def test_one_that_refuses_connections(world):
    rig = world()
    rig.other.stop_listening()
    codes = [ask(rig, "gpt").split()[1] for _ in range(MOST_FAILURES + 1)]
    assert codes == [b"502"] * MOST_FAILURES + [b"503"]


def test_one_that_refuses_our_key(world):
    rig = world(gpt={"api_key_env": "CLOUD_KEY"})
    rig.other.answer = lambda _: status(401)
    answer = rig.ask(b'{"model":"gpt"}')
    assert answer.status == 502
    assert b"refuses the API key in CLOUD_KEY" in answer.body


def test_one_that_hangs_ends_after_upstream_timeout(world):
    rig = world(upstream_timeout=0.01)
    rig.other.answer = None
    assert b" 502 " in ask(rig, "gpt")
    assert rig.mux.circuits.of("gpt").failures == 1


def test_one_that_breaks_off_its_stream(world):
    rig = world()
    rig.other.answer = None
    break_off(rig, "gpt", rig.other)
    assert rig.events.record().code == "backend_unavailable"
    assert rig.mux.circuits.of("gpt").failures == 1


def test_the_same_connection_serves_again(world):
    rig = world()
    client = rig.client()
    for _ in range(3):
        assert b" 200 " in ask(rig, "gpt", client=client)
    assert len(rig.other.connections) == 1


def test_it_is_never_unloaded(world):
    rig = world()
    assert not rig.mux.facts.unload("gpt")
    assert rig.mux.overview.is_ready("gpt")


# Fallbacks


GPT = {"fallback": ("gpt",)}


def test_a_load_that_fails_is_answered_by_the_fallback(world):
    rig = world(a=GPT)
    rig.mechanism.failure = LoadError("no such file")
    heard = rig.other.answers()
    head = ask(rig, "a")
    assert b" 200 " in head
    assert b"X-Anvil-Fallback: gpt; a load_failed\r\n" in head
    assert [asked.body for asked in heard] == [b'{"model":"gpt"}']
    record = rig.events.record()
    assert (record.model, record.backend, record.fallback_of) == ("gpt", "gpt", "a")
    assert record.fallback_cause == "load_failed"
    assert b" 200 " in ask(rig, "a"), "and while it cools down"


def test_request_that_ends_two_engines_is_sent_to_no_further_fallback(make_rig):
    chain = [
        Backend(name, name, gpus=(str(gpu),), fallback=rest)
        for gpu, (name, rest) in enumerate([("a", ("b", "c")), ("b", ()), ("c", ())])
    ]
    rig = make_rig(backends=tuple(chain), gpus=tuple(Gpu(str(gpu)) for gpu in range(3)))
    rig.mechanism.end = "exited with code 139"
    client = rig.client()
    client.post(b'{"model":"a"}')
    rig.engine.next().reset()
    rig.other.next().reset()
    answer = client.read()
    assert (answer.status, answer.code) == (502, "engine_crashed")
    assert [event.backend for event in rig.events.of("loading")] == ["a", "b"]


def test_who_waits_for_longer_than_after_leaves_the_queue(world):
    rig = world(a={**GPT, "fallback_after": 0.0})
    rig.mechanism.gate.clear()
    head = ask(rig, "a")
    assert b"X-Anvil-Fallback: gpt; a fell_back\r\n" in head
    assert rig.mux.overview.status().waiting == 0
    assert rig.events.wait("failed").cause.detail == "fell_back"
    rig.mechanism.gate.set()
    rig.events.wait("ready", 2)
    head = ask(rig, "a")
    assert b" 200 " in head
    assert b"Fallback" not in head, "its load went on"


@pytest.mark.parametrize("fails", [False, True])
def test_a_fallback_that_a_reload_has_taken_away_is_none(world, fails):
    patience = Patience(grace=0.0, comment_every=0.0)
    rig = world(a={"fallback": ("gpt",), "fallback_after": None if fails else 0.5}, patience=patience)
    rig.mechanism.gate.clear()
    rig.mechanism.failure = LoadError("a exited with code 1.") if fails else None
    rig.engine.answer = lambda _: SSE_HEAD + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
    client = rig.client()
    client.post(STREAM_A)
    rig.events.wait("loading")
    near = replace(rig.config.backends[0], fallback=(), fallback_after=None)
    rig.mux.facts.reconfigure(replace(rig.config, backends=(near,)), {})
    for _ in range(4):  # one comes each time that its wait is looked at
        client.read_until(b": anvil-mux loading a\n")
    rig.mechanism.gate.set()
    if fails:
        assert error_in(client.rest())["code"] == "load_failed"
    else:
        assert client.read_until(b"data: [DONE]").count(b"error") == 0
    assert rig.events.record().fallback_of == ""


def test_who_waits_for_a_place_too(world):
    rig = world(a={**GPT, "fallback_after": 0.0, "concurrency": 1})
    rig.engine.answer = None
    first, asked = rig.asked(b'{"model":"a"}')
    assert b"X-Anvil-Fallback: gpt; a fell_back" in ask(rig, "a")
    asked.send(JSON_OK)
    assert first.read().status == 200


def test_a_stream_that_has_begun_to_wait_goes_on_with_the_fallback(world):
    rig = world(a={**GPT, "fallback_after": 0.3}, patience=Patience(grace=0.0))
    rig.mechanism.gate.clear()
    rig.other.answer = lambda _: SSE_HEAD + chunk(b"data: {}\n\n") + END
    answer = rig.ask(b'{"model":"a","stream":true}')
    assert answer.clean
    assert b": anvil-mux gpt answers instead of a (fell_back)" in answer.body
    assert answer.body.endswith(b"data: {}\n\n" + DONE)


def test_no_fallback_once_the_client_has_seen_a_byte(world):
    rig = world(a=GPT)
    rig.engine.answer = None
    break_off(rig, "a", rig.engine)
    assert rig.events.record().fallback_of == ""


@pytest.mark.parametrize("code", [429, 500, 503, 529])
def test_a_server_elsewhere_that_fails_has_its_fallback_too(world, code):
    rig = world(gpt={"fallback": ("a",)})
    rig.other.answer = lambda _: status(code)
    head = ask(rig, "gpt")
    assert b" 200 " in head
    assert b"X-Anvil-Fallback: a; gpt backend_unavailable" in head


def test_an_open_circuit_falls_back_at_once(world):
    rig = world(gpt={"fallback": ("a",)})
    rig.mux.circuits.asked("gpt", "cannot be reached")
    assert b"X-Anvil-Fallback: a; gpt circuit_open" in ask(rig, "gpt")
    assert rig.other.connections == []


def test_a_stream_that_does_not_begin_in_time_falls_back(world):
    rig = world(gpt={"fallback": ("a",), "fallback_after": 0.01})
    rig.other.answer = None
    rig.engine.answer = lambda _: SSE_HEAD + chunk(b"data: {}\n\n") + END
    answer = rig.ask(b'{"model":"gpt","stream":true}')
    assert answer.header(b"X-Anvil-Fallback") == b"a; gpt backend_unavailable"
    assert rig.other.next().was_left()


def test_a_key_falls_back_on_models_that_it_may_use_alone(world):
    keys = keyring("only-a-key models=a; both-keys models=a,gpt")
    rig = world(a=GPT, keys=keys)
    rig.mechanism.failure = LoadError("no such file")
    alone, both = [
        ask(rig, "a", extra=b"Authorization: Bearer %b\r\n" % key) for key in (b"only-a-key", b"both-keys")
    ]
    assert b" 503 " in alone
    assert b" 200 " in both


def test_answers_that_may_not_be_severed_are_a_reason_to_fall_back_and_an_order_is_none():
    assert is_reason(WouldWaitTooLong("b answers for longer than this request may wait."))
    assert is_reason(BackendPaused("a was paused by hand."))
    assert not is_reason(Cancelled("This request was taken out of its queue."))


def test_what_is_wrong_with_the_request_is_told(world):
    rig = world(a=GPT)
    rig.engine.answer = lambda _: status(400)
    assert b" 400 " in ask(rig, "a")


def test_where_all_fail_the_last_error_is_told_with_where_it_came_from(world):
    rig = world(a=GPT)
    rig.mechanism.failure = LoadError("no such file")
    rig.mux.circuits.asked("gpt", "cannot be reached")
    head = ask(rig, "a")
    assert b" 503 " in head
    assert b"X-Anvil-Fallback: gpt; a load_failed" in head
    assert rig.events.record().code == "circuit_open"


# Where they meet other features


def test_what_a_preset_sets_does_not_reach_the_fallback(world):
    hot = Preset("a-hot", set=(("temperature", 2),), system="Be wild.")
    keys = keyring("k-of-hot-and-gpt name=ann models=a-hot,gpt")
    rig = world(a={**GPT, "presets": (hot,)}, keys=keys)
    rig.mechanism.failure = LoadError("no such file")
    heard = rig.other.answers()
    head = ask(rig, "a-hot", extra=shows("k-of-hot-and-gpt"))
    assert b"X-Anvil-Fallback: gpt; a load_failed\r\n" in head
    assert [asked.body for asked in heard] == [b'{"model":"gpt"}']
    record = rig.events.record()
    assert (record.model, record.preset, record.backend, record.key) == ("gpt", "", "gpt", "ann")
    assert record.gpu_seconds == 0.0


def test_a_server_elsewhere_has_presets_of_its_own(world):
    rig = world(gpt={"presets": (Preset("gpt-cold", set=(("temperature", 0),)),)})
    heard = rig.other.answers()
    assert b" 200 " in ask(rig, "gpt-cold")
    assert json.loads(heard[0].body) == {"model": "gpt", "temperature": 0}


def test_figures_of_a_try_that_failed_are_not_the_fallbacks(world):
    rig = world(a=GPT)
    rig.engine.answer = None
    client, asked = rig.asked(b'{"model":"a"}')
    asked.send(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{")
    asked.close()
    assert client.read().header(b"X-Anvil-Fallback") == b"gpt; a backend_unavailable"
    record = rig.events.record()
    assert (record.model, record.backend, record.gpu_seconds) == ("gpt", "gpt", 0.0)


CHAT = {"chat": AnyOf((Rule(("a", "gpt")),))}


def test_of_several_the_server_elsewhere_is_resident_unless_its_circuit_is_open(world):
    rig = world(any_of=CHAT)
    assert b"X-Anvil-Model: gpt\r\n" in ask(rig, "chat")
    assert rig.events.of("loading") == []
    rig.mux.circuits.asked("gpt", "cannot be reached")
    assert b"X-Anvil-Model: a\r\n" in ask(rig, "chat")
    rig.mux.circuits.asked("gpt", "")
    assert b"X-Anvil-Model: a\r\n" in ask(rig, "chat"), "both are there, and it is preferred"


def test_a_key_for_several_has_those_as_fallbacks_and_no_others(world):
    keys = keyring("k-of-chat models=chat; k-of-solo models=solo")
    both = {"chat": AnyOf((Rule(("gpt", "a")),)), "solo": AnyOf((Rule(("gpt",)),))}
    rig = world(gpt={"fallback": ("a",)}, any_of=both, keys=keys)
    rig.other.answer = lambda _: status(500)
    head = ask(rig, "chat", extra=shows("k-of-chat"))
    assert b"X-Anvil-Model: a\r\n" in head
    assert b"X-Anvil-Fallback: a; gpt backend_unavailable\r\n" in head
    assert b" 500 " in ask(rig, "solo", extra=shows("k-of-solo"))


def test_a_request_that_may_force_no_swap_goes_to_a_fallback_that_is_there(world):
    rig = world(a=GPT)
    head = ask(rig, "a", extra=b"X-Anvil-Swap: never\r\n")
    assert b"X-Anvil-Fallback: gpt; a nothing_resident\r\n" in head
    assert rig.events.of("loading") == []


def test_a_fallback_forces_no_swap_either(world):
    rig = world(gpt={"fallback": ("a",)}, any_of={"chat": AnyOf((Rule(("gpt",)),), swaps=False)})
    rig.mux.circuits.asked("gpt", "cannot be reached")
    answer = rig.ask(b'{"model":"chat"}')
    assert answer.status == 503
    assert b"a is not loaded, and this request does not allow a swap" in answer.body
    assert rig.events.of("loading") == []


def test_a_pause_leaves_servers_elsewhere_alone(world):
    rig = world(a=GPT, gpt={"concurrency": 1})
    assert b" 200 " in ask(rig, "a")
    rig.other.answer = None
    first, second = rig.client(), rig.client()
    first.post(b'{"model":"gpt"}')
    asked = rig.other.next()
    second.post(b'{"model":"gpt"}')
    rig.events.wait("queued", 2)
    rig.mux.facts.paused(None)
    rig.events.wait("stopped")
    rig.other.answer = lambda _: JSON_OK
    asked.send(JSON_OK)
    assert [client.read().status for client in (first, second)] == [200, 200]
    assert b"X-Anvil-Fallback: gpt; a paused\r\n" in ask(rig, "a")
    # Its lease may end a moment after its answer.
    assert seen(lambda: rig.mux.overview.wait_estimate("gpt").verdict, "served".__eq__) == "served"


def test_a_keep_alive_does_not_evict_it(world):
    rig = world()
    lease = rig.mux.lease("gpt")
    lease.keep_alive(0.0)
    lease.release()
    slot = rig.mux._layout.slot("gpt")
    assert slot
    assert slot.ttl is None
    assert rig.mux.overview.is_ready("gpt")


# TLS


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
@pytest.mark.parametrize("trusted", [True, False])
def test_tls_is_verified(world, tmp_path, *, trusted):
    cert, key = make_certificate(tmp_path)
    rig = world()
    gate = Encrypted(cert, key, rig.other.address)
    try:
        url = f"https://localhost:{gate.port}"
        far = Backend("gpt", "gpt", url=url, ca_file=cert if trusted else "", service=Service(key="sk-ours"))
        config = replace(rig.config, backends=(rig.config.backends[0], far))
        rig.mux.facts.reconfigure(config, {})
        rig.handler.reconfigure(config, load(None, {}))
        client = rig.client()
        answer = client.ask(b'{"model":"gpt"}')
        if trusted:
            assert answer.status == 200
            rig.other.answer = lambda _: SSE_HEAD + chunk(b"data: {}\n\n") + END
            assert client.ask(b'{"model":"gpt","stream":true}').body == b"data: {}\n\n" + DONE
        else:
            assert answer.status == 502
            assert b"its certificate was refused" in answer.body
            assert b"ca_file" in answer.body
    finally:
        gate.close()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
@pytest.mark.parametrize("ends_early", [True, False])
def test_an_early_refusal_over_tls_is_passed_on(world, tmp_path, ends_early):
    cert, key = make_certificate(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    rig = world()
    left = threading.Event()

    def refuse() -> None:
        connection, _ = listener.accept()
        # Else the kernel may hold the answer back until what TLS sent before is acknowledged, and closing a
        # connection with unread bytes drops an answer that was held back: no client could read it.
        connection.setsockopt(IPPROTO_TCP, TCP_NODELAY, 1)
        with context.wrap_socket(connection, server_side=True) as secure:
            secure.recv(1000)
            secure.sendall(status(413))
            if not ends_early:
                left.wait(GUARD)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = threading.Thread(target=refuse, daemon=True)
        server.start()
        url = f"https://localhost:{listener.getsockname()[1]}"
        far = Backend("gpt", "gpt", url=url, ca_file=cert, service=Service(key="sk-ours"))
        config = replace(rig.config, backends=(rig.config.backends[0], far))
        rig.mux.facts.reconfigure(config, {})
        rig.handler.reconfigure(config, load(None, {}))
        assert rig.ask(b'{"model":"gpt","x":"%b"}' % (b"x" * 20_000_000)).status == 413
        left.set()
        server.join(GUARD)


@pytest.fixture
def unresolved(monkeypatch):
    """A resolver that has no answer until the test is over."""
    ended = threading.Event()
    resolve = connections.getaddrinfo

    def wait(host: str, *args: object, **more: Any) -> list[Any]:
        if not more.get("flags"):
            ended.wait(GUARD)
        return resolve(host, *args, **more)

    monkeypatch.setattr(connections, "getaddrinfo", wait)
    yield
    ended.set()


@pytest.fixture
def mute():
    """The port of a server that accepts connections and sends nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def at(rig: Rig, url: str) -> None:
    """Move ``gpt`` to another address."""
    far = Backend("gpt", "gpt", url=url, service=Service(key="sk-ours"))
    config = replace(rig.config, backends=(rig.config.backends[0], far))
    rig.mux.facts.reconfigure(config, {})
    rig.handler.reconfigure(config, load(None, {}))


@pytest.mark.usefixtures("unresolved")
def test_a_client_that_leaves_while_a_name_is_resolved_frees_its_lease(world):
    rig = world()
    at(rig, "https://localhost:1")
    client = rig.client()
    client.post(b'{"model":"gpt"}')
    rig.events.wait("leased")
    client.leave()
    assert rig.events.record().status == 499


@pytest.mark.usefixtures("unresolved")
def test_a_name_that_is_not_resolved_in_time_is_an_error(world, monkeypatch):
    monkeypatch.setattr(connections, "ELSEWHERE_SECONDS", 0.0)
    rig = world()
    at(rig, "https://localhost:1")
    answer = rig.ask(b'{"model":"gpt"}')
    assert answer.status == 502
    assert b"its name was not resolved within" in answer.body


def test_a_client_that_leaves_in_a_handshake_frees_its_lease(world, mute):
    rig = world()
    at(rig, f"https://localhost:{mute}")
    client = rig.client()
    client.post(b'{"model":"gpt"}')
    rig.events.wait("leased")
    client.leave()
    assert rig.events.record().status == 499


def test_a_handshake_that_takes_too_long_is_an_error(world, mute, monkeypatch):
    monkeypatch.setattr(connections, "HANDSHAKE_SECONDS", 0.0)
    rig = world()
    at(rig, f"https://localhost:{mute}")
    answer = rig.ask(b'{"model":"gpt"}')
    assert answer.status == 502
    assert b"TLS did not begin within" in answer.body


class Encrypted:
    """Takes TLS off in front of an address."""

    def __init__(self, cert: str, key: str, behind: tuple[str, int]) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(cert, key)
        self._behind = behind
        self._context = context
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            secure = self._context.wrap_socket(connection, server_side=True)
            with secure, socket.create_connection(self._behind) as plain:
                back = threading.Thread(target=_copy, args=(plain, secure), daemon=True)
                back.start()
                _copy(secure, plain)
                plain.shutdown(socket.SHUT_RDWR)
                back.join()
        except OSError:
            pass

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()


def _copy(source: socket.socket, sink: socket.socket) -> None:
    try:
        while data := source.recv(65536):
            sink.sendall(data)
    except OSError:
        pass
