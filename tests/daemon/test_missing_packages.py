"""The advised command for a missing package works where the program itself was installed."""

import subprocess
import sys
from pathlib import Path

import pytest

from p2p_dtfm.ports.packages import how_to_install, not_loaded, of_an_import


def test_beside_the_program_with_its_own_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/home/ada/a clone/.venv/bin/python")
    monkeypatch.setattr(sys, "prefix", "/home/ada/a clone/.venv")
    line = "'/home/ada/a clone/.venv/bin/python' -m pip install pyarrow"
    assert how_to_install("pyarrow") == line


def test_by_pipx_where_pipx_has_installed_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`pip` is then no command of that environment, or is another environment's."""
    place = tmp_path / "p2p-dtfm"
    place.mkdir()
    (place / "pipx_metadata.json").write_text("{}")
    monkeypatch.setattr(sys, "prefix", str(place))
    assert how_to_install("pyarrow") == "pipx inject p2p-dtfm pyarrow"


@pytest.mark.parametrize(
    ("module", "package"),
    [("torch", "torch"), ("prometheus_client", "prometheus-client"), ("google", ""), ("_lzma", "")],
)
def test_a_package_is_installed_by_its_own_name(module: str, package: str) -> None:
    """Where protobuf was missing the program advised to install `google`, which is another
    package."""
    fixes = not_loaded(ModuleNotFoundError(f"No module named {module!r}", name=module)).fixes
    said = [fix for fix in fixes if fix.startswith("install it: ")]
    assert said == ([f"install it: {how_to_install(package)}"] if package else [])
    assert fixes[-1].startswith("install p2p-dtfm anew: ")


DOCTOR = """
import sys
from importlib.machinery import PathFinder

missing, find = sys.argv.pop(), PathFinder.find_spec
PathFinder.find_spec = lambda name, *where: None if name == missing else find(name, *where)
from p2p_dtfm.cli import main
main()
"""


@pytest.mark.parametrize("missing", ["torch", "hivemind"])
def test_the_doctor_says_which_package_is_missing(missing: str, tmp_path: Path) -> None:
    """The doctor ended with a traceback, as it needs these packages itself; it has to report
    them."""
    cause = _what_the_doctor_says(tmp_path, missing)
    assert "a package that p2p-dtfm needs cannot be loaded: " in cause
    assert f"install it: {how_to_install(missing)}" in cause


def test_the_doctor_says_that_one_is_broken(tmp_path: Path) -> None:
    """A library that the package brings along has gone, or is another system's."""
    (tmp_path / "torch.py").write_text('raise OSError("libtorch.so: cannot open\\nmore of it")')
    cause = _what_the_doctor_says(tmp_path, "")
    assert "cannot be loaded: libtorch.so: cannot open" in cause
    assert "install it: " not in cause and "install p2p-dtfm anew" in cause


@pytest.mark.parametrize(
    "command",
    [
        ("--run", "tiny", "--dashboard", "off", "--no-nearby", "--home"),
        ("export", "--out", "model", "--home"),
    ],
    ids=["the daemon", "another command"],
)
def test_so_does_what_else_needs_it(command: tuple[str, ...], tmp_path: Path) -> None:
    """A daemon said that this was a bug, with its traceback, and other commands ended with a
    traceback."""
    (tmp_path / "torch.py").write_text('raise OSError("libtorch.so: cannot open")')
    cause = _what_is_said(tmp_path, *command, str(tmp_path / "home"), "")
    assert "cannot be loaded: libtorch.so: cannot open" in cause
    assert "install p2p-dtfm anew" in cause


def test_errors_of_other_kinds_are_not_of_an_import() -> None:
    with pytest.raises(OSError, match="No such file") as raised:
        Path("/nowhere").read_bytes()
    assert of_an_import(raised.value) is None


def _what_the_doctor_says(folder: Path, missing: str) -> str:
    return _what_is_said(folder, "doctor", "--home", str(folder), missing)


def _what_is_said(folder: Path, *arguments: str) -> str:
    """The last line of the output. `missing` is the package that is not there; empty: all are."""
    sources = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", DOCTOR, *arguments],
        env={"PYTHONPATH": f"{folder}:{sources}", "PATH": ""},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    return done.stderr
