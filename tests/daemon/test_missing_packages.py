"""What to type where a package is missing works where the program itself was installed."""

import sys
from pathlib import Path

import pytest

from p2p_dtfm.ports.packages import how_to_install


def test_beside_the_program_with_its_own_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/home/ada/a clone/.venv/bin/python")
    monkeypatch.setattr(sys, "prefix", "/home/ada/a clone/.venv")
    line = "'/home/ada/a clone/.venv/bin/python' -m pip install pyarrow"
    assert how_to_install("pyarrow") == line


def test_by_pipx_where_pipx_has_installed_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`pip` is then no command of the environment's, or another environment's."""
    place = tmp_path / "p2p-dtfm"
    place.mkdir()
    (place / "pipx_metadata.json").write_text("{}")
    monkeypatch.setattr(sys, "prefix", str(place))
    assert how_to_install("pyarrow") == "pipx inject p2p-dtfm pyarrow"
