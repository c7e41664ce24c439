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
