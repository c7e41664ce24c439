"""Arguments that several commands have, how their values are read, and the configuration they name."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from anvil_mux.clock import count_in

if TYPE_CHECKING:
    from anvil_mux.config.config import Config, Gpu, Machine
    from anvil_mux.lab.workload import ClientGroups

T = TypeVar("T")


def add_json(command: argparse.ArgumentParser) -> None:
    command.add_argument("--json", action="store_true", help="print JSON")


def add_files(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "files",
        nargs="*",
        metavar="FILE",
        help="compose files; by default compose.yaml in this folder or one above",
    )


def add_cluster(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--cluster",
        metavar="HEAD:PORT",
        help="also use the hosts of a Ray cluster; `local` simulates three hosts on this machine",
    )
    command.add_argument(
        "--insecure-cluster", action="store_true", help="allow a cluster that requires no token"
    )


def read_port(text: str) -> int:
    if count_in(text, 65535) is None:
        raise argparse.ArgumentTypeError(f"must be from 0 to 65535, not {text}")
    return int(text)


def read_size(text: str) -> int:
    from anvil_mux.config import settings

    try:
        return int(settings.SIZE.read(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def read_sizes(text: str) -> tuple[int, ...]:
    return tuple(sorted({max(int(word), 1) for word in text.split(",")}))


def read_counts(text: str) -> tuple[int, ...]:
    return tuple(map(read_positive, text.split(",")))


def add_clients(command: argparse.ArgumentParser) -> None:
    """The settings of the profile ``clients``; ``clients`` reads them."""
    add = command.add_argument
    add(
        "--clients",
        type=_clients,
        metavar="N+N..",
        help="for --profile clients: how many clients each model has (default 4+4), each of whom asks again "
        "when it is answered",
    )
    for name, what in (
        ("load", "a load (default 1.2)"),
        ("evict", "an eviction (default 0.2)"),
        ("answer", "an answer, at the mean (default 2)"),
        ("think", "the time between an answer and the client's next request (default 0)"),
        ("seconds", "the whole run (default 600)"),
    ):
        add(f"--{name}", type=_seconds, metavar="S", help=f"for --profile clients: seconds of {what}")


def clients(given: argparse.Namespace) -> ClientGroups:
    """The clients of the profile of that name; refuses their settings without it."""
    from anvil_mux.lab.workload import ClientGroups

    fields = {
        "counts": given.clients,
        "load_seconds": given.load,
        "stop_seconds": given.evict,
        "answer_seconds": given.answer,
        "think_seconds": given.think,
        "seconds": given.seconds,
    }
    chosen = {name: value for name, value in fields.items() if value is not None}
    if chosen and "clients" not in given.profile:
        given.refuse("--clients, --load, --evict, --answer, --think and --seconds are for --profile clients")
    return ClientGroups(**chosen)


def _clients(text: str) -> tuple[int, ...]:
    from anvil_mux.lab import workload

    return read_value(workload.read_clients, text)


def _seconds(text: str) -> float:
    from anvil_mux.clock import YEAR_SECONDS

    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= YEAR_SECONDS:
        raise argparse.ArgumentTypeError(f"must be seconds, a number of at least 0, not {text}")
    return value


def read_value(read: Callable[[str], T], text: str) -> T:
    try:
        return read(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def read_positive(text: str) -> int:
    if not count_in(text):
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, not {text}")
    return int(text)


def gpus_present() -> dict[str, Gpu]:
    """The GPUs of this machine, by each name that a file may have for them."""
    from anvil_mux.config.config import Gpu
    from anvil_mux.host import check

    present: dict[str, Gpu] = {}
    for found in check.gpus_here():
        gpu = Gpu(found.id, vram=found.total, shared=found.shared, file=found.file)
        present |= dict.fromkeys((found.id, found.uuid, *found.files), gpu)
    return present


def configuration(
    files: Sequence[str],
    overrides: Mapping[str, object] | None = None,
    *,
    here: bool = False,
    hosts: Mapping[str, Machine] | None = None,
) -> Config:
    """Load the configuration; ``here``: it has to work on this machine; ``hosts``: those of the cluster."""
    from anvil_mux import plugins
    from anvil_mux.config import composefile
    from anvil_mux.host import check

    return plugins.load(
        files or composefile.find_files(Path.cwd(), os.environ),
        present=gpus_present(),
        overrides=overrides,
        judge=check.why_not_checkpoint if here else None,
        hosts=hosts or {},
    )
