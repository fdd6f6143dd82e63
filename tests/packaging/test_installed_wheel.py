"""The wheel, installed in an environment that has nothing of this repository: what `pipx` does."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from tests.packaging.test_build_hook import BUILD

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
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


def test_it_asks_for_a_python_and_for_no_tests(wheel: Path) -> None:
    files = zipfile.ZipFile(wheel)
    (name,) = [name for name in files.namelist() if name.endswith(".dist-info/METADATA")]
    metadata = files.read(name).decode()
    assert "Requires-Python: >=3.11" in metadata
    needed = re.findall(r"^Requires-Dist: ([\w-]+)(?!.*extra ==).*$", metadata, re.MULTILINE)
    assert "torch" in needed and not {"pytest", "mypy", "ruff", "transformers"} & set(needed)
    assert not [name for name in files.namelist() if name.startswith("tests/")]


def test_it_runs_where_nothing_else_of_this_repository_is(wheel: Path, tmp_path: Path) -> None:
    """What it depends on is that of the tests, by a path that brings no other p2p_dtfm along."""
    place = tmp_path / "environment"
    venv.create(place, with_pip=False, symlinks=True)
    python = place / "bin/python"
    clean = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    clean |= {"HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path / "config")}

    def said(*command: object, **extra: str) -> str:
        done = subprocess.run(
            [*map(str, command)], capture_output=True, text=True, timeout=120, cwd=tmp_path,
            env=clean | extra,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    pip = (sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check")
    said(*pip, "install", "--quiet", "--no-deps", "--no-index", wheel)
    found = said(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    (Path(found) / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    program = place / "bin/p2p-dtfm"
    assert said(program, "--version").strip() == "0.1.0"
    where = said(python, "-c", "import p2p_dtfm; print(p2p_dtfm.__file__)")
    assert where.startswith(found), "it is the installed one"
    planned = said(program, "plan", "three-homes", "--run", "tiny", "--json")
    assert '"peers": 6' in planned, "scenarios and run specs are in it"
    unit = said(program, "service", "install", "--print", "--hours", "22-07")
    assert f'ExecStart="{program}" --config' in unit
    shell = said(
        program, "--show-completion", "bash", _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1"
    )
    assert "_P2P_DTFM_COMPLETE" in shell
