"""Services that may run on several hosts or GPUs: which backends they become, and how each is described."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from anvil_mux.config import change
from anvil_mux.config.config import SERVICE_NAME, Config
from anvil_mux.config.machines import Gpu, Machine, Wake
from anvil_mux.errors import ConfigError
from tests.config import files
from tests.config.files import GIB, plain


def machine(
    gpus: int = 2, *, vram: int | None = 24 * GIB, address: str = "10.0.0.2", **labels: str
) -> Machine:
    found = tuple(Gpu(str(index), vram) for index in range(gpus))
    return Machine(found, 100 * GIB, address, tuple(sorted(labels.items())))


AB = {"a": machine(address="10.0.0.1"), "b": machine(address="10.0.0.2")}
TWO_HERE = {"0": Gpu("0", 24 * GIB), "GPU-x": Gpu("0", 24 * GIB), "1": Gpu("1", 24 * GIB)}
ONE_HERE = {"0": Gpu("0", 24 * GIB)}


def described(own: str, rest: str = "", top: str = "") -> str:
    """A file with one service ``m``: its ``x-anvil``, and the rest of it."""
    quiet = "image: x, profiles: [llm], ports: ['127.0.0.1::80']"
    return f"x-anvil: {{{top}}}\nservices: {{m: {{{quiet}, x-anvil: {{{own}}}, {rest}}}}}"


def one(folder: Path, own: str, rest: str = "", top: str = "", **given: Any) -> Config:
    return plain(folder, described(own, rest, top), **given)


def problems(folder: Path, own: str, rest: str = "", top: str = "", **given: Any) -> list[str]:
    return files.problems(folder, described(own, rest, top), **given)


def places(config: Config) -> dict[str, str]:
    """Backend -> HOST/GPUS."""
    return {each.name: f"{each.host}/{','.join(each.gpus)}" for each in config.backends}


def composed(config: Config, host: str = "") -> dict[str, Any]:
    """The file for a host, with variables' signs as they are meant; a key that is reset is None."""
    found: dict[str, Any] = yaml.load(config.generated_compose[host].replace("$$", "$"), _Loader)
    return found


class _Loader(yaml.SafeLoader):
    """Reads what Compose overrides and resets as what it then is."""


def _tagged(loader: yaml.SafeLoader, node: yaml.Node) -> Any:
    if isinstance(node, yaml.MappingNode):
        return loader.construct_mapping(node, deep=True)
    return loader.construct_sequence(node, deep=True) if isinstance(node, yaml.SequenceNode) else None


_Loader.add_constructor("!override", _tagged)
_Loader.add_constructor("!reset", _tagged)


RESERVED = "gpus: [{count: 1}]"

# Which backends there are


@pytest.mark.parametrize(
    ("own", "rest", "expected"),
    [
        ("hosts: b", "", {"m.b": "b/"}),
        ("hosts: [a, b]", "", {"m.a": "a/", "m.b": "b/"}),
        ("hosts: [local, b], gpus: ['1']", "", {"m": "/1", "m.b": "b/1"}),
        ("hosts: [a, b], gpus: ['1']", "", {"m.a": "a/1", "m.b": "b/1"}),
        ("hosts: b, gpus: all", "", {"m.b": "b/0,1"}),
        ("hosts: b, gpu_count: 1", "", {"m.b.0": "b/0", "m.b.1": "b/1"}),
        ("hosts: b, gpu_count: 2", "", {"m.b.0-1": "b/0,1"}),
        ("hosts: b", RESERVED, {"m.b.0": "b/0", "m.b.1": "b/1"}),
        ("hosts: any", "", {"m": "/", "m.a": "a/", "m.b": "b/"}),
        ("hosts: any, gpus: ['1']", "", {"m": "/1", "m.a": "a/1", "m.b": "b/1"}),
        ("hosts: any, gpu_count: 2", "", {"m": "/0,1", "m.a.0-1": "a/0,1", "m.b.0-1": "b/0,1"}),
        ("hosts: {zone: x}", "", {"m.b": "b/"}),
        ("gpu_count: 1", "", {"m.0": "/0", "m.1": "/1"}),
        ("", RESERVED, {"m.0": "/0", "m.1": "/1"}),
        ("", "gpus: [{count: 2}]", {"m": "/0,1"}),
        ("gpus: ['1']", RESERVED, {"m": "/1"}),
        ("", f"{RESERVED}, environment: {{CUDA_VISIBLE_DEVICES: 0}}", {"m": "/0"}),
        ("", f"{RESERVED}, scale: 2", {"m-1": "/0", "m-2": "/0"}),
    ],
)
def test_a_service_is_a_backend_for_each_place_where_it_may_run(
    tmp_path: Path, own: str, rest: str, expected: dict[str, str]
) -> None:
    hosts = {"a": machine(), "b": machine(zone="x")}
    assert places(one(tmp_path, own, rest, present=TWO_HERE, hosts=hosts)) == expected


def test_a_reservation_of_one_gpu_is_the_gpu_where_there_is_but_one(tmp_path: Path) -> None:
    for given in ({}, {"present": ONE_HERE}, {"top": "gpus: ['0']"}):
        found = one(tmp_path, "", RESERVED, **given)
        assert places(found) == {"m": "/0"}
        assert (found.generated_compose, found.backends[0].most) == ({}, None)


def test_two_models_that_reserve_one_gpu_each_may_run_side_by_side(tmp_path: Path) -> None:
    text = f"services: {{m: {{x-anvil: {{}}, {RESERVED}}}, n: {{x-anvil: {{}}, {RESERVED}}}}}"
    found = plain(tmp_path, text, present=TWO_HERE)
    assert places(found) == {"m.0": "/0", "m.1": "/1", "n.0": "/0", "n.1": "/1"}
    assert not [text for text in found.warnings if "turns" in text]


def test_any_n_gpus_are_aligned_blocks_in_the_order_of_the_gpus(tmp_path: Path) -> None:
    found = one(tmp_path, "hosts: h, gpu_count: 2", hosts={"h": machine(5)})
    assert places(found) == {"m.h.0-1": "h/0,1", "m.h.2-3": "h/2,3"}


def test_only_gpus_that_a_model_fits_are_candidates(tmp_path: Path) -> None:
    top = "gpus: {'0': {vram: 8GiB}, '1': {vram: 24GiB}, '2': {vram: 24GiB, reserve: 20GiB}}"
    found = one(tmp_path, "gpu_count: 1, vram: 10GiB", RESERVED, top)
    assert (places(found), found.warnings) == ({"m": "/1"}, ())


def test_any_leaves_out_this_machine_where_it_has_no_gpu_for_the_model(tmp_path: Path) -> None:
    assert places(one(tmp_path, "hosts: any, gpu_count: 1", hosts=AB)).keys() == {
        *("m.a.0", "m.a.1", "m.b.0", "m.b.1")
    }
    found = one(tmp_path, "hosts: any, gpus: ['1']", hosts=AB, present=ONE_HERE)
    assert (places(found).keys(), found.warnings) == (
        {"m.a", "m.b"},
        tuple(text for text in found.warnings if "reserves none" in text),
    )


def test_the_uuid_of_a_gpu_of_this_machine_is_its_id(tmp_path: Path) -> None:
    found = one(tmp_path, "hosts: [local, b], gpus: [GPU-x]", present=TWO_HERE, hosts=AB)
    assert places(found) == {"m": "/0"}
    assert any("b has no GPU GPU-x; it has 0, 1" in text for text in found.warnings)


UUIDS = {
    "0": Gpu("0", 24 * GIB),
    "GPU-15a2-52": Gpu("0", 24 * GIB),
    "1": Gpu("1", 24 * GIB),
    "GPU-15b3-77": Gpu("1", 24 * GIB),
}


@pytest.mark.parametrize(
    ("named", "expected"), [("GPU-15a", "0"), ("GPU-15b3-77", "1"), ("GPU-15", "GPU-15")]
)
def test_a_uuid_may_be_abbreviated_while_it_is_that_of_one_gpu(
    tmp_path: Path, named: str, expected: str
) -> None:
    found = one(tmp_path, "", f"command: [x], environment: {{CUDA_VISIBLE_DEVICES: {named}}}", present=UUIDS)
    assert places(found) == {"m": f"/{expected}"}
    unknown = [text for text in found.warnings if "this machine has no GPU GPU-15; it has 0, 1" in text]
    assert len(unknown) == (expected not in "01")


def test_labels_must_all_match(tmp_path: Path) -> None:
    hosts = {"a": machine(zone="x"), "b": machine(zone="x", rack="1"), "c": machine(rack="1")}
    assert places(one(tmp_path, "hosts: {zone: x, rack: 1}", hosts=hosts)).keys() == {"m.b"}


def test_names_are_those_that_files_and_compose_take(tmp_path: Path) -> None:
    found = one(tmp_path, "gpu_count: 1", top='gpus: ["MIG:0/1", "1"]')
    assert places(found) == {"m.MIG_0_1": "/MIG:0/1", "m.1": "/1"}
    assert all(SERVICE_NAME.fullmatch(each.service_name) for each in found.backends)


# How many are loaded at once


@pytest.mark.parametrize(
    ("own", "expected"), [("hosts: any", 1), ("hosts: any, most: 2", 2), ("gpu_count: 1, most: 3", 3)]
)
def test_one_is_loaded_at_a_time_unless_most_says_more(tmp_path: Path, own: str, expected: int) -> None:
    found = one(tmp_path, own, hosts=AB, present=TWO_HERE)
    assert {each.most for each in found.backends} == {expected}
    assert {each.model for each in found.backends} == {"m"}


def test_most_is_what_all_services_of_a_model_have_together(tmp_path: Path) -> None:
    text = """services:
      one: {x-anvil: {model: m, gpu_count: 1, most: 2}}
      two: {x-anvil: {model: m, gpu_count: 1}}
      three: {x-anvil: {model: m, gpus: ["0"]}}
      other: {x-anvil: {gpus: ["0"]}}
    """
    found = plain(tmp_path, text, present=TWO_HERE)
    assert {each.most for each in found.backends if each.model == "m"} == {4}
    assert found.backends[-1].most is None


def test_each_stage_of_a_model_has_its_own_most(tmp_path: Path) -> None:
    text = """services:
      one: {x-anvil: {model: m, gpu_count: 1, infer_type: prefill}}
      two: {x-anvil: {model: m, gpu_count: 1, infer_type: decode, most: 2}}
    """
    found = plain(tmp_path, text, present=TWO_HERE)
    assert [(each.infer_type, each.most) for each in found.backends] == [
        *[("prefill", 1)] * 2,
        *[("decode", 2)] * 2,
    ]


# What is wrong


@pytest.mark.parametrize(
    ("own", "rest", "expected"),
    [
        ("most: 2", "", "services.m.x-anvil.most: has nothing to choose among: name hosts"),
        ("gpu_count: 1, gpus: ['0']", "", "gpu_count: and gpus are both given"),
        ("gpu_count: 0", "", "gpu_count: must be a whole number of at least 1"),
        ("hosts: []", "", "services.m.x-anvil.hosts: must name a host, or any, or {label: value}"),
        ("hosts: {}", "", "services.m.x-anvil.hosts: must name a host, or any, or {label: value}"),
        ("hosts: [any, b]", "", "hosts: any means every host, so it is written alone"),
        ("hosts: [A.b]", "", "hosts: a host's name may hold lower-case letters, digits, - and _, not 'A.b'"),
        ("hosts: any", "scale: 2", "services.m: is scaled, and has x-anvil.hosts: say with most how many"),
        ("gpu_count: 1", "deploy: {replicas: 2}", "services.m: is scaled, and has x-anvil.gpu_count"),
        ("hosts: a, gpus: [['0']]", "", "services.m: is scaled, and has x-anvil.hosts"),
        ("gpus: [a/0, b/0]", "", "gpus: asks for GPUs of a and b: an engine runs on one host, which `hosts`"),
        ("gpus: [['0'], [a/1]]", "", "services.m.x-anvil.gpus: asks for GPUs of a: an engine runs on one"),
        ("hosts: b", "network_mode: 'service:x'", "services.m.network_mode: shares what only the host"),
    ],
)
def test_what_cannot_be_chosen_is_told_with_its_key(
    tmp_path: Path, own: str, rest: str, expected: str
) -> None:
    found = problems(tmp_path, own, rest, hosts=AB, present=TWO_HERE)
    assert len(found) == 1, found
    assert found[0].startswith("compose.yaml:2: ")
    assert expected in found[0]


DECLARED = "gpus: ['0', '1'], machines: {a: {gpus: ['0', '1']}, b: {gpus: ['0', '1']}}"


@pytest.mark.parametrize(
    ("own", "rest", "expected", "candidates"),
    [
        ("gpu_count: 3", "", "this machine has 2 GPUs, and 3 are needed", {"m": "/0,1,2"}),
        ("", "gpus: [{count: 3}]", "gpu_count: cannot be loaded now: this machine", {"m": "/0,1,2"}),
        ("gpu_count: 1, vram: 30GiB", "", "this machine has no GPU that 30.0 GiB fit", {"m": "/2"}),
        ("hosts: b, gpu_count: 3", "", "b has 2 GPUs, and 3 are needed", {"m.b.0-1-2": "b/0,1,2"}),
        (
            "hosts: [a, b], gpu_count: 3",
            "",
            "a has 2 GPUs, and 3 are needed, b has 2 GPUs",
            {"m.a.0-1-2": "a/0,1,2", "m.b.0-1-2": "b/0,1,2"},
        ),
        ("hosts: b, gpus: ['5']", "", "b has no GPU 5; it has 0, 1", {"m.b": "b/5"}),
    ],
)
def test_a_gpu_that_is_not_there_is_a_problem_of_its_service_alone(
    tmp_path: Path, own: str, rest: str, expected: str, candidates: dict[str, str]
) -> None:
    """Unless the file says which GPUs there are: then it contradicts itself."""
    found = one(tmp_path, own, rest, hosts=AB, present=TWO_HERE)
    assert places(found) == candidates
    (warning,) = [text for text in found.warnings if expected in text]
    assert "cannot be loaded now: " in warning
    assert any(gpu.missing for gpu in found.gpus)
    (problem,) = problems(tmp_path, own, rest, DECLARED, hosts=AB, present=TWO_HERE)
    assert problem.startswith("compose.yaml:2: ")


def test_a_host_without_a_driver_keeps_its_models_and_the_others_run(tmp_path: Path) -> None:
    text = "services: {m: {x-anvil: {hosts: b, gpus: all, port: 1}}, n: {x-anvil: {hosts: a, port: 1}}}"
    found = plain(tmp_path, text, hosts={**AB, "b": machine(0)})
    assert places(found) == {"m.b": "b/0", "n.a": "a/"}
    assert [gpu.missing for gpu in found.gpus if gpu.host == "b"] == ["the host b has no GPU 0; it has none"]


def test_a_gpu_is_missing_only_where_it_is_known_which_there_are(tmp_path: Path) -> None:
    for own, given in (
        ("gpus: ['7']", {}),
        ("hosts: c, gpus: ['7']", {"hosts": AB}),
        ("gpus: [MIG-7]", {"present": TWO_HERE}),
        ("gpus: ['7']", {"top": "gpus: ['7']", "present": TWO_HERE}),
    ):
        assert not [gpu for gpu in one(tmp_path, own, **given).gpus if gpu.missing], own
    (gpu,) = [gpu for gpu in one(tmp_path, "gpus: ['7']", present=TWO_HERE).gpus if gpu.id == "7"]
    assert gpu.missing == "this machine has no GPU 7; it has 0, 1"


def test_homes_on_a_missing_gpu_are_no_contradiction(tmp_path: Path) -> None:
    service = "{x-anvil: {gpus: ['7'], home: true, vram: 1GiB}}"
    assert plain(tmp_path, f"services: {{m: {service}, n: {service}}}", present=TWO_HERE)


def test_an_engine_elsewhere_needs_a_port_that_is_known(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"services.m.x-anvil: port is needed, since its engine is reached"):
        plain(tmp_path, "services: {m: {image: x, x-anvil: {hosts: b}}}", hosts=AB)


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("{local: {}}", "machines.local: is anvil-mux's own machine: its gpus and host_memory go to the top"),
        ("{any: {}}", "machines.any: any means every host"),
        ("{b: {gpu: 1}}", "machines.b.gpu: unknown key; did you mean gpus?"),
        ("{b: {gpus: {'0': {vram: x}}}}", "machines.b.gpus.0.vram: must be a size"),
        ("{b: 3}", "machines.b: must hold gpus, host_memory or wake, not 3"),
        ("[b]", "machines: must hold {host: {gpus, host_memory, wake}}"),
        ("{b: {wake: {}}}", "machines.b.wake: must hold either mac or run, as in {mac: aa:bb:cc:dd:ee:ff}"),
        ("{b: {wake: {mac: 'a', run: [b]}}}", "machines.b.wake: must hold either mac or run"),
        ("{b: {wake: {mac: aa:bb}}}", "machines.b.wake.mac: must be six bytes as in aa:bb:cc:dd:ee:ff"),
        ("{b: {wake: {run: wol}}}", "machines.b.wake.run: must be a list of words"),
        ("{b: {wake: {run: [a], timeout: 0}}}", "machines.b.wake.timeout: must be more than 0"),
        (
            "{b: {wake: {mac: 'aa:bb:cc:dd:ee:ff', broadcast: here}}}",
            "machines.b.wake.broadcast: must be an IPv4 address",
        ),
    ],
)
def test_what_is_wrong_with_a_machine_is_told_with_its_key(
    tmp_path: Path, written: str, expected: str
) -> None:
    (found,) = problems(tmp_path, "", top=f"machines: {written}")
    assert f"compose.yaml:1: x-anvil.{expected}" in found


def test_a_name_of_the_cluster_that_files_cannot_have_is_left_out(tmp_path: Path) -> None:
    found = one(tmp_path, "hosts: any", hosts={"b": machine(), "B.example": machine(), "local": machine()})
    assert places(found) == {"m": "/", "m.b": "b/"}
    assert len([text for text in found.warnings if "of the cluster is left out" in text]) == 2


def test_a_host_that_is_too_small_among_several_is_a_warning(tmp_path: Path) -> None:
    found = one(tmp_path, "hosts: [a, b], gpu_count: 4", RESERVED, hosts={"a": machine(2), "b": machine(4)})
    assert places(found) == {"m.b.0-1-2-3": "b/0,1,2,3"}
    (warning,) = found.warnings
    assert "services.m.x-anvil.hosts: fits on some hosts only: a has 2 GPUs, and 4 are needed" in warning


# Hosts that are not there


def test_without_a_cluster_the_models_are_known_and_wait(tmp_path: Path) -> None:
    text = "services: {m: {x-anvil: {hosts: b, port: 1}}, n: {x-anvil: {hosts: any, gpu_count: 1, port: 1}}}"
    found = plain(tmp_path, text)
    assert places(found) == {"m.b": "b/", "n.any.0": "any/0"}
    assert found.generated_compose == {}
    (warning,) = [text for text in found.warnings if "--cluster" in text]
    assert "services.m.x-anvil.hosts: served there once serve is started with --cluster: m, n" in warning


def test_a_host_that_is_not_in_the_cluster_is_a_warning_and_has_its_backends(tmp_path: Path) -> None:
    found = one(tmp_path, "hosts: [gpu-a, gpu-c], gpu_count: 2", RESERVED, hosts={"gpu-a": machine()})
    assert places(found) == {"m.gpu-a.0-1": "gpu-a/0,1", "m.gpu-c.0-1": "gpu-c/0,1"}
    assert list(found.generated_compose) == ["gpu-a"]
    assert Gpu("1", host="gpu-c") in found.gpus
    (warning,) = found.warnings
    said = "hosts: not in the cluster: gpu-c; m wait for that; no host of that name has answered yet"
    assert f"{said}; known hosts: gpu-a" in warning
    assert "did you mean" not in warning


@pytest.mark.parametrize(
    ("name", "known", "top", "hint"),
    [
        ("gpua", "gpu-a", "", "did you mean gpu-a?"),
        ("gppu-a", "gpu-a", "", "did you mean gpu-a?"),
        ("host2", "host1", "", ""),
        ("rack1-12", "rack1-2", "", ""),
        ("gpua", "gpu-a", "machines: {gpua: {}}", ""),
        ("beta", "alpha", "", ""),
    ],
)
def test_only_a_name_that_may_be_misspelt_has_a_hint(
    tmp_path: Path, name: str, known: str, top: str, hint: str
) -> None:
    found = one(tmp_path, f"hosts: [{name}], gpu_count: 2", RESERVED, top, hosts={known: machine()})
    (warning,) = [text for text in found.warnings if "wait for that" in text]
    assert f"known hosts: {known}" in warning
    assert ("did you mean" in warning, hint in warning) == (bool(hint), True)


def test_a_host_of_which_no_address_is_known_is_not_there_yet(tmp_path: Path) -> None:
    found = one(tmp_path, "hosts: {zone: x}, gpu_count: 1", hosts={"b": machine(address="", zone="x")})
    assert places(found) == {"m.b.0": "b/0", "m.b.1": "b/1"}
    assert found.generated_compose == {}
    assert any("not in the cluster: b; m wait for that" in text for text in found.warnings)


def test_many_hosts_that_are_not_there_are_one_warning(tmp_path: Path) -> None:
    names = ", ".join(f"h{index}" for index in range(30))
    found = one(tmp_path, f"hosts: [{names}]", RESERVED, hosts={"h0": machine()})
    (warning,) = found.warnings
    assert "not in the cluster: h1, h2, h3, h4, h5, h6, h7, h8, h9, h10 and 19 more; m wait" in warning


@pytest.mark.parametrize(
    ("own", "name"),
    [
        ("hosts: {zone: y}", "m.zone=y"),
        ("hosts: {zone: y, rack: 1}, gpu_count: 1", "m.zone=y,rack=1.0"),
        ("hosts: any, gpu_count: 4", "m.any.0-1-2-3"),
    ],
)
def test_a_condition_that_no_host_meets_is_a_host_that_is_never_there(
    tmp_path: Path, own: str, name: str
) -> None:
    found = one(tmp_path, own, hosts=AB)
    (backend,) = found.backends
    assert backend.name == name
    assert any(f"not in the cluster: {backend.host}; m wait for that" in text for text in found.warnings)


def test_a_host_that_does_not_answer_is_reported_with_the_reason(tmp_path: Path) -> None:
    silent = Machine(problem="the agent of b did not answer in 5 s")
    for hosts in ({"a": AB["a"], "b": silent}, {"b": silent}):
        found = one(tmp_path, "hosts: b, gpus: ['0']", hosts=hosts)
        assert places(found) == {"m.b": "b/0"}
        (warning,) = [text for text in found.warnings if "m wait for that" in text]
        assert "cannot be used now: b (the agent of b did not answer in 5 s)" in warning
        assert "did you mean" not in warning
        assert not found.gpus[-1].missing


OWN = {**AB, "boss": replace(machine(2), is_own=True)}
TWICE = "services: {m: {x-anvil: {gpus: ['0'], port: 1}}, n: {x-anvil: {hosts: boss, port: 1%s}}}"


def test_the_gpus_of_this_machine_are_used_under_one_of_its_names(tmp_path: Path) -> None:
    found = one(tmp_path, "hosts: any, gpus: ['0']", hosts=OWN, present=TWO_HERE)
    assert places(found) == {"m.a": "a/0", "m.b": "b/0", "m.boss": "boss/0"}
    assert "m" in places(one(tmp_path, "hosts: any", hosts=OWN, present=TWO_HERE)), "on its CPU"
    (problem,) = files.problems(tmp_path, TWICE % ", gpus: ['1']", hosts=OWN, present=TWO_HERE)
    assert "services.m.x-anvil.hosts: runs on GPUs of this machine, and so does n.boss" in problem
    assert plain(tmp_path, TWICE % "", hosts=OWN, present=TWO_HERE)


def test_it_is_the_same_backend_when_its_host_comes(tmp_path: Path) -> None:
    own, rest = "hosts: [a, b], gpus: ['0']", RESERVED
    before, after = (one(tmp_path, own, rest, hosts=hosts) for hosts in ({"a": AB["a"]}, AB))
    assert change.compare(before, after).kept == ("m.a", "m.b")
    assert [any("not in the cluster: b" in text for text in each.warnings) for each in (before, after)] == [
        True,
        False,
    ]


# Machines that the file describes


def test_what_the_file_says_of_a_machine_counts_more_than_what_it_reports(tmp_path: Path) -> None:
    top = "machines: {a: {gpus: {'1': {reserve: 1GiB}}}, b: {host_memory: 7GiB}, c: {gpus: ['0', '1']}}"
    found = one(tmp_path, "hosts: any, gpu_count: 1", RESERVED, top, hosts=AB)
    assert list(places(found)) == ["m.a.1", "m.b.0", "m.b.1", "m.c.0", "m.c.1"]
    assert found.gpus == (
        Gpu("1", 24 * GIB, GIB, "a"),
        *(Gpu(id, 24 * GIB, host="b") for id in "01"),
        *(Gpu(id, host="c") for id in "01"),
    )
    assert found.memory_of_hosts == {"a": 90 * GIB, "b": 7 * GIB}
    assert any("not in the cluster: c" in text for text in found.warnings)


def test_a_file_with_machines_can_be_read_without_the_cluster(tmp_path: Path) -> None:
    found = one(tmp_path, "hosts: b, gpu_count: 1", RESERVED, "machines: {b: {gpus: ['0', '1']}}")
    assert (places(found), found.warnings) == ({"m.b.0": "b/0", "m.b.1": "b/1"}, ())


# Checks are those of each host


def test_backends_of_different_hosts_share_no_port(tmp_path: Path) -> None:
    text = """x-anvil: {runtime: process, gpus: ["0"]}
services:
  m: {command: x --port 9292, x-anvil: {hosts: a, gpus: ["0"]}}
  n: {command: x --port 9292, x-anvil: {hosts: b, gpus: ["0"]}}
"""
    assert [each.port for each in plain(tmp_path, text, hosts=AB).backends] == [9292, 9292]


def test_backends_of_one_host_may_not_have_the_same_port(tmp_path: Path) -> None:
    text = """x-anvil: {runtime: process}
services:
  m: {command: x --port 7, x-anvil: {hosts: b, gpus: ["0"]}}
  n: {command: x --port 7, x-anvil: {hosts: [local, b], gpus: ["1"]}}
"""
    with pytest.raises(ConfigError) as caught:
        plain(tmp_path, text, hosts=AB)
    (problem,) = caught.value.problems
    assert problem.endswith(":4: services.n: port 7 is also that of m.b, and both may run at once")


@pytest.mark.parametrize(("most", "fails"), [(1, False), (2, True)])
def test_candidates_share_a_fixed_port_only_if_one_is_loaded_at_a_time(
    tmp_path: Path, most: int, fails: bool
) -> None:
    own, top, rest = f"gpu_count: 1, most: {most}", "runtime: process", "command: x --port 7"
    if not fails:
        assert len(one(tmp_path, own, rest, top, present=TWO_HERE).backends) == 2
        return
    (problem,) = problems(tmp_path, own, rest, top=top, present=TWO_HERE)
    assert "services.m: port 7 cannot be that of all its replicas: leave it out" in problem


def test_a_model_that_never_fits_a_host_is_told_once(tmp_path: Path) -> None:
    hosts = {f"h{index}": machine(8) for index in range(5)}
    (problem,) = problems(tmp_path, "hosts: [h0, h1, h2, h3, h4], gpus: all, vram: 30GiB", hosts=hosts)
    assert (
        "services.m.x-anvil.vram: 30.0 GiB do not fit on GPU h0/0, which has 24.0 GiB for models" in problem
    )


def test_that_the_size_of_gpus_is_not_known_is_said_once_of_a_service(tmp_path: Path) -> None:
    hosts = {"h": machine(8, vram=None)}
    (warning,) = one(tmp_path, "hosts: any, gpu_count: 1, vram: 9GiB", RESERVED, hosts=hosts).warnings
    assert 'declare it: x-anvil: {machines: {h: {gpus: {"0": {vram: ...}}}}}' in warning


def test_pinned_models_that_have_a_choice_of_gpus_need_not_fit_together(tmp_path: Path) -> None:
    text = (
        f"services: {{m: {{x-anvil: {{pin: true}}, {RESERVED}}}, n: {{x-anvil: {{pin: true}}, {RESERVED}}}}}"
    )
    assert len(plain(tmp_path, text, present=TWO_HERE).backends) == 4
    with pytest.raises(ConfigError, match="the pinned m, n do not fit on GPU 0 together"):
        plain(tmp_path, text, present=ONE_HERE)


def test_a_model_with_a_choice_is_refused_only_where_all_of_it_is_pinned(tmp_path: Path) -> None:
    pinned = "p: {x-anvil: {pin: true, gpus: ['0']}}"
    for more, count in (("", 0), (", q: {x-anvil: {pin: true, gpus: ['1']}}", 1)):
        text = f"services: {{m: {{x-anvil: {{}}, {RESERVED}}}, {pinned}{more}}}"
        warnings = plain(tmp_path, text, present=TWO_HERE).warnings
        assert len([text for text in warnings if "services.m: does not fit" in text]) == count


# What changes


def test_hosts_come_and_go(tmp_path: Path) -> None:
    own = "hosts: any, gpu_count: 1"
    before = one(tmp_path, own, RESERVED, hosts={"a": AB["a"]})
    after = one(tmp_path, own, RESERVED, hosts={"b": AB["b"]})
    found = change.compare(before, after)
    assert (found.added, found.removed, found.kept) == (("m.b.0", "m.b.1"), ("m.a.0", "m.a.1"), ())
    assert found.settings == ("machines",)


def test_how_many_are_loaded_changes_under_their_leases(tmp_path: Path) -> None:
    before, after = (one(tmp_path, f"hosts: any, most: {most}", hosts=AB) for most in (1, 2))
    found = change.compare(before, after)
    assert (found.changed, found.kept) == ((), ("m", "m.a", "m.b"))
    assert found.settings == ("m.most", "m.a.most", "m.b.most")


def test_a_host_says_how_it_is_woken(tmp_path: Path) -> None:
    wake = "{b: {wake: {mac: AA-BB-CC-DD-EE-FF, timeout: 2m}}, c: {wake: {run: [plug, on]}}, d: {}}"
    found = one(tmp_path, "", top=f"machines: {wake}")
    assert found.wakes == {"b": Wake(mac="aa:bb:cc:dd:ee:ff", timeout=120.0), "c": Wake(run=("plug", "on"))}
