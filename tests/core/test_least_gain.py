"""`limits.least_gain`: a peer that adds less than a run asks for stays spare, and is told why."""

import msgspec

from p2p_dtfm.core.planner.explain import explain
from p2p_dtfm.core.planner.planner import compute_plan
from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.protocol.run_spec import LimitsSpec
from p2p_dtfm.core.protocol.snapshot import Snapshot
from p2p_dtfm.core.protocol.workload import workload_of
from tests.core.builders import run_spec
from tests.core.planning import Peer, name_of, snapshot, workload

FAST, SLOW = 1_000_000, 40_000_000
PEERS = [Peer(FAST), Peer(FAST), Peer(SLOW)]
"""A swarm in which the slow peer adds an eightieth."""


def asking(ppm: int, peers: list[Peer] = PEERS, present: Plan | None = None) -> Snapshot:
    work = msgspec.structs.replace(workload(microbatches=512), least_gain_ppm=ppm)
    return snapshot(peers, work, present=present)


def planned(found: Snapshot) -> Plan:
    plan = compute_plan(found)
    assert isinstance(plan, Plan)
    return plan


def test_who_adds_less_than_is_asked_stays_spare_and_is_told_why() -> None:
    assert planned(asking(0)).spares == ()
    assert planned(asking(5_000)).spares == ()
    found = asking(30_000)
    plan = planned(found)
    assert plan.spares == (name_of(2),)
    role = explain(found, plan).peers[2].role
    assert "limits.least_gain" in role and "asks for 3.0%" in role


def test_who_is_needed_stays_whatever_it_adds() -> None:
    """Each peer has the memory for a little more than half of the model."""
    need = 14 * (16 << 20) + 14 * (8 << 20)
    peers = [Peer(FAST, 6 * need // 10), Peer(SLOW, 6 * need // 10)]
    assert planned(asking(500_000, peers)).spares == ()


def test_who_has_a_stage_keeps_it_while_it_adds_half_of_that() -> None:
    present = planned(asking(0))
    assert planned(asking(20_000)).spares == (name_of(2),)
    assert planned(asking(20_000, present=present)).spares == ()
    assert planned(asking(60_000, present=present)).spares == (name_of(2),)


def test_a_run_that_asks_for_nothing_keeps_its_name() -> None:
    plain, asks = run_spec(), run_spec(limits={"least_gain": 0.02})
    assert b"least_gain" not in plain.canonical_bytes()
    assert asks.digest() != plain.digest()
    assert type(asks).from_canonical_bytes(asks.canonical_bytes()).limits == LimitsSpec(
        least_gain=0.02
    )
    assert workload_of(asks).least_gain_ppm == 20_000
