"""What records may tell of steps under earlier plans."""

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from p2p_dtfm.core.planner.planner import compute_plan, fixed_plan
from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.core.protocol.measured_plans import MeasuredPlan, shape_of
from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.protocol.records import open_record, sign_record
from p2p_dtfm.net.contacts.identity import Identity, verify
from tests.core.builders import record, run_spec
from tests.core.planning import Peer, snapshot

SHAPE = ((("a", "b"), (0, 3, 6)), (("c",), (0, 6)))
DIGEST = run_spec().digest()


def opened(*measured: MeasuredPlan) -> tuple[MeasuredPlan, ...]:
    identity = Identity(Ed25519PrivateKey.generate())
    made = record(identity.peer_id, measured=measured)
    return open_record(sign_record(made, identity.sign), DIGEST, verify).measured


def test_they_come_through() -> None:
    told = MeasuredPlan(SHAPE, 5)
    assert opened(told) == (told,)
    assert opened() == ()


@pytest.mark.parametrize(
    "measured",
    [
        [MeasuredPlan(SHAPE, 0)],
        [MeasuredPlan(SHAPE, -1)],
        [MeasuredPlan(SHAPE, 1 << 60)],
        [MeasuredPlan((), 5)],
        [MeasuredPlan(((("a", "a"), (0, 3, 6)),), 5)],
        [MeasuredPlan(((("a",), (0, 6)), (("a",), (0, 6))), 5)],
        [MeasuredPlan((((), (0,)),), 5)],
        [MeasuredPlan(((("a",), (0,)),), 5)],
        [MeasuredPlan(((("a",), (1, 3)),), 5)],
        [MeasuredPlan(((("a", "b"), (0, 3, 3)),), 5)],
        [MeasuredPlan(((("a",), ()),), 5)],
        [MeasuredPlan(((tuple("x" * 17), tuple(range(18))),), 5)],
        [MeasuredPlan(SHAPE, 5)] * 5,
    ],
)
def test_what_no_plan_can_be_is_refused(measured: list[MeasuredPlan]) -> None:
    with pytest.raises(PeerFault):
        opened(*measured)


def test_a_plan_that_was_faster_is_taken_back_though_it_drops_somebody() -> None:
    """Members ask for the old plan when steps take a tenth more than they did."""
    made = snapshot([Peer()] * 2)
    in_force, tried = fixed_plan(made, (1, 1)), fixed_plan(made, (1,))
    told = MeasuredPlan(shape_of(in_force), 1_110_000_000), MeasuredPlan(shape_of(tried), 10**9)
    records = tuple(msgspec.structs.replace(each, measured=told) for each in made.records)
    found = compute_plan(msgspec.structs.replace(made, records=records, present=in_force))
    assert isinstance(found, Plan) and found.stage_holders() == tried.stage_holders()


def test_a_tried_plan_of_which_only_one_pipeline_would_get_work_now() -> None:
    """A swarm of three ended here. Each pipeline of the plan had been of use when it was tried."""
    made = snapshot([Peer(block_ns=1_000_000), Peer(block_ns=1_000_000_000)])
    in_force, tried = fixed_plan(made, (2,)), fixed_plan(made, (1, 1))
    late_ns = 1_000_000_000_000
    told = (MeasuredPlan(shape_of(in_force), late_ns), MeasuredPlan(shape_of(tried), late_ns))
    records = tuple(msgspec.structs.replace(each, measured=told) for each in made.records)
    found = compute_plan(msgspec.structs.replace(made, records=records, present=in_force))
    assert isinstance(found, Plan)
    assert [stage.peer_id for p in found.pipelines for stage in p.stages] == ["peer-0000"]
