"""Tensors and Prepared of views that this peer has agreed on, be they taken over here or not."""

import asyncio
from collections import deque
from collections.abc import Awaitable

from p2p_dtfm.core.messages.prepared import Statement
from p2p_dtfm.core.planner.wire_plan import wire_plan
from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.core.protocol.snapshot import ViewId
from p2p_dtfm.core.recovery.partial_replay import PartialReplay
from p2p_dtfm.core.recovery.view import View
from p2p_dtfm.daemon.step.mailbox import Mailbox
from p2p_dtfm.daemon.trainer.early_words import EarlyWords
from p2p_dtfm.daemon.trainer.trainer_state import TrainerState
from p2p_dtfm.net.streams.frames import WHOLE, FrameHeader, FrameKind
from p2p_dtfm.ports import now, rarely

VIEWS_REMEMBERED = 64
"""A tensor of one of these comes late; one of any other view was never due."""
VIEWS_AHEAD_LIMIT = 1024
"""A tensor of a view further ahead than this is not waited for."""
UNKNOWN_VIEW_WAIT_S = 5.0
UNKNOWN_VIEW_POLL_S = 0.02
EARLY_LIMIT_BYTES = 1 << 20
"""A tensor of a view unknown here is taken at once up to this size. A larger one waits before
memory is taken for it: whoever invents a view may claim tensors of any size."""
EARLY_WAIT_S = 30.0
"""How long such a tensor waits: as long as a thin line takes to bring it, and less than its sender
has patience for."""
OF_A_STEP = frozenset(FrameKind) - {FrameKind.LAYER_GRADIENT, FrameKind.LAYER_STATE}


class ViewMail:
    """A peer that took over earlier may send before this one does, or even knows the view."""

    def __init__(self, me: str, spec: RunSpec, state: TrainerState) -> None:
        self._me = me
        self._spec = spec
        self._state = state
        self._mailboxes: dict[ViewId, Mailbox] = {}
        self._views: deque[ViewId] = deque(maxlen=VIEWS_REMEMBERED)
        self._early = EarlyWords[Statement]()
        self._begins_at = 0
        """The number of the first view that this process has taken over: it knows none before."""

    def agreed(self, view: View) -> None:
        """Tensors of a planned view are due from now on: a member that took it over earlier begins
        to send.

        What is due in an unplanned one depends on what is kept of the step that failed, which is
        known at the takeover. A view that was to follow before is not to any more.
        """
        if view.snapshot.planned:
            self._views.append(view.id)
        present = self._state.view
        of_present = None if present is None else self._mailboxes.get(present.id)
        self._mailboxes = {} if of_present is None else {of_present.view: of_present}
        self._open(view)

    def _open(self, view: View) -> None:
        """Make the mailbox of a view in which this peer has a stage."""
        plan = view.plan
        if isinstance(plan, Plan) and plan.stage_of(self._me) is not None:
            wire = wire_plan(self._spec, plan, view.snapshot)
            self._mailboxes[view.id] = Mailbox(view.id, plan, self._me, self._spec, wire)

    def take_over(self, view: View, replay: PartialReplay | None) -> list[Statement]:
        """Forget the views before; returns the Prepared that came early."""
        self._mailboxes = {k: v for k, v in self._mailboxes.items() if k >= view.id}
        if view.id not in self._mailboxes:
            self._open(view)
        mailbox, plan = self._mailboxes.get(view.id), view.plan
        if replay is not None and mailbox is not None and isinstance(plan, Plan):
            mine = replay.stage(plan, self._me)
            if mine is not None:
                mailbox.replay(replay.step, mine)
        if view.id not in self._views:
            self._views.append(view.id)
        self._begins_at = self._begins_at or view.id.number
        return [statement for _, statement in self._early.take()]

    def leave_views(self) -> None:
        """This peer is in no view any more: nothing that came in one is wanted."""
        self._mailboxes = {}

    def keep_early(self, statement: Statement) -> None:
        """Keep a Prepared of a view that has not taken over here. Raises `PeerFault`."""
        sender, size_bytes = statement.prepared.peer_id, len(statement.signed.payload)
        if not self._early.keep(sender, statement, size_bytes):
            raise PeerFault("says Prepared in a view that this peer does not know", sender)

    def require_possible(self, view: ViewId, sender: str) -> None:
        """Raises `PeerFault` unless the view was, is, or may come soon."""
        present = self._state.view
        if view in self._views or present is None or self._may_have_been(view):
            return
        if not present.id.number < view.number <= present.id.number + VIEWS_AHEAD_LIMIT:
            raise PeerFault(f"a tensor of view {view}, which cannot be", sender)

    def _may_have_been(self, view: ViewId) -> bool:
        """Whether others may have been in this view, and this peer not. It is from before this
        process, or somebody's word for it was late here and a later view has taken over first."""
        known, present = [it.number for it in self._views], self._state.view
        if view.number < self._begins_at or present is None:
            return present is not None
        is_between = min(known, default=0) < view.number < present.id.number
        return is_between and view.number not in known

    def admit(self, view: ViewId, sender: str, header: FrameHeader) -> Awaitable[None] | None:
        """Call it before memory is taken for a tensor. Raises `PeerFault` for one that cannot be
        due, as far as is known. What it returns may raise that, too; the tensor is not read before
        that has ended."""
        self.require_possible(view, sender)
        if view in self._views:
            self._check(view, sender, header)
        elif (
            header.part != WHOLE
            or header.payload_bytes > EARLY_LIMIT_BYTES
            or rarely.happens("no early tensor")
        ):
            return self._admit_late(view, sender, header)
        return None

    async def _admit_late(self, view: ViewId, sender: str, header: FrameHeader) -> None:
        wait_s = UNKNOWN_VIEW_WAIT_S if self._state.view is None else EARLY_WAIT_S
        if await self.until_known(view, sender, wait_s):
            self._check(view, sender, header)

    def _check(self, view: ViewId, sender: str, header: FrameHeader) -> None:
        """Raises `PeerFault` for a tensor that is not due in a view that is known."""
        mailbox = self._mailboxes.get(view)
        if mailbox is not None and header.kind in OF_A_STEP:
            mailbox.check(sender, header)

    async def until_known(self, view: ViewId, sender: str, wait_s: float | None = None) -> bool:
        """Wait for a view that comes next; meanwhile the sender's lane waits. Returns whether the
        view is known now.

        A peer that has come back, perhaps with an older disk, does not know the views in which it
        was. One that goes over to a later view does not know all that came before. A member that
        still sends what was due in them is not to blame. Raises `PeerFault` for a view that cannot
        have been.
        """
        end_s = now.monotonic_s() + (UNKNOWN_VIEW_WAIT_S if wait_s is None else wait_s)
        while view not in self._views:
            present = self._state.view
            is_next = present is None or view.number > present.id.number
            if not is_next or now.monotonic_s() > end_s:
                if present is None or self._may_have_been(view):
                    return False
                raise PeerFault(f"a tensor of view {view}, which this peer does not know", sender)
            await asyncio.sleep(UNKNOWN_VIEW_POLL_S)
        return True

    def mailbox(self, view: ViewId) -> Mailbox | None:
        """None where this peer has no stage in the view, or a later one has taken over."""
        return self._mailboxes.get(view)

    def of_stage(self, view: ViewId) -> Mailbox:
        """The mailbox of the view in force, in which this peer has a stage."""
        return self._mailboxes[view]
