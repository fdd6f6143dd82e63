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


def signed(maker: str, step: int = STEP, ready_for: ViewId | None = None) -> Signed:
    prepared = Prepared(VIEW, step, maker, {0: 1.0}, 0.0, 1, 0.0, 0, ready_for)
    return sign_prepared(prepared, sign_for(maker))


class Receiver(Dispatch):
    """A member that lacks the Prepared of `maker` for the open step."""

    def __init__(self) -> None:
        self.heard: list[Statement] = []
        ledger = SimpleNamespace(view=VIEW, step=STEP, missing=("maker",))
        self._agreement: Any = SimpleNamespace(
            ledger=ledger,
            said_of_last_step=lambda peer_id: (
                signed(peer_id, STEP - 1) if peer_id != "stranger" else None
            ),
            hears_unlike=lambda it: it.prepared.step == STEP - 1,
        )
        self.contradictions: list[str] = []
        trainer = SimpleNamespace(prepared=self.heard.append)
        self._participant: Any = SimpleNamespace(
            trainer=trainer, contradiction=self.contradictions.append
        )
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


def test_another_one_of_the_last_step_has_all_agree_anew() -> None:
    receiver = Receiver()
    receiver._of_a_step("another", SignedPrepared(signed("third", STEP - 1)))
    assert not receiver.contradictions, "the same one as came here"
    receiver._of_a_step("another", SignedPrepared(signed("third", STEP - 1, ViewId(4, "next"))))
    assert receiver.contradictions == ["third said two different Prepared for step 6"]
    assert not receiver.heard


def test_who_shows_what_one_has_said_that_has_gone_since_is_not_blamed() -> None:
    """It may not have heard of that view yet. Nobody has to agree anew for who is out already."""
    receiver = Receiver()
    for ready_for in (None, ViewId(4, "next")):
        receiver._of_a_step("another", SignedPrepared(signed("gone", STEP - 1, ready_for)))
    assert not receiver.contradictions and not receiver.heard
