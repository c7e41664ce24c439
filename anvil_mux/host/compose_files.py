"""The compose files that Compose is given: those of the configuration in force, not those on disk.

The files on disk may have been edited since the configuration was read, and an edit takes effect with a
reload that accepts it, not before. So the content that Compose had read (``HostConfig.resolved_compose``) is
kept in memory, and written to the state folder where the file there differs. Compose makes the same hash of a
service from it as from the files on disk. Only the files that a container mounts, or is given as secrets and
configs, are read when the container is made.

Where the configuration was read without the Compose program, Compose is given the files on disk.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

from anvil_mux.errors import BackendError
from anvil_mux.host.seam import HostConfig
from anvil_mux.protocol import foreign
from anvil_mux.state import read_text, text_of, write_whole

COMPOSE = ("docker", "compose", "--ansi", "never")
RESOLVED = "resolved.yaml"
"""The file in the state folder with the content of the compose files in force."""
GENERATED = "compose.yaml"
"""The file in the state folder with the services that are generated for this host or its GPUs."""


class ComposeFiles:
    """The files from which Compose makes the containers of a project; its runtime owns them. Any thread."""

    def __init__(self, config: HostConfig, folder: Path) -> None:
        """``folder``: the project's state folder."""
        self._folder = folder
        self._lock = threading.Lock()  # guards the fields below, and the files while they are written
        self._config = config

    def reconfigure(self, config: HostConfig) -> None:
        with self._lock:
            self._config = config

    @property
    def variables(self) -> dict[str, str]:
        """The variables from which Compose takes secrets and configs."""
        with self._lock:
            return dict(self._config.compose_variables)

    def command(self, *words: str) -> list[str]:
        """Return a command of Compose's for the project, with all profiles; BackendError.

        The files that it names are written before, where they differ.
        """
        with self._lock:
            config = self._config
            files = list(config.files)
            options: list[str] = []
            if config.resolved_compose:
                files = [self._write(RESOLVED, config.resolved_compose)]
                options = ["--project-directory", os.path.dirname(os.path.abspath(config.files[0]))]
                options += ["--env-file", os.devnull]  # .env may have been edited, too
            if config.generated_compose:
                files.append(self._write(GENERATED, config.generated_compose))
        named = [word for file in files for word in ("-f", file)]
        return [*COMPOSE, *named, *options, "-p", config.project, "--profile", "*", *words]

    def _write(self, name: str, text: str) -> str:
        """Write a file where it is not there or differs; return its path."""
        file = self._folder / name
        if text_of(file) != text:
            try:
                self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                write_whole(file, text, 0o600)  # environments hold secrets
            except OSError as error:
                raise BackendError(f"{file} cannot be written: {error.strerror}") from None
        return str(file)


def original_files(file: str) -> tuple[str, ...] | None:
    """Return the compose files of which ``file`` is the content in force, written by any anvil-mux.

    None where it cannot be read; () where it is another file.
    """
    if os.path.basename(file) != RESOLVED:
        return ()
    try:
        content = foreign.read_object(read_text(file)) or {}
    except (OSError, ValueError):
        return None
    listed = content.get("x-files")
    return tuple([each for each in listed if isinstance(each, str)]) if isinstance(listed, list) else ()
