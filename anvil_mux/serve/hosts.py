"""The hosts of one anvil-mux, and what it has them do: be configured, hand over what runs, stop, read ahead,
and wake.

Each host has its part of the configuration. Engines that run there before we have begun them are taken over,
if they can stay; those that cannot are stopped. Each serves as soon as it is adopted, and its GPUs go to no
other before it serves, is in standby, or was stopped. Swaps are the multiplexer's, and news the watches'
(watches.py).

While requests wait for a host that sleeps it is woken, by packet or command, and awaited: once when the first
request begins to wait, and again now and then while one does, since packets get lost. A host that is not
there within its time, or whose command fails, is reported to the scheduler as one that does not wake: the
requests fail, and it is left alone for a while.
"""

from __future__ import annotations

import math
import os
import socket
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from anvil_mux import command
from anvil_mux.clock import Clock, Worker, side_by_side
from anvil_mux.cluster.channel import AgentSilent, Nowhere
from anvil_mux.cluster.cluster import Cluster
from anvil_mux.cluster.frames import Node
from anvil_mux.cluster.remote import RemoteHost
from anvil_mux.config.config import Backend, Config
from anvil_mux.config.kinds import span
from anvil_mux.config.machines import Wake
from anvil_mux.errors import BackendError, ConfigError, MuxError
from anvil_mux.host.hosts import AnyHost, Hosts
from anvil_mux.host.local import LocalHost
from anvil_mux.host.seam import Awake, Evicted, HostConfig, Unfit
from anvil_mux.multiplexer.multiplexer import Multiplexer
from anvil_mux.scheduler.events import Cause, Event, sentence

TOO_MANY = "it cannot stay beside the others"

READ_AHEAD_SECONDS = 0.25
"""Seconds between two looks which load each queue waits for."""
GATHER_SECONDS = 0.01
"""How long a queue is there before anything is read: a load that need not wait has begun by then."""
MOST_READ_AHEAD = 8
"""The most backends of one host that are read ahead."""
AGAIN_SECONDS = 15.0
"""Seconds after which a host that is still awaited is woken again."""
DISCARD_PORT = 9
"""The UDP port to which packets that wake are sent; network cards do not look at it."""


# Which hosts there are


class ConfiguredHosts(Hosts):
    """All hosts, each with its part of the configuration: the own, those that backends are on, and those that
    are in the cluster. ``cluster`` None: there are no others; one that is named all the same counts as lost.
    """

    def __init__(self, local: LocalHost, cluster: Cluster | None, config: Config) -> None:
        """``local`` has its part of ``config``."""
        # Other threads go through the hosts, so ``by_name`` is replaced as a whole and never altered.
        super().__init__({"": local})
        self.local = local
        self.cluster = cluster
        self.config = config
        self._adding = threading.Lock()
        self._add(config)
        for name in self.others:
            self._configure(name, config)

    @property
    def others(self) -> list[str]:
        """The names of all hosts but the own."""
        return [name for name in self.by_name if name]

    @property
    def nodes(self) -> Mapping[str, Node]:
        """The hosts that are in the cluster, and may be used."""
        return self.cluster.nodes if self.cluster else {}

    def _add(self, config: Config) -> None:
        """Have the hosts that are named, and those that are there."""
        with self._adding:
            known = self.by_name
            named = dict.fromkeys([*(backend.host for backend in config.backends), *self.nodes])
            self.by_name = {**known, **{name: self._remote(name) for name in named if name not in known}}

    def _remote(self, name: str) -> RemoteHost:
        return self.cluster.host(name) if self.cluster else RemoteHost(name, Nowhere(), Clock())

    def _configure(self, name: str, config: Config) -> Sequence[str]:
        """Give a host its part of a configuration; return why it cannot take that.

        Another host that is silent, or fails, is given it later; until then its loads fail.
        """
        try:
            with suppress(AgentSilent, *([BackendError] if name else [])):
                self[name].reconfigure(HostConfig.of(config, name))
        except ConfigError as error:
            return error.problems
        return ()

    def join(self, name: str) -> bool:
        """Have a host that has come into the cluster; whether it was known before, by its name."""
        is_known = name in self.by_name
        self._add(self.config)
        self._configure(name, self.config)
        return is_known

    def take(self, config: Config) -> None:
        """Give each host its part of another configuration; ConfigError if one refuses, and none has it."""
        self._add(config)
        names = [*self.by_name]
        refused = side_by_side(lambda name: self._configure(name, config), names)
        if problems := [problem for each in refused for problem in each]:
            side_by_side(lambda name: self._configure(name, self.config), names)
            raise ConfigError(problems)
        self.config = config

    def close(self) -> None:
        """Let another anvil-mux have the hosts."""
        if self.cluster:
            self.cluster.release()
            self.cluster.close()
        self.local.close()


# What runs there


class Stock(NamedTuple):
    """Backends that run on hosts, as they were found."""

    fit: dict[str, str | Evicted]
    """Backend -> the URL at which it serves, or how it is in standby."""
    unfit: list[tuple[Backend, str]]
    """Backends that cannot be taken over, and why."""


def take_stock(hosts: AnyHost, running: Sequence[Backend]) -> Stock:
    """Ask how backends are that run."""
    stock = Stock({}, [])
    for backend, found in zip(running, side_by_side(hosts.adopt, running), strict=True):
        if isinstance(found, Unfit):
            stock.unfit.append((backend, found.why))
        else:
            stock.fit[backend.name] = found.url if isinstance(found, Awake) else found
    return stock


class Adoption:
    """Takes over engines, and stops them; ``say`` tells whoever started the program why."""

    def __init__(self, hosts: Hosts, mux: Multiplexer, say: Callable[[str], object]) -> None:
        self._hosts = hosts
        self._mux = mux
        self._say = say
        self.is_over = threading.Event()
        """Set once it is known what ran on our own host before we did, or why that cannot be seen now."""
        self.blind: set[str] = set()
        """The hosts of which it could not be seen yet what runs there: each is to be begun again."""

    def begin(self, host: str, backends: Iterable[Backend]) -> None:
        """Take over what answers or is in standby on a host, and stop what is left; requests come already.

        MuxError if the host itself is not heard.
        """
        was_blind, names = host in self.blind, set[str]()
        there = [each for each in backends if each.host == host and not (was_blind and each.url)]
        if was_blind:
            self._mux.facts.expect([backend.name for backend in there])
        try:
            if any(not backend.url for backend in there):
                names.update(self._hosts[host].running())
            self.blind.discard(host)
            self.stop_orphans(host)
            if there:
                self.tell_occupants(host)
        except BackendError as error:
            self.blind.add(host)
            if not was_blind:
                where = f" on {host}" if host else ""
                self._say(f"cannot see what runs already{where}: {error.message}")
        running = [backend for backend in there if backend.url or backend.name in names]
        self._mux.facts.looked_at({each.name for each in there} - {each.name for each in running})
        side_by_side(self._adopt, running)
        if not host:
            self.is_over.set()

    def take_over(self, backend: Backend) -> None:
        """Take over an engine that somebody else has started if it fits, else stop it.

        The life of a thread.
        """
        self._mux.facts.expect([backend.name])
        try:
            if self._mux.overview.is_stopped(backend.name):
                self._say(f"{backend.name} was started by hand")
                for each in self.running([backend]):
                    self._adopt(each)
        finally:
            self._mux.facts.looked_at([backend.name])

    def _adopt(self, backend: Backend) -> None:
        if self._mux.facts.adopt(self.fit([backend])):
            self._mux.facts.adopt(self.stop_all([(backend, TOO_MANY)]))
        self._mux.facts.looked_at([backend.name])

    def fit(self, running: Sequence[Backend]) -> dict[str, str | Evicted | Unfit]:
        """Find those of the backends that run that can be taken over; stop the others.

        Those that could not be stopped are among them, as unfit.
        """
        stock = take_stock(self._hosts, running)
        remaining = self.stop_all(
            [(each, f"{why}; the next request for {each.model} loads it anew") for each, why in stock.unfit]
        )
        return {**stock.fit, **remaining}

    def running(self, backends: Iterable[Backend]) -> list[Backend]:
        """List the ``backends`` that run; external ones always do, as far as we have to care."""
        backends, names = list(backends), set[str]()
        for host in dict.fromkeys(backend.host for backend in backends if not backend.url):
            try:
                names.update(self._hosts[host].running())
            except MuxError as error:
                where = f" on {host}" if host else ""
                self._say(f"cannot see what runs{where}: {error.message}")
        return [backend for backend in backends if backend.url or backend.name in names]

    def tell_occupants(self, host: str) -> None:
        """Warn of engines on a host that another anvil-mux has started, on whose GPUs nothing is loaded."""
        for occupant in self._hosts[host].occupants():
            self._say(f"warning: {occupant.advice}")

    def stop_orphans(self, host: str) -> None:
        """Stop what an earlier start served on a host and the configuration has no longer.

        Backends that a reload removed and that have not left yet are the scheduler's to evict.
        """
        leaving = {backend.name for backend in self._mux.overview.leaving() if backend.host == host}
        for orphan in self._hosts[host].orphans():
            if orphan.name not in leaving:
                self.stop(orphan, sentence(Cause("removed")))

    def stop_all(self, pairs: Sequence[tuple[Backend, str]]) -> dict[str, Unfit]:
        """Stop engines side by side, each for a reason; return those that could not be stopped, by name."""
        stopped = side_by_side(lambda pair: self.stop(*pair), pairs)
        return {
            backend.name: Unfit(why)
            for (backend, why), is_stopped in zip(pairs, stopped, strict=True)
            if not is_stopped
        }

    def stop(self, backend: Backend, why: str) -> bool:
        """Stop an engine, and tell why; return whether that succeeded."""
        self._say(f"stopping {backend.name}: {why}")
        try:
            self._hosts.stop(backend)
        except MuxError as error:
            self._say(f"{backend.name} could not be stopped: {error.message}")
            return False
        return True


# What is read there ahead of its load


class ReadingAhead:
    """Orders hosts to read weights ahead: those for the loads that queues wait for.

    A queue that begins wakes the worker; as long as any queue is there it looks every ``READ_AHEAD_SECONDS``
    which load each waits for, and tells a host when that is another one than before. A host stops by itself
    while it loads. ``observe`` is called under the multiplexer's lock.
    """

    def __init__(
        self, coming_loads: Callable[[Iterable[str]], tuple[list[str], list[Backend]]], hosts: Hosts
    ) -> None:
        """``coming_loads``: see ``Overview``."""
        self._coming_loads = coming_loads
        self._hosts = hosts
        self._begun: deque[str] = deque()
        """The models whose queues began since the last look."""
        self._queued: list[str] = []
        self._ordered: dict[str, list[Backend]] = {}
        """Host -> the backends that it was told, as they were described."""
        self.worker = Worker("read-ahead", self.look, first=None, gather=GATHER_SECONDS)

    def observe(self, event: Event) -> None:
        """Take an event of the multiplexer."""
        if event.kind == "queued" and event.bound < math.inf:
            self._begun.append(event.model)
            self.worker.wake()

    def look(self) -> float | None:
        """Tell hosts what is to be read now; the seconds until the next look, None if there is no queue."""
        models = dict.fromkeys(self._queued)
        while self._begun:
            models[self._begun.popleft()] = None
        self._queued, backends = self._coming_loads(models)
        wanted: dict[str, list[Backend]] = {host: [] for host in self._ordered}
        for backend in backends:
            if len(on_host := wanted.setdefault(backend.host, [])) < MOST_READ_AHEAD:
                on_host.append(backend)
        for host, each in wanted.items():
            if self._ordered.get(host, []) != each:
                self._hosts[host].read_ahead([backend.name for backend in each])
        self._ordered = {host: each for host, each in wanted.items() if each}
        return READ_AHEAD_SECONDS if self._queued else None


# Waking those that sleep


Send = Callable[[bytes, str], object]
"""Sends a packet to an address; OSError."""


class Waker:
    """The waking of hosts. ``turn`` is for one thread; commands run in threads of their own."""

    def __init__(self, mux: Multiplexer, clock: Clock, say: Callable[[str], object], send: Send) -> None:
        self._mux = mux
        self._clock = clock
        self._say = say
        self._send = send
        # Other threads read it, so it is replaced as a whole and never altered.
        self._woken: Mapping[str, tuple[float, float]] = {}
        """Host that is awaited -> since when, and when it was woken last."""

    def is_waking(self, host: str) -> bool:
        return host in self._woken

    def turn(self, wakes: Mapping[str, Wake]) -> None:
        """Wake the hosts for which requests wait, and give up those that have had their time."""
        now = self._clock.now()
        awaited = self._mux.overview.hosts_to_wake() if wakes else ()
        before, woken = self._woken, dict[str, tuple[float, float]]()
        for host in [host for host in awaited if host in wakes]:
            since, last = before.get(host, (now, -math.inf))
            is_due = now - last >= AGAIN_SECONDS
            woken[host] = since, now if is_due else last
            if now - since >= wakes[host].timeout:
                self._give_up(host, f"it is not there {span(wakes[host].timeout)} after it was woken")
            elif is_due:
                if host not in before:
                    self._say(f"host {host} is woken: requests wait for it")
                self._wake(host, wakes[host])
        self._woken = woken

    def _wake(self, host: str, wake: Wake) -> None:
        if wake.run:
            self._clock.spawn(partial(self._run, host, wake), f"wake-{host}")
            return
        try:
            self._send(magic_packet(wake.mac), wake.broadcast)
        except OSError as error:
            self._give_up(host, f"no packet can be sent to {wake.broadcast}: {error.strerror or error}")

    def _run(self, host: str, wake: Wake) -> None:
        """Run the command; the life of its thread."""
        try:
            done = command.run(wake.run, min(wake.timeout, AGAIN_SECONDS), env=os.environ)
        except OSError as error:
            self._give_up(host, f"{wake.run[0]} cannot be run: {error.strerror}")
        except subprocess.TimeoutExpired:
            pass  # what it has begun may still wake the host
        else:
            if done.code:
                self._give_up(host, f"{wake.run[0]} failed: {done.last_line}")

    def _give_up(self, host: str, why: str) -> None:
        self._say(f"host {host} does not wake: {why}")
        self._mux.tell(self._mux.scheduler.host_unwoken, host, why=why)


def magic_packet(mac: str) -> bytes:
    """The packet for which the network card of a machine that sleeps listens."""
    return b"\xff" * 6 + bytes.fromhex(mac.replace(":", "")) * 16


def broadcast(packet: bytes, address: str) -> None:
    """Send a packet to all who listen at an address; OSError."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
        sender.sendto(packet, (address, DISCARD_PORT))
