"""Trees of /sys and /proc of machines with GPUs, as files: see README.md."""

from __future__ import annotations

from pathlib import Path

HERE = Path(__file__).parent


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
