"""The command ``hosts``: which hosts a running anvil-mux uses and how they are, and what is done by hand."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from anvil_mux.cli.asking import add_address, ask_mux
from anvil_mux.cli.output import print_json, print_table, say
from anvil_mux.cli.screen import paint
from anvil_mux.config.settings import gib

HEAD = ("HOST", "STATE", "ADDRESS", "GPUS", "MEMORY", "VERSIONS", "ROUND-TRIP")
COLOURS = {"here": "32", "away": "33", "drained": "33", "lost": "31", "absent": "31", "unusable": "31"}
DONE = {
    "drain": "is being emptied: its models are drained and stopped, and none is loaded there",
    "undrain": "may be used again",
    "gone": "is considered empty: nothing runs there any more; it is listed as lost until it is back",
}


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the words of the command."""
    add_address(command)
    what = command.add_subparsers(metavar="WHAT", dest="what")
    for name, about in (
        ("drain", "Evict all models from a host, and load none there"),
        ("undrain", "Use a drained host again"),
        ("gone", "Declare that nothing runs on a lost host any more"),
    ):
        told = what.add_parser(name, help=about, description=f"{about}.")
        told.add_argument("host", metavar="HOST", help="the host's name, as `hosts` lists it")
        told.add_argument(
            "--file",
            action="append",
            dest="files",
            default=argparse.SUPPRESS,  # else it would replace what stands before WHAT
            metavar="FILE",
            help="compose file",
        )
        told.add_argument("--url", default=argparse.SUPPRESS, help="address of anvil-mux; see `ps`")


def run(given: argparse.Namespace) -> int:
    """Do what was asked for with a host, or list all."""
    if given.what:
        ask_mux(given, "POST", f"/hosts/{given.what}", {"host": given.host})
        print(f"{given.host} {DONE[given.what]}")
        return 0
    found = ask_mux(given, "GET", "/hosts")
    if given.json:
        print_json(found)
        return 0
    print_hosts(found["hosts"])
    return 0


def print_hosts(hosts: Sequence[Mapping[str, Any]]) -> None:
    """Print a table of hosts, and below it why some are not in use."""
    print_table(HEAD, [host_row(host) for host in hosts])
    for host in hosts:
        if why := host.get("why"):
            say(f"{host['host']}: {why}")


def host_row(host: Mapping[str, Any]) -> tuple[str, ...]:
    """A host's row in the table."""
    state = "drained" if host.get("drained") and host["state"] == "here" else host["state"]
    gpus = [
        f"{each['id']} ({gib(each['total'])})" if each["total"] else each["id"] for each in host_gpus(host)
    ]
    said = host.get("versions") or {}
    trip = host.get("round_trip_seconds") if host["state"] == "here" else None
    return (
        host["host"],
        paint(state, COLOURS.get(state, "")),
        host.get("address") or "",
        ", ".join(gpus),
        gib(host["memory"]) if host.get("memory") else "",
        ", ".join(f"{name} {text}" for name, text in said.items()),
        "" if trip is None else f"{trip * 1000:.1f} ms",
    )


def host_gpus(host: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The GPUs of a host, as far as they are known."""
    return list(host.get("gpus") or ())
