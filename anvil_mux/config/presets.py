"""Presets and LoRA adapters: more names for a model, and what its engine is asked for under each.

A preset has parameters of its own, and perhaps a system message, for the same engine: to ask for one after
the other swaps nothing. A LoRA adapter is a preset that the engine knows: vLLM by its name, which stands
where the model's would, llama.cpp by a field of the question.

The settings ``strip`` and ``set`` change the questions of a model under all of its names. Only a backend that
says so has its JSON bodies changed, and of these only the members that are named: the bytes of all others are
passed on as they came, in their order. So numbers keep their digits and text its escapes, whatever a reader
of JSON would make of them. Pure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from pathlib import PurePosixPath
from typing import Any

from anvil_mux.config import service, settings
from anvil_mux.config.diagnostic import Diagnostic
from anvil_mux.errors import BadRequest
from anvil_mux.protocol import foreign

ALLOWS_LOADING = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"
"""The variable with which vLLM loads adapters while it runs."""
PROMPTS_KEPT = ("-cram", "--cache-ram")
"""The flags that say how many prompts llama-server keeps in host memory."""

Loras = tuple[tuple[str, str], ...]
"""Adapters, each as its name and its path; an empty path: the engine has it already."""


@dataclass(frozen=True, slots=True)
class Preset:
    """A name by which a model may be asked for, with what is changed in the questions that use it."""

    name: str
    strip: tuple[str, ...] = ()
    set: tuple[tuple[str, str], ...] = ()
    system: str = ""
    """The system message of conversations that have none."""
    served_model: str | None = None
    """The model id that the engine is asked for; None: the backend's."""
    is_adapter: bool = False
    """Whether it is a LoRA adapter, which every replica must have."""

    def over(
        self, strip: tuple[str, ...], put: Sequence[tuple[str, str]]
    ) -> tuple[tuple[str, ...], dict[str, str]]:
        """Return the fields to be stripped and to be set, of a service and of this, which wins."""
        kept = {name: value for name, value in put if name not in self.strip}
        return (*strip, *self.strip), {**kept, **dict(self.set)}


# The settings


def read_presets(value: Any) -> tuple[Preset, ...]:
    """The setting ``presets``; as a label, it is JSON."""
    value = _from_json(value)
    if not isinstance(value, dict):
        example = "{fast: {set: {temperature: 0.2}}}"
        text = f"must hold names and what is set for each, such as {example}, not {settings.show(value)}"
        raise settings.unfit(text, example)
    reader = settings.MappingReader(value, value)
    made = [reader.take(str(name), about, partial(_read_preset, name)) for name, about in value.items()]
    found: tuple[Preset, ...] = reader.make(tuple([preset for preset in made if preset]))
    return found


def _read_preset(name: Any, about: Any) -> Preset:
    name = settings.TEXT.read(name)
    if not isinstance(about, dict) or not about:
        text = "must hold set, strip or system; a name without them is one of `aliases`"
        raise ValueError(Diagnostic(text, write=f"aliases: [{name}]"))
    parts = settings.MappingReader(about, ("set", "strip", "system"))
    made = Preset(
        name,
        strip=parts.read("strip", lambda names: check_strip(settings.NAMES.read(names)), ()),
        set=parts.read("set", read_set, ()),
        system=parts.read("system", _read_system, ""),
    )
    found: Preset = parts.make(made)
    return found


def _read_system(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"must be the text of a system message, not {settings.show(value)}")
    return value


def read_loras(value: Any) -> Loras:
    """The setting ``loras``: {name: path}, or the names of adapters that the engine has."""
    value = _from_json(value)
    if not isinstance(value, dict):
        return tuple([(name, "") for name in settings.NAMES.read(value)])
    reader = settings.MappingReader(value, value)
    made = [(name, reader.take(str(name), path, settings.TEXT.read, "")) for name, path in value.items()]
    found: Loras = reader.make(tuple([(settings.TEXT.read(name), path) for name, path in made]))
    return found


def _from_json(value: Any) -> Any:
    """Read the JSON object that a label may hold."""
    if not isinstance(value, str) or not value.lstrip().startswith("{"):
        return value
    try:
        return foreign.read(value)
    except ValueError as error:
        raise ValueError(f"is not JSON: {error}") from None


# The adapters of an engine


@dataclass(frozen=True, slots=True)
class Adapters:
    """The LoRA adapters of one service, as names of its model."""

    presets: tuple[Preset, ...] = ()
    to_load: Loras = ()
    """The adapters that the engine has to be told to load once it runs."""
    put: tuple[tuple[str, str], ...] = ()
    """The fields that requests for the model's own name are asked with, unless its service sets them."""
    problems: tuple[settings.Problem, ...] = ()
    caveats: tuple[str, ...] = ()


def find_adapters(
    engine: str, words: Sequence[str], variables: Mapping[str, str], wanted: Loras | None
) -> Adapters:
    """The adapters that a service is to offer: ``wanted``, and those that vLLM's own command names."""
    if engine == "llamacpp":
        return _of_llamacpp(words, variables, wanted or ())
    in_command = dict(_modules(words)) if engine == "vllm" else {}
    told = dict.fromkeys(in_command, "") | dict(wanted or ())
    presets, to_load, problems = [], [], []
    for name, path in told.items():
        if why := _why_not(engine, words, variables, in_command, name=name, path=path):
            problems.append(((name,), why))
            continue
        presets.append(Preset(name, served_model=name, is_adapter=True))
        if path and name not in in_command:
            to_load.append((name, path))
    return Adapters(tuple(presets), tuple(to_load), problems=tuple(problems))


def _why_not(
    engine: str,
    words: Sequence[str],
    variables: Mapping[str, str],
    in_command: Mapping[str, str],
    *,
    name: str,
    path: str,
) -> str:
    """Why an engine that takes an adapter's name for a model's cannot offer it; "" if it can."""
    if engine not in ("vllm", "openai"):
        return (
            f"engine {engine} takes no adapter's name as a model's; vllm and llamacpp can. Where a field of "
            "the question chooses it, a preset can set that"
        )
    if name in in_command:
        same = path in ("", in_command[name])
        return "" if same else f"its command has it at {in_command[name]}, not at {path}"
    if not path:
        return f"is no adapter of its command; {settings.nearest(name, in_command)}" if in_command else ""
    if engine != "vllm":
        text = f"engine {engine} cannot be told to load it: name it alone, loras: [{name}], if it has it"
        return Diagnostic(text, write=f"loras: [{name}]")
    if words and "--enable-lora" not in words and not any(word.startswith("--config") for word in words):
        text = "vLLM has adapters only with --enable-lora in its command"
        return Diagnostic(text, write="command: ... --enable-lora")
    if variables.get(ALLOWS_LOADING, "").strip().lower() not in ("1", "true"):
        write = f'environment: {{{ALLOWS_LOADING}: "1"}}'
        said = "vLLM loads an adapter while it runs only with"
        other = f"or write --lora-modules {name}={path} in its command"
        return Diagnostic(f"{said} {write}; {other}", said=f"{said} {ALLOWS_LOADING}; {other}", write=write)
    return ""


def _modules(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """The adapters after --lora-modules, each NAME=PATH or JSON with name and path."""
    taking = False
    for word in words:
        if word.startswith("--lora-modules="):
            taking, word = True, word.partition("=")[2]
        elif word.startswith("-"):
            taking = word == "--lora-modules"
            continue
        if not taking:
            continue
        try:
            said = foreign.read(word)
        except ValueError:
            name, equals, path = word.partition("=")
            if equals and name:
                yield name, path
        else:
            if isinstance(said, dict) and isinstance(said.get("name"), str) and said["name"]:
                yield said["name"], str(said.get("path", ""))


def _of_llamacpp(words: Sequence[str], variables: Mapping[str, str], wanted: Loras) -> Adapters:
    """Adapters of llama-server, which numbers those of its command; a question says how much of each.

    Each question says it of all: where nothing is said they have the scales of the command, and llama-server
    does not notice then that a prompt in its cache was computed with others.
    """
    files = list(_files(words))
    by_stem = {PurePosixPath(file).stem: number for number, (file, _) in enumerate(files)}
    by_path = {file: number for number, (file, _) in enumerate(files)}
    presets, problems = [], []
    for name, path in wanted:
        number = by_path.get(path) if path else by_stem.get(name)
        if number is None:
            add = f"add --lora {path} to its command" if path else settings.nearest(name, by_stem)
            text = f"{path or name} is no adapter of its command; {add}"
            write = f"command: ... --lora {path}" if path else ""
            problems.append(((name,), Diagnostic(text.removesuffix("; known: "), write=write)))
        else:
            presets.append(Preset(name, set=(("lora", _scales(files, number)),), is_adapter=True))
    if not presets:
        return Adapters(problems=tuple(problems))
    put, caveats = [("lora", _scales(files))], []
    if _prompts_kept(words, variables) != "0":
        put.append(("cache_prompt", "false"))
        said = (
            "llama-server does not know by which LoRA adapter a prompt was computed that it keeps in host "
            "memory, so each prompt is computed anew"
        )
        text, write = f"{said}: add --cache-ram 0 to its command", "command: ... --cache-ram 0"
        caveats.append(Diagnostic(text, said=said, write=write, key=("x-anvil", "loras")))
    return Adapters(tuple(presets), put=tuple(put), problems=tuple(problems), caveats=tuple(caveats))


def _scales(files: Sequence[tuple[str, float]], only: int = -1) -> str:
    """The field of a question that has one adapter apply, or none."""
    scales = [scale if number == only else 0.0 for number, (_, scale) in enumerate(files)]
    return json.dumps([{"id": number, "scale": scale} for number, scale in enumerate(scales)])


def _prompts_kept(words: Sequence[str], variables: Mapping[str, str]) -> str | None:
    """How much host memory llama-server keeps prompts in, as far as its service says so."""
    said = [value for flag in PROMPTS_KEPT for value in service.flag_values(words, flag)]
    return said[-1] if said else variables.get("LLAMA_ARG_CACHE_RAM")


def _files(words: Sequence[str]) -> Iterator[tuple[str, float]]:
    """The adapters of llama-server in the order of their numbers, each with its scale."""
    for word, following in zip_longest(words, words[1:], fillvalue=""):
        flag, equals, value = word.partition("=")
        given = (value if equals else following).split(",")
        if flag == "--lora":
            yield from ((file, 1.0) for file in given)
        elif flag == "--lora-scaled":
            for each in given:
                file, _, scale = each.rpartition(":")
                yield (file, float(scale)) if re.fullmatch(r"-?[0-9.]+", scale) else (each, 1.0)


UNTOUCHED = ("model", "stream")
"""The fields that decide who answers, and in which form."""
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


def rewritten(body: bytes | bytearray, strip: Collection[str], put: Mapping[str, str]) -> bytes:
    """Return ``body`` without the members in ``strip``, and with those in ``put`` (name -> JSON)."""
    missing = dict(put)
    kept = []
    for name, written, value in _members(body):
        if name in missing:
            kept.append(written[:value] + missing.pop(name))
        elif name not in strip and name not in put:
            kept.append(written)
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


def read_set(value: Any) -> tuple[tuple[str, str], ...]:
    """The setting ``set``; as a label, it is JSON."""
    if isinstance(value, str):
        try:
            value = foreign.read(value)
        except ValueError:
            value = None
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        example = "{temperature: 0.2}"
        raise ValueError(Diagnostic(f"must hold fields and their values, such as {example}", value=example))
    _check(value)
    try:
        return tuple([(name, json.dumps(each, allow_nan=False)) for name, each in value.items()])
    except (TypeError, ValueError):
        raise ValueError("holds a value that JSON does not have; put quotes around it") from None


def check_strip(names: Collection[str]) -> tuple[str, ...]:
    """The setting ``strip``."""
    _check(names)
    return tuple(names)


def _check(names: Collection[str]) -> None:
    for name in UNTOUCHED:
        if name in names:
            raise ValueError(
                f"{name} is not to be changed here; served_model says what the engine is asked for"
            )
