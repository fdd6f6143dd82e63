"""A member that tells a word to all but one does not have that one out: the others pass the word
on."""

import pytest

from p2p_dtfm.core.consensus.actions import SECOND_NS
from p2p_dtfm.core.consensus.parts.passing_on import NAMED_STEPS
from p2p_dtfm.core.messages.agreement_messages import Active, AgreementMessage, Heartbeat, Synced
from p2p_dtfm.core.messages.prepared import SignedPrepared
from p2p_dtfm.core.messages.work import Kind, Lack, Work
from p2p_dtfm.core.protocol.snapshot import Member
from p2p_dtfm.sim.faults.agreement_world import AgreementWorld
from p2p_dtfm.sim.faults.hash_training import Tensor
from p2p_dtfm.sim.faults.simulated_peer import SimulatedPeer
from tests.core.liars import are_together, lives, swarm, trains_on, view_of

NAMES = ["a", "b", "c", "d"]
VICTIM, LIAR = "a", "d"


class KeepsBack(SimulatedPeer):
    """A peer that keeps words of some kind back from one of the others."""

    kind: type = type(None)

    def send(self, receiver: str, message: AgreementMessage | SignedPrepared | Tensor) -> None:
        if (self.name, receiver) == (LIAR, VICTIM) and isinstance(message, self.kind):
            return
        super().send(receiver, message)


def keeps_back(kind: type) -> AgreementWorld:
    class Liar(KeepsBack):
        pass

    world = swarm(NAMES, peer_type=Liar)
    Liar.kind = kind
    return world


def test_a_prepared_kept_from_one_is_passed_on() -> None:
    """The member without the word could not commit. All others had gone on, and took it for holding
    up the step."""
    world = keeps_back(SignedPrepared)
    view = view_of(world, VICTIM)
    trains_on(world, NAMES, within_s=30)
    trains_on(world, NAMES, within_s=10)  # and the member is as late in no later step
    world.run_to(world.now_ns + 30 * SECOND_NS)
    assert view_of(world, VICTIM).id == view.id == view_of(world, LIAR).id


@pytest.mark.parametrize("newcomer", ["e", "n", "o", "x"])
def test_who_has_just_been_let_in_is_not_drawn_to_pass_on_what_it_has_not(newcomer: str) -> None:
    """The members that were there commit the last step before the newcomer comes. One of them
    lacked a word for good, where the newcomer was to give it."""
    world = keeps_back(SignedPrepared)
    before = lives(world, NAMES)
    world.add_peer(newcomer)
    world.ask_to_join(newcomer, "b")
    names = [*NAMES, newcomer]
    world.run_until(lambda: are_together(world, names), limit_s=60)
    trains_on(world, names, within_s=30)
    assert lives(world, NAMES) == before and view_of(world, VICTIM).snapshot.planned


def test_who_says_that_it_lacks_all_leaves_room_for_who_lacks_one() -> None:
    """Words that nobody lacks any more are passed on twice for some steps, not to the view's
    end."""
    names = [*"abcdef"]
    world = swarm(names)
    peer = world.peers["b"]
    passing_on = peer.agreement._machines.passing_on

    def lacks(name: str, whose: str) -> None:
        ledger = peer.agreement.ledger
        assert ledger is not None
        lacked = tuple(Lack(it, Kind.PREPARED) for it in whose if it != name)
        work = Work(ledger.view, ledger.step - 1, lacks=lacked)
        for after_ns in (0, SECOND_NS):
            passing_on.heard(Heartbeat(Member(name, 1), 0, work), peer.now_ns + after_ns)

    for name, whose in (("e", "abcdf"), ("f", "abcde"), (VICTIM, LIAR)):
        lacks(name, whose)
    assert (VICTIM, LIAR) in passing_on._untold
    began = peer.agreement.step
    world.run_until(lambda: peer.agreement.step == began + NAMED_STEPS // 2)
    lacks(VICTIM, LIAR)
    world.run_until(lambda: peer.agreement.step == began + NAMED_STEPS + 1)
    assert set(passing_on._untold) == {(VICTIM, LIAR)}
    world.run_until(lambda: peer.agreement.step == began + 2 * NAMED_STEPS)
    assert not passing_on._untold


@pytest.mark.parametrize("kind", [Active, Synced])
def test_what_is_kept_from_one_of_the_next_view_it_is_told_by_others(kind: type) -> None:
    world = keeps_back(kind)
    before, first = lives(world, NAMES), view_of(world, VICTIM)
    world.peers["b"].do(world.peers["b"].agreement.request_replan("for the test", 0))
    world.run_until(lambda: view_of(world, "b").id != first.id, limit_s=60)
    world.run_until(lambda: are_together(world, NAMES), limit_s=30)
    trains_on(world, NAMES, within_s=20)
    view = view_of(world, VICTIM)
    assert view.snapshot.planned, "no failure in between"
    world.run_to(world.now_ns + 30 * SECOND_NS)
    assert view_of(world, LIAR).id == view.id and lives(world, NAMES) == before
