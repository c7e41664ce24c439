"""The tables of settings: all that depends on a key stands in one place, its row.

Reading, messages, documentation, what a reload may change at once, and what the event log records follow
from ``SETTINGS`` (``x-anvil`` at the top level) and ``SERVICE_SETTINGS`` (on a service).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from anvil_mux.config import any_of, elsewhere, fallback, hooks, service, settings, shapes
from anvil_mux.config.config import (
    ANY_HOST,
    DEFAULT_ROUTING,
    EITHER,
    ENGINES,
    HOST_NAME,
    INFER_TYPES,
    LOCAL,
    WAY_ALIASES,
    WAYS,
    Backend,
    Config,
    DeclaredMachine,
    Gpu,
    WantedHosts,
    default_of,
)
from anvil_mux.config.presets import read_loras, read_presets
from anvil_mux.config.rewrite import check_strip, read_set
from anvil_mux.config.settings import Setting, ValueKind


def _read_gpus(value: Any) -> tuple[Gpu, ...]:
    if not isinstance(value, dict):
        return tuple(Gpu(id) for id in settings.NAMES.read(value))
    gpus = settings.MappingReader(value, value)
    made = [gpus.read(id, partial(_read_gpu, id), Gpu(id)) for id in value]
    return tuple(gpus.make(made))


def _read_gpu(id: str, about: Any) -> Gpu:
    if not isinstance(about, dict):
        raise ValueError('must hold its memory, as in gpus: {"0": {vram: 24GiB, reserve: 1GiB}}')
    sizes = settings.MappingReader(about, ("vram", "reserve"))
    vram = sizes.read("vram", settings.MEMORY.read)
    reserve = sizes.read("reserve", settings.MEMORY.read, 0)
    if vram is not None and vram <= reserve:
        raise ValueError("reserve leaves nothing of its vram")
    made: Gpu = sizes.make(Gpu(id, vram, reserve))
    return made


def _read_used_gpus(value: Any) -> str | tuple[str, ...] | list[tuple[str, ...]]:
    if isinstance(value, list) and any(isinstance(each, list) for each in value):
        return [settings.NAMES.read(each) for each in value]
    return service.ALL if value == service.ALL else settings.NAMES.read(value)


def _read_machines(value: Any) -> dict[str, DeclaredMachine]:
    if not isinstance(value, dict):
        raise ValueError(f"must hold {{host: {{gpus, host_memory}}}}, not {settings.show(value)}")
    machines = settings.MappingReader(value, value)
    found = {name: machines.take(name, about, partial(_read_machine, name)) for name, about in value.items()}
    made: dict[str, DeclaredMachine] = machines.make({name: each for name, each in found.items() if each})
    return made


def _read_machine(name: str, about: Any) -> DeclaredMachine:
    if name == LOCAL:
        raise ValueError("is anvil-mux's own machine: its gpus and host_memory go to the top level")
    _check_host(name)
    if about is None:
        return DeclaredMachine()
    if not isinstance(about, dict):
        raise ValueError(f"must hold gpus or host_memory, not {settings.show(about)}")
    parts = settings.MappingReader(about, ("gpus", "host_memory"))
    gpus = parts.read("gpus", _read_gpus)
    made: DeclaredMachine = parts.make(DeclaredMachine(gpus, parts.read("host_memory", settings.MEMORY.read)))
    return made


def _read_hosts(value: Any) -> WantedHosts:
    if isinstance(value, dict) and value:
        return {settings.TEXT.read(label): settings.TEXT.read(each) for label, each in value.items()}
    names: tuple[str, ...] = settings.NAMES.read(value or [])
    if names == (ANY_HOST,):
        return ANY_HOST
    if not names:
        raise ValueError("must name a host, or any, or {label: value}")
    for name in names:
        _check_host(name)
    return names


def _check_host(name: str) -> None:
    if name == ANY_HOST:
        raise ValueError(f"{ANY_HOST} means every host, so it is written alone: hosts: {ANY_HOST}")
    if not HOST_NAME.fullmatch(name):
        raise ValueError(
            f"a host's name may hold lower-case letters, digits, - and _, not {settings.show(name)}"
        )


def _read_vram(value: Any) -> tuple[int | None, bool]:
    if value == "measured":
        return None, True
    if amount := settings.MEMORY.read(value):
        return int(amount), False
    raise ValueError("must be more than 0; leave it out if the model needs its GPU whole")


def _read_paths(value: Any) -> tuple[str, ...]:
    paths = settings.NAMES.read(value)
    for path in paths:
        if not re.fullmatch(r"(/[A-Za-z0-9_-][A-Za-z0-9._-]*)+/?", path):
            raise ValueError(f"must be paths such as /docs or /sdapi/, not {settings.show(path)}")
    return tuple(paths)


def _read_project(value: Any) -> str:
    if not re.fullmatch(r"[a-z0-9][a-z0-9_-]*", str(value)):
        raise ValueError(f"must be lower-case letters, digits, - and _, not {settings.show(value)}")
    return str(value)


ROUTING = ("default", "mode", "policies", "store")
STORES = ("redis://", "rediss://", "unix://")
MODE = settings.one_of("lite", "full")


Routed = tuple[str, dict[str, Any], str, str]
"""The setting ``routing``: (the default policy, the file's own policies, mode, store)."""


def _read_routing(value: Any) -> Routed:
    if not isinstance(value, dict):
        return settings.TEXT.read(value), {}, "lite", ""
    # What a variable leaves empty says nothing.
    parts = settings.MappingReader({key: each or None for key, each in value.items()}, ROUTING)
    default = parts.read("default", settings.TEXT.read, DEFAULT_ROUTING)
    mode = parts.read("mode", MODE.read, "lite")
    policies = parts.read("policies", _read_policies, {})
    made: Routed = parts.make((default, policies, mode, parts.read("store", _read_store, "")))
    return made


def _read_policies(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"must hold {{name: policy}}, not {settings.show(value)}")
    return value


def _read_store(value: Any) -> str:
    if value and not str(value).startswith(STORES):
        raise ValueError("must be the address of a Redis, as redis://host:6379/0")
    return str(value)


_GPUS = shapes.any_of(
    settings.NAMES.shape,
    shapes.by_name(
        shapes.any_of(
            shapes.mapping({"vram": settings.MEMORY.shape, "reserve": settings.MEMORY.shape}),
            shapes.NOTHING,
        )
    ),
)
_USED_GPUS = shapes.any_of(settings.NAMES.shape, {"type": "array", "items": settings.NAMES.shape})
_MACHINES = shapes.by_name(
    shapes.any_of(shapes.mapping({"gpus": _GPUS, "host_memory": settings.MEMORY.shape}), shapes.NOTHING)
)
_HOSTS = shapes.any_of(settings.NAMES.shape, shapes.by_name(settings.TEXT.shape))
_VRAM = shapes.any_of({"enum": ["measured"]}, settings.MEMORY.shape)
_ROUTING = shapes.any_of(
    settings.TEXT.shape,
    shapes.mapping(
        {
            "default": settings.TEXT.shape,
            "mode": shapes.any_of(MODE.shape, {"const": ""}),
            "policies": shapes.any_of({"type": "object"}, {"const": ""}),
            "store": shapes.any_of(shapes.text("^(redis|rediss|unix)://"), {"const": ""}),
        }
    ),
)
_SET = shapes.any_of({"type": "object"}, {"type": "string", "pattern": "{"})
_PRESET = shapes.mapping({"set": _SET, "strip": shapes.listed(shapes.text()), "system": {"type": "string"}})
_PRESETS = shapes.any_of(shapes.by_name(_PRESET), {"type": "string", "pattern": r"{|\$"})
_LORAS = shapes.any_of(shapes.by_name(shapes.text()), shapes.listed(shapes.text()))

SECONDS, TEXT, SIZE = settings.SECONDS, settings.TEXT, settings.SIZE
COUNT = settings.whole_number(1)
PRIORITY = settings.whole_number(-100, 100)

_live = partial(Setting, live=True)
_at_start = partial(Setting, live=False)

SETTINGS: dict[str, Setting] = {
    "listen": _at_start(
        settings.LISTEN,
        "Where clients connect.",
        fills=("host", "port"),
        default=f"{default_of(Config, 'host')}:{default_of(Config, 'port')}",
    ),
    "runtime": _at_start(
        settings.one_of("compose", "process"), "Services as containers or as local processes."
    ),
    "project": _at_start(
        ValueKind("text", _read_project, shapes.text(r"^[a-z0-9][a-z0-9_-]*$")),
        "The Compose project; by default as Compose names it.",
        default="",
        logged=True,
    ),
    "gpus": _live(
        ValueKind("list of ids, or {id: {vram, reserve}}", _read_gpus, _GPUS),
        "The GPUs that may be used, with their memory and what of it no model gets; by default those that "
        "are found: NVIDIA's by index or UUID, others as amd0 or intel0 (see gpus.md).",
        logged=True,
    ),
    "machines": _live(
        ValueKind("{host: {gpus, host_memory}}", _read_machines, _MACHINES),
        "The same of other hosts, where it is not to be what they report themselves (see cluster.md).",
        fills=("memory_of_hosts",),
        default="",
        logged=True,
    ),
    "policy": _live(
        settings.CHOSEN, "When a swap is worth its cost.", fills=("policy", "policy_settings"), logged=True
    ),
    "eviction": _live(
        settings.CHOSEN,
        "Which models are evicted first.",
        fills=("eviction", "eviction_settings"),
        logged=True,
    ),
    "routing": _live(
        ValueKind(
            "name, or {default, mode: lite or full, policies: {name: policy}, store}",
            _read_routing,
            _ROUTING,
        ),
        "Which of a model's replicas gets a request (see docs/routing.md).",
        fills=("routing", "routing_policies", "routing_mode", "routing_store"),
        later=("routing_mode", "routing_store"),
    ),
    "drain_timeout": _live(
        SECONDS, "How long a swap waits for requests that run; 0: not at all.", logged=True
    ),
    "home_after": _live(
        SECONDS, "How long nothing else was wanted when a model with `home` comes back.", logged=True
    ),
    "queue_timeout": _live(SECONDS, "The longest wait of a request for its model.", logged=True),
    "max_wait": _live(
        settings.SECONDS_OR_AUTO,
        "A queue gets its swap after this at the latest, whatever the policy says; auto: 60 s, or "
        "4/3 of the time that a round over all models takes that wait, if that is longer (see design.md).",
        logged=True,
    ),
    "max_queue": _live(
        COUNT, "Requests that may wait, over all models; more are refused as overloaded.", logged=True
    ),
    "max_connections": _live(COUNT, "Clients connected at once."),
    "upstream_timeout": _at_start(SECONDS, "The longest silence of an engine, before or within an answer."),
    "client_timeout": _at_start(
        SECONDS, "How long a client may take nothing of its answer, which is ended then."
    ),
    "loading_grace": _live(SECONDS, "Silence before the keep-alive lines of a waiting stream begin."),
    "max_body": _live(SIZE, "The largest JSON request."),
    "max_upload": _live(SIZE, "The largest multipart request (audio, images)."),
    "default_model": _live(TEXT, "The model of requests that name none."),
    "any_of": _live(
        any_of.KIND,
        "Names that stand for several models, in order: the one that is resident serves (see staying.md).",
        default="",
    ),
    "host_memory": _live(
        settings.MEMORY,
        "Host memory for all engines, also in standby; by default 9/10 of the machine's.",
        logged=True,
    ),
    "preload": _live(settings.FLAG, "Load every model once at the start, before anybody asks."),
    "key_file": _live(
        TEXT, "A file of API keys, one to a line; see docs/security.md. ANVIL_API_KEYS too.", is_file=True
    ),
    "tls_cert": _live(
        TEXT, "A file with the certificate (and its chain) for https; needs tls_key.", is_file=True
    ),
    "tls_key": _live(TEXT, "A file with the certificate's private key.", is_file=True),
    "allowed_hosts": _live(
        settings.NAMES, "Names in the Host header that are answered to besides this machine's; see security."
    ),
    "cors": _live(settings.ORIGINS, "Other web sites whose pages may use this address; see security."),
    "on_exit": _live(settings.one_of("keep", "stop"), "What happens to running engines at exit."),
    "capture": _live(
        settings.whole_number(0, 1000),
        "How many requests are kept in memory with their bodies, for `anvil-mux requests`; see sharing.md.",
    ),
    "when_paused": _live(
        settings.one_of("refuse", "wait"),
        "Whether requests that come while anvil-mux is paused (`anvil-mux pause`) are refused, or wait.",
        logged=True,
    ),
    "hooks": _at_start(hooks.KIND, "Commands or web addresses that get the events of models."),
}
"""The settings in ``x-anvil`` at the top level, which fill ``Config``."""
RENAMED = {"hosts": "allowed_hosts"}
"""A key of the top level that is another setting's name now -> the name of what it was."""

_steers = partial(Setting, live=True, logged=True)
_replaces = partial(Setting, live=False, logged=True)

SERVICE_SETTINGS: dict[str, Setting] = {
    "model": _replaces(TEXT, "What clients call it; by default the service's name. Equal: replicas."),
    "aliases": _steers(settings.NAMES, "Other names for the model."),
    "gpus": _replaces(
        ValueKind("list of ids, or all", _read_used_gpus, _USED_GPUS),
        "The GPUs it needs, all of them; by default those that the service reserves, or is given by device "
        "files (see gpus.md). "
        "A scaled process may have a list for each replica.",
    ),
    "gpu_count": _replaces(
        COUNT, "Any so many free GPUs of a host, instead of `gpus` (see cluster.md).", fills=None, default=""
    ),
    "hosts": _replaces(
        ValueKind("list of hosts, any, or {label: value}", _read_hosts, _HOSTS),
        "Where it may run; by default where anvil-mux runs (see cluster.md).",
        fills=("host",),
        default="",
    ),
    "most": _steers(
        COUNT, "How many are loaded at once, where there are hosts or GPUs to choose among.", default="1"
    ),
    "vram": _replaces(
        ValueKind("size, or measured", _read_vram, _VRAM),
        "What it holds on each of its GPUs; measured: what it held when it last left; by default all of it.",
        fills=("vram", "vram_measured"),
    ),
    "engine": _replaces(settings.one_of(*ENGINES), "The program inside; by default what the image says."),
    "port": _replaces(
        settings.PORT, "Where the engine listens; by default the service's port, or the engine's."
    ),
    "served_model": _replaces(TEXT, "The id that the engine itself uses; by default what its command says."),
    "pin": _steers(settings.FLAG, "It is never evicted for another model."),
    "priority": _steers(PRIORITY, "The higher, the earlier its queue is served and the later it is evicted."),
    "home": _steers(
        settings.FLAG,
        "It comes back when nothing else was wanted on its GPUs for home_after (see staying.md).",
    ),
    "home_after": _steers(SECONDS, "The same as at the top level, for this model."),
    "ttl": _steers(SECONDS, "Idle time after which it is evicted though nobody waits; by default never."),
    "drain_timeout": _steers(
        settings.SECONDS_OR_NONE,
        "The same as at the top level, for swaps that evict it; none: as long as its requests take. Where it "
        "is unloaded by hand, its host is drained or anvil-mux ends, the top level's holds (see staying.md).",
    ),
    "min_residency": _steers(SECONDS, "How long it stays after a load, unless a queue is overdue."),
    "max_wait": _steers(settings.SECONDS_OR_AUTO, "The same as at the top level, for this model."),
    "max_queue": _steers(
        COUNT, "Requests that may wait for this model, beside the top level's bound on all together."
    ),
    "routing": _steers(TEXT, "The routing policy of its model; replicas have the same."),
    "kv_tokens": _steers(COUNT, "How many tokens its engine's cache holds, for the choice among replicas."),
    "infer_type": _replaces(
        settings.one_of(*INFER_TYPES, EITHER),
        "prefill, decode or either: which of two stages it serves (see docs/routing.md).",
    ),
    "node": _steers(TEXT, "The machine it is on. The filter failover can take out all of a machine."),
    "failure_domain": _steers(TEXT, "The group of replicas it is in, for the filter failover too."),
    "profile": _steers(
        ValueKind("file", TEXT.read, TEXT.shape), "How fast it is, as `anvil-mux profile` measured it."
    ),
    "load_timeout": _steers(SECONDS, "How long a load may take."),
    "stop_timeout": _steers(SECONDS, "Grace before it is killed; by default stop_grace_period."),
    "evict_to": _replaces(
        settings.listed(WAYS, WAY_ALIASES),
        "Its standby levels, from the lightest down (sleep-1 is sleep); by default what its command allows: "
        "sleep, stop or just stop.",
        default="",
    ),
    "demote_after": _steers(
        SECONDS, "Time at one standby level of `evict_to`, after which it is demoted to the next; or never."
    ),
    "ram": _steers(settings.MEMORY, "Host memory that it needs while it runs; by default as measured."),
    "preload": _steers(settings.FLAG, "The same as at the top level, for this model."),
    "strip": _live(
        ValueKind(
            "list of names", lambda value: check_strip(settings.NAMES.read(value)), settings.NAMES.shape
        ),
        "Fields of JSON requests that its engine does not get.",
    ),
    "set": _live(
        ValueKind("{name: value}", read_set, _SET),
        "Fields of JSON requests, and what its engine gets for them.",
    ),
    "presets": _live(
        ValueKind("{name: {set, strip, system}}", read_presets, _PRESETS),
        "More names for the model, each with parameters of its own (see presets.md).",
    ),
    "loras": _at_start(
        ValueKind("{name: path}, or list of names", read_loras, _LORAS),
        "LoRA adapters as names of models (see presets.md); those of vLLM's --lora-modules are so anyway.",
    ),
    "upstream": _steers(
        ValueKind("list of paths", _read_paths, shapes.listed(shapes.text(r"^/[A-Za-z0-9_-]"))),
        "What else may be asked of the engine, below /upstream/MODEL; /sdapi/ means all below that.",
    ),
    "concurrency": _steers(
        COUNT, "How many requests it is given at once; more are queued, fairly between API keys."
    ),
    "prompt_cache": _live(
        settings.MEMORY,
        "Disk space for the prompts of llama-server's slots, which are saved when it is stopped to make room "
        "and restored by its next load (see swaps.md); for each replica.",
    ),
    "checkpoint_anyway": _steers(
        settings.FLAG, "Checkpoint it although it holds several GPUs, from which engines often do not return."
    ),
    "url": _replaces(
        elsewhere.URL,
        "The base URL of a server that somebody else runs, which answers for this model (see elsewhere.md).",
    ),
    "api_key_env": _replaces(TEXT, "The variable, here or in .env, with the key that the server asks for."),
    "ca_file": _replaces(TEXT, "A file of certificates that vouch for the server; by default the system's."),
    "fallback": _live(
        fallback.KIND,
        "Other models that answer when this one cannot, or not within `after` (see elsewhere.md).",
        fills=("fallback", "fallback_after"),
    ),
}
"""The settings in ``x-anvil`` on a service, which fill ``Backend``."""


def describe(table: Mapping[str, Setting]) -> Iterator[tuple[str, str, str, str]]:
    """Key, type, default and meaning of every setting, for the documentation."""
    owner = Config if table is SETTINGS else Backend
    for key, setting in table.items():
        yield key, setting.kind.name, _default(owner, key, setting), setting.doc


def _default(owner: type, key: str, setting: Setting) -> str:
    if setting.default is not None:
        return setting.default
    default = default_of(owner, key)
    return f"{default >> 20}MiB" if setting.kind is SIZE else settings.plain(default)


def fields_of(table: Mapping[str, Setting], holds: Callable[[Setting], bool]) -> list[str]:
    """The fields that those settings fill of which something holds."""
    return [field for key, each in table.items() if holds(each) for field in each.fields_of(key)]
