"""The switches of a routing policy: settings that stand beside its pipelines, and hold for all of them.

``mode`` says for which mode a policy is written, and ``predict_prefill`` whether the input that replicas have
to compute falls with time (in_flight.py). ``like`` takes the pipelines of a policy that is shipped, and two
more switches change them, as Llumnix's flags do: ``cache_aware`` puts what is cached where in front of the
metrics by which prompts are placed, and ``top_k`` takes any of the best few.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from anvil_mux.config.config import INFER_TYPES
from anvil_mux.config.kinds import Problem, nearest, show

CACHE_LOCALITY = {"cache_aware_all_prefills_tokens_num": {"min_tokens": 1024}}
"""The metric of ``cache_aware``, as a step: Llumnix looks for shorter prompts in no cache."""
MODES = ("lite", "full")
FLAGS = ("cache_aware", "predict_prefill")
KEYS = ("like", "mode", "top_k", *FLAGS)


class Switches(NamedTuple):
    """The switches of one policy, as far as they can be read."""

    pipelines: object
    """The policy without them, as it is written or as they make it."""
    mode: str
    predict_prefill: bool | None
    """None: not said."""
    problems: list[Problem]


def read(written: object, shipped: Mapping[str, Any]) -> Switches:
    """Read the switches of a policy. ``shipped``: the policies that it may be like."""
    if not isinstance(written, Mapping):
        return Switches(written, "", None, [])
    said = {key: written[key] for key in KEYS if key in written}
    pipelines = {key: value for key, value in written.items() if key not in KEYS}
    problems = _problems(said, pipelines, shipped)
    if problems:
        return Switches(HARMLESS if "like" in said else pipelines, "", None, problems)
    mode = said.get("mode", "")
    if "like" in said:
        pipelines = dict(shipped[said["like"]])
        mode = mode or pipelines.get("mode", "")
        pipelines.pop("mode", None)
    try:
        if _flag(said.get("cache_aware")):
            pipelines = _cache_aware(pipelines, mode)
        if "top_k" in said:
            pipelines = _top_k(pipelines, said["top_k"])
    except ValueError as error:
        problems.append(((), str(error)))
    return Switches(pipelines, mode, _flag(said.get("predict_prefill")), problems)


HARMLESS = {"selector": "round_robin"}
"""A policy with which to look for further problems, where what it is like cannot be read."""


def _problems(
    said: Mapping[str, Any], pipelines: Mapping[str, Any], shipped: Mapping[str, Any]
) -> list[Problem]:
    found: list[Problem] = []
    if "like" in said and (like := str(said["like"])) not in shipped:
        found.append((("like",), f"no policy {like} is shipped; {nearest(like, shipped)}"))
    elif "like" in said and pipelines:
        key = str(next(iter(pipelines)))
        found.append(((key,), f"stands beside like: {said['like']}, which has all of that"))
    if "mode" in said and said["mode"] not in MODES:
        found.append((("mode",), f"must be one of {', '.join(MODES)}, not {show(said['mode'])}"))
    for key in FLAGS:
        if key in said and _flag(said[key]) is None:
            found.append(((key,), f"must be true or false, not {show(said[key])}"))
    return found


def _flag(value: object) -> bool | None:
    """The flag that a value is, or that a text means: variables give text."""
    return value if isinstance(value, bool) else {"true": True, "false": False}.get(str(value))


def _by_infer_type(pipelines: Mapping[str, Any]) -> dict[str, Any]:
    """A policy with a pipeline for each infer type, also where one is written for all of them."""
    return dict(pipelines) if set(pipelines) & set(INFER_TYPES) else dict.fromkeys(INFER_TYPES, pipelines)


def _cache_aware(pipelines: Mapping[str, Any], mode: str) -> dict[str, Any]:
    if mode == "lite":
        raise ValueError("cache_aware goes with the mode full, and this policy is written for lite")
    made = _by_infer_type(pipelines)
    for kind in [kind for kind in made if kind != "decode"]:
        by = _metric_selector(made[kind], "cache_aware")["by"]
        made[kind] = _with(made[kind], by=[CACHE_LOCALITY, *by])
    return made


def _top_k(pipelines: Mapping[str, Any], value: object) -> dict[str, Any]:
    made = _by_infer_type(pipelines)
    for kind, pipeline in made.items():
        _metric_selector(pipeline, "top_k")
        made[kind] = _with(pipeline, top_k=value)
    return made


def _metric_selector(pipeline: Any, switch: str) -> dict[str, Any]:
    """The settings of the selector ``metric`` of a pipeline; ValueError if it has none."""
    selector = pipeline.get("selector") if isinstance(pipeline, dict) else None
    settings = selector.get("metric") if isinstance(selector, dict) else None
    if not isinstance(settings, dict) or not isinstance(settings.get("by"), list):
        raise ValueError(f"{switch} changes the selector `metric`, and this policy has another one")
    return settings


def _with(pipeline: Any, **settings: object) -> dict[str, Any]:
    return {**pipeline, "selector": {"metric": {**pipeline["selector"]["metric"], **settings}}}
