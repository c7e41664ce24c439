"""The configuration file of llama-swap -> a compose file.

A model becomes a service: a local process, or a container where every model of the file is started by a
`docker run` of which each option has a counterpart. swap_models.py has the keys of models; here ``TOP`` says
what becomes of the others, and ``TOP_NOTES`` why some become nothing. docs/migrating.md has all of that as a
table. llama-swap does not look at keys that it does not know, so here they are notes too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import combinations
from typing import Any, NamedTuple

from anvil_mux.config.interpolate import Document
from anvil_mux.config.kinds import KeyPath
from anvil_mux.config.values import UNTOUCHED
from anvil_mux.errors import ConfigError
from anvil_mux.importing import Note, Written, swap_models
from anvil_mux.importing.swap_models import (
    PORT,
    UNKNOWN,
    Macros,
    SwapModel,
    listed,
    plain,
    texts,
    uncommented,
    variable,
    written,
)

NAME = "from-llama-swap"
ORIGIN = (
    "Made by `anvil-mux import llama-swap`; docs/migrating.md says what became of each key. llama-swap lets "
    "running requests finish, however long they take; here a swap aborts them after drain_timeout."
)
FIRST_PORT = 5800
PRIORITIES = (-100, 100)
CUDA = "CUDA_VISIBLE_DEVICES"
MATRIX = (
    "is left out, and models take turns as without it: write the GPUs that each service needs, and its "
    "`vram`, and what fits together stays loaded (docs/gpus.md)."
)
NOTHING: tuple[object, ...] = (None, "", False, [], {})
"""The values of keys that say nothing."""
TwoModels = frozenset[str]
"""Two of the models, in no order."""


class SwapGroup(NamedTuple):
    """A group, as llama-swap has it."""

    members: tuple[str, ...]
    swap: bool = True
    """Whether its members take turns among themselves."""
    exclusive: bool = True
    """Whether a load of one of them evicts the members of other groups."""
    persistent: bool = False
    """Whether other groups leave its members alone."""


def translate(document: Document, *, gpus: Sequence[str] = ()) -> Written:
    """Return the compose file for llama-swap's ``document``; ConfigError names what is wrong with it.

    ``gpus``: the GPUs of this machine.
    """
    return _SwapFile(document, gpus).written()


class _SwapFile:
    """One file; problems are collected, and reported together."""

    def __init__(self, document: Document, gpus: Sequence[str]) -> None:
        self._document = document
        self._here = gpus
        self._problems: list[str] = []
        self._names: dict[str, str] = {}
        self.made = Written(NAME, ORIGIN)
        self.top: dict[str, Any] = {}
        """Key -> value of the whole file, its macros replaced."""
        self.models: dict[str, SwapModel] = {}

    def written(self) -> Written:
        content = self._document.content
        common = self._mapping(content.get("macros"), ("macros",))
        for key, value in content.items():
            if key not in ("macros", "models"):
                self.top[key] = self._fill(Macros(common, {}, ""), value, (key,))
        models = self._mapping(content.get("models"), ("models",))
        for name, said in models.items():
            self._read_model(name, self._mapping(said, ("models", name)), common)
        if not models:
            self._problem(("models",) if "models" in content else (), "the file has no models")
        self._raise()
        self._take_turns()
        for key, value in self.top.items():
            self._take(key, value)
        self._raise()
        self._write()
        return self.made

    def named(self, name: str) -> SwapModel | None:
        """The model of the file that a name is for: its id, an alias, or one with parameters of its own."""
        return next((model for model in self.models.values() if name in model.names), None)

    # What is wrong

    def note(self, key: KeyPath, text: str, model: str = "") -> None:
        about = ".".join(key[2:] if model else key)
        self.made.notes.append(Note(self._document.where(key), about, text, self._names.get(model, "")))

    def _problem(self, key: KeyPath, text: str) -> None:
        self._problems.append(f"{self._document.where(key)}: {text}")

    def _raise(self) -> None:
        if self._problems:
            raise ConfigError(self._problems)

    def _mapping(self, value: Any, key: KeyPath) -> dict[str, Any]:
        if value is not None and not isinstance(value, dict):
            self._problem(key, f"must hold keys, not {value!r}")
        return value if isinstance(value, dict) else {}

    @contextmanager
    def _problems_at(self, key: KeyPath) -> Iterator[None]:
        """Make a problem with what stands at a key of the error about it."""
        try:
            yield
        except ValueError as error:
            self._problem(key, str(error))

    def _fill(self, filler: Macros, value: Any, key: KeyPath) -> Any:
        with self._problems_at(key):
            return filler.fill(value)

    # Models

    def _read_model(self, name: str, said: Mapping[str, Any], common: Mapping[str, Any]) -> None:
        key = ("models", name)
        own = self._mapping(said.get("macros"), (*key, "macros"))
        filler = Macros(common, own, name)
        filled = {each: self._fill(filler, _bare(each, value), (*key, each)) for each, value in said.items()}
        filled.pop("macros", None)
        self._names[name] = service = self.made.free_name(name)
        self.made.services[service] = {}

        def note(each: str, text: str) -> None:
            self.note((*key, each) if each else key, text, name)

        model = SwapModel(name, filled, common=self.top, note=note)
        self.models[name] = model
        if not filled.get("cmd"):
            self._problem(key, "has no cmd")
        for each in dict.fromkeys((*swap_models.KEYS, *filled)):
            with self._problems_at((*key, each)):
                self._read_key(model, each, filled.get(each))

    def _read_key(self, model: SwapModel, key: str, value: Any) -> None:
        if key in swap_models.KEYS:
            swap_models.KEYS[key](model, value)
        elif value not in NOTHING:
            model.note(key, swap_models.NOTES.get(key, UNKNOWN))

    # What is resident together

    def _take_turns(self) -> None:
        key, rules = self._rules()
        models = list(self.models)
        is_matrix = key[-1:] == ("matrix",)
        if is_matrix and len(models) > 1:
            self.note(key, MATRIX)
        if is_matrix or not rules or len(models) == 1:
            self._whole()
            return
        groups = {name: self._group((*key, name), each) for name, each in rules.items()}
        taken = _gpus(models, _by_groups(models, groups))
        if all(each == ["turns-1"] for each in taken.values()):
            self._whole()
            return
        for number, name in enumerate([name for name, each in taken.items() if not each], 1):
            if _uses_gpus(self.models[name]):  # a process with `gpus: []` would see none
                taken[name] = [f"alone-{number}"]
        for name, each in taken.items():
            self.models[name].settings["gpus"] = each
        if gpus := list(dict.fromkeys(gpu for each in taken.values() for gpu in each)):
            self.made.settings["gpus"] = gpus
        self.note(
            key,
            "models that share a GPU take turns, and one with a GPU of its own stays beside the others. "
            "These GPUs are only names: write real ids and `vram`, and anvil-mux sees which models fit "
            "together.",
        )

    def _rules(self) -> tuple[KeyPath, dict[str, Any]]:
        """The groups or the matrix, whichever is in use, and the way to it."""
        settings = ("routing", "router", "settings")
        is_matrix = _sub(self.top, "routing", "router").get("use") == "matrix"
        use, other = ("matrix", "groups") if is_matrix else ("groups", "matrix")
        if _sub(self.top, *settings, other):
            self.note((*settings, other), "is not in use: routing.router.use says so.")
        for key in (("matrix",), ("groups",), (*settings, use)):
            if found := _sub(self.top, *key):
                return key, found
        return (), {}

    def _whole(self) -> None:
        """Let models take turns on all GPUs, but for those that name theirs."""
        visible = {name: model.environment.get(CUDA) for name, model in self.models.items()}
        for name, model in self.models.items():
            if visible[name] is None and not (model.container and model.container.reserves):
                model.settings["gpus"] = "all"
        named = [id for ids in visible.values() if ids for id in plain(ids).split(",")]
        for model in self.models.values():
            named += model.container.gpus if model.container else []
        ids = [*(self._here or ["0"]), *(id.strip() for id in named if id.strip() not in ("", "-1", "all"))]
        self.made.settings["gpus"] = sorted(dict.fromkeys(ids), key=lambda id: (len(id), id))
        if len({ids for ids in visible.values() if ids is not None}) > 1:
            self.note(
                (), f"models whose {CUDA} differ stay resident side by side; llama-swap kept one at a time."
            )

    def _group(self, key: KeyPath, said: Any) -> SwapGroup:
        said = self._mapping(said, key)
        members: list[str] = []
        with self._problems_at((*key, "members")):
            members = texts(said.get("members"))
        for name in members:
            if name not in self.models:
                self.note((*key, "members"), f"{name} is no model of the file.")
        swap, exclusive = said.get("swap", True), said.get("exclusive", True)
        known = tuple(name for name in members if name in self.models)
        return SwapGroup(known, swap is not False, exclusive is not False, said.get("persistent") is True)

    # The whole

    def _take(self, key: str, value: Any) -> None:
        if key in TOP:
            with self._problems_at((key,)):
                TOP[key](self, value)
        elif key not in OF_MODELS and value not in NOTHING:
            self.note((key,), TOP_NOTES.get(key, UNKNOWN))

    def _write(self) -> None:
        contained = all(model.container and not model.container.unknown for model in self.models.values())
        settings: dict[str, Any] = {} if contained else {"runtime": "process"}
        seconds = self.top.get("healthCheckTimeout")
        if isinstance(seconds, int) and seconds > 600:
            settings["queue_timeout"] = seconds  # requests wait for as long as a load may take
        self.made.settings = written({**settings, **self.made.settings})
        first = self.top.get("startPort")
        port = first if isinstance(first, int) else FIRST_PORT
        for name in sorted(self.models):
            model, service = self.models[name], self.made.services[self._names[name]]
            given = {"model": name} if name != self._names[name] else {}
            if contained:
                swap_models.write_container(model, service, port, self.made.volumes)
            else:
                swap_models.write_process(model, service)
            port += PORT in model.said["cmd"]
            service["x-anvil"] = written({**given, **model.settings})


def _bare(key: str, value: Any) -> Any:
    """The value of a model's key; a command without its comments, which may name macros."""
    if key in ("cmd", "cmdStop") and isinstance(value, str):
        return "\n".join(uncommented(value))
    return value


def _sub(value: Any, *path: str) -> dict[str, Any]:
    """The mapping below these keys; {} where there is none."""
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value if isinstance(value, dict) else {}


def _entries(value: Any) -> list[tuple[str, dict[str, Any]]]:
    """The entries of a mapping of mappings; ValueError if it is none."""
    entries = value or {}
    if not isinstance(entries, dict) or not all(isinstance(each, dict) for each in entries.values()):
        raise ValueError(f"must hold a name and keys for each, not {value!r}")
    return [(str(name), each) for name, each in entries.items()]


# Who is resident beside whom


def _by_groups(models: Sequence[str], groups: Mapping[str, SwapGroup]) -> set[TwoModels]:
    """The pairs of models that take turns; models that are in no group are one more, with the defaults."""
    grouped = {member for group in groups.values() for member in group.members}
    rest = SwapGroup(tuple(model for model in models if model not in grouped))
    of = {model: group for group in [*groups.values(), rest] for model in group.members}
    return {TwoModels(pair) for pair in combinations(models, 2) if _take_turns(of[pair[0]], of[pair[1]])}


def _take_turns(one: SwapGroup, other: SwapGroup) -> bool:
    """Whether members of two groups are never resident together, in whichever order they are asked for."""
    if one is other:
        return one.swap
    return one.exclusive and not other.persistent and other.exclusive and not one.persistent


def _gpus(models: Sequence[str], turns: set[TwoModels]) -> dict[str, list[str]]:
    """The GPUs of each model: one for each largest set of models all of which take turns.

    Such a GPU is a name for the turns, not a device, since llama-swap does not know GPUs.
    """
    left = set(turns)
    cliques: list[list[str]] = []
    for pair in combinations(models, 2):
        if TwoModels(pair) in left:
            clique = [*pair]
            for model in models:
                if model not in clique and all(TwoModels((model, other)) in turns for other in clique):
                    clique.append(model)
            left -= {TwoModels(each) for each in combinations(clique, 2)}
            cliques.append(clique)
    return {
        model: [f"turns-{number}" for number, clique in enumerate(cliques, 1) if model in clique]
        for model in models
    }


def _uses_gpus(model: SwapModel) -> bool:
    """Whether a model may compute on GPUs, as far as its container or its environment says."""
    if model.container:
        return model.container.reserves
    return plain(model.environment.get(CUDA, "0")).strip() not in ("", "-1")


# Keys of the whole


def _api_keys(file: _SwapFile, value: Any) -> None:
    if value:
        file.note(
            ("apiKeys",),
            f"{len(texts(value))} keys are not written here: put them into a file that only you can read, "
            "one to a line, and say x-anvil: {key_file: FILE} (docs/security.md). Now none is asked for.",
        )


def _hooks(file: _SwapFile, value: Any) -> None:
    started = _sub(value, "on_startup")
    for name in texts(started.get("preload")):
        if model := file.named(name.strip()):
            model.settings["preload"] = True
        else:
            file.note(("hooks", "on_startup", "preload"), f"{name} is no model of the file.")
    for key in started:
        if key != "preload":
            file.note(("hooks", "on_startup", key), UNKNOWN if key != "profile" else TOP_NOTES["profiles"])


def _routing(file: _SwapFile, value: Any) -> None:
    path = ("scheduler", "settings", "fifo", "priority")
    key = ("routing", *path)
    for name, given in _sub(value, *path).items():
        if name not in file.models:
            file.note(key, f"{name} is no model of the file.")
        elif isinstance(given, int):
            least, most = PRIORITIES
            taken = min(max(given, least), most)
            file.models[name].settings["priority"] = taken
            if taken != given:
                file.note(key, f"{name}: {given} becomes {taken}, the farthest there is.")


def _selectors(file: _SwapFile, value: Any) -> None:
    any_of: dict[str, list[str]] = {}
    elsewhere = _names_of_peers(file)
    for name, said in _entries(value):
        targets, strategy = texts(said.get("targets")), said.get("strategy")
        key, first = ("selectors", str(name)), next(iter(targets), "")
        model = file.named(first)
        if strategy == "warm" and model:
            any_of[name] = [target for target in targets if file.named(target)]
        elif strategy == "pin" and (
            first in elsewhere or (model and first in model.settings.get("presets", ()))
        ):
            any_of[name] = [elsewhere.get(first, first)]
        elif model:
            model.call(name)
            if strategy != "pin":
                alone = f"is a name of {first} alone, not of {', '.join(targets[1:])}"
                file.note(key, f"{alone}; replicas have the same `model`.")
        else:
            file.note(key, "is left out: its first target is no model of the file.")
    if any_of:
        file.made.settings["any_of"] = any_of


def _names_of_peers(file: _SwapFile) -> dict[str, str]:
    """The names by which models of peers may be asked for, and the whole name of each."""
    asked = [(peer, each) for peer, each in _entries(file.top.get("peers")) if _is_asked(each)]
    whole = [(name, f"{peer}/{name}") for peer, each in asked for name in texts(each.get("models"))]
    count = Counter(name for name, _ in whole)
    alone = {name: full for name, full in whole if count[name] == 1 and not file.named(name)}
    return {**alone, **{full: full for _, full in whole}}


def _is_asked(peer: Mapping[str, Any]) -> bool:
    """Whether anvil-mux can ask a peer."""
    return str(peer.get("proxy") or "").startswith(("http://", "https://"))


def _peers(file: _SwapFile, value: Any) -> None:
    for peer, said in _entries(value):
        key = ("peers", peer)
        proxy = str(said.get("proxy") or "")
        if not _is_asked(said):
            models = ", ".join(texts(said.get("models")))
            file.note(key, f"is left out, and with it {models}: anvil-mux cannot ask {plain(proxy)}.")
            continue
        settings: dict[str, Any] = {"url": proxy.rstrip("/") + "/v1"}
        if secret := variable(said.get("apiKey")):
            settings["api_key_env"] = secret
        elif said.get("apiKey"):
            file.note((*key, "apiKey"), "is not written here: put it into a variable that api_key_env names.")
        _write_peer(file, key, said, settings)


def _write_peer(file: _SwapFile, key: KeyPath, said: Mapping[str, Any], settings: dict[str, Any]) -> None:
    """A service for each model of a peer."""
    filters = _sub(said, "filters")
    if names := listed(filters.get("stripParams")):
        settings["strip"] = [name for name in names if name not in UNTOUCHED]
    settings |= swap_models.parameters(_sub(filters, "setParams"))
    if said.get("timeouts"):
        file.note((*key, "timeouts"), swap_models.NOTES["timeouts"])
    for name in texts(said.get("models")):
        full = f"{key[1]}/{name}"
        service = file.made.free_name(full)
        alone = sum(name in texts(peer.get("models")) for _, peer in _entries(file.top["peers"])) == 1
        aliases = {"aliases": [name]} if alone and not file.named(name) else {}
        given = {"model": full, "served_model": name, **aliases, **settings}
        file.made.services[service] = {"x-anvil": written(given)}


OF_MODELS = ("groups", "globalTTL", "healthCheckTimeout", "matrix", "startPort", "unloadTimeout")
"""Keys of the whole that say something of the models, which have been told already."""
TOP: dict[str, Callable[[_SwapFile, Any], None]] = {
    "apiKeys": _api_keys,
    "hooks": _hooks,
    "routing": _routing,
    "selectors": _selectors,
    "peers": _peers,
}
TOP_NOTES = {
    "logLevel": "is left out: `serve --quiet` and `--verbose` say how much is told.",
    "logTimeFormat": "is left out: how messages show the time is not to be set.",
    "logToStdout": "is left out: engines' output is in `anvil-mux logs MODEL`, messages on standard error.",
    "logRequests": "is left out: `serve --access-log` says where requests are logged.",
    "metricsMaxInMemory": "is left out: /metrics counts, and keeps no requests.",
    "captureBuffer": "is left out: `capture` keeps the last requests, so many and not so much.",
    "store": "is left out: anvil-mux keeps what it learns in its state folder.",
    "ui": "is left out: the page has nothing to set.",
    "performance": "is left out: GPUs are read all the time.",
    "sendLoadingState": swap_models.NOTES["sendLoadingState"],
    "includeAliasesInList": "an alias stands in the entry of its model, and has none of its own.",
    "upstream": "below /upstream/MODEL/ are the page of its engine and what `upstream` on a service names.",
    "profiles": "is left out: what a name means is changed by `aliases` and a reload.",
    "tailcat": "is left out: anvil-mux listens on TCP alone.",
}
