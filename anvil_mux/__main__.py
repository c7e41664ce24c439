"""The program ``anvil-mux``, and ``python -m anvil_mux``.

Importing the commands takes a tenth of a second, in which Ctrl-C is to end it as quietly as later. Each of
the three standard streams is there from the first line on, so that nobody prints into another file.
"""

from __future__ import annotations

import fcntl
import os
import signal
import sys


def main() -> int:
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is ignored: leave it so
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    open_standard_streams()
    from anvil_mux.cli.main import main as run

    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return run()
    except KeyboardInterrupt:
        return 130


def open_standard_streams() -> None:
    """Open those of the three that whoever started us has closed; what is printed there is nobody's."""
    for descriptor in (0, 1, 2):
        if not _serves(descriptor):
            null = os.open(os.devnull, os.O_RDWR)
            os.dup2(null, descriptor)
            os.set_inheritable(descriptor, True)
            if null != descriptor:
                os.close(null)
    sys.stdin = sys.stdin or os.fdopen(0, closefd=False)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


def _serves(descriptor: int) -> bool:
    """Whether it is open, and for output too where it is one.

    A shell whose standard error is closed reads its script there, and leaves it open for whom it starts.
    """
    try:
        way = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE
    except OSError:
        return False
    return descriptor == 0 or way != os.O_RDONLY


if __name__ == "__main__":
    sys.exit(main())
