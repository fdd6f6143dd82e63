"""Where the head is the token embedding, and work is audited, a pipeline is one peer."""

import msgspec

from p2p_dtfm.core.planner.planner import compute_plan
from p2p_dtfm.core.protocol.plan import NoPlan, Plan
from p2p_dtfm.core.protocol.workload import Confined
from tests.core.planning import Peer, snapshot, workload

TIED = msgspec.structs.replace(
    workload(blocks=4, microbatches=8), confined=Confined(one_stage=True)
)
NEEDED = 6 * (TIED.block.state_bytes + 4 * TIED.block.parameter_count + TIED.block.saved_bytes)
"""What a peer takes that is alone. Where several sum, each parameter takes four bytes more."""
SHARED = NEEDED + 6 * 4 * TIED.block.parameter_count


def test_each_peer_with_room_for_the_whole_model_is_a_pipeline() -> None:
    peers = [Peer(memory_bytes=SHARED), Peer(memory_bytes=SHARED - 1), Peer(), Peer()]
    plan = compute_plan(snapshot(peers, TIED))
    assert isinstance(plan, Plan)
    assert {len(pipeline.stages) for pipeline in plan.pipelines} == {1}
    assert plan.spares == ("peer-0001",) and len(plan.pipelines) == 3
    [segment] = plan.segments()
    assert segment.layers == range(6)


def test_where_nobody_has_room_the_reason_is_said() -> None:
    half = [Peer(memory_bytes=NEEDED // 2 + 1)] * 4
    untied = msgspec.structs.replace(TIED, confined=None)
    assert isinstance(compute_plan(snapshot(half, untied)), Plan)
    refused = compute_plan(snapshot(half, TIED))
    assert isinstance(refused, NoPlan)
    assert "its token embedding" in refused.reason
    assert refused.missing_bytes == NEEDED - NEEDED // 2 - 1
