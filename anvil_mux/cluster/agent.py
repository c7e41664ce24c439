"""The agent of a host: ``LocalHost`` there, for an anvil-mux on another machine, whoever carries the calls.

It takes what the methods below name: configurations and names, never commands or paths. State, logs and what
the owner has learned of this host stay on the host.

Only the anvil-mux that has claimed the host may change anything (``Ownership``). The greatest owner that has
claimed it is remembered also across runs of the agent, so that one that was taken over stays fenced. A lock
of the kernel sees to it that of two agents of one name, such as one that is ending and one that is starting,
only one changes anything; commands that an agent had begun hold it too.

Whatever may take long is a step (``RunningSteps``): it is begun, goes on whatever becomes of who began it,
and its result is asked for. What came of it is kept for its owner, so that nothing is lost where an answer
did not arrive; of steps that are over the last ``MOST_KEPT`` are kept.

In a cluster of Ray the agent lives in an actor (``HostActor``), which hands calls on.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import re
import secrets
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import anvil_mux
from anvil_mux.cluster import frames
from anvil_mux.cluster.frames import (
    AgentAnswer,
    AgentCall,
    Claimed,
    Fenced,
    NotConfigured,
    Owner,
    StepState,
    UnknownStep,
)
from anvil_mux.config.config import Backend
from anvil_mux.errors import BackendError, ConfigError, MuxError
from anvil_mux.host import check
from anvil_mux.host.local import LocalHost, inventory, machine_id
from anvil_mux.host.seam import LOG_LINES, Host, HostConfig, HostNews, Inventory
from anvil_mux.protocol import foreign
from anvil_mux.state import note_holder, open_lock, replace_text, state_folder, text_of, try_lock, write_whole

log = logging.getLogger(__name__)

STEPS = frozenset({"load", "evict", "demote", "stop", "adopt"})
"""The methods of a host that are begun as steps."""
CALLS = frozenset(
    {"running", "orphans", "occupants", "cancel", "ended", "answers", "watch_gpus", "problem", "read_ahead"}
)
"""The methods of a host that its owner may call directly."""
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
"""The pattern for names that become names of files here, or words of commands."""
LONGEST_WAIT = 60.0
"""Seconds that one call may wait for a result or for news."""
MOST_WAITING = 32
"""How many calls may wait for the end of a step: half of those that are carried out at once."""
MOST_KEPT = 1000
"""How many steps that are over are kept."""
MOST_NEWS = 5
"""How many news one answer has: with each may come the last lines of an engine (processes.TAIL_BYTES), of
which a byte may take six characters, and all of them fit into frames.LONGEST_ANSWER."""
MOST_REMEMBERED = 4 << 20
LOCK_SECONDS = 2.0
"""How long a project's lock may be held by others while its engines are about to be served."""
READ_SECONDS = 2.0
"""How long a call waits while another one reads the GPUs."""

RAYS = {
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
    "PYTHONBREAKPOINT": "ray.util.rpdb.set_trace",
    "SPT_NOENV": "1",
}
"""Variables that Ray gives its workers beside RAY_*, by their values; any other value is somebody's own."""


def engine_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that engines and commands are to have, without those that Ray gave us."""
    if not any(name.startswith("RAY_") for name in environ):
        return dict(environ)
    return {
        name: value
        for name, value in environ.items()
        if not name.startswith("RAY_") and RAYS.get(name) != value
    }


class Agent:
    """One host's agent. Any thread.

    ``address``: at which the host's engines are to be reached. ``described``: what the host has, in place of
    what is found. ``make`` makes the host, from its configuration and the descriptor of the agent's lock.
    """

    def __init__(
        self,
        name: str,
        address: str,
        *,
        environ: Mapping[str, str] | None = None,
        described: Inventory | None = None,
        make: Callable[[HostConfig, int], Host] | None = None,
    ) -> None:
        _check_name(name)
        self.name = name
        self.address = address
        self.instance = secrets.token_hex(8)
        self._environ = engine_variables(os.environ if environ is None else environ)
        self._folder = state_folder(f"agent-{name}", self._environ)
        self._make = make or partial(local_host, environ=self._environ, address=address)
        self._configuring = threading.Lock()
        """Held while the host is made or configured anew, which may take seconds."""
        self._described = described
        self._reading = threading.Lock()
        """Held while the GPUs are read, which hangs with their driver; guards ``_last_read``."""
        self._last_read: Inventory | None = None
        self._changed = threading.Condition()
        # Guarded by it:
        self._ownership = Ownership(name, self._folder)
        self._steps = RunningSteps(self._changed)
        self._host: Host | None = None
        self._config: HostConfig | None = None
        self._project: ServedProject | None = None
        self._is_new_owner = False
        """Whether the owner has not configured the host yet."""
        self._known: set[str] = set()
        """The names of all backends that were ever configured."""
        self._news_base = 0
        """The number of the last news of hosts before this one."""
        self._news_last = 0

    def hello(self) -> dict[str, str]:
        """Say what this is, in text alone: also another version of anvil-mux reads it."""
        with self._changed:
            owner, epoch = self._ownership.owner, self._ownership.epoch
        return {
            "version": anvil_mux.__version__,
            "python": platform.python_version(),
            "instance": self.instance,
            "name": self.name,
            "address": self.address,
            "hostname": socket.gethostname(),
            "machine": machine_id(self._environ),
            "epoch": str(epoch),
            "owner": owner.name if owner else "",
            "owner_id": owner.id if owner else "",
        }

    def call(self, text: str | bytes) -> str:
        """Carry out the call that crossed, and return its answer; see frames.py. Errors are answers."""
        try:
            value = self._perform(frames.read(AgentCall, text))
            return frames.dump(AgentAnswer(self.instance, value))
        except Exception as error:
            if not isinstance(error, MuxError):
                log.exception("a mistake in a call")
            return frames.dump(AgentAnswer(self.instance, error=frames.plain_error(error)))

    def close(self) -> None:
        """Free what it holds; engines and steps run on."""
        with self._changed:
            host, self._host = self._host, None
            self._ownership.close()
            self._leave_project()
        if host:
            host.close()

    # Calls

    def _perform(self, call: AgentCall) -> object:
        owner, args = call.owner, call.args
        anybodys: dict[str, Callable[..., object]] = {
            "inventory": self._inventory,
            "log_tail": self._log_tail,
            "recall": self._recall,
            "lacks": _lacks,
        }
        owners: dict[str, Callable[..., object]] = {
            "claim": self._claim,
            "release": self._release,
            "settle": self._settle,
            "reconfigure": self._reconfigure,
            "begin": self._begin,
            "result": self._result,
            "news": self._news,
            "remember": self._remember,
        }
        if method := anybodys.get(call.method):
            return method(*_arguments(method, args))
        if method := owners.get(call.method):
            return method(owner, *_arguments(method, args))
        if call.method in CALLS:
            host = self._owned(owner)
            return getattr(host, call.method)(*_arguments(getattr(Host, call.method), args))
        raise BackendError(f"an agent has no method {call.method}")

    def _log_tail(self, backend: Backend, lines: int = LOG_LINES) -> list[str]:
        return self._host.log_tail(backend, lines) if self._host else []

    def _claim(self, owner: Owner, description: str, takeover: bool) -> None:
        with self._changed:
            if not self._ownership.claim(owner._replace(name=description or owner.name), takeover):
                return
            self._is_new_owner = True
            if self._host:
                self._host.news(sys.maxsize, 0.0)  # what happened before concerns the owner before

    def _release(self, owner: Owner) -> None:
        with self._changed:
            self._ownership.check(owner)
            self._leave_project()
            self._ownership.give_up(owner)

    def _owned(self, owner: Owner) -> Host:
        """Return the host for its owner; Fenced for any other. With or without the lock."""
        with self._changed:
            self._ownership.check(owner)
            if self._host is None:
                raise NotConfigured(f"the agent of host {self.name} has no configuration yet")
            return self._host

    def _inventory(self) -> Inventory:
        """Return what the machine has now; a driver may have been loaded, or a GPU have failed, since.

        While a driver hangs, what was read last; no more than one call waits for it.
        """
        if self._described:
            return self._described
        if self._reading.acquire(timeout=READ_SECONDS):
            try:
                self._last_read = inventory(self.address)
            finally:
                self._reading.release()
        if self._last_read is None:
            raise BackendError(f"the GPUs of host {self.name} cannot be read: their driver hangs")
        return self._last_read

    def _remember(self, owner: Owner, text: str) -> None:
        if len(text) > MOST_REMEMBERED:
            raise BackendError(f"only text of at most {MOST_REMEMBERED} characters is kept")
        with self._changed:
            self._ownership.check(owner)
            try:
                write_whole(self._folder / "remembered", text, 0o600)
            except OSError as error:
                raise BackendError(f"{self._folder} cannot be written: {error.strerror}") from None

    def _recall(self) -> str:
        return text_of(self._folder / "remembered")

    # The host

    def _reconfigure(self, owner: Owner, config: HostConfig) -> None:
        with self._configuring:
            with self._changed:
                self._ownership.check(owner)
                host, before, is_new = self._host, self._config, self._is_new_owner
                lock = self._ownership.hold()
                project = self._project
            if project is None or project.name != config.project:
                project = ServedProject(config.project, self._environ)
            try:
                is_same = before and (before.project, before.runtime) == (config.project, config.runtime)
                if not (host and is_same and _took(host, config, is_new)):
                    host = self._make(config, lock)
                self._take(owner, host, config, project)
            except BaseException:
                if project is not self._project:
                    project.close()
                raise

    def _leave_project(self) -> None:
        """Let `anvil-mux stop --all` on this machine end the engines that run on. Under the lock."""
        project, self._project = self._project, None
        if project:
            project.close()

    def _take(self, owner: Owner, host: Host, config: HostConfig, project: ServedProject) -> None:
        """Have this host from now on, unless the owner has changed meanwhile."""
        with self._changed:
            old = self._host
            try:
                self._ownership.check(owner)
            except MuxError:
                if host is not old:
                    host.close()
                raise
            if old is not None and old is not host:
                left = old.news(0, 0.0)
                last = self._news_base + (left[-1].number if left else 0)
                self._news_base = self._news_last = max(last, self._news_last)
            if project is not self._project:
                self._leave_project()
                self._project = project
            self._host, self._config, self._is_new_owner = host, config, False
            self._known |= {backend.name for backend in config.backends}
        if old is not None and old is not host:
            old.close()

    def _news(self, owner: Owner, after: int, timeout: float) -> list[HostNews]:
        host = self._owned(owner)
        with self._changed:
            base = self._news_base
        news = host.news(max(after - base, 0), min(timeout, LONGEST_WAIT))
        found = [HostNews(each.number + base, each.what) for each in news[:MOST_NEWS]]
        with self._changed:
            self._news_last = max(self._news_last, *(each.number for each in found), 0)
        return found

    # Steps

    def _begin(self, owner: Owner, number: int, method: str, args: tuple[object, ...]) -> None:
        with self._changed:
            self._steps.begin(number, self._step(owner, self._owned(owner), method, args))

    def _step(self, owner: Owner, host: Host, method: str, args: tuple[object, ...]) -> RunningStep:
        if method not in STEPS:
            raise BackendError(f"a host has no step {method}")
        backend, *more = _arguments(getattr(Host, method), args)
        step = RunningStep(owner, backend.name, partial(getattr(host, method), backend, *more))
        if method == "load":
            if backend.name not in self._known:
                raise BackendError(f"{backend.name} is not configured on host {self.name}")
            step.cancel = partial(host.cancel, backend, more[1])
        return step

    def _settle(self, owner: Owner, timeout: float) -> bool:
        with self._changed:
            self._ownership.check(owner)
            return self._steps.settle(min(timeout, LONGEST_WAIT))

    def _result(self, owner: Owner, number: int, timeout: float) -> StepState:
        with self._changed:
            self._ownership.check(owner)
            state = self._steps.result(owner, number, min(timeout, LONGEST_WAIT))
            self._ownership.check(owner)
            return state


# Steps


@dataclass(slots=True)
class RunningStep:
    """A step; what came of it is guarded by the lock of the ``RunningSteps``."""

    owner: Owner
    backend: str
    """The backend's name."""
    run: Callable[[], object]
    cancel: Callable[[], None] = lambda: None
    """Called where nobody waits for it any more."""
    is_done: bool = False
    value: object = None
    error: Exception | None = None


class RunningSteps:
    """All steps of one agent; its methods are called under the lock of ``changed``, which ``begin`` frees."""

    def __init__(self, changed: threading.Condition) -> None:
        self._changed = changed
        self._steps: dict[tuple[int, str, int], RunningStep] = {}  # epoch, id, number
        self.waiting = 0
        """How many calls wait for the end of a step."""

    def begin(self, number: int, step: RunningStep) -> None:
        """Begin a step in a thread of its own; once only, however often it is asked for."""
        key = (*step.owner[:2], number)
        if key in self._steps:
            return
        if any(
            other.backend == step.backend and other.owner[:2] != step.owner[:2] for other in self._under_way()
        ):
            raise BackendError(f"{step.backend}: a step of the owner before is still under way")
        self._steps[key] = step
        self._forget()
        thread = threading.Thread(target=self._perform, args=(step,), name=f"begun-{number}", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            self._end(step, error=BackendError(f"no thread can be started: {error}"))

    def result(self, owner: Owner, number: int, timeout: float) -> StepState:
        """Wait so long for a step's end, unless many calls do; raise its error.

        UnknownStep if it was never begun here.
        """
        step = self._steps.get((*owner[:2], number))
        if step is None:
            raise UnknownStep(f"step {number} is not known here")
        is_awaited = self.waiting < MOST_WAITING
        if is_awaited:
            self.waiting += 1
            try:
                self._changed.wait_for(lambda: step.is_done, timeout)
            finally:
                self.waiting -= 1
        if step.error:
            raise step.error.copy() if isinstance(step.error, MuxError) else step.error
        return StepState(step.is_done, step.value, is_awaited)

    def settle(self, timeout: float) -> bool:
        """Cancel the loads under way, and wait so long for the end of all steps; return whether all ended."""
        for step in self._under_way():
            step.cancel()
        return self._changed.wait_for(lambda: not self._under_way(), timeout)

    def _under_way(self) -> list[RunningStep]:
        return [each for each in self._steps.values() if not each.is_done]

    def _forget(self) -> None:
        over = [key for key, step in self._steps.items() if step.is_done]
        for key in over[: max(len(over) - MOST_KEPT, 0)]:
            del self._steps[key]

    def _perform(self, step: RunningStep) -> None:
        value, failed = None, None
        try:
            value = step.run()
        except Exception as error:
            failed = error
        with self._changed:
            self._end(step, value, failed)

    def _end(self, step: RunningStep, value: object = None, error: Exception | None = None) -> None:
        step.is_done, step.value, step.error = True, value, error
        self._changed.notify_all()


# The host, and what it is asked with


def local_host(
    config: HostConfig,
    lock: int,
    *,
    environ: Mapping[str, str],
    address: str,
    described: Inventory | None = None,
) -> LocalHost:
    """Return this machine as a host whose engines outlive its agent, and which has begun to watch them."""
    host = LocalHost(config, lock, address=address, environ=environ, detached=True, described=described)
    host.start()
    return host


def _lacks(config: HostConfig) -> list[str]:
    """Say what this host lacks for a configuration, which changes nothing; in plain text, which may cross."""
    try:
        return [str(each) for lacking in check.questions() for each in lacking(config)]
    except MuxError as error:
        return [error.message]


def _took(host: Host, config: HostConfig, is_new_owner: bool) -> bool:
    """Configure the host; False: it has to be made anew.

    What would refuse a reload, such as a missing image, does not refuse a start, which a new owner's is.
    """
    try:
        host.reconfigure(config)
    except ConfigError:
        if is_new_owner:
            return False
        raise
    return True


def _arguments(method: Callable[..., object], values: Sequence[object]) -> list[Any]:
    """Read the arguments of a method, as it declares them after the owner; refuse names that are none."""
    found = frames.arguments(method, values)
    _check_names(found)
    return found


def _check_names(args: Iterable[object]) -> None:
    """Refuse a call with a name that cannot be used here, wherever in its arguments that stands."""
    for each in args:
        match each:
            case Backend():
                _check_name(each.name)
                _check_name(each.service_name)
            case HostConfig():
                _check_name(each.project)
                _check_names(each.backends)
            case tuple() | list():
                _check_names(each)


def _check_name(name: str) -> None:
    if not NAME.fullmatch(name):
        raise BackendError(f"{name!r} is no name that can be used here")


# Whom it belongs to


class ServedProject:
    """The lock of a project on this machine, held while an agent serves it.

    As long as it is held, commands such as `anvil-mux stop --all` leave the project's engines alone.
    """

    def __init__(self, name: str, environ: Mapping[str, str]) -> None:
        self.name = name
        folder = state_folder(name, environ)
        try:
            lock = open_lock(folder)
        except OSError as error:
            raise BackendError(f"{folder} cannot be written: {error.strerror}") from None
        self._lock: int | None = lock
        deadline = time.monotonic() + LOCK_SECONDS
        while not try_lock(lock):  # a command may just be looking who holds it
            if time.monotonic() >= deadline:
                self.close()
                raise BackendError(f"another anvil-mux on this machine serves or stops the project {name}")
            time.sleep(0.05)
        note_holder(lock)

    def close(self) -> None:
        """Release the lock, also if that was done before."""
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)


class Ownership:
    """The owner of one host. Not safe for threads: the agent calls it under its lock."""

    def __init__(self, host: str, folder: Path) -> None:
        self._host = host
        self._folder = folder
        self._file = folder / "owner"
        self._lock: int | None = None
        self._is_given_up = False
        self._owner: Owner | None = None
        with suppress(BackendError):  # whoever wants to change anything reads it again, and is told
            self._owner = self._read()

    @property
    def owner(self) -> Owner | None:
        """The owner; None: nobody has claimed the host, or its owner has given it up."""
        return None if self._is_given_up else self._owner

    @property
    def epoch(self) -> int:
        """The greatest epoch that the host was ever claimed with; 0: none."""
        return self._owner.epoch if self._owner else 0

    def claim(self, owner: Owner, takeover: bool) -> bool:
        """Make it the host's owner; return whether it is another than before.

        Claimed, if another one has the host and it is no takeover; Fenced, if a greater one has had it.
        """
        self.hold()
        before = self._owner
        if self.owner and self.owner.id != owner.id and not takeover:
            raise Claimed(f"host {self._host} belongs to {_named(self.owner)}; --takeover takes it over")
        if before and owner[:2] < before[:2]:
            raise Fenced(f"host {self._host} was claimed by {_named(before)}, in epoch {before.epoch}")
        self._write(owner, is_given_up=False)
        return before is None or before[:2] != owner[:2]

    def give_up(self, owner: Owner) -> None:
        """Let anybody claim the host who is greater."""
        self.check(owner)
        self._write(owner, is_given_up=True)

    def check(self, owner: Owner) -> None:
        """Raise Fenced unless the host belongs to this owner."""
        self.hold()
        if self.owner is None:
            raise Fenced(f"host {self._host} belongs to nobody: it has to be claimed")
        if self.owner[:2] != owner[:2]:
            raise Fenced(f"host {self._host} belongs to {_named(self.owner)}, in epoch {self.owner.epoch}")

    def hold(self) -> int:
        """Return the descriptor of the lock of this agent's name; BackendError while others hold it."""
        if self._lock is not None:
            return self._lock
        file = self._folder / "lock"
        try:
            lock = open_lock(self._folder, 0o600)
        except OSError as error:
            raise BackendError(f"{file} of host {self._host} cannot be written: {error.strerror}") from None
        if not try_lock(lock):
            os.close(lock)
            raise BackendError(
                f"another agent of host {self._host}, or a command that it began, still runs there"
            ) from None
        try:
            self._owner = self._read()  # another agent may have written it since
        except BackendError:
            os.close(lock)
            raise
        self._lock = lock
        return lock

    def close(self) -> None:
        """Let another agent of this name have the host."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _read(self) -> Owner | None:
        """Read the owner; BackendError where it cannot be told who that is: it may still be there."""
        try:
            found = foreign.read(self._file.read_text())
            owner = Owner(int(found["epoch"]), str(found["id"]), str(found["name"]))
            self._is_given_up = bool(found["given_up"])
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise BackendError(
                f"{self._file} cannot be read ({type(error).__name__}: {error}), so it is not known to whom"
                f" host {self._host} belongs: remove that file there if no other anvil-mux has the host"
            ) from None
        return owner

    def _write(self, owner: Owner, *, is_given_up: bool) -> None:
        """Write down the owner; also on a full disk, unless nobody has ever claimed the host."""
        if (owner, is_given_up) == (self._owner, self._is_given_up):
            return
        try:
            replace_text(self._file, json.dumps({**owner._asdict(), "given_up": is_given_up}))
        except OSError as error:
            raise BackendError(f"{self._file} cannot be written: {error.strerror}") from None
        self._owner, self._is_given_up = owner, is_given_up


def _named(owner: Owner) -> str:
    return owner.name or f"the anvil-mux {owner.id}"


# In a cluster of Ray


class HostActor:
    """The agent of a host, in the process that Ray started for it there."""

    def __init__(self, name: str) -> None:
        # Not told by who made the actor: Ray makes it again where its host has another address.
        from ray.util import get_node_ip_address

        raylet = int(os.environ.get("RAY_RAYLET_PID") or os.getppid())
        threading.Thread(target=end_with, args=(raylet,), name="raylet", daemon=True).start()
        self._agent = Agent(name, get_node_ip_address())

    # Bytes alone are returned: whoever asks takes nothing else (ray_link.py).

    def hello(self) -> bytes:
        """Return what the agent tells of itself, its version of anvil-mux among it."""
        return frames.dump(self._agent.hello()).encode()

    def call(self, text: bytes) -> bytes:
        """Hand a message to the agent, and its answer back."""
        return self._agent.call(text).encode()


def end_with(pid: int) -> None:
    """End this process with another one.

    Ray notices only after a while that its raylet is gone. Until then this agent would keep the host's lock
    from the one that the next raylet starts.
    """
    try:
        raylet = os.pidfd_open(pid)
    except ProcessLookupError:
        os._exit(1)
    except OSError:
        return  # a kernel before 5.3
    poll = select.poll()
    poll.register(raylet, select.POLLIN)
    poll.poll()
    os._exit(1)
