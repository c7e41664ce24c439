"""Whatever stands in a compose file, a variable, a file of keys or a profile is taken, or told with its file.

``check`` reads what is drawn, and a running program is given some of it by a reload, which changes nothing if
anything is wrong.
"""

from __future__ import annotations

import random
import signal
from pathlib import Path

import pytest

from anvil_mux.config.config import SERVICE_SETTINGS, SETTINGS
from tests.running import STOP_TIMEOUT, begin, seen
from tests.values.settings import EXIT_CODES, NAMES, OF_YAML, Files, drawn, judged, value_of, write
from tests.values.test_values import SEED, kind_of, numbers
from tests.values.values import changed
from tests.values.witness import MODELS, House, compose

ROUNDS = 40
"""Cases in a usual run."""
RELOADS = STARTS = 6

FOUND = [
    Files("compose", ((("services", "a", "image"), "0o17"),)),
    Files("compose", ((("services", "a", "image"), "[{}]"),)),
    Files(changes=((("services", "a", "scale"), "31536001"),)),
    Files(changes=((("services", "a", "deploy", "replicas"), "9999999999"),)),
    Files(changes=((("x-anvil", "client_timeout"), "very deep list"),)),
    Files(changes=((("x-anvil", "host_memory"), "5,000 brackets"),)),
    Files(changes=((("services", "a", "x-anvil", "aliases"), "lone surrogate"),)),
    *(
        Files(changes=((("x-anvil", "policy", setting), value),))
        for setting in ("quiet", "window", "period")
        for value in ("1e15", "309 digits")
    ),
    Files(changes=((("x-anvil", "routing", "policies", "my_lmetric", "filters", 1), "control characters"),)),
    Files(variables=(("ANVIL_DEFAULT_MODEL", "other surrogate"),)),
    *(Files(variables=((name, "{true: 1}"),)) for name in ("ANVIL_GPUS", "ANVIL_MACHINES")),
    Files(profile=((("ttft", "results", 0, "p50"), "309 digits"),)),
    Files(profile=((("metadata", "max_num_batched_tokens"), "309 digits"),)),
    *(
        Files(changes=(((*place, key), value),))
        for place, keys in (
            (("x-anvil",), ("home_after", "queue_timeout", "drain_timeout")),
            (
                ("services", "a", "x-anvil"),
                ("ttl", "home_after", "demote_after", "min_residency", "load_timeout"),
            ),
        )
        for key in keys
        for value in ("9999999999", ".nan")
    ),
]
"""Cases that once showed a mistake."""


@pytest.mark.parametrize("files", FOUND, ids=range(len(FOUND)))
def test_what_was_found_once_holds(tmp_path: Path, files: Files) -> None:
    assert judged(files, tmp_path) == []


def test_whatever_is_written_is_taken_or_told(tmp_path: Path) -> None:
    reports: dict[str, str] = {}
    number = 0
    for number in numbers(share=0.2, rounds=ROUNDS):
        files = drawn(random.Random(f"{SEED} {number}"))
        for finding in judged(files, tmp_path):
            kind = finding.partition("=")[0] if finding.startswith("accepted") else kind_of(finding)
            if kind not in reports:
                reports[kind] = f"{finding[:4000]}\n    seed {SEED}, files {number}"
                print(reports[kind], flush=True)
    print(f"seed {SEED}: {number + 1} configurations")
    assert not reports, "\n\n".join(reports.values())


def test_a_program_that_is_given_whatever_is_written_serves_or_says_why_not(tmp_path: Path) -> None:
    folder, number = tmp_path / "files", 0
    folder.mkdir()
    for number in numbers(share=0.1, rounds=STARTS):
        draw = random.Random(f"{SEED} start {number}")
        key, name = draw.choice([*SETTINGS]), draw.choice([*OF_YAML, *NAMES])
        files = Files(changes=((("x-anvil", key), name),))
        try:
            file = write(files, folder)
        except UnicodeEncodeError:
            continue
        running = begin(file, state=tmp_path)
        serves = running.tells("serves http|error: ")[0] == "serves http"
        code = running.stop() if serves else running.process.wait(STOP_TIMEOUT)
        running.stop()
        said = "\n".join(running.output)
        assert code in EXIT_CODES, (files, code, said)
        assert "Traceback" not in said, (files, said)
    print(f"seed {SEED}: {number + 1} starts")


def test_a_reload_of_whatever_is_written_is_taken_or_changes_nothing(house: House) -> None:
    number = 0
    for number in numbers(share=0.1, rounds=RELOADS):
        draw = random.Random(f"{SEED} {number}")
        document, name = compose(), draw.choice([*OF_YAML, *NAMES])
        key = draw.choice(list(SERVICE_SETTINGS) if draw.random() < 0.5 else list(SETTINGS))
        inside = document["services"]["small"]["x-anvil"] if key in SERVICE_SETTINGS else document["x-anvil"]
        inside.setdefault(key, None)
        place = ("services", "small", "x-anvil", key) if key in SERVICE_SETTINGS else ("x-anvil", key)
        before = tries(house)
        text = changed(document, ((place, name),), value_of)
        house.file.write_text(text.replace("FOLDER", str(house.answers)), "utf-8", "surrogatepass")
        house.running.process.send_signal(signal.SIGHUP)
        seen(lambda: tries(house), lambda now, then=before: now != then)  # type: ignore[misc]
        house.write(compose())
        status, _, said = house.running.request("POST", "/reload")
        assert status == 200, (place, name, said)
        assert {*house.running.get("/healthz")["models"]} == {*MODELS}, (place, name)
        assert house.judged_alive() == [], (place, name)
    print(f"seed {SEED}: {number + 1} reloads")


def tries(house: House) -> tuple[object, object]:
    told = house.running.get("/healthz")["reload"]
    return told["count"], told["failed_at"]
