"""A liar that gives one of the others another sum than the rest is in doubt with that one. Nobody
knows which of the two lies. That costs one honest member its place, and no second one."""

import msgspec
import pytest

from p2p_dtfm.core.membership.accusers import REMEMBERED_NS, Accusers
from p2p_dtfm.core.messages.prepared import Prepared
from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.recovery.view import View
from p2p_dtfm.sim.faults.agreement_seeds import TIMING
from p2p_dtfm.sim.faults.agreement_world import AgreementWorld
from p2p_dtfm.sim.faults.simulated_peer import SimulatedPeer
from p2p_dtfm.sim.faults.simulated_training import SimulatedTraining
from tests.core.builders import record
from tests.sim.sim_support import found_together
from tests.sim.test_lying_members import MANY_MICROBATCHES, replicas

MEMBERS = ["a", "b", "c", "d", "e"]
LIAR = "a"
"""The liar has the lowest id: of two in doubt, of which nothing else is known, the other one
goes."""
FROM_STEP = 4


class GotAnotherSum(SimulatedTraining):
    """The first of the others says what it has got, and nobody else has got that sum."""

    def make_prepared(self, view: View, plan: Plan, step: int, done: dict) -> Prepared:  # type: ignore[type-arg]
        said = super().make_prepared(view, plan, step, done)
        honest = [name for name in view.member_ids if name != LIAR]
        if step < FROM_STEP or LIAR not in view.member_ids or said.peer_id != honest[0]:
            return said
        place = view.member_ids.index(LIAR)
        sums = {n: (*of[:place], b"?" * 16, *of[place + 1 :]) for n, of in said.sums.items()}
        return msgspec.structs.replace(said, sums=sums)


class PickedOff(SimulatedPeer):
    training_type = GotAnotherSum


@pytest.mark.parametrize("seed", range(3))
def test_a_liar_does_not_have_the_others_go_one_after_the_other(seed: int) -> None:
    world = AgreementWorld(seed, MANY_MICROBATCHES, record("template"), replicas, timing=TIMING)
    # the member that says what it got is honest, but the simulation would call it a liar
    world.peer_type, world.liars = PickedOff, frozenset(MEMBERS)
    found_together(world, MEMBERS)
    everybody = list(world.peers.values())
    world.run_until(lambda: all(peer.agreement.step >= FROM_STEP for peer in everybody))
    world.run_until(lambda: any(peer.agreement.step >= FROM_STEP + 2 for peer in everybody))
    goes_on = [peer for peer in everybody if peer.agreement.step >= FROM_STEP + 2]
    assert all(
        peer.view is not None and set(peer.view.member_ids) == {"c", "d", "e"} for peer in goes_on
    ), [peer.view.member_ids for peer in goes_on if peer.view is not None]


def test_who_was_in_doubt_is_named_for_a_while() -> None:
    seen = Accusers()
    assert seen.doubted(0) == ()
    seen.heed_doubts([("a", "b"), ("c", "a"), ("a", "c")], now_ns=5)
    assert seen.doubted(5) == (("a", "b"), ("a", "c")), "each pair once"
    assert seen.doubted(5 + REMEMBERED_NS) == ()
    for number in range(1000):
        seen.heed_doubts([(f"x{number}", f"y{number}")], now_ns=6)
    assert len(seen._pairs) == 128
