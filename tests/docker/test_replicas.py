"""Three real llama-servers behind one name, one of which is killed under load."""

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import openai

from tests.docker.served import PATIENCE, client_of, docker, eventually, is_idle, served, stream
from tests.running import Running

MODEL = "shared"
VICTIM = "model-2"
CLIENTS = 24
REQUESTS = 4
"""Of each client; every other one is streamed."""
TOKENS = 300


@dataclass
class Fate:
    """What became of one request."""

    streamed: bool
    tokens: int = 0
    """Pieces of content that its client saw."""
    used: int = 0
    """Tokens as the engine that ended the stream counts them."""
    error: str = ""


@dataclass
class Load:
    """Clients that ask again and again, and what became of their requests."""

    mux: Running
    fates: list[Fate] = field(default_factory=list)
    backends: Counter[str] = field(default_factory=Counter)
    killed: threading.Event = field(default_factory=threading.Event)

    def client(self, number: int) -> None:
        """Asks at least ``REQUESTS`` times, and once more after the engine was killed."""
        with client_of(self.mux) as client:
            asked = 0
            while asked < REQUESTS or not self.killed.is_set():
                asked += 1
                self.fates.append(self._one(client, streamed=(number + asked) % 2 == 0))

    def _one(self, client: openai.OpenAI, *, streamed: bool) -> Fate:
        fate = Fate(streamed)
        try:
            if streamed:
                for chunk in stream(client, MODEL, TOKENS):
                    fate.tokens += any(choice.delta.content for choice in chunk.choices)
                    fate.used = chunk.usage.completion_tokens if chunk.usage else 0
            else:
                self._whole(client)
        except openai.APIError as error:
            fate.error = repr(error)
        return fate

    def _whole(self, client: openai.OpenAI) -> None:
        raw = client.chat.completions.with_raw_response.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Say hello."}],
            max_tokens=TOKENS,
            extra_body={"ignore_eos": True},
        )
        usage = raw.parse().usage
        assert usage
        assert usage.completion_tokens == TOKENS
        self.backends[raw.headers["x-anvil-backend"].partition(";")[0]] += 1


def leases(mux: Running) -> dict[str, int]:
    """Replica -> the requests that it has."""
    backends = mux.get("/healthz")["models"][MODEL]["backends"]
    return {name: about["leases"] for name, about in backends.items()}


def test_an_engine_killed_under_load_loses_no_request_that_had_not_begun_to_stream(
    llamacpp_compose, tmp_path
):
    stack = llamacpp_compose(tmp_path, models=3, slots=2, one=MODEL)
    with served(stack) as mux:
        eventually(lambda: stack.up() == {"model-1", "model-2", "model-3"})
        load = Load(mux)
        with ThreadPoolExecutor(CLIENTS) as pool:
            clients = [pool.submit(load.client, number) for number in range(CLIENTS)]
            try:
                eventually(lambda: len(load.backends) == 3)
                # Stopped, it keeps the requests that it has until it is killed.
                docker(stack, "kill", "--signal", "STOP", stack.container(VICTIM))
                eventually(lambda: leases(mux)[VICTIM] > 2)
                held = leases(mux)[VICTIM]
                docker(stack, "kill", stack.container(VICTIM))
            finally:
                load.killed.set()
            for each in clients:
                each.result(PATIENCE)
        eventually(lambda: is_idle(mux))
    lost = [fate for fate in load.fates if fate.error]
    whole = len(load.fates) - len(lost)
    cut = [fate.tokens for fate in lost]
    print(f"killed with {held} requests; {whole} whole, {len(lost)} broken off after {cut} tokens")
    assert [fate for fate in lost if not fate.streamed or not fate.tokens] == []
    assert all(fate.tokens for fate in load.fates if fate.streamed)
    assert {fate.used for fate in load.fates if fate.streamed and not fate.error} == {TOKENS}
    assert load.backends.keys() == {"model-1", "model-2", "model-3"}
