"""The parts of the running program, made from its configuration and connected, and what a reload does to
them.

Each part is made from those before it. None has begun when all are there, and what happens to the multiplexer
is observed from its first fact on. The address is bound here, so that whatever prevents serving is said
before anything is touched.
"""

from __future__ import annotations

import errno
import os
import resource
import ssl
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from socket import socket
from typing import Any

from anvil_mux.clock import Clock, Worker
from anvil_mux.cluster.cluster import Cluster
from anvil_mux.config.change import Change, compare, within
from anvil_mux.config.config import Backend, Config
from anvil_mux.config.keys import Keyring
from anvil_mux.config.kinds import gib
from anvil_mux.errors import BackendError, MuxError
from anvil_mux.host.local import LocalHost
from anvil_mux.host.seam import LOG_LINES, HostConfig
from anvil_mux.multiplexer.driver import Running
from anvil_mux.multiplexer.multiplexer import Multiplexer
from anvil_mux.proxy.exchange import Relay
from anvil_mux.proxy.handler import Handler, Local
from anvil_mux.proxy.operations import Reloads
from anvil_mux.proxy.reports import STREAMS
from anvil_mux.proxy.server import CPUs, Server, listen, one_cpu, run_on
from anvil_mux.scheduler.events import Event
from anvil_mux.serve.files import Known, LearnedFile, PauseFile, checked, digests, recalled
from anvil_mux.serve.hosts import TOO_MANY, Adoption, ConfiguredHosts, ReadingAhead
from anvil_mux.serve.invocation import CannotServe, Options, say
from anvil_mux.serve.polling import ExternalServers, RedisStore, Scraper, Sharing, StoreError
from anvil_mux.serve.watches import HostWatches
from anvil_mux.state import state_folder
from anvil_mux.telemetry import eventlog
from anvil_mux.telemetry.eventlog import EventLog, Rotation
from anvil_mux.telemetry.journal import NORMAL, VERBOSE, Journal
from anvil_mux.telemetry.metrics import Metrics
from anvil_mux.telemetry.usage import Usage

FILES, FILES_WITH_TLS = 2, 4
"""The descriptors of a connection whose request is answered."""
OWN_FILES = 256
"""Descriptors that are not for connections, at most."""


@dataclass(frozen=True, slots=True)
class Opened:
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
    """All parts; ``reload`` and ``reconfigure`` put another configuration into effect."""

    def __init__(
        self, config: Config, options: Options, opened: Opened, reload: Callable[[], object]
    ) -> None:
        """``reload`` is called when the cluster has other hosts or GPUs than before."""
        self.options = options
        self.say = partial(say, form=options.log_format)
        self.clock = Clock()
        cpus = one_cpu(os.getpid()) if options.pin else CPUs(os.sched_getaffinity(0))
        self.pin = partial(run_on, cpus)
        """Moves the calling thread to where requests are served."""
        local = LocalHost(HostConfig.of(config), opened.lock)
        try:
            shared = local.claim()
        except BackendError as error:
            raise CannotServe(error.message) from None
        for warning in shared:
            self.say(f"warning: {warning}")
        self.config = complete(config, local, in_cluster=opened.cluster is not None)
        """The configuration that is in effect."""
        self._warn(self.config, config)
        self.missing_rights: list[str] = []
        """Warnings about what a checkpoint needs here and we lack, as of the start or the last reload."""
        self.hosts = ConfiguredHosts(local, opened.cluster, self.config)
        folder = state_folder(config.project, os.environ)
        self.pause_file = PauseFile(folder, self.say)
        self.learned = LearnedFile(folder, self.say)
        self._serve_models()
        self._observe(opened, folder)
        self._follow_hosts(opened, reload)
        self._answer(opened)
        for host, why in self.watches.missing().items():
            self.mux.facts.host_lost(host, why)
        self.mux.facts.expect(backend.name for backend in self.config.backends)

    def _serve_models(self) -> None:
        """Make what leases engines to requests, and what sends requests to them."""
        config = self.config
        self.relay = Relay(
            timeout=config.upstream_timeout, client_timeout=config.client_timeout, begin_thread=self.pin
        )
        cluster = self.hosts.cluster
        known = self.learned.read(config).with_more(recalled(cluster.recall() if cluster else {}, config))
        self.mux = Multiplexer(
            config,
            self.hosts,
            log=self._note,
            log_leases=self.options.event_log is not None or self.options.verbosity >= VERBOSE,
            costs=known.costs,
            footprints=known.footprints,
            cards=known.cards,
            clock=self.clock,
            has_heard=self.relay.has_heard,
            close_idle=self.relay.pool.end,
        )

    def _observe(self, opened: Opened, folder: Path) -> None:
        """Make what observes the multiplexer."""
        overview = self.mux.overview
        self.metrics = Metrics(
            self.config,
            overview.status,
            costs=overview.costs,
            footprints=overview.footprints,
            # They tell the journal what steps took, which tells these.
            gpu_uses=lambda: self.watches.gpu_uses(),
            round_trips=lambda: self.watches.round_trips(),
            usage=Usage(folder / "usage", self.say),
            circuits=self._circuits,
        )
        self.journal = Journal(
            self.metrics,
            wall=self.clock.wall,
            tail=self._last_words,
            housekeeping=self._keep_house,
            access=opened.access,
            form=self.options.log_format,
            verbosity=self.options.verbosity,
        )
        self.read_ahead = ReadingAhead(overview.coming_loads, self.hosts)
        self.event_log: EventLog | None = None
        if opened.events is not None:
            head = eventlog.header(self.config, self.clock.wall(0.0))
            self.event_log = EventLog(opened.events, head, self.say, self._rotation())

    def _note(self, event: Event) -> None:
        """Take an event of the multiplexer, under its lock."""
        self.journal.observe(event)
        self.read_ahead.observe(event)
        if self.event_log:
            self.event_log.append(event)

    def _rotation(self) -> Rotation | None:
        """The rotation of the event log; None where there is nothing to set aside: a pipe or a device."""
        path, size = self.options.event_log, self.options.event_log_size
        return Rotation(path, size) if path and size and os.path.isfile(path) else None

    def _follow_hosts(self, opened: Opened, reload: Callable[[], object]) -> None:
        """Make what takes engines over and hears of them, of their hosts, and of servers beside them."""
        self.adoption = Adoption(self.hosts, self.mux, self.say)
        self.watches = HostWatches(
            self.hosts,
            self.mux,
            self.adoption,
            self.clock,
            took=self.journal.note_phase,
            read_ahead=self._count_read_ahead,
            say=self.say,
            fenced=opened.fenced,
            changed=reload,
        )
        self.external = ExternalServers(self.mux.circuits, self.say, read=self.mux.overview.note_card)
        self.external.take(self.config)
        self.background: list[Worker] = [self.read_ahead.worker, self.external.worker]
        """The workers that end as soon as the program is to end."""
        if self.config.routing_mode == "full":
            self.background.append(Scraper(self.mux).worker)
        if self.config.routing_store:
            try:
                store = RedisStore(self.config.routing_store, self.config.project)
            except StoreError as error:
                raise CannotServe(f"x-anvil.routing.store: {error}") from None
            self.background.append(Sharing(store, self.mux, self.say).worker)

    def _answer(self, opened: Opened) -> None:
        """Make what answers clients, and bind the address."""
        self.reloads = Reloads(
            opened.read or (lambda: self.config),
            self.reconfigure,
            self.mux.facts.reload_failed,
            opened.reloading,
        )
        listener = _listening(self.config.host, self.config.port, "--port")
        pages_port = self.config.pages_port
        pages = _listening(self.config.host, pages_port, "pages_port") if pages_port else None
        local = Local(
            self.mux,
            self.journal.feed,
            capture=self.config.capture,
            metrics=self.journal.scrape,
            checks={self.config.runtime: self._runtime_problem, STREAMS: self._stream_problem},
            notes={"cluster": self.watches.problem, "rights": lambda: "; ".join(self.missing_rights)},
            hosts=self.watches.reports,
            tail=self._log_tail,
            gpu_uses=self.watches.gpu_uses,
            reloads=self.reloads,
            keep_pause=self.pause_file.keep,
            usage=self._usage_since,
        )
        self.handler = Handler(
            self.config,
            opened.keys,
            self.mux,
            self.relay,
            local,
            records=self.journal,
            only_local_hosts=ip_address(listener.getsockname()[0]).is_loopback,
        )
        self.server = Server(
            listener,
            self.handler,
            self.mux,
            max_connections=self.config.max_connections,
            max_bodies=self.config.max_bodies or 0,
            tls=opened.tls,
            client_timeout=self.config.client_timeout,
            pages=pages,
        )

    @property
    def url(self) -> str:
        """The address of the server, as somebody on this machine calls it."""
        host, port = self.server.address
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        scheme = "https" if self.server.tls else "http"
        return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"

    # Another configuration

    def reconfigure(self, config: Config) -> Change:
        """Put a configuration into effect; ConfigError if it cannot be used, and nothing has changed.

        One at a time, in the thread that asks.
        """
        self.adoption.is_over.wait()  # else engines of before would be taken for those of the new description
        in_cluster = self.hosts.cluster is not None
        read, before = complete(config, self.hosts.local, in_cluster=in_cluster), self.config
        config, change = within(before, read), compare(before, read)
        keys, tls = checked(config, insecure=self.options.insecure)
        self.hosts.take(config)
        # What runs on a host that is not here is found when it is. What still leaves has requests to end, and
        # its place is taken when it is gone.
        leaving = {each.name for each in self.mux.overview.leaving()}
        added = [each for each in config.backends if each.name in change.added and each.name not in leaving]
        added = [each for each in added if self.watches.is_here(each.host)]
        try:
            with self.watches.busy(each.host for each in added):
                running = self.adoption.fit(self.adoption.running(added))
                refused = self._take_effect(config, keys, tls, running, (*change.changed, *change.removed))
                crowded = [(each, TOO_MANY) for each in added if each.name in refused]
                if remaining := self.adoption.stop_all(crowded):
                    self.mux.facts.adopt(remaining)
                self.mux.facts.looked_at(refused)
        except MuxError:  # a host was lost meanwhile
            if self.config is before:
                self.hosts.take(before)
            raise
        self._warn(config, before)
        for host, why in self.watches.missing().items():
            self.mux.facts.host_lost(host, why)
        self.look_at_rights()
        return change

    def _take_effect(
        self,
        config: Config,
        keys: Keyring,
        tls: ssl.SSLContext | None,
        running: Running,
        leaving: Iterable[str],
    ) -> list[str]:
        """Let those know it first who hear of what follows; requests mean it once its models are there.

        The names of those of ``running`` that cannot stay.
        """
        self.metrics.know(config)
        if self.event_log:
            self.event_log.head(eventlog.header(config, self.clock.wall(0.0)), leaving)
        refused = self.mux.facts.reconfigure(config, running)
        self.config = config
        self.handler.reconfigure(config, keys)
        self.server.max_connections = config.max_connections
        self.server.bodies.most = config.max_bodies or 0
        self.server.tls = tls
        self.external.take(config)
        return refused

    def _warn(self, config: Config, before: Config) -> None:
        """Say the warnings of a configuration that another did not have."""
        for warning in [each for each in config.warnings if each not in before.warnings]:
            self.say(f"warning: {warning}")

    def look_at_rights(self) -> None:
        """Find what a checkpoint needs here and we lack, and say what is new of that; asks Docker."""
        before, self.missing_rights = self.missing_rights, self.hosts.local.missing_rights()
        for warning in self.missing_rights:
            if warning not in before and self.options.verbosity >= NORMAL:
                self.say(f"warning: {warning}")

    # What parts ask of several others

    def _keep_house(self) -> None:
        """Tidy up and save what was learned, now and then, in the journal's thread."""
        self.pin()  # it counts what was served
        self.relay.pool.sweep()
        self.metrics.usage.save()
        overview = self.mux.overview
        known = Known(overview.costs(), overview.footprints(), overview.read_cards())
        self.learned.save(known)
        self.watches.remember(known, self.config)

    def _count_read_ahead(self, backend: Backend, size: int, seconds: float) -> None:
        """Count what was read before a load, and say it."""
        self.journal.note_read_ahead(backend, size, seconds)
        if self.options.verbosity >= NORMAL:
            self.say(f"{backend.name}: {gib(size)} of its weights were read ahead in {seconds:.1f} s")

    def _circuits(self) -> dict[str, str]:
        """External backend -> the state of its circuit."""
        return {each.name: self.mux.circuits.state(each.name) for each in self.config.backends if each.url}

    def _runtime_problem(self) -> str:
        """Why services cannot be started or stopped on our own host; "" if they can, or if it has none."""
        is_used = any(not backend.host and not backend.url for backend in self.config.backends)
        return self.hosts.local.problem() if is_used else ""

    def _stream_problem(self) -> str:
        """Why no stream goes on, "" if they do."""
        return "the thread that moves streams hangs" if self.relay.pump.hangs else ""

    def _usage_since(self, moment: float) -> list[dict[str, Any]]:
        self.journal.flush()
        return self.metrics.usage.since(moment)

    def _last_words(self, backend: str) -> Sequence[str]:
        """The last lines of an engine, kept from its failure: it may have been started anew by now."""
        return self.mux.overview.last_words(backend) or self._log_tail(backend)

    def _log_tail(self, backend: str, lines: int = LOG_LINES) -> list[str]:
        found = self.mux.overview.backend(backend)
        return self.hosts.log_tail(found, lines) if found else []


def _listening(host: str, port: int, setting: str) -> socket:
    """A socket that listens at an address; CannotServe, which says by what ``setting`` another is named."""
    try:
        return listen(host, port)
    except OSError as error:
        in_use = f"another program has it; name another with {setting}"
        advice = in_use if error.errno == errno.EADDRINUSE else "see --host"
        raise CannotServe(f"cannot listen on {host}:{port} ({error.strerror}): {advice}") from None


# What this machine says


def complete(config: Config, host: LocalHost, *, in_cluster: bool) -> Config:
    """Complete the configuration by what the machine says, and by the files that are read here.

    Not ``in_cluster``: no other host can be reached, so it is in vain to wake one.
    """
    if not in_cluster:
        config = replace(config, wakes={})
    config = bounded(replace(config, said=digests(config)), host.own_memory())
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
