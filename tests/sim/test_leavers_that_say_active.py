"""A leaver helps to agree on the view without it, and says that it has taken it over. That is not
the word of a member."""

from p2p_dtfm.core.consensus.actions import SECOND_NS
from p2p_dtfm.core.messages.agreement_messages import Active, AgreementMessage, Tidings
from p2p_dtfm.core.protocol.plan import Pipeline, Plan, Stage
from p2p_dtfm.core.protocol.snapshot import Snapshot
from p2p_dtfm.sim.faults.agreement_seeds import TIMING
from p2p_dtfm.sim.faults.agreement_world import AgreementWorld
from p2p_dtfm.sim.faults.simulated_peer import SimulatedPeer
from tests.core.builders import WORKLOAD, record
from tests.core.liars import are_together, view_of
from tests.sim.sim_support import found_together

LEAVER, NEWCOMER = "c", "d"


class Unheard(SimulatedPeer):
    """Nobody hears the newcomer's word that it has taken the view over."""

    def send(self, receiver: str, message: AgreementMessage) -> None:  # type: ignore[override]
        if self.name != NEWCOMER or not isinstance(message, Active | Tidings):
            super().send(receiver, message)


def first_holds_all(snapshot: Snapshot) -> Plan:
    names = [member.peer_id for member in snapshot.members]
    stage = Stage(names[0], 0, snapshot.workload.layer_count, 1)
    whole = Pipeline((stage,), 0, snapshot.workload.microbatch_count)
    return Plan((whole,), tuple(names[1:]), 1)


def test_a_view_is_not_taken_over_by_all_by_the_word_of_a_leaver() -> None:
    """Steps were told to be safe, and signatures written for good, by a leaver's word in place of a
    newcomer's."""
    world = AgreementWorld(1, WORKLOAD, record("template"), first_holds_all, timing=TIMING)
    world.peer_type, world.rejoins = Unheard, True
    found_together(world, ["a", "b", LEAVER])
    world.run_until(lambda: are_together(world, ["a", "b", LEAVER]))
    world.run_until(lambda: world.peers["a"].agreement.step >= 2)
    world.add_peer(NEWCOMER).agreement.wants_view()
    heard = world.peers["a"].agreement
    world.run_until(lambda: bool(heard.joiners))
    world.leave(LEAVER)
    world.run_until(lambda: are_together(world, ["a", "b", NEWCOMER]))
    world.run_to(world.now_ns + SECOND_NS // 2)
    view = view_of(world, "a")
    assert {it.peer_id for it in view.snapshot.contributors} == {"a", "b", LEAVER, NEWCOMER}
    assert heard.not_active == (NEWCOMER,)
    assert heard.ledger is not None and not heard.ledger.may_commit
    assert not heard.is_taken_over_by_all
