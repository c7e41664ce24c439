"""A compose project: the commands that make its containers, which backend each of these is, and their ends.

Compose itself is needed once per service: ``compose create`` makes the container, or makes it anew when
the service's description has changed. From then on the container is started and stopped over the engine's
API (docker_api.py), which skips Compose's 0.3 s of reading the project. Nothing here pulls or builds an
image: a request must not wait for 20 GB; the error says which command the user has to run. A killed
anvil-mux leaves its command at work, so that holds the project's lock too, and the next start waits for
it.

``Project`` knows which backend a container is. Each container of a scaled service is a backend of its
own. Compose numbers them, and gives a new one the number after the last, so one whose number is beyond
the scale stands in for one that somebody removed. What the engine reports is believed rather than what a
request's answer says: ``end`` returns when ``inspect`` no longer shows the container running.

``Project.watch`` reports each container that ends without our doing. A run of a container is known by its
id and start moment, so that a container which a restart policy or a new dockerd has revived is told from
the one we started: it has lost its requests and its place, and is stopped. The engine's events say that
something ended, and an inspect says what is there now. While the engine is away there are none; what it
took along is found by comparing when it is back.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from anvil_mux import command
from anvil_mux.command import Done
from anvil_mux.config.config import Backend
from anvil_mux.config.kinds import Diagnostic
from anvil_mux.errors import BackendError, MuxError
from anvil_mux.host.docker_api import (
    ALIVE,
    Container,
    ContainerEngine,
    ContainerEvent,
    Stream,
    Unreachable,
    find_endpoint,
    read_event,
)
from anvil_mux.host.seam import HostConfig

CREATE_TIMEOUT = 120.0
ASK_TIMEOUT = 20.0
log = logging.getLogger(__name__)

RELEASE = re.compile(r"v?(\d{1,9})\.(\d{1,9})\.(\d{1,9})")
CUT_OFF = "lost its network: somebody disconnected its container"
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 10.0
"""Seconds between two attempts to follow the engine's events."""


# Commands


Tell = Callable[[str, str], object]
"""Takes an event, see ``seam.Runtime.watch``, and the name of the backend."""
Run = Callable[[Sequence[str], float], Done]
"""Runs a command to its end, within so many seconds."""


def compose_release(version: str) -> tuple[int, ...]:
    """Return the numbers of a release, without what a distribution adds; () where it has none."""
    found = RELEASE.match(version)
    return tuple(map(int, found.groups())) if found else ()


def run_command(
    argv: Sequence[str], timeout: float, *, env: Mapping[str, str], lock: int | None = None
) -> Done:
    """Run a command to its end, see ``command.run``; BackendError if it does not come to that."""
    try:
        return command.run(argv, timeout, env=env, lock=lock)
    except OSError as error:
        why = f"{argv[0]} cannot be run ({error.strerror}): is it installed and on PATH?"
    except subprocess.TimeoutExpired:
        why = f"`{short(argv)}` did not end within {timeout:g} s; dockerd may be stuck"
    raise BackendError(why)


TAKE_A_VALUE = ("-f", "-p", "--ansi", "--profile", "--pull", "--project-directory", "--env-file")
"""Options of Compose that are followed by a value."""


def short(argv: Sequence[str]) -> str:
    """Return the command as an error names it: without its long lists of files and options."""
    following = zip(("", *argv), argv, strict=False)
    words = [word for before, word in following if before not in TAKE_A_VALUE]
    return " ".join(word for word in words if not word.startswith("-"))


# Containers


def how_it_ended(container: Container) -> str | None:
    """Say for people how it ended; None while it runs."""
    if container.status in ("running", "paused", "stopping"):
        return None
    if container.status == "created":
        return f"has not been started{f' ({container.error})' if container.error else ''}"
    how = f"exited with code {container.exit_code}"
    if container.oom_killed:
        how = "was killed because the machine or its memory limit ran out of memory (OOM)"
    elif container.exit_code == 137:
        how = "was killed (code 137)"
    elif container.exit_code > 128:
        with suppress(ValueError):
            how += f" ({signal.Signals(container.exit_code - 128).name})"
    return f"{how}, and Docker is restarting it" if container.status == "restarting" else how


@dataclass
class KnownContainer:
    """The facts about a backend's container that are known without asking the engine."""

    id: str = ""
    """The container that was created, or found fit, for it."""
    run: tuple[str, str] | None = None
    """The run whose end is to be reported."""
    revived: str = ""
    """How the run before ended, if Docker has begun another by itself since."""
    digest: str | None = None
    """The digest of the description by which it was started or found; "": its next start makes it anew."""
    start_time: float = 0.0
    """The Unix time at which we last had it started."""
    unstarted: tuple[str, str] | None = None
    """The run before a start that came to nothing."""
    is_moving: bool = False
    """Whether we are starting or ending it: an event of that is no news."""
    is_frozen: bool = False
    """Whether it is frozen because we froze it."""
    name: str = ""
    """The name of the container that was paused last."""


class Project:
    """The containers of a project. Any thread; calls for different backends run side by side."""

    def __init__(self, config: HostConfig, engine: ContainerEngine) -> None:
        self.config = config
        self._engine = engine
        self._served = {backend.name: backend for backend in config.backends}
        self._backends = self._served  # and those that are about to go; replaced as a whole
        self.problem = ""
        """Why services cannot be started or stopped now, as far as ``watch`` knows; "" if they can."""
        self._closed = threading.Event()
        # Guards the fields below, and the runs among what is known; held for single reads and writes only.
        self._lock = threading.Lock()
        self._known: dict[str, KnownContainer] = {}
        self._owners: dict[str, str] = {}  # container that ran -> its backend
        self._events: Stream | None = None
        self.has_looked = False
        """Whether it is known what ran before this program: from then on a start that is not ours is news."""

    def reconfigure(self, config: HostConfig) -> None:
        with self._lock:
            self.config = config
            self._served = {backend.name: backend for backend in config.backends}
            self._backends = {**self._backends, **self._served}

    def backend(self, name: str) -> Backend | None:
        return self._backends.get(name)

    def forget(self, backend: Backend) -> None:
        """Forget a backend that was stopped, unless it is configured."""
        with self._lock:
            if backend.name not in self._served:
                self._backends = {n: each for n, each in self._backends.items() if n != backend.name}

    def known(self, name: str) -> KnownContainer:
        """The record of a backend, to be changed by whoever starts or stops it."""
        with self._lock:
            return self._known.setdefault(name, KnownContainer())

    def started(self, backend: Backend, container: Container) -> None:
        """Answer for a run that we began, as the backend is described."""
        known = self.known(backend.name)
        known.id, known.revived, known.digest = container.id, "", backend.service.digest
        self._answer_for(backend.name, container)

    def found(self, backend: Backend, container: Container) -> None:
        """Answer for a run that somebody else began."""
        known = self.known(backend.name)
        if known.digest is None:
            known.digest = backend.service.digest
        self._answer_for(backend.name, container)

    def _answer_for(self, name: str, container: Container) -> None:
        with self._lock:
            self._owners[container.id] = name
            self._known[name].run = container.run

    def release(self, backend: Backend) -> None:
        """Answer for it no longer, since we end it ourselves."""
        known = self.known(backend.name)
        with self._lock:
            known.run = None

    def owner(self, id: str) -> str | None:
        with self._lock:
            return self._owners.get(id)

    def find(self, backend: Backend) -> Container | None:
        known = self.known(backend.name).id
        return (self._engine.inspect(known) if known else None) or self.look_up(backend)

    def look_up(self, backend: Backend) -> Container | None:
        return self._places(self.of_service(backend.service_name), backend).get(backend.name)

    def of_service(self, service: str) -> list[Container]:
        return self._inspected(id for id, _ in self._engine.containers(self.config.project, service))

    def alive(self) -> dict[str, Container]:
        """Return our backends whose containers run, with these."""
        ours = {backend.service_name for backend in self._backends.values()}
        listed = self._engine.containers(self.config.project)
        # What is being started is listed as it was before, so each is inspected.
        found = self._inspected(id for id, service in listed if service in ours)
        places = self._places([container for container in found if container.status in ALIVE])
        return {name: places[name] for name in self._backends if name in places}

    def await_stops(self, containers: Iterable[Container], timeout: float) -> bool:
        """Wait for containers that somebody is stopping now; return whether there were any."""
        signalled = self._engine.signalled(self.config.project)
        deadline = time.monotonic() + timeout
        # Podman says itself that it is stopping one.
        ending = [
            each.id
            for each in containers
            if each.status == "stopping"
            or (signalled.get(each.id, 0.0) > each.started and each.status != "restarting")
        ]
        for id in ending:
            with suppress(Unreachable):
                self._engine.await_end(id, max(deadline - time.monotonic(), 0.1))
        return bool(ending)

    def end(self, container: Container, grace: float | None) -> None:
        """Stop (unless there is no grace), kill, remove: up to the first after which it does not run."""
        if container.status not in ALIVE:
            return
        engine, why = self._engine, ""
        ways: list[Callable[[str], None]] = [engine.kill, engine.remove]
        if grace is not None:
            ways.insert(0, lambda id: engine.stop(id, grace))
        for way in ways:
            try:
                way(container.id)
            except MuxError as error:
                why = f": {error.message}"
            now = engine.inspect(container.id)
            if now is None or now.status not in ALIVE:
                return
        raise BackendError(f"service {container.service} still runs after stop, kill and rm{why}")

    def _inspected(self, ids: Iterable[str]) -> list[Container]:
        """Inspect containers, without those that went away since they were listed."""
        return [found for id in ids if (found := self._engine.inspect(id))]

    def _places(self, found: Sequence[Container], also: Backend | None = None) -> dict[str, Container]:
        """Assign containers to our backends and ``also``: what ran as it, has its number, or is left."""
        backends = {**self._backends, **({also.name: also} if also else {})}
        numbered = {(each.service_name, each.service.number): name for name, each in backends.items()}
        with self._lock:
            owners = {id: name for id, name in self._owners.items() if name in backends}
        places: dict[str, Container] = {}
        spare = []
        for each in sorted(found, key=lambda each: (each.id not in owners, each.number)):
            name = owners.get(each.id) or numbered.get((each.service, each.number))
            if name and name not in places:
                places[name] = each
            else:
                spare.append(each)
        for each in spare:
            free = (n for n, b in backends.items() if b.service_name == each.service and n not in places)
            if name := next(free, None):
                places[name] = each
        return places

    # Events

    def watch(self, tell: Tell) -> None:
        pause = FIRST_PAUSE
        while not self._closed.is_set():
            try:
                since = time.time()
                self._compare(tell)
                pause, self.problem = FIRST_PAUSE, ""
                self._follow_events(since, tell)
            except MuxError as error:
                self.problem = error.message
            self._closed.wait(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    def close(self) -> None:
        self._closed.set()
        with self._lock:
            if self._events:
                self._events.interrupt()

    def _compare(self, tell: Tell) -> None:
        """Report whatever began or ended while nobody followed the events."""
        with self._lock:
            before = {name: known.run for name, known in self._known.items() if known.run}
        runs = {name: container.run for name, container in self.alive().items()}
        for name, run in before.items():
            if runs.get(name) != run:
                self._judge(name, tell)
        for name in runs.keys() - before.keys():
            self._judge_start(name, tell)

    def _follow_events(self, since: float, tell: Tell) -> None:
        with self._engine.events(since) as events:
            try:
                with self._lock:
                    self._events = events
                if not self._closed.is_set():
                    for line in events:
                        event = read_event(line)
                        if name := self._concerned(event):
                            self._heed(event, name, tell)
            finally:
                with self._lock:
                    self._events = None

    def _concerned(self, event: ContainerEvent) -> str | None:
        """Return the backend whose container an event is of; None if it is none of ours."""
        if name := self.owner(event.id):
            return name
        backends = self._backends.values() if event.project == self.config.project else ()
        of_service = [each for each in backends if each.service_name == event.service]
        numbered = [each.name for each in of_service if each.service.number == event.number]
        return next(iter(numbered or [each.name for each in of_service]), None)

    def _heed(self, event: ContainerEvent, name: str, tell: Tell) -> None:
        known = self.known(name)
        match event.kind:
            case "die":
                known.is_frozen = False
                self._judge(name, tell, event.code)
            case "start":
                self._judge_start(name, tell)
            case "disconnect":
                self._judge(name, tell)
            case "pause" if known.run and not known.is_frozen:
                known.name = event.name
                tell("paused", name)
            case "unpause" if known.run and known.is_frozen and not known.is_moving:
                self._freeze_again(name)
            case "unpause" if known.run:
                tell("resumed", name)

    def _freeze_again(self, name: str) -> None:
        """Freeze a container in standby that somebody else has thawed: its GPUs may be another's by now."""
        backend = self.backend(name)
        container = self.find(backend) if backend else None
        if container is not None and container.status == "running" and self.known(name).is_frozen:
            log.warning("%s is in standby and was unpaused by hand: it is paused again", name)
            self._engine.pause(container.id)

    def _judge_start(self, name: str, tell: Tell) -> None:
        """Report a backend whose container was started by somebody else."""
        known, backend = self.known(name), self.backend(name)
        if known.is_moving or backend is None or not self.has_looked or self._closed.is_set():
            return
        if known.run is not None:
            self._judge(name, tell)
            return
        container = self.find(backend)
        is_ours = known.is_moving or known.run is not None
        if container is not None and container.status in ALIVE and not is_ours:
            tell("started", name)

    def _judge(self, name: str, tell: Tell, code: int | None = None) -> None:
        """Report the backend unless the run that we answer for goes on; a revived one is stopped first.

        ``code``: with which it ended, as the engine's event has it.
        """
        known, backend = self.known(name), self.backend(name)
        run = known.run
        if run is None or backend is None or self._closed.is_set():
            return
        container = self.find(backend)
        if container is not None and container.status in ALIVE:
            if container.run == run and container.status != "restarting" and not container.is_cut_off:
                return
            self.end(container, backend.stop_timeout)
            if container.is_cut_off:
                known.revived, known.digest = CUT_OFF, ""
            elif code is not None:
                ended = how_it_ended(replace(container, status="exited", exit_code=code))
                known.revived = f"{ended}, and Docker had started it again"
        with self._lock:
            if known.run != run:
                return
            known.run = None
        tell("ended", name)


# Images


def missing_images(config: HostConfig, names: Collection[str] | None = None) -> list[str]:
    """A line for each image that Docker does not have; BackendError if it does not answer.

    ``names``: those of the backends in question; None: all.
    """
    if config.runtime != "compose":
        return []
    engine = ContainerEngine(find_endpoint(os.environ))
    backends = [each for each in config.backends if names is None or each.name in names]
    images = {each.service.image: each.service_name for each in backends if each.service.image}
    return [
        Diagnostic(
            f"service {name}: image {image} is not present: docker pull {image}",
            said=f"service {name}: image {image} is not present",
            write=f"docker pull {image}",
            key=("services", name, "image"),
        )
        for image, name in images.items()
        if not engine.image_id(image)
    ]
