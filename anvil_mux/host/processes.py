"""Services as local child processes: no Docker needed.

A service runs in a session of its own, with its output in ``NAME.log``, so it outlives an anvil-mux that is
killed. The record of its run beside the log (runs.py), by which the next one adopts it, is written twice:
first before there is a process, with a mark that the process will carry in its environment, so whenever
anvil-mux is killed, none is lost.

What is stopped is the run, not just the process that was started. Ends are seen through pidfds: nothing is
polled. The parent of an engine is a launcher of its own (launcher.py), which bounds its log.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import math
import os
import random
import re
import secrets
import signal
import socket
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from itertools import repeat
from pathlib import Path
from typing import IO

from anvil_mux import command
from anvil_mux.command import Done
from anvil_mux.config.config import Backend
from anvil_mux.config.service import SHOWING, Mounts, container_program, labelled
from anvil_mux.errors import BackendError, ConfigError, LoadError
from anvil_mux.host.claims import engine_claims
from anvil_mux.host.engines import PORT_TAKEN
from anvil_mux.host.gpus import identities
from anvil_mux.host.runs import (
    ENGINE,
    MARK,
    OURS,
    RunRecord,
    RunRecords,
    boot,
    marked_runs,
    open_pidfd,
    output_of,
    stat_of,
)
from anvil_mux.host.seam import FOLLOWED_LINES, LOG_LINES, LOOPBACK, MACHINE, HostConfig, url_of
from anvil_mux.host.starter import Child, OwnChildren, Starter, StarterLost, readable
from anvil_mux.state import is_served, open_regular, state_folder

PLACE = re.compile(r"\$(?:\{(HOST|PORT)\}|(HOST|PORT)\b)")
"""The words of a command that stand for the address and the port at which the service is to listen."""
KERNELS_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
FIRST_PORT, LAST_PORT = 49152, 65535
"""The ports that no service is registered for (RFC 6335)."""
PORT_TRIES = 100
UNSEEN_SECONDS = 0.5
"""The pause before processes are looked at again, after no file could be opened for that."""
REAP_SECONDS = 1.0
"""Seconds to wait for the exit code of a process that has ended."""
FOLLOW_PAUSE = 0.2
TAIL_BYTES = 256 << 10
CONTAINERS_TIMEOUT = 30.0
"""Seconds that a command about containers which a process has made may take."""
LEAST_FREE = 16 << 20
"""The free bytes of the disk below which it counts as full."""

log = logging.getLogger(__name__)


class ProcessRuntime:
    """The services of one compose file as processes, see ``seam.Runtime``."""

    def __init__(
        self,
        config: HostConfig,
        *,
        environ: Mapping[str, str] | None = None,
        address: str = LOOPBACK,
        starter: Starter | None = None,
    ) -> None:
        self._config = config
        self._starter = starter or OwnChildren()
        self._address = address
        self._names = {backend.name for backend in config.backends}
        """The names of services, also of those that are about to go."""
        self._environ = dict(os.environ if environ is None else environ)
        self._state = state_folder(config.project, self._environ)
        self._records = RunRecords(self._state)
        self._closed = threading.Event()
        self._waker = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # Guards the fields below; held for single reads and writes only.
        self._lock = threading.Lock()
        self._children: dict[str, Child] = {}
        self._claims: dict[str, socket.socket] = {}  # of the chosen ports of runs
        self._up: dict[str, RunRecord] = {}  # the runs that `watch` answers for

    def prepare(self, backend: Backend, remaining: Callable[[], float]) -> None:
        pass  # processes depend on nothing

    def start(self, backend: Backend) -> str:
        described = _described(backend, self._address)
        record = self._records.read(backend.name)
        if record is not None and record.described == described and record.is_alive():
            record.send(signal.SIGCONT)
            self._answer_for(backend.name, record)
            return record.url
        self.stop(backend)
        with suppress(OSError):  # should it not come to a run, none is shown
            self._log_file(backend.name).unlink(missing_ok=True)
        port, claim = _claim_port(backend, self._address)
        self._hold(backend.name, claim)
        intent = RunRecord(
            pid=0,
            started=0,
            boot=boot(),
            url=url_of(self._address, port),
            mark=secrets.token_hex(8),
            described=described,
            project=self._config.project,
            backend=backend.name,
            gpus=backend.gpus,
            state=str(self._state),
            machine=self._environ.get(MACHINE, ""),
            containers_by=container_program(backend.service.command),
        )
        self._records.write(backend.name, intent)
        try:
            child = self._spawn(backend, port, intent)
        except LoadError:
            self._records.drop(backend.name)
            raise
        stat = stat_of(child.pid)
        output = output_of(child.pid, 0)  # its launcher reads it
        record = replace(intent, pid=child.pid, started=stat.started if stat else 0, output=output)
        with self._lock:
            self._children[backend.name] = child
        try:
            self._records.write(backend.name, record)
        except BackendError:
            record.end(0)
            raise
        self._answer_for(backend.name, record)
        return record.url

    def stop(self, backend: Backend) -> None:
        self._end(backend, backend.stop_timeout)

    def kill(self, backend: Backend) -> None:
        self._end(backend, 0.0)

    def _end(self, backend: Backend, grace: float) -> None:
        self._answer_for(backend.name, None)
        self._hold(backend.name, None)
        record = self._records.read(backend.name)
        if record is not None:
            record.end(grace)
            self._reap(backend.name)
            self._remove_containers(record)
            self._records.drop(backend.name)

    def _containers(self, record: RunRecord) -> list[str]:
        """Return the ids of the containers that the command of a run made; BackendError if unknown."""
        if not record.containers_by:
            return []
        label = f"label={MARK}={record.mark}"
        done = self._run([record.containers_by, "ps", "-aq", "--no-trunc", "--filter", label])
        return done.out.split()

    def _remove_containers(self, record: RunRecord) -> None:
        """End the containers that the command of a run made: they outlive a client that is killed."""
        if ids := self._containers(record):
            self._run([record.containers_by, "rm", "--force", *ids])

    def _run(self, argv: list[str]) -> Done:
        try:
            done = command.run(argv, CONTAINERS_TIMEOUT, env=self._environ)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise BackendError(
                f"`{' '.join(argv[:2])}` failed, and a container may run on: {error}"
            ) from None
        if done.code:
            text = f"`{' '.join(argv[:2])}` failed, and a container may run on: {done.last_line}"
            raise BackendError(text)
        return done

    def _hold(self, name: str, claim: socket.socket | None) -> None:
        """Hold the claim to the port of a run, in place of the one before."""
        with self._lock:
            before = self._claims.pop(name, None)
            if claim is not None:
                self._claims[name] = claim
        if before is not None:
            before.close()

    def pause(self, backend: Backend) -> None:
        self._signal(backend, signal.SIGSTOP)

    def resume(self, backend: Backend) -> None:
        self._signal(backend, signal.SIGCONT)

    def _signal(self, backend: Backend, number: signal.Signals) -> None:
        record = self._records.read(backend.name)
        if record is None or not record.send(number):
            raise BackendError(f"service {backend.name} {self.ended(backend)}")

    def pids(self, backend: Backend) -> list[int]:
        record = self._records.read(backend.name)
        return [] if record is None else sorted(record.members() - {record.pid})  # the launcher

    def mounts(self, backend: Backend) -> Mounts:
        return backend.service.mounts

    def owner(self, pid: int) -> str | None:
        records = self._records.read_all(self._names)
        return next((name for name, record in records.items() if pid in record.members([pid])), None)

    def ended(self, backend: Backend) -> str | None:
        record = self._records.read(backend.name)
        if record is not None and record.is_alive():
            return None
        code = self._reap(backend.name, REAP_SECONDS)
        if code is None:
            return "does not run" if record is None else "ended"
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        full = self._full_disk() if code else ""
        return f"{how} ({full})" if full else how

    def lost_its_port(self, backend: Backend) -> bool:
        if backend.port is not None or self.ended(backend) is None:
            return False
        return any(map(PORT_TAKEN.search, self.log_tail(backend)))

    def running(self) -> dict[str, str]:
        records, found = self._records.read_all(self._names), {}
        living = {name: record for name, record in records.items() if record.is_alive()}
        living |= self._taken_over(self._names - living.keys())
        for name, record in {**records, **living}.items():
            if name in living:
                found[name] = record.url
                self._answer_for(name, record)
            elif record.members() or self._may_have_containers(record):
                found[name] = ""  # its workers have outlived it
        return found

    def _may_have_containers(self, record: RunRecord) -> bool:
        try:
            return bool(self._containers(record))
        except BackendError as error:
            log.warning("service %s: %s", record.backend, error.message)
            return True

    def _taken_over(self, names: Container[str]) -> dict[str, RunRecord]:
        """Make the runs ours that another state folder has, and that are exactly what we would start.

        Whoever started them had another home, another name of the project or another folder, and has ended.
        """
        wanted = {each.name: each for each in self._config.backends if each.name in names}
        found: dict[str, RunRecord] = {}
        for run in marked_runs() if wanted else ():
            backend = wanted.get(run.backend)
            is_free = run.state != str(self._state) and not is_served(Path(run.state))
            is_same = backend and run.described == _described(backend, self._address)
            if (
                is_same
                and is_free
                and run.machine == self._environ.get(MACHINE, "")
                and run.backend not in found
            ):
                with suppress(BackendError):  # it is in memory; the next start knows it by its processes
                    self._records.write(run.backend, run)
                self._records.adopt(run.backend, run)
                RunRecords(Path(run.state)).drop(run.backend)
                found[run.backend] = run
        return found

    def differs(self, backend: Backend) -> str:
        record = self._records.read(backend.name)
        if record is None:
            return ""
        described = _described(backend, self._address)
        if not record.described:
            return "its description was not written down when it was started"
        changed = [part for part, digest in described.items() if record.described.get(part) != digest]
        return f"its {' and '.join(changed)} changed since it was started" if changed else ""

    def is_frozen(self, backend: Backend) -> bool:
        record = self._records.read(backend.name)
        if record is None or not record.is_alive():
            return False
        stats = [stat_of(pid) for pid in record.members()]  # somebody may have stopped the engine alone
        return any(stat is not None and stat.is_stopped for stat in stats)

    def log_tail(self, backend: Backend, lines: int = LOG_LINES) -> list[str]:
        try:
            with self._opened_log(backend.name) as log:
                log.seek(max(0, os.fstat(log.fileno()).st_size - TAIL_BYTES))
                return [_text(line) for line in deque(log, maxlen=lines)]
        except OSError:
            return []

    def follow_log(self, backend: Backend) -> Iterator[str]:
        try:
            opened = self._opened_log(backend.name)
        except OSError:
            return
        with opened as log:
            yield from map(_text, deque(log, maxlen=FOLLOWED_LINES))
            part = b""
            while True:
                over = self._closed.is_set() or self.ended(backend) is not None
                if os.fstat(log.fileno()).st_size < log.tell():
                    log.seek(0)  # it was cut
                for piece in log:
                    part += piece
                    if part.endswith(b"\n"):
                        yield _text(part)
                        part = b""
                if over:
                    break
                self._closed.wait(FOLLOW_PAUSE)
            if part:
                yield _text(part)

    def watch(self, tell: Callable[[str, str], object]) -> None:
        try:
            self._records.make_room(self._names)
        except BackendError as error:
            log.warning("%s", error.message)
            if any(self._records.read(name) for name in self._names):
                self._records.problem = ""  # whoever is loaded in its stead has its room
        while not self._closed.is_set():
            with self._lock:
                up = dict(self._up)
            for name in self._ended_of(up):
                if not self._closed.is_set():
                    self._judge(name, up[name], tell)

    def reconfigure(self, config: HostConfig) -> None:
        try:
            self._records.make_room(backend.name for backend in config.backends)
        except BackendError as error:
            raise ConfigError([error.message]) from None
        self._names = self._names | {backend.name for backend in config.backends}
        self._config = config

    def problem(self) -> str:
        full = self._full_disk()
        return self._records.problem or (full and f"{full}: what engines print is dropped")

    def container_name(self, service: str) -> str:
        return service

    def ping(self) -> str:
        return ""  # nobody else is needed to start and stop processes

    def _full_disk(self) -> str:
        """Return that the disk with the logs of engines is full; "" if it is not, or that is not known."""
        try:
            free = free_bytes(self._state)
        except OSError:
            return ""
        if free >= LEAST_FREE:
            return ""
        return f"the disk of {self._state} is full, {free >> 20} MiB are free"

    def close(self) -> None:
        self._closed.set()
        self._wake()
        with self._lock:
            children, claims = list(self._children.values()), list(self._claims.values())
            self._children.clear()
            self._claims.clear()
        for child in children:
            child.leave()
        for claim in claims:
            claim.close()
        self._starter.close()

    # Deaths

    def _answer_for(self, name: str, record: RunRecord | None) -> None:
        """Set what `watch` looks at from now on."""
        with self._lock:
            if record is None:
                self._up.pop(name, None)
            else:
                self._up[name] = record
        self._wake()

    def _wake(self) -> None:
        os.eventfd_write(self._waker, 1)

    def _ended_of(self, up: Mapping[str, RunRecord]) -> list[str]:
        """Return the names of runs that have ended; [] when the set of runs to look at has changed.

        [] too, after a pause, while processes cannot be looked at.
        """
        try:
            with ExitStack() as opened:
                names = {}
                for name, record in up.items():
                    fd = open_pidfd(record.pid, opened)
                    if fd is None or not record.is_alive():
                        return [name]
                    names[fd] = name
                ready = readable([self._waker, *names], math.inf)
        except (OSError, BackendError) as error:
            log.warning("the ends of engines cannot be waited for: %s", error)
            self._closed.wait(UNSEEN_SECONDS)
            return []
        if self._waker in ready:
            os.eventfd_read(self._waker)
        return [names[fd] for fd in ready if fd in names]

    def _judge(self, name: str, record: RunRecord, tell: Callable[[str, str], object]) -> None:
        with self._lock:
            if self._up.get(name) != record:
                return
        with suppress(BackendError):
            record.end(0)  # Orphaned workers of a dead API server still hold GPU memory.
            self._remove_containers(record)
        self._reap(name)
        with self._lock:
            if self._up.get(name) != record:
                return
            del self._up[name]
        tell("ended", name)

    # Processes

    def _spawn(self, backend: Backend, port: int, intent: RunRecord) -> Child:
        if not backend.service.command:
            raise LoadError(f"service {backend.name} has no command; runtime: process needs one")
        folder = self._folder(backend)
        variables = dict(backend.service.environment)
        place = {"HOST": variables.get("HOST", self._address), "PORT": str(port)}
        words = labelled(backend.service.command, f"{MARK}={intent.mark}")
        argv = [PLACE.sub(lambda found: place[found[1] or found[2]], word) for word in words]
        if "/" in argv[0]:
            argv[0] = os.path.join(folder, argv[0])
        # One variable of the service says which GPUs it has, so none of ours may say another thing.
        hidden = SHOWING if any(name in variables for name in SHOWING) else ()
        inherited = {
            name: value
            for name, value in self._environ.items()
            if not name.startswith(OURS) and name not in hidden
        }
        env = {**inherited, **variables, **place, MARK: intent.mark, ENGINE: intent.text}
        ids = identities(backend.gpus).values()
        claims = engine_claims(self._environ, ids, intent.mark, intent.project, backend.name)
        log_file = self._log_file(backend.name)
        try:
            return self._starter.start(argv, cwd=folder, env=env, log=log_file, claims=claims)
        except OSError as error:
            raise LoadError(f"service {backend.name} cannot be started: {error}") from None
        except StarterLost as error:
            # Its record stays: whatever stops the service finds the process by its mark, if there is one.
            raise BackendError(f"service {backend.name}: {error}") from None

    def _folder(self, backend: Backend) -> str:
        files = self._config.files
        return backend.service.working_dir or (
            os.path.dirname(os.path.abspath(files[0])) if files else os.getcwd()
        )

    def _reap(self, name: str, patience: float = 0.0) -> int | None:
        """The exit code of our own child, once it has one."""
        with self._lock:
            child = self._children.get(name)
        return child.code(patience) if child else None

    # Logs

    def _log_file(self, name: str) -> Path:
        """Return the log of the run that is known, or of the next one."""
        record = self._records.known(name)
        return Path(record.state if record and record.state else self._state) / f"{name}.log"

    def _opened_log(self, name: str) -> IO[bytes]:
        """A log for reading; OSError where its engine has put something else in its place."""
        return os.fdopen(open_regular(self._log_file(name), os.O_RDONLY | os.O_NOFOLLOW), "rb")


def _claim_port(backend: Backend, address: str) -> tuple[int, socket.socket | None]:
    """The backend's port after making sure that nobody has it, or else a free one with a claim to it.

    Until an engine listens at its port anybody may take it, and whoever answers there for a model of the same
    name would be taken for the engine. So the port is one that the kernel gives to nobody, where there are
    such, and that no other anvil-mux has chosen: a claim is a socket with a name that only one can have.
    """
    for wanted in _ports() if backend.port is None else [backend.port]:
        try:
            port = free_port(address, wanted)
            return port, None if backend.port else _claim(port)
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                raise LoadError(
                    f"service {backend.name} cannot listen at {address}: that is no address of this machine"
                ) from None
            last = error
    if backend.port is None:
        raise LoadError(f"service {backend.name} finds no free port ({last.strerror})")
    raise LoadError(
        f"{port_taken(backend, backend.port, last)}; leave the port out to get a free one in $PORT"
    )


def port_taken(backend: Backend, port: int, error: OSError) -> str:
    """Return why a service cannot be started whose port another program has."""
    return f"service {backend.name} cannot have port {port} ({error.strerror}): another program has it"


def _ports() -> Iterator[int]:
    """Ports to choose from; 0 stands for one that the kernel chooses."""
    try:
        kernels_last = int(KERNELS_PORTS.read_text().split()[1])
    except (OSError, ValueError, IndexError):
        kernels_last = LAST_PORT
    others = range(max(FIRST_PORT, kernels_last + 1), LAST_PORT + 1)
    yield from random.sample(others, min(len(others), PORT_TRIES))
    yield from repeat(0, PORT_TRIES)


def free_port(address: str, port: int) -> int:
    """The port, or one that the kernel chooses in place of 0; OSError if somebody has it."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((address, port))
        return int(probe.getsockname()[1])


def is_taken(address: str, port: int) -> bool:
    """Return whether a program of this machine listens at a port already."""
    try:
        free_port(address, port)
    except OSError as error:
        return error.errno == errno.EADDRINUSE
    return False


def _claim(port: int) -> socket.socket:
    """A claim to a port, for as long as it is open; OSError if there is one."""
    claim = socket.socket(socket.AF_UNIX)
    try:
        claim.bind(f"\0anvil-mux-port-{port}")
    except OSError:
        claim.close()
        raise
    return claim


def _described(backend: Backend, address: str) -> dict[str, str]:
    """Part of what a run is started by, as people call it -> a digest of it."""
    service = backend.service
    parts = {
        "command": service.command,
        "environment": sorted(service.environment),
        "folder": [service.working_dir, service.mounts],
        "GPUs": backend.gpus,
        "port": [backend.port, address],
    }
    return {part: hashlib.sha256(json.dumps(value).encode()).hexdigest() for part, value in parts.items()}


def free_bytes(folder: Path) -> int:
    """Return the bytes that are free on the disk of a folder; OSError."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def _text(line: bytes) -> str:
    return line.decode("utf-8", "replace").rstrip("\r\n")
