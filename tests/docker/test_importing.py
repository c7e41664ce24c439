"""What `anvil-mux import` made of another program's configuration, served with real engines."""

import re
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.docker.conftest import Engine, Stack
from tests.docker.served import PATIENCE, ask, docker, eventually, served, state_of
from tests.importing.test_ollama_store import Store

SWAP = """
macros:
  image: anvil-mux-test/llamacpp
  server: llama-server -m /m/tiny.gguf --host 0.0.0.0 -c 1024 -t 1
models:
  "tiny:1":
    cmd: |
      # the port is the container's own
      docker run --rm --name {project}-1 {mount1} -p ${{PORT}}:8080 ${{image}} ${{server}} --port 8080
      --alias ${{MODEL_ID}}
    cmdStop: docker stop {project}-1
    aliases: [one]
  "tiny:2":
    cmd: |
      docker run --rm --name {project}-2 {mount2} -p ${{PORT}}:${{PORT}} ${{image}} ${{server}}
      --port ${{PORT}} --alias ${{MODEL_ID}}
"""


def _translated(stack: Stack, *args: str) -> str:
    """What `anvil-mux import ARGS...` prints, as a project of this stack."""
    command = [sys.executable, "-m", "anvil_mux", "import", *args]
    done = subprocess.run(command, timeout=PATIENCE, capture_output=True, text=True, check=True)
    return re.sub("^name: .*$", f"name: {stack.project}", done.stdout, flags=re.M)


@pytest.fixture
def imported(
    engine: Engine, tiny_model: Callable[[int], Path], tmp_path: Path
) -> Iterator[Callable[[str], Stack]]:
    """`make(mount)`: the stack of a translated file; ``mount`` is how its models get their files."""
    project = f"anvil-test-{secrets.token_hex(4)}"

    def make(mount: str) -> Stack:
        mounts = {f"mount{seed}": mount.format(tiny_model(seed)) for seed in (1, 2)}
        theirs = tmp_path / "config.yaml"
        theirs.write_text(SWAP.format(project=project, **mounts))
        stack = Stack(tmp_path / "compose.yaml", project, ("tiny:1", "tiny:2"), engine)
        stack.file.write_text(_translated(stack, "llama-swap", str(theirs)))
        return stack

    yield make
    engine.remove(project)
    for number in (1, 2):
        subprocess.run(["docker", "rm", "-f", f"{project}-{number}"], env=engine.env, capture_output=True)


def test_llama_swaps_containers_become_services_that_take_turns(imported):
    stack = imported("--mount type=bind,src={},dst=/m/tiny.gguf,readonly")
    assert "image: anvil-mux-test/llamacpp" in stack.file.read_text()
    with stack.watched() as seen, served(stack) as mux:
        for model in ("tiny:1", "tiny:2", "tiny:1"):
            assert ask(mux, model) == ""
        assert state_of(mux, "tiny:2") == "stopped"
    assert (seen.most, len(seen.names)) == (1, 2)


def test_llama_swaps_containers_run_as_processes_where_an_option_has_no_counterpart(imported):
    stack = imported("--log-driver none -v {}:/m/tiny.gguf:ro")

    def running() -> list[str]:
        names = docker(stack, "ps", "--filter", f"name={stack.project}", "--format", "{{.Names}}")
        return names.split()

    with served(stack) as mux:
        for model, number in (("tiny:1", 1), ("tiny:2", 2), ("tiny:1", 1)):
            assert ask(mux, model) == ""
            eventually(lambda name=f"{stack.project}-{number}": running() == [name])
    eventually(lambda: not running())


def test_the_models_of_ollamas_store_are_served_by_llama_servers(engine, tiny_model, tmp_path):
    store = Store(tmp_path / "models")
    params = b'{"num_ctx": 1024, "temperature": 0.5, "num_thread": 1, "stop": ["x"]}'
    for seed in (1, 2):
        layers = {"model": tiny_model(seed).read_bytes(), "params": params, "template": b"{{ .Prompt }}"}
        store.add(f"registry.ollama.ai/library/tiny/{seed}", layers)
    project = f"anvil-test-{secrets.token_hex(4)}"
    stack = Stack(tmp_path / "compose.yaml", project, ("tiny:1", "tiny:2"), engine)
    how = ("--image", "anvil-mux-test/llamacpp", "--program", "llama-server")
    stack.file.write_text(_translated(stack, "ollama", str(store.folder), *how))
    try:
        with stack.watched() as seen, served(stack) as mux:
            for model in ("tiny:1", "tiny:2", "tiny:1"):
                assert ask(mux, model) == ""
        assert seen.most == 1
    finally:
        engine.remove(project)
