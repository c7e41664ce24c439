"""WHERE, among the replicas of one model, a request goes.

A policy is a pipeline: **metrics** put a number on each replica for this request, **filters** take replicas
out, a **selector** takes one of those that are left. All filters of a replica run; after them those that look
at all replicas at once (``failover``). If nobody is left the filters run again without those that may be
skipped (a threshold on load, say): the fallback pass. If nobody is left then, there is no choice.

Everything here is pure: literal ``Replica``s and a ``RoutingMemory`` in, a ``Choice`` out, and the same again
for the same arguments. The caller (in_flight.py) notes the choice in the memory and charges the replica
before the next request looks. Ties go to the replica that was picked longest ago, then to the first. The pick
of ``top_k`` and ``power_of_two`` looks random, and is a hash of the number of the choice.

To add a step: a function and a line in ``METRICS``, ``FILTERS`` or ``SELECTORS``. Its arguments
after the ``*`` are its settings, and their annotations say what may stand there; its docstring documents it.
pipeline.py turns what users write, and the policies that are shipped (routing.yaml), into ``Routing``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from anvil_mux.config.config import EITHER, STAGES
from anvil_mux.config.profile import Profile

MAX_SESSIONS = 10_000
"""The most sessions whose replica is remembered."""
HORIZON = 16
"""The latest choices that are remembered for each replica: where requests went, and what they computed."""
KV_TOKENS = 131_072
"""The tokens that a cache of unknown size is taken to hold."""


class Work(NamedTuple):
    """One request as the router sees it."""

    tokens: int = 0
    """Tokens of its input; an estimate."""
    blocks: tuple[int, ...] = ()
    """Chained hashes of the full blocks of its input, from the first on."""
    block_tokens: int = 512
    session: str = ""
    infer_type: str = "neutral"
    """The stage that is to be placed: neutral (all of it), prefill or decode."""
    size: int = 0
    """Bytes of its input; 0: not known."""
    stream: bool = False
    """Whether the first byte of its answer comes when its prefill is done, and not with its end."""
    owner: str = ""
    """The only replica that has what it refers to: it goes there if it can, whatever the policy says."""


class Replica(NamedTuple):
    """One backend of the model at one moment, for one request."""

    backend: str
    infer_type: str = "neutral"
    schedulable: bool = True
    age_seconds: float = 0.0
    """The age of its engine's figures; 0 where all numbers are our own."""
    node: str = ""
    failure_domain: str = ""
    num_requests: int = 0
    num_waiting_requests: int = 0
    """Requests whose prompts it still has to compute, as far as is known."""
    prefill_tokens: int = 0
    """Input of the waiting requests that is not in its cache."""
    decode_tokens: int = 0
    """Tokens in the requests that are being answered."""
    decode_batch: int = 0
    """How many are being answered."""
    num_tokens: int = 0
    """Tokens in all its requests."""
    hit_tokens: int = 0
    """Tokens of this request's input that are in its cache."""
    kv_tokens: int = 0
    """How many its cache holds; 0: not known."""
    profile: Profile | None = None
    """How fast it was measured to be."""
    kv_usage: float | None = None
    """How full its cache is, by its engine's figures; None: not reported."""
    unreported_tokens: int = 0
    """Tokens of requests that were sent to it after those figures, without what is in ``prefill_tokens``."""
    cache_tokens: int = KV_TOKENS
    """How many its cache is thought to hold."""
    share: float = 1.0
    """The part of the latest requests that it had."""
    usual_tokens: float = 0.0
    """The mean of the latest requests' input that was not cached where they went; 0: not known."""


class Choice(NamedTuple):
    backend: str
    policy: str
    passed: str
    """The pass: normal, or fallback, where the thresholds had left nobody."""
    reason: str
    removed: tuple[tuple[str, str], ...] = ()
    """Every other replica, with the step that removed it."""
    hit_tokens: int = 0

    @property
    def why(self) -> str:
        """The choice and its reasons, in one line."""
        passed = "" if self.passed == "normal" else f" ({self.passed})"
        others = ", ".join([f"{backend} ({step})" for backend, step in self.removed])
        return f"{self.policy}{passed}: {self.reason}" + (f"; not {others}" if others else "")


@dataclass(slots=True)
class RoutingMemory:
    """The memory of some selectors between choices; the choices themselves only read it."""

    choices: int = 0
    picked: dict[str, int] = field(default_factory=dict)
    """Backend -> the number of the choice that last picked it."""
    last: str = ""
    owners: dict[str, str] = field(default_factory=dict)
    """Session -> the backend that had its last request; the longest silent first."""
    replicas: int = 1
    usual_tokens: float = 0.0
    shares: dict[str, tuple[float, int]] = field(default_factory=dict)
    """Backend -> (its share of the latest choices, after the choice of this number)."""

    def share(self, backend: str) -> float:
        share, choices = self.shares.get(backend, (1.0 / self.replicas, 0))
        return share * (1.0 - 1.0 / (HORIZON * self.replicas)) ** (self.choices - choices)

    def note(self, work: Work, choice: Choice) -> None:
        self.choices += 1
        share = self.share(choice.backend) + 1.0 / (HORIZON * self.replicas)
        self.shares[choice.backend] = share, self.choices
        if work.infer_type != "decode":  # a decode stage computes nothing of it
            missing = max(work.tokens - choice.hit_tokens, 0)
            self.usual_tokens += (missing - self.usual_tokens) / min(self.choices, HORIZON * self.replicas)
        self.last = choice.backend
        self.picked[choice.backend] = self.choices
        if work.session:
            self.owners.pop(work.session, None)
            self.owners[work.session] = choice.backend
            if len(self.owners) > MAX_SESSIONS:
                del self.owners[next(iter(self.owners))]

    def forget(self, backend: str) -> None:
        """Forget the sessions of a replica whose cache is gone."""
        self.owners = {session: owner for session, owner in self.owners.items() if owner != backend}
        self.shares[backend] = 1.0 / self.replicas, self.choices

    def draw(self, below: int, nth: int = 0) -> int:
        """A number from 0 on that looks random (splitmix64)."""
        mixed = (self.choices * 4 + nth + 1) * 0x9E3779B97F4A7C15 & _MASK
        mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & _MASK
        return (mixed ^ mixed >> 31) % below


_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric with its settings: what the steps of a policy call."""

    name: str
    of: Callable[[Work, Replica], float]
    higher: bool = False
    """Whether a higher value is better."""

    def rank(self, work: Work, replica: Replica) -> float:
        """The rank of a replica, the lower the better; what is not a number is the worst."""
        value = self.of(work, replica)
        if value != value:
            return math.inf
        return -value if self.higher else value


# Metrics. The names are Llumnix's where the meaning is.


def num_requests(work: Work, replica: Replica) -> float:
    """Requests at the replica."""
    return replica.num_requests


def num_waiting_requests(work: Work, replica: Replica) -> float:
    """Requests at the replica whose prompts it still has to compute, as far as is known."""
    return replica.num_waiting_requests


def num_tokens(work: Work, replica: Replica) -> float:
    """Tokens in all requests at the replica."""
    return replica.num_tokens


def all_prefills_tokens_num(work: Work, replica: Replica) -> float:
    """Input tokens that the replica still has to compute."""
    return replica.prefill_tokens


def kv_cache_hit_len(work: Work, replica: Replica) -> float:
    """Input tokens of this request that the replica has cached; more is better."""
    return replica.hit_tokens


def prefix_miss_tokens(work: Work, replica: Replica) -> float:
    """Input tokens of this request that the replica has not cached."""
    return max(work.tokens - replica.hit_tokens, 0)


def cache_aware_all_prefills_tokens_num(work: Work, replica: Replica, *, min_tokens: int = 1) -> float:
    """Input tokens that the replica would have to compute if it got this request."""
    if work.tokens < min_tokens:
        return replica.prefill_tokens + work.tokens
    return replica.prefill_tokens + max(work.tokens - replica.hit_tokens, 0)


def all_decodes_tokens_num(work: Work, replica: Replica) -> float:
    """Tokens in the requests that the replica is answering."""
    return replica.decode_tokens


def decode_batch_size(work: Work, replica: Replica) -> float:
    """Requests that the replica is answering."""
    return replica.decode_batch


def kv_cache_usage_ratio_projected(work: Work, replica: Replica) -> float:
    """How full the replica's cache will be with all requests that it has accepted."""
    if not replica.kv_tokens:
        return math.inf
    if replica.kv_usage is None:  # then what several requests share counts for each of them
        return replica.num_tokens / replica.kv_tokens
    return replica.kv_usage + (replica.prefill_tokens + replica.unreported_tokens) / replica.kv_tokens


def predicted_ttft(work: Work, replica: Replica) -> float:
    """Predicted milliseconds to the first byte of the answer, from the replica's profile."""
    if replica.profile is None:
        return math.inf
    tokens = cache_aware_all_prefills_tokens_num(work, replica)
    return replica.profile.first_token(tokens, replica.decode_batch, replica.decode_tokens)


def predicted_tpot(work: Work, replica: Replica) -> float:
    """Predicted milliseconds for each further token of the answer, from the replica's profile."""
    if replica.profile is None:
        return math.inf
    batch = replica.decode_batch + 1
    return replica.profile.next_token(batch, (replica.decode_tokens + work.tokens) / batch)


def lmetric(
    work: Work, replica: Replica, *, plus: float = 0.0, least: float = 0.0, decode_weight: float = 0.0
) -> float:
    """Input tokens to compute, times the replica's requests plus `plus` (at least `least`)."""
    tokens = cache_aware_all_prefills_tokens_num(work, replica) + decode_weight * replica.decode_tokens
    return tokens * max(replica.num_requests + plus, least)


def kappa_work(work: Work, replica: Replica, *, kappa: float = 2.5e-6) -> float:
    """Input tokens to compute, more by `kappa` for each token of the requests being answered."""
    return cache_aware_all_prefills_tokens_num(work, replica) * (1.0 + kappa * replica.decode_tokens)


def weighted_prefill(work: Work, replica: Replica) -> float:
    """Input tokens to compute if the replica got this request, weighted by how much that delays others."""
    missing = max(work.tokens - replica.hit_tokens, 0)
    # Those who follow it there wait longer the larger it is, and all for room where answers fill the cache.
    size = missing / replica.usual_tokens if replica.usual_tokens else 1.0
    full = replica.decode_tokens / replica.cache_tokens
    return (replica.prefill_tokens + missing) * (1.0 + replica.share * size) * (1.0 + full)


def bucket(work: Work, replica: Replica, *, of: Metric, size: float = 512.0) -> float:
    """The metric `of` rounded down to steps of `size`, so that small differences do not count."""
    value = of.rank(work, replica)
    return value // size if size and math.isfinite(value) else value


def weighted_sum(work: Work, replica: Replica, *, of: Mapping[Metric, float]) -> float:
    """The weighted sum of several metrics."""
    return sum([metric.rank(work, replica) * weight for metric, weight in of.items()])


METRICS: dict[str, Callable[..., float]] = {
    "num_requests": num_requests,
    "num_waiting_requests": num_waiting_requests,
    "num_tokens": num_tokens,
    "all_prefills_tokens_num": all_prefills_tokens_num,
    "kv_cache_hit_len": kv_cache_hit_len,
    "prefix_miss_tokens": prefix_miss_tokens,
    "cache_aware_all_prefills_tokens_num": cache_aware_all_prefills_tokens_num,
    "all_decodes_tokens_num": all_decodes_tokens_num,
    "decode_batch_size": decode_batch_size,
    "kv_cache_usage_ratio_projected": kv_cache_usage_ratio_projected,
    "predicted_ttft": predicted_ttft,
    "predicted_tpot": predicted_tpot,
    "lmetric": lmetric,
    "kappa_work": kappa_work,
    "weighted_prefill": weighted_prefill,
    "bucket": bucket,
    "weighted_sum": weighted_sum,
}

HIGHER = frozenset(["kv_cache_hit_len"])
"""Metrics of which more is better."""

NEEDS = {
    "kv_cache_usage_ratio_projected": "kv_tokens",
    "predicted_ttft": "profile",
    "predicted_tpot": "profile",
}
"""Metric -> the setting of a service without which it says nothing."""

LITE = frozenset(["num_requests", "num_tokens"])
"""The metrics of a policy that is written for the mode lite: what Llumnix's router can know in it."""
MADE_OF_OTHERS = frozenset(["bucket", "weighted_sum"])
"""Metrics that say what those say of which they are made."""


# Filters of one replica: whether it stays.


def schedulability(work: Work, replica: Replica) -> bool:
    """Removes a replica that cannot serve now; with `failover`, its whole failure domain."""
    return replica.schedulable


def staleness(work: Work, replica: Replica, *, seconds: float = 60.0) -> bool:
    """Removes a replica whose engine has not answered for `seconds`; with `failover`, its failure domain."""
    return int(replica.age_seconds) <= seconds


def below(
    work: Work, replica: Replica, *, metric: Metric, threshold: float, in_fallback: bool = False
) -> bool:
    """Removes a replica whose `metric` is not below `threshold` (not above, where more is better)."""
    return metric.rank(work, replica) < (-threshold if metric.higher else threshold)


def infer_type(work: Work, replica: Replica, *, type: str = "") -> bool:
    """Removes a replica that cannot serve the stage `type`; by default the stage to be placed."""
    return replica.infer_type in (type or work.infer_type, EITHER)


# The filter of all replicas: whom it removes, given those that have failed.

Domain = Literal["instance", "node", "failure-domain", "node-failure-domain"]


def failover(replicas: Sequence[Replica], failed: Set[str], *, domain: Domain = "instance") -> Set[str]:
    """Removes all replicas in the failure domain of one that has failed."""
    if not failed:
        return failed
    gone = {replica.backend for replica in replicas if replica.backend in failed}
    if gone and domain.startswith("node"):
        gone |= _sharing(replicas, gone, "node")
    if gone and domain.endswith("failure-domain"):
        gone |= _sharing(replicas, gone, "failure_domain")
    return gone


def _sharing(
    replicas: Sequence[Replica], gone: Set[str], what: Literal["node", "failure_domain"]
) -> Set[str]:
    """The replicas with the node (or failure domain) of one of ``gone``; those without one share none."""
    names = {getattr(replica, what) for replica in replicas if replica.backend in gone} - {""}
    return {replica.backend for replica in replicas if getattr(replica, what) in names}


FILTERS: dict[str, Callable[..., bool | Set[str]]] = {
    "schedulability": schedulability,
    "staleness": staleness,
    "metric": below,
    "infer_type": infer_type,
    "failover": failover,
}

MARKING = frozenset(["schedulability", "staleness"])
"""Filters whose removal says that the replica has failed."""

SKIPPED = frozenset(["metric"])
"""Filters that the fallback pass leaves out, unless ``in_fallback``."""


# Selectors: one of those that are left, and why.


class SelectionContext(NamedTuple):
    """The context of a selector, beside the replicas that are left."""

    replicas: Sequence[Replica]
    memory: RoutingMemory


Pick = tuple[Replica, str]


@dataclass(frozen=True, slots=True)
class Selector:
    """A selector with its settings."""

    name: str
    pick: Callable[[Work, Sequence[Replica], SelectionContext], Pick]


def by_metric(
    work: Work,
    left: Sequence[Replica],
    seen: SelectionContext,
    *,
    by: tuple[Metric, ...],
    top_k: int = 1,
    ties: Literal["round_robin", "first"] = "round_robin",
) -> Pick:
    """The best replica by the first metric, ties broken by the next; with `top_k`, one of the best few."""
    picked = seen.memory.picked if ties == "round_robin" else {}

    def order(replica: Replica) -> tuple[float, ...]:
        return (*[metric.rank(work, replica) for metric in by], picked.get(replica.backend, 0))

    if top_k == 1:
        best = min(left, key=order) if len(left) > 1 else left[0]
    else:
        best = sorted(left, key=order)[seen.memory.draw(min(top_k, len(left)))]
    return best, ", ".join([f"{metric.name} {metric.of(work, best):.10g}" for metric in by])


def round_robin(work: Work, left: Sequence[Replica], seen: SelectionContext) -> Pick:
    """The replica that was picked longest ago."""
    picked = seen.memory.picked
    return min(left, key=lambda replica: picked.get(replica.backend, 0)), "its turn"


def fixed_preference(work: Work, left: Sequence[Replica], seen: SelectionContext) -> Pick:
    """The same replica for as long as the filters leave it."""
    for replica in left:
        if replica.backend == seen.memory.last:
            return replica, "the same as before"
    return left[0], "the first"


def power_of_two(work: Work, left: Sequence[Replica], seen: SelectionContext, *, by: Metric) -> Pick:
    """The better of two randomly drawn replicas."""
    first = seen.memory.draw(len(left))
    second = (first + 1 + seen.memory.draw(len(left) - 1, 1)) % len(left) if len(left) > 1 else first
    best = min(left[first], left[second], key=lambda replica: by.rank(work, replica))
    return best, f"{by.name} {by.of(work, best):.10g}, better of two"


def sticky(
    work: Work,
    left: Sequence[Replica],
    seen: SelectionContext,
    *,
    otherwise: Selector,
    min_hit_ratio: float = 0.0,
    overload_factor: float = math.inf,
) -> Pick:
    """The replica that served the session before, unless it has little cached or is overloaded."""
    owner = seen.memory.owners.get(work.session, "") if work.session else ""
    for replica in left if owner else ():
        if replica.backend != owner:
            continue
        mean = sum([each.num_requests for each in seen.replicas]) / len(seen.replicas)
        cached = not min_hit_ratio or replica.hit_tokens > min_hit_ratio * work.tokens
        if cached and replica.num_requests <= overload_factor * max(mean, 1.0):
            return replica, "its session's replica"
    return otherwise.pick(work, left, seen)


def adaptive_prefill(work: Work, left: Sequence[Replica], seen: SelectionContext, *, by: Metric) -> Pick:
    """The best replica by the metric; among equals, one that only does prefill."""

    def order(replica: Replica) -> tuple[float, bool, int]:
        picked = seen.memory.picked.get(replica.backend, 0)
        return by.rank(work, replica), replica.infer_type == EITHER, picked

    best = min(left, key=order)
    return best, f"{by.name} {by.of(work, best):.10g}"


def adaptive_decode(
    work: Work, left: Sequence[Replica], seen: SelectionContext, *, by: Metric, threshold: float, ties: Metric
) -> Pick:
    """The fullest replica below `threshold`, preferably one that only decodes; else the emptiest."""

    def order(replica: Replica) -> tuple[float, int, float, int]:
        picked = seen.memory.picked.get(replica.backend, 0)
        return by.rank(work, replica), replica.decode_batch, -ties.rank(work, replica), -picked

    fits = [replica for replica in left if by.rank(work, replica) < threshold]
    if not fits:
        best = min(left, key=lambda replica: (by.rank(work, replica), ties.rank(work, replica)))
        return best, f"{by.name} {by.of(work, best):.10g}, the least"
    best = max([r for r in fits if r.infer_type != EITHER] or fits, key=order)
    return best, f"{by.name} {by.of(work, best):.10g}, the most below {threshold:g}"


SELECTORS: dict[str, Callable[..., Pick]] = {
    "metric": by_metric,
    "round_robin": round_robin,
    "fixed_preference": fixed_preference,
    "power_of_two": power_of_two,
    "sticky": sticky,
    "adaptive_prefill": adaptive_prefill,
    "adaptive_decode": adaptive_decode,
}


# The pipeline


@dataclass(frozen=True, slots=True)
class Filter:
    """A filter of one replica with its settings."""

    name: str
    keeps: Callable[[Work, Replica], bool]
    marks: bool = False
    skipped: bool = False


@dataclass(frozen=True, slots=True)
class Pipeline:
    selector: Selector
    filters: tuple[Filter, ...] = ()
    failover: tuple[Callable[[Sequence[Replica], Set[str]], Set[str]], ...] = ()
    """Filters of all replicas, with their settings."""
    metrics: tuple[Metric, ...] = ()
    """All that it uses or names, for whoever explains a choice."""
    needs: frozenset[str] = frozenset()
    """Settings of a service without which it cannot work."""

    def removed(self, work: Work, replicas: Sequence[Replica], *, fallback: bool = False) -> dict[str, str]:
        """Backend -> the first step that removes it."""
        removed: dict[str, str] = {}
        failed = set()
        for each in self.filters:
            if fallback and each.skipped:
                continue
            for replica in replicas:
                if not each.keeps(work, replica):
                    removed.setdefault(replica.backend, each.name)
                    if each.marks:
                        failed.add(replica.backend)
        for gone in self.failover:
            for backend in gone(replicas, failed):
                removed.setdefault(backend, "failover")
        return removed


@dataclass(frozen=True, slots=True)
class Routing:
    """A policy: a pipeline for each infer type that it can place."""

    name: str
    pipelines: Mapping[str, Pipeline]
    mode: str = ""
    """The mode that it is written for; "": either."""
    predict_prefill: bool = False
    """Whether what a replica has to compute falls with time, by its profile, before a first byte comes."""

    def needs(self, infer_type: str) -> frozenset[str]:
        """The settings that a service of this infer type must have; it may always get whole requests."""
        if not self.pipelines:
            return frozenset()
        stages = STAGES if infer_type == EITHER else (infer_type,)
        return self.pipeline("neutral").needs.union(*[self.pipeline(stage).needs for stage in stages])

    def pipeline(self, infer_type: str) -> Pipeline:
        """The pipeline for the stage that is to be placed; by default that of neutral, or the first."""
        return (
            self.pipelines.get(infer_type)
            or self.pipelines.get("neutral")
            or next(iter(self.pipelines.values()))
        )


def choose(routing: Routing, work: Work, replicas: Sequence[Replica], memory: RoutingMemory) -> Choice | None:
    """One of ``replicas`` for ``work``, and why; None if none is left."""
    pipeline = routing.pipeline(work.infer_type)
    passed = "normal"
    removed = pipeline.removed(work, replicas)
    if len(removed) == len(replicas):
        passed = "fallback"
        removed = pipeline.removed(work, replicas, fallback=True)
    left = [replica for replica in replicas if replica.backend not in removed] if removed else replicas
    if not left:
        return None
    chosen, reason = pipeline.selector.pick(work, left, SelectionContext(replicas, memory))
    if not chosen.schedulable:  # no step of the policy looks for that
        removed |= {each.backend: "schedulability" for each in left if not each.schedulable}
        left = [replica for replica in left if replica.schedulable]
        if not left:
            return None
        chosen, reason = pipeline.selector.pick(work, left, SelectionContext(replicas, memory))
    name = pipeline.selector.name
    others = [(r.backend, removed.get(r.backend, name)) for r in replicas if r.backend != chosen.backend]
    return Choice(
        backend=chosen.backend,
        policy=routing.name,
        passed=passed,
        reason=reason,
        removed=tuple(others),
        hit_tokens=chosen.hit_tokens,
    )


def explain(
    routing: Routing, work: Work, replicas: Sequence[Replica], memory: RoutingMemory
) -> list[dict[str, Any]]:
    """Explain what each metric says of each replica, and which step removes it; nothing is changed."""
    choice = choose(routing, work, replicas, memory)
    pipeline = routing.pipeline(work.infer_type)
    steps = dict(choice.removed) if choice else pipeline.removed(work, replicas)
    metrics = pipeline.metrics
    return [
        {
            "backend": replica.backend,
            "chosen": choice is not None and replica.backend == choice.backend,
            "removed_by": steps.get(replica.backend, ""),
            "metrics": {metric.name: metric.of(work, replica) for metric in metrics},
        }
        for replica in replicas
    ]
