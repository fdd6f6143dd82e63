"""What tests with real daemons, and of the command line, share."""

import argparse
import sys
from pathlib import Path

import pytest

from p2p_dtfm.cli import main
from p2p_dtfm.train.data import prepare
from tests.e2e.helpers import Program, assert_errors_are_explained


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Program:
    """(exit code, stdout, stderr) of the program, run in this process, which has loaded torch."""

    def run(*arguments: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["p2p-dtfm", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        code = ended.value.code
        said, told = capsys.readouterr()
        assert_errors_are_explained(told)
        return code if isinstance(code, int) else 0, said, told

    return run


@pytest.fixture(scope="session")
def prepared_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small corpus, in a few shards."""
    directory = tmp_path_factory.mktemp("data")
    text = Path(argparse.__file__).read_text()
    (directory / "text.py").write_text(text)
    out = directory / "prepared"
    notes = {"name": "one module", "licence": "PSF-2.0", "source": "https://python.org"}
    prepare([directory / "text.py"], out, context=32, shard_tokens=40_000, **notes)
    return out
