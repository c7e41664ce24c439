"""1,019 requests in twelve situations that break switching proxies, against a running anvil-mux; no error.

The situations are those that llmux's fuzz suite describes (its report counts as many, without a list):
concurrent switching, rapid cycling, bursts, streams during switches, clients that leave. Engines are the
demo's: real processes, real sockets, short loads.
"""

import http.client
import json
import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml

from tests.running import Running, seen, serving
from tests.seeds import ALL, part

ROOT = Path(__file__).resolve().parent.parent.parent
TIMEOUT = 120.0
A, B = "a", "b"


@pytest.fixture(scope="module", params=["stop", "sleep"])
def mux(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("robustness")
    file = folder / "compose.yaml"
    engine = {
        "working_dir": str(ROOT),
        "environment": {"VLLM_SERVER_DEV_MODE": "1"},
        "x-anvil": {"gpus": ["0"], "engine": "vllm", "evict_to": [request.param]},
    }
    flags = ["--enable-sleep-mode", "--load-seconds", "0.1", "--wake-seconds", "0"]
    flags += ["--tokens-per-second", "2000"]
    services = {
        name: {**engine, "command": ["bin/demo-engine", "--model", name, *flags], "image": "none"}
        for name in (A, B)
    }
    # The default policy guesses that a load takes a minute, and holds swaps back for nearly as long.
    hurried = {} if ALL else {"max_wait": "1s"}
    file.write_text(yaml.safe_dump({"x-anvil": {"runtime": "process", **hurried}, "services": services}))
    with serving(file, state=folder) as running:
        yield running
        assert seen(lambda: busy(running), lambda found: not any(found)) == [0] * 4


def busy(running: Running) -> list[int]:
    """How many hold a lease and how many wait, model by model."""
    models = running.get("/healthz")["models"].values()
    return [model[which] for model in models for which in ("leases", "waiting")]


Ask = tuple[str, int, bool, str]
"""model, max_tokens, stream, prompt"""


def ask(running: Running, request: Ask) -> str:
    r"""Empty if the answer is whole and from the right model, else what is wrong with it."""
    model, tokens, stream, prompt = request
    body = {
        "model": model,
        "max_tokens": tokens,
        "stream": stream,
        "messages": [{"role": "user", "content": prompt}],
    }
    connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=TIMEOUT)
    try:
        connection.request(
            "POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"}
        )
        response = connection.getresponse()
        text = response.read().decode()
    finally:
        connection.close()
    if response.status != 200:
        return f"{response.status} {text}"
    return _flaw_of_stream(text, model) if stream else _flaw_of_answer(text, model)


def _flaw_of_answer(text: str, model: str) -> str:
    answer = json.loads(text)
    whole = answer["model"] == model and answer["choices"][0]["message"]["content"]
    return "" if whole else f"not an answer of {model}: {text}"


def _flaw_of_stream(text: str, model: str) -> str:
    events = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    if not events or events[-1] != "[DONE]":
        return f"the stream ends without [DONE]: {text[-200:]}"
    chunks = [json.loads(event) for event in events[:-1]]
    if any("error" in chunk for chunk in chunks):
        return f"an error in the stream: {text[-400:]}"
    said = "".join(c["delta"].get("content") or "" for chunk in chunks for c in chunk["choices"])
    return (
        "" if said and all(chunk["model"] == model for chunk in chunks) else f"not from {model}: {text[:200]}"
    )


def plain(model: str, tokens: int = 10, prompt: str = "Say hello.") -> Ask:
    return (model, tokens, False, prompt)


def stream(model: str, tokens: int) -> Ask:
    return (model, tokens, True, "Say hello.")


def together(running: Running, *bursts: Sequence[Ask]) -> list[str]:
    """Sends the bursts one after the other without waiting for answers; all flaws found."""
    requests = [request for burst in bursts for request in burst]
    with ThreadPoolExecutor(len(requests)) as pool:
        return [flaw for flaw in pool.map(lambda request: ask(running, request), requests) if flaw]


def alternating(count: int) -> list[Ask]:
    return [plain((A, B)[number % 2]) for number in range(count)]


def twenty_at_once_for_the_resident(running: Running) -> list[str]:
    return together(running, [plain(A)] * 20)


def long_answers_then_the_other_model(running: Running) -> list[str]:
    return together(running, [plain(A, 200)] * 5, [plain(B)] * 5)


def ten_alternating_at_once(running: Running) -> list[str]:
    return together(running, alternating(10))


def a_stream_and_then_the_other_model(running: Running) -> list[str]:
    return together(running, [stream(A, 500)], [plain(B)])


def a_hundred_for_each_at_once(running: Running) -> list[str]:
    return together(running, [plain(A)] * 100, [plain(B)] * 100)


def ten_waves(running: Running) -> list[str]:
    waves = [[plain((A, B)[n % 2])] * 10 + [plain((B, A)[n % 2])] * 10 for n in range(10)]
    return [flaw for wave in waves for flaw in together(running, wave)]


def lockstep(running: Running) -> list[str]:
    return [flaw for _ in range(20) for flaw in together(running, alternating(2))]


def all_mixed_at_once(running: Running) -> list[str]:
    return together(running, alternating(60))


def streams_while_switching(running: Running) -> list[str]:
    return together(running, [stream(A, 500)] * 30, [plain(B, 50)] * 20, [plain(A)] * 20, [plain(B)] * 10)


def late_arrivals_for_a_draining_model(running: Running) -> list[str]:
    return together(running, [stream(A, 1000)] * 5, [plain(B)], [plain(A)] * 50, [plain(B)] * 20)


def clients_that_leave_in_mid_stream(running: Running) -> list[str]:
    leave_in_mid_stream(running, 10)
    return together(running, [plain(B)], [plain(A)] * 10, [plain(B)] * 10)


def leave_in_mid_stream(running: Running, count: int) -> None:
    body = json.dumps({"model": A, "max_tokens": 100_000, "stream": True, "messages": []}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n\r\n"
    clients = [socket.create_connection(("127.0.0.1", running.port), TIMEOUT) for _ in range(count)]
    for client in clients:
        client.sendall(head.encode() + body)
    for client in clients:
        assert b"200 OK" in client.recv(4096)
        client.close()


def rapid_cycling_with_leftovers(running: Running) -> list[str]:
    rounds = [[plain(B)] * 20 + [plain(A)] * 10, [plain(A)] * 20 + [plain(B)] * 10] * 5
    return [flaw for one in rounds for flaw in together(running, one)]


SITUATIONS: list[tuple[int, Callable[[Running], list[str]]]] = [
    (20, twenty_at_once_for_the_resident),
    (10, long_answers_then_the_other_model),
    (10, ten_alternating_at_once),
    (2, a_stream_and_then_the_other_model),
    (200, a_hundred_for_each_at_once),
    (200, ten_waves),
    (60, all_mixed_at_once),
    (40, lockstep),
    (80, streams_while_switching),
    (76, late_arrivals_for_a_draining_model),
    (21, clients_that_leave_in_mid_stream),
    (300, rapid_cycling_with_leftovers),
]


@pytest.mark.seeds
@pytest.mark.parametrize(
    ("count", "situation"), part(SITUATIONS, every=3), ids=lambda value: getattr(value, "__name__", None)
)
def test_no_request_fails_in(mux, count, situation):
    before = mux.answered()
    assert situation(mux) == []
    assert mux.answered(before + count) >= before + count


def test_the_situations_are_1019_requests():
    assert sum(count for count, _ in SITUATIONS) == 1019
    assert len(SITUATIONS) == 12
