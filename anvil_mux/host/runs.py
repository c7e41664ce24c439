"""One run of a service as processes: its record in a file, and which processes of this machine are its own.

The record says which process was started: its id, the moment it started (field 22 of /proc/PID/stat) and the
boot it started in. A process that only has the same id is another process, and is left alone.

Of a run are also the workers of its engine, which hold the GPU as well as its front does, may outlive it, and
may begin sessions of their own. The process that was started is a launcher (launcher.py): as long as it runs
they are its descendants, also those whose parents have ended. They are known, too, by the mark that they have
inherited in their environment, and by where they print: a program that sets its title overwrites its
environment.

The file is the second of three witnesses. What was started or adopted is known from memory first. Where a
file is missing or damaged, the processes themselves tell: their environment has a copy of the record
(``ENGINE``), and their output goes to the log of their service. Only where none of the three knows of a run
there is none.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import signal
import threading
import time
from collections.abc import Container, Iterable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from anvil_mux.errors import BackendError, is_shortage
from anvil_mux.host.starter import readable
from anvil_mux.protocol import foreign

log = logging.getLogger(__name__)

OURS = "ANVIL_"
"""The beginning of the names of our variables, which hold API keys and settings; engines get none of them."""
MARK = f"{OURS}MUX_RUN"
ENGINE = f"{OURS}MUX_ENGINE"
"""The variable of an engine with a copy of its record."""
KILL_TIMEOUT = 10.0
"""Seconds that the kernel may take over SIGKILL."""
EXEC_SECONDS, EXEC_PAUSE = 0.2, 0.001
"""Seconds that the kernel may take to write the environment of a process, and between two looks at it."""
RECORD_BYTES = 4096
"""The room that a record has, whatever is in it."""


@dataclass(frozen=True, slots=True)
class RunRecord:
    """One run of a service, as its file tells a later anvil-mux."""

    pid: int
    """The launcher of the engine (launcher.py), and its session; 0: it was about to be started."""
    started: int
    boot: str
    url: str
    mark: str
    """The value of MARK in its environment."""
    described: Mapping[str, str] = field(default_factory=dict)
    """Part of the description that it was started by -> a digest of it; empty: they are not known."""
    project: str = ""
    backend: str = ""
    gpus: tuple[str, ...] | None = None
    """The ids of the GPUs that it was started on; None: not known."""
    state: str = ""
    """The state folder of the anvil-mux that started it, where its log is; "": not known."""
    machine: str = ""
    """The value of MACHINE there."""
    output: str = ""
    """The pipe to which its processes print, as /proc names it; "": not known."""
    containers_by: str = ""
    """The program that made a container of it, labelled with MARK, such as docker; "": it is none."""

    @property
    def text(self) -> str:
        """The record as JSON, for its file and for ENGINE."""
        return json.dumps(asdict(self))

    def is_alive(self) -> bool:
        """Whether the process that was started has not ended."""
        stat = stat_of(self.pid)
        return stat is not None and stat.started == self.started and not stat.has_ended

    def members(self, pids: Iterable[int] | None = None) -> set[int]:
        """The processes of the run, among ``pids`` (None: all), that have not ended.

        They are those with its mark, those that print to its log, the descendants of the process that was
        started, and the others of its session: an engine may start some without its environment. Once the
        process that gave the session its number has ended, the number may be that of another session. Then
        those without a mark count only where their environment is blank, as it is for whoever has written a
        title over it.
        """
        stats = {pid: each for pid in (process_ids() if pids is None else pids) if (each := stat_of(pid))}
        since = {
            pid: each for pid, each in stats.items() if each.started >= self.started and not each.has_ended
        }
        marked = self._marked(since) | self._printing(since)
        session = {pid for pid, each in since.items() if each.session == self.pid}
        leader = stat_of(self.pid)
        if leader is not None and leader.started != self.started:
            return marked
        if leader is None and not marked & session:
            session = {
                pid for pid in session if (words := _variables(pid)) is not None and not words.strip(b"\0")
            }
        descended = {pid for pid in since if self._descends(pid, stats)} if leader else set()
        return marked | session | descended

    def end(self, grace: float) -> None:
        """Return when no process of the run is left: SIGTERM, ``grace`` seconds, SIGKILL."""
        seen: dict[int, int] = {}  # an orphan is no descendant any more
        for number, patience in ((signal.SIGTERM, grace), (signal.SIGKILL, KILL_TIMEOUT)):
            deadline = time.monotonic() + patience
            signalled: set[int] = set()
            while members := self._members_and(seen):
                left = deadline - time.monotonic()
                with ExitStack() as opened:
                    fds = {pid: open_pidfd(pid, opened) for pid in members}
                    for pid in members - signalled:
                        _tell(fds[pid], number)
                        _tell(fds[pid], signal.SIGCONT)  # who is frozen hears no other signal
                    signalled |= members
                    if left <= 0:
                        break
                    # The sooner of an end and a second, since a member may start others meanwhile.
                    readable([fd for fd in fds.values() if fd is not None], min(left, 1.0))
            else:
                return
        raise BackendError(f"process {self.pid} still runs {KILL_TIMEOUT:g} s after SIGKILL")

    def _members_and(self, seen: dict[int, int]) -> set[int]:
        """Return the members that have not ended, also those ``seen`` before: id -> start; add to these."""
        for pid in self.members():
            if stat := stat_of(pid):
                seen.setdefault(pid, stat.started)
        return {
            pid
            for pid, started in seen.items()
            if (stat := stat_of(pid)) and stat.started == started and not stat.has_ended
        }

    def send(self, number: signal.Signals) -> bool:
        """Signal every process of the run, also those started meanwhile; False if there is none."""
        signalled: set[int] = set()
        while news := self.members() - signalled:
            with ExitStack() as opened:
                for pid in news:
                    _tell(open_pidfd(pid, opened), number)
            signalled |= news
        return bool(signalled)

    def begun(self) -> RunRecord | None:
        """The same of a run that was about to be started, if it came to that."""
        marked = [(stat.started, pid) for pid in self._marked(process_ids()) if (stat := stat_of(pid))]
        if not marked:
            return None
        started, pid = min(marked)  # its workers began later
        return replace(self, pid=pid, started=started)

    def _printing(self, pids: Iterable[int]) -> set[int]:
        """Return the processes whose output goes to the log of the run, or to its launcher's pipe."""
        places = {self.output} - {""}
        if self.state and self.backend:
            places.add(str(Path(self.state, f"{self.backend}.log")))
        return {pid for pid in pids if output_of(pid) in places} if places else set()

    def _descends(self, pid: int, stats: Mapping[int, ProcessStat]) -> bool:
        """Return whether a process descends from the one that was started, which still has its id."""
        passed = {0}
        while pid not in passed:
            if pid == self.pid:
                return True
            passed.add(pid)
            stat = stats.get(pid) or stat_of(pid)
            pid = stat.parent if stat else 0
        return False

    def _marked(self, pids: Iterable[int]) -> set[int]:
        """The processes that inherited the run's mark."""
        mark = f"{MARK}={self.mark}".encode()
        return {pid for pid in pids if mark in (_variables(pid) or b"").split(b"\0")}


# Records


class RunRecords:
    """The runs of services in one state folder: in memory, and in ``NAME.json``, written in place, in room
    that was kept for it.

    One that is dropped leaves its room as ``NAME.spare``, so that a disk that has become full keeps no
    service from being started in the place of another. Any thread, one at a time for each service.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        # Held while a record is written: what is spare room to one must not be a record by then.
        self._writing = threading.Lock()
        # Entries are set and read as a whole, by any thread.
        self._known: dict[str, RunRecord | None] = {}
        """Service -> its run, None if it has none; missing: that was never determined."""
        self.problem = ""
        """Why the last record could not be written, as a reason why no service can be started."""

    def read(self, name: str) -> RunRecord | None:
        """Return the run of a service, also one that was about to be started; None: there is none."""
        return self.read_all([name]).get(name)

    def read_all(self, names: Iterable[str]) -> dict[str, RunRecord]:
        """Return the runs of those services that have one; processes are read once for all of them."""
        names = list(names)
        unknown = [name for name in names if name not in self._known]
        lost = {name: None for name in unknown if not self._learn(name)}
        if lost:
            runs = {run.backend: run for run in marked_runs() if self._is_here(run)}
            self._known.update({name: runs.get(name) for name in lost})
            for name in lost.keys() - runs.keys():
                self._known[name] = self._by_log(name)
        found = {name: self._known.get(name) for name in names}
        begun = {name: run and (run if run.pid else run.begun()) for name, run in found.items()}
        return {name: run for name, run in begun.items() if run}

    def known(self, name: str) -> RunRecord | None:
        """Return the run of a service as far as it is known from memory, though it may have ended."""
        return self._known.get(name)

    def adopt(self, name: str, record: RunRecord) -> None:
        """Take a run as that of a service, whether its file can be written or not."""
        self._known[name] = record

    def strays(self, names: Container[str]) -> list[RunRecord]:
        """List the runs of this folder whose services are not among ``names``."""
        return [run for run in marked_runs() if self._is_here(run) and run.backend not in names]

    def _is_here(self, run: RunRecord) -> bool:
        return run.state == str(self._folder)

    def _learn(self, name: str) -> bool:
        """Learn the run of a service from its file; False if that does not tell."""
        try:
            record = self._read(self._file(name))
        except OSError as error:
            _check_shortage(error)
            return False
        except (ValueError, TypeError):
            log.warning("%s is damaged: the processes of this machine are read instead", self._file(name))
            return False
        self._known[name] = record if record.boot == boot() else None
        return True

    def _read(self, file: Path) -> RunRecord:
        """Return the record in a file. ValueError, also at a second look: it is written in place."""
        try:
            return read_record(file.read_text())
        except ValueError:
            return read_record(file.read_text())

    def _by_log(self, name: str) -> RunRecord | None:
        """Return the run whose output goes to the log of a service, though its environment is lost."""
        file = str(self._folder / f"{name}.log")
        writers = [
            (stat.started, pid, stat)
            for pid in process_ids()
            if output_of(pid) == file and (stat := stat_of(pid))
        ]
        living = [each for each in writers if not each[2].has_ended]
        if not living:
            return None
        _, pid, first = min(living)
        leader = stat_of(first.session)
        began = leader.started if leader else first.started
        return RunRecord(first.session or pid, began, boot(), "", secrets.token_hex(8), backend=name)

    def write(self, name: str, record: RunRecord) -> None:
        """Write down the run of a service; BackendError if that cannot be."""
        with self._writing:
            self._write(name, record.text)
        self._known[name] = record

    def _write(self, name: str, text: str) -> None:
        file, spare = self._file(name), self._spare(name)
        if os.path.exists(file):
            self._fill(file, text)
            return
        try:
            self._fill(spare, text)
        except BackendError:
            if not self._take_room(spare):
                raise
            self._fill(spare, text)
        try:
            os.replace(spare, file)
        except OSError as error:
            raise self._unwritable(file, error) from None

    def drop(self, name: str) -> None:
        """Forget a run, where the disk may be written to; its room is kept for the next one."""
        self._known[name] = None
        with self._writing, suppress(OSError):
            os.replace(self._file(name), self._spare(name))

    def has_room(self, name: str) -> bool:
        """Whether a service has a record, or room for one, as each has that is a process."""
        return self._file(name).exists() or self._spare(name).exists()

    def make_room(self, names: Iterable[str]) -> None:
        """Have room on the disk for the record of each service, before another is evicted for it."""
        for name in names:
            with self._writing:
                if not self._file(name).exists():
                    self._fill(self._spare(name), "")

    def _take_room(self, spare: Path) -> bool:
        """Take the room of a service that does not run: who was stopped for another leaves it its own."""
        with suppress(OSError):
            for other in self._folder.glob("*.spare"):
                if other != spare and other.stat().st_size >= RECORD_BYTES:
                    os.replace(other, spare)
                    return True
        return False

    def _fill(self, file: Path, text: str) -> None:
        """Write a record in place, which takes no new room and is whole even if we are killed."""
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
            try:
                size = os.pwrite(descriptor, text.encode().ljust(RECORD_BYTES), 0)
                os.ftruncate(descriptor, size)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise self._unwritable(file, error) from None
        self.problem = ""

    def _unwritable(self, file: Path, error: OSError) -> BackendError:
        self.problem = f"services cannot be started: {self._folder} cannot be written: {error.strerror}"
        return BackendError(f"service {file.stem}: cannot write its record: {error}")

    def _file(self, name: str) -> Path:
        return self._folder / f"{name}.json"

    def _spare(self, name: str) -> Path:
        return self._folder / f"{name}.spare"


def read_record(text: str) -> RunRecord:
    """Return the record that a JSON text is; ValueError if it is not one."""
    found = foreign.read_object(text) or {}
    known = {name: value for name, value in found.items() if name in foreign.fields_of(RunRecord)}
    try:
        record = RunRecord(**foreign.some_of(RunRecord, known))
    except TypeError as error:
        raise ValueError(f"it is not a record: {error}") from None
    if record.pid < 0 or not record.mark:
        raise ValueError("it names no process")
    return record


def marked_runs() -> list[RunRecord]:
    """List the runs of whatever anvil-mux whose processes carry a copy of their record.

    They are those of this user; root reads the processes of all. The process of a run is the leader of its
    session, or where that has ended the oldest that carries the copy.
    """
    oldest: dict[str, tuple[int, int, ProcessStat, RunRecord]] = {}
    for pid in process_ids():
        stat = stat_of(pid)
        if stat is None or stat.has_ended or pid == os.getpid():
            continue
        text = _variable(pid, ENGINE)
        if not text:
            continue
        with suppress(ValueError):
            record = read_record(text)
            found = stat.started, pid, stat, record
            oldest[record.mark] = min(found, oldest.get(record.mark, found), key=lambda each: each[:2])
    runs = []
    for started, pid, stat, record in oldest.values():
        leader = stat_of(stat.session)
        first = (stat.session, leader.started) if leader else (pid, started)
        runs.append(replace(record, pid=first[0], started=first[1], boot=boot()))
    return runs


# Processes


def process_ids() -> list[int]:
    """List the processes of this machine."""
    return [int(entry) for entry in os.listdir("/proc") if entry.isdecimal()]


def _variables(pid: int) -> bytes | None:
    """The environment that a process was started with; None: it cannot be read."""
    begins, until = True, time.monotonic() + EXEC_SECONDS
    while True:
        try:
            words = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError as error:
            _check_shortage(error)
            return None
        if words or not begins or time.monotonic() > until:
            return words
        if begins := _begins(pid):  # else it may have just begun, and is asked once more
            time.sleep(EXEC_PAUSE)


def _begins(pid: int) -> bool:
    """Return whether a process begins to run a program just now, whose words the kernel still writes.

    Whoever started it is told before that. A process of the kernel has no program.
    """
    with suppress(OSError):
        return bool(os.readlink(f"/proc/{pid}/exe")) and not Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def _variable(pid: int, name: str) -> str:
    """Return a variable that a process was started with; "": it has none, or it cannot be read."""
    start = f"{name}=".encode()
    words = (_variables(pid) or b"").split(b"\0")
    found = next((word for word in words if word.startswith(start)), start)
    return found.removeprefix(start).decode(errors="replace")


def output_of(pid: int, descriptor: int = 1) -> str:
    """Return the file or the pipe to which a process prints; "" if that cannot be read."""
    try:
        return os.readlink(f"/proc/{pid}/fd/{descriptor}").removesuffix(" (deleted)")
    except OSError as error:
        _check_shortage(error)
        return ""


class ProcessStat(NamedTuple):
    """A process, as the kernel tells it in /proc/PID/stat."""

    state: str
    """That of its first thread."""
    session: int
    started: int
    parent: int = 0
    threads: int = 1

    @property
    def has_ended(self) -> bool:
        """Whether no thread of it is left; its first one may end before the others."""
        return self.state in "ZX" and self.threads <= 1

    @property
    def is_stopped(self) -> bool:
        """Whether a signal or a debugger holds it."""
        return self.state in "Tt"


def stat_of(pid: int, proc: Path = Path("/proc")) -> ProcessStat | None:
    """The kernel's account of a process; None: there is none."""
    try:
        text = (proc / str(pid) / "stat").read_text(errors="replace")
    except OSError as error:
        _check_shortage(error)
        return None
    # The name in parentheses may hold anything, so fields are counted from its end; the state is field 3.
    fields = text[text.rindex(")") + 2 :].split()
    return ProcessStat(fields[0], int(fields[3]), int(fields[19]), int(fields[1]), int(fields[17]))


def _check_shortage(error: OSError) -> None:
    """BackendError if something could not be read for want of files here: it may be there."""
    if is_shortage(error):
        raise BackendError(f"what runs here cannot be looked at: {error.strerror} (see ulimit -n)") from None


def boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _tell(fd: int | None, number: signal.Signals) -> None:
    if fd is not None:
        with suppress(ProcessLookupError, PermissionError):
            signal.pidfd_send_signal(fd, number)


def open_pidfd(pid: int, opened: ExitStack) -> int | None:
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    opened.callback(os.close, fd)
    return fd
