"""Which Prepared cannot be true, alone or beside those of the others.

Reductions and updates are exact (`docs/decisions/0019-states-by-exact-arithmetic.md`): what two
holders of the same layers state must be the same bits, whatever computes them.
"""

import math
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from p2p_dtfm.core.audit.accounts import (
    Findings,
    are_even,
    fault_of_account,
    findings,
)
from p2p_dtfm.core.audit.boundaries import TRAINING, Due
from p2p_dtfm.core.audit.work import NO_MICROBATCH_LIMIT, unlike_sums
from p2p_dtfm.core.commit.step_terms import SQUARED_NORM_LIMIT, StepTerms
from p2p_dtfm.core.messages.audit_messages import SquaredNorms
from p2p_dtfm.core.messages.message_bounds import NUMBER_LIMIT, TEXT_LIMIT
from p2p_dtfm.core.messages.prepared import Prepared
from p2p_dtfm.core.protocol.facts.in_words import counted
from p2p_dtfm.core.protocol.plan import Plan, Segment
from p2p_dtfm.core.protocol.snapshot import ViewId
from p2p_dtfm.core.schedule.sums_in_order import added_up
from p2p_dtfm.core.schedule.tied_ends import other_end, states_ends

DIGEST_BYTES = 16
"""Length of a state's digest."""
SUM_DIGEST_BYTES = 16
"""Length of a sum's digest. The maker of a sum chooses it: with 8 bytes it could find two sums with
one digest within a step. A peer that got the other sum would be convicted of all it computes then.
"""


@dataclass
class Conflict:
    """What a step's Prepared together contradict."""

    reason: str = ""
    """Empty if they agree."""
    liars: dict[str, str] = field(default_factory=dict)
    """The peers to leave out, with the reason for each."""
    doubts: dict[tuple[str, str], str] = field(default_factory=dict)
    """Pairs of peers of which one says what is not true, with the reason."""
    even: dict[tuple[str, str], str] = field(default_factory=dict)
    """At most one pair of which both peers are left out, with the reason: several peers agree with
    one of them, and as many with the other (`core.audit.accounts.are_even`)."""
    convicted: dict[str, tuple[ViewId, int]] = field(default_factory=dict)
    """Liars by the word of more than half of all stage-holders, or by their own signatures, each
    with the view and step of the lie."""
    forks: bool = False
    """Whether members start the step from different states."""

    def told(self) -> list[tuple[str, str]]:
        """Each peer or pair that the conflict is about, and why, in words."""
        pairs = [(f"one of {a} and {b}", why) for (a, b), why in self.doubts.items()]
        both = [(f"both {a} and {b}", why) for (a, b), why in self.even.items()]
        return sorted([*self.liars.items(), *pairs, *both])

    @property
    def left_out(self) -> set[str]:
        """The peers that are left out in any case."""
        return {*self.liars, *(peer for pair in self.even for peer in pair)}

    def of_convicted(self) -> "Conflict":
        """The part of the conflict that stands whatever the others have said."""
        liars = {peer: why for peer, why in self.liars.items() if peer in self.convicted}
        return Conflict(next(iter(liars.values()), ""), liars, convicted=self.convicted)

    def blame(self, peer_id: str, reason: str) -> None:
        self.reason = self.reason or reason
        self.liars.setdefault(peer_id, reason)

    def lose_both(self, one: str, other: str, reason: str) -> None:
        self.reason = self.reason or reason
        if not self.even:
            self.even[one, other] = reason

    def doubt(self, one: str, other: str, reason: str) -> None:
        self.reason = self.reason or reason
        first, second = sorted((one, other))
        self.doubts.setdefault((first, second), reason)


def fault_of(
    prepared: Prepared,
    plan: Plan,
    terms: StepTerms | None = None,
    counts: Mapping[str, int] | None = None,
) -> str:
    """Why a stage-holder's Prepared cannot be true; empty if it may be.

    Without `terms` nothing is known of the run. Without `counts` (`loss_counts`) it is unknown who
    computes which microbatches.
    """
    me, segments = prepared.peer_id, plan.segments()
    due = {n for n, segment in enumerate(segments) if me in segment.holders}
    if set(prepared.squared_norms) != due:
        return "Prepared does not state the norms of its segments"
    numbers = [*prepared.squared_norms.values(), prepared.loss_sum, prepared.held_out_loss_sum]
    if not all(math.isfinite(number) for number in numbers):
        return f"Prepared for step {prepared.step} with a number that is not finite"
    if min(prepared.token_count, prepared.held_out_token_count, *numbers) < 0:
        return "Prepared with a negative count, loss or squared norm"
    if not -1 <= prepared.kept <= prepared.step:
        return f"Prepared for step {prepared.step} with a cut of {prepared.kept}"
    if max(prepared.squared_norms.values(), default=0.0) > SQUARED_NORM_LIMIT:
        return "Prepared with a norm that no gradient has"
    if fault := _fault_of_digests(prepared, plan, segments, due):
        return fault
    claimed = _due(prepared, plan, terms)
    if fault := fault_of_account(prepared.audit, plan, segments, me, claimed):
        return fault
    norms = _summed_norms(prepared, segments)
    if any(prepared.squared_norms[n] != added_up(it) for n, it in norms.items()):
        return "Prepared with another norm than its sums come to"
    return _fault_by_terms(prepared, plan, terms, counts)


def _summed_norms(prepared: Prepared, segments: Sequence[Segment]) -> SquaredNorms:
    """The squared norms of each segment's sums, as the account claims them; the word of a sum's
    maker is judged like all its work. A segment with an end whose matrix is summed with the other
    end's is left out: its norm covers more than its sums."""
    norms = prepared.audit.share.norms if prepared.audit is not None else {}
    tied = prepared.tied.keys()
    return {n: each for n, each in norms.items() if tied.isdisjoint(segments[n].layers)}


def _fault_of_digests(
    prepared: Prepared, plan: Plan, segments: Sequence[Segment], due: set[int]
) -> str:
    """Why the digests or names cannot be true. Others pass them on, and have no room for ones of
    another form."""
    for number, digests in prepared.sums.items():
        if number not in due or len(digests) != len(segments[number].holders):
            return "Prepared with sums of segments that it does not hold"
        if any(len(digest) not in (0, SUM_DIGEST_BYTES) for digest in digests):
            return "Prepared with a sum's digest of another length"
    if not set(prepared.states) <= set(plan.layers_of(prepared.peer_id)):
        return "Prepared with states of layers that it does not hold"
    if any(len(digest) != DIGEST_BYTES for digest in prepared.states.values()):
        return "Prepared with a state's digest of another length"
    if not set(prepared.tied) <= {0, plan.pipelines[0].stages[-1].end_layer - 1}:
        return "Prepared with sums of a matrix of layers that are no ends"
    if any(len(digest) != SUM_DIGEST_BYTES for digest in prepared.tied.values()):
        return "Prepared with a sum's digest of another length"
    if len(prepared.base) > TEXT_LIMIT or not _may_name(prepared.ready_for):
        return "Prepared with a name of a view or lineage that none has"
    return ""


def _may_name(view: ViewId | None) -> bool:
    """Whether a view's name is one that others can tell as part of the step's outcome."""
    return view is None or (0 <= view.number < NUMBER_LIMIT and len(view.snapshot) <= TEXT_LIMIT)


def _due(prepared: Prepared, plan: Plan, terms: StepTerms | None) -> Due:
    """The work that the account of a Prepared covers, if it has one."""
    return (terms.due(prepared.step, plan) if terms is not None else None) or TRAINING


def _fault_by_terms(
    prepared: Prepared, plan: Plan, terms: StepTerms | None, counts: Mapping[str, int] | None
) -> str:
    if terms is None:
        return ""
    if (prepared.audit is None) != (terms.due(prepared.step, plan) is None):
        return "Prepared accounts for its work where it need not, or does not where it must"
    return _fault_of_counts(prepared, plan, terms, counts)


def _fault_of_counts(
    prepared: Prepared, plan: Plan, terms: StepTerms, counts: Mapping[str, int] | None
) -> str:
    step, me = prepared.step, prepared.peer_id
    if counts is not None:
        due = counts.get(me, 0) * terms.microbatch_tokens if terms.trains(step) else 0
        if prepared.token_count != due:
            return f"Prepared counts {counted(prepared.token_count, 'token')}, its share is {due:,}"
    if prepared.token_count > terms.microbatch_tokens * plan.microbatch_count:
        # also where most tell such a share: the sum must fit into what all say of the step
        return f"Prepared counts {counted(prepared.token_count, 'token')}, more than the step has"
    held_out = terms.held_out_tokens(step, plan, me)
    if prepared.held_out_token_count != held_out:
        return f"Prepared counts {prepared.held_out_token_count} held-out tokens, not {held_out}"
    if _has_too_much_loss(prepared, plan, terms):
        return "Prepared with a loss that no model has"
    segments = enumerate(plan.segments())
    shared = {n for n, segment in segments if me in segment.holders and len(segment.holders) > 1}
    if terms.trains(step) and set(prepared.sums) != shared:
        return "Prepared does not state the sums of its segments"
    due_states = set(plan.layers_of(me)) if terms.tells_states(step) else set()
    if set(prepared.states) != due_states:  # a digest that one alone states is compared with none
        return "Prepared does not state the digests of its states, or where nobody asks for them"
    return _fault_of_ends(prepared, plan, terms)


def _has_too_much_loss(prepared: Prepared, plan: Plan, terms: StepTerms) -> bool:
    """Whether a peer states more than all tokens of the step, or of the evaluation, can lose. Where
    only some count, these stand for all, and they may lie in one peer's microbatches."""
    count, held_out = prepared.token_count, prepared.held_out_token_count
    most = plan.microbatch_count if count else 0
    most_held_out = terms.evaluation_microbatches if held_out else 0
    limit = terms.microbatch_tokens * terms.loss_limit
    return prepared.loss_sum > most * limit or prepared.held_out_loss_sum > most_held_out * limit


def _fault_of_ends(prepared: Prepared, plan: Plan, terms: StepTerms) -> str:
    is_due = terms.trains(prepared.step) and states_ends(plan, prepared.peer_id, terms.tied_ends)
    if set(prepared.tied) != (set(terms.tied_ends) if is_due else set()):
        return "Prepared does not state the sums of both ends' matrix"
    return ""


def conflict_of(
    said: Mapping[str, Prepared], plan: Plan, terms: StepTerms | None = None
) -> Conflict:
    """Where the Prepared of one step, by peer, contradict one another; some may be missing."""
    found = Conflict()
    bases = {peer: prepared.base for peer, prepared in said.items()}
    if len(set(bases.values())) > 1:
        found.reason, found.forks = "members start the step from different states", True
    for what, stated, holders in _comparable(said, plan):
        _judge(stated, what, holders, found)
    for peer, owner in unlike_sums(said, plan.segments()):
        found.doubt(owner, peer, f"the sums of {owner} are not those that {peer} has got from it")
    _doubt_ends(said, plan, found)
    one_arithmetic = terms is not None and terms.one_arithmetic
    kept = terms.kept_microbatches if terms is not None else NO_MICROBATCH_LIMIT
    if said:  # all of one view and step
        first = next(iter(said.values()))
        due = _due(first, plan, terms)
        audited = findings(said, plan, plan.segments(), one_arithmetic, kept, due)
        _take_findings(audited, (first.view, first.step), found)
    return found


def _doubt_ends(said: Mapping[str, Prepared], plan: Plan, found: Conflict) -> None:
    """Doubts pairs that differ in a matrix that both ends hold: the peer that gives the other end's
    sum, and the peer that has got another sum."""
    for peer, prepared in said.items():
        lacks = other_end(plan, peer) if prepared.tied else None
        if lacks is not None and lacks[1] in said:
            end, giver = lacks
            if said[giver].tied.get(end) != prepared.tied.get(end):
                reason = f"the tied matrix's sum of {giver} is not what {peer} has got from it"
                found.doubt(giver, peer, reason)


def _take_findings(audited: Findings, where: tuple[ViewId, int], found: Conflict) -> None:
    for peer, reason in audited.liars.items():
        found.blame(peer, reason)
    found.convicted |= dict.fromkeys(audited.convicted, where)
    for (one, other), reason in audited.doubts.items():
        found.doubt(one, other, reason)
    for (one, other), reason in audited.even.items():
        found.lose_both(one, other, reason)


def _comparable(
    said: Mapping[str, Prepared], plan: Plan
) -> Iterator[tuple[str, dict[str, Hashable], int]]:
    """What several peers state of the same thing, and how many hold it."""
    for number, segment in enumerate(plan.segments()):
        peers, count = [peer for peer in segment.holders if peer in said], len(segment.holders)
        alike: dict[Hashable, dict[str, Hashable]] = {}
        made: dict[Hashable, dict[str, Hashable]] = {}
        for peer in peers:  # other sums give other norms, so only norms of equal sums are compared
            sums, tied = said[peer].sums.get(number), said[peer].tied
            got = tuple(sorted(tied.items()))
            if number not in _summed_norms(said[peer], plan.segments()):
                alike.setdefault((sums, got), {})[peer] = said[peer].squared_norms[number]
            own = tuple(tied[end] for end in segment.layers if end in tied)
            made.setdefault(sums, {})[peer] = own
        for norms in alike.values():
            yield "norm", norms, count
        for ends in made.values():
            yield "sum of the tied matrix", ends, count
        for layer in segment.layers:
            with_digest = [peer for peer in peers if layer in said[peer].states]
            states: dict[str, Hashable] = {p: said[p].states[layer] for p in with_digest}
            yield f"state of layer {layer}", states, count
            yield f"digest of layer {layer}", _parameters(layer, peers, said), count


def _parameters(
    layer: int, peers: Sequence[str], said: Mapping[str, Prepared]
) -> dict[str, Hashable]:
    """The digest of the layer's parameters with which each peer began the step, by its account."""
    shares = ((peer, account.share) for peer in peers if (account := said[peer].audit) is not None)
    return {peer: it.parameters[layer] for peer, it in shares if layer in it.parameters}


def _judge(stated: Mapping[str, Hashable], what: str, holders: int, found: Conflict) -> None:
    """Blames the odd peers where most holders agree; otherwise doubts each pair that differs.

    Most means most of all holders: while some have not spoken, or have got other sums, a few may be
    most of the rest. A liar can keep a sum from all but one peer, so that this one speaks first.
    Beside the liar and a colluder, that peer would be the odd one again and again.
    """
    if len(set(stated.values())) < 2:
        return
    value, count = Counter(stated.values()).most_common(1)[0]
    odd = sorted(peer for peer, mine in stated.items() if mine != value)
    if 2 * count > holders:
        for peer in odd:
            found.blame(peer, f"states another {what} than the other holders")
        return
    if len(stated) < holders:
        found.reason = found.reason or f"some of the holders differ in the {what} that they state"
        return
    if are_even(stated):
        one = min(stated)
        other = min(peer for peer in stated if stated[peer] != stated[one])
        found.lose_both(
            one, other, f"differ in the {what} that they state, and as many with either"
        )
        return
    for one in sorted(stated):
        for other in sorted(stated):
            if one < other and stated[one] != stated[other]:
                found.doubt(one, other, f"{one} and {other} differ in the {what} that they state")
