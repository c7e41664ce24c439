"""Requests that show that a backend answers, as somebody sends them who has no anvil-mux."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from anvil_mux.config.config import Backend
from anvil_mux.errors import BackendError
from anvil_mux.proxy.connections import Address

ASK_PAUSE = 0.01
"""Seconds between two attempts to get an answer."""
LOOK_SECONDS = 1.0
"""Seconds between two looks at whether the backend has ended."""
CONNECT_SECONDS = 1.0


class Asker:
    """Asks backends for as little as they answer; the first question that one answers is its own."""

    def __init__(self) -> None:
        self._known: dict[str, SampleQuestion] = {}

    def ask(self, backend: Backend, address: Address) -> float:
        """The moment of the answer's first byte."""
        known = self._known.get(backend.name)
        for question in [known] if known else QUESTIONS:
            status, moment = question.ask(backend, address)
            if status < 300:
                self._known[backend.name] = question
                return moment
        raise BackendError(f"{backend.name} answers {status} to POST {question.path}")

    def question(self, backend: Backend) -> SampleQuestion:
        """The one that it was found to answer."""
        return self._known[backend.name]

    def ask_until_answered(
        self, backend: Backend, address: Address, ended: Callable[[Backend], str | None]
    ) -> float:
        """The moment of the first answer's first byte; ``ended`` says how the backend ended, if it has."""
        begun = looked = time.monotonic()
        while True:
            try:
                return self.ask(backend, address)
            except BackendError:
                now = time.monotonic()
                if now - begun > backend.load_timeout:
                    raise
            if now - looked > LOOK_SECONDS:
                looked = now
                if how := ended(backend):
                    raise BackendError(f"{backend.name} {how} before it answered")
            time.sleep(ASK_PAUSE)


class SampleQuestion(NamedTuple):
    """A request whose answer's first byte counts as the first token."""

    path: str
    asks: Mapping[str, object]

    def ask(self, backend: Backend, address: Address) -> tuple[int, float]:
        """The answer's status, and when the first byte of its body came."""
        connection = http.client.HTTPConnection(*address, timeout=CONNECT_SECONDS)
        try:
            connection.connect()
            connection.sock.settimeout(backend.load_timeout)
            headers = {**_headers(backend), "Connection": "close"}
            connection.request("POST", self.path, self._body(backend), headers)
            response = connection.getresponse()
            response.read(1)
            moment = time.monotonic()
            response.read()
            return response.status, moment
        except (OSError, http.client.HTTPException) as error:
            raise BackendError(f"{backend.name} does not answer POST {self.path}: {error!r}") from None
        finally:
            connection.close()

    def whole(self, tokens: int) -> SampleQuestion:
        """The same for an answer of so many tokens, if it is for text, and in one piece.

        llama-server closes the connection behind a stream, so only such an answer shows what idle ones do.
        """
        more = {"max_tokens": tokens, "stream": False} if "max_tokens" in self.asks else {}
        return self._replace(asks={**self.asks, **more})

    def written(self, backend: Backend) -> tuple[bytes, bytes]:
        """The lines of the head, and the body, for a connection that may be used again."""
        fields = {"Host": backend.name, **_headers(backend)}
        lines = [f"POST {self.path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items())]
        return "".join(f"{line}\r\n" for line in lines).encode(), self._body(backend).encode()

    def _body(self, backend: Backend) -> str:
        return json.dumps({"model": backend.served_model, **self.asks})


def _headers(backend: Backend) -> dict[str, str]:
    key = backend.service.api_key
    return {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}


QUESTIONS = (
    SampleQuestion(
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1, "stream": True},
    ),
    SampleQuestion("/v1/completions", {"prompt": "Hi", "max_tokens": 1, "stream": True}),
    SampleQuestion("/v1/embeddings", {"input": "Hi"}),
    SampleQuestion("/v1/rerank", {"query": "Hi", "documents": ["Hi"]}),
)
