"""Scripts, which are the requests of a workload, an event log or a trace of prompts for a real server; and
their player, with what a client of an OpenAI-compatible address sees of each request.

A ``Script`` is fixed before it is played, so that every server that it is played against is sent the same.
Moments are seconds from the beginning of the run; ``speed`` divides those of the workload, and the pauses of
its sessions, but not what loads and answers take. A workload says how long a request is served, and a server
can only be told how long an answer is. So the seconds become tokens, at the pace of the model's engine. A
trace of prompts says both lengths.

The text of a prompt is made of random words of four bytes, a space among them, that nobody has seen, but for
the parts that a trace says are shared: a block of a trace is always the same words, by its id. How many
tokens of the model's tokenizer a word is, the engine's ``usage`` says in the warm-up; until then a token is
four bytes.

Each request is sent at its moment, whatever else happens. The thread that plays waits for the next moment and
begins a thread for each request, so a slow answer holds up nobody: an open loop. What follows upon an answer
(the next request of a session) is due when the script says. ``most`` bounds how many are under way; one that
is due beyond that is sent late, and its times count from when it was due.

A request is a streamed completion of a fixed length (``ignore_eos`` makes vLLM, SGLang and llama.cpp go on to
the end; others ignore it). Each is sent on a connection of its own. The first token is the first event with
text in it: servers also send events without any, so that clients see that they are there.
"""

from __future__ import annotations

import http.client
import json
import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from heapq import heappop, heappush
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from anvil_mux.clock import Clock
from anvil_mux.errors import MuxError
from anvil_mux.lab.simulate import Arrival
from anvil_mux.lab.workload import (
    SHIPPED,
    SHIPPED_TRACES,
    BadWorkload,
    Prompt,
    SessionQueues,
    Trace,
    Workload,
    find_among,
    objects,
    read,
    read_trace,
)
from anvil_mux.protocol import foreign
from anvil_mux.protocol.tokens import tokens_in
from anvil_mux.serve.remote import NotRunning

PROMPT_TOKENS = 32
"""The input of a request whose workload does not tell its length."""
BLOCKS_KEPT = 1 << 15


class BadScript(MuxError):
    """The traffic cannot be played against this server; says what to do."""


FollowPlayed = Callable[[Prompt, float], Iterable[Prompt]]
"""The requests that the end of one leads to, and when they are due."""


@dataclass(frozen=True)
class Script:
    """The requests of one run."""

    name: str
    models: tuple[str, ...]
    """The models that it asks for, by the server's names."""
    first: tuple[Prompt, ...]
    """The requests whose moments are known."""
    follow: Callable[[], FollowPlayed]
    """Makes a fresh ``follow`` for one run: the requests that depend on answers."""
    block_tokens: int = 1
    clients: tuple[str, ...] = ()
    """The sessions that ask again and again until the end, so that it can be compared how much each gets."""
    has_seconds: bool = False
    """Whether it says how long each request is served, so that swaps and waits can be simulated."""

    def limited(self, limit: int) -> Script:
        """The same with so many requests at most."""
        first = self.first[:limit]

        def follow() -> FollowPlayed:
            following, places = self.follow(), iter(range(limit - len(first)))

            def few(request: Prompt, now: float) -> Iterator[Prompt]:
                for later, _ in zip(following(request, now), places, strict=False):
                    yield later

            return few

        return replace(self, first=first, follow=follow)


def find_traffic(name: str) -> Workload | Trace:
    """The workload or the trace of prompts of this path, or the shipped one of this name; BadWorkload."""
    path = find_among(name, "", SHIPPED, SHIPPED_TRACES)
    return read_trace(path) if _is_trace(path) else read(path)


def _is_trace(path: Path) -> bool:
    """Whether the header is that of a trace of prompts; readers say what is wrong with a file."""
    try:
        with objects(path) as file:
            return "trace" in next(file, {})
    except BadWorkload:
        return False


def of_workload(
    made: Workload,
    tokens_per_second: Mapping[str, float],
    *,
    speed: float = 1.0,
    tokens: int = PROMPT_TOKENS,
) -> Script:
    """The script of a workload that has the server's names; ``tokens_per_second``: the pace of each model."""

    def prompt(arrival: Arrival) -> Prompt:
        return Prompt(
            at=arrival.at / speed,
            tokens=tokens,
            output=max(round(arrival.seconds * tokens_per_second[arrival.model]), 1),
            session="" if arrival.sender is None else str(arrival.sender),
            model=arrival.model,
            patience=arrival.patience,
            arrival=arrival,
        )

    def follow() -> FollowPlayed:
        following = made.follow() if made.follow else None

        def later(request: Prompt, now: float) -> Iterator[Prompt]:
            if following and request.arrival:
                yield from map(prompt, following(request.arrival, now * speed))

        return later

    return Script(
        name=made.name,
        models=tuple(made.load_seconds),
        first=tuple([prompt(each) for each in made.requests if each.leases]),
        follow=follow,
        clients=tuple(map(str, made.clients)),
        has_seconds=True,
    )


def of_trace(
    trace: Trace,
    model: str,
    *,
    seed: int = 0,
    sessions: int | None = None,
    speed: float = 1.0,
    scale: float = 1.0,
) -> Script:
    """The script of a trace of prompts for one model.

    ``scale`` multiplies all lengths, those of the blocks too, so that the same parts of prompts are shared.
    """
    block_tokens = max(round(trace.block_tokens * scale), 1)
    ratio = block_tokens / trace.block_tokens
    requests = [
        prompt._replace(
            at=prompt.at / speed,
            tokens=max(round(prompt.tokens * ratio), len(prompt.blocks) * block_tokens, 1),
            output=max(round(prompt.output * ratio), 1),
            model=model,
        )
        for prompt in trace.draw(seed, sessions)
    ]

    def follow() -> FollowPlayed:
        queues = SessionQueues(requests)

        def later(request: Prompt, now: float) -> Iterator[Prompt]:
            if following := queues.next_of(request.session):
                yield following._replace(at=max(following.at, now))

        return later

    return Script(
        name=trace.name,
        models=(model,),
        first=tuple(SessionQueues(requests).first),
        follow=follow,
        block_tokens=block_tokens,
    )


class PromptWriter:
    """Writes the prompts of one run; ``tokens_per_word``: by model, 1 where it is not known."""

    def __init__(self, seed: str, block_tokens: int, tokens_per_word: Mapping[str, float]) -> None:
        self._seed = seed
        self._block_tokens = block_tokens
        self._tokens_per_word = tokens_per_word
        self._block = lru_cache(BLOCKS_KEPT)(self._written)

    def write(self, request: Prompt, number: int) -> str:
        """The prompt of the request of this number."""
        each = self._tokens_per_word.get(request.model, 1.0)
        ends = [round(n * self._block_tokens / each) for n in range(len(request.blocks) + 1)]
        parts = [
            self._block(str(block), end - begin)
            for block, begin, end in zip(request.blocks, ends, ends[1:], strict=False)
        ]
        words = max(round(request.tokens / each) - ends[-1], 0 if any(parts) else 1)
        return "".join([*parts, self._written(f"alone {number}", words)])

    def _written(self, name: str, words: int) -> str:
        draw = random.Random(f"{self._seed} {name}")
        return "".join([f"{word} " for word in draw.choices(range(100, 1000), k=words)])


# Playing

MOST = 512
TELL_SECONDS = 1.0
CONNECT_SECONDS = 10.0
SILENT_SECONDS = 1200.0
"""The longest silence before an answer, and within one, that is waited through."""
TAIL_BYTES = 4096
MESSAGE_CHARACTERS = 300
"""How much is kept of what an error says."""
PIECE_BYTES = 1 << 16
UNREACHABLE = "unreachable"
"""The code of a request that no server has heard of."""

LAST_EVENT = (b'"finish_reason":"', b'"finish_reason": "')
"""The marks of the event that says why an answer ended."""

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@dataclass(slots=True)
class PlayedAnswer:
    """How one request was answered. Moments are seconds from the beginning of the run.

    The thread that asks fills it in, and hands it on when it has ended.
    """

    number: int
    model: str
    session: str
    due: float
    sent: float = 0.0
    first: float = math.nan
    """When its first token came; nan: none did."""
    ended: float = 0.0
    status: int = 0
    """0: there was no answer, or not a whole one."""
    code: str = ""
    """The code of an error; empty: all is well."""
    message: str = ""
    """The words of that error, if it has some."""
    id: str = ""
    backend: str = ""
    """The backend that anvil-mux says it took among several."""
    tokens: int = 0
    """The length of the answer: as the server says, else its events with text."""
    prompt_tokens: int | None = None
    """The length of the input, as the server says."""
    cached_tokens: int | None = None
    """The part of the input that the engine had in its cache, as the server says."""


Ask = Callable[[], PlayedAnswer]
Prepare = Callable[[Prompt, int, Callable[[], float]], Ask]
"""Makes what sends a request: of its number, with the clock of the run."""
TellPlayed = Callable[[int, int, float], object]
"""Takes how many were answered, how many are under way, and the seconds so far."""


class Player:
    """Plays one script."""

    def __init__(self, prepare: Prepare, clock: Clock, *, most: int = MOST) -> None:
        self._prepare = prepare
        self._clock = clock
        self._most = most
        self.answers: list[PlayedAnswer] = []
        self.was_interrupted = False
        self._began = 0.0
        self._numbers = count()
        self._order = count()
        self._next: tuple[int, Ask] | None = None
        """The next request by its order, made ready while its moment has not come."""
        # Guards what stands below it.
        self._changed = clock.condition(lock := clock.lock())
        self._lock = lock
        self._due: list[tuple[float, int, Prompt]] = []
        self._under_way = 0

    def play(self, script: Script, tell: TellPlayed = lambda *_: None) -> list[PlayedAnswer]:
        """The answers, in the order in which they ended; those so far, if Ctrl-C came."""
        follow = script.follow()
        self._began = self._clock.now()
        with self._lock:
            for request in script.first:
                self._add(request)
        try:
            while self._turn(follow):
                tell(len(self.answers), self._under_way, self.now())
        except KeyboardInterrupt:
            self.was_interrupted = True
        return list(self.answers)

    def now(self) -> float:
        """Seconds from the beginning of the run."""
        return self._clock.now() - self._began

    def _add(self, request: Prompt) -> None:
        heappush(self._due, (request.at, next(self._order), request))

    def _turn(self, follow: FollowPlayed) -> bool:
        """Wait a while for the next moment, and send what is due then; False: all is done."""
        with self._lock:
            if not self._due and not self._under_way:
                return False
            at, order, request = self._due[0] if self._due else (math.inf, -1, None)
            wait = at - self.now()
            is_ready = self._next is not None and self._next[0] == order
            if request is None or (is_ready and wait > 0) or self._under_way >= self._most:
                self._changed.wait(min(wait, TELL_SECONDS) if wait > 0 else TELL_SECONDS)
                return True
            if is_ready or wait <= 0:
                heappop(self._due)
                self._under_way += 1
        if not is_ready:
            self._next = order, self._prepare(request, next(self._numbers), self.now)
        if self._next and (is_ready or wait <= 0):
            self._send(request, self._next[1], follow)
        return True

    def _send(self, request: Prompt, ask: Ask, follow: FollowPlayed) -> None:
        self._next = None
        self._clock.spawn(lambda: self._ask(request, ask, follow), f"replay-{request.model}")

    def _ask(self, request: Prompt, ask: Ask, follow: FollowPlayed) -> None:
        """Send one request and wait for its answer, in its thread."""
        try:
            answer = ask()
            with self._lock:
                self.answers.append(answer)
                for later in follow(request, answer.ended):
                    self._add(later)
        finally:
            with self._lock:
                self._under_way -= 1
                self._changed.notify_all()


# One request


def completion(model: str, prompt: str, output: int, *, is_chat: bool = False) -> bytes:
    """The body that asks for a streamed completion of so many tokens, and what it took."""
    asked = {
        "model": model,
        **({"messages": [{"role": "user", "content": prompt}]} if is_chat else {"prompt": prompt}),
        "max_tokens": output,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return json.dumps(asked).encode("ascii")


class PlayedServer:
    """A server that is asked. Any thread. ``path``: COMPLETIONS or CHAT."""

    def __init__(self, url: str, key: str = "", path: str = COMPLETIONS) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self.key = key
        self._path = path
        try:
            parts = urlsplit(self.url)
            self._address = parts.hostname or "", parts.port
        except ValueError:
            self._address = "", None
        kinds = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}
        if not self._address[0] or parts.scheme not in kinds:
            raise NotRunning(f"{url} is no address of a server; it looks like http://127.0.0.1:8080")
        self._kind: type[http.client.HTTPConnection] = kinds[parts.scheme]
        self._prefix = parts.path

    @property
    def name(self) -> str:
        """The server's name in tables."""
        host, port = self._address
        return f"{host}:{port}" if port else host

    def check_models(self, models: tuple[str, ...]) -> None:
        """NotRunning if nobody answers, BadScript if one of the models is not there."""
        status, answer = self.get("/v1/models")
        listed = answer.get("data") if status == 200 and isinstance(answer, dict) else None
        if not isinstance(listed, list):
            raise NotRunning(f"{self.url} answers {status} to GET /v1/models{_words(answer)}")
        known = [str(each.get("id")) for each in listed if isinstance(each, dict)]
        missing = [each for each in models if each not in known and not self._serves(each)]
        if missing:
            options = " ".join(f"--model {model}=NAME" for model in missing)
            raise BadScript(
                f"{self.url} does not serve {', '.join(missing)}, but {', '.join(known) or 'nothing'}; "
                f"say with {options} what is to be asked there"
            )

    def _serves(self, model: str) -> bool:
        """Whether a model is served that stands in no list."""
        return self.get(f"/v1/models/{quote(model, safe='')}")[0] == 200

    def get(self, path: str) -> tuple[int, Any]:
        """The status of an answer, and its JSON; None: it is none. NotRunning if nobody answers."""
        connection = self.open(CONNECT_SECONDS)
        try:
            connection.request("GET", self._prefix + path, headers=self._headers())
            response = connection.getresponse()
            text = response.read()
        except (OSError, http.client.HTTPException) as error:
            why = getattr(error, "strerror", None) or error or type(error).__name__
            raise NotRunning(f"nobody answers at {self.url} ({why})") from None
        finally:
            connection.close()
        try:
            return response.status, foreign.read(text)
        except ValueError:
            return response.status, None

    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}

    def prepare(
        self,
        request: Prompt,
        number: int,
        prompt: str,
        id: str,
        now: Callable[[], float] = time.monotonic,
    ) -> Callable[[], PlayedAnswer]:
        """Make what sends the request and waits for its answer; ``now``: seconds from the run's beginning."""
        headers = {"X-Request-ID": id}
        if request.session:
            headers["X-Session-ID"] = request.session
        body = completion(request.model, prompt, request.output, is_chat=self._path == CHAT)
        answer = PlayedAnswer(number, request.model, request.session, request.at, id=id)
        return lambda: _Asking(self, answer, now).ask(body, headers, request.patience)

    def open(self, timeout: float) -> http.client.HTTPConnection:
        return self._kind(*self._address, timeout=timeout)

    def post(
        self, connection: http.client.HTTPConnection, body: bytes, headers: Mapping[str, str] | None = None
    ) -> None:
        """Send a question, whose answer is still to come."""
        own = {**self._headers(), "Content-Type": "application/json"}
        connection.request("POST", self._prefix + self._path, body, {**own, **(headers or {})})


class _Asking:
    """One request under way."""

    def __init__(self, server: PlayedServer, answer: PlayedAnswer, now: Callable[[], float]) -> None:
        self._server = server
        self._answer = answer
        self._now = now
        self._usage = b""

    def ask(self, body: bytes, headers: Mapping[str, str], patience: float) -> PlayedAnswer:
        answer, connection = self._answer, self._server.open(CONNECT_SECONDS)
        answer.sent = self._now()
        try:
            connection.connect()
            socket = connection.sock
            socket.settimeout(min(patience, SILENT_SECONDS))
            self._server.post(connection, body, headers)
            with connection.getresponse() as response:
                socket.settimeout(SILENT_SECONDS)
                self._read(response)
        except TimeoutError:
            self._fail("left" if patience < SILENT_SECONDS else "silent")
        except (OSError, http.client.HTTPException):
            self._fail("cut" if answer.status else UNREACHABLE)
        finally:
            connection.close()
        answer.ended = self._now()
        tokens, answer.prompt_tokens, answer.cached_tokens = tokens_in(self._usage[6:])
        answer.tokens = tokens or answer.tokens
        return answer

    def _fail(self, code: str, message: str = "") -> None:
        self._answer.status, self._answer.code, self._answer.message = 0, code, message

    def _read(self, response: http.client.HTTPResponse) -> None:
        answer = self._answer
        answer.status = response.status
        answer.backend = response.headers.get("X-Anvil-Backend", "").partition(";")[0]
        if response.status != 200:
            reason = http.client.responses.get(response.status, "")
            code, answer.message = _error_in(response.read(TAIL_BYTES))
            answer.code = code or reason
            return
        lines = foreign.Lines()
        while piece := response.read1(PIECE_BYTES):
            for line in lines.feed(piece):
                if line.startswith(b"data: ") and not self._take(line):
                    return
        self._fail("cut")

    def _take(self, line: bytes) -> bool:
        """Take one event of a stream; False: it was the last one."""
        if line.startswith(b"data: [DONE]"):
            return False
        if b'"usage"' in line:
            self._usage = line
        if line.startswith(b'data: {"error"'):
            code, message = _error_in(line[6:])
            self._fail(code or "cut", message)
            return False
        # Once there was text each event but the last has some, and reading them all would cost too much.
        if math.isnan(self._answer.first):
            if _has_text(line):
                self._answer.first, self._answer.tokens = self._now(), 1
        else:
            self._answer.tokens += not any(mark in line for mark in LAST_EVENT)
        return True


def _has_text(line: bytes) -> bool:
    """Whether an event of a stream brings some of the answer."""
    try:
        choices = foreign.read(line[6:]).get("choices") or ()
        return any(
            each.get("text")
            or any(
                (each.get("delta") or {}).get(name) for name in ("content", "reasoning_content", "reasoning")
            )
            for each in choices
        )
    except (ValueError, AttributeError):
        return False


def _error_in(text: bytes) -> tuple[str, str]:
    """The code of an error and its words; its kind, where llama.cpp and vLLM have the status as its code."""
    error = (foreign.read_object(text) or {}).get("error")
    if not isinstance(error, dict):
        return "", ""
    code = error.get("code")
    known = code if isinstance(code, str) else error.get("type") or code
    return str(known or ""), str(error.get("message", ""))[:MESSAGE_CHARACTERS]


def _words(answer: Any) -> str:
    error = answer.get("error") if isinstance(answer, dict) else None
    message = error.get("message") if isinstance(error, dict) else None
    return f": {message}" if message else ""


def failure(answer: PlayedAnswer) -> MuxError | None:
    """The error that an answer comes to, if it is none."""
    if answer.status == 200:
        return None
    code = f"{answer.status} {answer.code}" if answer.status else answer.code
    words = f": {answer.message}" if answer.message else ""
    return BadScript(f"{answer.model} could not be asked: {code}{words}")
