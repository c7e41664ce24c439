"""The rights that a checkpoint needs, and who has them."""

import os
import re
from dataclasses import replace
from typing import cast

import pytest

from anvil_mux.config.config import Backend
from anvil_mux.config.service import Service
from anvil_mux.errors import BackendError
from anvil_mux.host import cuda_checkpoint
from anvil_mux.host.cuda_checkpoint import Rights, names_our_processes, owner_of
from anvil_mux.host.levels import Swapper
from anvil_mux.host.seam import HostConfig, Runtime
from tests.host.test_swap import Notes

MINE = Rights(user=1000, group=1000, traces=False, scope=0, sees_host=True)
ROOT = Rights(user=0, group=0, traces=True, scope=0, sees_host=True)


@pytest.mark.parametrize(
    ("here", "owners", "contained", "missing"),
    [
        (ROOT, {0, 1000}, True, []),
        (MINE, {1000}, False, []),
        (MINE, {1000}, True, []),
        (
            MINE,
            {0, 1000},
            True,
            ["are of user and group 0:0, and anvil-mux runs as 1000:1000: run it"],
        ),
        (
            replace(MINE, user=63215),
            {0},
            True,
            [r"runs as 63215:1000: .* or give the service and the systemd unit one user$"],
        ),
        (MINE, set(), True, []),
        (replace(MINE, traces=True), {0}, True, []),
        (replace(ROOT, traces=False), {0}, True, [r"CAP_SYS_PTRACE: its container needs `privileged: true`"]),
        (replace(ROOT, sees_host=False), {0}, True, ["its container needs `pid: host`"]),
        (replace(ROOT, sees_host=False), {0}, False, []),
        (replace(MINE, scope=1), {1000}, False, []),
        (
            replace(MINE, scope=2),
            {1000},
            False,
            ["ptrace_scope is 2, with which nobody without CAP_SYS_PTRACE"],
        ),
        (replace(ROOT, scope=2), {0}, True, []),
        (replace(ROOT, scope=3), {0}, True, ["ptrace_scope is 3, with which nobody may"]),
        (replace(MINE, filtered=True), {1000}, False, []),
        (replace(MINE, scope=2, sees_host=False), {0}, True, ["pid: host", "group 0:0", "ptrace_scope"]),
    ],
)
def test_what_the_running_user_lacks_is_named_with_how_to_get_it(here, owners, contained, missing):
    found = here.lacks({(owner, owner) for owner in owners}, contained=contained)
    assert len(found) == len(missing)
    for said, pattern in zip(found, missing, strict=True):
        assert re.search(pattern, said)


def test_rights_are_read_from_proc(tmp_path):
    (tmp_path / "self").mkdir()
    status = tmp_path / "self" / "status"
    status.write_text(
        "Name:\tx\nUid:\t1000\t1001\t1001\t1001\nGid:\t100\t101\t101\t101\nCapEff:\t0000000000080000\n"
    )
    assert Rights.here(tmp_path) == Rights(1001, 101, traces=True, scope=0, sees_host=False)
    status.write_text("Name:\tx\nUid:\t0\t0\t0\t0\nGid:\t0\t0\t0\t0\nCapEff:\t000001fffff7ffff\n")
    (tmp_path / "2").mkdir()
    (tmp_path / "2" / "comm").write_text("kthreadd\n")
    (tmp_path / "sys/kernel/yama").mkdir(parents=True)
    (tmp_path / "sys/kernel/yama/ptrace_scope").write_text("2\n")
    assert Rights.here(tmp_path) == Rights(0, 0, traces=False, scope=2, sees_host=True)


def test_the_rights_of_this_process_are_read():
    assert (Rights.here().user, Rights.here().group) == (os.geteuid(), os.getegid())


@pytest.mark.parametrize("seccomp", ["", "Seccomp:\t0\n", "Seccomp:\t2\n"])
def test_a_filter_of_system_calls_is_the_likely_cause_of_a_failure_where_nothing_is_missing(
    seccomp, tmp_path, monkeypatch
):
    status = tmp_path / "self" / "status"
    status.parent.mkdir()
    status.write_text(f"Uid:\t0\t0\t0\t0\nGid:\t0\t0\t0\t0\nCapEff:\tfffff\n{seccomp}")
    here = Rights.here(tmp_path)
    assert here.filtered is ("2" in seccomp)
    monkeypatch.setattr(Rights, "here", lambda: here)
    runtime = cast(Runtime, Ran())
    assert cuda_checkpoint.lacks(ENGINE, runtime, contained=False) == []
    causes = cuda_checkpoint.likely_causes(ENGINE, runtime, contained=False)
    assert causes == [cuda_checkpoint.MAY_BE_FILTERED] * here.filtered
    monkeypatch.setattr(Rights, "here", lambda: replace(here, scope=3))
    (missing,) = cuda_checkpoint.likely_causes(ENGINE, runtime, contained=False)
    assert "ptrace_scope is 3" in missing


def test_the_owners_of_processes_are_told_without_those_that_have_ended():
    assert cuda_checkpoint.owners([os.getpid(), 2**31 - 1]) == {(os.geteuid(), os.getegid())}


ME, GROUP, OTHER = os.geteuid(), os.getegid(), 4711
ENGINE = Backend("a", "a", ("0",), evict_to=("checkpoint", "stop"))


class Ran(Notes):
    """A runtime whose services are the processes of this test."""

    def pids(self, backend: Backend) -> list[int]:
        self._note("pids")
        return [os.getpid()]


def lacks(runtime: Notes, here: Rights, user: str = "", *, contained: bool = True) -> list[str]:
    backend = replace(ENGINE, service=Service(user=user))
    return cuda_checkpoint.lacks(backend, cast(Runtime, runtime), contained=contained, rights=here)


def test_the_processes_that_run_are_asked_before_the_file(monkeypatch):
    monkeypatch.setenv("DOCKER_HOST", "tcp://x:1")
    here = replace(MINE, user=OTHER, group=OTHER)
    (said,) = lacks(Ran(), here, user=f"{OTHER}:{OTHER}")
    assert f"group {ME}:{GROUP}, and anvil-mux runs as {OTHER}:{OTHER}" in said
    assert lacks(Notes(), here, user=f"{OTHER}:{OTHER}") == []
    away = Ran()
    away.fails["pids"] = BackendError("Docker is away")
    assert "group 0:0, and" in lacks(away, here)[0]


def test_the_group_has_to_be_the_same_as_well(monkeypatch):
    monkeypatch.setenv("DOCKER_HOST", "tcp://x:1")
    (said,) = lacks(Notes(), MINE, user="1000")
    assert "of user and group 1000:0, and anvil-mux runs as 1000:1000" in said
    assert 'give the service `user: "1000:1000"`' in said


def test_where_ids_mean_other_processes_the_file_is_believed(monkeypatch):
    monkeypatch.setenv("DOCKER_HOST", "tcp://x:1")
    runtime, here = Ran(), replace(MINE, user=OTHER, group=OTHER, sees_host=False)
    assert ["pid: host" in each for each in lacks(runtime, here, user=f"{OTHER}:{OTHER}")] == [True]
    assert runtime.calls == []
    assert (
        "user and group" in lacks(runtime, here, contained=False)[0]
    )  # our own children, in whatever namespace


@pytest.mark.parametrize(("named", "said"), [(True, []), (False, ["pid: host"]), (None, ["pid: host"])])
def test_the_socket_of_the_engine_tells_better_whose_ids_are_ours(named, said, monkeypatch):
    monkeypatch.setattr(cuda_checkpoint, "names_our_processes", lambda env: named)
    found = lacks(Ran(), replace(MINE, user=ME, traces=True, sees_host=False))
    assert [each for each in said if each in "".join(found)] == said == [said[0] for _ in found]


def test_only_who_is_to_be_checkpointed_is_warned_of(monkeypatch):
    monkeypatch.setattr(Rights, "here", lambda: replace(MINE, user=OTHER))
    second, never = (
        replace(ENGINE, name="b"),
        replace(ENGINE, name="c", evict_to=("freeze", "stop")),
    )
    runtime = Ran()
    (said,) = cuda_checkpoint.missing_rights(
        HostConfig((ENGINE, second, never), runtime="process"), cast(Runtime, runtime)
    )
    assert said.startswith(
        f"a, b: checkpoint may fail: the engine's processes are of user and group {ME}:{GROUP}, and"
    )


@pytest.mark.parametrize(("how", "said"), [("checkpoint", "; the right to do so"), ("freeze", "")])
def test_a_checkpoint_that_fails_tells_what_was_missing(how, said, caplog):
    runtime = Notes()
    runtime.fails["pause"] = BackendError("not permitted")
    swapper = Swapper(runtime, lacks=lambda backend: ["the right to do so"])
    assert swapper.evict(ENGINE, how).level == "stop"
    assert f"({how}) and is stopped instead: " in caplog.text
    assert caplog.records[0].getMessage().endswith(said)
    assert ("right" in caplog.text) is bool(said)


@pytest.mark.parametrize(
    ("user", "owner"),
    [
        *(("", (0, 0)), ("root:x", (0, 0)), ("0", (0, 0))),
        *(("1000:100", (1000, 100)), ("1000", (1000, 0)), ("1000:staff", None), ("somebody", None)),
    ],
)
def test_the_owner_of_a_service_is_foretold(user, owner):
    assert owner_of(Backend("a", "a", service=Service(user=user)), {"DOCKER_HOST": "tcp://x:1"}) == owner


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
@pytest.mark.parametrize(("user", "id"), [("", 1234), ("0:0", 1234), ("1000", None)])
def test_root_of_a_rootless_engine_is_who_runs_it(tmp_path, user, id):
    address = tmp_path / "docker.sock"
    address.touch()
    os.chown(address, 1234, 1234)
    told = owner_of(Backend("a", "a", service=Service(user=user)), {"DOCKER_HOST": f"unix://{address}"})
    assert told == (id and (id, id))


def test_an_engine_behind_a_socket_of_this_machine_names_our_processes(docker):
    assert names_our_processes({"DOCKER_HOST": docker.host}) is True
    assert names_our_processes({"DOCKER_HOST": f"{docker.host}.gone"}) is None
    assert names_our_processes({"DOCKER_HOST": "tcp://x:1"}) is None
