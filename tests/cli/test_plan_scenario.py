"""`p2p-dtfm plan SCENARIO` as a person types it."""

import json

import pytest
from typer.testing import CliRunner, Result

from p2p_dtfm.cli.app import app
from p2p_dtfm.cli.commands import plan  # noqa: F401  (registers the command)
from p2p_dtfm.core.protocol.errors import UserError


def typed(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["plan", *arguments])


def test_paper_cost_as_json() -> None:
    result = json.loads(typed("paper-3-two-sites", "--cost", "paper", "--json").stdout)
    assert set(result) == {
        "total_s", "data_parallel_s", "pipeline_s", "stages", "elapsed_s", "snapshot", "plan",
    }  # fmt: skip
    assert abs(result["total_s"] / 16.08684 - 1) < 1e-4
    assert abs(result["total_s"] - result["data_parallel_s"] - result["pipeline_s"]) < 1e-9
    assert [len(group) for group in result["stages"]] == [8] * 8


def test_step_cost_explained_with_what_if_and_pictures(tmp_path) -> None:
    svg, html = tmp_path / "map.svg", tmp_path / "map.html"
    done = typed(
        "three-homes", "--run", "tiny", "--what-if", "+1 london", "--explain", "--json",
        "--svg", str(svg), "--html", str(html),
    )  # fmt: skip
    result = json.loads(done.stdout)
    peers = {peer["peer_id"] for peer in result["explanation"]["peers"]}
    assert "london-3" in peers
    assert result["before"]["seconds_per_step"] > 0
    assert svg.read_text().startswith("<svg") and "london-3" in html.read_text()


def test_six_homes_help_one_another_where_their_uplinks_carry_little() -> None:
    alone = "-london, -berlin, -tokyo-2"
    result = json.loads(
        typed("three-homes", "--run", "gpt2-small-homes", "--what-if", alone, "--json").stdout
    )
    swarm = result["before"]
    assert swarm["spares"] == [] and len(swarm["pipelines"]) == 6
    assert swarm["tokens_per_s"] >= 3 * result["tokens_per_s"], "3.6 times, predicted"


def test_the_same_question_has_the_same_answer() -> None:
    first, second = (
        json.loads(typed("three-homes", "--run", "tiny", "--json").stdout) for _ in range(2)
    )
    assert (first["snapshot"], first["plan"]) == (second["snapshot"], second["plan"])


def test_a_change_that_changes_nothing_is_told_so_and_one_that_says_nothing_is_refused() -> None:
    done = typed("three-homes", "--run", "tiny", "--what-if", "+1 london")
    assert "% longer" in done.stdout or "% shorter" in done.stdout or "as long as" in done.stdout
    assert "0.0%" not in done.stdout
    for nothing in ("", "+0 tokyo", "+1 tokyo,"):
        failed = typed("three-homes", "--run", "tiny", "--what-if", nothing)
        assert isinstance(failed.exception, UserError) and failed.exception.fixes


@pytest.mark.parametrize("option", ["--svg", "--html"])
def test_a_picture_that_cannot_be_written_is_told_before_planning(tmp_path, option: str) -> None:
    for path, words in ((tmp_path, "is a directory"), (tmp_path / "no" / "map", "no directory")):
        failed = typed("three-homes", "--run", "tiny", option, str(path))
        assert isinstance(failed.exception, UserError)
        assert words in failed.exception.cause


def test_a_swarm_too_slow_for_any_clock_is_planned_all_the_same(tmp_path) -> None:
    path = tmp_path / "slow.toml"
    path.write_text(
        'name = "slow"\n[[group]]\nname = "a"\ncount = 1\nforward_tflops = 1e-6\nmemory_gb = 80\n'
    )
    result = json.loads(
        typed(str(path), "--run", "gpt3-xl", "--global-batch", "16000000", "--json").stdout
    )
    assert result["seconds_per_step"] > 1e9


def test_a_grid_that_does_not_fit_names_the_fix() -> None:
    failed = typed("paper-3-two-sites", "--cost", "paper", "--stages", "7")
    assert isinstance(failed.exception, UserError)
    assert "--stages" in str(failed.exception)
