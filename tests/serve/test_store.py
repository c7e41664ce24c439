"""The contract of the stores by which several anvil-mux know of each other, and what they make of it."""

import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import yaml

from anvil_mux.config.config import Backend
from anvil_mux.config.machines import Gpu
from anvil_mux.multiplexer.multiplexer import Multiplexer
from anvil_mux.routing.in_flight import EngineLoad, InFlightTracker, Report
from anvil_mux.routing.pipeline import build
from anvil_mux.routing.routing import Work
from anvil_mux.serve import polling
from anvil_mux.serve.polling import RedisStore, Sharing, StoreError
from tests.fake_engine import GUARD, Rig
from tests.running import seen, serving

PROGRAM = shutil.which("redis-server")
BUSY = Report(3, 2, 4000, 100, 4100, EngineLoad(5, 1, 0.5), 1.0)
IDLE = Report()
NO_METRICS = Report(load=EngineLoad(2), age_seconds=1.0)
WORK = Work(tokens=1000)


class Server:
    """A real redis-server on a socket in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self.url = f"unix://{folder}/redis.sock"
        assert PROGRAM
        command = [PROGRAM, "--port", "0", "--unixsocket", f"{folder}/redis.sock", "--save", ""]
        self.process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout
        for line in self.process.stdout:
            if "ready to accept connections" in line.lower():
                return
        raise AssertionError("redis-server did not start")

    def stop(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=GUARD)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    if PROGRAM is None:
        pytest.skip("there is no program `redis-server`")
    running = Server(tmp_path_factory.mktemp("redis"))
    yield running
    running.stop()


class LocalStore:
    """Within this process. Any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._published: dict[str, tuple[float, polling.Reports]] = {}

    def publish(self, owner: str, reports: polling.Reports) -> None:
        with self._lock:
            self._published[owner] = self._clock(), reports

    def others(self, owner: str) -> list[polling.Reports]:
        now = self._clock()
        with self._lock:
            found = {o: (now - at, reports) for o, (at, reports) in self._published.items() if o != owner}
        kept = [(age, reports) for age, reports in found.values() if age < polling.EXPIRES_SECONDS]
        return [polling._older(reports, age) for age, reports in kept]

    def close(self) -> None:
        pass


Store = LocalStore | RedisStore
Forget = Callable[[str], None]


@pytest.fixture(params=["local", "redis"])
def shared(request: pytest.FixtureRequest) -> Iterator[tuple[Store, Forget]]:
    """A store, and what lets the time pass in which an owner says nothing."""
    if request.param == "local":
        now = [0.0]

        def pass_time(owner: str) -> None:
            now[0] += polling.EXPIRES_SECONDS

        yield LocalStore(lambda: now[0]), pass_time
        return
    server: Server = request.getfixturevalue("server")
    made = RedisStore(server.url, request.node.name)
    yield made, lambda owner: made._redis.pexpire(made._key(owner), 0)
    made.close()


def young(found: list[polling.Reports]) -> list[polling.Reports]:
    """The same, without how long they were in the store: less than a hang takes."""
    for reports in found:
        for name, report in reports.items():
            assert 0 <= report.age_seconds < 1.0 + polling.EXPIRES_SECONDS
            reports[name] = report._replace(age_seconds=1.0 if report.load else 0.0)
    return found


# The contract


def test_an_owner_sees_what_others_published_and_not_its_own(shared):
    kept, _ = shared
    kept.publish("one", {"a": BUSY, "b": IDLE, "c": NO_METRICS})
    assert kept.others("one") == []
    assert young(kept.others("two")) == [{"a": BUSY, "b": IDLE, "c": NO_METRICS}]


def test_what_is_published_takes_the_place_of_what_was(shared):
    kept, _ = shared
    kept.publish("one", {"a": BUSY})
    kept.publish("one", {"b": IDLE})
    assert young(kept.others("two")) == [{"b": IDLE}]


def test_each_of_the_others_is_seen(shared):
    kept, _ = shared
    for owner in ("one", "two", "three"):
        kept.publish(owner, {"a": BUSY})
    assert young(kept.others("three")) == [{"a": BUSY}, {"a": BUSY}]


def test_who_says_nothing_any_more_is_forgotten_until_it_speaks_again(shared):
    kept, forget = shared
    kept.publish("one", {"a": BUSY})
    forget("one")
    assert kept.others("two") == []
    kept.publish("one", {"a": BUSY})
    assert young(kept.others("two")) == [{"a": BUSY}]


# Redis


def test_a_report_is_as_old_as_it_was_when_published_and_the_time_since(server):
    kept = RedisStore(server.url, "aged")
    kept.publish("one", {"a": BUSY})
    kept._redis.pexpire(kept._key("one"), round((polling.EXPIRES_SECONDS - 2.0) * 1000))
    assert kept.others("two")[0]["a"].age_seconds >= BUSY.age_seconds + 2.0
    kept.close()


def test_projects_do_not_see_each_other(server):
    one, other = RedisStore(server.url, "one"), RedisStore(server.url, "other")
    one.publish("x", {"a": BUSY})
    assert other.others("y") == []
    assert young(one.others("y")) == [{"a": BUSY}]
    one.close()
    other.close()


def test_a_running_anvil_mux_publishes_what_its_replicas_have(server, tmp_path):
    file = tmp_path / "compose.yaml"
    service = {"command": ["none"], "x-anvil": {"model": "m", "gpus": []}}
    top = {"runtime": "process", "routing": {"store": server.url}}
    written = {"name": "real", "x-anvil": top, "services": {"a": service, "b": service}}
    file.write_text(yaml.safe_dump(written))
    kept = RedisStore(server.url, "real")
    with serving(file, state=tmp_path):
        found = seen(lambda: kept.others("test"), bool)
    assert [
        {name: each._replace(age_seconds=0.0) for name, each in reports.items()} for reports in found
    ] == [{"a": IDLE, "b": IDLE}]
    kept.close()


@pytest.mark.parametrize("text", ["", "7", "{}", '{"a": 7}', '{"a": [1]}', '{"a": [1,2,3,4,5,"x",0]}'])
def test_what_somebody_else_wrote_is_no_report(server, text):
    kept = RedisStore(server.url, "other")
    kept.publish("one", {"a": BUSY})
    kept._redis.set(kept._key("one"), text, px=60_000)
    assert not any(kept.others("two"))
    kept.close()


def test_a_redis_that_does_not_answer_is_told_once_and_nothing_is_heard(tmp_path):
    pytest.importorskip("redis")
    said: list[str] = []
    heard: list[object] = []
    mux = SimpleNamespace(
        overview=SimpleNamespace(reports=lambda: {"a": BUSY}), facts=SimpleNamespace(hear=heard.append)
    )
    sharing = Sharing(RedisStore(f"unix://{tmp_path}/none", "p"), cast(Multiplexer, mux), said.append)
    sharing.once()
    sharing.once()
    assert len(said) == 1
    assert said[0].startswith("the routing store does not answer")
    assert heard == [{}, {}]


def test_without_its_package_a_redis_cannot_be_used(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "redis", None)
    with pytest.raises(StoreError, match=r"pip install 'anvil-mux\[redis\]'"):
        RedisStore("redis://127.0.0.1", "p")


# What is made of it


def in_flight(*, full: bool = False) -> InFlightTracker:
    return InFlightTracker(build("least_prefill_work"), [Backend("a", "m"), Backend("b", "m")], full=full)


def test_what_others_have_counts_like_our_own_until_they_are_gone():
    ours = in_flight()
    theirs = in_flight()
    theirs.choose("x", Work(tokens=4000), ["a"])
    ours.hear({"a": [theirs.reports(0.0)["a"], Report(1, 0, 0, 500, 500)]}, 0.0)
    seen = ours.view(WORK, ["a"])[0]
    assert (seen.num_requests, seen.num_waiting_requests, seen.decode_batch) == (2, 1, 1)
    assert (seen.prefill_tokens, seen.decode_tokens, seen.num_tokens) == (4000, 500, 4500)
    assert (choice := ours.choose("y", WORK, ["a", "b"]))
    assert choice.backend == "b"
    ours.hear({}, 1.0)
    assert ours.view(WORK, ["a"]) == [ours.view(WORK, ["a"])[0]._replace(num_requests=0, prefill_tokens=0)]


def test_what_others_have_is_not_told_as_our_own():
    ours = in_flight()
    ours.hear({"a": [BUSY]}, 0.0)
    told = ours.reports(0.0)["a"]
    assert told[:5] == (0, 0, 0, 0, 0)


def test_the_latest_word_of_an_engine_counts_whoever_heard_it():
    ours = in_flight(full=True)
    ours.observe("a", EngineLoad(1, 0), 10.0)
    ours.hear({"a": [Report(load=EngineLoad(9, 9), age_seconds=3.0)]}, 12.0)
    assert ours.view(WORK, ["a"], now=12.0)[0].num_requests == 1
    ours.hear({"a": [Report(load=EngineLoad(7, 0), age_seconds=0.5)]}, 12.0)
    assert ours.view(WORK, ["a"], now=12.0)[0].num_requests == 7


def test_two_multiplexers_that_share_engines_do_not_send_both_their_requests_to_one():
    kept = cast(RedisStore, LocalStore())
    backends = (Backend("a", "m", ("0",)), Backend("b", "m", ("1",)))
    rigs = [Rig(backends=backends, gpus=(Gpu("0"), Gpu("1"))) for _ in range(2)]
    try:
        one, other = (rig.mux for rig in rigs)
        for mux in (one, other):
            mux.facts.adopt({"a": rigs[0].engine.url, "b": rigs[0].other.url})
        heard = threading.Event()

        def hear(told: dict[str, list[Report]]) -> None:
            other.facts.hear(told)
            if told:
                heard.set()

        listening = SimpleNamespace(overview=other.overview, facts=SimpleNamespace(hear=hear))
        sharing = Sharing(kept, cast(Multiplexer, listening), print, every=0.01)
        with one.lease("m", work=WORK) as first:
            Sharing(kept, one, print).once()
            sharing.worker.start()
            assert heard.wait(GUARD)
            with other.lease("m", work=WORK) as second:
                assert {first.backend.name, second.backend.name} == {"a", "b"}
        sharing.worker.close()
        assert sharing.worker.join(GUARD)
    finally:
        for rig in rigs:
            rig.close()
