"""The commands: which there are, how their words are read, and how they end; ``serve``, the default.

``EXIT_CODES`` says how commands end. Modules are imported by the commands that need them, because importing
takes longer than most commands.

The script for the completion of shells is made from the parser itself, so that it knows every command:
``eval "$(anvil-mux completion bash)"`` in ``~/.bashrc`` (zsh: the same in ``~/.zshrc``), or
``anvil-mux completion fish | source``. Where a model's name belongs, a running anvil-mux is asked for them.
"""

from __future__ import annotations

import argparse
import errno
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anvil_mux import __version__, commit
from anvil_mux.cli import checking, importing, measuring, operating, screen, studying
from anvil_mux.cli.arguments import (
    add_address,
    add_cluster,
    add_files,
    add_json,
    add_model,
    add_url,
    argument,
    ask,
    configuration,
    reached,
    read_port,
    reader,
    subcommand,
)
from anvil_mux.cli.output import (
    BAD_CONFIG,
    FAILED,
    INTERRUPTED,
    answer,
    complain,
    diagnostics_as_json,
    print_diagnostics,
    print_json,
)
from anvil_mux.errors import ConfigError, MuxError

if TYPE_CHECKING:
    from anvil_mux.cluster.cluster import Cluster
    from anvil_mux.config.config import Config

EXIT_CODES = {
    0: "done",
    FAILED: "the command failed; standard error says why",
    2: "wrong usage",
    3: "no running anvil-mux answers",
    70: "`serve` has lost a thread that it needs, which standard error names: start it again; engines run on",
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


def _report_problems(error: ConfigError, given: argparse.Namespace) -> int:
    found = [("error", problem) for problem in error.problems]
    if given.json:
        parts = diagnostics_as_json(found)
        pages = [part["page"] for part in parts]
        print_json({"problems": list(error.problems), "pages": pages, "diagnostics": parts})
    print_diagnostics(found)
    return BAD_CONFIG


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
    argument(parser, "--version", "show the version and exit", action="store_true")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, (about, run, groups) in COMMANDS.items():
        command = subcommand(commands, name, about)
        command.set_defaults(run=run, json=False, refuse=command.error)
        for add in groups:
            add(command)
    return parser


def _more_help() -> str:
    parts = ["`anvil-mux FILE` means `anvil-mux serve FILE`. Help on a command: anvil-mux COMMAND --help"]
    for title, told in (("environment", VARIABLES), ("exit codes", EXIT_CODES)):
        parts += ["", f"{title}:", *(f"  {name!s:<23}{meaning}" for name, meaning in told.items())]
    return "\n".join(parts)


# serve


def _add_serve(command: argparse.ArgumentParser) -> None:
    add = partial(argument, command)
    add_files(command)
    add(
        "--demo",
        "serve two simulated models, to try it out: no compose file, GPU or Docker needed",
        action="store_true",
    )
    add("--host", "address to listen on; by default the one in the file, or 127.0.0.1")
    add("--port", "port to listen on (0: any free one); by default the file's, or 9292", type=read_port)
    add(
        "--insecure",
        "allow an address that others can reach, although no API keys are set",
        action="store_true",
    )
    add(
        "--drain-timeout SECONDS",
        "how long a swap waits for running requests before it aborts them; 0: not at all",
    )
    add("--queue-timeout SECONDS", "the longest time a request waits for its model")
    add(
        "--policy NAME", "the policy that decides when to swap: adaptive, eager, ..., or package.module:Class"
    )
    add("--on-exit", "whether engines keep running or are stopped at exit", choices=("keep", "stop"))
    add_cluster(command)
    add("--takeover", "take the cluster over from another anvil-mux, which then exits", action="store_true")
    add(
        "--pin",
        "serve requests on one CPU (default), or on all; engines use all",
        action=argparse.BooleanOptionalAction,
        default=True,
    )
    add("--watch", "reload whenever a configuration file changes", action="store_true")
    add(
        "--access-log FILE",
        "where to log requests: a file, - for standard error (default), or off",
        default="-",
    )
    add(
        "--log-format",
        "format of the log and of the access log (default human)",
        choices=("human", "json"),
        default="human",
    )
    add("--event-log FILE", "append every event to a file, which `anvil-mux simulate` can read")
    add(
        "--event-log-size SIZE",
        "rotate the event log to FILE.1, FILE.2 and FILE.3 at this size (default 128MiB; 0: never)",
        type=reader("config.kinds:SIZE.read"),
        default=128 << 20,
    )
    add("-q --quiet", "log only problems", action="store_const", const=-1, default=0, dest="verbosity")
    add(
        "-v --verbose",
        "log the waits of single requests too",
        action="store_const",
        const=1,
        dest="verbosity",
    )


def _serve(given: argparse.Namespace) -> int:
    from anvil_mux.serve.files import own_address
    from anvil_mux.serve.invocation import Options
    from anvil_mux.serve.invocation import say as tell
    from anvil_mux.serve.program import serve

    if given.demo:
        _choose_demo(given)
    cluster = reached(given, is_serving=True)
    config = _configuration_served(given, cluster)
    for warning in [*config.warnings, *own_address(config)] if given.verbosity >= 0 else ():
        tell(f"warning: {warning}", given.log_format)
    options = Options(**{each.name: getattr(given, each.name) for each in fields(Options)})
    return serve(config, options, partial(_configuration_served, given, cluster), cluster)


def _choose_demo(given: argparse.Namespace) -> None:
    """Serve the compose file that comes with the package, and stop its engines at the end."""
    if given.files:
        given.refuse("--demo has its own compose file: leave out either --demo or FILE")
    given.files = [str(DEMO)]
    given.on_exit = given.on_exit or "stop"
    # The file names it: a Python on PATH may be older than this one, or missing.
    os.environ.setdefault("PYTHON", sys.executable)


def _configuration_served(given: argparse.Namespace, cluster: Cluster | None = None) -> Config:
    """The configuration as it is now, with what the command line says."""
    overrides = {
        "drain_timeout": given.drain_timeout,
        "queue_timeout": given.queue_timeout,
        "policy": given.policy,
        "on_exit": given.on_exit,
    }
    hosts = cluster.known_machines() if cluster else {}
    config = configuration(given.files, overrides, here=True, hosts=hosts)
    port = config.port if given.port is None else given.port
    return replace(config, host=given.host or config.host, port=port)


# completion

SHELLS = ("bash", "zsh", "fish")
MODEL = "MODEL"
"""The metavar of an argument that names a model."""

_BASH = """\
_anvil_mux() {
    local word=${COMP_WORDS[COMP_CWORD]} command=${COMP_WORDS[1]} choices=
    if [ "$COMP_CWORD" -eq 1 ]; then choices="%(commands)s"; else
        case $command in
%(cases)s
        esac
        if [[ $word != -* ]]; then
            case $command in
                %(models)s) choices=$(anvil-mux completion --models 2>/dev/null) ;;
                *) choices= ;;
            esac
        fi
    fi
    COMPREPLY=($(compgen -W "$choices" -- "$word"))
}
complete -o default -F _anvil_mux anvil-mux
"""
_ZSH = "autoload -U +X compinit bashcompinit && compinit && bashcompinit\n"
_FISH = r"""complete -c anvil-mux -n __fish_use_subcommand -a "%(commands)s" -f
complete -c anvil-mux -n "__fish_seen_subcommand_from %(models)s" -f \
    -a "(anvil-mux completion --models 2>/dev/null)"
"""


def _add_completion(command: argparse.ArgumentParser) -> None:
    command.add_argument("shell", nargs="?", choices=SHELLS)
    argument(command, "--models", "print the models of a running anvil-mux", action="store_true")
    add_url(command)
    command.set_defaults(files=[])
    command.epilog = 'In ~/.bashrc: eval "$(anvil-mux completion bash)"'


def _completion(given: argparse.Namespace) -> int:
    if given.models:
        for model in ask(given, "GET", "/v1/models")["data"]:
            print(model["id"])
        return 0
    if not given.shell:
        given.refuse(f"say for which shell: {', '.join(SHELLS)}")
    commands = next(action for action in _parser()._actions if isinstance(action.choices, dict))
    print(_script(given.shell, commands.choices), end="")  # type: ignore[arg-type]
    return 0


def _script(shell: str, parsers: Mapping[str, argparse.ArgumentParser]) -> str:
    """The script that a shell has to read; ``parsers`` are those of the commands."""
    models = [name for name, parser in parsers.items() if _takes_model(parser)]
    if shell == "fish":
        lines = [_FISH % {"commands": " ".join(parsers), "models": " ".join(models)}]
        for name, parser in parsers.items():
            words = (f"-l {option[2:]}" for option in _options(parser))
            lines += [f'complete -c anvil-mux -n "__fish_seen_subcommand_from {name}" {w}\n' for w in words]
        return "".join(lines)
    cases = [f'            {name}) choices="{" ".join(_options(p))}" ;;' for name, p in parsers.items()]
    text = _BASH % {
        "commands": " ".join(parsers),
        "cases": "\n".join(cases),
        "models": "|".join(models),
    }
    return _ZSH + text if shell == "zsh" else text


def _options(parser: argparse.ArgumentParser) -> list[str]:
    found = [option for action in parser._actions for option in action.option_strings]
    return sorted(option for option in found if option.startswith("--"))


def _takes_model(parser: argparse.ArgumentParser) -> bool:
    return any(action.metavar == MODEL for action in parser._actions)


# version


def _version(given: argparse.Namespace) -> int:
    made_of = commit()
    found = {"version": __version__, "commit": made_of or None, "python": sys.version.split()[0]}
    shown = f"anvil-mux {__version__}" + (f" ({made_of})" if made_of else "")
    return answer(given, found, lambda _: print(shown))


Add = Callable[[argparse.ArgumentParser], None]
Command = Callable[[argparse.Namespace], int]

COMMANDS: dict[str, tuple[str, Command, Sequence[Add]]] = {
    "serve": ("Serve the models of a compose file (the default)", _serve, [_add_serve]),
    "check": (
        "Check a compose file: list its models, GPUs and ports, and every problem",
        checking.check,
        [checking.add_check],
    ),
    "config": ("Show the settings in effect", checking.show_config, [checking.add_config]),
    "import": (
        "Convert the configuration of llama-swap, llama.cpp or Ollama to a compose file",
        importing.import_,
        [importing.add_import],
    ),
    "ps": ("Show the models and their states", screen.ps, [add_address]),
    "top": ("Show models, GPUs, queues and events, updated live", screen.top, [add_address]),
    "why": (
        "Explain what a request for a model would wait for now, and how long",
        screen.why,
        [screen.add_why, add_address],
    ),
    "events": ("Show recent events and their reasons", screen.events, [screen.add_events, add_address]),
    "load": ("Load a model and wait until it is ready", operating.load, [add_model, add_address]),
    "unload": (
        "Unload a model, or stop one in standby; requests still running after drain_timeout are aborted",
        operating.unload,
        [operating.add_unload, add_address],
    ),
    "stop": (
        "Stop the engines that an anvil-mux has left running, or all that a running one has loaded",
        operating.stop,
        [operating.add_stop, add_address],
    ),
    "pause": (
        "Stop all models and load none until `resume`, to free the GPUs for other programs",
        operating.pause,
        [operating.add_pause, add_address],
    ),
    "resume": ("End a pause", operating.resume, [add_address]),
    "pin": ("Keep a model from being evicted for other models", operating.pin, [add_model, add_address]),
    "unpin": ("Allow a pinned model to be evicted again", operating.unpin, [add_model, add_address]),
    "hosts": (
        "List the hosts of a cluster, drain one, or declare it gone",
        operating.hosts,
        [operating.add_hosts],
    ),
    "requests": (
        "List the requests under way, cancel one, or show the last captured ones with their bodies",
        operating.requests,
        [operating.add_requests, add_address],
    ),
    "usage": (
        "Show how much each API key has used each model",
        operating.usage,
        [operating.add_usage, add_address],
    ),
    "reload": ("Apply changes of the compose files", operating.reload, [add_address]),
    "logs": ("Show the last lines of an engine's log", operating.logs, [operating.add_logs, add_address]),
    "simulate": (
        "Compare policies on recorded or generated traffic, in virtual time",
        studying.run,
        [studying.add_arguments],
    ),
    "replay": (
        "Send recorded or generated traffic to a running server and measure it",
        measuring.replay,
        [measuring.add_replay],
    ),
    "profile": (
        "Measure the speed of a model's engine, for routing policies",
        measuring.profile,
        [add_model, add_address, measuring.add_profile],
    ),
    "bench": ("Measure how long swaps take on the real engines", measuring.bench, [measuring.add_bench]),
    "completion": ("Print a shell completion script", _completion, [_add_completion]),
    "version": ("Show the version and the commit", _version, [add_json]),
}
"""Name -> what it does, what does it, and the groups of its arguments, in the order of its help."""
