"""Questions about what is so now, answered from memory: status, queues, progress of loads, wait estimates.

Each question takes the multiplexer's lock for a moment, or for several, and changes nothing; any thread may
ask.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any, TypeVar

from anvil_mux.config.config import Backend, Config
from anvil_mux.config.machines import Gpu
from anvil_mux.host.seam import CardRead
from anvil_mux.multiplexer.circuits import Circuits
from anvil_mux.multiplexer.driver import SchedulerDriver
from anvil_mux.protocol.cards import NOTHING_KNOWN, ModelCard, together
from anvil_mux.routing.in_flight import Report
from anvil_mux.routing.routing import Work
from anvil_mux.scheduler.admission import no_room_to_wait
from anvil_mux.scheduler.costs import Cost, Footprint
from anvil_mux.scheduler.group import GpuGroup
from anvil_mux.scheduler.model import Model
from anvil_mux.scheduler.slot import LOADING, NO_WORK
from anvil_mux.scheduler.state import expected_load
from anvil_mux.scheduler.status import (
    GpuState,
    KeptPrompts,
    ModelState,
    Status,
    UnderWay,
    Waiter,
    gpu_states,
    host_state,
    model_state,
)
from anvil_mux.scheduler.waits import (
    ComingLoad,
    Progress,
    WaitEstimate,
    coming_load,
    progress,
    wait_estimate,
)

HOLD_SECONDS = 0.001
"""How long the lock is held at a time for a question about thousands of models, backends or GPUs."""
PAUSE_SECONDS = 0.0002
"""How long it is let go of then."""

_T = TypeVar("_T")


class Overview:
    """The questions about one multiplexer, whose lock guards all that is read here."""

    def __init__(self, driver: SchedulerDriver, circuits: Circuits) -> None:
        self._driver = driver
        self._circuits = circuits
        self._clock = driver.clock
        self._lock = driver.lock
        self._scheduler = driver.scheduler
        self._layout = driver.scheduler.layout
        self._reported, self._prompts = driver.reported, driver.prompts

    def wall(self, moment: float) -> float:
        """The Unix time of a moment of events and of the status."""
        return self._clock.wall(moment)

    def backend(self, name: str) -> Backend | None:
        """Find a backend as it was last started or is to be, also if the configuration has it no longer."""
        return self._driver.backends.get(name)

    @property
    def config(self) -> Config:
        """The configuration that holds now."""
        return self._driver.config

    def has(self, model: str) -> bool:
        """Whether it is served; a reload may have taken it away."""
        with self._lock:
            return model in self._driver.served

    def is_ready(self, model: str) -> bool:
        """Whether it is resident; its requests may have to wait for a place all the same."""
        with self._lock:
            return bool(self._layout.find(model)[1].ready)

    def choose(self, names: Sequence[str]) -> str:
        """The one of several names, in order of preference, whose model is to serve a request that comes now.

        A resident one, if any with a place; else one that is coming; else the first that can be loaded. An
        external server is resident, but none of them while its circuit is open.
        """
        with self._lock:
            now = self._clock.now()
            meant = [(name, self._driver.names.get(name, "")) for name in names]
            found = [(name, self._layout.models[own]) for name, own in meant if own in self._layout.models]
            found = [each for each in found if not self._is_cut_off(each[1])]
            found = [each for each in found if each[1].takes() or not each[1].is_queue_full] or found
            ready = [(name, model) for name, model in found if model.ready]
            best = [name for name, model in ready if model.takes()] + [name for name, _ in ready]
            best = best or [name for name, model in found if model.is_coming]
            for name, model in () if best else found:
                group = self._layout.of_model[model.name]
                if wait_estimate(group, model, now).verdict != "refused":
                    return name
        return best[0] if best else names[0]

    def _is_cut_off(self, model: Model) -> bool:
        """Whether its server is external, and gets no requests now."""
        backend = model.slots[0].backend
        return bool(backend.url) and self._circuits.refuses(backend.name)

    def residents(self) -> list[str]:
        """The models that are resident."""
        with self._lock:
            return [model.name for model in self._layout.models.values() if model.ready]

    def own_host_problem(self) -> str:
        """Return why nothing can be begun on our own host now; "" if it can."""
        with self._lock:
            own = self._layout.hosts.get("")
            return (own.why or "it cannot be controlled") if own and own.is_away else ""

    def has_another(self, backend: Backend) -> bool:
        """Whether a request may be sent to another backend of its model without waiting for a load."""
        with self._lock:
            model = self._layout.models.get(backend.model)
            slots = model.slots if model else ()
            return any(slot.serves and slot.name != backend.name for slot in slots)

    def status(self) -> Status:
        """Take a picture, consistent for each model and each GPU group: the lock is held for moments."""
        with self._lock:
            now, layout = self._clock.now(), self._layout
            names, groups = list(layout.models), [group.name for group in layout.groups]
            known = layout.settings.gpus
            hosts = tuple(filter(None, [host_state(host, now) for host in layout.records]))
            pause = replace(layout.pause) if layout.pause.is_on else None
        models = tuple(self._each(names, self._model_states))
        gpus = tuple(self._each(groups, partial(self._gpu_states, known)))
        waiting, leases = sum(m.waiting for m in models), sum(m.leases for m in models)
        return Status(now, models, gpus, waiting, leases, hosts=hosts, pause=pause)

    def model(self, name: str) -> ModelState:
        """The picture of one model; UnknownModel if it is not served any more."""
        with self._lock:
            self._layout.find(name)
            [state] = self._model_states(name)
        return state

    def _model_states(self, name: str) -> list[ModelState]:
        """The state of a model, unless it is gone. Under the lock."""
        if name not in self._layout.models:
            return []
        (group, model), now = self._layout.find(name), self._clock.now()
        state = model_state(group, model, now, self._progress(group, model, now))
        kept = {
            each.backend: self._prompts[each.backend]
            for each in state.backends
            if each.backend in self._prompts and self._driver.backends[each.backend].prompt_cache is not None
        }
        if kept:
            backends = [replace(each, kept_prompts=kept.get(each.backend)) for each in state.backends]
            state = replace(state, backends=tuple(backends))
        return [state]

    def _gpu_states(self, known: Mapping[str, Gpu], name: str) -> list[GpuState]:
        """The GPUs of a GPU group, unless it is gone. Under the lock."""
        group = self._layout.by_name.get(name)
        return gpu_states(group, known, self._clock.now()) if group else []

    def _each(self, names: Iterable[str], ask: Callable[[str], Iterable[_T]]) -> list[_T]:
        """Ask about each of many names, under the lock, which is let go of now and then."""
        left, found = deque(names), list[_T]()
        while left:
            with self._lock:
                until = self._clock.now() + HOLD_SECONDS
                while left and self._clock.now() < until:
                    found.extend(ask(left.popleft()))
            if left:  # whoever waits for the lock gets it only if it is not taken again at once
                self._clock.latch().wait(PAUSE_SECONDS)
        return found

    def waiters(self, most: int) -> list[Waiter]:
        """The first ``most`` requests of each queue."""
        with self._lock:
            queues = [model.queue for model in self._layout.models.values() if model.queue.tickets]
            return [Waiter(t.id, t.model, t.since) for queue in queues for t in islice(queue, most)]

    def under_way(self) -> list[UnderWay]:
        """The requests that run, and those that wait."""
        with self._lock:
            models = list(self._layout.models.values())
            running = [
                (t, slot.name, at) for m in models for slot in m.slots for t, at in slot.holders.items()
            ]
            waiting = [(ticket, "", ticket.since) for model in models for ticket in model.queue]
        return [
            UnderWay(
                request=t.request,
                ticket=t.id,
                key=getattr(t.sender, "name", ""),
                model=t.model,
                backend=backend,
                since=since,
            )
            for t, backend, since in (*running, *waiting)
        ]

    def coming_loads(self, models: Iterable[str]) -> tuple[list[str], list[Backend]]:
        """The ``models`` that have a queue, and the backends whose loads they wait for, the next first."""
        found = self._each(models, self._coming_load)
        coming = sorted([load for _, load in found if load])
        return [name for name, _ in found], [load.backend for load in coming]

    def _coming_load(self, name: str) -> list[tuple[str, ComingLoad | None]]:
        """A model with the load that its queue waits for, if it has a queue. Under the lock."""
        model = self._layout.models.get(name)
        if model is None or not model.queue.tickets:
            return []
        return [(name, coming_load(self._layout.of_model[name], model, self._clock.now()))]

    def hosts_to_wake(self) -> list[str]:
        """The hosts that are lost and can be woken, and for which requests wait."""
        with self._lock:
            now, layout = self._clock.now(), self._layout
            lost = [each for each in layout.hosts.values() if each.is_lost and each.is_awaited(now)]
            return [each.name for each in lost if layout.is_wanted(each.name)]

    def loading(self) -> list[str]:
        """The backends that are being loaded."""
        with self._lock:
            return [slot.name for slot in self._layout.slots if slot.state in LOADING]

    def evicting(self) -> list[Backend]:
        """List the backends that are on their way off their GPUs, or to a deeper standby level."""
        with self._lock:
            return [slot.backend for slot in self._layout.slots if slot.state in ("evicting", "demoting")]

    def leaving(self) -> list[Backend]:
        """List the backends that go because the configuration has changed, and have not gone yet."""
        with self._lock:
            return [slot.backend for slot in self._layout.leaving]

    @property
    def unseen(self) -> list[str]:
        """The backends of which it is not known yet whether they run."""
        with self._lock:
            return self._layout.unseen

    def explain(
        self, model: str, work: Work = NO_WORK, *, staged: bool = False
    ) -> dict[str, list[dict[str, Any]]]:
        """Stage -> what would be made of each replica of ``model``; empty where it has but one backend."""
        with self._lock:
            found = self._layout.find(model)[1]
            if found.replicas is None:
                return {}
            return found.replicas.explain(found.ready, work, self._clock.now(), staged=staged)

    def wait_estimate(self, model: str) -> WaitEstimate:
        """Say what a request for ``model`` would wait for now."""
        with self._lock:
            (group, found), now = self._layout.find(model), self._clock.now()
            estimate = wait_estimate(group, found, now, self._progress(group, found, now))
            waiting, most = self._driver.counts.waiting, self._driver.config.max_queue
            full = no_room_to_wait(found, waiting, most) if estimate.verdict == "waits" else None
            return estimate.refused(full.message) if full else estimate

    def eta(self, model: str) -> float | None:
        """Seconds until ``model`` is resident if its load takes as long as the last; None if never loaded.

        Not more than a guess: what it waits for before its load begins is not in it.
        """
        with self._lock:
            (group, found), now = self._layout.find(model), self._clock.now()
            far = self._progress(group, found, now)
            if far and far.seconds_left is not None:
                return far.seconds_left
            left = [
                slot.load_seconds - (now - slot.since if slot.state == "loading" else 0.0)
                for slot in found.present
                if slot.load_seconds is not None
            ]
        return max(min(left), 0.0) if left else None

    def how_far(self, model: str) -> str:
        """The load or place that a request for ``model`` waits for, in a few words for its client."""
        with self._lock:
            (group, found), now = self._layout.find(model), self._clock.now()
            far = self._progress(group, found, now)
            if far:
                return f"loading {model} {far.words}"
            left = wait_estimate(group, found, now).seconds
        doing = "waiting for a place at" if found.ready else "waiting to load"
        return f"{doing} {model}" + ("" if left is None else f" about {left:.0f} s left")

    def _progress(self, group: GpuGroup, model: Model, now: float) -> Progress | None:
        """Say how far the load of ``model`` is, if there is one and none is ready. Under the lock."""
        slot = next((slot for slot in model.present if slot.state == "loading"), None)
        if slot is None or model.ready:
            return None
        at, said = self._reported.get(slot.name, (now, None))
        return progress(now - slot.since, expected_load(group, slot), said if at >= slot.since else None)

    def report(self, backend: str, progress: Progress) -> None:
        """Note what the log of a backend says of its load."""
        with self._lock:
            self._reported[backend] = self._clock.now(), progress

    def is_stopped(self, backend: str) -> bool:
        """Whether a backend holds nothing, and nothing is under way on it."""
        with self._lock:
            slot = self._layout.slot(backend)
            return slot is not None and slot.state == "stopped"

    def paused_by_hand(self, model: str) -> list[str]:
        """Return a sentence for each ready backend of a model that was paused by hand."""
        with self._lock:
            found = self._layout.models.get(model)
            slots = found.present if found else ()
            return [slot.pause_words for slot in slots if slot.paused_as and slot.state == "ready"]

    def note_prompts(self, backend: str, kept: KeptPrompts) -> None:
        """Note which prompts of a backend are on disk."""
        with self._lock:
            self._prompts[backend] = kept

    def note_card(self, read: CardRead) -> None:
        """Note what an engine says of its model, unless its backend is described otherwise by now."""
        with self._lock:
            backend = self._driver.backends.get(read.backend)
            if backend and backend.description == read.described:
                self._driver.cards[read.backend] = replace(read, card=read.card.sound())

    def read_cards(self) -> tuple[CardRead, ...]:
        """The cards that engines have made of their models, for the next start."""
        with self._lock:
            return tuple(self._driver.cards.values())

    def cards(self) -> dict[str, ModelCard]:
        """Model -> its card: what is set, else what was said; of several backends what holds for each."""
        found: dict[str, list[ModelCard]] = {}
        for backend in self._driver.config.backends:
            found.setdefault(backend.model, []).append(self._card(backend))
        return {model: together(each) for model, each in found.items()}

    def card(self, model: str) -> ModelCard:
        """The same of one model."""
        return together([self._card(each) for each in self._driver.config.backends if each.model == model])

    def _card(self, backend: Backend) -> ModelCard:
        read = self._driver.cards.get(backend.name)
        card = read.card if read and read.described == backend.description else NOTHING_KNOWN
        return backend.own_card.over(card) if backend.context or backend.capabilities else card

    def last_words(self, backend: str) -> tuple[str, ...]:
        """The last lines of a backend's engine before it failed; () once it is loaded again."""
        with self._lock:
            slot = self._layout.slot(backend)
            return slot.log if slot else ()

    def serving(self, host: str) -> list[tuple[Backend, tuple[str, int]]]:
        """The backends of a host that may have leases, and where they listen."""
        with self._lock:
            groups = self._layout.on_host(host)
            there = [s for g in groups for s in g.slots.values() if s.host.name == host]
            slots = [slot for slot in there if slot.state in ("ready", "draining")]
            return [(slot.backend, self._driver.runs[slot.name].address) for slot in slots]

    def resident_replicas(self) -> list[tuple[Backend, tuple[str, int]]]:
        """The backends that may be leased, of models with several, and where they listen."""
        return self._each(self._with_replicas(), self._resident)

    def _resident(self, model: str) -> list[tuple[Backend, tuple[str, int]]]:
        """The backends of a model that may be leased, unless it is gone. Under the lock."""
        found = self._layout.models.get(model)
        ready = found.ready if found else ()
        return [(slot.backend, self._driver.runs[slot.name].address) for slot in ready]

    def _with_replicas(self) -> list[str]:
        """The models with several backends."""
        with self._lock:
            return [model.name for model in self._layout.models.values() if model.replicas]

    def reports(self) -> dict[str, Report]:
        """The reports for other anvil-mux on the replicas that are shared with them."""
        reports, now = self._scheduler.reports, self._clock.now
        return dict(self._each(self._with_replicas(), lambda model: reports(model, now()).items()))

    def bytes_per_token(self, model: str) -> float:
        """The bytes of a prompt for each token, as was learned; of a model with several backends."""
        _, found = self._layout.find(model)
        return found.bytes_per_token

    def costs(self) -> list[Cost]:
        """The costs of swaps, as far as they were learned."""
        with self._lock:
            return list(self._scheduler.costs)

    def footprints(self) -> list[Footprint]:
        """The memory that backends held, and kept in standby, as it was measured."""
        with self._lock:
            return list(self._scheduler.footprints)
