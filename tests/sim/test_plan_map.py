"""What-if changes of a scenario, and the picture of its plan."""

import xml.etree.ElementTree as ElementTree

import msgspec
import networkx
import pytest

from p2p_dtfm.core.planner.planner import compute_plan, fixed_plan
from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.sim.map.map_layout import lay_out
from p2p_dtfm.sim.map.plan_map import HEIGHT, WIDTH, plan_html, plan_svg
from p2p_dtfm.sim.map.swarm_graph import graphml, swarm_graph
from p2p_dtfm.sim.scenario.files import read_run_spec, read_scenario
from p2p_dtfm.sim.scenario.scenario_snapshot import scenario_snapshot
from p2p_dtfm.sim.scenario.what_if import what_if
from tests.core.planning import Peer, snapshot

SVG = "{http://www.w3.org/2000/svg}"


def test_what_if_adds_and_takes_away() -> None:
    scenario = read_scenario("uneven-world")
    names = [peer.name for peer in scenario.peers]
    changed = what_if(scenario, "+2 oregon, -oregon-2, -tokyo")
    left = [peer.name for peer in changed.peers]
    assert "oregon-2" not in left
    assert not any(name.startswith("tokyo") for name in left)
    assert len([name for name in left if name.startswith("oregon")]) == 4
    assert [peer.name for peer in scenario.peers] == names
    added = next(name for name in left if name not in names)
    assert changed.link(added, "seoul-1") == scenario.link("oregon-3", "seoul-1")


@pytest.mark.parametrize("change", ["3 london", "+x london", "+1 atlantis", "-atlantis", "-"])
def test_what_if_refuses_what_it_cannot_read(change: str) -> None:
    with pytest.raises(UserError) as refused:
        what_if(read_scenario("uneven-world"), change)
    assert refused.value.fixes


@pytest.mark.parametrize("name", ["uneven-world", "three-homes"])
def test_picture_is_valid_and_shows_everybody(name: str) -> None:
    scenario = read_scenario(name)
    snapshot = scenario_snapshot(scenario, read_run_spec("tiny"))
    few = len(scenario.peers) < 10
    plan = compute_plan(snapshot) if few else fixed_plan(snapshot, (4,) * 4)
    assert isinstance(plan, Plan)
    root = ElementTree.fromstring(plan_svg(plan, scenario, snapshot.workload))
    circles = [c for c in root.iter(f"{SVG}circle") if c.get("class") in ("peer", "spare")]
    assert len(circles) == len(scenario.peers)
    edges = sum(len(pipeline.stages) - 1 for pipeline in plan.pipelines)
    assert len([p for p in root.iter(f"{SVG}path") if p.get("class") == "flow"]) == edges
    for circle in circles:
        assert 0 < float(circle.get("cx") or 0) < WIDTH
        assert 0 < float(circle.get("cy") or 0) < HEIGHT
    names = [t for t in root.iter(f"{SVG}text") if "groupname" in (t.get("class") or "")]
    assert {t.text for t in names} == {peer.group for peer in scenario.peers}
    page = plan_html(plan, scenario, snapshot.workload)
    assert page.startswith("<!doctype html>") and "http" not in page.replace(
        "http://www.w3.org/2000/svg", ""
    )


def test_groups_do_not_overlap_on_the_map() -> None:
    layout = lay_out(read_scenario("uneven-world"), WIDTH, HEIGHT, 40)
    circles = list(layout.groups.values())
    for number, (x, y, radius) in enumerate(circles):
        for other_x, other_y, other in circles[:number]:
            assert (x - other_x) ** 2 + (y - other_y) ** 2 > (radius + other) ** 2


@pytest.mark.parametrize("name", ["\x1b[2J", "\0", "\ufffe", "\r"])
def test_what_a_device_is_called_does_not_spoil_the_graph(name: str) -> None:
    seen = snapshot([Peer(), Peer()])
    records = tuple(
        msgspec.structs.replace(it, device=msgspec.structs.replace(it.device, name=name))
        for it in seen.records
    )
    text = graphml(swarm_graph(msgspec.structs.replace(seen, records=records), None))
    assert len(networkx.parse_graphml(text)) == 2
