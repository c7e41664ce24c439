"""The parts of the running program, made from its configuration and connected; none of them has begun.

The address is bound here, so that whatever prevents serving is said before anything is touched.
"""

from __future__ import annotations

import os
import resource
import ssl
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from anvil_mux.clock import Clock
from anvil_mux.cluster.cluster import Cluster
from anvil_mux.config.change import Change
from anvil_mux.config.config import Backend, Config
from anvil_mux.config.keys import Keyring
from anvil_mux.config.settings import gib
from anvil_mux.host.local import LocalHost
from anvil_mux.host.seam import LOG_LINES, HostConfig
from anvil_mux.multiplexer.multiplexer import Multiplexer
from anvil_mux.proxy.handler import Handler
from anvil_mux.proxy.relay import Relay
from anvil_mux.proxy.reloads import Reloads
from anvil_mux.proxy.server import Server
from anvil_mux.proxy.threads import CPUs, one_cpu, run_on
from anvil_mux.scheduler.events import Event
from anvil_mux.serve import credentials
from anvil_mux.serve.adoption import Adoption
from anvil_mux.serve.elsewhere import ElsewhereWatch
from anvil_mux.serve.hosts_in_use import HostsInUse
from anvil_mux.serve.learned import Known, LearnedByHost, LearnedFile, recalled
from anvil_mux.serve.logfiles import rotation
from anvil_mux.serve.options import CannotServe, Options
from anvil_mux.serve.pause_file import PauseFile
from anvil_mux.serve.read_ahead import ReadingAhead
from anvil_mux.serve.scraper import Scraper
from anvil_mux.serve.store import RedisStore, Sharing, StoreError
from anvil_mux.serve.terminal import say
from anvil_mux.state import state_folder
from anvil_mux.telemetry import eventlog
from anvil_mux.telemetry.eventlog import EventLog
from anvil_mux.telemetry.feed import Feed
from anvil_mux.telemetry.journal import NORMAL, Journal
from anvil_mux.telemetry.metrics import Metrics
from anvil_mux.telemetry.usage import Usage

FILES, FILES_WITH_TLS = 2, 4
"""The descriptors of a connection whose request is answered."""
OWN_FILES = 256
"""Descriptors that are not for connections, at most."""


@dataclass(frozen=True, slots=True)
class Given:
    """The things that were opened for the program, besides its configuration and options."""

    access: int | None = None
    """The descriptor of the access log."""
    events: int | None = None
    """The descriptor of the event log."""
    lock: int | None = None
    """The descriptor of the project's lock."""
    keys: Keyring = field(default_factory=Keyring)
    tls: ssl.SSLContext | None = None
    read: Callable[[], Config] | None = None
    """Reads the configuration as it is when a reload is asked for, or raises ConfigError."""
    reloading: Callable[[], AbstractContextManager[object]] = nullcontext
    """A context that is entered for as long as a reload takes."""
    cluster: Cluster | None = None
    """The hosts beside this one, which were claimed."""
    fenced: Callable[[str], object] = print
    """A function that is told why another anvil-mux has the cluster now."""


class Parts:
    """All parts, each made from those before it; ``reconfigure`` is what a reload does."""

    def __init__(
        self, config: Config, options: Options, given: Given, reconfigure: Callable[[Config], Change]
    ) -> None:
        self.options = options
        self.say = partial(say, form=options.log_format)
        self.clock = Clock()
        local = LocalHost(HostConfig.of(config), given.lock)
        read, config = config, complete(config, local)
        self.config = config
        """The configuration that is in effect."""
        for warning in [each for each in config.warnings if each not in read.warnings]:
            self.say(f"warning: {warning}")
        self.missing_rights: list[str] = []
        """Warnings about what a checkpoint needs here and we lack, as of the start or the last reload."""
        self.hosts = HostsInUse(local, given.cluster, config)
        self.learned = LearnedFile(state_folder(config.project, os.environ), self.say)
        self.learned_by_host = LearnedByHost()
        self.pause_file = PauseFile(state_folder(config.project, os.environ), self.say)
        self._observe(given)
        self._multiplex(given)
        self._answer(given, reconfigure)

    def _observe(self, given: Given) -> None:
        """Make the observers, which ask parts that are made after them."""
        cpus = one_cpu(os.getpid()) if self.options.pin else CPUs(os.sched_getaffinity(0))
        self.pin = partial(run_on, cpus)
        """Moves the calling thread to where requests are served."""
        self.relay = Relay(
            timeout=self.config.upstream_timeout,
            client_timeout=self.config.client_timeout,
            begin_thread=self.pin,
        )
        self.metrics = Metrics(
            self.config,
            lambda: self.mux.overview.status(),
            costs=lambda: self.mux.overview.costs(),
            footprints=lambda: self.mux.overview.footprints(),
            sight=lambda: self.hosts.sight(),
            round_trips=lambda: self.hosts.round_trips(),
            usage=Usage(state_folder(self.config.project, os.environ) / "usage", self.say),
            circuits=lambda: self._circuits(),
        )
        self.feed = Feed()
        self.journal = Journal(
            self.metrics,
            wall=self.clock.wall,
            feed=self.feed,
            tail=self._last_words,
            housekeeping=self._keep_house,
            access=given.access,
            form=self.options.log_format,
            verbosity=self.options.verbosity,
        )
        self.read_ahead = ReadingAhead()
        self.event_log: EventLog | None = None
        if given.events is not None:
            head = eventlog.header(self.config, self.clock.wall(0.0))
            self.event_log = EventLog(given.events, head, self.say, rotation(self.options))

    def _multiplex(self, given: Given) -> None:
        known = self.learned.read(self.config).with_more(recalled(self.hosts.recall(), self.config))
        hosts = self.hosts.all
        self.mux = Multiplexer(
            self.config,
            hosts,
            log=self._observers(),
            log_leases=self.event_log is not None or self.journal.tells_leases,
            costs=known.costs,
            footprints=known.footprints,
            clock=self.clock,
            has_heard=self.relay.has_heard,
            close_idle=self.relay.pool.end,
        )
        self.adoption = Adoption(hosts, self.mux, self.say)
        self.read_ahead.begin(self.mux.overview.coming_loads, self.hosts.all)
        self.elsewhere = ElsewhereWatch(self.mux.circuits, self.say)
        self.hosts.begin(
            self.mux,
            self.adoption,
            self.clock,
            took=self.journal.told,
            read_ahead=self._tell_read_ahead,
            say=self.say,
            fenced=given.fenced,
        )
        self.mux.facts.expect(backend.name for backend in self.config.backends)
        facts, overview = self.mux.facts, self.mux.overview
        self.scraper = Scraper(overview.resident_replicas, facts.observed, facts.silent)
        self.sharing = self._open_sharing()

    def _answer(self, given: Given, reconfigure: Callable[[Config], Change]) -> None:
        self.reloads = Reloads(
            given.read or (lambda: self.config),
            reconfigure,
            self.mux.facts.reload_failed,
            time.time,
            given.reloading,
        )
        self.handler = Handler(
            self.config,
            self.mux,
            self.relay,
            self.journal,
            metrics=self.journal.scrape,
            checks={self.config.runtime: self._runtime_problem},
            notes={"cluster": self.hosts.problem, "rights": lambda: "; ".join(self.missing_rights)},
            hosts=self.hosts.reports,
            feed=self.feed,
            tail=self._log_tail,
            sight=self.hosts.sight,
            keys=given.keys,
            reloads=self.reloads,
            keep_pause=self.pause_file.keep,
            usage=self._usage_since,
        )
        self.server = self._bind(given.tls)

    def look_at_rights(self) -> None:
        """Find what a checkpoint needs here and we lack, and say what is new of that; asks Docker."""
        before, self.missing_rights = self.missing_rights, self.hosts.local.missing_rights()
        for warning in self.missing_rights:
            if warning not in before and self.options.verbosity >= 0:
                self.say(f"warning: {warning}")

    def _tell_read_ahead(self, backend: Backend, size: int, seconds: float) -> None:
        """Count what was read before a load, and say it."""
        self.journal.told_read_ahead(backend, size, seconds)
        if self.options.verbosity >= NORMAL:
            self.say(f"{backend.name}: {gib(size)} of its weights were read ahead in {seconds:.1f} s")

    def _circuits(self) -> dict[str, str]:
        """Backend elsewhere -> the state of its circuit."""
        found = self.mux.circuits
        return {each.name: found.state(each.name) for each in self.config.backends if each.url}

    def _runtime_problem(self) -> str:
        """Why services cannot be started or stopped on our own host; "" if they can, or if it has none."""
        is_used = any(not backend.host and not backend.url for backend in self.config.backends)
        return self.hosts.local.problem() if is_used else ""

    @property
    def url(self) -> str:
        """The address of the server, as somebody on this machine calls it."""
        host, port = self.server.server_address[:2]
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(str(host), str(host))
        scheme = "https" if self.server.tls else "http"
        return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"

    def _open_sharing(self) -> Sharing | None:
        config = self.config
        if not config.routing_store:
            return None
        try:
            store = RedisStore(config.routing_store, config.project)
        except StoreError as error:
            raise CannotServe(f"x-anvil.routing.store: {error}") from None
        return Sharing(store, self.mux.overview.reports, self.mux.facts.hear, self.say)

    def _bind(self, tls: ssl.SSLContext | None) -> Server:
        host, port = self.config.host, self.config.port
        try:
            return Server(
                (host, port),
                self.handler,
                self.mux,
                max_connections=self.config.max_connections,
                max_bodies=self.config.max_bodies or 0,
                tls=tls,
                client_timeout=self.config.client_timeout,
            )
        except OSError as error:
            advice = "another program has it; name another with --port" if error.errno == 98 else "see --host"
            raise CannotServe(f"cannot listen on {host}:{port} ({error.strerror}): {advice}") from None

    def _observers(self) -> Callable[[Event], object]:
        """The observers of the multiplexer's events, which are called under its lock."""
        observe, read_ahead = self.journal.observe, self.read_ahead.observe
        append = self.event_log.append if self.event_log else None

        def tell_all(event: Event) -> None:
            observe(event)
            read_ahead(event)
            if append:
                append(event)

        return tell_all

    def _keep_house(self) -> None:
        """Tidy up and save what was learned, now and then, in the journal's thread."""
        self.pin()  # it counts what was served
        self.relay.pool.sweep()
        self.metrics.usage.save()
        known = Known(self.mux.overview.costs(), self.mux.overview.footprints())
        self.learned.save(known)
        self.learned_by_host.tell(known, self.hosts.watches, self.config)

    def _usage_since(self, moment: float) -> list[dict[str, Any]]:
        self.journal.flush()
        return self.metrics.usage.since(moment)

    def _last_words(self, backend: str) -> Sequence[str]:
        """The last lines of an engine, kept from its failure: it may have been started anew by now."""
        return self.mux.overview.last_words(backend) or self._log_tail(backend)

    def _log_tail(self, backend: str, lines: int = LOG_LINES) -> list[str]:
        found = self.mux.overview.backend(backend)
        return self.hosts.all.log_tail(found, lines) if found else []


def complete(config: Config, host: LocalHost) -> Config:
    """Complete the configuration by what the machine says, and by the files that are read here."""
    config = bounded(replace(config, said=credentials.digests(config)), host.own_memory())
    memory = host.inventory().memory
    if config.host_memory is not None or memory is None:
        return config
    return replace(config, host_memory=memory * 9 // 10)  # the rest is the system's


def bounded(config: Config, memory: int) -> Config:
    """The configuration with no more memory for bodies and no more connections than there can be."""
    bodies = max(config.max_bodies or memory // 8, config.max_body)
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = (files - min(OWN_FILES, files // 4)) // (FILES_WITH_TLS if config.tls_cert else FILES)
    if config.max_connections <= most or files == resource.RLIM_INFINITY:
        return replace(config, max_bodies=bodies)
    warnings = config.warnings
    if config.origins.get("max_connections") != "default":
        said = f"max_connections is {most} instead of {config.max_connections}"
        warnings = (*warnings, f"{said}: this program may open {files} files (ulimit -n)")
    return replace(config, max_bodies=bodies, max_connections=most, warnings=warnings)
