"""Real containers: anvil-mux is killed at random moments and loses nothing but what was in flight."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.crashing import Rounds
from tests.docker.conftest import Stack
from tests.running import Running, begin

ROUNDS = int(os.environ.get("ANVIL_CRASH_ROUNDS", "5"))
SEED = int(os.environ.get("ANVIL_CRASH_SEED", "1"))


@pytest.mark.crash
def test_no_crash_leaves_an_orphan_two_residents_or_half_a_file(
    llamacpp_compose: Callable[..., Stack], tmp_path: Path
) -> None:
    stack = llamacpp_compose(tmp_path, models=3, top={"x-anvil": {"policy": "eager"}})

    def start(*flags: str) -> Running:
        flags = (*flags, "--access-log", "off")
        return begin(stack.file, *flags, state=tmp_path, environ=stack.engine.env)

    def up() -> dict[str, object]:
        labels = [each["Labels"] | {"id": each["Id"]} for each in stack.engine.containers(stack.project)]
        return {each["com.docker.compose.service"]: each["id"] for each in labels}

    rounds = Rounds(start, up, tmp_path / "anvil-mux" / stack.project, stack.models, random.Random(SEED))
    with stack.watched() as seen:
        rounds.run(ROUNDS)
    print(rounds.seen)
    assert rounds.flaws == []
    assert (seen.most, seen.missed) == (1, 0), seen.crowded
    made = [each["Names"][0][1:] for each in stack.engine.containers(stack.project, all=True)]
    assert sorted(made) == [stack.container(model) for model in stack.models]
