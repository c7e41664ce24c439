"""The members of a question's JSON that are left out, set or added before its engine gets it. Pure.

Only the members that are named change: the bytes of all others are passed on as they came, in their order. So
numbers keep their digits and text its escapes, whatever a reader of JSON would make of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from types import MappingProxyType

from anvil_mux.errors import BadRequest
from anvil_mux.protocol import foreign

SYSTEM_IN: Mapping[str, str] = {
    **dict.fromkeys(
        (
            "/v1/chat/completions",
            "/v1/chat/completions/batch",
            "/v1/chat/completions/input_tokens",
            "/apply-template",
            "/tokenize",
        ),
        "messages",
    ),
    **dict.fromkeys(("/v1/messages", "/v1/messages/count_tokens"), "system"),
    **dict.fromkeys(("/v1/responses", "/v1/responses/compact", "/v1/responses/input_tokens"), "instructions"),
}
"""Path of an engine -> the field of a question in which a conversation's system message stands."""
SYSTEM_ROLES = ("system", "developer")

_decode = json.JSONDecoder().raw_decode
_SPACE = re.compile(r"[ \t\r\n]*")


def rewritten(
    body: bytes | bytearray,
    strip: Collection[str],
    put: Mapping[str, str],
    default: Mapping[str, str] = MappingProxyType({}),
) -> bytes:
    """Return ``body`` without the members in ``strip``, and with those in ``put`` (name -> JSON).

    ``default``: those that it gets if it has none of that name. A member with the value null is left out.
    """
    missing = {name: value for name, value in {**default, **put}.items() if value != "null"}
    kept = []
    for name, written, value in _members(body):
        if name in put and name in missing:
            kept.append(written[:value] + missing.pop(name))
        elif name not in strip and name not in put:
            kept.append(written)
            missing.pop(name, None)
    kept += [f"{json.dumps(name)}:{value}" for name, value in missing.items()]
    return ("{" + ",".join(kept) + "}").encode()


def with_system(body: bytes | bytearray, path: str, system: str) -> bytes | bytearray:
    """Return ``body`` with a system message, if it is a conversation that has none; else as it is."""
    field = SYSTEM_IN.get(path)
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
