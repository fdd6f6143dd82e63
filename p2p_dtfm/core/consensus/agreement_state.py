"""What a peer remembers of the agreement, and the small changes to it."""

from collections.abc import Collection, Iterable

from p2p_dtfm.core.commit.ledger import Ledger
from p2p_dtfm.core.commit.step_terms import StepTerms
from p2p_dtfm.core.consensus.actions import (
    Actions,
    Left,
    Rejoin,
    SendMessage,
    StopStep,
    Timing,
)
from p2p_dtfm.core.consensus.attempt import Attempt
from p2p_dtfm.core.consensus.known_views import KnownViews
from p2p_dtfm.core.consensus.said_ready import SaidReady
from p2p_dtfm.core.membership.accusers import Accusers
from p2p_dtfm.core.membership.familiar_peers import FamiliarPeers
from p2p_dtfm.core.membership.newcomers import Newcomers
from p2p_dtfm.core.membership.states_given import StatesGiven
from p2p_dtfm.core.messages.agreement_messages import (
    Accusation,
    Active,
    AgreementMessage,
    KnownView,
    PresentView,
    SavedState,
    Standing,
)
from p2p_dtfm.core.messages.statements import stated
from p2p_dtfm.core.protocol.canonical import digest
from p2p_dtfm.core.protocol.lineage import extend
from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.protocol.prng import prng_of_digest
from p2p_dtfm.core.protocol.records import Intent, PeerRecord, open_record
from p2p_dtfm.core.protocol.signed import Sign, Signed, Verify
from p2p_dtfm.core.protocol.snapshot import GENESIS, Member, ViewId
from p2p_dtfm.core.protocol.workload import Workload
from p2p_dtfm.core.recovery.recovery_evidence import RecoveryEvidence
from p2p_dtfm.core.recovery.view import View

MEMBERS_LIMIT = 1024
COMMIT_TOLD = 16
"""Of the Prepared of the last commit, to peers outside: each shows how far the view has come."""


class AgreementState:
    """`view` is the present view, `next_view` an agreed planned one that waits for its takeover."""

    def __init__(
        self,
        me: Member,
        run_digest: str,
        workload: Workload,
        signer: Sign,
        verify: Verify,
        timing: Timing | None = None,
        history: tuple[KnownView, ...] = (),
    ) -> None:
        self.me = me
        self.view: View | None = None
        self.next_view: View | None = None
        self.ledger: Ledger | None = None
        self.terms: StepTerms | None = None
        """Of the run, where more is known of it than its workload."""
        self.frozen = False
        """An unplanned view change is under way: no step commits."""
        self.recovery_evidence = RecoveryEvidence()
        self._run_digest = run_digest
        self._workload = workload
        self._signer = signer
        self._verify = verify
        self._timing = timing or Timing()
        self._record: Signed | None = None
        self._intent = Intent.TRAIN
        self._records: dict[Signed, PeerRecord] = {}
        self._lives: dict[str, int] = {}
        self.familiar = FamiliarPeers(me.peer_id)
        """Whom this peer follows, where there is no view that it was in itself."""
        self._last_tick_ns: int | None = None
        self._taken_over_ns = self._agreed_ns = 0
        self._accepts_loss = False
        self._newcomers = Newcomers()
        self._known = KnownViews(history)
        self.familiar.meet(peer for known in history for peer in sorted(known.peer_ids))
        self._foreign_told_ns: int | None = None
        """When the user was told last of another swarm of this run."""
        self._disagreements = 0
        """In a row: plans of this peer that no other peer made."""
        self._begin(me)

    def _begin(self, me: Member) -> None:
        """A new life keeps no promise of the one before."""
        self.me = me
        self.view = self.next_view = self.ledger = None
        self.frozen = False
        self.recovery_evidence.progress = None
        self._outside = False
        self._attempt: Attempt | None = None
        self._wants_view = False
        self._replan_reason = ""
        self._replan_number = 0
        self._said_ready = SaidReady()
        self._known.begin_life()
        self._accusers = Accusers()
        self._active = Active(me, GENESIS, 0)
        self._last_commit: tuple[Signed, ...] = ()
        self._highest_number = self._known.highest_number
        self._readied_number = 0
        self._given_up_number = 0
        self._synced: set[Member] = set()
        self._self_synced = False
        self._synced_sent_ns = 0
        self._vouched: ViewId | None = None
        self._drop_next = False
        self._dropped: View | None = None
        self._quiet_until_ns = 0
        self._suspects: set[Member] = set()
        self._distrusted: set[Member] = set()
        """Who holds up the step or sends what no correct peer does, until a view takes over: being
        heard from changes nothing."""
        self._carried: set[Member] = set()
        """Newcomers in doubt that made the attempt before fail."""
        self._active_members: dict[ViewId, dict[Member, Active]] = {}
        self._given = StatesGiven()
        """What who is to join has got of its states."""
        self._active_sent_ns = 0
        self._told_ns: dict[str, int] = {}
        self._lost_since_ns: int | None = None
        """From when on each view has lacked layers."""
        self._met_ns = 0
        self._failures = 0
        self._reopen_ns: int | None = None
        self._view_heard_ns: int | None = None
        self._prng = prng_of_digest(digest((me.peer_id, me.life)))

    @property
    def step(self) -> int:
        return self.recovery_evidence.step

    @step.setter
    def step(self, step: int) -> None:
        """Start from a checkpoint whose lineage is not known; see `resume`."""
        self.resume(step, self.held, extend("", step, GENESIS) if step else "")

    @property
    def held(self) -> dict[int, int]:
        return self.recovery_evidence.held

    @held.setter
    def held(self, held: dict[int, int]) -> None:
        self.recovery_evidence.held = dict(held)

    def resume(
        self, step: int, held: dict[int, int], lineage: str, saved: tuple[SavedState, ...] = ()
    ) -> None:
        """Start from what is on disk."""
        self.recovery_evidence.lineage.move_to(step, lineage)
        self.recovery_evidence.held = dict(held)
        self.has_saved(saved)

    def has_saved(self, saved: tuple[SavedState, ...]) -> None:
        """What is on disk now, and could be started from."""
        self.recovery_evidence.saved = saved

    def has_cuts(self, cuts: tuple[SavedState, ...]) -> None:
        """What this peer has of cuts now."""
        self.recovery_evidence.cuts = cuts

    def set_record(self, record: PeerRecord, signed: Signed) -> None:
        """This peer's newest record; it counts from the next view on."""
        assert record.peer_id == signed.peer_id == self.me.peer_id
        assert record.life == self.me.life
        self._record = signed
        self._intent = record.intent

    def know(self, peer_id: str) -> None:
        """A peer of this run that may be in another view, such as one found in the directory."""
        if peer_id != self.me.peer_id:
            self.familiar.hear_of(peer_id)

    @property
    def known_peers(self) -> tuple[str, ...]:
        """All that were heard of, the familiar ones at the end."""
        return self.familiar.all

    @property
    def attempting(self) -> bool:
        return self._attempt is not None

    @property
    def doubted(self) -> frozenset[str]:
        """Who accuses, or is accused by, another one than this peer in the unplanned attempt under
        way: either may be the one at fault."""
        attempt = self._attempt
        if attempt is None or attempt.planned:
            return frozenset()
        links = (link for link in attempt.accusations if link.by != self.me)
        found = {end.peer_id for link in links for end in (link.by, link.of)}
        return frozenset(found - {self.me.peer_id})

    @property
    def not_active(self) -> tuple[str, ...]:
        """Members that have not said that they are active in the view in force."""
        if self.view is None:
            return ()
        missing = set(self.view.members) - self._active_members.get(self.view.id, {}).keys()
        return tuple(sorted(member.peer_id for member in missing))

    @property
    def suspected(self) -> tuple[str, ...]:
        """Members that are held for lost, for this peer's user."""
        lost = set(self._suspects)
        if self._attempt is not None:
            lost |= self._attempt.absent
            lost |= {accusation.of for accusation in self._attempt.accusations}
        return tuple(sorted(member.peer_id for member in lost if member != self.me))

    @property
    def history(self) -> tuple[KnownView, ...]:
        """The views that this peer was in, oldest first: to be kept on disk, for a later start."""
        return self._known.history

    @property
    def awaited(self) -> Collection[str]:
        """Peer ids of those that must answer in the attempt under way."""
        attempt = self._attempt
        return attempt.awaited_ids if attempt is not None else ()

    @property
    def agreed_contributors(self) -> Collection[str]:
        """Peer ids of those with whom this peer agrees on the next view at this moment: some may
        know it already."""
        attempt = self._attempt
        if attempt is None or attempt.snapshot is None:
            return ()
        return attempt.snapshot_ids

    @property
    def joiners(self) -> tuple[PeerRecord, ...]:
        """Records of the newcomers that wait to be let in, sorted by peer id."""
        return self._newcomers.opened

    def _open_record(self, signed: Signed) -> PeerRecord:
        record = self._records.get(signed)
        if record is None:
            record = open_record(signed, self._run_digest, self._verify)
            if len(self._records) >= 4 * MEMBERS_LIMIT:
                self._records.clear()
            self._records[signed] = record
        return record

    def _present_view(self) -> PresentView | None:
        if self.view is None:
            return None
        plan = self.view.plan if isinstance(self.view.plan, Plan) else None
        members = self.view.members
        return PresentView(self.view.id, members, plan, self._known.origin(members))

    def _named_newcomers(self, planned: bool) -> tuple[Member, ...]:
        """After a failure steps wait, and newcomers are let in by the next planned view."""
        trains = self.view is not None and isinstance(self.view.plan, Plan)
        return () if trains and not planned else tuple(self._newcomers.members)

    def _distrust_members(self, found: Collection[Member]) -> None:
        """Until a view takes over: being heard from is no excuse."""
        if self.view is not None:
            self._distrusted |= set(found) & set(self.view.members)

    def _are_newcomers_links(self, silent: Collection[Member]) -> bool:
        """Evidence that keeps a newcomer out, and cannot cost a member its place."""
        return bool(silent) and (self.view is None or not set(silent) & set(self.view.members))

    def _doubt(self, members: Iterable[Member], now_ns: int) -> None:
        """Newcomers that must not be in the next attempt, should this one fail."""
        if self.view is not None:
            newcomers = set(members) - set(self.view.members)
            self._carried |= newcomers
            for member in newcomers:
                self._newcomers.refuse(member.peer_id, now_ns)

    def _refuse_accused(self, accusations: Iterable[Accusation], now_ns: int) -> None:
        """The same for newcomers with a link in doubt."""
        if self.view is not None:
            members = set(self.view.members)
            doubted = [link for link in accusations if not {link.by, link.of} <= members]
            self._doubt({end for link in doubted for end in (link.by, link.of)}, now_ns)

    def _agrees_to_loss(self, now_ns: int) -> bool:
        """Of lost layers: has waited for them long enough, or half as long and is asked."""
        since_ns = self._lost_since_ns
        has_waited = since_ns is not None and now_ns - since_ns >= self._timing.lost_layers_ns // 2
        return self._accepts_loss or has_waited

    def _give_up(self, now_ns: int) -> None:
        """For good: rounds of a number that were said once must not begin anew."""
        if self._attempt is not None:
            self._given_up_number = max(self._given_up_number, self._attempt.number)
            self._heed_accusers(self._attempt, now_ns)
        self._attempt = None
        self._quiet_until_ns = now_ns + self._timing.retry_ns

    def _heed_accusers(self, attempt: Attempt, now_ns: int) -> None:
        heard = attempt.universe & set(attempt.opened)
        self._accusers.heed(attempt.number, attempt.charges, heard, self.me, now_ns)

    def _drop_next_view(self) -> None:
        self._dropped, self.next_view = self.next_view, None
        self._drop_next = False
        self._self_synced = False

    def _wake_up(self, now_ns: int) -> None:
        """After a sleep, deadlines move: this peer has not listened, and judges nobody."""
        gap_ns = now_ns - (now_ns if self._last_tick_ns is None else self._last_tick_ns)
        self._last_tick_ns = now_ns
        if gap_ns > self._timing.sleep_ns:
            if self._attempt is not None:
                self._attempt.progress_ns += gap_ns
                self._attempt.began_ns += gap_ns
            if self._reopen_ns is not None:
                self._reopen_ns += gap_ns
            if self._view_heard_ns is not None:
                self._view_heard_ns += gap_ns
            self._taken_over_ns += gap_ns
            self._agreed_ns += gap_ns
            self._given.slept(gap_ns)
            if self._lost_since_ns is not None:
                self._lost_since_ns += gap_ns

    @property
    def standing(self) -> Standing | None:
        """Where this peer stands, for whoever asks; None in no view."""
        return self._standing(self.view) if self.view is not None else None

    def _standing(self, view: View) -> Standing:
        has_plan = isinstance(view.plan, Plan)
        # Without a plan members are at unlike steps: all must compare alike, or they go to and fro.
        step = self.step if has_plan else view.snapshot.step
        assert view.certificate is not None
        ancestors = tuple(item for item in self._known.told if item != view.id)
        commit = self.ledger.last_commit if self.ledger is not None else ()
        commit = (commit or self._last_commit)[:COMMIT_TOLD] if has_plan else ()
        follows = tuple(sorted(self.familiar.given))
        said = Standing(self.me, view.certificate, has_plan, step, ancestors, commit, follows)
        return stated(said, self._signer)

    def _answer_outsider(self, sender: Member, now_ns: int) -> Actions:
        view = self.view
        if view is None or self.frozen or sender in view.members or self.me not in view.members:
            return []
        if not self._may_tell(sender.peer_id, now_ns):
            return []
        return self._tell(sender.peer_id, self._standing(view), now_ns)

    def _may_tell(self, peer_id: str, now_ns: int) -> bool:
        told_ns = self._told_ns.get(peer_id, -self._timing.resend_ns)
        return now_ns - told_ns >= self._timing.resend_ns

    def _tell(self, peer_id: str, message: AgreementMessage, now_ns: int) -> Actions:
        """At most one such message to a peer in each resend interval."""
        if not self._may_tell(peer_id, now_ns):
            return []
        if len(self._told_ns) >= 4 * MEMBERS_LIMIT:
            self._told_ns.clear()
        self._told_ns[peer_id] = now_ns
        return [SendMessage((peer_id,), message)]

    def _rejoin(self, reason: str, gives_up_steps: bool = False, pause_ns: int = 0) -> Actions:
        self._outside = True
        self.frozen = True
        self._attempt = self.next_view = None
        self.recovery_evidence.freeze(self.ledger)
        leaves = self._intent is Intent.LEAVING
        return [StopStep(), Left() if leaves else Rejoin(reason, gives_up_steps, pause_ns)]
