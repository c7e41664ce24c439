"""This machine behind the seam: runtime, standby levels, adoption, GPU monitor, reader of logs, and its news.

``LocalHost`` is all that others need: a ``seam.Host`` and, for who is on the same machine, a little more.

An engine that runs already is taken over as it is, or stopped (``Adopter``):

    awake       it answers for its model
    in standby  it sleeps, or the CUDA driver has its memory, or it is frozen: then it stays as it is, and
                the next request for its model wakes it
    unfit       anything else; it is stopped, and the next request for its model loads it anew

An engine that sleeps does not say how deep. ``Notes`` remember which standby level each backend was last told
to take; where there is no note, weights that are read anew are right in any case. What NVML says of a
sleeper's memory counts more than what it says itself: who holds more than a context is none.

Nobody can ask the driver about a frozen process, so it is thawed for that; the memory is off the GPU, and its
own threads wait for it. Afterwards it is frozen again.

Engines may run on although no anvil-mux serves their project: one has left them there, or was killed
(``LeftEngines``). The state folder of a project notes its services and has a record, or room for one, of each
that is a process; the others are containers. That is enough to find and end them, whatever has become of the
compose files.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from anvil_mux.clock import Worker
from anvil_mux.config.change import replaced
from anvil_mux.config.config import Backend
from anvil_mux.config.kinds import gib
from anvil_mux.config.service import Mounts
from anvil_mux.errors import FOR_OPERATORS, BackendError, ConfigError, LoadError, MuxError
from anvil_mux.host import cuda_checkpoint, engines, gpus
from anvil_mux.host.claims import Claims, StartClaims
from anvil_mux.host.containers import ContainerRuntime, DockerByHand
from anvil_mux.host.engines import LoadLogs
from anvil_mux.host.gpus import GpuMonitor, Gpus
from anvil_mux.host.levels import CONTEXT, WAKES, ReportPhase, Swapper, host_bytes, may_sleep
from anvil_mux.host.notes import Notes
from anvil_mux.host.occupants import find_occupants
from anvil_mux.host.processes import ProcessRuntime
from anvil_mux.host.project import missing_images
from anvil_mux.host.prompts import KeptPrompt, PromptCache
from anvil_mux.host.runs import RunRecords, boot, stat_of
from anvil_mux.host.seam import (
    LOG_LINES,
    LOOPBACK,
    MACHINE,
    AnyNews,
    Awake,
    CardRead,
    Evicted,
    Found,
    GpusRead,
    HostConfig,
    HostGpu,
    HostNews,
    Inventory,
    Loaded,
    LoadStage,
    NotBegun,
    Occupant,
    PhaseTook,
    PromptsKept,
    Runtime,
    ServiceEnded,
    ServicePaused,
    ServiceStarted,
    Unfit,
    WeightsRead,
)
from anvil_mux.host.starter import Detached
from anvil_mux.host.weights import ReadAhead, weights_of
from anvil_mux.protocol.cards import NOTHING_KNOWN
from anvil_mux.state import state_folder

log = logging.getLogger(__name__)

MOST_NEWS = 1000


def build_runtime(
    config: HostConfig,
    lock: int | None = None,
    *,
    address: str = LOOPBACK,
    environ: Mapping[str, str] | None = None,
    detached: bool = False,
) -> Runtime:
    """Make the runtime that the configuration names."""
    if config.runtime == "process":
        starter = Detached() if detached else None
        return ProcessRuntime(config, environ=environ, address=address, starter=starter)
    return ContainerRuntime(config, environ=environ, lock=lock, address=address)


def machine_id(environ: Mapping[str, str]) -> str:
    """Return what tells this machine from others until it is booted again, in containers too; "": unknown."""
    try:
        return f"{boot()}{environ.get(MACHINE, '')}"
    except OSError:
        return ""


def is_process_stopped(pid: int) -> bool | None:
    """Return whether a signal or a debugger holds a process of this machine; None: there is none."""
    stat = stat_of(pid)
    return stat.is_stopped if stat else None


def inventory(address: str = LOOPBACK) -> Inventory:
    """Return what this machine has and can do, before any service of it is configured."""
    return Inventory(gpus.probe().listed, gpus.host_memory()[0], address)


class LocalHost:
    """This machine, see ``seam.Host``.

    ``lock``: the project's, which commands that outlive us go on to hold. ``report`` learns what the phases
    of steps took; None: they are news. ``address``: at which its engines are to be reached. ``environ``: the
    variables of engines and commands; None: our own. ``detached``: engines that are processes outlive whoever
    ends the children of this one, see starter.py. ``described``: what the machine is said to have; then no
    GPU is read.
    """

    name = "local"

    def __init__(
        self,
        config: HostConfig,
        lock: int | None = None,
        report: ReportPhase | None = None,
        *,
        address: str = LOOPBACK,
        environ: Mapping[str, str] | None = None,
        detached: bool = False,
        described: Inventory | None = None,
    ) -> None:
        self._config = config
        self.runtime = runtime = build_runtime(
            config, lock, address=address, environ=environ, detached=detached
        )
        """The runtime, of use within this package alone."""
        found = gpus.probe() if described is None else Gpus()
        self._inventory = described or Inventory(found.listed, gpus.host_memory()[0], address)
        listed = Gpus(tuple(gpus.Reading(each) for each in self._inventory.gpus))
        self._described_gpus = None if described is None else lambda: listed
        self._environ = os.environ if environ is None else environ
        self._state = state = state_folder(config.project, self._environ)
        self._notes = Notes(state)
        self._claims = Claims(self._environ)
        self._starts = StartClaims(self._environ)
        self._board = NewsBoard()
        self._prompts = PromptCache(kept=self._prompts_kept, state=state)
        self._swapper = Swapper(
            runtime,
            probe=gpus.probe if described is None else None,  # a driver may come later
            report=report or self._took,
            note=self._notes.note_level,
            prompts=self._prompts,
            lacks=self._lacks,
            guard=self._alone_on_gpus,
        )
        self._adopter = Adopter(self._swapper, self._notes)
        self._read_ahead = ReadAhead(self._weights, lambda *read: self._board.put(WeightsRead(*read)))
        self._watch = Worker("watch", lambda: self.runtime.watch(self._heard))
        self._load_logs = LoadLogs(self._swapper.log_tail, self._board.put)
        self._cards = CardReader(self._board.put)
        self._gpu_monitor = GpuMonitor(
            _used(config),
            runtime.owner,
            lambda gpu_uses: self._board.put(GpusRead(gpu_uses)),
            list_gpus=self._note_gpus,
        )
        self._last_gpus = self._inventory.gpus
        """The GPUs as they were listed last; the GPU monitor's."""
        self._is_to_monitor = described is None
        """Whether the GPU monitor begins once it is known what runs."""
        self._backends = {backend.name: backend for backend in config.backends}
        """Each backend as it was last started, also those that went."""
        self._urls: dict[str, str] = {}
        """The addresses of the services that ran when that was asked last."""
        self._unseen: str | None = ""
        """Why it could never be seen what runs, "" if that was not asked: nothing is started before; None: it
        was seen."""
        self._paused: frozenset[str] = frozenset()
        """The backends that somebody else has paused."""
        self._is_claimed = False
        self._loads: dict[str, int] = {}
        """Backend -> the number of the load that brought it up; without those that were adopted."""

    def start(self) -> None:
        """Start its threads, which run on the CPUs of this one; without them there is no news."""
        self._watch.start()
        self._load_logs.worker.start()
        self._cards.worker.start()
        self._read_ahead.worker.start()
        for backend in self._config.backends:
            self._prompts.tell(backend)

    def claim(self) -> list[str]:
        """Claim the project and its GPUs, and return a warning for each that another anvil-mux uses.

        BackendError if another one serves the project.
        """
        self._claims.take_project(self._config)
        self._claims.take_gpus(self._config)
        self._is_claimed = True
        return self._claims.others(self._config)

    def inventory(self) -> Inventory:
        return self._inventory

    def _note_gpus(self, listed: tuple[HostGpu, ...]) -> None:
        """Note which GPUs there are: a driver may be loaded late, and a GPU may fail.

        Fewer than before count once they were listed twice in a row: a reading may fail.
        """
        before, self._last_gpus = self._last_gpus, listed
        missing = {gpu.id for gpu in self._inventory.gpus} - {gpu.id for gpu in listed}
        if listed != self._inventory.gpus and (not missing or listed == before):
            self._inventory = replace(self._inventory, gpus=listed)

    def reconfigure(self, config: HostConfig) -> None:
        before = self._config
        changed, known = replaced(before, config), {backend.name for backend in before.backends}
        added = [backend.name for backend in config.backends if backend.name not in known]
        _refuse_missing_images(config, [*changed, *added])
        self.runtime.reconfigure(config)
        if self._is_claimed:
            self._claims.take_gpus(config)
        self._notes.add(config.backends)
        self._gpu_monitor.look_at(_used(config))
        self._backends = {**{backend.name: backend for backend in config.backends}, **self._backends}
        self._config = config
        for backend in config.backends:
            self._prompts.tell(backend)

    # What is there

    def running(self) -> list[str]:
        try:
            self._urls = self.runtime.running()
            self._unseen = None
        except MuxError as error:
            if self._unseen is not None:
                self._unseen = error.message
            raise
        finally:
            if self._is_to_monitor:  # whose processes are whose is known now
                self._is_to_monitor = False
                self._gpu_monitor.worker.start()
        return list(self._urls)

    def orphans(self) -> list[Backend]:
        found = {each.name: each for each in self._notes.orphans(self._config.backends)}
        if self._config.runtime == "process":
            strays = RunRecords(self._state).strays(self._backends)
            found |= {run.backend: Backend(run.backend, run.backend) for run in strays}
        self._notes.add(self._config.backends)
        return list(found.values())

    def occupants(self) -> list[Occupant]:
        return find_occupants(self._config, self._state, self._environ, self.runtime.owner, self._identities)

    def _identities(self, names: Iterable[str]) -> dict[str, str]:
        """Return for each name of a GPU the id by which this machine knows it now."""
        return gpus.identities(names, self._described_gpus)

    def adopt(self, backend: Backend) -> Found:
        self._loads.pop(backend.name, None)
        self._backends[backend.name] = backend
        found = self._adopter.look(backend, self._urls.get(backend.name, ""))
        if isinstance(found, Awake):
            self._cards.order(backend, found.url)
        return found

    def ended(self, backend: Backend) -> str | None:
        return self._swapper.ended(backend)

    def answers(self, backend: Backend, limit: float) -> bool | None:
        return self._swapper.answers(backend, limit)

    def log_tail(self, backend: Backend, lines: int = LOG_LINES) -> list[str]:
        return self._swapper.log_tail(backend, lines)

    def follow_log(self, backend: Backend) -> Iterator[str]:
        """Yield lines as they come, see ``seam.Runtime``."""
        return self.runtime.follow_log(backend)

    def problem(self) -> str:
        return self.runtime.problem()

    def ping(self) -> str:
        """Return why no service can be started or stopped now; "" if they can. See ``seam.Runtime``."""
        return self.runtime.ping()

    def own_memory(self) -> int:
        """The bytes that this process could ever have."""
        return gpus.own_memory()

    def missing_rights(self) -> list[str]:
        """A warning for each right that a checkpoint needs, and this process has not."""
        return cuda_checkpoint.missing_rights(self._config, self.runtime)

    def _lacks(self, backend: Backend) -> list[str]:
        return cuda_checkpoint.likely_causes(
            backend, self.runtime, contained=self._config.runtime == "compose"
        )

    # Steps

    def load(self, backend: Backend, level: str, number: int = 0) -> Loaded:
        if self._unseen:
            raise LoadError(f"it could not be seen yet what runs here already: {self._unseen}")
        if level != "stop":
            self._check_before_wake(backend)
        self._backends[backend.name] = backend
        self._notes.add([backend])  # which may have failed at the start
        reading = self._load_logs.reading(backend) if level == "stop" else nullcontext()
        with self._read_ahead.pausing(), reading:
            loaded = self._swapper.load(backend, level, number)
        self._loads[backend.name] = number
        self._note_paused(backend.name, is_paused=False)
        self._cards.order(backend, loaded.url)
        return loaded

    @contextmanager
    def _alone_on_gpus(self, backend: Backend, remaining: Callable[[], float]) -> Iterator[None]:
        """Keep other anvil-mux from starting engines on the GPUs of a backend; see ``levels.Guard``."""
        with self._starts.held(self._identities(backend.gpus).values(), remaining):
            try:
                self._refuse_occupied(backend)
            except Occupied:
                raise
            except BackendError as error:
                why = f"it cannot be determined who is on its GPUs: {error.message}"
                raise NotBegun(why) from None
            yield

    def _refuse_occupied(self, backend: Backend) -> None:
        """Raise Occupied if an engine that is not ours may be on the GPUs of a backend."""
        occupants = self.occupants() if backend.gpus else []
        ids = [*self._identities(backend.gpus).values()] if occupants else []
        if occupant := next((each for each in occupants if each.is_on(ids)), None):
            raise Occupied(occupant)

    def _check_before_wake(self, backend: Backend) -> None:
        """Raise LoadError if an engine that is not ours may be on the GPUs of a sleeper, which is ended."""
        until = time.monotonic() + backend.load_timeout
        try:
            gpus_held = self._identities(backend.gpus).values()
            with self._starts.held(gpus_held, lambda: until - time.monotonic()):
                self._refuse_occupied(backend)
        except NotBegun as error:
            self._swapper.stop(backend)
            raise LoadError(error.message, log=error.log) from None
        except BackendError:  # it is on its GPUs already, and wakes without the container runtime
            return

    def cancel(self, backend: Backend, number: int) -> None:
        self._swapper.cancel(backend, number)

    def read_ahead(self, backends: Sequence[str]) -> None:
        known = {backend.name: backend for backend in self._config.backends}
        self._read_ahead.order([known[name] for name in backends if name in known])

    def _weights(self, backend: Backend) -> list[Path]:
        """The files of a backend's weights on this machine."""
        mounted: Mounts = ()
        if not all(outside for _, outside in backend.service.mounts):
            with suppress(MuxError):
                mounted = self.runtime.mounts(backend)
        return weights_of(backend, mounted)

    def evict(self, backend: Backend, level: str) -> Evicted:
        return self._swapper.evict(backend, level)

    def demote(self, backend: Backend, before: str, level: str) -> Evicted:
        return self._swapper.demote(backend, before, level)

    def stop(self, backend: Backend) -> None:
        self._swapper.stop(backend)
        self._notes.note_level(backend.name, "")
        if all(backend.name != each.name for each in self._config.backends):
            self._notes.remove(backend)

    def kill_all(self) -> None:
        """Kill all engines at once, as the end of a machine does; for machines that are only simulated."""
        for backend in self._backends.values():
            for pid in self.runtime.pids(backend):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    # For the benchmark of swaps

    def by_hand(self) -> DockerByHand | Runtime:
        """The hand that stops and starts its services without us: Docker's commands, else the runtime."""
        return DockerByHand(self._config) if self._config.runtime == "compose" else self.runtime

    def held(self, backend: Backend) -> int:
        """The GPU memory that it has, as NVML tells or as declared; 0 where nobody knows."""
        held = self._swapper.memory.held(backend, lambda: self.runtime.pids(backend), resident=True)
        return sum(held.bytes.values()) or (backend.vram or 0) * len(backend.gpus)

    # News

    def news(self, after: int, timeout: float) -> list[HostNews]:
        return self._board.read(after, timeout)

    def watch_gpus(self) -> None:
        self._gpu_monitor.watch()

    def close(self) -> None:
        self._read_ahead.order(())
        self._read_ahead.worker.close()
        self._board.close()
        self._load_logs.worker.close()
        self._cards.worker.close()
        self._gpu_monitor.worker.close()
        self._watch.close()
        self.runtime.close()
        self._claims.close()

    def _took(self, backend: Backend, phase: str, seconds: float) -> None:
        self._board.put(PhaseTook(backend.name, phase, seconds))

    def _prompts_kept(self, backend: str, prompts: Sequence[KeptPrompt]) -> None:
        tokens, size = sum(each.tokens for each in prompts), sum(each.size for each in prompts)
        self._board.put(PromptsKept(backend, len(prompts), tokens, size))

    def _heard(self, event: str, name: str) -> None:
        """Make news of what happened to a service, see ``seam.Runtime.watch``."""
        match event:
            case "ended":
                self._died(name)
            case "started":
                self._board.put(ServiceStarted(name))
            case "paused" | "resumed":
                self._note_paused(name, is_paused=event == "paused")

    def _note_paused(self, name: str, *, is_paused: bool) -> None:
        if is_paused != (name in self._paused):
            self._paused = self._paused ^ {name}
            container = self.runtime.container_name(name) if is_paused else ""
            self._board.put(ServicePaused(name, container))

    def _died(self, name: str) -> None:
        self._note_paused(name, is_paused=False)
        load = self._loads.get(name, 0)
        backend = self._backends.get(name)
        if backend is None:
            return
        try:
            why = self.runtime.ended(backend)
        except MuxError as error:
            why = error.message
        lines: Sequence[str] = ()
        with suppress(Exception):  # that it ended is known without
            lines = self.log_tail(backend)
        why = why or "ended, and somebody started it again"
        self._board.put(ServiceEnded(name, why, tuple(lines), load))


class Occupied(NotBegun):
    """Another engine may be on the GPUs of a backend. ``log`` names it, and the command that ends it."""

    def __init__(self, occupant: Occupant) -> None:
        is_known = occupant.origin != "unknown"
        super().__init__(
            "its GPU is held by an engine that another anvil-mux started"
            if is_known
            else "its GPU may be held by a container: Docker does not answer",
            log=[f"{FOR_OPERATORS}{occupant.advice}"],
        )


class CardReader:
    """Asks engines that have just been loaded or adopted for their model cards: each once, one by one.

    Nobody waits for that, and an engine that does not say it is not asked again before its next load.
    """

    def __init__(self, tell: Callable[[CardRead], object]) -> None:
        self._tell = tell
        self._due = deque[tuple[Backend, str]]()
        self.worker = Worker("model-cards", self._turn, first=None)

    def order(self, backend: Backend, url: str) -> None:
        """Have the engine at ``url`` asked. Any thread; never blocks."""
        self._due.append((backend, url))
        self.worker.wake()

    def _turn(self) -> float | None:
        if not self._due:
            return None
        backend, url = self._due.popleft()
        card = engines.model_card(backend, url)
        if card != NOTHING_KNOWN:
            self._tell(CardRead(backend.name, backend.description, card))
        return 0.0


class NewsBoard:
    """The news that any thread puts up, and one fetches.

    Of the use of GPUs, how far a load is, prompts on disk and model cards only the last is kept. Beyond
    ``MOST_NEWS`` the oldest are forgotten: then nobody fetches any, as where a host serves a single command.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        # Guarded by it:
        self._kept: dict[object, HostNews] = {}  # in the order of their numbers
        self._number = 0
        self._closed = False

    def put(self, what: AnyNews) -> None:
        """Add news. Never blocks."""
        with self._changed:
            self._number += 1
            subject = _subject(what) or self._number
            self._kept.pop(subject, None)
            self._kept[subject] = HostNews(self._number, what)
            if len(self._kept) > MOST_NEWS:
                del self._kept[next(iter(self._kept))]
            self._changed.notify_all()

    def read(self, after: int, timeout: float) -> list[HostNews]:
        """See ``Host.news``; returns at once when it is closed."""
        with self._changed:
            self._kept = {key: each for key, each in self._kept.items() if each.number > after}
            self._changed.wait_for(lambda: self._kept or self._closed, timeout)
            return list(self._kept.values())

    def close(self) -> None:
        """End every wait for news."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


def _subject(what: object) -> object:
    """Return the subject of which only the last news counts; None where each counts."""
    match what:
        case GpusRead():
            return "gpus"
        case LoadStage(backend):
            return "load", backend
        case PromptsKept(backend):
            return "prompts", backend
        case CardRead(backend):
            return "card", backend
    return None


def _used(config: HostConfig) -> set[str]:
    """The GPUs that backends need."""
    return {id for backend in config.backends for id in backend.gpus}


def _refuse_missing_images(config: HostConfig, names: Collection[str]) -> None:
    """Raise ConfigError if backends lack their images."""
    missing: list[str] = []
    with suppress(MuxError):  # Docker is away: a load that needs an image reports it
        missing = missing_images(config, names)
    if missing:
        raise ConfigError(missing)


# Adoption

ADOPT_SECONDS = 5.0
"""How long an engine that runs already may take to answer."""


class Adopter:
    """Looks at engines; calls for different backends may come from several threads at once."""

    def __init__(self, swapper: Swapper, notes: Notes) -> None:
        self._swapper = swapper
        self._runtime = swapper.runtime
        self._notes = notes

    def look(self, backend: Backend, url: str) -> Found:
        """Judge a backend that runs; ``url`` as ``Runtime.running`` has it."""
        if not url:
            return Unfit("it cannot be reached")
        try:
            if differs := self._runtime.differs(backend):
                return Unfit(differs)
            return self._frozen(backend) or self._asleep(backend, url) or self._awake(backend, url)
        except MuxError as error:
            return Unfit(error.message)

    def _frozen(self, backend: Backend) -> Found | None:
        """Judge a frozen backend; None if it is not frozen, or was thawed and is not checkpointed."""
        frozen = self._runtime.is_frozen(backend)
        if frozen and "freeze" in backend.evict_to and "checkpoint" not in backend.evict_to:
            return self._in_standby(backend, "freeze")
        if frozen:
            self._runtime.resume(backend)
        if "checkpoint" not in backend.evict_to:
            return None
        try:
            standby = self._swapper.checkpointer.find_standby(self._runtime.pids(backend))
        except MuxError as error:
            return Unfit(f"nobody knows whether it is checkpointed: {error.message}")
        if standby is None:
            return None
        if not standby.whole:
            return Unfit("only a part of it is checkpointed")
        self._runtime.pause(backend)
        return self._in_standby(backend, "checkpoint")

    def _asleep(self, backend: Backend, url: str) -> Found | None:
        sleeps = engines.ENGINES[backend.engine].sleeps
        if sleeps is None:
            return None
        noted, asleep = self._notes.level(backend.name), None
        with suppress(MuxError):  # one that does not answer is waited for afterwards
            asleep = engines.is_asleep(backend, url)
        if asleep is None and sleeps.is_silent and noted in ("sleep", "sleep-2"):
            asleep = True
        if not asleep:
            return None
        if noted == WAKES:
            return Unfit("it was being woken when anvil-mux ended")
        # On its way to a checkpoint it may have slept at any level that it may take.
        light = noted == "sleep" or (noted == "checkpoint" and "sleep-2" not in backend.evict_to)
        deepens = engines.UNKNOWN in sleeps.levels
        return self._in_standby(backend, "sleep-2" if deepens and not light else "sleep")

    def _in_standby(self, backend: Backend, level: str) -> Found:
        """Judge one in standby: unfit if it holds its GPUs all the same."""
        pids = self._runtime.pids(backend)
        held = self._swapper.memory.held(backend, lambda: pids, resident=False)
        full = [gpu for gpu, amount in held.bytes.items() if amount > CONTEXT]
        if full and level != "freeze":
            amounts = ", ".join(f"{gib(held.bytes[gpu])} of GPU {gpu}" for gpu in full)
            return Unfit(f"it is in standby but still holds {amounts}")
        return Evicted(level, {**dict.fromkeys(backend.gpus, 0), **held.bytes}, host_bytes(pids))

    def _awake(self, backend: Backend, url: str) -> Found:
        try:
            engines.await_ready(
                backend,
                url,
                ended=partial(self._runtime.ended, backend),
                deadline=time.monotonic() + ADOPT_SECONDS,
            )
            if may_sleep(backend):
                engines.probe(backend, url)  # some sleep without saying so
        except MuxError:
            silent = f"it did not answer for {backend.model} within {ADOPT_SECONDS:g} s"
            return Unfit(f"{silent} (perhaps it was still loading)")
        try:
            engines.load_adapters(backend, url, deadline=time.monotonic() + ADOPT_SECONDS)
        except MuxError as error:
            return Unfit(error.message)
        return Awake(url)


# Engines that nobody serves


class LeftEngines:
    """The engines of one project that run, by its state folder; nobody may serve the project meanwhile."""

    def __init__(self, folder: Path) -> None:
        self.project = folder.name
        self._environ = {**os.environ, "XDG_STATE_HOME": str(folder.parent.parent)}
        """The variables by which the state folder is found."""
        self.problem = ""
        """Why it is not known of some of them whether they run; "" if it is."""
        self._running: list[tuple[Runtime, Backend]] = []
        noted = Notes(folder).orphans(())
        records = RunRecords(folder)
        runs = {run.backend for run in records.strays(())}
        noted += [Backend(name, name) for name in sorted(runs - {each.name for each in noted})]
        processes = [each for each in noted if each.name in runs or records.has_room(each.name)]
        containers = [each for each in noted if each not in processes]
        for kind, backends in (("process", processes), ("compose", containers)):
            if backends:
                self._look(kind, backends)

    def _look(self, kind: str, backends: list[Backend]) -> None:
        config = HostConfig(tuple(backends), project=self.project, runtime=kind)
        runtime = build_runtime(config, environ=self._environ)
        try:
            running = runtime.running()
        except MuxError as error:
            self.problem = error.message
            return
        self._running += [(runtime, each) for each in backends if each.name in running]

    @property
    def names(self) -> list[str]:
        """The names of their backends."""
        return [backend.name for _, backend in self._running]

    def stop(self) -> None:
        """End them; BackendError if one cannot be ended."""
        for runtime, backend in self._running:
            runtime.stop(backend)
