"""The running program: builds its parts, takes over what runs, and ends in order.

At the start the state folder is locked (two of us on one project would evict each other's engines) and the
address bound, so that whatever prevents serving is said before anything is touched. Engines that run already
are adopted if they answer for their model, or are in standby; those that do neither, that cannot stay beside
the others or that the configuration no longer has are stopped. Requests are accepted meanwhile: each engine
serves as soon as it is adopted, and nothing is loaded on GPUs while it is not known who holds them. /readyz
and systemd are told that we are ready when all of that is known.

The first SIGTERM or SIGINT drains: requests that run are finished within ``drain_timeout``, new ones refused.
The second ends the program at once. Engines run on or are stopped, as leaving.py says. A crash stops none.
"""

from __future__ import annotations

import ctypes
import faulthandler
import logging
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial

from anvil_mux.clock import watch_threads
from anvil_mux.cluster.cluster import Cluster
from anvil_mux.cluster.messages import Claimed, Fenced
from anvil_mux.config.config import Config
from anvil_mux.errors import BackendError
from anvil_mux.serve import credentials, reloading
from anvil_mux.serve.building import Given, Parts
from anvil_mux.serve.leaving import leave_engines
from anvil_mux.serve.locking import locked
from anvil_mux.serve.logfiles import access_log, event_log
from anvil_mux.serve.notify import Notifier
from anvil_mux.serve.options import CannotServe, Options
from anvil_mux.serve.remote import RunningMux, announced
from anvil_mux.serve.signals import RELOAD, Signals
from anvil_mux.serve.terminal import StandardError, print_banner, say
from anvil_mux.state import state_folder
from anvil_mux.telemetry import journal
from anvil_mux.telemetry.hooks import Telling
from anvil_mux.telemetry.journal import requests

M_ARENA_MAX = -8
"""An option of ``mallopt`` (malloc.h)."""
FAREWELL_SECONDS = 2.0
"""How long the clients of severed requests may take to be told."""
TAKEN_OVER_CODE = 1
"""The exit code of an anvil-mux whose cluster another one has taken over."""
ENGINE_SECONDS = 60.0
"""Seconds that runtimes may take around an engine's own time to stop."""


def serve(
    config: Config, options: Options, read: Callable[[], Config], cluster: Cluster | None = None
) -> int:
    """Serves until a signal; the exit code. ConfigError or CannotServe if it does not come to that.

    ``read`` gives the configuration as it is when a reload is asked for, or raises ConfigError. ``cluster``
    was reached, and is claimed here.
    """
    keys, tls = credentials.checked(config, insecure=options.insecure)
    sys.stderr = StandardError()
    logging.basicConfig(format="%(asctime)s %(name)s: %(message)s", level=logging.WARNING)
    _raise_file_limit()
    _use_one_arena()
    watch_threads()
    faulthandler.enable()  # systemd's watchdog ends who hangs with SIGABRT: this tells where every thread was
    signals, notifier = Signals(), Notifier(os.environ)
    with locked(config) as lock, access_log(options) as access, event_log(options) as events:
        told = partial(_reloading, notifier)
        fenced = TakenOver(options, signals)
        if cluster:
            _claim(cluster, config, options)
        given = Given(
            *(access, events, lock, keys, tls), read=read, reloading=told, cluster=cluster, fenced=fenced.end
        )
        program = AnvilMux(config, options, given)
        watch = reloading.Watch(lambda: reloading.files(program.parts.config))
        reload = partial(reloading.reload, program.parts)
        program.start()
        place = RunningMux(program.url, tuple(os.path.abspath(file) for file in config.files))
        with announced(state_folder(config.project, os.environ), place):
            verbose = options.verbosity > journal.QUIET
            print_banner(config, program.url, with_models=verbose, with_key=bool(keys))
            program.adopt()
            notifier.tell(READY="1")
            beats = notifier.worker(program.look)
            if notifier.is_heard:
                beats.start()
            if options.watch:
                watch.worker(reload).start()
            while signals.wait() == RELOAD:
                reload()
            notifier.tell(STOPPING="1", EXTEND_TIMEOUT_USEC=f"{program.stop_seconds * 1e6:.0f}")
            program.stop()
            beats.close()
    return fenced.code


class TakenOver:
    """Ends the program when another anvil-mux has taken over the cluster."""

    def __init__(self, options: Options, signals: Signals) -> None:
        self._say = partial(say, form=options.log_format)
        self._signals = signals
        self.code = 0
        """The exit code of the program."""

    def end(self, why: str) -> None:
        """End the program as the first SIGTERM does, once. Any thread."""
        if not self.code:
            self.code = TAKEN_OVER_CODE
            self._say(f"{why}: this anvil-mux ends, its engines keep running")
            self._signals.end()


def _claim(cluster: Cluster, config: Config, options: Options) -> None:
    """Claim the hosts of the cluster; CannotServe if another anvil-mux has one."""
    folder = state_folder(config.project, os.environ)
    try:
        cluster.claim(folder, f"project {config.project}", takeover=options.takeover)
    except (Claimed, Fenced) as error:
        cluster.close()
        why = "two on one cluster would evict each other's engines"
        raise CannotServe(f"{error.message} ({why})") from None
    except BackendError as error:
        cluster.close()
        raise CannotServe(error.message) from None


@contextmanager
def _reloading(notifier: Notifier) -> Iterator[None]:
    """Tell systemd that a reload has begun, and that it is over, however it ended."""
    notifier.tell(RELOADING="1", MONOTONIC_USEC=str(time.monotonic_ns() // 1000))
    try:
        yield
    finally:
        notifier.tell(READY="1")


class AnvilMux:
    """The running program. Used by the main thread."""

    def __init__(self, config: Config, options: Options, given: Given) -> None:
        self.parts = Parts(config, options, given, lambda changed: reloading.reconfigure(self.parts, changed))

    @property
    def url(self) -> str:
        """The address of the server."""
        return self.parts.url

    def start(self) -> None:
        """Begins to serve, and to hear of what happens on the host."""
        # Workers start engines, which inherit what their thread may run on: they are never pinned.
        parts = self.parts
        parts.mux.start()
        if left := parts.pause_file.seconds_left():
            parts.mux.facts.paused(left)
        parts.hosts.local.start()
        parts.hosts.start(lambda: reloading.reload(parts))
        parts.read_ahead.worker.start()
        parts.elsewhere.take(parts.config)
        for number, hook in enumerate(parts.config.hooks):
            Telling(hook, parts.say).worker(f"hook-{number}", parts.feed, parts.clock.wall).start()
        if parts.config.routing_mode == "full":
            parts.scraper.worker.start()
        if parts.sharing:
            parts.sharing.worker.start()
        parts.clock.spawn(self._accept, "acceptor")

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
        self.parts.hosts.await_seen()
        self.parts.look_at_rights()

    # The end

    def look(self) -> str:
        """How it goes, in a line; "" if nobody is let in. Hangs as long as somebody holds the lock."""
        status = self.parts.mux.overview.status()
        if self.parts.server.hangs:
            return ""
        here = [model.model for model in status.models if model.offered_state in ("ready", "draining")]
        doing = f"{requests(status.leases)} running, {status.waiting} waiting"
        return f"resident: {', '.join(here) or 'none'}; {doing}"

    @property
    def stop_seconds(self) -> float:
        """Seconds that ``stop`` may take."""
        config = self.parts.config
        engines = max(backend.stop_timeout for backend in config.backends)
        return config.drain_timeout + FAREWELL_SECONDS + engines + ENGINE_SECONDS

    def stop(self) -> None:
        """Finishes the requests that run, then leaves or stops the engines."""
        parts = self.parts
        parts.reloads.close()
        parts.server.refuse()
        parts.scraper.worker.close()
        parts.elsewhere.close()
        parts.read_ahead.worker.close()
        if parts.sharing:
            parts.sharing.worker.close()
        grace = parts.config.drain_timeout
        if leases := parts.mux.overview.status().leases:
            parts.say(f"waiting up to {grace:g} s for {requests(leases)} (again to end at once)")
        if not parts.server.drain(grace):
            parts.say(f"severed after {grace:g} s: {requests(parts.mux.sever())}")
            parts.server.drain(FAREWELL_SECONDS)
        parts.mux.close()
        parts.journal.close()
        parts.metrics.usage.save(at_once=True)
        if parts.event_log:
            parts.event_log.close()
        leave_engines(parts)
        parts.hosts.close()


def _use_one_arena() -> None:
    """Let all threads allocate from one arena of glibc: 6 % more requests/s at 16 and 64 connections.

    Python runs one thread at a time, so they do not wait for each other there.
    """
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1)


def _raise_file_limit() -> None:
    """A stream takes two descriptors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(hard, 65536) if hard != resource.RLIM_INFINITY else 65536
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
