"""A load of requests in which every answer is accounted for by its request's id, whatever fails meanwhile.

Bounded clients with kept connections ask whatever APIs there are, while one thread kills, freezes, reloads,
loads and unloads at moments drawn from a seed (counted in answers, not seconds), and once kills anvil-mux
itself and starts it again on the same port. Each request says its id in its body, and what it may be answered
is known beforehand. ``judge`` puts each into exactly one class; what no class allows is a flaw:

* ``whole``: all of its own answer, from the model that was asked;
* an error with a documented code, in the shape of its API;
* ``event``: a stream that says such an error and is cut then;
* ``cut``: a stream that is cut without a word, never one that ends as if it were whole;
* ``broken``: no answer at all; only what was in flight when anvil-mux was killed may be that;
* ``left``: its client left within the answer, as it was to;
* ``lost``: nobody answered for longer than anything may take.

Afterwards the engines' own record, the access log, the counters of /metrics, /healthz and the event log have
to agree with what the clients saw.
"""

from __future__ import annotations

import http.client
import json
import os
import queue
import random
import re
import signal
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from prometheus_client.parser import text_string_to_metric_families

from anvil_mux import errors
from anvil_mux.scheduler.causes import ADOPTED
from anvil_mux.sim.simulate import check
from anvil_mux.telemetry import eventlog
from tests.running import Running

CLIENTS = 96
LEAVING = 0.05
"""The share of streams whose clients leave within the answer."""
QUEUE_TIMEOUT = 60.0
PATIENCE = 6 * QUEUE_TIMEOUT
"""Seconds after which what a client or a fault waits for is lost; far above what any may take."""
SETTLED = 60.0
"""Seconds after which what comes a moment behind the answers is there, or never comes."""
SLACK = 60.0
"""Seconds by which the threads of a busy machine may be late, for the checker of the event log."""
BACK_OFF = 0.25
"""How long a client waits that was refused."""
PAUSE = 0.05
"""Between two looks at what tells nobody when it has come true."""
NO_MODEL = "(no model)"
SHOWN = 12
"""Flawed requests of which a failure shows the history."""


# What is asked


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. ``tokens``: how long its answer is to be."""

    id: str
    kind: str
    model: str
    tokens: int
    leaves: bool = False
    """Its client leaves as soon as something of the answer has come."""

    @property
    def prompt(self) -> str:
        return f"{self.id}: say hello."


@dataclass(slots=True)
class Said:
    """What an answer comes to, in whichever API."""

    text: str = ""
    models: set[str] = field(default_factory=set)
    finish: str = ""
    """length or stop; empty when nothing said why the answer ended."""
    tokens: int | None = None
    vectors: list[Any] = field(default_factory=list)
    documents: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Kind:
    """A route, and whether its answer is a stream. ``body`` makes what is sent but for model and stream."""

    api: str
    path: str
    stream: bool
    body: Callable[[Ask], dict[str, Any]]


def _chat(ask: Ask) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": ask.prompt}], "max_tokens": ask.tokens}


def _completion(ask: Ask) -> dict[str, Any]:
    return {"prompt": ask.prompt, "max_tokens": ask.tokens}


def _ollama_chat(ask: Ask) -> dict[str, Any]:
    messages = [{"role": "user", "content": ask.prompt}]
    return {"messages": messages, "options": {"num_predict": ask.tokens}}


def _ollama_generate(ask: Ask) -> dict[str, Any]:
    return {"prompt": ask.prompt, "options": {"num_predict": ask.tokens}}


def _input(ask: Ask) -> dict[str, Any]:
    return {"input": ask.prompt}


KINDS = {
    "chat": Kind("openai", "/v1/chat/completions", False, _chat),
    "chat stream": Kind("openai", "/v1/chat/completions", True, _chat),
    "completion stream": Kind("openai", "/v1/completions", True, _completion),
    "messages": Kind("anthropic", "/v1/messages", False, _chat),
    "messages stream": Kind("anthropic", "/v1/messages", True, _chat),
    "ollama chat": Kind("ollama", "/api/chat", False, _ollama_chat),
    "ollama chat stream": Kind("ollama", "/api/chat", True, _ollama_chat),
    "ollama generate stream": Kind("ollama", "/api/generate", True, _ollama_generate),
    "embeddings": Kind("openai", "/v1/embeddings", False, _input),
    "ollama embed": Kind("ollama", "/api/embed", False, _input),
}
EMBEDDING = ("embeddings", "ollama embed")


def some_asks(
    count: int, models: Sequence[str], tokens: Sequence[int], kinds: Sequence[str], draw: random.Random
) -> list[Ask]:
    asks = []
    for number in range(count):
        kind = draw.choice(kinds)
        leaves = KINDS[kind].stream and draw.random() < LEAVING
        asks.append(Ask(f"load-{number}", kind, draw.choice(models), draw.choice(tokens), leaves))
    return asks


# What was answered


@dataclass(slots=True)
class Got:
    """What a client had of an answer. Moments are those of ``time.monotonic``."""

    life: int
    """Which anvil-mux it was asked of."""
    began: float
    ended: float = 0.0
    status: int = 0
    body: bytes = b""
    pieces: list[tuple[float, int]] = field(default_factory=list)
    """When how many bytes of the body were there."""
    clean: bool = False
    """It ended as its framing says."""
    why: str = ""
    """What ended it, if it was not clean."""

    def first(self) -> float:
        """When the client had seen something that an engine said: neither that it is to wait nor an error."""
        begin = _CONTENT.search(self.body) if self.status == 200 else None
        return next((at for at, size in self.pieces if begin and size > begin.start(1)), FOREVER)


FOREVER = float("inf")
_CONTENT = re.compile(
    rb"^ *(?!data: \{[^\n]*\"choices\":\[\{\"index\":0,\"delta\":\{\},)"
    rb"(?!event: error)(?!(?:data: )?\{[^\n]*\"error\":)([^ :\r\n])",
    re.M,
)
"""Neither a comment, nor an event that only keeps a stream alive, nor an error."""


@dataclass(frozen=True, slots=True)
class Verdict:
    kind: str
    code: str = ""
    flaw: str = ""

    @property
    def name(self) -> str:
        return f"{self.kind} {self.code}".strip()


@dataclass(frozen=True, slots=True)
class Fate:
    """One request and how it ended."""

    ask: Ask
    got: Got
    verdict: Verdict


Whole = Callable[[Ask, Said], str]
"""What is wrong with an answer that ended well, empty if nothing is."""
Part = Callable[[Ask, Said], str]
"""What is wrong with the part of an answer that came before a cut."""


def _statuses() -> dict[str, int]:
    found, left = {}, [errors.MuxError]
    while left:
        error = left.pop()
        found[error.code] = error.status
        left += error.__subclasses__()
    return found


STATUSES = _statuses()
"""Of every documented code."""


def judge(ask: Ask, got: Got, whole: Whole, part: Part) -> Verdict:
    kind = KINDS[ask.kind]
    if got.why == "lost":
        return Verdict("lost", flaw="no answer came")
    if not got.status:
        return Verdict("broken")
    if not got.clean and not (kind.stream and got.status == 200):
        return Verdict("cut")
    if got.status != 200:
        code, flaw = _refused(kind.api, got)
        return Verdict(f"{got.status}", code, flaw)
    if not kind.stream:
        try:
            said = _read(kind.api, [json.loads(got.body)])
        except ValueError as error:
            return Verdict("whole", flaw=f"not JSON: {error}")
        return Verdict("whole", flaw=whole(ask, said))
    return _judge_stream(ask, kind.api, got, whole, part)


def _judge_stream(ask: Ask, api: str, got: Got, whole: Whole, part: Part) -> Verdict:
    documents, ended, torn = _events(api, got.body)
    failed = [number for number, each in enumerate(documents) if _error_in(each) is not None]
    if failed:
        said = _read(api, documents[: failed[0]])
        code, flaw = _error_of(api, documents[failed[0]])
        if got.clean:
            flaw = "an error event, and a clean end"
        elif failed[0] != len(documents) - 1:
            flaw = "something follows an error event"
        return Verdict("event", code, flaw or part(ask, said))
    said = _read(api, documents)
    if not got.clean:
        return Verdict("left" if got.why == "left" else "cut", flaw=part(ask, said))
    if torn or not ended:
        return Verdict("whole", flaw="it is truncated, with a clean end")
    return Verdict("whole", flaw=whole(ask, said))


def _events(api: str, body: bytes) -> tuple[list[dict[str, Any]], bool, bool]:
    """The JSON objects of a stream; whether it says that it is over; whether a line of it is no JSON."""
    *lines, rest = body.split(b"\n")
    documents, ended, torn = [], False, bool(rest)
    for line in map(bytes.strip, lines):
        if api == "ollama":
            data = line
        elif line.startswith(b"data:"):
            data = line[5:].strip()
        else:
            continue
        if data == b"[DONE]":
            ended = True
        elif data:
            try:
                documents.append(json.loads(data))
            except ValueError:
                torn = True
    if api == "anthropic":
        ended = any(each.get("type") == "message_stop" for each in documents)
    elif api == "ollama":
        ended = any(each.get("done") for each in documents)
    return documents, ended, torn


def _refused(api: str, got: Got) -> tuple[str, str]:
    """Code and flaw of an answer other than 200."""
    try:
        document = json.loads(got.body)
    except ValueError:
        return "", f"an error that is no JSON: {got.body[:200]!r}"
    if _error_in(document) is None:
        return "", f"an error that says none: {got.body[:200]!r}"
    code, flaw = _error_of(api, document)
    if not flaw and code and STATUSES[code] != got.status:
        flaw = f"{code} with status {got.status}"
    return code, flaw


def _error_in(document: Any) -> Any:
    return document.get("error") if isinstance(document, dict) else None


def _error_of(api: str, document: dict[str, Any]) -> tuple[str, str]:
    """The code that an error tells (Ollama's have none), and what is wrong with its shape."""
    error = document["error"]
    if api == "ollama":
        flaw = "" if isinstance(error, str) and error and set(document) == {"error"} else f"shape: {document}"
        return "", flaw
    if not isinstance(error, dict) or not isinstance(error.get("message"), str):
        return "", f"not in the shape of {api}: {document}"
    needs = {"type", "message", "code"} if api == "anthropic" else {"type", "message", "code", "param"}
    if not needs <= set(error) or (api == "anthropic" and document.get("type") != "error"):
        return "", f"not in the shape of {api}: {document}"
    code = str(error["code"])
    return code, "" if code in STATUSES else f"undocumented code {code}: {error['message'][:200]}"


def _read(api: str, documents: list[dict[str, Any]]) -> Said:
    said = Said(documents=documents)
    for document in documents:
        if api == "ollama":
            _read_ollama(document, said)
        elif api == "anthropic":
            _read_anthropic(document, said)
        else:
            _read_openai(document, said)
    said.finish = {"max_tokens": "length", "end_turn": "stop"}.get(said.finish, said.finish)
    return said


def _read_openai(document: dict[str, Any], said: Said) -> None:
    said.models.add(document.get("model", ""))
    for choice in document.get("choices") or ():
        inner = choice.get("delta") or choice.get("message") or {}
        said.text += inner.get("content") or choice.get("text") or ""
        said.finish = choice.get("finish_reason") or said.finish
    said.vectors += [each.get("embedding") for each in document.get("data") or ()]
    said.tokens = (document.get("usage") or {}).get("completion_tokens", said.tokens)


def _read_anthropic(document: dict[str, Any], said: Said) -> None:
    message = document.get("message", document)
    if message.get("type") == "message":
        said.models.add(message.get("model", ""))
        said.text += "".join(each.get("text", "") for each in message.get("content") or ())
        said.finish = message.get("stop_reason") or said.finish
    delta = document.get("delta") or {}
    said.text += delta.get("text", "")
    said.finish = delta.get("stop_reason") or said.finish
    if document.get("type") in ("message", "message_delta"):
        said.tokens = (document.get("usage") or {}).get("output_tokens", said.tokens)


def _read_ollama(document: dict[str, Any], said: Said) -> None:
    said.models.add(document.get("model", ""))
    said.text += (document.get("message") or {}).get("content", "") or document.get("response", "")
    said.finish = document.get("done_reason") or said.finish
    said.tokens = document.get("eval_count", said.tokens)
    said.vectors += document.get("embeddings") or ()


# What engines say themselves


class Entry(NamedTuple):
    """A line of the engines' record: a request was received whole, about to be answered, its answer sent."""

    at: float
    process: int
    model: str
    what: str


def read_record(file: Path) -> dict[str, list[Entry]]:
    """By id, in order."""
    found: defaultdict[str, list[Entry]] = defaultdict(list)
    for line in file.read_text().splitlines():
        at, process, model, what, id = line.split(" ")
        found[id].append(Entry(int(at) / 1e9, int(process), model, what))
    return found


def flaw_of_record(fate: Fate, entries: Sequence[Entry], replicas: int) -> str:
    """What contradicts the engines' record: an answer nobody gave, another model's, a request run again."""
    received = [each for each in entries if each.what == "received"]
    answered = [each for each in entries if each.what == "answered"]
    kind, code = fate.verdict.kind, fate.verdict.code
    if any(each.model != fate.ask.model for each in entries):
        return "an engine of another model was asked"
    if any(each.at > fate.got.first() for each in received):
        return "an engine was asked again after the client had seen some of the answer"
    if any(number > 1 for number in Counter(each.process for each in received).values()):
        return "one engine was asked twice"
    if len(received) > 1 + replicas:
        return f"{len(received)} engines were asked"
    if kind == "whole" and not answered:
        return "no engine says that it answered"
    if sum(each.what == "sent" for each in entries) > 1 and replicas == 1:
        return "two engines answered"
    if code == "model_not_found" and answered:
        return "an engine answered for a model that there is not"
    return ""


# The load


class Engines:
    """What runs, and how it is hurt."""

    def running(self) -> dict[Any, str]:
        """Something that each run has for its own -> model."""
        raise NotImplementedError

    def send(self, run: Any, number: signal.Signals) -> None:
        """Signals a run, if it is still there."""
        raise NotImplementedError


@dataclass
class Load:
    """``begin`` starts an anvil-mux on ``file`` with these flags and does not wait for it."""

    begin: Callable[..., Running]
    file: Path
    folder: Path
    """For logs."""
    engines: Engines
    asks: Sequence[Ask]
    whole: Whole
    part: Part
    draw: random.Random
    freezable: frozenset[str]
    """Models whose engines anvil-mux itself never freezes."""
    between: tuple[int, int] = (15, 60)
    """How many whole answers come from one fault to the next."""
    record: Path | None = None
    """Where the engines write."""
    fates: list[Fate] = field(default_factory=list)
    flaws: defaultdict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    """Id of a request, or nothing -> what is wrong."""
    told: list[tuple[float, str]] = field(default_factory=list)
    """What was done to the system, and when."""
    life: int = 1
    killed_at: float = FOREVER
    faults: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._left: queue.SimpleQueue[Ask] = queue.SimpleQueue()
        for ask in self.asks:
            self._left.put(ask)
        self._progress = threading.Condition()
        self._begun = 0
        self._answered = 0
        self._over = False
        self._described = yaml.safe_load(self.file.read_text())
        self._removed: dict[str, Any] = {}
        self._missing: list[tuple[str, float, float]] = []  # model, since, until
        self._reloads = 0
        self._adopted = 0
        self.entries: dict[str, list[Entry]] = {}
        self.services: dict[str, str] = {
            name: (about.get("x-anvil") or {}).get("model", name)
            for name, about in self._described["services"].items()
        }

    def run(self) -> None:
        self.running = self._start("0")
        self.port = self.running.port
        try:
            clients = [
                threading.Thread(target=self._client, name=f"client-{number}") for number in range(CLIENTS)
            ]
            trouble = threading.Thread(target=self._trouble, name="trouble")
            for thread in (*clients, trouble):
                thread.start()
            for thread in clients:
                thread.join()
            with self._progress:
                self._over = True
                self._progress.notify_all()
            trouble.join()
            self._settle()
            self._compare_counters()
        finally:
            self.running.stop()
        for fate in self.fates:
            for flaw in self._flaws_of(fate):
                self.flaws[fate.ask.id].append(flaw)
        self._account_for_each()
        self._check_record()
        self._check_access_logs()
        self._check_events()

    # Lives of anvil-mux

    def _start(self, port: str) -> Running:
        life = self.life
        logs = ("--access-log", str(self._access_log(life)), "--log-format", "json")
        running = self.begin("--port", port, *logs, "--event-log", str(self._event_log(life)))
        try:
            running.wait_until_listening()
        except BaseException:
            running.stop(signal.SIGKILL)
            raise
        return running

    def _access_log(self, life: int) -> Path:
        return self.folder / f"access-{life}.jsonl"

    def _event_log(self, life: int) -> Path:
        return self.folder / f"events-{life}.jsonl"

    # Clients

    def _client(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        life = 0
        while True:
            try:
                ask = self._left.get_nowait()
            except queue.Empty:
                break
            with self._progress:
                self._begun += 1
            if connection.sock is None or life != self.life:
                life = self._connect(connection)
            got = Got(life, time.monotonic())
            if life == self.life:
                self._exchange(connection, ask, got)
            else:  # it was killed at this moment
                connection.close()
            got.ended = time.monotonic()
            if not got.why and got.ended - got.began > PATIENCE:
                got.why = "lost"
            self._end(Fate(ask, got, self._judge(ask, got)))
        connection.close()

    def _end(self, fate: Fate) -> None:
        is_whole = fate.verdict.kind in ("whole", "left")
        with self._progress:
            self.fates.append(fate)
            self._answered += is_whole
            self._progress.notify_all()
        if not is_whole:  # else those that are refused at once use up all requests
            threading.Event().wait(BACK_OFF)

    def _judge(self, ask: Ask, got: Got) -> Verdict:
        try:
            return judge(ask, got, self.whole, self.part)
        except (AttributeError, KeyError, TypeError) as error:
            return Verdict("unreadable", flaw=repr(error))

    def _connect(self, connection: http.client.HTTPConnection) -> int:
        """Waits for somebody to listen; which life that is."""
        give_up = time.monotonic() + PATIENCE
        while True:
            connection.close()
            life = self.life
            with suppress(OSError):
                connection.connect()
                if life == self.life:
                    return life
                continue
            assert time.monotonic() < give_up, "nobody listens"
            threading.Event().wait(PAUSE)

    def _exchange(self, connection: http.client.HTTPConnection, ask: Ask, got: Got) -> None:
        kind = KINDS[ask.kind]
        body = {"model": ask.model, "stream": kind.stream, **kind.body(ask)}
        if kind.path in ("/v1/chat/completions", "/v1/completions") and kind.stream:
            body["stream_options"] = {"include_usage": True}
        headers = {"Content-Type": "application/json", "X-Request-ID": ask.id}
        try:
            connection.request("POST", kind.path, json.dumps(body).encode(), headers)
            response = connection.getresponse()
            got.status = response.status
            if kind.stream and response.status == 200:
                while piece := response.read1(65536):
                    got.body += piece
                    got.pieces.append((time.monotonic(), len(got.body)))
                    if ask.leaves and got.first() != FOREVER:
                        got.why = "left"
                        break
            else:
                got.body = response.read()
                got.pieces.append((time.monotonic(), len(got.body)))
            got.clean = not got.why
        except TimeoutError:
            got.why = "lost"
        except (OSError, http.client.HTTPException) as error:
            got.why = repr(error)
        if not got.clean:
            connection.close()

    # Faults

    def _trouble(self) -> None:
        """Hurts what there is, again and again, until the clients are done."""
        count = len(self.asks)
        kill_at = self.draw.randint(count * 2 // 5, count * 3 // 5)
        faults = {
            self._kill: 30,
            self._freeze: 20,
            self._change: 10,
            self._remove: 10,
            self._unload: 15,
            self._load: 15,
        }
        while True:
            mark = self._answered + self.draw.randint(*self.between)
            if not self._wait_for(mark):
                break
            crash = len(self.fates) >= kill_at and self.life == 1
            fault = self._crash if crash else self.draw.choices([*faults], [*faults.values()])[0]
            try:
                fault()
                self.faults[fault.__name__.strip("_")] += 1
            except Exception as error:
                self.flaws[""].append(f"{fault.__name__}: {error!r}")
                self._tell(f"{fault.__name__} failed: {error!r}")
                if crash:
                    raise
        if self.life == 1:
            self.flaws[""].append("anvil-mux was never killed: too few requests")
        self._bring_back()

    def _wait_for(self, mark: int) -> bool:
        """Until there were so many whole answers; False when no more will come."""
        with self._progress:
            self._progress.wait_for(lambda: self._over or self._answered >= mark)
            return not self._over

    def _tell(self, what: str) -> None:
        self.told.append((time.monotonic(), what))

    def _some_run(self, of: Container[str]) -> tuple[Any, str] | None:
        runs = sorted((each for each in self.engines.running().items() if each[1] in of), key=str)
        return self.draw.choice(runs) if runs else None

    def _kill(self) -> None:
        if found := self._some_run(set(self.services.values())):
            self._tell(f"SIGKILL {found[1]} ({found[0]})")
            self.engines.send(found[0], signal.SIGKILL)

    def _freeze(self) -> None:
        if found := self._some_run(self.freezable):
            seconds = self.draw.choice((0.1, 0.3, 1.0, 2.0, 4.0))
            self._tell(f"SIGSTOP {found[1]} ({found[0]}) for {seconds:g} s")
            self.engines.send(found[0], signal.SIGSTOP)
            threading.Event().wait(seconds)
            self.engines.send(found[0], signal.SIGCONT)
            self._tell(f"SIGCONT {found[1]} ({found[0]})")

    def _load(self) -> None:
        self._by_hand("load")

    def _unload(self) -> None:
        self._by_hand("unload")

    def _by_hand(self, what: str) -> None:
        model = self.draw.choice(sorted(set(self.services.values())))
        status, _, text = self.running.request("POST", f"/models/{what}", {"model": model}, PATIENCE)
        self._tell(f"{what} {model}: {status} {text[:120]}")
        answer = json.loads(text)
        if status != 200 and answer["error"]["code"] not in STATUSES:
            raise AssertionError(f"{status} {text}")

    def _change(self) -> None:
        """A service with another command, by which anvil-mux replaces its engine."""
        services = self._described["services"]
        name = self.draw.choice(sorted(services))
        services[name].setdefault("environment", {})["GENERATION"] = str(self._reloads)
        self._reload(f"{name} changed")

    def _remove(self) -> None:
        """A service goes; the next time it is back."""
        if self._removed:
            return self._bring_back()
        services = self._described["services"]
        name = self.draw.choice(sorted(services))
        self._removed[name] = services.pop(name)
        model = self.services[name]
        if model not in {self.services[each] for each in services}:
            self._missing.append((model, time.monotonic(), FOREVER))
        return self._reload(f"{name} removed")

    def _bring_back(self) -> None:
        if self._removed:
            self._described["services"] |= self._removed
            self._removed.clear()
            self._reload("all back")
            self._missing = [
                (name, since, min(until, time.monotonic())) for name, since, until in self._missing
            ]

    def _reload(self, what: str) -> None:
        fresh = self.file.with_suffix(".new")
        fresh.write_text(yaml.safe_dump(self._described, sort_keys=False))
        os.replace(fresh, self.file)
        before = self.running.get("/healthz")["reload"]["count"]
        self._reloads += 1
        self._tell(f"SIGHUP, {what}")
        self.running.process.send_signal(signal.SIGHUP)
        eventually(lambda: self.running.get("/healthz")["reload"]["count"] > before)
        self._tell(f"in effect: {what}")

    def _crash(self) -> None:
        """kill -9 of anvil-mux, once what was answered before is known to be counted and logged."""
        answered = list(self.fates)
        self._compare_before_crash(answered)
        self._tell("SIGKILL anvil-mux")
        self.running.stop(signal.SIGKILL)
        before = self.engines.running()
        self.life += 1  # before anybody can be connected to it, and before this moment
        self.killed_at = time.monotonic()
        self.running = self._start(str(self.port))
        self._tell(f"anvil-mux listens again; there ran {sorted(before.values())}")

    def _settle(self) -> None:
        """Nothing is left over: no lease, no queue, nobody stuck."""

        def left() -> list[str]:
            health = self.running.get("/healthz")
            found = [f"{key}: {health[key]}" for key in ("waiting", "leases") if health[key]]
            for name, about in health["models"].items():
                found += [f"{name} {key}: {about[key]}" for key in ("waiting", "leases") if about[key]]
                found += [f"{name} is stuck"] if about["state"] == "stuck" else []
            return found

        with suppress(AssertionError):
            eventually(lambda: not left(), SETTLED)
        self.flaws[""] += left()

    # Accounts

    def _flaws_of(self, fate: Fate) -> Iterator[str]:
        ask, got, verdict = fate.ask, fate.got, fate.verdict
        if verdict.flaw:
            yield f"{verdict.name}: {verdict.flaw}"
        if verdict.kind == "broken" and not self._was_killed(got):
            yield f"no answer, and anvil-mux was not killed: {got.why}"
        if verdict.kind == "cut" and not KINDS[ask.kind].stream and not self._was_killed(got):
            yield f"an answer that is no stream is cut, and anvil-mux was not killed: {got.why}"
        if got.status == 404 and not any(
            model == ask.model and since <= got.ended and got.began <= until
            for model, since, until in self._missing
        ):
            yield "its model was there all the while"
        if verdict.code == "backend_unavailable" and not self._was_hurt(ask.model, got):
            yield "no engine of its model was hurt"

    def _was_killed(self, got: Got) -> bool:
        """The anvil-mux that was asked was killed after that."""
        return got.life < self.life and got.began < self.killed_at

    def _was_hurt(self, model: str, got: Got) -> bool:
        """An engine of its model was killed or frozen while it was under way, or the moment before."""
        words = f"SIGKILL {model} (", f"SIGSTOP {model} ("
        return any(got.began - SLACK <= at <= got.ended and text.startswith(words) for at, text in self.told)

    def _account_for_each(self) -> None:
        ended = Counter(fate.ask.id for fate in self.fates)
        for ask in self.asks:
            if ended[ask.id] != 1:
                self.flaws[ask.id].append(f"it ended {ended[ask.id]} times")

    def _replicas(self, model: str) -> int:
        return [*self.services.values()].count(model)

    def _check_record(self) -> None:
        if self.record is None:
            return
        self.entries = read_record(self.record)
        for fate in self.fates:
            entries = self.entries.get(fate.ask.id, [])
            if flaw := flaw_of_record(fate, entries, self._replicas(fate.ask.model)):
                self.flaws[fate.ask.id].append(flaw)
        for id in self.entries.keys() - {ask.id for ask in self.asks}:
            self.flaws[id].append("an engine was asked what nobody had asked")

    def _check_access_logs(self) -> None:
        """Each request has one line, which says what its client saw."""
        self.lines: dict[int, dict[str, list[dict[str, Any]]]] = {}
        for life in range(1, self.life + 1):
            by_id = self.lines[life] = _lines(self._access_log(life))
            fates = {fate.ask.id: fate for fate in self.fates if fate.got.life == life}
            for id, fate in fates.items():
                lines = by_id.get(id, [])
                unsure = self._was_killed(fate.got) and (not lines or fate.verdict.kind == "cut")
                if not unsure and (flaw := _flaw_of_line(fate, lines)):
                    self.flaws[id].append(flaw)
            for id in by_id.keys() - fates.keys():
                if id.startswith("load-"):
                    self.flaws[id].append(f"life {life} logs a request that it was not asked")

    def _code(self, fate: Fate) -> str:
        """Ollama's errors do not say their code; the access log does."""
        if fate.verdict.code:
            return fate.verdict.code
        lines = self.lines[fate.got.life].get(fate.ask.id, [])
        return str(lines[0]["code"]) if lines else ""

    def _tally(self, fates: Iterable[Fate]) -> Counter[tuple[str, str, str]]:
        """As anvil_requests_total has them: model, route, status.

        Those of a model that there is not have its name or none: it may have gone while they were queued. Of
        those whose clients left nobody knows the status.
        """
        kept = [fate for fate in fates if fate.verdict.kind != "left"]
        had = [(fate.ask.model, KINDS[fate.ask.kind].path, str(fate.got.status)) for fate in kept]
        return Counter((NO_MODEL if code == "404" else model, path, code) for model, path, code in had)

    def _counted(self) -> Counter[tuple[str, str, str]]:
        found: Counter[tuple[str, str, str]] = Counter()
        routes = {kind.path for kind in KINDS.values()}
        for family in text_string_to_metric_families(self.running.request("GET", "/metrics")[2]):
            for each in family.samples:
                if each.name == "anvil_requests_total" and each.labels["route"] in routes:
                    model, route, code = (each.labels[key] for key in ("model", "route", "code"))
                    found[NO_MODEL if code == "404" else model, route, code] += int(each.value)
        return found

    def _compare_before_crash(self, answered: Sequence[Fate]) -> None:
        """All that was answered is counted and logged before long, and not more than was begun."""
        least = self._tally(answered)
        ids = {fate.ask.id for fate in answered if fate.verdict.kind != "left"}
        with suppress(AssertionError):
            eventually(
                lambda: not least - self._counted() and ids <= _lines(self._access_log(1)).keys(), SETTLED
            )
        if missing := ids - _lines(self._access_log(1)).keys():
            self.flaws[""].append(f"answered and not in the access log: {sorted(missing())[:SHOWN]}")
        counted = self._counted()
        if uncounted := least - counted:
            self.flaws[""].append(f"answered and not counted: {uncounted}")
        with self._progress:
            begun = self._begun
        if counted.total() > begun:
            self.flaws[""].append(f"{counted.total()} requests are counted, and only {begun} had begun")

    def _compare_counters(self) -> None:
        """The last life counts what its clients had, no more and no less."""
        here = [fate for fate in self.fates if fate.got.life == self.life and fate.got.status]
        had = self._tally(here)
        left = Counter((f.ask.model, KINDS[f.ask.kind].path) for f in here if f.verdict.kind == "left")

        def difference() -> str:
            counted = self._counted()
            more: Counter[tuple[str, str]] = Counter()
            for (model, path, code), count in (counted - had).items():
                more[model, path if code in ("200", "499") else f"{path} {code}"] += count
            return f"{had - counted}, {more - left}, {left - more}" if had - counted or more != left else ""

        with suppress(AssertionError):
            eventually(lambda: not difference(), SETTLED)
        if found := difference():
            self.flaws[""].append(f"had and not counted, counted and not had, left and not counted: {found}")

    def _check_events(self) -> None:
        """The event logs break no invariant, as far as one configuration holds."""
        self.checked = 0
        for life in range(1, self.life + 1):
            for run in eventlog.read(self._event_log(life), warn=lambda text: None):
                self.checked += len(run.events)
                self._adopted += sum(event.cause == ADOPTED for event in run.events if life > 1)
                for problem in check(run.events, eventlog.config_of(run.header), SLACK, run.begins):
                    self.flaws[""].append(f"broken invariant in life {life}: {problem}")

    # What is told

    def table(self) -> str:
        classes = Counter(self._class(fate) for fate in self.fates)
        rows = [f"{name:32} {count:7}" for name, count in sorted(classes.items(), key=lambda each: -each[1])]
        more = [
            f"{len(self.fates)} requests, of which {sum(map(bool, self.flaws.values()))} have flaws",
            f"faults: {', '.join(f'{name} {count}' for name, count in sorted(self.faults.items()))}",
            f"{self.checked} events checked; {self._adopted} engines taken over",
        ]
        if self.record is not None:
            again = sum(self._times(fate, "received") > 1 for fate in self.fates)
            failed = [fate for fate in self.fates if fate.verdict.kind not in ("whole", "left")]
            finished = sum(self._times(fate, "answered") > 0 for fate in failed)
            more.append(f"asked of a second engine: {again}; answered, but not to the client: {finished}")
        return "\n".join([*rows, *more])

    def _times(self, fate: Fate, what: str) -> int:
        return sum(each.what == what for each in self.entries.get(fate.ask.id, ()))

    def _class(self, fate: Fate) -> str:
        kind = fate.verdict.kind
        if kind in ("broken", "cut") and self._was_killed(fate.got):
            return "broken by the kill -9"
        if kind in ("whole", "broken", "cut", "left", "lost"):
            return kind
        return f"{kind} {self._code(fate) or '(its log line was lost with anvil-mux)'}"

    def report(self) -> str:
        """The flaws, and the history of some of the requests concerned."""
        fates = {fate.ask.id: fate for fate in self.fates}
        text = [f"{id or '(the whole)'}: {flaw}" for id, flaws in self.flaws.items() for flaw in flaws][:100]
        for id in [id for id in self.flaws if id in fates][:SHOWN]:
            text += ["", *self._history(fates[id])]
        return "\n".join(text)

    def _history(self, fate: Fate) -> list[str]:
        got = fate.got
        seen = [(got.began, f"asked of life {got.life}: {fate.ask}")]
        if got.pieces:
            seen.append((got.pieces[0][0], "the client has the first bytes"))
        seen.append((got.ended, f"{fate.verdict.name}: {got.status} clean={got.clean} {got.why}"))
        if self.record is not None:
            entries = self.entries.get(fate.ask.id, [])
            seen += [(each.at, f"engine {each.process} of {each.model}: {each.what}") for each in entries]
        seen += [each for each in self.told if got.began - 5.0 <= each[0] <= got.ended + 1.0]
        lines = [f"{at - got.began:9.3f} {text}" for at, text in sorted(seen)]
        logged = self.lines[got.life].get(fate.ask.id, [])
        return [
            f"{fate.ask.id}:",
            *lines,
            f"  body {got.body[:300]!r} ... {got.body[300:][-300:]!r}",
            f"  log {logged}",
        ]


def _lines(file: Path) -> dict[str, list[dict[str, Any]]]:
    """The lines of an access log by id; a life that was killed may leave half a line."""
    found: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for line in file.read_text().splitlines():
        with suppress(ValueError):
            entry = json.loads(line)
            found[entry["request_id"]].append(entry)
    return found


def _flaw_of_line(fate: Fate, lines: Sequence[Mapping[str, Any]]) -> str:
    if len(lines) != 1:
        return f"{len(lines)} lines in the access log"
    line, kind = lines[0], fate.verdict.kind
    if kind == "left":
        return "" if line["status"] in (200, 499) else f"its client left, and the access log says {line}"
    if fate.got.status and line["status"] != fate.got.status:
        return f"the access log says {line['status']}"
    if fate.verdict.code and line["code"] != fate.verdict.code:
        return f"the access log says {line['code']}"
    if kind == "whole" and line["code"]:
        return f"it is whole, and the access log says {line['code']}"
    if kind not in ("whole", "broken", "lost") and not line["code"]:
        return "it failed, and the access log says nothing of that"
    return ""


def eventually(holds: Callable[[], object], patience: float = PATIENCE) -> None:
    """Asks again and again, until ``holds()``."""
    pause, give_up = threading.Event(), time.monotonic() + patience
    while not holds():
        assert time.monotonic() < give_up, "it never came true"
        pause.wait(PAUSE)
