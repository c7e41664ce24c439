"""`anvil-mux import`: a compose file from another program's configuration, on standard output."""

from __future__ import annotations

import argparse
import os
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
    _add_ollama(programs)
    parser.epilog = "anvil-mux import llama-swap config.yaml > compose.yaml; docs/migrating.md has every key."


def _add_ollama(programs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    about = "Make a compose file of the models that Ollama has stored"
    command = programs.add_parser("ollama", help=about, description=f"{about}.")
    add = command.add_argument
    add(
        "store",
        nargs="?",
        metavar="FOLDER",
        help="Ollama's store; by default OLLAMA_MODELS, or ~/.ollama/models",
    )
    add(
        "--engine",
        choices=("llama-server", "ollama"),
        default="llama-server",
        help="the engine that serves the models (default llama-server)",
    )
    add("--program", metavar="PATH", default="", help="path of the engine's program, if it is not on PATH")
    add("--image", metavar="IMAGE", default="", help="run containers of this image instead of processes")
    command.set_defaults(translate=_ollama)


def run(given: argparse.Namespace) -> int:
    made: Written = given.translate(given)
    print(made.text(), end="")
    for note in made.notes:
        say(f"{note.where}: {note.text}")
    say(f"{counted([*made.services], 'model')}, {counted(made.notes, 'note')}; next: anvil-mux check FILE")
    return 0


def _llama_swap(given: argparse.Namespace) -> Written:
    from anvil_mux.config import interpolate
    from anvil_mux.importing import llama_swap

    return llama_swap.translate(interpolate.read(Path(given.file)), gpus=_gpus_here())


def _ollama(given: argparse.Namespace) -> Written:
    from anvil_mux.importing import ollama_store

    store = given.store or os.environ.get("OLLAMA_MODELS") or "~/.ollama/models"
    wanted = ollama_store.Wanted(given.engine == "ollama", given.program, given.image, _gpus_here())
    return ollama_store.translate(Path(store).expanduser(), wanted)


def _gpus_here() -> list[str]:
    from anvil_mux.host import check

    return [gpu.id for gpu in check.gpus_here()]
