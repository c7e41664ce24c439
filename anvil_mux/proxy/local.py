"""The routes that are answered here, by no engine: one row for each.

A row says by which methods a path is asked, the right that an API key needs for it, what answers, and whether
it is left out of the access log when it was answered well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

from anvil_mux.errors import BadRequest, ClientGone, ClientStalled, Moved, NotFound
from anvil_mux.host.engines import find_engine
from anvil_mux.host.seam import Sight
from anvil_mux.multiplexer.multiplexer import Multiplexer
from anvil_mux.protocol import api, ollama
from anvil_mux.proxy.access import ADMIN, ANY_KEY, NO_KEY, STATE, Right, is_page, preflight
from anvil_mux.proxy.operations import HINT, OF_ONE, HostReports, Keep, Operations, Reloads, hinted_in
from anvil_mux.proxy.page import Page
from anvil_mux.proxy.reply import JSON, TEXT, Reply
from anvil_mux.proxy.reports import Captures, Diagnosis, Lists, Probes, UsageSince, report_usage
from anvil_mux.telemetry.journal import Feed


class LocalRoute(NamedTuple):
    """One route of our own."""

    methods: tuple[str, ...]
    path: str
    right: Right
    answer: Callable[[Reply], None]
    is_quiet: bool = False

    @property
    def route(self) -> str:
        """The path as metrics have it, without what follows it."""
        return self.path.removesuffix("/") or self.path


READ = ("GET", "HEAD")
FOLLOW = ("GET",)
ACT = ("POST",)


def _no_route(reply: Reply) -> None:
    request = reply.context.request
    reply.refuse(*api.no_route(request.method, request.path))


NOWHERE = LocalRoute((), "", ADMIN, _no_route)
"""The row of paths that there are not."""
UPSTREAM = LocalRoute((), "/upstream/", ANY_KEY, _no_route)
"""The row of paths below it that are no question to an engine."""


def _nowhere_at_pages(reply: Reply) -> None:
    raise NotFound("This port has nothing but pages of engines: /upstream/MODEL/.")


PAGES = LocalRoute((), "", ANY_KEY, _nowhere_at_pages)
"""The row of whatever else is asked for at the port that is for pages of engines."""


def _to_the_page(reply: Reply) -> None:
    raise Moved("The status page is here", "/")


def _elsewhere(place: str, reply: Reply) -> None:
    path = reply.context.request.path
    raise NotFound(f"{path} is a route of llama-swap; here it is {place}.")


OF_LLAMA_SWAP = {
    "/running": "`GET /models`, with the status of each model, or `GET /healthz`",
    "/unload": 'by POST: `/models/unload` with {"model": NAME} or {"all": true}',
    "/logs/stream": "`GET /logs?model=NAME`, or `GET /events` for what happens",
}
"""Routes that llama-swap has -> what serves in their place."""


class Local:
    """Answers the routes of our own. Any thread."""

    def __init__(
        self,
        mux: Multiplexer,
        feed: Feed,
        *,
        capture: int,
        metrics: Callable[[str], tuple[str, bytes]],
        checks: Mapping[str, Callable[[], str]],
        tail: Callable[[str, int], Iterable[str]],
        keep_pause: Keep,
        notes: Mapping[str, Callable[[], str]] = {},
        sight: Callable[[], Sight] = dict,
        hosts: HostReports = list,
        usage: UsageSince = lambda since: [],
        reloads: Reloads | None = None,
    ) -> None:
        """``capture``: how many requests are kept with their bodies. ``reloads``: None if the configuration
        cannot be read again.
        """
        self._mux = mux
        self._feed = feed
        self.probes = probes = Probes(mux, metrics, checks, sight=sight, reloads=reloads, notes=notes)
        self.captures = captures = Captures(capture)
        lists, diagnosis = Lists(mux), Diagnosis(mux, tail, probes)
        operations, page = Operations(mux, feed, reloads, hosts, keep_pause), Page(mux, feed, self._followed)

        def front(reply: Reply) -> None:
            page.page(reply) if is_page(reply.context.request) else probes.hello(reply)

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
            LocalRoute(ACT, HINT, ANY_KEY, operations.hint),
            LocalRoute(READ, "/models", ANY_KEY, lists.models),
            LocalRoute(FOLLOW, "/models/sse", ANY_KEY, operations.follow),
            LocalRoute(ACT, "/models/load", ADMIN, operations.load),
            LocalRoute(ACT, "/models/unload", ADMIN, operations.unload),
            LocalRoute(ACT, "/models/pin", ADMIN, partial(operations.pin, pinned=True)),
            LocalRoute(ACT, "/models/unpin", ADMIN, partial(operations.pin, pinned=False)),
            LocalRoute(READ, "/api/hello", NO_KEY, partial(Reply.fresh, kind=TEXT, body=b"anvil-mux\n")),
            LocalRoute(READ, "/api/ps", ANY_KEY, lists.ollama_running),
            LocalRoute(ACT, "/api/show", ANY_KEY, lists.ollama_show),
            LocalRoute(READ, "/api/tags", ANY_KEY, lists.ollama_tags),
            LocalRoute(READ, "/api/v0/models", ANY_KEY, lists.lmstudio_models),
            LocalRoute(READ, "/api/version", ANY_KEY, partial(Reply.fresh, kind=JSON, body=ollama.version())),
            LocalRoute(READ, "/hosts", ADMIN, operations.hosts),
            LocalRoute(ACT, "/hosts/drain", ADMIN, partial(operations.drain_host, drained=True)),
            LocalRoute(ACT, "/hosts/undrain", ADMIN, partial(operations.drain_host, drained=False)),
            LocalRoute(ACT, "/hosts/gone", ADMIN, operations.host_gone),
            LocalRoute(ACT, "/pause", ADMIN, operations.pause),
            LocalRoute(ACT, "/resume", ADMIN, operations.resume),
            *([LocalRoute(ACT, "/reload", ADMIN, operations.reload)] if reloads else []),
            *[LocalRoute((), path, NO_KEY, _to_the_page) for path in ("/ui", "/ui/")],
            *[
                LocalRoute((), path, ANY_KEY, partial(_elsewhere, place))
                for path, place in OF_LLAMA_SWAP.items()
            ],
        ]
        self.routes = {row.path: row for row in rows}

    def _followed(self) -> dict[str, Any]:
        """The state as the page follows it; ``pages``: the models whose engines have a page of their own."""
        backends = self._mux.overview.configured()
        pages = {each.model: None for each in backends if find_engine(each.engine).has_page and not each.url}
        return {**self.probes.state(brief=True), "capture": self.captures.most, "pages": list(pages)}

    def drain(self) -> None:
        """Make every answer from now on the last of its connection, since the program ends."""
        self.probes.draining = True
        self._feed.close()

    def find(self, method: str, path: str) -> LocalRoute:
        """The row of a path that is no question to an engine."""
        if row := self.routes.get(path):
            return row
        if path.startswith(OF_ONE):
            return self.routes[OF_ONE if method in READ or not hinted_in(path) else HINT]
        return UPSTREAM if path.startswith(UPSTREAM.path) else NOWHERE

    def answer(self, row: LocalRoute, reply: Reply) -> None:
        """Answers by the row of the request's path."""
        request = reply.context.request
        method, path = request.method, request.path
        if method == "OPTIONS":
            allowed = _allowed(path, row)
            headers = [(b"Allow", allowed), *preflight(request, reply.context.reader, allowed)]
            reply.whole(204, headers, b"")
        elif method in row.methods or not row.methods:
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


def _allowed(path: str, row: LocalRoute) -> bytes:
    """The methods by which a path may be asked, at engines and here."""
    methods = [method for method in ("GET", "POST") if api.match(method, path)]
    methods += row.methods
    if not methods:
        raise NotFound(f"There is no route {path}.")
    return ", ".join([*methods, "OPTIONS"]).encode("ascii")
