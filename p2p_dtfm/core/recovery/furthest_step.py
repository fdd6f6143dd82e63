"""An upper bound on the step that `recover` finds without one of the contributions. It is computed
at once, since it is needed for each of many contributions.

It is never less than what `recover` finds, nor than what `recover` finds without several
contributions. It counts what is told; `recover` judges whether that is true and fits together.
"""

from collections import Counter, defaultdict
from collections.abc import Collection

from p2p_dtfm.core.commit.judgement import fault_of
from p2p_dtfm.core.commit.step_terms import StepTerms
from p2p_dtfm.core.messages.agreement_messages import Contribution
from p2p_dtfm.core.messages.prepared import Prepared
from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.recovery.believed_claims import said_in
from p2p_dtfm.core.recovery.contradictions import stated

NOWHERE = -1
"""The result where layers are lost."""
_Copy = tuple[int, int]
"""A version, and a layer of which there is a copy at that version."""


class FurthestStep:
    """The bound for the contributions that are left: `leaves` takes one out for good."""

    def __init__(
        self, parts: Collection[Contribution], layer_count: int, terms: StepTerms | None
    ) -> None:
        complete = _possibly_complete_steps(parts, terms)
        self._layers = range(layer_count)
        self._copies: Counter[_Copy] = Counter()
        for part in parts:
            self._copies.update(_copies_of(part, complete))
        told = {version for part in parts for version in part.lineages}
        kept = {it.version for part in parts for it in (*part.cuts, *part.saved)}
        self._versions = sorted(told | kept | complete, reverse=True)
        self._complete = complete
        self._drop_lacking()
        self._members = sum(1 for part in parts if part.present is not None)
        self._may_begin_anew = 0 in kept or any(_may_begin_anew(part, terms) for part in parts)

    def leaves(self, part: Contribution) -> None:
        """Take this contribution out."""
        self._copies.subtract(_copies_of(part, self._complete))
        self._drop_lacking()
        self._members -= part.present is not None

    def _drop_lacking(self) -> None:
        """Leaves out the versions at which some layer has no copy. Nobody brings more of them, and
        one member may tell of thousands that would be looked at for each of all members."""
        self._versions = [
            version
            for version in self._versions
            if all(self._copies[version, layer] > 0 for layer in self._layers)
        ]

    def without(self, part: Contribution) -> int:
        """The step that the others get to at most if `part` is left out as well, or `NOWHERE`."""
        own = _copies_of(part, self._complete)
        for version in self._versions:
            copies = ((version, layer) for layer in self._layers)
            if all(self._copies[copy] > (copy in own) for copy in copies):
                return version
        # newcomers alone begin where they can
        has_members = self._members > (part.present is not None)
        return 0 if self._may_begin_anew or not has_members else NOWHERE


def _possibly_complete_steps(parts: Collection[Contribution], terms: StepTerms | None) -> set[int]:
    """The versions to which steps lead whose outcome is told, or of which the Prepared of all
    stage-holders are there."""
    retained = (part.retained for part in parts)
    found = {it.step + 1 for it in retained if it is not None and it.outcome is not None}
    presents = {id(it.present): it.present for it in parts if it.present is not None}
    plans = {(it.view, it.plan) for it in presents.values() if it.plan is not None}
    makers: defaultdict[tuple[Plan, int, str], set[str]] = defaultdict(set)
    for prepared in map(stated, said_in(parts)):
        for view, plan in plans:
            if prepared.view == view and _may_be_true(prepared, plan, terms):
                makers[plan, prepared.step, prepared.base].add(prepared.peer_id)
    for (plan, step, _), peers in makers.items():
        if peers.issuperset(plan.stage_holders()):
            found.add(step + 1)
    return found


def _may_be_true(prepared: Prepared, plan: Plan, terms: StepTerms | None) -> bool:
    """Whether a Prepared may be true by some loss counts. Which counts hold depends on who is
    left."""
    if not fault_of(prepared, plan, terms):
        return True
    fitting = prepared.token_count // terms.microbatch_tokens if terms is not None else 0
    return fitting > 0 and not fault_of(prepared, plan, terms, {prepared.peer_id: fitting})


def _copies_of(part: Contribution, complete: Collection[int]) -> set[_Copy]:
    """The copies that a contributor has, or may come to with the gradients of a step."""
    found = {(version, layer) for layer, version in part.held.items()}
    found |= {(version + 1, layer) for version, layer in found if version + 1 in complete}
    for it in (*part.cuts, *part.saved):
        found |= {(it.version, layer) for layer in it.layers}
    return found


def _may_begin_anew(part: Contribution, terms: StepTerms | None) -> bool:
    """Whether the initial parameters may count by this contribution: its maker accepts any loss, or
    is a member that has hardly begun or tells a step that cannot be."""
    is_past_the_end = terms is not None and part.step > terms.total_steps + 1
    has_no_steps = part.present is not None and (part.step <= 1 or is_past_the_end)
    return part.accepts_loss or has_no_steps
