"""Files that others wrote: read whole if they are regular and not too large."""

import os
from pathlib import Path

import pytest

from anvil_mux import state
from anvil_mux.config import interpolate, keys
from anvil_mux.errors import ConfigError
from anvil_mux.telemetry import eventlog


def pipe(folder: Path) -> Path:
    os.mkfifo(folder / "pipe")
    return folder / "pipe"


@pytest.mark.parametrize("kind", ["device", "pipe"])
def test_what_never_ends_is_not_read(tmp_path, kind):
    file = Path("/dev/zero") if kind == "device" else pipe(tmp_path)
    said = f"{file}.*it is no regular file"
    with pytest.raises(ConfigError, match=said):
        interpolate.read(file)
    with pytest.raises(ConfigError, match=said):
        interpolate.variables_of([file], {})
    with pytest.raises(ConfigError, match=said):
        keys.load(file, {})
    with pytest.raises(eventlog.BadLog, match=said):
        eventlog.read(file)
    with pytest.raises(OSError, match="it is no regular file"):
        state.read_bytes(file)


def test_what_is_too_large_is_not_read(tmp_path):
    file = tmp_path / "large"
    file.touch()
    os.truncate(file, state.MOST + 1)
    with pytest.raises(ConfigError, match="cannot be read: it has more than 16 MiB"):
        interpolate.read(file)
    with pytest.raises(eventlog.BadLog, match="has more than 16 MiB in one line"):
        eventlog.read(file)
    os.truncate(file, state.MOST)
    assert len(state.read_bytes(file)) == state.MOST


def test_text_is_read_with_whichever_ends_of_lines(tmp_path):
    file = tmp_path / "text"
    file.write_bytes(b"a\r\nb\rc\n")
    assert state.read_text(file) == "a\nb\nc\n"


def test_a_folder_is_no_file(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        interpolate.read(tmp_path)
