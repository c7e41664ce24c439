"""``GET /usage?since=7d``: what each API key has used of each model."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qs

from anvil_mux.config.kinds import read_seconds
from anvil_mux.errors import BadRequest
from anvil_mux.proxy.asked import Asked
from anvil_mux.proxy.probes import Answer
from anvil_mux.proxy.reply import JSON

WEEK = "7d"
UsageSince = Callable[[float], list[dict[str, Any]]]
"""Unix time -> what was used since then, by key and model."""

_DAYS = re.compile(r"([0-9]{1,3})d")


class UsageRoute:
    """Answers the question about usage. Any thread."""

    def __init__(self, usage: UsageSince) -> None:
        self._usage = usage

    def usage(self, asked: Asked) -> Answer:
        since = time.time() - seconds_back(parse_qs(asked.request.query).get("since", [WEEK])[0])
        told = {"since": round(since), "usage": self._usage(since)}
        return 200, JSON, json.dumps(told, indent=1).encode("ascii") + b"\n"


def seconds_back(text: str) -> float:
    """Read how far back is asked for: days, or a time as settings have it."""
    if days := _DAYS.fullmatch(text):
        return int(days[1]) * 86400.0
    try:
        return min(read_seconds(text), 1000 * 86400.0)
    except ValueError:
        raise BadRequest(f"`since` must be a time such as 12h or 7d, not {text!r}", param="since") from None
