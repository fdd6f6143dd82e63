"""What the knowledge of an attempt comes to once all know the same: the snapshot of the view, its
plan, and what it keeps of the step under way."""

from collections.abc import Callable

from p2p_dtfm.core.consensus.attempts.attempt import Attempt
from p2p_dtfm.core.membership.leaving import staying
from p2p_dtfm.core.messages.agreement_messages import Contribution
from p2p_dtfm.core.protocol.plan import NoPlan, Plan
from p2p_dtfm.core.protocol.records import PeerRecord
from p2p_dtfm.core.protocol.signed import Signed
from p2p_dtfm.core.protocol.snapshot import GENESIS, HeldLayer, Snapshot, sorted_records
from p2p_dtfm.core.protocol.workload import Workload
from p2p_dtfm.core.recovery.believed_claims import BelievedClaims
from p2p_dtfm.core.recovery.going_back import restart_of
from p2p_dtfm.core.recovery.partial_replay import PartialReplay, begun_by, replay_of
from p2p_dtfm.core.recovery.restart_point import Recovery
from p2p_dtfm.core.recovery.stand_in_plan import with_stand_ins

OpenRecord = Callable[[Signed], PeerRecord]


def freeze(
    attempt: Attempt, run_digest: str, workload: Workload, open_record: OpenRecord
) -> Snapshot:
    """The snapshot that the gathered knowledge comes to; from now on that is fixed."""
    outcome, judged = attempt.outcome, attempt.judged
    parts = [attempt.opened[member] for member in judged.participants]
    records = [open_record(part.record) for part in parts]
    present = [part.present for part in parts if part.present is not None]
    newest = max(present, key=lambda it: (it.view, it.plan is not None), default=None)
    plan = newest.plan if newest else None
    step, held = BelievedClaims(parts, slack_steps=1).furthest(), _held_layers(parts)
    if not attempt.planned:
        found = restart_of(parts, attempt.layer_count, attempt.terms, judged.epochs, judged.undo)
        outcome.recovery = found
        if found.target is not None:
            step, held = found.target.step, _held_at_target(found)
    recovery = outcome.recovery
    target = recovery.target if recovery is not None else None
    missing = attempt.universe - set(judged.participants)
    outcome.snapshot = snapshot = Snapshot(
        run_digest=run_digest,
        workload=workload,
        number=attempt.number,
        previous=attempt.base if attempt.planned else (newest.view if newest else GENESIS),
        planned=attempt.planned,
        records=sorted_records(staying(records, attempt.planned, plan, held, bool(missing))),
        contributors=judged.participants,
        absent=tuple(sorted(missing)),
        step=step,
        held=held,
        present=plan,
        knowledge=attempt.own_digest,
        lineage=target.lineage if target is not None else "",
        lost_layers=recovery.lost_layers if recovery is not None else (),
        bars=judged.bars,
    )
    return snapshot


def plan_of(attempt: Attempt, planned: Plan | NoPlan) -> Plan | NoPlan:
    """The plan of the view: `planned`, or one in which replicas stand in for who is lost."""
    recovery, snapshot = attempt.outcome.recovery, attempt.snapshot
    target = recovery.target if recovery is not None else None
    if attempt.planned or target is None or isinstance(planned, NoPlan):
        return planned
    assert snapshot is not None
    begun = begun_by(attempt.counted, attempt.terms)
    return with_stand_ins(snapshot, planned, target, begun)


def replay_in(attempt: Attempt) -> PartialReplay | None:
    """What an unplanned view keeps of the step that was under way."""
    recovery, plan = attempt.outcome.recovery, attempt.plan
    if recovery is None or recovery.target is None or not isinstance(plan, Plan):
        return None
    return replay_of(plan, recovery.target, begun_by(attempt.counted, attempt.terms))


def _held_layers(parts: list[Contribution]) -> tuple[HeldLayer, ...]:
    """What contributors had when they entered Gather."""
    return tuple(
        HeldLayer(part.member.peer_id, layer, version)
        for part in parts
        for layer, version in sorted(part.held.items())
    )


def _held_at_target(recovery: Recovery) -> tuple[HeldLayer, ...]:
    """The layers that contributors have at the step where a view starts after a failure."""
    assert recovery.target is not None
    return tuple(
        HeldLayer(member.peer_id, layer, recovery.target.step)
        for member, layers in sorted(recovery.held.items())
        for layer in layers
    )
