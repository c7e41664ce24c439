"""How much one key may ask for, and who waits for what."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from anvil_mux.config.config import Backend
from anvil_mux.errors import ConfigError
from anvil_mux.proxy.dispatch import Patience
from tests.config.test_keys import BOB, LINES, ROOT, WATCH, bearer, get, ring
from tests.fake_engine import JSON_OK, RawClient, Rig

# How much one key may ask for


LIMITED = "limited-secret-key"


def limited(make_rig: Callable[..., Rig], limits: str) -> Rig:
    backends = (Backend("a", "a", ("0",), concurrency=1), Backend("b", "org/b", ("1",)))
    return make_rig(keys=ring(f"{ROOT}\n{LIMITED} models=* {limits}"), backends=backends)


def asking(rig: Rig, key: str, model: str = "a") -> RawClient:
    client = rig.client()
    client.post(json.dumps({"model": model}).encode(), extra=bearer(key))
    return client


def test_limits_are_read_and_take_nothing_else_away() -> None:
    found = ring(f"{LIMITED} requests=8 waiting=2").of({b"x-api-key": LIMITED.encode()})
    assert (found.requests, found.waiting, found.models, found.admin) == (8, 2, None, True)


def test_a_key_that_forces_no_swap_has_its_name_and_all_else() -> None:
    found = ring(f"{LIMITED} name=batch swap=never").of({b"x-api-key": LIMITED.encode()})
    assert (found.swaps, found.name, found.models, found.admin) == (False, "batch", None, True)
    assert ring(LIMITED).of({b"x-api-key": LIMITED.encode()}).swaps


@pytest.mark.parametrize("said", ["requests=0", "waiting=", "requests=x", "requests=-1"])
def test_a_limit_is_a_number_from_1_on(said: str) -> None:
    with pytest.raises(ConfigError, match="requests=, waiting= or swap=never"):
        ring(f"{LIMITED} {said}")


def test_a_key_with_as_many_requests_as_it_may_have_gets_429_and_others_are_served(
    make_rig: Callable[..., Rig],
) -> None:
    rig = limited(make_rig, "requests=1")
    first = asking(rig, LIMITED, "org/b")
    held = rig.other.next()
    refused = asking(rig, LIMITED).read()
    assert refused.status == 429
    assert refused.header(b"retry-after") == b"2"
    said = json.loads(refused.body)["error"]
    assert (said["code"], said["type"]) == ("too_many_requests", "rate_limit_error")
    other = asking(rig, ROOT)
    rig.engine.next().send(JSON_OK)
    assert other.read().status == 200
    held.send(JSON_OK)
    assert first.read().status == 200
    rig.events.record(3)
    again = asking(rig, LIMITED)
    rig.engine.next().send(JSON_OK)
    assert again.read().status == 200


def test_a_key_with_as_many_waiting_as_it_may_have_gets_429_but_not_for_what_need_not_wait(
    make_rig: Callable[..., Rig],
) -> None:
    rig = limited(make_rig, "waiting=1")
    running = asking(rig, ROOT)
    held = rig.engine.next()
    waits = asking(rig, LIMITED)
    rig.events.wait("queued", 2)
    assert asking(rig, LIMITED).read().status == 429
    patient = asking(rig, ROOT)
    rig.events.wait("queued", 3)
    held.send(JSON_OK)
    assert running.read().status == 200
    for client in (waits, patient):
        rig.engine.next().send(JSON_OK)
        assert client.read().status == 200
    rig.events.wait("released", 3)
    free = asking(rig, LIMITED)
    rig.engine.next().send(JSON_OK)
    assert free.read().status == 200
    waits_again = asking(rig, LIMITED)
    rig.engine.next().send(JSON_OK)
    assert waits_again.read().status == 200


@pytest.mark.parametrize("before", ["", "requests=3"])
def test_requests_under_way_count_against_a_limit_that_a_reload_lowers(make_rig, before):
    rig = limited(make_rig, before)
    clients, held = [], []
    for _ in range(2):
        clients.append(asking(rig, LIMITED, "org/b"))
        held.append(rig.other.next())
    rig.handler.reconfigure(rig.config, ring(f"{ROOT}\n{LIMITED} models=* requests=2"))
    assert asking(rig, LIMITED).read().status == 429
    held[0].send(JSON_OK)
    assert clients[0].read().status == 200
    rig.events.wait("released", 1)
    rig.events.record(2)
    clients.append(asking(rig, LIMITED, "org/b"))
    held.append(rig.other.next())
    for client, engine in zip(clients[1:], held[1:], strict=True):
        engine.send(JSON_OK)
        assert client.read().status == 200


@pytest.mark.parametrize("before", ["", "waiting=3"])
def test_requests_that_wait_count_against_a_limit_that_a_reload_lowers(make_rig, before):
    rig = limited(make_rig, before)
    running = asking(rig, ROOT)
    held = rig.engine.next()
    waits = asking(rig, LIMITED)
    rig.events.wait("queued", 2)
    rig.handler.reconfigure(rig.config, ring(f"{ROOT}\n{LIMITED} models=* waiting=1"))
    assert asking(rig, LIMITED).read().status == 429
    held.send(JSON_OK)
    assert running.read().status == 200
    rig.engine.next().send(JSON_OK)
    assert waits.read().status == 200


def test_keys_take_turns_at_a_model_that_takes_one_request_at_once(make_rig: Callable[..., Rig]) -> None:
    rig = limited(make_rig, "requests=50")
    first = asking(rig, ROOT)
    held = rig.engine.next()
    many = []
    for count in range(3):
        many.append(asking(rig, ROOT))
        rig.events.wait("queued", count + 2)
    modest = asking(rig, LIMITED)
    rig.events.wait("queued", 5)
    held.send(JSON_OK)
    assert first.read().status == 200
    rig.engine.next().send(JSON_OK)
    assert many[0].read().status == 200
    rig.engine.next().send(JSON_OK)
    assert modest.read().status == 200
    for client in many[1:]:
        rig.engine.next().send(JSON_OK)
        assert client.read().status == 200


def test_a_stream_that_waits_for_a_place_is_told_so(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(
        backends=(Backend("a", "a", ("0",), concurrency=1), Backend("b", "b", ("0",))),
        patience=Patience(grace=0.0, comment_every=0.01),
    )
    first, second = rig.client(), rig.client()
    first.post(b'{"model":"a"}')
    held = rig.engine.next()
    second.post(b'{"model":"a","stream":true}')
    second.read_until(b": anvil-mux waiting for a place at a")
    held.send(JSON_OK)
    assert first.read().status == 200


@pytest.mark.parametrize(
    ("key", "rights"),
    [
        (ROOT, {"name": "unnamed", "admin": True, "models": None, "pages": False}),
        (WATCH, {"name": "unnamed", "admin": False, "models": None, "pages": False}),
        (BOB, {"name": "bob", "admin": False, "models": ["a"], "pages": False}),
    ],
)
def test_who_follows_the_state_is_told_what_the_key_may_do(
    make_rig: Callable[..., Rig], key: str, rights: object
) -> None:
    rig = make_rig(keys=ring(f"{LINES}{BOB} name=bob models=alias state\n"))
    client = get(rig, b"/events", key)
    client.read_until(b"event: snapshot\ndata: ")
    snapshot = client.read_until(b"\n\n")
    assert json.loads(snapshot)["key"] == rights


def test_where_no_key_is_asked_for_there_is_none_to_tell_of(rig: Rig) -> None:
    client = get(rig, b"/events", ROOT)
    client.read_until(b"event: snapshot\ndata: ")
    assert "key" not in json.loads(client.read_until(b"\n\n"))


def test_of_several_keys_each_may_have_half_of_the_queue_waiting_unless_its_line_says_otherwise():
    several = ring("a-key-of-ones-own models=*\nthe-key-of-another models=* waiting=7").sharing(10)
    assert several.of({b"x-api-key": b"a-key-of-ones-own"}).waiting == 5
    assert several.of({b"x-api-key": b"the-key-of-another"}).waiting == 7
    alone = ring("a-key-of-ones-own").sharing(10)
    assert alone.of({b"x-api-key": b"a-key-of-ones-own"}).waiting is None
