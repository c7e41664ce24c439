"""The commands that ask a running anvil-mux: ps, top, why, events, load, unload, pin, unpin, profile.

Its address is --url, ANVIL_URL, what one that serves the compose file here has written down (remote.py), what
that file says, or the default.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from anvil_mux.cli.arguments import add_json, read_positive, read_sizes
from anvil_mux.cli.output import PROGRESS_SECONDS, print_json, print_table, say
from anvil_mux.cli.screen import (
    event_line,
    hosts_not_here,
    last_lines,
    models_table,
    named,
    other_programs,
    pause_line,
)
from anvil_mux.errors import ConfigError, MuxError, printable

MOST_STOPPED = 8
"""How many replicas that are stopped are listed."""


def add_address(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--file", action="append", dest="files", default=[], metavar="FILE", help="compose file"
    )
    command.add_argument(
        "--url", help="address of anvil-mux; by default ANVIL_URL, or the one that runs here"
    )
    add_json(command)


def add_model(command: argparse.ArgumentParser) -> None:
    command.add_argument("model", metavar="MODEL", help="the model's name")
    add_address(command)


def add_unload(command: argparse.ArgumentParser) -> None:
    command.add_argument("model", metavar="MODEL", nargs="?", default="", help="the model's name")
    command.add_argument("--all", action="store_true", help="all models, pinned ones too")
    add_address(command)


def add_why(command: argparse.ArgumentParser) -> None:
    add_model(command)
    command.add_argument(
        "--explain", action="store_true", help="also show which replica would get it, and why not the others"
    )
    command.add_argument(
        "--tokens",
        type=read_positive,
        metavar="N",
        help="explain for a prompt of N tokens, none of them cached",
    )


def add_events(command: argparse.ArgumentParser) -> None:
    command.add_argument("model", metavar="MODEL", nargs="?", default="", help="only events of this model")
    command.add_argument("-f", "--follow", action="store_true", help="keep printing new events as they come")
    command.add_argument(
        "--file", action="append", dest="files", default=[], metavar="FILE", help="compose file"
    )
    command.add_argument("--url", help="address of anvil-mux; see `ps`")
    add_json(command)


def add_profile(command: argparse.ArgumentParser) -> None:
    add_model(command)
    command.add_argument(
        "-o", "--output", metavar="FILE", help="the file to write; by default standard output"
    )
    command.add_argument(
        "--repeat", type=int, default=3, metavar="N", help="requests for each figure (default 3)"
    )
    command.add_argument(
        "--prompts", type=read_sizes, default=None, metavar="N,N", help="prompt lengths to measure, in tokens"
    )
    command.add_argument(
        "--batches",
        type=read_sizes,
        default=None,
        metavar="N,N",
        help="numbers of concurrent requests to measure",
    )
    command.add_argument(
        "--lengths",
        type=read_sizes,
        default=None,
        metavar="N,N",
        help="lengths of the concurrent requests, in tokens",
    )


def ps(given: argparse.Namespace) -> int:
    status = ask_mux(given, "GET", "/healthz", accept=(200, 503))
    if given.json:
        print_json(status)
        return 0
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
    return 0


def load(given: argparse.Namespace) -> int:
    """Load a model: ask in another thread, and tell in this one what happens meanwhile."""
    answers: list[Any] = []

    def ask() -> None:
        try:
            answers.append(
                ask_mux(given, "POST", "/models/load?wait=true", {"model": given.model}, timeout=None)
            )
        except MuxError as error:
            answers.append(error)

    thread = threading.Thread(target=ask, name="load", daemon=True)
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
        models = ask_mux(given, "GET", "/healthz", accept=(200, 503))["models"]
    except MuxError as error:
        return error.message
    model = models.get(given.model, {})
    far = model.get("progress")
    return str(model.get("state", "loading")) + (f" {far['words']}" if far else "")


def unload(given: argparse.Namespace) -> int:
    if given.all == bool(given.model):
        given.refuse("name a model, or all of them with --all")
    if given.all:
        return _unload_all(given)
    told = ask_mux(given, "POST", "/models/unload", {"model": given.model})
    if told.get("resident", True):
        return _done(
            given,
            "is evicted once its requests have ended (after drain_timeout they are aborted); if it was "
            "being loaded, that is cancelled",
        )
    return _done(given, "is not resident, or is already being evicted")


def _unload_all(given: argparse.Namespace) -> int:
    told = ask_mux(given, "POST", "/models/unload", {"all": True})
    if given.json:
        print_json(told)
    elif told["models"]:
        whose = "its requests have" if len(told["models"]) == 1 else "their requests have"
        say(f"{', '.join(told['models'])}: evicted once {whose} ended; loads are cancelled")
    else:
        say("nothing is loaded")
    return 0


def pin(given: argparse.Namespace) -> int:
    ask_mux(given, "POST", "/models/pin", {"model": given.model})
    return _done(given, "is pinned until it is unpinned or anvil-mux ends")


def unpin(given: argparse.Namespace) -> int:
    ask_mux(given, "POST", "/models/unpin", {"model": given.model})
    return _done(given, "may be evicted for others again")


def reload(given: argparse.Namespace) -> int:
    answer = ask_mux(given, "POST", "/reload", timeout=None, accept=(200, 422))
    if "error" in answer:
        raise ConfigError(answer["error"]["message"].splitlines())
    if given.json:
        print_json(answer)
    else:
        print(answer["text"])
    return 0


def logs(given: argparse.Namespace, url: str) -> int:
    """Print the logs of engines, as the anvil-mux at ``url`` has them."""
    from anvil_mux.serve import remote

    def ask(**of: str) -> Any:
        return remote.ask(url, "GET", remote.query("/logs", lines=str(given.lines), **of))

    first = ask(model=given.model)
    model, backend = first["model"], first["backend"]
    others = (
        [] if backend == given.model != model else [each for each in first["backends"] if each != backend]
    )
    for told in [first, *(ask(model=model, backend=other) for other in others)]:
        print_log(given, told["backend"], told["lines"], headed=bool(others))
    return 0


def print_log(given: argparse.Namespace, service: str, lines: Iterable[str], *, headed: bool) -> None:
    """Print the log of a backend; ``headed``: under its name, since others follow."""
    if headed and not given.json:
        say(f"==> {service}")
    for line in lines:
        text = json.dumps({"service": service, "line": line}) if given.json else printable(line)
        print(text, flush=given.follow)


def profile(given: argparse.Namespace) -> int:
    from anvil_mux.cli import profiler

    engine = profiler.Profiler(address(given), given.model, os.environ.get("ANVIL_API_KEY", ""))
    found = profiler.measure(
        engine,
        say,
        prompts=given.prompts or profiler.PROMPTS,
        batches=given.batches or profiler.BATCHES,
        lengths=given.lengths or profiler.LENGTHS,
        repeat=max(given.repeat, 1),
    )
    if given.output:
        Path(given.output).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        say(f"written to {given.output}; use it: x-anvil: {{profile: {given.output}}}")
    else:
        print_json(found)
    return 0


def _done(given: argparse.Namespace, what: str) -> int:
    if given.json:
        print_json({"model": given.model, "success": True})
    else:
        say(f"{given.model} {what}")
    return 0


def ask_mux(given: argparse.Namespace, method: str, path: str, body: object = None, **how: Any) -> Any:
    from anvil_mux.serve import remote

    return remote.ask(address(given), method, path, body, **how)


def address(given: argparse.Namespace) -> str:
    """The address: as given, of the one that serves the file at hand, by that file, or the default."""
    from anvil_mux.config.composefile import find_files
    from anvil_mux.serve import remote
    from anvil_mux.state import state_folder

    url, files_given = given.url or os.environ.get("ANVIL_URL"), getattr(given, "files", ())
    if not url:
        home = state_folder("", os.environ)
        try:
            files: Sequence[str | Path] = files_given or find_files(Path.cwd(), os.environ)
        except ConfigError:
            files = ()
        found = remote.places(home)
        url = remote.choose(found, files) or _configured_url(files_given) or remote.DEFAULT_URL
    return with_scheme(url)


def with_scheme(url: str) -> str:
    return url if "://" in url else f"http://{url}"


def _configured_url(files: Sequence[str]) -> str | None:
    """The address in the compose files, of which nothing else is read, right or wrong."""
    from anvil_mux.config import interpolate, overlay
    from anvil_mux.config.composefile import find_files
    from anvil_mux.config.table import SETTINGS

    try:
        paths = [Path(file) for file in files] or find_files(Path.cwd(), os.environ)
        documents = [interpolate.read(path) for path in paths]
        layers = overlay.Layers(documents, interpolate.environment(paths[0].parent, os.environ))
        listen = os.environ.get("ANVIL_LISTEN")
        said = listen or overlay.origins(layers.of_all())["listen"].filled("listen")
        host, port = SETTINGS["listen"].kind.read(said)
    except (ConfigError, ValueError, KeyError, TypeError):
        if files and not Path(files[0]).exists():
            raise
        return None
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def why(given: argparse.Namespace) -> int:
    from anvil_mux.serve import remote

    found = ask_mux(given, "GET", remote.query("/why", model=given.model, tokens=str(given.tokens or 0)))
    if given.json:
        print_json(found)
        return 0
    print(found["sentence"])
    _print_hosts(found.get("hosts") or ())
    if given.explain or given.tokens:
        for stage, rows in found["stages"].items():
            _print_explained(stage, rows)
    return 0


def _print_hosts(hosts: Sequence[Mapping[str, Any]]) -> None:
    """The hosts where a model may run: those where it is loaded, those that are left out, and the others."""
    empty = [each for each in hosts if not each["left_out"] and each["states"].keys() == {"stopped"}]
    rows = [
        (
            each["host"],
            ", ".join(f"{count} {state}" for state, count in each["states"].items()),
            each["left_out"] or "",
        )
        for each in hosts
        if each not in empty
    ]
    if rows:
        print_table(("HOST", "BACKENDS", "LEFT OUT"), rows)
    if empty:
        print(f"It may be loaded on {named(each['host'] for each in empty)}.")


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


def events(given: argparse.Namespace) -> int:
    from anvil_mux.serve import remote

    for kind, data in remote.events(address(given)):
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
    from anvil_mux.cli.screen import TopScreen
    from anvil_mux.serve import remote

    picture, live = TopScreen(), sys.stdout.isatty()
    for kind, data in remote.events(address(given)):
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
