"""The events of backends and requests, and the table of a backend's states.

``Slot.enter`` is the only user of the table, TRANSITIONS. Everything that can be observed (log, metrics,
status page, simulated runs, assertions of tests) is a fold over ``Event``s.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from anvil_mux.scheduler.causes import Cause

TRANSITIONS: dict[tuple[str, str], str] = {
    ("stopped", "load"): "loading",
    ("standby", "load"): "loading",
    ("stopped", "adopt"): "ready",
    ("stopped", "adopt_standby"): "standby",
    ("loading", "loaded"): "ready",
    ("loading", "load_failed"): "stopped",
    ("loading", "evict_failed"): "stuck",
    ("loading", "cancel"): "cancelling",
    ("cancelling", "cancelled"): "stopped",
    ("cancelling", "loaded"): "ready",
    ("cancelling", "evict_failed"): "stuck",
    ("ready", "drain"): "draining",
    ("draining", "reprieve"): "ready",
    ("draining", "evict"): "evicting",
    ("evicting", "stopped"): "stopped",
    ("evicting", "standby"): "standby",
    ("evicting", "evict_failed"): "stuck",
    ("stuck", "evict"): "evicting",
    ("ready", "died"): "stopped",
    ("draining", "died"): "stopped",
    ("standby", "died"): "stopped",
    ("stuck", "died"): "stopped",
    ("standby", "demote"): "demoting",
    ("demoting", "stopped"): "stopped",
    ("demoting", "standby"): "standby",
    ("demoting", "evict_failed"): "standby",
    ("loading", "gone"): "stopped",
    ("cancelling", "gone"): "stopped",
    ("ready", "gone"): "stopped",
    ("draining", "gone"): "stopped",
    ("evicting", "gone"): "stopped",
    ("stuck", "gone"): "stopped",
    ("standby", "gone"): "stopped",
    ("demoting", "gone"): "stopped",
    ("stopped", "unfit"): "stuck",
}
"""State and what happened -> the next state. All else is a mistake of the caller, and changes nothing."""

KINDS = {
    "queued": "a request waits for its model, or for the one `backend` that has what it goes on from; "
    "`bound`, where its queue begins, is after how many seconds that is overdue",
    "leased": "a request has its backend; `seconds` is what it waited",
    "released": "a lease ended; with a `cause` before its answer had",
    "gone": "a waiting request's client left",
    "failed": "a request ended without a lease; the `detail` of its `cause` is the error's code",
    "deferred": "the policy holds a swap back; `seconds` from now at most, or it is said again",
    "draining": "a backend gets no new leases, because it makes room for `target` or for another `cause`",
    "severed": "a request still leased when the drain ended, which took `seconds`; `cause` is evicted "
    "(for `target`), unloaded, changed, removed, idle, surplus, policy, silent, host_lost, "
    "host_drained, paused or shutdown",
    "evicting": "a backend begins to leave its GPUs; `seconds` is what the drain took",
    "stopped": "a backend holds nothing; with a `cause` it failed to load, or died",
    "standby": "a backend was evicted and not stopped, and is at the standby level `way`; with a `cause` "
    "it could not be stopped, or was found so when its host was back",
    "demoting": "a backend in standby goes to a deeper standby level",
    "stuck": "a backend could not be stopped and may hold its GPUs",
    "loading": "a backend is being loaded",
    "cancelling": "a load is ended before its time, for a `cause`; the queue of `target` needs its GPUs",
    "ready": "a backend may be leased; `seconds` is what the load took",
    "pinned": "a model is evicted for no other one from now on, once it is resident",
    "unpinned": "a model may be evicted for others again",
    "host_lost": "nobody hears of a host any more: the one that its `cause` names",
    "host_back": "a host that was lost is heard of again; then comes what was found of its backends, where "
    "it is not what it was",
    "host_drained": "a host is to have nothing on it: what is there is drained and stopped",
    "host_undrained": "a host that was drained may have backends again",
    "paused": "nothing stays or is loaded on any host for `seconds`, or until it is resumed; also said when "
    "the end of a pause is set anew",
    "resumed": "models may be loaded again; `cause` is resumed (by hand) or pause_over",
    "host_away": "nothing is begun on a host for now, and requests go on: its agent does not answer",
    "host_heard": "the agent of a host that was away answers again",
    "reloaded": "another configuration holds from now on; the `detail` of its `cause` is what is different",
    "reload_failed": "another configuration was refused for a `cause`, and nothing has changed",
}
"""Each kind of event -> what it means."""


class Event(NamedTuple):
    """One change of state. Everything that can be observed is a fold over these."""

    at: float
    kind: str
    """One of KINDS."""
    model: str
    backend: str = ""
    ticket: int = 0
    size: int = 0
    """Leases or tickets concerned."""
    seconds: float = 0.0
    """The time that was taken: the wait of a ticket, the load of a backend, the drain of a victim."""
    cause: Cause | None = None
    """Why it happened, where there may be several reasons."""
    target: str = ""
    """The model that a draining, demoting or cancelled backend makes room for."""
    way: str = ""
    """A standby level: the one a backend is or was loaded from, is in, or is demoted to."""
    bound: float = math.inf
    """Seconds after which a queue is overdue, in the event of its first ticket."""
