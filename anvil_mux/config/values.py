"""The values of settings that are more than words and numbers: names of models, addresses, policies, hooks.

A preset is one more name for a model, with parameters of its own and perhaps a system message, for the same
engine: to ask for one after the other swaps nothing. A LoRA adapter is a preset that the engine knows
(abilities.py). A name of ``any_of`` stands for several models, in order of preference: the resident one
serves. The ``fallback`` of a model are others that answer when it cannot be served, or not in time.

A server that somebody else runs has a ``url``, which is what an SDK of OpenAI's takes as its base URL, so it
ends with /v1 as a rule; without a path it gets one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from anvil_mux.config import kinds
from anvil_mux.config.diagnostic import as_yaml, unfit
from anvil_mux.config.kinds import FLAGS, NAMES, SECONDS, TEXT, ValueKind, read_seconds, show
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


def _read_set(value: Any) -> tuple[tuple[str, str], ...]:
    """Fields with their values as JSON; as a label, all of it is JSON."""
    if isinstance(value, str):
        try:
            value = foreign.read(value)
        except ValueError:
            value = None
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        example = "{temperature: 0.2}"
        raise unfit(f"must hold fields and their values, such as {example}", example)
    _touchable(value)
    try:
        return tuple([(name, json.dumps(each, allow_nan=False)) for name, each in value.items()])
    except (TypeError, ValueError):
        raise ValueError("holds a value that JSON does not have; put quotes around it") from None


STRIP = NAMES.then(_touchable)
SET = ValueKind(
    "{name: value}", _read_set, kinds.any_of({"type": "object"}, {"type": "string", "pattern": "{"})
)


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
_PRESET = {"set": SET, "default": SET, "strip": STRIP, "system": _SYSTEM}


def _read_preset(name: Any, about: Any) -> Preset:
    name = TEXT.read(name)
    if not isinstance(about, dict) or not about:
        text = "must hold set, default, strip or system; a name without them is one of `aliases`"
        raise unfit(text, write=f"aliases: [{name}]")
    preset: Preset = kinds.record(partial(Preset, name), **_PRESET).read(about)
    return preset


def _read_presets(value: Any) -> dict[str, Preset]:
    value = _from_json(value)
    if not isinstance(value, dict):
        example = "{fast: {set: {temperature: 0.2}}}"
        text = f"must hold names and what is set for each, such as {example}, not {show(value)}"
        raise unfit(text, example)
    return kinds.read_each(value, _read_preset)


PRESETS = ValueKind(
    "{name: {set, default, strip, system}}",
    _read_presets,
    kinds.any_of(
        kinds.names_shape(kinds.record(Preset, **_PRESET).shape), {"type": "string", "pattern": r"{|\$"}
    ),
).then(lambda presets: tuple(presets.values()))

Loras = tuple[tuple[str, str], ...]
"""Adapters, each as its name and its path; an empty path: the engine has it already."""


def _read_loras(value: Any) -> dict[str, str]:
    value = _from_json(value)
    if not isinstance(value, dict):
        return dict.fromkeys(NAMES.read(value), "")
    paths = {TEXT.read(name): path for name, path in value.items()}
    return kinds.read_each(paths, lambda _, path: TEXT.read(path))


LORAS = ValueKind(
    "{name: path}, or list of names",
    _read_loras,
    kinds.any_of(kinds.names_shape(kinds.text_shape()), kinds.list_shape(kinds.text_shape())),
).then(lambda loras: tuple(loras.items()))


def _from_json(value: Any) -> Any:
    """Read the JSON object that a label may hold."""
    if not isinstance(value, str) or not value.lstrip().startswith("{"):
        return value
    try:
        return foreign.read(value)
    except ValueError as error:
        raise ValueError(f"is not JSON: {error}") from None


# Several models


class AnyOf(NamedTuple):
    """The models, or presets of models, that one name stands for."""

    models: tuple[str, ...]
    """Their names; the first that is resident serves; if none is, the first that can be loaded is."""
    swaps: bool = True
    """Whether one is loaded if none is resident."""

    def to_json(self) -> dict[str, object]:
        return {"models": list(self.models), "swap": "allowed" if self.swaps else "never"}


def _some(models: Any) -> Any:
    if not models:
        raise unfit("must name at least one model", "[a-model, another]")
    return models


SWAPS = ("never", "allowed")
"""Whether a name may force a swap."""


def _read_swap(value: Any) -> bool:
    if value not in SWAPS:
        raise unfit(f"must be never or allowed, not {show(value)}", "never")
    return bool(value == "allowed")


_SWAP = ValueKind("never | allowed", _read_swap, kinds.word_shape(SWAPS))
_MODELS_SWAP = kinds.record(lambda models=(), swap=True: AnyOf(models, swap), models=NAMES, swap=_SWAP)


def _read_several(_: str, value: Any) -> AnyOf:
    if not isinstance(value, dict):
        return AnyOf(NAMES.read(_some(value)))
    found: AnyOf = _MODELS_SWAP.read(value)
    _some(found.models)
    return found


def _read_any_of(value: Any) -> dict[str, AnyOf]:
    if not isinstance(value, dict):
        text = f"must hold {{name: [models]}}, not {show(value)}"
        raise unfit(text, "{a-name: [a-model, another]}")
    return kinds.read_each({TEXT.read(name): each for name, each in value.items()}, _read_several)


ANY_OF = ValueKind(
    "{name: list of models, or {models, swap: never}}",
    _read_any_of,
    kinds.names_shape(kinds.any_of(NAMES.shape, _MODELS_SWAP.shape)),
)


# Other models


def _read_fallback(value: Any) -> tuple[tuple[str, ...], float | None]:
    """The models, and the seconds that a request may wait before they are tried."""
    if not isinstance(value, dict):
        return NAMES.read(value), None
    models, after = _MODELS_AFTER.read(value)
    if not models:
        example = "{models: [other-model], after: 20s}"
        raise unfit(f"must name a model: {example}", example)
    return models, after


_MODELS_AFTER = kinds.record(lambda models=(), after=None: (models, after), models=NAMES, after=SECONDS)
FALLBACK = ValueKind(
    "list of models, or {models, after}", _read_fallback, kinds.any_of(NAMES.shape, _MODELS_AFTER.shape)
)


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


# Projects and addresses


def _read_project(value: Any) -> str:
    if not re.fullmatch(r"[a-z0-9][a-z0-9_-]*", str(value)):
        text = f"must be lower-case letters, digits, - and _, not {show(value)}"
        raise unfit(text, re.sub("[^a-z0-9_-]+", "-", str(value).lower()).strip("-_"))
    return str(value)


PROJECT = ValueKind("text", _read_project, kinds.text_shape(r"^[a-z0-9][a-z0-9_-]*$"))


def _read_listen(value: Any) -> tuple[str, int]:
    host, colon, port = str(value).rpartition(":")
    if colon and not host:
        text = f"needs an address before the colon: 127.0.0.1{value}, or 0.0.0.0{value} for all"
        raise unfit(text, f"127.0.0.1{value}")
    if not re.fullmatch(r"[0-9]{1,5}", port) or int(port) > 65535 or isinstance(value, bool):
        raise unfit(f"must be ADDRESS:PORT such as 127.0.0.1:9292, not {show(value)}", "127.0.0.1:9292")
    return host.strip("[]") or "127.0.0.1", int(port)


LISTEN = ValueKind("ADDRESS:PORT", _read_listen, kinds.text_shape("^(.+:)?[0-9]{1,5}$"))


_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://([a-z0-9._-]+|\[[0-9a-f:]+\])(:[0-9]{1,5})?")


def _read_origins(value: Any) -> tuple[str, ...]:
    origins = tuple(each.lower() for each in NAMES.read(value))
    for each in origins:
        if not _ORIGIN.fullmatch(each):
            text = f"must name web sites such as https://app.example, each alone, not {show(each)}"
            raise unfit(text, "[https://app.example]")
    return origins


ORIGINS = ValueKind("list of origins", _read_origins, kinds.list_shape(kinds.text_shape("://")))


def _read_paths(value: Any) -> tuple[str, ...]:
    paths = NAMES.read(value)
    for path in paths:
        if not re.fullmatch(r"(/[A-Za-z0-9_-][A-Za-z0-9._-]*)+/?", path):
            text = f"must be paths such as /docs or /sdapi/, not {show(path)}"
            raise unfit(text, f"/{path}" if re.fullmatch(r"[\w-]+/?", path) else "/docs")
    return tuple(paths)


PATHS = ValueKind("list of paths", _read_paths, kinds.list_shape(kinds.text_shape(r"^/[A-Za-z0-9_-]")))


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


def _read_policies(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        text = f"must hold {{name: policy}}, not {show(value)}"
        raise unfit(text, "{mine: {like: load_balance}}")
    return value


def _read_store(value: Any) -> str:
    if value and not str(value).startswith(STORES):
        raise unfit("must be the address of a Redis, as redis://host:6379/0", "redis://host:6379/0")
    return str(value)


def _or_empty(kind: ValueKind) -> ValueKind:
    return ValueKind(kind.name, kind.read, kinds.any_of(kind.shape, {"const": ""}))


_ROUTED = kinds.record(
    _routed,
    default=TEXT,
    mode=_or_empty(kinds.one_of("lite", "full")),
    policies=_or_empty(ValueKind("{name: policy}", _read_policies, {"type": "object"})),
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
)


def _read_hook(value: Any) -> Hook:
    example = "{on: [failed], run: [notify-send, anvil]} or {url: http://...}"
    if not isinstance(value, dict) or (value.get("run") is None) == (value.get("url") is None):
        text = f"must be hooks such as {example}, not {show(value)}"
        raise unfit(text, "{on: [failed], run: [notify-send, anvil]}")
    hook: Hook = _HOOK.read(value)
    return hook


def _read_numbered(values: Any) -> dict[int, Hook]:
    return kinds.read_each(dict(enumerate(values)), lambda _, each: _read_hook(each))


_ONE = ValueKind("hook", _read_hook, _HOOK.shape).then(lambda hook: (hook,))
_SEVERAL = ValueKind("hooks", _read_numbered, {"type": "array", "items": _HOOK.shape}).then(
    lambda hooks: tuple(hooks.values())
)
HOOKS = ValueKind(
    "list of {on, run or url, timeout}",
    lambda value: (_SEVERAL if isinstance(value, list) else _ONE).read(value),
    kinds.any_of(_ONE.shape, _SEVERAL.shape),
)
