"""Events: what happens to backends and requests, and why.

Everything that can be observed (log, metrics, status page, simulated runs, assertions of tests) is a fold
over ``Event``s. Its ``Cause``, which also stands in the policies' decisions and with requests that were
severed, is one of a closed list of kinds, each with its figures. Code decides by the ``kind`` and the
figures; ``sentence`` is the only place where words are made of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

LOCAL = "local"
"""The name, for people, of the host that anvil-mux runs on."""
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
    "host_away": "the agent of a host, or the container engine of our own, does not answer: engines go on "
    "serving, but nothing is loaded or evicted there",
    "host_heard": "what did not answer there answers again",
    "reloaded": "a new configuration took effect; the `detail` of its `cause` says what changed",
    "reload_failed": "a new configuration was refused for a `cause`, and nothing changed",
}
"""Each kind of event -> what it means."""
Leaving = Literal["", "changed", "removed"]
"""Why a backend leaves for good; "": it does not."""
BY_HAND = frozenset(("unloaded", "host_drained", "paused"))
"""Causes of a drain that people ask for: a backend's own drain_timeout does not count."""
DEATHS = frozenset(("died", "died_early"))
"""Causes of a stop of a backend that ended without being told to."""
FOUND = frozenset(("adopted", "not_found", "host_gone", "unfit"))
"""Causes of a state that a backend was found in, and no step has led to."""
CLEARING = frozenset(("host_drained", "paused", "others_hold"))
"""Causes of an eviction after which nothing is loaded on the host, or on that GPU."""
PRELOADS = frozenset(("preload", "hinted", "missing_stage", "home", "gpu_given_back", "wake_to_demote"))
"""Causes of a load that no request waits for. Another replica of a busy model has one of the policy's."""
RESENT = frozenset(("moved", "stale"))
"""Causes for which a request is severed to be sent to another replica."""


class Cause(NamedTuple):
    """Why something happens. Which figures there are depends on the kind: ``SENTENCES`` names them."""

    kind: str
    """One of SENTENCES."""
    model: str = ""
    """Another model: that needs the room, or whose queue needs the GPUs."""
    backend: str = ""
    """Another backend: that is free, or does not answer."""
    residents: tuple[str, ...] = ()
    """Models or backends that hold GPUs which a queue needs."""
    way: str = ""
    """A standby level."""
    seconds: float = 0.0
    """A time that has passed, a time without requests, or what a swap costs."""
    waiting: int = 0
    """Requests that wait."""
    expected: float = 0.0
    """Requests that will wait when the model is loaded."""
    required: float = 0.0
    """Requests that have to wait until a swap is worth it."""
    detail: str = ""
    """Text from elsewhere: an engine's, a policy's, a difference of configurations, the code of an error."""
    host: str = ""
    """The host that is lost, back or drained."""


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


_EARLY = "{detail} {seconds:.1f} s after it was loaded, before it had completed an answer"
DECISIONS = {
    "room_free": "{waiting} waiting, room is free",
    "oldest_first": "{waiting} waiting, oldest first",
    "waited_enough": "{waiting} waiting, waited long enough",
    "quiet": "{waiting} waiting, queue quiet",
    "not_quiet": "its requests still arrive less than {seconds:g} s apart",
    "held_longest": "{waiting} waiting, held back for the longest time allowed",
    "enough_wait": "{waiting} waiting, {required:g} are worth a swap of {seconds:.1f} s",
    "none_awaited": "{waiting} waiting, no more are expected",
    "more_awaited": "more requests may come",
    "swap_cost": "the resident model may serve for as long as a swap costs",
    "slice_over": "{waiting} waiting, the slice of {residents} is over",
    "slice": "the slice of {residents} is not over",
    "worth_it": "{waiting} waiting, and {residents} is idle",
    "too_few": "{waiting} waiting, too few yet to evict {residents}, which may be asked again",
    "in_use": "{residents} was just in use",
    "turn": "{residents} has its turn first",
    "turn_over": "{waiting} waiting, and the turn of {residents} is over",
    "replicas_busy": "{waiting} wait at busy replicas",
    "min_residency": "{residents} may stay for min_residency",
    "policy": "decided by the policy",
    "policy_text": "{detail}",
}
"""Kind of cause that a policy may give for its decision -> its sentence: see ``SENTENCES``."""
SENTENCES = DECISIONS | {
    "overdue": "overdue",
    "outranked": "{model} has a higher priority, and needs the same GPUs",
    "idle": "idle for {seconds:g} s",
    "unloaded": "unload requested",
    "changed": "its configuration changed",
    "removed": "removed from the configuration",
    "silent": "its engine does not answer",
    "make_room": "room to preload {model}",
    "host_memory_needed": "idle, and {model} needs host memory",
    "host_memory_short": "host memory is short",
    "memory_needed": "its memory is needed",
    "demote_timer": "at standby level {way} for {seconds:.0f} s",
    "retry_stuck": "trying again to stop it",
    "host_drained": "the host {host} is drained",
    "others_hold": "other programs hold {detail}",
    "host_undrained": "the host {host} is no longer drained",
    "paused": "anvil-mux is paused",
    "resumed": "resumed by hand",
    "pause_over": "the pause of {seconds:.0f} s is over",
    "host_away": "the host {host} cannot be controlled",
    "host_heard": "the host {host} can be controlled again",
    "surplus": "its model is already loaded as often as `most` allows",
    "standby_full": "no room for standby level {way}",
    "preload": "preloaded before the first request",
    "hinted": "preloaded because a client said that it will ask for it",
    "missing_stage": "preloaded because the other stage is loaded",
    "home": "home model, and its GPUs are idle",
    "gpu_given_back": "other programs have left its GPUs for {seconds:.0f} s",
    "wake_to_demote": "woken to go to standby level {way}",
    "unwanted": "nobody waits for it any more, and {model} needs its GPUs",
    "policy_failed": "the policy failed: {detail}",
    "eviction_failed": "the eviction failed, and `cost` chooses in its place: {detail}",
    "adopted": "was running already",
    "reprieved": "stays loaded: it no longer has to make room",
    "load_failed": "load failed: {detail}",
    "died": "died: {detail}",
    "died_early": f"died: {_EARLY}",
    "evict_failed": "{detail}",
    "not_begun": "stays as it was, since nothing can be stopped now: {detail}",
    "busy": "busy",
    "routed": "{detail}",
    "incomplete": "its answer is not complete",
    "moved": "moved to {backend}",
    "stale": "the engine of {backend} is silent",
    "host_back": "the host {host} is back",
    "not_found": "not found when the host {host} came back",
    "host_gone": "the host {host} was declared gone",
    "unfit": "was found running and cannot stay",
    "evicted": "evicted for {model}",
    "host_lost": "the host {host} is lost",
    "shutdown": "anvil-mux shut down",
    "cancelled": "cancelled by hand",
    "error": "{detail}",
    "reconfigured": "{detail}",
    "bad_configuration": "{detail}",
}
"""Kind of cause -> its sentence; the names in braces are the figures that it has."""
_SEVERED = {
    "evicted": "{of} was evicted for {model}",
    "unloaded": "{of} was unloaded on request",
    "changed": "the configuration of {of} changed",
    "removed": "{of} was removed from the configuration",
    "host_drained": "{of} ran on the host {host}, which was drained",
    "paused": "anvil-mux was paused",
    "others_hold": "{of} made way for other programs on its GPU",
    "surplus": "{of} was already loaded as often as `most` allows",
    "idle": "{of} was evicted because nobody used it",
    "policy": "the policy unloaded {of}",
    "silent": "the engine of {of} did not answer",
    "host_lost": "{of} ran on the host {host}, which was lost",
    "shutdown": "anvil-mux shut down",
    "moved": "another replica of {of} became free",
    "stale": "the engine of {of} did not answer",
}
"""The same for the client of a request that was severed; ``of``: the model that was asked."""
ADOPTED = Cause("adopted")
UNLOADED = Cause("unloaded")
PAUSED = Cause("paused")
POLICY = Cause("policy")
"""The cause where a policy gives none of its own."""


class Severance(NamedTuple):
    """Why a request was ended that ran."""

    cause: Cause
    seconds: float = 0.0
    """How long the drain was."""

    def sentence(self, model: str) -> str:
        """The sentence for the client, without a full stop; ``model``: the request's."""
        cause = self.cause
        what = _SEVERED[cause.kind].format(of=model, model=cause.model, host=cause.host or LOCAL)
        drained = f", after a drain of {self.seconds:.1f} s" if self.seconds else ""
        return f"{what} before this request ended{drained}"


def sentence(cause: Cause | None) -> str:
    """The cause in words, without a full stop; "" for none."""
    return _filled(SENTENCES[cause.kind], cause) if cause else ""


def ending(cause: Cause) -> str:
    """How a backend died, in words that go on from its name."""
    return _filled(_EARLY if cause.kind == "died_early" else "{detail}", cause)


def _filled(template: str, cause: Cause) -> str:
    figures = {**cause._asdict(), "residents": " and ".join(cause.residents), "host": cause.host or LOCAL}
    return template.format(**figures)


def mistake(error: Exception) -> str:
    """An exception of anybody's code in words, also if it has none."""
    try:
        return repr(error)
    except Exception:
        return type(error).__name__


def to_json(cause: Cause) -> dict[str, Any]:
    """Return the kind, and the figures that are not empty."""
    return {name: value for name, value in cause._asdict().items() if value}


def parse(made: Mapping[str, Any]) -> Cause:
    """Read what ``to_json`` made; ValueError or TypeError says what is wrong with it."""
    figures: dict[str, Any] = {**made, "residents": tuple(made.get("residents", ()))}
    cause = Cause(**figures)
    if cause.kind not in SENTENCES:
        raise ValueError(f"unknown cause {cause.kind!r}")
    sentence(cause)
    return cause
