"""A member that signs two contributions to one attempt does not count, nor does who counts by its
word alone: which of the two came first differs from peer to peer."""

import msgspec
import pytest

from p2p_dtfm.core.consensus.actions import LAN, SECOND_NS, Actions
from p2p_dtfm.core.consensus.attempts.attempt import Attempt
from p2p_dtfm.core.consensus.parts.gather.gathering import Gathering
from p2p_dtfm.core.messages.agreement_messages import (
    AgreementMessage,
    Contribution,
    Gather,
    JoinRequest,
    sign_contribution,
)
from p2p_dtfm.core.protocol.canonical import decode
from p2p_dtfm.core.protocol.signed import Signed
from p2p_dtfm.sim.faults.simulated_peer import SimulatedPeer
from p2p_dtfm.sim.faults.simulated_process import sign_for
from tests.core.liars import lives, say, swarm, trains_on

LIAR, FRIEND = "l", "n"
HONEST = ["a", "b", "c", "d"]


class TwoWords(SimulatedPeer):
    """A liar that names its friend to some members, and nobody to the others. The friend asks the
    liar alone."""

    def send(self, receiver: str, message: AgreementMessage) -> None:  # type: ignore[override]
        if self.name == FRIEND and isinstance(message, JoinRequest) and receiver != LIAR:
            return
        if self.name == LIAR and receiver in HONEST[2:] and isinstance(message, Gather):
            told = tuple(map(self._without_friend, message.contributions))
            message = msgspec.structs.replace(message, contributions=told)
        super().send(receiver, message)

    def _without_friend(self, signed: Signed) -> Signed:
        if signed.peer_id != LIAR:
            return signed
        part = decode(signed.payload, Contribution)
        if part.present is None:
            return signed
        return sign_contribution(msgspec.structs.replace(part, joiners=()), sign_for(LIAR))


def test_who_is_named_by_it_alone_splits_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    excluded = Gathering._excluded

    def stays(self: Gathering, attempt: Attempt, now_ns: int) -> Actions:
        """The liar goes on, though it knows that it is left out."""
        return [] if attempt.me.peer_id == LIAR else excluded(self, attempt, now_ns)

    monkeypatch.setattr(Gathering, "_excluded", stays)
    world = swarm([*HONEST, LIAR], peer_type=TwoWords, timing=LAN)
    world.liars = frozenset({LIAR, FRIEND})
    friend = world.add_peer(FRIEND)

    def ask() -> None:
        if friend.view is None:  # all accuse the liar meanwhile, and may have let its friend in
            say(world, FRIEND, LIAR, friend.agreement.wants_view())

    for at in range(6):
        world.after(15 * at * SECOND_NS, ask)
    world.run_to(world.now_ns + 90 * SECOND_NS)
    assert lives(world, HONEST) == [1, 1, 1, 1]
    trains_on(world, HONEST)
