"""The page of the paper's claims: every bar has a kind and a source, and what it says is true."""

import itertools
import json
import random
from collections.abc import Iterator

import networkx
import pytest
from typer.testing import CliRunner

from p2p_dtfm.cli.app import app
from p2p_dtfm.cli.commands.offline import reproduce  # noqa: F401  (registers the command)
from p2p_dtfm.sim.paper.cost import matching, paper_plan, path_ns, shortest_path
from p2p_dtfm.sim.paper.evaluation import Evaluator, shortest_path_ns
from p2p_dtfm.sim.paper.evolution import evolve
from p2p_dtfm.sim.paper.published import published_rows
from p2p_dtfm.sim.reproduction.bars import FigureKind
from p2p_dtfm.sim.reproduction.convergence import case_problem, shuffled
from p2p_dtfm.sim.reproduction.story import REACHED
from tests.programs import skip_without
from tests.sim.test_own_rows import ROWS, written
from tests.sim.test_paper_solver import random_problem
from tests.sim.test_simulate_command import call_json
from tests.web import chromium as browser
from tests.web.chromium import Page

SHAPES = set(itertools.product((24, 32, 40), (1024, 2048, 4096)))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory):
    """A quick run of the command, with rows of the user's own. Returns its directory, and what it
    printed as JSON."""
    folder = tmp_path_factory.mktemp("paper")
    rows, out = written(folder, ROWS), folder / "page"
    words = ["reproduce", "--quick", "--out", str(out), "--rows", str(rows), "--json"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    return out, json.loads(done.stdout)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browser.chromium(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@skip_without("browser", "" if browser.PROGRAM else "no Chromium here: apt-get install chromium")
@pytest.mark.parametrize("width", [1440, 390])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_the_page_is_whole_and_nothing_sticks_out(made, page: Page, width: int, dark: bool) -> None:
    page.problems.clear()
    page.set_view(width, 900, dark=dark)
    page.open((made[0] / "index.html").as_uri())
    page.wait_for("document.readyState == 'complete' && document.querySelector('#claim')")
    assert page.evaluate("document.querySelectorAll('.bar').length") > 450
    assert page.evaluate("document.querySelectorAll('.bar:not([data-kind])').length") == 0
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    numbers = [int(part) for part in background.strip("rgb()").split(",")]
    assert (sum(numbers) < 200) == dark
    assert page.problems == []


def test_every_bar_and_curve_has_its_kind_and_its_source(made) -> None:
    out, told = made
    assert json.loads((out / "bars.json").read_text()) == told
    kinds = {kind.value for kind in FigureKind}
    for each in [*told["bars"], *told["curves"]]:
        assert each["kind"] in kinds and each["source"].strip()
    page = (out / "index.html").read_text()
    marked = page.count('<div class="bar')
    assert marked and marked == sum(page.count(f'data-kind="{kind}"') for kind in kinds)


def test_published_bars_are_the_published_rows_and_nothing_else(made) -> None:
    bars = [bar for bar in made[1]["bars"] if bar["kind"] == "published"]
    rows = {(r.case, r.layers, r.batch, r.system): r.measured_s for r in published_rows()}
    assert {(b["case"], b["layers"], b["batch"], b["system"]): b["seconds"] for b in bars} == rows
    for case in "12345":
        for system in ("DT-FM scheduled, simulated", "DT-FM random, simulated", "ours"):
            shapes = {
                (bar["layers"], bar["batch"])
                for bar in made[1]["bars"]
                if (bar["case"], bar["system"], bar["chart"]) == (case, system, "table")
            }
            assert shapes == SHAPES


def test_simulated_rows_are_as_near_to_the_published_ones_as_is_said(made) -> None:
    found = made[1]["facts"]["dtfm_simulated_against_published"]["all"]
    assert found["rows"] == 90
    assert found["median"] <= 0.08 and found["worst"] <= 0.20


def test_each_row_of_ones_own_is_simulated_as_its_command_simulates_it(made) -> None:
    out, told = made
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


def test_the_claim_says_what_the_times_are_against(made) -> None:
    claim = made[1]["facts"]["claim"]
    assert "4.77 times" in claim and "1.5 to 3.0" in claim
    assert claim in (made[0] / "index.html").read_text()


def simulated_again(bar: dict) -> float:
    words = bar["source"].split()
    assert words[:2] == ["p2p-dtfm", "simulate"], bar
    return call_json(*words[2:])["seconds_per_step"]


def bar_of(made, chart: str, case: str, system: str) -> dict:
    (found,) = (
        bar
        for bar in made[1]["bars"]
        if (bar["chart"], bar["case"], bar["system"]) == (chart, case, system)
        and (bar["layers"], bar["batch"]) == (24, 1024)
    )
    return found


@pytest.mark.parametrize(
    ("chart", "case", "system"),
    [
        ("table", "3", "DT-FM scheduled, simulated"),
        ("table", "2", "DT-FM random, simulated"),
        ("scheduler", "5", "region order"),
        ("scheduler", "2", "optimum of DT-FM's cost"),
    ],
)
def test_the_command_of_a_bar_gives_the_same_figure(
    made, chart: str, case: str, system: str
) -> None:
    """This also holds for rows that come along cached."""
    bar = bar_of(made, chart, case, system)
    assert simulated_again(bar) == pytest.approx(bar["seconds"], rel=1e-6)


@pytest.mark.nightly
@pytest.mark.parametrize("case", ["1", "5"])
def test_the_command_of_our_own_bars_gives_the_same_figure(made, case: str) -> None:
    bar = bar_of(made, "table", case, "ours")
    assert simulated_again(bar) == pytest.approx(bar["seconds"], rel=1e-6)


def test_prices_are_of_the_spot_market_and_on_demand(made) -> None:
    bars = {bar["system"]: bar for bar in made[1]["bars"] if bar["chart"] == "prices"}
    assert {bar["kind"] for bar in bars.values()} == {"predicted"}
    spot, demand = (
        next(bar for name, bar in bars.items() if name.startswith(word))
        for word in ("spot", "on-demand")
    )
    assert spot["tokens_per_dollar"] > demand["tokens_per_dollar"] > 0
    for bar in bars.values():
        assert bar["source"].startswith("p2p-dtfm plan spot-and-on-demand --run gpt3-xl")
        tokens = 1024 * 2048 * 3600 / bar["seconds"] / bar["price_per_hour"]
        assert bar["tokens_per_dollar"] == pytest.approx(tokens, rel=1e-6)
    assert "What a dollar buys" in (made[0] / "index.html").read_text()


def test_the_two_levels_that_come_along_are_the_solvers(made) -> None:
    """Groups are cached, since without a compiler they take minutes; their costs are not cached."""
    for case, best_s in made[1]["facts"]["best_known_s"].items():
        groups = tuple(map(tuple, made[1]["levels"][case]))
        assert paper_plan(case_problem(case), groups).total_ns / 1e9 <= best_s * REACHED


def test_the_page_needs_nothing_but_itself(made) -> None:
    page = (made[0] / "index.html").read_text()
    elsewhere = page.replace("http://www.w3.org/2000/svg", "")
    assert "http:" not in elsewhere and "https:" not in elsewhere and "<script" not in elsewhere
    for drawing in made[0].glob("*.svg"):
        assert drawing.read_text().startswith("<svg")


def test_the_evolutionary_algorithm_reaches_known_optima_and_its_distance_is_shown(made) -> None:
    reached = made[1]["facts"]["reached"]
    for case in "1345":
        found = reached[case]["evolutionary algorithm"]
        assert found["seeds"] == 5 and found["worst_above"] >= found["median_above"] >= 0
        other = reached[case]["the same with Kernighan-Lin"]
        assert found["reached"] + other["reached"] > 0, case
    assert reached["2"]["ours"]["reached"] == 5


def test_evolution_balances_groups_and_comes_down() -> None:
    problem = random_problem(3, 4, 3)
    for search in ("circular", "kernighan-lin"):
        found = evolve(problem, search, 0, 120)
        totals = [each.total_ns for each in found]
        assert totals == sorted(totals, reverse=True) and totals[-1] < totals[0]
        assert 120 <= found[-1].evaluations <= 122


def test_costs_are_those_that_the_solver_counts() -> None:
    """Groups in any order and by kinds cost what the plain way of counting gives."""
    for seed in range(4):
        problem = random_problem(seed, 5, 2)
        judge = Evaluator(problem)
        peers = list(range(10))
        for _ in range(6):
            random.Random(seed).shuffle(peers)
            groups = tuple(tuple(peers[at : at + 2]) for at in range(0, 10, 2))
            assert judge.total_ns(groups) == paper_plan(problem, groups).total_ns
    case = case_problem("5")
    groups = tuple(tuple(range(at, 64, 8)) for at in range(8))
    expected = paper_plan(case, groups).total_ns
    assert Evaluator(case).total_ns(groups) == expected
    assert expected / 1e9 <= 49.21838 * REACHED


def test_matching_and_path_agree_with_networkx() -> None:
    """networkx finds the bottleneck by maximum matchings under a limit, and the path by trying all
    paths in its graph."""
    for seed in range(6):
        problem = random_problem(seed, 4, 4)
        stages = tuple(tuple(range(at, at + 4)) for at in range(0, 16, 4))
        edges = [[0] * 4 for _ in stages]
        for a, b in itertools.combinations(range(4), 2):
            edges[a][b] = edges[b][a] = _bottleneck_ns(problem, stages[a], stages[b])
            assert matching(problem, stages[a], stages[b])[0] == edges[a][b]
        graph = networkx.complete_graph(4)
        shortest = min(
            sum(edges[a][b] for a, b in itertools.pairwise(path))
            for start, end in itertools.permutations(graph, 2)
            for path in networkx.all_simple_paths(graph, start, end)
            if len(path) == 4
        )
        assert path_ns(problem, shortest_path(problem, stages)) == shortest
        assert shortest_path_ns(edges) == shortest


def _bottleneck_ns(problem, left, right) -> int:
    lengths = {(a, b): problem.pipeline_ns[a * problem.peer_count + b] for a in left for b in right}
    for limit in sorted(lengths.values()):
        graph = networkx.Graph()
        graph.add_nodes_from(left + right)
        graph.add_edges_from(pair for pair, length in lengths.items() if length <= limit)
        found = networkx.bipartite.maximum_matching(graph, top_nodes=left)
        if len(found) == 2 * len(left):
            return limit
    raise AssertionError("no perfect matching")


def test_other_orders_of_the_same_peers_are_the_same_problem() -> None:
    problem = random_problem(2, 3, 2)
    other = shuffled(problem, 1)
    assert sorted(other.pipeline_ns) == sorted(problem.pipeline_ns)
    assert other.peer_ids != problem.peer_ids and set(other.peer_ids) == set(problem.peer_ids)
    at = {name: number for number, name in enumerate(other.peer_ids)}
    for a, b in itertools.permutations(range(6), 2):
        there = at[problem.peer_ids[a]] * 6 + at[problem.peer_ids[b]]
        assert other.pipeline_ns[there] == problem.pipeline_ns[a * 6 + b]
