"""The status page where API keys are in force, in a real Chromium: ``bin/test page``."""

from collections.abc import Callable, Iterator

import pytest

from anvil_mux.telemetry.accesslog import Served
from tests.chromium import IN_CHROMIUM, Chromium
from tests.fake_engine import JSON_OK, Rig, keyring
from tests.proxy.test_page import READY, notes, press, state_of
from tests.proxy.test_page_looks import looks_well_everywhere
from tests.running import seen

pytestmark = IN_CHROMIUM
ROOT, SEES, USES = "a-key-for-everything", "a-key-that-sees", "a-key-that-uses"
LINES = f"{ROOT} name=root\n{SEES} name=wall models=alias state\n{USES} name=alice models=a\n"

LOCKED = "document.body.classList.contains('locked') && document.activeElement.id === 'key'"
REFUSED = "document.getElementById('refused').textContent"
SHOWN = (
    "[...document.querySelectorAll('main > section')].filter(each => each.checkVisibility())"
    ".map(each => each.id)"
)
BUTTONS = (
    "[...document.querySelectorAll('button')].filter(each => each.checkVisibility())"
    ".map(each => each.textContent)"
)


@pytest.fixture
def locked(make_rig: Callable[..., Rig]) -> Rig:
    rig = make_rig(keys=keyring(LINES))
    rig.mux.facts.adopt({"a": rig.engine.url})
    return rig


@pytest.fixture
def page(locked: Rig, browser: Chromium) -> Iterator[Chromium]:
    """The page in a new tab, which has no key yet."""
    browser.tab()
    browser.asked.clear()
    browser.size(1280, 900)
    browser.open(f"http://127.0.0.1:{locked.address[1]}/")
    browser.wait(f"document.readyState === 'complete' && {LOCKED}")
    yield browser
    # The browser notes each answer that is an error.
    assert [each for each in browser.problems if "status of 40" not in each] == []
    browser.leave()


def take_key_away(rig: Rig) -> None:
    """Let none of the keys be known any more."""
    rig.handler.reconfigure(rig.config, keyring("another-key"))


def tried(rig: Rig) -> list[str]:
    """The names of the keys by which models were asked."""
    ended = [each for each in rig.events.seen if isinstance(each, Served)]
    return [each.key for each in ended if each.path == "/v1/chat/completions"]


def enter(page: Chromium, key: str) -> None:
    page.type(key)
    page.press("Enter", 13)


def test_it_asks_for_a_key_and_shows_nothing_before(page):
    looks_well_everywhere(page, "locked", "an API key is needed", "Show the page")
    page.size(1280, 900)
    assert page.ask(SHOWN) == ["locked"]
    assert page.ask(BUTTONS) == ["?", "Show the page"]
    assert page.ask("document.getElementById('health').textContent") == "an API key is needed"
    assert page.ask(f"{REFUSED} === '' && !document.getElementById('refused').checkVisibility()")
    assert ("textbox", "API key") in page.tree()


@pytest.mark.parametrize(
    ("key", "told"),
    [
        ("not-a-key-of-ours", "This key is not known here."),
        ("schlüssel", "A key has neither blanks nor letters with accents."),
        (USES, "this API key may not use /events: that needs a key with `state`"),
    ],
)
def test_it_says_what_is_wrong_with_a_key_and_takes_another(page, key, told):
    enter(page, key)
    page.wait(f"{REFUSED} !== ''")
    assert page.ask(REFUSED).startswith(told)
    assert ("alert", "") in page.tree()
    assert page.ask(SHOWN) == ["locked"]
    page.wait(LOCKED)
    enter(page, ROOT)
    page.wait(READY)
    assert "locked" not in page.ask(SHOWN)


def test_a_key_is_kept_for_its_tab_only(locked, page):
    enter(page, ROOT)
    page.wait(READY)
    page.ask("location.reload()")
    page.wait(f"document.readyState === 'complete' && {READY}")
    assert page.ask("localStorage.length + document.cookie.length") == 0
    assert not [url for url in page.asked if ROOT in url]
    page.leave()
    page.tab()
    page.open(f"http://127.0.0.1:{locked.address[1]}/")
    page.wait(f"document.readyState === 'complete' && {LOCKED}")


def test_a_key_is_forgotten_by_a_button(page):
    enter(page, ROOT)
    page.wait(READY)
    page.ask("document.getElementById('forget').focus()")
    page.press("Enter", 13)
    page.wait(f"document.readyState === 'complete' && {LOCKED}")
    assert page.ask("sessionStorage.length") == 0
    assert page.ask("document.querySelectorAll('#models tr').length") == 0


def test_a_key_for_everything_acts(locked, page):
    enter(page, ROOT)
    page.wait(f"{READY} && {state_of('a')} === 'ready'")
    press(page, "a", "Unload")
    page.wait(f"{state_of('a')} === 'stopped'")
    locked.logs["a"] = ["listens on 8000"]
    press(page, "a", "Log")
    page.wait("document.getElementById('log-lines').textContent === 'listens on 8000'")
    page.press("Escape", 27)


def test_a_key_that_only_sees_has_no_buttons_that_it_may_not_press(locked, page):
    enter(page, SEES)
    page.wait(f"{READY} && {state_of('a')} === 'ready'")
    assert page.ask("document.getElementById('rights').innerText").startswith(
        "API key: wall. It may see this page. To load, unload, pin, pause,"
    )
    assert {*page.ask(BUTTONS)} == {"Forget the key", "?", "Why", "Send"}
    press(page, "a", "Why")
    page.wait(f"{notes('a')}.includes('A request for a is served at once')")
    looks_well_everywhere(page, "reads", "API key: wall. It may see this page.", "Forget the key", "Why")


def test_it_may_try_the_models_of_the_key_and_is_counted_as_it(locked, page):
    locked.engine.answer = lambda _: JSON_OK
    enter(page, SEES)
    page.wait(READY)
    assert page.ask("[...document.getElementById('try-model').options].map(each => each.value)") == ["a"]
    page.ask("document.getElementById('try-text').value = 'x', null")
    page.ask("document.getElementById('try-stream').checked = false, null")
    page.ask("document.getElementById('try-send').click()")
    page.wait("talk.length === 1")
    assert seen(lambda: tried(locked), bool) == ["wall"]


def test_a_key_that_is_taken_away_is_asked_for_again_and_nothing_stays(locked, page):
    locked.engine.answer = lambda _: JSON_OK
    enter(page, ROOT)
    page.wait(f"{READY} && {state_of('a')} === 'ready'")
    page.ask("document.getElementById('try-text').value = 'x', null")
    page.ask("document.getElementById('try-send').click()")
    page.wait("talk.length === 1")
    page.ask("open_log('a'), null")
    page.wait("document.getElementById('log').checkVisibility()")
    take_key_away(locked)
    page.wait(LOCKED)  # the log asks again by itself
    assert page.ask(REFUSED).startswith("This key is not known here.")
    assert page.ask("talk.length + document.getElementById('talk').children.length") == 0
    assert not page.ask("document.getElementById('log').checkVisibility()")


@pytest.mark.parametrize("asks", ["why('a')", "show_usage()"])
def test_a_key_may_be_taken_away_while_the_page_asks(locked, page, asks):
    enter(page, ROOT)
    page.wait(f"{READY} && {state_of('a')} === 'ready'")
    take_key_away(locked)
    page.ask(f"{asks}.then(() => document.title = 'asked'), null")
    page.wait("document.title === 'asked'")
    assert page.ask(LOCKED)
    assert page.ask("[Object.keys(whys), document.getElementById('notices').textContent]") == [[], ""]


def test_what_the_page_links_to_is_opened_with_its_key(tmp_path, page):
    enter(page, SEES)
    page.wait(READY)
    page.ask("document.querySelector('footer a').click()")
    page.wait("document.getElementById('text').open")
    assert '"models"' in page.ask("document.getElementById('text-lines').textContent")
