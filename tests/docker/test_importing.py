"""What `anvil-mux import` made of another program's configuration, served with real engines."""

from __future__ import annotations

import re
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.docker.conftest import Engine, Stack
from tests.docker.served import PATIENCE, ask, docker, eventually, served, state_of

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
        command = [sys.executable, "-m", "anvil_mux", "import", "llama-swap", str(theirs)]
        done = subprocess.run(command, timeout=PATIENCE, capture_output=True, text=True, check=True)
        file = tmp_path / "compose.yaml"
        file.write_text(re.sub("^name: .*$", f"name: {project}", done.stdout, flags=re.M))
        return Stack(file, project, ("tiny:1", "tiny:2"), engine)

    yield make
    engine.remove(project)
    for number in (1, 2):
        subprocess.run(["docker", "rm", "-f", f"{project}-{number}"], env=engine.env, capture_output=True)


def test_llama_swaps_containers_become_services_that_take_turns(imported: Callable[[str], Stack]) -> None:
    stack = imported("--mount type=bind,src={},dst=/m/tiny.gguf,readonly")
    assert "image: anvil-mux-test/llamacpp" in stack.file.read_text()
    with stack.watched() as seen, served(stack) as mux:
        for model in ("tiny:1", "tiny:2", "tiny:1"):
            assert ask(mux, model) == ""
        assert state_of(mux, "tiny:2") == "stopped"
    assert (seen.most, len(seen.names)) == (1, 2)


def test_llama_swaps_containers_run_as_processes_where_an_option_has_no_counterpart(
    imported: Callable[[str], Stack],
) -> None:
    stack = imported("--log-driver none -v {}:/m/tiny.gguf:ro")

    def running() -> list[str]:
        names = docker(stack, "ps", "--filter", f"name={stack.project}", "--format", "{{.Names}}")
        return names.split()

    with served(stack) as mux:
        for model, number in (("tiny:1", 1), ("tiny:2", 2), ("tiny:1", 1)):
            assert ask(mux, model) == ""
            eventually(lambda name=f"{stack.project}-{number}": running() == [name])
    eventually(lambda: not running())
