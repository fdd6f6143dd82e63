"""Attempts in which this peer has said Ready: the others may all agree on one that it goes on from,
for want of somebody's Ready that got lost on the way to it alone."""

from p2p_dtfm.core.consensus.attempts.attempt import Attempt
from p2p_dtfm.core.messages.agreement_messages import Ready
from p2p_dtfm.core.protocol.snapshot import ViewId

ATTEMPTS_LIMIT = 4


class SaidReady:
    """Those since its view took over, as far as they are worth keeping."""

    def __init__(self) -> None:
        self.last: Ready | None = None
        self._attempts: dict[ViewId, Attempt] = {}

    def add(self, attempt: Attempt, ready: Ready) -> None:
        self.last = ready
        self._attempts[ready.view] = attempt
        attempt.set_aside.parked.clear()  # nobody is named in it any more
        while len(self._attempts) > ATTEMPTS_LIMIT:
            del self._attempts[next(iter(self._attempts))]

    def find(self, view: ViewId) -> Attempt | None:
        return self._attempts.get(view)

    def take_over(self) -> None:
        """What was attempted before that is over."""
        self._attempts = {}
