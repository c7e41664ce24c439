"""The rows and cards of the status page: buttons, menus, the focus, and memory; in a real Chromium."""

import json

import pytest

from anvil_mux.config.config import Backend
from anvil_mux.host.seam import GpuUse, OtherProcess
from tests.chromium import IN_CHROMIUM, Chromium
from tests.fake_engine import answer_of, keyring
from tests.proxy.conftest import Opened
from tests.proxy.test_page import button, more, row, state_of
from tests.sleepy_engine import GIB

pytestmark = IN_CHROMIUM
MENU = "document.getElementById('menu')"
FOCUSED = "document.activeElement.ariaLabel"
HTML = answer_of(b"a page", b"Content-Type: text/html")
ROOT, ALICE, BOB = "key-of-the-admin", "key-of-alice", "key-of-bob"
LINES = f"{ROOT} admin; {ALICE} models=a state; {BOB} models=none state"


# One button for each row, and a menu


@pytest.fixture
def page(opened: Opened) -> Chromium:
    _, page = opened("a")
    page.wait(f"{state_of('a')} === 'ready'")
    return page


@pytest.mark.parametrize(
    ("about", "first", "others"),
    [
        ({"state": "stopped"}, "Load", ["Pin", "Why", "Log"]),
        ({"state": "loading"}, "Unload", ["Pin", "Why", "Log"]),
        ({"state": "ready", "pinned": True}, "Unload", ["Unpin", "Why", "Log"]),
        ({"state": "standby"}, "Load", ["Unload", "Pin", "Why", "Log"]),
        ({"state": "draining", "draining": {"seconds_left": 3}}, "Load", ["Pin", "Why", "Log"]),
        ({"state": "draining", "draining": {"seconds_left": None}}, "Unload", ["Pin", "Why", "Log"]),
        ({"state": "ready", "host_lost": True}, "Why", ["Pin", "Log"]),
        ({"elsewhere": {"server": "x", "circuit": "closed"}}, "Why", []),
    ],
)
def test_a_row_has_the_likeliest_action_as_its_button_and_the_others_in_its_menu(page, about, first, others):
    page.ask(f"source.close(), Object.assign(state.models.a, {json.dumps(about)}), show(), null")
    assert page.ask(f"{button('a')}.textContent") == first
    assert page.ask(f"[{button('a')}.ariaLabel, {more('a')}.ariaLabel]") == [f"{first} a", "More for a"]
    assert page.ask(f"{more('a')}.checkVisibility()") is bool(others)
    assert page.ask(f"{more('a')}.actions.map(each => each.text)") == others


def test_the_menu_is_used_by_the_keyboard(page):
    page.ask(f"{more('a')}.focus()")
    page.press("Enter", 13)
    assert page.ask(f"{MENU}.checkVisibility() && {more('a')}.ariaExpanded") == "true"
    tree = page.tree()
    assert ("menu", "More for a") in tree
    assert [name for role, name in tree if role == "menuitem"] == ["Pin a", "Why a", "Log a"]
    focused = [page.ask(FOCUSED)]
    for key, code in [("ArrowDown", 40), ("End", 35), ("ArrowDown", 40), ("ArrowUp", 38), ("Home", 36)]:
        page.press(key, code)
        focused.append(page.ask(FOCUSED))
    assert focused == ["Pin a", "Why a", "Log a", "Pin a", "Log a", "Pin a"]
    page.press("Escape", 27)
    assert page.ask(f"{MENU}.hidden && {more('a')}.ariaExpanded") == "false"
    assert page.ask(FOCUSED) == "More for a"
    page.press("Enter", 13)
    page.press("Tab", 9)
    assert page.ask(f"[{MENU}.hidden, {FOCUSED}]") == [True, "Load org/b"]


def test_the_menu_closes_by_its_button_and_when_another_opens_and_after_its_action(page):
    page.ask(f"{more('a')}.click()")
    page.ask(f"{more('a')}.click()")
    assert page.ask(f"{MENU}.hidden")
    page.ask(f"{more('a')}.click()")
    page.ask(f"{more('org/b')}.click()")
    assert page.ask(f"[{more('a')}.ariaExpanded, {MENU}.ariaLabel]") == ["false", "More for org/b"]
    page.ask(f"{MENU}.firstChild.click()")
    assert page.ask(f"[{MENU}.hidden, {FOCUSED}]") == [True, "More for org/b"]
    page.wait("state.models['org/b'].pinned")
    page.ask(f"{more('a')}.click(), document.getElementById('try-text').focus()")
    assert page.ask(f"{MENU}.hidden")


def test_a_second_quick_click_does_not_undo_the_first(page):
    page.ask(
        "source.close(), window.acted = [], load = name => acted.push('load'), "
        "unload = name => acted.push('unload'), show(), null"
    )
    for detail in (1, 2):
        page.ask(f"{button('a')}.dispatchEvent(new MouseEvent('click', {{detail: {detail}}}))")
    assert page.ask("acted") == ["unload"]


# Pages of engines

LINK = f"{MENU}.querySelector('a')"


def open_menu(page: Chromium, model: str) -> None:
    page.ask(f"close_menu(), {more(model)}.click()")


def test_the_menu_has_a_link_to_the_page_of_an_engine_that_has_one(opened):
    talks = Backend("a", "org/a b", ("0",), engine="llamacpp")
    elsewhere = Backend("c", "c", url="https://cloud.example/v1", engine="llamacpp")
    rig, page = opened("a", backends=(talks, Backend("b", "b", ("0",), engine="vllm"), elsewhere))
    rig.engine.answer = lambda _: HTML
    page.wait(f"{state_of('org/a b')} === 'ready'")
    open_menu(page, "b")
    assert page.ask(f"{LINK}") is None
    assert not page.ask(f"{more('c')}.checkVisibility()")
    open_menu(page, "org/a b")
    assert ("menuitem", "Engine's page: org/a b") in page.tree()
    assert page.ask(f"[{LINK}.target, {LINK}.getAttribute('href')]") == ["_blank", "upstream/org%2Fa%20b/"]
    assert page.ask(f"fetch({LINK}.href).then(answer => answer.text())") == "a page"
    page.press("End", 35)
    assert page.ask(f"document.activeElement === {LINK}")


@pytest.mark.parametrize(("key", "shown"), [(ROOT, True), (ALICE, True), (BOB, False)])
@pytest.mark.parametrize("has_pages", [True, False])
def test_where_there_are_keys_it_needs_a_port_and_a_key_for_the_model(
    make_rig, browser, key, shown, has_pages
):
    talks = Backend("a", "a", ("0",), engine="llamacpp")
    rig = make_rig(backends=(talks,), keys=keyring(LINES), has_pages=has_pages)
    browser.leave()
    browser.open("http://{}:{}/".format(*rig.address))
    browser.wait("document.readyState === 'complete' && document.activeElement.id === 'key'")
    browser.type(key)
    browser.press("Enter", 13)
    browser.wait("!!state")
    others = browser.ask("actions_of_model('a', state.models.a).slice(1).map(each => each.text)")
    assert ("Engine's page" in others) is (shown and has_pages)
    browser.ask("sessionStorage.clear()")
    browser.problems.clear()  # it notes the answer of 401


# The focus


def test_the_focus_stays_where_it_is_when_rows_come_and_go(page):
    page.ask(f"source.close(), {more('org/b')}.focus(), window.kept = state.models.a")
    for change in ("state.models = {'org/b': state.models['org/b']}", "state.models.a = kept"):
        page.ask(f"{change}, show(), null")
        assert page.ask(f"document.activeElement === {more('org/b')}")
    page.ask("state.models = {a: kept, 'org/b': state.models['org/b']}, show(), null")
    assert page.ask(f"document.activeElement === {more('org/b')}")


def test_the_focus_goes_to_the_next_row_if_its_own_is_gone(page):
    waiting = [{"ticket": ticket, "model": "a", "since": 0} for ticket in (1, 2)]
    page.ask(f"source.close(), state.queued = {json.dumps(waiting)}, show(), null")
    page.ask("document.querySelector('#queued button').focus()")
    page.ask("state.queued.shift(), show(), null")
    assert page.ask(FOCUSED) == "Cancel request 2 for a"
    page.ask("state.queued.shift(), show(), null")
    assert page.ask("document.activeElement.id") == "main"
    assert not page.ask("document.getElementById('queued').checkVisibility()")


# Memory

CARD = "document.getElementById('gpus').firstChild"
FIGURES = f"[...{CARD}.querySelectorAll('.part:not([hidden])')].map(each => each.textContent)"
WIDTHS = f"[...{CARD}.querySelectorAll('.memory i')].map(each => each.style.width)"


@pytest.mark.parametrize(
    ("users", "others", "figures", "widths"),
    [
        ({"a": 12 * GIB}, 0, ["12.0 GiB ours", "4.0 GiB others", "8.0 GiB free"], ["50%", "17%"]),
        ({"a": None}, 6, ["10.0 GiB ours", "6.0 GiB others", "8.0 GiB free"], ["42%", "25%"]),
        ({"a": 16 * GIB}, 0, ["16.0 GiB ours", "8.0 GiB free"], ["67%", "0%"]),
        ({}, 0, ["16.0 GiB others", "8.0 GiB free"], ["0%", "67%"]),
    ],
)
def test_the_memory_of_a_gpu_is_told_as_ours_others_and_free(opened, users, others, figures, widths):
    there = (OtherProcess("0", 4711, others * GIB, "blender"),) if others else ()
    seen = GpuUse(16 * GIB, 24 * GIB, users, there)
    _, page = opened("a", gpu_uses=lambda: {"0": seen})
    page.wait(f"{CARD}.querySelector('.memory').checkVisibility()")
    assert page.ask(FIGURES) == figures
    assert page.ask(WIDTHS) == widths
    [told] = [name for role, name in page.tree() if role == "image" and name.startswith("Memory: ")]
    assert set(figures) <= set(told.removeprefix("Memory: ").split(", "))
    held = page.ask(f"{CARD}.querySelector('.holds').innerText")
    assert held.split() == (["a", f"{users['a'] // GIB}.0", "GiB"] if users.get("a") else ["a"])


def test_gpus_are_called_the_same_in_cards_and_rows(make_rig, opened):
    near = Backend("a", "a", ("0", "1")), Backend("b", "b", ("1",), host="h1")
    _, page = opened(backends=near)
    names = "[...document.querySelectorAll('.top strong')].map(each => each.textContent)"
    assert page.ask(names) == ["GPU 0", "GPU 1", "GPU 1"]
    places = [page.ask(f"{row(model)}.children[2].textContent") for model in "ab"]
    assert places == ["GPU 0, 1", "h1/1"]
