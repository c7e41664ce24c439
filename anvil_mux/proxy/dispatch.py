"""One request for a model: its lease, what its engine makes of it, and another lease where that failed.

Only here a request is sent again. How an ``Attempt`` has ended is judged under its lease, with what the
multiplexer finds of the engine:

* The engine ended before a byte, or nothing could be sent to it: the request tries once more on a new lease.
* Where the model has other replicas, a request of which the client has seen nothing moves to one of them also
  if its engine was evicted, or ended within what only we had read, or if it was taken back for a better one.
* So does one whose host was lost, also to a backend that has to be loaded: the multiplexer knows whether one
  can be.
* Any other failure is its own: an error to its client, in the form that still fits (``reply``).
* Where a model has fallbacks, and the client has seen nothing, the request is sent to the next of these. What
  is wrong with the request itself, what somebody did to it by hand, and what may have ended an engine are
  answered as they are.

While the model is not ready the thread waits for its lease, looks at its client, and shows it that the
request is alive (``Waiting``). A stream is begun after a grace, with comment lines as keep-alive; from then
on every failure is an event in the stream. Any other request is silent until shortly before its client gives
up. One whose model has a fallback leaves after the time that it may wait, and one for a server elsewhere when
its circuit opens.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import NamedTuple

from anvil_mux.config.values import names_in
from anvil_mux.errors import (
    BackendError,
    BackendPaused,
    BadRequest,
    Cancelled,
    CheckpointFailed,
    CircuitOpen,
    Crashed,
    DoesNotFit,
    FellBack,
    Forbidden,
    GpuMemoryShort,
    GpuMissing,
    HostMemoryShort,
    HostUnavailable,
    LoadError,
    ModelLoading,
    MuxError,
    NothingResident,
    Overloaded,
    Paused,
    Severed,
    Stuck,
    Unauthorized,
    WaitedTooLong,
    WouldWaitTooLong,
)
from anvil_mux.multiplexer.multiplexer import Lease, Multiplexer, Tend
from anvil_mux.protocol import api, http1, naming
from anvil_mux.protocol.completions import TWO_STAGE_PATHS, finite
from anvil_mux.protocol.tokens import NO_TOKENS
from anvil_mux.proxy.access import FallbackStep
from anvil_mux.proxy.attempt import Attempt, Shared
from anvil_mux.proxy.client import Spool
from anvil_mux.proxy.exchange import BrokenOff, EngineUnreachable, Failed, Relay, Unanswered
from anvil_mux.proxy.question import Question, StoredResponses, heed_hint, retarget
from anvil_mux.proxy.reply import JSON, Reply
from anvil_mux.routing import prefix
from anvil_mux.routing.routing import Work
from anvil_mux.scheduler.admission import MOST_CRASHES
from anvil_mux.scheduler.slot import NO_USAGE, NO_WORK, Crash

EXPLAIN = b"x-anvil-explain"
"""The header of a request that is not to be sent on: where it would go, and why, is the answer."""
SESSION = b"x-session-id"
"""The header by which a client says which conversation a request belongs to."""
FOREVER = float("inf")
_REASONS = (
    BackendPaused,
    *(CircuitOpen, DoesNotFit, FellBack, GpuMemoryShort, GpuMissing, HostMemoryShort, HostUnavailable),
    LoadError,
    *(ModelLoading, NothingResident, Overloaded, Paused, Severed, Stuck, WaitedTooLong, WouldWaitTooLong),
    BackendError,
)
_NO_REASONS = (Crashed, CheckpointFailed)


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


class _Failure(NamedTuple):
    """The outcome of a try that failed."""

    error: MuxError
    again: bool
    """The request may be sent again."""
    crashes: tuple[Crash, ...] = ()
    """The end of its engine, if that has ended."""
    taken_back: bool = False
    """A better replica became free."""


class Dispatcher:
    """Sends requests to engines. Any thread."""

    def __init__(
        self, mux: Multiplexer, relay: Relay, stored: StoredResponses, patience: Patience | None = None
    ) -> None:
        """``patience``: instead of what the configuration says."""
        self._mux = mux
        self._stored = stored
        self._shared = Shared(relay, stored, mux.facts.doubts.raised_by)
        self._patience = patience

    def answer(self, question: Question, reply: Reply) -> None:
        """Answers ``question`` from the engine of its model; MuxError if that comes to nothing."""
        target, translation, query = question.target, question.translation, question.context.request.query
        for rule in target.rules:
            name = target.preset or target.model
            reply.chosen = f"{name}; {rule.conditions}" if rule.when else name
        if translation and translation.keep_alive == 0:
            self._answer_and_unload(question, reply)
        elif question.context.route.path == "/props" and (known := self._props(target.model, query)):
            reply.whole(200, [JSON], known)
        elif query and not naming.may_load(query) and not self._mux.overview.is_ready(target.model):
            raise BadRequest(f"{target.model} is not loaded, and autoload=false does not load it")
        elif target.chain and _may_fall_back(question):
            self._send_in_turn(question, reply)
        else:
            self._send(question, reply, [])

    def _props(self, model: str, query: str) -> bytes:
        """The /props of a model that is not loaded; empty: its engine has to say.

        Nothing is loaded to answer that, unless the client says that it wants to.
        """
        card = self._mux.overview.card(model)
        loads = "autoload=" in query and naming.may_load(query)
        is_to_ask = loads or card.context is None or self._mux.overview.is_ready(model)
        return b"" if is_to_ask else api.props(model, card)

    def _answer_and_unload(self, question: Question, reply: Reply) -> None:
        """A question in Ollama's API after which the model is unloaded; it may ask for nothing else."""
        context, translation = question.context, question.translation
        assert translation is not None
        may_unload = context.key is None or context.key.admin
        if not (translation.path or may_unload):
            raise Forbidden("this API key may not unload models: `keep_alive: 0` needs a key with `admin`")
        if translation.path:
            self.answer(replace(question, translation=replace(translation, keep_alive=None)), reply)
        else:
            reply.whole(200, [JSON], translation.answer.whole(b"", time.time()))
        if may_unload:
            self._mux.facts.unload(question.target.model, when_idle=True)

    def _send_in_turn(self, question: Question, reply: Reply) -> None:
        """Send it to its model, and if that cannot serve it to its fallbacks in turn."""
        step, *rest = question.target.chain
        crashes: list[Crash] = []
        while True:
            question = replace(question, fallbacks=tuple(rest), after=step.after if rest else None)
            try:
                return self._send(question, reply, crashes)
            except MuxError as error:
                rest = [each for each in rest if self._mux.overview.has(each.model)]
                if not rest or not reply.may_go_on or not is_reason(error):
                    raise
                step, *rest = rest
                question = _fallen_back(question, step, error, reply)

    def _send(self, question: Question, reply: Reply, crashes: list[Crash]) -> None:
        """Send it to a backend of its model, and if that comes to nothing to another.

        ``crashes``: ends of engines that it was sent to, of other models too; more are added.
        """
        context = question.context
        left = context.access.replicas[question.target.model]
        work = self._work(question) if left > 1 else NO_WORK
        if question.owner:
            work = work._replace(owner=question.owner)
        if EXPLAIN in context.request.fields:
            return self._explain(question, work, reply)
        tend = Waiting(question, reply, self._mux, self._patience).tend
        resent = False
        while failure := self._try(
            question, reply, work=work, tend=tend, crashes=tuple(crashes), resent=resent
        ):
            crashes += failure.crashes
            resent = True
            if not failure.again or (left <= 0 and len(crashes) < MOST_CRASHES):
                raise failure.error
            left -= 1
            if failure.taken_back:
                work = work._replace(stream=False)  # once is enough
        return None

    def _try(
        self,
        question: Question,
        reply: Reply,
        *,
        work: Work,
        tend: Tend,
        crashes: tuple[Crash, ...],
        resent: bool,
    ) -> _Failure | None:
        """Sends it once. ``crashes``: ends of engines that it was sent to, and was there at."""
        context, record, model = question.context, reply.record, question.target.model
        staged = model in context.access.staged and _may_be_staged(question)
        since = time.monotonic()
        try:
            lease = self._mux.lease(
                model,
                tend,
                work,
                key=context.key,
                staged=staged,
                crashes=crashes,
                resent=resent,
                request=context.id,
                never_swaps=question.target.never_swaps,
            )
        except NothingResident:
            record.waited += time.monotonic() - since
            raise self._nothing_resident(question) from None
        except MuxError:
            record.waited += time.monotonic() - since
            raise
        whole, record.said, record.usage, tried = False, b"", NO_TOKENS, lease
        try:  # as `with lease` does, in half the time
            record.waited += lease.waited
            record.backend = lease.backend.name
            heed_hint(self._mux, context)  # not before: its own model stays while it has this lease
            reply.routed, record.foreseen = (_chosen(lease), lease.foreseen) if lease.why else ("", None)
            if lease.backend.url:
                lease.permit = self._mux.circuits.begin(lease.backend.name)
            if lease.prefill:
                tried = lease.prefill
                question = Attempt(question, tried, reply, self._shared).prefill()
                tried = lease
            Attempt(question, lease, reply, self._shared).run()
            whole = True
            return None
        except (Failed, Severed) as error:
            return self._judged(tried, error, reply)
        except BackendError as error:
            if lease.permit:
                lease.permit.failed(_within(error))
            raise
        finally:
            usage = record.reported()[1:] if lease.is_routed else NO_USAGE
            lease.release(whole=whole, usage=usage)
            record.gpu_seconds += lease.gpu_seconds
            if lease.prefill:
                record.gpu_seconds += lease.prefill.gpu_seconds

    def _nothing_resident(self, question: Question) -> NothingResident:
        """The error of a request that may force no swap, with the models that are resident for its key."""
        context, target = question.context, question.target
        wanted = " or ".join(names_in(target.rules) or (target.preset or target.model,))
        ready = [name for name in self._mux.overview.residents() if context.access.may_use(context.key, name)]
        text = f"{wanted} is not loaded, and this request does not allow a swap (swap: never)."
        there = f"Resident: {', '.join(ready)}." if ready else "No model is resident."
        return NothingResident(f"{text} {there}")

    def _judged(self, lease: Lease, error: MuxError, reply: Reply) -> _Failure:
        """Judge a failure by what is found of the engine while the lease is held."""
        if isinstance(error, Cancelled):
            return _Failure(error, again=False)
        if lease.permit:
            if not isinstance(error, Severed):
                lease.permit.failed(_within(error), away=isinstance(error, EngineUnreachable))
            return _Failure(error, again=False)
        crash = self._mux.facts.doubts.raised_by(lease.ticket)
        if lease.is_host_lost:
            return _Failure(lease.severed_error(), reply.may_go_on)
        seen = not reply.may_go_on or not self._mux.overview.has_another(lease.backend)
        if crash:
            text = f"{error.message.rstrip('.')}: {crash.backend} {crash.why}."
            again = isinstance(error, (EngineUnreachable, Unanswered)) or not seen
            kind = EngineUnreachable if again else BrokenOff
            return _Failure(kind(text, log=crash.log), again, (crash,))
        if lease.ticket.taken_back or (isinstance(error, Severed) and not seen):
            return _Failure(
                EngineUnreachable(error.message), reply.may_go_on, taken_back=lease.ticket.taken_back
            )
        return _Failure(error, isinstance(error, EngineUnreachable))

    # The choice among replicas

    def _work(self, question: Question) -> Work:
        """Collect what the choice among replicas goes by."""
        model, body = question.target.model, question.body
        session = question.context.request.fields.get(SESSION, b"").decode("ascii", "replace")[:256]
        per_token = self._mux.overview.bytes_per_token(model)
        if isinstance(body, Spool):
            work = Work(tokens=round(len(body) / per_token), session=session)
        else:
            preset = question.target.preset
            apart = preset if preset in question.context.access.changes_prompt else model
            work = prefix.read(apart, body, per_token, session)
        kept = self._stored.find(question.previous_answer, question.context)
        return work._replace(stream=question.stream, owner=kept.backend if kept else "")

    def _explain(self, question: Question, work: Work, reply: Reply) -> None:
        """Says which replica would get the request, and why, and sends it to none."""
        model = question.target.model
        about = {"tokens": work.tokens, "blocks": len(work.blocks), "session": work.session}
        staged = model in question.context.access.staged and _may_be_staged(question)
        found = self._mux.overview.explain(model, work, staged=staged)
        explained = finite({"model": model, "request": about, "stages": found})
        reply.whole(200, [JSON], api.written(explained) + b"\n")


def _chosen(lease: Lease) -> str:
    """Say which of several replicas answers, and why, as its client reads it."""
    chosen = f"{lease.backend.name}; {lease.why}"
    return f"{chosen}; prefill by {lease.prefill.backend.name}" if lease.prefill else chosen


def _within(error: MuxError) -> str:
    """Return the text of an error as a part of a sentence that other clients may read."""
    text = error.summary or error.message
    return text[:1].lower() + text[1:].rstrip(".")


def _may_be_staged(question: Question) -> bool:
    return question.path in TWO_STAGE_PATHS and question.context.route.model_in != "upstream"


# Fallbacks


def is_reason(error: MuxError) -> bool:
    """Whether another model may answer where one failed with ``error``."""
    return isinstance(error, _REASONS) and not isinstance(error, _NO_REASONS)


def _may_fall_back(question: Question) -> bool:
    """Whether another model can answer a question: not if it is about what one engine has."""
    context = question.context
    return not (
        question.owner
        or EXPLAIN in context.request.fields
        or context.route.model_in in ("upstream", "answer")
        or question.previous_answer
    )


def _fallen_back(question: Question, step: FallbackStep, error: MuxError, reply: Reply) -> Question:
    """The same question for a fallback, since ``error`` is what its model comes to; the record says so."""
    record = reply.record
    record.fallback_of = record.fallback_of or question.target.model
    record.fallback_cause = error.code
    # All other figures are those of the model that answers.
    record.model, record.preset, record.backend, record.gpu_seconds = step.model, "", "", 0.0
    if reply.chosen:
        reply.chosen = step.model
    reply.fell_back = f"{step.model}; {record.fallback_of} {error.code}"
    if reply.form == "event":
        text = f"anvil-mux {step.model} answers instead of {question.target.model} ({error.code})"
        reply.event(api.comment(text, question.context.api))
    return replace(question, target=retarget(question, step.model))


# Waiting


class Waiting:
    """One request's wait in a queue."""

    __slots__ = (
        "_beat_at",
        "_chunk_at",
        "_every",
        "_fixed_patience",
        "_limit",
        "_mux",
        "_question",
        "_reply",
        "_since",
    )

    def __init__(self, question: Question, reply: Reply, mux: Multiplexer, patience: Patience | None) -> None:
        """``patience``: instead of what the configuration says."""
        self._question = question
        self._reply = reply
        self._mux = mux
        self._fixed_patience = patience
        self._since: float | None = None
        """When it began to wait, if it had to: ``_plan`` sets all moments then."""

    def tend(self, now: float) -> None:
        """Look at the client, a few times a second: ClientGone, ModelLoading, or a sign of life for it.

        Unauthorized or Forbidden if a reload has taken its key, or the model from that, meanwhile.
        """
        self._reply.stay()
        self._check_key()
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

    def _check_key(self) -> None:
        context = self._question.context
        if context.key is None or context.may_go_on:
            return
        key = context.access.keys.current(context.key)
        if key is None:
            raise Unauthorized("The API key of this request was removed while the request waited.")
        if not context.access.may_reach(key, self._question.target.model):
            raise Forbidden("The API key of this request may not use its model any more.")

    def _turn_to_fallback(self, now: float) -> None:
        """Raise if the request has waited for as long as it may before its model's fallback answers."""
        question = self._question
        backend = question.context.access.only.get(question.target.model)
        if backend and backend.url:
            self._mux.circuits.check(backend.name)
        if question.after is None or self._since is None or now - self._since < question.after:
            return
        if any(self._mux.overview.has(each.model) for each in question.fallbacks):
            raise FellBack(
                f"{question.target.model} could not serve this request within {question.after:g} s."
            )

    @property
    def _patience(self) -> Patience:
        grace = self._question.context.access.config.loading_grace
        return self._fixed_patience or Patience(grace=grace)

    def _plan(self, now: float) -> None:
        patience = self._patience
        own = _own_limit(self._question.context.request)
        self._since = now
        self._every = min(patience.comment_every, own / 2)
        self._beat_at = now + min(patience.grace, own / 2)
        self._chunk_at = max(now + patience.chunk_every, self._beat_at)
        silence = min(own, patience.silence) - self._reply.record.waited  # before, for other models
        self._limit = now + max(silence - patience.margin, silence / 2)

    def _beat(self, now: float) -> None:
        context, model = self._question.context, self._question.target.model
        text = api.comment(f"anvil-mux {self._mux.overview.how_far(model)}", context.api)
        if now >= self._chunk_at:
            self._chunk_at = now + self._patience.chunk_every
            text += api.beat(context.route.beat, model, context.id, int(time.time()))
        self._beat_at = now + self._every
        if self._reply.form == "answer":
            self._reply.begin()
        self._reply.event(text)


def _own_limit(request: http1.Request) -> float:
    """How long the client waits for bytes, as the SDKs of OpenAI and Anthropic say: Python's, else Node's."""
    limit = request.fields.get(b"x-stainless-read-timeout") or request.fields.get(
        b"x-stainless-timeout", b"0"
    )
    try:
        seconds = float(limit)
    except ValueError:
        return FOREVER
    return seconds if seconds > 0 else FOREVER
