"""Worlds with three hosts that are lost and come back, as data for the simulator and the threads."""

import random
from dataclasses import replace
from math import inf

from anvil_mux.config.config import Config
from anvil_mux.scheduler.slot import FoundBackend
from tests.lab.facts import HostBack, HostDrained, HostGone, HostLost, PauseBegun, PauseEnded
from tests.lab.test_simulate import Hazards, one, own_settings, random_settings, random_traffic, tick

FLEETS = {
    "replicas everywhere": (
        *(one(f"m{host}", "0", model="m", host=host) for host in ("", "h1", "h2")),
        *(one(f"n{host}", "0", model="n", host=host) for host in ("h1", "h2")),
        one("a", "0"),
        one("b", "0", host="h1"),
        one("c", "0", host="h2"),
    ),
    "two GPUs each": (
        *(one(f"m{host}", "0", model="m", host=host) for host in ("", "h1", "h2")),
        *(one(f"n{host}", "1", model="n", host=host) for host in ("", "h1")),
        one("t", "0", "1", host="h1"),
        one("a", "0", host="h1"),
        one("b", "1", host="h2"),
        one("c", "1"),
        one("cpu", host="h2"),
    ),
    "standby and limits": (
        *(
            one(f"m{host}", "0", model="m", host=host, evict_to=("sleep",), concurrency=1 + (host == "h1"))
            for host in ("", "h1", "h2")
        ),
        *(one(f"n{host}", "0", model="n", host=host, evict_to=("sleep", "stop")) for host in ("", "h2")),
        one("a", "0", host="h1", evict_to=("sleep", "sleep-2"), demote_after=5.0029296875),
        one("b", "0", host="h2", preload=True),
        one("c", "0", concurrency=1),
    ),
    "short of host memory": (
        *(
            one(f"m{host}", "0", model="m", host=host, ram=4, evict_to=("sleep",))
            for host in ("", "h1", "h2")
        ),
        *(one(f"n{host}", "1", model="n", host=host, ram=6, evict_to=("sleep",)) for host in ("h1", "h2")),
        one("a", "0", host="h1", ram=7),
        one("b", "1", host="h1", ram=3, evict_to=("sleep", "checkpoint")),
        one("c", "0", ram=5),
    ),
    "as many as may be": (
        *(
            one(f"m{host}{gpu}", gpu, model="m", host=host, most=1)
            for host in ("", "h1", "h2")
            for gpu in ("0", "1")
        ),
        *(
            one(f"n{host}", "0", model="n", host=host, most=2, preload=True, evict_to=("sleep",))
            for host in ("", "h1", "h2")
        ),
        *(one(f"l{host}", "1", model="l", host=host, most=1, concurrency=1) for host in ("", "h1", "h2")),
        one("a", "0"),
        one("b", "0", "1", host="h1"),
        one("c", "1", host="h2"),
    ),
}
HOSTS = ("", "h1", "h2")
MEMORY = {"h1": 13, "h2": 12}


def found(draw, backends):
    """What of a host's backends is found there, whatever they were when it was lost."""
    seen = {}
    for backend in backends:
        how = draw.random()
        if how < 0.35:
            seen[backend.name] = FoundBackend()
        elif how < 0.5 and backend.evict_to != ("stop",):
            seen[backend.name] = FoundBackend(backend.evict_to[0], host_bytes=4 if backend.ram else 0)
    return seen


def losses(draw, backends, end):
    """Hosts that are lost, now and then, and mostly come back."""
    for host in HOSTS:
        now = draw.uniform(0.0, end / 2)
        while now < end:
            now += tick(draw.expovariate(8 / end)) + 2**-20
            yield HostLost(tick(now), host)
            if draw.random() < 0.15:
                now += tick(draw.uniform(1.0, 5.0))
                yield HostGone(tick(now), host)
            now += tick(draw.uniform(0.5, 20.0))
            if draw.random() < 0.1:
                break
            yield HostBack(tick(now), host, found(draw, [b for b in backends if b.host == host]))


def drains(draw, end):
    """Hosts that are drained by hand, mostly for a while; also lost ones."""
    now = tick(draw.uniform(0.0, end))
    for host in draw.sample(HOSTS, draw.choice((0, 1, 1, 2))):
        yield HostDrained(now, host)
        if draw.random() < 0.8:
            yield HostDrained(tick(now + draw.uniform(0.5, 20.0)), host, drained=False)
        now += tick(draw.uniform(1.0, 20.0))


def pauses(draw, end):
    """Pauses of all hosts, some ended by hand and some by themselves; also one that is set anew."""
    now = tick(draw.uniform(0.0, end))
    for _ in range(draw.choice((0, 1, 1, 2))):
        lasts = draw.choice((inf, tick(draw.uniform(0.5, 20.0))))
        yield PauseBegun(now, lasts)
        if draw.random() < 0.2:
            now += tick(draw.uniform(0.5, 10.0))
            yield PauseBegun(now, tick(draw.uniform(0.5, 20.0)))
        now += tick(draw.uniform(0.5, 20.0))
        if lasts == inf or draw.random() < 0.3:
            yield PauseEnded(now)
        now += tick(draw.uniform(1.0, 20.0))


def world_of_pauses(fleet, policy, seed, requests=80):
    """The same with pauses, in which requests are refused or wait."""
    config, trace, engines = world_of_hosts(fleet, policy, seed, requests)
    draw = random.Random(f"pauses {fleet} {policy} {seed}")
    trace += pauses(draw, trace[-1].at)
    trace.sort(key=lambda entry: entry.at)
    return replace(config, when_paused=draw.choice(("refuse", "wait"))), trace, engines


def world_of_hosts(fleet, policy, seed, requests=80):
    """A configuration, a trace of distinct moments with losses of hosts, and engines."""
    draw = random.Random(f"{fleet} {policy} {seed}")
    backends = FLEETS[fleet]
    if seed % 2:
        backends = own_settings(backends, f"{fleet} {policy} {seed}")
        backends = tuple([replace(b, max_wait="auto") if b.model in "mn" else b for b in backends])
    bounded = fleet.endswith("short of host memory")
    config = Config(
        backends=backends,
        policy=policy,
        **random_settings(draw, policy),
        host_memory=11 if bounded else None,
        memory_of_hosts=MEMORY if bounded else {},
    )
    engines = Hazards(
        seed,
        failing_starts=draw.choice((0.0, 0.3)),
        stuck=draw.choice((0.0, 0.15)),
        host_bytes=4 if bounded else 0,
    )
    trace, end = random_traffic(draw, backends, requests)
    trace += losses(draw, backends, end)
    trace += drains(draw, end)
    trace.sort(key=lambda entry: entry.at)
    return config, trace, engines
