"""`anvil-mux import`: a compose file from another program's configuration, on standard output."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from anvil_mux.cli.output import counted, say

if TYPE_CHECKING:
    from anvil_mux.importing.written import Written


def add_arguments(parser: argparse.ArgumentParser) -> None:
    programs = parser.add_subparsers(metavar="PROGRAM", required=True)
    about = "Make a compose file of llama-swap's configuration"
    command = programs.add_parser("llama-swap", help=about, description=f"{about}.")
    command.add_argument("file", metavar="FILE", help="llama-swap's config.yaml")
    command.set_defaults(translate=_llama_swap)
    parser.epilog = "anvil-mux import llama-swap config.yaml > compose.yaml; docs/migrating.md has every key."


def run(given: argparse.Namespace) -> int:
    made: Written = given.translate(given)
    print(made.text(), end="")
    for note in made.notes:
        say(f"{note.where}: {note.text}")
    say(f"{counted([*made.services], 'model')}, {counted(made.notes, 'note')}; next: anvil-mux check FILE")
    return 0


def _llama_swap(given: argparse.Namespace) -> Written:
    from anvil_mux.config import interpolate
    from anvil_mux.config.table import SERVICE_SETTINGS, SETTINGS
    from anvil_mux.importing import llama_swap

    known = {*SETTINGS, *SERVICE_SETTINGS}
    return llama_swap.translate(interpolate.read(Path(given.file)), known=known, gpus=_gpus_here())


def _gpus_here() -> list[str]:
    from anvil_mux.host import check

    return [gpu.id for gpu in check.gpus_here()]
