"""A scheduler of several hosts, its log, and short words for what happens to it."""

from anvil_mux.config.config import Backend, Config
from anvil_mux.scheduler.costs import Costs, Footprints
from anvil_mux.scheduler.scheduler import Scheduler
from anvil_mux.scheduler.slot import NOTHING, Evict, Load, Ticket


def on(host, name, *gpus, model=None, **fields):
    return Backend(name, model or name, gpus or ("0",), host=host, **fields)


class Fleet:
    """A scheduler, its log, and the steps that it asked for and nobody has reported."""

    def __init__(self, *backends, costs=(), **settings):
        self.log = []
        config = Config(backends=backends, **{"policy": "eager", "drain_timeout": 5.0, **settings})
        self.core = Scheduler(config, self.log.append, Costs(costs), Footprints())
        self.steps = []
        self.tickets = 0
        self.last = NOTHING

    def take(self, effects):
        self.last = effects
        self.steps += effects.steps
        return [f"{type(step).__name__.lower()} {step.backend}" for step in effects.steps]

    def request(self, model, at, **about):
        self.tickets += 1
        ticket = Ticket(self.tickets, model, at, **about)
        self.take(self.core.requested(ticket, at))
        return ticket

    def with_resident(self, backend, asked_at, loaded_at):
        """What loading a backend for a request leads to, besides; the request runs on."""
        self.request(self.core.layout.slot(backend).model, asked_at)
        return self.loaded(backend, loaded_at)

    def loaded(self, backend, at):
        step = self.step(Load, backend)
        return self.take(self.core.loaded(step, at, step.level))

    def evicted(self, backend, at, **left):
        return self.take(self.core.evicted(self.step(Evict, backend), at, **left))

    def step(self, kind, backend):
        found = [each for each in self.steps if each.backend == backend and isinstance(each, kind)]
        self.steps.remove(found[-1])
        return found[-1]

    def state(self, backend):
        return self.core.layout.slot(backend).state

    def kinds(self, at):
        return [f"{e.kind} {e.backend or e.model}".strip() for e in self.log if e.at == at]
