"""A real engine is measured, and requests are routed by what was found."""

import os
import re
import subprocess
import sys
from contextlib import ExitStack

import openai
import pytest
import yaml

from anvil_mux.config.values import read_profile
from tests.docker.conftest import Stack
from tests.docker.served import ENDLESS, FOREVER, PATIENCE, ask, client_of, eventually, served, stream
from tests.running import Running

MODEL = "model-1"
SLOTS = 2
FILE = "fast.json"


def measure(stack: Stack, mux: Running) -> str:
    """Writes the profile of the one replica that serves; what was said of it."""
    sizes = ["--prompts", "128,512,4096", "--lengths", "128,512", "--batches", "1,2,4", "--repeat", "2"]
    address = ["--url", f"http://127.0.0.1:{mux.port}", "-o", str(stack.file.parent / FILE)]
    done = subprocess.run(
        [sys.executable, "-m", "anvil_mux", "profile", MODEL, *sizes, *address],
        env=dict(os.environ),
        timeout=PATIENCE,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def two_by_profile(stack: Stack) -> None:
    """Two replicas, and a policy that goes by the profile."""
    written = yaml.safe_load(stack.file.read_text())
    written["x-anvil"] = {"routing": "slo"}
    written["services"][MODEL] |= {"scale": 2, "x-anvil": {"gpus": [], "preload": True, "profile": FILE}}
    stack.file.write_text(yaml.safe_dump(written))


def ready(mux: Running) -> int:
    return [each["state"] for each in mux.get("/healthz")["models"][MODEL]["backends"].values()].count(
        "ready"
    )


def test_a_real_engine_is_profiled_and_gets_no_more_than_it_was_seen_to_do(llamacpp_compose, tmp_path):
    alone = {MODEL: {"x-anvil": {"gpus": []}, **ENDLESS}}
    stack = llamacpp_compose(tmp_path, models=1, slots=SLOTS, services=alone)
    with served(stack) as mux:
        assert ask(mux, MODEL) == ""
        said = measure(stack, mux)
    print(said)
    assert re.search(
        r"prompts of 4096 tokens and more are left out, \d+ is the most: model-1 answered 400", said
    )
    assert f"4 at once and more are left out: the engine has {SLOTS} slots" in said
    found = read_profile((tmp_path / FILE).read_text())
    lengths = [tokens for tokens, _ in found.ttft[1:]]
    assert lengths[:2] == [pytest.approx(128, rel=0.05), pytest.approx(512, rel=0.05)]
    assert [512 < most < 4096 for most in lengths[2:]] == [True]
    assert all(milliseconds > 0 for _, milliseconds in found.ttft[1:])
    assert [batch for batch, _ in found.tpot] == [1, 2]

    two_by_profile(stack)
    with served(stack) as mux, client_of(mux) as client, ExitStack() as streams:
        eventually(lambda: ready(mux) == 2)
        for _ in range(2 * SLOTS):
            answer = streams.enter_context(stream(client, MODEL, FOREVER))
            assert "slo: predicted_ttft" in answer.response.headers["x-anvil-backend"]
            next(answer)
        with pytest.raises(openai.InternalServerError, match="overloaded"):
            stream(client, MODEL, 10)
