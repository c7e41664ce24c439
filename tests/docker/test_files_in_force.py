"""Containers are made by the configuration in force, whatever the files on disk say by now."""

import json
import secrets
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from anvil_mux.config.compose import run_compose
from anvil_mux.errors import MuxError
from anvil_mux.host.containers import ContainerRuntime
from anvil_mux.host.seam import HostConfig
from anvil_mux.plugins import load
from tests.docker.conftest import Stack
from tests.docker.served import ask, docker, served

MakeStack = Callable[..., Stack]


def reload(mux) -> int:
    return mux.request("POST", "/reload")[0]


def environment_of(stack: Stack, model: str) -> list[str]:
    return json.loads(docker(stack, "inspect", stack.container(model)))[0]["Config"]["Env"] or []


def marked(stack: Stack, model: str, mark: str, **others) -> str:
    """The text of the file with another environment of a model, and other services."""
    written = yaml.safe_load(stack.file.read_text())
    written["services"][model]["environment"] = {"MARK": mark}
    written["services"] |= others
    return yaml.safe_dump(written)


def test_files_with_errors_break_no_load(llamacpp_compose, tmp_path):
    stack = llamacpp_compose(tmp_path, models=3)
    text = stack.file.read_text()
    with served(stack) as mux:
        (tmp_path / ".env").write_text("A='\n")
        assert ask(mux, "model-1") == ""
        stack.file.write_text(f"{text}  more: {{image: [}}\n")
        assert reload(mux) == 422
        assert ask(mux, "model-2") == ""
        stack.file.unlink()
        assert ask(mux, "model-3") == ""
        docker(stack, "rm", "--force", stack.container("model-1"))
        assert ask(mux, "model-1") == ""


def test_an_edit_takes_effect_with_an_accepted_reload_alone(llamacpp_compose, tmp_path):
    stack = llamacpp_compose(tmp_path, models=3)
    impossible = {"image": "anvil-mux-test/busybox", "x-anvil": {"gpus": ["77"], "no_such_key": 1}}
    with served(stack) as mux:
        stack.file.write_text(marked(stack, "model-1", "unread"))
        assert ask(mux, "model-1") == ""
        assert "MARK=unread" not in environment_of(stack, "model-1")
        edited = marked(stack, "model-2", "refused")
        stack.file.write_text(marked(stack, "model-2", "refused", more=impossible))
        assert reload(mux) == 422
        assert ask(mux, "model-2") == ""
        assert "MARK=refused" not in environment_of(stack, "model-2")
        stack.file.write_text(edited.replace("refused", "accepted"))
        assert reload(mux) == 200
        assert ask(mux, "model-2") == ask(mux, "model-1") == ""
        assert "MARK=accepted" in environment_of(stack, "model-2")
        assert "MARK=unread" in environment_of(stack, "model-1")


IMAGE = "anvil-mux-test/busybox"
BASE = f"""
services:
  base:
    image: {IMAGE}
    command: [sleep, "1000"]
    env_file: [base.env]
    stop_grace_period: 1m1s
    restart: unless-stopped
    user: "1000"
    init: true
    tmpfs: ["/scratch:size=64m"]
    mem_limit: 90m
    cpus: 0.5
    shm_size: 16mb
    logging: {{driver: json-file, options: {{max-size: 200k}}}}
    labels: {{team: "${{TEAM}}", "com.example.tier": gpu, price: 5$$}}
    healthcheck: {{test: [CMD-SHELL, "exit $$((0))"], interval: 5s, start_period: 10s}}
    ulimits: {{core: 0, nofile: {{soft: 500, hard: 900}}}}
"""
INNER = f"""
services:
  inner: {{image: {IMAGE}, command: [sleep, "1000"], env_file: [inner.env], volumes: [".:/inner:ro"],
    ports: ["127.0.0.1::80"], x-anvil: {{gpus: ["0"]}}}}
"""
WHOLE = f"""
include: [inner/compose.yaml]
x-anvil: {{gpus: ["0"]}}
x-common: &common
  profiles: [llm]
  image: {IMAGE}
  command: [sleep, "1000"]
  ports: ["127.0.0.1::80"]
  x-anvil: {{gpus: ["0"]}}
services:
  plain: {{<<: *common, environment: [TEAM, UNSET],
    command: [sh, -c, "a='$$HOME $$$$ ${{TEAM}}'; sleep 1000"]}}
  env: {{<<: *common, environment: {{OWN: "a$$b"}},
    env_file: [base.env, {{path: none.env, required: false}}]}}
  derived: {{<<: *common, extends: {{file: base.yaml, service: base}}, container_name: "{{project}}-own"}}
  mounts: {{<<: *common, volumes: ["./inner:/i:ro", "store:/store", "/anonymous", "~/:/home:ro"]}}
  given: {{<<: *common, secrets: [token, {{source: of_variable, mode: 0440}}],
    configs: [{{source: tuning, target: /t.yaml}}, {{source: text, target: /text}}]}}
  built: {{<<: *common, build: {{context: ., args: {{A: "1"}}}}, pull_policy: never}}
  needs: {{<<: *common, networks: {{own: {{aliases: [n]}}}},
    depends_on: {{plain: {{condition: service_started}}}}}}
  hosts: {{<<: *common, extra_hosts: ["a:10.0.0.1"], dns: [10.0.0.2], cap_add: [SYS_PTRACE], hostname: h}}
  devices: {{<<: *common, deploy: {{resources: {{limits: {{memory: 80M}}, reservations: {{devices:
    [{{driver: nvidia, device_ids: ["0"], capabilities: [gpu]}}]}}}}}}}}
networks: {{own: {{driver_opts: {{a: b}}}}}}
volumes: {{store: {{}}}}
secrets: {{token: {{file: ./base.env}}, of_variable: {{environment: TOKEN}}}}
configs: {{tuning: {{file: ./base.env}}, text: {{content: "a $${{TEAM}} ${{TEAM}}\\n"}}}}
"""
UNSTARTABLE = {"devices"}
"""The services that need an NVIDIA GPU."""


@pytest.fixture
def whole(engine, tmp_path, monkeypatch):
    """A project of files in which is what compose files have, not run by anybody."""
    project = f"anvil-test-{secrets.token_hex(4)}"
    (tmp_path / "inner").mkdir()
    files = {
        "compose.yaml": f"name: {project}\n{WHOLE.replace('{project}', project)}",
        "compose.override.yaml": "services: {plain: {environment: {MORE: '1'}}}",
        "base.yaml": BASE,
        "base.env": "A=${TEAM}-x\nB='$$c'\nC=\"two words\"\n",
        "inner/compose.yaml": INNER,
        "inner/inner.env": "A=inner\n",
        ".env": "TEAM=ml\nTOKEN='a$b\"c'\n",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    yield Stack(tmp_path / "compose.yaml", project, (), engine)
    engine.remove(project)


def runtime_of(stack: Stack) -> tuple[ContainerRuntime, HostConfig]:
    files = [stack.file, stack.file.with_name("compose.override.yaml")]
    config = HostConfig.of(load(files, environ=stack.engine.env, compose=run_compose))
    return ContainerRuntime(config, environ=stack.engine.env), config


def create_by_hand(stack: Stack) -> dict[str, str]:
    """Service -> its container, made by Compose of the files on disk where there is none that fits."""
    override = stack.file.with_name("compose.override.yaml")
    stack.compose("-f", str(override), "create", "--no-build", "--pull", "never")
    listed = stack.engine.containers(stack.project, all=True)
    return {each["Labels"]["com.docker.compose.service"]: each["Id"] for each in listed}


def test_a_container_made_by_hand_fits_the_configuration(whole):
    runtime, config = runtime_of(whole)
    made = create_by_hand(whole)
    assert made.keys() == {each.name for each in config.backends}
    assert {each.name: runtime.differs(each) for each in config.backends if runtime.differs(each)} == {}
    for backend in config.backends:
        if backend.name not in UNSTARTABLE:
            runtime.start(backend)
    assert create_by_hand(whole) == made


def test_a_container_made_by_us_fits_the_files_and_has_what_they_give(whole):
    runtime, config = runtime_of(whole)
    for name in (".env", "compose.yaml", "base.env", "inner/inner.env"):
        file = Path(whole.file.parent, name)
        file.rename(f"{file}.away")
    Path(whole.file.parent, "base.env").write_text("what secrets and configs are is read from their files")
    startable = [each for each in config.backends if each.name not in UNSTARTABLE]
    for backend in startable:
        runtime.start(backend)
    shown = "cat /run/secrets/of_variable /text; stat -c %a /run/secrets/of_variable /text"
    inside = docker(whole, "exec", whole.container("given"), "sh", "-c", shown)
    assert inside == 'a$b"ca ${TEAM} ml\n440\n444\n'
    for name in (".env", "compose.yaml", "base.env", "inner/inner.env"):
        file = Path(whole.file.parent, name)
        Path(f"{file}.away").rename(file)
    listed = whole.engine.containers(whole.project, all=True)
    made = {each["Labels"]["com.docker.compose.service"]: each["Id"] for each in listed}
    assert made.items() <= create_by_hand(whole).items()


GIVEN = f"""
services:
  a:
    image: {IMAGE}
    scale: 2
    command: [sleep, "1000"]
    ports: ["127.0.0.1::80"]
    secrets: [token, {{source: token, target: /deep/down/token, uid: "0", gid: "7", mode: 0400}}]
    configs: [{{source: text, target: etc/text}}, named]
    x-anvil: {{gpus: ["0"]}}
secrets: {{token: {{environment: TOKEN}}}}
configs: {{text: {{content: "a $${{TEAM}} ${{TEAM}}\\n"}}, named: {{environment: TOKEN}}}}
"""
SHOWN = "cat /run/secrets/token /deep/down/token /named /etc/text; stat -c %a:%g /deep/down/token"
WITH_ONE = "oneoneonea ${TEAM} ml\n400:7\n"


@pytest.fixture
def given(engine, tmp_path, monkeypatch):
    """A service of two containers with secrets and configs that are not files of the host."""
    project = f"anvil-test-{secrets.token_hex(4)}"
    (tmp_path / "compose.yaml").write_text(f"name: {project}\n{GIVEN}")
    (tmp_path / "compose.override.yaml").write_text("services: {a: {environment: {MORE: '1'}}}")
    (tmp_path / ".env").write_text("TEAM=ml\nTOKEN=one\n")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    yield Stack(tmp_path / "compose.yaml", project, (), engine)
    engine.remove(project)


def inside(stack: Stack) -> set[str]:
    """What each container of the service that runs reads of its secrets and configs."""
    ids = [each["Id"] for each in stack.engine.containers(stack.project)]
    return {docker(stack, "exec", id, "sh", "-c", SHOWN) for id in ids}


def test_secrets_and_configs_without_a_file_are_there_after_every_start(given):
    runtime, config = runtime_of(given)
    for backend in config.backends:
        runtime.start(backend)
    assert inside(given) == {WITH_ONE}
    assert len(given.engine.containers(given.project)) == 2
    for backend in config.backends:
        runtime.stop(backend)
        runtime.start(backend)
    assert inside(given) == {WITH_ONE}


def test_a_changed_secret_is_there_at_the_next_start_after_a_reload(given):
    runtime, config = runtime_of(given)
    one, _ = config.backends
    runtime.start(one)
    given.file.with_name(".env").write_text("TEAM=ml\nTOKEN=two\n")
    _, config = runtime_of(given)
    one, _ = config.backends
    runtime.reconfigure(config)
    runtime.start(one)
    assert inside(given) == {WITH_ONE}, "it runs on as it was"
    runtime.stop(one)
    runtime.start(one)
    assert inside(given) == {WITH_ONE.replace("one", "two")}


def test_a_secret_whose_variable_is_not_set_is_named(given):
    given.file.with_name(".env").write_text("TEAM=ml\n")
    runtime, config = runtime_of(given)
    with pytest.raises(MuxError, match="TOKEN"):
        runtime.start(config.backends[0])
