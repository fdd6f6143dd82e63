"""The state to which a run goes back to undo what a barred peer has done; and what of an epoch that
is over still counts.

Members keep checkpoints for it on their disks: whole ones, fetched from one another and compared
with what all holders have said of their states. The result is a pure function of the contributions.
Decision 74 says why, `docs/decisions/0074-undo.md`.
"""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace

import msgspec

from p2p_dtfm.core.commit.step_terms import StepTerms
from p2p_dtfm.core.messages.agreement_messages import Contribution, SavedState
from p2p_dtfm.core.protocol.lineage import (
    Epochs,
    epochs_of,
    is_undone,
    marked,
    named_in,
    unmarked,
)
from p2p_dtfm.core.recovery.complete_steps import Target
from p2p_dtfm.core.recovery.restart_point import (
    Copies,
    Recovery,
    Undo,
    copies_in,
    recover,
    what_it_comes_to,
)


def restart_of(
    parts: list[Contribution],
    layer_count: int,
    terms: StepTerms | None,
    epochs: Epochs,
    undo: Undo | None,
) -> Recovery:
    """Where an unplanned view starts. The target is named in the epoch of the view's members, or in
    the new epoch that the view begins."""
    parts = list(without_undone(parts, epochs))
    if undo is not None:
        found = _kept_state(parts, layer_count, undo)
        if found is not None and found.target is not None:
            target = found.target
            return _named(replace(found, undo=undo), epochs.next_one(target.step))
    return _named(recover(parts, layer_count, terms), epochs)


def _named(found: Recovery, epochs: Epochs) -> Recovery:
    target = found.target
    if target is None or epochs_of(target.lineage).number > epochs.number:
        return found
    return replace(found, target=Target(target.step, marked(target.lineage, epochs)))


def without_undone(parts: Iterable[Contribution], epochs: Epochs) -> Iterator[Contribution]:
    """What contributors bring, without what was taken back while they were away. If a contributor
    is still in an epoch that is over, its step under way does not count either."""
    for part in parts:
        yield _without_undone(part, epochs) if epochs.number else part


def _without_undone(part: Contribution, epochs: Epochs) -> Contribution:
    stay = {
        version: named_in(version, lineage, epochs)
        for version, lineage in part.lineages.items()
        if not is_undone(version, lineage, epochs)
    }
    held = {layer: version for layer, version in part.held.items() if version in stay}
    counted = msgspec.structs.replace(
        part,
        held=held,
        lineages=stay,
        saved=_that_stay(part.saved, epochs),
        cuts=_that_stay(part.cuts, epochs),
    )
    pending, retained = part.pending, part.retained
    if retained is not None and epochs_of(retained.base).number < epochs.number:
        counted = msgspec.structs.replace(counted, retained=None)
    own = pending.base if pending is not None else part.lineages.get(part.step)
    if own is not None and epochs_of(own).number >= epochs.number:
        return counted
    return msgspec.structs.replace(counted, pending=None, step=max(stay, default=0))


def _that_stay(saved: Iterable[SavedState], epochs: Epochs) -> tuple[SavedState, ...]:
    return tuple(
        msgspec.structs.replace(it, lineage=named_in(it.version, it.lineage, epochs))
        for it in saved
        if not is_undone(it.version, it.lineage, epochs)
    )


def _kept_state(parts: list[Contribution], layer_count: int, undo: Undo) -> Recovery | None:
    """The state to go back to; None where nothing is kept.

    First choice is the newest whole state that is old enough and not older than the undo needs.
    Next come the initial parameters, if the undo reaches back to them. Last comes the oldest newer
    state, and the steps before it stay. States that most members tell of come first, since a single
    member may invent one. A state is the same under whatever name: some may have gone back to it
    already, and named it anew."""
    oldest, parts = undo.newest - undo.every, [_with_bare_names(part) for part in parts]
    targets = {Target(it.version, it.lineage) for part in parts for it in (*part.saved, *part.cuts)}
    copies = copies_in(parts)
    by_most = [target for target in targets if _is_told_by_most(target, parts, copies)]
    for among in (by_most, targets):
        whole = _whole(among, parts, layer_count, copies)
        enough = {target: it for target, it in whole.items() if oldest < target.step <= undo.newest}
        if enough:
            return enough[max(enough)]
        if oldest < 0:
            return what_it_comes_to(Target(0, ""), parts, {}, layer_count, copies)
        later = {target: it for target, it in whole.items() if target.step > undo.newest}
        if later:
            return later[min(later)]
    return None


def _with_bare_names(part: Contribution) -> Contribution:
    saved, cuts = (
        tuple(msgspec.structs.replace(it, lineage=unmarked(it.lineage)) for it in each)
        for each in (part.saved, part.cuts)
    )
    lineages = {version: unmarked(lineage) for version, lineage in part.lineages.items()}
    return msgspec.structs.replace(part, saved=saved, cuts=cuts, lineages=lineages)


def _is_told_by_most(target: Target, parts: list[Contribution], copies: Copies) -> bool:
    members = [part for part in parts if part.present is not None] or parts
    told = copies.get((target.step, target.lineage), {})
    return 2 * sum(1 for part in members if part.member in told) > len(members)


def _whole(
    targets: Collection[Target], parts: list[Contribution], layer_count: int, copies: Copies
) -> dict[Target, Recovery]:
    later = (target for target in targets if target.step > 0)
    found = {it: what_it_comes_to(it, parts, {}, layer_count, copies) for it in later}
    return {target: it for target, it in found.items() if not it.lost_layers}
