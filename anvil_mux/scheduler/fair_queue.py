"""Whose turn it is in a queue that is admitted in parts: one request of each sender, round after round.

Who sends a hundred requests at once makes nobody wait for them but himself: another's first request waits for
one of his, not for a hundred. A sender who comes back after his last request was taken comes last. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

_Ticket = TypeVar("_Ticket", bound=Hashable)


class FairQueue(Generic[_Ticket]):
    """The tickets that wait, in the order in which they are to be taken."""

    def __init__(self) -> None:
        self._waiting: dict[Hashable, dict[_Ticket, None]] = {}
        """Sender -> tickets, the oldest first; the senders in the order of their turns."""

    def join(self, sender: Hashable, ticket: _Ticket) -> None:
        self._waiting.setdefault(sender, {})[ticket] = None

    def leave(self, sender: Hashable, ticket: _Ticket) -> None:
        """It waits no longer, if it did; nobody's turn changes."""
        tickets = self._waiting.get(sender, {})
        tickets.pop(ticket, None)
        if not tickets:
            self._waiting.pop(sender, None)

    def take(self, fits: Callable[[_Ticket], bool]) -> _Ticket | None:
        """The next that ``fits``, which then has left; its sender's next turn comes after all others'."""
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
