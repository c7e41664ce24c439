"""Odd values in what people write: the compose file, variables, files of keys, profiles.

Each key of ``x-anvil`` comes from the program's own tables. ``judged`` has ``check`` read a case in this
process, its work counted.
"""

from __future__ import annotations

import io
import json
import math
import os
import random
import re
import signal
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import yaml

from anvil_mux import routing
from anvil_mux.cli import main as cli
from anvil_mux.cli.arguments import configuration
from anvil_mux.config.config import SERVICE_SETTINGS, SETTINGS
from anvil_mux.errors import ConfigError
from anvil_mux.scheduler.memory import EVICTIONS
from anvil_mux.scheduler.policies import POLICIES
from tests.values.cases import Brief
from tests.values.values import ODD, Change, as_text, changed, places
from tests.values.values import Path as Place
from tests.values.witness import strict
from tests.values.work import list_ns

YEAR = 365 * 86400.0
MOST = 10**15
"""The greatest number that a setting may say."""
EXIT_CODES = frozenset({0, 78})
"""All is well; something in the files is wrong."""
LISTS, LISTS_PER_BYTE = 20_000_000, 10_000.0
"""What reading files may cost, in empty lists, and more for each byte: a parser in Python reads them."""

OF_YAML = {
    **{
        word: word
        for word in (".nan", ".inf", "-.inf", "1e999", "0x10", "0o17", "0b1", "1_0", "1:30", "~", "on")
    },
    **{
        word: word
        for word in ("2001-01-01", "!!binary aGk=", "!x y", "!!python/name:os.system", "!reset null")
    },
    **{
        word: word
        for word in ("!override []", "&a [*a]", "&a {x: *a}", "{<<: 1}", "{<<: [1]}", "{? [a] : b}")
    },
    **{
        word: word
        for word in ("{1: 2}", "{~: 1}", "{true: 1}", "{.nan: 1}", "{x: 1, x: 2}", "*nobody", "$$", "$")
    },
    **{word: word for word in ('"${"', '"${X:-${Y}}"', '"${X:?no}"', '"${X-}"', '"$HOME"', "0x" + "f" * 300)},
    **{
        word: word
        for word in ("-0", "00", "08", "+1", "1.", ".5", "1e15", "31536001", "365d", "none", "auto", "all")
    },
    **{
        word: word
        for word in ("12GiB", "1e3GiB", "-1GiB", "9999999TB", "0B", "1 GiB", "GiB", "1.5.5GiB", "any")
    },
    **{
        word: word
        for word in ("nvidia", "[nvidia]", "measured", "{vram: 1}", "[[]]", "[[0], []]", "{a: {}}", "0:0")
    },
    **{
        word: word
        for word in ("70000", "65536", "0-99999999", "1-4500:1-4500", "127.0.0.1:1:1:1", "1/udp", "::1")
    },
}
"""What only YAML can say, and what comes near to what settings take."""
NAMES = [name for name, text in ODD.items() if len(text) < 2000]
LONG = [name for name, text in ODD.items() if 2000 <= len(text) < 15_000]


def value_of(name: str) -> str:
    return OF_YAML[name] if name in OF_YAML else ODD[name]


@dataclass(frozen=True, repr=False)
class Files(Brief):
    """The files and variables of one configuration."""

    runtime: str = "process"
    changes: tuple[Change, ...] = ()
    """Of the compose file."""
    variables: tuple[tuple[str, str], ...] = ()
    """Variables of the environment, and the names of their values."""
    env_file: tuple[tuple[str, str], ...] = ()
    """The same in the file .env."""
    keys: tuple[tuple[str, str], ...] = ()
    """Rights in a file of keys, and the names of their values."""
    profile: tuple[Change, ...] = ()
    """Of a profile that the file names."""
    as_json: bool = False
    command: str = "check"


_PROFILE = {
    "metadata": {"max_num_batched_tokens": 8192},
    "ttft": {"results": [{"tokens_num": 16, "p50": 1.5}, {"tokens_num": 1024, "p50": 9.5}]},
    "tpot": {
        "results": [
            {"batch_size": 1, "tokens_per_request": 16, "p50": 1.5},
            {"batch_size": 8, "tokens_per_request": 16, "p50": 2.5},
        ]
    },
}
_RESERVED = {
    "driver": "nvidia",
    "count": 1,
    "device_ids": ["0"],
    "capabilities": ["gpu"],
    "options": {"a": "b"},
}
_SERVICE: dict[str, Any] = {
    "image": "vllm/vllm-openai:latest",
    "entrypoint": ["vllm", "serve"],
    "command": ["--model", "m", "--port", "8000", "--tensor-parallel-size", "1", "--max-model-len", "4096"],
    "environment": {"A": "1", "B": 2, "VLLM_SERVER_DEV_MODE": "1"},
    "ports": [
        "127.0.0.1:8000:8000",
        {"target": 8001, "published": "8001", "protocol": "tcp", "host_ip": "127.0.0.1"},
    ],
    "expose": ["8000"],
    "healthcheck": {"test": ["CMD", "true"], "interval": "5s", "retries": 3, "start_period": "1m"},
    "deploy": {
        "replicas": 1,
        "resources": {"reservations": {"devices": [_RESERVED]}, "limits": {"memory": "1g"}},
    },
    "gpus": [_RESERVED],
    "devices": ["/dev/dri:/dev/dri", {"source": "/dev/kfd", "target": "/dev/kfd", "permissions": "rwm"}],
    "secrets": ["s", {"source": "s", "target": "t", "mode": 256}],
    "configs": ["c"],
    "volumes": ["./m:/m:ro", {"type": "bind", "source": "./m", "target": "/n", "read_only": True}],
    "profiles": ["p"],
    "labels": {"a": "b", "anvil.x": "1"},
    "stop_grace_period": "10s",
    "env_file": [{"path": "none.env", "required": False}],
    "depends_on": {"b": {"condition": "service_started"}},
    "networks": {"default": {"aliases": ["x"]}},
    "scale": 1,
    "user": "0:0",
    "restart": "no",
    "runtime": "nvidia",
    "shm_size": "1gb",
    "ipc": "host",
    "network_mode": "bridge",
    "stop_signal": "SIGTERM",
    "mem_limit": "1g",
    "working_dir": "/",
    "container_name": "x",
    "logging": {"driver": "json-file", "options": {"max-size": "1m"}},
    "ulimits": {"nofile": {"soft": 1, "hard": 2}},
    "x-anvil": {},
}
_SHIPPED = Path(routing.__file__).parent / "routing.yaml"
_CHOSEN = {
    field.name: (key, name)
    for key, table in (("policy", POLICIES), ("eviction", EVICTIONS))
    for name, each in table.items()
    if is_dataclass(each)
    for field in fields(each)
}
"""Setting of a policy or an eviction -> where it is one, and of which."""
_SETTINGS: dict[str, Any] = {
    "listen": "127.0.0.1:0",
    "gpus": {"0": {"vram": "24GiB", "reserve": "1GiB"}, "1": None},
    "machines": {"far": {"gpus": ["0"], "host_memory": "64GiB"}},
    "policy": {"name": "drain", "window": 5},
    "eviction": {"name": "lru"},
    "routing": {
        "default": "mine",
        "mode": "full",
        "store": "redis://127.0.0.1:1/0",
        "policies": {f"my_{name}": policy for name, policy in yaml.safe_load(_SHIPPED.read_text()).items()},
    },
    "any_of": {"either": ["a", {"model": ["b"], "when": {"images": True, "tokens_over": 9}}]},
    "hooks": [
        {"on": ["ready"], "run": ["true"], "timeout": 5},
        {"on": "ready", "url": "http://127.0.0.1:1/x"},
    ],
}
_OF_SERVICE: dict[str, Any] = {
    "gpus": [["0"], ["1"]],
    "presets": {"p": {"set": {"temperature": 0.5}, "strip": ["x"], "system": "s", "lora": "l"}},
    "loras": {"l": "/l"},
    "set": {"a": {"b": 1}},
    "fallback": {"models": ["b"], "after": 5},
    "upstream": ["/docs"],
    "hosts": {"gpu": "big"},
}


def document_of(files: Files) -> dict[str, Any]:
    """The compose file before it is changed."""
    settings: dict[str, Any] = {"project": "types", "gpus": ["0", "1"]}
    if files.runtime == "process":
        settings["runtime"] = "process"
        services: dict[str, Any] = {
            name: {
                "command": ["true"],
                "environment": {"A": "1"},
                "working_dir": ".",
                "x-anvil": {"gpus": ["0"]},
            }
            for name in ("a", "b")
        }
    else:
        kept = ("image", "command", "ports", "x-anvil")
        services = {name: {key: _SERVICE[key] for key in kept} for name in ("a", "b")}
        services["a"]["ports"] = ["8000"]
        services["b"] = {"image": "x", "x-anvil": {"gpus": ["1"]}}
    if files.keys:
        settings["key_file"] = "keys"
    if files.profile:
        services["a"]["x-anvil"] = {**services["a"]["x-anvil"], "profile": "profile.json"}
    secrets = {"s": {"environment": "S"}} if files.runtime != "process" else {}
    shared = {"secrets": secrets, "volumes": {"v": {"driver": "local"}}} if secrets else {}
    document = {"name": "types", "x-anvil": settings, "services": services, **shared}
    for path, _ in files.changes:
        _fill(document, path)
    return document


def _fill(document: dict[str, Any], path: Place) -> None:
    """Have what is to be changed stand there as it does in a usual file."""
    usual: Any = {
        "x-anvil": _SETTINGS,
        "services": {name: {**_SERVICE, "x-anvil": _OF_SERVICE} for name in ("a", "b")},
    }
    if len(path) == 3 and path[2] in _CHOSEN and path[1] in ("policy", "eviction"):
        document["x-anvil"][str(path[1])] = {"name": _CHOSEN[str(path[2])][1]}
    place: Any = document
    for step in path[:-1]:
        usual = usual.get(step) if isinstance(usual, dict) else None
        if isinstance(place, dict) and step not in place:
            if usual is None:
                return
            place[step] = json.loads(json.dumps(usual))
        try:
            place = place[step]
        except (KeyError, IndexError, TypeError):
            return


def drawn(draw: random.Random) -> Files:
    files = Files(draw.choice(("process", "process", "compose")), as_json=draw.random() < 0.2)
    match draw.random():
        case kind if kind < 0.75:
            count = draw.choice((1, 1, 2, 4))
            changes = tuple((_place(draw, files.runtime), _name(draw)) for _ in range(count))
            return Files(files.runtime, changes, as_json=files.as_json)
        case kind if kind < 0.84:
            return Files(
                files.runtime,
                keys=tuple((draw.choice(RIGHTS), _name(draw)) for _ in range(draw.randint(1, 3))),
            )
        case kind if kind < 0.89:
            return Files(files.runtime, profile=((draw.choice(places(_PROFILE)), _name(draw)),))
    given = tuple((draw.choice(VARIABLES), _name(draw)) for _ in range(draw.choice((1, 1, 2))))
    if draw.random() < 0.3:
        return Files(files.runtime, env_file=given)
    return Files(files.runtime, variables=given)


RIGHTS = ("", "models", "name", "requests", "waiting", "swap", "state", "admin", "sha256", "x", "key")
VARIABLES = (
    *(f"ANVIL_{key.upper()}" for key in SETTINGS),
    *(
        "ANVIL_API_KEYS",
        "ANVIL_API_KEY",
        "ANVIL_URL",
        "ANVIL_SETTING",
        "COMPOSE_PROJECT_NAME",
        "COMPOSE_PROFILES",
    ),
    *("COLUMNS", "NO_COLOR", "XDG_STATE_HOME", "HOME", "LANG", "DOCKER_HOST"),
)


def _name(draw: random.Random) -> str:
    return (
        draw.choice(LONG)
        if draw.random() < 0.1
        else draw.choice([*OF_YAML] if draw.random() < 0.5 else NAMES)
    )


def _place(draw: random.Random, runtime: str) -> Place:
    which = draw.random()
    if which < 0.35:
        return _inner(draw, ("x-anvil", draw.choice(list(SETTINGS))), _SETTINGS)
    if which < 0.7:
        return _inner(draw, ("services", "a", "x-anvil", draw.choice(list(SERVICE_SETTINGS))), _OF_SERVICE)
    if which < 0.74:
        setting = draw.choice(list(_CHOSEN))
        return ("x-anvil", _CHOSEN[setting][0], setting)
    if which < 0.78:
        return draw.choice(
            (("x-anvil",), ("services",), ("services", "a"), ("services", "a", "x-anvil"), ("name",), ())
        )
    return _inner(draw, ("services", "a", draw.choice(list(_SERVICE))), _SERVICE)


def _inner(draw: random.Random, path: Place, usual: dict[str, Any]) -> Place:
    """The place, or one within what usually stands there."""
    inner = places(usual.get(str(path[-1])))
    return (*path, *draw.choice(inner)) if draw.random() < 0.6 else path


def write(files: Files, folder: Path) -> Path:
    """Write a case's files, and return the compose file."""
    for old in folder.iterdir():
        old.unlink()
    file = folder / "compose.yaml"
    text = changed(document_of(files), files.changes, value_of)
    file.write_text(text, "utf-8", "surrogatepass")
    if files.env_file:
        lines = [
            f"{name}={as_text(value) if value in ODD else OF_YAML[value]}\n" for name, value in files.env_file
        ]
        (folder / ".env").write_text("".join(lines), "utf-8", "surrogatepass")
    if files.keys:
        (folder / "keys").write_text(_key_lines(files.keys), "utf-8", "surrogatepass")
    if files.profile:
        text = changed(_PROFILE, files.profile, value_of)
        (folder / "profile.json").write_text(text, "utf-8", "surrogatepass")
    return file


def _variable(name: str) -> str:
    """A value as an environment may hold it."""
    text = as_text(name) if name in ODD else OF_YAML[name]
    return text.replace("\0", "").encode("utf-8", "surrogatepass").decode("utf-8", "surrogateescape")


def _key_lines(keys: tuple[tuple[str, str], ...]) -> str:
    lines = ["a-key-of-an-admin name=boss"]
    for right, name in keys:
        value = as_text(name) if name in ODD else OF_YAML[name]
        if right == "key":
            lines.append(value)
        elif right == "sha256":
            lines.append(f"sha256:{value} models=a")
        else:
            lines.append(f"another-key-{len(lines)} " + (f"{right}={value}" if right else value))
    return "\n".join(lines) + "\n"


def judged(files: Files, folder: Path) -> list[str]:
    """All that does not hold of one case."""
    try:
        file = write(files, folder)
    except UnicodeEncodeError:
        return []
    variables = {name: _variable(value) for name, value in files.variables}
    environ = {"PATH": "/nowhere", "HOME": str(folder), "XDG_STATE_HOME": str(folder / "state"), **variables}
    out, err = io.StringIO(), io.StringIO()
    size = sum(each.stat().st_size for each in folder.iterdir() if each.is_file()) + sum(
        map(len, variables.values())
    )
    found: list[str] = []
    code: object = None
    with patch.dict(os.environ, environ, clear=True):
        try:
            with redirect_stdout(out), redirect_stderr(err), at_most(LISTS + LISTS_PER_BYTE * size):
                code = cli.main(["check", *(["--json"] if files.as_json else []), str(file)])
        except SystemExit as ended:
            code = ended.code
        except TooMuchWork as error:
            found.append(f"work: {error} for {size} bytes: {files!r}")
        except BaseException:
            found.append(f"a mistake: {files!r}\n{traceback.format_exc()[-4000:]}")
        if code == 0:
            found += _accepted(files, file)
    return [*found, *_told(files, code, out.getvalue(), err.getvalue())]


def _told(files: Files, code: object, out: str, err: str) -> Iterator[str]:
    """What is wrong with what ``check`` says."""
    text = err + out
    if code is not None and code not in EXIT_CODES:
        yield f"exit code {code}: {files!r}: {text[-600:]}"
    if code == 78 and not re.search(r"compose\.yaml|\.env:|ANVIL_|COMPOSE_|keys|profile\.json", text):
        yield f"a problem without a file: {files!r}: {text[-600:]}"
    if "Traceback" in text:
        yield f"a traceback: {files!r}: {text[-2000:]}"
    if re.search(r"[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff]", text):
        where = re.search(r".{0,80}[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff].{0,80}", text, re.S)
        yield f"control characters in what it says: {files!r}: {where and where[0]!r}"
    if files.as_json and code is not None:
        try:
            strict(out)
        except ValueError as error:
            yield f"check --json says no JSON ({error}): {files!r}: {text[-600:]}"


class TooMuchWork(BaseException):
    """What takes more CPU time than it may."""


@contextmanager
def at_most(lists: float) -> Iterator[None]:
    """Raise TooMuchWork where this thread computes for longer than it takes to make so many empty lists."""

    def end(*_: object) -> None:
        raise TooMuchWork(f"more than {lists:.0f} lists")

    before = signal.signal(signal.SIGVTALRM, end)
    signal.setitimer(signal.ITIMER_VIRTUAL, lists * LIST_NS / 1e9)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


LIST_NS = list_ns()


def _accepted(files: Files, file: Path) -> Iterator[str]:
    """Values in a configuration that was accepted, with which nothing can work."""
    try:
        with redirect_stderr(io.StringIO()):
            config = configuration([str(file)], here=True)
    except (ConfigError, SystemExit) as error:
        yield f"check accepts what cannot be loaded: {files!r}: {error}"
        return
    for place, value in _values(config, "config"):
        # The numbers of a profile are tokens, and milliseconds that were measured: all others are seconds.
        most = MOST if ".profile" in place else YEAR
        if isinstance(value, float) and (math.isnan(value) or (most < abs(value) < math.inf)):
            yield f"accepted: {place} = {value!r}: {files!r}"
        if isinstance(value, int) and abs(value) > MOST:
            yield f"accepted: {place} = {str(value)[:50] if abs(value) < 10**400 else 'huge'}: {files!r}"
        if isinstance(value, str) and re.search(r"[\ud800-\udfff]", value):
            yield f"accepted: {place} has half a surrogate pair: {files!r}"


FREE = ("environment", ".set", "service.", "raw", "warnings", "problems")
"""Parts of a configuration that are the engine's, or are only said."""


def _values(value: Any, place: str) -> Iterator[tuple[str, Any]]:
    if any(part in place for part in FREE):
        return
    if is_dataclass(value):
        for field in fields(value):
            yield from _values(getattr(value, field.name), f"{place}.{field.name}")
    elif isinstance(value, dict):
        for key, each in value.items():
            yield f"{place} key", key
            yield from _values(each, f"{place}[]")
    elif isinstance(value, (list, tuple, set, frozenset)):
        for each in value:
            yield from _values(each, f"{place}[]")
    else:
        yield place, value
