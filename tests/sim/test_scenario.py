"""What scenario files mean, and how faulty ones are refused."""

from pathlib import Path

import pytest

from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.sim.scenario.files import packaged_configs, read_scenario
from p2p_dtfm.sim.scenario.scenario import Scenario, load_scenario, parse_scenario

EXAMPLE = """name = "example"
[[group]]
name = "london"
count = 3
forward_tflops = 40.0
memory_gb = 16.0
uplink_mbps = 20.0
downlink_mbps = 200.0

[[group]]
name = "tokyo"
count = 2
measured = true

[[peer]]
name = "london-2"
forward_tflops = 10.0
link_cap_mbps = 100.0

[[link]]
from = "london"
to = "tokyo"
both = true
latency_ms = 105.0
bandwidth_mbps = 366.0

[[link]]
from = "london"
to = "london"
latency_ms = 1.5
bandwidth_mbps = 940.0

[[link]]
from = "tokyo-1"
to = "london"
latency_ms = 99.0
bandwidth_mbps = 8.0

[[link]]
from = "*"
to = "*"
latency_ms = 50.0
bandwidth_mbps = 16.0

[[fault]]
at_step = 5
kind = "kill"
peer = "london-1"
"""


def example() -> Scenario:
    return parse_scenario(EXAMPLE, "example.toml")


def refused(text: str) -> UserError:
    with pytest.raises(UserError) as caught:
        parse_scenario(text, "example.toml")
    return caught.value


def test_peers_are_named_after_their_group_and_carry_integers() -> None:
    scenario = example()
    assert [peer.name for peer in scenario.peers] == [
        "london-1", "london-2", "london-3", "tokyo-1", "tokyo-2",
    ]  # fmt: skip
    first = scenario.peer("london-1")
    assert first.forward_flops == 40_000_000_000_000
    assert first.memory_bytes == 16_000_000_000
    assert (first.uplink_bytes_per_s, first.downlink_bytes_per_s) == (2_500_000, 25_000_000)
    assert scenario.peer("london-2").forward_flops == 10_000_000_000_000
    assert scenario.peer("london-2").uplink_bytes_per_s == 2_500_000
    assert scenario.peer("tokyo-1").forward_flops is None
    assert scenario.faults[0].peer == "london-1"


def test_the_most_particular_link_counts() -> None:
    scenario = example()
    assert scenario.link("london-1", "tokyo-2").latency_ns == 105_000_000
    assert scenario.link("london-1", "tokyo-2").bytes_per_s == 45_750_000
    assert scenario.link("tokyo-2", "london-1").latency_ns == 105_000_000
    assert scenario.link("tokyo-1", "london-1").latency_ns == 99_000_000
    assert scenario.link("london-1", "london-3").latency_ns == 1_500_000
    assert scenario.link("tokyo-1", "tokyo-2").latency_ns == 50_000_000


def test_a_cap_holds_for_every_link_of_the_peer_in_both_directions() -> None:
    scenario = example()
    assert scenario.link("london-2", "tokyo-2").bytes_per_s == 12_500_000
    assert scenario.link("london-1", "london-2").bytes_per_s == 12_500_000
    assert scenario.link("tokyo-1", "london-2").bytes_per_s == 1_000_000


def test_link_efficiency_scales_rates_and_nothing_else() -> None:
    before, after = example(), example().with_link_efficiency(0.5)
    assert after.link("london-1", "tokyo-1").bytes_per_s == 22_875_000
    assert after.link("london-1", "tokyo-1").latency_ns == 105_000_000
    assert after.peer("london-1").uplink_bytes_per_s == 1_250_000
    assert after.peer("tokyo-1").uplink_bytes_per_s == 0
    assert after.peer("london-1").forward_flops == before.peer("london-1").forward_flops
    with pytest.raises(UserError, match="link efficiency"):
        before.with_link_efficiency(1.5)


@pytest.mark.parametrize(
    ("old", "new", "line", "words"),
    [
        ("uplink_mbps", "upink_mbps", 7, ["unknown key", "did you mean 'uplink_mbps'"]),
        ("count = 3\n", "", 2, ["count", "missing"]),
        ("count = 3", 'count = "many"', 4, ["must be a whole number"]),
        ("count = 3", "count = 0", 4, ["count: must be 1 or more"]),
        ("forward_tflops = 40.0", "forward_tflops = -1.0", 5, ["must be 0.000001 or more"]),
        ("measured = true", "memory_gb = 2.0", 10, ["forward_tflops or measured"]),
        ('name = "london-2"', 'name = "london-9"', 16, ["no peer is called 'london-9'"]),
        ('to = "tokyo"', 'to = "kyoto"', 22, ["no group or peer is called 'kyoto'"]),
        ('name = "tokyo"', 'name = "london"', 11, ["names two things"]),
        ('kind = "kill"', 'kind = "explode"', 47, ["'kill'"]),
        ('peer = "london-1"', 'peer = "rome-1"', 48, ["no peer is called 'rome-1'"]),
        (
            'kind = "kill"\n',
            'kind = "degrade"\nother = "tokyo-1"\n',
            48,
            ["only cut and corrupt have an 'other' end, not 'degrade'", "leave out 'other'"],
        ),
        ("latency_ms = 1.5\n", "", 27, ["latency_ms", "missing"]),
        ("[[fault]]", "[[falt]]", 45, ["unknown key 'falt'", "did you mean 'fault'"]),
        ("[[link]]", "[[link]", 20, ["not valid TOML"]),
    ],
)
def test_a_mistake_is_refused_with_its_line_and_the_fix(
    old: str, new: str, line: int, words: list[str]
) -> None:
    error = refused(EXAMPLE.replace(old, new, 1))
    assert f"example.toml:{line}: " in error.cause, error.cause
    assert error.fixes and all(error.fixes)
    for word in words:
        assert word in error.render(), error.render()


def test_two_mistakes_are_told_at_once() -> None:
    error = refused(EXAMPLE.replace("uplink_mbps", "upp").replace("count = 2", "count = -2"))
    assert "example.toml:7: " in error.cause
    assert "example.toml:12: " in error.cause
    assert len(error.fixes) == 2


def test_a_second_link_that_disagrees_is_refused_and_one_that_agrees_is_not() -> None:
    again = '\n[[link]]\nfrom = "tokyo"\nto = "london"\nlatency_ms = {}\nbandwidth_mbps = 366.0\n'
    assert "a second link from tokyo to london" in refused(EXAMPLE + again.format(7)).cause
    parse_scenario(EXAMPLE + again.format(105), "example.toml")


def test_a_missing_link_says_what_to_add() -> None:
    text = EXAMPLE.replace('from = "*"\nto = "*"', 'from = "tokyo-1"\nto = "tokyo-2"')
    scenario = parse_scenario(text, "example.toml")
    with pytest.raises(UserError) as caught:
        scenario.link("tokyo-2", "tokyo-1")
    assert caught.value.cause == "example.toml: no link from tokyo-2 to tokyo-1"
    assert 'from = "tokyo"' in caught.value.fixes[0]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('name = "x"\n[group]\nname = "a"\n', "write [[group]], with two brackets"),
        ('name = "x"\ngroup = [1]\n', "write [[group]] on a line of its own"),
        ('name = "x"\nlink = 5\n', "write [[link]], with two brackets"),
        (EXAMPLE + "[[workload]]\n", "write [workload]"),
        (f"name = {'[' * 5000}", "nested too deeply"),
    ],
)
def test_tables_of_the_wrong_kind_say_how_to_write_them(text: str, words: str) -> None:
    error = refused(text)
    assert words in error.render(), error.render()
    assert "tuple" not in error.render() and "instance" not in error.render()


def test_a_mark_that_editors_put_in_front_is_no_mistake(tmp_path: Path) -> None:
    path = tmp_path / "marked.toml"
    path.write_text(EXAMPLE, encoding="utf-8-sig")
    assert load_scenario(path).peers == example().peers


def test_an_unreadable_file_says_so(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read"):
        load_scenario(tmp_path / "none.toml")
    with pytest.raises(UserError, match="three-homes"):
        read_scenario("no-such-scenario")


@pytest.mark.parametrize("path", sorted((packaged_configs() / "scenarios").glob("*.toml")))
def test_packaged_scenarios_connect_everybody(path: Path) -> None:
    scenario = load_scenario(path)
    assert scenario.name == path.stem
    names = [peer.name for peer in scenario.peers]
    for origin in names:
        for to in names:
            if origin != to:
                assert scenario.link(origin, to).bytes_per_s > 0


def test_the_papers_networks_have_the_papers_figures() -> None:
    world = read_scenario("paper-5-world-wide")
    assert len(world.peers) == 64
    assert world.link("seoul-3", "london-8").latency_ns == 238_000_000
    assert world.link("london-8", "seoul-3").bytes_per_s == 42_750_000
    assert world.link("oregon-1", "oregon-8").latency_ns == 5_000_000
    as_run = read_scenario("paper-5-world-wide-as-run")
    assert as_run.link("oregon-1", "oregon-8").latency_ns == 10_000_000
    spot = read_scenario("paper-2-spot")
    assert spot.link("machine3-1", "machine3-4").bytes_per_s == 12_500_000_000
    assert spot.link("machine3-1", "single-7").bytes_per_s == 156_250_000
