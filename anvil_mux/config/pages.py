"""The page of the documentation that says more about a diagnostic, by the key that it is about.

Each setting names its page in its row of table.py; the keys of Compose have theirs here.
"""

from __future__ import annotations

from pathlib import Path

from anvil_mux.config.config import LABEL
from anvil_mux.config.diagnostic import Diagnostic, KeyPath
from anvil_mux.config.table import SERVICE_SETTINGS, SETTINGS

FOLDER = "docs/"
"""The folder of the pages in the repository, before each page's name."""
OF_COMPOSE = {
    **dict.fromkeys(("gpus", "deploy", "devices", "runtime", "group_add"), "gpus.md#supported-gpus"),
    **dict.fromkeys(("ports", "command", "expose"), "reference.md#engines"),
    **dict.fromkeys(("extends", "include", "env_file", "label_file"), "running.md#docker-or-podman"),
    **dict.fromkeys(("restart", "image", "profiles"), "running.md#docker-or-podman"),
}
"""Keys of Compose -> the page that says what anvil-mux makes of them."""
OF_SERVICES = "reference.md#x-anvil-on-a-service"
OF_ALL = "reference.md#x-anvil-at-the-top-level"


def page_of(diagnostic: str) -> str:
    """Return the page for a diagnostic; "" for one that is about no key, such as bad YAML."""
    if not isinstance(diagnostic, Diagnostic):
        return ""
    page = diagnostic.page or _page_of_key(diagnostic.key)
    return FOLDER + page if page else ""


def _page_of_key(key: KeyPath) -> str:
    match key:
        case ("x-anvil", *path):
            setting = SETTINGS.get(path[0]) if path else None
            return setting.page if setting and setting.page else OF_ALL
        case ("services", _, "x-anvil", *path):
            return _of_service(path[0] if path else "")
        case ("services", _, "labels", label, *_) if label.startswith(LABEL):
            return _of_service(label.removeprefix(LABEL))
        case ("services", _, compose_key, *_):
            ours = SERVICE_SETTINGS.get(compose_key)
            return OF_COMPOSE.get(compose_key, ours.page if ours else "")
        case ("services", *_):
            return OF_SERVICES
        case (first, *_):
            return OF_COMPOSE.get(first, "")
    return ""


def _of_service(key: str) -> str:
    setting = SERVICE_SETTINGS.get(key)
    return setting.page if setting and setting.page else OF_SERVICES


def where_pages_are() -> str:
    """Say where the folder of the pages is, for people who stand elsewhere or have only a wheel."""
    root = Path(__file__).resolve().parents[2]
    if not (root / FOLDER / "README.md").is_file():
        return f"{FOLDER} is a folder of anvil-mux's repository, which this installation does not have"
    return "" if Path.cwd() == root else f"{FOLDER} is in {root}"
