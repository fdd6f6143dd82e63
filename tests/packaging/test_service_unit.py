"""The systemd unit of a bootstrap node, as systemd itself reads it."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

BOOTSTRAP = Path(__file__).parents[2] / "bootstrap"
UNIT = BOOTSTRAP / "p2p-dtfm-bootstrap.service"
INSTALLED = "/opt/p2p-dtfm/bin/p2p-dtfm"
WORST_EXPOSURE = 2.0
"""Of 10; a unit without any hardening has 9.6."""

needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="no systemd-analyze here"
)


def analysed(*arguments: str | Path) -> str:
    done = subprocess.run(
        ["systemd-analyze", *map(str, arguments)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@needs_systemd
def test_systemd_understands_every_line(tmp_path: Path) -> None:
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text().replace(INSTALLED, shutil.which("true") or ""))
    assert analysed("verify", "--man=no", unit) == ""


@needs_systemd
def test_it_is_as_hardened_as_the_page_says() -> None:
    said = analysed("security", "--offline=true", "--no-pager", UNIT)
    found = re.search(r"Overall exposure level for \S+: (\d+\.\d+)", said)
    assert found is not None and float(found[1]) <= WORST_EXPOSURE, said


def test_the_whole_group_ends_and_its_command_is_one_that_there_is() -> None:
    lines = UNIT.read_text().splitlines()
    assert "KillMode=control-group" in lines and "Restart=always" in lines
    (command,) = [line for line in lines if line.startswith("ExecStart=")]
    program, verb, *rest = command.removeprefix("ExecStart=").split()
    assert (program, verb) == (INSTALLED, "bootstrap")
    options = [word for word in rest if word.startswith("--")]
    help_text = subprocess.run(
        [sys.executable, "-m", "p2p_dtfm", "bootstrap", "--help"],
        capture_output=True,
        text=True,
        timeout=60,
    ).stdout
    assert options and all(option in help_text for option in options)
