"""The presets of llama.cpp's router (``llama-server --models-preset FILE``) -> a compose file.

The file is INI: a section for each model, ``[*]`` for what holds for all of them, and as keys the arguments
of llama-server without their dashes, or the variables that stand for them. Each model becomes a llama-server
with these arguments. What the router says itself (host, port, key) anvil-mux says, and what only presets have
becomes settings of ours. See "Model presets" in llama.cpp's tools/server/README.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from anvil_mux import state
from anvil_mux.config.compose import escaped
from anvil_mux.errors import ConfigError
from anvil_mux.importing import Note, Written

NAME = "from-llamacpp"
ORIGIN = "Made by `anvil-mux import llamacpp` of {}; docs/migrating.md says more."
ALL = "*"
TOP = "\0"
"""The section of the keys that stand before all sections: the version."""
VARIABLE = "LLAMA_"
"""How the variables begin that stand for arguments."""
KEY = re.compile(r"[a-zA-Z_][a-zA-Z0-9_.-]*")
COMMENT = re.compile(r"[;#]")
OURS = frozenset(("host", "port", "api-key", "api-key-file", "models-dir", "models-preset", "models-max"))
"""The arguments that the router, and so anvil-mux, says itself."""
MODEL = frozenset(
    (
        *("m", "model", "hf", "hfr", "hf-repo", "mu", "model-url"),
        *("LLAMA_ARG_MODEL", "LLAMA_ARG_HF_REPO", "LLAMA_ARG_MODEL_URL"),
    )
)
"""The arguments that say which weights are loaded."""
ALIAS = frozenset(("a", "alias", "LLAMA_ARG_ALIAS"))
TRUE, FALSE = frozenset(("true", "on", "enabled", "1")), frozenset(("false", "off", "disabled", "0"))


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


SHORT = _names(
    """C Cb Cbd Cd Cr Crb Crd a ag b bs c cb cl cmoe cmoed cms cram ctk ctkd ctv ctvd ctxcp dev devd dr dt e
    fa fit fitc fitt hf hfd hff hfr hfrd hft j jf kvo kvu l lcd lcs lm lv lzm m md mg mm mmdev mmu mu n ncffn
    ncmoe ncmoed ngl ngld nkvo no-ag no-kvu nocb np nr ot otd r rea s sm sp sps t tb tbd td to ts ub v"""
)
"""The arguments that are written with one dash; llama.cpp 0.7.0."""
LONG = {
    "ag": "agent",
    "bs": "backend-sampling",
    "cb": "cont-batching",
    "cmoe": "cpu-moe",
    "cmoed": "cpu-moe-draft",
    "e": "escape",
    "kvo": "kv-offload",
    "kvu": "kv-unified",
    "nkvo": "no-kv-offload",
    "no-ag": "no-agent",
    "no-kvu": "no-kv-unified",
    "nocb": "no-cont-batching",
    "nr": "no-repack",
    "sp": "special",
    "v": "verbose",
}
"""A short argument that takes no value -> its long form."""
NEGATABLE = _names(
    """agent cache-idle-slots cache-prompt cont-batching context-shift cors-credentials direct-io escape
    jinja kv-offload kv-unified log-jsonl log-prefix log-timestamps mmap mmproj mmproj-auto mmproj-offload
    op-offload perf prefill-assistant reasoning-preserve repack skip-chat-parsing slots
    spec-draft-backend-sampling ui ui-mcp-proxy warmup webui webui-mcp-proxy"""
)
"""The arguments that take no value and can be negated (``--no-mmap``)."""
FLAGS = NEGATABLE | _names(
    """backend-sampling check-tensors cpu-moe cpu-moe-draft embd-gemma-default embedding embeddings
    ignore-eos log-disable lora-init-without-apply metrics mlock no-host offline props rerank reranking
    reuse-port spec-default spec-draft-cpu-moe special spm-infill swa-full verbose"""
)
"""All arguments that take no value."""


def translate(file: Path, *, program: str = "", gpus: Sequence[str] = ()) -> Written:
    """Return a compose file for the presets in ``file``; ConfigError where it has none.

    ``program``: the path of llama-server; "": it is found by its name. ``gpus``: those of this machine.
    """
    made = Written(NAME, ORIGIN.format(file), {"runtime": "process", "gpus": [*(gpus or ["0"])]})
    sections = _sections(file)
    common = sections.pop(ALL, {})
    for name in sections.pop(TOP, {}):
        if name != "version":
            made.notes.append(Note(str(file), name, f"is left out: it stands in no section; use [{ALL}]."))
    for name, own in sections.items():
        _PresetWriter(made, file, name, {**common, **own}, escaped(program or "llama-server")).write()
    return made.checked(f"{file}: has no presets")


def _sections(file: Path) -> dict[str, dict[str, str]]:
    """Section -> key -> value, as llama.cpp reads the file: the last of several takes the others' place.

    ``;`` and ``#`` begin a comment wherever they stand, within quotes too.
    """
    try:
        lines = state.read_text(file).split("\n")
    except OSError as error:
        raise ConfigError([f"{file}: cannot be read: {error.strerror}"]) from None
    except UnicodeDecodeError:
        raise ConfigError([f"{file}: is not UTF-8"]) from None
    found: dict[str, dict[str, str]] = {TOP: {}}
    section = found[TOP]
    for number, line in enumerate(lines, 1):
        name, bracket, behind = line.strip().removeprefix("[").partition("]")
        key, equals, value = COMMENT.split(line, maxsplit=1)[0].partition("=")
        is_header = line.strip().startswith("[") and name.strip() and bracket
        if is_header and not COMMENT.split(behind, maxsplit=1)[0].strip():
            section = found[name.strip()] = {}
        elif equals and KEY.fullmatch(key.strip()):
            section[key.strip()] = value.strip()
        elif key.strip() or equals:
            text = f"{line.strip()!r} is no `key = value`"
            raise ConfigError([f"{file}:{number}: is no file of presets: {text}"])
    return found


class _PresetWriter:
    """Writes the service of one preset."""

    def __init__(
        self, made: Written, file: Path, name: str, arguments: Mapping[str, str], program: str
    ) -> None:
        self._made, self._file, self._name, self._arguments = made, file, name, arguments
        self._service = made.free_name(name)
        self._command = [program]
        self._settings: dict[str, Any] = {"model": name} if name != self._service else {}
        if Path(program).name != "llama-server":
            self._settings["engine"] = "llamacpp"  # which is not known by its name then
        self._environment: dict[str, str] = {}

    def write(self) -> None:
        if not any(key in MODEL for key in self._arguments):
            if "/" not in self._name:
                self._note("", f"{self._name} is left out: it says neither model nor hf-repo.")
                return
            self._command += ["-hf", escaped(self._name)]  # a model in llama.cpp's cache
        for key, value in self._arguments.items():
            self._write_argument(key, value.strip())
        words = [*self._command, "--alias", escaped(self._name), "--host", "$$HOST", "--port", "$$PORT"]
        service: dict[str, Any] = {"command": words}
        if self._environment:
            service["environment"] = self._environment
        self._made.services[self._service] = {**service, "x-anvil": {**self._settings, "gpus": "all"}}

    def _write_argument(self, key: str, value: str) -> None:
        """Write one key of a preset."""
        if key in OURS:
            self._note(key, "is left out: anvil-mux says it.")
        elif key in ALIAS:
            names = [name.strip() for name in value.split(",") if name.strip()]
            self._settings["aliases"] = [name for name in names if name != self._name]
        elif key == "load-on-startup":
            self._settings["preload"] = value.lower() in TRUE
        elif key == "sleep-idle-seconds":
            if value.startswith("-"):
                return  # it never sleeps
            self._settings["ttl"] = f"{value}s"
            self._note(key, "is ttl here: the engine is stopped, and sleeps by itself no more.")
        elif key in ("stop-timeout", "dedup-cache-models"):
            self._note(key, "is left out: it is about the router alone.")
        elif key.startswith(VARIABLE):
            self._environment[key] = escaped(value)
        else:
            self._command += self._words(key, value)

    def _words(self, key: str, value: str) -> Iterator[str]:
        """The words of one argument."""
        name = LONG.get(key, key)
        bare = name.removeprefix("no-")
        if name in FLAGS or bare in NEGATABLE:
            # What is neither counts as true, and a negated argument is a false one only where it is true.
            is_negated = name != bare and name not in FLAGS
            if value.lower() not in (TRUE if is_negated else FALSE):
                yield f"--{name if name in FLAGS else bare}"
            elif bare in NEGATABLE:
                yield f"--no-{bare}"
            return
        yield f"-{key}" if key in SHORT else f"--{key}"
        yield escaped(value)
        if key in ("m", "model", "mmproj", "mm", "md", "model-draft") and not Path(value).is_absolute():
            self._note(key, "is a path from the folder of this file, no longer from that of the router.")

    def _note(self, about: str, text: str) -> None:
        self._made.notes.append(Note(f"{self._file}: [{self._name}]", about, text, self._service))
