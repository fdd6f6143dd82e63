"""How the knowledge of an attempt reaches all: everyone sends its contribution to everyone, and
says when it knows what they know.

In a swarm of many it goes along the overlay instead, which is what `wide.spreading` does.
"""

from p2p_dtfm.core.consensus.actions import Actions, SendMessage
from p2p_dtfm.core.consensus.agreement_state import AgreementState
from p2p_dtfm.core.consensus.attempts.attempt import Attempt
from p2p_dtfm.core.consensus.attempts.whole_knowledge import (
    ends_that_lack,
    late_knowledge,
    whole_knowledge,
)
from p2p_dtfm.core.consensus.parts.wide.spreading import Spreading
from p2p_dtfm.core.membership.roster import have_stayed
from p2p_dtfm.core.messages.agreement_messages import Contribution, Ready, sign_contribution


class Flooding:
    """Tells no more than is needed where no message gets lost; `resend` repairs."""

    def __init__(self, state: AgreementState, spreading: Spreading) -> None:
        self._state = state
        self._spreading = spreading

    def begin(self, attempt: Attempt, mine: Contribution) -> None:
        """Begin an attempt with what this peer contributes, and with what it has for those that
        know less."""
        state = self._state
        if self._spreading.is_wide(attempt.number):
            self._spreading.begin(attempt, mine)
        else:
            attempt.add(sign_contribution(mine, state.settings.sign), mine)
        attempt.passed_on.newcomers = state.others.newcomers.members
        if state.view is not None and state.view.certificate is not None:
            attempt.passed_on.certificates[state.view.id] = state.view.certificate

    def tell_news(self, attempt: Attempt, now_ns: int, own: bool) -> Actions:
        """This peer knows more: its `own` evidence goes to all, and everything to those that were
        told nothing so far."""
        self._spreading.widen(attempt)
        if attempt.wide is not None:
            self._spreading.place(attempt, attempt.wide)  # its watchers decide who is waited for
        attempt.next_round()
        attempt.clock.gets_on(attempt.round, self._state.timing.gather_ns, now_ns)
        if attempt.wide is not None:
            return self._spreading.note(attempt, now_ns)
        others = attempt.others
        actions: Actions = []
        new = tuple(peer_id for peer_id in others if peer_id not in attempt.passed_on.told)
        if new:
            actions += self._tell_all(attempt, new)
        if own or not attempt.waits_for:
            told, said = tuple(it for it in others if it not in new), late_knowledge(attempt)
            actions += [SendMessage(told, part) for part in said] if told else []
        return actions + self._tell_all(attempt, ends_that_lack(attempt))

    def _tell_all(self, attempt: Attempt, peer_ids: tuple[str, ...]) -> Actions:
        """Tell these everything. Those that may not know of the contributors' views get proof of
        them, too."""
        state, passed_on = self._state, attempt.passed_on
        passed_on.told.update(peer_ids)
        alike = not state.is_newcomer and set(passed_on.certificates) <= {state.view_id}
        # members that took over the present view, and have lived on since, need no proof of it
        active = set(state.members) & state.active.keys() if alike else ()
        fellows = have_stayed(active, state.others.lives)
        actions: Actions = []
        for proofs in (False, True):
            to = tuple(peer_id for peer_id in peer_ids if (peer_id not in fellows) == proofs)
            actions += (
                [SendMessage(to, part) for part in whole_knowledge(attempt, proofs)] if to else []
            )
        return actions

    def resend(self, attempt: Attempt, now_ns: int) -> Actions:
        """Send everything to those that know something else; tell the others that this peer knows
        the same."""
        me = self._state.me
        attempt.clock.sent_ns = now_ns
        if attempt.wide is not None:
            return self._spreading.repair(attempt, now_ns)
        others = attempt.others
        same = attempt.same_as(others)
        behind = tuple(peer_id for peer_id in others if peer_id not in same)
        actions = self._tell_all(attempt, behind) if behind else []
        if same:
            actions.append(SendMessage(same, attempt.gather()))
        if me in attempt.ready:
            actions.append(SendMessage(others, attempt.ready[me]))
        return actions

    def tell_ready(self, attempt: Attempt, mine: Ready, now_ns: int) -> Actions:
        """Tell this peer's own Ready."""
        if attempt.wide is not None:
            return self._spreading.note(attempt, now_ns)
        return [SendMessage(attempt.others, mine)]

    def pass_on(self, attempt: Attempt, now_ns: int) -> Actions:
        """Pass on what others have said, where not all hear it from its makers."""
        return self._spreading.note(attempt, now_ns) if attempt.wide is not None else []

    def end(self, attempt: Attempt, now_ns: int) -> Actions:
        """All have agreed: what waits to be passed on goes at once."""
        return self._spreading.flush(attempt, now_ns) if attempt.wide is not None else []
