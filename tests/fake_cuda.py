"""Stand-ins for the CUDA driver: fake_cuda.c, a program cuda-checkpoint, and the folder that both look at."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
COMPILER = shutil.which("cc") or shutil.which("gcc")
STATES = ("running", "locked", "checkpointed", "failed", "checkpointing", "restoring")

PROGRAM = """\
#!{python}
import os, sys
from pathlib import Path

STATES = {states}
STEPS = {{"lock": (0, 1), "checkpoint": (1, 2), "restore": (2, 1), "unlock": (1, 0)}}
folder = Path(os.environ["FAKE_CUDA"])
given = dict(zip(sys.argv[1:], sys.argv[2:]))
pid = given["--pid"]
file = folder / pid
if not file.exists():
    sys.exit("Error: process does not use CUDA")
state = int(file.read_text())
if "--get-state" in given:
    print(STATES[state])
elif "--get-restore-tid" in given:
    print(int(pid) + 1)
else:
    action = given["--action"]
    with (folder / "calls").open("a") as calls:
        print(" ".join(filter(None, [action, pid, given.get("--timeout")])), file=calls)
    begin, end = STEPS[action]
    if state != begin:
        sys.exit("Error: illegal state")
    file.write_text(str(end))
"""


class FakeCuda:
    """What the stand-ins know; made in an empty folder that FAKE_CUDA names."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def process(self, pid: int, state: str = "running") -> None:
        """From now on this process uses CUDA, and is in this state."""
        (self.folder / str(pid)).write_text(str(STATES.index(state)))

    def state(self, pid: int) -> str:
        return STATES[int((self.folder / str(pid)).read_text())]

    def fault(self, pid: int, action: str, what: str) -> None:
        """What goes wrong, in the words of fake_cuda.c."""
        (self.folder / f"{pid}.{action}").write_text(what)

    def mend(self, pid: int, action: str) -> None:
        (self.folder / f"{pid}.{action}").unlink()

    def calls(self) -> list[str]:
        file = self.folder / "calls"
        return file.read_text().splitlines() if file.exists() else []


def build_library(folder: Path, *, old: bool = False, enforced: bool = False) -> Path:
    """libcuda's stand-in; ``old`` lacks the calls, as drivers before 570 do, ``enforced`` needs rights."""
    assert COMPILER is not None
    made = folder / ("libold.so" if old else "libfake.so")
    flags = [
        "-O1",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-shared",
        "-fPIC",
        *(["-DOLD", "-Wno-unused-function"] if old else []),
        *(["-DENFORCED"] if enforced else []),
    ]
    subprocess.run([COMPILER, *flags, "-o", str(made), str(HERE / "fake_cuda.c")], check=True)
    return made


def write_program(folder: Path) -> Path:
    made = folder / "cuda-checkpoint"
    made.write_text(PROGRAM.format(python=sys.executable, states=STATES))
    made.chmod(0o755)
    return made
