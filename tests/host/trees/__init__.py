"""Trees of /sys and /proc of machines with GPUs, as files: see README.md."""

import os
from pathlib import Path

HERE = Path(__file__).parent
INSTEAD = """
import os
from pathlib import Path
from anvil_mux.host import gpus

gpus.amd_intel_gpus.__defaults__ = Path(os.environ["GPU_TREE"]), Path("/proc")
"""


def instead(sys: Path, folder: Path) -> dict[str, str]:
    """The variables with which a program finds this /sys instead of the machine's; it uses ``folder``."""
    (folder / "sitecustomize.py").write_text(INSTEAD)
    paths = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    return {"PYTHONPATH": paths, "GPU_TREE": str(sys), "NVIDIA_VISIBLE_DEVICES": "all"}


def plant(name: str, folder: Path) -> tuple[Path, Path]:
    """Make the tree ``name`` in ``folder``; its /sys and its /proc."""
    paths: dict[str, list[str]] = {}
    for line in (HERE / f"{name}.txt").read_text().splitlines():
        if line.startswith("    "):
            paths[[*paths][-1]].append(line[4:])
        elif not line.startswith("#"):
            paths[line] = []
    for path, lines in paths.items():
        name, _, target = path.partition(" -> ")
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        if target:
            file.symlink_to(target)
        elif lines[0].startswith("hex "):
            file.write_bytes(bytes.fromhex(lines[0][4:]))
        else:
            file.write_text("".join(line + "\n" for line in lines))
    return folder / "sys", folder / "proc"


class Account:
    """What processes hold of the card ``amd1`` of the tree ``radeon``, as the kernel tells it.

    The account of a process goes in the moment in which the process does, since the way to its figures leads
    through the process's own folder in /proc.
    """

    def __init__(self, sys: Path) -> None:
        self._processes = sys / "class/kfd/kfd/proc"
        self._used = sys / "class/drm/card1/device/mem_info_vram_used"
        self._amounts = sys / "amounts"
        self._amounts.mkdir()
        self.hold({})

    def hold(self, held: dict[int, int]) -> None:
        """Have these processes hold so many bytes, and no others any."""
        for each in self._processes.glob("*/*"):
            each.unlink()
        for pid, amount in held.items():
            figure = self._amounts / str(pid)
            figure.write_text(str(amount))
            (self._processes / str(pid)).mkdir(exist_ok=True)
            (self._processes / str(pid) / "vram_30381").symlink_to(f"/proc/{pid}/../..{figure}")
        part = self._used.with_suffix(".part")
        part.write_text(str(sum(held.values())))
        part.replace(self._used)  # the kernel's files are never empty in between
