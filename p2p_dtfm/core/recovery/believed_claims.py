"""Which of the versions that contributors say they have can be true, by what all of them show.

A step commits only with every stage-holder's Prepared. So the stage-holders of a contributor's view
refute its version if they contribute and have not come so far. A Prepared that they signed shows
otherwise, wherever it turns up. Honest members lose nothing: when one of them has committed a step,
all stage-holders have said Prepared of it. Where no stage-holder contributes, most members decide,
and the Prepared of all stage-holders show how far somebody has come.

To which state a step led is another question. A peer that holds its own Prepared back has those of
all others, and could present a state of its own as what the step comes to. So a lineage beyond what
most have reached themselves is proved by all Prepared of the step alone. Who has committed the step
passes them on, as far as there is room. Without them, the lineage counts only if somebody's outcome
makes it of the state of most, and these have said Prepared: then each of them takes that step for
its own layers.

Nor is a contributor believed for the view that it says it is in, where most members are in others.
They may have left that view, or agreed on it and not taken over. In a view no step commits before
all its members have said that they are in it, so all members have a say about it.
"""

from collections.abc import Iterable, Sequence
from itertools import chain

from p2p_dtfm.core.messages.agreement_messages import Contribution
from p2p_dtfm.core.messages.prepared import Prepared
from p2p_dtfm.core.protocol.signed import Signed
from p2p_dtfm.core.protocol.snapshot import ViewId
from p2p_dtfm.core.recovery.contradictions import stated

_Reach = dict[tuple[ViewId, str], int]
"""How far each peer has come in each view: a version by view and peer."""


class BelievedClaims:
    """Judges the contributions to one view. `slack_steps`: by so many more steps a member may be
    behind another one, where contributions carry no Prepared."""

    def __init__(self, parts: Sequence[Contribution], slack_steps: int = 0) -> None:
        self._parts = parts
        self.members = [part for part in parts if part.present is not None]
        self._slack_steps = slack_steps
        # looked at for each of thousands of states that one member may tell of
        self._lineages = {id(part): _own_lineages(part) for part in parts}
        self._copies = {id(part): _copies_of(part) for part in parts}
        said = [stated(signed) for signed in said_in(parts)]
        self._own_steps = _own_steps(parts, said)
        self._reach = _reach(said, self._own_steps)
        views = [part.present for part in self.members if part.present is not None]
        self._plans = {it.view: it.plan for it in views if it.plan is not None}
        """Each view's plan as any member tells it. A member that tells none does not remove it."""
        self._holders = {view: set(plan.stage_holders()) for view, plan in self._plans.items()}
        train = sum(1 for it in views if it.view in self._plans)
        self._trains = bool(views) and 2 * train >= len(views)
        """Whether at least half of the members are in views with a plan. Otherwise no step commits,
        and states count whoever brings them."""
        self._fellows: dict[ViewId, list[Contribution]] = {}
        for part in self.members:
            assert part.present is not None
            self._fellows.setdefault(part.present.view, []).append(part)

    def furthest(self, limit: int | None = None) -> int:
        """The highest step that a member tells and nothing refutes; the highest told if all are
        refuted. Steps above `limit` do not count."""
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
        """Whether that many steps can have been committed where `part` was, and led to `lineage`.
        `told`: view, number and base of a step that, as somebody tells, has led there."""
        present = part.present
        if present is None or not self._trains:
            return True
        fellows = self._fellows[present.view]
        if present.view not in self._plans or 2 * len(fellows) <= len(self.members):
            fellows = self.members
        if lineage is None:
            is_shown = self._is_shown(present.view, fellows, version)
            return is_shown or self._is_let_stand(part, fellows, version, self._reach)
        if self._are_elsewhere(fellows, version, lineage):
            return False
        is_step_of_most = (
            told is not None
            and told[0] in self._plans
            and not self._are_elsewhere(fellows, *told[1:])
        )
        reach = self._reach if is_step_of_most else self._own_steps
        return self._is_let_stand(part, fellows, version, reach)

    def _is_shown(self, view: ViewId, fellows: Sequence[Contribution], version: int) -> bool:
        """Whether Prepared of all stage-holders of the view show the version, where none of them
        contributes. Among the others, one that understates its step would weigh as much as one that
        does not. What a few say of a view in which most are not shows nothing."""
        holders, are_few = self._holders.get(view), 2 * len(self._fellows[view]) < len(self.members)
        if not holders or are_few or any(map(self._has_stage, fellows)):
            return False
        return all(self._reach.get((view, holder), 0) >= version for holder in holders)

    def _is_let_stand(
        self, part: Contribution, fellows: Sequence[Contribution], version: int, reach: _Reach
    ) -> bool:
        """Whether most of the fellows that decide have come so far. Stage-holders decide; where
        there are none, all fellows do. Then `part` counts as one of them: otherwise one of three
        could refute both others."""
        deciding, own = [each for each in fellows if self._has_stage(each)], 0
        if not deciding:
            deciding, own = [each for each in fellows if each is not part], 1
            version -= 1  # a member without a stage may hear of a step a moment later
        keys = ((it.present.view, it.member.peer_id) for it in deciding if it.present is not None)
        reached = [reach[key] + self._slack_steps for key in keys]
        against = sum(1 for step in reached if step < version)
        return against == 0 or against < len(reached) - against + own

    def has_copy(self, part: Contribution, version: int, lineage: str) -> bool:
        """Whether a contributor says that it has a saved copy of some layers in that state."""
        return (version, lineage) in self._copies[id(part)]

    def _are_elsewhere(self, parts: Iterable[Contribution], version: int, lineage: str) -> bool:
        """Whether, of the contributors that tell their lineage at this version, most tell
        another."""
        owns = (self._lineages[id(part)] for part in parts)
        told = [own[version] for own in owns if version in own]
        return 2 * told.count(lineage) < len(told)

    def _has_stage(self, part: Contribution) -> bool:
        """Whether the contributor has a stage in the view that it says it is in."""
        present = part.present
        return present is not None and part.member.peer_id in self._holders.get(present.view, ())

    @property
    def needs_members(self) -> bool:
        """Whether newcomers' states count only on a member's lineage."""
        return self._trains


def passed_on(part: Contribution) -> tuple[Signed, ...]:
    """The Prepared in a contribution."""
    said = part.pending.prepared if part.pending is not None else ()
    return said + (part.retained.prepared if part.retained is not None else ())


def said_in(parts: Iterable[Contribution]) -> dict[Signed, None]:
    """The Prepared in contributions, each once: most contributors pass on the same ones."""
    return dict.fromkeys(chain.from_iterable(map(passed_on, parts)))


def _own_steps(parts: Sequence[Contribution], said: Sequence[Prepared]) -> _Reach:
    """Up to which version each peer has come in its view, by its own word. A Prepared that it
    signed for a step there says that it was at that version, whatever it tells now."""
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
    """Like `own_steps`, but a Prepared in anybody's contribution shows the version after its step.
    It counts for its own view alone: what a peer said in another view may have been given up."""
    found = dict(own_steps)
    for prepared in said:
        key = prepared.view, prepared.peer_id
        found[key] = max(found.get(key, 0), prepared.step + 1)
    return found


def _copies_of(part: Contribution) -> frozenset[tuple[int, str]]:
    """The states, by version and lineage, of which a contributor has saved copies."""
    return frozenset((it.version, it.lineage) for it in (*part.cuts, *part.saved))


def _own_lineages(part: Contribution) -> dict[int, str]:
    """The lineage that a contributor tells for each version."""
    found = {item.version: item.lineage for item in (*part.saved, *part.cuts)}
    if part.retained is not None:
        found[part.retained.step] = part.retained.base
    if part.pending is not None:
        found[part.pending.step] = part.pending.base
    return found | part.lineages
