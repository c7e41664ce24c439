"""The real multiplexer, swapper, control and checkpointer in virtual time, on engines that may do anything.

``World`` runs them on a baton clock. Only what lies outside of the program is made up: engines (those of
sleepy_engine.py, without sockets), the CUDA driver, NVML, and the hands that stop and freeze. An engine that
finds no memory fails as real ones do, and whatever no engine survives or no client should ever see is noted
in ``wrongs``: a request that reaches a sleeper, weights that were not read again, memory that is not there.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from math import inf
from types import SimpleNamespace
from typing import Any, cast

import pytest
import requests

from anvil_mux.config.config import Backend, Config
from anvil_mux.errors import BackendError, ClientGone, MuxError
from anvil_mux.host import engines
from anvil_mux.host.cuda_checkpoint import Checkpointer
from anvil_mux.host.engine_client import EngineClient
from anvil_mux.host.levels import Swapper
from anvil_mux.lab.checker import check
from anvil_mux.multiplexer.multiplexer import Lease, Multiplexer
from anvil_mux.scheduler.events import Event
from tests.baton import BatonClock
from tests.host.test_cuda_checkpoint import Driven
from tests.sleepy_engine import CONTEXT, GIB, House, Ledger, SleepyEngine

LONG = 10_000.0
"""Later than whatever the program itself waits for."""
TOTAL = 24 * GIB


class OutOfMemory(Exception):
    pass


class Hanging(Exception):
    """No answer will come."""


class VirtualEngine(SleepyEngine):
    """An engine that takes virtual time for what it does; made while its GPUs have room, or it ends."""

    def __init__(self, house: VirtualHouse, backend: Backend, pid: int, faults: set[str]) -> None:
        self._house, self._backend = house, backend
        self._context = 0 if "freeze" in backend.evict_to else CONTEXT
        """Who is only frozen computes on the CPU."""
        self._part = ((backend.vram or 18 * GIB + CONTEXT) - CONTEXT) // 2 if self._context else 0
        self.ready_at = house.clock.now() + house.load_seconds.get(backend.name, 6.0)
        self.unreachable = False
        self.helpers: list[int] = []
        model = backend.served_model or backend.model
        super().__init__(backend.engine, model, house.ledger, pid, backend.gpus, faults)

    def open(self) -> str:
        return f"http://127.0.0.1:{next(self._house.ports)}"

    def close(self) -> None:
        for pid in self.helpers:
            self._ledger.hold(pid, self.gpus, 0)

    def hang(self) -> None:
        raise Hanging

    def die(self) -> None:
        self.end("exited with code 1")
        raise requests.ConnectionError("closed")

    def answer(self, method: str, target: str, body: dict[str, Any]) -> tuple[int, object]:
        if self._house.clock.now() < self.ready_at:
            return 503, {}
        try:
            return super().answer(method, target, body)
        except OutOfMemory:
            return 500, {"error": "CUDA out of memory"}

    def works(self) -> bool:
        """Whether a request that comes now is answered, and by the right weights."""
        name = self._backend.name
        standby = self._house.driver.states.get(self.pid) in ("locked", "checkpointed")
        asleep = self.asleep and self.kind not in ("ollama", "llamacpp")  # those load by themselves
        return not (asleep or self.garbage or standby or name in self._house.frozen)

    def _work(self, seconds: float) -> None:
        self._house.clock.sleep(seconds)
        if self.how:
            raise requests.ConnectionError("closed")

    def _give(self, parts: set[str]) -> None:
        if self.busy:
            self._house.wrongs.append(f"{self._backend.name} was put to sleep under a request")
        self._work(self._house.sleep_seconds)
        super()._give(parts)

    def _take(self, still_asleep: set[str]) -> None:
        self._work(self._house.wake_seconds)
        before = self.asleep
        try:
            super()._take(still_asleep)
        except OutOfMemory:
            self.asleep = before
            raise

    def _account(self) -> None:
        wanted = self._context + self._part * len({"weights", "kv_cache"} - self.asleep)
        for gpu in self.gpus:
            others = self._ledger.used(gpu) - self._ledger.used_by(self.pid, gpu)
            if others + wanted > TOTAL:
                self._house.out_of_memory(self._backend.name, gpu)
                raise OutOfMemory
        self._ledger.hold(self.pid, self.gpus, wanted)


class VirtualHouse(House):
    """Where they run."""

    def __init__(self, clock: BatonClock, gpus: Iterable[str]) -> None:
        super().__init__(Ledger(TOTAL, tuple(gpus)))
        self.clock = clock
        self.driver = VirtualDriver(self)
        self.ports = count(10_000)
        self.load_seconds: dict[str, float] = {}
        self.sleep_seconds = self.wake_seconds = 0.5
        self.stop_seconds = 1.0
        self.runs: list[VirtualEngine] = []
        self.wrongs: list[str] = []
        self.others: set[int] = set()
        self.docker_away = False

    def out_of_memory(self, name: str, gpu: str) -> None:
        stuck = any("refuses to be killed" in run.faults or "worker" in str(run.faults) for run in self.runs)
        if not self.others and not stuck:
            self.wrongs.append(f"{self.clock.now():.3f} {name} found no memory on GPU {gpu}")

    def start(self, backend: Backend) -> str:
        self._reach()
        self.calls.append(f"start {backend.name}")
        engine = self.engines.get(backend.name)
        if engine is None or engine.how is not None:
            engine = self._run(backend)
        self.frozen.discard(backend.name)
        return engine.url

    def _run(self, backend: Backend) -> SleepyEngine:
        pid, faults = next(self._pids), self.faults.pop(backend.name, set())
        try:
            engine = VirtualEngine(self, backend, pid, faults)
        except OutOfMemory:
            raise BackendError(f"service {backend.name} exited with code 1: CUDA out of memory") from None
        self.runs.append(engine)
        self.engines[backend.name] = engine
        return engine

    def _end(self, backend: Backend, how: str, refuses: str, survives: str) -> None:
        self._reach()
        self.clock.sleep(self.stop_seconds)
        super()._end(backend, how, refuses, survives)
        self.frozen.discard(backend.name)

    def pids(self, backend: Backend) -> list[int]:
        engine = self.engines.get(backend.name)
        return [] if engine is None else [engine.pid, *cast(VirtualEngine, engine).helpers]

    def pause(self, backend: Backend) -> None:
        self._reach()
        self._must_run(backend)
        super().pause(backend)

    def resume(self, backend: Backend) -> None:
        self._reach()
        self._must_run(backend)
        super().resume(backend)

    def _must_run(self, backend: Backend) -> None:
        if how := self.ended(backend):
            raise BackendError(f"service {backend.name} {how}")

    def _reach(self) -> None:
        if self.docker_away:
            raise BackendError("Cannot connect to the Docker daemon")

    def at(self, url: str) -> VirtualEngine | None:
        """Whoever listens there."""
        return next((run for run in self.runs if run.url == url and run.how is None), None)

    def ask(
        self,
        client: EngineClient,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        timeout: float = 5.0,
    ) -> tuple[int, bytes]:
        """In place of ``EngineClient.ask``."""
        engine = self.at(client.url)
        if engine is None or engine.unreachable:
            raise requests.ConnectionError("Connection refused")
        try:
            if engine._backend.name in self.frozen:
                raise Hanging
            status, answer = engine.answer(method, path, body or {})
        except Hanging:
            self.clock.sleep(max(min(timeout, client.deadline - self.clock.now()), 0.01))
            raise requests.Timeout(path) from None
        return status, json.dumps(answer).encode()


class VirtualDriver(Driven):
    """The CUDA driver of a house; every engine is a process that uses it."""

    def __init__(self, house: VirtualHouse) -> None:
        super().__init__()
        self.states = {}
        self._house = house
        self._moved: dict[int, dict[str, int]] = {}

    def __enter__(self) -> Driven:
        for run in self._house.runs:
            for pid in (run.pid, *run.helpers):
                if run.how is None:
                    self.states.setdefault(pid, "running")
                else:
                    self.states.pop(pid, None)
        return super().__enter__()

    def act(self, action: str, pid: int) -> None:
        run = next(run for run in self._house.runs if pid in (run.pid, *run.helpers))
        if run._backend.name in self._house.frozen:
            self._house.wrongs.append(f"{action} of {run._backend.name}, which is frozen")
        self._house.clock.sleep(0.1)
        if run.how:
            raise BackendError(f"{action} of process {pid}: it is gone")
        super().act(action, pid)
        ledger = self._house.ledger
        if action == "checkpoint":
            self._moved[pid] = {gpu: ledger.used_by(pid, gpu) for gpu in run.gpus}
            ledger.hold(pid, run.gpus, 0)
        elif action == "restore":
            for gpu in run.gpus:
                if ledger.used(gpu) + self._moved[pid][gpu] > TOTAL:
                    self.states[pid] = "checkpointed"
                    self._house.out_of_memory(run._backend.name, gpu)
                    raise BackendError(f"restore of process {pid}: out of memory")
            ledger.hold(pid, run.gpus, max(self._moved[pid].values()))


@dataclass
class Result:
    """What became of a request."""

    at: float
    model: str
    leased: float | None = None
    over: float | None = None
    error: Exception | None = None
    broke_off: str = ""
    """Why an answer that had begun did not end."""

    @property
    def served(self) -> bool:
        return self.leased is not None and self.error is None and not self.broke_off

    @property
    def waited(self) -> float:
        assert self.leased is not None
        return self.leased - self.at


class World:
    """A running anvil-mux, its engines and its clients; ``play`` runs ``main`` among them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, config: Config, seed: int = 0) -> None:
        self.config = config
        self.clock = BatonClock(seed)
        self.random = random.Random(seed)
        self.house = VirtualHouse(self.clock, sorted({gpu for b in config.backends for gpu in b.gpus}))
        self.backends = {backend.name: backend for backend in config.backends}
        self.log: list[Event] = []
        self.results: list[Result] = []
        now, sleep, probe = self.clock.now, self.clock.sleep, self.house.ledger.probe
        self.checkpointer = Checkpointer(cast(Any, lambda: self.house.driver), probe, now=now, wait=sleep)
        self.swapper = Swapper(self.house, probe=probe, now=now, sleep=sleep, checkpointer=self.checkpointer)
        self.mux = Multiplexer(config, self.swapper, log=self.log.append, clock=self.clock)
        monkeypatch.setattr(EngineClient, "ask", lambda client, *asked: self.house.ask(client, *asked))
        monkeypatch.setattr(engines, "time", SimpleNamespace(monotonic=now, sleep=sleep))
        monkeypatch.setattr(engines.client_of, "__defaults__", (None, now))

    def play(self, main: Callable[[], object]) -> World:
        """Afterwards no invariant is broken, and everything that runs is known."""

        def whole() -> None:
            self.mux.start()
            try:
                main()
            finally:
                self.mux.refuse()
                self.mux.close()

        self.clock.run(whole)
        self.assert_sound()
        return self

    def assert_sound(self) -> None:
        assert check(self.log, self.config) == []
        assert self.house.wrongs == []
        for result in self.results:
            assert result.over is not None, f"nobody answered {result}"
            assert result.leased is not None or isinstance(result.error, MuxError), result
        slots = {slot.name: slot for slot in self.mux.scheduler.layout.slots}
        for name, slot in slots.items():
            assert self.runs(name) is (slot.state != "stopped"), (name, slot)
            assert not slot.holders, (name, slot)

    def runs(self, name: str) -> bool:
        """Whether it runs, or holds GPU memory though it does not."""
        engine = self.house.engines.get(name)
        if engine is None:
            return False
        held = any(
            self.house.ledger.used_by(run.pid, gpu)
            for run in self.house.runs
            for gpu in run.gpus
            if run._backend.name == name and run.how is not None
        )
        return engine.how is None or held

    # What happens in it

    def later(self, at: float, run: Callable[[], object]) -> None:
        def wait_then_run() -> None:
            self.clock.sleep(at - self.clock.now())
            run()

        self.clock.spawn(wait_then_run, f"at {at}")

    def bring_docker_back(self) -> None:
        """Let Docker answer again, which the watch over the own host hears."""
        self.house.docker_away = False
        self.mux.tell(self.mux.scheduler.host_away, "", away=False)

    def attempt_unload(self, model: str) -> None:
        """As somebody does from outside; refused while it loads."""
        with suppress(MuxError):
            self.mux.facts.unload(model)

    def wait(self, seconds: float) -> None:
        self.clock.sleep(seconds)

    def state(self, name: str) -> str:
        return next(model.state for model in self.mux.overview.status().models if model.backend == name)

    def kinds(self, *kinds: str) -> list[str]:
        return [f"{each.kind} {each.backend}" for each in self.log if each.kind in kinds]

    def helper(self, name: str, amount: int) -> int:
        """Another process of the service that uses its GPUs; its id."""
        engine = self.engine(name)
        engine.helpers.append(next(self.house._pids))
        self.house.ledger.hold(engine.helpers[-1], engine.gpus, amount)
        return engine.helpers[-1]

    def until(self, moment: float) -> None:
        self.clock.sleep(moment - self.clock.now())

    def engine(self, name: str) -> VirtualEngine:
        return cast(VirtualEngine, self.house.engines[name])

    def kill(self, name: str, *, told_after: float = 0.0) -> None:
        """Its service ends, and the watcher tells that a little later."""
        engine = self.house.engines.get(name)
        if engine is None or engine.how is not None:
            return
        engine.end("was killed (code 137)")
        self.house.frozen.discard(name)

        def tell() -> None:
            if how := self.house.ended(self.backends[name]):
                self.mux.facts.died(name, how)

        self.later(self.clock.now() + told_after, tell)

    def other_process(self, amount: int, gpu: str = "0") -> Callable[[], None]:
        """Somebody else takes so much of what is free; call what is returned to have it given back."""
        pid = next(self.house._pids)
        self.house.ledger.hold(pid, (gpu,), min(amount, TOTAL - self.house.ledger.used(gpu)))
        self.house.others.add(pid)

        def leave() -> None:
            self.house.ledger.hold(pid, (gpu,), 0)
            self.house.others.discard(pid)

        return leave

    def ask(self, model: str, seconds: float = 0.0, patience: float = inf) -> Result:
        """One request, to its end."""
        result = Result(self.clock.now(), model)
        self.results.append(result)

        def tend(now: float) -> None:
            if now >= result.at + patience:
                raise ClientGone("left")

        try:
            if not self._try(result, seconds, tend) and not self._try(result, seconds, tend):
                result.error = BackendError("the engine cannot be reached")
        except MuxError as error:
            result.error = error
        result.over = self.clock.now()
        return result

    def request(self, at: float, model: str, seconds: float = 0.0, patience: float = inf) -> list[Result]:
        """The same in a thread of its own, later; the list fills with its result."""
        made: list[Result] = []
        self.later(at, lambda: made.append(self.ask(model, seconds, patience)))
        return made

    def _try(self, result: Result, seconds: float, tend: Callable[[float], None]) -> bool:
        """False if its engine could not be reached."""
        with self.mux.lease(result.model, tend) as lease:
            engine = self.house.at("http://{}:{}".format(*lease.address))
            if engine is None or engine.unreachable:
                self.mux.facts.doubts.raised_by(lease.ticket)
                return False
            result.leased = self.clock.now()
            works = engine.works() and engine.model == (lease.backend.served_model or lease.backend.model)
            if not works and not lease.severed:
                self.house.wrongs.append(f"{result} reached {engine.model} which does not work")
            result.broke_off = self._serve(lease, engine, seconds)
            return True

    def _serve(self, lease: Lease, engine: VirtualEngine, seconds: float) -> str:
        engine.busy += 1
        cut = partial(setattr, engine, "busy", 0)
        lease.on_severed(cut)
        self.clock.sleep(seconds)
        if lease.severed:
            return lease.severed_error().message
        if engine.how:
            return f"the engine {engine.how}"
        engine.busy -= 1
        return ""


def sleeper(name: str, *gpus: str, **fields: Any) -> Backend:
    """A backend that sleeps, as vLLM does."""
    settings = {"engine": "vllm", "evict_to": ("sleep", "stop"), "load_timeout": 60.0, **fields}
    return replace(Backend(name, name, gpus or ("0",)), **settings)
