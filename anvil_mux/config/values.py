"""The values of settings that are more than words and numbers: names of models, servers, profiles, policies,
hooks.

A preset is one more name for a model, with parameters of its own and perhaps a system message, for the same
engine: to ask for one after the other swaps nothing. A LoRA adapter is a preset that the engine knows
(abilities.py). A name of ``any_of`` stands for several models: the first of its rules that fits a request
says which, and of those the resident one serves. The ``fallback`` of a model are others that answer when it
cannot be served, or not in time.

A server that somebody else runs has a ``url``, which is what an SDK of OpenAI's takes as its base URL, so it
ends with /v1 as a rule; without a path it gets one.

A profile says how fast an engine is, measured: the time to a first token by the length of a prompt, the time
for each further token by how many requests are answered at once and how long they are. ``anvil-mux profile``
measures and writes such a file, in the form of Llumnix's profiles; routing predicts with it. Between what was
measured lines are drawn; what is less than all of it takes as long as the least. Of what is more nothing is
said (infinity): an engine never seen with so many requests may do anything. Less never takes longer than
more. Where it was measured so, something disturbed one of the two, and nobody knows which: both take what
lies halfway between the most that less took and the least that more did. Whoever looks for the fullest engine
would find an empty one otherwise.
"""

from __future__ import annotations

import json
import math
import re
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from anvil_mux.clock import MOST_COUNT
from anvil_mux.config import kinds
from anvil_mux.config.kinds import (
    FLAG,
    FLAGS,
    NAMES,
    SECONDS,
    TEXT,
    ValueKind,
    as_yaml,
    read_seconds,
    show,
    unfit,
)
from anvil_mux.protocol import foreign

# Fields of questions

UNTOUCHED = ("model", "stream")
"""The fields that decide who answers, and in which form."""


def _touchable(names: Any) -> Any:
    for name in UNTOUCHED:
        if name in names:
            raise ValueError(
                f"{name} is not to be changed here; served_model says what the engine is asked for"
            )
    return names


def _or_json(kind: ValueKind) -> ValueKind:
    """The same values, of which a label may hold a mapping as JSON."""

    def read(value: Any) -> Any:
        if isinstance(value, str) and value.lstrip().startswith("{"):
            try:
                value = foreign.read(value)
            except ValueError as error:
                raise ValueError(f"is not JSON: {error}") from None
        return kind.read(value)

    shape = kinds.any_of(kind.shape, {"type": "string", "pattern": r"{|\$"})
    return ValueKind(kind.name, read, shape)


def _read_set(value: Any) -> tuple[tuple[str, str], ...]:
    """Fields with their values as JSON."""
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        example = "{temperature: 0.2}"
        raise unfit(f"must hold fields and their values, such as {example}", example)
    _touchable(value)
    try:
        return tuple([(name, json.dumps(each, allow_nan=False)) for name, each in value.items()])
    except (TypeError, ValueError):
        raise ValueError("holds a value that JSON does not have; put quotes around it") from None


STRIP = NAMES.then(_touchable)
SET = _or_json(ValueKind("{name: value}", _read_set, {"type": "object"}))


# Presets and adapters


@dataclass(frozen=True, slots=True)
class Preset:
    """A name by which a model may be asked for, with what is changed in the questions that use it."""

    name: str
    strip: tuple[str, ...] = ()
    set: tuple[tuple[str, str], ...] = ()
    default: tuple[tuple[str, str], ...] = ()
    system: str = ""
    """The system message of conversations that have none."""
    served_model: str | None = None
    """The model id that the engine is asked for; None: the backend's."""
    is_adapter: bool = False
    """Whether it is a LoRA adapter, which every replica must have."""

    def over(
        self,
        strip: tuple[str, ...],
        put: Sequence[tuple[str, str]],
        default: Sequence[tuple[str, str]] = (),
    ) -> tuple[tuple[str, ...], dict[str, str], dict[str, str]]:
        """Return the fields to be stripped, set, and added, of a service and of this, which wins."""
        own = {*self.strip, *dict(self.default)}
        kept = {name: value for name, value in put if name not in own}
        added = {name: value for name, value in default if name not in self.strip}
        return (*strip, *self.strip), {**kept, **dict(self.set)}, {**added, **dict(self.default)}


def _read_system(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"must be the text of a system message, not {show(value)}")
    return value


_SYSTEM = ValueKind("text", _read_system, {"type": "string"})
_PRESET = kinds.record(dict, set=SET, default=SET, strip=STRIP, system=_SYSTEM)


def _read_preset(name: Any, about: Any) -> Any:
    name = TEXT.read(name)
    if not isinstance(about, dict) or not about:
        text = "must hold set, default, strip or system; a name without them is one of `aliases`"
        raise unfit(text, write=f"aliases: [{name}]")
    return _PRESET.then(lambda said: Preset(name, **said)).read(about)


_PRESETS_EXAMPLE = "{fast: {set: {temperature: 0.2}}}"
_PRESETS = kinds.by_name(
    _read_preset,
    _PRESET.shape,
    f"names and what is set for each, such as {_PRESETS_EXAMPLE}",
    _PRESETS_EXAMPLE,
).then(lambda presets: tuple(presets.values()))
PRESETS = _or_json(_PRESETS).called("{name: {set, default, strip, system}}")

Loras = tuple[tuple[str, str], ...]
"""Adapters, each as its name and its path; an empty path: the engine has it already."""


def _named(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values by names that are text."""
    return {TEXT.read(name): each for name, each in values.items()}


_PATHS = kinds.by_name(lambda _, path: TEXT.read(path), TEXT.shape, "{name: path}", "").then(_named)
_ALONE = NAMES.then(lambda names: dict.fromkeys(names, ""))
LORAS = (
    _or_json(kinds.either(_ALONE, _PATHS))
    .then(lambda loras: tuple(loras.items()))
    .called("{name: path}, or list of names")
)


# Several models


When = tuple[tuple[str, bool | int], ...]
"""Conditions on a request, all of which must hold, in one order; (): it may be any request."""


class Rule(NamedTuple):
    """Equal models, or presets of models, and the requests that they are for."""

    models: tuple[str, ...]
    """Their names; the first that is resident serves; if none is, the first that can be loaded is."""
    when: When = ()

    @property
    def conditions(self) -> str:
        """The conditions, as a file has them; "" for none."""
        return ", ".join([f"{name}: {str(wanted).lower()}" for name, wanted in self.when])

    @property
    def words(self) -> str:
        """The models and the conditions, as people read them."""
        models = " or ".join(self.models)
        return f"{models} if {self.conditions}" if self.when else models

    def as_written(self) -> list[object]:
        """The candidates as a file has them."""
        if not self.when:
            return list(self.models)
        model = self.models[0] if len(self.models) == 1 else list(self.models)
        return [{"model": model, "when": dict(self.when)}]


class AnyOf(NamedTuple):
    """The models that one name stands for: those of the first rule that fits a request serve it."""

    rules: tuple[Rule, ...]
    swaps: bool = True
    """Whether one is loaded if none is resident."""

    @property
    def models(self) -> tuple[str, ...]:
        """The names of all, each once."""
        return names_in(self.rules)

    @property
    def has_conditions(self) -> bool:
        """Whether the request has a say in which of them serves."""
        return any(rule.when for rule in self.rules)

    @property
    def words(self) -> str:
        """The models and their conditions, as people read them."""
        words = words_of(self.rules) if self.has_conditions else f"any of {', '.join(self.models)}"
        return words if self.swaps else f"{words}, swap: never"

    def renamed(self, names: Mapping[str, str]) -> AnyOf:
        """The same with other names for some of its models, each once in a rule."""
        rules = [Rule(_each_once(names.get(name, name) for name in r.models), r.when) for r in self.rules]
        return self._replace(rules=tuple(rules))

    def as_written(self) -> list[object]:
        """The candidates as a file has them."""
        return [each for rule in self.rules for each in rule.as_written()]

    def to_json(self) -> dict[str, object]:
        return {"models": self.as_written(), "swap": "allowed" if self.swaps else "never"}


def names_in(rules: Iterable[Rule]) -> tuple[str, ...]:
    """The names of the models of all rules, each once."""
    return _each_once(name for rule in rules for name in rule.models)


def words_of(rules: Iterable[Rule]) -> str:
    """The models and conditions of rules, one after another, as people read them."""
    return ", else ".join(rule.words for rule in rules)


def _each_once(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))


CONDITIONS = {"images": FLAG, "audio": FLAG, "tools": FLAG, "tokens_over": kinds.COUNT}
"""The conditions of ``when``: that a request holds such things, or none, and about how long its prompt is."""
_WHEN = (
    kinds.record(dict, **CONDITIONS)
    .of(
        lambda value: isinstance(value, dict) and any(each is not None for each in value.values()),
        "must hold conditions, such as {images: true} or {tokens_over: 32000}",
        "{images: true}",
    )
    .then(lambda found: tuple([(name, found[name]) for name in CONDITIONS if name in found]))
)
_MODEL_WHEN = kinds.record(lambda model=(), when=(): Rule(model, when), model=NAMES, when=_WHEN).but(
    lambda rule: not rule.models, "must name a `model`", "{model: a-model, when: {images: true}}"
)
_CANDIDATE = kinds.either(TEXT.then(lambda name: Rule((name,))), _MODEL_WHEN)


def _read_candidates(value: Any) -> Any:
    if not isinstance(value, list) or not any(isinstance(each, dict) for each in value):
        return [Rule(NAMES.read(value))] if value else []
    return kinds.list_of(_CANDIDATE).read(value)


def _rules(candidates: Iterable[Rule]) -> tuple[Rule, ...]:
    """The rules that candidates come to: neighbours with the same conditions are equals."""
    rules: list[Rule] = []
    for each in candidates:
        if rules and rules[-1].when == each.when:
            rules[-1] = Rule(_each_once(rules[-1].models + each.models), each.when)
        else:
            rules.append(each)
    return tuple(rules)


_CANDIDATES = ValueKind(
    "list of models and {model, when}",
    _read_candidates,
    kinds.any_of(NAMES.shape, {"type": "array", "items": _CANDIDATE.shape}),
).then(_rules)

SWAPS = ("never", "allowed")
"""Whether a name may force a swap."""


def _read_swap(value: Any) -> bool:
    if value not in SWAPS:
        raise unfit(f"must be never or allowed, not {show(value)}", "never")
    return bool(value == "allowed")


_SWAP = ValueKind("never | allowed", _read_swap, kinds.word_shape(SWAPS))
_MODELS_SWAP = kinds.record(lambda models=(), swap=True: AnyOf(models, swap), models=_CANDIDATES, swap=_SWAP)
_SEVERAL = kinds.either(_CANDIDATES.then(AnyOf), _MODELS_SWAP).but(
    lambda several: not several.rules, "must name at least one model", "[a-model, another]"
)
ANY_OF = (
    kinds.by_name(
        lambda _, value: _SEVERAL.read(value),
        _SEVERAL.shape,
        "{name: [models]}",
        "{a-name: [a-model, another]}",
    )
    .then(_named)
    .called("{name: list of models and {model, when}, or {models, swap: never}}")
)


# Other models


_AFTER_EXAMPLE = "{models: [other-model], after: 20s}"
_MODELS_AFTER = kinds.record(lambda models=(), after=None: (models, after), models=NAMES, after=SECONDS).but(
    lambda found: not found[0], f"must name a model: {_AFTER_EXAMPLE}", _AFTER_EXAMPLE
)
FALLBACK = kinds.either(NAMES.called("list of models").then(lambda names: (names, None)), _MODELS_AFTER)
"""The models, and the seconds that a request may wait before they are tried."""


# Servers elsewhere

URL_EXAMPLE = "https://api.openai.com/v1"
PORTS = {"http": 80, "https": 443}
VERSION = "/v1"


class Site(NamedTuple):
    """The parts of a ``url``."""

    secure: bool
    host: str
    port: int
    base: str
    """The path below which it is asked, which stands for /v1; without a slash at its end."""

    @property
    def address(self) -> tuple[str, int]:
        return self.host, self.port

    @property
    def name(self) -> str:
        """Host and port, as they stand in a Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        usual = self.port == PORTS["https" if self.secure else "http"]
        return host if usual else f"{host}:{self.port}"

    def path(self, route: str) -> str:
        """The path at which it has a route of ours: what is below /v1 here is below ``base`` there."""
        if route.startswith(f"{VERSION}/"):
            return self.base + route[len(VERSION) :]
        return self.base.removesuffix(VERSION) + route


def site(url: str) -> Site:
    """Take a ``url`` apart that was read by its kind."""
    parts = urlsplit(url)
    port = parts.port or PORTS[parts.scheme]
    return Site(parts.scheme == "https", parts.hostname or "", port, parts.path.rstrip("/") or VERSION)


def _read_base_url(value: Any) -> str:
    text: str = TEXT.read(value)
    try:
        parts = urlsplit(text)
        fits = parts.scheme in PORTS and bool(parts.hostname) and parts.port != 0 and text.isascii()
    except ValueError:
        fits = False
    if not fits or " " in text:
        said = f"must be an address such as https://api.openai.com/v1, not {show(text)}"
        raise unfit(
            said, f"https://{text}" if re.fullmatch(r"[\w.-]+\.\w+(:\d+)?(/\S*)?", text) else URL_EXAMPLE
        )
    if parts.username is not None or parts.password is not None:
        said = "must hold no key or password: name a variable with api_key_env"
        raise unfit(said, f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}")
    if parts.query or parts.fragment:
        said = "must end with its path, as https://api.openai.com/v1 does"
        raise unfit(said, f"{parts.scheme}://{parts.netloc}{parts.path}")
    path = parts.path.rstrip("/")
    for route in ("/chat/completions", "/completions", "/models"):
        if path.endswith(route):
            said = "must be the base URL of the API, without the route: https://HOST/v1"
            raise unfit(said, f"{parts.scheme}://{parts.netloc}{path.removesuffix(route)}")
    return f"{parts.scheme}://{parts.netloc}{path}"


URL = ValueKind("http(s)://HOST[:PORT][/PATH]", _read_base_url, kinds.text_shape("^https?://"))


# Profiles

CHUNK = 8192
"""Tokens that an engine takes at once, where the file does not say."""

Line = tuple[tuple[float, float], ...]
"""Points of a line, from left to right."""


class Profile(NamedTuple):
    """The times of an engine in milliseconds, as measured."""

    ttft: Line
    """Tokens of a prompt -> until its first token."""
    tpot: tuple[tuple[int, Line], ...]
    """Requests answered at once -> tokens in each of them -> for each further token."""
    chunk: int = CHUNK

    def first_token(self, tokens: float, batch: float, batch_tokens: float) -> float:
        """Predict the first token for ``tokens`` that are to be computed, in chunks, beside the answers under
        way.
        """
        whole, rest = divmod(tokens, self.chunk)
        beside = self.next_token(batch, batch_tokens / batch) if batch else 0.0
        steps = whole * (_on(self.ttft, self.chunk) + beside) if whole else 0.0
        return steps + (_on(self.ttft, rest) + beside if rest else 0.0)

    def prefill(self, cached: float, tokens: float, beside: float = 0.0) -> float:
        """Predict how long a prompt is computed of which ``cached`` tokens are there.

        ``beside``: what answers under way take of each chunk. A prompt longer than was measured is endless.
        """
        if tokens > self.ttft[-1][0]:
            return math.inf
        return _on(self.ttft, tokens) - _on(self.ttft, cached) + (tokens - cached) * beside / self.chunk

    def computed(self, cached: float, milliseconds: float, beside: float = 0.0) -> float:
        """Predict how many tokens of such a prompt are computed after so long: the inverse of ``prefill``."""
        if math.isinf(beside) or cached > self.ttft[-1][0]:
            return 0.0
        line = [(x, y + x * beside / self.chunk) for x, y in self.ttft] if beside else self.ttft
        return _reach(line, _on(line, cached) + max(milliseconds, 0.0)) - cached

    def next_token(self, batch: float, tokens_each: float) -> float:
        """Predict each further token while ``batch`` requests of so many tokens each are answered."""
        sizes = [size for size, _ in self.tpot]
        right = bisect_left(sizes, batch)
        if right == len(sizes):
            return math.inf
        _, line = self.tpot[right]
        if sizes[right] == batch or right == 0:
            return _on(line, tokens_each)
        left = self.tpot[right - 1]
        return _on(((left[0], _on(left[1], tokens_each)), (sizes[right], _on(line, tokens_each))), batch)


def _on(line: Sequence[tuple[float, float]], x: float) -> float:
    """The height of ``line`` at ``x``; infinity beyond its end."""
    right = bisect_left(line, (x,))
    if right == len(line):
        return math.inf
    x1, y1 = line[right]
    if x1 == x or right == 0:
        return y1
    x0, y0 = line[right - 1]
    if math.isinf(y0):
        return y0
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


def _reach(line: Sequence[tuple[float, float]], y: float) -> float:
    """How far to the right ``line`` is at most ``y`` high."""
    right = bisect_right(line, y, key=lambda point: point[1])
    if right == 0:
        return 0.0
    x0, y0 = line[right - 1]
    if right == len(line):
        return x0
    x1, y1 = line[right]
    return x0 + (x1 - x0) * (y - y0) / (y1 - y0)


def read_profile(text: str) -> Profile:
    """The profile in the text of a file; ValueError says what is wrong with it."""
    try:
        found = foreign.read(text)
    except ValueError as error:
        raise ValueError(f"is not JSON: {error}") from None
    ttft = [(_figure(row, "tokens_num"), _figure(row, "p50")) for row in _measurements(found, "ttft")]
    tpot: dict[float, list[tuple[float, float]]] = defaultdict(list)
    for row in _measurements(found, "tpot"):
        tpot[_figure(row, "batch_size")].append((_figure(row, "tokens_per_request"), _figure(row, "p50")))
    about = found.get("metadata")
    chunk = about.get("max_num_batched_tokens", CHUNK) if isinstance(about, dict) else CHUNK
    if type(chunk) is not int or not 1 <= chunk <= MOST_COUNT:
        raise ValueError(f"metadata.max_num_batched_tokens must be a whole number from 1 to {MOST_COUNT}")
    sizes = sorted(tpot)
    lines = _rising([_sorted(tpot[size], "tpot") for size in sizes])
    (prompts,) = _rising([_sorted([(0.0, 0.0), *ttft], "ttft")])
    return Profile(prompts, tuple(zip(map(int, sizes), lines, strict=True)), chunk)


def _measurements(found: Any, part: str) -> list[dict[str, Any]]:
    about = found.get(part) if isinstance(found, dict) else None
    rows = about.get("results") if isinstance(about, dict) else None
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"must hold {part}.results, a list of measurements")
    return rows


def _figure(row: dict[str, Any], key: str) -> float:
    value = row.get(key)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value <= MOST_COUNT:
        raise ValueError(f"{key} must be a number from 0 to {MOST_COUNT} in every measurement")
    return float(value)


def _sorted(points: Sequence[tuple[float, float]], part: str) -> Line:
    line = tuple(sorted(points))
    if len({x for x, _ in line}) < len(line):
        raise ValueError(f"{part}.results holds two measurements of the same point")
    return line


def _rising(lines: Sequence[Line]) -> list[Line]:
    """``lines``, nowhere higher than further right, nor than a later line, each as far as it went."""
    grid = sorted({x for line in lines for x, _ in line})
    heights = [[_on(line, x) for x in grid if x <= line[-1][0]] for line in lines]
    found = []
    for row, own in enumerate(heights):
        points = []
        for column, x in enumerate(grid[: len(own)]):
            less = max(y for line in heights[: row + 1] for y in line[: column + 1])
            more = min(y for line in heights[row:] for y in line[column:])
            points.append((x, (less + more) / 2))
        found.append(tuple(points))
    return found


# Policies


def _read_chosen(value: Any) -> tuple[str, dict[str, object]]:
    """A policy and its settings."""
    if isinstance(value, str) and value:
        return value, {}
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        named = as_yaml({"name": "NAME", **value}) if isinstance(value, dict) else ""
        raise unfit(f"must be a name, or {{name: ..., setting: value}}, not {show(value)}", named)
    return value["name"], {key: _read_chosen_setting(each) for key, each in value.items() if key != "name"}


def _read_chosen_setting(value: Any) -> object:
    """Read a setting of a policy, which is a number or a flag where it can be, also from text."""
    try:
        return read_seconds(value) if isinstance(value, str) else value
    except ValueError:
        return FLAGS.get(value.lower(), value)


CHOSEN = ValueKind(
    "name, or {name: ..., its settings}",
    _read_chosen,
    kinds.any_of(
        {"type": "string", "minLength": 1},
        {"type": "object", "required": ["name"], "properties": {"name": {"type": "string"}}},
    ),
)

DEFAULT_ROUTING = "least_delay"
"""The routing policy of models that name none."""
ROUTING_NAME = re.compile(r"[A-Za-z0-9._+-]+")
"""The pattern for names of routing policies and metrics, which appear in headers."""
STORES = ("redis://", "rediss://", "unix://")

Routed = tuple[str, dict[str, Any], str, str]
"""The setting ``routing``: (the default policy, the file's own policies, mode, store)."""


def _routed(
    default: str = DEFAULT_ROUTING,
    mode: str = "lite",
    policies: dict[str, Any] | None = None,
    store: str = "",
) -> Routed:
    return default, policies or {}, mode, store


def _read_store(value: Any) -> str:
    if value and not str(value).startswith(STORES):
        raise unfit("must be the address of a Redis, as redis://host:6379/0", "redis://host:6379/0")
    return str(value)


def _or_empty(kind: ValueKind) -> ValueKind:
    return ValueKind(kind.name, kind.read, kinds.any_of(kind.shape, {"const": ""}))


_POLICIES = ValueKind("{name: policy}", dict, {"type": "object"}).of(
    kinds.is_mapping, "must hold {name: policy}", "{mine: {like: load_balance}}"
)
_ROUTED = kinds.record(
    _routed,
    default=TEXT,
    mode=_or_empty(kinds.one_of("lite", "full")),
    policies=_or_empty(_POLICIES),
    store=_or_empty(ValueKind("text", _read_store, kinds.text_shape("^(redis|rediss|unix)://"))),
)


def _read_routing(value: Any) -> Routed:
    if not isinstance(value, dict):
        return _routed(TEXT.read(value))
    # What a variable leaves empty says nothing.
    routed: Routed = _ROUTED.read({key: each or None for key, each in value.items()})
    return routed


ROUTING = ValueKind(
    "name, or {default, mode: lite or full, policies: {name: policy}, store}",
    _read_routing,
    kinds.any_of(TEXT.shape, _ROUTED.shape),
)


# Hooks

OCCASIONS = ("loaded", "unloaded", "failed", "severed")


@dataclass(frozen=True, slots=True)
class Hook:
    """A command or an address that gets the events of models (telemetry/hooks.py), and what it is for."""

    on: tuple[str, ...] = OCCASIONS
    run: tuple[str, ...] = ()
    """The command and its arguments; no shell."""
    url: str = ""
    timeout: float = 10.0

    @property
    def name(self) -> str:
        return self.url or " ".join(self.run)


def _read_command(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not value or not all(isinstance(word, str) and word for word in value):
        text = f"must be a list of words, [program, argument, ...], not {show(value)}"
        words = value.split() if isinstance(value, str) else []
        raise unfit(text, as_yaml(words) if words else "[program, argument]")
    return tuple(value)


def _read_url(value: Any) -> str:
    if not str(value).startswith(("http://", "https://")):
        text = f"must begin with http:// or https://, not {show(value)}"
        raise unfit(text, f"http://{str(value).rpartition('://')[2]}")
    return str(value)


COMMAND = ValueKind(
    "[program, argument, ...]",
    _read_command,
    {"type": "array", "minItems": 1, "items": {"type": "string", "minLength": 1}},
)
_HOOK = kinds.record(
    Hook,
    on=kinds.some_of(OCCASIONS, {}),
    run=COMMAND,
    url=ValueKind("http(s)://...", _read_url, kinds.text_shape("^https?://")),
    timeout=kinds.positive(SECONDS),
).of(
    kinds.has_one_of("run", "url"),
    "must be hooks such as {on: [failed], run: [notify-send, anvil]} or {url: http://...}",
    "{on: [failed], run: [notify-send, anvil]}",
)
HOOKS = kinds.list_of(_HOOK.called("{on, run or url, timeout}"))
