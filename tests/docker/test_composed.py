"""A host on a real Docker Engine that has no compose file but the services described anew for it."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from anvil_mux.config.config import Backend
from anvil_mux.errors import LoadError
from anvil_mux.host.local import LocalHost
from anvil_mux.host.seam import Awake, HostConfig
from tests.docker.conftest import Stack

GUARD = 60.0
ADDRESS = "127.0.0.2"

MakeStack = Callable[..., Stack]


def described(stack: Stack, *names: str) -> HostConfig:
    """One service of the stack, described anew for each of these slots, at the host's address."""
    [service] = yaml.safe_load(stack.file.read_text())["services"].values()
    del service["x-anvil"]
    composed = {name: {**service, "ports": [f"{ADDRESS}::8080"]} for name in names}
    backends = [
        Backend(name, stack.models[0], engine="llamacpp", port=8080, load_timeout=GUARD) for name in names
    ]
    return HostConfig(
        tuple(backends), project=stack.project, generated_compose=json.dumps({"services": composed})
    )


@pytest.fixture
def stack(llamacpp_compose: MakeStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stack:
    made = llamacpp_compose(tmp_path, models=1, slots=1)
    monkeypatch.setenv("DOCKER_HOST", made.engine.host)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return made


def test_two_slots_of_a_service_are_loaded_adopted_and_stopped_apart(stack):
    config = described(stack, "m.0", "m.1")
    first, second = config.backends
    host = LocalHost(config, address=ADDRESS)
    urls = {each.name: host.load(each, "stop", 1).url for each in config.backends}
    assert len(set(urls.values())) == 2
    assert all(url.startswith(f"http://{ADDRESS}:") for url in urls.values())
    assert stack.up() == {"m.0", "m.1"}
    host.close()
    later = LocalHost(config, address=ADDRESS)
    assert sorted(later.running()) == ["m.0", "m.1"]
    assert later.adopt(second) == Awake(urls["m.1"])
    later.evict(first, "stop")
    assert stack.up() == {"m.1"}
    later.reconfigure(replace(described(stack, "m.0"), files=()))
    later.stop(second)
    assert stack.up() == set()
    later.close()


def test_one_that_is_described_otherwise_is_made_anew(stack):
    config = described(stack, "m.0", "m.1")
    first, _ = config.backends
    host = LocalHost(config, address=ADDRESS)
    host.load(first, "stop", 1)
    [before] = stack.engine.containers(stack.project)
    host.evict(first, "stop")
    services = json.loads(config.generated_compose)["services"]
    services["m.0"]["environment"] = {"SAID": "pa$$word"}
    changed = replace(first, service=replace(first.service, digest="another"))
    host.reconfigure(
        replace(
            config,
            backends=(changed,),
            generated_compose=json.dumps({"services": services}, ensure_ascii=False),
        )
    )
    host.load(changed, "stop", 2)
    [after] = stack.engine.containers(stack.project)
    assert before["Id"] != after["Id"]
    found = stack.engine.request("GET", f"/containers/{after['Id']}/json")
    assert "SAID=pa$word" in found["Config"]["Env"]
    host.close()


def test_an_image_that_is_missing_is_told_by_its_name(stack):
    config = described(stack, "m.0")
    services = json.loads(config.generated_compose)["services"]
    services["m.0"]["image"] = "anvil-mux-test/none"
    host = LocalHost(replace(config, generated_compose=json.dumps({"services": services})), address=ADDRESS)
    with pytest.raises(LoadError, match="image anvil-mux-test/none is not present: docker pull"):
        host.load(config.backends[0], "stop", 1)
    host.close()
