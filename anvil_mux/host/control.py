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
from anvil_mux.host.engine_client import LONGEST_PAUSE, EngineClient, NotYet, Ready, has_error
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


class SleepApi(Protocol):
    """The way in which one engine sleeps and wakes."""

    levels: ClassVar[tuple[int, ...]]

    def sleep(self, client: EngineClient, level: int) -> None: ...
    def wake(self, client: EngineClient, level: int) -> None: ...

    def is_asleep(self, client: EngineClient) -> bool | None:
        """Whether the engine sleeps; None where it cannot say."""


def sleep(backend: Backend, url: str, level: int) -> None:
    """Makes the engine give up its GPU memory; it must be the backend's, and idle."""
    control = CONTROLS.get(backend.engine)
    if control is None or level not in control.levels:
        raise BackendError(f"engine {backend.engine} cannot sleep at level {level}")
    with _client(backend, url, SLEEP_TIMEOUT) as client:
        _sure(client)
        control.sleep(client, level)


def wake(backend: Backend, url: str, level: int, check_cancelled: Callable[[], object] | None = None) -> None:
    """Makes the engine take its GPU memory back. What ``check_cancelled`` raises meanwhile ends that."""
    control = CONTROLS.get(backend.engine)
    if control is None:
        raise BackendError(f"engine {backend.engine} cannot be woken")
    limit = min(WAKE_TIMEOUT, backend.load_timeout) if level == 1 else backend.load_timeout
    with _client(backend, url, limit, check_cancelled) as client:
        control.wake(client, level)


def is_asleep(backend: Backend, url: str) -> bool | None:
    """Whether the engine sleeps; None where it cannot say."""
    control = CONTROLS.get(backend.engine)
    if control is None:
        return None
    with _client(backend, url, LOOK_TIMEOUT) as client:
        return control.is_asleep(client)


def probe(backend: Backend, url: str) -> None:
    """One token from the backend's model; BackendError if it does not come."""
    with _client(backend, url, min(PROBE_TIMEOUT, backend.load_timeout)) as client:
        try:
            flaw = client.probe()
            if (
                isinstance(flaw, NotYet)
                and flaw.no_route
                and _is_awake(client)
                and client.is_well(LOOK_TIMEOUT)
            ):
                return  # such as one for speech: that it is well is all there is to learn
        except requests.RequestException as error:
            raise _complaint(client, "a request for one token", error) from None
    if flaw is not None:
        raise BackendError(getattr(flaw, "why", "no token came"))


def await_notice(backend: Backend, url: str) -> None:
    """Return once the engine works for nobody, or after a moment: all its clients have left just now."""
    route = find_engine(backend.engine).slots
    for pause in NOTICE_PAUSES if route else ():
        with _client(backend, url, LOOK_TIMEOUT) as client:
            _, slots = _ask(client, "GET", route, None)
        if b'"is_processing":true' not in slots.replace(b" ", b""):
            return
        time.sleep(pause)


class Vllm:
    levels: ClassVar[tuple[int, ...]] = (1, 2)

    def sleep(self, client: EngineClient, level: int) -> None:
        # Whatever still runs was severed by the drain.
        _tell(client, f"/sleep?level={level}&mode=abort")
        if self.is_asleep(client) is False:
            raise BackendError(f"{client.place} says 200 to /sleep and is awake")

    def wake(self, client: EngineClient, level: int) -> None:
        if self.is_asleep(client) is False:
            raise BackendError(f"{client.place} was to be woken and is awake, nobody knows since when")
        if level == 1:
            _tell(client, "/wake_up")
        else:
            _tell(client, "/wake_up?tags=weights")
            _tell(client, "/collective_rpc", {"method": "reload_weights"})
            _tell(client, "/wake_up?tags=kv_cache")
        _tell(client, "/reset_prefix_cache", may_lack=True)
        if self.is_asleep(client):
            raise BackendError(f"{client.place} says 200 to /wake_up and is only partly awake")

    def is_asleep(self, client: EngineClient) -> bool | None:
        answer = _get(client, "/is_sleeping")
        if answer is None:
            return None
        match answer:
            case {"is_sleeping": bool(asleep)}:
                return asleep
        raise _nonsense(client, "/is_sleeping", answer)


class Sglang:
    levels: ClassVar[tuple[int, ...]] = (1,)
    TAGS: ClassVar[tuple[str, ...]] = ("kv_cache", "weights")

    def sleep(self, client: EngineClient, level: int) -> None:
        if self._running(client):
            _tell(client, "/abort_request", {"abort_all": True})
            idle_by = client.now() + IDLE_TIMEOUT
            for _ in _until(client, idle_by):
                if not self._running(client):
                    break
            else:
                raise BackendError(f"{client.place} still computes, so it must not be put to sleep")
        _tell(client, "/release_memory_occupation", {"tags": list(self.TAGS)})

    def wake(self, client: EngineClient, level: int) -> None:
        _tell(client, "/resume_memory_occupation", {"tags": list(reversed(self.TAGS))})
        _tell(client, "/flush_cache", may_lack=True)

    def is_asleep(self, client: EngineClient) -> bool | None:
        return None

    def _running(self, client: EngineClient) -> int:
        """How many requests it works on."""
        for path in ("/v1/loads", "/get_load"):
            answer = _get(client, path)
            entries = answer.get("loads") if isinstance(answer, dict) else answer
            if isinstance(entries, list) and all(isinstance(each, dict) for each in entries):
                found = [count(each[key] or 0) for each in entries for key in LOADS if key in each]
                if None not in found:
                    return sum(filter(None, found))
        raise BackendError(f"{client.place} does not say whether it is idle, and must not sleep if it is not")


LOADS = ("num_reqs", "num_running_reqs", "num_waiting_reqs")


class Ollama:
    levels: ClassVar[tuple[int, ...]] = (1,)

    def sleep(self, client: EngineClient, level: int) -> None:
        _tell(client, "/api/generate", {"model": client.model, "keep_alive": 0, "stream": False})
        self._await(client, asleep=True)

    def wake(self, client: EngineClient, level: int) -> None:
        status, answer = _ask(client, "POST", "/api/generate", {"model": client.model, "stream": False})
        if status == 400 and b"does not support" in answer:  # it makes embeddings, and no text
            _tell(client, "/api/embed", {"model": client.model, "input": ""})
        else:
            _check(client, "/api/generate", status, answer)
        self._await(client, asleep=False)

    def is_asleep(self, client: EngineClient) -> bool | None:
        answer = _get(client, "/api/ps")
        match answer:
            case {"models": list(loaded)}:
                names = [each.get("name") for each in loaded if isinstance(each, dict)]
                return client.model not in names and f"{client.model}:latest" not in names
        raise _nonsense(client, "/api/ps", answer)

    def _await(self, client: EngineClient, *, asleep: bool) -> None:
        for _ in _until(client, client.deadline):
            if self.is_asleep(client) is asleep:
                return
        what = "holds" if asleep else "has not loaded"
        raise BackendError(f"{client.place} {what} {client.model} although it was told otherwise")


class LlamaCpp:
    levels: ClassVar[tuple[int, ...]] = (1,)

    def sleep(self, client: EngineClient, level: int) -> None:
        self._told(client, "/models/unload", "unloaded")

    def wake(self, client: EngineClient, level: int) -> None:
        self._told(client, "/models/load", "loaded")

    def is_asleep(self, client: EngineClient) -> bool | None:
        status = self._status(client)
        return None if status is None else status not in ("loaded", "loading")

    def _told(self, client: EngineClient, path: str, wanted: str) -> None:
        status = self._status(client)
        if status == wanted:
            return
        _tell(client, path, {"model": client.model})
        for _ in _until(client, client.deadline):
            status = self._status(client)
            if status == wanted:
                return
            if status in (None, "failed"):
                break
        raise BackendError(f"{client.place}: {client.model} is {status or 'unknown'} after POST {path}")

    def _status(self, client: EngineClient) -> str | None:
        match _get(client, "/models"):
            case {"data": list(entries)}:
                for each in entries:
                    match each:
                        case {"id": client.model, "status": {"failed": True}}:
                            return "failed"
                        case {"id": client.model, "status": {"value": str(value)}}:
                            return value
        return None


CONTROLS: dict[str, SleepApi] = {
    "vllm": Vllm(),
    "sglang": Sglang(),
    "ollama": Ollama(),
    "llamacpp": LlamaCpp(),
}
SILENT = ("sglang",)
"""The engines that cannot say whether they sleep."""


def _client(
    backend: Backend, url: str, limit: float, check_cancelled: Callable[[], object] | None = None
) -> EngineClient:
    return EngineClient(backend, url, time.monotonic, time.monotonic() + limit, check_cancelled)


def _sure(client: EngineClient) -> None:
    """Check that it is the backend's engine: another one may have the address, and must not sleep."""
    if not client.engine.loads_at_first_request:
        sight = client.look(anew=False)
        if not isinstance(sight, Ready):
            raise BackendError(sight.why)


def _is_awake(client: EngineClient) -> bool:
    """Whether the engine says that it is awake, or cannot sleep: one that cannot say may be well asleep."""
    control = CONTROLS.get(client.backend.engine)
    return control is None or control.is_asleep(client) is False


def _until(client: EngineClient, deadline: float) -> Iterator[None]:
    """Yield again and again, with pauses, until the deadline."""
    pause = 0.01
    while client.now() < deadline:
        yield
        time.sleep(pause)
        if client.check_cancelled:
            client.check_cancelled()
        pause = min(2 * pause, LONGEST_PAUSE)


def _tell(
    client: EngineClient, path: str, body: dict[str, Any] | None = None, *, may_lack: bool = False
) -> None:
    """POST; anything but success is a BackendError. ``may_lack``: an engine without the route is fine."""
    status, answer = _ask(client, "POST", path, body)
    if not (may_lack and status in (404, 405)):
        _check(client, path, status, answer)


def _check(client: EngineClient, path: str, status: int, answer: bytes) -> None:
    if status >= 300 or has_error(answer):
        words = answer[:200].decode("utf-8", "replace")
        raise BackendError(f"{client.place}: POST {path} answers {status}: {words}")


def _get(client: EngineClient, path: str) -> Any:
    """The JSON that it answers, None if it has no such route."""
    status, answer = _ask(client, "GET", path, None)
    if status in (404, 405, 501):
        return None
    if status >= 300:
        raise BackendError(f"{client.place}: GET {path} answers {status}")
    try:
        return foreign.read(answer)
    except ValueError:
        raise _nonsense(client, path, answer) from None


def _ask(client: EngineClient, method: str, path: str, body: dict[str, Any] | None) -> tuple[int, bytes]:
    try:
        return client.ask(method, path, body, client.deadline - client.now())
    except requests.RequestException as error:
        raise _complaint(client, f"{method} {path}", error) from None


def _complaint(client: EngineClient, what: str, error: requests.RequestException) -> BackendError:
    if isinstance(error, requests.Timeout):
        return BackendError(f"{client.place}: {what} was not answered in time")
    refused = "nothing listens there" if "refused" in str(error) else "the connection was closed"
    return BackendError(f"{client.place}: {what}: {refused}")


def _nonsense(client: EngineClient, path: str, answer: object) -> BackendError:
    return BackendError(f"{client.place}: GET {path} answers nonsense: {str(answer)[:100]}")
