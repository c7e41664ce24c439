"""Every error that anvil-mux raises on purpose.

An error is an answer: it carries the HTTP status and the stable ``code`` that a client sees, whether and
when a retry can help (``retry_after`` in seconds, or None), and a text that says what is wrong, where, and
what to do. The server maps errors to bytes in one place; the shape of those bytes (OpenAI, Anthropic,
Ollama) is chosen in api.py. Foreign exceptions are mapped to these at the module that touched the foreign
thing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from errno import EMFILE, ENFILE, ENOBUFS, ENOMEM
from types import MappingProxyType

MAX_RETRY_AFTER = 60.0
"""Clients refuse to wait much longer than this (openai-python gives up above 120 s)."""


MOST_COMPARED = 200
"""The most names, and characters of one, among which the nearest is looked for: that takes up to 30 ms."""

FOR_OPERATORS = "For operators: "
"""The begin of a line of ours among the log lines of an error."""

SHORTAGES = frozenset([EMFILE, ENFILE, ENOBUFS, ENOMEM])
"""The numbers of system errors that say what this program or machine lacks, and nothing of whom it asked."""


def is_shortage(error: BaseException | None) -> bool:
    """Whether an error comes of what is lacking here, mostly of file descriptors."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in SHORTAGES:
            return True
        error = error.__cause__ or error.__context__
    return False


class MuxError(Exception):
    """A bug in anvil-mux itself; its log says more. The root of all others.

    ``retry`` False tells clients that the same request cannot succeed later.
    """

    status = 500
    code = "internal_error"
    kind = "server_error"
    """The OpenAI error ``type``."""
    retry_after: float | None = None
    retry: bool | None = None
    param: str | None = None
    discreet = ""
    """The text for clients whose key may not learn of other models, where ``message`` may name some."""
    said: Mapping[str, object] = MappingProxyType({})
    """Fields that clients are told as an engine said them, in place of ``kind``, ``code`` and ``param``."""
    log: tuple[str, ...] = ()
    """The last lines that the engine printed; only who may read logs gets them, since engines log prompts.

    A line that begins with ``FOR_OPERATORS`` is ours: it names what other clients are not to learn of.
    """
    summary = ""
    """The text for other clients than the one whose request failed, where ``message`` quotes an answer."""

    def __init__(self, message: str, *, retry_after: float | None = None, log: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.message = message
        self.log = tuple(log)
        if retry_after is not None:
            self.retry_after = min(max(retry_after, 1.0), MAX_RETRY_AFTER)

    def copy(self) -> MuxError:
        """The same error as another object: to raise one changes it, so each thread raises its own."""
        made = type(self).__new__(type(self), *self.args)
        made.__dict__.update(self.__dict__)
        return made


class ConfigError(MuxError):
    """The configuration cannot be used; ``problems`` lists every reason, each with its file and key."""

    status, code = 422, "bad_config"
    retry = False

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))


class BadRequest(MuxError):
    """The request is malformed; ``param`` names the offending field."""

    status, code, kind = 400, "bad_request", "invalid_request_error"
    retry = False

    def __init__(self, message: str, *, param: str | None = None, status: int | None = None) -> None:
        super().__init__(message)
        self.param = param
        if status is not None:
            self.status = status


class Unauthorized(MuxError):
    """The request has no API key, or an unknown one."""

    status, code, kind = 401, "unauthorized", "authentication_error"
    retry = False


class Forbidden(MuxError):
    """The request's API key does not allow this."""

    status, code, kind = 403, "forbidden", "permission_error"
    retry = False


class TooLarge(MuxError):
    """The request's body is over the limit for its kind."""

    status, code, kind = 413, "request_too_large", "invalid_request_error"
    retry = False


class DiskFull(MuxError):
    """The request's upload does not fit into the folder for temporary files."""

    status, code = 507, "disk_full"
    retry = False


class UnknownModel(MuxError):
    """No backend serves the model; the message lists the known names, and says which one is near."""

    status, code, kind = 404, "model_not_found", "invalid_request_error"
    retry, param = False, "model"

    def __init__(self, model: str, known: Iterable[str] = ()) -> None:
        names = sorted(known)
        is_compared = len(names) <= MOST_COMPARED and len(model) <= MOST_COMPARED
        near = get_close_matches(model, names, 1) if is_compared else ()
        meant = "".join(f" Did you mean `{name}`?" for name in near)
        ids = ", ".join(names) or "none"
        super().__init__(f"The model `{model}` does not exist.{meant} Known models: {ids}.")
        self.model = model


class NotFound(MuxError):
    """There is no such route."""

    status, code, kind = 404, "not_found", "invalid_request_error"
    retry = False


class Moved(MuxError):
    """The page has another address; a client that follows redirects gets there."""

    status, code, kind = 307, "moved", "invalid_request_error"

    def __init__(self, message: str, location: str) -> None:
        super().__init__(f"{message}: {location}")
        self.location = location


class DoesNotFit(MuxError):
    """The model does not fit on its GPUs, or not beside a pinned model; waiting will not help."""

    status, code, kind = 422, "does_not_fit", "invalid_request_error"
    discreet = "The model does not fit on its GPUs, or not beside what stays there."
    retry = False


class GpuMissing(MuxError):
    """The model's machine reports its GPUs, and one that the model needs is not among them."""

    status, code = 503, "gpu_missing"
    discreet = "A GPU that the model needs is not there now."
    retry_after = 30.0


class GpuMemoryShort(MuxError):
    """Other processes hold the GPU memory that a load would need."""

    status, code = 503, "gpu_memory_short"
    discreet = "Others hold the GPU memory that its load would need."
    retry_after = 30.0


class HostMemoryShort(MuxError):
    """The load needs more host memory than the other engines leave free."""

    status, code = 503, "host_memory_short"
    discreet = "Others hold the host memory that its load would need."
    retry_after = 30.0


class LoopDetected(MuxError):
    """The request came back to an anvil-mux that had sent it on."""

    status, code, kind = 508, "loop_detected", "invalid_request_error"
    retry = False


class Overloaded(MuxError):
    """Too many requests wait, or too many connections are open. Some clients retry on "overloaded" alone."""

    status, code = 503, "overloaded"
    retry_after = 5.0


class TooManyRequests(MuxError):
    """The API key has reached its own limit of requests at once; other keys are still served."""

    status, code, kind = 429, "too_many_requests", "rate_limit_error"
    retry_after = 2.0


class Draining(MuxError):
    """anvil-mux is shutting down."""

    status, code = 503, "shutting_down"
    retry_after = 10.0


_ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?")
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def printable(text: str) -> str:
    """Return foreign text as a terminal may have it: without escape sequences, control characters and half
    characters.
    """
    return _CONTROLS.sub("\ufffd", _ESCAPES.sub("", text).replace("\r\n", "\n").replace("\r", " "))


def log_title(lines: Sequence[str]) -> list[str]:
    """Return the title of the last lines of an engine; none where all of them are ours, or there are none."""
    is_ours = all(line.startswith(FOR_OPERATORS) for line in lines)
    return [] if is_ours else ["Last lines of the engine's log:"]


def with_log(message: str, log: Iterable[str]) -> str:
    """Return ``message``, and below it what an engine printed last, if there is anything."""
    lines = tuple(log)
    return "\n".join([message, *log_title(lines), *lines])


class LoadError(MuxError):
    """The model could not be loaded."""

    status, code = 503, "load_failed"
    retry = False  # a client's retries after each cool-down would put the resident out again and again


class ModelLoading(MuxError):
    """The model is still loading, and the client is about to time out; a retry waits for the same load."""

    status, code = 503, "model_loading"
    retry_after = 10.0


class WaitedTooLong(MuxError):
    """The model did not become resident within ``queue_timeout``."""

    status, code = 504, "waited_too_long"
    retry_after = 30.0


class WouldWaitTooLong(MuxError):
    """The GPU is busy with answers that may not be aborted and would outlast `queue_timeout`."""

    status, code = 503, "would_wait_too_long"
    discreet = "It would wait longer than requests may: answers that run may finish first."
    retry_after = 30.0


class NothingResident(MuxError):
    """The request does not allow a swap (`swap: never`), and its model is not loaded."""

    status, code = 503, "nothing_resident"
    retry_after = 30.0


class Severed(MuxError):
    """The model was evicted or stopped before the answer was complete; the message says why."""

    status, code = 503, "severed"
    discreet = "The model was evicted or stopped before the answer was complete. Send it again."
    retry_after = 5.0


class Cancelled(MuxError):
    """The request, or the load that it waited for, was cancelled by hand."""

    status, code = 503, "cancelled"
    retry = False


class Paused(MuxError):
    """anvil-mux is paused, and `when_paused` is `refuse`."""

    status, code = 503, "paused"
    retry_after = 60.0


class BackendPaused(MuxError):
    """The model's container was paused by hand, and no other backend can serve it."""

    status, code = 503, "backend_paused"
    discreet = "The engine of the model was paused by hand."
    retry_after = 30.0


class Stuck(MuxError):
    """An engine that could not be stopped may still hold the GPUs, so nothing is loaded there."""

    status, code = 503, "stuck"
    discreet = "An engine that could not be stopped may still hold the GPUs of the model."
    retry_after = 30.0


class HostUnavailable(MuxError):
    """All hosts on which the model may run are lost or drained."""

    status, code = 503, "host_unavailable"
    retry_after = 30.0


class CircuitOpen(MuxError):
    """A server elsewhere failed several times in a row, or asked for a pause; it gets no requests for now."""

    status, code = 503, "circuit_open"
    retry_after = 5.0


class FellBack(MuxError):
    """The request left its queue and a fallback answered it; seen in logs and metrics only."""

    status, code = 503, "fell_back"


class BackendError(MuxError):
    """The engine or its container failed: it is unreachable, broke off its answer, or cannot be stopped."""

    status, code = 502, "backend_unavailable"


class QuotedFailure(BackendError):
    """The engine answered with an error, or with what cannot be used; the message quotes it."""

    def __init__(self, summary: str, quote: str) -> None:
        super().__init__(f"{summary}: {quote}")
        self.summary = summary


class Crashed(BackendError):
    """Two engines crashed while they worked on this request, so it is not sent again."""

    code = "engine_crashed"
    retry = False


class CheckpointFailed(BackendError):
    """The CUDA driver could not move GPU memory to host memory, or back.

    ``lost`` are the processes that can only be killed now; all others run as before.
    """

    code = "checkpoint_failed"

    def __init__(self, message: str, *, lost: Iterable[int] = ()) -> None:
        self.lost = tuple(lost)
        if self.lost:
            message = f"{message}; lost: {', '.join(map(str, self.lost))}"
        super().__init__(message)


class RefusedByEngine(MuxError):
    """The engine refused a request whose stream had already begun; the message is the engine's.

    ``code`` stands in logs and metrics, which do not repeat an engine's text.
    """

    status, code, kind = 400, "refused_by_engine", "invalid_request_error"

    def __init__(self, message: str, *, status: int, said: Mapping[str, object]) -> None:
        super().__init__(message)
        self.status = status
        self.said = said


class ClientGone(MuxError):
    """The client closed its connection; seen in logs and metrics only."""

    status, code = 499, "client_gone"


class ClientStalled(ClientGone):
    """The client read nothing of its answer for `client_timeout`; seen in logs and metrics only."""

    code = "client_stalled"
