"""Services as real child processes; gates are FIFOs, ends are awaited through `watch`."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import queue
import select
import shlex
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from anvil_mux.config.config import Backend, Config, Service
from anvil_mux.errors import BackendError, ConfigError, LoadError
from anvil_mux.host import processes
from anvil_mux.host.processes import ProcessRuntime, Record
from anvil_mux.host.seam import HostConfig
from anvil_mux.host.starter import Child, Detached, OwnChildren, StarterLost
from anvil_mux.state import state_folder
from tests.running import seen

PATIENCE = 30.0
FOREVER = "exec sleep 1000"


def shell(script: str, name: str = "a", **special: Any) -> Backend:
    service = Service(command=("sh", "-c", script), **special.pop("service", {}))
    return Backend(name=name, model=name, service=service, **{"stop_timeout": PATIENCE, **special})


class House:
    """A folder for state and gates, and runtimes whose engines end with the test."""

    def __init__(self, folder: Path, starter: type[OwnChildren | Detached] = OwnChildren) -> None:
        self.folder = folder
        self.starter = starter
        self.deaths: queue.Queue[str] = queue.Queue()
        self._open: list[tuple[ProcessRuntime, tuple[Backend, ...], threading.Thread]] = []

    def runtime(self, *backends: Backend, address: str = "127.0.0.1") -> ProcessRuntime:
        config = Config(backends=backends, project="p", files=(str(self.folder / "compose.yaml"),))
        environ = {**os.environ, "XDG_STATE_HOME": str(self.folder / "state")}
        runtime = ProcessRuntime(config, environ=environ, address=address, starter=self.starter())
        watcher = threading.Thread(target=runtime.watch, args=(self.deaths.put,))
        watcher.start()
        self._open.append((runtime, backends, watcher))
        return runtime

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


def test_a_service_gets_a_free_port_its_environment_and_its_folder(house: House):
    backend = shell('echo "$PORT $GREETING $PWD" $$PORT', service={"environment": (("GREETING", "hi"),)})
    runtime = house.runtime(backend)
    url = runtime.start(backend)
    assert house.died() == "a"
    port = url.rpartition(":")[2]
    assert url == f"http://127.0.0.1:{port}"
    assert runtime.log_tail(backend)[0].startswith(f"{port} hi {house.folder}")


def test_the_chosen_port_can_stand_in_the_command(house: House):
    backend = Backend(name="a", model="a", service=Service(command=("echo", "--port", "$PORT", "x${PORT}y")))
    runtime = house.runtime(backend)
    port = runtime.start(backend).rpartition(":")[2]
    house.died()
    assert runtime.log_tail(backend) == [f"--port {port} x{port}y"]


def test_a_declared_port_is_used(house: House):
    with socket.socket() as held:
        held.setsockopt(
            socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
        )  # engines may have it, other processes may not
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
        backend = shell(FOREVER, port=port)
        assert house.runtime(backend).start(backend) == f"http://127.0.0.1:{port}"


def test_a_service_is_told_the_address_at_which_it_is_to_listen(house: House):
    backend = Backend(name="a", model="a", service=Service(command=("env",)))
    runtime = house.runtime(backend, address="127.0.0.2")
    url = runtime.start(backend)
    house.died()
    told = dict(line.split("=", 1) for line in runtime.log_tail(backend, 1000) if "=" in line)
    assert told["HOST"] == "127.0.0.2"
    assert url == f"http://127.0.0.2:{told['PORT']}"


def test_both_can_stand_in_the_command_and_names_that_begin_like_them_are_left_alone(house: House):
    words = ("echo", "$HOST:${PORT}", "$HOSTNAME", "$PORTS", "${HOST}.")
    backend = Backend(name="a", model="a", service=Service(command=words))
    runtime = house.runtime(backend, address="127.0.0.2")
    place = runtime.start(backend).removeprefix("http://")
    house.died()
    assert runtime.log_tail(backend) == [f"{place} $HOSTNAME $PORTS 127.0.0.2."]


def test_a_service_that_names_its_own_host_keeps_it(house: House):
    service = Service(command=("sh", "-c", "echo $HOST"), environment=(("HOST", "0.0.0.0"),))
    backend = Backend(name="a", model="a", service=service)
    runtime = house.runtime(backend, address="127.0.0.2")
    assert runtime.start(backend).startswith("http://127.0.0.2:")
    house.died()
    assert runtime.log_tail(backend) == ["0.0.0.0"]


def test_an_engine_at_another_address_is_started_anew_where_it_is_looked_for(house: House):
    backend = shell(FOREVER)
    first = house.runtime(backend)
    first.start(backend)
    before = house.pid()
    first.close()
    second = house.runtime(backend, address="127.0.0.2")
    assert second.start(backend).startswith("http://127.0.0.2:")
    assert not running(before)


def test_an_address_that_is_not_this_machines_is_said_before_anything_starts(house: House):
    backend = shell(FOREVER)
    with pytest.raises(LoadError, match=r"a cannot listen at 203\.0\.113\.1: that is no address"):
        house.runtime(backend, address="203.0.113.1").start(backend)
    assert not house.file("a.json").exists()


def test_a_port_that_is_taken_is_said_before_anything_starts(house: House):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        backend = shell(FOREVER, port=port)
        with pytest.raises(LoadError, match=f"a cannot have port {port} .*another program"):
            house.runtime(backend).start(backend)
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
def test_an_engine_that_says_that_its_chosen_port_is_taken_has_lost_it(house: House, says: str, lost: bool):
    backend = shell(f'echo "{says}"; exit 1')
    runtime = house.runtime(backend)
    runtime.start(backend)
    gone(house.pid())
    assert runtime.lost_its_port(backend) == lost


def test_two_programs_choose_no_port_twice_though_no_engine_listens_yet(
    house: House, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(processes, "FIRST_PORT", processes.LAST_PORT)
    monkeypatch.setattr(processes, "KERNELS_PORTS", tmp_path / "range")
    (tmp_path / "range").write_text("32768\t60999\n")
    first, second = shell(FOREVER, "a"), shell(FOREVER, "b")
    programs = [house.runtime(first), house.runtime(second)]
    assert programs[0].start(first) != programs[1].start(second)


def test_a_declared_port_is_not_exchanged_for_another(house: House):
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        backend = shell('echo "address already in use"; exit 1', port=held.getsockname()[1])
        runtime = house.runtime(backend)
        runtime.start(backend)
    gone(house.pid())
    assert not runtime.lost_its_port(backend)


def test_an_engine_that_runs_has_its_port_whatever_it_says(house: House):
    backend = shell(f'echo "address already in use"; echo > {house.gate()}; {FOREVER}')
    runtime = house.runtime(backend)
    runtime.start(backend)
    assert (house.folder / "gate").read_text() == "\n"
    assert runtime.log_tail(backend) == ["address already in use"]
    assert not runtime.lost_its_port(backend)


def test_nothing_of_an_earlier_run_is_shown_when_the_port_is_taken(house: House):
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        backend = shell("echo of the first run", port=held.getsockname()[1])
        runtime = house.runtime(backend)
        runtime.start(backend)
        house.died()
        assert runtime.log_tail(backend) == ["of the first run"]
        held.listen()
        with pytest.raises(LoadError):
            runtime.start(backend)
    assert runtime.log_tail(backend) == []


def test_a_program_with_a_slash_is_found_in_the_services_folder(house: House):
    folder = house.folder / "engines"
    folder.mkdir()
    (folder / "engine").write_text("#!/bin/sh\necho from $PWD\n")
    (folder / "engine").chmod(0o755)
    backend = Backend(name="a", model="a", service=Service(command=("./engine",), working_dir=str(folder)))
    runtime = house.runtime(backend)
    runtime.start(backend)
    house.died()
    assert runtime.log_tail(backend) == [f"from {folder}"]


@either_parent
def test_a_program_that_is_missing_is_a_load_error(house: House):
    backend = Backend(name="a", model="a", service=Service(command=("no-such-engine",)))
    with pytest.raises(LoadError, match=r"service a cannot be started: .*no-such-engine"):
        house.runtime(backend).start(backend)


def test_a_service_without_a_command_is_a_load_error(house: House):
    backend = Backend(name="a", model="a")
    with pytest.raises(LoadError, match="service a has no command"):
        house.runtime(backend).start(backend)


def test_both_streams_are_logged_and_each_start_begins_a_new_log(house: House):
    backend = shell("echo out; echo err >&2; echo run $PORT")
    runtime = house.runtime(backend)
    for _ in range(2):
        port = runtime.start(backend).rpartition(":")[2]
        house.died()
        assert runtime.log_tail(backend) == ["out", "err", f"run {port}"]
    assert runtime.log_tail(backend, 1) == [f"run {port}"]


@either_parent
def test_a_service_that_cannot_be_looked_at_has_not_ended(house: House, monkeypatch: pytest.MonkeyPatch):
    backend = shell(FOREVER)
    runtime = house.runtime(backend)
    runtime.start(backend)
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
    os.kill(runtime._record("a").pid, signal.SIGKILL)
    assert house.died() == "a"


def test_how_a_service_ended_is_told(house: House):
    backend = shell("exit 3")
    runtime = house.runtime(backend)
    assert runtime.ended(backend) == "does not run"
    runtime.start(backend)
    house.died()
    assert runtime.ended(backend) == "exited with code 3"


@either_parent
def test_a_kill_from_outside_is_seen_and_told(house: House):
    backend = shell(FOREVER)
    runtime = house.runtime(backend)
    runtime.start(backend)
    assert runtime.ended(backend) is None
    os.kill(house.pid(), signal.SIGKILL)
    assert house.died() == "a"
    assert runtime.ended(backend) == "was killed by SIGKILL"
    assert runtime.running() == {}


def test_a_second_start_leaves_the_running_service_alone(house: House):
    backend = shell(FOREVER)
    runtime = house.runtime(backend)
    url = runtime.start(backend)
    pid = house.pid()
    assert (runtime.start(backend), house.pid()) == (url, pid)


def test_a_service_whose_command_changed_is_started_anew(house: House):
    runtime = house.runtime(shell(FOREVER))
    runtime.start(shell(FOREVER))
    before = house.pid()
    runtime.start(shell("echo new; " + FOREVER))
    assert not running(before)
    assert running(house.pid())


@pytest.mark.parametrize(
    ("changes", "differs"),
    [
        ({}, ""),
        ({"pin": True, "evict_to": ("freeze", "stop"), "ttl": 3.0}, ""),
        ({"gpus": ("1",)}, "its GPUs changed since it was started"),
        ({"port": 1}, "its port changed since it was started"),
        (
            {"service": {"environment": (("A", "2"), ("B", "1"))}},
            "its environment changed since it was started",
        ),
        ({"service": {"environment": (("B", "1"), ("A", "1"))}}, ""),
        ({"service": {"working_dir": "/"}}, "its environment and folder changed since it was started"),
    ],
)
def test_a_run_is_compared_with_the_description(house: House, changes: dict[str, Any], differs: str):
    described = {"service": {"environment": (("A", "1"), ("B", "1"))}}
    house.runtime(shell(FOREVER)).start(shell(FOREVER, **described))
    later = shell(FOREVER, **{**described, **changes})
    assert house.runtime(later).differs(later) == differs


def test_a_run_whose_description_was_not_written_down_differs(house: House):
    backend = shell(FOREVER)
    first = house.runtime(backend)
    url = first.start(backend)
    first.close()
    record = json.loads(house.file("a.json").read_text())
    del record["described"]
    house.file("a.json").write_text(json.dumps({**record, "digest": "that of another release"}))
    second = house.runtime(backend)
    assert second.running() == {"a": url}
    assert second.differs(backend) == "its description was not written down when it was started"


def test_what_does_not_run_does_not_differ(house: House):
    backend = shell(FOREVER)
    assert house.runtime(backend).differs(backend) == ""


def test_a_stop_returns_when_the_service_is_gone(house: House):
    backend = shell(FOREVER)
    runtime = house.runtime(backend)
    runtime.start(backend)
    pid = house.pid()
    runtime.stop(backend)
    assert not running(pid)
    assert runtime.running() == {}
    assert not house.file("a.json").exists()


def test_stopping_what_does_not_run_is_no_error(house: House):
    backend = shell("true")
    runtime = house.runtime(backend)
    runtime.stop(backend)
    runtime.start(backend)
    house.died()
    runtime.stop(backend)
    runtime.stop(backend)


@either_parent
def test_a_service_that_ignores_sigterm_is_killed_after_its_grace(house: House):
    gate = house.gate()
    backend = shell(f"trap '' TERM; echo up > {gate}; while :; do sleep 1000; done", stop_timeout=0.2)
    runtime = house.runtime(backend)
    runtime.start(backend)
    assert gate.read_text() == "up\n"
    pid = house.pid()
    runtime.stop(backend)
    assert not running(pid)
    assert runtime.ended(backend) == "was killed by SIGKILL"


def test_a_service_that_handles_sigterm_has_its_grace(house: House):
    gate = house.gate()
    program = f"""if True:
        import signal
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        open({str(gate)!r}, "w").write("up")
        signal.sigwait([signal.SIGTERM])
        print("bye")
    """
    backend = replace(shell(""), service=Service(command=(sys.executable, "-c", program)))
    runtime = house.runtime(backend)
    runtime.start(backend)
    gate.read_text()
    runtime.stop(backend)
    assert runtime.log_tail(backend) == ["bye"]
    assert runtime.ended(backend) == "exited with code 0"


def test_workers_of_a_stopped_engine_are_gone_too(house: House):
    gate = house.gate()
    workers = f"(trap '' TERM; exec sleep 1000) & echo $! > {gate}; exec sleep 1000"
    backend = shell(workers, stop_timeout=0.2)
    runtime = house.runtime(backend)
    runtime.start(backend)
    worker = int(gate.read_text())
    runtime.stop(backend)
    gone(worker)
    assert not running(worker)


@either_parent
def test_workers_that_outlive_their_engine_are_ended_before_its_death_is_told(house: House):
    gate = house.gate()
    backend = shell(f"sleep 1000 & echo $! > {gate}; exit 1")
    runtime = house.runtime(backend)
    runtime.start(backend)
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
def test_workers_are_of_the_run_wherever_they_went(house: House, script: str, end: str):
    gate, exit = house.gate(), house.gate("exit")
    backend = shell(f"{worker(script, gate)} read line < {exit}; exit 1")
    runtime = house.runtime(backend)
    runtime.start(backend)
    pid = int(gate.read_text())
    assert pid in runtime.pids(backend)
    assert runtime.owner(pid) == "a"
    if end == "stop":
        runtime.stop(backend)
    else:
        exit.write_text("end\n")
        assert house.died() == "a"
    assert not running(pid)


def test_a_worker_without_its_environment_is_of_the_session(house: House):
    gate = house.gate()
    backend = shell(f"env -i sh -c 'echo $$ > {gate}; {FOREVER}' & {FOREVER}")
    runtime = house.runtime(backend)
    runtime.start(backend)
    pid = int(gate.read_text())
    assert pid in runtime.pids(backend)
    runtime.stop(backend)
    assert not running(pid)


def test_a_session_that_has_our_number_by_now_is_left_alone_though_its_leader_has_ended(house: House):
    backend = shell(FOREVER)
    runtime = house.runtime(backend)
    runtime.start(backend)
    with subprocess.Popen(
        ["sh", "-c", "sleep 1000 & echo $!"], start_new_session=True, stdout=subprocess.PIPE, text=True
    ) as leader:
        other = int(leader.stdout.readline())
    ours = house.pid()
    edit(house.file("a.json"), pid=leader.pid, started=1)
    try:
        assert runtime.pids(backend) == [ours]
        runtime.stop(backend)
        assert not running(ours)
        assert running(other)
    finally:
        os.kill(other, signal.SIGKILL)


def test_none_of_our_own_variables_reaches_an_engine_unless_it_is_named(
    house: House, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("ANVIL_API_KEYS", "secret")
    monkeypatch.setenv("ANVIL_DRAIN_TIMEOUT", "9")
    backend = shell("env", service={"environment": (("ANVIL_NAMED", "1"),)})
    runtime = house.runtime(backend)
    runtime.start(backend)
    house.died()
    names = {line.partition("=")[0] for line in runtime.log_tail(backend, 1000)}
    assert {name for name in names if name.startswith("ANVIL_")} == {"ANVIL_NAMED", "ANVIL_MUX_RUN"}
    assert "PATH" in names


def test_our_own_stop_is_no_death(house: House):
    first, second = shell(FOREVER), shell(FOREVER, name="b")
    runtime = house.runtime(first, second)
    runtime.start(first)
    runtime.start(second)
    runtime.stop(first)
    os.kill(house.pid("b"), signal.SIGKILL)
    assert house.died() == "b"
    assert house.deaths.empty()


@either_parent
def test_a_new_runtime_adopts_what_runs(house: House):
    backend = shell(FOREVER)
    first = house.runtime(backend)
    url = first.start(backend)
    first.close()
    second = house.runtime(backend)
    assert second.running() == {"a": url}
    assert second.ended(backend) is None
    assert second.start(backend) == url
    pid = house.pid()
    second.stop(backend)
    assert not running(pid)


ORPHAN = """
import sys
sys.path.insert(0, {root!r})
from pathlib import Path
from anvil_mux.config.config import Backend, Config, Service
from anvil_mux.host.processes import ProcessRuntime
backend = Backend(name="a", model="a", service=Service(command=("sh", "-c", {script!r})))
ProcessRuntime(Config(backends=(backend,), project="p"), state=Path({state!r})).start(backend)
import os, signal
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_anvil_mux_loses_no_engine(house: House):
    root = str(Path(__file__).parent.parent.parent)
    state = str(house.file(""))
    program = ORPHAN.format(root=root, script=FOREVER, state=state)
    code = os.spawnv(os.P_WAIT, sys.executable, [sys.executable, "-c", program])
    assert code == -signal.SIGKILL
    backend = Backend(
        name="a", model="a", service=Service(command=("sh", "-c", FOREVER)), stop_timeout=PATIENCE
    )
    runtime = house.runtime(backend)
    assert list(runtime.running()) == ["a"]
    os.kill(house.pid(), signal.SIGKILL)
    assert house.died() == "a"
    assert runtime.ended(backend) == "ended"


def test_one_whose_start_was_not_told_any_more_is_ended_by_its_mark(
    house: House, monkeypatch: pytest.MonkeyPatch
):
    backend = Backend(name="a", model="a", service=Service(command=("sleep", "1000")))
    runtime = house.runtime(backend)
    start = runtime._starter.start

    def lost(*args: Any, **words: Any) -> Child:
        start(*args, **words).leave()
        raise StarterLost("it has ended")

    monkeypatch.setattr(runtime._starter, "start", lost)
    with pytest.raises(BackendError, match="service a: it has ended"):
        runtime.start(backend)
    # A process has no environment for the moment in which it becomes its command.
    assert seen(lambda: runtime.pids(backend), bool) == inhabitants(house.folder)
    runtime.stop(backend)
    assert inhabitants(house.folder) == []


class Killed(BaseException):
    """Stands for an end of the program that lets it do nothing more."""


@either_parent
def test_an_engine_is_known_even_if_anvil_mux_is_killed_while_it_starts_it(
    house: House, monkeypatch: pytest.MonkeyPatch
):
    backend = Backend(name="a", model="a", service=Service(command=("sleep", "1000")))
    first = house.runtime(backend)
    write = first._write_record

    def killed_once_it_runs(name: str, record: Record) -> None:
        if record.pid:
            raise Killed
        write(name, record)

    monkeypatch.setattr(first, "_write_record", killed_once_it_runs)
    with pytest.raises(Killed):
        first.start(backend)
    [engine] = inhabitants(house.folder)
    second = house.runtime(backend)
    # A process has no environment for the moment in which it becomes its command.
    assert seen(lambda: second.pids(backend), bool) == [engine]
    assert second.start(backend) == second.running()["a"]
    assert inhabitants(house.folder) == [engine]
    second.stop(backend)
    assert inhabitants(house.folder) == []


def test_workers_that_outlived_their_engine_while_nobody_looked_are_there_to_be_stopped(house: House):
    gate, end = house.gate(), house.gate("end")
    backend = shell(f"sleep 1000 & echo $! > {gate}; read line < {end}; exit 1")
    first = house.runtime(backend)
    first.start(backend)
    worker = int(gate.read_text())
    first.close()
    leader = house.pid()
    end.write_text("end\n")
    gone(leader)
    second = house.runtime(backend)
    assert second.running() == {"a": ""}
    second.stop(backend)
    assert not running(worker)
    assert second.running() == {}


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize("changes", [{"started": 1, "mark": "another"}, {"boot": "another"}])
def test_a_other_process_with_our_process_id_is_left_alone(house: House, changes: dict[str, object]):
    backend = shell(FOREVER)
    first = house.runtime(backend)
    first.start(backend)
    pid = house.pid()
    first.close()
    record = house.file("a.json").read_text()
    edit(house.file("a.json"), **changes)
    second = house.runtime(backend)
    assert second.running() == {}
    assert second.owner(pid) is None
    second.stop(backend)
    assert running(pid)
    house.file("a.json").write_text(record)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"pid": 1}'])
def test_a_broken_record_is_no_record(house: House, text: str):
    backend = shell(FOREVER)
    house.file("").mkdir(parents=True)
    house.file("a.json").write_text(text)
    runtime = house.runtime(backend)
    assert runtime.running() == {}
    assert runtime.start(backend).startswith("http://127.0.0.1:")


@either_parent
def test_a_record_that_cannot_be_written_leaves_nothing_running(house: House):
    backend = shell(FOREVER)
    house.file("a.spare").mkdir(parents=True)
    with pytest.raises(BackendError, match="service a: cannot write its record"):
        house.runtime(backend).start(backend)
    assert inhabitants(house.folder) == []


@pytest.fixture
def full_disk(house: House, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """A disk on which files can be made and no room can be had, once it is full."""
    full, write = [False], os.pwrite

    def pwrite(descriptor: int, data: bytes, offset: int) -> int:
        if full[0] and offset + len(data) > os.fstat(descriptor).st_size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data, offset)

    monkeypatch.setattr(processes.os, "pwrite", pwrite)
    yield full
    full[0] = False


def test_a_disk_that_is_full_since_it_serves_keeps_nobody_from_being_swapped(
    house: House, full_disk: list[bool]
):
    first, second = shell(FOREVER), shell(FOREVER, "b")
    runtime = house.runtime(first, second)
    assert seen(lambda: [house.file(f"{name}.spare").exists() for name in "ab"], all) == [True, True]
    full_disk[0] = True
    for backend in (first, second, first, second):
        assert runtime.start(backend)
        assert runtime.running().keys() == {backend.name}
        runtime.stop(backend)
    assert runtime.problem() == ""


def test_a_service_that_is_new_on_a_full_disk_has_the_room_of_the_one_that_is_stopped_for_it(
    house: House, full_disk: list[bool]
):
    first, second = shell(FOREVER), shell(FOREVER, "b")
    before = house.runtime(first)
    before.start(first)
    before.close()
    full_disk[0] = True
    runtime = house.runtime(first, second)
    assert runtime.running().keys() == {"a"}
    for old, new in ((first, second), (second, first), (first, second)):
        runtime.stop(old)
        assert runtime.start(new)
        assert runtime.running().keys() == {new.name}
    assert runtime.problem() == ""


def test_a_service_that_is_new_on_a_full_disk_takes_no_room_from_one_that_runs(
    house: House, full_disk: list[bool]
):
    first, second = shell(FOREVER), shell(FOREVER, "b")
    runtime = house.runtime(first)
    runtime.start(first)
    runtime.pause(first)
    full_disk[0] = True
    with pytest.raises(BackendError, match="cannot write its record"):
        runtime.start(second)
    runtime.resume(first)
    assert runtime.running().keys() == {"a"}


def test_where_no_record_can_be_written_that_is_a_problem_and_a_reload_is_refused(
    house: House, full_disk: list[bool]
):
    first, second = shell(FOREVER), shell(FOREVER, "b")
    full_disk[0] = True
    runtime = house.runtime(first)
    with pytest.raises(BackendError, match="cannot write its record"):
        runtime.start(first)
    assert runtime.problem().endswith("cannot be written: No space left on device")
    with pytest.raises(ConfigError, match="service b: cannot write its record"):
        runtime.reconfigure(HostConfig.of(Config((second,), runtime="process")))
    full_disk[0] = False
    assert runtime.start(first)
    assert runtime.problem() == ""
    runtime.stop(first)


def test_the_log_of_an_engine_that_runs_is_cut_and_goes_on(house: House, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(processes, "LOG_BYTES", 1000)
    monkeypatch.setattr(processes, "KEPT_BYTES", 100)
    gate = house.gate()
    backend = shell(f"seq 1000; read line < {gate}; echo more")
    runtime = house.runtime(backend)
    runtime.start(backend)
    seen(lambda: runtime.log_tail(backend)[-1:], lambda last: last == ["1000"])
    processes.trim(house.file("a.log"))
    kept = runtime.log_tail(backend, 1000)
    assert kept == [str(number) for number in range(1001 - len(kept), 1001)]
    assert house.file("a.log").stat().st_size <= 100
    lines = runtime.follow_log(backend)
    gate.write_text("go\n")
    assert list(lines)[-2:] == ["1000", "more"]


@pytest.mark.parametrize("what", ["link", "pipe"])
def test_what_an_engine_puts_in_the_place_of_its_log_is_neither_read_nor_cut_nor_written(
    house: House, monkeypatch: pytest.MonkeyPatch, what: str
):
    monkeypatch.setattr(processes, "LOG_BYTES", 5)
    backend = shell(FOREVER)
    runtime = house.runtime(backend)
    runtime.start(backend)
    other, log = house.folder / "other", house.file("a.log")
    other.write_text("a secret of ours\n")
    log.unlink()
    if what == "link":
        log.symlink_to(other)
    else:
        os.mkfifo(log)
    processes.trim(log)
    assert runtime.log_tail(backend) == []
    assert list(runtime.follow_log(backend)) == []
    runtime.stop(backend)
    speaks = shell("echo said")
    runtime.start(speaks)
    house.died()
    assert runtime.log_tail(speaks) == ["said"]
    assert other.read_text() == "a secret of ours\n"


def test_a_log_that_is_a_link_is_not_written_through(house: House):
    other, log = house.folder / "other", house.folder / "a.log"
    other.write_text("")
    log.symlink_to(other)
    with pytest.raises(OSError, match="symbolic links"):
        house.starter().start(["echo", "said"], cwd="/", env={}, log=log)
    assert other.read_text() == ""


def test_a_log_is_followed_until_the_service_ends(house: House):
    gate = house.gate()
    backend = shell(f"echo one; read line < {gate}; printf 'two\\nrest'")
    runtime = house.runtime(backend)
    runtime.start(backend)
    lines = runtime.follow_log(backend)
    assert next(lines) == "one"
    gate.write_text("go\n")
    assert list(lines) == ["two", "rest"]


def test_a_service_that_never_ran_has_no_log(house: House):
    backend = shell("true")
    runtime = house.runtime(backend)
    assert runtime.log_tail(backend) == []
    assert list(runtime.follow_log(backend)) == []


def test_records_and_logs_are_kept_in_the_state_folder(tmp_path: Path):
    assert state_folder("p", {"XDG_STATE_HOME": "/s"}) == Path("/s/anvil-mux/p")
    assert state_folder("p", {}) == Path.home() / ".local/state/anvil-mux/p"


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


def test_a_frozen_service_runs_no_further_and_is_not_dead(house: House):
    backend = shell(FOREVER)
    runtime = house.runtime(backend)
    runtime.start(backend)
    runtime.pause(backend)
    pid = frozen(house)
    assert runtime.ended(backend) is None
    runtime.resume(backend)
    becomes(pid, os.WCONTINUED)


def test_every_process_of_a_service_is_frozen(house: House):
    gate = house.gate()
    backend = shell(f"sleep 1000 & echo > {gate}; wait")
    runtime = house.runtime(backend)
    runtime.start(backend)
    gate.read_text()
    runtime.pause(backend)
    pids = runtime.pids(backend)
    assert len(pids) == 2
    while {state_of(pid) for pid in pids} != {"T"}:
        assert all(map(running, pids))


def test_a_process_belongs_to_the_service_that_it_was_started_for(house: House):
    gate = house.gate()
    backend = shell(f"sleep 1000 & echo > {gate}; wait")
    runtime = house.runtime(backend)
    runtime.start(backend)
    gate.read_text()
    pids = runtime.pids(backend)
    assert [runtime.owner(pid) for pid in pids] == [backend.name] * 2
    assert runtime.owner(os.getpid()) is None
    runtime.stop(backend)
    assert [runtime.owner(pid) for pid in pids] == [None] * 2


@pytest.mark.parametrize("how", ["stop", "kill"])
def test_a_frozen_service_can_be_ended(house: House, how: str):
    gate = house.gate()
    # A child of a shell that is frozen before its exec would neither let the shell stop nor heed SIGTERM.
    begun = "while read name < /proc/$!/comm && [ $name != sleep ]; do :; done"
    backend = shell(f"trap 'echo told; exit' TERM; sleep 1000 & {begun}; echo > {gate}; wait")
    runtime = house.runtime(backend)
    runtime.start(backend)
    gate.read_text()
    runtime.pause(backend)
    pid = frozen(house)
    getattr(runtime, how)(backend)
    assert not running(pid)
    assert "told" in runtime.log_tail(backend) or how == "kill"
    assert runtime.pids(backend) == []


def test_a_frozen_service_is_listed_as_it_is_and_let_go_on_when_it_is_started(house: House):
    backend = shell(FOREVER)
    runtime = house.runtime(backend)
    url = runtime.start(backend)
    assert not runtime.is_frozen(backend)
    runtime.pause(backend)
    pid = frozen(house)
    assert runtime.running() == {"a": url}
    assert runtime.is_frozen(backend)
    assert runtime.start(backend) == url
    becomes(pid, os.WCONTINUED)
    assert not runtime.is_frozen(backend)


def test_what_does_not_run_is_not_frozen(house: House):
    assert not house.runtime(shell(FOREVER)).is_frozen(shell(FOREVER))


@pytest.mark.parametrize("call", ["pause", "resume"])
def test_what_does_not_run_can_neither_be_frozen_nor_let_go_on(house: House, call: str):
    backend = shell(FOREVER)
    with pytest.raises(BackendError, match="service a does not run"):
        getattr(house.runtime(backend), call)(backend)
