"""A member signs two contributions to each planned attempt, so all others accuse it there. It opens
the next attempt before theirs has come to a view that is taken over, and so keeps all newcomers
out."""

import msgspec

from p2p_dtfm.core.consensus.actions import LAN
from p2p_dtfm.core.messages.agreement_messages import (
    AgreementMessage,
    Contribution,
    Gather,
    sign_contribution,
)
from p2p_dtfm.core.protocol.canonical import decode
from p2p_dtfm.sim.faults.agreement_world import AgreementWorld
from p2p_dtfm.sim.faults.invariants import Violation
from p2p_dtfm.sim.faults.simulated_peer import SimulatedPeer
from p2p_dtfm.sim.faults.simulated_process import sign_for
from tests.core.liars import are_together, lives, swarm

LIAR, HONEST, NEWCOMER = "l", ["a", "b", "c"], "z"


class TwoFaces(SimulatedPeer):
    """The liar tells one member another contribution than the rest, and wants a new plan all the
    time."""

    begins = False

    def receive(self, sender: str, message: AgreementMessage) -> None:  # type: ignore[override]
        try:
            super().receive(sender, message)
        except Violation:
            if LIAR not in (sender, self.name):
                raise

    def send(self, receiver: str, message: AgreementMessage) -> None:  # type: ignore[override]
        is_lie = self.name == LIAR and self.begins and receiver == "a"
        if is_lie and isinstance(message, Gather) and message.planned:
            parts = tuple(
                _other_face(it) if it.peer_id == LIAR else it for it in message.contributions
            )
            message = msgspec.structs.replace(message, contributions=parts)
        super().send(receiver, message)

    def _beat(self) -> None:
        super()._beat()
        if self.name == LIAR and self.begins and self.view is not None:
            self.do(self.agreement.request_replan("it likes to", self.now_ns))


def _other_face(signed: object) -> object:
    part = decode(signed.payload, Contribution)  # type: ignore[attr-defined]
    other = msgspec.structs.replace(part, joiners=(), may_repeat=part.may_repeat + 1)
    return sign_contribution(other, sign_for(LIAR))


def test_who_has_two_faces_keeps_no_newcomer_out() -> None:
    world: AgreementWorld = swarm([*HONEST, LIAR], peer_type=TwoFaces, timing=LAN)
    world.liars = frozenset({LIAR})
    world.peers[LIAR].begins = True  # type: ignore[attr-defined]
    world.peer_type = SimulatedPeer
    world.add_peer(NEWCOMER).agreement.wants_view()
    world.run_until(lambda: are_together(world, [*HONEST, NEWCOMER]), limit_s=20)
    assert lives(world, HONEST) == [1, 1, 1]
