"""The heads that are sent on: a request's to the engine, and an answer's to the client.

Each is written for its request, from what was understood of the head that came. Where a request's body ends
is said by who sends it (``Exchange.ask``).
"""

from __future__ import annotations

from collections.abc import Mapping

from anvil_mux.config.config import Backend
from anvil_mux.config.keys import FIELDS
from anvil_mux.config.values import site
from anvil_mux.multiplexer.lease import Lease
from anvil_mux.protocol import http1, naming
from anvil_mux.proxy import external
from anvil_mux.proxy.asked import Question
from anvil_mux.proxy.reply import Reply, date

_NOT_THEIRS = frozenset([b"x-request-id", b"content-encoding"])
"""The fields of a client that no engine gets: its request has an id of ours, and its body was unpacked."""
_UPGRADE = {b"connection": b"Upgrade", b"upgrade": b"websocket"}
_NO_KEY: Mapping[bytes, bytes] = dict.fromkeys(FIELDS, b"")


def request_head(question: Question, lease: Lease, also: Mapping[bytes, bytes] = {}) -> bytes:
    """The lines of the head for the engine. ``also``: more fields."""
    request, route, backend = question.asked.request, question.asked.route, lease.backend
    query = request.query
    if query and route.model_in != "upstream":  # a name that is read there is the one that was asked for
        query = naming.model_replaced_in_query(query, question.known_as(backend))
    credentials, drop = _credentials(question, backend, route.path)
    own = {**credentials, **also}
    if b"accept-encoding" in request.fields:  # what is packed cannot be read: usage, errors, ids of answers
        own[b"accept-encoding"] = b"identity"
    kind = request.fields.get(b"content-type")
    if route.model_in == "json" and kind != b"application/json":
        own[b"content-type"] = b"application/json"
    lines = http1.forward_request_head(
        request,
        host=_host(lease),
        target=_target(backend, route.path, query),
        set=own,
        drop=drop,
    )
    return b"%bX-Request-ID: %b\r\n" % (lines, question.asked.id.encode("ascii"))


def upgrade_head(question: Question, lease: Lease) -> bytes:
    """The lines of the head that asks the engine for a websocket."""
    return request_head(question, lease, _UPGRADE)


def translated_head(question: Question, lease: Lease, path: str) -> bytes:
    """The lines of the head of a question that the client did not ask in these words."""
    credentials, drop = _credentials(question, lease.backend, path)
    own = {
        **credentials,
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
        drop=drop,
    )


def _host(lease: Lease) -> bytes:
    if lease.backend.url:
        return site(lease.backend.url).name.encode("ascii")
    return b"%b:%d" % (lease.address[0].encode("ascii"), lease.address[1])


def _target(backend: Backend, path: str, query: str) -> bytes:
    if backend.url:
        return external.target(backend, path, query).encode("ascii")
    return (f"{path}?{query}" if query else path).encode("ascii")


def _credentials(
    question: Question, backend: Backend, path: str
) -> tuple[Mapping[bytes, bytes], frozenset[bytes]]:
    """The fields that are set (to an empty value: taken away), and those of the client's that are dropped.

    Engines of ours get a client's keys only where these are not for us; servers elsewhere never do.
    """
    if backend.url:
        own, dropped = external.fields(question.asked.request, backend, path)
        return own, _NOT_THEIRS | dropped
    if not question.asked.access.hides_keys:
        return {}, _NOT_THEIRS
    key = backend.service.api_key
    return {**_NO_KEY, b"authorization": b"Bearer " + key.encode() if key else b""}, _NOT_THEIRS


def response_head(
    reply: Reply, response: http1.Response, *, length: int | None = None, chunked: bool = False
) -> bytes:
    """The head for the client."""
    own = reply.own_headers
    if b"date" not in response.fields:
        own.append(date())
    return http1.forward_response_head(
        response, length=length, chunked=chunked, connection=reply.connection, extra=own
    )


def switched_head(reply: Reply, response: http1.Response) -> bytes:
    """The head after which a websocket is open."""
    extra = [(b"Upgrade", b"websocket"), *reply.own_headers]
    return http1.forward_response_head(response, connection=b"Upgrade", extra=extra)
