"""What is taken for HTTP/1.1, what is refused, and what is written for the other side."""

import random

import h11
import pytest

from anvil_mux.errors import BackendError, BadRequest
from anvil_mux.protocol import http1

HOST = b"Host: a\r\n"


def request(*lines: bytes, first: bytes = b"POST /v1/x HTTP/1.1", host: bytes = HOST) -> http1.Request:
    return http1.parse_request(first + b"\r\n" + host + b"".join(line + b"\r\n" for line in lines) + b"\r\n")


def refusal(*lines: bytes, first: bytes = b"POST /v1/x HTTP/1.1", host: bytes = HOST) -> int:
    with pytest.raises(BadRequest) as caught:
        request(*lines, first=first, host=host)
    return caught.value.status


def answer(*lines: bytes, method: str = "POST", first: bytes = b"HTTP/1.1 200 OK") -> http1.Response:
    return http1.parse_response(
        first + b"\r\n" + b"".join(line + b"\r\n" for line in lines) + b"\r\n", method
    )


def test_a_request_head_is_read():
    seen = request(
        b"Content-Type:application/json",
        b"X-A:  one two \t",
        b"Content-Length: 12",
        first=b"PUT /a%2Fb?c=d&e HTTP/1.1",
    )
    assert (seen.method, seen.target, seen.path, seen.query) == ("PUT", b"/a%2Fb?c=d&e", "/a%2Fb", "c=d&e")
    assert seen.version == (1, 1)
    assert seen.headers[1:3] == [(b"Content-Type", b"application/json"), (b"X-A", b"one two")]
    assert seen.fields[b"x-a"] == b"one two"
    assert (seen.length, seen.chunked, seen.keep_alive, seen.expect_continue) == (12, False, True, False)


def test_a_method_is_as_short_in_one_piece_as_in_two():
    head = b"%b /v1/x HTTP/1.1\r\n\r\n" % (b"M" * 65)
    assert http1.request_head_end(head) == len(head)
    assert refusal(first=head.partition(b"\r\n")[0]) == 400
    with pytest.raises(BadRequest):
        http1.request_head_end(head[:70])


def test_repeated_fields_are_joined_for_look_ups_and_kept_apart_in_order():
    seen = request(b"X-A: 1", b"x-b: 2", b"x-a: 3")
    assert seen.fields[b"x-a"] == b"1, 3"
    assert seen.headers[1:] == [(b"X-A", b"1"), (b"x-b", b"2"), (b"x-a", b"3")]


@pytest.mark.parametrize(
    "lines",
    [
        [b"Content-Length: 4", b"Transfer-Encoding: chunked"],
        [b"Transfer-Encoding: chunked", b"Content-Length: 0"],
        [b"Content-Length: 4", b"Content-Length: 5"],
        [b"Content-Length: 4, 5"],
        [b"Content-Length: +4"],
        [b"Content-Length: 0_4"],
        [b"Content-Length: -1"],
        [b"Content-Length: 0x4"],
        [b"Content-Length: "],
        [b"Content-Length: 4 4"],
        [b"Content-Length: 1234567890123456"],
        ["Content-Length: ٤".encode()],
        [b"Content-Length : 4"],
        [b" Content-Length: 4"],
        [b"X-A: b", b" folded"],
        [b"X-A: b", b"\tfolded"],
        [b"X-A: b\rc"],
        [b"X-A: b\nContent-Length: 4"],
        [b"X-A: b\0c"],
        [b"X-A: b\x7fc"],
        [b"X-\0A: b"],
        [b"X A: b"],
        [b"X(A): b"],
        ["X-Ä: b".encode()],
        [b": b"],
        [b"no colon"],
        [b"Host: b"],
    ],
    ids=repr,
)
def test_an_ambiguous_or_unclean_header_is_refused(lines):
    assert refusal(*lines) == 400


@pytest.mark.parametrize(
    ("first", "status"),
    [
        (b"GET /", 400),
        (b"GET", 400),
        (b"GET  / HTTP/1.1", 400),
        (b"GET / HTTP/1.1 ", 400),
        (b"GET / http/1.1", 400),
        (b"GET\t/ HTTP/1.1", 400),
        (b"GET /a b HTTP/1.1", 400),
        (b"GET /\x01 HTTP/1.1", 400),
        ("GET /ä HTTP/1.1".encode(), 400),
        (b"G(T / HTTP/1.1", 400),
        (b"GET a HTTP/1.1", 400),
        (b"CONNECT a:80 HTTP/1.1", 400),
        (b"GET / HTTP/2.0", 505),
        (b"GET / HTTP/0.9", 505),
        (b"GET / HTTP/1.2", 505),
        (b"GET / HTTP/11", 400),
        (b"GET /" + b"a" * 8200 + b" HTTP/1.1", 414),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_a_bad_request_line_is_refused(first, status):
    assert refusal(first=first) == status


@pytest.mark.parametrize(
    "coding", [b"gzip", b"identity", b"gzip, chunked", b"chunked, chunked", b"xchunked", b""]
)
def test_any_coding_but_chunked_is_not_implemented(coding):
    assert refusal(b"Transfer-Encoding: " + coding) == 501


def test_chunked_written_twice_is_not_implemented():
    assert refusal(b"Transfer-Encoding: chunked", b"Transfer-Encoding: chunked") == 501


def test_chunked_is_understood_in_any_case_but_not_in_http_1_0():
    assert request(b"Transfer-Encoding: Chunked").chunked
    assert refusal(b"Transfer-Encoding: chunked", first=b"POST / HTTP/1.0") == 400


@pytest.mark.parametrize(
    "host", [b"", b"Host: a\r\nHost: a\r\n", b"Host: a, b\r\n", b"Host: a/b\r\n", b"Host: a@b\r\n"]
)
def test_http_1_1_needs_exactly_one_valid_host(host):
    assert refusal(host=host) == 400


@pytest.mark.parametrize("host", [b"Host: a:8080\r\n", b"Host: [::1]:80\r\n", b"Host:\r\n"])
def test_hosts_of_every_form_are_taken(host):
    assert request(host=host).fields[b"host"] == host[5:].strip()


def test_http_1_0_needs_no_host():
    assert request(first=b"GET / HTTP/1.0", host=b"").version == (1, 0)


@pytest.mark.parametrize(
    ("target", "path", "query"),
    [
        (b"http://a/v1/models?x=1", "/v1/models", "x=1"),
        (b"HTTP://A:80", "/", ""),
        (b"https://a:443?x=1", "/", "x=1"),
        (b"*", "*", ""),
        (b"/a?b?c", "/a", "b?c"),
        (b"//a/../b", "//a/../b", ""),
    ],
)
def test_targets_of_every_form_are_read(target, path, query):
    seen = request(first=b"GET " + target + b" HTTP/1.1")
    assert (seen.path, seen.query, seen.fields[b"host"]) == (path, query, b"a")


@pytest.mark.parametrize(
    ("target", "host"),
    [
        (b"http://evil.example/v1/models", b"a"),
        (b"http://a:81/", b"a"),
        (b"http://a:443/", b"a"),
        (b"http://a/", b"a:8080"),
        (b"http://b@a/", b"a"),
        (b"http:///v1/models", b"a"),
        (b"http:///v1/models", b""),
        (b"http:/a", b"a"),
        (b"ftp://a/", b"a"),
    ],
)
def test_an_absolute_target_names_the_host_or_is_refused(target, host):
    assert refusal(first=b"GET " + target + b" HTTP/1.1", host=b"Host: " + host + b"\r\n") == 400


def test_an_absolute_target_without_a_host_is_refused_in_http_1_0_too():
    assert refusal(first=b"GET http://a/ HTTP/1.0", host=b"") == 400


def test_as_many_headers_as_allowed_and_not_one_more():
    many = [b"X-%d: 1" % n for n in range(http1.MAX_FIELDS - 1)]
    assert len(request(*many).headers) == http1.MAX_FIELDS
    assert refusal(*many, b"Y: 1") == 431


def test_a_head_that_is_too_large_is_refused_whole_or_in_part():
    assert refusal(b"X-A: " + b"a" * http1.MAX_HEAD) == 431
    with pytest.raises(BadRequest) as caught:
        http1.request_head_end(b"GET / HTTP/1.1\r\nX-A: " + b"a" * http1.MAX_HEAD)
    assert caught.value.status == 431


def test_one_empty_line_before_a_request_line_is_skipped():
    head = b"\r\nGET / HTTP/1.1\r\nHost: a\r\nX-A: 1\r\n\r\n"
    assert http1.request_head_end(head) == len(head)
    assert http1.parse_request(head).fields == {b"host": b"a", b"x-a": b"1"}


@pytest.mark.parametrize(
    "head",
    [
        b"GET / HTTP/1.1\nHost: a\nX-A: 1\n\n",
        b"GET / HTTP/1.1\r\nHost: a\nX: 1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nX: 1\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\n\n",
        b"GET / HTTP/1.1\nHost: a\r\n\r\n",
        b"\nGET / HTTP/1.1\r\nHost: a\r\n\r\n",
        b"\n\n",
        b"\r\n\r\n",
        b"",
    ],
)
def test_bare_line_feeds_and_empty_heads_are_refused(head):
    with pytest.raises(BadRequest):
        http1.parse_request(head)


@pytest.mark.parametrize("cut", range(1, 4))
@pytest.mark.parametrize(
    "sent", [b"\n", b"GET / HTTP/1.1\n", b"GET / HTTP/1.1\r\nHost: a\n", b"GET / HTTP/1.1\r\nHost: a\r\n\n"]
)
def test_a_bare_line_feed_is_refused_without_waiting_for_the_rest(sent, cut):
    with pytest.raises(BadRequest):
        http1.request_head_end(sent, max(len(sent) - cut, 0))


def test_an_engine_that_ends_lines_with_bare_line_feeds_is_refused_at_once():
    with pytest.raises(BackendError):
        http1.response_head_end(b"HTTP/1.1 200 OK\nContent-Length: 0\n\n")


def test_expectations():
    assert request(b"Expect: 100-Continue").expect_continue
    assert not request(b"Expect: 100-continue", first=b"POST / HTTP/1.0").expect_continue
    assert refusal(b"Expect: tea") == 417


@pytest.mark.parametrize(
    ("version", "connection", "kept"),
    [
        (b"1.1", None, True),
        (b"1.1", b"close", False),
        (b"1.1", b"CLOSE", False),
        (b"1.1", b"keep-alive", True),
        (b"1.1", b"keep-alive, close", False),
        (b"1.1", b"TE, Close", False),
        (b"1.0", None, False),
        (b"1.0", b"Keep-Alive", True),
        (b"1.0", b"KEEP-ALIVE", True),
        (b"1.0", b"close", False),
    ],
)
def test_when_a_connection_is_kept(version, connection, kept):
    lines = [] if connection is None else [b"Connection: " + connection]
    assert request(*lines, first=b"GET / HTTP/" + version).keep_alive is kept
    assert answer(*lines, b"Content-Length: 0", first=b"HTTP/" + version + b" 200 OK").keep_alive is kept


def test_the_end_of_a_head_is_found_however_it_arrives():
    head = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"
    for cut in range(len(head)):
        assert http1.request_head_end(bytearray(head[:cut])) is None
        assert http1.request_head_end(head + b"\r\n\r\nmore", start=cut) == len(head)


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET /\r\n", 400),
        (b"GET / HTTP/2.0\r\nHost: a", 505),
        (b"PRI * HTTP/2.0\r\n", 505),
        (b"\x16\x03\x01\x02\x00", 400),
        (b"GET /" + b"a" * 9000, 414),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_what_cannot_become_a_head_is_refused_before_its_end(sent, status):
    with pytest.raises(BadRequest) as caught:
        http1.request_head_end(sent)
    assert caught.value.status == status


def _random_head(rng: random.Random) -> bytes:
    """Mostly sound heads, with a bad byte or line here and there."""
    values = [
        b"a",
        b"text/plain; q=1",
        b"",
        b" \t x \t",
        "ü".encode(),
        b"4",
        b"chunked",
        b"a\0b",
        b"a\x01",
        b"close",
    ]
    names = [
        b"Host",
        b"Content-Length",
        b"Transfer-Encoding",
        b"X-A",
        b"X B",
        b"X-C ",
        b"",
        b"Connection",
        b"x_d",
    ]
    weights = [6, 3, 2, 6, 1, 1, 1, 3, 3]
    lines = [rng.choice([b"GET / HTTP/1.1", b"POST /a?b HTTP/1.1", b"GET / HTTP/1.0", b"GET /  HTTP/1.1"])]
    lines += [b"Host: h"] if rng.random() < 0.8 else []
    for name in rng.choices(names, weights, k=rng.randrange(4)):
        lines.append(name + rng.choice([b":", b": ", b":\t"]) + rng.choice(values))
    return b"\r\n".join(lines) + b"\r\n\r\n"


def _h11(head: bytes) -> h11.Request | None:
    try:
        connection = h11.Connection(h11.SERVER)
        connection.receive_data(head)
        event = connection.next_event()
    except h11.RemoteProtocolError:
        return None
    assert isinstance(event, h11.Request)
    return event


def test_what_is_taken_h11_takes_too_and_reads_alike():
    rng = random.Random(1)
    taken = refused = 0
    for _ in range(3000):
        head = _random_head(rng)
        theirs = _h11(head)
        try:
            ours = http1.parse_request(head)
        except BadRequest:
            refused += 1
            continue
        taken += 1
        assert theirs is not None, head
        assert (ours.method.encode(), ours.target) == (theirs.method, theirs.target)
        others = [field for field in theirs.headers if field[0] != b"content-length"]
        assert [(n.lower(), v) for n, v in ours.headers] == others
        assert ours.version == tuple(map(int, theirs.http_version.split(b".")))
    assert taken > 500
    assert refused > 500


def test_a_blank_line_before_a_head_hides_no_length():
    http1.parse_request(b"\r\nPOST / HTTP/1.1\r\nHost: h\r\n\r\n")
    with pytest.raises(BadRequest):
        http1.parse_request(b"\r\nContent-Length: 5\r\nPOST / HTTP/1.1\r\nHost: h\r\n\r\n")


def test_sound_heads_are_taken_as_h11_takes_them():
    rng = random.Random(2)
    token = b"!#$%&'*+-.^_`|~09azAZ"
    for _ in range(1000):
        names = {bytes(rng.choices(token, k=rng.randrange(1, 9))).lower() for _ in range(rng.randrange(9))}
        values = [bytes(rng.choices(b"\t !a~\x80\xff,;=", k=rng.randrange(9))).strip() for _ in names]
        sent = dict(zip(sorted(names), values, strict=True))
        ours = request(*(name + b":" + value for name, value in sent.items()))
        assert ours.fields == {b"host": b"a", **sent}
        theirs = _h11(
            b"POST / HTTP/1.1\r\n" + b"".join(b"%b: %b\r\n" % pair for pair in ours.headers) + b"\r\n"
        )
        assert theirs is not None
        assert dict(theirs.headers) == ours.fields


@pytest.mark.parametrize(
    ("lines", "method", "status", "body", "length"),
    [
        ([b"Content-Length: 5"], "POST", 200, "length", 5),
        ([b"Transfer-Encoding: chunked"], "POST", 200, "chunked", None),
        ([], "POST", 200, "close", None),
        ([b"Content-Length: 5"], "HEAD", 200, "none", 5),
        ([b"Transfer-Encoding: chunked"], "HEAD", 200, "none", None),
        ([], "POST", 204, "none", None),
        ([b"Content-Length: 5"], "GET", 304, "none", 5),
        ([], "POST", 100, "none", None),
        ([b"Content-Length: 0"], "POST", 500, "length", 0),
    ],
)
def test_how_the_body_of_an_answer_ends(lines, method, status, body, length):
    seen = answer(*lines, method=method, first=b"HTTP/1.1 %d Whatever" % status)
    assert (seen.status, seen.body, seen.length) == (status, body, length)
    assert seen.keep_alive is (body != "close")


@pytest.mark.parametrize("first", [b"HTTP/1.1 200", b"HTTP/1.1 200 ", b"HTTP/1.0 200 Fine \xfc"])
def test_reasons_may_be_missing_or_odd(first):
    assert answer(first=first).status == 200


@pytest.mark.parametrize(
    "head",
    [
        b"ICY 200 OK\r\n\r\n",
        b"HTTP/2 200 OK\r\n\r\n",
        b"HTTP/1.1 20 OK\r\n\r\n",
        b"HTTP/1.1 999 OK\r\n\r\n",
        b"HTTP/1.1 101 Switching\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\nContent-Length: 5\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -4\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX-A: b\rc\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX-A: b\r\n folded\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"X: 1\r\n" * 101 + b"\r\n",
    ],
    ids=lambda head: repr(head)[:50],
)
def test_a_bad_answer_is_the_engines_fault(head):
    with pytest.raises(BackendError):
        http1.parse_response(head, "POST")


def test_an_answer_that_cannot_become_http_is_refused_early():
    assert http1.response_head_end(b"HTT") is None
    assert http1.response_head_end(b"HTTP/1.1 200 OK\r\n\r\nx") == 19
    for sent in (b"SSH-2.0-OpenSSH\r\n", b"HTTP/1.1 200 OK\r\nX: " + b"a" * http1.MAX_HEAD):
        with pytest.raises(BackendError):
            http1.response_head_end(sent)


def test_what_an_engine_is_sent():
    seen = request(
        b"Connection: keep-alive, X-Mine",
        b"X-Mine: 1",
        b"Keep-Alive: 5",
        b"Proxy-Authorization: Basic x",
        b"Proxy-Connection: close",
        b"TE: trailers",
        b"Trailer: X",
        b"Upgrade: h2c",
        b"Expect: 100-continue",
        b"X-Forwarded-For: 1.2.3.4",
        b"Forwarded: for=1",
        b"X-API-Key: secret",
        b"x-request-id: theirs",
        b"Accept-Encoding: gzip",
        b"anthropic-beta: A, b",
        b"Transfer-Encoding: chunked",
        first=b"POST http://a/v1/x?y=1 HTTP/1.1",
    )
    head = http1.forward_request_head(
        *(seen, "127.0.0.1:9", "/here?y=1"),
        passed={b"accept-encoding", b"anthropic-beta", b"x-mine", b"te", b"expect", b"x-forwarded-for"},
        extra=[(b"x-request-id", b"ours")],
    )
    assert http1.framed(head, "POST", 7) == (
        b"POST /here?y=1 HTTP/1.1\r\nHost: 127.0.0.1:9\r\nAccept-Encoding: gzip\r\nanthropic-beta: A, b\r\n"
        b"x-request-id: ours\r\nContent-Length: 7\r\n\r\n"
    )


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "DELETE", "OPTIONS", "X"])
def test_a_head_announces_the_body_that_follows_it_whatever_the_method(method):
    first = b"%b /here HTTP/1.1" % method.encode()
    lines = http1.forward_request_head(request(first=first), "h", "/other")
    assert lines == b"%b /other HTTP/1.1\r\nHost: h\r\n" % method.encode()
    for length in (1, 70):
        assert http1.parse_request(http1.framed(lines, method, length)).length == length
    assert not http1.parse_request(http1.framed(lines, method, 0)).length


def test_what_a_client_is_sent():
    seen = answer(
        b"Server: uvicorn",
        b"Connection: X-Inner",
        b"X-Inner: 1",
        b"Keep-Alive: timeout=5",
        b"Proxy-Authenticate: x",
        b"Content-Type: text/event-stream",
        b"X-Request-Id: theirs",
        b"X-Note: a=1",
        b"X-Note: b=2",
        b"Transfer-Encoding: chunked",
    )
    head = http1.forward_response_head(
        seen, chunked=True, connection=b"close", extra=[(b"X-Request-ID", b"ours")]
    )
    assert head == (
        b"HTTP/1.1 200 OK\r\nServer: anvil-mux\r\nContent-Type: text/event-stream\r\nX-Note: a=1\r\n"
        b"X-Note: b=2\r\nX-Request-ID: ours\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    )


@pytest.mark.parametrize(
    "field",
    [
        *(b"Set-Cookie: a=1", b"set-cookie2: a=1", b"Clear-Site-Data: *", b"Alt-Svc: h3=':443'"),
        *(b"Strict-Transport-Security: max-age=9", b"NEL: {}", b"Report-To: {}", b"Expect-CT: max-age=9"),
        b"Service-Worker-Allowed: /",
    ],
)
def test_no_engine_speaks_for_the_address_that_is_ours(field):
    head = http1.forward_response_head(answer(field, b"X-Note: 1"), length=0)
    assert head == b"HTTP/1.1 200 OK\r\nServer: anvil-mux\r\nX-Note: 1\r\nContent-Length: 0\r\n\r\n"


@pytest.mark.parametrize("value", [b"a\r\nE: 1", b"a\nE: 1", b"a\rb", b"a\0b"])
def test_nobody_can_put_a_line_into_a_head(value):
    seen = request()
    for write in (
        lambda: http1.forward_request_head(seen, "h", "/", extra=[(b"x", value)]),
        lambda: http1.forward_request_head(seen, value.decode(), "/"),
        lambda: http1.forward_request_head(seen, "h", value.decode()),
        lambda: http1.forward_response_head(answer(), extra=[(b"x", value)]),
        lambda: http1.response(200, [(b"x", value)]),
    ):
        with pytest.raises(ValueError, match="line end or NUL"):
            write()


def test_our_own_answers():
    assert http1.response(404, [(b"Content-Type", b"a/b")], b"xy") == (
        b"HTTP/1.1 404 Not Found\r\nServer: anvil-mux\r\nContent-Type: a/b\r\nContent-Length: 2\r\n\r\nxy"
    )
    assert http1.response(200, body=b"xy", head_only=True).endswith(b"Content-Length: 2\r\n\r\n")
    assert b"Content-Length" not in http1.response(204)
    assert http1.stream_head([(b"X", b"1")], chunked=True).endswith(
        b"X: 1\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
