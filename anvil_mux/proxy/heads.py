"""The heads that are sent on: a request's to the engine, and an answer's to the client.

Most of a head is the same for all requests with the same head; that part is made once, and noted with the
last head of the connection that it came on.
"""

from __future__ import annotations

from collections.abc import Mapping

from anvil_mux.config.config import Backend
from anvil_mux.config.elsewhere import site
from anvil_mux.config.keys import FIELDS
from anvil_mux.multiplexer.lease import Lease
from anvil_mux.protocol import http1, naming
from anvil_mux.protocol.lasthead import LastHead
from anvil_mux.proxy import elsewhere
from anvil_mux.proxy.asked import Question
from anvil_mux.proxy.reply import Reply

_OWN = frozenset([b"x-request-id", b"content-encoding"])
"""The fields that every forwarded head gets anew."""
_UPGRADE = {b"connection": b"Upgrade", b"upgrade": b"websocket"}
_NO_KEY: Mapping[bytes, bytes] = dict.fromkeys(FIELDS, b"")


def request_head(question: Question, lease: Lease, length: int, last: LastHead[http1.Request]) -> bytes:
    """The head for the engine: but for its last two lines the same for all requests with the same head.

    Of what that part is made of, the configuration holds the route, the rewriting and whose keys are shown,
    and the run its engine's address and key.
    """
    depends_on = question.asked.access, lease.run
    constant: bytes | None = last.found.get(depends_on)
    if constant is None:
        constant = _constant(question, lease, {})
        last.note(depends_on, constant)
    asked = question.asked
    if asked.request.method == "GET":
        return b"%bX-Request-ID: %b\r\n\r\n" % (constant, asked.id.encode("ascii"))
    return b"%bX-Request-ID: %b\r\nContent-Length: %d\r\n\r\n" % (constant, asked.id.encode("ascii"), length)


def upgrade_head(question: Question, lease: Lease) -> bytes:
    """The head that asks the engine for a websocket."""
    constant = _constant(question, lease, _UPGRADE)
    return b"%bX-Request-ID: %b\r\n\r\n" % (constant, question.asked.id.encode("ascii"))


def _constant(question: Question, lease: Lease, also: Mapping[bytes, bytes]) -> bytes:
    """The head but for the request's id and its length; ``also``: more fields."""
    request, route, backend = question.asked.request, question.asked.route, lease.backend
    query = request.query
    if route.model_in == "query":
        query = naming.model_replaced_in_query(query, question.known_as(backend))
    own, drop = _credentials(question, backend, route.path)
    own = {**own, **also}
    kind = request.fields.get(b"content-type")
    as_json = route.model_in == "json" and kind != b"application/json"
    return http1.forward_request_head(
        request,
        host=_host(lease),
        target=_target(backend, route.path, query),
        set=_filled({**own, b"content-type": b"application/json"} if as_json else own),
        drop=drop.union(own),
    )[:-2]


def translated_head(question: Question, lease: Lease, path: str, length: int) -> bytes:
    """The head of a question that the client did not ask in these words."""
    credentials, drop = _credentials(question, lease.backend, path)
    own = {
        **_filled(credentials),
        b"accept": b"*/*",
        b"accept-encoding": b"identity",
        b"content-type": b"application/json",
        b"x-request-id": question.asked.id.encode("ascii"),
    }
    return http1.forward_request_head(
        question.asked.request,
        host=_host(lease),
        target=_target(lease.backend, path, ""),
        set=own,
        drop=drop.union(credentials),
        length=length,
    )


def _host(lease: Lease) -> bytes:
    if lease.backend.url:
        return site(lease.backend.url).name.encode("ascii")
    return b"%b:%d" % (lease.address[0].encode("ascii"), lease.address[1])


def _target(backend: Backend, path: str, query: str) -> bytes:
    if backend.url:
        return elsewhere.target(backend, path, query).encode("ascii")
    return (f"{path}?{query}" if query else path).encode("ascii")


def _credentials(
    question: Question, backend: Backend, path: str
) -> tuple[Mapping[bytes, bytes], frozenset[bytes]]:
    """The fields that are set (to an empty value: taken away), and those of the client's that are dropped.

    Engines of ours get a client's keys only where these are not for us; servers elsewhere never do.
    """
    if backend.url:
        own, dropped = elsewhere.fields(question.asked.request, backend, path)
        return own, _OWN | dropped
    if not question.asked.access.hides_keys:
        return {}, _OWN
    key = backend.service.api_key
    return {**_NO_KEY, b"authorization": b"Bearer " + key.encode() if key else b""}, _OWN


def _filled(fields: Mapping[bytes, bytes]) -> dict[bytes, bytes]:
    return {name: value for name, value in fields.items() if value}


def response_head(
    reply: Reply,
    response: http1.Response,
    last: LastHead[http1.Response],
    *,
    length: int | None = None,
    chunked: bool = False,
) -> bytes:
    """The head for the client: but for its last two lines the same for all answers with the same head."""
    asked, connection = reply.asked, reply.connection
    told = reply.routed or reply.chosen or reply.fell_back
    if length is None or told or asked.reader or asked.api == "anthropic":
        return http1.forward_response_head(
            response, length=length, chunked=chunked, connection=connection, extra=reply.own_headers
        )
    constant: bytes | None = last.found.get(connection)
    if constant is None:
        constant = http1.forward_response_head(response, connection=connection, drop=_OWN)[:-2]
        last.note(connection, constant)
    return b"%bX-Request-ID: %b\r\nContent-Length: %d\r\n\r\n" % (constant, asked.id.encode("ascii"), length)


def switched_head(reply: Reply, response: http1.Response) -> bytes:
    """The head after which a websocket is open."""
    extra = [(b"Upgrade", b"websocket"), *reply.own_headers]
    return http1.forward_response_head(response, connection=b"Upgrade", extra=extra)
