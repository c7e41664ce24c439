"""The services of contrib/ for one machine under a real systemd, the first process of a container.

The container has this machine's /usr, and engines are local processes of the service. NVML and the CUDA
driver are stand-ins; the driver's attaches to the engine, which the kernel, and the service's filter of
system calls, may refuse.
"""

import os
import re
import secrets
import subprocess
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from pathlib import Path

import pytest
import yaml

from tests.docker.conftest import Engine
from tests.docker.test_deployments import CAPABILITIES, GIB, PYTHON, ROOT, lost_here
from tests.fake_cuda import COMPILER, FakeCuda, build_library
from tests.host.test_gpu_swap import PYNVML
from tests.running import seen
from tests.serve.test_reload import ENGINE

SYSTEMD = "/usr/lib/systemd/systemd"
BOOT = """\
mount --make-rprivate / && umount --recursive /sys/fs/cgroup
mount -t cgroup2 cgroup2 /sys/fs/cgroup || exit 1
tr -d - < /proc/sys/kernel/random/uuid > /etc/machine-id
echo docker:x:990: >> /etc/group
exec /usr/lib/systemd/systemd --unit=multi-user.target
"""
NO_DOCKER = "[Service]\nType=oneshot\nRemainAfterExit=yes\nExecStart=/bin/true\n"
STAND_INS = "PYTHONPATH=/cuda LD_LIBRARY_PATH=/cuda FAKE_CUDA=/cuda NVIDIA_VISIBLE_DEVICES=all"
WITH_STAND_INS = f"[Service]\nReadWritePaths=/cuda\nEnvironment={STAND_INS}\n"
URL = "http://127.0.0.1:9292"

pytestmark = [
    pytest.mark.skipif(not os.path.exists(SYSTEMD), reason="systemd is not installed"),
    pytest.mark.skipif(COMPILER is None, reason="the stand-in for the CUDA driver needs a C compiler"),
]


class Machine:
    """A container whose first process is systemd; ``etc`` and ``cuda`` are folders of its own here."""

    def __init__(self, engine: Engine, folder: Path) -> None:
        self.name = f"anvil-test-systemd-{secrets.token_hex(4)}"
        self._env = engine.env
        self.etc, self.dropins, cuda = folder / "etc", folder / "dropins", folder / "cuda"
        for each in (self.etc, self.dropins, cuda, folder / "bin"):
            each.mkdir()
        build_library(cuda, enforced=True).rename(cuda / "libcuda.so.1")
        (cuda / "pynvml.py").write_text(PYNVML)
        cuda.chmod(0o777)
        self.cuda = FakeCuda(cuda)
        program = folder / "bin" / "anvil-mux"
        program.write_text('#!/bin/sh\ncd /src && exec /venv/bin/python -m anvil_mux "$@"\n')
        program.chmod(0o755)
        (folder / "docker.service").write_text(NO_DOCKER)
        (self.dropins / "stand-ins.conf").write_text(WITH_STAND_INS)
        mounts = {each: each for each in ("/usr", "/lib", "/lib64", "/bin", "/sbin")}
        mounts |= {
            str(ROOT): "/src",
            str(Path(PYTHON).parents[1]): "/venv",
            str(folder / "bin"): "/opt/anvil-mux/bin",
        }
        units = {ROOT / "contrib" / "anvil-mux.service": "anvil-mux", folder / "docker.service": "docker"}
        mounts |= {str(file): f"/etc/systemd/system/{name}.service" for file, name in units.items()}
        mounts |= {
            str(self.dropins): "/etc/systemd/system/anvil-mux.service.d",
            str(self.etc): "/etc/anvil-mux",
        }
        capabilities = [each for each in CAPABILITIES.split() if each not in lost_here()]
        self._docker(
            *("run", "--detach", "--name", self.name, "--cgroupns", "private", "--network", "none"),
            *("--security-opt", "seccomp=unconfined", "--security-opt", "systempaths=unconfined"),
            *("--security-opt", "apparmor=unconfined", "--env", "container=docker"),
            *("--tmpfs", "/run", "--tmpfs", "/tmp:exec", "--volume", f"{cuda}:/cuda"),
            *(word for each in capabilities for word in ("--cap-add", each)),
            *(word for here, there in mounts.items() for word in ("--volume", f"{here}:{there}:ro")),
            *("anvil-mux-test/llamacpp", "sh", "-c", BOOT),
        )

    def boot(self) -> None:
        """Return when it has; skip the test where it does not."""
        ask = ("systemctl", "is-system-running")
        end = re.compile(r"^(running|degraded)$|is not running", re.M)
        found = end.search(seen(lambda: self.do(*ask, code=None), end.search))
        if not found or not found[1]:
            pytest.skip(f"systemd does not run in a container here: {self._docker('logs', self.name)}")

    def do(self, *command: str, code: int | None = 0) -> str:
        """Run a command there; what it printed."""
        return self._docker("exec", self.name, *command, code=code)

    def drop_in(self, text: str) -> None:
        (self.dropins / "test.conf").write_text(f"[Service]\n{text}\n")
        self.do("systemctl", "daemon-reload")
        self.do("systemctl", "restart", "anvil-mux")

    def load(self, model: str) -> None:
        self.do("/opt/anvil-mux/bin/anvil-mux", "load", model, "--url", URL)

    def begin_user(self, unit: Path) -> None:
        """Start root's own systemd, and ``unit`` in it as its comment says."""
        config, program = f"{self.home}/.config", f"{self.home}/.local/bin"
        self.do("mkdir", "-p", f"{config}/systemd/user", f"{config}/anvil-mux", program)
        self.do("cp", f"/src/{unit.relative_to(ROOT)}", f"{config}/systemd/user/anvil-mux.service")
        self.do("cp", "/etc/anvil-mux/compose.yaml", f"{config}/anvil-mux/compose.yaml")
        self.do("sh", "-c", f"printf '%s\\n' {STAND_INS} > {config}/anvil-mux/environment")
        self.do("ln", "-s", "/opt/anvil-mux/bin/anvil-mux", program)
        # As user@.service does, which needs a login manager.
        self.do("mkdir", "--mode", "700", "-p", "/run/user/0")
        manager = ("--property=Delegate=yes", "--property=Type=notify", "--unit=user-manager")
        self.do("systemd-run", *manager, *self._as_user(), SYSTEMD, "--user", "--unit=basic.target")
        self.user("daemon-reload")
        self.user("enable", "--now", "anvil-mux")

    def user(self, *words: str, code: int | None = 0) -> str:
        """Run ``systemctl --user`` there; what it printed."""
        return self.do(*self._as_user(), "systemctl", "--user", *words, code=code)

    @cached_property
    def home(self) -> str:
        """The home of the user of ``begin_user``."""
        return self.do("sh", "-c", "echo ~").strip()

    def _as_user(self) -> tuple[str, ...]:
        return "env", f"HOME={self.home}", "XDG_RUNTIME_DIR=/run/user/0"

    def crash(self, systemctl: Callable[..., str]) -> None:
        """Kill anvil-mux; return once systemd has started it again."""
        main = systemctl("show", "--property", "MainPID", "--value", "anvil-mux").strip()
        self.do("kill", "-9", main)
        again = re.compile(rf"Active: active .*Main PID: (?!{main} )", re.S)
        assert again.search(seen(lambda: systemctl("status", "anvil-mux", code=None), again.search))

    def engine(self, model: str) -> int:
        """The process of an engine, 0 if there is none."""
        return int(self.do("pgrep", "--full", f"engine.py {model}", code=None).split("\n")[0] or 0)

    def begin_cuda(self, pid: int) -> None:
        self.cuda.process(pid)
        (self.cuda.folder / f"{pid}.used").write_text(str(3 * GIB))
        for file in self.cuda.folder.glob(f"{pid}*"):
            file.chmod(0o666)

    def journal(self) -> str:
        return self.do("journalctl", "--unit", "anvil-mux", "--no-pager")

    def close(self) -> None:
        self._docker("rm", "--force", "--volumes", self.name)

    def _docker(self, *command: str, code: int | None = 0) -> str:
        done = subprocess.run(
            ["docker", *command],
            env=self._env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=120,
        )
        assert code is None or done.returncode == code, done.stdout
        return done.stdout


@pytest.fixture
def machine(engine: Engine, tmp_path: Path) -> Iterator[Machine]:
    machine = Machine(engine, tmp_path)
    try:
        machine.boot()
        yield machine
    finally:
        machine.close()


def write(machine: Machine) -> None:
    engine = ["/usr/bin/python3", "/etc/anvil-mux/engine.py"]
    services = {
        name: {
            "command": [*engine, name, "hello", "/etc/anvil-mux/engine.py"],
            "x-anvil": {"gpus": ["0"], "evict_to": ["checkpoint", "stop"]},
        }
        for name in ("model-1", "model-2")
    }
    (machine.etc / "engine.py").write_text(ENGINE)
    top = {
        "runtime": "process",
        "listen": "127.0.0.1:9292",
        "host_memory": "64GiB",
        "project": "under-systemd",
    }
    (machine.etc / "compose.yaml").write_text(yaml.safe_dump({"x-anvil": top, "services": services}))


def test_the_shipped_unit_under_a_real_systemd(machine):
    write(machine)
    verified = machine.do("systemd-analyze", "verify", "anvil-mux.service", code=None)
    assert "anvil-mux" not in verified
    machine.do("systemctl", "start", "anvil-mux")
    assert "resident: none; 0 requests running, 0 waiting" in machine.do("systemctl", "status", "anvil-mux")
    machine.load("model-1")
    first = machine.engine("model-1")
    machine.begin_cuda(first)
    machine.load("model-2")
    filtered = "a filter of system calls is on, which may keep ptrace from anvil-mux"
    assert re.search(rf"model-1 could not be put into standby \(checkpoint\) .*{filtered}", machine.journal())
    assert machine.engine("model-1") == 0
    machine.do("systemctl", "reload", "anvil-mux")
    assert seen(machine.journal, lambda said: "configuration reloaded: nothing has changed" in said)

    machine.drop_in("SystemCallFilter=\nKillMode=process")
    machine.load("model-1")
    pid = machine.engine("model-1")
    machine.begin_cuda(pid)
    machine.load("model-2")
    machine.load("model-1")
    assert machine.engine("model-1") == pid
    steps = ("checkpoint", "restore", "unlock")
    assert machine.cuda.calls()[-4:] == [f"lock {pid} 10000", *(f"{each} {pid}" for each in steps)]
    machine.crash(partial(machine.do, "systemctl"))
    machine.load("model-1")
    last = machine.engine("model-1")
    machine.do("systemctl", "stop", "anvil-mux")
    assert machine.engine("model-1") == last > 0


def test_the_unit_of_a_user_under_a_real_systemd(machine):
    write(machine)
    machine.begin_user(ROOT / "contrib" / "anvil-mux-user.service")
    assert "resident: none; 0 requests running, 0 waiting" in machine.user("status", "anvil-mux")
    machine.load("model-1")
    first = machine.engine("model-1")
    machine.user("reload", "anvil-mux")
    machine.crash(machine.user)
    machine.load("model-1")
    machine.user("stop", "anvil-mux")
    assert machine.engine("model-1") == first > 0
    machine.do("sh", "-c", f"echo 'services: {{}}' > {machine.home}/.config/anvil-mux/compose.yaml")
    assert "78" in machine.user("start", "anvil-mux", code=1) + machine.user("status", "anvil-mux", code=3)
