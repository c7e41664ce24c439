"""Workloads: which model is asked for, when and by whom; and traces of prompts, which say how long these are.

A ``Workload`` knows nothing of a compose file: it names models, says when requests for them arrive, how long
the answer to each takes alone, and how long the models load. It comes from ``PROFILES`` (traffic made to
order), from a file, or from the event log of a running program (recording.py).

A file holds JSON lines and may be compressed with gzip or xz. The first line is a header, every other one
a request:

    {"workload": "name", "about": "...", "source": "...", "licence": "...",
     "models": {"big": {"load_seconds": 30}}, "resident": ["big"], "stop_seconds": 1}
    {"at": 12.5, "model": "big", "seconds": 4}
    {"session": "s1", "at": 13, "model": "big", "seconds": 4}
    {"session": "s1", "think": 2.5, "model": "big", "seconds": 6}

Moments and durations are in seconds. A request without a session comes at its moment, whatever else happens.
Those of a session come one after the other: the first at its moment, each later one ``think`` seconds after
the answer to the one before.

A trace is such a file of recorded prompts: how long they are, when they came, and which of them begin alike.

    {"trace": "name", "about": "...", "source": "...", "licence": "...", "block_tokens": 64, "seconds": 600}
    {"at": 12.5, "in": 1000, "out": 80, "blocks": "1-12,40-42"}
    {"session": 7, "at": 0, "in": 900, "out": 60, "blocks": "1-12,50-51"}

``in`` and ``out`` are tokens. ``blocks`` are ranges of ids, one for each whole block of ``block_tokens`` of
the input; equal ids mean that all input up to there is equal. Requests of a session come each at its moment,
but not before the answer to the one before; their moments count from the beginning of the session, which is
not in the trace: ``Trace.draw`` draws it, evenly over ``seconds``, and takes what comes within them. So which
requests there are depends on the seed alone, and every policy gets the same.
"""

from __future__ import annotations

import json
import math
import random
import string
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from heapq import merge
from pathlib import Path
from typing import Any, NamedTuple

from anvil_mux.clock import count_in
from anvil_mux.config.config import Backend, Config
from anvil_mux.errors import MuxError
from anvil_mux.lab.engines import Engines
from anvil_mux.lab.simulate import Arrival, Follow
from anvil_mux.telemetry.eventlog import UNREADABLE, lines

SHIPPED = Path(__file__).parent / "workloads"
"""Workload files that come with the program."""
SHIPPED_TRACES = Path(__file__).parent / "traces"
SHIPPED_AS = "*.jsonl.xz"
"""The names of files that come with the program: what gzip makes of them is half as large again."""


class BadWorkload(MuxError):
    """A workload cannot be read or does not fit the compose file; says where and what to do."""


@dataclass(frozen=True)
class ModelNames:
    """The names of models on a server or in a compose file, by those of a workload."""

    of: Mapping[str, str] = field(default_factory=dict)
    every: str = ""
    """The one for all that have none of their own; empty: the workload's."""

    def name(self, model: str) -> str:
        return self.of.get(model) or self.every or model

    @classmethod
    def parse(cls, written: Iterable[str]) -> ModelNames:
        """The names of ``a=b``, which is for model a, and of ``b``, which is for every model."""
        pairs = [text.rpartition("=") for text in written]
        every = next((there for model, _, there in pairs if not model), "")
        return cls({model: there for model, _, there in pairs if model}, every)


@dataclass(frozen=True)
class Workload:
    """The requests of clients, and the costs of loads; independent of any compose file."""

    name: str
    load_seconds: Mapping[str, float]
    """The seconds of a load, of every model that is asked for."""
    requests: tuple[Arrival, ...]
    """The requests whose moments are known, in their order."""
    follow: Callable[[], Follow] | None = None
    """Makes a fresh ``follow`` for one run: the requests that depend on answers."""
    resident: tuple[str, ...] = ()
    """Models that are loaded at the start."""
    stop_seconds: float = 0.0
    clients: tuple[Hashable, ...] = ()
    """The senders that ask again and again until the end, so that it can be compared how much each gets."""

    def config(self) -> Config:
        """The configuration without a compose file: every model is one backend, and has GPU 0 to itself.

        No drain is cut short: a policy must not look good because it severed more requests than another.
        """
        backends = tuple([Backend(model, model, ("0",)) for model in self.load_seconds])
        return Config(backends, drain_timeout=math.inf)

    def engines(self, config: Config) -> Engines:
        """The engines that load as the workload says, for the backends of ``config``."""
        loads = {b.name: self.load_seconds[b.model] for b in config.backends if b.model in self.load_seconds}
        return Engines(loads, stop_seconds=self.stop_seconds)

    def residents(self, config: Config) -> list[str]:
        """The backends of ``config`` that run at the start: one for each model that is loaded then."""
        first = {backend.model: backend.name for backend in reversed(config.backends)}
        return [first[model] for model in self.resident]

    def renamed(self, names: ModelNames) -> Workload:
        """The same traffic under other names; several models that become one load as long as the slowest."""
        loads: dict[str, float] = {}
        for model, seconds in self.load_seconds.items():
            name = names.name(model)
            loads[name] = max(seconds, loads.get(name, 0.0))
        return replace(
            self,
            load_seconds=loads,
            requests=tuple([each._replace(model=names.name(each.model)) for each in self.requests]),
            follow=self.follow and partial(self._follow_renamed, names),
            resident=tuple(dict.fromkeys(names.name(model) for model in self.resident)),
        )

    def _follow_renamed(self, names: ModelNames) -> Follow:
        assert self.follow
        follow = self.follow()
        before = {names.name(model): model for model in self.load_seconds}

        def following(request: Arrival, now: float) -> Iterator[Arrival]:
            for each in follow(request._replace(model=before[request.model]), now):
                yield each._replace(model=names.name(each.model))

        return following


class Rounds:
    """Clients that send the next round when all requests of the one before have ended.

    ``Arrival.at`` counts from the beginning of its round. The first round is that of ``Workload.requests``.
    """

    def __init__(self, rounds: Iterable[Sequence[Arrival]]) -> None:
        self._rounds = iter(rounds)
        self._open = len(next(self._rounds))

    def __call__(self, request: Arrival, now: float) -> Sequence[Arrival]:
        self._open -= 1
        if self._open:
            return ()
        following = next(self._rounds, ())
        self._open = len(following)
        return [_later(request, now) for request in following]


class Sessions:
    """Clients that each send their next request some time after the answer to the one before.

    ``Arrival.at`` counts from that answer; by ``Arrival.sender``.
    """

    def __init__(self, rest: Mapping[object, Iterable[Arrival]]) -> None:
        self._rest = {sender: iter(requests) for sender, requests in rest.items()}

    def __call__(self, request: Arrival, now: float) -> Sequence[Arrival]:
        for following in self._rest.get(request.sender, ()):
            return (_later(following, now),)
        return ()


class Tireless:
    """Clients that each ask the same again ``think_seconds`` after their answer, until a moment.

    ``draw``: how long the next request of a sender is served; None: as long as the one before.
    """

    def __init__(
        self, until: float, think_seconds: float = 0.0, draw: Callable[[Hashable], float] | None = None
    ) -> None:
        self._until, self._think_seconds, self._draw = until, think_seconds, draw

    def __call__(self, request: Arrival, now: float) -> Sequence[Arrival]:
        at = now + self._think_seconds
        if at >= self._until:
            return ()
        seconds = self._draw(request.sender) if self._draw else request.seconds
        return (request._replace(at=at, seconds=seconds),)


def _later(request: Arrival, now: float) -> Arrival:
    return request._replace(at=now + request.at)


# Profiles: a loads in 3 s, b in 9 s, a is loaded at the start, a request takes 0.5 s.

LOADS = {"a": 3.0, "b": 9.0}
SERVICE_SECONDS = 0.5


def _profile(name: str, requests: Iterable[Arrival], follow: Callable[[], Follow] | None = None) -> Workload:
    return Workload(name, LOADS, tuple(requests), follow, resident=("a",))


def _in_rounds(name: str, rounds: Sequence[Sequence[Arrival]]) -> Workload:
    return _profile(name, rounds[0], partial(Rounds, rounds))


def _ask(model: str, at: float = 0.0) -> Arrival:
    return Arrival(at, model, SERVICE_SECONDS)


def single(seed: int = 0) -> Workload:
    """40 requests for the model that is loaded, at once."""
    return _profile("single", [_ask("a")] * 40)


def balanced(seed: int = 0) -> Workload:
    """20 rounds, each a and 0.1 s later b; the next round begins when both have been answered."""
    return _in_rounds("balanced", [(_ask("a"), _ask("b", 0.1))] * 20)


def bursty(seed: int = 0) -> Workload:
    """Four bursts of 10 requests (a, b, a, b), each when all of the one before have been answered."""
    return _in_rounds("bursty", [[_ask(model)] * 10 for model in "abab"])


def dominant(seed: int = 0) -> Workload:
    """50 requests, one every 50 ms, every fifth for b."""
    return _profile("dominant", [_ask("b" if n % 5 == 4 else "a", n / 20) for n in range(50)])


def interleave(seed: int = 0) -> Workload:
    """30 requests for a and 30 for b at once, in turns."""
    return _profile("interleave", [_ask("ab"[n % 2]) for n in range(60)])


MIXED_SECONDS = 1800.0
MIXED_RATES = {"a": 0.3, "b": 0.1}
MIXED_MEDIAN, MIXED_SIGMA = 6.0, 0.8


def mixed(seed: int = 0) -> Workload:
    """Half an hour of Poisson arrivals, 0.3/s for a and 0.1/s for b; lognormal service around 6 s."""
    arrivals = (_arrivals(model, rate, seed) for model, rate in MIXED_RATES.items())
    return _profile("mixed", merge(*arrivals))


def _arrivals(model: str, rate: float, seed: int) -> Iterator[Arrival]:
    draw = random.Random(f"mixed {model} {seed}")
    at = draw.expovariate(rate)
    while at < MIXED_SECONDS:
        yield Arrival(at, model, draw.lognormvariate(math.log(MIXED_MEDIAN), MIXED_SIGMA))
        at += draw.expovariate(rate)


TWO_CLIENTS_SECONDS = 600.0


def two_clients(seed: int = 0) -> Workload:
    """One client of a and one of b, each of whom asks again once it is answered, for ten minutes."""
    first = [_ask(model)._replace(sender=model) for model in "ab"]
    made = _profile("two-clients", first, partial(Tireless, TWO_CLIENTS_SECONDS))
    return replace(made, clients=("a", "b"))


MOST_CLIENTS = 1000


@dataclass(frozen=True)
class ClientGroups:
    """Clients of models a, b, c and so on, who ask again when they have their answers and have thought."""

    counts: tuple[int, ...] = (4, 4)
    """How many clients each model has."""
    load_seconds: float = 1.2
    stop_seconds: float = 0.2
    answer_seconds: float = 2.0
    """The mean length of an answer: they are drawn evenly from 0.7 to 1.3 times that."""
    think_seconds: float = 0.0
    """How long a client thinks between an answer and its next request."""
    seconds: float = 600.0
    """How long they go on asking."""

    def workload(self, seed: int = 0) -> Workload:
        """All ask at once in the beginning, and a is loaded then."""
        first, seconds = [], self._lengths(f"first {seed}")
        for model, count in zip(string.ascii_lowercase, self.counts, strict=False):
            senders = [f"{model}{number}" for number in range(1, count + 1)]
            first += [Arrival(0.0, model, seconds(sender), sender=sender) for sender in senders]
        return Workload(
            name="clients",
            load_seconds=dict.fromkeys([each.model for each in first], self.load_seconds),
            requests=tuple(first),
            follow=lambda: Tireless(self.seconds, self.think_seconds, self._lengths(f"later {seed}")),
            resident=("a",),
            stop_seconds=self.stop_seconds,
            clients=tuple([each.sender for each in first]),
        )

    def _lengths(self, seed: str) -> Callable[[Hashable], float]:
        """The seconds of the next answer of a sender, whatever others ask for meanwhile."""
        draws: dict[Hashable, random.Random] = {}

        def seconds(sender: Hashable) -> float:
            if sender not in draws:
                draws[sender] = random.Random(f"clients {seed} {sender}")
            return self.answer_seconds * draws[sender].uniform(0.7, 1.3)

        return seconds


def read_clients(text: str) -> tuple[int, ...]:
    """How many clients each model has, of ``4+4``; or ValueError."""
    counts = [count_in(word, MOST_CLIENTS) or 0 for word in text.split("+")]
    if len(counts) > len(string.ascii_lowercase) or not all(counts) or sum(counts) > MOST_CLIENTS:
        raise ValueError(
            f"must be how many clients each model has, as 4+4, for at most {len(string.ascii_lowercase)} "
            f"models and {MOST_CLIENTS} clients, not {text[:60]}"
        )
    return tuple(counts)


PROFILES: dict[str, Callable[[int], Workload]] = {
    "single": single,
    "balanced": balanced,
    "bursty": bursty,
    "dominant": dominant,
    "interleave": interleave,
    "mixed": mixed,
    "two-clients": two_clients,
    "clients": ClientGroups().workload,
}
"""Each takes a seed."""

SEEDED = frozenset({"mixed", "clients"})
"""The profiles that differ by seed."""


# Files


def find(name: str) -> Path:
    """The workload file of this path, or the shipped one of this name."""
    return find_among(name, " workloads", SHIPPED)


def find_among(name: str, what: str, *folders: Path) -> Path:
    """The file of this path, or the one of this name in ``folders``, where ``what`` is shipped."""
    files = [file for folder in folders for file in sorted(folder.glob(SHIPPED_AS))]
    shipped = {file.name.partition(".")[0]: file for file in files}
    if name in shipped and not Path(name).is_file():
        return shipped[name]
    if not Path(name).exists():
        raise BadWorkload(f"{name}: no such file; shipped{what}: {', '.join(shipped)}")
    return Path(name)


@contextmanager
def objects(path: Path) -> Iterator[Iterator[dict[str, Any]]]:
    """The objects of a file of JSON lines, to be read; BadWorkload names the line that cannot be used."""
    number = 0

    def each() -> Iterator[dict[str, Any]]:
        nonlocal number
        for line in lines(path):
            number += 1
            if line.strip():
                yield _parsed(line)

    try:
        yield each()
    except (ValueError, KeyError) as error:
        what = f"{error.args[0]} is missing" if isinstance(error, KeyError) else error
        raise BadWorkload(f"{path}:{max(number, 1)}: {what}") from None
    except UNREADABLE as error:
        raise BadWorkload(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None


def _parsed(line: str) -> dict[str, Any]:
    try:
        said = json.loads(line)
    except ValueError:
        said = None
    if not isinstance(said, dict):
        raise ValueError(f"must be one JSON object, not {line.strip()[:60]!r}")
    return said


def read(path: Path) -> Workload:
    """The workload of a file; BadWorkload names the line that cannot be used."""
    with objects(path) as file:
        header = next(file, None)
        if header is None:
            raise ValueError("is empty")
        reading = _WorkloadReader(header)
        for each in file:
            reading.take(each)
        return reading.workload()


class _WorkloadReader:
    """The workload of the lines read so far."""

    def __init__(self, header: Mapping[str, Any]) -> None:
        models, resident = header.get("models"), header.get("resident", [])
        if not header.get("workload") or not isinstance(models, dict) or not models:
            raise ValueError('must be the header: {"workload": "a name", "models": {...}, ...}')
        self._load_seconds = {name: _load_seconds(name, about) for name, about in models.items()}
        if not isinstance(resident, list) or any(name not in [*models] for name in resident):
            raise ValueError(f"resident: must be a list of {', '.join(models)}, not {json.dumps(resident)}")
        self._name, self._resident = str(header["workload"]), tuple(resident)
        self._stop_seconds = _seconds(header, "stop_seconds", 0.0)
        self._requests: list[Arrival] = []
        self._sessions: dict[object, list[Arrival]] = {}

    def take(self, said: Mapping[str, Any]) -> None:
        """Take the next request."""
        model, session = said.get("model"), said.get("session")
        if not isinstance(model, str) or model not in self._load_seconds:
            known = ", ".join(self._load_seconds)
            raise ValueError(f"unknown model {json.dumps(model)}; the header has {known}")
        if not isinstance(session, str | int | None):
            raise ValueError(f"session must be text or a number, not {json.dumps(session)}")
        earlier = self._sessions.get(session)
        moment = _seconds(said, "at" if earlier is None else "think")
        request = Arrival(moment, model, _seconds(said, "seconds"), sender=session)
        if earlier is not None:
            earlier.append(request)
            return
        self._requests.append(request)
        if session is not None:
            self._sessions[session] = []

    def workload(self) -> Workload:
        if not self._requests:
            raise ValueError("holds no request")
        return Workload(
            name=self._name,
            load_seconds=self._load_seconds,
            requests=tuple(sorted(self._requests, key=lambda request: request.at)),
            follow=partial(Sessions, self._sessions) if self._sessions else None,
            resident=self._resident,
            stop_seconds=self._stop_seconds,
        )


def _load_seconds(model: str, about: object) -> float:
    if not isinstance(about, dict):
        raise ValueError(f'models: {model}: must be as {{"load_seconds": 30}}, not {json.dumps(about)}')
    return _seconds(about, "load_seconds")


def _seconds(said: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = said.get(key, default)
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < math.inf:
        return float(value)
    raise ValueError(f"{key} must be seconds, a number of at least 0, not {json.dumps(value)}")


# Traces of prompts


class Prompt(NamedTuple):
    """One request: a prompt and the length of its answer.

    In a session it comes no sooner than the answer to the one before.
    """

    at: float
    """When it is due."""
    tokens: int
    output: int
    blocks: tuple[int, ...] = ()
    """Ids of the whole blocks of its input, from the first on; equal ids begin alike."""
    session: str = ""
    model: str = ""
    """The name by which a server is asked; empty: there is only one model."""
    patience: float = math.inf
    """Seconds after which its client leaves, if no byte of the answer has come."""
    arrival: Arrival | None = None
    """The request of a workload that it stands for."""


class SessionQueues:
    """The prompts of sessions, of which each but the first waits for the answer to the one before."""

    def __init__(self, prompts: Iterable[Prompt]) -> None:
        self.first: list[Prompt] = []
        """The prompts that wait for no other."""
        self._rest: dict[str, deque[Prompt]] = {}
        for prompt in prompts:
            if prompt.session in self._rest:
                self._rest[prompt.session].append(prompt)
                continue
            if prompt.session:
                self._rest[prompt.session] = deque()
            self.first.append(prompt)

    def next_of(self, session: str) -> Prompt | None:
        """The prompt that follows upon an answer, if there is one."""
        rest = self._rest.get(session)
        return rest.popleft() if rest else None


@dataclass(frozen=True)
class Trace:
    """The requests of one file."""

    name: str
    block_tokens: int
    seconds: float
    sessions: tuple[tuple[Prompt, ...], ...]
    """The requests of each session in their order, with moments from its beginning on."""
    alone: tuple[Prompt, ...]
    """Requests without a session."""

    def draw(self, seed: int, sessions: int | None = None) -> list[Prompt]:
        """The requests of one run: those of all sessions, or of so many, that come within ``seconds``.

        BadWorkload if there is none.
        """
        draw = random.Random(f"{self.name} {seed}")
        chosen: Sequence[tuple[Prompt, ...]] = self.sessions
        if sessions is not None and chosen:
            if sessions > len(chosen):
                raise BadWorkload(f"{self.name} has {len(chosen)} sessions, not {sessions}")
            chosen = draw.sample(chosen, sessions)
        drawn = [prompt for prompt in self.alone if prompt.at < self.seconds]
        for session in chosen:
            begin = draw.uniform(0.0, self.seconds)
            moved = [prompt._replace(at=begin + prompt.at) for prompt in session]
            drawn += [prompt for prompt in moved if prompt.at < self.seconds]
        if not drawn:
            raise BadWorkload(f"{self.name} has no request within {self.seconds:g} s with seed {seed}")
        return sorted(drawn, key=lambda prompt: prompt.at)


def find_trace(name: str) -> Path:
    """The trace of this path, or the shipped one of this name."""
    return find_among(name, " traces", SHIPPED_TRACES)


def read_trace(path: Path) -> Trace:
    """The trace of a file; BadWorkload names the line that cannot be used."""
    header: dict[str, Any] = {}
    prompts: list[Prompt] = []
    with objects(path) as file:
        for each in file:
            if header:
                prompts.append(_prompt(each, header["block_tokens"]))
            else:
                header = _trace_header(each)
    if not prompts:
        raise BadWorkload(f"{path}: holds no request")
    sessions: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        sessions.setdefault(prompt.session, []).append(prompt)
    alone = sessions.pop("", [])
    together = tuple([tuple(sorted(each, key=lambda p: p.at)) for each in sessions.values()])
    return Trace(header["trace"], header["block_tokens"], header["seconds"], together, tuple(alone))


def _trace_header(said: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(said.get("trace"), str):
        raise ValueError('must be the header: {"trace": "a name", "block_tokens": 64, "seconds": 600, ...}')
    return {**said, "block_tokens": _whole(said, "block_tokens", 1), "seconds": _seconds(said, "seconds")}


def _prompt(said: dict[str, Any], block_tokens: int) -> Prompt:
    tokens, blocks = _whole(said, "in", 1), tuple(_ids(said.get("blocks", "")))
    if len(blocks) * block_tokens > tokens:
        raise ValueError(f"{len(blocks)} blocks of {block_tokens} tokens are more than {tokens} tokens")
    session = "" if said.get("session") is None else str(said["session"])
    return Prompt(_seconds(said, "at"), tokens, _whole(said, "out", 1), blocks, session)


def _whole(said: dict[str, Any], key: str, least: int) -> int:
    value = said[key]
    if type(value) is not int or value < least:
        raise ValueError(f"{key}: must be a whole number of at least {least}, not {json.dumps(value)}")
    return value


def _ids(ranges: object) -> list[int]:
    """``1-3,7``: 1, 2, 3, 7."""
    ids: list[int] = []
    for part in ranges.split(",") if isinstance(ranges, str) and ranges else ():
        first, _, last = part.partition("-")
        if not first.isdigit() or not (last or first).isdigit():
            raise ValueError(f'blocks: must be ranges like "1-12,40", not {json.dumps(part)}')
        ids += range(int(first), int(last or first) + 1)
    return ids
