"""The news of a host reach whom they concern."""

from collections.abc import Callable
from typing import Any, cast

from anvil_mux.config.config import Backend, Config
from anvil_mux.host.seam import (
    CardRead,
    GpusRead,
    GpuUse,
    HostNews,
    LoadStage,
    OtherProcess,
    PhaseTook,
    PromptsKept,
    ServiceEnded,
    ServicePaused,
    ServiceStarted,
    WeightsRead,
)
from anvil_mux.protocol.cards import ModelCard
from anvil_mux.scheduler.status import KeptPrompts
from anvil_mux.scheduler.waits import Progress
from anvil_mux.serve.watches import NewsReader

A = Backend("a", "model-a")
CARD = CardRead("a", "d", ModelCard(4096, {"tools": True}))


class Listener:
    """Host and multiplexer in one; notes what it is told."""

    def __init__(self, *news: object, yield_above: int | None = None) -> None:
        self.board = [HostNews(number, cast(Any, what)) for number, what in enumerate(news, 1)]
        self.told: list[object] = []
        self.config = Config((A,), yield_above=yield_above)
        self.overview = self.facts = self.scheduler = self

    def news(self, after: int, timeout: float) -> list[HostNews]:
        return [each for each in self.board if each.number > after]

    def watch_gpus(self) -> None:
        self.told.append("watched")

    def backend(self, name: str) -> Backend | None:
        return A if name == "a" else None

    def tell(self, fact: Callable[..., object], *about: object, **more: object) -> None:
        fact(*about, **more)

    def __getattr__(self, name: str) -> Any:
        return lambda *given, **named: self.told.append((name, *given, named))

    def reader(self, host: str = "", took: Any = None) -> NewsReader:
        return NewsReader(
            host, cast(Any, self), cast(Any, self), took or self.took, self.read_ahead, started=self.started
        )


def handed_on(*news: object) -> tuple[NewsReader, list[object]]:
    listener = Listener(*news)
    reader = listener.reader()
    for _ in range(2):
        assert reader.read() == 0.0
    return reader, listener.told


def test_each_kind_of_news_is_told_once():
    _, told = handed_on(
        ServiceEnded("a", "exited with code 1", ("last words",), 7),
        LoadStage("a", "reading weights", 0.5, 3.0),
        PhaseTook("a", "load", 2.0),
        PhaseTook("gone", "load", 2.0),
        PhaseTook("a", "of a kind that is not known", 2.0),
        PromptsKept("a", 2, 900, 4096),
        WeightsRead("a", 4096, 0.5),
        WeightsRead("gone", 4096, 0.5),
        ServiceStarted("a"),
        ServicePaused("a", "p-a-1"),
        CARD,
        CardRead("gone", "d", ModelCard(4096)),
    )
    assert told == [
        ("died", "a", "exited with code 1", ("last words",), {"load": 7}),
        ("report", "a", Progress("reading weights", 0.5, 3.0), {}),
        ("took", A, "load", 2.0, {}),
        ("note_prompts", "a", KeptPrompts(2, 900, 4096), {}),
        ("read_ahead", A, 4096, 0.5, {}),
        ("started", A, {}),
        ("service_paused", "a", "p-a-1", {}),
        ("note_card", CARD, {}),
    ]


def test_a_host_has_no_news_of_the_backends_of_others():
    listener = Listener(ServiceEnded("a", "ended"), LoadStage("a", "x"), PromptsKept("a", 1, 1, 1))
    listener.reader("h").read()
    assert listener.told == []


def test_what_other_processes_hold_is_told_and_what_was_seen_is_kept():
    other = OtherProcess("0", 1, 3 << 30)
    gpu_uses = {"0": GpuUse(4 << 30, 24 << 30, {"a": 1 << 30}, (other,)), "1": GpuUse(0, 24 << 30)}
    reader, told = handed_on(GpusRead(gpu_uses))
    assert told == [("memory_seen", {"0": 3 << 30}, {"host": ""})]
    assert reader.gpu_uses() == gpu_uses
    assert told[1:] == ["watched"]


def test_where_a_gpu_is_left_to_others_it_is_looked_at_more_often():
    listener = Listener(GpusRead({"0": GpuUse(0, 24 << 30)}), yield_above=1)
    listener.reader().read()
    assert listener.told == [("memory_seen", {}, {"host": ""}), "watched"]


def test_a_mistake_of_who_is_told_loses_only_that_news():
    listener = Listener(PhaseTook("a", "load", 2.0), PhaseTook("a", "ready", 1.0))
    took: list[str] = []

    def mistake(backend: Backend, phase: str, seconds: float) -> None:
        took.append(phase)
        assert phase != "load"

    reader = listener.reader(took=mistake)
    try:
        reader.read()
    except AssertionError:
        reader.read()
    assert took == ["load", "ready"]
