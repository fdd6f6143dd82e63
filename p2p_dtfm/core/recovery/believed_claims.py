"""Which of the versions that contributors say they have can be so, by what all of them show.

A step commits only with every stage-holder's Prepared. So a version that one contributor tells of
is refuted by the stage-holders of its view that contribute and have not come so far, unless a
Prepared that they signed shows otherwise, wherever it turns up. Honest members lose nothing by it:
when one of them has committed a step, all stage-holders have said Prepared of it. Where none of
them contributes most members decide, and what all of them signed shows how far somebody has come.

Where that led is another question. Whoever holds its own Prepared back has those of all others, and
could give a state of its own for what the step comes to: of a lineage beyond what most have come to
themselves only all Prepared of the step are proof, which whoever has committed it passes on as far
as there is room. Without them it counts only as what somebody's outcome makes of the state of most,
if these have said Prepared: then each of them takes that step for its own layers.

Nor is anybody believed for the view that it says it is in, where most are in others: it may be one
that they have left, or agreed on and not taken over. In a view no step commits before all its
members have said that they are in it, so all have a word there.
"""

from collections.abc import Iterable, Sequence
from itertools import chain

from p2p_dtfm.core.messages.agreement_messages import Contribution
from p2p_dtfm.core.messages.prepared import Prepared
from p2p_dtfm.core.protocol.signed import Signed
from p2p_dtfm.core.protocol.snapshot import ViewId
from p2p_dtfm.core.recovery.contradictions import stated

_Reach = dict[tuple[ViewId, str], int]
"""Versions, by view and peer."""


class BelievedClaims:
    """Of the contributions to one view. `slack_steps`: by so many more a member may be behind
    another one, where contributions carry no Prepared."""

    def __init__(self, parts: Sequence[Contribution], slack_steps: int = 0) -> None:
        self._parts = parts
        self.members = [part for part in parts if part.present is not None]
        self._slack_steps = slack_steps
        said = [stated(signed) for signed in said_in(parts)]
        self._own_steps = _own_steps(parts, said)
        self._reach = _reach(said, self._own_steps)
        views = [part.present for part in self.members if part.present is not None]
        self._plans = {it.view: it.plan for it in views if it.plan is not None}
        """As any fellow tells it: who says that its view has none does not make it so."""
        self._holders = {view: set(plan.stage_holders()) for view, plan in self._plans.items()}
        train = sum(1 for it in views if it.view in self._plans)
        self._trains = bool(views) and 2 * train >= len(views)
        """Else no step commits, and whoever brings states is welcome."""
        self._fellows: dict[ViewId, list[Contribution]] = {}
        for part in self.members:
            assert part.present is not None
            self._fellows.setdefault(part.present.view, []).append(part)

    def furthest(self, limit: int | None = None) -> int:
        """How far members have come, at most, by what nothing speaks against."""
        told = [p for p in self.members or self._parts if limit is None or p.step <= limit]
        furthest = sorted(told, key=lambda part: part.step, reverse=True)
        believed = (part.step for part in furthest if self.may_have(part, part.step))
        return next(believed, furthest[0].step if furthest else 0)

    def may_have(
        self,
        part: Contribution,
        version: int,
        lineage: str | None = None,
        told: tuple[ViewId, int, str] | None = None,
    ) -> bool:
        """Whether that many steps can have been committed where `part` was, and to this lineage.
        `told`: of a step that somebody tells has led there its view, number and base."""
        present = part.present
        if present is None or not self._trains:
            return True
        fellows = self._fellows[present.view]
        if present.view not in self._plans or 2 * len(fellows) <= len(self.members):
            fellows = self.members
        if lineage is None:
            is_shown = self._is_shown(present.view, fellows, version)
            return is_shown or self._is_let_stand(part, fellows, version, self._reach)
        if _are_elsewhere(fellows, version, lineage):
            return False
        is_step_of_most = (
            told is not None and told[0] in self._plans and not _are_elsewhere(fellows, *told[1:])
        )
        reach = self._reach if is_step_of_most else self._own_steps
        return self._is_let_stand(part, fellows, version, reach)

    def _is_shown(self, view: ViewId, fellows: Sequence[Contribution], version: int) -> bool:
        """By all who had a stage there, where none of those has come: then one that understates its
        step would be as many as one that does not. What a few say of another view shows nothing."""
        holders, are_few = self._holders.get(view), 2 * len(self._fellows[view]) < len(self.members)
        if not holders or are_few or any(map(self._has_stage, fellows)):
            return False
        return all(self._reach.get((view, holder), 0) >= version for holder in holders)

    def _is_let_stand(
        self, part: Contribution, fellows: Sequence[Contribution], version: int, reach: _Reach
    ) -> bool:
        """Whether most of those fellows that decide have come so far: those with a stage, or else
        all. Then who says so is one of them, or of three a single one would refute both others."""
        deciding, own = [each for each in fellows if self._has_stage(each)], 0
        if not deciding:
            deciding, own = [each for each in fellows if each is not part], 1
            version -= 1  # without a stage one may hear of a step a moment later
        keys = ((it.present.view, it.member.peer_id) for it in deciding if it.present is not None)
        reached = [reach[key] + self._slack_steps for key in keys]
        against = sum(1 for step in reached if step < version)
        return against == 0 or against < len(reached) - against + own

    def _has_stage(self, part: Contribution) -> bool:
        """Where it is."""
        present = part.present
        return present is not None and part.member.peer_id in self._holders.get(present.view, ())

    @property
    def needs_members(self) -> bool:
        """Whether newcomers' states count only where a member's lineage comes by."""
        return self._trains


def passed_on(part: Contribution) -> tuple[Signed, ...]:
    """The Prepared in a contribution."""
    said = part.pending.prepared if part.pending is not None else ()
    return said + (part.retained.prepared if part.retained is not None else ())


def said_in(parts: Iterable[Contribution]) -> dict[Signed, None]:
    """The Prepared in contributions, each once: most pass on the same ones."""
    return dict.fromkeys(chain.from_iterable(map(passed_on, parts)))


def _own_steps(parts: Sequence[Contribution], said: Sequence[Prepared]) -> _Reach:
    """Up to which version each peer has come in its view, by its own word: what it has signed
    there says that it was at the version before, whatever it tells now."""
    found: _Reach = {}
    for part in parts:
        if part.present is not None:
            key = part.present.view, part.member.peer_id
            found[key] = max(found.get(key, 0), part.step)
    for prepared in said:
        key = prepared.view, prepared.peer_id
        found[key] = max(found.get(key, 0), prepared.step)
    return found


def _reach(said: Sequence[Prepared], own_steps: _Reach) -> _Reach:
    """The same, or up to the next one: by its Prepared in anybody's contribution. What it said in
    another view may have been given up."""
    found = dict(own_steps)
    for prepared in said:
        key = prepared.view, prepared.peer_id
        found[key] = max(found.get(key, 0), prepared.step + 1)
    return found


def _are_elsewhere(parts: Iterable[Contribution], version: int, lineage: str) -> bool:
    """Whether more of these were elsewhere at this version than there."""
    owns = map(_own_lineages, parts)
    told = [own[version] for own in owns if version in own]
    return 2 * told.count(lineage) < len(told)


def _own_lineages(part: Contribution) -> dict[int, str]:
    """Where a contributor was at the versions of which it tells."""
    found = {item.version: item.lineage for item in (*part.saved, *part.cuts)}
    if part.retained is not None:
        found[part.retained.step] = part.retained.base
    if part.pending is not None:
        found[part.pending.step] = part.pending.base
    return found | part.lineages
