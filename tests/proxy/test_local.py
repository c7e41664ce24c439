"""The routes that are answered here: the right that each needs, and the methods that it takes."""

import pytest

RIGHTS = {
    "none": "/api/hello /health /livez /readyz /ui /ui/",
    "any key": (
        "/api/ps /api/show /api/tags /api/v0/models /api/version /logs/stream /models /models/sse"
        " /running /unload /v1/models /v1/models/ /v1/models/NAME/load"
    ),
    "state": "/ /events /healthz /metrics /requests/running /usage /why",
    "admin": (
        "/hosts /hosts/drain /hosts/gone /hosts/undrain /logs /models/load /models/pin /models/unload"
        " /models/unpin /pause /requests /requests/cancel /resume"
    ),
}


def test_each_route_needs_the_right_that_is_written_here(rig):
    rows = sorted(rig.handler.local.routes.items())
    assert {right: " ".join(path for path, row in rows if row.right == right) for right in RIGHTS} == RIGHTS
    assert {row.right for _, row in rows} == RIGHTS.keys()


@pytest.mark.parametrize(
    ("path", "right"),
    [
        ("/v1/models/org/b", "any key"),
        ("/upstream/a/tokenize", "any key"),
        ("/v1/modelsx", "admin"),
        ("/upstream", "admin"),
        ("/nowhere", "admin"),
    ],
)
def test_a_path_that_is_no_row_needs_a_right_too(rig, path, right):
    assert rig.handler.local.find("GET", path).right == right


@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        (b"/healthz", b"GET, HEAD, OPTIONS"),
        (b"/v1/models/a", b"GET, HEAD, OPTIONS"),
        (b"/why", b"GET, OPTIONS"),
        (b"/events", b"GET, OPTIONS"),
        (b"/models/sse", b"GET, OPTIONS"),
        (b"/models/load", b"POST, OPTIONS"),
        (b"/v1/chat/completions", b"POST, OPTIONS"),
    ],
)
def test_what_a_path_takes_is_told_to_who_asks_and_to_who_errs(rig, path, allowed):
    answer = rig.get(path, b"OPTIONS")
    assert (answer.status, answer.header(b"allow")) == (204, allowed)
    answer = rig.get(path, b"PUT")
    assert answer.status == 405
    assert answer.header(b"allow") in (allowed, allowed.removesuffix(b", OPTIONS"))


def test_what_programs_ask_again_and_again_is_quiet(rig):
    quiet = {path for path, row in rig.handler.local.routes.items() if row.is_quiet}
    assert quiet == {"/health", "/healthz", "/livez", "/logs", "/metrics", "/readyz", "/why"}
    client = rig.client()
    client.get(b"/livez")
    client.get(b"/v1/models/a")
    records = [rig.events.record(number) for number in (1, 2)]
    assert [(record.is_quiet, record.route) for record in records] == [
        (True, "/livez"),
        (False, "/v1/models"),
    ]
