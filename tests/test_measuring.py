"""What counts as growth, and what does not."""

import os

from tests.measuring import LEAST, Meter, Usage, growths, quarters, usage_of


def climbing(by: float, count: int = LEAST) -> list[Usage]:
    return [Usage(60.0 + by * number / count, 100.0, 200.0) for number in range(count)]


def test_a_quarter_has_its_median_of_memory_and_its_fewest_threads_and_descriptors():
    numbers = (1, 2, 9, 4, 4, 4, 0, 6, 7, 8, 8, 8)
    samples = [Usage(float(number), number + 1.0, number + 2.0) for number in numbers]
    assert [each.rss for each in quarters(samples)] == [2.0, 4.0, 6.0, 8.0]
    assert [each.threads for each in quarters(samples)] == [2.0, 5.0, 1.0, 9.0]
    assert [each.descriptors for each in quarters(samples)] == [3.0, 6.0, 2.0, 10.0]


def test_more_requests_at_once_are_no_growth():
    busier = [Usage(60.0, 20.0 + number * (number % 5), 30.0) for number in range(LEAST)]
    assert growths(quarters(busier)) == []


def test_what_warms_up_and_stays_is_no_growth():
    samples = [Usage(20.0, 3.0, 9.0)] * 30 + [Usage(60.0, 100.0, 200.0)] * 90
    assert growths(quarters(samples)) == []


def test_what_climbs_to_the_end_is_growth():
    assert growths(quarters(climbing(60.0))) == ["rss grew from 82 to 112"]
    leaking = [Usage(60.0, 20.0 + number, 30.0 + 2 * number) for number in range(LEAST)]
    assert growths(quarters(leaking)) == ["threads grew from 50 to 110", "descriptors grew from 90 to 210"]


def test_a_life_that_is_too_short_to_tell_is_not_judged():
    meter = Meter(lambda: (1, os.getpid()))
    meter.samples[1] = climbing(60.0, LEAST - 1)
    assert meter.flaws() == []
    meter.samples[2] = climbing(60.0)
    assert meter.flaws() == ["in life 2 rss grew from 82 to 112"]


def test_a_long_life_has_a_curve_of_its_memory():
    meter = Meter(lambda: (1, os.getpid()))
    meter.samples[1] = climbing(20.0)
    meter.samples[2] = climbing(20.0, LEAST - 1)
    curves = [line for line in meter.table() if "its memory" in line]
    assert curves == [
        "life 1, its memory in 20 parts of that time, MiB: "
        "60 61 62 63 64 65 66 67 68 69 70 71 72 73 74 75 76 77 78 79"
    ]


def test_a_process_is_read_as_the_kernel_has_it():
    read, write = os.pipe()
    try:
        had = usage_of(os.getpid())
        more = os.dup(read)
        has = usage_of(os.getpid())
        os.close(more)
    finally:
        os.close(read)
        os.close(write)
    assert had.rss > 1
    assert (has.descriptors, has.threads >= 1) == (had.descriptors + 1, True)
