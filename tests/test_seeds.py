"""A run may take a part of what is drawn, and all parts are all of it."""

import pytest

from tests.seeds import chosen


def test_a_part_is_every_so_manyth_test():
    assert chosen("abcdefgh", "3/3") == ["c", "f"]
    assert chosen("abcdefgh", "1/8") == ["a"]


def test_all_parts_are_all_tests_once():
    parts = [chosen("abcdefgh", f"{number}/3") for number in (1, 2, 3)]
    assert sorted(parts[0] + parts[1] + parts[2]) == list("abcdefgh")


def test_where_none_is_asked_for_all_tests_run():
    assert chosen("abc", "") == ["a", "b", "c"]


@pytest.mark.parametrize("asked", ["0/8", "9/8", "3"])
def test_a_part_that_is_none_is_refused(asked):
    with pytest.raises(ValueError):
        chosen("abc", asked)
