"""One request's question and answer, for people who look for a mistake: see captures.py.

What looks like a key is replaced before anything is kept. Heads are not kept, nor are forms (audio, images)
and what is said through a websocket.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from anvil_mux.config import keys
from anvil_mux.protocol import http1
from anvil_mux.proxy.asked import AskedBody
from anvil_mux.proxy.spool import Spool
from anvil_mux.telemetry.accesslog import Served

BODY_BYTES = 64 << 10
"""Bytes of a question, and of an answer, that are kept."""
HIDDEN = "***"

_SECRET = re.compile(
    r'("[\w.-]*(?:api[_-]?key|authorization|password|passwd|secret|(?:access|auth|bearer)[_-]?token)"\s*:\s*)'
    r'"(?:[^"\\]|\\.)*(?:"|\\?$)',
    re.I,
)
"""The member of a JSON object whose value is a secret by its name; the text may end within it."""
_TOKEN = re.compile(r"\b(Bearer\s+)[\w.~+/-]{8,}=*|\b(sk-|hf_|ghp_)[\w-]{8,}", re.I)


class Capture:
    """One request's question and answer, while it is served. Used by the request's thread."""

    __slots__ = ("_answer", "_left", "_question", "is_form", "is_question_cut")

    def __init__(self) -> None:
        self._question = b""
        self.is_form = self.is_question_cut = False
        self._answer: list[bytes] = []
        self._left = BODY_BYTES + 1

    def asked(self, body: AskedBody) -> None:
        self.is_form = isinstance(body, Spool)
        if not isinstance(body, Spool):
            self._question, self.is_question_cut = bytes(body[:BODY_BYTES]), len(body) > BODY_BYTES

    def said(self, data: bytes) -> None:
        """Take more of the answer's content."""
        if self._left > 0 and data:
            self._answer.append(bytes(data[: self._left]))
            self._left -= len(self._answer[-1])

    def kept(self, request: http1.Request, record: Served) -> dict[str, Any]:
        """Return the parts that are kept of it, without keys."""
        shown = list(keys.shown(request.fields))
        answer = b"".join(self._answer)
        return {
            "question": "" if self.is_form else redacted(self._question, shown),
            "question_is_cut": self.is_question_cut,
            "question_is_form": self.is_form,
            "answer": redacted(answer[:BODY_BYTES], shown),
            "answer_is_cut": len(answer) > BODY_BYTES,
            "record": record,
        }


def redacted(body: bytes, shown: Iterable[bytes]) -> str:
    """A body as text, without what looks like a key; ``shown``: keys that the request's head has."""
    text = body.decode("utf-8", "replace")
    for key in shown:
        if len(key) >= keys.SHORTEST:
            text = text.replace(key.decode("latin-1"), HIDDEN)
    text = _SECRET.sub(rf'\1"{HIDDEN}"', text)
    return _TOKEN.sub(lambda found: f"{found[1] or found[2]}{HIDDEN}", text)
