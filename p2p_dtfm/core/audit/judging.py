"""Who can compute a work again: its stage's other holders, and whoever else gets that stage's
parameters.

Holders alone are not enough. Colluders that are half of them come to one thing and the rest to the
other; colluders that are most have the honest one left out. Of two holders nobody knows which one
is wrong.

So all holders of a layer state a digest of the parameters with which the step began. They do so
before anybody knows whose work will be computed again. If the digests are alike, bytes of that
digest are what the stage began with, whoever gave them: one honest holder is enough. Then every
member of the same arithmetic can judge, and most of all decide. For a layer with one holder its
word counts: what it makes of the parameters is judged, and not these.
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
"""The fewest, with the peer that is judged: of two nobody knows who is wrong."""
NORMS_LIMIT = 2
"""Works that are computed again in one step because unlike norms are stated of their sums."""
PARAMETERS_BYTES = 32
"""Length of a digest of parameters, which names a blob."""


class Judges(NamedTuple):
    """Who can judge one work."""

    holders: tuple[str, ...]
    """Peers that have the layers, besides the work's maker."""
    lent: tuple[str, ...]
    """Peers of other layers that are lent the parameters, if they have room, and get them."""

    @property
    def all(self) -> tuple[str, ...]:
        return self.holders + self.lent


def judges_of(
    peer_id: str,
    plan: Plan,
    shares: Mapping[str, Share],
    kept_microbatches: int = NO_MICROBATCH_LIMIT,
) -> Judges:
    """Who can judge the work of `peer_id`. `shares`: of all stage-holders."""
    names = {it: share.arithmetic for it, share in shares.items()}
    holders, others = _able(peer_id, plan, names, kept_microbatches)
    return Judges(holders, others if has_agreed_parameters(plan, peer_id, shares) else ())


def _able(
    peer_id: str, plan: Plan, arithmetics: Mapping[str, str], kept_microbatches: int
) -> Judges:
    """As `judges_of`, if all holders state the same parameters."""
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
    """By stage-holder whose work fewer than two others can compute again: how many can. With none
    its work is not audited; with one nobody knows which of the two is wrong. `arithmetics`: those
    that are known. A peer of unknown arithmetic counts as able to judge all, and to be judged by
    all."""
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
    """Who has a layer that nobody else has: what it says of the layer's parameters is believed."""
    alone = {holder for it in plan.segments() if len(it.holders) == 1 for holder in it.holders}
    return [peer_id for peer_id in plan.stage_holders() if peer_id in alone]


def states_parameters(plan: Plan) -> bool:
    """Whether claims have digests of parameters. Where all hold the same layers they can compute
    each work again without."""
    return len({plan.layers_of(peer_id) for peer_id in plan.stage_holders()}) > 1


def fault_of_parameters(share: Share, plan: Plan, peer_id: str) -> str:
    """Why no correct peer states these parameters; empty if one may."""
    due = set(plan.layers_of(peer_id)) if states_parameters(plan) else set()
    if set(share.parameters) != due:
        return "a claim by the parameters of other layers than it holds"
    if any(len(digest) != PARAMETERS_BYTES for digest in share.parameters.values()):
        return "a claim with a digest of parameters of another length"
    return ""


def fault_of_norms(share: Share, plan: Plan, peer_id: str, due: Due) -> str:
    """Why no correct peer states these norms of what was summed; empty if one may. Where all hold
    the same layers claims have none: all state the norms anyway, and most of them are right."""
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
    """Chooses makers to compute again, where others state another norm of their sums.

    `unlike`: (who states it, maker). `able`: makers whose work can be judged. Only some are chosen:
    one is enough to have a liar about many go, and else it would have all compute as many works as
    it likes. Those come first whom most contradict. If chance alone chose, the last to claim, which
    knows the others' claims, could have a colluder chosen that it contradicts too. It still may.
    But who is not chosen is in doubt with no more peers than each that is, and the liar with all.
    """
    named = Counter(maker for _, maker in unlike if maker in able)
    turn = {it: (-count, digest_bytes(encode([seed, it]))) for it, count in named.items()}
    return set(sorted(named, key=turn.__getitem__)[:NORMS_LIMIT])


def has_agreed_parameters(plan: Plan, peer_id: str, shares: Mapping[str, Share]) -> bool:
    """Whether all holders of each of its layers began the step with the same parameters."""
    return all(_are_agreed(plan, layer, shares) for layer in plan.layers_of(peer_id))


def _are_agreed(plan: Plan, layer: int, shares: Mapping[str, Share]) -> bool:
    stated = {shares[it].parameters.get(layer, b"") for it in plan.holders(layer)}
    return len(stated) == 1 and b"" not in stated
