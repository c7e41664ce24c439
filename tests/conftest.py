"""Fixtures of the tests over sockets."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.fake_engine import Rig


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
