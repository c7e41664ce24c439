"""The small worlds that the explorer looks at: a few backends, and which facts may come.

A fact is a tuple of words: its kind, and what it is about. ``trial.py`` says what each kind tells.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

from anvil_mux.config.config import Backend, Config
from anvil_mux.scheduler.policies import POLICIES

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


def _backend(name: str, *gpus: str, model: str = "", **settings: object) -> Backend:
    return Backend(name, model or name, gpus, **settings)  # type: ignore[arg-type]


def _config(*backends: Backend, **settings: object) -> Config:
    return Config(backends, **settings)  # type: ignore[arg-type]


def _up(*backends: str) -> tuple[Fact, ...]:
    return tuple([("up", each) for each in backends])


STEPS_FAIL = frozenset(("load_failed", "evict_failed"))
PEOPLE = frozenset(("unload", "pin"))


def _worlds() -> Iterator[SmallWorld]:
    x, y, a, b = _backend("x", "0"), _backend("y", "1"), _backend("a", "0"), _backend("b", "1")
    c, tie = _backend("c", "0"), _backend("tie", "0", "1")
    yield SmallWorld(
        "one GPU",
        _config(a, c, _backend("d", "0")),
        _up("a"),
        frozenset(("abandon", "died", "pass")) | STEPS_FAIL,
        extra=(_backend("e", "0"),),
    )
    yield SmallWorld(
        "two GPUs", _config(x, a, y, b), _up("x", "y"), frozenset(("abandon", "pass")), extra=(tie,)
    )
    yield SmallWorld(
        "replicas",
        _config(
            _backend("m0", "0", model="m"), _backend("m1", "1", model="m"), x, _backend("z", "1", pin=True)
        ),
        _up("x", "z"),
        frozenset(("abandon", "unload", "pin", "died", "load_failed")),
    )
    yield SmallWorld(
        "tensor parallel",
        _config(_backend("t", "0", "1"), a, c, b),
        _up("a", "b"),
        frozenset(("abandon", "load_failed", "died")),
    )


WORLDS = {world.name: world for world in _worlds()}
