"""A packaged run spec is written as a file to change: a wheel has no folder of specs to copy
from."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from p2p_dtfm.cli.app import app
from p2p_dtfm.cli.commands.offline import spec as _registers  # noqa: F401  (its command)
from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.sim.scenario.files import packaged_configs, read_run_spec


def test_what_is_written_is_the_spec_with_its_remarks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["spec", "tiny", "--out", "my-run.toml"])
    assert done.exit_code == 0 and "p2p-dtfm --run my-run.toml" in done.output
    text = (packaged_configs() / "tiny.toml").read_text()
    assert Path("my-run.toml").read_text() == text and text.startswith("#")
    assert read_run_spec("my-run.toml") == read_run_spec("tiny")
    assert CliRunner().invoke(app, ["spec", "tiny"]).output == text
    again = CliRunner().invoke(app, ["spec", "tiny", "--out", "my-run.toml"])
    assert isinstance(again.exception, UserError) and "already" in again.exception.cause


def test_the_line_to_type_next_can_be_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my runs").mkdir()
    done = CliRunner().invoke(app, ["spec", "tiny", "--out", "my runs/a.toml"])
    assert "p2p-dtfm --run 'my runs/a.toml'" in done.output


def test_a_name_that_is_mistyped_is_told(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["spec", "tinny"])
    assert isinstance(done.exception, UserError)
    assert "did you mean tiny?" in done.exception.fixes[0]


def test_a_file_in_another_encoding_is_told(tmp_path: Path) -> None:
    """The command ended with a traceback."""
    (tmp_path / "old.toml").write_bytes("# für mich".encode("latin-1"))
    done = CliRunner().invoke(app, ["spec", str(tmp_path / "old.toml")])
    assert isinstance(done.exception, UserError)
    assert done.exception.fixes == ("write it in UTF-8",)
