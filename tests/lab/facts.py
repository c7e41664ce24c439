"""What else happens to a simulated scheduler than that requests arrive."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from anvil_mux.config.config import Config
from anvil_mux.scheduler.policies import FOREVER
from anvil_mux.scheduler.scheduler import Scheduler
from anvil_mux.scheduler.slot import NOTHING, Effects, FoundBackend


class Unloading(NamedTuple):
    """A model is asked to be unloaded."""

    at: float
    model: str

    def tell(self, scheduler: Scheduler) -> Effects:
        served = self.model in scheduler.layout.settings.models
        return scheduler.unload_asked(self.model, self.at) if served else NOTHING


class Death(NamedTuple):
    """``backend`` ends without being told to; nothing happens if it is not up."""

    at: float
    backend: str

    def tell(self, scheduler: Scheduler) -> Effects:
        return scheduler.died(self.backend, self.at, "killed")


class Reload(NamedTuple):
    """Another configuration takes the place of the one that holds."""

    at: float
    config: Config

    def tell(self, scheduler: Scheduler) -> Effects:
        return scheduler.reconfigured(self.config, self.at)


class HostLost(NamedTuple):
    """A host is heard of no more."""

    at: float
    host: str

    def tell(self, scheduler: Scheduler) -> Effects:
        return scheduler.host_lost(self.host, self.at)


class HostBack(NamedTuple):
    """``host`` is heard of again, and these of its backends were ``found`` there."""

    at: float
    host: str
    found: Mapping[str, FoundBackend] = MappingProxyType({})

    def tell(self, scheduler: Scheduler) -> Effects:
        return scheduler.host_back(self.host, self.at, self.found)


class HostGone(NamedTuple):
    """A lost host is declared gone by hand: nothing runs there any more."""

    at: float
    host: str

    def tell(self, scheduler: Scheduler) -> Effects:
        return scheduler.host_gone(self.host, self.at)


class HostDrained(NamedTuple):
    """A host is drained by hand, or is so no longer."""

    at: float
    host: str
    drained: bool = True

    def tell(self, scheduler: Scheduler) -> Effects:
        return scheduler.host_drained(self.host, self.at, self.drained)


class PauseBegun(NamedTuple):
    """Nothing is to stay or be loaded on any host, for so many seconds, or until ``PauseEnded``."""

    at: float
    seconds: float = FOREVER

    def tell(self, scheduler: Scheduler) -> Effects:
        return scheduler.paused(self.at, self.at + self.seconds)


class PauseEnded(NamedTuple):
    """A pause ends by hand; nothing happens if there is none."""

    at: float

    def tell(self, scheduler: Scheduler) -> Effects:
        return scheduler.resumed(self.at)
