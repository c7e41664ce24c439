"""The real multiplexer on engines that take virtual time: played beside the simulator, and on a stage."""

import logging
import threading
from math import inf
from types import SimpleNamespace

import pytest

from anvil_mux import errors
from anvil_mux.config.config import Config
from anvil_mux.config.machines import Gpu
from anvil_mux.errors import (
    Cancelled,
    ClientGone,
    LoadError,
)
from anvil_mux.host.seam import Evicted, Loaded
from anvil_mux.lab.checker import check
from anvil_mux.lab.engines import Engines, Outcome
from anvil_mux.lab.simulate import Arrival, simulate
from anvil_mux.multiplexer import multiplexer
from anvil_mux.multiplexer.multiplexer import Multiplexer
from anvil_mux.scheduler import group
from anvil_mux.scheduler.slot import Cancel, Demote, Evict, Load
from tests.baton import BatonClock
from tests.lab.facts import (
    Death,
    HostBack,
    HostDrained,
    HostGone,
    HostLost,
    PauseBegun,
    PauseEnded,
    Reload,
    Unloading,
)
from tests.lab.test_simulate import one
from tests.seeds import seeds

PACKAGE = SimpleNamespace(errors=errors, multiplexer=multiplexer, group=group)


A, B = one("a", "0"), one("b", "0")


TWO = Config(policy="eager", backends=(A, B))


TEN = (Gpu("0", vram=10),)


class VirtualEngines:
    """What the workers call: the simulator's outcomes, slept in virtual time."""

    def __init__(self, clock, perform, package=PACKAGE):
        self._clock = clock
        self._perform = perform
        self._package = package
        self._steps = {}
        self._latches = {}
        self.calls = []

    def _cancelled(self, backend, number):
        return self._latches.setdefault((backend.name, number), self._clock.latch())

    def cancel(self, backend, number):
        self._cancelled(backend, number).set()

    def load(self, backend, how, number):
        begun, outcome = self._clock.now(), self._begin(Load(backend.name, how))
        if self._cancelled(backend, number).wait(outcome.seconds):
            outcome = self._cut_short(backend.name, outcome, begun + outcome.seconds)
        self._raise(outcome)
        return Loaded(f"http://127.0.0.1:{1000 + len(self.calls)}", outcome.how or how)

    def evict(self, backend, how):
        outcome = self._do(Evict(backend.name, how))
        return Evicted(outcome.how or how, outcome.residual, outcome.host_bytes)

    def demote(self, backend, how, to):
        outcome = self._do(Demote(backend.name, how, to))
        return Evicted(outcome.how or to, outcome.residual, outcome.host_bytes)

    def ended(self, backend):
        return "killed"

    def answers(self, backend, limit):
        return True

    def log_tail(self, backend):
        return []

    def _cut_short(self, name, outcome, ends):
        """A load that is cancelled, and takes a while to notice; it may end before that as it would have."""
        now, cancel = self._clock.now(), self._begin(Cancel(name))
        self._clock.sleep(min(cancel.seconds, ends - now))
        if now + cancel.seconds >= ends:
            return outcome
        return cancel if cancel.error else Outcome(0.0, Cancelled("it was cancelled"))

    def _do(self, step):
        outcome = self._begin(step)
        self._clock.sleep(outcome.seconds)
        self._raise(outcome)
        return outcome

    def _begin(self, step):
        nth = self._steps[step.backend] = self._steps.get(step.backend, -1) + 1
        self.calls.append((self._clock.now(), f"{type(step).__name__.lower()} {step.backend}"))
        return self._perform(step, nth)

    def _raise(self, outcome):
        if outcome.error:
            kind = type(outcome.error)
            kind = getattr(self._package.errors, kind.__name__, kind)
            raise kind(outcome.error.message)


class Player:
    """Plays a trace on the real multiplexer, every request in a thread of its own."""

    def __init__(self, config, perform, seed=0, package=PACKAGE, *, resident=(), costs=(), follow=None):
        self._clock, self.log, self._errors = BatonClock(seed), [], package.errors
        self._follow = follow
        self._resident = {name: f"http://127.0.0.1:{9000 + n}" for n, name in enumerate(resident)}
        self._mux = package.multiplexer.Multiplexer(
            config,
            VirtualEngines(self._clock, perform, package),
            log=self.log.append,
            costs=costs,
            clock=self._clock,
        )

    def play(self, trace, until):
        def main():
            self._mux.facts.adopt(self._resident)
            self._mux.start()
            for entry in trace:
                self._clock.sleep(entry.at - self._clock.now())
                self._clock.spawn(lambda entry=entry: self._act(entry), str(entry))
            self._clock.sleep(max(until - self._clock.now(), 0.0) + 2**-21)
            self._mux.close()

        self._clock.run(main)
        return [tuple(event) for event in self.log if event.at <= until]

    def _act(self, entry):
        try:
            match entry:
                case Arrival():
                    self._request(entry)
                case Unloading(_, model):
                    self._mux.facts.unload(model)
                case Death(_, backend):
                    self._mux.facts.died(backend, "killed")
                case Reload(_, config):
                    self._mux.facts.reconfigure(config, {})
                case PauseBegun(_, seconds):
                    self._mux.facts.paused(seconds)
                case PauseEnded():
                    self._mux.facts.resumed()
                case _:
                    self._tell_of_host(entry)
        except self._errors.MuxError:
            pass

    def _tell_of_host(self, entry):
        match entry:
            case HostLost(_, host):
                self._mux.facts.host_lost(host)
            case HostBack(_, host, found):
                running = {
                    name: Evicted(how.level, how.residual, how.host_bytes) if how.level else f"http://h:{n}"
                    for n, (name, how) in enumerate(found.items(), 8000)
                }
                self._mux.facts.host_back(host, running)
            case HostGone(_, host):
                self._mux.tell(self._mux.scheduler.host_gone, host)
            case HostDrained(_, host, drained):
                self._mux.tell(self._mux.scheduler.host_drained, host, drained=drained)

    def _request(self, request):
        def tend(now):
            if now >= request.at + request.patience:
                raise self._errors.ClientGone("left")

        tended = tend if request.patience < inf else None
        if not request.leases:
            self._mux.load(request.model, tended)
            return
        with self._mux.lease(request.model, tended, key=request.sender):
            self._clock.sleep(request.seconds)
        for later in self._follow(request, self._clock.now()) if self._follow else ():
            self._clock.block(later.at)
            self._request(later)


class Mistakes(logging.Handler):
    """The log of exceptions that somebody caught and did not expect."""

    def __init__(self):
        super().__init__()
        self.records = []

    def emit(self, record):
        if record.exc_info:
            self.records.append(record)


def differences(config, trace, perform, *, seed=0, package=PACKAGE, **before):
    """The first event in which the two logs differ, as (simulated, real); None if they are equal.

    A mistake that a thread logged is a difference, too: the program goes on after it.

    ``before``: who runs already (``resident``), what is known of swaps (``costs``), and clients that wait for
    their answers (``follow``).
    """
    expected = [tuple(event) for event in simulate(config, trace, perform, **before)]
    until = max([trace[-1].at, *(event[0] for event in expected[-1:])])
    mistakes = Mistakes()
    logging.getLogger().addHandler(mistakes)
    try:
        real = Player(config, perform, seed, package, **before).play(trace, until)
    finally:
        logging.getLogger().removeHandler(mistakes)
    if mistakes.records:
        return None, mistakes.records[0]
    for pair in zip(expected + [None] * len(real), real + [None] * len(expected), strict=True):
        if pair[0] != pair[1]:
            return pair
    return None


class Stage:
    """A multiplexer on a baton clock: ``main(stage)`` runs as a thread among its workers and requests."""

    def __init__(self, config=TWO, perform=None, seed=0, footprints=()):
        self.clock = BatonClock(seed)
        self.log = []
        self.engines = VirtualEngines(self.clock, perform or Engines({"a": 4.0, "b": 6.0}, stop_seconds=1.0))
        self.mux = Multiplexer(
            config, self.engines, log=self.log.append, footprints=footprints, clock=self.clock
        )
        self.config = config

    def play(self, main):
        def whole():
            self.mux.start()
            main(self)
            self.mux.close()

        self.clock.run(whole)
        assert check(self.log, self.config) == []
        return self

    def later(self, at, run):
        def wait_then_run():
            self.clock.sleep(at)
            run()

        self.clock.spawn(wait_then_run, f"at {at}")

    def request(self, at, model, seconds=0.0, tend=None):
        """A request in a thread of its own; its result fills in: leased, over, error."""
        result = SimpleNamespace(leased=None, over=None, error=None, lease=None)

        def run():
            try:
                with self.mux.lease(model, tend) as result.lease:
                    result.leased = self.clock.now()
                    self.clock.sleep(seconds)
            except Exception as error:
                result.error = error
            result.over = self.clock.now()

        self.later(at, run)
        return result

    def states(self):
        return {model.model: model.state for model in self.mux.overview.status().models}

    def kinds(self, *kinds):
        return [f"{e.kind} {e.backend or e.model}" for e in self.log if e.kind in kinds]


def calls(stage):
    return [call for _, call in stage.engines.calls]


def interleavings(few, *, of):
    """Have a test go through interleavings of its threads: few by default, more in ``bin/test seeds``."""
    return lambda test: pytest.mark.seeds(pytest.mark.parametrize("seed", seeds(few, of=of))(test))


SEEDS = interleavings(2, of=10)


def leave_at(moment):
    def tend(now):
        if now >= moment:
            raise ClientGone("left")

    return tend


class GatedEngines:
    """Every load waits for its gate; every call is recorded."""

    def __init__(self):
        self.loading = {name: threading.Event() for name in "ab"}
        self.may_load = {name: threading.Event() for name in "ab"}
        self.calls = []

    def load(self, backend, how, number):
        self.calls.append(f"load {backend.name}")
        self.loading[backend.name].set()
        if not self.may_load[backend.name].wait(30.0):
            raise LoadError("the gate stayed shut")
        return Loaded("http://127.0.0.1:9000", how)

    def evict(self, backend, how):
        self.calls.append(f"evict {backend.name}")
        return Evicted(how)

    def ended(self, backend):
        return None
