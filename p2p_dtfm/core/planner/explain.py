"""Why a plan is what it is: each peer's load, and what the best other use of it would cost."""

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from p2p_dtfm.core.audit.believed_speeds import seen_slower
from p2p_dtfm.core.audit.explained_speeds import as_planned
from p2p_dtfm.core.audit.roles import on_probation, without_stage_yet
from p2p_dtfm.core.cost_model.costs import Placement, PlacementCost, StepModel
from p2p_dtfm.core.cost_model.cuts import CutPace
from p2p_dtfm.core.cost_model.guardians import cut_pace, guards_in
from p2p_dtfm.core.cost_model.links.swarm_links import Source, SwarmLinks
from p2p_dtfm.core.cost_model.placement_problem import PlanningProblem
from p2p_dtfm.core.cost_model.unmeasured import held_back
from p2p_dtfm.core.planner.feasibility import too_small
from p2p_dtfm.core.planner.link_sources import link_sources
from p2p_dtfm.core.planner.recomputation import problem_in_force, stage_work_ns
from p2p_dtfm.core.planner.stability import WhyNot, why_not
from p2p_dtfm.core.protocol.facts.in_words import bytes_text, counted, layers_text, rate_text
from p2p_dtfm.core.protocol.plan import Pipeline, Plan, Stage
from p2p_dtfm.core.protocol.records import PeerRecord
from p2p_dtfm.core.protocol.snapshot import Snapshot
from p2p_dtfm.core.protocol.workload import Workload

TRIED_PLACES_LIMIT = 64
"""Other places tried for each peer; beyond that an explanation would take longer than planning."""


MOST_EVENTS = 1_000_000
"""Events of all alternatives together; with more, alternatives are not simulated."""


class Alternative(msgspec.Struct, frozen=True):
    """Another use of a peer. `step_ns` is None where some peer lacks the memory for it."""

    peer_id: str
    what: str
    step_ns: int | None


class PeerExplanation(msgspec.Struct, frozen=True):
    """Why a peer holds what it holds. Bytes are those of the stage's state, of the sums beside it
    and of activations."""

    peer_id: str
    role: str
    compute_ns: int
    """Time of the step's microbatches on this peer."""
    used_bytes: int
    memory_bytes: int
    alternative: Alternative | None


class Explanation(msgspec.Struct, frozen=True):
    """`best_alternative` is the cheapest of all that were tried and rejected."""

    step_ns: int
    compute_ns: int
    reduction_ns: int
    commit_ns: int
    peers: tuple[PeerExplanation, ...]
    best_alternative: Alternative | None
    pipeline_count: int = 1
    cuts: CutPace | None = None
    """Where guardians lag, how often they get copies, and what a failure may cost."""
    links: dict[str, int] = {}
    """How many links that the plan sends over are measured, estimated or guessed."""

    def text(self) -> str:
        """The explanation for people: the step, then each peer, then the best alternative."""
        one = self.pipeline_count == 1
        parts = (
            (self.compute_ns, "until the pipeline is done" if one else "until pipelines are done"),
            (self.reduction_ns, "until guardians have the gradients" if one else "of reduction"),
            (self.commit_ns, "to commit"),
        )
        told = " + ".join(f"{_ms(part_ns)} {what}" for part_ns, what in parts if part_ns)
        lines = [f"predicted step: {_ms(self.step_ns)}" + (f" = {told}" if told else "")]
        if self.cuts is not None:
            lines.append(
                f"guardians lag: copies every {counted(self.cuts.every_steps, 'step')} or more, "
                "by a tenth of the line; a failure may cost up to "
                f"{counted(self.cuts.may_repeat_steps, 'step')} "
                f"({_ms(self.cuts.may_repeat_steps * self.step_ns)})"
            )
        if self.links.keys() & {Source.ESTIMATED, Source.GUESSED}:
            counts = ", ".join(f"{count} {source}" for source, count in self.links.items())
            lines.append(f"links that it sends over: {counts}")
        for peer in self.peers:
            lines.append(f"{peer.peer_id}: {peer.role}")
            if peer.compute_ns:
                share = peer.compute_ns * 100 // max(1, self.step_ns)
                lines.append(
                    f"    computes {_ms(peer.compute_ns)} of the step ({share}%), uses "
                    f"{bytes_text(peer.used_bytes)} of {bytes_text(peer.memory_bytes)}"
                )
            if peer.alternative is not None:
                spare = "the best of them, " if not peer.compute_ns else ""
                lines.append(f"    {spare}{self._compared(peer.alternative)}")
        if self.best_alternative is not None:
            best = self.best_alternative
            lines.append(f"best rejected alternative: {best.peer_id} {self._compared(best)}")
        return "\n".join(lines)

    def _compared(self, alternative: Alternative) -> str:
        if alternative.step_ns is None:
            return f"{alternative.what}: does not fit in memory"
        difference = (alternative.step_ns - self.step_ns) * 1000 // max(1, self.step_ns)
        sign = "+" if difference >= 0 else "-"
        percent = f"{sign}{abs(difference) // 10}.{abs(difference) % 10}%"
        return f"{alternative.what}: {_ms(alternative.step_ns)} ({percent})"


TOLD_PPM = 1_000
"""The least gain that is told, since gains are told in tenths of a percent."""
NO_FASTER = "spare: every place that was tried makes the step no faster"
NO_ROOM = "spare: no place was found that its memory allows"
IN_THE_WAY = {
    WhyNot.LITTLE: "too little to move layers for",
    WhyNot.LINE: "but its line is too slow for the states",
    WhyNot.MOVES: "but the states of others would move for too long",
    WhyNot.UNSEEN: "and may get a place in the next plan",
}
SEEN_SLOWER = "others see it compute more slowly than it says"
MADE_SLOWER = "steps are as late as if it computed more slowly than it says"
NOT_NAMED = (
    "spare: the run leaves its first and last stages to others (privacy.ends), and there is no "
    "place between them"
)


def explain(snapshot: Snapshot, plan: Plan) -> Explanation:
    """Explain `plan`, which was made from `snapshot`."""
    snapshot, slower = _as_planned(snapshot, plan)
    problem = problem_in_force(snapshot, plan)
    model, placement = StepModel(problem), _placement(problem, plan)
    cost, timed = _in_force(model, plan, placement), model.refined
    if cost is not None and model.events(cost) * problem.peer_count <= MOST_EVENTS:
        timed = model.simulated
    told = model.judged(cost) if cost is not None else None
    timing = _timing(snapshot, plan, model, cost, timed, slower)
    links = timing.links
    peers = tuple(
        _explain_peer(snapshot, plan, timing, placement, record) for record in snapshot.records
    )
    alternatives = [peer.alternative for peer in peers if peer.alternative is not None]
    possible = [item for item in alternatives if item.step_ns is not None]
    return Explanation(
        step_ns=timing.plan_ns,
        compute_ns=told.compute_ns if told is not None else 0,
        reduction_ns=told.reduction_ns if told is not None else 0,
        commit_ns=told.commit_ns if told is not None else 0,
        pipeline_count=len(plan.pipelines),
        cuts=cut_pace(snapshot, plan, guards_in(snapshot, plan)),
        peers=peers,
        best_alternative=min(possible, key=lambda item: item.step_ns or 0, default=None),
        links=link_sources(plan, links),
    )


def role_of_holder(snapshot: Snapshot, plan: Plan, peer_id: str) -> str:
    """What a member with a stage does, for next to no work. Among hundreds, it would take seconds
    to find out what the plan would be without it."""
    stage = plan.stage_of(peer_id)
    assert stage is not None, f"{peer_id} has no stage"
    return _role(plan, stage, snapshot.record(peer_id), SwarmLinks(snapshot.records))


def explain_peer(snapshot: Snapshot, plan: Plan, peer_id: str) -> PeerExplanation:
    """The part of `explain` that is about one member, for much less work."""
    snapshot, slower = _as_planned(snapshot, plan)
    problem = problem_in_force(snapshot, plan)
    model, placement = StepModel(problem), _placement(problem, plan)
    cost = _in_force(model, plan, placement)
    timing = _timing(snapshot, plan, model, cost, model.refined, slower)
    return _explain_peer(snapshot, plan, timing, placement, snapshot.record(peer_id))


def spare_in_short(
    snapshot: Snapshot, peer_id: str, step: int, follow_steps: int = 0, total_steps: int = 0
) -> str:
    """Why a member has no stage, as of this step, for next to no work: no place is tried.
    `follow_steps` and `total_steps` are the run's, if they are to be told."""
    if peer_id in held_back(snapshot):
        return "its links to those who train are not measured yet"
    if (until_step := on_probation(snapshot.bars, step).get(peer_id)) is not None:
        return _follows(snapshot, peer_id, until_step, follow_steps, total_steps)
    if short := too_small(snapshot.workload, snapshot.record(peer_id)):
        return short
    why = "the plan is faster without this peer"
    if not snapshot.workload.may_have(peer_id, 0):
        why += " between the stages of those whom the run names"
    return f"{why}: {SEEN_SLOWER}" if peer_id in seen_slower(snapshot) else why


def _follows(
    snapshot: Snapshot, peer_id: str, until_step: int, follow_steps: int, total_steps: int
) -> str:
    why = f"new in a run that audits work, it follows until step {until_step:,}"
    came = [it.step for it in snapshot.bars if it.peer_id == peer_id and it.count == 0]
    if follow_steps and came and until_step > came[0] + follow_steps:
        why += ", for longer as others were barred"
    return f"{why}; the run ends before that" if 0 < total_steps < until_step else why


def _as_planned(snapshot: Snapshot, plan: Plan) -> tuple[Snapshot, dict[str, str]]:
    """The snapshot with the speeds by which the plan was made; and for each peer that is slower in
    it than it says, why."""
    told, seen = as_planned(plan, snapshot, problem_in_force), seen_slower(snapshot)
    return told, {
        taken.peer_id: SEEN_SLOWER if taken.peer_id in seen else MADE_SLOWER
        for taken, said in zip(told.records, snapshot.records, strict=True)
        if taken.device != said.device
    }


def _placement(problem: PlanningProblem, plan: Plan) -> Placement:
    number_of = {peer_id: number for number, peer_id in enumerate(problem.peer_ids)}
    return tuple(
        tuple(number_of[stage.peer_id] for stage in pipeline.stages) for pipeline in plan.pipelines
    )


def _timing(
    snapshot: Snapshot,
    plan: Plan,
    model: StepModel,
    cost: PlacementCost | None,
    timed: Callable[[PlacementCost], PlacementCost],
    slower: dict[str, str],
) -> "_Model":
    plan_ns = plan.predicted_step_ns if cost is None else model.judged(cost).step_ns
    off_ns = 0 if cost is None else plan_ns - timed(cost).step_ns
    return _Model(
        model.problem, model, SwarmLinks(snapshot.records), timed, plan_ns, off_ns, slower
    )


def _in_force(model: StepModel, plan: Plan, placement: Placement) -> PlacementCost | None:
    """The cost of the plan as it is, with its own cuts and microbatches. None where a peer now
    offers less memory than its stage takes, or has two places: the model knows one for a peer."""
    if plan.stand_ins:
        return None
    timed = []
    for peers, pipeline in zip(placement, plan.pipelines, strict=True):
        cuts = (0, *(stage.end_layer for stage in pipeline.stages))
        cost = model.pipelines_in(len(placement)).time_fixed(peers, cuts)
        if cost is None:
            return None
        timed.append(cost)
    counts = tuple(pipeline.microbatch_count for pipeline in plan.pipelines)
    return model.dealt(placement, timed, counts)


@dataclass(frozen=True, slots=True)
class _Model:
    problem: PlanningProblem
    step: StepModel
    links: SwarmLinks
    timed: Callable[[PlacementCost], PlacementCost]
    """Times all alternatives in the same way."""
    plan_ns: int
    """A step of the plan in force; as it was predicted then, where it cannot be timed now."""
    off_ns: int
    """How much too short `timed` makes the plan in force. It is added to alternatives alike."""
    slower: dict[str, str]
    """Why a peer is taken to be slower than it says."""

    def step_ns(self, cost: PlacementCost) -> int:
        return self.timed(cost).step_ns + self.off_ns


def _explain_peer(
    snapshot: Snapshot,
    plan: Plan,
    model: _Model,
    placement: Placement,
    record: PeerRecord,
) -> PeerExplanation:
    problem, stage = model.problem, plan.stage_of(record.peer_id)
    if record.peer_id in problem.idle:
        role, alternative = f"no stage: it is {record.intent.value}", None
    elif stage is None and plan.stand_ins:
        role, alternative = "spare: others stand in for a lost peer until the next plan", None
    elif stage is None and record.peer_id in held_back(snapshot):
        role, alternative = "spare: its links to those who train are not measured yet", None
    elif stage is None and record.peer_id in without_stage_yet(snapshot):
        until_step = on_probation(snapshot.bars, snapshot.step)[record.peer_id]
        role, alternative = f"spare: it is new here, and follows until step {until_step}", None
    elif stage is None:
        role, alternative = _why_spare(snapshot.workload, plan, model, placement, record)
    else:
        role = _role(plan, stage, record, model.links)
        is_mended = bool(plan.stand_ins)  # for a step or two
        alternative = None if is_mended else _without(model, placement, record.peer_id)
    return PeerExplanation(
        peer_id=record.peer_id,
        role=role,
        compute_ns=stage_work_ns(snapshot, plan, record.peer_id, record.device),
        used_bytes=_used_bytes(problem, plan, stage, record) if stage else 0,
        memory_bytes=record.device.memory_bytes,
        alternative=alternative,
    )


def _why_nowhere(workload: Workload, record: PeerRecord) -> str:
    if not workload.may_have(record.peer_id, 0):
        return NOT_NAMED
    short = too_small(workload, record)
    return f"spare: {short}" if short else NO_ROOM


def _why_spare(
    workload: Workload, plan: Plan, model: _Model, placement: Placement, record: PeerRecord
) -> tuple[str, Alternative | None]:
    """Why a peer is a spare; and the best place for it, where there is any."""
    found = _best_insertion(model, placement, record.peer_id)
    if found is None:
        return _why_nowhere(workload, record), None
    what, cost, step_ns = found
    alternative = Alternative(record.peer_id, what, step_ns)
    gain_ppm = (model.plan_ns - step_ns) * 1_000_000 // max(1, step_ns)
    if gain_ppm < TOLD_PPM:
        slower = model.slower.get(record.peer_id)
        return (f"{NO_FASTER}; {slower}" if slower else NO_FASTER), alternative
    gain = f"spare: it would make the swarm {_percent(gain_ppm)} faster"
    if gain_ppm < workload.least_gain_ppm:
        asked = _percent(workload.least_gain_ppm)
        return f"{gain}; this run asks for {asked} of each (limits.least_gain)", alternative
    peer = model.problem.peer_ids.index(record.peer_id)
    why = IN_THE_WAY[why_not(model.step, plan, cost, peer, model.plan_ns, step_ns)]
    return f"{gain}, {why}", alternative


def _percent(ppm: int) -> str:
    return f"{ppm // 10_000}.{ppm // 1000 % 10}%"


def _role(plan: Plan, stage: Stage, record: PeerRecord, links: SwarmLinks) -> str:
    place = plan.place_of(stage.peer_id)
    assert place is not None
    pipeline = plan.pipelines[place[0]]
    text = (
        f"pipeline {place[0] + 1} of {len(plan.pipelines)}, stage {place[1] + 1} of "
        f"{len(pipeline.stages)}: {layers_text(stage.first_layer, stage.end_layer)}, "
        f"{counted(pipeline.microbatch_count, 'microbatch')}, {stage.in_flight} in flight"
    )
    if place[1] + 1 < len(pipeline.stages):
        after = pipeline.stages[place[1] + 1].peer_id
        text += f", sends to {after}{_in_codecs(pipeline, place[1])}{_way(record, after, links)}"
    for number, _ in plan.places_of(stage.peer_id)[1:]:
        text += f"; stands in for a lost peer in pipeline {number + 1} until the next plan"
    return text


def _in_codecs(pipeline: Pipeline, boundary: int) -> str:
    """The codecs of a boundary in words, where the planner has chosen them."""
    if not pipeline.codecs:
        return ""
    activation, gradient = pipeline.codecs[boundary]
    return f" in {activation}, back in {gradient}"


def _way(record: PeerRecord, after: str, links: SwarmLinks) -> str:
    """A link's rate and round trip in words, where known, and whether they are estimated."""
    link = record.link_to(after)
    source = links.source(record.peer_id, after)
    if link is None and source is Source.ESTIMATED:
        link = links.link(record.peer_id, after)
    if link is None:
        return ""
    rate, round_trip = rate_text(link.bytes_per_s), _ms(link.round_trip_ns)
    estimated = ", estimated" if source is Source.ESTIMATED else ""
    return f" ({rate}, {round_trip} there and back{estimated})"


def _used_bytes(problem: PlanningProblem, plan: Plan, stage: Stage, record: PeerRecord) -> int:
    first, end, offered_bytes = stage.first_layer, stage.end_layer, record.device.memory_bytes
    memory = problem.devices.stages.of(record.device.kind, len(plan.pipelines))
    return memory.used_bytes(first, end, stage.in_flight, offered_bytes)


def _without(model: _Model, placement: Placement, peer_id: str) -> Alternative | None:
    """The plan without this peer, or without its whole pipeline. None if nobody is left."""
    peer = model.problem.peer_ids.index(peer_id)
    rest = tuple(tuple(p for p in peers if p != peer) for peers in placement)
    rest = tuple(peers for peers in rest if peers)
    if not rest:
        return None
    what, cost = "left out", model.step.cost(rest)
    others = tuple(peers for peers in placement if peer not in peers)
    if cost is None and others:
        what, cost = "without its whole pipeline", model.step.cost(others)
    return Alternative(peer_id, what, None if cost is None else model.step_ns(cost))


def _best_insertion(
    model: _Model, placement: Placement, peer_id: str
) -> tuple[str, PlacementCost, int] | None:
    """The best place for a spare, with its cost and the time of a step. A place is a pipeline of
    its own, or a stage in one of the pipelines. None where some peer lacks the memory in each."""
    problem = model.problem
    peer = problem.peer_ids.index(peer_id)
    tried = [("as a pipeline of its own", (*placement, (peer,)))]
    for number, peers in enumerate(placement):
        if len(peers) >= problem.layer_count:
            continue
        for position in range(len(peers) + 1):
            longer = (*peers[:position], peer, *peers[position:])
            what = f"as stage {position + 1} of pipeline {number + 1}"
            tried.append((what, (*placement[:number], longer, *placement[number + 1 :])))
    costs = [(what, model.step.cost(candidate)) for what, candidate in tried[:TRIED_PLACES_LIMIT]]
    possible = [(cost, what) for what, cost in costs if cost is not None]
    if not possible:
        return None
    cost, what = min(possible, key=lambda each: each[0].step_ns)
    return what, cost, model.step_ns(cost)


def _ms(duration_ns: int) -> str:
    if duration_ns >= 1_000_000_000:
        return f"{duration_ns // 1_000_000_000}.{duration_ns // 10_000_000 % 100:02d} s"
    return f"{duration_ns // 1_000_000}.{duration_ns // 100_000 % 10} ms"
