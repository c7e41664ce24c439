"""The queue of one model: the requests that wait for it, in order, and whose turn it is.

A queue is overdue some seconds, its bound, after its first request came. The bound is fixed when the queue
begins. Where a model takes only so many requests at once its queue is admitted in parts, and senders take
turns (``FairQueue``): a sender of a hundred requests at once delays only itself; the first request of another
waits for one of them, not for a hundred. A sender that comes back after its last request was taken comes
last. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

from anvil_mux.scheduler.steps import Ticket

_Ticket = TypeVar("_Ticket", bound=Hashable)


class FairQueue(Generic[_Ticket]):
    """The tickets that wait, in the order in which they are to be taken: one of each sender, in rounds."""

    def __init__(self) -> None:
        self._waiting: dict[Hashable, dict[_Ticket, None]] = {}
        """Sender -> tickets, the oldest first; the senders in the order of their turns."""

    def join(self, sender: Hashable, ticket: _Ticket) -> None:
        self._waiting.setdefault(sender, {})[ticket] = None

    def leave(self, sender: Hashable, ticket: _Ticket) -> None:
        """Take a ticket out, if it is there; no turn changes."""
        tickets = self._waiting.get(sender, {})
        tickets.pop(ticket, None)
        if not tickets:
            self._waiting.pop(sender, None)

    def take(self, fits: Callable[[_Ticket], bool]) -> _Ticket | None:
        """Take out the next ticket that ``fits``; its sender's next turn comes after all others'."""
        found = (
            (sender, each) for sender, tickets in self._waiting.items() for each in tickets if fits(each)
        )
        sender, ticket = next(found, (None, None))
        if ticket is None:
            return None
        tickets = self._waiting.pop(sender)
        del tickets[ticket]
        if tickets:
            self._waiting[sender] = tickets
        return ticket

    def clear(self) -> None:
        self._waiting.clear()


class ModelQueue:
    """The requests that wait for one model."""

    __slots__ = ("_turns", "bound", "left", "load_seconds", "tickets")

    def __init__(self, *, limited: bool = False) -> None:
        """``limited``: the queue is admitted in parts, as its backends take only so many at once."""
        self.tickets: dict[Ticket, None] = {}
        """The tickets that wait, oldest first."""
        self.bound = math.inf
        """After how many seconds it is overdue."""
        self.load_seconds = 0.0
        """The time that the load of its model was expected to take when it began."""
        self.left = -math.inf
        """When a backend of a limited model last ceased to be ready: no request waited for a load before."""
        self._turns = FairQueue[Ticket]() if limited else None

    def __iter__(self) -> Iterator[Ticket]:
        return iter(self.tickets)

    def __len__(self) -> int:
        return len(self.tickets)

    def __contains__(self, ticket: object) -> bool:
        return ticket in self.tickets

    def __repr__(self) -> str:
        return f"<ModelQueue {[ticket.id for ticket in self.tickets]}>"

    @property
    def limited(self) -> bool:
        """Whether it may have requests although its model is resident."""
        return self._turns is not None

    @property
    def first(self) -> Ticket:
        return next(iter(self.tickets))

    @property
    def since(self) -> float:
        """Since when the first of its requests has waited for a load."""
        return max(next(iter(self.tickets)).since, self.left)

    @property
    def overdue_at(self) -> float:
        """When its swap begins, whatever the policy says."""
        return self.since + self.bound

    def join(self, ticket: Ticket) -> None:
        self.tickets[ticket] = None
        if self._turns is not None and ticket.leases:
            self._turns.join(ticket.sender, ticket)

    def leave(self, ticket: Ticket) -> None:
        del self.tickets[ticket]
        if self._turns is not None:
            self._turns.leave(ticket.sender, ticket)

    def take(self, fits: Callable[[Ticket], bool]) -> Ticket | None:
        """Take out the next ticket by turns that ``fits``. Of a limited model."""
        assert self._turns is not None
        ticket = self._turns.take(fits)
        if ticket is not None:
            del self.tickets[ticket]
        return ticket

    def clear(self) -> None:
        self.tickets.clear()
        if self._turns is not None:
            self._turns.clear()

    def go_on(self, *, limited: bool, most: float) -> None:
        """Go on under a bound of at most ``most`` seconds, ``limited`` or not."""
        if self.tickets:
            self.bound = min(self.bound, most)
        if limited != self.limited:
            self._turns = FairQueue[Ticket]() if limited else None
            for ticket in self.tickets:
                self.join(ticket)
