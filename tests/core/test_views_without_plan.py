"""A member that says its view has no plan is believed by nobody who knows the plan."""

import msgspec

from p2p_dtfm.core.consensus.views.known_views import KnownViews
from p2p_dtfm.core.membership.eligibility import named_newcomers
from p2p_dtfm.core.messages.agreement_messages import Contribution, PresentView
from p2p_dtfm.core.planner.planner import fixed_plan
from p2p_dtfm.core.protocol.plan import NoPlan, Plan
from p2p_dtfm.core.protocol.snapshot import Member, founding_snapshot
from p2p_dtfm.core.recovery.view import View
from tests.core.builders import WORKLOAD, record, run_spec

RECORDS = [record(name) for name in ("a", "b", "c")]
SNAPSHOT = founding_snapshot(run_spec().digest(), WORKLOAD, RECORDS)
INVENTED = (Member("x", 1), Member("y", 1))


def contribution(name: str, view: View, plan: Plan | None, **changes: object) -> Contribution:
    present = PresentView(view.id, view.members, plan)
    made = Contribution(
        member=Member(name, 1),
        number=2,
        record=record(name),
        present=present,
        step=7,
        held={},
        joiners=(),
    )
    return msgspec.structs.replace(made, **changes)


def test_by_whom_it_is_known() -> None:
    for plan in (fixed_plan(SNAPSHOT, (3,)), NoPlan("too few")):
        view, known = View(SNAPSHOT, plan), KnownViews()
        known.says_ready(view, ())
        told = contribution("b", view, plan if isinstance(plan, Plan) else None)
        assert known.is_proven(told)
        without = contribution("b", view, None)
        assert known.is_proven(without) is isinstance(plan, NoPlan)


def test_it_names_no_newcomers_after_a_failure() -> None:
    """Otherwise all waited for newcomers that a member had invented."""
    plan = fixed_plan(SNAPSHOT, (3,))
    view = View(SNAPSHOT, plan)
    liar = contribution("c", view, None, joiners=INVENTED)
    others = [contribution(name, view, plan) for name in ("a", "b")]
    parts = {part.member: part for part in (*others, liar)}
    assert named_newcomers(parts, planned=False) == set()
    assert named_newcomers(parts, planned=True) == set(INVENTED)
    nobody_trains = {it.member: msgspec.structs.replace(it, present=liar.present) for it in others}
    assert named_newcomers({liar.member: liar, **nobody_trains}, planned=False) == set(INVENTED)
