"""Prompts of real llama-servers in containers, which are saved and restored as models take turns."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.docker.conftest import Stack
from tests.docker.served import run_of, served
from tests.running import Running

ONE, OTHER = "model-1", "model-2"
ALPHA, BETA = "alpha " * 250, "beta " * 250
"""Two prompts of more than a thousand tokens each, since most letters are tokens."""
LONG = 1000


@pytest.fixture
def stack(llamacpp_compose: Callable[..., Stack], tmp_path: Path) -> Stack:
    """Two models of the same shape on one GPU, so that each would take the other's prompts."""
    made = llamacpp_compose(tmp_path, models=2, slots=2, top={"x-anvil": {"policy": "eager"}})
    said = yaml.safe_load(made.file.read_text())
    for name in (ONE, OTHER):
        described = said["services"][name]
        words = described["command"]
        words[words.index("-c") + 1] = "8192"
        words += ["--slot-save-path", "/prompts"]
        described["volumes"] = [*described["volumes"], "./prompts:/prompts"]
        described["x-anvil"]["prompt_cache"] = "64MiB"
    made.file.write_text(yaml.safe_dump(said, sort_keys=False))
    return made


@pytest.fixture
def mux(stack: Stack) -> Iterator[Running]:
    with served(stack) as running:
        yield running


def ask(mux: Running, model: str, prompt: str) -> tuple[str, int, int]:
    """What it answers, and how many tokens of the prompt were computed and how many were there."""
    said: dict[str, Any] = {"model": model, "prompt": prompt, "temperature": 0, "max_tokens": 16}
    status, _, body = mux.request("POST", "/v1/completions", said)
    assert status == 200, body
    found = json.loads(body)
    return found["choices"][0]["text"], found["timings"]["prompt_n"], found["timings"]["cache_n"]


def files(stack: Stack, model: str) -> list[Path]:
    return sorted((stack.file.parent / "prompts").glob(f"{model}.*.prompt"))


def kept(mux: Running, model: str) -> int:
    return int(mux.get("/healthz")["models"][model]["backends"][model]["kept_prompts"]["prompts"])


def test_prompts_are_there_after_a_swap_and_are_answered_alike(mux, stack):
    first = {prompt: ask(mux, ONE, prompt) for prompt in (ALPHA, BETA)}
    assert all(computed > LONG and cached < 10 for _, computed, cached in first.values())
    run = run_of(stack, ONE)
    assert ask(mux, OTHER, ALPHA)[1] > LONG
    assert (kept(mux, ONE), len(files(stack, ONE))) == (2, 2)
    for prompt in (BETA, ALPHA):
        text, computed, cached = ask(mux, ONE, prompt)
        assert run_of(stack, ONE) != run
        assert (text, computed + cached) == (first[prompt][0], sum(first[prompt][1:]))
        assert cached > LONG
    assert ask(mux, OTHER, ALPHA)[2] > LONG


def test_a_file_that_is_cut_short_is_removed_and_its_prompt_is_computed(mux, stack):
    first = {prompt: ask(mux, ONE, prompt) for prompt in (ALPHA, BETA)}
    ask(mux, OTHER, ALPHA)
    cut, whole = files(stack, ONE)
    cut.write_bytes(cut.read_bytes()[:-1000])
    again = {prompt: ask(mux, ONE, prompt) for prompt in (ALPHA, BETA)}
    assert {prompt: text for prompt, (text, _, _) in again.items()} == {
        prompt: text for prompt, (text, _, _) in first.items()
    }
    assert sorted(cached > LONG for _, _, cached in again.values()) == [False, True]
    assert not cut.exists()
    assert whole.exists()


def test_prompts_of_another_model_file_are_removed(mux, stack, tmp_path):
    ask(mux, ONE, ALPHA)
    theirs, _, _ = ask(mux, OTHER, ALPHA)
    said = yaml.safe_load(stack.file.read_text())
    one, other = (said["services"][name] for name in (ONE, OTHER))
    one["volumes"] = other["volumes"]
    stack.file.write_text(yaml.safe_dump(said, sort_keys=False))
    assert mux.request("POST", "/reload")[0] == 200
    text, computed, cached = ask(mux, ONE, ALPHA)
    assert (text, cached < 10, computed > LONG) == (theirs, True, True)
