"""The meaning of a compose service, in whichever spelling it is written.

Compose accepts most things in a short and a long form, and prints the long one; without the Compose program
the file's own form is what we get. Functions take the service's mapping and give one form; ValueError says
which key is wrong. Guesses about the engine (its family, its port, the model id it reports) are made here
from image and command, and only here.

A service is given NVIDIA's GPUs by a reservation, AMD's and Intel's mostly by device files. ROCm needs
``/dev/kfd`` and the files of its GPUs below ``/dev/dri`` (``devices: [/dev/kfd, /dev/dri]``); Vulkan, SYCL
and OpenVINO need the latter alone. AMD's own container runtime and CDI name GPUs by number. Here AMD's go by
``amd0``, ``amd1`` and so on, Intel's by ``intel0``, in the order of their PCI addresses.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile, zip_longest
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from anvil_mux.clock import count_in
from anvil_mux.config.kinds import KeyPath, advice, as_yaml, unfit
from anvil_mux.config.machines import ALL

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
KEYS = (
    *("build", "command", "configs", "container_name", "depends_on", "deploy", "devices", "entrypoint"),
    *("env_file", "environment", "expose", "extends", "external_links", "gpus", "group_add", "image", "ipc"),
    *("label_file", "labels", "links", "network_mode", "networks", "pid", "ports", "profiles", "restart"),
    *("runtime", "scale", "secrets", "stop_grace_period", "user", "volumes", "volumes_from", "working_dir"),
    "x-anvil",
)
"""The keys of a service that anvil-mux reads; Compose has more."""
RawService = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Port:
    """One published port; ``outside`` None: Docker chooses."""

    inside: int
    outside: int | None = None
    address: str = ""


class PlacedFile(NamedTuple):
    """A secret or config whose content is text or a variable, as a file in the container."""

    path: str
    """An absolute path in the container."""
    content: str | None
    """The text in the file; None: the variable that it is taken from is not set."""
    variable: str = ""
    """The variable that it is taken from, if it is."""
    mode: int = 0o444
    uid: int = 0
    gid: int = 0


Needs = tuple[tuple[str, str], ...]
"""Services on which another one depends, in the order of their starts, each with its condition."""


@dataclass(frozen=True, slots=True)
class Service:
    """The part of a compose service that the runtimes need, interpolated."""

    name: str = ""
    """The name of a scaled service; empty: the backend's."""
    number: int = 1
    """The number of its container, as Compose counts them."""
    scale: int = 1
    """How many it has."""
    image: str | None = None
    command: tuple[str, ...] = ()
    """The entrypoint and the command as one argv (process runtime)."""
    environment: tuple[tuple[str, str], ...] = ()
    working_dir: str | None = None
    """An absolute path (resolved against the compose file's folder); None: that folder."""
    profiles: tuple[str, ...] = ()
    user: str = ""
    """The user of its processes, as the compose file has it; empty: the image's, or ours."""
    key: str = field(default="", repr=False)
    """The key that a server elsewhere asks for, from the variable that ``api_key_env`` names."""
    gpus_by: str = ""
    """The way by which it reserves GPUs: cdi, reservation, or "" where it has none or another way."""
    mounts: Mounts = ()
    """Paths inside, and the paths on the host that they are; "": in no folder of the host."""
    on_host_network: bool = False
    """Whether its container listens at the host's own ports."""
    needs: Needs = ()
    """The services that must be there before it is started, in their order (containers only)."""
    ports: tuple[tuple[str, int], ...] = field(default=(), compare=False)
    """The addresses and ports of its host at which its container is published."""
    externals: tuple[tuple[str, str], ...] = field(default=(), compare=False)
    """The volumes and networks that it uses and Compose does not make: (``volumes``, NAME)."""
    files: tuple[PlacedFile, ...] = field(default=(), repr=False)
    """The secrets and configs that are written into its container, since they are not files of the host."""
    digest: str = field(default="", compare=False)
    """A digest of the whole description, as it was read."""

    def on_host(self, path: str) -> str:
        """The path on the host of a file or folder; "" if it is in no folder that is mounted."""
        known = dict(self.mounts)
        wanted = PurePosixPath(self.working_dir or known.pop(HERE, "/"), path)
        around = [(PurePosixPath(inside), outside) for inside, outside in known.items()]
        covering = [pair for pair in around if pair[0] == wanted or pair[0] in wanted.parents]
        if not covering:
            return ""
        inside, outside = max(covering, key=lambda pair: len(pair[0].parts))
        return os.path.normpath(os.path.join(outside, wanted.relative_to(inside))) if outside else ""

    @property
    def api_key(self) -> str | None:
        """The key that its own command or environment makes the engine ask for, or the server elsewhere."""
        if self.key:
            return self.key
        environment = dict(self.environment)
        keys = (
            *flag_values(self.command, "--api-key"),
            environment.get("VLLM_API_KEY"),
            environment.get("LLAMA_API_KEY"),
        )
        return next(filter(None, keys), None)


def argv(service: RawService) -> tuple[str, ...]:
    """The entrypoint and the command as one list."""
    return (*split_words(service, "entrypoint"), *split_words(service, "command"))


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
        raise unfit("must be a mapping, with keys such as image", write="image: ...")
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
        raise unfit(f"{key} must be text", write=f'{key}: "..."', key=(key,))
    return str(value)


def profiles(service: RawService) -> tuple[str, ...]:
    return tuple(str(each) for each in listed(service, "profiles"))


def published(service: RawService) -> list[Port]:
    """The TCP ports that the host can reach."""
    return [port for each in listed(service, "ports") for port in _published(each)]


def listens_on(service: RawService) -> int | None:
    """The port that the service says its engine listens on, if it does."""
    for ports in (
        [port.inside for port in published(service)],
        [port for each in listed(service, "expose") for port in _range(str(each).partition("/")[0])],
    ):
        if len(set(ports)) == 1:
            return ports[0]
        if ports and commanded_port(service) is None:
            several = ", ".join(map(str, sorted(set(ports))))
            said = f"has several ports ({several}); say where the engine listens"
            line = f"x-anvil: {{port: {ports[0]}}}"
            raise ValueError(advice(said, line, "x-anvil: {port: ...}", joint=": ", key=("ports",)))
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
        raise unfit(f"has {found} replicas, of at most {MOST_COPIES}", write="scale: 2", key=(key,))
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
            names = ",".join(flag_values(words, "--alias", "-a")).split(",")
            return tuple(name.strip() for name in names if name.strip())
        case "vllm" | "sglang":
            return _names_given(words) or tuple(models_given(service))[-1:]
    return tuple(flag_values(words, "--served-model-name"))


def _names_given(words: Sequence[str]) -> tuple[str, ...]:
    """The names after --served-model-name: vLLM takes several."""
    for index, word in enumerate(words):
        if word.startswith("--served-model-name="):
            return (word.partition("=")[2],)
        if word == "--served-model-name":
            return tuple(takewhile(lambda name: not name.startswith("-"), words[index + 1 :]))
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
    yield from flag_values(words, "--model", "--model-path")


def flag_values(words: Sequence[str], *flags: str) -> Iterator[str]:
    """The values of flags, in the order of the words; one may be spelt in several ways."""
    for word, following in zip_longest(words, words[1:], fillvalue=""):
        flag, equals, value = word.partition("=")
        if flag in flags:
            yield value if equals else following


CONTAINER_PROGRAMS = ("docker", "podman", "nerdctl")


def container_program(words: tuple[str, ...]) -> str:
    """Return the program of a command that runs a container, such as `docker run`; "" for any other."""
    if not words or PurePosixPath(words[0]).name not in CONTAINER_PROGRAMS:
        return ""
    verb = words[2:3] if words[1:2] == ("container",) else words[1:2]
    return words[0] if verb == ("run",) else ""


def labelled(words: tuple[str, ...], label: str) -> tuple[str, ...]:
    """Return a command with a label for the container that it runs, if it runs one."""
    if not container_program(words):
        return words
    at = words.index("run") + 1
    return (*words[:at], "--label", label, *words[at:])


# Short and long forms


def split_words(service: RawService, key: str) -> list[str]:
    """Return the words of a command, which is a text or a list."""
    value = service.get(key)
    if isinstance(value, str):
        try:
            return shlex.split(value)
        except ValueError as error:
            write = f"{key}: [program, argument, ...]"
            raise unfit(f"{key}: {error}", write=write, key=(key,)) from None
    return [_text(word) for word in listed(service, key)]


def listed(service: Mapping[str, Any], key: str) -> list[Any]:
    """The list that stands at a key; ValueError if something else does."""
    value = service.get(key)
    if value is None:
        return []
    if not isinstance(value, list):
        raise unfit(f"{key} must be a list", write=f"{key}: {as_yaml([value])}", key=(key,))
    return value


def named_values(given: Sequence[Any], nothing: str | None = None) -> dict[str, Any]:
    """A list of NAME=VALUE as a mapping; ``nothing`` for a name alone."""
    pairs = [str(each).partition("=") for each in given]
    return {name: text if equals else nothing for name, equals, text in pairs}


def _mapping(service: RawService, key: str, nothing: str | None) -> dict[str, Any]:
    """A mapping, or a list of NAME=VALUE; ``nothing`` for a name alone."""
    value = service.get(key)
    if isinstance(value, list):
        return named_values(value, nothing)
    if value is not None and not isinstance(value, dict):
        name, equals, text = str(value).partition("=")
        write = f"{key}: {{{name}: {as_yaml(text)}}}" if equals else f"{key}: {{NAME: value}}"
        raise unfit(f"{key} must be a mapping or a list of NAME=VALUE", write=write, key=(key,))
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
    fixed = _range(outside) if outside else []
    # Docker takes a free one of a range.
    outsides = fixed if len(fixed) == len(ports) else [None] * len(ports)
    for port, open_as in zip(ports, outsides, strict=True):
        yield Port(port, open_as, address.strip("[]"))


def _range(text: str) -> list[int]:
    first, dash, last = text.partition("-")
    if count_in(first, 65535) is None or (dash and count_in(last, 65535) is None):
        raise unfit(f"ports: {text!r} is no port", write='ports: ["127.0.0.1::8000"]', key=("ports",))
    return list(range(int(first), int(last if dash else first) + 1))


# Dependencies

STARTED, HEALTHY, COMPLETED = "service_started", "service_healthy", "service_completed_successfully"
CONDITIONS = (STARTED, HEALTHY, COMPLETED)


def depends_on(described: RawService) -> dict[str, str]:
    """Return the services on which one depends, with the condition that each must meet."""
    written = described.get("depends_on")
    if isinstance(written, list):
        return {str(name): STARTED for name in written}
    if written is not None and not isinstance(written, dict):
        write = f"depends_on: [{as_yaml(str(written))}]"
        raise unfit("depends_on must be a list or a mapping", write=write, key=("depends_on",))
    found = {}
    for name, about in (written or {}).items():
        condition = about.get("condition", STARTED) if isinstance(about, dict) else STARTED
        if condition not in CONDITIONS:
            text = f"the condition of {name} must be one of {', '.join(CONDITIONS)}, not {condition}"
            raise unfit(text, write=f"{name}: {{condition: {STARTED}}}", key=("depends_on", str(name)))
        found[str(name)] = condition
    return found


def needs(described: RawService, services: Mapping[str, RawService], left_out: Collection[str]) -> Needs:
    """Return all services that must be there before this one, those first on which others depend.

    ``left_out``: services that are not started for another.
    """
    found: dict[str, str] = {}

    def visit(one: RawService, path: tuple[str, ...]) -> None:
        for name, condition in depends_on(one).items():
            if name in left_out or name in path or name not in services:
                continue
            if name not in found:
                visit(services[name], (*path, name))
            found[name] = max(found.get(name, STARTED), condition, key=CONDITIONS.index)

    visit(described, ())
    return tuple(found.items())


# Folders

Mounts = tuple[tuple[str, str], ...]
"""Paths inside a service, and the paths on its host that they are; "" for what is not in a folder there."""
HERE = "."
"""The place at which relative paths of a local process begin, among its mounts."""


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


# What is made outside of Compose

EXTERNAL = ("volumes", "networks")
"""The kinds of things that Compose finds by name instead of making them."""


def externals(described: RawService, shared: Mapping[str, Mapping[str, Any]]) -> tuple[tuple[str, str], ...]:
    """Return the volumes and networks that a service uses and Compose does not make, with their kinds."""
    found = []
    for kind in EXTERNAL:
        for used in _used_names(described.get(kind)):
            about = shared.get(kind, {}).get(used)
            is_external = about.get("external") if isinstance(about, Mapping) else None
            if isinstance(about, Mapping) and is_external:
                named = is_external.get("name") if isinstance(is_external, Mapping) else None
                found.append((kind, str(named or about.get("name") or used)))
    return tuple(dict.fromkeys(found))


def _used_names(written: Any) -> Iterator[str]:
    """Yield the names of volumes or networks that a service uses, in the short or the long form."""
    for each in written if isinstance(written, (list, dict)) else ():
        yield str(each.get("source", "")) if isinstance(each, Mapping) else str(each).partition(":")[0]


# Secrets and configs

PLACES = {"secrets": "/run/secrets", "configs": "/"}
"""The kinds of files that a service is given by name, and the folders in which they are put."""


def placed_files(
    described: RawService, shared: Mapping[str, Mapping[str, Any]], variables: Mapping[str, str]
) -> tuple[PlacedFile, ...]:
    """Return the secrets and configs of a service that are not files of the host.

    ``shared``: those of the compose file, by kind and name. ``variables``: those that they are taken from.
    """
    return tuple(
        _placed_file(use, about, folder, variables)
        for kind, folder in PLACES.items()
        for use in map(_use, listed(described, kind))
        if isinstance(about := shared.get(kind, {}).get(use["source"]), Mapping)
        and (about.get("environment") or about.get("content"))
    )


def _use(written: Any) -> Mapping[str, Any]:
    """Return the use of a secret or config in its long form."""
    return {"source": "", **written} if isinstance(written, Mapping) else {"source": str(written)}


def _placed_file(
    use: Mapping[str, Any], about: Mapping[str, Any], folder: str, variables: Mapping[str, str]
) -> PlacedFile:
    variable = str(about.get("environment") or "")
    mode = use.get("mode")
    return PlacedFile(
        str(PurePosixPath(folder, str(use.get("target") or use["source"]))),
        variables.get(variable) if variable else str(about["content"]),
        variable,
        mode=0o444 if mode is None else mode if isinstance(mode, int) else _octal(str(mode)),
        uid=count_in(str(use.get("uid", 0))) or 0,
        gid=count_in(str(use.get("gid", 0))) or 0,
    )


def _octal(text: str) -> int:
    if not re.fullmatch(r"(0o)?[0-7]{1,6}", text):
        write = 'mode: "0440"'
        raise unfit(f"mode must be an octal number: {text}", write=write)
    return int(text, 8)


# GPUs

AMD, INTEL = "amd", "intel"
KFD, DRI, AMD_CDI = "/dev/kfd", "/dev/dri", "amd.com/gpu"
NODE = re.compile(r"/dev/dri/((card|renderD)\d+|by-path/.+)")
NUMBERED = re.compile(rf"({AMD}|{INTEL})(\d+)")
CUDA_VISIBLE, NVIDIA_VISIBLE = "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"
NARROWING = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", CUDA_VISIBLE, "GPU_DEVICE_ORDINAL")
"""The variables by which ROCm leaves out GPUs; each counts among those that the ones before it leave.

HIP reads CUDA's where its own is not set.
"""
INTEL_MASK, ONEAPI_SELECTOR = "ZE_AFFINITY_MASK", "ONEAPI_DEVICE_SELECTOR"
"""The variables by which Intel's Level Zero leaves out GPUs, and SYCL some of what that leaves."""
SHOWING = (*NARROWING, INTEL_MASK, ONEAPI_SELECTOR)
"""All variables that decide which GPUs a process sees."""
RUNTIME_VARIABLE = "AMD_VISIBLE_DEVICES"
NVIDIA_CDI = "nvidia.com/gpu"
"""The kind of device by which CDI knows GPUs."""
CDI_KINDS = {NVIDIA_CDI: "", AMD_CDI: AMD, "intel.com/gpu": INTEL}
"""Kind of device of CDI -> the vendor; "" for NVIDIA."""
ALL_THERE_ARE = "all there are"
"""The need of a process that says nothing of GPUs: it may use every one that its machine has, if any."""
RESERVED = ("deploy", "resources", "reservations", "devices")
RESERVATION = "devices: [{driver: nvidia, count: all, capabilities: [gpu]}]"
"""The line that reserves all GPUs, below deploy.resources.reservations."""


def gpus(service: RawService, variables: Mapping[str, str]) -> str | tuple[str, ...] | None:
    """``ALL``, or ids of the GPUs that the service asks for; None where it asks for none.

    ``variables`` is its environment. CUDA_VISIBLE_DEVICES counts where it cannot mean "the second of those
    that I was given".
    """
    given = reserved(service)
    if given is None and service.get("runtime") == "nvidia":
        given = visible(variables.get(NVIDIA_VISIBLE, ALL))  # images of CUDA set it to all
    chosen = variables.get(CUDA_VISIBLE)
    if chosen is None or not (given in (None, ALL) or _counted(given)):
        return given
    narrowed = visible(chosen)
    if given in (None, ALL) or narrowed is None or set(narrowed) <= set(given or ()):
        return narrowed
    return given


def hides_gpus(variables: Mapping[str, str]) -> bool:
    """Whether a process with this environment sees no GPU."""
    return any(variables.get(name, "0").strip() in ("", "-1") for name in NARROWING)


def reserves_gpu(service: RawService) -> bool:
    """Whether Docker would give the container any GPU."""
    return is_nvidia(service) or _other_gpus(service, {}) is not None


def is_nvidia(service: RawService) -> bool:
    """Whether the service asks Docker for GPUs of NVIDIA."""
    return reserved(service) is not None or service.get("runtime") == "nvidia"


def others_gpus(service: RawService, variables: Mapping[str, str]) -> GivenGpus | None:
    """The GPUs of AMD or Intel that the service is given; None: none, or it asks for NVIDIA's."""
    found = None if is_nvidia(service) else _other_gpus(service, variables)
    is_rocm = found is not None and found.vendors == (AMD,)
    return found if is_rocm or gpus(service, variables) is None else None


def gpus_by(service: RawService) -> str:
    """The way by which it reserves GPUs: ``cdi``, ``reservation``, or "" where it has none or another way."""
    return "cdi" if cdi_gpus(service) else "reservation" if [*gpu_requests(service)] else ""


def reserved(service: RawService) -> str | tuple[str, ...] | None:
    """``ALL``, or ids of the GPUs that the service reserves; None where it reserves none."""
    key = RESERVED if reserved_devices(service) else ("gpus",)
    requests = [_request(each, key) for each in gpu_requests(service) if not _vendor(each)]
    requests += [id if id == ALL else (id,) for id in cdi_gpus(service)]
    if ALL in requests:
        return ALL
    return tuple(dict.fromkeys(id for request in requests for id in request)) if requests else None


def counted_gpus(service: RawService, variables: Mapping[str, str]) -> int | None:
    """How many GPUs the service reserves without a word on which; None where that is not so."""
    requests = [*gpu_requests(service)]
    if len(requests) != 1 or cdi_gpus(service) or CUDA_VISIBLE in variables:
        return None
    (request,) = requests
    is_named = _vendor(request) or listed(request, "device_ids")
    found = () if is_named else _request(request, ("gpus",))
    return len(found) or None if isinstance(found, tuple) else None


def gpu_requests(service: RawService) -> Iterator[Mapping[str, Any]]:
    """The reservations of GPUs, each as {driver, count, device_ids, capabilities}."""
    for device in reserved_devices(service):
        if is_gpu_request(device):
            yield device
    written = service.get("gpus")
    if written == ALL:
        yield {"count": ALL}
        return
    requests = [] if written is None else written
    if not isinstance(requests, list) or not all(isinstance(each, Mapping) for each in requests):
        text = "gpus must be `all` or a list of {driver, count, device_ids}"
        raise unfit(text, write=gpus_meant(written), key=("gpus",))
    yield from (each for each in requests if _vendor(each) in CDI_KINDS.values())


def gpus_meant(value: Any) -> str:
    """The line for a value of ``gpus`` in which ids of GPUs stand, or how many; none is ``count: 0``."""
    ids = [str(each) for each in value] if isinstance(value, list) else [str(value)]
    if not all(id.isdigit() for id in ids):
        return "gpus: all"
    return f"gpus: [{{driver: nvidia, device_ids: {as_yaml(ids)}}}]"


def reserved_devices(service: RawService) -> list[Mapping[str, Any]]:
    """The devices that are reserved under deploy."""
    inner: Any = service
    for depth, key in enumerate(RESERVED[:-1], 1):
        inner = inner.get(key) or {}
        if not isinstance(inner, Mapping):
            raise unfit(f"{key} must be a mapping", write=RESERVATION, key=RESERVED[:depth])
    written = inner.get("devices")
    found = [] if written is None else written
    name = ".".join(RESERVED)
    if not isinstance(found, list):
        raise unfit(f"{name} must be a list", write=f"devices: {as_yaml([written])}", key=RESERVED)
    if not all(isinstance(device, Mapping) for device in found):
        raise unfit(f"{name} must list mappings", write=RESERVATION, key=RESERVED)
    return found


def is_gpu_request(device: Mapping[str, Any]) -> bool:
    capable = any(str(each).startswith(("gpu", "nvidia", "amd")) for each in listed(device, "capabilities"))
    return (capable or _is_cdi(device)) and _vendor(device) in CDI_KINDS.values()


def reserves_others(service: RawService) -> GivenGpus | None:
    """The GPUs of AMD or Intel that the service reserves by their driver, or by CDI; None: none."""
    found = [
        (vendor, _request(each, RESERVED)) for each in gpu_requests(service) if (vendor := _vendor(each))
    ]
    ids = [() if numbers == ALL else numbered(vendor, numbers) for vendor, numbers in found]
    vendors = tuple(dict.fromkeys(vendor for vendor, _ in found))
    return GivenGpus(vendors, sum(ids, ()) if all(ids) else ()) if found else None


def _other_gpus(service: RawService, variables: Mapping[str, str]) -> GivenGpus | None:
    return reserves_others(service) or by_files(service, variables)


def device_ids(request: Mapping[str, Any], gpus: Sequence[str]) -> list[str]:
    """The ids by which a reservation names these GPUs, written as it writes its own."""
    numbers = [id.removeprefix(_vendor(request)) for id in gpus]
    kind = next((kind for kind, vendor in CDI_KINDS.items() if vendor == _vendor(request)), NVIDIA_CDI)
    return [f"{kind}={number}" for number in numbers] if _is_cdi(request) else numbers


def _is_cdi(request: Mapping[str, Any]) -> bool:
    return request.get("driver") == "cdi" or any("=" in str(id) for id in listed(request, "device_ids"))


def _vendor(request: Mapping[str, Any]) -> str:
    """The vendor whose GPUs a reservation means, by its driver or its CDI names; "" for NVIDIA."""
    for id in listed(request, "device_ids"):
        kind, is_named, _ = str(id).partition("=")
        if is_named:
            return CDI_KINDS.get(kind, kind)
    driver = str(request.get("driver") or "")
    return driver if driver in (AMD, INTEL) else ""


def _request(request: Mapping[str, Any], key: KeyPath) -> str | tuple[str, ...]:
    if ids := listed(request, "device_ids"):
        numbers = tuple(
            str(each).rpartition("=")[2].partition(":")[0] if _is_cdi(request) else str(each) for each in ids
        )
        return ALL if ALL in numbers else numbers
    count = request.get("count", ALL)
    if count in (ALL, -1, "-1", None):
        return ALL
    if isinstance(count, bool) or not re.fullmatch(r"[0-9]+", str(count)):
        raise unfit(f"count must be `all` or a number of GPUs, not {count!r}", write="count: all", key=key)
    return tuple(str(index) for index in range(int(count)))


def cdi_gpus(service: RawService) -> list[str]:
    """The ids of the GPUs of NVIDIA that CDI is asked for."""
    return [*filter(None, map(cdi_gpu, listed(service, "devices")))]


def cdi_gpu(device: Any) -> str:
    """The id of a GPU that CDI is asked for; "" if the device is none."""
    source = device.get("source") if isinstance(device, Mapping) else device
    vendor, _, id = str(source).partition("=")
    return id.partition(":")[0] if vendor == NVIDIA_CDI else ""


def visible(value: str) -> str | tuple[str, ...] | None:
    """Return the GPUs that a variable of NVIDIA's names: ``ALL``, ids, or None for none."""
    if value == ALL:
        return ALL
    ids = tuple(part.strip() for part in value.split(",") if part.strip())
    return None if not ids or ids[0] in ("none", "void", "-1") else ids


def _counted(ids: str | tuple[str, ...] | None) -> bool:
    return isinstance(ids, tuple) and ids == tuple(str(index) for index in range(len(ids)))


# GPUs that are given by device files


@dataclass(frozen=True, slots=True)
class GivenGpus:
    """The GPUs of AMD or Intel that a service is given."""

    vendors: tuple[str, ...]
    ids: tuple[str, ...] = ()
    """Their ids or device files; empty: all that there are of these vendors."""


def vendor_of(id: str) -> str:
    """The vendor of a GPU by its id; "" for NVIDIA's, and those that only the file names."""
    found = NUMBERED.fullmatch(id)
    return found[1] if found else ""


def of_vendors(ids: Iterable[str], vendors: Sequence[str]) -> list[str]:
    """The GPUs of these vendors; without ``vendors`` NVIDIA's, or all where there is none of those."""
    known = [*ids]
    if vendors:
        return [id for id in known if vendor_of(id) in vendors]
    return [id for id in known if not vendor_of(id)] or known


def by_files(service: Mapping[str, Any], variables: Mapping[str, str]) -> GivenGpus | None:
    """The GPUs that a service is given by device files, AMD's runtime or CDI; None: it is given none so.

    ``variables`` is its environment.
    """
    paths = [*device_paths(service)]
    numbers = [path.partition("=")[2] for path in paths if path.startswith(f"{AMD_CDI}=")]
    if service.get("runtime") == AMD:
        numbers += variables.get(RUNTIME_VARIABLE, "all").split(",")
    if numbers:
        return GivenGpus((AMD,), numbered(AMD, numbers))
    nodes = tuple(dict.fromkeys(path for path in paths if NODE.fullmatch(path)))
    if KFD not in paths and DRI not in paths and not nodes:
        return None
    vendors = (AMD,) if KFD in paths else (AMD, INTEL)
    if nodes and DRI not in paths:
        return GivenGpus(vendors, nodes)
    return GivenGpus(vendors, _seen_by_rocm(variables) if KFD in paths else ())


def by_variables(variables: Mapping[str, str], known: Sequence[str]) -> GivenGpus | None:
    """Return the GPUs of AMD or Intel to which its environment limits a process; None: no limit.

    ``known``: the GPUs of its machine. CUDA's variable is AMD's where there are none of NVIDIA.
    """
    vendors = {vendor_of(id) for id in known}
    names = [name for name in NARROWING if name != CUDA_VISIBLE or "" not in vendors]
    said = {name: variables[name] for name in names if name in variables}
    if AMD in vendors and said:
        return GivenGpus((AMD,), _seen_by_rocm(said))
    if INTEL in vendors and INTEL_MASK in variables:
        cards = [each.partition(".")[0] for each in variables[INTEL_MASK].split(",")]  # CARD.TILE
        return GivenGpus((INTEL,), numbered(INTEL, cards))
    return None


def _seen_by_rocm(variables: Mapping[str, str]) -> tuple[str, ...]:
    """Return the ids of the GPUs of AMD that these variables leave; () for all, or unknown ones."""
    found: tuple[str, ...] = ()
    hip = "HIP_VISIBLE_DEVICES" if "HIP_VISIBLE_DEVICES" in variables else CUDA_VISIBLE
    for name in (NARROWING[0], hip, NARROWING[-1]):
        if name not in variables:
            continue
        ids = numbered(AMD, variables[name].split(","))
        if not ids:
            return ()
        places = [int(id.removeprefix(AMD)) for id in ids]
        found = tuple(found[at] for at in places if at < len(found)) if found else ids
    return found


def numbered(vendor: str, numbers: Sequence[str]) -> tuple[str, ...]:
    """The ids of a vendor's GPUs of these numbers; () for all, and where some are no numbers."""
    found = [each.strip() for each in numbers]
    return tuple(f"{vendor}{each}" for each in found) if found and all(map(str.isdigit, found)) else ()


def narrowed(service: Mapping[str, Any], files: Sequence[str]) -> dict[str, Any]:
    """The service's devices and variables if it is given these files of GPUs in place of all."""
    devices = [each for each in service.get("devices") or () if not _is_gpu(each)]
    kept = {n: value for n, value in (service.get("environment") or {}).items() if n not in NARROWING}
    return {"devices": [*devices, *files], "environment": kept}


def _is_gpu(device: Any) -> bool:
    path = _source(device)
    return path == DRI or NODE.fullmatch(path) is not None


def device_paths(service: Mapping[str, Any]) -> Iterator[str]:
    """The paths on the host of a service's devices."""
    devices = service.get("devices")
    yield from map(_source, devices if isinstance(devices, list) else ())


def _source(device: Any) -> str:
    if isinstance(device, Mapping):
        return str(device.get("source", ""))
    text = str(device)
    by_path = re.match(r"/dev/dri/by-path/pci-[0-9a-f:.]+-(render|card)", text)  # has colons of its own
    return by_path[0] if by_path else text.rstrip("/") if "=" in text else text.partition(":")[0].rstrip("/")
