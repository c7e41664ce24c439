"""Which pages of web sites may ask, and by which names anvil-mux may be called."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.config.test_keys import LINES, ROOT, bearer, ring
from tests.fake_engine import JSON_OK, Rig

# Who may call it what


def test_names_that_are_given_are_answered_to(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(allowed_hosts=("mux.example",))
    for host, status in (
        (b"mux.example", 200),
        (b"MUX.example:9292", 200),
        (b"evil.example", 403),
        (b"[::1]:1", 200),
    ):
        client = rig.client()
        client.send(b"GET /v1/models HTTP/1.1\r\nHost: %b\r\n\r\n" % host)
        assert client.read().status == status


def test_on_an_open_address_names_are_checked_only_where_they_are_given(make_rig: Callable[..., Rig]) -> None:
    for hosts, status in (((), 200), (("mux.example",), 403)):
        rig = make_rig(allowed_hosts=hosts, only_local_hosts=False)
        client = rig.client()
        client.send(b"GET /v1/models HTTP/1.1\r\nHost: evil.example\r\n\r\n")
        assert client.read().status == status


def test_the_error_about_an_origin_names_it_and_the_setting(rig):
    client = rig.client()
    refused = client.ask(b'{"model":"a"}', extra=b"Origin: https://app.example\r\n")
    assert refused.status == 403
    assert (
        "origin 'https://app.example' are not accepted; add it to the setting `cors`"
        in refused.error["message"]
    )
    null = rig.ask(b'{"model":"a"}', extra=b"Origin: null\r\n")
    assert (null.status, "cors" in null.error["message"]) == (403, False)


@pytest.mark.parametrize("length", [b"Content-Length: 2\r\n", b"Transfer-Encoding: chunked\r\n"])
def test_an_engine_lets_no_other_sites_page_read(rig: Rig, length: bytes) -> None:
    client = rig.client()
    for _ in range(2):
        client.post(b'{"model":"a"}')
        body = b"{}" if length[:1] == b"C" else b"2\r\n{}\r\n0\r\n\r\n"
        head = (
            b"HTTP/1.1 200 OK\r\nAccess-Control-Allow-Origin: *\r\nAccess-Control-Allow-Credentials: true\r\n"
        )
        rig.engine.next().send(head + length + b"\r\n" + body)
        answer = client.read()
        assert (answer.status, answer.body) == (200, b"{}")
        assert b"access-control" not in answer.head.lower()


def test_no_origin_is_ever_allowed_to_read(rig: Rig) -> None:
    client = rig.client()
    for method in (b"GET", b"OPTIONS"):
        answer = client.get(b"/v1/models", method, extra=b"Origin: http://evil.example\r\n")
        assert b"access-control" not in answer.head.lower()


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        (b"Origin: http://evil.example\r\n", 403),
        (b"Sec-Fetch-Site: cross-site\r\n", 403),
        (b"Sec-Fetch-Site: same-site\r\n", 403),
        (b"Sec-Fetch-Site: none\r\n", 200),
        (b"Sec-Fetch-Site: same-origin\r\n", 200),
    ],
)
def test_an_image_on_another_sites_page_loads_no_model(rig: Rig, fields: bytes, status: int) -> None:
    rig.engine.answer = lambda _: JSON_OK
    assert rig.client().get(b"/props?model=a", extra=fields).status == status
    assert len(rig.events.of("loading")) == (status == 200)


def test_a_page_may_be_reached_by_a_link_on_another_sites(rig: Rig) -> None:
    for path in (b"/", b"/v1/models"):
        assert rig.client().get(path, extra=b"Sec-Fetch-Site: cross-site\r\n").status == 200


CHAT = b"/v1/chat/completions"
APP = b"Origin: https://app.example\r\n"
ASKS = (
    b"Access-Control-Request-Method: POST\r\nAccess-Control-Request-Headers: authorization,content-type\r\n"
)


def test_a_site_that_is_named_may_use_everything_from_its_pages(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(cors=("https://app.example",), keys=ring(LINES))
    client = rig.client()
    asked = client.get(CHAT, b"OPTIONS", extra=APP + ASKS)
    assert asked.status == 204
    assert asked.header(b"Access-Control-Allow-Origin") == b"https://app.example"
    assert asked.header(b"Access-Control-Allow-Methods") == b"POST, OPTIONS"
    assert asked.header(b"Access-Control-Allow-Headers") == b"authorization,content-type"
    for body in (b'{"model":"a"}', b'{"model":"a","stream":true}', b'{"model":"a"}'):
        client.post(body, extra=APP + bearer(ROOT))
        rig.engine.next().send(JSON_OK)
        answer = client.read()
        assert answer.status == 200
        assert answer.header(b"Access-Control-Allow-Origin") == b"https://app.example"
        assert answer.header(b"Vary") == b"Origin"


def test_a_named_sites_page_sees_why_it_is_refused(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(cors=("https://app.example",), keys=ring(LINES))
    answer = rig.client().get(b"/v1/models", extra=APP)
    assert answer.status == 401
    assert answer.header(b"Access-Control-Allow-Origin") == b"https://app.example"


@pytest.mark.parametrize("origin", [b"https://app.example.evil", b"http://app.example", b"null"])
def test_any_other_site_stays_out(make_rig: Callable[..., Rig], origin: bytes) -> None:
    rig = make_rig(cors=("https://app.example",))
    for method in (b"OPTIONS", b"POST"):
        answer = rig.client().get(b"/models/unload", method, extra=b"Origin: %b\r\n" % origin + ASKS)
        assert b"access-control" not in answer.head.lower()
        assert (answer.status == 403) == (method == b"POST")


def test_a_key_is_asked_for_whatever_a_page_calls_itself(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(keys=ring(LINES))
    assert rig.client().get(CHAT, b"OPTIONS", extra=APP + ASKS).status == 401


@pytest.mark.parametrize("method", [b"POST", b"PUT", b"DELETE", b"PATCH"])
def test_another_sites_page_changes_nothing(rig: Rig, method: bytes) -> None:
    answer = rig.client().get(b"/models/unload", method, extra=b"Origin: null\r\n")
    assert answer.status == 403
