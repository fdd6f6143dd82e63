"""A member crashes when a newcomer has agreed to its view, and the others go on without them both.
Nobody speaks to the newcomer of that view any more, and it does not wait for it for long."""

from dataclasses import replace

import pytest

from p2p_dtfm.core.consensus.actions import SECOND_NS, AgreementTiming
from p2p_dtfm.core.consensus.phase import Phase
from p2p_dtfm.core.membership.newcomers import FREE_AGAIN_NS
from p2p_dtfm.core.messages.agreement_messages import Standing
from p2p_dtfm.core.protocol.snapshot import Member
from p2p_dtfm.sim.faults.agreement_seeds import TIMING
from p2p_dtfm.sim.faults.agreement_world import AgreementWorld
from p2p_dtfm.sim.faults.simulated_peer import SimulatedPeer
from tests.core.liars import EVIL, say, self_made_view, standing, swarm
from tests.sim.test_newcomers_in_trouble import MEMBERS, are_together, joins, started

LIMIT_S = 40
LEAVES_WITHIN_S = 10
PATIENT = replace(TIMING, ready_ns=AgreementTiming().ready_ns)


@pytest.mark.parametrize("back_s", [1, 300], ids=["comes back", "stays away"])
@pytest.mark.parametrize("lost", MEMBERS)
@pytest.mark.parametrize("seed", range(2))
def test_it_is_let_in_soon(seed: int, lost: str, back_s: int) -> None:
    world = started(seed, ready_ns=AgreementTiming().ready_ns)
    world.rejoins = False
    newcomer = joins(world, "f")
    world.ask_to_join("f", lost)

    def has_agreed() -> bool:
        attempt = newcomer.agreement._state.attempt
        return attempt is not None and attempt.snapshot is not None and attempt.planned

    world.run_until(has_agreed)
    world.crash(lost, lose_disk=False)
    world.rejoins = True  # a peer without a view asks anybody
    world.after(back_s * SECOND_NS, lambda: world.restart(lost))
    stay = [name for name in MEMBERS if name != lost]
    there = [*MEMBERS, "f"] if back_s < LIMIT_S else [*stay, "f"]
    world.run_until(lambda: are_together(world, sorted(there)), LIMIT_S)


def is_ready(peer: SimulatedPeer) -> bool:
    """The peer is in an attempt, as a newcomer, with its own Ready said."""
    attempt = peer.agreement._state.attempt
    in_phase = peer.agreement.outlook(peer.now_ns).phase is Phase.NEWCOMER_READY
    return in_phase and attempt is not None and peer.agreement.me in attempt.ready


def waits_among(members: list[str], wide_above: int) -> tuple[AgreementWorld, SimulatedPeer]:
    """A newcomer has said Ready, and the members, which plan for long, have not."""
    world = swarm(members, timing=replace(PATIENT, wide_above=wide_above))
    newcomer = joins(world, "f")
    world.ask_to_join("f", members[0])
    for name in members:  # their machines are slow
        world.peers[name].agreement.plan_computed = lambda *_: []  # type: ignore[method-assign]
    world.run_until(lambda: is_ready(newcomer))
    return world, newcomer


@pytest.mark.parametrize("count", [2, 3, 5])
@pytest.mark.parametrize("wide_above", [64, 1])
def test_who_waits_where_the_members_have_gone_from_asks_anew(wide_above: int, count: int) -> None:
    """The members deal with a failure, and name the newcomer no more. One may have refused it, and
    another may have had no room for it."""
    members = [*MEMBERS, "e"][:count]
    world, newcomer = waits_among(members, wide_above)
    for name in members:
        del world.peers[name].agreement.plan_computed
        world.peers[name].agreement.turn_away("f", world.now_ns)
    number = newcomer.agreement._state.attempts.under_way.number  # type: ignore[union-attr]
    world.crash(members[-1], lose_disk=False)
    stay = members[:-1]
    world.run_until(lambda: are_together(world, stay), LEAVES_WITHIN_S)
    view = world.peers["a"].view
    assert view is not None and view.id.number > number, "else this shows nothing"
    world.run_until(lambda: not newcomer.agreement.attempting, LEAVES_WITHIN_S)
    world.run_until(lambda: are_together(world, [*stay, "f"]), LIMIT_S)


def elsewhere(members: list[Member], number: int) -> Standing:
    """What the first of these members says of a view of them alone, which all have signed."""
    view = self_made_view(tuple(sorted(members)), number, tuple(sorted(members)))
    return standing(view, 3, members[0])


def test_a_liar_has_nobody_leave_an_attempt_again_and_again() -> None:
    members = [*MEMBERS, "e"]
    world, newcomer = waits_among(members, 64)
    attempt = newcomer.agreement._state.attempt
    assert attempt is not None
    a, b, c = (world.peers[name].agreement.me for name in "abc")

    def leaves(whom: list[Member], number: int = attempt.number + 7) -> bool:
        newcomer.agreement._state.attempts.under_way = attempt  # as in the next attempt
        say(world, whom[0].peer_id, "f", elsewhere(whom, number))
        return not newcomer.agreement.attempting

    assert not leaves([EVIL]), "no member is in it"
    forged = self_made_view(tuple(sorted((EVIL, a))), attempt.number + 7)
    say(world, EVIL.peer_id, "f", standing(forged, 3))
    assert newcomer.agreement.attempting, "nor has one signed this"
    assert not leaves([a], attempt.number - 1), "it is older"
    assert leaves([a]), "it may be all that is left"
    world.now_ns += FREE_AGAIN_NS - SECOND_NS
    assert not leaves([a]) and not leaves([a, b], attempt.number + 9), "but not again so soon"
    assert leaves([a, b, c]) and leaves([a, b, c]), "unless more have gone"
    world.now_ns += 2 * SECOND_NS
    assert leaves([a]) and not leaves([b])
    assert leaves([Member("a", a.life + 1), b, c]), "that life of it has ended"
