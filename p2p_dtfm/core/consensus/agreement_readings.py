"""What the rest of the daemon reads of the agreement."""

from collections.abc import Collection

from p2p_dtfm.core.commit.ledger import Ledger
from p2p_dtfm.core.consensus.agreement_state import AgreementState
from p2p_dtfm.core.consensus.machines import Machines
from p2p_dtfm.core.consensus.phase import Outlook, outlook
from p2p_dtfm.core.consensus.views.reminders import Signatures
from p2p_dtfm.core.membership.familiar_peers import FamiliarPeers
from p2p_dtfm.core.membership.fellows import missing_fellows
from p2p_dtfm.core.messages.agreement_messages import Contribution, KnownView, Standing
from p2p_dtfm.core.protocol.records import PeerRecord
from p2p_dtfm.core.protocol.signed import Signed
from p2p_dtfm.core.protocol.snapshot import Bar, Member, ViewId
from p2p_dtfm.core.recovery.recovery_evidence import RecoveryEvidence
from p2p_dtfm.core.recovery.view import View


class AgreementReadings:
    """Reading changes nothing."""

    _state: AgreementState
    _machines: Machines

    @property
    def me(self) -> Member:
        return self._state.me

    @property
    def view(self) -> View | None:
        """The present view."""
        return self._state.view

    @property
    def next_view(self) -> View | None:
        """The agreed planned view that waits for its takeover."""
        return self._state.next_view

    @property
    def watched(self) -> frozenset[str]:
        """Peers that this peer must hear from all the time, and that must hear from it."""
        return self._state.watched

    @property
    def ledger(self) -> Ledger | None:
        return self._state.ledger

    @property
    def frozen(self) -> bool:
        """An unplanned view change is under way: no step commits."""
        return self._state.frozen

    @property
    def is_outside(self) -> bool:
        """The others went on without this peer: it is in no view until its next life."""
        return self._state.joining.is_outside

    @property
    def recovery_evidence(self) -> RecoveryEvidence:
        return self._state.recovery_evidence

    @property
    def familiar(self) -> FamiliarPeers:
        """The peers that this peer follows where it was in no view itself."""
        return self._state.others.familiar

    @property
    def step(self) -> int:
        return self._state.step

    @property
    def held(self) -> dict[int, int]:
        return self.recovery_evidence.held

    @held.setter
    def held(self, held: dict[int, int]) -> None:
        self.recovery_evidence.held = dict(held)

    @property
    def ready_for(self) -> ViewId | None:
        """The next view, if all its members are synced; `vouch` promises that it stays."""
        return self._machines.syncing.ready_for

    @property
    def needy(self) -> tuple[str, ...]:
        """Newcomers that are to join with the next view, and have not said that they have their
        states."""
        return self._machines.syncing.needy

    def outlook(self, now_ns: int) -> Outlook:
        """Where this peer stands, and what it waits for: for its user."""
        return outlook(self._state, now_ns)

    @property
    def known_peers(self) -> tuple[str, ...]:
        """All peers that this peer has heard of, the familiar ones at the end."""
        return self.familiar.all

    @property
    def has_heard_of_view(self) -> bool:
        """Whether a newcomer has heard, with proof, of a view that there is."""
        return self._state.joining.view_heard_ns is not None

    @property
    def attempting(self) -> bool:
        return self._state.attempt is not None

    @property
    def doubted(self) -> frozenset[str]:
        """Both ends of each accusation that another peer makes in the unplanned attempt under way,
        without this peer: either end may be the one at fault."""
        attempt = self._state.attempt
        if attempt is None or attempt.planned:
            return frozenset()
        links = (link for link in attempt.accusations if link.by != self.me)
        found = {end.peer_id for link in links for end in (link.by, link.of)}
        return frozenset(found - {self.me.peer_id})

    @property
    def not_active(self) -> tuple[str, ...]:
        """Members that have not said that they are active in the view in force."""
        missing = set(self._state.members) - self._state.active.keys()
        return tuple(sorted(member.peer_id for member in missing))

    @property
    def suspected(self) -> tuple[str, ...]:
        """Members that this peer holds for lost, or that somebody accuses: for this peer's user."""
        lost, attempt = set(self._state.doubts.suspects), self._state.attempt
        if attempt is not None:
            lost |= attempt.evidence.absent
            lost |= {accusation.of for accusation in attempt.accusations}
        return tuple(sorted(member.peer_id for member in lost if member != self.me))

    @property
    def history(self) -> tuple[KnownView, ...]:
        """The views that this peer was in, oldest first: to be kept on disk, for a later start."""
        return self._state.others.views.history

    @property
    def bars(self) -> tuple[Bar, ...]:
        """Bars of peers that were convicted of false work, as far as this peer knows: to be kept on
        disk, too."""
        return self._state.others.bars

    @property
    def signatures(self) -> tuple[Signatures, ...]:
        """Signatures that remind members of earlier views that they were in them: to be kept on
        disk, too."""
        state = self._state
        return state.others.reminders.with_present(state.view, state.active)

    @property
    def is_taken_over_by_all(self) -> bool:
        """Whether all members of the present view have said that they are in it."""
        return self._state.all_are_active

    @property
    def awaited(self) -> Collection[str]:
        """Peer ids of those that must answer in the attempt under way."""
        attempt = self._state.attempt
        return attempt.awaited_ids if attempt is not None else ()

    @property
    def agreed_contributors(self) -> Collection[str]:
        """Peer ids of those with whom this peer is agreeing on the next view: some may know it
        already."""
        attempt = self._state.attempt
        return attempt.outcome.contributor_ids if attempt is not None else ()

    @property
    def joiners(self) -> tuple[PeerRecord, ...]:
        """Records of the newcomers that wait to be let in, sorted by peer id."""
        return self._state.others.newcomers.opened

    def opened_record(self, signed: Signed) -> PeerRecord | None:
        """A record that this peer has opened lately."""
        return self._state.others.opened_records.find(signed)

    @property
    def gathered(self) -> tuple[int, Collection[Contribution]]:
        """Number of the attempt under way, and the contributions that count in it."""
        attempt = self._state.attempt
        return (attempt.number, attempt.opened.values()) if attempt is not None else (0, ())

    @property
    def missing_fellows(self) -> tuple[str, ...]:
        """Fellows of the newest view that a newcomer was in which do not wait to be let in."""
        waiting = self._state.others.newcomers.waiting
        return missing_fellows(self.history, self.me.peer_id, waiting)

    @property
    def proof_of_end(self) -> Standing | None:
        """Proof that all steps of the run are committed; None if they are not.

        It is also None if nobody here has some layers of the last state. A peer that comes may have
        these layers, or what they can be made from again.
        """
        if not self._state.is_complete or self._state.present.lost is not None:
            return None
        return self._state.present.end or self.standing

    @property
    def step_to_come(self) -> int:
        """The next step, as whoever asks is told it. It is the run's last one where the last state
        is lost."""
        is_lost = self._state.is_complete and self._state.present.lost is not None
        return self._state.step - 1 if is_lost else self._state.step

    @property
    def standing(self) -> Standing | None:
        """Where this peer stands, for whoever asks; None in no view."""
        return self._machines.outsiders.standing_of(self.view) if self.view is not None else None
