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


@pytest.mark.parametrize(
    ("method", "path", "route"),
    [
        (b"POST", b"/v1/chat/completions", "/v1/chat/completions"),
        (b"POST", b"/openai/v1/chat/completions", "/v1/chat/completions"),
        (b"POST", b"/openai/deployments/SECRET/chat/completions", "/v1/chat/completions"),
        (b"GET", b"/chat/completions", "/v1/chat/completions"),
        (b"POST", b"/v1/responses/resp_SECRET/cancel", "/v1/responses"),
        (b"POST", b"/openai/v1/responses/resp_SECRET/cancel", "/v1/responses"),
        (b"GET", b"/api/v0/responses/resp_SECRET/input_items", "/v1/responses"),
        (b"DELETE", b"/responses/resp_SECRET", "/v1/responses"),
        (b"PUT", b"/v1/responses/resp_SECRET", "other"),
        (b"POST", b"/upstream/SECRET/v1/chat/completions", "/upstream"),
        (b"GET", b"/upstream/", "/upstream"),
        (b"GET", b"/v1/models/SECRET", "/v1/models"),
        (b"POST", b"/v1/models/SECRET/load", "/v1/models/NAME/load"),
        (b"GET", b"/SECRET", "other"),
        (b"OPTIONS", b"/SECRET", "other"),
    ],
)
def test_route_in_metrics_is_a_row_and_never_words_of_a_client(rig, method, path, route):
    rig.get(path, method, b"Content-Length: 0\r\n")
    assert rig.events.record().route == route


def test_route_of_what_is_not_http_is_other(rig):
    client = rig.client()
    client.send(b"SECRET\r\n\r\n")
    client.read()
    assert rig.events.record().route == "other"
