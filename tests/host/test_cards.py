"""Engines are asked for their model cards once after each load, and nothing depends on what they answer."""

from dataclasses import replace

import pytest

from anvil_mux.config.config import Backend
from anvil_mux.config.service import Service
from anvil_mux.errors import MuxError
from anvil_mux.host import engines
from anvil_mux.host.local import CardReader, LocalHost
from anvil_mux.host.seam import Awake, CardRead, HostConfig
from anvil_mux.protocol.cards import NOTHING_KNOWN, ModelCard
from tests.host.test_engines import engine
from tests.running import seen

LIST = {"data": [{"id": "m", "max_model_len": 4096}]}
PROPS = "/props?autoload=false&model=org%2Fm"
LENGTH = {"default_generation_settings": {"n_ctx": 512}}


def backend(kind: str, *words: str, **more: str) -> Backend:
    return replace(Backend("m", "m", engine=kind, service=Service(command=words, digest="d")), **more)


def test_each_engine_is_asked_what_it_answers_and_no_more():
    with engine(**{"GET_/v1/models": (200, LIST)}) as stub:
        assert engines.model_card(backend("vllm"), stub.url) == ModelCard(4096)
        assert stub.seen == ["GET /v1/models"]
    with engine(**{f"GET_{PROPS}": (200, LENGTH)}) as stub:
        assert engines.model_card(backend("llamacpp", served_model="org/m"), stub.url) == ModelCard(512)
        assert stub.seen == [f"GET {PROPS}"]
    show = {"model_info": {}, "capabilities": ["embedding"]}
    answers = {
        "GET_/api/ps": (200, {"models": [{"name": "m", "context_length": 2}]}),
        "POST_/api/show": (200, show),
    }
    with engine(**answers) as stub:
        card = engines.model_card(backend("ollama"), stub.url)
        assert (card.context, card.can("embeddings"), card.is_textual) == (2, True, False)
        assert stub.seen == ["GET /api/ps", "POST /api/show"]


@pytest.mark.parametrize(
    ("kind", "words", "able"),
    [
        ("vllm", ("--enable-auto-tool-choice", "--reasoning-parser=qwen3"), {"tools", "thinking"}),
        ("sglang", ("--tool-call-parser", "qwen25"), {"tools"}),
        ("llamacpp", ("-m", "/m/e.gguf", "--embeddings"), {"embeddings"}),
        ("llamacpp", ("-m", "/m/r.gguf", "--reranking"), {"reranking"}),
        ("openai", ("--embeddings",), set()),
    ],
)
def test_options_tell_what_answers_do_not(kind, words, able):
    with engine() as stub:
        assert engines.model_card(backend(kind, *words), stub.url) == ModelCard(
            None, dict.fromkeys(able, True)
        )


@pytest.mark.parametrize("answer", [500, (200, ["odd"]), (200, {"data": ["x" * (2 << 20)]})])
def test_an_engine_that_does_not_say_it_or_too_much_of_it_harms_nothing(answer):
    with engine(**{"GET_/v1/models": answer}) as stub:
        assert engines.model_card(backend("vllm"), stub.url) == NOTHING_KNOWN
    assert engines.model_card(backend("vllm"), stub.url) == NOTHING_KNOWN  # nobody is there


def test_one_that_says_nothing_is_no_news_and_the_next_is_asked_all_the_same():
    read_cards: list[CardRead] = []
    reader = CardReader(read_cards.append)
    reader.worker.start()
    with engine() as mute, engine(**{"GET_/v1/models": (200, LIST)}) as stub:
        reader.order(backend("vllm"), mute.url)
        reader.order(backend("vllm"), stub.url)
        seen(lambda: read_cards, bool)
    reader.worker.close()
    assert read_cards == [CardRead("m", "d", ModelCard(4096))]


def test_a_load_and_an_adoption_are_each_followed_by_one_reading(monkeypatch, tmp_path_factory):
    made = backend("vllm")
    environ = {"XDG_STATE_HOME": str(tmp_path_factory.mktemp("state"))}
    host = LocalHost(HostConfig((made,), runtime="process"), environ=environ)
    ordered: list[tuple[str, str]] = []
    monkeypatch.setattr(host._cards, "order", lambda each, url: ordered.append((each.name, url)))
    monkeypatch.setattr(host._adopter, "look", lambda each, url: Awake("http://a"))
    host.adopt(made)
    with pytest.raises(MuxError):
        host.load(made, "stop", 7)  # it has no command
    assert ordered == [("m", "http://a")]
    host.close()
