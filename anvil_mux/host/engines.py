"""The engines: for each family one row, how it sleeps and wakes, and what is asked of one that runs.

``await_ready`` has a deadline, a way to learn that the service ended and one to end the wait, so it fails at
once when the engine has died, and never waits for longer than it was told.

``sleep`` and ``wake`` return when the engine says that it is done, and raise BackendError when it says
anything else, answers nonsense, or nothing in time. What it says is no proof: engines are known to report
success and to free nothing, so levels.py reads the memory, and asks for a token before anybody is admitted.
An engine's health route is no proof either: most are healthy while they sleep.

Peculiarities of the engines (see the documentation of each):

vLLM      wants query parameters, ignores JSON. After level 2 the weights must be reloaded between waking them
          and waking the cache, else it answers nonsense. Waking what is awake aborts it. Its process forgets
          the LoRA adapters that it was given when it ends; one that was only in standby has them still.
SGLang    asserts that nothing runs when it releases, and neither release nor resume may be said twice: either
          ends its scheduler. It cannot say whether it sleeps. Its health route generates a token.
Ollama    unloads at keep_alive 0, and says so before the memory is back. A model for embeddings is refused at
          /api/generate, and loaded by an empty /api/embed.
llama.cpp unloads in router mode only, that is, if it was started without a model.

To add an engine: a row in ``ENGINES`` and, if it can sleep, a class with the methods of ``SleepApi``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import ClassVar

import requests

from anvil_mux.config.config import Backend, Service
from anvil_mux.config.service import USUAL_PORTS
from anvil_mux.errors import BackendError, LoadError, is_shortage
from anvil_mux.host.engine_client import (
    LONGEST_PAUSE,
    Engine,
    EngineClient,
    has_error,
    option_values,
)
from anvil_mux.protocol.completions import count

FIRST_PAUSE = 0.01
PAUSE_SHARE = 0.01
"""Share of a load's time so far by which a look may come too late."""
OTHERS_PATIENCE = 20.0
"""Seconds that the list of models may name another model before that is final."""
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
ADAPTER_ROUTE = "/v1/load_lora_adapter"


# How engines sleep


class Vllm:
    levels: ClassVar[tuple[int, ...]] = (1, 2)
    is_silent: ClassVar[bool] = False

    def sleep(self, client: EngineClient, level: int) -> None:
        # Whatever still runs was severed by the drain.
        client.tell(f"/sleep?level={level}&mode=abort")
        if self.is_asleep(client) is False:
            raise BackendError(f"{client.place} says 200 to /sleep and is awake")

    def wake(self, client: EngineClient, level: int) -> None:
        if self.is_asleep(client) is False:
            raise BackendError(f"{client.place} was to be woken and is awake, nobody knows since when")
        if level == 1:
            client.tell("/wake_up")
        else:
            client.tell("/wake_up?tags=weights")
            client.tell("/collective_rpc", {"method": "reload_weights"})
            client.tell("/wake_up?tags=kv_cache")
        client.tell("/reset_prefix_cache", may_lack=True)
        if self.is_asleep(client):
            raise BackendError(f"{client.place} says 200 to /wake_up and is only partly awake")

    def is_asleep(self, client: EngineClient) -> bool | None:
        answer = client.get("/is_sleeping")
        if answer is None:
            return None
        match answer:
            case {"is_sleeping": bool(asleep)}:
                return asleep
        raise client.nonsense("/is_sleeping", answer)


class Sglang:
    levels: ClassVar[tuple[int, ...]] = (1,)
    is_silent: ClassVar[bool] = True
    TAGS: ClassVar[tuple[str, ...]] = ("kv_cache", "weights")

    def sleep(self, client: EngineClient, level: int) -> None:
        if self._running(client):
            client.tell("/abort_request", {"abort_all": True})
            idle_by = client.now() + IDLE_TIMEOUT
            for _ in _until(client, idle_by):
                if not self._running(client):
                    break
            else:
                raise BackendError(f"{client.place} still computes, so it must not be put to sleep")
        client.tell("/release_memory_occupation", {"tags": list(self.TAGS)})

    def wake(self, client: EngineClient, level: int) -> None:
        client.tell("/resume_memory_occupation", {"tags": list(reversed(self.TAGS))})
        client.tell("/flush_cache", may_lack=True)

    def is_asleep(self, client: EngineClient) -> bool | None:
        return None

    def _running(self, client: EngineClient) -> int:
        """How many requests it works on."""
        for path in ("/v1/loads", "/get_load"):
            answer = client.get(path)
            entries = answer.get("loads") if isinstance(answer, dict) else answer
            if isinstance(entries, list) and all(isinstance(each, dict) for each in entries):
                found = [count(each[key] or 0) for each in entries for key in LOADS if key in each]
                if None not in found:
                    return sum(filter(None, found))
        raise BackendError(f"{client.place} does not say whether it is idle, and must not sleep if it is not")


LOADS = ("num_reqs", "num_running_reqs", "num_waiting_reqs")


class Ollama:
    levels: ClassVar[tuple[int, ...]] = (1,)
    is_silent: ClassVar[bool] = False

    def sleep(self, client: EngineClient, level: int) -> None:
        client.tell("/api/generate", {"model": client.model, "keep_alive": 0, "stream": False})
        self._await(client, asleep=True)

    def wake(self, client: EngineClient, level: int) -> None:
        status, answer = client.reply_to("POST", "/api/generate", {"model": client.model, "stream": False})
        if status == 400 and b"does not support" in answer:  # it makes embeddings, and no text
            client.tell("/api/embed", {"model": client.model, "input": ""})
        else:
            client.check("/api/generate", status, answer)
        self._await(client, asleep=False)

    def is_asleep(self, client: EngineClient) -> bool | None:
        answer = client.get("/api/ps")
        match answer:
            case {"models": list(loaded)}:
                names = [each.get("name") for each in loaded if isinstance(each, dict)]
                return client.model not in names and f"{client.model}:latest" not in names
        raise client.nonsense("/api/ps", answer)

    def _await(self, client: EngineClient, *, asleep: bool) -> None:
        for _ in _until(client, client.deadline):
            if self.is_asleep(client) is asleep:
                return
        what = "holds" if asleep else "has not loaded"
        raise BackendError(f"{client.place} {what} {client.model} although it was told otherwise")


class LlamaCpp:
    levels: ClassVar[tuple[int, ...]] = (1,)
    is_silent: ClassVar[bool] = False

    def sleep(self, client: EngineClient, level: int) -> None:
        self._bring_to(client, "/models/unload", "unloaded")

    def wake(self, client: EngineClient, level: int) -> None:
        self._bring_to(client, "/models/load", "loaded")

    def is_asleep(self, client: EngineClient) -> bool | None:
        status = self._status(client)
        return None if status is None else status not in ("loaded", "loading")

    def _bring_to(self, client: EngineClient, path: str, wanted: str) -> None:
        status = self._status(client)
        if status == wanted:
            return
        client.tell(path, {"model": client.model})
        for _ in _until(client, client.deadline):
            status = self._status(client)
            if status == wanted:
                return
            if status in (None, "failed"):
                break
        raise BackendError(f"{client.place}: {client.model} is {status or 'unknown'} after POST {path}")

    def _status(self, client: EngineClient) -> str | None:
        match client.get("/models"):
            case {"data": list(entries)}:
                for each in entries:
                    match each:
                        case {"id": client.model, "status": {"failed": True}}:
                            return "failed"
                        case {"id": client.model, "status": {"value": str(value)}}:
                            return value
        return None


def _until(client: EngineClient, deadline: float) -> Iterator[None]:
    """Yield again and again, with pauses, until the deadline."""
    pause = 0.01
    while client.now() < deadline:
        yield
        time.sleep(pause)
        if client.check_cancelled:
            client.check_cancelled()
        pause = min(2 * pause, LONGEST_PAUSE)


# What differs between engines


def _routes(paths: str) -> tuple[str, ...]:
    return tuple(paths.split())


ENGINES: dict[str, Engine] = {
    "openai": Engine(must_have_health=False),
    "vllm": Engine(
        sleeps=Vllm(),
        at_once_words=("--max-num-seqs",),
        control=_routes(
            """/sleep /wake_up /is_sleeping /pause /resume /is_paused /abort_requests /collective_rpc
            /reset_prefix_cache /reset_mm_cache /reset_encoder_cache /update_weights
            /init_weight_transfer_engine /start_profile /stop_profile /server_info /scale_elastic_ep
            /is_scaling_elastic_ep /invocations /v1/load_lora_adapter /v1/unload_lora_adapter"""
        ),
    ),
    "sglang": Engine(
        sleeps=Sglang(),
        port=USUAL_PORTS["sglang"],
        at_once_words=("--max-running-requests",),
        alive="/v1/models",  # at its health route it generates a token
        shown=_routes("/health /metrics /v1/models /model_info /get_model_info"),
        control=_routes(
            """/release_memory_occupation /resume_memory_occupation /pause_generation /continue_generation
            /abort_request /flush_cache /update_weights_from_disk /update_weights_from_tensor
            /update_weights_from_distributed /init_weights_update_group /get_weights_by_name
            /load_lora_adapter /unload_lora_adapter /set_internal_state /configure_logging
            /start_profile /stop_profile"""
        ),
    ),
    "llamacpp": Engine(
        sleeps=LlamaCpp(),
        port=USUAL_PORTS["llamacpp"],
        names_file=True,
        slots="/slots",
        at_once=4,
        at_once_words=("-np", "--parallel", "LLAMA_ARG_N_PARALLEL"),
        idle_connections=2,  # it has at least two threads more than slots
        control=_routes("/models/load /models/unload /slots/ /lora-adapters"),
        shown=_routes("/health /metrics /v1/models /models"),
        acts_of_page=(("POST", "/v1/streams/lookup"), ("DELETE", "/v1/stream")),
    ),
    "ollama": Engine(
        sleeps=Ollama(),
        port=USUAL_PORTS["ollama"],
        at_once=1,
        at_once_words=("OLLAMA_NUM_PARALLEL",),
        health="/",
        shown=_routes("/api/tags /api/version /v1/models"),
        loads_at_first_request=True,
        control=_routes("/api/pull /api/push /api/create /api/copy /api/delete /api/blobs/ /api/ps"),
    ),
    "tabbyapi": Engine(
        port=USUAL_PORTS["tabbyapi"],
        models="/v1/model",
        shown=_routes("/health /v1/model /v1/models"),
        control=_routes("/v1/model/ /v1/lora/ /v1/template/ /v1/sampling/ /v1/download /v1/auth/ /v1/token/"),
    ),
    "trtllm": Engine(control=_routes("/release_memory /resume_memory /memory_status /update_weights")),
}


def find_engine(name: str) -> Engine:
    """The engine family called ``name``; ValueError says what is known."""
    try:
        return ENGINES[name]
    except KeyError:
        raise ValueError(f"unknown engine {name!r}; known: {', '.join(ENGINES)}") from None


def listen_port(backend: Backend) -> int:
    """The port that the engine listens on, as the service itself sees it."""
    return backend.port or find_engine(backend.engine).port


def idle_connections(backend: Backend) -> int:
    """How many idle connections may be kept to its engine, which may be told how many threads it has."""
    threads = _number(backend.service, ("--threads-http", "LLAMA_ARG_THREADS_HTTP"))
    most = find_engine(backend.engine).idle_connections
    return min(most, threads - 1) if threads else most


def at_once(backend: Backend) -> int:
    """How many answers its engine makes at a time, as far as can be seen."""
    engine = find_engine(backend.engine)
    return _number(backend.service, engine.at_once_words) or engine.at_once


def _number(service: Service, words: tuple[str, ...]) -> int:
    """The number that stands after one of these options, or in such a variable; 0: in none."""
    environment = dict(service.environment)
    values = [*option_values(service.command, words), *map(environment.get, words)]
    return next((int(value) for value in values if value and value.isdecimal()), 0)


# What is asked of an engine


def client_of(
    backend: Backend,
    url: str,
    deadline: float,
    check_cancelled: Callable[[], object] | None = None,
    now: Callable[[], float] = time.monotonic,
) -> EngineClient:
    """A client of the backend's engine, which has to answer by the deadline; the caller closes it."""
    return EngineClient(
        find_engine(backend.engine),
        backend,
        url,
        now=now,
        deadline=deadline,
        check_cancelled=check_cancelled,
    )


def _within(
    limit: float, backend: Backend, url: str, check_cancelled: Callable[[], object] | None = None
) -> EngineClient:
    """The same for so many seconds from now."""
    return client_of(backend, url, time.monotonic() + limit, check_cancelled, time.monotonic)


def await_ready(
    backend: Backend,
    url: str,
    *,
    ended: Callable[[], str | None],
    check_cancelled: Callable[[], object] | None = None,
    deadline: float,
    now: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Returns when the engine at ``url`` serves the backend's model; LoadError says why it does not.

    ``ended`` is asked after every look, also after the last one: an answer counts only while our own service
    runs, whoever gave it. ``check_cancelled`` is called a few times a second, and what it raises ends the
    wait.
    """
    begun = now()
    other_since: float | None = None
    pause = FIRST_PAUSE
    with client_of(backend, url, deadline, check_cancelled, now) as client:
        while True:
            flaw = client.look()
            if how := ended():
                raise LoadError(f"{backend.name} {how} after {now() - begun:.1f} s, before it was ready")
            if flaw is None:
                return
            if check_cancelled and not flaw.is_final:
                check_cancelled()
            other_since = (other_since or now()) if flaw.other_process else None
            if flaw.is_final or (other_since is not None and now() - other_since >= OTHERS_PATIENCE):
                raise LoadError(f"{backend.name} cannot become ready: {flaw.why}")
            if now() + pause >= deadline:
                raise LoadError(
                    f"{backend.name} was not ready within its load_timeout of "
                    f"{backend.load_timeout:g} s: {flaw.why}"
                )
            sleep(pause)
            pause = min(max(pause, PAUSE_SHARE * (now() - begun)), LONGEST_PAUSE)


def answers(
    backend: Backend, url: str, limit: float, now: Callable[[], float] = time.monotonic
) -> bool | None:
    """Whether the engine's health route answers within ``limit`` seconds, as that of a working engine does.

    None: it is silent, or says that it is not well, as one that has much to do may. False: nobody is there to
    answer, since connections are refused, or closed without a word. OSError: nobody can be asked, for want of
    file descriptors here.
    """
    with client_of(backend, url, now() + limit, now=now) as client:
        try:
            return client.is_well(limit) or None
        except requests.Timeout:
            return None
        except requests.RequestException as error:
            if is_shortage(error):
                raise OSError("it cannot be asked now") from error
            return False


def sleep(backend: Backend, url: str, level: int) -> None:
    """Makes the engine give up its GPU memory; it must be the backend's, and idle."""
    sleeps = find_engine(backend.engine).sleeps
    if sleeps is None or level not in sleeps.levels:
        raise BackendError(f"engine {backend.engine} cannot sleep at level {level}")
    with _within(SLEEP_TIMEOUT, backend, url) as client:
        _check_model(client)
        sleeps.sleep(client, level)


def wake(backend: Backend, url: str, level: int, check_cancelled: Callable[[], object] | None = None) -> None:
    """Makes the engine take its GPU memory back. What ``check_cancelled`` raises meanwhile ends that."""
    sleeps = find_engine(backend.engine).sleeps
    if sleeps is None:
        raise BackendError(f"engine {backend.engine} cannot be woken")
    limit = min(WAKE_TIMEOUT, backend.load_timeout) if level == 1 else backend.load_timeout
    with _within(limit, backend, url, check_cancelled) as client:
        sleeps.wake(client, level)


def is_asleep(backend: Backend, url: str) -> bool | None:
    """Whether the engine sleeps; None where it cannot say."""
    sleeps = find_engine(backend.engine).sleeps
    if sleeps is None:
        return None
    with _within(LOOK_TIMEOUT, backend, url) as client:
        return sleeps.is_asleep(client)


def probe(backend: Backend, url: str) -> None:
    """One token from the backend's model; BackendError if it does not come."""
    with _within(min(PROBE_TIMEOUT, backend.load_timeout), backend, url) as client:
        try:
            flaw = client.probe()
            if flaw and flaw.no_route and _is_awake(client) and client.is_well(LOOK_TIMEOUT):
                return  # such as one for speech: that it is well is all there is to learn
        except requests.RequestException as error:
            raise client.complaint("a request for one token", error) from None
    if flaw:
        raise BackendError(flaw.why)


def await_notice(backend: Backend, url: str) -> None:
    """Return once the engine works for nobody, or after a moment: all its clients have left just now."""
    route = find_engine(backend.engine).slots
    for pause in NOTICE_PAUSES if route else ():
        with _within(LOOK_TIMEOUT, backend, url) as client:
            _, slots = client.reply_to("GET", route)
        if b'"is_processing":true' not in slots.replace(b" ", b""):
            return
        time.sleep(pause)


def _check_model(client: EngineClient) -> None:
    """Check that it is the backend's engine: another one may have the address, and must not sleep."""
    if not client.engine.loads_at_first_request and (flaw := client.look(anew=False)):
        raise BackendError(flaw.why)


def _is_awake(client: EngineClient) -> bool:
    """Whether the engine says that it is awake, or cannot sleep: one that cannot say may be well asleep."""
    sleeps = client.engine.sleeps
    return sleeps is None or sleeps.is_asleep(client) is False


def load_adapters(
    backend: Backend,
    url: str,
    *,
    deadline: float,
    check_cancelled: Callable[[], object] | None = None,
    now: Callable[[], float] = time.monotonic,
) -> None:
    """Have the engine load those of its adapters that it lacks; LoadError says which it did not, and why.

    ``check_cancelled`` is called a few times a second, and what it raises ends that.
    """
    if not backend.loras:
        return
    with client_of(backend, url, deadline, check_cancelled, now) as client:
        try:
            there = client.model_ids()
            for name, path in backend.loras:
                if name not in there:
                    _load_adapter(client, name, path)
        except requests.RequestException as error:
            raise LoadError(f"{backend.name} could not be given its LoRA adapters: {error}") from error


def _load_adapter(client: EngineClient, name: str, path: str) -> None:
    asked = {"lora_name": name, "lora_path": path}
    status, answer = client.ask("POST", ADAPTER_ROUTE, asked, client.deadline - client.now())
    if status >= 300 or has_error(answer):
        said = answer[:300].decode("utf-8", "replace")
        raise LoadError(
            f"{client.backend.name} did not load the LoRA adapter {name} from {path}: "
            f"POST {ADAPTER_ROUTE} answers {status}: {said}"
        )
