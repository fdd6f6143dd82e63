"""Who is active in which view: believed only of views that this peer has agreed to itself."""

from p2p_dtfm.core.consensus.actions import Actions, SendMessage
from p2p_dtfm.core.consensus.gather_reception import GatherReception
from p2p_dtfm.core.messages.agreement_messages import Active
from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.protocol.snapshot import Member, ViewId
from p2p_dtfm.core.recovery.view import View

VIEWS_LIMIT = 16
"""Of so many views that this peer agreed to it remembers who has said Active."""


class Activity(GatherReception):
    """What an Active does: opens the ledger, lets a view be taken over, or shows one was missed."""

    def _receive_active(self, message: Active, now_ns: int) -> Actions:
        view, attempt, to = self.view, self._attempt, (message.sender.peer_id,)
        if not self._note_active(message):
            return []
        if view is not None and message.view == view.id:
            self._open_ledger()
            asked = message.asks and not self.frozen
            return [SendMessage(to, self._active)] if asked else []
        self._view_heard_ns = now_ns
        missed = self._hear_of_agreement(message.sender, [message.certificate], now_ns)
        if missed or (attempt is not None and attempt.view_id == message.view):
            return missed  # it shows all Ready once this peer says again that it still gathers
        for agreed in (self.next_view, self._dropped):
            if agreed is not None and agreed.id == message.view:
                return self._follow(agreed, now_ns)
        if attempt is None and self._is_awaited_in(message):
            return self._rejoin(f"had given up view {message.view}, which waits for this peer")
        return self._missed(message.sender, message.view, now_ns)

    def _is_awaited_in(self, message: Active) -> bool:
        """A newcomer has given up what the others agreed on after all. Who kept its own Ready from
        this peer may say that at any time."""
        last, given_up = self._said_ready.last, self._said_ready.find(message.view)
        if self.view is not None or last is None or last.view != message.view:
            return False
        return given_up is not None and given_up.has_said_ready(message.sender)

    def _note_active(self, message: Active) -> bool:
        """Whether it is of a view to which this peer said Ready, by one that it names."""
        known = self._known.find(message.view)
        if known is None or not self._known.has_readied(message.view):
            return False
        contributors = set(known.members)
        for view in (self.view, self.next_view, self._dropped):
            if view is not None and view.id == message.view:
                contributors |= set(view.snapshot.contributors)
        attempt = self._attempt
        if attempt is not None and attempt.snapshot and attempt.view_id == message.view:
            contributors |= set(attempt.snapshot.contributors)
        if message.sender not in contributors:
            return False
        self._active_members.setdefault(message.view, {})[message.sender] = message
        while len(self._active_members) > VIEWS_LIMIT:
            present = self.view.id if self.view is not None else None
            oldest = min(view for view in self._active_members if view != present)
            del self._active_members[oldest]
        return True

    def _follow(self, agreed: View, now_ns: int) -> Actions:
        """Others have taken over the view that waits here."""
        present = agreed.snapshot.present if agreed.snapshot.planned else None
        if self.view is not None and present and present.stage_of(self.me.peer_id) is not None:
            return []  # this peer commits the step before by itself, and takes over then
        return self._take_over(agreed, now_ns) if self._catch_up(agreed) else []

    def _catch_up(self, agreed: View) -> bool:
        """Be where a view that others have taken over starts, by the word of most of those that
        commit the steps before."""
        recovery_evidence, view = self.recovery_evidence, self.view
        said = self._active_members.get(agreed.id, {})
        deciding = self._deciding(agreed)
        claims = [(said[member].step, said[member].lineage) for member in deciding & said.keys()]
        for step, lineage in set(claims):
            if 2 * claims.count((step, lineage)) <= len(deciding):
                continue
            if view is not None and step == recovery_evidence.step + 1:
                recovery_evidence.committed_unseen(view.id, lineage)
            else:
                recovery_evidence.lineage.move_to(step, lineage)
            return True
        return False

    def _deciding(self, agreed: View) -> set[Member]:
        """Whose word counts: who has a stage in the view before, else who was in it."""
        snapshot = agreed.snapshot
        others = set(snapshot.contributors) - {self.me}
        before = self._known.find(snapshot.previous)
        if snapshot.planned and isinstance(snapshot.present, Plan):
            holders = set(snapshot.present.stage_holders())
            return {member for member in others if member.peer_id in holders}
        return others & set(before.members) if before is not None else others

    def _missed(self, sender: Member, theirs: ViewId, now_ns: int) -> Actions:
        """`sender` is in a later view than this peer, which counts this peer in: it said Ready."""
        view = self.view
        if view is None or sender not in view.members or theirs.number <= view.id.number:
            return []
        known = self._known.find(theirs)
        if known is None or self.me not in known.members or not self._known.has_readied(theirs):
            return []
        attempt = self._attempt
        if attempt is not None and not attempt.planned and attempt.number > theirs.number:
            return []
        self._highest_number = max(self._highest_number, theirs.number)
        self._attempt = None
        return self._open(False, f"missed the takeover of view {theirs}", now_ns)
