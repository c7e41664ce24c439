"""What is told of the state, by whom it may be asked, and what is not offered."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from anvil_mux import __version__
from anvil_mux.config.config import Backend
from anvil_mux.config.machines import Gpu
from anvil_mux.errors import LoadError
from anvil_mux.host.seam import Evicted, GpuUse, OtherProcess, Sensors
from anvil_mux.scheduler.policies import Decision, Snapshot, Stay, SwapTo
from tests.fake_engine import ASK_A, ASK_B, JSON_OK, Rig

# Routes


def test_models_are_listed_from_memory_while_one_loads(rig):
    rig.mechanism.gate.clear()
    waiting, connection = rig.client(), rig.client()
    waiting.post(ASK_A)
    rig.events.wait("loading")
    answer = connection.get(b"/v1/models")
    states = {each["id"]: each["status"]["value"] for each in answer.json["data"]}
    assert states == {"a": "loading", "org/b": "unloaded"}
    assert connection.json(b"/models") == answer.json


@pytest.mark.parametrize("path", [b"/v1/models/org/b", b"/v1/models/org%2Fb", b"/v1/models/org%2fb"])
def test_one_model_is_found_under_its_raw_or_encoded_id(rig, path):
    assert rig.json(path)["id"] == "org/b"
    assert rig.get(path + b"c").code == "model_not_found"


def test_the_list_of_models_may_end_with_a_slash(rig):
    listed = rig.json(b"/v1/models/")
    assert listed == rig.json(b"/v1/models")
    assert [each["id"] for each in listed["data"]] == ["a", "org/b"]


def test_healthz_tells_the_whole_state(rig):
    rig.engine.answer = lambda _: JSON_OK
    connection = rig.client()
    connection.ask(ASK_A)
    rig.events.wait("released")
    state = connection.json(b"/healthz")
    assert (state["status"], state["version"]) == ("ok", __version__)
    assert state["models"]["a"]["state"] == "ready"
    assert state["models"]["a"]["gpus"] == ["0"]
    assert (state["models"]["a"]["waiting"], state["models"]["a"]["leases"]) == (0, 0)
    assert state["models"]["org/b"]["state"] == "stopped"
    assert state["gpus"]["0"]["resident"] == "a"
    assert state["gpus"]["0"]["draining"] is None
    assert state["resident"] == "a"
    assert state["registry"] == ["a", "org/b"]


def test_healthz_shows_who_uses_a_gpu(make_rig):
    rig = make_rig(gpus=(Gpu("0", vram=24, reserve=2),))
    gpu = rig.json(b"/healthz")["gpus"]["0"]
    assert (gpu["used"], gpu["total"], gpu["reserve"], gpu["others"]) == (None, 24, 2, [])
    other_process = OtherProcess("0", 41, 5, "python3", "f00")
    sensors = Sensors(0.8749, 61.3)
    rig.handler.local.probes.gpu_uses = lambda: {"0": GpuUse(20, 25, {"a": 11}, (other_process,), sensors)}
    gpu = rig.json(b"/healthz")["gpus"]["0"]
    assert (gpu["used"], gpu["total"], gpu["users"]) == (20, 25, {"a": 11})
    assert gpu["sensors"] == {"utilization": 0.87, "celsius": 61, "watts": None}
    assert gpu["others"] == [{"pid": 41, "name": "python3", "bytes": 5, "container": "f00"}]


def test_healthz_names_the_memory_to_declare_for_a_model_that_was_measured(make_rig):
    rig = make_rig(backends=(Backend("a", "a", ("0",)), Backend("b", "b", ("0",), vram=6 << 30)))
    rig.mechanism.evict = lambda backend, how: Evicted(how, freed={"0": 7 << 30})
    connection = rig.serve(ASK_A, b'{"model":"b"}', ASK_A)
    models = connection.json(b"/healthz")["models"]
    told = [models[name]["backends"][name]["vram_to_declare"] for name in "ab"]
    assert told == ["7GiB", None]


def test_healthz_shows_what_a_model_takes_and_when_an_idle_one_goes(make_rig):
    backends = Backend("a", "a", ("0",), vram=5, ttl=600.0), Backend("b", "b", ("0",), vram=6)
    rig = make_rig(backends=backends, gpus=(Gpu("0", vram=20),))
    connection = rig.serve(ASK_A, b'{"model":"b"}')
    rig.events.wait("released", count=2)
    models = connection.json(b"/healthz")["models"]
    a, b = models["a"]["backends"]["a"], models["b"]["backends"]["b"]
    assert (a["size"], b["size"]) == (5, 6)
    assert 0 < a["unload_seconds"] <= 600
    assert b["unload_seconds"] is None


@contextmanager
def draining(rig: Rig, extra: bytes = b"") -> Iterator[None]:
    """A request is answered by the model that is drained for another one's; both get their answers then."""
    first, asked = rig.asked(ASK_A, extra=extra)
    second = rig.client()
    second.post(ASK_B)
    rig.events.wait("draining")
    yield
    asked.send(JSON_OK)
    rig.other.next().send(JSON_OK)
    assert (first.read().status, second.read().status) == (200, 200)


def test_healthz_shows_a_drain(rig):
    with draining(rig):
        gpu = rig.json(b"/healthz")["gpus"]["0"]
        assert (gpu["draining"]["target"], gpu["draining"]["leases"]) == ("org/b", 1)
        assert 0 < gpu["draining"]["seconds_left"] <= 30
        assert gpu["reserved_for"] == ["org/b"]
        models = rig.json(b"/healthz")["models"]
        assert models["a"]["draining"]["target"] == "org/b"
        assert models["org/b"]["waiting"] == 1
        assert models["org/b"]["oldest_wait_seconds"] >= 0


def test_an_answer_that_a_swap_waits_for_is_named_by_the_id_of_its_request(make_rig):
    film = Backend("a", "a", gpus=("0",), drain_timeout=math.inf)
    rig = make_rig(backends=(film, Backend("b", "org/b", gpus=("0",))))
    with draining(rig, extra=b"X-Request-ID: film-7\r\n"):
        state = rig.json(b"/healthz")
        [answer] = state["models"]["a"]["draining"]["answers"]
        assert (answer["model"], answer["request"]) == ("a", "film-7")
        assert answer["run_seconds"] >= 0
        assert state["models"]["a"]["draining"]["seconds_left"] is None
        assert state["gpus"]["0"]["draining"]["seconds_left"] is None
        why = rig.json(b"/why?model=org/b")
        assert [each["request"] for each in why["waits_for"]] == ["film-7"]
        assert why["at_most"] is None
        assert "request film-7 of a has run for" in why["sentence"]


def test_above_its_own_max_queue_a_model_is_refused_and_told_so_everywhere(make_rig):
    busy = Backend("a", "a", gpus=("0",), drain_timeout=math.inf)
    rig = make_rig(backends=(busy, Backend("b", "org/b", gpus=("0",), max_queue=1)))
    with draining(rig):
        answer = rig.ask(ASK_B)
        models = rig.json(b"/healthz")["models"]
        why = rig.json(b"/why?model=org/b")
    assert (answer.status, answer.code) == (503, "overloaded")
    assert b"the queue of org/b is full: 1 waiting (its max_queue)" in answer.body
    assert answer.header(b"retry-after") == b"5"
    assert (models["org/b"]["waiting"], models["org/b"]["max_queue"]) == (1, 1)
    assert "max_queue" not in models["a"]
    assert (why["verdict"], "(its max_queue)" in why["sentence"]) == ("refused", True)


def test_healthz_tells_why_and_for_how_long_a_swap_is_put_off(make_rig):
    rig = make_rig(policy="debounce", policy_settings={"quiet": 600.0, "max_hold": 600.0}, max_wait=600.0)
    first, second = rig.client(), rig.client()
    first.post(ASK_A)
    asked = rig.engine.next()
    second.post(ASK_B)
    rig.events.wait("deferred")
    models = rig.json(b"/healthz")["models"]
    assert models["a"]["deferred"] is None
    assert models["org/b"]["deferred"]["cause"] == {"kind": "not_quiet", "seconds": 600.0}
    assert models["org/b"]["deferred"]["reason"] == "its requests still arrive less than 600 s apart"
    assert 0 < models["org/b"]["deferred"]["seconds_left"] <= 600
    second.leave()
    asked.send(JSON_OK)


@dataclass(frozen=True)
class Broken:
    def decide(self, seen: Snapshot) -> Decision:
        if any(line.evicts for line in seen.queues):
            raise ZeroDivisionError
        return SwapTo(seen.queues[0].model) if seen.queues else Stay()


def test_healthz_has_no_number_for_what_is_put_off_without_end(make_rig):
    rig = make_rig(policy=f"{__name__}:Broken", max_wait=600.0)
    rig.engine.answer = lambda _: JSON_OK
    first, second = rig.client(), rig.client()
    first.ask(ASK_A)
    second.post(ASK_B)
    rig.events.wait("deferred")
    deferred = rig.json(b"/healthz")["models"]["org/b"]["deferred"]
    assert deferred == {
        "seconds_left": None,
        "cause": {"kind": "policy_failed", "detail": "ZeroDivisionError()"},
        "reason": "the policy failed: ZeroDivisionError()",
    }
    second.leave()


def test_healthz_has_the_last_lines_of_an_engine_that_failed(rig):
    rig.mechanism.failure = LoadError("exited with code 1", log=("no such file", "bye"))
    connection = rig.client()
    assert connection.ask(ASK_A).status == 503
    model = connection.json(b"/healthz")["models"]["a"]
    backend = model["backends"]["a"]
    assert model["last_error"] == backend["error"] == "exited with code 1"
    assert backend["log"] == ["no such file", "bye"]
    assert (backend["state"], 0 < backend["retry_seconds"] <= 5) == ("stopped", True)


def test_healthz_tells_how_a_standby_backend_rests_and_what_it_holds_still(make_rig):
    sleeper = Backend("a", "a", ("0",), evict_to=("sleep", "stop"))
    rig = make_rig(backends=(sleeper, Backend("b", "org/b", ("0",))))
    rig.mechanism.evict = lambda backend, how: Evicted(how, {"0": 7})
    state = rig.serve(ASK_A, ASK_B).json(b"/healthz")
    a, b = state["models"]["a"]["backends"]["a"], state["models"]["org/b"]["backends"]["b"]
    assert (a["standby_level"], a["idle_seconds"], b["standby_level"]) == ("sleep", None, None)
    assert b["idle_seconds"] >= 0
    assert state["gpus"]["0"]["residuals"] == {"a": 7}


def test_readyz_lists_its_checks_when_asked(rig):
    connection = rig.client()
    assert connection.get(b"/readyz").body == b"ok\n"
    assert (
        connection.get(b"/readyz?verbose").body
        == b"[+]docker ok\n[+]threads ok\n[+]accepting ok\n[+]adoption ok\nok\n"
    )


def test_readyz_fails_when_a_check_does(rig):
    rig.handler.local.probes.checks = {"docker": lambda: "cannot be reached"}
    connection = rig.client()
    answer = connection.get(b"/readyz")
    assert answer.status == 503
    assert b"[-]docker cannot be reached\n" in answer.body
    assert connection.get(b"/healthz").status == 503
    assert connection.get(b"/livez").status == 200


def test_a_pump_that_hangs_is_told_by_each_probe(rig):
    rig.handler.local.probes.checks = {"streams": lambda: "the thread that moves streams hangs"}
    connection = rig.client()
    for path in (b"/livez", b"/readyz", b"/healthz"):
        answer = connection.get(path)
        assert (answer.status, b"moves streams hangs" in answer.body) == (503, True)


def test_metrics_and_the_front_page_are_text(rig):
    connection = rig.client()
    assert connection.get(b"/metrics").body == b"anvil_up 1\n"
    assert b"org/b  stopped" in connection.get(b"/").body


@pytest.mark.parametrize("path", [b"/", b"/healthz", b"/v1/models"])
def test_head_has_the_length_and_no_body(rig, path):
    connection = rig.client()
    answer = connection.get(path, b"HEAD")
    assert answer.status == 200
    assert int(answer.header(b"content-length") or 0) > 0
    assert connection.get(b"/livez").body == b"ok\n"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        (b"GET", b"/v1/chat/completions", 405),
        (b"POST", b"/v1/models", 405),
        (b"GET", b"/models/load", 405),
        (b"POST", b"/v1/files", 501),
        (b"POST", b"/sleep", 404),
        (b"POST", b"/v1/../sleep", 404),
        (b"POST", b"/v1//chat/completions", 404),
        (b"POST", b"/v1/chat/completions%2f..%2fsleep", 404),
        (b"GET", b"/nowhere", 404),
    ],
)
def test_what_is_not_offered_is_refused_in_json(rig, method, path, status):
    answer = rig.get(path, method)
    assert answer.status == status
    assert answer.error["message"]
    assert rig.engine.asked.empty()


def test_errors_have_the_shape_of_the_api(rig):
    answer = rig.ask(b'{"model":"nobody"}', path=b"/v1/messages")
    assert answer.error["type"] == "not_found_error"
    assert answer.header(b"request-id") == answer.header(b"x-request-id")


def test_a_load_by_hand_that_names_nobody_is_refused(rig):
    connection = rig.client()
    assert connection.ask(b'{"model":"nobody"}', path=b"/models/load").status == 404
    assert connection.ask(b"{}", path=b"/models/load").status == 400


# Other web sites


@pytest.mark.parametrize(
    ("hosts", "status"),
    [
        ("evil.example 127.evil.example localhost.evil.example 192.168.1.4:80", 403),
        ("localhost:9292 127.0.0.1 127.1.2.3:80 [::1]:9292 mux.localhost", 200),
    ],
)
def test_on_loopback_this_machines_names_are_accepted_and_no_others(rig, hosts, status):
    for host in hosts.encode().split():
        connection = rig.client()
        connection.send(b"GET /v1/models HTTP/1.1\r\nHost: %b\r\n\r\n" % host)
        assert connection.read().status == status, host


@pytest.mark.parametrize("path", [b"/v1/chat/completions", b"/models/unload"])
def test_another_sites_page_cannot_post(rig, path):
    connection = rig.client()
    for _ in range(3):
        assert connection.ask(ASK_A, path=path, extra=b"Origin: http://evil.example\r\n").status == 403
    assert not rig.events.of("queued")


def test_a_form_of_text_is_no_json(rig):
    assert rig.ask(ASK_A, b"/models/unload", type=b"text/plain").status == 415
