"""The status page, and the stream of what happens that it follows.

``GET /events`` is a stream of server-sent events: first a ``snapshot``, then an ``event`` for each change,
the ``requests`` that ended, and the ``state`` when it has changed. Each watcher is served in the thread of
its own connection from a place in the feed's rings (journal.py), so one that reads slowly holds up only
itself and is told how much it ``lost``. The state is rendered once for all who look within a moment. While
nothing happens nothing is sent but a comment line now and then. The snapshot says what the watcher's API key
may do, if it shows one.

The page is one file, put together from the parts in ``web/``: its HTML, its style, and its script, which
reads from what is general (``elements``, ``words``) by what it shows (``state``, ``gpus``, the ``past``) and
does (the ``playground``, ``acting``) to what it lives by (the ``stream``).

The terms that the page explains have their meanings from the glossary, their one home: ``glossary.md`` beside
this module is a link to the one in docs/, whose tables have a term, or several with commas between them, in
their first column and the meaning in the second. A state of a backend means what the row says that names it.
"""

from __future__ import annotations

import json
import re
import time
from base64 import b64encode
from collections.abc import Callable, Mapping
from functools import cache
from hashlib import sha256
from html import escape
from pathlib import Path
from threading import Lock
from types import MappingProxyType
from typing import Any

from anvil_mux.multiplexer.multiplexer import Multiplexer
from anvil_mux.protocol.http1 import Field
from anvil_mux.proxy.access import RequestContext
from anvil_mux.proxy.reply import Reply
from anvil_mux.scheduler.events import Event
from anvil_mux.telemetry.accesslog import Served
from anvil_mux.telemetry.journal import Feed, FeedPosition, event_as_json

LOOK_SECONDS = 1.0
"""How often a watcher looks at the state and at its client while nothing happens."""
PAUSE_SECONDS = 0.25
"""Seconds between two batches: many events a second are told in groups."""
BEAT_SECONDS = 15.0
SENSORS_SECONDS = 5.0
"""Seconds between two tellings of what GPUs measure, which differs at each look."""
WAITERS = 50
"""The most waiting requests that are shown of each queue."""
ENDED = (
    *("ended", "id", "client", "path", "status", "code", "stream", "waited", "first_byte", "seconds"),
    "bytes",
)
"""The fields that are shown of a request that has ended, as they are in its record."""

FOLDER = Path(__file__).with_name("web")
SCRIPTS = ("elements", "words", "state", "gpus", "past", "playground", "acting", "stream")
"""The parts of the page's script, in order: each uses at once only what stands before it."""
STYLE, SCRIPT, TERMS = "/* style */", "/* script */", "<!-- terms -->"
"""The places in the page for its style, its script and what its terms mean."""

Picture = dict[str, Any]


class Page:
    """Serves the page and its events. Any thread. ``state``: what ``/healthz`` tells, in brief."""

    def __init__(self, mux: Multiplexer, feed: Feed, state: Callable[[], Picture]) -> None:
        self._mux = mux
        self._feed = feed
        self._state = state
        self._lock = Lock()
        self._shown: _Rendering | None = None
        """The last one, for all who look on within a moment; guarded by the lock."""

    def page(self, reply: Reply) -> None:
        """The status page: one file that asks for nothing from elsewhere, and may not."""
        headers, body = _page()
        reply.whole(200, headers, body)

    def events(self, reply: Reply) -> None:
        with self._feed.watching(reply.context.key, shares=reply.context.shares):
            reply.begin()
            self._watch(reply, _rights(reply.context))
            reply.end()

    def _watch(self, reply: Reply, rights: Picture) -> None:
        news = self._feed.news(FeedPosition())
        shown = self._rendering(news.place)
        events = [self._event(event) for event in news.events]
        requests = [_request(served) for served in news.requests]
        reply.event(_message("snapshot", {**shown.picture, **rights, "events": events, "requests": requests}))
        beat = measured = time.monotonic()
        while not self._feed.closed and reply.context.may_go_on:
            news = self._feed.news(news.place, LOOK_SECONDS)
            reply.stay()
            messages = [_message("lost", {"events": news.missed})] if news.missed else []
            messages += [_message("event", self._event(event)) for event in news.events]
            if news.requests:
                requests = [_request(served) for served in news.requests]
                messages.append(_message("requests", {"requests": requests}))
            now = self._rendering(news.place)
            is_due = time.monotonic() - measured > SENSORS_SECONDS and now.sensors != shown.sensors
            if is_due or now.lasting != shown.lasting:
                messages.append(now.message)
                shown, measured = now, time.monotonic()
            if not messages and time.monotonic() - beat > BEAT_SECONDS:
                messages.append(b": nothing new\n\n")
            if messages:
                beat = time.monotonic()
                reply.event(b"".join(messages))
                self._feed.pause(PAUSE_SECONDS)

    def _rendering(self, place: FeedPosition) -> _Rendering:
        """The state after the events up to ``place``, the same for all who ask within a moment."""
        with self._lock:
            found = self._shown
            if found is None or found.place != place or time.monotonic() - found.at >= PAUSE_SECONDS:
                found = self._shown = _Rendering(place, self._picture())
            return found

    def _picture(self) -> Picture:
        """The state at this moment."""
        state = self._state()
        waiters = self._mux.overview.waiters(WAITERS) if state["waiting"] else []
        queued = [{"ticket": w.ticket, "model": w.model, "since": self._at(w.since)} for w in waiters]
        return {"now": round(time.time(), 3), **state, "queued": queued}

    def _event(self, event: Event) -> Picture:
        """An event for those who look on, with the host of its backend if that is not our own."""
        backend = self._mux.overview.backend(event.backend)
        host = {"host": backend.host} if backend and backend.host else {}
        return {**event_as_json(event, self._at(event.at)), **host}

    def _at(self, moment: float) -> float:
        return round(self._mux.overview.wall(moment), 2)


class _Rendering:
    """The state at one moment, as it is compared and told."""

    def __init__(self, place: FeedPosition, picture: Picture) -> None:
        self.place = place
        self.picture = picture
        self.at = time.monotonic()
        self.sensors = {gpu: about["sensors"] for gpu, about in picture["gpus"].items()}
        """GPU -> the figures that it measures of itself."""
        self.lasting = _lasting(picture)
        self.message = _message("state", picture)


@cache
def _page() -> tuple[list[Field], bytes]:
    page, style = (FOLDER.joinpath(f"page.{kind}").read_text("utf-8") for kind in ("html", "css"))
    script = "\n".join(FOLDER.joinpath(f"{name}.js").read_text("utf-8") for name in SCRIPTS)
    body = page.replace(TERMS, _explained(page)).replace(STYLE, style).replace(SCRIPT, script).encode()
    allowed = b64encode(sha256(body.partition(b"<script>")[2].partition(b"</script>")[0]).digest())
    policy = (
        b"default-src 'none'; script-src 'sha256-%b'; style-src 'unsafe-inline'; img-src data:; "
        b"connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'" % allowed
    )
    headers = [
        (b"Content-Type", b"text/html; charset=utf-8"),
        (b"Content-Security-Policy", policy),
        (b"Cache-Control", b"no-cache"),
        (b"X-Content-Type-Options", b"nosniff"),
        (b"Referrer-Policy", b"no-referrer"),
    ]
    return headers, body


def _explained(page: str) -> str:
    """The terms of a page, as it names them in ``data-term`` and ``data-terms``, with their explanations."""
    named = re.findall(r'data-term="([^"$]+)"', page)
    named += [term for several in re.findall(r'data-terms="([^"]+)"', page) for term in several.split(", ")]
    meanings = terms()
    return "".join(f"<dt>{escape(term)}<dd>{escape(meanings[term])}" for term in dict.fromkeys(named))


def _rights(context: RequestContext) -> Picture:
    """The rights of a watcher's key, by which its page offers things; empty where none is asked for."""
    key = context.key
    if key is None:
        return {}
    models = None if key.models is None else context.access.usable(key)
    pages = context.access.config.pages_port is not None
    return {"key": {"name": key.name, "admin": key.admin, "models": models, "pages": pages}}


def _message(kind: str, data: Picture) -> bytes:
    text = json.dumps(data, separators=(",", ":"))
    return f"event: {kind}\ndata: {text}\n\n".encode("ascii")


def _request(served: Served) -> Picture:
    fields = served.as_json()
    return {
        **{name: fields[name] for name in ENDED},
        "model": served.preset or served.model,
        "tokens": served.tokens or None,
        "fallback_of": served.fallback_of or None,
        "fallback_cause": served.fallback_cause or None,
    }


_FLEETING = re.compile(
    r"now|since|sensors|(age|uptime|state|idle|unload|oldest_wait|retry|run|home|lost)_seconds"
)


def _lasting(picture: Any) -> Any:
    """A picture without what changes while nothing happens."""
    if isinstance(picture, dict):
        return {key: _lasting(value) for key, value in picture.items() if not _FLEETING.fullmatch(key)}
    return [_lasting(each) for each in picture] if isinstance(picture, list) else picture


_ROW = re.compile(r"^\| (?P<terms>[^|]+) \| (?P<meaning>[^|]+) \|(?P<names>.*)$", re.M)
_STATES = re.compile(r"state ((?:`\w+`(?:, )?)+)")


@cache
def terms() -> Mapping[str, str]:
    """The meaning of each term of the glossary, in plain text."""
    found: dict[str, str] = {}
    for row in _ROW.finditer(Path(__file__).with_name("glossary.md").read_text("utf-8")):
        meaning = row["meaning"].replace("`", "")
        states = [state for several in _STATES.findall(row["names"]) for state in re.findall(r"\w+", several)]
        for term in [*row["terms"].split(", "), *states]:
            found.setdefault(term, meaning)
    return MappingProxyType(found)
