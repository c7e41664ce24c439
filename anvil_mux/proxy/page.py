"""What those get who run anvil-mux: the page, the stream of what happens, the lines, the engines' logs.

``GET /events`` is a stream of server-sent events: first a ``snapshot``, then an ``event`` for each change,
the ``requests`` that ended, and the ``state`` when it has changed. Each watcher is served in the thread of
its own connection from a place in the feed's rings (feed.py), so one that reads slowly holds up only itself
and is told how much it ``lost``. While nothing happens nothing is sent but a comment line now and then.

Nothing here waits for an engine or for Docker but ``GET /logs``, in the thread of whoever asks.
"""

from __future__ import annotations

import json
import re
import time
from base64 import b64encode
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from anvil_mux.errors import BadRequest, NotFound
from anvil_mux.multiplexer import Multiplexer
from anvil_mux.protocol import http1
from anvil_mux.protocol.completions import finite
from anvil_mux.protocol.http1 import Field
from anvil_mux.proxy.reply import JSON, Call
from anvil_mux.routing.routing import Work
from anvil_mux.scheduler.events import Event
from anvil_mux.telemetry.accesslog import Served
from anvil_mux.telemetry.feed import Feed, Place
from anvil_mux.telemetry.journal import told

LOOK_SECONDS = 1.0
"""How often a watcher looks at the state and at its client while nothing happens."""
PAUSE_SECONDS = 0.25
"""Between two batches: many events a second are told in groups."""
BEAT_SECONDS = 15.0
WAITERS = 50
"""Of each line that are shown."""
LOG_LINES = 200
MAX_LOG_LINES = 5000

EVENT_HEADERS = [
    (b"Content-Type", b"text/event-stream"),
    (b"Cache-Control", b"no-cache"),
    (b"X-Accel-Buffering", b"no"),
]

Picture = dict[str, Any]


class Page:
    """Answers the routes of those who look and act. Any thread.

    ``state``: what ``/healthz`` tells. ``tail(backend, lines)``: the last lines of an engine's log.
    """

    def __init__(
        self,
        mux: Multiplexer,
        feed: Feed,
        *,
        state: Callable[[], Picture],
        tail: Callable[[str, int], Iterable[str]],
    ) -> None:
        self._mux = mux
        self._feed = feed
        self._state = state
        self._tail = tail

    # The page

    def page(self, call: Call) -> None:
        """The status page: one file that asks for nothing from elsewhere, and may not."""
        headers, body = _page()
        call.send_own(200, headers, body)

    # The stream

    def events(self, call: Call) -> None:
        with self._feed.watching():
            call.keep = call.keep and call.chunked
            call.began, call.status = True, 200
            headers = [*EVENT_HEADERS, *call.own_headers]
            call.send(http1.stream_head(200, headers, chunked=call.chunked, connection=call.connection))
            self._watch(call)
            if call.chunked:
                call.send(http1.LAST_CHUNK)

    def _watch(self, call: Call) -> None:
        news, shown = self._feed.news(Place()), self._picture()
        events = [self._event(event) for event in news.events]
        requests = [_request(served) for served in news.requests]
        call.send_event(_message("snapshot", {**shown, "events": events, "requests": requests}))
        beat = time.monotonic()
        while not self._feed.closed:
            news = self._feed.news(news.place, LOOK_SECONDS)
            call.stay()
            messages = [_message("lost", {"events": news.missed})] if news.missed else []
            messages += [_message("event", self._event(event)) for event in news.events]
            if news.requests:
                requests = [_request(served) for served in news.requests]
                messages.append(_message("requests", {"requests": requests}))
            picture = self._picture()
            if _lasting(picture) != _lasting(shown):
                messages.append(_message("state", picture))
                shown = picture
            if not messages and time.monotonic() - beat > BEAT_SECONDS:
                messages.append(b": nothing new\n\n")
            if messages:
                beat = time.monotonic()
                call.send_event(b"".join(messages))
                self._feed.pause(PAUSE_SECONDS)

    def _picture(self) -> Picture:
        """What is so at this moment."""
        state = self._state()
        waiters = self._mux.waiters(WAITERS) if state["waiting"] else []
        lines = [{"ticket": w.ticket, "model": w.model, "since": self._at(w.since)} for w in waiters]
        return {"now": round(time.time(), 3), **state, "lines": lines}

    def _event(self, event: Event) -> Picture:
        return told(event, self._at(event.at))

    def _at(self, moment: float) -> float:
        return round(self._mux.wall(moment), 2)

    # Logs

    def logs(self, call: Call) -> None:
        """Of the ``backend`` that the query names, which may stand in the model's place; else of any."""
        name, query = self._named(call)
        lines = query.get("lines", [str(LOG_LINES)])[-1]
        if not lines.isdigit() or not 0 < int(lines) <= MAX_LOG_LINES:
            raise BadRequest(f"`lines` is a number from 1 to {MAX_LOG_LINES}", param="lines")
        models = {each.model: each for each in self._mux.status().models}
        services = {each.backend: model for model in models.values() for each in model.backends}
        own = name in services and name not in models
        model = services[name] if own else models[self._mux.resolve(name)]
        backend = query.get("backend", [name if own else model.backend])[-1]
        if services.get(backend) is not model:
            raise BadRequest(f"{model.model} has no backend {backend}", param="backend")
        told = {
            "model": model.model,
            "backend": backend,
            "backends": [each.backend for each in model.backends],
        }
        _answer(call, {**told, "lines": list(self._tail(backend, int(lines)))})

    def _named(self, call: Call) -> tuple[str, dict[str, list[str]]]:
        """What the query gives as the model, and all of the query."""
        query = parse_qs(call.request.query)
        if "model" not in query:
            raise BadRequest(f"say of which model: {call.request.path}?model=NAME", param="model")
        return query["model"][-1], query

    def _asked_for(self, call: Call) -> tuple[str, dict[str, list[str]]]:
        """The model that the query names, and all of the query."""
        name, query = self._named(call)
        return self._mux.resolve(name), query

    # What a request would wait for

    def why(self, call: Call) -> None:
        model, query = self._asked_for(call)
        tokens = query.get("tokens", ["0"])[-1]
        if not tokens.isdecimal():
            raise BadRequest("tokens must be a whole number", param="tokens")
        found = self._mux.wait_estimate(model)
        stages = self._mux.explain(model, Work(tokens=int(tokens)), staged=True)
        if found.verdict == "served" and not all(
            any(row["chosen"] for row in stage) for stage in stages.values()
        ):
            found = found.refused("the routing policy lets none of its replicas take it.")
        told = {
            key: round(value, 1) if isinstance(value, float) else value
            for key, value in found._asdict().items()
        }
        _answer(call, {**told, "sentence": found.sentence, "stages": finite(stages)})

    # Acting

    def cancel(self, call: Call, asked: Mapping[str, object]) -> None:
        """Takes one request out of its line."""
        ticket = asked.get("ticket")
        if not isinstance(ticket, int):
            raise BadRequest("the body must name a `ticket`, by its number", param="ticket")
        if not self._mux.cancel(ticket):
            raise NotFound(f"No request with the ticket {ticket} waits (any more).")
        call.send_own(200, [JSON], b'{"success":true}')


@cache
def _page() -> tuple[list[Field], bytes]:
    body = Path(__file__).with_name("page.html").read_bytes()
    script = body.partition(b"<script>")[2].partition(b"</script>")[0]
    allowed = b64encode(sha256(script).digest())
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


def _answer(call: Call, told: Picture) -> None:
    headers = [JSON, (b"Cache-Control", b"no-store")]
    call.send_own(200, headers, json.dumps(told).encode("ascii") + b"\n")


def _message(kind: str, data: Picture) -> bytes:
    text = json.dumps(data, separators=(",", ":"))
    return f"event: {kind}\ndata: {text}\n\n".encode("ascii")


def _request(served: Served) -> Picture:
    return {
        "ended": round(served.ended, 3),
        "id": served.request_id,
        "client": served.client,
        "path": served.path,
        "model": served.model,
        "status": served.status,
        "code": served.code,
        "stream": served.stream,
        "waited": round(served.waited, 3),
        "first_byte": round(served.first_byte, 3),
        "seconds": round(served.seconds, 3),
        "bytes": served.sent,
        "tokens": served.tokens or None,
    }


_FLEETING = re.compile(r"now|since|(age|uptime|state|idle|unload|oldest_wait|retry)_seconds")


def _lasting(picture: Any) -> Any:
    """A picture without what changes while nothing happens."""
    if isinstance(picture, dict):
        return {key: _lasting(value) for key, value in picture.items() if not _FLEETING.fullmatch(key)}
    return [_lasting(each) for each in picture] if isinstance(picture, list) else picture
