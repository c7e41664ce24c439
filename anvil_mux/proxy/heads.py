"""The heads that go on: a request's for the engine, and an answer's for the client.

Most of a head is the same for all requests with the same head; that part is made once and kept with it.
"""

from __future__ import annotations

from collections.abc import Mapping

from anvil_mux.config.keys import FIELDS
from anvil_mux.multiplexer import Lease
from anvil_mux.protocol import http1, naming
from anvil_mux.proxy.reply import Call

MAX_PREPARED = 8
"""Engines for which the constant part of a head is kept."""
_OWN = frozenset([b"x-request-id", b"content-encoding"])
"""What every forwarded head gets anew."""
_NOTHING: Mapping[bytes, bytes] = {}
_NO_KEY: Mapping[bytes, bytes] = dict.fromkeys(FIELDS, b"")


def request_head(
    call: Call,
    lease: Lease,
    length: int,
    authorization: bytes | None,
    also: Mapping[bytes, bytes] = _NOTHING,
) -> bytes:
    """The head for the engine: but for its last two lines the same for all requests with the same head.

    ``authorization``: what the engine is shown in place of the client's key (b"": none); None: the client's.
    ``also``: more fields, for a head that is not to be kept.
    """
    request, route = call.request, call.route
    query, given = request.query, {} if also or request.prepared is None else request.prepared
    if route.model_in == "query":
        # Another backend may know the model by another name, so this is made for each.
        known_as = lease.backend.served_model or call.model
        query, given = naming.model_replaced_in_query(query, known_as), {}
    # All that the constant part depends on, but for the head that it is kept with: engines follow each other
    # at one address, each with a key of its own, and a reload may come while a head is being made.
    depends_on = lease.address, route.path, authorization
    constant = given.get(depends_on)
    if constant is None:
        own = {**_credentials(authorization), **also}
        kind = request.fields.get(b"content-type")
        as_json = route.model_in == "json" and kind != b"application/json"
        constant = http1.forward_request_head(
            request,
            host=_host(lease),
            target=(f"{route.path}?{query}" if query else route.path).encode("ascii"),
            set=_filled({**own, b"content-type": b"application/json"} if as_json else own),
            drop=_OWN.union(own),
        )[:-2]
        _prepare(given, depends_on, constant)
    if request.method == "GET":
        return b"%bX-Request-ID: %b\r\n\r\n" % (constant, call.request_id.encode("ascii"))
    return b"%bX-Request-ID: %b\r\nContent-Length: %d\r\n\r\n" % (
        constant,
        call.request_id.encode("ascii"),
        length,
    )


def _host(lease: Lease) -> bytes:
    return b"%b:%d" % (lease.address[0].encode("ascii"), lease.address[1])


def _credentials(authorization: bytes | None) -> Mapping[bytes, bytes]:
    """How fields change; empty values take one away."""
    if authorization is None:
        return _NOTHING
    return {**_NO_KEY, b"authorization": authorization}


def _filled(fields: Mapping[bytes, bytes]) -> dict[bytes, bytes]:
    return {name: value for name, value in fields.items() if value}


def translated_head(call: Call, lease: Lease, path: str, length: int, authorization: bytes | None) -> bytes:
    """The head of a question that the client did not ask in these words."""
    credentials = _credentials(authorization)
    own = {
        **_filled(credentials),
        b"accept": b"*/*",
        b"accept-encoding": b"identity",
        b"content-type": b"application/json",
        b"x-request-id": call.request_id.encode("ascii"),
    }
    return http1.forward_request_head(
        call.request,
        host=_host(lease),
        target=path.encode("ascii"),
        set=own,
        drop=_OWN.union(credentials),
        length=length,
    )


def response_head(
    call: Call, response: http1.Response, *, length: int | None = None, chunked: bool = False
) -> bytes:
    """The head for the client: but for its last two lines the same for all answers with the same head."""
    varies = call.routed or call.request.reader or call.api == "anthropic"
    if length is None or response.prepared is None or varies:
        return http1.forward_response_head(
            response, length=length, chunked=chunked, connection=call.connection, extra=call.own_headers
        )
    connection = call.connection
    constant = response.prepared.get(connection)
    if constant is None:
        constant = http1.forward_response_head(response, connection=connection, drop=_OWN)[:-2]
        _prepare(response.prepared, connection, constant)
    return b"%bX-Request-ID: %b\r\nContent-Length: %d\r\n\r\n" % (
        constant,
        call.request_id.encode("ascii"),
        length,
    )


def _prepare(given: dict[object, bytes], key: object, constant: bytes) -> None:
    if len(given) >= MAX_PREPARED:
        given.clear()
    given[key] = constant
