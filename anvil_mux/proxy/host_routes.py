"""The routes about hosts: which there are and how they are, and what is done with them by hand.

``POST /hosts/drain`` empties a host and loads nothing there until ``/hosts/undrain``; ``/hosts/gone`` says
that nothing runs any more on a host that is lost.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from anvil_mux.errors import BadRequest, NotFound
from anvil_mux.multiplexer.multiplexer import Multiplexer
from anvil_mux.protocol.completions import parse
from anvil_mux.proxy.asked import Asked
from anvil_mux.proxy.probes import Answer
from anvil_mux.proxy.questions import read_json
from anvil_mux.proxy.reply import JSON, Reply
from anvil_mux.telemetry import healthz
from anvil_mux.telemetry.accesslog import Served

HostReports = Callable[[], list[dict[str, Any]]]
"""Says of each host what only the program knows: whether it is here, what it has, how fast it answers."""


class HostRoutes:
    """Answers the routes about hosts. Any thread."""

    def __init__(self, mux: Multiplexer, reports: HostReports) -> None:
        self._mux = mux
        self._reports = reports

    def hosts(self, _: Asked) -> Answer:
        known = {host.host: healthz.host_state(host) for host in self._mux.overview.status().hosts}
        told = [{**known.get(each["host"], {}), **each} for each in self._reports()]
        return 200, JSON, json.dumps({"hosts": told}, indent=1).encode("ascii") + b"\n"

    def drain(self, asked: Asked, reply: Reply, record: Served) -> None:
        self._mux.facts.host_drained(self._named(asked, reply), True)
        reply.whole(200, [JSON], b'{"success":true}')

    def undrain(self, asked: Asked, reply: Reply, record: Served) -> None:
        self._mux.facts.host_drained(self._named(asked, reply), False)
        reply.whole(200, [JSON], b'{"success":true}')

    def gone(self, asked: Asked, reply: Reply, record: Served) -> None:
        name = self._named(asked, reply)
        if not any(host.host == name and host.is_lost for host in self._mux.overview.status().hosts):
            raise BadRequest(f"The host {name} is not lost: it can be drained.", param="host")
        self._mux.facts.host_gone(name)
        reply.whole(200, [JSON], b'{"success":true}')

    def _named(self, asked: Asked, reply: Reply) -> str:
        """The host that the body names; ours is `local`."""
        name = parse(read_json(asked, reply.client)).get("host")
        if not isinstance(name, str) or not name:
            raise BadRequest("the body must name a `host`", param="host")
        known = [host.host for host in self._mux.overview.status().hosts]
        if name not in known and name != "local":
            raise NotFound(f"There is no host {name}. Known hosts: {', '.join(['local', *known])}.")
        return "" if name == "local" else name
