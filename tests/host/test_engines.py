"""Readiness, against real HTTP servers that answer as the engines do, in virtual time."""

import json
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from anvil_mux.config.config import Backend
from anvil_mux.config.service import Service
from anvil_mux.errors import Cancelled, LoadError
from anvil_mux.host import engine_client, engines
from anvil_mux.host.engine_client import MOST_BYTES
from anvil_mux.host.engines import (
    ENGINES,
    at_once,
    await_ready,
    client_of,
    idle_connections,
    listen_port,
)


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Virtual time is over in no time, but servers answer in real time."""
    monkeypatch.setattr(engine_client, "LEAST_TIMEOUT", 30.0)


class Waiting:
    """Virtual time; ``then`` are called one by one, one at each pause."""

    def __init__(self, *then: Callable[[], None]) -> None:
        self.time = 1000.0
        self.pauses: list[float] = []
        self._then = list(then)

    def now(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.time += seconds
        if self._then:
            self._then.pop(0)()


@dataclass
class Stub:
    """Answers by "METHOD path": a status, or a status and a JSON body. What it has no answer for is 404."""

    answers: dict[str, int | tuple[int, object]]
    url: str = ""
    seen: list[str] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)


@contextmanager
def engine(**answers: int | tuple[int, object]) -> Iterator[Stub]:
    stub = Stub({key.replace("_", " ", 1): value for key, value in answers.items()})

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = -1

        def answer(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            stub.seen.append(f"{self.command} {self.path}")
            stub.keys.append(self.headers.get("Authorization"))
            found = stub.answers.get(f"{self.command} {self.path}", 404)
            status, body = found if isinstance(found, tuple) else (found, {})
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            if status == 302:
                self.send_header("Location", "/elsewhere")
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = answer

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    stub.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield stub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def serving(*ids: str) -> tuple[int, object]:
    return 200, {"object": "list", "data": [{"id": each} for each in ids]}


HEALTHY = {"GET_/health": 200}
ANY_FILE = {**HEALTHY, "GET_/v1/models": serving("/m/any.gguf")}


def ready(backend: Backend, url: str, waiting: Waiting, *, seconds: float = 60.0, ended=lambda: None) -> None:
    backend = replace(backend, load_timeout=seconds)
    await_ready(
        backend, url, ended=ended, deadline=waiting.time + seconds, now=waiting.now, sleep=waiting.sleep
    )


def found_ready(backend: Backend, **answers: int | tuple[int, object]) -> Stub:
    """An engine with these answers, which was found to be ready."""
    with engine(**answers) as stub:
        ready(backend, stub.url, Waiting())
    return stub


def why_not(backend: Backend, seconds: float = 1.0, **answers: int | tuple[int, object]) -> str:
    """The reason why an engine with these answers is not ready."""
    with engine(**answers) as stub, pytest.raises(LoadError) as caught:
        ready(backend, stub.url, Waiting(), seconds=seconds)
    return caught.value.message


VLLM = Backend(name="qwen", model="qwen3", engine="vllm")


def llamacpp(*command: str, **environment: str) -> Backend:
    return Backend(
        name="tiny",
        model="tiny",
        engine="llamacpp",
        service=Service(command=("llama-server", *command), environment=tuple(environment.items())),
    )


def test_healthy_and_serving_its_model_is_ready_at_the_first_look():
    waiting = Waiting()
    with engine(**{"GET_/health": 200, "GET_/v1/models": serving("qwen3")}) as stub:
        ready(VLLM, stub.url, waiting)
    assert (stub.seen, waiting.pauses) == (["GET /health", "GET /v1/models"], [])


def test_the_served_model_counts_where_it_differs_from_our_name():
    backend = Backend(name="qwen", model="qwen3", served_model="Qwen/Qwen3-8B", engine="sglang")
    found_ready(backend, **HEALTHY, **{"GET_/v1/models": serving("Qwen/Qwen3-8B")})


@pytest.mark.parametrize("load_seconds", [0.1, 1.0, 6.0])
def test_a_look_is_late_by_a_hundredth_of_the_load_and_a_twentieth_of_a_second_at_most(load_seconds):
    with engine(**{"GET_/health": 503, "GET_/v1/models": serving("qwen3")}) as stub:
        waiting = Waiting()

        def pause(seconds: float) -> None:
            waiting.sleep(seconds)
            if waiting.time >= 1000.0 + load_seconds:
                stub.answers["GET /health"] = 200

        await_ready(VLLM, stub.url, ended=lambda: None, deadline=1e9, now=waiting.now, sleep=pause)
    assert waiting.time - 1000.0 - load_seconds <= min(max(0.01, load_seconds / 100), 0.05) + 1e-9
    assert stub.seen.count("GET /v1/models") == 1
    assert len(waiting.pauses) <= 20 * load_seconds + 300


def test_an_engine_that_ended_fails_at_once_and_says_how():
    waiting = Waiting()
    ends = iter([None, None, "exited with code 1"])
    with engine(**{"GET_/health": 503}) as stub, pytest.raises(LoadError) as caught:
        ready(VLLM, stub.url, waiting, ended=lambda: next(ends))
    assert re.fullmatch(r"qwen exited with code 1 after 0\.\d s, before it was ready", caught.value.message)


def test_an_answer_does_not_count_when_our_own_service_has_ended():
    with (
        engine(**{"GET_/health": 200, "GET_/v1/models": serving("qwen3")}) as stub,
        pytest.raises(LoadError, match="qwen exited with code 98"),
    ):
        ready(VLLM, stub.url, Waiting(), ended=lambda: "exited with code 98")


@pytest.mark.parametrize(
    ("backend", "listed", "why"),
    [
        (VLLM, "llama3", r"answers for model llama3, not qwen3 .*served_model: llama3\)$"),
        (llamacpp("-m", "/m/tiny-1.gguf"), "/m/other.gguf", "answers for model /m/other.gguf, not tiny$"),
    ],
)
def test_another_process_on_the_port_is_not_taken_for_ready(monkeypatch, backend, listed, why):
    monkeypatch.setattr(engines, "OTHERS_PATIENCE", 2.0)
    waiting = Waiting()
    with (
        engine(**HEALTHY, **{"GET_/v1/models": serving(listed)}) as stub,
        pytest.raises(LoadError, match=rf"{backend.name} cannot become ready: port \d+ {why}"),
    ):
        ready(backend, stub.url, waiting, seconds=600)
    assert 2.0 <= sum(waiting.pauses) < 3


def test_a_other_process_that_leaves_in_time_does_no_harm():
    with engine(**{"GET_/health": 200, "GET_/v1/models": serving("llama3")}) as stub:

        def gone() -> None:
            stub.answers["GET /v1/models"] = serving("qwen3")

        ready(VLLM, stub.url, Waiting(lambda: None, gone))


@pytest.mark.parametrize(
    "body",
    [
        {"object": "list", "data": []},
        *("[]", 7, {"data": "x"}, {"data": [1, {"id": 5}]}, None),
        {"data": [{"id": "x" * 2 * MOST_BYTES}]},  # it is cut
    ],
)
def test_a_list_that_is_empty_or_none_is_of_an_engine_that_is_not_ready_yet(body):
    why = why_not(VLLM, **HEALTHY, **{"GET_/v1/models": (200, body)})
    assert "was not ready within its load_timeout of 1 s" in why
    assert "lists no model yet" in why


def test_a_list_of_thousands_of_models_is_read_whole_and_an_error_names_a_part_of_it():
    lists = serving(*(f"{number:0500}" for number in range(2000)), "qwen3")
    found_ready(VLLM, **HEALTHY, **{"GET_/v1/models": lists})
    why = why_not(VLLM, 60.0, **HEALTHY, **{"GET_/v1/models": serving(*["x" * 100_000] * 9)})
    assert "answers for model xxx" in why
    assert len(why) < 2000


def test_an_engine_that_wants_a_key_is_reported_at_once():
    waiting = Waiting()
    with (
        engine(**{"GET_/health": 200, "GET_/v1/models": 401}) as stub,
        pytest.raises(LoadError, match="API key"),
    ):
        ready(VLLM, stub.url, waiting)
    assert waiting.pauses == []


def test_the_key_in_the_services_command_is_used():
    service = Service(command=("vllm", "serve", "--api-key", "s3"))
    backend = Backend(name="q", model="qwen3", engine="vllm", service=service)
    stub = found_ready(backend, **HEALTHY, **{"GET_/v1/models": serving("qwen3")})
    assert stub.keys == ["Bearer s3", "Bearer s3"]


def test_keys_are_found_in_command_and_environment():
    assert Service(command=("x", "--api-key=k")).api_key == "k"
    assert Service(environment=(("VLLM_API_KEY", "v"),)).api_key == "v"
    assert Service(command=("x", "--api-key")).api_key is None


@pytest.mark.parametrize(
    ("engine", "service", "count"),
    [
        ("vllm", Service(), 256),
        ("llamacpp", Service(), 2),
        ("llamacpp", Service(command=("llama-server", "--threads-http", "64")), 2),
        ("llamacpp", Service(command=("llama-server", "--threads-http=2")), 1),
        ("llamacpp", Service(environment=(("LLAMA_ARG_THREADS_HTTP", "1"),)), 0),
        ("llamacpp", Service(command=("llama-server", "--threads-http", "-1")), 2),
    ],
)
def test_an_engine_keeps_threads_for_those_whose_connections_do_not_idle(engine, service, count):
    assert idle_connections(Backend("q", "q", engine=engine, service=service)) == count


@pytest.mark.parametrize(
    ("engine", "service", "count"),
    [
        ("openai", Service(), 256),
        ("vllm", Service(command=("vllm", "serve", "m", "--max-num-seqs=64")), 64),
        ("sglang", Service(command=("x", "--max-running-requests", "48")), 48),
        ("llamacpp", Service(), 4),
        ("llamacpp", Service(command=("llama-server", "-np", "8")), 8),
        ("llamacpp", Service(command=("llama-server", "--parallel", "-1")), 4),
        ("llamacpp", Service(environment=(("LLAMA_ARG_N_PARALLEL", "2"),)), 2),
        ("ollama", Service(), 1),
        ("ollama", Service(environment=(("OLLAMA_NUM_PARALLEL", "3"),)), 3),
    ],
)
def test_an_engine_makes_so_many_answers_at_a_time(engine, service, count):
    assert at_once(Backend("q", "q", engine=engine, service=service)) == count


def test_nothing_listens_until_the_deadline():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        with pytest.raises(LoadError) as caught:
            ready(VLLM, f"http://127.0.0.1:{port}", Waiting(), seconds=2)
    assert f"of 2 s: port {port}: nothing listens there yet" in caught.value.message


def test_a_port_that_accepts_and_says_nothing_is_bounded(monkeypatch):
    monkeypatch.setattr(engine_client, "LEAST_TIMEOUT", 0.02)
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(LoadError) as caught:
        ready(VLLM, f"http://127.0.0.1:{silent.getsockname()[1]}", Waiting(), seconds=0.1)
    assert "accepts connections but does not answer" in caught.value.message


DRIPPING = (b"HTTP/1.1 200 OK\r\nx: ", b"HTTP/1.1 200 OK\r\nContent-Length: 900000\r\n\r\n")


@contextmanager
def dripping(head: bytes) -> Iterator[str]:
    """The URL of an engine that sends a byte now and then, and never comes to an end."""
    left = threading.Event()

    def drip(engine: socket.socket) -> None:
        with suppress(OSError), engine:
            engine.sendall(head)
            while not left.wait(0.02):
                engine.sendall(b"a")

    def accept() -> None:
        with suppress(OSError):
            while True:
                threads.append(threading.Thread(target=drip, args=(listener.accept()[0],)))
                threads[-1].start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threads = [threading.Thread(target=accept)]
        threads[0].start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
        left.set()
        for each in threads:
            each.join()


@pytest.mark.parametrize("head", DRIPPING)
def test_an_answer_that_drips_is_bounded_and_so_is_a_load_that_is_cancelled(
    monkeypatch: pytest.MonkeyPatch, head: bytes
):
    def cancel() -> None:
        raise Cancelled("enough")

    with dripping(head) as url:
        with client_of(VLLM, url, 600.0, cancel) as client, pytest.raises(Cancelled):
            client.look()
        monkeypatch.setattr(engine_client, "LEAST_TIMEOUT", 0.1)
        assert engines.answers(VLLM, url, 0.1) is None
        with pytest.raises(LoadError, match="accepts connections but does not answer"):
            ready(VLLM, url, Waiting(), seconds=0.1)


def test_redirects_are_not_followed():
    with engine(**{"GET_/health": 302, "GET_/elsewhere": 200}) as stub, pytest.raises(LoadError, match="302"):
        ready(VLLM, stub.url, Waiting(), seconds=1)
    assert "GET /elsewhere" not in stub.seen


def test_proxies_of_the_environment_are_not_asked(monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "")
    found_ready(VLLM, **HEALTHY, **{"GET_/v1/models": serving("qwen3")})


@pytest.mark.parametrize(
    ("reported", "backend"),
    [
        ("tiny-1.gguf", llamacpp("-m", "/m/tiny-1.gguf")),
        ("/m/tiny-1.gguf", llamacpp("-m", "/m/tiny-1.gguf")),
        ("two", llamacpp("-m", "/m/x.gguf", "--alias=one,two")),
        ("two", llamacpp(LLAMA_ARG_ALIAS="two")),
    ],
)
def test_llama_cpp_is_known_by_the_file_it_was_given_or_its_alias(reported, backend):
    stub = found_ready(backend, **HEALTHY, **{"GET_/v1/models": serving(reported)})
    assert "POST /v1/chat/completions" not in stub.seen


@pytest.mark.parametrize(
    ("answers", "last"),
    [
        ({"POST_/v1/chat/completions": 200}, "POST /v1/chat/completions"),
        (
            {"POST_/v1/chat/completions": 501, "POST_/v1/completions": 501, "POST_/v1/embeddings": 200},
            "POST /v1/embeddings",
        ),
    ],
)
def test_one_token_or_embedding_decides_where_nothing_else_can(answers, last):
    assert found_ready(llamacpp(), **ANY_FILE, **answers).seen[-1] == last


def test_a_probe_that_fails_is_not_ready_and_tells_the_engines_words():
    said = {"POST_/v1/chat/completions": (503, {"error": "Loading model"})}
    why = why_not(llamacpp(), **ANY_FILE, **said)
    assert re.search(r"POST /v1/chat/completions answers 503: .*Loading model", why)


def test_an_answer_that_takes_as_long_as_a_load_is_not_waited_for_when_that_is_cancelled():
    backend, tended = Backend(name="o", model="llama3", engine="ollama"), []

    def check_cancelled() -> None:
        tended.append(1)
        if len(tended) == 2:
            raise Cancelled("enough")

    with socket.create_server(("127.0.0.1", 0)) as silent:  # connects, and never says a word
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with (
            client_of(backend, url, 600.0, check_cancelled, lambda: 0.0) as client,
            pytest.raises(Cancelled),
        ):
            client.probe()
    assert len(tended) == 2


def test_ollama_loads_its_weights_with_the_probe():
    answers = {"GET_/": 200, "GET_/v1/models": serving("other:7b", "llama3:latest")}
    backend = Backend(name="o", model="llama3", engine="ollama")
    stub = found_ready(backend, **answers, **{"POST_/v1/chat/completions": 200})
    assert stub.seen == ["GET /", "GET /v1/models", "POST /v1/chat/completions"]


@pytest.mark.parametrize(
    ("backend", "answers"),
    [
        (Backend("t", "exl", engine="tabbyapi"), {**HEALTHY, "GET_/v1/model": (200, {"id": "exl"})}),
        (Backend("p", "m"), {"GET_/v1/models": serving("m")}),  # a plain server needs no health route
        (Backend("images", "flux"), HEALTHY),  # and has perhaps no text routes
    ],
)
def test_an_engine_is_known_by_what_it_has(backend, answers):
    found_ready(backend, **answers)


def test_vllm_without_its_health_route_is_somebody_else():
    assert "answers 404" in why_not(VLLM, **{"GET_/v1/models": serving("qwen3")})


def test_every_engine_has_absolute_routes_and_a_port():
    for name, each in ENGINES.items():
        assert all(path.startswith("/") for path in (each.health, each.models, *each.control)), name
        assert 0 < each.port < 65536
        assert len(set(each.control)) == len(each.control), name


def test_the_port_is_the_backends_or_else_the_engines():
    assert listen_port(VLLM) == 8000
    assert listen_port(Backend(name="s", model="s", engine="sglang", port=8001)) == 8001


@pytest.mark.parametrize("listed", [(), ("other",)])
def test_a_llama_server_without_a_model_fails_at_once(listed):
    router = {"GET_/v1/models": serving(*listed), "GET_/props": (200, {"role": "router"})}
    why = why_not(llamacpp(), seconds=600.0, **HEALTHY, **router)
    assert "started without a model, as a router, and does not list tiny: name one" in why


def test_a_router_that_lists_the_model_is_ready():
    router = {"GET_/v1/models": serving("tiny"), "GET_/props": (200, {"role": "router"})}
    found_ready(llamacpp(), **HEALTHY, **router)


def test_a_child_of_a_router_that_sleeps_is_loaded():
    child = {"data": [{"id": "tiny", "status": {"value": "sleeping"}}]}
    with engine(**{"GET_/models": (200, child)}) as stub:
        assert engines.is_asleep(llamacpp(), stub.url) is False
        engines.wake(llamacpp(), stub.url, 1)
    assert "POST /models/load" not in stub.seen
