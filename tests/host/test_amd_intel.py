"""AMD's and Intel's GPUs, as trees of the kernel's files tell of them (trees/README.md)."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from anvil_mux.host import gpus
from anvil_mux.host.gpus import Gpus, Reading, amd_intel_gpus, cards, clients, host_memory
from anvil_mux.host.seam import Sensors
from tests.host.trees import plant

GIB = 1 << 30


def seen(tree: str, folder: Path) -> list[Reading]:
    return [*amd_intel_gpus(*plant(tree, folder), sensors=True).readings]


def test_cards_of_amd_are_counted_in_the_order_of_their_addresses(tmp_path):
    first, second = seen("radeon", tmp_path)
    assert (first.gpu.id, first.gpu.uuid, first.gpu.name) == ("amd0", "0000:03:00.0", "Radeon PRO W7900")
    assert (second.gpu.id, second.gpu.uuid, second.gpu.name) == ("amd1", "0000:0b:00.0", "AMD 1002:744C")
    by_path = "/dev/dri/by-path/pci-0000:0b:00.0"
    assert second.gpu.files == (
        "/dev/dri/renderD128",
        "/dev/dri/card1",
        f"{by_path}-render",
        f"{by_path}-card",
    )


def test_a_card_tells_its_memory_and_what_it_measures(tmp_path):
    _, card = seen("radeon", tmp_path)
    assert (card.gpu.total, card.used, card.gpu.shared) == (25753026560, 10 * GIB, 0)
    assert card.sensors == Sensors(0.87, 61.0, 213.0)


def test_a_suspended_card_is_not_woken(tmp_path):
    card, _ = seen("radeon", tmp_path)
    assert (card.gpu.total, card.used) == (51522830336, 27262976)
    assert card.sensors == Sensors()


def test_a_client_counts_once_however_many_files_and_processes_have_it(tmp_path):
    first, second = seen("radeon", tmp_path)
    assert dict(second.processes) == {4711: 4 * GIB, 4713: 2 * GIB, 5000: GIB}
    assert first.processes == ()
    assert second.used_by({4711, 4712, 4713}) == 6 * GIB


@pytest.mark.parametrize(("tree", "walks"), [("radeon", False), ("strix", False), ("arc", True)])
def test_only_the_processes_in_question_are_looked_at_unless_all_must_be_added_up(
    tmp_path, monkeypatch, tree, walks
):
    sys, proc = plant(tree, tmp_path)
    all_processes = amd_intel_gpus(sys, proc)
    listed: list[Path] = []

    def listdir(folder: Path) -> list[str]:
        listed.append(folder)
        return os.listdir(folder)

    monkeypatch.setattr(gpus, "os", SimpleNamespace(listdir=listdir, readlink=os.readlink))
    pid = next(pid for reading in all_processes.readings for pid, _ in reading.processes)
    found = amd_intel_gpus(sys, proc, pids={pid, 1 << 22})
    assert [each.used for each in found.readings] == [each.used for each in all_processes.readings]
    assert found.used_by({pid}) == all_processes.used_by({pid})
    assert (proc in listed) == walks
    assert walks or {file.parent.name for file in listed} <= {str(pid), str(1 << 22)}


def test_a_gpu_within_a_processor_has_what_was_set_aside_and_what_it_may_map(tmp_path):
    [apu] = seen("strix", tmp_path)
    assert (apu.gpu.total, apu.gpu.shared) == (GIB // 2 + 48 * GIB, 48 * GIB)
    assert apu.used == (256 << 20) + 25864192000
    assert apu.processes == ((612, (25258000 + 5348) << 10),)
    assert apu.sensors == Sensors(0.12, 48.0, 22.0)


def test_cards_of_intel_tell_their_size_under_xe_alone(tmp_path):
    _, new, old = seen("arc", tmp_path)
    assert (new.gpu.id, new.gpu.total, new.used) == ("intel1", 12 * GIB, 8 * GIB)
    assert new.processes == ((900, 8 * GIB),)
    assert new.sensors == Sensors(celsius=52.0)
    assert (old.gpu.id, old.gpu.total, old.used, old.free) == ("intel2", None, 2 * GIB, None)
    assert old.processes == ((901, 2 * GIB),)


def test_an_intel_processors_gpu_has_the_hosts_memory(tmp_path):
    own, *_ = seen("arc", tmp_path)
    assert (own.gpu.id, own.gpu.total, own.used, own.gpu.shared) == ("intel0", 32 * GIB, 16 * GIB, 32 * GIB)
    assert own.processes == ((902, GIB),)


def test_what_is_used_is_not_known_where_some_processes_cannot_be_looked_at(tmp_path, monkeypatch):
    sys, proc = plant("arc", tmp_path)
    read = Path.read_text

    def denied(file: Path, *args: object) -> str:
        if file == proc / "901" / "fdinfo" / "4":
            raise PermissionError
        return read(file, *args)

    monkeypatch.setattr(Path, "read_text", denied)
    _, new, old = amd_intel_gpus(sys, proc).readings
    assert (new.used, new.processes) == (None, ((900, 8 * GIB),))
    assert (old.used, old.processes) == (None, ())


def test_files_that_are_no_accounts_of_a_gpu_are_no_clients(tmp_path):
    for number, text in enumerate(["", "pos: 0\n", "drm-driver: amdgpu\n", "drm-client-id: 1\n", "\x00:"]):
        (tmp_path / "5" / "fd").mkdir(parents=True, exist_ok=True)
        (tmp_path / "5" / "fdinfo").mkdir(exist_ok=True)
        (tmp_path / "5" / "fd" / str(number)).symlink_to("/dev/dri/renderD128")
        (tmp_path / "5" / "fdinfo" / str(number)).write_text(text)
    (tmp_path / "5" / "fd" / "99").symlink_to("/dev/dri/renderD128")  # closed meanwhile
    (tmp_path / "6").mkdir()  # has ended
    assert clients(tmp_path) == ([], True)


@pytest.mark.parametrize("damage", ["mem_info_vram_total", "gpu_busy_percent", "hwmon"])
def test_a_figure_that_is_missing_or_broken_is_unknown_and_no_error(tmp_path, damage):
    sys, proc = plant("radeon", tmp_path)
    for file in (sys / "class/drm/card1/device").glob(f"{damage}*"):
        if file.is_file():
            file.write_bytes(b"\xff\xfe garbage")
        else:
            file.rename(file.with_name("gone"))
    card = amd_intel_gpus(sys, proc, sensors=True).readings[1]
    figures = card.gpu.total, card.used, card.sensors.utilization, card.sensors.celsius, card.sensors.watts
    assert figures.count(None) == (2 if damage == "hwmon" else 1)


def test_a_card_that_does_not_tell_what_is_used_has_what_its_clients_have(tmp_path):
    sys, proc = plant("radeon", tmp_path)
    (sys / "class/drm/card1/device/mem_info_vram_used").unlink()
    assert amd_intel_gpus(sys, proc).readings[1].used == 7 * GIB


def test_a_machine_without_such_cards_says_so(tmp_path):
    assert amd_intel_gpus(tmp_path, tmp_path) == Gpus(why_none="no card of AMD or Intel in /sys/class/drm")
    assert cards(tmp_path) == []


def test_here_nothing_is_raised():
    found = amd_intel_gpus()
    assert found.readings or found.why_none


def test_the_hosts_memory_is_what_the_kernel_counts(tmp_path):
    assert host_memory(tmp_path) == (None, None)
    (tmp_path / "meminfo").write_text("MemTotal: 8 kB\n\nMemAvailable:   3 kB\nHugePages_Total: 0\n")
    assert host_memory(tmp_path) == (8192, 5120)
    (tmp_path / "meminfo").write_text("MemTotal: 8 kB\n")
    assert host_memory(tmp_path) == (None, None)
