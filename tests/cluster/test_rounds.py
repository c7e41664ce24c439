"""Random faults in a cluster under load: no answer is lost, cut in silence, mixed up or doubled.

Clients ask all the time. In each round one part of the cluster fails, and the round is over when every model
answers again. Which answers may fail, and how, is the table of docs/cluster.md: those whose model a host had
that was cut off or hung, and all that an anvil-mux had which was killed.
"""

from __future__ import annotations

import os
import random
import re
import threading
import time
from collections import Counter
from typing import NamedTuple

import pytest

from tests.cluster import rig
from tests.cluster.site import Site, Stream

pytestmark = [pytest.mark.cluster, pytest.mark.skipif(bool(rig.why_not()), reason=rig.why_not())]

ROUNDS = int(os.environ.get("ANVIL_CLUSTER_ROUNDS", "2"))
SEED = int(os.environ.get("ANVIL_CLUSTER_SEED", "1"))
CLIENTS = 6
MODELS = ("a", "b", "roam")
TOLD = {"host_unavailable", "severed", "backend_unavailable", "engine_crashed"}
"""The codes with which an answer may fail whose host was lost."""
GRACE_SECONDS = 1.0
"""A fault counts for answers that ended so shortly before it was noted."""


class Fault(NamedTuple):
    """A part that failed, and the time until every model answered again."""

    what: str
    models: tuple[str, ...]
    """Those whose answers may fail."""
    since: float
    until: float

    def excuses(self, answer: Stream) -> bool:
        """Whether an answer may have failed because of it."""
        overlaps = answer.since <= self.until and answer.until >= self.since - GRACE_SECONDS
        return overlaps and answer.model in self.models


class Load:
    """Clients that ask until they are told to end, each one thing after another."""

    def __init__(self, site: Site, seed: int) -> None:
        self._site = site
        self._over = threading.Event()
        self._lock = threading.Lock()
        self.answers: list[Stream] = []
        self._threads = [
            threading.Thread(target=self._ask, args=(random.Random(seed * 1000 + number),), daemon=True)
            for number in range(CLIENTS)
        ]
        for each in self._threads:
            each.start()

    def _ask(self, rng: random.Random) -> None:
        while not self._over.is_set():
            answer = Stream(self._site, rng.choice(MODELS), rng.choice((3, 20, 60))).ended()
            with self._lock:
                self.answers.append(answer)
            if answer.error:
                self._over.wait(0.2)  # as a client that comes again

    def end(self) -> list[Stream]:
        self._over.set()
        for each in self._threads:
            each.join(120)
        assert not any(each.is_alive() for each in self._threads), "a client still waits for an answer"
        return self.answers


def flaw(answer: Stream, faults: list[Fault]) -> str:
    """What is wrong with an answer that may not be; "" if nothing is."""
    if answer.tokens != answer.wanted[: len(answer.tokens)]:
        return f"tokens of another answer, missing or doubled: {answer.tokens}"
    if answer.is_whole:
        return "" if answer.tokens == answer.wanted else f"it ends after {len(answer.tokens)} tokens"
    excuses = [fault for fault in faults if fault.excuses(answer)]
    if any(each.what == "anvil-mux" for each in excuses):
        return ""
    if not answer.error:
        return "it ended in silence"
    if not excuses:
        return f"nothing explains: {answer.error[:300]}"
    code = re.search(r'"code": ?"(\w+)"', answer.error)
    return "" if code and code[1] in TOLD else f"not as documented: {answer.error[:300]}"


class Faults:
    """The parts that fail, by name."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.by_name = {
            "agent": lambda host: host.kill_agent(),
            "raylet": lambda host: host.kill_raylet(),
            "power": self._cut,
            "hang": self._hang,
            "head": lambda host: site.head.kill_gcs(),
            "driver": lambda host: site.head.kill_driver(),
            "anvil-mux": lambda host: self._kill_mux(),
        }

    def _cut(self, host: rig.Host) -> None:
        host.power_cut()
        self.site.becomes(host.name, "lost")
        host.start()

    def _hang(self, host: rig.Host) -> None:
        host.freeze()
        self.site.becomes(host.name, "lost")
        host.thaw()

    def _kill_mux(self) -> None:
        self.site.mux.process.kill()
        self.site.mux.process.wait(30)
        self.site.mux = self.site.begin()

    def happen(self, what: str, host: rig.Host) -> Fault:
        """Let a part fail, and return once everything answers again."""
        since = time.monotonic()
        self.by_name[what](host)
        self.site.cluster.wait()
        for name in ("gpu-a", "gpu-b"):
            self.site.becomes(name, "here")
        for model in MODELS:
            assert self.site.answers(model), (what, model, self.site.mux.output[-20:])
        own = {"gpu-a": ("a", "roam"), "gpu-b": ("b", "roam")}
        models = {"power": own[host.name], "hang": own[host.name], "anvil-mux": MODELS}.get(what, ())
        return Fault(what, models, since, time.monotonic())


@pytest.fixture(scope="module")
def cluster():
    with rig.Cluster() as made:
        for name in ("head", "gpu-a", "gpu-b"):
            made.add(name)
        made.wait()
        yield made


def test_no_answer_is_lost_or_doubled_whatever_fails(cluster, tmp_path):
    site = Site(cluster, tmp_path)
    site.mux = site.begin()
    try:
        for name in ("gpu-a", "gpu-b"):
            site.becomes(name, "here")
        for model in MODELS:  # a host where nothing serves is lost as soon as its agent is silent
            assert site.answers(model), model
        faults, rng = Faults(site), random.Random(SEED)
        happened, counts = [], Counter()
        for number in range(ROUNDS):
            load = Load(site, SEED * 1000 + number)
            what, host = rng.choice(list(faults.by_name)), rng.choice((site.a, site.b))
            threading.Event().wait(rng.uniform(0.2, 3.0))
            print(f"round {number + 1}: {what} ({host.name})", flush=True)
            happened.append(faults.happen(what, host))
            answers = load.end()
            flaws = [(each.model, text) for each in answers if (text := flaw(each, happened))]
            counts.update(
                whole=sum(each.is_whole for each in answers), told=sum(bool(a.error) for a in answers)
            )
            took = happened[-1].until - happened[-1].since
            print(f"    over after {took:.0f} s, {len(answers)} answers, flaws: {flaws}", flush=True)
            assert not flaws, "\n".join(site.mux.output[-60:])
        print(f"{ROUNDS} rounds: {counts['whole']} whole answers, {counts['told']} that said why not")
        assert counts["whole"] > ROUNDS
    finally:
        told = [line for line in site.mux.output if " GET /hosts " not in line]
        print("\n".join(told[-300:]))  # for whoever reads why it failed
        site.end()
