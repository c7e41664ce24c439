"""An anvil-mux in a container, deployed as the docs and the files of contrib/ say, and almost so.

Real are the containers and who may do what to whose processes; the kernel judges that, when the stand-in for
the CUDA driver attaches to an engine. NVML is a stand-in as well. Where ANVIL_MUX_IMAGE
names no image that the Dockerfile has made, it is this machine's own /usr.
"""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.docker.conftest import Stack
from tests.docker.test_compose_runtime import MakeStack, inspect
from tests.fake_cuda import COMPILER, FakeCuda, build_library
from tests.host.test_gpu_swap import PYNVML
from tests.running import Running

ROOT = Path(__file__).resolve().parent.parent.parent
PYTHON = str(Path(sys.prefix).resolve() / "bin" / "python")
IMAGE = os.environ.get("ANVIL_MUX_IMAGE", "")
COMMAND = ["anvil-mux"] if IMAGE else [PYTHON, "-m", "anvil_mux"]
OURS = "10001:10001"
"""The user and group of the image: Dockerfile."""
GIB = 1 << 30

pytestmark = [
    pytest.mark.skipif(
        not IMAGE and "ANVIL_IMAGE_TIER" in os.environ,
        reason="`bin/test image` has these too",
    ),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root sees what it expects of others' processes"),
    pytest.mark.skipif(COMPILER is None, reason="the stand-in for the CUDA driver needs a C compiler"),
]


def shipped(name: str) -> dict[str, Any]:
    """What a file of contrib/ says of who anvil-mux is and what it may."""
    service = yaml.safe_load((ROOT / "contrib" / name).read_text())["services"]["anvil-mux"]
    rights = ("user", "privileged", "pid", "network_mode", "cap_drop", "security_opt", "read_only")
    found = {"user": OURS} | {key: service[key] for key in rights if key in service}
    if found.get("privileged") and (lost := lost_here()):
        # Docker starts no container with what the machine itself has not: all that it has comes close.
        every = [each for each in CAPABILITIES.split() if each not in lost]
        found |= {"privileged": False, "cap_add": every, "security_opt": ["seccomp:unconfined"]}
    return found


CAPABILITIES = """
    CHOWN DAC_OVERRIDE DAC_READ_SEARCH FOWNER FSETID KILL SETGID SETUID SETPCAP LINUX_IMMUTABLE
    NET_BIND_SERVICE NET_BROADCAST NET_ADMIN NET_RAW IPC_LOCK IPC_OWNER SYS_MODULE SYS_RAWIO SYS_CHROOT
    SYS_PTRACE SYS_PACCT SYS_ADMIN SYS_BOOT SYS_NICE SYS_RESOURCE SYS_TIME SYS_TTY_CONFIG MKNOD LEASE
    AUDIT_WRITE AUDIT_CONTROL SETFCAP MAC_OVERRIDE MAC_ADMIN SYSLOG WAKE_ALARM BLOCK_SUSPEND AUDIT_READ
"""
"""Linux's capabilities at their numbers, as far as Docker 20.10 knows them."""


def lost_here() -> set[str]:
    """The capabilities that nobody on this machine can have."""
    (bounds,) = re.findall(r"^CapBnd:\s+(\w+)", Path("/proc/self/status").read_text(), re.M)
    return {name for bit, name in enumerate(CAPABILITIES.split()) if not int(bounds, 16) >> bit & 1}


@pytest.fixture
def cuda(tmp_path: Path) -> FakeCuda:
    """The stand-ins, in a folder that everybody may write to."""
    folder = tmp_path / "cuda"
    folder.mkdir()
    build_library(folder, enforced=True).rename(folder / "libcuda.so.1")
    (folder / "pynvml.py").write_text(PYNVML)
    folder.chmod(0o777)
    return FakeCuda(folder)


@pytest.fixture
def deploy(llamacpp_compose: MakeStack, tmp_path: Path, cuda: FakeCuda) -> Callable[..., Stack]:
    def make(mux: dict[str, Any], engines: dict[str, Any]) -> Stack:
        tmp_path.chmod(0o755)
        evicted = {"x-anvil": {"gpus": ["0"], "evict_to": ["checkpoint", "stop"]}, **engines}
        top = {"x-anvil": {"host_memory": "64GiB"}}
        stack = llamacpp_compose(tmp_path, models=2, top=top, services={"model-1": evicted})
        socket = stack.engine.host.removeprefix("unix://")
        environ = {"PYTHONPATH": "/cuda", "LD_LIBRARY_PATH": "/cuda", "FAKE_CUDA": "/cuda"}
        service = {
            "image": IMAGE,
            "command": ["serve", str(stack.file), "--port", "0"],
            "environment": {**environ, "NVIDIA_VISIBLE_DEVICES": "all"},
            "group_add": [str(os.stat(socket).st_gid)],
            "volumes": [
                f"{tmp_path}:{tmp_path}:ro",
                f"{cuda.folder}:/cuda",
                f"{socket}:/var/run/docker.sock",
                "state:/var/lib/anvil-mux",
            ],
        }
        if not IMAGE:
            borrow(service, tmp_path / "state")
        described = yaml.safe_load(stack.file.read_text())
        described["services"]["anvil-mux"] = {**service, **mux}
        described["volumes"] = {"state": {}}
        stack.file.write_text(yaml.safe_dump(described))
        return stack

    return make


def borrow(service: dict[str, Any], state: Path) -> None:
    """Let a service have this machine's programs, instead of an image with them."""
    state.mkdir()
    state.chmod(0o777)
    system = ("/usr", "/lib", "/lib64", "/bin", "/etc", str(ROOT), str(Path(PYTHON).parents[1]))
    service["image"] = "anvil-mux-test/llamacpp"
    service["entrypoint"] = [*COMMAND]
    service["environment"]["PYTHONPATH"] += f":{ROOT}"
    service["environment"] |= {"DOCKER_CONFIG": "/docker", "XDG_STATE_HOME": "/state", "HOME": "/state"}
    service["volumes"] += [
        *(f"{each}:{each}:ro" for each in system if os.path.exists(each)),
        f"{state}:/state",
        f"{compose_plugin()}:/docker/cli-plugins/docker-compose:ro",
    ]


def compose_plugin() -> str:
    asked = ["docker", "info", "--format", '{{range .ClientInfo.Plugins}}{{.Name}} {{.Path}}{{"\\n"}}{{end}}']
    listed = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=60).stdout
    return dict(line.split() for line in listed.splitlines() if line)["compose"]


@contextmanager
def running(stack: Stack) -> Iterator[Running]:
    """The deployed anvil-mux, of which the lines are those of its container."""
    stack.compose("up", "--detach", "anvil-mux")
    follow = ["docker", "logs", "--follow", stack.container("anvil-mux")]
    with subprocess.Popen(
        follow, env=stack.engine.env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        mux = Running(process, follow)
        try:
            mux.wait_until_listening()
            mux.wait_until_adopted()
            yield mux
        finally:
            mux.stop()


def begin_cuda(stack: Stack, cuda: FakeCuda) -> int:
    """From now on the first engine has memory on the GPU; its process."""
    pid = int(inspect(stack, "model-1")["State"]["Pid"])
    cuda.process(pid)
    (cuda.folder / f"{pid}.used").write_text(str(3 * GIB))
    for file in cuda.folder.glob(f"{pid}*"):
        file.chmod(0o666)
    return pid


def lacking(text: str) -> list[str]:
    return re.findall(r"warning: model-1: checkpoint may fail: (.*)", text)


def check(stack: Stack) -> str:
    """What `check` says in the container, while the engine runs."""
    done = subprocess.run(
        ["docker", "exec", stack.container("anvil-mux"), *COMMAND, "check", str(stack.file)],
        env=stack.engine.env,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


BACK = ("checkpoint", "restore", "unlock")
BESIDE = shipped("compose.yaml")
STATE = "DAC_OVERRIDE"
"""The capability by which root writes into the state folder of the image, which is another user's."""
ROOT_WITHOUT = {**BESIDE, "user": "root", "pid": "host", "cap_add": [STATE]}


@pytest.mark.parametrize(
    ("mux", "engines"),
    [
        pytest.param(shipped("compose-checkpoint.yaml"), {}, id="as contrib/compose-checkpoint.yaml has it"),
        pytest.param({**BESIDE, "pid": "host"}, {"user": OURS}, id="the engines' user, without capabilities"),
        pytest.param({**ROOT_WITHOUT, "cap_add": [STATE, "SYS_PTRACE"]}, {}, id="root with SYS_PTRACE"),
    ],
)
def test_a_deployed_anvil_mux_checkpoints_a_container_and_restores_it(deploy, cuda, mux, engines):
    stack = deploy(mux, engines)
    with running(stack) as anvil:
        assert anvil.chat("model-1")[0] == 200
        pid = begin_cuda(stack, cuda)
        assert lacking(check(stack)) == []
        assert anvil.chat("model-2")[0] == 200
        assert inspect(stack, "model-1")["State"]["Status"] == "paused", "\n".join(anvil.output)
        assert cuda.state(pid) == "checkpointed"
        assert anvil.chat("model-1")[0] == 200
        assert inspect(stack, "model-1")["State"]["Pid"] == pid
        assert cuda.calls() == [f"lock {pid} 10000", *(f"{each} {pid}" for each in BACK)]
        assert lacking("\n".join(anvil.output)) == []


@pytest.mark.parametrize(
    ("mux", "words"),
    [
        pytest.param(BESIDE, ["needs `pid: host`", f"anvil-mux runs as {OURS}"], id="compose.yaml"),
        pytest.param({**BESIDE, "pid": "host"}, [f"group 0:0, and anvil-mux runs as {OURS}"], id="not root"),
        pytest.param(
            {**BESIDE, "pid": "host", "engine": "10001"}, ["group 10001:0, and"], id="another group"
        ),
        pytest.param(ROOT_WITHOUT, ["root without the capability CAP_SYS_PTRACE"], id="root without"),
    ],
)
def test_what_a_checkpoint_lacks_is_foretold_and_is_why_it_fails(deploy, cuda, mux, words):
    engine = {"user": user} if (user := mux.get("engine")) else {}
    stack = deploy({key: value for key, value in mux.items() if key != "engine"}, engine)
    with running(stack) as anvil:
        foretold = [anvil.tells(f"warning: model-1: checkpoint may fail: .*{word}.*")[0] for word in words]
        assert anvil.chat("model-1")[0] == 200
        pid = begin_cuda(stack, cuda)
        assert lacking(check(stack)) == lacking("\n".join(foretold))
        assert anvil.chat("model-2")[0] == 200
        failed = anvil.tells(
            r"model-1 could not be put into standby \(checkpoint\) and is stopped instead: .*"
        )[0]
        assert f"lock of process {pid}: cuCheckpointProcessLock: CUDA_ERROR_NOT_PERMITTED (800)" in failed
        assert failed.endswith("; ".join(lacking("\n".join(foretold))))
        assert inspect(stack, "model-1")["State"]["Status"] == "exited"
        assert anvil.chat("model-1")[0] == 200


@pytest.mark.skipif(not IMAGE, reason="`bin/test image` makes one")
def test_the_service_in_the_docs_serves_beside_its_engines(llamacpp_compose, tmp_path, monkeypatch):
    (text,) = re.findall(
        r"^```yaml\n(services:\n  anvil-mux:.*?)^```$", (ROOT / "docs/running.md").read_text(), re.M | re.S
    )
    described = yaml.safe_load(text)
    service = described["services"]["anvil-mux"]
    assert service["image"] == "ghcr.io/OWNER/anvil-mux"
    service |= {"image": IMAGE, "command": [*service["command"], "--port", "0"]}
    stack = llamacpp_compose(
        tmp_path, models=1, top={"volumes": described["volumes"]}, services=described["services"]
    )
    socket = stack.engine.host.removeprefix("unix://")
    text = stack.file.read_text().replace("- compose.yaml", f"- {stack.file.name}")
    stack.file.write_text(text.replace("/var/run/docker.sock:", f"{socket}:"))
    # What a shell says of its folder, which is the compose file's.
    monkeypatch.setenv("PWD", str(tmp_path))
    with running(stack) as anvil:
        assert anvil.chat("model-1")[0] == 200
        assert stack.up() == {"anvil-mux", "model-1"}
