"""A failure that took no stage-holder, or only lost a message, leaves the plan in force as it was.

Nothing is searched for then: members agree as soon as they have gathered, and the step goes on.
"""

import msgspec

from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.protocol.records import Intent
from p2p_dtfm.core.protocol.snapshot import Snapshot


def standing_plan(snapshot: Snapshot) -> Plan | None:
    """The plan that failed, with the spares that are left; None where planning is called for:
    in a planned view, where a stage has lost its peer or that peer the states, and where somebody
    is new."""
    plan = snapshot.present
    work = snapshot.workload
    if snapshot.planned or plan is None:
        return None
    if not plan.covers(work.layer_count, work.microbatch_count):
        return None
    members = {record.peer_id for record in snapshot.records}
    training = {r.peer_id for r in snapshot.records if r.intent is Intent.TRAIN}
    stages = [stage for pipeline in plan.pipelines for stage in pipeline.stages]
    holders = {stage.peer_id for stage in stages}
    if not holders <= training or not members <= holders | set(plan.spares):
        return None
    states = snapshot.states()
    if snapshot.step > 0 and any(
        not states.get(stage.peer_id, set()).issuperset(stage.layers) for stage in stages
    ):
        return None
    return msgspec.structs.replace(plan, spares=tuple(sorted(members - holders)))
