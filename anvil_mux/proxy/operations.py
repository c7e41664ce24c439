"""Operations by hand: on models, on requests, on hosts and on the whole.

Models are loaded, unloaded, pinned and followed, a request is cancelled, the files are read again. Loading
and following is llama.cpp's router API, as Open WebUI and others use it; the rest is ours alone. ``POST
/models/load`` says that the load has begun, as llama.cpp does; a load that fails or ends within a moment
says that instead, and ``?wait=true`` waits for the end of any. A load that was asked for goes on when the
client leaves; all who ask for the same model meanwhile share it. ``POST /v1/models/NAME/load`` is a hint for
which a client needs no right but to use the model: it is preloaded if nobody is in the way. ``GET
/models/sse`` tells every model's status, and then each change of it, until the client leaves or the program
ends; it looks a few times a second, once for all who follow, so no request pays for it.

``POST /hosts/drain`` empties a host and loads nothing there until ``/hosts/undrain``; ``/hosts/gone`` says
that nothing runs any more on a host that is lost.

``POST /pause`` has all models drained and stopped, ``POST /resume`` ends that. What is asked for is in effect
at once, and is kept for the next start of anvil-mux. ``for`` in the body of a pause is how long it lasts
(seconds, or text such as 2h); without it the pause lasts until it is resumed.

``POST /reload`` reads the files anew and checks them whole (``Reloads``). If anything is wrong nothing
changes, and every problem is told to whoever asked.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict
from functools import partial
from typing import Any
from urllib.parse import unquote

from anvil_mux.config.change import Change
from anvil_mux.config.config import Config
from anvil_mux.config.kinds import read_seconds
from anvil_mux.errors import BadRequest, ConfigError, Draining, MuxError, NotFound, UnknownModel
from anvil_mux.multiplexer.multiplexer import Multiplexer
from anvil_mux.protocol import api, naming
from anvil_mux.protocol.completions import parse
from anvil_mux.proxy.question import hint, read_json, resolve
from anvil_mux.proxy.reply import JSON, Reply
from anvil_mux.scheduler.status import ModelState
from anvil_mux.telemetry import healthz
from anvil_mux.telemetry.journal import Feed

OF_ONE = "/v1/models/"
"""How the paths of one model begin."""
HINT = f"{OF_ONE}NAME/load"
"""The route by which a client says which model it will ask for."""
LOOK_SECONDS = 0.25
COMMENT_SECONDS = 15.0
"""Seconds between two signs of life to those who follow."""
MOMENT_SECONDS = 0.5
"""How long a load may take to be answered with its end."""

Statuses = dict[str, dict[str, object]]
"""Model -> its status, in the words of llama.cpp."""

HostReports = Callable[[], list[dict[str, Any]]]
"""Says of each host what only the program knows: whether it is here, what it has, how fast it answers."""


Keep = Callable[[float | None], bool]
"""Keeps for the next start until when a pause lasts, in Unix time (infinite: it is resumed by hand), or that
there is none; False if that cannot be written down."""


class Operations:
    """Answers the routes by which something is done. Any thread."""

    def __init__(
        self,
        mux: Multiplexer,
        feed: Feed,
        reloads: Reloads | None,
        reports: HostReports,
        keep_pause: Keep,
    ) -> None:
        self._mux = mux
        self._feed = feed
        self._reloads = reloads
        self._reports = reports
        self._keep_pause = keep_pause
        self._statuses = _Statuses(mux)
        self._lock = threading.Lock()
        self._loads: dict[str, Future[None]] = {}
        """Model -> the load that was asked for last and has not ended; guarded by the lock."""
        # Held until the pause that was asked for last is in effect and written down.
        self._pausing = threading.Lock()

    # Models

    def load(self, reply: Reply) -> None:
        model = _model(reply)
        if "wait=true" in reply.context.request.query.split("&"):
            self._mux.load(model, lambda now: reply.stay())
        else:
            self._begin_load(model)
        _done(reply)

    def _begin_load(self, model: str) -> None:
        """Return when the load has begun, or has ended already; MuxError if it failed as quickly.

        Nobody need stay for it, so there is but one for all who ask for the same model.
        """
        with self._lock:
            load = self._loads.get(model)
            if load is None:
                load = Future()
                threading.Thread(
                    target=self._load, args=(model, load), name=f"load-{model}", daemon=True
                ).start()
                self._loads[model] = load
        wait([load], MOMENT_SECONDS)
        if load.done() and (error := load.exception()):
            raise error.with_traceback(None)  # each thread raises it without the others' frames

    def _load(self, model: str, load: Future[None]) -> None:
        try:
            self._mux.load(model)
            load.set_result(None)
        except MuxError as error:
            load.set_exception(error)
        finally:
            with self._lock:
                del self._loads[model]

    def hint(self, reply: Reply) -> None:
        """A client will ask for the model in the path."""
        model = reply.record.model = hint(self._mux, reply.context, hinted_in(reply.context.request.path))
        status = _status(self._mux.overview.model(model))
        reply.whole(202, [JSON], api.written({"model": model, "status": status}))

    def unload(self, reply: Reply) -> None:
        """Unload the model that the body names, or with ``{"all": true}`` every one."""
        body = read_json(reply.context, reply.client)
        if parse(body).get("all") is True:
            _done(reply, models=self._unload_all())
        elif self._mux.facts.unload(_model_in(body, reply)):
            _done(reply)
        else:
            _done(reply, resident=False)

    def _unload_all(self) -> list[str]:
        """Unload every model, and return those of which anything was loaded."""
        names = [model.model for model in self._mux.overview.status().models]
        found = []
        for name in names:
            with suppress(UnknownModel):  # a reload has taken it away just now
                if self._mux.facts.unload(name):
                    found.append(name)
        return found

    def pin(self, reply: Reply, *, pinned: bool) -> None:
        self._mux.tell(self._mux.scheduler.pinned, _model(reply), pinned=pinned)
        _done(reply)

    def follow(self, reply: Reply) -> None:
        """The status of every model, and each change, as events."""
        with self._feed.watching(reply.context.key, shares=reply.context.shares):
            reply.begin()
            self._follow(reply)
            reply.end()

    def _follow(self, reply: Reply) -> None:
        context = reply.context
        sent: Statuses = {}
        shown: Statuses | None = None
        speak_at = time.monotonic() + COMMENT_SECONDS
        while not self._feed.closed and context.may_go_on:
            now, statuses, changed = time.monotonic(), self._statuses.at_present(), Statuses()
            if statuses is not shown:
                shown, may_use = statuses, partial(context.access.may_use, context.key)
                changed = {model: each for model, each in statuses.items() if may_use(model)}
                changed = {model: each for model, each in changed.items() if sent.get(model) != each}
            events = b"".join(api.status_event(model, value) for model, value in changed.items())
            sent |= changed
            if events or now >= speak_at:
                speak_at = now + COMMENT_SECONDS
                reply.event(events or api.comment("nothing has changed"))
            self._feed.pause(LOOK_SECONDS)
            reply.stay()

    # Requests

    def under_way(self, reply: Reply) -> None:
        """The requests that wait or run."""
        now = time.time()
        requests = [
            {
                "id": each.request,
                "ticket": each.ticket,
                "key": each.key,
                "model": each.model,
                "backend": each.backend,
                "state": "running" if each.backend else "waiting",
                "seconds": round(now - self._mux.overview.wall(each.since), 1),
            }
            for each in self._mux.overview.under_way()
        ]
        reply.json({"requests": requests}, indent=1)

    def cancel(self, reply: Reply) -> None:
        """End one request: out of its queue, or while it runs."""
        document = parse(read_json(reply.context, reply.client))
        ticket, id = document.get("ticket"), document.get("id")
        number = ticket if type(ticket) is int else None  # which `true` is not
        if number is None and not (id and isinstance(id, str)):
            raise BadRequest("the body must name a request: its `id`, or its `ticket`", param="ticket")
        if not self._mux.cancel(number, id if isinstance(id, str) else ""):
            which = f"the id {id}" if number is None else f"the ticket {number}"
            raise NotFound(f"No request with {which} waits or runs (any more).")
        _done(reply)

    # Hosts

    def hosts(self, reply: Reply) -> None:
        known = {host.host: healthz.host_state(host) for host in self._mux.overview.status().hosts}
        hosts = [{**known.get(each["host"], {}), **each} for each in self._reports()]
        reply.json({"hosts": hosts}, indent=1)

    def drain_host(self, reply: Reply, *, drained: bool) -> None:
        self._mux.tell(self._mux.scheduler.host_drained, self._host(reply), drained=drained)
        _done(reply)

    def host_gone(self, reply: Reply) -> None:
        name = self._host(reply)
        if not any(host.host == name and host.is_lost for host in self._mux.overview.status().hosts):
            raise BadRequest(f"The host {name} is not lost: it can be drained.", param="host")
        self._mux.tell(self._mux.scheduler.host_gone, name)
        _done(reply)

    def _host(self, reply: Reply) -> str:
        """The host that the body names; ours is `local`."""
        name = parse(read_json(reply.context, reply.client)).get("host")
        if not isinstance(name, str) or not name:
            raise BadRequest("the body must name a `host`", param="host")
        known = [host.host for host in self._mux.overview.status().hosts]
        if name not in known and name != "local":
            raise NotFound(f"There is no host {name}. Known hosts: {', '.join(['local', *known])}.")
        return "" if name == "local" else name

    # The whole

    def pause(self, reply: Reply) -> None:
        seconds = _pause_seconds(reply)
        with self._pausing:
            until = None if seconds is None else time.time() + seconds
            self._mux.facts.paused(seconds)
            kept = self._keep_pause(math.inf if until is None else until)
        reply.json({"success": True, "until": until, "kept": kept})

    def resume(self, reply: Reply) -> None:
        with self._pausing:
            was_paused = self._mux.facts.resumed()
            kept = self._keep_pause(None)
        reply.json({"success": True, "paused": was_paused, "kept": kept})

    def reload(self, reply: Reply) -> None:
        assert self._reloads is not None
        change = self._reloads.reload()
        reply.json({**asdict(change), "text": str(change)})


def _done(reply: Reply, **more: object) -> None:
    reply.whole(200, [JSON], api.written({"success": True, **more}))


def hinted_in(path: str) -> str:
    """The model that a client says it will ask for, in the path of ``HINT``; "" in any other path."""
    name = path.removeprefix(OF_ONE)
    return unquote(name.removesuffix("/load")) if name.endswith("/load") else ""


def _model(reply: Reply) -> str:
    """The model that the body names."""
    request = reply.context.request
    kind = request.fields.get(b"content-type", b"")
    if kind.startswith(naming.URLENCODED):
        body = reply.client.read_body(request, naming.MAX_JSON_PARSED)
    else:
        body = read_json(reply.context, reply.client)
    return _model_in(body, reply, kind)


def _model_in(body: bytes | bytearray, reply: Reply, kind: bytes = b"") -> str:
    read = naming.in_urlencoded if naming.is_urlencoded(kind, body) else naming.model_and_stream
    name, _ = read(body)
    if name is None:
        raise BadRequest("the body must name a `model`", param="model")
    reply.record.model = resolve(reply.context, name)
    return reply.record.model


def _pause_seconds(reply: Reply) -> float | None:
    """The seconds that the body names; None: it names none, or there is no body."""
    request = reply.context.request
    if not request.length and not request.chunked:
        return None
    document = parse(read_json(reply.context, reply.client))
    if unknown := [key for key in document if key != "for"]:
        raise BadRequest(f"unknown: {unknown[0]}; a pause has nothing but `for`", param=unknown[0])
    value = document.get("for")
    if value is None:
        return None
    try:
        seconds = read_seconds(value)
    except ValueError as error:
        raise BadRequest(f"`for` {error}", param="for") from None
    if not seconds:
        raise BadRequest("`for` must be more than nothing", param="for")
    return seconds


class _Statuses:
    """The statuses of all models, for all who follow. Any thread."""

    def __init__(self, mux: Multiplexer) -> None:
        self._mux = mux
        self._lock = threading.Lock()
        # The lock guards what follows.
        self._read_at = -math.inf
        self._statuses: Statuses = {}

    def at_present(self) -> Statuses:
        """The statuses now or shortly before, the same object as long as nothing changes."""
        with self._lock:
            now = time.monotonic()
            if now - self._read_at >= LOOK_SECONDS:
                self._read_at = now
                models = self._mux.overview.status().models
                found = {each.model: _status(each) for each in models}
                if found != self._statuses:
                    self._statuses = found
            return self._statuses


def _status(model: ModelState) -> dict[str, object]:
    return api.model_status(model.offered_state, failed=bool(model.last_error))


class Reloads:
    """Reloads of the configuration, one after the other: asked for, refused or in effect. Any thread.

    ``take`` puts a configuration into effect, or raises ConfigError; ``failed`` is told why.
    """

    def __init__(
        self,
        read: Callable[[], Config],
        take: Callable[[Config], Change],
        failed: Callable[[str], object],
        wall: Callable[[], float],
        around: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """``around`` is entered for as long as a reload takes."""
        self._read = read
        self._take = take
        self._failed = failed
        self._wall = wall
        self._around = around
        # Held through a whole reload. Whoever only looks reads ``_state``, which is replaced as a whole.
        self._lock = threading.Lock()
        self._state = _reload_state(0, None, "")
        self._closed = False

    def reload(self) -> Change:
        """Return what is different now. ConfigError: nothing is."""
        with self._lock:
            if self._closed:
                raise Draining("anvil-mux is shutting down.")
            with self._around():
                return self._try()

    def _try(self) -> Change:
        state = self._state
        try:
            change = self._take(self._read())
        except ConfigError as error:
            self._state = {**state, "failed_at": self._wall(), "problems": [*error.problems]}
            more = f" (and {len(error.problems) - 1} more)" if len(error.problems) > 1 else ""
            self._failed(error.problems[0] + more)
            raise
        self._state = _reload_state(state["count"] + 1, self._wall(), str(change))
        return change

    def as_json(self) -> dict[str, Any]:
        """Return how often, the last reload, and what was wrong with a later try; for /healthz."""
        return self._state

    def close(self) -> None:
        """Refuse every reload from now on; return when none is under way."""
        with self._lock:
            self._closed = True


def _reload_state(count: int, at: float | None, changed: str) -> dict[str, Any]:
    return {"count": count, "at": at, "changed": changed, "failed_at": None, "problems": []}
