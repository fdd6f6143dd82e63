"""A scenario file becomes identities, arguments and one shape file."""

from dataclasses import replace
from pathlib import Path

import pytest

from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.daemon.machine.home import Home
from p2p_dtfm.daemon.machine.settings import Settings
from p2p_dtfm.net.contacts.identity import Identity
from p2p_dtfm.net.shaping import Shape, Shaper
from p2p_dtfm.sim.scenario.files import read_scenario
from p2p_dtfm.testbed.scenario_swarm import PLAYERS_LIMIT, cast_scenario, threads_of


def test_the_shape_says_what_the_scenario_says(tmp_path: Path) -> None:
    scenario = read_scenario("three-homes")
    homes = [tmp_path / f"peer-{number}" for number in range(6)]
    players = cast_scenario(scenario, homes, tmp_path / "shape.json")
    shape = Shape.load(tmp_path / "shape.json")
    assert [peer.name for peer in shape.peers] == [player.name for player in players]
    for home, peer in zip(homes, shape.peers, strict=True):
        assert Identity.load_or_create(Home(home).identity).peer_id == peer.peer_id
    ids = {peer.name: peer.peer_id for peer in shape.peers}
    links = {(link.origin, link.to): link for link in shape.links}
    assert len(links) == 30
    link = links[ids["london-2"], ids["tokyo-1"]]
    assert (link.latency_ns, link.bytes_per_s) == (105_000_000, 45_750_000)
    shaper = Shaper(shape, ids["london-1"])
    assert shaper.label == "london-1 of three-homes"
    assert (shaper.uplink_bytes_per_s, shaper.downlink_bytes_per_s) == (2_500_000, 25_000_000)
    assert shaper.shapes(ids["tokyo-2"]) and not shaper.shapes("somebody else")


def test_stated_speeds_are_emulated_and_measured_ones_real(tmp_path: Path) -> None:
    stated = read_scenario("three-homes")
    players = cast_scenario(stated, [tmp_path / p.name for p in stated.peers], tmp_path / "s")
    assert all(player.emulated for player in players)
    arguments = players[0].arguments
    assert arguments[arguments.index("--device") + 1] == "emulated:40"
    measured = read_scenario("two-cities")
    players = cast_scenario(measured, [tmp_path / p.name for p in measured.peers], tmp_path / "t")
    assert not any(player.emulated or "--device" in player.arguments for player in players)
    assert threads_of(players) >= 1


def test_a_scenario_too_large_for_one_machine_is_refused(tmp_path: Path) -> None:
    scenario = read_scenario("three-homes")
    many = tuple(replace(scenario.peers[0], name=f"p-{n}") for n in range(PLAYERS_LIMIT + 1))
    with pytest.raises(UserError, match="at most 64 daemons"):
        cast_scenario(replace(scenario, peers=many), [], tmp_path / "shape.json")


def test_an_emulated_device_may_not_meet_strangers(tmp_path: Path) -> None:
    import asyncio

    from p2p_dtfm.daemon.dashboard.dashboard_host import DashboardHost
    from p2p_dtfm.daemon.node.daemon import Daemon

    with pytest.raises(UserError, match="computes nothing"):
        asyncio.run(Daemon(Settings(home=tmp_path, device="emulated:4"), DashboardHost()).run())
