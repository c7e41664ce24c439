"""What engines say of themselves."""

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import cast

import pytest

from anvil_mux.config.config import Backend
from anvil_mux.config.machines import Gpu
from anvil_mux.config.service import Service
from anvil_mux.host import hosts
from anvil_mux.multiplexer.multiplexer import Multiplexer
from anvil_mux.routing.in_flight import EngineLoad
from anvil_mux.scheduler.slot import Effects
from anvil_mux.serve import polling
from anvil_mux.serve.polling import NoAnswer, Scraper, ask, load_of, load_of_slots
from tests.fake_engine import GUARD, Asked, FakeEngine, Rig

VLLM = """# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a}b"} 3.0
vllm:num_requests_running{engine="1",model_name="a}b"} 1.0
vllm:num_requests_waiting{engine="0",model_name="a}b"} 2.0
vllm:kv_cache_usage_perc{engine="0",model_name="a}b"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="a}b"} 0.75
vllm:num_requests_waiting_by_reason{reason="capacity"} 9.0
"""
SGLANG = "sglang:num_running_reqs 4.0\nsglang:num_queue_reqs 5.0\nsglang:token_usage 0.5\n"
SLOTS = '[{"id": 0, "is_processing": true}, {"id": 1, "is_processing": false}, {"is_processing": true}]'
LLAMACPP = "llamacpp:requests_processing 1\nllamacpp:requests_deferred 7\n"


@pytest.mark.parametrize(
    ("text", "load"),
    [
        (VLLM, EngineLoad(4, 2, 0.5)),
        (VLLM.replace("kv_cache", "gpu_cache"), EngineLoad(4, 2, 0.5)),
        (SGLANG, EngineLoad(4, 5, 0.5)),
        (LLAMACPP, EngineLoad(1, 7)),
        (LLAMACPP.replace("7", "NaN"), None),
        (LLAMACPP.replace("7", "9" * 5000), None),
        (LLAMACPP.replace("7", "1e300"), None),
        ("up 1\n", None),
        ("", None),
    ],
)
def test_the_figures_of_a_page(text, load):
    assert load_of(text) == load


def page(text: str, status: bytes = b"200 OK") -> bytes:
    body = text.encode()
    return b"HTTP/1.1 %b\r\nContent-Length: %d\r\n\r\n%b" % (status, len(body), body)


@pytest.mark.parametrize(
    ("text", "load"),
    [
        (SLOTS, EngineLoad(2)),
        ("[]", EngineLoad(0)),
        ('{"error": 1}', None),
        ('[{"id": 0}]', None),
        ("<p>", None),
    ],
)
def test_the_figures_of_slots(text, load):
    assert load_of_slots(text) == load


def test_an_engine_that_answers_may_have_no_figures():
    engine = FakeEngine()
    try:
        for answer in (page(SGLANG, b"404 Not Found"), page("nothing")):
            engine.answer = lambda asked, answer=answer: answer
            assert ask(Backend("a", "m"), engine.address) is None
        engine.answer = lambda asked: page(SGLANG)
        assert ask(Backend("a", "m"), engine.address) == EngineLoad(4, 5, 0.5)
        engine.answer = lambda asked: b"HTTP/1.1 nonsense\r\n\r\n"
        with pytest.raises(NoAnswer):
            ask(Backend("a", "m"), engine.address)
    finally:
        engine.close()
    with pytest.raises(NoAnswer):
        ask(Backend("a", "m"), engine.address)


def test_an_engine_with_a_key_is_asked_with_it():
    engine = FakeEngine()
    service = Service(command=("llama-server", "--api-key", "sesame"))

    def answer(asked: Asked) -> bytes:
        return page(LLAMACPP) if b"Bearer sesame" in asked.head else page("", b"401 Unauthorized")

    try:
        engine.answer = answer
        assert ask(Backend("a", "m", engine="llamacpp", service=service), engine.address) == EngineLoad(1, 7)
        assert ask(Backend("a", "m", engine="llamacpp"), engine.address) is None
    finally:
        engine.close()


def test_a_llamacpp_without_metrics_says_by_its_slots_how_many_run():
    engine = FakeEngine()

    def answer(asked: Asked) -> bytes:
        return page(SLOTS) if b"/slots" in asked.head else page("", b"501 Not Implemented")

    try:
        engine.answer = answer
        assert ask(Backend("a", "m", engine="llamacpp"), engine.address) == EngineLoad(2)
        assert ask(Backend("a", "m", engine="vllm"), engine.address) is None
    finally:
        engine.close()


def test_what_others_send_to_an_engine_counts_when_it_says_so():
    """In the mode full; what the second replica says is that others keep it busy."""
    backends = (Backend("a", "m", ("0",)), Backend("b", "m", ("1",)), Backend("c", "other"))
    settings = {"routing": "num_requests", "routing_mode": "full"}
    rig = Rig(backends=backends, gpus=(Gpu("0"), Gpu("1")), **settings)
    try:
        rig.mux.facts.adopt({"a": rig.engine.url, "b": rig.other.url, "c": rig.other.url})
        rig.engine.answer = lambda asked: page(SGLANG)
        rig.other.answer = lambda asked: page(LLAMACPP.replace("7", "0"))
        told: dict[str, EngineLoad | None] = {}
        both = threading.Event()

        def tell(fact: Callable[..., Effects], backend: str, load: EngineLoad | None) -> None:
            rig.mux.tell(fact, backend, load)
            told[backend] = load
            if len(told) == 2:
                both.set()

        mux = SimpleNamespace(overview=rig.mux.overview, scheduler=rig.mux.scheduler, tell=tell)
        scraper = Scraper(cast(Multiplexer, mux))
        scraper.worker.start()
        assert both.wait(GUARD)
        scraper.worker.close()
        assert scraper.worker.join(GUARD)
        assert set(told) == {"a", "b"}  # c has no replicas to choose among
        with rig.mux.lease("m") as lease:
            assert lease.backend.name == "b"
            assert "num_requests 1;" in lease.why
    finally:
        rig.close()


def test_an_engine_that_does_not_answer_is_silent_and_one_without_figures_is_not():
    engine, gone = FakeEngine(), FakeEngine()
    engine.answer = lambda asked: page("nothing_of_requests 1\n")
    gone.close()
    told: list[tuple[object, ...]] = []

    def tell(fact: str, *about: object) -> None:
        told.append((fact, *about))

    try:
        replicas = [(Backend("a", "m"), engine.address), (Backend("b", "m"), gone.address)]
        mux = SimpleNamespace(
            overview=SimpleNamespace(resident_replicas=lambda: replicas),
            scheduler=SimpleNamespace(observed="observed", silent="silent"),
            tell=tell,
        )
        Scraper(cast(Multiplexer, mux)).scrape()
        assert told == [("observed", "a", None), ("silent", "b")]
    finally:
        engine.close()


@pytest.mark.parametrize("begin", [b"HTTP/1.1 200 OK\r\nX-Long: ", b"HTTP/1.0 200 OK\r\n\r\n"])
def test_answer_of_a_server_that_drips_is_bounded(monkeypatch, begin):
    ended = threading.Event()

    def drip():
        connection, _ = listener.accept()
        with connection, suppress(OSError):
            connection.sendall(begin)
            while not ended.wait(0.02):
                connection.sendall(b"x")

    monkeypatch.setattr(polling, "SCRAPE_TIMEOUT", 0.2)
    monkeypatch.setattr(hosts, "ASK_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()[:2]
        dripping = [threading.Thread(target=drip, daemon=True) for _ in range(2)]
        for each in dripping:
            each.start()
        with pytest.raises(NoAnswer):
            ask(Backend("a", "a", ("0",)), address)
        far = Backend("b", "b", url=f"http://127.0.0.1:{address[1]}/v1", engine="openai")
        assert hosts.look_at_server(far).problem.startswith("cannot be reached")
        ended.set()
        for each in dripping:
            each.join(GUARD)
