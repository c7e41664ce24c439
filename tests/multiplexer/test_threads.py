"""Real threads, real time; gates instead of sleeps."""

import threading
from types import SimpleNamespace

import pytest

from anvil_mux.config.config import Config
from anvil_mux.errors import (
    UnknownModel,
)
from anvil_mux.lab.checker import check
from anvil_mux.multiplexer.multiplexer import Multiplexer
from tests.multiplexer.stage import A, B, GatedEngines


@pytest.fixture
def real():
    engines, log, queued = GatedEngines(), [], threading.Semaphore(0)
    config = Config(policy="eager", backends=(A, B), drain_timeout=30.0)

    def take(event):
        log.append(event)
        if event.kind == "queued":
            queued.release()

    mux = Multiplexer(config, engines, log=take)
    mux.start()
    yield SimpleNamespace(mux=mux, engines=engines, queued=queued)
    mux.refuse()
    mux.close()
    assert check(log, config, slack=30.0) == []


def in_threads(number, run):
    threads = [threading.Thread(target=run, daemon=True) for _ in range(number)]
    for thread in threads:
        thread.start()
    return threads


def join(threads):
    for thread in threads:
        thread.join(30.0)
        assert not thread.is_alive()


def test_five_hundred_waiting_requests_are_admitted_by_one_load(real):
    addresses = []

    def ask():
        with real.mux.lease("a") as lease:
            addresses.append(lease.address)

    threads = in_threads(500, ask)
    assert real.engines.loading["a"].wait(30.0)
    real.engines.may_load["a"].set()
    join(threads)
    assert addresses == [("127.0.0.1", 9000)] * 500
    assert real.engines.calls == ["load a"]
    assert real.mux.overview.status().leases == 0


def test_nothing_but_the_load_itself_waits_for_a_load(real):
    threads = in_threads(1, lambda: real.mux.lease("a").__exit__())
    assert real.engines.loading["a"].wait(30.0)
    with pytest.raises(UnknownModel):
        real.mux.resolve("c")
    assert real.mux.overview.status().models[0].state == "loading"
    assert not real.mux.facts.unload("b")
    real.engines.may_load["a"].set()
    join(threads)


def test_many_clients_hammer_two_models_and_every_lease_is_given_back(real):
    real.engines.may_load["a"].set()
    real.engines.may_load["b"].set()
    turn = iter(range(10_000))
    done = []

    def ask():
        for _ in range(25):
            with real.mux.lease("ab"[next(turn) % 2]) as lease:
                assert not lease.severed
                done.append(lease.backend.name)

    join(in_threads(16, ask))
    assert len(done) == 400
    assert (real.mux.overview.status().waiting, real.mux.overview.status().leases) == (0, 0)
