"""Who holds up the steps of the view in force: `core.liveness.stalls` with what this daemon
knows."""

from collections.abc import Collection, Iterable

from p2p_dtfm.core.consensus.agreement import Agreement
from p2p_dtfm.core.liveness.liveness import Suspect
from p2p_dtfm.core.liveness.news import EarlyNews
from p2p_dtfm.core.liveness.pace import Pace, Patience
from p2p_dtfm.core.liveness.stalls import PatienceOf, Stalls
from p2p_dtfm.core.liveness.vouches import Vouches
from p2p_dtfm.core.liveness.waits import PossibleWaits
from p2p_dtfm.core.messages.work import Work
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.core.protocol.signed import Signed
from p2p_dtfm.core.recovery.contradictions import stated
from p2p_dtfm.core.recovery.view import View
from p2p_dtfm.core.schedule.tied_ends import tied_ends
from p2p_dtfm.core.units import SECOND_NS
from p2p_dtfm.daemon.trainer.step_waits import StepWaits

GRACE_S = 0.25
GRACE_LIMIT_S = 2.0
STEPS_OF_GRACE = 2
"""The grace is an expected step divided by this, within the two bounds."""


class StepWatch:
    """Call `took_over` with each view, `committed` and `vouched` with each step, `tick` all the
    time."""

    def __init__(
        self, me: str, spec: RunSpec, files_bytes: Collection[int], waits: StepWaits, sleep_ns: int
    ) -> None:
        """`files_bytes`: the size of each file of the data."""
        self._spec = spec
        self._largest_and_all = max(files_bytes, default=0), sum(files_bytes)
        self._waits = waits
        self._stalls = Stalls(me, sleep_ns)
        self._in_view: tuple[PossibleWaits, Pace] | None = None
        self._step_began_ns: int | None = None
        self._vouches = Vouches()
        self._news = EarlyNews()
        self.has_news = False
        self._not_ready: list[Suspect] = []

    def took_over(self, view: View, step: int) -> None:
        pace = Pace(view, self._spec, *self._largest_and_all)
        pace.begin(step)
        ends_meet, audits = bool(tied_ends(self._spec)), bool(self._spec.audit.rate)
        self._in_view = PossibleWaits(view, ends_meet, audits), pace
        self._step_began_ns, self._not_ready = None, []

    def committed(self, now_ns: int) -> None:
        if self._in_view is not None and self._step_began_ns is not None:
            self._in_view[1].committed(now_ns - self._step_began_ns)
        self._step_began_ns = now_ns

    def vouched(self, agreement: Agreement, prepared: Iterable[Signed]) -> None:
        """Note who is not ready for the next view, by what all have said of the step that has just
        `committed`. Call it before a takeover."""
        next_view = agreement.next_view
        said = map(stated, prepared) if next_view is not None else ()
        named = next_view.id if next_view is not None else None
        self._not_ready = self._vouches.committed(said, named, self._step_began_ns or 0)

    @property
    def grace_s(self) -> float:
        """Time for others to find out as well who sends what no correct peer sends, or withholds
        what it has claimed. An accusation by one alone may cost the accuser its place. Machines
        that take long for a step take long for that, too."""
        expected_ns = self._in_view[1].expected_ns if self._in_view is not None else 0
        return min(GRACE_LIMIT_S, max(GRACE_S, expected_ns / SECOND_NS / STEPS_OF_GRACE))

    def heard(self, peer_id: str, progress: int, work: Work | None) -> None:
        self._stalls.heard(peer_id, progress, work)

    def work(self, agreement: Agreement) -> Work | None:
        """Where this peer stands, as it says to others."""
        return None if agreement.frozen else self._waits.work(agreement.not_active)

    def tick(self, agreement: Agreement, watched: Iterable[str], now_ns: int) -> list[Suspect]:
        """New suspicions. For this tick `has_news` says whether this peer is to tell all now where
        it stands."""
        self._stalls.watch(watched)
        mine = self.work(agreement)
        self.has_news = self._news.is_due(mine, now_ns)
        if self._in_view is None:
            return []
        possible, pace = self._in_view
        not_ready, self._not_ready = self._not_ready, []
        patience = self._patience(pace)
        return not_ready + self._stalls.tick(
            mine, possible, self._waits.has_given, patience, now_ns
        )

    def _patience(self, pace: Pace) -> PatienceOf:
        """Borrowers are looked up only for peers that hold something up."""

        def patience(peer_id: str, step: int) -> Patience:
            borrowed = self._waits.borrowers().get(peer_id, 0)
            return pace.patience(peer_id, step, borrowed, self._waits.disputes().get(peer_id, ()))

        return patience

    def take_sides(self, agreement: Agreement) -> list[Suspect]:
        """The members that hold up this peer, too, among those that accuse, or are accused, in the
        attempt under way. Its next tick may come when all have agreed."""
        if self._in_view is None or agreement.view is None:
            return []
        patience = self._patience(self._in_view[1])
        return self._stalls.join(agreement.doubted, patience, agreement.view.id)
