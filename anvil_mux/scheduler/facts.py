"""The facts about a GPU group, each in the past tense, but for how requests arrive and how steps end.

How leases ended, which backends died, which ran before this program came, whether their host is
lost, is back, is declared gone or is drained by hand, and what people ask for: unload a model, pin it, take
another configuration. The record of a host says whether it is lost. Its backends keep the states that they
had meanwhile: they may still run. When the host is back each backend is what it was found to be, whatever its
state was. One that was found and may not stay is stuck until it is stopped.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Set

from anvil_mux.errors import Cancelled, Overloaded, UnknownModel
from anvil_mux.scheduler.events import ADOPTED, POLICY, UNLOADED, Cause, Event, Leaving, ending
from anvil_mux.scheduler.model import Model
from anvil_mux.scheduler.policies import FOREVER
from anvil_mux.scheduler.slot import (
    LOADING,
    NO_USAGE,
    TRANSITIONS,
    Crash,
    FoundBackend,
    Slot,
    Ticket,
    TokenUsage,
)
from anvil_mux.scheduler.swaps import Swaps

HINT_SECONDS = 60.0
"""How long a hint holds, and what was loaded for one is not evicted for another."""
MOST_HINTS = 32
"""The most models that are hinted at at once."""
INCOMPLETE = Cause("incomplete")


class GroupFacts(Swaps):
    """The facts about one GPU group: from requests, steps, engines, hosts and people."""

    __slots__ = ()

    # Requests

    def release(
        self, ticket: Ticket, now: float, usage: TokenUsage = NO_USAGE, *, whole: bool = True
    ) -> bool:
        """A lease ended; whether the next step is to be asked for. Late after a severed drain, or twice, is
        harmless.

        ``usage``: tokens of the input and how many were cached, if the engine said so. ``whole``: the engine
        gave its answer to the end.
        """
        slot = self.slots.get(ticket.backend or "")
        if slot is None or ticket not in slot.holders:
            return False
        slot.count_time(now)
        ticket.share += slot.gpu_seconds
        since = slot.holders.pop(ticket)
        model = self.models[ticket.model]
        _note_use(model, slot, ticket, now - since, now)
        if whole:
            slot.answered, slot.crashes = now, 0
        replicas = model.replicas if ticket.choice else None
        if replicas:
            replicas.in_flight.ended(ticket, prompt_tokens=usage[0], cached_tokens=usage[1], now=now)
        if self.emit_leases:
            size, cause = len(slot.holders), None if whole else INCOMPLETE
            self.emit(Event(now, "released", ticket.model, slot.name, ticket.id, size, cause=cause))
        waited = bool(model.queue.tickets)
        if model.limited and slot.state == "ready":
            self.fill_places(model, now)
        if replicas and not slot.holders and slot.state == "ready":
            self.take_back(slot, now)
        is_sooner = slot.state == "draining" and self.bound_anew(slot, now)
        if model.unload_when_idle and self.unload_when_idle(model, now):
            return True
        if self.deferred or self.deferred_hints:
            self._reopen(slot)
        is_over = waited and not model.queue.tickets  # what it keeps in standby may be demoted
        return is_sooner or is_over or self._matters(slot, now)

    def _reopen(self, slot: Slot) -> None:
        """Have the policy asked again, now that a lease has ended, where it says that this may matter."""
        leases = len(slot.holders)
        for deferred in (self.deferred, self.deferred_hints):
            for model, held in deferred.items():
                if leases < held.stay.leases and slot in held.residents:
                    deferred[model] = held._replace(is_over=True)

    def _matters(self, slot: Slot, now: float) -> bool:
        """Whether the end of a lease may change what is to be done next.

        It does where swaps are held back if the policy says so, if there is a choice of victims, or if a
        drain or memory may depend on it; where replicas do; and at the end of a drain, and where a ttl or the
        return of a home backend begins, or a hint or a queue that takes over a drain may wait for it.
        """
        if self.deferred:
            if self.swaps or self.idlers or self.routed or self.memory.budget is not None:
                return True
            held = self.deferred.values()
            if any(each.is_over or not each.contest or len(each.residents) > 1 for each in held):
                return True
        if self.routed and self._matters_to_replicas(slot, now):
            return True
        if any(each.is_over for each in self.deferred_hints.values()):
            return True
        if slot.holders:
            return False
        comes_back = bool(self.homes) and not slot.backend.home
        may_go = bool(self.swaps or self.common.hints)
        return slot.state == "draining" or slot.ttl is not None or comes_back or may_go

    def _matters_to_replicas(self, slot: Slot, now: float) -> bool:
        """Whether a queue may have a better place then, or a busy model another replica, or one too many."""
        if self.models[slot.model].replicas and self.models[slot.model].is_coming:
            return True
        for model in self.routed:
            if model.queue.tickets and model.is_spread:
                return True
            if model.ready and not slot.holders and self.may_spill(model, now):
                return True
        return False

    # Before this program came

    def looked_at(self, slot: Slot, now: float) -> None:
        """The backend was looked at: if it was not adopted it holds nothing (any more)."""
        self.unseen.discard(slot.name)
        self.changed()

    def adopt(self, slot: Slot, now: float, found: FoundBackend, cause: Cause | None = None) -> bool:
        """The backend ran before this program came, or was in standby (for this ``cause``).

        False if it cannot stay beside those already adopted, or what it keeps has no room. One that may not
        stay and could not be stopped holds its GPUs until it was.
        """
        if not found.may_stay:
            self._refuse(slot, now)
            return True
        return self._adopt_standby(slot, now, found, cause) if found.level else self._adopt_running(slot, now)

    def _adopt_running(self, slot: Slot, now: float) -> bool:
        if not self.placement.fits(slot, runs=True):
            return False
        self.enter(slot, "adopt", now)
        self.unseen.discard(slot.name)
        slot.last_used = now  # since when it has been resident is not known
        self.emit(Event(now, "ready", slot.model, slot.name, cause=ADOPTED))
        model = self.models[slot.model]
        if model.queue.tickets:
            self.admit(model, now)
        if slot.pinned:
            self.fail_refused(now)
        return True

    def _adopt_standby(self, slot: Slot, now: float, found: FoundBackend, cause: Cause | None) -> bool:
        residual = slot.named(found.residual)
        if self.placement.crowds(residual):
            return False
        self.enter(slot, "adopt_standby", now)
        self.unseen.discard(slot.name)
        slot.keep_in_standby(found.level, residual, found.host_bytes)
        self.emit(Event(now, "standby", slot.model, slot.name, cause=cause, way=found.level))
        return True

    # Ends by themselves

    def died(self, slot: Slot, now: float, why: str, log: Iterable[str]) -> None:
        """The backend ended without being told to; ``log``: what its engine had printed last."""
        if (slot.state, "died") not in TRANSITIONS:
            return  # the step under way reports that instead
        cause = slot.judge_end(now, why)
        self.enter(slot, "died", now)
        slot.note_left(now)
        self.left(slot)
        slot.note_died(ending(cause), log)
        size, crash = len(slot.holders), Crash(slot.name, slot.error, slot.log)
        for ticket in slot.holders:
            ticket.crash = crash
        slot.let_go(now)
        self.emit(Event(now, "stopped", slot.model, slot.name, size=size, cause=cause))
        self.fail_refused(now)

    def service_paused(self, slot: Slot, now: float, container: str) -> None:
        """Note that the container of the backend, which has this name, was paused by hand; "": it goes on.

        Its requests keep their leases. New ones go to other backends of its model, or fail.
        """
        if container and slot.state in ("stopped", "standby"):
            return
        slot.paused_as = container
        self.changed()
        model = self.models[slot.model]
        self.renew_ready(model, now)
        if model.queue.tickets:
            self.admit(model, now)
        self.fail_refused(now)

    def unanswering(self, slot: Slot, now: float) -> None:
        """The engine of the backend does not answer: it is stopped without a drain, not put in standby.

        What was paused by hand is not expected to answer.
        """
        if slot.state == "ready" and not slot.paused_as:
            slot.next_level = "stop"
            self.begin(None, [slot], now, Cause("silent"))

    def memory_seen(self, held: Mapping[str, int], now: float) -> bool:
        """Other processes hold so many bytes, by GPU; whether that is news.

        It is not believed while a backend is loaded or evicted: its processes may be taken for others. GPUs
        of which they hold much are left to them: all there goes, and returns later (group.py).
        """
        moving = any(slot.state in (*LOADING, "evicting", "demoting") for slot in self.slots.values())
        if moving or held == self.placement.others:
            return False
        self.placement.others = held
        self.changed()
        if self.config.yield_above is not None:
            self._note_way_made(now)
        return True

    def _note_way_made(self, now: float) -> None:
        """Note for whom GPUs are left to other programs, or are no longer."""
        self.reprieve_all(now)
        for slot in [slot for slot in self.slots.values() if slot.made_way is not None]:
            if self.left_gpu(slot):
                slot.made_way = FOREVER
            elif slot.state == "ready":
                slot.made_way = None
            elif slot.made_way == FOREVER:
                slot.made_way = now
        self.fail_refused(now)

    # The host

    def host_away(self, now: float) -> None:
        """Call off the swaps whose load has not begun: nothing is begun here until the host is heard of.

        Their queues may go to other hosts. Unloads by hand, removals and evictions of silent engines go
        on, as does the eviction of everything on a host that is cleared.
        """
        self.changed()
        for swap in tuple(self.swaps):
            is_planned = swap.target or swap.severs == POLICY or swap.cause.kind == "surplus"
            if is_planned and not (swap.target and swap.target.state in LOADING):
                self.call_off(swap, now)
        self.fail_refused(now)

    def host_lost(self, now: float) -> None:
        """Sever all leases and end all swaps there; the queues go elsewhere, or fail."""
        cause = Cause("host_lost", host=self.host.name)
        self.changed()
        self.unseen.clear()
        self.note_ready()
        for swap in tuple(self.swaps):
            self.end(swap)
        for slot in self.slots.values():
            self.cut += self.sever(slot, now, cause)
            if replicas := self.models[slot.model].replicas:
                replicas.in_flight.forget(slot.name)
        for model in self.models.values():
            self._leave(model, now)
        self.fail_refused(now)

    def _leave(self, model: Model, now: float) -> None:
        """Take the backends of a model on the lost host out of those that may be leased."""
        ready = [slot for slot in model.ready if slot.serves]
        were_more, model.ready = len(model.ready) > len(ready), ready
        if were_more and model.limited:
            model.queue.left = now
            self.fill_places(model, now)  # requests that needed one of these go elsewhere

    def host_back(self, now: float, found: Mapping[str, FoundBackend], held: Collection[Slot]) -> None:
        """Give each backend the state in which it was found: first those that run, then those in standby.

        ``held``: those that held something before, of which nothing is counted any more (``host_freed``).
        """
        self.changed()
        cause = Cause("not_found", host=self.host.name)
        for slot in sorted(
            self.slots.values(), key=lambda slot: slot.name in found and found[slot.name].level != ""
        ):
            if slot.name in found:
                self._find(slot, found[slot.name], now)
            elif slot in held:
                self.emit(Event(now, "stopped", slot.model, slot.name, cause=cause))

    def _find(self, slot: Slot, found: FoundBackend, now: float) -> None:
        """Adopt a backend, or have it stopped if it may not stay; until then it holds its GPUs."""
        if slot.leaving or not found.may_stay:
            self._refuse(slot, now)
            return
        runs = not found.level
        if runs:
            slot.retry_at = now  # it runs, so its last failure says nothing any more
        if not self.adopt(slot, now, found, ADOPTED):
            self._refuse(slot, now)
        elif runs:
            slot.failed_starts = 0

    def _refuse(self, slot: Slot, now: float) -> None:
        """Have a backend stopped that was found running; it holds its GPUs until then."""
        self.enter(slot, "unfit", now)
        self.unseen.discard(slot.name)
        slot.error, slot.retry_at = "it was found running, and cannot stay", now
        cause = Cause("unfit", host=self.host.name)
        self.emit(Event(now, "stuck", slot.model, slot.name, cause=cause))

    def host_cleared(self, now: float, *, cleared: bool) -> None:
        """Have all go that is on the host (group.py), or stay: it was drained or paused, or is no longer."""
        self.changed()
        if not cleared and not self.host.is_lost:
            self.reprieve_all(now)
            for slot in self.slots.values() if self.host.takes_loads else ():
                if slot.state == "standby" and not slot.failed_stops and not slot.leaving:
                    slot.next_level = ""
        self.note_ready()
        for model in self.models.values():  # what was ready out of reach is so still, and serves or does not
            self.renew_ready(model, now)
            if model.queue.tickets:
                self.admit(model, now)
        self.fail_refused(now)

    def host_gone(self, now: float) -> None:
        """Declare that nothing runs there: its backends hold nothing any more, and none is loaded."""
        cause = Cause("host_gone", host=self.host.name)
        for slot in self.host_freed(now):
            self.emit(Event(now, "stopped", slot.model, slot.name, cause=cause))

    def host_freed(self, now: float) -> list[Slot]:
        """Stop counting what the backends hold, and return those that held something."""
        held = [slot for slot in self.slots.values() if slot.state != "stopped"]
        for slot in held:
            self.enter(slot, "gone", now)
            slot.note_gone(now)
        return held

    # People

    def unload(self, model: Model, now: float) -> bool:
        """Evict the backends of ``model``, in all GPU groups, after their drain; False: nothing is to do.

        Those in standby are stopped, and loads under way are cancelled; requests that wait for them fail.
        """
        is_ready = bool(model.ready)
        found = [each._unload_here(model, is_ready, now) for each in self.groups_of(model)]
        return any(found)

    def _unload_here(self, model: Model, is_ready: bool, now: float) -> bool:
        """Unload what is in this GPU group; ``is_ready``: the model was resident, here or elsewhere."""
        slots = [s for s in self.own(model) if not s.host.is_lost and not s.backend.url]
        if not slots:
            return False
        for slot in slots:
            slot.unloaded = True
        ready = [slot for slot in slots if slot.state == "ready"]
        given_up = self._give_up_load(model, is_ready, now)
        self.common.hints.pop(model.name, None)
        for slot in ready:
            self.begin(None, [slot], now, UNLOADED)
        standby = [] if is_ready else [slot for slot in slots if self.may_be_stopped(slot)]
        for slot in standby:
            slot.next_level = "stop"
        hastened = [slot for slot in slots if self.hasten(slot, now)]
        return bool(ready or standby or given_up or hastened)

    def _give_up_load(self, model: Model, is_ready: bool, now: float) -> bool:
        """End the swaps to ``model`` here, and the wait for them; False if there is neither."""
        swaps = [swap for swap in self.swaps if swap.target and swap.target.model == model.name]
        for swap in swaps:
            if swap.target and swap.target.state in LOADING:
                swap.cancel = UNLOADED
            else:
                self.call_off(swap, now)
        if is_ready:
            return bool(swaps)
        waits = bool(model.queue.tickets)
        text = (
            f"{model.name} was unloaded by hand while this request waited for it. Send it again to load it."
        )
        self.fail_queue(model, Cancelled(text), now)
        return bool(swaps) or waits

    def unload_when_idle(self, model: Model, now: float) -> bool:
        """Evict the backends of ``model`` once nobody uses it, unless it is asked for before; True: now.

        A load under way counts as used if requests wait for it.
        """
        model.unload_when_idle = False
        if not model.ready:
            idle = model.is_loading and not model.queue.tickets
            return idle and self.unload(model, now)
        if model.is_used:
            model.unload_when_idle = True
            return False
        return self.unload(model, now)

    def hint(self, model: Model, now: float) -> None:
        """A client will ask for ``model`` soon; Overloaded if too many such hints are pending.

        It holds for ``HINT_SECONDS``, and is forgotten once the model is resident or coming, or asked for.
        """
        hints = self.common.hints
        for name in [name for name, since in hints.items() if now >= since + HINT_SECONDS]:
            del hints[name]
        if model.name in hints or model.ready or model.is_coming:
            return
        if len(hints) >= MOST_HINTS:
            raise Overloaded(f"Hints for {MOST_HINTS} models are pending already; no more are kept.")
        hints[model.name] = now

    def pin(self, model: Model, now: float, *, pinned: bool) -> None:
        """Keep ``model``, once it is resident, from being evicted for others; or do so no longer."""
        if not any(slot.pinned != pinned and not slot.leaving for slot in model.slots):
            return
        self.emit(Event(now, "pinned" if pinned else "unpinned", model.name))
        for each in self.groups_of(model):
            each._pin_here(model, now, pinned=pinned)

    def _pin_here(self, model: Model, now: float, *, pinned: bool) -> None:
        self.changed()
        self.memory.changed()
        for slot in [s for s in self.own(model) if s.pinned != pinned and not s.leaving]:
            slot.pinned = pinned
            if pinned:
                self.spare(slot, now)
        self.fail_refused(now)

    def retire(self, leaving: Mapping[str, Leaving], served: Set[str], now: float) -> None:
        """Have backends leave for good, for these reasons; fail the queues of models not ``served``."""
        slots = [slot for name, slot in self.slots.items() if name in leaving]
        for slot in slots:
            slot.leaving, slot.pinned = slot.leaving or leaving[slot.name], False
        for swap in tuple(self.swaps):
            if swap.target and swap.target.leaving and swap.target.state in LOADING:
                swap.cancel = swap.cancel or Cause(swap.target.leaving)
            elif swap.target and swap.target.leaving:
                self.dissolve(swap, now)
        for slot in [slot for slot in slots if not slot.host.is_lost]:
            if slot.state == "ready":
                self.begin(None, [slot], now, Cause(slot.leaving))
            elif slot.state == "standby":
                slot.next_level = "stop"
        for model in self.models.values():
            if model.queue.tickets and model.name not in served:
                self.fail_queue(model, UnknownModel(model.name, served), now)


def _note_use(model: Model, slot: Slot, ticket: Ticket, seconds: float, now: float) -> None:
    slot.last_used = now
    if ticket.work.infer_type != "prefill":
        model.demand.served(seconds)
    if not slot.holders and not model.replicas:
        model.demand.idle(now)
