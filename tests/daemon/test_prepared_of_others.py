"""Where a maker told its Prepared to all but this peer, this peer gets it from others."""

from types import SimpleNamespace
from typing import Any

import pytest

from p2p_dtfm.core.messages.prepared import (
    Prepared,
    SignedPrepared,
    Statement,
    open_prepared,
    sign_prepared,
)
from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.core.protocol.signed import Signed
from p2p_dtfm.core.protocol.snapshot import ViewId
from p2p_dtfm.daemon.node.dispatch import Dispatch
from p2p_dtfm.sim.faults.simulated_process import sign_for, verify

VIEW, STEP = ViewId(3, "view"), 7


def signed(maker: str, step: int = STEP) -> Signed:
    prepared = Prepared(VIEW, step, maker, {0: 1.0}, 0.0, 1, 0.0, 0, None)
    return sign_prepared(prepared, sign_for(maker))


class Receiver(Dispatch):
    """A member that lacks the Prepared of `maker` for the open step."""

    def __init__(self) -> None:
        self.heard: list[Statement] = []
        ledger = SimpleNamespace(view=VIEW, step=STEP, missing=("maker",))
        self._agreement: Any = SimpleNamespace(ledger=ledger)
        trainer = SimpleNamespace(prepared=self.heard.append)
        self._participant: Any = SimpleNamespace(trainer=trainer)
        members = {"maker", "another", "third"}
        self._membership: Any = SimpleNamespace(members=lambda: members, verify=verify)


def test_a_member_passes_on_what_is_missing() -> None:
    receiver, said = Receiver(), signed("maker")
    receiver._of_a_step("another", SignedPrepared(said))
    assert receiver.heard == [Statement(open_prepared(said, verify), said)]


def test_what_is_not_missing_is_not_looked_at() -> None:
    receiver = Receiver()
    receiver._of_a_step("another", SignedPrepared(signed("third")))
    receiver._of_a_step("another", SignedPrepared(signed("maker", STEP + 1)))
    assert not receiver.heard


@pytest.mark.parametrize("sender, maker", [("stranger", "maker"), ("another", "stranger")])
def test_nobody_else_does(sender: str, maker: str) -> None:
    receiver = Receiver()
    with pytest.raises(PeerFault, match=sender):
        receiver._of_a_step(sender, SignedPrepared(signed(maker)))
    assert not receiver.heard


def test_a_forgery_is_the_fault_of_who_brings_it() -> None:
    receiver, true = Receiver(), signed("maker")
    forged = Signed("maker", true.kind, true.payload, b"0" * 64)
    with pytest.raises(PeerFault, match="another"):
        receiver._of_a_step("another", SignedPrepared(forged))
    assert not receiver.heard
