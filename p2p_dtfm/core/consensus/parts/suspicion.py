"""Evidence against peers: that they cannot be reached, hold up the step, or keep an attempt from
its end."""

from collections.abc import Collection, Mapping

from p2p_dtfm.core.consensus.actions import Actions, Report
from p2p_dtfm.core.consensus.agreement_state import MEMBERS_LIMIT, AgreementState
from p2p_dtfm.core.consensus.attempts.attempt import Attempt
from p2p_dtfm.core.consensus.attempts.stall_verdict import Remedy, StallVerdict, stall_verdict
from p2p_dtfm.core.consensus.parts.gather.gathering import Gathering
from p2p_dtfm.core.protocol.snapshot import Member


class Suspicion:
    """Evidence opens an attempt, or is told in the one under way."""

    def __init__(self, state: AgreementState, gathering: Gathering) -> None:
        self._state = state
        self._gathering = gathering

    def hold_up(self, reasons: Mapping[str, str], now_ns: int) -> Actions:
        """Evidence, by peer id, that members do not do their part of the step. It stays until the
        takeover, however many attempts that takes, and even if those members answer.

        All that are found at once are told at once. A member that is accused by one peer alone,
        while the others stop for another, is one word against another.
        """
        self._doubt_until_takeover(reasons)
        actions: Actions = []
        for peer_id in sorted(reasons):
            actions += self.suspect(peer_id, reasons[peer_id], now_ns)
        return actions

    def suspect(self, peer_id: str, reason: str, now_ns: int) -> Actions:
        """Evidence that this peer cannot reach `peer_id`. Hearing from `peer_id` takes it back."""
        state = self._state
        named = set(state.members)
        if state.next_view is not None:
            named |= set(state.next_view.snapshot.contributors)
        if state.attempt is not None:
            named |= state.attempt.universe
        actions: Actions = []
        for member in sorted(named):
            new = member not in state.doubts.suspects and member != state.me
            if member.peer_id == peer_id and new and not state.joining.is_outside:
                actions += self.on_evidence(member, reason, now_ns)
        return actions

    def distrust(self, peer_id: str, reason: str, now_ns: int) -> Actions:
        """`peer_id` sends what no correct peer sends. Hearing from it does not clear it.

        This peer says so in the unplanned attempt under way, or else in the next attempt. The
        caller opens that one a little later, with `suspect`. By then others that were sent the same
        have found it out as well, so it is not one word against another.
        """
        self._doubt_until_takeover({peer_id})
        return self.suspect(peer_id, reason, now_ns) if self._state.frozen else []

    def hear(self, sender: Member, now_ns: int) -> Actions:
        """The sender has said something, so it is not lost. If it speaks in a new life, its earlier
        one is lost."""
        state = self._state
        state.doubts.suspects.discard(sender)
        state.know(sender.peer_id)
        if state.attempt is not None:
            state.attempt.clock.heard_ns[sender] = now_ns
        lives = state.others.lives
        if sender.life == lives.get(sender.peer_id):
            return []
        if len(lives) >= 4 * MEMBERS_LIMIT:
            lives.clear()
        lives[sender.peer_id] = sender.life
        views = [view for view in (state.view, state.next_view) if view is not None]
        named = {member for view in views for member in view.members}
        if state.attempt is not None:
            named |= state.attempt.universe
        actions: Actions = []
        for member in sorted(m for m in named if m.peer_id == sender.peer_id):
            if member.life < sender.life and member not in state.doubts.suspects:
                actions += self.on_evidence(member, "it has started again", now_ns)
        return actions

    def _doubt_until_takeover(self, peer_ids: Collection[str]) -> None:
        state = self._state
        if not state.joining.is_outside:
            named = {member for member in state.members if member.peer_id in peer_ids}
            state.distrust_members(named - {state.me})

    def on_evidence(self, member: Member, reason: str, now_ns: int) -> Actions:
        """This peer has found out by itself that the member cannot be reached."""
        state, attempt = self._state, self._state.attempt
        state.doubts.suspects.add(member)
        text = f"cannot reach {member.peer_id}: {reason}"
        if attempt is not None and not attempt.planned:
            return [Report(text), *self._tell_in(attempt, member, text, now_ns)]
        if member in state.members:
            if state.frozen:
                return [Report(text)]
            return self._gathering.open(False, text, now_ns)
        self.does_not_come(member, text, now_ns)
        state.others.newcomers.forget(member.peer_id)
        return [Report(text)]

    def does_not_come(self, newcomer: Member, reason: str, now_ns: int) -> None:
        """A newcomer does not come, though a view is agreed on with it, or about to be. The others
        wait for it in vain, and hear of that by the next attempt.

        The first time is free. A newcomer that does it again is in doubt in that attempt, so that
        all refuse it alike. With many members, a first time at each would let it do so whenever it
        likes.
        """
        state, attempt = self._state, self._state.attempt
        gathers = attempt is not None and newcomer in attempt.universe
        is_agreed = state.next_view is not None and newcomer in state.next_view.members
        tries = state.others.newcomers.tries(newcomer.peer_id, now_ns)
        if gathers:
            state.give_up(now_ns)
            state.agreed.call_off = reason
        if is_agreed:
            state.agreed.doom(reason)
        if (gathers and tries > 0) or (is_agreed and tries > 1):
            life = max(newcomer.life, state.others.lives.get(newcomer.peer_id, 0))
            state.doubt_newcomers({newcomer, Member(newcomer.peer_id, life)}, now_ns)

    def _tell_in(self, attempt: Attempt, member: Member, text: str, now_ns: int) -> Actions:
        """While the attempt gathers, tell the others. Once it is frozen, reopen it if it waits for
        the member."""
        if attempt.snapshot is None:
            return self._gathering.accuse(attempt, [member], now_ns)
        is_awaited = member in attempt.snapshot.contributors and member not in attempt.ready
        return self._gathering.reopen(text, now_ns) if is_awaited else []

    def stalled(self, attempt: Attempt, now_ns: int) -> Actions:
        """The attempt has got no further for as long as it may take."""
        found = stall_verdict(attempt, self._state.view)
        if found.remedy is Remedy.GO_ON_WITHOUT:
            return self._go_on_without(attempt, found, now_ns)
        if attempt.planned:
            return self._planned_stalled(attempt, found, now_ns)
        state, silent = self._state, set(found.members)
        state.doubts.suspects |= silent
        state.distrust_members(silent & set(attempt.opened))
        if found.remedy is Remedy.ACCUSE:
            return [Report(found.reason), *self._gathering.accuse(attempt, silent, now_ns)]
        if found.remedy is Remedy.GIVE_UP:
            state.stop_attempt(now_ns)
            return [Report(f"gives up: {found.reason}")]
        if found.remedy is Remedy.FOUND_AGAIN:
            state.doubts.carried |= silent
        return self._gathering.reopen(found.reason, now_ns)

    def _planned_stalled(self, attempt: Attempt, found: StallVerdict, now_ns: int) -> Actions:
        state, gathering = self._state, self._gathering
        if found.blames_newcomers:
            state.doubt_newcomers(found.members, now_ns)
        if found.remedy is Remedy.KEEP_OUT:
            return [Report(found.reason), *gathering.accuse(attempt, found.members, now_ns)]
        report = Report(f"gives up: {found.reason}")
        if attempt.wide is None:
            is_unanswered = not found.members
        else:  # there a member whose contribution has not come is silent, though others hear it
            is_unanswered = attempt.snapshot is None and bool(attempt.waits_for & attempt.members)
        if is_unanswered:
            return [report, *self._left_unanswered(attempt, found.reason, now_ns)]
        return [report, *gathering.held_up(attempt, found.members, found.reason, now_ns, False)]

    def _left_unanswered(self, attempt: Attempt, reason: str, now_ns: int) -> Actions:
        """Members that train have not answered a planned attempt. That is no reason to stop the
        steps; but one that never says a word in planned views would keep newcomers out for good."""
        state, unheard = self._state, attempt.waits_for & attempt.members
        again = set[Member]()
        # where half or more are unheard, this peer's own line may be at fault
        if not state.is_newcomer and 2 * len(unheard) < len(attempt.members):
            again = state.doubts.accusers.says_nothing(unheard)
        if not again:
            return self._gathering.held_up(attempt, (), reason, now_ns, False)
        state.distrust_members(again)
        state.give_up(now_ns)
        return self._gathering.open(False, reason, now_ns)

    def _go_on_without(self, attempt: Attempt, found: StallVerdict, now_ns: int) -> Actions:
        silent = set(found.members)
        attempt.evidence.absent |= silent
        for member in sorted(silent - attempt.members):
            self._state.others.newcomers.note_silent(member.peer_id, now_ns)
        return [Report(found.reason), *self._gathering.knowledge_grew(attempt, now_ns)]
