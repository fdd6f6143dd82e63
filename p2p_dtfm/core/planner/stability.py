"""Whether a better plan is worth leaving the present one for.

A plan that moves layers costs time and risk, and measurements are noisy: with every figure 5% off,
another plan may seem up to a tenth better than it is. So the gain, counted over `HORIZON_STEPS`
steps, must exceed the time in which the state moves. It must also exceed the noise: a tenth of a
step if any stage-holder gets other layers or none, and a fiftieth if spares are only added. Where
steps were measured under both plans it is a twentieth, so that a plan whose gain does not come is
left again. To deal microbatches anew moves no state; that is done when a step gets shorter by a
twentieth. Otherwise a plan that moves nobody is the present one to the byte.

While states move, steps go on, and a peer that fetches a layer gets its gradients of each step as
well. Where these alone would fill the line, the states never arrive, and what is sent of them slows
down those that train. Such a plan never pays.

After a failure all stand still, and wait for whatever moves. Then the plan is the one with which
the next step ends first. A better one follows, for which states move while steps go on.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum, auto
from itertools import pairwise

import msgspec

from p2p_dtfm.core.cost_model.costs import PlacementCost, StepModel
from p2p_dtfm.core.cost_model.pipeline_cost import PipelineCost
from p2p_dtfm.core.cost_model.tables.layer_tables import LayerBytes
from p2p_dtfm.core.cost_model.tables.link_tables import duration_ns
from p2p_dtfm.core.planner.search import rank
from p2p_dtfm.core.protocol.measured_plans import PlanShape
from p2p_dtfm.core.protocol.plan import Pipeline, Plan, Stage
from p2p_dtfm.core.units import SECOND_NS

HORIZON_STEPS = 100
NOISE_DIVISOR = 10
ADDING_DIVISOR = 50
DEALING_DIVISOR = 20
TRIED_DIVISOR = 20
FOLLOWED_SHARE = 2
"""While states move, gradients may travel for one part in so many of a step's time."""
HAND_OVER_NS = SECOND_NS
"""Time to ask for states, and to write, check and read them, besides the time on the way."""
WORTH_A_VIEW_NS = 2 * HAND_OVER_NS
"""To go on sooner by less is not worth a second view, for which all peers plan once more."""

_Fixed = tuple[tuple[int, ...], tuple[int, ...]]
"""The peers of a pipeline, and its cuts as they are in force."""


class WhyNot(Enum):
    """Why a plan that is faster is not the one in force."""

    LITTLE = auto()
    """It is faster by too little."""
    LINE = auto()
    """The peer's line is too slow for the states that it would get."""
    MOVES = auto()
    """States of others would move for too long."""
    UNSEEN = auto()
    """Nothing stands against it, but no search has come to it."""


@dataclass(frozen=True, slots=True)
class PlanChoice:
    """A candidate, and what leaving the present plan for it costs."""

    cost: PlacementCost
    move_ns: int
    """Time until states have moved, if nothing else is sent."""
    follow_ns: int
    """Time until the gradients of one step have followed them."""
    moves: bool
    """Whether any stage-holder gets other layers."""
    stay: frozenset[int]
    """Peers that have the same layers as before."""
    step_ns: int
    """A step as it was measured, or else as predicted."""
    is_tried: bool
    """Whether steps were measured under this plan."""

    @property
    def horizon_ns(self) -> int:
        return HORIZON_STEPS * self.step_ns + self.move_ns

    def only_adds(self, base: "PlanChoice") -> bool:
        """Whether nobody gets other layers, and all peers that stay in `base` stay here."""
        return not self.moves and base.stay <= self.stay

    def can_follow(self, step_ns: int) -> bool:
        """Whether states arrive while others go on with steps of this length."""
        return self.follow_ns * FOLLOWED_SHARE <= step_ns


class PresentPlan:
    """The plan in force, seen from a new snapshot's problem."""

    def __init__(
        self,
        model: StepModel,
        plan: Plan,
        states: dict[str, set[int]] | None = None,
        measured: dict[PlanShape, int] | None = None,
    ) -> None:
        """`states`: the layers that each peer has, where all stand still. Without it steps go on,
        and each peer has the layers of its stage. `measured`: how long steps took under plans that
        were tried."""
        self.measured = measured or {}
        self._steps_go_on = states is None
        self.model = model
        self.problem = model.problem
        self.numbers = {peer: at for at, peer in enumerate(self.problem.peer_ids)}
        self.plan = plan = plan.vacated()
        self.held = {
            self.numbers[stage.peer_id]: range(stage.first_layer, stage.end_layer)
            for pipeline in plan.pipelines
            for stage in pipeline.stages
            if stage.peer_id in self.numbers
        }
        self.states: dict[int, frozenset[int]] = {
            number: frozenset(layers) for number, layers in self.held.items()
        }
        if states is not None:
            self.states = {
                self.numbers[peer]: frozenset(layers)
                for peer, layers in sorted(states.items())
                if peer in self.numbers
            }
        fits = plan.pipelines[0].stages[-1].end_layer == self.problem.layer_count
        self.pipelines = plan.pipelines if fits else ()
        self._off = self._how_far_off()
        self._off_alone = self._how_far_off_alone() if self._off else None

    def placement(self) -> tuple[tuple[int, ...], ...]:
        """The present pipelines without peers that are gone: where a search may begin."""
        left = (
            tuple(self.numbers[s.peer_id] for s in p.stages if s.peer_id in self.numbers)
            for p in self.pipelines
        )
        return tuple(peers for peers in left if peers)

    def choose(self, found: PlacementCost) -> PlacementCost:
        """`found`, or a plan closer to the present one, if that is the better bargain."""
        kept = [self.choice(cost) for cost in self._kept()]
        rival = self.choice(found)
        if not kept:
            return min([rival, *map(self.choice, self._left())], key=_bargain).cost
        base = min(kept, key=_bargain)
        grown = [self.choice(cost) for cost in self._others(base)]
        worthwhile = [c for c in (rival, *grown) if _pays(c, base) and self._arrives(c, base)]
        return min([base, *worthwhile], key=_bargain).cost

    def _arrives(self, choice: PlanChoice, base: PlanChoice) -> bool:
        return not self._steps_go_on or choice.can_follow(base.step_ns)

    def at_once(self, wanted: PlacementCost) -> PlacementCost:
        """`wanted`, or the plan with which a swarm that stands still ends its next step sooner."""
        offers = [*self._left(), *self._kept(), *self._joined()]
        first = min(map(self.choice, offers), key=_next_step_first, default=None)
        rival = self.choice(wanted)
        if first is None or _next_step_ns(first) + WORTH_A_VIEW_NS > _next_step_ns(rival):
            return wanted
        return first.cost

    def unchanged(self, chosen: PlacementCost) -> Plan | None:
        """The present plan, if `chosen` moves nobody and hardly gains by its microbatches.

        Only the spares and the codecs of boundaries may differ.
        """
        timed = dict(zip(chosen.placement, chosen.pipelines, strict=True))
        whole = self._whole()
        if len(whole) < len(self.pipelines) or dict(whole) != {p: c.cuts for p, c in timed.items()}:
            return None
        counts = [pipeline.microbatch_count for pipeline in self.pipelines]
        stages = [stage for pipeline in self.pipelines for stage in pipeline.stages]
        if sum(counts) != self.problem.step.microbatch_count or not all(map(self._fits, stages)):
            return None
        placement = tuple(peers for peers, _ in whole)
        as_dealt = self.model.dealt(placement, [timed[p] for p in placement], tuple(counts))
        if (as_dealt.step_ns - chosen.step_ns) * DEALING_DIVISOR > as_dealt.step_ns:
            return None
        used = {stage.peer_id for stage in stages}
        spares = {*self.problem.peer_ids, *self.problem.idle} - used
        coded = tuple(
            msgspec.structs.replace(pipeline, codecs=timed[peers].codecs_of(self.problem))
            for pipeline, peers in zip(self.pipelines, placement, strict=True)
        )
        return msgspec.structs.replace(
            self.plan, pipelines=coded, spares=tuple(sorted(spares)), provisional=False
        )

    def _fits(self, stage: Stage) -> bool:
        """Whether the peer still has memory for what it keeps in flight."""
        peer = self.numbers[stage.peer_id]
        pipelines = self.model.pipelines_in(len(self.pipelines))
        room = pipelines.room(peer, stage.first_layer, stage.end_layer)
        return stage.in_flight <= room

    def _left(self) -> Iterator[PlacementCost]:
        """The present pipelines without peers that are gone, their layers cut anew."""
        left = self.placement()
        cost = self.model.cost(left) if left else None
        if cost is not None:
            yield cost

    def _others(self, base: PlanChoice) -> Iterator[PlacementCost]:
        """Plans that may be better than the present one, besides what a search finds."""
        yield from self._grown(base.cost)
        yield from self._tried()
        if self._off is not None:
            yield from self._alone()

    def _alone(self) -> Iterator[PlacementCost]:
        """Each peer by itself: a swarm must not be slower than its best member."""
        alone = (self.model.cost(((peer,),)) for peer in range(self.problem.peer_count)[:64])
        return (cost for cost in alone if cost is not None)

    def _tried(self) -> Iterator[PlacementCost]:
        """Plans that were measured, if all their stage-holders are still here."""
        for shape in self.measured:
            if len(shape) > self.problem.step.microbatch_count:
                continue
            if all(peer in self.numbers for peers, _ in shape for peer in peers):
                ends = {cuts[-1] for _, cuts in shape}
                fixed = [(tuple(self.numbers[p] for p in peers), cuts) for peers, cuts in shape]
                cost = self._cost(fixed) if ends == {self.problem.layer_count} else None
                if cost is not None:
                    yield cost

    def _how_far_off(self) -> tuple[int, int] | None:
        """(measured, predicted) of the plan in force, where it takes longer than predicted."""
        whole = self._whole()
        cost = self._cost(whole) if self.measured and len(whole) == len(self.pipelines) else None
        found = None if cost is None else self.measured.get(self._shape(cost))
        if cost is None or found is None or found <= cost.step_ns:
            return None
        return found, cost.step_ns

    def _how_far_off_alone(self) -> tuple[int, int] | None:
        """The same for peers that were tried alone: the pair that is farthest off."""
        alone = [cost for cost in self._tried() if cost.stage_count == 1]
        # a plan of which only one pipeline gets work is another plan than was tried
        times = [(self.measured.get(self._shape(cost), 0), cost.step_ns) for cost in alone]
        late = [(took, planned) for took, planned in times if took > planned]
        return max(late, key=lambda pair: (pair[0] * 1000 // max(1, pair[1]), pair), default=None)

    def _shape(self, cost: PlacementCost) -> PlanShape:
        ids = self.problem.peer_ids
        pairs = zip(cost.placement, cost.pipelines, strict=True)
        return tuple(sorted((tuple(ids[p] for p in peers), c.cuts) for peers, c in pairs))

    def _step_ns(self, cost: PlacementCost) -> int:
        """A step as measured. A plan that was never tried is taken to be as far off its prediction
        as the plan in force. But if that plan has links, a peer alone, which has none, is taken to
        be only as far off as others alone."""
        found = self.measured.get(self._shape(cost)) if self.measured else None
        if found is not None:
            return found
        stages = sum(len(pipeline.stages) for pipeline in self.pipelines)
        off = self._off_alone if cost.stage_count == 1 < stages else self._off
        if off is None:
            return cost.step_ns
        measured_ns, predicted_ns = off
        return -(-cost.step_ns * measured_ns // max(1, predicted_ns))

    def _kept(self) -> Iterator[PlacementCost]:
        """The present pipelines that still stand; then the same with a broken one in addition, in
        which a spare takes the lost place."""
        whole = self._whole()
        if whole:
            cost = self._cost(whole)
            if cost is not None:
                yield cost
        if len(whole) == len(self.pipelines):
            return
        for spare in range(self.problem.peer_count):
            if spare not in self.held:
                mended = [
                    fixed
                    for p in self.pipelines
                    if self._fixed(p, None) is None and (fixed := self._fixed(p, spare)) is not None
                ]
                cost = self._cost([*whole, *mended[:1]]) if mended else None
                if cost is not None:
                    yield cost

    def _whole(self) -> list[_Fixed]:
        """The present pipelines of which nobody is gone."""
        every = (self._fixed(pipeline, None) for pipeline in self.pipelines)
        return [fixed for fixed in every if fixed is not None]

    def _joined(self) -> Iterator[PlacementCost]:
        """The present pipelines, with the layers of each lost peer given to the stage before it, or
        to the stage after it."""
        for step in (1, -1):
            fixed = [closed for p in self.pipelines if (closed := self._closed(p, step))]
            cost = self._cost(fixed) if fixed else None
            if cost is not None:
                yield cost

    def _closed(self, pipeline: Pipeline, step: int) -> _Fixed | None:
        """A pipeline whose gaps are closed by those on their left (step 1) or right (-1)."""
        stages = [stage for stage in pipeline.stages if stage.peer_id in self.numbers]
        if not stages:
            return None
        inner = [s.first_layer for s in stages[1:]] if step > 0 else [s.end_layer for s in stages]
        cuts = (0, *inner[: len(stages) - 1], pipeline.stages[-1].end_layer)
        return tuple(self.numbers[stage.peer_id] for stage in stages), cuts

    def _grown(self, base: PlacementCost) -> Iterator[PlacementCost]:
        """`base` with one more pipeline of peers that have no stage."""
        used = {peer for peers in base.placement for peer in peers}
        spares = [peer for peer in range(self.problem.peer_count) if peer not in used]
        fixed = [(p, c.cuts) for p, c in zip(base.placement, base.pipelines, strict=True)]
        offers: list[tuple[int, ...]] = [(spare,) for spare in spares[:64]]
        offers += [tuple(spares[:count]) for count in range(2, min(len(spares), 16) + 1)]
        for peers in offers:
            added, _ = self.model.pipelines_in(1 + len(fixed)).cost(peers)
            cost = None if added is None else self._cost([*fixed, (peers, added.cuts)])
            if cost is not None:
                yield cost

    def _fixed(self, pipeline: Pipeline, spare: int | None) -> _Fixed | None:
        """Peers and cuts of a pipeline; one missing peer is replaced by `spare`."""
        peers: list[int] = []
        for stage in pipeline.stages:
            number = self.numbers.get(stage.peer_id, spare)
            if number is None or number in peers:
                return None
            peers.append(number)
        cuts = (0, *(stage.end_layer for stage in pipeline.stages))
        return tuple(peers), cuts

    def _cost(self, fixed: list[_Fixed]) -> PlacementCost | None:
        timed: list[PipelineCost] = []
        for peers, cuts in fixed:
            cost = self.model.pipelines_in(len(fixed)).time_fixed(peers, cuts)
            if cost is None:
                return None
            timed.append(cost)
        return self.model.combine(tuple(peers for peers, _ in fixed), timed, None)

    def choice(self, cost: PlacementCost) -> PlanChoice:
        """A candidate with what it would take to get there."""
        move_ns, follow_ns = 0, 0
        stay: set[int] = set()
        moves = False
        is_tried = self._shape(cost) in self.measured
        for peer, layers in _placed(cost):
            before = self.held.get(peer, range(0))
            new = self._new_to(peer, layers)
            fetched_bytes = sum(size.fetched_bytes for size in new)
            followed_bytes = sum(size.followed_bytes for size in new)
            move_ns = max(move_ns, self._sent_ns(peer, fetched_bytes))
            follow_ns = max(follow_ns, self._sent_ns(peer, followed_bytes))
            moves |= bool(before) and layers != before
            if layers == before:
                stay.add(peer)
        step_ns = self._step_ns(cost)
        return PlanChoice(cost, move_ns, follow_ns, moves, frozenset(stay), step_ns, is_tried)

    def fetch_ns(self, peer: int, cost: PlacementCost) -> int:
        """Time until this peer has the states of what it would hold."""
        layers = next((it for each, it in _placed(cost) if each == peer), range(0))
        return self._sent_ns(peer, sum(size.fetched_bytes for size in self._new_to(peer, layers)))

    def _new_to(self, peer: int, layers: range) -> list[LayerBytes]:
        """The layers, of these, of which the peer has no state."""
        has = self.states.get(peer, ())
        return [self.problem.layers.of(layer) for layer in layers if layer not in has]

    def _sent_ns(self, peer: int, size: int) -> int:
        """Time for so many bytes from the peer with states that has the best link to this one."""
        if size == 0:
            return 0
        rows = self.problem.links.bytes_per_s
        rates = [rows[donor][peer] for donor in sorted(self.states) if donor != peer]
        return duration_ns(size, max(rates)) if rates else 0


def _placed(cost: PlacementCost) -> Iterator[tuple[int, range]]:
    """Each peer with the layers that it has in a placement."""
    for peers, timed in zip(cost.placement, cost.pipelines, strict=True):
        for peer, (first, end) in zip(peers, pairwise(timed.cuts), strict=True):
            yield peer, range(first, end)


def why_not(
    model: StepModel, plan: Plan, cost: PlacementCost, peer: int, step_ns: int, other_ns: int
) -> WhyNot:
    """Why a plan whose steps take `step_ns` is not left for `cost`. Under that, steps would take
    `other_ns`, and `peer` would have a stage."""
    present = PresentPlan(model, plan)
    base = PlanChoice(cost, 0, 0, False, frozenset(present.held), step_ns, False)
    other = replace(present.choice(cost), step_ns=other_ns)
    if not _exceeds_noise(other, base):
        return WhyNot.LITTLE
    if other.horizon_ns < base.horizon_ns and other.can_follow(step_ns):
        return WhyNot.UNSEEN
    return WhyNot.LINE if present.fetch_ns(peer, cost) == other.move_ns else WhyNot.MOVES


def _next_step_first(choice: PlanChoice) -> tuple[int, object]:
    return _next_step_ns(choice), rank(choice.cost)


def _next_step_ns(choice: PlanChoice) -> int:
    """Time until the next step ends. First, all wait for peers that must fetch something."""
    wait_ns = choice.move_ns + HAND_OVER_NS if choice.move_ns else 0
    return wait_ns + choice.step_ns


def _bargain(choice: PlanChoice) -> tuple[int, object]:
    return choice.horizon_ns, rank(choice.cost)


def _pays(choice: PlanChoice, base: PlanChoice) -> bool:
    return _exceeds_noise(choice, base) and choice.horizon_ns < base.horizon_ns


def _exceeds_noise(choice: PlanChoice, base: PlanChoice) -> bool:
    divisor = TRIED_DIVISOR if choice.is_tried and base.is_tried else NOISE_DIVISOR
    if choice.only_adds(base):
        divisor = ADDING_DIVISOR
    return (base.step_ns - choice.step_ns) * divisor > base.step_ns
