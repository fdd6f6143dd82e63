"""What a peer remembers of the agreement: one object for each thing that it holds, and the small
changes to them."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from p2p_dtfm.core.commit.ledger import Ledger
from p2p_dtfm.core.commit.step_terms import StepTerms
from p2p_dtfm.core.consensus.actions import AgreementTiming
from p2p_dtfm.core.consensus.attempts.attempt import Attempt
from p2p_dtfm.core.consensus.attempts.promises import Promises
from p2p_dtfm.core.consensus.doubts import Doubts
from p2p_dtfm.core.consensus.next_view import AgreedNextView
from p2p_dtfm.core.consensus.opened_records import OpenedRecords
from p2p_dtfm.core.consensus.overlay.grid import Grid, grid_of_view
from p2p_dtfm.core.consensus.overlay.plan_neighbours import plan_neighbours
from p2p_dtfm.core.consensus.present import Present
from p2p_dtfm.core.consensus.views.known_views import KnownViews
from p2p_dtfm.core.consensus.views.reminders import Reminders
from p2p_dtfm.core.consensus.views.voices import Farewells
from p2p_dtfm.core.liveness.lateness import Lateness
from p2p_dtfm.core.membership.eligibility import ends_in_doubt
from p2p_dtfm.core.membership.familiar_peers import FamiliarPeers
from p2p_dtfm.core.membership.newcomers import FOUNDING_LIMIT, Newcomers, most_waiting
from p2p_dtfm.core.messages.agreement_messages import (
    Accusation,
    Active,
    Contribution,
    KnownView,
    PresentView,
    Spread,
)
from p2p_dtfm.core.messages.outlines import NamedBodies, names_in
from p2p_dtfm.core.protocol.canonical import digest
from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.protocol.prng import Prng, prng_of_digest
from p2p_dtfm.core.protocol.records import Intent, PeerRecord, open_record
from p2p_dtfm.core.protocol.signed import Sign, Signed, Verify
from p2p_dtfm.core.protocol.snapshot import GENESIS, Bar, Member, ViewId
from p2p_dtfm.core.protocol.workload import Workload
from p2p_dtfm.core.recovery.recovery_evidence import RecoveryEvidence
from p2p_dtfm.core.recovery.view import View

MEMBERS_LIMIT = 1024


@dataclass
class RunConstants:
    """What stays the same, however often this peer begins a new life."""

    run_digest: str
    workload: Workload
    sign: Sign
    verify: Verify
    terms: StepTerms
    """Those numbers of a step for which nobody needs to be believed."""
    timing: AgreementTiming = field(default_factory=AgreementTiming)


@dataclass
class Joining:
    """What a peer holds that is in no view, or in none any more."""

    is_outside: bool = False
    """The others went on without it: it hears nothing until its next life."""
    wants_view: bool = False
    view_heard_ns: int | None = None


@dataclass
class Attempts:
    """The attempt at a view, and what decides about the next one."""

    under_way: Attempt | None = None
    lateness: Lateness = field(default_factory=Lateness)
    frozen: bool = False
    """An unplanned view change is under way: no step commits."""
    failures: int = 0
    passed_by: set[Member] = field(default_factory=set)
    """Members that had passed the number of an attempt of this peer, so that it began anew. Emptied
    when a step commits."""
    reopen_ns: int | None = None
    quiet_until_ns: int = 0
    replan_reason: str = ""
    replan_number: int = 0
    spread_number: int = 0
    """Number of the attempt that this peer has heard of along the overlay."""
    spread_giver: str = ""
    """Sender of the Spread that is being read; empty at other times."""
    spread_makers: frozenset[str] = frozenset()
    """Makers of the contributions in that Spread, also of those that cannot be opened yet."""
    givers: dict[bytes, str] = field(default_factory=dict)
    """By signature of a contribution to the attempt `spread_number`: the peer that gave it
    first."""
    early: list[tuple[Spread, int]] = field(default_factory=list)
    """Spreads, with their bytes, of attempts in which this peer may not take part so far."""
    disagreements: int = 0
    """How many times in a row most others have planned differently from this peer."""


@dataclass
class Others:
    """What is known of other peers and their views."""

    familiar: FamiliarPeers
    """The peers that this peer follows where it was in no view itself."""
    views: KnownViews
    opened_records: OpenedRecords
    reminders: Reminders = field(default_factory=Reminders)
    farewells: Farewells = field(default_factory=Farewells)
    newcomers: Newcomers = field(default_factory=Newcomers)
    bars: tuple[Bar, ...] = ()
    lives: dict[str, int] = field(default_factory=dict)
    bodies: NamedBodies = field(default_factory=NamedBodies)
    told_ns: dict[str, int] = field(default_factory=dict)
    foreign_told_ns: int | None = None
    """When the user was told last of another swarm of this run."""


class AgreementState:
    """All that a peer remembers of the agreement, for the machines that work on it.

    Each part has the fields that belong together. Properties are for what is read everywhere; only
    the parts are assigned to.
    """

    def __init__(self, me: Member, settings: RunConstants, history: tuple[KnownView, ...]) -> None:
        self.settings = settings
        self.recovery_evidence = RecoveryEvidence(me.peer_id)
        self.record: Signed | None = None
        self.intent = Intent.TRAIN
        opened = OpenedRecords(lambda it: open_record(it, settings.run_digest, settings.verify))
        self.others = Others(FamiliarPeers(me.peer_id), KnownViews(history), opened)
        self.others.familiar.meet(peer for known in history for peer in sorted(known.peer_ids))
        self.last_tick_ns: int | None = None
        self.attempts = Attempts()
        self.present = Present(Active(me, GENESIS, 0))
        self.begin_life(me)

    def begin_life(self, me: Member) -> None:
        """A new life keeps no promise of the one before."""
        self.me = me
        self.joining = Joining()
        self.present = Present(Active(me, GENESIS, 0), accepts_loss=self.present.accepts_loss)
        self.agreed = AgreedNextView()
        self.attempts = Attempts(disagreements=self.attempts.disagreements)
        self.promises = Promises(highest_number=self.others.views.highest_number)
        self.doubts = Doubts()
        self.recovery_evidence.progress = None
        self.others.views.begin_life()
        self.others.farewells.forget()
        self.others.told_ns = {}
        self.prng: Prng = prng_of_digest(digest((me.peer_id, me.life)))

    # what is read everywhere ----------------------------------------------------------------------

    @property
    def timing(self) -> AgreementTiming:
        return self.settings.timing

    @property
    def view(self) -> View | None:
        """The present view."""
        return self.present.view

    @property
    def is_newcomer(self) -> bool:
        """Whether this peer is in no view."""
        return self.present.view is None

    @property
    def view_id(self) -> ViewId:
        """Id of the present view; a newcomer has the id that comes before all."""
        return self.present.view.id if self.present.view is not None else GENESIS

    @property
    def members(self) -> tuple[Member, ...]:
        """Members of the present view; a newcomer has none."""
        return self.present.view.members if self.present.view is not None else ()

    @property
    def plan(self) -> Plan | None:
        """Plan of the present view, if it trains."""
        plan = self.present.view.plan if self.present.view is not None else None
        return plan if isinstance(plan, Plan) else None

    @property
    def view_in_force(self) -> View | None:
        """The present view, while this peer is in it and no failure is dealt with."""
        view = self.present.view
        return view if view is not None and not self.frozen and self.me in view.members else None

    @property
    def active(self) -> dict[Member, Active]:
        """Members that have said that they are active in the present view."""
        return self.present.active_members.get(self.view_id, {})

    @property
    def all_are_active(self) -> bool:
        """Whether all members of the present view have said that they are in it. A leaver that has
        agreed to the view says so as well."""
        is_near = len(self.active) >= len(self.members)
        return is_near and set(self.members) <= self.active.keys()

    @property
    def next_view(self) -> View | None:
        """The agreed planned view that waits for its takeover."""
        return self.agreed.view

    @property
    def ledger(self) -> Ledger | None:
        return self.present.ledger

    @property
    def attempt(self) -> Attempt | None:
        return self.attempts.under_way

    @property
    def frozen(self) -> bool:
        """An unplanned view change is under way: no step commits."""
        return self.attempts.frozen

    @property
    def step(self) -> int:
        return self.recovery_evidence.step

    @property
    def is_complete(self) -> bool:
        """Whether all steps of the run are committed, so that none will be."""
        return self.step > self.settings.terms.total_steps

    def grid_of(self, view: View) -> Grid:
        """The overlay of the view's members. They all know the same records, so all have the same
        grid."""
        return grid_of_view(view.snapshot, view.id)

    @property
    def watched(self) -> frozenset[str]:
        """Peers that this peer must hear from all the time: its fellows of this view and the next
        one. In a view of many these are only its neighbours, on the overlay and by the plan."""
        found: set[str] = set()
        for view in (self.view, self.next_view):
            if view is None or self.me not in view.members:
                continue
            if self.is_wide(view):
                found |= self.grid_of(view).watchers.get(self.me.peer_id, frozenset())
                found |= plan_neighbours(view.plan, self.me.peer_id)
            else:
                found |= set(view.member_ids)
        return frozenset(found - {self.me.peer_id})

    @property
    def present_record_names(self) -> frozenset[bytes]:
        """The names that outlines use for records which all members of the present view have."""
        view, present = self.present.view, self.present
        if view is None:
            return frozenset()
        if present.record_names is None:
            present.record_names = names_in(view.snapshot.records)
        return present.record_names

    def others_of(self, view: View) -> tuple[str, ...]:
        """Peer ids of the others that have agreed to the view."""
        names = (member.peer_id for member in view.snapshot.contributors)
        return tuple(sorted(peer_id for peer_id in names if peer_id != self.me.peer_id))

    def know(self, peer_id: str) -> None:
        """A peer of this run that may be in another view, such as one found in the directory."""
        if peer_id != self.me.peer_id:
            self.others.familiar.hear_of(peer_id)

    @property
    def awaits_new_plan(self) -> bool:
        """Whether the plan is provisional, or has stand-ins, and all members are active to plan
        anew."""
        plan, ledger = self.plan, self.ledger
        is_stopgap = plan is not None and (bool(plan.stand_ins) or plan.provisional)
        return is_stopgap and ledger is not None and ledger.may_commit

    @property
    def ends_here(self) -> bool:
        """Whether the view has trained to the end, so that no planned view can succeed it."""
        return self.plan is not None and self.is_complete

    # small changes --------------------------------------------------------------------------------

    def open_record(self, signed: Signed) -> PeerRecord:
        """Raises `PeerFault`."""
        return self.others.opened_records.open(signed)

    def open_newcomer(self, signed: Signed) -> PeerRecord:
        """Open a record of a peer that may be in no view at all. Raises `PeerFault`."""
        return self.others.opened_records.open_newcomer(signed)

    def present_view(self) -> PresentView | None:
        """What this peer's contributions say of its view."""
        if self.is_newcomer:
            return None
        return PresentView(self.view_id, self.members, self.plan)

    def is_wide(self, view: View) -> bool:
        """Whether the view has so many members that each speaks with its neighbours only."""
        return len(view.members) > self.timing.wide_above

    def named_newcomers(self, planned: bool) -> tuple[Member, ...]:
        """Newcomers that this peer names in an attempt. After a failure it names none: steps wait,
        and the next planned view lets newcomers in."""
        waits = self.plan is not None and not planned
        limit = most_waiting(len(self.members)) if self.view is not None else FOUNDING_LIMIT
        return () if waits else tuple(self.others.newcomers.members)[:limit]

    def distrust_members(self, found: Collection[Member]) -> None:
        """Distrust these members until a view takes over, even if they are heard from."""
        self.doubts.distrusted |= set(found) & set(self.members)

    def give_up(self, now_ns: int) -> None:
        """Give up the attempt for good: rounds that were said once of a number must not begin
        anew."""
        if self.attempt is not None:
            self.passes(self.attempt, now_ns)
        self.attempts.quiet_until_ns = now_ns + self.timing.retry_ns

    def passes(self, attempt: Attempt, now_ns: int) -> None:
        """The attempt under way is over: its number is never entered again."""
        self.promises.gives_up(attempt.number)
        self.ends(attempt, now_ns)
        self.attempts.under_way = None

    def ends(self, attempt: Attempt, now_ns: int) -> None:
        """An attempt is over: keep whose accusations were idle, who was in doubt, and who tried to
        get in."""
        if attempt.planned:
            self.tried_to_get_in(attempt.universe, now_ns)
            self.doubts.accusers.answers(attempt.heard)
        self.doubts.heed(attempt, self.me, now_ns)
        self.doubts.heed_conflicts(attempt, now_ns)

    def waits_for_takeover(self, view: View, now_ns: int) -> None:
        """All have said Ready to a planned view."""
        self.tried_to_get_in(view.members, now_ns)
        self.doubts.accusers.answers(view.snapshot.contributors)
        self.agreed.waits(view, now_ns)

    def tried_to_get_in(self, members: Iterable[Member], now_ns: int) -> None:
        """Note which newcomers tried to get in with an attempt that is over, or has ended with a
        view."""
        newcomers = set(members) - set(self.members)
        self.others.newcomers.tried({member.peer_id for member in newcomers}, now_ns)

    def stop_attempt(self, now_ns: int) -> None:
        """Give up the attempt; a newcomer has nothing that could stay frozen."""
        self.give_up(now_ns)
        if self.is_newcomer:
            self.attempts.frozen = False

    def doubt_newcomers(self, members: Iterable[Member], now_ns: int) -> None:
        """Doubt the newcomers among `members`: they must not be in the next attempt, if this one
        fails."""
        if self.is_newcomer:
            return
        newcomers = set(members) - set(self.members)
        self.doubts.carried |= newcomers
        for member in newcomers:
            self.others.newcomers.refuse(member.peer_id, now_ns)

    def doubt_links(
        self, heard: Mapping[Member, Contribution], links: Collection[Accusation], now_ns: int
    ) -> None:
        """Doubt, in the same way, newcomers with a link in doubt."""
        self.doubt_newcomers(ends_in_doubt(heard, links, set(self.members)), now_ns)

    def wake_up(self, now_ns: int) -> None:
        """After a sleep move the deadlines, since this peer has not listened; what has begun since
        stays."""
        gap_ns = now_ns - (now_ns if self.last_tick_ns is None else self.last_tick_ns)
        self.last_tick_ns = now_ns
        if gap_ns <= self.timing.sleep_ns:
            return

        def moved_ns(at_ns: int) -> int:
            return max(at_ns, min(at_ns + gap_ns, now_ns))

        if self.attempt is not None:
            self.attempt.clock.sleep(moved_ns)
        if self.attempts.reopen_ns is not None:
            limit_ns = now_ns + self.timing.backoff_limit_ns
            self.attempts.reopen_ns = min(self.attempts.reopen_ns + gap_ns, limit_ns)
        if self.joining.view_heard_ns is not None:
            self.joining.view_heard_ns = moved_ns(self.joining.view_heard_ns)
        self.present.slept(moved_ns)
        self.agreed.slept(moved_ns)
