"""Loads and evictions through a runtime that notes what is asked of it, with a real engine's HTTP."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from anvil_mux.config import config
from anvil_mux.config.config import Backend
from anvil_mux.errors import BackendError, Cancelled, LoadError
from anvil_mux.host import engines
from anvil_mux.host.levels import LEVELS, Stop, Swapper
from anvil_mux.host.seam import Evicted, Loaded, NotBegun
from tests.host.test_engines import Stub, engine, serving

BACKEND = Backend(name="a", model="m", engine="vllm", load_timeout=30.0)
GUARD = 20.0


class Notes:
    """A runtime whose every call is noted, and fails if told to."""

    def __init__(self, url: str = "http://127.0.0.1:9") -> None:
        self.url = url
        self.calls: list[str] = []
        self.fails: dict[str, Exception] = {}
        self.how: str | None = None
        self.unreached = ""

    def _note(self, call: str) -> None:
        self.calls.append(call)
        if call in self.fails:
            raise self.fails[call]

    def kill(self, backend: Backend) -> None:
        self._note("kill")

    def pause(self, backend: Backend) -> None:
        self._note("pause")

    def resume(self, backend: Backend) -> None:
        self._note("resume")

    def differs(self, backend: Backend) -> str:
        return ""

    def ping(self) -> str:
        return self.unreached

    def is_frozen(self, backend: Backend) -> bool:
        return False

    def lost_its_port(self, backend: Backend) -> bool:
        return False

    def pids(self, backend: Backend) -> list[int]:
        return []

    def problem(self) -> str:
        return ""

    def start(self, backend: Backend) -> str:
        self._note("start")
        return self.url

    def stop(self, backend: Backend) -> None:
        self._note("stop")

    def ended(self, backend: Backend) -> str | None:
        if "ended" in self.fails:
            raise self.fails["ended"]
        return self.how

    def running(self) -> dict[str, str]:
        return {}

    def log_tail(self, backend: Backend, lines: int = 20) -> list[str]:
        self._note("log_tail")
        return ["first", "last"]

    def follow_log(self, backend: Backend) -> Iterator[str]:
        return iter(())

    def watch(self, died: Callable[[str], None]) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.fixture
def healthy() -> Iterator[Stub]:
    with engine(**{"GET_/health": 200, "GET_/v1/models": serving("m")}) as stub:
        yield stub


def test_a_load_starts_the_service_and_waits_until_it_answers(healthy):
    runtime = Notes(healthy.url)
    assert Swapper(runtime).load(BACKEND, "stop") == Loaded(healthy.url, "stop")
    assert runtime.calls == ["start"]
    assert healthy.seen == ["GET /health", "GET /v1/models"]


def test_a_failed_load_reads_the_log_first_and_then_cleans_up():
    runtime = Notes()
    runtime.how = "exited with code 1"
    with pytest.raises(LoadError) as caught:
        Swapper(runtime).load(BACKEND, "stop")
    assert runtime.calls == ["start", "log_tail", "stop"]
    assert caught.value.log == ("first", "last")
    assert "a exited with code 1 after" in caught.value.message
    assert "first" not in caught.value.message


class PortsTaken(Notes):
    """A runtime whose service does not get its port, so many times."""

    def __init__(self, url: str, times: int) -> None:
        super().__init__(url)
        self.times = times

    def start(self, backend: Backend) -> str:
        self.how = "exited with code 1" if self.calls.count("start") < self.times else None
        return super().start(backend)

    def lost_its_port(self, backend: Backend) -> bool:
        return True


def test_a_service_whose_port_somebody_took_gets_another_one(healthy):
    runtime = PortsTaken(healthy.url, 1)
    assert Swapper(runtime).load(BACKEND, "stop") == Loaded(healthy.url, "stop")
    assert runtime.calls == ["start", "start"]


def test_a_service_that_loses_its_port_twice_has_failed():
    runtime = PortsTaken("http://127.0.0.1:9", 2)
    with pytest.raises(LoadError, match="a exited with code 1"):
        Swapper(runtime).load(BACKEND, "stop")
    assert runtime.calls == ["start", "start", "log_tail", "stop"]


@pytest.mark.parametrize(
    ("fails", "why", "log", "calls"),
    [
        ({"start": BackendError("dockerd said no")}, "^dockerd said no", True, ["start", "log_tail", "stop"]),
        ({"start": RuntimeError("odd")}, "^RuntimeError: odd", True, ["start", "log_tail", "stop"]),
        (
            {"start": LoadError("no image"), "log_tail": BackendError("no log")},
            "^no image$",
            False,
            ["start", "log_tail", "stop"],
        ),
        # There is nothing to clean up.
        ({"start": NotBegun("no dockerd"), "stop": BackendError("no")}, "^no dockerd$", False, ["start"]),
    ],
)
def test_a_start_that_fails_is_a_load_error_after_the_clean_up(fails, why, log, calls):
    runtime = Notes()
    runtime.fails = fails
    with pytest.raises(LoadError, match=why) as caught:
        Swapper(runtime).load(BACKEND, "stop")
    assert caught.value.log == (("first", "last") if log else ())
    assert runtime.calls == calls


@pytest.mark.parametrize(("is_cancelled", "why"), [(False, "no image"), (True, "was cancelled")])
def test_a_clean_up_that_fails_says_that_the_gpus_may_be_held(is_cancelled, why):
    runtime = Notes()
    no = BackendError("cannot be stopped")
    runtime.fails = {"start": LoadError("no image"), "stop": no, "kill": no}
    swapper = Swapper(runtime)
    if is_cancelled:
        swapper.cancel(BACKEND, 7)
    with pytest.raises(BackendError, match=f"{why}; and then it could not be stopped: .*cannot be stopped"):
        swapper.load(BACKEND, "stop", 7)


def test_a_load_that_is_cancelled_while_its_engine_is_not_ready_is_cleaned_up_and_no_failure():
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            swapper.cancel(BACKEND, 7)

    with engine(**{"GET_/health": 503}) as stub:
        runtime = Notes(stub.url)
        swapper = Swapper(runtime, sleep=sleep)
        with pytest.raises(Cancelled, match="the load of a was cancelled"):
            swapper.load(BACKEND, "stop", 7)
    assert (runtime.calls, len(pauses)) == (["start", "stop"], 3)


def test_the_cancel_of_one_load_is_none_of_another_whichever_number_is_greater(healthy):
    swapper = Swapper(Notes(healthy.url))
    swapper.load(BACKEND, "stop", 7)
    swapper.cancel(BACKEND, 7)  # too late
    for number in (6, 8):
        assert swapper.load(BACKEND, "stop", number) == Loaded(healthy.url, "stop")


class CancelledMeanwhile(Notes):
    """A runtime that learns of the cancel of load 7 while it starts the service."""

    swapper: Swapper

    def start(self, backend: Backend) -> str:
        self.swapper.cancel(backend, 7)
        return super().start(backend)


def test_a_start_under_way_may_finish_and_an_engine_that_is_ready_when_its_load_is_cancelled_is_loaded(
    healthy,
):
    gone = CancelledMeanwhile()
    gone.swapper = Swapper(gone)
    with pytest.raises(Cancelled):
        gone.swapper.load(BACKEND, "stop", 7)
    assert gone.calls == ["start", "stop"]
    ready = CancelledMeanwhile(healthy.url)
    ready.swapper = Swapper(ready)
    assert ready.swapper.load(BACKEND, "stop", 7) == Loaded(healthy.url, "stop")


def test_what_does_not_wake_is_not_started_anew_if_its_load_was_cancelled():
    runtime = Notes()  # it is gone
    swapper = Swapper(runtime)
    swapper.cancel(BACKEND, 7)
    with pytest.raises(Cancelled):
        swapper.load(BACKEND, "freeze", 7)
    assert runtime.calls == ["stop", "stop"]


class StoppedMeanwhile(Notes):
    """A runtime whose service is stopped while it is woken, and does not wake for that."""

    swapper: Swapper

    def __init__(self) -> None:
        super().__init__()
        self.running = lambda: {"a": self.url}
        self.is_awaited = threading.Event()
        self.stopping = threading.Thread(target=lambda: self.swapper.stop(BACKEND), daemon=True)

    def resume(self, backend: Backend) -> None:
        super().resume(backend)
        self.stopping.start()
        assert self.is_awaited.wait(GUARD)
        raise BackendError("it has ended")


def test_what_is_stopped_while_it_wakes_is_not_started_anew():
    runtime = StoppedMeanwhile()
    runtime.swapper = Swapper(runtime, sleep=lambda seconds: runtime.is_awaited.set())
    with pytest.raises(Cancelled):
        runtime.swapper.load(BACKEND, "freeze", 7)
    runtime.stopping.join(GUARD)
    assert runtime.calls == ["resume", "stop", "stop", "stop"]


@pytest.mark.parametrize("end", [Swapper.evict, Swapper.stop])
def test_a_llama_server_is_stopped_once_it_has_noticed_that_its_clients_left(end, monkeypatch):
    monkeypatch.setattr(engines, "NOTICE_PAUSES", (0.0,) * 3)
    busy, idle = [{"id": 0, "is_processing": True}], [{"id": 0, "is_processing": False}]

    class Noticing(dict[str, object]):
        """The answers of one that notices at the third look."""

        def get(self, key: str, default: object = None) -> object:
            return (200, busy if stub.seen.count("GET /slots") < 3 else idle)

    with engine() as stub:
        stub.answers = Noticing()
        runtime = Notes(stub.url)
        runtime.running = lambda: {"a": stub.url}
        runtime.stop = lambda backend: stub.seen.append("stop")
        end(Swapper(runtime), replace(BACKEND, engine="llamacpp"))
    assert stub.seen == ["GET /props", *["GET /slots"] * 3, "stop"]


@pytest.mark.parametrize("end", [Swapper.evict, Swapper.stop])
def test_a_llama_server_that_dozes_is_stopped_without_waking_it(end):
    with engine(**{"GET_/props": (200, {"is_sleeping": True})}) as stub:
        runtime = Notes(stub.url)
        runtime.running = lambda: {"a": stub.url}
        end(Swapper(runtime), replace(BACKEND, engine="llamacpp"))
    assert set(stub.seen) == {"GET /props"}
    assert "stop" in runtime.calls


def test_one_that_does_not_notice_is_stopped_all_the_same(monkeypatch):
    monkeypatch.setattr(engines, "NOTICE_PAUSES", (0.0,) * 3)
    with engine(**{"GET_/slots": (200, [{"id": 0, "is_processing": True}])}) as stub:
        runtime = Notes(stub.url)
        runtime.running = lambda: {"a": stub.url}
        assert Swapper(runtime).evict(replace(BACKEND, engine="llamacpp")) == Evicted("stop")
    assert runtime.calls == ["stop"]


@pytest.mark.parametrize("how", ["stop", "freeze"])
def test_of_an_engine_that_had_ended_before_its_eviction_it_is_said_how(how, caplog):
    runtime = Notes()
    runtime.how = "exited with code 139"
    evicted = Swapper(runtime).evict(BACKEND, how)
    assert evicted == Evicted("stop", died="exited with code 139", log=("first", "last"))
    assert caplog.text == ""


def test_an_engine_that_ends_while_it_is_told_to_rest_is_not_blamed_for_that(caplog):
    """Docker may know of an end a moment after it happened."""

    class Frozen(Notes):
        def pause(self, backend: Backend) -> None:
            self.how = "exited with code 139"
            raise BackendError("service m exited with code 139")

    assert Swapper(Frozen()).evict(BACKEND, "freeze").died == "exited with code 139"
    assert caplog.text == ""


@pytest.mark.parametrize("error", [BackendError("stuck"), OSError("stuck")])
def test_an_eviction_stops_the_service_and_one_that_fails_is_a_backend_error(error):
    runtime = Notes()
    assert Swapper(runtime).evict(BACKEND, "stop") == Evicted("stop")
    runtime.fails = {"stop": error, "kill": error}
    with pytest.raises(BackendError, match="stuck"):
        Swapper(runtime).evict(BACKEND, "stop")
    assert runtime.calls == ["stop", "stop", "kill"]


def test_how_a_backend_ended_is_passed_on_and_unknown_where_it_cannot_be_told():
    runtime = Notes()
    swapper = Swapper(runtime)
    runtime.how = "exited with code 1"
    assert swapper.ended(BACKEND) == "exited with code 1"
    runtime.fails["ended"] = BackendError("Docker does not answer")
    assert swapper.ended(BACKEND) is None


def test_the_standby_levels_are_those_of_the_configuration():
    assert tuple(LEVELS) == config.WAYS


def test_another_way_has_the_same_guarantee(healthy):
    class Nap(Stop):
        def load(self, backend: Backend) -> str:
            raise TimeoutError("did not wake")

    runtime = Notes(healthy.url)
    assert Swapper(runtime, {**LEVELS, "nap": Nap}).load(BACKEND, "nap") == Loaded(healthy.url, "stop")
    assert runtime.calls == ["stop", "start"]


def test_step_on_a_runtime_that_does_not_answer_is_not_begun():
    runtime = Notes()
    runtime.unreached = "Docker does not answer"
    swapper = Swapper(runtime)
    for step in (lambda: swapper.evict(BACKEND, "freeze"), lambda: swapper.demote(BACKEND, "freeze", "stop")):
        with pytest.raises(NotBegun, match="Docker does not answer"):
            step()
    assert runtime.calls == []
