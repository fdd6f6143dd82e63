"""Steps that somebody else has measured, beside simulated ones: `reproduce --rows FILE`. What comes
of them is seen on the page of `test_reproduction.py`."""

from pathlib import Path

import pytest

from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.sim.reproduction.swarm.own_rows import read_own_rows
from tests.sim.test_swarm_page import SCENARIO

ROWS = """
source = "two rented machines and two at home, May"

[[row]]
scenario = "own.toml"
run = "gpt2-small"
execution = "ours"
plan = "region"
stages = 2
system = "by hand"
seconds = 100.0

[[row]]
scenario = "paper-1-data-center"
layers = 24
global_batch = 1024
plan = "dtfm"
system = "DT-FM scheduled"
seconds = 10.14
"""


def written(folder: Path, rows: str) -> Path:
    (folder / "own.toml").write_text(SCENARIO)
    path = folder / "rows.toml"
    path.write_text(rows)
    return path


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ("seconds = 100.0", "seconds"),
        ('system = "by hand"', "system"),
        ('plan = "region"', "plan"),
    ],
)
def test_a_wrong_row_is_named(tmp_path: Path, wrong: str, told: str) -> None:
    key = wrong.split(" = ")[0]
    path = written(tmp_path, ROWS.replace(wrong, f"{key} = -1", 1))
    with pytest.raises(UserError) as refused:
        read_own_rows(path)
    assert f"row.1.{told}" in refused.value.cause and refused.value.fixes


def test_what_is_no_file_of_rows_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none.toml", written(tmp_path, "row = [")):
        with pytest.raises(UserError):
            read_own_rows(path)
    with pytest.raises(UserError) as refused:
        read_own_rows(written(tmp_path, 'row = []\nsource = "x"'))
    assert "row" in refused.value.cause
