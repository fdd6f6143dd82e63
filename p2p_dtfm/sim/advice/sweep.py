"""Plans of run specs near a given one, and which of them make computing the bound of a swarm."""

from collections.abc import Iterator
from dataclasses import dataclass

from p2p_dtfm.core.cost_model.codings import boundary_loads
from p2p_dtfm.core.cost_model.tables.layer_tables import layer_ns_of
from p2p_dtfm.core.planner.planner import compute_plan
from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.core.protocol.plan import NoPlan, Plan
from p2p_dtfm.core.protocol.run_spec import RunSpec, parse_run_spec
from p2p_dtfm.core.protocol.snapshot import Snapshot
from p2p_dtfm.sim.advice.choices import Read, SettingsChoice, Values, neighbours, starts
from p2p_dtfm.sim.advice.loss_costs import LossCost, loss_cost
from p2p_dtfm.sim.advice.progress import Progress
from p2p_dtfm.sim.scenario.execution import AS_RUN
from p2p_dtfm.sim.scenario.scenario import Scenario
from p2p_dtfm.sim.scenario.scenario_snapshot import scenario_snapshot

MOST_PLANS = 48
PEERS_PLANNED = 800
"""The most peers of all plans together, beyond the fewest plans: a larger swarm's plan takes
longer."""
FEWEST_PLANS = 8
BOUND_BY_COMPUTING = 0.8
"""The share of all devices' speed from which on a swarm is bound by computing: links then hold up
little."""
WORTH_A_CHANGE = 0.02
"""The part by which another run spec has to be faster to count as better."""


@dataclass(frozen=True, slots=True)
class Weighed:
    """A choice with its plan and what that is predicted to give."""

    choice: SettingsChoice
    plan: Plan
    tokens_per_s: float
    bytes_per_token: float
    """Bytes that all peers together send for a token, in boundaries and reductions."""
    computing: float
    """The used share of the speed that all devices of the swarm have together."""
    loss: LossCost | None

    @property
    def is_bound_by_computing(self) -> bool:
        return self.computing >= BOUND_BY_COMPUTING


@dataclass(frozen=True, slots=True)
class Advice:
    """`before` is the run as it is, or None where the swarm cannot train it."""

    before: Weighed | None
    best: Weighed
    frontier: tuple[Weighed, ...]
    """Choices that none beats in speed with as few bytes and as little loss; the fastest first."""
    plan_count: int


def plans_at_most(peer_count: int) -> int:
    """How many plans a swarm of that size is worth."""
    return max(FEWEST_PLANS, min(MOST_PLANS, PEERS_PLANNED // max(1, peer_count)))


def advise(
    scenario: Scenario,
    values: Values,
    origin: str,
    dimensions: tuple[str, ...],
    progress: Progress = lambda done, most: None,
    read: Read = parse_run_spec,
) -> Advice:
    """Look at what may be changed: from a few starts, and from the best one on, one setting at a
    time.

    Raises `UserError` where nothing helps.
    """
    first, *more = starts(values, origin, dimensions, read)
    most = plans_at_most(len(scenario.peers))
    sweep = _Sweep(scenario, first.spec, origin, most, progress)
    for choice in (first, *more):
        sweep.weigh(choice)
    found = sweep.found
    best = max(found, key=_fast, default=None)
    while best is not None and sweep.left:
        near = neighbours(values, origin, best.choice, dimensions, read)
        weighed = map(sweep.weigh, near)
        rival = max((each for each in weighed if each), key=_fast, default=best)
        if not _gains(rival, best):
            break
        best = rival
    return _judged(scenario, sweep, best)


def _judged(scenario: Scenario, sweep: "_Sweep", best: Weighed | None) -> Advice:
    before, count = sweep.before, len(sweep.seen)
    if best is None:
        raise UserError(
            f"{scenario.name}: no plan for any of {count} ways to run {sweep.origin}",
            "add peers or memory, or train less: p2p-dtfm plan says what is short",
        )
    if before is not None and not _gains(best, before):
        raise UserError(
            f"{scenario.name}: none of {count} changes makes {sweep.origin} faster by 2%",
            f"it uses {before.computing:.0%} of what all devices compute; faster devices or links "
            "would help, or --vary with more settings",
        )
    bound = [each for each in sweep.found if each.is_bound_by_computing]
    chosen = min(bound, key=_cheap) if bound else best
    return Advice(before, chosen, tuple(_frontier(sweep.found)), count)


def _fast(each: Weighed) -> tuple[float, int, float]:
    """A key that puts the fastest last. Of equally fast choices, the one that changes least wins,
    then the one that sends least."""
    return round(each.tokens_per_s, 1), -len(each.choice.settings), -each.bytes_per_token


def _cheap(each: Weighed) -> tuple[bool, float, int, int, float]:
    """A key that puts first the least loss, as far as it is measured. Then come the smallest batch,
    the fewest changes, and the fastest."""
    percent = each.loss.percent if each.loss else 0.0
    batch, changes = each.choice.spec.batch.global_batch, len(each.choice.settings)
    return each.loss is None, percent, batch, changes, -each.tokens_per_s


def _gains(rival: Weighed, than: Weighed) -> bool:
    return rival.tokens_per_s > (1 + WORTH_A_CHANGE) * than.tokens_per_s


def _frontier(found: list[Weighed]) -> Iterator[Weighed]:
    """The choices that no other beats. A loss that is not measured counts as the greatest."""
    kept: list[tuple[float, float]] = []
    for each in sorted(found, key=_fast, reverse=True):
        loss = each.loss.percent if each.loss else float("inf")
        if not any(fewer <= each.bytes_per_token and less <= loss for fewer, less in kept):
            kept.append((each.bytes_per_token, loss))
            yield each


class _Sweep:
    """Plans each choice once, as long as there is work left."""

    def __init__(
        self, scenario: Scenario, original: RunSpec, origin: str, most: int, progress: Progress
    ) -> None:
        self.scenario = scenario
        self.origin = origin
        self.most = most
        self.progress = progress
        self.original = original
        self.seen: dict[str, Weighed | None] = {}
        """What each choice gives, by the digest of its run spec."""

    @property
    def left(self) -> int:
        return self.most - len(self.seen)

    @property
    def found(self) -> list[Weighed]:
        return [each for each in self.seen.values() if each is not None]

    @property
    def before(self) -> Weighed | None:
        return self.seen.get(self.original.digest())

    def weigh(self, choice: SettingsChoice) -> Weighed | None:
        """What a choice gives; None where there is no plan, or no work left for it."""
        digest = choice.spec.digest()
        if digest not in self.seen and self.left:
            self.seen[digest] = self._weighed(choice)
            self.progress(len(self.seen), self.most)
        return self.seen.get(digest)

    def _weighed(self, choice: SettingsChoice) -> Weighed | None:
        spec = choice.spec
        snapshot = scenario_snapshot(self.scenario, spec, AS_RUN)
        plan = compute_plan(snapshot)
        if isinstance(plan, NoPlan):
            return None
        step_s = plan.predicted_step_ns / 1e9
        tokens_per_s = spec.tokens_per_step / step_s
        possible = spec.batch.microbatch * spec.model.context * _microbatches_per_s(snapshot)
        return Weighed(
            choice,
            plan,
            tokens_per_s,
            sent_bytes(snapshot, plan) / spec.tokens_per_step,
            tokens_per_s / possible,
            loss_cost(spec, self.original, len(plan.pipelines)),
        )


def _microbatches_per_s(snapshot: Snapshot) -> float:
    """Microbatches that all devices would compute a second if none waited."""
    blocks = snapshot.workload.block_count
    times = [layer_ns_of(record.device, snapshot.workload) for record in snapshot.records]
    return sum(1e9 / (t.embedding_ns + blocks * t.block_ns + t.head_ns) for t in times)


def sent_bytes(snapshot: Snapshot, plan: Plan) -> int:
    """Bytes that all peers send in a step: activations and their gradients, parts of gradients and
    sums."""
    work = snapshot.workload
    crossed = sum(
        there + back
        for pipeline in plan.pipelines
        for there, back in boundary_loads(work, pipeline)
    )
    reduced = sum(
        2 * (len(segment.holders) - 1) * work.gradient_wire_bytes(work.cost(layer))
        for segment in plan.segments()
        for layer in segment.layers
    )
    return crossed + reduced
