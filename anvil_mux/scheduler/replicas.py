"""The replicas of one model, and what it is to choose among them.

Of the backends that are ready and have a place, the routing policy (pipeline.py) takes one, by what the
ledger knows of each. A model with backends for prefill and for decode is asked in two stages: both are chosen
in one go, or neither. One that takes either stage does all of a request if no other is left for its prompt.
Like the residency, whose part this is, it has no lock, no clock and no I/O.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from typing import Any

from anvil_mux.config.config import EITHER, STAGES, Config
from anvil_mux.errors import Overloaded
from anvil_mux.routing import pipeline
from anvil_mux.routing.ledger import Ledger, Member
from anvil_mux.routing.routing import Work
from anvil_mux.scheduler.placement import Seat
from anvil_mux.scheduler.steps import Ticket


class Replicas:
    """The backends of one model, of which there are several."""

    def __init__(self, seats: list[Seat], config: Config) -> None:
        self._seats = {seat.name: seat for seat in seats}
        self._staged = any(seat.backend.infer_type in ("prefill", EITHER) for seat in seats)
        self.ledger = _ledger(seats, config)

    def take_one_more(self) -> bool:
        """Whether a request would be leased at once."""
        ready = self._ready()
        if not self._staged:
            return any(not seat.full for seat in ready)
        free = [seat for seat in ready if not seat.full]
        if all(any(_takes(seat, stage) for seat in ready) for stage in STAGES):
            return all(any(_takes(seat, stage) for seat in free) for stage in STAGES)
        return bool(free)

    def lacking(self, now: float) -> list[Seat]:
        """If they may be loaded, one of each stage that none loaded takes; a second, if one takes both."""
        if not self._staged:
            return []
        loaded = [seat for seat in self._seats.values() if seat.state != "stopped"]
        able = [seat for seat in self._seats.values() if seat.state == "stopped" and seat.retry_at <= now]
        found: list[Seat] = []
        for stage in STAGES:
            if not any(_takes(seat, stage) for seat in loaded):
                found += [seat for seat in able if _takes(seat, stage) and seat not in found][-1:]
        if sum([_is_staged(seat) for seat in (*loaded, *found)]) == 1:
            found += [seat for seat in able if _is_staged(seat) and seat not in found][-1:]
        return found

    def route(self, ready: list[Seat], ticket: Ticket, now: float) -> tuple[Seat | None, Seat | None]:
        """Who is charged with the request, and with its prefill if it is asked in two stages.

        None: the policy lets none of ``ready`` take it.
        """
        of = self._stages(ready, staged=ticket.prefill is not None)
        if ticket.prefill and "decode" in of:
            return self._route_stages(of["prefill"], of["decode"], ticket, ticket.prefill, now)
        return self._choose(of["neutral"], ticket, now), None

    def explain(self, work: Work, now: float, *, staged: bool) -> dict[str, list[dict[str, Any]]]:
        """Stage -> what would be made of each replica, were this request to come now; nothing is changed."""
        ready = self._ready()
        of = self._stages(ready, staged=staged) if ready else {"neutral": []}
        if "decode" not in of:
            return {"neutral": self._explain(work, "neutral", of["neutral"], now)}
        decode = self._explain(work._replace(session="", stream=False), "decode", of["decode"], now)
        writes = [self._seats[row["backend"]] for row in decode if row["chosen"]]
        others = [seat for seat in of["prefill"] if seat not in writes]
        if writes and writes[0] in of["prefill"] and all(seat.full for seat in others):
            return {"neutral": self._explain(work, "neutral", writes, now)}
        return {"prefill": self._explain(work, "prefill", others, now), "decode": decode}

    def take_back(self, idle: Seat) -> Iterator[tuple[Ticket, Seat]]:
        """Requests that wait behind others, would be better off at ``idle``, and are no longer charged."""
        return self._uncharged(self.ledger.better_off(idle.name, self._like(idle)))

    def take_from(self, silent: Seat, now: float) -> Iterator[tuple[Ticket, Seat]]:
        """Requests that wait at a stale replica, may go to another, and are no longer charged."""
        return self._uncharged(self.ledger.left_waiting(silent.name, self._like(silent), now))

    def _like(self, one: Seat) -> list[str]:
        """Who is ready for the same stage."""
        kind = one.backend.infer_type
        return [seat.name for seat in self._ready() if seat.backend.infer_type == kind]

    def _uncharged(self, tickets: Iterable[Hashable]) -> Iterator[tuple[Ticket, Seat]]:
        for ticket in tickets:
            assert isinstance(ticket, Ticket)
            assert ticket.backend is not None
            self.ledger.ended(ticket)
            yield ticket, self._seats[ticket.backend]

    def _ready(self) -> list[Seat]:
        return [seat for seat in self._seats.values() if seat.state == "ready"]

    def _stages(self, ready: list[Seat], *, staged: bool) -> dict[str, list[Seat]]:
        """Among whom each stage of a request is to be placed; neutral: all of it at one backend."""
        if not self._staged:
            return {"neutral": ready}
        of = {stage: [seat for seat in ready if _takes(seat, stage)] for stage in STAGES}
        if staged and of["prefill"] and of["decode"] and len(ready) > 1:
            return of
        whole = [seat for seat in ready if seat.backend.infer_type == "neutral"]
        return {"neutral": [*whole, *of["decode"]] or ready}

    def _route_stages(
        self, prefills: list[Seat], decodes: list[Seat], ticket: Ticket, first: Ticket, now: float
    ) -> tuple[Seat | None, Seat | None]:
        whole = ticket.work
        ticket.work = whole._replace(infer_type="decode", session="", stream=False)
        seat = self._choose(decodes, ticket, now)
        others = [each for each in prefills if each is not seat and not each.full]
        if seat and seat in prefills and not others:
            self.ledger.ended(ticket)
            ticket.work = whole
            return self._choose([seat], ticket, now), None
        leads = self._choose(others, first, now) if seat else None
        if leads is None:
            self.ledger.ended(ticket)
            ticket.choice = None
            return None, None
        return seat, leads

    def _choose(self, among: list[Seat], ticket: Ticket, now: float) -> Seat | None:
        names = [seat.name for seat in among if not seat.full]
        if ticket.work.owner in names:
            names = [ticket.work.owner]
        choice = self.ledger.choose(ticket, ticket.work, names, self._failed(now), now)
        ticket.choice = choice
        return self._seats[choice.backend] if choice else None

    def _explain(self, work: Work, kind: str, among: list[Seat], now: float) -> list[dict[str, Any]]:
        names = [seat.name for seat in among if not seat.full]
        work = work._replace(infer_type=kind)
        rows = self.ledger.explain(work, names, self._failed(now), now) if names else []
        told = {row["backend"] for row in rows}
        for seat in self._seats.values():
            if seat.name not in told:
                why = seat.state if seat.state != "ready" else self._left_out(seat, kind)
                rows.append({"backend": seat.name, "chosen": False, "removed_by": why, "metrics": {}})
        return rows

    def _left_out(self, seat: Seat, kind: str) -> str:
        """Why one that is ready is none of those among whom a stage is placed."""
        able = seat.backend.infer_type != "prefill" if kind == "neutral" else _takes(seat, kind)
        if not able:
            return "infer_type"
        return "full" if seat.full else "decode"

    def _failed(self, now: float) -> list[str]:
        """Those that could not be stopped, or loaded lately."""
        return [s.name for s in self._seats.values() if s.state == "stuck" or s.retry_at > now]


def _takes(seat: Seat, stage: str) -> bool:
    return seat.backend.infer_type in (stage, EITHER)


def _is_staged(seat: Seat) -> bool:
    return seat.backend.infer_type in (*STAGES, EITHER)


def _ledger(seats: list[Seat], config: Config) -> Ledger:
    policy = seats[0].backend.routing or config.routing
    backends = [seat.backend for seat in seats]
    members = [Member(b.name, b.infer_type, b.kv_tokens, b.node, b.unit, b.profile) for b in backends]
    made = pipeline.build(policy, config.routing_policies)
    return Ledger(made, members, full=config.routing_mode == "full")


def nobody_takes(model: str) -> Overloaded:
    return Overloaded(
        f"overloaded: the routing policy of {model} lets none of its replicas take more. Try again."
    )
