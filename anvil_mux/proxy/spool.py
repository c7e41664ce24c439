"""A large body on disk, so that it can be sent again and with another name of its model."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator

from anvil_mux.errors import DiskFull

READ = 16384


class Spool:
    """A large body on disk. Iterating reads it from its beginning, so that it can be sent again."""

    def __init__(self) -> None:
        try:
            self._file = tempfile.TemporaryFile(buffering=0, prefix="anvil-mux-")  # noqa: SIM115
        except OSError as error:
            raise _not_kept(error) from None
        self._splice: tuple[int, int, bytes] | None = None
        self._length = 0

    def close(self) -> None:
        self._file.close()

    def __len__(self) -> int:
        if self._splice is None:
            return self._length
        start, end, new = self._splice
        return self._length + len(new) - (end - start)

    def fill(self, pieces: Iterator[bytes], scan: Callable[[bytes], None]) -> None:
        for piece in pieces:
            scan(piece)
            left = memoryview(piece)
            while left:
                try:
                    left = left[self._file.write(left) :]
                except OSError as error:
                    raise _not_kept(error) from None
            self._length += len(piece)

    def replace(self, span: tuple[int, int], new: bytes) -> None:
        """Have the bytes of ``span`` read as ``new`` from now on."""
        self._splice = (*span, new)

    def __iter__(self) -> Iterator[bytes]:
        if self._splice is None:
            yield from self._read(0, None)
        else:
            start, end, new = self._splice
            yield from self._read(0, start)
            yield new
            yield from self._read(end, None)

    def _read(self, start: int, end: int | None) -> Iterator[bytes]:
        self._file.seek(start)
        while end is None or start < end:
            piece = self._file.read(READ if end is None else min(READ, end - start))
            if not piece:
                return
            start += len(piece)
            yield piece


def _not_kept(error: OSError) -> DiskFull:
    return DiskFull(
        f"The upload does not fit on anvil-mux's disk, where it is kept until it is sent: {error.strerror}. "
        "Send less, or start anvil-mux with a TMPDIR that has more room."
    )
