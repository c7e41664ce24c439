"""The small worlds that the explorer looks at: a few backends, and which facts may come.

A fact is a tuple of words: its kind, and what it is about. ``trial.py`` says what each kind tells.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, cast

from anvil_mux.config.config import Backend, Config
from anvil_mux.config.machines import Gpu, Wake
from anvil_mux.scheduler.policies import POLICIES, Decision, Snapshot, Stay, SwapTo

Fact = tuple[str, ...]


@dataclass(frozen=True, eq=False)
class SmallWorld:
    """A configuration, how it begins, and the facts that may come."""

    name: str
    config: Config
    begins: tuple[Fact, ...] = ()
    """The facts that every history of it begins with."""
    may: frozenset[str] = frozenset()
    """The kinds of facts that may come besides requests, the ends of leases and of steps, and time."""
    asked: tuple[str, ...] = ()
    """The models that are asked for; none: all."""
    extra: tuple[Backend, ...] = ()
    """Backends of models that nobody asks for: everything is to happen as without them (13)."""
    policies: tuple[str, ...] = tuple(POLICIES)
    holds_back: bool = False
    """Whether its policies may hold a swap back although nobody need be evicted."""
    waiting: int = 2
    """The most requests that wait for one model."""
    residual: int = 0
    """Bytes that a backend in standby holds on each of its GPUs."""
    host_bytes: int = 0
    """Bytes that it keeps of the host's memory."""
    passes: float = 7.0
    """The seconds that pass where nothing is to be done."""

    @property
    def models(self) -> tuple[str, ...]:
        return self.asked or tuple(dict.fromkeys(each.model for each in self.config.backends))

    def backend(self, name: str) -> Backend:
        return next(each for each in self.config.backends if each.name == name)

    def under(self, policy: str) -> tuple[Config, ...]:
        """The configuration under a policy, and the same with the extra backends; made once."""
        return _under(self, policy)


@cache
def _under(world: SmallWorld, policy: str) -> tuple[Config, ...]:
    alone = replace(world.config, policy=policy)
    beside = replace(alone, backends=(*alone.backends, *world.extra))
    return (alone, beside) if world.extra else (alone,)


def _backend(name: str, *gpus: str, model: str = "", **settings: Any) -> Backend:
    return Backend(name, model or name, gpus, **settings)


def _config(*backends: Backend, **settings: Any) -> Config:
    return Config(backends, **settings)


def _up(*backends: str) -> tuple[Fact, ...]:
    return tuple([("up", each) for each in backends])


@dataclass(frozen=True)
class Undecided:
    """A policy from outside with mistakes: it stays for ever unknown, or wants a model whatever waits."""

    wants: str = ""

    def decide(self, seen: Snapshot) -> Decision:
        return SwapTo(self.wants) if self.wants else Stay(until=cast(float, None))


@dataclass(frozen=True)
class Unable:
    """An eviction from outside that knows nothing of the residents that it is asked about."""

    def order(self, candidate: object) -> object:
        raise LookupError(candidate)


def _on(host: str, name: str, *gpus: str, model: str = "", **settings: Any) -> Backend:
    return _backend(name, *gpus, model=model, host=host, **settings)


FAIL = frozenset(("load_failed", "evict_failed", "died"))
HOSTS = frozenset(("lost", "away", "gone", "drained"))


def _worlds() -> Iterator[SmallWorld]:
    x, y, a, b = _backend("x", "0"), _backend("y", "1"), _backend("a", "0"), _backend("b", "1")
    c, tie, beside = _backend("c", "0"), _backend("tie", "0", "1"), _backend("beside", "0")
    yield SmallWorld(
        "one GPU",
        _config(a, c, _backend("d", "0", priority=1)),
        _up("a"),
        frozenset(("abandon", "pass", "load_cancelled", "wish", "late")) | FAIL,
        extra=(beside,),
    )
    sleeper = _backend("s", "0", evict_to=("freeze", "stop"))
    yield SmallWorld(
        "Docker away",
        _config(a, c, sleeper, tie),
        _up("a"),
        frozenset(("abandon", "not_begun", "unload", "evict_failed")),
    )
    yield SmallWorld(
        "two GPUs", _config(x, a, y, b), _up("x", "y"), frozenset(("abandon", "pass")), extra=(tie,)
    )
    ten = (Gpu("0", vram=10),)
    replicas = _backend("m0", "0", model="m"), _backend("m1", "1", model="m")
    yield SmallWorld(
        "replicas",
        _config(*replicas, x, _backend("z", "1", pin=True)),
        _up("x", "z"),
        frozenset(("abandon", "unload", "pin", "died", "load_failed")),
    )
    yield SmallWorld(
        "busy replicas",
        _config(*replicas, x, y),
        _up("m0", "y"),
        frozenset(("abandon", "pass", "evict_failed")),
        waiting=3,
        extra=(tie,),
    )
    half: dict[str, Any] = {"vram": 5}
    yield SmallWorld(
        "replicas, one in the place of two",
        _config(
            *[replace(each, vram=10) for each in replicas],
            _backend("s", "0", **half),
            _backend("r", "0", **half),
            _backend("y", "1", vram=10, min_residency=15.0),
            gpus=(*ten, Gpu("1", vram=10)),
        ),
        _up("s", "r", "y"),
        frozenset(("abandon", "pass")),
        extra=(replace(tie, vram=10),),
    )
    yield SmallWorld(
        "tensor parallel",
        _config(_backend("t", "0", "1"), a, c, b),
        _up("a", "b"),
        frozenset(("abandon", "load_failed", "died")),
    )
    third = _backend("u", "1", "2"), _backend("v", "2")
    yield SmallWorld(
        "three GPUs",
        _config(_backend("t", "0", "1"), a, *third),
        _up("a"),
        frozenset(("abandon", "evict_failed")),
    )
    small, large = _backend("s", "0", vram=4), _backend("l", "0", vram=7)
    yield SmallWorld(
        "shared GPU",
        _config(small, _backend("r", "0", vram=4), large, a, gpus=ten),
        _up("s", "r"),
        frozenset(("abandon", "others", "pin")),
        extra=(_backend("beside", "0", vram=3),),
    )
    asleep = _backend("w", "0", vram=4, evict_to=("sleep",))
    yield SmallWorld(
        "GPU left to others",
        _config(small, asleep, _backend("k", "1", model="s"), gpus=(*ten, Gpu("1", vram=10)), yield_above=5),
        _up("s", "w"),
        frozenset(("abandon", "others", "died", "evict_failed")),
        residual=1,
    )
    yield SmallWorld(
        "too large",
        _config(_backend("s", "0", vram=11), _backend("p", "0", vram=6, pin=True), large, gpus=ten),
        (),
        frozenset(("pin", "unload", "abandon")) | FAIL,
    )
    sleeps: dict[str, Any] = {"evict_to": ("sleep", "stop"), "vram": 6}
    yield SmallWorld(
        "standby",
        _config(
            _backend("s", "0", demote_after=20.0, **sleeps),
            _backend("r", "0", **sleeps),
            _backend("l", "0", vram=9),
            gpus=ten,
        ),
        _up("s"),
        frozenset(("abandon", "stopped", "unload", "pass")) | FAIL,
        residual=2,
    )
    deep: dict[str, Any] = {"evict_to": ("sleep", "checkpoint", "stop"), "ram": 4}
    yield SmallWorld(
        "host memory in standby",
        _config(
            _backend("s", "0", **deep), _backend("r", "0", **deep), _backend("q", "1", **deep), host_memory=9
        ),
        _up("s"),
        frozenset(("abandon", "stopped", "evict_failed")),
        host_bytes=3,
    )
    yield SmallWorld(
        "host memory",
        _config(_backend("a", "0", ram=6), c, _backend("b", "1", ram=6), host_memory=10, max_wait=20.0),
        (*_up("a"), ("expected", "c")),
        frozenset(("abandon", "pass")),
    )
    yield SmallWorld(
        "found running",
        _config(a, c, b, _backend("t", "0", "1")),
        (("expected", "a", "c", "b"),),
        frozenset(("abandon", "unload")),
    )
    yield SmallWorld(
        "places",
        _config(_backend("a", "0", concurrency=1), c),
        _up("a"),
        frozenset(("abandon", "died", "pass", "evict_failed")),
        waiting=3,
        extra=(beside,),
    )
    yield SmallWorld(
        "patience",
        _config(
            _backend("a", "0", drain_timeout=math.inf),
            _backend("c", "0", min_residency=15.0),
            _backend("d", "0", priority=1, max_wait=5.0),
        ),
        _up("a"),
        frozenset(("abandon", "pass", "unload")),
        extra=(beside,),
    )
    yield SmallWorld(
        "priorities",
        _config(
            a,
            b,
            _backend("low", "0", "1", drain_timeout=40.0),
            _backend("high", "0", priority=1),
            _backend("top", "0", "1", priority=2),
            max_wait=20.0,
        ),
        _up("a", "b"),
        frozenset(("abandon", "pass", "evict_failed")),
    )
    for when in ("wait", "refuse"):
        yield SmallWorld(
            f"paused, they {when}",
            _config(a, c, b, when_paused=when),
            _up("a"),
            frozenset(("abandon", "pause", "load_failed", "evict_failed")),
        )
    yield SmallWorld(
        "comes back",
        _config(
            _backend("h", "0", home=True, home_after=20.0),
            _backend("a", "0", ttl=30.0),
            _backend("p", "1", preload=True),
        ),
        (),
        frozenset(("abandon", "unload", "load_failed", "pass")),
    )
    yield SmallWorld(
        "hinted",
        _config(a, c, _backend("s", "0", evict_to=("sleep",), min_residency=15.0)),
        _up("a"),
        frozenset(("abandon", "hint", "pass", "load_failed", "evict_failed", "unload")),
        residual=1,
    )
    yield SmallWorld(
        "hinted replicas",
        _config(*replicas, x, y),
        _up("x", "y"),
        frozenset(("abandon", "hint", "died", "pin")),
    )
    yield SmallWorld(
        "one of two",
        _config(*[replace(each, most=1) for each in replicas], x, b),
        _up("x"),
        frozenset(("abandon", "died", "evict_failed", "load_failed")),
    )
    yield SmallWorld(
        "two hosts",
        _config(
            _on("h1", "m0", "0", model="m"),
            _on("h2", "m1", "0", model="m"),
            _on("h1", "x", "0"),
            _on("h2", "y", "0"),
        ),
        _up("m0", "y"),
        frozenset(("abandon", "late")) | HOSTS,
    )
    yield SmallWorld(
        "asleep",
        _config(
            _on("h1", "m0", "0", model="m"),
            _on("h2", "m1", "0", model="m"),
            _on("h1", "x", "0"),
            wakes={"h1": Wake(timeout=30.0)},
        ),
        _up("x"),
        frozenset(("abandon", "lost", "gone", "unwoken", "wish")),
    )
    yield SmallWorld(
        "lost in a load",
        _config(_on("h1", "a", "0"), _on("h1", "c", "0"), b),
        _up("a"),
        frozenset(("lost", "gone", "away", "unload", "pin")),
    )
    outside = "tests.explorer.worlds:"
    yield SmallWorld(
        "a policy with mistakes",
        _config(a, c, b),
        _up("a"),
        frozenset(("abandon", "died")),
        policies=(f"{outside}Undecided",),
        holds_back=True,
    )
    yield SmallWorld(
        "a policy that wants another model",
        _config(a, c, b, policy_settings={"wants": "b"}),
        _up("a"),
        frozenset(("abandon", "died")),
        policies=(f"{outside}Undecided",),
        holds_back=True,
    )
    yield SmallWorld(
        "an eviction with mistakes",
        _config(small, _backend("r", "0", vram=4), large, gpus=ten, eviction=f"{outside}Unable"),
        _up("s", "r"),
        frozenset(("abandon", "died")),
        policies=("eager", "adaptive"),
    )


WORLDS = {world.name: world for world in _worlds()}
