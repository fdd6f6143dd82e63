"""A member says to all but one that it knows the same, and to that one that it knows something
else. The one cannot freeze what it knows, and all others wait for its Ready."""

import msgspec
import pytest

from p2p_dtfm.core.consensus.actions import LAN
from p2p_dtfm.core.messages.agreement_messages import AgreementMessage, Gather, Ready
from p2p_dtfm.sim.faults.agreement_world import AgreementWorld
from p2p_dtfm.sim.faults.simulated_peer import SimulatedPeer
from tests.core.liars import lives, swarm, trains_on

LIAR, VICTIM = "l", "a"
HONEST = ["a", "b", "c", "d"]


class OtherDigests(SimulatedPeer):
    """The liar says otherwise to its victim, in each attempt since the founding."""

    def send(self, receiver: str, message: AgreementMessage) -> None:  # type: ignore[override]
        if self.name == LIAR and receiver == VICTIM and self.view is not None:
            if isinstance(message, Ready):
                return
            if isinstance(message, Gather) and message.digest:
                message = msgspec.structs.replace(message, digest="0" * 64)
        super().send(receiver, message)


def all_agree_anew(world: AgreementWorld) -> None:
    peer = world.peers["b"]
    peer.do(peer.agreement.repeat_step("a lost tensor", peer.now_ns))


@pytest.mark.parametrize("honest", (HONEST[:2], HONEST[:3], HONEST))
def test_one_that_is_told_otherwise_keeps_its_place(honest: list[str]) -> None:
    """All others took the side of the first that went on without it, time and again: one liar had
    honest members out one after the other."""
    world = swarm([*honest, LIAR], peer_type=OtherDigests, timing=LAN)
    world.liars = frozenset({LIAR})
    for _ in range(2):
        all_agree_anew(world)
        trains_on(world, honest)
    assert lives(world, honest) == [1] * len(honest)
