"""Many requests at once to real llama-servers, whose HTTP threads are few."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.docker.served import served

KEEP_ALIVE_SECONDS = 5.0
"""How long an idle connection holds one of llama-server's threads."""


@pytest.mark.parametrize(("clients", "models"), [(33, 1), (100, 3)])
def test_no_request_of_a_burst_after_a_swap_waits_for_idle_connections_to_end(
    llamacpp_compose, tmp_path, clients, models
):
    stack = llamacpp_compose(tmp_path, models=models + 1)
    log = tmp_path / "access.log"
    first, *asked = stack.models
    with served(stack, "--access-log", str(log), "--log-format", "json") as mux:
        assert mux.chat(first, max_tokens=1)[0] == 200

        def ask(number: int) -> int:
            return mux.chat(asked[number % models], max_tokens=8)[0]

        with ThreadPoolExecutor(clients) as pool:
            assert set(pool.map(ask, range(clients))) == {200}
        mux.answered(clients + 1)
    records = [json.loads(line) for line in log.read_text().splitlines()]
    at_engines = [each["ttfb_s"] - each["queue_s"] for each in records if each["model"] in asked]
    assert len(at_engines) == clients
    assert max(at_engines) < KEEP_ALIVE_SECONDS
