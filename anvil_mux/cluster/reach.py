"""How the cluster that a command names is reached."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path

from anvil_mux.cluster.channel import AgentSilent, ChildControl
from anvil_mux.cluster.cluster import Cluster
from anvil_mux.cluster.local import RETURN_SECONDS, SimulatedHosts
from anvil_mux.errors import MuxError
from anvil_mux.state import state_folder

AGENT_SECONDS = 15.0
"""How long the agents of hosts may take to start when the cluster is reached; later ones are tried again."""
LOG_SIZE = 1 << 20
"""Bytes of the log of Ray after which another one is begun; the one before is kept."""
LOCAL = "local"
"""The cluster of simulated hosts."""


class CannotReach(MuxError):
    """The cluster cannot be reached, or may not be used as it is; the message says what to do."""


def reach(address: str, say: Callable[[str], object], *, insecure: bool = False) -> Cluster:
    """Reach a cluster, and look which hosts it has; CannotReach.

    ``address``: HEAD:PORT, or ``local``, of which ``say`` is told what can be tried. ``insecure``: whether it
    may do without a token.
    """
    control: ChildControl | SimulatedHosts
    if address == LOCAL:
        control = SimulatedHosts(Path(state_folder("simulated-hosts", os.environ)))
    elif importlib.util.find_spec("ray") is None:
        raise CannotReach("--cluster needs Ray: pip install 'anvil-mux[ray]' (bin/anvil-mux brings it)")
    else:
        words = [sys.executable, "-m", "anvil_mux.cluster.driver", address]
        control = ChildControl([*words, *(["--insecure"] if insecure else [])], log=_log_of_ray())
    cluster = Cluster(control)
    try:
        control.open()
        cluster.look(AGENT_SECONDS)
    except AgentSilent as error:
        cluster.close()
        raise CannotReach(f"the cluster at {address} cannot be used: {error.message}") from None
    if isinstance(control, SimulatedHosts):
        for name, pid in control.pids().items():
            later = f"{RETURN_SECONDS:g} s later"
            say(f"host {name} is process {pid}: `kill {pid}` is a power failure, and it returns {later}")
    return cluster


def _log_of_ray() -> Path | None:
    """Return the file for what Ray itself prints; None where there can be none."""
    file = state_folder("cluster", os.environ) / "ray.log"
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with file.open("ab") as log:
            is_full = log.tell() > LOG_SIZE
        if is_full:
            os.replace(file, file.with_suffix(".log.1"))
    except OSError:
        return None
    return file
