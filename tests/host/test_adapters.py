"""LoRA adapters that vLLM is told to load, with an engine that speaks its routes."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from anvil_mux.errors import LoadError
from anvil_mux.host.local import Adopter, Notes
from anvil_mux.host.seam import Awake, Unfit
from tests.host.test_levels import A, Scene

ADAPTED = replace(A, loras=(("sql", "/adapters/sql"), ("law", "/adapters/law")))
ROUTE = "POST /v1/load_lora_adapter"


@pytest.fixture
def scene() -> Iterator[Scene]:
    made = Scene()
    yield made
    made.house.close()


def test_adapters_are_loaded_before_the_model_is_ready_and_an_engine_that_slept_has_them_still(scene):
    engine = scene.resident(ADAPTED)
    assert engine.adapters == {"sql": "/adapters/sql", "law": "/adapters/law"}
    scene.swapper.evict(ADAPTED, "sleep")
    scene.swapper.load(ADAPTED, "sleep")
    assert engine.asked.count(ROUTE) == 2


def test_an_engine_without_adapters_is_asked_for_none(scene):
    assert ROUTE not in scene.resident(A).asked


def test_an_adapter_that_cannot_be_loaded_is_a_load_that_failed(scene):
    lost = replace(A, loras=(("sql", "/nowhere"),))
    with pytest.raises(
        LoadError, match=r"a did not load the LoRA adapter sql from /nowhere: .* No adapter found"
    ):
        scene.swapper.load(lost, "stop")
    assert scene.used == 0


def test_an_engine_that_is_adopted_is_told_of_what_it_lacks(scene, tmp_path):
    engine = scene.resident(replace(ADAPTED, loras=ADAPTED.loras[:1]))
    adopter = Adopter(scene.swapper, Notes(tmp_path))
    assert adopter.look(ADAPTED, engine.url) == Awake(engine.url)
    assert list(engine.adapters) == ["sql", "law"]
    found = adopter.look(replace(A, loras=(("x", "/nowhere"),)), engine.url)
    assert isinstance(found, Unfit)
    assert "did not load the LoRA adapter x" in found.why
