"""Two members lie together: one signs two Prepared of a step, and the other one shows the second to
an honest member, once the step after it was rolled forward. Nobody tells of that step any more."""

import msgspec

from p2p_dtfm.core.messages.prepared import Prepared, SignedPrepared, Statement, sign_prepared
from p2p_dtfm.core.protocol.canonical import decode
from p2p_dtfm.core.protocol.snapshot import ViewId
from p2p_dtfm.sim.faults.simulated_peer import SimulatedPeer
from p2p_dtfm.sim.faults.simulated_process import sign_for
from tests.core.liars import lives, swarm, trains_on, view_of

NAMES = ["a", "b", "c", "d"]
SHOWN_TO, LIAR = "a", "d"
TIMES = 5


class SaysToItself(SimulatedPeer):
    """Once the world says so no Prepared reaches anybody else."""

    is_quiet = False

    def send(self, receiver: str, message: object) -> None:
        if not (SaysToItself.is_quiet and isinstance(message, SignedPrepared)):
            super().send(receiver, message)  # type: ignore[arg-type]


def test_who_has_said_two_things_of_a_step_past_goes_and_who_was_shown_both_stays() -> None:
    """Only one of the two was brought along, so nobody went, and all agreed anew again and again.
    The one that was shown both was taken for who stops the steps."""
    world = swarm(NAMES, peer_type=SaysToItself)
    world.liars, victim = frozenset({LIAR}), world.peers[SHOWN_TO]
    heard, view = victim.agreement, view_of(world, SHOWN_TO)
    SaysToItself.is_quiet = True
    step = heard.step
    said = {(view.id, step), (view.id, step + 1)}
    world.run_until(lambda: all(it.said & said for it in world.peers.values()))
    victim.do(heard.repeat_step("a lost tensor", victim.now_ns))
    SaysToItself.is_quiet = False
    world.run_until(lambda: victim.view is not view)
    held = heard.said_of_last_step(LIAR)
    assert held is not None and heard.recovery_evidence.retained is not None
    prepared = decode(held.payload, Prepared)
    assert prepared.step < heard.recovery_evidence.retained.step, "that step was rolled forward"
    other = msgspec.structs.replace(prepared, ready_for=ViewId(99, "another"))
    shown = Statement(other, sign_prepared(other, sign_for(LIAR)))
    for _ in range(TIMES):
        view = view_of(world, SHOWN_TO)
        if LIAR not in view.member_ids or not heard.hears_unlike(shown):
            break
        victim.do(heard.repeat_step("two words of one", victim.now_ns))
        world.run_until(lambda at=view: victim.view is not at)  # type: ignore[misc]
    honest = [name for name in NAMES if name != LIAR]
    trains_on(world, honest)
    assert lives(world, honest) == [1, 1, 1]
    assert LIAR not in view_of(world, SHOWN_TO).member_ids
