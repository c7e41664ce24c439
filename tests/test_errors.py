"""Errors as objects: what each carries goes with its copy."""

import pytest

from anvil_mux.errors import (
    BadRequest,
    CheckpointFailed,
    ConfigError,
    LoadError,
    MuxError,
    Overloaded,
    RefusedByEngine,
    UnknownModel,
)


@pytest.mark.parametrize(
    "error",
    [
        MuxError("it broke"),
        Overloaded("too many", retry_after=7.0),
        LoadError("it fell over", log=("a", "b"), retry_after=3.0),
        ConfigError(["one", "two"]),
        BadRequest("no", param="n", status=415),
        UnknownModel("x", ["a", "b"]),
        CheckpointFailed("no", lost=[3]),
        RefusedByEngine("no", status=418, said={"type": "t"}),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_for_many_threads_is_raised_by_each_as_its_own(error):
    def caught(one: MuxError) -> MuxError:
        with pytest.raises(type(error)) as raised:
            raise one
        return raised.value

    first, second = (caught(error.copy()) for _ in range(2))
    assert len({id(each) for each in (error, first, second)}) == 3
    assert error.__traceback__ is None
    for each in (first, second):
        assert (str(each), vars(each), each.args) == (str(error), vars(error), error.args)
