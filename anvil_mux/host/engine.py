"""The differences of engines: where they listen, when they are ready, what must never be forwarded.

Ready means that the engine's own health route answers and that it serves the model we mean, since a health
route alone also answers for another process that happens to have the port. The model is read from the
engine's list of models. Where that list cannot tell (llama.cpp reports its file or alias and answers to any
name), the service's own command says what to expect; where nothing does, a request for one token is the
proof. For Ollama that request is also what loads the weights.

Whoever calls ``await_ready`` has a deadline, a way to learn that the service ended and one to end the wait,
so it fails at once when the engine has died, and never waits for longer than it was told.

To add an engine: a line in ``ENGINES``.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import urlsplit

import requests

from anvil_mux.config.config import Backend, Service
from anvil_mux.errors import LoadError

FIRST_PAUSE, LONGEST_PAUSE = 0.02, 0.1
PAUSE_SHARE = 0.01
"""Share of a load's time so far by which a look may come too late."""
POLL_TIMEOUT = 5.0
LEAST_TIMEOUT = 0.2
"""Seconds that an answer may take even just before the deadline."""
OTHERS_PATIENCE = 20.0
"""Seconds that the list of models may name another model before that is final."""
MOST_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class Engine:
    """One engine family."""

    port: int = 8000
    """The port that it listens on unless it is told otherwise."""
    health: str = "/health"
    must_have_health: bool = True
    """Whether that route must be there; if not, a 404 says nothing, and the list of models decides."""
    models: str = "/v1/models"
    names_file: bool = False
    """Whether its list names the model file (or alias), and it answers to any model name."""
    loads_at_first_request: bool = False
    idle_connections: int = 256
    """The most that are kept to it; few, where each holds one of its threads until a time-out ends it."""
    control: tuple[str, ...] = ()
    """Routes that steer the engine itself, never forwarded; a trailing slash means everything below."""
    shown: tuple[str, ...] = ("/health", "/metrics", "/version", "/v1/models")
    """Routes that may be read below /upstream/, besides those of models."""

    def steers(self, path: str) -> bool:
        """Whether ``path`` is one of its control routes."""
        return any(path == route or (route[-1] == "/" and path.startswith(route)) for route in self.control)


def _routes(paths: str) -> tuple[str, ...]:
    return tuple(paths.split())


ENGINES: dict[str, Engine] = {
    "openai": Engine(must_have_health=False),
    "vllm": Engine(
        control=_routes(
            """/sleep /wake_up /is_sleeping /pause /resume /is_paused /abort_requests /collective_rpc
            /reset_prefix_cache /reset_mm_cache /reset_encoder_cache /update_weights
            /init_weight_transfer_engine /start_profile /stop_profile /server_info /scale_elastic_ep
            /is_scaling_elastic_ep /invocations /v1/load_lora_adapter /v1/unload_lora_adapter"""
        )
    ),
    "sglang": Engine(
        port=30000,
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
        port=8080,
        names_file=True,
        idle_connections=2,  # it has at least two threads more than slots
        control=_routes("/models/load /models/unload /slots/ /lora-adapters"),
        shown=_routes("/health /metrics /v1/models /models"),
    ),
    "ollama": Engine(
        port=11434,
        health="/",
        shown=_routes("/api/tags /api/version /v1/models"),
        loads_at_first_request=True,
        control=_routes("/api/pull /api/push /api/create /api/copy /api/delete /api/blobs/ /api/ps"),
    ),
    "tabbyapi": Engine(
        port=5000,
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


@dataclass(frozen=True, slots=True)
class Ready:
    pass


@dataclass(frozen=True, slots=True)
class NotYet:
    """Another look is worth it. ``other_process``: a healthy server answers there, for another model."""

    why: str
    other_process: bool = False


@dataclass(frozen=True, slots=True)
class Never:
    """No later look can find it ready."""

    why: str


Readiness = Ready | NotYet | Never


def await_ready(
    backend: Backend,
    url: str,
    *,
    ended: Callable[[], str | None],
    tend: Callable[[], object] | None = None,
    deadline: float,
    now: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Returns when the engine at ``url`` serves the backend's model; LoadError says why it does not.

    ``ended`` is asked after every look, also after the last one: an answer counts only while our own service
    runs, whoever gave it. ``tend`` is called a few times a second, and what it raises ends the wait.
    """
    begun = now()
    other_since: float | None = None
    pause = FIRST_PAUSE
    with Visit(backend, url, now, deadline, tend) as visit:
        while True:
            sight = visit.look()
            if how := ended():
                raise LoadError(f"{backend.name} {how} after {now() - begun:.1f} s, before it was ready")
            match sight:
                case Ready():
                    return
                case Never(why):
                    raise LoadError(f"{backend.name} cannot become ready: {why}")
                case NotYet(why, other_process):
                    other_since = (other_since or now()) if other_process else None
            if tend:
                tend()
            if other_since is not None and now() - other_since >= OTHERS_PATIENCE:
                raise LoadError(f"{backend.name} cannot become ready: {why}")
            if now() + pause >= deadline:
                raise LoadError(
                    f"{backend.name} was not ready within its load_timeout of "
                    f"{backend.load_timeout:g} s: {why}"
                )
            sleep(pause)
            pause = min(max(pause, PAUSE_SHARE * (now() - begun)), LONGEST_PAUSE)


def answers(
    backend: Backend, url: str, limit: float, now: Callable[[], float] = time.monotonic
) -> bool | None:
    """Whether the engine's health route answers within ``limit`` seconds, as that of a working engine does.

    None: it is silent, or says that it is not well, as one that has much to do may. False: nobody is there to
    answer, since connections are refused, or closed without a word.
    """
    with Visit(backend, url, now, now() + limit) as visit:
        try:
            return visit.is_well(limit) or None
        except requests.Timeout:
            return None
        except requests.RequestException:
            return False


@dataclass
class Visit:
    """Talks to one engine over one pooled connection; redirects and proxies are not followed."""

    backend: Backend
    url: str
    now: Callable[[], float]
    deadline: float
    tend: Callable[[], object] | None = None
    """Called a few times a second while it waits for a long answer; what it raises ends that."""
    session: requests.Session = field(default_factory=requests.Session)

    def __post_init__(self) -> None:
        self.engine = find_engine(self.backend.engine)
        self.model = self.backend.served_model or self.backend.model
        self.place = f"port {urlsplit(self.url).port}"
        self.session.trust_env = False
        if key := self.backend.service.api_key:
            self.session.headers["Authorization"] = f"Bearer {key}"

    def __enter__(self) -> Visit:
        return self

    def __exit__(self, *exc: object) -> None:
        self.session.close()

    def look(self) -> Readiness:
        try:
            return self._health() or self._models() or Ready()
        except requests.Timeout:
            return NotYet(f"{self.place} accepts connections but does not answer")
        except requests.RequestException as error:
            refused = isinstance(error, requests.ConnectionError) and "refused" in str(error)
            what = "nothing listens there yet" if refused else "connections are closed without an answer"
            return NotYet(f"{self.place}: {what}")
        finally:
            # llama-server was seen to stop 0.1 s later if a connection outlived its loading.
            self.session.close()

    def is_well(self, timeout: float) -> bool:
        """Whether its health route says so, or is no route of an engine that needs none."""
        return self._says_well(self.ask("GET", self.engine.health, None, timeout)[0])

    def _says_well(self, status: int) -> bool:
        return status < 300 or (status in (404, 405, 501) and not self.engine.must_have_health)

    def _health(self) -> Readiness | None:
        path = self.engine.health
        status, _ = self.ask("GET", path)
        return None if self._says_well(status) else NotYet(f"{self.place}: GET {path} answers {status}")

    def _models(self) -> Readiness | None:
        path = self.engine.models
        status, body = self.ask("GET", path)
        if status in (401, 403):
            return Never(
                f"{self.place}: GET {path} answers {status}: it wants an API key. "
                "Give it with --api-key in the service's command, or not at all"
            )
        if status in (404, 405, 501):
            return self.probe()
        if status >= 300:
            return NotYet(f"{self.place}: GET {path} answers {status}")
        return self._judge(_model_ids(body))

    def _judge(self, ids: list[str]) -> Readiness | None:
        if not ids:
            return NotYet(f"{self.place} lists no model yet")
        if any(self._means(reported) for reported in ids):
            return self.probe() if self.engine.loads_at_first_request else None
        if self.engine.names_file and not _told(self.backend.service):
            return self.probe()
        reported = ", ".join(ids[:5])
        hint = (
            "" if self.engine.names_file else f" (if that is the engine you mean, set served_model: {ids[0]})"
        )
        return NotYet(
            f"{self.place} answers for model {reported}, not {self.model}{hint}", other_process=True
        )

    def _means(self, reported: str) -> bool:
        if reported in (self.model, f"{self.model}:latest"):
            return True
        told = _told(self.backend.service) if self.engine.names_file else ()
        return PurePosixPath(reported).name in told

    def probe(self) -> Readiness | None:
        """Ask for one token or embedding, whichever route the engine has; None if it was answered."""
        why, routes = "", 0
        for path, body in _probes(self.model):
            status, answer = self.ask("POST", path, body, self.deadline - self.now())
            if status < 300:
                return None
            routes += status not in (404, 405)
            why = (
                why
                or f"{self.place}: POST {path} answers {status}: {answer[:200].decode('utf-8', 'replace')}"
            )
            if status == 503:
                break
        if routes == 0 and not self.engine.must_have_health:
            return (
                None  # An engine without any text route, such as one for images: its health is all there is.
            )
        return NotYet(why)

    def ask(
        self, method: str, path: str, body: dict[str, Any] | None = None, timeout: float = POLL_TIMEOUT
    ) -> tuple[int, bytes]:
        """Return status and first bytes of the answer; the time-out also ends one that drips out."""
        timeout = max(min(timeout, self.deadline - self.now()), LEAST_TIMEOUT)
        if self.tend is None or timeout <= POLL_TIMEOUT:
            return self._ask(method, path, body, timeout)
        # A load may take as long as its answer: the thread is left behind when nobody wants it any more.
        asked = Future[tuple[int, bytes]]()
        run = partial(_answer, asked, partial(self._ask, method, path, body, timeout))
        threading.Thread(target=run, name=f"ask-{self.backend.name}", daemon=True).start()
        while wait([asked], LONGEST_PAUSE).not_done:
            self.tend()
        return asked.result()

    def _ask(self, method: str, path: str, body: dict[str, Any] | None, timeout: float) -> tuple[int, bytes]:
        give_up = time.monotonic() + timeout
        answer = bytearray()
        with self.session.request(
            method, self.url + path, json=body, timeout=timeout, allow_redirects=False, stream=True
        ) as response:
            for chunk in response.iter_content(256):
                answer += chunk
                if len(answer) > MOST_BYTES:
                    break
                if time.monotonic() > give_up:
                    raise requests.Timeout(path)
            return response.status_code, bytes(answer)


def _answer(asked: Future[tuple[int, bytes]], ask: Callable[[], tuple[int, bytes]]) -> None:
    try:
        asked.set_result(ask())
    except Exception as error:
        asked.set_exception(error)


def idle_connections(backend: Backend) -> int:
    """How many idle connections may be kept to its engine, which may be told how many threads it has."""
    service = backend.service
    told = [
        *_flags(service.command, ("--threads-http",)),
        dict(service.environment).get("LLAMA_ARG_THREADS_HTTP"),
    ]
    threads = next((int(each) for each in told if each and each.isdecimal()), 0)
    most = find_engine(backend.engine).idle_connections
    return min(most, threads - 1) if threads else most


def _told(service: Service) -> frozenset[str]:
    """The file name and aliases that llama-server was started with, as it will report them."""
    environment = dict(service.environment)
    files = [*_flags(service.command, ("-m", "--model")), environment.get("LLAMA_ARG_MODEL")]
    aliases = [*_flags(service.command, ("-a", "--alias")), environment.get("LLAMA_ARG_ALIAS")]
    names = {PurePosixPath(file).name for file in files if file}
    for alias in aliases:
        names.update(PurePosixPath(name.strip()).name for name in (alias or "").split(","))
    return frozenset(names - {""})


def _flags(command: tuple[str, ...], names: tuple[str, ...]) -> Iterator[str]:
    for word, following in zip_longest(command, command[1:], fillvalue=""):
        flag, equals, value = word.partition("=")
        if flag in names:
            yield value if equals else following


def _model_ids(body: bytes) -> list[str]:
    """The ids in a list of models, or in the description of the one loaded model."""
    try:
        found = json.loads(body)
    except ValueError:
        return []
    if not isinstance(found, dict):
        return []
    entries = found.get("data", [found])
    if not isinstance(entries, list):
        return []
    return [entry["id"] for entry in entries if isinstance(entry, dict) and isinstance(entry.get("id"), str)]


def _probes(model: str) -> tuple[tuple[str, dict[str, Any]], ...]:
    message = {"role": "user", "content": "Hi"}
    return (
        ("/v1/chat/completions", {"model": model, "messages": [message], "max_tokens": 1}),
        ("/v1/completions", {"model": model, "prompt": "Hi", "max_tokens": 1}),
        ("/v1/embeddings", {"model": model, "input": "Hi"}),
        ("/v1/rerank", {"model": model, "query": "Hi", "documents": ["Hi"]}),
    )
