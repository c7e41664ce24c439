"""Docker Compose: the commands that make a service's container.

Compose itself is needed once per service: ``compose create`` makes the container, or makes it anew when the
service's description has changed. From then on the container is started and stopped over the engine's API
(docker.py), which skips Compose's 0.3 s of reading the project. Nothing here pulls or builds an image: a
request must not wait for 20 GB; the error says which command the user has to run.

A killed anvil-mux leaves its command at work, so that holds the project's lock too, and the next start waits
for it.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping, Sequence
from typing import Protocol

from anvil_mux import command
from anvil_mux.command import Done
from anvil_mux.errors import BackendError
from anvil_mux.host.endpoint import Endpoint
from anvil_mux.host.seam import HostConfig

CREATE_TIMEOUT = 120.0
ASK_TIMEOUT = 20.0
COMPOSE = ("docker", "compose", "--ansi", "never")
RELEASE = re.compile(r"v?(\d{1,9})\.(\d{1,9})\.(\d{1,9})")


class Run(Protocol):
    """Runs a command to its end."""

    def __call__(self, argv: Sequence[str], timeout: float) -> Done: ...


def create_command(config: HostConfig, service: str, recreate: str = "") -> list[str]:
    """Make a service's container. ``recreate``: --force-recreate, --no-recreate; "": if it has changed."""
    options = ["--no-build", "--pull", "never", *([recreate] if recreate else [])]
    return [*_of_project(config), "create", *options, service]


def images_command(config: HostConfig, service: str) -> list[str]:
    """Lists the images of a service and of those that it depends on."""
    return [*_of_project(config), "config", "--images", service]


def hash_command(config: HostConfig, service: str) -> list[str]:
    """Prints a service and the hash of its description, which its containers have in a label."""
    return [*_of_project(config), "config", "--hash", service]


def version_command() -> list[str]:
    """Prints the release of Compose."""
    return [*COMPOSE, "version", "--short"]


def release(version: str) -> tuple[int, ...]:
    """Return the numbers of a release, without what a distribution adds; () where it has none."""
    found = RELEASE.match(version)
    return tuple(map(int, found.groups())) if found else ()


def _of_project(config: HostConfig) -> list[str]:
    files = [word for file in config.files for word in ("-f", file)]
    return [*COMPOSE, *files, "-p", config.project, "--profile", "*"]


def environment(env: Mapping[str, str], endpoint: Endpoint) -> dict[str, str]:
    """The environment of commands, so that they speak to the same engine as we do."""
    return {**env, **({"DOCKER_HOST": endpoint.address} if endpoint.found_by_us else {})}


def run(argv: Sequence[str], timeout: float, *, env: Mapping[str, str], lock: int | None = None) -> Done:
    """Run a command to its end, see ``command.run``; BackendError if it does not come to that."""
    try:
        return command.run(argv, timeout, env=env, lock=lock)
    except OSError as error:
        why = f"{argv[0]} cannot be run ({error.strerror}): is it installed and on PATH?"
    except subprocess.TimeoutExpired:
        why = f"`{shown(argv)}` did not end within {timeout:g} s; dockerd may be stuck"
    raise BackendError(why)


def shown(argv: Sequence[str]) -> str:
    """The command as an error names it: without the long lists of files and options."""
    words = [word for word in argv if not word.startswith("-")]
    return " ".join(words[:2]) + (f" {argv[-1]}" if len(argv) > 2 else "")
