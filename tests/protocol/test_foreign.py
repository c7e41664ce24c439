"""JSON of others is measured before anything recursive reads it."""

import copy
import json
import random
import re
import threading
from pathlib import Path

import pytest

import anvil_mux
from anvil_mux.errors import BackendError, BadRequest
from anvil_mux.protocol import completions, foreign, naming
from anvil_mux.proxy.engine_request import rewritten
from anvil_mux.proxy.server import STACK_BYTES
from anvil_mux.routing import prefix

DEEP = foreign.MOST_DEPTH
PACKAGE = Path(anvil_mux.__file__).parent


def nested(levels: int, opening: str = "[", closing: str = "]") -> bytes:
    return (opening * levels + closing * levels).encode()


@pytest.mark.parametrize(
    ("text", "levels"),
    [
        (nested(DEEP), DEEP),
        (b'{"a":' * DEEP + b"1" + b"}" * DEEP, DEEP),
        (b"[" * (DEEP - 1) + b"[],{}," * 50_000 + b"[]" + b"]" * (DEEP - 1), DEEP),
    ],
)
def test_the_deepest_that_is_allowed_and_one_level_more(text, levels):
    assert foreign.read(text) is not None
    with pytest.raises(ValueError, match="nested deeper than 200 levels"):
        foreign.read(b"[" + text + b"]")


@pytest.mark.parametrize(
    "string",
    [
        "[" * 5000,
        "]" * 5000,
        '"' + "[" * 5000,
        "\\" + "[" * 5000,
        "\\\\" * 33_000 + '"[' * 5000,
        "é\u2028[" * 5000,
    ],
)
def test_brackets_in_a_string_are_no_levels(string):
    text = json.dumps([string, [string, {string: 1}]]).encode()
    assert foreign.read(text) == json.loads(text)
    with pytest.raises(ValueError, match="nested deeper"):
        foreign.read(b"[" * DEEP + text + b"]" * DEEP)


@pytest.mark.parametrize("end", ["", '"', "\\", '\\"', "x]]]"])
def test_a_text_that_breaks_off_is_measured_up_to_there(end):
    with pytest.raises(ValueError, match="nested deeper"):
        foreign.check(b'{"model":"m","messages":' + b"[" * 5000 + end.encode())


def test_the_depth_is_that_of_a_parser_wherever_a_piece_of_the_text_ends(monkeypatch):
    monkeypatch.setattr(foreign, "PIECE", 7)
    monkeypatch.setattr(foreign, "MOST_DEPTH", 6)
    monkeypatch.setattr(foreign, "PART", 3)
    drawn = random.Random(7)

    def value(left: int) -> object:
        kinds = "slo" if left > 1 else "s"
        kind = drawn.choice(kinds)
        if kind == "s":
            return "".join(drawn.choice('a"\\[]{},:é') for _ in range(drawn.randrange(6)))
        inner = [value(left - 1) for _ in range(drawn.randrange(4))]
        return inner if kind == "l" else {f"{index}\\[": each for index, each in enumerate(inner)}

    def depth(of: object) -> int:
        inner = of.values() if isinstance(of, dict) else of if isinstance(of, list) else None
        return 0 if inner is None else 1 + max(map(depth, inner), default=0)

    outcomes = set()
    for _ in range(2000):
        made = value(9)
        text = json.dumps(made, ensure_ascii=drawn.random() < 0.5).encode()
        try:
            foreign.check(text)
        except ValueError:
            assert depth(made) > 6, text
            outcomes.add(False)
        else:
            assert depth(made) <= 6, text
            outcomes.add(True)
    assert outcomes == {True, False}


@pytest.mark.parametrize("inner", [b"[],", b"{},", b"1,", b'"",', b'"a[",'])
def test_a_request_has_so_many_values_and_no_more(inner):
    text = b'{"a":[' + inner * (foreign.MOST_VALUES + 1) + b"1]}"
    with pytest.raises(ValueError, match="more than 500,000 values"):
        foreign.read(text, of_request=True)
    foreign.check(text)  # an engine's embeddings have more
    assert foreign.read(b'{"a":"' + b"," * 600_000 + b'"}', of_request=True)


@pytest.mark.parametrize("number", ["{}", "-{}", "0.{}", "{}e5"])
@pytest.mark.parametrize("behind", [0, 70_000])
def test_text_with_a_number_of_too_many_digits_is_refused(number, behind):
    def text(digits):
        value = number.format("9" * digits)
        return f'{{"a":"{"x" * behind}","b":[1,{value}],"c":"{"7" * 90_000}"}}'.encode()

    with pytest.raises(ValueError, match="a number of more than 400 digits"):
        foreign.check(text(foreign.MOST_DIGITS + 60))
    assert foreign.read(text(foreign.MOST_DIGITS - 2))["b"][0] == 1


def test_digits_within_strings_are_not_a_number():
    text = json.dumps({"a": '"' * 3 + "1" * 200_000, "b": ["\\", "2" * 1000, 3]}).encode()
    assert foreign.read(text)["b"][2] == 3


def test_every_reader_of_a_request_refuses_what_is_nested_too_deeply():
    body = b'{"model":"m","messages":' + nested(DEEP) + b"}"
    for refused in (
        lambda: completions.parse(body),
        lambda: naming.model_and_stream(body),
        lambda: naming.model_and_stream(body.replace(b"model", b"m\\u006fdel")),
        lambda: naming.session_models(body),
        lambda: rewritten(body, ("seed",), {}),
    ):
        with pytest.raises(BadRequest, match="nested deeper"):
            refused()
    assert prefix.read("m", body, 4.0).blocks == ()


def test_an_engines_answer_that_is_nested_too_deeply_is_its_mistake():
    with pytest.raises(BackendError):
        completions.document(b'{"choices":' + nested(DEEP) + b"}")


OWN = {
    # What anvil-mux, its children and Docker write, the text of one string, and what was checked before.
    "cli/operating.py",
    "cluster/agent.py",
    "cluster/frames.py",
    "demo/engine.py",
    "host/docker_api.py",
    "host/cuda_driver.py",
    "host/launcher.py",
    "host/runs.py",
    "host/starter.py",
    "lab/player.py",
    "lab/workload.py",
    "protocol/foreign.py",
    "protocol/naming.py",
    "proxy/engine_request.py",
    "serve/polling.py",
    "serve/remote.py",
    "serve/files.py",
    "telemetry/eventlog.py",
    "telemetry/usage.py",
}


def test_nobody_else_reads_json_without_limits():
    def reads(file: Path) -> bool:
        return re.search(r"\bjson\.(loads?|JSONDecoder)\(", file.read_text()) is not None

    readers = {str(file.relative_to(PACKAGE)) for file in PACKAGE.rglob("*.py") if reads(file)}
    assert readers <= OWN


def test_a_requests_thread_has_the_stack_for_all_that_walks_over_the_deepest():
    done = []

    def walk() -> None:
        for text in (nested(DEEP), b'{"a":' * DEEP + b"1" + b"}" * DEEP):
            value = completions.finite(foreign.read(text))
            assert json.loads(json.dumps(value, indent=1, sort_keys=True)) == copy.deepcopy(value)
        done.append(True)

    before = threading.stack_size(STACK_BYTES)
    try:
        thread = threading.Thread(target=walk)
        thread.start()
    finally:
        threading.stack_size(before)
    thread.join()
    assert done
