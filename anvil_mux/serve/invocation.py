"""The invocation of ``anvil-mux serve``: the options, output and signals that tie it to whoever started it.

That is a person at a terminal, or systemd. What it prints and logs must never stop or hold it. The first
SIGTERM or SIGINT ends it in order, the second at once, and SIGHUP is a reload.

systemd, where it started us, gets notices: ready, stopping, how it goes, and that we do not hang. The
protocol is a datagram of lines to the socket that NOTIFY_SOCKET names, see sd_notify(3). The thread
``notify`` looks before each sign of life: it takes the way that requests take, so whatever holds them up
holds it up. systemd, which then hears nothing for its WatchdogSec, starts the program anew, and that takes
the engines over.
"""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from types import FrameType

from anvil_mux import __version__
from anvil_mux.clock import Worker
from anvil_mux.config.config import Backend, Config
from anvil_mux.config.values import site
from anvil_mux.errors import MuxError
from anvil_mux.telemetry import eventlog, journal
from anvil_mux.telemetry.accesslog import Output, stamp, write_some
from anvil_mux.telemetry.journal import STDERR

INTERRUPTED = 130
RELOAD, END = "reload", "end"
SAME_SECONDS = 0.5
"""Signals so close to the first are one: whoever sends it to a process and its group sends it twice."""
MOST_PLACES = 4
"""How many of the places that a model may have are printed."""
BEAT_SECONDS = 5.0
"""Seconds between two notices how it goes, if the watchdog does not want them more often."""
SEND_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Options:
    """The options that only the command line has."""

    access_log: str = "-"
    """A file, - for standard error, or off."""
    event_log: str | None = None
    event_log_size: int = eventlog.SIZE
    """Bytes after which a new file is begun; 0: never."""
    log_format: str = "human"
    pin: bool = True
    """Whether the threads that serve requests run on one CPU (proxy/server.py)."""
    insecure: bool = False
    watch: bool = False
    """Whether files are watched, and a change of them is a reload."""
    verbosity: int = journal.NORMAL
    takeover: bool = False
    """Whether hosts are claimed that another anvil-mux has."""


class CannotServe(MuxError):
    """Something outside the configuration stands in the way."""


# Output


def say(text: str, form: str = "human") -> None:
    """A message to whoever started the program; ``form``: as ``Options.log_format``."""
    line = f"{stamp(time.time())} anvil-mux: {text}"
    if form == "json":
        line = json.dumps({"ts": stamp(time.time()), "level": "info", "event": "notice", "text": text})
    print(f"{line}\n", end="", file=sys.stderr, flush=True)  # in one piece: several threads say


class StandardError(io.TextIOBase):
    """Standard error of a program that serves: what becomes of a line there must not stop or hold it."""

    def __init__(self) -> None:
        super().__init__()
        self._output = Output(STDERR)

    def write(self, text: str) -> int:
        self._output.write(text)
        return len(text)

    def fileno(self) -> int:
        return STDERR

    def isatty(self) -> bool:
        return os.isatty(STDERR)


def access_log(options: Options) -> AbstractContextManager[int | None]:
    """Open what the access log is written to; None: there is none."""
    if options.access_log not in ("-", "off"):
        return appended("access log", options.access_log)
    silent = options.access_log == "off" or options.verbosity <= journal.QUIET
    return nullcontext(None if silent else STDERR)


@contextmanager
def appended(log: str, path: str | None) -> Iterator[int | None]:
    """Open the file that a log is written to, if it has a path."""
    if path is None:
        yield None
        return
    try:
        file = open(path, "ab", buffering=0)  # noqa: SIM115 (closed by the with below)
    except OSError as error:
        raise CannotServe(f"cannot write the {log} {path}: {error.strerror}") from None
    with file:
        yield file.fileno()


def print_banner(config: Config, url: str, *, with_models: bool, with_key: bool) -> None:
    """Print where it is served and, ``with_models``, what and how to try it, to whoever reads it."""
    with suppress(OSError):
        print(f"anvil-mux {__version__} serves {url} ({', '.join(map(short, config.files))})")
        if with_models:
            places: dict[tuple[str, str], list[str]] = {}
            for backend in config.backends:
                places.setdefault((backend.model, backend.engine), []).append(_place(backend))
            width = max(len(backend.model) for backend in config.backends)
            for (model, engine), where in places.items():
                more = f" or {len(where) - MOST_PLACES} more" if len(where) > MOST_PLACES else ""
                print(f"  {model:{width}}  {engine} on {' or '.join(where[:MOST_PLACES])}{more}")
            print(f"Try it:\n  {_curl_line(url, config.backends[0].model, with_key=with_key)}")
        sys.stdout.flush()


def _place(backend: Backend) -> str:
    if backend.url:
        return site(backend.url).name
    if not backend.gpus:
        return f"{backend.host}, without a GPU" if backend.host else "no GPU"
    return f"GPU {', '.join(backend.gpu_names)}"


def _curl_line(url: str, model: str, *, with_key: bool) -> str:
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "Hello!"}]})
    quoted = body.replace("'", "'\\''")
    key = '-H "Authorization: Bearer $ANVIL_API_KEY" ' if with_key else ""
    return f"curl {url}/v1/chat/completions {key}-H 'Content-Type: application/json' -d '{quoted}'"


def short(file: str) -> str:
    """A path as people would type it here."""
    relative = os.path.relpath(file)
    return file if relative.startswith("..") or os.getcwd() == os.sep else relative


# Signals


class Signals:
    """SIGHUP is a reload, the first SIGTERM or SIGINT an end; the second ends the program at once.

    A handler may run in the middle of anything, even of itself, so it takes no lock and writes no buffer. A
    SIGHUP that comes because the terminal was closed is an end too.
    """

    def __init__(self) -> None:
        self.code: int | None = None
        """The exit code that the program was ended with, if it was ended by itself."""
        self._terminated: float | None = None  # the moment of the first SIGTERM or SIGINT
        self._reloads = 0
        self._reloaded = 0
        # The kernel may give a signal to any thread, but its handler waits for the main thread to run Python
        # again: this wakes that.
        self._woken, self._waker = os.pipe()
        os.set_blocking(self._waker, False)
        signal.set_wakeup_fd(self._waker, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._terminate)
        ends = signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
        self._terminal = ends and _has_terminal()
        self._printed_on = [output for output in (1, 2) if os.isatty(output)]
        signal.signal(signal.SIGHUP, self._hang_up)

    def _hang_up(self, number: int, frame: FrameType | None) -> None:
        if self._terminal and not _has_terminal():
            for output in self._printed_on:  # else the farewell fails
                os.dup2(os.open(os.devnull, os.O_WRONLY), output)
            self._terminate(number, frame)
        else:
            self._reloads += 1

    def _terminate(self, _number: int, _frame: FrameType | None) -> None:
        if self._terminated is None:
            self._terminated = time.monotonic()
        elif time.monotonic() - self._terminated > SAME_SECONDS:
            with suppress(OSError):
                write_some(STDERR, b"anvil-mux: ended at once; engines run on\n", 0.0)
            os._exit(INTERRUPTED)

    def end(self, code: int) -> None:
        """End the program as the first SIGTERM does, which may still come, or have come. Any thread."""
        self.code = code
        with suppress(BlockingIOError):  # it is awake
            os.write(self._waker, b"\0")

    def wait(self) -> str:
        """Signals that come while a reload is under way lead to one more."""
        while self._terminated is None and self.code is None:
            if self._reloads > self._reloaded:
                self._reloaded = self._reloads
                return RELOAD
            os.read(self._woken, 1)
        return END


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True


# systemd


class Notifier:
    """Tells systemd, or nobody if that did not start us. Any thread.

    The variables are taken out of the environment, so that no engine and no command speaks in our place.
    """

    def __init__(self, environ: MutableMapping[str, str]) -> None:
        address = environ.pop("NOTIFY_SOCKET", "")
        microseconds, process = environ.pop("WATCHDOG_USEC", ""), environ.pop("WATCHDOG_PID", "")
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._watchdog = 0.0
        if microseconds.isdecimal() and process in ("", str(os.getpid())):
            self._watchdog = int(microseconds) / 1e6
        self._status = ""

    @property
    def is_heard(self) -> bool:
        return bool(self._address)

    def tell(self, **fields: str) -> None:
        if not self._address:
            return
        message = "".join(f"{name}={value}\n" for name, value in fields.items())
        # Not worth an end of our own: systemd draws its conclusions from silence.
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.settimeout(SEND_SECONDS)
            sender.sendto(message.encode(), self._address)

    @contextmanager
    def reloading(self) -> Iterator[None]:
        """Tell that a reload has begun, and that it is over, however it ended."""
        self.tell(RELOADING="1", MONOTONIC_USEC=str(time.monotonic_ns() // 1000))
        try:
            yield
        finally:
            self.tell(READY="1")

    def worker(self, look: Callable[[], str]) -> Worker:
        """The thread that tells it; ``look`` says in a line how it goes, or "" if it does not go well."""
        return Worker("notify", lambda: self.beat(look))

    def beat(self, look: Callable[[], str]) -> float:
        """Tells it once; after how many seconds it is to be told again."""
        status = look()
        fields = {"WATCHDOG": "1"} if self._watchdog and status else {}
        if status not in ("", self._status):
            fields["STATUS"] = self._status = status
        if fields:
            self.tell(**fields)
        return min(BEAT_SECONDS, self._watchdog / 3) if self._watchdog else BEAT_SECONDS
