"""One frozen ``Config`` to which all settings come, with a ``Backend`` for each service that serves a model.

The compose file is the configuration: ``x-anvil`` at its top level and on services, which Compose ignores. A
service without it (or a label ``anvil.*``, which says the same more weakly) is none of ours. A field that a
setting fills is that setting's row (kinds.py); loading.py reads the files.

A backend without a setting that the whole has too gets that one where its ``Config`` is made: nobody who
reads a backend of a configuration has to know that there are two levels.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import MISSING, dataclass, field, replace
from functools import partial
from typing import Any

from anvil_mux.config import kinds, machines
from anvil_mux.config.kinds import (
    AUTO,
    COUNT,
    FLAG,
    HEADERS,
    LISTEN,
    MEMORY,
    NAMES,
    ORIGINS,
    PATHS,
    PROJECT,
    SECONDS,
    SECONDS_OR_AUTO,
    TEXT,
    Setting,
    one_of,
    setting,
    table_of,
)
from anvil_mux.config.machines import HOST_MEMORY, Gpu, Wake, gpu_name
from anvil_mux.config.service import IMAGES, Service
from anvil_mux.config.values import (
    ANY_OF,
    CHOSEN,
    DEFAULT_ROUTING,
    FALLBACK,
    HOOKS,
    LORAS,
    PRESETS,
    ROUTING,
    SET,
    STRIP,
    URL,
    AnyOf,
    Hook,
    Loras,
    Preset,
    Profile,
)
from anvil_mux.protocol.cards import CAPABILITIES, ModelCard

STAGES = ("prefill", "decode")
INFER_TYPES = ("neutral", *STAGES)
EITHER = "either"
"""The infer type of a replica that takes whichever stage it is given."""
ENGINES = tuple(dict.fromkeys(("openai", *(name for _, name in IMAGES))))
WAYS = ("sleep", "sleep-2", "checkpoint", "freeze", "stop")
"""The standby levels, and ``stop``; levels.py performs them."""
WAY_ALIASES = {"sleep-1": "sleep"}
MaxWait = float | str
"""The seconds after which a queue is overdue; ``AUTO``: they follow the load (scheduler/admission.py)."""
INHERITED: dict[str, Any] = {
    "drain_timeout": 30.0,
    "home_after": 300.0,
    "max_wait": AUTO,
    "routing": DEFAULT_ROUTING,
    "preload": False,
    "read_ahead": True,
}
"""The settings that a backend has from its ``Config`` unless it has its own, and their defaults."""
Inherited = tuple[tuple[str, object], ...]

Judge = Callable[[Sequence[str], bool], str | None]
"""Says for GPUs, and whether several are allowed, why no service on them can be checkpointed; or None."""

LABEL = "anvil."
SERVICE_NAME = re.compile(r"[a-zA-Z0-9._-]+")
"""The pattern for names of services, as in Compose. Files are named after services, so a slash would lead out
of their folder."""

MOMENTS, BODY = kinds.positive(SECONDS), kinds.positive(kinds.SIZE)


_live = partial(setting, live=True)
_logged = partial(_live, logged=True)
_at_start = partial(setting, live=False)
_replaces = partial(_at_start, logged=True)
_of_engines = partial(_logged, of_engines=True)
_of_the_engine = partial(_replaces, of_engines=True)


def _as_the_whole(name: str, kind: kinds.ValueKind, doc: str = "", **about: Any) -> Any:
    """A field for a setting that the whole has too."""
    doc = doc or "As at the top level, for this model."
    return setting(INHERITED[name], kind, doc, live=True, **{"shown": "", "logged": True, **about})


_GPU_COUNT = Setting(
    COUNT,
    "How many GPUs of a host it needs, no matter which; instead of `gpus` (see cluster.md).",
    live=False,
    logged=True,
    of_engines=True,
    fills=None,
    page="cluster.md#in-the-file",
)


@dataclass(frozen=True, slots=True)
class Backend:
    """One compose service that serves a model, or one container of a scaled one."""

    name: str
    """The service's name, with the container's number if it is scaled; unique."""
    model: str = _replaces(
        MISSING,
        TEXT,
        "The name that clients use; by default the service's. Services with the same model are replicas.",
    )
    gpus: tuple[str, ...] = _of_the_engine(
        (),
        machines.USED_GPUS,
        "The GPUs that it needs (all of those listed); by default the ones that the service reserves "
        "or is given as device files (see gpus.md). A scaled process may have a list for each replica.",
        page="gpus.md#supported-gpus",
        beside={"gpu_count": _GPU_COUNT},
    )
    """Ids of the GPUs that it needs, all of them; empty: it needs none and is never evicted for another."""
    host: str = _of_the_engine(
        "",
        machines.HOSTS,
        "The hosts on which it may run; by default only the one that anvil-mux runs on (see cluster.md).",
        key="hosts",
        fills=("host",),
        page="cluster.md#in-the-file",
    )
    """The host that it runs on, as are its GPUs; "": the one that anvil-mux runs on."""
    most: int | None = _of_engines(
        None,
        COUNT,
        "The most copies of it to load at once, where it may run on several hosts or GPUs.",
        shown="1",
        page="cluster.md#in-the-file",
    )
    """How many backends of its model are resident at once; None: as many as the policy wants."""
    vram: int | None = _of_the_engine(
        None,
        machines.VRAM,
        "How much memory it needs on each of its GPUs; measured: the most that it held when it was "
        "evicted. By default it needs the whole GPU (see gpus.md).",
        fills=("vram", "vram_measured"),
        page="gpus.md#what-a-model-needs",
    )
    """Bytes that it holds on each of its GPUs; None: it needs them whole."""
    vram_measured: bool = False
    """Whether it needs what it held when it last left its GPUs; whole GPUs until that is known."""
    engine: str = _replaces(
        "openai",
        one_of(*ENGINES),
        "The inference engine; by default recognized by the image.",
        page="reference.md#engines",
    )
    port: int | None = _of_the_engine(
        None,
        kinds.PORT,
        "The port on which the engine listens; by default the service's, or the engine's usual one.",
        page="reference.md#engines",
    )
    """The port that it listens on, in the container (None: the engine's own) or on loopback (None: $PORT)."""
    served_model: str | None = _replaces(
        None,
        TEXT,
        "The engine's own name for the model; by default taken from its command.",
        page="reference.md#engines",
    )
    """The model id that the engine itself reports and expects, if it differs from ``model``."""
    aliases: tuple[str, ...] = _logged(
        (), NAMES, "Other names for the model; * in one stands for any characters."
    )
    pin: bool = _of_engines(
        False, FLAG, "Never evict it for another model.", page="policies.md#pinning-a-model"
    )
    priority: int = _logged(
        0, kinds.whole_number(-100, 100), "Models with a higher priority are served first and evicted last."
    )
    home: bool = _of_engines(
        False,
        FLAG,
        "Load it again whenever its GPUs have been idle for home_after (see policies.md).",
        page="policies.md#a-home-model-home",
    )
    home_after: float = _as_the_whole(
        "home_after", SECONDS, of_engines=True, page="policies.md#a-home-model-home"
    )
    ttl: float | None = _of_engines(
        None,
        SECONDS.then(lambda seconds: seconds or None),
        "How long it may be idle before it is unloaded; 0, and the default: for ever.",
        page="policies.md",
    )
    """Idle seconds after which it is evicted although nobody needs its GPUs; None: never."""
    drain_timeout: float = _as_the_whole(
        "drain_timeout",
        kinds.SECONDS_OR_NONE,
        "As at the top level, for swaps that evict this model; none: as long as its requests take. The top "
        "level's applies when somebody unloads it, drains its host or stops anvil-mux (see policies.md).",
        of_engines=True,
        page="policies.md#let-answers-finish-drain_timeout",
    )
    """Seconds that a swap waits for its requests; infinite: as long as they take."""
    min_residency: float = _of_engines(
        0.0,
        SECONDS,
        "How long it stays loaded at least, unless another queue is overdue.",
        page="policies.md",
    )
    max_wait: MaxWait = _as_the_whole("max_wait", SECONDS_OR_AUTO, page="policies.md")
    max_queue: int | None = _logged(
        None,
        COUNT,
        "The most requests that may wait for this model; the top level's limit applies as well.",
        page="policies.md",
    )
    """The most requests that may wait for its model; None: only ``Config.max_queue`` bounds them."""
    routing: str = _as_the_whole(
        "routing",
        TEXT,
        "The routing policy of its model; the same on all replicas.",
        of_engines=True,
        page="routing.md",
    )
    kv_tokens: int | None = _of_engines(
        None,
        COUNT,
        "How many tokens the engine's KV cache holds, for routing among replicas.",
        page="routing.md#what-is-known-of-a-replica",
    )
    infer_type: str = _of_the_engine(
        "neutral",
        one_of(*INFER_TYPES, EITHER),
        "The stage that it serves, where prefill and decode are apart (see routing.md).",
        page="routing.md#prefill-and-decode-apart",
    )
    node: str = _of_engines(
        "",
        TEXT,
        "The machine that it is on, for the routing filter failover.",
        page="routing.md#failure-domains",
    )
    failure_domain: str = _of_engines(
        "",
        TEXT,
        "The replicas that fail together with it, for the routing filter failover.",
        page="routing.md#failure-domains",
    )
    profile: Profile | None = _of_engines(
        None,
        TEXT.called("file"),
        "A file in which `anvil-mux profile` wrote how fast it is.",
        page="routing.md#what-is-known-of-a-replica",
    )
    load_timeout: float = _of_engines(600.0, MOMENTS, "How long a load may take.")
    stop_timeout: float = _of_engines(
        10.0, SECONDS, "How long it may take to stop before it is killed; by default stop_grace_period."
    )
    """Seconds between the signal to stop and SIGKILL."""
    evict_to: tuple[str, ...] = _of_the_engine(
        ("stop",),
        kinds.some_of(WAYS, WAY_ALIASES),
        "Its standby levels, the lightest first (sleep-1 is sleep). By default [sleep, stop] where its "
        "command allows sleep, else [stop] (see standby.md).",
        shown="",
        page="standby.md#the-levels",
    )
    """The standby levels, from the lightest to the deepest: see levels.py and slot.py."""
    demote_after: float | None = _of_engines(
        None,
        SECONDS,
        "How long it stays at one standby level before it is demoted to the next; by default for ever.",
        page="standby.md#the-levels",
    )
    ram: int | None = _of_engines(
        None,
        MEMORY,
        "How much host memory it needs while it runs; by default as measured.",
        page="gpus.md#what-a-model-needs",
    )
    preload: bool = _as_the_whole("preload", FLAG, of_engines=True, shown="false")
    """Whether it is loaded once at the start, before anybody asks for it."""
    read_ahead: bool = _as_the_whole(
        "read_ahead",
        FLAG,
        shown="true",
        logged=False,
        of_engines=True,
        page="standby.md#read-ahead-while-waiting",
    )
    """Whether its weights are read into the page cache while requests wait for its load to begin."""
    strip: tuple[str, ...] = _live(
        (), STRIP, "Fields to remove from JSON requests (see clients.md).", page="presets.md#presets"
    )
    set: tuple[tuple[str, str], ...] = _live(
        (),
        SET,
        "Fields to set in JSON requests, whatever the client sent; null removes one (see clients.md).",
        page="presets.md#presets",
    )
    """Fields, with their values as JSON, that it is asked with, whatever the client said of them."""
    default: tuple[tuple[str, str], ...] = _live(
        (),
        SET,
        "Fields to add to JSON requests whose client did not send them (see presets.md).",
        page="presets.md#presets",
    )
    """Fields, with their values as JSON, that it is asked with if the client says nothing of them."""
    presets: tuple[Preset, ...] = _live(
        (),
        PRESETS,
        "More names for the model, each with parameters of its own (see presets.md).",
        page="presets.md#presets",
    )
    """More names for its model, each with parameters of its own; its LoRA adapters among them."""
    loras: Loras = setting(
        (),
        LORAS,
        "LoRA adapters that clients can ask for like models (see presets.md); those in vLLM's --lora-modules "
        "need no entry.",
        live=False,
        of_engines=True,
        page="presets.md#lora-adapters",
    )
    """The LoRA adapters that its engine is told to load once it runs."""
    upstream: tuple[str, ...] = _logged(
        (),
        PATHS,
        "Further paths of the engine that clients may use below /upstream/MODEL; /sdapi/ allows all in it.",
        page="security.md#what-a-request-can-reach",
    )
    """Paths of the engine that may be asked for below /upstream/; a trailing slash means all below."""
    pass_headers: tuple[str, ...] = _live(
        (),
        HEADERS,
        "Further headers of clients to pass on to the engine or the server of url (see security.md).",
        page="security.md#headers-that-reach-an-engine",
    )
    """The lower-case names of headers that it is sent besides those that every engine is sent."""
    concurrency: int | None = _logged(
        None, COUNT, "The most requests that it runs at once; others queue, and API keys take turns."
    )
    """How many requests it is given at once; more are queued. None: as many as come."""
    prompt_cache: int | None = _live(
        None,
        MEMORY,
        "How much disk space llama-server's prompts may take, for each replica: they are saved when it is "
        "evicted, and restored by its next load (see standby.md).",
        of_engines=True,
        page="standby.md#prompts-that-outlive-a-swap",
    )
    context: int | None = _live(
        None,
        COUNT,
        "How many tokens a prompt and its answer may have together, as lists of models say; by default what "
        "the engine says once it is loaded.",
        page="clients.md#what-lists-say-of-a-model",
    )
    """The length of its context for lists of models; None: what its engine says."""
    capabilities: tuple[str, ...] = _live(
        (),
        kinds.some_of(CAPABILITIES, {}),
        "What the model can do, as lists of models say; by default what the engine says once it is loaded.",
        page="clients.md#what-lists-say-of-a-model",
    )
    """All that it can do, for lists of models; (): what its engine says."""
    checkpoint_anyway: bool = _of_engines(
        False,
        FLAG,
        "Allow checkpoints of an engine on several GPUs; such engines often fail to restore.",
        page="standby.md#what-a-checkpoint-needs",
    )
    url: str = _replaces(
        "",
        URL,
        "The base URL of a server that somebody else runs and that serves this model (see elsewhere.md).",
        page="elsewhere.md#a-server-elsewhere",
    )
    """The base URL of the server elsewhere that answers for it; "": it is an engine that we load."""
    api_key_env: str = _replaces(
        "",
        TEXT,
        "The variable, in the environment or .env, that holds the API key for url.",
        page="elsewhere.md#a-server-elsewhere",
    )
    ca_file: str = _replaces(
        "",
        TEXT,
        "A file of certificates to trust for url; by default the system's.",
        page="elsewhere.md#a-server-elsewhere",
    )
    """The absolute path of the file with the certificates that it is trusted by; "": the system's."""
    fallback: tuple[str, ...] = _live(
        (),
        FALLBACK,
        "Models that answer when this one cannot, or not within `after` (see elsewhere.md).",
        fills=("fallback", "fallback_after"),
        page="elsewhere.md#fallbacks",
    )
    """The models that answer when this one cannot, the first of them that can."""
    fallback_after: float | None = None
    """Seconds that a request waits before they are tried; None: as long as any request."""
    service: Service = Service()
    inherits: Inherited = field(default=tuple(INHERITED.items()), repr=False)
    """The settings, with their values, that it has from its ``Config``, as it has none of its own."""

    def has_own(self, setting: str) -> bool:
        """Whether it has a setting of its own where it could have that of its configuration."""
        return (setting, getattr(self, setting)) not in self.inherits

    @property
    def gpu_names(self) -> tuple[str, ...]:
        """The names that its GPUs have among those of all hosts."""
        return tuple([gpu_name(self.host, id) for id in self.gpus]) if self.host else self.gpus

    @property
    def service_name(self) -> str:
        """The service's name, as the compose file has it."""
        return self.service.name or self.name

    @property
    def description(self) -> str:
        """A text that differs wherever its engine, or its server elsewhere, is another."""
        return self.url or self.service.digest

    @property
    def own_card(self) -> ModelCard:
        """The model card that its settings make, whatever its engine says."""
        can = {name: name in self.capabilities for name in CAPABILITIES if self.capabilities}
        return ModelCard(self.context, can)

    @property
    def adapts_by_field(self) -> bool:
        """Whether it has LoRA adapters that a field of a question chooses."""
        return any(preset.is_adapter and not preset.served_model for preset in self.presets)

    @property
    def is_rewriting(self) -> bool:
        """Whether it changes fields of JSON requests, under any name."""
        return bool(self.strip or self.set or self.default)

    @property
    def names(self) -> tuple[str, ...]:
        """The names by which its model may be asked for."""
        return (*self.aliases, *[preset.name for preset in self.presets], self.model)


def inherited(own: Container[str]) -> Inherited:
    """The settings that a backend inherits which has these of its own."""
    return tuple([(name, value) for name, value in INHERITED.items() if name not in own])


_rows = table_of(Backend)
SERVICE_SETTINGS = {key: _rows[key] for key in ("model", "aliases", *_rows)}
"""The settings in ``x-anvil`` on a service, which fill ``Backend``; names come first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The whole configuration of one anvil-mux process; moments and durations in seconds."""

    backends: tuple[Backend, ...] = field(kw_only=False)
    host: str = _at_start(
        "127.0.0.1",
        LISTEN,
        "Where clients connect.",
        key="listen",
        fills=("host", "port"),
        shown="127.0.0.1:9292",
        page="security.md#who-can-reach-it",
    )
    port: int = 9292
    pages_port: int | None = _at_start(
        None,
        kinds.PORT,
        "The port of engines' own pages (/upstream/MODEL/), at the address of listen, where there are keys.",
        page="security.md#pages-of-engines",
    )
    runtime: str = _at_start(
        "compose",
        one_of("compose", "process"),
        "Whether services are containers or local processes.",
        page="processes.md",
    )
    project: str = _at_start(
        "anvil",
        PROJECT,
        "The name of the Compose project; by default the one that Compose gives it.",
        shown="",
        logged=True,
    )
    """The compose project's name; containers are recognised by it."""
    gpus: tuple[Gpu, ...] = _logged(
        (),
        machines.GPUS,
        "The GPUs that may be used, with their memory and how much of it to keep free of models; by default "
        "all that are found: NVIDIA's by index or UUID, others as amd0 or intel0 (see gpus.md).",
        page="gpus.md#supported-gpus",
    )
    memory_of_hosts: dict[str, int] = _logged(
        dict,
        machines.MACHINES,
        "The GPUs and the memory of other hosts, where they should differ from what the hosts report, and "
        "how a host is woken that sleeps (see cluster.md).",
        key="machines",
        fills=("memory_of_hosts", "wakes"),
        shown="",
        page="cluster.md#in-the-file",
    )
    """Host -> bytes of its memory for all engines there, where it is bounded."""
    wakes: dict[str, Wake] = field(default_factory=dict)
    """Host -> how it is woken, of those that may sleep."""
    policy: str = _logged(
        "adaptive",
        CHOSEN,
        "The policy that decides when a swap is worth its cost (see policies.md).",
        fills=("policy", "policy_settings"),
        page="policies.md",
    )
    policy_settings: dict[str, object] = field(default_factory=dict)
    eviction: str = _logged(
        "cost",
        CHOSEN,
        "The rule that decides which models are evicted first.",
        fills=("eviction", "eviction_settings"),
        page="reference.md#evictions",
    )
    eviction_settings: dict[str, object] = field(default_factory=dict)
    routing: str = _live(
        INHERITED["routing"],
        ROUTING,
        "How a request is sent to one of a model's replicas (see routing.md).",
        fills=("routing", "routing_policies", "routing_mode", "routing_store"),
        later=("routing_mode", "routing_store"),
        page="routing.md",
    )
    routing_policies: dict[str, Any] = field(default_factory=dict)
    """The routing policies of the compose file, as they are written."""
    routing_mode: str = "lite"
    """The figures that routing uses. lite: our own counts; full: those of the engines as well."""
    routing_store: str = ""
    """The address of the Redis by which several anvil-mux before the same engines know of each other."""
    drain_timeout: float = _logged(
        INHERITED["drain_timeout"],
        SECONDS,
        "How long a swap waits for running requests before it severs (aborts) them; 0: not at all.",
        page="policies.md#let-answers-finish-drain_timeout",
    )
    home_after: float = _logged(
        INHERITED["home_after"],
        SECONDS,
        "How long its GPUs must have been idle before a model with `home` is loaded again.",
        page="policies.md#a-home-model-home",
    )
    queue_timeout: float = _logged(600.0, MOMENTS, "The longest time a request waits for its model.")
    max_wait: MaxWait = _logged(
        INHERITED["max_wait"],
        SECONDS_OR_AUTO,
        "The longest time a policy may hold a queue back before its swap begins. auto: twice the "
        "time that it takes to load every waiting model once, but at least 60 s (see design.md).",
        page="policies.md",
    )
    """The age at which a queue is overdue at the latest: its swap begins whatever the policy says."""
    max_queue: int = _logged(
        1000,
        COUNT,
        "The most requests that may wait, over all models; further ones are refused as overloaded.",
    )
    max_connections: int = _live(16384, COUNT, "The most client connections at once.")
    upstream_timeout: float = _at_start(
        600.0, MOMENTS, "How long an engine may be silent, before or during an answer."
    )
    client_timeout: float = _at_start(
        60.0, MOMENTS, "How long a client may read nothing of its answer before the answer is ended."
    )
    loading_grace: float = _live(
        5.0, SECONDS, "How long a waiting stream is silent before it gets keep-alive lines."
    )
    max_body: int = _live(64 << 20, BODY, "The largest JSON request.", shown="64MiB")
    max_upload: int = _live(512 << 20, BODY, "The largest multipart request (audio, images).", shown="512MiB")
    """Bytes of a multipart request body, spooled to disk."""
    max_bodies: int | None = _live(
        None,
        HOST_MEMORY,
        "The most memory that the bodies of all requests take together, also while they wait; further ones "
        "are refused as overloaded. At least max_body; by default 1/8 of the memory that anvil-mux can have.",
    )
    """Bytes of memory for the bodies of all requests together; None: a part of the host's."""
    default_model: str | None = _live(None, TEXT, "The model for requests that name none.")
    any_of: dict[str, AnyOf] = _live(
        dict,
        ANY_OF,
        "Names that stand for several models: the first whose conditions fit a request serves it, and among "
        "equals one that is resident (see policies.md).",
        shown="",
        page="policies.md#any-model-that-is-loaded-any_of",
    )
    host_memory: int | None = _logged(
        None,
        HOST_MEMORY,
        "How much host memory all engines together may use, in standby too; by default 9/10 of the host's.",
        page="gpus.md#what-a-model-needs",
    )
    """Bytes of host memory for all engines, running and in standby; None: all there is."""
    preload: bool = _live(
        INHERITED["preload"], FLAG, "Load every model once at startup, before the first request."
    )
    read_ahead: bool = _live(
        INHERITED["read_ahead"],
        FLAG,
        "Read a model's weights into the page cache while its requests wait for its load to begin "
        "(see standby.md).",
        page="standby.md#read-ahead-while-waiting",
    )
    key_file: str | None = _live(
        None,
        TEXT,
        "A file of API keys, one to a line, beside those in ANVIL_API_KEYS (see security.md).",
        is_file=True,
        page="security.md#keys",
    )
    """The absolute path of the file with API keys."""
    tls_cert: str | None = _live(
        None,
        TEXT,
        "A file with the certificate (and its chain) for https; needs tls_key.",
        is_file=True,
        page="security.md#tls",
    )
    tls_key: str | None = _live(
        None, TEXT, "A file with the certificate's private key.", is_file=True, page="security.md#tls"
    )
    allowed_hosts: tuple[str, ...] = _live(
        (),
        NAMES,
        "Host names that requests may be addressed to, besides this machine's (see security.md).",
        page="security.md#who-can-reach-it",
    )
    cors: tuple[str, ...] = _live(
        (),
        ORIGINS,
        "Web sites (origins) whose pages may use this address (see security.md).",
        page="security.md#who-can-reach-it",
    )
    on_exit: str = _live(
        "keep",
        one_of("keep", "stop"),
        "Whether engines keep running or are stopped at exit.",
        page="running.md#stopping",
    )
    capture: int = _live(
        0,
        kinds.whole_number(0, 1000),
        "How many of the last requests are kept in memory with their bodies, for `anvil-mux requests` "
        "(see sharing.md).",
        page="sharing.md#what-was-asked-and-answered",
    )
    when_paused: str = _logged(
        "refuse",
        one_of("refuse", "wait"),
        "Whether requests are refused or wait while anvil-mux is paused (see sharing.md).",
        page="sharing.md#my-gpu-please-pausing",
    )
    yield_above: int | None = _logged(
        None,
        machines.YIELD,
        "Leave a GPU to other programs once they hold so much of its memory: models there make way, and come "
        "back home_after after they have left it (see sharing.md).",
        key="yield",
        fills=("yield_above",),
        shown="",
        page="sharing.md#games-training-and-comfyui-yield",
    )
    """The bytes of a GPU from which it is left to other programs that hold them; None: however many."""
    hooks: tuple[Hook, ...] = _at_start(
        (),
        HOOKS,
        "Commands to run, or URLs to call, when something happens to a model (see seeing.md).",
        page="seeing.md#hooks",
    )
    files: tuple[str, ...] = ()
    generated_compose: dict[str, str] = field(default_factory=dict)
    """Host -> a compose file for it, of the services that are described anew for a host or a GPU."""
    resolved_compose: str = field(default="", repr=False)
    """The content of ``files`` as one compose file without variables; "" if read without Compose."""
    compose_variables: dict[str, str] = field(default_factory=dict, repr=False)
    """The variables from which Compose takes secrets and configs -> their values."""
    warnings: tuple[str, ...] = ()
    """The warnings of `check`."""
    origins: dict[str, str] = field(default_factory=dict)
    """Key of ``SETTINGS`` -> default, FILE:LINE, the environment variable, or flag."""
    said: dict[str, str] = field(default_factory=dict)
    """Key of ``SETTINGS`` -> a digest of the file that it names; of those that serve reads."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "backends", tuple([self.completed(each) for each in self.backends]))

    def completed(self, backend: Backend) -> Backend:
        """A backend with the settings of the whole that it has none of its own for."""
        had = [name for name, value in backend.inherits if getattr(backend, name) == value]
        inherits = tuple([(name, getattr(self, name)) for name in had])
        return (
            backend if inherits == backend.inherits else replace(backend, **dict(inherits), inherits=inherits)
        )

    def memory_of(self, host: str) -> int | None:
        """Bytes of a host's memory for all engines there; None: all there is."""
        return self.memory_of_hosts.get(host) if host else self.host_memory

    @property
    def names(self) -> dict[str, str]:
        """Every name by which a model may be asked for -> the model."""
        return {name: each.model for each in self.backends for name in each.names}


SETTINGS = table_of(Config)
"""The settings in ``x-anvil`` at the top level, which fill ``Config``."""
RENAMED = {"hosts": "allowed_hosts"}
"""A key of the top level that is another setting's name now -> the name of what it was."""


def models_by_name(backends: Iterable[Backend]) -> dict[str, str]:
    """Find the model of each name that stands for a whole model, so of no preset: its own and its aliases."""
    return {name: each.model for each in backends for name in (*each.aliases, each.model)}
