"""Frames: values on a pipe between two processes of ours, each a length in four bytes and a pickle.

Both ends are one program of one version, so neither fears what the other sends. What comes from other
machines is bytes in a frame, and read by ``messages``.
"""

from __future__ import annotations

import pickle
import struct
from typing import BinaryIO

LENGTH = struct.Struct(">I")


def read_frame(file: BinaryIO) -> tuple[object, ...] | None:
    """Return the next value, a tuple; None at the end of the pipe, also in the middle of a frame."""
    head = file.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(head)
    data = file.read(length)
    if len(data) < length:
        return None
    value = pickle.loads(data)
    assert isinstance(value, tuple)
    return value


def write_frame(file: BinaryIO, value: tuple[object, ...]) -> None:
    """Write a value whole; OSError where nobody reads any more."""
    data = pickle.dumps(value)
    file.write(LENGTH.pack(len(data)) + data)
    file.flush()
