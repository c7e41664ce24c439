"""The facts that engines, hosts and people tell, which the scheduler takes under the multiplexer's lock.

They may be late: nothing has happened to a backend that was loaded anew since. Any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from anvil_mux.config.config import Config
from anvil_mux.errors import UnknownModel
from anvil_mux.host.hosts import AnyHost
from anvil_mux.host.seam import Evicted
from anvil_mux.multiplexer.doubts import Doubts
from anvil_mux.multiplexer.lease import EngineRun, Lease
from anvil_mux.multiplexer.performer import address_of
from anvil_mux.multiplexer.shell import Shell
from anvil_mux.routing.in_flight import EngineLoad, Report
from anvil_mux.scheduler.causes import Cause
from anvil_mux.scheduler.events import Event
from anvil_mux.scheduler.policies import FOREVER
from anvil_mux.scheduler.steps import NOTHING, Crash, Effects, FoundBackend


class Facts:
    """The facts that come from outside, requests and steps apart.

    ``has_heard(address, since)``: whether an engine has sent anybody a part of an answer since that moment.
    """

    def __init__(
        self, shell: Shell, host: AnyHost, has_heard: Callable[[tuple[str, int], float], bool]
    ) -> None:
        self._shell = shell
        self._scheduler = shell.scheduler
        self._apply = shell.apply
        self._has_heard = has_heard
        self.doubts = Doubts(
            clock=shell.clock,
            lock=shell.lock,
            slot=self._scheduler.layout.slot,
            observer=host,
            consequences=self,
            limit=lambda: shell.config.upstream_timeout,
        )

    # From engines

    def unreachable(self, lease: Lease) -> Crash | None:
        """A request got no whole answer: how its backend ended under it, if it has."""
        return self.doubts.raised_by(lease.ticket, lease.backend)

    def died(
        self,
        backend: str,
        why: str,
        log: Iterable[str] = (),
        *,
        loaded: float | None = None,
        load: int | None = None,
    ) -> None:
        """The backend's service ended, and nobody here told it to.

        ``log``: what it had printed last. Nothing has happened if it was loaded anew since the moment
        ``loaded``, or by another load than the one of the number ``load``.
        """

        def fact(now: float) -> Effects:
            slot = self._scheduler.layout.slot(backend)
            if slot is None or (loaded is not None and slot.loaded != loaded):
                return NOTHING
            if load is not None and load != self._shell.loads.get(backend, 0):
                return NOTHING
            return self._scheduler.died(backend, now, why, log)

        self._apply(fact)
        self.doubts.settle(backend)

    def unanswering(self, backend: str, *, loaded: float) -> None:
        """The engine answers nobody; nothing follows if it was loaded anew since ``loaded``."""

        def fact(now: float) -> Effects:
            slot = self._scheduler.layout.slot(backend)
            is_same = slot is not None and slot.loaded == loaded
            return self._scheduler.unanswering(backend, now) if is_same else NOTHING

        self._apply(fact)

    def is_heard(self, backend: str, since: float) -> bool:
        """Whether any request got a part of an answer from the backend since a moment."""
        with self._shell.lock:
            slot = self._scheduler.layout.slot(backend)
            answered = slot.answered if slot else -FOREVER
            run = self._shell.runs.get(backend)
        return answered > since or (run is not None and self._has_heard(run.address, since))

    def observed(self, backend: str, load: EngineLoad | None) -> None:
        """The engine of a replica said this of itself; None: it answered, and has no figures."""
        self._apply(partial(self._scheduler.observed, backend, load))

    def silent(self, backend: str) -> None:
        """The engine of a replica does not answer."""
        self._apply(partial(self._scheduler.silent, backend))

    # From hosts

    def memory_seen(self, held: Mapping[str, int], host: str = "") -> None:
        """Other processes hold so many bytes of these GPUs of a host."""
        self._apply(partial(self._scheduler.memory_seen, held, host=host))

    def host_lost(self, host: str) -> None:
        """Take a host as lost: its leases are cut, and nothing is begun there until it is back."""
        self._apply(partial(self._scheduler.host_lost, host))
        self.doubts.settle_lost()

    def host_away(self, host: str, away: bool) -> None:
        """Begin nothing on a host for now, since its agent does not answer; not ``away``: it does again."""
        self._apply(partial(self._scheduler.host_away, host, away=away))

    def host_back(
        self, host: str, running: Mapping[str, str], standby: Mapping[str, Evicted] | None = None
    ) -> None:
        """A lost host is heard of again: these backends run there (name -> URL), or are in standby."""
        found = {name: FoundBackend() for name in running}
        found |= {n: FoundBackend(e.how, e.residual, e.host_bytes) for n, e in (standby or {}).items()}

        def fact(now: float) -> Effects:
            self._shell.runs |= {name: EngineRun(address_of(url)) for name, url in running.items()}
            return self._scheduler.host_back(host, now, found)

        self._apply(fact)

    def host_gone(self, host: str) -> None:
        """Nothing runs any more on a lost host."""
        self._apply(partial(self._scheduler.host_gone, host))

    def host_drained(self, host: str, drained: bool) -> None:
        """Have all go that is on a host, and load nothing there; or do so no longer."""
        self._apply(partial(self._scheduler.host_drained, host, drained=drained))

    def paused(self, seconds: float | None) -> None:
        """Have all go that is loaded, and load nothing, for so long (None: until ``resumed`` is said)."""
        lasts = FOREVER if seconds is None else seconds
        self._apply(lambda now: self._scheduler.paused(now, now + lasts))

    def resumed(self) -> bool:
        """End a pause; False if there is none."""
        return self._apply(self._scheduler.resumed) is not NOTHING

    def expect(self, backends: Iterable[str]) -> None:
        """Begin nothing beside backends that may run already until each was adopted or ``looked_at``."""
        self._apply(lambda now: self._scheduler.expected(backends))

    def looked_at(self, backends: Iterable[str]) -> None:
        """Say that it is known whether backends ran; what was not adopted holds nothing (any more)."""
        for name in backends:
            self._apply(partial(self._scheduler.looked_at, name))

    def adopt(self, running: Mapping[str, str], standby: Mapping[str, Evicted] | None = None) -> list[str]:
        """Takes over backends that run already (name -> URL), or are in standby; returns what cannot stay."""
        refused = [name for name, url in running.items() if not self._adopt(name, address_of(url))]
        return refused + [name for name, left in (standby or {}).items() if not self._adopt(name, None, left)]

    def _adopt(self, name: str, address: tuple[str, int] | None, left: Evicted | None = None) -> bool:
        def fact(now: float) -> Effects:
            slot = self._scheduler.layout.slot(name)
            if slot is None or slot.state != "stopped":
                return Effects()
            self._shell.loads.pop(name, None)
            if address:
                self._shell.runs[name] = EngineRun(address)
                return self._scheduler.adopted(name, now)
            assert left is not None
            return self._scheduler.adopted_standby(name, now, left.how, left.residual, left.host_bytes)

        return self._apply(fact) is not NOTHING

    # From people, and from other anvil-mux

    def reconfigure(
        self, config: Config, running: Mapping[str, str], standby: Mapping[str, Evicted] | None = None
    ) -> list[str]:
        """Apply another configuration while requests run on; the rest is as with ``adopt``."""
        found = [*running, *(standby or {})]
        self._shell.reconfigure(config, found)
        refused = self.adopt(running, standby)
        self.looked_at(found)
        return refused

    def reload_failed(self, why: str) -> None:
        """Another configuration was refused, and nothing has changed."""
        with self._shell.lock:
            cause = Cause("bad_configuration", detail=why)
            self._shell.emit(Event(self._shell.clock.now(), "reload_failed", "", cause=cause))

    def unload(self, model: str, *, when_idle: bool = False) -> bool:
        """Evicts ``model`` after its drain, and stops one in standby; False if there is nothing to be done.

        A load under way is cancelled, and requests that wait for it fail. ``when_idle``: once nobody uses it,
        unless somebody asks for it before; True: that is now. Whoever has just read the last byte of an
        answer holds its lease for a moment longer.
        """

        def fact(now: float) -> Effects:
            self._must_be_served(model)
            return self._scheduler.unload_asked(model, now, when_idle=when_idle)

        return self._apply(fact) is not NOTHING

    def pin(self, model: str, pinned: bool) -> None:
        """Whether ``model``, once it is resident, is kept from being evicted for others."""

        def fact(now: float) -> Effects:
            self._must_be_served(model)
            return self._scheduler.pinned(model, now, pinned)

        self._apply(fact)

    def _must_be_served(self, model: str) -> None:
        """UnknownModel if it was served until a moment ago. Under the lock."""
        if model not in self._scheduler.layout.models:
            raise UnknownModel(model, self._shell.served)

    def hear(self, told: Mapping[str, Sequence[Report]]) -> None:
        """Take the reports of all other anvil-mux on the replicas that are shared with them."""
        for model in self._shell.served:
            self._apply(partial(self._scheduler.heard, model, told))
