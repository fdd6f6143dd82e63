"""A swarm as an onlooker sees it: the records of members, and those of strangers beside them."""

import json
from pathlib import Path

from p2p_dtfm.daemon.peers.facts.swarm_seen import SwarmSeen, as_json, looking_from
from p2p_dtfm.net.directory.directory import Directory
from p2p_dtfm.net.directory.facts import Facts, PublishedPart
from tests.core.builders import record, run_spec
from tests.net.net_support import hosts, run

MOST = (1 << 60) - 1
SPEC = run_spec()


def part(
    first_layer: int, end_layer: int, view: int = 3, step_ns: int = 10**9, snapshot: str = "ab"
) -> PublishedPart:
    return PublishedPart(view, snapshot, 0, first_layer, first_layer, end_layer, 4, 17, step_ns)


def seen(**places: PublishedPart | None) -> dict[str, object]:
    facts = {it: Facts(record(it), place, 0) for it, place in places.items()}
    shown = as_json(SwarmSeen(SPEC, SPEC.digest(), (), facts))
    assert json.dumps(shown)
    return shown


MEMBERS = {"a": part(0, 3), "b": part(3, 6), "c": part(0, 0)}


def test_the_plan_that_members_are_in() -> None:
    plan = seen(**MEMBERS, d=None)["plan"]
    assert isinstance(plan, dict)
    [pipeline] = plan["pipelines"]
    assert pipeline["stages"] == [
        {"peer_id": "a", "layers": [0, 1, 2]},
        {"peer_id": "b", "layers": [3, 4, 5]},
    ]
    assert (plan["view"], plan["step"], plan["spares"]) == (3, 17, ["c"])


def test_who_says_that_it_holds_more_layers_than_there_are_holds_none() -> None:
    """`peers` and `plan` made a list of all those layers, and took whatever memory there was."""
    for place in (part(0, MOST), part(0, 7), part(MOST, 3), part(0, MOST, view=MOST)):
        shown = seen(**MEMBERS, evil=place)
        assert shown["plan"] == seen(**MEMBERS)["plan"]
        members = shown["members"]
        assert isinstance(members, list)
        assert {it["peer_id"]: (it["layers"], it["step"]) for it in members}["evil"] == ([], None)


def test_one_that_names_a_newer_view_hides_nobodys_plan() -> None:
    lie = part(0, 6, view=MOST, step_ns=1, snapshot="cd")
    assert seen(**MEMBERS, evil=lie)["plan"] == seen(**MEMBERS)["plan"]
    newer = part(0, 6, view=4)
    plan = seen(a=part(0, 6), b=newer)["plan"]
    assert isinstance(plan, dict) and plan["view"] == 4, "of as many, the newer one"


def test_one_host_looks_on_as_often_as_it_likes(tmp_path: Path) -> None:
    """The doctor does so once for each device. At the second one it said that libp2p is broken."""

    async def scenario() -> None:
        async with hosts(tmp_path, 2) as (member, doctor):
            at, there = list(await member.addresses()), await Directory.start(member)
            for _ in range(2):
                async with looking_from(doctor, at) as onlooker:
                    assert await onlooker.directory.present_peers(SPEC.digest()) == []
            await there.close()

    run(scenario())
