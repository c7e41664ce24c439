"""The services on which a service depends, in the order of their starts."""

import pytest

from anvil_mux.config.service import COMPLETED, HEALTHY, STARTED
from tests.config.files import plain, problems

OTHERS = """
  redis: {image: redis}
  fetch: {image: f, depends_on: {net: {condition: service_healthy}}}
  net: {image: n}
  other: {image: o, x-anvil: {}}
"""


def needs(folder, written):
    text = f"services:\n  m: {{image: x, x-anvil: {{}}, depends_on: {written}}}{OTHERS}"
    found = plain(folder, text)
    return found.backends[0].service.needs, found.warnings


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("[redis]", (("redis", STARTED),)),
        ("{fetch: {condition: service_completed_successfully}}", (("net", HEALTHY), ("fetch", COMPLETED))),
        ("{net: {}, fetch: {condition: service_started}}", (("net", HEALTHY), ("fetch", STARTED))),
        ("{gone: {required: false}}", ()),
    ],
)
def test_needs_come_before_those_that_need_them(tmp_path, written, expected):
    assert needs(tmp_path, written)[0] == expected


def test_a_model_is_not_started_for_another(tmp_path):
    found, warnings = needs(tmp_path, "[redis, other]")
    assert found == (("redis", STARTED),)
    assert any("depends on other, which anvil-mux starts only when it is asked for" in w for w in warnings)


def test_an_unknown_condition_is_refused(tmp_path):
    text = "services: {m: {image: x, x-anvil: {}, depends_on: {r: {condition: soon}}}, r: {image: r}}"
    (problem,) = problems(tmp_path, text)
    assert "the condition of r must be one of service_started" in problem


def test_a_process_depends_on_nothing_and_is_told(tmp_path):
    text = "x-anvil: {runtime: process}\nservices: {m: {command: x, depends_on: [r]}, r: {image: r}}"
    found = plain(tmp_path, text)
    assert found.backends[0].service.needs == ()
    assert any("`depends_on` has no effect on a local process" in text for text in found.warnings)
