"""When what this peer measures is worth a new plan: its own facts, or steps that take much longer
than planned."""

import logging

from p2p_dtfm.core.audit.believed_speeds import pace_of, seen_slower
from p2p_dtfm.core.audit.roles import comes_of_age
from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.protocol.snapshot import Snapshot
from p2p_dtfm.core.recovery.view import View
from p2p_dtfm.daemon.node.participation.participant import Participant
from p2p_dtfm.daemon.peers.self_record import LinkNews
from p2p_dtfm.daemon.telemetry.plan_times import SLOW_PERCENT
from p2p_dtfm.daemon.telemetry.seen_paces import pace_text, pause_s
from p2p_dtfm.ports import now

log = logging.getLogger("p2p_dtfm")

REPLAN_INTERVAL_S = 60.0
"""A peer asks for a new plan because of links at most this often. Requests of others count apart.

Where links were measured before and have only changed, a view's plan is good enough for this long,
whichever peer asked for it. On a machine with several daemons they change all the time.
"""


class Replanning:
    """Asks the agreement for a view with the newest records."""

    def __init__(self, participant: Participant) -> None:
        self._participant = participant
        self._membership = membership = participant.membership
        self._agreement = membership.agreement
        self._do = membership.actions.do
        self._me = membership.network.me.peer_id
        self._local = participant.local
        self._replanned_s = -REPLAN_INTERVAL_S
        self._replans_view: View | None = None
        self._replans_view_since_s = 0.0
        """The view in force, and since when this loop has seen it."""
        self._worked_s = now.monotonic_s()
        """When this peer had a stage last."""
        self._times_slow = 0
        """How often its device was seen to be slower than when it was measured."""

    def if_news(self) -> None:
        """Ask for a view with this peer's present record, if the view in force has an older one and
        the news is worth it."""
        agreement = self._agreement
        if (view := self._view_with_others()) is None:
            return
        now_s = now.monotonic_s()
        if view is not self._replans_view:
            self._replans_view, self._replans_view_since_s = view, now_s
        news = self._membership.self_record.news_to(view.snapshot)
        is_of_links = news is LinkNews.CHANGED
        since_s = self._replans_view_since_s if is_of_links else self._replanned_s
        reason = news.value if news is not None else ""
        reason = reason or self._who_is_fast_again(view.snapshot)
        if not reason and comes_of_age(view.snapshot, self._me, agreement.step):
            reason = "a newcomer has followed for long enough"
        if reason and now_s - max(since_s, self._replanned_s) >= REPLAN_INTERVAL_S:
            self._replanned_s = now_s
            self._do(agreement.request_replan(reason, now.monotonic_ns()))

    def if_slow(self) -> None:
        """Ask for a new plan where steps take much longer than planned, or than under an earlier
        plan. What is measured first goes into this peer's record, from which the members plan."""
        agreement = self._agreement
        if (view := self._view_with_others()) is None:
            return
        is_late = self._membership.plan_times.reason is not None
        self._state_own_pace(view, is_late)
        self._state_paces_of_others(is_late)
        reason = self._membership.plan_times.why_anew()
        if reason is not None:
            self._local.tell(reason)
            self._do(agreement.request_replan(reason, now.monotonic_ns()))

    def _view_with_others(self) -> View | None:
        """The view that this peer is in, if others are in it, too, and have not left this peer."""
        view = self._agreement.view
        if view is None or self._agreement.is_outside or len(view.members) == 1:
            return None
        return view if self._membership.me in view.members else None

    def _state_own_pace(self, view: View, is_late: bool) -> None:
        """State this device as slow as it is seen to work while steps are late, and as fast again
        later."""
        record = self._membership.self_record
        if not is_late and record.device is record.measured_device:
            return
        seen = self._participant.device_pace.seen(
            record.measured_device, record.device, view, self._me
        )
        now_s, plan = now.monotonic_s(), view.plan
        step_s = plan.predicted_step_ns / 1e9 if isinstance(plan, Plan) else 0.0
        if seen is not None or self._membership.has_stage():
            self._worked_s = now_s
        elif now_s - self._worked_s >= pause_s(self._times_slow, step_s):
            seen = record.measured_device  # without work it cannot show that it is faster
        if seen is not None and seen is not record.device:
            self._times_slow += record.device is record.measured_device
            record.state_device(seen)
            self._membership.plan_times.forget(self._me)
            self._membership.set_record()

    def _state_paces_of_others(self, is_late: bool) -> None:
        """State which members are slower than they say, as seen here. The plan goes by what most
        have seen."""
        paces = self._participant.trainer.seen_paces
        paces.look(is_late)
        for peer_id in self._membership.self_record.state_paces(paces.told()):
            log.info("%s", pace_text(peer_id, paces.told().get(peer_id)))
            self._membership.plan_times.forget(peer_id)
            self._membership.set_record()

    def _who_is_fast_again(self, snapshot: Snapshot) -> str:
        """Why the plan in force takes a device to be slower than it is now; empty if it does
        not."""
        record = self._membership.self_record
        planned_ns = pace_of(snapshot.record(self._me).device, snapshot.workload)
        if planned_ns * 100 >= SLOW_PERCENT * pace_of(record.device, snapshot.workload):
            return "this device is as fast again as it was"
        paces = self._participant.trainer.seen_paces
        if better := paces.improved_peers(seen_slower(snapshot)):
            return f"{', '.join(better)} may be as fast again as it says"
        return ""
