"""Arguments that several commands have, how their values are read, and what they name.

They name a configuration, by compose files, or a running anvil-mux. Its address is --url, ANVIL_URL, what one
that serves the compose file here has written down (remote.py), what that file says, or the default.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, TypeAlias

from anvil_mux.cli.output import say
from anvil_mux.clock import count_in
from anvil_mux.errors import ConfigError

if TYPE_CHECKING:
    from anvil_mux.cluster.cluster import Cluster
    from anvil_mux.config.config import Config
    from anvil_mux.config.machines import Gpu, Machine
    from anvil_mux.lab.workload import ClientGroups
    from anvil_mux.serve.remote import RunningMux

Subcommands: TypeAlias = "argparse._SubParsersAction[Any]"

# Arguments


def argument(command: argparse.ArgumentParser, words: str, about: str, **how: Any) -> None:
    """Add an argument to a command; ``words``: its names, and at the end what its value is called."""
    names = words.split()
    if len(names) > 1 and not names[-1].startswith("-"):
        how["metavar"] = names.pop()
    command.add_argument(*names, help=about, **how)


def subcommand(commands: Subcommands, name: str, about: str) -> argparse.ArgumentParser:
    """Add a command of its own arguments; ``about``: what it does."""
    parser: argparse.ArgumentParser = commands.add_parser(name, help=about, description=f"{about}.")
    return parser


def add_json(command: argparse.ArgumentParser) -> None:
    argument(command, "--json", "print JSON", action="store_true")


def add_files(command: argparse.ArgumentParser) -> None:
    argument(
        command, "files FILE", "compose files; by default compose.yaml in this folder or one above", nargs="*"
    )


def add_cluster(command: argparse.ArgumentParser) -> None:
    argument(
        command,
        "--cluster HEAD:PORT",
        "also use the hosts of a Ray cluster; `local` simulates three hosts on this machine",
    )
    argument(command, "--insecure-cluster", "allow a cluster that requires no token", action="store_true")


def add_model(command: argparse.ArgumentParser) -> None:
    argument(command, "model MODEL", "the model's name")


def add_file(command: argparse.ArgumentParser, default: Any = None) -> None:
    argument(command, "--file FILE", "compose file", action="append", dest="files", default=default or [])


def add_url(command: argparse.ArgumentParser, default: Any = None) -> None:
    argument(command, "--url", "address of anvil-mux; see `ps`", default=default)


def add_address(command: argparse.ArgumentParser) -> None:
    add_file(command)
    argument(command, "--url", "address of anvil-mux; by default ANVIL_URL, or the one that runs here")
    add_json(command)


def add_clients(command: argparse.ArgumentParser) -> None:
    """The settings of the profile ``clients``; ``clients`` reads them."""
    add = partial(argument, command)
    add(
        "--clients N+N..",
        "for --profile clients: how many clients each model has (default 4+4), each of whom asks again "
        "when it is answered",
        dest="counts",
        type=reader("lab.workload:read_clients"),
    )
    for name, dest, what in (
        ("load", "load_seconds", "a load (default 1.2)"),
        ("evict", "stop_seconds", "an eviction (default 0.2)"),
        ("answer", "answer_seconds", "an answer, at the mean (default 2)"),
        ("think", "think_seconds", "the time between an answer and the client's next request (default 0)"),
        ("seconds", "seconds", "the whole run (default 600)"),
    ):
        about = f"for --profile clients: seconds of {what}"
        add(f"--{name} S", about, dest=dest, type=reader("config.kinds:read_seconds"))


def clients(given: argparse.Namespace) -> ClientGroups:
    """The clients of the profile of that name; refuses their settings without it."""
    from anvil_mux.lab.workload import ClientGroups

    values = {each.name: getattr(given, each.name) for each in fields(ClientGroups)}
    chosen = {name: value for name, value in values.items() if value is not None}
    if chosen and "clients" not in given.profile:
        given.refuse("--clients, --load, --evict, --answer, --think and --seconds are for --profile clients")
    return ClientGroups(**chosen)


# Values


def reader(name: str) -> Callable[[str], Any]:
    """A reader of values by a function, MODULE:NAME, which is imported when there is a value to read."""

    def read(text: str) -> Any:
        try:
            return resolve_name(f"anvil_mux.{name}")(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read


def read_port(text: str) -> int:
    if count_in(text, 65535) is None:
        raise argparse.ArgumentTypeError(f"must be from 0 to 65535, not {text}")
    return int(text)


def read_sizes(text: str) -> tuple[int, ...]:
    return tuple(sorted({max(int(word), 1) for word in text.split(",")}))


read_positive = reader("config.kinds:COUNT.read")


def read_counts(text: str) -> tuple[int, ...]:
    return tuple(map(read_positive, text.split(",")))


# The configuration


def configuration(
    files: Sequence[str],
    overrides: Mapping[str, object] | None = None,
    *,
    here: bool = False,
    hosts: Mapping[str, Machine] | None = None,
) -> Config:
    """Load the configuration; ``here``: it has to work on this machine; ``hosts``: those of the cluster."""
    from anvil_mux import plugins
    from anvil_mux.config import compose
    from anvil_mux.host import check

    return plugins.load(
        files or compose.find_files(Path.cwd(), os.environ),
        present=gpus_present(),
        overrides=overrides,
        judge=check.why_not_checkpoint if here else None,
        hosts=hosts or {},
    )


def gpus_present() -> dict[str, Gpu]:
    """The GPUs of this machine, by each name that a file may have for them."""
    from anvil_mux.config.machines import Gpu
    from anvil_mux.host import check

    present: dict[str, Gpu] = {}
    for found in check.gpus_here():
        gpu = Gpu(found.id, vram=found.total, shared=found.shared, file=found.file)
        present |= dict.fromkeys((found.id, found.uuid, *found.files), gpu)
    return present


def reached(given: argparse.Namespace, *, is_serving: bool = False) -> Cluster | None:
    """Reach the cluster that the command line names; None if it names none.

    ``is_serving``: hosts whose agents take long may join later.
    """
    if not given.cluster:
        return None
    from anvil_mux.cluster.cluster import AGENT_SECONDS, START_SECONDS, reach

    patience = START_SECONDS if is_serving else AGENT_SECONDS
    return reach(given.cluster, say, insecure=given.insecure_cluster, patience=patience)


# The running anvil-mux


def ask(
    given: argparse.Namespace,
    method: str,
    path: str,
    body: object = None,
    *,
    query: Mapping[str, str] | None = None,
    **how: Any,
) -> Any:
    """The answer of the anvil-mux that is meant; MuxError with its own words if it refuses."""
    from anvil_mux.serve import remote

    url = address(given)
    if how.get("timeout", ...) is None:
        remote.greet(url)
    return remote.ask(url, method, remote.query(path, **query) if query else path, body, **how)


def events(given: argparse.Namespace) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The messages of the anvil-mux that is meant, each with its kind, for as long as it runs."""
    from anvil_mux.serve import remote

    return remote.events(address(given))


def address(given: argparse.Namespace) -> str:
    """The address: as given, of the one that serves the file at hand, by that file, or the default.

    NotRunning where it is known that the one at that address serves other files.
    """
    from anvil_mux.config.compose import find_files
    from anvil_mux.serve import remote

    files_given = getattr(given, "files", ())
    if url := given.url or (not files_given and os.environ.get("ANVIL_URL")):
        return with_scheme(url)
    try:
        files: Sequence[str | Path] = files_given or find_files(Path.cwd(), os.environ)
    except ConfigError:
        files = ()
    running = _running()
    if url := remote.choose(running, files):
        return url
    url = _configured_url(files_given) or remote.DEFAULT_URL
    if other := next((each for each in running if files and each.url == url), None):
        theirs = ", ".join(other.files)
        raise remote.NotRunning(
            f"no anvil-mux serves {files[0]}: the one at {url} serves {theirs}. Start one for that file "
            "(`anvil-mux serve`), or name the one that is meant with --url."
        )
    return url


def with_scheme(url: str) -> str:
    return url if "://" in url else f"http://{url}"


def running_at(url: str) -> RunningMux | None:
    """The anvil-mux at this address, if it says that it runs here."""
    return next((each for each in _running() if each.url == url), None)


def unserved() -> list[Path]:
    """The state folders of this user's projects that have services, and that no anvil-mux serves.

    Those on hosts that were simulated on this machine are among them.
    """
    from anvil_mux.state import SIMULATED, is_served, state_folder

    home = state_folder("", os.environ)
    files = [*home.glob("*/services"), *home.glob(f"{SIMULATED}/*/anvil-mux/*/services")]
    return [file.parent for file in sorted(files) if not is_served(file.parent)]


def project_and_host(folder: Path) -> tuple[str, str]:
    """Return the project whose state folder this is, and the simulated host that it is on; "": on none."""
    from anvil_mux.state import SIMULATED, state_folder

    host = folder.parent.parent
    if host.parent != state_folder(SIMULATED, os.environ):
        return folder.name, ""
    return folder.name.removesuffix(f"-{host.name}"), host.name


def named_by_host(folder: Path) -> str:
    """Return the project whose state folder this is and its simulated host, for people."""
    project, host = project_and_host(folder)
    return f"{project} on the simulated host {host}" if host else project


def left_lines(project: str = "") -> Iterator[str]:
    """A line for each project that nobody serves and whose engines run all the same, but for this one."""
    from anvil_mux.host.local import LeftEngines

    for folder in unserved():
        left = LeftEngines(folder)
        if left.names and project_and_host(folder) != (project, ""):
            runs, them = ("runs", "it") if len(left.names) == 1 else ("run", "them")
            still = f"{', '.join(left.names)} still {runs}, and may hold a GPU"
            yield f"left by {named_by_host(folder)}: {still}; `anvil-mux stop --all` ends {them}"


def _running() -> list[RunningMux]:
    from anvil_mux.serve import remote
    from anvil_mux.state import state_folder

    return remote.places(state_folder("", os.environ))


def _configured_url(files: Sequence[str]) -> str | None:
    """The address in the compose files, of which nothing else is read, right or wrong."""
    from anvil_mux.config import compose, interpolate
    from anvil_mux.config.compose import find_files
    from anvil_mux.config.config import SETTINGS

    try:
        paths = [Path(file) for file in files] or find_files(Path.cwd(), os.environ)
        documents = [interpolate.read(path) for path in paths]
        layers = compose.Layers(documents, interpolate.environment(paths[0].parent, os.environ))
        listen = os.environ.get("ANVIL_LISTEN")
        said = listen or compose.origins(layers.of_all())["listen"].filled("listen")
        host, port = SETTINGS["listen"].kind.read(said)
    except (ConfigError, ValueError, KeyError, TypeError):
        if files and not Path(files[0]).exists():
            raise
        return None
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
