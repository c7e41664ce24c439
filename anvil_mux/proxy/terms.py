"""The terms that the status page explains, with their meanings: read from the glossary, their one home.

``glossary.md`` beside this module is a link to the one in docs/, whose tables have a term, or several with
commas between them, in their first column and the meaning in the second. A state of a backend means what the
row says that names it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType

_ROW = re.compile(r"^\| (?P<terms>[^|]+) \| (?P<meaning>[^|]+) \|(?P<names>.*)$", re.M)
_STATES = re.compile(r"state ((?:`\w+`(?:, )?)+)")


@cache
def terms() -> Mapping[str, str]:
    """The meaning of each term of the glossary, in plain text."""
    found: dict[str, str] = {}
    for row in _ROW.finditer(Path(__file__).with_name("glossary.md").read_text("utf-8")):
        meaning = row["meaning"].replace("`", "")
        states = [state for several in _STATES.findall(row["names"]) for state in re.findall(r"\w+", several)]
        for term in [*row["terms"].split(", "), *states]:
            found.setdefault(term, meaning)
    return MappingProxyType(found)
