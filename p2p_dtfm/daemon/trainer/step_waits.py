"""Where this peer stands in its step: what it lacks of whom, and what it has given to whom."""

from collections.abc import Mapping

from p2p_dtfm.core.audit.boundaries import Beside, Due, beside
from p2p_dtfm.core.messages.work import LACKS_LIMIT, Kind, Lack, Work
from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.protocol.snapshot import ViewId
from p2p_dtfm.core.schedule.tied_ends import tied_ends
from p2p_dtfm.daemon.step.mailbox import FrameKey
from p2p_dtfm.daemon.step.step_engine import StepEngine
from p2p_dtfm.daemon.trainer.followers import Followers
from p2p_dtfm.daemon.trainer.step_loop import StepLoop
from p2p_dtfm.daemon.trainer.trainer_state import Tools, TrainerState
from p2p_dtfm.net.streams.frames import FrameKind

KINDS = {
    FrameKind.ACTIVATION: Kind.ACTIVATION,
    FrameKind.ACTIVATION_GRADIENT: Kind.GRADIENT,
    FrameKind.GRADIENT_PART: Kind.PART,
    FrameKind.GRADIENT_SUM: Kind.SUM,
}
STEP_LANES = ("forward", "backward", "reduce")
FRAME_KINDS = {kind: frame_kind for frame_kind, kind in KINDS.items()}


class StepWaits:
    """Reads what the trainer's parts know; changes nothing."""

    def __init__(
        self, tools: Tools, state: TrainerState, steps: StepLoop, followers: Followers
    ) -> None:
        self._tools = tools
        self._state = state
        self._steps = steps
        self._followers = followers

    def work(self, not_active: tuple[str, ...]) -> Work | None:
        """None while no steps are taken. `not_active`: members that have not taken over."""
        state, view = self._state, self._state.view
        if view is None or state.stopped:
            return None
        if not isinstance(view.plan, Plan) or state.step > self._tools.spec.total_steps:
            return None
        return Work(
            view=view.id,
            step=state.step,
            computes=not self._tools.compute.is_idle,
            lacks=self._lacks(not_active)[:LACKS_LIMIT],
            sends_to=tuple(peer for peer in view.member_ids if self._gives(peer)),
            fetches=state.fetches or bool(state.restarts) or self._steps.audits.fetches,
        )

    @property
    def stands_still(self) -> bool:
        """No step commits here, for a reason that does not pass by itself."""
        return self._state.stands_still

    def borrowers(self) -> Mapping[str, int]:
        """The members that compute works again whose layers they have not got, each with how
        many."""
        view = self._state.view
        if holders := self._unheard_holders():
            return dict.fromkeys(holders, len(holders) - 1)
        return self._steps.audits.borrowers(view.id) if view is not None else {}

    def disputes(self) -> Mapping[str, tuple[str, ...]]:
        """By member, the others whose works it computes again because they are disputed."""
        view = self._state.view
        if holders := self._unheard_holders():
            return {it: tuple(other for other in holders if other != it) for it in holders}
        return self._steps.audits.disputes(view.id) if view is not None else {}

    def _unheard_holders(self) -> tuple[str, ...]:
        """A spare hears no claims: for all that it knows each stage-holder computes the works of
        all others."""
        view, me = self._state.view, self._tools.me
        if view is None or not isinstance(view.plan, Plan) or not self._tools.spec.audit.rate:
            return ()
        return () if view.plan.places_of(me) else tuple(view.plan.stage_holders())

    def has_given(self, peer_id: str, lack: Lack) -> bool:
        """Whether this peer has sent what `peer_id` says it lacks of it, and `peer_id` has accepted
        all that."""
        state, engine = self._state, self._engine()
        if self._is_on_its_way(peer_id):
            return False
        if lack.kind is Kind.ACTIVE:
            return True
        if lack.kind in (Kind.CLAIM, Kind.AUDIT):
            return self._steps.audits.has_given(lack.kind, state.step)
        if lack.kind is Kind.PREPARED:
            ledger = state.ledger
            return ledger is not None and self._tools.me not in ledger.missing
        kind = FRAME_KINDS.get(lack.kind)
        if kind is None or engine is None:
            return False
        if self._was_never_due(peer_id, lack, engine):
            # what was never due goes to members that compute works again, as soon as they ask
            return lack.kind is Kind.SUM or not self._tools.net.blobs.gave_lately(peer_id)
        return engine.frames.has_given(peer_id, state.step, kind, lack.layer, lack.index)

    def _was_never_due(self, peer_id: str, lack: Lack, engine: StepEngine) -> bool:
        """Whether this peer never owed it by the plan. By the plan it owes a part to the holder
        that adds it up, and a sum where it adds up itself. It owes a boundary's tensor if the
        microbatch goes from here to there. A peer that named anything else would be excused by it
        for ever, since it never gets it."""
        view, replay = self._state.view, self._state.replay
        plan = view.plan if view is not None else None
        if not isinstance(plan, Plan):
            return False
        if lack.kind in (Kind.PART, Kind.SUM):
            if peer_id not in plan.holders(lack.layer):  # sums of a tied matrix go to the other end
                is_tied = lack.layer in tied_ends(self._tools.spec)
                return lack.kind is Kind.PART or not is_tied
            chunks = engine.mailbox.wire.chunks.get(lack.layer)
            owners = chunks.owners if chunks is not None else ()
            owner = peer_id if lack.kind is Kind.PART else self._tools.me
            return not 0 <= lack.index < len(owners) or owners[lack.index] != owner
        if replay is not None and replay.step == self._state.step:
            return False  # microbatches may go other ways
        due = Due(held_out=self._tools.spec.evaluation_microbatches)
        around = beside(plan, peer_id, due).get(lack.index, Beside("", ""))
        giver = around.before if lack.kind is Kind.ACTIVATION else around.after
        return giver != self._tools.me

    def _lacks(self, not_active: tuple[str, ...]) -> tuple[Lack, ...]:
        state, engine, me = self._state, self._engine(), self._tools.me
        if engine is not None and (keys := engine.mailbox.lacks()):
            first = {(key.sender, key.kind): key for key in reversed(keys)}
            return tuple(sorted(map(_lack_of, first.values()), key=_parts_first))
        ledger = state.ledger
        if ledger is None or state.view is None:
            return ()
        if state.view.layers_of(me) and me in ledger.missing:
            return self._before_prepared(state.view.id)
        if ledger.missing:
            return tuple(Lack(peer, Kind.PREPARED) for peer in ledger.missing)
        others = (peer for peer in not_active if peer != me)
        return tuple(Lack(peer, Kind.ACTIVE) for peer in others)

    def _before_prepared(self, view: ViewId) -> tuple[Lack, ...]:
        receipts, awaits = self._followers.receipts, self._steps.awaits_receipts
        owed = receipts.owed(self._state.step) if receipts is not None and awaits else ()
        return tuple(Lack(it, Kind.RECEIPT) for it in owed) or self._steps.audits.lacks(view)

    def _engine(self) -> StepEngine | None:
        """The engine, if it is that of the view in force."""
        engine, view = self._steps.engine, self._state.view
        of_this_view = engine is not None and view is not None and engine.view == view.id
        return engine if of_this_view else None

    def _gives(self, peer_id: str) -> bool:
        return self._is_on_its_way(peer_id) or self._tools.net.blobs.gave_lately(peer_id)

    def _is_on_its_way(self, peer_id: str) -> bool:
        engine = self._engine()
        if engine is not None and engine.frames.is_writing_to(peer_id):
            return True
        bulk = self._tools.net.bulk
        return any(bulk.unacknowledged_bytes(peer_id, lane) for lane in STEP_LANES)


def _parts_first(lack: Lack) -> tuple[bool, Lack]:
    """Only so many lacks are told, and parts say more. A peer that lacks a part knows that its
    maker has not made it; one that lacks a sum, only that its maker may wait for a part."""
    return lack.kind is not Kind.PART, lack


def _lack_of(key: FrameKey) -> Lack:
    return Lack(key.sender, KINDS[key.kind], key.layer, key.index)
