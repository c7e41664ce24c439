"""What crosses between anvil-mux and an agent comes out as it went in."""

import io
import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from anvil_mux.cluster import frames
from anvil_mux.cluster.frames import (
    AgentAnswer,
    AgentCall,
    AnswerFrame,
    Claimed,
    Fenced,
    NotConfigured,
    Owner,
    StepState,
    UnknownStep,
    Unreadable,
)
from anvil_mux.config.config import Backend
from anvil_mux.config.kinds import Diagnostic
from anvil_mux.config.machines import Gpu
from anvil_mux.config.service import Service
from anvil_mux.config.values import Profile
from anvil_mux.errors import BackendError, Cancelled, ConfigError, LoadError, MuxError
from anvil_mux.host.seam import (
    AnyNews,
    Awake,
    CardRead,
    Evicted,
    Found,
    GpusRead,
    GpuUse,
    Host,
    HostConfig,
    HostGpu,
    HostNews,
    Inventory,
    Loaded,
    LoadStage,
    OtherProcess,
    PhaseTook,
    PromptsKept,
    ServiceEnded,
    Unfit,
    WeightsRead,
)
from anvil_mux.protocol.cards import ModelCard
from tests.seeds import seeds


def answered(text: str) -> AgentAnswer:
    """Return the answer of a host."""
    answer: AgentAnswer = frames.read(AgentAnswer, text, is_foreign=True)
    return answer


def test_a_call_and_its_answer_cross():
    call = AgentCall(Owner(3, "a", "lab on alpha"), "evict", (Backend("m", "m"), "stop"))
    came = frames.read(AgentCall, frames.dump(call))
    assert came[:2] == call[:2]
    assert frames.arguments(Host.evict, came.args) == [Backend("m", "m"), "stop"]
    answer = answered(frames.dump(AgentAnswer("run", Evicted("stop", {"0": 0}))))
    assert frames.of(Evicted, answer.value) == Evicted("stop", {"0": 0})


@pytest.mark.parametrize(
    "error",
    [
        LoadError("no image", log=["a", "b"], retry_after=7.0),
        ConfigError(["x: is wrong", "y: too"]),
        ConfigError([Diagnostic("x: is wrong", write="x: 1", page="cluster.md")]),
        Cancelled("by hand"),
        BackendError("still runs"),
        Fenced("by beta"),
        Claimed("by beta"),
        UnknownStep("4"),
        NotConfigured("anew"),
        Unreadable("no"),
    ],
)
def test_an_error_crosses_with_all_that_it_says(error):
    answer = answered(frames.dump(AgentAnswer("run", error=frames.plain_error(error))))
    came = frames.error_of(answer.error)
    assert type(came) is type(error)
    assert came.message == error.message
    for field in ("log", "problems", "retry_after"):
        assert getattr(came, field, None) == getattr(error, field, None)


def test_a_mistake_crosses_as_the_failure_of_a_backend():
    error = frames.error_of(frames.plain_error(ValueError("oops")))
    assert isinstance(error, BackendError)
    assert "oops" in error.message


def test_of_two_owners_the_one_of_the_higher_epoch_has_the_host():
    assert Owner(2, "a") > Owner(1, "b")
    assert Owner(2, "b") > Owner(2, "a")


BACKEND = replace(
    Backend("m.0", "m", ("0",), host="b", profile=Profile(((1.0, 2.0),), ((1, ((1.0, 2.0),)),))),
    service=Service(command=("serve",), environment=(("A", "b"),), digest="d"),
)


TRUTHS = [
    (type(None), None),
    (list[Backend], [BACKEND]),
    (HostConfig, HostConfig((BACKEND,), (Gpu("0", 1, host="b"),), generated_compose="{}")),
    (Inventory, Inventory((HostGpu("0", "GPU-1", "H100", 80),), 7, "10.0.0.2")),
    (Loaded, Loaded("http://a", "stop")),
    (Found, Evicted("stop", {"0": 1}, 2, {"0": 3}, "died", ("log",))),
    (Found, Awake("http://a")),
    (Found, Unfit("no")),
    (StepState, StepState(True, "x")),
    (
        list[HostNews],
        [
            HostNews(1, ServiceEnded("a", "why", ("l",), 3)),
            HostNews(2, GpusRead({"0": GpuUse(1, 2, {"a": None}, (OtherProcess("0", 7, 8),))})),
            HostNews(3, LoadStage("a", "reading", 0.5)),
            HostNews(4, PhaseTook("a", "load", 0.25)),
            HostNews(5, PromptsKept("a", 1, 2, 3)),
            HostNews(6, WeightsRead("a", 1, 2.5)),
            HostNews(7, CardRead("a", "d", ModelCard(4096, {"tools": True}))),
        ],
    ),
]


@pytest.mark.parametrize(("kind", "value"), TRUTHS)
def test_whatever_passes_the_seam_crosses(kind, value):
    came = frames.of(kind, answered(frames.dump(AgentAnswer("run", value))).value)
    assert came == value
    if isinstance(value, HostConfig):
        assert came.backends[0].service.digest == "d"
    if isinstance(value, Evicted):
        assert came.freed == value.freed  # which equality leaves out


TOO_DEEP = "[" * 10_000 + "]" * 10_000


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x80\x04\x95.",
        b"GET / HTTP/1.1\r\n\r\n",
        b"1",
        b"[]",
        b"{}",
        TOO_DEEP,
        '["' + TOO_DEEP,
        '{"owner": {"epoch": 1, "id": "a", "name": ""}, "method": "x"}',
        '{"owner": {"epoch": 1, "id": "a", "name": ""}, "method": "x", "args": [], "more": 1}',
        '{"owner": {"epoch": true, "id": "a", "name": ""}, "method": "x", "args": []}',
        '{"owner": {"epoch": 1.0, "id": "a", "name": ""}, "method": "x", "args": []}',
        '{"owner": {"epoch": 1, "id": null, "name": ""}, "method": "x", "args": []}',
        '{"owner": {"epoch": %s, "id": "a", "name": ""}, "method": "x", "args": []}' % ("9" * 30),
        '{"owner": {"epoch": %s, "id": "a", "name": ""}, "method": "x", "args": []}' % ("9" * 5000),
    ],
    ids=range(15),
)
def test_what_is_no_call_field_by_field_is_refused(data):
    with pytest.raises(Unreadable):
        frames.read(AgentCall, data)


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (Evicted, {"level": "stop", "residual": {"0": "1"}}),
        (Evicted, {"url": "http://a"}),
        (Found, {"url": "http://a", "level": "stop"}),
        (Found, None),
        (list[HostNews], [{"number": 1, "what": {"gpu_uses": []}}]),
        (list[Backend], ["m"]),
        (Inventory, {"gpus": [["0", "GPU-1"]], "memory": 1, "address": "a"}),
        (tuple[str, str], ["a"]),
        (None, 1),
        (str | None, 1),
        (MuxError, {"message": "made"}),
        (Path, {"x": 1}),
    ],
)
def test_a_value_of_another_type_than_the_method_returns_is_refused(kind, value):
    with pytest.raises(Unreadable):
        frames.of(kind, value)


@pytest.mark.parametrize("kind", [Found, AnyNews])
def test_no_two_records_that_may_stand_in_one_place_have_the_same_fields(kind):
    fields = [tuple(sorted(get_type_hints(each))) for each in get_args(kind)]
    assert len(set(fields)) == len(fields)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_a_host_says_no_number_that_is_none(number):
    with pytest.raises(Unreadable, match="is no number"):
        answered(f'{{"instance": "", "value": {number}, "error": null}}')
    assert frames.of(float, frames.parse("Infinity")) == math.inf, "a configuration has those"


def test_half_a_character_of_a_host_is_a_question_mark():
    told = answered('{"instance": "", "value": ["\\ud83d\\ude00", "\\uD83D."], "error": null}')
    assert told.value == ["\U0001f600", "?."]


def test_brackets_within_texts_are_not_nested():
    text = '"' + "[" * 1000
    assert frames.read(list[str], frames.dump([text])) == [text]


def test_a_frame_that_is_too_long_or_not_whole_is_the_end():
    for data in (b"\xff\xff\xff\xff", b"\x00\x00\x00\x05ab", b"\x00"):
        assert frames.read_frame(io.BytesIO(data), AnswerFrame) is None


LIES = (None, True, -1, 2**80, 0.5, 1e300, "", "x", "\ud800", [], {}, [[]], {"url": "x"}, {"level": 1})


def with_a_lie(value, rng):
    """A plain value in which one part is another."""
    if isinstance(value, (dict, list)) and value and rng.random() < 0.8:
        made = value.copy()
        key = rng.choice([*(value if isinstance(value, dict) else range(len(value)))])
        if rng.random() < 0.1:
            del made[key]
        else:
            made[key] = with_a_lie(value[key], rng)
        return made
    return rng.choice(LIES)


@pytest.mark.parametrize("seed", seeds(10, of=200))
def test_what_is_read_is_what_was_said_or_nothing(seed):
    rng = random.Random(seed)
    for kind, truth in TRUTHS * 12:
        said = with_a_lie(json.loads(frames.dump(truth)), rng)
        text = json.dumps({"instance": "", "value": said, "error": None})
        try:
            found = frames.of(kind, answered(text).value)
        except Unreadable:
            continue
        assert json.loads(frames.dump(found)) == json.loads(json.dumps(said).replace("\\ud800", "?"))
