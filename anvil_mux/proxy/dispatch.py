"""One request for a model: its lease, what its engine makes of it, and another lease where that failed.

Only here a request is sent again. ``forward`` says how a try has ended; what that means is decided under the
lease, with what the multiplexer finds of the engine:

* The engine ended before a byte, or nothing could be sent to it: the request tries once more on a new lease.
* Where the model has other replicas, a request of which the client has seen nothing moves to one of them also
  if its engine was evicted, or ended within what only we had read, or if it was taken back for a better one.
* So does one whose host was lost, also to a backend that has to be loaded: the multiplexer knows whether one
  can be.
* Any other failure is its own: an error to its client, in the form that still fits (``reply``).
* Where a model has fallbacks, and the client has seen nothing, the request is sent to the next of these.

While the model is not ready the thread waits for its lease and looks at its client (``waiting``).
"""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from anvil_mux.errors import BackendError, BadRequest, Cancelled, MuxError, NothingResident, Severed, with_log
from anvil_mux.multiplexer.lease import Lease
from anvil_mux.multiplexer.multiplexer import Multiplexer, Tend
from anvil_mux.protocol import api, stages
from anvil_mux.protocol.api import written
from anvil_mux.protocol.completions import finite
from anvil_mux.proxy import fallbacks
from anvil_mux.proxy.asked import Question
from anvil_mux.proxy.forward import Forwarder
from anvil_mux.proxy.relay import BrokenOff, EngineUnreachable, Relay, Unanswered
from anvil_mux.proxy.reply import JSON, Reply
from anvil_mux.proxy.spool import Spool
from anvil_mux.proxy.stored_responses import StoredResponses, previous
from anvil_mux.proxy.waiting import Patience, Waiting
from anvil_mux.routing import prefix
from anvil_mux.routing.routing import Work
from anvil_mux.scheduler.refusals import MOST_CRASHES
from anvil_mux.scheduler.steps import NO_USAGE, NO_WORK, Crash
from anvil_mux.telemetry.accesslog import Served

SESSION = b"x-session-id"
"""The header by which a client says which conversation a request belongs to."""


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
        self._forwarder = Forwarder(relay, stored, mux.facts.doubts.raised_by)
        self._patience = patience

    def answer(self, question: Question, reply: Reply, record: Served) -> None:
        """Answers ``question`` from the engine of its model; MuxError if that comes to nothing."""
        target, translation = question.target, question.translation
        if target.choices:
            reply.chosen = target.preset or target.model
        if translation and translation.unloads:
            self._answer_and_unload(question, reply, record)
        elif not target.loads and not self._mux.overview.is_ready(target.model):
            raise BadRequest(f"{target.model} is not loaded, and autoload=false does not load it")
        else:
            self._send(question, reply, record)

    def _answer_and_unload(self, question: Question, reply: Reply, record: Served) -> None:
        """A question in Ollama's API after which the model is unloaded; it may ask for nothing else."""
        asked, translation = question.asked, question.translation
        assert translation is not None
        if translation.path:
            self.answer(replace(question, translation=replace(translation, keep_alive=None)), reply, record)
        else:
            reply.whole(200, [JSON], translation.answer.whole(b"", time.time()))
        if asked.key is None or asked.key.admin:
            self._mux.facts.unload(question.target.model, when_idle=True)

    def _send(self, question: Question, reply: Reply, record: Served) -> None:
        """Send it to its model, and if that cannot serve it to its fallbacks in turn."""
        chain = question.target.chain
        if not chain or not fallbacks.may_turn(question):
            return self._send_to_model(question, reply, record)
        for step, following in zip(chain, (*chain[1:], None), strict=True):
            falls_back = following is not None
            question = replace(question, falls_back=falls_back, after=step.after if falls_back else None)
            try:
                return self._send_to_model(question, reply, record)
            except MuxError as error:
                if following is None or not reply.may_go_on or not fallbacks.is_reason(error):
                    raise
                question = fallbacks.turned(question, following, error, reply, record)
        return None

    def _send_to_model(self, question: Question, reply: Reply, record: Served) -> None:
        """Send it to a backend of its model, and if that comes to nothing to another."""
        target = question.target
        work = self._work(question) if target.replicas > 1 else NO_WORK
        if question.owner:
            work = work._replace(owner=question.owner)
        if target.explains:
            return self._explain(question, work, reply)
        tend, left = partial(self._tend, question, reply, []), target.replicas
        crashes: tuple[Crash, ...] = ()
        resent = False
        while failure := self._try(
            question, reply, record, work=work, tend=tend, crashes=crashes, resent=resent
        ):
            crashes, resent = (*crashes, *failure.crashes), True
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
        record: Served,
        *,
        work: Work,
        tend: Tend,
        crashes: tuple[Crash, ...],
        resent: bool,
    ) -> _Failure | None:
        """Sends it once. ``crashes``: ends of engines that it was sent to, and was there at."""
        asked, model = question.asked, question.target.model
        staged = model in asked.access.staged and _may_be_staged(question)
        since = time.monotonic()
        try:
            lease = self._mux.lease(
                model,
                tend,
                work,
                key=asked.key,
                staged=staged,
                crashes=crashes,
                resent=resent,
                request=asked.id,
                never_swaps=question.target.never_swaps,
            )
        except NothingResident:
            record.waited += time.monotonic() - since
            raise self._nothing_resident(question) from None
        except MuxError:
            record.waited += time.monotonic() - since
            raise
        whole, record.said = False, b""
        try:  # as `with lease` does, in half the time
            record.waited += lease.waited
            record.backend = lease.backend.name
            reply.routed, record.foreseen = (_chosen(lease), lease.foreseen) if lease.why else ("", None)
            if lease.backend.url:
                lease.attempt = self._mux.circuits.begin(lease.backend.name)
            if lease.prefill:
                question, error = self._forwarder.prefill(question, lease.prefill, reply)
                if error:
                    return self._judged(lease.prefill, error, reply)
            error = self._forwarder.forward(question, lease, reply, record)
            if error:
                return self._judged(lease, error, reply)
            whole = True
            return None
        except BackendError as error:
            if lease.attempt:
                lease.attempt.failed(_within(error))
            raise
        finally:
            usage = api.tokens_said(record.said)[1:] if lease.is_routed else NO_USAGE
            lease.release(whole=whole, usage=usage)
            record.gpu_seconds += lease.gpu_seconds
            if lease.prefill:
                record.gpu_seconds += lease.prefill.gpu_seconds

    def _nothing_resident(self, question: Question) -> NothingResident:
        """The error of a request that may force no swap, with the models that are resident for its key."""
        asked, target = question.asked, question.target
        wanted = " or ".join(target.choices or (target.preset or target.model,))
        ready = [name for name in self._mux.overview.residents() if asked.access.may_use(asked.key, name)]
        text = f"{wanted} is not loaded, and this request does not allow a swap (swap: never)."
        there = f"Resident: {', '.join(ready)}." if ready else "No model is resident."
        return NothingResident(f"{text} {there}")

    def _tend(self, question: Question, reply: Reply, waiting: list[Waiting], now: float) -> None:
        """``waiting``: made at the first call."""
        if not waiting:
            patience = self._patience or Patience(grace=question.asked.access.config.loading_grace)
            waiting.append(Waiting(question, reply, patience, self._mux))
        waiting[0].tend(now)

    def _judged(self, lease: Lease, error: MuxError, reply: Reply) -> _Failure:
        """Judge a failure by what is found of the engine while the lease is held."""
        if isinstance(error, Cancelled):
            return _Failure(error, again=False)
        if lease.attempt:
            if not isinstance(error, Severed):
                lease.attempt.failed(_within(error), away=isinstance(error, EngineUnreachable))
            return _Failure(error, again=False)
        crash = self._mux.facts.doubts.raised_by(lease)
        if lease.is_host_lost:
            return _Failure(lease.severed_error(), reply.may_go_on)
        seen = not reply.may_go_on or not self._mux.overview.has_another(lease)
        if crash:
            text = with_log(f"{error.message.rstrip('.')}: {crash.backend} {crash.why}.", crash.log)
            again = isinstance(error, (EngineUnreachable, Unanswered)) or not seen
            return _Failure(EngineUnreachable(text) if again else BrokenOff(text), again, (crash,))
        if lease.taken_back or (isinstance(error, Severed) and not seen):
            return _Failure(EngineUnreachable(error.message), reply.may_go_on, taken_back=lease.taken_back)
        return _Failure(error, isinstance(error, EngineUnreachable))

    # The choice among replicas

    def _work(self, question: Question) -> Work:
        """Collect what the choice among replicas goes by."""
        model, body = question.target.model, question.body
        session = question.asked.request.fields.get(SESSION, b"").decode("ascii", "replace")[:256]
        per_token = self._mux.overview.bytes_per_token(model)
        if isinstance(body, Spool):
            work = Work(tokens=round(len(body) / per_token), session=session)
        else:
            preset = question.target.preset
            apart = preset if preset in question.asked.access.changes_prompt else model
            work = prefix.read(apart, body, per_token, session)
        return work._replace(stream=question.stream, owner=self._owner(question))

    def _owner(self, question: Question) -> str:
        """The replica that has the answer which a question goes on from."""
        asked, body = question.asked, question.body
        if asked.route.beat != "responses" or isinstance(body, Spool):
            return ""
        kept = self._stored.find(previous(body), asked.key)
        return kept.backend if kept else ""

    def _explain(self, question: Question, work: Work, reply: Reply) -> None:
        """Says which replica would get the request, and why, and sends it to none."""
        model = question.target.model
        about = {"tokens": work.tokens, "blocks": len(work.blocks), "session": work.session}
        staged = model in question.asked.access.staged and _may_be_staged(question)
        found = self._mux.overview.explain(model, work, staged=staged)
        told = finite({"model": model, "request": about, "stages": found})
        reply.whole(200, [JSON], written(told) + b"\n")


def _chosen(lease: Lease) -> str:
    """Say which of several replicas answers, and why, as its client reads it."""
    chosen = f"{lease.backend.name}; {lease.why}"
    return f"{chosen}; prefill by {lease.prefill.backend.name}" if lease.prefill else chosen


def _within(error: MuxError) -> str:
    """The text of an error as a part of another sentence."""
    return error.message[:1].lower() + error.message[1:].rstrip(".")


def _may_be_staged(question: Question) -> bool:
    return question.path in stages.PATHS and question.asked.route.model_in != "upstream"
