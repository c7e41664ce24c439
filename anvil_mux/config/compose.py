"""Compose files: read into one mapping, through the Compose program or without it, and written, for services
that are described anew.

``docker compose config`` knows every form that Compose knows, so it is asked where it can be; it needs no
Docker Engine. Where it is missing interpolate.py reads one file, and for local processes several. Either way
the variables are in, and what the file left open (unset variables) is a warning.

The ``x-anvil`` of several files is merged here, since releases of Compose differ in how they merge
extensions: up to 2.34 the last file's replaces all, from then on mappings are merged and lists appended. Each
setting of an ``x-anvil`` is, whole, that of the last file that has it. Before a file come those that it
includes; before a service comes the one that it extends. The rest is merged as Compose does.

Docker gives a container the GPUs that its service reserves, and Compose gives all containers of a service the
same ones. So each of several candidates on a host, and each on another host, becomes a service of its own,
named like its backend, in one more compose file; there too a service whose only candidate has other GPUs than
it reserves is overridden under its own name: mappings in, text out.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from anvil_mux.command import Done, run
from anvil_mux.config import grants, interpolate, service
from anvil_mux.config.config import LABEL
from anvil_mux.config.interpolate import Document, Scope, with_texts
from anvil_mux.config.kinds import Diagnostic, KeyPath, Position, advice
from anvil_mux.config.reading import OURS, KeyInFile, unknown_keys
from anvil_mux.config.service import RawService, named_values
from anvil_mux.errors import ConfigError

FILE_NAMES = ("compose.yaml", "compose.yml", "docker-compose.yml", "docker-compose.yaml")
OVERRIDE_NAMES = (
    "compose.override.yml",
    "compose.override.yaml",
    "docker-compose.override.yml",
    "docker-compose.override.yaml",
)
COMPOSE_TIMEOUT = 60.0
OF_PROCESSES = ("HOST", "PORT")
"""Variables that the command of a local process is given when it starts, unless they are set before."""
SHARED = ("networks", "volumes", "secrets", "configs")
"""The things beside services that services use."""


@dataclass(frozen=True, slots=True)
class Content:
    """The files' content, taken together."""

    services: Any
    settings: Any
    """The top-level ``x-anvil``."""
    project: str
    warnings: tuple[str, ...]
    plain: bool
    """Whether it was read without the Compose program."""
    shared: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """``SHARED`` -> name -> description."""
    places: Mapping[KeyPath, KeyInFile] = field(default_factory=dict)
    """The key of each setting of ``x-anvil`` -> the file whose value counts, and its key there."""
    resolved: str = field(default="", repr=False)
    """All of it as one compose file without variables; "" if it was read without the Compose program."""
    variables: Mapping[str, str] = field(default_factory=dict, repr=False)
    """The variables from which Compose takes secrets and configs -> their values."""


Compose = Callable[[Sequence[str], Mapping[str, str]], Done | None]
"""Runs a command; None where there is no such program."""


def find_files(folder: Path, environ: Mapping[str, str]) -> tuple[Path, ...]:
    """The compose files that Compose itself would take in ``folder``; ConfigError."""
    folder = folder.absolute()
    variables = interpolate.environment(folder, environ)
    if named := variables.get("COMPOSE_FILE"):
        separator = variables.get("COMPOSE_PATH_SEPARATOR") or os.pathsep
        return tuple(folder / file for file in named.split(separator))
    for place in (folder, *folder.parents):
        if found := [place / name for name in FILE_NAMES if (place / name).is_file()]:
            overrides = [place / name for name in OVERRIDE_NAMES if (place / name).is_file()]
            return (found[0], *overrides[:1])
    raise ConfigError([f"{folder}: no compose.yaml here or above; name a compose file on the command line"])


def combine(
    documents: Sequence[Document],
    environ: Mapping[str, str],
    compose: Compose | None = None,
    *,
    process: bool = False,
) -> Content:
    """The content of the files, through ``compose`` if that is given and there is such a program.

    ``process``: the services are local processes, of which Compose knows nothing.
    """
    if compose is not None and not process:
        answer = compose(compose_config([document.file for document in documents]), environ)
        if answer is not None:
            return _composed(documents, answer, environ)
    if len(documents) > 1 and not process:
        text = f"{documents[1].file}: a second file {interpolate.NEED_COMPOSE}"
        raise ConfigError([Diagnostic(text, page="running.md#docker-or-podman")])
    variables = interpolate.environment(documents[0].file.parent, environ)
    scope = Scope(variables, OF_PROCESSES if process else ())
    content: Any = {}
    warnings: list[str] = []
    for document in documents:
        before = {*scope.unset}
        content = laid_over(content, interpolate.resolve(document, scope))
        warnings += [_unset(document, *each) for each in scope.unset.items() if each[0] not in before]
    project = _project(documents[0].file, content, environ)
    return _content(content, project, warnings, Layers(documents, variables), plain=True)


def compose_config(files: Iterable[Path]) -> list[str]:
    # YAML, because its JSON leaves out the x- keys of services.
    words = [word for file in files for word in ("-f", str(file))]
    return ["docker", "compose", "--ansi", "never", *words, "--profile", "*", "config"]


def run_compose(argv: Sequence[str], environ: Mapping[str, str]) -> Done | None:
    """Run the Compose program; None where there is none."""
    try:
        done = run(argv, COMPOSE_TIMEOUT, env=environ)
    except OSError:
        return None
    except subprocess.TimeoutExpired:
        raise ConfigError([f"`{' '.join(argv)}` did not end within {COMPOSE_TIMEOUT:g} s"]) from None
    if done.code and re.search(r"is not a docker command|unknown (shorthand )?(flag|command)", done.err):
        return None
    return done


def _composed(documents: Sequence[Document], answer: Done, environ: Mapping[str, str]) -> Content:
    said, warnings = [], []
    for line in answer.err.splitlines():
        if warning := re.search(r'level=warning msg="(.*)"\s*$', line):
            warnings.append(_of_compose(documents, warning[1].replace('\\"', '"')))
        elif line.strip():
            said.append(line.strip())
    if answer.code:
        why = " ".join(said) or f"exit status {answer.code}"
        own = [*unknown_keys(documents), *_without_image(documents)]
        raise ConfigError([*warnings, _of_compose(documents, why), *own])
    # It prints every $ that stands for itself as $$.
    content = yaml.load(answer.out.replace("$$", "$"), interpolate.Loader) or {}
    try:
        variables = interpolate.environment(documents[0].file.parent, environ)
    except ConfigError:
        variables = dict(environ)  # Compose has read the file, whatever we make of it
    resolved = resolved_text(content, [document.file for document in documents])
    layers = Layers(documents, variables)
    read = _content(content, content.get("name", ""), warnings, layers, plain=False)
    return replace(read, resolved=resolved, variables=_kept_variables(content, variables))


def resolved_text(content: Mapping[str, Any], files: Iterable[Path]) -> str:
    """Return content that Compose has read as one compose file, without what is only for anvil-mux.

    Names that Compose has made of the project's are left to it, since it may be given another project.
    """
    project = content.get("name", "")
    made = {key: value for key, value in content.items() if key != "name" and not key.startswith("x-")}
    for kind in SHARED:
        if isinstance(shared := made.get(kind), dict):
            made[kind] = {name: unnamed(name, about, project) for name, about in shared.items()}
    if isinstance(services := made.get("services"), dict):
        made["services"] = {
            name: {key: value for key, value in mapping(described).items() if key != OURS}
            for name, described in services.items()
        }
    return _json({"x-files": [os.path.abspath(file) for file in files], **made})


def unnamed(name: str, about: Any, project: str) -> Any:
    """Return a volume, network, ... without the name that Compose has made of the project's."""
    if not isinstance(about, dict) or about.get("external"):
        return about
    return {key: value for key, value in about.items() if (key, value) != ("name", f"{project}_{name}")}


def _kept_variables(content: Mapping[str, Any], variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that secrets and configs are, as far as they are set."""
    described = [about for kind in ("secrets", "configs") for about in mapping(content.get(kind)).values()]
    names = [str(mapping(about).get("environment") or "") for about in described]
    return {name: variables[name] for name in names if name in variables}


def _content(
    content: dict[str, Any], project: str, warnings: Iterable[str], layers: Layers, *, plain: bool
) -> Content:
    places: dict[KeyPath, KeyInFile] = {}

    def lay(holder: Any, key: KeyPath, found: Sequence[Layer]) -> None:
        """Merge what several files have; what one file has is right as it was read."""
        if not plain and len(found) > 1:
            holder[OURS] = merged(found)
        counting = origins(found).items()
        places.update({(*key, OURS, n): (each.source.document, (*each.key, n)) for n, each in counting})

    lay(content, (), layers.of_all())
    for name, described in mapping(content.get("services")).items():
        own: list[Layer] = []
        with suppress(ConfigError, ValueError):  # what stands at an address Compose alone has read
            own = layers.of_service(name)
        lay(described, ("services", name), own)
    shared = {kind: found for kind in SHARED if isinstance(found := content.get(kind), dict)}
    services, settings = content.get("services"), content.get(OURS)
    return Content(services, settings, project, tuple(warnings), plain=plain, shared=shared, places=places)


def _of_compose(documents: Sequence[Document], text: str) -> Diagnostic:
    """A problem or warning of the Compose program, in its own words: it says itself where, if it knows."""
    first = documents[0].file
    files = " and ".join([str(first), *(each.file.name for each in documents[1:])])
    return Diagnostic(f"{files}: docker compose config: {text}", place=Position(str(first)))


def _without_image(documents: Sequence[Document]) -> Iterator[Diagnostic]:
    """A problem for each server elsewhere without what Compose wants of a service."""
    written = [mapping(each.content.get("services")) for each in documents]
    for document, services in zip(documents, written, strict=True):
        for name, described in services.items():
            keys = {key for each in written for key in mapping(each.get(name))}
            ours = mapping(mapping(described).get(OURS))
            if "url" in ours and not keys & {"image", "build", "extends"}:
                text = "Compose wants `image: scratch` and `profiles` also of a server elsewhere (url)"
                missing = Diagnostic(text, write="image: scratch", page="elsewhere.md")
                yield document.diagnostic(("services", name), missing)


def _unset(document: Document, name: str, key: KeyPath) -> Diagnostic:
    """A warning about a variable that is not set, at the first line that uses it."""
    said = f"the variable {name} is not set, so nothing stands in its place"
    more = f"set it, here or in .env, or write ${{{name}:-default}}"
    return document.diagnostic(key, advice(said, f"{name}=... in .env", more))


def _project(file: Path, content: Mapping[str, Any], environ: Mapping[str, str]) -> str:
    """The project's name as Compose finds it."""
    folder = Path(os.path.abspath(file)).parent
    chosen = interpolate.environment(folder, environ).get("COMPOSE_PROJECT_NAME")
    name = chosen or content.get("name") or folder.name
    return re.sub(r"[^a-z0-9_-]", "", str(name).lower()).lstrip("_-")


# The x-anvil of several files

RESET, OVERRIDE = "!reset", "!override"
"""The tags of Compose by which a file takes away what stands in those before it."""


class Source(NamedTuple):
    """A file, with what its content refers to."""

    document: Document
    folder: Path
    """The folder at which its paths begin."""
    variables: Mapping[str, str]


class Layer(NamedTuple):
    """The ``x-anvil`` that one file has for the whole, or for a service."""

    source: Source
    key: KeyPath

    def settings(self) -> Any:
        """The content as it is written; a setting that is reset has no value."""
        value: Any = self.source.document.content
        for part in self.key:
            value = value[part]
        tags = dict(self.source.document.tags)
        if isinstance(value, dict):
            return {n: None if tags.get((*self.key, n)) == RESET else each for n, each in value.items()}
        return value

    def filled(self, name: str) -> Any:
        """The value of a setting with its variables replaced."""
        value = self.settings()[name]
        scope = Scope(self.source.variables)
        return interpolate.filled(self.source.document, value, (*self.key, name), scope)


class Layers:
    """The ``x-anvil`` of all files, each with its place; ``variables``: those of the project."""

    def __init__(self, documents: Sequence[Document], variables: Mapping[str, str]) -> None:
        folder = documents[0].file.parent
        self._sources = [Source(document, folder, variables) for document in documents]
        self._read: dict[Path, Document] = {}
        self._inner: dict[Path, list[Source]] = {}
        """File -> those that it includes."""

    def of_all(self) -> list[Layer]:
        """The ``x-anvil`` at the top level of each file; Compose takes none from an included one."""
        found: list[Layer] = []
        for source in self._sources:
            _add(found, source, (OURS,), source.document.content)
        return found

    def of_service(self, name: str) -> list[Layer]:
        """The ``x-anvil`` of a service in each file; ConfigError if one of them cannot be read."""
        found: list[Layer] = []
        for source in self._sources:
            self._take(found, source, name)
        return found

    def _take(self, found: list[Layer], source: Source, name: str) -> None:
        file = source.document.file
        if file not in self._inner:
            self._inner[file] = [*self._included(source)]
        for inner in self._inner[file]:
            self._take(found, inner, name)
        self._take_service(found, source, name)

    def _take_service(self, found: list[Layer], source: Source, name: str) -> None:
        document, folder, variables = source
        key = ("services", name)
        tag = dict(document.tags).get(key)
        if tag in (RESET, OVERRIDE):
            found.clear()
        if tag == RESET:
            return
        described = mapping(mapping(document.content.get("services")).get(name))
        if extends := described.get("extends"):
            about = extends if isinstance(extends, dict) else {"service": extends}
            scope, base = Scope(variables), source
            if file := about.get("file"):
                other = self._document(folder / scope.fill(str(file)))
                base = Source(other, other.file.parent, variables)
            self._take_service(found, base, scope.fill(str(about.get("service"))))
        _add(found, source, (*key, OURS), described)

    def _included(self, source: Source) -> Iterator[Source]:
        document, folder, variables = source
        scope = Scope(variables)
        for each in listed(document.content.get("include")):
            about = each if isinstance(each, dict) else {"path": each}
            files = [folder / scope.fill(str(path)) for path in listed(about.get("path"))]
            inner = folder / scope.fill(str(about.get("project_directory") or files[0].parent))
            own = [folder / scope.fill(str(file)) for file in listed(about.get("env_file"))]
            known = interpolate.variables_of(own or [inner / interpolate.ENV_FILE], variables)
            for file in files:
                yield Source(self._document(file), inner, known)

    def _document(self, file: Path) -> Document:
        if file not in self._read:
            self._read[file] = interpolate.read(file)
        return self._read[file]


def _add(found: list[Layer], source: Source, key: KeyPath, holder: Mapping[str, Any]) -> None:
    tag = dict(source.document.tags).get(key)
    if tag in (RESET, OVERRIDE):
        found.clear()
    if holder.get(OURS) is not None and tag != RESET:
        found.append(Layer(source, key))


def origins(layers: Sequence[Layer]) -> dict[str, Layer]:
    """Setting -> the layer whose value counts."""
    said = [(layer, layer.settings()) for layer in layers]
    return {name: layer for layer, settings in said if isinstance(settings, dict) for name in settings}


def merged(layers: Sequence[Layer]) -> Any:
    """The settings of all layers; what is no mapping, and so an error, is that of the last one."""
    last = layers[-1].settings()
    if not isinstance(last, dict):
        return last
    return {name: layer.filled(name) for name, layer in origins(layers).items()}


def laid_over(one: Any, other: Any) -> Any:
    """Merge as Compose does: mappings key by key, lists one after the other, the other's plain values win."""
    if other is None:
        return one
    if isinstance(one, dict) and isinstance(other, dict):
        found = dict(one)
        for key, value in other.items():
            if key == OURS and isinstance(value, dict):
                found[key] = {**mapping(one.get(key)), **value}
            else:
                replaces = key not in one or key in ("command", "entrypoint")
                found[key] = value if replaces else laid_over(one[key], value)
        return found
    if isinstance(one, list) and isinstance(other, dict):
        return named_values(one) | other
    if isinstance(one, dict) and isinstance(other, list):
        return laid_over(one, named_values(other))
    if isinstance(one, list) and isinstance(other, list):
        return [*one, *(each for each in other if each not in one)]
    return other


def mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def listed(value: Any) -> list[Any]:
    """A list, or the one value that may stand for a list of it."""
    return value if isinstance(value, list) else [] if value is None else [value]


# Services described anew

HERE = "127.0.0.1"
"""The address of engines on the machine that anvil-mux runs on."""
UNPRINTABLE = re.compile(r"[\x7f-\x9f\ud800-\udfff\ufeff\ufffe\uffff]")
"""The characters for which JSON is no YAML: that has them in an escaped form only."""
LEFT_OUT = ("container_name", "scale", "env_file")
"""Keys that cannot be those of several services, or whose content stands elsewhere in the description."""
LEFT_HERE = ("build", "depends_on", "links", "external_links", "volumes_from")
"""Keys that mean something on the machine of the compose file alone."""
SHARES = ("network_mode", "ipc", "pid")
"""Keys by which a service may share another one's namespace."""


class Place(NamedTuple):
    """The part of a candidate that decides how its service is described."""

    gpus: tuple[str, ...]
    port: int | None
    """The port of its engine; None: not known."""
    alone: bool
    """Whether no other candidate of the service is on the host, so that it may have fixed ports there."""
    elsewhere: bool
    """Whether the host is another than that of the compose file."""
    files: tuple[str, ...] = ()
    """The device file of each of the GPUs; "" where it has none, or that is not known."""


def placed_service(
    described: RawService, place: Place, *, variables: Mapping[str, str], image: str
) -> dict[str, Any]:
    """The service for one place; the address at which its port is published is left open: ``at``.

    ``variables``: its environment, resolved. ``image``: the image of a service that is built.
    """
    left_out = (*LEFT_OUT, *(LEFT_HERE if place.elsewhere else ()))
    made = {n: value for n, value in described.items() if n not in left_out and not str(n).startswith("x-")}
    made.setdefault("image", image)
    made["environment"] = dict(variables)
    if "labels" in made:
        theirs = service.labels(described, "")
        made["labels"] = {name: text for name, text in theirs.items() if not name.startswith(LABEL)}
    if isinstance(deploy := made.get("deploy"), Mapping):
        made["deploy"] = {name: value for name, value in deploy.items() if name != "replicas"}
    if place.gpus and grants.are_ids(place.gpus):
        grants.to_container(made, described, place.gpus, place.files)
    if str(described.get("network_mode", "")) != "host":
        made["ports"] = [*_ports(described, place)]
    return made


def given_service(
    described: RawService, gpus: Sequence[str], files: Sequence[str], variables: Mapping[str, str]
) -> dict[str, Any]:
    """Return the service as its files have it, but for the GPUs that it is given."""
    made = {**described, "environment": dict(variables)}
    grants.to_container(made, described, gpus, files)
    if made["environment"] == variables:
        made |= {"environment": described.get("environment")}
    return made


def at(address: str, made: RawService) -> dict[str, Any]:
    """The description with the address of its host, at which its engine is reached."""
    ports = [
        {**port, "host_ip": address} if isinstance(port, dict) and port.get("host_ip") is None else port
        for port in made.get("ports", ())
    ]
    return {**made, **({"ports": ports} if ports else {})}


def cannot_leave(described: RawService, port: int | None) -> Iterator[tuple[str, str]]:
    """Why a service cannot run on another host: (key, reason)."""
    for key in SHARES:
        if str(described.get(key) or "").startswith(("service:", "container:")):
            yield key, "shares what only the host of the compose file has, and x-anvil.hosts names others"
    if port is None and str(described.get("network_mode", "")) != "host":
        yield "x-anvil", "port is needed, since its engine is reached by it on other hosts: {port: ...}"


def caveats(described: RawService, image: str) -> Iterator[str]:
    """Warnings of what a service leaves behind that runs on another host."""
    if needed := [*_names(described.get("depends_on")), *_names(described.get("links"))]:
        yield f"depends on {', '.join(dict.fromkeys(needed))}, which other hosts are not given"
    if "build" in described:
        yield f"is built, and other hosts need its image {image}: push it, and name it with `image:`"


# Its ports


def _ports(described: RawService, place: Place) -> Iterator[Any]:
    """The published ports; ``host_ip`` None: the host's address, as the engine's port has it."""
    inside = set()
    for written in described.get("ports") or ():
        found = service.published({"ports": [written]})
        if not found and place.alone:
            yield written
        for port in found:
            inside.add(port.inside)
            address = None if port.inside == place.port else port.address
            made = {"target": port.inside, "protocol": "tcp", "host_ip": address}
            yield {**made, **({"published": str(port.outside)} if port.outside and place.alone else {})}
    if place.elsewhere and place.port and place.port not in inside:
        yield {"target": place.port, "protocol": "tcp", "host_ip": None}


# The file that it is written to


class GeneratedFiles:
    """The compose files of services that are described anew, by host.

    ``content``: what the files say; ``folder``: where paths begin that Compose has not made absolute.
    """

    def __init__(self, content: Content, folder: Path) -> None:
        self._content = content
        self._folder = folder
        self._services: dict[str, dict[str, RawService]] = {}
        self._overrides: dict[str, str] = {}

    def add(self, host: str, name: str, made: RawService) -> None:
        self._services.setdefault(host, {})[name] = self._rooted(made)

    def override(self, name: str, described: RawService, made: RawService) -> None:
        """Have a service of the files be as it is ``made``, on this machine, under its own name."""
        changed = {key: value for key, value in made.items() if value != described.get(key)}
        words = [f"{json.dumps(key)}: !override {_json(value)}" for key, value in changed.items()]
        words += [f"{json.dumps(key)}: !reset null" for key in described if key not in made]
        if "environment" in changed:
            words.append('"env_file": !reset null')  # its variables are in the environment by now
        self._overrides[name] = f"{json.dumps(name)}: {{{', '.join(words)}}}"
        self._services.setdefault("", {})

    def texts(self) -> dict[str, str]:
        """Host -> the text of its file."""
        return {host: self._text(host, services) for host, services in self._services.items()}

    def _text(self, host: str, services: Mapping[str, RawService]) -> str:
        shared = {
            kind: found
            for kind, known in self._content.shared.items()
            if (found := {name: self._own(name, known[name]) for name in _used(kind, services, known)})
        }
        overrides = [] if host else [*self._overrides.values()]
        described = [f"{json.dumps(name)}: {_json(made)}" for name, made in services.items()]
        keys = [f'"services": {{{", ".join((*described, *overrides))}}}']
        keys += [f"{json.dumps(kind)}: {_json(found)}" for kind, found in shared.items()]
        return f"{{{', '.join(keys)}}}"

    def _own(self, name: str, about: Any) -> Any:
        """A volume, network, ...: without the name that Compose has made of the project's, and rooted."""
        kept = unnamed(name, about, self._content.project)
        if not isinstance(kept, dict) or not isinstance(kept.get("file"), str):
            return kept
        return {**kept, "file": self._path(kept["file"])}

    def _rooted(self, made: RawService) -> RawService:
        """The service with absolute paths, as the Compose program gives it."""
        volumes = made.get("volumes")
        if not self._content.plain or not isinstance(volumes, list):
            return made
        return {**made, "volumes": [self._volume(each) for each in volumes]}

    def _volume(self, written: Any) -> Any:
        if isinstance(written, dict):
            bound = written.get("type") == "bind" and isinstance(written.get("source"), str)
            return {**written, "source": self._path(written["source"])} if bound else written
        source, colon, rest = str(written).partition(":")
        return f"{self._path(source)}:{rest}" if colon and source.startswith((".", "~")) else written

    def _path(self, written: str) -> str:
        return os.path.abspath(self._folder / os.path.expanduser(written))


def _json(value: Any) -> str:
    """Return a value as JSON that is YAML too, with its variables' signs escaped."""
    text = json.dumps(with_texts(value, escaped), ensure_ascii=False)
    return UNPRINTABLE.sub(lambda each: f"\\u{ord(each[0]):04x}", text)


def _used(kind: str, services: Mapping[str, RawService], known: Mapping[str, Any]) -> list[str]:
    """The volumes, networks, secrets or configs that the services use, of those that are described."""
    usual = ["default"] if kind == "networks" else []
    names = {name for made in services.values() for name in [*_names(made.get(kind))] or usual}
    return [name for name in known if name in names]


def _names(written: Any) -> Iterator[str]:
    """The names in one of Compose's lists of things that stand elsewhere: short, long, or a mapping."""
    for each in written or ():
        yield str(each.get("source", "")) if isinstance(each, dict) else str(each).partition(":")[0]


def escaped(text: str, _key: KeyPath = ()) -> str:
    """The text as a compose file has it, where a single $ begins a variable."""
    return text.replace("$", "$$")
