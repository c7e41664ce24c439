"""The two parents that a process of a service may have: anvil-mux itself, or a process that outlives it.

``OwnChildren`` starts children of ours. ``Detached`` is for an agent, which itself is a child of something
that ends its children: there a small program of its own, whose parent is init, starts them and knows their
exit codes. That program is this module run as a file, with Python's own modules alone. It reads a question a
line and answers each with a line, JSON both, and ends with its input; what it has started runs on. What it
inherited and engines must not have (niceness, a score for the OOM killer, signals blocked or ignored) it
takes off once, at its start.

Between either of them and the engine there is a launcher, see launcher.py.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Protocol

LAUNCHER = str(Path(__file__).with_name("launcher.py"))
MARKS = "ANVIL_MUX_"
"""The beginning of the names of the variables by which a run is known: its launcher has them too."""
ANSWER_SECONDS = 30.0
"""How long a start may take; a program on a file system that is away may never begin."""


class StarterLost(Exception):
    """The program that starts processes ended, or hangs: what it was asked for may have been done."""


class Child(Protocol):
    """A process that was started."""

    pid: int

    def code(self, patience: float = 0.0) -> int | None:
        """Return its exit code (negative: the signal), waiting so long for its end; None: not known."""

    def leave(self) -> None:
        """Let it run on; nobody asks any more."""


class Starter(Protocol):
    """Starts processes, each in a session of its own. One thread at a time asks for one child.

    What is returned is its launcher (launcher.py), which ends as the process does, and after all that it
    has started.
    """

    def start(
        self,
        argv: Sequence[str],
        *,
        cwd: str,
        env: Mapping[str, str],
        log: Path,
        claims: Sequence[str] = (),
    ) -> Child:
        """Start a process that prints to ``log``. OSError if it cannot be run; StarterLost: nobody knows.

        ``claims``: the names of sockets that it holds until its end, which every user of the machine sees.
        """

    def close(self) -> None:
        """Free what this object holds; processes run on."""


def _start(
    argv: Sequence[str], cwd: str, env: Mapping[str, str], log: str, claims: Sequence[str]
) -> subprocess.Popen[bytes]:
    """Start a launcher (launcher.py), and by it the process; return the launcher, which ends with it."""
    how = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
    ours, theirs = os.pipe()
    with ExitStack() as opened:
        errors = opened.enter_context(os.fdopen(ours, "rb"))
        try:
            output = opened.enter_context(os.fdopen(os.open(log, how, 0o666), "ab"))
            held = [each for name in claims if (each := _claim(name, opened)) is not None]
            launcher = subprocess.Popen(
                [sys.executable, "-I", "-S", LAUNCHER, log],  # `ps` shows whose launcher it is
                cwd=cwd,
                env={**_libraries(), **{name: env[name] for name in env if name.startswith(MARKS)}},
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=[*held, theirs],
            )
        finally:
            os.close(theirs)
        assert launcher.stdin
        with suppress(BrokenPipeError), launcher.stdin as job:
            job.write(json.dumps([list(argv), dict(env), theirs]).encode())
        number = errors.read()
    if number:
        launcher.wait()
        raise OSError(int(number), os.strerror(int(number)), argv[0])
    return launcher


def _libraries() -> dict[str, str]:
    """Return the variable by which this Python may have found its own libraries."""
    return {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}


def _claim(name: str, opened: ExitStack) -> int | None:
    """Bind a socket of the kernel to a name, for a child; None where that cannot be: it runs without."""
    claim = opened.enter_context(socket.socket(socket.AF_UNIX))
    try:
        claim.bind(f"\0{name}")
    except OSError:
        return None
    return claim.fileno()


def reap(process: subprocess.Popen[bytes]) -> None:
    """Wait for a child's end behind the caller's back: until somebody does, it stays a zombie."""
    threading.Thread(target=process.wait, name="reap", daemon=True).start()


class OwnChildren:
    """Starts children of this process."""

    def start(
        self,
        argv: Sequence[str],
        *,
        cwd: str,
        env: Mapping[str, str],
        log: Path,
        claims: Sequence[str] = (),
    ) -> Child:
        return _OwnChild(_start(argv, cwd, env, str(log), claims))

    def close(self) -> None:
        pass


class _OwnChild:
    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self.pid = process.pid

    def code(self, patience: float = 0.0) -> int | None:
        if not patience:
            return self._process.poll()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(patience)
        return self._process.returncode

    def leave(self) -> None:
        if self._process.poll() is None:
            reap(self._process)


class Detached:
    """Starts processes that are no children of this one, so nobody ends them as such. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Guarded by it, which is held for a question and its answer:
        self._program: subprocess.Popen[bytes] | None = None

    def start(
        self,
        argv: Sequence[str],
        *,
        cwd: str,
        env: Mapping[str, str],
        log: Path,
        claims: Sequence[str] = (),
    ) -> Child:
        question = {"start": [list(argv), cwd, dict(env), str(log), list(claims)]}
        with self._lock:
            self._program = self._program or _begin()
            answer = self._ask(self._program, question)
        if "errno" in answer:
            raise OSError(answer["errno"], answer["why"], argv[0])
        pid: int = answer["pid"]
        return _DetachedChild(pid, lambda: self._code(pid))

    def close(self) -> None:
        with self._lock:
            self._end()

    def _code(self, pid: int) -> int | None:
        """Ask for an exit code, which only the program that has started the process can tell."""
        with self._lock, suppress(StarterLost):
            if self._program:
                code: int | None = self._ask(self._program, {"code": pid}).get("code")
                return code
        return None

    def _ask(self, program: subprocess.Popen[bytes], question: Mapping[str, object]) -> dict[str, Any]:
        line = None
        with suppress(OSError):
            line = answer_to(program, json.dumps(question).encode() + b"\n", ANSWER_SECONDS)
        if not line:
            self._end()
            raise StarterLost("the program that starts processes has ended, or hangs")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _end(self) -> None:
        program, self._program = self._program, None
        if program is not None:
            for stream in (program.stdin, program.stdout):
                with suppress(OSError):
                    assert stream
                    stream.close()


class _DetachedChild:
    def __init__(self, pid: int, ask: Callable[[], int | None]) -> None:
        self.pid = pid
        self._ask = ask
        self._code: int | None = None

    def code(self, patience: float = 0.0) -> int | None:
        if self._code is None:
            self._code = self._ask()
        if self._code is None and patience and _ends(self.pid, patience):
            self._code = self._ask()
        return self._code

    def leave(self) -> None:
        pass


def _begin() -> subprocess.Popen[bytes]:
    """Start the program; its first process has ended by then, so that its parent is init."""
    program = subprocess.Popen(
        [sys.executable, "-I", "-S", __file__],
        cwd="/",
        env={},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    program.wait()
    return program


def answer_to(program: subprocess.Popen[bytes], question: bytes, limit: float) -> bytes | None:
    """The line with which a program answers; None if none comes in time, empty if it has ended."""
    assert program.stdin
    assert program.stdout
    program.stdin.write(question)
    program.stdin.flush()
    return program.stdout.readline() if readable([program.stdout.fileno()], limit) else None


def _ends(pid: int, patience: float) -> bool:
    """Whether the process ends within so many seconds."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(readable([fd], patience))
    finally:
        os.close(fd)


def readable(files: Iterable[int], timeout: float) -> list[int]:
    """The files of which something can be read, once there is one, or so many seconds have passed."""
    poll = select.poll()
    for each in files:
        poll.register(each, select.POLLIN)
    return [file for file, _ in poll.poll(min(timeout * 1000, 2**31 - 1))]


# The program


def main() -> None:
    if os.fork():
        os._exit(0)
    _shed()
    started: dict[int, subprocess.Popen[bytes]] = {}
    for line in sys.stdin:
        question = json.loads(line)
        answer = _begun(question["start"], started) if "start" in question else _ended(question, started)
        print(json.dumps(answer), flush=True)
    os._exit(0)


def _begun(what: list[Any], started: dict[int, subprocess.Popen[bytes]]) -> dict[str, object]:
    argv, cwd, env, log, claims = what
    try:
        child = _start(argv, cwd, env, log, claims)
    except OSError as error:
        return {"errno": error.errno, "why": error.strerror}
    started[child.pid] = child
    return {"pid": child.pid}


def _ended(question: Mapping[str, int], started: dict[int, subprocess.Popen[bytes]]) -> dict[str, object]:
    child = started.get(question["code"])
    code = child.poll() if child else None
    if code is not None:
        del started[question["code"]]
    return {"code": code}


def _shed() -> None:
    """Take off what those who started us are given and engines must not have."""
    os.setsid()
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    with suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, 0)
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("0")


if __name__ == "__main__":
    main()
