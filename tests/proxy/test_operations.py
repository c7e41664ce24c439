"""llama.cpp's router API: what Open WebUI's badges, Load and Eject ask for."""

import json
import threading

import pytest

from anvil_mux.errors import LoadError
from anvil_mux.protocol import naming
from anvil_mux.proxy import operations
from anvil_mux.telemetry import journal
from tests.fake_engine import ASK_A, GUARD, JSON_OK, RawClient, Rig, answer_of, keyring, shows
from tests.running import seen


def followed(connection: RawClient) -> dict[str, object]:
    """The next event of a client that follows."""
    event = connection.read_until(b"\n\n\r\n")
    return json.loads(event[event.index(b"{") :])


def follow(rig: Rig) -> tuple[RawClient, list[dict[str, object]]]:
    """A client that follows, and the statuses that it was told first."""
    connection = rig.client()
    connection.send(b"GET /models/sse HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert b"text/event-stream" in connection.read_until(b"\r\n\r\n")
    lines = connection.read_until(b"\n\n\r\n").partition(b"\r\n")[2].split(b"\n\n")
    return connection, [json.loads(line.removeprefix(b"data: ")) for line in lines[:-1]]


def status(model: str, value: str, **more: object) -> dict[str, object]:
    return {"model": model, "event": "model_status", "data": {"status": value, **more}}


def badge(rig: Rig, model: str) -> dict[str, object]:
    listed = rig.json(b"/models")["data"]
    return next(each["status"] for each in listed if each["id"] == model)


def test_load_answers_while_the_model_loads_and_goes_on_without_its_client(rig, monkeypatch):
    monkeypatch.setattr(operations, "MOMENT_SECONDS", 0.0)
    rig.mechanism.gate.clear()
    connection = rig.client()
    assert connection.ask(b'{"model":"alias"}', path=b"/models/load").body == b'{"success":true}'
    rig.events.wait("loading")
    assert badge(rig, "a") == {"value": "loading"}
    connection.leave()
    rig.mechanism.gate.set()
    rig.events.wait("ready")
    assert badge(rig, "a") == {"value": "loaded"}


def test_loads_of_a_model_by_clients_that_left_wait_as_one(rig, monkeypatch):
    monkeypatch.setattr(operations, "MOMENT_SECONDS", 0.0)
    rig.mechanism.gate.clear()
    for _ in range(20):
        connection = rig.client()
        assert connection.ask(ASK_A, path=b"/models/load").body == b'{"success":true}'
        connection.leave()
    rig.events.wait("loading")
    assert rig.mux.overview.status().waiting == 1
    rig.mechanism.gate.set()
    rig.events.wait("ready")
    connection = rig.client()
    assert connection.ask(ASK_A, path=b"/models/load?wait=true").body == b'{"success":true}'


def test_load_may_be_waited_for(rig):
    assert rig.ask(ASK_A, path=b"/models/load?wait=true").body == b'{"success":true}'
    assert rig.events.of("ready")


@pytest.mark.parametrize("path", [b"/models/load", b"/models/load?wait=true"])
def test_a_load_that_fails_at_once_says_why(rig, monkeypatch, path):
    monkeypatch.setattr(operations, "MOMENT_SECONDS", GUARD)
    rig.mechanism.failure = LoadError("no such file")
    answer = rig.ask(ASK_A, path=path)
    assert answer.status == 503
    assert b"no such file" in answer.body
    assert badge(rig, "a") == {"value": "unloaded", "failed": True}


def test_ejecting_puts_the_model_out(rig):
    connection = rig.client()
    connection.ask(ASK_A, path=b"/models/load?wait=true")
    assert connection.ask(ASK_A, path=b"/models/unload").body == b'{"success":true}'
    rig.events.wait("stopped")
    assert badge(rig, "a") == {"value": "unloaded"}
    assert connection.ask(ASK_A, path=b"/models/unload").json == {"success": True, "resident": False}


def test_ejecting_what_is_being_loaded_cancels_that_and_tells_who_waits(rig):
    rig.mechanism.gate.clear()
    waiting, connection = rig.client(), rig.client()
    waiting.post(ASK_A)
    rig.events.wait("loading")
    assert connection.ask(ASK_A, path=b"/models/unload").body == b'{"success":true}'
    answer = waiting.read()
    error = answer.error
    assert (answer.status, error["code"]) == (503, "cancelled")
    assert error["message"].startswith("a was unloaded by hand while this request waited for it.")
    rig.events.wait("stopped")
    assert badge(rig, "a") == {"value": "unloaded"}


def test_nothing_kept_alive_ends_a_load_that_nobody_waits_for(rig):
    rig.mechanism.gate.clear()
    waiting, connection = rig.client(), rig.client()
    waiting.post(ASK_A)
    rig.events.wait("loading")
    for left in (False, True):
        if left:
            waiting.leave()
            rig.events.wait("gone")
            assert rig.events.of("cancelling") == []
        assert (
            connection.ask(b'{"model":"a","keep_alive":0}', path=b"/api/generate").json["done_reason"]
            == "unload"
        )
    rig.events.wait("cancelling")
    rig.events.wait("stopped")


def test_keep_alive_of_0_without_the_right_to_unload_is_refused(make_rig):
    rig = make_rig(keys=keyring("first-secret-key models=a;second-secret-key"))
    own, admin = shows("first-secret-key"), shows("second-secret-key")
    nothing = b'{"model":"a","keep_alive":0}'
    for path in (b"/api/generate", b"/api/chat"):
        refused = rig.ask(nothing, path, own)
        assert refused.status == 403
        assert "`keep_alive: 0`" in refused.json["error"]
    rig.engine.answers(answer_of(b'{"choices":[{"message":{"content":"x"},"finish_reason":"stop"}]}'))
    chat = b'{"model":"a","keep_alive":0,"stream":false,"messages":[{"role":"user","content":"x"}]}'
    answer = rig.ask(chat, b"/api/chat", own)
    assert (answer.status, answer.json["done_reason"]) == (200, "stop")
    assert rig.events.of("evicting") == []
    assert rig.ask(nothing, b"/api/generate", admin).json["done_reason"] == "unload"


def test_who_only_looks_loads_nothing(rig):
    """Clients ask so for what they show of each model in the list."""
    rig.engine.answer = lambda _: JSON_OK
    connection = rig.client()
    assert connection.get(b"/props?model=a&autoload=false").status == 400
    assert (
        "a is not loaded, and autoload=false"
        in connection.ask(ASK_A, path=b"/v1/chat/completions?autoload=0").error["message"]
    )
    assert rig.events.of("loading") == []
    assert connection.get(b"/props?model=a&autoload=true").status == 200
    assert connection.get(b"/props?model=a&autoload=false").status == 200


@pytest.mark.parametrize(
    ("query", "loads"),
    [
        *(("", True), ("autoload=", True), ("autoload=1", True), ("model=a&autoload=true", True)),
        *(("autoload=false&model=a", False), ("autoload=0", False), ("autoload=no", False)),
    ],
)
def test_a_request_loads_its_model_unless_it_says_otherwise(query, loads):
    assert naming.may_load(query) == loads


def test_a_model_is_pinned_and_unpinned(rig):
    connection = rig.client()
    for what, pinned in ((b"pin", True), (b"unpin", False)):
        assert connection.ask(ASK_A, path=b"/models/" + what).body == b'{"success":true}'
        models = rig.json(b"/healthz")["models"]
        assert {name: model["pinned"] for name, model in models.items()} == {"a": pinned, "org/b": False}


def test_who_follows_is_told_every_status_and_then_each_change(rig, monkeypatch):
    monkeypatch.setattr(operations, "LOOK_SECONDS", 0.01)
    rig.engine.answer = lambda _: JSON_OK
    rig.mechanism.gate.clear()
    connection, first = follow(rig)
    assert first == [status("a", "unloaded"), status("org/b", "unloaded")]
    asking = rig.client()
    asking.post(ASK_A)
    assert followed(connection) == status("a", "loading")
    rig.mechanism.gate.set()
    assert followed(connection) == status("a", "loaded")
    assert asking.read().status == 200


def test_the_models_are_looked_at_once_for_all_who_follow(rig, monkeypatch):
    looks, status_now = [], rig.mux.overview.status

    def counted() -> object:
        looks.append(threading.current_thread().name)
        return status_now()

    monkeypatch.setattr(operations, "LOOK_SECONDS", GUARD)
    monkeypatch.setattr(rig.mux.overview, "status", counted)
    for _ in range(5):
        assert follow(rig)[1] == [status("a", "unloaded"), status("org/b", "unloaded")]
    assert len(looks) == 1


def test_no_more_follow_than_there_may_be_viewers(rig, monkeypatch):
    monkeypatch.setattr(journal, "WATCHERS", 2)
    following = [follow(rig) for _ in range(2)]
    answer = rig.get(b"/models/sse")
    assert (answer.status, answer.header(b"retry-after")) == (503, b"5")
    assert b"2 viewers are connected already" in answer.body
    following[0][0].leave()

    def head() -> bytes:
        connection = rig.client()
        connection.send(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        return connection.read_until(b"\r\n\r\n")

    assert b" 200 OK" in seen(head, lambda head: b" 200 OK" in head)


def test_who_follows_hears_something_now_and_then(rig, monkeypatch):
    monkeypatch.setattr(operations, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(operations, "COMMENT_SECONDS", 0.0)
    connection, _ = follow(rig)
    assert connection.read_until(b"\n\r\n").endswith(b": nothing has changed\n\r\n")


def test_shutting_down_ends_the_following_as_it_should_end(rig):
    connection, _ = follow(rig)
    ended: list[bool] = []
    drain = threading.Thread(target=lambda: ended.append(rig.server.drain(GUARD)))
    drain.start()
    assert connection.rest().endswith(b"0\r\n\r\n")
    drain.join(GUARD)
    assert ended == [True]


@pytest.mark.parametrize("body", [b"model=a", b"x=1&model=%61", ASK_A])
def test_a_model_may_be_named_in_a_plain_form(rig, body):
    kind = b"application/x-www-form-urlencoded"
    assert rig.ask(body, b"/models/load?wait=true", type=kind).body == b'{"success":true}'
    assert rig.events.of("ready")
