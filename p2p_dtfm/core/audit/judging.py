"""Who can compute a work again: its stage's other holders, and whoever else gets that stage's
parameters.

Without those others fellows that are half of a stage's holders come to one thing and the rest to
the other; fellows that are most of them have the honest one left out; and of two holders nobody
knows which one is wrong. So all holders of a layer state, before anybody knows whose work will be
computed again, a digest of the parameters with which the step began. Where these are alike whoever
has bytes of that digest has what the stage began with, whoever gave them: one honest holder is
enough. Then every member of the same arithmetic can judge, and most of all decide. Of a layer with
one holder it is its word: what it makes of them is judged, and not these.
"""

from collections.abc import Mapping
from typing import NamedTuple

from p2p_dtfm.core.audit.boundaries import inputs_are_kept
from p2p_dtfm.core.audit.work import MANY, can_replay
from p2p_dtfm.core.messages.audit_messages import Share
from p2p_dtfm.core.protocol.plan import Plan

PARAMETERS_BYTES = 32
"""Of a digest; names a blob."""


class Judging(NamedTuple):
    """Of a run: what decides who may judge whom."""

    kept_microbatches: int = MANY
    ends: tuple[str, ...] = ()
    """Who alone may see the first and the last layer; none: anybody."""

    def judges_of(self, peer_id: str, plan: Plan, shares: Mapping[str, Share]) -> list[str]:
        """The stage-holders that can compute its work again. `shares`: of all."""
        names = {it: share.arithmetic for it, share in shares.items()}
        is_lent = has_agreed_parameters(plan, peer_id, shares)
        kept = self.kept_microbatches
        return [
            it
            for it in plan.stage_holders()
            if can_replay(it, peer_id, plan, names, kept)
            or (is_lent and self.may_from_outside(it, peer_id, plan, names))
        ]

    def may_from_outside(
        self, judge: str, peer_id: str, plan: Plan, arithmetics: Mapping[str, str]
    ) -> bool:
        """Whether it can if it is given the parameters, and may be."""
        is_alike = arithmetics.get(judge, "") == arithmetics.get(peer_id) != ""
        if judge == peer_id or not is_alike or self._withheld(judge, peer_id, plan):
            return False
        return inputs_are_kept(plan, peer_id, self.kept_microbatches)

    def _withheld(self, judge: str, peer_id: str, plan: Plan) -> bool:
        layers = plan.layers_of(peer_id)
        has_end = layers.start == 0 or layers.stop == plan.pipelines[0].stages[-1].end_layer
        return bool(self.ends) and judge not in self.ends and has_end


ANYBODY = Judging()


def few_judges(
    plan: Plan, arithmetics: Mapping[str, str] | None = None, judging: Judging = ANYBODY
) -> dict[str, int]:
    """How many others can compute a stage-holder's work again, where they are fewer than two: with
    none its work is not audited, with one nobody knows which of the two is wrong. `arithmetics`: of
    whom it is known; of the others only layers count."""
    known, holders = arithmetics or {}, plan.stage_holders()
    alike = dict.fromkeys(holders, "unknown")
    found = {}
    for peer_id in holders:
        judges = 0
        for judge in holders:
            both = known if {judge, peer_id} <= set(known) else alike
            judges += can_replay(
                judge, peer_id, plan, both, judging.kept_microbatches
            ) or judging.may_from_outside(judge, peer_id, plan, both)
        if judges < 2:
            found[peer_id] = judges
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


def has_agreed_parameters(plan: Plan, peer_id: str, shares: Mapping[str, Share]) -> bool:
    """Whether all holders of each of its layers began the step with the same parameters."""
    return all(_are_agreed(plan, layer, shares) for layer in plan.layers_of(peer_id))


def _are_agreed(plan: Plan, layer: int, shares: Mapping[str, Share]) -> bool:
    stated = {shares[it].parameters.get(layer, b"") for it in plan.holders(layer)}
    return len(stated) == 1 and b"" not in stated
