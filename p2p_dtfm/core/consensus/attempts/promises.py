"""What a peer holds to within a life: no number is answered twice, and at most one Ready is said
for it."""

from dataclasses import dataclass, field

from p2p_dtfm.core.consensus.attempts.attempt import Attempt
from p2p_dtfm.core.messages.agreement_messages import Ready
from p2p_dtfm.core.protocol.snapshot import ViewId

ATTEMPTS_LIMIT = 4


class SaidReady:
    """The newest attempts in which this peer has said Ready since its view took over.

    Somebody's Ready may get lost on the way to this peer alone. This peer then goes on to another
    attempt, while the others may all have agreed on the first one.
    """

    def __init__(self) -> None:
        self.last: Ready | None = None
        self._attempts: dict[ViewId, Attempt] = {}

    def add(self, attempt: Attempt, ready: Ready) -> None:
        self.last = ready
        self._attempts[ready.view] = attempt
        attempt.set_aside.parked.clear()  # nobody parked can be named any more
        while len(self._attempts) > ATTEMPTS_LIMIT:
            del self._attempts[next(iter(self._attempts))]

    def find(self, view: ViewId) -> Attempt | None:
        return self._attempts.get(view)

    def take_over(self) -> None:
        """A view takes over: what was attempted before is over."""
        self._attempts = {}


@dataclass
class Promises:
    """Numbers only grow."""

    said_ready: SaidReady = field(default_factory=SaidReady)
    highest_number: int = 0
    """The highest number that this peer has heard of."""
    readied_number: int = 0
    given_up_number: int = 0

    @property
    def passed_number(self) -> int:
        """This peer never again enters an attempt with this number, or a lower one."""
        return max(self.readied_number, self.given_up_number)

    def hears_of(self, number: int) -> None:
        """This peer hears of a number: its next attempt has a higher one."""
        self.highest_number = max(self.highest_number, number)

    def readies(self, number: int) -> None:
        """This peer says Ready for this number."""
        self.readied_number = max(self.readied_number, number)

    def gives_up(self, number: int) -> None:
        """The attempt of this number is over."""
        self.given_up_number = max(self.given_up_number, number)
