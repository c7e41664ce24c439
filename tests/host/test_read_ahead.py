"""Weights are read ahead as ordered, within the room there is, and not while an engine reads its own."""

from __future__ import annotations

import ctypes
import os
import platform
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from anvil_mux.config.config import Backend
from anvil_mux.host import weights
from anvil_mux.host.weights import (
    IDLE_CLASS,
    IOPRIO_SET,
    PIECE,
    CachedFile,
    ReadAhead,
    is_on_disk,
    step_back,
)

A, B, C = (Backend(name, name) for name in "abc")
PIECES = 3
SIZE = PIECES * PIECE
PLENTY = 1 << 40


class FakeFile:
    """A file whose pages are noted, and not read."""

    cached: dict[str, set[int]] = {}
    before: Callable[[str, int], object] = staticmethod(lambda name, offset: None)

    def __init__(self, path: Path) -> None:
        if path.name == "locked":
            raise PermissionError(13, "no")
        self.size, self._name = SIZE, path.name

    def __enter__(self) -> FakeFile:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def missing(self):
        there = self.cached.setdefault(self._name, set())
        return [(each * PIECE, PIECE) for each in range(PIECES) if each not in there]

    def bring_in(self, offset: int, length: int) -> None:
        self.before(self._name, offset // PIECE)
        self.cached[self._name].add(offset // PIECE)


class Rig:
    def __init__(self) -> None:
        self.told, self.left = list[tuple[str, int]](), PLENTY
        self.files = {"a": ["a1", "a2"], "b": ["b1"], "c": ["locked", "c1"]}
        self.ahead = ReadAhead(
            lambda backend: [Path("/weights", each) for each in self.files[backend.name]],
            lambda backend, size, seconds: self.told.append((backend, size // PIECE)),
            room=lambda: self.left,
            on_disk=lambda path: path.name != "in-memory",
        )

    def run(self) -> int:
        """Take the turns of its thread until nothing is left to be read; how many there were."""
        return len([*iter(self.ahead._turn, None)])

    @property
    def cached(self) -> dict[str, int]:
        return {name: len(pieces) for name, pieces in FakeFile.cached.items()}


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Rig:
    monkeypatch.setattr(weights, "CachedFile", FakeFile)
    monkeypatch.setattr(weights, "step_back", lambda: None)
    monkeypatch.setattr(weights, "ROOM_SECONDS", 0.0)
    monkeypatch.setattr(FakeFile, "cached", {})
    return Rig()


def test_all_files_are_read_in_order_and_once(rig):
    rig.ahead.order([B, A])
    rig.ahead.order([B, A])
    assert rig.run() == 2
    assert rig.told == [("b", PIECES), ("a", 2 * PIECES)]
    assert list(rig.cached) == ["b1", "a1", "a2"]
    rig.ahead.order([B, A])
    assert rig.run() == 0


def test_what_is_there_is_not_read_and_not_told(rig):
    FakeFile.cached = {"a1": {0, 1, 2}, "a2": {1}, "b1": {0, 1, 2}}
    rig.ahead.order([A, B])
    rig.run()
    assert rig.told == [("a", 2)]


def test_files_that_cannot_be_read_or_are_in_memory_are_left_out(rig):
    rig.files["a"] = ["in-memory"]
    rig.ahead.order([A, C])
    rig.run()
    assert (rig.told, rig.cached) == ([("c", PIECES)], {"c1": PIECES})


def test_it_stops_at_once_when_nobody_waits_any_more(rig, monkeypatch):
    monkeypatch.setattr(FakeFile, "before", staticmethod(lambda name, piece: rig.ahead.order([B])))
    rig.ahead.order([A])
    rig.run()
    assert rig.cached == {"a1": 1, "b1": PIECES}
    rig.ahead.order([])
    assert rig.run() == 0


def test_nothing_is_read_while_an_engine_loads_and_it_goes_on_afterwards(rig, monkeypatch):
    with rig.ahead.pausing(), rig.ahead.pausing():
        rig.ahead.order([B])
        assert rig.run() == 0
    load = rig.ahead.pausing()
    monkeypatch.setattr(FakeFile, "before", staticmethod(lambda name, piece: load.__enter__()))
    assert rig.run() == 1
    assert (rig.cached, rig.told) == ({"b1": 1}, [("b", 1)])
    monkeypatch.setattr(FakeFile, "before", staticmethod(lambda name, piece: None))
    load.__exit__(None, None, None)
    assert rig.run() == 1
    assert (rig.cached, rig.told) == ({"b1": PIECES}, [("b", 1), ("b", PIECES - 1)])


def test_no_more_is_read_than_there_is_room_for_with_what_was_read_before(rig, monkeypatch):
    rig.left = SIZE + PIECE
    rig.ahead.order([B, A])
    rig.run()
    assert rig.cached == {"b1": PIECES, "a1": 1}
    rig.ahead.order([A])  # b was loaded, and its pages count as mapped, or may go
    assert rig.run() == 0
    rig.left = PLENTY
    monkeypatch.setattr(FakeFile, "before", staticmethod(lambda name, piece: setattr(rig, "left", 0)))
    rig.ahead.order([])
    rig.ahead.order([A])
    rig.run()
    assert rig.cached == {"b1": PIECES, "a1": 2}


def test_one_that_waits_again_is_looked_at_again(rig):
    rig.ahead.order([B])
    rig.run()
    rig.ahead.order([])
    FakeFile.cached["b1"].clear()
    rig.ahead.order([B])
    rig.run()
    assert rig.told == [("b", PIECES)] * 2


def test_a_mistake_costs_only_that_backend(rig):
    del rig.files["a"]
    rig.ahead.order([A, B])
    with pytest.raises(KeyError):  # its thread goes on
        rig.run()
    rig.run()
    assert rig.told == [("b", PIECES)]


def test_a_real_file_is_in_the_page_cache_afterwards(uncached):
    path = uncached("weights", 2 * PIECE)
    told, done = list[tuple[str, int]](), threading.Event()

    def tell(backend: str, size: int, seconds: float) -> None:
        told.append((backend, size))
        done.set()

    ahead = ReadAhead(lambda backend: [path], tell, room=lambda: PLENTY)
    ahead.worker.start()
    ahead.order([A])
    assert done.wait(120)  # whoever else uses the disk comes first
    ahead.worker.close()
    with CachedFile(path) as cached:
        assert cached.missing() == []
    assert told == [("a", 2 * PIECE)]


# The page cache


@pytest.fixture
def file(uncached: Callable[[str, int], Path]) -> Path:
    return uncached("weights", 2 * PIECE + 4096)


def test_all_of_a_file_is_missing_until_it_was_brought_in(file):
    with CachedFile(file) as cached:
        pieces = [(0, PIECE), (PIECE, PIECE), (2 * PIECE, 4096)]
        assert cached.missing() == pieces
        for piece in pieces:
            cached.bring_in(*piece)
            assert cached.is_there(*piece)
        assert cached.missing() == []
        assert cached.size == 2 * PIECE + 4096


def test_a_file_without_content_lacks_nothing_and_a_pipe_in_its_place_is_not_waited_for(tmp_path):
    (tmp_path / "empty").touch()
    with CachedFile(tmp_path / "empty") as cached:
        assert cached.missing() == []
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="is no regular file"):
        CachedFile(tmp_path / "pipe")


def test_a_file_that_shrinks_is_read_to_its_end(file):
    with CachedFile(file) as cached:
        os.truncate(file, 10)
        cached.bring_in(0, PIECE)
        cached.bring_in(PIECE, PIECE)


def test_a_thread_that_steps_back_is_alone_in_that():
    known = IOPRIO_SET.get(platform.machine())
    if known is None:
        pytest.skip("the number of the system call is not known here")

    def priority() -> int:
        """The class for disks; the call that reads it has the next number."""
        return int(ctypes.CDLL(None).syscall(known + 1, 1, 0))

    before, within = priority(), list[int]()
    thread = threading.Thread(target=lambda: (step_back(), within.append(priority())))
    thread.start()
    thread.join()
    assert within == [IDLE_CLASS]
    assert priority() == before != IDLE_CLASS


MOUNTS = """\
1 0 254:0 / / rw - ext4 /dev/vda rw
2 1 0:30 / /shm rw - tmpfs tmpfs rw
3 1 0:31 / /nas rw shared:1 - nfs4 server:/x rw
4 3 254:1 / /nas/fäst\\040disk rw - xfs /dev/vdb rw
5 1 254:2 / /over rw - ext4 /dev/vdc rw
6 1 0:32 / /over rw - tmpfs tmpfs rw
"""


@pytest.mark.parametrize(
    ("file", "found"),
    [
        ("/models/a.gguf", True),
        ("/shm/a.gguf", False),
        ("/shmall/a.gguf", True),
        ("/nas/a.gguf", False),
        ("/nas/fäst disk/a.gguf", True),
        ("/over/a.gguf", False),
    ],
)
def test_only_file_systems_on_disks_count(tmp_path, file, found):
    (tmp_path / "mountinfo").write_text(MOUNTS)
    assert is_on_disk(Path(file), tmp_path / "mountinfo") is found


def test_nothing_is_known_without_a_list_of_mounts(tmp_path):
    assert not is_on_disk(Path("/models/a.gguf"), tmp_path / "mountinfo")
