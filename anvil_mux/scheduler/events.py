"""What can happen to backends and requests, and in which words it is told.

TRANSITIONS is the whole table of a backend's states; the GPU group is its only user. Everything that can be
observed (log, metrics, status page, simulated runs, assertions of tests) is a fold over ``Event``s.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

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
}
"""(state, what happened) -> state. Anything else is a mistake of the caller and changes nothing."""

KINDS = {
    "queued": "a request waits for its model, or for the one `backend` that has what it goes on from; "
    "`bound`, where its queue begins, is after how many seconds that is overdue",
    "leased": "a request has its backend; `seconds` is what it waited",
    "released": "a lease ended; with a `reason` before its answer had",
    "gone": "a waiting request's client left",
    "failed": "a request ended without a lease; `reason` is the error's code",
    "deferred": "the policy holds a swap back; `seconds` from now at most, or it is said again",
    "draining": "a backend gets no new leases, because it makes room for `target` or for another `reason`",
    "severed": "a request still leased when the drain ended, which took `seconds`; `reason` is the cause: "
    "evicted (for `target`), unloaded, changed, removed, idle, policy, silent, shutdown, moved",
    "evicting": "a backend is told to leave its GPUs; `seconds` is what the drain took",
    "stopped": "a backend holds nothing; with a `reason` it failed to load, or died",
    "standby": "a backend was evicted and not stopped; `reason` is its standby level",
    "demoting": "a backend in standby goes to a deeper standby level",
    "stuck": "a backend could not be stopped and may hold its GPUs",
    "loading": "a backend is being loaded",
    "cancelling": "a load is ended before its time, for a `reason`; the queue of `target` needs its GPUs",
    "ready": "a backend may be leased; `seconds` is what the load took",
    "pinned": "a model is evicted for no other one from now on, once it is resident",
    "unpinned": "a model makes room for others again",
    "reloaded": "another configuration holds from now on; `reason` is what is different",
    "reload_failed": "another configuration was refused for a `reason`, and nothing has changed",
}
"""What can happen."""

NO_ANSWER = "it does not answer"
"""The reason of a stop of an engine that runs."""
DIED = "died: "
"""How the reason of a backend begins that ended without being told to."""
PRELOAD = "preload: "
"""How the reason of a load begins that nobody waits for."""
NO_ROOM = "no room to rest by "
"""How the reason of a stop begins that was to be something lighter."""


Why = Literal["evicted", "unloaded", "changed", "removed", "idle", "policy", "silent", "shutdown", "moved"]
"""Why a request was severed: the keys of ``_SENTENCES``, which say what each means."""
Leaving = Literal["", "changed", "removed"]
"""Why a backend goes for good; "": it does not."""
LEAVES: dict[Leaving, str] = {
    "changed": "its configuration changed",
    "removed": "the configuration has it no longer",
}
"""The same as the reason of its drain and of its stop."""

_SENTENCES: dict[Why, str] = {
    "evicted": "{model} was evicted for {target}",
    "unloaded": "{model} was unloaded on request",
    "changed": "the configuration of {model} changed",
    "removed": "{model} was removed from the configuration",
    "idle": "{model} was evicted because nobody used it",
    "policy": "the policy unloaded {model}",
    "silent": "the engine of {model} did not answer",
    "shutdown": "anvil-mux shut down",
    "moved": "another replica of {model} became free",
}


class Cause(NamedTuple):
    """What ended a request that ran."""

    why: Why
    target: str = ""
    """The model that room was made for."""
    seconds: float = 0.0
    """How long the drain was."""

    def sentence(self, model: str) -> str:
        """For people; without its full stop. ``model``: the request's."""
        what = _SENTENCES[self.why].format(model=model, target=self.target)
        drained = f", after a drain of {self.seconds:.1f} s" if self.seconds else ""
        return f"{what} before this request ended{drained}"


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
    """What it took: the wait of a ticket, the load of a backend, the drain of a victim."""
    reason: str = ""
    target: str = ""
    """The model that a draining, demoting or cancelled backend makes room for."""
    way: str = ""
    """How a backend is loaded, or was: the way by which it evicted; of one that is demoting, how it is to."""
    bound: float = math.inf
    """Of the first of a queue: after how many seconds it is overdue."""
