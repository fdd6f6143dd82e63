"""Text on disk for the tests of the data package."""

from pathlib import Path

import pytest
from data_examples import make_text


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """A directory of 40 text files of about 850 bytes, each of them one piece."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(40):
        (folder / f"{number:02}.txt").write_text(make_text(800, number), encoding="utf-8")
    return folder
