"""What must hold of each request, from RFC 9110, RFC 9112 and docs/; nothing here asks anvil-mux's own code.

``findings`` tells what does not hold. Before its colon a finding names a kind of mistake, behind it the case.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from anvil_mux.telemetry.accesslog import Served
from tests.strict import AnswerReader, Fields, Received
from tests.wire.cases import (
    BODYLESS,
    IN_BODIES,
    KEYS,
    KNOWN_AS,
    OPEN,
    OWN,
    PASS_HEADERS,
    WAYS,
    Answer,
    Ask,
    answer_bytes,
    asked_at,
    body_of,
    content_of,
    method_of,
    said_by,
    target_of,
)
from tests.wire.witness import ID, House, Seen, closes

HOP_BY_HOP = frozenset(
    b"connection keep-alive te trailer transfer-encoding upgrade proxy-connection proxy-authenticate"
    b" proxy-authorization http2-settings".split()
)
"""The fields of one connection: RFC 9110, 7.6.1, and what older clients send."""
TO_ENGINES = frozenset(
    b"host content-length content-encoding x-request-id x-anvil-via accept-encoding expect forwarded "
    b"content-type".split()
)
"""The fields of requests that anvil-mux writes anew, or answers to itself."""
TO_EVERY_ENGINE = frozenset(
    b"accept accept-language user-agent range if-none-match cache-control date authorization".split()
) | {name.encode() for name in PASS_HEADERS}
"""Those that are drawn, and that any engine is sent as they came."""
TO_CLIENTS = frozenset(
    b"content-length server date x-request-id request-id set-cookie strict-transport-security".split()
)
"""Those of answers."""
ADDED = TO_CLIENTS | {b"connection", b"transfer-encoding", b"content-type"}
CREDENTIALS = frozenset([b"authorization", b"x-api-key", b"api-key"])
NO_FIELDS: frozenset[bytes] = frozenset()


def findings(house: House, seen: list[Seen], flaws: list[str]) -> Iterator[str]:
    """All that does not hold of one case."""
    yield from flaws
    yield from (f"an error in anvil-mux's log: {text}" for text in _drained(house.errors.seen))
    ids = [_id_of(each.answer) for each in seen if each.answer and each.answer.status]
    records = house.wait_for_records({id.decode() for id in ids})
    own = [id for id in ids if not id.startswith(b"mine-")]
    if len(set(own)) != len(own):
        yield f"one id for several requests: {ids}"
    for each in seen:
        yield from _of_request(each, keyed=house.keyed)
        if each.answer is None or not each.answer.status:
            if each.answer and each.sent and not leaves(each.ask) and not each.reset:
                yield f"no answer: {each.ask!r}"
            continue
        yield from _of_answer(each, each.answer)
        yield from _of_record(each, each.answer, records.get(_id_of(each.answer).decode(), []))
    yield from _drained(house.engine.flaws)


def _drained(texts: list[str]) -> list[str]:
    found = texts[:]
    del texts[: len(found)]
    return found


def _id_of(reader: AnswerReader) -> bytes:
    ids = reader.values(b"x-request-id")
    return ids[0] if len(ids) == 1 else b"%d ids" % len(ids)


# What may reach an engine


def _why_not(ask: Ask, *, keyed: bool) -> str:
    """Why no engine may see it; empty if one may."""
    way = WAYS[ask.way]
    if ask.wrong and (_is_read(ask) or ask.wrong not in IN_BODIES):
        return f"it is no HTTP ({ask.wrong})"
    if ask.cut >= 0:
        return "not all of it came"
    if not way.at or ask.method not in ("", way.method):
        return "no engine is asked this"
    if keyed and ask.key in ("", "unknown"):
        return "it shows no key"
    if keyed and ask.key == "only-a" and _names_another(ask):
        return "its key is for another model"
    return ""


def _is_read(ask: Ask) -> bool:
    """Whether anvil-mux reads its body."""
    return bool(WAYS[ask.way].at) and ask.method in ("", WAYS[ask.way].method)


def _names_another(ask: Ask) -> bool:
    return b"org/b" in content_of(ask, "") or "org%2Fb" in target_of(ask, "")


def _of_request(seen: Seen, *, keyed: bool) -> Iterator[str]:
    """What the engine got of it."""
    ask = seen.ask
    if seen.received and (why := _why_not(ask, keyed=keyed)):
        yield f"the engine was asked although {why}: {ask!r}"
    if seen.received and any(closes(each.ask, each.answer) for each in seen.before if each.answer):
        yield f"a request behind the end of its connection reached the engine: {ask!r}"
    if any(seen.said[:-1]) and ask.way != "messages":
        yield f"the engine was asked again although it had answered: {seen.said} {ask!r}"
    for received in seen.received:
        yield from _of_received(seen, received, keyed)


def _of_received(seen: Seen, received: Received, keyed: bool) -> Iterator[str]:
    ask, way, sent = seen.ask, WAYS[seen.ask.way], content_of(seen.ask, seen.id)
    if (received.method, received.target) != (way.method.encode(), asked_at(ask, seen.id).encode()):
        yield f"another method or target at the engine: {received.head!r}"
    if keyed and any(key in received.head + received.body for key in KEYS.values()):
        yield f"a client's key at the engine: {received.head!r}"
    if received.trailers:
        yield f"trailers at the engine: {received.trailers}"
    if way.translated:
        if json.loads(received.body)["messages"] != json.loads(sent)["messages"]:
            yield f"another question at the engine: {received.body!r}"
        return
    unread = way.names == "query" and not received.body
    if not unread and _as_known(sent, ask) != _as_known(received.body, ask):
        yield f"another body at the engine: {received.body[:300]!r} for {sent[:300]!r}"
    wanted = _for_engine(ask, seen.id, keyed)
    yield from _changed("to the engine", wanted, received.fields, TO_ENGINES)


def _as_known(body: bytes, ask: Ask) -> object:
    """A body with the engine's name for its model."""
    if WAYS[ask.way].names != "body" or KNOWN_AS[ask.model] == ask.model:
        return body
    if not body.startswith(b"{"):
        return body.replace(ask.model.encode(), KNOWN_AS[ask.model].encode())
    try:
        read: Any = json.loads(body)
    except ValueError:
        return body
    if read.get("model") == ask.model:
        read["model"] = KNOWN_AS[ask.model]
    return read


def _for_engine(ask: Ask, id: str, keyed: bool) -> Fields:
    """The fields of a request that are for the engine."""
    shown = [f"Authorization: Bearer {KEYS[ask.key].decode()}"] if ask.key else []
    fields = _read([f"X-Wire: {id}", *shown, *ask.fields], id)
    passed = _end_to_end(fields, TO_ENGINES | (CREDENTIALS if keyed else NO_FIELDS))
    return [(name, value) for name, value in passed if name in TO_EVERY_ENGINE]


# Fields


def _read(lines: list[str], id: str) -> Fields:
    found = []
    for line in lines:
        name, _, value = line.replace("<id>", id).partition(":")
        found.append((name.lower().encode(), value.strip(" \t").encode("latin-1")))
    return found


def _end_to_end(fields: Fields, replaced: frozenset[bytes]) -> Fields:
    """Those of ``fields`` that are for the other side, but for those that are ``replaced``."""
    named = b",".join(value for name, value in fields if name == b"connection").lower().split(b",")
    unwanted = HOP_BY_HOP | replaced | {name.strip() for name in named}
    prefixes = (b"x-forwarded-", b"proxy-", b"access-control-")
    return [field for field in fields if field[0] not in unwanted and not field[0].startswith(prefixes)]


def _changed(where: str, wanted: Fields, got: Fields, added: frozenset[bytes]) -> Iterator[str]:
    """What did not pass as it was sent, in the order that matters: that of lines of the same name."""
    names = {name for name, _ in wanted}
    kept = sorted((field for field in got if field[0] in names), key=lambda field: field[0])
    wanted = sorted(wanted, key=lambda field: field[0])
    if kept != wanted:
        yield f"fields were lost or changed {where}: {wanted} became {kept}"
    foreign = [field for field in got if field[0] not in names | added]
    if foreign:
        yield f"fields came from nowhere {where}: {foreign}"


# What a client may get


def leaves(ask: Ask) -> bool:
    """Whether its client does not wait for all of the answer, or says nothing more."""
    return ask.cut >= 0 or ask.reads >= 0 or ask.leave != "close"


def _of_answer(seen: Seen, reader: AnswerReader) -> Iterator[str]:
    if set(ID.findall(reader.head + _content(reader))) - {seen.id.encode()}:
        yield f"bytes of another request or of a second answer: {reader.head!r}{reader.body[:300]!r}"
    elif seen.ask.version == "1.0" and reader.values(b"transfer-encoding"):
        yield f"chunks for an HTTP/1.0 client: {reader.head!r}"
    elif reader.values(b"x-wire"):
        yield from _of_engines_answer(seen, reader)
    else:
        yield from _of_own_answer(seen, reader)


def _content(reader: AnswerReader) -> bytes:
    """The body before it was compressed, as far as it came: compressed bytes may look like anything."""
    if reader.values(b"content-encoding") != [b"gzip"]:
        return reader.body
    with suppress(zlib.error):
        return zlib.decompressobj(wbits=31).decompress(reader.body)
    return reader.body


def _of_engines_answer(seen: Seen, reader: AnswerReader) -> Iterator[str]:
    """An answer of the engine that anvil-mux passed on."""
    answer = seen.ask.answer
    if not seen.received:
        yield f"an answer of an engine that was not asked: {reader.head!r}"
    if reader.status != answer.status:
        yield f"another status: {reader.head!r} for {answer!r}"
    lines = [f"X-Wire: {seen.id}", *answer.fields, *(["Content-Encoding: gzip"] if answer.packed else [])]
    wanted = _end_to_end(_read(lines, seen.id), TO_CLIENTS)
    yield from _changed("to the client", wanted, reader.fields, ADDED)
    content = body_of(answer, WAYS[seen.ask.way], seen.id)
    if answer.wrong:
        if reader.ended:
            yield f"an answer that is no HTTP became one: {reader.head!r}{reader.body[:300]!r}"
    elif reader.ended:
        yield from _of_whole_body(seen, reader, content)
    elif may_be_cut(seen.ask):
        yield from _of_cut_body(answer, reader, content)
    else:
        yield f"a whole answer was cut: {reader.head!r}{reader.body[-300:]!r} of {len(content)} bytes"


def _of_whole_body(seen: Seen, reader: AnswerReader, content: bytes) -> Iterator[str]:
    """A body that ends as a whole one does; without chunks an event may tell that it is none."""
    ask = seen.ask
    if may_be_cut(ask) and _tells(ask, reader):
        return
    if must_be_cut(ask):
        yield f"a cut answer ends as a whole one does: {reader.head!r}{reader.body[-300:]!r}"
    elif reader.body != content and not (may_be_cut(ask) and content.startswith(reader.body)):
        yield f"another body: {reader.body[-300:]!r} for {content[-300:]!r}"


def _tells(ask: Ask, reader: AnswerReader) -> bool:
    """Whether an answer without chunks tells its client of an error."""
    return ask.version == "1.0" and b'"error"' in reader.body


LINE_ENDS = 2
"""The bytes behind the last event of a stream: an empty line."""


def must_be_cut(ask: Ask) -> bool:
    """Whether its client has to see that not all came: HTTP tells, or else the last event of the API does."""
    answer, way = ask.answer, WAYS[ask.way]
    if _lacks_last_event(ask):
        return True
    if answer.cut < 0 or answer.status in BODYLESS:
        return False
    if answer.framing != "close":
        return answer.framing == "chunked" or bool(said_by(answer, way, ""))
    size = len(answer_bytes(answer, way, "~100000~"))
    if size - size * answer.cut // 1000 <= LINE_ENDS and answer.end != "reset":
        return False  # its last event came
    return answer.end == "reset" or (answer.kind == "events" and not answer.packed and bool(way.events))


def may_be_cut(ask: Ask) -> bool:
    """Whether its client may see less than all."""
    answer = ask.answer
    endless = answer.kind == "events" and answer.framing == "close" and not answer.last
    return answer.cut >= 0 or answer.end == "reset" or endless or _lacks_last_event(ask) or leaves(ask)


def _lacks_last_event(ask: Ask) -> bool:
    """Whether it is a stream that its API ends with an event, which does not come."""
    answer = ask.answer
    is_stream = answer.kind == "events" and not answer.packed and answer.status < 300
    return is_stream and not answer.last and answer.status not in BODYLESS and bool(WAYS[ask.way].events)


def _of_cut_body(answer: Answer, reader: AnswerReader, content: bytes) -> Iterator[str]:
    """A body that breaks off: a part of what the engine said, and behind it an error event at most."""
    size = min(len(reader.body), len(content))
    same = next((at for at in range(size) if reader.body[at] != content[at]), size)
    more = reader.body[same:]
    if more and (answer.kind != "events" or b"error" not in more):
        yield f"a cut answer goes on with other bytes: {reader.body[-300:]!r}"
    if b"[DONE]" in more:
        yield f"a cut stream ends with [DONE]: {reader.body[-300:]!r}"


def _of_own_answer(seen: Seen, reader: AnswerReader) -> Iterator[str]:
    """An answer that anvil-mux gave itself."""
    ask, way = seen.ask, WAYS[seen.ask.way]
    if not reader.ended:
        if not (leaves(ask) or (way.translated and _fails(ask))):
            yield f"an answer of anvil-mux's own was cut: {reader.head!r}{reader.body[-300:]!r}"
    elif ask.wrong:
        yield from _of_refusal(ask, reader)
    elif way.translated and ask.body is None and not ask.method and reader.status < 400:
        failed = must_be_cut(ask) or ask.answer.wrong or ask.answer.status >= 300
        if failed and not (_tells(ask, reader) or _has_said_why_it_ended(seen)):
            yield f"a failed answer became a whole one: {ask.answer!r}: {reader.body[-300:]!r}"
    elif way.at and not way.translated and reader.status < 400 and not ask.method:
        yield f"an engine's answer without its fields: {reader.head!r}"
    elif 400 <= reader.status < 500 and seen.received and not way.translated:
        yield f"refused with {reader.status}, and yet sent to the engine: {ask!r}"
    elif reader.status >= 400 and not _may_be_refused(seen, reader.status):
        yield f"a sound request was answered {reader.status}: {ask!r}: {reader.body[:300]!r}"


def _has_said_why_it_ended(seen: Seen) -> bool:
    """Whether a stream broke off behind its ``finish_reason``: a translated one has nothing more to tell."""
    answer = seen.ask.answer
    sent = answer_bytes(answer, WAYS[seen.ask.way], seen.id)
    lines = sent[: len(sent) * answer.cut // 1000].rpartition(b"\n")[0]
    is_stream = answer.kind == "events" and answer.framing == "close" and not (answer.packed or answer.wrong)
    return is_stream and answer.cut >= 0 and b'"finish_reason": "stop"' in lines


def _of_refusal(ask: Ask, reader: AnswerReader) -> Iterator[str]:
    """What is no HTTP is refused, and nothing behind it is believed; not everybody reads a body."""
    if reader.status < 400 and (_is_read(ask) or ask.wrong not in IN_BODIES):
        yield f"what is no HTTP was answered {reader.status}: {ask!r}"
    if b"close" not in reader.values(b"connection"):
        yield f"what is no HTTP did not end its connection: {ask!r} {reader.head!r}"


def _may_be_refused(seen: Seen, status: int) -> bool:
    """Whether an error of anvil-mux's own is what the request may get."""
    ask, way = seen.ask, WAYS[seen.ask.way]
    if seen.received:
        return _fails(ask) or ask.answer.twice == "together" or way.translated
    return (
        (status == 401 and ask.key in ("", "unknown") and ask.way not in OPEN)
        or (status in (403, 404) and ask.key == "only-a" and (_names_another(ask) or ask.way in OWN))
        or (status == 409 and way.method == "GET" and way.names == "path")
        or bool(ask.method)
        or not (way.at or ask.way in OWN)
        or ask.body is not None
    )


def _fails(ask: Ask) -> bool:
    """Whether its engine's answer is none that can be passed on whole, or translated."""
    answer = ask.answer
    endless = answer.kind == "events" and not answer.last
    unread = answer.packed or answer.status in BODYLESS or answer.kind in ("text", "none") or endless
    broken = bool(answer.wrong) or answer.cut >= 0 or answer.end == "reset" or answer.status >= 300
    return broken or (unread and WAYS[ask.way].translated)


# What the access log says


def _of_record(seen: Seen, reader: AnswerReader, found: list[Served]) -> Iterator[str]:
    ask = seen.ask
    if len(found) != 1:
        if not _id_of(reader).startswith(b"mine-"):
            yield f"{len(found)} records of a request: {ask!r}"
        return
    record = found[0]
    if record.status != reader.status and not (record.status == 499 and leaves(ask)):
        yield f"the log has another status: {record.status} of {reader.head!r}"
    if not ask.wrong and record.method != method_of(ask):
        yield f"the log has another method: {record.method} of {ask!r}"
    if reader.ended and record.sent != reader.size:
        yield f"the log has other bytes: {record.sent} of {reader.size}: {ask!r}"
    if must_be_cut(ask) and record.status < 400 and not record.code and reader.values(b"x-wire"):
        yield f"a cut answer is logged as a success: {record}"
    tokens = record.prompt_tokens, record.tokens
    if reader.ended and _tells_usage(seen, reader) and tokens != (7, ask.answer.usage):
        yield f"the log has other tokens: {tokens}: {ask.answer!r}"


def _tells_usage(seen: Seen, reader: AnswerReader) -> bool:
    """Whether figures came that can be read: in one piece, of an answer that was passed on whole."""
    answer = seen.ask.answer
    in_one_piece = answer.pieces == 1 and not answer.split and not answer.packed
    whole = answer.status == 200 and not _fails(seen.ask) and not leaves(seen.ask) and answer.last
    shown = answer.usage > 0 and answer.kind in ("json", "events") and bool(reader.values(b"x-wire"))
    return in_one_piece and whole and shown
