"""Where a step goes at each stage: what it computes, and what it waits for."""

from collections.abc import Iterable
from dataclasses import dataclass, fields

from p2p_dtfm.sim.step_time.timeline import StageTimeline, StepTime

Sent = dict[tuple[int, int, bool, int], int]
"""When a stage had computed, by pipeline, position, whether it is a backward, and microbatch."""


@dataclass(frozen=True, slots=True)
class Parts:
    """Nanoseconds of one stage; together they are the step."""

    computing_ns: float
    others_ns: float
    """Waiting for others: a neighbour that still computes, a replica that has not ended."""
    transfer_ns: float
    """Waiting for a tensor between stages that is computed and on its way."""
    reduction_ns: float
    """Waiting for the sums of gradients, once all who hold the same layers have ended."""
    guarding_ns: float
    commit_ns: float

    @property
    def total_ns(self) -> float:
        return sum(self.values().values())

    def values(self) -> dict[str, float]:
        """The parts by name, without the unit."""
        return {each.name.removesuffix("_ns"): getattr(self, each.name) for each in fields(self)}


@dataclass(frozen=True, slots=True)
class StageShares:
    """The parts of one stage's step."""

    peer: str
    pipeline: int
    position: int
    parts: Parts


def mean_parts(shares: Iterable[StageShares]) -> Parts:
    """The mean over several stages, at least one."""
    rows = [share.parts.values().values() for share in shares]
    return Parts(*(sum(column) / len(rows) for column in zip(*rows, strict=True)))


def stage_shares(step: StepTime) -> list[StageShares]:
    """The shares of a traced step whose tensors were sent on streams, in the order of
    `step.stages`."""
    sent: Sent = {}
    for stage in step.stages:
        assert stage.tasklets is not None, "the step was traced"
        place = stage.work.pipeline, stage.work.position
        for is_backward, microbatch, _, end_ns in stage.tasklets:
            sent.setdefault((*place, is_backward, microbatch), end_ns)  # weights come later
    done_ns = {stage.work.peer: stage.done_ns for stage in step.stages}
    reduced_ns = step.pipelines_done_ns + step.reduction_ns
    found = []
    for stage in step.stages:
        others_ns, transfer_ns = _waits(stage, sent)
        ended_ns, summed_ns = _own_sums(stage, step, done_ns)
        others_ns += ended_ns - stage.done_ns + reduced_ns - summed_ns
        parts = Parts(
            stage.busy_ns,
            others_ns,
            transfer_ns,
            summed_ns - ended_ns,
            step.guarding_ns,
            step.commit_ns,
        )
        work = stage.work
        found.append(StageShares(work.name, work.pipeline, work.position, parts))
    return found


def _waits(stage: StageTimeline, sent: Sent) -> tuple[int, int]:
    """The waits before the last tasklet ends: (for a neighbour that computes, for what is on its
    way)."""
    others_ns = transfer_ns = idle_since_ns = 0
    for is_backward, microbatch, start_ns, end_ns in stage.tasklets or ():
        gap_ns = start_ns - idle_since_ns
        if gap_ns:
            beside = stage.work.position + (1 if is_backward else -1)
            ready_ns = sent.get((stage.work.pipeline, beside, is_backward, microbatch), start_ns)
            waited_ns = min(gap_ns, max(0, ready_ns - idle_since_ns))
            others_ns += waited_ns
            transfer_ns += gap_ns - waited_ns
        idle_since_ns = end_ns
    return others_ns, transfer_ns


def _own_sums(stage: StageTimeline, step: StepTime, done_ns: dict[int, int]) -> tuple[int, int]:
    """(when the last holder of any of its layers has computed, when all of them have their
    sums)."""
    own = [span for span in step.reductions if stage.work.peer in span.holders]
    if not own:
        return stage.done_ns, stage.done_ns
    summed_ns = max(stage.done_ns, *(span.end_ns for span in own))
    ended_ns = max(done_ns[holder] for span in own for holder in span.holders)
    return min(max(stage.done_ns, ended_ns), summed_ns), summed_ns
