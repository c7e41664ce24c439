"""API keys: who may ask, for which models, and who may see and change the whole.

Keys come from a file (``key_file``) and from ``ANVIL_API_KEYS``, one to a line (in the variable also
separated by ``;``), with what it may do behind it:

    KEY                          everything, also with a name= or a limit
    KEY models=a,b               these models, their lists, nothing else; models=* for all
    KEY models=a state           also the status page, /healthz, /metrics and /usage
    KEY name=alice models=* admin
    KEY models=* requests=8 waiting=2      at most 8 at once, of which at most 2 wait for a model
    KEY models=* swap=never                served by what is resident; nothing is loaded or evicted for it

Only digests are kept, and a key may be given as one (``sha256:`` and 64 hex digits). A key that a request
shows is compared with all of them, each time in the same number of steps. Pure but for reading the file.

A line without rights is meant for the one person who has the only key. Beside keys of others it may have been
written without knowing what it allows: ``Keyring.warnings``.
"""

from __future__ import annotations

import re
from base64 import b64decode
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from hmac import compare_digest
from pathlib import Path
from typing import NamedTuple

from anvil_mux import state
from anvil_mux.command import API_KEYS
from anvil_mux.config.kinds import Diagnostic, Position, advice
from anvil_mux.errors import ConfigError, Unauthorized

SHORTEST = 8
FIELDS = (b"authorization", b"x-api-key", b"api-key")
"""The header fields in which clients show their keys; no engine sees these."""

UNNAMED = "unnamed"
"""The name of keys that are given none: their usage is counted together."""

_PLAIN = re.compile(r"[!-+\--:<-~]+")
"""The pattern for keys: printable, without comma and semicolon, which people separate keys by."""
_COUNT = re.compile(r"[1-9][0-9]{0,5}")
_DIGEST = re.compile(r"sha256:([0-9a-fA-F]{64})")


@dataclass(frozen=True, slots=True)
class Key:
    """One API key and its rights."""

    digest: bytes
    name: str = UNNAMED
    """The name by which its usage is counted, together with that of others of the same name."""
    models: frozenset[str] | None = None
    """Names that it may use, of models and whatever else stands for models; None: all."""
    state: bool = True
    """Whether it sees the state of the whole: the status page and its stream, /healthz, /metrics, /why."""
    admin: bool = True
    """Whether it may load and unload, and do everything else there is."""
    requests: int | None = None
    """How many it may have at once, waiting or running."""
    waiting: int | None = None
    """How many of these may wait for a model."""
    swaps: bool = True
    """Whether models are loaded for its requests."""

    @property
    def sees_all(self) -> bool:
        """Whether it may learn of every model, also of those that it may not use."""
        return self.models is None or self.state or self.admin

    def allows_all_of(self, before: Key) -> bool:
        """Return whether it has each right that it had ``before``."""
        has_models = self.models is None or (before.models is not None and before.models <= self.models)
        return has_models and self.state >= before.state and self.admin >= before.admin


class Keyring:
    """All keys; without any, nobody is asked for one."""

    def __init__(self, keys: Iterable[Key] = (), warnings: Iterable[Diagnostic] = ()) -> None:
        self._keys = tuple(keys)
        self._by_digest = {key.digest: key for key in self._keys}
        self.warnings = tuple(warnings)
        """Diagnostics of lines that may not say what was meant."""
        self._next: Keyring | None = None

    def __len__(self) -> int:
        return len(self._keys)

    def give_way(self, to: Keyring) -> None:
        """Note the keys that hold instead of these from now on."""
        self._next = to

    def admits(self, key: Key | None) -> bool:
        """Whether what began with ``key`` may still do what it might, by the keys that hold now."""
        if not self._current()._keys:
            return True
        current = self.current(key) if key else None
        return key is not None and current is not None and current.allows_all_of(key)

    def current(self, key: Key) -> Key | None:
        """Return ``key`` with the rights that it has now, or None if it was removed."""
        return self._current()._by_digest.get(key.digest)

    def _current(self) -> Keyring:
        ring = self
        while ring._next:
            ring = ring._next
        return ring

    def find(self, fields: Mapping[bytes, bytes]) -> Key | None:
        """The key that a request shows; None if it shows none of ours."""
        found = None
        for each in shown(fields):
            digest = sha256(each).digest()
            for key in self._keys:
                if compare_digest(digest, key.digest):
                    found = key
        return found

    def of(self, fields: Mapping[bytes, bytes]) -> Key:
        """The key that a request shows; Unauthorized if it shows none of ours."""
        found = self.find(fields)
        if found is None:
            what = "is not known" if list(shown(fields)) else "is missing"
            raise Unauthorized(f"The API key {what}: send it as Authorization: Bearer KEY, or as x-api-key.")
        return found

    def sharing(self, most: int) -> Keyring:
        """The same keys, each with half of ``most`` requests that may wait, if its line says nothing.

        A single key has nobody to share with.
        """
        part = max(most // 2, 1) if len(self) > 1 else None
        keys = [replace(key, waiting=part) if key.waiting is None else key for key in self._keys]
        return Keyring(keys, self.warnings)


def load(file: Path | None, environ: Mapping[str, str]) -> Keyring:
    """The keys of file and environment; ConfigError tells every line that cannot be read, and no key."""
    problems: list[str] = []
    lines: list[_KeyLine] = []
    sources = [(API_KEYS, environ.get(API_KEYS, "").replace(";", "\n"))]
    if file is not None:
        try:
            sources.append((str(file), state.read_text(file)))
        except (OSError, UnicodeDecodeError) as error:
            problems.append(f"key_file: {file} cannot be read: {getattr(error, 'strerror', None) or error}")
    for source, text in sources:
        for number, line in enumerate(text.splitlines(), 1):
            try:
                lines += _read(line, Position(source, number))
            except ValueError as error:
                problems.append(f"{source}:{number}: {error}")
    if file is not None and not lines and not problems:
        problems.append(f"key_file: {file} holds no key")
    problems += _contradictions(lines)
    if problems:
        raise ConfigError([Diagnostic(problem, key=("x-anvil", "key_file")) for problem in problems])
    return Keyring([line.key for line in lines], _warnings(lines))


class _KeyLine(NamedTuple):
    """A line that holds a key."""

    key: Key
    words: tuple[str, ...]
    """The words behind the key."""
    says_rights: bool
    place: Position


def _contradictions(lines: Iterable[_KeyLine]) -> Iterator[str]:
    """The problems with lines about a key of which another line says something else."""
    first: dict[bytes, _KeyLine] = {}
    for line in lines:
        other = first.setdefault(line.key.digest, line)
        if other.key != line.key:
            yield f"{line.place}: this key has another name, or other rights, in {other.place}: keep one line"


def _warnings(lines: Iterable[_KeyLine]) -> Iterator[Diagnostic]:
    """Warn of keys that may do everything only because their lines say no rights, where there are others."""
    silent = [line for line in lines if not line.says_rights]
    for line in silent:
        if any(other.says_rights or other.key.name != line.key.name for other in lines):
            whose = "" if line.key.name == UNNAMED else f" of {line.key.name}"
            said = (
                f"the key{whose} may do everything, because it has no models=, state or admin: "
                "say admin if that is meant, or models=* for the use of all models"
            )
            write = " ".join(["KEY", *line.words, "models=*" if line.words else "admin"])
            yield advice(said, write).at(line.place, ("x-anvil", "key_file"), "")


def _read(line: str, place: Position) -> Iterator[_KeyLine]:
    words = line.split()
    if not words or words[0].startswith("#"):
        return
    digest, said = _digest(words[0]), words[1:]
    name, models, flags = "", None, set()
    limits: dict[str, int] = {}
    swaps = True
    for word in said:
        match word.partition("="):
            case "name", "=", value if value:
                name = value
            case "models", "=", value if value:
                models = None if value == "*" else frozenset(value.split(","))
                if models is not None and "" in models:
                    raise ValueError("models= has an empty name: write the names with one comma between two")
                flags.add("models")
            case "state" | "admin", "", "":
                flags.add(word)
            case "requests" | "waiting" as limit, "=", value if _COUNT.fullmatch(value):
                limits[limit] = int(value)
            case "swap", "=", "never":
                swaps = False
            case _:
                raise ValueError(
                    f"{word.partition('=')[0]!r} is not name=, models=, state, admin, requests=, waiting= "
                    "or swap=never"
                )
    everything = not flags
    admin = everything or "admin" in flags
    key = Key(digest, name or UNNAMED, models, admin or "state" in flags, admin, swaps=swaps, **limits)
    yield _KeyLine(key, tuple(said), not everything, place)


def _digest(word: str) -> bytes:
    if hashed := _DIGEST.fullmatch(word):
        digest = bytes.fromhex(hashed[1])
        if digest == sha256(b"").digest():
            raise ValueError("this is the SHA-256 of nothing: what was hashed was empty")
        return digest
    if not _PLAIN.fullmatch(word):
        raise ValueError("a key is printable ASCII without comma and semicolon; one key to a line")
    if len(word) < SHORTEST:
        raise ValueError(f"a key has at least {SHORTEST} characters; `openssl rand -hex 24` makes a good one")
    return sha256(word.encode("ascii")).digest()


def shown(fields: Mapping[bytes, bytes]) -> Iterator[bytes]:
    """The keys in a request's head: as Bearer, as the password of Basic, or in a field of its own."""
    scheme, _, rest = fields.get(b"authorization", b"").partition(b" ")
    if scheme.lower() == b"bearer":
        yield rest.strip()
    elif scheme.lower() == b"basic":
        try:
            yield b64decode(rest.strip(), validate=True).partition(b":")[2]
        except ValueError:
            pass
    for name in FIELDS[1:]:
        if name in fields:
            yield fields[name].strip()
