"""The words of a `docker run` or `podman run` -> the service of a compose file."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from anvil_mux.config import service

ServiceKeys = dict[str, Any]


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
        return service.is_nvidia(self.service) or service.reserves_others(self.service) is not None

    @property
    def gpus(self) -> list[str]:
        """The ids of the GPUs that it names, or counts."""
        asked = service.reserved(self.service)
        others = service.reserves_others(self.service)
        return [*(asked if isinstance(asked, tuple) else ()), *(others.ids if others else ())]


def _is_volume(mount: object) -> bool:
    return isinstance(mount, dict) and mount["type"] == "volume" and "source" in mount


def is_container(words: Sequence[str]) -> bool:
    """Whether the words start a container."""
    program = PurePosixPath(words[0]).name if words else ""
    return program in ("docker", "podman") and (words[1:2] == ["run"] or words[1:3] == ["container", "run"])


def read(words: Sequence[str]) -> ContainerRun:
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
    for part in _fields(value.strip("'")):
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
                asked["options"] = dict(option.partition("=")[::2] for option in _fields(text))
            case _:
                raise ValueError(f"--gpus has no {key}")
    if "device_ids" not in asked:
        asked.setdefault("count", 1)
    elif "count" in asked:
        raise ValueError("--gpus names GPUs and counts them")
    service["deploy"] = {"resources": {"reservations": {"devices": [asked]}}}


def _fields(text: str) -> list[str]:
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
