"""Where planning fails, it fails alike for all daemons. They keep their plan, and say so."""

import logging

import msgspec
import pytest

from p2p_dtfm.core.planner.planner import compute_plan
from p2p_dtfm.core.protocol.plan import NoPlan, Plan
from p2p_dtfm.core.protocol.records import Intent
from p2p_dtfm.core.protocol.snapshot import HeldLayer, Snapshot
from p2p_dtfm.daemon.machine import world
from tests.core.planning import Peer, name_of, snapshot, workload

WORK = workload(blocks=4, microbatches=4)


@pytest.fixture(autouse=True)
def it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: Snapshot) -> Plan:
        raise ZeroDivisionError("integer division or modulo by zero")

    monkeypatch.setattr(world, "compute_plan", fails)


def grown(count: int = 3) -> Snapshot:
    """Two train, and others have come."""
    plan = compute_plan(snapshot([Peer()] * 2, WORK))
    assert isinstance(plan, Plan) and len(plan.stage_holders()) == 2
    return msgspec.structs.replace(snapshot([Peer()] * count, WORK), present=plan, step=5)


def test_the_plan_in_force_stays(caplog: pytest.LogCaptureFixture) -> None:
    """Each daemon of the swarm ended with its planner's traceback."""
    made = grown()
    with caplog.at_level(logging.ERROR, "p2p_dtfm"):
        plan = world.Machine().plan(made)
    assert made.present is not None
    assert plan == msgspec.structs.replace(made.present, spares=(name_of(2),))
    assert "bug while planning" in caplog.text and "ZeroDivisionError" in caplog.text


def test_where_none_stands_nobody_trains() -> None:
    made = grown()
    leaver = msgspec.structs.replace(made.records[0], intent=Intent.LEAVING)
    gone, leaving, unplanned, other_run, founding = (
        msgspec.structs.replace(made, **changes)
        for changes in (
            {"records": made.records[1:]},
            {"records": (leaver, *made.records[1:])},
            {"planned": False},
            {"workload": workload(blocks=5, microbatches=4)},
            {"present": None},
        )
    )
    for found in (gone, leaving, unplanned, other_run, founding):
        plan = world.Machine().plan(found)
        assert isinstance(plan, NoPlan) and "a fault of this program" in plan.reason
    holders = (name_of(0), name_of(1))
    held = tuple(HeldLayer(peer_id, layer, 5) for peer_id in holders for layer in range(6))
    assert isinstance(world.Machine().plan(msgspec.structs.replace(unplanned, held=held)), Plan)
