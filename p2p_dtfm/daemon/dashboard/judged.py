"""Whose work the members audit badly, found once for each plan: it is asked for often."""

from collections.abc import Mapping

from p2p_dtfm.core.audit.judging import few_judges, only_holders
from p2p_dtfm.core.commit.step_terms import terms_of
from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.protocol.run_spec import RunSpec

Judged = Mapping[str, tuple[str, ...]]
"""Peers, by the field of `telemetry.problems.Sight` that names them."""


class JudgedByFew:
    """Members of the plan in force whose work few can judge."""

    def __init__(self) -> None:
        self._of: tuple[Plan, dict[str, str]] | None = None
        self._found: Judged = {}

    def found(self, plan: Plan, arithmetics: Mapping[str, str], spec: RunSpec) -> Judged:
        """Members that nobody audits, or one other member only, and those with layers that nobody
        else has."""
        known = self._of
        if known is None or known[0] is not plan or known[1] != arithmetics:
            kept = terms_of(spec).kept_microbatches
            self._found = _judged_by_few(plan, arithmetics, kept)
            self._of = plan, dict(arithmetics)
        return self._found


def _judged_by_few(plan: Plan, arithmetics: Mapping[str, str], kept_microbatches: int) -> Judged:
    judges = few_judges(plan, arithmetics, kept_microbatches)
    by_layers = few_judges(plan) if 0 in judges.values() else {}
    found: dict[str, list[str]] = {"unsure": [], "alone": [], "unlike": []}
    for peer, count in judges.items():
        nobody = "unlike" if by_layers.get(peer, 2) else "alone"
        found["unsure" if count else nobody].append(peer)
    found["believed"] = [peer for peer in only_holders(plan) if judges.get(peer, 1)]
    return {name: tuple(peers) for name, peers in found.items()}
