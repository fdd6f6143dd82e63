"""Building without a compiler leaves the kernel out, and nothing else."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BUILD = """
import sys
from hatchling.builders.wheel import WheelBuilder
print(next(WheelBuilder(sys.argv[1]).build(directory=sys.argv[2], versions=["standard"])))
"""


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """What a wheel is built from, with one module beside the kernel."""
    copy = tmp_path / "sources"
    (copy / "p2p_dtfm/sim/paper").mkdir(parents=True)
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "p2p_dtfm/__init__.py"):
        shutil.copy(ROOT / name, copy / name)
    for name in ("_kernel.c", "annealing.py"):
        shutil.copy(ROOT / "p2p_dtfm/sim/paper" / name, copy / "p2p_dtfm/sim/paper" / name)
    shutil.copytree(ROOT / "configs", copy / "configs")
    return copy


@pytest.mark.parametrize("compiler", ["false", "no-such-compiler-anywhere", None])
def test_a_wheel_is_built_with_any_compiler_or_none(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiler: str | None
) -> None:
    """None: the machine's own, which may be missing too."""
    pytest.importorskip("hatchling")
    if compiler is None:
        monkeypatch.delenv("CC", raising=False)
    else:
        monkeypatch.setenv("CC", compiler)
    command = [sys.executable, "-c", BUILD, str(sources), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=sources)
    assert done.returncode == 0, done.stderr
    wheel = Path(done.stdout.splitlines()[-1])
    names = zipfile.ZipFile(wheel).namelist()
    kernels = [
        name for name in names if name.startswith("p2p_dtfm/sim/paper/_kernel.") and "so" in name
    ]
    assert "p2p_dtfm/sim/paper/annealing.py" in names
    if compiler is None and shutil.which("cc"):
        assert kernels and "none-any" not in wheel.name
    if compiler is not None:
        assert not kernels and wheel.name.endswith("none-any.whl")
        assert "its slower Python twin serves" in done.stderr
