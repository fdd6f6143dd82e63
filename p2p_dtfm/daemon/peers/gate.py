"""This daemon's gate. It knows what each sender is to this peer now, and is asked before anything
is served."""

import collections
import logging
from collections.abc import Callable, Container

from p2p_dtfm.core.consensus.agreement import Agreement
from p2p_dtfm.core.gate.admissions import Admissions
from p2p_dtfm.core.gate.gate import Admitted, Gate, GateRefusal, Reason
from p2p_dtfm.core.gate.gate_table import NEAR, Role
from p2p_dtfm.core.messages.agreement_messages import Gather, JoinRequest, Spread
from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.core.protocol.invited.chains import NOT_INVITED
from p2p_dtfm.core.protocol.invited.guest_list import GuestList
from p2p_dtfm.core.recovery.view import View
from p2p_dtfm.daemon.peers.wire import Hello, Introduction, Knock, Message, Revocations
from p2p_dtfm.net.contacts.calling import put_newest
from p2p_dtfm.net.door import BUSY, Leave
from p2p_dtfm.net.libp2p.port import HostPort
from p2p_dtfm.ports import now
from p2p_dtfm.web.state import RefusedCount

FORMER_LIMIT = 4096
REFUSED_SHOWN = 128
TOLD_EVERY_S = 10.0
ENTERING = (Hello, Knock, JoinRequest)
"""Messages that are of use only to a peer that is to join."""
UNPAID = (Hello, Knock, JoinRequest, Introduction, Revocations)
"""Messages that newcomers begin with. Each holds a signature or two, and a flood of other messages
keeps nobody from them."""
_UNPAID_KINDS = frozenset(kind.__name__ for kind in UNPAID)
_GATHERS = (Gather.__name__, Spread.__name__)
_OF_A_STRANGER = "Gather of a stranger"
_SOON = (Reason.RATE, Reason.TOGETHER, Reason.AT_ONCE)

log = logging.getLogger("p2p_dtfm.gate")


class GateKeeper:
    """The door of a daemon's host (`net.door.Door`), and the gate before its messages and files."""

    def __init__(self, vouched: Container[str] = ()) -> None:
        """`vouched`: peers that the user has named, or the member that this peer asked."""
        self._vouched = vouched
        self.admissions = Admissions()
        self.is_open = False
        """Whether the run gives its files to everybody."""
        self.guests: GuestList | None = None
        """The guests, if the run is by invitation. All other peers are told nothing."""
        self._agreement: Agreement | None = None
        self._gate = Gate(
            self.role_of,
            lambda: self.is_outside,
            lambda: self.is_open,
            lambda: self.guests is not None,
        )
        self._seen_views: tuple[View | None, View | None] = (None, None)
        self._members: frozenset[str] = frozenset()
        self._in_force: frozenset[str] = frozenset()
        """Members of the view in force alone. A peer that is only to join has taken nothing
        over."""
        self._former: dict[str, None] = {}
        self._told_s = 0.0
        self._untold = 0

    @classmethod
    def of(cls, host: HostPort) -> "GateKeeper":
        """Guard a host from now on: which peers it serves, and which it calls."""
        keeper = cls(host.calling.vouched)
        host.door, host.calling.trusts = keeper, keeper.trusts
        return keeper

    def attach(self, agreement: Agreement, is_open: bool) -> None:
        """Set the agreement, once the run is known."""
        self._agreement = agreement
        self.is_open = is_open
        # a fellow of before this daemon's restart is no stranger
        self._former = collections.OrderedDict.fromkeys(
            peer_id for known in agreement.history for peer_id in sorted(known.peer_ids)
        )

    @property
    def refused(self) -> collections.Counter[tuple[str, str, str]]:
        """The number of refusals by (role, kind, reason)."""
        return self._gate.refused

    def refused_most(self) -> tuple[RefusedCount, ...]:
        """The most frequent refusals, for status and metrics."""
        most = self._gate.refused.most_common(REFUSED_SHOWN)
        return tuple(RefusedCount(*what, count) for what, count in sorted(most))

    @property
    def is_outside(self) -> bool:
        """Whether this peer is in no view: it cannot know by itself which peers are members."""
        return self._agreement is None or self._agreement.view is None

    def role_of(self, peer_id: str) -> Role:
        """What a peer is to this one now."""
        guests = self.guests
        if guests is not None and guests.refusal(peer_id) is not None:
            return Role.STRANGER
        # a bootstrap node is named as well, and need not be a guest
        is_named = self._is_named(peer_id) and (guests is None or guests.admits(peer_id))
        return Role.MEMBER if is_named else self._role_in_views(peer_id)

    def came_before(self, peer_id: str) -> bool:
        """Whether views, or in no view a peer that is believed, say that others have let this peer
        in, even if its invitation is known to be taken back since."""
        return self._is_named(peer_id) or self._role_in_views(peer_id) in NEAR

    def _is_named(self, peer_id: str) -> bool:
        """Whether a peer counts because it was named, while this peer is in no view."""
        return self.is_outside and peer_id in self._vouched

    def _role_in_views(self, peer_id: str) -> Role:
        agreement = self._agreement
        if agreement is None:
            return self._newcomer_or_stranger(peer_id)
        self._look_at_views(agreement)
        if peer_id in self._members or peer_id in agreement.agreed_contributors:
            return Role.MEMBER
        if peer_id in agreement.awaited:
            return Role.CONTRIBUTOR
        if peer_id in self._former:
            return Role.FORMER
        return self._newcomer_or_stranger(peer_id)

    def _newcomer_or_stranger(self, peer_id: str) -> Role:
        if self.guests is not None:
            return Role.NEWCOMER if self.guests.admits(peer_id) else Role.STRANGER
        admitted = self.admissions.holds(peer_id, now.monotonic_ns())
        return Role.NEWCOMER if admitted else Role.STRANGER

    def _look_at_views(self, agreement: Agreement) -> None:
        views = (agreement.view, agreement.next_view)
        if views[0] is self._seen_views[0] and views[1] is self._seen_views[1]:
            return
        self._seen_views = views
        named = [frozenset(view.member_ids) if view is not None else frozenset() for view in views]
        for peer_id in sorted(self._in_force - named[0]):
            put_newest(self._former, peer_id, None, FORMER_LIMIT)
        self._in_force, self._members = named[0], named[0] | named[1]

    def trusts(self, peer_id: str) -> bool:
        """Whether this peer calls another wherever that is said to be. It does so for members, and
        for peers that its user or the member that it asked has named. A peer that is agreed on but
        yet to join comes by itself: it may never take anything over."""
        role = self.role_of(peer_id)
        if self.guests is not None and self.guests.refusal(peer_id) is not None:
            return False
        if peer_id in self._vouched:
            return True
        return role is Role.FORMER or (
            role is Role.MEMBER and (self.is_outside or peer_id in self._in_force)
        )

    def may_hear(self, peer_id: str) -> bool:
        """Whether a peer may be told of the run unasked. In a run by invitation these are guests,
        and peers that views or members have named: of those this peer may not know the invitation.
        """
        guests, agreement = self.guests, self._agreement
        if guests is None or agreement is None:
            return True
        if guests.refusal(peer_id) is not None:
            return False
        return self.role_of(peer_id) is not Role.STRANGER or agreement.familiar.has_met(peer_id)

    # the door ---------------------------------------------------------------------------------

    def enter(self, sender: str, kind: str, size_bytes: int) -> Leave | str:
        """See `net.door.Door`."""
        answer = self._gate.admit(sender, kind, size_bytes, now.monotonic_ns(), stays=True)
        if isinstance(answer, GateRefusal):
            return self._told(sender, kind, answer)
        return _Leaving(self._gate, sender, answer, kind)

    def spend(self, sender: str, kind: str, amount: int) -> None:
        """See `net.door.Door`."""
        self._gate.spend(sender, kind, amount, now.monotonic_ns())

    def require(self, sender: str, kind: str, size_bytes: int = 0, pays: str = "") -> None:
        """Raises `PeerFault` unless `sender` may say this now and has paid what it owes under
        `pays`."""
        answer = self._gate.admit(sender, kind, size_bytes, now.monotonic_ns(), pays=pays)
        if isinstance(answer, GateRefusal):
            raise PeerFault(self._told(sender, kind, answer), sender)

    def require_readable(self, sender: str, kind: str, size_bytes: int) -> None:
        """Raises `PeerFault` where `sender` may say nothing of this kind now, whatever it contains.
        This is asked before the message is read, since reading costs more than all that the gate
        does."""
        pays = "" if kind in _UNPAID_KINDS else self._opening
        if kind in _GATHERS and not self.is_outside and self.role_of(sender) is Role.STRANGER:
            kind = _OF_A_STRANGER
        answer = self._gate.glance(sender, kind, size_bytes, now.monotonic_ns(), pays)
        if answer is not None:
            raise PeerFault(self._told(sender, kind, answer), sender)

    def require_message(self, sender: str, message: Message, size_bytes: int) -> None:
        """As `require`. A Gather or Spread of a stranger must carry what a member has signed."""
        kind = type(message).__name__
        if isinstance(message, ENTERING):
            self.require_guest(sender)
        if isinstance(message, Gather | Spread) and self.role_of(sender) is Role.STRANGER:
            self._look_at_members()
            if not self.is_outside and self._members & {s.peer_id for s in message.contributions}:
                kind = _OF_A_STRANGER
        if isinstance(message, UNPAID):
            self.require(sender, kind, size_bytes)
            return
        pays = self._opening
        self.require(sender, kind, size_bytes, pays)
        if self.is_outside:  # it may have to read the same again and again
            self._gate.spend(sender, pays, size_bytes >> 10, now.monotonic_ns())

    @property
    def _opening(self) -> str:
        return "opening in no view" if self.is_outside else "opening"

    def pays(self, sender: str, effort: int) -> None:
        """Charge the sender with what it has cost to look at what a message passes on
        (`identity.effort_spent`)."""
        if effort:  # little of what is said has to be opened
            self._gate.spend(sender, self._opening, effort, now.monotonic_ns())

    def require_guest(self, sender: str) -> None:
        """Raises `PeerFault` where the run is by invitation and `sender` has shown none."""
        if why := self._why_no_guest(sender):
            raise PeerFault(why, sender)

    def _why_no_guest(self, sender: str) -> str:
        """Why `sender` is no guest, in words for it. Empty where all may come, or it may."""
        guests = self.guests
        if guests is None or guests.admits(sender):
            return ""
        return f"{NOT_INVITED}: {guests.refusal(sender) or 'this run is by invitation'}"

    def _look_at_members(self) -> None:
        if self._agreement is not None:
            self._look_at_views(self._agreement)

    def blame(self, sender: str, kind: str) -> None:
        """What a sender was let in with was wrong."""
        self._gate.blame(sender, kind, now.monotonic_ns())

    def is_near(self, sender: str) -> bool:
        """See `net.door.Door`."""
        return self.role_of(sender) in NEAR

    def goes_first(self, sender: str) -> bool:
        """See `net.door.Door`. Former members do not go first, since there may be any number."""
        return self.role_of(sender) is Role.MEMBER

    def _told(self, sender: str, kind: str, refusal: GateRefusal) -> str:
        """The refusal in words. It is logged now and then, or a flood would fill the log."""
        text = f"{kind}: {refusal.reason.value} of a {refusal.role.value}"
        why = self._why_no_guest(sender) if refusal.role is Role.STRANGER else ""
        now_s = now.monotonic_s()
        self._untold += 1
        if now_s - self._told_s > TOLD_EVERY_S:
            log.warning("refuses %s (%s); %d refusals lately", sender, text, self._untold)
            self._told_s, self._untold = now_s, 0
        return BUSY if refusal.reason in _SOON else why or text


class _Leaving:
    """Called when what was admitted is done; says so once."""

    def __init__(self, gate: Gate, sender: str, admitted: Admitted, kind: str) -> None:
        self._left: Callable[[], None] | None = lambda: gate.left(sender, admitted.role, kind)

    def __call__(self) -> None:
        left, self._left = self._left, None
        if left is not None:
            left()
