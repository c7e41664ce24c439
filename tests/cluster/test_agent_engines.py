"""The agent of a host whose engines are real processes."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from anvil_mux.cluster import agent as agent_module
from anvil_mux.cluster.agent import Agent, ServedProject, engine_variables
from anvil_mux.config.service import Service
from anvil_mux.errors import BackendError
from anvil_mux.host.seam import Awake, Evicted, Inventory, ServiceEnded, Unfit
from anvil_mux.state import is_served
from tests.cluster.test_agent import AGAIN, CONFIG, ENGINE, FIRST, GUARD, ROOT, Caller, M


@pytest.fixture
def real(tmp_path: Path) -> Iterator[Caller]:
    environ = {**os.environ, "XDG_STATE_HOME": str(tmp_path)}
    agent = Agent("b", "127.0.0.2", environ=environ, described=Inventory(address="127.0.0.2"))
    mux = Caller(agent, FIRST)
    mux("claim", "", False)
    mux("reconfigure", CONFIG)
    yield mux
    mux("begin", 99, "stop", (M,))
    mux.result(99)
    agent.close()


def read_until(mux: Caller, kind: type) -> Any:
    last = 0
    while True:
        for news in mux("news", last, GUARD):
            last = news.number
            if isinstance(news.what, kind):
                return news.what


def test_a_real_engine_is_loaded_dies_and_is_loaded_again(real: Caller, tmp_path: Path):
    loaded = real.step(1, "load", M, "stop", 5)
    assert loaded.url.startswith("http://127.0.0.2:")
    assert real("running") == ["m.b"]
    assert real("answers", M, GUARD) is True
    assert real("ended", M) is None
    agent = Agent("other", "127.0.0.2")
    assert Caller(agent, FIRST)("log_tail", M) == []
    os.kill(pid_of(tmp_path), signal.SIGKILL)
    ended = read_until(real, ServiceEnded)
    assert (ended.backend, ended.why, ended.load) == ("m.b", "was killed by SIGKILL", 5)
    assert real.step(2, "load", M, "stop", 6).level == "stop"
    assert real("log_tail", M)
    assert real.step(3, "evict", M, "stop") == Evicted("stop")
    assert real("running") == []


def pid_of(folder: Path) -> int:
    return int(json.loads((folder / "anvil-mux" / "p-b" / "m.b.json").read_text())["pid"])


def test_stop_all_leaves_engines_of_an_agent_until_it_is_released(real: Caller, tmp_path: Path):
    real.step(1, "load", M, "stop", 5)

    def stop_all() -> str:
        words = [sys.executable, "-m", "anvil_mux", "stop", "--all"]
        environ = {**os.environ, "XDG_STATE_HOME": str(tmp_path)}
        return subprocess.run(words, env=environ, stderr=subprocess.PIPE, text=True, check=True).stderr

    assert stop_all() == "anvil-mux: no engine was left running\n"
    assert real("running") == ["m.b"]
    real("reconfigure", CONFIG)  # a configuration of the same project changes nothing
    assert stop_all() == "anvil-mux: no engine was left running\n"
    real("release")
    assert stop_all() == "anvil-mux: p-b: stopped m.b\n"
    real("claim", "", False)
    real("reconfigure", CONFIG)
    assert real("running") == []


def test_a_release_that_a_full_disk_refuses_leaves_the_project(real: Caller, tmp_path: Path, monkeypatch):
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    folder = tmp_path / "anvil-mux" / "p-b"
    assert is_served(folder)
    monkeypatch.setattr(agent_module, "replace_text", fail)
    with pytest.raises(BackendError, match="owner cannot be written: No space left on device"):
        real("release")
    assert not is_served(folder)


def test_a_project_that_another_anvil_mux_serves_is_not_configured(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(agent_module, "LOCK_SECONDS", 0.0)
    environ = {**os.environ, "XDG_STATE_HOME": str(tmp_path)}
    agent = Agent("b", "127.0.0.2", environ=environ, described=Inventory(address="127.0.0.2"))
    mux = Caller(agent, FIRST)
    mux("claim", "", False)
    served = ServedProject(CONFIG.project, environ)
    with pytest.raises(BackendError, match="another anvil-mux on this machine serves or stops"):
        mux("reconfigure", CONFIG)
    served.close()
    mux("reconfigure", CONFIG)
    agent.close()


AGENT = """
import os, signal, sys
sys.path.insert(0, {root!r})
from tests.cluster.test_agent import CONFIG, FIRST, M, Agent, Caller
mux = Caller(Agent("b", "127.0.0.2"), FIRST)
mux("claim", "", False)
mux("reconfigure", CONFIG)
print(mux.step(1, "load", M, "stop", 1).url, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_an_engine_outlives_its_agent_and_is_adopted_by_the_next(tmp_path: Path):
    environ = {
        **os.environ,
        "XDG_STATE_HOME": str(tmp_path),
        "RAY_AUTH_TOKEN": "secret",
        "RAY_JOB_ID": "1",
        "OMP_NUM_THREADS": "1",
    }
    program = [sys.executable, "-c", AGENT.format(root=str(ROOT))]
    done = subprocess.run(program, env=environ, stdout=subprocess.PIPE, text=True, check=False)
    assert done.returncode == -signal.SIGKILL
    pid = pid_of(tmp_path)
    inherited = Path(f"/proc/{pid}/environ").read_bytes()
    assert b"RAY_" not in inherited
    assert b"OMP_NUM_THREADS" not in inherited
    agent = Agent("b", "127.0.0.2", environ=environ)
    mux = Caller(agent, AGAIN)
    mux("claim", "", False)
    mux("reconfigure", CONFIG)
    assert mux("running") == ["m.b"]
    assert mux.step(1, "adopt", M) == Awake(done.stdout.strip())
    os.kill(pid, signal.SIGKILL)
    assert read_until(mux, ServiceEnded).load == 0
    other = replace(M, service=Service(command=(*ENGINE, "--load-seconds", "0")))
    mux("reconfigure", replace(CONFIG, backends=(other,)))
    mux.step(2, "load", other, "stop", 1)
    mux("reconfigure", replace(CONFIG, backends=()))
    agent.close()
    later = Agent("b", "127.0.0.2", environ=environ)
    mux = Caller(later, AGAIN)
    mux("reconfigure", replace(CONFIG, backends=()))
    [orphan] = mux("orphans")
    mux.step(3, "stop", orphan)
    assert mux("orphans") == []
    later.close()


def test_an_engine_that_was_described_otherwise_meanwhile_is_unfit(real: Caller):
    real.step(1, "load", M, "stop", 1)
    other = replace(M, service=Service(command=(*ENGINE, "--tokens-per-second", "9")))
    real.owner = AGAIN
    real("claim", "", False)
    real("reconfigure", replace(CONFIG, backends=(other,)))
    real("running")
    assert real.step(1, "adopt", other) == Unfit("its command changed since it was started")


def test_engines_have_what_was_there_before_ray():
    own = {"PATH": "/bin", "OMP_NUM_THREADS": "4", "CUDA_VISIBLE_DEVICES": "0"}
    assert engine_variables({**own, "RAY_JOB_ID": "1", "RAY_AUTH_TOKEN": "x", "SPT_NOENV": "1"}) == own
    rays = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONBREAKPOINT": "ray.util.rpdb.set_trace"}
    assert engine_variables({"PATH": "/bin", **rays, "RAY_JOB_ID": "1"}) == {"PATH": "/bin"}
    assert engine_variables(rays) == rays
