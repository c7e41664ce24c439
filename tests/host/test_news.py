"""News wait until they are fetched; of some only the last counts."""

import threading
from concurrent.futures import ThreadPoolExecutor

from anvil_mux.host.local import MOST_NEWS, NewsBoard
from anvil_mux.host.seam import GpusRead, GpuUse, HostNews, LoadStage, PhaseTook, ServiceEnded

GUARD = 20.0


def test_news_are_read_in_their_order_and_again_until_a_later_number_is_named():
    board = NewsBoard()
    first, second = PhaseTook("a", "load", 1.0), ServiceEnded("a", "exited with code 1", ("last words",), 7)
    board.put(first)
    board.put(second)
    assert board.read(0, GUARD) == board.read(0, GUARD) == [HostNews(1, first), HostNews(2, second)]
    assert board.read(1, GUARD) == [HostNews(2, second)]
    assert board.read(2, 0.0) == []


def test_of_the_use_of_gpus_and_the_progress_of_a_load_the_last_counts():
    board = NewsBoard()
    for used in (1, 2):
        board.put(GpusRead({"0": GpuUse(used)}))
        board.put(LoadStage("a", "reading weights", used / 10))
        board.put(LoadStage("b", "reading weights", used / 10))
    assert [each.what for each in board.read(0, GUARD)] == [
        GpusRead({"0": GpuUse(2)}),
        LoadStage("a", "reading weights", 0.2),
        LoadStage("b", "reading weights", 0.2),
    ]


def test_the_oldest_are_forgotten_where_nobody_reads():
    board = NewsBoard()
    for number in range(MOST_NEWS + 10):
        board.put(PhaseTook("a", "load", float(number)))
    assert [each.number for each in board.read(0, GUARD)] == list(range(11, MOST_NEWS + 11))


def test_whoever_waits_hears_at_once_and_waits_no_longer_when_it_is_closed():
    board, heard = NewsBoard(), threading.Event()

    def wait() -> list[list[HostNews]]:
        first = board.read(0, GUARD)
        heard.set()
        return [first, board.read(1, GUARD)]

    with ThreadPoolExecutor() as pool:
        read = pool.submit(wait)
        board.put(PhaseTook("a", "load", 1.0))
        assert heard.wait(GUARD)
        board.close()
        assert read.result(GUARD) == [[HostNews(1, PhaseTook("a", "load", 1.0))], []]
