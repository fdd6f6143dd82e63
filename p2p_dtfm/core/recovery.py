"""What the next view starts from: roll the last step forward, or discard and repeat it.

A pure function of the gathered contributions, so that every member comes to the same target.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from p2p_dtfm.core.agreement_messages import Contribution
from p2p_dtfm.core.canonical import decode
from p2p_dtfm.core.errors import PeerFault
from p2p_dtfm.core.lineage import GENESIS_LINEAGE, extend
from p2p_dtfm.core.plan import Plan
from p2p_dtfm.core.signed import Signed
from p2p_dtfm.core.snapshot import Member, ViewId
from p2p_dtfm.core.step import Prepared, Statement, StepOutcome, StepTransaction

StepKey = tuple[ViewId, int, str]
"""A step by its view, its number, and the lineage digest that it starts from."""


@dataclass(frozen=True, order=True)
class Target:
    """A lineage, by length and digest."""

    step: int
    lineage: str


@dataclass(frozen=True)
class Recovery:
    """`target` is None where some layer is lost; `lost_layers` says which."""

    target: Target | None
    rolled: StepKey | None = None
    """The step that members roll forward to get from one step before the target to it."""
    outcome: StepOutcome | None = None
    held: Mapping[Member, tuple[int, ...]] = field(default_factory=dict)
    """Layers that a member has at the target, or reaches by rolling forward."""
    lost_layers: tuple[int, ...] = ()


def recover(contributions: Iterable[Contribution], layer_count: int) -> Recovery:
    """The longest lineage that for every layer some contributor holds or can reach.

    A lineage that ends more than one step before what members had committed is taken only where a
    contributor accepts the loss; saved checkpoints and the initial parameters count only then.
    """
    parts = sorted(contributions, key=lambda part: part.member)
    complete = _complete_steps(parts)
    accepts_loss = any(part.accepts_loss for part in parts)
    members = [part for part in parts if part.present is not None]
    floor = max((part.step for part in members or parts), default=0) - 1
    candidates = _candidates(parts, complete)
    if accepts_loss:
        floor = 0
        candidates |= {Target(item.version, item.lineage) for p in parts for item in p.saved}
    if floor <= 0:
        candidates.add(Target(0, GENESIS_LINEAGE))
    best_missing: tuple[int, ...] | None = None
    for target in sorted(candidates, reverse=True):
        if target.step < floor:
            break
        held = {part.member: _reach(part, target, complete, accepts_loss) for part in parts}
        there = {layer for layers in held.values() for layer in layers}
        missing = tuple(layer for layer in range(layer_count) if layer not in there)
        if not missing or target == Target(0, GENESIS_LINEAGE):
            key = _last_step(target, complete)
            return Recovery(target, key, complete[key] if key else None, held)
        if best_missing is None or len(missing) < len(best_missing):
            best_missing = missing
    return Recovery(None, lost_layers=best_missing or tuple(range(layer_count)))


def can_roll(part: Contribution, layer: int, key: StepKey) -> bool:
    """Whether a contributor has the state before a step and the step's reduced gradient."""
    _, step, base = key
    version = part.held.get(layer)
    if version != step or part.lineages.get(step) != base:
        return False
    return layer in _reduced_layers(part, key)


def _reduced_layers(part: Contribution, key: StepKey) -> tuple[int, ...]:
    pending, retained, present = part.pending, part.retained, part.present
    if pending is not None and present is not None:
        of_pending = (present.view, pending.step, pending.base)
        if of_pending == key:
            return pending.reduced_layers
    if retained is not None and (retained.view, retained.step, retained.base) == key:
        return retained.reduced_layers
    return ()


def _reach(
    part: Contribution,
    target: Target,
    complete: dict[StepKey, StepOutcome],
    saved_too: bool,
) -> tuple[int, ...]:
    key = _last_step(target, complete)
    layers = {
        layer
        for layer, version in part.held.items()
        if (version == target.step and part.lineages.get(version) == target.lineage)
        or (key is not None and can_roll(part, layer, key))
    }
    if saved_too:
        for item in part.saved:
            if (item.version, item.lineage) == (target.step, target.lineage):
                layers |= set(item.layers)
    return tuple(sorted(layers))


def _last_step(target: Target, complete: dict[StepKey, StepOutcome]) -> StepKey | None:
    for key in sorted(complete):
        view, step, base = key
        if step + 1 == target.step and extend(base, step, view) == target.lineage:
            return key
    return None


def _candidates(parts: list[Contribution], complete: dict[StepKey, StepOutcome]) -> set[Target]:
    found = {Target(step + 1, extend(base, step, view)) for view, step, base in complete}
    for part in parts:
        found |= {Target(version, lineage) for version, lineage in part.lineages.items()}
    return found


def _complete_steps(parts: list[Contribution]) -> dict[StepKey, StepOutcome]:
    """Every step whose outcome is known, or follows from all Prepared together."""
    complete: dict[StepKey, StepOutcome] = {}
    gathered: dict[StepKey, tuple[Plan, list[Signed]]] = {}
    for part in parts:
        retained, pending, present = part.retained, part.pending, part.present
        if retained is not None and retained.outcome is not None:
            complete[retained.view, retained.step, retained.base] = retained.outcome
        if pending is None or present is None or present.plan is None:
            continue
        key = (present.view, pending.step, pending.base)
        gathered.setdefault(key, (present.plan, []))[1].extend(pending.prepared)
    for key, (plan, prepared) in gathered.items():
        outcome = _outcome(key, plan, prepared)
        if outcome is not None:
            complete.setdefault(key, outcome)
    return complete


def _outcome(key: StepKey, plan: Plan, prepared: list[Signed]) -> StepOutcome | None:
    """None while a stage-holder's Prepared is missing, or two of one peer differ."""
    view, step, _ = key
    transaction = StepTransaction(view, step, plan)
    try:
        for signed in dict.fromkeys(prepared):
            item = decode(signed.payload, Prepared)  # whose signature held when it came
            if (item.view, item.step) == (view, step):
                transaction.record(Statement(item, signed))
    except PeerFault:
        return None
    return transaction.outcome()
