"""The heads that are sent on: a request's to the engine, and an answer's to the client.

Each is written for its request, from what was understood of the head that came. Where a request's body ends
is said by who sends it (``Exchange.ask``).

Of a client's head a server elsewhere gets only the fields in ``PASSED``. So whatever a client shows as a key,
under whatever name, reaches nobody but us.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from urllib.parse import parse_qsl, urlencode

from anvil_mux.config.config import Backend
from anvil_mux.config.keys import FIELDS
from anvil_mux.config.values import site
from anvil_mux.host.hosts import key_fields
from anvil_mux.multiplexer.multiplexer import Lease
from anvil_mux.protocol import http1, naming
from anvil_mux.proxy.question import WARM, Question
from anvil_mux.proxy.reply import Reply, date

PASSED = frozenset(
    (
        *(b"accept", b"accept-language", b"content-type"),
        *(b"user-agent", b"traceparent", b"tracestate", b"x-session-id", b"x-title", b"http-referer"),
        *(b"anthropic-version", b"anthropic-beta", b"openai-beta"),
        *(b"sec-websocket-version", b"sec-websocket-key", b"sec-websocket-extensions"),
    )
)
"""The fields of a client's head that a server elsewhere gets. None of them holds a key."""
SUBPROTOCOL = b"sec-websocket-protocol"
KEY_IN_SUBPROTOCOL = b"api-key"
"""Browsers, which can set no fields, show their key for a websocket as a subprotocol with this in it."""
KEYS_IN_QUERY = frozenset(
    ["key", "api_key", "api-key", "apikey", "token", "access_token", "subscription-key"]
)
"""The names under which APIs take a key in the query, which a server elsewhere does not get."""
_NOT_THEIRS = frozenset([b"x-request-id", b"content-encoding", WARM])
"""The fields of a client that no engine gets: its request has an id of ours, and its body was unpacked."""
UPGRADE = {b"connection": b"Upgrade", b"upgrade": b"websocket"}
_NO_KEY: Mapping[bytes, bytes] = dict.fromkeys(FIELDS, b"")


def request_head(question: Question, lease: Lease, also: Mapping[bytes, bytes] = {}) -> bytes:
    """The lines of the head for the engine. ``also``: more fields."""
    request, route, backend = question.context.request, question.context.route, lease.backend
    query = request.query
    if query and route.model_in != "upstream":  # a name that is read there is the one that was asked for
        query = naming.model_replaced_in_query(query, question.known_as(backend))
    credentials, drop = _credentials(question, backend, route.path)
    own = {**credentials, **also}
    is_page = question.context.shows_pages and route.model_in == "upstream" and request.method == "GET"
    if b"accept-encoding" in request.fields and not is_page:
        # What is packed cannot be read: usage, errors, ids of answers.
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
    return b"%bX-Request-ID: %b\r\n" % (lines, question.context.id.encode("ascii"))


def translated_head(question: Question, lease: Lease, path: str) -> bytes:
    """The lines of the head of a question that the client did not ask in these words."""
    credentials, drop = _credentials(question, lease.backend, path)
    own = {
        **credentials,
        b"accept": b"*/*",
        b"accept-encoding": b"identity",
        b"content-type": b"application/json",
        b"x-request-id": question.context.id.encode("ascii"),
    }
    return http1.forward_request_head(
        question.context.request,
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
        return _target_elsewhere(backend, path, query).encode("ascii")
    return (f"{path}?{query}" if query else path).encode("ascii")


def _credentials(
    question: Question, backend: Backend, path: str
) -> tuple[Mapping[bytes, bytes], frozenset[bytes]]:
    """The fields that are set (to an empty value: taken away), and those of the client's that are dropped.

    Engines of ours get a client's keys only where these are not for us; servers elsewhere never do.
    """
    if backend.url:
        own, dropped = _fields_elsewhere(question.context.request, backend, path)
        return own, _NOT_THEIRS | dropped
    if not question.context.access.hides_keys:
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


# Servers elsewhere


def _fields_elsewhere(
    request: http1.Request, backend: Backend, path: str
) -> tuple[dict[bytes, bytes], frozenset[bytes]]:
    """The fields that are set for a server elsewhere, and the names of the client's that it does not get."""
    shown = key_fields(backend.url, backend.service.api_key or "", path)
    own = {name.encode("ascii"): value.encode("ascii") for name, value in shown.items()}
    # Answers are read here, and events written among theirs: engines do not compress, clouds do.
    own[b"accept-encoding"] = b"identity"
    dropped = frozenset(name for name in request.fields if name not in PASSED)
    if offered := request.fields.get(SUBPROTOCOL):
        kept = [each.strip() for each in offered.split(b",") if KEY_IN_SUBPROTOCOL not in each.lower()]
        own |= {SUBPROTOCOL: b", ".join(kept)} if kept else {}
    if b"anthropic-version" in request.fields:
        own.pop(b"anthropic-version", None)
    return own, dropped


def _target_elsewhere(backend: Backend, path: str, query: str) -> str:
    """The path and query that a server elsewhere is asked for; without what may be a client's key."""
    kept = [(name, value) for name, value in parse_qsl(query, True) if name.lower() not in KEYS_IN_QUERY]
    there = site(backend.url).path(path)
    return f"{there}?{urlencode(kept)}" if kept else there


def pause_asked(fields: Mapping[bytes, bytes], now: float) -> float | None:
    """The seconds for which a server wants to be left alone, as its answer says; ``now``: Unix time."""
    text = fields.get(b"retry-after", b"").decode("latin-1").strip()
    if re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", text):
        return float(text)
    try:
        return parsedate_to_datetime(text).timestamp() - now
    except (ValueError, OverflowError):
        return None
