"""Answers that engines keep: who goes on from one, or asks for it again, reaches the engine that has it."""

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from anvil_mux.config.config import Backend
from anvil_mux.config.values import AnyOf, Preset, Rule
from anvil_mux.protocol import api, http1, naming
from anvil_mux.proxy import question
from tests.fake_engine import GUARD, SSE_HEAD, FakeEngine, RawClient, Rig, answer_of, chunk, keyring, shows
from tests.scheduler.test_replicas import fleet

CREATED = b'event: response.created\ndata: {"type":"response.created","response":{"id":"resp_s1","x":1}}\n\n'


@pytest.fixture(params=["least_prefill_work", "round_robin"])
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    """Two replicas, a and b, resident."""
    made = fleet(request.param)
    yield made
    made.close()


def ask(rig: Rig, previous: str = "", extra: bytes = b"") -> RawClient:
    said = {"model": "m", "input": "hi", **({"previous_response_id": previous} if previous else {})}
    client = rig.client()
    client.post(json.dumps(said).encode(), b"/v1/responses", extra)
    return client


def answer(client: RawClient, engine: FakeEngine, id: str) -> None:
    engine.next().send(answer_of(b'{"id":"%b","object":"response"}' % id.encode()))
    assert client.read().status == 200


def first_answer(rig: Rig, id: str = "resp_1") -> FakeEngine:
    """The engine that gave it: the first replica, while nobody else asks."""
    answer(ask(rig), rig.engine, id)
    return rig.engine


def test_a_question_that_goes_on_from_an_answer_reaches_the_replica_that_has_it(rig):
    first_answer(rig)
    for id, previous in (("resp_2", "resp_1"), ("resp_3", "resp_2"), ("resp_4", "resp_1")):
        answer(ask(rig, previous), rig.engine, id)


def test_it_does_so_also_while_the_other_replica_has_nothing_to_do(rig):
    first_answer(rig)
    busy = [ask(rig, "resp_1") for _ in range(3)]
    for _ in busy:
        rig.engine.next().send(answer_of(b"{}"))
    assert [client.read().status for client in busy] == [200] * 3


def test_it_waits_while_that_replica_has_as_many_requests_as_it_takes():
    rig = fleet("round_robin", concurrency=1)
    try:
        first_answer(rig)
        busy = ask(rig, "resp_1")
        asked = rig.engine.next()
        waiting = ask(rig, "resp_1")
        assert rig.events.wait("queued").backend == "a"
        answer(ask(rig), rig.other, "resp_9")  # nobody waits for that one
        asked.send(answer_of(b"{}"))
        assert busy.read().status == 200
        answer(waiting, rig.engine, "resp_2")
    finally:
        rig.close()


def test_an_answer_that_was_streamed_is_known_by_its_first_event(rig):
    client, asked = rig.asked(b'{"model":"m","input":"hi","stream":true}', b"/v1/responses")
    asked.send(SSE_HEAD, chunk(b": waits\n"), chunk(CREATED[:30]))
    asked.send(chunk(CREATED[30:]))
    client.read_until(b"resp_s1")
    asked.send(chunk(b"data: [DONE]\n\n"), b"0\r\n\r\n")
    client.read_until(b"[DONE]")
    answer(ask(rig, "resp_s1"), rig.engine, "resp_2")


@pytest.mark.parametrize("method", [b"GET", b"DELETE"])
def test_an_answer_is_fetched_and_deleted_where_it_is(rig, method):
    engine = first_answer(rig)
    said = b'{"id":"resp_1"}'
    heard = engine.answers(answer_of(said))
    assert rig.get(b"/v1/responses/resp_1?include=x", method).body == said
    assert heard[0].head.startswith(b"%b /v1/responses/resp_1?include=x HTTP/1.1\r\n" % method)


def test_a_body_that_comes_with_the_question_for_an_answer_is_announced(rig):
    engine = first_answer(rig)
    client, body = rig.client(), b'{"x":1}'
    head = b"GET /v1/responses/resp_1 HTTP/1.1\r\nHost: %b\r\nContent-Length: %d\r\n\r\n"
    client.send(head % (client.host, len(body)) + body)
    asked = engine.next()
    assert json.loads(asked.body)["x"] == 1
    asked.send(answer_of(b"{}"))
    assert client.read().body == b"{}"
    assert engine.asked.empty()


def test_an_answer_that_nobody_gave_or_whose_engine_is_gone_is_not_found_and_loads_nothing(rig):
    assert rig.get(b"/v1/responses/resp_9").status == 404
    first_answer(rig)
    rig.mux.facts.unload("m")
    rig.events.wait("stopped", 2)
    assert rig.get(b"/v1/responses/resp_1").status == 404
    assert rig.events.of("loading") == []


def test_an_answer_is_found_by_the_key_that_asked_for_it_alone(make_rig):
    ring = keyring("first-secret-key;second-secret-key")
    rig = make_rig(keys=ring, backends=(Backend("a", "m", ("0",)), Backend("b", "b", ("0",))))
    own, other = shows("first-secret-key"), shows("second-secret-key")
    answer(ask(rig, extra=own), rig.engine, "resp_1")
    assert rig.get(b"/v1/responses/resp_1", extra=other).status == 404
    rig.engine.answers()
    assert rig.get(b"/v1/responses/resp_1", extra=own).status == 200


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        (b"/v1/responses", b'{"model":"m","previous_response_id":"resp_1"}', 404),
        (b"/v1/responses", b'{"model":"m","previous\\u005fresponse_id":"resp\\u005f1"}', 404),
        (b"/v1/engines/m/responses", b'{"previous_response_id":"resp_1"}', 404),
        (b"/upstream/m/v1/responses", b'{"previous_response_id":"resp_1"}', 404),
        (b"/upstream/m/v1/responses/resp_1/cancel", b"{}", 404),
        (b"/v1/responses", b'{"model":"m","previous_response_id":null,"previous_response_id":"resp_1"}', 400),
        (b"/v1/responses", b'{"model":"m","input":{"previous_response_id":"resp_1"}}', 200),
        (b"/v1/responses", b'{"model":"m","previous_response_id":"resp_2"}', 200),
    ],
)
def test_nobody_goes_on_from_the_answer_to_another_key(make_rig, path, body, status):
    ring = keyring("first-secret-key;second-secret-key")
    rig = make_rig(keys=ring, backends=(Backend("a", "m", ("0",)), Backend("b", "b", ("0",))))
    answer(ask(rig, extra=shows("first-secret-key")), rig.engine, "resp_1")
    rig.engine.answers()
    assert rig.ask(body, path, shows("second-secret-key")).status == status
    again = 400 if status == 400 else 200
    assert rig.ask(body, path, shows("first-secret-key")).status == again


BODY_OF_ANOTHER = b'{"model":"m","input":"x","previous_response_id":"resp_1"}'
WAYS_TO_ANOTHERS_ANSWER = [
    (b"POST", b"/v1/responses", BODY_OF_ANOTHER),
    (b"POST", b"/v1/responses", BODY_OF_ANOTHER.replace(b"resp_1", b"resp_1\\u0000")),
    (b"POST", b"/v1/responses/compact", BODY_OF_ANOTHER),
    (b"POST", b"/v1/responses/input_tokens", BODY_OF_ANOTHER),
    (b"POST", b"/openai/v1/responses/compact", BODY_OF_ANOTHER),
    (b"POST", b"/v1/engines/m/responses", BODY_OF_ANOTHER),
    (b"POST", b"/upstream/m/v1/responses", BODY_OF_ANOTHER),
    (b"POST", b"/upstream/m/v1/responses/compact", BODY_OF_ANOTHER),
    (b"GET", b"/v1/responses/resp_1", b""),
    (b"GET", b"/v1/responses/resp_1/input_items", b""),
    (b"POST", b"/v1/responses/resp_1/cancel", b"{}"),
    (b"DELETE", b"/v1/responses/resp_1", b""),
    (b"GET", b"/upstream/m/v1/responses/resp_1", b""),
    (b"GET", b"/upstream/m/responses/resp_1", b""),
    (b"POST", b"/upstream/m/v1/responses/resp_1/cancel", b"{}"),
]


@pytest.mark.parametrize("is_known", [True, False], ids=["known", "forgotten"])
@pytest.mark.parametrize(("method", "path", "body"), WAYS_TO_ANOTHERS_ANSWER)
def test_answer_of_another_key_is_not_found_by_any_route(make_rig, method, path, body, is_known):
    ring = keyring("first-secret-key models=m;second-secret-key models=m")
    rig = make_rig(keys=ring, backends=(Backend("a", "m", ("0",)), Backend("b", "b", ("0",))))
    answer(ask(rig, extra=shows("first-secret-key")), rig.engine, "resp_1" if is_known else "resp_other")
    head = (
        b"%b %b HTTP/1.1\r\nHost: localhost\r\n%bContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    )
    client = rig.client()
    client.send(head % (method, path, shows("second-secret-key"), len(body)) + body)
    assert client.read().status == 404
    assert rig.engine.asked.empty()


def test_forgotten_answer_is_passed_on_for_an_admin_and_without_keys(make_rig):
    for ring in (keyring("first-secret-key;second-secret-key models=m"), keyring()):
        rig = make_rig(keys=ring, backends=(Backend("a", "m", ("0",)), Backend("b", "b", ("0",))))
        answer(ask(rig, "resp_of_old", extra=shows("first-secret-key")), rig.engine, "resp_1")


def test_answer_below_upstream_is_known_to_be_its_keys(make_rig):
    rig = make_rig(
        keys=keyring("first-secret-key models=m;second-secret-key models=m"),
        backends=(Backend("a", "m", ("0",)),),
    )
    own = shows("first-secret-key")
    client = rig.client()
    client.post(b'{"model":"m","input":"x"}', b"/upstream/m/v1/responses", own)
    answer(client, rig.engine, "resp_1")
    answer(ask(rig, "resp_1", own), rig.engine, "resp_2")


@pytest.mark.parametrize(
    ("line", "status"),
    [
        ("requests=9 name=x", 200),
        ("models=m", 200),
        ("models=m,b", 200),
        ("models=*", 200),
        ("models=b", 404),
    ],
)
def test_stored_response_of_a_key_whose_rights_change_stays_its_own(make_rig, line, status):
    backends = (Backend("a", "m", ("0",)), Backend("b", "b", ("0",)))
    rig = make_rig(keys=keyring("first-secret-key models=m"), backends=backends)
    own = shows("first-secret-key")
    answer(ask(rig, extra=own), rig.engine, "resp_1")
    rig.handler.reconfigure(rig.config, keyring(f"first-secret-key {line}"))
    rig.engine.answers()
    assert rig.get(b"/v1/responses/resp_1", extra=own).status == status
    going_on = {"model": line[-1] if status == 404 else "m", "input": "x", "previous_response_id": "resp_1"}
    assert rig.ask(json.dumps(going_on).encode(), b"/v1/responses", own).status == status


@pytest.mark.parametrize("name", ["fast", "any"])
def test_stored_response_of_a_key_for_another_name_is_found(make_rig, name):
    backend = Backend("a", "m", ("0",), presets=(Preset("fast"),))
    rig = make_rig(
        keys=keyring(f"first-secret-key models={name};second-secret-key"),
        backends=(backend,),
        any_of={"any": AnyOf((Rule(("m",)),))},
    )
    own = shows("first-secret-key")
    client = rig.client()
    client.post(b'{"model":"%b","input":"x"}' % name.encode(), b"/v1/responses", own)
    answer(client, rig.engine, "resp_1")
    rig.engine.answers()
    assert rig.get(b"/v1/responses/resp_1", extra=own).status == 200


def test_stored_response_whose_id_is_repeated_stays_its_first_owners(make_rig):
    rig = make_rig(
        keys=keyring("first-secret-key models=m;second-secret-key models=m"),
        backends=(Backend("a", "m", ("0",)),),
    )
    first, second = shows("first-secret-key"), shows("second-secret-key")
    for key in (first, second, first):
        answer(ask(rig, extra=key), rig.engine, "resp_1")
    rig.engine.answers()
    assert rig.get(b"/v1/responses/resp_1", extra=first).status == 200
    assert rig.get(b"/v1/responses/resp_1", extra=second).status == 404


def test_an_answer_without_a_length_is_known_though_its_body_comes_behind_its_head(rig, monkeypatch):
    client, asked = rig.asked(b'{"model":"m","input":"hi"}', b"/v1/responses")
    head_was_read, parse = threading.Event(), http1.parse_response

    def parse_response(*head: Any, **how: Any) -> http1.Response:
        head_was_read.set()
        return parse(*head, **how)

    monkeypatch.setattr(http1, "parse_response", parse_response)
    asked.send(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n")
    assert head_was_read.wait(GUARD)
    asked.send(chunk(b'{"object":'), chunk(b' "response",'), chunk(b'"id": "resp_c1"}'), b"0\r\n\r\n")
    assert client.read().status == 200
    answer(ask(rig, "resp_c1"), rig.engine, "resp_2")


@pytest.mark.parametrize(
    ("method", "path", "found"),
    [
        ("GET", "/v1/responses/resp_1", "/v1/responses/resp_1"),
        ("GET", "/responses/resp_1/input_items", "/v1/responses/resp_1/input_items"),
        ("POST", "/openai/v1/responses/resp_1/cancel", "/v1/responses/resp_1/cancel"),
        ("DELETE", "/v1/responses/resp_1", "/v1/responses/resp_1"),
        ("DELETE", "/v1/responses/resp_1/cancel", None),
        ("GET", "/v1/responses/resp_1/..", None),
        ("GET", "/v1/responses/other", None),
        ("PUT", "/v1/responses/resp_1", None),
    ],
)
def test_the_routes_of_an_answer(method, path, found):
    route = api.match(method, path)
    assert (route.path if route else None) == found


def test_ids_are_read_where_they_stand_and_not_in_what_somebody_wrote():
    assert question.answer_id(b'{"id": "resp_a-1","x":"\\"id\\":\\"resp_no\\""}') == "resp_a-1"
    assert question.answer_id(b'{"text":"\\"id\\":\\"resp_no\\""}') == ""
    for body, previous in (
        (b'{"previous_response_id" : "resp_p"}', "resp_p"),
        (b'{"input":"\\"previous_response_id\\":\\"resp_no\\""}', ""),
        (b'{"previous_response_id":null}', ""),
    ):
        assert naming.string_of(body, "previous_response_id") == previous


def test_stored_responses_beyond_the_most_are_forgotten(make_rig, monkeypatch):
    monkeypatch.setattr(question, "MOST_ANSWERS", 2)
    rig = make_rig(backends=(Backend("a", "m", ("0",)),))
    for number in range(3):
        answer(ask(rig), rig.engine, f"resp_{number}")
    rig.engine.answers()
    assert [rig.get(b"/v1/responses/resp_%d" % number).status for number in range(3)] == [404, 200, 200]


@pytest.mark.parametrize(
    ("events", "enough"),
    [
        (b"5\r\ndata:", False),
        (b"8\r\n: waits\n\r\n", False),
        (b'data: {"id":"resp_1"', True),
        (b"2\r\n\n\n\r\n", True),
        (b"data: {}\r\n\r\n", True),
        (b"0\r\n\r\n", True),
        (b"x" * 70_000, True),
    ],
)
def test_a_stream_is_held_back_no_longer_than_its_first_event(events, enough):
    assert question.has_answer_id(events) is enough
