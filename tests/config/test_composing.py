"""Services described anew, each for a host and the GPUs that it has there."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from anvil_mux.config import grants, interpolate, service
from anvil_mux.config.compose import run_compose
from anvil_mux.config.config import Backend, Config
from anvil_mux.config.machines import Gpu, Machine
from anvil_mux.errors import ConfigError
from anvil_mux.host.seam import HostConfig
from anvil_mux.plugins import load
from tests.config.files import GIB, plain
from tests.config.test_compose import has_compose
from tests.config.test_hosts import AB, ONE_HERE, RESERVED, TWO_HERE, composed, machine, one, places, problems

# How they are described anew


def test_what_is_as_compose_has_it_is_not_described_anew(tmp_path: Path) -> None:
    found = one(tmp_path, "hosts: [local, b], gpus: ['0']", "gpus: [{device_ids: ['0']}]", hosts=AB)
    assert [each.service_name for each in found.backends] == ["m", "m.b"]
    assert list(found.generated_compose) == ["b"]
    alone = one(tmp_path, "gpus: ['0']", "gpus: [{device_ids: ['0']}]")
    assert found.backends[0].service.digest == alone.backends[0].service.digest


WIDER = [
    ("gpus: all", "gpus: ['1']"),
    ("gpus: [{count: 1}]", "gpus: ['1']"),
    ("gpus: all, environment: {CUDA_VISIBLE_DEVICES: '1'}", ""),
    ("gpus: all, environment: {CUDA_VISIBLE_DEVICES: '0'}", "gpus: ['1']"),
    ("gpus: [{device_ids: ['0', '1']}], environment: {CUDA_VISIBLE_DEVICES: '1'}", ""),
    ("deploy: {resources: {reservations: {devices: [{count: all, capabilities: [gpu]}]}}}", "gpus: ['1']"),
    ("runtime: nvidia", "gpus: ['1']"),
    ("runtime: nvidia, environment: {NVIDIA_VISIBLE_DEVICES: all}", "gpus: ['1']"),
    ("devices: ['nvidia.com/gpu=all', /dev/fuse]", "gpus: ['1']"),
    ("gpus: all, scale: 2", "gpus: ['1']"),
]


@pytest.mark.parametrize(("form", "own"), WIDER)
def test_a_wider_reservation_is_narrowed_to_the_gpus_counted(tmp_path: Path, form: str, own: str) -> None:
    found = one(tmp_path, own, form, present=TWO_HERE)
    assert {(each.service_name, each.gpus) for each in found.backends} == {("m", ("1",))}
    made = composed(found)["services"]["m"]
    assert given({"runtime": "nvidia" if "runtime" in form else None, **made}) == ("1",)
    assert not {"image", "ports", "scale"} & made.keys()
    assert "CUDA_VISIBLE_DEVICES" not in (made.get("environment") or ())


@pytest.mark.parametrize(
    ("form", "own", "there"),
    [
        ("gpus: all", "", TWO_HERE),
        ("gpus: all", "gpus: ['0']", ONE_HERE),
        ("gpus: [{device_ids: [GPU-x]}]", "gpus: ['0']", TWO_HERE),
        ("gpus: [{device_ids: ['1', '0']}]", "gpus: ['0', '1']", TWO_HERE),
        ("runtime: nvidia, environment: {NVIDIA_VISIBLE_DEVICES: '1'}", "", TWO_HERE),
    ],
)
def test_a_reservation_of_the_very_gpus_is_kept(
    tmp_path: Path, form: str, own: str, there: dict[str, Gpu]
) -> None:
    assert one(tmp_path, own, form, present=there).generated_compose == {}


@pytest.mark.parametrize(
    "form", ["gpus: all", "gpus: [{device_ids: ['1']}]", "runtime: nvidia", "devices: ['nvidia.com/gpu=all']"]
)
def test_gpus_that_are_names_of_the_file_change_nothing_of_what_a_service_reserves(
    tmp_path: Path, form: str
) -> None:
    found = one(tmp_path, "gpus: [turns-1]", form, "gpus: [turns-1, '0']", present=TWO_HERE)
    assert [each.gpus for each in found.backends] == [("turns-1",)]
    assert not found.generated_compose


def test_gpus_that_are_names_change_nothing_of_what_a_service_elsewhere_reserves(tmp_path: Path) -> None:
    found = one(tmp_path, "hosts: [b], gpus: [turns-1]", "gpus: all", "gpus: [turns-1]", hosts=AB)
    assert given(composed(found, "b")["services"]["m.b"]) == "all"


def test_all_gpus_are_written_out_where_it_is_not_known_which_there_are(tmp_path: Path) -> None:
    found = one(tmp_path, "", "gpus: all", "gpus: ['0', '1']")
    assert given(composed(found)["services"]["m"]) == ("0", "1")


def test_a_gpu_that_compose_would_not_give_is_written_into_its_service(tmp_path: Path) -> None:
    found = one(tmp_path, "", RESERVED, "gpus: ['3']", present={"0": Gpu("0"), "3": Gpu("3")})
    (backend,) = found.backends
    assert (backend.name, backend.service_name, backend.gpus) == ("m", "m", ("3",))
    assert given(composed(found)["services"]["m"]) == ("3",)


def given(made: Mapping[str, Any]) -> str | tuple[str, ...] | None:
    """The GPUs that Docker gives to a service, as it is described."""
    return grants.of_container(made, made.get("environment") or {})


FORMS = [
    "deploy: {resources: {reservations: {devices: [{driver: nvidia, count: 1, capabilities: [gpu]}]}}}",
    "deploy: {resources: {reservations: {devices: [{device_ids: ['0'], capabilities: [gpu, utility]}]}}}",
    "gpus: all",
    "gpus: [{driver: nvidia, count: 1, options: {a: b}}]",
    "runtime: nvidia, environment: {NVIDIA_VISIBLE_DEVICES: all}",
    "runtime: nvidia",
    "deploy: {resources: {reservations: {devices: [{driver: cdi, device_ids: [nvidia.com/gpu=0], "
    "capabilities: [gpu]}]}}}",
    "gpus: all, environment: {CUDA_VISIBLE_DEVICES: '0'}",
    "devices: ['nvidia.com/gpu=0', /dev/fuse]",
    "devices: [{source: nvidia.com/gpu=all, target: nvidia.com/gpu=all}]",
]


@pytest.mark.parametrize("form", FORMS)
def test_each_has_its_gpus_in_whichever_form_the_service_reserves_them(tmp_path: Path, form: str) -> None:
    found = one(tmp_path, "hosts: [local, b], gpu_count: 1", form, hosts=AB, present=TWO_HERE)
    for backend in found.backends:
        made = composed(found, backend.host)["services"][backend.name]
        assert given(made) == backend.gpus
        by_runtime = {"NVIDIA_VISIBLE_DEVICES"} if "runtime" in form else set()
        assert {name for name in made["environment"] if "VISIBLE_DEVICES" in name} == by_runtime
        assert ("runtime" in made) == ("runtime" in form)
        assert bool(service.gpus_by(made)) != ("runtime" in form), "Podman ignores reservations"
        assert ("/dev/fuse" in made.get("devices", ())) == ("/dev/fuse" in form)
    if "options" in form:
        (device,) = service.reserved_devices(made)
        reserved = {"device_ids": ["1"], "capabilities": ["gpu"]}
        assert device == {"driver": "nvidia", "options": {"a": "b"}, **reserved}


def test_other_devices_stay_reserved(tmp_path: Path) -> None:
    devices = "[{capabilities: [tpu], count: 1}, {capabilities: [gpu], count: 1}]"
    rest = f"deploy: {{replicas: 1, resources: {{reservations: {{memory: 1g, devices: {devices}}}}}}}"
    made = composed(one(tmp_path, "hosts: b", rest, hosts=AB), "b")["services"]["m.b.0"]
    assert made["deploy"] == {
        "resources": {
            "reservations": {
                "memory": "1g",
                "devices": [
                    {"capabilities": ["tpu"], "count": 1},
                    {"device_ids": ["0"], "capabilities": ["gpu"]},
                ],
            }
        }
    }


def test_what_reserves_no_gpu_gets_none(tmp_path: Path) -> None:
    found = one(tmp_path, "hosts: b, gpu_count: 1", "environment: {CUDA_VISIBLE_DEVICES: 7}", hosts=AB)
    assert any("m: `x-anvil` names GPU 0, but the service reserves none" in text for text in found.warnings)
    made = composed(found, "b")["services"]["m.b.1"]
    assert (given(made), made["environment"]) == (None, {"CUDA_VISIBLE_DEVICES": "1"})


@pytest.mark.parametrize(
    ("own", "ports", "expected"),
    [
        ("hosts: b", "['80']", [("80", "10.0.0.2", None)]),
        ("hosts: b", "['127.0.0.1:8000:80']", [("80", "10.0.0.2", "8000")]),
        ("hosts: b, gpu_count: 1", "['127.0.0.1:8000:80']", [("80", "10.0.0.2", None)]),
        (
            "hosts: b, port: 80",
            "['8000:80', '127.0.0.1:8001:81', '9:9/udp']",
            [("80", "10.0.0.2", "8000"), ("81", "127.0.0.1", "8001"), "9:9/udp"],
        ),
        ("hosts: b, port: 81", "[]", [("81", "10.0.0.2", None)]),
        ("gpu_count: 1", "['8000:80']", [("80", "127.0.0.1", None)]),
    ],
)
def test_engines_are_published_on_the_address_of_their_host(
    tmp_path: Path, own: str, ports: str, expected: list[Any]
) -> None:
    text = f"services: {{m: {{image: x, ports: {ports}, x-anvil: {{{own}}}}}}}"
    found = plain(tmp_path, text, hosts=AB, present=TWO_HERE)
    (host,) = found.generated_compose
    made = composed(found, host)["services"][found.backends[0].name]
    assert expected == [
        each if isinstance(each, str) else (str(each["target"]), each["host_ip"], each.get("published"))
        for each in made["ports"]
    ]


def test_on_the_network_of_its_host_nothing_is_published(tmp_path: Path) -> None:
    text = "services: {m: {image: x, network_mode: host, x-anvil: {hosts: b, port: 5}}}"
    made = composed(plain(tmp_path, text, hosts=AB), "b")["services"]["m.b"]
    assert ("ports" in made, made["network_mode"]) == (False, "host")


WHOLE = """
services:
  m:
    build: .
    container_name: one
    profiles: [llm]
    command: [x, "$$HOME"]
    environment: [A=1, HOME, NOT_SET]
    labels: {anvil.ttl: 5m, theirs: "1"}
    depends_on: [redis]
    ports: ["127.0.0.1::80"]
    volumes: [models:/m, ./here:/h:ro, ~/there:/t, /abs:/a, {type: bind, source: x, target: /x}, /data]
    networks: [inner]
    secrets: [token]
    x-anvil: {hosts: [local, b], gpu_count: 1}
    x-other: 3
  redis: {image: redis, volumes: [other:/o]}
volumes: {models: {name: shared}, other: }
networks: {inner: {driver: bridge}, default: {}}
secrets: {token: {file: ./t}, more: {file: ./m}}
"""


def test_a_service_elsewhere_has_all_that_it_needs_and_nothing_of_this_machine(tmp_path: Path) -> None:
    found = plain(tmp_path, f"name: p\n{WHOLE}", hosts=AB, present=TWO_HERE, environ={"HOME": "/home/u"})
    home = os.path.expanduser("~")
    text = composed(found, "b")
    assert text == {
        "services": {name: text["services"]["m.b.0"] | _of_gpu(text, name) for name in ("m.b.0", "m.b.1")},
        "volumes": {"models": {"name": "shared"}},
        "networks": {"inner": {"driver": "bridge"}},
        "secrets": {"token": {"file": f"{tmp_path}/t"}},
    }
    assert text["services"]["m.b.0"] == {
        "image": "p-m",
        "profiles": ["llm"],
        "command": ["x", "$HOME"],
        "environment": {"A": "1", "HOME": "/home/u"},
        "labels": {"theirs": "1"},
        "ports": [{"target": 80, "protocol": "tcp", "host_ip": "10.0.0.2"}],
        "volumes": [
            *("models:/m", f"{tmp_path}/here:/h:ro", f"{home}/there:/t", "/abs:/a"),
            *({"type": "bind", "source": f"{tmp_path}/x", "target": "/x"}, "/data"),
        ],
        "networks": ["inner"],
        "secrets": ["token"],
    }
    here = composed(found)["services"]["m.0"]
    assert (here["image"], here["build"], here["depends_on"]) == ("p-m", ".", ["redis"])
    assert "container_name" not in here
    for told in (
        "depends on redis, which other hosts are not given",
        "is built, and other hosts need its image p-m",
    ):
        assert any(told in warning for warning in found.warnings)


def _of_gpu(text: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The part of a description that may differ between candidates of one host."""
    return {key: value for key, value in text["services"][name].items() if key == "deploy"}


def test_a_candidate_has_the_digest_of_its_own_description(tmp_path: Path) -> None:
    own, rest = "hosts: [a, b], gpu_count: 1", RESERVED
    found = {each.name: each.service.digest for each in one(tmp_path, own, rest, hosts=AB).backends}
    assert found["m.a.0"] == found["m.b.0"] != found["m.a.1"]
    for other in (f"{rest}, tty: true", "gpus: [{count: 1, driver: nvidia}]"):
        assert one(tmp_path, own, other, hosts=AB).backends[0].service.digest != found["m.a.0"]
    moved = {**AB, "a": machine(address="10.0.0.9")}
    assert one(tmp_path, own, rest, hosts=moved).backends[0].service.digest == found["m.a.0"]
    assert one(tmp_path, f"{own}, ttl: 5m", rest, hosts=AB).backends[0].service.digest == found["m.a.0"]


def test_a_host_gets_its_own_file_and_backends(tmp_path: Path) -> None:
    found = one(tmp_path, "hosts: [local, b], gpus: ['0']", hosts=AB)
    there = HostConfig.of(found, "b")
    assert (there.files, [each.name for each in there.backends]) == ((), ["m.b"])
    assert list(json.loads(there.generated_compose)["services"]) == ["m.b"]
    assert HostConfig.of(found).generated_compose == ""


PROCESS = "runtime: process"
CUDA = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


@pytest.mark.parametrize(
    ("own", "environment", "expected"),
    [
        ("gpus: ['1']", "", CUDA | {"CUDA_VISIBLE_DEVICES": "1"}),
        ("gpus: [GPU-x]", "", CUDA | {"CUDA_VISIBLE_DEVICES": "0"}),
        ("gpus: ['1']", "CUDA_VISIBLE_DEVICES: '0'", CUDA | {"CUDA_VISIBLE_DEVICES": "1"}),
        ("", "CUDA_VISIBLE_DEVICES: '1'", CUDA | {"CUDA_VISIBLE_DEVICES": "1"}),
        ("", "CUDA_VISIBLE_DEVICES: GPU-x", CUDA | {"CUDA_VISIBLE_DEVICES": "0"}),
        ("", "", CUDA | {"CUDA_VISIBLE_DEVICES": "0,1"}),
        ("gpus: []", "", {"CUDA_VISIBLE_DEVICES": ""}),
        ("", "CUDA_VISIBLE_DEVICES: ''", {"CUDA_VISIBLE_DEVICES": ""}),
        ("gpus: [[ '0' ], ['1']]", "", CUDA | {"CUDA_VISIBLE_DEVICES": "0"}),
    ],
)
def test_a_process_sees_the_gpus_counted_in_the_order_of_their_numbers(
    tmp_path: Path, own: str, environment: str, expected: dict[str, str]
) -> None:
    rest = f"command: x --port $$PORT, environment: {{{environment}}}"
    rest += ", scale: 2" if "[[" in own else ""
    found = one(tmp_path, own, rest, PROCESS, present=TWO_HERE)
    assert dict(found.backends[0].service.environment) == expected


def test_a_process_that_says_nothing_is_limited_as_anvil_mux_is(tmp_path: Path) -> None:
    environ = {"CUDA_VISIBLE_DEVICES": "1"}
    (backend,) = one(tmp_path, "", "command: x", PROCESS, present=TWO_HERE, environ=environ).backends
    assert (backend.gpus, dict(backend.service.environment)) == (("1",), CUDA | environ)


def test_slots_that_cuda_does_not_know_are_not_written_for_it(tmp_path: Path) -> None:
    rest = "command: x, environment: {CUDA_VISIBLE_DEVICES: '0'}"
    (backend,) = one(tmp_path, "gpus: [fast]", rest, f"{PROCESS}, gpus: [fast, slow]").backends
    assert dict(backend.service.environment) == {"CUDA_VISIBLE_DEVICES": "0"}


@pytest.mark.parametrize(
    ("top", "rest", "is_refused"),
    [
        (PROCESS, "command: x, environment: {CUDA_DEVICE_ORDER: FASTEST_FIRST}", True),
        (PROCESS, "command: x, environment: {CUDA_DEVICE_ORDER: PCI_BUS_ID}", False),
        (
            PROCESS,
            "command: x, environment: {CUDA_DEVICE_ORDER: FASTEST_FIRST, CUDA_VISIBLE_DEVICES: GPU-x}",
            False,
        ),
        (
            "",
            "gpus: all, environment: {CUDA_DEVICE_ORDER: FASTEST_FIRST, CUDA_VISIBLE_DEVICES: '1'}",
            True,
        ),
        ("", "gpus: [{device_ids: ['1']}], environment: {CUDA_DEVICE_ORDER: FASTEST_FIRST}", False),
    ],
)
def test_another_order_of_cuda_is_refused_where_gpus_go_by_number(
    tmp_path: Path, top: str, rest: str, is_refused: bool
) -> None:
    if not is_refused:
        assert one(tmp_path, "", rest, top, present=TWO_HERE)
        return
    (problem,) = problems(tmp_path, "", rest, top, present=TWO_HERE)
    assert "environment.CUDA_DEVICE_ORDER: must be PCI_BUS_ID, not FASTEST_FIRST" in problem


def test_processes_see_the_gpus_of_their_candidate_alone(tmp_path: Path) -> None:
    top, rest = "runtime: process", "command: x --port $$PORT, environment: {A: b}"
    found = one(tmp_path, "hosts: [local, b], gpu_count: 1", rest, top, hosts=AB, present=ONE_HERE)
    seen = {each.name: dict(each.service.environment) for each in found.backends}
    visible = {name: each["CUDA_VISIBLE_DEVICES"] for name, each in seen.items()}
    assert visible == {"m": "0", "m.b.0": "0", "m.b.1": "1"}
    assert all(each["A"] == "b" for each in seen.values())
    assert found.generated_compose == {}
    assert [each.service.working_dir for each in found.backends] == [None, str(tmp_path), str(tmp_path)]


# Whatever is written


def drawn(draw: random.Random) -> tuple[str, dict[str, Machine], dict[str, Gpu], str]:
    """A file, a cluster, the GPUs of this machine, and the runtime."""
    names = draw.sample(["a", "b", "gpu-c", "d_1"], draw.randrange(1, 5))
    hosts = {
        name: machine(
            draw.randrange(5),
            vram=draw.choice([None, 8 * GIB, 24 * GIB]),
            address=f"10.0.0.{index + 1}",
            zone=draw.choice("xy"),
        )
        for index, name in enumerate(names)
    }
    present = {str(index): Gpu(str(index), 24 * GIB) for index in range(draw.randrange(4))}
    wanted = ["any", "{zone: x}", "{zone: z}", "[a, b]", "[local, gpu-c]", "[gone]", "local"]
    reserved = ["", RESERVED, "gpus: [{count: 2}]", "gpus: [{device_ids: ['0']}]", FORMS[4], FORMS[6]]
    services = {}
    for index in range(draw.randrange(1, 4)):
        own = [f"hosts: {draw.choice(wanted)}"] if draw.random() < 0.8 else []
        own += draw.choice([[], ["gpu_count: 1"], ["gpu_count: 2"], ["gpus: ['0', '1']"]])
        own += draw.choice([[], ["vram: 10GiB"]])
        rest = draw.choice(reserved)
        services[f"s{index}"] = (
            f"{{image: x, command: [x], ports: ['8{index}:80'], x-anvil: {{{', '.join(own)}}}, {rest}}}"
        )
    runtime = draw.choice(["compose", "compose", "process"])
    text = "".join(f"  {name}: {about}\n" for name, about in services.items())
    return f"x-anvil: {{runtime: {runtime}}}\nservices:\n{text}", hosts, present, runtime


TOO_FEW = re.compile("fits nowhere|do not fit on|are needed|that 10.0 GiB fit|uses all GPUs; say which")


@pytest.mark.parametrize("seed", range(300))
def test_whatever_is_written_each_backend_has_gpus_of_its_own_host(tmp_path: Path, seed: int) -> None:
    text, hosts, present, runtime = drawn(random.Random(seed))
    try:
        found = plain(tmp_path, text, hosts=hosts, present=present)
    except ConfigError as error:
        unexpected = [text for text in error.problems if not TOO_FEW.search(text)]
        if not unexpected:
            return
        raise
    names = [each.name for each in found.backends]
    assert len(names) == len(set(names))
    assert {each.model for each in found.backends} == {f"s{index}" for index in range(text.count("image: x"))}
    known = {gpu.name for gpu in found.gpus}
    for backend in found.backends:
        assert set(backend.gpu_names) <= known
        if backend.host in hosts:
            missing = {gpu.id for gpu in found.gpus if gpu.host == backend.host and gpu.missing}
            assert set(backend.gpus) <= {gpu.id for gpu in hosts[backend.host].gpus} | missing
    assert found.generated_compose == {} or runtime == "compose"
    here = {each.service_name: each for each in found.backends if not each.host and runtime == "compose"}
    written = yaml.safe_load(text)["services"]
    overrides = composed(found)["services"] if "" in found.generated_compose else {}
    for name, backend in here.items():
        made = {**written.get(name, {}), **overrides.get(name, {})}
        assert given(made) in (None, backend.gpus) or (given(made) == "all" and backend.gpus == (*present,))
    for host in found.generated_compose:
        check_file(found, host)


def check_file(config: Config, host: str) -> None:
    """Each service of the file is a backend of the host, with its GPUs and no others."""
    of_service = {each.service_name: each for each in config.backends if each.host == host}
    services = composed(config, host)["services"]
    assert set(services) <= set(of_service)
    assert not host or set(services) == set(of_service)
    address = "127.0.0.1" if not host else None
    for name, made in services.items():
        backend: Backend = of_service[name]
        assert given(made) in (None, backend.gpus)
        for port in made.get("ports", ()):
            assert port["host_ip"] == address or (host and port["host_ip"].startswith("10.0.0."))


def test_a_large_cluster_has_each_backend_once(tmp_path: Path) -> None:
    hosts = {f"h{index}": machine(8, address=f"10.0.0.{index}") for index in range(25)}
    text = "".join(
        f"  m{index}: {{ports: ['80'], {RESERVED}, x-anvil: {{hosts: any}}}}\n" for index in range(8)
    )
    found = plain(tmp_path, f"services:\n{text}", hosts=hosts)
    assert len({each.name for each in found.backends}) == 8 * 25 * 8
    assert len(found.gpus) == 25 * 8
    assert len(found.warnings) == 1, "that they have no profile"


# What Compose makes of it


@pytest.mark.skipif(not has_compose(), reason="needs the Docker Compose program")
def test_compose_reads_the_files_as_they_are_meant(tmp_path: Path) -> None:
    odd = "$HOME $$ ${X} \u00e9 \u0085 \u007f \U0001f600 \" ' \\ # : {"
    content: dict[str, Any] = yaml.load(f"name: p\n{WHOLE}", interpolate.Loader)
    m = content["services"]["m"]
    m["command"] = ["x", odd.replace("$", "$$")]
    m["deploy"] = {"resources": {"reservations": {"devices": [{"count": 1, "capabilities": ["gpu"]}]}}}
    file = tmp_path / "compose.yaml"
    file.write_text(
        json.dumps(content, ensure_ascii=False).replace("\x7f", "\\u007f").replace("\x85", "\\u0085")
    )
    environ = {name: os.environ[name] for name in ("PATH", "HOME")}
    through = load([file], environ=environ, compose=run_compose, hosts=AB, present=TWO_HERE)
    plain = load([file], environ=environ, compose=None, hosts=AB, present=TWO_HERE)
    assert places(through) == places(plain)
    for config in (through, plain):
        for host, files in (("", [file]), ("b", [])):
            made = tmp_path / "composed.yaml"
            made.write_text(config.generated_compose[host])
            argv = [word for each in (*files, made) for word in ("-f", str(each))]
            argv = ["docker", "compose", *argv, "-p", "q", "--profile", "*", "config", "--format", "json"]
            done = subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=60)
            assert done.returncode == 0, done.stderr
            said = json.loads(done.stdout)
            for backend in (each for each in config.backends if each.host == host):
                described = said["services"][backend.service_name]
                assert described["command"][1].replace("$$", "$") == odd
                assert given(described) == backend.gpus
                (port,) = described["ports"]
                assert (port["target"], port["host_ip"]) == (80, "10.0.0.2" if host else "127.0.0.1")
                assert "published" not in port
                assert described["environment"] == {"A": "1", "HOME": environ["HOME"]}
                volumes = {each["target"]: each.get("source") for each in described["volumes"]}
                assert (volumes["/h"], volumes["/m"]) == (f"{tmp_path}/here", "models")
            assert said["volumes"]["models"]["name"] == "shared"
            assert said["networks"]["inner"]["name"] == "q_inner"


@pytest.mark.skipif(not has_compose(), reason="needs the Docker Compose program")
@pytest.mark.parametrize(("form", "own"), WIDER)
def test_compose_gives_the_narrowed_gpus_and_leaves_the_rest(tmp_path: Path, form: str, own: str) -> None:
    file = tmp_path / "compose.yaml"
    rest = "image: x, profiles: [llm], ports: ['127.0.0.1::80'], tmpfs: [/t]"
    (tmp_path / "more.env").write_text("CUDA_VISIBLE_DEVICES=1\nOTHER=$$x\n")
    file.write_text(f"name: p\nservices: {{m: {{{rest}, env_file: [more.env], x-anvil: {{{own}}}, {form}}}}}")
    environ = {name: os.environ[name] for name in ("PATH", "HOME")}
    config = load([file], environ=environ, compose=run_compose, present=TWO_HERE)
    made = tmp_path / "generated.yaml"
    made.write_text(config.generated_compose[""])
    argv = ["docker", "compose", "-f", str(file), "-f", str(made), "-p", "p", "--profile", "*"]
    done = subprocess.run(
        [*argv, "config", "--format", "json"], env=environ, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    (described,) = json.loads(done.stdout)["services"].values()
    assert given(described) == ("1",)
    assert ("runtime" in described) == ("runtime" in form)
    assert described["tmpfs"] == ["/t"]
    assert "CUDA_VISIBLE_DEVICES" not in described["environment"]
    assert described["environment"]["OTHER"] == "$$x"
    assert [each["host_ip"] for each in described["ports"]] == ["127.0.0.1"]


# What Compose is given later


OF_ALL_KINDS = """
name: p
x-anvil: {gpus: ["0"]}
services:
  m:
    image: x
    command: [a, "b$$$$c ${D:-$$d}", on, "1_000", "0x1"]
    environment: {E: "$$e", N: 1.50, T: true}
    volumes: ["v:/v", "far:/far"]
    networks: [inner, outer]
    secrets: [s, named]
    configs: [c]
    x-anvil: {}
volumes: {v: {}, far: {external: true, name: p_far}}
networks: {inner: {}, outer: {name: other}}
secrets: {s: {environment: SECRET}, named: {file: ./f, name: mine}}
configs: {c: {environment: CONFIG}}
"""


@pytest.mark.skipif(not has_compose(), reason="needs the Docker Compose program")
def test_files_are_kept_as_one_that_compose_reads_alike(tmp_path: Path) -> None:
    file, kept = tmp_path / "compose.yaml", tmp_path / "state" / "resolved.yaml"
    kept.parent.mkdir()
    file.write_text(OF_ALL_KINDS)
    (tmp_path / ".env").write_text("SECRET='s$x'\nOTHER=y\n")
    environ = {name: os.environ[name] for name in ("PATH", "HOME")}
    config = load([file], environ=environ, compose=run_compose)
    assert config.compose_variables == {"SECRET": "s$x"}
    assert "s$x" not in f"{config.resolved_compose}{config}"
    assert (json.loads(config.resolved_compose)["x-files"], config.files) == ([str(file)], (str(file),))
    kept.write_text(config.resolved_compose)

    def compose(*argv: str) -> Any:
        command = ["docker", "compose", *argv, "--profile", "*", "config", "--format", "json"]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return {key: value for key, value in json.loads(done.stdout).items() if not key.startswith("x-")}

    place = ["--project-directory", str(tmp_path), "--env-file", os.devnull]
    for project in ("p", "q"):
        described = compose("-f", str(kept), *place, "-p", project)
        assert described == compose("-f", str(file), "-p", project)
        assert described["volumes"]["far"]["name"] == "p_far"
        assert described["networks"]["inner"]["name"] == f"{project}_inner"


def test_files_read_without_compose_are_not_kept(tmp_path: Path) -> None:
    found = plain(tmp_path, OF_ALL_KINDS)
    assert (found.resolved_compose, found.compose_variables) == ("", {})


def test_other_hosts_are_not_given_the_files() -> None:
    config = Config((), resolved_compose="{}", compose_variables={"A": "1"})
    here, there = HostConfig.of(config), HostConfig.of(config, "b")
    assert (here.resolved_compose, here.compose_variables) == ("{}", {"A": "1"})
    assert (there.resolved_compose, there.compose_variables) == ("", {})
