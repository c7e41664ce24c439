"""The engines: for each family one row, how it sleeps and wakes, what is asked of one that runs, and its log.

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

How far a load is an engine's log says, which a thread of its own reads, since Docker may be slow. The
patterns are those of vLLM and SGLang (progress bars, of which a line may hold many), llama.cpp (a dot for
each percent) and Ollama. Why an engine ended stands in one line among many: llama.cpp prints its cause first
and then each function that passed it on, a Python engine its traceback twice, once for its worker. ``cause``
finds that line, and knows what helps against the commonest causes.

To add an engine: a row in ``ENGINES`` and, if it can sleep, a class with the methods of ``SleepApi``.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import ClassVar
from urllib.parse import quote

import requests

from anvil_mux.clock import Worker
from anvil_mux.config.config import Backend
from anvil_mux.config.service import USUAL_PORTS, Service, flag_values
from anvil_mux.errors import BackendError, LoadError, is_shortage
from anvil_mux.host.engine_client import (
    LONGEST_PAUSE,
    Engine,
    EngineClient,
    SleepApi,
    has_error,
)
from anvil_mux.host.seam import LoadStage
from anvil_mux.protocol import cards, foreign
from anvil_mux.protocol.cards import ModelCard
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


class Vllm(SleepApi):
    levels = (1, 2)

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


class Sglang(SleepApi):
    is_silent = True
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


class Ollama(SleepApi):
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


class LlamaCpp(SleepApi):
    def sleep(self, client: EngineClient, level: int) -> None:
        self._bring_to(client, "/models/unload", "unloaded")

    def wake(self, client: EngineClient, level: int) -> None:
        self._bring_to(client, "/models/load", "loaded")

    def is_asleep(self, client: EngineClient) -> bool | None:
        status = self._status(client)
        return None if status is None else status not in ("loaded", "loading")

    def dozes(self, client: EngineClient) -> bool:
        """Whether it has unloaded its model by itself (--sleep-idle-seconds); any request loads it again."""
        match foreign.read_or_none(client.reply_to("GET", "/props")[1]):
            case {"is_sleeping": True}:
                return True
        return False

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
                        case {"id": client.model, "status": {"value": "sleeping"}}:
                            return "loaded"  # its process runs, and any request wakes it
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
        enabled_by=(("--enable-auto-tool-choice", "tools"), ("--reasoning-parser", "thinking")),
        at_once_words=("--max-num-seqs",),
        control=_routes(
            """/sleep /wake_up /is_sleeping /pause /resume /is_paused /abort_requests /collective_rpc
            /reset_prefix_cache /reset_mm_cache /reset_encoder_cache /update_weights
            /init_weight_transfer_engine /start_profile /stop_profile /server_info /scale_elastic_ep
            /is_scaling_elastic_ep /invocations /v1/load_lora_adapter /v1/unload_lora_adapter"""
        ),
        headers=("x-data-parallel-rank",),
    ),
    "sglang": Engine(
        sleeps=Sglang(),
        port=USUAL_PORTS["sglang"],
        at_once_words=("--max-running-requests",),
        alive="/v1/models",  # at its health route it generates a token
        describes=("GET /v1/models", "GET /model_info"),
        enabled_by=(("--tool-call-parser", "tools"), ("--reasoning-parser", "thinking")),
        shown=_routes("/health /metrics /v1/models /model_info /get_model_info"),
        control=_routes(
            """/release_memory_occupation /resume_memory_occupation /pause_generation /continue_generation
            /abort_request /flush_cache /update_weights_from_disk /update_weights_from_tensor
            /update_weights_from_distributed /init_weights_update_group /get_weights_by_name
            /load_lora_adapter /unload_lora_adapter /set_internal_state /configure_logging
            /start_profile /stop_profile"""
        ),
        headers=("x-data-parallel-rank", "x-smg-routing-key"),
    ),
    "llamacpp": Engine(
        sleeps=LlamaCpp(),
        port=USUAL_PORTS["llamacpp"],
        names_file=True,
        describes=("GET /props?autoload=false&model=%s",),
        enabled_by=(
            *((word, "embeddings") for word in ("--embedding", "--embeddings", "LLAMA_ARG_EMBEDDINGS")),
            *((word, "reranking") for word in ("--rerank", "--reranking", "LLAMA_ARG_RERANKING")),
        ),
        slots="/slots",
        at_once=4,
        at_once_words=("-np", "--parallel", "LLAMA_ARG_N_PARALLEL"),
        idle_connections=2,  # it has at least two threads more than slots
        control=_routes("/models/load /models/unload /slots/ /lora-adapters"),
        shown=_routes("/health /metrics /v1/models /models"),
        has_page=True,
        acts_of_page=(("POST", "/v1/streams/lookup"), ("DELETE", "/v1/stream")),
    ),
    "ollama": Engine(
        sleeps=Ollama(),
        port=USUAL_PORTS["ollama"],
        at_once=1,
        at_once_words=("OLLAMA_NUM_PARALLEL",),
        health="/",
        describes=("GET /api/ps", "POST /api/show"),  # the length that it gave it, and what it can do
        shown=_routes("/api/tags /api/version /v1/models"),
        loads_at_first_request=True,
        control=_routes("/api/pull /api/push /api/create /api/copy /api/delete /api/blobs/ /api/ps"),
    ),
    "tabbyapi": Engine(
        port=USUAL_PORTS["tabbyapi"],
        models="/v1/model",
        describes=("GET /v1/model",),
        shown=_routes("/health /v1/model /v1/models"),
        control=_routes("/v1/model/ /v1/lora/ /v1/template/ /v1/sampling/ /v1/download /v1/auth/ /v1/token/"),
    ),
    "trtllm": Engine(control=_routes("/release_memory /resume_memory /memory_status /update_weights")),
}


def listen_port(backend: Backend) -> int:
    """The port that the engine listens on, as the service itself sees it."""
    return backend.port or ENGINES[backend.engine].port


def idle_connections(backend: Backend) -> int:
    """How many idle connections may be kept to its engine, which may be told how many threads it has."""
    threads = _number(backend.service, ("--threads-http", "LLAMA_ARG_THREADS_HTTP"))
    most = ENGINES[backend.engine].idle_connections
    return min(most, threads - 1) if threads else most


def at_once(backend: Backend) -> int:
    """How many answers its engine makes at a time, as far as can be seen."""
    engine = ENGINES[backend.engine]
    return _number(backend.service, engine.at_once_words) or engine.at_once


def _number(service: Service, words: tuple[str, ...]) -> int:
    """The number that stands after one of these options, or in such a variable; 0: in none."""
    environment = dict(service.environment)
    values = [*flag_values(service.command, *words), *map(environment.get, words)]
    return next((int(value) for value in values if value and value.isdecimal()), 0)


# What is asked of an engine


def client_of(
    backend: Backend,
    url: str,
    limit: float,
    check_cancelled: Callable[[], object] | None = None,
    now: Callable[[], float] = time.monotonic,
) -> EngineClient:
    """A client of the backend's engine, which has ``limit`` seconds for all answers; the caller closes it."""
    engine = ENGINES[backend.engine]
    return EngineClient(
        engine, backend, url, now=now, deadline=now() + limit, check_cancelled=check_cancelled
    )


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
    with client_of(backend, url, deadline - begun, check_cancelled, now) as client:
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
    with client_of(backend, url, limit, now=now) as client:
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
    with client_of(backend, url, SLEEP_TIMEOUT) as client:
        _check_model(client)
        _sleep_api(backend).sleep(client, level)


def wake(backend: Backend, url: str, level: int, check_cancelled: Callable[[], object] | None = None) -> None:
    """Makes the engine take its GPU memory back. What ``check_cancelled`` raises meanwhile ends that."""
    limit = min(WAKE_TIMEOUT, backend.load_timeout) if level == 1 else backend.load_timeout
    with client_of(backend, url, limit, check_cancelled) as client:
        _sleep_api(backend).wake(client, level)


def is_asleep(backend: Backend, url: str) -> bool | None:
    """Whether the engine sleeps; None where it cannot say."""
    with client_of(backend, url, LOOK_TIMEOUT) as client:
        return _sleep_api(backend).is_asleep(client)


def _sleep_api(backend: Backend) -> SleepApi:
    """How its engine sleeps, which a backend's standby levels say that it can."""
    sleeps = ENGINES[backend.engine].sleeps
    assert sleeps, backend.engine
    return sleeps


def probe(backend: Backend, url: str) -> None:
    """One token from the backend's model; BackendError if it does not come."""
    with client_of(backend, url, min(PROBE_TIMEOUT, backend.load_timeout)) as client:
        try:
            flaw = client.probe()
            if flaw and flaw.no_route and _is_awake(client) and client.is_well(LOOK_TIMEOUT):
                return  # such as one for speech: that it is well is all there is to learn
        except requests.RequestException as error:
            raise client.complaint("a request for one token", error) from None
    if flaw:
        raise BackendError(flaw.why)


def model_card(backend: Backend, url: str) -> ModelCard:
    """Ask the engine for its model's card; what it does not answer within a few seconds is not known."""
    service = backend.service
    words = {*dict(service.environment), *(word.partition("=")[0] for word in service.command)}
    with client_of(backend, url, LOOK_TIMEOUT) as client:
        card = ModelCard(
            capabilities={name: True for word, name in client.engine.enabled_by if word in words}
        )
        for question in client.engine.describes:
            method, path = question.replace("%s", quote(client.model, safe="")).split(" ")
            asked = {"model": client.model} if method == "POST" else None
            with suppress(requests.RequestException):
                status, answer = client.ask(method, path, asked)
                if status < 300:
                    card = card.over(cards.read(foreign.read_or_none(answer), client.model))
    return card


def dozes(backend: Backend, url: str) -> bool:
    """Return whether the engine has given up its memory by itself, until somebody asks it something."""
    sleeps = ENGINES[backend.engine].sleeps
    if not isinstance(sleeps, LlamaCpp):
        return False
    with client_of(backend, url, LOOK_TIMEOUT) as client:
        return sleeps.dozes(client)


def await_notice(backend: Backend, url: str) -> None:
    """Return once the engine works for nobody, or after a moment: all its clients have left just now."""
    route = ENGINES[backend.engine].slots
    for pause in NOTICE_PAUSES if route else ():
        with client_of(backend, url, LOOK_TIMEOUT) as client:
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
    with client_of(backend, url, deadline - now(), check_cancelled, now) as client:
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
        words = answer[:300].decode("utf-8", "replace")
        raise LoadError(
            f"{client.backend.name} did not load the LoRA adapter {name} from {path}: "
            f"POST {ADAPTER_ROUTE} answers {status}: {words}"
        )


# Its log: how far its load is

CAUSE_LINES = 200
"""The last lines of a log among which the cause of an end is looked for."""
SHORT_OF_MEMORY = re.compile(
    r"out ?of ?(device ?)?memory|(cuda|hip)malloc failed|(failed|unable) to allocate|free memory on device|"
    r"no available memory|(not enough|insufficient) memory",
    re.IGNORECASE,
)
"""How engines say that a GPU's memory does not suffice, in the reason of a failed load or its last lines."""
PORT_TAKEN = re.compile(r"address already in use|EADDRINUSE|couldn't bind", re.IGNORECASE)
"""How engines say that they cannot have their port."""
LOOK_SECONDS = 1.0
LINES = 40

READING, COMPILING, CAPTURING, WARMING = "reading weights", "compiling", "capturing CUDA graphs", "warming up"


class LoadLogs:
    """Reads the logs of engines while they load, and of no others."""

    def __init__(
        self, tail: Callable[[Backend, int], Sequence[str]], tell: Callable[[LoadStage], object]
    ) -> None:
        self._tail = tail
        self._tell = tell
        self._loading: dict[str, Backend] = {}
        self.worker = Worker("load-logs", self._turn, first=None)

    @contextmanager
    def reading(self, backend: Backend) -> Iterator[None]:
        """Have the log of the backend read meanwhile. Any thread."""
        self._loading[backend.name] = backend
        self.worker.wake()
        try:
            yield
        finally:
            del self._loading[backend.name]

    def _turn(self) -> float | None:
        backends = list(self._loading.values())
        for backend in backends:
            found = stage_of(backend.name, self._tail(backend, LINES))
            if found and backend.name in self._loading:
                self._tell(found)
        return LOOK_SECONDS if backends else None


_PERCENT = r":\s{1,9}(\d{1,3})%(?:[^\r\[]{0,99}\[[\d:]{1,20}<([\d:]{1,20}))?"
_BARS = (
    (re.compile(rf"checkpoint shards{_PERCENT}"), READING),
    (re.compile(rf"Captur(?:e|ing) (?:CUDA graph|cudagraph|batches)[^\r%]{{0,99}}?{_PERCENT}"), CAPTURING),
    (re.compile(rf"Compiling num tokens[^\r%]{{0,99}}?{_PERCENT}"), COMPILING),
    (re.compile(rf"(?:\.safetensors|\.gguf|\.bin|Fetching \d{{1,9}} files){_PERCENT}"), "downloading"),
)
"""Everything in them has a bound: whatever an engine prints is read in one pass."""
_WORDS = (
    (re.compile(r"model load progress (0\.\d+|1\.0)"), READING),
    (
        re.compile(r"Starting to load model|loading model tensors|llama_model_loader: loaded meta data"),
        READING,
    ),
    (re.compile(r"torch\.compile|Dynamo bytecode transform|Compiling a graph"), COMPILING),
    (
        re.compile(r"Loading weights took|Model loading took|KV cache|llama_context: construct|warming up"),
        WARMING,
    ),
    (re.compile(r"Graph capturing finished|Capture cuda graph end"), WARMING),
)
_DOTS = re.compile(r"\.{2,}")


def stage_of(backend: str, lines: Sequence[str]) -> LoadStage | None:
    """Read the last line of a backend's log that says something of its load."""
    return next(filter(None, (_of_line(backend, line) for line in reversed(lines))), None)


def _of_line(backend: str, line: str) -> LoadStage | None:
    if _DOTS.fullmatch(line.strip()):
        return LoadStage(backend, READING, min(len(line.strip()) / 100, 1.0))
    for pattern, stage in _BARS:
        if bars := pattern.findall(line):
            percent, left = bars[-1]
            return LoadStage(backend, stage, int(percent) / 100, _seconds(left))
    for pattern, stage in _WORDS:
        if found := pattern.search(line):
            return LoadStage(backend, stage, float(found[1]) if pattern.groups else None)
    return None


def _seconds(clock: str) -> float | None:
    """Turn ``1:02:03`` into seconds."""
    total = 0.0
    for part in clock.split(":"):
        if not part.isdigit():
            return None
        total = 60 * total + int(part)
    return total


# Why it ended

_CAUSES = (
    (
        SHORT_OF_MEMORY,
        "it needs more GPU memory than is free: a shorter context or a smaller quantization helps, for vLLM "
        "also another --gpu-memory-utilization",
    ),
    (
        PORT_TAKEN,
        "another program has this port: let anvil-mux choose one ($PORT), or end that program",
    ),
    (
        re.compile(
            r"(?<!object file: )No such file or directory|FileNotFoundError|is not a valid model identifier|"
            r"does not appear to have a file named"
        ),
        "check the path in its command; in a container it is a path inside, below what `volumes` mounts",
    ),
    (
        re.compile(
            r"unknown model architecture|[Mm]odel architectures? .{1,200} not supported|"
            r"does not recognize this architecture"
        ),
        "this version of the engine does not know this kind of model: a newer one may",
    ),
    (
        re.compile(
            r"libcuda\.so|No CUDA GPUs are available|no CUDA-capable device|Failed to infer device type|"
            r"CUDA driver version is insufficient|invalid device: CUDA"
        ),
        "it sees no GPU: check nvidia-smi, CUDA_VISIBLE_DEVICES, and of a container the GPUs that it "
        "reserves",
    ),
)
_FIRST_ERROR = re.compile(r"^[\d.]{10,20} E ")
"""The level of a line of llama.cpp, whose first error is the cause of the others."""
_ERROR = re.compile(r"(?:^|[ .])(?:[A-Z]\w{0,60}(?:Error|Exception)|[Ee]rror|fatal|panic): ")
_RETOLD = re.compile(r"Engine core initialization failed|failed to load model")
"""Lines that pass on what another one has said before."""
_ONLY_INSIDE = re.compile(
    r"(?:listening|running) on (?:https?://)?(?:127\.0\.0\.1|localhost|\[::1\])", re.IGNORECASE
)
_BEFORE_THE_TEXT = re.compile(
    r"^(?:\([^)]{1,80}\) )?(?:[\d.]{10,20} [A-Z] (?:[a-z]{3} {1,20})?|\[[\d :.,TZ-]{10,40}[^\]]{0,40}\] |"
    r"[A-Z]{4,8} [\d-]{5,10} [\d:.,]{8,15} (?:\[[^\]]{1,80}\] )?)?\s*"
)
"""Process, time, level and place, as vLLM, llama.cpp and SGLang print them."""
_MOST_TEXT = 300


def cause(lines: Sequence[str], *, ended: bool, contained: bool) -> str:
    """The line of a log that says why a load failed, and what helps, without a full stop; "" if none does.

    ``ended``: whether the engine has ended; ``contained``: whether it runs in a container.
    """
    if not ended:
        if contained and (line := next(filter(_ONLY_INSIDE.search, reversed(lines)), "")):
            return f"{_text(line)}; nobody outside reaches it there: add --host 0.0.0.0 to its command"
        return ""
    for pattern, advice in _CAUSES:
        if line := next(filter(pattern.search, lines), ""):
            return f"{_text(line)}; {advice}"
    if line := next(filter(_FIRST_ERROR.search, lines), ""):
        return _text(line)
    errors = [line for line in lines if _ERROR.search(line) and not _RETOLD.search(line)]
    return _text(errors[-1]) if errors else ""


def _text(line: str) -> str:
    text = _BEFORE_THE_TEXT.sub("", line.strip())
    return text if len(text) <= _MOST_TEXT else f"{text[:_MOST_TEXT]}..."
