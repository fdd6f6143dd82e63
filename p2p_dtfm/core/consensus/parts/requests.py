"""Newcomers that ask to be let in."""

from p2p_dtfm.core.consensus.actions import Report, Verdict, refused
from p2p_dtfm.core.consensus.agreement_state import AgreementState
from p2p_dtfm.core.consensus.opened_records import require_size
from p2p_dtfm.core.consensus.parts.opening import Opening
from p2p_dtfm.core.consensus.parts.outsiders import Outsiders
from p2p_dtfm.core.consensus.parts.suspicion import Suspicion
from p2p_dtfm.core.membership.bars import bar_ends_step, barred_at
from p2p_dtfm.core.membership.newcomers import (
    FOUNDING_LIMIT,
    NUMBERS_PASSED_LIMIT,
    WAITING_LIMIT,
    WAITING_WIDE_ABOVE,
    WAITING_WIDE_LIMIT,
    WAITING_WIDE_LIMIT_BYTES,
)
from p2p_dtfm.core.messages.agreement_messages import JoinRequest
from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.core.protocol.records import PeerRecord
from p2p_dtfm.core.protocol.snapshot import Member


class Requests:
    """Newcomers wait until an attempt names them."""

    def __init__(
        self,
        state: AgreementState,
        suspicion: Suspicion,
        opening: Opening,
        outsiders: Outsiders,
    ) -> None:
        self._state = state
        self._suspicion = suspicion
        self._opening = opening
        self._outsiders = outsiders

    def receive(self, sender: str, message: JoinRequest, now_ns: int) -> Verdict:
        """Raises `PeerFault`."""
        state, members = self._state, self._state.members
        record = self._open(sender, message)
        member = Member(record.peer_id, record.life)
        if record.life < state.others.lives.get(record.peer_id, 0):
            return refused("it is of an earlier life")
        actions = self._suspicion.hear(member, now_ns)
        if member in members:
            return Verdict(actions, "it is a member already")
        next_view = state.next_view
        if next_view is not None and member in next_view.members:
            if message.awaits == next_view.id:
                return Verdict(actions, "it is in the next view already")
            if message.passed < next_view.id.number:  # it said Ready to that view since
                return Verdict(actions, "it asked before the next view was agreed on with it")
            reason = f"{sender} gives up view {next_view.id}, which was agreed on with it"
            self._suspicion.does_not_come(member, reason, now_ns)
            actions.append(Report(reason))
        bar = barred_at(state.others.bars, state.step).get(sender)
        if bar is not None:
            until_step = bar_ends_step(bar)
            return Verdict(actions, f"it is barred until step {until_step}: it {bar.reason}")
        newcomers = state.others.newcomers
        if not newcomers.is_refused(record.peer_id, now_ns):
            self._raise_number(message.passed)
        actions += self._outsiders.tell_while_frozen(sender, now_ns)
        if state.ends_here:
            return Verdict(actions, "the run is complete: nobody joins it")
        if not newcomers.ask(record, message.record, now_ns, self._room(message)):
            return Verdict(actions, "it has asked before, or was kept out of late")
        report = Report(f"{record.peer_id} asks to join")
        opened = self._opening.open_if_due(now_ns)
        return Verdict([*actions, report, *opened], "the next view may let it in")

    def _raise_number(self, passed: int) -> None:
        """Hear of the number that a newcomer has passed: only a higher one is of use to it."""
        state, promises = self._state, self._state.promises
        attempts = (state.attempt.number,) if state.attempt is not None else ()
        last = max(promises.passed_number, state.view_id.number, *attempts)
        bound = last + NUMBERS_PASSED_LIMIT
        promises.hears_of(min(passed, bound))

    def _room(self, message: JoinRequest) -> int:
        """How many newcomers may wait."""
        state = self._state
        if state.is_newcomer:
            return FOUNDING_LIMIT
        if state.view is None or len(state.view.members) <= WAITING_WIDE_ABOVE:
            return WAITING_LIMIT
        size_bytes = state.others.newcomers.waiting_bytes + len(message.record.payload)
        return WAITING_WIDE_LIMIT if size_bytes <= WAITING_WIDE_LIMIT_BYTES else 0

    def _open(self, sender: str, message: JoinRequest) -> PeerRecord:
        require_size(message.record, len(self._state.members))
        record = self._state.open_newcomer(message.record)
        if record.peer_id != sender:
            raise PeerFault(f"asks for another peer, {record.peer_id}", sender)
        return record
