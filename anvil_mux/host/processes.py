"""Services as local child processes: no Docker needed.

A service runs in a session of its own, with its output in ``NAME.log``, so it outlives an anvil-mux that is
killed. ``NAME.json`` beside the log says which process it is: its id, the moment it started (field 22 of
/proc/PID/stat) and the boot it started in. A restarted anvil-mux adopts it by that record; a process that
only has the same id is another process and is left alone. A first record is written before there is a
process, with a mark that the process will carry in its environment, so whenever anvil-mux is killed, none is
lost.

What is stopped is the run, not just the process that was started: an engine's workers hold the GPU as well as
its front does, may outlive it, and may begin sessions of their own. They are known by the mark that they have
inherited. Nothing is polled: ends are seen through pidfds.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import random
import re
import secrets
import select
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import repeat
from pathlib import Path
from typing import IO, Any

from anvil_mux.clock import LONGEST_POLL
from anvil_mux.config.config import Backend
from anvil_mux.config.service import Mounts
from anvil_mux.errors import BackendError, ConfigError, LoadError, is_shortage
from anvil_mux.host.seam import FOLLOWED_LINES, LOG_LINES, LOOPBACK, HostConfig, url_of
from anvil_mux.host.starter import Child, OwnChildren, Starter, StarterLost
from anvil_mux.state import open_regular, state_folder

OURS = "ANVIL_"
"""The beginning of the names of our variables, which hold API keys and settings; engines get none of them."""
MARK = f"{OURS}MUX_RUN"
PLACE = re.compile(r"\$(?:\{(HOST|PORT)\}|(HOST|PORT)\b)")
"""The words of a command that stand for the address and the port at which the service is to listen."""
KERNELS_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
FIRST_PORT, LAST_PORT = 49152, 65535
"""The ports that no service is registered for (RFC 6335)."""
PORT_TRIES = 100
PORT_TAKEN = re.compile(r"address already in use|EADDRINUSE|couldn't bind", re.IGNORECASE)
"""How engines say that they cannot have their port."""
KILL_TIMEOUT = 10.0
"""Seconds that the kernel may take over SIGKILL."""
UNSEEN_SECONDS = 0.5
"""The pause before processes are looked at again, after no file could be opened for that."""
REAP_SECONDS = 1.0
"""Seconds to wait for the exit code of a process that has ended."""
FOLLOW_PAUSE = 0.2
TAIL_BYTES = 256 << 10
RECORD_BYTES = 4096
"""The room that a record has, whatever is in it."""
LOG_BYTES, KEPT_BYTES = 64 << 20, 4 << 20
"""The size at which the log of an engine that runs is cut, and how much of its end is kept then."""
TRIM_SECONDS = 60.0

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Record:
    """One run of a service, as its file tells a later anvil-mux."""

    pid: int
    """The process that was started, and its session; 0: it was about to be started."""
    started: int
    boot: str
    url: str
    mark: str
    """The value of MARK in its environment."""
    described: Mapping[str, str] = field(default_factory=dict)
    """Part of the description that it was started by -> a digest of it; empty: they are not known."""


class ProcessRuntime:
    """The services of one compose file as processes, see ``runtime.Runtime``."""

    def __init__(
        self,
        config: HostConfig,
        *,
        state: Path | None = None,
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
        self._state = state or state_folder(config.project, self._environ)
        self._closed = threading.Event()
        self._waker = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # Held while a record is written: what is spare room to one must not be a record by then.
        self._writing = threading.Lock()
        # Guards the fields below; held for single reads and writes only.
        self._lock = threading.Lock()
        self._children: dict[str, Child] = {}
        self._claims: dict[str, socket.socket] = {}  # of the chosen ports of runs
        self._up: dict[str, Record] = {}  # the runs that `watch` answers for
        self._problem = ""  # why the last record could not be written

    def start(self, backend: Backend) -> str:
        described = _described(backend, self._address)
        record = self._record(backend.name)
        if record is not None and record.described == described and _alive(record):
            _signal(record, signal.SIGCONT)
            self._answer_for(backend.name, record)
            return record.url
        self.stop(backend)
        self._log_file(backend.name).unlink(missing_ok=True)  # should it not come to a run, none is shown
        port, claim = _claim_port(backend, self._address)
        self._hold(backend.name, claim)
        intent = Record(
            pid=0,
            started=0,
            boot=_boot(),
            url=url_of(self._address, port),
            mark=secrets.token_hex(8),
            described=described,
        )
        self._write_record(backend.name, intent)
        try:
            child = self._spawn(backend, port, intent.mark)
        except LoadError:
            self._drop_record(backend.name)
            raise
        record = replace(intent, pid=child.pid, started=_start_moment(child.pid))
        with self._lock:
            self._children[backend.name] = child
        try:
            self._write_record(backend.name, record)
        except BackendError:
            _end_run(record, 0)
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
        record = self._record(backend.name)
        if record is not None:
            _end_run(record, grace)
            self._reap(backend.name)
            self._drop_record(backend.name)

    def _hold(self, name: str, claim: socket.socket | None) -> None:
        """Hold the claim to the port of a run, in place of the one before."""
        with self._lock:
            before = self._claims.pop(name, None)
            if claim is not None:
                self._claims[name] = claim
        if before is not None:
            before.close()

    def pause(self, backend: Backend) -> None:
        if not _signal(self._record(backend.name), signal.SIGSTOP):
            raise BackendError(f"service {backend.name} {self.ended(backend)}")

    def resume(self, backend: Backend) -> None:
        if not _signal(self._record(backend.name), signal.SIGCONT):
            raise BackendError(f"service {backend.name} {self.ended(backend)}")

    def pids(self, backend: Backend) -> list[int]:
        record = self._record(backend.name)
        return [] if record is None else sorted(_members(record))

    def mounts(self, backend: Backend) -> Mounts:
        return backend.service.mounts

    def owner(self, pid: int) -> str | None:
        records = {name: record for name in self._names if (record := self._record(name))}
        return next((name for name, record in records.items() if pid in _members(record, [pid])), None)

    def ended(self, backend: Backend) -> str | None:
        record = self._record(backend.name)
        if record is not None and _alive(record):
            return None
        code = self._reap(backend.name, REAP_SECONDS)
        if code is None:
            return "does not run" if record is None else "ended"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"

    def lost_its_port(self, backend: Backend) -> bool:
        if backend.port is not None or self.ended(backend) is None:
            return False
        return any(map(PORT_TAKEN.search, self.log_tail(backend)))

    def running(self) -> dict[str, str]:
        found = {}
        for name in self._names:
            record = self._record(name)
            if record is not None and _alive(record):
                found[name] = record.url
                self._answer_for(name, record)
            elif record is not None and _members(record):
                found[name] = ""  # its workers have outlived it
        return found

    def differs(self, backend: Backend) -> str:
        record = self._record(backend.name)
        if record is None:
            return ""
        described = _described(backend, self._address)
        if not record.described:
            return "its description was not written down when it was started"
        changed = [part for part, digest in described.items() if record.described.get(part) != digest]
        return f"its {' and '.join(changed)} changed since it was started" if changed else ""

    def is_frozen(self, backend: Backend) -> bool:
        record = self._record(backend.name)
        seen = _stat(record.pid) if record is not None and _alive(record) else None
        return seen is not None and seen[0] in "Tt"

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

    def watch(self, died: Callable[[str], None]) -> None:
        try:
            self._make_room(self._config)
        except BackendError as error:
            log.warning("%s", error.message)
            if any(self._record(name) for name in self._names):
                self._problem = ""  # whoever is loaded in its stead has its room
        while not self._closed.is_set():
            with self._lock:
                up = dict(self._up)
            for name in up:
                trim(self._log_file(name))
            for name in self._ended_of(up):
                if not self._closed.is_set():
                    self._judge(name, up[name], died)

    def reconfigure(self, config: HostConfig) -> None:
        try:
            self._make_room(config)
        except BackendError as error:
            raise ConfigError([error.message]) from None
        self._names = self._names | {backend.name for backend in config.backends}
        self._config = config

    def problem(self) -> str:
        return self._problem

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

    def _answer_for(self, name: str, record: Record | None) -> None:
        """Set what `watch` looks at from now on."""
        with self._lock:
            if record is None:
                self._up.pop(name, None)
            else:
                self._up[name] = record
        self._wake()

    def _wake(self) -> None:
        os.eventfd_write(self._waker, 1)

    def _ended_of(self, up: Mapping[str, Record]) -> list[str]:
        """The same as below; [] too, after a pause, while processes cannot be looked at."""
        try:
            return self._wait_for_end(up)
        except (OSError, BackendError) as error:
            log.warning("the ends of engines cannot be waited for: %s", error)
            self._closed.wait(UNSEEN_SECONDS)
            return []

    def _wait_for_end(self, up: Mapping[str, Record]) -> list[str]:
        """Return the names of runs that have ended; [] when the set of runs to look at has changed."""
        with ExitStack() as opened:
            names = {}
            for name, record in up.items():
                fd = _open_pidfd(record.pid, opened)
                if fd is None or not _alive(record):
                    return [name]
                names[fd] = name
            ready = _wait_for_any([self._waker, *names], TRIM_SECONDS)
        if self._waker in ready:
            os.eventfd_read(self._waker)
        return [names[fd] for fd in ready if fd in names]

    def _judge(self, name: str, record: Record, died: Callable[[str], None]) -> None:
        with self._lock:
            if self._up.get(name) != record:
                return
        with suppress(BackendError):
            _end_run(record, 0)  # Workers that outlive their engine's front still hold the GPU.
        self._reap(name)
        with self._lock:
            if self._up.get(name) != record:
                return
            del self._up[name]
        died(name)

    # Processes

    def _spawn(self, backend: Backend, port: int, mark: str) -> Child:
        if not backend.service.command:
            raise LoadError(f"service {backend.name} has no command; runtime: process needs one")
        folder = self._folder(backend)
        variables = dict(backend.service.environment)
        place = {"HOST": variables.get("HOST", self._address), "PORT": str(port)}
        words = backend.service.command
        argv = [PLACE.sub(lambda found: place[found[1] or found[2]], word) for word in words]
        if "/" in argv[0]:
            argv[0] = os.path.join(folder, argv[0])
        inherited = {name: value for name, value in self._environ.items() if not name.startswith(OURS)}
        env = {**inherited, **variables, **place, MARK: mark}
        try:
            return self._starter.start(argv, cwd=folder, env=env, log=self._log_file(backend.name))
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

    # Records

    def _record_file(self, name: str) -> Path:
        return self._state / f"{name}.json"

    def _log_file(self, name: str) -> Path:
        return self._state / f"{name}.log"

    def _opened_log(self, name: str) -> IO[bytes]:
        """A log for reading; OSError where its engine has put something else in its place."""
        return os.fdopen(open_regular(self._log_file(name), os.O_RDONLY | os.O_NOFOLLOW), "rb")

    def _record(self, name: str) -> Record | None:
        try:
            known = self._read(self._record_file(name))
            record = Record(**{each.name: known[each.name] for each in fields(Record) if each.name in known})
        except OSError as error:
            _check_shortage(error)
            return None
        except (ValueError, TypeError):
            return None
        if record.boot != _boot():
            return None
        return record if record.pid else _begun(record)

    def _read(self, file: Path) -> Any:
        """Return what a record has in its file. ValueError, also at a second look: it is written in place."""
        try:
            return json.loads(file.read_text())
        except ValueError:
            return json.loads(file.read_text())

    def _spare_file(self, name: str) -> Path:
        return self._state / f"{name}.spare"

    def _make_room(self, config: HostConfig) -> None:
        """Have room on the disk for the record of each service, before another is evicted for it."""
        for backend in config.backends:
            with self._writing:
                if not self._record_file(backend.name).exists():
                    self._fill(self._spare_file(backend.name), "")

    def _write_record(self, name: str, record: Record) -> None:
        file, spare = self._record_file(name), self._spare_file(name)
        text = json.dumps(asdict(record))
        with self._writing:
            if file.exists():
                self._fill(file, text)
                return
            try:
                self._fill(spare, text)
            except BackendError:
                if not self._take_room(spare):
                    raise
                self._fill(spare, text)
            os.replace(spare, file)

    def _take_room(self, spare: Path) -> bool:
        """Take the room of a service that does not run: who was stopped for another leaves it its own."""
        with suppress(OSError):
            for other in self._state.glob("*.spare"):
                if other != spare and other.stat().st_size >= RECORD_BYTES:
                    os.replace(other, spare)
                    return True
        return False

    def _drop_record(self, name: str) -> None:
        """Forget a run, where the disk may be written to; its room is kept for the next one."""
        with self._writing, suppress(OSError):
            os.replace(self._record_file(name), self._spare_file(name))

    def _fill(self, file: Path, text: str) -> None:
        """Write a record in place, which takes no new room and is whole even if we are killed."""
        try:
            self._state.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
            try:
                size = os.pwrite(descriptor, text.encode().ljust(RECORD_BYTES), 0)
                os.ftruncate(descriptor, size)
            finally:
                os.close(descriptor)
        except OSError as error:
            self._problem = f"services cannot be started: {self._state} cannot be written: {error.strerror}"
            raise BackendError(f"service {file.stem}: cannot write its record: {error}") from None
        self._problem = ""


def _claim_port(backend: Backend, address: str) -> tuple[int, socket.socket | None]:
    """The backend's port after making sure that nobody has it, or else a free one with a claim to it.

    Until an engine listens at its port anybody may take it, and whoever answers there for a model of the same
    name would be taken for the engine. So the port is one that the kernel gives to nobody, where there are
    such, and that no other anvil-mux has chosen: a claim is a socket with a name that only one can have.
    """
    for wanted in _ports() if backend.port is None else [backend.port]:
        try:
            port = _tried(address, wanted)
            return port, None if backend.port else _claim(port)
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                raise LoadError(
                    f"service {backend.name} cannot listen at {address}: that is no address of this machine"
                ) from None
            why = error.strerror
    if backend.port is None:
        raise LoadError(f"service {backend.name} finds no free port ({why})")
    raise LoadError(
        f"service {backend.name} cannot have port {backend.port} ({why}): "
        "another program has it; leave the port out to get a free one in $PORT"
    )


def _ports() -> Iterator[int]:
    """Ports to choose from; 0 stands for one that the kernel chooses."""
    try:
        kernels_last = int(KERNELS_PORTS.read_text().split()[1])
    except (OSError, ValueError, IndexError):
        kernels_last = LAST_PORT
    others = range(max(FIRST_PORT, kernels_last + 1), LAST_PORT + 1)
    yield from random.sample(others, min(len(others), PORT_TRIES))
    yield from repeat(0, PORT_TRIES)


def _tried(address: str, port: int) -> int:
    """The port if nobody has it; OSError."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((address, port))
        return int(probe.getsockname()[1])


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


def _check_shortage(error: OSError) -> None:
    """BackendError if something could not be read for want of files here: it may be there."""
    if is_shortage(error):
        raise BackendError(f"what runs here cannot be looked at: {error.strerror} (see ulimit -n)") from None


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _stat(pid: int) -> tuple[str, int, int] | None:
    """State, session and start moment of a process, None when there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError as error:
        _check_shortage(error)
        return None
    # The name in parentheses may hold anything, so fields are counted from its end; the state is field 3.
    fields = text[text.rindex(")") + 2 :].split()
    return fields[0], int(fields[3]), int(fields[19])


def _start_moment(pid: int) -> int:
    seen = _stat(pid)
    return seen[2] if seen else 0


def _alive(record: Record) -> bool:
    seen = _stat(record.pid)
    return seen is not None and seen[2] == record.started and seen[0] not in "ZX"


def _processes() -> list[int]:
    return [int(entry) for entry in os.listdir("/proc") if entry.isdecimal()]


def _variables(pid: int) -> bytes | None:
    """The environment that a process was started with; None: it cannot be read."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError as error:
        _check_shortage(error)
        return None


def _marked(record: Record, pids: Iterable[int]) -> set[int]:
    """The processes that inherited the run's mark."""
    mark = f"{MARK}={record.mark}".encode()
    return {pid for pid in pids if mark in (_variables(pid) or b"").split(b"\0")}


def _begun(record: Record) -> Record | None:
    """The run that was about to be started, if it came to that."""
    marked = [(seen[2], pid) for pid in _marked(record, _processes()) if (seen := _stat(pid))]
    if not marked:
        return None
    started, pid = min(marked)  # its workers began later
    return replace(record, pid=pid, started=started)


def _members(record: Record, pids: Iterable[int] | None = None) -> set[int]:
    """The processes of the run, among ``pids`` (None: all), that have not ended.

    They are those with its mark, and the others of its session: an engine may start some without its
    environment. Once the process that gave the session its number has ended, the number may be that of
    another session. Then those without a mark count only where their environment is blank, as it is for
    whoever has written a title over it.
    """
    seen = {pid: each for pid in (_processes() if pids is None else pids) if (each := _stat(pid))}
    since = {pid: each for pid, each in seen.items() if each[2] >= record.started and each[0] not in "ZX"}
    marked = _marked(record, since)
    session = {pid for pid, each in since.items() if each[1] == record.pid}
    leader = _stat(record.pid)
    if leader is not None and leader[2] != record.started:
        return marked
    if leader is None and not marked & session:
        session = {
            pid for pid in session if (words := _variables(pid)) is not None and not words.strip(b"\0")
        }
    return marked | session


def _end_run(record: Record, grace: float) -> None:
    """Return when no process of the run is left: SIGTERM, ``grace`` seconds, SIGKILL."""
    for number, patience in ((signal.SIGTERM, grace), (signal.SIGKILL, KILL_TIMEOUT)):
        deadline = time.monotonic() + patience
        signalled: set[int] = set()
        while members := _members(record):
            left = deadline - time.monotonic()
            with ExitStack() as opened:
                fds = {pid: _open_pidfd(pid, opened) for pid in members}
                for pid in members - signalled:
                    _tell(fds[pid], number)
                    _tell(fds[pid], signal.SIGCONT)  # who is frozen hears no other signal
                signalled |= members
                if left <= 0:
                    break
                # The sooner of an end and a second, since a member may start others meanwhile.
                _wait_for_any([fd for fd in fds.values() if fd is not None], min(left, 1.0))
        else:
            return
    raise BackendError(f"process {record.pid} still runs {KILL_TIMEOUT:g} s after SIGKILL")


def _signal(record: Record | None, number: signal.Signals) -> bool:
    """Signal every process of the run, also those started meanwhile; False if there is none."""
    signalled: set[int] = set()
    while record is not None and (news := _members(record) - signalled):
        with ExitStack() as opened:
            for pid in news:
                _tell(_open_pidfd(pid, opened), number)
        signalled |= news
    return bool(signalled)


def _tell(fd: int | None, number: signal.Signals) -> None:
    if fd is not None:
        with suppress(ProcessLookupError, PermissionError):
            signal.pidfd_send_signal(fd, number)


def _open_pidfd(pid: int, opened: ExitStack) -> int | None:
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    opened.callback(os.close, fd)
    return fd


def _wait_for_any(fds: list[int], timeout: float | None) -> list[int]:
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return [fd for fd, _ in poll.poll(None if timeout is None else min(timeout * 1000, LONGEST_POLL))]


def trim(log: Path) -> None:
    """Cut a log that has become too long; what its engine prints in that moment may be lost."""
    with suppress(OSError), os.fdopen(open_regular(log, os.O_RDWR | os.O_NOFOLLOW), "r+b") as file:
        size = os.fstat(file.fileno()).st_size
        if size > LOG_BYTES:
            file.seek(size - KEPT_BYTES)
            file.readline()  # a part of a line
            kept = file.read()
            file.truncate(0)  # whoever appends goes on behind what is put there
            file.seek(0)
            file.write(kept)


def _text(line: bytes) -> str:
    return line.decode("utf-8", "replace").rstrip("\r\n")
