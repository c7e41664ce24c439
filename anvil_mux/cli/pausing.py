"""The commands ``pause`` and ``resume``: the GPUs of a running anvil-mux are lent to something else."""

from __future__ import annotations

import argparse

from anvil_mux.cli.arguments import read_value
from anvil_mux.cli.asking import add_address, ask_mux
from anvil_mux.cli.output import print_json, say
from anvil_mux.cli.screen import time_of_day
from anvil_mux.config.settings import read_seconds


def add_pause(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--for",
        dest="seconds",
        type=lambda text: read_value(read_seconds, text),
        metavar="TIME",
        help="resume automatically after this time, such as 30m or 2h; by default not before `resume`",
    )
    add_address(command)


def pause(given: argparse.Namespace) -> int:
    told = ask_mux(given, "POST", "/pause", {} if given.seconds is None else {"for": given.seconds})
    if given.json:
        print_json(told)
        return 0
    until = f"until {time_of_day(told['until'])}" if told["until"] else "until `anvil-mux resume`"
    say(f"paused {until}: models are stopped once their requests have ended (after drain_timeout at most)")
    if not told["kept"]:
        say("warning: the pause could not be saved, so a restart of anvil-mux ends it")
    return 0


def resume(given: argparse.Namespace) -> int:
    told = ask_mux(given, "POST", "/resume", {})
    if given.json:
        print_json(told)
    else:
        say(
            "resumed: models are loaded again when requests ask for them"
            if told["paused"]
            else "it was not paused"
        )
    return 0
