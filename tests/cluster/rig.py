"""A cluster of real raylets on one machine, for tests: hosts that lose their power, freeze and come back.

The cluster has a network namespace in which only ``lo`` is up, so Ray, which listens on all addresses, can
be reached from inside alone; its hosts have the addresses 127.0.0.2 and up. Each host is a process namespace
with mounts of its own. A power cut is the death of its init, and takes all of its processes along,
containers too: a host that needs them has a Docker Engine of its own. All of it ends with the process that
made the cluster, however that ends, for the inits read a pipe that it holds.

    with Cluster() as cluster:
        head = cluster.add("head", head=True)
        gpus = cluster.add("gpu-a")
        cluster.wait()
        head.popen(["anvil-mux", ...])
        gpus.power_cut()

Token mode is on. Run as a program this file is an init, and needs the standard library alone.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import secrets
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path(__file__).resolve().parent.parent.parent
PORT = 6379
CLONE_NEWNET = 0x40000000
START_TIMEOUT = 150.0
END_TIMEOUT = 20.0
RESTART_SECONDS = 1.0
"""Until a host starts Ray again that ended; the units in contrib/ have the same."""

T = TypeVar("T")


def why_not() -> str:
    """Return why this machine can have no cluster, or ""."""
    if os.geteuid() != 0:
        return "a cluster on one machine needs root, for its namespaces"
    if not (shutil.which("unshare") and shutil.which("nsenter")):
        return "a cluster on one machine needs unshare and nsenter (util-linux)"
    tried = subprocess.run(["unshare", "--net", *NEW_HOST, "true"], capture_output=True, text=True)
    if tried.returncode:
        return f"no namespaces can be made here: {tried.stderr.strip()}"
    tried = subprocess.run([sys.executable, "-c", "import ray"], capture_output=True, text=True)
    return "this Python has no ray: `bin/test cluster` brings one" if tried.returncode else ""


class Cluster:
    """Hosts in a network of their own."""

    def __init__(self) -> None:
        self.folder = Path(
            tempfile.mkdtemp(prefix="rig-", dir="/tmp")
        )  # short: sockets have paths of at most 107
        self.hosts: dict[str, Host] = {}
        self.address = ""
        """The head's address and port, for ``--cluster``."""
        self.token = self.folder / "token"
        self.token.touch(mode=0o600)
        self.token.write_text(secrets.token_hex(32))
        self._init = Init(["unshare", "--net"], self.folder / "cluster.log", {"loopback": True})

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def add(self, name: str, **options: Any) -> Host:
        """Return a new host, whose Ray is starting; the first is the head. Options: see ``Host``."""
        host = Host(self, name, f"127.0.0.{len(self.hosts) + 2}", is_head=not self.hosts, **options)
        self.hosts[name] = host
        self.address = self.address or f"{host.address}:{PORT}"
        host.start()
        return host

    def wait(self) -> None:
        """Return once Ray runs on every host."""
        for host in self.hosts.values():
            host.wait()

    def environ(self, **more: str) -> dict[str, str]:
        """Return the environment of whatever has to do with the cluster."""
        foreign = ("RAY_", "DOCKER_", "XDG_")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
        return {
            **kept,
            "PATH": f"{Path(sys.executable).parent}:{kept['PATH']}",
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), kept.get("PYTHONPATH")])),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self.token),
            "RAY_USAGE_STATS_ENABLED": "0",
            **more,
        }

    def inside(self, do: Callable[[], T]) -> T:
        """Return what ``do`` returns in a thread inside the network; its sockets stay there."""
        done: list[T] = []
        errors: list[BaseException] = []

        def work() -> None:
            try:
                with open(f"/proc/{self._init.pid}/ns/net") as space:
                    if ctypes.CDLL(None, use_errno=True).setns(space.fileno(), CLONE_NEWNET):
                        raise OSError(ctypes.get_errno(), "setns")
                done.append(do())
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        thread.join()
        if errors:
            raise errors[0]
        return done[0]

    def new_space(self) -> list[str]:
        """Return what precedes the flags of a namespace inside the network."""
        return [*self._init.entered(), "unshare"]

    def close(self) -> None:
        """End all of it."""
        for host in self.hosts.values():
            host.power_cut()
        self._init.kill()
        for left in Path("/sys/fs/cgroup").glob(f"*/{self.folder.name}-*"):
            for group in sorted((each for each in left.rglob("*") if each.is_dir()), reverse=True):
                group.rmdir()
            left.rmdir()
        shutil.rmtree(self.folder, ignore_errors=True)


class Host:
    """A host of the cluster, to be killed in part or whole, frozen, and started again.

    ``label`` "" is a host without engines; ``ray`` are more arguments of ``ray start``, ``environ`` is more
    of its environment. Its Ray is supervised, as by systemd: what ended is started again after a second.
    """

    def __init__(
        self,
        cluster: Cluster,
        name: str,
        address: str,
        *,
        is_head: bool,
        label: str | None = None,
        docker: bool = False,
        ray: Sequence[str] = (),
        environ: Mapping[str, str] = {},
    ) -> None:
        self.cluster = cluster
        self.name = name
        self.address = address
        self.folder = cluster.folder / name
        self.folder.mkdir()
        self._is_head = is_head
        self._label = ("" if is_head else f"anvil-host={name}") if label is None else label
        self._has_docker = docker
        self._arguments = tuple(ray)
        self._environ = dict(environ)
        self._log = self.folder / "ray.log"
        self._init: Init | None = None
        self._dockerd: subprocess.Popen[Any] | None = None

    # Its life

    def start(self) -> None:
        """Turn it on; its files are as they were when it went off."""
        self._log.write_text("")
        settings = {"argv": self._ray(), "environ": self.environ(), "log": str(self._log)}
        self._init = Init(self.cluster.new_space(), self.folder / "host.log", settings)
        if self._has_docker:
            self._start_docker()

    def wait(self) -> None:
        """Return once its Ray runs, and its Docker Engine if it has one."""
        wait_for(lambda: "Ray runtime started" in self._log.read_text(), f"Ray on {self.name}", self._log)
        if self._has_docker:
            log = self.folder / "dockerd.log"
            wait_for(lambda: self.run(["docker", "info"]).returncode == 0, f"Docker on {self.name}", log)

    def power_cut(self) -> None:
        """End all of its processes at once."""
        if self._init is None:
            return
        self._init.kill()
        self._init = None
        if self._dockerd is not None:
            self._dockerd.wait(END_TIMEOUT)
            (self.folder / "docker.pid").unlink(missing_ok=True)
            shutil.rmtree(self.folder / "docker-run", ignore_errors=True)  # as the start of a machine does

    def freeze(self) -> None:
        """Make it silent: no process of it runs, but its addresses accept connections."""
        wait_for(
            lambda: not [pid for pid in self.pids() if not stopped(pid)], f"{self.name} frozen", self._log
        )

    def thaw(self) -> None:
        """Let a frozen host go on."""
        for pid in self.pids():
            send(pid, signal.SIGCONT)
            send(parent_of(pid), signal.SIGCONT)  # nsenter stops with what it runs

    def stop_ray(self) -> None:
        """End its Ray, until ``start_ray``; engines run on."""
        self._started.tell("stop")
        wait_for(lambda: not self.pids("raylet/raylet", "gcs/gcs_server"), "the end of Ray", self._log)

    def start_ray(self) -> None:
        """Let its Ray start again; ``wait`` waits for that."""
        self._log.write_text("")
        self._started.tell("start")

    def kill(self, *words: str, how: signal.Signals = signal.SIGKILL) -> list[int]:
        """Kill the processes of which the command line has one of the words; there has to be one."""
        found = self.pids(*words)
        assert found, f"no {words} on {self.name}"
        for pid in found:
            send(pid, how)
        return found

    def kill_raylet(self) -> None:
        self._log.write_text("")
        self.kill("raylet/raylet")

    def kill_gcs(self) -> None:
        """Kill the head's store, with which all of Ray on the head ends, and is started again."""
        self._log.write_text("")
        self.kill("gcs/gcs_server")

    def kill_agent(self) -> None:
        """Kill the process in which the agent of anvil-mux is, once there is one."""
        wait_for(lambda: self.pids("ray::HostActor"), f"an agent on {self.name}", self._log)
        self.kill("ray::HostActor")

    def kill_driver(self) -> None:
        """Kill the process by which anvil-mux reaches the cluster, once there is one."""
        wait_for(lambda: self.pids("anvil_mux.cluster.ray_link"), "a driver", self._log)
        self.kill("anvil_mux.cluster.ray_link")

    # What is done there

    def environ(self, **more: str) -> dict[str, str]:
        # The hosts have one kernel, and are told apart by that name.
        named = {"XDG_STATE_HOME": str(self.folder / "state"), "ANVIL_MUX_MACHINE": self.name}
        own = {**named, **self._environ}
        if self._has_docker:
            own["DOCKER_HOST"] = f"unix://{self.folder}/docker.sock"
        return self.cluster.environ(**own, **more)

    def popen(self, argv: Sequence[str], **options: Any) -> Entered:
        """Begin a command on the host."""
        return Entered([*self._started.entered(), *argv], **{"env": self.environ(), **options})

    def run(self, argv: Sequence[str], timeout: float = 60.0) -> subprocess.CompletedProcess[str]:
        """Run a command on the host to its end; ``stdout`` has all that it printed."""
        with self.popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
            try:
                out, _ = process.communicate(timeout=timeout)
            except BaseException:
                process.kill()
                raise
        return subprocess.CompletedProcess(argv, process.returncode, out)

    def bring_image(self, name: str) -> None:
        """Copy an image from the Docker Engine that our own environment reaches to the host's own."""
        with subprocess.Popen(["docker", "save", name], stdout=subprocess.PIPE) as saved:
            loaded = self.popen(["docker", "load"], stdin=saved.stdout, stdout=subprocess.DEVNULL)
            assert loaded.wait(START_TIMEOUT) == 0
        assert saved.returncode == 0

    def pids(self, *words: str) -> list[int]:
        """Return the ids outside of its processes; of those with one of the words, if there are any."""
        pids = [] if self._init is None else processes_of(self._init.pid)
        return [pid for pid in pids if not words or any(word in command_of(pid) for word in words)]

    @property
    def _started(self) -> Init:
        assert self._init is not None, f"{self.name} is off"
        return self._init

    def _ray(self) -> list[str]:
        where = ["--head", f"--port={PORT}", "--include-dashboard=false"]
        return [
            *(
                str(Path(sys.executable).parent / "ray"),
                "start",
                "--block",
                f"--node-ip-address={self.address}",
            ),
            *(where if self._is_head else [f"--address={self.cluster.address}"]),
            *([f"--labels={self._label}"] if self._label else []),
            *("--num-cpus=0", "--num-gpus=0", "--object-store-memory=80000000", "--disable-usage-stats"),
            f"--temp-dir={self.folder}/ray",
            *self._arguments,
        ]

    def _start_docker(self) -> None:
        number = self.address.rpartition(".")[2]
        command = [
            *("dockerd", f"--data-root={self.folder}/docker", f"--exec-root={self.folder}/docker-run"),
            *(f"--pidfile={self.folder}/docker.pid", f"--host=unix://{self.folder}/docker.sock"),
            f"--default-address-pool=base=172.{number}.0.0/16,size=24",
            f"--cgroup-parent=/{self.cluster.folder.name}-{self.name}",
            *("--bridge=none", "--iptables=false", "--ip6tables=false"),
        ]
        with (self.folder / "dockerd.log").open("ab") as log:
            self._dockerd = self.popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)


# Namespaces

NEW_HOST = ("--pid", "--mount", "--fork", "--mount-proc")


class Entered(subprocess.Popen[Any]):
    """A command that nsenter runs in a namespace; signals reach the command."""

    def send_signal(self, sig: int) -> None:
        while self.poll() is None:
            for pid in children_of(self.pid):
                send(pid, sig)
                return


class Init:
    """A process namespace whose first process is this file, run as a program."""

    def __init__(self, before: Sequence[str], log: Path, settings: Mapping[str, object]) -> None:
        told = log.with_suffix(".json")
        told.write_text(json.dumps(settings))
        me = [sys.executable, "-I", "-S", str(Path(__file__).resolve()), str(told)]
        with log.open("ab") as output:
            self._starter = subprocess.Popen(
                [*before, *NEW_HOST, *me],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                bufsize=0,
            )
        assert self._starter.stdin
        assert self._starter.stdout
        self._words, ready = self._starter.stdin, self._starter.stdout
        with ready:
            assert select.select([ready], [], [], START_TIMEOUT)[0], "no namespace"
            assert ready.read(1), f"no namespace: {log.read_text()}"
        self._chain = [self._starter.pid]
        while ids_of(self._chain[-1])[-1] != 1:
            self._chain += children_of(self._chain[-1])
        self.pid = self._chain[-1]
        """Its id outside."""

    def entered(self) -> list[str]:
        """Return what precedes a command that is to run inside."""
        return ["nsenter", f"--target={self.pid}", "--net", "--pid", "--mount", "--"]

    def tell(self, word: str) -> None:
        """Tell it to ``start`` or to ``stop`` what it supervises."""
        self._words.write(word.encode() + b"\n")

    def kill(self) -> None:
        """End it; the kernel ends whatever else is inside, and only then its parent hears of it."""
        # What was begun from outside has stopped there too, where this is frozen.
        outside = {parent_of(pid) for pid in processes_of(self.pid)}
        send(self.pid, signal.SIGKILL)
        for pid in (*outside, *reversed(self._chain)):
            send(pid, signal.SIGCONT)
        self._starter.wait(END_TIMEOUT)
        self._words.close()


def wait_for(holds: Callable[[], object], what: str, log: Path) -> None:
    """Return once something holds; in vain, with the end of a log in the error."""
    give_up = time.monotonic() + START_TIMEOUT
    while not holds():
        assert time.monotonic() < give_up, f"{what}: not in {START_TIMEOUT} s\n{log.read_text()[-4000:]}"
        select.select([], [], [], 0.02)


def send(pid: int, what: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, what)


def stopped(pid: int) -> bool:
    """Stop a process; whether it has stopped, or ended, already."""
    send(pid, signal.SIGSTOP)
    return read(f"/proc/{pid}/stat").rpartition(")")[2].split()[:1] in (["T"], ["t"], ["Z"], ["X"], [])


def read(path: str) -> str:
    """Return what /proc says; "" of a process that is gone."""
    with suppress(OSError):
        return Path(path).read_bytes().decode(errors="replace")
    return ""


def command_of(pid: int) -> str:
    return read(f"/proc/{pid}/cmdline").replace("\0", " ")


def ids_of(pid: int) -> list[int]:
    """Return the ids of a process in its namespaces, from ours inwards."""
    return [
        int(each) for each in read(f"/proc/{pid}/status").partition("NSpid:")[2].partition("\n")[0].split()
    ]


def parent_of(pid: int) -> int:
    """Return the parent of a process; of one that is gone, the process itself."""
    return int((read(f"/proc/{pid}/stat").rpartition(")")[2].split() or ["", pid])[1])


def children_of(pid: int) -> list[int]:
    threads = Path(f"/proc/{pid}/task")
    with suppress(OSError):
        return [int(each) for thread in threads.iterdir() for each in read(f"{thread}/children").split()]
    return []


def processes_of(init: int) -> list[int]:
    """Return the processes in the namespace of an init, and those in namespaces further in."""

    def space(pid: str | int) -> str:
        with suppress(OSError):
            return os.readlink(f"/proc/{pid}/ns/pid")
        return ""

    found = [int(each) for each in os.listdir("/proc") if each.isdigit() and space(each) == space(init)]
    seen = set(found)
    for pid in found:  # which grows
        more = [child for child in children_of(pid) if child not in seen]
        found += more
        seen |= set(more)
    return found


# The init


def supervise(settings: Mapping[str, Any]) -> None:
    """Be the first process of a namespace, until the maker of the cluster has ended."""
    if settings.get("loopback"):
        raise_loopback()
    for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)
    os.write(1, b"!")
    os.close(1)
    argv = settings.get("argv")
    child, wanted, start_at = 0, bool(argv), 0.0
    while True:
        if wanted and not child and time.monotonic() >= start_at:
            child = spawn(argv or [], settings["environ"], settings["log"])
        if select.select([0], [], [], 0.05)[0]:
            word = os.read(0, 100).strip()
            if not word:
                return
            wanted, start_at = word == b"start", 0.0
            if child and not wanted:
                os.kill(child, signal.SIGTERM)
        with suppress(ChildProcessError):
            while ended := os.waitpid(-1, os.WNOHANG)[0]:
                if ended == child:
                    child, start_at = 0, time.monotonic() + RESTART_SECONDS


def spawn(argv: Sequence[str], environ: Mapping[str, str], log: str) -> int:
    null = os.open(os.devnull, os.O_RDONLY)
    to = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    files = [(os.POSIX_SPAWN_DUP2, each, at) for at, each in enumerate((null, to, to))]
    pid = os.posix_spawn(argv[0], argv, environ, file_actions=files, setsid=True, setsigdef=range(1, 16))
    os.close(null)
    os.close(to)
    return pid


def raise_loopback() -> None:
    """Bring up ``lo``, which is down in a new network."""
    get, put, up = 0x8913, 0x8914, 1  # SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP
    with socket.socket() as any_socket:
        flags = fcntl.ioctl(any_socket, get, struct.pack("16sH14x", b"lo", 0))
        (now,) = struct.unpack("16xH14x", flags)
        fcntl.ioctl(any_socket, put, struct.pack("16sH14x", b"lo", now | up))


if __name__ == "__main__":
    supervise(json.loads(Path(sys.argv[1]).read_text()))
