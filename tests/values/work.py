"""The work that threads do, counted: calls, and what they compute between two calls.

``Work.watch`` has every thread that begins from then on counted by ``sys.setprofile``. Calls are exact. What
C does in between (a parser, a pattern) is told in empty lists that could be made meanwhile, by the CPU time
of the thread alone, so neither the machine nor what else runs on it matters much. A stretch is what a thread
computes between two calls: about as long all others wait.

Run as a program it is anvil-mux itself, which tells its work on a Unix socket: ``python -m tests.values.work
SOCKET ARGUMENTS...``
"""

from __future__ import annotations

import json
import socket
import sys
import threading
from time import thread_time_ns
from types import FrameType
from typing import Any

_LETTING = """
    recv recv_into recvmsg send sendall sendmsg sendfile accept connect close shutdown poll select acquire
    wait read readinto readline write writev pwrite fsync flush decompress compress update digest sleep
    fork_exec getaddrinfo load dlopen collect
"""
LETS_OTHERS_RUN = frozenset(_LETTING.split())
"""What C does without the interpreter's lock, or in proportion to bytes that it copies once."""

OF_REQUESTS = ("request-", "pump", "acceptor", "scheduler", "MainThread")
"""How the threads are called that serve requests, or that requests wait for; others work as time goes."""

WITHOUT_END = frozenset({"events", "follow"})
"""The functions that tell a client what happens until it leaves. They look again every so often, so what they
cost goes by time, and is not work of the request that is counted."""


class Count:
    """The work of one thread since the last mark."""

    __slots__ = ("calls", "cpu", "last", "longest", "mark", "name", "where")

    def __init__(self, name: str) -> None:
        self.name = name
        self.mark = -1
        self.calls = self.cpu = self.longest = 0
        self.where = ""
        self.last = thread_time_ns()


class Work:
    """Counts of all threads; ``mark`` begins anew."""

    def __init__(self) -> None:
        self._mark = 0
        self._of_thread = threading.local()
        self._counts: list[Count] = []
        self._aside: set[str] = set()
        self.list_ns = list_ns()

    def watch(self) -> None:
        threading.setprofile(self.profile)

    def profile(self, frame: FrameType, event: str, arg: Any) -> None:
        now = thread_time_ns()
        count: Count | None = getattr(self._of_thread, "count", None)
        if count is None:
            count = self._of_thread.count = Count(threading.current_thread().name)
            self._counts.append(count)
        if count.mark != self._mark:
            count.mark, count.calls, count.cpu, count.longest, count.where = self._mark, 0, 0, 0, ""
        elif not (event == "c_return" and arg.__name__ in LETS_OTHERS_RUN):
            stretch = now - count.last
            count.cpu += stretch
            if stretch > count.longest:
                count.longest = stretch
                count.where = f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno} ({event})"
        count.calls += 1
        count.last = thread_time_ns()

    def mark(self) -> None:
        """Begin anew; threads that serve an answer without an end are left aside until the next mark."""
        self._aside = {thread.name for thread in threading.enumerate() if _is_without_end(thread)}
        self._mark += 1

    def done(self) -> dict[str, Any]:
        """What was done since the last mark: calls, what was computed, and the longest stretch, both in empty
        lists."""
        counts = [
            each
            for each in self._counts
            if each.mark == self._mark and each.name.startswith(OF_REQUESTS) and each.name not in self._aside
        ]
        longest = max(counts, key=lambda each: each.longest, default=Count(""))
        return {
            "calls": sum(each.calls for each in counts),
            "lists": round(sum(each.cpu for each in counts) / self.list_ns),
            "stretch": round(longest.longest / self.list_ns),
            "where": f"{longest.name} {longest.where}",
        }


def _is_without_end(thread: threading.Thread) -> bool:
    frame = sys._current_frames().get(thread.ident or 0)
    while frame is not None:
        if frame.f_code.co_name in WITHOUT_END:
            return True
        frame = frame.f_back
    return False


def list_ns() -> float:
    """The CPU time, in ns, in which an empty list is read and made."""
    text = "[" + "[]," * 100_000 + "[]]"
    best = float("inf")
    for _ in range(5):
        began = thread_time_ns()
        json.loads(text)
        best = min(best, thread_time_ns() - began)
    return best / 100_001


def _tell(work: Work, place: str) -> None:
    server = socket.socket(socket.AF_UNIX)
    server.bind(place)
    server.listen()
    connection, _ = server.accept()
    with connection, connection.makefile("rw") as lines:
        for line in lines:
            told = work.done() if line == "done\n" else {}
            if line == "mark\n":
                work.mark()
            elif line.startswith("print"):
                # On a line of its own, even inside a long line of the log, which a full pipe takes in parts.
                print(f"\n{line}", end="", flush=True)
            lines.write(json.dumps(told) + "\n")
            lines.flush()


def main() -> int:
    from anvil_mux.cli.main import main as anvil_mux

    work = Work()
    threading.Thread(target=_tell, args=(work, sys.argv[1]), name="work", daemon=True).start()
    work.watch()
    return anvil_mux(sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
