"""What ``check`` says of the GPUs of this machine."""

import json
from functools import partial
from pathlib import Path

import pytest

from anvil_mux.cli.main import main
from anvil_mux.host import check, gpus
from anvil_mux.host.gpus import Gpus
from tests.cli.demo import compose
from tests.host.test_gpus import Nvml
from tests.host.trees import plant

GIB = 1 << 30


def machine(tree: str, folder: Path, monkeypatch: pytest.MonkeyPatch, nvidias: Gpus) -> None:
    """This machine has the GPUs of a tree."""
    sys, proc = plant(tree, folder)
    monkeypatch.setattr(check, "DRIVERS", (str(sys),))
    monkeypatch.setattr(gpus, "nvidia_gpus", lambda **_: nvidias)
    monkeypatch.setattr(gpus, "amd_intel_gpus", partial(gpus.amd_intel_gpus, sys, proc))
    clients = gpus.clients
    monkeypatch.setattr(gpus, "clients", lambda *_: clients(proc))


def test_check_says_what_was_found_of_each_vendor(tmp_path, monkeypatch, capsys):
    machine("arc", tmp_path, monkeypatch, gpus.nvidia_gpus(Nvml()))
    assert main(["check", str(compose(tmp_path))]) == 0
    said = capsys.readouterr().err
    assert "NVIDIA: 0 RTX 24.0 GiB, 1 RTX of unknown size (declare it: gpus: " in said
    assert "(driver 570.86.15)" in said
    assert (
        "Intel: intel0 Intel 8086:A780 32.0 GiB, 32.0 GiB of it host memory, intel1 Intel 8086:E20B 12.0"
        in said
    )
    assert "AMD: " not in said
    assert main(["check", "--json", str(compose(tmp_path))]) == 0
    found = {each["vendor"]: each for each in json.loads(capsys.readouterr().out)["gpus"]}
    assert found["AMD"] == {"vendor": "AMD", "gpus": [], "note": "no card in /sys/class/drm"}
    assert [each["total"] for each in found["Intel"]["gpus"]] == [32 * GIB, 12 * GIB, None]


def test_check_says_why_it_finds_none(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpus, "nvidia_gpus", lambda **_: Gpus(why_none="NVML: no driver"))
    monkeypatch.setattr(gpus, "amd_intel_gpus", lambda **_: Gpus(why_none="no card"))
    assert main(["check", str(compose(tmp_path))]) == 0
    assert (
        "no GPU found here: NVIDIA: NVML: no driver; AMD: no card; Intel: no card" in capsys.readouterr().err
    )


def test_check_gives_a_service_the_gpus_that_its_device_files_belong_to(tmp_path, monkeypatch, capsys):
    machine("radeon", tmp_path, monkeypatch, Gpus(why_none="none"))
    file = tmp_path / "compose.yaml"
    file.write_text(
        "services: {a: {image: x, devices: [/dev/kfd, /dev/dri/renderD128], profiles: [llm], "
        "ports: ['127.0.0.1::80'], x-anvil: {vram: 23GiB}}}"
    )
    assert main(["check", "--json", str(file)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["models"][0]["gpus"] == ["amd1"]
    file.write_text(file.read_text().replace("23GiB", "25GiB"))
    assert main(["check", str(file)]) == 78
    assert "25.0 GiB do not fit on GPU amd1, which has 24.0 GiB" in capsys.readouterr().err
