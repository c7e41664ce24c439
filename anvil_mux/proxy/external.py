"""Connections and heads for servers elsewhere: TLS that is verified, and no key but our own.

Of a client's head only the fields in ``PASSED`` are sent on. So whatever a client shows as a key, under
whatever name, reaches nobody but us. A connection is made to each of the server's addresses in turn; one that
is encrypted has a thread (tls.py).
"""

from __future__ import annotations

import os
import re
import select
import socket
from collections.abc import Callable, Mapping
from email.utils import parsedate_to_datetime
from functools import lru_cache
from ssl import SSLContext
from time import monotonic
from urllib.parse import parse_qsl, urlencode

from anvil_mux.config.config import Backend
from anvil_mux.config.values import site
from anvil_mux.host.external import key_fields, trust
from anvil_mux.protocol import http1
from anvil_mux.proxy import tls
from anvil_mux.proxy.connections import LOOK_SECONDS, STILL_CONNECTING
from anvil_mux.proxy.sockets import timeval

CONNECT_SECONDS = 10.0
"""Seconds for which the addresses of a server are tried, all together."""

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


def fields(
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


def target(backend: Backend, path: str, query: str) -> str:
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


def connect(backend: Backend, look: Callable[[], object], patience: float) -> socket.socket:
    """A connection to the server of a backend, or the plain end of an encrypted one; OSError.

    Its calls return a few times a second. ``look`` is called as often while it is made.
    """
    server = site(backend.url)
    connection = _reached(server.address, look)
    try:
        if server.secure:
            connection = tls.begun(connection, _trust(backend.ca_file), server.host, patience)
        connection.settimeout(None)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval(LOOK_SECONDS))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval(LOOK_SECONDS))
    except BaseException:
        connection.close()
        raise
    return connection


def _reached(address: tuple[str, int], look: Callable[[], object]) -> socket.socket:
    """A connection to the first address of the server that takes one."""
    until, last = monotonic() + CONNECT_SECONDS, OSError("it has no address")
    found = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)
    for number, (family, kind, protocol, _, place) in enumerate(found):
        share = (until - monotonic()) / (len(found) - number)
        connection = socket.socket(family, kind, protocol)
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _connect(connection, place, max(share, LOOK_SECONDS), look)
            return connection
        except OSError as error:
            connection.close()
            last = error
        except BaseException:
            connection.close()
            raise
    raise last


def _connect(
    connection: socket.socket, place: tuple[object, ...], seconds: float, look: Callable[[], object]
) -> None:
    """Connect within so many seconds; OSError."""
    connection.setblocking(False)
    until = monotonic() + seconds
    error = connection.connect_ex(place)
    poll = select.poll()
    poll.register(connection, select.POLLOUT)
    while error in STILL_CONNECTING:
        if poll.poll(LOOK_SECONDS * 1000):
            error = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            break
        look()
        if monotonic() >= until:
            raise TimeoutError(f"no connection within {seconds:.0f} s")
    if error:
        raise OSError(error, os.strerror(error))


def _trust(ca_file: str) -> SSLContext:
    """The certificates that servers are trusted by; a file is read again when it has changed."""
    return _read_trust(ca_file, os.stat(ca_file).st_mtime_ns if ca_file else 0)


@lru_cache(8)
def _read_trust(ca_file: str, changed: int) -> SSLContext:
    return trust(ca_file)
