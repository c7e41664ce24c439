"""Profiles are what their descriptions say, clients wait for their answers, and files say what is wrong."""

import gzip
import json
import lzma
import sys
from itertools import pairwise
from math import log
from statistics import median, pstdev

import pytest

from anvil_mux.config.config import Backend, Config
from anvil_mux.lab import workload
from anvil_mux.lab.simulate import Arrival
from anvil_mux.lab.workload import (
    PROFILES,
    SEEDED,
    BadWorkload,
    ClientGroups,
    Rounds,
    Sessions,
    read_clients,
)

# Profiles


def asked(requests):
    return [(request.at, request.model) for request in requests]


def rounds(made):
    """The rounds of a workload whose every round takes ten seconds, each counted from its own beginning."""
    follow, now, sent = made.follow(), 0.0, made.requests
    while sent:
        yield [(pytest.approx(request.at - now), request.model) for request in sent]
        now += 10.0
        [*early, last] = sent
        assert [list(follow(request, now)) for request in early] == [[]] * len(early)
        sent = list(follow(last, now))


@pytest.mark.parametrize("name", sorted(PROFILES.keys() - {"clients"}))
def test_every_profile_has_the_same_two_models(name):
    made = PROFILES[name](0)
    assert made.name == name
    assert made.load_seconds == {"a": 3.0, "b": 9.0}
    assert (made.resident, made.stop_seconds) == (("a",), 0.0)
    assert [(backend.model, backend.gpus, backend.vram) for backend in made.config().backends] == [
        ("a", ("0",), None),
        ("b", ("0",), None),
    ]


@pytest.mark.parametrize("name", sorted(PROFILES.keys() - SEEDED))
def test_a_request_takes_half_a_second_and_no_seed_matters(name):
    made = PROFILES[name](0)
    assert {request.seconds for request in made.requests} == {0.5}
    assert made.requests == PROFILES[name](1).requests


def test_single_asks_for_the_resident_model_only():
    assert asked(workload.single().requests) == [(0.0, "a")] * 40


def test_balanced_has_20_rounds_of_a_and_soon_after_b():
    assert [*rounds(workload.balanced())] == [[(0.0, "a"), (0.1, "b")]] * 20


def test_bursty_has_four_bursts_of_ten():
    assert [*rounds(workload.bursty())] == [[(0.0, model)] * 10 for model in "abab"]


def test_dominant_asks_every_fifth_time_for_b():
    requests = workload.dominant().requests
    assert [request.at for request in requests] == pytest.approx([n * 0.05 for n in range(50)])
    assert "".join(request.model for request in requests) == "aaaab" * 10


def test_interleave_asks_60_times_at_once_in_turns():
    assert asked(workload.interleave().requests) == [(0.0, "a"), (0.0, "b")] * 30


def test_mixed_is_poisson_arrivals_with_lognormal_service():
    halves = [PROFILES["mixed"](seed).requests for seed in range(10)]
    every = [request for requests in halves for request in requests]
    rates = {model: sum(r.model == model for r in every) / 18_000 for model in "ab"}
    assert rates == {"a": pytest.approx(0.3, rel=0.05), "b": pytest.approx(0.1, rel=0.05)}
    assert median(request.seconds for request in every) == pytest.approx(6.0, rel=0.05)
    assert pstdev(log(request.seconds) for request in every) == pytest.approx(0.8, rel=0.05)
    gaps = [after.at - before.at for requests in halves for before, after in pairwise(requests)]
    assert pstdev(gaps) == pytest.approx(1 / 0.4, rel=0.05)  # as large as the mean: no memory
    assert all(gap >= 0 for gap in gaps)
    assert len({request.seconds for request in every}) == len(every)  # both models are drawn anew
    assert max(request.at for request in every) < 1800.0


def test_mixed_is_the_same_for_the_same_seed_only():
    assert PROFILES["mixed"](3) == PROFILES["mixed"](3)
    assert len({PROFILES["mixed"](seed).requests for seed in range(10)}) == 10


def test_clients_ask_again_when_they_have_thought_until_the_end():
    made = ClientGroups((2, 1), 3.0, 0.5, answer_seconds=10.0, think_seconds=2.0, seconds=100.0).workload()
    assert made.clients == ("a1", "a2", "b1")
    assert [(each.at, each.model, each.sender) for each in made.requests] == [
        (0.0, "a", "a1"),
        (0.0, "a", "a2"),
        (0.0, "b", "b1"),
    ]
    assert (made.load_seconds, made.stop_seconds) == ({"a": 3.0, "b": 3.0}, 0.5)
    follow = made.follow()
    [again] = follow(made.requests[0], 50.0)
    assert (again.at, again.model, again.sender) == (52.0, "a", "a1")
    assert [*follow(again, 97.9)] != [] == [*follow(again, 98.0)]


def test_the_answers_of_clients_are_drawn_whatever_others_do():
    made = ClientGroups((1, 1), answer_seconds=10.0, seconds=1e9)

    def lengths(seed, senders):
        workload = made.workload(seed)
        follow, last = workload.follow(), dict(zip("ab", workload.requests, strict=True))
        for sender in senders:
            [last[sender]] = follow(last[sender], 0.0)
            yield last["a"].seconds

    [*drawn] = lengths(0, "a" * 1000)
    assert [*lengths(0, "abb" * 1000)][::3] == drawn
    assert [*lengths(1, "a" * 1000)] != drawn
    assert 7.0 <= min(drawn) < 7.1 < 12.9 < max(drawn) <= 13.0
    assert len({*drawn}) == 1000


@pytest.mark.parametrize(
    "text", ["", "4+", "0+1", "a", "4+-1", "1e3", "600+600", "+".join("1" * 27), "9" * 4500]
)
def test_what_is_no_number_of_clients_for_each_model_is_an_error(text):
    with pytest.raises(ValueError, match=r"must be how many clients each model has, as 4\+4"):
        read_clients(text)
    assert read_clients("8+1") == (8, 1)


# Clients that wait


def test_a_round_begins_when_the_one_before_has_ended():
    follow = Rounds([[Arrival(0.0, "a", 1.0)] * 2, [Arrival(0.0, "b", 1.0), Arrival(0.5, "a", 1.0)]])
    assert list(follow(Arrival(0.0, "a", 1.0), 4.0)) == []
    assert asked(follow(Arrival(0.0, "a", 1.0), 7.0)) == [(7.0, "b"), (7.5, "a")]
    assert list(follow(Arrival(7.0, "b", 1.0), 9.0)) == []
    assert list(follow(Arrival(7.5, "a", 1.0), 9.0)) == []


def test_a_session_goes_on_some_time_after_each_answer():
    follow = Sessions({"s": [Arrival(2.0, "a", 1.0, sender="s"), Arrival(5.0, "b", 1.0, sender="s")]})
    [second] = follow(Arrival(0.0, "a", 1.0, sender="s"), 10.0)
    assert (second.at, second.model) == (12.0, "a")
    assert list(follow(Arrival(0.0, "a", 1.0), 11.0)) == []
    assert list(follow(Arrival(0.0, "a", 1.0, sender="t"), 11.0)) == []
    assert asked(follow(second, 20.0)) == [(25.0, "b")]
    assert list(follow(Arrival(25.0, "b", 1.0, sender="s"), 30.0)) == []


def test_two_clients_ask_again_in_the_moment_of_their_answers_for_ten_minutes():
    made = workload.two_clients()
    follow = made.follow()
    assert asked(made.requests) == [(0.0, "a"), (0.0, "b")]
    [again] = follow(made.requests[1], 9.5)
    assert (again.at, again.model, again.seconds) == (9.5, "b", 0.5)
    assert list(follow(again, 600.0)) == []


# What it meets


def test_what_loading_costs_holds_for_each_replica_and_one_of_them_is_resident():
    config = Config(backends=(Backend("r0", "a", ("0",)), Backend("r1", "a", ("1",)), Backend("c", "c")))
    made = workload.single()
    assert made.engines(config).load_seconds == {"r0": 3.0, "r1": 3.0}
    assert made.residents(config) == ["r0"]


# Files

HEADER = {
    "workload": "two",
    "models": {"big": {"load_seconds": 30}, "small": {"load_seconds": 4.5}},
    "resident": ["small"],
    "stop_seconds": 1.5,
}
LINES = [
    HEADER,
    {"session": "s", "at": 3, "model": "big", "seconds": 4},
    {"at": 1.5, "model": "small", "seconds": 0},
    {"session": "s", "think": 2.5, "model": "small", "seconds": 6},
    {"session": 7, "at": 2, "model": "big", "seconds": 1},
    {"session": "s", "think": 0, "model": "big", "seconds": 7},
]


PACKED = {".gz": gzip.compress, ".xz": lzma.compress}


def written(path, lines):
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    path.write_bytes(PACKED.get(path.suffix, bytes)(text.encode()))
    return path


@pytest.mark.parametrize("name", ["w.jsonl", "w.jsonl.gz", "w.jsonl.xz"])
def test_a_file_holds_requests_that_come_anyway_and_sessions(tmp_path, name):
    made = workload.read(written(tmp_path / name, [*LINES, ""]))
    assert (made.name, made.resident, made.stop_seconds) == ("two", ("small",), 1.5)
    assert made.load_seconds == {"big": 30.0, "small": 4.5}
    assert made.requests == (
        Arrival(1.5, "small", 0.0),
        Arrival(2.0, "big", 1.0, sender=7),
        Arrival(3.0, "big", 4.0, sender="s"),
    )
    follow = made.follow()
    assert follow(made.requests[0], 2.0) == ()
    assert follow(made.requests[1], 2.0) == ()
    assert follow(made.requests[2], 40.0) == (Arrival(42.5, "small", 6.0, sender="s"),)
    assert follow(Arrival(42.5, "small", 6.0, sender="s"), 50.0) == (Arrival(50.0, "big", 7.0, sender="s"),)
    assert made.follow()(made.requests[2], 0.0) != ()  # each run has its own


def test_a_file_without_sessions_has_nothing_to_follow(tmp_path):
    made = workload.read(written(tmp_path / "w", [HEADER, {"at": 0, "model": "big", "seconds": 1}]))
    assert made.follow is None


FIRST = {"session": "s", "at": 3, "model": "big", "seconds": 4}


@pytest.mark.parametrize(
    ("lines", "number", "problem"),
    [
        ([], 1, "is empty"),
        ([HEADER], 1, "holds no request"),
        (["workload"], 1, "must be one JSON object"),
        ([HEADER, "[1]"], 2, "must be one JSON object"),
        ([{"at": 1}], 1, "must be the header"),
        ([{**HEADER, "models": {}}], 1, "must be the header"),
        ([{**HEADER, "models": {"m": 3}}], 1, "models: m: must be as"),
        ([{**HEADER, "models": {"m": {}}}], 1, "load_seconds must be seconds"),
        ([{**HEADER, "resident": "small"}], 1, "resident: must be a list of big, small"),
        ([{**HEADER, "resident": ["tiny"]}], 1, "resident: must be a list of big, small"),
        ([{**HEADER, "stop_seconds": -1}], 1, "stop_seconds must be seconds"),
        ([HEADER, {"at": 1, "model": "tiny", "seconds": 1}], 2, 'unknown model "tiny"'),
        ([HEADER, {"at": 1, "model": ["big"], "seconds": 1}], 2, "the header has big, small"),
        ([HEADER, {"at": 1, "model": "big"}], 2, "seconds must be seconds"),
        ([HEADER, {"at": True, "model": "big", "seconds": 1}], 2, "at must be seconds"),
        ([HEADER, '{"at": NaN, "model": "big", "seconds": 1}'], 2, "at must be seconds"),
        ([HEADER, '{"at": 1, "model": "big", "seconds": Infinity}'], 2, "seconds must be seconds"),
        ([HEADER, {**FIRST, "session": {}}], 2, "session must be text or a number"),
        ([HEADER, {"session": "s", "think": 1, "model": "big", "seconds": 1}], 2, "at must be seconds"),
        ([HEADER, FIRST, FIRST], 3, "think must be seconds"),
    ],
)
def test_what_is_wrong_is_told_with_its_line(tmp_path, lines, number, problem):
    file = written(tmp_path / "w.jsonl", lines)
    with pytest.raises(BadWorkload) as told:
        workload.read(file)
    assert told.value.message.startswith(f"{file}:{number}: ")
    assert problem in told.value.message


def test_a_file_that_cannot_be_read_is_told(tmp_path):
    whole = json.dumps(HEADER).encode()
    cut, cut_xz, bad_xz = tmp_path / "cut.gz", tmp_path / "cut.xz", tmp_path / "bad.xz"
    cut.write_bytes(gzip.compress(whole)[:-9])
    cut_xz.write_bytes(lzma.compress(whole)[:-9])
    bad_xz.write_bytes(lzma.compress(whole)[:6] + bytes(40))
    for file in (tmp_path, cut, cut_xz, bad_xz):
        with pytest.raises(BadWorkload, match="cannot be read"):
            workload.read(file)


def test_a_python_without_xz_says_so(tmp_path, monkeypatch):
    file = written(tmp_path / "w.xz", LINES)
    monkeypatch.setitem(sys.modules, "lzma", None)
    with pytest.raises(BadWorkload, match="is compressed with xz, and this Python was built without liblzma"):
        workload.read(file)


def test_a_shipped_workload_is_found_by_its_name(tmp_path, monkeypatch):
    monkeypatch.setattr(workload, "SHIPPED", tmp_path)
    monkeypatch.chdir(tmp_path)
    shipped = written(tmp_path / "some.jsonl.xz", LINES)
    assert workload.find("some") == shipped
    assert workload.find("some.jsonl.xz").resolve() == shipped
    with pytest.raises(BadWorkload, match="other: no such file; shipped workloads: some"):
        workload.find("other")


def test_a_file_of_the_user_comes_before_a_shipped_one_of_the_same_name(tmp_path, monkeypatch):
    monkeypatch.setattr(workload, "SHIPPED", tmp_path)
    written(tmp_path / "some.jsonl.xz", LINES)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    own = written(tmp_path / "here" / "some", LINES)
    assert workload.find("some").resolve() == own
