"""GPUs of AMD and Intel that services are given by device files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from anvil_mux.config import service
from anvil_mux.config.machines import Gpu, Machine
from anvil_mux.config.service import GivenGpus
from tests.config.files import GIB
from tests.config.test_hosts import composed, one, places, problems


def card(id: str, number: int, vram: int | None = 24 * GIB) -> dict[str, Gpu]:
    """A GPU under the names by which it may be called here."""
    gpu = Gpu(id, vram, file=f"/dev/dri/renderD{number}")
    return dict.fromkeys((id, f"0000:{number}:00.0", gpu.file, f"/dev/dri/card{number - 128}"), gpu)


TWO_AMD = card("amd0", 129) | card("amd1", 128)
MIXED = {"0": Gpu("0", 80 * GIB)} | card("amd0", 128) | card("intel0", 129, None)
RESERVED = "deploy: {resources: {reservations: {devices: [%s]}}}"
ROCM = "devices: [/dev/kfd, /dev/dri]"


def gpus(folder: Path, rest: str, own: str = "", top: str = "", **given: Any) -> tuple[str, ...]:
    (backend,) = one(folder, own, rest, top, **given).backends
    return backend.gpus


@pytest.mark.parametrize(
    ("rest", "expected"),
    [
        (ROCM, ("amd0", "amd1")),
        ("devices: ['/dev/kfd:/dev/kfd', '/dev/dri:/dev/dri:rw'], group_add: [video]", ("amd0", "amd1")),
        ("devices: [{source: /dev/kfd, target: /dev/kfd}, {source: /dev/dri}]", ("amd0", "amd1")),
        ("devices: [/dev/kfd, /dev/dri/renderD128]", ("amd1",)),
        ("devices: [/dev/kfd, /dev/dri/card0, /dev/dri/renderD128]", ("amd1",)),
        ("devices: [/dev/dri/renderD129]", ("amd0",)),
        ("devices: [/dev/dri]", ("amd0", "amd1")),
        (ROCM + ", environment: {ROCR_VISIBLE_DEVICES: '1'}", ("amd1",)),
        (ROCM + ", environment: {HIP_VISIBLE_DEVICES: '1,0'}", ("amd1", "amd0")),
        (ROCM + ", environment: {ROCR_VISIBLE_DEVICES: GPU-deadbeef}", ("amd0", "amd1")),
        ("devices: [amd.com/gpu=1]", ("amd1",)),
        ("devices: [amd.com/gpu=all]", ("amd0", "amd1")),
        ("runtime: amd, environment: {AMD_VISIBLE_DEVICES: '0'}", ("amd0",)),
        ("runtime: amd", ("amd0", "amd1")),
        ("gpus: [{driver: amd, device_ids: ['1']}]", ("amd1",)),
        ("gpus: [{driver: amd, count: 1}]", ("amd0",)),
        ("gpus: [{driver: amd, count: all}]", ("amd0", "amd1")),
        ("gpus: [{driver: amd, device_ids: [GPU-deadbeef]}]", ("amd0", "amd1")),
        (RESERVED % "{driver: amd, device_ids: ['0'], capabilities: [gpu]}", ("amd0",)),
        (RESERVED % "{driver: cdi, device_ids: [amd.com/gpu=1], capabilities: [gpu]}", ("amd1",)),
        (RESERVED % "{driver: cdi, device_ids: [amd.com/gpu=all], capabilities: [gpu]}", ("amd0", "amd1")),
        (RESERVED % "{driver: cdi, device_ids: [other.com/tpu=0], capabilities: [gpu]}", ()),
        ("devices: [/dev/snd]", ()),
        ("devices: [/dev/kfd, /dev/dri/renderD200]", ()),
    ],
)
def test_a_service_has_the_gpus_whose_files_it_is_given(
    tmp_path: Path, rest: str, expected: tuple[str, ...]
) -> None:
    assert gpus(tmp_path, rest, present=TWO_AMD) == expected


@pytest.mark.parametrize(
    ("rest", "own", "expected"),
    [
        (ROCM, "", ("amd0",)),
        ("devices: [/dev/dri]", "", ("amd0", "intel0")),
        ("devices: [/dev/dri/renderD129]", "", ("intel0",)),
        ("gpus: all", "", ("0",)),
        ("gpus: all, devices: [/dev/dri]", "", ("0",)),
        ("devices: [/dev/dri], environment: {CUDA_VISIBLE_DEVICES: '0'}", "", ("0",)),
        ("", "gpus: all", ("0",)),
        (ROCM, "gpus: all", ("amd0",)),
        (ROCM, "gpus: [intel0]", ("intel0",)),
        ("", "gpus: ['0000:129:00.0']", ("intel0",)),
        ("gpus: [{count: 1}]", "", ("0",)),
        ("gpus: [{driver: amd, device_ids: ['0']}]", "", ("amd0",)),
        ("runtime: nvidia", "", ("0",)),
        ("runtime: nvidia, environment: {NVIDIA_VISIBLE_DEVICES: none}", "", ()),
        (RESERVED % "{driver: cdi, device_ids: [nvidia.com/gpu=0], capabilities: [gpu]}", "", ("0",)),
        (ROCM, "gpu_count: 1", ("amd0",)),
    ],
)
def test_on_a_machine_with_gpus_of_several_vendors_each_service_has_those_of_its_own(
    tmp_path: Path, rest: str, own: str, expected: tuple[str, ...]
) -> None:
    assert gpus(tmp_path, rest, own, present=MIXED) == expected


def test_a_reservation_of_all_gpus_is_as_written_beside_gpus_of_other_vendors(tmp_path: Path) -> None:
    assert one(tmp_path, "gpu_count: 1", "gpus: all", present=MIXED).generated_compose == {}


@pytest.mark.parametrize(
    ("own", "rest", "expected"),
    [
        ("gpus: ['0']", ROCM, ("0",)),
        ("", ROCM, ()),
        ("", ROCM + ", environment: {CUDA_VISIBLE_DEVICES: '0'}", ("0",)),
    ],
)
def test_a_file_that_has_its_own_names_for_gpus_means_what_it_meant(
    tmp_path: Path, own: str, rest: str, expected: tuple[str, ...]
) -> None:
    top = "gpus: {'0': {vram: 24GiB}}"
    assert gpus(tmp_path, rest, own, top, present=TWO_AMD) == expected


def test_declared_gpus_are_those_that_may_be_used_with_what_they_report(tmp_path: Path) -> None:
    found = one(tmp_path, "", ROCM, "gpus: {amd1: {reserve: 2GiB}}", present=TWO_AMD)
    assert places(found) == {"m": "/amd1"}
    assert found.gpus == (Gpu("amd1", 24 * GIB, 2 * GIB, file="/dev/dri/renderD128"),)
    declared = one(tmp_path, "", ROCM, "gpus: {amd0: {vram: 16GiB}}")
    assert places(declared) == {"m": "/amd0"}


def test_a_gpu_that_is_not_there_is_told_by_its_key(tmp_path: Path) -> None:
    assert problems(tmp_path, "gpus: [amd0], gpu_count: 1", ROCM, present=TWO_AMD)
    found = one(tmp_path, "gpu_count: 3", ROCM, present=TWO_AMD)
    assert places(found) == {"m": "/amd0,amd1,amd2"}
    assert "gpu_count: cannot be loaded now: this machine has 2 GPUs, and 3 are needed" in found.warnings[0]


def test_a_candidate_is_given_the_files_of_its_own_gpus_alone(tmp_path: Path) -> None:
    rest = (
        "devices: [/dev/kfd, /dev/dri, /dev/snd], group_add: [video], environment: {HIP_VISIBLE_DEVICES: '0'}"
    )
    found = one(tmp_path, "gpu_count: 1", rest, present=TWO_AMD)
    assert places(found) == {"m.amd0": "/amd0", "m.amd1": "/amd1"}
    made = composed(found)["services"]
    assert [each["devices"] for each in made.values()] == [
        ["/dev/kfd", "/dev/snd", "/dev/dri/renderD129"],
        ["/dev/kfd", "/dev/snd", "/dev/dri/renderD128"],
    ]
    assert {(*each["group_add"], *each["environment"]) for each in made.values()} == {("video",)}


@pytest.mark.parametrize(
    ("driver", "id", "expected"),
    [("amd", "0", [["0"], ["1"]]), ("cdi", "amd.com/gpu=0", [["amd.com/gpu=0"], ["amd.com/gpu=1"]])],
)
def test_a_candidate_reserves_its_own_gpus_by_the_same_driver(
    tmp_path: Path, driver: str, id: str, expected: list[list[str]]
) -> None:
    rest = RESERVED % f"{{driver: {driver}, device_ids: [{id!r}], capabilities: [gpu]}}"
    made = composed(one(tmp_path, "gpu_count: 1", rest, present=TWO_AMD))["services"]
    reserved = [each["deploy"]["resources"]["reservations"]["devices"] for each in made.values()]
    assert [[device["device_ids"] for device in each] for each in reserved] == [[ids] for ids in expected]
    assert {device["driver"] for each in reserved for device in each} == {driver}


def test_on_other_hosts_it_has_the_gpus_there_by_their_files(tmp_path: Path) -> None:
    there = Machine(tuple(dict.fromkeys(TWO_AMD.values())), 64 * GIB, "10.0.0.1")
    found = one(tmp_path, "hosts: [a]", "devices: [/dev/kfd, /dev/dri/renderD128]", hosts={"a": there})
    assert places(found) == {"m.a": "a/amd1"}
    assert composed(found, "a")["services"]["m.a"]["devices"] == ["/dev/kfd", "/dev/dri/renderD128"]


def test_a_process_sees_its_own_gpus_alone(tmp_path: Path) -> None:
    top = "runtime: process"
    found = one(tmp_path, "gpu_count: 1", "command: [x]", top, present=TWO_AMD)
    shown = [dict(each.service.environment) for each in found.backends]
    assert shown == [{"ROCR_VISIBLE_DEVICES": "0"}, {"ROCR_VISIBLE_DEVICES": "1"}]


@pytest.mark.parametrize(
    ("rest", "warning"),
    [
        ("devices: [/dev/kfd]", "has /dev/kfd without /dev/dri"),
        (ROCM + ", user: '1000'", "runs as 1000, who may not open /dev/dri; add group_add: [video, render]"),
        (
            "devices: [/dev/dri/renderD200]",
            'none of them is known here; say which: x-anvil: {gpus: ["amd0"]}',
        ),
    ],
)
def test_what_it_lacks_is_a_warning(tmp_path: Path, rest: str, warning: str) -> None:
    [found] = one(tmp_path, "", rest, present=TWO_AMD).warnings
    assert warning in found


@pytest.mark.parametrize("rest", [ROCM, ROCM + ", user: root", ROCM + ", user: '1000', group_add: [video]"])
def test_a_service_with_all_it_needs_has_no_warning(tmp_path: Path, rest: str) -> None:
    assert one(tmp_path, "", rest, present=TWO_AMD).warnings == ()


def test_what_is_frozen_keeps_the_memory_of_these_gpus_too(tmp_path: Path) -> None:
    [problem] = problems(tmp_path, "evict_to: [freeze, stop]", ROCM, present=TWO_AMD)
    assert "what is frozen keeps its GPU memory" in problem


def test_a_file_by_its_path_keeps_its_colons() -> None:
    node = "/dev/dri/by-path/pci-0000:03:00.0-render"
    for written in (node, f"{node}:/dev/dri/renderD128", {"source": node}):
        assert service.by_files({"devices": [written]}, {}) == GivenGpus(("amd", "intel"), (node,))


@pytest.mark.parametrize(
    ("environment", "own", "expected", "written"),
    [
        ("HIP_VISIBLE_DEVICES: '1'", "", ("amd1",), {"ROCR_VISIBLE_DEVICES": "1"}),
        ("ROCR_VISIBLE_DEVICES: '1'", "", ("amd1",), {"ROCR_VISIBLE_DEVICES": "1"}),
        ("CUDA_VISIBLE_DEVICES: '1'", "", ("amd1",), {"ROCR_VISIBLE_DEVICES": "1"}),
        ("GPU_DEVICE_ORDINAL: '1'", "", ("amd1",), {"ROCR_VISIBLE_DEVICES": "1"}),
        (
            "ROCR_VISIBLE_DEVICES: '1,0', HIP_VISIBLE_DEVICES: '0'",
            "",
            ("amd1",),
            {"ROCR_VISIBLE_DEVICES": "1"},
        ),
        ("HIP_VISIBLE_DEVICES: '0'", "gpus: [amd1]", ("amd1",), {"ROCR_VISIBLE_DEVICES": "1"}),
        ("", "", ("amd0", "amd1"), {"ROCR_VISIBLE_DEVICES": "0,1"}),
        ("HIP_VISIBLE_DEVICES: GPU-deadbeef", "", ("amd0", "amd1"), {"ROCR_VISIBLE_DEVICES": "0,1"}),
    ],
)
def test_a_process_has_the_amd_gpus_that_its_variables_leave(
    tmp_path: Path, environment: str, own: str, expected: tuple[str, ...], written: dict[str, str]
) -> None:
    rest = f"command: [x], environment: {{{environment}}}"
    (backend,) = one(tmp_path, own, rest, "runtime: process", present=TWO_AMD).backends
    assert (backend.gpus, dict(backend.service.environment)) == (expected, written)


def test_a_process_has_the_intel_gpus_of_its_mask(tmp_path: Path) -> None:
    there = card("intel0", 128) | card("intel1", 129)
    order = {"ZE_ENABLE_PCI_ID_DEVICE_ORDER": "1"}
    for rest, own, mask in (
        ("environment: {ZE_AFFINITY_MASK: '1.0'}", "", "1"),
        ("environment: {ONEAPI_DEVICE_SELECTOR: 'level_zero:0'}", "gpus: [intel1]", "1"),
        ("", "", "0,1"),
    ):
        found = one(tmp_path, own, f"command: [x], {rest}", "runtime: process", present=there)
        (backend,) = found.backends
        assert dict(backend.service.environment) == order | {"ZE_AFFINITY_MASK": mask}
        assert backend.gpus == tuple(f"intel{number}" for number in mask.split(","))


def test_a_container_is_given_only_the_amd_gpu_that_its_settings_name(tmp_path: Path) -> None:
    made = composed(one(tmp_path, "gpus: [amd1]", ROCM, present=TWO_AMD))["services"]["m"]
    assert made["devices"] == ["/dev/kfd", "/dev/dri/renderD128"]
    unknown = one(tmp_path, "gpus: [amd1]", ROCM, "gpus: {amd0: {vram: 8GiB}, amd1: {vram: 8GiB}}")
    made = composed(unknown)["services"]["m"]
    assert made["environment"] == {"ROCR_VISIBLE_DEVICES": "1"}
