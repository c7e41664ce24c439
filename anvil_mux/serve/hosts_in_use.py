"""The hosts that the running program uses: its own, and those of the cluster, each with its watch.

A host that joins the cluster, or comes back with other GPUs, is a reason to read the configuration again:
which backends there are follows from the file and from the hosts. One that is named and is not there counts
as lost.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from typing import Any

from anvil_mux.clock import Clock, Worker
from anvil_mux.cluster.channel import AgentSilent, Nowhere
from anvil_mux.cluster.cluster import Cluster
from anvil_mux.cluster.remote import RemoteHost
from anvil_mux.config.config import Backend, Config
from anvil_mux.errors import ConfigError
from anvil_mux.host.hosts import Hosts
from anvil_mux.host.local import LocalHost
from anvil_mux.host.seam import Host, HostConfig, Sight
from anvil_mux.multiplexer.multiplexer import Multiplexer
from anvil_mux.serve.adoption import Adoption
from anvil_mux.serve.news import NewsReader
from anvil_mux.serve.watch import HostWatch

LOOK_SECONDS = 2.0
"""Seconds between two looks which hosts there are."""
SEEN_SECONDS = 15.0
"""How long a start waits until it is known what runs on the hosts of the cluster."""


class HostsInUse:
    """All hosts of one program; ``cluster`` None: its own alone, which has its part of ``config``."""

    def __init__(self, local: LocalHost, cluster: Cluster | None, config: Config) -> None:
        self.local = local
        self.cluster = cluster
        self._adding = threading.Lock()
        # Other threads go through these, so they are replaced as a whole and never altered.
        self.all = Hosts({"": local})
        self.watches: Mapping[str, HostWatch] = {}
        """The watches of hosts that were ever there."""
        self._config = config
        self._is_away = False
        self._told: dict[str, str] = {}
        """Why hosts cannot be used, as it was told last."""
        self._add(config)
        for name in self._others:
            _give(self.all[name], HostConfig.of(config, name))

    @property
    def _others(self) -> list[str]:
        return [name for name in self.all.by_name if name]

    def _add(self, config: Config) -> None:
        """Have the hosts that are named, and those that are there."""
        there = self.cluster.nodes if self.cluster else ()
        with self._adding:
            known = self.all.by_name
            named = dict.fromkeys([*(backend.host for backend in config.backends), *there])
            self.all.by_name = {**known, **{name: self._remote(name) for name in named if name not in known}}

    def _remote(self, name: str) -> RemoteHost:
        return self.cluster.host(name) if self.cluster else RemoteHost(name, Nowhere(), Clock())

    def take(self, config: Config) -> None:
        """Give each host its part of another configuration; ConfigError if one refuses, and none has it."""
        self._add(config)
        given = []
        try:
            for name, host in self.all.by_name.items():
                given.append(name)
                _give(host, HostConfig.of(config, name))
        except ConfigError:
            for name in given:
                with suppress(ConfigError):
                    _give(self.all[name], HostConfig.of(self._config, name))
            raise
        self._config = config

    def recall(self) -> dict[str, str]:
        """Return what was learned of hosts and is kept there, by the host's name."""
        return self.cluster.recall() if self.cluster else {}

    def missing(self) -> list[str]:
        """The hosts that backends are on and that are not there."""
        here = self.cluster.nodes if self.cluster else {}
        return [name for name in self._others if name not in here and name not in self.watches]

    def begin(
        self,
        mux: Multiplexer,
        adoption: Adoption,
        clock: Clock,
        *,
        took: Callable[[Backend, str, float], object],
        read_ahead: Callable[[Backend, int, float], object],
        say: Callable[[str], object],
        fenced: Callable[[str], object],
    ) -> None:
        """Make what watches hosts, before they are asked for anything."""
        self._mux, self._clock, self._say = mux, clock, say
        self.news = NewsReader("", self.local, mux, took, read_ahead)
        self.news_worker = Worker("news", self.news.read)

        def watch(name: str, *, is_lost: bool) -> HostWatch:
            assert self.cluster
            host = self.cluster.host(name)
            news = NewsReader(name, host, mux, took, read_ahead)
            return HostWatch(host, mux, adoption, news, clock=clock, say=say, fenced=fenced, is_lost=is_lost)

        self._watch = watch
        for name in self.missing():
            mux.facts.host_lost(name)
        nodes = self.cluster.nodes if self.cluster else ()
        self.watches = {name: watch(name, is_lost=False) for name in nodes}

    def start(self, changed: Callable[[], object]) -> None:
        """Start the threads; ``changed`` is called when other hosts, or other GPUs, are there."""
        self.news_worker.start()
        for each in self.watches.values():
            each.worker.start()
        if self.cluster:
            self._tell_problems(self.cluster.problems)
            self._membership = Worker("cluster", lambda: self._look(changed), first=LOOK_SECONDS)
            self._membership.start()

    def await_seen(self) -> None:
        """Return once it is known what runs on each host that was there at the start, within a bound."""
        deadline = self._clock.now() + SEEN_SECONDS
        for each in self.watches.values():
            each.is_seen.wait(max(deadline - self._clock.now(), 0.0))

    def is_here(self, host: str) -> bool:
        """Whether it can be asked now what runs on a host."""
        return not host or (host in self.watches and self.watches[host].state == "here")

    def sight(self) -> Sight:
        """The use of all GPUs, by name."""
        found = dict(self.news.sight())
        for each in self.watches.values():
            found |= each.news.sight()
        return found

    def _look(self, changed: Callable[[], object]) -> float:
        """Look which hosts there are."""
        assert self.cluster
        try:
            is_changed = self.cluster.look()
        except AgentSilent as error:
            if not self._is_away:
                self._say(f"the cluster cannot be controlled at the moment, requests go on: {error.message}")
            self._is_away = True
            return LOOK_SECONDS
        if self._is_away:
            self._say("the cluster can be controlled again")
        self._is_away = False
        self._tell_problems(self.cluster.problems)
        for name in self.cluster.nodes:
            if name not in self.watches:
                is_lost = name in self.all.by_name
                self._add(self._config)
                _give(self.all[name], HostConfig.of(self._config, name))
                made = self._watch(name, is_lost=is_lost)
                self.watches = {**self.watches, name: made}
                made.worker.start()
        if is_changed:
            changed()
        return LOOK_SECONDS

    def _tell_problems(self, problems: Mapping[str, str]) -> None:
        """Say of hosts that were never in use why they cannot be, once."""
        for name, why in problems.items():
            if name not in self.watches and why != self._told.get(name):
                self._say(f"host {name} cannot be used: {why}")
        self._told = dict(problems)

    def problem(self) -> str:
        """Why the cluster cannot be steered now, "" if it can. Never blocks."""
        if self._is_away:
            return "the cluster cannot be controlled: requests go on, but nothing is swapped on other hosts"
        away = [name for name, each in self.watches.items() if each.state in ("away", "lost")]
        return f"not here: {', '.join(away)}" if away else ""

    def round_trips(self) -> dict[str, float]:
        """Seconds that the agents of the hosts that are here took to answer last."""
        here = [each.host for each in self.watches.values() if each.state == "here"]
        return {host.name: host.round_trip_seconds for host in here if host.round_trip_seconds is not None}

    def reports(self) -> list[dict[str, Any]]:
        """Return the part of GET /hosts that the scheduler does not know."""
        gpus = [{"id": gpu.id, "name": gpu.name, "total": gpu.total} for gpu in self.local.inventory().gpus]
        told: list[dict[str, Any]] = [{"host": "local", "state": "here", "gpus": gpus}]
        if self.cluster:
            hosts, problems = self.cluster.hosts, self.cluster.problems
            for name in dict.fromkeys((*hosts, *problems)):
                about = hosts[name].report() if name in hosts else {}
                told.append({"host": name, **self._seen(name, problems.get(name, "")), **about})
        return told

    def _seen(self, name: str, problem: str) -> dict[str, str]:
        """Return the state of a host of the cluster, and why it is not here."""
        if watch := self.watches.get(name):
            return {"state": watch.state, "why": watch.why or problem}
        return {"state": "unusable", "why": problem} if problem else {"state": "absent"}

    def busy(self, names: Iterable[str]) -> ExitStack:
        """A context in which it is not just being found out what runs on these hosts."""
        stack = ExitStack()
        for name in names:
            if each := self.watches.get(name):
                stack.enter_context(each.busy)
        return stack

    def close(self) -> None:
        """End its threads, and let another anvil-mux have the hosts."""
        self.news_worker.close()
        if self.cluster:
            self._membership.close()
            for each in self.watches.values():
                each.worker.close()
            self.cluster.release()
            self.cluster.close()
        self.local.close()


def _give(host: Host, config: HostConfig) -> None:
    """Give a host its configuration; one that is silent is given it when it answers."""
    with suppress(AgentSilent):
        host.reconfigure(config)
