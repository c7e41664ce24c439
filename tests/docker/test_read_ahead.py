"""The weights of a real llama-server are in the page cache before its container is started."""

import os
import shutil
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import yaml

from tests.bench.bench_read_ahead import drop, share_there
from tests.docker.conftest import Stack
from tests.docker.served import ENDLESS, FOREVER, ask, client_of, count, eventually, served, state_of, stream
from tests.running import Running

ONE, OTHER = "model-1", "model-2"
PADDING = 64 << 20
"""Bytes after the end of a tiny model, which llama-server maps and does not mind."""


@pytest.fixture
def weights(tmp_path: Path, tiny_model: Callable[[int], Path]) -> Path:
    path = tmp_path / "weights.gguf"
    shutil.copyfile(tiny_model(2), path)
    with path.open("ab") as file:
        file.write(os.urandom(1 << 20) * (PADDING >> 20))
    drop(path)
    if share_there(path):
        pytest.skip("the folder of the tests is not on a disk")
    return path


@pytest.fixture
def stack(llamacpp_compose: Callable[..., Stack], tmp_path: Path, weights: Path) -> Stack:
    """One model that streams without an end, and one whose weights are not in the page cache."""
    return llamacpp_compose(
        tmp_path,
        models=2,
        slots=1,
        top={"x-anvil": {"policy": "eager", "drain_timeout": "10m"}},
        services={ONE: ENDLESS, OTHER: {"volumes": [f"{weights}:/m/tiny.gguf:ro"]}},
    )


@pytest.fixture
def mux(stack: Stack) -> Iterator[Running]:
    with served(stack) as running:
        yield running


def watch(mux: Running, weights: Path, meanwhile: Callable[[], object]) -> None:
    """Waits until all weights are in the page cache, as long as more come: a busy disk lets reading wait."""
    share = 0.0

    def more_are_there(before: float) -> bool:
        nonlocal share
        meanwhile()
        share = share_there(weights)
        return share > before

    while share < 1.0:
        eventually(
            partial(more_are_there, share), lambda: f"({share:.3f} are there):\n" + "\n".join(mux.output)
        )


def test_weights_are_in_the_page_cache_before_the_load_begins(mux, stack, weights):
    with client_of(mux) as client:
        running = stream(client, ONE, FOREVER)
        next(running)
        flaws: list[str] = []
        waiting = threading.Thread(target=lambda: flaws.append(ask(mux, OTHER)))
        waiting.start()
        # A client that reads nothing is severed after a minute.
        watch(mux, weights, lambda: next(running))
        assert (state_of(mux, ONE), state_of(mux, OTHER)) == ("draining", "stopped")
        assert stack.up() == {ONE}
        mux.tells(rf"{OTHER}: 0\.1 GiB of its weights were read ahead in ")
        running.close()
        waiting.join()
    assert flaws == [""]
    assert count(mux, "anvil_read_ahead_bytes", model=OTHER) == weights.stat().st_size
    assert count(mux, "anvil_read_ahead_bytes", model=ONE) == 0


def test_nothing_is_read_where_it_is_turned_off(mux, stack, weights):
    said = yaml.safe_load(stack.file.read_text())
    said["services"][OTHER]["x-anvil"]["read_ahead"] = False
    stack.file.write_text(yaml.safe_dump(said, sort_keys=False))
    assert mux.request("POST", "/reload")[0] == 200
    with client_of(mux) as client:
        running = stream(client, ONE, FOREVER)
        next(running)
        waiting = threading.Thread(target=lambda: ask(mux, OTHER))
        waiting.start()
        eventually(lambda: state_of(mux, ONE) == "draining")
        for _ in range(1000):  # tokens
            next(running)
        assert share_there(weights) == 0.0
        running.close()
        waiting.join()
    assert count(mux, "anvil_read_ahead_bytes", model=OTHER) == 0
