"""`p2p-dtfm simulate` as a person or a script calls it."""

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from p2p_dtfm.cli.commands.simulate import simulate
from p2p_dtfm.core.protocol.errors import UserError


def call(*arguments: str) -> str:
    app = typer.Typer()
    app.command()(simulate)
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def call_json(*arguments: str) -> dict:
    return json.loads(call(*arguments, "--json"))


def test_a_row_of_the_paper_in_one_command() -> None:
    found = call_json(
        "paper-1-data-center", "--run", "gpt3-xl", "--layers", "24", "--global-batch", "1024",
        "--plan", "dtfm", "--execution", "dtfm",
    )  # fmt: skip
    assert found["seconds_per_step"] == pytest.approx(10.14, rel=0.2)
    assert sum(found["parts"].values()) == pytest.approx(found["seconds_per_step"])
    assert found["sequences"] == 1024


def test_random_is_the_median_of_three() -> None:
    found = call_json(
        "paper-3-two-sites", "--run", "gpt3-xl", "--plan", "random", "--execution", "dtfm"
    )
    assert len(found["runs_s"]) == 3
    assert found["seconds_per_step"] == sorted(found["runs_s"])[1]


def test_our_plan_the_trace_and_the_table(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    arguments = ("three-homes", "--run", "tiny", "--trace", str(trace))
    found = call_json(*arguments)
    assert found["plan_name"] == "ours"
    assert found["seconds_per_step"] > 0
    assert json.loads(trace.read_text())["traceEvents"]
    table = call(*arguments)
    assert f"{1000 * found['seconds_per_step']:.2f} ms per step" in table
    assert f"{1000 * found['parts']['compute_s']:.2f} ms computing" in table, "not 0.00 s"


def test_a_runs_codecs_count_unless_others_are_asked_for() -> None:
    common = ("three-homes", "--run", "gpt2-small", "--plan", "region", "--stages", "1")
    plain, sparse, half = (
        call_json(*common, *more) for more in ((), ("--codec", "sparse"), ("--codec", "fp16"))
    )
    plain_bytes = plain["reductions"][0]["bytes"]
    assert half["reductions"][0]["bytes"] == plain_bytes // 2
    assert 100 < plain_bytes / sparse["reductions"][0]["bytes"] < 200


def test_recomputing_costs_time_and_saves_memory() -> None:
    common = (
        "paper-1-data-center",
        "--run",
        "gpt3-xl",
        "--plan",
        "region",
        "--global-batch",
        "512",
    )
    more = call_json(*common, "--recompute")["parts"]["compute_s"]
    less = call_json(*common, "--no-recompute")["parts"]["compute_s"]
    assert more == pytest.approx(less * 4 / 3, rel=1e-3)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("nowhere", "--run", "tiny"), "three-homes"),
        (("three-homes", "--run", "nothing"), "gpt3-xl"),
        (("three-homes", "--run", "tiny", "--codec", "int3"), "fp16"),
        (("three-homes", "--run", "tiny", "--reduction", "magic"), "weighted"),
        (("three-homes", "--run", "tiny", "--link-efficiency", "0"), "0.85"),
        (("three-homes", "--run", "tiny", "--layers", "0"), "model.layers"),
        (("three-homes", "--run", "tiny", "--plan", "paper", "--stages", "4"), "stages"),
        (("three-homes", "--run", "tiny", "--stages", "3"), "--stages goes with --plan paper"),
        (("three-homes", "--run", "gpt3-xl", "--plan", "region", "--stages", "1"), "--stages"),
    ],
)
def test_bad_input_is_told_with_its_fix(arguments: tuple[str, ...], words: str) -> None:
    with pytest.raises(UserError) as caught:
        call(*arguments)
    assert words in caught.value.render()
    assert caught.value.fixes
