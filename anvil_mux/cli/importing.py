"""Compose files for what knows nothing of anvil-mux: the commands ``import`` and ``check --suggest``.

``import`` makes one of another program's configuration, ``check --suggest`` says what existing ones would
become. The file is printed on standard output, and notes on standard error.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from anvil_mux.cli.arguments import argument, gpus_present, subcommand
from anvil_mux.cli.output import (
    FAILED,
    Columns,
    complain,
    counted,
    print_diagnostics,
    print_json,
    say,
    tabled,
)
from anvil_mux.config.kinds import NOWHERE, Diagnostic, as_diagnostic
from anvil_mux.errors import ConfigError

if TYPE_CHECKING:
    from anvil_mux.importing import Written
    from anvil_mux.importing.suggested import Row, Suggestion


def _gpus_here() -> list[str]:
    from anvil_mux.host import check

    return [gpu.id for gpu in check.gpus_here()]


# import


def add_import(parser: argparse.ArgumentParser) -> None:
    programs = parser.add_subparsers(metavar="PROGRAM", required=True)
    command = subcommand(programs, "llama-swap", "Make a compose file of llama-swap's configuration")
    argument(command, "file FILE", "llama-swap's config.yaml")
    command.set_defaults(translate=_llama_swap)
    command = subcommand(programs, "llamacpp", "Make a compose file of the presets of llama.cpp's router")
    argument(command, "file FILE", "the file of --models-preset")
    argument(command, "--program PATH", "path of llama-server, if it is not on PATH", default="")
    command.set_defaults(translate=_llamacpp)
    command = subcommand(programs, "ollama", "Make a compose file of the models that Ollama has stored")
    add = partial(argument, command)
    add("store FOLDER", "Ollama's store; by default OLLAMA_MODELS, or ~/.ollama/models", nargs="?")
    add(
        "--engine",
        "the engine that serves the models (default llama-server)",
        choices=("llama-server", "ollama"),
        default="llama-server",
    )
    add("--program PATH", "path of the engine's program, if it is not on PATH", default="")
    add("--image IMAGE", "run containers of this image instead of processes", default="")
    command.set_defaults(translate=_ollama)
    parser.epilog = "anvil-mux import llama-swap config.yaml > compose.yaml; docs/migrating.md has every key."


def import_(given: argparse.Namespace) -> int:
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


def _llamacpp(given: argparse.Namespace) -> Written:
    from anvil_mux.importing import llamacpp_presets

    return llamacpp_presets.translate(Path(given.file), program=given.program, gpus=_gpus_here())


def _ollama(given: argparse.Namespace) -> Written:
    from anvil_mux.importing import ollama_store

    store = given.store or os.environ.get("OLLAMA_MODELS") or "~/.ollama/models"
    wanted = ollama_store.Wanted(given.engine == "ollama", given.program, given.image, _gpus_here())
    return ollama_store.translate(Path(store).expanduser(), wanted)


# check --suggest

OVERRIDE = "compose.anvil.yaml"
SERVICES: Columns[Row] = {
    "SERVICE": lambda row: row.service,
    "IS": lambda row: row.what or "-",
    "MODEL": lambda row: row.model,
    "PORT": lambda row: row.port,
    "GPUS": lambda row: row.gpus,
    "BECAUSE": lambda row: row.why,
}


def suggest(given: argparse.Namespace) -> int:
    """Say what anvil-mux would make of compose files that know nothing of it."""
    from anvil_mux.config import compose, interpolate
    from anvil_mux.importing import suggested

    files = [Path(file) for file in given.files] or [*compose.find_files(Path.cwd(), os.environ)]
    documents = [interpolate.read(file) for file in files]
    made = suggested.Suggestion(documents, os.environ, _gpus_here())
    found = any("x-anvil" in each for each in made.written.services.values())
    problems, warnings = _checked(made, files) if found else ([], ())
    text = made.written.text() if found else ""
    if given.json:
        rows = [row.to_json() for row in made.rows]
        print_json({"services": rows, "suggestion": text, "problems": problems})
        return 0 if found else FAILED
    for line in tabled(SERVICES, made.rows):
        print(line, file=sys.stderr)
    if not found:
        for note in made.written.notes:
            say(f"{note.about}: {note.text}")
        return complain(_nothing(made), FAILED)
    print(text, end="")
    if problems:
        say("check would still report:")
        print_diagnostics([("error", problem) for problem in problems])
    names = " ".join(str(file) for file in files)
    engines = [row for row in made.rows if row.model]
    say(
        f"{counted(engines, 'model')}; with this added, check has {counted(problems, 'problem')} and "
        f"{counted(warnings, 'warning')}. Paste it into the file, or use it as a second file (which "
        f"needs Docker Compose, but for processes): anvil-mux check --suggest {names} > {OVERRIDE}; "
        f"anvil-mux check {names} {OVERRIDE}"
    )
    return 0


def _nothing(made: Suggestion) -> str:
    if any("already" in row.why for row in made.rows):
        return "all services that could be models have x-anvil already: run `anvil-mux check`"
    return (
        "no service looks like an engine; if one is, add x-anvil: {model: ..., engine: ..., port: ...} "
        "to it (docs/reference.md lists the engines)"
    )


def _checked(made: Suggestion, files: Sequence[Path]) -> tuple[list[str], Sequence[str]]:
    """Return what check says of the files with the suggestion in them: problems and warnings."""
    from anvil_mux import plugins
    from anvil_mux.config.compose import compose_config, run_compose

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / OVERRIDE
        file.write_text(made.written.text(), encoding="utf-8")
        together = [*files, file]
        try:
            found = run_compose(compose_config(together), os.environ)
            if found is None:
                file.write_text(made.merged(), encoding="utf-8")
                together = [file]
            config = plugins.load(
                together,
                environ=dict(os.environ),
                compose=(lambda argv, environ: found) if found else None,
                present=gpus_present(),
            )
        except ConfigError as error:
            return [_without_place(each, file) for each in error.problems], ()
    return [], config.warnings


def _without_place(problem: str, file: Path) -> str:
    """The problem without its place, if that is in ``file``, which the user does not have."""
    told = as_diagnostic(problem)
    text, said = (re.sub(rf"{re.escape(str(file))}(:\d+)?: ", "", each) for each in (problem, told.said))
    place = NOWHERE if told.place.file == str(file) else told.place
    return Diagnostic(text, said=said, write=told.write, key=told.key, place=place, page=told.page)
