"""Whether replicas stand in for lost peers after a failure in the middle of a step, until the next
plan.

The plan that failed goes on as it was. Another member with the same layers takes a lost place,
beside its own place in another pipeline. No state moves, and what the survivors of the broken
pipeline have computed still counts. `docs/decisions/0018-stand-ins.md` says why this is right, and
when it pays.
"""

from collections.abc import Iterable, Sequence
from itertools import accumulate

import msgspec

from p2p_dtfm.core.cost_model.tables.layer_tables import kinds_in, layer_ns_of
from p2p_dtfm.core.messages.agreement_messages import Contribution
from p2p_dtfm.core.protocol.plan import LONGEST_STEP_NS, Pipeline, Plan, Stage, check_plan
from p2p_dtfm.core.protocol.records import Intent
from p2p_dtfm.core.protocol.snapshot import Snapshot
from p2p_dtfm.core.recovery.complete_steps import Target
from p2p_dtfm.core.recovery.partial_replay import PartialReplay, replay_of

PLACES_LIMIT = 2
"""Places that one peer may have. It computes the microbatches of all of them."""

Stages = tuple[Stage, ...]


def with_stand_ins(
    snapshot: Snapshot, planned: Plan, target: Target, contributions: Iterable[Contribution]
) -> Plan:
    """The plan to use: `planned`, or the plan that failed, with stand-ins.

    The one with stand-ins must keep more of the step that starts from `target`. It must also end
    that step no later, or spare it the wait for states."""
    parts = tuple(contributions)
    replay = replay_of(planned, target, parts)
    if replay is None or snapshot.present is None:
        return planned
    swarm = _Swarm(snapshot)
    mended = swarm.mended(snapshot.present)
    other = replay_of(mended, target, parts) if mended is not None else None
    if mended is None or other is None or other.kept_forwards <= replay.kept_forwards:
        return planned
    if swarm.moves_state(planned):
        return mended
    is_later = swarm.remaining_ns(mended, other) > swarm.remaining_ns(planned, replay)
    return planned if is_later else mended


class _Swarm:
    """Which peers are left, with which states, and how fast they are. Links do not matter here, and
    tables of all links among a thousand peers would cost each peer seconds."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.workload = snapshot.workload
        self.records = snapshot.records
        self.able = {r.peer_id: r.device for r in self.records if r.intent is Intent.TRAIN}
        self.is_genesis = snapshot.step == 0
        self.held = snapshot.states()

    # the plan -----------------------------------------------------------------------------------

    def mended(self, plan: Plan) -> Plan | None:
        """The plan with stand-ins; None where nobody can or need stand in.

        Whole pipelines stay. Broken ones that can be filled stay too, tried in plan order. In all
        other pipelines nobody has a place.
        """
        if not plan.covers(self.workload.layer_count, self.workload.microbatch_count):
            return None
        stands = [pipeline for pipeline in plan.pipelines if self._is_whole(pipeline)]
        kept = {pipeline.first_microbatch: pipeline.stages for pipeline in stands}
        for pipeline in plan.pipelines:
            if pipeline not in stands:
                filled = self._filled(pipeline, [s for stages in kept.values() for s in stages])
                if filled is not None:
                    kept[pipeline.first_microbatch] = filled
        pipelines = [stages for _, stages in sorted(kept.items())]
        if not any(stage.stands_in for stages in pipelines for stage in stages):
            return None
        return self._dealt(pipelines, plan)

    def _is_whole(self, pipeline: Pipeline) -> bool:
        return all(self._stays(stage) and not stage.stands_in for stage in pipeline.stages)

    def _stays(self, stage: Stage) -> bool:
        """Whether its peer is there, may train, and has the states."""
        return stage.peer_id in self.able and self._has(stage.peer_id, stage.layers)

    def _has(self, peer_id: str, layers: range) -> bool:
        return self.held.get(peer_id, set()).issuperset(layers)

    def _filled(self, pipeline: Pipeline, others: Sequence[Stage]) -> Stages | None:
        """The pipeline's stages with stand-ins in lost places. None where a place stays empty, or
        where only stand-ins would be left, who have nothing to go on with."""
        filled: list[Stage] = []
        for stage in pipeline.stages:
            if self._stays(stage) and not stage.stands_in:
                filled.append(stage)
                continue
            found = self._replica(stage, [*others, *filled])
            if found is None:
                return None
            filled.append(msgspec.structs.replace(stage, peer_id=found, stands_in=True))
        return tuple(filled) if not all(stage.stands_in for stage in filled) else None

    def _replica(self, stage: Stage, others: Sequence[Stage]) -> str | None:
        """The peer that stands in: the one that already does if it still can, else the fastest."""
        places = [other.peer_id for other in others]
        able = [
            other.peer_id
            for other in others
            if other.layers == stage.layers
            and not other.stands_in
            and places.count(other.peer_id) < PLACES_LIMIT
        ]
        if stage.stands_in and stage.peer_id in able:
            return stage.peer_id
        return min(
            able, key=lambda peer: (self._microbatch_ns(peer, stage.layers), peer), default=None
        )

    def _dealt(self, pipelines: Sequence[Stages], before: Plan) -> Plan | None:
        """The plan with microbatches dealt one by one, each to the pipeline whose busiest peer is
        then least busy."""
        counts = [0] * len(pipelines)
        busy_ns: dict[str, int] = {}
        each_ns = [
            {stage.peer_id: self._microbatch_ns(stage.peer_id, stage.layers) for stage in stages}
            for stages in pipelines
        ]

        def give(number: int) -> None:
            counts[number] += 1
            for peer_id, ns in each_ns[number].items():
                busy_ns[peer_id] = busy_ns.get(peer_id, 0) + ns

        def then_ns(number: int) -> int:
            return max(busy_ns.get(peer_id, 0) + ns for peer_id, ns in each_ns[number].items())

        total = sum(pipeline.microbatch_count for pipeline in before.pipelines)
        for number in range(len(pipelines)):
            give(number)
        for _ in range(total - len(pipelines)):
            give(min(range(len(pipelines)), key=lambda n: (then_ns(n), counts[n], n)))
        firsts = [0, *accumulate(counts)]
        members = {record.peer_id for record in self.records}
        plan = Plan(
            tuple(
                Pipeline(stages, first, count)
                for stages, first, count in zip(pipelines, firsts, counts, strict=False)
            ),
            tuple(sorted(members - {s.peer_id for stages in pipelines for s in stages})),
            min(LONGEST_STEP_NS, max(before.predicted_step_ns, *busy_ns.values())),
        )
        check_plan(plan, self.workload.layer_count, total, members)
        return plan

    # the step -----------------------------------------------------------------------------------

    def moves_state(self, plan: Plan) -> bool:
        """Whether somebody must fetch layers before the step goes on."""
        holders = plan.stage_holders()
        missing = (peer for peer in holders if not self._has(peer, plan.layers_of(peer)))
        return not self.is_genesis and any(missing)

    def remaining_ns(self, plan: Plan, replay: PartialReplay) -> int:
        """Nanoseconds until the busiest peer has computed its part of the step."""
        return max(self._busy_ns(plan, replay, peer_id) for peer_id in plan.stage_holders())

    def _busy_ns(self, plan: Plan, replay: PartialReplay, peer_id: str) -> int:
        mine = replay.stage(plan, peer_id)
        assert mine is not None
        forward_ns, backward_ns = self._times_ns(peer_id, plan.layers_of(peer_id))
        left = len(mine.microbatches) - mine.forwards, len(mine.microbatches) - mine.backwards
        return left[0] * forward_ns + left[1] * backward_ns

    def _microbatch_ns(self, peer_id: str, layers: range) -> int:
        return sum(self._times_ns(peer_id, layers))

    def _times_ns(self, peer_id: str, layers: range) -> tuple[int, int]:
        """Nanoseconds of one microbatch's forward, and of its backward."""
        times = layer_ns_of(self.able[peer_id], self.workload)
        kinds = kinds_in(layers.start, layers.stop, self.workload.layer_count)
        return times.forward_ns(kinds), times.backward_ns(kinds)
