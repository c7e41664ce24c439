"""The status page of a rig."""

from collections.abc import Callable, Iterator

import pytest

from tests.chromium import Chromium
from tests.fake_engine import Rig

Opened = Callable[..., tuple[Rig, Chromium]]


@pytest.fixture
def opened(make_rig: Callable[..., Rig], browser: Chromium) -> Iterator[Opened]:
    """Opens the page of a rig that has adopted some backends.

    Every question is answered with yes there; it must do nothing wrong.
    """

    def open_page(*adopted: str, **settings: object) -> tuple[Rig, Chromium]:
        rig = make_rig(**settings)
        rig.mux.facts.adopt(dict.fromkeys(adopted, rig.engine.url))
        browser.leave()
        browser.size(1280, 900)
        browser.open("http://{}:{}/".format(*rig.address))
        browser.wait("document.readyState === 'complete' && !!state")
        browser.ask("window.questions = [], window.confirm = text => questions.push(text) > 0, null")
        return rig, browser

    yield open_page
    assert browser.problems == []
