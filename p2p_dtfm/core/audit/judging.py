"""Who can compute a work again: its stage's other holders, and whoever else gets that stage's
parameters.

Without those others colluders that are half of a stage's holders come to one thing and the rest to
the other; colluders that are most of them have the honest one left out; and of two holders nobody
knows which one is wrong. So all holders of a layer state, before anybody knows whose work will be
computed again, a digest of the parameters with which the step began. Where these are alike whoever
has bytes of that digest has what the stage began with, whoever gave them: one honest holder is
enough. Then every member of the same arithmetic can judge, and most of all decide. Of a layer with
one holder it is its word: what it makes of them is judged, and not these.
"""

import math
from collections import Counter
from collections.abc import Collection, Mapping
from typing import NamedTuple

from p2p_dtfm.core.audit.boundaries import Due, inputs_are_kept
from p2p_dtfm.core.audit.work import NO_MICROBATCH_LIMIT, computes_alike, has_layers_of
from p2p_dtfm.core.messages.audit_messages import Share
from p2p_dtfm.core.protocol.canonical import digest_bytes, encode
from p2p_dtfm.core.protocol.plan import Plan

FEWEST_JUDGES = 3
"""With the one that is judged: of two nobody knows who is wrong."""
NORMS_LIMIT = 2
"""Works that are computed again in one step because unlike norms are stated of their sums."""
PARAMETERS_BYTES = 32
"""Of a digest; names a blob."""


class Judges(NamedTuple):
    """Of one work."""

    holders: tuple[str, ...]
    """Who has the layers, besides its maker."""
    lent: tuple[str, ...]
    """Who has others, and is lent the parameters: if it has room for them, and gets them."""

    @property
    def all(self) -> tuple[str, ...]:
        return self.holders + self.lent


def judges_of(
    peer_id: str,
    plan: Plan,
    shares: Mapping[str, Share],
    kept_microbatches: int = NO_MICROBATCH_LIMIT,
) -> Judges:
    """`shares`: of all stage-holders."""
    names = {it: share.arithmetic for it, share in shares.items()}
    holders, others = _able(peer_id, plan, names, kept_microbatches)
    return Judges(holders, others if has_agreed_parameters(plan, peer_id, shares) else ())


def _able(
    peer_id: str, plan: Plan, arithmetics: Mapping[str, str], kept_microbatches: int
) -> Judges:
    """`lent`: if all holders state the same parameters."""
    if not inputs_are_kept(plan, peer_id, kept_microbatches):
        return Judges((), ())
    able = [it for it in plan.stage_holders() if computes_alike(it, peer_id, arithmetics)]
    holders = tuple(it for it in able if has_layers_of(it, peer_id, plan))
    return Judges(holders, tuple(it for it in able if it not in holders))


def few_judges(
    plan: Plan,
    arithmetics: Mapping[str, str] | None = None,
    kept_microbatches: int = NO_MICROBATCH_LIMIT,
) -> dict[str, int]:
    """How many others can compute a stage-holder's work again, where they are fewer than two: with
    none its work is not audited, with one nobody knows which of the two is wrong. `arithmetics`: of
    whom it is known; of the others only layers count."""
    known, holders = arithmetics or {}, plan.stage_holders()
    alike = Counter(known[it] for it in holders if it in known)
    unknown = len(holders) - alike.total()
    found = {}
    for peer_id in holders:
        name = known.get(peer_id)
        count = len(holders) - 1 if name is None else alike[name] - 1 + unknown if name else 0
        if count and not inputs_are_kept(plan, peer_id, kept_microbatches):
            count = 0
        if count < 2:
            found[peer_id] = count
    return found


def only_holders(plan: Plan) -> list[str]:
    """Who has a layer that nobody else has: what it says of these parameters is believed."""
    alone = {holder for it in plan.segments() if len(it.holders) == 1 for holder in it.holders}
    return [peer_id for peer_id in plan.stage_holders() if peer_id in alone]


def states_parameters(plan: Plan) -> bool:
    """Whether claims have digests of parameters: where all hold the same layers each of them can
    compute each work again without."""
    return len({plan.layers_of(peer_id) for peer_id in plan.stage_holders()}) > 1


def fault_of_parameters(share: Share, plan: Plan, peer_id: str) -> str:
    """Why no correct peer states these; empty if it may."""
    due = set(plan.layers_of(peer_id)) if states_parameters(plan) else set()
    if set(share.parameters) != due:
        return "a claim by the parameters of other layers than it holds"
    if any(len(digest) != PARAMETERS_BYTES for digest in share.parameters.values()):
        return "a claim with a digest of parameters of another length"
    return ""


def fault_of_norms(share: Share, plan: Plan, peer_id: str, due: Due) -> str:
    """Why no correct peer states these of what was summed; empty if it may. Where all hold the
    same layers all state the norms, and most of them are right."""
    shared = [
        (n, len(it.holders))
        for n, it in enumerate(plan.segments())
        if peer_id in it.holders and len(it.holders) > 1
    ]
    expected = dict(shared) if due.trains and states_parameters(plan) else {}
    if {number: len(norms) for number, norms in share.norms.items()} != expected:
        return "a claim with the norms of other sums than its segments have"
    stated = [norm for norms in share.norms.values() for norm in norms]
    if not all(math.isfinite(norm) and norm >= 0.0 for norm in stated):
        return "a claim with the norm of a sum that has none"
    return ""


def judged_for_norms(
    unlike: Collection[tuple[str, str]], able: Collection[str], seed: str
) -> set[str]:
    """Of those of whose sums others state another norm (`unlike`: by whom) some, as one is enough
    to have whoever lies about many go, and all computed as many works as it liked. Of `able`, whose
    work can be judged: those of whom most say so. Whoever claims last knows the others' claims, so
    by chance alone it could have a colluder chosen that it also says this of. So it still may; but
    who is not chosen is in doubt with no more than each that is, and the liar with all of them."""
    named = Counter(maker for _, maker in unlike if maker in able)
    turn = {it: (-count, digest_bytes(encode([seed, it]))) for it, count in named.items()}
    return set(sorted(named, key=turn.__getitem__)[:NORMS_LIMIT])


def has_agreed_parameters(plan: Plan, peer_id: str, shares: Mapping[str, Share]) -> bool:
    """Whether all holders of each of its layers began the step with the same parameters."""
    return all(_are_agreed(plan, layer, shares) for layer in plan.layers_of(peer_id))


def _are_agreed(plan: Plan, layer: int, shares: Mapping[str, Share]) -> bool:
    stated = {shares[it].parameters.get(layer, b"") for it in plan.holders(layer)}
    return len(stated) == 1 and b"" not in stated
