"""The request that an engine gets for a question: its head, and its body with the model's own name in it.

The head is written for its request, from what was understood of the head that came. Where the body ends is
said by who sends it (``Exchange.ask``). A client's fields are passed on by allow-lists: ``PASSED`` to
everybody, ``OF_HTTP`` and those that an engine reads to an engine of ours, and what the setting
``pass_headers`` names. So no field makes an engine do what anvil-mux does not know of, and whatever a client
shows as a key, under whatever name, reaches nobody but us.

Of a body of JSON only the members that are named are left out, set or added: the bytes of all others are
passed on as they came, in their order. So numbers keep their digits and text its escapes, whatever a reader
of JSON would make of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from functools import lru_cache
from urllib.parse import parse_qsl, quote, urlencode

from anvil_mux.config.config import Backend
from anvil_mux.config.keys import FIELDS
from anvil_mux.config.values import site
from anvil_mux.errors import BadRequest
from anvil_mux.host.engines import ENGINES
from anvil_mux.host.hosts import key_fields
from anvil_mux.multiplexer.multiplexer import Lease
from anvil_mux.protocol import foreign, http1, naming
from anvil_mux.proxy.client import Spool
from anvil_mux.proxy.exchange import RequestBody
from anvil_mux.proxy.question import Question, QuestionBody, hops

PASSED = frozenset(
    (
        *(b"accept", b"accept-language", b"content-type"),
        *(b"user-agent", b"traceparent", b"tracestate", b"x-session-id", b"x-title", b"http-referer"),
        *(b"anthropic-version", b"anthropic-beta", b"openai-beta"),
        *(b"sec-websocket-version", b"sec-websocket-key", b"sec-websocket-extensions"),
    )
)
"""The fields of a client's head that a server elsewhere gets. None of them holds a key."""
_TRACING = (
    *(b"baggage", b"b3", b"x-b3-traceid", b"x-b3-spanid", b"x-b3-parentspanid", b"x-b3-sampled"),
    *(b"x-b3-flags", b"uber-trace-id", b"x-cloud-trace-context", b"x-amzn-trace-id"),
)
OF_HTTP = frozenset(
    (
        *(b"accept-charset", b"accept-encoding", b"content-language", b"content-location"),
        *(b"content-disposition", b"content-md5", b"content-digest", b"repr-digest", b"digest"),
        *(b"if-match", b"if-none-match", b"if-modified-since", b"if-unmodified-since", b"if-range"),
        *(b"range", b"cache-control", b"pragma", b"date", b"prefer", b"priority"),
        *(b"origin", b"referer", b"sec-fetch-site", b"sec-fetch-mode", b"sec-fetch-dest"),
        *(b"sec-websocket-protocol", *_TRACING),
    )
)
"""The fields that an engine of ours gets as well: what describes a body, asks for a part or a newer version
of an answer, says which page asks, or traces the request."""
SUBPROTOCOL = b"sec-websocket-protocol"
KEY_IN_SUBPROTOCOL = b"api-key"
"""Browsers, which can set no fields, show their key for a websocket as a subprotocol with this in it."""
KEYS_IN_QUERY = frozenset(
    ["key", "api_key", "api-key", "apikey", "token", "access_token", "subscription-key"]
)
"""The names under which APIs take a key in the query, which a server elsewhere does not get."""
_KEYS = frozenset(FIELDS)
UPGRADE = {b"connection": b"Upgrade", b"upgrade": b"websocket"}
WITHOUT_ADAPTERS = frozenset(
    (
        *("/v1/embeddings", "/embedding", "/embed", "/v2/embed", "/encode", "/pooling", "/classify"),
        *("/rerank", "/v1/rerank", "/v2/rerank", "/reranking", "/v1/reranking", "/score", "/v1/score"),
    )
)
"""The routes at which llama-server does not let a question choose one."""
SYSTEM_IN = {
    **dict.fromkeys(("/v1/chat/completions", "/apply-template", "/tokenize"), "messages"),
    "/v1/messages": "system",
    "/v1/responses": "instructions",
}
"""Path of an engine, or its beginning -> the field in which a conversation's system message stands."""
BOUND_OF_RESPONSES = "max_output_tokens"
BOUNDS = frozenset(["max_tokens", "max_completion_tokens", BOUND_OF_RESPONSES, "n_predict"])
"""The fields that bound the tokens of an answer."""
SYSTEM_ROLES = ("system", "developer")

_decode = json.JSONDecoder().raw_decode
_SPACE = re.compile(r"[ \t\r\n]*")


def request_head(question: Question, lease: Lease, also: Mapping[bytes, bytes] = {}) -> bytes:
    """The lines of the head for the engine. ``also``: more fields."""
    request, route = question.context.request, question.context.route
    query = request.query
    if query and route.model_in != "upstream":  # a name that is read there is the one that was asked for
        query = naming.model_replaced_in_query(query, question.known_as(lease.backend))
    own = dict(also)
    is_page = question.context.shows_pages and route.model_in == "upstream" and request.method == "GET"
    if b"accept-encoding" in request.fields and not is_page:
        # What is packed cannot be read: usage, errors, ids of answers.
        own[b"accept-encoding"] = b"identity"
    kind = request.fields.get(b"content-type")
    if route.model_in == "json" and kind != b"application/json":
        own[b"content-type"] = b"application/json"
    return _head(question, lease, route.path, own, query=query)


def translated_head(question: Question, lease: Lease, path: str) -> bytes:
    """The lines of the head of a question that the client did not ask in these words."""
    own = {b"accept": b"*/*", b"accept-encoding": b"identity", b"content-type": b"application/json"}
    return _head(question, lease, path, own, query="")


def _head(question: Question, lease: Lease, path: str, own: Mapping[bytes, bytes], *, query: str) -> bytes:
    """Return the lines of a head with ``own`` fields and those of the client that are passed on.

    Engines of ours get a client's keys only where these are not for us; servers elsewhere never do.
    """
    context, backend = question.context, lease.backend
    host = f"{lease.address[0]}:{lease.address[1]}"
    hides_keys = bool(backend.url) or context.access.hides_keys
    if backend.url:
        there = site(backend.url)
        own = {**_fields_elsewhere(context.request, backend, path), **own}
        kept = [(name, value) for name, value in parse_qsl(query, True) if name.lower() not in KEYS_IN_QUERY]
        host, path, query = there.name, there.path(path), urlencode(kept)
    elif hides_keys and (key := backend.service.api_key):
        own = {b"authorization": b"Bearer " + key.encode(), **own}
    if hides_keys and (offered := context.request.fields.get(SUBPROTOCOL)):
        own = {**own, **_without_keys(offered)}
    return http1.forward_request_head(
        context.request,
        host,
        f"{path}?{query}" if query else path,
        passed=passed_fields(backend, hides_keys=hides_keys) - own.keys(),
        extra={
            **own,
            b"X-Request-ID": context.id.encode("ascii"),
            b"X-Anvil-Via": _way(question, backend),
        }.items(),
    )


def _without_keys(subprotocols: bytes) -> dict[bytes, bytes]:
    """Return the field with the subprotocols that a client offers, but for its key; {} if none remains."""
    kept = [each.strip() for each in subprotocols.split(b",") if KEY_IN_SUBPROTOCOL not in each.lower()]
    return {SUBPROTOCOL: b", ".join(kept)} if kept else {}


def passed_fields(backend: Backend, *, hides_keys: bool) -> frozenset[bytes]:
    """Return the lower-case names of a client's fields that its engine or server elsewhere gets.

    ``hides_keys``: whether those in which clients show their keys are not among them.
    """
    return _passed(backend.engine, backend.pass_headers, bool(backend.url), hides_keys)


@lru_cache(maxsize=1024)
def _passed(engine: str, more: tuple[str, ...], is_elsewhere: bool, hides_keys: bool) -> frozenset[bytes]:
    names = PASSED | {name.encode("ascii") for name in more}
    if not is_elsewhere:
        names |= OF_HTTP | {name.encode("ascii") for name in ENGINES[engine].headers}
    return names - {SUBPROTOCOL} if hides_keys else names | _KEYS


def _way(question: Question, backend: Backend) -> bytes:
    """Return the way of a request to an engine, which may be, or ask, another anvil-mux or this one."""
    own = f"{question.context.access.instance}:{quote(question.known_as(backend), safe='/')}"
    return ", ".join([*hops(question.context), own]).encode("latin-1")


# The head for a server elsewhere


def _fields_elsewhere(request: http1.Request, backend: Backend, path: str) -> dict[bytes, bytes]:
    """Return the fields that are set for a server elsewhere."""
    shown = key_fields(backend.url, backend.service.api_key or "", path)
    own = {name.encode("ascii"): value.encode("ascii") for name, value in shown.items()}
    # Answers are read here, and events written among theirs: engines do not compress, clouds do.
    own[b"accept-encoding"] = b"identity"
    if b"anthropic-version" in request.fields:
        own.pop(b"anthropic-version", None)
    return own


# The body


def request_body(question: Question, backend: Backend) -> RequestBody:
    """The client's body as the service is to get it, with the name that it knows its model by."""
    body, named, model_in = question.body, question.named, question.context.route.model_in
    known_as = question.known_as(backend)
    if model_in in ("json", "path"):
        body = json_body(question, backend, body, question.path)
    if isinstance(body, Spool):
        if question.span:  # also where it is the client's own name: another may have been put there before
            body.replace(question.span, known_as.encode())
        return body
    if named == known_as or model_in == "upstream":
        return body
    if model_in == "multipart":
        return (naming.model_replaced_in_query(body.decode("ascii"), known_as).encode("ascii"),)
    return naming.model_replaced(body, known_as, question.span) if body else ()


def json_body(question: Question, backend: Backend, body: QuestionBody, path: str) -> QuestionBody:
    """A body of JSON as its service gets it at ``path``, under the preset that the question names."""
    preset = question.preset_at(backend)
    if preset and preset.is_adapter and not preset.served_model and path in WITHOUT_ADAPTERS:
        model = question.target.model
        text = f"the engine of {model} cannot apply the LoRA adapter {preset.name} at {path}"
        raise BadRequest(text, status=501)
    if not (preset or backend.is_rewriting) or isinstance(body, Spool):
        return body
    if preset is None:
        return rewritten(body, *_bound(backend.strip, dict(backend.set), dict(backend.default), path))
    if preset.system:
        body = with_system(body, path, preset.system)
    changes = preset.over(backend.strip, backend.set, backend.default)
    return rewritten(body, *_bound(*changes, path)) if any(changes) else body


def _bound(
    strip: Collection[str], put: Mapping[str, str], default: Mapping[str, str], path: str
) -> tuple[Collection[str], Mapping[str, str], Mapping[str, str]]:
    """Return the changes with the bound on an answer's tokens under the name that it has at ``path``.

    A field that is set takes out the client's own of any other such name, of which engines may prefer one.
    """
    if not (put.keys() | default.keys()) & BOUNDS:
        return strip, put, default
    if path == "/v1/responses":
        put, default = (
            {BOUND_OF_RESPONSES if name in BOUNDS else name: value for name, value in each.items()}
            for each in (put, default)
        )
    others = BOUNDS - put.keys() if put.keys() & BOUNDS else ()
    return (*strip, *others), put, default


def rewritten(
    body: bytes | bytearray,
    strip: Collection[str],
    put: Mapping[str, str],
    default: Mapping[str, str] = {},
) -> bytes:
    """Return ``body`` without the members in ``strip``, and with those in ``put`` (name -> JSON).

    ``default``: those that it gets if it has none of that name, or of one that bounds an answer as well. A
    member with the value null is left out.
    """
    missing = {name: value for name, value in {**default, **put}.items() if value != "null"}
    kept = []
    for name, written, value in _members(body):
        if name in put and name in missing:
            kept.append(written[:value] + missing.pop(name))
        elif name not in strip and name not in put:
            kept.append(written)
            for same in BOUNDS - put.keys() if name in BOUNDS else (name,):
                missing.pop(same, None)
    kept += [f"{json.dumps(name)}:{value}" for name, value in missing.items()]
    return ("{" + ",".join(kept) + "}").encode()


def with_system(body: bytes | bytearray, path: str, system: str) -> bytes | bytearray:
    """Return ``body`` with a system message, if it is a conversation that has none; else as it is."""
    field = next((field for beginning, field in SYSTEM_IN.items() if path.startswith(beginning)), None)
    if field is None:
        return body
    members = {name: written[value:] for name, written, value in _members(body)}
    if field == "messages":
        given = members.get(field, "")
        found = _with_message(given, system)
        return body if found == given else rewritten(body, (), {field: found})
    own, said = members.get(field, "null"), members.get("input", "null")
    if json.loads(own) or (field == "instructions" and _has_system(json.loads(said))):
        return body
    return rewritten(body, (), {field: json.dumps(system)})


def _with_message(written: str, system: str, *, of_several: bool = False) -> str:
    """A list of messages, or of lists of them, each with a system message before it if it has none.

    ``of_several``: it is one of such lists, and holds none itself.
    """
    messages = json.loads(written or "null")
    if not isinstance(messages, list) or not messages or _has_system(messages):
        return written
    if not of_several and all(isinstance(each, list) for each in messages):
        each_written = [_with_message(json.dumps(each), system, of_several=True) for each in messages]
        return f"[{','.join(each_written)}]"
    opening = written.index("[") + 1
    return f"[{json.dumps({'role': 'system', 'content': system})},{written[opening:]}"


def _has_system(messages: object) -> bool:
    """Whether a conversation has a system message, or one of a developer, which stands for it."""
    found = messages if isinstance(messages, list) else []
    return any(isinstance(each, dict) and each.get("role") in SYSTEM_ROLES for each in found)


def _members(body: bytes | bytearray) -> Iterator[tuple[str, str, int]]:
    """Name, text and where in it the value begins, of each member of an object."""
    try:
        foreign.check(body, of_request=True)
        text = body.decode("utf-8-sig")
        position = _past(text, _space(text, 0), "{")
        more = not text.startswith("}", position)
        while more:
            name, end = _decode(text, position)
            if not isinstance(name, str):
                raise ValueError(f"no name at character {position}")
            value = _past(text, _space(text, end), ":")
            _, end = _decode(text, value)
            yield name, text[position:end], value - position
            end = _space(text, end)
            more = text.startswith(",", end)
            position = _past(text, end, ",") if more else end
        if _past(text, position, "}") != len(text):
            raise ValueError("something follows the object")
    except ValueError as error:
        raise BadRequest(f"the body is not JSON: {error}", param="body") from None


def _space(text: str, position: int) -> int:
    """The next position that is no white space."""
    found = _SPACE.match(text, position)
    assert found is not None
    return found.end()


def _past(text: str, position: int, sign: str) -> int:
    if not text.startswith(sign, position):
        raise ValueError(f"`{sign}` is missing at character {position}")
    return _space(text, position + 1)
