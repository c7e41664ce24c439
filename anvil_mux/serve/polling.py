"""The polls: what servers are asked again and again over the network, by one thread each.

``Scraper`` asks engines for their own figures, for the choice among replicas (routing mode full). ``Sharing``
asks the store by which several anvil-mux know of each other's requests at replicas that they share.
``ExternalServers`` asks servers that somebody else runs how they are, when nothing was heard of them for a
while.
"""

from __future__ import annotations

import http.client
import re
import secrets
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any
from urllib.parse import quote

from anvil_mux.clock import Worker, side_by_side
from anvil_mux.cluster import frames
from anvil_mux.cluster.frames import Unreadable
from anvil_mux.config.config import Backend, Config
from anvil_mux.config.kinds import Diagnostic
from anvil_mux.host.hosts import Finding, get_page, look_at_server
from anvil_mux.host.seam import CardRead
from anvil_mux.multiplexer.circuits import Circuit, Circuits
from anvil_mux.multiplexer.multiplexer import Multiplexer
from anvil_mux.protocol import foreign
from anvil_mux.protocol.cards import NOTHING_KNOWN
from anvil_mux.proxy.connections import Address
from anvil_mux.routing.in_flight import EngineLoad, Report

SCRAPE_SECONDS = 1.0
SCRAPE_TIMEOUT = 2.0
SHARE_SECONDS = 0.25
EXPIRES_SECONDS = 5.0
"""After which the reports of an anvil-mux are forgotten that publishes none any more."""
STORE_TIMEOUT = 2.0

LOOK_SECONDS = 5.0
"""Seconds between two looks which external servers are to be asked."""
QUIET_SECONDS = 60.0
"""After which an external server is asked of which nothing was heard."""


# The figures of engines


class Scraper:
    """Asks every replica for its figures, and tells the multiplexer what it says, if it answers.

    ``load_of`` knows the names that vLLM, SGLang and llama.cpp give to the same three figures (SGLang if it
    was started with --enable-metrics, llama.cpp with --metrics): the requests that run, those that wait, and
    how full the cache is. A llama.cpp without --metrics is asked for its /slots. An engine that answers and
    has no such figures is alive, and our own counts hold for it. How long ago one last answered is what the
    filter ``staleness`` goes by.
    """

    def __init__(self, mux: Multiplexer) -> None:
        self._mux = mux
        self.worker = Worker("scraper", self.scrape)

    def scrape(self) -> float:
        """Ask each once; the seconds until they are to be asked again."""
        for backend, address in self._mux.overview.resident_replicas():
            try:
                self._mux.tell(self._mux.scheduler.observed, backend.name, ask(backend, address))
            except NoAnswer:
                self._mux.tell(self._mux.scheduler.silent, backend.name)
        return SCRAPE_SECONDS


NAMES = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:kv_cache_usage_perc": "usage",
    "vllm:gpu_cache_usage_perc": "usage",
    "sglang:num_running_reqs": "running",
    "sglang:num_queue_reqs": "waiting",
    "sglang:token_usage": "usage",
    "llamacpp:requests_processing": "running",
    "llamacpp:requests_deferred": "waiting",
    "llamacpp:kv_cache_usage_ratio": "usage",
}
LINE = re.compile(r"^([A-Za-z_:]+)(?:\{.*\})? ([0-9.eE+-]{1,64})(?![0-9.eE+-])", re.M)


def load_of(text: str) -> EngineLoad | None:
    """The figures in a /metrics page, over all engines in it; None if it does not count requests."""
    figures: dict[str, list[float]] = {}
    for name, value in LINE.findall(text):
        if what := NAMES.get(name):
            with suppress(ValueError):
                if 0 <= (number := float(value)) <= foreign.GREATEST:
                    figures.setdefault(what, []).append(number)
    if "running" not in figures or "waiting" not in figures:
        return None
    usage = figures.get("usage")
    share = sum(usage) / len(usage) if usage else None
    return EngineLoad(round(sum(figures["running"])), round(sum(figures["waiting"])), share)


def load_of_slots(text: str) -> EngineLoad | None:
    """The figures in the /slots of a llama.cpp, which do not say who waits; None if it is none."""
    try:
        return EngineLoad(sum([slot["is_processing"] is True for slot in foreign.read(text)]))
    except (ValueError, TypeError, KeyError):
        return None


FiguresPage = tuple[str, Callable[[str], EngineLoad | None]]
"""A page of an engine's figures, and how it is read."""
METRICS: FiguresPage = ("/metrics", load_of)
PAGES: dict[str, tuple[FiguresPage, ...]] = {"llamacpp": (METRICS, ("/slots", load_of_slots))}
"""Engine -> what it is asked for until it says something; others have METRICS alone."""


class NoAnswer(Exception):
    """An engine does not answer."""


def ask(backend: Backend, address: Address) -> EngineLoad | None:
    """Ask an engine for its figures; None if it answers and has none."""
    for path, read in PAGES.get(backend.engine, (METRICS,)):
        if load := read(_get(address, path, backend.service.api_key)):
            return load
    return None


def _get(address: Address, path: str, key: str | None) -> str:
    """A page of an engine, empty if it has none."""
    connection = http.client.HTTPConnection(*address, timeout=SCRAPE_TIMEOUT)
    try:
        status, content = get_page(connection, path, {"Authorization": f"Bearer {key}"} if key else {})
    except (OSError, http.client.HTTPException, ValueError):
        raise NoAnswer from None
    return content.decode("utf-8", "replace") if status == 200 else ""


# The reports of other anvil-mux

Reports = dict[str, Report]
"""Backend -> what one owner says of it."""


class StoreError(Exception):
    """The store does not answer, or cannot be used at all."""


class RedisStore:
    """The store, in Redis (the extra ``[redis]``), below keys of the ``project``. For one thread.

    There is a key with an expiry for each owner, and a set of the owners. How old a report is, the store
    says; the clocks of the machines need not agree. tests/serve/test_store.py is the contract of every store.
    """

    def __init__(self, url: str, project: str) -> None:
        try:
            import redis
        except ImportError:
            raise StoreError("a store in Redis needs: pip install 'anvil-mux[redis]'") from None
        self._failure = redis.RedisError
        try:
            self._redis: Any = redis.Redis.from_url(
                url, socket_timeout=STORE_TIMEOUT, socket_connect_timeout=STORE_TIMEOUT, decode_responses=True
            )
        except ValueError as error:
            raise StoreError(f"{error}") from None
        self._prefix = f"anvil-mux:2:{quote(project)}"
        self._owners = f"{self._prefix}:owners"

    def publish(self, owner: str, reports: Reports) -> None:
        """Publish reports in place of those that ``owner`` published before."""
        try:
            with self._redis.pipeline() as batch:
                batch.set(self._key(owner), frames.dump(reports), px=round(EXPIRES_SECONDS * 1000))
                batch.sadd(self._owners, owner)
                batch.execute()
        except self._failure as error:
            raise StoreError(str(error)) from None

    def others(self, owner: str) -> list[Reports]:
        """The last reports of each of the others, with their age as it is now."""
        try:
            return self._read([each for each in self._redis.smembers(self._owners) if each != owner])
        except self._failure as error:
            raise StoreError(str(error)) from None

    def _read(self, owners: list[str]) -> list[Reports]:
        with self._redis.pipeline() as batch:
            for each in owners:
                batch.get(self._key(each))
                batch.pttl(self._key(each))
            answers = batch.execute() if owners else []
        reports, gone = [], []
        for each, text, left in zip(owners, answers[::2], answers[1::2], strict=True):
            if text is None or left < 0:
                gone.append(each)
            else:
                with suppress(Unreadable):  # of another version, or somebody else's
                    written = frames.read(Reports, text, is_foreign=True)
                    reports.append(_older(written, EXPIRES_SECONDS - left / 1000))
        if gone:
            self._redis.srem(self._owners, *gone)
        return reports

    def _key(self, owner: str) -> str:
        return f"{self._prefix}:{owner}"

    def close(self) -> None:
        self._redis.close()


def _older(reports: Reports, seconds: float) -> Reports:
    return {name: each._replace(age_seconds=each.age_seconds + seconds) for name, each in reports.items()}


class Sharing:
    """Publishes what this anvil-mux has at every replica, and tells it what all others published.

    Each of them is an *owner*. What an owner published is forgotten ``EXPIRES_SECONDS`` later: whoever has
    died weighs on nobody for longer. While the store does not answer, requests are routed by what is known
    here, as without one.
    """

    def __init__(
        self,
        store: RedisStore,
        mux: Multiplexer,
        say: Callable[[str], object],
        every: float = SHARE_SECONDS,
    ) -> None:
        self._store = store
        self._mux = mux
        self._say = say
        self._every = every
        self._owner = secrets.token_hex(8)
        self._fails = False
        self.worker = Worker("sharing", self.once, last=store.close)

    def once(self) -> float:
        """Publish and read once; the seconds until the next time."""
        heard: dict[str, list[Report]] = {}
        failed, self._fails = self._fails, False
        try:
            self._store.publish(self._owner, self._mux.overview.reports())
            for reports in self._store.others(self._owner):
                for backend, report in reports.items():
                    heard.setdefault(backend, []).append(report)
        except StoreError as error:
            self._fails = True
            if not failed:
                self._say(f"the routing store does not answer ({error}): own counts are used until it does")
        if failed and not self._fails:
            self._say("the routing store answers again")
        self._mux.facts.hear(heard)
        return self._every


# External servers


class ExternalServers:
    """Watches the external servers of a configuration: one of which nothing was heard is asked how it is.

    So an open circuit is seen before a client meets it, and a server that could not be reached serves again
    as soon as it can be. Requests that are answered are news enough: while there are some, nothing is asked.
    """

    def __init__(
        self,
        circuits: Circuits,
        say: Callable[[str], object],
        *,
        read: Callable[[CardRead], object],
        ask: Callable[[Backend], Finding] = look_at_server,
    ) -> None:
        """``read`` is told what a server's list says of its model."""
        self._circuits = circuits
        self._say = say
        self._read = read
        self._ask = ask
        self._backends: tuple[Backend, ...] = ()
        self._hints: dict[str, str] = {}
        self.worker = Worker("external", self.look, first=None)
        circuits.tell = self._tell

    def take(self, config: Config) -> None:
        """Watch the servers of this configuration from now on; those that are new are asked at once."""
        backends = tuple([backend for backend in config.backends if backend.url])
        kept = frozenset(each.name for each in backends if each in self._backends)
        self._backends = backends
        self._circuits.keep(kept)
        self.worker.wake()

    def look(self) -> float | None:
        """Ask those of which it is not known how they are; return the seconds until the next look, if any."""
        due = [backend for backend in self._backends if self._is_due(self._circuits.of(backend.name))]
        for backend, finding in zip(due, side_by_side(self._ask, due), strict=True):
            self._circuits.asked(backend.name, finding.problem)
            if finding.hint and finding.hint != self._hints.get(backend.name):
                self._say(f"warning: {backend.name} {finding.hint}")
            self._hints[backend.name] = finding.hint
            if finding.card != NOTHING_KNOWN:
                self._read(CardRead(backend.name, backend.description, finding.card))
        return LOOK_SECONDS if self._backends else None

    def _is_due(self, circuit: Circuit) -> bool:
        if circuit.state == "open":
            return circuit.is_away and circuit.pause_left(self._circuits.now()) <= 0
        return self._circuits.now() - circuit.heard > QUIET_SECONDS

    def _tell(self, name: str, circuit: Circuit) -> None:
        if circuit.state == "closed":
            self._say(f"{name}: its circuit is closed, its server answers again")
        else:
            left = circuit.pause_left(self._circuits.now())
            self._say(f"{name}: its circuit is open for {left:.0f} s, since {circuit.why}")


def warnings(backends: Iterable[Backend]) -> list[str]:
    """A warning for each external server that does not answer as it should, asked now."""
    external = [backend for backend in backends if backend.url]
    return [
        Diagnostic(
            f"service {backend.name}: {backend.url} {finding.problem or finding.hint}",
            key=("services", backend.name, "x-anvil", "url"),
        )
        for backend, finding in zip(external, side_by_side(look_at_server, external), strict=True)
        if finding.problem or finding.hint
    ]
