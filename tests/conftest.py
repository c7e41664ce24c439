"""Fixtures that several files use: engines over sockets, and the CUDA driver's stand-ins."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from anvil_mux import clock
from anvil_mux.host.seam import MACHINE
from tests.chromium import Chromium
from tests.fake_cuda import COMPILER, FakeCuda, build_library
from tests.fake_engine import Rig
from tests.seeds import chosen


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """The tests stay for the whole run: the garbage collector need not look at them again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A part of the tests, where one is asked for, when those of other tiers are gone."""
    taken = chosen(items, os.environ.get("ANVIL_PART", ""))
    left = set(items).difference(taken)
    if left:
        config.hook.pytest_deselected(items=[each for each in items if each in left])
        items[:] = taken


@pytest.fixture(autouse=True)
def _mistakes() -> None:
    """No test meets the mistakes that another one's threads made on purpose."""
    clock._mistakes.clear()


os.environ[MACHINE] = f"tests-{os.getpid()}"
"""Engines of tests that run side by side are on the same GPUs, so each process of pytest is a machine of its
own, and so is each module and each test."""


@pytest.fixture(autouse=True, scope="module")
def _machine_of_module(request: pytest.FixtureRequest) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(MACHINE, f"{os.environ[MACHINE]}/{request.module.__name__}")
        yield


@pytest.fixture(autouse=True)
def _machine(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    monkeypatch.setenv(MACHINE, f"{os.environ[MACHINE]}/{request.node.name}")


@pytest.fixture
def make_rig() -> Iterator[Callable[..., Rig]]:
    rigs: list[Rig] = []

    def make(**settings: object) -> Rig:
        rigs.append(Rig(**settings))  # type: ignore[arg-type]
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()


@pytest.fixture
def rig(make_rig: Callable[..., Rig]) -> Rig:
    return make_rig()


@pytest.fixture(scope="session")
def libcuda(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stand-in for libcuda."""
    if COMPILER is None:
        pytest.skip("the stand-in for libcuda needs a C compiler")
    return build_library(tmp_path_factory.mktemp("libcuda"))


@pytest.fixture
def cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """What the stand-ins know, in tests with a process that looks for it."""
    folder = tmp_path / "cuda"
    folder.mkdir()
    monkeypatch.setenv("FAKE_CUDA", str(folder))
    return FakeCuda(folder)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    """A real browser for the tests of a module, which are skipped where there is none."""
    with Chromium(tmp_path_factory.mktemp("chromium")) as made:
        yield made
