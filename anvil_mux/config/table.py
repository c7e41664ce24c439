"""The tables of settings: all that depends on a key stands in one place, its row.

Reading, messages, documentation, what a reload may change at once, and what the event log records follow
from ``SETTINGS`` (``x-anvil`` at the top level) and ``SERVICE_SETTINGS`` (on a service).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from anvil_mux.config import any_of, external, fallback, hooks, service, settings, shapes
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
from anvil_mux.config.presets import check_strip, read_loras, read_presets, read_set
from anvil_mux.config.settings import Setting, ValueKind


def _read_gpus(value: Any) -> tuple[Gpu, ...]:
    if not isinstance(value, dict):
        return tuple(Gpu(id) for id in settings.NAMES.read(value))
    gpus = settings.MappingReader(value, value)
    made = [gpus.read(id, partial(_read_gpu, id), Gpu(id)) for id in value]
    return tuple(gpus.make(made))


HOST_MEMORY = settings.positive(settings.MEMORY)


def _read_gpu(id: str, about: Any) -> Gpu:
    if not isinstance(about, dict):
        text = 'must hold its memory, as in gpus: {"0": {vram: 24GiB, reserve: 1GiB}}'
        raise settings.unfit(text, "{vram: 24GiB}")
    sizes = settings.MappingReader(about, ("vram", "reserve"))
    vram = sizes.read("vram", settings.MEMORY.read)
    reserve = sizes.read("reserve", settings.MEMORY.read, 0)
    if vram is not None and vram <= reserve:
        raise settings.unfit("reserve leaves nothing of its vram", "{vram: 24GiB, reserve: 1GiB}")
    made: Gpu = sizes.make(Gpu(id, vram, reserve))
    return made


def _read_used_gpus(value: Any) -> str | tuple[str, ...] | list[tuple[str, ...]]:
    if isinstance(value, list) and any(isinstance(each, list) for each in value):
        return [_read_gpu_ids(each) for each in value]
    return service.ALL if value == service.ALL else _read_gpu_ids(value)


def _read_gpu_ids(value: Any) -> tuple[str, ...]:
    """The ids of GPUs of one host, which are without its name."""
    ids: tuple[str, ...] = settings.NAMES.read(value)
    named = [id.partition("/")[0] for id in ids if "/" in id]
    if hosts := [name for name in dict.fromkeys(named) if HOST_NAME.fullmatch(name)]:
        text = (
            f"asks for GPUs of {' and '.join(hosts)}: an engine runs on one host, which `hosts` names, "
            "and here are the ids of its GPUs alone"
        )
        raise settings.unfit(text, '["0"]')
    return ids


def _read_machines(value: Any) -> dict[str, DeclaredMachine]:
    if not isinstance(value, dict):
        text = f"must hold {{host: {{gpus, host_memory}}}}, not {settings.show(value)}"
        raise settings.unfit(text, "{a-host: {host_memory: 64GiB}}")
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
        text = f"must hold gpus or host_memory, not {settings.show(about)}"
        raise settings.unfit(text, "{host_memory: 64GiB}")
    parts = settings.MappingReader(about, ("gpus", "host_memory"))
    gpus = parts.read("gpus", _read_gpus)
    made: DeclaredMachine = parts.make(DeclaredMachine(gpus, parts.read("host_memory", HOST_MEMORY.read)))
    return made


def _read_yield(value: Any) -> int | None:
    """The bytes that other programs must hold; None: models never make way for them."""
    if value is None:
        return None
    if not isinstance(value, dict):
        text = f"must hold when_others_hold, not {settings.show(value)}"
        raise settings.unfit(text, "{when_others_hold: 4GiB}")
    parts = settings.MappingReader(value, (WHEN_OTHERS_HOLD,))
    least: int | None = parts.make(parts.read(WHEN_OTHERS_HOLD, _read_others_hold))
    if least is None:
        raise settings.unfit("says not how much they hold", "{when_others_hold: 4GiB}")
    return least


def _read_others_hold(value: Any) -> int:
    return 1 if value == "any" else int(HOST_MEMORY.read(value))


def _read_hosts(value: Any) -> WantedHosts:
    if isinstance(value, dict) and value:
        return {settings.TEXT.read(label): settings.TEXT.read(each) for label, each in value.items()}
    names: tuple[str, ...] = settings.NAMES.read(value or [])
    if names == (ANY_HOST,):
        return ANY_HOST
    if not names:
        raise settings.unfit("must name a host, or any, or {label: value}", ANY_HOST)
    for name in names:
        _check_host(name)
    return names


def _check_host(name: str) -> None:
    if name == ANY_HOST:
        text = f"{ANY_HOST} means every host, so it is written alone: hosts: {ANY_HOST}"
        raise settings.unfit(text, ANY_HOST)
    if not HOST_NAME.fullmatch(name):
        text = f"a host's name may hold lower-case letters, digits, - and _, not {settings.show(name)}"
        mended = re.sub("[^a-z0-9_-]+", "-", str(name).lower()).strip("-_")
        raise settings.unfit(text, mended)


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
            text = f"must be paths such as /docs or /sdapi/, not {settings.show(path)}"
            raise settings.unfit(text, f"/{path}" if re.fullmatch(r"[\w-]+/?", path) else "/docs")
    return tuple(paths)


def _read_project(value: Any) -> str:
    if not re.fullmatch(r"[a-z0-9][a-z0-9_-]*", str(value)):
        text = f"must be lower-case letters, digits, - and _, not {settings.show(value)}"
        raise settings.unfit(text, re.sub("[^a-z0-9_-]+", "-", str(value).lower()).strip("-_"))
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
        text = f"must hold {{name: policy}}, not {settings.show(value)}"
        raise settings.unfit(text, "{mine: {like: load_balance}}")
    return value


def _read_store(value: Any) -> str:
    if value and not str(value).startswith(STORES):
        raise settings.unfit("must be the address of a Redis, as redis://host:6379/0", "redis://host:6379/0")
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
WHEN_OTHERS_HOLD = "when_others_hold"
_YIELD = shapes.mapping({WHEN_OTHERS_HOLD: shapes.any_of({"enum": ["any"]}, settings.MEMORY.shape)})
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

SECONDS, TEXT = settings.SECONDS, settings.TEXT
MOMENTS, BODY = settings.positive(SECONDS), settings.positive(settings.SIZE)
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
        page="security.md#who-can-reach-it",
    ),
    "runtime": _at_start(
        settings.one_of("compose", "process"),
        "Whether services are containers or local processes.",
        page="processes.md",
    ),
    "project": _at_start(
        ValueKind("text", _read_project, shapes.text(r"^[a-z0-9][a-z0-9_-]*$")),
        "The name of the Compose project; by default the one that Compose gives it.",
        default="",
        logged=True,
    ),
    "gpus": _live(
        ValueKind("list of ids, or {id: {vram, reserve}}", _read_gpus, _GPUS),
        "The GPUs that may be used, with their memory and how much of it to keep free of models; by default "
        "all that are found: NVIDIA's by index or UUID, others as amd0 or intel0 (see gpus.md).",
        logged=True,
        page="gpus.md#supported-gpus",
    ),
    "machines": _live(
        ValueKind("{host: {gpus, host_memory}}", _read_machines, _MACHINES),
        "The GPUs and the memory of other hosts, where they should differ from what the hosts report "
        "(see cluster.md).",
        fills=("memory_of_hosts",),
        default="",
        logged=True,
        page="cluster.md#in-the-file",
    ),
    "policy": _live(
        settings.CHOSEN,
        "The policy that decides when a swap is worth its cost (see policies.md).",
        fills=("policy", "policy_settings"),
        logged=True,
        page="policies.md",
    ),
    "eviction": _live(
        settings.CHOSEN,
        "The rule that decides which models are evicted first.",
        fills=("eviction", "eviction_settings"),
        logged=True,
        page="reference.md#evictions",
    ),
    "routing": _live(
        ValueKind(
            "name, or {default, mode: lite or full, policies: {name: policy}, store}",
            _read_routing,
            _ROUTING,
        ),
        "How a request is sent to one of a model's replicas (see routing.md).",
        fills=("routing", "routing_policies", "routing_mode", "routing_store"),
        later=("routing_mode", "routing_store"),
        page="routing.md",
    ),
    "drain_timeout": _live(
        SECONDS,
        "How long a swap waits for running requests before it severs (aborts) them; 0: not at all.",
        logged=True,
        page="staying.md#let-answers-finish-drain_timeout",
    ),
    "home_after": _live(
        SECONDS,
        "How long its GPUs must have been idle before a model with `home` is loaded again.",
        logged=True,
        page="staying.md#a-home-model-home",
    ),
    "queue_timeout": _live(MOMENTS, "The longest time a request waits for its model.", logged=True),
    "max_wait": _live(
        settings.SECONDS_OR_AUTO,
        "The longest time a policy may hold a queue back before its swap begins. auto: twice the "
        "time that it takes to load every waiting model once, but at least 60 s (see design.md).",
        logged=True,
        page="policies.md",
    ),
    "max_queue": _live(
        COUNT,
        "The most requests that may wait, over all models; further ones are refused as overloaded.",
        logged=True,
    ),
    "max_connections": _live(COUNT, "The most client connections at once."),
    "upstream_timeout": _at_start(MOMENTS, "How long an engine may be silent, before or during an answer."),
    "client_timeout": _at_start(
        MOMENTS, "How long a client may read nothing of its answer before the answer is ended."
    ),
    "loading_grace": _live(SECONDS, "How long a waiting stream is silent before it gets keep-alive lines."),
    "max_body": _live(BODY, "The largest JSON request."),
    "max_upload": _live(BODY, "The largest multipart request (audio, images)."),
    "max_bodies": _live(
        HOST_MEMORY,
        "The most memory that the bodies of all requests take together, also while they wait; further ones "
        "are refused as overloaded. At least max_body; by default 1/8 of the memory that anvil-mux can have.",
    ),
    "default_model": _live(TEXT, "The model for requests that name none."),
    "any_of": _live(
        any_of.KIND,
        "Names that stand for several models, in order of preference; one that is resident serves "
        "(see staying.md).",
        default="",
        page="staying.md#any-model-that-is-loaded-any_of",
    ),
    "host_memory": _live(
        HOST_MEMORY,
        "How much host memory all engines together may use, in standby too; by default 9/10 of the host's.",
        logged=True,
        page="gpus.md#what-a-model-needs",
    ),
    "preload": _live(settings.FLAG, "Load every model once at startup, before the first request."),
    "read_ahead": _live(
        settings.FLAG,
        "Read a model's weights into the page cache while its requests wait for its load to begin "
        "(see swaps.md).",
        page="swaps.md#read-ahead-while-waiting",
    ),
    "key_file": _live(
        TEXT,
        "A file of API keys, one to a line, beside those in ANVIL_API_KEYS (see security.md).",
        is_file=True,
        page="security.md#keys",
    ),
    "tls_cert": _live(
        TEXT,
        "A file with the certificate (and its chain) for https; needs tls_key.",
        is_file=True,
        page="security.md#tls",
    ),
    "tls_key": _live(
        TEXT, "A file with the certificate's private key.", is_file=True, page="security.md#tls"
    ),
    "allowed_hosts": _live(
        settings.NAMES,
        "Host names that requests may be addressed to, besides this machine's (see security.md).",
        page="security.md#who-can-reach-it",
    ),
    "cors": _live(
        settings.ORIGINS,
        "Web sites (origins) whose pages may use this address (see security.md).",
        page="security.md#who-can-reach-it",
    ),
    "on_exit": _live(
        settings.one_of("keep", "stop"),
        "Whether engines keep running or are stopped at exit.",
        page="running.md#stopping",
    ),
    "capture": _live(
        settings.whole_number(0, 1000),
        "How many of the last requests are kept in memory with their bodies, for `anvil-mux requests` "
        "(see sharing.md).",
        page="sharing.md#what-was-asked-and-answered",
    ),
    "when_paused": _live(
        settings.one_of("refuse", "wait"),
        "Whether requests are refused or wait while anvil-mux is paused (see sharing.md).",
        logged=True,
        page="sharing.md#my-gpu-please-pausing",
    ),
    "yield": _live(
        ValueKind("{when_others_hold: size or any}", _read_yield, _YIELD),
        "Leave a GPU to other programs once they hold so much of its memory: models there make way, and come "
        "back home_after after they have left it (see sharing.md).",
        fills=("yield_above",),
        default="",
        logged=True,
        page="sharing.md#games-training-and-comfyui-yield",
    ),
    "hooks": _at_start(
        hooks.KIND,
        "Commands to run, or URLs to call, when something happens to a model (see seeing.md).",
        page="seeing.md#hooks",
    ),
}
"""The settings in ``x-anvil`` at the top level, which fill ``Config``."""
RENAMED = {"hosts": "allowed_hosts"}
"""A key of the top level that is another setting's name now -> the name of what it was."""

_steers = partial(Setting, live=True, logged=True)
_replaces = partial(Setting, live=False, logged=True)

SERVICE_SETTINGS: dict[str, Setting] = {
    "model": _replaces(
        TEXT,
        "The name that clients use; by default the service's. Services with the same model are replicas.",
    ),
    "aliases": _steers(settings.NAMES, "Other names for the model."),
    "gpus": _replaces(
        ValueKind("list of ids, or all", _read_used_gpus, _USED_GPUS),
        "The GPUs that it needs (all of those listed); by default the ones that the service reserves or is "
        "given as device files (see gpus.md). A scaled process may have a list for each replica.",
        page="gpus.md#supported-gpus",
    ),
    "gpu_count": _replaces(
        COUNT,
        "How many GPUs of a host it needs, no matter which; instead of `gpus` (see cluster.md).",
        fills=None,
        default="",
        page="cluster.md#in-the-file",
    ),
    "hosts": _replaces(
        ValueKind("list of hosts, any, or {label: value}", _read_hosts, _HOSTS),
        "The hosts on which it may run; by default only the one that anvil-mux runs on (see cluster.md).",
        fills=("host",),
        default="",
        page="cluster.md#in-the-file",
    ),
    "most": _steers(
        COUNT,
        "The most copies of it to load at once, where it may run on several hosts or GPUs.",
        default="1",
        page="cluster.md#in-the-file",
    ),
    "vram": _replaces(
        ValueKind("size, or measured", _read_vram, _VRAM),
        "How much memory it needs on each of its GPUs; measured: as much as it held when it was last "
        "evicted. By default it needs the whole GPU (see sizing.md).",
        fills=("vram", "vram_measured"),
        page="gpus.md#what-a-model-needs",
    ),
    "engine": _replaces(
        settings.one_of(*ENGINES),
        "The inference engine; by default recognized by the image.",
        page="reference.md#engines",
    ),
    "port": _replaces(
        settings.PORT,
        "The port on which the engine listens; by default the service's, or the engine's usual one.",
        page="reference.md#engines",
    ),
    "served_model": _replaces(
        TEXT,
        "The engine's own name for the model; by default taken from its command.",
        page="reference.md#engines",
    ),
    "pin": _steers(settings.FLAG, "Never evict it for another model.", page="seeing.md#pinning-a-model"),
    "priority": _steers(PRIORITY, "Models with a higher priority are served first and evicted last."),
    "home": _steers(
        settings.FLAG,
        "Load it again whenever its GPUs have been idle for home_after (see staying.md).",
        page="staying.md#a-home-model-home",
    ),
    "home_after": _steers(
        SECONDS, "As at the top level, for this model.", page="staying.md#a-home-model-home"
    ),
    "ttl": _steers(
        ValueKind("seconds", lambda value: settings.read_seconds(value) or None, SECONDS.shape),
        "How long it may be idle before it is unloaded; 0, and the default: for ever.",
        page="policies.md",
    ),
    "drain_timeout": _steers(
        settings.SECONDS_OR_NONE,
        "As at the top level, for swaps that evict this model; none: as long as its requests take. The top "
        "level's applies when somebody unloads it, drains its host or stops anvil-mux (see staying.md).",
        page="staying.md#let-answers-finish-drain_timeout",
    ),
    "min_residency": _steers(
        SECONDS, "How long it stays loaded at least, unless another queue is overdue.", page="policies.md"
    ),
    "max_wait": _steers(settings.SECONDS_OR_AUTO, "As at the top level, for this model.", page="policies.md"),
    "max_queue": _steers(
        COUNT,
        "The most requests that may wait for this model; the top level's limit applies as well.",
        page="staying.md",
    ),
    "routing": _steers(TEXT, "The routing policy of its model; the same on all replicas.", page="routing.md"),
    "kv_tokens": _steers(
        COUNT,
        "How many tokens the engine's KV cache holds, for routing among replicas.",
        page="routing.md#what-is-known-of-a-replica",
    ),
    "infer_type": _replaces(
        settings.one_of(*INFER_TYPES, EITHER),
        "The stage that it serves, where prefill and decode are apart (see routing.md).",
        page="routing.md#prefill-and-decode-apart",
    ),
    "node": _steers(
        TEXT, "The machine that it is on, for the routing filter failover.", page="routing.md#failure-domains"
    ),
    "failure_domain": _steers(
        TEXT,
        "The replicas that fail together with it, for the routing filter failover.",
        page="routing.md#failure-domains",
    ),
    "profile": _steers(
        ValueKind("file", TEXT.read, TEXT.shape),
        "A file in which `anvil-mux profile` wrote how fast it is.",
        page="routing.md#what-is-known-of-a-replica",
    ),
    "load_timeout": _steers(MOMENTS, "How long a load may take."),
    "stop_timeout": _steers(
        SECONDS, "How long it may take to stop before it is killed; by default stop_grace_period."
    ),
    "evict_to": _replaces(
        settings.listed(WAYS, WAY_ALIASES),
        "Its standby levels, the lightest first (sleep-1 is sleep). By default [sleep, stop] where its "
        "command allows sleep, else [stop] (see standby.md).",
        default="",
        page="standby.md#the-levels",
    ),
    "demote_after": _steers(
        SECONDS,
        "How long it stays at one standby level before it is demoted to the next; by default for ever.",
        page="standby.md#the-levels",
    ),
    "ram": _steers(
        settings.MEMORY,
        "How much host memory it needs while it runs; by default as measured.",
        page="gpus.md#what-a-model-needs",
    ),
    "preload": _steers(settings.FLAG, "As at the top level, for this model."),
    "read_ahead": _live(
        settings.FLAG, "As at the top level, for this model.", page="swaps.md#read-ahead-while-waiting"
    ),
    "strip": _live(
        ValueKind(
            "list of names", lambda value: check_strip(settings.NAMES.read(value)), settings.NAMES.shape
        ),
        "Fields to remove from JSON requests (see clients.md).",
        page="presets.md#presets",
    ),
    "set": _live(
        ValueKind("{name: value}", read_set, _SET),
        "Fields to set in JSON requests, whatever the client sent (see clients.md).",
        page="presets.md#presets",
    ),
    "presets": _live(
        ValueKind("{name: {set, strip, system}}", read_presets, _PRESETS),
        "More names for the model, each with parameters of its own (see presets.md).",
        page="presets.md#presets",
    ),
    "loras": _at_start(
        ValueKind("{name: path}, or list of names", read_loras, _LORAS),
        "LoRA adapters that clients can ask for like models (see presets.md); those in vLLM's --lora-modules "
        "need no entry.",
        page="presets.md#lora-adapters",
    ),
    "upstream": _steers(
        ValueKind("list of paths", _read_paths, shapes.listed(shapes.text(r"^/[A-Za-z0-9_-]"))),
        "Further paths of the engine that clients may use below /upstream/MODEL; /sdapi/ allows all in it.",
        page="security.md#what-a-request-can-reach",
    ),
    "concurrency": _steers(
        COUNT, "The most requests that it runs at once; others queue, and API keys take turns."
    ),
    "prompt_cache": _live(
        settings.MEMORY,
        "How much disk space llama-server's prompts may take, for each replica: they are saved when it is "
        "evicted, and restored by its next load (see swaps.md).",
        page="swaps.md#prompts-that-outlive-a-swap",
    ),
    "checkpoint_anyway": _steers(
        settings.FLAG,
        "Allow checkpoints of an engine on several GPUs; such engines often fail to restore.",
        page="standby.md#what-a-checkpoint-needs",
    ),
    "url": _replaces(
        external.URL,
        "The base URL of a server that somebody else runs and that serves this model (see elsewhere.md).",
        page="elsewhere.md#a-server-elsewhere",
    ),
    "api_key_env": _replaces(
        TEXT,
        "The variable, in the environment or .env, that holds the API key for url.",
        page="elsewhere.md#a-server-elsewhere",
    ),
    "ca_file": _replaces(
        TEXT,
        "A file of certificates to trust for url; by default the system's.",
        page="elsewhere.md#a-server-elsewhere",
    ),
    "fallback": _live(
        fallback.KIND,
        "Models that answer when this one cannot, or not within `after` (see elsewhere.md).",
        fills=("fallback", "fallback_after"),
        page="elsewhere.md#fallbacks",
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
    return f"{default >> 20}MiB" if setting.kind is BODY else settings.plain(default)


def fields_of(table: Mapping[str, Setting], holds: Callable[[Setting], bool]) -> list[str]:
    """The fields that those settings fill of which something holds."""
    return [field for key, each in table.items() if holds(each) for field in each.fields_of(key)]
