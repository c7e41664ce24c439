"""The routes that are answered here, by no engine: one row for each.

A row says by which methods a path is asked, the right that an API key needs for it, what answers, and whether
it is left out of the access log when it was answered well.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from anvil_mux.errors import BadRequest, ClientGone, ClientStalled, NotFound
from anvil_mux.protocol import api, ollama
from anvil_mux.proxy.access import ADMIN, ANY_KEY, NO_KEY, STATE, Right, is_page, preflight
from anvil_mux.proxy.operations import Operations
from anvil_mux.proxy.page import Page
from anvil_mux.proxy.reply import JSON, TEXT, Reply
from anvil_mux.proxy.reports import OF_ONE, Captures, Diagnosis, Lists, Probes, UsageSince, report_usage

UPSTREAM = "/upstream/"


class LocalRoute(NamedTuple):
    """One route of our own."""

    methods: tuple[str, ...]
    path: str
    right: Right
    answer: Callable[[Reply], None]
    is_quiet: bool = False


READ = ("GET", "HEAD")
FOLLOW = ("GET",)
ACT = ("POST",)


class Local:
    """Answers the routes of our own. Any thread."""

    def __init__(
        self,
        probes: Probes,
        lists: Lists,
        diagnosis: Diagnosis,
        page: Page,
        operations: Operations,
        captures: Captures,
        usage: UsageSince,
        *,
        reloads: bool,
    ) -> None:
        """``reloads``: whether the configuration can be read again."""

        def front(reply: Reply) -> None:
            page.page(reply) if is_page(reply.context.request) else probes.hello(reply)

        def ollama_version(reply: Reply) -> None:
            reply.fresh(JSON, ollama.version())

        rows = [
            LocalRoute(READ, "/", STATE, front),
            LocalRoute(READ, "/health", NO_KEY, partial(Reply.fresh, kind=TEXT, body=b"OK\n"), is_quiet=True),
            LocalRoute(READ, "/healthz", STATE, probes.healthz, is_quiet=True),
            LocalRoute(READ, "/livez", NO_KEY, partial(Reply.fresh, kind=TEXT, body=b"ok\n"), is_quiet=True),
            LocalRoute(READ, "/readyz", NO_KEY, probes.readyz, is_quiet=True),
            LocalRoute(READ, "/metrics", STATE, probes.metrics, is_quiet=True),
            LocalRoute(FOLLOW, "/events", STATE, page.events),
            LocalRoute(FOLLOW, "/logs", ADMIN, diagnosis.logs, is_quiet=True),
            LocalRoute(FOLLOW, "/why", STATE, diagnosis.why, is_quiet=True),
            LocalRoute(READ, "/usage", STATE, partial(report_usage, usage)),
            LocalRoute(READ, "/requests", ADMIN, captures.requests),
            LocalRoute(READ, "/requests/running", STATE, operations.under_way),
            LocalRoute(ACT, "/requests/cancel", ADMIN, operations.cancel),
            LocalRoute(READ, "/v1/models", ANY_KEY, lists.models),
            LocalRoute(READ, OF_ONE, ANY_KEY, lists.model),
            LocalRoute(READ, "/models", ANY_KEY, lists.models),
            LocalRoute(FOLLOW, "/models/sse", ANY_KEY, operations.follow),
            LocalRoute(ACT, "/models/load", ADMIN, operations.load),
            LocalRoute(ACT, "/models/unload", ADMIN, operations.unload),
            LocalRoute(ACT, "/models/pin", ADMIN, operations.pin),
            LocalRoute(ACT, "/models/unpin", ADMIN, operations.unpin),
            LocalRoute(READ, "/api/hello", NO_KEY, partial(Reply.fresh, kind=TEXT, body=b"anvil-mux\n")),
            LocalRoute(READ, "/api/ps", ANY_KEY, lists.ollama_running),
            LocalRoute(ACT, "/api/show", ANY_KEY, lists.ollama_show),
            LocalRoute(READ, "/api/tags", ANY_KEY, lists.ollama_tags),
            LocalRoute(READ, "/api/v0/models", ANY_KEY, lists.lmstudio_models),
            LocalRoute(READ, "/api/version", ANY_KEY, ollama_version),
            LocalRoute(READ, "/hosts", ADMIN, operations.hosts),
            LocalRoute(ACT, "/hosts/drain", ADMIN, operations.drain_host),
            LocalRoute(ACT, "/hosts/undrain", ADMIN, operations.undrain_host),
            LocalRoute(ACT, "/hosts/gone", ADMIN, operations.host_gone),
            LocalRoute(ACT, "/pause", ADMIN, operations.pause),
            LocalRoute(ACT, "/resume", ADMIN, operations.resume),
            *([LocalRoute(ACT, "/reload", ADMIN, operations.reload)] if reloads else []),
        ]
        self.routes = {row.path: row for row in rows}

    def find(self, path: str) -> LocalRoute | None:
        """The row of a path, if there is one."""
        return self.routes.get(path) or (self.routes[OF_ONE] if path.startswith(OF_ONE) else None)

    def right(self, path: str) -> Right:
        """The right that a key needs to ask for a path of ours, or for one that there is not."""
        row = self.find(path)
        return row.right if row else ANY_KEY if path.startswith(UPSTREAM) else ADMIN

    def answer(self, reply: Reply) -> None:
        request = reply.context.request
        method, path = request.method, request.path
        row = self.find(path)
        if method == "OPTIONS":
            allowed = _allowed(path, row)
            headers = [(b"Allow", allowed), *preflight(request, reply.context.reader, allowed)]
            reply.whole(204, headers, b"")
        elif row is None:
            reply.refuse(*api.no_route(method, path))
        elif method in row.methods:
            reply.record.is_quiet = row.is_quiet
            _answer(row, reply)
        else:
            allowed = _allowed(path, row)
            error = BadRequest(f"{path} takes {allowed.decode()}, not {method}", status=405)
            reply.refuse(error, [(b"Allow", allowed)])


def _answer(row: LocalRoute, reply: Reply) -> None:
    """Answer by a row. A stream that has begun follows what happens, until its client leaves."""
    try:
        row.answer(reply)
    except ClientStalled:
        raise
    except ClientGone:
        if reply.form != "event":
            raise
        reply.keep = False


def _allowed(path: str, row: LocalRoute | None) -> bytes:
    """The methods by which a path may be asked, at engines and here."""
    methods = [method for method in ("GET", "POST") if api.match(method, path)]
    methods += row.methods if row else ()
    if not methods:
        raise NotFound(f"There is no route {path}.")
    return ", ".join([*methods, "OPTIONS"]).encode("ascii")
