"""The plan: who holds which layers, in which pipeline, for how many microbatches."""

from collections.abc import Mapping
from functools import lru_cache

import msgspec

from p2p_dtfm.core.protocol.canonical import digest
from p2p_dtfm.core.protocol.run_spec import Codec

LONGEST_STEP_NS = (1 << 53) - 1
"""A hundred days: longer steps are not told apart. Members tell plans in what they sign, where no
number may be higher (`messages.message_bounds.NUMBER_LIMIT`). A plan with a longer step would get
all of them refused, and no view could come after it."""

LAYERS_LOST = "no member holds layers"
LEFT_TO_SOME = "(`privacy.ends`)"
ON_ONE_PEER = "on one peer; the largest of"
PLANNER_FAILS = "a fault of this program"
"""Words in the reasons why there is no plan, by which screens tell what helps. Members compare
reasons, so other words are another protocol."""


class Stage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One peer's contiguous layers `first_layer .. end_layer - 1` in a pipeline."""

    peer_id: str
    first_layer: int
    end_layer: int
    in_flight: int
    """At most so many microbatches are between their forward and their backward here."""
    stands_in: bool = False
    """Whether the peer stands in for a lost one. Its own place, with the same layers, is in another
    pipeline. It has one state, one gradient buffer and one `in_flight` for all its places."""

    @property
    def layers(self) -> range:
        return range(self.first_layer, self.end_layer)


class Pipeline(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Stages that together hold all layers, and the microbatches of a step that they compute."""

    stages: tuple[Stage, ...]
    first_microbatch: int
    microbatch_count: int
    codecs: tuple[tuple[Codec, Codec], ...] = ()
    """The codecs of each boundary in order: the activation's, and its gradient's. Empty where the
    run leaves no choice, or where stages stand in for others."""

    @property
    def microbatches(self) -> range:
        return range(self.first_microbatch, self.first_microbatch + self.microbatch_count)


class Segment(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A maximal layer range held by one set of peers: the unit of gradient reduction."""

    first_layer: int
    end_layer: int
    holders: tuple[str, ...]
    """The holders in pipeline order, which is the order of every sum."""

    @property
    def layers(self) -> range:
        return range(self.first_layer, self.end_layer)


class Plan(
    msgspec.Struct,
    frozen=True,
    forbid_unknown_fields=True,
    tag="plan",
    omit_defaults=True,
    cache_hash=True,
):
    """A pure function of a snapshot."""

    pipelines: tuple[Pipeline, ...]
    spares: tuple[str, ...]
    predicted_step_ns: int
    provisional: bool = False
    """Whether members plan anew once all are active. All stood still, so this is the plan with
    which they go on soonest; for a better one, states must move."""

    def digest(self) -> str:
        return digest(self)

    def place_of(self, peer_id: str) -> tuple[int, int] | None:
        """(pipeline, position) of a peer's own place, or None for a spare."""
        return next(iter(self.places_of(peer_id)), None)

    def places_of(self, peer_id: str) -> tuple[tuple[int, int], ...]:
        """(pipeline, position) of a peer's own place, then of those where it stands in."""
        return _places(self).get(peer_id, ())

    def covers(self, layer_count: int, microbatch_count: int) -> bool:
        """Whether this is a plan for so many layers, and so many microbatches in a step."""
        ends = {pipeline.stages[-1].end_layer for pipeline in self.pipelines}
        return self.microbatch_count == microbatch_count and ends == {layer_count}

    @property
    def microbatch_count(self) -> int:
        """Microbatches of a step."""
        return sum(pipeline.microbatch_count for pipeline in self.pipelines)

    @property
    def stand_ins(self) -> frozenset[str]:
        """Peers with more than one place."""
        return frozenset(s.peer_id for p in self.pipelines for s in p.stages if s.stands_in)

    def vacated(self) -> "Plan":
        """The plan with nobody where somebody stands in: what planning starts from."""
        if not self.stand_ins:
            return self
        pipelines = (
            msgspec.structs.replace(pipeline, stages=tuple(map(_vacated, pipeline.stages)))
            for pipeline in self.pipelines
        )
        return msgspec.structs.replace(self, pipelines=tuple(pipelines))

    def stage_of(self, peer_id: str) -> Stage | None:
        place = self.place_of(peer_id)
        return None if place is None else self.pipelines[place[0]].stages[place[1]]

    def layers_of(self, peer_id: str) -> range:
        stage = self.stage_of(peer_id)
        return range(0) if stage is None else stage.layers

    def stage_holders(self) -> tuple[str, ...]:
        """Every peer that has a stage, sorted: those whose Prepared a step needs."""
        stages = (stage for pipeline in self.pipelines for stage in pipeline.stages)
        return tuple(sorted(stage.peer_id for stage in stages if not stage.stands_in))

    def microbatches_of(self, segment: Segment) -> tuple[int, ...]:
        """How many microbatches each holder's part of the segment's gradient sums, in the order of
        the holders. A stand-in has those of two pipelines."""
        return tuple(
            sum(
                pipeline.microbatch_count
                for pipeline in self.pipelines
                for stage in pipeline.stages
                if stage.peer_id == holder and segment.first_layer in stage.layers
            )
            for holder in segment.holders
        )

    def holders(self, layer: int) -> tuple[str, ...]:
        """The holders of a layer, in pipeline order. A stand-in counts once, for its own place."""
        return tuple(
            stage.peer_id
            for pipeline in self.pipelines
            for stage in pipeline.stages
            if layer in stage.layers and not stage.stands_in
        )

    def segments(self) -> tuple[Segment, ...]:
        """All layers, cut wherever the set of holders changes."""
        return _segments(self)


@lru_cache(maxsize=64)
def _places(plan: Plan) -> Mapping[str, tuple[tuple[int, int], ...]]:
    """The places of each peer. They are asked for as often as segments."""
    found: dict[str, list[tuple[bool, int, int]]] = {}
    for number, pipeline in enumerate(plan.pipelines):
        for position, stage in enumerate(pipeline.stages):
            found.setdefault(stage.peer_id, []).append((stage.stands_in, number, position))
    return {
        peer_id: tuple((number, position) for _, number, position in sorted(places))
        for peer_id, places in found.items()
    }


@lru_cache(maxsize=64)
def _segments(plan: Plan) -> tuple[Segment, ...]:
    """The segments, which are asked for with each Prepared and each tensor, of few plans."""
    layer_count = plan.pipelines[0].stages[-1].end_layer
    segments: list[Segment] = []
    for layer in range(layer_count):
        holders = plan.holders(layer)
        if segments and segments[-1].holders == holders:
            segments[-1] = msgspec.structs.replace(segments[-1], end_layer=layer + 1)
        else:
            segments.append(Segment(layer, layer + 1, holders))
    return tuple(segments)


def _vacated(stage: Stage) -> Stage:
    nobody = Stage("", stage.first_layer, stage.end_layer, stage.in_flight)
    return nobody if stage.stands_in else stage


class NoPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="no_plan"):
    """Why the members of a snapshot cannot train, and what would help."""

    reason: str
    missing_bytes: int = 0

    def digest(self) -> str:
        return digest(self)


def check_plan(plan: Plan, layer_count: int, microbatch_count: int, members: set[str]) -> None:
    """Assert what every plan must satisfy; a violation is a bug of the planner."""
    wrong = flaw_of(plan, layer_count, microbatch_count)
    assert wrong is None, wrong
    assert set(plan.spares) | set(plan.stage_holders()) == members, "each member has one place"


def flaw_of(plan: Plan, layer_count: int, microbatch_count: int) -> str | None:
    """What is wrong with a plan for so many layers and microbatches; None where nothing is. The
    time depends on the number of stages alone, whatever numbers are in the plan."""
    own = {s.peer_id: s.layers for p in plan.pipelines for s in p.stages if not s.stands_in}
    next_microbatch = 0
    for pipeline in plan.pipelines:
        if pipeline.first_microbatch != next_microbatch:
            return "microbatches must be contiguous"
        if pipeline.microbatch_count <= 0:
            return "a pipeline without work holds peers for nothing"
        next_microbatch += pipeline.microbatch_count
        flaw = _flaw_of_stages(pipeline, layer_count, own)
        if flaw is not None:
            return flaw
    if next_microbatch != microbatch_count:
        return "every microbatch needs a pipeline"
    places = [*plan.spares, *plan.stage_holders()]
    return None if len(set(places)) == len(places) else "each member has one place"


def _flaw_of_stages(pipeline: Pipeline, layer_count: int, own: dict[str, range]) -> str | None:
    """`own`: the layers of each stage-holder's own place."""
    if not pipeline.stages:
        return "a pipeline needs a stage"
    next_layer = 0
    for stage in pipeline.stages:
        if not stage.first_layer == next_layer < stage.end_layer:
            return "layers must be contiguous"
        if stage.in_flight < 1:
            return "a stage needs one microbatch in flight"
        if stage.stands_in and own.get(stage.peer_id) != stage.layers:
            return "only a replica stands in"
        next_layer = stage.end_layer
    if next_layer != layer_count:
        return "a pipeline must hold every layer"
    if len(pipeline.codecs) not in (0, len(pipeline.stages) - 1):
        return "each boundary has its codecs, or none has"
    return None
