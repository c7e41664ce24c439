"""Services as real child processes; gates are FIFOs, ends are awaited through `watch`."""

import contextlib
import errno
import json
import os
import queue
import select
import shlex
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from anvil_mux.config.config import Backend, Config
from anvil_mux.config.service import Service
from anvil_mux.errors import BackendError, LoadError
from anvil_mux.host import processes
from anvil_mux.host.launcher import BoundedLog
from anvil_mux.host.processes import ProcessRuntime
from anvil_mux.host.starter import Detached, OwnChildren
from tests.running import seen

PATIENCE = 30.0
FOREVER = "exec sleep 1000"


def shell(script: str, name: str = "a", **special: Any) -> Backend:
    service = Service(command=("sh", "-c", script), **special.pop("service", {}))
    return Backend(name=name, model=name, service=service, **{"stop_timeout": PATIENCE, **special})


def command(*words: str, **service: Any) -> Backend:
    return Backend(name="a", model="a", service=Service(command=words, **service), stop_timeout=PATIENCE)


class House:
    """A folder for state and gates, and runtimes whose engines end with the test."""

    def __init__(self, folder: Path, starter: type[OwnChildren | Detached] = OwnChildren) -> None:
        self.folder = folder
        self.starter = starter
        self.deaths: queue.Queue[str] = queue.Queue()
        self._open: list[tuple[ProcessRuntime, tuple[Backend, ...], threading.Thread]] = []

    def runtime(
        self, *backends: Backend, address: str = "127.0.0.1", state: str = "state", project: str = "p"
    ) -> ProcessRuntime:
        config = Config(backends=backends, project=project, files=(str(self.folder / "compose.yaml"),))
        environ = {**os.environ, "XDG_STATE_HOME": str(self.folder / state)}
        runtime = ProcessRuntime(config, environ=environ, address=address, starter=self.starter())
        watcher = threading.Thread(target=runtime.watch, args=(lambda _, name: self.deaths.put(name),))
        watcher.start()
        self._open.append((runtime, backends, watcher))
        return runtime

    def started(self, backend: Backend) -> ProcessRuntime:
        """A runtime in which it was started."""
        runtime = self.runtime(backend)
        runtime.start(backend)
        return runtime

    def ended(self, backend: Backend) -> ProcessRuntime:
        """The same, once it has ended by itself."""
        runtime = self.started(backend)
        assert self.died() == backend.name
        return runtime

    def printed(self, backend: Backend, address: str) -> tuple[str, list[str]]:
        """The place (address and port) of a service that ends by itself, and what it printed."""
        runtime = self.runtime(backend, address=address)
        url = runtime.start(backend)
        assert self.died() == backend.name
        return url.removeprefix("http://"), runtime.log_tail(backend, 1000)

    def died(self) -> str:
        return self.deaths.get(timeout=PATIENCE)

    def file(self, name: str) -> Path:
        return self.folder / "state" / "anvil-mux" / "p" / name

    def pid(self, name: str = "a") -> int:
        return int(json.loads(self.file(f"{name}.json").read_text())["pid"])

    def gate(self, name: str = "gate") -> Path:
        """A FIFO: who opens it for reading waits until the other side opens it for writing."""
        path = self.folder / name
        os.mkfifo(path)
        return path

    def close(self) -> None:
        for runtime, backends, watcher in self._open:
            for backend in backends:
                runtime.stop(Backend(name=backend.name, model="", stop_timeout=0))
            runtime.close()
            watcher.join(PATIENCE)
            assert not watcher.is_alive()


@pytest.fixture
def house(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[House]:
    house = House(tmp_path, getattr(request, "param", OwnChildren))
    try:
        yield house
    finally:
        house.close()


@pytest.fixture
def bound() -> Iterator[socket.socket]:
    """A socket that has a port which engines may have too, and other processes may not."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held


either_parent = pytest.mark.parametrize("house", [OwnChildren, Detached], indirect=True)
"""Whether services are children of ours or detached."""


def running(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


def inhabitants(folder: Path) -> list[int]:
    """The processes that run in this folder."""
    found = []
    for entry in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if Path(f"/proc/{entry}/cwd").readlink() == folder and running(int(entry)):
                found.append(int(entry))
    return found


def gone(pid: int) -> None:
    """Waits until the process has ended."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    assert poll.poll(PATIENCE * 1000), f"{pid} runs on"
    os.close(fd)


def test_a_service_gets_a_free_port_its_environment_and_its_folder(house):
    backend = shell('echo "$PORT $GREETING $PWD" $$PORT', service={"environment": (("GREETING", "hi"),)})
    place, lines = house.printed(backend, "127.0.0.1")
    address, _, port = place.partition(":")
    assert address == "127.0.0.1"
    assert lines[0].startswith(f"{port} hi {house.folder}")


def test_address_and_port_stand_in_the_command_and_names_that_begin_like_them_are_left_alone(house):
    words = ("echo", "$HOST:${PORT}", "x${PORT}y", "$PORT", "$HOSTNAME", "$PORTS", "${HOST}.")
    place, lines = house.printed(command(*words), "127.0.0.2")
    port = place.removeprefix("127.0.0.2:")
    assert lines == [f"{place} x{port}y {port} $HOSTNAME $PORTS 127.0.0.2."]


def test_a_declared_port_is_used(house, bound):
    backend = shell(FOREVER, port=bound.getsockname()[1])
    assert house.runtime(backend).start(backend) == f"http://127.0.0.1:{backend.port}"


@pytest.mark.parametrize(("named", "told"), [((), "127.0.0.2"), ((("HOST", "0.0.0.0"),), "0.0.0.0")])
def test_a_service_is_told_where_to_listen_unless_it_names_its_own_host(house, named, told):
    place, lines = house.printed(command("env", environment=named), "127.0.0.2")
    variables = dict(line.split("=", 1) for line in lines if "=" in line)
    assert variables["HOST"] == told
    assert place == f"127.0.0.2:{variables['PORT']}"


def test_an_engine_at_another_address_is_started_anew_where_it_is_looked_for(house):
    backend = shell(FOREVER)
    first = house.started(backend)
    before = house.pid()
    first.close()
    second = house.runtime(backend, address="127.0.0.2")
    assert second.start(backend).startswith("http://127.0.0.2:")
    assert not running(before)


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("127.0.0.1", "a cannot have port {} .*another program"),
        ("203.0.113.1", r"a cannot listen at 203\.0\.113\.1: that is no address"),
    ],
)
def test_a_place_that_cannot_be_had_is_said_before_anything_starts(house, bound, address, why):
    bound.listen()
    backend = shell(FOREVER, port=bound.getsockname()[1])
    with pytest.raises(LoadError, match=why.format(backend.port)):
        house.runtime(backend, address=address).start(backend)
    assert not house.file("a.json").exists()


@pytest.mark.parametrize(
    ("says", "lost"),
    [
        ("OSError: [Errno 98] Address already in use", True),
        ("error while attempting to bind on address ('127.0.0.1', 1): address already in use", True),
        ("srv start: couldn't bind HTTP server socket, hostname: 127.0.0.1, port: 1", True),
        ("Error: listen EADDRINUSE", True),
        ("no such weights", False),
    ],
)
def test_an_engine_that_says_that_its_chosen_port_is_taken_has_lost_it(house, says, lost):
    backend = shell(f'echo "{says}"; exit 1')
    assert house.ended(backend).lost_its_port(backend) == lost


def test_two_programs_choose_no_port_twice_though_no_engine_listens_yet(house, tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "FIRST_PORT", processes.LAST_PORT)
    monkeypatch.setattr(processes, "KERNELS_PORTS", tmp_path / "range")
    (tmp_path / "range").write_text("32768\t60999\n")
    first, second = shell(FOREVER, "a"), shell(FOREVER, "b")
    programs = [house.runtime(first), house.runtime(second)]
    assert programs[0].start(first) != programs[1].start(second)


def test_a_declared_port_is_not_exchanged_for_another(house, bound):
    backend = shell('echo "address already in use"; exit 1', port=bound.getsockname()[1])
    assert not house.ended(backend).lost_its_port(backend)


def test_an_engine_that_runs_has_its_port_whatever_it_says(house):
    backend = shell(f'echo "address already in use"; echo > {house.gate()}; {FOREVER}')
    runtime = house.started(backend)
    assert (house.folder / "gate").read_text() == "\n"
    assert seen(lambda: runtime.log_tail(backend), bool) == ["address already in use"]
    assert not runtime.lost_its_port(backend)


def test_nothing_of_an_earlier_run_is_shown_when_the_port_is_taken(house, bound):
    backend = shell("echo of the first run", port=bound.getsockname()[1])
    runtime = house.ended(backend)
    assert runtime.log_tail(backend) == ["of the first run"]
    bound.listen()
    with pytest.raises(LoadError):
        runtime.start(backend)
    assert runtime.log_tail(backend) == []


def test_a_program_with_a_slash_is_found_in_the_services_folder(house):
    folder = house.folder / "engines"
    folder.mkdir()
    (folder / "engine").write_text("#!/bin/sh\necho from $PWD\n")
    (folder / "engine").chmod(0o755)
    backend = command("./engine", working_dir=str(folder))
    assert house.ended(backend).log_tail(backend) == [f"from {folder}"]


@either_parent
def test_a_program_that_is_missing_and_a_service_without_a_command_are_load_errors(house):
    for missing, why in (
        (command("no-such-engine"), "service a cannot be started: .*no-such-engine"),
        (command("./no", working_dir="/tmp"), "service a cannot be started: .*'/tmp/./no'"),
        (command(), "service a has no command"),
    ):
        with pytest.raises(LoadError, match=why):
            house.runtime(missing).start(missing)


def test_both_streams_are_logged_and_each_start_begins_a_new_log(house):
    backend = shell("echo out; echo err >&2; echo run $PORT")
    runtime = house.runtime(backend)
    for _ in range(2):
        port = runtime.start(backend).rpartition(":")[2]
        house.died()
        assert runtime.log_tail(backend) == ["out", "err", f"run {port}"]
    assert runtime.log_tail(backend, 1) == [f"run {port}"]


@either_parent
def test_a_service_that_cannot_be_looked_at_has_not_ended(house, monkeypatch):
    backend = shell(FOREVER)
    runtime = house.started(backend)
    pauses = queue.Queue[str]()

    def none_left(*_: object, **__: object) -> None:
        pauses.put("looked")
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(processes, "UNSEEN_SECONDS", 0.01)
        patched.setattr(os, "pidfd_open", none_left)
        runtime._wake()
        for _ in range(3):
            pauses.get(timeout=PATIENCE)
        patched.setattr(Path, "read_text", none_left)
        with pytest.raises(BackendError, match="cannot be looked at: Too many open files"):
            runtime.ended(backend)
    assert runtime.ended(backend) is None
    assert house.deaths.empty()
    os.kill(runtime._records.read("a").pid, signal.SIGKILL)
    assert house.died() == "a"


def test_how_a_service_ended_is_told(house):
    backend = shell("exit 3")
    assert house.runtime(backend).ended(backend) == "does not run"
    assert house.ended(backend).ended(backend) == "exited with code 3"


@either_parent
def test_a_kill_from_outside_is_seen_and_told(house):
    backend = shell(FOREVER)
    runtime = house.started(backend)
    assert runtime.ended(backend) is None
    os.kill(house.pid(), signal.SIGKILL)
    assert house.died() == "a"
    assert runtime.ended(backend) == "was killed by SIGKILL"
    assert runtime.running() == {}


def test_a_second_start_leaves_a_running_service_alone_unless_its_command_changed(house):
    backend = shell(FOREVER)
    runtime = house.runtime(backend)
    url = runtime.start(backend)
    pid = house.pid()
    assert (runtime.start(backend), house.pid()) == (url, pid)
    runtime.start(shell("echo new; " + FOREVER))
    assert not running(pid)
    assert running(house.pid())


def test_what_does_not_run_neither_differs_nor_is_frozen_nor_has_a_log(house):
    backend = shell(FOREVER)
    runtime = house.runtime(backend)
    runtime.stop(backend)
    assert runtime.differs(backend) == ""
    assert not runtime.is_frozen(backend)
    assert runtime.log_tail(backend) == [*runtime.follow_log(backend)] == []
    for call in (runtime.pause, runtime.resume):
        with pytest.raises(BackendError, match="service a does not run"):
            call(backend)


@either_parent
def test_a_service_that_ignores_sigterm_is_killed_after_its_grace(house):
    gate = house.gate()
    backend = shell(f"trap '' TERM; echo up > {gate}; while :; do sleep 1000; done", stop_timeout=0.2)
    runtime = house.started(backend)
    assert gate.read_text() == "up\n"
    pid = house.pid()
    runtime.stop(backend)
    assert not running(pid)
    assert runtime.ended(backend) == "was killed by SIGKILL"


def test_a_service_that_handles_sigterm_has_its_grace(house):
    gate = house.gate()
    program = f"""if True:
        import signal
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        open({str(gate)!r}, "w").write("up")
        signal.sigwait([signal.SIGTERM])
        print("bye")
    """
    backend = replace(shell(""), service=Service(command=(sys.executable, "-c", program)))
    runtime = house.started(backend)
    gate.read_text()
    runtime.stop(backend)
    assert runtime.log_tail(backend) == ["bye"]
    assert runtime.ended(backend) == "exited with code 0"


@either_parent
def test_workers_are_gone_when_their_engine_was_stopped_and_before_its_death_is_told(house):
    gate = house.gate()
    deaf = shell(f"(trap '' TERM; exec sleep 1000) & echo $! > {gate}; exec sleep 1000", stop_timeout=0.2)
    runtime = house.started(deaf)
    worker = int(gate.read_text())
    runtime.stop(deaf)
    gone(worker)
    runtime.start(shell(f"sleep 1000 & echo $! > {gate}; exit 1"))
    worker = int(gate.read_text())
    assert house.died() == "a"
    assert not running(worker)


SESSION = "import os; os.setsid()"
TITLED = """
import ctypes
environ = ctypes.POINTER(ctypes.c_void_p).in_dll(ctypes.CDLL(None), "environ")
ctypes.memset(environ[0], 0, len(open("/proc/self/environ", "rb").read()))
"""
"""A program that writes a title over its environment, as vLLM's workers do."""


def worker(script: str, gate: Path) -> str:
    """A command for the shell that starts a worker; it tells its process id when the script was run."""
    told = f"import os; open({str(gate)!r}, 'w').write(str(os.getpid()))"
    rest = f"{script}\n{told}\nimport time; time.sleep(1000)"
    return f"{shlex.quote(sys.executable)} -c {shlex.quote(rest)} &"


@either_parent
@pytest.mark.parametrize("end", ["stop", "death"])
@pytest.mark.parametrize("script", [SESSION, TITLED])
def test_workers_are_of_the_run_wherever_they_went(house, script, end):
    gate, exit = house.gate(), house.gate("exit")
    backend = shell(f"{worker(script, gate)} read line < {exit}; exit 1")
    runtime = house.started(backend)
    pid = int(gate.read_text())
    assert pid in runtime.pids(backend)
    assert runtime.owner(pid) == "a"
    if end == "stop":
        runtime.stop(backend)
    else:
        exit.write_text("end\n")
        assert house.died() == "a"
    assert not running(pid)


def test_a_worker_without_its_environment_is_of_the_session(house):
    gate = house.gate()
    backend = shell(f"env -i sh -c 'echo $$ > {gate}; {FOREVER}' & {FOREVER}")
    runtime = house.started(backend)
    pid = int(gate.read_text())
    assert pid in runtime.pids(backend)
    runtime.stop(backend)
    assert not running(pid)


BLANKED = """
import ctypes, os, time
if os.fork() == 0:
    os.setsid()
    fields = open("/proc/self/stat").read().rpartition(")")[2].split()
    start, end = int(fields[47]), int(fields[48])
    ctypes.memset(start, 0, end - start)
    %s
    open("gate", "w").write(str(os.getpid()))
time.sleep(1000)
"""


def blanked(house: House, more: str = "pass") -> tuple[ProcessRuntime, Backend, int]:
    """Start an engine whose worker has a session of its own and a blank environment."""
    gate = house.gate()
    backend = command(sys.executable, "-c", BLANKED % more)
    return house.started(backend), backend, int(gate.read_text())


SILENT = "os.dup2(os.open('/dev/null', os.O_WRONLY), 1)"
ORPHANED = f"{SILENT}; os.fork() and os._exit(0); os.setsid()"
"""It prints elsewhere, and its parent has ended: nothing of its own tells whose it is."""


@pytest.mark.parametrize("more", ["pass", SILENT, ORPHANED])
def test_a_worker_with_a_blank_environment_is_stopped(house, more):
    runtime, backend, worker = blanked(house, more)
    assert worker in runtime.pids(backend)
    runtime.stop(backend)
    assert not running(worker)


def test_a_worker_that_prints_to_the_log_ends_with_its_engine(house):
    *_, worker = blanked(house)
    os.kill(house.pid(), signal.SIGKILL)
    assert house.died() == "a"
    assert not running(worker)


@either_parent
def test_an_orphaned_worker_is_gone_before_the_end_of_its_engine_is_told(house):
    runtime, _, worker = blanked(house, ORPHANED)
    [engine] = set(runtime.pids(shell(""))) - {worker}
    os.kill(engine, signal.SIGTERM)
    assert house.died() == "a"
    assert not running(worker)


def test_an_engine_whose_first_thread_ended_still_runs(house):
    gate = house.gate()
    script = """
import ctypes, os, threading, time
def serve():
    while "Z" not in open(f"/proc/self/task/{os.getpid()}/stat").read().rpartition(")")[2]:
        time.sleep(0.01)
    open("gate", "w").write("up")
    time.sleep(1000)
threading.Thread(target=serve).start()
ctypes.CDLL(None).pthread_exit(None)
"""
    backend = command(sys.executable, "-c", script)
    runtime = house.started(backend)
    assert gate.read_text() == "up"
    assert runtime.ended(backend) is None
    assert list(runtime.running()) == ["a"]
    runtime.kill(backend)
    assert runtime.pids(backend) == []


def test_the_container_of_a_run_command_is_removed_with_it(house):
    gate, docker, calls = house.gate(), house.folder / "docker", house.folder / "calls"
    docker.write_text(
        f'#!/bin/sh\necho "$@" >>{calls}\n'
        "case $1 in run) echo up >gate; exec sleep 1000;; ps) echo id1;; esac\n"
    )
    docker.chmod(0o755)
    backend = command(str(docker), "run", "--rm", "image")
    runtime = house.started(backend)
    gate.read_text()
    runtime.kill(backend)
    run, *others = calls.read_text().splitlines()
    _, _, label, *rest = run.split()
    assert rest == ["--rm", "image"]
    assert others == [f"ps -aq --no-trunc --filter label={label}", "rm --force id1"]


def test_none_of_our_own_variables_reaches_an_engine_unless_it_is_named(house, monkeypatch):
    monkeypatch.setenv("ANVIL_API_KEYS", "secret")
    monkeypatch.setenv("ANVIL_DRAIN_TIMEOUT", "9")
    backend = shell("env", service={"environment": (("ANVIL_NAMED", "1"),)})
    runtime = house.ended(backend)
    names = {line.partition("=")[0] for line in runtime.log_tail(backend, 1000)}
    ours = {"ANVIL_NAMED", "ANVIL_MUX_RUN", "ANVIL_MUX_ENGINE"}
    assert {name for name in names if name.startswith("ANVIL_")} == ours
    assert "PATH" in names


def test_a_stop_returns_when_the_service_is_gone_and_is_no_death(house):
    first, second = shell(FOREVER), shell(FOREVER, name="b")
    runtime = house.runtime(first, second)
    runtime.start(first)
    runtime.start(second)
    pid = house.pid()
    runtime.stop(first)
    assert not running(pid)
    assert runtime.running().keys() == {"b"}
    assert not house.file("a.json").exists()
    os.kill(house.pid("b"), signal.SIGKILL)
    assert house.died() == "b"
    assert house.deaths.empty()


def test_the_log_of_an_engine_that_runs_is_cut_and_goes_on(house, monkeypatch):
    gate = house.gate()
    backend = shell(f"seq 1000; read line < {gate}; echo more")
    runtime = house.started(backend)
    seen(lambda: runtime.log_tail(backend)[-1:], lambda last: last == ["1000"])
    followed = runtime.follow_log(backend)
    assert next(followed) == "901"
    with open(house.file("a.log"), "ab+") as log:
        BoundedLog(log.fileno(), 1000, 100).write(b"")
    kept = runtime.log_tail(backend, 1000)
    assert kept == [str(number) for number in range(1001 - len(kept), 1001)]
    assert house.file("a.log").stat().st_size <= 100
    lines = runtime.follow_log(backend)
    gate.write_text("go\n")
    assert list(lines)[-2:] == list(followed)[-2:] == ["1000", "more"]


def test_a_full_disk_is_a_problem_that_is_reported(house, monkeypatch):
    runtime = house.started(shell(FOREVER))
    assert runtime.problem() == ""
    monkeypatch.setattr(processes, "free_bytes", lambda folder: 1 << 20)
    assert "is full, 1 MiB are free: what engines print is dropped" in runtime.problem()


def test_an_engine_that_fails_on_a_full_disk_ends_with_that_reason(house, monkeypatch):
    backend = shell("exit 3")
    runtime = house.started(backend)
    monkeypatch.setattr(processes, "free_bytes", lambda folder: 1 << 20)
    why = seen(lambda: runtime.ended(backend), lambda why: why is not None)
    assert why.startswith("exited with code 3 (the disk of ")


@pytest.mark.parametrize("what", ["link", "pipe"])
def test_what_an_engine_puts_in_the_place_of_its_log_is_neither_read_nor_cut_nor_written(house, what):
    backend = shell(FOREVER)
    runtime = house.started(backend)
    other, log = house.folder / "other", house.file("a.log")
    other.write_text("a secret of ours\n")
    log.unlink()
    if what == "link":
        log.symlink_to(other)
    else:
        os.mkfifo(log)
    assert runtime.log_tail(backend) == []
    assert list(runtime.follow_log(backend)) == []
    runtime.stop(backend)
    speaks = shell("echo said")
    runtime.start(speaks)
    house.died()
    assert runtime.log_tail(speaks) == ["said"]
    assert other.read_text() == "a secret of ours\n"


def test_a_log_that_is_a_link_is_not_written_through(house):
    other, log = house.folder / "other", house.folder / "a.log"
    other.write_text("")
    log.symlink_to(other)
    with pytest.raises(OSError, match="symbolic links"):
        house.starter().start(["echo", "said"], cwd="/", env={}, log=log)
    assert other.read_text() == ""


def test_a_log_is_followed_until_the_service_ends(house):
    gate = house.gate()
    backend = shell(f"echo one; read line < {gate}; printf 'two\\nrest'")
    runtime = house.started(backend)
    lines = runtime.follow_log(backend)
    assert next(lines) == "one"
    gate.write_text("go\n")
    assert list(lines) == ["two", "rest"]


# Frozen


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def becomes(pid: int, what: int) -> None:
    """Waits until the process has stopped (WSTOPPED) or goes on (WCONTINUED)."""
    assert seen(lambda: os.waitid(os.P_PID, pid, what | os.WNOHANG), bool)


def frozen(house: House) -> int:
    """Waits until the service's first process has stopped; its id."""
    pid = house.pid()
    becomes(pid, os.WSTOPPED)
    return pid


def test_every_process_of_a_service_is_its_own_and_is_frozen(house):
    gate = house.gate()
    backend = shell(f"sleep 1000 & echo > {gate}; wait")
    runtime = house.started(backend)
    gate.read_text()
    runtime.pause(backend)
    pids = runtime.pids(backend)
    assert [runtime.owner(pid) for pid in pids] == [backend.name] * 2
    assert runtime.owner(os.getpid()) is None
    while {state_of(pid) for pid in pids} != {"T"}:
        assert all(map(running, pids))
    runtime.stop(backend)
    assert [runtime.owner(pid) for pid in pids] == [None] * 2


@pytest.mark.parametrize("how", ["stop", "kill"])
def test_a_frozen_service_can_be_ended(house, how):
    gate = house.gate()
    # A child of a shell that is frozen before its exec would neither let the shell stop nor heed SIGTERM.
    begun = "while read name < /proc/$!/comm && [ $name != sleep ]; do :; done"
    backend = shell(f"trap 'echo told; exit' TERM; sleep 1000 & {begun}; echo > {gate}; wait")
    runtime = house.started(backend)
    gate.read_text()
    runtime.pause(backend)
    pid = frozen(house)
    getattr(runtime, how)(backend)
    assert not running(pid)
    assert "told" in runtime.log_tail(backend) or how == "kill"
    assert runtime.pids(backend) == []


def test_a_frozen_service_is_listed_and_not_dead_and_goes_on_when_it_is_started_or_let(house):
    backend = shell(FOREVER)
    runtime = house.runtime(backend)
    url = runtime.start(backend)
    for again in (runtime.start, runtime.resume):
        assert not runtime.is_frozen(backend)
        runtime.pause(backend)
        pid = frozen(house)
        assert (runtime.running(), runtime.ended(backend)) == ({"a": url}, None)
        assert runtime.is_frozen(backend)
        assert again(backend) in (url, None)
        becomes(pid, os.WCONTINUED)
    assert not runtime.is_frozen(backend)
