"""One frozen ``Config`` to which all settings come, with a ``Backend`` for each service that serves a model.

The compose file is the configuration: ``x-anvil`` at its top level and on services, which Compose ignores. A
service without it (or a label ``anvil.*``, which says the same more weakly) is none of ours. The
tables in table.py say what may stand there; loading.py reads the files.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, NamedTuple

from anvil_mux.config import hooks, service
from anvil_mux.config.any_of import AnyOf
from anvil_mux.config.presets import Loras, Preset
from anvil_mux.config.profile import Profile
from anvil_mux.config.settings import AUTO

DEFAULT_ROUTING = "least_delay"
"""The routing policy of models that name none."""
ROUTING_NAME = re.compile(r"[A-Za-z0-9._+-]+")
"""The pattern for names of routing policies and metrics, which appear in headers."""
STAGES = ("prefill", "decode")
INFER_TYPES = ("neutral", *STAGES)
EITHER = "either"
"""The infer type of a replica that takes whichever stage it is given."""
MaxWait = float | str
"""The seconds after which a queue is overdue; ``AUTO``: they follow the load (scheduler/overdue.py)."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A device slot, real (as its driver tells) or declared. Memory in bytes; ``vram`` None: unknown."""

    id: str
    vram: int | None = None
    reserve: int = 0
    """Bytes that are never given to a backend."""
    host: str = ""
    """The host that it is in; "": the one that anvil-mux runs on."""
    shared: int = 0
    """Bytes of its memory that are host memory as well."""
    file: str = ""
    """The device file by which a container is given it; "" for NVIDIA's, and where that is not known."""

    @property
    def name(self) -> str:
        """The name that it has among the GPUs of all hosts."""
        return gpu_name(self.host, self.id)


def gpu_name(host: str, id: str) -> str:
    """A GPU's name among those of all hosts: its id alone on anvil-mux's own, ``HOST/ID`` elsewhere."""
    return f"{host}/{id}" if host else id


@dataclass(frozen=True, slots=True)
class Machine:
    """A host of the cluster, as it described itself or as the file describes it."""

    gpus: tuple[Gpu, ...] = ()
    host_memory: int | None = None
    """Bytes of its memory, of which engines get 9/10 unless the file says how much; None: not known."""
    address: str = ""
    """The address at which its engines are reached; "": not known, since it has never been there."""
    labels: tuple[tuple[str, str], ...] = ()


class DeclaredMachine(NamedTuple):
    """A host as the file describes it; None: as it describes itself."""

    gpus: tuple[Gpu, ...] | None = None
    host_memory: int | None = None
    """Bytes of its memory for all engines there."""


LOCAL, ANY_HOST = "local", "any"
"""The names that files give to the host that anvil-mux runs on, and to every host."""
HOST_NAME = re.compile(r"[a-z0-9][a-z0-9_-]*")
"""The pattern for names of hosts, which become parts of compose projects and files."""
WantedHosts = str | tuple[str, ...] | dict[str, str]
"""The hosts on which a service may run: ``ANY_HOST``, their names, or the labels that they have."""


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
    key: str = field(default="", repr=False)
    """The key that a server elsewhere asks for, from the variable that ``api_key_env`` names."""
    gpus_by: str = ""
    """The way by which it reserves GPUs: cdi, reservation, or "" where it has none or another way."""
    mounts: tuple[tuple[str, str], ...] = ()
    """Paths inside, and the paths on the host that they are; "": in no folder of the host."""
    digest: str = field(default="", compare=False)
    """A digest of the whole description, as it was read."""

    @property
    def api_key(self) -> str | None:
        """The key that its own command or environment makes the engine ask for, or the server elsewhere."""
        if self.key:
            return self.key
        environment = dict(self.environment)
        keys = (
            *service.flag_values(self.command, "--api-key"),
            environment.get("VLLM_API_KEY"),
            environment.get("LLAMA_API_KEY"),
        )
        return next(filter(None, keys), None)


@dataclass(frozen=True, slots=True)
class Backend:
    """One compose service that serves a model, or one container of a scaled one."""

    name: str
    """The service's name, with the container's number if it is scaled; unique."""
    model: str
    gpus: tuple[str, ...] = ()
    """Ids of the GPUs that it needs, all of them; empty: it needs none and is never evicted for another."""
    host: str = ""
    """The host that it runs on, as are its GPUs; "": the one that anvil-mux runs on."""
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
    most: int | None = None
    """How many backends of its model are resident at once; None: as many as the policy wants."""
    home: bool = False
    """Whether it comes back when nothing else is wanted on its GPUs."""
    home_after: float | None = None
    """Seconds after which it does; None: ``Config.home_after``."""
    ttl: float | None = None
    """Idle seconds after which it is evicted although nobody needs its GPUs; None: never."""
    drain_timeout: float | None = None
    """Seconds that a swap waits for its requests; infinite: as long as they take; None: ``Config``'s."""
    min_residency: float = 0.0
    """Seconds after its load in which it is not evicted for a queue that is not overdue."""
    max_wait: MaxWait | None = None
    """The ``Config.max_wait`` of its own queue."""
    max_queue: int | None = None
    """The most requests that may wait for its model; None: only ``Config.max_queue`` bounds them."""
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
    read_ahead: bool = True
    """Whether its weights are read into the page cache while requests wait for its load to begin."""
    strip: tuple[str, ...] = ()
    """Fields that are left out of the JSON that it is asked."""
    set: tuple[tuple[str, str], ...] = ()
    """Fields, with their values as JSON, that it is asked with, whatever the client said of them."""
    presets: tuple[Preset, ...] = ()
    """More names for its model, each with parameters of its own; its LoRA adapters among them."""
    loras: Loras = ()
    """The LoRA adapters that its engine is told to load once it runs."""
    upstream: tuple[str, ...] = ()
    """Paths of the engine that may be asked for below /upstream/; a trailing slash means all below."""
    concurrency: int | None = None
    """How many requests it is given at once; more are queued. None: as many as come."""
    prompt_cache: int | None = None
    """Bytes on disk for its prompts, which are kept from its eviction to its next load; None: none are."""
    checkpoint_anyway: bool = False
    """Whether it may be checkpointed although it holds several GPUs."""
    url: str = ""
    """The base URL of the server elsewhere that answers for it; "": it is an engine that we load."""
    api_key_env: str = ""
    """The variable that holds the key for that server."""
    ca_file: str = ""
    """The absolute path of the file with the certificates that it is trusted by; "": the system's."""
    fallback: tuple[str, ...] = ()
    """The models that answer when this one cannot, the first of them that can."""
    fallback_after: float | None = None
    """Seconds that a request waits before they are tried; None: as long as any request."""
    service: Service = Service()

    @property
    def gpu_names(self) -> tuple[str, ...]:
        """The names that its GPUs have among those of all hosts."""
        return tuple([gpu_name(self.host, id) for id in self.gpus]) if self.host else self.gpus

    @property
    def service_name(self) -> str:
        """The service's name, as the compose file has it."""
        return self.service.name or self.name

    @property
    def adapts_by_field(self) -> bool:
        """Whether it has LoRA adapters that a field of a question chooses."""
        return any(preset.is_adapter and not preset.served_model for preset in self.presets)

    @property
    def names(self) -> tuple[str, ...]:
        """The names by which its model may be asked for."""
        return (*self.aliases, *[preset.name for preset in self.presets], self.model)


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
    home_after: float = 300.0
    """Seconds in which nothing else was wanted before a home backend comes back."""
    queue_timeout: float = 600.0
    max_wait: MaxWait = AUTO
    """The age at which a queue is overdue at the latest: its swap begins whatever the policy says."""
    max_queue: int = 1000
    """The most requests that may wait, over all models; more get 503 overloaded."""
    max_connections: int = 16384
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
    max_bodies: int | None = None
    """Bytes of memory for the bodies of all requests together; None: a part of the host's."""
    default_model: str | None = None
    any_of: dict[str, AnyOf] = field(default_factory=dict)
    """Names that stand for several models."""
    host_memory: int | None = None
    """Bytes of host memory for all engines, running and in standby; None: all there is."""
    memory_of_hosts: dict[str, int] = field(default_factory=dict)
    """The same of other hosts, where it is bounded."""
    composed: dict[str, str] = field(default_factory=dict)
    """Host -> a compose file for it, of the services that are described anew for a host or a GPU."""
    preload: bool = False
    """Whether every backend is loaded once at the start, unless it says otherwise."""
    read_ahead: bool = True
    """Whether the weights of backends are read ahead, unless they say otherwise."""
    key_file: str | None = None
    """The absolute path of the file with API keys."""
    tls_cert: str | None = None
    tls_key: str | None = None
    allowed_hosts: tuple[str, ...] = ()
    """Names by which clients may call it, besides those of this machine."""
    cors: tuple[str, ...] = ()
    """Origins of other web sites whose pages may use it."""
    on_exit: str = "keep"
    """The fate of running engines at exit: keep or stop."""
    capture: int = 0
    """How many requests are kept in memory with what was asked and answered."""
    when_paused: str = "refuse"
    """The fate of requests that come during a pause: refuse or wait."""
    yield_above: int | None = None
    """The bytes of a GPU from which it is left to other programs that hold them; None: however many."""
    hooks: tuple[hooks.Hook, ...] = ()
    warnings: tuple[str, ...] = ()
    """The warnings of `check`."""
    origins: dict[str, str] = field(default_factory=dict)
    """Key of ``SETTINGS`` -> default, FILE:LINE, the environment variable, or flag."""
    said: dict[str, str] = field(default_factory=dict)
    """Key of ``SETTINGS`` -> a digest of the file that it names; of those that serve reads."""

    def memory_of(self, host: str) -> int | None:
        """Bytes of a host's memory for all engines there; None: all there is."""
        return self.memory_of_hosts.get(host) if host else self.host_memory

    @property
    def names(self) -> dict[str, str]:
        """Every name by which a model may be asked for -> the model."""
        return {name: each.model for each in self.backends for name in each.names}


def models_by_name(backends: Iterable[Backend]) -> dict[str, str]:
    """Find the model of each name that stands for a whole model, so of no preset: its own and its aliases."""
    return {name: each.model for each in backends for name in (*each.aliases, each.model)}


ENGINES = tuple(dict.fromkeys(("openai", *(name for _, name in service.IMAGES))))
WAYS = ("sleep", "sleep-2", "checkpoint", "freeze", "stop")
"""The standby levels, and ``stop``; swap.py performs them."""
WAY_ALIASES = {"sleep-1": "sleep"}

Judge = Callable[[Sequence[str], bool], str | None]
"""Says for GPUs, and whether several are allowed, why no service on them can be checkpointed; or None."""

LABEL = "anvil."
SERVICE_NAME = re.compile(r"[a-zA-Z0-9._-]+")
"""The pattern for names of services, as in Compose. Files are named after services, so a slash would lead out
of their folder."""


def default_of(owner: type, key: str) -> Any:
    found = next(each.default for each in fields(owner) if each.name == key)
    return None if found is MISSING else found
