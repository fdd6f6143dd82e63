"""The picture of a line: segno's modules, one by one."""

import re
import tomllib

import pytest
import segno

from p2p_dtfm.web.qr import QUIET_ZONE, TEXT_LIMIT, qr_in_terminal, qr_picture
from tests.documentation.pages import ROOT

LINE = "p2p-dtfm --invite p2pi1-" + "aB3-_" * 50


def test_the_path_draws_each_dark_module_once() -> None:
    rows = segno.make(LINE, error="l", micro=False).matrix
    dark = {
        (int(x) + at - QUIET_ZONE, int(y) - QUIET_ZONE)
        for x, y, length in re.findall(r"M(\d+) (\d+)h(\d+)v1h-\3z", qr_picture(LINE).path)
        for at in range(int(length))
    }
    assert dark == {(x, y) for y, row in enumerate(rows) for x, value in enumerate(row) if value}
    assert qr_picture(LINE).size == len(rows) + 2 * QUIET_ZONE


def test_of_too_much_there_is_a_reason(capsys: pytest.CaptureFixture[str]) -> None:
    assert "too long" in qr_picture("x" * (TEXT_LIMIT + 1)).why
    qr_in_terminal("x" * (TEXT_LIMIT + 1))
    assert "too long" in capsys.readouterr().out


def test_the_package_comes_with_the_program() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert any(each.startswith("segno") for each in project["dependencies"])
    assert "qr" not in project["optional-dependencies"], "pipx would leave it out"
