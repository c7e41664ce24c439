"""The heads that go on: a request's for the engine, and an answer's for the client.

Most of a head is the same for all requests with the same head; that part is made once and kept with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from anvil_mux import http1, naming
from anvil_mux.call import Call
from anvil_mux.multiplexer import Lease

MAX_PREPARED = 8
"""Engines' addresses for which the constant part of a head is kept."""
_OWN = frozenset([b"x-request-id", b"content-encoding"])
"""What every forwarded head gets anew."""


def request_head(
    call: Call, lease: Lease, length: int, credentials: Callable[[Lease], Mapping[bytes, bytes]]
) -> bytes:
    """The head for the engine: but for its last two lines the same for all requests with the same head.

    ``credentials``: what it gets in place of the client's; empty values take a field away.
    """
    request, route = call.request, call.route
    query, given = request.query, {} if request.prepared is None else request.prepared
    if route.model_in == "query":
        # Another backend may know the model by another name, so this is made for each.
        known_as = lease.backend.served_model or call.model
        query, given = naming.model_replaced_in_query(query, known_as), {}
    constant = given.get(lease.address)
    if constant is None:
        own = credentials(lease)
        kind = request.fields.get(b"content-type")
        as_json = route.model_in == "json" and kind != b"application/json"
        constant = http1.forward_request_head(
            request,
            host=_host(lease),
            target=(f"{route.path}?{query}" if query else route.path).encode("ascii"),
            set=_filled({**own, b"content-type": b"application/json"} if as_json else own),
            drop=_OWN.union(own),
        )[:-2]
        _prepare(given, lease.address, constant)
    if request.method == "GET":
        return b"%bX-Request-ID: %b\r\n\r\n" % (constant, call.request_id.encode("ascii"))
    return b"%bX-Request-ID: %b\r\nContent-Length: %d\r\n\r\n" % (
        constant,
        call.request_id.encode("ascii"),
        length,
    )


def _host(lease: Lease) -> bytes:
    return b"%b:%d" % (lease.address[0].encode("ascii"), lease.address[1])


def _filled(fields: Mapping[bytes, bytes]) -> dict[bytes, bytes]:
    return {name: value for name, value in fields.items() if value}


def translated_head(
    call: Call, lease: Lease, path: str, length: int, credentials: Mapping[bytes, bytes]
) -> bytes:
    """The head of a question that the client did not ask in these words."""
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
