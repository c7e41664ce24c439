"""The standby levels that are not measured, and why: literal backends in, rows out."""

from __future__ import annotations

from collections.abc import Sequence

from anvil_mux.cli.levels import Unmeasured, table, unmeasured, why_not
from anvil_mux.config.config import Backend, Service

LLAMA = Backend(
    "one",
    "one",
    ("0",),
    engine="llamacpp",
    evict_to=("freeze", "stop"),
    service=Service(command=("llama-server", "-m", "/m/one.gguf")),
)
ROUTER = "llama-server unloads in router mode only, without a model of its own: give it --models-dir"


def no_driver(gpus: Sequence[str], insist: bool) -> str:
    return f"no driver for {','.join(gpus)}{' (insisted)' if insist else ''}"


def anything(gpus: Sequence[str], insist: bool) -> None:
    return None


def test_what_the_engine_or_the_machine_cannot_do_is_a_row_with_the_reason() -> None:
    found = unmeasured([LLAMA], no_driver)
    assert found == [
        Unmeasured("llamacpp", ("one",), "sleep", ROUTER),
        Unmeasured("llamacpp", ("one",), "checkpoint", "no driver for 0"),
    ]
    assert table(found)[1:] == [
        ("llamacpp", "one", "sleep", f"not possible here: {ROUTER}"),
        ("llamacpp", "one", "checkpoint", "not possible here: no driver for 0"),
    ]


def test_what_could_be_done_and_is_not_named_is_told_as_that() -> None:
    cold = Backend("two", "two", ("0",), engine="vllm", service=Service(gpus_by="reservation"))
    found = {each.way: each.why for each in unmeasured([cold], anything)}
    assert found.keys() == {"sleep", "sleep-2", "checkpoint", "freeze"}
    assert found["checkpoint"] == ""
    assert found["freeze"] == "what is frozen keeps its GPU memory"
    assert "VLLM_SERVER_DEV_MODE" in found["sleep"]
    [row] = [line for line in table(unmeasured([cold], anything)) if "checkpoint" in line]
    assert row[-1] == "not named in evict_to"


def test_a_level_that_is_named_is_measured_unless_the_machine_cannot_take_it() -> None:
    named = Backend("a", "a", ("0", "1"), evict_to=("checkpoint", "stop"), checkpoint_anyway=True)
    assert why_not(named, "checkpoint", anything) == ""
    assert why_not(named, "stop", no_driver) == ""
    [row] = [each for each in unmeasured([named], no_driver) if each.way == "checkpoint"]
    assert (row.named, row.why) == (True, "no driver for 0,1 (insisted)")
    assert row.to_json() == {
        "engine": "openai",
        "backends": ["a"],
        "way": "checkpoint",
        "not_possible": "no driver for 0,1 (insisted)",
    }
    assert [each.way for each in unmeasured([named], anything)] == ["sleep", "freeze"]


def test_backends_of_one_engine_share_a_row_where_they_share_the_reason() -> None:
    both = [LLAMA, Backend("two", "two", ("0",), engine="llamacpp", evict_to=("freeze",))]
    rows = [(each.way, each.backends) for each in unmeasured(both, no_driver)]
    assert ("checkpoint", ("one", "two")) in rows
