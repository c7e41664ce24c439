"""Each container that ends without our doing is reported.

A run of a container is known by its id and start moment, so that a container which a restart policy or a new
dockerd has revived is told from the one we started: it has lost its requests and its place, and is stopped.

The engine's events say that something ended, and an inspect says what is there now. While the engine is away
there are none; what it took along is found by comparing when it is back.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace

from anvil_mux.errors import MuxError
from anvil_mux.host.container import ALIVE, Container, how_it_ended
from anvil_mux.host.docker import ContainerEngine, Stream, read_death
from anvil_mux.host.project import Project

FIRST_PAUSE, LONGEST_PAUSE = 0.5, 10.0
"""Seconds between two attempts to follow the engine's events."""


class Deaths:
    """The runs that we answer for: the unexpected end of one is reported."""

    def __init__(self, project: Project, engine: ContainerEngine) -> None:
        self._project = project
        self._engine = engine
        self._closed = threading.Event()
        # Guards the fields below; held for single reads and writes only.
        self._lock = threading.Lock()
        self._up: dict[str, tuple[str, str]] = {}  # backend -> its run
        self._revived: dict[str, str] = {}  # how runs ended after which a restart policy began others
        self._events: Stream | None = None
        self._problem = ""  # written by `watch` alone

    def answer_for(self, name: str, container: Container) -> None:
        with self._lock:
            self._up[name] = container.run

    def started(self, name: str, container: Container) -> None:
        """Answer for a run that we began."""
        with self._lock:
            self._up[name] = container.run
            self._revived.pop(name, None)

    def release(self, name: str) -> None:
        """Answer for it no longer, since we end it ourselves."""
        with self._lock:
            self._up.pop(name, None)

    def answers_for(self, name: str, container: Container) -> bool:
        with self._lock:
            return self._up.get(name) == container.run

    def revived(self, name: str) -> str | None:
        """Say how its run ended, if Docker has begun another since."""
        with self._lock:
            return self._revived.get(name)

    def watch(self, died: Callable[[str], None]) -> None:
        pause = FIRST_PAUSE
        while not self._closed.is_set():
            try:
                since = time.time()
                self._compare(died)
                pause, self._problem = FIRST_PAUSE, ""
                self._follow_events(since, died)
            except MuxError as error:
                self._problem = error.message
            self._closed.wait(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    def problem(self) -> str:
        return self._problem

    def close(self) -> None:
        self._closed.set()
        with self._lock:
            if self._events:
                self._events.interrupt()

    def _compare(self, died: Callable[[str], None]) -> None:
        """Report whatever ended while nobody followed the events."""
        with self._lock:
            before = dict(self._up)
        runs = {name: container.run for name, container in self._project.alive().items()}
        for name, run in before.items():
            if runs.get(name) != run:
                self._judge(name, died)

    def _follow_events(self, since: float, died: Callable[[str], None]) -> None:
        with self._engine.deaths(self._project.config.project, since) as events:
            try:
                with self._lock:
                    self._events = events
                if not self._closed.is_set():
                    for line in events:
                        id, code = read_death(line)
                        if owner := self._project.owner(id):
                            self._judge(owner, died, code)
            finally:
                with self._lock:
                    self._events = None

    def _judge(self, name: str, died: Callable[[str], None], code: int | None = None) -> None:
        """Report the backend unless the run that we answer for goes on; a revived one is stopped first.

        ``code``: with which it ended, as the engine's event has it.
        """
        with self._lock:
            run = self._up.get(name)
        backend = self._project.backend(name)
        if run is None or backend is None or self._closed.is_set():
            return
        container = self._project.find(backend)
        if container is not None and container.status in ALIVE:
            if container.run == run and container.status != "restarting":
                return
            self._project.end(container, backend.stop_timeout)
            if code is not None:
                ended = how_it_ended(replace(container, status="exited", exit_code=code))
                with self._lock:
                    self._revived[name] = f"{ended}, and Docker had started it again"
        with self._lock:
            if self._up.get(name) != run:
                return
            del self._up[name]
        died(name)
