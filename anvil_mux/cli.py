"""The commands.

What a command finds goes to standard output, as a table or with ``--json``; all else to standard error.
``EXIT_CODES`` says how commands end. ``check``, ``config`` and ``logs`` read the compose file; ``ps``,
``top``, ``why``, ``events``, ``load`` and ``unload`` ask a running anvil-mux, whose address is --url,
ANVIL_URL, what one that serves the compose file here has written down (remote.py), what that file says, or
the default.

Modules are imported by the commands that need them, because importing takes longer than most commands.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

from anvil_mux import __version__
from anvil_mux.errors import BackendError, ConfigError, MuxError
from anvil_mux.screen import MODEL_HEAD, event_line, model_row, paint, table

if TYPE_CHECKING:
    from anvil_mux import study
    from anvil_mux.clairvoyant import Ratio
    from anvil_mux.config import Backend, Config
    from anvil_mux.fleet import Engine

T = TypeVar("T")

FAILED, BAD_CONFIG, INTERRUPTED = 1, 78, 130
EXIT_CODES = {
    0: "done",
    FAILED: "it failed; standard error says why",
    2: "wrong usage",
    3: "no anvil-mux answers",
    BAD_CONFIG: "the configuration cannot be used; every problem is told",
    INTERRUPTED: "interrupted",
}
VARIABLES = {
    "ANVIL_URL": "where the anvil-mux is that commands ask",
    "ANVIL_API_KEY": "the key that they show to it",
    "ANVIL_API_KEYS": "the keys that serve accepts; see docs/security.md",
    "ANVIL_SETTING": "any setting, for serve and check (ANVIL_DRAIN_TIMEOUT=60); flags win",
    "NO_COLOR, FORCE_COLOR": "no colours at all, or colours even if nobody sees them",
    "XDG_STATE_HOME": "where what was learned and engines' logs are kept; by default ~/.local/state",
}
PROGRESS_SECONDS = 2.0
DOCKER_SECONDS = 5.0
BROKEN_SHOWN = 5
TTFT_AXIS = "mean time to the first byte (s, simulated)"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    given = _parser().parse_args(_with_command(words))
    try:
        code: int = given.run(given)
        sys.stdout.flush()
        return code
    except ConfigError as error:
        return _report_problems(error, given)
    except MuxError as error:
        return _complain(error.message, getattr(error, "exit_code", FAILED))
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read us has enough; the interpreter must not complain when it flushes at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED


# Arguments


def _with_command(words: list[str]) -> list[str]:
    """``anvil-mux FILE`` and ``anvil-mux`` alone mean ``serve``."""
    asks = {"-h", "--help", "--version"}
    first = words[0] if words else ""
    return words if first in COMMANDS or first in asks else ["serve", *words]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="anvil-mux",
        description="One address for many models: serves and swaps LLM engines from docker compose files.",
        epilog=_more_help(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"anvil-mux {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, (about, run, add) in COMMANDS.items():
        command = commands.add_parser(name, help=about, description=f"{about}.")
        command.set_defaults(run=run, json=False)
        add(command)
    return parser


def _more_help() -> str:
    parts = ["`anvil-mux FILE` means `anvil-mux serve FILE`. Help on a command: anvil-mux COMMAND --help"]
    for title, told in (("environment", VARIABLES), ("exit codes", EXIT_CODES)):
        parts += ["", f"{title}:", *(f"  {name!s:<23}{meaning}" for name, meaning in told.items())]
    return "\n".join(parts)


def _add_json(command: argparse.ArgumentParser) -> None:
    command.add_argument("--json", action="store_true", help="print JSON")


def _add_files(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "files", nargs="*", metavar="FILE", help="compose files; by default compose.yaml here or above"
    )


def _add_serve(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    _add_files(command)
    add("--host", help="address to listen on; by default what the file says, or 127.0.0.1")
    add("--port", type=_port, help="port to listen on (0: a free one); by default the file's, or 9292")
    add(
        "--insecure",
        action="store_true",
        help="listen where others can reach it, although there are no API keys",
    )
    add(
        "--drain-timeout",
        metavar="SECONDS",
        help="how long a swap waits for requests that run; 0: not at all",
    )
    add("--queue-timeout", metavar="SECONDS", help="the longest wait of a request for its model")
    add(
        "--policy",
        metavar="NAME",
        help="when a swap is worth its cost: eager, debounce, package.module:Class",
    )
    add("--on-exit", choices=("keep", "stop"), help="what happens to running engines at exit")
    add(
        "--pin",
        action=argparse.BooleanOptionalAction,
        help="serve on one CPU always, or never (default: under load, if a CPU is free); engines keep all",
    )
    add("--access-log", metavar="FILE", default="-", help="a file, - for standard error (default), or off")
    add("--log-format", choices=("human", "json"), default="human")
    add("--event-log", metavar="FILE", help="append every event to a file that `anvil-mux simulate` reads")
    add(
        "--event-log-size",
        type=_size,
        default=128 << 20,
        metavar="SIZE",
        help="set the event log aside as FILE.1 to FILE.3 when it has this size (default 128MiB; 0: never)",
    )
    add(
        "-q",
        "--quiet",
        action="store_const",
        const=-1,
        default=0,
        dest="verbosity",
        help="only what is wrong",
    )
    add(
        "-v", "--verbose", action="store_const", const=1, dest="verbosity", help="also single requests' waits"
    )


def _port(text: str) -> int:
    if not text.isdigit() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"must be from 0 to 65535, not {text}")
    return int(text)


def _size(text: str) -> int:
    from anvil_mux import settings

    try:
        return int(settings.SIZE.read(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _add_check(command: argparse.ArgumentParser) -> None:
    _add_files(command)
    _add_json(command)


def _add_config(command: argparse.ArgumentParser) -> None:
    _add_files(command)
    _add_json(command)
    command.add_argument("--show-origin", action="store_true", help="say where each value comes from")
    command.add_argument("--docs", action="store_true", help="describe every setting, as Markdown tables")
    command.add_argument(
        "--routing", action="store_true", help="show the routing policies, as they would be written"
    )


def _add_address(command: argparse.ArgumentParser) -> None:
    command.add_argument("-f", "--file", action="append", dest="files", default=[], help="compose file")
    command.add_argument("--url", help="where anvil-mux is; by default ANVIL_URL, the one that serves here")
    _add_json(command)


def _add_model(command: argparse.ArgumentParser) -> None:
    command.add_argument("model", metavar="MODEL")
    _add_address(command)


def _add_why(command: argparse.ArgumentParser) -> None:
    _add_model(command)
    command.add_argument(
        "--explain", action="store_true", help="also which replica would get it, and why not the others"
    )
    command.add_argument(
        "--tokens", type=_positive, metavar="N", help="explain for a request of so many tokens, none cached"
    )


def _add_events(command: argparse.ArgumentParser) -> None:
    command.add_argument("model", metavar="MODEL", nargs="?", default="", help="only this one's")
    command.add_argument("-f", "--follow", action="store_true", help="go on as they come")
    command.add_argument("--file", action="append", dest="files", default=[], help="compose file")
    command.add_argument("--url", help="where anvil-mux is; see `ps`")
    _add_json(command)


def _add_profile(command: argparse.ArgumentParser) -> None:
    _add_model(command)
    command.add_argument("-o", "--output", metavar="FILE", help="where to write it; by default to stdout")
    command.add_argument("--repeat", type=int, default=3, metavar="N", help="requests for each figure (3)")
    command.add_argument(
        "--prompts", type=_sizes, default=None, metavar="N,N", help="lengths of prompts, in tokens"
    )
    command.add_argument("--batches", type=_sizes, default=None, metavar="N,N", help="requests at once")
    command.add_argument(
        "--lengths", type=_sizes, default=None, metavar="N,N", help="lengths of those, in tokens"
    )


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(sorted({max(int(word), 1) for word in text.split(",")}))


def _add_logs(command: argparse.ArgumentParser) -> None:
    command.add_argument("model", metavar="MODEL", help="a model, or the service of a replica")
    command.add_argument("--file", action="append", dest="files", default=[], help="compose file")
    command.add_argument("-f", "--follow", action="store_true", help="go on as lines come")
    command.add_argument("-n", "--lines", type=int, default=100, metavar="N", help="how many (default 100)")
    _add_json(command)


def _add_simulate(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add(
        "files",
        nargs="*",
        metavar="COMPOSE",
        help="compose files: their settings, and the backends of a trace or an event log; "
        "by default every model has GPU 0 to itself",
    )
    add(
        "--routing",
        action="store_true",
        help="instead: the prompts of each --trace under each routing policy, on replicas of one model",
    )
    add(
        "--profile",
        type=_profiles,
        default=(),
        metavar="NAME[,NAME]",
        help="traffic made to order: single, balanced, bursty, dominant, interleave, mixed, or all",
    )
    add(
        "--trace",
        action="append",
        default=[],
        metavar="FILE",
        help="a workload file, or the name of one that is shipped; may be repeated. With --routing: "
        "claude_code_le64k, claude_code_le131k, mooncake_conversation_600s, or a file",
    )
    add("--log", metavar="EVENTS", help="the clients of an event log, as `serve --event-log` writes it")
    add(
        "--policy",
        metavar="NAME[,NAME]",
        help="the policies to compare; by default all: every one that needs no settings. "
        "clairvoyant knows the future, of 12 requests at most. With --routing: those of "
        "`config --routing`, and of the compose files",
    )
    add(
        "--seeds",
        type=_positive,
        default=1,
        metavar="N",
        help="draw what is random with the seeds 0 to N-1 (default 1); the table shows the means",
    )
    add(
        "--ratios",
        nargs="?",
        type=_positive,
        const=1000,
        metavar="N",
        help="instead: the total wait of each policy over the best possible, on N small random workloads "
        "(default 1000); MEAN-AHEAD: over the best that puts models out before anybody waits for another",
    )
    add("--check", action="store_true", help="check whether --log breaks an invariant")
    add(
        "--plot",
        metavar="FILE",
        help="draw who was resident, the lines and the waits, or with --routing the means of each policy "
        "(needs matplotlib)",
    )
    add("--replicas", type=_positive, metavar="N", help="with --routing: how many replicas (default 8)")
    add(
        "--sessions",
        type=_counts,
        metavar="N[,N]",
        help="with --routing: so many sessions of a trace, drawn anew for each seed (default: all)",
    )
    add(
        "--engine",
        type=_engine,
        metavar="KEY=VALUE[,..]",
        help="with --routing: what a replica can do, as kv_tokens=100000; the others of docs/routing.md",
    )
    add("--csv", metavar="FILE", help="with --routing: write every run to a file")
    _add_json(command)
    command.set_defaults(refuse=command.error)
    command.epilog = (
        "Times in the table are in seconds: from the first arrival to the last answer (MAKESPAN), of all "
        "evictions and loads together (SWAPPING), and waits. BUSY is the part of the makespan in which "
        "something was in service. Exit code 1: an invariant is broken. With --routing they are in ms: to "
        "the first byte (TTFT), to the last (E2E), between tokens (TPOT); HIT is the part of the input that "
        "was cached, BALANCE the most requests of a replica over the least."
    )


def _add_completion(command: argparse.ArgumentParser) -> None:
    command.add_argument("shell", nargs="?", choices=("bash", "zsh", "fish"))
    command.add_argument("--models", action="store_true", help="print the models of a running anvil-mux")
    command.add_argument("--url", help="where that is; see `ps`")
    command.set_defaults(refuse=command.error, files=[])
    command.epilog = 'In ~/.bashrc: eval "$(anvil-mux completion bash)"'


def _add_bench(parser: argparse.ArgumentParser) -> None:
    about = "What a swap takes, and how much of that is anvil-mux's own share"
    command = parser.add_subparsers(metavar="WHAT", required=True).add_parser(
        "swap", help=about, description=f"{about}."
    )
    add = command.add_argument
    _add_files(command)
    add("--repeat", type=_positive, default=5, metavar="N", help="measure each swap N times (default 5)")
    add("--csv", metavar="FILE", help="write every swap to a file")
    add("--plot", metavar="FILE", help="draw the phases (needs matplotlib)")
    _add_json(command)
    command.epilog = (
        "Swaps between all backends of the file that cannot stay side by side, in each way that they may "
        "rest, through a multiplexer and by hand in turn. It stops what runs of the project, and leaves "
        "nothing running. Times are medians in seconds, from the last lease's end to the first byte of the "
        "next answer. OWN-SHARE is what a swap took longer than by hand, and half of the swaps are within "
        "HALF-WITHIN: the machine's noise. COLD/BACK is a cold start over the way back, both until that "
        "byte. GIB is the GPU memory that came back, BUS what the GPU's link could carry in a second. "
        "Exit code 1: something could not be measured."
    )


def _profiles(names: str) -> tuple[str, ...]:
    from anvil_mux import study

    return _read(study.choose_profiles, names)


def _engine(settings: str) -> Engine:
    from anvil_mux import contest

    return _read(contest.read_engine, settings)


def _counts(text: str) -> tuple[int, ...]:
    return tuple(map(_positive, text.split(",")))


def _read(read: Callable[[str], T], text: str) -> T:
    try:
        return read(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, not {text}")
    return int(text)


# serve, check, config: what reads the compose file


def _serve(given: argparse.Namespace) -> int:
    from anvil_mux.serve import Options, serve

    overrides = {
        "drain_timeout": given.drain_timeout,
        "queue_timeout": given.queue_timeout,
        "policy": given.policy,
        "on_exit": given.on_exit,
    }
    config = _load(given.files, overrides, here=True)
    config = replace(
        config, host=given.host or config.host, port=config.port if given.port is None else given.port
    )
    for warning in config.warnings if given.verbosity >= 0 else ():
        _say(f"warning: {warning}")
    options = Options(
        access_log=given.access_log,
        event_log=given.event_log,
        event_log_size=given.event_log_size,
        log_format=given.log_format,
        pin=given.pin,
        insecure=given.insecure,
        verbosity=given.verbosity,
    )
    return serve(config, options)


def _load(
    files: Sequence[str], overrides: Mapping[str, object] | None = None, *, here: bool = False
) -> Config:
    """``here``: it has to work on this machine."""
    from anvil_mux import config

    present = {}
    if "NVIDIA_VISIBLE_DEVICES" in os.environ or os.path.exists("/dev/nvidiactl"):
        from anvil_mux.gpu import probe

        for reading in probe().readings:
            gpu = config.Gpu(reading.id, vram=reading.total)
            present[reading.id] = present[reading.uuid] = gpu
    return config.load(
        files or config.find_files(Path.cwd()),
        present=present,
        overrides=overrides,
        judge=_why_not_checkpoint if here else None,
    )


def _why_not_checkpoint(gpus: Sequence[str], insist: bool) -> str | None:
    from anvil_mux.checkpoint import Checkpointer

    return Checkpointer().why_not(gpus, insist=insist)


def _check(given: argparse.Namespace) -> int:
    config = _load(given.files, here=True)
    warnings = [*config.warnings, *_missing_images(config)]
    rows = [_backend_row(config, backend) for backend in config.backends]
    if given.json:
        keys = ("model", "backend", "engine", "gpus", "vram", "port")
        models = [
            {**dict(zip(keys, row, strict=True)), "gpus": row[3].split(",") if row[3] else []} for row in rows
        ]
        listen = f"{config.host}:{config.port}"
        _print_json({"listen": listen, "models": models, "problems": [], "warnings": warnings})
        return 0
    _print_table(("MODEL", "BACKEND", "ENGINE", "GPUS", "VRAM", "PORT"), rows)
    for warning in warnings:
        _say(f"warning: {warning}")
    counts = f"{_count(rows, 'backend')}, {_count(warnings, 'warning')}"
    _say(f"{counts}; will listen on {config.host}:{config.port}")
    return 0


def _backend_row(config: Config, backend: Backend) -> tuple[str, ...]:
    from anvil_mux.engine import listen_port

    port = "free" if config.runtime == "process" and not backend.port else str(listen_port(backend))
    vram = f"{backend.vram / (1 << 30):.1f} GiB" if backend.vram else "all" if backend.gpus else ""
    return backend.model, backend.name, backend.engine, ",".join(backend.gpus), vram, port


def _missing_images(config: Config) -> list[str]:
    """A warning for each image that Docker does not have."""
    import subprocess

    images = {b.service.image: b.name for b in config.backends if b.service.image}
    found = []
    for image, name in images.items() if config.runtime == "compose" else ():
        command = ["docker", "image", "inspect", "--format", "{{.Id}}", image]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=DOCKER_SECONDS)
        except (OSError, subprocess.TimeoutExpired):
            done = None
        if done is None or (done.returncode and "no such image" not in done.stderr.lower()):
            _say("note: Docker does not answer, so images were not looked for")
            break
        if done.returncode:
            found.append(f"service {name}: image {image} is not present: docker pull {image}")
    return found


def _config(given: argparse.Namespace) -> int:
    from anvil_mux.config import SERVICE_SETTINGS, SETTINGS, describe

    if given.docs:
        _print_docs("x-anvil at the top level", describe(SETTINGS))
        _print_docs("x-anvil on a service", describe(SERVICE_SETTINGS))
        return 0
    if given.routing:
        return _print_routing(given)
    config = _load(given.files)
    values = {key: _value(config, key) for key in SETTINGS}
    if given.json:
        shown: Mapping[str, Any] = values
        if given.show_origin:
            shown = {key: {"value": value, "origin": config.origins[key]} for key, value in values.items()}
        _print_json(shown)
        return 0
    rows = [(key, _text(value), config.origins[key]) for key, value in values.items()]
    head = ("SETTING", "VALUE", "ORIGIN")
    columns = 3 if given.show_origin else 2
    _print_table(head[:columns], [row[:columns] for row in rows])
    return 0


def _value(config: Config, key: str) -> Any:
    """A setting as the file would say it."""
    match key:
        case "listen":
            return f"{config.host}:{config.port}"
        case "gpus":
            sizes = ((gpu.id, {"vram": gpu.vram, "reserve": gpu.reserve}) for gpu in config.gpus)
            return {id: {name: size for name, size in about.items() if size} for id, about in sizes}
        case "hooks":
            return [{name: said for name, said in asdict(hook).items() if said} for hook in config.hooks]
        case "policy" | "preemption":
            settings = getattr(config, f"{key}_settings")
            name = getattr(config, key)
            return {"name": name, **settings} if settings else name
        case "routing" if config.routing_policies or config.routing_mode != "lite" or config.routing_store:
            mode, policies = config.routing_mode, config.routing_policies
            store = re.sub("//.*@", "//***@", config.routing_store)  # may hold a password
            return {"default": config.routing, "mode": mode, "policies": policies, "store": store}
    return getattr(config, key)


def _print_routing(given: argparse.Namespace) -> int:
    """The policies that are shipped, and those of the compose file if there is one."""
    import yaml

    from anvil_mux import pipeline
    from anvil_mux.composefile import FILE_NAMES

    found = given.files or any((place / name).is_file() for place in _here_and_above() for name in FILE_NAMES)
    config = _load(given.files) if found else None
    own = config.routing_policies if config else {}
    default = config.routing if config else pipeline.DEFAULT
    models = {b.model: b.routing or default for b in config.backends} if config else {}
    if given.json:
        _print_json({"default": default, "models": models, "policies": {**pipeline.shipped(), **own}})
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


# ps, load, unload: what asks a running anvil-mux


def _ps(given: argparse.Namespace) -> int:
    status = _ask(given, "GET", "/healthz", accept=(200, 503))
    if given.json:
        _print_json(status)
        return 0
    _print_table(MODEL_HEAD, [model_row(name, model) for name, model in status["models"].items()])
    for name, why in (status.get("problems") or {}).items():
        _say(f"warning: {name}: {why}")
    return 0


def _load_model(given: argparse.Namespace) -> int:
    """Waits in this thread and asks in another, so that it can tell what happens meanwhile."""
    answers: list[Any] = []

    def ask() -> None:
        try:
            answers.append(
                _ask(given, "POST", "/models/load?wait=true", {"model": given.model}, timeout=None)
            )
        except MuxError as error:
            answers.append(error)

    thread = threading.Thread(target=ask, name="load", daemon=True)
    thread.start()
    waited = 0.0
    while thread.is_alive():
        thread.join(PROGRESS_SECONDS)
        waited += PROGRESS_SECONDS
        if thread.is_alive() and sys.stderr.isatty():
            _say(f"{given.model}: {_state_of(given)}, {waited:.0f} s")
    if isinstance(answers[0], MuxError):
        raise answers[0]
    return _done(given, "is loaded")


def _state_of(given: argparse.Namespace) -> str:
    try:
        models = _ask(given, "GET", "/healthz", accept=(200, 503))["models"]
    except MuxError as error:
        return error.message
    return str(models.get(given.model, {}).get("state", "loading"))


def _unload_model(given: argparse.Namespace) -> int:
    _ask(given, "POST", "/models/unload", {"model": given.model})
    return _done(given, "leaves as soon as its requests have ended")


def _profile(given: argparse.Namespace) -> int:
    from anvil_mux import profiler

    engine = profiler.Profiler(_url(given), given.model, os.environ.get("OPENAI_API_KEY", ""))
    found = profiler.measure(
        engine,
        _say,
        prompts=given.prompts or profiler.PROMPTS,
        batches=given.batches or profiler.BATCHES,
        lengths=given.lengths or profiler.LENGTHS,
        repeat=max(given.repeat, 1),
    )
    if given.output:
        Path(given.output).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        _say(f"written to {given.output}; use it: x-anvil: {{profile: {given.output}}}")
    else:
        _print_json(found)
    return 0


def _done(given: argparse.Namespace, what: str) -> int:
    if given.json:
        _print_json({"model": given.model, "success": True})
    else:
        _say(f"{given.model} {what}")
    return 0


def _ask(given: argparse.Namespace, method: str, path: str, body: object = None, **how: Any) -> Any:
    from anvil_mux import remote

    return remote.ask(_url(given), method, path, body, **how)


def _url(given: argparse.Namespace) -> str:
    """Where it is: as told, where one says that it serves the file at hand, what that says, the usual."""
    from anvil_mux import remote
    from anvil_mux.config import find_files
    from anvil_mux.process import state_folder

    url = given.url or os.environ.get("ANVIL_URL")
    if not url:
        home = state_folder("", os.environ)
        try:
            files: Sequence[str | Path] = given.files or find_files(Path.cwd())
        except ConfigError:
            files = ()
        found = remote.places(home)
        url = remote.choose(found, files) or _configured_url(given.files) or remote.DEFAULT_URL
    return url if "://" in url else f"http://{url}"


def _configured_url(files: Sequence[str]) -> str | None:
    """What the compose file says, read lightly: the rest of it is not asked for here, right or wrong."""
    from anvil_mux import interpolate
    from anvil_mux.config import SETTINGS, find_files

    try:
        paths = [Path(file) for file in files] or find_files(Path.cwd())
        document = interpolate.read(paths[-1])
        scope = interpolate.Scope(interpolate.environment(document.file.parent, os.environ))
        said = os.environ.get("ANVIL_LISTEN") or scope.fill(str(document.content["x-anvil"]["listen"]))
        host, port = SETTINGS["listen"].kind.read(said)
    except (ConfigError, ValueError, KeyError, TypeError):
        if files and not Path(files[0]).exists():
            raise
        return None
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _why(given: argparse.Namespace) -> int:
    from anvil_mux import remote

    found = _ask(given, "GET", remote.query("/why", model=given.model, tokens=str(given.tokens or 0)))
    if given.json:
        _print_json(found)
        return 0
    print(found["sentence"])
    if given.explain or given.tokens:
        for stage, rows in found["stages"].items():
            _print_explained(stage, rows)
    return 0


def _print_explained(stage: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Each replica, the step of the policy that removes it, and what the metrics say of it."""
    names = list(dict.fromkeys(name for row in rows for name in row["metrics"]))
    shown = [
        (
            row["backend"],
            "chosen" if row["chosen"] else row["removed_by"],
            *[_number(row["metrics"].get(name)) for name in names],
        )
        for row in rows
    ]
    _print_table(("REPLICA" if stage == "neutral" else stage.upper(), "REMOVED BY", *names), shown)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"


def _events(given: argparse.Namespace) -> int:
    from anvil_mux import remote

    for kind, data in remote.events(_url(given)):
        for event in data["events"] if kind == "snapshot" else (data,) if kind == "event" else ():
            if given.model in ("", event["model"]):
                print(json.dumps(event) if given.json else event_line(event), flush=True)
        if kind == "lost":
            _say(f"{data['events']} events came faster than they were read, and are lost")
        if not given.follow:
            break
    return 0


def _top(given: argparse.Namespace) -> int:
    """Draws the picture anew whenever something has changed; once, where it is no terminal."""
    from anvil_mux import remote
    from anvil_mux.screen import Picture

    picture, live = Picture(), sys.stdout.isatty()
    for kind, data in remote.events(_url(given)):
        picture.take(kind, data)
        if given.json:
            print(json.dumps({"kind": kind, **data}), flush=True)
        elif live:
            height = os.get_terminal_size().lines - 1
            shown = [f"{line}\x1b[K\n" for line in picture.lines(time.time())[:height]]
            print("\x1b[H" + "".join(shown) + "\x1b[J", end="", flush=True)
        else:
            print("\n".join(picture.lines(time.time())))
            break
    return 0


# logs


def _logs(given: argparse.Namespace) -> int:
    from anvil_mux.serve import build_runtime

    config = _load(given.files or _files_served())
    backends = [b for b in config.backends if given.model in (b.name, b.model, *b.aliases)]
    if not backends:
        known = ", ".join(b.model for b in config.backends)
        raise BackendError(f"no service serves {given.model}; known: {known}")
    if given.follow and len(backends) > 1:
        names = ", ".join(b.name for b in backends)
        raise BackendError(f"{given.model} has several services; follow one of them: {names}")
    runtime = build_runtime(config)
    for backend in backends:
        if len(backends) > 1 and not given.json:
            _say(f"==> {backend.name}")
        lines = runtime.follow_log(backend) if given.follow else runtime.log_tail(backend, given.lines)
        for line in lines:
            told = json.dumps({"service": backend.name, "line": line}) if given.json else line
            print(told, flush=given.follow)
    return 0


def _files_served() -> Sequence[str]:
    """Where no compose file is at hand, those of the one anvil-mux that runs here or that ANVIL_URL names."""
    from anvil_mux import remote
    from anvil_mux.config import find_files
    from anvil_mux.process import state_folder

    try:
        find_files(Path.cwd())
    except ConfigError:
        url = os.environ.get("ANVIL_URL")
        found = [p for p in remote.places(state_folder("", os.environ)) if not url or p.url == url]
        return found[0].files if len(found) == 1 else ()
    return ()


# simulate


def _simulate(given: argparse.Namespace) -> int:
    from anvil_mux import plot, study

    if given.routing:
        return _simulate_routing(given)
    policies = _policies(given, study.choose_policies)
    if given.ratios:
        return _ratios(given, policies)
    _refuse_what_makes_no_sense(given)
    if given.plot:
        plot.check_file(given.plot)
    config = _load(given.files) if given.files else None
    cases = [*study.profiles(given.profile, given.seeds, config)]
    cases += [study.trace(name, config) for name in given.trace]
    runs = []
    if given.log:
        recording = study.read_log(given.log, config, _say)
        runs.append(recording.run(checked=given.check))
        if given.policy or not given.check:
            cases.append(recording.case())
    total = len(cases) * len(policies)
    tell = _progress(f"of {total} runs")
    for run in study.study(cases, policies, keep_logs=bool(given.plot)):
        runs.append(run)
        tell(len(runs))
    if given.plot:
        plot.draw([(run.title, run.log, run.config) for run in runs if run.seed == 0], given.plot)
    if given.json:
        _print_json([run.row() for run in runs])
    else:
        _print_table(study.HEAD, study.table(runs))
    return _blame(runs)


def _refuse_what_makes_no_sense(given: argparse.Namespace) -> None:
    if not (given.profile or given.trace or given.log):
        given.refuse("say what to run: --profile NAME, --trace FILE, --log EVENTS or --ratios")
    if given.check and not given.log:
        given.refuse("--check is for what --log names; simulations are always checked")
    for name in ("replicas", "sessions", "engine", "csv"):
        if getattr(given, name):
            given.refuse(f"--{name} is for --routing")


def _policies(given: argparse.Namespace, choose: Callable[[str], tuple[str, ...]]) -> tuple[str, ...]:
    try:
        return choose(given.policy or "all")
    except ValueError as error:
        given.refuse(f"argument --policy: {error}")
        raise  # not reached: refuse ends the program


def _simulate_routing(given: argparse.Namespace) -> int:
    from anvil_mux import contest, fleet, pipeline, plot

    if given.profile or given.log or given.ratios or given.check or not given.trace:
        given.refuse("--routing replays prompts: it takes --trace, and neither --profile, --log nor --ratios")
    own = _load(given.files).routing_policies if given.files else {}
    policies = _policies(given, lambda names: contest.choose_policies(names, own))
    engine, replicas = given.engine or fleet.Engine(), given.replicas or 8
    drawn = list(contest.draw(given.trace, given.sessions or (), range(given.seeds), replicas, engine))
    with ExitStack() as outputs:
        # Whether they can be written is known before the long work begins.
        file = outputs.enter_context(_written(given.csv)) if given.csv else None
        figure = outputs.enter_context(plot.picture(given.plot)) if given.plot else None
        tell = _progress(f"of {len(drawn) * len(policies)} runs")
        results = []
        for field in drawn:
            for policy in policies:
                results.append(contest.run(field, policy, own))
                tell(len(results))
        if file:
            contest.write_csv(results, file)
        if figure:
            plot.draw_dots(contest.panels(results), pipeline.DEFAULT, TTFT_AXIS, figure)
    if given.json:
        _print_json([result.row() for result in results])
    else:
        _print_table(contest.HEAD, contest.table(results))
    return 0


def _ratios(given: argparse.Namespace, policies: Sequence[str]) -> int:
    from anvil_mux import study

    if given.profile or given.trace or given.log or given.plot or given.files:
        given.refuse("--ratios draws its own workloads; it takes --policy and --json only")
    tell = _progress(f"of {given.ratios} workloads")
    rows = study.ratios(policies, given.ratios, tell)
    if given.json:
        _print_json([asdict(row) for row in rows])
    else:
        head = ("POLICY", "WORKLOADS", "MEAN", "WORST", "ITS-SEED", "MEAN-AHEAD")
        _print_table(head, [_ratio_row(row) for row in rows])
    return 0


def _ratio_row(row: Ratio) -> tuple[str, ...]:
    figures = (f"{row.mean:.3f}", f"{row.worst:.2f}", f"{row.worst_seed}", f"{row.mean_ahead:.3f}")
    return row.policy, f"{row.instances}", *figures


def _progress(what: str) -> Callable[[int], None]:
    """Whoever sees that it takes long is told how far it is."""
    told = time.monotonic()

    def tell(done: int) -> None:
        nonlocal told
        if sys.stderr.isatty() and time.monotonic() - told > PROGRESS_SECONDS:
            told = time.monotonic()
            _say(f"{done} {what}")

    return tell


def _blame(runs: Iterable[study.Run]) -> int:
    """Says what is broken, if something is; the exit code."""
    code = 0
    for run in runs:
        for line in (run.wrong or ())[:BROKEN_SHOWN]:
            code = _complain(f"{run.title}: broken invariant: {line}", FAILED)
    return code


# bench


def _bench(given: argparse.Namespace) -> int:
    from anvil_mux import bench, tally

    config = _load(given.files)
    with ExitStack() as outputs:
        # Whether they can be written is known before the long work begins.
        file = outputs.enter_context(_written(given.csv)) if given.csv else None
        figure = None
        if given.plot:
            from anvil_mux import plot

            figure = outputs.enter_context(plot.picture(given.plot))
        swaps, failed = bench.measure(config, given.repeat, _say)
        rows = tally.figures(swaps)
        if file:
            tally.write_csv(swaps, file)
        if figure:
            bars = {f"{row.backend}, {row.way}": row.phases for row in rows}
            plot.draw_phases(bars, tally.names(rows), [row.by_hand_seconds for row in rows], figure)
    if given.json:
        _print_json([asdict(row) for row in rows])
    elif rows:
        head, *lines = tally.table(rows)
        _print_table(head, lines)
    return max([_complain(f"not measured: {why}", FAILED) for why in failed], default=0)


@contextmanager
def _written(path: str) -> Iterator[TextIO]:
    try:
        file = open(path, "w", newline="", encoding="utf-8")  # noqa: SIM115 (closed by the with below)
    except OSError as error:
        raise MuxError(f"{path} cannot be written: {error.strerror}") from None
    with file:
        yield file


def _completion(given: argparse.Namespace) -> int:
    from anvil_mux import completion

    if given.models:
        for model in _ask(given, "GET", "/v1/models")["data"]:
            print(model["id"])
        return 0
    if not given.shell:
        given.refuse(f"say for which shell: {', '.join(completion.SHELLS)}")
    commands = next(action for action in _parser()._actions if isinstance(action.choices, dict))
    print(completion.script(given.shell, commands.choices), end="")  # type: ignore[arg-type]
    return 0


def _version(given: argparse.Namespace) -> int:
    if given.json:
        _print_json({"version": __version__, "python": sys.version.split()[0]})
    else:
        print(f"anvil-mux {__version__}")
    return 0


Add = Callable[[argparse.ArgumentParser], None]
Run = Callable[[argparse.Namespace], int]

COMMANDS: dict[str, tuple[str, Run, Add]] = {
    "serve": ("Serve the models of a compose file (the default)", _serve, _add_serve),
    "check": ("List the models, GPUs and ports of a compose file and every problem", _check, _add_check),
    "config": ("Show the settings in effect", _config, _add_config),
    "ps": ("Show the models of a running anvil-mux", _ps, _add_address),
    "top": ("Show the same as it changes, with GPUs, lines and the last events", _top, _add_address),
    "why": ("Say what a request for a model would wait for now, how long and why", _why, _add_why),
    "events": ("Show what happened lately, with reasons", _events, _add_events),
    "load": ("Load a model and wait until it is ready", _load_model, _add_model),
    "unload": ("Put a model out, or stop one that rests", _unload_model, _add_model),
    "logs": ("Show the last lines that a model's engine printed", _logs, _add_logs),
    "simulate": ("Run traffic under each policy in virtual time", _simulate, _add_simulate),
    "profile": ("Measure how fast a model's engine is, for routing", _profile, _add_profile),
    "bench": ("Measure what swaps take, on the real engines", _bench, _add_bench),
    "completion": ("Print what makes a shell complete these commands", _completion, _add_completion),
    "version": ("Show the version", _version, _add_json),
}


# Output


def _say(text: str) -> None:
    print(f"anvil-mux: {text}", file=sys.stderr, flush=True)


def _complain(text: str, code: int) -> int:
    _say(f"{paint('error', '31', sys.stderr)}: {text}")
    return code


def _report_problems(error: ConfigError, given: argparse.Namespace) -> int:
    if given.json:
        _print_json({"problems": list(error.problems)})
    for problem in error.problems:
        _complain(problem, BAD_CONFIG)
    return BAD_CONFIG


def _print_json(value: object) -> None:
    print(json.dumps(value, indent=2))


def _print_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    for line in table(head, rows):
        print(line)


def _text(value: object) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value)


def _count(things: Sequence[object], name: str) -> str:
    return f"{len(things)} {name}" + ("" if len(things) == 1 else "s")
