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
STATES = sorted({state for state, _ in TRANSITIONS} | {*TRANSITIONS.values()})
"""The states of a backend. An event of one of these kinds tells that it entered it."""

KINDS = {
    "queued": "a request waits for its model, or for the one `backend` that has the answer it continues; "
    "on the first of a queue, `bound` is the number of seconds after which the queue is overdue, `load` and "
    "`seconds` are how long a load and a whole swap of its model are expected to take",
    "leased": "a request was given a backend; `seconds` is how long it waited",
    "released": "a lease ended; if it has a `cause`, before its answer was complete",
    "gone": "the client of a waiting request closed its connection",
    "failed": "a request ended without a lease; the `detail` of its `cause` is the error's code",
    "deferred": "the policy has held a swap back for a second, and does so for at most `seconds` more; "
    "repeated after that",
    "plugin_failed": "a policy or an eviction from outside made a mistake; the first one of each is reported",
    "draining": "a backend gets no new requests, to make room for `target` or for another `cause`; "
    "again if it makes room for another `target` than before",
    "severed": "a request was aborted because the drain ended, after `seconds`; its `cause` is evicted "
    "(for `target`), unloaded, changed, removed, idle, surplus, policy, silent, host_lost, "
    "host_drained, paused or shutdown",
    "evicting": "a backend is being taken off its GPUs; `seconds` is how long the drain took",
    "stopped": "a backend holds nothing; if it has a `cause`, it failed to load or died",
    "standby": "a backend was evicted but not stopped, and is at the standby level `way`; if it has a "
    "`cause`, it could not be stopped, or was found in standby when its host came back",
    "demoting": "a backend in standby is moved to a deeper standby level",
    "stuck": "a backend could not be stopped and may hold its GPUs",
    "loading": "a backend is being loaded",
    "cancelling": "a load is being cancelled; the queue of `target`, if there is one, needs its GPUs",
    "ready": "a backend can serve; `seconds` is how long the load took",
    "pinned": "a model will not be evicted for another one, once it is resident",
    "unpinned": "a model may be evicted for another one again",
    "host_lost": "the host that the `cause` names no longer answers, and neither do its engines",
    "host_back": "a lost host answers again; events about those of its backends that have changed follow",
    "host_drained": "a host is being emptied: its backends are drained and stopped, and none is loaded there",
    "host_undrained": "a host that was drained may be used again",
    "paused": "all models are drained and stopped, and none is loaded for `seconds`, or until somebody "
    "resumes; repeated when the end of the pause is changed",
    "resumed": "models may be loaded again; the `cause` is resumed (by hand) or pause_over",
    "host_away": "the agent of a host does not answer: its engines go on serving, but nothing is loaded or "
    "evicted there",
    "host_heard": "the agent of a host that was away answers again",
    "reloaded": "a new configuration took effect; the `detail` of its `cause` says what changed",
    "reload_failed": "a new configuration was refused for a `cause`, and nothing changed",
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
    """The time that was taken: the wait of a ticket, the load of a backend, the drain of a victim. Of a queue
    that begins and of a swap that is held back: the time that it may take."""
    cause: Cause | None = None
    """Why it happened, where there may be several reasons."""
    target: str = ""
    """The model that a draining, demoting or cancelled backend makes room for."""
    way: str = ""
    """A standby level: the one a backend is or was loaded from, is in, or is demoted to."""
    bound: float = math.inf
    """Seconds after which a queue is overdue, in the event of its first ticket."""
    load: float = 0.0
    """Seconds that the load of its model is expected to take, in that event."""
