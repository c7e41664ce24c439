"""Who looks on sees everything in order, or is told how much it missed; nobody waits for it."""

import threading

import pytest

from anvil_mux.errors import Overloaded
from anvil_mux.scheduler.events import Event
from anvil_mux.telemetry.journal import EVENTS, REQUESTS, WATCHERS, Feed, FeedPosition
from tests.telemetry.test_metrics import record

GUARD = 20.0


def event(number: int) -> Event:
    return Event(float(number), "ready", "a", "a")


def test_news_are_what_came_after_a_place():
    feed = Feed()
    feed.tell(event(1))
    first = feed.news(FeedPosition())
    feed.tell(event(2))
    feed.ended(record(request_id="r"))
    second = feed.news(first.place)
    assert [e.at for e in first.events] == [1.0]
    assert ([e.at for e in second.events], [r.request_id for r in second.requests]) == ([2.0], ["r"])
    assert feed.news(second.place) == ([], [], 0, second.place)


def test_one_that_looks_seldom_is_told_how_many_events_it_missed():
    feed = Feed()
    place = feed.news(FeedPosition()).place
    for number in range(EVENTS + 7):
        feed.tell(event(number))
    news = feed.news(place)
    assert (news.missed, len(news.events), news.events[0].at) == (7, EVENTS, 7.0)
    assert feed.news(news.place).missed == 0


def test_only_the_last_requests_are_kept_and_only_those_for_a_model():
    feed = Feed()
    for number in range(REQUESTS + 1):
        feed.ended(record(request_id=str(number)))
        feed.ended(record(request_id="probe", model="", path="/healthz"))
        feed.ended(record(request_id="hand", model="a", path="/models/pin"))
    assert [r.request_id for r in feed.news(FeedPosition()).requests] == [
        str(n) for n in range(1, REQUESTS + 1)
    ]


def test_the_bell_wakes_those_who_wait():
    feed, came = Feed(), threading.Event()

    def look() -> None:
        assert feed.news(FeedPosition(), GUARD).events == [event(1)]
        came.set()

    thread = threading.Thread(target=look)
    thread.start()
    feed.tell(event(1))
    feed.ring()
    assert came.wait(GUARD)
    thread.join()


def test_its_end_wakes_those_who_wait_and_lets_nobody_wait_again():
    feed = Feed()
    waits = threading.Event()
    wait_for = feed._bell.wait_for
    feed._bell.wait_for = lambda *how: waits.set() or wait_for(*how)
    thread = threading.Thread(target=feed.news, args=(FeedPosition(), None), daemon=True)
    thread.start()
    assert waits.wait(GUARD)
    feed.close()
    thread.join(GUARD)
    assert not thread.is_alive()
    feed.pause(GUARD)
    assert feed.closed


def test_watchers_beyond_the_limit_are_refused_until_one_leaves():
    feed = Feed()
    watchers = [feed.watching() for _ in range(WATCHERS)]
    for watcher in watchers:
        watcher.__enter__()
    with pytest.raises(Overloaded), feed.watching():
        pass
    watchers[0].__exit__(None, None, None)
    with feed.watching():
        pass
