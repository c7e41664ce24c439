"""The looks of the status page in its states, by day, by night and on a phone: ``bin/test page``.

Nothing is compared pixel by pixel. With ``ANVIL_PAGE_PICTURES=DIR`` a picture of each state is left in DIR.
"""

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from http.client import HTTPConnection
from pathlib import Path

import pytest
import yaml

from anvil_mux.config.config import Backend
from anvil_mux.config.machines import Gpu
from anvil_mux.host.seam import GpuUse, OtherProcess, Sensors
from anvil_mux.telemetry.accesslog import Served
from tests.chromium import IN_CHROMIUM, Chromium
from tests.cli.demo import compose
from tests.proxy.test_page import more, notes, row, state_of
from tests.running import Running, serving
from tests.sleepy_engine import GIB

pytestmark = IN_CHROMIUM
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
    const range = document.createRange(), scrolled = at.closest(".happened, .scroll, #talk, pre");
    const layer = at.closest("#log, #menu");  // lies on the page
    range.selectNodeContents(node);
    const seen = scrolled && scrolled.getBoundingClientRect();
    const boxes = [...range.getClientRects()];
    if (at.matches(".name") && node.data.length < 20 && boxes.length > 1) wrong.push(`broken: ${node.data}`);
    for (const box of boxes) {
      if (seen && (box.bottom > seen.bottom || box.top < seen.top)) continue;  // to be scrolled to
      texts.push({text: node.data.trim(), node, box, layer});
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
      if (one.node === other.node || one.layer !== other.layer) continue;
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
    assert wrong == [], page.ask("[innerWidth, document.body.innerText]")
    missing = [text for text in texts if not any(text in each for each in shown)]
    assert not missing, shown


LOOKS = {"light": (1280, "light"), "dark": (1280, "dark"), "phone": (390, "light")}


def looks_well_everywhere(page: Chromium, state: str, *texts: str, begin: str = "null") -> None:
    """By day, by night and on phones, for one who wants no motion: there is none then.

    ``begin``: what happens on each screen before somebody looks.
    """
    for look, (width, scheme) in LOOKS.items():
        page.size(width, 844, phone=width < 768)
        page.prefer(prefers_color_scheme=scheme, prefers_reduced_motion="reduce")
        page.ask(begin)
        picture(page, f"{state}-{look}")
        looks_well(page, *texts)
        assert (
            page.ask("document.getAnimations().length + document.querySelectorAll('audio, video').length")
            == 0
        )
    for width in (320, 360):
        page.size(width, 844, phone=True)
        page.ask(begin)
        looks_well(page, *texts)


SECTIONS = """
[...document.querySelectorAll("main > section")].filter(each => each.checkVisibility())
  .map(each => each.querySelector("h2").textContent)
"""


def test_at_first_nothing_that_is_empty_has_a_card(mux, browser):
    browser.leave()
    browser.size(1280, 900)
    browser.open(f"http://127.0.0.1:{mux.port}/")
    browser.wait("document.readyState === 'complete' && !!state")
    assert browser.ask(SECTIONS) == ["GPUs", "Models", "Try a model"]
    looks_well_everywhere(
        browser, "first", "all is well", "0 in flight, 0 waiting", QUICK, "stopped", "free", "Load", "Send"
    )
    assert {("button", f"Load {QUICK}"), ("combobox", "How long a pause lasts")} <= {*browser.tree()}
    marks = browser.ask("[...document.querySelectorAll('#gpus .chip')].map(each => each.textContent)")
    assert marks == ["free"] * 3
    assert browser.problems == []


def test_one_model_is_ready_and_is_talked_with(page):
    page.ask(f"document.getElementById('try-model').value = {QUICK!r}, null")
    for number in (1, 2):
        page.ask("document.getElementById('try-text').value = 'Say hello.', null")
        page.ask("document.getElementById('try-send').click()")
        page.wait(f"talk.length === {number}")
    page.wait("!!talk[0].record && !document.getElementById('usage').closest('section').hidden")
    assert page.ask(state_of(QUICK)) == "ready"
    looks_well_everywhere(
        page, "ready", "ready", "first token after", "tokens/s", "New conversation", "Unload"
    )


def test_the_menu_and_the_log_lie_on_the_page(page, ask):
    ask(QUICK)
    page.wait(f"{state_of(QUICK)} === 'ready'")
    page.ask(f"open_log({QUICK!r}), null")
    page.wait("document.getElementById('log-lines').textContent.includes('listens on')")
    texts = (f"Log of {QUICK}", "listens on", "Close the log", "Pin", "Why")
    looks_well_everywhere(page, "panels", *texts, begin=f"close_menu(), {more(SLOW)}.click()")
    page.ask("close_menu(), close_log(), null")


def test_a_model_loads_and_others_wait_for_it(page, ask):
    ask(SLOW, SLOW)
    page.wait(f"{state_of(SLOW)} === 'loading' && {row(SLOW)}.querySelector('.bar').checkVisibility()")
    page.wait("document.querySelector('#reasons').textContent !== '' && state.queued.length === 2")
    looks_well_everywhere(
        page, "loading", "loading", f"A request for {SLOW} waits", "0 in flight, 2 waiting", "#"
    )
    assert ("button", f"Unload {SLOW}") in page.tree()


def test_a_model_makes_room_for_another(page, ask):
    """One model answers and makes room for another, for which requests wait."""
    ask(QUICK)
    page.wait(f"{state_of(QUICK)} === 'ready' && {row(QUICK)}.children[3].textContent === '1'")
    ask(OTHER, OTHER)
    page.wait(f"{state_of(QUICK)} === 'draining' && state.queued.length === 2")
    page.wait(f"document.getElementById('reasons').textContent.includes('A request for {OTHER} waits')")
    looks_well_everywhere(
        page,
        "busy",
        "1 in flight, 2 waiting",
        "draining",
        f"draining for {OTHER}: 1 request still runs",
        f"A request for {OTHER} waits",
        "Waiting requests",
        "Cancel",
        "When each model was resident",
    )


def test_a_load_failed(mux, page):
    assert mux.chat(BROKEN)[0] == 503
    page.wait("document.querySelectorAll('#tracks .failed').length > 0")
    page.wait("document.getElementById('requests').textContent.includes('503 load_failed')")
    page.wait(f"document.getElementById('swaps').textContent.includes('load failed: {LAST_WORDS}')")
    looks_well_everywhere(page, "failed", LAST_WORDS, f": load failed: {LAST_WORDS}", "503 load_failed")
    assert page.ask("document.querySelector('#tracks .failed').firstChild.data") == CROSS


SPAN = """
(() => {
  const error = document.querySelector("#models .error").closest("td").getBoundingClientRect();
  const table = document.querySelector("#models").getBoundingClientRect();
  return [error.left - table.left, table.right - error.right];
})()
"""


@pytest.mark.parametrize("width", [390, 1280])
def test_an_error_spans_the_row_and_begins_with_its_cause(mux, page, width):
    mux.chat(BROKEN)
    page.size(width, 900, phone=width < 768)
    page.wait(f"{notes(BROKEN)} !== ''")
    assert page.ask(notes(BROKEN)).startswith(f"{LAST_WORDS}; it needs more GPU memory than is free")
    assert max(page.ask(SPAN)) < 20


# Several hosts, and keys


def on(host: str, name: str, *gpus: str) -> Backend:
    return Backend(f"{name}.{host}", name, gpus, host=host)


FLEET = (
    on("alpha", SLOW, "0", "1"),
    on("beta", QUICK, "0"),
    on("beta", BROKEN, "1"),
    on("gamma", OTHER, "0"),
    on("beta", "qwen3-32b", "1"),
)
HELD = {"alpha/0": SLOW, "alpha/1": SLOW, "beta/0": QUICK, "beta/1": BROKEN, "gamma/0": OTHER}


def gpu_uses() -> dict[str, GpuUse]:
    """What is read of the GPUs that are here: on each its model, and on one of them another program."""
    found = {}
    here = [(gpu, model) for gpu, model in HELD.items() if not gpu.startswith("gamma")]
    for number, (gpu, model) in enumerate(here):
        host = gpu.partition("/")[0]
        users = {f"{model}.{host}": (18 + number) * GIB}
        others = (OtherProcess(gpu, 4711, 6 * GIB, "blender"),) if gpu == "beta/0" else ()
        used = sum(users.values()) + sum(each.used or 0 for each in others)
        found[gpu] = GpuUse(used, 48 * GIB, users, others, Sensors(0.31 + number / 9, 58.0 + number, 240.0))
    return found


FLEET_EVENTS = """
(() => {
  const at = now();
  const told = [
    [300, "loading", "qwen3-8b", "beta", {}],
    [296, "ready", "qwen3-8b", "beta", {text: "ready", seconds: 4}],
    [280, "loading", "gemma-12b", "gamma", {}],
    [272, "ready", "gemma-12b", "gamma", {text: "ready", seconds: 8}],
    [250, "loading", "llama-70b", "alpha", {}],
    [215, "ready", "llama-70b", "alpha", {text: "ready", seconds: 35}],
    [180, "loading", "qwen3-32b", "beta", {}],
    [166, "ready", "qwen3-32b", "beta", {text: "ready", seconds: 14}],
    [96, "deferred", "mistral-24b", "beta", {text: "held back for 6 s"}],
    [90, "draining", "qwen3-32b", "beta", {target: "mistral-24b"}],
    [78, "evicting", "qwen3-32b", "beta", {}],
    [76, "stopped", "qwen3-32b", "beta", {}],
    [76, "loading", "mistral-24b", "beta", {}],
    [63, "ready", "mistral-24b", "beta", {text: "ready", seconds: 13}],
    [4, "draining", "mistral-24b", "beta", {target: "qwen3-32b"}],
  ].map(([ago, kind, model, host, more]) => {
    const backend = `${model}.${host}`, reason = "1 waiting, oldest first";
    return {at: at - ago, kind, model, backend, host, reason, ...more};
  });
  const text = "the host gamma is lost: its requests are severed, and nothing is loaded there";
  const cause = {kind: "host_lost", host: "gamma"};
  events = [...told, {at: at - 30, kind: "host_lost", model: "", backend: "", text, reason: text, cause}];
  events.sort((one, other) => one.at - other.at);
  source.close();
  const loads = {"qwen3-8b": [4, 18], "gemma-12b": [8, 22], "llama-70b": [35, 74], "mistral-24b": [13, 21]};
  for (const [name, [seconds, size]] of Object.entries(loads)) {
    const model = state.models[name];
    model.load_seconds = seconds;
    model.backends[model.backend].size = size * 2 ** 30;
  }
  show();
  show_swaps();
})()
"""


def test_several_hosts_with_their_gpus(make_rig, browser):
    gpus = tuple(Gpu(gpu, 48 * GIB, host=gpu.partition("/")[0]) for gpu in HELD)
    rig = make_rig(backends=FLEET, gpus=gpus, gpu_uses=gpu_uses)
    rig.mux.facts.adopt({f"{model}.{gpu.partition('/')[0]}": rig.engine.url for gpu, model in HELD.items()})
    for number, model in enumerate((SLOW, QUICK, BROKEN)):
        times = {"waited": 13.1 if model == BROKEN else 0.0, "first_byte": 13.4, "seconds": 17.0 + number}
        about = {"model": model, "backend": model, "status": 200, "tokens": 210, "stream": True, **times}
        rig.feed.ended(
            Served(f"{model}-1", "127.0.0.1", "POST", "/v1/chat/completions", ended=time.time(), **about)
        )
    browser.leave()
    browser.open("http://{}:{}/".format(*rig.address))
    browser.wait("document.readyState === 'complete' && !!state")
    names = {model: f"{number}867cffc99-1e" for number, model in enumerate((SLOW, QUICK, BROKEN))}
    with ExitStack() as leases:
        for model, name in names.items():
            leases.enter_context(rig.mux.lease(model, request=name))
        rig.client().post(b'{"model":"qwen3-32b"}')
        rig.mux.facts.host_lost("gamma")
        browser.wait("state.queued.length === 1 && Object.values(state.hosts).some(host => host.lost)")
        browser.wait("document.getElementById('reasons').textContent !== ''")
        browser.ask(FLEET_EVENTS)
        looks_well_everywhere(
            browser,
            "hosts",
            "the host gamma is lost",
            "18.0 GiB ours",
            "6.0 GiB others",
            "other process: blender",
            "out of service",
            "Declare gone",
            "qwen3-32b → mistral-24b",
        )
    assert browser.problems == []


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
def test_what_does_not_look_well_is_found(page, style, told):
    page.ask(f"{{const made = make('style', '', {json.dumps(style)}); document.head.append(made)}}")
    _, wrong = page.ask(LAYOUT)
    assert [each for each in wrong if each.startswith(told)]
