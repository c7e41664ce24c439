"""The differences of engines: where they listen, how they say that they are ready, what is never forwarded.

To add an engine: a line in ``ENGINES``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import PurePosixPath

from anvil_mux.config.config import Backend, Service
from anvil_mux.config.service import USUAL_PORT, USUAL_PORTS


@dataclass(frozen=True, slots=True)
class Engine:
    """One engine family."""

    port: int = USUAL_PORT
    """The port that it listens on unless another is configured."""
    health: str = "/health"
    must_have_health: bool = True
    """Whether that route must be there; if not, a 404 says nothing, and the list of models decides."""
    alive: str = ""
    """The route that is asked once it was ready, where the other one costs it work; "": the same."""
    slots: str = ""
    """The route that lists what it works on, of an engine that may never end if it is told to before it has
    noticed that the client of that has left.
    """
    models: str = "/v1/models"
    names_file: bool = False
    """Whether its list names the model file (or alias), and it answers to any model name."""
    loads_at_first_request: bool = False
    at_once: int = 256
    """How many answers it makes at a time, unless it is told otherwise."""
    at_once_words: tuple[str, ...] = ()
    """The options and the variable of its environment that tell it otherwise."""
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
        at_once_words=("--max-num-seqs",),
        control=_routes(
            """/sleep /wake_up /is_sleeping /pause /resume /is_paused /abort_requests /collective_rpc
            /reset_prefix_cache /reset_mm_cache /reset_encoder_cache /update_weights
            /init_weight_transfer_engine /start_profile /stop_profile /server_info /scale_elastic_ep
            /is_scaling_elastic_ep /invocations /v1/load_lora_adapter /v1/unload_lora_adapter"""
        ),
    ),
    "sglang": Engine(
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
        port=USUAL_PORTS["llamacpp"],
        names_file=True,
        slots="/slots",
        at_once=4,
        at_once_words=("-np", "--parallel", "LLAMA_ARG_N_PARALLEL"),
        idle_connections=2,  # it has at least two threads more than slots
        control=_routes("/models/load /models/unload /slots/ /lora-adapters"),
        shown=_routes("/health /metrics /v1/models /models"),
    ),
    "ollama": Engine(
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
    values = [*_flags(service.command, words), *map(environment.get, words)]
    return next((int(value) for value in values if value and value.isdecimal()), 0)


def names_told(service: Service) -> frozenset[str]:
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
