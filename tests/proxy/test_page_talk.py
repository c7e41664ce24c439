"""The status page's playground, and the log of an engine below it, in a real Chromium: ``bin/test page``."""

import json
import re
from typing import Any

from anvil_mux.config.config import Backend
from anvil_mux.config.values import AnyOf, Rule
from anvil_mux.errors import LoadError
from anvil_mux.telemetry.accesslog import Served
from tests.chromium import IN_CHROMIUM, Chromium
from tests.fake_engine import SSE_HEAD, Asked, Rig, answer_of, chunk
from tests.proxy.test_page import HEALTH, READY, more, press, state_of
from tests.running import seen

pytestmark = IN_CHROMIUM
TEXT, TALK = "document.getElementById('try-text')", "document.getElementById('talk')"
ANSWER = f"{TALK}.lastChild?.children[1].textContent"
NOTE = f"{TALK}.lastChild?.lastChild.textContent"
LINES = "document.getElementById('log-lines').textContent"


def say(page: Chromium, text: str, model: str = "a", *, stream: bool = True) -> None:
    page.ask(f"document.getElementById('try-model').value = {json.dumps(model)}, null")
    page.ask(f"document.getElementById('try-stream').checked = {json.dumps(stream)}, null")
    page.ask(f"{TEXT}.focus()")
    page.type(text)
    page.ask("document.getElementById('try-send').click()")


def messages(asked: Asked) -> list[tuple[str, str]]:
    body: dict[str, Any] = json.loads(asked.body)
    return [(each["role"], each["content"]) for each in body["messages"]]


def begin_stream(asked: Asked, *words: str) -> None:
    asked.send(SSE_HEAD)
    for word in words:
        data = {"choices": [{"delta": {"content": word}}]}
        asked.send(chunk(b"data: %b\n\n" % json.dumps(data).encode()))


def stream(asked: Asked, *words: str) -> None:
    begin_stream(asked, *words)
    end_stream(asked)


def end_stream(asked: Asked) -> None:
    usage = {"choices": [], "usage": {"completion_tokens": 12}}
    asked.send(chunk(b"data: %b\n\ndata: [DONE]\n\n" % json.dumps(usage).encode()), b"0\r\n\r\n")


def answer(asked: Asked, word: str) -> None:
    data = {"choices": [{"message": {"content": word}}], "usage": {"completion_tokens": 3}}
    asked.send(answer_of(json.dumps(data).encode()))


def records(rig: Rig) -> list[Served]:
    """The records of the questions that models were asked."""
    ended = [each for each in rig.events.seen if isinstance(each, Served)]
    return [each for each in ended if each.path == "/v1/chat/completions"]


def is_over(page: Chromium, count: int) -> None:
    page.wait(f"speaking === null && talk.length === {count}")


def test_a_conversation_is_kept_and_each_answer_has_its_figures(opened):
    rig, page = opened("a")
    say(page, "Hello")
    asked = rig.engine.next()
    assert messages(asked) == [("user", "Hello")]
    stream(asked, "Good ", "day.")
    is_over(page, 1)
    assert page.ask(ANSWER) == "Good day."
    assert re.match(r"first token after [\d.]+ m?s; 12 tokens, [\d.]+ tokens/s", page.ask(NOTE))
    assert page.ask(f"{TEXT}.value") == ""
    say(page, "And now?", stream=False)
    asked = rig.engine.next()
    assert messages(asked) == [("user", "Hello"), ("assistant", "Good day."), ("user", "And now?")]
    answer(asked, "Bye.")
    is_over(page, 2)
    assert page.ask(ANSWER) == "Bye."
    assert re.match(r"3 tokens in [\d.]+ m?s, [\d.]+ tokens/s", page.ask(NOTE))
    assert page.ask(f"{TALK}.children.length") == 2
    page.ask("document.getElementById('try-new').click()")
    assert page.ask(f"{TALK}.hidden && document.activeElement === {TEXT}")
    say(page, "Anew")
    asked = rig.engine.next()
    assert messages(asked) == [("user", "Anew")]
    stream(asked, "Yes.")
    is_over(page, 1)


def test_while_an_answer_waits_and_afterwards_it_is_told_for_what(opened):
    rig, page = opened("a")
    rig.mechanism.gate.clear()
    say(page, "Hello", "org/b")
    page.wait(f"/^A request for org.b waits/.test({NOTE})")
    rig.mechanism.gate.set()
    asked = rig.other.next()
    page.ask(
        "events = [{at: now() - 2, kind: 'draining', model: 'a', backend: 'a', target: 'org/b'},"
        " {at: now() - 1, kind: 'loading', model: 'org/b', backend: 'b', reason: '1 waiting'},"
        " {at: now(), kind: 'ready', model: 'org/b', backend: 'b'}], null"
    )
    stream(asked, "Yes.")
    is_over(page, 1)
    [record] = seen(lambda: records(rig), bool)
    rig.feed.ended(record)
    rig.feed.ring()
    page.wait(f"/waited .+ for a → org.b .swapped in 2.0 s .1.0 s of it loading../.test({NOTE})")


def test_what_it_waited_for_is_told_also_if_that_is_known_before_its_end(opened):
    rig, page = opened("a")
    say(page, "Hello")
    asked = rig.engine.next()
    begin_stream(asked, "Good ")
    page.wait(f"{ANSWER} === 'Good '")
    about = {"model": "a", "backend": "a", "status": 200, "waited": 2.0}
    rig.feed.ended(Served(page.ask("speaking.id"), "127.0.0.1", "POST", "/v1/chat/completions", **about))
    rig.feed.ring()
    page.wait("requests.length === 1")
    end_stream(asked)
    is_over(page, 1)
    assert page.ask(NOTE).endswith("; waited 2.0 s for its turn")


def test_an_answer_can_be_stopped_and_what_came_of_it_is_kept(opened):
    rig, page = opened("a")
    say(page, "Hello")
    begin_stream(rig.engine.next(), "Once ", "upon ")
    page.wait(f"{ANSWER} === 'Once upon '")
    page.ask("document.getElementById('try-stop').focus()")
    page.press("Enter", 13)
    is_over(page, 1)
    assert page.ask(NOTE).startswith("stopped; first token after ")
    assert page.ask(f"document.activeElement === {TEXT}")
    say(page, "Go on")
    asked = rig.engine.next()
    assert messages(asked)[1] == ("assistant", "Once upon ")
    stream(asked, "a time.")
    is_over(page, 2)


def test_a_name_for_several_models_is_shown_and_can_be_tried(opened):
    rig, page = opened("a", any_of={"chat": AnyOf((Rule(("org/b", "a")),))})
    page.wait("document.getElementById('choices').textContent === 'chat: any of org/b, a; now a'")
    say(page, "x", "chat")
    asked = rig.engine.next()
    assert json.loads(asked.body)["model"] == "a"
    stream(asked, "Yes.")
    is_over(page, 1)


def test_what_is_wrong_with_a_try_is_said_and_its_question_can_be_sent_again(opened):
    rig, page = opened("a")
    rig.mux.facts.paused(None)
    page.wait(f"{HEALTH}.startsWith('paused')")
    say(page, "x")
    is_over(page, 1)
    assert page.ask(NOTE).startswith("anvil-mux is paused")
    assert page.ask(f"{TEXT}.value") == "x"
    rig.mux.facts.resumed()
    rig.mechanism.failure = LoadError("out of memory", log=["its last", "words"])
    page.ask(f"{TEXT}.value = '', null")
    say(page, "y", "org/b")
    is_over(page, 2)
    assert page.ask(NOTE).endswith("out of memory")
    assert page.ask("messages_of(talk)") == []
    page.problems.clear()  # Chromium itself notes both answers of 503


# The log of an engine


def test_a_log_goes_on_below_the_page_while_it_is_open(opened):
    rig, page = opened("a")
    page.wait(f"{READY} && {state_of('a')} === 'ready'")
    rig.logs["a"] = ["listens on 8000"]
    press(page, "a", "Log")
    page.wait(f"{LINES} === 'listens on 8000'")
    assert ("complementary", "Log of a") in page.tree()
    assert page.ask("document.getElementById('log-state').textContent") == "ready"
    assert page.ask("document.activeElement.id") == "log-lines"
    rig.logs["a"] = [*rig.logs["a"], "answers"]
    page.wait(f"{LINES} === 'listens on 8000\\nanswers'")
    press(page, "a", "Unload")
    page.wait("document.getElementById('log-state').textContent === 'stopped'")
    page.ask("document.getElementById('log-lines').focus()")
    page.press("Escape", 27)
    assert page.ask("document.getElementById('log').hidden && !document.body.matches('.has-log')")
    assert page.ask(f"document.activeElement === {more('a')}")
    assert page.ask("log") is None


def test_of_several_replicas_each_has_its_log(opened):
    replicas = Backend("one", "a", ("0",)), Backend("two", "a", ("0",))
    rig, page = opened(backends=replicas)
    rig.logs |= {"one": ["first"], "two": ["second"]}
    press(page, "a", "Log")
    page.wait(f"{LINES} === 'first'")
    choice = "document.getElementById('log-backend')"
    assert page.ask(f"[...{choice}.options].map(each => each.value)") == ["one", "two"]
    page.ask(f"{choice}.value = 'two', {choice}.onchange(), null")
    page.wait(f"{LINES} === 'second'")
    page.ask("document.getElementById('log-close').click()")


def test_what_goes_wrong_with_a_log_is_said_there(opened):
    _, page = opened("a")
    press(page, "a", "Log")
    page.wait(f"{LINES} === '(nothing yet)'")
    page.ask("window.fetch = () => Promise.reject(new TypeError('no network')), null")
    page.wait(f"{LINES} === 'anvil-mux does not answer'")
