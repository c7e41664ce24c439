"""One request under one lease: its engine is asked in words that it understands, its client told the answer.

Most answers pass as they are. A question in an API that the engine lacks is translated, there and back. Of
two stages the first fills in the question of the second. A websocket becomes a tunnel. What comes between is
told in the form that still fits: before a byte as an error, among events as an event and a cut.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from anvil_mux.config import rewrite
from anvil_mux.config.config import Backend, Config
from anvil_mux.errors import (
    BackendError,
    BadRequest,
    ClientGone,
    ClientStalled,
    MuxError,
    RefusedByEngine,
    Severed,
    with_log,
)
from anvil_mux.host.engine import api_key
from anvil_mux.multiplexer import Lease, Multiplexer
from anvil_mux.protocol import anthropic, api, http1, naming, ollama, stages
from anvil_mux.protocol.api import written
from anvil_mux.protocol.completions import Translation, parse
from anvil_mux.proxy import heads, stored_responses
from anvil_mux.proxy.pump import End
from anvil_mux.proxy.relay import (
    WHOLE,
    BrokenOff,
    Exchange,
    Failed,
    Relay,
    RequestBody,
    Silent,
    Unanswered,
    Unreachable,
)
from anvil_mux.proxy.reply import JSON, Call
from anvil_mux.proxy.spool import Spool
from anvil_mux.proxy.stored_responses import StoredResponses
from anvil_mux.proxy.tunnel import BROKEN, RESTARTED, good_bye

TRANSLATE = {**ollama.TRANSLATE, **anthropic.TRANSLATE}
"""Path -> how a body that is asked for there becomes a question that every engine understands."""
LACKING = (404, 405, 501)
"""How engines answer to a route that they do not have."""
MAX_QUOTED = 2000
"""Bytes of an engine's error that an error event repeats."""
UPGRADE = {b"connection": b"Upgrade", b"upgrade": b"websocket"}
Body = bytes | bytearray | Spool


class _Lacking(Exception):
    """The engine does not have the route."""


class Forwarder:
    """Asks engines for those who hold a lease. Any thread; the dispatcher alone calls ``reconfigure``."""

    def __init__(self, mux: Multiplexer, relay: Relay, kept: StoredResponses) -> None:
        self._mux = mux
        self._relay = relay
        self._kept = kept

    def reconfigure(self, config: Config, *, hides_keys: bool) -> None:
        """By this engines are asked from now on; called once before the first."""
        self._max_body = config.max_body
        self._hides_keys = hides_keys
        """Clients' keys are ours, so that engines get their own instead."""
        self._lacking: set[tuple[str, str] | None] = set()
        """(backend, path) of routes that engines turned out not to have; changed by atomic operations."""
        self._authorizations: dict[str, tuple[Backend, bytes]] = {}
        """Backend -> its description, and what an engine so described is shown."""

    def ask(
        self, call: Call, lease: Lease, named: str | None, body: Body, span: tuple[int, int] | None
    ) -> None:
        """Asks the engine in the client's words, or else in its own."""
        route, backend = call.route, lease.backend
        known_as = backend.served_model or call.model
        if route.model_in == "upstream":
            named = known_as
        lacks, lacking = None, self._lacking  # what is found out belongs to the configuration of now
        if call.translation is None:
            lacks = (backend.name, route.path) if route.translated else None
            if lacks not in lacking:
                said = _rewritten(body, backend) if route.model_in in ("json", "path") else body
                length, pieces = _renamed(said, named, known_as, span)
                try:
                    return self.forward(call, lease, length, pieces)
                except _Lacking:
                    pass
            assert isinstance(body, (bytes, bytearray))
            call.translation = TRANSLATE[route.path](parse(body))
        self._translate(call, lease, call.translation, known_as)
        if lacks:
            lacking.add(lacks)
        return None

    def forward(self, call: Call, lease: Lease, length: int, body: RequestBody) -> None:
        """Passes the request on, its body as it is given here, and the answer back."""
        route = call.route
        if route.upgrades:
            self._tunnel(call, lease)
            return
        exchange = Exchange(self._relay, lease, call.client.socket)
        try:
            head = heads.request_head(call, lease, length, self._authorization(lease.backend))
            response = exchange.ask(call.request.method, head, body)
            call.first_byte = time.monotonic() - call.since
            if route.translated and response.status in LACKING:
                raise _Lacking
            if route.beat == "responses" and response.status == 200:
                self._note_answer(call, lease, exchange, response)
            if call.began:
                self._continue(call, lease, exchange, response)
            elif exchange.whole:
                call.status = response.status
                declared = None if response.body == "none" else len(exchange.data)
                call.send(heads.response_head(call, response, length=declared) + exchange.data)
                call.said = exchange.data
            else:
                self._stream(call, lease, exchange, response)
        finally:
            exchange.close()

    def _note_answer(self, call: Call, lease: Lease, exchange: Exchange, response: http1.Response) -> None:
        """Remembers which engine has the answer that begins now."""
        if not exchange.whole and _is_events(response):
            exchange.read_on(stored_responses.says_no_more)
        if id := stored_responses.id_in(exchange.data):
            self._kept.keep(id, call.model, lease.backend.name, call.request.key)

    def _tunnel(self, call: Call, lease: Lease) -> None:
        """A websocket: the lease lasts as long as it is open."""
        with Exchange(self._relay, lease, call.client.socket) as exchange:
            head = heads.request_head(call, lease, 0, self._authorization(lease.backend), UPGRADE)
            response = exchange.ask("GET", head, b"", upgrade=True)
            call.first_byte = time.monotonic() - call.since
            call.status, call.keep, call.answered = response.status, False, True
            if response.status != 101:
                body = exchange.content(response, WHOLE)
                call.send(heads.response_head(call, response, length=len(body)) + body)
                return
            call.send(
                http1.forward_response_head(
                    response, connection=b"Upgrade", extra=[(b"Upgrade", b"websocket"), *call.own_headers]
                )
                + exchange.data
            )
            ended, error = exchange.tunnel(call.client.take_rest())
            call.sent += ended.passed
            if isinstance(error, ClientGone):
                raise error
            if error:
                if isinstance(error, Failed):
                    error = self.judged(call, lease, error)
                call.code = error.code
                if ended.open:
                    code = RESTARTED if lease.severed else BROKEN
                    call.send(good_bye(code, error.message))
                    call.client.part()

    def _translate(self, call: Call, lease: Lease, asked: Translation, known_as: str) -> None:
        """Asks the engine in its own words, and says the answer in the client's, in this thread."""
        asked.answer.begun(time.time(), call.waited)
        if not asked.path:
            call.send_own(200, [JSON], asked.answer.whole(b"", time.time()))
            return
        body = _rewritten(asked.body(known_as), lease.backend)
        with Exchange(self._relay, lease, call.client.socket) as exchange:
            own = self._authorization(lease.backend)
            head = heads.translated_head(call, lease, asked.path, len(body), own)
            response = exchange.ask("POST", head, body)
            call.first_byte = time.monotonic() - call.since
            if response.status >= 300:
                raise _refusal(call.model, asked.path, response.status, exchange.content(response, WHOLE))
            try:
                self._say(call, exchange, response, asked)
            finally:
                call.said, call.events = exchange.passed.said, exchange.passed.events

    def _say(self, call: Call, exchange: Exchange, response: http1.Response, asked: Translation) -> None:
        """An answer as it comes, or all at once."""
        if not asked.stream:
            said = asked.answer.whole(exchange.content(response, self._max_body), time.time())
            call.send_own(200, [JSON], said)
            return
        if not _is_events(response):
            raise BackendError(f"The engine of {call.model} did not answer with a stream.")
        if not call.began:
            call.begin()
        for piece in exchange.pieces(response):
            said = asked.answer.feed(piece, time.time())
            call.answered = call.answered or bool(said)
            call.send_event(said)
        call.send_event(asked.answer.finish(time.time()))
        call.end()

    def _stream(self, call: Call, lease: Lease, exchange: Exchange, response: http1.Response) -> None:
        call.status = response.status
        length = response.length if response.body == "length" else None
        chunked = length is None and call.chunked
        call.keep = call.keep and (chunked or length is not None)
        first = exchange.begin(response, chunked=chunked)
        call.answered = bool(first)
        call.send(heads.response_head(call, response, length=length, chunked=chunked) + first)
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
        call.said, call.events = exchange.passed.said, exchange.passed.events
        error: MuxError
        match end:
            case End.COMPLETE:
                return
            case End.CLIENT_GONE:
                raise ClientGone("The client left its stream.")
            case End.UNREAD:
                raise ClientStalled(f"The client took nothing for {self._relay.client_timeout:g} s.")
            case End.SEVERED:
                error = lease.severed_error()
            case End.STALLED:
                error = Silent(f"The engine of {call.model} went silent within its answer.")
            case End.DIED:
                error = BrokenOff(f"The engine of {call.model} broke off its answer.")
        call.answered = call.answered or exchange.streamed > 0
        if events and not call.answered and end is not End.STALLED:
            call.began = True
            raise error
        if isinstance(error, Failed):
            error = self.judged(call, lease, error)
        call.keep, call.code = False, error.code
        if events and exchange.aligned:
            call.break_off(error, last=exchange.last_payload)

    def judged(self, call: Call, lease: Lease, error: MuxError) -> MuxError:
        """What a failure comes to, with what is found of the engine; Unreachable: it may be sent again."""
        crash = self._mux.unreachable(lease)
        seen = call.answered or not self._mux.has_another(lease)
        if crash:
            call.crashes = (*call.crashes, crash)
            text = with_log(f"{error.message.rstrip('.')}: {crash.backend} {crash.why}.", crash.log)
            unseen = isinstance(error, (Unreachable, Unanswered))
            return Unreachable(text) if unseen or not seen else BrokenOff(text)
        if lease.taken_back:
            call.work = call.work._replace(stream=False)  # once is enough
        elif seen or not isinstance(error, Severed):
            return error
        return Unreachable(error.message)

    def prefill(self, call: Call, lease: Lease, body: Body) -> Body:
        """The first of two stages: the body of the second. What fails here the client has not seen."""
        assert isinstance(body, (bytes, bytearray))
        asked = call.translation.question if call.translation else parse(body)
        with lease:
            try:
                status, said = self._ask_prefill(call, lease, asked)
            except (Failed, Severed) as error:
                raise self.judged(call, lease, error) from None
            lease.release(whole=True, usage=api.tokens_said(said)[1:])
        if status >= 300:
            raise _engine_error(call.model, status, said)
        try:
            asked = stages.second(asked, said)
        except (ValueError, RecursionError) as error:
            raise BackendError(f"{lease.backend.name} gave no answer that can be read: {error}.") from None
        if call.translation:
            call.translation = replace(call.translation, question=asked)
            return body
        return written(asked)

    def _ask_prefill(self, call: Call, lease: Lease, asked: dict[str, Any]) -> tuple[int, bytes]:
        body = stages.first(asked, lease.backend.served_model or call.model)
        with Exchange(self._relay, lease, call.client.socket) as exchange:
            own = self._authorization(lease.backend)
            head = heads.translated_head(call, lease, call.path, len(body), own)
            response = exchange.ask("POST", head, body)
            return response.status, exchange.content(response, self._max_body)

    def _authorization(self, backend: Backend) -> bytes | None:
        """What its engine is shown in place of the client's key (b"": none); None: the client's."""
        if not self._hides_keys:
            return None
        known = self._authorizations.get(backend.name)
        if known is None or known[0] is not backend:
            own = api_key(backend.service)
            known = self._authorizations[backend.name] = (backend, b"Bearer " + own.encode() if own else b"")
        return known[1]


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


def _refusal(model: str, path: str, status: int, body: bytes) -> MuxError:
    """An engine's answer to a question that is not the client's own."""
    said = api.error_said(body)
    if status == 501 or (status in LACKING and said is None):
        why = said["message"] if said else f"it has no {path}"
        return BadRequest(f"the engine of {model} cannot do this: {why}"[:MAX_QUOTED], status=501)
    return _engine_error(model, status, body)


def _rewritten(body: Body, backend: Backend) -> Body:
    """A body of JSON as the service of ``backend`` is to get it."""
    if not (backend.strip or backend.set) or isinstance(body, Spool):
        return body
    return rewrite.rewritten(body, backend.strip, dict(backend.set))


def _renamed(
    body: Body, named: str | None, model: str, span: tuple[int, int] | None
) -> tuple[int, RequestBody]:
    """The length and the pieces of ``body`` with the name that the engine knows its model by."""
    if named == model:
        return len(body), body
    if not isinstance(body, Spool):
        pieces = naming.model_replaced(body, model, span) if body else ()
        return sum(map(len, pieces)), pieces
    if span:
        body.replace(span, model.encode())
    return len(body), body
