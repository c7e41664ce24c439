"""How far a load is: what loads took and what the log says in, words out."""

from __future__ import annotations

from anvil_mux.scheduler.waits import LogProgress, Progress, progress


def test_a_load_takes_as_long_as_loads_took() -> None:
    far = progress(8.0, 20.0, None)
    assert far == Progress(0.4, 12.0, "")
    assert far.words == "40%, 12 s left"


def test_what_the_log_says_makes_it_longer_but_not_shorter() -> None:
    assert progress(8.0, 20.0, LogProgress("reading weights", 0.1, 72.0)) == Progress(
        0.1, 72.0, "reading weights"
    )
    assert progress(8.0, 20.0, LogProgress("reading weights", 0.9, 1.0)).seconds_left == 12.0


def test_of_a_first_load_only_the_log_is_known() -> None:
    far = progress(8.0, None, LogProgress("reading weights", 0.56, 11.0))
    assert far.words == "56%, 11 s left, reading weights"
    assert progress(8.0, None, None).words == ""


def test_a_load_that_takes_longer_than_ever_is_nearly_done_for_all_anybody_knows() -> None:
    assert progress(30.0, 20.0, LogProgress("warming up")).words == "99%, warming up"
    assert progress(1e9, 20.0, LogProgress("warming up", None, 1.0)).fraction == 0.99
