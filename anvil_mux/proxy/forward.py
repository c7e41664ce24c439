"""One request under one lease: its engine is asked in words that it understands, its client told the answer.

Most answers pass as they are. A question in an API that the engine lacks is translated, there and back. Of
two stages the first fills in the question of the second. A websocket becomes a tunnel.

``forward`` returns what went wrong with the engine, which is for the dispatcher to judge, and raises only
what ends the request: its client has left, or the engine has refused it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from anvil_mux.config.config import Backend
from anvil_mux.errors import (
    BackendError,
    BadRequest,
    ClientGone,
    ClientStalled,
    MuxError,
    RefusedByEngine,
    Severed,
)
from anvil_mux.multiplexer.circuits import Attempt
from anvil_mux.multiplexer.lease import Lease
from anvil_mux.protocol import api, http1, naming, stages
from anvil_mux.protocol.api import written
from anvil_mux.protocol.completions import Translation, parse
from anvil_mux.proxy import external, heads, stored_responses
from anvil_mux.proxy.access import Access
from anvil_mux.proxy.asked import AskedBody, Question
from anvil_mux.proxy.capture import BODY_BYTES
from anvil_mux.proxy.pump import End
from anvil_mux.proxy.questions import TRANSLATE
from anvil_mux.proxy.relay import WHOLE, BrokenOff, Exchange, Failed, Relay, RequestBody, Silent, name_of
from anvil_mux.proxy.reply import JSON, Reply
from anvil_mux.proxy.rewriting import rewritten, with_system
from anvil_mux.proxy.spool import Spool
from anvil_mux.proxy.stored_responses import StoredResponses
from anvil_mux.scheduler.steps import NO_USAGE, Crash
from anvil_mux.telemetry.accesslog import Served

LACKING = (404, 405, 501)
"""How engines answer to a route that they do not have."""
COPIED_BYTES = 2 * BODY_BYTES
"""Bytes that are copied of a stream that is captured: its framing is among them."""
MESSAGES = "/v1/messages"
"""The route at which llama-server passes over fields that choose a LoRA adapter."""
WITHOUT_ADAPTERS = frozenset(
    (
        *("/v1/embeddings", "/embedding", "/embed", "/v2/embed", "/encode", "/pooling", "/classify"),
        *("/rerank", "/v1/rerank", "/v2/rerank", "/reranking", "/v1/reranking", "/score", "/v1/score"),
    )
)
"""The routes at which it does not let a question choose one."""
MAX_QUOTED = 2000
"""Bytes of an engine's error that an error event repeats."""

ForwardFailure = Failed | Severed | None
"""How a try has ended: None when the client has its answer to the end."""


class _Lacking(Exception):
    """The engine does not have the route."""


class Forwarder:
    """Asks engines for those who hold a lease. Any thread."""

    def __init__(
        self, relay: Relay, stored: StoredResponses, crash_under: Callable[[Lease], Crash | None]
    ) -> None:
        """``crash_under``: how a backend ended under a lease, if it has."""
        self._relay = relay
        self._crash_under = crash_under
        self._stored = stored
        self._found_lacking: tuple[Access | None, set[tuple[str, str]]] = (None, set())
        """A configuration, and the (backend, path) of routes that engines turned out not to have under it."""

    def forward(self, question: Question, lease: Lease, reply: Reply, record: Served) -> ForwardFailure:
        """Asks the engine, and passes its answer to the client."""
        try:
            if lease.backend is question.target.unchanged_at:
                self._pass_on(question, lease, question.body, reply, record)
            elif question.asked.route.upgrades:
                self._tunnel(question, lease, reply, record)
            elif question.translation:
                self._translate(question, question.translation, lease, reply, record)
            else:
                self._ask_in_clients_words(question, lease, reply, record)
        except (Failed, Severed) as error:
            return error
        return None

    def _ask_in_clients_words(self, question: Question, lease: Lease, reply: Reply, record: Served) -> None:
        """Asks the engine what the client asked; if it lacks the route, in words that every engine has."""
        route, backend = question.asked.route, lease.backend
        lacks, lacking = (backend.name, route.path), self._lacking(question.asked.access)
        drops_fields = route.path == MESSAGES and backend.adapts_by_field
        if not (route.translated and (lacks in lacking or drops_fields)):
            try:
                return self._pass_on(question, lease, _as_known(question, backend), reply, record)
            except _Lacking:
                pass
        assert isinstance(question.body, (bytes, bytearray))
        self._translate(question, TRANSLATE[route.path](parse(question.body)), lease, reply, record)
        if not drops_fields:
            lacking.add(lacks)
        return None

    def _lacking(self, access: Access) -> set[tuple[str, str]]:
        """Return the routes found lacking under ``access``; changed by atomic operations."""
        found_under, found = self._found_lacking
        if found_under is not access:
            found = set()
            self._found_lacking = access, found
        return found

    # The answer as it is

    def _pass_on(
        self, question: Question, lease: Lease, body: RequestBody, reply: Reply, record: Served
    ) -> None:
        """Passes the request on, its body as it is given here, and the answer back."""
        asked = question.asked
        route = asked.route
        exchange = Exchange(self._relay, lease, reply.client.socket, _begins(question, lease))
        try:
            response = exchange.ask(asked.request.method, heads.request_head(question, lease), body)
            record.first_byte = time.monotonic() - asked.since
            if lease.attempt:
                _note_status(question, lease, lease.attempt, response)
            if route.translated and response.status in LACKING:
                raise _Lacking
            if route.beat == "responses" and response.status == 200:
                self._note_response(question, lease, exchange, response)
            if reply.form == "event":
                self._continue(question, exchange, response, reply, record)
            elif exchange.whole:
                record.said = data = exchange.data
                declared = None if response.body == "none" else len(data)
                head = heads.response_head(reply, response, length=declared)
                _has_said_all(exchange, data)
                reply.pass_on(response.status, head + data, "cut")
                if reply.capture:
                    reply.capture.said(data)
            else:
                self._stream(question, exchange, response, reply, record)
        finally:
            exchange.close()

    def _note_response(
        self, question: Question, lease: Lease, exchange: Exchange, response: http1.Response
    ) -> None:
        """Remembers which engine has the answer that begins now."""
        if not exchange.whole and _is_events(response):
            exchange.read_on(stored_responses.says_no_more)
        if id := stored_responses.id_in(exchange.data):
            self._stored.keep(id, question.target.model, lease.backend.name, question.asked.key)

    def _stream(
        self, question: Question, exchange: Exchange, response: http1.Response, reply: Reply, record: Served
    ) -> None:
        length = response.length if response.body == "length" else None
        chunked = length is None and reply.chunked
        reply.keep = reply.keep and (chunked or length is not None)
        events = length is None and _is_events(response)
        if reply.capture:
            exchange.copy(COPIED_BYTES)
        first = exchange.begin(response, chunked=chunked)
        reply.answered = bool(first)
        head = heads.response_head(reply, response, length=length, chunked=chunked)
        if exchange.has_ended:
            _has_said_all(exchange, exchange.passed.said)
        reply.pass_on(response.status, head + first, "event" if events else "cut")
        self._move(question, exchange, response, reply, record)

    def _continue(
        self, question: Question, exchange: Exchange, response: http1.Response, reply: Reply, record: Served
    ) -> None:
        """The head went out while the model was loading, so what the engine says must be events."""
        if response.status >= 300 or not _is_events(response):
            raise _engine_error(question.target.model, response.status, exchange.data)
        if reply.capture:
            exchange.copy(COPIED_BYTES)
        first = exchange.begin(response, chunked=reply.chunked)
        reply.answered = bool(first)
        if exchange.has_ended:
            _has_said_all(exchange, exchange.passed.said)
        reply.send(first)
        self._move(question, exchange, response, reply, record)

    def _move(
        self, question: Question, exchange: Exchange, response: http1.Response, reply: Reply, record: Served
    ) -> None:
        """The rest of a body, and its end."""
        end = exchange.stream(response)
        if end is End.CLOSED and not self._is_cut_short(question, exchange.lease, response):
            end = End.COMPLETE
        if reply.capture:
            reply.capture.said(exchange.copied)
        reply.sent += exchange.streamed
        reply.answered = reply.answered or exchange.streamed > 0
        record.said, record.tokens = exchange.passed.said, exchange.passed.events
        if end is End.COMPLETE:
            _has_said_all(exchange, exchange.passed.said)
            if exchange.rest:
                reply.send(exchange.rest)
            return
        fits = reply.form == "event" and exchange.aligned
        reply.broke_off(exchange.last_payload if fits else None)
        engine = f"The engine of {question.target.model}"
        match end:
            case End.CLIENT_GONE:
                raise ClientGone("The client left its stream.")
            case End.UNREAD:
                raise ClientStalled(f"The client read nothing for {self._relay.client_timeout:g} s.")
            case End.SEVERED:
                raise exchange.lease.severed_error()
            case End.STALLED:
                raise Silent(f"{engine} went silent in the middle of its answer.")
            case End.DIED | End.CLOSED:
                raise BrokenOff(f"{engine} broke off its answer.")

    def _is_cut_short(self, question: Question, lease: Lease, response: http1.Response) -> bool:
        """Whether a body ended too early that only the end of its connection ends.

        A stream of events lacks its last event, where its API has one. Of others it counts what became of
        the engine.
        """
        if question.asked.route.beat != "none" and _is_events(response):
            return True
        return not lease.attempt and self._crash_under(lease) is not None

    # Websockets

    def _tunnel(self, question: Question, lease: Lease, reply: Reply, record: Served) -> None:
        """The lease lasts as long as the websocket is open."""
        with Exchange(self._relay, lease, reply.client.socket) as exchange:
            response = exchange.ask("GET", heads.upgrade_head(question, lease), b"", upgrade=True)
            record.first_byte = time.monotonic() - question.asked.since
            if lease.attempt:
                _note_status(question, lease, lease.attempt, response)
            reply.keep, reply.answered = False, True
            if response.status != 101:
                body = exchange.content(response, WHOLE)
                head = heads.response_head(reply, response, length=len(body))
                _has_said_all(exchange, body)
                reply.pass_on(response.status, head + body, "cut")
                return
            reply.pass_on(101, heads.switched_head(reply, response) + exchange.data, "frame")
            ended, error = exchange.tunnel(reply.client.take_rest(), lambda: reply.asked.may_go_on)
            reply.sent += ended.passed
            if not ended.open:
                reply.broke_off(None)
            if error:
                raise error

    # Translations

    def _translate(
        self, question: Question, asked: Translation, lease: Lease, reply: Reply, record: Served
    ) -> None:
        """Asks the engine in its own words, and says the answer in the client's, in this thread."""
        asked.answer.begun(time.time(), record.waited)
        key = question.asked.key
        if asked.keep_alive and (key is None or key.admin):
            lease.keep_alive(asked.keep_alive)
        if not asked.path:
            lease.release(whole=True)
            reply.whole(200, [JSON], asked.answer.whole(b"", time.time()))
            return
        model, backend = question.target.model, lease.backend
        body = _rewritten(asked.body(question.known_as(backend)), question, backend, asked.path)
        begins = _begins(question, lease)
        with Exchange(self._relay, lease, reply.client.socket, begins) as exchange:
            head = heads.translated_head(question, lease, asked.path)
            response = exchange.ask("POST", head, body)
            record.first_byte = time.monotonic() - question.asked.since
            if lease.attempt:
                _note_status(question, lease, lease.attempt, response)
            if response.status >= 300:
                raise _refusal(model, asked.path, response.status, exchange.content(response, WHOLE))
            try:
                self._say(question, asked, exchange, response, reply)
            finally:
                record.said, record.tokens = exchange.passed.said, exchange.passed.events

    def _say(
        self,
        question: Question,
        asked: Translation,
        exchange: Exchange,
        response: http1.Response,
        reply: Reply,
    ) -> None:
        """An answer as it comes, or all at once."""
        if not asked.stream:
            content = exchange.content(response, question.asked.access.config.max_body)
            if not content:  # an answer's words for nothing are those of a question that asks for nothing
                raise BackendError(f"The engine of {question.target.model} answered with nothing.")
            said = asked.answer.whole(content, time.time())
            _has_said_all(exchange, exchange.passed.said)
            reply.whole(200, [JSON], said)
            return
        if not _is_events(response):
            raise BackendError(f"The engine of {question.target.model} did not answer with a stream.")
        if reply.form == "answer":
            reply.begin()
        for piece in exchange.pieces(response):
            said = asked.answer.feed(piece, time.time())
            reply.answered = reply.answered or bool(said)
            if exchange.has_ended:
                said += asked.answer.finish(time.time())
                _has_said_all(exchange, exchange.passed.said)
            reply.event(said)
        reply.end()

    # Two stages

    def prefill(self, question: Question, lease: Lease, reply: Reply) -> tuple[Question, ForwardFailure]:
        """The first of two stages: the question of the second. What fails here the client has not seen."""
        body, translation = question.body, question.translation
        assert isinstance(body, (bytes, bytearray))
        asked = translation.question if translation else parse(body)
        backend, model = lease.backend, question.target.model
        own = _rewritten(translation.body(model) if translation else body, question, backend, question.path)
        assert isinstance(own, (bytes, bytearray))
        first = stages.first(asked if own is body else parse(own), question.known_as(backend))
        try:
            with Exchange(self._relay, lease, reply.client.socket) as exchange:
                head = heads.translated_head(question, lease, question.path)
                response = exchange.ask("POST", head, first)
                said = exchange.content(response, question.asked.access.config.max_body)
        except (Failed, Severed) as error:
            return question, error
        lease.release(whole=True, usage=api.tokens_said(said)[1:])
        if response.status >= 300:
            raise _engine_error(model, response.status, said)
        try:
            asked = stages.second(asked, said)
        except ValueError as error:
            raise BackendError(f"{backend.name} gave no answer that can be read: {error}.") from None
        if translation:
            return replace(question, translation=replace(translation, question=asked)), None
        return replace(question, body=written(asked)), None


def _has_said_all(exchange: Exchange, said: bytes) -> None:
    """The lease ends with the engine's part, however slowly the client takes what is left of its answer.

    ``said``: what has the engine's figures in it.
    """
    exchange.close()
    lease = exchange.lease
    lease.release(whole=True, usage=api.tokens_said(said)[1:] if lease.is_routed else NO_USAGE)


def _begins(question: Question, lease: Lease) -> float | None:
    """The seconds within which a server elsewhere is to begin a stream, if a fallback could give it.

    Any other answer comes when it is whole, and an engine of ours may be at a long prompt.
    """
    return question.after if question.stream and lease.backend.url else None


def _note_status(question: Question, lease: Lease, attempt: Attempt, response: http1.Response) -> None:
    """Report how a server elsewhere is, by an answer's status; BackendError if that is not passed on."""
    backend, status = lease.backend, response.status
    name = name_of(backend)
    if status == 401:
        named = backend.api_key_env
        key = f"the API key in {named}" if named else "requests without a key (name one with api_key_env)"
        attempt.failed(f"it refuses {key} ({status})")
        raise BackendError(f"{name} refuses {key}.")
    if status == 429 or (status >= 500 and status not in LACKING):
        pause = external.pause_asked(response.fields, time.time())
        attempt.failed(f"it answered {status}", pause=pause)
        if question.falls_back:
            raise BackendError(f"{name} answered {status}.")


def _is_events(response: http1.Response) -> bool:
    """Whether it is a stream of events that can be read here, and written into."""
    kind = response.fields.get(b"content-type", b"")
    return kind.startswith(b"text/event-stream") and b"content-encoding" not in response.fields


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


def _refusal(model: str, path: str, status: int, body: bytes) -> MuxError:
    """An engine's answer to a question that is not the client's own."""
    said = api.error_said(body)
    if status == 501 or (status in LACKING and said is None):
        why = said["message"] if said else f"it has no {path}"
        return BadRequest(f"the engine of {model} cannot do this: {why}"[:MAX_QUOTED], status=501)
    return _engine_error(model, status, body)


def _rewritten(body: AskedBody, question: Question, backend: Backend, path: str) -> AskedBody:
    """A body of JSON as the service of ``backend`` is to get it at ``path``, under the preset it names."""
    preset = question.preset_at(backend)
    if preset and preset.is_adapter and not preset.served_model and path in WITHOUT_ADAPTERS:
        text = f"the engine of {question.target.model} cannot apply the LoRA adapter {preset.name} at {path}"
        raise BadRequest(text, status=501)
    if not (preset or backend.strip or backend.set) or isinstance(body, Spool):
        return body
    if preset is None:
        return rewritten(body, backend.strip, dict(backend.set))
    if preset.system:
        body = with_system(body, path, preset.system)
    strip, put = preset.over(backend.strip, backend.set)
    return rewritten(body, strip, put) if strip or put else body


def _as_known(question: Question, backend: Backend) -> RequestBody:
    """The body as the service of ``backend`` is to get it, with the name that it knows its model by."""
    body, named, model_in = question.body, question.named, question.asked.route.model_in
    known_as = question.known_as(backend)
    if model_in in ("json", "path"):
        body = _rewritten(body, question, backend, question.path)
    if isinstance(body, Spool):
        if question.span:  # also where it is the client's own name: another may have been put there before
            body.replace(question.span, known_as.encode())
        return body
    if named == known_as or model_in == "upstream":
        return body
    if model_in == "multipart":
        return (naming.model_replaced_in_query(body.decode("ascii"), known_as).encode("ascii"),)
    return naming.model_replaced(body, known_as, question.span) if body else ()
