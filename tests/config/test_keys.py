"""API keys: how they are written, who may do what with one, and that no engine sees them."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from hashlib import sha256
from pathlib import Path

import pytest

from anvil_mux.command import API_KEYS
from anvil_mux.config import keys
from anvil_mux.config.config import Backend, Config
from anvil_mux.config.keys import Key, Keyring
from anvil_mux.config.service import Service
from anvil_mux.errors import ConfigError, Unauthorized
from anvil_mux.proxy.access import Access
from tests.fake_engine import GUARD, JSON_OK, RawClient, Rig

ROOT, ALICE, WATCH = "root-secret-key", "alice-secret-key", "watching-the-metrics"
BOB = "bobs-secret-key"
LINES = f"{ROOT}\n{ALICE} name=alice models=alias\n{WATCH} models=* state\n"


def ring(text: str) -> Keyring:
    return keys.load(None, {API_KEYS: text})


def bearer(key: str) -> bytes:
    return f"Authorization: Bearer {key}\r\n".encode()


@pytest.fixture
def locked(make_rig: Callable[..., Rig]) -> Rig:
    """Two models behind three keys; the engine of one has a key of its own."""
    service = Service(command=("vllm", "serve", "--api-key", "engine-key"))
    return make_rig(
        keys=ring(LINES),
        backends=(
            Backend("a", "a", gpus=("0",), aliases=("alias",), service=service),
            Backend("b", "org/b", gpus=("0",), served_model="b-inside"),
        ),
    )


# How keys are written


def test_keys_come_from_a_file_and_from_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(
        f"# ours\n\n{ROOT} name=me\n  sha256:{sha256(ALICE.encode()).hexdigest().upper()} models=a,b\n"
    )
    found = keys.load(file, {API_KEYS: f"{WATCH} models=* state; another-key admin models=a"})
    assert len(found) == 4
    assert found.of({b"x-api-key": ROOT.encode()}) == Key(sha256(ROOT.encode()).digest(), "me")
    alice = found.of({b"x-api-key": ALICE.encode()})
    assert (alice.models, alice.state, alice.admin) == (frozenset("ab"), False, False)
    watch = found.of({b"x-api-key": WATCH.encode()})
    assert (watch.models, watch.state, watch.admin) == (None, True, False)
    assert found.of({b"x-api-key": b"another-key"}).admin


def test_every_bad_line_is_told_and_no_key_is(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(
        "short\nlong-enough,and-another\nlong-enough modles=a\nlong-enough models=\nschlüssel-lang\n"
    )
    with pytest.raises(ConfigError) as caught:
        keys.load(file, {})
    assert [problem.rpartition(f"{file}:")[2].partition(":")[0] for problem in caught.value.problems] == list(
        "12345"
    )
    assert (
        "'modles' is not name=, models=, state, admin, requests=, waiting= or swap=never"
        in caught.value.message
    )
    assert "enough" not in caught.value.message


def test_two_lines_that_say_different_things_of_one_key_are_a_mistake(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(f"{ALICE} models=a\n{ROOT} admin\n{ALICE} models=*\n")
    said = rf"keys:3: this key has another name, or other rights, in {tmp_path}/keys:1: keep one line"
    with pytest.raises(ConfigError, match=said):
        keys.load(tmp_path / "keys", {})
    (tmp_path / "keys").write_text(f"{ALICE} models=a\n")
    assert keys.load(tmp_path / "keys", {API_KEYS: f"{ALICE} models=a"}).of({b"x-api-key": ALICE.encode()})


@pytest.mark.parametrize("models", ["a,", ",a", "a,,b", ","])
def test_an_empty_name_among_models_is_a_mistake(models: str) -> None:
    with pytest.raises(ConfigError, match="models= has an empty name"):
        ring(f"{ALICE} models={models}")


def test_a_key_for_an_empty_name_may_use_no_model() -> None:
    key = Key(b"", models=frozenset([""]), state=False, admin=False)
    access = Access(Config(backends=(Backend("a", "a"),)), Keyring([key]), only_local_hosts=False)
    assert access.usable(key) == []


def test_the_digest_of_nothing_is_no_key() -> None:
    with pytest.raises(ConfigError, match="what was hashed was empty"):
        ring(f"sha256:{sha256(b'').hexdigest()} name=me")


@pytest.mark.parametrize("text", [None, "# nothing\n"])
def test_a_key_file_that_locks_nothing_is_a_problem(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "keys").write_text(text)
    with pytest.raises(ConfigError, match="key_file"):
        keys.load(tmp_path / "keys", {})


@pytest.mark.parametrize(
    "text",
    [
        "the-only-key",
        "the-only-key name=me swap=never",
        "one-of-my-keys name=me\nmy-other-key name=me",
        "one-of-my-keys\nmy-other-key",
        "my-own-key name=me admin\nkey-of-alice name=alice models=*\nfor-the-metrics models=none state",
    ],
)
def test_a_key_that_may_do_everything_is_no_surprise(text: str) -> None:
    assert ring(text).warnings == ()


@pytest.mark.parametrize(
    ("text", "line", "write"),
    [
        ("key-of-alice name=alice requests=8\nmy-own-key admin", 1, "KEY name=alice requests=8 models=*"),
        ("my-own-key admin\n# Bob's\nkey-of-bobby name=bob", 3, "KEY name=bob models=*"),
        ("my-own-key\nfor-the-metrics models=none state", 1, "KEY admin"),
        ("my-own-key\nkey-of-bobby name=bob models=*", 1, "KEY admin"),
    ],
)
def test_a_key_without_rights_beside_others_is_a_warning(
    tmp_path: Path, text: str, line: int, write: str
) -> None:
    file = tmp_path / "keys.txt"
    file.write_text(text)
    [told] = keys.load(file, {}).warnings
    assert (told.place, told.write, told.key) == ((str(file), line), write, ("x-anvil", "key_file"))
    assert told.said.startswith(f"{file}:{line}: the key")
    assert "-key" not in told
    assert "-alice" not in told


def test_two_people_whose_lines_have_only_their_names_are_both_told() -> None:
    found = ring("key-of-alice name=alice; key-of-bobby name=bob").warnings
    assert [str(told).partition(",")[0] for told in found] == [
        "ANVIL_API_KEYS:1: the key of alice may do everything",
        "ANVIL_API_KEYS:2: the key of bob may do everything",
    ]


def test_without_keys_nobody_is_asked_for_one() -> None:
    assert not keys.load(None, {})


# How keys are shown


@pytest.mark.parametrize(
    "fields",
    [
        {b"authorization": b"Bearer " + ROOT.encode()},
        {b"authorization": b"bearer   " + ROOT.encode()},
        {b"authorization": b"Basic " + base64.b64encode(b"anyone:" + ROOT.encode())},
        {b"x-api-key": ROOT.encode()},
        {b"api-key": ROOT.encode()},
        {b"authorization": b"Bearer wrong-but-there", b"x-api-key": ROOT.encode()},
    ],
)
def test_a_key_is_known_in_all_the_ways_that_clients_show_it(fields: dict[bytes, bytes]) -> None:
    assert ring(LINES).of(fields).admin


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {b"authorization": b""},
        {b"authorization": b"Bearer "},
        {b"authorization": ROOT.encode()},
        {b"authorization": b"Basic not-base64!"},
        {b"authorization": b"Bearer " + ROOT.encode()[:-1]},
        {b"authorization": b"Bearer " + ROOT.encode() + b"x"},
        {b"x-api-key": b"\xff\xfe\x00"},
        {b"x-api-key": sha256(ROOT.encode()).hexdigest().encode()},
        {b"cookie": ROOT.encode()},
    ],
)
def test_anything_else_is_refused(fields: dict[bytes, bytes]) -> None:
    with pytest.raises(Unauthorized):
        ring(LINES).of(fields)


def test_every_key_is_compared_whichever_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []

    def compare(one: bytes, other: bytes) -> bool:
        compared.append((len(one), len(other)))
        return one == other

    monkeypatch.setattr(keys, "compare_digest", compare)
    found = ring(LINES)
    for shown in (ROOT, WATCH):
        found.of({b"x-api-key": shown.encode()})
    with pytest.raises(Unauthorized):
        found.of({b"x-api-key": b"x"})
    assert compared == [(32, 32)] * 9


# Through the front


@pytest.mark.parametrize(
    "path",
    [
        *(b"/", b"/healthz", b"/metrics", b"/v1/models", b"/models/sse", b"/api/tags", b"/nowhere"),
        b"/upstream/a/version",
    ],
)
def test_without_a_key_nothing_is_told(locked: Rig, path: bytes) -> None:
    answer = locked.client().get(path)
    assert answer.status == 401
    assert answer.header(b"www-authenticate") == b'Basic realm="anvil-mux"'
    assert b"org/b" not in answer.body


def test_a_browser_gets_the_page_without_a_key_and_nothing_else(locked: Rig) -> None:
    accept = b"Accept: text/html,*/*;q=0.8\r\n"
    page = locked.client().get(b"/", extra=accept)
    assert page.status == 200
    assert b"<title>anvil-mux</title>" in page.body
    assert b"org/b" not in page.body
    for path in (b"/healthz", b"/events", b"/metrics"):
        assert locked.client().get(path, extra=accept).status == 401


def test_a_script_that_shows_no_key_makes_no_browser_ask_for_a_password(locked: Rig) -> None:
    answer = locked.client().get(b"/events", extra=b"X-Requested-With: anvil-mux\r\n")
    assert answer.status == 401
    assert answer.header(b"www-authenticate") == b'Bearer realm="anvil-mux"'


@pytest.mark.parametrize("path", [b"/livez", b"/readyz", b"/health", b"/api/hello"])
def test_probes_need_no_key(locked: Rig, path: bytes) -> None:
    assert locked.client().get(path).status == 200


def test_a_request_without_a_key_is_refused_before_its_body_and_in_its_apis_shape(locked: Rig) -> None:
    client = locked.client()
    head = b"POST /v1/messages HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n"
    client.send(head + b"Expect: 100-continue\r\n\r\n")
    answer = client.read()
    assert (answer.status, json.loads(answer.body)["error"]["type"]) == (401, "authentication_error")
    assert locked.engine.asked.empty()
    assert locked.events.record().code == "unauthorized"


def test_the_same_head_is_let_in_again_and_another_is_not(locked: Rig) -> None:
    locked.engine.answer = lambda _: JSON_OK
    client = locked.client()
    statuses = []
    for key in (ROOT, ROOT, "no-such-key", ROOT):
        client.post(b'{"model":"a"}', extra=bearer(key))
        statuses.append(client.read().status)
    assert statuses == [200, 200, 401, 200]


@pytest.mark.parametrize("path", [b"/v1/chat/completions", b"/upstream/a/tokenize"])
@pytest.mark.parametrize("field", [b"Authorization: Bearer %b", b"X-API-Key: %b", b"api-key: %b"])
def test_the_engine_gets_its_own_key_and_never_the_clients(locked: Rig, field: bytes, path: bytes) -> None:
    client = locked.client()
    client.post(b'{"model":"a"}', path=path, extra=field % ROOT.encode() + b"\r\n")
    asked = locked.engine.next()
    assert ROOT.encode() not in asked.head
    assert b"\r\nauthorization: bearer engine-key\r\n" in asked.head.lower()
    assert b"api-key:" not in asked.head.lower()
    asked.send(JSON_OK)
    assert client.read().status == 200


def test_an_engine_without_a_key_gets_none(locked: Rig) -> None:
    client = locked.client()
    client.post(b'{"model":"org/b","messages":[]}', path=b"/api/embed", extra=bearer(ROOT))
    client.read()
    client.post(b'{"model":"org/b","input":"x"}', path=b"/api/embed", extra=bearer(ROOT))
    asked = locked.other.next()
    assert b"authorization" not in asked.head.lower()
    asked.send(JSON_OK)
    client.read()


def test_without_keys_of_ours_the_clients_key_is_the_engines(rig: Rig) -> None:
    client = rig.client()
    client.post(b'{"model":"a"}', extra=bearer(ROOT))
    asked = rig.engine.next()
    assert bearer(ROOT).strip() in asked.head
    asked.send(JSON_OK)
    client.read()


def get(rig: Rig, path: bytes, key: str) -> RawClient:
    client = rig.client()
    client.send(b"GET %b HTTP/1.1\r\nHost: localhost\r\n%b\r\n" % (path, bearer(key)))
    return client


@pytest.mark.parametrize("path", [b"/v1/models", b"/models", b"/api/v0/models"])
def test_a_key_sees_the_models_that_it_may_use(locked: Rig, path: bytes) -> None:
    listed = json.loads(get(locked, path, ALICE).read().body)["data"]
    assert [each["id"] for each in listed] == ["a"]


def test_ollamas_lists_and_what_is_followed_are_cut_as_well(locked: Rig) -> None:
    assert b"org/b" not in get(locked, b"/api/tags", ALICE).read().body
    client = get(locked, b"/models/sse", ALICE)
    client.read_until(b"\r\n\r\n")
    assert b"org/b" not in client.read_until(b"\n\n\r\n")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (b"/v1/chat/completions", b'{"model":"org/b"}'),
        (b"/api/chat", b'{"model":"org/b:latest"}'),
        (b"/api/show", b'{"model":"org/b"}'),
        (b"/openai/deployments/org%2Fb/chat/completions", b"{}"),
        (b"/upstream/org/b/tokenize", b"{}"),
    ],
)
def test_a_key_may_not_use_other_models_nor_learn_of_them(locked: Rig, path: bytes, body: bytes) -> None:
    client = locked.client()
    client.post(body, path=path, extra=bearer(ALICE))
    answer = client.read()
    assert answer.status == 404
    assert b"Known models: a, alias." in answer.body
    assert not locked.events.of("queued")


def test_nor_by_a_reload_that_takes_away_the_model_that_it_waits_for(locked: Rig) -> None:
    locked.mechanism.gate.clear()
    client = locked.client()
    client.post(b'{"model":"a"}', extra=bearer(ALICE))
    locked.events.wait("loading")
    config = replace(locked.config, backends=(locked.config.backends[1], Backend("c", "c", ("0",))))
    reload = threading.Thread(target=locked.mux.facts.reconfigure, args=(config, {}), daemon=True)
    reload.start()
    locked.mechanism.gate.set()
    answer = client.read()
    assert (answer.status, answer.code) == (404, "model_not_found")
    assert answer.error["message"] == "The model `a` does not exist. Known models: none."
    reload.join(GUARD)


@pytest.mark.parametrize(("key", "names_it"), [(ALICE, False), (ROOT, True)])
def test_nor_by_the_error_of_a_request_that_was_cut_for_another_model(
    make_rig: Callable[..., Rig], key: str, names_it: bool
) -> None:
    rig = make_rig(keys=ring(LINES), drain_timeout=0.0)
    rig.other.answer = lambda _: JSON_OK
    cut, other = rig.client(), rig.client()
    cut.post(b'{"model":"a"}', extra=bearer(key))
    rig.engine.next()
    other.post(b'{"model":"org/b"}', extra=bearer(ROOT))
    answer = cut.read()
    assert (answer.status, answer.code) == (503, "severed")
    assert ("org/b" in answer.error["message"]) is names_it
    assert other.read().status == 200


def test_a_key_for_models_uses_them_under_any_name(locked: Rig) -> None:
    locked.engine.answer = lambda _: JSON_OK
    for name in (b"a", b"alias"):
        client = locked.client()
        client.post(b'{"model":"%b"}' % name, extra=bearer(ALICE))
        assert client.read().status == 200
    assert get(locked, b"/v1/models/a", ALICE).read().status == 200
    assert get(locked, b"/v1/models/org%2Fb", ALICE).read().status == 404


@pytest.mark.parametrize(
    ("key", "path", "lacks"),
    [
        *[(ALICE, path, "state") for path in ("/healthz", "/metrics", "/events", "/why?model=a")],
        *[(WATCH, path, "") for path in ("/healthz", "/metrics", "/why?model=a")],
        *[(WATCH, "/logs?model=a", "admin"), (ALICE, "/nowhere", "admin"), (ROOT, "/healthz", "")],
    ],
)
def test_the_state_of_the_whole_is_for_those_who_may_see_it(
    locked: Rig, key: str, path: str, lacks: str
) -> None:
    answer = get(locked, path.encode(), key).read()
    assert answer.status == (403 if lacks else 200)
    if lacks:
        told = json.loads(answer.body)["error"]["message"]
        name = path.partition("?")[0]
        assert told == f"this API key may not use {name}: that needs a key with `{lacks}`"


def test_who_may_do_everything_is_told_what_is_not_there(locked: Rig) -> None:
    assert get(locked, b"/nowhere", ROOT).read().status == 404


def test_who_may_see_the_state_may_follow_it(locked: Rig) -> None:
    client = get(locked, b"/events", WATCH)
    assert b"200" in client.read_until(b"\r\n\r\n").partition(b"\r\n")[0]
    assert b"event: snapshot" in client.read_until(b"\n\n")


@pytest.mark.parametrize("path", [b"/models/load", b"/models/unload", b"/models/pin", b"/models/unpin"])
@pytest.mark.parametrize("key", [ALICE, WATCH])
def test_loading_unloading_and_pinning_by_hand_is_for_admins(locked: Rig, key: str, path: bytes) -> None:
    client = locked.client()
    client.post(b'{"model":"a"}', path=path, extra=bearer(key))
    assert client.read().status == 403
    assert not locked.events.of("queued")
    assert not locked.events.of("pinned")


def test_keeping_alive_for_nothing_is_for_admins_too(locked: Rig) -> None:
    client = locked.client()
    client.post(b'{"model":"a"}', path=b"/models/load?wait=true", extra=bearer(ROOT))
    client.read()
    for key, status, events in ((ALICE, 403, 0), (ROOT, 200, 1)):
        client.post(b'{"model":"a","keep_alive":0}', path=b"/api/generate", extra=bearer(key))
        assert client.read().status == status
        if events:
            locked.events.wait("stopped")
        else:
            assert not locked.events.of("evicting")


def test_how_long_a_model_stays_is_for_admins_to_say(locked: Rig) -> None:
    client = locked.client()
    for key in (ALICE, ROOT):
        client.post(b'{"model":"a","keep_alive":"1h"}', path=b"/api/generate", extra=bearer(key))
        assert client.read().status == 200
        (shown,) = json.loads(client.get(b"/api/ps", extra=bearer(ROOT)).body)["models"]
        stays_for_years = int(shown["expires_at"][:4]) > datetime.now().year + 50
        assert stays_for_years is (key == ALICE)


# Keys that are taken back, or get other rights, while something without an end runs for them

STREAMS = {"/events": WATCH, "/models/sse": ALICE}
NEWS = {"/events": b"event: state", "/models/sse": b'"status":"loaded"'}
CHANGES = [
    (f"{ROOT}", True),
    (f"{ROOT}\n{ALICE} models=none\n{WATCH} models=*", True),
    (f"{LINES}{BOB} models=alias", False),
    (f"{ROOT}\n{ALICE} name=other requests=5 models=alias\n{WATCH} name=w models=* state", False),
    ("", False),
]


@pytest.mark.parametrize(("lines", "ends"), CHANGES)
@pytest.mark.parametrize("path", STREAMS)
def test_a_stream_of_events_ends_with_the_rights_of_its_key(
    locked: Rig, path: str, lines: str, ends: bool
) -> None:
    client = locked.client()
    client.send(b"GET %b HTTP/1.1\r\nHost: localhost\r\n%b\r\n" % (path.encode(), bearer(STREAMS[path])))
    assert client.read_until(b"data: ")
    locked.handler.reconfigure(locked.config, ring(lines))
    if ends:
        assert client.read_until(b"\r\n0\r\n\r\n")
    else:
        other = locked.client()
        other.post(b'{"model":"a"}', path=b"/models/load", extra=bearer(ROOT))
        assert client.read_until(NEWS[path])
        locked.handler.local.drain()
        assert client.read_until(b"\r\n0\r\n\r\n")
    assert locked.events.record().status == 200


@pytest.mark.parametrize("query", [b"", b"?verbose"])
@pytest.mark.parametrize("shown", [b"", bearer("nobodys-key"), bearer(ALICE), bearer(WATCH), bearer(ROOT)])
def test_who_may_not_see_the_state_is_told_a_status_and_nothing_else(
    locked: Rig, shown: bytes, query: bytes
) -> None:
    locked.handler.local.probes.checks = {"docker": lambda: "cannot connect to /run/secret.sock"}
    answer = locked.client().get(b"/readyz" + query, extra=shown)
    sees = shown in (bearer(WATCH), bearer(ROOT))
    assert answer.status == 503
    assert (b"secret" in answer.body, answer.body == b"not ready\n") == (sees, not sees)


def test_a_stream_without_a_key_ends_when_there_are_keys(rig: Rig) -> None:
    client = rig.client()
    client.send(b"GET /models/sse HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert client.read_until(b"data: ")
    rig.handler.reconfigure(rig.config, ring(LINES))
    assert client.read_until(b"\r\n0\r\n\r\n")


@pytest.mark.parametrize(
    ("lines", "status", "says"),
    [
        (ROOT, 401, b"was removed while the request waited"),
        (f"{ROOT}\n{ALICE} models=org/b", 403, b"may not use its model any more"),
        (f"{ROOT}\n{ALICE} models=*", 200, b""),
        (f"{ROOT}\n{ALICE} name=other models=alias", 200, b""),
    ],
)
def test_request_that_waits_fails_once_its_key_may_not_use_the_model(
    locked: Rig, lines: str, status: int, says: bytes
) -> None:
    locked.mechanism.gate.clear()
    locked.engine.answer = lambda _: JSON_OK
    client = locked.client()
    client.post(b'{"model": "alias"}', extra=bearer(ALICE))
    locked.events.wait("loading")
    locked.handler.reconfigure(locked.config, ring(lines))
    if status == 200:
        locked.mechanism.gate.set()
    answer = client.read()
    assert answer.status == status
    assert says in answer.body


def test_what_holds_is_asked_of_the_newest_keys() -> None:
    first, second, third = ring(LINES), ring(LINES), ring(ROOT)
    alice = first.of({b"x-api-key": ALICE.encode()})
    first.give_way(second)
    assert first.admits(alice)
    second.give_way(third)
    assert not first.admits(alice)
    assert first.admits(first.of({b"x-api-key": ROOT.encode()}))


@pytest.mark.parametrize(
    ("before", "after", "admits"),
    [
        ("models=a", "models=a,b", True),
        ("models=a", "models=*", True),
        ("models=a,b", "models=a", False),
        ("models=*", "models=a,b", False),
        ("models=a", "models=a state", True),
        ("models=a state", "models=a", False),
        ("models=a admin", "models=a", False),
    ],
)
def test_key_that_keeps_its_rights_and_gets_more_may_go_on(before: str, after: str, admits: bool) -> None:
    first, second = ring(f"{ALICE} {before}"), ring(f"{ALICE} {after}")
    first.give_way(second)
    assert first.admits(first.of({b"x-api-key": ALICE.encode()})) is admits
