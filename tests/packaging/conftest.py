"""The wheel, and an environment of its own that has nothing but it."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.packaging.test_build_hook import BUILD

ROOT = Path(__file__).parents[2]


PROCESSOR_TORCH = "torch==2.13.0"
"""Of which the tests' index has the build for the processor alone."""
QUIETLY = ("--disable-pip-version-check", "install", "--quiet")


@dataclass(frozen=True)
class Installed:
    """An environment of its own with the wheel in it."""

    place: Path
    library: Path
    folder: Path

    def said(self, *command: object, **extra: str) -> str:
        """What a command prints; nothing of this repository is on its way."""
        clean = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
        clean |= {"HOME": str(self.folder), "XDG_CONFIG_HOME": str(self.folder / "config")}
        done = subprocess.run(
            [*map(str, command)], capture_output=True, text=True, timeout=600, cwd=self.folder,
            env=clean | extra,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def program(self, *words: object, **extra: str) -> str:
        return self.said(self.place / "bin/p2p-dtfm", *words, **extra)

    def python(self, code: str) -> str:
        return self.said(self.place / "bin/python", "-c", code).strip()

    def find_library(self) -> Path:
        return Path(self.python("import sysconfig; print(sysconfig.get_path('purelib'))"))


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("wheel")
    sources = folder / "sources"
    leave = shutil.ignore_patterns("__pycache__", "*.so")
    for name in ("p2p_dtfm", "configs"):
        shutil.copytree(ROOT / name, sources / name, ignore=leave)
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, sources / name)
    command = [sys.executable, "-c", BUILD, str(sources), str(folder)]
    environment = {**os.environ, "CC": "false"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, cwd=sources, env=environment
    )
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.splitlines()[-1])


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    folder = tmp_path_factory.mktemp("installed")
    return install(wheel, folder, folder / "environment")


def install(wheel: Path, folder: Path, place: Path) -> Installed:
    """Into a new environment at `place`, by a user whose home is `folder`. What it depends on is
    that of the tests, by a path that brings no other p2p_dtfm along."""
    venv.create(place, with_pip=False, symlinks=True)
    found = Installed(place, Path(), folder)
    pip = (sys.executable, "-m", "pip", "--python", place / "bin/python")
    found.said(*pip, *QUIETLY, "--no-deps", "--no-index", wheel)
    library = found.find_library()
    (library / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return Installed(place, library, folder)


def pipx_of_its_own(folder: Path) -> Path:
    """pipx, in an environment of its own, over the network; what it installs is in the home."""
    venv.create(folder, with_pip=False, symlinks=True)
    pip = (sys.executable, "-m", "pip", "--python", folder / "bin/python")
    Installed(folder, Path(), folder).said(*pip, *QUIETLY, "pipx")
    return folder / "bin/pipx"


def install_by_pipx(pipx: Path, wheel: Path, folder: Path) -> Installed:
    """As a user of pipx does whose home is `folder`; all that it needs comes over the network."""
    place = folder / ".local/share/pipx/venvs/p2p-dtfm"
    found = Installed(place, Path(), folder)
    said = found.said(pipx, "install", "--preinstall", PROCESSOR_TORCH, wheel)
    assert "p2p-dtfm" in said, said
    program = folder / ".local/bin/p2p-dtfm"
    assert program.resolve() == place / "bin/p2p-dtfm", "pipx puts it where a shell looks"
    return Installed(place, found.find_library(), folder)
