"""The engine itself: websockets, and what may be asked of it below /upstream/."""

import socket
import threading
from collections.abc import Callable
from dataclasses import replace

import pytest

from anvil_mux.command import API_KEYS
from anvil_mux.config import keys
from anvil_mux.config.config import Backend, Config
from anvil_mux.config.keys import Key, Keyring
from anvil_mux.config.values import Preset
from anvil_mux.protocol import api
from anvil_mux.proxy.access import Access
from anvil_mux.proxy.question import names_there
from anvil_mux.proxy.tunnel import Ended, tunnel
from tests.fake_engine import GUARD, JSON_OK, Asked, RawClient, Rig, keyring, shows

SWITCHED = (
    b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n\r\n"
)
WISH = b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"


ADMIN, OWN, ALL, FAST = "key-of-the-admin", "key-of-alice", "key-of-all-models", "key-of-a-preset"
KEYS = f"{ADMIN} admin; {OWN} models=a; {ALL} models=*; {FAST} models=fast"


def open_websocket(rig: Rig, model: bytes = b"a", extra: bytes = b"") -> RawClient:
    client = rig.client()
    client.send(b"GET /v1/realtime?model=%b HTTP/1.1\r\nHost: localhost\r\n%b%b\r\n" % (model, WISH, extra))
    return client


def switch(rig: Rig, *first: bytes) -> tuple[RawClient, Asked]:
    """An open websocket, and the engine's side of it."""
    client = open_websocket(rig)
    asked = rig.engine.next()
    asked.send(SWITCHED + b"".join(first))
    assert client.read_until(b"\r\n\r\n").startswith(b"HTTP/1.1 101 ")
    return client, asked


def frame(said: bytes) -> bytes:
    size = len(said)
    if size < 126:
        return bytes((0x82, size)) + said
    kind, length = (126, 2) if size < 65536 else (127, 8)
    return bytes((0x82, kind)) + size.to_bytes(length, "big") + said


def good_bye_in(got: bytes) -> tuple[int, str]:
    """Code and reason of the one frame that closes a websocket."""
    assert (got[0], got[1]) == (0x88, len(got) - 2)
    return int.from_bytes(got[2:4], "big"), got[4:].decode()


# Websockets


def test_a_websocket_reaches_the_engine_as_it_was_asked_for(rig):
    client = open_websocket(rig)
    asked = rig.engine.next()
    head = asked.head.lower()
    assert head.startswith(b"get /v1/realtime?model=a http/1.1\r\n")
    for line in (
        b"connection: upgrade",
        b"upgrade: websocket",
        b"sec-websocket-key: dghlihnhbxbszsbub25jzq==",
    ):
        assert b"\r\n" + line + b"\r\n" in head
    asked.send(SWITCHED)
    answer = client.read_until(b"\r\n\r\n").lower()
    assert b"\r\nconnection: upgrade\r\n" in answer
    assert b"\r\nupgrade: websocket\r\n" in answer
    assert b"\r\nsec-websocket-accept: s3pplmbitxaq9kygzzhzrbk+xoo=\r\n" in answer


@pytest.mark.parametrize(
    ("query", "known_as"),
    [
        ("model=org/b", "model=b-inside"),
        ("x=1&model=org%2Fb&y=%20", "x=1&model=b-inside&y=%20"),
        ("model=other%20name", "model=b-inside"),
        ("model=b-inside", "model=b-inside"),
    ],
)
def test_the_engine_is_asked_for_its_model_by_the_name_that_it_knows(make_rig, query, known_as):
    named = Backend("b", "org/b", gpus=("0",), served_model="b-inside", aliases=("other name", "b-inside"))
    rig = make_rig(backends=(BACKENDS[0], named))
    rig.client().send(b"GET /v1/realtime?%b HTTP/1.1\r\nHost: localhost\r\n%b\r\n" % (query.encode(), WISH))
    asked = rig.other.next()
    assert asked.head.startswith(b"GET /v1/realtime?%b HTTP/1.1\r\n" % known_as.encode())


def test_bytes_pass_both_ways_until_a_side_closes(rig):
    client, asked = switch(rig, b"first")
    assert client.read_until(b"first") == b"first"
    client.send(b"GET /not-http HTTP/1.1\r\n\r\n")
    assert rig.engine.next().head == b"GET /not-http HTTP/1.1\r\n\r\n"
    asked.send(b"\x81\x02hi")
    assert client.read_until(b"hi") == b"\x81\x02hi"
    client.leave()
    assert asked.was_left()
    record = rig.events.record()
    assert (record.status, record.model, record.path) == (101, "a", "/v1/realtime")


def test_more_than_a_side_takes_at_once_arrives_whole(rig):
    client, asked = switch(rig)
    large = bytes(range(256)) * 40_000
    sending = threading.Thread(target=asked.send, args=(large,))
    sending.start()
    got = bytearray()
    while len(got) < len(large):
        got += client.socket.recv(65536)
    sending.join(GUARD)
    assert got == large


def test_an_engine_that_says_good_bye_has_said_all(rig):
    client, asked = switch(rig)
    asked.send(b"\x81\x02hi\x88\x02\x03\xe8")
    asked.close()
    assert client.rest() == b"\x81\x02hi\x88\x02\x03\xe8"
    assert rig.events.record().code == ""


@pytest.mark.parametrize("end", ["close", "reset"])
def test_the_client_of_an_engine_that_dies_is_told(rig, end):
    client, asked = switch(rig, b"\x81\x02")
    asked.send(b"hi")
    assert client.read_until(b"hi")
    getattr(asked, end)()
    assert good_bye_in(client.rest()) == (1011, "The engine of a broke off the connection.")
    assert rig.events.record().code == "backend_unavailable"


@pytest.mark.parametrize(
    "begun",
    [
        *(b"\x81", b"\x81\x05hi", b"\x82\x7e\x01", b"\x82\x7e\x00\x80hi", b"\x82\x7f" + bytes(7)),
        *(b"\x82\x7f" + bytes(5) + b"\x01\x00\x00hi", b"\x81\x00\x01\x01", b"\x88\x02\x03"),
    ],
)
def test_nothing_is_said_within_a_frame_that_broke_off(rig, begun):
    client, asked = switch(rig)
    asked.send(begun)
    asked.close()
    assert client.rest() == begun


def test_a_websocket_ends_when_its_key_is_taken_back_and_not_before(make_rig):
    rig = make_rig(keys=keyring(KEYS))
    client = open_websocket(rig, extra=shows(OWN))
    asked = rig.engine.next()
    asked.send(SWITCHED)
    client.read_until(b"\r\n\r\n")
    rig.handler.reconfigure(rig.config, keys.load(None, {API_KEYS: f"{KEYS};{'k' * 16} name=new admin"}))
    asked.send(frame(b"x"))
    assert client.read_until(frame(b"x"))
    rig.handler.reconfigure(rig.config, keys.load(None, {API_KEYS: f"{ADMIN} admin"}))
    assert good_bye_in(client.rest()) == (1011, "The API key of this websocket was taken back.")
    assert asked.was_left()
    assert rig.events.record().code == "unauthorized"


@pytest.mark.parametrize("size", [0, 125, 126, 65535, 65536, 200_000])
def test_frames_of_all_sizes_are_followed(rig, size):
    client, asked = switch(rig)
    many = frame(bytes(size)) * 2 + b"\x89\x00" + frame(b"x")
    asked.send(many)
    asked.close()
    got = client.rest()
    assert got.startswith(many)
    assert good_bye_in(got[len(many) :])[0] == 1011


def test_an_open_websocket_is_a_lease_and_is_severed_with_it(make_rig):
    rig = make_rig(drain_timeout=0.0)
    rig.other.answer = lambda _: JSON_OK
    client, asked = switch(rig)
    assert rig.ask(b'{"model":"org/b"}').status == 200
    code, why = good_bye_in(client.rest())
    assert (code, why.partition(" before")[0]) == (1012, "a was evicted for org/b")
    assert asked.was_left()
    assert {rig.events.record(1).code, rig.events.record(2).code} == {"", "severed"}


def test_the_client_of_a_websocket_leaves_though_its_engine_takes_nothing():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname(), GUARD)
        near, _ = listener.accept()
    far, engine = socket.socketpair()
    ended: list[Ended] = []

    def run() -> None:
        ended.append(tunnel(near, far, b"", must_end=lambda: False, silence=1e6, client_timeout=1e6))

    with near, far, engine:
        try:
            while True:
                far.send(bytes(4096), socket.MSG_DONTWAIT)
        except BlockingIOError:
            pass
        client.sendall(bytes(100_000))  # more than is read at once
        client.close()
        passing = threading.Thread(target=run, daemon=True)
        passing.start()
        passing.join(GUARD)
        assert [each.by for each in ended] == ["client"]


def test_a_silent_websocket_is_given_up(make_rig):
    rig = make_rig(upstream_timeout=0.2)
    client, asked = switch(rig)
    assert good_bye_in(client.rest()) == (1011, "Both sides were silent for 0.2 s.")
    assert asked.was_left()


def test_an_engine_that_does_not_switch_is_told_as_it_answered(rig):
    client = open_websocket(rig)
    rig.engine.next().send(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 2\r\n\r\nno")
    answer = client.read()
    assert (answer.status, answer.body) == (403, b"no")


def test_without_the_wish_to_switch_nothing_is_loaded(rig):
    answer = rig.get(b"/v1/realtime?model=a")
    assert (answer.status, answer.header(b"upgrade")) == (426, b"websocket")
    assert answer.header(b"connection") == b"Upgrade"
    assert not rig.events.of("queued")


def test_another_sites_page_cannot_open_a_websocket(rig):
    client = open_websocket(rig, extra=b"Origin: http://evil.example\r\n")
    assert client.read().status == 403


def test_an_unknown_model_has_no_websocket(rig):
    assert open_websocket(rig, b"nobody").read().status == 404


# Below /upstream/


@pytest.fixture
def open_rig(make_rig: Callable[..., Rig]) -> Rig:
    return make_rig(backends=tuple(VLLM))


BACKENDS = (
    Backend("a", "a", gpus=("0",), aliases=("alias",)),
    Backend("b", "org/b", gpus=("0",), served_model="b-inside"),
)
VLLM = [replace(backend, engine="vllm", upstream=("/docs", "/sdapi/", "/sleep")) for backend in BACKENDS]


@pytest.mark.parametrize("prefix", [b"/upstream/org/b", b"/upstream/org%2Fb"])
def test_a_post_reaches_the_engine_as_it_is(open_rig, prefix):
    asked = open_rig.passes(b'{"model":"x"}', prefix + b"/tokenize?y=1", engine=open_rig.other)
    assert asked.head.startswith(b"POST /tokenize?y=1 HTTP/1.1\r\n")
    assert asked.body == b'{"model":"x"}'


@pytest.mark.parametrize("path", [b"/version", b"/metrics", b"/docs", b"/sdapi/v1/options", b"/props"])
def test_a_get_reaches_a_loaded_engine_and_loads_none(open_rig, path):
    client = open_rig.client()
    answer = client.get(b"/upstream/alias" + path)
    assert answer.status == 409
    assert not open_rig.events.of("queued")
    assert client.ask(b'{"model":"a"}', path=b"/models/load?wait=true").status == 200
    open_rig.engine.answer = lambda _: JSON_OK
    assert client.get(b"/upstream/alias" + path).status == 200


HIDDEN = b"POST /sleep?level=2 HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n"


def test_the_body_of_a_get_is_announced_to_the_engine_and_no_request_hides_in_it(open_rig):
    client, engine = open_rig.client(), open_rig.engine
    assert client.ask(b'{"model":"a"}', path=b"/models/load?wait=true").status == 200
    head = b"GET /upstream/a/version HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
    client.send(head % len(HIDDEN) + HIDDEN)
    asked = engine.next()
    assert (asked.head.split(b"\r\n")[0], asked.body) == (b"GET /version HTTP/1.1", HIDDEN)
    asked.send(JSON_OK)
    assert client.read().status == 200
    assert engine.asked.empty()
    open_rig.events.wait("released")
    asked = open_rig.passes()  # on the same connection, which is in step
    assert asked.head.startswith(b"POST /v1/chat/completions ")
    assert len(engine.connections) == 1


@pytest.mark.parametrize(
    ("method", "path"),
    [
        (b"POST", b"/sleep"),
        (b"GET", b"/is_sleeping"),
        (b"POST", b"/invocations"),
        (b"POST", b"/v1/load_lora_adapter"),
        (b"POST", b"/version"),
        (b"GET", b"/secret"),
        (b"POST", b"/docs/x"),
        (b"DELETE", b"/docs"),
        (b"POST", b"/v1/../sleep"),
        (b"POST", b"//sleep"),
        (b"POST", b"/sdapi/../sleep"),
        (b"POST", b"/sdapi/%2e%2e/sleep"),
        (b"POST", b"/sdapi/..%2fsleep"),
        (b"POST", b"/sdapi//sleep"),
        (b"POST", b"/.env"),
        (b"GET", b""),
        (b"GET", b"/"),
    ],
)
def test_what_is_not_listed_of_an_engine_is_not_there_where_there_are_keys(make_rig, method, path):
    rig = make_rig(backends=tuple(VLLM), keys=keyring(KEYS))
    answer = rig.get(b"/upstream/a" + path, method, shows(ADMIN))
    assert answer.status == 404
    assert answer.code == "not_found"
    assert rig.engine.asked.empty()
    assert not rig.events.of("queued")


@pytest.mark.parametrize(
    ("path", "named"),
    [
        (b"/upstream/typo/tokenize", "typo"),
        (b"/upstream/typo", "typo"),
        (b"/upstream/typo/", "typo"),
        (b"/upstream/typo//sleep", "typo"),
        (b"/upstream/org/c/v1/chat/completions", "org/c"),
        (b"/upstream/org%2Fc/v1/chat/completions", "org/c"),
    ],
)
def test_a_model_below_upstream_that_does_not_exist_is_told_with_the_known_ones(open_rig, path, named):
    answer = open_rig.ask(b"{}", path=path)
    error = answer.error
    assert (answer.status, error["code"]) == (404, "model_not_found")
    assert error["message"].startswith(f"The model `{named}` does not exist. ")
    assert error["message"].endswith(" Known models: a, alias, org/b.")


@pytest.mark.parametrize("path", [b"/upstream/", b"/upstream//v1/models"])
def test_a_path_below_upstream_that_names_no_model_is_not_there(open_rig, path):
    answer = open_rig.get(path)
    assert (answer.status, answer.code) == (404, "not_found")


def test_the_longest_model_is_meant():
    assert list(api.upstream("/upstream/a/b/docs")) == [("a/b/docs", ""), ("a/b", "/docs"), ("a", "/b/docs")]
    assert list(api.upstream("/upstream/a/b/")) == [("a/b/", ""), ("a/b", "/"), ("a", "/b/")]
    assert list(api.upstream("/upstream/a//b")) == [("a//b", ""), ("a/", "/b")]
    assert list(api.upstream("/other/a/docs")) == []


@pytest.mark.parametrize("path", [b"/v1/chat/completions", b"/v1/completions", b"/tokenize", b"/some/path"])
@pytest.mark.parametrize("named", [b"a", b"gpt-4o", b"x/y"])
@pytest.mark.parametrize("key", [b"", b"x-api-key: key-of-alice\r\n"])
def test_an_alias_that_is_a_pattern_fits_no_part_of_the_path_behind_it(make_rig, key, named, path):
    a = Backend("a", "a", ("0",), aliases=("gpt-*", "x/*", "a*"), upstream=("/some/path",))
    rig = make_rig(keys=keyring(KEYS) if key else None, backends=(a, BACKENDS[1]))
    asked = rig.engine.answers()
    assert rig.ask(b"{}", b"/upstream/" + named + path, key).status == 200
    assert asked[0].head.startswith(b"POST %b HTTP/1.1\r\n" % path)


def test_behind_a_name_that_its_key_may_not_use_no_pattern_is_looked_for(make_rig):
    a = Backend("a", "a", ("0",), aliases=("*",))
    rig = make_rig(keys=keyring(KEYS), backends=(a, Backend("b", "b", ("0",))))
    assert rig.ask(b"{}", b"/upstream/b" + CHAT, shows(OWN)).status == 404
    assert rig.passes(b"{}", b"/upstream/org/c" + CHAT, shows(OWN)).head.startswith(b"POST %b " % CHAT)


# Whose keys may ask for what below /upstream/


@pytest.fixture
def shared_server(make_rig: Callable[..., Rig]) -> Rig:
    """Two models at one server, which has more models than these, and a preset of one."""
    preset = Preset("fast", system="Be brief.")
    lora = Preset("tuned", served_model="tuned-inside", is_adapter=True)
    a = Backend(
        "a", "a", gpus=("0",), served_model="a-inside", presets=(preset, lora), upstream=("/api/show",)
    )
    rig = make_rig(keys=keyring(KEYS), backends=(a, BACKENDS[1]))
    rig.engine.answer = lambda _: JSON_OK
    return rig


def post_upstream(
    rig: Rig, key: str, body: bytes, path: bytes, kind: bytes = b"application/json"
) -> tuple[int, str]:
    """The status and the error's code."""
    answer = rig.ask(body, b"/upstream/a" + path, shows(key), kind)
    return answer.status, answer.json.get("error", {}).get("code", "")


CHAT, FORM, JSON = b"/v1/chat/completions", b"multipart/form-data; boundary=b", b"application/json"
OTHER_IN_FORM = b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\no1-pro\r\n--b--\r\n'
OTHERS = [
    (b'{"model":"o1-pro"}', CHAT, JSON),
    (b'{"model":"o1-pro"}', CHAT, b"text/plain"),
    (b'{"model":"org/b"}', CHAT, JSON),
    (b'{"model":"a"}', CHAT, JSON),
    (b'{"mod\\u0065l":"o1-pro"}', CHAT, JSON),
    (OTHER_IN_FORM, b"/v1/audio/transcriptions", FORM),
    (b'{"session":{"model":"o1-pro"}}', b"/v1/realtime/client_secrets", JSON),
    (
        b'{"session":{"model":"a-inside","audio":{"input":{"transcription":{"model":"o1-pro"}}}}}',
        b"/v1/realtime/client_secrets",
        JSON,
    ),
    (b'{"model":"a-inside","input_audio_transcription":{"model":"o1-pro"}}', b"/v1/realtime/sessions", JSON),
    (b"{}", b"/openai/deployments/o1-pro/chat/completions", JSON),
    (b"{}", CHAT + b"?model=o1-pro", JSON),
    (b'{"name":"o1-pro"}', b"/api/show", JSON),
]
MORE = [
    b'{"model":"a-inside","models":["o1-pro"]}',
    b'{"model":"a-inside","x":{},"m\\u006fdels":[]}',
    b'{"model":"a-inside","Models":["o1-pro"]}',
    b'{"model":"a-inside","fallbacks":["o1-pro"]}',
    b'{"model":"a-inside","context_window_fallbacks":[{"a-inside":["o1-pro"]}]}',
]
ENCODED = b"--b\r\nContent-Disposition: form-data; name%b\r\n\r\no1-pro\r\n--b--\r\n"
OTHER_READINGS = [
    (b'{"Model":"o1-pro"}', CHAT, JSON),
    (b'{"model":"a-inside","MODEL":"o1-pro"}', CHAT, JSON),
    (b'{"model":"a-inside","\\u004dodel":"o1-pro"}', CHAT, JSON),
    (b'{"Name":"o1-pro"}', b"/api/show", JSON),
    (ENCODED % b"*=utf-8''model", b"/v1/audio/transcriptions", FORM),
    (ENCODED % b"*0=mo; name*1=del", b"/v1/audio/transcriptions", FORM),
    (ENCODED % b"=x", b"/v1/audio/transcriptions", FORM + b"; boundary*=utf-8''c"),
]
"""Bodies in which some servers read a model, and others none."""


@pytest.mark.parametrize(("body", "path", "kind"), OTHERS)
@pytest.mark.parametrize("key", [OWN, ALL])
def test_nothing_below_upstream_names_another_model_of_the_same_server(shared_server, key, body, path, kind):
    assert post_upstream(shared_server, key, body, path, kind) == (404, "model_not_found")


@pytest.mark.parametrize("body", [b'{"model":"a-inside"}', b'{"model":"tuned-inside"}', b"{}", b""])
def test_a_models_own_names_and_adapters_may_be_named_below_upstream(shared_server, body):
    assert post_upstream(shared_server, OWN, body, CHAT)[0] == 200


@pytest.mark.parametrize(("body", "path", "kind"), OTHER_READINGS)
def test_what_only_some_servers_read_as_a_model_is_refused(shared_server, body, path, kind):
    assert post_upstream(shared_server, ALL, body, path, kind) == (400, "bad_request")


@pytest.mark.parametrize(("body", "path", "kind"), OTHERS)
def test_an_admin_asks_below_upstream_for_what_the_server_has(shared_server, body, path, kind):
    assert post_upstream(shared_server, ADMIN, body, path, kind)[0] == 200


@pytest.mark.parametrize("body", [b"model=o1-pro", b"[]", b'{"model":'])
def test_a_body_that_names_no_model_that_can_be_read_is_refused_below_upstream(shared_server, body):
    assert post_upstream(shared_server, OWN, body, CHAT)[0] == 400


def test_a_key_for_a_preset_does_not_reach_its_model_below_upstream(shared_server):
    for name, status in ((b"fast", 403), (b"a", 404)):
        answer = shared_server.ask(b'{"model":"a-inside"}', b"/upstream/" + name + CHAT, shows(FAST))
        assert answer.status == status


def test_models_of_one_server_elsewhere_may_be_named_by_who_may_use_them(make_rig):
    site = {"url": "https://there.example/v1", "api_key_env": "KEY"}
    backends = (
        Backend("a", "a", **site, served_model="cheap"),
        Backend("b", "org/b", **site, served_model="better"),
        Backend("c", "c", **site, served_model="best"),
    )
    access = Access(Config(backends=backends), Keyring(), only_local_hosts=False)
    key = Key(b"", models=frozenset(["a", "org/b"]), state=False, admin=False)
    assert names_there(access, key, "a") == {"cheap", "better"}


@pytest.mark.parametrize("body", MORE)
def test_no_further_models_are_named_to_a_server_by_a_key_for_some(shared_server, body):
    assert post_upstream(shared_server, OWN, body, CHAT)[0] == 403
    assert post_upstream(shared_server, ADMIN, body, CHAT)[0] == 200


@pytest.mark.parametrize("path", [CHAT, b"/openai/deployments/a/chat/completions"])
@pytest.mark.parametrize("body", MORE)
def test_no_further_models_are_named_where_there_are_servers_elsewhere(make_rig, body, path):
    there = Backend("c", "c", url="https://there.example/v1", engine="openai")
    for backends, status in ((BACKENDS, 200), ((*BACKENDS, there), 403)):
        rig = make_rig(keys=keyring(KEYS), backends=backends)
        rig.engine.answer = lambda _: JSON_OK
        assert rig.ask(body.replace(b"a-inside", b"a"), path, shows(OWN)).status == status


CLOUD = Backend("c", "c", url="https://there.example/v1", engine="openai", served_model="c-inside")
SESSION = b'{"session":{"model":"%b","audio":{"input":{"transcription":{"model":"%b"}}}}}'
BOTH = b'{"model":"%b","session":{"model":"%b"}}'
OLD_SESSION = b'{"model":"%b","input_audio_transcription":{"model":"%b"}}'


@pytest.mark.parametrize(
    ("key", "model", "heard", "status"),
    [
        (OWN, b"a", b"anything", 200),
        (ALL, b"c", b"o1-pro", 404),
        (ALL, b"c", b"c-inside", 200),
        (ADMIN, b"c", b"o1-pro", 200),
    ],
)
@pytest.mark.parametrize(
    ("session", "path"),
    [(SESSION, b"client_secrets"), (OLD_SESSION, b"sessions"), (BOTH, b"sessions")],
)
def test_what_a_session_names_beside_its_model_is_checked_at_servers_elsewhere(
    make_rig, session, path, key, model, heard, status
):
    rig = make_rig(keys=keyring(KEYS), backends=(*BACKENDS, CLOUD))
    rig.engine.answer = rig.other.answer = lambda _: JSON_OK
    extra = b"X-Anvil-Explain: 1\r\nx-api-key: %b\r\n" % key.encode()
    assert rig.ask(session % (model, heard), path=b"/v1/realtime/" + path, extra=extra).status == status


@pytest.mark.parametrize(
    ("path", "body", "target"),
    [
        (CHAT, b'{"model":"org/b"}', CHAT),
        (b"/v1/realtime/client_secrets", b'{"session":{"model":"org/b"}}', b"/v1/realtime/client_secrets"),
        (b"/v1/engines/org%2Fb/completions", b"{}", b"/v1/completions"),
    ],
)
def test_a_model_in_the_query_of_any_route_is_what_the_engine_calls_the_one_asked_for(
    rig, path, body, target
):
    asked = rig.passes(body, path + b"?x=1&mod%65l=o1-pro", engine=rig.other)
    assert asked.head.startswith(b"POST %b?x=1&model=b-inside HTTP/1.1\r\n" % target)
    assert rig.ask(body, path + b"?model=a&model=b").status == 400


INNER = [
    (b"/v1/responses", b'{"model":"c","input":"x","tools":[{"type":"image_generation","model":"%b"}]}'),
    (b"/v1/responses", b'{"model":"c","input":"x","Tools":[{"Model":"%b","type":"image_generation"}]}'),
    (b"/v1/responses", b'{"model":"c","tools":[{"type":"x:image","parameters":{"model":"%b"}}],"input":"x"}'),
    (b"/v1/responses", b'{"model":"c","input":"x","to\\u006fls":[{"mod\\u0065l":"%b"}]}'),
    (b"/v1/messages", b'{"model":"c","messages":[],"tools":[{"type":"advisor_1","model":"%b"}]}'),
    (CHAT, b'{"model":"c","messages":[],"plugins":[{"id":"fusion","analysis_models":["%b"]}]}'),
    (CHAT, b'{"model":"c","messages":[],"draft_model":"%b"}'),
    (CHAT, b'{"model":"c","messages":[],"speculative":{"draft":{"model":"%b"}}}'),
    (CHAT, b'{"model":"c","messages":[],"user_config":{"model_list":[{"litellm_params":{"model":"%b"}}]}}'),
    (CHAT, b'{"model":"c","messages":["' + b"x" * 300_000 + b'"],"tools":[{"model":"%b"}]}'),
    (b"/v1/rerank", b'{"model":"c","query":"x","documents":[],"embedding_model":"%b"}'),
    (b"/v1/engines/c/chat/completions", b'{"messages":[],"tools":[{"type":"x","model":"%b"}]}'),
    (b"/v1/realtime/client_secrets", b'{"session":{"model":"c","tools":[{"type":"x","model":"%b"}]}}'),
    (b"/api/chat", b'{"model":"c","messages":[],"tools":[{"type":"x","model":"%b"}]}'),
]


@pytest.mark.parametrize(
    ("key", "name", "status"),
    [(ALL, b"o1-pro", 404), (ALL, b"c-inside", 200), (ADMIN, b"o1-pro", 200)],
)
@pytest.mark.parametrize(("path", "body"), INNER)
def test_model_within_a_body_for_an_external_server_is_checked(make_rig, path, body, key, name, status):
    rig = make_rig(keys=keyring(KEYS), backends=(*BACKENDS, CLOUD))
    extra = b"X-Anvil-Explain: 1\r\nx-api-key: %b\r\n" % key.encode()
    answer = rig.ask(body.replace(b"%b", name), path, extra)
    assert (answer.status, answer.json.get("error", {}) != {}) == (status, status == 404)


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"c","messages":[{"role":"user","content":"x","model":"o1-pro"}]}',
        b'{"model":"c","messages":[],"metadata":{"model":"o1-pro"}}',
        b'{"model":"c","messages":[],"tools":[{"type":"function","function":{"name":"f","parameters":'
        b'{"type":"object","properties":{"model":{"type":"string","default":"o1-pro"}},"required":["model"]}}}]}',
        b'{"model":"c","messages":[],"response_format":{"json_schema":{"schema":{"model":"o1-pro"}}}}',
        b'{"model":"c","messages":[],"tools":[{"name":"f","input_schema":{"x":{"model":"o1-pro"}}}]}',
        b'{"model":"c","messages":[],"stop":["model"],"user":"model","model_identity":"You are o1-pro"}',
    ],
)
def test_model_in_free_text_and_schemas_is_not_checked(make_rig, body):
    rig = make_rig(keys=keyring(KEYS), backends=(*BACKENDS, CLOUD))
    extra = b"X-Anvil-Explain: 1\r\nx-api-key: %b\r\n" % ALL.encode()
    assert rig.ask(body, CHAT, extra).status == 200


def test_model_within_a_body_for_an_engine_of_one_model_is_passed_on(make_rig):
    rig = make_rig(keys=keyring(KEYS), backends=(*BACKENDS, CLOUD))
    rig.engine.answers()
    body = b'{"model":"a","messages":[],"tools":[{"type":"image_generation","model":"o1-pro"}]}'
    assert rig.ask(body, CHAT, shows(OWN)).status == 200


PART = b'--b\r\nContent-Disposition: form-data; name="%b"\r\n\r\n%b\r\n'


@pytest.mark.parametrize("field", [b"models", b"models[]", b"Fallbacks", b"draft_model"])
def test_form_with_a_field_for_further_models_is_refused(make_rig, field):
    rig = make_rig(keys=keyring(KEYS), backends=(*BACKENDS, CLOUD))
    rig.engine.answers()
    form = PART % (b"model", b"a") + PART % (field, b"o1-pro") + b"--b--\r\n"
    path = b"/v1/audio/transcriptions"
    assert rig.ask(form, path, shows(ALL), FORM).status == 403
    assert rig.ask(form, path, shows(ADMIN), FORM).status == 200
    urlencoded = b"model=a&%b=o1-pro" % field
    kind = b"application/x-www-form-urlencoded"
    assert rig.ask(urlencoded, path, shows(ALL), kind).status == 403


@pytest.mark.parametrize(
    "field", [b'"lora":[{"id":1,"scale":1}]', b'"lora_path":"other"', b'"adapter_id":"x"']
)
def test_key_for_a_preset_may_choose_no_other_adapter(make_rig, field):
    backend = Backend("a", "a", ("0",), served_model="a-inside", presets=(Preset("fast"),))
    rig = make_rig(keys=keyring(KEYS), backends=(backend,))
    rig.engine.answers()
    body = b'{"model":"fast","messages":[],%b}' % field
    assert rig.ask(body, CHAT, shows(FAST)).status == 403
    assert rig.ask(body, CHAT, shows(OWN)).status == 200
