"""What arrives is handed on, whatever else is wrong with it."""

from types import SimpleNamespace
from typing import Any

from p2p_dtfm.core.messages.agreement_messages import Active, AgreementMessage, Gather
from p2p_dtfm.core.protocol.signed import Signed
from p2p_dtfm.core.protocol.snapshot import GENESIS, Member
from p2p_dtfm.daemon.node.dispatch import Dispatch


class Receiver(Dispatch):
    """With an agreement that has begun something as soon as it heard the sender."""

    def __init__(self) -> None:
        self.done: list[Any] = []
        self._agreement = SimpleNamespace(receive=self.receive)
        self.looks_again: list[bool] = []
        trainer = SimpleNamespace(may_commit=lambda: self.looks_again.append(True))
        self._participant = SimpleNamespace(trainer=trainer)
        self._membership = SimpleNamespace(actions=SimpleNamespace(do=self.done.extend))

    def receive(self, sender: str, message: AgreementMessage, now_ns: int) -> list[Any]:
        return ["the step has to stop"]


def test_what_a_message_has_begun_is_done_though_it_carries_nonsense() -> None:
    receiver = Receiver()
    nonsense = Signed("evil", "contribution", b"\xc1", b"")
    message = Gather(Member("evil", 2), 4, True, GENESIS, 1, (nonsense,), (), "0" * 64)
    receiver._receive("evil", message)
    assert receiver.done == ["the step has to stop"]


def test_the_step_loop_learns_that_somebody_is_active() -> None:
    """It may be all that the step under way has waited for."""
    receiver = Receiver()
    receiver._receive("a", Active(Member("a", 1), GENESIS, 4))
    assert receiver.looks_again
