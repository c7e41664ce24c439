"""Compose files as anvil-mux reads them: the commands ``check`` and ``config``.

``check`` loads them as ``serve`` would, on this machine and its cluster, and shows their backends, what these
lack, and what might be declared. ``config`` shows the settings in effect, with where each comes from.
"""

from __future__ import annotations

import argparse
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anvil_mux.cli.arguments import (
    add_cluster,
    add_files,
    add_json,
    argument,
    configuration,
    left_lines,
    reached,
)
from anvil_mux.cli.output import (
    Columns,
    answer,
    as_text,
    counted,
    diagnostics_as_json,
    print_columns,
    print_diagnostics,
    print_json,
    say,
)
from anvil_mux.config.kinds import Diagnostic, gib, seconds_or_none
from anvil_mux.errors import MuxError

if TYPE_CHECKING:
    from anvil_mux.cluster.cluster import Cluster
    from anvil_mux.config.config import Backend, Config
    from anvil_mux.host.check import VendorGpus
    from anvil_mux.host.seam import HostGpu
    from anvil_mux.serve.files import Known


# check


def add_check(command: argparse.ArgumentParser) -> None:
    add_files(command)
    add_cluster(command)
    add_json(command)
    argument(
        command,
        "--suggest",
        "explain what files without x-anvil would become, and print what to add; needs no Docker",
        action="store_true",
    )


def check(given: argparse.Namespace) -> int:
    """Check the files, or say what would become of them."""
    if given.suggest:
        from anvil_mux.cli import importing

        return importing.suggest(given)
    from anvil_mux.host.check import gpus_by_vendor
    from anvil_mux.serve import polling
    from anvil_mux.serve.files import open_address, own_address, secrets

    cluster = reached(given)
    config = configuration(given.files, here=True, hosts=cluster.known_machines() if cluster else {})
    keyring, _ = secrets(config)
    known = _learned(config)
    warnings = [*config.warnings, *_slow_loads(config, known), *_lacking(config)]
    warnings += polling.warnings(config.backends)
    warnings += [*keyring.warnings, *filter(None, [open_address(config, keyring)]), *own_address(config)]
    hints, gpus = [*vram_to_declare(config, known)], gpus_by_vendor()
    hosts = _check_hosts(config, cluster) if cluster else None
    warnings += [*_lacking_on(hosts or ()), *steered_by_all(config, hosts or ())]
    diagnostics = [*(("warning", each) for each in warnings), *(("hint", each) for each in hints)]
    if given.json:
        print_json(
            {
                "listen": f"{config.host}:{config.port}",
                "models": _models_as_json(config),
                "problems": [],
                "warnings": warnings,
                "hints": hints,
                "gpus": [{**each._asdict(), "gpus": [gpu._asdict() for gpu in each.gpus]} for each in gpus],
                "diagnostics": diagnostics_as_json(diagnostics),
                **({"any_of": _any_of(config)} if config.any_of else {}),
                **({} if hosts is None else {"hosts": hosts}),
            }
        )
        return 0
    if hosts is not None:
        from anvil_mux.cli.operating import print_hosts

        print_hosts(hosts)
        print()
    print_columns({key.upper(): cell for key, cell in _columns(config).items()}, config.backends)
    for name, choice in config.any_of.items():
        print(f"{name}: {choice.words}")
    print_diagnostics(diagnostics)
    for line in _gpu_lines(gpus):
        say(line)
    for line in dict.fromkeys([*left_lines(config.project), *_others_lines(config)]):
        say(f"warning: {line}")
    counts = f"{counted(config.backends, 'backend')}, {counted(warnings, 'warning')}"
    say(f"{counts}; will listen on {config.host}:{config.port}")
    return 0


def _models_as_json(config: Config) -> list[dict[str, Any]]:
    """The backends, each with its columns, of which two are lists."""
    columns = _columns(config)
    lists: Mapping[str, Any] = {
        "gpus": lambda backend: [*backend.gpus],
        "presets": lambda backend: [preset.name for preset in backend.presets],
    }
    return [{key: lists.get(key, cell)(each) for key, cell in columns.items()} for each in config.backends]


def _any_of(config: Config) -> dict[str, Any]:
    return {name: each.to_json() for name, each in config.any_of.items()}


def _columns(config: Config) -> Columns[Backend]:
    """The columns of the backends: those that all have, and those that any of these needs."""
    from anvil_mux.config.machines import LOCAL

    several_hosts = any(backend.host for backend in config.backends)
    always: Columns[Backend] = {
        "model": lambda backend: backend.model,
        "backend": lambda backend: backend.name,
        "engine": lambda backend: backend.engine,
        "gpus": lambda backend: "" if backend.url else ",".join(backend.gpus),
        "vram": _vram,
        "port": lambda backend: _port(config, backend),
    }
    some: Columns[Backend] = {
        "host": lambda backend: (backend.host or LOCAL) if several_hosts else "",
        "presets": lambda backend: ",".join(preset.name for preset in backend.presets),
        "prompt_cache": lambda b: "" if b.prompt_cache is None else gib(b.prompt_cache),
        "max_queue": lambda backend: str(backend.max_queue or ""),
        "drain": lambda b: seconds_or_none(b.drain_timeout) if b.has_own("drain_timeout") else "",
        "home": lambda backend: f"after {backend.home_after:g} s" if backend.home else "",
        "url": lambda backend: backend.url,
        "fallback": _fallback,
    }
    return {**always, **{key: cell for key, cell in some.items() if any(map(cell, config.backends))}}


def _vram(backend: Backend) -> str:
    if backend.url:
        return ""
    return gib(backend.vram) if backend.vram else "all" if backend.gpus else ""


def _port(config: Config, backend: Backend) -> str:
    from anvil_mux.host.engines import listen_port

    if backend.url:
        return ""
    return "free" if config.runtime == "process" and not backend.port else str(listen_port(backend))


def _fallback(backend: Backend) -> str:
    after = "" if backend.fallback_after is None else f" after {backend.fallback_after:g} s"
    return ",".join(backend.fallback) + after


# Warnings and hints


def _learned(config: Config) -> Known:
    """Read the figures that anvil-mux has learned while it served these backends."""
    from anvil_mux.serve.files import LearnedFile
    from anvil_mux.state import state_folder

    return LearnedFile(state_folder(config.project, os.environ), say).read(config)


def _slow_loads(config: Config, known: Known) -> list[str]:
    """A warning for each model whose load, as it was learned, takes longer than a request may wait."""
    slowest: dict[str, float] = {}
    for cost in known.costs:
        slowest[cost.target] = max(cost.load_seconds, slowest.get(cost.target, 0.0))
    return [
        Diagnostic(
            f"the load of {model} has taken {seconds:.0f} s, and queue_timeout is "
            f"{config.queue_timeout:g} s: requests that wait for it fail before it is loaded",
            write=f"queue_timeout: {2 * seconds:.0f}",
            key=("x-anvil", "queue_timeout"),
        )
        for model, seconds in slowest.items()
        if seconds > config.queue_timeout
    ]


def _lacking(config: Config) -> list[str]:
    """A warning for each thing that this machine lacks for the configuration."""
    from anvil_mux.host.check import questions
    from anvil_mux.host.seam import HostConfig

    found: list[str] = []
    for question in questions():
        try:
            found += question(HostConfig.of(config))
        except MuxError as error:
            found.append(f"no container can be started, and images were not looked for: {error.message}")
    return list(dict.fromkeys(found))


def _check_hosts(config: Config, cluster: Cluster) -> list[dict[str, Any]]:
    """Report the hosts of a cluster, and what each lacks for its part of the configuration."""
    from anvil_mux.host.seam import HostConfig

    try:
        return cluster.check(lambda name: HostConfig.of(config, name))
    finally:
        cluster.close()


def _lacking_on(seen: Sequence[Mapping[str, Any]]) -> list[str]:
    """A warning for each thing that a host lacks for its part of the configuration."""
    lacking = [f"host {host['host']}: {why}" for host in seen for why in host["missing"]]
    return [Diagnostic(why, page="cluster.md#setting-up") for why in lacking]


def steered_by_all(config: Config, seen: Sequence[Mapping[str, Any]]) -> list[str]:
    """A warning for each host on which whoever reaches an engine may steer it."""
    from anvil_mux.config.abilities import is_steered_by_all, steered_at

    found: list[str] = []
    for host in seen:
        names = [
            each.name
            for each in config.backends
            if each.host == host["host"] and is_steered_by_all(each.engine, dict(each.service.environment))
        ]
        if names and (said := steered_at(host.get("address", ""))):
            remedy = "let a firewall admit anvil-mux's machine alone"
            text = f"host {host['host']}: {', '.join(names)}: {said}; {remedy}"
            found.append(Diagnostic(text, page="cluster.md#security"))
    return found


def vram_to_declare(config: Config, known: Known) -> Iterator[str]:
    """Yield a hint for each backend that shares its GPUs, was measured, and has no ``vram`` or too little."""
    from anvil_mux.scheduler.costs import to_declare

    held = {each.backend: each for each in known.footprints if each.held}
    users = Counter(gpu for backend in config.backends for gpu in backend.gpu_names)
    for backend in config.backends:
        last = held.get(backend.name)
        if last is None or backend.vram_measured or last.is_outdated(backend.service.digest):
            continue
        if (backend.vram or 0) >= max(last.held.values()):
            continue
        if any(users[gpu] > 1 for gpu in backend.gpu_names):
            size = to_declare(last.held)
            write = f"x-anvil: {{vram: {size}}}"
            fact = f"{backend.name} held {size} of each GPU when it last ran"
            if backend.vram:
                short = f"{fact}, more than its vram"
                sentence = f"{short}: declare {write}"
            else:
                benefit = "others may be loaded beside it"
                short, sentence = f"{fact}; declared, {benefit}", f"{fact}: declare {write}, and {benefit}"
            key = ("services", backend.name, "x-anvil", "vram")
            yield Diagnostic(sentence, said=short, write=write, key=key)


def _others_lines(config: Config) -> list[str]:
    """Say what other anvil-mux have and do on the GPUs of this machine."""
    from anvil_mux.host import check
    from anvil_mux.host.seam import HostConfig

    own = HostConfig.of(config)
    found: list[str] = []
    with suppress(MuxError):  # Docker is away, which is told above
        found = check.occupants(own)
    return [*check.gpus_of_others(own), *found]


def _gpu_lines(found: Sequence[VendorGpus]) -> Iterator[str]:
    """Yield a line for each vendor of which there are GPUs, or one that says why there are none."""
    if not any(each.gpus for each in found):
        yield "no GPU found here: " + "; ".join(f"{each.vendor}: {each.note}" for each in found)
    for vendor, gpus, note in found:
        if gpus:
            shown = ", ".join(map(_gpu, gpus))
            yield f"{vendor}: {shown}" + (f" ({note})" if note else "")


def _gpu(gpu: HostGpu) -> str:
    name = f"{gpu.id} {gpu.name}".strip()
    if gpu.total is None:
        return f'{name} of unknown size (declare it: gpus: {{"{gpu.id}": {{vram: ...}}}})'
    shared = f", {gib(gpu.shared)} of it host memory" if gpu.shared else ""
    return f"{name} {gib(gpu.total)}{shared}"


# config


def add_config(command: argparse.ArgumentParser) -> None:
    add_files(command)
    add_json(command)
    argument(command, "--show-origin", "show where each value comes from", action="store_true")
    argument(
        command, "--docs", "print a description of every setting, as Markdown tables", action="store_true"
    )
    argument(command, "--schema", "print a JSON Schema of compose files, for editors", action="store_true")
    argument(command, "--routing", "show the routing policies as YAML", action="store_true")


def show_config(given: argparse.Namespace) -> int:
    from anvil_mux.config.config import SERVICE_SETTINGS, SETTINGS
    from anvil_mux.config.kinds import describe

    if given.docs:
        _print_docs("x-anvil at the top level", describe(SETTINGS))
        _print_docs("x-anvil on a service", describe(SERVICE_SETTINGS))
        return 0
    if given.schema:
        return _print_schema()
    if given.routing:
        return _print_routing(given)
    config = configuration(given.files)
    values = {key: _value(config, key) for key in SETTINGS}
    found: Mapping[str, Any] = values
    columns: dict[str, Callable[[str], str]] = {
        "SETTING": lambda key: key,
        "VALUE": lambda key: as_text(values[key]),
    }
    if given.show_origin:
        found = {key: {"value": value, "origin": config.origins[key]} for key, value in values.items()}
        columns["ORIGIN"] = lambda key: config.origins[key]
    return answer(given, found, partial(print_columns, columns))


def _value(config: Config, key: str) -> Any:
    """A setting as the file would say it."""
    match key:
        case "listen":
            return f"{config.host}:{config.port}"
        case "gpus":
            return _gpus(config, "")
        case "machines":
            hosts = dict.fromkeys([*(gpu.host for gpu in config.gpus if gpu.host), *config.memory_of_hosts])
            about = {host: (_gpus(config, host), config.memory_of(host)) for host in hosts}
            return {
                host: {k: v for k, v in (("gpus", gpus), ("host_memory", memory)) if v}
                for host, (gpus, memory) in about.items()
            }
        case "hooks":
            return [{name: said for name, said in asdict(hook).items() if said} for hook in config.hooks]
        case "policy" | "eviction":
            settings = getattr(config, f"{key}_settings")
            name = getattr(config, key)
            return {"name": name, **settings} if settings else name
        case "routing" if config.routing_policies or config.routing_mode != "lite" or config.routing_store:
            mode, policies = config.routing_mode, config.routing_policies
            scheme, _, address = config.routing_store.partition("://")
            _, at, place = address.rpartition("@")  # before it may stand a password
            store = f"{scheme}://***@{place}" if at else config.routing_store
            return {"default": config.routing, "mode": mode, "policies": policies, "store": store}
        case "yield":
            least = config.yield_above
            return None if least is None else {"when_others_hold": "any" if least == 1 else least}
        case "any_of":
            return _any_of(config)
    return getattr(config, key)


def _gpus(config: Config, host: str) -> dict[str, dict[str, int]]:
    """The GPUs of a host, as the file would say them."""
    sizes = [
        (gpu.id, (("vram", gpu.vram), ("reserve", gpu.reserve))) for gpu in config.gpus if gpu.host == host
    ]
    return {id: {name: size for name, size in about if size} for id, about in sizes}


def _print_schema() -> int:
    from anvil_mux.config.config import SERVICE_SETTINGS, SETTINGS
    from anvil_mux.config.kinds import compose_schema
    from anvil_mux.routing import pipeline
    from anvil_mux.scheduler.memory import EVICTIONS
    from anvil_mux.scheduler.policies import POLICIES

    print_json(
        compose_schema(
            SETTINGS,
            SERVICE_SETTINGS,
            {"policy": [*POLICIES], "eviction": [*EVICTIONS], "routing": [*pipeline.shipped()]},
        )
    )
    return 0


def _print_routing(given: argparse.Namespace) -> int:
    """The policies that are shipped, and those of the compose file if there is one."""
    import yaml

    from anvil_mux.config.compose import FILE_NAMES
    from anvil_mux.config.values import DEFAULT_ROUTING
    from anvil_mux.routing import pipeline

    here = Path.cwd()
    places = [place / name for place in (here, *here.parents) for name in FILE_NAMES]
    found = given.files or any(place.is_file() for place in places)
    config = configuration(given.files) if found else None
    own = config.routing_policies if config else {}
    default = config.routing if config else DEFAULT_ROUTING
    models = {b.model: b.routing for b in config.backends} if config else {}
    if given.json:
        print_json({"default": default, "models": models, "policies": {**pipeline.shipped(), **own}})
        return 0
    print(pipeline.text())
    if own:
        print("# Those of the compose file.\n")
        print(yaml.safe_dump(own, sort_keys=False))
    print(f"# The default is {default}.")
    for model, name in models.items():
        print(f"# {model}: {name}")
    return 0


def _print_docs(title: str, rows: Iterable[Sequence[str]]) -> None:
    print(f"### {title}\n\n| key | value | default | meaning |\n|---|---|---|---|")
    for key, kind, default, meaning in rows:
        cells = (f"`{key}`", kind.replace("|", "\\|"), default and f"`{default}`", meaning)
        print(f"| {' | '.join(cells)} |")
    print()
