"""What a swap takes, phase by phase, and how much of that is ours: ``anvil-mux bench swap``.

Backends that put each other out form a ring, and a round swaps to each of them in turn: through a real
``Multiplexer`` on the real runtime, and by hand. Either begins and ends with the same backend in place, so
they follow each other many times, each first in every other round, and what the machine does meanwhile
troubles both alike. A backend that puts nobody out is a ring of its own: it is put out and loaded again. The
first round is not counted, since it makes containers and fills caches.

A swap begins when the last lease of the model that must go ends, while a request for the other already waits,
and ends with the first byte of that request's answer. Its phases follow each other without a gap:

    drain        until the model is told to go
    evict        until its GPUs are free
    load         until the next one is ready
    first_token  until the first byte of the answer

What the mechanism tells of its own parts (``verify``, ``ready``, ``probe``, ...) is taken out of the phase in
which it happened.

By hand means for ``stop``: `docker stop`, `docker start`, and asking until an answer comes; for processes the
runtime's kill and exec take the place of Docker's. For every other way it means the same calls of the
mechanism without the multiplexer. The own share of a swap is what it took longer than by hand in the same
round.

Nothing that was started is left running, however the benchmark ends.
"""

from __future__ import annotations

import csv
import http.client
import json
import signal
import subprocess
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from statistics import median
from typing import NamedTuple, Protocol, TextIO
from urllib.parse import urlsplit

from anvil_mux import compose
from anvil_mux.config import Backend, Config
from anvil_mux.engine import api_key, listen_port
from anvil_mux.errors import BackendError, MuxError
from anvil_mux.multiplexer import Multiplexer
from anvil_mux.policy import Eager
from anvil_mux.preemption import LeastRecentlyUsed
from anvil_mux.residency import Event, Residency
from anvil_mux.serve import build_runtime, locked
from anvil_mux.swap import Runtime, Swapper

PHASES = ("drain", "evict", "verify", "freeze", "load", "ready", "probe", "first_token")
"""In this order they are shown; others that a mechanism tells of follow."""
ENDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("drain", ("stopping",)),
    ("evict", ("empty", "parked")),
    ("load", ("ready",)),
    ("first_token", ()),
)
"""Phases that follow each other, and the events with which they end."""
OUT = frozenset(("drain", "evict", "verify", "freeze"))
"""Those of the model that goes."""
ASK_PAUSE = 0.01
"""By hand: between two attempts to get an answer."""
CONNECT_SECONDS = 1.0
SLACK_SECONDS = 60.0
BUSY_PAUSE = 0.1
DOCKER_SECONDS = 60.0

Address = tuple[str, int]
_Pair = tuple[Backend, Backend]
"""One that goes and one that comes."""


class Told(NamedTuple):
    """A part of a step, as the mechanism told of it when it was over."""

    at: float
    phase: str
    seconds: float


@dataclass(frozen=True)
class Swap:
    """One swap, and the same one by hand."""

    backend: str
    replaces: str
    way: str
    round: int
    phases: Mapping[str, float]
    by_hand_seconds: float

    @property
    def total_seconds(self) -> float:
        return sum(self.phases.values())

    @property
    def own_share_seconds(self) -> float:
        return self.total_seconds - self.by_hand_seconds

    @property
    def in_seconds(self) -> float:
        """From free GPUs to the first byte."""
        return sum(seconds for phase, seconds in self.phases.items() if phase not in OUT)


@dataclass(frozen=True)
class Figures:
    """The medians over all swaps to one backend that rests in one way."""

    backend: str
    replaces: str
    way: str
    swaps: int
    phases: dict[str, float]
    total_seconds: float
    by_hand_seconds: float
    own_share_seconds: float
    """The median of the differences, not the difference of the medians."""
    cold_start_ratio: float | None
    """A cold start over this way back, each until the first byte."""


# Measuring


def measure(config: Config, repeat: int, say: Callable[[str], object]) -> tuple[list[Swap], list[str]]:
    """Every swap, ``repeat`` times, and what could not be measured.

    CannotServe while an anvil-mux serves the project.
    """
    swaps: list[Swap] = []
    failed: list[str] = []
    with locked(config), _ended_by_sigterm():
        runtime = build_runtime(config)
        try:
            for name in runtime.running():
                say(f"stopping {name}, which runs already")
                runtime.stop(next(backend for backend in config.backends if backend.name == name))
            for way, members in rings(config):
                try:
                    swaps += _Ring(config, runtime, members, way, say).run(repeat)
                except MuxError as error:
                    who = ", ".join(backend.name for backend in members)
                    failed.append(f"{who} by {way}: {error.message}")
                if left := ", ".join(runtime.running()):
                    raise BackendError(f"{left} could not be stopped: {'; '.join(failed)}")
        finally:
            runtime.close()
    return swaps, failed


def rings(config: Config) -> list[tuple[str, list[Backend]]]:
    """Ways, each with backends that allow it and of which none can stay beside another."""
    found: list[tuple[str, list[Backend]]] = []
    for backend in config.backends:
        for way in dict.fromkeys((*backend.rest, "stop")):
            for other, members in found:
                if way == other and not any(_stay_together(config, backend, member) for member in members):
                    members.append(backend)
                    break
            else:
                found.append((way, [backend]))
    return found


def _stay_together(config: Config, a: Backend, b: Backend) -> bool:
    pair = [_plain(backend, "stop") for backend in (a, b)]
    residency = Residency("pair", config, pair, Eager(), LeastRecentlyUsed(), lambda event: None)
    return residency.adopt(a.name, 0.0) and residency.adopt(b.name, 0.0)


def _plain(backend: Backend, way: str) -> Backend:
    """The same service, without what would hold back a swap; replicas become models of their own."""
    return replace(
        backend,
        model=backend.name,
        served_model=backend.served_model or backend.model,
        aliases=(),
        pin=False,
        priority=0,
        ttl=None,
        min_residency=0.0,
        max_wait=None,
        rest=(way,),
    )


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """SIGTERM ends it as Ctrl-C does, so that it cleans up."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class _Ring:
    """Backends that take turns on the same GPUs and rest in the same way."""

    def __init__(
        self,
        config: Config,
        runtime: Runtime,
        members: Iterable[Backend],
        way: str,
        say: Callable[[str], object],
    ) -> None:
        self._runtime = runtime
        self._way = way
        self._say = say
        self._members = [_plain(member, way) for member in members]
        patience = sum(each.load_timeout + each.stop_timeout + SLACK_SECONDS for each in self._members)
        self._swapper = Swapper(runtime, told=self._tell)
        self._hand: _Hand = _Docker(config.project) if config.runtime == "compose" else runtime
        self._mux = Multiplexer(
            replace(
                config,
                backends=tuple(self._members),
                policy="eager",
                policy_settings={},
                drain_timeout=patience,
                queue_timeout=patience,
            ),
            self._swapper,
            log=self._observe,
        )
        self._questions: dict[str, _Question] = {}
        # Of the swap that is being measured:
        self._log: list[Event] = []
        self._told: list[Told] = []
        self._missing: set[str] = set()
        self._under_way = threading.Event()

    def run(self, repeat: int) -> list[Swap]:
        pairs = list(zip([self._members[-1], *self._members], self._members, strict=False))
        swaps: list[Swap] = []
        self._mux.start()
        with ThreadPoolExecutor(1, "bench") as pool:
            try:
                pool.submit(self._ask_multiplexer, self._members[-1]).result()
                for number in range(repeat + 1):
                    swaps += self._round(number, pairs, pool)
                    self._tell_progress(number, repeat, swaps[-len(pairs) :])
            finally:
                self._end()
        counted = [swap for swap in swaps if swap.round]
        for swap in counted:
            if self._way != "stop" and "ready" in swap.phases:
                raise BackendError(f"{swap.backend} had to be started anew: it did not wake by {self._way}")
        return counted

    def _round(self, number: int, pairs: Sequence[_Pair], pool: ThreadPoolExecutor) -> list[Swap]:
        if number % 2:
            by_hand = [self._swap_by_hand(*pair) for pair in pairs]
            by_mux = [self._swap(*pair, pool) for pair in pairs]
        else:
            by_mux = [self._swap(*pair, pool) for pair in pairs]
            by_hand = [self._swap_by_hand(*pair) for pair in pairs]
        both = zip(pairs, by_mux, by_hand, strict=True)
        return [Swap(b.name, a.name, self._way, number, took, seconds) for (a, b), took, seconds in both]

    def _tell_progress(self, number: int, repeat: int, swaps: Iterable[Swap]) -> None:
        took = ", ".join(f"{s.backend} {s.total_seconds:.2f} s ({s.by_hand_seconds:.2f})" for s in swaps)
        what = f"round {number} of {repeat}" if number else "to warm up"
        self._say(f"{self._way}, {what}: {took}")

    def _end(self) -> None:
        """Stops everything, also what a keeper is about to start."""
        self._mux.refuse()
        self._mux.close()
        busy = True
        while busy:
            busy = any(model.state in ("starting", "stopping") for model in self._mux.status().models)
            with ExitStack() as stops:
                for member in self._members:
                    stops.callback(self._runtime.stop, member)
            time.sleep(BUSY_PAUSE if busy else 0.0)

    # Through the multiplexer

    def _swap(self, before: Backend, after: Backend, pool: ThreadPoolExecutor) -> dict[str, float]:
        self._log, self._told, self._missing = [], [], {"draining", "queued"}
        self._under_way.clear()
        with self._mux.lease(before.name):
            if before is after:
                self._mux.unload(before.name)
            answer = pool.submit(self._ask_multiplexer, after)
            while not self._under_way.wait(BUSY_PAUSE) and not answer.done():
                pass
        return phases(self._log, answer.result(), self._told, self._way)

    def _observe(self, event: Event) -> None:
        """Called under the multiplexer's lock."""
        self._log.append(event)
        self._missing.discard(event.kind)
        if not self._missing:
            self._under_way.set()

    def _tell(self, backend: Backend, phase: str, seconds: float) -> None:
        """Called by a keeper."""
        self._told.append(Told(time.monotonic(), phase, seconds))

    def _ask_multiplexer(self, backend: Backend) -> float:
        with self._mux.lease(backend.name) as lease:
            return self._ask(backend, lease.address)

    # By hand

    def _swap_by_hand(self, before: Backend, after: Backend) -> float:
        begun = time.monotonic()
        if self._way == "stop":
            self._hand.stop(before)
            url = self._hand.start(after)
        else:
            self._swapper.evict(before, self._way)
            loaded = self._swapper.load(after, self._way)
            if loaded.how == "stop":
                raise BackendError(f"{after.name} had to be started anew: it did not wake by {self._way}")
            url = loaded.url
        parts = urlsplit(url)
        return self._ask_until_answered(after, (parts.hostname or "", parts.port or 80)) - begun

    def _ask_until_answered(self, backend: Backend, address: Address) -> float:
        deadline = time.monotonic() + backend.load_timeout
        while True:
            try:
                return self._ask(backend, address)
            except BackendError:
                if time.monotonic() > deadline:
                    raise
            time.sleep(ASK_PAUSE)

    # Both

    def _ask(self, backend: Backend, address: Address) -> float:
        """The moment of the answer's first byte."""
        known = self._questions.get(backend.name)
        for question in [known] if known else QUESTIONS:
            status, moment = question.ask(backend, address)
            if status < 300:
                self._questions[backend.name] = question
                return moment
        raise BackendError(f"{backend.name} answers {status} to POST {question.path}")


class _Hand(Protocol):
    """What stops and starts a service without the multiplexer."""

    def stop(self, backend: Backend) -> None: ...
    def start(self, backend: Backend) -> str: ...


class _Docker:
    """Docker's own commands, as a person types them who knows the container."""

    def __init__(self, project: str) -> None:
        self._project = project
        self._ids: dict[str, str] = {}

    def stop(self, backend: Backend) -> None:
        self._run(compose.docker_stop(self._id(backend), backend.stop_timeout), backend.stop_timeout)

    def start(self, backend: Backend) -> str:
        id = self._id(backend)
        self._run(compose.docker_start(id))
        [container] = compose.parse_inspect(self._run(compose.docker_inspect([id])))
        url = compose.base_url(container, listen_port(backend))
        if url is None:
            raise BackendError(f"service {backend.name} has no address")
        return url

    def _id(self, backend: Backend) -> str:
        if backend.name not in self._ids:
            self._ids[backend.name] = self._run(
                compose.docker_ps(self._project, backend.name, all=True)
            ).split()[0]
        return self._ids[backend.name]

    def _run(self, argv: Sequence[str], grace: float = 0.0) -> str:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=grace + DOCKER_SECONDS)
        if done.returncode:
            raise compose.complaint(argv, compose.Done(done.returncode, done.stdout, done.stderr))
        return done.stdout


class _Question(NamedTuple):
    """A request whose answer's first byte counts as the first token."""

    path: str
    asks: Mapping[str, object]

    def ask(self, backend: Backend, address: Address) -> tuple[int, float]:
        """The answer's status, and when the first byte of its body came."""
        headers = {"Content-Type": "application/json"}
        if key := api_key(backend.service):
            headers["Authorization"] = f"Bearer {key}"
        connection = http.client.HTTPConnection(*address, timeout=CONNECT_SECONDS)
        try:
            connection.connect()
            connection.sock.settimeout(backend.load_timeout)
            body = json.dumps({"model": backend.served_model, **self.asks})
            connection.request("POST", self.path, body, headers)
            response = connection.getresponse()
            response.read(1)
            moment = time.monotonic()
            response.read()
            return response.status, moment
        except (OSError, http.client.HTTPException) as error:
            raise BackendError(f"{backend.name} does not answer POST {self.path}: {error!r}") from None
        finally:
            connection.close()


QUESTIONS = (
    _Question(
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1, "stream": True},
    ),
    _Question("/v1/completions", {"prompt": "Hi", "max_tokens": 1, "stream": True}),
    _Question("/v1/embeddings", {"input": "Hi"}),
    _Question("/v1/rerank", {"query": "Hi", "documents": ["Hi"]}),
)
"""The first that a backend answers is its own."""


# Figures


def phases(
    log: Iterable[Event], answered: float, told: Iterable[Told] = (), way: str = "stop"
) -> dict[str, float]:
    """The seconds of one swap by phase: its events from the last lease's end on, and the first byte.

    BackendError if the model that went did not rest in the way that was wanted.
    """
    events = iter(log)
    since = _next(events, "released", "severed").at
    found: defaultdict[str, float] = defaultdict(float)
    for phase, kinds in ENDS:
        end = _next(events, *kinds) if kinds else None
        if end and end.kind == "empty" and way != "stop":
            raise BackendError(f"{end.backend} had to be stopped: it did not rest by {way}")
        until = end.at if end else answered
        found[phase] += until - since
        for part in told:
            if since < part.at <= until and part.phase != phase:
                found[part.phase] += part.seconds
                found[phase] -= part.seconds
        since = until
    return dict(found)


def _next(events: Iterator[Event], *kinds: str) -> Event:
    for event in events:
        if event.kind in kinds:
            return event
    raise BackendError(f"the log of a swap has no event {' or '.join(kinds)}")


def figures(swaps: Iterable[Swap]) -> list[Figures]:
    """One line for each backend and way."""
    groups: defaultdict[tuple[str, str], list[Swap]] = defaultdict(list)
    for swap in swaps:
        groups[swap.backend, swap.way].append(swap)
    back = {key: median([swap.in_seconds for swap in group]) for key, group in groups.items()}
    return [_figures(group, back.get((group[0].backend, "stop"))) for group in groups.values()]


def _figures(group: Sequence[Swap], cold_seconds: float | None) -> Figures:
    return Figures(
        group[0].backend,
        group[0].replaces,
        group[0].way,
        len(group),
        {phase: median([s.phases.get(phase, 0.0) for s in group]) for phase in names(group)},
        median([swap.total_seconds for swap in group]),
        median([swap.by_hand_seconds for swap in group]),
        median([swap.own_share_seconds for swap in group]),
        cold_seconds and cold_seconds / median([swap.in_seconds for swap in group]),
    )


def names(measured: Iterable[Swap | Figures]) -> list[str]:
    """The phases that occur, in order."""
    found = set(chain.from_iterable(each.phases for each in measured))
    return [*(phase for phase in PHASES if phase in found), *sorted(found - set(PHASES))]


def table(rows: Sequence[Figures]) -> list[tuple[str, ...]]:
    """For people: seconds, the own share in milliseconds."""
    columns = names(rows)
    head = ("BACKEND", "REPLACES", "WAY", *(name.upper().replace("_", "-") for name in columns))
    lines = [(*head, "TOTAL", "BY-HAND", "OWN-SHARE", "COLD/BACK")]
    for row in rows:
        seconds = [row.phases.get(phase) for phase in columns]
        cells = ["" if each is None else f"{each:.3f}" for each in seconds]
        ratio = "" if row.cold_start_ratio is None else f"{row.cold_start_ratio:.1f}"
        own = f"{1000 * row.own_share_seconds:.0f} ms"
        ends = (f"{row.total_seconds:.3f}", f"{row.by_hand_seconds:.3f}", own, ratio)
        lines.append((row.backend, row.replaces, row.way, *cells, *ends))
    return lines


def write_csv(swaps: Sequence[Swap], file: TextIO) -> None:
    """A line for each swap."""
    columns = names(swaps)
    write = csv.writer(file).writerow
    ends = ("total_seconds", "by_hand_seconds", "own_share_seconds")
    write(("backend", "replaces", "way", "round", *(f"{phase}_seconds" for phase in columns), *ends))
    for swap in swaps:
        seconds = [swap.phases.get(phase, 0.0) for phase in columns]
        seconds += [swap.total_seconds, swap.by_hand_seconds, swap.own_share_seconds]
        write((swap.backend, swap.replaces, swap.way, swap.round, *(f"{each:.6f}" for each in seconds)))
