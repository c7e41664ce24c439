"""Hostile bytes that are led by what they reach: the checks of test_fuzz.py under atheris (libFuzzer).

    python -m tests.fuzzing KIND SECONDS

What led somewhere new is kept below .cache/fuzz, and is where the next run begins. `bin/test fuzz` runs this.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

import atheris  # type: ignore[import-not-found, import-untyped, unused-ignore]

with atheris.instrument_imports(include=["anvil_mux"]):
    from tests.protocol import test_fuzz

LONGEST = 1000
KEPT = Path(__file__).resolve().parent.parent / ".cache" / "fuzz"


def begin(kind: str, folder: Path) -> None:
    """The corpus, and the words that mean something, as libFuzzer wants them."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, data in enumerate(test_fuzz.corpus(kind)):
        (folder / f"corpus-{number}").write_bytes(data)
    words = ['"' + "".join(f"\\x{byte:02x}" for byte in word) + '"\n' for word in test_fuzz.WORDS]
    (KEPT / f"{kind}.words").write_text("".join(words))


def main(kind: str, seconds: str) -> None:
    folder, check = KEPT / kind, test_fuzz.CHECKS[kind]
    begin(kind, folder)

    def one(data: bytes) -> None:
        # The same bytes come in the same pieces, or what was found could not be found again.
        test_fuzz.check_one(kind, check, data, random.Random(data))

    limits = [f"-max_total_time={seconds}", f"-max_len={LONGEST}", "-timeout=20"]
    words = [f"-dict={KEPT / kind}.words", f"-artifact_prefix={KEPT}/found-{kind}-", "-verbosity=0"]
    atheris.Setup([sys.argv[0], str(folder), *limits, *words], one)
    atheris.Fuzz()


if __name__ == "__main__":
    main(*sys.argv[1:])
