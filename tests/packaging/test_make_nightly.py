"""`make nightly` plays all that it should, whatever is red, and says at its end what is."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = """#!/bin/sh
echo "$NIGHTLY $*" >> calls
case "$*" in *{red}*) exit 1;; esac
"""
"""In place of all that the environment has."""
PARTS = ("-m pytest", "agreement_seeds", *(f"--seeds {n}-" for n in range(0, 400_001, 100_000)))


def nightly(directory: Path, red: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, directory)
    programs = directory / ".venv" / "bin"
    programs.mkdir(parents=True)
    for name in ("python", "ruff", "lint-imports", "mypy"):
        (programs / name).write_text(PROGRAM.format(red=red))
        (programs / name).chmod(0o755)
    (directory / ".venv" / ".complete").touch()
    of_makes = ("NIGHTLY", "MAKEFLAGS", "MAKELEVEL", "MFLAGS")  # of that which runs this test, too
    rest = {name: value for name, value in os.environ.items() if name not in of_makes}
    command = ["make", "nightly"]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, env=rest)
    return done, (directory / "calls").read_text().splitlines()


@pytest.mark.parametrize("red", ["-m pytest", "agreement_seeds", "--seeds 200000-"])
def test_what_is_red_holds_up_nothing_and_is_named_at_the_end(tmp_path: Path, red: str) -> None:
    done, calls = nightly(tmp_path, f"'{red}'")
    for part in PARTS:
        assert any(part in call for call in calls), part
    assert all(call.startswith("1 ") == ("-m pytest" in call) for call in calls)
    assert done.returncode != 0
    told = done.stdout[done.stdout.index("red is") :].splitlines()
    assert len(told) == 2 and red in told[1]


def test_where_nothing_is_red_it_says_so(tmp_path: Path) -> None:
    done, calls = nightly(tmp_path, "nothing-of-this-name")
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "nothing is red"
    assert all(any(part in call for call in calls) for part in PARTS)
