"""The work that each replica of one model has to do, as counted from our own leases and streams.

A choice charges its replica at once, so that the next request sees it. The input that a replica has not in
its cache counts as prefill until the first byte of the answer, and all its tokens as decode from then on
until the end. Of an answer that is not streamed the first byte comes with the end, so there the prefill is
over when the engine has had the time for it, after all prompts before it: by its profile, or else at the
speed that is learned from prompts that waited for no other. What engines say at the end of an answer (tokens,
and how many of them were cached) corrects how long a token is taken to be, and how much a replica's cache to
hold. That speed, and what caches hold of which nobody says, are learned over all of a model's replicas
together: they mostly run the same engine on the same GPU.

With a profile of a replica, and a policy that says ``predict_prefill``, the prefill that is charged falls
with time, before any byte comes: prompts are taken to be computed in their order, as fast as the profile
says. Each first byte of a stream says anew how far the engine is.

A request in two stages is charged to both replicas at once: its input to the one that computes it, until that
has answered, and to the other, which is given it, as if all of it were cached there and answered already.

Requests are identities held in a dict, never counts, so an end that comes twice, or after the replica was
forgotten, changes nothing, and all counts are 0 when nobody is left.

In the mode full an engine's own figures are merged in (``observe``). Of requests those are added that are not
ours: what it says, less ours that it had then, whether they are there still or ended since. Which of ours it
answers we know better: to an engine a prompt that it computes runs, too. Of its cache the larger of both
counts. Tokens no engine says.

Several anvil-mux that share engines tell each other what they have there (``reports``, ``hear``; store.py).
What others have counts like our own, a moment late; of what an engine says the latest, whoever heard it.

No lock and no clock: the GPU group calls it under the multiplexer's lock, the simulator from its loop.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from anvil_mux.config.config import Backend
from anvil_mux.config.values import Profile
from anvil_mux.routing.prefix import BYTES_PER_TOKEN, Prefixes
from anvil_mux.routing.routing import (
    KV_TOKENS,
    Choice,
    Replica,
    Routing,
    RoutingMemory,
    Work,
    choose,
    explain,
)

LEARN = 0.1
"""The weight of one answer in the means: the length of a token, and the seconds of its prefill."""
BYTES_LEAST, BYTES_MOST = 1.0, 16.0
SURPRISES = 3
"""Answers in a row that find less cached than expected, after which the cache is taken for smaller."""
LEAST_TOKENS, MOST_TOKENS = 1 << 14, 1 << 24
"""The bounds of what caches of unknown size are thought to hold."""


class EngineLoad(NamedTuple):
    """The requests and the cache of an engine, by its own figures."""

    running: int
    waiting: int | None = None
    """Requests that wait there; None: not reported."""
    usage: float | None = None
    """How full its cache is, from 0 to 1; None: not reported."""


class EngineFigures(NamedTuple):
    """The last figures of an engine, in the mode full."""

    load: EngineLoad | None
    """The figures; None: there were none yet."""
    age_seconds: float
    """Seconds since they came, or since the engine was first looked at."""


class Report(NamedTuple):
    """The requests of one anvil-mux at a replica, and the last figures of its engine."""

    num_requests: int = 0
    num_waiting_requests: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    num_tokens: int = 0
    load: EngineLoad | None = None
    age_seconds: float = 0.0
    """The age of ``load``."""


NOTHING = Report()


@dataclass(slots=True)
class _Charge:
    """One request at its replica."""

    work: Work
    hit: int
    """Tokens of its input that were thought to be in the cache."""
    since: float = 0.0
    alone: bool = False
    """Whether its engine had no other prompt to compute when it came."""
    answering: bool = False
    """Whether a byte of its answer came."""
    computed: bool = False
    """Whether it counts as decode: its engine answers, or must be done with its prompt."""

    @property
    def missing(self) -> int:
        return max(self.work.tokens - self.hit, 0)

    @property
    def uncomputed(self) -> int:
        return 0 if self.computed else self.missing


@dataclass(slots=True)
class _Account:
    """The account of a replica: its requests and their tokens."""

    backend: Backend
    entries: dict[Hashable, _Charge] = field(default_factory=dict)
    prefill_tokens: int = 0
    decode_tokens: int = 0
    decode_batch: int = 0
    num_tokens: int = 0
    kv_tokens: int = 0
    """How many tokens its cache is thought to hold."""
    surprises: int = 0
    computing_since: float = 0.0
    """The moment since which its engine computes the prompts that it has not answered yet."""
    others: Report = NOTHING
    """The requests of all other anvil-mux there, together."""
    load: EngineLoad | None = None
    heard: float | None = None
    """When its engine last reported figures, or else when it was first looked at."""
    ended: int = 0
    """Requests that it had then, and that have ended since."""

    def __post_init__(self) -> None:
        self.kv_tokens = self.kv_tokens or self.backend.kv_tokens or KV_TOKENS

    def says(self, load: EngineLoad | None, at: float) -> None:
        self.load, self.heard, self.ended = load, at, 0


class InFlightTracker:
    """The accounts, the caches and the memory of the replicas of one model."""

    def __init__(self, routing: Routing, backends: Iterable[Backend], *, full: bool = False) -> None:
        self.routing = routing
        self._full = full
        self._accounts = {each.name: _Account(each) for each in backends}
        self._where: dict[Hashable, str] = {}
        self._kv_tokens = KV_TOKENS  # of those caches of which nobody says
        self._memory = RoutingMemory(replicas=len(self._accounts))
        self.bytes_per_token = BYTES_PER_TOKEN
        """The mean bytes of a token. Reading it needs no lock."""
        self._prompt_tokens = 0.0  # the means of prompts that waited for no other:
        self._prompt_seconds = 0.0  # their quotient is what a token takes; 0: not known
        self.prefixes = Prefixes(self._accounts)

    def leave(self, backend: str) -> None:
        """Go on without a replica."""
        self.forget(backend)
        del self._accounts[backend]
        self.prefixes.leave(backend)
        self._memory.replicas = len(self._accounts)

    def join(self, backend: Backend) -> None:
        """Go on with another replica, or with one described otherwise, of which all that is known is kept."""
        account = self._accounts.get(backend.name)
        if account is None:
            self._accounts[backend.name] = _Account(backend)
            self.prefixes.join(backend.name)
            self._memory.replicas = len(self._accounts)
            return
        if account.backend.kv_tokens != backend.kv_tokens:
            account.kv_tokens = backend.kv_tokens or self._kv_tokens
        account.backend = backend

    def __repr__(self) -> str:
        return f"<InFlightTracker {self.routing.name} {[len(a.entries) for a in self._accounts.values()]}>"

    def observe(self, backend: str, load: EngineLoad | None, now: float) -> None:
        """Note the figures of a replica's engine; None: it answered, and has none."""
        self._accounts[backend].says(load, now)

    def figures(self, backend: str, now: float) -> EngineFigures | None:
        """The last figures of a replica's engine; None where engines are not read, or not yet."""
        account = self._accounts[backend]
        if not self._full or account.heard is None:
            return None
        return EngineFigures(account.load, now - account.heard)

    def reports(self, now: float) -> dict[str, Report]:
        """The reports for other anvil-mux."""
        self._pass_time(self._accounts, now)
        return {
            name: Report(
                num_requests=len(each.entries),
                num_waiting_requests=len(each.entries) - each.decode_batch,
                prefill_tokens=self._uncomputed(each, now),
                decode_tokens=each.decode_tokens,
                num_tokens=each.num_tokens,
                load=each.load,
                age_seconds=0.0 if each.heard is None else now - each.heard,
            )
            for name, each in self._accounts.items()
        }

    def hear(self, heard: Mapping[str, Sequence[Report]], now: float) -> None:
        """Take over the reports of all other anvil-mux; a replica without one has nothing of theirs."""
        for name, account in self._accounts.items():
            reports = heard.get(name, ())
            account.others = Report(
                sum([each.num_requests for each in reports]),
                sum([each.num_waiting_requests for each in reports]),
                sum([each.prefill_tokens for each in reports]),
                sum([each.decode_tokens for each in reports]),
                sum([each.num_tokens for each in reports]),
            )
            for report in reports:
                at = now - report.age_seconds
                if report.load and (account.load is None or account.heard is None or at > account.heard):
                    account.says(report.load, at)

    def view(
        self, work: Work, among: Sequence[str], failed: Sequence[str] = (), now: float = 0.0
    ) -> list[Replica]:
        """The replicas as a choice for ``work`` sees them; those that ``failed`` cannot be chosen."""
        self._pass_time((*among, *failed), now)
        hits = self.prefixes.hits(work.blocks, among) if work.blocks else {}
        at = now if self.routing.predict_prefill else None
        replicas = [self._replica(name, work, hits.get(name, 0), at) for name in among]
        if self._full:
            replicas = [self._observed(replica, now) for replica in replicas]
        replicas += [self._replica(name, work, 0)._replace(schedulable=False) for name in failed]
        return replicas

    def _with_hits(self, replicas: Sequence[Replica], work: Work) -> list[Replica]:
        """Return the replicas as a choice for ``work`` sees them, which were viewed for no work."""
        names = [replica.backend for replica in replicas]
        hits = self.prefixes.hits(work.blocks, names) if work.blocks else {}
        return [each._replace(hit_tokens=_hit_tokens(work, hits.get(each.backend, 0))) for each in replicas]

    def _observed(self, ours: Replica, now: float) -> Replica:
        """The replica, with its engine's figures."""
        account = self._accounts[ours.backend]
        if account.heard is None:
            account.heard = now
        since = account.heard
        ours = ours._replace(age_seconds=now - since)
        if account.load is None:
            return ours
        running, waiting, usage = account.load
        later = [entry for entry in account.entries.values() if entry.since > since]
        known = account.ended + len(account.entries) - len(later)
        foreign = max(running + (waiting or 0) - known - account.others.num_requests, 0)
        answered = min(foreign, running)
        return ours._replace(
            num_requests=ours.num_requests + foreign,
            num_waiting_requests=ours.num_waiting_requests + foreign - answered,
            decode_batch=ours.decode_batch + answered,
            kv_usage=usage,
            unreported_tokens=sum([entry.work.tokens - entry.uncomputed for entry in later]),
        )

    def _replica(self, name: str, work: Work, blocks: int, at: float | None = None) -> Replica:
        """The replica; ``at``: the moment at which its prefill is predicted."""
        account = self._accounts[name]
        backend = account.backend
        prefill_tokens = account.prefill_tokens if at is None else self._uncomputed(account, at)
        others = account.others
        total = len(account.entries) + others.num_requests
        waiting = len(account.entries) - account.decode_batch + others.num_waiting_requests
        return Replica(
            backend=name,
            infer_type=backend.infer_type,
            schedulable=True,
            age_seconds=0.0,
            node=backend.node,
            failure_domain=backend.failure_domain,
            num_requests=total,
            num_waiting_requests=waiting,
            prefill_tokens=prefill_tokens + others.prefill_tokens,
            decode_tokens=account.decode_tokens + others.decode_tokens,
            decode_batch=total - waiting,
            num_tokens=account.num_tokens + others.num_tokens,
            hit_tokens=_hit_tokens(work, blocks),
            kv_tokens=backend.kv_tokens or 0,
            profile=backend.profile,
            cache_tokens=account.kv_tokens,
            share=self._memory.share(name),
            usual_tokens=self._memory.usual_tokens,
        )

    def _uncomputed(self, account: _Account, now: float) -> int:
        """The input that a replica has still to compute, by its profile if the policy wants that."""
        profile = account.backend.profile
        if not account.prefill_tokens or not profile or not self.routing.predict_prefill:
            return account.prefill_tokens
        return max(account.prefill_tokens - int(self._computed(account, profile, now)), 0)

    def _computed(self, account: _Account, profile: Profile, now: float) -> float:
        """The input that a replica has computed by now of what it is charged with, by its profile."""
        beside, computed = _beside(account, profile), 0.0
        left = (now - account.computing_since) * 1e3
        for entry in account.entries.values():
            if entry.uncomputed:
                tokens = entry.work.tokens
                computed += min(profile.computed(entry.hit, left, beside), entry.missing)
                left -= profile.prefill(entry.hit, tokens, beside)
                if left <= 0:
                    break
        return computed

    def _pass_time(self, names: Iterable[str], now: float) -> None:
        """Take prompts for computed whose time is over, of answers that are not streamed."""
        for name in names:
            account = self._accounts[name]
            while (entry := _next(account)) and not entry.work.stream and entry.work.infer_type == "neutral":
                over = account.computing_since + self._prefill_seconds(account, entry)
                if over > now:
                    break
                account.computing_since = over
                self._begin_decode(account, entry)

    def _prefill_seconds(self, account: _Account, entry: _Charge) -> float:
        """The time that an engine takes for a prompt; infinite if nothing is known of its speed."""
        if profile := account.backend.profile:
            return profile.prefill(entry.hit, entry.work.tokens, _beside(account, profile)) / 1e3
        if not self._prompt_tokens:
            return math.inf
        return entry.missing * self._prompt_seconds / self._prompt_tokens

    def _compute_next(self, account: _Account, entry: _Charge, now: float, *, exact: bool) -> None:
        """Note that an engine is done with a prompt. ``exact``: it begins the next only now."""
        over = account.computing_since + (self._prefill_seconds(account, entry) if entry.missing else 0.0)
        account.computing_since = now if exact else min(over, now)

    def _learn_speed(self, entry: _Charge, seconds: float) -> None:
        """Learn from a prompt that waited for no other. Of an answer that is not streamed its own time is a
        part of it, so that teaches only as far as it is faster than was thought.
        """
        if entry.alone and entry.missing and seconds > 0:
            self._prompt_tokens += LEARN * (entry.missing - self._prompt_tokens)
            self._prompt_seconds += LEARN * (seconds - self._prompt_seconds)

    def waiting(self, backend: str) -> list[Hashable]:
        """The requests that a replica does not answer yet, in the order in which they came.

        Those whose input another one computes wait for that one.
        """
        return [key for key, entry in self._accounts[backend].entries.items() if not entry.answering]

    def behind(self, backend: str, now: float) -> list[Hashable]:
        """The requests that wait at a replica behind others."""
        self._pass_time([backend], now)
        account = self._accounts[backend]
        if len(account.entries) - account.decode_batch < 2:
            return []
        return [key for key, entry in account.entries.items() if not entry.computed][1:]

    def choose(
        self,
        key: Hashable,
        work: Work,
        among: Sequence[str],
        failed: Sequence[str] = (),
        now: float = 0.0,
    ) -> Choice | None:
        """Choose one of ``among`` and charge it with ``work`` under ``key`` until that ends; None if none is
        left.
        """
        choice = choose(self.routing, work, self.view(work, among, failed, now), self._memory)
        if choice:
            self._memory.note(work, choice)
            self._charge(key, work, choice, now)
        return choice

    def explain(
        self, work: Work, among: Sequence[str], failed: Sequence[str] = (), now: float = 0.0
    ) -> list[dict[str, Any]]:
        """Explain what ``choose`` would go by; nothing is changed."""
        rows = explain(self.routing, work, self.view(work, among, failed, now), self._memory)
        if self._full:
            for row in rows:
                row["engine"] = as_json(self.figures(row["backend"], now))
        return rows

    def left_waiting(self, backend: str, among: Sequence[str], now: float) -> list[Hashable]:
        """The requests that a replica does not answer, if the policy takes it for stale and has another for
        them.
        """
        found, replicas = [], self.view(Work(), among, (), now)
        for key in self.waiting(backend):
            work = self._accounts[backend].entries[key].work
            choice = choose(self.routing, work, self._with_hits(replicas, work), self._memory)
            if choice and (backend, "staleness") in choice.removed:
                found.append(key)
        return found

    def better_off(self, to: str, among: Sequence[str], now: float) -> list[Hashable]:
        """The requests that wait elsewhere behind others, and that the policy would send ``to`` now.

        The last of each line first, and never more than are left. What is not streamed may be nearly done: it
        stays.
        """
        found: list[Hashable] = []
        lines = [(name, behind) for name in among if name != to and (behind := self.behind(name, now))]
        if not lines:
            return found
        moved = self._replica(to, Work(), 0)
        for name, behind in lines:
            line = self._replica(name, Work(), 0)
            for left, key in zip(range(len(behind), 0, -1), reversed(behind), strict=True):
                entry = self._accounts[name].entries[key]
                if not entry.work.stream:
                    continue
                if left <= moved.num_waiting_requests:
                    break
                hits = self.prefixes.hits(entry.work.blocks, [to]).get(to, 0) * entry.work.block_tokens
                target = moved._replace(hit_tokens=min(hits, entry.work.tokens))
                without = _changed(line, -1, entry.work, entry.missing)
                pair = [without._replace(hit_tokens=entry.hit), target]
                choice = choose(self.routing, entry.work, pair, self._memory)
                if choice is None or choice.backend != to:
                    break
                found.append(key)
                line = without
                missing = max(entry.work.tokens - target.hit_tokens, 0)
                moved = _changed(moved, 1, entry.work, missing)
        return found

    def _charge(self, key: Hashable, work: Work, choice: Choice, now: float) -> None:
        account = self._accounts[choice.backend]
        alone = len(account.entries) == account.decode_batch
        if alone:
            account.computing_since = now
        entry = account.entries[key] = _Charge(work, choice.hit_tokens, now, alone)
        account.prefill_tokens += entry.missing
        if work.infer_type == "decode":
            entry.answering = True
            self._begin_decode(account, entry)
        account.num_tokens += work.tokens
        self._where[key] = choice.backend
        if work.blocks:
            self.prefixes.use(choice.backend, work.blocks, account.kv_tokens // work.block_tokens)

    def first_byte(self, key: Hashable, now: float = 0.0) -> None:
        """Note the first byte of an answer: its prefill is done."""
        account, entry = self._find(key)
        if account is None or entry is None or entry.answering:
            return
        self._pass_time([account.backend.name], now)
        entry.answering = True
        if not entry.computed:
            self._learn_speed(entry, now - entry.since)
            self._compute_next(account, entry, now, exact=entry.work.stream)
            self._begin_decode(account, entry)

    def _begin_decode(self, account: _Account, entry: _Charge) -> None:
        account.prefill_tokens -= entry.missing
        entry.computed = True
        account.decode_tokens += entry.work.tokens
        account.decode_batch += 1

    def ended(
        self,
        key: Hashable,
        cached_tokens: int | None = None,
        prompt_tokens: int | None = None,
        now: float = 0.0,
    ) -> None:
        """Note the end of a request, whatever it was; the tokens are those of its input, by its engine."""
        account, entry = self._find(key)
        if account is None or entry is None:
            return
        self._pass_time([account.backend.name], now)
        if entry is _next(account):
            if prompt_tokens:
                self._learn_speed(entry, now - entry.since)
            self._compute_next(account, entry, now, exact=False)
        del account.entries[key], self._where[key]
        account.ended += account.heard is not None and entry.since <= account.heard
        account.num_tokens -= entry.work.tokens
        if entry.computed:
            account.decode_tokens -= entry.work.tokens
            account.decode_batch -= 1
        else:
            account.prefill_tokens -= entry.missing
        if prompt_tokens:
            self._measure(entry.work, prompt_tokens)
        if cached_tokens is not None and entry.work.infer_type != "decode":
            self._compare(account, entry, cached_tokens)

    def _measure(self, work: Work, prompt_tokens: int) -> None:
        if work.size:
            measured = min(max(work.size / prompt_tokens, BYTES_LEAST), BYTES_MOST)
            self.bytes_per_token += LEARN * (measured - self.bytes_per_token)

    def _compare(self, account: _Account, entry: _Charge, cached_tokens: int) -> None:
        """Compare what was cached with what was thought: a cache that held less repeatedly is smaller."""
        block, unforeseen = entry.work.block_tokens, cached_tokens - entry.hit
        held = self.prefixes.size(account.backend.name) * block
        if (
            not account.backend.kv_tokens
            and abs(unforeseen) > 2 * block
            and held + 2 * block > account.kv_tokens
        ):
            self._learn_room(unforeseen)
        full = account.backend.kv_tokens or self._kv_tokens
        if unforeseen > -2 * block:
            account.surprises = 0
            account.kv_tokens = min(account.kv_tokens + full // 16, full)
            return
        account.surprises += 1
        if account.surprises == SURPRISES:
            account.surprises = 0
            account.kv_tokens = max(held * 3 // 4, full // 8)
            self.prefixes.use(account.backend.name, (), account.kv_tokens // block)

    def _learn_room(self, tokens: int) -> None:
        """Learn the size of a cache that had so many tokens more, or less, than all that it was thought to
        hold.
        """
        before = self._kv_tokens
        after = min(max(before + max(tokens, -before // 16), LEAST_TOKENS), MOST_TOKENS)
        self._kv_tokens = after
        for each in self._accounts.values():
            if not each.backend.kv_tokens and (each.kv_tokens >= before or each.kv_tokens > after):
                each.kv_tokens = after

    def forget(self, backend: str) -> None:
        """Forget a replica that stopped, slept or died: it has nothing to do, and nothing in its cache."""
        account = self._accounts[backend]
        for key in account.entries:
            del self._where[key]
        self._accounts[backend] = _Account(
            account.backend, kv_tokens=account.backend.kv_tokens or self._kv_tokens
        )
        self._memory.forget(backend)
        self.prefixes.clear(backend)

    def _find(self, key: Hashable) -> tuple[_Account | None, _Charge | None]:
        backend = self._where.get(key)
        if backend is None:
            return None, None
        account = self._accounts[backend]
        return account, account.entries[key]


def _next(account: _Account) -> _Charge | None:
    """The first of the prompts that a replica has to compute."""
    if len(account.entries) == account.decode_batch:
        return None
    return next(entry for entry in account.entries.values() if not entry.computed)


def _beside(account: _Account, profile: Profile) -> float:
    """Milliseconds that the answers under way take of each step, by the profile."""
    batch = account.decode_batch
    return profile.next_token(batch, account.decode_tokens / batch) if batch else 0.0


def as_json(figures: EngineFigures | None) -> dict[str, Any] | None:
    """The figures as JSON."""
    if figures is None:
        return None
    running, waiting, usage = figures.load or (None, None, None)
    return {
        "running": running,
        "waiting": waiting,
        "kv_usage": usage,
        "age_seconds": round(figures.age_seconds, 1),
    }


def _hit_tokens(work: Work, blocks: int) -> int:
    """Return the tokens of an input that a replica need not compute; ``blocks``: those in its cache."""
    return work.tokens if work.infer_type == "decode" else min(blocks * work.block_tokens, work.tokens)


def _changed(replica: Replica, by: int, work: Work, missing: int) -> Replica:
    """The replica with one more request that waits, or one less."""
    return replica._replace(
        num_requests=replica.num_requests + by,
        num_waiting_requests=replica.num_waiting_requests + by,
        prefill_tokens=replica.prefill_tokens + by * missing,
        num_tokens=replica.num_tokens + by * work.tokens,
    )
