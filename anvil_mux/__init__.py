"""anvil-mux: one address for many models; its version, and the commit of which it was made.

setup.py runs this file by itself when a wheel or a source archive is made, so it imports nothing of ours.
"""

from __future__ import annotations

from pathlib import Path

__version__ = "0.1.0"

FOLDER = Path(__file__).resolve().parent
WRITTEN = "commit.txt"
"""The file beside this one in which builds note the commit; a checkout has none."""
TIMEOUT = 5.0


def commit(folder: Path = FOLDER) -> str:
    """Return the commit's short id, with ``-dirty`` if files were changed since; ``""``: it is not known.

    A build has written it down, and of a checkout git says it.
    """
    import subprocess  # which each command would wait for otherwise, and few ask

    written = folder / WRITTEN
    if written.is_file():
        return written.read_text().strip()
    # Only a repository of ours says something of us: an installed package may lie below somebody else's.
    if not (folder.parent / ".git").exists():
        return ""
    # The pattern leaves tags out: the version tells those.
    ask = ["git", "-C", str(folder.parent), "describe", "--always", "--dirty", "--exclude", "*"]
    try:
        found = subprocess.run(ask, capture_output=True, text=True, timeout=TIMEOUT)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return found.stdout.strip()
