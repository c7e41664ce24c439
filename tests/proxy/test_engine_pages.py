"""Engines' own pages below /upstream/: where they are shown, to whom, and what they cannot read."""

import json
from collections.abc import Callable

import pytest

from anvil_mux.config.config import Backend
from tests.chromium import IN_CHROMIUM
from tests.fake_engine import ASK_A, Answer, Rig, answer_of, keyring, shows
from tests.proxy.test_upstream import SWITCHED, WISH

Make = Callable[..., Rig]
ROOT, ALICE, BOB = "key-of-the-admin", "key-of-alice", "key-of-bob"
KEYS = f"{ROOT} admin; {ALICE} models=a; {BOB} models=org/b"
A = Backend("a", "a", gpus=("0",), aliases=("alias",), engine="llamacpp")
B = Backend("b", "org/b", gpus=("0",), served_model="b-inside", engine="vllm")
OPENED = b"Accept: text/html,*/*\r\nSec-Fetch-Site: none\r\n"
PAGE = b"<!doctype html><title>engine</title>"


def html(body: bytes, *fields: bytes) -> bytes:
    return answer_of(body, b"Content-Type: text/html", *fields)


@pytest.fixture
def open_rig(make_rig: Make) -> Rig:
    """Without keys, so that nothing is to be read at its address."""
    rig = make_rig(backends=(A, B))
    rig.engine.answer = rig.other.answer = lambda _: html(PAGE)
    return rig


@pytest.fixture
def keyed(make_rig: Make) -> Rig:
    rig = make_rig(backends=(A, B), keys=keyring(KEYS), has_pages=True)
    rig.engine.answer = rig.other.answer = lambda _: html(PAGE)
    return rig


def load(rig: Rig, extra: bytes = b"") -> None:
    assert rig.ask(ASK_A, path=b"/models/load?wait=true", extra=extra).status == 200


# Where there are no keys


@pytest.mark.parametrize("name", [b"a", b"alias", b"org/b", b"org%2Fb"])
def test_who_opens_a_page_has_its_model_loaded(open_rig, name):
    answer = open_rig.get(b"/upstream/%b/" % name, extra=OPENED)
    assert (answer.status, answer.body) == (200, PAGE)


@pytest.mark.parametrize(
    "extra",
    [
        b"",
        b"Accept: text/html\r\n",
        *[b"Accept: text/html\r\nSec-Fetch-Site: %b\r\n" % site for site in (b"same-site", b"cross-site")],
    ],
)
def test_no_other_get_loads_one(open_rig, extra):
    answer = open_rig.get(b"/upstream/a/", extra=extra)
    assert (answer.status, answer.code) == (409, "bad_request")
    assert not open_rig.events.of("queued")


@pytest.mark.parametrize("name", [b"a", b"org/b"])
def test_a_page_is_found_without_its_last_slash(open_rig, name):
    answer = open_rig.get(b"/upstream/" + name, extra=OPENED)
    assert (answer.status, answer.header(b"location")) == (307, b"/upstream/%b/" % name)


@pytest.mark.parametrize("path", [b"/_app/bundle.js", b"/props?model=x", b"/sw.js", b"/a/b/c.png"])
def test_a_page_reads_what_its_engine_has(open_rig, path):
    load(open_rig)
    heard = open_rig.engine.answers(html(b"x", b"Content-Encoding: gzip", b"Service-Worker-Allowed: /"))
    got = open_rig.get(b"/upstream/a" + path, extra=b"Accept-Encoding: gzip\r\n")
    assert (got.status, got.header(b"content-encoding")) == (200, b"gzip")
    assert got.header(b"service-worker-allowed") is None, "it would have the whole address"
    assert heard[0].head.startswith(b"GET %b HTTP/1.1\r\n" % path)
    assert b"accept-encoding: gzip" in heard[0].head.lower()


@pytest.mark.parametrize(
    ("method", "path"),
    [
        (b"POST", b"/upstream/a/tools"),
        (b"POST", b"/upstream/a/slots/0"),
        (b"GET", b"/upstream/a/slots/0"),
        (b"DELETE", b"/upstream/a/v1/models"),
        (b"GET", b"/upstream/a/../b/"),
        (b"GET", b"/upstream/a//x"),
        (b"GET", b"/upstream/org/b/is_sleeping"),
    ],
)
def test_a_page_steers_no_engine_and_does_what_is_listed(open_rig, method, path):
    load(open_rig)
    answer = open_rig.get(path, method)
    assert answer.status == 404
    assert open_rig.engine.asked.empty()


@pytest.mark.parametrize(
    ("method", "path"), [(b"POST", b"/v1/streams/lookup"), (b"DELETE", b"/v1/stream?conv_id=1")]
)
def test_llama_servers_page_finds_and_ends_its_streams(open_rig, method, path):
    load(open_rig)
    extra = b"" if method == b"DELETE" else b"Content-Length: 0\r\n"
    assert open_rig.get(b"/upstream/a" + path, method, extra).status == 200


def test_a_page_opens_a_websocket(open_rig):
    load(open_rig)
    open_rig.engine.answer = None
    client = open_rig.client()
    client.send(b"GET /upstream/a/ws?id=1 HTTP/1.1\r\nHost: localhost\r\n%b\r\n" % WISH)
    asked = open_rig.engine.next()
    assert asked.head.startswith(b"GET /ws?id=1 HTTP/1.1\r\n")
    asked.send(SWITCHED)
    assert client.read_until(b"\r\n\r\n").startswith(b"HTTP/1.1 101 ")


def test_a_server_elsewhere_has_no_page_here(make_rig):
    rig = make_rig(backends=(Backend("c", "c", url="https://there.example/v1", engine="openai"),))
    assert rig.get(b"/upstream/c/", extra=OPENED).status == 404


# Where there are keys


def at_pages(rig: Rig, key: str, path: bytes, extra: bytes = OPENED) -> Answer:
    return rig.client_at_pages().get(path, extra=extra + (shows(key) if key else b""))


def test_pages_have_a_port_of_their_own_and_who_opens_one_is_sent_there(keyed):
    answer = keyed.get(b"/upstream/a/", extra=OPENED)
    there = b"http://127.0.0.1:%d/upstream/a/" % keyed.config.pages_port
    assert (answer.status, answer.header(b"location")) == (307, there)
    load(keyed, shows(ROOT))
    answer = keyed.get(b"/upstream/a/", extra=shows(ROOT))
    assert (answer.status, answer.code) == (404, "not_found")
    assert b"pages_port" in answer.body


def test_a_key_that_may_use_the_model_sees_its_page(keyed):
    assert at_pages(keyed, "", b"/upstream/a/").status == 401
    assert at_pages(keyed, BOB, b"/upstream/a/").code == "model_not_found"
    assert at_pages(keyed, BOB, b"/upstream/a").code == "model_not_found"
    for key in (ALICE, ROOT):
        assert at_pages(keyed, key, b"/upstream/a/").body == PAGE


def test_llama_servers_page_names_its_file(keyed):
    assert at_pages(keyed, ALICE, b"/upstream/a/").status == 200
    assert at_pages(keyed, ALICE, b"/upstream/a/props?model=%2Fm%2Fa.gguf").status == 200
    assert at_pages(keyed, BOB, b"/upstream/org/b/").status == 200
    assert at_pages(keyed, BOB, b"/upstream/org/b/props?model=other").code == "model_not_found"


@pytest.mark.parametrize(
    "path",
    [b"/", b"/healthz", b"/v1/models", b"/models/sse", b"/events", b"/requests", b"/ui", b"/upstream/"],
)
def test_the_port_has_nothing_else(keyed, path):
    answer = at_pages(keyed, ROOT, path)
    assert (answer.status, answer.code) == (404, "not_found")


@pytest.mark.parametrize("path", [b"/models/unload", b"/pause", b"/v1/chat/completions", b"/reload"])
def test_nothing_is_done_at_that_port(keyed, path):
    assert keyed.client_at_pages().ask(ASK_A, path=path, extra=shows(ROOT)).status == 404


def test_an_engine_gets_no_key_of_a_page(keyed):
    heard = keyed.engine.answers()
    assert at_pages(keyed, ALICE, b"/upstream/a/").status == 200
    assert ALICE.encode() not in heard[0].head


# Routes of llama-swap


@pytest.mark.parametrize(
    ("path", "place"),
    [
        (b"/running", b"GET /models"),
        (b"/unload", b"/models/unload"),
        (b"/logs/stream", b"GET /logs?model=NAME"),
    ],
)
def test_a_route_of_llama_swap_names_ours(rig, path, place):
    answer = rig.get(path)
    assert (answer.status, answer.code) == (404, "not_found")
    assert place in answer.body


def test_the_page_of_llama_swap_is_ours(rig):
    answer = rig.get(b"/ui")
    assert (answer.status, answer.header(b"location")) == (307, b"/")


# In a browser

SCRIPT = b"""<!doctype html><title>engine</title><script>
const kept = JSON.stringify([Object.values(sessionStorage), Object.values(localStorage), document.cookie]);
const reach = path => fetch(path).then(r => r.status, () => "refused");
const home = location.protocol + "//" + location.hostname + ":%d";
Promise.all([reach("./props"), reach(home + "/healthz"), reach("/healthz")]).then(
  found => { document.title = JSON.stringify([kept, found]); });
</script>"""


@IN_CHROMIUM[0]
@IN_CHROMIUM[1]
def test_the_page_of_an_engine_reads_no_key_that_the_status_page_keeps(keyed, browser):
    port, pages = keyed.address[1], keyed.config.pages_port
    keyed.engine.answer = lambda _: html(SCRIPT % port)
    browser.open(f"http://127.0.0.1:{port}/")
    browser.wait("document.readyState === 'complete' && document.activeElement.id === 'key'")
    browser.type(ROOT)
    browser.press("Enter", 13)
    browser.wait("Object.values(sessionStorage).length > 0")
    browser.open(f"http://x:{ALICE}@127.0.0.1:{pages}/upstream/a/")  # from now on it knows this key there
    browser.wait("document.title")
    browser.open(f"http://127.0.0.1:{port}/upstream/a/")
    browser.wait(f"location.port === '{pages}' && document.title.startsWith('[')")
    kept, found = json.loads(browser.ask("document.title"))
    assert (json.loads(kept), found) == ([[], [], ""], [200, "refused", 404])
    browser.leave()
