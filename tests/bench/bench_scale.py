"""What many hosts cost the scheduler: what is built, how long the lock is held, how soon a load is decided.

    many   1,000 backends on 32 hosts x 2 GPUs (--backends, --hosts, --gpus), of models that have eight each,
           each backend on a GPU of its own choice
    any    as many backends on these hosts, of models that may run on any GPU, and one resident on every GPU
    hour   an hour of requests for the models of ``many``, hosts lost and back meanwhile, and its log checked

Each figure stands beside what is promised. Of facts, questions and reloads it is the longest hold of the
multiplexer's lock, in milliseconds of this process's CPU; of a lease with its release the least of some
tries, on one thread.

Nothing here passes or fails: a missed target is a finding, not an error. test_bench_scale.py has a
smaller part of it, and a bound that is generous.
"""

import argparse
import gc
import math
import random
import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

from anvil_mux.clock import Clock
from anvil_mux.config.config import Backend, Config
from anvil_mux.config.machines import Gpu
from anvil_mux.lab.checker import check
from anvil_mux.lab.simulate import Arrival, simulate
from anvil_mux.multiplexer.multiplexer import Multiplexer
from anvil_mux.scheduler.costs import Cost, Costs, Footprints
from anvil_mux.scheduler.scheduler import Scheduler
from anvil_mux.scheduler.slot import Evict, Load, Step, Ticket
from tests.lab.facts import HostBack, HostLost

HOSTS, GPUS, BACKENDS = 32, 2, 1000
"""The greatest system that promises are made for."""
REPLICAS = 8
HOLD_MS, RELOAD_MS, LEASE_US, BUILT_S, BUILT_MB = 5.0, 100.0, 10.0, 2.0, 200.0
"""The promises: of a fact or a question, a reload, a lease with its release, and of what is built."""


def many(hosts: int = HOSTS, gpus: int = GPUS, backends: int = BACKENDS) -> Config:
    """Backends by turns on the GPUs of each host, of models that have eight each."""
    made, models, on_each = [], max(backends // REPLICAS, 1), math.ceil(backends / hosts)
    for number in range(backends):
        host, nth = divmod(number, on_each)
        name, gpu = f"h{host}-{nth}", str(nth % gpus)
        made.append(Backend(name, f"m{number % models}", (gpu,), host=f"h{host:04}"))
    return Config(backends=tuple(made), gpus=gpus_of(hosts, gpus), policy="eager")


def gpus_of(hosts: int, gpus: int) -> tuple[Gpu, ...]:
    return tuple(
        Gpu(str(gpu), vram=80 << 30, host=f"h{host:04}") for host in range(hosts) for gpu in range(gpus)
    )


def anywhere(
    hosts: int = HOSTS, models: int = BACKENDS // (HOSTS * GPUS), most: int | None = 1, gpus: int = GPUS
) -> Config:
    """Models that may run on any GPU, and a backend of its own on each GPU that may be in their way."""
    places = [(f"h{host:04}", str(gpu)) for host in range(hosts) for gpu in range(gpus)]
    backends = [
        Backend(f"any{n}.{host}.{gpu}", f"any{n}", (gpu,), host=host, most=most)
        for n in range(models)
        for host, gpu in places
    ]
    backends += [Backend(f"own.{host}.{gpu}", f"own-{host}-{gpu}", (gpu,), host=host) for host, gpu in places]
    return Config(backends=tuple(backends), gpus=gpus_of(hosts, gpus), policy="eager")


class Watch:
    """A scheduler without threads: what each fact took, and the steps that nobody has reported."""

    def __init__(self, config: Config) -> None:
        self.core = Scheduler(config, lambda event: None, Costs(), Footprints())
        self.steps: dict[str, Step] = {}
        self.took: dict[str, list[float]] = {}
        self._tickets = 0

    def tell(self, what: str, fact: Callable[[], Any]) -> Any:
        began = time.thread_time()
        effects = fact()
        self.took.setdefault(what, []).append(time.thread_time() - began)
        self.steps |= {step.backend: step for step in effects.steps}
        return effects

    def request(self, model: str, now: float, what: str = "request") -> Ticket:
        self._tickets += 1
        ticket = Ticket(self._tickets, model, now)
        self.tell(what, lambda: self.core.requested(ticket, now))
        return ticket

    def report(self, now: float, what: str = "") -> None:
        """Every step that is under way ends well."""
        steps, self.steps = list(self.steps.values()), {}
        for step in steps:
            if isinstance(step, Load):
                self.tell(what or "loaded", lambda s=step: self.core.loaded(s, now, "stop"))
            elif isinstance(step, Evict):
                self.tell(what or "evicted", lambda s=step: self.core.evicted(s, now))

    def worst(self) -> dict[str, float]:
        return {what: max(took) for what, took in self.took.items()}


def watch_any(config: Config) -> dict[str, float]:
    """The longest that each fact took, where models may run anywhere."""
    watch = Watch(config)
    core = watch.core
    models = len([name for name in core.layout.models if name.startswith("any")])
    watch.tell("begin", lambda: core.time_passed(0.0))
    for n in range(models):
        watch.request(f"any{n}", 1.0 + n, "a load decided, GPUs free")
    watch.report(30.0, "loaded")
    held = []
    for name in [slot.name for slot in core.layout.slots if slot.name.startswith("own.")]:
        held.append(watch.request(core.layout.slot(name).model, 40.0, "request of a model with one GPU"))
    watch.tell("drains end", lambda: core.time_passed(80.0))
    for at in range(3):
        watch.report(90.0 + at)
    for n in range(models):
        watch.request(f"any{n}", 100.0 + n, "a load decided, all GPUs taken")
    held[-1] = watch.request(held[-1].model, 125.0, "another request")
    for number, ticket in enumerate(held[: 2 * models]):
        if ticket.backend:
            watch.tell("release", lambda t=ticket, at=126.0 + number / 100: core.released(t, at))
    watch.tell("drains end", lambda: core.time_passed(140.0))
    for at in range(4):
        watch.report(150.0 + at)
    watch.tell("host lost", lambda: core.host_lost("h0003", 160.0))
    watch.tell("host back", lambda: core.host_back("h0003", 170.0, {}))
    return watch.worst()


class HeldLock:
    """A lock that notes how long it was held."""

    def __init__(self, lock: Any) -> None:
        self._lock = lock
        self.longest = 0.0
        self.is_held = False
        self._since = 0.0

    def __enter__(self) -> None:
        self._lock.acquire()
        self.is_held = True
        self._since = time.thread_time()

    def __exit__(self, *error: object) -> None:
        self.longest = max(self.longest, time.thread_time() - self._since)
        self.is_held = False
        self._lock.release()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lock, name)


class WatchedClock(Clock):
    """A clock whose first lock, the multiplexer's, notes how long it was held."""

    def __init__(self) -> None:
        super().__init__()
        self.held: HeldLock | None = None

    def lock(self) -> Any:
        made = super().lock()
        if self.held is None:
            self.held = HeldLock(made)
            return self.held
        return made

    def condition(self, lock: Any) -> Any:
        return super().condition(lock._lock if isinstance(lock, HeldLock) else lock)


def multiplexer(config: Config) -> tuple[Multiplexer, WatchedClock]:
    clock = WatchedClock()
    return made(config, clock), clock


def made(config: Config, clock: Clock) -> Multiplexer:
    return Multiplexer(
        config, None, log=lambda event: None, log_leases=False, clock=clock, costs=learned(config)
    )


def learned(config: Config) -> list[Cost]:
    return [Cost("", each.model, "stop", 0.0, 20.0, 1, each.host) for each in config.backends]


def questions(mux: Multiplexer, model: str, host: str) -> dict[str, Callable[[], object]]:
    asked, facts = mux.overview, mux.facts
    return {
        "status": asked.status,
        "leaving": asked.leaving,
        "unseen": lambda: asked.unseen,
        "loading": asked.loading,
        "waiters": lambda: asked.waiters(10),
        "resident_replicas": asked.resident_replicas,
        "reports": asked.reports,
        "hear": lambda: facts.hear({}),
        "costs": asked.costs,
        "footprints": asked.footprints,
        "explain": lambda: asked.explain(model),
        "wait_estimate": lambda: asked.wait_estimate(model),
        "eta": lambda: asked.eta(model),
        "memory_seen": lambda: mux.tell(mux.scheduler.memory_seen, {"0": 1 << 30}),
        "cancel": lambda: mux.cancel(-1),
        "host_lost": lambda: facts.host_lost(host),
        "host_back": lambda: facts.host_back(host, {}),
    }


def holds(mux: Multiplexer, clock: WatchedClock, model: str, host: str) -> dict[str, float]:
    """Question or fact -> the longest hold of the lock for it, in seconds; the least of some tries."""
    assert clock.held
    found: dict[str, float] = {}
    for _ in range(3):
        for what, ask in questions(mux, model, host).items():
            clock.held.longest = 0.0
            ask()
            found[what] = min(clock.held.longest, found.get(what, 1e9))
    return found


def changed(config: Config, name: str, **settings: Any) -> Config:
    """The same with other settings of one backend, or of all backends of one model."""
    each = [replace(b, **settings if name in (b.name, b.model) else {}) for b in config.backends]
    return replace(config, backends=tuple(each))


def without(config: Config, host: str = "", model: str = "") -> Config:
    """The same without a host, or without a model."""
    return replace(
        config,
        backends=tuple([replace(b) for b in config.backends if b.host != host and b.model != model]),
        gpus=tuple([gpu for gpu in config.gpus if gpu.host != host]),
    )


def reloads(mux: Multiplexer, clock: WatchedClock, config: Config, host: str) -> dict[str, float]:
    """What a reload changes -> the longest hold of the lock for it, in seconds; the least of some tries.

    ``host``: one whose first backend is resident, and whose last is not.
    """
    assert clock.held
    first, *_, last = [each.name for each in config.backends if each.host == host]
    model = next(each.model for each in config.backends if each.name == first)
    mux._driver.apply(mux._driver.scheduler.time_passed)
    found: dict[str, float] = {}
    for number in range(1, 4):
        steps = {
            "reload: nothing": changed(config, ""),
            "reload: a setting of one backend": changed(config, last, priority=number),
            "reload: a backend that is not resident": changed(config, last, port=number),
            "reload: a backend that is resident": changed(config, first, port=number),
            "reload: a host leaves": without(config, host),
            "reload: a host joins": changed(config, ""),
            "reload: a setting of a model": changed(config, model, priority=number),
            "reload: all backends of a model": changed(config, model, port=number),
            "reload: a model leaves": without(config, model=model),
            "reload: a model joins": changed(config, ""),
            "reload: a setting of all": replace(changed(config, ""), drain_timeout=float(number)),
            "reload: the wait of all": replace(changed(config, ""), max_wait=100.0 + number),
            "reload: the policy": replace(changed(config, ""), policy="debounce"),
        }
        for what, after in steps.items():
            gc.collect()
            clock.held.longest = 0.0
            mux.facts.reconfigure(after, {})
            found[what] = min(clock.held.longest, found.get(what, 1e9))
    return found


def lease_seconds(config: Config, resident: Iterable[str], model: str, count: int = 2000) -> float:
    """The CPU seconds of a lease and its release, of a model that is resident; the least of some tries."""
    mux, least = made(config, Clock()), math.inf  # a lock that is watched takes longer
    mux.facts.adopt(dict.fromkeys(resident, "http://127.0.0.1:1"))
    for _ in range(10):
        began = time.thread_time()
        for _ in range(count):
            mux.lease(model).release()
        least = min(least, (time.thread_time() - began) / count)
    return least


def hour(config: Config, requests: int, seed: int = 0) -> Iterator[Any]:
    """Requests for models of which some are asked for far more often, and hosts that are lost."""
    draw = random.Random(seed)
    models = sorted({backend.model for backend in config.backends})
    hosts = sorted({backend.host for backend in config.backends})
    weights = [1 / rank for rank in range(1, len(models) + 1)]
    entries: list[Any] = []
    for model in draw.choices(models, weights, k=requests):
        entries.append(Arrival(draw.uniform(0.0, 3600.0), model, draw.expovariate(0.2)))
    for _ in range(20):
        at, host = draw.uniform(0.0, 3500.0), draw.choice(hosts)
        if not any(isinstance(each, HostLost) and each.host == host for each in entries):
            entries += [HostLost(at, host), HostBack(at + 60.0, host, {})]
    yield from sorted(entries, key=lambda entry: entry.at)


def megabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def tell(title: str, figures: dict[str, float], promise: float = HOLD_MS) -> None:
    """Print milliseconds beside what is promised of them."""
    print(f"\n{title}")
    for what, seconds in figures.items():
        tell_one(what, 1000 * seconds, promise, "ms")


def tell_one(what: str, figure: float, promise: float, unit: str) -> None:
    missed = "" if figure <= promise else "  MISSED"
    print(f"    {what:44} {figure:10.2f} {unit}   promised: {promise:g}{missed}")


def tell_lease(what: str, config: Config, resident: Iterable[str], model: str) -> None:
    tell_one(f"a lease and its release, {what}", 1e6 * lease_seconds(config, resident, model), LEASE_US, "us")


def show_many(hosts: int, gpus: int, backends: int) -> None:
    config = many(hosts, gpus, backends)
    before, began = megabytes(), time.process_time()
    Scheduler(config, lambda event: None, Costs(), Footprints())
    took, last = time.process_time() - began, f"h{hosts // 2:04}"
    print(f"many: {backends:,} backends on {hosts:,} hosts x {gpus} GPUs")
    tell_one("built", took, BUILT_S, "s")
    tell_one("memory", megabytes() - before, BUILT_MB, "MB")
    mux, clock = multiplexer(config)
    known = {backend.name for backend in config.backends}
    names = [f"h{host}-{nth}" for host in range(hosts) for nth in range(gpus)]
    resident = [name for name in names if name in known]
    mux.facts.adopt(dict.fromkeys(resident, "http://127.0.0.1:1"))
    tell("the longest hold of the lock", holds(mux, clock, "m7", last))
    tell_lease("many hosts", config, resident, config.backends[0].model)
    tell("the longest hold of the lock by a reload", reloads(mux, clock, config, last), RELOAD_MS)


def show_any(hosts: int, gpus: int, backends: int) -> None:
    models = max(backends // (hosts * gpus), 1)
    for most in (1, None):
        config = anywhere(hosts, models, most, gpus)
        print(f"\nany: {models} models that may run on any of {hosts:,} hosts x {gpus} GPUs, most: {most}")
        tell("the longest of each fact", watch_any(config))
        mux, clock = multiplexer(config)
        resident = ["any0.h0007.0", "own.h0003.1"]
        mux.facts.adopt(dict.fromkeys(resident, "http://127.0.0.1:1"))
        tell("the longest hold of the lock", holds(mux, clock, "any0", "h0010"))
        tell_lease("may run anywhere", config, resident, "any0")
        tell_lease("on one GPU", config, resident, "own-h0003-1")
        tell("the longest hold of the lock by a reload", reloads(mux, clock, config, "h0020"), RELOAD_MS)
    pair = Backend("a", "m", ("0",)), Backend("b", "m", ("1",))
    print()
    for what, those in ("one backend", pair[:1]), ("two replicas", pair):
        tell_lease(what, Config(backends=those, policy="eager"), [each.name for each in those], "m")


def show_hour(hosts: int, gpus: int, backends: int, requests: int = 36000) -> None:
    config = many(hosts, gpus, backends)
    entries = list(hour(config, requests))
    began = time.process_time()
    log = simulate(config, entries)
    middle = time.process_time()
    wrong = check(log, config)
    ended = time.process_time()
    print(f"\nhour: {requests} requests, {len(log)} events, simulated in {middle - began:.1f} s, checked in "
          f"{ended - middle:.1f} s, {len(wrong)} broken invariants, {megabytes():.0f} MB in all")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="*", default=["many", "any", "hour"])
    parser.add_argument("--hosts", type=int, default=HOSTS)
    parser.add_argument("--gpus", type=int, default=GPUS, help="GPUs of each host")
    parser.add_argument("--backends", type=int, default=BACKENDS)
    arguments = parser.parse_args()
    shows = {"many": show_many, "any": show_any, "hour": show_hour}
    for what in arguments.what:
        gc.collect()
        shows[what](arguments.hosts, arguments.gpus, arguments.backends)
        sys.stdout.flush()


if __name__ == "__main__":
    main()
