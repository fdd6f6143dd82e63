"""The only stage-holder is lost, and the member with its copy shows how far both had come."""

from p2p_dtfm.core.consensus.actions import SECOND_NS
from p2p_dtfm.core.consensus.views.view_precedence import outranks, own_side, side_of
from p2p_dtfm.core.messages.agreement_messages import KnownView
from p2p_dtfm.core.protocol.workload import Workload
from p2p_dtfm.sim.faults.agreement_seeds import TIMING
from p2p_dtfm.sim.faults.agreement_world import AgreementWorld
from p2p_dtfm.sim.faults.simulated_process import verify
from tests.core.builders import record
from tests.sim.test_complete_runs import COST, by_the_first_alone

STEPS = 5


def test_a_commit_of_one_who_is_gone_counts_for_its_heir() -> None:
    """Only members of the view showed the length of a lineage. The member left with a lost peer's
    states counted as having come nowhere. It gave them up to a sleeper's older ones."""
    workload = Workload(2, 8, 0, 1, COST, COST, COST, 1)
    world = AgreementWorld(1, workload, record("template"), by_the_first_alone, timing=TIMING)
    first, heir = world.add_peer("p0"), world.add_peer("p1")
    heir.agreement.wants_view()
    world.ask_to_join("p1", "p0")
    world.after(SECOND_NS, lambda: world.found("p0"))
    world.run_until(lambda: heir.view is not None and len(heir.view.members) == 2)
    together = heir.view
    assert together is not None
    world.run_until(lambda: first.agreement.step >= STEPS)
    world.crash("p0", lose_disk=False)
    world.run_until(lambda: heir.view is not None and len(heir.view.members) == 1)
    standing, step = heir.agreement.standing, heir.agreement.step
    assert standing is not None and step >= STEPS, "nothing is lost"
    assert {signed.peer_id for signed in standing.commit} == {"p0"}, "it has computed nothing yet"
    common = KnownView(together.id, together.members, together.plan.digest())
    stranger = side_of(standing, None, 1, verify)
    assert stranger is not None and stranger.step <= 1, "p0 may be anybody's invention"
    fellow = side_of(standing, common, 1, verify)
    assert fellow is not None and fellow.step == step == own_side(standing, common).step
    slept = type(fellow)(True, frozenset({"p2"}), step - 2, fellow.view)
    assert outranks(fellow, slept) and not outranks(slept, fellow)
