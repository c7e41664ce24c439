"""Tables, colours and the screen of ``anvil-mux top``: text for a terminal. Pure but for ``paint``."""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TextIO

from anvil_mux.config.settings import gib

LAST = 8
"""How many events the screen shows."""
COLOURS = {
    "ready": "32",
    "loading": "33",
    "cancelling": "33",
    "draining": "33",
    "evicting": "33",
    "demoting": "33",
    "stuck": "31",
}

StatusJson = Mapping[str, Any]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table with aligned columns."""
    cells = [head, *rows]
    widths = [max(map(width, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(cell + " " * (wide - width(cell)) for cell, wide in zip(row, widths, strict=True)).rstrip()
        for row in cells
    ]


def paint(text: str, colour: str, stream: TextIO | None = None) -> str:
    """Paint ``text`` in a colour, on terminals."""
    stream = stream or sys.stdout
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" or not stream.isatty()
    if not colour or (plain and not os.environ.get("FORCE_COLOR")):
        return text
    return f"\x1b[{colour}m{text}\x1b[0m"


def width(cell: str) -> int:
    """The width of a text on the screen, without its colours."""
    return len(cell) - 9 * cell.count("\x1b[0m")


def state_cell(state: str) -> str:
    return paint(state, COLOURS.get(state, ""))


def model_row(name: str, model: StatusJson) -> tuple[str, ...]:
    """A model's row in ``ps`` and ``top``."""
    seconds, far = model["load_seconds"], model.get("progress")
    error = (model["last_error"] or "").partition("\n")[0]
    backend = model["backends"][model["backend"]]
    return (
        name,
        state_cell(model["state"])
        + (f" {far['words']}" if far else "")
        + (" pinned" if model.get("pinned") else "")
        + _host_lost(model),
        "" if backend["size"] is None else gib(backend["size"]),
        ",".join(model["gpus"]),
        str(model["leases"]),
        str(model["waiting"]),
        "" if seconds is None else f"{seconds:.1f} s",
        _until(model, backend["unload_seconds"]),
        error if len(error) <= 60 else error[:57] + "...",
    )


def last_lines(models: Mapping[str, StatusJson], most: int = 5) -> Iterator[str]:
    """The errors of backends that failed, in full, and the last lines of their engines."""
    for model in models.values():
        for name, backend in model["backends"].items():
            if backend["error"]:
                yield ""
                yield f"{name}: {backend['error']}"
                yield from [f"  | {line}" for line in backend["log"][-most:]]


def _host_lost(about: StatusJson) -> str:
    return " " + paint("host lost", COLOURS["stuck"]) if about.get("host_lost") else ""


def lost_hosts(status: StatusJson) -> Iterator[str]:
    """The hosts that nobody hears of, a line for each, with the backends that are there."""
    for name, host in status.get("hosts", {}).items():
        if host["lost"]:
            backends = [pair for model in status["models"].values() for pair in model["backends"].items()]
            there = ", ".join(each for each, about in backends if about.get("host") == name)
            since = f"lost for {host['lost_seconds']:.0f} s"
            yield f"host {name}: {since}; its backends serve nobody: {there}"


MODEL_HEAD = ("MODEL", "STATE", "SIZE", "GPUS", "LEASES", "WAITING", "LOADED-IN", "UNTIL", "LAST ERROR")


def _until(model: StatusJson, seconds: float | None) -> str:
    """How long a model stays in its state."""
    if model["state"] in ("draining", "evicting", "cancelling"):
        return "leaving"
    if model["state"] != "ready":
        return ""
    if model["leases"]:
        return "in use"
    if seconds is None:
        return "unpinned" if model.get("pinned") else "another comes"
    return f"{seconds:.0f} s from now" if seconds < 120 else f"{seconds / 60:.0f} min from now"


class TopScreen:
    """The screen of ``top``: the last state and the last events of a stream of messages."""

    def __init__(self) -> None:
        self._state: StatusJson = {}
        self._events: deque[str] = deque(maxlen=LAST)

    def take(self, kind: str, data: StatusJson) -> None:
        """Takes a message of ``GET /events``."""
        if kind in ("snapshot", "state"):
            self._state = data
        if kind == "event":
            self._events.append(event_line(data))
        for event in data.get("events", ()) if kind == "snapshot" else ():
            self._events.append(event_line(event))

    def lines(self, now: float) -> list[str]:
        state = self._state
        running = f"{state['leases']} in flight, {state['waiting']} waiting"
        shown = [f"anvil-mux {state['version']}: {state['status']}, {running}", ""]
        shown += [f"problem: {name}: {why}" for name, why in state["problems"].items()]
        shown += [f"problem: {lost}" for lost in lost_hosts(state)]
        shown += table(
            ("GPU", "STATE", "RESIDENT", ""), map(_gpu_row, *zip(*state["gpus"].items(), strict=True))
        )
        shown += ["", *table(MODEL_HEAD, (model_row(*pair) for pair in state["models"].items()))]
        if state["queued"]:
            rows = [(f"#{w['ticket']}", w["model"], f"{now - w['since']:.0f} s") for w in state["queued"]]
            shown += ["", *table(("WAITS", "FOR", "SINCE"), rows)]
        return [*shown, "", *self._events]


def _gpu_row(gpu: str, about: StatusJson) -> tuple[str, ...]:
    drain = about["draining"]
    note = f"makes room for {drain['target']}, {drain['seconds_left']:.0f} s left" if drain else ""
    state = state_cell(about["state"]) + _host_lost(about)
    return gpu, state, ", ".join(about["residents"]), note


def event_line(event: StatusJson) -> str:
    """An event as ``anvil-mux events`` prints it."""
    clock = time.strftime("%H:%M:%S", time.localtime(event["at"]))
    return f"{clock} {event['model'] or 'anvil-mux'}: {event['text']}"
