"""A real anvil-mux on a stack of real containers, its clients, and what both can be asked."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import openai
from openai.types.chat import ChatCompletionChunk
from prometheus_client.parser import text_string_to_metric_families

from tests.docker.conftest import Stack
from tests.running import Running, serve, serving

PATIENCE = 120.0
"""Seconds after which what a test waits for is not coming any more."""

BUSYBOX = {"image": "anvil-mux-test/busybox", "ports": ["127.0.0.1::8080"], "stop_grace_period": "1s"}
"""A service that is no engine; give it a command."""

FOREVER = 1_000_000
"""Tokens; an engine that is ENDLESS would be at it for minutes."""
ENDLESS = {"environment": {"LLAMA_ARG_CONTEXT_SHIFT": "1"}}

Answer = tuple[int, dict[str, str], str]


@contextmanager
def served(stack: Stack, *flags: str) -> Iterator[Running]:
    """anvil-mux on ``stack``; it and its engines end with the block."""
    with serving(stack.file, *flags, state=stack.file.parent, environ=stack.engine.env) as mux:
        yield mux


@contextmanager
def lasting(stack: Stack, *flags: str) -> Iterator[Running]:
    """anvil-mux on ``stack``, for tests that end it themselves."""
    mux = serve(stack.file, *flags, state=stack.file.parent, environ=stack.engine.env)
    try:
        yield mux
    finally:
        mux.stop()


def eventually(holds: Callable[[], bool], found: Callable[[], str] = lambda: "") -> None:
    """For what tells nobody when it has come true: asks again and again, until ``holds()``.

    ``found`` adds to the complaint what was so instead.
    """
    pause, give_up = threading.Event(), time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < give_up, f"it never came true {found()}"
        pause.wait(0.05)


# Clients


def client_of(mux: Running) -> openai.OpenAI:
    """A client that does not hide a failed request by sending it again."""
    url = f"http://127.0.0.1:{mux.port}/v1"
    return openai.OpenAI(base_url=url, api_key="none", timeout=PATIENCE, max_retries=0)


def stream(client: openai.OpenAI, model: str, tokens: int) -> openai.Stream[ChatCompletionChunk]:
    """A stream of exactly so many tokens, if the engine's context has room for them."""
    return client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Say hello."}],
        max_tokens=tokens,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )


def flaw_of(answer: openai.Stream[ChatCompletionChunk], model: str, tokens: int) -> str:
    """Reads a stream to its end; empty if it was whole and from ``model``, else what is wrong with it."""
    end = _keep_end(answer)
    chunks = list(answer)
    finished = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1:]
    used = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage]
    seen = {chunk.model for chunk in chunks}, finished, used, bytes(end).strip().endswith(b"[DONE]")
    return "" if seen == ({model}, ["length"], [tokens], True) else f"{tokens} tokens of {model}: {seen}"


def ask(mux: Running, model: str) -> str:
    """Streams one answer; empty if it was whole, else what is wrong with it."""
    with client_of(mux) as client:
        return ask_with(client, model, 20)


def ask_with(client: openai.OpenAI, model: str, tokens: int) -> str:
    try:
        return flaw_of(stream(client, model, tokens), model, tokens)
    except openai.APIError as error:
        return f"{model}: {error!r}"


def _keep_end(answer: openai.Stream[ChatCompletionChunk]) -> bytearray:
    """The last bytes that the client read, which it does not show: the [DONE] among them."""
    end, read = bytearray(), answer.response.iter_bytes

    def reading(*args: Any) -> Iterator[bytes]:
        for piece in read(*args):
            end[:] = (end + piece)[-64:]
            yield piece

    answer.response.iter_bytes = reading  # type: ignore[method-assign]
    return end


def error_of(text: str) -> dict[str, Any]:
    """The error object of an answer that is one."""
    found: dict[str, Any] = json.loads(text)["error"]
    return found


# Questions


def is_idle(mux: Running) -> bool:
    """Nobody waits and nobody holds a lease."""
    health = mux.get("/healthz")
    return (health["waiting"], health["leases"]) == (0, 0)


def leases(mux: Running, model: str) -> int:
    return int(mux.get("/healthz")["models"][model]["leases"])


def count(mux: Running, counter: str, **labels: str) -> int:
    """The sum of a counter of /metrics over everything that has these labels."""
    families = text_string_to_metric_families(mux.request("GET", "/metrics")[2])
    found = [each for family in families for each in family.samples if each.name == f"{counter}_total"]
    return int(sum(each.value for each in found if labels.items() <= each.labels.items()))


def docker(stack: Stack, *args: str) -> str:
    done = subprocess.run(
        ["docker", *args], env=stack.engine.env, timeout=PATIENCE, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_of(stack: Stack, model: str) -> tuple[str, str]:
    """Differs between any two runs of the model's container."""
    found = json.loads(docker(stack, "inspect", stack.container(model)))[0]
    return found["Id"], found["State"]["StartedAt"]


def status_of(stack: Stack, model: str) -> str:
    """What Docker calls the state of the model's container: running, paused, exited."""
    return docker(stack, "inspect", "--format", "{{.State.Status}}", stack.container(model)).strip()


def state_of(mux: Running, model: str) -> str:
    return str(mux.get("/healthz")["models"][model]["state"])
