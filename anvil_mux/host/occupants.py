"""The engines on the GPUs of this machine that another anvil-mux has started: of other projects and users.

What this program has started it knows itself (runs.py, project.py). Everything else that any anvil-mux has
started and that still runs is listed here, from what the machine itself tells:

    processes   each carries a copy of its record in its environment, whatever state folder it is of
    containers  those of projects that are noted in this user's state folders, and those that Compose made of
                one of our own files under another name of the project

The environment of a process of another user cannot be read, unless by root: there the claims tell that
engines hold (claims.py). Where Docker does not answer, containers that are noted may run, if any container
does.

GPUs are told by the ids by which their drivers know them, whatever names files have for them.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from anvil_mux.host import gpus, runs
from anvil_mux.host.claims import Identify, claimed_engines, claimed_gpus
from anvil_mux.host.compose_files import original_files
from anvil_mux.host.docker_api import ComposeContainer, ContainerEngine, Unreachable, find_endpoint
from anvil_mux.host.notes import Notes, word_of
from anvil_mux.host.runs import RunRecord, RunRecords, marked_runs
from anvil_mux.host.seam import MACHINE, HostConfig, Occupant
from anvil_mux.protocol import foreign
from anvil_mux.state import is_served, text_of

STOP = "anvil-mux stop --all"


def find_occupants(
    config: HostConfig,
    state: Path,
    environ: Mapping[str, str],
    owner: Callable[[int], str | None],
    identify: Identify = gpus.identities,
) -> list[Occupant]:
    """List the engines on this machine that are not of the project whose state folder this is.

    ``owner``: see ``seam.Runtime``. BackendError if they cannot be determined.
    """
    found = [
        *_processes(state, environ.get(MACHINE, ""), owner),
        *_containers(config, state, environ),
    ]
    found += [each for each in of_other_users(environ) if not _is_among(found, each)]
    ids = identify({id for each in found for id in each.gpus or ()})
    return [_known_by(ids, each) for each in found]


def _known_by(ids: Mapping[str, str], occupant: Occupant) -> Occupant:
    """Return an occupant with the ids that its GPUs are known by."""
    if occupant.gpus is None:
        return occupant
    return replace(occupant, gpus=tuple(dict.fromkeys(ids[gpu] for gpu in occupant.gpus)))


def of_other_users(environ: Mapping[str, str]) -> list[Occupant]:
    """List the engines that are processes of other users, by the claims that they hold."""
    held: dict[tuple[str, str, int, str], list[str]] = {}
    for each in claimed_engines(environ):
        if each.uid != os.getuid():
            held.setdefault((each.project, each.backend, each.uid, each.user), []).append(each.gpu)
    served = {(each.project, each.uid) for each in claimed_gpus(environ)} if held else set()
    found = []
    for (project, backend, uid, user), ids in held.items():
        end = "unload --all" if (project, uid) in served else "stop --all"
        end = f"sudo -iu {shlex.quote(user)} anvil-mux {end}"
        found.append(Occupant(backend, project, "user", tuple(ids), end))
    return found


def _is_among(found: Iterable[Occupant], occupant: Occupant) -> bool:
    """Return whether an engine was found already, by its environment, which root reads."""
    return any(
        (each.project, each.gpus) == (occupant.project, occupant.gpus)
        and each.backend.startswith(occupant.backend)
        for each in found
    )


def _processes(state: Path, machine: str, owner: Callable[[int], str | None]) -> Iterator[Occupant]:
    for run in marked_runs():
        if run.machine == machine and run.state != str(state) and owner(run.pid) is None:
            yield _of_run(run, state.parent)


def _of_run(run: RunRecord, home: Path) -> Occupant:
    folder = Path(run.state)
    if is_served(folder):
        return Occupant(run.backend, run.project, "served", run.gpus, _unload(folder, run.backend))
    end = f"kill -- -{run.pid}"
    if (folder / "services").exists():
        elsewhere = "" if folder.parent == home else f"XDG_STATE_HOME={folder.parent.parent} "
        end = f"{elsewhere}{STOP}"
    return Occupant(run.backend, run.project, "left", run.gpus, end)


def _unload(folder: Path, backend: str) -> str:
    """Return the command by which the anvil-mux that serves a project unloads its models."""
    place = foreign.read_object(text_of(folder / "address")) or {}
    url = place.get("url")
    return f"anvil-mux unload --all --url {url}" if isinstance(url, str) else ""


def _containers(config: HostConfig, state: Path, environ: Mapping[str, str]) -> Iterator[Occupant]:
    noted = {folder.name: folder for folder in _other_folders(state) if _noted_containers(folder)}
    files = {os.path.abspath(file) for file in config.files}
    if not noted and config.runtime != "compose":
        return
    try:
        running = ContainerEngine(find_endpoint(environ)).running()
    except Unreachable:
        if config.runtime == "compose":
            raise
        yield from _unknown(noted.values())
        return
    for each in running:
        if each.project == config.project:
            continue
        folder = noted.get(each.project)
        if folder and (word := each.word(_noted_containers(folder))):
            ids = Notes(folder).gpus(word)
            if is_served(folder):
                yield Occupant(each.service, each.project, "served", ids, _unload(folder, each.service))
            else:
                yield Occupant(each.service, each.project, "left", ids, STOP)
        elif _is_made_of(files, each):
            yield from _of_our_file(config, each)


def _unknown(folders: Iterable[Path]) -> Iterator[Occupant]:
    """List noted containers of which Docker does not say whether they run, if any container runs here."""
    if not any(map(gpus.container_of, runs.process_ids())):
        return
    processes = {(run.state, run.backend) for run in marked_runs()}
    for folder in folders:
        end = f"delete {folder} if none of its containers runs"
        for word in sorted(_noted_containers(folder)):
            if (str(folder), word) not in processes:
                yield Occupant(word, folder.name, "unknown", Notes(folder).gpus(word), end)


def _is_made_of(files: Collection[str], container: ComposeContainer) -> bool:
    """Return whether a container was made of one of these compose files, by Compose or by an anvil-mux.

    Where it was made by another user's anvil-mux, only the folder of its files is known.
    """
    for file in container.files:
        originals = original_files(file)
        if originals is None and container.folder in map(os.path.dirname, files):
            return True
        if not {file, *(originals or ())}.isdisjoint(files):
            return True
    return False


def _of_our_file(config: HostConfig, container: ComposeContainer) -> Iterator[Occupant]:
    for backend in config.backends:
        if (backend.service_name, backend.service.number) == (container.service, container.number):
            end = f"docker stop {container.id[:12]}"
            yield Occupant(container.service, container.project, "left", backend.gpus, end)


def _other_folders(state: Path) -> list[Path]:
    """List the state folders of this user's other projects."""
    return [file.parent for file in sorted(state.parent.glob("*/services")) if file.parent != state]


def _noted_containers(folder: Path) -> set[str]:
    """Return the noted services of a project that are containers, as words of its notes."""
    records = RunRecords(folder)
    noted = Notes(folder).orphans(())
    return {word_of(each) for each in noted if not records.has_room(each.name)}
