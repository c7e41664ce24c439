"""A load on local processes: engines killed and frozen, reloads, and a kill -9 of anvil-mux itself.

`bin/test load` runs it with 20,000 requests (ANVIL_LOAD_REQUESTS), drawn from ANVIL_LOAD_SEED.
"""

import os
import random

import pytest

from tests.load_processes import process_load

REQUESTS = int(os.environ.get("ANVIL_LOAD_REQUESTS", "0"))
SEED = int(os.environ.get("ANVIL_LOAD_SEED", "1"))


@pytest.mark.load
@pytest.mark.skipif(not REQUESTS, reason="bin/test load sets ANVIL_LOAD_REQUESTS")
def test_every_answer_is_accounted_for(tmp_path):
    with process_load(tmp_path, REQUESTS, random.Random(SEED)) as load:
        load.run()
    print(f"\nANVIL_LOAD_SEED={SEED}\n{load.table()}")
    assert not any(load.flaws.values()), load.report()
