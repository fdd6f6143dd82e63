"""Which members are active in which view: a peer believes it only of views to which it has agreed
itself."""

import operator

from p2p_dtfm.core.consensus.actions import Actions, SendMessage, Verdict, refused
from p2p_dtfm.core.consensus.agreement_state import AgreementState
from p2p_dtfm.core.consensus.attempts.attempt import Attempt
from p2p_dtfm.core.consensus.parts.forks import show_unready
from p2p_dtfm.core.consensus.parts.gather.gathering import Gathering
from p2p_dtfm.core.consensus.parts.outsiders import Outsiders
from p2p_dtfm.core.consensus.parts.proofs import Proofs
from p2p_dtfm.core.consensus.parts.takeover import Takeover
from p2p_dtfm.core.messages.agreement_messages import Active, passed
from p2p_dtfm.core.messages.certificate import Certificate
from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.protocol.snapshot import Member, ViewId
from p2p_dtfm.core.recovery.view import View

VIEWS_LIMIT = 16
"""Of this many views that it agreed to, a peer remembers who has said Active."""
Sources = tuple[object, ...]
NOT_AGREED_TO = "it is of a view to which this peer and its sender have not agreed"


class Activity:
    """What an Active does: opens the ledger, lets a view be taken over, or shows one was missed."""

    def __init__(
        self,
        state: AgreementState,
        takeover: Takeover,
        gathering: Gathering,
        proofs: Proofs,
        outsiders: Outsiders,
    ) -> None:
        self._state = state
        self._takeover = takeover
        self._gathering = gathering
        self._proofs = proofs
        self._outsiders = outsiders
        self._contributors: tuple[object, Sources, frozenset[Member]] | None = None
        self._shown_ns: dict[str, int] = {}
        """When each peer was shown lately who was not ready for the next view."""

    def receive_as_member(self, message: Active, now_ns: int) -> Verdict:
        """An Active comes to a member: of its own view, or of one that it may have missed."""
        state, view = self._state, self._state.view
        assert view is not None
        if not self._note(message):
            return refused(NOT_AGREED_TO)
        if message.view == view.id:
            self._takeover.open_ledger()
            if message.asks and not state.frozen:
                answer = SendMessage((message.sender.peer_id,), state.present.said_active)
                return Verdict([answer], "its sender lacks this peer's Active")
            return refused("it is noted")
        found = self._of_another_view(message, now_ns)
        return found or self.missed(message.sender, message.view, message.certificate, now_ns)

    def receive_as_newcomer(self, message: Active, now_ns: int) -> Verdict:
        """An Active comes to a peer in no view: of one that it has agreed to."""
        if not self._note(message):
            return refused(NOT_AGREED_TO)
        found = self._of_another_view(message, now_ns)
        if found is not None:
            return found
        given_up = self._awaited_in(message) if self._state.attempt is None else None
        if given_up is not None:
            reason = f"had given up view {message.view}, which waits for this peer"
            # a peer that wants to leave is in a view only for the states that it has
            is_needed = (
                given_up.snapshot is not None and self._state.me in given_up.snapshot.members
            )
            return Verdict(self._outsiders.rejoin(reason, may_be_needed=is_needed), reason)
        return refused("it is of a view that this peer does not wait for")

    def _awaited_in(self, message: Active) -> Attempt | None:
        """The attempt that this peer has given up, and on which the others agreed after all.

        A sender that kept its own Ready from this peer is not believed: it could say so at any
        time.
        """
        said_ready = self._state.promises.said_ready
        last, given_up = said_ready.last, said_ready.find(message.view)
        if last is None or last.view != message.view or given_up is None:
            return None
        return given_up if given_up.outcome.has_said_ready(message.sender) else None

    def _of_another_view(self, message: Active, now_ns: int) -> Verdict | None:
        """What comes of an Active for a view that this peer waits for; None: it does not wait for
        that view any more."""
        state, attempt = self._state, self._state.attempt
        state.joining.view_heard_ns = now_ns
        missed = self._proofs.hear_of_agreement(message.sender, [message.certificate], now_ns)
        if missed:
            return Verdict(missed, "it shows that all have said Ready")
        if attempt is not None and attempt.outcome.view_id == message.view:
            # the sender shows all Ready once this peer says again that it still gathers
            return refused("this peer lacks somebody's Ready for it")
        for agreed in (state.next_view, state.agreed.dropped):
            if agreed is not None and agreed.id == message.view:
                return self._follow(agreed, message, now_ns)
        return None

    def _note(self, message: Active) -> bool:
        """Note an Active, if this peer said Ready to its view, and its sender agreed to that; else
        False."""
        state, said = self._state, self._state.present.active_members
        if message.sender not in self.contributors_of(message.view):
            return False
        said.setdefault(message.view, {})[message.sender] = message
        while len(said) > VIEWS_LIMIT:
            del said[min(view for view in said if view != state.view_id)]
        return True

    def note_all(self, said: list[Active]) -> None:
        """Note several Actives of one view, by some of those that have agreed to it."""
        first = said[0]
        if self._note(first):
            noted = self._state.present.active_members[first.view]
            noted |= {item.sender: item for item in said}

    def contributors_of(self, named: ViewId) -> frozenset[Member]:
        """The members that have agreed to a view; nobody, where this peer has not."""
        state, attempt = self._state, self._state.attempt
        snapshot = attempt.snapshot if attempt is not None else None
        sources = (state.view, state.next_view, state.agreed.dropped, snapshot)
        known = state.others.views.find(named), state.others.views.has_readied(named)
        held = self._contributors
        is_same = held is not None and held[0] == (named, known)
        is_same = is_same and all(map(operator.is_, held[1] if held is not None else (), sources))
        if held is None or not is_same:
            found = frozenset(self._find_contributors(named))
            held = self._contributors = (named, known), sources, found
        return held[2]

    def _find_contributors(self, named: ViewId) -> set[Member]:
        state, attempt = self._state, self._state.attempt
        known = state.others.views.find(named)
        if known is None or not state.others.views.has_readied(named):
            return set()
        found = set(known.members)
        for view in (state.view, state.next_view, state.agreed.dropped):
            if view is not None and view.id == named:
                found |= set(view.snapshot.contributors)
        if attempt is not None and attempt.snapshot and attempt.outcome.view_id == named:
            found |= set(attempt.snapshot.contributors)
        return found

    def _follow(self, agreed: View, message: Active, now_ns: int) -> Verdict:
        """Others have taken over the view that waits here."""
        state = self._state
        present = agreed.snapshot.present if agreed.snapshot.planned else None
        has_stage = present is not None and present.stage_of(state.me.peer_id) is not None
        if has_stage and not state.is_newcomer:
            reason = "this peer commits the step before by itself, and takes over then"
            return Verdict(self._show_unready(message, now_ns), reason)
        if not self._catch_up(agreed):
            return refused("too few say where the view starts")
        return Verdict(self._takeover.take_over(agreed, now_ns), "others have taken it over")

    def _show_unready(self, message: Active, now_ns: int) -> Actions:
        """Show the sender who was not ready, once in `resend_ns`: an Active is short, and what is
        shown may be long."""
        to, since_ns = message.sender.peer_id, now_ns - self._state.timing.resend_ns
        self._shown_ns = {it: at_ns for it, at_ns in self._shown_ns.items() if at_ns > since_ns}
        shown = show_unready(self._state, message) if to not in self._shown_ns else []
        if shown:
            self._shown_ns[to] = now_ns
        return shown

    def _catch_up(self, agreed: View) -> bool:
        """Move to where a view starts that others have taken over, by the word of most of those
        that commit the steps before; False if too few say where."""
        state = self._state
        recovery_evidence = state.recovery_evidence
        said = state.present.active_members.get(agreed.id, {})
        deciding = self._deciding(agreed)
        claims = [(said[member].step, said[member].lineage) for member in deciding & said.keys()]
        for step, lineage in set(claims):
            if 2 * claims.count((step, lineage)) <= len(deciding):
                continue
            if not state.is_newcomer and step == recovery_evidence.step + 1:
                recovery_evidence.committed_unseen(state.view_id, lineage)
            else:
                recovery_evidence.lineage.move_to(step, lineage)
            return True
        return False

    def _deciding(self, agreed: View) -> set[Member]:
        """Members whose word counts: those with a stage in the view before, else those that were in
        it."""
        state = self._state
        snapshot = agreed.snapshot
        others = set(snapshot.contributors) - {state.me}
        before = state.others.views.find(snapshot.previous)
        if snapshot.planned and isinstance(snapshot.present, Plan):
            holders = set(snapshot.present.stage_holders())
            return {member for member in others if member.peer_id in holders}
        return others & set(before.members) if before is not None else others

    def missed(
        self, sender: Member, theirs: ViewId, proof: Certificate | None, now_ns: int
    ) -> Verdict:
        """`sender` is in a later view, which counts this peer in, since it said Ready to that.

        The sender has to show that all have said Ready. Otherwise its word alone could have this
        peer stop the steps, and lose its place for that.
        """
        state, attempt = self._state, self._state.attempt
        if sender not in state.members or theirs.number <= state.view_id.number:
            return refused("it is of no later view by a member of the present one")
        known = state.others.views.find(theirs)
        readied = state.others.views.has_readied(theirs)
        if known is None or state.me not in known.members or not readied:
            return refused("it is of a view to which this peer has not said Ready")
        if attempt is not None and not attempt.planned and attempt.number > theirs.number:
            return refused("takes part in an attempt with a higher number")
        views, verify = state.others.views, state.settings.verify
        if proof is None or proof.view != theirs or not views.see_agreed(proof, verify):
            asks = self._outsiders.tell(sender.peer_id, passed(state.me, theirs.number), now_ns)
            return Verdict(asks, "it does not show that all have said Ready to it")
        state.promises.hears_of(theirs.number)
        state.attempts.under_way = None
        reason = f"missed the takeover of view {theirs}"
        return Verdict(self._gathering.open(False, reason, now_ns), reason)
