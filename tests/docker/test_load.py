"""A load on real llama-server containers: killed and frozen, reloads, and a kill -9 of anvil-mux itself."""

import os
import random

import pytest

from tests.docker.load_containers import MODELS, Containers, container_load

REQUESTS = int(os.environ.get("ANVIL_LOAD_REQUESTS", "0"))
SEED = int(os.environ.get("ANVIL_LOAD_SEED", "1"))


@pytest.mark.load
@pytest.mark.skipif(not REQUESTS, reason="bin/test load sets ANVIL_LOAD_REQUESTS")
def test_every_answer_is_accounted_for(llamacpp_compose, tmp_path):
    stack = llamacpp_compose(tmp_path, models=len(MODELS))
    load = container_load(stack, Containers(stack), tmp_path, REQUESTS, random.Random(SEED))
    load.run()
    print(f"\nANVIL_LOAD_SEED={SEED}\n{load.table()}")
    assert not any(load.flaws.values()), load.report()
    assert load.count_whole() > len(load.fates) / 2, load.table()
