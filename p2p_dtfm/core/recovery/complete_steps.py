"""Steps that can be made again from the reduced gradients alone, by what contributions show.

An outcome that follows from the Prepared of all stage-holders needs nobody's word. One that is only
told counts if most members tell it, or where nobody could show it.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from p2p_dtfm.core.commit.judgement import fault_of
from p2p_dtfm.core.commit.step import StepTransaction, mean_loss
from p2p_dtfm.core.commit.step_terms import StepTerms, has_head
from p2p_dtfm.core.messages.agreement_messages import RETAINED_LIMIT, Contribution
from p2p_dtfm.core.messages.prepared import Prepared, Statement, StepOutcome
from p2p_dtfm.core.protocol.lineage import extend
from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.protocol.signed import Signed
from p2p_dtfm.core.protocol.snapshot import ViewId
from p2p_dtfm.core.recovery.believed_claims import said_in
from p2p_dtfm.core.recovery.contradictions import stated
from p2p_dtfm.core.schedule.sums_in_order import added_up

ROUNDING = 1e-6
"""Relative error allowed in a sum of norms. The comparison decides nothing if nobody lies."""
OUTCOMES_KEPT = 32
"""Callers try out one after another which peer may go; the outcome is mostly the same."""
StepKey = tuple[ViewId, int, str]
"""A step by its view, its number, and the lineage digest that it starts from."""


@dataclass(frozen=True, order=True)
class Target:
    """A lineage, by length and digest."""

    step: int
    lineage: str


@dataclass(frozen=True)
class CompleteStep:
    """A step whose outcome is known. `prepared` holds those of all stage-holders; it is empty where
    the outcome is only told."""

    key: StepKey
    outcome: StepOutcome
    prepared: tuple[Signed, ...] = ()


Complete = dict[Target, CompleteStep]
"""Complete steps by the lineage to which they lead."""


def complete_steps(
    parts: list[Contribution], terms: StepTerms | None, needs_proof: bool = True
) -> Complete:
    """The steps whose outcome is shown or told. A step's Prepared count whoever passes them on.

    Without them the outcome that is told most often counts, if more than half of the members tell
    it or nobody could have shown it. `needs_proof`: where members could have shown it, they must.
    """
    plans = {p.present.view: p.present.plan for p in parts if p.present and p.present.plan}
    members = sum(1 for part in parts if part.present is not None)
    told, counts, said = _told(parts), _counts(parts), _said(parts)
    complete: Complete = {}
    for key in sorted({*told, *counts}):
        plan, outcomes, of_step = plans.get(key[0]), told.get(key, []), said.get(key, {})
        if plan is not None:
            shown = [*_shown_by_one(parts, key), tuple(of_step)]
            found = _shown(key, plan, shown, terms, _most(counts.get(key, [{}])))
            if found is not None:
                complete[_target(found)] = found
                continue
        if not outcomes:
            continue
        digests = [outcome.digest for outcome in outcomes]
        outcome = max(outcomes, key=lambda it: (digests.count(it.digest), it.digest))
        is_small = plan is not None and len(plan.stage_holders()) <= RETAINED_LIMIT
        can_be_shown = needs_proof and is_small
        is_most = 2 * digests.count(outcome.digest) > members
        if is_most or (not can_be_shown and _fits(outcome, of_step, plan)):
            found = CompleteStep(key, outcome)
            complete[_target(found)] = found
    return complete


def _told(parts: Iterable[Contribution]) -> dict[StepKey, list[StepOutcome]]:
    told: dict[StepKey, list[StepOutcome]] = {}
    for part in parts:
        retained = part.retained
        if retained is not None and retained.outcome is not None:
            key = (retained.view, retained.step, retained.base)
            told.setdefault(key, []).append(retained.outcome)
    return told


def _counts(parts: Iterable[Contribution]) -> dict[StepKey, list[dict[str, int]]]:
    counts: dict[StepKey, list[dict[str, int]]] = {}
    for part in parts:
        pending, present = part.pending, part.present
        if pending is not None and present is not None:
            key = (present.view, pending.step, pending.base)
            counts.setdefault(key, []).append(pending.counts)
    return counts


def _said(parts: Iterable[Contribution]) -> dict[StepKey, dict[Signed, None]]:
    said: dict[StepKey, dict[Signed, None]] = {}
    for signed in said_in(parts):
        prepared = stated(signed)
        said.setdefault((prepared.view, prepared.step, prepared.base), {})[signed] = None
    return said


def _shown_by_one(parts: Iterable[Contribution], key: StepKey) -> list[tuple[Signed, ...]]:
    """The sets of Prepared by which members have committed the step. If a peer has said two, the
    one counts by which some member has committed."""
    retained = (part.retained for part in parts)
    return [it.prepared for it in retained if it and (it.view, it.step, it.base) == key]


def _shown(
    key: StepKey,
    plan: Plan,
    sets: list[tuple[Signed, ...]],
    terms: StepTerms | None,
    counts: dict[str, int],
) -> CompleteStep | None:
    """The outcome to which most complete sets come. The last set holds all Prepared known."""
    weights: Counter[str] = Counter()
    found: dict[str, CompleteStep] = {}
    for prepared, count in Counter(sets).items():
        step = _outcome(key, plan, prepared, terms, tuple(counts.items()))
        if step is not None:
            weights[step.outcome.digest] += count
            found[step.outcome.digest] = step
    return found[max(found, key=lambda it: (weights[it], it))] if found else None


def _fits(outcome: StepOutcome, said: Iterable[Signed], plan: Plan | None) -> bool:
    """Whether an outcome that is only told fits the Prepared that are known of its step."""
    known = [stated(signed) for signed in said]
    norms = {number: norm for item in known for number, norm in item.squared_norms.items()}
    tokens = {item.peer_id: item.token_count for item in known}
    norm = outcome.gradient_norm  # of a great one `norm**2` raises; the product is infinite
    return (
        norm * norm >= sum(norms.values()) * (1 - ROUNDING)
        and outcome.token_count >= sum(tokens.values())
        and all(outcome.take_over in (None, item.ready_for) for item in known)
        and all(outcome.kept <= item.kept for item in known)
        and (plan is None or _says_what_is_known(outcome, known, norms, plan))
    )


def _says_what_is_known(
    outcome: StepOutcome, known: Sequence[Prepared], norms: Mapping[int, float], plan: Plan
) -> bool:
    """Whether an outcome has the norm and the losses that others have signed, where these are all
    that count. Else one that keeps its own Prepared back, and has all agree anew, would say by what
    all clip their updates."""
    segments = range(len(plan.segments()))
    if norms.keys() >= set(segments):
        squared = added_up(norms[number] for number in segments)
        if not (squared >= 0.0 and outcome.gradient_norm == math.sqrt(squared)):
            return False  # among what is known may be what was refused
    by_peer = {item.peer_id: item for item in known}
    heads = [peer_id for peer_id in plan.stage_holders() if has_head(plan, peer_id)]
    if not by_peer.keys() >= set(heads):
        return True
    said = [by_peer[peer_id] for peer_id in heads]
    loss = mean_loss((it.loss_sum for it in said), sum(it.token_count for it in said))
    held_out_tokens = sum(it.held_out_token_count for it in said)
    held_out = mean_loss((it.held_out_loss_sum for it in said), held_out_tokens)
    return (outcome.loss, outcome.held_out_loss) == (loss, held_out)


def _most(counts: list[dict[str, int]]) -> dict[str, int]:
    """The counts that are told most often; among equally frequent ones the greatest."""
    items = [tuple(sorted(it.items())) for it in counts]
    often = Counter(items)
    return counts[items.index(max(often, key=lambda it: (often[it], it)))]


def _target(found: CompleteStep) -> Target:
    view, step, base = found.key
    return Target(step + 1, extend(base, step, view, found.outcome.digest))


@lru_cache(maxsize=OUTCOMES_KEPT)
def _outcome(
    key: StepKey,
    plan: Plan,
    said: tuple[Signed, ...],
    terms: StepTerms | None,
    told_counts: tuple[tuple[str, int], ...],
) -> CompleteStep | None:
    """The step with its outcome. None while a stage-holder's Prepared is missing, where a peer has
    said two, and where the Prepared cannot be true together. A Prepared that cannot be true by
    itself is ignored."""
    (view, step, base), counts = key, dict(told_counts) or None
    possible: dict[str, Statement] = {}
    for signed in said:
        prepared, peer_id = stated(signed), signed.peer_id
        if (prepared.view, prepared.step, prepared.base) != (view, step, base):
            return None
        if peer_id not in plan.stage_holders() or fault_of(prepared, plan, terms, counts):
            continue
        if (
            possible.setdefault(peer_id, Statement(prepared, signed)).signed.payload
            != signed.payload
        ):
            return None
    transaction = StepTransaction(view, step, plan, terms, counts)
    for statement in possible.values():
        transaction.record(statement)
    outcome = transaction.outcome()
    return CompleteStep(key, outcome, transaction.signed) if outcome is not None else None
