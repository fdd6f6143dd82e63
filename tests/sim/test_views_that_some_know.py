"""A contribution counts by a view that all members know. By one that only some of them know it
would count with these alone, and what is known would never be the same."""

from dataclasses import replace

import msgspec
import pytest

from p2p_dtfm.core.consensus.actions import SECOND_NS, AgreementTiming
from p2p_dtfm.core.consensus.parts.gather import contributing
from p2p_dtfm.core.messages.agreement_messages import (
    AgreementMessage,
    Contribution,
    Gather,
    PresentView,
    Ready,
)
from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.protocol.snapshot import GENESIS, Member, sorted_records
from p2p_dtfm.core.recovery.view import View
from p2p_dtfm.sim.faults.agreement_seeds import TIMING
from p2p_dtfm.sim.faults.agreement_world import AgreementWorld
from p2p_dtfm.sim.faults.simulated_peer import SimulatedPeer
from p2p_dtfm.sim.faults.simulated_process import verify
from tests.core.builders import WORKLOAD, record
from tests.core.liars import (
    are_together,
    contribution,
    gather,
    lives,
    one_pipeline,
    say,
    self_made_view,
    swarm,
    view_of,
)
from tests.sim.sim_support import found_together

LIAR, OLD, NEW = "l", ["a", "b"], ["c", "d"]
HONEST = [*OLD, *NEW]


def settles(world: AgreementWorld, names: list[str], within_s: int) -> None:
    """These peers commit six more steps."""
    step = min(world.peers[name].agreement.step for name in names)

    def done() -> bool:
        return all(world.peers[name].agreement.step >= step + 6 for name in names)

    world.run_until(done, limit_s=within_s)


def stops(world: AgreementWorld, name: str) -> None:
    """An honest member has lost a tensor, and has all agree anew."""
    peer = world.peers[name]
    peer.do(peer.agreement.repeat_step("a lost tensor", peer.now_ns))


@pytest.mark.parametrize("timing", [TIMING, replace(TIMING, wide_above=3)], ids=["few", "many"])
def test_a_member_that_names_a_view_which_newer_members_never_knew_has_nobody_out(
    timing: AgreementTiming, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = AgreementWorld(1, WORKLOAD, record("template"), one_pipeline, timing=timing)
    world.liars = frozenset({LIAR})
    found_together(world, [*OLD, LIAR])
    world.rejoins = True
    world.run_until(lambda: are_together(world, [*OLD, LIAR]))
    settles(world, OLD, within_s=30)
    peer = world.peers[LIAR]
    before = peer.agreement._state.present_view()
    assert before is not None
    peer.do(peer.agreement.request_replan("the liar asks for it", peer.now_ns))
    world.run_until(lambda: all(_number(world, it) > before.view.number for it in OLD))
    settles(world, OLD, within_s=30)
    for name in NEW:
        world.add_peer(name).agreement.wants_view()
    world.run_until(lambda: are_together(world, [*HONEST, LIAR]))
    settles(world, HONEST, within_s=30)

    def lying(**facts: object) -> Contribution:
        part = Contribution(**facts)  # type: ignore[arg-type]
        is_liars = part.member.peer_id == LIAR and part.present is not None
        return msgspec.structs.replace(part, present=before) if is_liars else part

    monkeypatch.setattr(contributing, "Contribution", lying)
    for _ in range(3):
        stops(world, "a")
        settles(world, HONEST, within_s=45)
    assert lives(world, HONEST) == [1, 1, 1, 1]


def _number(world: AgreementWorld, name: str) -> int:
    view = world.peers[name].view
    return view.id.number if view is not None else 0


class Hiding(SimulatedPeer):
    """A stranger that speaks to older members alone, and never says Ready."""

    def send(self, receiver: str, message: AgreementMessage) -> None:  # type: ignore[override]
        hides = isinstance(message, Ready) or (isinstance(message, Gather) and receiver in NEW)
        if self.name != LIAR or not hides:
            super().send(receiver, message)


def test_a_stranger_splits_nobody_by_a_view_to_which_half_have_said_ready() -> None:
    world = swarm(HONEST, peer_type=Hiding)
    world.liars = frozenset({LIAR})
    world.rejoins = False
    stranger = world.add_peer(LIAR)
    say(world, LIAR, "a", stranger.agreement.wants_view())

    def are_ready() -> bool:
        attempts = [world.peers[name].agreement._state.attempt for name in OLD]
        return all(it is not None and it.me in it.ready for it in attempts)

    world.run_until(are_ready)
    attempt = world.peers["a"].agreement._state.attempt
    assert attempt is not None and attempt.snapshot is not None and isinstance(attempt.plan, Plan)
    newer = [world.peers[name].agreement._state.attempt for name in NEW]
    assert all(it is not None and it.snapshot is None for it in newer)
    view, me = attempt.outcome.view_id, stranger.agreement.me
    assert view is not None and me in attempt.snapshot.members
    present = PresentView(view, attempt.snapshot.members, attempt.plan)
    stranger.alive = False  # from now on it says what follows, and nothing else

    def claims() -> None:
        world.after(SECOND_NS // 20, claims)
        under_way = world.peers["a"].agreement._state.attempt
        if under_way is not None and not under_way.planned:
            part = contribution(under_way.number, present, me)
            for name in HONEST:
                say(world, LIAR, name, gather(under_way.number, GENESIS, part, sender=me))

    stops(world, "a")
    claims()
    settles(world, HONEST, within_s=45)
    assert lives(world, HONEST) == [1, 1, 1, 1]


def test_what_strangers_sign_follows_from_no_view_that_was_not_agreed_on() -> None:
    """A member that lies signs it, too. Only who had said Ready to the view before believed it."""
    world = swarm(HONEST)
    strangers = [Member(f"s{number}", 1) for number in range(6)]
    before = view_of(world, "a")
    members = tuple(sorted((*before.members, *strangers)))
    records = sorted_records([record(it.peer_id, life=it.life) for it in members])
    snapshot = msgspec.structs.replace(
        before.snapshot, number=2, planned=True, records=records, contributors=members
    )
    readied = View(snapshot, before.plan)
    views = {name: world.peers[name].agreement._state.others.views for name in ("a", "c")}
    views["a"].says_ready(readied, [before.id])
    shown = self_made_view(members, 4, (*strangers, before.members[1]))
    learnt = [it.learn(shown, before.id, verify) for it in views.values()]
    assert learnt == [False, False]
    views["a"].note_agreed(readied.id)
    assert views["a"].learn(shown, before.id, verify)
