"""The looks of the status page in six states, in a real Chromium: ``bin/test page``.

Nothing is compared pixel by pixel. With ``ANVIL_PAGE_PICTURES=DIR`` a picture of each state is left in DIR.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from pathlib import Path

import pytest
import yaml

from tests.chromium import PROGRAM, Chromium
from tests.cli.demo import compose
from tests.proxy.test_page import row, state_of
from tests.running import Running, serving

pytestmark = [
    pytest.mark.page,
    pytest.mark.skipif(PROGRAM is None, reason="needs Chromium (Debian's package chromium)"),
]
QUICK, OTHER, SLOW, BROKEN = "qwen3-8b", "gemma-12b", "llama-70b", "mistral-24b"
CROSS = "\N{MULTIPLICATION SIGN}"
LAST_WORDS = "torch.OutOfMemoryError: CUDA out of memory"


@pytest.fixture(scope="module")
def mux(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("looks")
    file = compose(folder, QUICK, OTHER, SLOW, BROKEN, policy="eager", load_seconds=0.5, capture=5)
    content = yaml.safe_load(file.read_text())
    services = content["services"]
    services[QUICK]["command"][-1] = "20"  # tokens per second: an answer of a few seconds
    services[SLOW]["command"][4] = "120"  # seconds that it loads
    services[SLOW]["x-anvil"] = {"gpus": ["1"]}
    services[BROKEN]["command"] = ["bash", "-c", f"echo '{LAST_WORDS}' >&2; exit 1"]
    services[BROKEN]["x-anvil"] = {"gpus": ["2"], "engine": "openai", "aliases": ["mistral"]}
    file.write_text(yaml.safe_dump(content))
    with serving(file, state=folder) as running:
        yield running


@pytest.fixture
def page(mux: Running, browser: Chromium) -> Iterator[Chromium]:
    """The page of a multiplexer on which nothing is loaded, as one with a large screen sees it."""
    for model in mux.get("/healthz")["models"]:
        mux.request("POST", "/models/unload", {"model": model})
    browser.leave()
    browser.size(1280, 900)
    browser.prefer(prefers_color_scheme="light")
    browser.open(f"http://127.0.0.1:{mux.port}/")
    idle = "Object.values(state.models).every(model => model.state === 'stopped' && !model.waiting)"
    browser.wait(f"document.readyState === 'complete' && !!state && {idle}")
    yield browser
    assert browser.problems == []


Begin = Callable[..., None]


@pytest.fixture
def ask(mux: Running) -> Iterator[Begin]:
    """Asks models, by clients that read no answer and leave at the end of the test."""
    clients: list[HTTPConnection] = []

    def begin(*models: str) -> None:
        for model in models:
            clients.append(HTTPConnection("127.0.0.1", mux.port))
            messages = [{"role": "user", "content": "Say hello."}]
            asked = {"model": model, "messages": messages, "max_tokens": 2000, "stream": True}
            clients[-1].request(
                "POST", "/v1/chat/completions", json.dumps(asked), {"Content-Type": "application/json"}
            )

    yield begin
    for client in clients:
        client.close()


def picture(page: Chromium, name: str) -> None:
    if folder := os.environ.get("ANVIL_PAGE_PICTURES"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        page.picture(Path(folder, f"{name}.png"))


LAYOUT = """
(() => {
  const HIDDEN = ".hidden, option, script, svg, noscript", texts = [], wrong = [];
  const width = document.documentElement.clientWidth;
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode, at = node.parentElement, head = at.closest("thead");
    if (!node.data.trim() || !at.checkVisibility() || at.closest(HIDDEN)) continue;
    if (head && getComputedStyle(head).position === "absolute") continue;  // told beside each figure instead
    const range = document.createRange(), scrolled = at.closest(".happened, .scroll");
    range.selectNodeContents(node);
    const seen = scrolled && scrolled.getBoundingClientRect();
    const boxes = [...range.getClientRects()];
    if (at.matches(".name") && node.data.length < 20 && boxes.length > 1) wrong.push(`broken: ${node.data}`);
    for (const box of boxes) {
      if (seen && box.bottom > seen.bottom) continue;  // further down, to be scrolled to
      texts.push({text: node.data.trim(), node, box});
      if (box.left < 0 || box.right > width) wrong.push(`outside: ${node.data}`);
      const card = (at.closest("section") || document.body).getBoundingClientRect();
      if (box.left < card.left || box.right > card.right + 1) wrong.push(`cut by its section: ${node.data}`);
    }
    for (let each = at; each !== document.body; each = each.parentElement) {
      const hides = getComputedStyle(each).overflowX === "hidden" && each.tagName !== "SECTION";
      if (hides && each.scrollWidth > each.clientWidth + 1) wrong.push(`cut: ${node.data}`);
    }
  }
  const apart = 2;
  texts.forEach((one, index) => {
    for (const other of texts.slice(index + 1)) {
      if (one.node === other.node) continue;
      const across = Math.min(one.box.right, other.box.right) - Math.max(one.box.left, other.box.left);
      const down = Math.min(one.box.bottom, other.box.bottom) - Math.max(one.box.top, other.box.top);
      if (across > apart && down > apart) wrong.push(`on top of each other: ${one.text} | ${other.text}`);
    }
  });
  if (document.documentElement.scrollWidth > innerWidth) wrong.push("it scrolls sideways");
  return [texts.map(each => each.text), wrong];
})()
"""


def looks_well(page: Chromium, *texts: str) -> None:
    """Each of the texts can be seen, and none that is there lies on another, or is cut."""
    shown, wrong = page.ask(LAYOUT)
    assert wrong == []
    missing = [text for text in texts if not any(text in each for each in shown)]
    assert not missing, shown


def is_busy(page: Chromium, ask: Begin) -> None:
    """One model answers and makes room for another, for which requests wait; a third is ready."""
    ask(QUICK)
    page.wait(f"{state_of(QUICK)} === 'ready' && {row(QUICK)}.children[3].textContent === '1'")
    ask(OTHER, OTHER)
    page.wait(f"{state_of(QUICK)} === 'draining' && state.queued.length === 2")
    page.wait(f"document.getElementById('reasons').textContent.includes('A request for {OTHER} waits')")


BUSY = (
    "1 in flight, 2 waiting",
    "draining",
    f"draining for {OTHER}: 1 request still runs",
    f"A request for {OTHER} waits",
    "Waiting requests",
    "Cancel",
    "When each model was resident",
)


def test_quiet(page: Chromium) -> None:
    picture(page, "quiet")
    looks_well(
        page, "all is well", "0 in flight, 0 waiting", QUICK, "stopped", "free", "No request is waiting."
    )
    assert {("button", f"Load {QUICK}"), ("combobox", "How long a pause lasts")} <= {*page.tree()}
    assert (
        page.ask("[...document.querySelectorAll('#gpus .chip')].map(each => each.textContent)")
        == ["free"] * 3
    )


def test_loading(page: Chromium, ask: Begin) -> None:
    ask(SLOW)
    page.wait(f"{state_of(SLOW)} === 'loading' && {row(SLOW)}.querySelector('.bar').checkVisibility()")
    page.wait("document.querySelector('#reasons').textContent !== ''")
    picture(page, "loading")
    looks_well(page, "loading", f"A request for {SLOW} waits", "0 in flight, 1 waiting", "#")
    assert ("button", f"Unload {SLOW}") in page.tree()
    assert page.ask(f"{row(SLOW)}.querySelectorAll('button')[0].disabled")


def test_busy(page: Chromium, ask: Begin) -> None:
    is_busy(page, ask)
    picture(page, "busy")
    looks_well(page, *BUSY)


def test_failed(mux: Running, page: Chromium) -> None:
    assert mux.chat(BROKEN)[0] == 503
    page.wait("document.querySelectorAll('#tracks .failed').length > 0")
    page.wait("document.getElementById('requests').textContent.includes('503 load_failed')")
    why = f"{BROKEN} exited with code 1"
    page.wait(f"document.getElementById('swaps').textContent.includes('load failed: {why}')")
    picture(page, "failed")
    looks_well(page, why, f": load failed: {why}", "503 load_failed", "No request is waiting.")
    assert page.ask("document.querySelector('#tracks .failed').firstChild.data") == CROSS


def test_dark(page: Chromium, ask: Begin) -> None:
    page.prefer(prefers_color_scheme="dark")
    is_busy(page, ask)
    picture(page, "dark")
    looks_well(page, *BUSY)


def test_phone(page: Chromium, ask: Begin) -> None:
    page.size(390, 844, phone=True)
    is_busy(page, ask)
    picture(page, "phone")
    looks_well(page, *BUSY)
    for width in (320, 360):
        page.size(width, 844, phone=True)
        looks_well(page, *BUSY)


@pytest.mark.parametrize(
    ("style", "told"),
    [
        (".chip { position: absolute; top: 40px; left: 40px; }", "on top of each other: "),
        ("main { min-width: 3000px; }", "it scrolls sideways"),
        ("#models { position: relative; left: -200px; }", "cut by its section: "),
        (".chip { width: 10px; overflow: hidden; }", "cut: "),
        ("#models .name { display: block; width: 3rem; }", "broken: "),
    ],
)
def test_what_does_not_look_well_is_found(page: Chromium, style: str, told: str) -> None:
    page.ask(f"{{const made = make('style', '', {json.dumps(style)}); document.head.append(made)}}")
    _, wrong = page.ask(LAYOUT)
    assert [each for each in wrong if each.startswith(told)]
