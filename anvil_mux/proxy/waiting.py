"""A request that waits for its model looks at its client, and shows that it is alive.

One whose model has a fallback leaves after the time that it may wait, and one for a server elsewhere when its
circuit opens.

A stream is begun after a grace, with comment lines as keep-alive; from then on every failure is an event in
the stream. Any other request is silent until shortly before its client gives up.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from anvil_mux.errors import FellBack, ModelLoading, Overloaded
from anvil_mux.multiplexer.multiplexer import Multiplexer
from anvil_mux.protocol import api, http1
from anvil_mux.proxy.asked import Question
from anvil_mux.proxy.reply import Reply

FOREVER = float("inf")


@dataclass(frozen=True, slots=True)
class Patience:
    """How a request waits for its model; seconds."""

    grace: float = 5.0
    """The time before a stream is begun: a quick wake-up or failure keeps its true status."""
    comment_every: float = 10.0
    chunk_every: float = 60.0
    silence: float = 240.0
    """The longest that a request without a stream is left without an answer (Node's clients end at 300)."""
    margin: float = 5.0
    """How long before the client's own limit it is answered."""


class Waiting:
    """One request's wait in a queue."""

    __slots__ = (
        "_beat_at",
        "_chunk_at",
        "_every",
        "_limit",
        "_mux",
        "_patience",
        "_question",
        "_reply",
        "_since",
    )

    def __init__(self, question: Question, reply: Reply, patience: Patience, mux: Multiplexer) -> None:
        self._question = question
        self._reply = reply
        self._mux = mux
        self._patience = patience
        self._since: float | None = None
        self._beat_at = self._chunk_at = self._limit = self._every = 0.0

    def tend(self, now: float) -> None:
        """Look at the client, a few times a second: ClientGone, ModelLoading, or a sign of life for it."""
        self._reply.stay()
        if self._since is None:
            self._plan(now)
        self._turn_to_fallback(now)
        if self._question.stream:
            if now >= self._beat_at or now >= self._chunk_at:
                self._beat(now)
        elif now >= self._limit:
            model = self._question.target.model
            if self._mux.overview.is_ready(model):
                raise Overloaded(f"overloaded: {model} has no place for this request yet. Try again.")
            text = f"{model} is still loading. Send the request again to wait on."
            raise ModelLoading(text, retry_after=self._mux.overview.eta(model))

    def _turn_to_fallback(self, now: float) -> None:
        """Raise if the request has waited for as long as it may before its model's fallback answers."""
        question = self._question
        if question.target.external:
            self._mux.circuits.check(question.target.external)
        if question.after is not None and self._since is not None and now - self._since >= question.after:
            raise FellBack(
                f"{question.target.model} could not serve this request within {question.after:g} s."
            )

    def _plan(self, now: float) -> None:
        patience = self._patience
        own = _own_limit(self._question.asked.request)
        self._since = now
        self._every = min(patience.comment_every, own / 2)
        self._beat_at = now + min(patience.grace, own / 2)
        self._chunk_at = max(now + patience.chunk_every, self._beat_at)
        silence = min(own, patience.silence)
        self._limit = now + max(silence - patience.margin, silence / 2)

    def _beat(self, now: float) -> None:
        asked, model = self._question.asked, self._question.target.model
        text = api.comment(f"anvil-mux {self._mux.overview.how_far(model)}", asked.api)
        if now >= self._chunk_at:
            self._chunk_at = now + self._patience.chunk_every
            text += api.beat(asked.route.beat, model, asked.id, int(time.time()))
        self._beat_at = now + self._every
        if self._reply.form == "answer":
            self._reply.begin()
        self._reply.event(text)


def _own_limit(request: http1.Request) -> float:
    """How long the client waits for bytes, as the SDKs of OpenAI and Anthropic say: Python's, else Node's."""
    said = request.fields.get(b"x-stainless-read-timeout") or request.fields.get(b"x-stainless-timeout", b"0")
    try:
        seconds = float(said)
    except ValueError:
        return FOREVER
    return seconds if seconds > 0 else FOREVER
