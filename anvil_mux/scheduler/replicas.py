"""The replicas of one model, and the choice among them.

Of the backends that are ready and have a place, the routing policy (pipeline.py) takes one, by what the
in-flight tracker knows of each. A model with backends for prefill and for decode is asked in two stages: both
are chosen in one go, or neither. One that takes either stage does all of a request if no other is left for
its prompt. Like the GPU group, whose part this is, it has no lock, no clock and no I/O.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any

from anvil_mux.config.config import EITHER, STAGES
from anvil_mux.errors import Overloaded
from anvil_mux.routing.in_flight import InFlightTracker, Member
from anvil_mux.routing.routing import Routing, Work
from anvil_mux.scheduler.slot import Slot
from anvil_mux.scheduler.steps import Ticket


class Replicas:
    """The backends of one model, of which there are several."""

    def __init__(self, slots: list[Slot], routing: Routing, *, staged: bool, full: bool) -> None:
        """``slots``: the list of them that the model keeps. ``staged``: they may be asked in two stages.

        ``full``: routing uses the figures of engines, besides our own counts.
        """
        self._slots, self._staged = slots, staged
        self._by_name = {slot.name: slot for slot in slots}
        self.in_flight = InFlightTracker(routing, map(_member, slots), full=full)
        self._doubtful = dict.fromkeys(slots)
        """The backends that may have failed: those that were never loaded have not."""

    def set(self, routing: Routing, *, staged: bool) -> None:
        """Go by other settings from now on."""
        self.in_flight.routing, self._staged = routing, staged

    def change(self, gone: Iterable[Slot], come: Iterable[Slot]) -> None:
        """Do without the backends that are ``gone``, and with those that come or are described otherwise."""
        for slot in come:
            self._by_name[slot.name] = slot
            self._doubtful[slot] = None
            self.in_flight.join(_member(slot))
        for slot in gone:
            self._doubtful.pop(slot, None)
            if self._by_name[slot.name] is slot:
                del self._by_name[slot.name]
                self.in_flight.leave(slot.name)

    def note(self, slot: Slot) -> None:
        """Note that a backend entered a state."""
        self._doubtful[slot] = None

    def take_one_more(self, ready: Sequence[Slot]) -> bool:
        """Whether a request would be leased at once by any of those that are ``ready``."""
        if not self._staged:
            return any(not slot.full for slot in ready)
        free = [slot for slot in ready if not slot.full]
        if all(any(_takes(slot, stage) for slot in ready) for stage in STAGES):
            return all(any(_takes(slot, stage) for slot in free) for stage in STAGES)
        return bool(free)

    def lacking(self, now: float) -> list[Slot]:
        """The backends to load so that each stage has one; a second, if the only one takes both."""
        if not self._staged:
            return []
        there = [slot for slot in self._slots if slot.host.takes_loads]
        loaded = [slot for slot in there if slot.state != "stopped"]
        able = [slot for slot in there if slot.state == "stopped" and slot.retry_at <= now]
        found: list[Slot] = []
        for stage in STAGES:
            if not any(_takes(slot, stage) for slot in loaded):
                found += [slot for slot in able if _takes(slot, stage) and slot not in found][-1:]
        if sum([_is_staged(slot) for slot in (*loaded, *found)]) == 1:
            found += [slot for slot in able if _is_staged(slot) and slot not in found][-1:]
        return found

    def route(self, ready: list[Slot], ticket: Ticket, now: float) -> tuple[Slot | None, Slot | None]:
        """The backend that gets a request, and the one that gets its prefill if it is asked in two stages.

        None: the routing policy lets none of ``ready`` take it.
        """
        of = self._stages(ready, staged=ticket.prefill is not None)
        if ticket.prefill and "decode" in of:
            return self._route_stages(of["prefill"], of["decode"], ticket, ticket.prefill, now)
        return self._choose(of["neutral"], ticket, now), None

    def explain(
        self, ready: list[Slot], work: Work, now: float, *, staged: bool
    ) -> dict[str, list[dict[str, Any]]]:
        """Stage -> how each replica would be judged, were this request to come now; nothing is changed."""
        of = self._stages(ready, staged=staged) if ready else {"neutral": []}
        if "decode" not in of:
            return {"neutral": self._explain(work, "neutral", of["neutral"], now)}
        decode = self._explain(work._replace(session="", stream=False), "decode", of["decode"], now)
        writes = [self._by_name[row["backend"]] for row in decode if row["chosen"]]
        others = [slot for slot in of["prefill"] if slot not in writes]
        if writes and writes[0] in of["prefill"] and all(slot.full for slot in others):
            return {"neutral": self._explain(work, "neutral", writes, now)}
        return {"prefill": self._explain(work, "prefill", others, now), "decode": decode}

    def take_back(self, ready: list[Slot], idle: Slot, now: float) -> Iterator[tuple[Ticket, Slot]]:
        """Take back the requests that wait behind others and would be better off at ``idle``."""
        return self._uncharged(self.in_flight.better_off(idle.name, _like(idle, ready), now), now)

    def take_from(self, ready: list[Slot], silent: Slot, now: float) -> Iterator[tuple[Ticket, Slot]]:
        """Take back the requests that wait at a stale replica and may go to another."""
        return self._uncharged(self.in_flight.left_waiting(silent.name, _like(silent, ready), now), now)

    def _uncharged(self, tickets: Iterable[Hashable], now: float) -> Iterator[tuple[Ticket, Slot]]:
        for ticket in tickets:
            assert isinstance(ticket, Ticket)
            assert ticket.backend is not None
            self.in_flight.ended(ticket, now=now)
            yield ticket, self._by_name[ticket.backend]

    def _stages(self, ready: list[Slot], *, staged: bool) -> dict[str, list[Slot]]:
        """Stage -> the backends that may get it; neutral: one backend does all of a request."""
        if not self._staged:
            return {"neutral": ready}
        of = {stage: [slot for slot in ready if _takes(slot, stage)] for stage in STAGES}
        if staged and of["prefill"] and of["decode"] and len(ready) > 1:
            return of
        whole = [slot for slot in ready if slot.backend.infer_type == "neutral"]
        return {"neutral": [*whole, *of["decode"]] or ready}

    def _route_stages(
        self, prefills: list[Slot], decodes: list[Slot], ticket: Ticket, first: Ticket, now: float
    ) -> tuple[Slot | None, Slot | None]:
        whole = ticket.work
        ticket.work = whole._replace(infer_type="decode", session="", stream=False)
        slot = self._choose(decodes, ticket, now)
        others = [each for each in prefills if each is not slot and not each.full]
        if slot and slot in prefills and not others:
            self.in_flight.ended(ticket)
            ticket.work = whole
            return self._choose([slot], ticket, now), None
        leads = self._choose(others, first, now) if slot else None
        if leads is None:
            self.in_flight.ended(ticket)
            ticket.choice = None
            return None, None
        return slot, leads

    def _choose(self, among: list[Slot], ticket: Ticket, now: float) -> Slot | None:
        names = [slot.name for slot in among if not slot.full]
        if ticket.work.owner in names:
            names = [ticket.work.owner]
        choice = self.in_flight.choose(ticket, ticket.work, names, self._failed(now), now)
        ticket.choice = choice
        return self._by_name[choice.backend] if choice else None

    def _explain(self, work: Work, kind: str, among: list[Slot], now: float) -> list[dict[str, Any]]:
        names = [slot.name for slot in among if not slot.full]
        work = work._replace(infer_type=kind)
        rows = self.in_flight.explain(work, names, self._failed(now), now) if names else []
        shown = {row["backend"] for row in rows}
        for slot in self._slots:
            if slot.name not in shown:
                why = slot.state if slot.state != "ready" else self._left_out(slot, kind)
                why = "host_lost" if slot.host.is_lost else why
                rows.append({"backend": slot.name, "chosen": False, "removed_by": why, "metrics": {}})
        return rows

    def _left_out(self, slot: Slot, kind: str) -> str:
        """Why a backend that is ready may not get a stage."""
        able = slot.backend.infer_type != "prefill" if kind == "neutral" else _takes(slot, kind)
        if not able:
            return "infer_type"
        return "full" if slot.full else "decode"

    def _failed(self, now: float) -> list[str]:
        """The backends that could not be stopped, or loaded lately."""
        failed = []
        for slot in tuple(self._doubtful):
            if slot.state == "stuck" or slot.retry_at > now:
                failed.append(slot.name)
            elif slot.since < now:  # else its failure may be noted in a moment
                del self._doubtful[slot]
        return failed


def _takes(slot: Slot, stage: str) -> bool:
    return slot.backend.infer_type in (stage, EITHER)


def _like(one: Slot, ready: Iterable[Slot]) -> list[str]:
    """The backends that are ready for the same stage."""
    kind = one.backend.infer_type
    return [slot.name for slot in ready if slot.backend.infer_type == kind]


def _is_staged(slot: Slot) -> bool:
    return slot.backend.infer_type in (*STAGES, EITHER)


def _member(slot: Slot) -> Member:
    backend = slot.backend
    return Member(
        backend.name,
        backend.infer_type,
        backend.kv_tokens,
        node=backend.node,
        failure_domain=backend.failure_domain,
        profile=backend.profile,
    )


def nobody_takes(model: str) -> Overloaded:
    return Overloaded(
        f"overloaded: the routing policy of {model} lets none of its replicas take more. Try again."
    )
