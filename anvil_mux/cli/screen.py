"""The state of a running anvil-mux, and its events: the commands ``ps``, ``top``, ``events`` and ``why``.

What is shown is made of JSON by functions without side effects: the answer of /healthz, which is also what
``top`` gets as a snapshot, and the messages of /events.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from anvil_mux.cli import arguments
from anvil_mux.cli.arguments import argument, ask, left_lines, read_positive
from anvil_mux.cli.output import (
    Columns,
    answer,
    paint,
    print_columns,
    print_table,
    say,
    table,
    tabled,
    time_of_day,
)
from anvil_mux.config.kinds import gib, span
from anvil_mux.scheduler.events import LOCAL

LAST = 8
"""How many events the screen shows."""
MOST = 5
"""How many things of one kind a line names."""
LAST_LINES = 5
"""How many lines of the log of an engine that failed are shown."""
MOST_HOSTS = 12
"""How many hosts the screen shows, of those that are here and where nothing moves."""
MOST_STOPPED = 8
"""How many replicas that are stopped are listed."""
MOVING = ("loading", "cancelling", "draining", "evicting", "demoting", "stuck")
COLOURS = {"ready": "32", **dict.fromkeys(MOVING, "33"), "stuck": "31"}

StatusJson = Mapping[str, Any]


# The commands


def add_why(command: argparse.ArgumentParser) -> None:
    argument(
        command,
        "model MODEL",
        "the model's name; without one, every model that somebody waits for",
        nargs="?",
        default="",
    )
    argument(
        command,
        "--explain",
        "also show which replica would get it, and why not the others",
        action="store_true",
    )
    argument(
        command, "--tokens N", "explain for a prompt of N tokens, none of them cached", type=read_positive
    )
    argument(
        command,
        "--with images,audio,tools",
        "explain for a request that holds these, where MODEL chooses by them (any_of)",
        dest="contents",
        default="",
    )


def add_events(command: argparse.ArgumentParser) -> None:
    argument(command, "model MODEL", "only events of this model", nargs="?", default="")
    argument(command, "-f --follow", "keep printing new events as they come", action="store_true")


def ps(given: argparse.Namespace) -> int:
    from anvil_mux.host.check import engines_of_other_users, shared_gpus

    try:
        return answer(given, ask(given, "GET", "/healthz", accept=(200, 503)), _print_status)
    finally:
        if not given.json:
            for line in [*left_lines(), *shared_gpus(), *engines_of_other_users()]:
                say(line)


def _print_status(status: StatusJson) -> None:
    for line in [*models_table(status), *other_programs(status), *last_lines(status["models"])]:
        print(line)
    for name, why in (status.get("problems") or {}).items():
        say(f"warning: {name}: {why}")
    if lacking := (status.get("notes") or {}).get("rights"):
        say(f"warning: {lacking}")
    for host in hosts_not_here(status):
        say(f"warning: {host}")
    if line := pause_line(status):
        say(line)


def events(given: argparse.Namespace) -> int:
    for kind, data in arguments.events(given):
        for event in data["events"] if kind == "snapshot" else (data,) if kind == "event" else ():
            if given.model in ("", event["model"]):
                print(json.dumps(event) if given.json else event_line(event), flush=True)
        if kind == "lost":
            say(f"{data['events']} events came faster than they were read, and are lost")
        if not given.follow:
            break
    return 0


def top(given: argparse.Namespace) -> int:
    """Draws the picture anew whenever something has changed; once, where it is no terminal."""
    picture, live = TopScreen(), sys.stdout.isatty()
    for kind, data in arguments.events(given):
        picture.take(kind, data)
        if given.json:
            print(json.dumps({"kind": kind, **data}), flush=True)
        elif live:
            height = os.get_terminal_size().lines - 1
            shown = [f"{line}\x1b[K\n" for line in picture.lines(time.time())[:height]]
            print("\x1b[H" + "".join(shown) + "\x1b[J", end="", flush=True)
        else:
            print("\n".join(picture.lines(time.time())))
            break
    return 0


def why(given: argparse.Namespace) -> int:
    explained = bool(given.explain or given.tokens)
    if given.model:
        return answer(given, _ask_why(given, given.model), lambda found: _print_why(found, explained))
    models = ask(given, "GET", "/healthz", accept=(200, 503))["models"]
    estimates = [_ask_why(given, name) for name, model in models.items() if model["waiting"]]
    return answer(given, estimates, lambda estimates: _print_all(estimates, explained))


def _ask_why(given: argparse.Namespace, model: str) -> Any:
    query = {"model": model, "tokens": str(given.tokens or 0), "with": given.contents}
    return ask(given, "GET", "/why", query=query)


def _print_all(estimates: Sequence[Mapping[str, Any]], explained: bool) -> None:
    for estimate in estimates:
        _print_why(estimate, explained)
    if not estimates:
        print("Nobody waits for a model.")


def _print_why(found: Mapping[str, Any], explained: bool) -> None:
    print(found["sentence"])
    _print_candidates(found.get("hosts") or ())
    for stage, rows in found["stages"].items() if explained else ():
        _print_explained(stage, rows)


def _print_candidates(hosts: Sequence[Mapping[str, Any]]) -> None:
    """The hosts where a model may run: those where it is loaded, those that are left out, and the others."""
    empty = [each for each in hosts if not each["left_out"] and each["states"].keys() == {"stopped"}]
    if rows := [each for each in hosts if each not in empty]:
        print_columns(CANDIDATES, rows)
    if empty:
        print(f"It may be loaded on {named(each['host'] for each in empty)}.")


CANDIDATES: Columns[StatusJson] = {
    "HOST": lambda host: host["host"],
    "BACKENDS": lambda host: ", ".join(f"{count} {state}" for state, count in host["states"].items()),
    "LEFT OUT": lambda host: host["left_out"] or "",
}


def _print_explained(stage: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Each replica, the step of the policy that removes it, and what the metrics say of it.

    Those that are stopped, of which there may be hundreds, are counted where they are many.
    """
    stopped = [row for row in rows if row["removed_by"] == "stopped"]
    if len(stopped) > MOST_STOPPED:
        rows = [row for row in rows if row["removed_by"] != "stopped"]
    names = list(dict.fromkeys(name for row in rows for name in row["metrics"]))
    read = any("engine" in row for row in rows)
    shown = [
        (
            row["backend"],
            "chosen" if row["chosen"] else row["removed_by"],
            *[_number(row["metrics"].get(name)) for name in names],
            *([_of_engine(row.get("engine"))] if read else []),
        )
        for row in rows
    ]
    head = ("REPLICA" if stage == "neutral" else stage.upper(), "REMOVED BY", *names)
    print_table((*head, "ITS ENGINE") if read else head, shown)
    if len(stopped) > MOST_STOPPED:
        print(f"and {len(stopped)} that are stopped")


def _of_engine(said: Mapping[str, Any] | None) -> str:
    """The figures of an engine, and their age."""
    if not said:
        return ""
    age = f"{said['age_seconds']:g} s"
    if said["running"] is None:
        return f"nothing for {age}"
    full = "" if said["kv_usage"] is None else f", cache {said['kv_usage']:.1%} full"
    return f"{said['running']} run, {said['waiting']} wait{full}, {age} ago"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"


# The table of models


def _with_names(of: Mapping[str, StatusJson]) -> list[StatusJson]:
    """The values, each with its name."""
    return [{**about, "name": name} for name, about in of.items()]


def models_table(status: StatusJson) -> list[str]:
    """The table of ``ps`` and ``top``, the presets of each model, and its prompts on disk."""
    columns = {"WHERE" if k == "GPU" and status.get("hosts") else k: v for k, v in MODEL_COLUMNS.items()}
    models = status["models"].items()
    presets = [
        f"presets of {name}: {named(about['presets'])}" for name, about in models if "presets" in about
    ]
    kept = [
        f"prompts of {name} on disk: {_kept(about['kept_prompts'])}"
        for _, model in models
        for name, about in model["backends"].items()
        if "kept_prompts" in about
    ]
    choices = [f"{name}: {about['words']}" for name, about in status.get("any_of", {}).items()]
    return [*tabled(columns, _with_names(status["models"])), *presets, *choices, *kept]


def _kept(prompts: StatusJson) -> str:
    return f"{prompts['prompts']} ({prompts['tokens']} tokens, {prompts['size'] / (1 << 20):.1f} MiB)"


def _painted(state: str) -> str:
    return paint(state, COLOURS.get(state, ""))


def _state(model: StatusJson) -> str:
    if "elsewhere" in model:
        return _circuit(model["elsewhere"])
    return paint("host lost", COLOURS["stuck"]) if model.get("host_lost") else _painted(model["state"])


def _circuit(elsewhere: StatusJson) -> str:
    """The state of a server elsewhere: that of its circuit, unless that is closed."""
    if elsewhere["circuit"] == "closed":
        return paint("elsewhere", COLOURS["ready"])
    left = f" {elsewhere['retry_seconds']:.0f} s" if elsewhere["retry_seconds"] else ""
    return paint(f"circuit {elsewhere['circuit'].replace('_', '-')}{left}", COLOURS["stuck"])


def where(model: StatusJson) -> str:
    """The GPUs that a model is on, or the hosts where it needs none; else where it may be loaded."""
    if "elsewhere" in model:
        return str(model["elsewhere"]["server"])
    candidates = model.get("candidates")
    if not candidates:
        return ", ".join(_gpu_names(model["gpus"]))
    loaded = [each for each in model["backends"].values() if each["state"] != "stopped"]
    there = loaded if model.get("host_lost") else [each for each in loaded if not each.get("host_lost")]
    if not there and candidates["backends"] == 1:
        there = list(model["backends"].values())
    if there:
        gpus = _gpu_names(gpu for each in there for gpu in each["gpus"])
        return named([*gpus, *(host_of(each) for each in there if not each["gpus"])])
    if candidates["hosts"] > 1:
        return f"any of {candidates['hosts']} hosts"
    return f"any of {candidates['backends']} on {host_of(model['backends'][model['backend']])}"


def _gpu_names(ids: Iterable[str]) -> list[str]:
    """GPUs as people call them: those of this machine together, those of other hosts as HOST/GPU."""
    found = list(dict.fromkeys(ids))
    own = ", ".join(id for id in found if "/" not in id)
    return [*([f"GPU {own}"] if own else []), *(id for id in found if "/" in id)]


def host_of(about: StatusJson) -> str:
    """The name for people of the host of a GPU or a backend."""
    return str(about.get("host") or LOCAL)


def named(names: Iterable[str]) -> str:
    """Some names, and how many more there are."""
    found = list(dict.fromkeys(names))
    more = f" and {len(found) - MOST} more" if len(found) > MOST else ""
    return ", ".join(found[:MOST]) + more


def _until(model: StatusJson) -> str:
    """How long a model stays in its state."""
    if "elsewhere" in model:
        return ""
    seconds = model["backends"][model["backend"]]["unload_seconds"]
    if model["state"] in ("draining", "evicting", "cancelling"):
        drain = model.get("draining") or {}
        first = next(iter(drain.get("answers", ())), None)
        if first is None or drain["seconds_left"] is not None:
            return "leaving"
        return f"{first['request']} ends ({span(first['run_seconds'])})"
    if model["state"] != "ready":
        back = model.get("home_seconds")
        return "" if back is None else f"back in {span(back)}"
    if model["leases"]:
        return "in use"
    if seconds is None:
        return "unpinned" if model.get("pinned") else "next swap"
    return f"{seconds:.0f} s from now" if seconds < 120 else f"{seconds / 60:.0f} min from now"


def _state_cell(model: StatusJson) -> str:
    far = model.get("progress")
    return _state(model) + (f" {far['words']}" if far else "") + (" pinned" if model.get("pinned") else "")


def _size(model: StatusJson) -> str:
    size = model["backends"][model["backend"]]["size"]
    return "" if size is None else gib(size)


def _error(model: StatusJson) -> str:
    error = (model["last_error"] or "").partition("\n")[0]
    elsewhere = model.get("elsewhere")
    if not error and elsewhere and elsewhere["circuit"] != "closed":
        error = elsewhere["why"] or ""
    return error if len(error) <= 60 else error[:57] + "..."


MODEL_COLUMNS: Columns[StatusJson] = {
    "MODEL": lambda model: model["name"],
    "STATE": _state_cell,
    "SIZE": _size,
    "GPU": where,
    "IN FLIGHT": lambda model: str(model["leases"]),
    "WAITING": lambda m: str(m["waiting"]) + (f" of {m['max_queue']}" if "max_queue" in m else ""),
    "LAST LOAD": lambda m: "" if m["load_seconds"] is None else f"{m['load_seconds']:.1f} s",
    "UNTIL": _until,
    "LAST ERROR": _error,
}
"""The columns of ``ps`` and ``top``."""


# The screen of top


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
        shown += [f"problem: {host}" for host in hosts_not_here(state)]
        shown += filter(None, [pause_line(state)])
        if state.get("hosts"):
            shown += _hosts_table(state)
        else:
            shown += tabled(GPU_COLUMNS, _with_names(state["gpus"]))
            shown += other_programs(state)
        shown += ["", *models_table(state)]
        if state["queued"]:
            rows = [(f"#{w['ticket']}", w["model"], f"{now - w['since']:.0f} s") for w in state["queued"]]
            shown += ["", *table(("WAITS", "FOR", "SINCE"), rows)]
        return [*shown, "", *self._events]


def _memory(gpu: StatusJson) -> str:
    used, total = gpu.get("used"), gpu.get("total")
    return f"{used / (1 << 30):.1f} of {gib(total)}" if total and used is not None else ""


def _load(gpu: StatusJson) -> str:
    """The sensors of a GPU, as far as it has them."""
    sensors = gpu.get("sensors") or {}
    units = {"utilization": "{:.0%}", "celsius": "{:.0f} °C", "watts": "{:.0f} W"}
    read = [(sensors.get(name), form) for name, form in units.items()]
    return " ".join(form.format(value) for value, form in read if value is not None)


def _leaving(gpu: StatusJson) -> str:
    drain = gpu["draining"]
    if not drain:
        return ""
    left = drain["seconds_left"]
    end = "once its requests have ended" if left is None else f"{left:.0f} s left"
    return f"makes room for {drain['target']}, {end}"


GPU_COLUMNS: Columns[StatusJson] = {
    "GPU": lambda gpu: f"GPU {gpu['name']}",
    "STATE": lambda gpu: _painted(gpu["state"]),
    "RESIDENT": lambda gpu: ", ".join(gpu["residents"]),
    "MEMORY": _memory,
    "LOAD": _load,
    "": _leaving,
}


def _hosts_table(state: StatusJson) -> list[str]:
    """A line for each host: first those that are not here and those where something moves."""
    gpus: dict[str, list[StatusJson]] = {name: [] for name in sorted(state["hosts"])}
    for about in state["gpus"].values():
        gpus.setdefault(host_of(about), []).append(about)
    stirring = [name for name in gpus if _is_stirring(state["hosts"].get(name), gpus[name])]
    shown = [*stirring, *[name for name in gpus if name not in stirring][:MOST_HOSTS]]
    names = [name for name in gpus if name in shown]
    rows = [{**(state["hosts"].get(name) or {}), "name": name, "gpus": gpus[name]} for name in names]
    lines = tabled(HOST_COLUMNS, rows)
    left = [gpu for name in gpus.keys() - shown for gpu in gpus[name]]
    return [*lines, f"and {len(gpus) - len(shown)} more hosts: {_summed_up(left)}"] if left else lines


def _is_stirring(host: StatusJson | None, gpus: Iterable[StatusJson]) -> bool:
    """Whether there is more to say of a host than what is loaded there."""
    return bool(host and host_state(host) != "here") or any(gpu["state"] in MOVING for gpu in gpus)


def _summed_up(gpus: Iterable[StatusJson]) -> str:
    """How many GPUs are in each state."""
    return ", ".join(f"{count} {state}" for state, count in Counter(gpu["state"] for gpu in gpus).items())


def _host_state_cell(host: StatusJson) -> str:
    state = host_state(host) if "lost" in host else "here"
    colour = COLOURS["stuck"] if host.get("lost") else "" if state == "here" else COLOURS["loading"]
    return paint(state, colour)


HOST_COLUMNS: Columns[StatusJson] = {
    "HOST": lambda host: host["name"],
    "STATE": _host_state_cell,
    "GPUS": lambda host: _summed_up(host["gpus"]),
    "RESIDENT": lambda host: named(model for gpu in host["gpus"] for model in gpu["residents"]),
    "": lambda host: "; ".join(filter(None, map(_leaving, host["gpus"]))),
}


def event_line(event: StatusJson) -> str:
    """An event as ``anvil-mux events`` prints it."""
    clock = time.strftime("%H:%M:%S", time.localtime(event["at"]))
    on = f" on {event['host']}" if event.get("host") else ""
    return f"{clock} {event['model'] or 'anvil-mux'}{on}: {event['text']}"


# Beside the table


def last_lines(models: Mapping[str, StatusJson]) -> Iterator[str]:
    """The errors of backends that failed, in full, and the last lines of their engines."""
    for model in models.values():
        for name, backend in model["backends"].items():
            if backend["error"]:
                yield ""
                yield f"{name}: {backend['error']}"
                yield from [f"  | {line}" for line in backend.get("log", [])[-LAST_LINES:]]


def other_programs(status: StatusJson) -> Iterator[str]:
    """The programs that are none of ours and hold memory of GPUs, a line for each GPU."""
    for gpu, about in status["gpus"].items():
        if others := about.get("others"):
            yield f"other programs on GPU {gpu}: {named(map(_program, others))}"


def _program(about: StatusJson) -> str:
    place = f", container {about['container'][:12]}" if about["container"] else ""
    held = "" if about["bytes"] is None else f" {gib(about['bytes'])}"
    return f"{about['name']} (process {about['pid']}{place}){held}"


def hosts_not_here(status: StatusJson) -> Iterator[str]:
    """The hosts that do not take loads now, a line for each, with what is loaded there."""
    for name, host in status.get("hosts", {}).items():
        if not (host["lost"] or host["away"] or host["drained"]):
            continue
        backends = [pair for model in status["models"].values() for pair in model["backends"].items()]
        loaded = [each for each, about in backends if host_of(about) == name and about["state"] != "stopped"]
        going = "going on" if host["away"] else "until its requests have ended"
        of_those = "serving nobody" if host["lost"] else going
        loaded_there = f"; loaded there, {of_those}: {named(loaded)}" if loaded else ""
        yield f"host {name}: {host_state(host)}{loaded_there}"


def pause_line(status: StatusJson) -> str:
    """The pause that is on, in a line; "" if there is none."""
    pause = status.get("paused")
    if not pause:
        return ""
    until = f"until {time_of_day(pause['until'])}" if pause["until"] else "until `anvil-mux resume`"
    fate = "wait" if pause["requests"] == "wait" else "are refused"
    return f"paused {until}: nothing is loaded, and requests {fate}"


def host_state(host: StatusJson) -> str:
    """The state of a host in a word or two."""
    if host["lost"]:
        return f"lost for {host['lost_seconds']:.0f} s"
    return "away" if host["away"] else "drained" if host["drained"] else "here"
