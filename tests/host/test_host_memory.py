"""How much the page cache may be given, without taking memory from anybody."""

from pathlib import Path

import pytest

from anvil_mux.host.gpus import cache_room, own_memory

GIB = 1 << 30


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """A machine with 100 GiB, of which 60 may be had; processes map 5 GiB of files."""
    folder = tmp_path / "proc"
    (folder / "self").mkdir(parents=True)
    amounts = {"MemTotal": 100, "MemFree": 2, "MemAvailable": 60, "Mapped": 5}
    lines = [f"{name}: {amount << 20} kB" for name, amount in amounts.items()]
    (folder / "meminfo").write_text("\n".join([*lines, "HugePages_Total: 0", ""]))
    return folder


def room(proc: Path, cgroup: str = "", **files: str) -> float:
    """GiB that there is room for; ``files``: of control groups, by their paths with _ for /."""
    (proc / "self" / "cgroup").write_text(cgroup)
    groups = proc.parent / "cgroup"
    for name, text in files.items():
        file = groups / name.replace("__", "/").replace("max", "memory.max").replace("now", "memory.current")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return cache_room(proc, groups) / GIB


def test_a_process_has_the_memory_of_its_host_or_as_much_as_a_group_around_it_may(proc):
    room(proc)
    assert own_memory(proc, proc.parent / "cgroup") == 100 * GIB
    room(proc, "0::/a/b\n", a__max=str(30 * GIB), a__b__max="max")
    assert own_memory(proc, proc.parent / "cgroup") == 30 * GIB
    assert own_memory(proc.parent / "none") == 0


def test_pages_that_are_mapped_and_a_tenth_of_the_memory_are_left_alone(proc):
    assert room(proc) == 60 - 5 - 10


@pytest.mark.parametrize(
    ("told", "instead"),
    [("MemAvailable", "Else"), ("Mapped", "Else"), ("MemTotal", "Else"), (str(60 << 20), str(14 << 20))],
)
def test_there_is_no_room_on_a_machine_that_does_not_tell_or_is_full(proc, told, instead):
    said = (proc / "meminfo").read_text()
    (proc / "meminfo").write_text(said.replace(told, instead))
    assert room(proc) == 0


def test_the_control_groups_around_us_bound_it(proc):
    within = {"a__b__max": "max\n", "a__b__now": str(GIB), "a__max": str(8 * GIB), "a__now": str(2 * GIB)}
    assert room(proc, "0::/a/b\n", **within) == 6
    stat = proc.parent / "cgroup" / "a" / "memory.stat"
    stat.write_text(f"anon 4096\ninactive_file {GIB}\n")
    assert room(proc, "0::/a/b\n", **within) == 7
    assert room(proc, "0::/elsewhere\n") == 45


def test_the_control_groups_of_version_1_bound_it_too(proc):
    folder = proc.parent / "cgroup" / "memory" / "a"
    folder.mkdir(parents=True)
    (folder / "memory.limit_in_bytes").write_text(str(4 * GIB))
    (folder / "memory.usage_in_bytes").write_text(str(3 * GIB))
    (folder / "memory.stat").write_text(f"cache 1\ntotal_inactive_file {GIB}\n")
    assert room(proc, "5:cpu,cpuacct:/a\n4:memory:/a\n") == 2
    assert room(proc, "5:cpu,cpuacct:/a\n") == 45
