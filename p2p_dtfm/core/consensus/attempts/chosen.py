"""Which contributors can be in one view together: a function of what they say."""

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

from p2p_dtfm.core.audit.roles import held_off, quiet_from, with_roles
from p2p_dtfm.core.commit.judgement import Conflict
from p2p_dtfm.core.commit.step_terms import StepTerms
from p2p_dtfm.core.membership.bars import (
    agreed_bars,
    barred_at,
    step_of_most,
    united,
    voters,
    with_convicted,
)
from p2p_dtfm.core.membership.eligibility import mutually_reachable
from p2p_dtfm.core.membership.undo import agreed_epochs, bars_gone_back_for, undo_due
from p2p_dtfm.core.messages.agreement_messages import Accusation, Contribution
from p2p_dtfm.core.protocol.lineage import Epochs
from p2p_dtfm.core.protocol.snapshot import Bar, Member
from p2p_dtfm.core.recovery.contradictions import evidence
from p2p_dtfm.core.recovery.furthest_step import FurthestStep
from p2p_dtfm.core.recovery.going_back import without_undone
from p2p_dtfm.core.recovery.restart_point import Undo


class Chosen(NamedTuple):
    """`conflict` is what the contributions say against their makers; `undo` what is to be taken
    back because of that, in a run in which `epochs` were begun before."""

    participants: tuple[Member, ...]
    conflict: Conflict
    bars: tuple[Bar, ...]
    epochs: Epochs = Epochs()
    undo: Undo | None = None


def chosen_of(
    heard: Mapping[Member, Contribution],
    terms: StepTerms | None,
    accusations: Collection[Accusation],
    reached_step: Callable[[list[Contribution]], int],
    bounds: Callable[[Collection[Contribution]], FurthestStep] | None = None,
    *,
    planned: bool = False,
) -> Chosen:
    """Leave out those that are barred, by what most contributors have from before, and those that
    lie now; choose from the rest.

    In a `planned` attempt nobody lies now: honest members bring no Prepared there, and no state is
    gone back to. A liar that convicts itself there would have nothing taken back.
    """
    told = tuple(heard.values())
    known, step = agreed_bars(told), step_of_most(told)
    epochs = agreed_epochs(told)
    stayed = [it for it in voters(told) if it.present is not None]
    barred = barred_at(known, step)
    heard = {member: part for member, part in heard.items() if member.peer_id not in barred}
    found = Conflict() if planned else evidence(heard.values(), terms)
    heard = {member: part for member, part in heard.items() if member.peer_id not in found.left_out}
    named = {member.peer_id: member for member in heard}
    pairs = (pair for pair in found.doubts if set(pair) <= set(named))
    doubts = {Accusation(named[one], named[other]) for one, other in pairs}
    counted = dict(zip(heard, without_undone(heard.values(), epochs), strict=True))
    links = {*accusations, *doubts}
    participants = mutually_reachable(counted, links, reached_step, bounds)
    names = {member.peer_id for member in participants}
    bars = with_convicted(known, found.convicted, found.liars, names)
    if terms is not None and terms.follow_steps > 0:
        convicted = {bar.peer_id for bar in set(bars).difference(known) if bar.count > 0}
        bars = _with_roles(bars, names, stayed, step, terms, convicted)
    gone_back = bars_gone_back_for(known, found.convicted, told, epochs)
    return Chosen(participants, found, bars, epochs, undo_due(gone_back, bars, terms, epochs))


def _with_roles(
    bars: tuple[Bar, ...],
    names: set[str],
    stayed: Collection[Contribution],
    step: int,
    terms: StepTerms,
    convicted: Collection[str],
) -> tuple[Bar, ...]:
    """The bars, with roles added for those that have none (`core.audit.roles`).

    `stayed`: contributions of members of the view in force. `convicted`: peers that are convicted
    now.
    """
    quiet_from_step = quiet_from(bars, step, terms.follow_steps, terms.undo_steps)
    if convicted:
        stage_holders = _stage_holders(stayed).difference(convicted)
        bars = held_off(bars, stage_holders, step, quiet_from_step)
    members = names & {it.member.peer_id for it in stayed}
    waits = terms.follow_steps, quiet_from_step
    return united(with_roles(bars, members, names - members, step, *waits), names)


def _stage_holders(stayed: Collection[Contribution]) -> frozenset[str]:
    """Stage-holders of the view in force, as more than half of its members say."""
    plans = (it.present.plan for it in stayed if it.present is not None)
    named = Counter(peer for plan in plans if plan is not None for peer in plan.stage_holders())
    return frozenset(peer for peer, count in named.items() if 2 * count > len(stayed))
