"""The agreed planned view that waits for its takeover, and the ways in which it goes."""

from collections.abc import Callable
from dataclasses import dataclass, field

from p2p_dtfm.core.membership.states_given import StatesGiven
from p2p_dtfm.core.protocol.snapshot import Member, ViewId
from p2p_dtfm.core.recovery.view import View


@dataclass
class AgreedNextView:
    """Which members of the next view have what they need there, and whether the view is still
    wanted."""

    view: View | None = None
    agreed_ns: int = 0
    synced: set[Member] = field(default_factory=set)
    self_synced: bool = False
    synced_sent_ns: int = 0
    vouched: ViewId | None = None
    """This peer's Prepared of the step under way says that all are synced: the view must stay."""
    is_doomed: bool = False
    """The view is dropped as soon as this peer does not vouch for it."""
    dropped: View | None = None
    """The view that this peer has dropped: others may have taken it over."""
    call_off: str = ""
    """Why this peer dropped the view. The others wait for it, and learn by the next attempt that
    they need not."""
    given: StatesGiven = field(default_factory=StatesGiven)
    """How much the newcomers of the view have got of their states."""

    def waits(self, view: View, now_ns: int) -> None:
        """All have said Ready to the view."""
        self.view, self.agreed_ns = view, now_ns
        self.synced, self.self_synced = set(), False
        needs = {peer_id: view.state_bytes_of(peer_id) for peer_id in view.member_ids}
        self.given.begin(needs if view.snapshot.step else {})

    def forget(self) -> None:
        """Another attempt begins, or a view has taken over: what was agreed before is not taken
        over any more."""
        self.dropped = self.view = None
        self.call_off = ""
        self.synced, self.self_synced, self.is_doomed = set(), False, False

    def drop(self) -> None:
        """This peer does not take over the view any more, unless others show that they have."""
        self.dropped, self.view = self.view, None
        self.is_doomed = self.self_synced = False

    def doom(self, reason: str) -> None:
        """Drop the view at once, or after the step for which this peer has vouched."""
        self.is_doomed = True
        self.call_off = reason
        if self.vouched is None:
            self.drop()

    def slept(self, moved_ns: Callable[[int], int]) -> None:
        """This peer was asleep and did not listen: whoever must sync has as much time as before."""
        self.agreed_ns = moved_ns(self.agreed_ns)
        self.given.slept(moved_ns)
