"""A real Prometheus scrapes a running anvil-mux and is asked the questions of docs/metrics.md.

Opt-in: ``bin/test prometheus``, with Debian's package ``prometheus`` installed.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from urllib.request import urlopen

import pytest
import yaml

from tests.cli.test_cli import compose
from tests.running import Running, serving
from tests.telemetry.test_grafana import ASKED, FOLDER
from tests.telemetry.test_metrics_docs import QUERIES

GUARD = 120.0
PROGRAM = shutil.which("prometheus")
SERVING, FREQUENCY, WAIT, FAILURES, PHASES = QUERIES

pytestmark = [
    pytest.mark.prometheus,
    pytest.mark.skipif(PROGRAM is None, reason="there is no program `prometheus`"),
]

Samples = dict[str, float]
"""The value of a query's one label, "" without any -> the sample."""


class Prometheus:
    """A Prometheus that scrapes one anvil-mux every second."""

    def __init__(self, folder: Path, target: int) -> None:
        assert PROGRAM
        job = {"job_name": "anvil-mux", "static_configs": [{"targets": [f"127.0.0.1:{target}"]}]}
        config = {"global": {"scrape_interval": "1s"}, "scrape_configs": [job]}
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        self._process = subprocess.Popen(
            [
                PROGRAM,
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                "--web.listen-address=127.0.0.1:0",
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._lines: list[str] = []
        self._address = ""
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        assert self._ready.wait(GUARD)
        assert self._address, "".join(self._lines)

    def _read(self) -> None:
        assert self._process.stderr
        with self._process.stderr as lines:
            for line in lines:
                self._lines.append(line)
                found = re.search(r'"Listening on" address=(\S+)', line)
                if found:
                    self._address = found[1]
                if "ready to receive web requests" in line:
                    self._ready.set()
        self._ready.set()

    def ask(self, query: str) -> Samples:
        url = f"http://{self._address}/api/v1/query?{urlencode({'query': query})}"
        with urlopen(url, timeout=GUARD) as answer:
            found: Any = json.load(answer)
        assert found["status"] == "success", found
        return {"".join(each["metric"].values()): float(each["value"][1]) for each in found["data"]["result"]}

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(GUARD)
        self._reader.join(GUARD)


@pytest.fixture(scope="module")
def mux(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Two models that take turns, and one that never starts."""
    folder = tmp_path_factory.mktemp("mux")
    file = compose(folder, "a", "b", "broken")
    content = yaml.safe_load(file.read_text())
    content["services"]["broken"]["command"] = ["false"]
    file.write_text(yaml.safe_dump(content))
    with serving(file, "--policy", "eager", state=folder) as running:
        yield running


@pytest.fixture(scope="module")
def prometheus(mux: Running, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    made = Prometheus(tmp_path_factory.mktemp("prometheus"), mux.port)
    yield made
    made.close()


def eventually(holds: Callable[[], bool]) -> None:
    """For what tells nobody when it has come true."""
    pause, give_up = threading.Event(), time.monotonic() + GUARD
    while not holds():
        assert time.monotonic() < give_up, "it never came true"
        pause.wait(0.2)


def test_the_five_questions_are_answered(mux: Running, prometheus: Prometheus) -> None:
    eventually(lambda: prometheus.ask('anvil_model_loads_total{model="broken", result="failed"}') != {})
    assert mux.chat("broken")[0] == 503

    def answered() -> bool:
        assert mux.chat("a")[0] == mux.chat("b")[0] == 200
        answers = [prometheus.ask(query).get("", math.nan) for query in (FREQUENCY, WAIT, FAILURES)]
        phases = prometheus.ask(PHASES).keys()  # each needs two samples
        return all(value > 0 for value in answers) and phases == {"drain", "evict", "verify", "load", "ready"}

    eventually(answered)
    assert 0 < prometheus.ask(SERVING)[""] < 1


def test_the_queries_of_the_dashboard_and_the_alerts_are_understood(prometheus: Prometheus) -> None:
    values = {"$__rate_interval": "1m", "$__range": "5m", "$instance": ".*", "$model": ".*"}
    for query in ASKED:
        for name, value in values.items():
            query = query.replace(name, value)
        prometheus.ask(query)
    rules = str(FOLDER / "alerts.yml")
    done = subprocess.run(["promtool", "check", "rules", rules], text=True, capture_output=True)
    assert done.returncode == 0, done.stderr


def test_no_series_is_refused(mux: Running, prometheus: Prometheus) -> None:
    eventually(lambda: prometheus.ask("up == 1") != {})
    scraped = sum(prometheus.ask("scrape_samples_scraped").values())
    assert scraped == sum(prometheus.ask("scrape_samples_post_metric_relabeling").values()) > 0
    text = mux.request("GET", "/metrics")[2]
    done = subprocess.run(["promtool", "check", "metrics"], input=text, text=True, capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
