"""Heads and bodies of requests: what is refused, what is read, and connections that stay in step."""

import gzip
import json
from types import SimpleNamespace

import pytest

from anvil_mux.errors import BadRequest
from anvil_mux.proxy import client
from tests.fake_engine import ASK_A, ASK_HEAD, ASK_LIVEZ, JSON_OK, chunk, keyring, shows
from tests.running import seen

# What must not be believed


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        pytest.param(
            ASK_HEAD + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400, id="CL+TE"
        ),
        pytest.param(ASK_HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n", 501, id="other coding"),
        pytest.param(ASK_HEAD + b"Content-Length: 999999999999\r\n\r\n", 413, id="huge"),
        pytest.param(ASK_HEAD + b"X: 1\nContent-Length: 4\r\n\r\n", 400, id="bare LF"),
        pytest.param(b"GET /livez HTTP/1.1\nHost: localhost\n\n", 400, id="LF alone"),
        pytest.param(b"GET http://other/livez HTTP/1.1\r\nHost: localhost\r\n\r\n", 400, id="other host"),
        pytest.param(b"POST / HTTP/1.1\r\n\r\n", 400, id="no Host"),
        pytest.param(b"GET / HTTP/2.0\r\n\r\n", 505, id="HTTP/2"),
        pytest.param(b"\x16\x03\x01\x02\x00\x01", 400, id="TLS"),
        pytest.param(b"GET /" + b"x" * 9000 + b" HTTP/1.1\r\n\r\n", 414, id="long line"),
        pytest.param(
            b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"X: 1\r\n" * 101 + b"\r\n", 431, id="101 fields"
        ),
        pytest.param(ASK_HEAD + b"X: " + b"x" * 70000, 431, id="large head"),
        *[
            pytest.param(ASK_HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunks, 400, id=name)
            for name, chunks in (("no size", b"zz\r\n"), ("a longer chunk", b"4\r\n12345678"))
        ],
        pytest.param(ASK_HEAD + b"Expect: 200-ok\r\nContent-Length: 4\r\n\r\n", 417, id="other expectation"),
    ],
)
def test_what_is_ambiguous_is_refused_and_nothing_after_it_is_believed(rig, request_bytes, status):
    connection = rig.client()
    connection.send(request_bytes + ASK_LIVEZ)
    answer = connection.read()
    assert answer.status == status
    assert answer.header(b"content-type") == b"application/json"
    assert answer.header(b"server") == b"anvil-mux"
    assert answer.header(b"connection") == b"close"
    assert answer.code
    assert connection.is_closed()
    assert rig.engine.asked.empty()


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"[]", 400),
        (b"nonsense", 400),
        (b'"model"', 400),
        (b'{"model":', 400),
        (b'{"model":1}', 400),
        (b'{"model":"a","model":"b"}', 400),
        (b'{"messages":[]}', 400),
        (b'{"model":"nobody"}', 404),
    ],
)
def test_a_bad_body_is_a_clean_error_and_the_connection_goes_on(rig, body, status):
    rig.engine.answer = lambda _: JSON_OK
    connection = rig.client()
    answer = connection.ask(body)
    assert answer.status == status
    assert answer.header(b"connection") is None
    assert connection.ask(ASK_A).status == 200


def test_an_unknown_model_is_told_with_the_known_ones(rig):
    answer = rig.ask(b'{"model":"nobody"}')
    assert answer.code == "model_not_found"
    assert answer.header(b"x-should-retry") == b"false"
    assert b"The model `nobody` does not exist. Known models: a, alias, org/b." in answer.body
    answer = rig.ask(b'{"model":"org/B"}')
    assert b"does not exist. Did you mean `org/b`? Known" in answer.body
    assert not rig.events.of("loading")


def test_an_empty_line_between_two_requests_is_skipped(rig):
    connection = rig.client()
    connection.send(b"\r\n" + ASK_LIVEZ + b"\r\n" + ASK_LIVEZ)
    assert [connection.read().status for _ in range(2)] == [200, 200]


def test_an_empty_line_alone_does_not_begin_a_request(rig, monkeypatch):
    """A client that ends its body with a stray CRLF has as long until its next request as any other."""
    monkeypatch.setattr(client, "HEAD_SECONDS", 0.0)
    connection = rig.client()
    connection.send(ASK_LIVEZ + b"\r\n")
    assert connection.read().status == 200
    connection.send(ASK_LIVEZ)
    assert connection.read().status == 200


# Bodies that nobody reads


@pytest.mark.parametrize("path", [b"/nowhere", b"/v1/files", b"/livez"])
def test_the_small_body_of_a_refused_request_is_not_the_next_request(rig, path):
    connection = rig.client()
    answer = connection.ask(ASK_LIVEZ, path=path)
    assert answer.status in (404, 405, 501)
    assert connection.get(b"/v1/models").status == 200
    assert connection.buffer == b""


def test_a_form_that_is_refused_while_it_comes_swallows_no_later_request(rig):
    """Else whoever shares a proxy's connection has the next request eaten as the rest of this one."""
    form = b"--XX\r\nContent-Disposition: form-data; name=model\r\n\r\na\r\n--XX?" + b"x" * 40_000
    connection = rig.client()
    connection.send(
        b"POST /v1/audio/transcriptions HTTP/1.1\r\nHost: localhost\r\n"
        b"Content-Type: multipart/form-data; boundary=XX\r\nContent-Length: %d\r\n\r\n%b"
        % (len(form), form)
        + b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n" * 500
    )
    answer = connection.read()
    assert answer.status == 400
    assert answer.header(b"connection") == b"close"
    assert connection.is_closed()


def test_a_large_unread_body_closes_the_connection_after_the_answer(rig):
    connection = rig.client()
    answer = connection.ask(ASK_LIVEZ * 10000, path=b"/nowhere")
    assert answer.status == 404
    assert answer.header(b"connection") == b"close"
    for _ in range(3):
        connection.send(ASK_LIVEZ)  # a reset would destroy the answer under way
    assert connection.is_closed()


@pytest.mark.parametrize("path", [b"/livez", b"/v1/models", b"/metrics", b"/"])
def test_an_answer_of_our_own_says_that_an_unread_body_ends_the_connection(rig, path):
    connection = rig.client()
    connection.send(b"GET %b HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n" % path)
    answer = connection.read()
    assert (answer.status, answer.header(b"connection")) == (200, b"close")
    assert connection.is_closed()


def test_the_body_of_a_question_that_needs_none_is_read_before_an_engine_is_asked(rig):
    connection = rig.client()
    ask = b"GET /props?model=a HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    rig.engine.answer = lambda asked: JSON_OK
    connection.send(ask + b"2\r\n{}\r\n0\r\n\r\n" + ask + b"2\n{}")
    assert connection.read().status == 200
    assert connection.read().status == 400
    assert connection.is_closed()


def test_what_a_client_sent_behind_its_last_request_destroys_no_answer(rig):
    """A connection that is closed with unread bytes is reset, and its client may lose the answer."""
    connection = rig.client()
    head = b"GET /livez HTTP/1.0\r\nX-Pad: %b\r\n\r\n"
    connection.send(head % (b"x" * (client.READ - len(head) + 2)) + b"GET /livez HTTP/1.0\r\n\r\n")
    assert connection.read().status == 200
    assert connection.is_closed()


def test_a_refused_body_that_has_not_come_is_not_waited_for(rig):
    connection = rig.client()
    connection.send(b"POST /nowhere HTTP/1.1\r\nHost: localhost\r\nContent-Length: 60000\r\n\r\n{")
    answer = connection.read()
    assert (answer.status, answer.header(b"connection")) == (404, b"close")
    assert connection.is_closed()


def test_a_body_has_to_come_at_its_rate_to_the_end(rig, monkeypatch):
    """One that came fast at first could else be held for hours."""
    moments = iter([0.0, 10.0, 20.0, 31.0, 50.0, 62.0, 70.0])
    monkeypatch.setattr(client, "time", SimpleNamespace(monotonic=lambda: next(moments)))
    pace = client._Pace()
    for have in (30 << 20, 30 << 20, 31 << 20, 31 << 20):
        pace.check(have)
    with pytest.raises(BadRequest, match="too slowly"):
        pace.check((31 << 20) + 1000)


# The memory of bodies


def announced(length: int) -> bytes:
    return ASK_HEAD + b"Content-Length: %d\r\n\r\n" % length


def test_a_body_takes_the_memory_that_has_come_and_not_what_is_announced(rig):
    connection = rig.client()
    connection.send(announced(60 << 20) + b"{" + b" " * 99_999)
    held = seen(lambda: rig.server.bodies.held, lambda held: held > 60_000)
    assert held <= 300_000
    connection.leave()
    assert seen(lambda: rig.server.bodies.held, lambda held: not held) == 0


@pytest.mark.parametrize("framing", ["length", "chunked", "gzip"])
def test_bodies_beyond_the_memory_for_all_are_refused_for_a_while(make_rig, framing):
    rig = make_rig(max_bodies=3 << 20)
    waiting = rig.client()
    body = b'{"model":"a","x":"%b"}' % (b"x" * (2 << 20))
    waiting.post(body)
    asked = rig.engine.next()
    further = rig.client()
    if framing == "length":
        further.send(announced(len(body)) + body[: 3 << 19])
    elif framing == "chunked":
        further.send(ASK_HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunk(b" " * (2 << 20)))
    else:
        packed = gzip.compress(body)
        further.send(
            ASK_HEAD + b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n%b" % (len(packed), packed)
        )
    answer = further.read()
    assert (answer.status, answer.code) == (503, "overloaded")
    assert b"max_bodies" in answer.body
    assert answer.header(b"retry-after") == b"5"
    asked.send(JSON_OK)
    assert waiting.read().status == 200
    assert seen(lambda: rig.server.bodies.held, lambda held: not held) == 0
    rig.passes(body)


def test_a_body_unpacks_to_no_more_than_its_size_pays_for(rig):
    answer = rig.ask(
        gzip.compress(b'{"model":"a","x":"%b"}' % bytes(30 << 20)), extra=b"Content-Encoding: gzip\r\n"
    )
    assert (answer.status, answer.code) == (413, "request_too_large")


def test_a_keys_requests_count_from_their_heads(make_rig):
    rig = make_rig(keys=keyring("a-key-of-ones-own requests=1"))
    rig.engine.answer = lambda _: JSON_OK
    shown = shows("a-key-of-ones-own")
    sending, further = rig.client(), rig.client()
    sending.send(ASK_HEAD + shown + b"Content-Length: 13\r\nExpect: 100-continue\r\n\r\n")
    assert sending.read_until(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"

    def status() -> int:
        return further.ask(ASK_A, extra=shown).status

    assert status() == 429
    sending.send(ASK_A)
    assert sending.read().status == 200
    assert seen(status, lambda status: status == 200) == 200


@pytest.mark.parametrize(
    "sent", [b"Content-Length: 1001\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\n" + chunk(b"x" * 600) * 2]
)
def test_a_body_that_is_too_large_is_refused_before_it_is_read(make_rig, sent):
    connection = make_rig(max_body=1000).client()
    connection.send(ASK_HEAD + sent)
    answer = connection.read()
    assert (answer.status, answer.code) == (413, "request_too_large")
    assert connection.is_closed()


def test_a_sessions_model_is_what_the_engine_calls_it(rig):
    path = b"/v1/realtime/client_secrets"
    asked = rig.passes(b'{"session":{"model":"org/b"}}', path, engine=rig.other)
    assert asked.head.startswith(b"POST %b HTTP/1.1\r\n" % path)
    assert asked.body == b'{"session":{"model":"b-inside"}}'


def test_a_model_in_the_path_is_told_to_the_engine_in_the_body(rig):
    path = b"/openai/deployments/org%2Fb/chat/completions?api-version=1"
    for body in (b'{"messages":[]}', b'{"model":"a","messages":[]}', b'{"model":"org/b","messages":[]}'):
        asked = rig.passes(body, path, engine=rig.other)
        assert asked.head.startswith(b"POST /v1/chat/completions?api-version=1 HTTP/1.1\r\n")
        assert json.loads(asked.body) == {"model": "b-inside", "messages": []}
    assert rig.ask(b"{}", b"/v1/engines/nobody/completions").status == 404


# Bodies in chunks


def test_a_chunked_body_is_understood_and_sent_on_with_a_length(rig):
    connection = rig.client()
    connection.send(ASK_HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b'5;x=y\r\n{"mod\r\n')
    connection.send(b'8\r\nel":"a"}\r\n0\r\nTrailer: x\r\n\r\n' + ASK_LIVEZ)
    asked = rig.engine.next()
    assert asked.body == ASK_A
    assert b"transfer-encoding" not in asked.head.lower()
    asked.send(JSON_OK)
    assert connection.read().body == b"{}"
    assert connection.read().body == b"ok\n"


# Expect


def test_continue_is_said_once_the_request_is_acceptable(rig):
    connection = rig.client()
    connection.send(ASK_HEAD + b"Content-Length: 13\r\nExpect: 100-continue\r\n\r\n")
    assert connection.read_until(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    connection.send(ASK_A)
    asked = rig.engine.next()
    assert b"expect" not in asked.head.lower()
    asked.send(JSON_OK)
    assert connection.read().status == 200


@pytest.mark.parametrize(
    ("path", "length", "status"), [(b"/nowhere", 13, 404), (b"/v1/completions", 1 << 40, 413)]
)
def test_continue_is_not_said_to_what_is_refused(rig, path, length, status):
    connection = rig.client()
    connection.send(
        b"POST %b HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\nContent-Length: %d\r\n\r\n"
        % (path, length)
    )
    answer = connection.read()
    assert answer.status == status
    assert answer.header(b"connection") == b"close"


EARLY = b"HTTP/1.1 413 Content Too Large\r\nContent-Type: application/json\r\nContent-Length: 12\r\n\r\n"


@pytest.mark.parametrize("ends_early", [False, True])
@pytest.mark.parametrize("interim", [b"", b"HTTP/1.1 100 Continue\r\n\r\n"])
def test_an_early_refusal_while_the_body_is_sent_is_passed_on(rig, ends_early, interim):
    rig.engine.early_answer, rig.engine.ends_early = interim + EARLY + b'{"error":42}', ends_early
    answer = rig.ask(b'{"model":"a","x":"%b"}' % (b"x" * 20_000_000))
    assert (answer.status, answer.body) == (413, b'{"error":42}')
    rig.engine.early_answer = b""
    rig.passes(ASK_A)


def test_an_early_answer_that_is_no_refusal_does_not_end_the_body(rig):
    rig.engine.early_answer = b""
    client = rig.client()
    client.post(b'{"model":"a","x":"%b"}' % (b"x" * 5_000_000))
    asked = rig.engine.next()
    asked.send(b"HTTP/1.1 100 Continue\r\n\r\n", JSON_OK)
    assert client.read().status == 200
