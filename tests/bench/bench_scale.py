"""What many hosts cost the scheduler: what is built, how long the lock is held, how soon a load is decided.

    many   1,000 hosts x 8 GPUs, 16,000 backends, 2,000 models, each backend on a GPU of its own choice
    any    50 hosts x 8 GPUs, 20 models that may run on any GPU (8,000 backends), one resident on every GPU
    hour   an hour of requests for the models of ``many``, hosts lost and back meanwhile, and its log checked

Of each question and each fact the longest hold of the multiplexer's lock is told, in milliseconds of this
process's CPU; of a lease and its release how many pass in a second. The promises: ``many`` is built in less
than 2 s and 200 MB, and no hold is longer than 5 ms while requests are served or the configuration changes.

Nothing here passes or fails: a missed target is a finding, not an error. test_bench_scale.py has a
smaller part of it, and a bound that is generous.
"""

from __future__ import annotations

import argparse
import gc
import random
import resource
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

from anvil_mux.clock import Clock
from anvil_mux.config.config import Backend, Config, Gpu
from anvil_mux.multiplexer.multiplexer import Multiplexer
from anvil_mux.scheduler.costs import Cost, Costs
from anvil_mux.scheduler.footprint import Footprints
from anvil_mux.scheduler.scheduler import Scheduler
from anvil_mux.scheduler.steps import Evict, Load, Step, Ticket
from anvil_mux.sim.simulate import Arrival, HostBack, HostLost, check, simulate

GPUS = 8
ASKED = "reload: what is asked a moment later"
KNOWS_MOST = any(field.name == "most" for field in fields(Backend))


def many(hosts: int = 1000) -> Config:
    """Two backends for each GPU, of models that have eight each."""
    backends, models = [], max(hosts * 2 * GPUS // 8, 1)
    for host in range(hosts):
        for nth in range(2 * GPUS):
            model = f"m{(host * 2 * GPUS + nth) % models}"
            backends.append(Backend(f"h{host}-{nth}", model, (str(nth % GPUS),), host=f"h{host:04}"))
    return Config(backends=tuple(backends), gpus=gpus_of(hosts), policy="eager")


def gpus_of(hosts: int) -> tuple[Gpu, ...]:
    return tuple(
        Gpu(str(gpu), vram=80 << 30, host=f"h{host:04}") for host in range(hosts) for gpu in range(GPUS)
    )


def anywhere(hosts: int = 50, models: int = 20, most: int | None = 1) -> Config:
    """Models that may run on any GPU, and a backend of its own on each GPU that may be in their way."""
    places = [(f"h{host:04}", str(gpu)) for host in range(hosts) for gpu in range(GPUS)]
    bound: dict[str, Any] = {"most": most} if KNOWS_MOST else {}
    backends = [
        Backend(f"any{n}.{host}.{gpu}", f"any{n}", (gpu,), host=host, **bound)
        for n in range(models)
        for host, gpu in places
    ]
    backends += [Backend(f"own.{host}.{gpu}", f"own-{host}-{gpu}", (gpu,), host=host) for host, gpu in places]
    return Config(backends=tuple(backends), gpus=gpus_of(hosts), policy="eager")


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
                self.tell(what or "loaded", lambda s=step: self.core.loaded(s, now, "stop"))  # type: ignore[misc]
            elif isinstance(step, Evict):
                self.tell(what or "evicted", lambda s=step: self.core.evicted(s, now))  # type: ignore[misc]

    def worst(self) -> dict[str, float]:
        return {what: max(took) for what, took in self.took.items()}


def watch_any(most: int | None, hosts: int = 50, models: int = 20) -> dict[str, float]:
    """The longest that each fact took, where models may run anywhere."""
    watch = Watch(anywhere(hosts, models, most))
    core = watch.core
    watch.tell("begin", lambda: core.time_passed(0.0))
    for n in range(models):
        watch.request(f"any{n}", 1.0 + n, "a load decided, GPUs free")
    watch.report(30.0, "loaded")
    held = []
    for name in [slot.name for slot in core.layout.slots if slot.name.startswith("own.")]:
        held.append(watch.request(core.layout.slot(name).model, 40.0, "request of a model with one GPU"))  # type: ignore[union-attr]
    watch.tell("drains end", lambda: core.time_passed(80.0))
    for at in range(3):
        watch.report(90.0 + at)
    for n in range(models):
        watch.request(f"any{n}", 100.0 + n, "a load decided, all GPUs taken")
    held[-1] = watch.request(held[-1].model, 125.0, "another request")
    for number, ticket in enumerate(held[: 2 * models]):
        if ticket.backend:
            watch.tell("release", lambda t=ticket, at=126.0 + number / 100: core.released(t, at))  # type: ignore[misc]
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
    mux = Multiplexer(
        config, None, log=lambda event: None, log_leases=False, clock=clock, costs=learned(config)
    )  # type: ignore[arg-type]
    return mux, clock


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
        "memory_seen": lambda: facts.memory_seen({"0": 1 << 30}),
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
    asked_later(mux)
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
            clock.held.longest = 0.0
            asked_later(mux)
            found[ASKED] = max(clock.held.longest, found.get(ASKED, 0.0))
    return found


def asked_later(mux: Multiplexer) -> None:
    """Have all GPU groups asked that a reload leaves to be asked a moment later."""
    shell, until = mux._shell, mux._clock.now() + 1.0
    while (shell.apply(shell.scheduler.time_passed).ask_at or until) < until:
        pass


def leases_a_second(mux: Multiplexer, model: str, count: int = 20000) -> float:
    """Leases that begin and end in a second, of a model that is resident; the best of some tries."""
    best = 0.0
    for _ in range(5):
        began = time.thread_time()
        for _ in range(count // 5):
            mux.lease(model).release()
        best = max(best, count / 5 / (time.thread_time() - began))
    return best


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


def tell(title: str, figures: dict[str, float]) -> None:
    print(f"\n{title}")
    for what, seconds in figures.items():
        print(f"    {what:40} {1000 * seconds:10.2f} ms")


def show_many() -> None:
    config = many()
    before, began = megabytes(), time.process_time()
    Scheduler(config, lambda event: None, Costs(), Footprints())
    took = time.process_time() - began
    print(f"many: {len(config.backends)} backends built in {took:.2f} s, +{megabytes() - before:.0f} MB")
    mux, clock = multiplexer(config)
    names = [f"h{host}-{nth}" for host in range(1000) for nth in range(GPUS)]
    mux.facts.adopt(dict.fromkeys(names, "http://127.0.0.1:1"))
    tell("longest hold of the lock", holds(mux, clock, "m7", "h0500"))
    leases = leases_a_second(mux, config.backends[0].model)  # before reloads, which evict it
    tell("longest hold of the lock", reloads(mux, clock, config, "h0500"))
    print(f"    leases a second, many hosts: {leases:.0f}")


def show_any() -> None:
    for most in (1, None) if KNOWS_MOST else (None,):
        tell(f"any, most: {most}: the longest of each fact", watch_any(most))
        mux, clock = multiplexer(anywhere(most=most))
        mux.facts.adopt({"any0.h0007.3": "http://127.0.0.1:1", "own.h0003.1": "http://127.0.0.1:1"})
        tell("longest hold of the lock", holds(mux, clock, "any0", "h0030"))
        roaming, fixed = leases_a_second(mux, "any0"), leases_a_second(mux, "own-h0003-1")
        tell("longest hold of the lock", reloads(mux, clock, anywhere(most=most), "h0020"))
        print(f"    leases a second, a model that may run anywhere: {roaming:.0f}")
        print(f"    leases a second, a model on one GPU: {fixed:.0f}")
    pair = Backend("a", "m", ("0",)), Backend("b", "m", ("1",))
    for what, backends in ("one backend", pair[:1]), ("two replicas", pair):
        mux, _ = multiplexer(Config(backends=backends, policy="eager"))
        mux.facts.adopt({each.name: "http://127.0.0.1:1" for each in backends})
        print(f"    leases a second, one host, {what}: {leases_a_second(mux, 'm'):.0f}")


def show_hour(requests: int = 36000) -> None:
    config = many()
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
    arguments = parser.parse_args()
    shows = {"many": show_many, "any": show_any, "hour": show_hour}
    for what in arguments.what:
        gc.collect()
        shows[what]()
        sys.stdout.flush()


if __name__ == "__main__":
    main()
