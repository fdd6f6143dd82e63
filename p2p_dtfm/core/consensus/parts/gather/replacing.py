"""Who opens a planned view in place of one that is being agreed on, or waits for its takeover."""

from collections.abc import Sequence

from p2p_dtfm.core.consensus.actions import Verdict
from p2p_dtfm.core.consensus.agreement_state import AgreementState
from p2p_dtfm.core.consensus.parts.gather.entry_verdict import is_in_place_of_another, opener_of
from p2p_dtfm.core.consensus.parts.gather.gathering import Gathering
from p2p_dtfm.core.messages.agreement_messages import Charge, Contribution, Gather
from p2p_dtfm.core.messages.statements import is_charge
from p2p_dtfm.core.protocol.snapshot import Member


class Replacing:
    """Each member counts it, by what it is told; what it takes part in others hear of as well."""

    def __init__(self, state: AgreementState, gathering: Gathering) -> None:
        self._state = state
        self._gathering = gathering

    def note(self, message: Gather, parts: Sequence[Contribution], now_ns: int) -> None:
        """Of whoever accuses no newcomer, or does so in vain: one that does not come, or is not
        reached, is reason enough."""
        state = self._state
        opener = opener_of(message, parts, state.members)
        if not message.planned or opener is None or not is_in_place_of_another(state):
            return
        said = (it for it in message.accusations if it.accusation.by == opener)
        has_reason = any(self._accuses(it, message.number, self._newcomers()) for it in said)
        if not has_reason or opener.peer_id in state.doubts.accusers.named(now_ns):
            self._gathering.is_replaced_by(opener, now_ns)

    def accuse(self, opener: Member, message: Gather, reason: str, now_ns: int) -> Verdict:
        """It has done so too often. A member loses its place only as after a failure."""
        state = self._state
        state.distrust_members({opener})
        state.give_up(now_ns)
        state.promises.hears_of(message.number)
        return Verdict(self._gathering.open(False, reason, now_ns), reason)

    def join(self, message: Gather) -> None:
        """Somebody is accused, and may be for that: it need not have told all the last one."""
        state = self._state
        if not message.planned:
            spent = {member for member in state.members if state.doubts.replacers.is_spent(member)}
            said = [it for it in message.accusations if self._accuses(it, message.number, spent)]
            state.distrust_members({it.accusation.of for it in said} - {state.me})

    def _newcomers(self) -> set[Member]:
        state, found = self._state, set[Member]()
        if state.next_view is not None:
            found |= set(state.next_view.members)
        if state.attempt is not None:
            found |= state.attempt.universe
        return found - set(state.members)

    def _accuses(self, item: Charge, number: int, whom: set[Member]) -> bool:
        by, of, settings = item.accusation.by, item.accusation.of, self._state.settings
        if of not in whom or by == of or by not in self._state.members:
            return False
        return is_charge(item, settings.run_digest, number, settings.verify)
