"""The status page in a real Chromium, before a real anvil-mux: ``bin/test page``."""

import json
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from anvil_mux.config.config import Backend
from anvil_mux.telemetry.accesslog import Served
from tests.chromium import IN_CHROMIUM, Chromium
from tests.cli.demo import compose
from tests.running import Running, serving

pytestmark = IN_CHROMIUM
ODD = "org/<b>odd</b>"
HEALTH = "document.getElementById('health').textContent"
READY = f"{HEALTH} === 'all is well'"


@pytest.fixture(scope="module")
def mux(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("page")
    file = compose(folder, "a", "b", "slow", policy="eager")
    content = yaml.safe_load(file.read_text())
    content["services"]["slow"]["command"][4] = "60"  # seconds that it loads
    content["services"]["slow"]["x-anvil"] = {"gpus": ["1"]}
    content["services"]["b"]["x-anvil"] |= {"model": ODD, "served_model": "b"}
    file.write_text(yaml.safe_dump(content))
    with serving(file, state=folder) as running:
        yield running


@pytest.fixture
def page(mux: Running, browser: Chromium) -> Iterator[Chromium]:
    """The page, as a new visitor with a large screen sees it; at the end it must have done nothing wrong."""
    browser.leave()
    browser.asked.clear()
    browser.size(1280, 900)
    browser.prefer(prefers_color_scheme="light")
    browser.open(f"http://127.0.0.1:{mux.port}/")
    browser.wait(f"document.readyState === 'complete' && {READY}")
    yield browser
    # The page before may have asked its server once more, which has ended.
    elsewhere = [each for each in browser.problems if "http://" in each and f":{mux.port}/" not in each]
    assert [each for each in browser.problems if each not in elsewhere] == []


def row(model: str) -> str:
    rows = "[...document.querySelectorAll('#models tr')]"
    return f"{rows}.find(row => row.dataset.key === {json.dumps(model)})"


def notes(model: str) -> str:
    """The text of the row below that of a model; "" if there is none."""
    return f"({row(f'{model}{chr(10)}')}?.textContent ?? '')"


def button(model: str) -> str:
    """The first button of a model's row."""
    return f"{row(model)}.querySelector('button')"


def press(page: Chromium, model: str, text: str) -> None:
    """Press the button of a model's row, if it says that, else what says it in its menu; by the keyboard."""
    item = f"[...document.querySelectorAll('#menu button')].find(each => each.textContent === '{text}')"
    page.wait(f"{button(model)}.textContent === '{text}' || {more(model)}.checkVisibility()")
    if page.ask(f"{button(model)}.textContent === '{text}'"):
        page.ask(f"{button(model)}.focus()")
    else:
        page.ask(f"{more(model)}.focus()")
        page.press("Enter", 13)
        page.ask(f"{item}.focus()")
    page.press("Enter", 13)


def more(model: str) -> str:
    """The button of a model's menu."""
    return f"{row(model)}.querySelector('[aria-haspopup]')"


def state_of(model: str) -> str:
    return f"{row(model)}.querySelector('.chip').textContent"


def test_a_program_still_gets_text(mux):
    _, headers, text = mux.request("GET", "/", headers={"Accept": "*/*"})
    assert headers["content-type"].startswith("text/plain")
    assert text.startswith("anvil-mux ")


def test_it_shows_every_model_and_gpu_and_asks_nobody_else(mux, page):
    assert page.ask("[...document.querySelectorAll('#models tr')].map(row => row.dataset.key)") == [
        "a",
        ODD,
        "slow",
    ]
    assert page.ask("[...document.querySelectorAll('#gpus strong')].map(each => each.textContent)") == [
        "GPU 0",
        "GPU 1",
    ]
    own = f"http://127.0.0.1:{mux.port}/"
    assert {url for url in page.asked if not url.startswith((own, "data:"))} == set()


# Several hosts


def test_servers_elsewhere_and_fallbacks(opened):
    near = Backend("a", "a", gpus=("0",), fallback=("gpt",), fallback_after=20.0)
    rig, page = opened(backends=(near, Backend("gpt", "gpt", url="https://cloud.example/v1")))
    rig.mux.facts.adopt({"gpt": "https://cloud.example/v1"})
    assert page.ask(notes("a")) == "fallback: gpt after 20 s"
    page.wait(f"{row('gpt')}.children[1].innerText === 'elsewhere'")
    assert page.ask(f"{row('gpt')}.children[2].innerText") == "cloud.example"
    assert page.ask(f"{button('gpt')}.textContent") == "Why"
    assert not page.ask(f"{more('gpt')}.checkVisibility()")
    rig.mux.circuits.asked("gpt", "cannot be reached: refused")
    page.wait(f"{row('gpt')}.children[1].innerText === 'circuit open'")
    assert "it cannot be reached: refused" in page.ask(notes("gpt"))
    about = {
        "model": "gpt",
        "backend": "gpt",
        "status": 200,
        "fallback_of": "a",
        "fallback_cause": "fell_back",
    }
    rig.feed.ended(Served("id", "127.0.0.1", "POST", "/v1/completions", ended=time.time(), **about))
    rig.feed.ring()
    page.wait("document.querySelector('#requests td:nth-child(2)')?.textContent === 'gpt instead of a'")


def host(name: str) -> str:
    return f"[...document.querySelectorAll('#hosts > div')].find(host => host.dataset.key === {name!r})"


def cards(name: str) -> str:
    return f"[...{host(name)}.querySelectorAll('.gpus > div')].map(card => card.innerText)"


def press_of(page: Chromium, name: str, label: str) -> None:
    page.ask(f"{host(name)}.querySelector({json.dumps(f'button[aria-label={json.dumps(label)}]')}).click()")


def test_gpus_stand_under_their_host_with_its_state(opened):
    there, replica = Backend("a", "a", ("0",), host="h1"), Backend("m1", "m", ("1",), host="h1")
    rig, page = opened(
        "a", backends=(there, replica, Backend("m0", "m", ("0",)), Backend("c", "c", host="h2"))
    )
    page.wait(f"{READY} && {state_of('a')} === 'ready'")
    assert page.ask("[...document.querySelectorAll('#hosts h3')].map(each => each.textContent)") == [
        "local",
        "h1",
        "h2",
    ]
    assert page.ask("document.getElementById('hosts-here').textContent") == "3 of 3 hosts here"
    assert page.ask(cards("h1")) == ["GPU 0\nready\na", "GPU 1\nfree"]
    assert page.ask(cards("h2")) == []
    assert page.ask(cards("local")) == ["GPU 0\nfree"]
    assert page.ask(f"{row('m')}.children[2].textContent") == "any of 2 hosts"
    assert page.ask(f"{row('c')}.children[2].textContent") == "h2"
    rig.mux.tell(rig.mux.scheduler.host_away, "h2", away=True)
    page.wait(f"{HEALTH} === 'the host h2 is away'")
    assert page.ask(f"{host('h2')}.querySelector('.chip').textContent") == "away"
    rig.mux.facts.host_lost("h1")
    page.wait(f"{HEALTH} === 'the host h1 is lost, the host h2 is away'")
    assert page.ask(f"{host('h1')}.querySelector('.chip').textContent").startswith("lost for ")
    assert page.ask(cards("h1")) == ["GPU 0\nout of service\na", "GPU 1\nout of service"]
    assert page.ask(state_of("a")) == "ready, host lost"
    assert page.ask(f"{row('a')}.children[2].textContent") == "h1/0"
    assert page.ask(state_of("m")) == "stopped"
    rig.mux.tell(rig.mux.scheduler.host_away, "h2", away=False)
    rig.mux.facts.host_back("h1", {"a": rig.engine.url})
    page.wait(f"{READY} && {state_of('a')} === 'ready'")
    page.wait(f"{host('h1')}.querySelector('.chip').textContent === 'here'")


def test_a_host_is_drained_and_declared_gone_by_its_buttons(opened):
    rig, page = opened("a", backends=(Backend("a", "a", ("0",), host="h1"), Backend("b", "b", ("0",))))
    page.wait(f"{state_of('a')} === 'ready'")
    labels = f"[...{host('h1')}.querySelectorAll('button:not([hidden])')].map(each => each.ariaLabel)"
    assert page.ask(labels) == ["Drain the host h1"]
    press_of(page, "h1", "Drain the host h1")
    page.wait(
        f"{host('h1')}.querySelector('.chip').textContent === 'drained' && {state_of('a')} === 'stopped'"
    )
    assert page.ask(labels) == ["Undrain the host h1"]
    assert page.ask("questions.length") == 0
    press_of(page, "h1", "Undrain the host h1")
    page.wait(READY + f" && {host('h1')}.querySelector('.chip').textContent === 'here'")
    rig.mux.facts.adopt({"a": rig.engine.url})
    rig.mux.facts.host_lost("h1")
    page.wait(f"{labels}.join() === 'Declare the host h1 gone,More for the host h1'")
    assert page.ask(state_of("a")) == "ready, host lost"
    press_of(page, "h1", "Declare the host h1 gone")
    page.wait(f"{state_of('a')} === 'stopped, host lost'")
    assert page.ask("questions.length") == 1
    assert page.ask(f"{host('local')}.querySelectorAll('button:not([hidden])').length") == 0


def test_before_a_host_is_drained_on_which_requests_run_it_is_asked(opened):
    rig, page = opened("a", backends=(Backend("a", "a", ("0",), host="h1"),))
    page.wait(f"{state_of('a')} === 'ready'")
    with rig.mux.lease("a"):
        page.wait(f"{row('a')}.children[3].textContent === '1'")
        press_of(page, "h1", "Drain the host h1")
        page.wait("questions.length === 1 && questions[0].startsWith('1 request still runs on h1.')")
        page.wait(f"{host('h1')}.querySelector('.chip').textContent === 'drained'")


def test_of_a_model_that_may_run_in_many_places_those_are_shown_where_it_is(opened):
    names = [f"h{number:02}" for number in range(50)]
    models = [
        Backend(f"{model}.{name}.{gpu}", model, (gpu,), host=name)
        for model in ("a", "b", "c")
        for name in names
        for gpu in "01234567"
    ]
    rig, page = opened("a.h03.1", "a.h07.0", "b.h20.4", backends=models)
    rig.mux.facts.host_lost("h20")
    page.wait(f"{HEALTH} === 'the host h20 is lost'")
    place = [page.ask(f"{row(model)}.children[2].textContent") for model in "abc"]
    assert place == ["h03/1, h07/0", "any of 50 hosts", "any of 50 hosts"]
    assert page.ask(notes("a")) == "a.h03.1: ready, a.h07.0: ready"
    assert page.ask(state_of("b")) == "stopped"
    assert page.ask("document.querySelectorAll('*').length") < 1500
    shown = "[...document.querySelectorAll('#hosts > div')].filter(host => host.querySelector('.gpus > div'))"
    assert page.ask(f"{shown}.map(host => host.dataset.key)") == ["h20"]
    assert page.ask("document.querySelector('#hosts h3').textContent") == "h20"
    assert page.ask(f"{host('h03')}.querySelector('.note').textContent") == "7 free, 1 ready"
    press_of(page, "h03", "Show the GPUs of h03")
    page.wait(f"{cards('h03')}.length === 8")
    press_of(page, "h03", "Hide the GPUs of h03")
    page.wait(f"{cards('h03')}.length === 0")
    page.ask("why('b'), null")
    page.wait(f"{notes('b')}.includes('Left out: h20 (lost for ')")


def test_what_was_loaded_on_a_lost_host_is_not_drawn_as_resident(opened):
    backends = Backend("a", "a", ("0",), host="h1"), Backend("b", "b", ("0",), host="h2")
    _, page = opened("a", "b", backends=backends)
    drawn = "state && Object.fromEntries(Object.entries(bars(0, 100)).map(([name, {bars}]) => [name, bars]))"
    lost = {"kind": "host_lost", "host": "h1"}
    told: list[dict[str, Any]] = [
        {"at": 10, "kind": "ready", "model": "a", "backend": "a", "host": "h1", "cause": {"kind": "adopted"}},
        {"at": 10, "kind": "ready", "model": "b", "backend": "b", "host": "h2", "cause": {"kind": "adopted"}},
        {"at": 40, "kind": "host_lost", "model": "", "backend": "", "cause": lost, "reason": "it is lost"},
        {"at": 60, "kind": "host_back", "model": "", "backend": "", "text": "it is back"},
        {"at": 60, "kind": "ready", "model": "a", "backend": "a", "host": "h1", "cause": {"kind": "adopted"}},
    ]
    page.ask(f"source.close(), events = {json.dumps(told)}, null")
    assert page.ask(drawn) == {
        "a": [
            {"state": "ready", "since": 10, "until": 40},
            {"state": "failed", "since": 40, "until": 40, "text": "it is lost"},
            {"state": "ready", "since": 60, "until": 100},
        ],
        "b": [{"state": "ready", "since": 10, "until": 100}],
    }
    page.ask("events = [], state.models.a.host_lost = true, null")
    assert page.ask(drawn)["a"] == []


def test_where_there_is_one_host_none_is_shown(page):
    assert page.ask("document.getElementById('hosts').hidden && !document.getElementById('gpus').hidden")
    assert page.ask("document.getElementById('hosts-here').textContent") == ""


def test_a_name_is_text_and_nothing_else(page):
    assert page.ask(f"{row(ODD)}.querySelector('.name').textContent") == ODD
    assert page.ask("document.querySelectorAll('#models b, #tracks b').length") == 0


def test_models_are_loaded_and_put_out_with_the_keyboard(page):
    press(page, "a", "Load")
    page.wait(f"{state_of('a')} === 'ready'")
    page.wait("document.querySelector('#gpus .holds').textContent === 'a'")
    press(page, "a", "Unload")
    page.wait(f"{state_of('a')} === 'stopped'")
    page.wait("document.getElementById('swaps').textContent.includes('evicted (unload requested)')")


def test_a_swap_is_told_with_its_reason_and_drawn(mux, page):
    assert mux.chat("a")[0] == 200
    assert mux.chat(ODD)[0] == 200
    page.wait(f"document.getElementById('swaps').textContent.includes({json.dumps(f'a → {ODD}')})")
    page.wait("document.getElementById('swaps').textContent.includes('1 waiting, oldest first')")
    page.wait("document.querySelectorAll('#tracks rect').length >= 3")
    page.wait("document.querySelector('#tracks svg:last-child title').textContent.startsWith('a: ')")
    page.wait("document.querySelector('#requests tr .name').textContent === " + json.dumps(ODD))
    page.wait("Number(document.querySelector('#requests tr').children[6].textContent) > 0")


def test_a_model_is_pinned_and_unpinned(mux, page):
    assert mux.chat("a")[0] == 200
    press(page, "a", "Pin")
    page.wait(f"{row('a')}.textContent.includes('pinned') && !{row('a')}.querySelector('.tag').hidden")
    assert mux.chat(ODD)[0] == 422
    press(page, "a", "Unpin")
    page.wait(f"{row('a')}.querySelector('.tag').hidden")
    page.wait("document.getElementById('swaps').textContent.includes('unpinned: may be evicted')")
    assert mux.chat(ODD)[0] == 200


def test_why_a_request_would_wait_is_told_when_asked(page):
    press(page, "slow", "Why")
    page.wait(f"{notes('slow')}.includes('A request for slow waits about')")
    press(page, "slow", "Why")
    page.wait(f"{notes('slow')} === ''")


def test_a_waiting_request_is_explained_and_can_be_cancelled(mux, page):
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(mux.chat("slow")))
    thread.start()
    page.wait("document.getElementById('reasons').textContent.includes('A request for slow waits')")
    page.ask("document.querySelector('#queued button').focus()")
    page.press("Enter", 13)
    thread.join()
    assert answers[0][0] == 503
    assert json.loads(answers[0][2])["error"]["code"] == "cancelled"
    page.wait("document.getElementById('queued').children.length === 0")


def test_a_refusal_is_told(page):
    page.ask("post('models/load', {model: 'nope'})")
    page.wait("document.getElementById('notices').textContent.includes('The model `nope` does not exist')")
    page.wait(f"performance.getEntriesByType('resource').length > 0 && {READY}")
    page.problems[:] = [each for each in page.problems if "404" not in each]  # the browser tells it too


def test_a_screen_reader_finds_its_way(page):
    tree = page.tree()
    roles = {role for role, _ in tree}
    assert {"banner", "main", "contentinfo", "status"} <= roles
    regions = [name for role, name in tree if role == "region"]
    assert regions[:3] == ["GPUs", "Models", "Try a model"]
    assert next(name for role, name in tree if role == "heading") == "anvil-mux"
    assert {"More for a", "More for slow"} <= {name for role, name in tree if role == "button"}
    assert [role for role, name in tree if role in ("button", "image", "combobox", "link") and not name] == []
    assert page.ask("document.getElementById('said').getAttribute('aria-live')") == "polite"


def test_nothing_on_it_changes_while_nothing_happens(page):
    page.ask(
        "window.watcher = new MutationObserver(() => {}), watcher.observe(document.body, "
        "{subtree: true, childList: true, characterData: true, attributes: true}), null"
    )
    page.ask(
        "watcher.takeRecords(), show_gpus(), show_models(), show_queued(), show_swaps(), "
        "show_requests(), show_try(), show_log_state(), null"
    )
    assert page.ask("watcher.takeRecords().length") == 0


def test_of_replicas_and_of_who_rests_each_state_is_shown(page):
    page.ask(
        "source.close(), state.models.a.backends.other = {...state.models.a.backends.a, state: 'standby', "
        "standby_level: 'sleep', gpus: ['1']}, state.models.slow.state = 'standby', "
        "state.models.slow.progress = null, "
        "state.models.slow.backends.slow.standby_level = 'sleep', show(), null"
    )
    assert page.ask(f"{notes('a')}.includes('other: standby (sleep)')")
    assert page.ask(f"{row('a')}.children[2].textContent") == "GPU 0, 1"
    assert page.ask(f"{row('slow')}.children[1].textContent") == "standbylevel: sleep"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("presets = ['a-fast', 'a-think']", "presets: a-fast, a-think"),
        (
            "backends.a.kept_prompts = {prompts: 2, tokens: 12345, size: 3 * 2 ** 19}",
            "prompts on disk: 2 (12345 tokens, 1.5 MiB)",
        ),
        (
            "backends.a.vram_to_declare = '18.4GiB'",
            "declare vram: 18.4GiB, and others may be loaded beside it",
        ),
    ],
)
def test_what_there_is_to_say_of_a_model_stands_below_its_name(page, change, told):
    assert page.ask(notes("a")) == ""
    page.ask(f"source.close(), state.models.a.{change}, show(), null")
    assert page.ask(f"[{notes('a')}, {notes('slow')}]") == [told, ""]


def test_memory_that_nobody_reads_is_not_shown_as_free_and_what_a_gpu_measures_is_told(page):
    page.ask("source.close(), state.gpus[0].total = 24 * 2 ** 30, show(), null")
    shown = "document.getElementById('gpus').firstChild"
    assert page.ask(f"{shown}.innerText").startswith("GPU 0\n24.0 GiB\n")
    assert not page.ask(f"{shown}.querySelector('.memory, .parts').checkVisibility()")
    page.ask("state.gpus[0].sensors = {utilization: 0.87, celsius: 61, watts: null}, show(), null")
    assert page.ask(f"{shown}.innerText").endswith("\n87 % busy, 61 °C")


def test_a_queue_with_a_length_of_its_own_is_shown_with_it(page):
    page.ask("source.close(), Object.assign(state.models.a, {waiting: 3, max_queue: 8}), show(), null")
    assert page.ask(f"{row('a')}.innerText.includes('3 of 8')")
    assert not page.ask(f"{row('slow')}.innerText.includes(' of ')")


def test_reloads_are_told_and_that_nobody_answers_until_somebody_does(tmp_path, browser):
    file = compose(tmp_path, "a")
    with serving(file, state=tmp_path) as running:
        browser.open(f"http://127.0.0.1:{running.port}/")
        browser.wait(f"document.getElementById('health') && {READY}")
        written = file.read_text()
        file.write_text("services: [")
        running.process.send_signal(signal.SIGHUP)
        browser.wait(f"{HEALTH}.startsWith('last reload refused: {file}')")
        compose(tmp_path, "a", "new")
        assert file.read_text() != written
        running.process.send_signal(signal.SIGHUP)
        browser.wait(f"{READY} && !!{row('new')}")
        told = "[...document.querySelectorAll('#swaps li')].map(each => each.textContent).join()"
        browser.wait(f"{told}.includes('anvil-mux: configuration reloaded: added new')")
        browser.wait("document.getElementById('version').textContent.includes(', reloaded at ')")
        port = running.port
    browser.wait(f"{HEALTH} === 'no answer; trying again'")
    with serving(file, "--port", str(port), state=tmp_path):
        browser.wait(READY)


# People


def test_a_pause_begins_and_ends_by_its_button(opened):
    rig, page = opened("a")
    page.wait(f"{READY} && {state_of('a')} === 'ready'")
    button = "document.getElementById('pause')"
    page.ask("document.getElementById('lasts').value = '2h', null")
    page.ask(f"{button}.click()")
    page.wait(f"{HEALTH}.startsWith('paused until ') && {state_of('a')} === 'stopped'")
    assert page.ask(HEALTH).endswith(": nothing is loaded, and requests are refused")
    assert page.ask("questions.length") == 0
    assert page.ask(f"{button}.textContent") == "Resume"
    pause = rig.mux.overview.status().pause
    assert pause is not None
    assert pause.until - pause.since == pytest.approx(7200.0)
    page.ask(f"{button}.click()")
    page.wait(f"{READY} && {button}.textContent === 'Pause'")


def test_before_a_pause_severs_requests_it_is_asked(opened):
    rig, page = opened("a")
    page.wait(f"{state_of('a')} === 'ready'")
    with rig.mux.lease("a"):
        page.wait(f"{row('a')}.children[3].textContent === '1'")
        page.ask("document.getElementById('pause').click()")
        page.wait("questions.length === 1")
        page.wait(f"{state_of('a')} === 'draining'")


def test_usage_and_a_request_with_its_bodies_are_shown(tmp_path_factory, browser):
    folder = tmp_path_factory.mktemp("people")
    with serving(compose(folder, "a", capture=5), state=folder) as mux:
        assert mux.chat("a")[0] == 200
        browser.leave()
        browser.open(f"http://127.0.0.1:{mux.port}/")
        browser.wait(f"document.readyState === 'complete' && {READY}")
        cells = "[...document.querySelectorAll('#usage td')].map(cell => cell.textContent)"
        browser.wait(f"{cells}.length > 0")
        assert browser.ask(cells)[:3] == ["none", "a", "1"]
        look = "document.querySelector('#requests button')"
        browser.wait(f"!!{look} && !{look}.parentNode.hidden")
        browser.ask(f"{look}.click()")
        lines = "document.getElementById('text-lines').textContent"
        browser.wait(f"{lines}.startsWith('asked:')")
        shown = browser.ask(lines)
        assert '"content": "Say hello."' in shown
        assert "answered: 200" in shown
        browser.ask("document.getElementById('text').close()")
        assert browser.problems == []
