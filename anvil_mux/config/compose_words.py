"""The complaints of the Compose program in plain words: the line of each, and what to write instead.

It names keys in several ways and no lines. A complaint that is not known here keeps its own words.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from anvil_mux.config import service, settings
from anvil_mux.config.diagnostic import Diagnostic, KeyPath, as_yaml
from anvil_mux.config.interpolate import Document
from anvil_mux.config.problems import Problems
from anvil_mux.config.table import SERVICE_SETTINGS

TOP_LEVEL = ("services", "volumes", "networks", "configs", "secrets", "name", "include", "x-anvil")
OF_SERVICE = [
    "annotations",
    "attach",
    "blkio_config",
    "build",
    "cap_add",
    "cap_drop",
    "cgroup",
    "cgroup_parent",
    "command",
    "configs",
    "container_name",
    "cpu_count",
    "cpu_percent",
    "cpu_shares",
    "cpus",
    "cpuset",
    "depends_on",
    "deploy",
    "develop",
    "device_cgroup_rules",
    "devices",
    "dns",
    "dns_opt",
    "dns_search",
    "domainname",
    "entrypoint",
    "env_file",
    "environment",
    "expose",
    "extends",
    "external_links",
    "extra_hosts",
    "gpus",
    "group_add",
    "healthcheck",
    "hostname",
    "image",
    "init",
    "ipc",
    "isolation",
    "label_file",
    "labels",
    "links",
    "logging",
    "mac_address",
    "mem_limit",
    "mem_reservation",
    "mem_swappiness",
    "memswap_limit",
    "models",
    "network_mode",
    "networks",
    "oom_kill_disable",
    "oom_score_adj",
    "pid",
    "pids_limit",
    "platform",
    "ports",
    "post_start",
    "pre_stop",
    "privileged",
    "profiles",
    "provider",
    "pull_policy",
    "read_only",
    "restart",
    "runtime",
    "scale",
    "secrets",
    "security_opt",
    "shm_size",
    "stdin_open",
    "stop_grace_period",
    "stop_signal",
    "storage_opt",
    "sysctls",
    "tmpfs",
    "tty",
    "ulimits",
    "use_api_socket",
    "user",
    "userns_mode",
    "uts",
    "volumes",
    "volumes_from",
    "working_dir",
    "x-anvil",
]
"""The keys of a service that Compose knows."""
PATH = r"(?P<path>\(root\)|(?<![\w.\[\]-])[\w-]+(?:\.[\w\[\]-]+)*)"
WRONG_KIND = re.compile(rf"{PATH} must be an? (?P<kind>list|array|mapping|object|string|null|number|boolean)")
NOT_ALLOWED = re.compile(
    rf"{PATH} [Aa]dditional propert(?:y|ies) '?(?P<name>[^' ]+(?: [^' ]+){{0,8}}?)'? (?:is )?not allowed"
)
REQUIRED = re.compile(rf"{PATH} (?P<name>\w+) is required")
DECODING = re.compile(r"error decoding '(?P<path>[^']+)': (?P<why>.*?)(?= error decoding '|$)")
UNEXPECTED = re.compile(rf"{PATH}: unexpected type (?P<kind>\S+)")
FILLING = re.compile(rf"error while interpolating {PATH}: (?P<why>.*)")
NO_IMAGE = re.compile(r'service "(?P<name>[^"]+)" has neither an image nor a build context')
BAD_VOLUME = re.compile(r"invalid spec: (?P<what>\S+): empty section between colons")
EMPTY = re.compile(r"^empty compose file")
NO_ENV_FILE = re.compile(r"env file (?P<file>(?:(?!env file ).)+?) not found")
UNDEFINED = re.compile(r'service "(?P<name>[^"]+)" refers to undefined (?P<kind>\w+) (?P<what>[^\s:]+)')
DEPENDS = re.compile(r'service "(?P<name>[^"]+)" depends on undefined service "?(?P<what>[^"\s:]+)')
EXAMPLES = {"capabilities": "capabilities: [gpu]"}
"""Keys that Compose asks for -> the line that people mean as a rule."""
ELSEWHERE = " (a server elsewhere, x-anvil: {url: ...}, needs `image: scratch` and `profiles`)"


def in_plain_words(said: str, documents: Sequence[Document]) -> list[Diagnostic]:
    """Return what the Compose program says is wrong with the files, each complaint with its place."""
    files = Problems(documents)
    found = [
        text.at(files.place(key), key, ".".join(key) or "the file") for key, text in _read(said, documents)
    ]
    return found or [Diagnostic(f"{documents[0].file}: docker compose config: {said}")]


def _read(said: str, documents: Sequence[Document]) -> Iterator[tuple[KeyPath, Diagnostic]]:
    for each in DECODING.finditer(said):
        yield _path(each["path"]), Diagnostic(each["why"].strip(), value=_example(_path(each["path"])))
    for pattern, read in COMPLAINTS:
        if found := pattern.search(said):
            yield read(found, documents)
            return


Read = tuple[KeyPath, Diagnostic]
"""A complaint: the key that it is about, and what it says."""


def _wrong_kind(found: re.Match[str], documents: Sequence[Document]) -> Read:
    key = _path(found["path"])
    return key, _of_wrong_kind(key, found["kind"], _value(documents, key))


def _not_allowed(found: re.Match[str], documents: Sequence[Document]) -> Read:
    key = (*_path(found["path"]), found["name"])
    return key, _unknown(key, _value(documents, key))


def _required(found: re.Match[str], documents: Sequence[Document]) -> Read:
    name = found["name"]
    return _path(found["path"]), Diagnostic(f"needs {name}", write=EXAMPLES.get(name, f"{name}: ..."))


def _unexpected(found: re.Match[str], documents: Sequence[Document]) -> Read:
    text = "must be text: NAME=value, or the whole a mapping without dashes"
    return _path(found["path"]), Diagnostic(text)


def _unfilled(found: re.Match[str], documents: Sequence[Document]) -> Read:
    return _path(found["path"]), _not_filled(found["why"])


def _imageless(found: re.Match[str], documents: Sequence[Document]) -> Read:
    key = ("services", found["name"], "image")
    return key, _no_image(_value(documents, key))


def _undefined(found: re.Match[str], documents: Sequence[Document]) -> Read:
    kind, what = f"{found['kind']}s", found["what"]
    text = f"refers to the {found['kind']} {what}, which is not at the top level"
    return ("services", found["name"], kind), Diagnostic(text, write=f"{kind}: {{{what}: {{}}}}")


def _depends(found: re.Match[str], documents: Sequence[Document]) -> Read:
    names = [str(each) for each in _mapping(_value(documents, ("services",)))]
    text = f"there is no service {found['what']}; {settings.nearest(found['what'], names)}"
    near = settings.meant(found["what"], names)
    return ("services", found["name"], "depends_on"), Diagnostic(text, value=near and f"[{near}]")


def _no_env_file(found: re.Match[str], documents: Sequence[Document]) -> Read:
    file = PurePosixPath(found["file"]).name
    write = f"env_file: [{{path: {file}, required: false}}]"
    text = f"the file {found['file']} is not there"
    return _service_key(documents, "env_file", file), Diagnostic(text, write=write)


def _bad_volume(found: re.Match[str], documents: Sequence[Document]) -> Read:
    text = f"a volume is {found['what']}, with nothing on one side of a colon: is a variable not set?"
    return _service_key(documents, "volumes", found["what"]), Diagnostic(text)


def _empty(found: re.Match[str], documents: Sequence[Document]) -> Read:
    return (), Diagnostic("is empty", write="services: ...")


COMPLAINTS: tuple[tuple[re.Pattern[str], Callable[[re.Match[str], Sequence[Document]], Read]], ...] = (
    (WRONG_KIND, _wrong_kind),
    (NOT_ALLOWED, _not_allowed),
    (REQUIRED, _required),
    (UNEXPECTED, _unexpected),
    (FILLING, _unfilled),
    (NO_IMAGE, _imageless),
    (UNDEFINED, _undefined),
    (DEPENDS, _depends),
    (NO_ENV_FILE, _no_env_file),
    (BAD_VOLUME, _bad_volume),
    (EMPTY, _empty),
)


def _service_key(documents: Sequence[Document], key: str, text: str) -> KeyPath:
    """The first key of this name, in a service, whose value holds the text."""
    for document in documents:
        for name, described in _mapping(document.content.get("services")).items():
            if text in str(_mapping(described).get(key, "")):
                return ("services", str(name), key)
    return ()


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _path(written: str) -> KeyPath:
    """The key in services.a.ports.0, services[a].ports[0] or services.a.environment.[0]."""
    if written == "(root)":
        return ()
    return tuple(part for part in re.split(r"[.\[\]]+", written) if part)


def _value(documents: Sequence[Document], key: KeyPath) -> Any:
    """The value at a key, of the last file that has it."""
    for document in reversed(documents):
        value: Any = document.content
        for part in key:
            if isinstance(value, list) and part.isdigit() and int(part) < len(value):
                value = value[int(part)]
            elif isinstance(value, Mapping) and part in value:
                value = value[part]
            else:
                break
        else:
            return value
    return None


def _of_wrong_kind(key: KeyPath, kind: str, value: Any) -> Diagnostic:
    if len(key) == 3 and key[2] == "gpus":
        text = "must be `all` or a list of {driver, count, device_ids}"
        return Diagnostic(text, write=service.gpus_meant(value))
    match kind:
        case "list" | "array":
            listed = value if isinstance(value, list) else [value]
            return Diagnostic("must be a list", value="" if value is None else as_yaml(listed))
        case "mapping" | "object":
            if isinstance(value, list) and value and all(isinstance(each, dict) for each in value):
                joined = {name: inner for each in value for name, inner in each.items()}
                return Diagnostic("must be a mapping, without dashes before its keys", value=as_yaml(joined))
            return Diagnostic("must be a mapping: keys, each with a value")
        case "string":
            if key[-1:] == ("restart",) and value is False:
                return Diagnostic("must be text", write='restart: "no"')
            return Diagnostic("must be text", value="" if value is None else f'"{as_yaml(value)}"')
    return Diagnostic("must be text or a list" if kind == "null" else f"must be a {kind}")


def _unknown(key: KeyPath, value: Any) -> Diagnostic:
    name = key[-1]
    if len(key) == 3 and key[0] == "services" and name in SERVICE_SETTINGS:
        text = "is a setting of anvil-mux: it goes into x-anvil"
        return Diagnostic(text, write=f"x-anvil: {{{name}: {as_yaml(value)}}}")
    if key == ("services", name):
        text = "is no name of a service: letters, digits, ., _ and - only"
        return Diagnostic(text, write=f"{re.sub('[^a-zA-Z0-9._-]+', '-', name)}: ...")
    known = TOP_LEVEL if len(key) == 1 else OF_SERVICE if len(key) == 3 and key[0] == "services" else ()
    near = settings.meant(name, known)
    text = "Compose knows no such key" + (f"; did you mean {near}?" if near else "")
    return Diagnostic(text, write=f"{near}: {as_yaml(value)}" if near else "")


def _not_filled(why: str) -> Diagnostic:
    if found := re.match(r"required variable (\w+) is missing a value(?:: (.*))?", why):
        text = f"the variable {found[1]} must be set" + (f": {found[2]}" if found[2] else "")
        return Diagnostic(text, write=f"{found[1]}=... in .env")
    return Diagnostic(why)


def _example(key: KeyPath) -> str:
    """A value for a key whose own was not understood; "" for most."""
    last = key[-1] if key else ""
    if last == "count":
        return "all"
    if last.endswith(("period", "interval", "timeout")):
        return "30s"
    return "16gb" if "mem" in last or "size" in last else ""


def _no_image(written: Any) -> Diagnostic:
    """The diagnostic about a service without an image; ``written``: the image in the file."""
    if isinstance(written, str) and (found := re.search(r"\$\{?(\w+)", written)):
        text = f"its image is {written}, and the variable {found[1]} is not set"
        return Diagnostic(text, write=f"{found[1]}=... in .env")
    text = "has neither an image nor a build context"
    said = f"{text}; if its file is laid over another one, name that one before it"
    return Diagnostic(text + ELSEWHERE, said=said, write="image: ...")
