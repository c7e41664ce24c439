"""The accounts of a load of requests: what is asked, what may be answered, and what engines say themselves.

Each request says its id in its body, and what it may be answered is known beforehand. ``judge`` puts each
into exactly one class; what no class allows is a flaw:

* ``whole``: all of its own answer, from the model that was asked;
* an error with a documented code, in the shape of its API;
* ``event``: a stream that says such an error and is cut then;
* ``cut``: a stream that is cut without a word, never one that ends as if it were whole;
* ``broken``: no answer at all; only what was in flight when anvil-mux was killed may be that;
* ``left``: its client left within the answer, as it was to;
* ``lost``: nobody answered for longer than anything may take.

``load.py`` asks them.
"""

from __future__ import annotations

import json
import random
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from anvil_mux import errors

LEAVING = 0.05
"""The share of streams whose clients leave within the answer."""
NEW, SLOW = 0.2, 0.02
"""The shares of requests on a connection of their own, and of those whose clients also read slowly."""
SHOWN_BYTES = 300
"""What is kept of either end of an answer's body once it was judged."""


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
    manner: str = ""
    """The client's connection: kept, if this is empty; ``new`` for this request; new and read ``slow``ly."""

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
        drawn = draw.random()
        manner = "slow" if drawn < SLOW else "new" if drawn < NEW else ""
        asks.append(Ask(f"load-{number}", kind, draw.choice(models), draw.choice(tokens), leaves, manner))
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
    _seen: float | None = None

    def first(self) -> float:
        """When the client had seen something that an engine said: neither that it is to wait nor an error."""
        if self._seen is not None:
            return self._seen
        begin = _CONTENT.search(self.body) if self.status == 200 else None
        return next((at for at, size in self.pieces if begin and size > begin.start(1)), FOREVER)

    def shorten(self) -> None:
        """Forget the middle of the body: hours of answers would not fit into memory."""
        self._seen = self.first()
        del self.pieces[1:]
        if len(self.body) > 2 * SHOWN_BYTES:
            self.body = self.body[:SHOWN_BYTES] + b" ... " + self.body[-SHOWN_BYTES:]


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
