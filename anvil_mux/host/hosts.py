"""The hosts of one anvil-mux, and servers elsewhere that somebody else runs, which are on none of them.

``Hosts`` hands each call that names a backend to the backend's own host. In the place of a host for servers
elsewhere, ``ExternalServer`` answers as if each were resident already: nothing there is started, stopped or
evicted. ``look_at_server`` finds out whether one is well, by a request that costs nothing.
"""

from __future__ import annotations

import http.client
import ssl
import threading
from collections.abc import Mapping
from contextlib import suppress
from socket import SHUT_RDWR
from typing import NamedTuple

from anvil_mux.config.config import Backend
from anvil_mux.config.kinds import nearest
from anvil_mux.config.values import Site, site
from anvil_mux.host.engine_client import model_ids
from anvil_mux.host.seam import LOG_LINES, Awake, Evicted, Found, Host, Loaded
from anvil_mux.protocol import cards, foreign
from anvil_mux.protocol.cards import NOTHING_KNOWN, ModelCard

MODELS = "/v1/models"
ASK_SECONDS = 5.0
MOST_BYTES = 4 << 20
LACKS_ROUTE = (404, 405, 501)
"""How a server answers that has no list of its models; it is there all the same."""


class Hosts:
    """All hosts of one anvil-mux, by name; "" is the one that it runs on. The calls are those of ``Host``.

    A backend whose server somebody else runs is on none of them.
    """

    def __init__(self, hosts: Mapping[str, Host]) -> None:
        self.by_name = hosts
        self._external = ExternalServer()

    def _of(self, backend: Backend) -> Host | ExternalServer:
        return self._external if backend.url else self.by_name[backend.host]

    def __getitem__(self, name: str) -> Host:
        return self.by_name[name]

    def adopt(self, backend: Backend) -> Found:
        return self._of(backend).adopt(backend)

    def load(self, backend: Backend, level: str, number: int) -> Loaded:
        return self._of(backend).load(backend, level, number)

    def cancel(self, backend: Backend, number: int) -> None:
        self._of(backend).cancel(backend, number)

    def evict(self, backend: Backend, level: str) -> Evicted:
        return self._of(backend).evict(backend, level)

    def demote(self, backend: Backend, before: str, level: str) -> Evicted:
        return self._of(backend).demote(backend, before, level)

    def stop(self, backend: Backend) -> None:
        self._of(backend).stop(backend)

    def ended(self, backend: Backend) -> str | None:
        return self._of(backend).ended(backend)

    def answers(self, backend: Backend, limit: float) -> bool | None:
        return self._of(backend).answers(backend, limit)

    def log_tail(self, backend: Backend, lines: int = LOG_LINES) -> list[str]:
        return self._of(backend).log_tail(backend, lines)


AnyHost = Host | Hosts
"""The one that performs steps on backends: their only host, or all hosts."""


class ExternalServer:
    """The calls of ``seam.Host`` for backends elsewhere, as far as ``Hosts`` hands them on. Any thread."""

    def adopt(self, backend: Backend) -> Found:
        return Awake(backend.url)

    def load(self, backend: Backend, level: str, number: int) -> Loaded:
        return Loaded(backend.url, level)

    def cancel(self, backend: Backend, number: int) -> None:
        """Do nothing: no load of it ever is under way."""

    def evict(self, backend: Backend, level: str) -> Evicted:
        return Evicted("stop")

    def demote(self, backend: Backend, before: str, level: str) -> Evicted:
        return Evicted("stop")

    def stop(self, backend: Backend) -> None:
        """Do nothing: the server goes on, it is not ours."""

    def ended(self, backend: Backend) -> str | None:
        return None

    def answers(self, backend: Backend, limit: float) -> bool | None:
        return None

    def log_tail(self, backend: Backend, lines: int = LOG_LINES) -> list[str]:
        return []


class Finding(NamedTuple):
    """The state of a server elsewhere, found by asking it for its models."""

    problem: str = ""
    """Why it cannot be used now, for people; "" if it answers as it should."""
    hint: str = ""
    """The part of the configuration that its list of models contradicts; "" if none."""
    card: ModelCard = NOTHING_KNOWN
    """The card of the model, as its list has it."""


def look_at_server(backend: Backend) -> Finding:
    """Ask the server of a backend for its models; blocks for a few seconds at most."""
    server = site(backend.url)
    try:
        path = server.path(MODELS)
        shown = key_fields(backend.url, backend.service.api_key or "", path)
        fields = {"Accept": "application/json", **shown}
        return _judged(backend, *get_page(_connection(server, backend.ca_file), path, fields))
    except (OSError, http.client.HTTPException, ValueError) as error:
        return Finding(f"cannot be reached: {why_unreachable(error)}")


def get_page(
    connection: http.client.HTTPConnection, path: str, fields: Mapping[str, str]
) -> tuple[int, bytes]:
    """Return status and first bytes of the answer to a GET, and close the connection.

    OSError, HTTPException, ValueError: there is none within twice the connection's time-out. That time-out
    begins again with each byte, so a thread cuts an answer that drips.
    """
    try:
        connection.connect()
        peer, seconds, was_cut = connection.sock, 2 * (connection.timeout or 0.0), threading.Event()

        def end() -> None:
            was_cut.set()
            with suppress(OSError):
                peer.shutdown(SHUT_RDWR)

        cut = threading.Timer(seconds, end)
        cut.daemon = True
        try:
            cut.start()
        except RuntimeError as error:  # no more threads
            raise OSError(str(error)) from None
        try:
            connection.request("GET", path, headers=dict(fields))
            with connection.getresponse() as response:
                status, content = response.status, response.read(MOST_BYTES)
        finally:
            cut.cancel()
        if was_cut.is_set():
            raise TimeoutError(f"its answer did not end within {seconds:g} s")
        return status, content
    finally:
        connection.close()


def why_unreachable(error: Exception) -> str:
    """Why a connection failed, for people, with what to do where that is known."""
    text = str(error) or type(error).__name__
    if "CERTIFICATE_VERIFY_FAILED" in text:
        why = getattr(error, "verify_message", "") or "it is not trusted"
        return f"its certificate was refused ({why}); if it is your own, name its authority with ca_file"
    return text


def _connection(server: Site, ca_file: str) -> http.client.HTTPConnection:
    if not server.secure:
        return http.client.HTTPConnection(server.host, server.port, timeout=ASK_SECONDS)
    context = trust(ca_file)
    return http.client.HTTPSConnection(server.host, server.port, timeout=ASK_SECONDS, context=context)


def key_fields(url: str, key: str, path: str) -> dict[str, str]:
    """The header fields that show a server our key; two large providers have words of their own for it."""
    host = site(url).host
    if not key:
        return {}
    if host.endswith((".azure.com", ".azure.us", ".azure.cn")):
        return {"api-key": key}
    if host.endswith("anthropic.com") and path.rpartition("/v1/")[2].startswith(("messages", "models")):
        return {"x-api-key": key, "anthropic-version": "2023-06-01"}
    return {"authorization": f"Bearer {key}"}


def trust(ca_file: str) -> ssl.SSLContext:
    """The certificates that a server must be vouched for by, the system's if no file is named; OSError."""
    context = ssl.create_default_context(cafile=ca_file or None)
    context.options &= ~ssl.OP_IGNORE_UNEXPECTED_EOF  # an answer without its end is not whole
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    return context


def _judged(backend: Backend, status: int, body: bytes) -> Finding:
    if status in LACKS_ROUTE:
        return Finding()
    if status in (401, 403):
        named = f"in {backend.api_key_env}" if backend.api_key_env else "(none: name one with api_key_env)"
        return Finding(f"answers {status}: it refuses the API key {named}")
    if status >= 300:
        return Finding(f"answers {status} to GET {site(backend.url).path(MODELS)}")
    found, model = foreign.read_or_none(body), backend.served_model or backend.model
    listed = model_ids(found)
    if listed and model not in listed:
        hint = nearest(model, listed[:20])
        return Finding(hint=f"does not list the model {model}; {hint} (set served_model)")
    return Finding(card=cards.read(found, model))
