"""The failures after which another model answers, and how a request turns to it.

A fallback is asked only while its client has seen nothing of an answer. What is wrong with the request
itself, what somebody did to it by hand, and what may have ended an engine are told as they are.
"""

from __future__ import annotations

from dataclasses import replace

from anvil_mux.errors import (
    BackendError,
    CheckpointFailed,
    CircuitOpen,
    Crashed,
    DoesNotFit,
    FellBack,
    GpuMemoryShort,
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
    WaitedTooLong,
    WouldWaitTooLong,
)
from anvil_mux.protocol import api
from anvil_mux.proxy.access import FallbackStep
from anvil_mux.proxy.asked import Question
from anvil_mux.proxy.questions import retarget
from anvil_mux.proxy.reply import Reply
from anvil_mux.proxy.spool import Spool
from anvil_mux.proxy.stored_responses import previous
from anvil_mux.telemetry.accesslog import Served

_REASONS = (
    *(CircuitOpen, DoesNotFit, FellBack, GpuMemoryShort, HostMemoryShort, HostUnavailable, LoadError),
    *(ModelLoading, NothingResident, Overloaded, Paused, Severed, Stuck, WaitedTooLong, WouldWaitTooLong),
    BackendError,
)
_NO_REASONS = (Crashed, CheckpointFailed)


def is_reason(error: MuxError) -> bool:
    """Whether another model may answer where one failed with ``error``."""
    return isinstance(error, _REASONS) and not isinstance(error, _NO_REASONS)


def may_turn(question: Question) -> bool:
    """Whether another model can answer a question: not if it is about what one engine has."""
    asked, body = question.asked, question.body
    if question.owner or question.target.explains or asked.route.model_in in ("upstream", "answer"):
        return False
    return asked.route.beat != "responses" or isinstance(body, Spool) or not previous(body)


def turned(question: Question, step: FallbackStep, error: MuxError, reply: Reply, record: Served) -> Question:
    """The same question for a fallback, since ``error`` is what its model comes to; it is noted and told."""
    record.fallback_of = record.fallback_of or question.target.model
    record.fallback_cause = error.code
    # All other figures are those of the model that answers.
    record.model, record.preset, record.backend, record.gpu_seconds = step.model, "", "", 0.0
    if reply.chosen:
        reply.chosen = step.model
    reply.fell_back = f"{step.model}; {record.fallback_of} {error.code}"
    if reply.form == "event":
        text = f"anvil-mux {step.model} answers instead of {question.target.model} ({error.code})"
        reply.event(api.comment(text, question.asked.api))
    return replace(question, target=retarget(question, step.model))
