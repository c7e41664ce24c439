"""Who can read and use the status page, in a real Chromium: ``bin/test page``.

Those who see no colours or little contrast, who have no mouse, who read it elsewhere in the world or for the
first time.
"""

import json
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from anvil_mux.config.config import Backend
from anvil_mux.proxy.page import terms
from anvil_mux.scheduler.slot import TRANSITIONS
from anvil_mux.telemetry.accesslog import Served
from tests.chromium import IN_CHROMIUM, Chromium
from tests.fake_engine import Rig
from tests.proxy.test_page_looks import looks_well, picture

pytestmark = IN_CHROMIUM
STATES = sorted({start for start, _ in TRANSITIONS} | {*TRANSITIONS.values()})

EVERYTHING = """
(() => {
  source.close();
  const one = state.models.a, backend = Object.values(one.backends)[0];
  for (const kind of STATES) {
    const name = "model-" + kind;
    state.registry.push(name);
    const backends = {[one.backend]: {...backend, state: kind}};
    state.models[name] = {...structuredClone(one), state: kind, backends};
  }
  Object.assign(state.models["model-loading"], {progress: {fraction: 0.4, words: "weights 40 %"}});
  Object.assign(state.models["model-ready"], {pinned: true, leases: 3, load_seconds: 4.2, presets: ["fast"]});
  const places = ["alpha/0", "alpha/1", "alpha/2", "alpha/3"];
  const answers = [{request: "2867cffc99-1e", run_seconds: 6}];
  Object.assign(Object.values(state.models["model-ready"].backends)[0], {gpus: places, size: 2 ** 37});
  Object.assign(state.models["model-draining"], {draining: {seconds_left: 20, answers}});
  Object.assign(state.models["model-stopped"], {last_error: "it exited with code 1"});
  Object.assign(state.models["on-lost"], {host_lost: true});
  const elsewhere = {server: "cloud.example", circuit: "half_open", why: "x"};
  Object.assign(state.models["on-away"], {elsewhere});
  state.queued = [{ticket: 7, model: "a", since: now() - 3}];
  state.waiting = 1;
  state.capture = 5;
  const at = now();
  events = [
    {at: at - 50, kind: "loading", model: "model-ready", backend: "m", reason: "1 waiting, oldest first"},
    {at: at - 40, kind: "ready", model: "model-ready", backend: "m", text: "ready", seconds: 10},
    {at: at - 30, kind: "deferred", model: "a", backend: "a", text: "held back for 3 s"},
    {at: at - 20, kind: "draining", model: "model-ready", backend: "m", target: "a"},
    {at: at - 10, kind: "stuck", model: "model-ready", backend: "m", text: "stuck", cause: {kind: "x"}},
    {at: at - 9, kind: "loading", model: "model-stopped", backend: "n", reason: "1 waiting"},
    {at: at - 8, kind: "stopped", model: "model-stopped", backend: "n", text: "load failed",
     reason: "load failed", cause: {kind: "load_failed"}},
  ];
  show(); show_swaps(); show_requests(); notice("anvil-mux does not answer");
})()
""".replace("STATES", json.dumps(STATES))


def ended(at: float, **about: Any) -> Served:
    said = {"model": "a", "backend": "a", "status": 200, "seconds": 2.0, "tokens": 40, **about}
    return Served(f"id-{at}", "127.0.0.1", "POST", "/v1/completions", ended=at, **said)


def open_page(rig: Rig, browser: Chromium) -> None:
    browser.size(1280, 900)
    browser.prefer(prefers_color_scheme="light")
    browser.open("http://{}:{}/".format(*rig.address))
    browser.wait("document.readyState === 'complete' && !!state")


@pytest.fixture
def page(make_rig: Callable[..., Rig], browser: Chromium) -> Iterator[Chromium]:
    """The page with everything on it that it can show at once."""
    hosts = [Backend(f"on-{name}", f"on-{name}", ("0",), host=name) for name in ("lost", "away", "drained")]
    rig = make_rig(backends=(Backend("a", "a", ("0",)), *hosts))
    rig.feed.ended(ended(time.time()))
    rig.feed.ended(ended(time.time(), status=503, code="load_failed"))
    rig.feed.ring()
    rig.mux.facts.host_lost("lost")
    rig.mux.tell(rig.mux.scheduler.host_away, "away", away=True)
    rig.mux.tell(rig.mux.scheduler.host_drained, "drained", drained=True)
    browser.leave()
    open_page(rig, browser)
    told = "Object.values(state.hosts).every(host => host.lost || host.away || host.drained)"
    browser.wait(f"requests.length === 2 && {told}")
    browser.ask(EVERYTHING)
    yield browser
    assert browser.problems == []


# Contrast


CONTRAST = """
(() => {
  const numbers = colour => (colour.match(/[0-9.]+/g) || []).map(Number);
  const over = (above, below) => {
    const [r, g, b, alpha = 1] = above;
    return [r, g, b].map((part, index) => alpha * part + (1 - alpha) * below[index]);
  };
  const light = colour => {
    const parts = colour.map(part => part / 255);
    const linear = parts.map(part => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
  };
  const ratio = (one, other) => {
    const [dark, bright] = [light(one), light(other)].sort((a, b) => a - b);
    return (bright + 0.05) / (dark + 0.05);
  };
  const ground = element => {
    const layers = [];
    for (let each = element; each; each = each.parentElement) {
      const colour = numbers(getComputedStyle(each).backgroundColor);
      layers.push(colour);
      if (colour[3] === undefined) break;
    }
    return layers.reverse().reduce((below, above) => over(above, below), [255, 255, 255]);
  };
  const opacity = element => {
    let all = 1;
    for (let each = element; each; each = each.parentElement) all *= Number(getComputedStyle(each).opacity);
    return all;
  };
  const found = [], note = (what, ink, on, least) => {
    const below = ground(on);
    found.push([what, ratio(over(numbers(ink), below), below), least]);
  };
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode, at = node.parentElement;
    if (!node.data.trim() || !at.checkVisibility() || at.closest(".hidden, script, svg, :disabled")) continue;
    const [r, g, b, alpha = 1] = numbers(getComputedStyle(at).color);
    note(node.data, `rgba(${r}, ${g}, ${b}, ${alpha * opacity(at)})`, at, 4.5);
  }
  const field = document.getElementById("try-text");
  note("placeholder", getComputedStyle(field, "::placeholder").color, field, 4.5);
  for (const each of document.querySelectorAll(".chip"))
    note("mark of " + each.className, getComputedStyle(each, "::before").borderTopColor, each, 3);
  for (const each of document.querySelectorAll("select, input, textarea"))
    if (each.checkVisibility() && each.type !== "checkbox")
      note("edge of " + each.id, getComputedStyle(each).borderTopColor, each.parentElement, 3);
  const probe = document.createElement("span");
  document.querySelector("section").append(probe);
  const named = name => { probe.style.color = `var(--${name})`; return getComputedStyle(probe).color; };
  for (const name of ["c0", "c1", "c2", "c3", "c4", "c5", "c6", "c7", "bad", "ink"])
    note("bar of " + name, named(name), document.querySelector("#probe"), 3);
  note("focus on a section", named("focus"), document.querySelector("section"), 3);
  note("focus on the page", named("focus"), document.body, 3);
  probe.remove();
  return found;
})()
"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_everything_has_contrast_by_day_and_by_night(page, scheme):
    page.prefer(prefers_color_scheme=scheme)
    page.ask(
        "{const made = document.createElement('div'); made.id = 'probe';"
        " made.style.background = 'var(--track)'; document.querySelector('main').append(made)}"
    )
    ground = page.ask("getComputedStyle(document.body).backgroundColor.match(/[0-9]+/)[0]")
    assert (int(ground) < 128) == (scheme == "dark")
    found = page.ask(CONTRAST)
    assert [each for each in found if each[1] < each[2]] == []
    seen = {what for what, _, _ in found}
    assert {
        "model-ready",
        "pinned",
        "mark of chip stuck",
        "placeholder",
        "edge of window",
        "bar of c5",
        "?",
    } <= seen


@pytest.mark.parametrize("width", [320, 390, 768, 900, 1000, 1280])
def test_everything_has_room_on_every_screen(page, width):
    page.size(width, 844, phone=width < 768)
    if width in (390, 900, 1280):
        picture(page, f"everything-{width}")
    page.ask("document.getElementById('notices').replaceChildren()")
    looks_well(page, "out of service", "circuit half-open", "drained", "model-demoting", "Declare gone")
    heights = page.ask("[...document.querySelectorAll('#models button')].map(each => each.offsetHeight)")
    assert min(filter(None, heights)) >= 24


# Colours


MARKS = """
[...document.querySelectorAll(".chip")].filter(each => each.checkVisibility()).map(each => {
  const style = getComputedStyle(each, "::before");
  const empty = style.backgroundColor === "rgba(0, 0, 0, 0)";
  const filled = style.backgroundImage !== "none" ? "half" : empty ? "" : "full";
  return [each.className, each.textContent, [style.borderTopStyle, style.borderTopLeftRadius, filled].join()];
})
"""


def test_a_state_is_told_by_a_word_and_a_shape_and_not_by_its_colour_alone(page):
    marks = page.ask(MARKS)
    assert {"ready", "stopped", "stuck", "away", "drained", "circuit half-open"} <= {
        text for _, text, _ in marks
    }
    assert not [name for name, text, _ in marks if not text.strip()]
    shapes: dict[str, set[str]] = {}
    for name, _, shape in marks:
        shapes.setdefault(name.split()[-1], set()).add(shape)
    assert all(len(each) == 1 for each in shapes.values()), shapes
    groups = [shapes[kind].pop() for kind in ("ready", "loading", "stuck", "standby", "drained", "stopped")]
    assert len({*groups}) == len(groups), groups


DRAWN = """
Object.fromEntries([...document.querySelectorAll("#tracks [x], #tracks circle")].map(part => {
  const fill = part.getAttribute("fill") || "", pattern = fill.includes("url") ? fill.slice(0, 8) : "";
  const word = part.querySelector("title").textContent.match(/: ([a-z]+)/)[1];
  return [word, [part.tagName, pattern, part.getAttribute("class") || ""].join()];
}))
"""


def test_what_is_drawn_differs_in_more_than_its_colour(page):
    drawn = page.ask(DRAWN)
    assert drawn.pop("evicting") == drawn["draining"]  # on the way out
    assert {*drawn} == {"resident", "loading", "draining", "stuck", "failed", "held"}
    assert len({*drawn.values()}) == len(drawn), drawn


# The keyboard


FOCUSED = """
(() => {
  const at = document.activeElement;
  if (!at || at === document.body) return null;
  at.dataset.reached = "";
  const style = getComputedStyle(at), box = at.getBoundingClientRect();
  const edge = style.outlineStyle === "none" ? 0 : parseFloat(style.outlineWidth);
  const far = Math.max(0, parseFloat(style.outlineOffset) + edge);
  let cut = false;
  for (let each = at.parentElement; each !== document.body; each = each.parentElement) {
    if (getComputedStyle(each).overflowX === "visible") continue;
    const frame = each.getBoundingClientRect();
    cut ||= box.left - far < frame.left - 0.5 || box.right + far > frame.right + 0.5;
  }
  return [at.id || at.getAttribute("aria-label") || at.textContent || at.tagName, edge, cut];
})()
"""
REACHABLE = (
    "[...document.querySelectorAll('a[href], button, input, select, textarea, [tabindex=\"0\"]')]"
    ".filter(each => each.checkVisibility() && !each.disabled)"
)


def test_all_is_reached_by_tab_with_a_focus_that_is_seen_and_nothing_holds_it(page):
    there = page.ask(f"{REACHABLE}.length")
    page.ask("document.body.tabIndex = -1, document.body.focus(), null")
    reached = []
    for _ in range(there + 20):
        page.press("Tab", 9)
        found = page.ask(FOCUSED)
        if found is None or page.ask("document.querySelectorAll('[data-reached]').length") < len(reached) + 1:
            break
        reached.append(found)
    missed = page.ask(f"{REACHABLE}.filter(each => !('reached' in each.dataset)).map(each => each.outerHTML)")
    assert missed == []
    assert len(reached) >= there > 40
    assert [name for name, edge, cut in reached if edge < 2 or cut] == []


def test_what_acts_is_a_button(page):
    odd = "[...document.querySelectorAll('*')].filter(each => each.onclick)"
    kinds = page.ask(f"[...new Set({odd}.map(each => each.tagName))].sort()")
    assert kinds == ["A", "BUTTON", "DIALOG"]
    assert page.ask("document.querySelectorAll('[role=button], a:not([href])').length") == 0


def test_a_dialog_closes_with_escape_and_gives_the_focus_back(page):
    opens = "What the words under Models mean"
    page.ask(f"document.querySelector('button[aria-label={json.dumps(opens)}]').focus()")
    page.press("Enter", 13)
    page.wait("document.getElementById('words').open")
    assert page.ask("document.getElementById('words').contains(document.activeElement)")
    page.press("Escape", 27)
    page.wait("!document.getElementById('words').open")
    assert page.ask("document.activeElement.ariaLabel") == opens


# Words


TITLES = """
[...document.querySelectorAll("th, label, h2, .key > span, .chip, .tag, main section button")]
  .filter(each => !each.closest("dialog") && each.id !== "health" && each.id !== "h-locked")
  .filter(each => each.textContent.trim() && !each.matches("th:has(> .hidden)"))
  .map(each => [each.textContent, each.title, each.closest("section")?.getAttribute("aria-labelledby")])
"""
ROWS = """
[...document.querySelectorAll("#words dt")].map(dt => [dt.textContent, dt.nextSibling.textContent])
"""
OURS = {"?", "⋯", "Hide", "Send", "Stop", "Show the page"}
"""The buttons that say what they do."""


def test_each_word_that_has_a_meaning_here_has_an_explanation_from_the_glossary(page):
    told = {f"{term}: {meaning}" for term, meaning in terms().items()}
    found = page.ask(TITLES)
    assert len(found) > 60
    unexplained = [(text, title) for text, title, _ in found if title not in told and text not in OURS]
    assert unexplained == []
    assert {text for text, *_ in found} >= {
        "In flight",
        "First byte",
        "GPU time",
        "stuck",
        "pinned",
        "swap held back",
    }


@pytest.mark.parametrize("phone", [False, True])
def test_who_has_no_mouse_reads_them_behind_a_button_of_each_part(page, phone):
    if phone:
        page.size(390, 844, phone=True)
    parts = page.ask(
        "[...document.querySelectorAll('main > section')].filter(each => each.checkVisibility())"
        ".map(each => each.getAttribute('aria-labelledby'))"
    )
    assert len(parts) == 7
    titles = page.ask(TITLES)
    for part in parts:
        button = f"document.querySelector('[aria-labelledby={part}] .words')"
        assert page.ask(f"Math.min({button}.offsetWidth, {button}.offsetHeight)") >= 24
        page.ask(f"{button}.click()")
        page.wait("document.getElementById('words').open")
        rows = page.ask(ROWS)
        read = {f"{term}: {meaning}" for term, meaning in rows}
        assert {title for _, title, section in titles if section == part and title} <= read
        assert page.ask("document.getElementById('words').getBoundingClientRect().right") <= page.ask(
            "innerWidth"
        )
        page.press("Escape", 27)
        page.wait("!document.getElementById('words').open")


# Time zones


@pytest.mark.parametrize("zone", ["Asia/Kolkata", "America/New_York"])
def test_times_are_those_of_the_reader(make_rig, tmp_path, zone):
    rig = make_rig()
    at = time.time()
    before = at - 3 * 86400
    rig.feed.ended(ended(before))
    rig.feed.ended(ended(at))
    rig.feed.ring()
    with Chromium(tmp_path / "chromium", {"TZ": zone}) as browser:
        open_page(rig, browser)
        browser.wait("requests.length === 2")
        cell = "document.querySelectorAll('#requests tr')[{}].firstChild.{}"
        there = datetime.fromtimestamp(at, ZoneInfo(zone))
        assert browser.ask(cell.format(0, "textContent")).endswith(f"{there:%H:%M:%S}")
        then = datetime.fromtimestamp(before, ZoneInfo(zone))
        shown = browser.ask(cell.format(1, "textContent"))
        assert shown.endswith(f" {then:%H:%M:%S}")
        assert str(then.day) in shown.split(":")[0]
        assert str(then.year) in browser.ask(cell.format(1, "title"))
        named = browser.ask("Intl.DateTimeFormat().resolvedOptions().timeZone")
        assert ZoneInfo(named).utcoffset(then) == ZoneInfo(zone).utcoffset(then)
        assert browser.ask("document.getElementById('zone').textContent") == f"times of your zone, {named}"
        midnight = datetime(then.year, then.month, then.day, 0, 5, tzinfo=ZoneInfo(zone)).timestamp()
        assert browser.ask(f"clock({midnight}).endsWith('00:05:00')")
