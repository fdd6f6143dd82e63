"""A scenario's own page: the paper's charts for any swarm."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from p2p_dtfm.cli.app import app
from p2p_dtfm.cli.commands import plan  # noqa: F401  (registers the command)
from p2p_dtfm.sim.reproduction.bars import FigureKind
from p2p_dtfm.sim.reproduction.swarm import swarm_bars
from tests.programs import skip_without
from tests.sim.test_simulate_command import call_json
from tests.web import chromium as browser
from tests.web.chromium import Page

SCENARIO = """
name = "four-rented"
[[group]]
name = "near"
count = 2
forward_tflops = 20.0
price_per_hour = 2.0
[[group]]
name = "far"
count = 2
forward_tflops = 10.0
price_per_hour = 0.4
uplink_mbps = 200.0
[[link]]
from = "near"
to = "near"
latency_ms = 0.1
bandwidth_mbps = 10000.0
[[link]]
from = "*"
to = "*"
latency_ms = 20.0
bandwidth_mbps = 500.0
"""
KINDS = {kind.value for kind in FigureKind}


def typed(*arguments: str) -> dict:
    done = CliRunner().invoke(app, ["plan", *arguments, "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict]]:
    """The page of a user's own scenario, and its bars."""
    folder = tmp_path_factory.mktemp("swarm")
    own = folder / "own.toml"
    own.write_text(SCENARIO)
    page = folder / "page.html"
    return page, typed(str(own), "--run", "gpt2-small", "--html", str(page))["bars"]


def bars_of(made: tuple[Path, list[dict]], chart: str) -> dict[str, dict]:
    return {bar["system"]: bar for bar in made[1] if bar["chart"] == chart}


def test_every_bar_says_what_it_is_and_how_to_get_it_again(made: tuple[Path, list[dict]]) -> None:
    assert {bar["chart"] for bar in made[1]} == {"step", "parts", "changes", "prices"}
    for bar in made[1]:
        assert bar["kind"] in KINDS and bar["source"].startswith("p2p-dtfm "), bar
    page = made[0].read_text()
    rows = len(re.findall(r'class="(?:bar|parts)(?: own| all)?"', page))
    assert rows == sum(page.count(f'data-kind="{kind}"') for kind in KINDS) > 20


def test_where_it_goes_adds_up_to_the_step(made: tuple[Path, list[dict]]) -> None:
    step_s = bars_of(made, "step")["ours"]["seconds"]
    parts: dict[str, float] = {}
    for name, bar in bars_of(made, "parts").items():
        peer = name.split(": ")[0]
        parts[peer] = parts.get(peer, 0.0) + bar["seconds"]
    assert "all, on average" in parts and "near-1" in parts
    assert list(parts.values()) == pytest.approx([step_s] * len(parts))


def test_the_command_beside_a_bar_gives_its_figure(made: tuple[Path, list[dict]]) -> None:
    """Each command that `simulate` can play is run, typed as it stands there."""
    played = 0
    for bar in bars_of(made, "step").values():
        words = bar["source"].split()
        if words[1] == "simulate":
            found = call_json(*words[2:])
            assert found["seconds_per_step"] == pytest.approx(bar["seconds"], rel=1e-9), bar
            played += 1
    assert played == 4


def test_changes_are_beside_the_step_as_it_is(made: tuple[Path, list[dict]]) -> None:
    changes = bars_of(made, "changes")
    before = changes["as it is"]["seconds"]
    assert changes["all devices twice as fast"]["seconds"] < before
    assert {"one more peer in near", "one more peer in far", "all lines twice as fast"} < set(
        changes
    )
    assert any("int8" in name for name in changes)


def test_prices_are_of_everybody_and_of_each_price(made: tuple[Path, list[dict]]) -> None:
    prices = bars_of(made, "prices")
    assert len(prices) == 4
    best = prices["those worth their price"]["tokens_per_dollar"]
    assert best >= 0.98 * max(bar["tokens_per_dollar"] for bar in prices.values())
    own = prices["near ($2 an hour)"]
    assert own["price_per_hour"] <= 4.0 and own["peers"] <= 2


def test_a_large_swarm_keeps_its_plan_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(swarm_bars, "PEERS_LIMIT", 9)  # seventy take a minute
    monkeypatch.setattr(swarm_bars, "REPLANNED_LIMIT", 9)
    many = SCENARIO.replace("count = 2", "count = 5").replace("price_per_hour", "# price")
    (tmp_path / "many.toml").write_text(many)
    page = tmp_path / "page.html"
    found = typed(str(tmp_path / "many.toml"), "--run", "tiny", "--html", str(page))["bars"]
    changes = [bar for bar in found if bar["chart"] == "changes"]
    assert {bar["kind"] for bar in changes} == {"simulated"}
    assert any(bar["system"] == "all lines twice as fast, same plan" for bar in changes)
    assert "played with the plan as it is" in page.read_text()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browser.chromium(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@skip_without("browser", "" if browser.PROGRAM else "no Chromium here: apt-get install chromium")
@pytest.mark.parametrize("width", [1440, 390])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_it_fits_a_phone_and_a_desk(
    made: tuple[Path, list[dict]], page: Page, width: int, dark: bool
) -> None:
    page.problems.clear()
    page.set_view(width, 900, dark=dark)
    page.open(made[0].as_uri())
    page.wait_for("document.readyState == 'complete' && document.querySelector('.parts')")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    shown = page.evaluate(
        "[...document.querySelectorAll('svg')].filter(s => s.getBoundingClientRect().width > 0)"
        ".map(s => s.getAttribute('class'))"
    )
    assert shown == (["phone"] if width < 600 else ["wide"])
    inside = page.evaluate(
        "[...document.querySelectorAll('.bar em, .parts em')].every(e => "
        "e.getBoundingClientRect().right <= innerWidth && e.scrollWidth <= e.clientWidth + 1)"
    )
    assert inside and page.problems == []


def test_a_single_peer_has_a_page_on_which_all_placements_are_alike(tmp_path: Path) -> None:
    """The peer names no link, and no placement loses by recomputing what another placement need
    not."""
    own = tmp_path / "own.toml"
    own.write_text('name = "one"\n[[group]]\nname = "a"\ncount = 1\nforward_tflops = 0.5\n')
    bars = typed(str(own), "--run", "gpt2-small", "--html", str(tmp_path / "page.html"))["bars"]
    steps = {bar["system"]: bar["seconds"] for bar in bars if bar["chart"] == "step"}
    for name in ("region order", "random order", "optimum of DT-FM's cost"):
        assert steps[name] == pytest.approx(steps["ours"]), name
    changes = {bar["system"] for bar in bars if bar["chart"] == "changes"}
    assert "all devices twice as fast" in changes
    assert not any(name.startswith("one more peer") for name in changes)


def test_a_scenario_without_groups_is_told_what_a_group_is(tmp_path: Path) -> None:
    own = tmp_path / "own.toml"
    own.write_text('name = "none"\n[[peer]]\nname = "a"\nforward_tflops = 0.5\n')
    done = CliRunner().invoke(app, ["plan", str(own), "--run", "gpt2-small"])
    assert done.exit_code != 0
    assert "there is no [[group]], so there are no peers" in str(done.exception)
