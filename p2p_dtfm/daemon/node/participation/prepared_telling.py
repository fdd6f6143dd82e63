"""Which members hear of this peer's Prepared, and when. Those on which the others wait hear
first."""

import math
from functools import partial

from p2p_dtfm.core.messages.prepared import PreparedSteps, SignedPrepared
from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.protocol.signed import Signed
from p2p_dtfm.core.protocol.snapshot import ViewId
from p2p_dtfm.core.recovery.view import View
from p2p_dtfm.daemon.node.membership import Membership
from p2p_dtfm.daemon.peers.held_back import HeldBack
from p2p_dtfm.ports import now


class PreparedTelling:
    """Tells this peer's Prepared to all other members of the view."""

    def __init__(self, membership: Membership) -> None:
        self._agreement = membership.agreement
        self._last_step = membership.run.spec.total_steps
        self._messenger = membership.network.messenger
        self._me = membership.network.me.peer_id
        self._held_back = HeldBack()
        self._untaken: range | None = None
        """Steps of this view whose Prepared were told to others, and that no other member has taken
        yet."""
        self._view: ViewId | None = None
        """The view in which they were told."""

    def shown_of(self, steps: int) -> int:
        """How many of these committed steps another member could show, as far as this peer's
        Prepared go. Without this peer's Prepared, the others' do not show that a step is
        committed."""
        view = self._agreement.view
        if self._untaken is None or view is None or view.id != self._view:
            return steps  # a later view begins where all agree that it does
        return min(steps, self._untaken.start)

    def _tells(self, view: View, step: int) -> None:
        if view.id != self._view or self._untaken is None or step < self._untaken.start:
            self._view, self._untaken = view.id, range(step, step)
        self._untaken = range(self._untaken.start, step + 1)

    def _taken(self, view: ViewId, step: int) -> None:
        """A member has taken the Prepared of `step`, which shows that all steps before it are
        committed."""
        untaken = self._untaken
        if view == self._view and untaken is not None and step >= untaken.start:
            self._untaken = range(step + 1, untaken.stop) or None

    def say(self, signed: Signed, view: View) -> None:
        """Tell first the holders of the first stages, for whom the others wait: they begin the next
        step.

        Where this peer alone computes and guardians lag, nobody waits. The others then hear of
        several steps at a time. They hear at once of a step after which another view may take over.
        """
        message: SignedPrepared | PreparedSteps = SignedPrepared(signed)
        if self._computes_alone(view):
            now_s = now.monotonic_s()
            self._held_back.add(view.id, signed)
            if self._may_wait() and not self._held_back.is_due(now_s):
                return
            message = PreparedSteps(self._held_back.take(now_s))
        position = {peer_id: math.inf for peer_id in view.member_ids}
        if isinstance(view.plan, Plan):
            for pipeline in view.plan.pipelines:
                position |= {stage.peer_id: at for at, stage in enumerate(pipeline.stages)}
        step = self._agreement.step
        if len(view.members) > 1:
            self._tells(view, step)
        when_taken = partial(self._taken, view.id, step)
        for peer_id in sorted(view.member_ids, key=position.__getitem__):
            self._messenger.tell(peer_id, message, when_taken)

    def _computes_alone(self, view: View) -> bool:
        is_alone = isinstance(view.plan, Plan) and view.plan.stage_holders() == (self._me,)
        return is_alone and view.cut_pace is not None

    def _may_wait(self) -> bool:
        """Whether no view waits for the step under way, and it is not the last one."""
        agreement = self._agreement
        return agreement.next_view is None and agreement.step < self._last_step
