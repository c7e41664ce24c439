"""The client that asks an engine whether it is ready, whether it is well, and what else we want of it.

Ready means that the engine's own health route answers and that it serves the model we mean, since a health
route alone also answers for another process that happens to have the port. The model is read from the
engine's list of models. Where that list cannot tell (llama.cpp reports its file or alias and answers to any
name), the service's own command says what to expect; where nothing does, a request for one token is the
proof. For Ollama that request is also what loads the weights.

Whoever calls ``await_ready`` has a deadline, a way to learn that the service ended and one to end the wait,
so it fails at once when the engine has died, and never waits for longer than it was told.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import urlsplit

import requests

from anvil_mux.config.config import Backend
from anvil_mux.errors import LoadError, is_shortage
from anvil_mux.host.engine import find_engine, names_told
from anvil_mux.protocol import foreign

FIRST_PAUSE, LONGEST_PAUSE = 0.01, 0.05
PAUSE_SHARE = 0.01
"""Share of a load's time so far by which a look may come too late."""
POLL_TIMEOUT = 5.0
LEAST_TIMEOUT = 0.2
"""Seconds that an answer may take even just before the deadline."""
OTHERS_PATIENCE = 20.0
"""Seconds that the list of models may name another model before that is final."""
MOST_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class Ready:
    pass


@dataclass(frozen=True, slots=True)
class NotYet:
    """Another look is worth it. ``other_process``: a healthy server answers there, for another model.

    ``no_route``: it has no route by which it could be asked for a token.
    """

    why: str
    other_process: bool = False
    no_route: bool = False


@dataclass(frozen=True, slots=True)
class Never:
    """No later look can find it ready."""

    why: str


Readiness = Ready | NotYet | Never


def await_ready(
    backend: Backend,
    url: str,
    *,
    ended: Callable[[], str | None],
    check_cancelled: Callable[[], object] | None = None,
    deadline: float,
    now: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Returns when the engine at ``url`` serves the backend's model; LoadError says why it does not.

    ``ended`` is asked after every look, also after the last one: an answer counts only while our own service
    runs, whoever gave it. ``check_cancelled`` is called a few times a second, and what it raises ends the
    wait.
    """
    begun = now()
    other_since: float | None = None
    pause = FIRST_PAUSE
    with EngineClient(backend, url, now, deadline, check_cancelled) as client:
        while True:
            sight = client.look()
            if how := ended():
                raise LoadError(f"{backend.name} {how} after {now() - begun:.1f} s, before it was ready")
            match sight:
                case Ready():
                    return
                case Never(why):
                    raise LoadError(f"{backend.name} cannot become ready: {why}")
                case NotYet(why, other_process):
                    other_since = (other_since or now()) if other_process else None
            if check_cancelled:
                check_cancelled()
            if other_since is not None and now() - other_since >= OTHERS_PATIENCE:
                raise LoadError(f"{backend.name} cannot become ready: {why}")
            if now() + pause >= deadline:
                raise LoadError(
                    f"{backend.name} was not ready within its load_timeout of "
                    f"{backend.load_timeout:g} s: {why}"
                )
            sleep(pause)
            pause = min(max(pause, PAUSE_SHARE * (now() - begun)), LONGEST_PAUSE)


def answers(
    backend: Backend, url: str, limit: float, now: Callable[[], float] = time.monotonic
) -> bool | None:
    """Whether the engine's health route answers within ``limit`` seconds, as that of a working engine does.

    None: it is silent, or says that it is not well, as one that has much to do may. False: nobody is there to
    answer, since connections are refused, or closed without a word. OSError: nobody can be asked, for want of
    file descriptors here.
    """
    with EngineClient(backend, url, now, now() + limit) as client:
        try:
            return client.is_well(limit) or None
        except requests.Timeout:
            return None
        except requests.RequestException as error:
            if is_shortage(error):
                raise OSError("it cannot be asked now") from error
            return False


@dataclass
class EngineClient:
    """Talks to one engine over one pooled connection; redirects and proxies are not followed."""

    backend: Backend
    url: str
    now: Callable[[], float]
    deadline: float
    check_cancelled: Callable[[], object] | None = None
    """Called a few times a second while it waits for a long answer; what it raises ends that."""
    session: requests.Session = field(default_factory=requests.Session)

    def __post_init__(self) -> None:
        self.engine = find_engine(self.backend.engine)
        self.model = self.backend.served_model or self.backend.model
        self.place = f"port {urlsplit(self.url).port}"
        self.session.trust_env = False
        if key := self.backend.service.api_key:
            self.session.headers["Authorization"] = f"Bearer {key}"

    def __enter__(self) -> EngineClient:
        return self

    def __exit__(self, *exc: object) -> None:
        self.session.close()

    def look(self, *, anew: bool = True) -> Readiness:
        """Whether it is ready. Not ``anew``: it was before, so only its model is to be made sure of."""
        try:
            return (self._health() if anew else None) or self._models() or Ready()
        except requests.Timeout:
            return NotYet(f"{self.place} accepts connections but does not answer")
        except requests.RequestException as error:
            refused = isinstance(error, requests.ConnectionError) and "refused" in str(error)
            what = "nothing listens there yet" if refused else "connections are closed without an answer"
            return NotYet(f"{self.place}: {what}")
        finally:
            # llama-server was seen to stop 0.1 s later if a connection outlived its loading.
            self.session.close()

    def is_well(self, timeout: float) -> bool:
        """Whether an engine that was ready once says that it is well, or needs no route for that."""
        return self._says_well(self.ask("GET", self.engine.alive or self.engine.health, None, timeout)[0])

    def _says_well(self, status: int) -> bool:
        return status < 300 or (status in (404, 405, 501) and not self.engine.must_have_health)

    def _health(self) -> Readiness | None:
        path = self.engine.health
        status, _ = self.ask("GET", path)
        return None if self._says_well(status) else NotYet(f"{self.place}: GET {path} answers {status}")

    def _models(self) -> Readiness | None:
        path = self.engine.models
        status, body = self.ask("GET", path)
        if status in (401, 403):
            return Never(
                f"{self.place}: GET {path} answers {status}: it wants an API key. "
                "Give it with --api-key in the service's command, or not at all"
            )
        if status in (404, 405, 501):
            return self.probe()
        if status >= 300:
            return NotYet(f"{self.place}: GET {path} answers {status}")
        return self._judge(_model_ids(body))

    def model_ids(self) -> list[str]:
        """The ids in its list of models."""
        return _model_ids(self.ask("GET", self.engine.models)[1])

    def _judge(self, ids: list[str]) -> Readiness | None:
        if not ids:
            return NotYet(f"{self.place} lists no model yet")
        if any(self._means(reported) for reported in ids):
            return self.probe() if self.engine.loads_at_first_request else None
        if self.engine.names_file and not names_told(self.backend.service):
            return self.probe()
        reported = ", ".join(ids[:5])
        hint = (
            "" if self.engine.names_file else f" (if that is the engine you mean, set served_model: {ids[0]})"
        )
        return NotYet(
            f"{self.place} answers for model {reported}, not {self.model}{hint}", other_process=True
        )

    def _means(self, reported: str) -> bool:
        if reported in (self.model, f"{self.model}:latest"):
            return True
        told = names_told(self.backend.service) if self.engine.names_file else ()
        return PurePosixPath(reported).name in told

    def probe(self) -> Readiness | None:
        """Ask for one token, embedding or class, whichever route the engine has; None if it was answered."""
        why, routes, no_route = "", 0, True
        for path, body in _probes(self.model):
            status, answer = self.ask("POST", path, body, self.deadline - self.now())
            if status < 300 and not has_error(answer):
                return None
            routes += status not in (404, 405)
            no_route = no_route and self._lacks_route(status, answer)
            words = answer[:200].decode("utf-8", "replace")
            why = why or f"{self.place}: POST {path} answers {status}: {words}"
            if status == 503:
                break
        if routes == 0 and not self.engine.must_have_health:
            return (
                None  # An engine without any text route, such as one for images: its health is all there is.
            )
        return NotYet(why, no_route=no_route)

    def _lacks_route(self, status: int, answer: bytes) -> bool:
        """Whether a refusal is of the route, for any model, and not of what was asked there."""
        if status == 404:
            return self.model.encode() not in answer
        return status in (405, 501) or (status == 400 and b"does not support" in answer)

    def ask(
        self, method: str, path: str, body: dict[str, Any] | None = None, timeout: float = POLL_TIMEOUT
    ) -> tuple[int, bytes]:
        """Return status and first bytes of the answer; the time-out also ends one that drips out."""
        timeout = max(min(timeout, self.deadline - self.now()), LEAST_TIMEOUT)
        if self.check_cancelled is None or timeout <= POLL_TIMEOUT:
            return self._ask(method, path, body, timeout)
        # A load may take as long as its answer: the thread is left behind when nobody wants it any more.
        asked = Future[tuple[int, bytes]]()
        run = partial(_answer, asked, partial(self._ask, method, path, body, timeout))
        threading.Thread(target=run, name=f"ask-{self.backend.name}", daemon=True).start()
        while wait([asked], LONGEST_PAUSE).not_done:
            self.check_cancelled()
        return asked.result()

    def _ask(self, method: str, path: str, body: dict[str, Any] | None, timeout: float) -> tuple[int, bytes]:
        give_up = time.monotonic() + timeout
        answer = bytearray()
        with self.session.request(
            method, self.url + path, json=body, timeout=timeout, allow_redirects=False, stream=True
        ) as response:
            for chunk in response.iter_content(256):
                answer += chunk
                if len(answer) > MOST_BYTES:
                    break
                if time.monotonic() > give_up:
                    raise requests.Timeout(path)
            return response.status_code, bytes(answer)


def _answer(asked: Future[tuple[int, bytes]], ask: Callable[[], tuple[int, bytes]]) -> None:
    try:
        asked.set_result(ask())
    except Exception as error:
        asked.set_exception(error)


def has_error(answer: bytes) -> bool:
    """Whether an answer is the description of an error, whatever its status."""
    try:
        found = foreign.read(answer)
    except ValueError:
        return False
    return isinstance(found, dict) and bool(found.get("error") or found.get("object") == "error")


def _model_ids(body: bytes) -> list[str]:
    """The ids in a list of models, or in the description of the one loaded model."""
    try:
        found = foreign.read(body)
    except ValueError:
        return []
    if not isinstance(found, dict):
        return []
    entries = found.get("data", [found])
    if not isinstance(entries, list):
        return []
    return [entry["id"] for entry in entries if isinstance(entry, dict) and isinstance(entry.get("id"), str)]


def _probes(model: str) -> tuple[tuple[str, dict[str, Any]], ...]:
    message = {"role": "user", "content": "Hi"}
    return (
        ("/v1/chat/completions", {"model": model, "messages": [message], "max_tokens": 1}),
        ("/v1/completions", {"model": model, "prompt": "Hi", "max_tokens": 1}),
        ("/v1/embeddings", {"model": model, "input": "Hi"}),
        ("/v1/rerank", {"model": model, "query": "Hi", "documents": ["Hi"]}),
        ("/pooling", {"model": model, "input": "Hi"}),
        ("/classify", {"model": model, "input": "Hi"}),
    )
