"""An anvil-mux beside the head of a real cluster with two hosts, and clients that read streams from it."""

from __future__ import annotations

import http.client
import itertools
import json
import socket
import subprocess
import sys
import threading
import time
from contextlib import closing

import yaml

from tests.cluster.rig import ROOT, wait_for
from tests.running import Running, seen

PORT = 9292
TOKENS_PER_SECOND = 20
JSON = {"Content-Type": "application/json"}


def service(model, hosts, gpu):
    flags = ["--load-seconds", "0.3", "--tokens-per-second", str(TOKENS_PER_SECOND)]
    command = [str(ROOT / "bin" / "demo-engine"), "--host", "$$HOST", *flags, "--model", model]
    return {"command": command, "x-anvil": {"hosts": hosts, "gpus": [gpu]}}


GPUS = {"0": {"vram": "8GiB"}, "1": {"vram": "8GiB"}}
FILE = {
    "name": "faults",
    "x-anvil": {
        "runtime": "process",
        "listen": f"127.0.0.1:{PORT}",
        "policy": "eager",
        "machines": {"gpu-a": {"gpus": GPUS}, "gpu-b": {"gpus": GPUS}},
    },
    "services": {
        "a": service("a", ["gpu-a"], "0"),
        "a2": service("a2", ["gpu-a"], "0"),
        "b": service("b", ["gpu-b"], "0"),
        "roam": service("roam", ["gpu-a", "gpu-b"], "1"),
    },
}
"""Models on one host each, one of which makes room for the other, and one that may be on either."""


NUMBERS = itertools.count(1)


def question(model, tokens, prompt="go", *, stream=False):
    return {
        "model": model,
        "stream": stream,
        "max_tokens": tokens,
        "messages": [{"role": "user", "content": prompt}],
    }


class Stream:
    """One streamed answer, read in a thread of its own."""

    def __init__(self, site, model, tokens=60):
        self.model = model
        prompt = f"question-{next(NUMBERS)}"
        words = ["This ", "is ", f"{model}. ", "You ", "said: ", prompt]
        self.wanted = [*words, *(f" {number}" for number in range(1, tokens))][:tokens]
        """The tokens of the whole answer, which no other question has."""
        self.tokens = []
        self.error = ""
        """What the stream, or the answer in its place, says went wrong; "" if nothing does."""
        self.status = 0
        self.is_whole = False
        """Whether it ended as a whole answer does."""
        self.since, self.until = time.monotonic(), 0.0
        self._begun = threading.Event()
        self._asked = json.dumps(question(model, tokens, prompt, stream=True))
        self._thread = threading.Thread(target=self._read, args=(site,), daemon=True)
        self._thread.start()

    def begun(self):
        """Return once a token has come, or it is known that none will."""
        self._begun.wait(60)
        return self

    def ended(self):
        """Return once it has ended, one way or the other."""
        self._thread.join(120)
        assert not self._thread.is_alive(), "the answer did not end"
        return self

    def _read(self, site):
        try:
            with closing(site.connect()) as connection:
                connection.request("POST", "/v1/chat/completions", self._asked, JSON)
                answer = connection.getresponse()
                self.status = answer.status
                if answer.status != 200:
                    self.error = answer.read().decode()
                    return
                for line in answer:
                    self._take(line)
        except (OSError, http.client.HTTPException) as error:
            self.error = self.error or f"connection: {error!r}"
        finally:
            self.until = time.monotonic()
            self._begun.set()

    def _take(self, line):
        if line.startswith(b"data: [DONE]"):
            self.is_whole = not self.error
        elif line.startswith(b"data: "):
            told = json.loads(line[6:])
            if "error" in told:
                self.error = json.dumps(told)
            elif told["choices"] and (text := told["choices"][0]["delta"].get("content")):
                self.tokens.append(text)
                self._begun.set()


class Site:
    """A cluster of a head and two hosts, and an anvil-mux beside the head."""

    def __init__(self, cluster, folder, content=FILE):
        self.cluster = cluster
        self.head, self.a, self.b = cluster.hosts.values()
        self.file = folder / "compose.yaml"
        self.file.write_text(yaml.safe_dump(content))
        self.mux = None

    def connect(self, port=PORT):
        made = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        made.sock = self.cluster.inside(lambda: socket.create_connection(("127.0.0.1", port), 60))
        return made

    def ask(self, method, path, body=None, port=PORT, headers=JSON):
        with closing(self.connect(port)) as connection:
            connection.request(method, path, body and json.dumps(body), headers)
            answer = connection.getresponse()
            return answer.status, dict(answer.getheaders()), json.loads(answer.read())

    def complete(self, model, port=PORT):
        return self.ask("POST", "/v1/chat/completions", question(model, 2), port)

    def answers(self, model, port=PORT):
        """Whether a model answers, asked until it does, as patiently as a client would."""

        def ask():
            status = self.complete(model, port)[0]
            if status != 200:
                threading.Event().wait(0.2)
            return status

        return seen(ask, lambda status: status == 200) == 200

    def backends(self):
        models = self.ask("GET", "/healthz")[2]["models"]
        return {name: each for model in models.values() for name, each in model["backends"].items()}

    def ready_on(self, host):
        found = self.backends().items()
        return [name for name, each in found if each["state"] == "ready" and each.get("host") == host]

    def becomes(self, host, state):
        """Return once a host is in a state."""

        def look():
            hosts = self.ask("GET", "/hosts")[2]["hosts"]
            return next(each["state"] for each in hosts if each["host"] == host)

        wait_for(lambda: look() == state, f"{host} is {state}", self.head.folder / "ray.log")

    def serve(self, *words, state=None):
        argv = [sys.executable, "-m", "anvil_mux", "serve", str(self.file)]
        return self._spawn([*argv, "--cluster", self.cluster.address, *words], state)

    def _spawn(self, argv, state):
        environ = {**self.head.environ(), **({"XDG_STATE_HOME": str(state)} if state else {})}
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        return Running(self.head.popen(argv, env=environ, text=True, **pipes), argv)

    def begin(self, port=PORT, **options):
        """Start an anvil-mux, and return once it knows what runs."""
        mux = self.serve("--port", str(port), *options.pop("words", ()), **options)
        return self._started(mux, port)

    def begin_alone(self, port, *words, state):
        """Start an anvil-mux without a cluster, in the same network."""
        argv = [sys.executable, "-m", "anvil_mux", "serve", str(self.file), "--port", str(port), *words]
        return self._started(self._spawn(argv, state), port)

    def _started(self, mux, port):
        mux.wait_until_listening()
        assert not seen(
            lambda: self.ask("GET", "/healthz", port=port)[2]["adopting"], lambda names: not names
        )
        return mux

    def engines(self):
        """The processes of engines, by host."""
        return {host.name: set(host.pids("demo-engine")) for host in (self.a, self.b)}

    def end(self):
        """Stop anvil-mux, and have all hosts again as they were."""
        for host in self.cluster.hosts.values():
            if host.pids():
                host.thaw()
            else:
                host.start()
        self.cluster.wait()
        if self.mux and self.mux.process.poll() is None:
            self.mux.process.terminate()
            self.mux.process.wait(60)
