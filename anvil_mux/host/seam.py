"""The seam to one machine: whatever touches a host is behind ``Host``, and only plain values cross it.

No process ids to act on, no callbacks, no iterators, no paths of the machine that anvil-mux runs on, no
commands but those of configured services: a host on another machine is the same protocol over a wire. What
happens there without being asked for is news, which the caller fetches by a long poll.

``local.LocalHost`` is the one behind which this machine is. Below it, and of use within this package alone,
its services run in a ``Runtime``: containers.py and processes.py are the two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from anvil_mux.config.config import Backend, Config
from anvil_mux.config.kinds import gib
from anvil_mux.config.machines import Gpu
from anvil_mux.config.service import Mounts
from anvil_mux.errors import BackendError
from anvil_mux.protocol.cards import ModelCard

LOOPBACK = "127.0.0.1"
"""The address of engines that only their own machine is to reach."""
MACHINE = "ANVIL_MUX_MACHINE"
"""The variable that names the machine, where several are simulated on one; engines of others do not count."""
LOG_LINES = 20
"""The last lines of an engine that are told by default."""
FOLLOWED_LINES = 100
"""The last lines with which a log begins that is followed."""


def url_of(address: str, port: int) -> str:
    """Return the base URL of an engine that listens there."""
    return f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"


class HostGpu(NamedTuple):
    """A GPU of the host, as its driver knows it."""

    id: str
    """NVIDIA's: the index in NVML's order (that of the PCI bus); others: ``amd0``, ``intel0`` and so on."""
    uuid: str
    """NVIDIA's: the UUID; others: the PCI address."""
    name: str = ""
    total: int | None = None
    """Bytes of its memory; None where it cannot tell."""
    shared: int = 0
    """Bytes of them that are host memory as well: unified memory."""
    files: tuple[str, ...] = ()
    """The paths of its device files; a container that is to use it needs the first."""

    @property
    def file(self) -> str:
        """The device file by which a container is given it; "" where it has none."""
        return next(iter(self.files), "")


@dataclass(frozen=True, slots=True)
class Inventory:
    """The things that the host has and can do."""

    gpus: tuple[HostGpu, ...] = ()
    memory: int | None = None
    """Bytes of host memory; None where the machine does not tell."""
    address: str = LOOPBACK
    """The address at which its engines are reached."""


@dataclass(frozen=True, slots=True)
class HostConfig:
    """The part of a configuration that a host needs; nothing of clients, keys or hooks."""

    backends: tuple[Backend, ...]
    gpus: tuple[Gpu, ...] = ()
    project: str = "anvil"
    files: tuple[str, ...] = ()
    """The compose files, by their paths on the host."""
    runtime: str = "compose"
    generated_compose: str = ""
    """One more compose file, by its text: services that are generated for this host or its GPUs."""
    resolved_compose: str = field(default="", repr=False)
    """The content of ``files`` when the configuration was read; "": it is not known."""
    compose_variables: Mapping[str, str] = field(default_factory=dict, repr=False)
    """The variables from which the secrets and configs of ``resolved_compose`` are taken."""

    @classmethod
    def of(cls, config: Config, host: str = "") -> HostConfig:
        """Return the part for one host; ``host``: its name, "" for the one that anvil-mux runs on."""
        return cls(
            backends=tuple([each for each in config.backends if each.host == host and not each.url]),
            gpus=tuple([gpu for gpu in config.gpus if gpu.host == host]),
            project=f"{config.project}-{host}" if host else config.project,
            files=() if host else config.files,
            runtime=config.runtime,
            generated_compose=config.generated_compose.get(host, ""),
            resolved_compose="" if host else config.resolved_compose,
            compose_variables={} if host else config.compose_variables,
        )


# How steps end


@dataclass(frozen=True, slots=True)
class Loaded:
    """How a backend really came back."""

    url: str
    level: str
    """The one that worked: the standby level it came back from, or ``stop`` for a cold start."""


@dataclass(frozen=True, slots=True)
class Evicted:
    """How a backend really left its GPUs."""

    level: str
    """The one that worked: the one asked for, or ``stop`` where a deeper one was needed."""
    residual: Mapping[str, int] = field(default_factory=dict)
    """GPU id -> bytes that it still holds there, as far as is known."""
    host_bytes: int = 0
    """Host memory that it keeps in standby; 0 when stopped or unknown."""
    freed: Mapping[str, int] = field(default_factory=dict, compare=False)
    """GPU id -> bytes that it gave back there, measured; empty where that cannot be read."""
    died: str = ""
    """The way in which it had ended before it was told to, if it had."""
    log: tuple[str, ...] = ()
    """The last lines that it had printed then."""


# What is found at the start


@dataclass(frozen=True, slots=True)
class Awake:
    """A backend that answers for its model."""

    url: str


@dataclass(frozen=True, slots=True)
class Unfit:
    """A backend that can be taken over neither as resident nor as in standby."""

    why: str
    """The reason, for people; ends a sentence."""


Found = Awake | Evicted | Unfit


# The engines of others on the host


@dataclass(frozen=True, slots=True)
class Occupant:
    """An engine on the host that an anvil-mux started and that is not one of the host's own backends."""

    backend: str
    """The name of its backend, in the configuration that it was started by."""
    project: str
    origin: str
    """``left`` (no anvil-mux serves its project), ``served`` (one does), ``user`` (a process of another
    user), or ``unknown`` (a container that may run: Docker does not answer)."""
    gpus: tuple[str, ...] | None = None
    """The ids of the GPUs that it was started on; None: unknown, so it may be on any."""
    end: str = ""
    """The command that ends it, or what to do while it is ``unknown``; "" if nothing is known."""

    def is_on(self, gpus: Sequence[str]) -> bool:
        """Return whether it may hold one of these GPUs."""
        return self.gpus is None or not set(self.gpus).isdisjoint(gpus)

    @property
    def advice(self) -> str:
        """The sentence about it, with the one that says how its GPU becomes free."""
        lead = "Until it does" if self.origin == "unknown" else "To end it"
        return f"{self}. {lead}: {self.end}" if self.end else str(self)

    def __str__(self) -> str:
        where = "a GPU" if self.gpus is None else f"GPU {', '.join(self.gpus)}"
        if self.origin == "unknown":
            return f"{self.backend} of the project {self.project} may run on {where}: Docker does not answer"
        who = {"served": "which another anvil-mux serves", "user": "of another user"}.get(
            self.origin, "which no anvil-mux serves"
        )
        return f"{self.backend} of the project {self.project}, {who}, is on {where}"


# The use of GPUs


@dataclass(frozen=True, slots=True)
class OtherProcess:
    """A process that holds memory of a GPU and is none of ours; its id is for people alone."""

    gpu: str
    pid: int
    used: int | None
    command: str = ""
    container: str = ""

    def __str__(self) -> str:
        held = "memory" if self.used is None else gib(self.used)
        where = f" in container {self.container[:12]}" if self.container else ""
        who = f"process {self.pid}" + (f" ({self.command})" if self.command else "")
        return f"{who}{where} holds {held} of GPU {self.gpu}"


@dataclass(frozen=True, slots=True)
class Sensors:
    """The figures that a GPU measures of itself; None where it does not tell."""

    utilization: float | None = None
    """The share of the last moment, from 0 to 1, in which it computed."""
    celsius: float | None = None
    watts: float | None = None


@dataclass(frozen=True, slots=True)
class GpuUse:
    """The use of one GPU, a moment ago; bytes."""

    used: int | None = None
    total: int | None = None
    users: Mapping[str, int | None] = field(default_factory=dict)
    """Service of ours -> bytes that its processes hold here; None where that is not told."""
    others: tuple[OtherProcess, ...] = ()
    sensors: Sensors = Sensors()


GpuUses = Mapping[str, GpuUse]
"""The use of GPUs, by their ids as they are configured, without those that cannot be read."""


# News


class ServiceEnded(NamedTuple):
    """The service of a backend ended, and nobody told it to."""

    backend: str
    why: str
    """The way it ended, for people, such as ``exited with code 1``."""
    log: tuple[str, ...] = ()
    """The last lines that it had printed."""
    load: int = 0
    """The number of the load that had brought it up; 0: it ran before, and was adopted."""


class ServiceStarted(NamedTuple):
    """The service of a backend was started by somebody else."""

    backend: str


class ServicePaused(NamedTuple):
    """The service of a backend was paused by somebody else, or resumed."""

    backend: str
    container: str
    """The name of the container that is paused; "": it was resumed."""


class GpusRead(NamedTuple):
    """The use of all GPUs; each one replaces the one before."""

    gpu_uses: GpuUses


class LoadStage(NamedTuple):
    """The stage that a load is in, as the engine's log says."""

    backend: str
    stage: str
    fraction: float | None = None
    seconds_left: float | None = None


PHASES = ("load", "ready", "restore", "probe", "save", "evict", "verify", "freeze")
"""The phases of steps: four on the way in, four on the way out."""


class PhaseTook(NamedTuple):
    """A phase of a step is over, one of PHASES."""

    backend: str
    phase: str
    seconds: float


class PromptsKept(NamedTuple):
    """The prompts of a backend that are kept on disk, all of them; the last news counts."""

    backend: str
    prompts: int
    tokens: int
    size: int


@dataclass(frozen=True, slots=True)
class CardRead:
    """An engine was asked, after its load or its adoption, for its model card; the last news counts."""

    backend: str
    described: str
    """The backend's ``description`` then: of another one it says nothing."""
    card: ModelCard


class WeightsRead(NamedTuple):
    """Weights of a backend were read into the page cache before its load."""

    backend: str
    size: int
    """Bytes that were not there before."""
    seconds: float


AnyNews = (
    ServiceEnded
    | ServiceStarted
    | ServicePaused
    | GpusRead
    | LoadStage
    | PhaseTook
    | PromptsKept
    | CardRead
    | WeightsRead
)
"""The things that may happen."""


class HostNews(NamedTuple):
    """One thing that happened; later ones have greater numbers."""

    number: int
    what: AnyNews


class NotBegun(BackendError):
    """A step failed before anything was done: the service is as it was."""


class Host(Protocol):
    """One machine with GPUs and a container runtime, or plain processes.

    Any thread may call, for different backends side by side. Calls may block unless it is said that they do
    not, and are bounded in time; none is made under the multiplexer's lock. Backends are handed over as they
    were described when they were started.
    """

    name: str

    def inventory(self) -> Inventory:
        """Return what the host has and can do."""

    def reconfigure(self, config: HostConfig) -> None:
        """Take services as they are described there; ConfigError if they cannot be, and nothing has changed.

        What runs goes on. A service whose description has changed is made anew by its next load, and one
        that is configured no longer is known until it was stopped.
        """

    def running(self) -> list[str]:
        """The configured backends that run or are frozen now, whether they can be reached or not.

        They are watched from now on, and from the first call on GPU use is news.
        """

    def orphans(self) -> list[Backend]:
        """The backends that an earlier start served here and that are configured no longer: to be stopped."""

    def occupants(self) -> list[Occupant]:
        """List the engines of other projects, other users and earlier starts that run here.

        BackendError if that cannot be determined. ``load`` refuses GPUs that one of them may be on.
        """

    def adopt(self, backend: Backend) -> Found:
        """Judge what to make of a backend that is ``running``, one call at a time; it may take seconds."""

    def load(self, backend: Backend, level: str, number: int) -> Loaded:
        """Return once the backend answers for its model. ``level``: the standby level it comes back from.

        LoadError (with the engine's last lines) after it was cleaned up; BackendError if even that failed: it
        may still hold its GPUs. Cancelled, after it was cleaned up, if it was cancelled before it answered.
        ``number``: of the load; no other has the same, of whatever anvil-mux.
        """

    def cancel(self, backend: Backend, number: int) -> None:
        """End the load of that number before its time, also if it has not begun yet. Never blocks.

        It is noted before anything that can fail, and the load itself looks for it again and again.
        """

    def read_ahead(self, backends: Sequence[str]) -> None:
        """Read the weights of these into the page cache, in this order, and those of no others any more.

        They are named as they are configured here. It returns at once; nothing is read while a load is under
        way.
        """

    def evict(self, backend: Backend, level: str) -> Evicted:
        """Return when the GPUs are free; BackendError if they may not be. ``level``: the one to take.

        NotBegun, also from ``demote``, if nothing was done, since what stops services here does not answer.
        """

    def demote(self, backend: Backend, before: str, level: str) -> Evicted:
        """Move a backend from the standby level ``before`` to the deeper ``level`` without waking."""

    def stop(self, backend: Backend) -> None:
        """End the service, without standby: orphans, what cannot stay, and at the program's end.

        A load of it that is under way is cancelled, and ends before.
        """

    def ended(self, backend: Backend) -> str | None:
        """Say for people how it ended; None while it runs, and while that cannot be told."""

    def answers(self, backend: Backend, limit: float) -> bool | None:
        """Whether its engine says within ``limit`` seconds that it is well.

        None: it is silent, or says that it is not well. False: nobody is there to answer.
        """

    def log_tail(self, backend: Backend, lines: int = LOG_LINES) -> list[str]:
        """The last lines that the current (or last) run of the service printed; [] if none can be had."""

    def news(self, after: int, timeout: float) -> list[HostNews]:
        """The news since the one of number ``after``, which is forgotten with all before it.

        Waits up to ``timeout`` seconds for some; [] if there is none.
        """

    def watch_gpus(self) -> None:
        """Have GPU use be news every second for a minute, since somebody watches it. Never blocks."""

    def problem(self) -> str:
        """Why services cannot be started or stopped now, as far as is known; "" if they can. Never blocks."""

    def close(self) -> None:
        """End its threads and waits for news, and free what it holds; engines run on."""


# Below it


class Runtime(Protocol):
    """A place where services run: Docker Compose or local processes.

    Every call is bounded in time, may block, is never made under the multiplexer's lock, and maps foreign
    failures to BackendError, or to LoadError where the service's own description is at fault (its image is
    missing, its port is taken). Calls for different backends may come from several threads at once.
    """

    def prepare(self, backend: Backend, remaining: Callable[[], float]) -> None:
        """Start the services on which it depends, and wait until each meets its condition.

        ``remaining``: the seconds that this may still take; raises once the load was cancelled.
        """

    def start(self, backend: Backend) -> str:
        """Start the service (creating it at the first use) and return its base URL.

        One that runs already is left running; it need not answer yet. NotBegun where nothing is known to have
        been done.
        """

    def stop(self, backend: Backend) -> None:
        """Return when it is really gone: grace, then kill. A service that does not run is no error."""

    def kill(self, backend: Backend) -> None:
        """End it at once, without grace."""

    def pause(self, backend: Backend) -> None:
        """Freeze the service: none of its processes runs until ``resume``, ``stop`` or ``kill``."""

    def resume(self, backend: Backend) -> None:
        """Let a frozen service go on; one that is not frozen is no error."""

    def pids(self, backend: Backend) -> list[int]:
        """The ids that its processes have on this host; [] if it does not run."""

    def owner(self, pid: int) -> str | None:
        """The service that a process of this host belongs to, None if to none of ours.

        Told from memory and /proc alone, without Docker.
        """

    def mounts(self, backend: Backend) -> Mounts:
        """The folders of this host that its container has, those of volumes too; () where there is none."""

    def ended(self, backend: Backend) -> str | None:
        """Say for people how it ended ("exited with code 1"); None while it runs or is frozen."""

    def container_name(self, service: str) -> str:
        """Return the name of the container of a service that was paused last, or that of the service."""

    def lost_its_port(self, backend: Backend) -> bool:
        """Whether it ended because somebody took the port that was chosen for it, before it could.

        Another start gets another port.
        """

    def running(self) -> dict[str, str]:
        """Service name -> base URL of every service of this project that runs now.

        "" where it runs but cannot be reached: it holds its GPU all the same, so stop it. What is frozen is
        among them. These services are watched from now on.
        """

    def differs(self, backend: Backend) -> str:
        """Say in what the run that is there was started by another description; "" if by this one."""

    def is_frozen(self, backend: Backend) -> bool:
        """Whether it is there and none of its processes runs."""

    def log_tail(self, backend: Backend, lines: int = LOG_LINES) -> list[str]:
        """The last lines that the current (or last) run of the service printed; [] if none can be had.

        After a start that failed before there was a run, none: whatever there is, an earlier run printed.
        """

    def follow_log(self, backend: Backend) -> Iterator[str]:
        """Lines as they come, beginning with the last FOLLOWED_LINES, until the service ends."""

    def watch(self, tell: Callable[[str, str], object]) -> None:
        """Block until close(); call ``tell(event, service name)`` soon after something happened by itself.

        ``ended``: without ``stop``. Only services that ``start`` returned or ``running`` listed are reported,
        each run once, when nothing of it runs any more. An engine may die while its load is still being
        awaited, or just after: this call may come before ``load`` has returned or raised.
        ``started``: by somebody else; it is not watched before ``running`` has listed it.
        ``paused``, ``resumed``: by somebody else, of one that is watched.
        """

    def reconfigure(self, config: HostConfig) -> None:
        """Take services as they are described there from now on.

        What runs goes on, and what is served no longer is known until it was stopped. A service whose
        description has changed is made anew by its next ``start``.
        """

    def problem(self) -> str:
        """Why services cannot be started or stopped now, as far as ``watch`` knows; "" if they can."""

    def ping(self) -> str:
        """Return why the program that starts and stops services does not answer; "" if it does."""

    def close(self) -> None:
        """Ends ``watch`` and frees what this object holds; engines run on."""
