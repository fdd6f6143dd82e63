"""Where peers of two views meet: who goes over to whom, and on what proof."""

from p2p_dtfm.core.commit.ledger import STEPS_AHEAD_LIMIT
from p2p_dtfm.core.consensus.actions import SECOND_NS, Actions, Report, SendMessage
from p2p_dtfm.core.consensus.activity import Activity
from p2p_dtfm.core.consensus.view_precedence import Side, outranks, own_side, side_of
from p2p_dtfm.core.messages.agreement_messages import JoinRequest, KnownView, Standing
from p2p_dtfm.core.messages.statements import signers
from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.protocol.signed import Signed
from p2p_dtfm.core.recovery.view import View

FIRM_MEMBERS = 3
"""A view of so many that trains never yields to another swarm of the run with which it has nothing
in common: one member's acquaintance does not outweigh the others."""
FOREIGN_TOLD_NS = 600 * SECOND_NS
TOLD_AT_ONCE = 16
"""So many peers outside the view are told of it at a time, in turns."""


class Meeting(Activity):
    """Nobody gives up its view on a word that is not signed and proven."""

    def _receive_standing(self, message: Standing, now_ns: int) -> Actions:
        view = self.view
        if view is None:
            return self._hear_of_view(message, now_ns)
        if message.view == view.id or self.me not in view.members:
            return []
        if self.me in message.members:
            return self._missed(message.sender, message.view, now_ns)
        if message.sender in view.members:
            return self._hear_from_fellow(view, message, now_ns)
        return self._compare(view, message, now_ns)

    def _compare(self, view: View, message: Standing, now_ns: int) -> Actions:
        """With a view of which none of this peer's fellows speaks."""
        common = self._known.newest_common((message.view, *message.ancestors))
        if common is None and not self._knows_signer(message):
            return self._tell_of_foreigners(message, now_ns)
        theirs = self._side_of(message, common)
        if theirs is None:
            return []
        mine = own_side(self._standing(view), common)
        is_stood_for = common is None or bool(theirs.support or mine.support)
        if not is_stood_for and not self._knows_signer(message):
            # nobody of that view is left in either: anybody may name it
            return self._tell_of_foreigners(message, now_ns)
        if common is None:
            goes = self._follows_foreigners(view, message, theirs, mine)
        else:
            goes = outranks(theirs, mine) and not self._stays_where_told(common, theirs, mine)
        if goes:
            self._known.leaves(common)
            reason = f"view {message.view} of {message.sender.peer_id} counts"
            return self._rejoin(reason, isinstance(view.plan, Plan))
        told = self._tell_of_foreigners(message, now_ns) if common is None else []
        return [*told, *self._answer_outsider(message.sender, now_ns)]

    def _knows_signer(self, message: Standing) -> bool:
        """Whether somebody that it knows is a member of that view, and has signed so. No other
        signature is looked at before that: there may be a thousand."""
        names = [it.peer_id for it in message.members if self.familiar.holds(it.peer_id)]
        return bool(names and signers(message.certificate, self._verify, names))

    def _follows_foreigners(self, view: View, message: Standing, theirs: Side, mine: Side) -> bool:
        """Whether to go over to a view with which this peer's has nothing in common: only to where
        somebody is whom it knows. Where its user told it to go, it goes, unless they come."""
        is_firm = len(view.members) >= FIRM_MEMBERS
        if is_firm and (mine.has_plan or len(theirs.support) < len(view.members)):
            return False
        given = self.familiar.given
        was_told = bool(theirs.support & given) and not mine.support & given
        if was_told and not set(message.follows) & set(view.member_ids):
            return theirs.has_plan or not mine.has_plan
        return outranks(theirs, mine)

    def _stays_where_told(self, common: KnownView, theirs: Side, mine: Side) -> bool:
        """Its user sent it over from the others to somebody who was never among them."""
        given = self.familiar.given - common.peer_ids
        return bool(mine.signed & given) and not theirs.signed & given

    def _hear_from_fellow(self, view: View, message: Standing, now_ns: int) -> Actions:
        """A member of this peer's own view is in another one, without this peer."""
        attempt = self._attempt
        agreed = {view.id for view in (self.next_view, self._dropped) if view is not None}
        awaited = attempt is not None and attempt.view_id == message.view
        awaited |= message.view in agreed and message.step <= self.step + STEPS_AHEAD_LIMIT
        if awaited or message.view.number < view.id.number:
            return []  # a leaver that helped to agree on it learns of it by Active
        went = signers(message.certificate, self._verify, view.member_ids) & set(view.members)
        if message.sender not in went:
            return []
        if 2 * len(went) < len(view.members):
            return []  # the others notice alike that these are silent, and go on without them
        if 2 * len(went) == len(view.members):
            mine = own_side(self._standing(view), self._known.find(view.id))
            theirs = self._side_of(message, self._known.find(view.id))
            if theirs is None or not outranks(theirs, mine):
                return []
        return self._rejoin(f"view {message.view} has succeeded {view.id} without this peer")

    def _side_of(self, message: Standing, common: KnownView | None) -> Side | None:
        given = self.familiar.given
        return side_of(message, common, self._workload.min_members, self._verify, given)

    def _tell_of_foreigners(self, message: Standing, now_ns: int) -> Actions:
        """Now and then: by itself nothing brings the two together."""
        told_ns = self._foreign_told_ns
        if told_ns is not None and now_ns - told_ns < FOREIGN_TOLD_NS:
            return []
        self._foreign_told_ns = now_ns
        return [
            Report(
                f"{message.sender.peer_id} trains the same run in a swarm with which this one has "
                "nothing in common; each goes on. To bring the two together, start the peers of "
                "one again with --initial-peers and an address of the other"
            )
        ]

    def _hear_of_view(self, message: Standing, now_ns: int) -> Actions:
        """Newcomers never make a view of their own while there is one."""
        if not self._is_proven_standing(message):
            return []
        self._view_heard_ns = now_ns
        following = self.next_view
        if following is not None and message.view.number >= following.id.number:
            if message.view == following.id:
                return []
            if message.sender not in following.snapshot.contributors:
                return []
            self.next_view = None  # it was never taken over: they have gone another way
        if not self._wants_view or self._record is None or self.next_view is not None:
            return []
        attempt = self._attempt
        if attempt is not None and not attempt.only_newcomers:
            return []
        if attempt is not None:
            self._give_up(now_ns)
            self.frozen = False
        return self._tell(message.sender.peer_id, self._join_request(self._record), now_ns)

    def _join_request(self, record: Signed) -> JoinRequest:
        awaits = self.next_view.id if self.next_view is not None else None
        passed = max(self._readied_number, self._given_up_number)
        return JoinRequest(record, awaits, passed)

    def _is_proven_standing(self, message: Standing) -> bool:
        if not self.familiar.is_empty and not self._knows_signer(message):
            return False
        said = signers(message.certificate, self._verify)
        return message.sender in message.members and set(message.members) <= said

    def _meet(self, now_ns: int) -> Actions:
        view = self.view
        if view is None or self.frozen or self.me not in view.members:
            return []
        if now_ns - self._met_ns < self._timing.meet_ns:
            return []
        self._met_ns = now_ns
        members = set(view.member_ids)
        outside = [peer_id for peer_id in self.familiar.all if peer_id not in members]
        to = self.familiar.next_of(outside, TOLD_AT_ONCE)
        return [SendMessage(to, self._standing(view))] if to else []
