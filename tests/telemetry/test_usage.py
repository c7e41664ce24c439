"""What each API key has used: by key, model and hour, in memory, in files, in metrics."""

import json
import threading
import time
from typing import Any

import pytest

from anvil_mux.telemetry.accesslog import Served
from anvil_mux.telemetry.usage import KEPT_DAYS, Usage

HOUR, DAY = 3600.0, 86400.0
NOON = 20000 * DAY + 12 * HOUR
"""A day in 2024."""


class Wall:
    def __init__(self, now: float = NOON) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def served(key: str = "alice", at: float = NOON, **more: Any) -> Served:
    given = {"backend": "a", "status": 200, "prompt_tokens": 10, "tokens": 5, "seconds": 3.0, **more}
    return Served("id", "127.0.0.1", "POST", "/v1/chat/completions", ended=at, key=key, **given)


def row(key: str, model: str, **more: float) -> dict[str, Any]:
    figures = {
        "requests": 1,
        "failed": 0,
        "prompt_tokens": 10,
        "cached_tokens": 0,
        "tokens": 5,
        "seconds": 3.0,
        "gpu_seconds": 0.0,
    }
    return {"key": key, "model": model, **figures, **more}


def test_it_is_counted_by_key_and_model_those_with_most_gpu_time_first():
    usage = Usage(wall=Wall())
    usage.served("a", served(gpu_seconds=1.0))
    usage.served("a", served(gpu_seconds=1.5, waited=2.0, status=502, cached_tokens=4))
    usage.served("b", served(gpu_seconds=4.0))
    usage.served("a", served("bob"))
    usage.served("a", served("", gpu_seconds=0.5))
    assert usage.since(NOON - HOUR) == [
        row("alice", "b", gpu_seconds=4.0),
        row(
            "alice",
            "a",
            requests=2,
            failed=1,
            prompt_tokens=20,
            cached_tokens=4,
            tokens=10,
            seconds=4.0,
            gpu_seconds=2.5,
        ),
        row("none", "a", gpu_seconds=0.5),
        row("bob", "a"),
    ]


def test_an_answer_that_was_not_whole_has_failed():
    usage = Usage(wall=Wall())
    usage.served("a", served(status=200, code="severed"))
    assert usage.since(0.0) == [row("alice", "a", failed=1)]


def test_a_request_that_no_backend_served_used_nothing():
    usage = Usage(wall=Wall())
    usage.served("a", served(backend="", status=503))
    assert usage.since(0.0) == []


def test_it_is_asked_to_the_hour_over_days_and_restarts(tmp_path):
    wall = Wall()
    usage = Usage(tmp_path / "usage", print, wall)
    usage.served("a", served())
    wall.now += DAY
    usage.served("a", served(at=wall.now - HOUR))
    usage.served("a", served(at=wall.now))
    usage.save(at_once=True)
    assert sorted(file.name for file in (tmp_path / "usage").iterdir()) == ["2024-10-04", "2024-10-05"]
    for again in (usage, Usage(tmp_path / "usage", print, wall)):
        asked = [(wall.now, 1), (wall.now - HOUR, 2), (wall.now - DAY, 3), (wall.now - DAY + HOUR, 2)]
        assert [again.since(since)[0]["requests"] for since, _ in asked] == [count for _, count in asked]
    again.served("a", served(at=wall.now))
    again.save(at_once=True)
    assert Usage(tmp_path / "usage", print, wall).since(0.0)[0]["requests"] == 4


def test_a_record_that_comes_after_midnight_is_counted_on_its_day(tmp_path):
    wall = Wall()
    usage = Usage(tmp_path / "usage", print, wall)
    usage.served("a", served())
    usage.save(at_once=True)
    wall.now += DAY
    usage.served("a", served(at=wall.now))
    usage.save(at_once=True)
    usage.served("a", served(at=NOON))
    usage.save(at_once=True)
    assert usage.since(0.0)[0]["requests"] == 3


def test_it_is_written_when_it_has_changed_and_not_all_the_time(tmp_path):
    wall, file = Wall(), tmp_path / "usage" / "2024-10-04"
    usage = Usage(tmp_path / "usage", print, wall)
    usage.save()
    assert not file.exists()
    usage.served("a", served())
    usage.save()
    before = file.read_text()
    usage.served("a", served())
    usage.save()
    assert file.read_text() == before
    wall.now += 11
    usage.save()
    assert json.loads(file.read_text())["rows"][0][3] == 2
    assert file.stat().st_mode & 0o077 == 0


def test_oldest_days_are_deleted_once_too_many_are_kept(tmp_path):
    wall = Wall()
    for day in range(KEPT_DAYS + 1):
        (tmp_path / time.strftime("%Y-%m-%d", time.gmtime(wall.now - (day + 1) * DAY))).touch()
    usage = Usage(tmp_path, print, wall)
    usage.served("a", served())
    usage.save(at_once=True)
    kept = sorted(file.name for file in tmp_path.iterdir())
    assert len(kept) == KEPT_DAYS
    assert kept[-1] == time.strftime("%Y-%m-%d", time.gmtime(wall.now))


def test_clock_that_jumps_by_years_deletes_no_day(tmp_path):
    wall = Wall()
    usage = Usage(tmp_path, print, wall)
    usage.served("a", served())
    usage.save(at_once=True)
    before = {file.name for file in tmp_path.iterdir()}
    wall.now += 3 * KEPT_DAYS * DAY
    usage.served("a", served(at=wall.now))
    usage.save(at_once=True)
    assert before < {file.name for file in tmp_path.iterdir()}


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"rows": [[1]]}',
        '{"rows": 3}',
        "\x00",
        '{"rows": [[1, 2, 3]]}',
        '{"rows": ' + "[" * 100_000,
    ],
)
def test_a_file_that_cannot_be_read_is_told_once_and_counted_anew(tmp_path, text):
    said: list[str] = []
    (tmp_path / "2024-10-04").write_text(text)
    usage = Usage(tmp_path, said.append, Wall())
    usage.served("a", served())
    assert usage.since(0.0) == [row("alice", "a")]
    assert len(said) == 1
    assert "so the usage of that day is counted from zero" in said[0]


def test_a_folder_that_cannot_be_written_is_told_and_counting_goes_on(tmp_path):
    said: list[str] = []
    usage = Usage(tmp_path / "no" / "usage", said.append, Wall())
    usage.served("a", served())
    usage.save()
    assert "cannot be written, so usage is lost" in said[0]
    assert usage.since(0.0) == [row("alice", "a")]


def test_what_was_used_since_the_start_is_told_by_key_and_model():
    usage = Usage(wall=Wall())
    usage.served("a", served(gpu_seconds=1.5, cached_tokens=4, status=502))
    usage.served("a", served(gpu_seconds=0.25))
    usage.served("b", served("bob"))
    told = usage.since_start()
    assert told.keys() == {("alice", "a"), ("bob", "b")}
    assert told["alice", "a"] == {
        "requests": 2,
        "failed": 1,
        "prompt_tokens": 20,
        "cached_tokens": 4,
        "tokens": 10,
        "seconds": 6.0,
        "gpu_seconds": 1.75,
    }


def test_the_start_is_that_of_the_program_and_nothing_is_forgotten_when_a_day_ends(tmp_path):
    def requests(usage: Usage) -> list[float]:
        return [used["requests"] for used in usage.since_start().values()]

    wall = Wall()
    usage = Usage(tmp_path / "usage", print, wall)
    usage.served("a", served())
    usage.save(at_once=True)
    again = Usage(tmp_path / "usage", print, wall)
    assert requests(again) == []
    again.served("a", served())
    assert requests(again) == [1]
    wall.now += DAY
    again.served("a", served(at=wall.now))
    again.save(at_once=True)
    assert requests(again) == [2]
    assert again.since(0.0)[0]["requests"] == 3


@pytest.mark.parametrize("step", ["_read", "_write"])
def test_who_asks_while_rows_come_into_memory_or_leave_it_counts_them_once(tmp_path, step):
    earlier = Usage(tmp_path, wall=Wall())
    earlier.served("a", served())
    earlier.save(at_once=True)
    wall = Wall()
    usage = Usage(tmp_path, wall=wall)
    asked: list[float] = []

    def ask() -> None:
        asked.extend(used["requests"] for used in usage.since_start().values())

    real, thread = getattr(usage, step), threading.Thread(target=ask)

    def stepping(*given: Any) -> Any:
        thread.start()
        thread.join(0.1)  # it either has counted by now, or waits
        return real(*given)

    setattr(usage, step, stepping)
    usage.served("a", served())
    wall.now += DAY
    usage.save(at_once=True)
    thread.join()
    assert asked == [1.0]
    assert [used["requests"] for used in usage.since_start().values()] == [1.0]
