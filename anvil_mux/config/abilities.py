"""The abilities of an engine, as its command and its variables give them, and as its owner wants them.

It may sleep, take LoRA adapters, or save prompts; each only if it was started for that. Functions say what a
service can, why it cannot, and what to write so that it can. The last of them warn of what becomes of a
service that its owner hardly wants.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from itertools import zip_longest
from pathlib import PurePosixPath

from anvil_mux.config.config import Backend
from anvil_mux.config.kinds import Diagnostic, Problem, advice, nearest
from anvil_mux.config.service import (
    DRI,
    HERE,
    INTEL,
    KEYS,
    KFD,
    NODE,
    USUAL_PORTS,
    GivenGpus,
    RawService,
    Service,
    argv,
    commanded_port,
    container_program,
    depends_on,
    device_paths,
    engine,
    environment,
    flag_values,
    others_gpus,
    profiles,
    published,
    reserves_gpu,
    split_words,
)
from anvil_mux.config.values import Loras, Preset, site
from anvil_mux.protocol import foreign

# Standby levels

DOWNLOADS = ("-mu", "--model-url", "-hf", "-hfr", "--hf-repo", "-dr", "--docker-repo")
"""Flags of llama.cpp by which it gets the file that it names."""
LOADS_A_MODEL = ("-m", "--model", *DOWNLOADS)
LOADS_A_MODEL_BY = ("LLAMA_ARG_MODEL", "LLAMA_ARG_MODEL_URL", "LLAMA_ARG_HF_REPO", "LLAMA_ARG_DOCKER_REPO")
SLEEP_FLAGS = {
    "vllm": ("--enable-sleep-mode",),
    "sglang": ("--enable-memory-saver", "--enable-weights-cpu-backup"),
}
NO_DEEP_SLEEP = "vLLM cannot read its weights again where it has LoRA adapters; take sleep"
UNIFIED_MEMORY = "GGML_CUDA_ENABLE_UNIFIED_MEMORY"
"""Makes llama.cpp allocate memory that the CUDA driver moves to and fro."""


def cannot_evict_to(service: RawService, variables: Mapping[str, str], engine: str, way: str) -> str:
    """Why the service cannot take this standby level, as far as it says; "" if it can."""
    if way == "freeze" and reserves_gpu(service):
        return "what is frozen keeps its GPU memory"
    if way == "checkpoint" and UNIFIED_MEMORY in variables:
        return f"the driver cannot checkpoint unified memory; take {UNIFIED_MEMORY} out of its environment"
    if way not in ("sleep", "sleep-2"):
        return ""
    if engine not in ("vllm", "sglang", "ollama", "llamacpp"):
        text = f"engine {engine} cannot be told to sleep; vllm, sglang, ollama and llamacpp can"
        return Diagnostic(text, write="evict_to: [stop]")
    if way == "sleep-2" and engine != "vllm":
        text = f"{engine} cannot drop its weights and read them again; take sleep"
        return Diagnostic(text, write="evict_to: [sleep, stop]")
    words = argv(service)
    if way == "sleep-2" and {"--enable-lora", "--lora-modules"} & {word.partition("=")[0] for word in words}:
        return Diagnostic(NO_DEEP_SLEEP, write="evict_to: [sleep, stop]")
    if engine == "vllm" and variables.get("VLLM_SERVER_DEV_MODE") != "1":
        write = 'environment: {VLLM_SERVER_DEV_MODE: "1"}'
        return Diagnostic(f"vLLM has its sleep routes only with {write}", write=write)
    if engine == "llamacpp" and _loads_a_model(words, variables):
        return "llama-server unloads in router mode only, without a model of its own: give it --models-dir"
    # Flags may also come from an image's own command, or from a file.
    missing = [flag for flag in SLEEP_FLAGS.get(engine, ()) if flag not in words]
    if missing and words and not any(word.startswith("--config") for word in words):
        flags = " ".join(missing)
        return Diagnostic(f"add {flags} to its command", write=f"command: ... {flags}")
    return ""


def lightest_levels(service: RawService, variables: Mapping[str, str], engine: str) -> tuple[str, ...]:
    """The standby levels of a service that names none: asleep if its owner gave it what that takes."""
    told = set(SLEEP_FLAGS.get(engine, ())) <= set(argv(service))
    sleeps = engine in ("vllm", "sglang", "ollama") and told
    sleeps = sleeps and not cannot_evict_to(service, variables, engine, "sleep")
    return ("sleep", "stop") if sleeps else ("stop",)


def _loads_a_model(words: Sequence[str], variables: Mapping[str, str]) -> bool:
    given = {word.partition("=")[0] for word in words}
    return bool(given & set(LOADS_A_MODEL)) or any(name in variables for name in LOADS_A_MODEL_BY)


# LoRA adapters

ALLOWS_LOADING = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"
"""The variable with which vLLM loads adapters while it runs."""


@dataclass(frozen=True, slots=True)
class Adapters:
    """The LoRA adapters of one service, as names of its model."""

    presets: tuple[Preset, ...] = ()
    to_load: Loras = ()
    """The adapters that the engine has to be told to load once it runs."""
    put: tuple[tuple[str, str], ...] = ()
    """The fields that requests for the model's own name are asked with, unless its service sets them."""
    problems: tuple[Problem, ...] = ()
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
        return f"is no adapter of its command; {nearest(name, in_command)}" if in_command else ""
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
            add = f"add --lora {path} to its command" if path else nearest(name, by_stem)
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
        more, write = "add --cache-ram 0 to its command", "command: ... --cache-ram 0"
        caveats.append(advice(said, write, more, joint=": ", key=("x-anvil", "loras")))
    return Adapters(tuple(presets), put=tuple(put), problems=tuple(problems), caveats=tuple(caveats))


def _scales(files: Sequence[tuple[str, float]], only: int = -1) -> str:
    """The field of a question that has one adapter apply, or none."""
    scales = [scale if number == only else 0.0 for number, (_, scale) in enumerate(files)]
    return json.dumps([{"id": number, "scale": scale} for number, scale in enumerate(scales)])


def _prompts_kept(words: Sequence[str], variables: Mapping[str, str]) -> str | None:
    """How much host memory llama-server keeps prompts in, as far as its service says so."""
    return [variables.get("LLAMA_ARG_CACHE_RAM"), *flag_values(words, "-cram", "--cache-ram")][-1]


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


# Prompts on disk

PROMPTS_FLAG, PROMPTS_VARIABLE = "--slot-save-path", "LLAMA_ARG_SLOT_SAVE_PATH"
PROMPTS_EXAMPLE = f'write command: [..., {PROMPTS_FLAG}, /prompts] and volumes: ["./prompts:/prompts"]'
PROMPTS_LINES = f'command: [..., {PROMPTS_FLAG}, /prompts]\nvolumes: ["./prompts:/prompts"]'
_KEY = ("x-anvil", "prompt_cache")
ADAPTER_FLAGS = ("--lora", "--lora-scaled")


def prompts_folder(service: Service) -> str:
    """The folder, as the service sees it, into which its engine writes prompts; "" if it was given none."""
    told = [*flag_values(service.command, PROMPTS_FLAG), dict(service.environment).get(PROMPTS_VARIABLE)]
    return next(filter(None, told), "")


def cannot_keep_prompts(backend: Backend) -> str:
    """Why the backend's engine cannot keep prompts, and what to write instead; "" if it can."""
    service = backend.service
    if backend.engine != "llamacpp":
        return f"engine {backend.engine} cannot save prompts; llamacpp can (docs/standby.md has the others)"
    if "sleep" in backend.evict_to:
        return "llama-server in router mode has no slots of its own: give it a model, and take sleep out"
    if not (folder := prompts_folder(service)):
        return advice("llama-server needs a folder for them", PROMPTS_LINES, PROMPTS_EXAMPLE, joint=": ")
    if not os.path.isabs(folder) and HERE not in dict(service.mounts):
        return f"{PROMPTS_FLAG} must be an absolute path, not {folder}"
    if not service.on_host(folder):
        said = f"{folder} is in no folder of the host, and is not to be seen from here"
        return advice(said, f'volumes: ["./prompts:{folder}"]', PROMPTS_EXAMPLE, joint=": ")
    if backend.adapts_by_field or [*flag_values(service.command, *ADAPTER_FLAGS)]:
        return (
            "llama-server does not say with which LoRA adapters a saved prompt was computed: "
            "take --lora out of its command, or prompt_cache"
        )
    return ""


def prompt_caveats(service: Service) -> Iterator[str]:
    """Warnings of what keeps llama-server from saving prompts, or all of them, with remedies."""
    words = service.command
    if any(word.partition("=")[0] in ("--mmproj", "-mm", "--mmproj-url", "-mmu") for word in words):
        text = "prompt_cache: llama-server saves no prompts of a model that sees or hears (--mmproj)"
        yield Diagnostic(text, key=_KEY)
    if "--no-cache-prompt" in words:
        text = "prompt_cache: with --no-cache-prompt no prompt is used again; take it out"
        yield Diagnostic(text, key=_KEY)
    if _moves_idle_prompts(words, dict(service.environment)):
        said = (
            "prompt_cache: llama-server takes idle prompts out of their slots, so only those that were used "
            "last are kept"
        )
        flag = "--no-cache-idle-slots"
        yield advice(said, f"command: ... {flag}", f"add {flag} to its command", key=_KEY)


def _moves_idle_prompts(words: Sequence[str], variables: Mapping[str, str]) -> bool:
    """Whether all slots share one buffer, from which those that are idle are cleared."""
    if "--no-cache-idle-slots" in words or variables.get("LLAMA_ARG_CACHE_IDLE_SLOTS") in ("0", "false"):
        return False
    memory = flag_values(words, "-cram", "--cache-ram")
    if "0" in (*memory, variables.get("LLAMA_ARG_CACHE_RAM")):
        return False
    slots = [*flag_values(words, "-np", "--parallel")]
    slots += filter(None, [variables.get("LLAMA_ARG_N_PARALLEL")])
    if "-kvu" in words or "--kv-unified" in words:
        return "1" not in slots
    return not slots and "-no-kvu" not in words and "--no-kv-unified" not in words


# What its owner hardly wants

SLEEPERS = ("vllm", "sglang")
"""Engines whose sleep gives memory back only if PyTorch's allocator plays along."""
ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
LLAMACPP_PORT = "LLAMA_ARG_PORT"


def is_steered_by_all(engine: str, variables: Mapping[str, str]) -> bool:
    """Whether whoever reaches its port may steer the engine, also without its API key."""
    return engine == "vllm" and variables.get("VLLM_SERVER_DEV_MODE") == "1"


def steered_at(address: str) -> str:
    """Say what follows where others reach such an engine at an address; "" where none does."""
    try:
        if ip_address(address).is_loopback:
            return ""
    except ValueError:
        pass  # a name
    return (
        f"VLLM_SERVER_DEV_MODE lets whoever reaches {address} put the engine to sleep and run"
        " /collective_rpc, with or without its API key"
    )


def container_caveats(
    service: RawService, engine: str, port: int | None, gpus: Sequence[str]
) -> Iterator[str]:
    """Warnings of what Docker would do with this service that its owner hardly wants, with remedies."""
    restart = str(service.get("restart", "no"))
    if restart == "always":
        said = "`restart: always` starts an evicted engine again, on its GPU, when Docker itself restarts"
        yield advice(said, 'restart: "no"', "take it away", key=("restart",))
    yield from _reached_by_others(service, engine)
    if not profiles(service):
        said, write = "without `profiles`, a bare `docker compose up` starts every model", "profiles: [llm]"
        yield advice(said, write, f"add `{write}`", key=("profiles",))
    allocator = [environment(service, {}).get(name, "") for name in ALLOCATOR]
    if engine in SLEEPERS and any("expandable_segments:True" in said for said in allocator):
        text = "expandable_segments keeps a sleeping engine from giving its memory back; take it out"
        yield Diagnostic(text, key=("environment",), page="standby.md#the-levels")
    if gpus and not reserves_gpu(service):
        names = ", ".join(gpus)
        text = f"`x-anvil` names GPU {names}, but the service reserves none, so Docker gives it none"
        more = "add `gpus: all` or deploy.resources.reservations.devices, unless it computes on the CPU"
        said = f"{text} (leave it so if it computes on the CPU)"
        yield Diagnostic(f"{text}; {more}", said=said, write="gpus: all", key=("gpus",))
    elif not gpus and others_gpus(service, {}) is None:
        said = "has no GPU, so it is never evicted; if it uses one, reserve it"
        yield advice(said, "gpus: all", "say x-anvil: {gpus: [...]}", joint=" or ", key=("gpus",))
    if others := others_gpus(service, {}):
        yield from _other_gpu_caveats(service, others, gpus)
    yield from _unheard(service, engine, port)
    yield from _unpublished(service, port, USUAL_PORTS.get(engine, "PORT"))


IDLE_SLEEP, IDLE_SLEEP_BY = "--sleep-idle-seconds", "LLAMA_ARG_SLEEP_IDLE_SECONDS"
ROUTES = ("--models-dir", "--models-preset")
ROUTES_BY = ("LLAMA_ARG_MODELS_DIR", "LLAMA_ARG_MODELS_PRESET")


def llamacpp_caveats(
    words: Sequence[str], variables: Mapping[str, str], evict_to: Sequence[str]
) -> Iterator[str]:
    """Warnings of a llama-server that has no model, or leaves its GPU by itself, with remedies."""
    idle = [variables.get(IDLE_SLEEP_BY), *flag_values(words, IDLE_SLEEP)][-1]
    if idle and not idle.startswith("-"):
        said = f"{IDLE_SLEEP} has it leave its GPU without a word to anvil-mux; take it out"
        line = f"x-anvil: {{ttl: {idle}s}}"
        yield advice(said, line, f"write {line}", joint=", ", key=("x-anvil", "ttl"))
    is_server = bool(words) and (words[0].startswith("-") or PurePosixPath(words[0]).name == "llama-server")
    given = {word.partition("=")[0] for word in words}
    is_router = bool(given & set(ROUTES)) or any(name in variables for name in ROUTES_BY)
    if is_server and not (is_router or "sleep" in evict_to or _loads_a_model(words, variables)):
        said = "its command names no model, so llama-server starts as a router without one"
        yield advice(said, "command: ... -m FILE", "add -m FILE or -hf REPO", key=("command",))


def dependency_caveats(service: RawService, models: Collection[str]) -> Iterator[str]:
    """Warnings of models on which a service depends."""
    if found := [name for name in depends_on(service) if name in models]:
        said = (
            f"depends on {', '.join(found)}, which anvil-mux starts only when it is asked for: "
            "take it out of depends_on"
        )
        yield Diagnostic(said, key=("depends_on",))


def _other_gpu_caveats(service: RawService, found: GivenGpus, gpus: Sequence[str]) -> Iterator[str]:
    """Warnings of what a service lacks that is given GPUs of AMD or Intel, with remedies."""
    paths = [*device_paths(service)]
    if KFD in paths and not any(path == DRI or NODE.fullmatch(path) for path in paths):
        said, more = f"has {KFD} without {DRI}, and ROCm needs both", "or one file of it for each GPU"
        yield advice(said, f"devices: [{KFD}, {DRI}]", f"add {DRI}, {more}", key=("devices",))
    user = str(service.get("user") or "root").partition(":")[0]
    if user not in ("root", "0") and not service.get("group_add"):
        said, write = f"runs as {user}, who may not open {DRI}; add", "group_add: [video, render]"
        text, short = f"{said} {write}, by the host's numbers", f"{said} the host's groups, by their numbers"
        yield Diagnostic(text, said=short, write=write, key=("group_add",))
    if not gpus:
        is_intel = found.vendors[-1] == INTEL and re.search("intel|ipex", str(service.get("image")).lower())
        write = f'x-anvil: {{gpus: ["{INTEL if is_intel else found.vendors[0]}0"]}}'
        said = "is given GPUs, and none of them is known here; say which"
        yield advice(said, write, write, joint=": ", key=("devices",))


def process_caveats(service: RawService, port: int | None) -> Iterator[str]:
    """The same warnings for a local process.

    Your own program may read PORT from its environment; engines do not.
    """
    yield from _other_port(service, port)
    if program := container_program(argv(service)):
        said = (
            f"its command is `{program} run`: the container is removed when the engine is stopped, but its "
            "GPU memory and its processes are not seen, and it cannot be frozen"
        )
        more = "write it as a service with `image` and without `runtime: process`"
        yield advice(said, "image: ...", more, key=("command",))
    for key in ("secrets", "configs"):
        if service.get(key):
            said = f"`{key}` are files of a container, which a process is not given"
            yield advice(said, "environment: ..., or the path of a file in its command", key=(key,))
    for key in service:
        if (key not in KEYS or key == "depends_on") and not key.startswith("x-"):
            yield Diagnostic(f"`{key}` has no effect on a local process", key=(key,))
    family = engine(service)
    if family == "openai" or commanded_port(service) or any("PORT" in word for word in argv(service)):
        return
    by_variable = {LLAMACPP_PORT, "OLLAMA_HOST"} & set(environment(service, {}))
    if not by_variable and (port is None or port != USUAL_PORTS.get(family)):
        said, flag = "its command does not say where it is to listen", "--port $$PORT"
        yield advice(said, f"command: ... {flag}", f"add {flag}", key=("command",))


_LINE_END = re.compile(r"\\\r?\n|(?:\A|(?<=\s))\\(?=\s)")
"""A backslash that is to join two lines: a shell reads it so, and what reads a command here does not."""
_HYPHEN_LIKE = "\u2010\u2011\u2012\u2013\u2014\u2015\u2212"


def command_caveats(service: RawService) -> Iterator[str]:
    """Warn of words of a command that a shell, or a word processor, has left in it."""
    for key in ("entrypoint", "command"):
        value = service.get(key)
        words = split_words(service, key)
        if isinstance(value, str):
            if _LINE_END.search(value) and any(word[:1].isspace() for word in words):
                text = "a backslash and the newline behind it become a part of the next word"
                yield Diagnostic(f"{text}; take the backslash out", key=(key,))
            for word in words:
                if word.startswith("#"):
                    text = f"{word} and what follows it is given to the engine: a command has no comments"
                    yield Diagnostic(f"{text}; take it out", key=(key,))
                    break
        for word in words:
            if word[:1] and word[0] in _HYPHEN_LIKE:
                flag = "--" + word.lstrip(_HYPHEN_LIKE + "-")
                said = f"{word} begins with a dash that is not a hyphen, so it is not a flag"
                yield advice(said, f"{key}: ... {flag}", f"write {flag}", key=(key,))


def _other_port(service: RawService, port: int | None) -> Iterator[str]:
    """A warning if the command has the engine listen at another port than that where it is asked."""
    told = commanded_port(service)
    if told is not None and port is not None and told != port:
        said = f"its command listens on {told}, and is asked on {port} (x-anvil: port)"
        yield advice(said, f"x-anvil: {{port: {told}}}", key=("x-anvil", "port"))


def _unheard(service: RawService, engine: str, port: int | None) -> Iterator[str]:
    """A warning if the engine may listen somewhere else than at the port that is published."""
    inside, told = [each.inside for each in published(service)], commanded_port(service)
    if told is not None:
        if port in inside and told not in inside:
            text = f"its command listens on {told}, but published is {', '.join(map(str, inside))}"
            yield Diagnostic(text, write=f'ports: ["127.0.0.1::{told}"]', key=("ports",))
        else:
            yield from _other_port(service, port)
    elif engine == "llamacpp" and not environment(service, {}).get(LLAMACPP_PORT):
        said = "llama.cpp listens on 8080 or, in newer versions, on 9931"
        flag = f'--port "{inside[0] if inside else 8080}"'
        yield advice(said, f"command: ... {flag}", f"add {flag} to its command", key=("command",))


def _reached_by_others(service: RawService, engine: str) -> Iterator[str]:
    """Warnings of ports that are published to more than this machine."""
    is_steered = is_steered_by_all(engine, environment(service, {}))
    for each in published(service):
        address = f'"127.0.0.1::{each.inside}"'
        more, page = f"write {address}", ""
        if each.address in ("", "0.0.0.0", "::"):
            said = f"port {each.inside} is published on all interfaces, past the firewall and without a key"
        elif is_steered and (said := steered_at(each.address)):
            more, page = f"{more}, or let a firewall admit this machine alone", "cluster.md#security"
        else:
            continue
        yield advice(said, f"ports: [{address}]", more, key=("ports",), page=page)


def _unpublished(service: RawService, port: int | None, usual: int | str) -> Iterator[str]:
    inside = [each.inside for each in published(service)]
    mode = str(service.get("network_mode") or "")
    if mode.startswith(("service:", "container:")):
        return  # its port is published where the network is
    if mode == "host" or (inside and (port is None or port in inside)):
        return
    told = commanded_port(service)
    if inside:
        text = f"its port {port} is not among those published ({', '.join(map(str, inside))})"
        yield Diagnostic(text, write=f'ports: ["127.0.0.1::{port}"]', key=("ports",))
        return
    said = "its port is not published, so it can only be reached from the Docker host itself"
    yield advice(said, f'ports: ["127.0.0.1::{port or told or usual}"]', key=("ports",))


def external_caveats(url: str, *, key: str, compose: bool, profiles: tuple[str, ...]) -> Iterator[str]:
    """Warnings of what its owner hardly wants, with remedies. ``compose``: it stands in a Compose project."""
    if compose and not profiles:
        said, write = "a bare `docker compose up` would try to start it", "profiles: [elsewhere]"
        yield advice(said, write, f"add `{write}`", key=("profiles",))
    found = site(url)
    if key and not found.secure and found.host not in ("localhost", "127.0.0.1", "::1"):
        write = f"url: {url.replace('http:', 'https:', 1)}"
        said = f"its key and all prompts go to {found.name} unencrypted"
        yield advice(said, write, "use https", key=("x-anvil", "url"))
