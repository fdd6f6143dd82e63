"""The plan: who holds which layers, in which pipeline, for how many microbatches."""

import msgspec

from p2p_dtfm.core.canonical import digest


class Stage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One peer's contiguous layers `first_layer .. end_layer - 1` in a pipeline."""

    peer_id: str
    first_layer: int
    end_layer: int
    in_flight: int
    """Microbatches between their forward and their backward here, at most."""

    @property
    def layers(self) -> range:
        return range(self.first_layer, self.end_layer)


class Pipeline(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Stages that together hold all layers, and the microbatches of a step that they compute."""

    stages: tuple[Stage, ...]
    first_microbatch: int
    microbatch_count: int

    @property
    def microbatches(self) -> range:
        return range(self.first_microbatch, self.first_microbatch + self.microbatch_count)


class Segment(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A maximal layer range held by one set of peers: the unit of gradient reduction."""

    first_layer: int
    end_layer: int
    holders: tuple[str, ...]
    """In pipeline order, which is the order of every sum."""

    @property
    def layers(self) -> range:
        return range(self.first_layer, self.end_layer)


class Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="plan"):
    """A pure function of a snapshot."""

    pipelines: tuple[Pipeline, ...]
    spares: tuple[str, ...]
    predicted_step_ns: int

    def digest(self) -> str:
        return digest(self)

    def place_of(self, peer_id: str) -> tuple[int, int] | None:
        """(pipeline, position) of a peer, or None for a spare."""
        for number, pipeline in enumerate(self.pipelines):
            for position, stage in enumerate(pipeline.stages):
                if stage.peer_id == peer_id:
                    return number, position
        return None

    def stage_of(self, peer_id: str) -> Stage | None:
        place = self.place_of(peer_id)
        return None if place is None else self.pipelines[place[0]].stages[place[1]]

    def layers_of(self, peer_id: str) -> range:
        stage = self.stage_of(peer_id)
        return range(0) if stage is None else stage.layers

    def stage_holders(self) -> tuple[str, ...]:
        """Every peer that has a stage, sorted: those whose Prepared a step needs."""
        return tuple(sorted(s.peer_id for p in self.pipelines for s in p.stages))

    def holders(self, layer: int) -> tuple[str, ...]:
        """The holders of a layer, in pipeline order."""
        return tuple(
            stage.peer_id
            for pipeline in self.pipelines
            for stage in pipeline.stages
            if layer in stage.layers
        )

    def segments(self) -> tuple[Segment, ...]:
        """All layers, cut wherever the set of holders changes."""
        layer_count = self.pipelines[0].stages[-1].end_layer
        segments: list[Segment] = []
        for layer in range(layer_count):
            holders = self.holders(layer)
            if segments and segments[-1].holders == holders:
                segments[-1] = msgspec.structs.replace(segments[-1], end_layer=layer + 1)
            else:
                segments.append(Segment(layer, layer + 1, holders))
        return tuple(segments)


class NoPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="no_plan"):
    """Why the members of a snapshot cannot train, and what would help."""

    reason: str
    missing_bytes: int = 0

    def digest(self) -> str:
        return digest(self)


def check_plan(plan: Plan, layer_count: int, microbatch_count: int, members: set[str]) -> None:
    """Assert what every plan must satisfy; a violation is a bug of the planner."""
    seen: list[str] = list(plan.spares)
    next_microbatch = 0
    for pipeline in plan.pipelines:
        assert pipeline.stages, "a pipeline needs a stage"
        assert pipeline.first_microbatch == next_microbatch, "microbatches must be contiguous"
        assert pipeline.microbatch_count > 0, "a pipeline without work holds peers for nothing"
        next_microbatch += pipeline.microbatch_count
        next_layer = 0
        for stage in pipeline.stages:
            assert stage.first_layer == next_layer < stage.end_layer, "layers must be contiguous"
            assert stage.in_flight >= 1, "a stage needs one microbatch in flight"
            next_layer = stage.end_layer
            seen.append(stage.peer_id)
        assert next_layer == layer_count, "a pipeline must hold every layer"
    assert next_microbatch == microbatch_count, "every microbatch needs a pipeline"
    assert sorted(seen) == sorted(members), "each member has one place"
