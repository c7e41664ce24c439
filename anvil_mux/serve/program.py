"""The running program: builds its parts, takes over what runs, and ends in order.

At the start the state folder is locked (two of us on one project would evict each other's engines) and the
address bound, so that whatever prevents serving is said before anything is touched. Engines that run already
are adopted if they answer for their model, or are in standby; those that do neither, that cannot stay beside
the others or that the configuration no longer has are stopped. Requests are accepted meanwhile: each engine
serves as soon as it is adopted, and nothing is loaded on GPUs while it is not known who holds them. /readyz
and systemd are told that we are ready when all of that is known.

The first SIGTERM or SIGINT drains: requests that run are finished within ``drain_timeout``, new ones refused.
The second ends the program at once. Engines run on or are stopped, as ``on_exit`` says, but one that is still
loading is stopped in any case: no later start could tell how far it is. A crash stops none.
"""

from __future__ import annotations

import errno
import faulthandler
import fcntl
import json
import logging
import os
import resource
import ssl
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from ipaddress import ip_address
from pathlib import Path
from typing import TextIO, TypeVar

from anvil_mux import __version__
from anvil_mux.clock import Clock, Worker
from anvil_mux.config.change import Change, compare, within
from anvil_mux.config.config import Backend, Config, Service
from anvil_mux.config.keys import Keyring
from anvil_mux.config.keys import load as load_keys
from anvil_mux.config.table import SETTINGS
from anvil_mux.errors import ConfigError, MuxError
from anvil_mux.host import gpu
from anvil_mux.host.adopt import Adopter, Awake, Found, Notes, Unfit
from anvil_mux.host.checkpoint import Checkpointer
from anvil_mux.host.gpu_monitor import GpuMonitor
from anvil_mux.host.process import ProcessRuntime, state_folder
from anvil_mux.host.state import write_whole
from anvil_mux.host.swap import Evicted, Runtime, Swapper
from anvil_mux.multiplexer.multiplexer import Multiplexer
from anvil_mux.proxy.affinity import Affinity, CPUs
from anvil_mux.proxy.handler import Handler
from anvil_mux.proxy.relay import Relay
from anvil_mux.proxy.reloads import LOOK_SECONDS, Reloads, Watch
from anvil_mux.proxy.server import Server
from anvil_mux.proxy.tls import build_context
from anvil_mux.scheduler.causes import Cause, sentence
from anvil_mux.scheduler.events import Event
from anvil_mux.serve.learned import Known, LearnedFile
from anvil_mux.serve.load_logs import LoadLogs
from anvil_mux.serve.notify import Notifier
from anvil_mux.serve.remote import RunningMux, announced
from anvil_mux.serve.scraper import Scraper
from anvil_mux.serve.signals import RELOAD, Signals
from anvil_mux.serve.store import RedisStore, Sharing, StoreError
from anvil_mux.telemetry import eventlog, journal
from anvil_mux.telemetry.accesslog import stamp
from anvil_mux.telemetry.eventlog import EventLog
from anvil_mux.telemetry.feed import Feed
from anvil_mux.telemetry.hooks import Telling
from anvil_mux.telemetry.journal import Journal, requests
from anvil_mux.telemetry.metrics import Metrics

log = logging.getLogger(__name__)

FAREWELL_SECONDS = 2.0
"""How long the clients of severed requests may take to be told."""
COMMANDS_SECONDS = 60.0
"""How long a start waits for what one that was killed has Docker do."""
ENGINE_SECONDS = 60.0
"""Seconds that runtimes may take around an engine's own time to stop."""

T = TypeVar("T")
Adopt = Callable[[Mapping[str, str], Mapping[str, Evicted]], list[str]]
"""Takes over what runs (name -> URL) and what is in standby; returns the names of those that cannot stay."""


@dataclass(frozen=True, slots=True)
class Options:
    """The options that only the command line has."""

    access_log: str = "-"
    """A file, - for standard error, or off."""
    event_log: str | None = None
    event_log_size: int = eventlog.SIZE
    """Bytes after which a new file is begun; 0: never."""
    log_format: str = "human"
    pin: bool | None = None
    """Whether the threads of connections stay on one CPU; None: while it is better (affinity.py)."""
    insecure: bool = False
    watch: bool = False
    """Whether files are watched, and a change of them is a reload."""
    verbosity: int = journal.NORMAL


class CannotServe(MuxError):
    """Something outside the configuration stands in the way."""


def build_runtime(config: Config, lock: int | None = None) -> Runtime:
    """Build the runtime; ``lock``: the project's, which commands that outlive us go on to hold."""
    if config.runtime == "process":
        return ProcessRuntime(config)
    from anvil_mux.host.containers import ContainerRuntime

    return ContainerRuntime(config, lock=lock)


def say(text: str, form: str = "human") -> None:
    """A message to whoever started the program; ``form``: as ``Options.log_format``."""
    line = f"anvil-mux: {text}"
    if form == "json":
        line = json.dumps({"ts": stamp(time.time()), "level": "info", "event": "notice", "text": text})
    with _while_the_terminal_is_open():
        print(f"{line}\n", end="", file=sys.stderr, flush=True)  # in one piece: several threads say


@contextmanager
def _while_the_terminal_is_open() -> Iterator[None]:
    """Ignore what is printed on a terminal that was just closed; SIGHUP follows, and ends the program."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.EIO:
            raise


def serve(config: Config, options: Options, read: Callable[[], Config]) -> int:
    """Serves until a signal; the exit code. ConfigError or CannotServe if it does not come to that.

    ``read`` gives the configuration as it is when a reload is asked for, or raises ConfigError.
    """
    keys, tls = _secrets(config, options)
    logging.basicConfig(format="%(asctime)s %(name)s: %(message)s", level=logging.WARNING)
    _raise_file_limit()
    faulthandler.enable()  # systemd's watchdog ends who hangs with SIGABRT: this tells where every thread was
    signals, notifier = Signals(), Notifier(os.environ)
    with locked(config) as lock, _access_log(options) as access, _event_log(options) as events:
        reading = partial(_reloading, notifier)
        program = AnvilMux(
            config, options, access, events, keys=keys, tls=tls, lock=lock, read=read, reloading=reading
        )
        watch = Watch(program.files)
        program.start()
        place = RunningMux(program.url, tuple(os.path.abspath(file) for file in config.files))
        with announced(state_folder(config.project, os.environ), place):
            with _while_the_terminal_is_open():
                _print_banner(config, program.url, options, with_key=bool(keys))
            program.adopt()
            notifier.tell(READY="1")
            beats = notifier.worker(program.look)
            if notifier.is_heard:
                beats.start()
            if options.watch:
                Worker("watch-files", partial(program.watch_files, watch), first=LOOK_SECONDS).start()
            while signals.wait() == RELOAD:
                program.reload()
            notifier.tell(STOPPING="1", EXTEND_TIMEOUT_USEC=f"{program.stop_seconds * 1e6:.0f}")
            program.stop()
            beats.close()
    return 0


@contextmanager
def _reloading(notifier: Notifier) -> Iterator[None]:
    """Tell systemd that a reload has begun, and that it is over, however it ended."""
    notifier.tell(RELOADING="1", MONOTONIC_USEC=str(time.monotonic_ns() // 1000))
    try:
        yield
    finally:
        notifier.tell(READY="1")


class AnvilMux:
    """The running program: all its parts, connected. Used by the main thread."""

    def __init__(
        self,
        config: Config,
        options: Options,
        access: int | None,
        events: int | None = None,
        *,
        keys: Keyring | None = None,
        tls: ssl.SSLContext | None = None,
        lock: int | None = None,
        read: Callable[[], Config] | None = None,
        reloading: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self._config = config = _complete(config)
        self._options = options
        self._say = partial(say, form=options.log_format)
        self._clock = Clock()
        self._runtime = build_runtime(config, lock)
        self._metrics = Metrics(
            config,
            lambda: self._mux.status(),
            costs=lambda: self._mux.costs(),
            footprints=lambda: self._mux.footprints(),
            sight=lambda: self._gpu_monitor.sight(),
        )
        state = state_folder(config.project, os.environ)
        self._learned, self._notes = LearnedFile(state, self._say), Notes(state)
        with _pinned(options.pin):
            relay = Relay(timeout=config.upstream_timeout, client_timeout=config.client_timeout)
            self._pool = relay.pool
            self._affinity = Affinity(
                CPUs(os.sched_getaffinity(0)),
                adapts=options.pin is None,
                elsewhere=relay.pump.cpu_seconds,
            )
            self._feed = Feed()
            self._journal = Journal(
                self._metrics,
                wall=self._clock.wall,
                feed=self._feed,
                tail=self._last_words,
                housekeeping=self._keep_house,
                access=access,
                form=options.log_format,
                verbosity=options.verbosity,
            )
            self._event_log: EventLog | None = None
            if events is not None:
                head = eventlog.header(config, self._clock.wall(0.0))
                self._event_log = EventLog(events, head, self._say, _rotation(options))
            self._load_logs = LoadLogs(
                lambda: self._mux.loading(anew=True),
                self._log_tail,
                lambda backend, said: self._mux.report(backend, said),
            )
            known = self._learned.read(config)
            self._has_gpus = bool(gpu.probe().readings)
            self._mux = Multiplexer(
                config,
                Swapper(
                    self._runtime,
                    probe=gpu.probe if self._has_gpus else None,
                    told=self._journal.told,
                    note=self._notes.note,
                ),
                log=self._observe(),
                log_leases=self._event_log is not None or self._journal.tells_leases,
                costs=known.costs,
                footprints=known.footprints,
                clock=self._clock,
                has_heard=relay.has_heard,
            )
            self._mux.expect(backend.name for backend in config.backends)
            self._all_seen = threading.Event()
            """Set once it is known what ran before we did."""
            used = {id for backend in config.backends for id in backend.gpus}
            self._gpu_monitor = GpuMonitor(used, self._runtime.owner, tell=self._mux.memory_seen)
            self._scraper = Scraper(self._mux.resident_replicas, self._mux.observed, self._mux.silent)
            self._sharing = self._open_sharing()
            self._reloads = Reloads(
                read or (lambda: self._config),
                self._reconfigure,
                lambda why: self._mux.tell("reload_failed", Cause("bad_configuration", detail=why)),
                time.time,
                reloading,
            )
            self._handler = Handler(
                config,
                self._mux,
                relay,
                self._journal,
                metrics=self._journal.scrape,
                checks={config.runtime: self._runtime.problem},
                feed=self._feed,
                tail=self._log_tail,
                sight=self._gpu_monitor.sight,
                keys=keys,
                reloads=self._reloads,
            )
            self._server = self._bind(self._handler, tls)
        host, port = self._server.server_address[:2]
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(str(host), str(host))
        scheme = "https" if tls else "http"
        self.url = f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"

    def _open_sharing(self) -> Sharing | None:
        config = self._config
        if not config.routing_store:
            return None
        try:
            store = RedisStore(config.routing_store, config.project)
        except StoreError as error:
            raise CannotServe(f"x-anvil.routing.store: {error}") from None
        return Sharing(store, self._mux.reports, self._mux.hear, self._say)

    def _bind(self, handler: Handler, tls: ssl.SSLContext | None) -> Server:
        host, port = self._config.host, self._config.port
        try:
            return Server(
                (host, port),
                handler,
                self._mux,
                max_connections=self._config.max_connections,
                affinity=self._affinity,
                tls=tls,
                client_timeout=self._config.client_timeout,
            )
        except OSError as error:
            advice = "another program has it; name another with --port" if error.errno == 98 else "see --host"
            raise CannotServe(f"cannot listen on {host}:{port} ({error.strerror}): {advice}") from None

    def _observe(self) -> Callable[[Event], object]:
        """The observers of the multiplexer's events, which are called under its lock."""
        takers: list[Callable[[Event], object]] = [self._journal.observe, self._load_logs.observe]
        if self._event_log is not None:
            takers.append(self._event_log.append)

        def tell_all(event: Event) -> None:
            for take in takers:
                take(event)

        return tell_all

    def _keep_house(self) -> None:
        """Tidy up and save what was learned, now and then, in the journal's thread."""
        self._pool.sweep()
        self._affinity.look(time.monotonic())
        self._learned.save(Known(self._mux.costs(), self._mux.footprints()))

    def _last_words(self, backend: str, lines: int = 20) -> Sequence[str]:
        """The last lines of an engine, kept from its failure: it may have been started anew by now."""
        return self._mux.last_words(backend) or self._log_tail(backend, lines)

    def _log_tail(self, backend: str, lines: int = 20) -> list[str]:
        found = self._mux.backend(backend)
        return self._runtime.log_tail(found, lines) if found else []

    def start(self) -> None:
        # Keepers start engines, which inherit what their thread may run on: they are never pinned.
        self._mux.start()
        self._clock.spawn(self._watch, "watch")
        self._load_logs.worker.start()
        for number, hook in enumerate(self._config.hooks):
            Telling(hook, self._say).worker(f"hook-{number}", self._feed, self._clock.wall).start()
        if self._config.routing_mode == "full":
            self._scraper.worker.start()
        if self._sharing:
            self._sharing.worker.start()
        with _pinned(self._options.pin):
            self._clock.spawn(self._accept, "acceptor")

    def _accept(self) -> None:
        """The acceptor's life. The threads of connections inherit how it is scheduled."""
        try:
            # A thread that wakes does not push aside the one that holds the interpreter, only to wait for it.
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        except OSError:
            pass  # not allowed here; it serves all the same
        self._server.serve_forever()

    def _watch(self) -> None:
        def died(name: str) -> None:
            backend = self._mux.backend(name)
            if backend is None:
                return
            loaded = self._mux.loaded_at(name)
            try:
                why = self._runtime.ended(backend)
            except MuxError as error:
                why = error.message
            if why:  # else it was started again and holds its GPU; a request will see whether it answers
                self._mux.died(name, why, self._runtime.log_tail(backend), loaded=loaded)

        self._runtime.watch(died)

    # Engines that run already

    def adopt(self) -> None:
        """Takes over what answers or is in standby, and stops what is left.

        Called once, while requests come already.
        """
        self._stop_orphans()
        backends = {backend.name: backend for backend in self._config.backends}
        running = self._running(backends)
        self._mux.looked_at(backends.keys() - running.keys())
        self._each(partial(self._adopt_one, self._adopter()), [(backends[n], running[n]) for n in running])
        self._all_seen.set()
        if self._has_gpus:  # whose processes are whose is known now
            self._gpu_monitor.worker.start()

    def _adopt_one(self, adopter: Adopter, backend: Backend, url: str) -> None:
        """Adopt one backend: its GPUs go to no other before it serves, is in standby, or was stopped."""
        match adopter.look(backend, url):
            case Awake(url):
                refused = self._mux.adopt({backend.name: url})
            case Evicted() as evicted:
                refused = self._mux.adopt({}, {backend.name: evicted})
            case Unfit(why):
                refused = []
                self._stop_engine(backend, f"{why}; the next request for {backend.model} loads it anew")
        if refused:
            self._stop_engine(backend, "it cannot stay beside the others")
        self._mux.looked_at([backend.name])

    def _take_over(self, backends: Iterable[Backend], adopt: Adopt) -> None:
        """Take over the ``backends`` that run already; ``adopt`` is called whether any does or not."""
        found = self._look_at({backend.name: backend for backend in backends})
        unfit = [(backend, each.why) for backend, each in found if isinstance(each, Unfit)]
        self._stop_engines([(b, f"{why}; the next request for {b.model} loads it anew") for b, why in unfit])
        awake = {backend.name: each.url for backend, each in found if isinstance(each, Awake)}
        standby = {backend.name: each for backend, each in found if isinstance(each, Evicted)}
        refused = adopt(awake, standby)
        late = [backend for backend, _ in found if backend.name in refused]
        self._stop_engines([(backend, "it cannot stay beside the others") for backend in late])

    def _look_at(self, backends: Mapping[str, Backend]) -> list[tuple[Backend, Found]]:
        running = self._running(backends)
        pairs = [(backends[name], url) for name, url in running.items()]
        found = self._each(self._adopter().look, pairs)
        return [(backend, each) for (backend, _), each in zip(pairs, found, strict=True)]

    def _running(self, backends: Mapping[str, Backend]) -> dict[str, str]:
        """The ``backends`` that run, and their addresses."""
        try:
            running = self._runtime.running() if backends else {}
        except MuxError as error:
            self._say(f"cannot see what runs already: {error.message}")
            return {}
        return {name: running[name] for name in backends if name in running}

    def _adopter(self) -> Adopter:
        probe = gpu.probe if self._has_gpus else None
        return Adopter(self._runtime, self._notes, probe=probe, checkpointer=Checkpointer())

    def _stop_engines(self, pairs: Sequence[tuple[Backend, str]]) -> None:
        """Stop engines side by side, each for a reason."""
        self._each(self._stop_engine, pairs)

    @staticmethod
    def _each(do: Callable[[Backend, str], T], pairs: Sequence[tuple[Backend, str]]) -> list[T]:
        """Call a function for each item, side by side; each may take long."""
        with ThreadPoolExecutor(len(pairs) or 1) as pool:
            return list(pool.map(lambda pair: do(*pair), pairs))

    def _stop_orphans(self) -> None:
        """Stops what an earlier start served and the configuration has no longer.

        The names are noted because Docker cannot tell a model from any other service of the project.
        """
        note = state_folder(self._config.project, os.environ) / "services"
        known = {_noted(backend) for backend in self._config.backends}
        earlier = set(note.read_text().split()) if note.exists() else set()
        orphans = [_of_note(word) for word in sorted(earlier - known)]
        left = {_noted(b) for b in orphans if not self._stop_engine(b, sentence(Cause("removed")))}
        write_whole(note, "\n".join(sorted(known | left)))

    def _note_services(self, config: Config) -> None:
        """Note the services that are ours, also those of before: should this end first, the next start stops
        them.
        """
        note = state_folder(config.project, os.environ) / "services"
        with suppress(OSError):
            known = {*note.read_text().split(), *map(_noted, config.backends)}
            write_whole(note, "\n".join(sorted(known)))

    # Another configuration

    def reload(self) -> None:
        """Reload without anybody waiting for it: its events tell what came of it, and every problem is
        printed.
        """
        try:
            self._reloads.reload()
        except ConfigError as error:
            for problem in error.problems:
                self._say(problem)
        except MuxError:
            pass  # the program ends
        except Exception:  # a mistake of ours must not end what runs
            log.exception("the reload failed")

    def watch_files(self, watch: Watch) -> float:
        """Looks for changes once; the seconds until it is to look again."""
        if watch.has_news():
            self.reload()
        return LOOK_SECONDS

    def files(self) -> list[str]:
        """The files that the configuration was read from, as far as they are known here."""
        config = self._config
        named = [each for each in _files(config).values() if each]
        return [*config.files, os.path.join(os.path.dirname(config.files[0]), ".env"), *named]

    def _reconfigure(self, config: Config) -> Change:
        """ConfigError: it cannot be used, and nothing has changed. One at a time, in the thread that asks."""
        self._all_seen.wait()  # else engines of before would be taken for those of the new description
        read, before = _complete(config), self._config
        config, change = within(before, read), compare(before, read)
        keys, tls = _secrets(config, self._options)
        _refuse_missing_images(config, {*change.changed, *change.added})
        self._runtime.reconfigure(config)
        self._note_services(config)
        for name in change.changed:
            self._notes.outdate(name)
        for warning in [each for each in config.warnings if each not in before.warnings]:
            self._say(f"warning: {warning}")
        self._config = config
        self._handler.reconfigure(config, keys)
        self._server.max_connections = config.max_connections
        self._server.tls = tls
        self._metrics.know(config)
        self._gpu_monitor.look_at({id for backend in config.backends for id in backend.gpus})
        if self._event_log:
            self._event_log.head(eventlog.header(config, self._clock.wall(0.0)))
        added = [backend for backend in config.backends if backend.name in change.added]
        self._take_over(added, partial(self._mux.reconfigure, config))
        return change

    def _stop_engine(self, backend: Backend, why: str) -> bool:
        self._say(f"stopping {backend.name}: {why}")
        try:
            self._runtime.stop(backend)
        except MuxError as error:
            self._say(f"{backend.name} could not be stopped: {error.message}")
            return False
        return True

    def look(self) -> str:
        """How it goes, in a line; "" if nobody is let in. Hangs as long as somebody holds the lock."""
        status = self._mux.status()
        if self._server.hangs:
            return ""
        here = [model.model for model in status.models if model.state in ("ready", "draining")]
        doing = f"{requests(status.leases)} running, {status.waiting} waiting"
        return f"resident: {', '.join(here) or 'none'}; {doing}"

    # The end

    @property
    def stop_seconds(self) -> float:
        """Seconds that ``stop`` may take."""
        engines = max(backend.stop_timeout for backend in self._config.backends)
        return self._config.drain_timeout + FAREWELL_SECONDS + engines + ENGINE_SECONDS

    def stop(self) -> None:
        """Finishes the requests that run, then leaves or stops the engines."""
        self._reloads.close()
        self._server.refuse()
        self._scraper.worker.close()
        if self._sharing:
            self._sharing.worker.close()
        grace = self._config.drain_timeout
        if leases := self._mux.status().leases:
            self._say(f"waiting up to {grace:g} s for {requests(leases)} (again to end at once)")
        if not self._server.drain(grace):
            self._say(f"severed after {grace:g} s: {requests(self._mux.sever())}")
            self._server.drain(FAREWELL_SECONDS)
        self._mux.close()
        self._load_logs.worker.close()
        self._journal.close()
        if self._event_log:
            self._event_log.close()
        self._leave_engines()
        self._runtime.close()

    def _leave_engines(self) -> None:
        try:
            running = self._runtime.running()
        except MuxError as error:
            self._say(f"cannot see what runs: {error.message}")
            return
        leaving = {backend.name: backend for backend in self._mux.leaving()}
        backends, loading = self._config.backends, self._mux.loading()
        unfit = [(backend, "the configuration has changed") for backend in leaving.values()]
        here = [backend for backend in backends if backend.name not in leaving]
        unfit += [(backend, "it was still loading") for backend in here if backend.name in loading]
        left = [backend for backend in here if backend.name in running and backend.name not in loading]
        if self._config.on_exit == "stop":
            unfit += [(backend, "on_exit: stop") for backend in left]
            left = []
        self._stop_engines(unfit)
        names = ", ".join(backend.name for backend in left)
        self._say(f"stopped; kept running for the next start (on_exit: keep): {names}" if left else "stopped")


def spare_memory() -> int | None:
    """Bytes of host memory that engines may have if nobody says how many; None: the machine does not tell."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * 9 // 10
    except (ValueError, OSError):
        return None


def _complete(config: Config) -> Config:
    """Complete the configuration by what the machine says, and by the files that are read here."""
    config = replace(config, said=_said(config))
    return config if config.host_memory is not None else replace(config, host_memory=spare_memory())


def _files(config: Config) -> dict[str, str | None]:
    """Setting -> the file that it names, if it is set."""
    return {key: getattr(config, key) for key, setting in SETTINGS.items() if setting.is_file}


def _said(config: Config) -> dict[str, str]:
    said = {}
    for key, file in _files(config).items():
        with suppress(OSError):  # told by whoever needs it
            said[key] = sha256(Path(file).read_bytes()).hexdigest() if file else ""
    return said


def _secrets(config: Config, options: Options) -> tuple[Keyring, ssl.SSLContext | None]:
    """ConfigError if they cannot be used, or if too little is asked of other processes."""
    keys, tls = secrets(config)
    if (why := open_address(config, keys)) and not options.insecure:
        raise ConfigError([why])
    return keys, tls


def secrets(config: Config) -> tuple[Keyring, ssl.SSLContext | None]:
    """Read the keys and certificates in other files; ConfigError names all that is wrong with them."""
    problems: list[str] = []
    keys, tls = Keyring(), None
    try:
        keys = load_keys(Path(config.key_file) if config.key_file else None, os.environ)
    except ConfigError as error:
        problems += error.problems
    try:
        tls = _tls_context(config)
    except ConfigError as error:
        problems += error.problems
    if problems:
        raise ConfigError(problems)
    return keys, tls


def open_address(config: Config, keys: Keyring) -> str:
    """Why it should not be listened there, "" if nothing is against it."""
    try:
        loopback = config.host == "localhost" or ip_address(config.host).is_loopback
    except ValueError:
        loopback = False
    if loopback or keys:
        return ""
    return (
        f"listen: {config.host} can be reached by others, and there are no API keys: everybody there "
        "could use and swap your models. Give keys (key_file, or ANVIL_API_KEYS), listen on 127.0.0.1, "
        "or say --insecure if that is meant."
    )


def _refuse_missing_images(config: Config, names: Collection[str]) -> None:
    """Refuse a reload whose new backends lack their images."""
    if config.runtime == "compose":
        from anvil_mux.host.containers import missing_images

        missing: list[str] = []
        with suppress(MuxError):  # Docker is away: who needs an image is told when it is loaded
            missing = missing_images([b for b in config.backends if b.name in names])
        if missing:
            raise ConfigError(missing)


def _tls_context(config: Config) -> ssl.SSLContext | None:
    if config.tls_cert is None or config.tls_key is None:
        return None
    try:
        return build_context(config.tls_cert, config.tls_key)
    except OSError as error:
        files = f"{config.tls_cert} and {config.tls_key}"
        raise ConfigError([f"tls_cert: {files} do not serve: {error.strerror or error}"]) from None


def _raise_file_limit() -> None:
    """A stream takes two descriptors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(hard, 65536) if hard != resource.RLIM_INFINITY else 65536
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


@contextmanager
def _pinned(wanted: bool | None) -> Iterator[None]:
    """Threads that begin within stay on one CPU, which saves them from waiting for each other's caches."""
    allowed = os.sched_getaffinity(0)
    if wanted:
        os.sched_setaffinity(0, {max(allowed)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)


@contextmanager
def locked(config: Config) -> Iterator[int]:
    """One anvil-mux per project: the descriptor of its lock.

    The kernel lets go of it however the program ends, once the commands that it ran have ended too.
    """
    folder = state_folder(config.project, os.environ)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = open(folder / "lock", "a+")  # noqa: SIM115 (closed by the with below)
    except OSError as error:
        advice = "set XDG_STATE_HOME to a folder that can"
        raise CannotServe(f"{folder} cannot be written ({error.strerror}): {advice}") from None
    with lock as file:
        deadline = time.monotonic() + COMMANDS_SECONDS
        while not _lock(file):
            file.seek(0)
            holder = file.read()
            if Path("/proc", holder or "?").exists():
                raise CannotServe(
                    f"another anvil-mux (process {holder}) serves the project {config.project} already, and "
                    "two would evict each other's engines. Stop it, or give this one another `project`."
                )
            if time.monotonic() >= deadline:
                raise CannotServe(
                    f"commands of an anvil-mux that was killed (process {holder or '?'}) still run after "
                    f"{COMMANDS_SECONDS:g} s; is dockerd stuck? `docker ps` tells."
                )
            time.sleep(0.05)
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield file.fileno()


def _lock(file: TextIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


@contextmanager
def _access_log(options: Options) -> Iterator[int | None]:
    if options.access_log in ("-", "off"):
        silent = options.access_log == "off" or options.verbosity <= journal.QUIET
        yield None if silent else journal.STDERR
        return
    with _appending(options.access_log, "access log") as descriptor:
        yield descriptor


@contextmanager
def _event_log(options: Options) -> Iterator[int | None]:
    if options.event_log is None:
        yield None
        return
    with _appending(options.event_log, "event log") as descriptor:
        yield descriptor


def _rotation(options: Options) -> eventlog.Rotation | None:
    """The rotation of the event log; None where there is nothing to set aside: a pipe or a device."""
    path, size = options.event_log, options.event_log_size
    return eventlog.Rotation(path, size) if path and size and os.path.isfile(path) else None


@contextmanager
def _appending(path: str, what: str) -> Iterator[int]:
    try:
        file = open(path, "ab", buffering=0)  # noqa: SIM115 (closed by the with below)
    except OSError as error:
        raise CannotServe(f"cannot write the {what} {path}: {error.strerror}") from None
    with file:
        yield file.fileno()


def _print_banner(config: Config, url: str, options: Options, *, with_key: bool) -> None:
    print(f"anvil-mux {__version__} serves {url} ({', '.join(map(_short, config.files))})")
    if options.verbosity > journal.QUIET:
        width = max(len(backend.model) for backend in config.backends)
        for backend in config.backends:
            where = f"GPU {', '.join(backend.gpus)}" if backend.gpus else "no GPU"
            print(f"  {backend.model:{width}}  {backend.engine} on {where}")
        print(f"Try it:\n  {_curl_line(url, config.backends[0].model, with_key=with_key)}")
    sys.stdout.flush()


def _noted(backend: Backend) -> str:
    """A word by which a later start knows the backend when the configuration has it no longer."""
    service = backend.service
    return f"{service.name}/{service.number}" if service.name else backend.name


def _of_note(word: str) -> Backend:
    service, scaled, number = word.partition("/")
    if not scaled:
        return Backend(word, word)
    return Backend(f"{service}-{number}", service, service=Service(name=service, number=int(number)))


def _curl_line(url: str, model: str, *, with_key: bool) -> str:
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "Hello!"}]})
    quoted = body.replace("'", "'\\''")
    key = '-H "Authorization: Bearer $ANVIL_API_KEY" ' if with_key else ""
    return f"curl {url}/v1/chat/completions {key}-H 'Content-Type: application/json' -d '{quoted}'"


def _short(file: str) -> str:
    """A path as people would type it here."""
    relative = os.path.relpath(file)
    return file if relative.startswith("..") or os.getcwd() == os.sep else relative
