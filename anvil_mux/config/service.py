"""The meaning of a compose service, in whichever spelling it is written.

Compose accepts most things in a short and a long form, and prints the long one; without the Compose program
the file's own form is what we get. Functions take the service's mapping and give one form; ValueError says
which key is wrong. Guesses about the engine (its family, its port, the model id it reports) are made here
from image and command, and only here.
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from itertools import zip_longest
from pathlib import PurePosixPath
from typing import Any

from anvil_mux.clock import count_in
from anvil_mux.config import devices
from anvil_mux.config.diagnostic import Diagnostic, KeyPath, advice, as_yaml

IMAGES: tuple[tuple[str, str], ...] = (
    (r"llama-?cpp-python", "openai"),
    (r"llama\.?-?cpp|llama-server", "llamacpp"),
    (r"sglang", "sglang"),
    (r"vllm", "vllm"),
    (r"ollama", "ollama"),
    (r"tabbyapi", "tabbyapi"),
    (r"tensorrt-?llm|trtllm", "trtllm"),
)
"""Pattern in the image's repository or the program's name -> engine; everything else is ``openai``."""

USUAL_PORT = 8000
"""The port on which most engines listen."""
USUAL_PORTS = {
    "vllm": USUAL_PORT,
    "sglang": 30000,
    "llamacpp": 8080,
    "ollama": 11434,
    "tabbyapi": 5000,
    "trtllm": USUAL_PORT,
}
"""Engine -> the port on which it listens unless another is configured."""

MOST_COPIES = 1000
"""The most containers of a service: each is a backend of its own."""
ALL = "all"
ALL_THERE_ARE = "all there are"
"""The need of a process that says nothing of GPUs: it may use every one that its machine has, if any."""
KEYS = (
    *("build", "command", "configs", "container_name", "depends_on", "deploy", "devices", "entrypoint"),
    *("env_file", "environment", "expose", "extends", "external_links", "gpus", "group_add", "image", "ipc"),
    *("label_file", "labels", "links", "network_mode", "networks", "pid", "ports", "profiles", "restart"),
    *("runtime", "scale", "secrets", "stop_grace_period", "user", "volumes", "volumes_from", "working_dir"),
    "x-anvil",
)
"""The keys of a service that anvil-mux reads; Compose has more."""
RESERVED = ("deploy", "resources", "reservations", "devices")
RESERVATION = "devices: [{driver: nvidia, count: all, capabilities: [gpu]}]"
"""The line that reserves all GPUs, below deploy.resources.reservations."""

RawService = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Port:
    """One published port; ``outside`` None: Docker chooses."""

    inside: int
    outside: int | None = None
    address: str = ""


def argv(service: RawService) -> tuple[str, ...]:
    """The entrypoint and the command as one list."""
    return (*_words(service, "entrypoint"), *_words(service, "command"))


def environment(service: RawService, environ: Mapping[str, str]) -> dict[str, str]:
    """The service's variables; one without a value is taken from ``environ``, and left out if not there."""
    found = {}
    for name, value in _mapping(service, "environment", None).items():
        value = environ.get(name) if value is None else value
        if value is not None:
            found[name] = _text(value)
    return found


def labels(service: RawService, prefix: str) -> dict[str, str]:
    """The labels that begin with ``prefix``, without it."""
    if not isinstance(service, Mapping):
        raise ValueError(Diagnostic("must be a mapping, with keys such as image", write="image: ..."))
    found = _mapping(service, "labels", "").items()
    return {name[len(prefix) :]: _text(value) for name, value in found if name.startswith(prefix)}


def digest(service: RawService, prefix: str) -> str:
    """A digest of the description without extensions, labels with ``prefix``, and scale."""
    said = {n: value for n, value in service.items() if not str(n).startswith("x-") and n != "scale"}
    if isinstance(deploy := said.get("deploy"), Mapping):
        said["deploy"] = {name: value for name, value in deploy.items() if name != "replicas"}
    said["labels"] = {
        name: value for name, value in _mapping(service, "labels", "").items() if not name.startswith(prefix)
    }
    return hashlib.sha256(json.dumps(_by_name(said), default=str).encode()).hexdigest()


def _by_name(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _by_name(value[name]) for name in sorted(value, key=str)}
    return [_by_name(each) for each in value] if isinstance(value, list) else value


def word(service: RawService, key: str) -> str | None:
    """The text that stands at a key, if any does."""
    value = service.get(key)
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(Diagnostic(f"{key} must be text", write=f'{key}: "..."', key=(key,)))
    return str(value)


def profiles(service: RawService) -> tuple[str, ...]:
    return tuple(str(each) for each in _list(service, "profiles"))


def published(service: RawService) -> list[Port]:
    """The TCP ports that the host can reach."""
    return [port for each in _list(service, "ports") for port in _published(each)]


def listens_on(service: RawService) -> int | None:
    """The port that the service says its engine listens on, if it does."""
    for ports in (
        [port.inside for port in published(service)],
        [port for each in _list(service, "expose") for port in _range(str(each).partition("/")[0])],
    ):
        if len(set(ports)) == 1:
            return ports[0]
        if ports and commanded_port(service) is None:
            several = ", ".join(map(str, sorted(set(ports))))
            said = f"has several ports ({several})"
            text = f"{said}; say where the engine listens: x-anvil: {{port: ...}}"
            write = f"x-anvil: {{port: {ports[0]}}}"
            raise ValueError(
                Diagnostic(text, said=f"{said}; say where the engine listens", write=write, key=("ports",))
            )
    return commanded_port(service)


def commanded_port(service: RawService) -> int | None:
    ports = [count_in(value) for value in flag_values(argv(service), "--port")]
    return next((port for port in reversed(ports) if port is not None), None)


def copies(service: RawService) -> int:
    """How many containers Compose makes of it."""
    deploy = service.get("deploy")
    asked = deploy.get("replicas") if isinstance(deploy, Mapping) else None
    given = str(service.get("scale", asked if asked is not None else 1))
    found = count_in(given)
    if found is not None and found > MOST_COPIES:
        key = "scale" if "scale" in service else "deploy"
        raise ValueError(
            Diagnostic(f"has {found} replicas, of at most {MOST_COPIES}", write="scale: 2", key=(key,))
        )
    return 1 if found is None else found


def engine(service: RawService) -> str:
    """The engine family by the image, or by the program where there is none that says it."""
    image = (word(service, "image") or "").partition("@")[0]
    repository = re.sub(r":[^/]*$", "", image).lower()
    words = argv(service)
    program = PurePosixPath(words[0]).name if words else ""
    if re.fullmatch(r"python[0-9.]*", program):
        program = next(flag_values(words, "-m"), "")
    for text in (repository, program.lower()):
        for pattern, name in IMAGES:
            if re.search(pattern, text):
                return name
    return "openai"


def served_model(service: RawService, engine: str) -> tuple[str, ...]:
    """The ids under which the engine knows its model, as far as its command says so."""
    words = argv(service)
    match engine:
        case "llamacpp":
            names = [*flag_values(words, "--alias"), *flag_values(words, "-a")]
            return tuple(part.strip() for name in names for part in name.split(",") if part.strip())
        case "vllm" | "sglang":
            return _names_given(words) or tuple(models_given(service))[-1:]
    return tuple(flag_values(words, "--served-model-name"))


def _names_given(words: Sequence[str]) -> tuple[str, ...]:
    """The names after --served-model-name: vLLM takes several."""
    for index, word in enumerate(words):
        if word.startswith("--served-model-name="):
            return (word.partition("=")[2],)
        if word == "--served-model-name":
            names = []
            for name in words[index + 1 :]:
                if name.startswith("-"):
                    break
                names.append(name)
            return tuple(names)
    return ()


def models_given(service: RawService) -> Iterator[str]:
    """--model, --model-path, or the word after `vllm serve`, which may be the image's own entrypoint."""
    words = argv(service)
    if "serve" in words:
        words = words[words.index("serve") + 1 :]
    elif service.get("entrypoint") or not service.get("image"):
        words = ("-", *words)
    if words and re.fullmatch(r"[^-/.][^/]*(/[^/]+)?|/.+", words[0]):
        yield words[0]
    yield from flag_values(words, "--model")
    yield from flag_values(words, "--model-path")


def flag_values(words: Sequence[str], flag: str) -> Iterator[str]:
    for word, following in zip_longest(words, words[1:], fillvalue=""):
        if word == flag:
            yield following
        elif word.startswith(f"{flag}="):
            yield word.partition("=")[2]


# GPUs


def gpus(service: RawService, variables: Mapping[str, str]) -> str | tuple[str, ...] | None:
    """``ALL``, or ids of the GPUs that the service asks for; None where it asks for none.

    ``variables`` is its environment. CUDA_VISIBLE_DEVICES counts where it cannot mean "the second of those
    that I was given".
    """
    given = reserved(service)
    if given is None and service.get("runtime") == "nvidia":
        given = _visible(variables.get("NVIDIA_VISIBLE_DEVICES", ALL))  # images of CUDA set it to all
    chosen = variables.get("CUDA_VISIBLE_DEVICES")
    if chosen is None or not (given in (None, ALL) or _counted(given)):
        return given
    narrowed = _visible(chosen)
    if given in (None, ALL) or narrowed is None or set(narrowed) <= set(given or ()):
        return narrowed
    return given


def hides_gpus(variables: Mapping[str, str]) -> bool:
    """Whether a process with this environment sees no GPU."""
    return any(variables.get(name, "0").strip() in ("", "-1") for name in devices.NARROWING)


def reserves_gpu(service: RawService) -> bool:
    """Whether Docker would give the container any GPU."""
    return is_nvidia(service) or _other_gpus(service, {}) is not None


def is_nvidia(service: RawService) -> bool:
    """Whether the service asks Docker for GPUs of NVIDIA."""
    return reserved(service) is not None or service.get("runtime") == "nvidia"


def others_gpus(service: RawService, variables: Mapping[str, str]) -> devices.GivenGpus | None:
    """The GPUs of AMD or Intel that the service is given; None: none, or it asks for NVIDIA's."""
    found = None if is_nvidia(service) else _other_gpus(service, variables)
    is_rocm = found is not None and found.vendors == (devices.AMD,)
    return found if is_rocm or gpus(service, variables) is None else None


def gpus_by(service: RawService) -> str:
    """The way by which it reserves GPUs: ``cdi``, ``reservation``, or "" where it has none or another way."""
    if any(_cdi(service)):
        return "cdi"
    return "reservation" if any(True for _ in gpu_requests(service)) else ""


def sees_only(gpus: Sequence[str]) -> dict[str, str]:
    """The variables that show a process these GPUs alone, counted as the monitoring counts them."""
    if any(map(devices.vendor_of, gpus)):
        return devices.sees_only(gpus)
    return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ",".join(gpus)}


def reserved(service: RawService) -> str | tuple[str, ...] | None:
    """``ALL``, or ids of the GPUs that the service reserves; None where it reserves none."""
    requests = [*_requested(service), *_cdi(service)]
    if not requests:
        return None
    if ALL in requests:
        return ALL
    return tuple(dict.fromkeys(id for request in requests for id in request))


def counted_gpus(service: RawService, variables: Mapping[str, str]) -> int | None:
    """How many GPUs the service reserves without a word on which; None where that is not so."""
    requests = [*gpu_requests(service)]
    if (
        len(requests) != 1
        or _vendor(requests[0])
        or any(_cdi(service))
        or "CUDA_VISIBLE_DEVICES" in variables
    ):
        return None
    found = None if _list(requests[0], "device_ids") else _request(requests[0], ("gpus",))
    return len(found) or None if isinstance(found, tuple) else None


def gpu_requests(service: RawService) -> Iterator[Mapping[str, Any]]:
    """The reservations of GPUs, each as {driver, count, device_ids, capabilities}."""
    for device in reserved_devices(service):
        if is_gpu(device):
            yield device
    written = service.get("gpus")
    if written == ALL:
        yield {"count": ALL}
        return
    if written is not None and not isinstance(written, list):
        raise ValueError(_no_gpus(written))
    for request in _list(service, "gpus"):
        if not isinstance(request, Mapping):
            raise ValueError(_no_gpus(written))
        if _vendor(request) in CDI_KINDS.values():
            yield request


def _no_gpus(written: Any) -> Diagnostic:
    text = "gpus must be `all` or a list of {driver, count, device_ids}"
    return Diagnostic(text, write=gpus_meant(written), key=("gpus",))


def gpus_meant(value: Any) -> str:
    """The line for a value of ``gpus`` in which ids of GPUs stand, or how many; none is ``count: 0``."""
    ids = [str(each) for each in value] if isinstance(value, list) else [str(value)]
    if not all(id.isdigit() for id in ids):
        return "gpus: all"
    return f"gpus: [{{driver: nvidia, device_ids: {as_yaml(ids)}}}]"


def reserved_devices(service: RawService) -> list[Mapping[str, Any]]:
    """The devices that are reserved under deploy."""
    inner: Any = service
    for key in ("deploy", "resources", "reservations"):
        inner = inner.get(key) or {}
        if not isinstance(inner, Mapping):
            path = ("deploy", "resources", "reservations")
            text = f"{key} must be a mapping"
            raise ValueError(
                Diagnostic(text, write=RESERVATION, key=path[: path.index(key) + 1] if key in path else ())
            )
    written = inner.get("devices")
    if written is not None and not isinstance(written, list):
        text = "deploy.resources.reservations.devices must be a list"
        raise ValueError(Diagnostic(text, write=f"devices: {as_yaml([written])}", key=RESERVED))
    found = _list(inner, "devices")
    if not all(isinstance(device, Mapping) for device in found):
        text = "deploy.resources.reservations.devices must list mappings"
        raise ValueError(Diagnostic(text, write=RESERVATION, key=RESERVED))
    return found


def is_gpu(device: Mapping[str, Any]) -> bool:
    capable = any(str(each).startswith(("gpu", "nvidia", "amd")) for each in _list(device, "capabilities"))
    return (capable or _is_cdi(device)) and _vendor(device) in CDI_KINDS.values()


def _requested(service: RawService) -> Iterator[str | tuple[str, ...]]:
    """The GPUs of NVIDIA in each reservation."""
    key = RESERVED if reserved_devices(service) else ("gpus",)
    for request in gpu_requests(service):
        if not _vendor(request):
            yield _request(request, key)


def reserves_others(service: RawService) -> devices.GivenGpus | None:
    """The GPUs of AMD or Intel that the service reserves by their driver, or by CDI; None: none."""
    found = [
        (vendor, _request(each, RESERVED)) for each in gpu_requests(service) if (vendor := _vendor(each))
    ]
    ids = [() if numbers == ALL else devices.numbered(vendor, numbers) for vendor, numbers in found]
    vendors = tuple(dict.fromkeys(vendor for vendor, _ in found))
    return devices.GivenGpus(vendors, sum(ids, ()) if all(ids) else ()) if found else None


def _other_gpus(service: RawService, variables: Mapping[str, str]) -> devices.GivenGpus | None:
    return reserves_others(service) or devices.given(service, variables)


def device_ids(request: Mapping[str, Any], gpus: Sequence[str]) -> list[str]:
    """The ids by which a reservation names these GPUs, written as it writes its own."""
    numbers = [id.removeprefix(_vendor(request)) for id in gpus]
    kind = next((kind for kind, vendor in CDI_KINDS.items() if vendor == _vendor(request)), CDI)
    return [f"{kind}={number}" for number in numbers] if _is_cdi(request) else numbers


def _is_cdi(request: Mapping[str, Any]) -> bool:
    return request.get("driver") == "cdi" or any("=" in str(id) for id in _list(request, "device_ids"))


def _vendor(request: Mapping[str, Any]) -> str:
    """The vendor whose GPUs a reservation means, by its driver or its CDI names; "" for NVIDIA."""
    for id in _list(request, "device_ids"):
        kind, is_named, _ = str(id).partition("=")
        if is_named:
            return CDI_KINDS.get(kind, kind)
    driver = str(request.get("driver") or "")
    return driver if driver in (devices.AMD, devices.INTEL) else ""


def _request(request: Mapping[str, Any], key: KeyPath) -> str | tuple[str, ...]:
    if ids := _list(request, "device_ids"):
        numbers = tuple(
            str(each).rpartition("=")[2].partition(":")[0] if _is_cdi(request) else str(each) for each in ids
        )
        return ALL if ALL in numbers else numbers
    count = request.get("count", ALL)
    if count in (ALL, -1, "-1", None):
        return ALL
    if isinstance(count, bool) or not re.fullmatch(r"[0-9]+", str(count)):
        text = f"count must be `all` or a number of GPUs, not {count!r}"
        raise ValueError(Diagnostic(text, write="count: all", key=key))
    return tuple(str(index) for index in range(int(count)))


CDI = "nvidia.com/gpu"
"""The kind of device by which CDI knows GPUs."""
CDI_KINDS = {CDI: "", devices.CDI: devices.AMD, "intel.com/gpu": devices.INTEL}
"""Kind of device of CDI -> the vendor; "" for NVIDIA."""


def _cdi(service: RawService) -> Iterator[str | tuple[str, ...]]:
    for device in _list(service, "devices"):
        if id := cdi_gpu(device):
            yield ALL if id == ALL else (id,)


def cdi_gpu(device: Any) -> str:
    """The id of a GPU that CDI is asked for; "" if the device is none."""
    source = device.get("source") if isinstance(device, Mapping) else device
    vendor, _, id = str(source).partition("=")
    return id.partition(":")[0] if vendor == CDI else ""


def _visible(value: str) -> str | tuple[str, ...] | None:
    if value == ALL:
        return ALL
    ids = tuple(part.strip() for part in value.split(",") if part.strip())
    return None if not ids or ids[0] in ("none", "void", "-1") else ids


def _counted(ids: str | tuple[str, ...] | None) -> bool:
    return isinstance(ids, tuple) and ids == tuple(str(index) for index in range(len(ids)))


# Rest

LOADS_A_MODEL = ("-m", "--model", "-mu", "--model-url", "-hf", "-hfr", "--hf-repo", "-dr", "--docker-repo")
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
    return (
        ("sleep", "stop")
        if sleeps and not cannot_evict_to(service, variables, engine, "sleep")
        else ("stop",)
    )


def _loads_a_model(words: Sequence[str], variables: Mapping[str, str]) -> bool:
    given = {word.partition("=")[0] for word in words}
    return bool(given & set(LOADS_A_MODEL)) or any(name in variables for name in LOADS_A_MODEL_BY)


# Caveats

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


def caveats(service: RawService, engine: str, port: int | None, gpus: Sequence[str]) -> Iterator[str]:
    """Warnings of what Docker would do with this service that its owner hardly wants, with remedies."""
    restart = str(service.get("restart", "no"))
    if restart in ("always", "unless-stopped"):
        said = f"`restart: {restart}` brings the engine back onto the GPU after it was evicted"
        yield Diagnostic(f"{said}; take it away", said=said, write='restart: "no"', key=("restart",))
    yield from _reached_by_others(service, engine)
    if not profiles(service):
        said = "without `profiles`, a bare `docker compose up` starts every model"
        yield Diagnostic(
            f"{said}; add `profiles: [llm]`", said=said, write="profiles: [llm]", key=("profiles",)
        )
    allocator = environment(service, {})
    if engine in SLEEPERS and any(
        "expandable_segments:True" in allocator.get(name, "") for name in ALLOCATOR
    ):
        text = "expandable_segments keeps a sleeping engine from giving its memory back; take it out"
        yield Diagnostic(text, key=("environment",), page="standby.md#the-levels")
    if gpus and not reserves_gpu(service):
        said = (
            f"`x-anvil` names GPU {', '.join(gpus)}, but the service reserves none, so Docker gives it none"
        )
        more = "add `gpus: all` or deploy.resources.reservations.devices, unless it computes on the CPU"
        yield Diagnostic(
            f"{said}; {more}",
            said=f"{said} (leave it so if it computes on the CPU)",
            write="gpus: all",
            key=("gpus",),
        )
    elif not gpus and others_gpus(service, {}) is None:
        said = "has no GPU, so it is never evicted; if it uses one, reserve it"
        write = "gpus: all"
        yield Diagnostic(f"{said} or say x-anvil: {{gpus: [...]}}", said=said, write=write, key=("gpus",))
    if others := others_gpus(service, {}):
        yield from devices.caveats(service, others, gpus)
    yield from _unheard(service, engine, port)
    yield from _unpublished(service, port, USUAL_PORTS.get(engine, "PORT"))


def process_caveats(service: RawService, port: int | None) -> Iterator[str]:
    """The same warnings for a local process.

    Your own program may read PORT from its environment; engines do not.
    """
    yield from _other_port(service, port)
    for key in ("secrets", "configs"):
        if service.get(key):
            said = f"`{key}` are files of a container, which a process is not given"
            yield advice(said, "environment: ..., or the path of a file in its command", key=(key,))
    for key in service:
        if key not in KEYS and not key.startswith("x-"):
            yield Diagnostic(f"`{key}` has no effect on a local process", key=(key,))
    family = engine(service)
    if family == "openai" or commanded_port(service) or any("PORT" in word for word in argv(service)):
        return
    by_variable = {LLAMACPP_PORT, "OLLAMA_HOST"} & set(environment(service, {}))
    if not by_variable and (port is None or port != USUAL_PORTS.get(family)):
        said = "its command does not say where it is to listen"
        yield Diagnostic(
            f"{said}; add --port $$PORT", said=said, write="command: ... --port $$PORT", key=("command",)
        )


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
        text, write = f"{said}; add {flag} to its command", f"command: ... {flag}"
        yield Diagnostic(text, said=said, write=write, key=("command",))


def _reached_by_others(service: RawService, engine: str) -> Iterator[str]:
    """Warnings of ports that are published to more than this machine."""
    is_steered = is_steered_by_all(engine, environment(service, {}))
    for each in published(service):
        address = f'"127.0.0.1::{each.inside}"'
        more, page = f"; write {address}", ""
        if each.address in ("", "0.0.0.0", "::"):
            said = f"port {each.inside} is published on all interfaces, past the firewall and without a key"
        elif is_steered and (said := steered_at(each.address)):
            more, page = f"{more}, or let a firewall admit this machine alone", "cluster.md#security"
        else:
            continue
        write = f"ports: [{address}]"
        yield Diagnostic(f"{said}{more}", said=said, write=write, key=("ports",), page=page)


def _unpublished(service: RawService, port: int | None, usual: int | str) -> Iterator[str]:
    inside = [each.inside for each in published(service)]
    if service.get("network_mode") == "host" or (inside and (port is None or port in inside)):
        return
    told = commanded_port(service)
    if inside:
        text = f"its port {port} is not among those published ({', '.join(map(str, inside))})"
        yield Diagnostic(text, write=f'ports: ["127.0.0.1::{port}"]', key=("ports",))
        return
    said = "its port is not published, so it can only be reached from the Docker host itself"
    yield advice(said, f'ports: ["127.0.0.1::{port or told or usual}"]', key=("ports",))


# Short and long forms


def _words(service: RawService, key: str) -> list[str]:
    value = service.get(key)
    if isinstance(value, str):
        try:
            return shlex.split(value)
        except ValueError as error:
            text = f"{key}: {error}"
            raise ValueError(Diagnostic(text, write=f"{key}: [program, argument, ...]", key=(key,))) from None
    return [_text(word) for word in _list(service, key)]


def _list(service: Mapping[str, Any], key: str) -> list[Any]:
    value = service.get(key)
    if value is None:
        return []
    if not isinstance(value, list):
        raise ValueError(Diagnostic(f"{key} must be a list", write=f"{key}: {as_yaml([value])}", key=(key,)))
    return value


def _mapping(service: RawService, key: str, nothing: str | None) -> dict[str, Any]:
    """A mapping, or a list of NAME=VALUE; ``nothing`` for a name alone."""
    value = service.get(key)
    if isinstance(value, list):
        pairs = [str(each).partition("=") for each in value]
        return {name: text if equals else nothing for name, equals, text in pairs}
    if value is not None and not isinstance(value, dict):
        name, equals, text = str(value).partition("=")
        write = f"{key}: {{{name}: {as_yaml(text)}}}" if equals else f"{key}: {{NAME: value}}"
        said = f"{key} must be a mapping or a list of NAME=VALUE"
        raise ValueError(Diagnostic(said, write=write, key=(key,)))
    return {name: nothing if each is None else each for name, each in (value or {}).items()}


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (list, dict)):
        raise ValueError(f"{value!r} must be text")
    return "" if value is None else str(value)


def _published(entry: Any) -> Iterator[Port]:
    if isinstance(entry, Mapping):
        inside, outside = str(entry.get("target", "")), str(entry.get("published") or "")
        address, protocol = str(entry.get("host_ip") or ""), entry.get("protocol", "tcp")
    else:
        text, _, protocol = str(entry).partition("/")
        rest, _, inside = text.rpartition(":")
        address, _, outside = rest.rpartition(":")
    if protocol not in ("tcp", ""):
        return
    ports = _range(inside)
    outsides: list[int | None] = [*_range(outside)] if outside else [None] * len(ports)
    if len(outsides) == len(ports):
        for port, open_as in zip(ports, outsides, strict=True):
            yield Port(port, open_as, address.strip("[]"))
    else:
        # Docker takes a free one of a range.
        for port in ports:
            yield Port(port, None, address.strip("[]"))


def _range(text: str) -> list[int]:
    first, dash, last = text.partition("-")
    if count_in(first, 65535) is None or (dash and count_in(last, 65535) is None):
        text = f"ports: {text!r} is no port"
        raise ValueError(Diagnostic(text, write='ports: ["127.0.0.1::8000"]', key=("ports",)))
    return list(range(int(first), int(last if dash else first) + 1))
