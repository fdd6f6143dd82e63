"""`p2p-dtfm plan SCENARIO` as a person types it."""

import json
from xml.etree import ElementTree

import networkx
import pytest
from typer.testing import CliRunner, Result

from p2p_dtfm.cli.app import app
from p2p_dtfm.cli.commands import plan  # noqa: F401  (registers the command)
from p2p_dtfm.cli.commands import swarm as _swarm  # noqa: F401  (registers the commands)
from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.core.protocol.plan import LONGEST_STEP_NS
from tests.documentation.error_messages import heading_of


def typed(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["plan", *arguments])


def test_paper_cost_as_json() -> None:
    result = json.loads(typed("paper-3-two-sites", "--cost", "paper", "--json").stdout)
    assert set(result) == {
        "total_s", "data_parallel_s", "pipeline_s", "stages", "sizes", "elapsed_s", "snapshot",
        "plan",
    }  # fmt: skip
    assert abs(result["total_s"] / 16.08684 - 1) < 1e-4
    assert abs(result["total_s"] - result["data_parallel_s"] - result["pipeline_s"]) < 1e-9
    assert [len(group) for group in result["stages"]] == [8] * 8


def paper_cost(*arguments: str) -> dict:
    return json.loads(typed("paper-1-data-center", "--cost", "paper", *arguments, "--json").stdout)


def test_the_papers_cost_counts_the_run_that_is_asked_for() -> None:
    """Another depth, another batch and other stages each have their own bytes."""
    own = paper_cost()
    assert own["sizes"] == {
        "of": "paper",
        "gradient_bytes_per_stage": 650_000_000,
        "activation_bytes_per_link": 471_249_223,
    }
    assert paper_cost("--run", "paper") | {"elapsed_s": 0} == own | {"elapsed_s": 0}
    run = paper_cost("--run", "gpt3-xl")
    block, boundary = 12 * 2048**2 + 13 * 2048, 2048 * 2048
    assert run["sizes"]["of"] == "gpt3-xl"
    assert run["sizes"]["gradient_bytes_per_stage"] == 3 * 2 * block
    assert run["sizes"]["activation_bytes_per_link"] == 128 * 2 * boundary
    deep = paper_cost("--layers", "40", "--global-batch", "4096")
    assert deep["sizes"]["gradient_bytes_per_stage"] == 5 * 2 * block
    assert deep["sizes"]["activation_bytes_per_link"] == 512 * 2 * boundary
    assert run["total_s"] < own["total_s"] < deep["total_s"]  # fp16 gradients, the paper's are fp32


def test_fewer_stages_reduce_more_each() -> None:
    sizes = paper_cost("--stages", "4")["sizes"]
    assert sizes["gradient_bytes_per_stage"] == 2 * 650_000_000
    assert sizes["activation_bytes_per_link"] == -(-471_249_223 // 2)


def test_what_would_change_nothing_is_refused() -> None:
    failed = typed("paper-1-data-center", "--cost", "paper", "--run", "paper", "--layers", "40")
    assert isinstance(failed.exception, UserError)
    assert "--layers" in failed.exception.cause and "gpt3-xl" in failed.exception.fixes[0]
    for option in ("--stages", "--replicas"):
        told = refusal("plan", "three-homes", option, "3")
        assert told == f"{option} goes with --cost paper"
    told = refusal("peers", "--run-digest", "ab")
    assert told == "--run-digest goes with --initial-peers"


def refusal(*arguments: str) -> str:
    failed = CliRunner().invoke(app, arguments)
    assert isinstance(failed.exception, UserError), failed.output
    assert heading_of(failed.exception.cause), failed.exception.cause
    return failed.exception.cause


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
    longest_s = LONGEST_STEP_NS / 1e9  # a hundred days or more is told as that
    assert result["seconds_per_step"] == longest_s


def test_a_grid_that_does_not_fit_names_the_fix() -> None:
    failed = typed("paper-3-two-sites", "--cost", "paper", "--stages", "7")
    assert isinstance(failed.exception, UserError)
    assert "--stages" in str(failed.exception)


def test_a_scenario_as_a_graph_for_other_programs(tmp_path) -> None:
    path = tmp_path / "swarm.graphml"
    made = json.loads(
        typed("three-homes", "--run", "tiny", "--graphml", str(path), "--json").stdout
    )
    graph = networkx.read_graphml(path)
    assert len(graph) == made["peers"]
    placed = {peer for peer, facts in graph.nodes(data=True) if not facts["spare"]}
    assert placed == {s["peer"] for p in made["pipelines"] for s in p["stages"]}
    assert all(facts["mbit_per_s"] > 0 for _, _, facts in graph.edges(data=True))


def test_the_two_levels_of_the_papers_problem_are_drawn_for_any_scenario(tmp_path) -> None:
    path = tmp_path / "levels.svg"
    typed(
        "three-homes", "--cost", "paper", "--run", "tiny", "--stages", "3", "--svg", str(path)
    )  # fmt: skip
    drawn = path.read_text()
    ElementTree.fromstring(drawn)
    assert "3 groups of 2" in drawn and "london-1" in drawn
    failed = typed("three-homes", "--cost", "paper", "--stages", "3", "--html", str(path))
    assert isinstance(failed.exception, UserError)


@pytest.mark.parametrize(
    "given",
    [("--html", "x.html"), ("--what-if", "+1 london"), ("--run", "tiny"), ("--cost", "paper")],
)
def test_what_needs_a_scenario_is_not_lost_without_one(given: tuple[str, str]) -> None:
    done = typed(*given)
    assert isinstance(done.exception, UserError)
    assert done.exception.cause == f"{given[0]} goes with a scenario, and none is named"


def test_a_short_step_is_not_said_to_take_no_time() -> None:
    """founder.md has `tiny` planned, whose steps take such machines a tenth of a millisecond."""
    assert " ms a step, " in typed("three-homes", "--run", "tiny").stdout
