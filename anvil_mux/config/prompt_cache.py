"""The setting ``prompt_cache``: prompts of llama-server that are kept on disk while its model is evicted.

llama-server writes the cache of a slot into a file, and reads it again, where its command has
--slot-save-path. Whoever bounds and checks these files has to see them, and the model file that they are
bound to, so both must be in folders of the host that the service mounts.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from anvil_mux.config.config import Backend, Service
from anvil_mux.config.diagnostic import Diagnostic
from anvil_mux.config.service import flag_values

KEY = ("x-anvil", "prompt_cache")
FLAG, VARIABLE = "--slot-save-path", "LLAMA_ARG_SLOT_SAVE_PATH"
ENGINE = "llamacpp"
Mounts = tuple[tuple[str, str], ...]
"""Paths inside a service, and the paths on its host that they are; "" for what is not in a folder there."""
HERE = "."
"""The place at which relative paths of a local process begin, among its mounts."""
EXAMPLE = f'write command: [..., {FLAG}, /prompts] and volumes: ["./prompts:/prompts"]'
LINES = f'command: [..., {FLAG}, /prompts]\nvolumes: ["./prompts:/prompts"]'
ADAPTERS = ("--lora", "--lora-scaled")


def mounts_of_process(folder: str) -> Mounts:
    """A local process sees the whole host; ``folder`` is where it is started if it does not say."""
    return ("/", "/"), (HERE, os.path.abspath(folder))


def mounts(described: Mapping[str, Any], folder: str) -> Mounts:
    """The mounts of a service, in the long or the short form; ``folder`` is where relative paths begin."""
    volumes = described.get("volumes")
    found = [_mount(each, folder) for each in volumes] if isinstance(volumes, list) else []
    return tuple([(str(PurePosixPath(inside)), outside) for inside, outside in found if inside])


def _mount(volume: Any, folder: str) -> tuple[str, str]:
    if isinstance(volume, Mapping):
        inside, source = str(volume.get("target") or ""), str(volume.get("source") or "")
        is_folder = volume.get("type") == "bind"
    else:
        first, *others = str(volume).split(":")
        source, inside = (first, others[0]) if others else ("", first)
        is_folder = source.startswith(("/", ".", "~"))
    return inside, os.path.abspath(os.path.join(folder, os.path.expanduser(source))) if is_folder else ""


def on_host(service: Service, path: str) -> str:
    """The path on the host of a file or folder of the service; "" if it is in no folder that it mounts."""
    known = dict(service.mounts)
    wanted = PurePosixPath(service.working_dir or known.pop(HERE, "/"), path)
    around = [(PurePosixPath(inside), outside) for inside, outside in known.items()]
    covering = [pair for pair in around if pair[0] == wanted or pair[0] in wanted.parents]
    if not covering:
        return ""
    inside, outside = max(covering, key=lambda pair: len(pair[0].parts))
    return os.path.normpath(os.path.join(outside, wanted.relative_to(inside))) if outside else ""


def saved_in(service: Service) -> str:
    """The folder, as the service sees it, into which its engine writes prompts; "" if it was given none."""
    told = [*flag_values(service.command, FLAG), dict(service.environment).get(VARIABLE)]
    return next(filter(None, told), "")


def problem(backend: Backend) -> str:
    """Why the backend's engine cannot keep prompts, and what to write instead; "" if it can."""
    service = backend.service
    if backend.engine != ENGINE:
        return f"engine {backend.engine} cannot save prompts; llamacpp can (docs/swaps.md has the others)"
    if "sleep" in backend.evict_to:
        return "llama-server in router mode has no slots of its own: give it a model, and take sleep out"
    if not (folder := saved_in(service)):
        said = "llama-server needs a folder for them"
        return Diagnostic(f"{said}: {EXAMPLE}", said=said, write=LINES)
    if not os.path.isabs(folder) and HERE not in dict(service.mounts):
        return f"{FLAG} must be an absolute path, not {folder}"
    if not on_host(service, folder):
        said = f"{folder} is in no folder of the host, and is not to be seen from here"
        return Diagnostic(f"{said}: {EXAMPLE}", said=said, write=f'volumes: ["./prompts:{folder}"]')
    if backend.adapts_by_field or any(True for flag in ADAPTERS for _ in flag_values(service.command, flag)):
        return (
            "llama-server does not say with which LoRA adapters a saved prompt was computed: "
            "take --lora out of its command, or prompt_cache"
        )
    return ""


def caveats(service: Service) -> Iterator[str]:
    """Warnings of what keeps llama-server from saving prompts, or all of them, with remedies."""
    words = service.command
    if any(word.partition("=")[0] in ("--mmproj", "-mm", "--mmproj-url", "-mmu") for word in words):
        text = "prompt_cache: llama-server saves no prompts of a model that sees or hears (--mmproj)"
        yield Diagnostic(text, key=KEY)
    if "--no-cache-prompt" in words:
        text = "prompt_cache: with --no-cache-prompt no prompt is used again; take it out"
        yield Diagnostic(text, key=KEY)
    if _moves_idle_prompts(words, dict(service.environment)):
        said = (
            "prompt_cache: llama-server takes idle prompts out of their slots, so only those that were used "
            "last are kept"
        )
        flag = "--no-cache-idle-slots"
        text, write = f"{said}; add {flag} to its command", f"command: ... {flag}"
        yield Diagnostic(text, said=said, write=write, key=KEY)


def _moves_idle_prompts(words: Sequence[str], variables: Mapping[str, str]) -> bool:
    """Whether all slots share one buffer, from which those that are idle are cleared."""
    if "--no-cache-idle-slots" in words or variables.get("LLAMA_ARG_CACHE_IDLE_SLOTS") in ("0", "false"):
        return False
    memory = [*flag_values(words, "--cache-ram"), *flag_values(words, "-cram")]
    if "0" in (*memory, variables.get("LLAMA_ARG_CACHE_RAM")):
        return False
    slots = [value for flag in ("-np", "--parallel") for value in flag_values(words, flag)]
    slots += filter(None, [variables.get("LLAMA_ARG_N_PARALLEL")])
    if "-kvu" in words or "--kv-unified" in words:
        return "1" not in slots
    return not slots and "-no-kvu" not in words and "--no-kv-unified" not in words
