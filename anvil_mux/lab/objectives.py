"""Service-level objectives: the time to a first token, and for each further one, that requests should keep.

Which requests kept them is read off what became of each, so any policy can be judged by them, also one that
knows nothing of them. A request that was refused kept none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from anvil_mux.lab.fleet import PromptOutcome


class Objectives(NamedTuple):
    """The most that requests should take; the defaults are those of the policy ``slo``."""

    ttft: float = 6.0
    """Seconds to the first token."""
    tpot: float = 0.05
    """Seconds for each further token, in the mean of an answer."""


class Attainment(NamedTuple):
    """The parts of all requests that kept the objectives."""

    slo_ttft: float
    slo_tpot: float
    """Answers of one token keep it."""
    slo: float
    """Both."""
    refused: int
    """Requests that no replica was allowed to take."""


def read(text: str) -> Objectives:
    """The objectives in ``ttft=6,tpot=0.05``, in seconds; by default those of Objectives; or ValueError."""
    given: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        if name not in Objectives._fields:
            raise ValueError(f"unknown objective {name!r}; known: {', '.join(Objectives._fields)}")
        try:
            given[name] = float(value)
        except ValueError:
            raise ValueError(f"{name} must be seconds, not {value!r}") from None
        if not given[name] > 0:
            raise ValueError(f"{name} must be more than 0 seconds, not {value}")
    return Objectives(**given)


def attained(answers: Sequence[PromptOutcome], objectives: Objectives) -> Attainment:
    """How many of ``answers`` kept the objectives."""
    first = [answer.first_byte - answer.arrived <= objectives.ttft for answer in answers]
    further = [not answer.is_refused and _pace(answer) <= objectives.tpot for answer in answers]
    both = [one and other for one, other in zip(first, further, strict=True)]
    return Attainment(
        slo_ttft=sum(first) / len(answers),
        slo_tpot=sum(further) / len(answers),
        slo=sum(both) / len(answers),
        refused=sum([answer.is_refused for answer in answers]),
    )


def _pace(answer: PromptOutcome) -> float:
    """Seconds for each token after the first."""
    more = answer.prompt.output - 1
    return (answer.finished - answer.first_byte) / more if more else 0.0
