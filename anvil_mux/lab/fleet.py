"""Replicas of one model in virtual time: what an engine makes of the requests that a router sends it.

Each replica is a continuously batching engine with chunked prefill. Requests wait in the order in which they
came. A step computes one token for every request that decodes and, with what is left of ``step_tokens``, the
next part of the prompts at the head; a prompt is admitted when the KV blocks of all its input and output are
free or can be freed. Whole blocks of a computed prompt are shared by their ids: a request whose first blocks
are there does not compute them again. Blocks that nobody uses stay until their place is needed, the least
lately used first. The last token of a prompt is always computed, for it gives the first token of the answer.

Steps that only decode need no event each: their durations are an arithmetic series. So the replica sleeps
until the first answer is complete, and a request that comes before then wakes it at the end of the step that
it falls into.

The router is asked when a request arrives, and told of its first byte and of its end, as the relay would.
When a replica has nothing left, it may take back requests that wait elsewhere, and is asked for them again.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count, takewhile
from typing import Any, NamedTuple, Protocol

from anvil_mux.errors import MuxError
from anvil_mux.lab.engines import SimulatedEngine
from anvil_mux.lab.workload import Prompt, SessionQueues


class PromptTooLarge(MuxError):
    """A request needs more KV blocks than a replica has."""


class PromptOutcome(NamedTuple):
    """The outcome of a request."""

    prompt: Prompt
    replica: int
    arrived: float
    first_byte: float
    finished: float
    cached_tokens: int
    """Input tokens that were not computed, because their blocks were there."""

    @property
    def ttft(self) -> float:
        """Seconds to the first byte of the answer."""
        return self.first_byte - self.arrived

    @property
    def tpot(self) -> float:
        """Seconds for each token after the first."""
        more = self.prompt.output - 1
        return (self.finished - self.first_byte) / more if more else 0.0

    @property
    def is_refused(self) -> bool:
        """Whether the router let no replica take it: it never had a first byte."""
        return self.replica == REFUSED


REFUSED = -1
"""The number of the replica of a request that was refused."""


class Router(Protocol):
    """A router that chooses replicas by number, and is told how its requests fare, each by a key."""

    def choose(self, key: int, prompt: Prompt, now: float) -> int | None: ...
    def first_byte(self, key: int, now: float) -> None: ...
    def ended(self, key: int, now: float, outcome: PromptOutcome) -> None: ...
    def take_back(self, idle: int, now: float) -> Sequence[int]: ...


class Blocks:
    """The KV blocks of one replica.

    A block is private to a request, shared and pinned by at least one, or shared and idle. Only idle ones
    are evicted, the least lately used first; of one prompt the later ones before the earlier.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.private = 0
        self._pins: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def used(self) -> int:
        return self.private + len(self._pins) + len(self._idle)

    def hit(self, blocks: Sequence[int]) -> int:
        """How many of ``blocks``, from the first on, are there."""
        pinned = sum(1 for _ in takewhile(self._pins.__contains__, blocks))
        if pinned == len(blocks) or blocks[pinned] not in self._idle:
            return pinned
        pins, idle = self._pins, self._idle
        return sum(1 for _ in takewhile(lambda block: block in pins or block in idle, blocks))

    def reserve(self, hit: Sequence[int], private: int) -> bool:
        """Pins the blocks of a hit and takes private ones; without room nothing happens and it is False."""
        woken = sum(map(self._idle.__contains__, hit))
        if self.private + private + len(self._pins) + woken > self.capacity:
            return False
        for block in hit:
            self._idle.pop(block, None)
            self._pins[block] = self._pins.get(block, 0) + 1
        self.private += private
        while self.used > self.capacity:
            self._idle.popitem(last=False)
        return True

    def share(self, blocks: Iterable[int]) -> list[int]:
        """Share private blocks that are computed; returns those that were not there already."""
        fresh = [block for block in blocks if block not in self._pins]
        for block in fresh:
            self._idle.pop(block, None)
            self._pins[block] = 1
        self.private -= len(fresh)
        return fresh

    def release(self, pinned: Sequence[int], private: int) -> None:
        self.private -= private
        for block in reversed(pinned):
            left = self._pins[block] - 1
            if left:
                self._pins[block] = left
            else:
                del self._pins[block]
                self._idle[block] = None


@dataclass(slots=True, eq=False)
class _PlacedPrompt:
    """A request at its replica."""

    key: int
    prompt: Prompt
    arrived: float
    first_byte: float = math.nan
    cached: int = 0
    computed: int = 0
    pinned: list[int] = field(default_factory=list)
    private: int = 0
    replica: int = 0
    gone: bool = False
    """Whether it was taken back."""


class _SimulatedReplica:
    """One engine; the holder of the heap calls ``come``, ``end_step`` and, after either, ``begin_step``."""

    def __init__(self, engine: SimulatedEngine, block_tokens: int) -> None:
        self.engine = engine
        self.blocks = Blocks(engine.kv_tokens // block_tokens)
        self.waiting: deque[_PlacedPrompt] = deque()
        self._block_tokens = block_tokens
        self._prefilling: list[_PlacedPrompt] = []
        self._decoding: list[tuple[int, int, _PlacedPrompt]] = []
        """A heap: (number of the step that completes the answer, key, job)."""
        self._context = 0
        """Tokens of the requests that decode."""
        self._steps = 0
        self._parts: list[tuple[_PlacedPrompt, int]] = []
        self._since = 0.0
        self._ahead = 0
        """Steps that are under way since then: one, or several that only decode."""

    @property
    def busy(self) -> bool:
        return self._ahead > 0

    def begin_step(self, now: float) -> float:
        """When what is begun now ends; never, if there is nothing to do."""
        self._since = now
        self._parts = self._next_parts()
        decoding = len(self._decoding)
        if not self._parts and not decoding:
            self._ahead = 0
            return math.inf
        self._ahead = 1 if self._parts else self._decoding[0][0] - self._steps
        prefill = sum([self.engine.prefill_seconds(job.computed, tokens) for job, tokens in self._parts])
        return self._until(self._ahead) + prefill

    def cut_short(self, now: float) -> float | None:
        """When the decoding step that ``now`` falls into ends, if others were to follow it."""
        if self._parts or self._ahead <= 1:
            return None
        low, high = 1, self._ahead
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self._until(middle) >= now else (middle + 1, high)
        if low == self._ahead:
            return None
        self._ahead = low
        return self._until(low)

    def end_step(self, now: float) -> tuple[list[_PlacedPrompt], list[_PlacedPrompt]]:
        """End a step: the jobs that have their first token now, and those whose answers are complete."""
        self._steps += self._ahead
        self._context += self._ahead * len(self._decoding)
        done = []
        while self._decoding and self._decoding[0][0] <= self._steps:
            done.append(heappop(self._decoding)[2])
        for job, tokens in self._parts:
            job.computed += tokens
        first = [job for job, _ in self._parts if job.computed == job.prompt.tokens]
        for job in first:
            job.first_byte = now
            self._prefilling.remove(job)
            self._start_answer(job, done)
        for job in done:
            if job.prompt.output > 1:
                self._context -= job.prompt.tokens + job.prompt.output
            self.blocks.release(job.pinned, job.private)
        return first, done

    def drop(self, job: _PlacedPrompt) -> None:
        """Give up a request that has no first token yet."""
        job.gone = True
        if job in self.waiting:
            self.waiting.remove(job)
        elif job in self._prefilling:
            self._prefilling.remove(job)
            self._parts = [part for part in self._parts if part[0] is not job]
            self.blocks.release(job.pinned, job.private)

    def _start_answer(self, job: _PlacedPrompt, done: list[_PlacedPrompt]) -> None:
        fresh = self.blocks.share(job.prompt.blocks[len(job.pinned) :])
        job.pinned += fresh
        job.private -= len(fresh)
        more = job.prompt.output - 1
        if more > 0:
            heappush(self._decoding, (self._steps + more, job.key, job))
            self._context += job.prompt.tokens + 1
        else:
            done.append(job)

    def _until(self, steps: int) -> float:
        requests = len(self._decoding)
        first = self.engine.decode_step_seconds(requests, self._context)
        growth = requests * self.engine.context_token_seconds
        return self._since + steps * first + growth * (steps * (steps - 1) / 2)

    def _next_parts(self) -> list[tuple[_PlacedPrompt, int]]:
        budget = self.engine.step_tokens - len(self._decoding)
        parts = []
        for job in self._prefilling:
            tokens = min(budget, job.prompt.tokens - job.computed)
            if tokens:
                parts.append((job, tokens))
            budget -= tokens
        while self.waiting and budget > 0 and self._admit(self.waiting[0]):
            job = self.waiting.popleft()
            tokens = min(budget, job.prompt.tokens - job.computed)
            parts.append((job, tokens))
            budget -= tokens
        return parts

    def _admit(self, job: _PlacedPrompt) -> bool:
        if len(self._prefilling) + len(self._decoding) >= self.engine.max_running:
            return False
        prompt = job.prompt
        hit = self.blocks.hit(prompt.blocks)
        pinned = list(prompt.blocks[:hit])
        private = blocks_of(prompt, self._block_tokens) - hit
        if not self.blocks.reserve(pinned, private):
            return False
        job.pinned, job.private = pinned, private
        job.cached = job.computed = min(hit * self._block_tokens, prompt.tokens - 1)
        self._prefilling.append(job)
        return True


def blocks_of(prompt: Prompt, block_tokens: int) -> int:
    """The blocks that a prompt's input and output take."""
    return -(-(prompt.tokens + prompt.output) // block_tokens)


def simulate(
    prompts: Iterable[Prompt],
    router: Router,
    replicas: int,
    block_tokens: int,
    engine: SimulatedEngine | None = None,
) -> list[PromptOutcome]:
    """Simulate ``prompts``: their outcomes, in the order in which they arrived."""
    return _Fleet(prompts, router, replicas, block_tokens, engine or SimulatedEngine()).run()


class _Fleet:
    def __init__(
        self,
        prompts: Iterable[Prompt],
        router: Router,
        replicas: int,
        block_tokens: int,
        engine: SimulatedEngine,
    ) -> None:
        self._router = router
        self._engine = engine
        self._block_tokens = block_tokens
        self._replicas = [_SimulatedReplica(engine, block_tokens) for _ in range(replicas)]
        self._ends = [math.inf] * replicas
        """When the step of each ends; what the heap says of another moment is void."""
        self._heap: list[tuple[float, int, Callable[[float, Any], None], Any]] = []
        self._order = count()
        self._keys = count()
        self._placed: dict[int, _PlacedPrompt] = {}
        self._answers: list[tuple[int, PromptOutcome]] = []
        ordered = sorted(prompts, key=lambda prompt: prompt.at)
        self._check_fit(ordered)
        self._sessions = SessionQueues(ordered)

    def run(self) -> list[PromptOutcome]:
        for prompt in self._sessions.first:
            self._at(prompt.at, self._arrive, prompt)
        while self._heap:
            now, _, call, argument = heappop(self._heap)
            call(now, argument)
        return [answer for _, answer in sorted(self._answers)]

    def _check_fit(self, prompts: Iterable[Prompt]) -> None:
        there = self._engine.kv_tokens // self._block_tokens
        for prompt in prompts:
            if (need := blocks_of(prompt, self._block_tokens)) > there:
                raise PromptTooLarge(
                    f"a request of {prompt.tokens} + {prompt.output} tokens needs {need} KV blocks of "
                    f"{self._block_tokens} tokens; a replica has {there}: raise kv_tokens"
                )

    def _at(self, moment: float, call: Callable[[float, Any], None], argument: object) -> None:
        heappush(self._heap, (moment, next(self._order), call, argument))

    def _arrive(self, now: float, prompt: Prompt) -> None:
        self._place(now, _PlacedPrompt(next(self._keys), prompt, now))

    def _place(self, now: float, job: _PlacedPrompt) -> None:
        choice = self._router.choose(job.key, job.prompt, now)
        if choice is None:
            job.replica, job.first_byte = REFUSED, math.inf
            self._note(math.inf, job)
            self._follow(now, job.prompt.session)
            return
        job.replica = choice
        self._placed[job.key] = job
        ingress = self._engine.ingress_seconds + job.prompt.tokens * self._engine.ingress_token_seconds
        self._at(now + ingress, self._come, job)

    def _come(self, now: float, job: _PlacedPrompt) -> None:
        if job.gone:
            return
        replica = self._replicas[job.replica]
        replica.waiting.append(job)
        end = replica.cut_short(now) if replica.busy else replica.begin_step(now)
        if end is not None:
            self._schedule(job.replica, end)

    def _schedule(self, which: int, end: float) -> None:
        self._ends[which] = end
        if end < math.inf:
            self._at(end, self._end_step, which)

    def _end_step(self, now: float, which: int) -> None:
        if now != self._ends[which]:
            return
        replica = self._replicas[which]
        first, done = replica.end_step(now)
        for job in first:
            self._router.first_byte(job.key, now)
        for job in done:
            self._finish(now, job)
        self._schedule(which, replica.begin_step(now))

    def _finish(self, now: float, job: _PlacedPrompt) -> None:
        del self._placed[job.key]
        self._router.ended(job.key, now, self._note(now, job))
        if all(other.replica != job.replica for other in self._placed.values()):
            for key in self._router.take_back(job.replica, now):
                moved = self._placed.pop(key)
                self._replicas[moved.replica].drop(moved)
                self._place(now, _PlacedPrompt(key, moved.prompt, moved.arrived))
        self._follow(now, job.prompt.session)

    def _note(self, finished: float, job: _PlacedPrompt) -> PromptOutcome:
        outcome = PromptOutcome(
            prompt=job.prompt,
            replica=job.replica,
            arrived=job.arrived,
            first_byte=job.first_byte,
            finished=finished,
            cached_tokens=job.cached,
        )
        self._answers.append((job.key, outcome))
        return outcome

    def _follow(self, now: float, session: str) -> None:
        """Have the next request of a session come."""
        if following := self._sessions.next_of(session):
            self._at(max(now, following.at), self._arrive, following)
