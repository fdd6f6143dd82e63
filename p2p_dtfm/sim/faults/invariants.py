"""What must hold at every moment of a simulated run, whatever fails."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from p2p_dtfm.core.messages.prepared import StepOutcome
from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.protocol.snapshot import Member, ViewId
from p2p_dtfm.core.recovery.view import View
from p2p_dtfm.sim.faults.hash_training import Gradient, HashState, loss_sum, true_state


class Violation(Exception):
    """An invariant is broken."""


@dataclass
class _Start:
    """The first commit of a view."""

    step: int
    lost: int
    """Committed steps that the view repeats."""
    is_promised: bool
    """Whether the repetition is allowed: guardians lagged where these steps were committed, and
    none of the steps is older than the newest whole cut."""
    names: set[str] = field(default_factory=set)
    """The peers that have committed the first step."""


class Invariants:
    """Told of everything that counts. Raises `Violation`."""

    def __init__(self, microbatch_count: int) -> None:
        self.microbatch_count = microbatch_count
        self.keeps_steps = False
        """Whether no fault takes the last copy of a layer: then no committed step may be lost."""
        self.given_up_steps = 0
        self.whole_cut = 0
        """The newest cut that any member knew to be whole."""
        self.cut_count = 0
        self.most_repeated = 0
        """The most steps of a lineage that a view went back by, to a cut."""
        self.views: dict[ViewId, View] = {}
        """All views that were ever taken over."""
        self.commits: dict[int, ViewId] = {}
        """By step: the view in which it was committed last."""
        self._committed_in: dict[int, list[ViewId]] = {}
        """By step: every view in which it was committed, in order."""
        self.furthest = 0
        self.commit_count = 0
        self._starts: dict[ViewId, _Start] = {}
        self._plans: dict[ViewId, str] = {}
        self._entered: dict[tuple[Member, int], dict[str, tuple[int, int]]] = {}
        self._named: dict[tuple[Member, int], frozenset[Member]] = {}
        self._numbers: dict[tuple[int, str], ViewId] = {}
        self._outcomes: dict[tuple[ViewId, int], StepOutcome] = {}
        self._lineages: dict[tuple[ViewId, int], str] = {}

    def takes_over(self, name: str, life: int, view: View) -> None:
        """No two peers are in one view with different plans, and none is in two views of one
        number."""
        plan = self._plans.setdefault(view.id, view.plan.digest())
        if plan != view.plan.digest():
            raise Violation(f"{name} takes over view {view.id} with another plan")
        held = self._numbers.setdefault((view.id.number, f"{name}/{life}"), view.id)
        if held != view.id:
            raise Violation(f"{name} takes over {view.id} after {held}")
        if view.id not in self.views:
            self.views[view.id] = view
            self._check_records(view)

    def enters_gather(
        self,
        member: Member,
        number: int,
        heard: Mapping[str, tuple[int, int]],
        joiners: Iterable[Member],
    ) -> None:
        """Note what `member` brings: the versions of records that it has heard, and the newcomers
        that it names from within a view. What newcomers name may not count."""
        self._entered[member, number] = dict(heard)
        self._named[member, number] = frozenset(joiners)

    def _check_records(self, view: View) -> None:
        """What was agreed on is never older than what somebody brought, nor than the view before.

        So a merge brings no peer back in a life that has ended.
        """
        snapshot, number = view.snapshot, view.id.number
        agreed = {record.peer_id: record.version for record in snapshot.records}
        before = self.views.get(snapshot.previous)
        known = [{r.peer_id: r.version for r in before.snapshot.records}] if before else []
        known += [self._entered.get((member, number), {}) for member in snapshot.contributors]
        for versions in known:
            for peer_id, version in versions.items():
                if agreed.get(peer_id, version) < version:
                    raise Violation(
                        f"view {view.id} has the record {agreed[peer_id]} of {peer_id}, "
                        f"though one of its makers knew {version}"
                    )
        lives = {m.peer_id: m.life for m in (*snapshot.contributors, *snapshot.absent)}
        for maker in snapshot.contributors:
            for joiner in self._named.get((maker, number), frozenset()):
                if lives.get(joiner.peer_id, joiner.life) < joiner.life:
                    raise Violation(
                        f"view {view.id} names {joiner.peer_id} in life {lives[joiner.peer_id]}, "
                        f"though {maker.peer_id} named its life {joiner.life}"
                    )

    def _check_start(self, name: str, view: ViewId, step: int) -> None:
        """While a copy of everything is left, no view repeats more than the last committed step.
        Where guardians lagged, it repeats no more than the steps since the newest whole cut.

        The peer that commits first may take that one step along when it dies. And a sleeper may
        wake up and commit by itself what the others have given up. So a start counts once all
        stage-holders have made it.
        """
        if view not in self._starts:
            self._starts[view] = self._start(view, step)
        start = self._starts[view]
        if step != start.step or name in start.names:
            return
        start.names.add(name)
        plan = self.views[view].plan
        if not isinstance(plan, Plan) or not start.names >= set(plan.stage_holders()):
            return
        self.given_up_steps += max(0, start.lost)
        if start.lost > 1 and start.is_promised:
            self.most_repeated = max(self.most_repeated, start.lost)
        elif self.keeps_steps and start.lost > 1:
            raise Violation(
                f"view {view} loses {start.lost} committed steps, though a copy of each layer was "
                "left"
            )

    def _start(self, view: ViewId, step: int) -> _Start:
        """Where a view goes on, from what was committed before it.

        Others may have left the view, and a sleeper alone wakes up in it. That loses nothing yet: a
        view that follows the sleeper would. Nor does a view lose what rivals alone have committed:
        where they meet, one of them gives its steps up.
        """
        is_promised = step >= self.whole_cut and self._lagged_since(step, view)
        made = self._made_since(step)
        is_left = any(views and views[-1].number > view.number for views in made)
        rival = sum(
            bool(views) and all(self._are_rivals(it, view) for it in views) for views in made
        )
        lost = 0 if is_left else self.furthest - step - rival
        return _Start(step, lost, is_promised)

    def _lagged_since(self, step: int, view: ViewId | None = None) -> bool:
        """Whether guardians lagged where these steps were committed: their views said so.

        What a sleeper commits alone in a rival of `view` counts for nothing: the steps that `view`
        repeats were committed before both. A view between the two may also have made the first of
        the steps anew. If `view` repeats that step, that view does not count either: the others had
        been given up before it.
        """
        made = self._made_since(step)
        rivals = {it for views in made for it in views if view and self._are_rivals(it, view)}
        counted = [[it for it in views if it not in rivals] or views for views in made]
        if view and counted and len(counted[0]) > 1 and not self._lags(counted[0][-1:]):
            counted[0] = counted[0][:-1]
        return all(self._lags(views[-1:]) for views in counted if views)

    def _made_since(self, step: int) -> list[list[ViewId]]:
        """The views in which each step from this one on was committed, in order."""
        return [self._committed_in.get(n, []) for n in range(step, self.furthest)]

    def _are_rivals(self, rival: ViewId, view: ViewId) -> bool:
        """Whether a swarm has split, so that `view` need not follow `rival`. It has if each part
        has made a view of one number, before or after the rival. It also has if the rival holds no
        more of those who were together than `view` does."""
        theirs, ours = self._line_of(rival), self._line_of(view)
        numbers = {it.number: it for it in ours}
        after = [it for it in self.views if it.number > rival.number and rival in self._line_of(it)]
        if any(numbers.get(it.number, it) != it for it in (*theirs, *after)):
            return True
        together = next((it for it in ours if it in theirs), None)
        if together in (None, rival, view) or together not in self.views:
            return False
        before = set(self.views[together].member_ids)
        in_rival, in_view = (len(before & {*self.views[it].member_ids}) for it in (rival, view))
        return in_rival <= in_view

    def _line_of(self, view: ViewId) -> list[ViewId]:
        """The view and those that it follows, the newest first."""
        line = [view]
        while view in self.views and self.views[view].snapshot.previous.number < view.number:
            view = self.views[view].snapshot.previous
            line.append(view)
        return line

    def _lags(self, views: Sequence[ViewId]) -> bool:
        return all(self.views[view].cut_pace is not None for view in views)

    @property
    def may_go_back_to_cut(self) -> bool:
        """Whether all steps since the newest whole cut may be repeated, should layers be lost."""
        return self._lagged_since(self.whole_cut)

    def note_whole(self, step: int) -> None:
        """Note that a member knows the cut of this step to be whole."""
        self.cut_count += step > self.whole_cut
        self.whole_cut = max(self.whole_cut, step)

    def has_committed(self, view: ViewId) -> bool:
        """Whether anybody has committed a step of this view."""
        return view in self._starts

    def leads_to(self, name: str, view: ViewId, step: int, lineage: str) -> None:
        """All that commit a step of a view, or roll it forward, come to one lineage."""
        if self._lineages.setdefault((view, step), lineage) != lineage:
            raise Violation(f"{name} commits step {step} of view {view} on another lineage")

    def lineage_after(self, view: ViewId, step: int) -> str | None:
        """The lineage to which a step of a view has led; None if nobody knows its outcome."""
        return self._lineages.get((view, step))

    def commits_step(self, name: str, view: ViewId, outcome: StepOutcome, lineage: str) -> None:
        """A step of a view has one outcome and one lineage, and the loss of an undisturbed run."""
        step = outcome.step
        if self._outcomes.setdefault((view, step), outcome) != outcome:
            raise Violation(f"{name} commits step {step} of view {view} with another outcome")
        self.leads_to(name, view, step, lineage)
        if outcome.token_count != self.microbatch_count:
            raise Violation(
                f"{name} commits step {step} with {outcome.token_count} of "
                f"{self.microbatch_count} samples"
            )
        expected = loss_sum(step, self.microbatch_count) / self.microbatch_count
        if outcome.loss != expected:
            raise Violation(f"step {step} has loss {outcome.loss}, undisturbed {expected}")
        self._check_start(name, view, step)
        self.commits[step] = view
        self._committed_in.setdefault(step, []).append(view)
        self.commit_count += 1
        self.furthest = max(self.furthest, step + 1)

    def applies(self, name: str, layer: int, state: HashState, gradient: Gradient | None) -> None:
        """Each sample counts once, and was computed on the very state that it changes."""
        where = f"{name} at layer {layer}, step {state.version}"
        if gradient is None:
            raise Violation(f"{where}: committed without a reduced gradient")
        if gradient.microbatches != tuple(range(self.microbatch_count)):
            raise Violation(f"{where}: samples {gradient.microbatches}")
        if gradient.base != state.value:
            raise Violation(f"{where}: gradient of another state")

    def holds(self, name: str, states: Mapping[int, HashState]) -> None:
        """Every state is that of an undisturbed run."""
        for layer, state in states.items():
            if state != true_state(state.version, self.microbatch_count):
                raise Violation(f"{name} has a wrong state of layer {layer} at {state.version}")
