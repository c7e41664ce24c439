"""The program that all cases of a run are played against."""

from collections.abc import Iterator

import pytest

from tests.values.witness import House


@pytest.fixture(scope="session")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    made = House(tmp_path_factory.mktemp("types"))
    yield made
    made.close()
