"""The command ``usage``: what each API key has used of each model, as a table, JSON or CSV."""

from __future__ import annotations

import argparse
import csv
import sys
from typing import Any

from anvil_mux.cli.asking import add_address, ask_mux
from anvil_mux.cli.output import print_json, print_table, say
from anvil_mux.cli.screen import time_of_day

HEAD = ("KEY", "MODEL", "REQUESTS", "FAILED", "TOKENS-IN", "CACHED", "TOKENS-OUT", "TIME", "GPU-TIME")


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--since", default="7d", metavar="TIME", help="how far back, such as 12h or 30d (default 7d)"
    )
    command.add_argument("--csv", action="store_true", help="print CSV")
    add_address(command)


def run(given: argparse.Namespace) -> int:
    from anvil_mux.serve import remote

    told = ask_mux(given, "GET", remote.query("/usage", since=given.since))
    rows: list[dict[str, Any]] = told["usage"]
    if given.json:
        print_json(told)
    elif given.csv:
        writer = csv.DictWriter(sys.stdout, rows[0] if rows else ["key", "model"], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    elif rows:
        print_table(HEAD, [_row(each) for each in rows])
    else:
        say(f"no requests since {time_of_day(told['since'])}")
    return 0


def _row(used: dict[str, Any]) -> tuple[str, ...]:
    counts = ("requests", "failed", "prompt_tokens", "cached_tokens", "tokens")
    times = ("seconds", "gpu_seconds")
    return (
        used["key"],
        used["model"],
        *[str(used[name]) for name in counts],
        *[_hours(used[name]) for name in times],
    )


def _hours(seconds: float) -> str:
    """A length of time in hours, minutes and seconds."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
