"""The models of llama-swap's file -> services: what becomes of each key, of the macros in their values, and
of the words of a `docker run` or `podman run`.

``KEYS`` has the keys that become something, in the order in which they are taken; ``NOTES`` says why the
others become nothing.

``${NAME}`` stands for a macro, of the model or else of the whole file, ``${env.NAME}`` for a variable, and
``${MODEL_ID}``, ``${PORT}`` and ``${PID}`` for what llama-swap knows. A variable stays one (``${NAME?}``: it
has to be set, as llama-swap wants it), and the port becomes the one that anvil-mux gives (``$$PORT``): both
are marks until a value is written.
"""

from __future__ import annotations

import csv
import re
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from anvil_mux.config.kinds import show
from anvil_mux.config.service import engine as service_engine
from anvil_mux.config.service import is_nvidia, reserved, reserves_others
from anvil_mux.config.values import UNTOUCHED
from anvil_mux.importing import ServiceKeys

MACRO = re.compile(r"\$\{([a-zA-Z0-9_.-]+)\}")
PORT, PID = "\ue000", "\ue001"
"""The marks of the port and of the process id."""
VARIABLE = "\ue002"
"""The mark before the name of a variable; ``_END`` stands behind it."""
_END = "\ue003"
_MARKED = re.compile(rf"{PORT}(?=(\w?))|{VARIABLE}([^{VARIABLE}{_END}]*){_END}|\$")
DEFAULT_ENGINE = "openai"
LEAST_LOAD_SECONDS = 15
NO_VOLUME = (".", "/", "~", "$", VARIABLE)
"""The beginnings of a source that is no named volume, or may be none."""
LOOPBACK = ("localhost", "127.0.0.1", "[::1]", "0.0.0.0")
PROXY = re.compile(rf"(?P<scheme>\w+)://(?P<host>\[[^]]*\]|[^/:]*)(:(?P<port>[0-9]+|{PORT}))?(?P<path>/.*)?")


@dataclass
class ContainerRun:
    """One container that a command line starts."""

    service: ServiceKeys = field(default_factory=dict)
    ports: list[tuple[str, str]] = field(default_factory=list)
    """The ports that it publishes: (outside, inside)."""
    unknown: list[str] = field(default_factory=list)
    """The options that no key of a service stands for."""

    @property
    def sources(self) -> list[str]:
        """The paths and named volumes that it mounts."""
        volumes = self.service.get("volumes", ())
        named = [volume.partition(":")[0] for volume in volumes if isinstance(volume, str)]
        return named + [str(mount["source"]) for mount in volumes if _is_volume(mount)]

    @property
    def reserves(self) -> bool:
        """Whether it reserves GPUs."""
        return is_nvidia(self.service) or reserves_others(self.service) is not None

    @property
    def gpus(self) -> list[str]:
        """The ids of the GPUs that it names, or counts."""
        asked = reserved(self.service)
        others = reserves_others(self.service)
        return [*(asked if isinstance(asked, tuple) else ()), *(others.ids if others else ())]


def _is_volume(mount: object) -> bool:
    return isinstance(mount, dict) and mount["type"] == "volume" and "source" in mount


@dataclass
class SwapModel:
    """One model: what its keys say, and the service that it becomes."""

    id: str
    said: dict[str, Any]
    """Key -> value, its macros replaced."""
    common: Mapping[str, Any]
    """The settings of the whole file."""
    note: Callable[[str, str], None]
    words: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    port: int | None = None
    """The port at which it is fixed; None: one that is given to it."""
    settings: dict[str, Any] = field(default_factory=dict)
    """The settings in its ``x-anvil``."""
    container: ContainerRun | None = None

    @property
    def names(self) -> list[str]:
        """The names by which it may be asked for."""
        return [self.id, *self.settings.get("aliases", ()), *self.settings.get("presets", ())]

    def call(self, *names: str) -> None:
        """Add names by which clients may call it."""
        had = self.settings.get("aliases", [])
        if new := list(dict.fromkeys([*had, *(name for name in names if name != self.id)])):
            self.settings["aliases"] = new


# Macros


class Macros:
    """The macros of one model: ``own`` before ``common``."""

    def __init__(self, common: Mapping[str, Any], own: Mapping[str, Any], model: str) -> None:
        self._values: dict[str, Any] = {**common, **own, "MODEL_ID": model, "PORT": PORT, "PID": PID}

    def fill(self, value: Any) -> Any:
        """The value, of any kind, with its macros replaced; ValueError says which cannot be."""
        return self._fill(value, ())

    def _fill(self, value: Any, within: tuple[str, ...]) -> Any:
        match value:
            case str():
                alone = MACRO.fullmatch(value.strip())
                if alone:
                    return self._value(alone[1], within)
                return MACRO.sub(lambda found: _text(self._value(found[1], within)), value)
            case dict():
                return {str(self._fill(name, within)): self._fill(v, within) for name, v in value.items()}
            case list():
                return [self._fill(each, within) for each in value]
        return value

    def _value(self, name: str, within: tuple[str, ...]) -> Any:
        if name.startswith("env."):
            return VARIABLE + name[len("env.") :] + _END
        if name not in self._values:
            raise ValueError(f"${{{name}}} is no macro of the file")
        if name in within:
            raise ValueError(f"the macro {name} holds itself: {' -> '.join([*within, name])}")
        return self._fill(self._values[name], (*within, name))


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def command_words(command: str) -> list[str]:
    """The words of a command as llama-swap reads it: no shell, and lines that begin with # are comments."""
    return shlex.split("\n".join(line.rstrip().removesuffix("\\") for line in uncommented(command)))


def uncommented(command: str) -> list[str]:
    """The lines of a command that are no comments."""
    return [line for line in command.splitlines() if not line.strip().startswith("#")]


def written(value: Any, port: int | None = None) -> Any:
    """The value as a compose file has it; ``port``: the port where it is not anvil-mux's to give."""

    def replaced(found: re.Match[str]) -> str:
        if found[0] == "$":
            return "$$"
        if found[0] != PORT:
            return f"${{{found[2]}?}}"
        if port is not None:
            return str(port)
        return "$${PORT}" if found[1] else "$$PORT"

    match value:
        case str():
            return _MARKED.sub(replaced, value)
        case dict():
            return {written(name, port): written(each, port) for name, each in value.items()}
        case list() | tuple():
            return [written(each, port) for each in value]
    return value


def plain(value: Any) -> str:
    """The value as people write it, for messages."""
    text = _MARKED.sub(lambda found: f"${{env.{found[2]}}}" if found[2] else found[0], str(value))
    return text.replace(PORT, "${PORT}").replace(PID, "${PID}")


def variable(value: Any) -> str:
    """The variable that a value is and nothing else; "" where it is something else."""
    text = str(value)
    alone = text.startswith(VARIABLE) and text.endswith(_END) and text.count(_END) == 1
    return text[1:-1] if alone else ""


# Services


def write_process(model: SwapModel, service: dict[str, Any]) -> None:
    service["command"] = written(model.words)
    if model.environment:
        service["environment"] = written(model.environment)
    if model.port is not None:
        model.settings["port"] = model.port
    elif PORT not in model.said["cmd"]:
        text = "names no port, and `proxy` neither; the engine finds its port in the variable PORT."
        model.note("cmd", text)
    if container := model.container:
        if (engine := service_engine(container.service)) != DEFAULT_ENGINE:
            model.settings["engine"] = engine
        if options := ", ".join(container.unknown):
            text = f"stays a process that runs a container: {options} has no counterpart in a service."
            model.note("cmd", text)


def write_container(model: SwapModel, service: dict[str, Any], port: int, volumes: dict[str, Any]) -> None:
    made = model.container
    assert made
    service |= written({**made.service, "profiles": ["llm"]}, port)
    for name, value in service.get("environment", {}).items():
        if value is None and name in model.environment:
            service["environment"][name] = written(model.environment[name])
    asked = str(port) if model.port is None else str(model.port)
    published = [written(list(each), port) for each in made.ports]
    service["ports"] = [f"127.0.0.1::{inside}" for outside, inside in published if outside == asked]
    service["ports"] += [f"127.0.0.1:{o}:{inside}" for o, inside in published if o != asked]
    if not published:
        del service["ports"]
        model.settings["port"] = int(asked)
    elif len(published) > 1:
        model.settings["port"] = next((int(inside) for o, inside in published if o == asked), int(asked))
    volumes |= {name: {"name": name} for name in made.sources if not name.startswith(NO_VOLUME)}


# Keys


def texts(value: Any) -> list[str]:
    if value is None:
        return []
    if not isinstance(value, list) or any(isinstance(each, (list, dict)) for each in value):
        raise ValueError(f"must be a list of texts, not {value!r}")
    return [str(each) for each in value]


def listed(value: Any) -> list[str]:
    """The names in a text, between commas."""
    return [name.strip() for name in str(value or "").split(",") if name.strip()]


def _command(model: SwapModel, value: Any) -> None:
    if isinstance(value, (list, dict)):
        raise ValueError(f"must be text, not {value!r}")
    model.said["cmd"] = text = str(value or "")
    model.words = command_words(text)
    if is_container(model.words):
        model.container = read_container(model.words)


def _proxy(model: SwapModel, value: Any) -> None:
    found = PROXY.fullmatch(str(value or f"http://localhost:{PORT}"))
    is_here = found and found["scheme"] == "http"
    port = (found["port"] or "80") if found and is_here else ""
    if found is None or not is_here or (found["host"] not in LOOPBACK and not _published(model, port)):
        model.note("proxy", f"is left out: engines listen on this machine, and {plain(value)} does not.")
        return
    if found["path"] not in (None, "/"):
        model.note("proxy", f"the path {found['path']} is left out: engines are asked at their root.")
    if found["host"] not in LOOPBACK:
        port = _published(model, port)
    if port != PORT:
        model.port = int(port)


def _published(model: SwapModel, port: str) -> str:
    """Return the port of this machine under which `docker run` publishes ``port``; "" if it does not.

    ``proxy`` names the bridge with the port outside, or the container itself with the one inside.
    """
    ports = model.container.ports if model.container else []
    numbers = [(outside, inside) for outside, inside in ports if outside == PORT or outside.isdecimal()]
    named = [outside for outside, _ in numbers if outside == port]
    named += [outside for outside, inside in numbers if inside == port]
    return next(iter(named), "")


def _environment(model: SwapModel, value: Any) -> None:
    pairs = [each.partition("=") for each in texts(value)]
    model.environment = {name: text for name, _, text in pairs}
    if model.container:
        used = {name for name, text in model.container.service.get("environment", {}).items() if text is None}
        if left := sorted(set(model.environment) - used):
            model.note("env", f"{', '.join(left)} reached `docker run`, not the container: left out.")


def _aliases(model: SwapModel, value: Any) -> None:
    listed = value if isinstance(value, list) else texts(value)
    model.call(*texts([each.get("id") if isinstance(each, dict) else each for each in listed]))


def _ttl(model: SwapModel, value: Any) -> None:
    found = model.common.get("globalTTL") if value in (None, -1) else value
    if found:
        model.settings["ttl"] = found


def _unload_timeout(model: SwapModel, value: Any) -> None:
    if found := value or model.common.get("unloadTimeout"):
        model.settings["stop_timeout"] = found


def _health_timeout(model: SwapModel, value: Any) -> None:
    if value is not None:
        model.note("healthCheckTimeout", "llama-swap takes that of the whole file, and so do we.")
    found = model.common.get("healthCheckTimeout")
    if found is not None:
        model.settings["load_timeout"] = max(found, LEAST_LOAD_SECONDS) if isinstance(found, int) else found


def _served(model: SwapModel, value: Any) -> None:
    if value:
        model.settings["served_model"] = str(value)


def _concurrency(model: SwapModel, value: Any) -> None:
    if value:
        model.settings["concurrency"] = value
        model.note("concurrencyLimit", "requests above it are queued, and not refused with 429.")


def _capabilities(model: SwapModel, value: Any) -> None:
    if value is None:
        return
    if not isinstance(value, dict):
        raise ValueError(f"must hold in, out, tools, reranker or context, not {value!r}")
    takes, makes = (texts(value.get(key)) for key in ("in", "out"))
    can = {
        "completion": "text" in makes,
        "tools": value.get("tools"),
        "vision": "image" in takes,
        "audio": "audio" in takes,
        "embeddings": "embeddings" in makes or "embedding" in makes,
        "reranking": value.get("reranker"),
    }
    if length := value.get("context"):
        model.settings["context"] = length
    if names := [name for name, is_able in can.items() if is_able]:
        model.settings["capabilities"] = names


def _health(model: SwapModel, value: Any) -> None:
    if value not in (None, "", "/health"):
        text = "is left out: an engine is ready when its /health and its list of models say so."
        model.note("checkEndpoint", f"{value} {text}")


def _stop(model: SwapModel, value: Any) -> None:
    if not value:
        return
    words = command_words(str(value))
    program = words[0].rpartition("/")[2] if words else ""
    if model.container and program in ("docker", "podman") and words[1:2] in (["stop"], ["kill"], ["rm"]):
        return  # what is told to end does so itself, and takes its container with it
    text = "is left out: the engine gets SIGTERM, and SIGKILL later; it was"
    model.note("cmdStop", f"{text} {show(plain(value))}.")


def _filters(model: SwapModel, value: Any) -> None:
    if value is None:
        return
    if not isinstance(value, dict):
        raise ValueError(f"must hold stripParams and setParams, not {value!r}")
    names = listed(value.get("stripParams") or value.get("strip_params"))
    if kept := [name for name in names if name not in UNTOUCHED]:
        model.settings["strip"] = kept
    _untouched(model, "stripParams", names)
    model.settings |= _fields(model, "setParams", value.get("setParams") or {})
    _by_id(model, value.get("setParamsByID") or {})
    for key in value:
        if key not in ("stripParams", "strip_params", "setParams", "setParamsByID"):
            model.note("filters", f"{key}: {UNKNOWN}")


def _untouched(model: SwapModel, key: str, names: Collection[str]) -> None:
    if "stream" in names:
        model.note("filters", f"{key}: `stream` is left as the client says.")


def _fields(model: SwapModel, key: str, said: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    if not isinstance(said, dict):
        raise ValueError(f"{key} must hold fields and their values, not {said!r}")
    _untouched(model, key, [name.removesuffix("?") for name in said])
    return parameters(said)


def parameters(said: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The fields that are set, and those (``name?``) that a client may give itself, by our settings."""
    found: dict[str, dict[str, Any]] = {}
    for name, each in said.items():
        if (field_name := name.removesuffix("?")) not in UNTOUCHED:
            found.setdefault("set" if field_name == name else "default", {})[field_name] = each
    return found


def _by_id(model: SwapModel, said: Mapping[str, Any]) -> None:
    """The parameters of single names, which become presets: those are aliases no more."""
    if not isinstance(said, dict):
        raise ValueError(f"setParamsByID must hold names and their fields, not {said!r}")
    for name, fields in said.items():
        found = _fields(model, f"setParamsByID: {name}", fields or {})
        if name == model.id:
            for key, each in found.items():
                model.settings[key] = {**model.settings.get(key, {}), **each}
            continue
        aliases = [alias for alias in model.settings.pop("aliases", ()) if alias != name]
        model.settings |= {"aliases": aliases} if aliases else {}
        if found:
            model.settings.setdefault("presets", {})[name] = found
        else:
            model.call(name)


KEYS: dict[str, Callable[[SwapModel, Any], None]] = {
    "cmd": _command,
    "proxy": _proxy,
    "env": _environment,
    "aliases": _aliases,
    "useModelName": _served,
    "filters": _filters,
    "ttl": _ttl,
    "healthCheckTimeout": _health_timeout,
    "unloadTimeout": _unload_timeout,
    "concurrencyLimit": _concurrency,
    "capabilities": _capabilities,
    "checkEndpoint": _health,
    "cmdStop": _stop,
}
UNKNOWN = "is left out: neither llama-swap's documentation nor this command knows it."
NOTES = {
    "name": "is left out: lists of models have no second name.",
    "description": "is left out: lists of models have no descriptions.",
    "metadata": "is left out: lists of models have no metadata.",
    "unlisted": "every model is listed; an API key with `models=` sees its own alone (docs/security.md).",
    "sendLoadingState": "a stream that waits for a load gets comments, which are no part of the answer.",
    "timeouts": "is left out: `upstream_timeout` at the top level is the longest silence of any engine.",
    "compat": "is left out: a websocket is a request like any other.",
}


# The words of a `docker run`


def is_container(words: Sequence[str]) -> bool:
    """Whether the words start a container."""
    program = PurePosixPath(words[0]).name if words else ""
    return program in ("docker", "podman") and (words[1:2] == ["run"] or words[1:3] == ["container", "run"])


def read_container(words: Sequence[str]) -> ContainerRun:
    """The container that the words start; see ``is_container``."""
    made = ContainerRun()
    rest = list(words[words.index("run") + 1 :])
    while rest and rest[0].startswith("-") and rest[0] != "-":
        word = rest.pop(0)
        if word == "--":
            break
        _option(made, word, rest)
    if rest:
        made.service = {"image": rest.pop(0), **made.service}
    if rest:
        made.service["command"] = rest
    return made


def _option(made: ContainerRun, word: str, rest: list[str]) -> None:
    """Take one option, and its value from ``rest`` unless the word holds it."""
    if not word.startswith("--") and len(word) > 2 and set(word[1:]) <= set(SHORT_FLAGS):
        for letter in word[1:]:
            _option(made, f"-{letter}", rest)
        return
    name, equals, value = _parts(word)
    if name in FLAGS:
        made.service |= FLAGS[name] if value not in ("false", "0") else {}
    elif name not in MEANINGLESS:
        known = name in (*SINGLE, *LISTS, *OTHERS, *IGNORED, PUBLISH)
        if known and not equals and rest:
            equals, value = "=", rest.pop(0)
        if known and equals:
            _take(made, name, value)
        else:
            made.unknown.append(word)
            if name in VALUED and not equals:
                del rest[:1]


def _parts(word: str) -> tuple[str, str, str]:
    """The long name of an option, and its value if the word holds one."""
    name, equals, value = word.partition("=")
    if not word.startswith("--") and len(word) > 2 and word[:2] in SHORT:
        name, equals, value = word[:2], "=", word[2:].removeprefix("=")
    return SHORT.get(name, name), equals, value


def _take(made: ContainerRun, name: str, value: str) -> None:
    if name == PUBLISH:
        outside, _, inside = value.removesuffix("/tcp").rpartition(":")
        made.ports.append((outside.rpartition(":")[2], inside))
    elif name in SINGLE:
        made.service[SINGLE[name]] = value
    elif name in LISTS:
        made.service.setdefault(LISTS[name], []).append(value)
    elif name in OTHERS:
        try:
            OTHERS[name](made.service, value)
        except (ValueError, csv.Error):
            made.unknown.append(f"{name} {value}")


def _variable(service: ServiceKeys, value: str) -> None:
    name, equals, text = value.partition("=")
    service.setdefault("environment", {})[name] = text if equals else None


def _label(service: ServiceKeys, value: str) -> None:
    name, _, text = value.partition("=")
    service.setdefault("labels", {})[name] = text


def _limit(service: ServiceKeys, value: str) -> None:
    name, _, text = value.partition("=")
    soft, colon, hard = text.partition(":")
    limits: Any = {"soft": int(soft), "hard": int(hard)} if colon else int(text) if text else 0
    service.setdefault("ulimits", {})[name] = limits


def _mount(service: ServiceKeys, value: str) -> None:
    """Mount what is written as `type=bind,source=...,target=...,readonly`."""
    said = dict(part.partition("=")[::2] for part in value.split(","))
    source, target = (next((said[key] for key in keys if key in said), "") for keys in MOUNT_KEYS)
    mount: ServiceKeys = {"type": said.get("type", "volume"), "source": source, "target": target}
    if "readonly" in said or "ro" in said:
        mount["read_only"] = True
    service.setdefault("volumes", []).append({key: each for key, each in mount.items() if each})


def _entrypoint(service: ServiceKeys, value: str) -> None:
    service["entrypoint"] = [value]


def _gpus(service: ServiceKeys, value: str) -> None:
    """Reserve GPUs as Docker reads them: fields in CSV, such as `all`, `2`, `count=2` or `"device=0,1"`."""
    asked: ServiceKeys = {"driver": "nvidia", "capabilities": ["gpu"]}
    for part in _in_csv(value.strip("'")):
        key, equals, text = part.partition("=")
        match key if equals else "count":
            case "count":
                text = text if equals else key
                asked["count"] = "all" if text in ("all", "-1") else int(text)
            case "device":
                asked["device_ids"] = text.split(",")
            case "driver":
                asked["driver"] = text
            case "capabilities":
                asked["capabilities"] = list(dict.fromkeys((*text.split(","), "gpu")))
            case "options":
                asked["options"] = dict(option.partition("=")[::2] for option in _in_csv(text))
            case _:
                raise ValueError(f"--gpus has no {key}")
    if "device_ids" not in asked:
        asked.setdefault("count", 1)
    elif "count" in asked:
        raise ValueError("--gpus names GPUs and counts them")
    service["deploy"] = {"resources": {"reservations": {"devices": [asked]}}}


def _in_csv(text: str) -> list[str]:
    return next(csv.reader([text]), [])


def _by_key(keys: Sequence[str]) -> dict[str, str]:
    """The options that are called as the keys of a service are."""
    return {f"--{key.replace('_', '-')}": key for key in keys}


PUBLISH = "--publish"
SHORT = {
    "-p": PUBLISH,
    "-v": "--volume",
    "-e": "--env",
    "-u": "--user",
    "-w": "--workdir",
    "-m": "--memory",
    "-h": "--hostname",
    "-l": "--label",
}
SHORT_FLAGS = "itd"
FLAGS: dict[str, ServiceKeys] = {
    "--init": {"init": True},
    "--privileged": {"privileged": True},
    "--read-only": {"read_only": True},
}
MEANINGLESS = ("--rm", "-i", "-t", "-d", "--interactive", "--tty", "--detach", "--sig-proxy", "--replace")
"""Options without a value that say how a terminal, or whoever ran the command, has the container."""
IGNORED = ("--name", "--restart", "--pull", "--stop-timeout")
"""Options with a value that anvil-mux sees to, or that would be in its way."""
VALUED = (
    *("--dns", "--sysctl", "--log-driver", "--log-opt", "--cgroup-parent", "--memory-swap", "--cidfile"),
    *("--pids-limit", "--oom-score-adj", "--health-cmd", "--network-alias", "--link", "--expose", "--ip"),
    "--volumes-from",
)
"""Options with a value for which nothing is written."""
MOUNT_KEYS = (("source", "src"), ("target", "dst", "destination"))
SINGLE = {
    **_by_key(("cpus", "hostname", "ipc", "pid", "platform", "runtime", "shm_size", "stop_signal", "user")),
    "--cpuset-cpus": "cpuset",
    "--memory": "mem_limit",
    "--net": "network_mode",
    "--network": "network_mode",
    "--userns": "userns_mode",
    "--workdir": "working_dir",
}
"""Option -> the key that has its value."""
LISTS = {
    **_by_key(("cap_add", "cap_drop", "env_file", "group_add", "security_opt", "tmpfs")),
    "--add-host": "extra_hosts",
    "--device": "devices",
    "--volume": "volumes",
}
"""Option -> the key that lists its values."""
OTHERS: dict[str, Callable[[ServiceKeys, str], None]] = {
    "--entrypoint": _entrypoint,
    "--env": _variable,
    "--gpus": _gpus,
    "--label": _label,
    "--mount": _mount,
    "--ulimit": _limit,
}
