"""A load of requests in which every answer is accounted for by its request's id, whatever fails meanwhile.

Bounded clients with kept and new connections ask whatever APIs there are, while one thread kills, freezes,
reloads, loads and unloads at moments drawn from a seed (counted in answers, not seconds), now and then kills
anvil-mux itself and starts it again on the same port, and lets what engines stand on go away, where there is
such a thing. ``accounting.py`` says which answers are flaws.

Afterwards the engines' own record, the access log, the counters of /metrics, /healthz and the event log have
to agree with what the clients saw.
"""

from __future__ import annotations

import http.client
import json
import os
import queue
import random
import signal
import socket
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from prometheus_client.parser import text_string_to_metric_families

from anvil_mux.lab.checker import check
from anvil_mux.scheduler.events import ADOPTED
from anvil_mux.telemetry import eventlog
from anvil_mux.telemetry.metrics import BROKEN
from tests.accounting import (
    FOREVER,
    KINDS,
    STATUSES,
    Ask,
    Entry,
    Fate,
    Got,
    Part,
    Verdict,
    Whole,
    flaw_of_record,
    judge,
    read_record,
)
from tests.measuring import Meter, Usage, usage_of
from tests.running import Running

CLIENTS = 96
QUEUE_TIMEOUT = 60.0
PATIENCE = 6 * QUEUE_TIMEOUT
"""Seconds after which what a client or a fault waits for is lost; far above what any may take."""
SETTLED = 60.0
"""Seconds after which what comes a moment behind the answers is there, or never comes."""
SLACK = 60.0
"""Seconds by which the threads of a busy machine may be late, for the checker of the event log."""
BACK_OFF = 0.25
"""How long a client waits that was refused."""
KEPT_SECONDS = 50.0
"""How long a client keeps a connection that idles: less than anvil-mux does, as clients should."""
SLOW_BYTES, SLOW_PAUSE = 2048, 0.01
"""How much a slow client reads at once, and how long it does something else then."""
AFTERMATH = 10.0
"""Seconds for which a request may still feel what was done to its engine before it came."""
PAUSE = 0.05
"""Between two looks at what tells nobody when it has come true."""
AT_REST = {"threads": 8, "descriptors": 24}
"""What anvil-mux may have more when its clients are gone than before they came: its engines run now."""
NO_MODEL = "(no model)"
SHOWN = 12
"""Flawed requests of which a failure shows the history."""


class Harm(NamedTuple):
    """What was done to the engines of a model, or of all; ``until`` is later than ``since`` if it lasted."""

    model: str | None
    since: float
    until: float

    def hurts(self, model: str, since: float, until: float) -> bool:
        """Whether a request for ``model`` from ``since`` to ``until`` may feel it."""
        return self.model in (model, None) and self.since <= until and since - AFTERMATH <= self.until


class Engines:
    """What runs, and how it is hurt."""

    def running(self) -> dict[Any, str]:
        """Something that each run has for its own -> model."""
        raise NotImplementedError

    def send(self, run: Any, number: signal.Signals) -> None:
        """Signals a run, if it is still there."""
        raise NotImplementedError

    def go_away(self, draw: random.Random, tell: Callable[[str], None]) -> None:
        """Lets what the engines stand on go away for a moment; says what was done."""
        raise NotImplementedError


def _counted_as(fate: Fate) -> str:
    """Return the code under which /metrics counts a request that was answered."""
    was_cut = fate.got.status == 200 and fate.verdict.kind in ("event", "cut")
    return BROKEN if was_cut else str(fate.got.status)


@dataclass
class Load:
    """``begin`` starts an anvil-mux on ``file`` with these flags and does not wait for it."""

    begin: Callable[..., Running]
    file: Path
    folder: Path
    """For logs."""
    engines: Engines
    asks: Sequence[Ask]
    whole: Whole
    part: Part
    draw: random.Random
    freezable: frozenset[str]
    """Models whose engines anvil-mux itself never freezes."""
    between: tuple[int, int] = (15, 60)
    """How many whole answers come from one fault to the next."""
    record: Path | None = None
    """Where the engines write."""
    crashes: int = 1
    """How often anvil-mux is killed."""
    outages: int = 0
    """How often what the engines stand on goes away."""
    every: float = 0.0
    """Seconds from one request to the next; with 0 clients ask as fast as they are answered."""
    fates: list[Fate] = field(default_factory=list)
    flaws: defaultdict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    """Id of a request, or nothing -> what is wrong."""
    told: list[tuple[float, str]] = field(default_factory=list)
    """What was done to the system, and when."""
    life: int = 1
    killed_at: dict[int, float] = field(default_factory=dict)
    """When each life of anvil-mux was killed."""
    swaps: int = 0
    faults: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._left: queue.SimpleQueue[Ask | None] = queue.SimpleQueue()
        self._progress = threading.Condition()
        self._begun = 0
        self._answered = 0
        self._over = False
        self._described = yaml.safe_load(self.file.read_text())
        self._removed: dict[str, Any] = {}
        self._missing: list[tuple[str, float, float]] = []  # model, since, until
        self._kills: list[Harm] = []
        self._freezes: list[Harm] = []
        self._outages: list[Harm] = []
        self._changes: list[tuple[float, Container[str]]] = []  # when, services
        self._reloads = 0
        self._adopted = 0
        self.entries: dict[str, list[Entry]] = {}
        self.meter = Meter(lambda: (self.life, self.running.process.pid))
        self.services: dict[str, str] = {
            name: (about.get("x-anvil") or {}).get("model", name)
            for name, about in self._described["services"].items()
        }

    def run(self) -> None:
        self.running = self._start("0")
        self.port = self.running.port
        try:
            self.running.wait_until_adopted()
            at_rest = usage_of(self.running.process.pid)
            clients = [
                threading.Thread(target=self._client, name=f"client-{number}") for number in range(CLIENTS)
            ]
            feeder = threading.Thread(target=self._feed, name="feeder")
            trouble = threading.Thread(target=self._trouble, name="trouble")
            self.meter.begin()
            for thread in (feeder, *clients, trouble):
                thread.start()
            for thread in (feeder, *clients):
                thread.join()
            self.meter.end()
            with self._progress:
                self._over = True
                self._progress.notify_all()
            trouble.join()
            self._settle()
            self._compare_rest(at_rest)
            self._compare_counters()
            self.swaps += self._swapped()
        finally:
            self._stop()
        if left := self.engines.running():
            self.flaws[""].append(f"engines that anvil-mux left behind when it had ended: {left}")
        self.flaws[""] += self.meter.flaws()
        for fate in self.fates:
            for flaw in self._flaws_of(fate):
                self.flaws[fate.ask.id].append(flaw)
        self._account_for_each()
        self._check_record()
        self._check_access_logs()
        self._check_events()

    # Lives of anvil-mux

    def _start(self, port: str) -> Running:
        life = self.life
        logs = ("--access-log", str(self._access_log(life)), "--log-format", "json")
        running = self.begin("--port", port, *logs, "--event-log", str(self._event_log(life)))
        try:
            running.wait_until_listening()
        except BaseException:
            running.stop(signal.SIGKILL)
            raise
        return running

    def _access_log(self, life: int) -> Path:
        return self.folder / f"access-{life}.jsonl"

    def _event_log(self, life: int) -> Path:
        return self.folder / f"events-{life}.jsonl"

    def _stop(self, how: signal.Signals = signal.SIGTERM) -> None:
        self.running.stop(how)
        (self.folder / f"output-{self.life}.txt").write_text("\n".join(self.running.output))
        (self.folder / "told.txt").write_text("".join(f"{at:.3f} {what}\n" for at, what in self.told))

    # Clients

    def _feed(self) -> None:
        """Hands the requests to the clients, at the pace that was asked for."""
        pause, since = threading.Event(), time.monotonic()
        for number, ask in enumerate(self.asks):
            pause.wait(max(0.0, since + number * self.every - time.monotonic()))
            self._left.put(ask)
        for _ in range(CLIENTS):
            self._left.put(None)

    def _client(self) -> None:
        kept = _connection(self.port)
        life, used = 0, 0.0
        while ask := self._left.get():
            with self._progress:
                self._begun += 1
            if ask.manner:
                other = _connection(self.port)
                self._ask(other, ask, self._connect(other, slow=ask.manner == "slow"))
                other.close()
                continue
            if kept.sock is None or life != self.life or time.monotonic() - used > KEPT_SECONDS:
                life = self._connect(kept)
            self._ask(kept, ask, life)
            used = time.monotonic()
        kept.close()

    def _ask(self, connection: http.client.HTTPConnection, ask: Ask, life: int) -> None:
        got = Got(life, time.monotonic())
        if life == self.life:
            self._exchange(connection, ask, got)
        else:  # it was killed at this moment
            connection.close()
        got.ended = time.monotonic()
        if not got.why and got.ended - got.began > PATIENCE:
            got.why = "lost"
        verdict = self._judge(ask, got)
        got.shorten()
        self._end(Fate(ask, got, verdict))

    def _end(self, fate: Fate) -> None:
        is_whole = fate.verdict.kind in ("whole", "left")
        with self._progress:
            self.fates.append(fate)
            self._answered += is_whole
            self._progress.notify_all()
        if not is_whole:  # else those that are refused at once use up all requests
            threading.Event().wait(BACK_OFF)

    def _judge(self, ask: Ask, got: Got) -> Verdict:
        try:
            return judge(ask, got, self.whole, self.part)
        except (AttributeError, KeyError, TypeError) as error:
            return Verdict("unreadable", flaw=repr(error))

    def _connect(self, connection: http.client.HTTPConnection, *, slow: bool = False) -> int:
        """Waits for somebody to listen; which life that is."""
        give_up = time.monotonic() + PATIENCE
        while True:
            connection.close()
            life = self.life
            with suppress(OSError):
                if slow:
                    connection.sock = _narrow(self.port)
                else:
                    connection.connect()
                if life == self.life:
                    return life
                continue
            assert time.monotonic() < give_up, "nobody listens"
            threading.Event().wait(PAUSE)

    def _exchange(self, connection: http.client.HTTPConnection, ask: Ask, got: Got) -> None:
        kind = KINDS[ask.kind]
        body = {"model": ask.model, "stream": kind.stream, **kind.body(ask)}
        if kind.path in ("/v1/chat/completions", "/v1/completions") and kind.stream:
            body["stream_options"] = {"include_usage": True}
        headers = {"Content-Type": "application/json", "X-Request-ID": ask.id}
        try:
            connection.request("POST", kind.path, json.dumps(body).encode(), headers)
            response = connection.getresponse()
            got.status = response.status
            if kind.stream and response.status == 200:
                slow = ask.manner == "slow"
                while piece := response.read1(SLOW_BYTES if slow else 65536):
                    if slow:
                        threading.Event().wait(SLOW_PAUSE)
                    got.body += piece
                    got.pieces.append((time.monotonic(), len(got.body)))
                    if ask.leaves and got.first() != FOREVER:
                        got.why = "left"
                        break
            else:
                got.body = response.read()
                got.pieces.append((time.monotonic(), len(got.body)))
            got.clean = not got.why
        except TimeoutError:
            got.why = "lost"
        except (OSError, http.client.HTTPException) as error:
            got.why = repr(error)
        if not got.clean:
            connection.close()

    # Faults

    def _trouble(self) -> None:
        """Hurts what there is, again and again, until the clients are done."""
        planned = self._planned()
        faults = {
            self._kill: 30,
            self._freeze: 20,
            self._change: 10,
            self._remove: 10,
            self._unload: 15,
            self._load: 15,
        }
        while True:
            mark = self._answered + self.draw.randint(*self.between)
            if not self._wait_for(mark, planned[0][0] if planned else len(self.asks)):
                break
            due = planned and len(self.fates) >= planned[0][0]
            if due:
                fault = planned.pop(0)[1]
            elif self._removed:
                fault = self._bring_back
            else:
                (fault,) = self.draw.choices([*faults], [*faults.values()])
            try:
                fault()
                self.faults[fault.__name__.strip("_")] += 1
            except Exception as error:
                self.flaws[""].append(f"{fault.__name__}: {error!r}")
                self._tell(f"{fault.__name__} failed: {error!r}")
                if fault == self._crash:
                    raise
        if planned:
            self.flaws[""].append(f"too few requests for {len(planned)} planned faults")
        self._bring_back()

    def _planned(self) -> list[tuple[int, Callable[[], None]]]:
        """After how many answers anvil-mux is killed, and after how many its engines' ground goes away.

        Nothing of that comes in the last two fifths, so that the last life is long enough to be measured.
        """
        planned: list[tuple[int, Callable[[], None]]] = []
        for fault, count in ((self._crash, self.crashes), (self._go_away, self.outages)):
            for number in range(count):
                share = self.draw.uniform(number, number + 1) / count
                planned.append((int(len(self.asks) * (0.1 + 0.5 * share)), fault))
        return sorted(planned, key=lambda each: each[0])

    def _wait_for(self, whole: int, all: int) -> bool:
        """Until there were so many whole answers, or answers at all; False when no more will come."""
        with self._progress:
            self._progress.wait_for(lambda: self._over or self._answered >= whole or len(self.fates) >= all)
            return not self._over

    def _tell(self, what: str) -> None:
        self.told.append((time.monotonic(), what))

    def _some_run(self, of: Container[str]) -> tuple[Any, str] | None:
        runs = sorted((each for each in self.engines.running().items() if each[1] in of), key=str)
        return self.draw.choice(runs) if runs else None

    def _kill(self) -> None:
        if found := self._some_run(set(self.services.values())):
            self._kills.append(Harm(found[1], time.monotonic(), time.monotonic()))
            self._tell(f"SIGKILL {found[1]} ({found[0]})")
            self.engines.send(found[0], signal.SIGKILL)

    def _freeze(self) -> None:
        if found := self._some_run(self.freezable):
            seconds = self.draw.choice((0.1, 0.3, 1.0, 2.0, 4.0))
            self._tell(f"SIGSTOP {found[1]} ({found[0]}) for {seconds:g} s")
            with self._harm(self._freezes, found[1]):
                self.engines.send(found[0], signal.SIGSTOP)
                threading.Event().wait(seconds)
                self.engines.send(found[0], signal.SIGCONT)
            self._tell(f"SIGCONT {found[1]} ({found[0]})")

    @contextmanager
    def _harm(self, kind: list[Harm], model: str | None) -> Iterator[None]:
        """Something that lasts as long as the block."""
        harm = Harm(model, time.monotonic(), FOREVER)
        kind.append(harm)
        try:
            yield
        finally:
            kind[-1] = harm._replace(until=time.monotonic())

    def _load(self) -> None:
        self._by_hand("load")

    def _unload(self) -> None:
        self._by_hand("unload")

    def _by_hand(self, what: str) -> None:
        model = self.draw.choice(sorted(set(self.services.values())))
        status, _, text = self.running.request("POST", f"/models/{what}", {"model": model}, PATIENCE)
        self._tell(f"{what} {model}: {status} {text[:120]}")
        answer = json.loads(text)
        if status != 200 and answer["error"]["code"] not in STATUSES:
            raise AssertionError(f"{status} {text}")

    def _change(self) -> None:
        """A service with another command, by which anvil-mux replaces its engine."""
        services = self._described["services"]
        name = self.draw.choice(sorted(services))
        services[name].setdefault("environment", {})["GENERATION"] = str(self._reloads)
        self._reload(f"{name} changed", {name})

    def _remove(self) -> None:
        """A service goes; the next fault is that it is back."""
        services = self._described["services"]
        name = self.draw.choice(sorted(services))
        self._removed[name] = services.pop(name)
        model = self.services[name]
        if model not in {self.services[each] for each in services}:
            self._missing.append((model, time.monotonic(), FOREVER))
        self._reload(f"{name} removed", {name})

    def _bring_back(self) -> None:
        if self._removed:
            back = {*self._removed}
            self._described["services"] |= self._removed
            self._removed.clear()
            self._reload("all back", back)
            self._missing = [
                (name, since, min(until, time.monotonic())) for name, since, until in self._missing
            ]

    def _reload(self, what: str, services: Container[str]) -> None:
        fresh = self.file.with_suffix(".new")
        fresh.write_text(yaml.safe_dump(self._described, sort_keys=False))
        os.replace(fresh, self.file)
        before = self.running.get("/healthz")["reload"]["count"]
        self._reloads += 1
        self._changes.append((time.monotonic(), services))
        self._tell(f"SIGHUP, {what}")
        self.running.process.send_signal(signal.SIGHUP)
        eventually(lambda: self.running.get("/healthz")["reload"]["count"] > before)
        self._tell(f"in effect: {what}")

    def _crash(self) -> None:
        """kill -9 of anvil-mux, once what was answered before is known to be counted and logged."""
        answered = [fate for fate in self.fates if fate.got.life == self.life]
        self._compare_before_crash(answered)
        self.swaps += self._swapped()
        self._tell("SIGKILL anvil-mux")
        self._stop(signal.SIGKILL)
        before = self.engines.running()
        self.killed_at[self.life] = time.monotonic()
        self.life += 1  # before anybody can be connected to it
        self.running = self._start(str(self.port))
        self._tell(f"anvil-mux listens again; there ran {sorted(before.values())}")

    def _go_away(self) -> None:
        """What the engines stand on goes, and is back; until anvil-mux knows that it is."""
        with self._harm(self._outages, None):
            self.engines.go_away(self.draw, self._tell)
            eventually(lambda: not self.running.get("/healthz")["problems"].get("compose"))
        self._tell("anvil-mux knows that it is back")

    def _settle(self) -> None:
        """Nothing is left over: no lease, no queue, nobody stuck."""

        def left() -> list[str]:
            health = self.running.get("/healthz")
            found = [f"{key}: {health[key]}" for key in ("waiting", "leases") if health[key]]
            for name, about in health["models"].items():
                found += [f"{name} {key}: {about[key]}" for key in ("waiting", "leases") if about[key]]
                found += [f"{name} is stuck"] if about["state"] == "stuck" else []
            return found

        with suppress(AssertionError):
            eventually(lambda: not left(), SETTLED)
        self.flaws[""] += left()

    def _compare_rest(self, before: Usage) -> None:
        """Without clients anvil-mux has little more than before the first one came."""

        def left() -> list[str]:
            now = usage_of(self.running.process.pid)
            return [
                f"{getattr(now, name):.0f} {name} at rest, {getattr(before, name):.0f} before its clients"
                for name, more in AT_REST.items()
                if getattr(now, name) > getattr(before, name) + more
            ]

        with suppress(AssertionError):
            eventually(lambda: not left(), SETTLED)
        self.flaws[""] += left()

    # Accounts

    def _flaws_of(self, fate: Fate) -> Iterator[str]:
        ask, got, verdict = fate.ask, fate.got, fate.verdict
        if verdict.flaw:
            yield f"{verdict.name}: {verdict.flaw}"
        if verdict.kind == "broken" and not self._was_killed(got):
            yield f"no answer, and anvil-mux was not killed: {got.why}"
        if verdict.kind == "cut" and not KINDS[ask.kind].stream and not self._was_killed(got):
            yield f"an answer that is no stream is cut, and anvil-mux was not killed: {got.why}"
        if got.status == 404 and not any(
            model == ask.model and since <= got.ended and got.began <= until
            for model, since, until in self._missing
        ):
            yield "its model was there all the while"
        harm = (self._kills, self._freezes, self._outages)
        if verdict.code == "backend_unavailable" and not self._was_hurt(fate, *harm):
            yield "no engine of its model was hurt"

    def _was_killed(self, got: Got) -> bool:
        """The anvil-mux that was asked was killed after that."""
        return got.life < self.life and got.began < self.killed_at[got.life]

    def _was_hurt(self, fate: Fate, *kinds: list[Harm]) -> bool:
        """Harm of one of these kinds was done to its model, meanwhile or the moment before."""
        model, since, until = fate.ask.model, fate.got.began, fate.got.ended
        return any(harm.hurts(model, since, until) for kind in kinds for harm in kind)

    def _account_for_each(self) -> None:
        ended = Counter(fate.ask.id for fate in self.fates)
        for ask in self.asks:
            if ended[ask.id] != 1:
                self.flaws[ask.id].append(f"it ended {ended[ask.id]} times")

    def _replicas(self, model: str) -> int:
        return [*self.services.values()].count(model)

    def _check_record(self) -> None:
        if self.record is None:
            return
        self.entries = read_record(self.record)
        for fate in self.fates:
            entries = self.entries.get(fate.ask.id, [])
            if self._was_hurt(fate, self._freezes):  # what an engine had not read yet, it reads when it thaws
                entries = [each for each in entries if each.at <= fate.got.ended]
            if flaw := flaw_of_record(fate, entries, self._replicas(fate.ask.model)):
                self.flaws[fate.ask.id].append(flaw)
        for id in self.entries.keys() - {ask.id for ask in self.asks}:
            self.flaws[id].append("an engine was asked what nobody had asked")

    def _check_access_logs(self) -> None:
        """Each request has one line, which says what its client saw."""
        self.lines: dict[int, dict[str, list[dict[str, Any]]]] = {}
        for life in range(1, self.life + 1):
            by_id = self.lines[life] = _lines(self._access_log(life))
            fates = {fate.ask.id: fate for fate in self.fates if fate.got.life == life}
            for id, fate in fates.items():
                lines = by_id.get(id, [])
                unsure = self._was_killed(fate.got) and (not lines or fate.verdict.kind == "cut")
                if not unsure and (flaw := _flaw_of_line(fate, lines)):
                    self.flaws[id].append(flaw)
            for id in by_id.keys() - fates.keys():
                if id.startswith("load-"):
                    self.flaws[id].append(f"life {life} logs a request that it was not asked")

    def _code(self, fate: Fate) -> str:
        """Ollama's errors do not say their code; the access log does."""
        if fate.verdict.code:
            return fate.verdict.code
        lines = self.lines[fate.got.life].get(fate.ask.id, [])
        return str(lines[0]["code"]) if lines else ""

    def _tally(self, fates: Iterable[Fate]) -> Counter[tuple[str, str, str]]:
        """As anvil_requests_total has them: model, route, code.

        Those of a model that there is not have its name or none: it may have gone while they were queued. Of
        those whose clients left nobody knows the status.
        """
        kept = [fate for fate in fates if fate.verdict.kind != "left"]
        had = [(fate.ask.model, KINDS[fate.ask.kind].path, _counted_as(fate)) for fate in kept]
        return Counter((NO_MODEL if code == "404" else model, path, code) for model, path, code in had)

    def _counted(self) -> Counter[tuple[str, str, str]]:
        found: Counter[tuple[str, str, str]] = Counter()
        routes = {kind.path for kind in KINDS.values()}
        for family in text_string_to_metric_families(self.running.request("GET", "/metrics")[2]):
            for each in family.samples:
                if each.name == "anvil_requests_total" and each.labels["route"] in routes:
                    model, route, code = (each.labels[key] for key in ("model", "route", "code"))
                    found[NO_MODEL if code == "404" else model, route, code] += int(each.value)
        return found

    def _swapped(self) -> int:
        """How many swaps this life counts."""
        families = text_string_to_metric_families(self.running.request("GET", "/metrics")[2])
        found = [each for family in families for each in family.samples]
        return int(sum(each.value for each in found if each.name == "anvil_swaps_total"))

    def _compare_before_crash(self, answered: Sequence[Fate]) -> None:
        """All that was answered is counted and logged before long, and not more than was begun."""
        least = self._tally(answered)
        ids = {fate.ask.id for fate in answered if fate.verdict.kind != "left"}

        def missing() -> set[str]:
            return ids - _lines(self._access_log(self.life)).keys()

        with suppress(AssertionError):
            eventually(lambda: not least - self._counted() and not missing(), SETTLED)
        if found := missing():
            self.flaws[""].append(f"answered and not in the access log: {sorted(found)[:SHOWN]}")
        counted = self._counted()
        if uncounted := least - counted:
            self.flaws[""].append(f"answered and not counted: {uncounted}")
        with self._progress:
            begun = self._begun
        if counted.total() > begun:
            self.flaws[""].append(f"{counted.total()} requests are counted, and only {begun} had begun")

    def _compare_counters(self) -> None:
        """The last life counts what its clients had, no more and no less."""
        here = [fate for fate in self.fates if fate.got.life == self.life and fate.got.status]
        had = self._tally(here)
        left = Counter((f.ask.model, KINDS[f.ask.kind].path) for f in here if f.verdict.kind == "left")

        def difference() -> str:
            counted = self._counted()
            more: Counter[tuple[str, str]] = Counter()
            for (model, path, code), count in (counted - had).items():
                more[model, path if code in ("200", "499", BROKEN) else f"{path} {code}"] += count
            return f"{had - counted}, {more - left}, {left - more}" if had - counted or more != left else ""

        with suppress(AssertionError):
            eventually(lambda: not difference(), SETTLED)
        if found := difference():
            self.flaws[""].append(f"had and not counted, counted and not had, left and not counted: {found}")

    def _check_events(self) -> None:
        """The event logs break no invariant, as far as one configuration holds."""
        self.checked = 0
        for life in range(1, self.life + 1):
            for run in eventlog.read(self._event_log(life), warn=lambda text: None):
                self.checked += len(run.events)
                self._adopted += sum(event.cause == ADOPTED for event in run.events if life > 1)
                for problem in check(run.events, eventlog.config_of(run.header), SLACK, run.begins):
                    if self._is_of_a_change(problem):
                        continue
                    self.flaws[""].append(f"broken invariant in life {life}: {problem}")

    def _is_of_a_change(self, problem: str) -> bool:
        """A service that a reload changed is loaded at once; the events do not say that it was changed."""
        at, _, what = problem.partition(" ")
        service = what.removeprefix("loading ").removesuffix(": before its cool-down ended")
        return what == f"loading {service}: before its cool-down ended" and any(
            0 <= float(at) - when <= SLACK and service in services for when, services in self._changes
        )

    # What is told

    def count_whole(self) -> int:
        """How many answers were whole so far, or left by their clients."""
        kinds = Counter(fate.verdict.kind for fate in list(self.fates))
        return kinds["whole"] + kinds["left"]

    def progress(self) -> str:
        """One line, at any moment."""
        whole = self.count_whole()
        usage = self.meter.samples[self.life][-1:]
        now = "".join(
            f", {each.rss:.0f} MiB, {each.threads:.0f} threads, {each.descriptors:.0f} fds" for each in usage
        )
        done = f"{len(self.fates)} of {len(self.asks)} answered, {whole} of them whole"
        return f"{done}; {sum(self.faults.values())} faults, life {self.life}{now}"

    def table(self) -> str:
        classes = Counter(self._class(fate) for fate in self.fates)
        rows = [f"{name:32} {count:7}" for name, count in sorted(classes.items(), key=lambda each: -each[1])]
        more = [
            f"{len(self.fates)} requests, of which {sum(map(bool, self.flaws.values()))} have flaws",
            f"faults: {', '.join(f'{name} {count}' for name, count in sorted(self.faults.items()))}",
            f"{self.swaps} swaps; {self.checked} events checked; {self._adopted} engines taken over",
            *(f"away and back after {until - since:.1f} s" for _, since, until in self._outages),
            *self.meter.table(),
        ]
        if self.record is not None:
            again = sum(self._times(fate, "received") > 1 for fate in self.fates)
            failed = [fate for fate in self.fates if fate.verdict.kind not in ("whole", "left")]
            finished = sum(self._times(fate, "answered") > 0 for fate in failed)
            more.append(f"asked of a second engine: {again}; answered, but not to the client: {finished}")
        return "\n".join([*rows, *more])

    def by_client(self) -> str:
        """What became of the requests of each kind of client: of route, of connection, of reader."""
        rows: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for fate in self.fates:
            manner = {"": "kept connection", "new": "new connection", "slow": "slow reader"}[fate.ask.manner]
            for name in (fate.ask.kind, manner, *(["leaves early"] if fate.ask.leaves else [])):
                rows[name][self._outcome(fate)] += 1
        outcomes = sorted({each for row in rows.values() for each in row})
        lines = [f"{'':24}" + "".join(f"{each:>10}" for each in outcomes)]
        for name, row in sorted(rows.items()):
            lines.append(f"{name:24}" + "".join(f"{row[each]:10}" for each in outcomes))
        return "\n".join(lines)

    def _outcome(self, fate: Fate) -> str:
        kind = fate.verdict.kind
        if kind in ("broken", "cut") and self._was_killed(fate.got):
            return "killed"
        return "refused" if kind.isdecimal() else kind

    def _times(self, fate: Fate, what: str) -> int:
        return sum(each.what == what for each in self.entries.get(fate.ask.id, ()))

    def _class(self, fate: Fate) -> str:
        kind = fate.verdict.kind
        if kind in ("broken", "cut") and self._was_killed(fate.got):
            return "broken by the kill -9"
        if kind in ("whole", "broken", "cut", "left", "lost"):
            return kind
        return f"{kind} {self._code(fate) or '(its log line was lost with anvil-mux)'}"

    def report(self) -> str:
        """The flaws, and the history of some of the requests concerned."""
        fates = {fate.ask.id: fate for fate in self.fates}
        text = [f"{id or '(the whole)'}: {flaw}" for id, flaws in self.flaws.items() for flaw in flaws][:100]
        for id in [id for id in self.flaws if id in fates][:SHOWN]:
            text += ["", *self._history(fates[id])]
        return "\n".join(text)

    def _history(self, fate: Fate) -> list[str]:
        got = fate.got
        seen = [(got.began, f"asked of life {got.life}: {fate.ask}")]
        if got.pieces:
            seen.append((got.pieces[0][0], "the client has the first bytes"))
        seen.append((got.ended, f"{fate.verdict.name}: {got.status} clean={got.clean} {got.why}"))
        if self.record is not None:
            entries = self.entries.get(fate.ask.id, [])
            seen += [(each.at, f"engine {each.process} of {each.model}: {each.what}") for each in entries]
        seen += [each for each in self.told if got.began - 5.0 <= each[0] <= got.ended + 1.0]
        lines = [f"{at - got.began:9.3f} {text}" for at, text in sorted(seen)]
        logged = self.lines[got.life].get(fate.ask.id, [])
        return [
            f"{fate.ask.id}:",
            *lines,
            f"  body {got.body[:300]!r} ... {got.body[300:][-300:]!r}",
            f"  log {logged}",
        ]


def _connection(port: int) -> http.client.HTTPConnection:
    return http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)


def _narrow(port: int) -> socket.socket:
    """A connection that takes little at a time, so that whoever sends has to wait for its reader."""
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SLOW_BYTES)
    made.settimeout(PATIENCE)
    try:
        made.connect(("127.0.0.1", port))
    except BaseException:
        made.close()
        raise
    return made


def _lines(file: Path) -> dict[str, list[dict[str, Any]]]:
    """The lines of an access log by id; a life that was killed may leave half a line."""
    found: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for line in file.read_text().splitlines():
        with suppress(ValueError):
            entry = json.loads(line)
            found[entry["request_id"]].append(entry)
    return found


def _flaw_of_line(fate: Fate, lines: Sequence[Mapping[str, Any]]) -> str:
    if len(lines) != 1:
        return f"{len(lines)} lines in the access log"
    line, kind = lines[0], fate.verdict.kind
    if kind == "left":
        return "" if line["status"] in (200, 499) else f"its client left, and the access log says {line}"
    if fate.got.status and line["status"] != fate.got.status:
        return f"the access log says {line['status']}"
    if fate.verdict.code and line["code"] != fate.verdict.code:
        return f"the access log says {line['code']}"
    if kind == "whole" and line["code"]:
        return f"it is whole, and the access log says {line['code']}"
    if kind not in ("whole", "broken", "lost") and not line["code"]:
        return "it failed, and the access log says nothing of that"
    return ""


def eventually(holds: Callable[[], object], patience: float = PATIENCE) -> None:
    """Asks again and again, until ``holds()``."""
    pause, give_up = threading.Event(), time.monotonic() + patience
    while not holds():
        assert time.monotonic() < give_up, "it never came true"
        pause.wait(PAUSE)
