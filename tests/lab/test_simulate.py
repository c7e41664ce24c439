"""The simulator keeps every invariant in worlds of all kinds."""

import random
from dataclasses import dataclass, replace
from math import inf

import pytest

from anvil_mux.config.config import Backend, Config
from anvil_mux.config.keys import Key
from anvil_mux.config.machines import Gpu
from anvil_mux.errors import BackendError, LoadError
from anvil_mux.lab.checker import check
from anvil_mux.lab.engines import Engines, Outcome
from anvil_mux.lab.simulate import Arrival, simulate
from anvil_mux.scheduler.events import Cause
from anvil_mux.scheduler.group import SHORTEST_DEFERRAL
from anvil_mux.scheduler.policies import POLICIES as REGISTRY
from anvil_mux.scheduler.policies import Adaptive, Stay, SwapTo, Unload
from anvil_mux.scheduler.slot import Cancel, Load
from tests.lab.facts import Death, Unloading
from tests.seeds import seeds


@dataclass(frozen=True)
class IdleOut:
    """A policy that swaps at once and evicts what was not used for ten seconds."""

    def decide(self, seen):
        if seen.queues:
            return SwapTo(seen.queues[0].model)
        ends = [(seen.now if r.leases else r.last_used) + 10.125 for r in seen.residents]
        if ends and min(ends) <= seen.now:
            return Unload(seen.residents[ends.index(min(ends))].model)
        return Stay(min(ends, default=inf))


POLICIES = (*REGISTRY, f"{__name__}:IdleOut")


def one(name, *gpus, model=None, **fields):
    return Backend(name, model or name, gpus, **fields)


LAYOUTS = {
    "two on one GPU": ((one("a", "0"), one("b", "0")), ()),
    "three on one GPU": ((one("a", "0"), one("b", "0"), one("c", "0")), ()),
    "two GPUs": ((one("a", "0"), one("b", "0"), one("c", "1"), one("d", "1"), one("cpu")), ()),
    "a pair beside singles": (
        (one("a", "0"), one("b", "0"), one("c", "1"), one("d", "1"), one("t", "0", "1")),
        (),
    ),
    "co-residents": (
        (
            one("a", "0", vram=3),
            one("b", "0", vram=5),
            one("c", "0", vram=6),
            one("d", "0", vram=2, pin=True),
            one("e", "0", vram=10),
        ),
        (Gpu("0", vram=12, reserve=1),),
    ),
    "sleepers": (
        (
            one("a", "0", evict_to=("sleep",)),
            one("b", "0", evict_to=("sleep",)),
            one("c", "0", "1"),
            one("d", "1"),
        ),
        (),
    ),
    "standby levels": (
        (
            one("a", "0", evict_to=("sleep", "sleep-2", "stop"), demote_after=4.0029296875),
            one("b", "0", evict_to=("sleep", "checkpoint"), demote_after=9.0029296875, preload=True),
            one("c", "0", "1", evict_to=("sleep",), preload=True),
            one("d", "1", preload=True),
        ),
        (),
    ),
    "sleepers that share": (
        (
            one("a", "0", vram=5, evict_to=("sleep",), preload=True),
            one("b", "0", vram=5, evict_to=("sleep", "sleep-2"), demote_after=6.0029296875, ram=2),
            one("c", "0", vram=8, evict_to=("checkpoint",)),
            one("d", "0", vram=11, ram=3),
        ),
        (Gpu("0", vram=12, reserve=1),),
    ),
    "short of host memory": (
        (
            one("a", "0", ram=3, evict_to=("sleep",)),
            one("b", "0", ram=5, evict_to=("sleep", "checkpoint")),
            one("c", "1", ram=4, evict_to=("sleep", "stop")),
            one("d", "1", ram=12),
            one("t", "0", "1", ram=2),
        ),
        (),
    ),
    "GPU groups short of host memory": (
        (
            one("a", "0", ram=3, evict_to=("sleep",)),
            one("b", "0", ram=5, evict_to=("sleep", "checkpoint")),
            one("c", "1", ram=4, evict_to=("sleep", "stop")),
            one("d", "1", ram=12),
            one("t", "2", "3", ram=2),
            one("u", "2", ram=6, evict_to=("sleep",)),
            one("v", "3", ram=6),
        ),
        (),
    ),
    "replicas": ((one("r0", "0", model="m"), one("r1", "1", model="m"), one("a", "0"), one("b", "1")), ()),
    "limits": ((one("a", "0", concurrency=1), one("b", "0", concurrency=2), one("c", "0")), ()),
    "replicas with limits": (
        (
            one("r0", "0", model="m", concurrency=2),
            one("r1", "1", model="m", concurrency=1),
            one("a", "0", concurrency=1),
            one("b", "1"),
        ),
        (),
    ),
    "sleepers beside one that is pinned": (
        (
            one("a", "0", vram=4, evict_to=("sleep",)),
            one("b", "0", vram=5, evict_to=("sleep", "checkpoint"), demote_after=4.0029296875),
            one("c", "0", vram=6, evict_to=("sleep",), demote_after=3.0029296875),
            one("d", "0", vram=8, evict_to=("checkpoint",)),
            one("p", "0", vram=2, pin=True),
        ),
        (Gpu("0", vram=12, reserve=1),),
    ),
}


HOST_MEMORY = {"short of host memory": 13, "GPU groups short of host memory": 15, "sleepers that share": 12}
"""Scheduler -> bytes; every sleeper keeps 4."""

HOLDS = ({"quiet": 1.125, "max_hold": 10.125}, {"quiet": 40.125, "max_hold": 90.125})
"""The second holds a swap for longer than most lines may wait."""
SETTINGS = {"cost_aware": {"window": 2.015625}}
"""No client's patience: two things at one moment have no order."""


def tick(seconds):
    """A multiple of 2**-20: sums and differences of such moments are exact, and rarely equal."""
    return round(seconds * 2**20) / 2**20


class Hazards:
    """Engines whose steps take random times and sometimes fail; the same for the same seed, in any order."""

    def __init__(self, seed, *, failing_starts=0.0, stuck=0.0, residuals=None, host_bytes=0):
        self.seed = seed
        self.residuals = residuals or {}
        self.host_bytes = host_bytes
        self.failing_starts = failing_starts
        self.stuck = stuck

    def __call__(self, step, nth):
        draw = random.Random(f"{self.seed} {step.backend} {nth}")
        if isinstance(step, Cancel):  # some come too late
            stuck = draw.random() < self.stuck
            error = BackendError("cannot be cleaned up") if stuck else None
            # Never 0.0: of two loads cancelled at one moment, either may be the first to have ended.
            return Outcome(tick(draw.choice((0.01, 1.0, 4.0)) * draw.random()), error)
        gentle = step.level == "stop" or random.Random(f"{self.seed} {step.backend} {nth} how").random() > 0.2
        how = None if gentle else "stop"
        if isinstance(step, Load):
            seconds, fate = tick(draw.uniform(1.0, 9.0)), draw.random()
            if fate < self.stuck:
                return Outcome(seconds, BackendError("cannot be cleaned up"))
            error = LoadError("broken") if fate < self.stuck + self.failing_starts else None
            return Outcome(seconds, error, how)
        seconds = tick(draw.uniform(0.25, 2.0))
        error = BackendError("cannot be stopped") if draw.random() < self.stuck else None
        residual = self.residuals.get(step.backend, {})
        return Outcome(seconds, error, how, residual, self.host_bytes)


SENDERS = (None, Key(b"1"), Key(b"2"), Key(b"2"), Key(b"2"))


def own_settings(backends, seed):
    """The backends, each with some settings of its own."""
    draw, drains = random.Random(f"own settings {seed}"), random.Random(f"drains {seed}")
    queues = random.Random(f"queues {seed}")
    return tuple(
        replace(
            backend,
            priority=draw.choice((0, 0, 5)),
            ttl=draw.choice((None, None, 3.0078125, 20.0078125)),
            min_residency=draw.choice((0.0, 0.0, 6.00390625, 30.00390625)),
            max_wait=draw.choice(("auto", "auto", 4.001953125, 90.001953125)),
            drain_timeout=drains.choice((30.0, 30.0, 0.0, 1.015625, inf, inf)),
            max_queue=queues.choice((None, None, 2)),
        )
        for backend in backends
    )


def random_settings(draw, policy):
    return {
        "policy_settings": draw.choice(HOLDS) if policy == "debounce" else SETTINGS.get(policy, {}),
        "drain_timeout": draw.choice((0.0, 2.03125, 30.03125)),
        "queue_timeout": draw.choice((25.0625, 600.0625)),
        "max_wait": draw.choice((8.03125, 60.03125)),
        "max_queue": draw.choice((6, 1000, 1000)),
    }


def random_traffic(draw, backends, requests):
    """Requests, unloads and deaths at distinct moments, and the moment of the last."""
    impatient, mishaps = draw.choice((0.0, 0.4)), draw.choice((0.0, 0.1))
    models = sorted({backend.model for backend in backends})
    weights = [draw.choice((1, 1, 4)) for _ in models]
    rate, service = draw.choice((0.3, 1.0, 3.0)), draw.choice((0.5, 3.0))
    now, trace = 0.0, []
    for _ in range(requests):
        now += tick(draw.expovariate(rate)) + 2**-20
        if draw.random() < mishaps:
            chosen = draw.choice(backends)
            trace.append(draw.choice((Unloading(now, chosen.model), Death(now, chosen.name))))
            continue
        patience = draw.randint(1, 40) / 4 if draw.random() < impatient else inf
        if patience in (Adaptive.pause, SHORTEST_DEFERRAL):  # a policy is asked then, or that is announced
            patience += 0.25
        seconds = tick(draw.expovariate(1 / service)) + 2**-20
        (model,) = draw.choices(models, weights)
        sender = SENDERS[len(trace) % len(SENDERS)]
        trace.append(Arrival(now, model, seconds, patience, leases=draw.random() > 0.05, sender=sender))
    return trace, now


def world(layout, policy, seed, requests=60):
    """A configuration, a trace of distinct moments, and engines; the seed says what goes wrong in it.

    In those of an odd seed the models have settings of their own.
    """
    draw = random.Random(f"{layout} {policy} {seed}")
    backends, gpus = LAYOUTS[layout]
    if seed % 2:
        backends = own_settings(backends, f"{layout} {policy} {seed}")
    config = Config(
        backends=backends,
        gpus=gpus,
        policy=policy,
        **random_settings(draw, policy),
        host_memory=HOST_MEMORY.get(layout),
    )
    engines = Hazards(
        seed,
        failing_starts=draw.choice((0.0, 0.3)),
        stuck=draw.choice((0.0, 0.15)),
        residuals={backend.name: dict.fromkeys(backend.gpus, 2) for backend in backends if backend.vram},
        host_bytes=4 if layout in HOST_MEMORY else 0,
    )
    trace, _ = random_traffic(draw, backends, requests)
    return config, trace, engines


def waiting_at_the_end(log):
    line = set()
    for event in log:
        if event.kind == "queued":
            line.add(event.ticket)
        elif event.kind in ("leased", "failed", "gone"):
            line.discard(event.ticket)
    return line


def queues_without_a_bound(log):
    """First requests of queues that have none, and later ones that have."""
    found, lines = [], {}
    for event in log:
        line = lines.setdefault(event.model, set())
        if event.kind == "queued":
            found += [event] if (event.bound < inf) == bool(line) else []
            line.add(event.ticket)
        elif event.kind in ("leased", "failed", "gone"):
            line.discard(event.ticket)
    return found


def assert_is_sound(world, seed):
    """No invariant is broken, nobody waits for ever, and each queue has one bound."""
    config, trace, engines = world
    log = simulate(config, trace, engines)
    assert check(log, config) == [], seed
    assert waiting_at_the_end(log) == set(), seed
    assert queues_without_a_bound(log) == [], seed


@pytest.mark.seeds
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_world_breaks_an_invariant(layout, policy):
    for seed in seeds(4, of=60):
        assert_is_sound(world(layout, policy, seed), seed)


SHORT_WAITS = (0.25, 0.5, 1.0, 2.0, 4.0)


@pytest.mark.seeds
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_world_breaks_an_invariant_where_every_queue_is_soon_overdue(layout, policy):
    for seed in seeds(len(SHORT_WAITS), of=60):
        config, trace, engines = world(layout, policy, seed)
        config = replace(config, max_wait=SHORT_WAITS[seed % len(SHORT_WAITS)])
        assert_is_sound((config, trace, engines), seed)


def moves(log):
    """Each change of a backend's state with the next one of it."""
    last = {}
    for event in log:
        if event.backend and not event.ticket:
            if event.backend in last:
                yield last[event.backend], event
            last[event.backend] = event


def test_the_worlds_contain_everything_that_can_happen():
    seeds = dict.fromkeys(LAYOUTS, 22) | {"standby levels": 37}  # few are woken to be demoted
    logs = [simulate(*world(each, "debounce", seed)) for each, n in seeds.items() for seed in range(n)]
    kinds = {event.kind for log in logs for event in log}
    assert kinds == {
        *("queued", "leased", "released", "gone", "failed", "deferred"),
        *("loading", "ready", "draining", "severed", "evicting", "stopped", "standby", "stuck"),
        *("demoting", "cancelling"),
    }
    causes = {event.cause for log in logs for event in log if event.cause}
    kinds_of_causes = {cause.kind for cause in causes}
    assert {"died", "load_failed", "reprieved", "overdue", "unloaded", "retry_stuck"} <= kinds_of_causes
    assert {"preload", "wake_to_demote", "host_memory_short", "memory_needed"} <= kinds_of_causes
    assert {cause.seconds for cause in causes if cause.kind == "idle"} >= {3 + 1 / 128, 20 + 1 / 128}
    assert {c.residents for c in causes if c.kind == "min_residency"} >= {("a",), ("a", "b")}
    codes = {cause.detail for cause in causes if cause.kind == "error"}
    assert codes >= {"waited_too_long", "load_failed", "stuck", "does_not_fit", "host_memory_short"}
    cancelled = {bool(event.target) for log in logs for event in log if event.kind == "cancelling"}
    assert cancelled == {False, True}  # by hand, and for another line
    after = {b.kind for log in logs for a, b in moves(log) if a.kind == "cancelling"}
    assert after == {"stopped", "ready", "stuck"}


def test_the_same_trace_gives_the_same_log():
    first, second = (simulate(*world("a pair beside singles", "debounce", 3)) for _ in range(2))
    assert first == second


TWO = Config(
    policy="eager",
    backends=LAYOUTS["two on one GPU"][0],
    drain_timeout=5.0,
    queue_timeout=50.0,
    max_wait=20.0,
)


def test_a_short_trace_reads_as_it_should():
    trace = [Arrival(1.0, "a", 4.0), Arrival(2.0, "b", 1.0), Arrival(3.0, "b", 1.0, patience=2.0)]
    log = simulate(TWO, trace, Engines({"a": 3.0, "b": 6.0}, stop_seconds=0.5))
    assert [(e.at, e.kind, e.backend or e.model, e.ticket) for e in log] == [
        (1.0, "queued", "a", 1),
        (1.0, "loading", "a", 0),
        (2.0, "queued", "b", 2),
        (3.0, "queued", "b", 3),
        (4.0, "ready", "a", 0),
        (4.0, "leased", "a", 1),
        (4.0, "draining", "a", 0),
        (5.0, "gone", "b", 3),
        (8.0, "released", "a", 1),
        (8.0, "evicting", "a", 0),
        (8.5, "stopped", "a", 0),
        (8.5, "loading", "b", 0),
        (14.5, "ready", "b", 0),
        (14.5, "leased", "b", 2),
        (15.5, "released", "b", 2),
    ]


def test_who_dies_soon_after_its_load_without_a_whole_answer_is_not_loaded_for_the_next():
    config = Config(policy="eager", backends=(one("a", "0"),))
    trace = [
        Arrival(0.0, "a", 9.0),
        Death(11.0, "a"),
        Arrival(12.0, "a", 1.0),
        Arrival(16.0, "a", 1.0),
        Death(28.0, "a"),
        Arrival(28.0, "a", 1.0),
    ]
    log = simulate(config, trace, Engines({}, 10.0))
    assert [(e.at, e.kind) for e in log if e.kind in ("loading", "failed")] == [
        (0.0, "loading"),
        (12.0, "failed"),
        (16.0, "loading"),
        (28.0, "loading"),
    ]
    assert check(log, config) == []


def test_a_full_line_turns_requests_away_without_a_ticket():
    config = Config(policy="eager", backends=TWO.backends, max_queue=2)
    log = simulate(config, [Arrival(float(n), "a", 1.0) for n in range(5)], Engines({"a": 20.0}))
    assert [event.ticket for event in log if event.kind == "queued"] == [1, 2]


def test_a_model_whose_own_line_is_full_turns_requests_away_and_the_other_does_not():
    one, other = TWO.backends
    config = Config(policy="eager", backends=(replace(one, max_queue=1), other))
    trace = [Arrival(float(n), model, 1.0) for n, model in enumerate(("a", "a", "b", "b"))]
    log = simulate(config, trace, Engines({"a": 20.0, "b": 2.0}))
    assert [(event.model, event.ticket) for event in log if event.kind == "queued"] == [
        ("a", 1),
        ("b", 2),
        ("b", 3),
    ]
    assert check(log, config) == []


def test_an_idle_model_goes_though_no_request_comes_and_a_line_may_be_overdue_before_the_others():
    backends = one("a", "0", ttl=6.0), one("b", "0", min_residency=30.0), one("c", "0", max_wait=4.0)
    config = Config(policy="eager", backends=backends, drain_timeout=5.0)
    trace = [
        Arrival(0.0, "a", 1.0),
        Arrival(20.0, "b", 1.0),
        Arrival(30.0, "a", 1.0),
        Arrival(31.0, "c", 1.0),
    ]
    log = simulate(config, trace, Engines({"a": 3.0, "b": 6.0, "c": 2.0}, stop_seconds=0.5))
    assert check(log, config) == []
    first = Cause("oldest_first", waiting=1)
    assert [(e.at, e.kind, e.backend, e.cause) for e in log if e.kind in ("evicting", "loading")] == [
        (0.0, "loading", "a", first),
        (10.0, "evicting", "a", Cause("idle", seconds=6.0)),
        (20.0, "loading", "b", first),
        (35.0, "evicting", "b", Cause("overdue")),
        (35.5, "loading", "c", Cause("overdue")),
        (38.5, "evicting", "c", first),
        (39.0, "loading", "a", first),
    ]
    assert [(e.at, e.model, e.seconds, e.cause) for e in log if e.kind == "deferred"] == [
        (31.0, "a", 25.0, Cause("min_residency", residents=("b",))),
    ]


def test_what_was_learned_before_is_known_from_the_start():
    config = Config(policy="cost_aware", backends=TWO.backends)
    engines = Engines({"a": 3.0, "b": 6.0}, stop_seconds=0.5)
    drained = []
    for costs in ((), engines.costs(config)):
        log = simulate(config, [Arrival(20.0, "b", 1.0)] * 4, engines, resident=["a"], costs=costs)
        drained += [event.at for event in log if event.kind == "draining"]
    assert drained == [22.0, 20.0]  # four are worth a swap of 6.5 s, not one of 10 s


def test_waiting_ends_at_the_queue_timeout():
    log = simulate(TWO, [Arrival(0.0, "a", 1.0)], Engines({"a": 80.0}))
    late = Cause("error", detail="waited_too_long")
    assert [(e.at, e.kind, e.cause) for e in log if e.ticket][1:] == [(50.0, "failed", late)]
    assert log[-1].kind == "ready"  # one begun is finished


def test_a_load_on_one_gpu_does_not_delay_requests_on_another():
    backends = (one("a", "0"), one("b", "0"), one("c", "1"), one("d", "1"))
    busy = [Arrival(5.0 + n, "c", 0.5) for n in range(100)]
    swaps = [Arrival(10.0 * n, "ab"[n % 2], 1.0) for n in range(11)]
    trace = sorted([Arrival(0.0, "c", 0.1), *busy, *swaps])
    log = simulate(Config(policy="eager", backends=backends), trace, Engines({"a": 8.0, "b": 8.0, "c": 4.0}))
    assert {event.seconds for event in log if event.kind == "leased" and event.model == "c"} == {0.0, 4.0}
    assert sum(event.kind == "loading" and event.model in "ab" for event in log) == 11


def test_sets_that_name_their_gpus_in_opposite_order_do_not_lock_each_other_out():
    config = Config(
        policy="eager", backends=(one("t", "0", "1"), one("u", "1", "0"), one("a", "0"), one("b", "1"))
    )
    trace = [Arrival(n / 4, "tuab"[n % 4], 0.5) for n in range(200)]
    log = simulate(config, trace, Engines(other_load_seconds=3.0))
    assert check(log, config) == []
    assert sum(event.kind == "released" for event in log) == 200
