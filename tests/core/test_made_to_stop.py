"""Nobody makes another member stop the steps by a word of its own; that member would be out for
it."""

from dataclasses import replace

import pytest

from p2p_dtfm.core.consensus.actions import SECOND_NS, SendMessage, StopStep
from p2p_dtfm.core.membership.newcomers import NUMBERS_PASSED_LIMIT
from p2p_dtfm.core.messages.agreement_messages import (
    Active,
    AgreementMessage,
    Gather,
    PresentView,
    Ready,
    passed,
)
from p2p_dtfm.core.messages.prepared import SignedPrepared
from p2p_dtfm.core.messages.statements import certified, stated
from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.protocol.snapshot import GENESIS, Member
from p2p_dtfm.sim.faults.agreement_seeds import TIMING
from p2p_dtfm.sim.faults.hash_training import Tensor
from p2p_dtfm.sim.faults.simulated_peer import SimulatedPeer
from p2p_dtfm.sim.faults.simulated_process import sign_for
from tests.core.liars import (
    active,
    are_together,
    contribution,
    gather,
    lives,
    say,
    swarm,
    trains_on,
    view_of,
)

NAMES = ["a", "b", "c", "d"]
VICTIM, LIAR = "a", "d"


class KeepsItsReady(SimulatedPeer):
    """Has an attempt end in nothing to which all others have said Ready."""

    lies = False

    def send(self, receiver: str, message: AgreementMessage | SignedPrepared | Tensor) -> None:
        if not (self.lies and self.name == LIAR and isinstance(message, Ready)):
            super().send(receiver, message)


def test_a_view_that_nobody_took_over_is_missed_by_nobody() -> None:
    class Liar(KeepsItsReady):
        pass

    world = swarm(NAMES, peer_type=Liar)
    Liar.lies = True
    peer, before = world.peers[VICTIM], view_of(world, VICTIM)
    said_ready = peer.agreement._state.promises.said_ready
    peer.do(peer.agreement.request_replan("for the test", 0))
    world.run_until(lambda: said_ready.last is not None and said_ready.last.view > before.id)
    assert said_ready.last is not None
    view = said_ready.last.view
    attempt = said_ready.find(view)
    assert attempt is not None and attempt.snapshot is not None
    world.run_until(lambda: len(attempt.ready) == 3)
    liar = Member(LIAR, 1)
    peer.agreement._state.give_up(peer.now_ns)
    actions, _ = say(world, LIAR, VICTIM, active(view, liar))
    assert not any(isinstance(it, StopStep) for it in actions) and not peer.agreement.frozen
    asked = [it.message for it in actions if isinstance(it, SendMessage)]
    assert [it for it in asked if isinstance(it, Gather) and it.number == view.number]
    said = attempt.ready[Member(VICTIM, 1)]
    own = Ready(liar, view, said.plan_digest, said.members_digest)
    ready = [*attempt.ready.values(), stated(own, sign_for("evil"))]
    proof = certified(view, attempt.snapshot.members, ready)
    shown = stated(Active(liar, view, 9, certificate=proof), sign_for(LIAR))
    assert not any(isinstance(it, StopStep) for it in say(world, LIAR, VICTIM, shown)[0])
    proof = certified(view, attempt.snapshot.members, [*ready[:-1], stated(own, sign_for(LIAR))])
    shown = stated(Active(liar, view, 9, certificate=proof), sign_for(LIAR))
    assert any(isinstance(it, StopStep) for it in say(world, LIAR, VICTIM, shown)[0])


def test_who_reports_a_failure_under_a_number_that_is_passed_stops_the_steps_itself() -> None:
    world = swarm(NAMES)
    peer, view = world.peers[VICTIM], view_of(world, VICTIM)
    assert isinstance(view.plan, Plan)
    number = view.id.number + 1 + view.id.number % 2
    peer.agreement._state.promises.gives_up(number + 3)
    present = PresentView(view.id, view.members, view.plan)
    liar = next(member for member in view.members if member.peer_id == LIAR)
    part = contribution(number, present, liar)
    actions, _ = say(world, LIAR, VICTIM, gather(number, GENESIS, part, sender=liar))
    assert not any(isinstance(it, StopStep) for it in actions) and not peer.agreement.frozen
    trains_on(world, NAMES)
    assert view_of(world, VICTIM).id == view.id


def test_an_honest_one_begins_anew_above_that_number() -> None:
    world = swarm(NAMES)
    before, view = lives(world, NAMES), view_of(world, VICTIM)
    world.peers[VICTIM].agreement._state.promises.gives_up(view.id.number + 40)
    other = world.peers["c"]
    other.do(other.agreement.repeat_step("a tensor is lost", other.now_ns))
    began_ns = world.now_ns
    world.run_until(lambda: view_of(world, "c").id != view.id and are_together(world, NAMES))
    assert world.now_ns - began_ns < 3 * SECOND_NS and lives(world, NAMES) == before
    trains_on(world, NAMES)


def test_who_is_told_of_that_number_while_it_fails_goes_on_above_it_as_well() -> None:
    """The member's first attempt had failed on a bad line. Each later one was below the others'
    number, all told it so, and it was out."""
    world = swarm(NAMES)
    before, view = lives(world, NAMES), view_of(world, VICTIM)
    for name in "abd":
        world.peers[name].agreement._state.promises.gives_up(view.id.number + 40)
    other = world.peers["c"]
    other.agreement._state.attempts.failures = 1
    other.do(other.agreement.repeat_step("a tensor is lost", other.now_ns))
    world.run_until(lambda: world.peers["c"].view is not view and are_together(world, NAMES))
    assert lives(world, NAMES) == before
    trains_on(world, NAMES)


def test_who_says_so_again_and_again_ends_one_attempt_only() -> None:
    world = swarm(NAMES)
    peer, view = world.peers[VICTIM], view_of(world, VICTIM)
    peer.do(peer.agreement.repeat_step("a tensor is lost", peer.now_ns))
    liar = next(member for member in view.members if member.peer_id == LIAR)
    state = peer.agreement._state
    numbers = []
    for ahead in (2, 2**40, 2**41):
        assert state.attempt is not None
        numbers.append(state.attempt.number)
        say(world, LIAR, VICTIM, passed(liar, numbers[-1] + ahead))
    assert numbers == [numbers[0], numbers[0] + 4, numbers[0] + 4]
    assert state.promises.highest_number == numbers[-1] + NUMBERS_PASSED_LIMIT


def test_who_says_so_once_most_have_their_part_in_what_is_known_ends_nothing() -> None:
    """The liar kept its own part to itself, and all waited for it. Each colluder had that effect
    once."""

    class Silent(SimulatedPeer):
        lies = False

        def send(self, receiver: str, message: AgreementMessage | SignedPrepared | Tensor) -> None:
            if not (self.lies and self.name == LIAR):
                super().send(receiver, message)

    world = swarm(NAMES, peer_type=Silent)
    Silent.lies = True
    peer, view = world.peers[VICTIM], view_of(world, VICTIM)
    peer.do(peer.agreement.repeat_step("a tensor is lost", peer.now_ns))
    state = peer.agreement._state
    world.run_until(lambda: state.attempt is not None and state.attempt.snapshot is not None)
    assert state.attempt is not None
    number = state.attempt.number
    liar = next(member for member in view.members if member.peer_id == LIAR)
    say(world, LIAR, VICTIM, passed(liar, number + 2))
    assert state.attempt is not None and state.attempt.number == number


@pytest.mark.parametrize("opener", ["a", "d", "h"])
def test_among_many_who_passes_it_on_is_not_taken_for_who_stops_the_steps(opener: str) -> None:
    """A member that enters tells its neighbours at once, and came to them with its own contribution
    alone."""
    names = [*"abcdefghi"]
    world = swarm(names, timing=replace(TIMING, wide_above=3))
    before, peer = view_of(world, opener), world.peers[opener]
    peer.do(peer.agreement.repeat_step("a tensor is lost", peer.now_ns))
    world.run_until(lambda: view_of(world, opener) is not before and are_together(world, names))
    counted = {
        name: {it.peer_id for it in peer.agreement._state.doubts.accusers._stops}
        for name, peer in world.peers.items()
    }
    assert set().union(*counted.values()) == {opener}, counted
    trains_on(world, names)
