"""The command ``requests``: those under way, and the end of one; the last ones, or one with its bodies."""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

from anvil_mux.cli.asking import add_address, ask_mux
from anvil_mux.cli.output import print_json, print_table, say
from anvil_mux.cli.screen import paint
from anvil_mux.errors import BadRequest

HEAD = ("ID", "ENDED", "KEY", "MODEL", "ANSWER", "TOOK", "TOKENS")

RUNNING_HEAD = ("ID", "KEY", "MODEL", "BACKEND", "STATE", "FOR")


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "id", nargs="?", default="", metavar="ID", help="show this request: its X-Request-ID"
    )
    command.add_argument("--running", action="store_true", help="list the requests that wait or run now")
    command.add_argument("--cancel", action="store_true", help="end the request ID, which waits or runs")
    add_address(command)


def run(given: argparse.Namespace) -> int:
    from anvil_mux.serve import remote

    if given.cancel:
        if not given.id:
            raise BadRequest("name the request to cancel: anvil-mux requests --cancel ID")
        done = ask_mux(given, "POST", "/requests/cancel", {"id": given.id})
        print_json(done) if given.json else say(f"the request {given.id} was cancelled")
        return 0
    if given.running:
        told = ask_mux(given, "GET", "/requests/running")
        print_json(told) if given.json else print_table(RUNNING_HEAD, map(_running_row, told["requests"]))
        return 0
    told = ask_mux(given, "GET", remote.query("/requests", **({"id": given.id} if given.id else {})))
    if given.json:
        print_json(told)
    elif given.id:
        _print_one(told)
    elif not told["capture"]:
        say("no request is kept; `capture: 50` at the top level of x-anvil keeps the last 50")
    else:
        print_table(HEAD, map(_row, told["requests"]))
    return 0


def _running_row(each: dict[str, Any]) -> tuple[str, ...]:
    state = (each["backend"], each["state"], f"{each['seconds']:.1f} s")
    return each["id"] or f"(load {each['ticket']})", each["key"], each["model"], *state


def _row(each: dict[str, Any]) -> tuple[str, ...]:
    ended = time.strftime("%H:%M:%S", time.localtime(each["ended"]))
    answer = f"{each['status']} {each['code']}".rstrip()
    took = f"{each['seconds']:.2f} s"
    return each["id"], ended, each["key"], each["model"], answer, took, str(each["tokens"] or "")


def _print_one(told: dict[str, Any]) -> None:
    what = f"{told['path']} of {told['model']}"
    print(
        paint(f"# asked: {what}, request {told['id']}" + (f", key {told['key']}" if told["key"] else ""), "1")
    )
    print("(a form, which is not kept)" if told["question_is_form"] else _indented(told["question"]))
    _print_cut(told["question_is_cut"])
    print(
        paint(f"# answered: {told['status']} {told['code']}".rstrip() + f" in {told['seconds']:.2f} s", "1")
    )
    print(_indented(told["answer"]))
    _print_cut(told["answer_is_cut"])


def _print_cut(is_cut: bool) -> None:
    if is_cut:
        say("the rest was not kept")


def _indented(text: str) -> str:
    """JSON with indentation; other text as it is."""
    try:
        return json.dumps(json.loads(text), indent=2, ensure_ascii=False)
    except ValueError:
        return text.rstrip("\n")
