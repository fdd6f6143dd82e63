"""Plans for simulated peers, drawn from what was gathered. They are no better than others, but all
peers draw the same one."""

import msgspec

from p2p_dtfm.core.protocol.canonical import digest
from p2p_dtfm.core.protocol.plan import NoPlan, Pipeline, Plan, Stage
from p2p_dtfm.core.protocol.prng import Prng, prng_of_digest
from p2p_dtfm.core.protocol.records import Intent
from p2p_dtfm.core.protocol.snapshot import Snapshot

_STEPS_NS = (1_000_000_000, 4_000_000_000, 100_000_000_000, 100_000_000_000)
"""Predicted step times, over links that nobody has measured. Where the time is short, guardians
lag."""


def any_plan(snapshot: Snapshot) -> Plan | NoPlan:
    """The plan before, mended; or one in which far more state moves than under a good plan."""
    names = [r.peer_id for r in snapshot.records if r.intent is Intent.TRAIN]
    workload = snapshot.workload
    if len(names) < workload.min_members:
        return NoPlan(f"{len(names)} members, {workload.min_members} are asked for")
    chance = prng_of_digest(snapshot.knowledge)
    pipelines: list[tuple[Stage, ...]] = []
    if snapshot.present is not None and chance.below(2):
        pipelines = _mended(snapshot.present.vacated(), names)
    if not pipelines:
        pipelines = _drawn(names, workload.layer_count, workload.microbatch_count, chance)
    placed = {stage.peer_id for stages in pipelines for stage in stages}
    spares = tuple(sorted({record.peer_id for record in snapshot.records} - placed))
    is_provisional = not snapshot.planned and snapshot.present is not None and chance.below(3) == 0
    step_ns = _STEPS_NS[prng_of_digest(digest(("step", snapshot.knowledge))).below(len(_STEPS_NS))]
    return Plan(_dealt(pipelines, workload.microbatch_count), spares, step_ns, is_provisional)


def _mended(plan: Plan, names: list[str]) -> list[tuple[Stage, ...]]:
    """Let others take the places of peers that are gone, and close a pipeline with a gap."""
    holders = plan.stage_holders()
    free = [name for name in names if name not in holders]
    mended = []
    for pipeline in plan.pipelines:
        gone = [stage.peer_id for stage in pipeline.stages if stage.peer_id not in names]
        if len(gone) <= len(free):
            mended.append(
                tuple(
                    msgspec.structs.replace(s, peer_id=free.pop(0)) if s.peer_id in gone else s
                    for s in pipeline.stages
                )
            )
    return mended


def _drawn(
    names: list[str], layers: int, microbatches: int, chance: Prng
) -> list[tuple[Stage, ...]]:
    chance.shuffle(names)
    used = names[: max(1, len(names) - chance.below(3))]
    groups: list[list[str]] = []
    while used and len(groups) < microbatches:
        length = min(len(used), 1 + chance.below(layers))
        groups.append(used[:length])
        used = used[length:]
    pipelines = []
    for group in groups:
        cuts = [layers * n // len(group) for n in range(len(group) + 1)]
        pipelines.append(tuple(Stage(p, cuts[n], cuts[n + 1], 1) for n, p in enumerate(group)))
    return pipelines


def _dealt(pipelines: list[tuple[Stage, ...]], microbatches: int) -> tuple[Pipeline, ...]:
    ends = [microbatches * (n + 1) // len(pipelines) for n in range(len(pipelines))]
    firsts = [0, *ends]
    return tuple(
        Pipeline(stages, first, end - first)
        for stages, first, end in zip(pipelines, firsts, ends, strict=False)
    )
