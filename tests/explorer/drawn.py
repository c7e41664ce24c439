"""Random walks through drawn worlds: long histories, and settings together that nobody thought of.

The explorer looks at every short history of the worlds that somebody wrote down; a walk is one long history
of one of very many. A seed is a world, a policy and a history; a violation is shrunk to few facts.

``python -m tests.explorer.drawn --minutes 2`` draws from another seed each time, and prints each violation
with its facts and its world.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any

from anvil_mux.config.config import Backend, Config
from anvil_mux.config.machines import Gpu, Wake
from anvil_mux.scheduler.policies import POLICIES
from tests.explorer.trial import BY_GROUP, Trial
from tests.explorer.witness import Violation
from tests.explorer.worlds import Fact, SmallWorld

FACTS = 30
"""The most facts of a walk, before everything is let go well."""
VRAM = 10
"""The memory of a GPU, where it is declared."""
KINDS = (
    *("abandon", "pass", "died", "evict_failed", "load_failed", "load_cancelled"),
    *("unload", "hint", "pin", "pause", "stopped", "wish"),
)
HOST_KINDS = ("lost", "gone", "away", "drained", "late", "unwoken")
OFTEN = {"request": 6, "loaded": 5, "evicted": 5, "release": 3, "time": 3, "pass": 2}
"""How often a kind of fact comes, where others come once."""


class _Draw:
    """One world that is drawn."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.hosts = [""] if rng.random() < 0.7 else ["h1", "h2"]
        count = rng.choice((1, 2, 2, 3)) if len(self.hosts) == 1 else 0
        self.gpus = [(host, str(n)) for host in self.hosts for n in range(count or rng.choice((1, 1, 2)))]
        self.sized = rng.random() < 0.4
        self.backends: list[Backend] = []
        for model in "abcd"[: rng.choice((2, 3, 3, 4))]:
            self._draw_model(model)

    def may(self, part: float) -> bool:
        return self.rng.random() < part

    def _draw_model(self, model: str) -> None:
        rng = self.rng
        shared: dict[str, Any] = {}
        shared |= {"priority": 1} if self.may(0.2) else {}
        shared |= {"concurrency": 1} if self.may(0.15) else {}
        shared |= {"max_wait": rng.choice((5.0, 20.0))} if self.may(0.2) else {}
        copies = rng.choice((1, 1, 1, 2, 2, 3))
        shared |= {"most": 1} if copies > 1 and self.may(0.2) else {}
        for number in range(copies):
            host = rng.choice(self.hosts)
            own = [gpu for each, gpu in self.gpus if each == host]
            gpus = tuple(sorted(rng.sample(own, 2 if len(own) > 1 and self.may(0.25) else 1)))
            if not any((b.model, b.host, b.gpus) == (model, host, gpus) for b in self.backends):
                name = model if copies == 1 else f"{model}{number}"
                self.backends.append(Backend(name, model, gpus, host=host, **shared, **self._own()))

    def _own(self) -> dict[str, Any]:
        rng = self.rng
        levels = (("sleep", "stop"), ("sleep",), ("sleep", "checkpoint", "stop"))
        parts: list[tuple[float, dict[str, Any]]] = [
            (0.8 if self.sized else 0.0, {"vram": rng.choice((3, 4, 5, 7, VRAM))}),
            (0.08, {"pin": True}),
            (0.15, {"min_residency": 15.0}),
            (0.25, {"drain_timeout": rng.choice((5.0, 40.0, math.inf))}),
            (0.12, {"ttl": 30.0}),
            (0.25, {"evict_to": rng.choice(levels), "demote_after": rng.choice((None, 20.0))}),
            (0.2, {"ram": rng.choice((3, 6))}),
            (0.1, {"preload": True}),
            (0.1, {"home": True, "home_after": 20.0}),
        ]
        return {key: value for part, settings in parts if self.may(part) for key, value in settings.items()}

    def config(self) -> Config:
        rng, settings = self.rng, dict[str, Any]()
        settings |= {"max_wait": 20.0} if self.may(0.25) else {}
        sleeps = any("sleep" in each.evict_to for each in self.backends)
        settings |= {"host_memory": rng.choice((6, 10))} if self.may(0.3) and not sleeps else {}
        settings |= {"when_paused": "wait"} if self.may(0.2) else {}
        settings |= {"yield_above": 5} if self.sized and self.may(0.3) else {}
        settings |= {"wakes": {"h1": Wake(timeout=30.0)}} if len(self.hosts) > 1 and self.may(0.3) else {}
        if self.sized:
            settings["gpus"] = tuple([Gpu(gpu, host=host, vram=VRAM) for host, gpu in self.gpus])
        return Config(tuple(self.backends), **settings)

    def kinds(self) -> frozenset[str]:
        more = [kind for kind in KINDS if self.may(0.35)]
        if len(self.hosts) > 1:
            return frozenset(more + [kind for kind in HOST_KINDS if self.may(0.4)])
        return frozenset([*more, "others"] if self.sized and self.may(0.4) else more)

    def resident(self) -> list[str]:
        """Some backends that fit beside each other, none of one model twice."""
        used: dict[tuple[str, str], int] = {}
        by_model: dict[str, str] = {}
        for each in self.rng.sample(self.backends, len(self.backends)):
            need, places = each.vram or VRAM, [(each.host, gpu) for gpu in each.gpus]
            fits = all(used.get(place, 0) + need <= VRAM for place in places)
            if self.may(0.5) and fits and each.model not in by_model:
                used.update({place: used.get(place, 0) + need for place in places})
                by_model[each.model] = each.name
        return list(by_model.values())

    def extra(self, config: Config, kinds: frozenset[str]) -> tuple[Backend, ...]:
        """A backend that ties all GPUs of a host, and that nobody asks for."""
        is_shared = config.host_memory is not None or any(b.home or b.preload for b in self.backends)
        if is_shared or kinds & {"hint", "others"} or self.may(0.4):
            return ()
        host = self.rng.choice(self.hosts)
        gpus = tuple([gpu for each, gpu in self.gpus if each == host])
        return (Backend("tie", "tie", gpus, host=host, vram=VRAM if self.sized else None),)


def draw(seed: int) -> tuple[SmallWorld, str]:
    """The world of a seed, and its policy."""
    drawn = _Draw(seed)
    config, kinds, up = drawn.config(), drawn.kinds(), drawn.resident()
    names = [each.name for each in config.backends]
    world = SmallWorld(
        f"drawn {seed}",
        config,
        (
            ("expected", *names),
            *[("up", name) for name in up],
            *[("looked_at", name) for name in names if name not in up],
        ),
        kinds,
        extra=drawn.extra(config, kinds),
        waiting=drawn.rng.choice((2, 3)),
        residual=drawn.rng.choice((0, 1, 2)) if drawn.sized else 0,
        host_bytes=drawn.rng.choice((0, 2, 3)),
    )
    return world, drawn.rng.choice(list(POLICIES))


def walk(seed: int, most: int = FACTS) -> tuple[tuple[Fact, ...], list[Violation]]:
    """The history of a seed, and what is wrong with it."""
    world, policy = draw(seed)
    rng, trial = random.Random(-seed - 1), Trial(world, policy, early=random.Random(seed))
    while len(trial.history) < most and not (trial.is_over or trial.wrong):
        facts = list(trial.facts())
        kinds = sorted({fact[0] for fact in facts})
        kind = rng.choices(kinds, [OFTEN.get(each, 1) for each in kinds])[0]
        trial.tell(rng.choice([fact for fact in facts if fact[0] == kind]))
    return tuple(trial.history), _judged(trial)


def _judged(trial: Trial) -> list[Violation]:
    if not (trial.is_over or trial.wrong):
        trial.complete()
    # That bound is the driver's to keep, and there is none here.
    return [each for each in trial.judge() if not each.text.endswith("waited longer than queue_timeout")]


def replayed(seed: int, facts: Sequence[Fact]) -> list[Violation]:
    """What is wrong with a history in the world of a seed; nothing if it cannot come to that."""
    trial = Trial(*draw(seed), early=random.Random(seed))
    for fact in facts:
        if trial.is_over or trial.wrong:
            break
        if fact not in list(trial.facts()):
            return []
        trial.tell(fact)
    return _judged(trial)


def shrunk(seed: int, facts: Sequence[Fact], invariant: str) -> tuple[Fact, ...]:
    """The same violation after fewer facts."""
    left, place = tuple(facts), 0
    while place < len(left):
        fewer = left[:place] + left[place + 1 :]
        if any(each.invariant == invariant for each in replayed(seed, fewer)):
            left, place = fewer, 0
        else:
            place += 1
    return left


def described(seed: int, facts: Sequence[Fact]) -> Iterator[str]:
    """A violation for people: what is wrong, the facts, and what the world is beside its defaults."""
    world, policy = draw(seed)
    wrong = [str(each) for each in replayed(seed, facts)]
    yield f"\nseed {seed}, {policy}: {'; '.join(wrong)}"
    yield from [f"    {fact!r}," for fact in facts]
    for each in (*world.config.backends, *world.extra):
        yield f"    {_set(each, Backend('', '', ()))}"
    yield f"    {_set(world.config, Config(()))}, begins {world.begins}"


def _set(record: Backend | Config, plain: Backend | Config) -> dict[str, object]:
    """The settings of a record that are not the defaults."""
    names = [each.name for each in fields(record) if each.name not in ("backends", "inherits")]
    return {name: value for name in names if (value := getattr(record, name)) != getattr(plain, name)}


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="drawn", description="Random walks through drawn worlds.")
    parser.add_argument("--minutes", type=float, default=2.0, help="how long")
    parser.add_argument("--seed", type=int, default=None, help="the first seed (default: another each time)")
    options = parser.parse_args(words)
    first = random.randrange(1 << 40) if options.seed is None else options.seed
    until, seed, violations = time.monotonic() + 60.0 * options.minutes, first, 0
    known = 0
    while time.monotonic() < until:
        facts, wrong = walk(seed)
        if [each.invariant for each in wrong] == [BY_GROUP]:
            known += 1
        elif wrong:
            violations += 1
            print("\n".join(described(seed, shrunk(seed, facts, wrong[0].invariant))), flush=True)
        seed += 1
    print(f"{seed - first} walks from seed {first}; {violations} with violations ({known} more: {BY_GROUP})")
    return int(violations > 0)


if __name__ == "__main__":
    sys.exit(main())
