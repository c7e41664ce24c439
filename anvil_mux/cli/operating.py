"""A running anvil-mux, steered and asked by hand.

Models are loaded, unloaded and pinned, all of them paused, hosts drained, requests cancelled, files reloaded;
requests, hosts, logs and the use of each API key are listed.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from anvil_mux.cli.arguments import (
    add_address,
    add_file,
    add_url,
    address,
    argument,
    ask,
    configuration,
    named_by_host,
    project_and_host,
    reader,
    running_at,
    subcommand,
    unserved,
)
from anvil_mux.cli.output import (
    PROGRESS_SECONDS,
    Columns,
    answer,
    paint,
    print_columns,
    print_json,
    say,
    time_of_day,
)
from anvil_mux.config.kinds import gib
from anvil_mux.errors import BackendError, BadRequest, ConfigError, MuxError, printable

Listed = Mapping[str, Any]
"""A host, request or sum that it lists."""


# Models


def load(given: argparse.Namespace) -> int:
    """Load a model: ask in another thread, and tell in this one what happens meanwhile."""
    answers: list[Any] = []

    def load_it() -> None:
        try:
            body = {"model": given.model}
            answers.append(ask(given, "POST", "/models/load?wait=true", body, timeout=None))
        except MuxError as error:
            answers.append(error)

    thread = threading.Thread(target=load_it, name="load", daemon=True)
    thread.start()
    waited = 0.0
    while thread.is_alive():
        thread.join(PROGRESS_SECONDS)
        waited += PROGRESS_SECONDS
        if thread.is_alive() and sys.stderr.isatty():
            say(f"{given.model}: {_state_of(given)}, {waited:.0f} s")
    if isinstance(answers[0], MuxError):
        raise answers[0]
    return _done(given, "is loaded")


def _state_of(given: argparse.Namespace) -> str:
    try:
        models = ask(given, "GET", "/healthz", accept=(200, 503))["models"]
    except MuxError as error:
        return error.message
    model = models.get(given.model, {})
    far = model.get("progress")
    return str(model.get("state", "loading")) + (f" {far['words']}" if far else "")


def add_unload(command: argparse.ArgumentParser) -> None:
    argument(command, "model MODEL", "the model's name", nargs="?", default="")
    argument(command, "--all", "all models, pinned ones too", action="store_true")


def unload(given: argparse.Namespace) -> int:
    if given.all == bool(given.model):
        given.refuse("name a model, or all of them with --all")
    if given.all:
        return answer(given, ask(given, "POST", "/models/unload", {"all": True}), _say_unloaded)
    if not ask(given, "POST", "/models/unload", {"model": given.model}).get("resident", True):
        return _done(given, "is not resident, or is already being evicted")
    return _done(
        given,
        "is evicted once its requests have ended (after drain_timeout they are aborted); if it was "
        "being loaded, that is cancelled",
    )


def _say_unloaded(found: Listed) -> None:
    if found["models"]:
        whose = "its requests have" if len(found["models"]) == 1 else "their requests have"
        say(f"{', '.join(found['models'])}: evicted once {whose} ended; loads are cancelled")
    else:
        say("nothing is loaded")


def add_stop(command: argparse.ArgumentParser) -> None:
    argument(command, "--all", "those of every project that nobody serves", action="store_true")


def stop(given: argparse.Namespace) -> int:
    """End the engines that an anvil-mux has left, on hosts that it simulated too.

    One that runs is asked to unload all its models.
    """
    from anvil_mux.config.config import Config
    from anvil_mux.host.local import LeftEngines
    from anvil_mux.serve.files import locked
    from anvil_mux.state import is_served, state_folder

    if given.all:
        folders = unserved()
    else:
        folders = [state_folder(configuration(given.files).project, os.environ)]
        if is_served(folders[0]):
            return answer(given, ask(given, "POST", "/models/unload", {"all": True}), _say_unloaded)
        project = folders[0].name
        folders += [
            each for each in unserved() if each != folders[0] and project_and_host(each)[0] == project
        ]
    projects: dict[str, LeftEngines] = {}
    for folder in folders:
        environ = {**os.environ, "XDG_STATE_HOME": str(folder.parent.parent)}
        with locked(Config((), project=folder.name), environ):
            left = projects[named_by_host(folder)] = LeftEngines(folder)
            left.stop()
    problems = [f"{name}: {each.problem}" for name, each in projects.items() if each.problem]
    stopped = {name: each.names for name, each in projects.items() if each.names}
    if stopped or not problems:
        answer(given, {"stopped": stopped}, _say_stopped)
    if problems:
        raise BackendError("; ".join(problems))
    return 0


def _say_stopped(result: Listed) -> None:
    for project, names in result["stopped"].items():
        say(f"{project}: stopped {', '.join(names)}")
    if not result["stopped"]:
        say("no engine was left running")


def pin(given: argparse.Namespace) -> int:
    ask(given, "POST", "/models/pin", {"model": given.model})
    return _done(given, "is pinned until it is unpinned or anvil-mux ends")


def unpin(given: argparse.Namespace) -> int:
    ask(given, "POST", "/models/unpin", {"model": given.model})
    return _done(given, "may be evicted for others again")


def _done(given: argparse.Namespace, what: str) -> int:
    return answer(given, {"model": given.model, "success": True}, lambda _: say(f"{given.model} {what}"))


# The whole


def add_pause(command: argparse.ArgumentParser) -> None:
    argument(
        command,
        "--for TIME",
        "resume automatically after this time, such as 30m or 2h; by default not before `resume`",
        dest="seconds",
        type=reader("config.kinds:read_seconds"),
    )


def pause(given: argparse.Namespace) -> int:
    body = {} if given.seconds is None else {"for": given.seconds}
    return answer(given, ask(given, "POST", "/pause", body), _say_paused)


def _say_paused(found: Listed) -> None:
    until = f"until {time_of_day(found['until'])}" if found["until"] else "until `anvil-mux resume`"
    say(f"paused {until}: models are stopped once their requests have ended (after drain_timeout at most)")
    if not found["kept"]:
        say("warning: the pause could not be saved, so a restart of anvil-mux ends it")


def resume(given: argparse.Namespace) -> int:
    resumed = "resumed: models are loaded again when requests ask for them"
    found = ask(given, "POST", "/resume", {})
    return answer(given, found, lambda _: say(resumed if found["paused"] else "it was not paused"))


def reload(given: argparse.Namespace) -> int:
    found = ask(given, "POST", "/reload", timeout=None, accept=(200, 422))
    if "error" in found:
        raise ConfigError(found["error"]["message"].splitlines())
    return answer(given, found, lambda _: print(found["text"]))


# Hosts

HOST_COLOURS = {"here": "32", "away": "33", "drained": "33", "lost": "31", "absent": "31", "unusable": "31"}
HOST_DONE = {
    "drain": "is being emptied: its models are drained and stopped, and none is loaded there",
    "undrain": "may be used again",
    "gone": "is considered empty: nothing runs there any more; it is listed as lost until it is back",
}


def add_hosts(command: argparse.ArgumentParser) -> None:
    add_address(command)
    what = command.add_subparsers(metavar="WHAT", dest="what")
    for name, about in (
        ("drain", "Evict all models from a host, and load none there"),
        ("undrain", "Use a drained host again"),
        ("gone", "Declare that nothing runs on a lost host any more"),
    ):
        one = subcommand(what, name, about)
        argument(one, "host HOST", "the host's name, as `hosts` lists it")
        # Suppressed, since a default would replace what stands before WHAT.
        add_file(one, argparse.SUPPRESS)
        add_url(one, argparse.SUPPRESS)


def hosts(given: argparse.Namespace) -> int:
    """Do what was asked for with a host, or list all."""
    if given.what:
        ask(given, "POST", f"/hosts/{given.what}", {"host": given.host})
        print(f"{given.host} {HOST_DONE[given.what]}")
        return 0
    return answer(given, ask(given, "GET", "/hosts"), lambda found: print_hosts(found["hosts"]))


def print_hosts(hosts: Sequence[Listed]) -> None:
    """Print a table of hosts, and below it why some are not in use."""
    print_columns(HOSTS, hosts)
    for host in hosts:
        if why := host.get("why"):
            say(f"{host['host']}: {why}")


def _host_state(host: Listed) -> str:
    state = "drained" if host.get("drained") and host["state"] == "here" else host["state"]
    return paint(state, HOST_COLOURS.get(state, ""))


def _host_gpus(host: Listed) -> str:
    """The GPUs of a host, as far as they are known."""
    gpus = host.get("gpus") or ()
    return ", ".join(f"{each['id']} ({gib(each['total'])})" if each["total"] else each["id"] for each in gpus)


def _round_trip(host: Listed) -> str:
    trip = host.get("round_trip_seconds") if host["state"] == "here" else None
    return "" if trip is None else f"{trip * 1000:.1f} ms"


HOSTS: Columns[Listed] = {
    "HOST": lambda host: host["host"],
    "STATE": _host_state,
    "ADDRESS": lambda host: host.get("address") or "",
    "GPUS": _host_gpus,
    "MEMORY": lambda host: gib(host["memory"]) if host.get("memory") else "",
    "VERSIONS": lambda host: ", ".join(f"{name} {v}" for name, v in (host.get("versions") or {}).items()),
    "ROUND-TRIP": _round_trip,
}


# Requests


def add_requests(command: argparse.ArgumentParser) -> None:
    argument(command, "id ID", "show this request: its X-Request-ID", nargs="?", default="")
    argument(command, "--running", "list the requests that wait or run now", action="store_true")
    argument(command, "--cancel", "end the request ID, which waits or runs", action="store_true")


def requests(given: argparse.Namespace) -> int:
    """List the requests under way, or end one; list the last ones, or show one with its bodies."""
    if given.cancel:
        if not given.id:
            raise BadRequest("name the request to cancel: anvil-mux requests --cancel ID")
        done = ask(given, "POST", "/requests/cancel", {"id": given.id})
        return answer(given, done, lambda _: say(f"the request {given.id} was cancelled"))
    if given.running:
        found = ask(given, "GET", "/requests/running")
        return answer(given, found, lambda _: print_columns(RUNNING, found["requests"]))
    if given.id:
        return answer(given, ask(given, "GET", "/requests", query={"id": given.id}), _print_request)
    return answer(given, ask(given, "GET", "/requests"), _print_last)


RUNNING: Columns[Listed] = {
    "ID": lambda each: each["id"] or f"(load {each['ticket']})",
    "KEY": lambda each: each["key"],
    "MODEL": lambda each: each["model"],
    "BACKEND": lambda each: each["backend"],
    "STATE": lambda each: each["state"],
    "FOR": lambda each: f"{each['seconds']:.1f} s",
}


def _print_last(found: Listed) -> None:
    if found["capture"]:
        print_columns(ENDED, found["requests"])
    else:
        say("no request is kept; `capture: 50` at the top level of x-anvil keeps the last 50")


ENDED: Columns[Listed] = {
    "ID": lambda each: each["id"],
    "ENDED": lambda each: time.strftime("%H:%M:%S", time.localtime(each["ended"])),
    "KEY": lambda each: each["key"],
    "MODEL": lambda each: each["model"],
    "ANSWER": lambda each: f"{each['status']} {each['code']}".rstrip(),
    "TOOK": lambda each: f"{each['seconds']:.2f} s",
    "TOKENS": lambda each: str(each["tokens"] or ""),
}


def _print_request(found: Listed) -> None:
    key = f", key {found['key']}" if found["key"] else ""
    print(paint(f"# asked: {found['path']} of {found['model']}, request {found['id']}{key}", "1"))
    print("(a form, which is not kept)" if found["question_is_form"] else _indented(found["question"]))
    _say_cut(found["question_is_cut"])
    status = f"{found['status']} {found['code']}".rstrip()
    print(paint(f"# answered: {status} in {found['seconds']:.2f} s", "1"))
    print(_indented(found["answer"]))
    _say_cut(found["answer_is_cut"])


def _say_cut(is_cut: bool) -> None:
    if is_cut:
        say("the rest was not kept")


def _indented(text: str) -> str:
    """JSON with indentation; other text as it is."""
    try:
        return json.dumps(json.loads(text), indent=2, ensure_ascii=False)
    except ValueError:
        return text.rstrip("\n")


# The use of each key


def add_usage(command: argparse.ArgumentParser) -> None:
    argument(command, "--since TIME", "how far back, such as 12h or 30d (default 7d)", default="7d")
    argument(command, "--csv", "print CSV", action="store_true")


def usage(given: argparse.Namespace) -> int:
    found = ask(given, "GET", "/usage", query={"since": given.since})
    rows: list[dict[str, Any]] = found["usage"]
    if given.json:
        print_json(found)
    elif given.csv:
        writer = csv.DictWriter(sys.stdout, rows[0] if rows else ["key", "model"], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    elif rows:
        print_columns(USAGE, rows)
    else:
        say(f"no requests since {time_of_day(found['since'])}")
    return 0


def _hours(seconds: float) -> str:
    """A length of time in hours, minutes and seconds."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


USAGE: Columns[Listed] = {
    "KEY": lambda used: used["key"],
    "MODEL": lambda used: used["model"],
    "REQUESTS": lambda used: str(used["requests"]),
    "FAILED": lambda used: str(used["failed"]),
    "TOKENS-IN": lambda used: str(used["prompt_tokens"]),
    "CACHED": lambda used: str(used["cached_tokens"]),
    "TOKENS-OUT": lambda used: str(used["tokens"]),
    "TIME": lambda used: _hours(used["seconds"]),
    "GPU-TIME": lambda used: _hours(used["gpu_seconds"]),
}


# Logs

HERE_ONLY = "-f follows a log only where both the engine and anvil-mux run"


def add_logs(command: argparse.ArgumentParser) -> None:
    argument(command, "model MODEL", "a model, or the service of one replica")
    argument(command, "-f --follow", "keep printing what the engine logs", action="store_true")
    argument(command, "-n --lines N", "number of last lines (default 100)", type=int, default=100)


def logs(given: argparse.Namespace) -> int:
    """Ask the anvil-mux that runs; where none does, or to follow a log, read what the engines left here."""
    from anvil_mux.serve import remote

    named = bool(given.url or (os.environ.get("ANVIL_URL") and not given.files))
    try:
        place = running_at(address(given))
    except remote.NotRunning:
        if not given.files:
            raise
        place = None
    if not given.follow and (place or named or not given.files):
        try:
            return _logs_there(given)
        except remote.NotRunning:
            if named:
                raise
    elif named and not place:
        raise BackendError(HERE_ONLY)
    return _logs_here(given, place.files if place else given.files)


def _logs_there(given: argparse.Namespace) -> int:
    """Print the logs of engines, as the anvil-mux that runs has them."""

    def lines_of(**of: str) -> Any:
        return ask(given, "GET", "/logs", query={"lines": str(given.lines), **of})

    first = lines_of(model=given.model)
    model, backend = first["model"], first["backend"]
    others = (
        [] if backend == given.model != model else [each for each in first["backends"] if each != backend]
    )
    for found in [first, *(lines_of(model=model, backend=other) for other in others)]:
        _print_log(given, found["backend"], found["lines"], headed=bool(others))
    return 0


def _logs_here(given: argparse.Namespace, files: Sequence[str]) -> int:
    """Print the logs of engines on this machine, whose services are in these files."""
    from anvil_mux.host.local import LocalHost
    from anvil_mux.host.seam import HostConfig

    config = configuration(files)
    backends = [b for b in config.backends if given.model in (b.name, b.model, *b.aliases)]
    if not backends:
        known = ", ".join(b.model for b in config.backends)
        raise BackendError(f"no service serves {given.model}; known: {known}")
    if any(backend.host for backend in backends):
        elsewhere = f"{given.model} is on another host: only a running anvil-mux has its log"
        raise BackendError(HERE_ONLY if given.follow else elsewhere)
    if given.follow and len(backends) > 1:
        names = ", ".join(b.name for b in backends)
        raise BackendError(f"{given.model} has several services; follow one of them: {names}")
    host = LocalHost(HostConfig.of(config))
    for backend in backends:
        lines = host.follow_log(backend) if given.follow else host.log_tail(backend, given.lines)
        _print_log(given, backend.name, lines, headed=len(backends) > 1)
    return 0


def _print_log(given: argparse.Namespace, service: str, lines: Iterable[str], *, headed: bool) -> None:
    """Print the log of a backend; ``headed``: under its name, since others follow."""
    if headed and not given.json:
        say(f"==> {service}")
    for line in lines:
        text = json.dumps({"service": service, "line": line}) if given.json else printable(line)
        print(text, flush=given.follow)
