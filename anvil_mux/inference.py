"""One request for a model: its lease, its engine's answer, and what it gets when something comes between.

A ``Call`` holds what is known of a request and its answer so far; it becomes a line in the access log.
``Inference.infer`` reads the body, finds the model's name, leases, sends the request on and the answer back.
Three things may come between:

* The model is not resident. The thread waits in the line and looks at its client a few times a second
  (``Waiting.tend``). A stream is begun after a grace, with comment lines as keep-alive; from then on every
  failure is an event in the stream. Any other request is silent until shortly before its client gives up.
* The engine is gone before a byte. The multiplexer is told, and the request tries once more on a new lease.
  Where the model has other replicas, a request of which the client has seen nothing moves to one of them
  also if its engine was put out, or broke off what only we had read.
* The answer breaks off: the engine died, was silent for too long, or was put out when the drain ended. The
  client gets an error event of its API and then the connection is cut, never a clean end.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from anvil_mux import api, http1, prefix
from anvil_mux.accesslog import Served
from anvil_mux.client import Client, Spool
from anvil_mux.config import Config
from anvil_mux.errors import (
    BackendError,
    BadRequest,
    ClientGone,
    ModelLoading,
    MuxError,
    RefusedByEngine,
    Severed,
)
from anvil_mux.http1 import Field
from anvil_mux.multiplexer import Lease, Multiplexer
from anvil_mux.pump import End
from anvil_mux.relay import BrokenOff, Exchange, Relay, RequestBody, Unreachable, has_left
from anvil_mux.residency import NO_WORK
from anvil_mux.routing import Work

JSON = (b"Content-Type", b"application/json")
STREAM_HEADERS = [
    (b"Content-Type", b"text/event-stream"),
    (b"Cache-Control", b"no-cache"),
    (b"X-Accel-Buffering", b"no"),
]
SESSION = b"x-session-id"
"""The header by which a client says which conversation a request belongs to."""
MAX_QUOTED = 2000
"""Bytes of an engine's error that an error event repeats."""
MAX_PREPARED = 8
"""Engines' addresses for which the constant part of a head is kept."""
FOREVER = float("inf")

_OWN = frozenset([b"x-request-id"])
"""What every forwarded head gets anew."""

Body = bytes | bytearray | Spool


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
        "first_byte",
        "keep",
        "model",
        "request",
        "request_id",
        "route",
        "routed",
        "sent",
        "since",
        "status",
        "stream",
        "tokens",
        "waited",
        "waiting",
        "work",
    )

    def __init__(self, client: Client, request: http1.Request, request_id: str, *, keep: bool) -> None:
        self.client = client
        self.request = request
        self.request_id = request_id
        self.keep = keep
        """Whether the connection can be used again."""
        self.since = time.monotonic()
        self.api = "openai"
        self.route: api.Route | None = None
        self.model = self.backend = self.code = ""
        self.status = self.sent = self.tokens = 0
        self.waited = self.first_byte = 0.0
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

    @property
    def chunked(self) -> bool:
        """The client understands chunks."""
        return self.request.version == (1, 1)

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
        event = api.error_event(self.api, self.route.beat if self.route else "none", error, self.request_id)
        self.send_event(event if _ends_event(last) else b"\n\n" + event)

    def send_event(self, data: bytes) -> None:
        """Writes into a stream that has begun."""
        self.send(http1.chunk(data) if self.chunked else data)

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
            self.tokens,
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
        text = api.comment(f"anvil-mux loading {call.model} {self._mux.how_far(call.model)}")
        if now >= self._chunk_at:
            self._chunk_at = now + self._patience.chunk_every
            assert call.route is not None
            text += api.beat(call.route.beat, call.model, call.request_id, int(time.time()))
        self._beat_at = now + self._every
        if not call.began:
            call.keep = call.keep and call.chunked
            headers = [*STREAM_HEADERS, *call.own_headers]
            call.began, call.status = True, 200
            call.send(http1.stream_head(200, headers, chunked=call.chunked, connection=call.connection))
        call.send_event(text)


class Inference:
    """Sends requests to engines. Any thread."""

    def __init__(self, config: Config, mux: Multiplexer, relay: Relay, patience: Patience) -> None:
        self._config = config
        self._mux = mux
        self._relay = relay
        self._patience = patience

    def infer(self, call: Call, route: api.Route) -> None:
        """Answers ``call`` from the engine of the model that it names."""
        call.route, call.api = route, route.api
        if route.model_in == "query":
            self._send_on(call, api.model_in_query(call.request.query), b"")
            return
        coding = call.request.fields.get(b"content-encoding")
        if coding is not None and coding.lower() != b"identity":
            named = coding.decode("ascii", "replace")
            advice = "send the body uncompressed, without this header"
            raise BadRequest(f"Content-Encoding {named} is not understood: {advice}", status=415)
        if route.model_in == "multipart":
            self._infer_from_form(call)
        else:
            body = self.read_json(call)
            name, stream = api.model_and_stream(body)
            call.stream = stream and route.streams
            self._send_on(call, name, body)

    def read_json(self, call: Call) -> bytes | bytearray:
        """The body of a route that takes JSON."""
        request = call.request
        body = call.client.read_body(request, self._config.max_body)
        kind = request.fields.get(b"content-type", b"")
        if kind != b"application/json" and api.media(kind, body) != "json":
            raise BadRequest("this route takes a JSON body (Content-Type: application/json)", status=415)
        return body

    def _infer_from_form(self, call: Call) -> None:
        request, route = call.request, call.route
        kind = request.fields.get(b"content-type", b"")
        if api.media(kind, b"") != "multipart":
            raise BadRequest("this route takes a form (Content-Type: multipart/form-data)", status=415)
        scanner = api.MultipartModelScanner(api.boundary(kind))
        with Spool() as spool:
            spool.fill(call.client.read_pieces(request, self._config.max_upload), scanner.feed)
            scanner.finish()
            call.stream = scanner.stream and route is not None and route.streams
            self._send_on(call, scanner.model, spool, scanner.span)

    def _send_on(
        self, call: Call, named: str | None, body: Body, span: tuple[int, int] | None = None
    ) -> None:
        name = named or self._config.default_model
        if name is None:
            raise BadRequest("the request must name a `model`", param="model")
        call.model = self._mux.resolve(name)
        retries = self._mux.replicas(call.model)
        if retries > 1:
            call.work = self._work(call, body)
        while True:
            try:
                return self._try(call, named, body, span)
            except Unreachable:
                if not retries:
                    raise
                retries -= 1

    def _work(self, call: Call, body: Body) -> Work:
        """What the choice among replicas goes by."""
        session = call.request.fields.get(SESSION, b"").decode("ascii", "replace")[:256]
        per_token = self._mux.bytes_per_token(call.model)
        if isinstance(body, Spool):
            work = Work(tokens=round(len(body) / per_token), session=session)
        else:
            work = prefix.read(call.model, body, per_token, session)
        return work._replace(stream=call.stream)

    def _try(self, call: Call, named: str | None, body: Body, span: tuple[int, int] | None) -> None:
        with self._lease(call) as lease:
            call.waited += lease.waited
            backend = lease.backend
            call.backend = backend.name
            call.routed = f"{backend.name}; {lease.why}" if lease.why else ""
            known_as = backend.served_model or call.model
            length, pieces = (len(body), body) if known_as == named else _renamed(body, known_as, span)
            try:
                self._forward(call, lease, length, pieces)
            except Unreachable:
                self._mux.unreachable(lease)
                raise
            except (BrokenOff, Severed) as error:
                if lease.taken_back:
                    call.work = call.work._replace(stream=False)  # once is enough
                elif call.answered or not self._mux.has_another(lease):
                    raise
                self._mux.unreachable(lease)
                raise Unreachable(error.message) from None

    def _lease(self, call: Call) -> Lease:
        asked = time.monotonic()
        try:
            return self._mux.lease(call.model, lambda now: self._tend(call, now), call.work)
        except MuxError:
            call.waited += time.monotonic() - asked
            raise

    def _tend(self, call: Call, now: float) -> None:
        if call.waiting is None:
            call.waiting = Waiting(call, self._patience, self._mux)
        call.waiting.tend(now)

    def _forward(self, call: Call, lease: Lease, length: int, body: RequestBody) -> None:
        with Exchange(self._relay, lease, call.client.socket) as exchange:
            head = _request_head(call, lease, length)
            response = exchange.ask(call.request.method, head, body)
            call.first_byte = time.monotonic() - call.since
            if call.began:
                self._continue(call, lease, exchange, response)
            elif exchange.whole:
                call.status = response.status
                if call.route and call.route.beat != "none":
                    call.tokens = exchange.tokens
                declared = None if response.body == "none" else len(exchange.data)
                call.send(_response_head(call, response, length=declared) + exchange.data)
            else:
                self._stream(call, lease, exchange, response)

    def _stream(self, call: Call, lease: Lease, exchange: Exchange, response: http1.Response) -> None:
        call.status = response.status
        length = response.length if response.body == "length" else None
        chunked = length is None and call.chunked
        call.keep = call.keep and (chunked or length is not None)
        first = exchange.begin(response, chunked=chunked)
        call.answered = bool(first)
        call.send(_response_head(call, response, length=length, chunked=chunked) + first)
        self._move(call, lease, exchange, response, events=length is None and _is_events(response))

    def _continue(self, call: Call, lease: Lease, exchange: Exchange, response: http1.Response) -> None:
        """The head went out while the model was loading, so what the engine says must be events."""
        if response.status >= 300 or not _is_events(response):
            raise _engine_error(call.model, response.status, exchange.data)
        first = exchange.begin(response, chunked=call.chunked)
        call.answered = bool(first)
        call.send(first)
        self._move(call, lease, exchange, response, events=True)

    def _move(
        self, call: Call, lease: Lease, exchange: Exchange, response: http1.Response, *, events: bool
    ) -> None:
        """The rest of a body, and its end."""
        end = exchange.stream(response)
        call.sent += exchange.streamed
        call.tokens = exchange.tokens
        error: MuxError
        match end:
            case End.COMPLETE:
                return
            case End.CLIENT_GONE | End.UNREAD:
                raise ClientGone("The client left its stream.")
            case End.SEVERED:
                error = lease.severed_error()
            case End.STALLED:
                error = BackendError(f"The engine of {call.model} went silent within its answer.")
            case End.DIED:
                error = BrokenOff(f"The engine of {call.model} broke off its answer.")
        call.answered = call.answered or exchange.streamed > 0
        if events and not call.answered and end is not End.STALLED:
            call.began = True
            raise error
        call.keep, call.code = False, error.code
        if events and exchange.aligned:
            call.break_off(error, last=exchange.last_payload)


def _request_head(call: Call, lease: Lease, length: int) -> bytes:
    """The head for the engine: but for its last two lines the same for all requests with the same head."""
    request, route = call.request, call.route
    assert route is not None
    given = {} if request.prepared is None else request.prepared
    constant = given.get(lease.address)
    if constant is None:
        kind = request.fields.get(b"content-type")
        as_json = route.model_in == "json" and kind != b"application/json"
        constant = http1.forward_request_head(
            request,
            host=b"%b:%d" % (lease.address[0].encode("ascii"), lease.address[1]),
            target=(f"{route.path}?{request.query}" if request.query else route.path).encode("ascii"),
            set={b"content-type": b"application/json"} if as_json else {},
            drop=_OWN,
        )[:-2]
        _prepare(given, lease.address, constant)
    if request.method == "GET":
        return b"%bX-Request-ID: %b\r\n\r\n" % (constant, call.request_id.encode("ascii"))
    return b"%bX-Request-ID: %b\r\nContent-Length: %d\r\n\r\n" % (
        constant,
        call.request_id.encode("ascii"),
        length,
    )


def _response_head(
    call: Call, response: http1.Response, *, length: int | None = None, chunked: bool = False
) -> bytes:
    """The head for the client: but for its last two lines the same for all answers with the same head."""
    if length is None or response.prepared is None or call.routed or call.api == "anthropic":
        return http1.forward_response_head(
            response, length=length, chunked=chunked, connection=call.connection, extra=call.own_headers
        )
    connection = call.connection
    constant = response.prepared.get(connection)
    if constant is None:
        constant = http1.forward_response_head(response, connection=connection, drop=_OWN)[:-2]
        _prepare(response.prepared, connection, constant)
    return b"%bX-Request-ID: %b\r\nContent-Length: %d\r\n\r\n" % (
        constant,
        call.request_id.encode("ascii"),
        length,
    )


def _prepare(given: dict[object, bytes], key: object, constant: bytes) -> None:
    if len(given) >= MAX_PREPARED:
        given.clear()
    given[key] = constant


def _is_events(response: http1.Response) -> bool:
    return response.fields.get(b"content-type", b"").startswith(b"text/event-stream")


def _engine_error(model: str, status: int, body: bytes) -> MuxError:
    """An engine's answer for a client that expects events; a refusal is passed on in the engine's words."""
    said = api.error_said(body) if 400 <= status < 500 else None
    if said is None:
        text = body[:MAX_QUOTED].decode("utf-8", "replace")
        return BackendError(f"The engine of {model} answered {status}: {text}")
    message = said.pop("message")
    assert isinstance(message, str)
    named = {key: value[:MAX_QUOTED] if isinstance(value, str) else value for key, value in said.items()}
    return RefusedByEngine(message[:MAX_QUOTED], status=status, said=named)


def _ends_event(last: bytes) -> bool:
    return not last or last.endswith((b"\n\n", b"\r\n\r\n", b"\r\r"))


def _own_limit(request: http1.Request) -> float:
    """How long the client waits for bytes, as the SDKs of OpenAI and Anthropic say."""
    try:
        seconds = float(request.fields.get(b"x-stainless-read-timeout", b"0"))
    except ValueError:
        return FOREVER
    return seconds if seconds > 0 else FOREVER


def _renamed(body: Body, model: str, span: tuple[int, int] | None) -> tuple[int, RequestBody]:
    """The length and the pieces of ``body`` with the name that the engine knows its model by."""
    if not isinstance(body, Spool):
        pieces = api.model_replaced(body, model) if body else ()
        return sum(map(len, pieces)), pieces
    if span:
        body.replace(span, model.encode())
    return len(body), body
