"""The client that asks an engine whether it is ready, whether it is well, and what else we want of it.

``Engine`` has what differs between families of engines; engines.py has the families.

Ready means that the engine's own health route answers and that it serves the model we mean, since a health
route alone also answers for another process that happens to have the port. The model is read from the
engine's list of models. Where that list cannot tell (llama.cpp reports its file or alias and answers to any
name), the service's own command says what to expect; where nothing does, a request for one token is the
proof. For Ollama that request is also what loads the weights.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from pathlib import PurePosixPath
from typing import Any, ClassVar, Protocol
from urllib.parse import urlsplit

import requests

from anvil_mux.config.config import Backend
from anvil_mux.config.service import USUAL_PORT, Service, flag_values
from anvil_mux.errors import BackendError
from anvil_mux.protocol import foreign

LONGEST_PAUSE = 0.05
"""Seconds between two looks at whether an answer has come, or is still wanted."""
POLL_TIMEOUT = 5.0
LEAST_TIMEOUT = 0.2
"""Seconds that an answer may take even just before the deadline."""
MOST_BYTES = 4 << 20
"""The most that is read of an answer: a list of thousands of models, a card with its template and licence."""


@dataclass(frozen=True, slots=True)
class Engine:
    """One engine family: where it listens, when it is ready, how it sleeps, what is never forwarded."""

    port: int = USUAL_PORT
    """The port that it listens on unless another is configured."""
    health: str = "/health"
    must_have_health: bool = True
    """Whether that route must be there; if not, a 404 says nothing, and the list of models decides."""
    alive: str = ""
    """The route that is asked once it was ready, where the other one costs it work; "": the same."""
    slots: str = ""
    """The route that lists what it works on, of an engine that may never end if it is told to before it has
    noticed that the client of that has left.
    """
    models: str = "/v1/models"
    describes: tuple[str, ...] = ("GET /v1/models",)
    """The questions that it is asked once, after a load, for its model card; %s is the model's name."""
    enabled_by: tuple[tuple[str, str], ...] = ()
    """Options and variables that make a model able to do something of which those answers say nothing."""
    names_file: bool = False
    """Whether its list names the model file (or alias), and it answers to any model name."""
    loads_at_first_request: bool = False
    at_once: int = 256
    """How many answers it makes at a time, unless it is told otherwise."""
    at_once_words: tuple[str, ...] = ()
    """The options and the variable of its environment that tell it otherwise."""
    idle_connections: int = 256
    """The most that are kept to it; few, where each holds one of its threads until a time-out ends it."""
    sleeps: SleepApi | None = None
    """How it is told to sleep and to wake; None: it cannot."""
    control: tuple[str, ...] = ()
    """Routes that steer the engine itself, never forwarded; a trailing slash means everything below."""
    shown: tuple[str, ...] = ("/health", "/metrics", "/version", "/v1/models")
    """Routes that may be read below /upstream/, besides those of models."""
    has_page: bool = False
    """Whether it has a page for people at its root."""
    acts_of_page: tuple[tuple[str, str], ...] = ()
    """The methods and routes by which its own page does more than read, besides those of models."""
    headers: tuple[str, ...] = ()
    """The lower-case names of headers that it reads, besides those that every engine is sent."""

    def steers(self, path: str) -> bool:
        """Whether ``path`` is one of its control routes."""
        return any(path == route or (route[-1] == "/" and path.startswith(route)) for route in self.control)


class SleepApi(Protocol):
    """The way in which one engine sleeps and wakes."""

    levels: ClassVar[tuple[int, ...]] = (1,)
    """1 keeps the weights in host memory, 2 drops them and reads them anew from disk."""
    is_silent: ClassVar[bool] = False
    """Whether it cannot say whether it sleeps."""

    def sleep(self, client: EngineClient, level: int) -> None: ...
    def wake(self, client: EngineClient, level: int) -> None: ...

    def is_asleep(self, client: EngineClient) -> bool | None:
        """Whether the engine sleeps; None where it cannot say."""


@dataclass(frozen=True, slots=True)
class NotReady:
    """Why an engine is not ready."""

    why: str
    is_final: bool = False
    """Whether no later look can find it ready."""
    other_process: bool = False
    """Whether a healthy server answers there, for another model."""
    no_route: bool = False
    """Whether it has no route by which it could be asked for a token."""


@dataclass
class EngineClient:
    """Talks to one engine over one pooled connection; redirects and proxies are not followed.

    ``ask`` raises what ``requests`` does; ``reply_to``, ``tell`` and ``get`` wait until the deadline, and
    raise BackendError.
    """

    engine: Engine
    backend: Backend
    url: str
    now: Callable[[], float]
    deadline: float
    check_cancelled: Callable[[], object] | None = None
    """Called a few times a second while it waits for a long answer; what it raises ends that."""
    session: requests.Session = field(default_factory=requests.Session)

    def __post_init__(self) -> None:
        self.model = self.backend.served_model or self.backend.model
        self.place = f"port {urlsplit(self.url).port}"
        self.session.trust_env = False
        if key := self.backend.service.api_key:
            self.session.headers["Authorization"] = f"Bearer {key}"

    def __enter__(self) -> EngineClient:
        return self

    def __exit__(self, *exc: object) -> None:
        self.session.close()

    def look(self, *, anew: bool = True) -> NotReady | None:
        """Why it is not ready; None: it is. Not ``anew``: it was before, and only its model is asked for."""
        try:
            return (self._health() if anew else None) or self._models()
        except requests.Timeout:
            return NotReady(f"{self.place} accepts connections but does not answer")
        except requests.RequestException as error:
            refused = isinstance(error, requests.ConnectionError) and "refused" in str(error)
            what = "nothing listens there yet" if refused else "connections are closed without an answer"
            return NotReady(f"{self.place}: {what}")
        finally:
            # llama-server was seen to stop 0.1 s later if a connection outlived its loading.
            self.session.close()

    def is_well(self, timeout: float) -> bool:
        """Whether an engine that was ready once says that it is well, or needs no route for that."""
        return self._says_well(self.ask("GET", self.engine.alive or self.engine.health, None, timeout)[0])

    def _says_well(self, status: int) -> bool:
        return status < 300 or (status in (404, 405, 501) and not self.engine.must_have_health)

    def _health(self) -> NotReady | None:
        path = self.engine.health
        status, _ = self.ask("GET", path)
        return None if self._says_well(status) else NotReady(f"{self.place}: GET {path} answers {status}")

    def _models(self) -> NotReady | None:
        path = self.engine.models
        status, body = self.ask("GET", path)
        if status in (401, 403):
            return NotReady(
                f"{self.place}: GET {path} answers {status}: it wants an API key. "
                "Give it with --api-key in the service's command, or not at all",
                is_final=True,
            )
        if status in (404, 405, 501):
            return self.probe()
        if status >= 300:
            return NotReady(f"{self.place}: GET {path} answers {status}")
        return self._judge(model_ids(foreign.read_or_none(body)))

    def model_ids(self) -> list[str]:
        """The ids in its list of models."""
        return model_ids(foreign.read_or_none(self.ask("GET", self.engine.models)[1]))

    def _judge(self, ids: list[str]) -> NotReady | None:
        flaw = self._lacks_model(ids)
        if flaw and self.engine.names_file and self._is_router():
            why = (
                f"{self.place}: llama-server was started without a model, as a router, and does not list "
                f"{self.model}: name one in its command (-m FILE, -hf REPO)"
            )
            return NotReady(why, is_final=True)
        return flaw

    def _is_router(self) -> bool:
        """Whether it is a llama-server that loads models on request."""
        match foreign.read_or_none(self.ask("GET", "/props")[1]):
            case {"role": "router"}:
                return True
        return False

    def _lacks_model(self, ids: list[str]) -> NotReady | None:
        if not ids:
            return NotReady(f"{self.place} lists no model yet")
        if any(self._means(reported) for reported in ids):
            return self.probe() if self.engine.loads_at_first_request else None
        if self.engine.names_file and not configured_names(self.backend.service):
            return self.probe()
        reported = [each[:200] for each in ids[:5]]
        why = f"{self.place} answers for model {', '.join(reported)}, not {self.model}"
        if not self.engine.names_file:
            why += f" (if that is the engine you mean, set served_model: {reported[0]})"
        return NotReady(why, other_process=True)

    def _means(self, reported: str) -> bool:
        if reported in (self.model, f"{self.model}:latest"):
            return True
        names = configured_names(self.backend.service) if self.engine.names_file else ()
        return PurePosixPath(reported).name in names

    def probe(self) -> NotReady | None:
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
            return None  # it has no text route, such as one for images: its health is all there is
        return NotReady(why, no_route=no_route)

    def _lacks_route(self, status: int, answer: bytes) -> bool:
        """Whether a refusal is of the route, for any model, and not of what was asked there."""
        if status == 404:
            return self.model.encode() not in answer
        return status in (405, 501) or (status == 400 and b"does not support" in answer)

    def ask(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        timeout: float = POLL_TIMEOUT,
    ) -> tuple[int, bytes]:
        """Return status and first bytes of the answer; the time-out also ends one that drips out."""
        timeout = max(min(timeout, self.deadline - self.now()), LEAST_TIMEOUT)
        give_up = time.monotonic() + timeout
        asked = Future[tuple[int, bytes]]()
        run = partial(_answer, asked, partial(self._ask, method, path, body, timeout))
        # The time-out of a socket begins anew with each byte, and a load may take as long as its answer: the
        # thread is left behind when its time has passed, or nobody wants the answer any more.
        try:
            threading.Thread(target=run, name=f"ask-{self.backend.name}", daemon=True).start()
        except RuntimeError:  # none can be started
            run()
        while wait([asked], LONGEST_PAUSE if self.check_cancelled else timeout).not_done:
            if time.monotonic() >= give_up:
                raise requests.Timeout(path)
            if self.check_cancelled:
                self.check_cancelled()
        return asked.result()

    def _ask(self, method: str, path: str, body: dict[str, Any] | None, timeout: float) -> tuple[int, bytes]:
        give_up = time.monotonic() + timeout
        answer = bytearray()
        with self.session.request(
            method, self.url + path, json=body, timeout=timeout, allow_redirects=False, stream=True
        ) as response:
            for chunk in response.iter_content(1 << 16):
                answer += chunk
                if len(answer) > MOST_BYTES:
                    break
                if time.monotonic() > give_up:
                    raise requests.Timeout(path)
            return response.status_code, bytes(answer)

    # What is asked of one that was ready

    def reply_to(self, method: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, bytes]:
        """Return status and first bytes of the answer; BackendError if there is none by the deadline."""
        try:
            return self.ask(method, path, body, self.deadline - self.now())
        except requests.RequestException as error:
            raise self.complaint(f"{method} {path}", error) from None

    def tell(self, path: str, body: dict[str, Any] | None = None, *, may_lack: bool = False) -> None:
        """POST; anything but success is a BackendError. ``may_lack``: an engine without the route is fine."""
        status, answer = self.reply_to("POST", path, body)
        if not (may_lack and status in (404, 405)):
            self.check(path, status, answer)

    def check(self, path: str, status: int, answer: bytes) -> None:
        """BackendError unless what was answered to a POST is success."""
        if status >= 300 or has_error(answer):
            words = answer[:200].decode("utf-8", "replace")
            raise BackendError(f"{self.place}: POST {path} answers {status}: {words}")

    def get(self, path: str) -> Any:
        """The JSON that it answers, None if it has no such route."""
        status, answer = self.reply_to("GET", path)
        if status in (404, 405, 501):
            return None
        if status >= 300:
            raise BackendError(f"{self.place}: GET {path} answers {status}")
        try:
            return foreign.read(answer)
        except ValueError:
            raise self.nonsense(path, answer) from None

    def complaint(self, what: str, error: requests.RequestException) -> BackendError:
        """The error to raise where nothing was answered to ``what``."""
        if isinstance(error, requests.Timeout):
            return BackendError(f"{self.place}: {what} was not answered in time")
        refused = "nothing listens there" if "refused" in str(error) else "the connection was closed"
        return BackendError(f"{self.place}: {what}: {refused}")

    def nonsense(self, path: str, answer: object) -> BackendError:
        """The error to raise where what it answers to a GET makes no sense."""
        return BackendError(f"{self.place}: GET {path} answers nonsense: {str(answer)[:100]}")


def _answer(asked: Future[tuple[int, bytes]], ask: Callable[[], tuple[int, bytes]]) -> None:
    try:
        asked.set_result(ask())
    except Exception as error:
        asked.set_exception(error)


def has_error(answer: bytes) -> bool:
    """Whether an answer is the description of an error, whatever its status."""
    found = foreign.read_or_none(answer)
    return isinstance(found, dict) and bool(found.get("error") or found.get("object") == "error")


def model_ids(answer: object) -> list[str]:
    """The ids in a list of models, or in the description of the one loaded model; [] in anything else."""
    match answer:
        case {"data": list(entries)}:
            return [
                each["id"] for each in entries if isinstance(each, dict) and isinstance(each.get("id"), str)
            ]
        case {"id": str(id)}:
            return [id]
    return []


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


def configured_names(service: Service) -> frozenset[str]:
    """The file name and aliases that llama-server was started with, as it will report them."""
    environment = dict(service.environment)
    files = [*flag_values(service.command, "-m", "--model"), environment.get("LLAMA_ARG_MODEL")]
    aliases = [*flag_values(service.command, "-a", "--alias"), environment.get("LLAMA_ARG_ALIAS")]
    names = {PurePosixPath(file).name for file in files if file}
    for alias in aliases:
        names.update(PurePosixPath(name.strip()).name for name in (alias or "").split(","))
    return frozenset(names - {""})
