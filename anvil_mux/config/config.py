"""The settings, and what they come to: one frozen ``Config``.

The compose file is the configuration: ``x-anvil`` at its top level and on services, which Compose ignores. A
service without it (or a label ``anvil.*``, which says the same more weakly) is none of ours. The tables
``SETTINGS`` and ``SERVICE_SETTINGS`` say what may stand there; they drive reading, messages and
documentation; loading.py reads the files.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from functools import partial
from typing import Any

from anvil_mux.config import hooks, service, settings
from anvil_mux.config.profile import Profile
from anvil_mux.config.rewrite import check_strip, read_set
from anvil_mux.config.settings import Setting, ValueKind

DEFAULT_ROUTING = "least_delay"
"""The routing policy of models that name none."""
ROUTING_NAME = re.compile(r"[A-Za-z0-9._+-]+")
"""The pattern for names of routing policies and metrics, which appear in headers."""
STAGES = ("prefill", "decode")
INFER_TYPES = ("neutral", *STAGES)
EITHER = "either"
"""The infer type of a replica that takes whichever stage it is given."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A device slot, real (NVML) or declared. Memory in bytes; ``vram`` None: unknown."""

    id: str
    vram: int | None = None
    reserve: int = 0
    """Bytes that are never given to a backend."""


@dataclass(frozen=True, slots=True)
class Service:
    """The part of a compose service that the runtimes need, interpolated."""

    name: str = ""
    """The name of a scaled service; empty: the backend's."""
    number: int = 1
    """The number of its container, as Compose counts them."""
    scale: int = 1
    """How many it has."""
    image: str | None = None
    command: tuple[str, ...] = ()
    """The entrypoint and the command as one argv (process runtime)."""
    environment: tuple[tuple[str, str], ...] = ()
    working_dir: str | None = None
    """An absolute path (resolved against the compose file's folder); None: that folder."""
    profiles: tuple[str, ...] = ()
    user: str = ""
    """The user of its processes, as the compose file has it; empty: the image's, or ours."""
    digest: str = field(default="", compare=False)
    """A digest of the whole description, as it was read."""


@dataclass(frozen=True, slots=True)
class Backend:
    """One compose service that serves a model, or one container of a scaled one."""

    name: str
    """The service's name, with the container's number if it is scaled; unique."""
    model: str
    gpus: tuple[str, ...] = ()
    """Ids of the GPUs that it needs, all of them; empty: it needs none and is never evicted for another."""
    vram: int | None = None
    """Bytes that it holds on each of its GPUs; None: it needs them whole."""
    vram_measured: bool = False
    """Whether it needs what it held when it last left its GPUs; whole GPUs until that is known."""
    engine: str = "openai"
    port: int | None = None
    """The port that it listens on, in the container (None: the engine's own) or on loopback (None: $PORT)."""
    served_model: str | None = None
    """The model id that the engine itself reports and expects, if it differs from ``model``."""
    aliases: tuple[str, ...] = ()
    pin: bool = False
    """Whether it is never evicted for another model."""
    priority: int = 0
    """The higher, the earlier its queue is served and the later it is evicted."""
    ttl: float | None = None
    """Idle seconds after which it is evicted although nobody needs its GPUs; None: never."""
    min_residency: float = 0.0
    """Seconds after its load in which it is not evicted for a queue that is not overdue."""
    max_wait: float | None = None
    """The ``Config.max_wait`` of its own queue."""
    routing: str | None = None
    """The policy by which its model's replicas are chosen; None: ``Config.routing``."""
    kv_tokens: int | None = None
    """How many tokens its engine's cache holds; None: not known."""
    infer_type: str = "neutral"
    """The stage that it serves of its model's requests, prefill or decode; either: any of them."""
    node: str = ""
    failure_domain: str = ""
    """The machine, and the group of services, with which it fails; empty: nothing but itself."""
    profile: Profile | None = None
    """How fast it was measured to be."""
    load_timeout: float = 600.0
    stop_timeout: float = 10.0
    """Seconds between the signal to stop and SIGKILL."""
    evict_to: tuple[str, ...] = ("stop",)
    """The standby levels, from the lightest to the deepest: see swap.py and standby.py."""
    demote_after: float | None = None
    """Seconds at one standby level after which it is demoted to the next; None: it may stay."""
    ram: int | None = None
    """Bytes of host memory that it needs while it runs; None: as measured, if they were."""
    preload: bool = False
    """Whether it is loaded once at the start, before anybody asks for it."""
    strip: tuple[str, ...] = ()
    """Fields that are left out of the JSON that it is asked."""
    set: tuple[tuple[str, str], ...] = ()
    """Fields, with their values as JSON, that it is asked with, whatever the client said of them."""
    upstream: tuple[str, ...] = ()
    """Paths of the engine that may be asked for below /upstream/; a trailing slash means all below."""
    concurrency: int | None = None
    """How many requests it is given at once; more are queued. None: as many as come."""
    checkpoint_anyway: bool = False
    """Whether it may be checkpointed although it holds several GPUs."""
    service: Service = Service()

    @property
    def service_name(self) -> str:
        """The service's name, as the compose file has it."""
        return self.service.name or self.name


@dataclass(frozen=True, slots=True)
class Config:
    """The whole configuration of one anvil-mux process; moments and durations in seconds."""

    backends: tuple[Backend, ...]
    gpus: tuple[Gpu, ...] = ()
    project: str = "anvil"
    """The compose project's name; containers are recognised by it."""
    files: tuple[str, ...] = ()
    runtime: str = "compose"
    """The kind of runtime: compose or process."""
    policy: str = "adaptive"
    policy_settings: dict[str, object] = field(default_factory=dict)
    eviction: str = "cost"
    eviction_settings: dict[str, object] = field(default_factory=dict)
    routing: str = DEFAULT_ROUTING
    routing_policies: dict[str, Any] = field(default_factory=dict)
    """The routing policies of the compose file, as they are written."""
    routing_mode: str = "lite"
    """The figures that routing uses. lite: our own counts; full: those of the engines as well."""
    routing_store: str = ""
    """The address of the Redis by which several anvil-mux before the same engines know of each other."""
    host: str = "127.0.0.1"
    port: int = 9292
    drain_timeout: float = 30.0
    queue_timeout: float = 600.0
    max_wait: float = 60.0
    """The age at which a queue is overdue at the latest: its swap begins whatever the policy says."""
    max_queue: int = 1000
    """The most requests that may wait, over all models; more get 503 overloaded."""
    max_connections: int = 2048
    upstream_timeout: float = 600.0
    """The longest silence of an engine, before or within an answer."""
    client_timeout: float = 60.0
    """How long a client may take nothing of what waits for it."""
    loading_grace: float = 5.0
    """Seconds of silence before the keep-alive lines of a waiting stream begin."""
    max_body: int = 64 << 20
    """Bytes of a JSON request body."""
    max_upload: int = 512 << 20
    """Bytes of a multipart request body, spooled to disk."""
    default_model: str | None = None
    host_memory: int | None = None
    """Bytes of host memory for all engines, running and in standby; None: all there is."""
    preload: bool = False
    """Whether every backend is loaded once at the start, unless it says otherwise."""
    key_file: str | None = None
    """The absolute path of the file with API keys."""
    tls_cert: str | None = None
    tls_key: str | None = None
    hosts: tuple[str, ...] = ()
    """Names by which clients may call it, besides those of this machine."""
    cors: tuple[str, ...] = ()
    """Origins of other web sites whose pages may use it."""
    on_exit: str = "keep"
    """The fate of running engines at exit: keep or stop."""
    hooks: tuple[hooks.Hook, ...] = ()
    warnings: tuple[str, ...] = ()
    """The warnings of `check`."""
    origins: dict[str, str] = field(default_factory=dict)
    """Key of ``SETTINGS`` -> default, FILE:LINE, the environment variable, or flag."""
    said: dict[str, str] = field(default_factory=dict)
    """Key of ``SETTINGS`` -> a digest of the file that it names; of those that serve reads."""

    @property
    def names(self) -> dict[str, str]:
        """Every name by which a model may be asked for -> the model."""
        return {name: each.model for each in self.backends for name in (*each.aliases, each.model)}


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


MEASURED = "measured"


def _read_vram(value: Any) -> int | str:
    if value == MEASURED:
        return MEASURED
    if amount := settings.MEMORY.read(value):
        return int(amount)
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


ENGINES = tuple(dict.fromkeys(("openai", *(name for _, name in service.IMAGES))))
WAYS = ("sleep", "sleep-2", "checkpoint", "freeze", "stop")
"""The standby levels, and ``stop``; swap.py performs them."""
WAY_ALIASES = {"sleep-1": "sleep"}

Judge = Callable[[Sequence[str], bool], str | None]
"""Says for GPUs, and whether several are allowed, why no service on them can be checkpointed; or None."""

SECONDS, TEXT, SIZE = settings.SECONDS, settings.TEXT, settings.SIZE
COUNT = settings.whole_number(1)
PRIORITY = settings.whole_number(-100, 100)

SETTINGS: dict[str, Setting] = {
    "listen": Setting(settings.LISTEN, "Where clients connect."),
    "runtime": Setting(
        settings.one_of("compose", "process"), "Services as containers or as local processes."
    ),
    "project": Setting(
        ValueKind("text", _read_project), "The Compose project; by default as Compose names it."
    ),
    "gpus": Setting(
        ValueKind("list of ids, or {id: {vram, reserve}}", _read_gpus),
        "The GPUs that may be used, with their memory and what of it no model gets.",
    ),
    "policy": Setting(settings.CHOSEN, "When a swap is worth its cost."),
    "eviction": Setting(settings.CHOSEN, "Which models are evicted first."),
    "routing": Setting(
        ValueKind(
            "name, or {default, mode: lite or full, policies: {name: policy}, store}",
            _read_routing,
        ),
        "Which of a model's replicas gets a request (see docs/routing.md).",
    ),
    "drain_timeout": Setting(SECONDS, "How long a swap waits for requests that run; 0: not at all."),
    "queue_timeout": Setting(SECONDS, "The longest wait of a request for its model."),
    "max_wait": Setting(SECONDS, "A queue gets its swap after this at the latest, whatever the policy says."),
    "max_queue": Setting(COUNT, "Requests that may wait, over all models; more are refused as overloaded."),
    "max_connections": Setting(COUNT, "Clients connected at once."),
    "upstream_timeout": Setting(SECONDS, "The longest silence of an engine, before or within an answer."),
    "client_timeout": Setting(
        SECONDS, "How long a client may take nothing of its answer, which is ended then."
    ),
    "loading_grace": Setting(SECONDS, "Silence before the keep-alive lines of a waiting stream begin."),
    "max_body": Setting(SIZE, "The largest JSON request."),
    "max_upload": Setting(SIZE, "The largest multipart request (audio, images)."),
    "default_model": Setting(TEXT, "The model of requests that name none."),
    "host_memory": Setting(
        settings.MEMORY,
        "Host memory for all engines, also in standby; by default 9/10 of the machine's.",
    ),
    "preload": Setting(settings.FLAG, "Load every model once at the start, before anybody asks."),
    "key_file": Setting(TEXT, "A file of API keys, one to a line; see docs/security.md. ANVIL_API_KEYS too."),
    "tls_cert": Setting(TEXT, "A file with the certificate (and its chain) for https; needs tls_key."),
    "tls_key": Setting(TEXT, "A file with the certificate's private key."),
    "hosts": Setting(
        settings.NAMES, "Names in the Host header that are answered to besides this machine's; see security."
    ),
    "cors": Setting(settings.ORIGINS, "Other web sites whose pages may use this address; see security."),
    "on_exit": Setting(settings.one_of("keep", "stop"), "What happens to running engines at exit."),
    "hooks": Setting(hooks.KIND, "Commands or web addresses that get the events of models."),
}

SERVICE_SETTINGS: dict[str, Setting] = {
    "model": Setting(TEXT, "What clients call it; by default the service's name. Equal: replicas."),
    "aliases": Setting(settings.NAMES, "Other names for the model."),
    "gpus": Setting(
        ValueKind("list of ids, or all", _read_used_gpus),
        "The GPUs it needs, all of them; by default those that the service reserves. "
        "A scaled process may have a list for each replica.",
    ),
    "vram": Setting(
        ValueKind("size, or measured", _read_vram),
        "What it holds on each of its GPUs; measured: what it held when it last left; by default all of it.",
    ),
    "engine": Setting(settings.one_of(*ENGINES), "The program inside; by default what the image says."),
    "port": Setting(
        settings.PORT, "Where the engine listens; by default the service's port, or the engine's."
    ),
    "served_model": Setting(TEXT, "The id that the engine itself uses; by default what its command says."),
    "pin": Setting(settings.FLAG, "It is never evicted for another model."),
    "priority": Setting(PRIORITY, "The higher, the earlier its queue is served and the later it is evicted."),
    "ttl": Setting(SECONDS, "Idle time after which it is evicted though nobody waits; by default never."),
    "min_residency": Setting(SECONDS, "How long it stays after a load, unless a queue is overdue."),
    "max_wait": Setting(SECONDS, "The same as at the top level, for this model."),
    "routing": Setting(TEXT, "The routing policy of its model; replicas have the same."),
    "kv_tokens": Setting(COUNT, "How many tokens its engine's cache holds, for the choice among replicas."),
    "infer_type": Setting(
        settings.one_of(*INFER_TYPES, EITHER),
        "prefill, decode or either: which of two stages it serves (see docs/routing.md).",
    ),
    "node": Setting(TEXT, "The machine it is on. The filter failover can take out all of a machine."),
    "failure_domain": Setting(TEXT, "The group of replicas it is in, for the filter failover too."),
    "profile": Setting(ValueKind("file", TEXT.read), "How fast it is, as `anvil-mux profile` measured it."),
    "load_timeout": Setting(SECONDS, "How long a load may take."),
    "stop_timeout": Setting(SECONDS, "Grace before it is killed; by default stop_grace_period."),
    "evict_to": Setting(
        settings.listed(WAYS, WAY_ALIASES),
        "Its standby levels, from the lightest down (sleep-1 is sleep); by default what its command allows: "
        "sleep, stop or just stop.",
    ),
    "demote_after": Setting(
        SECONDS, "Time at one standby level of `evict_to`, after which it is demoted to the next; or never."
    ),
    "ram": Setting(settings.MEMORY, "Host memory that it needs while it runs; by default as measured."),
    "preload": Setting(settings.FLAG, "The same as at the top level, for this model."),
    "strip": Setting(
        ValueKind("list of names", lambda value: check_strip(settings.NAMES.read(value))),
        "Fields of JSON requests that its engine does not get.",
    ),
    "set": Setting(
        ValueKind("{name: value}", read_set), "Fields of JSON requests, and what its engine gets for them."
    ),
    "upstream": Setting(
        ValueKind("list of paths", _read_paths),
        "What else may be asked of the engine, below /upstream/MODEL; /sdapi/ means all below that.",
    ),
    "concurrency": Setting(
        COUNT, "How many requests it is given at once; more are queued, fairly between API keys."
    ),
    "checkpoint_anyway": Setting(
        settings.FLAG, "Checkpoint it although it holds several GPUs, from which engines often do not return."
    ),
}

LABEL = "anvil."
SERVICE_NAME = re.compile(r"[a-zA-Z0-9._-]+")
"""The pattern for names of services, as in Compose. Files are named after services, so a slash would lead out
of their folder."""


def describe(table: Mapping[str, Setting]) -> Iterator[tuple[str, str, str, str]]:
    """Key, type, default and meaning of every setting, for the documentation."""
    owner = Config if table is SETTINGS else Backend
    special: dict[str, Any] = {
        "listen": f"{default_of(Config, 'host')}:{default_of(Config, 'port')}",
        "project": None,
    }
    if owner is Backend:
        special["evict_to"] = None
    for key, setting in table.items():
        default = special[key] if key in special else default_of(owner, key)
        text = f"{default >> 20}MiB" if setting.kind is SIZE else settings.plain(default)
        yield key, setting.kind.name, text, setting.doc


def default_of(owner: type, key: str) -> Any:
    found = next(each.default for each in fields(owner) if each.name == key)
    return None if found is MISSING else found
