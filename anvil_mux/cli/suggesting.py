"""``check --suggest``: what anvil-mux would make of compose files that know nothing of it."""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anvil_mux.cli.diagnostics import print_diagnostics
from anvil_mux.cli.output import FAILED, complain, counted, print_json, say
from anvil_mux.cli.screen import table
from anvil_mux.config.diagnostic import NOWHERE, Diagnostic, as_diagnostic
from anvil_mux.errors import ConfigError

if TYPE_CHECKING:
    from anvil_mux.importing.suggested import Suggestion

HEAD = ("service", "is", "model", "port", "gpus", "because")
OVERRIDE = "compose.anvil.yaml"


def run(given: argparse.Namespace) -> int:
    from anvil_mux.config import composefile, interpolate
    from anvil_mux.host import check
    from anvil_mux.importing.suggested import suggest

    files = [Path(file) for file in given.files] or [*composefile.find_files(Path.cwd(), os.environ)]
    documents = [interpolate.read(file) for file in files]
    made = suggest(documents, os.environ, [gpu.id for gpu in check.gpus_here()])
    found = any("x-anvil" in each for each in made.written.services.values())
    problems, warnings = _checked(made, files) if found else ([], ())
    text = made.written.text() if found else ""
    if given.json:
        rows = [row.to_json() for row in made.rows]
        print_json({"services": rows, "suggestion": text, "problems": problems})
        return 0 if found else FAILED
    rows_shown = [(r.service, r.what or "-", r.model, r.port, r.gpus, r.why) for r in made.rows]
    for shown in table([key.upper() for key in HEAD], rows_shown):
        print(shown, file=sys.stderr)
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
    from anvil_mux.cli.arguments import gpus_present
    from anvil_mux.config.composefile import compose_config, run_compose

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / OVERRIDE
        file.write_text(made.written.text(), encoding="utf-8")
        together = [*files, file]
        try:
            answer = run_compose(compose_config(together), os.environ)
            if answer is None:
                file.write_text(_merged(made), encoding="utf-8")
                together = [file]
            config = plugins.load(
                together,
                environ=dict(os.environ),
                compose=(lambda argv, environ: answer) if answer else None,
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


def _merged(made: Suggestion) -> str:
    import yaml

    return str(yaml.safe_dump(_escaped(made.merged), sort_keys=False))


def _escaped(value: Any) -> Any:
    """The value with each $ standing for itself, but for what the suggestion adds."""
    if isinstance(value, str):
        return re.sub(r"\$(?!\{ANVIL_API_KEY)", "$$$$", value)
    if isinstance(value, dict):
        return {name: _escaped(each) for name, each in value.items()}
    return [_escaped(each) for each in value] if isinstance(value, list) else value
