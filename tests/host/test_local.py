"""This machine behind the seam: what a real process does is news, by values alone."""

import dataclasses
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from anvil_mux import clock
from anvil_mux.config.config import Backend, Config
from anvil_mux.config.service import Service, mounts_of_process
from anvil_mux.errors import BackendError, Cancelled, LoadError
from anvil_mux.host import gpus
from anvil_mux.host.gpus import Gpus, Reading
from anvil_mux.host.local import LocalHost
from anvil_mux.host.prompts import PromptFiles
from anvil_mux.host.seam import (
    Awake,
    Evicted,
    HostConfig,
    HostGpu,
    Inventory,
    PhaseTook,
    PromptsKept,
    ServiceEnded,
    Unfit,
    WeightsRead,
)
from anvil_mux.host.weights import CachedFile
from tests.running import seen

ROOT = Path(__file__).resolve().parent.parent.parent
GUARD = 30.0
COMMAND = (str(ROOT / "bin" / "demo-engine"), "--model", "a", "--load-seconds", "0.1")
A = Backend("a", "a", load_timeout=GUARD, service=Service(command=COMMAND))
CONFIG = HostConfig.of(Config((A,), project="seam", runtime="process"))


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalHost]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    (tmp_path / "anvil-mux" / "seam").mkdir(parents=True)
    host = LocalHost(CONFIG)
    host.start()
    yield host
    host.stop(A)
    host.close()


def test_a_mistake_ends_neither_the_watch_nor_hides_a_death(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(clock, "AFTER_MISTAKE_SECONDS", 0.0)
    (tmp_path / "anvil-mux" / "seam").mkdir(parents=True)
    host = LocalHost(CONFIG)
    watch, mistakes = host.runtime.watch, [OSError("too many open files")]

    def fail_once(died: Callable[[str], None]) -> None:
        if mistakes:
            raise mistakes.pop()
        watch(died)

    def no_log(*_: object) -> list[str]:
        raise OSError("no such file")

    monkeypatch.setattr(host.runtime, "watch", fail_once)
    host.start()
    try:
        host.load(A, "stop", 1)
        monkeypatch.setattr(host.runtime, "log_tail", no_log)
        os.kill(host.runtime.pids(A)[0], signal.SIGKILL)
        *_, ended = read_until(host, ServiceEnded)
        assert ended == ServiceEnded("a", "was killed by SIGKILL", (), 1)
    finally:
        host.stop(A)
        host.close()


def plain(value: object) -> bool:
    """Whether a value could cross a wire."""
    if dataclasses.is_dataclass(value):
        return all(plain(getattr(value, each.name)) for each in dataclasses.fields(value))
    if isinstance(value, dict):
        return all(plain(each) for pair in value.items() for each in pair)
    if isinstance(value, (tuple, list)):
        return all(map(plain, value))
    return value is None or isinstance(value, (str, int, float))


def read_until(host: LocalHost, kind: type) -> list[object]:
    """The news up to the first of that kind."""
    found: list[object] = []
    last = 0
    while not (found and isinstance(found[-1], kind)):
        for news in host.news(last, GUARD):
            last = news.number
            found.append(news.what)
    assert plain(found)
    return found


def test_an_engine_that_ends_is_news_with_the_number_of_its_load_0_if_it_was_adopted(host):
    assert host.load(A, "stop", 7).level == "stop"
    os.kill(host.runtime.pids(A)[0], signal.SIGKILL)
    *phases, ended = read_until(host, ServiceEnded)
    took = [(each.backend, each.phase) for each in phases if isinstance(each, PhaseTook)]
    assert took == [("a", "load"), ("a", "ready")]
    assert isinstance(ended, ServiceEnded)
    assert (ended.backend, ended.why, ended.load) == ("a", "was killed by SIGKILL", 7)
    assert host.ended(A) == "was killed by SIGKILL"
    host.load(A, "stop", 8)
    assert host.running() == ["a"]
    found = host.adopt(A)
    assert isinstance(found, Awake)
    assert plain(found)
    host.news(host.news(0, 0.0)[-1].number, 0.0)  # what was before is forgotten
    os.kill(host.runtime.pids(A)[0], signal.SIGKILL)
    ended = read_until(host, ServiceEnded)[-1]
    assert isinstance(ended, ServiceEnded)
    assert ended.load == 0


def test_what_runs_is_adopted_unless_it_was_described_otherwise_meanwhile(host):
    host.load(A, "stop", 1)
    other = dataclasses.replace(A, service=Service(command=(*COMMAND, "--seed", "1")))
    host.reconfigure(dataclasses.replace(CONFIG, backends=(other,)))
    assert host.running() == ["a"]
    assert host.adopt(other) == Unfit("its command changed since it was started")
    assert host.evict(A, "stop") == Evicted("stop")
    assert host.running() == []


def test_nothing_is_started_as_long_as_it_could_never_be_seen_what_runs(host, monkeypatch):
    def away():
        raise BackendError("Docker is away")

    running = host.runtime.running
    monkeypatch.setattr(host.runtime, "running", away)
    with pytest.raises(BackendError):
        host.running()
    with pytest.raises(LoadError, match="could not be seen yet what runs here already: Docker is away"):
        host.load(A, "stop", 1)
    assert not running()
    monkeypatch.setattr(host.runtime, "running", running)
    assert host.running() == []
    monkeypatch.setattr(host.runtime, "running", away)
    with pytest.raises(BackendError):  # what runs is known by now
        host.running()
    assert host.load(A, "stop", 2).level == "stop"


def test_what_is_configured_no_longer_is_an_orphan_of_the_next_start_until_it_was_stopped(host):
    assert host.orphans() == []
    later = LocalHost(HostConfig((), project="seam", runtime="process"))
    assert [orphan.name for orphan in later.orphans()] == ["a"]
    assert [orphan.name for orphan in later.orphans()] == ["a"]
    later.stop(A)
    assert later.orphans() == []
    later.close()


def test_notes_that_a_power_cut_has_damaged_keep_nothing_from_its_start(host, caplog):
    assert host.orphans() == []
    [notes] = Path(os.environ["XDG_STATE_HOME"]).glob("anvil-mux/seam/services")
    notes.write_bytes(notes.read_bytes() + b"\nscaled/2\nscaled/\n" + bytes(512))
    later = LocalHost(HostConfig((), project="seam", runtime="process"))
    assert [orphan.name for orphan in later.orphans()] == ["a", "scaled-2"]
    assert "services is damaged: engines that the configuration has no longer may run on" in caplog.text
    later.close()


def test_a_backend_whose_name_could_not_be_noted_at_the_start_is_noted_by_its_load(host):
    folder = Path(os.environ["XDG_STATE_HOME"], "anvil-mux", "seam")
    (folder / "services.part").mkdir(parents=True)
    assert host.orphans() == []
    (folder / "services.part").rmdir()
    host.load(A, "stop", 1)
    later = LocalHost(HostConfig((), project="seam", runtime="process"))
    assert [orphan.name for orphan in later.orphans()] == ["a"]
    later.close()


def test_a_load_that_was_cancelled_before_it_began_leaves_nothing(host):
    host.cancel(A, 3)
    with pytest.raises(Cancelled):
        host.load(A, "stop", 3)
    assert host.running() == []
    assert host.load(A, "stop", 4).level == "stop"


def test_engines_are_reached_at_the_address_that_the_host_was_given(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    (tmp_path / "anvil-mux" / "seam").mkdir(parents=True)
    command = (*COMMAND, "--host", "$HOST")
    backend = dataclasses.replace(A, service=Service(command=command))
    host = LocalHost(dataclasses.replace(CONFIG, backends=(backend,)), address="127.0.0.2")
    assert host.inventory().address == "127.0.0.2"
    try:
        assert host.load(backend, "stop", 1).url.startswith("http://127.0.0.2:")
        assert host.answers(backend, GUARD)
    finally:
        host.stop(backend)
        host.close()


def test_the_inventory_is_plain(host):
    inventory = host.inventory()
    assert isinstance(inventory, Inventory)
    assert plain(inventory)
    assert inventory.memory
    assert plain(CONFIG)


def test_prompts_that_are_on_disk_are_news_of_the_start(tmp_path, host):
    service = Service(command=("llama-server", "--slot-save-path", str(tmp_path)), mounts=(("/", "/"),))
    keeps = Backend("k", "k", engine="llamacpp", prompt_cache=1 << 20, service=service)
    host.reconfigure(dataclasses.replace(CONFIG, backends=(A, keeps)))
    assert read_until(host, PromptsKept) == [PromptsKept("k", 0, 0, 0)]
    files = PromptFiles(str(tmp_path), ".", "k", tmp_path / "anvil-mux" / "seam")
    files.place(3).write_text("prompt")
    assert files.finish(3, 5, size=6, loaded_from="a model")
    later = LocalHost(host._config)
    later.start()
    assert read_until(later, PromptsKept) == [PromptsKept("k", 1, 5, 6)]
    later.close()


def test_weights_are_read_ahead_by_name_and_that_is_news(uncached, host):
    path = uncached("a.gguf", 1 << 20)
    service = Service(command=(*COMMAND, "-m", "a.gguf"), mounts=mounts_of_process(str(path.parent)))
    host.reconfigure(dataclasses.replace(CONFIG, backends=(dataclasses.replace(A, service=service),)))
    host.read_ahead(["gone", "a"])
    [read] = read_until(host, WeightsRead)
    assert isinstance(read, WeightsRead)
    assert (read.backend, read.size) == ("a", 1 << 20)
    with CachedFile(path) as cached:
        assert cached.missing() == []


def test_a_driver_that_comes_after_the_start_is_seen(tmp_path, monkeypatch):
    found = [Gpus(why_none="NVML: Driver Not Loaded")]
    monkeypatch.setattr(gpus, "probe", lambda pids=None, **_: found[0])
    config = HostConfig((Backend("a", "a", gpus=("0",)),), project="late", runtime="process")
    host = LocalHost(config, environ={"XDG_STATE_HOME": str(tmp_path)})
    try:
        found[0] = Gpus((Reading(HostGpu("0", "GPU-0", "x", 24), 20),))
        host.running()
        (news,) = host.news(0, GUARD)
        assert (news.what.gpu_uses["0"].used, news.what.gpu_uses["0"].total) == (20, 24)
    finally:
        host.close()


def test_gpu_that_comes_late_or_vanishes_is_noticed_while_serving(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(gpus, "EVERY_SECONDS", 0.001)
    card, there = HostGpu("0", "GPU-0", total=24 << 30), []
    monkeypatch.setattr(gpus, "probe", lambda *about, **more: Gpus(tuple(map(Reading, there))))
    host = LocalHost(HostConfig((), project="late", runtime="process"))
    host.running()
    assert host.inventory().gpus == ()
    there.append(card)
    assert seen(lambda: host.inventory().gpus, bool) == (card,)
    there.clear()
    assert seen(lambda: host.inventory().gpus, lambda found: not found) == ()
    host.close()
