"""Any scenario's own charts, as bars: how long a step is, where it goes, what would change it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import msgspec

from p2p_dtfm.core.cost_model.placement_problem import problem_of
from p2p_dtfm.core.planner.bound import step_lower_bound_ns
from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.core.protocol.snapshot import Snapshot
from p2p_dtfm.sim.advice.changes import (
    PEERS_LIMIT,
    changes_of,
    faster_devices,
    faster_lines,
    with_codecs,
)
from p2p_dtfm.sim.advice.hiring import planned_hire
from p2p_dtfm.sim.reproduction.bars import Chart, ChartBar, FigureKind
from p2p_dtfm.sim.reproduction.named_steps import PlanName, named_step, question_of, recomputing
from p2p_dtfm.sim.reproduction.price_rows import (
    WORTH_IT,
    has_prices,
    price_bar,
    price_row,
    swarms_by_price,
    worth_row,
)
from p2p_dtfm.sim.scenario.execution import AS_RUN
from p2p_dtfm.sim.scenario.scenario import Scenario
from p2p_dtfm.sim.scenario.scenario_snapshot import workload_in
from p2p_dtfm.sim.scenario.what_if import what_if
from p2p_dtfm.sim.step_time.simulator import simulate_step
from p2p_dtfm.sim.step_time.stage_shares import Parts, StageShares, mean_parts, stage_shares

OTHERS_LIMIT = 128
"""The most peers for which other placements are played, too."""
REPLANNED_LIMIT = 64
"""The most peers for which one more in the largest group is planned anew. It takes half a
minute."""
ROWS_LIMIT = 32
"""The most stages that have a row each. Beyond it, the peers of a group share one."""
OTHER_PLACEMENTS = {
    PlanName.REGION: "region order",
    PlanName.RANDOM: "random order",
    PlanName.PAPER: "optimum of DT-FM's cost",
}
EVERYBODY = "all, on average"

Told = Callable[[str], None]
"""Told what is computed now."""


@dataclass(frozen=True, slots=True)
class SwarmQuestion:
    """A scenario and a run, with the plan that was made of them."""

    scenario: Scenario
    spec: RunSpec
    snapshot: Snapshot
    plan: Plan
    command: str
    """What was typed: the same swarm, run and change."""
    simulated_by: str | None
    """The beginning of the `simulate` command for the same scenario and run; None where there is
    none."""

    def bar(
        self, chart: Chart, system: str, kind: FigureKind, seconds: float, source: str = ""
    ) -> ChartBar:
        return ChartBar(
            chart=chart,
            case=self.scenario.name,
            layers=self.spec.model.layers,
            batch=self.spec.batch.global_batch,
            system=system,
            kind=kind,
            source=source or self.page_command,
            seconds=seconds,
            peers=len(self.scenario.peers),
        )

    @property
    def page_command(self) -> str:
        """The command that prints each bar."""
        return f"{self.command} --html FILE --json"

    def simulated(self, plan: str, stages: int | None = None) -> str:
        """The command that plays that plan for the same scenario and run."""
        if self.simulated_by is None:
            return self.page_command
        depth = "" if stages is None else f" --stages {stages}"
        return f"{self.simulated_by} --plan {plan}{depth}"


@dataclass(frozen=True, slots=True)
class SwarmBars:
    """All charts of a scenario's page, and why any that is missing is missing."""

    bars: list[ChartBar]
    where: dict[str, Parts]
    """The parts of the step, by peer, or by group where there are many peers."""
    notes: list[str]


def swarm_bars(asked: SwarmQuestion, told: Told = lambda what: None) -> SwarmBars:
    """The charts of a scenario's page. Raises `UserError` where a peer's speed or a link is not
    stated."""
    notes: list[str] = []
    told("the step")
    workload = workload_in(asked.scenario, asked.spec, AS_RUN)
    step = simulate_step(asked.plan, asked.scenario, workload, AS_RUN, trace=True)
    where = _by_row(stage_shares(step), asked.scenario)
    bars = [
        asked.bar(
            Chart.STEP, "ours", FigureKind.SIMULATED, step.total_ns / 1e9, asked.simulated("ours")
        ),
        asked.bar(
            Chart.STEP, "ours, predicted", FigureKind.PREDICTED, asked.plan.predicted_step_ns / 1e9
        ),
        *_bounds(asked),
        *_other_placements(asked, notes, told),
        *(
            asked.bar(Chart.PARTS, f"{row}: {name}", FigureKind.SIMULATED, length_ns / 1e9)
            for row, parts in where.items()
            for name, length_ns in parts.values().items()
        ),
        *_changes(asked, step.total_ns, notes, told),
        *_prices(asked, notes, told),
    ]
    return SwarmBars(bars, where, notes)


def _by_row(shares: list[StageShares], scenario: Scenario) -> dict[str, Parts]:
    """The mean first; then each stage in the order of pipelines, or each group of peers."""
    rows = {EVERYBODY: mean_parts(shares)}
    if len(shares) <= ROWS_LIMIT:
        return rows | {share.peer: share.parts for share in shares}
    groups: dict[str, list[StageShares]] = {}
    for share in shares:
        groups.setdefault(scenario.peer(share.peer).group, []).append(share)
    kept = sorted(groups, key=lambda group: -len(groups[group]))[:ROWS_LIMIT]
    return rows | {f"{group} ({len(groups[group])})": mean_parts(groups[group]) for group in kept}


def _bounds(asked: SwarmQuestion) -> Iterator[ChartBar]:
    """Bars that are no plan of these peers: the fastest peer alone, and what no plan can beat."""
    fastest = max(asked.scenario.peers, key=lambda peer: peer.forward_flops or 0)
    if len(asked.scenario.peers) > 1:
        alone = planned_hire(asked.scenario.with_peers((fastest.name,)), asked.spec)
        if alone is not None:
            seconds = alone.plan.predicted_step_ns / 1e9
            yield asked.bar(Chart.STEP, f"{fastest.name} alone", FigureKind.PREDICTED, seconds)
    problem = problem_of(asked.snapshot)
    if not problem.layers.unlike and not asked.snapshot.workload.inner_steps:
        bound_s = step_lower_bound_ns(problem) / 1e9
        yield asked.bar(Chart.STEP, "no plan takes less than", FigureKind.PREDICTED, bound_s)


def _other_placements(asked: SwarmQuestion, notes: list[str], told: Told) -> Iterator[ChartBar]:
    """Bars of other placements, with the depth that the peers make, carried out as ours."""
    if len(asked.scenario.peers) > OTHERS_LIMIT:
        notes.append(f"Other placements are played with up to {OTHERS_LIMIT} peers.")
        return
    for name, words in OTHER_PLACEMENTS.items():
        told(words)
        try:
            step_ns, source = min(_played(asked, name))
        except UserError as error:
            notes.append(f"No {words}: {error.cause}.")
            continue
        yield asked.bar(Chart.STEP, words, FigureKind.SIMULATED, step_ns / 1e9, source)


def _played(asked: SwarmQuestion, name: PlanName) -> list[tuple[int, str]]:
    """(how long the step is, the command that plays it again). If the run leaves recomputation
    open, once with and once without it, as ours has that choice, too. Raises `UserError` where
    neither is possible."""
    is_open = asked.spec.compute.recompute == "auto"
    played, refused = list[tuple[int, str]](), list[UserError]()
    for wanted, option in ((None, ""), (False, " --no-recompute"))[: 2 if is_open else 1]:
        how = recomputing(AS_RUN, wanted, asked.spec, name)
        question = question_of(asked.scenario, asked.spec, how)
        try:
            step = named_step(question, name).step
        except UserError as error:
            refused.append(error)
            continue
        command = asked.simulated(name.value, question.stages)
        played.append((step.total_ns, command + (option if asked.simulated_by else "")))
    if not played:
        raise refused[0]
    return played


def _changes(
    asked: SwarmQuestion, step_ns: int, notes: list[str], told: Told
) -> Iterator[ChartBar]:
    """Bars of changes, planned anew where that takes no more than a minute. Otherwise the same plan
    is played with the change."""
    bar = partial(asked.bar, Chart.CHANGES)
    if len(asked.scenario.peers) > PEERS_LIMIT:
        notes.append(
            f"With more than {PEERS_LIMIT} peers changes are played with the plan as it is. Any "
            f'other: {asked.command} --what-if "+1 GROUP".'
        )
        yield bar("as it is", FigureKind.SIMULATED, step_ns / 1e9)
        yield from _one_more(asked, told)
        for words, scenario, spec in _kept_plan(asked):
            told(words)
            workload = workload_in(scenario, spec, AS_RUN)
            step = simulate_step(_without_codecs(asked.plan), scenario, workload, AS_RUN)
            yield bar(f"{words}, same plan", FigureKind.SIMULATED, step.total_ns / 1e9)
        return
    yield bar("as it is", FigureKind.PREDICTED, asked.plan.predicted_step_ns / 1e9)
    told("what would change it")
    for change in changes_of(asked.scenario, asked.spec):
        if change.step_ns is None:
            notes.append(f"No plan: {change.words}.")
        else:
            yield bar(change.words, FigureKind.PREDICTED, change.step_ns / 1e9)


def _one_more(asked: SwarmQuestion, told: Told) -> Iterator[ChartBar]:
    """The bar of one more peer in the largest group, planned anew, where that does not take too
    long."""
    if len(asked.scenario.peers) > REPLANNED_LIMIT:
        return
    groups = [peer.group for peer in asked.scenario.peers]
    largest = max(dict.fromkeys(groups), key=groups.count)
    told(f"one more peer in {largest}")
    more = planned_hire(what_if(asked.scenario, f"+1 {largest}"), asked.spec)
    if more is not None:
        seconds = more.plan.predicted_step_ns / 1e9
        source = f'{asked.command} --what-if "+1 {largest}"'
        yield asked.bar(
            Chart.CHANGES, f"one more peer in {largest}", FigureKind.PREDICTED, seconds, source
        )


def _kept_plan(asked: SwarmQuestion) -> Iterator[tuple[str, Scenario, RunSpec]]:
    scenario, spec = asked.scenario, asked.spec
    yield "all lines twice as fast", faster_lines(scenario), spec
    if all(peer.forward_flops for peer in scenario.peers):
        yield "all devices twice as fast", faster_devices(scenario), spec
    between: dict[str, object] = {"activations": ("int8",), "gradients": ("int8",)}
    yield "int8 between stages", scenario, with_codecs(spec, between)
    for codec in ("int8", "sparse"):
        if spec.codecs.reduction in ("fp32", "bf16"):
            yield f"{codec} between replicas", scenario, with_codecs(spec, {"reduction": codec})


def _without_codecs(plan: Plan) -> Plan:
    """The plan with each boundary as the run says."""
    pipelines = (msgspec.structs.replace(pipeline, codecs=()) for pipeline in plan.pipelines)
    return msgspec.structs.replace(plan, pipelines=tuple(pipelines))


def _prices(asked: SwarmQuestion, notes: list[str], told: Told) -> Iterator[ChartBar]:
    if not has_prices(asked.scenario):
        return
    if len(asked.scenario.peers) > PEERS_LIMIT:
        notes.append(
            f"With more than {PEERS_LIMIT} peers: {asked.command} --objective cost says whom to "
            "rent."
        )
        return
    for name, swarm in swarms_by_price(asked.scenario):
        told(f"prices: {name}")
        row = price_row(swarm, asked.spec)
        if row is None:
            notes.append(f"No plan of {name}.")
        else:
            yield price_bar(name, row, asked.scenario.name, asked.spec, asked.page_command)
    told(f"prices: {WORTH_IT}")
    row = worth_row(asked.scenario, asked.spec)
    source = f"{asked.command} --objective cost"
    yield price_bar(WORTH_IT, row, asked.scenario.name, asked.spec, source)
