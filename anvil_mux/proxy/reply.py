"""One request and what is known of its answer so far; it becomes a line in the access log.

Everything that a client is sent goes through its ``Call``, which knows whether a head was sent already: an
error is then an event in the stream and a cut. ``Waiting`` is what a call does in the line of its model.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from anvil_mux.errors import ClientGone, ModelLoading, MuxError, Overloaded
from anvil_mux.multiplexer import Multiplexer
from anvil_mux.protocol import api, http1
from anvil_mux.protocol.completions import Translation
from anvil_mux.protocol.http1 import Field
from anvil_mux.proxy.client import Client
from anvil_mux.proxy.sockets import has_left
from anvil_mux.scheduler.steps import NO_WORK, Crash
from anvil_mux.telemetry.accesslog import Served

JSON = (b"Content-Type", b"application/json")
UNBUFFERED = [(b"Cache-Control", b"no-cache"), (b"X-Accel-Buffering", b"no")]
READABLE = [(b"Access-Control-Expose-Headers", b"*"), (b"Vary", b"Origin")]
"""With an origin, what lets its pages read an answer."""
FOREVER = float("inf")


@dataclass(frozen=True, slots=True)
class Patience:
    """How a request waits for its model; seconds."""

    grace: float = 5.0
    """Before a stream is begun: a quick wake-up or failure keeps its true status."""
    comment_every: float = 10.0
    chunk_every: float = 60.0
    silence: float = 240.0
    """The longest that a request without a stream is left without an answer (Node's clients end at 300)."""
    margin: float = 5.0
    """How long before the client's own limit it is answered."""


class Call:
    """One request, and what is known of its answer so far. Used by one thread."""

    __slots__ = (
        "answered",
        "api",
        "backend",
        "began",
        "client",
        "code",
        "crashes",
        "events",
        "first_byte",
        "foreseen",
        "keep",
        "model",
        "request",
        "request_id",
        "route",
        "routed",
        "said",
        "sent",
        "since",
        "status",
        "stream",
        "translation",
        "waited",
        "waiting",
        "work",
    )

    def __init__(self, client: Client, request: http1.Request, request_id: str, keep: bool) -> None:
        self.client = client
        self.request = request
        self.request_id = request_id
        self.keep = keep
        """Whether the connection can be used again."""
        self.since = time.monotonic()
        self.api = "openai"
        self.route = api.NO_ROUTE
        self.model = self.backend = self.code = ""
        self.crashes: tuple[Crash, ...] = ()
        """Ends of engines that it was sent to, and was there at."""
        self.status = self.sent = self.events = 0
        self.said = b""
        """The end of the answer, where its engine says what it took."""
        self.waited = self.first_byte = 0.0
        self.foreseen: float | None = None
        """The part of its input that its replica was thought to have cached."""
        self.stream = False
        """The client asked for a stream into which comments may be written."""
        self.began = False
        """The head of the stream was sent before an engine answered."""
        self.answered = False
        """The client was sent something of what an engine answered."""
        self.work = NO_WORK
        self.routed = ""
        """Which of several replicas answers, and why."""
        self.waiting: Waiting | None = None
        """What it does in the line of its model, once it has waited for a moment."""
        self.translation: Translation | None = None
        """What its engine is asked instead, if that does not speak the client's API."""

    @property
    def chunked(self) -> bool:
        """The client understands chunks."""
        return self.request.version == (1, 1)

    @property
    def path(self) -> str:
        """What its engine is asked for."""
        return self.translation.path if self.translation else self.route.path

    @property
    def connection(self) -> bytes | None:
        """The Connection header of the answer, where one is needed."""
        if not self.keep:
            return b"close"
        return None if self.request.version == (1, 1) else b"keep-alive"

    @property
    def own_headers(self) -> list[Field]:
        """What every answer carries."""
        value = self.request_id.encode("ascii")
        headers = [(b"X-Request-ID", value)]
        if self.api == "anthropic":
            headers.append((b"request-id", value))
        if self.routed:
            headers.append((b"X-Anvil-Backend", self.routed.encode("ascii", "replace")))
        if self.request.reader:
            headers += [(b"Access-Control-Allow-Origin", self.request.reader), *READABLE]
        return headers

    def send(self, data: bytes) -> None:
        self.client.send(data)
        self.sent += len(data)

    def send_own(self, status: int, headers: list[Field], body: bytes) -> None:
        """Sends an answer that no engine made."""
        self.status = status
        connection = self.connection
        if connection is not None:
            headers = [*headers, (b"Connection", connection)]
        head_only = self.request.method == "HEAD"
        self.send(http1.response(status, [*headers, *self.own_headers], body, head_only=head_only))

    def refuse(self, error: MuxError, headers: list[Field]) -> None:
        """Answers with ``error`` in the form that still fits; the client may be gone."""
        self.code = error.code
        self.keep = self.keep and self.client.can_resume()
        try:
            if self.began:
                self.break_off(error, last=b"")
            else:
                headers = [JSON, *api.error_headers(error), *headers]
                self.send_own(error.status, headers, api.error_body(self.api, error, self.request_id))
        except ClientGone:
            self.keep = False

    def break_off(self, error: MuxError, *, last: bytes) -> None:
        """Ends a stream of events, of which ``last`` was sent last, with an error event and a cut."""
        self.keep, self.code = False, error.code
        event = api.error_event(self.api, self.route.beat, error, self.request_id)
        self.send_event(event if _ends_event(last) else b"\n\n" + event)

    def send_event(self, data: bytes) -> None:
        """Writes into a stream that has begun."""
        if data:
            self.send(http1.chunk(data) if self.chunked else data)

    def begin(self) -> None:
        """Sends the head of a stream of our own; from now on failures are told within it."""
        self.keep = self.keep and self.chunked
        self.began, self.status = True, 200
        headers = [(b"Content-Type", api.stream_type(self.api)), *UNBUFFERED, *self.own_headers]
        self.send(http1.stream_head(200, headers, chunked=self.chunked, connection=self.connection))

    def end(self) -> None:
        """Ends a stream that has begun as it should end."""
        if self.chunked:
            self.send(http1.LAST_CHUNK)

    def stay(self) -> None:
        """ClientGone if nobody waits for the answer any more."""
        if has_left(self.client.socket):
            raise ClientGone("The client closed its connection.")

    def record(self) -> Served:
        request = self.request
        return Served(
            time.time(),
            self.request_id,
            self.client.address,
            request.method,
            request.path,
            self.model,
            self.backend,
            self.status,
            self.code,
            self.stream,
            self.waited,
            self.first_byte,
            time.monotonic() - self.since,
            self.sent,
            self.events,
            foreseen=self.foreseen if self.said else None,
            said=self.said[-api.USAGE_BYTES :],
        )


class Waiting:
    """What a call does while it waits in the line of its model."""

    __slots__ = ("_beat_at", "_call", "_chunk_at", "_every", "_limit", "_mux", "_patience", "_since")

    def __init__(self, call: Call, patience: Patience, mux: Multiplexer) -> None:
        self._call = call
        self._mux = mux
        self._patience = patience
        self._since: float | None = None
        self._beat_at = self._chunk_at = self._limit = self._every = 0.0

    def tend(self, now: float) -> None:
        """Called a few times a second: ClientGone, ModelLoading, or a sign of life into the stream."""
        call = self._call
        call.stay()
        if self._since is None:
            self._plan(now)
        if call.stream:
            if now >= self._beat_at or now >= self._chunk_at:
                self._beat(now)
        elif now >= self._limit:
            if self._mux.is_ready(call.model):
                raise Overloaded(f"overloaded: {call.model} has no place for this request yet. Try again.")
            text = f"{call.model} is still loading. Send the request again to wait on."
            raise ModelLoading(text, retry_after=self._mux.eta(call.model))

    def _plan(self, now: float) -> None:
        patience = self._patience
        own = _own_limit(self._call.request)
        self._since = now
        self._every = min(patience.comment_every, own / 2)
        self._beat_at = now + min(patience.grace, own / 2)
        self._chunk_at = max(now + patience.chunk_every, self._beat_at)
        silence = min(own, patience.silence)
        self._limit = now + max(silence - patience.margin, silence / 2)

    def _beat(self, now: float) -> None:
        call = self._call
        doing = "waiting for a place at" if self._mux.is_ready(call.model) else "loading"
        text = api.comment(f"anvil-mux {doing} {call.model} {self._mux.how_far(call.model)}", call.api)
        if now >= self._chunk_at:
            self._chunk_at = now + self._patience.chunk_every
            text += api.beat(call.route.beat, call.model, call.request_id, int(time.time()))
        self._beat_at = now + self._every
        if not call.began:
            call.begin()
        call.send_event(text)


def _ends_event(last: bytes) -> bool:
    return not last or last.endswith((b"\n\n", b"\r\n\r\n", b"\r\r"))


def _own_limit(request: http1.Request) -> float:
    """How long the client waits for bytes, as the SDKs of OpenAI and Anthropic say."""
    try:
        seconds = float(request.fields.get(b"x-stainless-read-timeout", b"0"))
    except ValueError:
        return FOREVER
    return seconds if seconds > 0 else FOREVER
