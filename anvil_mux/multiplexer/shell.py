"""The shell around the scheduler: one lock, facts in, and what follows from them carried out.

Under the lock the scheduler is told a fact and returns ``Effects``, and what has to hold at once is noted:
who waits no longer, and when time is to have passed. Outside of it the rest is carried out: threads of
requests that ended waiting are woken by a latch of their own, leases are cut, and then the steps are handed
to the workers (stop a container, start one, wait until it answers: minutes, if need be), which report how
each has ended.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from anvil_mux.clock import Clock
from anvil_mux.config.config import Config
from anvil_mux.host.hosts import AnyHost
from anvil_mux.multiplexer.counts import RequestCounts
from anvil_mux.multiplexer.lease import EngineRun, Granted
from anvil_mux.multiplexer.performer import Job, Performer
from anvil_mux.multiplexer.workers import Workers
from anvil_mux.scheduler.costs import Cost, Costs
from anvil_mux.scheduler.events import Event
from anvil_mux.scheduler.footprint import Footprint, Footprints
from anvil_mux.scheduler.progress import LogProgress
from anvil_mux.scheduler.scheduler import Scheduler
from anvil_mux.scheduler.status import KeptPrompts
from anvil_mux.scheduler.steps import NOTHING, Cancel, Effects, Evict, Load, Step, Ticket

log = logging.getLogger(__name__)


class Shell:
    """The scheduler of one multiplexer, the lock around it, and the workers that perform its steps."""

    def __init__(
        self,
        config: Config,
        host: AnyHost,
        clock: Clock,
        emit: Callable[[Event], object],
        *,
        emit_leases: bool,
        costs: Iterable[Cost],
        footprints: Iterable[Footprint],
        close_idle: Callable[[EngineRun], object],
    ) -> None:
        self._host = host
        self._close_idle = close_idle
        self.clock = clock
        self.emit = emit
        """Takes every event, under the lock."""
        # Replaced as a whole, under the lock, and never altered: whoever only reads them needs none.
        self._take(config, config.names)
        # The lock guards everything below it. It is held for microseconds: no I/O, no engine, no Docker.
        self.lock = clock.lock()
        self.scheduler = Scheduler(
            config,
            emit,
            Costs(costs),
            Footprints(footprints),
            emit_leases=emit_leases,
            first_step=1 + secrets.randbits(60),
        )
        self.counts = RequestCounts(self.lock)
        # Whoever needs one entry of the first of these reads it without the lock.
        self.backends = {each.name: each for each in config.backends}
        """The backends as they were last started or are to be; also those that go."""
        self.runs: dict[str, EngineRun] = {}
        """Backend -> the last run that was seen of it."""
        self.loads: dict[str, int] = {}
        """Backend -> the number of its last load; none: it was adopted."""
        self.reported: dict[str, tuple[float, LogProgress]] = {}
        """Backend -> what its log said last of a load, and when."""
        self.prompts: dict[str, KeptPrompts] = {}
        """Backend -> its prompts on disk, of those that keep some."""
        self._gone: dict[str, None] = {}
        """The backends that reloads have taken away, until they are forgotten."""
        performer = Performer(host, self.scheduler, self.apply, self._loaded)
        self.workers = Workers[Job](
            clock=clock,
            lock=self.lock,
            perform=performer.perform,
            failed=performer.not_begun,
            time_passed=self._time_passed,
            name=lambda job: job.step.backend,
        )

    def _take(self, config: Config, names: Mapping[str, str]) -> None:
        self.config = config
        self.names = names
        """Every name by which a model may be asked for -> the model."""
        self.served = frozenset(names.values())

    def apply(self, fact: Callable[[float], Effects]) -> Effects:
        """Tell the scheduler that something is so since now, and carry out what follows from it."""
        with self.lock:
            effects = fact(self.clock.now())
            jobs = self.noted(effects)
        self.carry_out(effects, jobs)
        return effects

    def noted(self, effects: Effects) -> Sequence[Job]:
        """Note what has to hold at once of effects, under the lock, and make jobs of their steps."""
        if effects is NOTHING:
            return ()
        for ticket in effects.woken:
            self.counts.count_waiting(ticket, -1)
            self.grant(ticket)
        if effects.ask_at is not None:
            self.workers.ask_at(effects.ask_at)
        return [self._job(step) for step in effects.steps]

    def grant(self, ticket: Ticket) -> None:
        """Fix what a ticket has leased, if it has, under the lock: before its thread goes on, reloads and an
        eviction may have taken the backend away."""
        for each in (ticket, ticket.prefill):
            if each and each.backend:
                each.granted = Granted(self.backends[each.backend], self.runs[each.backend])

    def _job(self, step: Step) -> Job:
        slot = self.scheduler.layout.slot(step.backend)
        assert slot is not None, step
        if isinstance(step, Load):
            self.backends[step.backend] = slot.backend
        return Job(step, slot.backend)

    def carry_out(self, effects: Effects, jobs: Sequence[Job]) -> None:
        """Without the lock, in this order: nobody is cut after the engine was told to go.

        Nor does a connection idle there then, for which llama-server would end 0.1 s later.
        """
        for ticket in effects.woken:
            ticket.wake.set()
            # Whoever is woken goes on before the next one is. Of 500 who want the interpreter at once, the
            # last has its lease after 28 to 34 ms on two CPUs, and 45 to 74 on one; so it is 21 and 15.
            os.sched_yield()
        for ticket in effects.cut:
            cut(ticket)
        for job in jobs:
            if isinstance(job.step, Cancel):
                self._host.cancel(job.backend, job.step.number)
            elif isinstance(job.step, Evict) and (run := self.runs.get(job.step.backend)):
                self._close_idle(run)
        begun = [job for job in jobs if not isinstance(job.step, Cancel)]
        if begun:
            self.workers.submit(begun)
        for mistake in effects.mistakes:
            log.error("a mistake in the scheduler; what it concerns is tried again", exc_info=mistake)

    def _time_passed(self) -> None:
        self.apply(self.scheduler.time_passed)

    # Facts with which something changes here

    def _loaded(self, step: Load, address: tuple[str, int], how: str, now: float) -> Effects:
        effects = self.scheduler.loaded(step, now, how)
        if effects is not NOTHING:
            self.runs[step.backend] = EngineRun(address)
            self.loads[step.backend] = step.number
        return effects

    def reconfigure(self, config: Config, expected: Iterable[str]) -> None:
        """Another configuration holds from now on."""

        def fact(now: float) -> Effects:
            self._take(config, config.names)
            effects = self.scheduler.reconfigured(config, now, expected=expected)
            layout = self.scheduler.layout
            self.backends |= layout.wanted
            self.backends |= {slot.name: slot.backend for slot in layout.slots}
            self._gone.update(dict.fromkeys(name for name in self.backends if name not in layout.wanted))
            self._forget_gone(layout.wanted)
            return effects

        self.apply(fact)

    def _forget_gone(self, wanted: Collection[str]) -> None:
        """Forget the backends that the configuration has no longer, and that have left their GPUs."""
        tables: tuple[dict[str, Any], ...] = (
            self.backends,
            self.runs,
            self.loads,
            self.reported,
            self.prompts,
        )
        for name in [each for each in self._gone if not self.scheduler.layout.slot(each)]:
            del self._gone[name]
            for table in tables if name not in wanted else ():
                table.pop(name, None)


def cut(ticket: Ticket) -> None:
    """Cut a request that was severed."""
    end = ticket.cut  # the lease may end just now
    try:
        if end:
            end()
    except Exception:  # a worker must not end
        log.exception("cutting a severed request for %s", ticket.model)
