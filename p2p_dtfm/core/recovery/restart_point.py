"""What the next view starts from: roll the last step forward, or discard and repeat it.

A pure function of the gathered contributions, so that every member comes to the same target.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from p2p_dtfm.core.commit.step import StepTransaction
from p2p_dtfm.core.commit.step_terms import StepTerms
from p2p_dtfm.core.messages.agreement_messages import Contribution
from p2p_dtfm.core.messages.prepared import Statement, StepOutcome
from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.core.protocol.lineage import GENESIS_LINEAGE, extend
from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.protocol.signed import Signed
from p2p_dtfm.core.protocol.snapshot import Member, ViewId
from p2p_dtfm.core.recovery.contradictions import stated

StepKey = tuple[ViewId, int, str]
"""A step by its view, its number, and the lineage digest that it starts from."""


@dataclass(frozen=True, order=True)
class Target:
    """A lineage, by length and digest."""

    step: int
    lineage: str


Complete = dict[Target, tuple[StepKey, StepOutcome]]
"""Steps that can be made again with the reduced gradients alone, by where they lead."""


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


def recover(
    contributions: Iterable[Contribution], layer_count: int, terms: StepTerms | None = None
) -> Recovery:
    """The longest lineage that for every layer some contributor holds or can reach.

    A lineage that ends more than one step before what members had committed is taken at once where
    it is that of a cut: the view before has said how much it may repeat. Else it is taken only
    where a contributor accepts the loss; checkpoints and the initial parameters count only then.
    Steps past the end of the run are nobody's.
    """
    parts = sorted(contributions, key=lambda part: part.member)
    complete = _complete_steps(parts, terms)
    accepts_loss = any(part.accepts_loss for part in parts)
    members = [part for part in parts if part.present is not None]
    limit = terms.total_steps + 1 if terms is not None else None
    steps = [p.step for p in members or parts if limit is None or p.step <= limit]
    floor = max(steps, default=0) - 1
    candidates = _candidates(parts, complete)
    cuts = {Target(item.version, item.lineage) for part in parts for item in part.cuts}
    if accepts_loss:
        floor = 0
        candidates |= {Target(item.version, item.lineage) for p in parts for item in p.saved}
    if floor <= 0:
        candidates.add(Target(0, GENESIS_LINEAGE))
    best_missing: tuple[int, ...] | None = None

    def rank(target: Target) -> tuple[bool, int, int, str]:
        is_possible = limit is None or target.step <= limit
        standing = sum(1 for part in members if _stands_on(part, target, complete))
        return is_possible, target.step, standing, target.lineage

    for target in sorted(candidates | cuts, key=rank, reverse=True):
        if target.step < floor and target not in cuts:
            continue
        held = {p.member: _reach(p, target, complete, accepts_loss) for p in parts}
        there = {layer for layers in held.values() for layer in layers}
        missing = tuple(layer for layer in range(layer_count) if layer not in there)
        if not missing or target == Target(0, GENESIS_LINEAGE):
            key, outcome = complete.get(target, (None, None))
            return Recovery(target, key, outcome, held)
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
    complete: Complete,
    saved_too: bool,
) -> tuple[int, ...]:
    key, _ = complete.get(target, (None, None))
    layers = {
        layer
        for layer, version in part.held.items()
        if (version == target.step and part.lineages.get(version) == target.lineage)
        or (key is not None and can_roll(part, layer, key))
    }
    for item in (*part.cuts, *(part.saved if saved_too else ())):
        if (item.version, item.lineage) == (target.step, target.lineage):
            layers |= set(item.layers)
    return tuple(sorted(layers))


def _candidates(parts: list[Contribution], complete: Complete) -> set[Target]:
    found = set(complete)
    for part in parts:
        found |= {Target(version, lineage) for version, lineage in part.lineages.items()}
    return found


def _stands_on(part: Contribution, target: Target, complete: Complete) -> bool:
    """Whether a member's own lineage comes to the target, or can."""
    if part.lineages.get(target.step) == target.lineage:
        return True
    key, _ = complete.get(target, (None, None))
    return key is not None and part.lineages.get(key[1]) == key[2]


def _complete_steps(parts: list[Contribution], terms: StepTerms | None) -> Complete:
    """Every step whose outcome is known, or follows from all Prepared together.

    What follows from Prepared needs no word; else what most say of an outcome counts.
    """
    told: dict[StepKey, list[StepOutcome]] = {}
    gathered: dict[StepKey, tuple[Plan, list[dict[str, int]], dict[Signed, None]]] = {}
    for part in parts:
        retained, pending, present = part.retained, part.pending, part.present
        if retained is not None and retained.outcome is not None:
            key = (retained.view, retained.step, retained.base)
            told.setdefault(key, []).append(retained.outcome)
        if pending is None or present is None or present.plan is None:
            continue
        key = (present.view, pending.step, pending.base)
        _, counts, said = gathered.setdefault(key, (present.plan, [], {}))
        counts.append(pending.counts)
        said |= dict.fromkeys(pending.prepared)
    complete: Complete = {}
    for key, (plan, counts, said) in gathered.items():
        most = max(counts, key=lambda it: (counts.count(it), sorted(it.items())))
        outcome = _outcome(key, plan, said, terms, most)
        if outcome is not None:
            complete[_target(key, outcome)] = (key, outcome)
            told.pop(key, None)
    for key, outcomes in told.items():
        digests = [outcome.digest for outcome in outcomes]
        outcome = max(outcomes, key=lambda it: (digests.count(it.digest), it.digest))
        complete[_target(key, outcome)] = (key, outcome)
    return complete


def _target(key: StepKey, outcome: StepOutcome) -> Target:
    view, step, base = key
    return Target(step + 1, extend(base, step, view, outcome.digest))


def _outcome(
    key: StepKey,
    plan: Plan,
    said: Iterable[Signed],
    terms: StepTerms | None,
    counts: dict[str, int],
) -> StepOutcome | None:
    """None while a stage-holder's Prepared is missing, or what they say cannot be true."""
    view, step, _ = key
    transaction = StepTransaction(view, step, plan, terms, counts or None)
    try:
        for signed in said:
            item = stated(signed)
            if (item.view, item.step) == (view, step):
                transaction.record(Statement(item, signed))
    except PeerFault:
        return None
    return transaction.outcome()
