"""The wheel, installed in an environment that has nothing of this repository: what `pipx` does."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.packaging.test_build_hook import BUILD
from tests.programs import skip_without
from tests.web import chromium as browser

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
            [*map(str, command)], capture_output=True, text=True, timeout=120, cwd=self.folder,
            env=clean | extra,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def program(self, *words: object, **extra: str) -> str:
        return self.said(self.place / "bin/p2p-dtfm", *words, **extra)

    def python(self, code: str) -> str:
        return self.said(self.place / "bin/python", "-c", code).strip()


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """What it depends on is that of the tests, by a path that brings no other p2p_dtfm along."""
    folder = tmp_path_factory.mktemp("installed")
    place = folder / "environment"
    venv.create(place, with_pip=False, symlinks=True)
    found = Installed(place, Path(), folder)
    pip = (sys.executable, "-m", "pip", "--python", place / "bin/python")
    found.said(
        *pip, "--disable-pip-version-check", "install", "--quiet", "--no-deps", "--no-index", wheel
    )
    library = Path(found.python("import sysconfig; print(sysconfig.get_path('purelib'))"))
    (library / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return Installed(place, library, folder)


def test_it_runs_where_nothing_else_of_this_repository_is(installed: Installed) -> None:
    program = installed.program
    assert program("--version").strip() == "0.1.0"
    where = installed.python("import p2p_dtfm; print(p2p_dtfm.__file__)")
    assert where.startswith(str(installed.library)), "it is the installed one"
    planned = program("plan", "three-homes", "--run", "tiny", "--json")
    assert '"peers": 6' in planned, "scenarios and run specs are in it"
    unit = program("service", "install", "--print", "--hours", "22-07")
    assert f'ExecStart="{installed.place / "bin/p2p-dtfm"}" --config' in unit
    shell = program("--show-completion", "bash", _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    assert "_P2P_DTFM_COMPLETE" in shell


def test_the_papers_page_is_made_in_a_minute_where_no_compiler_is(installed: Installed) -> None:
    """The wheel was built without one, too: nothing of it is compiled, here or there."""
    asked = "from p2p_dtfm.sim.paper.annealing import has_kernel; print(has_kernel())"
    assert installed.python(asked) == "False"
    out = installed.folder / "page"
    began_s, began_user_s = time.monotonic(), os.times().children_user
    printed = installed.program(
        "reproduce", "--quick", "--out", out, "--json", PATH=str(installed.place / "bin")
    )
    used_s = os.times().children_user - began_user_s
    assert used_s < 60, f"{used_s:.0f} s of processor time, {time.monotonic() - began_s:.0f} s"
    told = json.loads(printed)
    assert told["bars"] and all(bar["kind"] and bar["source"] for bar in told["bars"])
    page = (out / "index.html").read_text()
    assert told["facts"]["claim"] in page and page.count("<svg") > 10


@skip_without("browser", "" if browser.PROGRAM else "no Chromium here: apt-get install chromium")
@pytest.mark.parametrize("width", [1440, 390])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_a_browser_shows_that_page(
    installed: Installed, tmp_path: Path, width: int, dark: bool
) -> None:
    index = installed.folder / "page" / "index.html"
    if not index.exists():
        installed.program("reproduce", "--quick", "--out", index.parent)
    with browser.chromium(tmp_path) as page:
        page.set_view(width, 900, dark=dark)
        page.open(index.as_uri())
        page.wait_for("document.readyState == 'complete' && document.querySelector('#claim')")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.problems == []
