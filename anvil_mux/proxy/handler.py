"""One request from its head to its record: who may ask, an answer of ours or an engine's, the error.

``Handler.serve`` runs in the connection's thread and returns whether another request may follow on it. One
request has three objects: what was asked (``RequestContext``, and with a body ``Question``), the writer of
its answer (``Reply``), and its record for the log (``Served``).

The routes that are answered here, by no engine, have a row each (``Local``): by which methods a path is
asked, the right that an API key needs for it, what answers, and whether it is left out of the access log when
it was answered well.
"""

from __future__ import annotations

import itertools
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

from anvil_mux.config.config import Config
from anvil_mux.config.keys import Keyring
from anvil_mux.errors import (
    BadRequest,
    ClientGone,
    ClientStalled,
    Moved,
    MuxError,
    NotFound,
    Unauthorized,
    UnknownModel,
)
from anvil_mux.host.engines import ENGINES
from anvil_mux.host.seam import GpuUses
from anvil_mux.multiplexer.multiplexer import Multiplexer
from anvil_mux.protocol import api, http1, ollama
from anvil_mux.protocol.tokens import NO_TOKENS
from anvil_mux.proxy.access import ADMIN, ANY_KEY, NO_KEY, STATE, Access, Right, challenge, is_page, preflight
from anvil_mux.proxy.client import Client, Spool
from anvil_mux.proxy.dispatch import Dispatcher, Patience
from anvil_mux.proxy.exchange import Relay
from anvil_mux.proxy.operations import HINT, OF_ONE, HostReports, Keep, Operations, Reloads, hinted_in
from anvil_mux.proxy.page import Page
from anvil_mux.proxy.question import Questions, StoredResponses, heed_hint
from anvil_mux.proxy.reply import JSON, TEXT, Capture, Reply
from anvil_mux.proxy.reports import Captures, Diagnosis, Lists, Probes, UsageSince, report_usage
from anvil_mux.telemetry.accesslog import Served, Sink
from anvil_mux.telemetry.journal import Feed

NO_REQUEST = http1.Request(
    method="-",
    target=b"",
    path="",
    query="",
    version=(1, 1),
    headers=[],
    fields={},
    keep_alive=False,
    chunked=False,
    expect_continue=False,
    passing=[],
    length=None,
)
"""Stands for what could not be read as a request."""
SMALL_ANSWER = 8192
"""An answer up to this size is kept until the journal reads what its engine reported."""

log = logging.getLogger(__name__)


class Handler:
    """Answers requests. Any thread."""

    def __init__(
        self,
        config: Config,
        keys: Keyring,
        mux: Multiplexer,
        relay: Relay,
        local: Local,
        *,
        records: Sink,
        only_local_hosts: bool,
        patience: Patience | None = None,
    ) -> None:
        """``only_local_hosts``: bound to loopback, so that any other Host is a web page named to mean this
        machine."""
        self._mux = mux
        self._records = records
        self._ids = map((secrets.token_hex(5) + "-%x").__mod__, itertools.count(1))
        instance = secrets.token_hex(4)
        self._access = Access(config, keys, only_local_hosts=only_local_hosts, instance=instance)
        self.local = local
        stored = StoredResponses()
        self._questions = Questions(mux, stored)
        self._dispatcher = Dispatcher(mux, relay, stored, patience)

    def reconfigure(self, config: Config, keys: Keyring) -> None:
        """Answer requests by this from now on, also those of connections that are open already."""
        before = self._access
        if keys is not before.keys:
            before.keys.give_way(keys)
        self._access = Access(
            config, keys, only_local_hosts=before.only_local_hosts, instance=before.instance
        )
        self.local.captures.resize(config.capture)

    def serve(self, client: Client, request: http1.Request) -> bool:
        """Answers one request; False if the connection must be closed after it."""
        given = request.fields.get(b"x-request-id")
        id = next(self._ids) if given is None else api.request_id(given, self._ids.__next__)
        access = self._access
        context = access.context(id, time.monotonic(), request, at_pages=client.at_pages)
        record = Served(id, client.address, request.method, request.path)
        reply = Reply(client, context, record, keep=request.keep_alive and not self.local.probes.draining)
        row = None
        if context.route is api.NO_ROUTE:
            row = PAGES if client.at_pages else self.local.find(request.method, request.path)
            record.route = row.route or api.label(request.path)
        else:
            record.route = context.route.label
        try:
            right = row.right if row else ADMIN if context.route.shows_prompts else ANY_KEY
            key = access.check(context, right)
            client.is_known = client.is_known or key is not None or not access.hides_keys
            if key:
                context = reply.context = access.context(
                    id, context.since, request, at_pages=client.at_pages, key=key
                )
            if row:
                heed_hint(self._mux, context)
                self.local.answer(row, reply)
            elif key:
                with self._mux.counts.under_way(key):
                    self._ask_engine(reply)
            else:
                self._ask_engine(reply)
        except ClientGone as gone:
            reply.left(gone)
        except Unauthorized as error:
            reply.refuse(error, [(b"WWW-Authenticate", b'%b realm="anvil-mux"' % challenge(request))])
        except MuxError as error:
            reply.refuse(error)
        except Exception:
            log.exception("request %s failed", id)
            reply.refuse(MuxError("Internal error in anvil-mux; its log says more."))
        self._end(reply)
        return reply.keep

    def _ask_engine(self, reply: Reply) -> None:
        context, record = reply.context, reply.record
        question = self._questions.read(context, reply.client)
        record.model, record.preset = question.target.model, question.target.preset
        record.stream = question.stream
        if context.access.config.capture:
            reply.capture = Capture(question.body)
        try:
            self._dispatcher.answer(question, reply)
        except UnknownModel as error:  # a reload has taken it away; of the others each key knows its own
            raise UnknownModel(error.model, self._access.names(context.key, but=error.model)) from None
        finally:
            if isinstance(question.body, Spool):
                question.body.close()

    def refuse_bad_head(self, client: Client, error: MuxError) -> None:
        """Answers something that could not be read as a request."""
        id = next(self._ids)
        context = self._access.context(id, time.monotonic(), NO_REQUEST)
        reply = Reply(client, context, Served(id, client.address, "-", "", route="other"), keep=False)
        reply.refuse(error)
        self._end(reply)

    def _end(self, reply: Reply) -> None:
        """Hand the record on, which is whole now."""
        context, record = reply.context, reply.record
        record.ended, record.seconds = time.time(), time.monotonic() - context.since
        if context.key:
            record.key = context.key.name
        if len(record.said) > SMALL_ANSWER:  # the others are read later, many in a row
            record.usage, record.said = record.reported(), b""
        if not record.said and record.usage == NO_TOKENS:
            record.foreseen = None
        if reply.capture:
            self.local.captures.keep(reply.capture, context.request, record)
        self._records.add(record)


# The routes of our own


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
        gpu_uses: Callable[[], GpuUses] = dict,
        hosts: HostReports = list,
        usage: UsageSince = lambda since: [],
        reloads: Reloads | None = None,
    ) -> None:
        """``capture``: how many requests are kept with their bodies. ``reloads``: None if the configuration
        cannot be read again.
        """
        self._mux = mux
        self._feed = feed
        self.probes = probes = Probes(mux, metrics, checks, gpu_uses=gpu_uses, reloads=reloads, notes=notes)
        self.captures = captures = Captures(capture)
        lists, diagnosis = Lists(mux), Diagnosis(mux, tail, probes)
        operations, page = Operations(mux, feed, reloads, hosts, keep_pause), Page(mux, feed, self._followed)

        def front(reply: Reply) -> None:
            page.page(reply) if is_page(reply.context.request) else probes.hello(reply)

        rows = [
            LocalRoute(READ, "/", STATE, front),
            LocalRoute(READ, "/health", NO_KEY, partial(Reply.fresh, kind=TEXT, body=b"OK\n"), is_quiet=True),
            LocalRoute(READ, "/healthz", STATE, probes.healthz, is_quiet=True),
            LocalRoute(READ, "/livez", NO_KEY, probes.livez, is_quiet=True),
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
        backends = self._mux.overview.config.backends
        pages = {each.model: None for each in backends if ENGINES[each.engine].has_page and not each.url}
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
