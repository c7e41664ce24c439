"""A real `anvil-mux serve` is given another configuration while it serves."""

import http.client
import json
import os
import pty
import re
import signal
import sys
import textwrap
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import yaml

from anvil_mux.cli import main as cli
from anvil_mux.cluster.channel import AgentSilent
from anvil_mux.config.change import Change
from anvil_mux.config.config import Backend, Config
from anvil_mux.config.service import Service
from anvil_mux.errors import ConfigError, Draining
from anvil_mux.host import local
from anvil_mux.host.docker_api import ContainerEngine, Unreachable
from anvil_mux.host.processes import ProcessRuntime
from anvil_mux.lab.checker import check
from anvil_mux.proxy.operations import Reloads
from anvil_mux.serve import building, invocation
from anvil_mux.serve.building import Parts
from anvil_mux.serve.program import AnvilMux
from anvil_mux.telemetry.eventlog import config_of, read
from tests.cli.demo import PROJECT, ROOT, TIMEOUT, state
from tests.running import Running, seen, serve, serving

__all__ = ["state"]

ENGINE = '''
"""Streams its first word, and the rest when the file GATE is there."""
import http.server, json, os, sys, time
model, word, gate = sys.argv[1:]

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.begin("application/json")
        self.wfile.write(json.dumps({"data": [{"id": model}]}).encode())

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.begin("text/event-stream")
        self.say(word)
        while not os.path.exists(gate):
            time.sleep(0.01)
        self.say("end")
        self.wfile.write(b"data: [DONE]\\n\\n")

    def begin(self, kind):
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.end_headers()

    def say(self, said):
        told = json.dumps({"choices": [{"delta": {"content": said}}]})
        self.wfile.write(b"data: " + told.encode() + b"\\n\\n")
        self.wfile.flush()

    def log_message(self, *about):
        pass

http.server.ThreadingHTTPServer(("127.0.0.1", int(os.environ["PORT"])), Handler).serve_forever()
'''


class House:
    """A compose file that can be written again, and the gate of its engines."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file, self.gate = folder / "compose.yaml", folder / "gate"
        (folder / "engine.py").write_text(ENGINE)

    def write(self, services: dict[str, dict[str, object]], **top: object) -> Path:
        """Service -> what x-anvil says of it, and with ``word`` what its engine says first."""
        described = {}
        for name, given in services.items():
            about = {"gpus": ["0"], **given}
            word = str(about.pop("word", name))
            command = about.pop("command", [sys.executable, "engine.py", name, word, str(self.gate)])
            described[name] = {"command": command, "x-anvil": about}
        settings = {"runtime": "process", "project": PROJECT, **top}
        self.file.write_text(yaml.safe_dump({"x-anvil": settings, "services": described}))
        return self.file

    def open(self) -> None:
        self.gate.write_text("")


@pytest.fixture
def house(state: Path) -> House:
    return House(state)


class Stream:
    """The answer of one chat, as it comes."""

    def __init__(self, running: Running, model: str) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=TIMEOUT)
        asked = {"model": model, "stream": True, "messages": [{"role": "user", "content": "Hi"}]}
        self._connection.request(
            "POST", "/v1/chat/completions", json.dumps(asked), {"Content-Type": "application/json"}
        )
        self._response = self._connection.getresponse()

    def word(self) -> str:
        """The next one, "" at a clean end."""
        while line := self._response.readline():
            if line.startswith(b"data: [DONE]"):
                self.close()
                return ""
            if line.startswith(b"data: "):
                return str(json.loads(line[6:])["choices"][0]["delta"]["content"])
        raise AssertionError("the stream broke off")

    def close(self) -> None:
        self._response.close()
        self._connection.close()


class Kept:
    """A connection on which a chat is asked again and again; what comes is its status, or its words."""

    def __init__(self, running: Running, model: str, key: str = "none") -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=TIMEOUT)
        self._body = json.dumps({"model": model, "messages": []})
        self._head = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}

    def close(self) -> None:
        self._connection.close()

    def ask(self) -> int | str:
        self._connection.request("POST", "/v1/chat/completions", self._body, self._head)
        response = self._connection.getresponse()
        said = response.read().decode()
        return response.status if response.status != 200 else re.findall('"content": "(.*?)"', said)[0]


def first_word(running: Running, model: str) -> str:
    stream = Stream(running, model)
    try:
        return stream.word()
    finally:
        stream.close()


def reload(running: Running, *flags: str) -> int:
    return cli.main(["reload", "--url", f"http://127.0.0.1:{running.port}", *flags])


def states(running: Running) -> dict[str, str]:
    return {name: model["state"] for name, model in running.get("/healthz")["models"].items()}


def models(running: Running) -> list[str]:
    return [each["id"] for each in running.get("/v1/models")["data"]]


def reloads(running: Running) -> list[str]:
    text = running.request("GET", "/metrics")[2]
    return [line for line in text.splitlines() if line.startswith("anvil_reloads_total")]


def test_a_stream_spans_a_reload_and_everything_else_changes(house, state, capsys):
    before = {"stays": {}, "goes": {"gpus": ["1"]}, "changes": {"gpus": ["2"]}}
    with serving(house.write(before), "--port", "0", state=state) as running:
        streams = {name: Stream(running, name) for name in before}
        assert [stream.word() for stream in streams.values()] == list(before)
        house.write(
            {
                "stays": {"aliases": ["alias"], "priority": 3},
                "changes": {"gpus": ["2"], "word": "changed"},
                "comes": {"gpus": ["3"]},
            }
        )
        assert reload(running) == 0
        told = "changed changes; removed goes; added comes; set stays.aliases, stays.priority"
        assert told in capsys.readouterr().out
        leave = {"changes": "draining", "goes": "draining"}
        assert states(running) == {"stays": "ready", "comes": "stopped", **leave}
        assert set(models(running)) == {"stays", "changes", "comes"}
        assert running.chat("goes")[0] == 404
        assert first_word(running, "comes") == "comes"
        house.open()
        assert [stream.word() for stream in streams.values()] == ["end"] * 3
        assert [stream.word() for stream in streams.values()] == [""] * 3
        after = {"stays": "ready", "changes": "stopped", "comes": "ready"}
        assert seen(lambda: states(running), lambda found: found == after) == after
        assert first_word(running, "changes") == "changed"
        assert first_word(running, "alias") == "stays"
        assert sum("configuration reloaded" in line for line in running.output) == 1
        about = running.get("/healthz")["reload"]
        assert (about["count"], about["changed"], about["problems"]) == (1, told, [])
        assert reloads(running) == [
            'anvil_reloads_total{result="ok"} 1.0',
            'anvil_reloads_total{result="failed"} 0.0',
        ]


def test_a_bad_configuration_changes_nothing_and_every_problem_is_asked_also_where_sighup_is_the_reload(
    house, state, capsys
):
    with serving(house.write({"a": {}}), state=state) as running:
        stream = Stream(running, "a")
        assert stream.word() == "a"
        house.write({"b": {"colour": "blue"}}, drain_timeout="soon")
        assert reload(running) == 78
        said = capsys.readouterr().err
        assert "drain_timeout" in said
        assert "unknown key; known: model" in said or "colour" in said
        assert reload(running, "--json") == 78
        assert len(json.loads(capsys.readouterr().out)["problems"]) == 2
        assert models(running) == ["a"]
        about = running.get("/healthz")["reload"]
        assert about["count"] == 0
        assert about["failed_at"] > 0
        assert len(about["problems"]) == 2
        assert 'anvil_reloads_total{result="failed"} 2.0' in reloads(running)
        running.tells("configuration refused, nothing has changed: .*and 1 more")
        house.open()
        assert [stream.word(), stream.word()] == ["end", ""]
        house.write({"a": {}}, drain_timeout="3")
        assert reload(running) == 0
        assert running.get("/healthz")["reload"]["problems"] == []
        house.write({"a": {}, "b": {}}, max_queue=5, drain_timeout="3")
        running.process.send_signal(signal.SIGHUP)
        running.tells("configuration reloaded: added b; set max_queue")
        house.file.write_text("services: [")
        running.process.send_signal(signal.SIGHUP)
        running.tells("anvil-mux: .*compose.yaml.*is not YAML")
        assert models(running) == ["a", "b"]


class Recorded:
    """A part of the program that notes which of its methods are called."""

    def __init__(self, name, calls, **known):
        self.__dict__ |= {"_name": name, "_calls": calls, **known}

    def __getattr__(self, method):
        return lambda *about, **more: self._calls.append(f"{self._name}.{method}")


@pytest.mark.parametrize("is_lost", [False, True])
def test_requests_mean_another_configuration_once_its_models_are_there(monkeypatch, is_lost):
    before, after = Config((Backend("a", "a"),)), Config((Backend("a", "a"), Backend("b", "b")))
    calls: list[str] = []

    def fit(added):
        calls.append(f"running {[each.name for each in added]}")
        if is_lost:
            raise AgentSilent("no answer")
        return {}

    def take(*about):
        calls.append("scheduler.reconfigure")
        return ["b"]

    names = ("handler", "metrics", "external", "server", "event_log")
    parts = object.__new__(Parts)
    vars(parts).update(
        **{name: Recorded(name, calls) for name in names},
        config=before,
        options=SimpleNamespace(insecure=False),
        clock=SimpleNamespace(wall=lambda moment: 0.0),
        adoption=SimpleNamespace(
            is_over=threading.Event(),
            running=list,
            fit=fit,
            stop_all=lambda pairs: calls.append(f"stop {[each.name for each, _ in pairs]}"),
        ),
        hosts=Recorded("hosts", calls, local=None),
        watches=SimpleNamespace(is_here=lambda name: True, missing=dict, busy=nullcontext),
        mux=SimpleNamespace(
            facts=Recorded("scheduler", calls, reconfigure=take),
            overview=SimpleNamespace(leaving=list),
        ),
        say=calls.append,
        look_at_rights=lambda: None,
    )
    parts.server.bodies = SimpleNamespace()
    parts.adoption.is_over.set()
    monkeypatch.setattr(building, "complete", lambda config, host, in_cluster: config)
    monkeypatch.setattr(building, "checked", lambda config, insecure: (None, None))
    if is_lost:
        with pytest.raises(AgentSilent):
            parts.reconfigure(after)
        assert calls == ["hosts.take", "running ['b']", "hosts.take"]
        assert parts.config is before
        return
    parts.reconfigure(after)
    assert calls == [
        "hosts.take",
        "running ['b']",
        "metrics.know",
        "event_log.head",
        "scheduler.reconfigure",
        "handler.reconfigure",
        "external.take",
        "stop ['b']",
        "scheduler.looked_at",
    ]
    assert parts.config == after


def test_a_mistake_in_a_reload_does_not_end_what_runs(monkeypatch, caplog):
    def mistake() -> Change:
        raise ZeroDivisionError

    reloads = Reloads(idle, lambda config: Change(), pytest.fail)
    monkeypatch.setattr(reloads, "reload", mistake)
    program = object.__new__(AnvilMux)
    program.parts = cast(Parts, SimpleNamespace(reloads=reloads))
    program.reload()
    assert "the reload failed" in caplog.text


def test_a_key_that_was_taken_away_opens_no_connection_that_was_open(house, state):
    keys = state / "keys"
    keys.write_text("root-secret-key\nother-secret-key\nalice-secret-key models=a state\n")
    house.open()
    with serving(house.write({"a": {}}, key_file="keys"), state=state) as running:
        kept = Kept(running, "a", "other-secret-key")
        assert [kept.ask(), kept.ask()] == ["a", "a"]
        keys.write_text("root-secret-key\n")
        root, alice = ({"Authorization": f"Bearer {name}-secret-key"} for name in ("root", "alice"))
        assert running.request("POST", "/reload", headers=alice)[0] == 403
        assert running.request("POST", "/reload", headers={"Origin": "http://evil.example"})[0] == 403
        assert running.request("POST", "/reload", headers=root)[0] == 200
        assert [kept.ask(), kept.ask()] == [401, 401]
        running.tells("configuration reloaded: set key_file")
        keys.write_text("short\n")
        assert running.request("POST", "/reload", headers=root)[0] == 422
        assert running.request("GET", "/healthz", headers=root)[0] == 200
        kept.close()


def test_a_connection_that_was_open_names_the_models_of_the_new_configuration(house, state, capsys):
    house.open()
    services: dict[str, dict[str, object]] = {"a": {"aliases": ["chat"]}, "b": {}}
    with serving(house.write(services), state=state) as running:
        kept = Kept(running, "chat")
        assert [kept.ask(), kept.ask()] == ["a", "a"]
        house.write({"a": {}, "b": {"aliases": ["chat"]}})
        assert reload(running) == 0
        assert [kept.ask(), kept.ask()] == ["b", "b"]
        house.write({"a": {}, "b": {}}, hooks=[{"run": ["true"]}], routing={"mode": "full"})
        capsys.readouterr()
        assert reload(running, "--json") == 0
        told = json.loads(capsys.readouterr().out)
        assert (told["kept"], told["settings"]) == (["a", "b"], ["b.aliases"])
        assert told["later"] == ["routing", "hooks"]
        assert kept.ask() == 404
        kept.close()


def test_an_added_engine_that_runs_already_is_taken_over(house, state):
    service = {"gpus": ["1"]}
    with serving(house.write({"a": {}}), state=state) as running:
        house.write({"a": {}, "b": service})
        from anvil_mux.plugins import load

        config = load([house.file])
        runtime = ProcessRuntime(config, environ={**os.environ, "XDG_STATE_HOME": str(state)})
        try:
            runtime.start(config.backends[1])
            assert reload(running) == 0
            running.tells("b: was running already")
            assert states(running) == {"a": "stopped", "b": "ready"}
        finally:
            runtime.close()


def test_what_comes_back_otherwise_while_it_still_leaves_has_its_drain(house, state):
    with serving(house.write({"a": {}, "b": {"gpus": ["1"]}}), state=state) as running:
        stream = Stream(running, "a")
        assert stream.word() == "a"
        house.write({"b": {"gpus": ["1"]}})
        assert reload(running) == 0
        house.write({"a": {"word": "other"}, "b": {"gpus": ["1"]}})
        assert reload(running) == 0
        assert states(running) == {"a": "draining", "b": "stopped"}
        house.open()
        assert [stream.word(), stream.word()] == ["end", ""]
        assert first_word(running, "a") == "other"
        assert not any("stopping a" in line for line in running.output)


def test_what_leaves_when_the_program_ends_is_not_kept_for_the_next_start(house, state):
    listens, may_end = state / "listens", state / "may end"
    os.mkfifo(may_end)
    lingers = f"""
        import signal, sys

        signal.signal(signal.SIGTERM, lambda *_: sys.exit(open({str(may_end)!r}).read()))
        open({str(listens)!r}, "w").close()
        signal.pause()
    """
    never_ready = [sys.executable, "-c", textwrap.dedent(lingers)]
    before = {"slow": {"command": never_ready}, "b": {"gpus": ["1"]}}
    with serving(house.write(before), state=state, on_exit="keep") as running:
        house.open()
        assert first_word(running, "b") == "b"
        load = threading.Thread(target=running.request, args=("POST", "/models/load", {"model": "slow"}))
        load.start()
        running.tells("slow: loading")
        assert seen(listens.exists, bool)
        house.write({"slow": {}, "b": {"gpus": ["1"]}})
        assert reload(running) == 0
        running.process.send_signal(signal.SIGTERM)
        running.tells("stopping slow: the configuration has changed")
        may_end.write_text("")
        running.tells(r"kept running for the next start \(on_exit: keep\): b$")
        load.join(TIMEOUT)


def test_what_is_being_evicted_when_the_program_ends_is_not_kept_for_the_next_start(house, state):
    is_asked, may_end = state / "is asked", state / "may end"
    os.mkfifo(may_end)
    lingers = f"""
        import runpy, signal, sys

        def linger(*_):
            open({str(is_asked)!r}, "w").close()
            open({str(may_end)!r}).read()
            sys.exit()

        signal.signal(signal.SIGTERM, linger)
        sys.argv = ["engine.py", "a", "a", {str(house.gate)!r}]
        runpy.run_path("engine.py")
    """
    command = [sys.executable, "-c", textwrap.dedent(lingers)]
    services = {"a": {"command": command, "stop_timeout": 60}, "b": {"gpus": ["1"]}}
    house.open()
    with serving(house.write(services), state=state, on_exit="keep") as running:
        assert [first_word(running, name) for name in "ab"] == ["a", "b"]
        running.request("POST", "/models/unload", {"model": "a"})
        assert seen(is_asked.exists, bool)
        running.process.send_signal(signal.SIGTERM)
        assert seen(lambda: refuses(running), bool)
        may_end.write_text("")
        running.tells(r"kept running for the next start \(on_exit: keep\): b$")


def refuses(running: Running) -> bool:
    """Whether nobody listens any more."""
    try:
        running.request("GET", "/livez")
    except OSError:
        return True
    return False


def test_an_engine_that_runs_what_the_file_no_more_says_is_replaced_by_the_next_start(house, state):
    """Also one that was to be replaced when the program was killed."""
    file = house.write({"a": {}, "b": {"gpus": ["1"]}, "c": {"gpus": ["2"]}})
    killed = serve(file, "--on-exit", "stop", state=state)
    streams = [Stream(killed, name) for name in "abc"]
    assert [stream.word() for stream in streams] == ["a", "b", "c"]
    house.write({"a": {"word": "other"}, "b": {"gpus": ["1"]}, "c": {"gpus": ["2"]}})
    assert reload(killed) == 0
    assert states(killed) == {"a": "draining", "b": "ready", "c": "ready"}
    killed.stop(signal.SIGKILL)
    for stream in streams:
        stream.close()
    house.open()
    changed = "its command changed since it was started"
    with serving(file, state=state, on_exit="keep") as running:
        running.tells(f"stopping a: {changed}; the next request for a loads it anew")
        assert states(running) == {"a": "stopped", "b": "ready", "c": "ready"}
        assert first_word(running, "a") == "other"
    house.write(
        {"a": {"word": "other"}, "b": {"gpus": ["1"], "ttl": 900}, "c": {"gpus": ["2"], "word": "new"}}
    )
    with serving(file, state=state) as running:
        for name in "ab":
            running.tells(f"{name}: was running already")
        running.tells(f"stopping c: {changed}")
        assert states(running) == {"a": "ready", "b": "ready", "c": "stopped"}
        assert first_word(running, "c") == "new"


def test_files_that_are_watched_are_a_reload_and_the_event_log_begins_anew_with_it(house, state):
    log, file = state / "events", house.write({"a": {}, "b": {}})
    house.open()
    with serving(file, "--watch", "--event-log", str(log), state=state) as running:
        assert first_word(running, "a") == "a"
        house.write({"b": {}, "c": {}})
        running.tells("configuration reloaded: removed a; added c")
        seen(lambda: states(running), lambda found: "a" not in found)
        assert first_word(running, "c") == "c"
        (state / ".env").write_text("WORD=there\n")
        running.tells("configuration reloaded: nothing has changed")
    first, second, *_ = read(log)
    assert [each["name"] for each in second.header["backends"]] == ["b", "c"]
    assert "ready" in [event.kind for event in second.events if event.backend == "c"]
    assert second.header["began"] == first.header["began"]
    assert {name: each["state"] for name, each in second.begins["backends"].items()} == {}
    for run in (first, second):
        assert check(run.events, config_of(run.header), 5.0, run.begins) == []


def test_what_is_said_to_a_terminal_that_was_just_closed_is_lost_and_no_error(monkeypatch):
    near, far = os.openpty()
    os.close(near)
    monkeypatch.setattr(invocation, "STDERR", far)
    monkeypatch.setattr(sys, "stderr", invocation.StandardError())
    invocation.say("one engine less")
    os.close(far)


def test_a_terminal_that_is_closed_ends_the_program(house, state):
    house.write({"a": {}})
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ["XDG_STATE_HOME"] = str(state)
        os.environ["PYTHONPATH"] = str(ROOT)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # else tests under nohup start programs that ignore it
        os.execv(sys.executable, [sys.executable, "-m", "anvil_mux", "serve", str(house.file), "--port", "0"])
    printed = b""
    while b"curl" not in printed:  # the last line that it prints
        printed += os.read(terminal, 65536)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_an_image_that_docker_does_not_have_is_a_problem_of_those_that_are_to_come(monkeypatch):
    docker_away = False

    def image_id(engine: ContainerEngine, name: str) -> str:
        if docker_away:
            raise Unreachable("Docker cannot be reached")
        return "id" if name == "here:1" else ""

    monkeypatch.setattr(ContainerEngine, "image_id", image_id)
    there, gone = (Backend(name, name, service=Service(image=f"{name}:1")) for name in ("here", "gone"))
    both = Config((there, gone))
    local._refuse_missing_images(both, ["here"])
    with pytest.raises(ConfigError, match="service gone: image gone:1 is not present: docker pull gone:1"):
        local._refuse_missing_images(both, ["here", "gone"])
    docker_away = True
    local._refuse_missing_images(both, ["gone"])
    local._refuse_missing_images(replace(both, runtime="process"), ["gone"])


# In the program's own words


def idle() -> Config:
    return Config((Backend("a", "a"),))


def test_reloads_are_one_after_the_other():
    entered, gate, order = threading.Semaphore(0), threading.Semaphore(0), []

    def take(config: Config) -> Change:
        order.append("begins")
        entered.release()
        assert gate.acquire(timeout=TIMEOUT)
        order.append("ends")
        return Change()

    both = Reloads(idle, take, order.append)
    threads = [threading.Thread(target=both.reload) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert entered.acquire(timeout=TIMEOUT)
    gate.release()
    assert entered.acquire(timeout=TIMEOUT)
    gate.release()
    for thread in threads:
        thread.join(TIMEOUT)
    assert order == ["begins", "ends", "begins", "ends"]
    assert both.as_json()["count"] == 2


def test_a_program_that_ends_reloads_no_more():
    reloads = Reloads(idle, lambda config: Change(), pytest.fail)
    reloads.close()
    with pytest.raises(Draining):
        reloads.reload()


def test_somebody_is_asked_while_a_reload_is_under_way_however_it_ends(monkeypatch):
    monkeypatch.setattr("anvil_mux.proxy.operations.time", SimpleNamespace(time=lambda: 7.0))
    told: list[str] = []

    @contextmanager
    def around() -> Iterator[None]:
        told.append("begins")
        try:
            yield
        finally:
            told.append("ended")

    def fail(config: Config) -> Change:
        raise ConfigError(["one", "two"])

    reloads = Reloads(idle, fail, told.append, around)
    with pytest.raises(ConfigError):
        reloads.reload()
    assert told == ["begins", "one (and 1 more)", "ended"]
    assert reloads.as_json()["problems"] == ["one", "two"]
    assert reloads.as_json()["failed_at"] == 7.0
