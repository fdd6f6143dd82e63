"""Which peers are not to be believed, by what the contributions to a view say and pass on.

A pure function of the gathered contributions, so that every member leaves out the same peers. What
stage-holders said is signed: two different Prepared of one peer for one step, or one that cannot be
true, prove that this peer lies. Where two peers contradict each other and no third peer knows, both
are in doubt.
"""

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from p2p_dtfm.core.commit.judgement import Conflict, conflict_of, fault_of
from p2p_dtfm.core.commit.step_terms import StepTerms
from p2p_dtfm.core.messages.agreement_messages import RETAINED_LIMIT, Contribution, RetainedStep
from p2p_dtfm.core.messages.opened_once import OpenedOnce
from p2p_dtfm.core.messages.prepared import Prepared
from p2p_dtfm.core.protocol.canonical import decode
from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.protocol.signed import Signed
from p2p_dtfm.core.protocol.snapshot import Member, ViewId

Item = TypeVar("Item")
_Step = tuple[ViewId, int]


OPENED_BYTES = 16 << 20
"""Payload bytes of Prepared that are kept opened: 256 of the longest."""
_opened = OpenedOnce[Prepared](OPENED_BYTES)


class AgreedState(NamedTuple):
    """What a layer's holders have said of the state from which a committed step started."""

    file: bytes
    """The first bytes of the digest of the state's file."""
    parameters: bytes
    """The digest of the parameters with which they claim to have begun; empty where none do. All
    members have heard the same claim. Of the file's digest a layer's only holder could tell each
    member another one."""


def stated(signed: Signed) -> Prepared:
    """The contents of a Prepared in a contribution. Its signature was checked when that came."""
    found = _opened.find(signed)
    return found if found is not None else _opened.keep(signed, decode(signed.payload, Prepared))


def agreed_states(committed: Iterable[Signed]) -> dict[int, AgreedState]:
    """The states that a committed step started from, by layer; empty for a step that does not
    state them. All holders of a layer state the same one."""
    found = {}
    for prepared in map(stated, committed):
        share = prepared.audit.share.parameters if prepared.audit is not None else {}
        for layer, digest in prepared.states.items():
            found[layer] = AgreedState(digest, share.get(layer, b""))
    return found


@dataclass
class _SaidOfStep:
    """What contributors say of one step of one view."""

    plans: list[Plan] = field(default_factory=list)
    counts: list[dict[str, int]] = field(default_factory=list)
    tellers: int = 0
    """How many contributors in this view tell loss counts, of whichever step."""
    told_by: set[Member] = field(default_factory=set)
    """Contributors that pass on any Prepared of the step."""
    stages: frozenset[str] = frozenset()
    """The view's stage-holders; by the newest plan told where no contributor tells the view's."""
    holders: set[str] = field(default_factory=set)
    """The `stages` that contribute, in whichever view they say they are now."""
    there: set[str] = field(default_factory=set)
    """The `holders` that say they are in that view, in this step or the next one. Those also count
    that say this step is the last one they have committed."""
    barred: dict[str, set[str]] = field(default_factory=dict)
    """By barred peer, the `holders` that say that this step barred it. They have gone on to the
    view to which the bar led."""
    near: int = 0
    """How many `holders` are in the step or the next one, and pass on Prepared of the step."""
    signed: dict[Signed, None] = field(default_factory=dict)
    shown_by: set[str] = field(default_factory=set)
    """Contributors that show the Prepared by which they came to the step. Two different ones of
    one peer would be seen among these."""
    untold_by: set[str] = field(default_factory=set)
    """Contributors in the step that do not show them."""
    begun_by: set[str] = field(default_factory=set)
    """Contributors in the step that say they have committed no step in that view."""

    @property
    def is_over(self) -> bool:
        """Whether most holders are elsewhere. What a few pass on of the step is not all that was
        said there: colluders could be most of the peers that are heard, and choose the others."""
        return 2 * self.near <= len(self.holders)

    def counts_against(self, peer: str) -> bool:
        """Whether `peer` may be barred by what was said: most other stage-holders are in the step,
        or have just been. What a few say of another step nobody can check any more, or ever could.
        The peer that is to be barred would choose that step, and so when its bar begins."""
        there = self.there | self.barred.get(peer, set())
        return 2 * len(there - {peer}) > len(self.holders - {peer})

    def agreed_counts(self) -> dict[str, int] | None:
        """The loss counts that most tell of the step. A lone teller has no say."""
        if self.is_over or 2 * len(self.counts) <= self.tellers:
            return None
        return _most(self.counts, lambda item: tuple(sorted(item.items())))

    def may_blame_for_its_base(
        self, peer: str, of_most: Collection[str], view: ViewId, holders: int
    ) -> bool:
        """Whether `peer` starts the step from another state than most by its own will.

        Otherwise a liar has told it another Prepared of the step before. Then two Prepared of that
        liar would be seen, and the caller has seen none. Peers that show no Prepared of that step
        cannot hide it, as long as most show theirs. Among many stage-holders an honest peer that
        had not seen the fork when it was asked shows none. Where a view begins after a failure, all
        start from the agreed state and have been told nothing since.
        """
        if not self.untold_by:
            return True
        if view.number % 2 == 1 and 2 * len(self.begun_by & set(of_most)) > holders:
            return True
        if 2 * len(self.shown_by & set(of_most)) <= holders:
            return False
        return peer not in self.untold_by or holders <= RETAINED_LIMIT

    def by_peer(self) -> dict[str, list[Prepared]]:
        versions: dict[str, dict[bytes, Prepared]] = {}
        for signed in self.signed:
            versions.setdefault(signed.peer_id, {})[signed.payload] = stated(signed)
        return {peer: list(found.values()) for peer, found in sorted(versions.items())}


def evidence(parts: Iterable[Contribution], terms: StepTerms | None) -> Conflict:
    """Which liars are to be left out and why, and which pairs are in doubt."""
    found, heard = Conflict(), sorted(parts, key=lambda part: part.member)
    contributors = {part.member.peer_id for part in heard}
    even: dict[tuple[str, str], str] = {}
    for key, said in sorted(_steps(heard).items()):
        versions = said.by_peer()
        for peer, items in versions.items():
            if len(items) == 1 or peer not in contributors | said.stages:
                continue  # anybody can make new keys and let them say anything of any step
            found.blame(peer, f"said two different Prepared for step {key[1]}")
            audits = terms is not None and terms.audits
            if audits and peer in said.stages and said.counts_against(peer):
                found.convicted[peer] = key
        plan = _most(said.plans, Plan.digest)
        if plan is not None:
            only = {peer: items[0] for peer, items in versions.items() if len(items) == 1}
            _judge_step(key[0], only, plan, said, terms, found)
            even |= _of_those_in(key[0], heard, found)
    found.even = _without(found.liars, even)
    found.doubts = _without(found.left_out, found.doubts)
    return found


def shows_contradiction(part: Contribution, plan: Plan, terms: StepTerms | None) -> bool:
    """Whether the contributor has good reason to have all agree anew: it shows all Prepared of the
    step under way, in the view of this plan, and by them another peer has to go."""
    if part.pending is None or part.present is None:
        return False
    me, here = part.member.peer_id, (part.present.view, part.pending.step)
    holders = set(plan.stage_holders())
    items = (it for it in map(stated, part.pending.prepared) if (it.view, it.step) == here)
    said = {it.peer_id: it for it in items if it.peer_id in holders}
    if said.keys() < holders or any(fault_of(it, plan, terms) for it in said.values()):
        return False
    conflict = conflict_of(said, plan, terms)
    if conflict.forks:
        of_most = _from_one_state(said, len(holders))
        return (
            bool(of_most) and (me in of_most or me not in said) and len(holders) <= RETAINED_LIMIT
        )
    pairs = (*conflict.doubts, *conflict.even)
    return not {*conflict.liars, *(peer for pair in pairs for peer in pair)} <= {me}


def _of_those_in(
    view: ViewId, heard: Iterable[Contribution], found: Conflict
) -> dict[tuple[str, str], str]:
    """Takes from `found` the even pairs of which both peers are still in `view`.

    A peer that is silent, or has come back since, pays for no old vote: what was said in a view can
    be passed on for as long as any peer stays in it."""
    there = {
        it.member.peer_id for it in heard if it.present is not None and it.present.view == view
    }
    even, found.even = found.even, {}
    return {pair: reason for pair, reason in even.items() if set(pair) <= there}


def _without(
    peers: Collection[str], pairs: Mapping[tuple[str, str], str]
) -> dict[tuple[str, str], str]:
    return {pair: reason for pair, reason in pairs.items() if not set(pair) & set(peers)}


def _judge_step(
    view: ViewId,
    said: Mapping[str, Prepared],
    plan: Plan,
    facts: _SaidOfStep,
    terms: StepTerms | None,
    found: Conflict,
) -> None:
    counts = facts.agreed_counts()
    holders = plan.stage_holders()
    true: dict[str, Prepared] = {}
    for peer, prepared in said.items():
        if peer not in holders:
            continue
        fault = fault_of(prepared, plan, terms, counts)
        if fault:
            found.blame(peer, fault)
        else:
            true[peer] = prepared
    conflict = conflict_of(true, plan, terms)
    if conflict.forks:
        of_most = _from_one_state(true, len(holders))
        if of_most and not found.liars and not facts.is_over:
            for peer in sorted(true.keys() - of_most.keys()):
                if facts.may_blame_for_its_base(peer, of_most, view, len(holders)):
                    found.blame(peer, "starts the step from another state than most")
        conflict = conflict_of(of_most, plan, terms).of_convicted()
    elif facts.is_over:
        conflict = conflict.of_convicted()
    for peer, reason in conflict.liars.items():
        found.blame(peer, reason)
    convicted = conflict.convicted.items()  # some of them may have left since
    found.convicted |= {it: where for it, where in convicted if facts.counts_against(it)}
    for (one, other), reason in conflict.doubts.items():
        found.doubt(one, other, reason)
    for (one, other), reason in conflict.even.items():
        found.lose_both(one, other, reason)


def _from_one_state(true: Mapping[str, Prepared], holders: int) -> dict[str, Prepared]:
    """The Prepared, by peer, that start from the state from which more than half of all holders
    start; empty where there is no such state.

    Different states give different sums, and nobody need have lied. But a peer that is convicted
    without its own Prepared gains nothing by a Prepared that starts from another state.
    """
    base, count = Counter(item.base for item in true.values()).most_common(1)[0]
    if 2 * count <= holders:
        return {}
    return {peer: item for peer, item in true.items() if item.base == base}


def _tellers(parts: Iterable[Contribution]) -> Counter[ViewId]:
    """By view, how many contributors tell loss counts of a step in it."""
    there = ((part.present, part.pending) for part in parts)
    return Counter(here.view for here, pending in there if here and pending and pending.counts)


def _steps(parts: Sequence[Contribution]) -> dict[_Step, _SaidOfStep]:
    steps: dict[_Step, _SaidOfStep] = {}
    any_view = any(part.present is not None for part in parts)
    for part in parts:
        present, pending, retained = part.present, part.pending, part.retained
        if pending is not None and present is not None:
            said = steps.setdefault((present.view, pending.step), _SaidOfStep())
            if pending.counts:
                said.counts.append(pending.counts)
            _note_what_is_shown(said, part.member.peer_id, present.view, retained)
        for signed in _passed_on(part, any_view):
            prepared = stated(signed)
            said = steps.setdefault((prepared.view, prepared.step), _SaidOfStep())
            said.signed[signed] = None
            said.told_by.add(part.member)
    _add_plans(steps, parts)
    return steps


def _note_what_is_shown(
    said: _SaidOfStep, peer: str, view: ViewId, retained: RetainedStep | None
) -> None:
    """Notes what a contributor that is in the step shows of the step before."""
    is_shown = retained is None or bool(retained.prepared)
    (said.shown_by if is_shown else said.untold_by).add(peer)
    if retained is None or retained.view != view:
        said.begun_by.add(peer)


def _add_plans(steps: Mapping[_Step, _SaidOfStep], parts: Sequence[Contribution]) -> None:
    """Adds to each step the plans told of its view, and which of its stage-holders are there."""
    told: dict[ViewId, list[Plan]] = {}
    for part in parts:
        if part.present is not None and part.present.plan is not None:
            told.setdefault(part.present.view, []).append(part.present.plan)
    tellers, newest = _tellers(parts), max(told, default=None)
    for (view, step), said in steps.items():
        said.tellers, said.plans = tellers[view], told.get(view, [])
        plans = said.plans or (told[newest] if newest is not None else [])
        plan = _most(plans, Plan.digest)
        said.stages = frozenset(plan.stage_holders() if plan is not None else ())
        _count_those_near(said, view, step, parts)


def _passed_on(part: Contribution, any_view: bool) -> tuple[Signed, ...]:
    """The Prepared in a contribution that count. Where any contributor is in a view, newcomers have
    no word of steps. A peer that brings what others signed is not at fault for it, and could be one
    of many keys."""
    pending, retained = part.pending, part.retained
    if any_view and part.present is None:
        return ()
    return (pending.prepared if pending else ()) + (retained.prepared if retained else ())


def _count_those_near(
    said: _SaidOfStep, view: ViewId, step: int, parts: Sequence[Contribution]
) -> None:
    for part in parts:
        present, pending, retained = part.present, part.pending, part.retained
        if part.member.peer_id not in said.stages:
            continue
        said.holders.add(part.member.peer_id)
        for bar in part.bars:
            if (bar.view, bar.step) == (view, step):
                said.barred.setdefault(bar.peer_id, set()).add(part.member.peer_id)
        if present is None:
            continue
        is_in_it = present.view == view and pending is not None and 0 <= pending.step - step <= 1
        said.near += is_in_it and part.member in said.told_by
        if is_in_it or (retained is not None and (retained.view, retained.step) == (view, step)):
            said.there.add(part.member.peer_id)


def _most(items: list[Item], key: Callable[[Item], Hashable]) -> Item | None:
    """The item that more than half of `items` equal by `key`; None if there is none."""
    counted = Counter(map(key, items))
    for item in items:
        if 2 * counted[key(item)] > len(items):
            return item
    return None
