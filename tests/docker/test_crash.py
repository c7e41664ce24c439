"""Real containers: anvil-mux is killed at random moments and loses nothing but what was in flight."""

import os
import random
from functools import partial

import pytest

from tests.crashing import Rounds
from tests.running import Running, begin

ROUNDS = int(os.environ.get("ANVIL_CRASH_ROUNDS", "5"))
SEED = int(os.environ.get("ANVIL_CRASH_SEED", "1"))


@pytest.mark.crash
def test_no_crash_leaves_an_orphan_two_residents_or_half_a_file(llamacpp_compose, tmp_path):
    freezing = {"x-anvil": {"gpus": ["0"], "evict_to": ["freeze", "stop"]}}
    services = {"model-2": freezing, "model-3": freezing}
    stack = llamacpp_compose(tmp_path, models=3, top={"x-anvil": {"policy": "eager"}}, services=services)

    def start(*flags: str) -> Running:
        flags = (*flags, "--access-log", "off")
        return begin(stack.file, *flags, state=tmp_path, environ=stack.engine.env)

    def runs(state: str) -> dict[str, object]:
        found = [each for each in stack.engine.containers(stack.project) if each["State"] == state]
        about = [stack.engine.request("GET", f"/containers/{each['Id']}/json") for each in found]
        return {
            each["Config"]["Labels"]["com.docker.compose.service"]: each["State"]["StartedAt"]
            for each in about
        }

    folder = tmp_path / "anvil-mux" / stack.project
    up, frozen = partial(runs, "running"), partial(runs, "paused")
    rounds = Rounds(start, up, frozen, folder, stack.models, random.Random(SEED))
    with stack.watched() as seen:
        rounds.run(ROUNDS)
    print(rounds.seen)
    assert rounds.flaws == []
    assert (seen.most, seen.missed) == (1, 0), seen.crowded
    made = [each["Names"][0][1:] for each in stack.engine.containers(stack.project, all=True)]
    assert sorted(made) == [stack.container(model) for model in stack.models]
