"""What is installed from the wheel serves, without the checkout beside it."""

import json
import os
import subprocess
import sys
import venv
from pathlib import Path
from zipfile import ZipFile

import pytest

import anvil_mux
from tests.try_demo import try_demo

ROOT = Path(__file__).resolve().parent.parent
SOURCE = Path(anvil_mux.__file__).parent
ENVIRON = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHON")}

MOST_BYTES = 1_050_000
"""Four fifths of it are modules."""
MOST_DATA_BYTES = 180_000
"""Two thirds of what is no module are the traces that `simulate` brings."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel made of the files that the image is made of."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    context = [line.removeprefix("!") for line in lines if line.startswith("!")]
    # A copy: what setuptools leaves in a folder (build/) must not be taken into the next wheel.
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in filter(None, tracked.stdout.split("\0")):
        if any(name == each or name.startswith(f"{each}/") for each in context):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-qq",
        "--no-deps",
        "--wheel-dir",
        str(folder),
        str(source),
    ]
    # The copy is no repository that git could ask.
    env = {**os.environ, "ANVIL_COMMIT": "abc1234"}
    subprocess.run(command, check=True, capture_output=True, env=env)
    (made,) = folder.glob("*.whl")
    return made


def test_every_module_and_data_file_is_in_the_wheel(wheel):
    packed = set(ZipFile(wheel).namelist())
    kinds = (".py", ".html", ".yaml", ".xz", ".typed")
    here = {path.relative_to(SOURCE.parent).as_posix() for path in SOURCE.rglob("*") if path.suffix in kinds}
    assert here <= packed
    assert "anvil_mux/proxy/glossary.md" in packed  # a link in the checkout
    assert not {name for name in packed if name.startswith("tests/")}


@pytest.fixture(scope="module")
def place(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment in which only the wheel was installed."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False, symlinks=True)
    (site,) = (folder / "lib").glob("python*/site-packages")
    into = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python")]
    subprocess.run([*into, "install", "-qq", "--no-deps", "--no-index", str(wheel)], check=True)
    # The packages that it needs are those of this environment; the checkout is not among them.
    theirs = [
        path for path in sys.path if path.endswith("site-packages") and Path(path) != ROOT / "anvil_mux"
    ]
    (site / "others.pth").write_text("\n".join(theirs) + "\n")
    where = said(folder / "bin" / "python", "-c", "import anvil_mux; print(anvil_mux.__file__)")
    assert where.startswith(str(site))
    return folder / "bin"


def said(*command: object) -> str:
    """What a command prints, run where no checkout is."""
    words = [str(word) for word in command]
    return subprocess.run(
        words, env=ENVIRON, cwd="/", capture_output=True, text=True, check=True, timeout=60
    ).stdout


def test_the_wheel_stays_small(wheel):
    assert wheel.stat().st_size < MOST_BYTES
    data = [entry for entry in ZipFile(wheel).infolist() if not entry.filename.endswith(".py")]
    assert sum(entry.compress_size for entry in data) < MOST_DATA_BYTES


def test_what_is_installed_tells_the_commit_that_it_was_built_of(place):
    assert said(place / "anvil-mux", "--version") == f"anvil-mux {anvil_mux.__version__} (abc1234)\n"


def test_the_traces_that_come_with_it_are_simulated(place):
    words = ("simulate", "--trace", "claude-code-turns", "--policy", "eager", "--json")
    (row,) = json.loads(said(place / "anvil-mux", *words))
    assert (row["profile"], row["requests"], row["violations"]) == ("claude-code-turns", 481, 0)


def test_the_demo_is_served_from_an_environment_that_has_only_the_wheel(place, tmp_path):
    # Its engines are run by the Python that runs it, whatever else is on PATH.
    (tmp_path / "python3").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "python3").chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    env = {**ENVIRON, "XDG_STATE_HOME": str(tmp_path / "state"), "PATH": path}
    command = [str(place / "anvil-mux"), "serve", "--demo", "--port", "0"]
    assert "large" in try_demo(command, env=env, cwd=tmp_path)
    (state,) = (tmp_path / "state" / "anvil-mux").glob("anvil-demo*")
    assert state.is_dir()
