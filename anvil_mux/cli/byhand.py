"""A swap by hand, without anvil-mux: Docker's commands, and a request that is answered."""

from __future__ import annotations

import http.client
import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from anvil_mux.config.config import Backend
from anvil_mux.errors import BackendError
from anvil_mux.host import compose
from anvil_mux.host.container import base_url
from anvil_mux.host.docker import Engine
from anvil_mux.host.endpoint import find_endpoint
from anvil_mux.host.engine import api_key, listen_port
from anvil_mux.proxy.connections import Address

ASK_PAUSE = 0.01
"""Seconds between two attempts to get an answer."""
CONNECT_SECONDS = 1.0
DOCKER_SECONDS = 60.0


class Hand(Protocol):
    """A hand that stops and starts a service; every swap.Runtime is one."""

    def stop(self, backend: Backend) -> None: ...
    def start(self, backend: Backend) -> str: ...


class Docker:
    """Docker's own commands, as a person types them who knows the container.

    Its address is looked up while it loads, so that costs nothing.
    """

    def __init__(self, project: str) -> None:
        self._project = project
        self._engine = Engine(find_endpoint(os.environ))
        self._ids: dict[str, str] = {}

    def stop(self, backend: Backend) -> None:
        grace = math.ceil(backend.stop_timeout)
        self._run(["docker", "stop", "-t", str(grace), self._id(backend)], grace)

    def start(self, backend: Backend) -> str:
        id = self._id(backend)
        self._run(["docker", "start", id])
        container = self._engine.inspect(id)
        url = base_url(container, listen_port(backend)) if container else None
        if url is None:
            raise BackendError(f"service {backend.name} has no address")
        return url

    def _id(self, backend: Backend) -> str:
        if backend.name not in self._ids:
            listed = self._engine.containers(self._project, backend.service_name)
            found = [container for id, _ in listed if (container := self._engine.inspect(id))]
            scaled = backend.service.scale > 1
            fit = [each.id for each in found if not scaled or each.number == backend.service.number]
            if not fit:
                raise BackendError(f"service {backend.name} has no container")
            self._ids[backend.name] = fit[0]
        return self._ids[backend.name]

    def _run(self, argv: Sequence[str], grace: float = 0.0) -> None:
        done = compose.run(argv, grace + DOCKER_SECONDS, env=os.environ)
        if done.code:
            raise BackendError(f"`{compose.shown(argv)}` failed: {done.last_line}")


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

    def ask_until_answered(self, backend: Backend, address: Address) -> float:
        deadline = time.monotonic() + backend.load_timeout
        while True:
            try:
                return self.ask(backend, address)
            except BackendError:
                if time.monotonic() > deadline:
                    raise
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
        """Head and body, for a connection that may be used again."""
        body = self._body(backend).encode()
        fields = {"Host": backend.name, **_headers(backend), "Content-Length": str(len(body))}
        lines = [f"POST {self.path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items())]
        return "".join(f"{line}\r\n" for line in (*lines, "")).encode(), body

    def _body(self, backend: Backend) -> str:
        return json.dumps({"model": backend.served_model, **self.asks})


def _headers(backend: Backend) -> dict[str, str]:
    key = api_key(backend.service)
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
