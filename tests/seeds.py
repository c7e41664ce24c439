"""How much of what is drawn the tests go through: a part by default, all of it in ``bin/test seeds``."""

import os

ALL = bool(os.environ.get("ANVIL_ALL_SEEDS"))


def seeds(few: int, *, of: int) -> range:
    """The first ``few`` seeds, or all."""
    return range(of if ALL else few)
