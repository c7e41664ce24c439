"""The CUDA driver's calls on another process: lock, checkpoint, restore and unlock it.

A call of the driver may never return (the other process is frozen, or waits for one that is locked), and a
thread cannot be taken back from it. So the calls are made in a child process, this module run as a program:
it reads a question a line and answers each with a line, JSON both. ``Driver`` holds the conversation. An
answer that does not come in time costs the child its life; the next question starts another. What the driver
made of the call is then to be asked for by ``state``.

The child calls libcuda by ctypes, which needs no package; where that lacks the calls it runs NVIDIA's program
cuda-checkpoint. Both know processes by the ids of their own process namespace, which has to be the host's.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from anvil_mux.command import without_keys
from anvil_mux.errors import BackendError
from anvil_mux.host.starter import answer_to, reap

LIBRARY, PROGRAM = "libcuda.so.1", "cuda-checkpoint"
STATES = ("running", "locked", "checkpointed", "failed", "checkpointing", "restoring")
"""The states at the driver's numbers. Later drivers may know more of them: "state 6"."""
ACTIONS = {
    "lock": "cuCheckpointProcessLock",
    "checkpoint": "cuCheckpointProcessCheckpoint",
    "restore": "cuCheckpointProcessRestore",
    "unlock": "cuCheckpointProcessUnlock",
}
GET_STATE, GET_THREAD = "cuCheckpointProcessGetState", "cuCheckpointProcessGetRestoreThreadId"
KILL_SECONDS = 5.0
"""Seconds for the child to end after SIGKILL; one that hangs in the kernel is left behind."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds that a call may take before it counts as hanging."""

    start: float = 30.0
    """The start of the child and the driver; slow on many GPUs that nobody uses."""
    question: float = 15.0
    lock: float = 10.0
    """The driver itself gives up then, if GPU work launched before goes on; the process runs on."""
    move: float = 180.0
    """The memory of one process, one way."""

    def of(self, action: str) -> float:
        return {"lock": self.lock + self.question, "unlock": self.question}.get(action, self.move)


class Driver:
    """One conversation, for one thread. BackendError where the driver refuses, or does not answer in time."""

    def __init__(self, limits: Limits = Limits(), *, library: str = LIBRARY, program: str = PROGRAM) -> None:
        self._limits = limits
        self._command = [sys.executable, "-m", __name__, "--library", library, "--program", program]
        self._child: subprocess.Popen[bytes] | None = None
        self._complaints = -1
        """The file that the child and the driver print to."""

    def __enter__(self) -> Driver:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def tool(self) -> str:
        """Return which is used, "library" or "program"; BackendError where there is neither, or no GPU."""
        return str(self._ask("tool", {"do": "tool"}, self._limits.question))

    def state(self, pid: int) -> str:
        """Return one of STATES or "state N". A process that does not use CUDA may count as running."""
        return str(self._ask(f"state of process {pid}", {"do": "state", "pid": pid}, self._limits.question))

    def uses_cuda(self, pid: int) -> bool:
        """Whether the process has the thread that the driver restores it with."""
        question = {"do": "thread", "pid": pid}
        return bool(self._ask(f"restore thread of process {pid}", question, self._limits.question))

    def act(self, action: str, pid: int) -> None:
        """Perform one of ACTIONS."""
        question = {"do": action, "pid": pid, "milliseconds": max(1, int(self._limits.lock * 1000))}
        self._ask(f"{action} of process {pid}", question, self._limits.of(action))

    def close(self) -> None:
        """Ends the child, which waits for a question now or has been given up."""
        child, self._child = self._child, None
        if child is None:
            return
        # Its session is its own, and may hold a program that it runs.
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        try:
            child.wait(KILL_SECONDS)
        except subprocess.TimeoutExpired:
            reap(child)  # the driver holds it
        for stream in (child.stdin, child.stdout):
            if stream is not None:
                stream.close()
        os.close(self._complaints)

    def _ask(self, what: str, question: Mapping[str, object], limit: float) -> object:
        if self._child is None:
            self._child = self._start()
            greeting = self._exchange("start", b"", self._limits.start)
            if "error" in greeting:
                self.close()
                raise BackendError(f"the CUDA driver cannot be used: {greeting['error']}")
        answer = self._exchange(what, json.dumps(question).encode() + b"\n", limit)
        if "error" in answer:
            raise BackendError(f"{what}: {answer['error']}")
        return answer["value"]

    def _start(self) -> subprocess.Popen[bytes]:
        # The driver restores a process only if its caller sees every GPU.
        environ = {k: v for k, v in without_keys(os.environ).items() if k != "CUDA_VISIBLE_DEVICES"}
        package = Path(__file__).resolve().parent.parent.parent
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(package), environ.get("PYTHONPATH")]))
        self._complaints = os.memfd_create("complaints")
        try:
            return subprocess.Popen(
                self._command,
                cwd="/",
                env=environ,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._complaints,
                bufsize=0,
                start_new_session=True,
            )
        except OSError as error:
            os.close(self._complaints)
            raise BackendError(f"what calls the CUDA driver cannot be started: {error}") from None

    def _exchange(self, what: str, question: bytes, limit: float) -> dict[str, Any]:
        assert self._child is not None
        try:
            line = answer_to(self._child, question, limit)
            if line is None:
                raise BackendError(f"the CUDA driver did not answer within {limit:g} s ({what})")
            return dict(json.loads(line))
        except (OSError, ValueError):
            reason = self._last_words()
            self.close()
            raise BackendError(f"what calls the CUDA driver broke off ({what}): {reason}") from None
        except BaseException:
            self.close()
            raise

    def _last_words(self) -> str:
        lines = os.pread(self._complaints, 65536, 0).decode("utf-8", "replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "no reason given")


# The child


class Tool(Protocol):
    """A way to call the driver; DriverRefused where it says no."""

    kind: str

    def state(self, pid: int) -> str: ...
    def thread(self, pid: int) -> int: ...
    def act(self, action: str, pid: int, milliseconds: int) -> None: ...


class DriverRefused(Exception):
    """The driver says no, in its own words."""


class LockArgs(ctypes.Structure):
    """CUcheckpointLockArgs. The arguments of the other calls are optional, and left out."""

    _fields_ = [
        ("timeoutMs", ctypes.c_uint),
        ("reserved0", ctypes.c_uint),
        ("reserved1", ctypes.c_uint64 * 7),
    ]


class Library:
    """The library libcuda, loaded into this process; OSError where there is none, or it is too old."""

    kind = "library"

    def __init__(self, name: str) -> None:
        self._cuda = ctypes.CDLL(name)
        missing = [
            call for call in (*ACTIONS.values(), GET_STATE, GET_THREAD) if not hasattr(self._cuda, call)
        ]
        if missing:
            raise OSError(f"{name} has no {missing[0]} (driver 570 or later has)")
        # A restore needs it, unless the GPU is in persistence mode.
        self._call("cuInit", ctypes.c_uint(0))

    def state(self, pid: int) -> str:
        number = ctypes.c_int()
        self._call(GET_STATE, ctypes.c_int(pid), ctypes.byref(number))
        return STATES[number.value] if 0 <= number.value < len(STATES) else f"state {number.value}"

    def thread(self, pid: int) -> int:
        thread = ctypes.c_int()
        self._call(GET_THREAD, ctypes.c_int(pid), ctypes.byref(thread))
        return thread.value

    def act(self, action: str, pid: int, milliseconds: int) -> None:
        lock = ctypes.byref(LockArgs(timeoutMs=milliseconds)) if action == "lock" else None
        self._call(ACTIONS[action], ctypes.c_int(pid), lock)

    def _call(self, name: str, *arguments: Any) -> None:
        result = getattr(self._cuda, name)(*arguments)
        if result:
            raise DriverRefused(f"{name}: {self._error_name(result)}")

    def _error_name(self, result: int) -> str:
        name = ctypes.c_char_p()
        self._cuda.cuGetErrorName(ctypes.c_int(result), ctypes.byref(name))
        return f"{name.value.decode()} ({result})" if name.value else f"error {result}"


class Program:
    """NVIDIA's cuda-checkpoint."""

    kind = "program"

    def __init__(self, path: str) -> None:
        self._path = path

    def state(self, pid: int) -> str:
        return self._run("--get-state", "--pid", str(pid)).lower()

    def thread(self, pid: int) -> int:
        return int(self._run("--get-restore-tid", "--pid", str(pid)))

    def act(self, action: str, pid: int, milliseconds: int) -> None:
        patience = ["--timeout", str(milliseconds)] if action == "lock" else []
        self._run("--action", action, "--pid", str(pid), *patience)

    def _run(self, *words: str) -> str:
        done = subprocess.run(
            [self._path, *words], stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace"
        )
        if done.returncode:
            reason = (done.stderr or done.stdout).strip() or f"exited with code {done.returncode}"
            raise DriverRefused(f"{PROGRAM}: {reason}")
        return done.stdout.strip()


def find_tool(library: str, program: str) -> Tool:
    """The library, or else the program."""
    try:
        return Library(library)
    except OSError as error:
        path = shutil.which(program)
        if path is None:
            raise DriverRefused(f"{error}; and there is no program {program} in PATH") from None
        return Program(path)


def answer(tool: Tool, question: Mapping[str, Any]) -> object:
    match question["do"]:
        case "tool":
            return tool.kind
        case "state":
            return tool.state(question["pid"])
        case "thread":
            # What the driver says of a process without CUDA is an error like any other.
            with suppress(DriverRefused, ValueError):
                return tool.thread(question["pid"])
            return 0
        case action:
            tool.act(action, question["pid"], question["milliseconds"])
            return None


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m anvil_mux.host.cuda_driver")
    parser.add_argument("--library", default=LIBRARY)
    parser.add_argument("--program", default=PROGRAM)
    options = parser.parse_args()
    # Whatever the driver prints must not get among the answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def say(**fields: object) -> None:
        answers.write(json.dumps(fields) + "\n")

    try:
        tool = find_tool(options.library, options.program)
    except DriverRefused as refusal:
        say(error=str(refusal))
        return
    say(value=tool.kind)
    for line in sys.stdin:
        try:
            say(value=answer(tool, json.loads(line)))
        except (DriverRefused, OSError, ValueError) as error:
            say(error=str(error))


if __name__ == "__main__":
    main()
