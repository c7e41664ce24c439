"""A compose file that knows nothing of anvil-mux -> what becomes of it, as a file to lay over it.

Everything is read off the files themselves, without Docker. Where they refer to others (``extends``), these
are read if they are there; what is not known (a variable without a value) is a note, and never an error.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from anvil_mux.clock import count_in
from anvil_mux.config import interpolate, service
from anvil_mux.config.compose import laid_over
from anvil_mux.config.interpolate import Document, with_texts
from anvil_mux.config.kinds import KeyPath
from anvil_mux.config.machines import ALL
from anvil_mux.errors import ConfigError
from anvil_mux.importing import Note, ServiceKeys, Written
from anvil_mux.importing.roles import (
    Role,
    about_vram,
    find_role,
    flags,
    is_path,
    models,
    more_models,
    shown_name,
    unnamed,
)

PORT = 9292
BRIDGE = "172.17.0.1"
"""The address of the machine on Docker's own bridge, unless it was given another."""
HOST = "host.docker.internal"
KEY = "${ANVIL_API_KEY:-}"
NOT_KNOWN = ("",)
"""GPUs by an id that is not known, such as that of a variable that is not set."""
URL = re.compile(r"(https?://)([\w.-]+)(?::(\d+))?")


@dataclass(frozen=True, slots=True)
class Row:
    """A service, and what becomes of it."""

    service: str
    where: str
    """The file and line of the service."""
    what: str
    """The engine family, ``asks models``, or "" for one that is left alone."""
    model: str = ""
    port: str = ""
    gpus: str = ""
    why: str = ""

    def to_json(self) -> dict[str, str]:
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass
class _EngineFound:
    name: str
    described: ServiceKeys
    role: Role
    variables: dict[str, str]
    model: str = ""
    gpus: str | tuple[str, ...] | None = None
    said: ServiceKeys = field(default_factory=dict)
    """The ``x-anvil`` for it."""


class _NothingMustBeSet(interpolate.Scope):
    """A scope for which no variable must be set; ``problems`` collects what is said of those that must."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        super().__init__(environ)
        self.problems: list[str] = []

    def _braced(self, inside: str, key: KeyPath) -> str:
        try:
            return super()._braced(inside, key)
        except ValueError as error:
            self.problems.append(str(error))
            return ""


class Suggestion:
    """The text to add to the files for anvil-mux, and a row for each service that says what becomes of it."""

    def __init__(
        self, documents: Sequence[Document], environ: Mapping[str, str], gpus_here: Sequence[str]
    ) -> None:
        """``gpus_here``: the GPUs of this machine that are seen."""
        names = ", ".join(document.file.name for document in documents)
        self.written = Written("", f"What `anvil-mux check --suggest` makes of {names}.")
        self.rows: list[Row] = []
        self._documents = documents
        self._folder = documents[0].file.parent
        self._variables = interpolate.environment(self._folder, environ)
        self._scope = _NothingMustBeSet(self._variables)
        self._gpus_here = gpus_here
        self._services: dict[str, ServiceKeys] = {}
        """The services as they were read, by name."""
        self._rest: ServiceKeys = {}
        """The other keys of the files."""
        self._engines: dict[str, _EngineFound] = {}
        self._pulled: dict[str, None] = {}
        self._downloaders: set[str] = set()
        """The services that only download models."""
        self._readers: dict[str, list[str]] = {}
        """Service -> those that depend on it."""
        self._read()
        self._find_roles()
        self._left_alone()
        for engine in self._engines.values():
            self._describe(engine)
        if self._engines:
            self._settle_gpus()
            self._point_clients()
        order = [*self._services]
        self.rows.sort(key=lambda row: (not row.what, order.index(row.service)))

    def merged(self) -> str:
        """The files with the suggestion laid over them, as Compose would merge them."""
        over = {"x-anvil": self.written.settings, "services": self.written.services}
        found: ServiceKeys = laid_over({**self._rest, "services": self._services}, over)
        for described in found["services"].values():
            for key in (*interpolate.OTHER_FILES, "env_file"):
                described.pop(key, None)
        found.pop("include", None)
        return str(yaml.safe_dump(with_texts(found, _escaped), sort_keys=False))

    # Reading

    def _read(self) -> None:
        content: ServiceKeys = {}
        for document in self._documents:
            content = laid_over(content, self._filled(document.content, document))
        services = content.pop("services", None)
        self._rest = content
        if content.get("include"):
            self._note("include", "other files are not read here: name them on the command line too")
        for name, described in (services if isinstance(services, dict) else {}).items():
            if isinstance(described, dict):
                self._services[str(name)] = self._whole(str(name), described, services)
        for unset in self._scope.unset:
            self._note(unset, "the variable is not set, so its value is not known here")

    def _filled(self, value: Any, document: Document) -> Any:
        def fill(text: str, key: KeyPath) -> str:
            self._scope.problems.clear()
            filled = ""
            try:
                filled = self._scope.fill(text)
            except ValueError as error:
                self._scope.problems.append(str(error))
            for problem in self._scope.problems:
                self._note(document.where(key), problem)
            return filled

        return with_texts(value, fill)

    def _whole(self, name: str, described: ServiceKeys, services: Mapping[str, Any]) -> ServiceKeys:
        """The service with what it extends."""
        extends = described.get("extends")
        if not extends:
            return described
        about = extends if isinstance(extends, dict) else {"service": extends}
        wanted = str(about.get("service"))
        base = services.get(wanted)
        if file := about.get("file"):
            try:
                other = interpolate.read(self._folder / str(file))
                base = self._filled((other.content.get("services") or {}).get(wanted), other)
            except (ConfigError, AttributeError):
                base = None
                self._note("extends", f"{file} cannot be read, so its content is not known here", name)
        if not isinstance(base, dict):
            return described
        whole: ServiceKeys = laid_over(
            {key: each for key, each in base.items() if key != "extends"}, described
        )
        return whole

    # Roles

    def _find_roles(self) -> None:
        for name, described in self._services.items():
            self._note_readers(name, described)
            try:
                role = find_role(described, self._folder)
                variables = service.environment(described, self._variables)
                labelled = service.labels(described, "anvil.")
                service.profiles(described)
            except ValueError as error:
                self._row(name, "", why=str(error))
                continue
            self._pulled |= dict.fromkeys(role.pulls)
            if role.downloads:
                self._downloaders.add(name)
            if "x-anvil" in described or labelled:
                self._row(name, "", why="it has x-anvil already")
            elif role.engine:
                self._engines[name] = _EngineFound(name, described, role, variables)
            else:
                self._row(name, "", why=role.why)

    def _note_readers(self, name: str, described: ServiceKeys) -> None:
        needed = described.get("depends_on")
        for other in needed if isinstance(needed, (list, dict)) else ():
            self._readers.setdefault(str(other), []).append(name)

    def _left_alone(self) -> None:
        """Leave alone the services that take a port of another one beside which they may run."""
        taken: dict[int, _EngineFound] = {}
        for engine in self._engines.values():
            engine.gpus = _gpus(engine)
        for engine in sorted(self._engines.values(), key=lambda each: each.gpus is None):
            ports = {port.outside for port in _published(engine.described) if port.outside}
            before = next((taken[port] for port in ports if port in taken), None)
            if before and not _share(before.gpus, engine.gpus):
                why = f"it uses a port of {before.name}, so it seems to be an alternative to that"
                self._row(engine.name, "", why=why)
                del self._engines[engine.name]
                continue
            taken |= dict.fromkeys(ports, engine)

    # Engines

    def _describe(self, engine: _EngineFound) -> None:
        described, role = engine.described, engine.role
        found = models(described, role, engine.variables, [*self._pulled])
        names = [name for name in found if name]
        engine.model = shown_name(names[0], engine.name) if names else engine.name
        if names and is_path(names[0]) and names[0] not in service.served_model(described, role.engine):
            engine.said["served_model"] = names[0]
        engine.said = {"model": engine.model, **engine.said}
        others = names if role.engine in ("vllm", "sglang") else names[1:]  # their clients send the path too
        if aliases := [name for name in others if name != engine.model and role.engine != "ollama"]:
            engine.said["aliases"] = aliases
        if service.engine(described) != role.engine:
            engine.said["engine"] = role.engine
        port = self._settle_port(engine)
        self.written.services[engine.name] = {"x-anvil": engine.said}
        self._note_engine(engine, names)
        gpus = _shown(engine, ALL if self._takes_all(engine) else "none")
        self._row(engine.name, role.engine, model=engine.model, port=str(port), gpus=gpus, why=role.why)

    def _takes_all(self, engine: _EngineFound) -> bool:
        """Whether the engine is a process that says nothing of GPUs, on a machine that has some."""
        top = self._rest.get("x-anvil")
        top = top if isinstance(top, dict) else {}
        has_gpus = bool(self._gpus_here or top.get("gpus"))
        return top.get("runtime") == "process" and has_gpus and not service.hides_gpus(engine.variables)

    def _settle_port(self, engine: _EngineFound) -> int:
        """The port on which the engine listens; it is written where check would not find it."""
        shared = engine.described.get("network_mode") == "host"  # what it publishes is left out then
        inside = [] if shared else [port.inside for port in _published(engine.described)]
        known = _named_port(engine)
        try:
            found = service.listens_on(engine.described)
        except ValueError:
            found = None
        usual = engine.role.port
        declared = inside or ([found] if found and not shared else [])
        port = known or (usual if usual in declared or not declared else declared[0])
        as_known = usual if engine.role.engine != "openai" else None
        if port != (found or as_known) or len(set(inside)) > 1:
            engine.said["port"] = port
        if not known and usual not in inside and len(set(inside)) > 1:
            several = ", ".join(map(str, dict.fromkeys(inside)))
            self._note("port", f"it has several ({several}): write the one of its HTTP API", engine.name)
        return port

    def _note_engine(self, engine: _EngineFound, names: Sequence[str]) -> None:
        name, described = engine.name, engine.described
        if not names:
            self._note("model", unnamed(engine.role), name)
        elif others := more_models(engine.role):
            self._note(
                "model",
                f"this server has other models ({', '.join(others)}), which are not served: each needs a "
                "service of its own",
                name,
            )
        elif engine.role.engine == "ollama" and len(names) > 1:
            self._note(
                "model",
                f"this Ollama has other models ({', '.join(names[1:])}), which are not served: each needs a "
                "service, see `anvil-mux import ollama`",
                name,
            )
        if str(described.get("restart", "no")) in ("always", "unless-stopped"):
            self.written.services[name]["restart"] = "no"
            self._note(
                "restart", "otherwise Docker restarts it on a GPU that another model uses by then", name
            )
        if not service.profiles(described):
            self._give_profile(name)
        if hint := about_vram(engine.role, engine.model):
            self._note("vram", hint, name)

    def _give_profile(self, name: str) -> None:
        """Keep Compose from starting the engine, unless others depend on it: Compose refuses that."""
        depending = self._readers.get(name, ())
        downloaders = [each for each in depending if each in self._downloaders]
        if readers := [each for each in depending if each not in self._downloaders]:
            self._note(
                "depends_on",
                f"take {name} out of the depends_on of {', '.join(readers)}, which would start it beside "
                f"anvil-mux, and then add profiles: [llm] {' and to '.join(['here', *downloaders])}",
                name,
            )
            return
        self.written.services[name]["profiles"] = ["llm"]
        for each in downloaders:
            self.written.services[each] = {"profiles": ["llm"]}
            self._note(
                "profiles",
                f"before anvil-mux is started, `docker compose run --rm {each}` downloads the models; stop "
                f"{name} afterwards",
                each,
            )

    def _settle_gpus(self) -> None:
        """Name the GPUs at the top where check would ask which there are."""
        used = [engine.gpus for engine in self._engines.values()]
        for engine in self._engines.values():
            if engine.gpus is None and service.is_nvidia(engine.described):
                engine.said["gpus"] = ALL
                used.append(ALL)
                self._note(
                    "gpus",
                    "`runtime: nvidia` gives it all GPUs; name one, so that models can use the others",
                    engine.name,
                )
        if self._gpus_here or ALL not in used:
            return
        ids = {id for each in used if isinstance(each, tuple) for id in each if id}
        self.written.settings["gpus"] = sorted({"0", *ids}, key=lambda id: (len(id), id))
        self._note("gpus", "no GPU was found here: name those of the machine that will serve")

    # Clients

    def _point_clients(self) -> None:
        """Point whoever asks the engines at anvil-mux."""
        hosts = {name: name for name in self._engines}
        ports: dict[str, str] = {}
        for name, engine in self._engines.items():
            for key in ("container_name", "hostname"):
                hosts |= {str(engine.described[key]): name} if engine.described.get(key) else {}
            ports |= {str(port.outside): name for port in _published(engine.described) if port.outside}
        pointed = [
            name
            for name, described in self._services.items()
            if name not in self._engines
            and name not in self._downloaders
            and self._point(name, described, hosts, ports)
        ]
        if pointed:
            self.written.settings["listen"] = f"{BRIDGE}:{PORT}"
            self._note(
                "listen",
                f"{', '.join(pointed)} can reach anvil-mux at the address of Docker's bridge "
                "(`ip -4 addr show docker0`). Other containers can too, so use API keys: ANVIL_API_KEY=... "
                "in .env for the services, and the same key in ANVIL_API_KEYS for anvil-mux",
            )

    def _point(
        self, name: str, described: ServiceKeys, hosts: Mapping[str, str], ports: Mapping[str, str]
    ) -> bool:
        try:
            given = service.environment(described, self._variables)
            words = service.argv(described)
        except ValueError:
            return False
        shared = described.get("network_mode") == "host"
        base = f"http://{'127.0.0.1' if shared else HOST}:{PORT}"
        asked: dict[str, None] = {}

        def pointed(found: re.Match[str]) -> str:
            host, port = found[2], found[3] or ""
            local = host in ("localhost", "127.0.0.1", "0.0.0.0", HOST)
            engine = hosts.get(host) or (ports.get(port) if local else None)
            if engine is None or not self._speaks_openai(engine, found.string):
                return found[0]
            asked[engine] = None
            return base

        changed = {key: text for key, value in given.items() if (text := URL.sub(pointed, value)) != value}
        self._note_names(name, {key: value for key, value in given.items() if key not in changed}, hosts)
        self._note_command(name, words, hosts)
        image = str(described.get("image") or "").lower()
        if is_webui := bool(re.search(r"open-?web-?ui", image)):
            changed = _of_webui(changed, given, base)
            if image.endswith("ollama"):
                self._note(
                    "image",
                    "it has an Ollama of its own, which anvil-mux knows nothing of; the tag main has none",
                    name,
                )
        if not changed:
            return False
        keys = {key: KEY for key in ("OPENAI_API_KEY", "OPENAI_API_KEYS") if key in given and not is_webui}
        over: ServiceKeys = {"environment": changed | keys}
        if not shared and HOST not in str(described.get("extra_hosts")):
            over["extra_hosts"] = [f"{HOST}:host-gateway"]
        self.written.services[name] = over
        if any(
            text.startswith(base) and "OLLAMA" in key and "/v1" not in text and "/api" not in text
            for key, text in changed.items()
        ):
            self._note("environment", "if you use API keys, give it one for its Ollama server too", name)
        self.rows[:] = [row for row in self.rows if row.service != name]
        why = (
            f"it uses {', '.join(asked)}: now anvil-mux" if asked else "Open WebUI: a client of anvil-mux now"
        )
        self._row(name, "asks models", why=why)
        return True

    def _speaks_openai(self, engine: str, url: str) -> bool:
        """Whether whoever has the URL speaks an API that anvil-mux has; servers have their own too."""
        return self._engines[engine].role.engine != "openai" or "/v1" in url

    def _note_names(self, name: str, given: Mapping[str, str], hosts: Mapping[str, str]) -> None:
        """Note the variables of a service that name an engine in a way that cannot be pointed elsewhere."""
        for key, value in given.items():
            named = next(
                (host for host in hosts if re.search(rf"(?<![\w.-]){re.escape(host)}(?![\w.-])", value)), ""
            )
            if named and (value == named or "://" in value):
                self._note_named(f"services.{name}.environment.{key}", named, hosts[named])

    def _note_command(self, name: str, words: Sequence[str], hosts: Mapping[str, str]) -> None:
        """Note a command with the address of an engine."""
        named = [found[2] for word in words for found in URL.finditer(word)]
        for host in dict.fromkeys(named):
            if host in hosts:
                self._note_named(f"services.{name}.command", host, hosts[host])

    def _note_named(self, about: str, named: str, engine: str) -> None:
        self._note(
            about,
            f"mentions {named} in a way that is not converted: point it at anvil-mux by hand if it uses "
            f"OpenAI's or Ollama's API, otherwise leave {engine} out",
        )

    # Telling

    def _row(self, name: str, what: str, **more: str) -> None:
        self.rows.append(Row(name, self._where(name), what, **more))

    def _where(self, name: str) -> str:
        for document in reversed(self._documents):
            if ("services", name) in document.lines:
                return document.where(("services", name)).partition(": ")[0]
        return ""

    def _note(self, about: str, text: str, name: str = "") -> None:
        note = Note(self._where(name) or str(self._documents[0].file), about, text, name)
        if note not in self.written.notes:
            self.written.notes.append(note)


def _escaped(text: str, _key: KeyPath) -> str:
    """The text with each $ standing for itself, but for what the suggestion adds."""
    return re.sub(r"\$(?!\{ANVIL_API_KEY)", "$$$$", text)


def _of_webui(changed: Mapping[str, str], given: Mapping[str, str], base: str) -> dict[str, str]:
    """The variables of Open WebUI: one connection of OpenAI's kind, and none to an Ollama."""
    found = {key: text for key, text in changed.items() if "OLLAMA" not in key and "OPENAI_API" not in key}
    found |= {"OPENAI_API_BASE_URL": f"{base}/v1", "OPENAI_API_KEY": KEY, "ENABLE_OLLAMA_API": "false"}
    if "OPENAI_API_BASE_URLS" in given:
        found["OPENAI_API_BASE_URLS"] = f"{base}/v1"
        found["OPENAI_API_KEYS"] = KEY
    return found


def _published(described: ServiceKeys) -> list[service.Port]:
    try:
        return service.published(described)
    except ValueError:
        return []


def _gpus(engine: _EngineFound) -> str | tuple[str, ...] | None:
    try:
        return service.gpus(engine.described, engine.variables)
    except ValueError:
        return NOT_KNOWN


def _named_port(engine: _EngineFound) -> int | None:
    """The port that the engine's command or environment names."""
    named = flags(engine.role.words, "--port")
    named += [engine.variables[key] for key in ("LLAMA_ARG_PORT", "PORT") if engine.variables.get(key)]
    return next((port for each in named if (port := count_in(each)) is not None), None)


def _share(one: str | tuple[str, ...] | None, other: str | tuple[str, ...] | None) -> bool:
    """Whether two engines have a GPU in common, so that one of them is loaded at a time."""
    if not one or not other:
        return False
    return ALL in (one, other) or bool(set(one) & set(other))


def _shown(engine: _EngineFound, unsaid: str) -> str:
    """The GPUs of an engine; ``unsaid``: those that it has where nothing says which."""
    if engine.gpus is not None:
        return engine.gpus if isinstance(engine.gpus, str) else ",".join(id or "?" for id in engine.gpus)
    if service.is_nvidia(engine.described):
        return ALL
    given = service.others_gpus(engine.described, engine.variables)
    return f"{'/'.join(given.vendors)}: {', '.join(given.ids) or 'all'}" if given else unsaid
