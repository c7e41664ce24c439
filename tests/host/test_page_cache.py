"""What of a file is in the page cache, and how it comes there."""

from __future__ import annotations

import ctypes
import os
import platform
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from anvil_mux.host.page_cache import IDLE_CLASS, IOPRIO_SET, PIECE, CachedFile, is_on_disk, step_back

HERE = Path(__file__).resolve().parent


@pytest.fixture
def file(uncached: Callable[[str, int], Path]) -> Path:
    return uncached("weights", 2 * PIECE + 4096)


def test_all_of_a_file_is_missing_until_it_was_brought_in(file: Path) -> None:
    with CachedFile(file) as cached:
        pieces = [(0, PIECE), (PIECE, PIECE), (2 * PIECE, 4096)]
        assert cached.missing() == pieces
        for piece in pieces:
            cached.bring_in(*piece)
            assert cached.is_there(*piece)
        assert cached.missing() == []
        assert cached.size == 2 * PIECE + 4096


def test_a_file_without_content_lacks_nothing(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    with CachedFile(tmp_path / "empty") as cached:
        assert cached.missing() == []


def test_a_pipe_in_place_of_a_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="is no regular file"):
        CachedFile(tmp_path / "pipe")


def test_a_file_that_shrinks_is_read_to_its_end(file: Path) -> None:
    with CachedFile(file) as cached:
        os.truncate(file, 10)
        cached.bring_in(0, PIECE)
        cached.bring_in(PIECE, PIECE)


def test_a_thread_that_steps_back_is_alone_in_that() -> None:
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
def test_only_file_systems_on_disks_count(tmp_path: Path, file: str, found: bool) -> None:
    (tmp_path / "mountinfo").write_text(MOUNTS)
    assert is_on_disk(Path(file), tmp_path / "mountinfo") is found


def test_nothing_is_known_without_a_list_of_mounts(tmp_path: Path) -> None:
    assert not is_on_disk(Path("/models/a.gguf"), tmp_path / "mountinfo")
