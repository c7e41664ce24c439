"""Replicas of a model: how requests are sent to one of them, and services that are scaled."""

from __future__ import annotations

from pathlib import Path

import pytest

from anvil_mux.config.config import Config
from anvil_mux.errors import ConfigError
from tests.config.files import plain, problems, table

# What is wrong

ROUTED = """
    x-anvil:
      runtime: process
      routing:
        default: mine
        mode: full
        policies:
          mine:
            metrics: {tax: {kappa_work: {kappa: "${KAPPA:-1e-6}"}}}
            filters: [schedulability, {metric: {metric: tax, threshold: 9000}}]
            selector: {metric: {by: [tax, num_requests]}}
    services:
      a: {command: [a], x-anvil: {model: m, kv_tokens: 4096}}
      b: {command: [b], x-anvil: {model: m, routing: mine}}
      c: {command: [c], x-anvil: {routing: sticky}}
"""


def test_a_routing_policy_of_the_file_can_be_the_default_or_a_models_own(tmp_path: Path) -> None:
    found = plain(tmp_path, ROUTED)
    assert (found.routing, found.routing_mode) == ("mine", "full")
    assert found.routing_policies["mine"]["filters"][0] == "schedulability"
    assert [(b.routing, b.kv_tokens) for b in found.backends] == [
        ("mine", 4096),
        ("mine", None),
        ("sticky", None),
    ]


@pytest.mark.parametrize(
    ("old", "new", "line", "text"),
    [
        ("mode: full", "store: http://10.0.0.1/3", 6, "routing.store: must be the address of a Redis"),
        ("schedulability,", "schedulable,", 10, "policies.mine.filters.0: unknown filter schedulable"),
        ("mode: full", "mode: fool", 6, "routing.mode: must be one of lite, full, not 'fool'"),
        ("default: mine", "default: mime", 4, "no policy mime; did you mean mine?"),
        ("routing: sticky", "routing: stick", 15, "services.c.x-anvil.routing: no policy stick"),
        ("routing: mine}", "routing: lmetric}", 14, "is lmetric, but a, a replica of"),
        ("kappa_work: {kappa", "kappa_work: {k", 9, "unknown setting of kappa_work; known: kappa"),
        ("          mine:\n", "          sticky:\n", 8, "is the name of a policy that is shipped"),
        ("metric: tax,", "metric: kv_cache_usage_ratio_projected,", 14, "services.b: needs kv_tokens"),
    ],
)
def test_what_is_wrong_with_routing_is_told_with_its_line(
    tmp_path: Path, old: str, new: str, line: int, text: str
) -> None:
    assert old in ROUTED
    with pytest.raises(ConfigError) as caught:
        plain(tmp_path, ROUTED.replace(old, new))
    assert any(f":{line}: " in each and text in each for each in caught.value.problems), caught.value.problems


BALANCED = """
    x-anvil: {routing: HOW}
    services:
      a: {image: x, x-anvil: {model: m, gpus: ["0"]}}
      b: {image: x, x-anvil: {model: m, gpus: ["1"]}}
"""


@pytest.mark.parametrize(
    "how",
    [
        "load_balance",
        "{default: load_balance, mode: lite}",
        "{default: aware, policies: {aware: {like: load_balance, cache_aware: true}}}",
    ],
)
def test_a_policy_that_goes_by_what_engines_report_is_refused_in_the_mode_lite(
    tmp_path: Path, how: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        plain(tmp_path, BALANCED.replace("HOW", how))
    [problem] = caught.value.problems
    policy = "aware" if "aware" in how else "load_balance"
    assert (
        f"{policy} goes by what engines report: write routing: {{default: {policy}, mode: full}}" in problem
    )
    assert ("or take load_balance_lite" in problem) is (policy == "load_balance")


@pytest.mark.parametrize(
    "how",
    [
        "load_balance_lite",
        "{default: load_balance, mode: full}",
        "{default: aware, mode: full, policies: {aware: {like: load_balance, cache_aware: true}}}",
    ],
)
def test_a_replica_that_takes_whole_requests_needs_nothing_of_the_stages(tmp_path: Path, how: str) -> None:
    assert plain(tmp_path, BALANCED.replace("HOW", how)).backends


def test_a_replica_for_answers_needs_what_places_them(tmp_path: Path) -> None:
    staged = BALANCED.replace("HOW", "{default: load_balance, mode: full}")
    for name, stage in (("a", "prefill"), ("b", "decode")):
        staged = staged.replace(
            f"{name}: {{image: x, x-anvil: {{", f"{name}: {{image: x, x-anvil: {{infer_type: {stage}, "
        )
    with pytest.raises(ConfigError) as caught:
        plain(tmp_path, staged)
    [problem] = caught.value.problems
    assert "services.b: needs kv_tokens, because routing is load_balance" in problem


def test_what_a_variable_leaves_empty_in_routing_says_nothing(tmp_path: Path) -> None:
    top = "x-anvil: {routing: {default: '${A:-}', mode: '${A:-}', store: '${A:-}', policies: }}"
    found = plain(tmp_path, f"{top}\nservices: {{a: {{image: x, x-anvil: {{}}}}}}")
    assert (found.routing, found.routing_mode, found.routing_store) == ("least_delay", "lite", "")


# Scaled services

PROCESS = 'x-anvil: {runtime: process, gpus: {"0": {vram: 24GiB}, "1": {}}}'


def scaled(folder: Path, service: str, top: str = "") -> Config:
    """Of a file with one service, described in YAML flow."""
    return plain(folder, f"{top}\nservices: {{a: {{image: x, command: [x], {service}}}}}")


@pytest.mark.parametrize("how", ["scale: 3", "deploy: {replicas: 3}"])
def test_each_container_of_a_scaled_service_is_a_replica(tmp_path: Path, how: str) -> None:
    found = scaled(tmp_path, f"{how}, x-anvil: {{kv_tokens: 4096}}").backends
    assert [(each.name, each.model, each.kv_tokens) for each in found] == [
        *[("a-1", "a", 4096), ("a-2", "a", 4096), ("a-3", "a", 4096)]
    ]
    assert {each.service_name for each in found} == {"a"}
    assert [each.service.number for each in found] == [1, 2, 3]


@pytest.mark.parametrize(
    ("how", "key"), [("scale: 31536001", "scale"), ("deploy: {replicas: 9999999}", "deploy")]
)
def test_a_service_has_at_most_a_thousand_replicas(tmp_path: Path, how: str, key: str) -> None:
    text = f"x-anvil: {{runtime: process}}\nservices: {{a: {{command: [x], {how}, x-anvil: {{}}}}}}"
    (problem,) = problems(tmp_path, text)
    assert "replicas, of at most 1000" in problem


def test_a_service_scaled_to_one_is_like_any_other(tmp_path: Path) -> None:
    (backend,) = scaled(tmp_path, "scale: 1, x-anvil: {}").backends
    assert (backend.name, backend.service_name, backend.service.scale) == ("a", "a", 1)


def test_replicas_of_a_scaled_service_share_its_gpu_by_their_memory(tmp_path: Path) -> None:
    found = scaled(tmp_path, 'scale: 2, x-anvil: {gpus: ["0"], vram: 10GiB}', PROCESS)
    assert [each.gpus for each in found.backends] == [("0",), ("0",)]
    assert found.warnings == ()


@pytest.mark.parametrize("vram", ["", ", vram: 20GiB"])
def test_replicas_that_never_fit_beside_each_other_are_warned_of(tmp_path: Path, vram: str) -> None:
    found = scaled(tmp_path, f'scale: 3, x-anvil: {{gpus: ["0"]{vram}}}', PROCESS)
    [warning] = found.warnings
    assert "compose.yaml:2: services.a: no two of its replicas fit on GPU 0, so they take turns" in warning


def test_replicas_that_are_processes_may_each_have_a_gpu_and_see_no_other(tmp_path: Path) -> None:
    found = scaled(tmp_path, 'scale: 2, x-anvil: {gpus: [["1"], ["0"]]}, environment: {A: b}', PROCESS)
    assert [each.gpus for each in found.backends] == [("1",), ("0",)]
    seen = [dict(each.service.environment) for each in found.backends]
    assert [each["CUDA_VISIBLE_DEVICES"] for each in seen] == ["1", "0"]
    assert all(each["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID" and each["A"] == "b" for each in seen)
    assert found.warnings == ()


UNSCALED = """
    x-anvil: {gpus: [["0"], ["1"]]} -> Compose gives all containers of a service the same GPUs
    x-anvil: {}, ports: ['81:80'] -> port 81 cannot be that of all its replicas: publish any, "127
    x-anvil: {port: 81}, network_mode: host -> port 81 cannot be that of all its replicas
    x-anvil: {}, container_name: a -> services.a: is scaled, so it can have no container_name
    x-anvil: {}}, a-2: {image: x, x-anvil: {} -> a replica of a scaled service is called a-2 too
    x-anvil: {infer_type: decode} -> a.x-anvil.infer_type: is decode, but no service of a is
"""
UNSCALED_PROCESSES = """
    x-anvil: {gpus: [["0"]]} -> services.a: has 2 replicas, and gpus for 1
    x-anvil: {gpus: [["0"], ["7"]]} -> GPU 7 is not declared
    x-anvil: {port: 81, gpus: []} -> leave it out, and each has one of its own in $PORT
"""


@pytest.mark.parametrize(
    ("top", "service", "text"),
    [*[("", *row) for row in table(UNSCALED)], *[(PROCESS, *row) for row in table(UNSCALED_PROCESSES)]],
)
def test_what_cannot_be_scaled_is_told_once_with_its_line(
    tmp_path: Path, top: str, service: str, text: str
) -> None:
    (told,) = problems(tmp_path, f"{top}\nservices: {{a: {{image: x, command: [x], scale: 2, {service}}}}}")
    assert told.startswith("compose.yaml:2: ")
    assert text in told


@pytest.mark.parametrize("ports", ["8001-8002:8080", "127.0.0.1::8080", "8080"])
def test_replicas_may_share_what_each_gets_a_port_of_its_own_from(tmp_path: Path, ports: str) -> None:
    assert len(scaled(tmp_path, f"scale: 2, x-anvil: {{}}, ports: ['{ports}']").backends) == 2
