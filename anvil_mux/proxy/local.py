"""The routes that are answered here, by no engine: probes, lists, the page, what is done by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from anvil_mux.errors import BadRequest, ClientGone, ClientStalled, NotFound
from anvil_mux.multiplexer.multiplexer import Multiplexer
from anvil_mux.protocol import api, ollama
from anvil_mux.protocol.completions import parse
from anvil_mux.proxy.access import is_page, preflight
from anvil_mux.proxy.asked import Asked
from anvil_mux.proxy.captures import Captures
from anvil_mux.proxy.diagnosis import Diagnosis
from anvil_mux.proxy.lists import OF_ONE, Lists
from anvil_mux.proxy.operations import HostReports, HostRoutes, Keep, Operations, Pausing
from anvil_mux.proxy.page import Page
from anvil_mux.proxy.probes import TEXT, Answer, Probes
from anvil_mux.proxy.questions import read_json
from anvil_mux.proxy.reloads import Reloads
from anvil_mux.proxy.reply import JSON, Reply
from anvil_mux.proxy.usage import UsageRoute, UsageSince
from anvil_mux.telemetry.accesslog import Served
from anvil_mux.telemetry.feed import Feed

FRESH = (b"Cache-Control", b"no-store")


class Local:
    """Answers the routes of our own. Any thread."""

    def __init__(
        self,
        mux: Multiplexer,
        probes: Probes,
        page: Page,
        tail: Callable[[str, int], Iterable[str]],
        reloads: Reloads | None,
        reports: HostReports,
        keep_pause: Keep,
        usage: UsageSince,
        captures: Captures,
        feed: Feed,
    ) -> None:
        self._lists = lists = Lists(mux)
        self._page = page
        operations = Operations(mux, lambda: probes.draining, reloads, feed)
        diagnosis = Diagnosis(mux, tail, probes.external_state)
        hosts, pausing = HostRoutes(mux, reports), Pausing(mux, keep_pause)
        self.gets: dict[str, Callable[[Asked], Answer]] = {
            "/": probes.hello,
            "/health": lambda _: (200, TEXT, b"OK\n"),
            "/healthz": probes.healthz,
            "/hosts": hosts.hosts,
            "/livez": lambda _: (200, TEXT, b"ok\n"),
            "/metrics": probes.scrape,
            "/api/hello": lambda _: (200, TEXT, b"anvil-mux\n"),
            "/api/ps": lists.ollama_running,
            "/api/tags": lists.ollama_tags,
            "/api/v0/models": lists.lmstudio_models,
            "/api/version": lambda _: (200, JSON, ollama.version()),
            "/models": lists.models,
            "/readyz": probes.readyz,
            "/requests": captures.answer,
            "/requests/running": operations.under_way,
            "/usage": UsageRoute(usage).usage,
            "/v1/models": lists.models,
            OF_ONE: lists.models,
        }
        self.streams: dict[str, Callable[[Asked, Reply], None]] = {
            "/events": page.events,
            "/logs": diagnosis.logs,
            "/models/sse": operations.follow,
            "/why": diagnosis.why,
        }
        """The routes that write their answer themselves."""
        self.posts: dict[str, Callable[[Asked, Reply, Served], None]] = {
            "/api/show": self._ollama_show,
            "/hosts/drain": hosts.drain,
            "/hosts/gone": hosts.gone,
            "/hosts/undrain": hosts.undrain,
            "/requests/cancel": operations.cancel,
            "/models/load": operations.load,
            "/models/pin": operations.pin,
            "/models/unload": operations.unload,
            "/models/unpin": operations.unpin,
            "/pause": pausing.pause,
            "/resume": pausing.resume,
        }
        if reloads:
            self.posts["/reload"] = operations.reload

    def answer(self, asked: Asked, reply: Reply, record: Served) -> None:
        method, path = asked.request.method, asked.request.path
        get, post = self.gets.get(path), self.posts.get(path)
        if get is None and path.startswith(OF_ONE):
            get = self._lists.model
        if method == "OPTIONS":
            allowed = self._allowed(path)
            headers = [(b"Allow", allowed), *preflight(asked.request, asked.reader, allowed)]
            reply.whole(204, headers, b"")
        elif method == "POST" and post:
            post(asked, reply, record)
        elif method == "GET" and path in self.streams:
            self._stream(path, asked, reply)
        elif is_page(asked.request):
            self._page.page(reply)
        elif method in ("GET", "HEAD") and get:
            status, kind, body = get(asked)
            reply.whole(status, [kind, FRESH], body)
        elif get or post or path in self.streams:
            allow = self._allowed(path)
            error = BadRequest(f"{path} takes {allow.decode()}, not {method}", status=405)
            reply.refuse(error, [(b"Allow", allow)])
        else:
            reply.refuse(*api.no_route(method, path))

    def _stream(self, path: str, asked: Asked, reply: Reply) -> None:
        """An answer that writes itself. One that has begun follows what happens, until its client leaves."""
        try:
            self.streams[path](asked, reply)
        except ClientStalled:
            raise
        except ClientGone:
            if reply.form != "event":
                raise
            reply.keep = False

    def _allowed(self, path: str) -> bytes:
        allowed = [method for method in ("GET", "POST") if api.match(method, path)]
        if path in self.gets or path.startswith(OF_ONE):
            allowed += ["GET", "HEAD"]
        if path in self.streams:
            allowed.append("GET")
        if path in self.posts:
            allowed.append("POST")
        if not allowed:
            raise NotFound(f"There is no route {path}.")
        return ", ".join([*allowed, "OPTIONS"]).encode("ascii")

    def _ollama_show(self, asked: Asked, reply: Reply, record: Served) -> None:
        name = ollama.name_in(parse(read_json(asked, reply.client)))
        record.model = asked.access.find(name, api=asked.api, key=asked.key).model
        reply.whole(200, [JSON], self._lists.ollama_show(record.model))
