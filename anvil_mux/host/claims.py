"""Claims of an anvil-mux that serves, which every other one on the machine sees, of whatever user it is.

A claim is a socket of the kernel with a name that only one can have, and ends with the process that has it.
One is to the containers of a project on its container engine: two would adopt and evict each other's engines,
and the lock in the state folder protects them from programs of the same user alone. Others tell which
GPUs are used. ``StartClaims`` are to the GPUs on which an engine is being started, until others find it
there. An engine that is a process holds claims itself (``engine_claims``), as long as it runs: other users
cannot read its environment. Only programs in the same network namespace see claims.

Anybody may make a claim, so what one says is not more than its maker's word: it keeps engines from a GPU, as
the memory that a process holds there does, and nothing is ended for it.
"""

from __future__ import annotations

import errno
import logging
import os
import pwd
import re
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from anvil_mux.errors import BackendError, MuxError
from anvil_mux.host.docker_api import ContainerEngine, find_endpoint
from anvil_mux.host.gpus import identities
from anvil_mux.host.seam import MACHINE, HostConfig, NotBegun
from anvil_mux.state import state_folder

log = logging.getLogger(__name__)

Identify = Callable[[Iterable[str]], Mapping[str, str]]
"""Tells for each name of a GPU the id by which it is known on this machine."""

SOCKETS = Path("/proc/net/unix")
GPU_CLAIM = "anvil-mux-gpu"
ENGINE_CLAIM = "anvil-mux-engine"
LONGEST = 107
"""Bytes that the name of a socket may have."""
CLAIM_WORD = re.compile(r"[A-Za-z0-9._:-]+")
"""A word of a claim; what anybody else has bound may hold other characters, or none."""
CLAIM_SECONDS = 0.5
"""Seconds between two questions whether a start that waits for a claim was cancelled."""


class GpuClaim(NamedTuple):
    """One GPU that an anvil-mux uses."""

    gpu: str
    pid: int
    project: str

    @property
    def uid(self) -> int | None:
        """The user of its process; None once that has ended."""
        try:
            return os.stat(f"/proc/{self.pid}").st_uid
        except OSError:
            return None

    @property
    def who(self) -> str:
        """The process and the project of its anvil-mux, for people."""
        return f"process {self.pid}{_user(self.pid)}, project {self.project}"


class EngineClaim(NamedTuple):
    """One GPU that an engine which is a process was started on."""

    gpu: str
    uid: int
    """The user of its anvil-mux."""
    project: str
    backend: str

    @property
    def user(self) -> str:
        """The name of the user, for people."""
        with suppress(KeyError, OverflowError):
            return pwd.getpwuid(self.uid).pw_name
        return f"#{self.uid}"  # as sudo has it


def claimed_gpus(environ: Mapping[str, str], identify: Identify = identities) -> list[GpuClaim]:
    """List the GPUs that the anvil-mux of this machine use, by the ids that ``identify`` finds."""
    claims = set()
    for gpu, pid, project in _claims(GPU_CLAIM, 3, environ):
        if pid.isdecimal():
            claims.add(GpuClaim(gpu, int(pid), project))
    ids = identify({claim.gpu for claim in claims})
    return sorted({claim._replace(gpu=ids[claim.gpu]) for claim in claims})


def engine_claims(
    environ: Mapping[str, str], gpus: Iterable[str], mark: str, project: str, backend: str
) -> list[str]:
    """Return the names of the sockets that an engine is to hold; ``mark`` tells them from all others."""
    prefix = f"{ENGINE_CLAIM}/{_digest(environ.get(MACHINE, ''))}"
    names = (f"{prefix}/{gpu}/{os.getuid()}/{mark}/{project}/{backend}" for gpu in gpus)
    return [name[:LONGEST] for name in names]


def claimed_engines(environ: Mapping[str, str]) -> list[EngineClaim]:
    """List the engines that hold a claim, of whatever user; a long name of a backend may be cut."""
    claims = set()
    for gpu, uid, _, project, backend in _claims(ENGINE_CLAIM, 5, environ):
        if uid.isdecimal():
            claims.add(EngineClaim(gpu, int(uid), project, backend))
    return sorted(claims)


def _claims(kind: str, count: int, environ: Mapping[str, str]) -> Iterator[list[str]]:
    """Yield what claims of a kind say, in so many words; those that are not as ours are left out."""
    machine = _digest(environ.get(MACHINE, ""))
    with suppress(OSError):
        for line in SOCKETS.read_text(errors="replace").splitlines():
            parts = line.rpartition(" ")[2].removeprefix("@").split("/")
            is_of_kind = parts[:2] == [kind, machine] and len(parts) == count + 2
            if is_of_kind and all(map(CLAIM_WORD.fullmatch, parts)):
                yield parts[2:]


class Claims:
    """The claims of one anvil-mux. One thread at a time."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self._sockets: dict[str, socket.socket] = {}

    def take_project(self, config: HostConfig) -> None:
        """Claim the engines of a project; BackendError if another anvil-mux has them.

        Containers are claimed on their container engine. Processes are claimed by their state folder, whose
        lock is lost if the folder is removed meanwhile.
        """
        for owner in filter(None, self._owners_of(config)):
            place = f"{self._environ.get(MACHINE, '')} {owner} {config.project}"
            name = f"anvil-mux-project/{_digest(place)}"
            if not self._take(name):
                where = " on the same container engine" if config.runtime == "compose" else ""
                raise BackendError(
                    f"another anvil-mux{_holder(name)} serves the project {config.project} already{where}, "
                    "and two would evict each other's engines. Stop it, or give this one another `project`."
                )

    def _owners_of(self, config: HostConfig) -> list[str]:
        """Return what tells the engines of a project from those of another one of its name."""
        if config.runtime == "process":
            return [str(state_folder(config.project, self._environ).resolve())]
        endpoint = find_endpoint(self._environ)
        owners = [endpoint.address]  # as long as the engine does not answer, that is all that is known of it
        with suppress(MuxError):
            owners.append(ContainerEngine(endpoint).identity())
        return owners

    def take_gpus(self, config: HostConfig) -> None:
        """Claim the GPUs of a configuration, and no others any more."""
        prefix = f"{GPU_CLAIM}/{_digest(self._environ.get(MACHINE, ''))}"
        gpus = {gpu for backend in config.backends for gpu in backend.gpus}
        names = {f"{prefix}/{gpu}/{os.getpid()}/{config.project}"[:LONGEST] for gpu in gpus}
        for name in [each for each in self._sockets if each.startswith(GPU_CLAIM) and each not in names]:
            self._sockets.pop(name).close()
        for name in names - self._sockets.keys():
            self._take(name)

    def others(self, config: HostConfig) -> list[str]:
        """Say of each GPU of a configuration which other anvil-mux uses it too."""
        gpus = {gpu for backend in config.backends for gpu in backend.gpus}
        ids = set(identities(gpus).values())
        others = [each for each in claimed_gpus(self._environ) if each.gpu in ids and each.pid != os.getpid()]
        return [f"GPU {each.gpu} is used by another anvil-mux as well: {each.who}" for each in others]

    def close(self) -> None:
        """Give all of them up."""
        for each in self._sockets.values():
            each.close()
        self._sockets.clear()

    def _take(self, name: str) -> bool:
        with suppress(OSError):
            self._sockets[name] = _bound(name)
            return True
        return False


class StartClaims:
    """The claims of one anvil-mux to the GPUs on which it starts engines just now. Any thread.

    Whoever starts an engine checks before who is on its GPUs. Others find the engine there only once it has
    been started, so two that check at the same time would both start one.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._prefix = f"anvil-mux-start/{_digest(environ.get(MACHINE, ''))}"
        self._lock = threading.Lock()
        # Guarded by it:
        self._sockets: dict[str, socket.socket] = {}
        self._uses = Counter[str]()

    @contextmanager
    def held(self, gpus: Iterable[str], remaining: Callable[[], float]) -> Iterator[None]:
        """Hold the claims to GPUs until the block ends; several starts of this program share them.

        NotBegun if another anvil-mux has one for all of the ``remaining`` seconds.
        """
        with ExitStack() as held:
            for gpu in sorted(set(gpus)):  # in one order, so no two programs wait for each other
                self._take(gpu, remaining)
                held.callback(self._release, gpu)
            yield

    def _take(self, gpu: str, remaining: Callable[[], float]) -> None:
        name = f"{self._prefix}/{gpu}"[:LONGEST]
        while not self._try(gpu, name):
            left = remaining()
            if left <= 0:
                raise NotBegun(f"another anvil-mux is starting an engine on GPU {gpu}")
            _await_end(name, min(left, CLAIM_SECONDS))

    def _try(self, gpu: str, name: str) -> bool:
        """Take a claim, or share that of another start; False if another program has it."""
        with self._lock:
            try:
                if not self._uses[gpu]:
                    self._sockets[gpu] = _bound(name)
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    return False
                log.warning("GPU %s cannot be claimed while an engine is started on it: %s", gpu, error)
            self._uses[gpu] += 1
            return True

    def _release(self, gpu: str) -> None:
        with self._lock:
            self._uses[gpu] -= 1
            if not self._uses[gpu] and gpu in self._sockets:
                self._sockets.pop(gpu).close()


def _bound(name: str) -> socket.socket:
    """Return the socket that is a claim; OSError (EADDRINUSE) if another program has it."""
    claim = socket.socket(socket.AF_UNIX)
    try:
        claim.bind(f"\0{name}")
        claim.listen(1)
    except OSError:
        claim.close()
        raise
    return claim


def _await_end(name: str, seconds: float) -> None:
    """Wait until whoever has a claim gives it up: the kernel then ends the connections to its socket."""
    with suppress(OSError), socket.socket(socket.AF_UNIX) as caller:
        caller.settimeout(seconds)
        caller.connect(f"\0{name}")
        caller.recv(1)


def shared_gpus(environ: Mapping[str, str], claims: Iterable[GpuClaim] = ()) -> list[str]:
    """Say which GPUs several anvil-mux use."""
    claims = list(claims) or claimed_gpus(environ)
    by_gpu = {claim.gpu: [each for each in claims if each.gpu == claim.gpu] for claim in claims}
    return [
        f"GPU {gpu} is used by {len(them)} anvil-mux: {'; '.join(each.who for each in them)}"
        for gpu, them in by_gpu.items()
        if len({each.pid for each in them}) > 1
    ]


def _digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()[:12]


def _holder(name: str) -> str:
    """Return the process that has a claim, for people; "" if it is not known."""
    with suppress(OSError), socket.socket(socket.AF_UNIX) as caller:
        caller.settimeout(1.0)
        caller.connect(f"\0{name}")
        size = struct.calcsize("3i")
        pid, _, _ = struct.unpack("3i", caller.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
        return f" (process {pid}{_user(pid)})"
    return ""


def _user(pid: int) -> str:
    """Return the user of a process, for people, if it is another one."""
    with suppress(OSError, KeyError):
        uid = os.stat(f"/proc/{pid}").st_uid
        return "" if uid == os.getuid() else f" of {pwd.getpwuid(uid).pw_name}"
    return ""
