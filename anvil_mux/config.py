"""compose files -> one frozen ``Config``.

The compose file is the configuration: ``x-anvil`` at its top level and on services, which Compose ignores. A
service without it (or a label ``anvil.*``, which says the same more weakly) is none of ours. The tables
``SETTINGS`` and ``SERVICE_SETTINGS`` say what may stand there; they drive reading, messages and
documentation. Flags win over the environment (``ANVIL_*``), that over the file, that over the default.

``docker compose config`` reads the files where that program exists. It is not asked where runtime is process
(so that needs no Docker), and where it is missing interpolate.py reads one file itself. Both give the same
``Config``. Compose merges ``x-anvil`` of several files key by key at no level: the last file's replaces it.

Problems are collected and raised together, each with file, line and key. What works but will bite is in
``Config.warnings``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from itertools import combinations
from pathlib import Path
from typing import Any

import yaml

from anvil_mux import hooks, interpolate, pipeline, service, settings
from anvil_mux.composefile import Compose, combine, run_compose
from anvil_mux.composefile import find_files as find_files
from anvil_mux.errors import ConfigError
from anvil_mux.interpolate import Document, Key
from anvil_mux.policy import build_policy
from anvil_mux.preemption import build_preemption
from anvil_mux.profile import Profile, read
from anvil_mux.rewrite import check_strip, read_set
from anvil_mux.routing import INFER_TYPES
from anvil_mux.settings import Kind, Setting


@dataclass(frozen=True, slots=True)
class Gpu:
    """A device slot, real (NVML) or declared. Memory in bytes; ``vram`` None: unknown."""

    id: str
    vram: int | None = None
    reserve: int = 0
    """Never given to a backend."""


@dataclass(frozen=True, slots=True)
class Service:
    """What the runtimes need to know of a compose service, interpolated."""

    image: str | None = None
    command: tuple[str, ...] = ()
    """entrypoint + command as one argv (process runtime)."""
    environment: tuple[tuple[str, str], ...] = ()
    working_dir: str | None = None
    """Absolute (resolved against the compose file's folder); None: that folder."""
    stop_grace_period: float | None = None
    profiles: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Backend:
    """One compose service that serves a model."""

    name: str
    """The service's name; unique."""
    model: str
    gpus: tuple[str, ...] = ()
    """Ids of the GPUs that it needs, all of them; empty: it needs none and is never put out for another."""
    vram: int | None = None
    """Bytes that it holds on each of its GPUs; None: it needs them whole."""
    vram_measured: bool = False
    """It needs what it held when it last left its GPUs; whole GPUs until that is known."""
    engine: str = "openai"
    port: int | None = None
    """Where it listens, inside the container (None: the engine's own port) or on loopback (None: $PORT)."""
    served_model: str | None = None
    """The model id that the engine itself reports and expects, if it differs from ``model``."""
    aliases: tuple[str, ...] = ()
    pin: bool = False
    """Never put out for another model."""
    priority: int = 0
    """The higher, the earlier its line is served and the later it is put out."""
    ttl: float | None = None
    """Idle seconds after which it is put out although nobody needs its GPUs; None: never."""
    min_residency: float = 0.0
    """Seconds after its load in which it is not put out for a line that is not overdue."""
    max_wait: float | None = None
    """Its line's own ``Config.max_wait``."""
    routing: str | None = None
    """The policy by which its model's replicas are chosen; None: ``Config.routing``."""
    kv_tokens: int | None = None
    """How many tokens its engine's cache holds; None: not known."""
    infer_type: str = "neutral"
    """prefill and decode: one of the two stages in which the requests of its model are served."""
    node: str = ""
    unit: str = ""
    """What it fails with: a machine, and a group of services; empty: nothing but itself."""
    profile: Profile | None = None
    """How fast it was measured to be."""
    load_timeout: float = 600.0
    stop_timeout: float = 10.0
    """Grace before SIGKILL."""
    rest: tuple[str, ...] = ("stop",)
    """Ways to leave the GPU, from the lightest to the deepest: see swap.py and ladder.py."""
    demote_after: float | None = None
    """Seconds on one rung of ``rest`` after which it is taken to the next; None: it may stay."""
    ram: int | None = None
    """Bytes of host memory that it needs while it runs; None: as was measured, if it was."""
    prepare: bool = False
    """Loaded once at the start, before anybody asks for it."""
    strip: tuple[str, ...] = ()
    """Fields that are left out of the JSON that it is asked."""
    set: tuple[tuple[str, str], ...] = ()
    """Fields, with their values as JSON, that it is asked with, whatever the client said of them."""
    upstream: tuple[str, ...] = ()
    """Paths of the engine that may be asked for below /upstream/; a trailing slash means all below."""
    concurrency: int | None = None
    """How many requests it is given at once; more wait in line. None: as many as come."""
    checkpoint_anyway: bool = False
    """Whether it may be checkpointed although it holds several GPUs."""
    service: Service = Service()


@dataclass(frozen=True, slots=True)
class Config:
    """Everything that one anvil-mux process is told; moments and durations in seconds."""

    backends: tuple[Backend, ...]
    gpus: tuple[Gpu, ...] = ()
    project: str = "anvil"
    """The compose project's name; containers are recognised by it."""
    files: tuple[str, ...] = ()
    runtime: str = "compose"
    """compose | process"""
    policy: str = "adaptive"
    policy_settings: dict[str, object] = field(default_factory=dict)
    preemption: str = "cost"
    preemption_settings: dict[str, object] = field(default_factory=dict)
    routing: str = pipeline.DEFAULT
    routing_policies: dict[str, Any] = field(default_factory=dict)
    """Those of the compose file, as they are written."""
    routing_mode: str = "lite"
    """lite: what we count; full: what engines say of themselves as well."""
    routing_store: str = ""
    """The address of the Redis by which several anvil-mux before the same engines know of each other."""
    host: str = "127.0.0.1"
    port: int = 9292
    drain_timeout: float = 30.0
    queue_timeout: float = 600.0
    max_wait: float = 60.0
    """A line older than this is overdue: its swap begins whatever the policy says."""
    max_queue: int = 1000
    """Waiting requests over all models; more get 503 overloaded."""
    max_connections: int = 2048
    upstream_timeout: float = 600.0
    """The longest silence of an engine, before or within an answer."""
    loading_grace: float = 5.0
    """Silence before the keep-alive lines of a waiting stream begin."""
    max_body: int = 64 << 20
    """Bytes of a JSON request body."""
    max_upload: int = 512 << 20
    """Bytes of a multipart request body, spooled to disk."""
    default_model: str | None = None
    host_memory: int | None = None
    """Bytes of host memory for all engines, running and parked; None: as much as there is."""
    prepare: bool = False
    """Whether every backend is loaded once at the start, unless it says otherwise."""
    key_file: str | None = None
    """Absolute."""
    tls_cert: str | None = None
    tls_key: str | None = None
    hosts: tuple[str, ...] = ()
    """Names by which clients may call it, besides those of this machine."""
    on_exit: str = "keep"
    """keep | stop: what happens to running engines at exit."""
    hooks: tuple[hooks.Hook, ...] = ()
    warnings: tuple[str, ...] = ()
    """What `check` warns of."""
    origins: dict[str, str] = field(default_factory=dict)
    """Key of ``SETTINGS`` -> default, FILE:LINE, the environment variable, or flag."""


def _read_gpus(value: Any) -> tuple[Gpu, ...]:
    if not isinstance(value, dict):
        return tuple(Gpu(id) for id in settings.NAMES.read(value))
    return tuple(_read_gpu(id, about or {}) for id, about in value.items())


def _read_gpu(id: str, about: Any) -> Gpu:
    if not isinstance(about, dict):
        raise ValueError(f'must be a list of ids, or {{"0": {{vram: 24GiB, reserve: 1GiB}}}}; see {id}')
    sizes = {}
    for key, value in about.items():
        if key not in ("vram", "reserve"):
            raise ValueError(f"{id}: unknown key {key}; {settings.nearest(key, ('vram', 'reserve'))}")
        try:
            sizes[key] = settings.MEMORY.read(value)
        except ValueError as error:
            raise ValueError(f"{id}.{key}: {error}") from None
    if sizes.get("vram") is not None and sizes["vram"] <= sizes.get("reserve", 0):
        raise ValueError(f"{id}: reserve leaves nothing of its vram")
    return Gpu(id, **sizes)


def _read_used_gpus(value: Any) -> str | tuple[str, ...]:
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


def _read_routing(value: Any) -> tuple[str, dict[str, Any], str, str]:
    if not isinstance(value, dict):
        return settings.TEXT.read(value), {}, "lite", ""
    for key in value:
        if key not in ROUTING:
            raise ValueError(f"unknown key {key}; {settings.nearest(key, ROUTING)}")
    mode = MODE.read(value.get("mode") or "lite")
    policies = value.get("policies") or {}
    if not isinstance(policies, dict):
        raise ValueError(f"policies must hold {{name: policy}}, not {settings.show(policies)}")
    store = str(value.get("store") or "")
    if store and not store.startswith(STORES):
        raise ValueError("store must be the address of a Redis, as redis://host:6379/0")
    return settings.TEXT.read(value.get("default") or pipeline.DEFAULT), policies, mode, store


ENGINES = tuple(dict.fromkeys(("openai", *(name for _, name in service.IMAGES))))
WAYS = ("sleep", "sleep-2", "checkpoint", "pause", "stop")
"""Ways to leave a GPU; swap.py has them."""
WAY_ALIASES = {"sleep-1": "sleep"}

Judge = Callable[[Sequence[str], bool], str | None]
"""(GPUs, whether several are allowed): why a service on them cannot be checkpointed here; None if it can."""

SECONDS, TEXT, SIZE = settings.SECONDS, settings.TEXT, settings.SIZE
COUNT = settings.whole_number(1)
PRIORITY = settings.whole_number(-100, 100)

SETTINGS: dict[str, Setting] = {
    "listen": Setting(settings.LISTEN, "Where clients connect."),
    "runtime": Setting(
        settings.one_of("compose", "process"), "Services as containers or as local processes."
    ),
    "project": Setting(Kind("text", _read_project), "The Compose project; by default as Compose names it."),
    "gpus": Setting(
        Kind("list of ids, or {id: {vram, reserve}}", _read_gpus),
        "The GPUs that may be used, with their memory and what of it no model gets.",
    ),
    "policy": Setting(settings.CHOSEN, "When a swap is worth its cost."),
    "preemption": Setting(settings.CHOSEN, "Whom to put out."),
    "routing": Setting(
        Kind(
            "name, or {default, mode: lite or full, policies: {name: policy}, store}",
            _read_routing,
        ),
        "Which of a model's replicas gets a request (see docs/routing.md).",
    ),
    "drain_timeout": Setting(SECONDS, "How long a swap waits for requests that run; 0: not at all."),
    "queue_timeout": Setting(SECONDS, "The longest wait of a request for its model."),
    "max_wait": Setting(SECONDS, "A line older than this gets its swap, whatever the policy says."),
    "max_queue": Setting(COUNT, "Waiting requests over all models; more are told that it is overloaded."),
    "max_connections": Setting(COUNT, "Clients connected at once."),
    "upstream_timeout": Setting(SECONDS, "The longest silence of an engine, before or within an answer."),
    "loading_grace": Setting(SECONDS, "Silence before the keep-alive lines of a waiting stream begin."),
    "max_body": Setting(SIZE, "The largest JSON request."),
    "max_upload": Setting(SIZE, "The largest multipart request (audio, images)."),
    "default_model": Setting(TEXT, "Who serves requests that name no model."),
    "host_memory": Setting(
        settings.MEMORY, "Host memory for all engines, running and parked; by default 9/10 of the machine's."
    ),
    "prepare": Setting(settings.FLAG, "Load every model once at the start, before anybody asks."),
    "key_file": Setting(TEXT, "A file of API keys, one to a line; see docs/security.md. ANVIL_API_KEYS too."),
    "tls_cert": Setting(TEXT, "A file with the certificate (and its chain) for https; needs tls_key."),
    "tls_key": Setting(TEXT, "A file with the certificate's private key."),
    "hosts": Setting(
        settings.NAMES, "Names in the Host header that are answered to besides this machine's; see security."
    ),
    "on_exit": Setting(settings.one_of("keep", "stop"), "What happens to running engines at exit."),
    "hooks": Setting(hooks.KIND, "Commands or web addresses that are told of what happens to models."),
}

SERVICE_SETTINGS: dict[str, Setting] = {
    "model": Setting(TEXT, "What clients call it; by default the service's name. Equal: replicas."),
    "aliases": Setting(settings.NAMES, "Other names for the model."),
    "gpus": Setting(
        Kind("list of ids, or all", _read_used_gpus),
        "The GPUs it needs, all of them; by default those that the service reserves.",
    ),
    "vram": Setting(
        Kind("size, or measured", _read_vram),
        "What it holds on each of its GPUs; measured: what it held when it last left; by default all of it.",
    ),
    "engine": Setting(settings.one_of(*ENGINES), "The program inside; by default what the image says."),
    "port": Setting(
        settings.PORT, "Where the engine listens; by default the service's port, or the engine's."
    ),
    "served_model": Setting(TEXT, "The id that the engine itself uses; by default what its command says."),
    "pin": Setting(settings.FLAG, "Never put out for another model."),
    "priority": Setting(PRIORITY, "The higher, the earlier its line is served and the later it is put out."),
    "ttl": Setting(SECONDS, "Idle time after which it is put out though nobody waits; by default never."),
    "min_residency": Setting(SECONDS, "How long it stays after a load, unless a line is overdue."),
    "max_wait": Setting(SECONDS, "The same as at the top level, for this model."),
    "routing": Setting(TEXT, "The routing policy of its model; replicas have the same."),
    "kv_tokens": Setting(COUNT, "How many tokens its engine's cache holds, for the choice among replicas."),
    "infer_type": Setting(
        settings.one_of(*INFER_TYPES),
        "prefill or decode: which of two stages it serves (see docs/routing.md).",
    ),
    "node": Setting(TEXT, "The machine it is on. The filter failover can take out all of a machine."),
    "unit": Setting(TEXT, "The group of replicas it is in, for the filter failover too."),
    "profile": Setting(Kind("file", TEXT.read), "How fast it is, as `anvil-mux profile` measured it."),
    "load_timeout": Setting(SECONDS, "How long a load may take."),
    "stop_timeout": Setting(SECONDS, "Grace before it is killed; by default stop_grace_period."),
    "rest": Setting(
        settings.listed(WAYS, WAY_ALIASES),
        "How it leaves its GPUs, from the lightest way down (sleep-1 is sleep); by default what its command "
        "allows: sleep, stop or just stop.",
    ),
    "demote_after": Setting(SECONDS, "Rest on one rung of `rest` before it is taken to the next; or never."),
    "ram": Setting(settings.MEMORY, "Host memory that it needs while it runs; by default as measured."),
    "prepare": Setting(settings.FLAG, "The same as at the top level, for this model."),
    "strip": Setting(
        Kind("list of names", lambda value: check_strip(settings.NAMES.read(value))),
        "Fields of JSON requests that its engine does not get.",
    ),
    "set": Setting(
        Kind("{name: value}", read_set), "Fields of JSON requests, and what its engine gets for them."
    ),
    "upstream": Setting(
        Kind("list of paths", _read_paths),
        "What else may be asked of the engine, below /upstream/MODEL; /sdapi/ means all below that.",
    ),
    "concurrency": Setting(COUNT, "How many requests it is given at once; more wait in line, key by key."),
    "checkpoint_anyway": Setting(
        settings.FLAG, "Checkpoint it although it holds several GPUs, from which engines often do not return."
    ),
}

LABEL = "anvil."
SERVICE_NAME = re.compile(r"[a-zA-Z0-9._-]+")
"""As Compose has it. Files are named after services, so a slash would lead out of their folder."""


def describe(table: Mapping[str, Setting]) -> Iterator[tuple[str, str, str, str]]:
    """Key, type, default and meaning of every setting, for the documentation."""
    owner = Config if table is SETTINGS else Backend
    special: dict[str, Any] = {
        "listen": f"{_default(Config, 'host')}:{_default(Config, 'port')}",
        "project": None,
    }
    if owner is Backend:
        special["rest"] = None
    for key, setting in table.items():
        default = special[key] if key in special else _default(owner, key)
        text = f"{default >> 20}MiB" if setting.kind is SIZE else settings.plain(default)
        yield key, setting.kind.name, text, setting.doc


def _default(owner: type, key: str) -> Any:
    found = next(each.default for each in fields(owner) if each.name == key)
    return None if found is MISSING else found


def load(
    paths: Sequence[Path | str],
    *,
    environ: Mapping[str, str] = os.environ,
    compose: Compose | None = run_compose,
    present: Mapping[str, Gpu] | None = None,
    overrides: Mapping[str, object] | None = None,
    judge: Judge | None = None,
) -> Config:
    """The configuration in these files, or ConfigError with everything that is wrong with it.

    ``present``: the GPUs that this machine has, by index and by UUID, where they can be asked.
    ``overrides``: keys of ``SETTINGS`` as the command line gave them; None means not given.
    ``judge``: asked about services that are to be checkpointed; None: the file is not for this machine.
    """
    if not paths:
        raise ConfigError(["no compose file is given"])
    documents: list[Document] = []
    problems: list[str] = []
    for path in paths:
        try:
            documents.append(interpolate.read(Path(path)))
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    return _Loading(documents, environ, present or {}, overrides or {}, judge).load(compose)


class _Loading:
    """One reading: what was found so far, good and bad."""

    def __init__(
        self,
        documents: Sequence[Document],
        environ: Mapping[str, str],
        present: Mapping[str, Gpu],
        overrides: Mapping[str, object],
        judge: Judge | None,
    ) -> None:
        self._documents = documents
        self._environ = environ
        self._present = present
        self._judge = judge
        self._overrides = {key: value for key, value in overrides.items() if value is not None}
        self._problems: list[str] = []
        self._warnings: list[str] = []
        self._origins = dict.fromkeys(SETTINGS, "default")
        self._variables = interpolate.environment(documents[0].file.parent, environ)
        self._host_ports: dict[str, set[int]] = {}

    def load(self, compose: Compose | None) -> Config:
        content = combine(self._documents, self._environ, None if self._wants_process() else compose)
        self._warnings += content.warnings
        values = self._top_level(content.settings)
        self._prepare = values.get("prepare", _default(Config, "prepare"))
        values.setdefault("project", content.project or _default(Config, "project"))
        self._plain = content.plain
        self._process = values.get("runtime", _default(Config, "runtime")) == "process"
        self._gpus = {gpu.id: gpu for gpu in map(self._known, values.pop("gpus", ()))}
        self._declared = bool(self._gpus)
        backends = self._backends(content.services)
        used = {gpu for backend in backends for gpu in backend.gpus}
        for gpu in sorted(used, key=lambda id: (len(id), id)):
            self._gpus.setdefault(gpu, self._known(Gpu(gpu)))
        self._check_settings(values, backends)
        self._check_routing(values, backends)
        self._check_stages(backends)
        self._check_names(backends)
        self._check_room(backends)
        self._check_ports(backends, values.get("port", _default(Config, "port")))
        if self._problems:
            raise ConfigError(self._problems)
        return Config(
            tuple(backends),
            gpus=tuple(self._gpus.values()),
            files=tuple(os.path.abspath(document.file) for document in self._documents),
            warnings=tuple(dict.fromkeys(self._warnings)),
            origins=self._origins,
            **values,
        )

    def _wants_process(self) -> bool:
        """Whether the runtime is ``process``, seen before the Compose program is asked for anything."""
        found: object = ""
        for document in self._documents:
            top = document.content.get("x-anvil")
            if isinstance(top, dict):
                found = top.get("runtime", "")
        found = self._overrides.get("runtime") or self._environ.get("ANVIL_RUNTIME") or found
        try:
            return interpolate.Scope(self._variables).fill(str(found)) == "process"
        except ValueError:
            return False

    # Settings

    def _top_level(self, given: Any) -> dict[str, Any]:
        """Arguments of ``Config``: from the file, the environment and the flags, the later the stronger."""
        values = self._take(SETTINGS, given, ("x-anvil",))
        for key in values:
            self._origins[key] = self._where(("x-anvil", key)).partition(": ")[0]
        for key, setting in SETTINGS.items():
            variable = f"ANVIL_{key.upper()}"
            if text := self._environ.get(variable):
                values |= self._given(key, setting, _structure(text), variable)
        for key, value in self._overrides.items():
            values |= self._given(key, SETTINGS[key], value, "flag")
        for key in values.keys() & {"key_file", "tls_cert", "tls_key"}:
            values[key] = os.path.abspath(self._documents[0].file.parent / values[key])
        if "listen" in values:
            values["host"], values["port"] = values.pop("listen")
        for key in ("policy", "preemption"):
            if key in values:
                values[key], values[f"{key}_settings"] = values[key]
        if "routing" in values:
            keys = "routing", "routing_policies", "routing_mode", "routing_store"
            values |= zip(keys, values["routing"], strict=True)
        return values

    def _given(self, key: str, setting: Setting, value: object, origin: str) -> dict[str, Any]:
        self._origins[key] = origin
        try:
            return {key: setting.kind.read(value)}
        except ValueError as error:
            self._problem_of_setting(key, str(error))
            return {}

    def _take(self, table: Mapping[str, Setting], given: Any, key: Key, prefix: str = "") -> dict[str, Any]:
        """What ``given`` says in terms of ``table``; an empty value says nothing."""
        if given is not None and not isinstance(given, dict):
            self._problem(key, f"must hold settings such as {next(iter(table))}, not {settings.show(given)}")
            return {}
        taken = {}
        for name, value in (given or {}).items():
            if name not in table:
                self._problem((*key, prefix + name), f"unknown key; {settings.nearest(name, table)}")
            elif value is not None:
                try:
                    taken[name] = table[name].kind.read(value)
                except ValueError as error:
                    self._problem((*key, prefix + name), str(error))
        return taken

    # Services

    def _backends(self, services: Any) -> list[Backend]:
        backends: list[Backend] = []
        ours = False
        for name, described in self._in_order(services):
            key = ("services", name)
            try:
                said = service.labels(described, LABEL)
                if not said and "x-anvil" not in described:
                    continue
                ours = True
                given = self._take(SERVICE_SETTINGS, said, (*key, "labels"), LABEL)
                given |= self._take(SERVICE_SETTINGS, described.get("x-anvil"), (*key, "x-anvil"))
                backends.append(self._backend(name, described, given))
            except ValueError as error:
                ours = True
                self._problem(key, str(error))
        if not ours:
            self._problem(("services",), "none serves a model; add `x-anvil: {}` to each service that does")
        return backends

    def _in_order(self, services: Any) -> list[tuple[str, Any]]:
        """The services in the order of the files; the Compose program sorts them by name."""
        found = services if isinstance(services, dict) else {}
        written = [document.content.get("services") for document in self._documents]
        names = dict.fromkeys(name for each in written if isinstance(each, dict) for name in each)
        return [(name, found[name]) for name in dict.fromkeys((*names, *found)) if name in found]

    def _backend(self, name: str, described: dict[str, Any], given: dict[str, Any]) -> Backend:
        _check_service(name, described)
        if self._plain and "env_file" in described:
            self._problem(("services", name, "env_file"), interpolate.NEED_COMPOSE)
        engine = self._fill_in(name, described, given)
        variables = service.environment(described, self._variables)
        given["gpus"] = self._used(name, given.get("gpus", service.gpus(described, variables)))
        given.setdefault("prepare", self._prepare)
        given.setdefault("rest", service.lightest_rest(described, variables, engine))
        self._check_rest(name, described, variables, given)
        if given.get("vram") == MEASURED:
            given |= {"vram": None, "vram_measured": True}
        if "profile" in given:
            given["profile"] = self._profile(name, given["profile"])
        given["aliases"] = tuple(alias for alias in given.get("aliases", ()) if alias != given["model"])
        backend = Backend(name, service=self._service(described, variables), **given)
        if self._process:
            self._host_ports[name] = {backend.port} if backend.port else set()
            if not backend.service.command:
                self._problem(("services", name), "needs a `command`, since runtime is process")
        else:
            published = service.published(described)
            self._host_ports[name] = {port.outside for port in published if port.outside}
            if described.get("network_mode") == "host" and backend.port:
                self._host_ports[name].add(backend.port)
            for text in service.bites(described, engine, backend.port, backend.gpus):
                self._warnings.append(
                    f"{self._where(('services', name)).partition(': ')[0]}: service {name}: {text}"
                )
        return backend

    def _fill_in(self, name: str, described: dict[str, Any], given: dict[str, Any]) -> str:
        """What the service itself says of settings that are not given; its engine."""
        model = given.setdefault("model", settings.TEXT.read(name))
        engine = given.setdefault("engine", service.engine(described))
        names = service.served_model(described, engine)
        if names and model not in names:
            given.setdefault("served_model", names[0])
        if grace := described.get("stop_grace_period"):
            given.setdefault("stop_timeout", settings.read_seconds(grace))
        if "port" not in given:
            given["port"] = self._port(described)
        return str(engine)

    def _check_rest(
        self, name: str, described: dict[str, Any], variables: dict[str, str], given: Mapping[str, Any]
    ) -> None:
        ladder = given["rest"]
        if list(ladder) != sorted(ladder, key=WAYS.index):
            down = ", ".join(sorted(ladder, key=WAYS.index))
            self._problem(("services", name, "x-anvil", "rest"), f"goes down a ladder: write [{down}]")
        for way in ladder:
            why = service.cannot_rest(described, variables, given["engine"], way)
            if way == "checkpoint" and self._judge:
                why = why or self._judge(given["gpus"], given.get("checkpoint_anyway", False)) or ""
            if why:
                self._problem(("services", name, "x-anvil", "rest"), f"{way} cannot work: {why}")

    def _profile(self, name: str, file: str) -> Profile | None:
        """The profile in a file, whose path begins at the folder of the first compose file."""
        path = self._documents[0].file.parent / file
        try:
            return read(path.read_text(encoding="utf-8"))
        except OSError as error:
            text = f"{path} cannot be read: {error.strerror}"
        except ValueError as error:
            text = f"{path}: {error}"
        self._problem(("services", name, "x-anvil", "profile"), text)
        return None

    def _port(self, described: dict[str, Any]) -> int | None:
        return (service.commanded_port if self._process else service.listens_on)(described)

    def _service(self, described: dict[str, Any], variables: dict[str, str]) -> Service:
        folder = described.get("working_dir")
        if folder is not None and self._process:
            folder = os.path.abspath(self._documents[0].file.parent / str(folder))
        grace = described.get("stop_grace_period")
        return Service(
            image=described.get("image"),
            command=service.argv(described),
            environment=tuple(sorted(variables.items())),
            working_dir=folder,
            stop_grace_period=None if grace is None else settings.read_seconds(grace),
            profiles=service.profiles(described),
        )

    def _used(self, name: str, used: str | tuple[str, ...] | None) -> tuple[str, ...]:
        if used == service.ALL:
            known = self._gpus or {gpu.id: gpu for gpu in self._present.values()}
            if not known:
                say = 'say which there are at the top level: x-anvil: {gpus: ["0"]}'
                self._problem(("services", name), f"uses all GPUs; {say}")
            return tuple(known)
        ids = tuple(dict.fromkeys(self._known(Gpu(id)).id for id in used or ()))
        for id in ids:
            if self._declared and id not in self._gpus:
                declared = ", ".join(self._gpus)
                self._problem(
                    ("services", name, "x-anvil", "gpus"), f"GPU {id} is not declared; declared: {declared}"
                )
        return ids

    def _known(self, gpu: Gpu) -> Gpu:
        """The GPU under its own id, with its real memory where none is declared."""
        real = self._present.get(gpu.id)
        return gpu if real is None else Gpu(real.id, gpu.vram or real.vram, gpu.reserve)

    # What cannot work

    def _check_settings(self, values: Mapping[str, Any], backends: Sequence[Backend]) -> None:
        for key, build in (("policy", build_policy), ("preemption", build_preemption)):
            if key in values:
                try:
                    build(values[key], values[f"{key}_settings"])
                except (ValueError, TypeError) as error:
                    self._problem_of_setting(key, str(error))
        for one, other in (("tls_cert", "tls_key"), ("tls_key", "tls_cert")):
            if one in values and other not in values:
                self._problem_of_setting(one, f"needs {other} beside it")
        names = {name for backend in backends for name in (backend.model, *backend.aliases)}
        if (default := values.get("default_model")) and default not in names:
            self._problem_of_setting(
                "default_model", f"no service serves {default}; {settings.nearest(default, names)}"
            )

    def _check_routing(self, values: Mapping[str, Any], backends: Sequence[Backend]) -> None:
        own = values.get("routing_policies", {})
        needs = {name: pipeline.build(name).needs for name in pipeline.shipped()}
        needs |= {name: self._needs(name, written) for name, written in own.items()}
        known = (*pipeline.shipped(), *own)
        default = values.get("routing", pipeline.DEFAULT)
        if default not in known:
            self._problem_of_setting("routing", f"no policy {default}; {settings.nearest(default, known)}")
        models: dict[str, tuple[str, str]] = {}
        for backend in backends:
            key = ("services", backend.name, "x-anvil", "routing")
            name = backend.routing or default
            if backend.routing and name not in known:
                self._problem(key, f"no policy {name}; {settings.nearest(name, known)}")
            first, other = models.setdefault(backend.model, (backend.name, name))
            if other != name:
                self._problem(key, f"is {name}, but {first}, a replica of the same model, has {other}")
            for need in sorted(needs.get(name, ())):
                if not getattr(backend, need):
                    self._problem(("services", backend.name), f"needs {need}, because routing is {name}")

    def _check_stages(self, backends: Sequence[Backend]) -> None:
        for one, other in (("prefill", "decode"), ("decode", "prefill")):
            served = {backend.model for backend in backends if backend.infer_type == other}
            for backend in backends:
                if backend.infer_type == one and backend.model not in served:
                    self._problem(
                        ("services", backend.name, "x-anvil", "infer_type"),
                        f"is {one}, but no service of {backend.model} is {other}: both stages are needed",
                    )

    def _needs(self, name: str, written: object) -> frozenset[str]:
        """What a policy of the file's own needs of a service; its problems are told."""
        key = ("x-anvil", "routing", "policies", name)
        if name in pipeline.shipped():
            self._problem(key, "is the name of a policy that is shipped; call it otherwise")
        if not pipeline.NAME.fullmatch(str(name)):
            self._problem(key, "a name may hold letters, digits, . _ + and - only")
        made, problems = pipeline.compile(name, written)
        for path, text in problems:
            self._problem((*key, *path), text)
        return made.needs

    def _check_names(self, backends: Sequence[Backend]) -> None:
        owners = {backend.model: backend.model for backend in backends}
        for backend in backends:
            for alias in backend.aliases:
                owner = owners.setdefault(alias, backend.model)
                if owner != backend.model:
                    self._problem(
                        ("services", backend.name, "x-anvil", "aliases"),
                        f"{alias} is already a name of {owner}",
                    )

    def _check_room(self, backends: Sequence[Backend]) -> None:
        for gpu in self._gpus.values():
            users = [backend for backend in backends if gpu.id in backend.gpus]
            room = _room(gpu)
            for backend in users:
                key = ("services", backend.name, "x-anvil", "vram")
                if backend.vram and room is None:
                    self._warnings.append(
                        f"{self._where(key)} has no effect: how large GPU {gpu.id} is is not known; "
                        f'declare it: x-anvil: {{gpus: {{"{gpu.id}": {{vram: ...}}}}}}'
                    )
                elif backend.vram and room is not None and backend.vram > room:
                    self._problem(
                        key, f"{_gib(backend.vram)} never fit GPU {gpu.id}, which has {_gib(room)} for models"
                    )
            self._check_pins(gpu, room, users)

    def _check_pins(self, gpu: Gpu, room: int | None, users: Sequence[Backend]) -> None:
        pinned = [backend for backend in users if backend.pin]
        names = ", ".join(backend.name for backend in pinned)
        if not _fit(pinned, room):
            key = ("services", pinned[-1].name, "x-anvil", "pin")
            self._problem(key, f"the pinned {names} do not fit on GPU {gpu.id} together")
            return
        for backend in users:
            if pinned and not backend.pin and not _fit([*pinned, backend], room):
                self._warnings.append(
                    f"{self._where(('services', backend.name))}: does not fit on GPU {gpu.id} beside "
                    f"the pinned {names}: while that is loaded its requests are refused; "
                    "unpin, or declare less vram"
                )

    def _check_ports(self, backends: Sequence[Backend], listen: int) -> None:
        for backend in backends:
            if listen in self._host_ports[backend.name]:
                self._problem(
                    ("services", backend.name), f"port {listen} is the one that anvil-mux listens on"
                )
        for one, other in combinations(backends, 2):
            common = self._host_ports[one.name] & self._host_ports[other.name]
            if common and not self._take_turns(one, other):
                ports = ", ".join(map(str, sorted(common)))
                self._problem(
                    ("services", other.name),
                    f"port {ports} is also that of {one.name}, and both may run at once",
                )

    def _take_turns(self, one: Backend, other: Backend) -> bool:
        """Whether they never run at once; whoever rests without being stopped keeps its port."""
        if {*one.rest, *other.rest} != {"stop"} or one.vram_measured or other.vram_measured:
            return False
        common = set(one.gpus) & set(other.gpus)
        return any(not _fit((one, other), _room(self._gpus[gpu])) for gpu in common)

    def _problem(self, key: Key, text: str) -> None:
        self._problems.append(f"{self._where(key)}: {text}")

    def _problem_of_setting(self, key: str, text: str) -> None:
        """Blames the flag or the variable where one of them gave the setting."""
        match self._origins[key]:
            case "flag":
                self._problems.append(f"--{key.replace('_', '-')}: {text}")
            case origin if origin == f"ANVIL_{key.upper()}":
                self._problems.append(f"{origin}: {text}")
            case _:
                self._problem(("x-anvil", key), text)

    def _where(self, key: Key) -> str:
        return max(reversed(self._documents), key=lambda document: document.knows(key)).where(key)


def _check_service(name: str, described: dict[str, Any]) -> None:
    if not SERVICE_NAME.fullmatch(name):
        raise ValueError("its name may hold letters, digits, ., _ and - only; x-anvil: {model: ...} any")
    if service.copies(described) > 1:
        raise ValueError(
            "is scaled, but only one container of a service is used: write a service for each replica, "
            "each with the same x-anvil: {model: ...}"
        )


def _room(gpu: Gpu) -> int | None:
    return gpu.vram - gpu.reserve if gpu.vram else None


def _fit(backends: Sequence[Backend], room: int | None) -> bool:
    """Whether they can be on a GPU with this much room at once."""
    if len(backends) < 2:
        return True
    needs = [backend.vram for backend in backends]
    return room is not None and all(needs) and sum(need or 0 for need in needs) <= room


def _gib(amount: int) -> str:
    return f"{amount / (1 << 30):.1f} GiB"


def _structure(text: str) -> object:
    """An environment variable may hold a YAML list or mapping."""
    if text[0] not in "[{":
        return text
    try:
        return yaml.load(text, interpolate.Loader)
    except yaml.YAMLError:
        return text
