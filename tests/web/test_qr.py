"""The picture of a line: what segno made, module by module."""

import re
import sys

import pytest

from p2p_dtfm.web.qr import QUIET_ZONE, TEXT_LIMIT, qr_picture

LINE = "p2p-dtfm --invite p2pi1-" + "aB3-_" * 50


def test_the_path_draws_each_dark_module_once() -> None:
    segno = pytest.importorskip("segno")
    rows = segno.make(LINE, error="l", micro=False).matrix
    dark = {
        (int(x) + at - QUIET_ZONE, int(y) - QUIET_ZONE)
        for x, y, length in re.findall(r"M(\d+) (\d+)h(\d+)v1h-\3z", qr_picture(LINE).path)
        for at in range(int(length))
    }
    assert dark == {(x, y) for y, row in enumerate(rows) for x, value in enumerate(row) if value}
    assert qr_picture(LINE).size == len(rows) + 2 * QUIET_ZONE


def test_without_the_package_or_of_too_much_there_is_a_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert "too long" in qr_picture("x" * (TEXT_LIMIT + 1)).why
    monkeypatch.setitem(sys.modules, "segno", None)
    picture = qr_picture.__wrapped__("another line")
    assert not picture.path and "pip install segno" in picture.why
