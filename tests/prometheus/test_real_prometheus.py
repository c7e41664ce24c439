"""A real Prometheus scrapes a running anvil-mux and is asked the questions of docs/metrics.md.

Opt-in: ``bin/test prometheus``, with Debian's package ``prometheus`` installed.
"""

import math
import subprocess
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import yaml

from tests.cli.demo import compose
from tests.prometheus.server import GUARD, PROGRAM, Prometheus
from tests.running import Running, serving
from tests.telemetry.test_grafana import ASKED, FOLDER
from tests.telemetry.test_metrics_docs import QUERIES

SERVING, FREQUENCY, WAIT, FAILURES, PHASES = QUERIES

pytestmark = [
    pytest.mark.prometheus,
    pytest.mark.skipif(PROGRAM is None, reason="there is no program `prometheus`"),
]


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


def test_the_five_questions_are_answered(mux, prometheus):
    eventually(lambda: prometheus.ask('anvil_model_loads_total{model="broken", result="failed"}') != {})
    assert mux.chat("broken")[0] == 503

    def answered() -> bool:
        assert mux.chat("a")[0] == mux.chat("b")[0] == 200
        answers = [prometheus.ask(query).get("", math.nan) for query in (FREQUENCY, WAIT, FAILURES)]
        phases = prometheus.ask(PHASES).keys()  # each needs two samples
        return all(value > 0 for value in answers) and phases == {"drain", "evict", "verify", "load", "ready"}

    eventually(answered)
    assert 0 < prometheus.ask(SERVING)[""] < 1


def test_the_queries_of_the_dashboard_and_the_alerts_are_understood(prometheus):
    values = {"$__rate_interval": "1m", "$__range": "5m", "$instance": ".*", "$model": ".*"}
    for query in ASKED:
        for name, value in values.items():
            query = query.replace(name, value)
        prometheus.ask(query)
    rules = str(FOLDER / "alerts.yml")
    done = subprocess.run(["promtool", "check", "rules", rules], text=True, capture_output=True)
    assert done.returncode == 0, done.stderr


def test_no_series_is_refused(mux, prometheus):
    eventually(lambda: prometheus.ask("up == 1") != {})
    scraped = sum(prometheus.ask("scrape_samples_scraped").values())
    assert scraped == sum(prometheus.ask("scrape_samples_post_metric_relabeling").values()) > 0
    text = mux.request("GET", "/metrics")[2]
    done = subprocess.run(["promtool", "check", "metrics"], input=text, text=True, capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
