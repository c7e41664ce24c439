"""The writer of an answer: everything that a client is sent for one request.

It knows what was sent already, and so how an error can still be told: as an answer of its own, as an event in
a stream that is then cut, as the frame that closes a websocket, or only by the cut.

With ``capture`` a copy of the question and of the answer is made (``Capture``), for people who look for a
mistake. What looks like a key is replaced before anything is kept. Heads are not kept, nor are forms (audio,
images) and what is said through a websocket.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from email.utils import formatdate
from functools import lru_cache
from typing import Literal

from anvil_mux.config import keys
from anvil_mux.errors import ClientGone, MuxError, Severed, with_log
from anvil_mux.protocol import api, http1
from anvil_mux.protocol.http1 import Field
from anvil_mux.proxy.access import RequestContext
from anvil_mux.proxy.client import Client, Spool
from anvil_mux.proxy.connections import has_left
from anvil_mux.proxy.question import QuestionBody
from anvil_mux.proxy.tunnel import BROKEN, RESTARTED, good_bye
from anvil_mux.telemetry.accesslog import Served

JSON = (b"Content-Type", b"application/json")
TEXT = (b"Content-Type", b"text/plain; charset=utf-8")
FRESH = (b"Cache-Control", b"no-store")
UNBUFFERED = [(b"Cache-Control", b"no-cache"), (b"X-Accel-Buffering", b"no")]
READABLE = [(b"Access-Control-Expose-Headers", b"*"), (b"Vary", b"Origin")]
"""The fields that let pages of another origin read an answer, after the one that names it."""

Form = Literal["answer", "event", "frame", "cut"]
"""How an error is told: nothing was sent yet; a stream of events has begun; a websocket is open; not at
all."""
CAPTURED_BYTES = 64 << 10
"""Bytes of a question, and of an answer, that are kept."""
HIDDEN = "***"

_SECRET = re.compile(
    r'("[\w.-]*(?:api[_-]?key|authorization|password|passwd|secret|(?:access|auth|bearer)[_-]?token)"\s*:\s*)'
    r'"(?:[^"\\]|\\.)*(?:"|\\?$)',
    re.I,
)
"""The member of a JSON object whose value is a secret by its name; the text may end within it."""
_TOKEN = re.compile(r"\b(Bearer\s+)[\w.~+/-]{8,}=*|\b(sk-|hf_|ghp_)[\w-]{8,}", re.I)


@dataclass(slots=True, eq=False)
class Reply:
    """Writes the answer to one request. Used by the request's thread."""

    client: Client
    context: RequestContext
    record: Served
    keep: bool
    """Whether the connection can be used again."""
    form: Form = "answer"
    answered: bool = False
    """Whether the client was sent something of an engine's answer."""
    routed: str = ""
    """The replica that answers, of several, and why."""
    chosen: str = ""
    """The model that answers, where the request's name stands for several, and on which conditions."""
    fell_back: str = ""
    """The model that answers instead of the one that was asked for, and why."""
    capture: Capture | None = None
    """A copy of what is asked and answered, if that is wanted."""
    last: bytes = b""
    """The last bytes of content, if an error is to follow them."""

    # Heads

    @property
    def chunked(self) -> bool:
        """Whether the client understands chunks."""
        return self.context.request.version == (1, 1)

    def connection(self) -> bytes | None:
        """The Connection header of the answer, where one is needed."""
        if not self.keep:
            return b"close"
        return None if self.context.request.version == (1, 1) else b"keep-alive"

    def own_headers(self) -> list[Field]:
        """The fields that every answer carries."""
        context = self.context
        id = context.id.encode("ascii")
        headers = [(b"X-Request-ID", id)]
        if context.api == "anthropic":
            headers.append((b"request-id", id))
        if self.routed:
            headers.append((b"X-Anvil-Backend", self.routed.encode("ascii", "replace")))
        if self.chosen:
            headers.append((b"X-Anvil-Model", self.chosen.encode("ascii", "replace")))
        if self.fell_back:
            headers.append((b"X-Anvil-Fallback", self.fell_back.encode("ascii", "replace")))
        if context.reader:
            headers += [(b"Access-Control-Allow-Origin", context.reader), *READABLE]
        return headers

    def answer_head(
        self, response: http1.Response, *, length: int | None = None, chunked: bool = False
    ) -> bytes:
        """The head of an engine's answer, as the client gets it."""
        own = self.own_headers()
        if b"date" not in response.fields:
            own.append(date())
        return http1.forward_response_head(
            response, length=length, chunked=chunked, connection=self.connection(), extra=own
        )

    def switched_head(self, response: http1.Response) -> bytes:
        """The head after which a websocket is open."""
        extra = [(b"Upgrade", b"websocket"), *self.own_headers()]
        return http1.forward_response_head(response, connection=b"Upgrade", extra=extra)

    # Answers

    def send(self, data: bytes) -> None:
        self.client.send(data)
        self.record.sent += len(data)

    def pass_on(self, status: int, data: bytes, then: Form) -> None:
        """Sends the head of an engine's answer, and what is here of its body; ``then`` is how errors are
        told."""
        self.record.status, self.form = status, then
        self.send(data)

    def whole(self, status: int, headers: Sequence[Field], body: bytes) -> None:
        """Sends an answer that no engine made."""
        self.record.status, self.form = status, "cut"
        self.keep = self.keep and self.client.can_resume()
        if self.capture:
            self.capture.add(body)
        connection = self.connection()
        if connection is not None:
            headers = [*headers, (b"Connection", connection)]
        head_only = self.context.request.method == "HEAD"
        self.send(http1.response(status, [*headers, date(), *self.own_headers()], body, head_only=head_only))

    def json(self, value: object, *, status: int = 200, indent: int | None = None) -> None:
        """Sends the JSON of a value that is of this moment."""
        self.fresh(JSON, json.dumps(value, indent=indent).encode("ascii") + b"\n", status)

    def fresh(self, kind: Field, body: bytes, status: int = 200) -> None:
        """Sends what is of this moment, and not to be kept."""
        self.whole(status, [kind, FRESH], body)

    # Streams of our own

    def begin(self) -> None:
        """Sends the head of a stream of our own; from now on failures are told within it."""
        self.keep = self.keep and self.chunked and self.client.can_resume()
        self.form, self.record.status = "event", 200
        headers = [
            (b"Content-Type", api.stream_type(self.context.api)),
            *UNBUFFERED,
            date(),
            *self.own_headers(),
        ]
        self.send(http1.stream_head(headers, chunked=self.chunked, connection=self.connection()))

    def event(self, data: bytes) -> None:
        """Writes into a stream that has begun."""
        if data:
            if self.capture:
                self.capture.add(data)
            self.send(http1.chunk(data) if self.chunked else data)

    def end(self) -> None:
        """Ends a stream that has begun as it should end."""
        if self.chunked:
            self.send(http1.LAST_CHUNK)

    # Failures

    def stay(self) -> None:
        """Raise ClientGone if nobody waits for the answer any more."""
        if has_left(self.client.socket):
            raise ClientGone("The client closed its connection.")

    def left(self, gone: ClientGone) -> None:
        """Note that the client has left; one that only sends no more sees that its answer is not whole."""
        self.keep, self.record.status, self.record.code = False, gone.status, gone.code
        if self.form in ("cut", "event") and not self.chunked:
            self.client.break_off()

    def broke_off(self, last: bytes | None) -> None:
        """Note an early end. ``last``: of the content that was sent; None: no event fits behind it."""
        self.form, self.last = ("cut", b"") if last is None else ("event", last)

    @property
    def may_go_on(self) -> bool:
        """Whether the client has seen nothing of an engine's answer, so that another one may give it."""
        return not self.answered and self.form in ("answer", "event")

    def _visible(self, error: MuxError) -> MuxError:
        """Return the error with the text that this client may read."""
        text = error.message
        if error.discreet and self.context.key and not self.context.key.sees_all:
            text = error.discreet
        elif error.log and self.context.reads_logs:
            text = with_log(text, error.log)
        if text != error.message:
            error = error.copy()
            error.message = text
        return error

    def refuse(self, error: MuxError, headers: Sequence[Field] = ()) -> None:
        """Tells ``error`` in the form that still fits; the client may be gone."""
        error = self._visible(error)
        self.record.code = error.code
        self.keep = self.keep and self.form == "answer"
        try:
            match self.form:
                case "answer":
                    body = api.error_body(self.context.api, error, self.context.id)
                    self.whole(error.status, [JSON, *api.error_headers(error), *headers], body)
                case "event":
                    context = self.context
                    event = api.error_event(context.api, context.route.beat, error, context.id)
                    self.event(event if _ends_event(self.last) else b"\n\n" + event)
                case "cut" if not self.chunked:
                    self.client.break_off()
                case "frame":
                    self.send(good_bye(RESTARTED if isinstance(error, Severed) else BROKEN, error.message))
                    self.client.linger()
        except ClientGone:
            self.keep = False


def date() -> Field:
    """The field that says when an answer was given."""
    return b"Date", _date_of(int(time.time()))


@lru_cache(2)
def _date_of(second: int) -> bytes:
    return formatdate(second, usegmt=True).encode("ascii")


def _ends_event(last: bytes) -> bool:
    return not last or last.endswith((b"\n\n", b"\r\n\r\n", b"\r\r"))


class Capture:
    """One request's question and answer, while it is served. Used by the request's thread."""

    __slots__ = ("_answer", "_left", "_question", "is_form", "is_question_cut")

    def __init__(self, body: QuestionBody) -> None:
        """``body``: the question's."""
        self.is_form = isinstance(body, Spool)
        self._question = b"" if isinstance(body, Spool) else bytes(body[:CAPTURED_BYTES])
        self.is_question_cut = not self.is_form and len(body) > CAPTURED_BYTES
        self._answer: list[bytes] = []
        self._left = CAPTURED_BYTES + 1

    def add(self, data: bytes) -> None:
        """Take more of the answer's content."""
        if self._left > 0 and data:
            self._answer.append(bytes(data[: self._left]))
            self._left -= len(self._answer[-1])

    def as_json(self, request: http1.Request) -> dict[str, object]:
        """Return the parts that are kept of it, without keys."""
        shown = list(keys.shown(request.fields))
        answer = b"".join(self._answer)
        return {
            "question": "" if self.is_form else redacted(self._question, shown),
            "question_is_cut": self.is_question_cut,
            "question_is_form": self.is_form,
            "answer": redacted(answer[:CAPTURED_BYTES], shown),
            "answer_is_cut": len(answer) > CAPTURED_BYTES,
        }


def redacted(body: bytes, shown: Iterable[bytes]) -> str:
    """A body as text, without what looks like a key; ``shown``: keys that the request's head has."""
    text = body.decode("utf-8", "replace")
    for key in shown:
        if len(key) >= keys.SHORTEST:
            text = text.replace(key.decode("latin-1"), HIDDEN)
    text = _SECRET.sub(rf'\1"{HIDDEN}"', text)
    return _TOKEN.sub(lambda found: f"{found[1] or found[2]}{HIDDEN}", text)
