"""What `benchmarks.agreement` makes of the swarms that it is asked for."""

import json
from pathlib import Path

import pytest

from benchmarks import agreement
from benchmarks.agreement import main, multiplied, with_real_ids
from p2p_dtfm.sim.scenario.files import read_scenario
from p2p_dtfm.sim.scenario.scenario import parse_scenario

LONELY = """
name = "lonely"
[[group]]
name = "office"
count = 1
forward_tflops = 1.0
[[group]]
name = "homes"
count = 3
forward_tflops = 1.0
[[link]]
from = "office"
to = "homes"
both = true
latency_ms = 20.0
bandwidth_mbps = 100.0
[[link]]
from = "homes"
to = "homes"
latency_ms = 10.0
bandwidth_mbps = 100.0
"""


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, object]]:
    assert main(list(arguments)) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_a_packaged_scenario_is_played_by_its_name_a_line_for_each_event(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found, join, verdict = printed(
        capsys, "--scenario", "three-homes", "--peers", "8", "--events", "join", "--json"
    )
    assert (found["event"], join["event"], verdict["met"]) == ("found", "join", True)
    assert 0 < float(str(found["round_trips"])) < 5


def test_ids_as_long_as_real_ones_take_more_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    few = ("--peers", "8", "--events", "join", "--json")
    short, *_ = printed(capsys, *few)
    long, *_ = printed(capsys, *few, "--real-ids")
    assert int(str(long["kib_each"])) > 1.2 * int(str(short["kib_each"]))
    assert long["peers"] == short["peers"]
    scenario = read_scenario("three-homes")
    real = with_real_ids(scenario)
    assert {len(peer.name) for peer in real.peers} == {52} and len(real.peers) == 6
    first, second = (peer.name for peer in real.peers[:2])
    assert real.link(first, second) == scenario.link("london-1", "london-2")


def test_a_crash_is_no_news_before_what_was_said_just_before_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Far away a dead peer's last words came after the end of its stream, and took that end back.
    Two of four noticed the crash three seconds later than the others, by silence."""
    *rows, verdict = printed(capsys, "--peers", "8", "--events", "leave,crash", "--json")
    assert [row["event"] for row in rows] == ["found", "leave", "crash"]
    assert verdict["met"] is True
    assert float(str(rows[-1]["round_trips"])) < 3


def test_too_few_peers_and_files_that_are_not_there_are_told(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for count in ("1", "2", "5", "7"):
        with pytest.raises(SystemExit) as ended:
            main(["--peers", count])
        assert ended.value.code == 2 and "8 or more" in capsys.readouterr().err
    assert main(["--scenario", "nowhere"]) == 2
    assert "there is no scenario 'nowhere'" in capsys.readouterr().err
    alone = tmp_path / "alone.toml"
    alone.write_text(LONELY.partition('\n[[group]]\nname = "homes"')[0])
    assert main(["--scenario", str(alone), "--peers", "8"]) == 2
    assert "cannot be multiplied" in capsys.readouterr().err


def test_groups_are_multiplied_that_say_how_their_peers_are_linked() -> None:
    lonely = multiplied(parse_scenario(LONELY, "lonely.toml"), 12)
    assert [peer.name for peer in lonely.peers][:2] == ["office-1", "homes-1"]
    groups = [peer.group for peer in lonely.peers]
    assert groups.count("office") == 1 and groups.count("homes") >= 11
    world = multiplied(read_scenario(agreement.SCENARIO), 200)
    groups = [peer.group for peer in world.peers]
    assert len(groups) == 256 and groups == sorted(groups, key=groups.index), "side by side"
    assert multiplied(world, 200) is world
