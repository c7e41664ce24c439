"""The commands: which there are, and those that read a compose file.

What a command finds goes to standard output, as a table or with ``--json``; all else to standard error.
``EXIT_CODES`` says how commands end. Modules are imported by the commands that need them, because importing
takes longer than most commands.
"""

from __future__ import annotations

import argparse
import errno
import os
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anvil_mux import __version__
from anvil_mux.cli import asking, hosts, importing, pausing, replaying, requests, studying, usage
from anvil_mux.cli.arguments import (
    add_cluster,
    add_files,
    add_json,
    configuration,
    read_port,
    read_positive,
    read_size,
)
from anvil_mux.cli.output import (
    BAD_CONFIG,
    FAILED,
    INTERRUPTED,
    as_text,
    complain,
    counted,
    opened,
    print_json,
    print_table,
    say,
)
from anvil_mux.config.settings import gib, seconds_or_none
from anvil_mux.errors import BackendError, ConfigError, MuxError

if TYPE_CHECKING:
    from anvil_mux.cluster.cluster import Cluster
    from anvil_mux.config.config import Backend, Config
    from anvil_mux.serve.remote import RunningMux
    from anvil_mux.serve.state_files import Known

EXIT_CODES = {
    0: "done",
    FAILED: "the command failed; standard error says why",
    2: "wrong usage",
    3: "no running anvil-mux answers",
    BAD_CONFIG: "the configuration is not valid; standard error lists every problem",
    INTERRUPTED: "interrupted",
}
UNPRINTABLE = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)
"""The errors of an output that takes nothing any more."""
VARIABLES = {
    "ANVIL_URL": "the address of the anvil-mux that commands talk to",
    "ANVIL_API_KEY": "the API key that commands use",
    "ANVIL_API_KEYS": "the API keys that serve accepts; see docs/security.md",
    "ANVIL_SETTING": "any setting, for serve and check, such as ANVIL_DRAIN_TIMEOUT=60; flags win",
    "NO_COLOR, FORCE_COLOR": "never colour the output, or colour it even if it is not a terminal",
    "XDG_STATE_HOME": "the folder for state (learned costs, engines' logs); by default ~/.local/state",
}
DEMO = Path(__file__).resolve().parent.parent / "demo.yaml"
"""The compose file of `serve --demo`; compose/demo.yaml is a link to it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; its exit code."""
    try:
        given = _arguments(list(sys.argv[1:] if argv is None else argv))
        code: int = given.run(given)
        sys.stdout.flush()
        return code
    except ConfigError as error:
        return _report_problems(error, given)
    except MuxError as error:
        return complain(error.message, getattr(error, "exit_code", FAILED))
    except KeyboardInterrupt:
        return INTERRUPTED
    except OSError as error:
        if error.filename is not None or error.errno not in UNPRINTABLE:
            raise
        # The interpreter must not complain when it flushes at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno == errno.EPIPE:
            return FAILED  # whoever read us has enough
        return complain(f"standard output cannot be written: {error.strerror}", FAILED)


# Arguments


def _arguments(words: list[str]) -> argparse.Namespace:
    parser = _parser()
    try:
        given, unknown = parser.parse_known_args(_with_command(words, parser.error))
    finally:
        sys.stdout.flush()  # a help text, after which it ends
    if unknown:
        given.refuse(f"unrecognized arguments: {' '.join(unknown)}")  # with the usage of the command itself
    return given


def _with_command(words: list[str], refuse: Callable[[str], object]) -> list[str]:
    """``anvil-mux FILE`` and ``anvil-mux`` alone mean ``serve``."""
    asks = {"-h", "--help"}
    first = words[0] if words else ""
    if first.isalpha() and first not in COMMANDS and not os.path.exists(first):
        near = get_close_matches(first, COMMANDS, 1)
        refuse(f"neither a command nor a file: {first}" + (f"; did you mean {near[0]}?" if near else ""))
    if first == "--version":
        return ["version", *words[1:]]
    return words if first in COMMANDS or first in asks else ["serve", *words]


class _Parser(argparse.ArgumentParser):
    """One that does not pass over it when a help text cannot be printed, as newer Pythons do."""

    def print_help(self, file: Any = None) -> None:
        print(self.format_help(), end="", file=file)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="anvil-mux",
        description="Serve many LLM engines from docker compose files at one address, and swap them on GPUs.",
        epilog=_more_help(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="store_true", help="show the version and exit")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, (about, run, add) in COMMANDS.items():
        command = commands.add_parser(name, help=about, description=f"{about}.")
        command.set_defaults(run=run, json=False, refuse=command.error)
        add(command)
    return parser


def _more_help() -> str:
    parts = ["`anvil-mux FILE` means `anvil-mux serve FILE`. Help on a command: anvil-mux COMMAND --help"]
    for title, told in (("environment", VARIABLES), ("exit codes", EXIT_CODES)):
        parts += ["", f"{title}:", *(f"  {name!s:<23}{meaning}" for name, meaning in told.items())]
    return "\n".join(parts)


def _add_serve(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add_files(command)
    add(
        "--demo",
        action="store_true",
        help="serve two simulated models, to try it out: no compose file, GPU or Docker needed",
    )
    add("--host", help="address to listen on; by default the one in the file, or 127.0.0.1")
    add("--port", type=read_port, help="port to listen on (0: any free one); by default the file's, or 9292")
    add(
        "--insecure",
        action="store_true",
        help="allow an address that others can reach, although no API keys are set",
    )
    add(
        "--drain-timeout",
        metavar="SECONDS",
        help="how long a swap waits for running requests before it aborts them; 0: not at all",
    )
    add("--queue-timeout", metavar="SECONDS", help="the longest time a request waits for its model")
    add(
        "--policy",
        metavar="NAME",
        help="the policy that decides when to swap: adaptive, eager, ..., or package.module:Class",
    )
    add("--on-exit", choices=("keep", "stop"), help="whether engines keep running or are stopped at exit")
    add_cluster(command)
    add(
        "--takeover",
        action="store_true",
        help="take the cluster over from another anvil-mux, which then exits",
    )
    add(
        "--pin",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="serve requests on one CPU (default), or on all; engines use all",
    )
    add("--watch", action="store_true", help="reload whenever a configuration file changes")
    add(
        "--access-log",
        metavar="FILE",
        default="-",
        help="where to log requests: a file, - for standard error (default), or off",
    )
    add(
        "--log-format",
        choices=("human", "json"),
        default="human",
        help="format of the log and of the access log (default human)",
    )
    add(
        "--event-log",
        metavar="FILE",
        help="append every event to a file, which `anvil-mux simulate` can read",
    )
    add(
        "--event-log-size",
        type=read_size,
        default=128 << 20,
        metavar="SIZE",
        help="rotate the event log to FILE.1, FILE.2 and FILE.3 at this size (default 128MiB; 0: never)",
    )
    add(
        "-q",
        "--quiet",
        action="store_const",
        const=-1,
        default=0,
        dest="verbosity",
        help="log only problems",
    )
    add(
        "-v",
        "--verbose",
        action="store_const",
        const=1,
        dest="verbosity",
        help="log the waits of single requests too",
    )


def _add_check(command: argparse.ArgumentParser) -> None:
    add_files(command)
    add_cluster(command)
    add_json(command)
    command.add_argument(
        "--suggest",
        action="store_true",
        help="explain what files without x-anvil would become, and print what to add; needs no Docker",
    )


def _add_config(command: argparse.ArgumentParser) -> None:
    add_files(command)
    add_json(command)
    command.add_argument("--show-origin", action="store_true", help="show where each value comes from")
    command.add_argument(
        "--docs", action="store_true", help="print a description of every setting, as Markdown tables"
    )
    command.add_argument(
        "--schema", action="store_true", help="print a JSON Schema of compose files, for editors"
    )
    command.add_argument("--routing", action="store_true", help="show the routing policies as YAML")


def _add_logs(command: argparse.ArgumentParser) -> None:
    command.add_argument("model", metavar="MODEL", help="a model, or the service of one replica")
    command.add_argument(
        "--file", action="append", dest="files", default=[], metavar="FILE", help="compose file"
    )
    command.add_argument("-f", "--follow", action="store_true", help="keep printing what the engine logs")
    command.add_argument(
        "-n", "--lines", type=int, default=100, metavar="N", help="number of last lines (default 100)"
    )
    command.add_argument("--url", help="address of anvil-mux; see `ps`")
    add_json(command)


def _add_completion(command: argparse.ArgumentParser) -> None:
    command.add_argument("shell", nargs="?", choices=("bash", "zsh", "fish"))
    command.add_argument("--models", action="store_true", help="print the models of a running anvil-mux")
    command.add_argument("--url", help="address of anvil-mux; see `ps`")
    command.set_defaults(files=[])
    command.epilog = 'In ~/.bashrc: eval "$(anvil-mux completion bash)"'


def _add_bench(parser: argparse.ArgumentParser) -> None:
    about = "Measure how long swaps take, and how much of that is anvil-mux's overhead"
    command = parser.add_subparsers(metavar="WHAT", required=True).add_parser(
        "swap", help=about, description=f"{about}."
    )
    add = command.add_argument
    add_files(command)
    add("--repeat", type=read_positive, default=5, metavar="N", help="measure each swap N times (default 5)")
    add(
        "--burst",
        type=read_positive,
        default=0,
        metavar="N",
        help="also measure N requests that wait for a swap, compared with N that are sent directly",
    )
    add(
        "--also",
        action="append",
        default=[],
        metavar="FILE",
        help="also measure the services of another compose file (a separate project); may be repeated",
    )
    add("--csv", metavar="FILE", help="write every swap to a CSV file, with its phases and its engine")
    add("--plot", metavar="FILE", help="plot the phases, one panel for each engine (needs matplotlib)")
    add_json(command)
    command.epilog = (
        "Swaps all pairs of backends in the file that do not fit side by side, with each of their standby "
        "levels, alternating between anvil-mux and the same steps by hand. Running engines of the project "
        "are stopped first, and nothing is left running. Times are medians in seconds, from the end of the "
        "last request to the first byte of the next answer. OVERHEAD is how much longer a swap took than by "
        "hand; half of the swaps are within HALF-WITHIN, the machine's noise. COLD/BACK is the time of a "
        "cold start divided by that of coming back from standby. GIB is the GPU memory that was loaded "
        "again, BUS what the GPU's link could carry in a second. A burst is measured from the moment the "
        "model is ready until all requests are answered; DIRECT is the same number of requests sent at once "
        "to a freshly started engine, each on its own connection. Exit code 1: something could not be "
        "measured."
    )


# serve, check, config: what reads the compose file


def _serve(given: argparse.Namespace) -> int:
    from anvil_mux.serve.invocation import Options
    from anvil_mux.serve.invocation import say as tell
    from anvil_mux.serve.program import serve

    if given.demo:
        _choose_demo(given)
    cluster = _reached(given)
    config = _configuration_served(given, cluster)
    for warning in config.warnings if given.verbosity >= 0 else ():
        tell(f"warning: {warning}", given.log_format)
    options = Options(
        access_log=given.access_log,
        event_log=given.event_log,
        event_log_size=given.event_log_size,
        log_format=given.log_format,
        pin=given.pin,
        insecure=given.insecure,
        watch=given.watch,
        verbosity=given.verbosity,
        takeover=given.takeover,
    )
    return serve(config, options, partial(_configuration_served, given, cluster), cluster)


def _choose_demo(given: argparse.Namespace) -> None:
    """Serve the compose file that comes with the package, and stop its engines at the end."""
    if given.files:
        given.refuse("--demo has its own compose file: leave out either --demo or FILE")
    given.files = [str(DEMO)]
    given.on_exit = given.on_exit or "stop"
    # The file names it: a Python on PATH may be older than this one, or missing.
    os.environ.setdefault("PYTHON", sys.executable)


def _reached(given: argparse.Namespace) -> Cluster | None:
    """The cluster that the command line names, reached; None if it names none."""
    if not given.cluster:
        return None
    from anvil_mux.cluster.reach import reach

    return reach(given.cluster, say, insecure=given.insecure_cluster)


def _configuration_served(given: argparse.Namespace, cluster: Cluster | None = None) -> Config:
    """The configuration as it is now, with what the command line says."""
    overrides = {
        "drain_timeout": given.drain_timeout,
        "queue_timeout": given.queue_timeout,
        "policy": given.policy,
        "on_exit": given.on_exit,
    }
    config = configuration(given.files, overrides, here=True, hosts=cluster.machines() if cluster else {})
    port = config.port if given.port is None else given.port
    return replace(config, host=given.host or config.host, port=port)


def _check(given: argparse.Namespace) -> int:
    """Check the files, or say what would become of them."""
    if given.suggest:
        from anvil_mux.cli import suggesting

        return suggesting.run(given)
    return _check_files(given)


def _check_files(given: argparse.Namespace) -> int:
    from anvil_mux.cli import diagnostics, gpus
    from anvil_mux.config.config import LOCAL
    from anvil_mux.host import check
    from anvil_mux.serve import polling
    from anvil_mux.serve.configuration import open_address, secrets

    cluster = _reached(given)
    config = configuration(given.files, here=True, hosts=cluster.machines() if cluster else {})
    keyring, _ = secrets(config)
    known = _learned(config)
    warnings = [*config.warnings, *_slow_loads(config, known), *_lacking(config)]
    warnings += polling.warnings(config.backends)
    warnings += [*keyring.warnings, *filter(None, [open_address(config, keyring)])]
    hints, found = [*gpus.vram_to_declare(config, known)], check.gpus_by_vendor()
    seen = _check_hosts(config, cluster) if cluster else []
    warnings += [*_lacking_on(seen), *_steered_by_all(config, seen)]
    rows: list[tuple[str, ...]] = [_backend_row(config, backend) for backend in config.backends]
    keys: tuple[str, ...] = ("model", "backend", "engine", "gpus", "vram", "port")
    if any(backend.host for backend in config.backends):
        keys = (*keys, "host")
        rows = [(*row, each.host or LOCAL) for row, each in zip(rows, config.backends, strict=True)]
    if any(backend.presets for backend in config.backends):
        keys = (*keys, "presets")
        names = [[preset.name for preset in each.presets] for each in config.backends]
        rows = [(*row, ",".join(each)) for row, each in zip(rows, names, strict=True)]
    if any(backend.prompt_cache is not None for backend in config.backends):
        keys = (*keys, "prompt_cache")
        caches = ["" if each.prompt_cache is None else gib(each.prompt_cache) for each in config.backends]
        rows = [(*row, each) for row, each in zip(rows, caches, strict=True)]
    for key, cells in (_staying(config) | _beside(config)).items():
        keys = (*keys, key)
        rows = [(*row, cell) for row, cell in zip(rows, cells, strict=True)]
    any_of = {name: each.to_json() for name, each in config.any_of.items()}
    if given.json:
        models = [
            {**dict(zip(keys, row, strict=True)), **_lists(backend, keys)}
            for row, backend in zip(rows, config.backends, strict=True)
        ]
        listen = f"{config.host}:{config.port}"
        told = {"listen": listen, "models": models, "problems": [], "warnings": warnings, "hints": hints}
        told["gpus"] = gpus.as_json(found)
        told["diagnostics"] = [*diagnostics.as_json("warning", warnings), *diagnostics.as_json("hint", hints)]
        more = {"any_of": any_of} if any_of else {}
        print_json({**told, **more, **({"hosts": seen} if cluster else {})})
        return 0
    if cluster:
        hosts.print_hosts(seen)
        print()
    print_table([key.upper() for key in keys], rows)
    for name, each in config.any_of.items():
        print(f"{name}: any of {', '.join(each.models)}{'' if each.swaps else ', swap: never'}")
    diagnostics.print_diagnostics(
        [*(("warning", each) for each in warnings), *(("hint", each) for each in hints)]
    )
    for line in gpus.lines(found):
        say(line)
    counts = f"{counted(rows, 'backend')}, {counted(warnings, 'warning')}"
    say(f"{counts}; will listen on {config.host}:{config.port}")
    return 0


def _staying(config: Config) -> dict[str, list[str]]:
    """Columns for the settings by which backends stay, come back and queue, if any has them."""
    found: dict[str, list[str]] = {}
    if any(each.max_queue for each in config.backends):
        found["max_queue"] = [str(each.max_queue or "") for each in config.backends]
    if any(each.drain_timeout is not None for each in config.backends):
        own = [each.drain_timeout for each in config.backends]
        found["drain"] = ["" if each is None else seconds_or_none(each) for each in own]
    if any(each.home for each in config.backends):
        after = [
            config.home_after if each.home_after is None else each.home_after for each in config.backends
        ]
        homes = zip(config.backends, after, strict=True)
        found["home"] = [f"after {seconds:g} s" if each.home else "" for each, seconds in homes]
    return found


def _check_hosts(config: Config, cluster: Cluster) -> list[dict[str, Any]]:
    """Report the hosts of a cluster, and what each lacks for its part of the configuration."""
    from anvil_mux.host.seam import HostConfig

    try:
        return cluster.check(lambda name: HostConfig.of(config, name))
    finally:
        cluster.close()


def _lacking_on(seen: Sequence[Mapping[str, Any]]) -> list[str]:
    """A warning for each thing that a host lacks for its part of the configuration."""
    from anvil_mux.config.diagnostic import Diagnostic

    lacking = [f"host {host['host']}: {why}" for host in seen for why in host["missing"]]
    return [Diagnostic(why, page="cluster.md#setting-up") for why in lacking]


def _steered_by_all(config: Config, seen: Sequence[Mapping[str, Any]]) -> list[str]:
    """A warning for each host on which whoever reaches an engine may steer it."""
    from anvil_mux.config import service
    from anvil_mux.config.diagnostic import Diagnostic

    found: list[str] = []
    for host in seen:
        names = [
            each.name
            for each in config.backends
            if each.host == host["host"]
            and service.is_steered_by_all(each.engine, dict(each.service.environment))
        ]
        if names and (said := service.steered_at(host.get("address", ""))):
            remedy = "let a firewall admit anvil-mux's machine alone"
            text = f"host {host['host']}: {', '.join(names)}: {said}; {remedy}"
            found.append(Diagnostic(text, page="cluster.md#security"))
    return found


def _lists(backend: Backend, keys: Collection[str]) -> dict[str, list[str]]:
    """The lists among these keys of a backend in the JSON of check."""
    lists = {"gpus": list(backend.gpus), "presets": [preset.name for preset in backend.presets]}
    return {key: found for key, found in lists.items() if key in keys}


def _beside(config: Config) -> dict[str, list[str]]:
    """The columns that only some configurations need: where servers elsewhere are, and fallbacks."""
    found = {"url": [each.url for each in config.backends]}
    found["fallback"] = [
        ",".join(each.fallback)
        + (f" after {each.fallback_after:g} s" if each.fallback_after is not None else "")
        for each in config.backends
    ]
    return {key: cells for key, cells in found.items() if any(cells)}


def _backend_row(config: Config, backend: Backend) -> tuple[str, ...]:
    from anvil_mux.host.engine import listen_port

    if backend.url:
        return backend.model, backend.name, backend.engine, "", "", ""
    port = "free" if config.runtime == "process" and not backend.port else str(listen_port(backend))
    vram = gib(backend.vram) if backend.vram else "all" if backend.gpus else ""
    return backend.model, backend.name, backend.engine, ",".join(backend.gpus), vram, port


def _learned(config: Config) -> Known:
    """Read the figures that anvil-mux has learned while it served these backends."""
    from anvil_mux.serve.state_files import LearnedFile
    from anvil_mux.state import state_folder

    return LearnedFile(state_folder(config.project, os.environ), say).read(config)


def _slow_loads(config: Config, known: Known) -> list[str]:
    """A warning for each model whose load, as it was learned, takes longer than a request may wait."""
    from anvil_mux.config.diagnostic import Diagnostic

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
    from anvil_mux.host import check
    from anvil_mux.host.seam import HostConfig

    found: list[str] = []
    for question in check.questions():
        try:
            found += question(HostConfig.of(config))
        except MuxError as error:
            found.append(f"no container can be started, and images were not looked for: {error.message}")
    return list(dict.fromkeys(found))


def _config(given: argparse.Namespace) -> int:
    from anvil_mux.config.table import SERVICE_SETTINGS, SETTINGS, describe

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
    if given.json:
        shown: Mapping[str, Any] = values
        if given.show_origin:
            shown = {key: {"value": value, "origin": config.origins[key]} for key, value in values.items()}
        print_json(shown)
        return 0
    rows = [(key, as_text(value), config.origins[key]) for key, value in values.items()]
    head = ("SETTING", "VALUE", "ORIGIN")
    columns = 3 if given.show_origin else 2
    print_table(head[:columns], [row[:columns] for row in rows])
    return 0


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
        case "any_of":
            return {name: each.to_json() for name, each in config.any_of.items()}
    return getattr(config, key)


def _gpus(config: Config, host: str) -> dict[str, dict[str, int]]:
    """The GPUs of a host, as the file would say them."""
    sizes = [
        (gpu.id, (("vram", gpu.vram), ("reserve", gpu.reserve))) for gpu in config.gpus if gpu.host == host
    ]
    return {id: {name: size for name, size in about if size} for id, about in sizes}


def _print_schema() -> int:
    from anvil_mux.config.schema import compose_schema
    from anvil_mux.routing import pipeline
    from anvil_mux.scheduler.eviction import EVICTIONS
    from anvil_mux.scheduler.policies import POLICIES

    print_json(
        compose_schema({"policy": [*POLICIES], "eviction": [*EVICTIONS], "routing": [*pipeline.shipped()]})
    )
    return 0


def _print_routing(given: argparse.Namespace) -> int:
    """The policies that are shipped, and those of the compose file if there is one."""
    import yaml

    from anvil_mux.config.composefile import FILE_NAMES
    from anvil_mux.config.config import DEFAULT_ROUTING
    from anvil_mux.routing import pipeline

    found = given.files or any((place / name).is_file() for place in _here_and_above() for name in FILE_NAMES)
    config = configuration(given.files) if found else None
    own = config.routing_policies if config else {}
    default = config.routing if config else DEFAULT_ROUTING
    models = {b.model: b.routing or default for b in config.backends} if config else {}
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


def _here_and_above() -> Sequence[Path]:
    here = Path.cwd()
    return (here, *here.parents)


def _print_docs(title: str, rows: Iterable[Sequence[str]]) -> None:
    print(f"### {title}\n\n| key | value | default | meaning |\n|---|---|---|---|")
    for key, kind, default, meaning in rows:
        cells = (f"`{key}`", kind.replace("|", "\\|"), default and f"`{default}`", meaning)
        print(f"| {' | '.join(cells)} |")
    print()


# logs


def _logs(given: argparse.Namespace) -> int:
    """Ask the anvil-mux that runs; where none does, or to follow a log, read what the engines left here."""
    from anvil_mux.serve import remote

    url = asking.address(given)
    place = _place(url)
    named = bool(given.url or os.environ.get("ANVIL_URL"))
    if not given.follow and (place or named or not given.files):
        try:
            return asking.logs(given, url)
        except remote.NotRunning:
            if named:
                raise
    elif named and not place:
        raise BackendError("-f follows a log only where both the engine and anvil-mux run")
    return _read_logs(given, place.files if place else given.files)


def _read_logs(given: argparse.Namespace, files: Sequence[str]) -> int:
    """Print the logs of engines on this machine, whose services are in these files."""
    from anvil_mux.host.local import LocalHost
    from anvil_mux.host.seam import HostConfig

    config = configuration(files)
    backends = [b for b in config.backends if given.model in (b.name, b.model, *b.aliases)]
    if not backends:
        known = ", ".join(b.model for b in config.backends)
        raise BackendError(f"no service serves {given.model}; known: {known}")
    if any(backend.host for backend in backends):
        only = "-f follows a log only where both the engine and anvil-mux run"
        raise BackendError(
            only
            if given.follow
            else f"{given.model} is on another host: only a running anvil-mux has its log"
        )
    if given.follow and len(backends) > 1:
        names = ", ".join(b.name for b in backends)
        raise BackendError(f"{given.model} has several services; follow one of them: {names}")
    host = LocalHost(HostConfig.of(config))
    for backend in backends:
        lines = host.follow_log(backend) if given.follow else host.log_tail(backend, given.lines)
        asking.print_log(given, backend.name, lines, headed=len(backends) > 1)
    return 0


def _place(url: str) -> RunningMux | None:
    """The anvil-mux at this address, if it says that it runs here."""
    from anvil_mux.serve import remote
    from anvil_mux.state import state_folder

    found = remote.places(state_folder("", os.environ))
    return next((each for each in found if each.url == url), None)


# bench


def _bench(given: argparse.Namespace) -> int:
    from anvil_mux.cli import bench, levels, tally

    configs = [configuration(given.files), *(configuration([file]) for file in given.also)]
    names = [backend.name for config in configs for backend in config.backends]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError([f"{', '.join(twice)}: in more than one file; give each service a name of its own"])
    with ExitStack() as outputs:
        # Whether they can be written is known before the long work begins.
        file = outputs.enter_context(opened(given.csv)) if given.csv else None
        figure = None
        if given.plot:
            from anvil_mux.lab import plot

            figure = outputs.enter_context(plot.picture(given.plot))
        found = bench.measure_all(configs, given.repeat, say, burst=given.burst)
        rows, burst_rows = tally.figures(found.swaps), tally.burst_figures(found.bursts)
        if file:
            tally.write_csv(found.swaps, file)
        if figure and rows:
            plot.draw_phases(tally.bars(rows, found.unmeasured), tally.names(rows), figure)
    if given.json:
        asked = [each.to_json() for each in found.unmeasured if each.named]
        print_json([*map(asdict, rows), *map(asdict, burst_rows), *asked])
    else:
        tables = tally.table(rows), tally.burst_table(burst_rows), levels.table(found.unmeasured)
        for head, *lines in tables:
            if lines:
                print_table(head, lines)
    code = max([complain(f"not measured: {why}", FAILED) for why in found.failed], default=0)
    return INTERRUPTED if found.was_interrupted else code


def _completion(given: argparse.Namespace) -> int:
    from anvil_mux.cli import completion

    if given.models:
        for model in asking.ask_mux(given, "GET", "/v1/models")["data"]:
            print(model["id"])
        return 0
    if not given.shell:
        given.refuse(f"say for which shell: {', '.join(completion.SHELLS)}")
    commands = next(action for action in _parser()._actions if isinstance(action.choices, dict))
    print(completion.script(given.shell, commands.choices), end="")  # type: ignore[arg-type]
    return 0


def _version(given: argparse.Namespace) -> int:
    from anvil_mux.commit import commit

    made_of = commit()
    if given.json:
        print_json({"version": __version__, "commit": made_of or None, "python": sys.version.split()[0]})
    else:
        print(f"anvil-mux {__version__}" + (f" ({made_of})" if made_of else ""))
    return 0


Add = Callable[[argparse.ArgumentParser], None]
Command = Callable[[argparse.Namespace], int]

COMMANDS: dict[str, tuple[str, Command, Add]] = {
    "serve": ("Serve the models of a compose file (the default)", _serve, _add_serve),
    "check": ("Check a compose file: list its models, GPUs and ports, and every problem", _check, _add_check),
    "config": ("Show the settings in effect", _config, _add_config),
    "import": (
        "Convert the configuration of llama-swap or Ollama to a compose file",
        importing.run,
        importing.add_arguments,
    ),
    "ps": ("Show the models and their states", asking.ps, asking.add_address),
    "top": (
        "Show models, GPUs, queues and events, updated live",
        asking.top,
        asking.add_address,
    ),
    "why": (
        "Explain what a request for a model would wait for now, and how long",
        asking.why,
        asking.add_why,
    ),
    "events": ("Show recent events and their reasons", asking.events, asking.add_events),
    "load": ("Load a model and wait until it is ready", asking.load, asking.add_model),
    "unload": (
        "Unload a model, or stop one in standby; requests still running after drain_timeout are aborted",
        asking.unload,
        asking.add_unload,
    ),
    "pause": (
        "Stop all models and load none until `resume`, to free the GPUs for other programs",
        pausing.pause,
        pausing.add_pause,
    ),
    "resume": ("End a pause", pausing.resume, asking.add_address),
    "pin": ("Keep a model from being evicted for other models", asking.pin, asking.add_model),
    "unpin": ("Allow a pinned model to be evicted again", asking.unpin, asking.add_model),
    "hosts": (
        "List the hosts of a cluster, drain one, or declare it gone",
        hosts.run,
        hosts.add_arguments,
    ),
    "requests": (
        "List the requests under way, cancel one, or show the last captured ones with their bodies",
        requests.run,
        requests.add_arguments,
    ),
    "usage": ("Show how much each API key has used each model", usage.run, usage.add_arguments),
    "reload": ("Apply changes of the compose files", asking.reload, asking.add_address),
    "logs": ("Show the last lines of an engine's log", _logs, _add_logs),
    "simulate": (
        "Compare policies on recorded or generated traffic, in virtual time",
        studying.run,
        studying.add_arguments,
    ),
    "replay": (
        "Send recorded or generated traffic to a running server and measure it",
        replaying.run,
        replaying.add_arguments,
    ),
    "profile": (
        "Measure the speed of a model's engine, for routing policies",
        asking.profile,
        asking.add_profile,
    ),
    "bench": ("Measure how long swaps take on the real engines", _bench, _add_bench),
    "completion": ("Print a shell completion script", _completion, _add_completion),
    "version": ("Show the version and the commit", _version, add_json),
}


def _report_problems(error: ConfigError, given: argparse.Namespace) -> int:
    from anvil_mux.cli import diagnostics
    from anvil_mux.config.problems import page_of

    if given.json:
        pages = [page_of(problem) for problem in error.problems]
        parts = diagnostics.as_json("error", error.problems)
        print_json({"problems": list(error.problems), "pages": pages, "diagnostics": parts})
    diagnostics.print_diagnostics([("error", problem) for problem in error.problems])
    return BAD_CONFIG
