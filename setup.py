"""Notes the commit in what is built, so that it can say later what it was made of; all else is in setup.cfg.

A hook of a few lines needs no build dependency, works for every way to a wheel, and leaves no
file in the checkout. Where there is no git, as in an image's build, ANVIL_COMMIT names the commit.
"""

import os
import runpy
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

ABOUT = runpy.run_path(str(Path(__file__).resolve().parent / "anvil_mux" / "__init__.py"))


def note(folder: Path) -> None:
    commit = os.environ.get("ANVIL_COMMIT") or ABOUT["commit"]()
    if commit and folder.is_dir():
        (folder / ABOUT["WRITTEN"]).write_text(f"{commit}\n")


class BuildPackage(build_py):
    def run(self) -> None:
        super().run()
        if not self.editable_mode:  # The checkout itself asks git each time.
            note(Path(self.build_lib, "anvil_mux"))


class SourceArchive(sdist):
    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        super().make_release_tree(base_dir, files)
        note(Path(base_dir, "anvil_mux"))


setup(cmdclass={"build_py": BuildPackage, "sdist": SourceArchive})
