"""Files of the state folder are written whole, and nothing that lies in their way is written to."""

from __future__ import annotations

import os
from pathlib import Path

from anvil_mux.state import write_whole


def test_a_link_in_the_way_is_not_written_through(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("theirs")
    for name in ("file", "file.part"):
        (tmp_path / name).symlink_to(other)
    write_whole(tmp_path / "file", "ours", 0o600)
    assert (tmp_path / "file").read_text() == "ours"
    assert not (tmp_path / "file").is_symlink()
    assert other.read_text() == "theirs"
    assert sorted(os.listdir(tmp_path)) == ["file", "other"]
