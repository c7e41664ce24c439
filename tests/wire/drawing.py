"""Cases drawn from a seed, and the shortest that still shows what one showed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields, replace
from typing import Any

from tests.wire.cases import KEYS, KNOWN_AS, OWN, WAYS, WRONG, WRONG_ANSWERS, Answer, Ask, Case, Line

ENGINES = [name for name, way in WAYS.items() if way.at]
USUAL = ["chat", "stream", "completions", "upstream", "health", "props", "messages", "responses"]
ELSEWHERE = [name for name, way in WAYS.items() if not way.at and name not in OWN]
STATUSES = (201, 204, 304, 400, 403, 404, 409, 418, 422, 429, 500, 503)
ODD = (
    *("X-Odd: v", "x-CAPS: Yes", "X-Empty:", "X-Space:  \t padded \t ", "X-Latin: \xe9\xff"),
    "X-Long: " + "l" * 3000,
)
FIELDS = (
    *ODD,
    *(
        "X-Two: 1",
        "X-Two: 2",
        "x-two: 3",
        "Connection: X-Hop",
        "X-Hop: secret",
        "Connection: keep-alive, X-Hop",
    ),
    *(
        "Connection: close",
        "Connection: Keep-Alive",
        "Keep-Alive: timeout=5",
        "TE: trailers",
        "Trailer: X-Trailer",
    ),
    *("Connection: content-length", "Connection: host, transfer-encoding", "Connection: ,", "Upgrade: h2c"),
    *("Proxy-Authorization: Basic eDp5", "Proxy-Connection: keep-alive", "X-Forwarded-For: 6.6.6.6"),
    *(
        "Forwarded: for=6.6.6.6",
        "Accept: */*",
        "Accept-Encoding: gzip, br",
        "User-Agent: w/1 (x)",
        "Cookie: a=b",
    ),
    *("Range: bytes=0-1", 'If-None-Match: "x"', "Cache-Control: no-cache", "X-Request-ID: mine-<id>"),
    *("Expect: 100-continue", "Date: Tue, 15 Nov 1994 08:12:31 GMT", "Accept-Language: de, en;q=0.5"),
)
FIELDS_OF_ANSWERS = (
    *ODD,
    *("X-Two: 1", "X-Two: 2", "x-two: 3", "Connection: X-Hop", "X-Hop: secret", "Connection: close"),
    *(
        "Keep-Alive: timeout=5",
        "Server: engine",
        "Date: Tue, 15 Nov 1994 08:12:31 GMT",
        "Cache-Control: no-cache",
    ),
    *('ETag: "x"', "Vary: Accept", "Content-Language: en", "X-Request-ID: theirs", "Set-Cookie: a=b"),
    *("Access-Control-Allow-Origin: *", "Trailer: X-Trailer", "Connection: content-length", "Retry-After: 1"),
    *("Proxy-Authenticate: Basic", "Location: /elsewhere", "Strict-Transport-Security: max-age=1"),
)
HIDDEN = "POST /sleep?level=2 HTTP/1.1\r\nHost: x\r\nX-Wire: ~0~\r\nContent-Length: 0\r\n\r\n"
"""A request that hides in a body."""
BODIES = ('{"model":"%m","id":"<id>"}', '{"id":"<id>"}', "<id>", "", "[]", HIDDEN)


def drawn(draw: random.Random) -> Case:
    keyed, at_once = draw.random() < 0.2, draw.random() < 0.1
    count = draw.choice((1, 1, 1, 2, 3)) if not at_once else draw.randint(2, 4)
    return Case(tuple(_line(draw, keyed, at_once) for _ in range(count)), at_once, keyed)


def _line(draw: random.Random, keyed: bool, at_once: bool) -> Line:
    pipelined = draw.random() < 0.15
    asks = [_ask(draw, keyed) for _ in range(draw.choice((1, 2, 2, 3, 5)))]
    if pipelined:
        asks = [replace(ask, cut=-1, reads=-1, leave="close", fields=_unexpecting(ask)) for ask in asks]
    else:
        asks[-1] = _left(draw, asks[-1])
    if pipelined or at_once:  # a second answer that comes later cannot be told from the next one
        asks = [replace(ask, answer=replace(ask.answer, twice="")) for ask in asks]
    return Line(tuple(asks), pipelined)


def _unexpecting(ask: Ask) -> tuple[str, ...]:
    return tuple(line for line in ask.fields if not line.startswith("Expect"))


def _left(draw: random.Random, ask: Ask) -> Ask:
    how = draw.choice(("close", "close", "reset", "half"))
    match draw.randint(0, 12):
        case 0:
            return replace(ask, cut=draw.randrange(1000), leave=how)
        case 1:
            return replace(ask, reads=draw.choice((0, 1, 20, 300, 2000)), leave=how)
        case 2:
            return replace(ask, leave="half")
    return ask


def _some(draw: random.Random, lines: tuple[str, ...], part: float) -> tuple[str, ...]:
    return tuple(draw.sample(lines, draw.randint(1, 4))) if draw.random() < part else ()


def _ask(draw: random.Random, keyed: bool) -> Ask:
    pools = (USUAL, ENGINES, OWN, ELSEWHERE)
    name = draw.choice(draw.choices(pools, (50, 35, 8, 7))[0])
    ask = Ask(name, fields=_some(draw, FIELDS, 0.4), answer=_answer(draw, name))
    return _odd(draw, _framed(draw, _meant(draw, ask, keyed)))


def _meant(draw: random.Random, ask: Ask, keyed: bool) -> Ask:
    """``ask`` with the model, the key, the method and the body that it is to have."""
    way = WAYS[ask.way]
    if way.names != "path" and way.at and draw.random() < 0.15:
        ask = replace(ask, model=draw.choice(list(KNOWN_AS)))
    if keyed:
        ask = replace(ask, key=draw.choice(("admin", "only-a", "only-a", *KEYS, "")))
        if ask.way == "upstream" and draw.random() < 0.4:
            ask = replace(ask, named="org/b")
    elif draw.random() < 0.05:
        ask = replace(ask, key="admin")
    if ask.way in OWN and draw.random() < 0.2:
        ask = replace(ask, method="HEAD")
    elif draw.random() < 0.03:
        ask = replace(
            ask, method=draw.choice(("PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "get", "M-SEARCH"))
        )
    if draw.random() < (0.25 if way.method == "GET" else 0.05 if way.at else 0):
        ask = replace(ask, body=draw.choice(BODIES))
    return ask


def _framed(draw: random.Random, ask: Ask) -> Ask:
    way = WAYS[ask.way]
    if draw.random() < 0.1:
        ask = replace(ask, pad=draw.choice((10, 3000, 70_000, 400_000)))
    if ask.body is None and way.kind == "application/json" and way.body and draw.random() < 0.05:
        ask = replace(ask, packed=True)
    if (way.body or ask.body) and draw.random() < 0.25:
        odd, trailers = draw.random() < 0.3, draw.random() < 0.3
        return replace(ask, framing="chunked", extensions=odd, trailers=trailers)
    if draw.random() < 0.1:
        return replace(ask, version="1.0", fields=_unexpecting(ask))
    return ask


def _odd(draw: random.Random, ask: Ask) -> Ask:
    blank, pieces = draw.random() < 0.04, draw.choice((1, 1, 1, 1, 2, 5))
    ask = replace(ask, absolute=draw.random() < 0.05, blank=blank, pieces=pieces)
    if draw.random() < 0.08:
        wrong, method = draw.choice(list(WRONG)), ask.method.replace("HEAD", "")
        fields = _unexpecting(ask)
        ask = replace(ask, wrong=wrong, version="1.1", absolute=False, method=method, fields=fields)
    return ask


def _answer(draw: random.Random, name: str) -> Answer:
    kinds = ("json", "json", "events", "text", "none")
    kind = draw.choice(kinds if WAYS[name].body and WAYS[name].events else ("json", "text", "none"))
    answer = Answer(
        kind=kind,
        fields=_some(draw, FIELDS_OF_ANSWERS, 0.4),
        framing=draw.choice(("length", "length", "chunked", "close")),
        usage=draw.choice((0, draw.randint(1, 1000))),
        pad=draw.choice((0, 0, 0, 0, 0, 0, 100, 5000, 20_000, 300_000)),
        packed=kind != "none" and draw.random() < 0.05,
        trailers=draw.random() < 0.2,
        split=draw.random() < 0.3,
        pieces=draw.choice((1, 1, 1, 2, 3, 7)),
    )
    if draw.random() < 0.15:
        answer = replace(answer, status=draw.choice([s for s in STATUSES if name != "messages" or s != 404]))
    if draw.random() < 0.06:
        answer = replace(answer, interim=draw.choice(((100,), (102,), (103,), (100, 103))))
    return _broken(draw, answer)


def _broken(draw: random.Random, answer: Answer) -> Answer:
    match draw.randint(0, 29):
        case 0 | 1 | 2 | 3:
            return replace(answer, cut=draw.randrange(1000), end=draw.choice(("close", "reset")))
        case 4 | 5:
            return replace(answer, end=draw.choice(("close", "reset")))
        case 6 | 7 if answer.framing != "close" and answer.pad < 10_000:
            return replace(answer, twice=draw.choice(("together", "later")), pieces=1)
        case 8:
            return replace(answer, wrong=draw.choice(list(WRONG_ANSWERS)))
        case 9 if answer.kind == "events":
            return replace(answer, last=False)
    return answer


# The shortest case


def shortest(case: Case, shows: Callable[[Case], bool], most: int) -> Case:
    """The least of ``case`` that still ``shows`` it, within so many tries."""
    left = [most]

    def holds(other: Case) -> bool:
        left[0] -= 1
        return left[0] >= 0 and shows(other)

    while left[0] > 0 and (less := next((each for each in _less(case) if holds(each)), None)):
        case = less
    return case


def _less(case: Case) -> Iterator[Case]:
    for number, line in enumerate(case.lines):
        around = case.lines[:number], case.lines[number + 1 :]
        if len(case.lines) > 1:
            yield replace(case, lines=(*around[0], *around[1]))
        for asks in _fewer(line.asks):
            yield replace(case, lines=(*around[0], replace(line, asks=asks), *around[1]))
        if line.pipelined:
            yield replace(case, lines=(*around[0], replace(line, pipelined=False), *around[1]))
    if case.at_once:
        yield replace(case, at_once=False)
    if case.keyed:
        yield replace(case, keyed=False)


def _fewer(asks: tuple[Ask, ...]) -> Iterator[tuple[Ask, ...]]:
    for number, ask in enumerate(asks):
        before, after = asks[:number], asks[number + 1 :]
        if before or after:
            yield (*before, *after)
        for less in _simpler(ask):
            yield (*before, less, *after)


def _simpler(record: Any) -> Iterator[Any]:
    """``record`` with one thing more as usual."""
    for each in fields(record):
        value = getattr(record, each.name)
        if each.default is MISSING or value == each.default:
            continue
        yield replace(record, **{each.name: each.default})
        if isinstance(value, Answer):
            yield from (replace(record, answer=less) for less in _simpler(value))
        elif isinstance(value, tuple) and len(value) > 1:
            for number in range(len(value)):
                yield replace(record, **{each.name: (*value[:number], *value[number + 1 :])})
