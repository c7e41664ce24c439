"""The life of one anvil-mux, from the command ``serve`` to its exit.

At the start the state folder is locked (two of us on one project would evict each other's engines) and the
address bound, so that whatever prevents serving is said before anything is touched. Engines that run already
are adopted if they answer for their model, or are in standby; those that do neither, that cannot stay beside
the others or that the configuration no longer has are stopped. Requests are accepted meanwhile: each engine
serves as soon as it is adopted, and nothing is loaded on GPUs while it is not known who holds them. /readyz
and systemd are told that we are ready when all of that is known.

Another configuration takes effect while requests run: on SIGHUP, by POST /reload, when a file or a host of
the cluster has changed.

The first SIGTERM or SIGINT drains: requests that run are finished within ``drain_timeout``, new ones refused.
The second ends the program at once. Engines run on or are stopped, as ``on_exit`` says. A crash stops none.
"""

from __future__ import annotations

import ctypes
import faulthandler
import logging
import os
import resource
import sys
import threading
from collections.abc import Callable
from contextlib import suppress

from anvil_mux.clock import essential, watch_threads
from anvil_mux.cluster.cluster import Cluster
from anvil_mux.cluster.frames import Claimed, Fenced
from anvil_mux.config.config import Config
from anvil_mux.errors import BackendError, ConfigError, MuxError
from anvil_mux.serve.building import Opened, Parts
from anvil_mux.serve.files import WatchedFiles, checked, files_of, locked
from anvil_mux.serve.invocation import (
    RELOAD,
    CannotServe,
    Notifier,
    Options,
    Signals,
    StandardError,
    access_log,
    appended,
    print_banner,
    say,
)
from anvil_mux.serve.remote import RunningMux, announced
from anvil_mux.state import state_folder
from anvil_mux.telemetry import journal
from anvil_mux.telemetry.accesslog import write_some
from anvil_mux.telemetry.hooks import HookNotifier
from anvil_mux.telemetry.journal import STDERR, requests

M_ARENA_MAX = -8
"""An option of ``mallopt`` (malloc.h)."""
FAREWELL_SECONDS = 5.0
"""How long the clients of severed requests may take to be told."""
HOOK_SECONDS = 2.0
"""How long the commands of hooks may run on while the program ends."""
TAKEN_OVER_CODE = 1
"""The exit code of an anvil-mux whose cluster another one has taken over."""
CRASHED_CODE = 70
"""The exit code of an anvil-mux that has lost a thread it cannot live without (EX_SOFTWARE)."""
LOOK_SECONDS = 0.05
"""Seconds between two looks whether an eviction has ended."""
ENGINE_SECONDS = 60.0
"""Seconds that runtimes may take around an engine's own time to stop."""

log = logging.getLogger(__name__)


def serve(
    config: Config, options: Options, read: Callable[[], Config], cluster: Cluster | None = None
) -> int:
    """Serves until a signal; the exit code. ConfigError or CannotServe if it does not come to that.

    ``read`` gives the configuration as it is when a reload is asked for, or raises ConfigError. ``cluster``
    was reached, and is claimed here.
    """
    keys, tls = checked(config, insecure=options.insecure)
    _prepare_process()
    signals, notifier = Signals(), Notifier(os.environ)
    is_ending = threading.Lock()

    def taken_over(why: str) -> None:
        """End the program, once, since another anvil-mux has the cluster now. Any thread."""
        if is_ending.acquire(blocking=False):
            say(f"{why}: this anvil-mux ends, its engines keep running", options.log_format)
            signals.end(TAKEN_OVER_CODE)

    event_log = appended("event log", options.event_log)
    with locked(config) as lock, access_log(options) as access, event_log as events:
        if cluster:
            _claim(cluster, config, options)
        opened = Opened(
            *(access, events, lock, keys, tls),
            read=read,
            reloading=notifier.reloading,
            cluster=cluster,
            fenced=taken_over,
        )
        program = AnvilMux(config, options, opened)
        watched = WatchedFiles(lambda: files_of(program.parts.config), program.reload)
        program.start()
        place = RunningMux(program.parts.url, tuple(os.path.abspath(file) for file in config.files))
        with announced(state_folder(config.project, os.environ), place):
            verbose = options.verbosity > journal.QUIET
            print_banner(config, program.parts.url, with_models=verbose, with_key=bool(keys))
            program.adopt()
            notifier.tell(READY="1")
            beats = notifier.worker(program.status_line)
            if notifier.is_heard:
                beats.start()
            if options.watch:
                watched.worker.start()
            while signals.wait() == RELOAD:
                program.reload()
            notifier.tell(STOPPING="1", EXTEND_TIMEOUT_USEC=f"{program.stop_seconds * 1e6:.0f}")
            program.stop()
            beats.close()
    return signals.code or 0


def _prepare_process() -> None:
    sys.stderr = StandardError()
    logging.basicConfig(format="%(asctime)s %(name)s: %(message)s", level=logging.WARNING)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)  # a stream takes two
    wanted = min(hard, 65536) if hard != resource.RLIM_INFINITY else 65536
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    # One arena of glibc for all threads: 6 % more requests/s at 16 and 64 connections. Python runs one thread
    # at a time, so they do not wait for each other there.
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1)
    watch_threads(_end_without)
    faulthandler.enable()  # systemd's watchdog ends who hangs with SIGABRT: this tells where every thread was


def _end_without(thread: str) -> None:
    """End the program at once, as a crash does, so that whoever started it starts it anew."""
    with suppress(OSError):
        text = f"anvil-mux: ended, since its thread {thread} has: restart it; engines run on\n"
        write_some(STDERR, text.encode(), 0.0)
    os._exit(CRASHED_CODE)


def _claim(cluster: Cluster, config: Config, options: Options) -> None:
    """Claim the hosts of the cluster; CannotServe if another anvil-mux has one."""
    folder = state_folder(config.project, os.environ)
    try:
        cluster.claim(folder, f"project {config.project}", takeover=options.takeover)
    except (Claimed, Fenced, BackendError) as error:
        cluster.close()
        is_others = not isinstance(error, BackendError)
        why = " (two on one cluster would evict each other's engines)" if is_others else ""
        raise CannotServe(f"{error.message}{why}") from None


class AnvilMux:
    """The running program. Used by the main thread, but for ``reload``."""

    def __init__(self, config: Config, options: Options, opened: Opened) -> None:
        self.parts = Parts(config, options, opened, self.reload)
        self._hooks = [HookNotifier(hook, self.parts.say) for hook in config.hooks]

    def start(self) -> None:
        """Begins to serve, and to hear of what happens on the hosts."""
        # Workers start engines, which inherit what their thread may run on: they are never pinned.
        parts = self.parts
        parts.mux.start()
        if left := parts.pause_file.seconds_left():
            parts.mux.facts.paused(left)
        parts.hosts.local.start()
        parts.watches.start()
        for worker in parts.background:
            worker.start()
        for number, hook in enumerate(self._hooks):
            hook.worker(f"hook-{number}", parts.journal.feed, parts.clock.wall).start()
        parts.clock.spawn(essential("acceptor", self._accept), "acceptor")

    def _accept(self) -> None:
        """The acceptor's life. The threads of connections inherit where it runs and how it is scheduled."""
        self.parts.pin()
        try:
            # A thread that wakes does not push aside the one that holds the interpreter, only to wait for it.
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        except OSError:
            pass  # not allowed here; it serves all the same
        self.parts.server.serve_forever()

    def adopt(self) -> None:
        """Takes over what runs already; called once, while requests come."""
        self.parts.adoption.begin("", self.parts.config.backends)
        self.parts.watches.await_seen()
        self.parts.look_at_rights()

    def status_line(self) -> str:
        """Return the state in a line; "" if an essential thread hangs.

        Hangs as long as the lock is held.
        """
        parts = self.parts
        status = parts.mux.overview.status()
        if not parts.mux.has_turned() or parts.server.hangs or parts.relay.pump.hangs:
            return ""
        here = [model.model for model in status.models if model.offered_state in ("ready", "draining")]
        doing = f"{requests(status.leases)} running, {status.waiting} waiting"
        return f"resident: {', '.join(here) or 'none'}; {doing}"

    def reload(self) -> None:
        """Reload without anybody waiting for it: events tell what came of it, and problems are printed."""
        try:
            self.parts.reloads.reload()
        except ConfigError as error:
            for problem in error.problems:
                self.parts.say(problem)
        except MuxError:
            pass  # the program ends
        except Exception:  # a mistake of ours must not end what runs
            log.exception("the reload failed")

    # The end

    @property
    def _grace(self) -> float:
        """Seconds that requests have to end."""
        return self.parts.config.drain_timeout

    @property
    def stop_seconds(self) -> float:
        """Seconds that ``stop`` may take."""
        return self._grace + FAREWELL_SECONDS + 2 * self._stop_timeout + ENGINE_SECONDS + self._hook_seconds

    @property
    def _hook_seconds(self) -> float:
        """Seconds that commands of hooks have to end."""
        return HOOK_SECONDS if self._hooks else 0.0

    @property
    def _stop_timeout(self) -> float:
        """Seconds that engines, stopped side by side, have to end."""
        return max(backend.stop_timeout for backend in self.parts.config.backends)

    def stop(self) -> None:
        """Finishes the requests that run, then leaves or stops the engines."""
        parts = self.parts
        parts.reloads.close()
        parts.server.refuse()
        for worker in parts.background:
            worker.close()
        grace = self._grace
        if leases := parts.mux.overview.status().leases:
            parts.say(f"waiting up to {grace:g} s for {requests(leases)} (again to end at once)")
        if not parts.server.drain(grace):
            parts.say(f"severed after {grace:g} s: {requests(parts.mux.sever())}")
            parts.server.drain(FAREWELL_SECONDS)
        parts.mux.close()
        self._await_evictions()
        parts.journal.close()
        parts.metrics.usage.save(at_once=True)
        if parts.event_log:
            parts.event_log.close()
        self._leave_engines()
        until = parts.clock.now() + self._hook_seconds
        for hook in self._hooks:
            hook.close(max(until - parts.clock.now(), 0.0))
        parts.watches.close()
        parts.hosts.close()

    def _await_evictions(self) -> None:
        """Let evictions under way end: before, nobody knows which engines run on, and how."""
        overview, clock, is_here = self.parts.mux.overview, self.parts.clock, self.parts.watches.is_here
        until = clock.now() + self._stop_timeout
        while any(is_here(each.host) for each in overview.evicting()) and clock.now() < until:
            clock.latch().wait(LOOK_SECONDS)

    def _leave_engines(self) -> None:
        """Stop what is not to run on, as ``on_exit`` says, and tell what does.

        One that is still loading is stopped in any case: no later start could tell how far it is.
        """
        parts = self.parts
        config, overview = parts.config, parts.mux.overview
        leaving, loading = {backend.name: backend for backend in overview.leaving()}, overview.loading()
        is_here = parts.watches.is_here
        ours = [each for each in config.backends if not each.url and is_here(each.host)]
        here = [each for each in ours if each.name not in leaving]
        unfit = [(backend, "the configuration has changed") for backend in leaving.values()]
        unfit += [(backend, "it was still loading") for backend in here if backend.name in loading]
        left = [each for each in parts.adoption.running(here) if each.name not in loading]
        if config.on_exit == "stop":
            unfit += [(backend, "on_exit: stop") for backend in left]
            left = []
        parts.adoption.stop_all(unfit)
        if not left:
            parts.say("stopped")
            return
        files = "".join(f" --file {file}" for file in config.files)
        parts.say(f"`anvil-mux stop{files}` ends engines that are kept running")
        names = ", ".join(backend.name for backend in left)
        parts.say(f"stopped; kept running for the next start (on_exit: keep): {names}")
