"""Operations by hand: on models, on hosts and on the whole.

Models are loaded, unloaded, pinned and followed, a request is cancelled, the files are read again. Loading
and following is llama.cpp's router API, as Open WebUI and others use it; the rest is ours alone. ``POST
/models/load`` says that the load has begun, as llama.cpp does; a load that fails or ends within a moment says
that instead, and ``?wait=true`` waits for the end of any. A load that was asked for goes on when the client
leaves; all who ask for the same model meanwhile share it. ``GET /models/sse`` tells every model's status, and
then each change of it, until the client leaves or the program ends; it looks a few times a second, once for
all who follow, so no request pays for it.

``POST /hosts/drain`` empties a host and loads nothing there until ``/hosts/undrain``; ``/hosts/gone`` says
that nothing runs any more on a host that is lost.

``POST /pause`` has all models drained and stopped, ``POST /resume`` ends that. What is asked for is in effect
at once, and is kept for the next start of anvil-mux. ``for`` in the body of a pause is how long it lasts
(seconds, or text such as 2h); without it the pause lasts until it is resumed.
"""

from __future__ import annotations

import json
import math
import select
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from anvil_mux.config.settings import read_seconds
from anvil_mux.errors import BadRequest, ClientGone, MuxError, NotFound, UnknownModel
from anvil_mux.multiplexer.multiplexer import Multiplexer
from anvil_mux.protocol import api, naming
from anvil_mux.protocol.completions import parse
from anvil_mux.proxy.asked import Asked
from anvil_mux.proxy.probes import Answer
from anvil_mux.proxy.questions import read_json, resolve
from anvil_mux.proxy.reloads import Reloads, as_json
from anvil_mux.proxy.reply import JSON, Reply
from anvil_mux.scheduler.status import ModelState
from anvil_mux.telemetry import healthz
from anvil_mux.telemetry.accesslog import Served
from anvil_mux.telemetry.feed import Feed

LOOK_SECONDS = 0.25
COMMENT_SECONDS = 15.0
"""Seconds between two signs of life to those who follow."""
MOMENT_SECONDS = 0.5
"""How long a load may take to be answered with its end."""

DONE = b'{"success":true}'

Statuses = dict[str, dict[str, object]]
"""Model -> its status, in the words of llama.cpp."""


class Operations:
    """Answers the routes by which something is done. Any thread."""

    def __init__(
        self, mux: Multiplexer, is_ending: Callable[[], bool], reloads: Reloads | None, feed: Feed
    ) -> None:
        self._mux = mux
        self._feed = feed
        self._statuses = _Statuses(mux)
        self._is_ending = is_ending
        self._reloads = reloads
        self._lock = threading.Lock()
        self._loads: dict[str, _SharedLoad] = {}
        """Model -> the load that was asked for last and has not ended; guarded by the lock."""

    def load(self, asked: Asked, reply: Reply, record: Served) -> None:
        model = _named(asked, reply, record)
        if "wait=true" in asked.request.query.split("&"):
            self._mux.load(model, lambda now: reply.stay())
        else:
            self._begin_load(model)
        reply.whole(200, [JSON], DONE)

    def unload(self, asked: Asked, reply: Reply, record: Served) -> None:
        """Unload the model that the body names, or with ``{"all": true}`` every one."""
        body = read_json(asked, reply.client)
        if parse(body).get("all") is True:
            reply.whole(200, [JSON], json.dumps({"success": True, "models": self._unload_all()}).encode())
            return
        told = self._mux.facts.unload(_model_in(body, asked, record))
        reply.whole(200, [JSON], DONE if told else b'{"success":true,"resident":false}')

    def _unload_all(self) -> list[str]:
        """Unload every model, and return those of which anything was loaded."""
        names = [model.model for model in self._mux.overview.status().models]
        found = []
        for name in names:
            with suppress(UnknownModel):  # a reload has taken it away just now
                if self._mux.facts.unload(name):
                    found.append(name)
        return found

    def pin(self, asked: Asked, reply: Reply, record: Served) -> None:
        self._mux.tell(self._mux.scheduler.pinned, _named(asked, reply, record), pinned=True)
        reply.whole(200, [JSON], DONE)

    def unpin(self, asked: Asked, reply: Reply, record: Served) -> None:
        self._mux.tell(self._mux.scheduler.pinned, _named(asked, reply, record), pinned=False)
        reply.whole(200, [JSON], DONE)

    def under_way(self, asked: Asked) -> Answer:
        """The requests that wait or run."""
        now = time.time()
        told = [
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
        return 200, JSON, json.dumps({"requests": told}, indent=1).encode("ascii") + b"\n"

    def cancel(self, asked: Asked, reply: Reply, record: Served) -> None:
        """End one request: out of its queue, or while it runs."""
        said = parse(read_json(asked, reply.client))
        ticket, id = said.get("ticket"), said.get("id")
        number = ticket if type(ticket) is int else None  # which `true` is not
        if number is None and not (id and isinstance(id, str)):
            raise BadRequest("the body must name a request: its `id`, or its `ticket`", param="ticket")
        if not self._mux.cancel(number, id if isinstance(id, str) else ""):
            which = f"the id {id}" if number is None else f"the ticket {number}"
            raise NotFound(f"No request with {which} waits or runs (any more).")
        reply.whole(200, [JSON], DONE)

    def reload(self, asked: Asked, reply: Reply, record: Served) -> None:
        assert self._reloads is not None
        told = json.dumps(as_json(self._reloads.reload())).encode("ascii")
        reply.whole(200, [JSON, (b"Cache-Control", b"no-store")], told + b"\n")

    def follow(self, asked: Asked, reply: Reply) -> None:
        """The status of every model, and each change, as events."""
        with self._feed.watching(asked.key, shares=asked.shares):
            reply.begin()
            self._follow(asked, reply)
            reply.end()

    def _follow(self, asked: Asked, reply: Reply) -> None:
        told: Statuses = {}
        shown: Statuses | None = None
        speak_at = time.monotonic() + COMMENT_SECONDS
        left = select.poll()
        left.register(reply.client.socket, select.POLLRDHUP)
        while not self._is_ending() and asked.may_go_on:
            now, statuses, changed = time.monotonic(), self._statuses.at_present(), Statuses()
            if statuses is not shown:
                shown, may_use = statuses, partial(asked.access.may_use, asked.key)
                changed = {model: each for model, each in statuses.items() if may_use(model)}
                changed = {model: each for model, each in changed.items() if told.get(model) != each}
            events = b"".join(api.status_event(model, value) for model, value in changed.items())
            told |= changed
            if events or now >= speak_at:
                speak_at = now + COMMENT_SECONDS
                reply.event(events or api.comment("nothing has changed"))
            if left.poll(LOOK_SECONDS * 1000):
                raise ClientGone("The client closed its connection.")

    def _begin_load(self, model: str) -> None:
        """Return when the load has begun, or has ended already; MuxError if it failed as quickly.

        Nobody need stay for it, so there is but one for all who ask for the same model.
        """
        with self._lock:
            load = self._loads.get(model)
            if load is None:
                load = _SharedLoad()
                threading.Thread(
                    target=self._load, args=(model, load), name=f"load-{model}", daemon=True
                ).start()
                self._loads[model] = load
        if load.over.wait(MOMENT_SECONDS) and load.error:
            raise load.error.with_traceback(None)  # each thread raises it without the others' frames

    def _load(self, model: str, load: _SharedLoad) -> None:
        try:
            self._mux.load(model)
        except MuxError as error:
            load.error = error
        finally:
            with self._lock:
                del self._loads[model]
            load.over.set()


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


class _SharedLoad:
    """A load that goes on whoever leaves, and what came of it."""

    def __init__(self) -> None:
        self.over = threading.Event()
        self.error: MuxError | None = None


def _named(asked: Asked, reply: Reply, record: Served) -> str:
    """The model that the body names."""
    kind = asked.request.fields.get(b"content-type", b"")
    if kind.startswith(naming.URLENCODED):
        body = reply.client.read_body(asked.request, naming.MAX_JSON_PARSED)
        if naming.is_urlencoded(kind, body):
            return _model_of(naming.in_urlencoded(body)[0], asked, record)
        return _model_in(body, asked, record)
    return _model_in(read_json(asked, reply.client), asked, record)


def _model_in(body: bytes | bytearray, asked: Asked, record: Served) -> str:
    return _model_of(naming.model_and_stream(body)[0], asked, record)


def _model_of(name: str | None, asked: Asked, record: Served) -> str:
    if name is None:
        raise BadRequest("the body must name a `model`", param="model")
    record.model = resolve(asked, name)
    return record.model


HostReports = Callable[[], list[dict[str, Any]]]
"""Says of each host what only the program knows: whether it is here, what it has, how fast it answers."""


class HostRoutes:
    """Answers the routes about hosts. Any thread."""

    def __init__(self, mux: Multiplexer, reports: HostReports) -> None:
        self._mux = mux
        self._reports = reports

    def hosts(self, _: Asked) -> Answer:
        known = {host.host: healthz.host_state(host) for host in self._mux.overview.status().hosts}
        told = [{**known.get(each["host"], {}), **each} for each in self._reports()]
        return 200, JSON, json.dumps({"hosts": told}, indent=1).encode("ascii") + b"\n"

    def drain(self, asked: Asked, reply: Reply, record: Served) -> None:
        self._mux.tell(self._mux.scheduler.host_drained, self._named(asked, reply), drained=True)
        reply.whole(200, [JSON], b'{"success":true}')

    def undrain(self, asked: Asked, reply: Reply, record: Served) -> None:
        self._mux.tell(self._mux.scheduler.host_drained, self._named(asked, reply), drained=False)
        reply.whole(200, [JSON], b'{"success":true}')

    def gone(self, asked: Asked, reply: Reply, record: Served) -> None:
        name = self._named(asked, reply)
        if not any(host.host == name and host.is_lost for host in self._mux.overview.status().hosts):
            raise BadRequest(f"The host {name} is not lost: it can be drained.", param="host")
        self._mux.tell(self._mux.scheduler.host_gone, name)
        reply.whole(200, [JSON], b'{"success":true}')

    def _named(self, asked: Asked, reply: Reply) -> str:
        """The host that the body names; ours is `local`."""
        name = parse(read_json(asked, reply.client)).get("host")
        if not isinstance(name, str) or not name:
            raise BadRequest("the body must name a `host`", param="host")
        known = [host.host for host in self._mux.overview.status().hosts]
        if name not in known and name != "local":
            raise NotFound(f"There is no host {name}. Known hosts: {', '.join(['local', *known])}.")
        return "" if name == "local" else name


class KeptPause(NamedTuple):
    """A pause, as the next start of anvil-mux finds it."""

    until: float | None
    """Unix time of its end; None: it is resumed by hand."""


Keep = Callable[[KeptPause | None], bool]
"""Keeps a pause for the next start, or that there is none; False if that cannot be written down."""


class Pausing:
    """Answers the routes of pauses. Any thread."""

    def __init__(self, mux: Multiplexer, keep: Keep) -> None:
        self._mux = mux
        self._keep = keep
        # Held until what was asked for last is in effect and written down.
        self._lock = threading.Lock()

    def pause(self, asked: Asked, reply: Reply, record: Served) -> None:
        seconds = _how_long(asked, reply)
        with self._lock:
            until = None if seconds is None else time.time() + seconds
            self._mux.facts.paused(seconds)
            kept = self._keep(KeptPause(until))
        _tell(reply, success=True, until=until, kept=kept)

    def resume(self, asked: Asked, reply: Reply, record: Served) -> None:
        with self._lock:
            was_paused = self._mux.facts.resumed()
            kept = self._keep(None)
        _tell(reply, success=True, paused=was_paused, kept=kept)


def _how_long(asked: Asked, reply: Reply) -> float | None:
    """The seconds that the body names; None: it names none, or there is no body."""
    if not asked.request.length and not asked.request.chunked:
        return None
    told = parse(read_json(asked, reply.client))
    if unknown := [key for key in told if key != "for"]:
        raise BadRequest(f"unknown: {unknown[0]}; a pause has nothing but `for`", param=unknown[0])
    value = told.get("for")
    if value is None:
        return None
    try:
        seconds = read_seconds(value)
    except ValueError as error:
        raise BadRequest(f"`for` {error}", param="for") from None
    if not seconds:
        raise BadRequest("`for` must be more than nothing", param="for")
    return seconds


def _tell(reply: Reply, **told: object) -> None:
    reply.whole(200, [JSON, (b"Cache-Control", b"no-store")], json.dumps(told).encode("ascii") + b"\n")
