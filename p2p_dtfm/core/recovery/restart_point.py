"""What the next view starts from: roll the last step forward, or discard and repeat it.

A pure function of the gathered contributions, so that every member comes to the same target.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from p2p_dtfm.core.commit.step_terms import StepTerms
from p2p_dtfm.core.messages.agreement_messages import Contribution
from p2p_dtfm.core.messages.prepared import StepOutcome
from p2p_dtfm.core.protocol.lineage import GENESIS_LINEAGE
from p2p_dtfm.core.protocol.signed import Signed
from p2p_dtfm.core.protocol.snapshot import Member
from p2p_dtfm.core.recovery.believed_claims import BelievedClaims
from p2p_dtfm.core.recovery.complete_steps import Complete, StepKey, Target, complete_steps

_GENESIS = Target(0, GENESIS_LINEAGE)


@dataclass(frozen=True)
class Undo:
    """What is to be taken back: all steps after `newest`, because `peers` are barred. Disks keep a
    state less than `every` steps older than `newest`, unless one has failed."""

    peers: tuple[str, ...]
    newest: int
    every: int


@dataclass(frozen=True)
class Recovery:
    """`target` is None where some layer is lost; `lost_layers` says which."""

    target: Target | None
    rolled: StepKey | None = None
    """The step that members roll forward, which leads to the target."""
    outcome: StepOutcome | None = None
    prepared: tuple[Signed, ...] = ()
    """The Prepared from which the outcome follows; none where it was only told."""
    held: Mapping[Member, tuple[int, ...]] = field(default_factory=dict)
    """Layers that a member has at the target, or reaches by rolling forward."""
    lost_layers: tuple[int, ...] = ()
    undo: Undo | None = None
    """What is taken back by going to the target (`going_back`)."""


Copies = dict[tuple[int, str], dict[Member, set[int]]]
"""By version and lineage: of which layers each contributor says it has saved copies."""


def copies_in(parts: Iterable[Contribution]) -> Copies:
    """The saved copies of which contributors tell. They are sorted once for all targets: one member
    may tell of thousands, and each is a target at which all contributors are looked at."""
    found: Copies = {}
    for part in parts:
        for it in (*part.cuts, *part.saved):
            of_all = found.setdefault((it.version, it.lineage), {})
            of_all.setdefault(part.member, set()).update(it.layers)
    return found


def recover(
    contributions: Iterable[Contribution], layer_count: int, terms: StepTerms | None = None
) -> Recovery:
    """The longest lineage of which, for every layer, some contributor has or can reach the state,
    in memory or on its disk.

    A lineage may end more than one step before what members had committed. It is taken at once if
    it is at least as new as a whole cut, since the view before has said how much it may repeat. So
    is a checkpoint on disks that repeats no more than that. Any other one is taken only where most
    members accept the loss; the initial parameters count only then. Steps past the end of the run
    do not count, nor do those that others' words refute (`believed_claims`).

    A peer that alone has committed a step may be unable to show it: there may be no room for all
    Prepared. Where layers would be lost otherwise, its word for the step's outcome is taken; the
    others apply that to their own states.
    """
    parts = sorted(contributions, key=lambda part: part.member)
    claims = BelievedClaims(parts)
    found, floor = _recover(parts, complete_steps(parts, terms), claims, layer_count, terms)
    if found.target is None or found.target.step < floor:
        complete = complete_steps(parts, terms, needs_proof=False)
        other, _ = _recover(parts, complete, claims, layer_count, terms)
        if other.target is not None and other.target.step >= floor:
            return other
    return found


def _recover(
    parts: list[Contribution],
    complete: Complete,
    claims: BelievedClaims,
    layer_count: int,
    terms: StepTerms | None,
) -> tuple[Recovery, int]:
    """The recovery, and the earliest step to which members may go back at once."""
    limit = terms.total_steps + 1 if terms is not None else None
    members, furthest = claims.members or parts, claims.furthest(limit)
    floor = 0 if _accept_loss(members) else furthest - 1
    as_said = _cuts(parts) | _saved_since(parts, furthest - _repeatable_steps(members))
    lost_layers = tuple(range(layer_count))
    newer: Recovery | None = None
    copies = copies_in(parts)
    for target in _targets(parts, complete, claims, limit, floor):
        found = what_it_comes_to(target, parts, complete, layer_count, copies)
        is_whole, at_once = not found.lost_layers, target.step >= floor
        if is_whole and at_once:
            return found, floor
        if is_whole:
            newer = newer or found
        if is_whole and target in as_said:
            return newer or found, floor
        if at_once or target in as_said:
            lost_layers = min(lost_layers, found.lost_layers, key=len)
    return Recovery(None, lost_layers=lost_layers), floor


def _cuts(parts: list[Contribution]) -> set[Target]:
    return {Target(item.version, item.lineage) for part in parts for item in part.cuts}


def _saved_since(parts: list[Contribution], step: int) -> set[Target]:
    saved = (item for part in parts for item in part.saved)
    return {Target(item.version, item.lineage) for item in saved if item.version >= step}


def _repeatable_steps(parts: list[Contribution]) -> int:
    """The highest number such that most members were told that a failure may cost as many steps or
    more."""
    said = sorted((part.may_repeat for part in parts), reverse=True)
    return said[len(said) // 2] if said else 0


def what_it_comes_to(
    target: Target,
    parts: list[Contribution],
    complete: Complete,
    layer_count: int,
    copies: Copies,
) -> Recovery:
    """The recovery that goes to `target`, with the layers of which nobody has the state there.
    `copies`: `copies_in` of the parts."""
    saved = copies.get((target.step, target.lineage), {})
    held = {it.member: _reach(it, target, complete, saved.get(it.member, ())) for it in parts}
    told = complete.get(target)
    if told is not None and not told.prepared:
        held = _without_denied(held, parts, told.key)
    there = {layer for layers in held.values() for layer in layers}
    missing = tuple(layer for layer in range(layer_count) if layer not in there)
    lost = () if target.step == 0 else missing  # in any epoch, initial states are made again
    if told is None:
        return Recovery(target, held=held, lost_layers=lost)
    return Recovery(target, told.key, told.outcome, told.prepared, held, lost)


def _without_denied(
    held: dict[Member, tuple[int, ...]], parts: list[Contribution], key: StepKey
) -> dict[Member, tuple[int, ...]]:
    """`held` without the layers that a stage-holder denies, for a step that is only told.

    A stage-holder that is in the step's view and cannot take the step for its own layers has not
    said Prepared of it. So it does not count if peers without a place there have these layers after
    the step. A stage-holder that has gone further denies nothing, unless on another lineage."""
    here = [part for part in parts if part.present is not None and part.present.view == key[0]]
    plan = next((it.present.plan for it in here if it.present and it.present.plan), None)
    if plan is None:
        return held
    places = {part.member: plan.layers_of(part.member.peer_id) for part in parts}
    denied = {
        layer
        for part in here
        for layer in places[part.member]
        if part.held.get(layer, key[1] + 2) <= key[1] + 1 and layer not in held[part.member]
    }
    return {
        part.member: tuple(
            layer
            for layer in held[part.member]
            if layer not in denied or layer in places[part.member] or can_roll(part, layer, key)
        )
        for part in parts
    }


def _targets(
    parts: list[Contribution],
    complete: Complete,
    claims: BelievedClaims,
    limit: int | None,
    floor: int,
) -> list[Target]:
    """The states from which the next view may start, the best first."""
    told = {Target(version, at) for part in parts for version, at in part.lineages.items()}
    kept = {Target(it.version, it.lineage) for p in parts for it in (*p.cuts, *p.saved)}
    candidates = {t for t in {*complete, *told, *kept} if _is_backed(t, complete, claims)}
    if floor <= 0:
        candidates.add(_GENESIS)

    def rank(target: Target) -> tuple[bool, int, int, str]:
        is_possible = limit is None or target.step <= limit
        standing = sum(1 for part in claims.members if _stands_on(part, target, complete))
        return is_possible, target.step, standing, target.lineage

    return sorted(candidates, key=rank, reverse=True)


def _accept_loss(parts: list[Contribution]) -> bool:
    """Whether most accept the loss. So one that is in haste, or lies, does not cost the others what
    they still wait for."""
    return 2 * sum(1 for part in parts if part.accepts_loss) > len(parts)


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
    saved: Collection[int],
) -> tuple[int, ...]:
    step = complete.get(target)
    layers = {
        layer
        for layer, version in part.held.items()
        if (version == target.step and part.lineages.get(version) == target.lineage)
        or (step is not None and can_roll(part, layer, step.key))
    }
    return tuple(sorted(layers.union(saved)))


def _is_backed(target: Target, complete: Complete, claims: BelievedClaims) -> bool:
    """Whether all Prepared of a step lead to the target, or some member tells of it whom the others
    do not refute. Where steps happen, newcomers' states count only on a member's lineage."""
    step = complete.get(target)
    if step is not None and step.prepared:
        return True
    if not claims.needs_members:
        return True
    told = step.key if step is not None else None
    return any(
        (claims.has_copy(part, target.step, target.lineage) or _stands_on(part, target, complete))
        and claims.may_have(part, target.step, target.lineage, told)
        for part in claims.members
    )


def _stands_on(part: Contribution, target: Target, complete: Complete) -> bool:
    """Whether a member's own lineage comes to the target, or can by one more step."""
    if part.lineages.get(target.step) == target.lineage:
        return True
    step = complete.get(target)
    return step is not None and part.lineages.get(step.key[1]) == step.key[2]
