"""The last head that one side of one connection sent, and what it came to.

Clients and engines send the same head again and again, but for the number in its Content-Length line. If a
head comes again, two comparisons find its end and tell all of it: reading takes 2 us instead of 15 to 22. A
new connection begins with what is known of one that has ended: who opens one for each request sends the same
head on each. Nothing is kept but the bytes and what they were read as; what a head means is for each request
to decide. (An answer's head is read with the method that was asked by: one to HEAD is neither kept nor asked
for here.)
"""

from __future__ import annotations

import re
from typing import Any, Generic, TypeVar

from anvil_mux.protocol.http1 import MAX_DIGITS, Request, Response

MAX_REMEMBERED = 4 * 1024
"""The longest head that is remembered."""

_LENGTH_LINE = re.compile(rb"\r\nContent-Length: ([0-9]{1,15})(?=\r\n)", re.IGNORECASE)

_Message = TypeVar("_Message", Request, Response)
_new = tuple.__new__
"""The call inside a NamedTuple's own constructor, in half its time."""


class LastHead(Generic[_Message]):
    """Used by the thread that the connection belongs to."""

    __slots__ = (
        "_after",
        "_before",
        "_fields",
        "_kind",
        "_limit",
        "_may_come_again",
        "_number",
        "end",
    )

    def __init__(self) -> None:
        self._before = self._after = b""
        """The head around the number."""
        self._number = self._limit = 0
        """The index of the number, and the one at which the head must have ended."""
        self._fields: tuple[Any, ...] = ()
        """The message without its length, the last field."""
        self._may_come_again = False
        self._kind: type[_Message]
        self.end = 0
        """The index just past the head that came again."""

    def again(self, buffer: bytes) -> _Message | None:
        """The head that ``buffer`` begins with, if it is the last one but for its length."""
        if not self._may_come_again or not buffer.startswith(self._before):
            return None
        line_end = buffer.find(self._after, self._number, self._limit)
        length = buffer[self._number : line_end]
        if line_end < 0 or not length.isdigit():
            return None
        self.end = line_end + len(self._after)
        return _new(self._kind, (*self._fields, int(length)))

    def remember(self, head: bytes, message: _Message) -> None:
        """Keep ``head``, which was read as ``message``.

        It can come again only if that line is all that says where the body ends (which the message's length
        says: with another framing it has none, or was refused).
        """
        self._may_come_again = False
        line = _LENGTH_LINE.search(head)
        has_body = isinstance(message, Request) or message.body == "length"
        if line is None or message.length is None or not has_body or len(head) > MAX_REMEMBERED:
            return
        self._kind, self._fields = type(message), message[:-1]
        self._may_come_again = True
        self._number, line_end = line.span(1)
        self._before, self._after = head[: self._number], head[line_end:]
        self._limit = self._number + MAX_DIGITS + len(self._after)

    def copy(self) -> LastHead[_Message]:
        """The same for another connection; this one's has ended."""
        made: LastHead[_Message] = LastHead()
        if self._may_come_again:
            for name in LastHead.__slots__:
                setattr(made, name, getattr(self, name))
        return made
