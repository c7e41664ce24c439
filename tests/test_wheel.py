"""What is installed from the wheel serves, without the checkout beside it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import venv
from pathlib import Path
from zipfile import ZipFile

import pytest

import anvil_mux

ROOT = Path(__file__).resolve().parent.parent
SOURCE = Path(anvil_mux.__file__).parent
READY = re.compile(r"serves (http://\S+)")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    # A copy: what setuptools leaves in a folder (build/) must not be taken into the next wheel.
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in filter(None, tracked.stdout.split("\0")):
        if name.startswith("anvil_mux/") or "/" not in name:
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
    subprocess.run(command, check=True, capture_output=True)
    (made,) = folder.glob("*.whl")
    return made


def test_every_module_and_data_file_is_in_the_wheel(wheel: Path) -> None:
    packed = set(ZipFile(wheel).namelist())
    kinds = (".py", ".html", ".yaml", ".gz", ".typed")
    here = {path.relative_to(SOURCE.parent).as_posix() for path in SOURCE.rglob("*") if path.suffix in kinds}
    assert here <= packed
    assert not {name for name in packed if name.startswith("tests/")}


def test_the_demo_is_served_from_an_environment_that_has_only_the_wheel(wheel: Path, tmp_path: Path) -> None:
    place = tmp_path / "environment"
    venv.create(place, with_pip=False, symlinks=True)
    (site,) = (place / "lib").glob("python*/site-packages")
    ZipFile(wheel).extractall(site)
    # The packages that it needs are those of this environment; the checkout is not among them.
    theirs = [
        path for path in sys.path if path.endswith("site-packages") and Path(path) != ROOT / "anvil_mux"
    ]
    (site / "others.pth").write_text("\n".join(theirs) + "\n")
    file = tmp_path / "compose.yaml"
    demo = (ROOT / "compose" / "demo.yaml").read_text()
    file.write_text(demo.replace("working_dir: ..", f"working_dir: {ROOT}"))
    env = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "state"), "PYTHONPATH": ""}
    command = [str(place / "bin" / "python"), "-c", _COMMAND, str(file)]
    where = subprocess.run(
        [command[0], "-c", "import anvil_mux; print(anvil_mux.__file__)"],
        env=env,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert where.stdout.startswith(str(site))
    serving = subprocess.Popen(command, env=env, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    try:
        assert serving.stdout is not None
        found = READY.search(serving.stdout.readline())
        assert found
        import requests

        question = {"model": "small", "messages": [{"role": "user", "content": "Hello!"}]}
        answer = requests.post(f"{found[1]}/v1/chat/completions", json=question, timeout=60)
        assert answer.status_code == 200
        assert answer.json()["choices"][0]["message"]["content"]
    finally:
        serving.terminate()
        serving.communicate(timeout=60)
    assert serving.returncode == 0


_COMMAND = """
import sys
from anvil_mux.cli.main import main
sys.exit(main(["serve", sys.argv[1], "--port", "0", "--on-exit", "stop"]))
"""
