"""No client reads another client's text, also where an engine's log or answer quotes it."""

import json

import pytest

from anvil_mux.errors import LoadError
from anvil_mux.multiplexer.circuits import MOST_FAILURES
from tests.fake_engine import JSON_OK, answer_of, keyring, shows
from tests.proxy.test_elsewhere import world  # noqa: F401

ADMIN, STATE, BOB = "admin-secret-key", "state-secret-key", "bobs-secret-key"
KEYS = (f"{ADMIN} admin", f"{STATE} models=none state", f"{BOB} models=a")
PROMPT = "prompt of alice: the password is swordfish"
CHAT = b'{"model":"a","messages":[]}'


@pytest.fixture
def shared(make_rig):
    """A rig with keys, whose engine has logged the prompt of somebody."""
    rig = make_rig(keys=keyring(*KEYS))
    rig.mechanism.log = ["loading", PROMPT]
    return rig


def crash(rig, extra=b""):
    """The answer to a request under which the engine ends twice."""
    client, other = rig.client(), rig.client()
    rig.mechanism.end = "exited with code 139"
    answer_one(rig, other, extra)
    client.post(CHAT, extra=extra)
    rig.engine.next().reset()
    asked = rig.engine.next()
    answer_one(rig, other, extra)
    asked.reset()
    return client.read()


def answer_one(rig, client, extra):
    """A whole answer, so that the next end of the engine is not one right after its load."""
    released = len(rig.events.of("released"))
    client.post(CHAT, extra=extra)
    rig.engine.next().send(JSON_OK)
    assert client.read().status == 200
    rig.events.wait("released", released + 1)
    rig.relay.pool.close()


def test_crash_error_without_keys_ends_with_the_log(rig):
    rig.mechanism.log = ["loading", PROMPT]
    message = crash(rig).error["message"]
    assert "exited with code 139" in message
    assert message.endswith(f"Last lines of the engine's log:\nloading\n{PROMPT}")


@pytest.mark.parametrize(("key", "reads"), [(ADMIN, True), (BOB, False)])
def test_crash_error_with_keys_has_the_log_for_admins_only(shared, key, reads):
    answer = crash(shared, shows(key))
    assert answer.code == "engine_crashed"
    assert "exited with code 139" in answer.error["message"]
    assert ("swordfish" in answer.error["message"]) is reads


@pytest.mark.parametrize(("key", "reads"), [(ADMIN, True), (BOB, False)])
def test_load_error_names_other_projects_to_admins_only(shared, key, reads):
    line = "For operators: c of the project secret is on GPU 0. To end it: kill -- -1"
    shared.mechanism.failure = LoadError("its GPU is held by an engine of another anvil-mux", log=[line])
    message = shared.ask(CHAT, extra=shows(key)).error["message"]
    assert "its GPU is held by an engine of another anvil-mux" in message
    assert message.endswith(f"\n{line}") is reads
    assert ("secret" in message) is reads
    assert "log" not in message, "it is no line of an engine"


@pytest.mark.parametrize(("key", "reads"), [(ADMIN, True), (BOB, False)])
def test_load_error_with_keys_has_the_log_for_admins_only(shared, key, reads):
    shared.mechanism.failure = LoadError("exited with code 1", log=(PROMPT,))
    for answer in (shared.ask(CHAT, extra=shows(key)), shared.ask(CHAT, extra=shows(key))):
        assert answer.code == "load_failed"
        assert "exited with code 1" in answer.error["message"]
        assert ("swordfish" in answer.error["message"]) is reads


@pytest.mark.parametrize("path", [b"/healthz", b"/why?model=a", b"/readyz?verbose", b"/requests/running"])
def test_state_after_a_crash_has_no_log_for_a_state_key(shared, path):
    crash(shared, shows(BOB))
    assert "swordfish" not in shared.get(path, extra=shows(STATE)).body.decode()


def test_events_after_a_crash_have_no_log(shared):
    crash(shared, shows(BOB))
    client = shared.client()
    client.send(b"GET /events HTTP/1.1\r\nHost: localhost\r\n%b\r\n" % shows(STATE))
    snapshot = client.read_until(b"\n\n").partition(b"data: ")[2]
    assert b"exited with code 139" in snapshot
    assert b"swordfish" not in snapshot


def test_healthz_after_a_crash_has_the_log_for_an_admin(shared):
    crash(shared, shows(BOB))
    backend = shared.json(b"/healthz", shows(ADMIN))["models"]["a"]["backends"]["a"]
    assert backend["log"] == ["loading", PROMPT]


def test_open_circuit_reason_quotes_no_answer_to_another_client(world):  # noqa: F811
    rig = world(keys=keyring(*KEYS, f"{BOB}-too models=gpt"))
    rig.other.answer = lambda _: answer_of(PROMPT.encode()).replace(b" 200 ", b" 400 ", 1)
    chat = b'{"model":"gpt","messages":[{"role":"user","content":"x"}],"stream":false}'
    for _ in range(MOST_FAILURES):
        own = rig.ask(chat, b"/api/chat", extra=shows(ADMIN))
        assert "swordfish" in own.json["error"]
    other = rig.ask(chat, b"/api/chat", extra=shows(f"{BOB}-too"))
    assert other.status == 503
    assert "the engine of gpt answered 400" in other.json["error"]
    assert "swordfish" not in other.json["error"]
    assert "swordfish" not in json.dumps(rig.json(b"/healthz", shows(STATE)))


@pytest.mark.parametrize("path", [b"/slots?model=a", b"/upstream/a/slots"])
@pytest.mark.parametrize(("key", "status"), [(ADMIN, 200), (BOB, 403)])
def test_slots_of_an_engine_with_their_prompts_are_for_admins(shared, path, key, status):
    shared.engine.answer = lambda _: JSON_OK
    assert shared.ask(CHAT, extra=shows(ADMIN)).status == 200
    heard = shared.engine.answers()
    assert shared.get(path, extra=shows(key)).status == status
    assert len(heard) == (status == 200)


def test_request_without_a_model_does_not_name_a_default_that_the_key_may_not_use(make_rig):
    rig = make_rig(default_model="org/b", keys=keyring(*KEYS))
    client = rig.client()
    client.post(b'{"messages":[]}', extra=b"Authorization: Bearer %b\r\n" % BOB.encode())
    answer = client.read()
    assert (answer.status, answer.error["message"]) == (400, "the request must name a `model`")
