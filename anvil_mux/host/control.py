"""How engines are told to let go of their GPU memory while they run on, and to take it back.

``sleep`` and ``wake`` return when the engine says that it is done, and raise BackendError when it says
anything else, answers nonsense, or nothing in time. What it says is no proof: engines are known to report
success and to free nothing, so swap.py reads the memory, and asks for a token before anybody is admitted.
An engine's health route is no proof either: most are healthy while they sleep.

Levels: 1 keeps the weights in host memory, 2 drops them and reads them anew from disk.

Peculiarities of the engines (see the documentation of each):

vLLM      wants query parameters, ignores JSON. After level 2 the weights must be reloaded between waking them
          and waking the cache, else it answers nonsense. Waking what is awake aborts it.
SGLang    asserts that nothing runs when it releases, and neither release nor resume may be said twice: either
          ends its scheduler. It cannot say whether it sleeps. Its health route generates a token.
Ollama    unloads at keep_alive 0, and says so before the memory is back. A model for embeddings is refused at
          /api/generate, and loaded by an empty /api/embed.
llama.cpp unloads in router mode only, that is, if it was started without a model.

To add an engine: a class with these three methods, and a line in ``CONTROLS``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Protocol

import requests

from anvil_mux.config.config import Backend
from anvil_mux.errors import BackendError
from anvil_mux.host.engine import find_engine
from anvil_mux.host.visit import LONGEST_PAUSE, NotYet, Ready, Visit, has_error
from anvil_mux.protocol import foreign
from anvil_mux.protocol.completions import count

SLEEP_TIMEOUT = 60.0
"""A first sleep allocates its host memory: 20 s were seen for a 20 B model."""
WAKE_TIMEOUT = 120.0
"""Seconds to wake without reading weights from disk; 70 GB over the bus take 3 to 10 s."""
PROBE_TIMEOUT = 30.0
LOOK_TIMEOUT = 5.0
IDLE_TIMEOUT = 5.0
"""How long requests that were severed may go on inside an engine."""
NOTICE_PAUSES = (0.1, 0.2, 1.1)
"""Seconds between looks at whether an engine has noticed that its clients left.

llama-server sees it at the next token of a stream, and of another answer when it has nothing else to say for
a second, so the last pause is longer than that: each look is an answer, too.
"""
UNKNOWN = 2
"""The level to wake from where it is not known: weights read anew are right in any case."""


class Control(Protocol):
    """The way in which one engine sleeps and wakes."""

    levels: ClassVar[tuple[int, ...]]

    def sleep(self, visit: Visit, level: int) -> None: ...
    def wake(self, visit: Visit, level: int) -> None: ...

    def is_asleep(self, visit: Visit) -> bool | None:
        """Whether the engine sleeps; None where it cannot say."""


def sleep(backend: Backend, url: str, level: int) -> None:
    """Makes the engine give up its GPU memory; it must be the backend's, and idle."""
    control = CONTROLS.get(backend.engine)
    if control is None or level not in control.levels:
        raise BackendError(f"engine {backend.engine} cannot sleep at level {level}")
    with _visit(backend, url, SLEEP_TIMEOUT) as visit:
        _sure(visit)
        control.sleep(visit, level)


def wake(backend: Backend, url: str, level: int, tend: Callable[[], object] | None = None) -> None:
    """Makes the engine take its GPU memory back. What ``tend`` raises meanwhile ends that."""
    control = CONTROLS.get(backend.engine)
    if control is None:
        raise BackendError(f"engine {backend.engine} cannot be woken")
    limit = min(WAKE_TIMEOUT, backend.load_timeout) if level == 1 else backend.load_timeout
    with _visit(backend, url, limit, tend) as visit:
        control.wake(visit, level)


def is_asleep(backend: Backend, url: str) -> bool | None:
    """Whether the engine sleeps; None where it cannot say."""
    control = CONTROLS.get(backend.engine)
    if control is None:
        return None
    with _visit(backend, url, LOOK_TIMEOUT) as visit:
        return control.is_asleep(visit)


def probe(backend: Backend, url: str) -> None:
    """One token from the backend's model; BackendError if it does not come."""
    with _visit(backend, url, min(PROBE_TIMEOUT, backend.load_timeout)) as visit:
        try:
            flaw = visit.probe()
            if (
                isinstance(flaw, NotYet)
                and flaw.no_route
                and _is_awake(visit)
                and visit.is_well(LOOK_TIMEOUT)
            ):
                return  # such as one for speech: that it is well is all there is to learn
        except requests.RequestException as error:
            raise _complaint(visit, "a request for one token", error) from None
    if flaw is not None:
        raise BackendError(getattr(flaw, "why", "no token came"))


def await_notice(backend: Backend, url: str) -> None:
    """Return once the engine works for nobody, or after a moment: all its clients have left just now."""
    route = find_engine(backend.engine).slots
    for pause in NOTICE_PAUSES if route else ():
        with _visit(backend, url, LOOK_TIMEOUT) as visit:
            _, slots = _ask(visit, "GET", route, None)
        if b'"is_processing":true' not in slots.replace(b" ", b""):
            return
        time.sleep(pause)


class Vllm:
    levels: ClassVar[tuple[int, ...]] = (1, 2)

    def sleep(self, visit: Visit, level: int) -> None:
        # Whatever still runs was severed by the drain.
        _tell(visit, f"/sleep?level={level}&mode=abort")
        if self.is_asleep(visit) is False:
            raise BackendError(f"{visit.place} says 200 to /sleep and is awake")

    def wake(self, visit: Visit, level: int) -> None:
        if self.is_asleep(visit) is False:
            raise BackendError(f"{visit.place} was to be woken and is awake, nobody knows since when")
        if level == 1:
            _tell(visit, "/wake_up")
        else:
            _tell(visit, "/wake_up?tags=weights")
            _tell(visit, "/collective_rpc", {"method": "reload_weights"})
            _tell(visit, "/wake_up?tags=kv_cache")
        _tell(visit, "/reset_prefix_cache", may_lack=True)
        if self.is_asleep(visit):
            raise BackendError(f"{visit.place} says 200 to /wake_up and is only partly awake")

    def is_asleep(self, visit: Visit) -> bool | None:
        answer = _get(visit, "/is_sleeping")
        if answer is None:
            return None
        match answer:
            case {"is_sleeping": bool(asleep)}:
                return asleep
        raise _nonsense(visit, "/is_sleeping", answer)


class Sglang:
    levels: ClassVar[tuple[int, ...]] = (1,)
    TAGS: ClassVar[tuple[str, ...]] = ("kv_cache", "weights")

    def sleep(self, visit: Visit, level: int) -> None:
        if self._running(visit):
            _tell(visit, "/abort_request", {"abort_all": True})
            idle_by = visit.now() + IDLE_TIMEOUT
            for _ in _until(visit, idle_by):
                if not self._running(visit):
                    break
            else:
                raise BackendError(f"{visit.place} still computes, so it must not be put to sleep")
        _tell(visit, "/release_memory_occupation", {"tags": list(self.TAGS)})

    def wake(self, visit: Visit, level: int) -> None:
        _tell(visit, "/resume_memory_occupation", {"tags": list(reversed(self.TAGS))})
        _tell(visit, "/flush_cache", may_lack=True)

    def is_asleep(self, visit: Visit) -> bool | None:
        return None

    def _running(self, visit: Visit) -> int:
        """How many requests it works on."""
        for path in ("/v1/loads", "/get_load"):
            answer = _get(visit, path)
            entries = answer.get("loads") if isinstance(answer, dict) else answer
            if isinstance(entries, list) and all(isinstance(each, dict) for each in entries):
                found = [count(each[key] or 0) for each in entries for key in LOADS if key in each]
                if None not in found:
                    return sum(filter(None, found))
        raise BackendError(f"{visit.place} does not say whether it is idle, and must not sleep if it is not")


LOADS = ("num_reqs", "num_running_reqs", "num_waiting_reqs")


class Ollama:
    levels: ClassVar[tuple[int, ...]] = (1,)

    def sleep(self, visit: Visit, level: int) -> None:
        _tell(visit, "/api/generate", {"model": visit.model, "keep_alive": 0, "stream": False})
        self._await(visit, asleep=True)

    def wake(self, visit: Visit, level: int) -> None:
        status, answer = _ask(visit, "POST", "/api/generate", {"model": visit.model, "stream": False})
        if status == 400 and b"does not support" in answer:  # it makes embeddings, and no text
            _tell(visit, "/api/embed", {"model": visit.model, "input": ""})
        else:
            _check(visit, "/api/generate", status, answer)
        self._await(visit, asleep=False)

    def is_asleep(self, visit: Visit) -> bool | None:
        answer = _get(visit, "/api/ps")
        match answer:
            case {"models": list(loaded)}:
                names = [each.get("name") for each in loaded if isinstance(each, dict)]
                return visit.model not in names and f"{visit.model}:latest" not in names
        raise _nonsense(visit, "/api/ps", answer)

    def _await(self, visit: Visit, *, asleep: bool) -> None:
        for _ in _until(visit, visit.deadline):
            if self.is_asleep(visit) is asleep:
                return
        what = "holds" if asleep else "has not loaded"
        raise BackendError(f"{visit.place} {what} {visit.model} although it was told otherwise")


class LlamaCpp:
    levels: ClassVar[tuple[int, ...]] = (1,)

    def sleep(self, visit: Visit, level: int) -> None:
        self._told(visit, "/models/unload", "unloaded")

    def wake(self, visit: Visit, level: int) -> None:
        self._told(visit, "/models/load", "loaded")

    def is_asleep(self, visit: Visit) -> bool | None:
        status = self._status(visit)
        return None if status is None else status not in ("loaded", "loading")

    def _told(self, visit: Visit, path: str, wanted: str) -> None:
        status = self._status(visit)
        if status == wanted:
            return
        _tell(visit, path, {"model": visit.model})
        for _ in _until(visit, visit.deadline):
            status = self._status(visit)
            if status == wanted:
                return
            if status in (None, "failed"):
                break
        raise BackendError(f"{visit.place}: {visit.model} is {status or 'unknown'} after POST {path}")

    def _status(self, visit: Visit) -> str | None:
        match _get(visit, "/models"):
            case {"data": list(entries)}:
                for each in entries:
                    match each:
                        case {"id": visit.model, "status": {"failed": True}}:
                            return "failed"
                        case {"id": visit.model, "status": {"value": str(value)}}:
                            return value
        return None


CONTROLS: dict[str, Control] = {
    "vllm": Vllm(),
    "sglang": Sglang(),
    "ollama": Ollama(),
    "llamacpp": LlamaCpp(),
}
SILENT = ("sglang",)
"""The engines that cannot say whether they sleep."""


def _visit(backend: Backend, url: str, limit: float, tend: Callable[[], object] | None = None) -> Visit:
    return Visit(backend, url, time.monotonic, time.monotonic() + limit, tend)


def _sure(visit: Visit) -> None:
    """Check that it is the backend's engine: another one may have the address, and must not sleep."""
    if not visit.engine.loads_at_first_request:
        sight = visit.look(anew=False)
        if not isinstance(sight, Ready):
            raise BackendError(sight.why)


def _is_awake(visit: Visit) -> bool:
    """Whether the engine says that it is awake, or cannot sleep: one that cannot say may be well asleep."""
    control = CONTROLS.get(visit.backend.engine)
    return control is None or control.is_asleep(visit) is False


def _until(visit: Visit, deadline: float) -> Iterator[None]:
    """Yield again and again, with pauses, until the deadline."""
    pause = 0.01
    while visit.now() < deadline:
        yield
        time.sleep(pause)
        if visit.tend:
            visit.tend()
        pause = min(2 * pause, LONGEST_PAUSE)


def _tell(visit: Visit, path: str, body: dict[str, Any] | None = None, *, may_lack: bool = False) -> None:
    """POST; anything but success is a BackendError. ``may_lack``: an engine without the route is fine."""
    status, answer = _ask(visit, "POST", path, body)
    if not (may_lack and status in (404, 405)):
        _check(visit, path, status, answer)


def _check(visit: Visit, path: str, status: int, answer: bytes) -> None:
    if status >= 300 or has_error(answer):
        words = answer[:200].decode("utf-8", "replace")
        raise BackendError(f"{visit.place}: POST {path} answers {status}: {words}")


def _get(visit: Visit, path: str) -> Any:
    """The JSON that it answers, None if it has no such route."""
    status, answer = _ask(visit, "GET", path, None)
    if status in (404, 405, 501):
        return None
    if status >= 300:
        raise BackendError(f"{visit.place}: GET {path} answers {status}")
    try:
        return foreign.read(answer)
    except ValueError:
        raise _nonsense(visit, path, answer) from None


def _ask(visit: Visit, method: str, path: str, body: dict[str, Any] | None) -> tuple[int, bytes]:
    try:
        return visit.ask(method, path, body, visit.deadline - visit.now())
    except requests.RequestException as error:
        raise _complaint(visit, f"{method} {path}", error) from None


def _complaint(visit: Visit, what: str, error: requests.RequestException) -> BackendError:
    if isinstance(error, requests.Timeout):
        return BackendError(f"{visit.place}: {what} was not answered in time")
    refused = "nothing listens there" if "refused" in str(error) else "the connection was closed"
    return BackendError(f"{visit.place}: {what}: {refused}")


def _nonsense(visit: Visit, path: str, answer: object) -> BackendError:
    return BackendError(f"{visit.place}: GET {path} answers nonsense: {str(answer)[:100]}")
