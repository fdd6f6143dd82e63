"""Steps of plans that are asked for by name: ours, the paper's, region order, random, DT-FM's."""

from dataclasses import dataclass, replace
from enum import StrEnum

from p2p_dtfm.core.planner.planner import compute_plan
from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.core.protocol.plan import NoPlan, Plan
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.core.protocol.workload import Workload
from p2p_dtfm.sim.paper.cost import PaperSizes
from p2p_dtfm.sim.paper.named_plans import (
    default_stages,
    dtfm_order,
    grid_plan,
    paper_order,
    random_orders,
    region_order,
    within_memory,
)
from p2p_dtfm.sim.paper.scenario_problem import sizes_of
from p2p_dtfm.sim.scenario.execution import Execution
from p2p_dtfm.sim.scenario.scenario import Scenario
from p2p_dtfm.sim.scenario.scenario_snapshot import on_the_wire, scenario_snapshot, workload_in
from p2p_dtfm.sim.step_time.simulator import simulate_step
from p2p_dtfm.sim.step_time.timeline import StepTime


class PlanName(StrEnum):
    OURS = "ours"
    PAPER = "paper"
    REGION = "region"
    RANDOM = "random"
    DTFM = "dtfm"


@dataclass(frozen=True, slots=True)
class StepQuestion:
    """What is to be simulated."""

    scenario: Scenario
    spec: RunSpec
    workload: Workload
    execution: Execution
    stages: int
    """The stages of a pipeline, in all plans but ours."""
    seed: int = 0


@dataclass(frozen=True, slots=True)
class NamedStep:
    """The middle one of the steps that a name stands for. Random orders give three steps."""

    plan: Plan
    step: StepTime
    all_ns: tuple[int, ...]


def question_of(
    scenario: Scenario, spec: RunSpec, execution: Execution, stages: int | None = None
) -> StepQuestion:
    """A question with as many stages as asked for, or as the peers make."""
    workload = workload_in(scenario, spec, execution)
    depth = stages or default_stages(len(scenario.peers), workload.block_count)
    return StepQuestion(scenario, spec, workload, execution, depth)


def recomputing(how: Execution, wanted: bool | None, spec: RunSpec, plan: PlanName) -> Execution:
    """The execution with recomputation as wanted, else as the run says. Only our planner finds out
    where it pays."""
    if wanted is None and how.recompute is None and plan is not PlanName.OURS:
        wanted = spec.compute.recompute != "never"
    return how if wanted is None else replace(how, recompute=wanted)


def named_step(question: StepQuestion, name: PlanName, trace: bool = False) -> NamedStep:
    """Simulate a plan by name. Raises `UserError` where the peers, their memory or the batch do not
    allow it."""
    plans = _plans(question, name)
    steps = [
        simulate_step(plan, question.scenario, question.workload, question.execution, trace=trace)
        for plan in plans
    ]
    order = sorted(range(len(steps)), key=lambda number: steps[number].total_ns)
    middle = order[len(order) // 2]
    return NamedStep(plans[middle], steps[middle], tuple(step.total_ns for step in steps))


def _plans(question: StepQuestion, name: PlanName) -> list[Plan]:
    """The plan of that name; for random orders, all three."""
    scenario, workload = question.scenario, question.workload
    if name is PlanName.OURS:
        plan = compute_plan(scenario_snapshot(scenario, question.spec, question.execution))
        if isinstance(plan, NoPlan):
            raise UserError(
                f"no plan for {scenario.name}: {plan.reason}",
                ("add peers or memory to the scenario", "choose a smaller model (--layers)"),
            )
        return [plan]
    if name is PlanName.RANDOM:
        orders = random_orders(scenario, question.seed)
    elif name is PlanName.PAPER:
        orders = [paper_order(scenario, question.stages, _sizes(question))]
    elif name is PlanName.DTFM:
        orders = [dtfm_order(scenario, question.stages, _sizes(question))]
    else:
        orders = [region_order(scenario)]
    plans = [grid_plan(order, workload, question.stages) for order in orders]
    if question.execution.communicator is not None:
        return plans
    return [within_memory(plan, scenario, workload) for plan in plans]


def _sizes(question: StepQuestion) -> PaperSizes:
    """The sizes that the paper's cost counts for this run."""
    return sizes_of(question.spec.name, on_the_wire(question.workload, question.execution))
