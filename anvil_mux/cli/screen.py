"""Tables, colours and the screen of ``anvil-mux top``: text for a terminal. Pure but for ``paint``."""

from __future__ import annotations

import os
import sys
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TextIO

from anvil_mux.config.settings import gib
from anvil_mux.scheduler.hosts import LOCAL
from anvil_mux.scheduler.progress import span

LAST = 8
"""How many events the screen shows."""
MOST = 5
"""How many things of one kind a line names."""
LAST_LINES = 5
"""How many lines of the log of an engine that failed are shown."""
MOST_HOSTS = 12
"""How many hosts the screen shows, of those that are here and where nothing moves."""
MOVING = ("loading", "cancelling", "draining", "evicting", "demoting", "stuck")
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
    elsewhere = model.get("elsewhere")
    if elsewhere:
        error = error or (elsewhere["why"] or "" if elsewhere["circuit"] != "closed" else "")
    return (
        name,
        _state(model) + (f" {far['words']}" if far else "") + (" pinned" if model.get("pinned") else ""),
        "" if backend["size"] is None else gib(backend["size"]),
        elsewhere["server"] if elsewhere else where(model),
        str(model["leases"]),
        str(model["waiting"]) + (f" of {model['max_queue']}" if "max_queue" in model else ""),
        "" if seconds is None else f"{seconds:.1f} s",
        "" if elsewhere else _until(model, backend["unload_seconds"]),
        error if len(error) <= 60 else error[:57] + "...",
    )


def _state(model: StatusJson) -> str:
    if "elsewhere" in model:
        return _circuit(model["elsewhere"])
    return paint("host lost", COLOURS["stuck"]) if model.get("host_lost") else state_cell(model["state"])


def _circuit(elsewhere: StatusJson) -> str:
    """The state of a server elsewhere: that of its circuit, unless that is closed."""
    if elsewhere["circuit"] == "closed":
        return paint("elsewhere", COLOURS["ready"])
    left = f" {elsewhere['retry_seconds']:.0f} s" if elsewhere["retry_seconds"] else ""
    return paint(f"circuit {elsewhere['circuit'].replace('_', '-')}{left}", COLOURS["stuck"])


def where(model: StatusJson) -> str:
    """The GPUs that a model is on, or the hosts where it needs none; else where it may be loaded."""
    candidates = model.get("candidates")
    if not candidates:
        return ",".join(model["gpus"])
    loaded = [each for each in model["backends"].values() if each["state"] != "stopped"]
    there = loaded if model.get("host_lost") else [each for each in loaded if not each.get("host_lost")]
    if not there and candidates["backends"] == 1:
        there = list(model["backends"].values())
    if there:
        return named([place for each in there for place in each["gpus"] or [host_of(each)]], ",")
    if candidates["hosts"] > 1:
        return f"any of {candidates['hosts']} hosts"
    return f"any of {candidates['backends']} on {host_of(model['backends'][model['backend']])}"


def host_of(about: StatusJson) -> str:
    """The name for people of the host of a GPU or a backend."""
    return str(about.get("host") or LOCAL)


def named(names: Iterable[str], between: str = ", ") -> str:
    """Some names, and how many more there are."""
    found = list(dict.fromkeys(names))
    more = f" and {len(found) - MOST} more" if len(found) > MOST else ""
    return between.join(found[:MOST]) + more


def last_lines(models: Mapping[str, StatusJson]) -> Iterator[str]:
    """The errors of backends that failed, in full, and the last lines of their engines."""
    for model in models.values():
        for name, backend in model["backends"].items():
            if backend["error"]:
                yield ""
                yield f"{name}: {backend['error']}"
                yield from [f"  | {line}" for line in backend["log"][-LAST_LINES:]]


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


def time_of_day(moment: float) -> str:
    """The time of day of a moment, and the day if that is not today."""
    then = time.localtime(moment)
    today = then[:3] == time.localtime()[:3]
    return time.strftime("%H:%M" if today else "%Y-%m-%d %H:%M", then)


def host_state(host: StatusJson) -> str:
    """The state of a host in a word or two."""
    if host["lost"]:
        return f"lost for {host['lost_seconds']:.0f} s"
    return "away" if host["away"] else "drained" if host["drained"] else "here"


def models_table(status: StatusJson) -> list[str]:
    """The table of ``ps`` and ``top``, the presets of each model, and its prompts on disk."""
    head = [("WHERE" if each == "GPUS" and status.get("hosts") else each) for each in MODEL_HEAD]
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
    choices = [_choice_line(*pair) for pair in status.get("any_of", {}).items()]
    return [*table(head, (model_row(*pair) for pair in models)), *presets, *choices, *kept]


def _choice_line(name: str, about: StatusJson) -> str:
    """The line of a name that stands for several models."""
    never = "" if about["swap"] == "allowed" else ", swap: never"
    return f"{name}: any of {', '.join(about['models'])}{never}; now {about['serves']}"


def _kept(prompts: StatusJson) -> str:
    return f"{prompts['prompts']} ({prompts['tokens']} tokens, {prompts['size'] / (1 << 20):.1f} MiB)"


MODEL_HEAD = ("MODEL", "STATE", "SIZE", "GPUS", "LEASES", "WAITING", "LOADED-IN", "UNTIL", "LAST ERROR")


def _until(model: StatusJson, seconds: float | None) -> str:
    """How long a model stays in its state."""
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
            rows = [_gpu_row(*pair) for pair in state["gpus"].items()]
            shown += table(("GPU", "STATE", "RESIDENT", "MEMORY", "LOAD", ""), rows)
            shown += other_programs(state)
        shown += ["", *models_table(state)]
        if state["queued"]:
            rows = [(f"#{w['ticket']}", w["model"], f"{now - w['since']:.0f} s") for w in state["queued"]]
            shown += ["", *table(("WAITS", "FOR", "SINCE"), rows)]
        return [*shown, "", *self._events]


def _gpu_row(gpu: str, about: StatusJson) -> tuple[str, ...]:
    residents = ", ".join(about["residents"])
    return gpu, state_cell(about["state"]), residents, *_measured(about), _leaving(about)


def _measured(gpu: StatusJson) -> tuple[str, str]:
    """The memory of a GPU and what it measures of itself, as far as it tells."""
    used, total, sensors = gpu.get("used"), gpu.get("total"), gpu.get("sensors") or {}
    memory = f"{used / (1 << 30):.1f} of {gib(total)}" if total and used is not None else ""
    busy, celsius, watts = (sensors.get(name) for name in ("utilization", "celsius", "watts"))
    told = ("" if busy is None else f"{busy:.0%}", "" if celsius is None else f"{celsius:.0f} °C")
    return memory, " ".join(filter(None, (*told, "" if watts is None else f"{watts:.0f} W")))


def _leaving(gpu: StatusJson) -> str:
    drain = gpu["draining"]
    if not drain:
        return ""
    left = drain["seconds_left"]
    end = "once its requests have ended" if left is None else f"{left:.0f} s left"
    return f"makes room for {drain['target']}, {end}"


def _hosts_table(state: StatusJson) -> list[str]:
    """A line for each host: first those that are not here and those where something moves."""
    gpus: dict[str, list[StatusJson]] = {name: [] for name in sorted(state["hosts"])}
    for about in state["gpus"].values():
        gpus.setdefault(host_of(about), []).append(about)
    stirring = [name for name in gpus if _is_stirring(state["hosts"].get(name), gpus[name])]
    shown = [*stirring, *[name for name in gpus if name not in stirring][:MOST_HOSTS]]
    names = [name for name in gpus if name in shown]
    rows = [_host_row(name, state["hosts"].get(name), gpus[name]) for name in names]
    lines = table(("HOST", "STATE", "GPUS", "RESIDENT", ""), rows)
    left = [gpu for name in gpus.keys() - shown for gpu in gpus[name]]
    return [*lines, f"and {len(gpus) - len(shown)} more hosts: {_summed_up(left)}"] if left else lines


def _is_stirring(host: StatusJson | None, gpus: Iterable[StatusJson]) -> bool:
    """Whether there is more to say of a host than what is loaded there."""
    return bool(host and host_state(host) != "here") or any(gpu["state"] in MOVING for gpu in gpus)


def _host_row(name: str, host: StatusJson | None, gpus: Sequence[StatusJson]) -> tuple[str, ...]:
    state = host_state(host) if host else "here"
    colour = COLOURS["stuck"] if host and host["lost"] else "" if state == "here" else COLOURS["loading"]
    residents = named(model for gpu in gpus for model in gpu["residents"])
    return (
        name,
        paint(state, colour),
        _summed_up(gpus),
        residents,
        "; ".join(filter(None, map(_leaving, gpus))),
    )


def _summed_up(gpus: Iterable[StatusJson]) -> str:
    """How many GPUs are in each state."""
    return ", ".join(f"{count} {state}" for state, count in Counter(gpu["state"] for gpu in gpus).items())


def event_line(event: StatusJson) -> str:
    """An event as ``anvil-mux events`` prints it."""
    clock = time.strftime("%H:%M:%S", time.localtime(event["at"]))
    on = f" on {event['host']}" if event.get("host") else ""
    return f"{clock} {event['model'] or 'anvil-mux'}{on}: {event['text']}"
