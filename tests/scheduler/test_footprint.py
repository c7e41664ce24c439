"""What is remembered of what backends hold."""

from anvil_mux.scheduler.costs import Footprint, Footprints


def test_what_a_backend_held_is_what_it_gave_back_and_what_it_kept():
    prints = Footprints()
    prints.learn("a", "sleep", {"0": 18, "1": 17}, {"0": 1, "1": 2}, host_bytes=16)
    assert prints.held("a") == {"0": 19, "1": 19}
    assert prints.in_standby("a", "sleep") == Footprint(
        "a", "sleep", {"0": 19, "1": 19}, {"0": 1, "1": 2}, 16, 1
    )


def test_the_last_time_counts_whichever_way_it_was():
    prints = Footprints()
    prints.learn("a", "sleep", {"0": 18}, {"0": 1})
    prints.learn("a", "stop", {"0": 21}, {})
    assert prints.held("a") == {"0": 21}
    prints.learn("a", "sleep", {"0": 22}, {"0": 1})
    assert (prints.held("a"), prints.in_standby("a", "sleep").times) == ({"0": 23}, 2)
    assert [each.way for each in prints] == ["stop", "sleep"]
    assert Footprints(prints).held("a") == {"0": 23}


def test_what_was_not_read_changes_nothing_that_is_known():
    prints = Footprints()
    prints.learn("a", "stop", {"0": 21}, {})
    prints.learn("a", "stop", {}, {"0": 0})
    assert prints.in_standby("a", "stop").times == 1
    prints.learn("a", "sleep", {}, {"0": 0}, host_bytes=16)
    assert prints.in_standby("a", "sleep") == Footprint("a", "sleep", {}, {}, 16, 1)
    assert prints.held("a") == {"0": 21}


def test_of_who_never_left_nothing_is_known():
    assert Footprints().held("a") == {}
    assert Footprints().in_standby("a", "sleep") is None


def test_what_was_measured_before_the_service_was_described_anew_counts_no_more():
    prints = Footprints()
    prints.learn("a", "stop", {"0": 21}, {}, described="as it was")
    assert prints.held("a", "as it was") == {"0": 21}
    assert prints.held("a", "as it is") == {}
    assert prints.held("a") == {"0": 21}


def test_what_an_earlier_version_wrote_down_without_a_description_counts():
    assert Footprints([Footprint("a", "stop", {"0": 21}, {"0": 0})]).held("a", "as it is") == {"0": 21}


def test_what_was_kept_under_another_description_counts_no_more():
    prints = Footprints()
    prints.learn("a", "sleep", {}, {}, host_bytes=16, described="one")
    assert prints.in_standby("a", "sleep", "one").host_bytes == 16
    assert prints.in_standby("a", "sleep", "another") is None
