"""One try of a question at one engine, under its lease.

The engine is asked in words that it understands, and the client told the answer. Most answers pass as they
are. A question in an API that the engine lacks is translated, there and back. Of two stages the first fills
in the question of the second. A websocket becomes a tunnel. Bytes go in one direction: the question to the
``Exchange``, which brings the answer, and that to the ``Reply``.

What goes wrong with the engine (``Failed``, ``Severed``) is for the dispatcher to judge. What else is raised
ends the request: its client has left, or the engine has refused it.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from email.utils import parsedate_to_datetime
from typing import NamedTuple

from anvil_mux.errors import (
    BackendError,
    BadRequest,
    ClientGone,
    ClientStalled,
    LoopDetected,
    MuxError,
    QuotedFailure,
    RefusedByEngine,
)
from anvil_mux.multiplexer.multiplexer import Lease
from anvil_mux.protocol import anthropic, api, completions, http1
from anvil_mux.protocol.api import written
from anvil_mux.protocol.completions import Translation, parse
from anvil_mux.protocol.sse import SseObserver
from anvil_mux.protocol.tokens import tokens_in
from anvil_mux.proxy.engine_request import UPGRADE, json_body, request_body, request_head, translated_head
from anvil_mux.proxy.exchange import (
    WHOLE,
    BrokenOff,
    Exchange,
    Relay,
    RequestBody,
    Silent,
    StreamOutcome,
    name_of,
)
from anvil_mux.proxy.pump import End
from anvil_mux.proxy.question import (
    TRANSLATE,
    Question,
    StoredResponses,
    answer_id,
    engine_route,
    has_answer_id,
)
from anvil_mux.proxy.reply import CAPTURED_BYTES, JSON, Reply
from anvil_mux.scheduler.slot import NO_USAGE, Crash, Ticket

LACKING = (404, 405, 501)
"""How engines answer to a route that they do not have."""
MESSAGES = "/v1/messages"
"""The route at which llama-server passes over fields that choose a LoRA adapter."""
MAX_QUOTED = 2000
"""Bytes of an engine's error that an error event repeats."""


class _Lacking(Exception):
    """The engine does not have the route."""


class Shared(NamedTuple):
    """The things that all attempts share."""

    relay: Relay
    stored: StoredResponses
    crash_under: Callable[[Ticket], Crash | None]
    """How a backend ended under a ticket, if it has."""


class Attempt:
    """One try of a question at one engine. Used by the request's thread, for ``run`` or ``prefill``."""

    __slots__ = ("_shared", "exchange", "lease", "question", "record", "reply")

    def __init__(self, question: Question, lease: Lease, reply: Reply, shared: Shared) -> None:
        self.question = question
        self.lease = lease
        self.reply = reply
        self.record = reply.record
        self._shared = shared
        self.exchange = self._exchange()
        """The request to the engine, and its answer."""

    def _exchange(self) -> Exchange:
        question = self.question
        # One that is no stream comes when it is whole.
        begins = question.after if question.stream else None
        return Exchange(self._shared.relay, self.lease, self.reply.client.socket, begins)

    def run(self) -> None:
        """Asks the engine, and passes its answer to the client."""
        question = self.question
        if self.lease.backend is question.target.unchanged_at:
            self._pass_on(question.body)
        elif question.context.route.upgrades:
            self._tunnel()
        elif question.translation:
            self._translate(question.translation)
        else:
            self._ask_in_clients_words()

    def _ask_in_clients_words(self) -> None:
        """Asks the engine what the client asked; if it lacks the route, in words that every engine has."""
        question, backend = self.question, self.lease.backend
        route, lacking = question.context.route, question.context.access.lacking
        lacks = backend.name, route.path
        drops_fields = route.path == MESSAGES and backend.adapts_by_field
        if not (route.translated and (lacks in lacking or drops_fields)):
            try:
                return self._pass_on(request_body(question, backend))
            except _Lacking:
                self.exchange = self._exchange()
        assert isinstance(question.body, (bytes, bytearray))
        self._translate(TRANSLATE[route.path](parse(question.body)))
        if not drops_fields:
            lacking.add(lacks)
        return None

    def _ask(self, method: str, head: bytes, body: RequestBody, *, upgrade: bool = False) -> http1.Response:
        """The head of the answer, noted."""
        response = self.exchange.ask(method, head, body, upgrade=upgrade)
        self.record.first_byte = time.monotonic() - self.question.context.since
        if self.lease.permit:
            self._note_status(response)
        return response

    def _note_status(self, response: http1.Response) -> None:
        """Report how a server elsewhere is, by an answer's status; BackendError if that is not passed on."""
        backend, permit, status = self.lease.backend, self.lease.permit, response.status
        assert permit is not None
        name = name_of(backend)
        if status == 401:
            named = backend.api_key_env
            key = f"the API key in {named}" if named else "requests without a key (name one with api_key_env)"
            permit.failed(f"it refuses {key} ({status})")
            raise BackendError(f"{name} refuses {key}.")
        if status == LoopDetected.status:
            permit.succeeded()  # it says nothing of the server
            if self.question.fallbacks:
                raise BackendError(f"{name} answered {status}.")
        elif status == 429 or (status >= 500 and status not in LACKING):
            pause = _pause_asked(response.fields, time.time())
            permit.failed(f"it answered {status}", pause=pause)
            if self.question.fallbacks:
                raise BackendError(f"{name} answered {status}.")
        else:
            permit.answered()

    def _release(self) -> None:
        """End the lease with the engine's part, however slowly the client takes what is left of its answer.

        The record has what the engine reports by now.
        """
        self.exchange.close()
        lease = self.lease
        lease.release(whole=True, usage=self.record.reported()[1:] if lease.is_routed else NO_USAGE)

    def _note_reported(self) -> None:
        """Note what an answer that came in pieces says of itself."""
        observer, record = self.exchange.observer, self.record
        record.usage, record.tokens = observer.tokens, observer.events
        if observer.has_error and not record.code:
            record.code = BackendError.code

    # The answer as it is

    def _pass_on(self, body: RequestBody) -> None:
        """Passes the request on, its body as it is given here, and the answer back."""
        question, reply, exchange = self.question, self.reply, self.exchange
        method, route = question.context.request.method, question.context.route
        try:
            response = self._ask(method, request_head(question, self.lease), body)
            if route.translated and response.status in LACKING:
                raise _Lacking
            if engine_route(question.context).beat == "responses" and response.status == 200:
                self._note_stored()
            if exchange.whole and reply.form != "event" and not exchange.is_events:
                self.record.said = data = exchange.data
                declared = None if response.body == "none" else len(data)
                head = reply.answer_head(response, length=declared)
                self._release()
                reply.pass_on(response.status, head + data, "cut")
                if reply.capture:
                    reply.capture.add(data)
            else:
                self._stream()
        except BaseException:
            exchange.close()
            raise

    def _note_stored(self) -> None:
        """Remembers which engine has the answer that begins now."""
        question, exchange = self.question, self.exchange
        ends_itself = exchange.response.body != "close" or exchange.is_events
        if not exchange.whole and ends_itself:
            exchange.read_on(has_answer_id)
        if id := answer_id(exchange.data):
            self._shared.stored.keep(id, question.target.model, self.lease.backend.name, question.context.key)

    def _stream(self) -> None:
        """A body as it comes, behind the engine's head, or in the stream that was begun while the model
        loaded: then what the engine says must be events.
        """
        exchange, reply = self.exchange, self.reply
        response, head, goes_on = exchange.response, b"", reply.form == "event"
        events = exchange.is_events
        length = response.length if response.body == "length" and not (goes_on or events) else None
        if goes_on and response.status >= 300:
            raise _engine_error(self.question.target.model, response.status, exchange.content(WHOLE))
        if goes_on and not events:
            self._send_whole_as_events()
            return
        chunked = length is None and reply.chunked
        if not goes_on:
            reply.keep = reply.keep and (chunked or length is not None)
        first = exchange.begin(
            chunked=chunked,
            must_end=events and response.status < 300 and self.question.context.route.beat != "none",
            copied=CAPTURED_BYTES + 1 if reply.capture else 0,
        )
        reply.answered = bool(first)
        if not goes_on:
            head = reply.answer_head(response, length=length, chunked=chunked)
        if exchange.has_ended:
            self._note_reported()
            self._release()
        if goes_on:
            reply.send(first)
        else:
            reply.pass_on(response.status, head + first, "event" if events else "cut")
        self._finish(exchange.stream())

    def _send_whole_as_events(self) -> None:
        """Send a whole answer into a stream that was begun while the model loaded, as its only event."""
        exchange, reply, record = self.exchange, self.reply, self.record
        body = exchange.content(self.question.context.access.config.max_body)
        kind = exchange.response.fields.get(b"content-type", b"")
        is_text = kind.startswith((b"application/json", b"text/plain"))
        beat = self.question.context.route.beat
        events = None
        if is_text:
            events = anthropic.as_events(body) if beat == "messages" else api.as_events(beat, body)
        if events is None:
            raise _engine_error(self.question.target.model, exchange.response.status, body)
        record.said = body
        self._release()
        reply.answered = True
        reply.event(events)
        reply.end()

    def _finish(self, outcome: StreamOutcome) -> None:
        """The end of a body that the pump has moved: the bytes that are left, or what went wrong."""
        exchange, reply, record, end = self.exchange, self.reply, self.record, outcome.end
        if end is End.CLOSED and not self._is_cut_short():
            end = End.COMPLETE
        if reply.capture:
            reply.capture.add(exchange.copied)
        record.sent += outcome.sent
        reply.answered = reply.answered or outcome.sent > 0
        self._note_reported()
        if end is End.COMPLETE:
            self._release()
            if outcome.rest:
                reply.send(outcome.rest)
            return
        fits = reply.form == "event" and outcome.aligned
        reply.broke_off(exchange.last if fits else None)
        engine = f"The engine of {self.question.target.model}"
        match end:
            case End.CLIENT_GONE:
                raise ClientGone("The client left its stream.")
            case End.CLIENT_STALLED:
                raise ClientStalled(f"The client read nothing for {self._shared.relay.client_timeout:g} s.")
            case End.SEVERED:
                raise self.lease.severed_error()
            case End.SILENT:
                raise Silent(f"{engine} went silent in the middle of its answer.")
            case End.DIED | End.CLOSED:
                raise BrokenOff(f"{engine} broke off its answer.")

    def _is_cut_short(self) -> bool:
        """Return whether a body of which neither its framing nor a last event says so ended too early.

        A stream of events does where its API has a last event, and a JSON text that is not whole. Of
        others it counts what became of the engine.
        """
        observer, response = self.exchange.observer, self.exchange.response
        if isinstance(observer, SseObserver):
            if self.question.context.route.beat != "none":
                return True
        elif _is_json(response) and (observer.is_open if response.status >= 300 else observer.is_json_cut):
            return True
        return not self.lease.permit and self._shared.crash_under(self.lease.ticket) is not None

    # Websockets

    def _tunnel(self) -> None:
        """The lease lasts as long as the websocket is open."""
        reply = self.reply
        with self.exchange as exchange:
            head = request_head(self.question, self.lease, UPGRADE)
            response = self._ask("GET", head, b"", upgrade=True)
            reply.keep, reply.answered = False, True
            if response.status != 101:
                body = exchange.content(WHOLE)
                head = reply.answer_head(response, length=len(body))
                self._release()
                reply.pass_on(response.status, head + body, "cut")
                return
            reply.pass_on(101, reply.switched_head(response) + exchange.data, "frame")
            ended, error = exchange.tunnel(reply.client.take_rest(), lambda: reply.context.may_go_on)
            self.record.sent += ended.passed
            if not ended.open:
                reply.broke_off(None)
            if error:
                raise error

    # Translations

    def _translate(self, translation: Translation) -> None:
        """Asks the engine in its own words, and says the answer in the client's, in this thread."""
        question, lease, reply, record = self.question, self.lease, self.reply, self.record
        answer, path, key = translation.answer, translation.path, question.context.key
        answer.begun(time.time(), record.waited)
        if translation.keep_alive and (key is None or key.admin):
            lease.keep_alive(translation.keep_alive)
        if not path:
            lease.release(whole=True)
            reply.whole(200, [JSON], answer.whole(b"", time.time()))
            return
        model = question.target.model
        translated = translation.body(question.known_as(lease.backend))
        body = json_body(question, lease.backend, translated, path)
        with self.exchange as exchange:
            response = self._ask("POST", translated_head(question, lease, path), body)
            if response.status >= 300:
                raise _refusal(model, path, response.status, exchange.content(WHOLE))
            try:
                if translation.stream:
                    self._say_stream(translation)
                else:
                    self._say_whole(translation)
            finally:
                self._note_reported()

    def _say_whole(self, translation: Translation) -> None:
        question, exchange = self.question, self.exchange
        content = exchange.content(question.context.access.config.max_body)
        if not content:  # an answer's words for nothing are those of a question that asks for nothing
            raise BackendError(f"The engine of {question.target.model} answered with nothing.")
        translated = translation.answer.whole(content, time.time())
        self._note_reported()
        self._release()
        self.reply.whole(200, [JSON], translated)

    def _say_stream(self, translation: Translation) -> None:
        exchange, reply, answer = self.exchange, self.reply, translation.answer
        if not exchange.is_events:
            self._say_whole_as_stream(translation)
            return
        if reply.form == "answer":
            reply.begin()
        for piece in exchange.pieces():
            translated = answer.feed(piece, time.time())
            reply.answered = reply.answered or bool(translated)
            if exchange.has_ended:
                translated += answer.finish(time.time())
                self._note_reported()
                self._release()
            reply.event(translated)
        reply.end()

    def _say_whole_as_stream(self, translation: Translation) -> None:
        """Translate a whole answer of an engine that does not stream into the stream that was asked for."""
        exchange, reply, answer = self.exchange, self.reply, translation.answer
        content = exchange.content(self.question.context.access.config.max_body)
        beat = "chat" if translation.path.endswith("/chat/completions") else "completion"
        events = api.as_events(beat, content)
        if events is None:
            if error := api.error_said(content):
                raise BackendError(f"The engine reports an error: {error['message']}")
            raise BackendError(f"The engine of {self.question.target.model} did not answer with a stream.")
        now = time.time()
        translated = answer.feed(events, now) + answer.finish(now)
        self._note_reported()
        self._release()
        if reply.form == "answer":
            reply.begin()
        reply.answered = True
        reply.event(translated)
        reply.end()

    # Two stages

    def prefill(self) -> Question:
        """The first of two stages: the question of the second. What fails here the client has not seen."""
        question, lease = self.question, self.lease
        body, translation = question.body, question.translation
        assert isinstance(body, (bytes, bytearray))
        document = translation.question if translation else parse(body)
        model = question.target.model
        whole = translation.body(model) if translation else body
        own = json_body(question, lease.backend, whole, question.path)
        assert isinstance(own, (bytes, bytearray))
        first = completions.for_prefill(
            document if own is body else parse(own), question.known_as(lease.backend)
        )
        with self.exchange as exchange:
            response = exchange.ask("POST", translated_head(question, lease, question.path), first)
            content = exchange.content(question.context.access.config.max_body)
        lease.release(whole=True, usage=tokens_in(content)[1:])
        if response.status >= 300:
            raise _engine_error(model, response.status, content)
        try:
            document = completions.for_decode(document, content)
        except ValueError as error:
            raise BackendError(f"{lease.backend.name} gave no answer that can be read: {error}.") from None
        if translation:
            return replace(question, translation=replace(translation, question=document))
        return replace(question, body=written(document))


def _is_json(response: http1.Response) -> bool:
    """Return whether an answer is a JSON text that can be read here."""
    kind = response.fields.get(b"content-type", b"").partition(b";")[0].strip().lower()
    is_json = kind in (b"application/json", b"text/json") or kind.endswith(b"+json")
    return is_json and b"content-encoding" not in response.fields


def _engine_error(model: str, status: int, body: bytes) -> MuxError:
    """An engine's answer for a client that expects events; a refusal is passed on in the engine's words."""
    error = api.error_said(body) if 400 <= status < 500 else None
    if error is None:
        text = body[:MAX_QUOTED].decode("utf-8", "replace")
        return QuotedFailure(f"The engine of {model} answered {status}", text)
    message = error.pop("message")
    assert isinstance(message, str)
    fields = {key: value[:MAX_QUOTED] if isinstance(value, str) else value for key, value in error.items()}
    return RefusedByEngine(message[:MAX_QUOTED], status=status, said=fields)


def _refusal(model: str, path: str, status: int, body: bytes) -> MuxError:
    """An engine's answer to a question that is not the client's own."""
    error = api.error_said(body)
    if status == 501 or (status in LACKING and error is None):
        why = error["message"] if error else f"it has no {path}"
        return BadRequest(f"the engine of {model} cannot do this: {why}"[:MAX_QUOTED], status=501)
    return _engine_error(model, status, body)


def _pause_asked(fields: Mapping[bytes, bytes], now: float) -> float | None:
    """The seconds for which a server wants to be left alone, as its answer says; ``now``: Unix time."""
    text = fields.get(b"retry-after", b"").decode("latin-1").strip()
    if re.fullmatch(r"[0-9]+(\.[0-9]+)?", text):
        return float(text)
    try:
        return parsedate_to_datetime(text).timestamp() - now
    except (ValueError, OverflowError):
        return None
