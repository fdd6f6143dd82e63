"""Steps that somebody else has measured, beside what is simulated: `reproduce --rows FILE`."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from p2p_dtfm.cli.app import app
from p2p_dtfm.cli.commands.offline import reproduce  # noqa: F401  (registers the command)
from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.sim.reproduction.swarm.own_rows import read_own_rows
from tests.sim.test_simulate_command import call_json
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


def test_each_row_is_simulated_as_its_command_simulates_it(tmp_path: Path) -> None:
    rows, out = written(tmp_path, ROWS), tmp_path / "page"
    words = ["reproduce", "--quick", "--out", str(out), "--rows", str(rows), "--json"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    bars = [bar for bar in told["bars"] if bar["chart"] == "own"]
    assert [bar["system"] for bar in bars] == [
        "by hand", "by hand, simulated", "DT-FM scheduled", "DT-FM scheduled, simulated",
    ]  # fmt: skip
    assert [bar["kind"] for bar in bars] == ["measured here", "simulated"] * 2
    assert bars[0]["seconds"] == 100 and bars[0]["source"].startswith("two rented machines")
    for bar in bars[1::2]:
        again = call_json(*bar["source"].split()[2:])
        assert again["seconds_per_step"] == pytest.approx(bar["seconds"], rel=1e-9)
    found = told["facts"]["own_rows_simulated_against_measured"]
    pairs = zip(bars[::2], bars[1::2], strict=True)
    errors = sorted(abs(other["seconds"] / row["seconds"] - 1) for row, other in pairs)
    assert found["rows"] == 2 and found["worst"] == pytest.approx(errors[-1])
    paper = told["facts"]["dtfm_simulated_against_published"]["all"]
    assert paper["rows"] == 90, "rows of one's own do not count among the paper's"
    page = (out / "index.html").read_text()
    assert "Rows of your own" in page and "two rented machines" in page


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
