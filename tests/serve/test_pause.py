"""A pause outlives the anvil-mux that was paused."""

import json
import math
import time

import pytest

from anvil_mux.serve.files import PauseFile
from tests.cli.demo import compose, state
from tests.running import Running, seen, serving

__all__ = ["state"]


def test_it_lasts_through_a_restart_and_until_it_is_resumed(tmp_path, state):
    file = compose(tmp_path, "a")

    def stopped(mux: Running) -> bool:
        return (
            seen(lambda: mux.get("/healthz")["models"]["a"]["state"], lambda now: now == "stopped")
            == "stopped"
        )

    with serving(file, state=state) as mux:
        assert mux.chat("a")[0] == 200
        assert mux.request("POST", "/pause", {})[0] == 200
        assert stopped(mux)
    with serving(file, state=state, on_exit="keep") as mux:
        status, headers, text = mux.chat("a")
        assert (status, json.loads(text)["error"]["code"]) == (503, "paused")
        assert float(headers["retry-after"]) == 60
        assert "anvil_paused 1.0" in mux.request("GET", "/metrics")[2]
        assert mux.request("POST", "/resume", {})[0] == 200
        assert mux.chat("a")[0] == 200
        assert mux.get("/healthz")["paused"] is None
    kept = PauseFile(next(each.parent for each in state.rglob("learned")), print)
    assert kept.seconds_left() is None
    assert kept.keep(math.inf)
    with serving(file, state=state) as mux:  # one that ran on meanwhile is stopped
        assert stopped(mux)
        mux.tells(r"a: evicting|a: stopped|a: draining \(anvil-mux is paused\)")


@pytest.mark.parametrize(
    ("text", "left", "told"),
    [
        ('{"until": null}', math.inf, 0),
        ('{"until": 1}', None, 0),
        ('{"until": "soon"}', math.inf, 1),
        ("{", math.inf, 1),
        ("[]", math.inf, 1),
        ("\x00\x00", math.inf, 1),
    ],
)
def test_what_the_file_says(tmp_path, text, left, told):
    said: list[str] = []
    (tmp_path / "pause").write_text(text)
    assert PauseFile(tmp_path, said.append).seconds_left() == left
    assert len(said) == told


def test_an_end_is_a_moment_of_the_wall_clock(tmp_path):
    file = PauseFile(tmp_path, print)
    assert file.keep(time.time() + 1000)
    left = file.seconds_left()
    assert left is not None
    assert 0 < left <= 1000
    assert file.keep(None)
    assert file.seconds_left() is None


def test_a_folder_that_cannot_be_written_is_told(tmp_path):
    said: list[str] = []
    assert not PauseFile(tmp_path / "none", said.append).keep(math.inf)
    assert said[0].endswith("so a restart forgets this: No such file or directory")
