"""The times of swaps, phase by phase, and how much of that is ours: ``anvil-mux bench swap``.

Backends that evict each other form a ring, and a round swaps to each of them in turn: through a real
``Multiplexer`` on the real runtime, and by hand. Either begins and ends with the same backend in place, so
they follow each other many times, each first in every other round, and what the machine does meanwhile
troubles both alike. A backend that evicts nobody is a ring of its own: it is evicted and loaded again. The
first round is not counted, since it makes containers and fills caches.

What a swap's phases are stands in swap_figures.py, which makes figures of them.

By hand means for ``stop``: `docker stop`, `docker start`, and asking until an answer comes; for processes the
runtime's kill and exec take the place of Docker's. For every other way it means the same calls of the
mechanism without the multiplexer. The overhead of a swap is what it took longer than by hand in the same
round.

With ``burst``, so many requests wait for a swap by a cold start, and go to the new model all at once through
the relay. That is measured from the first lease until the last answer's end; by hand the engine is started
anew, and as many are sent to it at once, each on a connection of its own that it closes.

Nothing that was started is left running, however the benchmark ends. Ctrl-C leaves the whole rounds so far.
"""

from __future__ import annotations

import http.client
import json
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from socket import socketpair
from typing import NamedTuple, TypeVar
from urllib.parse import urlsplit

from anvil_mux.config.config import Backend, Config
from anvil_mux.config.kinds import AUTO
from anvil_mux.errors import BackendError, MuxError
from anvil_mux.host.check import bus
from anvil_mux.host.local import LocalHost
from anvil_mux.host.seam import HostConfig
from anvil_mux.lab.swap_figures import (
    Burst,
    TimedPhase,
    TimedSwap,
    Unmeasured,
    phases,
    unmeasured,
    why_not,
)
from anvil_mux.multiplexer.multiplexer import Multiplexer
from anvil_mux.proxy.connections import Address
from anvil_mux.proxy.exchange import Exchange, Relay
from anvil_mux.scheduler.events import Event
from anvil_mux.scheduler.memory import LeastRecentlyUsed, Placement
from anvil_mux.serve.files import locked

T = TypeVar("T")
SLACK_SECONDS = 60.0
ASK_PAUSE = 0.01
"""Seconds between two attempts to get an answer."""
LOOK_SECONDS = 1.0
"""Seconds between two looks at whether the backend has ended."""
CONNECT_SECONDS = 1.0
BUSY_PAUSE = 0.1
BURST_TOKENS = 8
"""The tokens of each answer in a burst: they overlap, as answers do."""
MOST_BYTES = 1 << 20
"""The most bytes of an answer in a burst."""

_Pair = tuple[Backend, Backend]
"""The victim and the target of a swap."""
_Measured = tuple[dict[str, float], int | None]
"""The phases of a swap, and the bytes of GPU memory that were taken."""


@dataclass
class BenchResult:
    """All that was measured, and what could not be."""

    swaps: list[TimedSwap] = field(default_factory=list)
    bursts: list[Burst] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    """The swaps that were tried in vain, each with the reason."""
    unmeasured: list[Unmeasured] = field(default_factory=list)
    """The standby levels that were not tried."""
    was_interrupted: bool = False

    def add(self, ring: _Ring) -> None:
        self.swaps += ring.swaps
        self.bursts += ring.bursts


# Measuring


def measure_all(
    configs: Sequence[Config], repeat: int, say: Callable[[str], object], *, burst: int = 0
) -> BenchResult:
    """Every project after the other; one that cannot be measured does not cost the figures of the others."""
    found = BenchResult()
    try:
        for config in configs:
            try:
                measure(config, repeat, say, burst=burst, found=found)
            except MuxError as error:
                if len(configs) == 1:
                    raise
                found.failed.append(f"{config.project}: {error.message}")
    except KeyboardInterrupt:
        found.was_interrupted = True
    return found


def measure(
    config: Config, repeat: int, say: Callable[[str], object], *, burst: int, found: BenchResult
) -> None:
    """Every swap, and bursts after it, ``repeat`` times, and what could not be measured, put into ``found``.

    CannotServe while an anvil-mux serves the project.
    """
    found.unmeasured += unmeasured([backend for backend in config.backends if not backend.url])
    told: list[TimedPhase] = []

    def took(backend: Backend, phase: str, seconds: float) -> None:
        """Note a phase, in a worker's thread."""
        told.append(TimedPhase(time.monotonic(), phase, seconds))

    with locked(config) as lock, _ended_by_sigterm():
        host = LocalHost(HostConfig.of(config), lock, took)
        try:
            for name in host.running():
                say(f"stopping {name}, which runs already")
                host.stop(next(backend for backend in config.backends if backend.name == name))
            for way, all_members in rings(config):
                members = [each for each in all_members if not why_not(each, way)]
                if not members:
                    continue
                try:
                    ring = _Ring(config, host, members, way, told=told, say=say)
                    try:
                        ring.run(repeat, burst if way == "stop" else 0)
                    except KeyboardInterrupt:
                        found.add(ring)
                        raise
                    found.add(ring)
                except MuxError as error:
                    who = ", ".join(backend.name for backend in members)
                    found.failed.append(f"{who} by {way}: {error.message}")
                if left := ", ".join(host.running()):
                    raise BackendError(f"{left} could not be stopped: {'; '.join(found.failed)}")
        finally:
            host.close()


def rings(config: Config) -> list[tuple[str, list[Backend]]]:
    """Standby levels, each with backends that allow it and of which none can stay beside another."""
    found: list[tuple[str, list[Backend]]] = []
    for backend in [each for each in config.backends if not each.url]:
        for way in dict.fromkeys((*backend.evict_to, "stop")):
            for other, members in found:
                if way == other and not any(_stay_together(config, backend, member) for member in members):
                    members.append(backend)
                    break
            else:
                found.append((way, [backend]))
    return found


def _stay_together(config: Config, a: Backend, b: Backend) -> bool:
    pair = [_plain(backend, "stop") for backend in (a, b)]
    placement = Placement(pair, config.gpus, LeastRecentlyUsed)
    first, second = placement.slots.values()
    if not placement.fits(first):
        return False
    first.enter("adopt", 0.0)
    placement.note(first)
    return placement.fits(second)


def _plain(backend: Backend, way: str) -> Backend:
    """The same service, without what would hold back a swap or make one; replicas become single models."""
    return replace(
        backend,
        model=backend.name,
        served_model=backend.served_model or backend.model,
        aliases=(),
        pin=False,
        priority=0,
        ttl=None,
        min_residency=0.0,
        max_wait=AUTO,
        max_queue=None,
        evict_to=(way,),
        demote_after=None,
        preload=False,
    )


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Let SIGTERM end the command as Ctrl-C does, so that it cleans up."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _result(asked: Future[T]) -> T:
    """The result of what was asked. A signal that comes just before a wait without an end does not end it."""
    while wait([asked], BUSY_PAUSE).not_done:
        pass
    return asked.result()


class _Ring:
    """Backends that take turns on the same GPUs, by the same standby level."""

    def __init__(
        self,
        config: Config,
        host: LocalHost,
        members: Iterable[Backend],
        way: str,
        *,
        told: list[TimedPhase],
        say: Callable[[str], object],
    ) -> None:
        self._host = host
        self._way = way
        self._say = say
        self._members = [_plain(member, way) for member in members]
        patience = sum(each.load_timeout + each.stop_timeout + SLACK_SECONDS for each in self._members)
        self._residual: dict[str, int] = {}
        """Backend -> the GPU memory that it still held in standby."""
        self._hand = host.by_hand()
        self._asker = Asker()
        self._buses = {member.name: bus(member) for member in self._members}
        self._mux = Multiplexer(
            replace(
                config,
                backends=tuple(self._members),
                policy="eager",
                policy_settings={},
                drain_timeout=patience,
                queue_timeout=patience,
            ),
            host,
            log=self._observe,
        )
        self.swaps: list[TimedSwap] = []
        self.bursts: list[Burst] = []
        # Of the swap that is being measured:
        self._log: list[Event] = []
        self._told = told
        self._missing: set[str] = set()
        self._under_way = threading.Event()

    def run(self, repeat: int, burst: int = 0) -> None:
        """Measure; ``swaps`` and ``bursts`` have the rounds that were whole, also when it is interrupted."""
        pairs = list(zip([self._members[-1], *self._members], self._members, strict=False))
        self._mux.start()
        with ThreadPoolExecutor(1, "bench") as pool:
            try:
                _result(pool.submit(self._ask_multiplexer, self._members[-1]))
                for number in range(repeat + 1):
                    swaps = self._round(number, pairs, pool)
                    self._tell_progress(number, repeat, swaps)
                    self.swaps += self._counted(swaps) if number else ()
                for number in range(repeat + 1 if burst else 0):
                    bursts = [self._burst(*pair, burst, number) for pair in pairs]
                    self.bursts += bursts if number else ()
            finally:
                self._end()

    def _counted(self, swaps: Sequence[TimedSwap]) -> Sequence[TimedSwap]:
        for swap in swaps:
            if self._way != "stop" and "ready" in swap.phases:
                raise BackendError(f"{swap.backend} had to be restarted: it did not wake by {self._way}")
        return swaps

    def _round(self, number: int, pairs: Sequence[_Pair], pool: ThreadPoolExecutor) -> list[TimedSwap]:
        if number % 2:
            by_hand = [self._swap_by_hand(*pair) for pair in pairs]
            by_mux = [self._swap(*pair, pool) for pair in pairs]
        else:
            by_mux = [self._swap(*pair, pool) for pair in pairs]
            by_hand = [self._swap_by_hand(*pair) for pair in pairs]
        return [
            TimedSwap(
                backend=after.name,
                replaces=before.name,
                way=self._way,
                round=number,
                phases=took,
                by_hand_seconds=seconds,
                bytes=taken,
                bus=self._buses[after.name],
                engine=after.engine,
            )
            for (before, after), (took, taken), seconds in zip(pairs, by_mux, by_hand, strict=True)
        ]

    def _tell_progress(self, number: int, repeat: int, swaps: Iterable[TimedSwap]) -> None:
        took = ", ".join(f"{s.backend} {s.total_seconds:.2f} s ({s.by_hand_seconds:.2f})" for s in swaps)
        what = f"round {number} of {repeat}" if number else "to warm up"
        self._say(f"{self._way}, {what}: {took}")

    def _end(self) -> None:
        """Stops everything, also what a worker is about to start."""
        self._mux.refuse()
        self._mux.close()
        busy = True
        while busy:
            busy = any(model.state in ("loading", "evicting") for model in self._mux.overview.status().models)
            with ExitStack() as stops:
                for member in self._members:
                    stops.callback(self._host.stop, member)
            time.sleep(BUSY_PAUSE if busy else 0.0)

    # Through the multiplexer

    def _swap(self, before: Backend, after: Backend, pool: ThreadPoolExecutor) -> _Measured:
        self._log, self._missing = [], {"draining", "queued"}
        self._told.clear()
        self._under_way.clear()
        with self._mux.lease(before.name):
            if before is after:
                self._mux.facts.unload(before.name)
            answer = pool.submit(self._ask_multiplexer, after)
            while not self._under_way.wait(BUSY_PAUSE) and not answer.done():
                pass
        return phases(self._log, _result(answer), self._told, self._way), self._taken(after)

    def _taken(self, backend: Backend) -> int | None:
        """The GPU memory that came back with it, as NVML tells or as declared; None where nobody knows."""
        if self._way == "freeze":
            return None
        amount = self._host.held(backend)
        return max(amount - self._residual.get(backend.name, 0), 0) or None

    def _observe(self, event: Event) -> None:
        """Note an event, under the multiplexer's lock."""
        self._log.append(event)
        self._missing.discard(event.kind)
        if not self._missing:
            self._under_way.set()

    def _ask_multiplexer(self, backend: Backend) -> float:
        with self._mux.lease(backend.name) as lease:
            return self._asker.ask(backend, lease.address)

    # Bursts

    def _burst(self, before: Backend, after: Backend, count: int, number: int) -> Burst:
        with ThreadPoolExecutor(count, "burst") as pool:
            through = self._burst_through(before, after, count, pool)
            direct = self._burst_by_hand(after, count, pool)
        self._say(f"burst of {count} to {after.name}: {through:.2f} s ({direct:.2f})")
        return Burst(
            backend=after.name,
            replaces=before.name,
            requests=count,
            round=number,
            seconds=through,
            direct_seconds=direct,
        )

    def _burst_through(self, before: Backend, after: Backend, count: int, pool: ThreadPoolExecutor) -> float:
        relay, (near, far) = Relay(after.load_timeout), socketpair()
        head, body = self._asker.question(after).whole(BURST_TOKENS).written(after)

        def ask() -> tuple[float, float]:
            with self._mux.lease(after.name) as lease:
                since = time.monotonic()
                with Exchange(relay, lease, near) as exchange:
                    response = exchange.ask("POST", head, body)
                    exchange.content(MOST_BYTES)
                if response.status >= 300:
                    raise BackendError(f"{after.name} answers {response.status} in a burst")
                return since, time.monotonic()

        with near, far:
            try:
                with self._mux.lease(before.name):
                    if before is after:
                        self._mux.facts.unload(before.name)
                    asked = [pool.submit(ask) for _ in range(count)]
                    while self._mux.overview.status().waiting < count and not any(
                        each.done() for each in asked
                    ):
                        time.sleep(BUSY_PAUSE)
                took = [_result(each) for each in asked]
            finally:
                relay.close()
        return max(until for _, until in took) - min(since for since, _ in took)

    def _burst_by_hand(self, backend: Backend, count: int, pool: ThreadPoolExecutor) -> float:
        self._hand.stop(backend)
        _, address = self._start_by_hand(backend)
        question = self._asker.question(backend).whole(BURST_TOKENS)
        begun = time.monotonic()
        asked = [pool.submit(question.ask, backend, address) for _ in range(count)]
        for each in asked:
            status, _ = _result(each)
            if status >= 300:
                raise BackendError(f"{backend.name} answers {status} in a burst")
        return time.monotonic() - begun

    # By hand

    def _swap_by_hand(self, before: Backend, after: Backend) -> float:
        begun = time.monotonic()
        if self._way == "stop":
            self._hand.stop(before)
            stopped = time.monotonic()
            return stopped - begun + self._start_by_hand(after)[0]
        evicted = self._host.evict(before, self._way)
        self._residual[before.name] = sum(evicted.residual.values())
        loaded = self._host.load(after, self._way)
        if loaded.level == "stop":
            raise BackendError(f"{after.name} had to be restarted: it did not wake by {self._way}")
        return self._asker.ask_until_answered(after, _address(loaded.url), self._host.ended) - begun

    def _start_by_hand(self, backend: Backend, *, again: bool = False) -> tuple[float, Address]:
        """Start it; the seconds until it answered, and its address. A start that lost its port counts not."""
        begun = time.monotonic()
        address = _address(self._hand.start(backend))
        try:
            return self._asker.ask_until_answered(backend, address, self._host.ended) - begun, address
        except BackendError:
            if again or not self._host.runtime.lost_its_port(backend):
                raise
        return self._start_by_hand(backend, again=True)


# Questions, as somebody asks them who has no anvil-mux


class Asker:
    """Asks backends for as little as they answer; the first question that one answers is its own."""

    def __init__(self) -> None:
        self._known: dict[str, SampleQuestion] = {}

    def ask(self, backend: Backend, address: Address) -> float:
        """The moment of the answer's first byte."""
        known = self._known.get(backend.name)
        for question in [known] if known else QUESTIONS:
            status, moment = question.ask(backend, address)
            if status < 300:
                self._known[backend.name] = question
                return moment
        raise BackendError(f"{backend.name} answers {status} to POST {question.path}")

    def question(self, backend: Backend) -> SampleQuestion:
        """The one that it was found to answer."""
        return self._known[backend.name]

    def ask_until_answered(
        self, backend: Backend, address: Address, ended: Callable[[Backend], str | None]
    ) -> float:
        """The moment of the first answer's first byte; ``ended`` says how the backend ended, if it has."""
        begun = looked = time.monotonic()
        while True:
            try:
                return self.ask(backend, address)
            except BackendError:
                now = time.monotonic()
                if now - begun > backend.load_timeout:
                    raise
            if now - looked > LOOK_SECONDS:
                looked = now
                if how := ended(backend):
                    raise BackendError(f"{backend.name} {how} before it answered")
            time.sleep(ASK_PAUSE)


class SampleQuestion(NamedTuple):
    """A request whose answer's first byte counts as the first token."""

    path: str
    asks: Mapping[str, object]

    def ask(self, backend: Backend, address: Address) -> tuple[int, float]:
        """The answer's status, and when the first byte of its body came."""
        connection = http.client.HTTPConnection(*address, timeout=CONNECT_SECONDS)
        try:
            connection.connect()
            connection.sock.settimeout(backend.load_timeout)
            headers = {**_headers(backend), "Connection": "close"}
            connection.request("POST", self.path, self._body(backend), headers)
            response = connection.getresponse()
            response.read(1)
            moment = time.monotonic()
            response.read()
            return response.status, moment
        except (OSError, http.client.HTTPException) as error:
            raise BackendError(f"{backend.name} does not answer POST {self.path}: {error!r}") from None
        finally:
            connection.close()

    def whole(self, tokens: int) -> SampleQuestion:
        """The same for an answer of so many tokens, if it is for text, and in one piece.

        llama-server closes the connection behind a stream, so only such an answer shows what idle ones do.
        """
        more = {"max_tokens": tokens, "stream": False} if "max_tokens" in self.asks else {}
        return self._replace(asks={**self.asks, **more})

    def written(self, backend: Backend) -> tuple[bytes, bytes]:
        """The lines of the head, and the body, for a connection that may be used again."""
        fields = {"Host": backend.name, **_headers(backend)}
        lines = [f"POST {self.path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items())]
        return "".join(f"{line}\r\n" for line in lines).encode(), self._body(backend).encode()

    def _body(self, backend: Backend) -> str:
        return json.dumps({"model": backend.served_model, **self.asks})


def _headers(backend: Backend) -> dict[str, str]:
    key = backend.service.api_key
    return {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}


QUESTIONS = (
    SampleQuestion(
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1, "stream": True},
    ),
    SampleQuestion("/v1/completions", {"prompt": "Hi", "max_tokens": 1, "stream": True}),
    SampleQuestion("/v1/embeddings", {"input": "Hi"}),
    SampleQuestion("/v1/rerank", {"query": "Hi", "documents": ["Hi"]}),
)


def _address(url: str) -> Address:
    parts = urlsplit(url)
    return parts.hostname or "", parts.port or 80
