"""Secrets and configs that are texts or variables: the files that a container is given of them."""

import pytest

from anvil_mux.config.service import PlacedFile
from tests.config.files import plain, problems

SHARED = """
secrets: {s: {environment: TOKEN}, unset: {environment: NONE}, f: {file: ./f}}
configs: {c: {content: text}, e: {environment: TOKEN}}
"""


def text(given):
    return f"services:\n  m: {{image: x, x-anvil: {{}}, {given}}}\n{SHARED}"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("secrets: [s, f]", [PlacedFile("/run/secrets/s", "x", "TOKEN")]),
        (
            "secrets: [{source: s, target: t, uid: '5', gid: '6', mode: '0440'}]",
            [PlacedFile("/run/secrets/t", "x", "TOKEN", 0o440, 5, 6)],
        ),
        ("secrets: [{source: s, target: /a/b, mode: 256}]", [PlacedFile("/a/b", "x", "TOKEN", 0o400)]),
        ("secrets: [unset]", [PlacedFile("/run/secrets/unset", None, "NONE")]),
        ("configs: [c, {source: e, target: /t}]", [PlacedFile("/c", "text"), PlacedFile("/t", "x", "TOKEN")]),
        ("secrets: [absent]", []),
    ],
)
def test_placed_files_of_a_service_are_those_that_are_not_files_of_the_host(tmp_path, given, expected):
    config = plain(tmp_path, text(given), environ={"TOKEN": "x"})
    assert [*config.backends[0].service.files] == expected
    assert "PlacedFile" not in repr(config)


def test_a_mode_that_is_not_octal_is_refused(tmp_path):
    [problem] = problems(tmp_path, text("secrets: [{source: s, mode: rw}]"))
    assert "mode must be an octal number: rw" in problem
