"""When replicas stand in for a lost stage-holder, and when the planner's plan is better."""

import msgspec
import pytest

from p2p_dtfm.core.cost_model.links.swarm_links import SwarmLinks
from p2p_dtfm.core.planner.planner import fixed_plan
from p2p_dtfm.core.protocol.plan import Pipeline, Plan, Stage
from p2p_dtfm.core.protocol.records import Intent
from p2p_dtfm.core.protocol.snapshot import HeldLayer, Snapshot
from p2p_dtfm.core.recovery.partial_replay import PartialReplay, replay_of
from p2p_dtfm.core.recovery.stand_in_plan import with_stand_ins
from tests.core.planning import Peer, name_of, snapshot, workload
from tests.core.test_partial_replay import STEP, TARGET, brings

BLOCKS, MICROBATCHES = 6, 8
WORK = workload(BLOCKS, MICROBATCHES)


class Failure:
    """Like pipelines of like stages in the middle of a step, and the stage-holders that are
    lost."""

    def __init__(
        self, pipelines: int, stages: int, lost: set[int], peers: list[Peer] | None = None
    ) -> None:
        peers = peers or [Peer()] * (pipelines * stages)
        before = snapshot(peers, WORK)
        self.plan = fixed_plan(before, (stages,) * pipelines)
        self.lost = {name_of(number) for number in lost}
        self.held = {
            s.peer_id: set(s.layers)
            for p in self.plan.pipelines
            for s in p.stages
            if s.peer_id not in self.lost
        }
        self.records = tuple(r for r in before.records if r.peer_id not in self.lost)
        self.begun = {
            s.peer_id: (p.microbatches[: p.microbatch_count // 2], 1)
            for p in self.plan.pipelines
            for s in p.stages
        }

    @property
    def snapshot(self) -> Snapshot:
        held = sorted(HeldLayer(p, n, STEP) for p, layers in self.held.items() for n in layers)
        before = snapshot([], WORK, present=self.plan)
        return msgspec.structs.replace(
            before, records=self.records, planned=False, step=STEP, held=tuple(held)
        )

    def parts(self) -> list:
        names = [record.peer_id for record in self.records]
        return [brings(n, self.plan, *self.begun[n]) for n in names if n in self.begun]

    def chosen(self, planned: Plan) -> tuple[Plan, PartialReplay | None]:
        plan = with_stand_ins(self.snapshot, planned, TARGET, self.parts())
        return plan, replay_of(plan, TARGET, self.parts())

    def closed(self) -> Plan:
        """The plan of the whole pipelines alone."""
        whole = [
            pipeline.stages
            for pipeline in self.plan.pipelines
            if not self.lost & {stage.peer_id for stage in pipeline.stages}
        ]
        ends = [MICROBATCHES * (n + 1) // len(whole) for n in range(len(whole))]
        pipelines = tuple(
            Pipeline(stages, first, end - first)
            for stages, first, end in zip(whole, [0, *ends], ends, strict=False)
        )
        return Plan(pipelines, (), 1)


def places(plan: Plan) -> list[list[str]]:
    """Peers by pipeline; those in brackets stand in."""
    return [
        [f"({s.peer_id[-1]})" if s.stands_in else s.peer_id[-1] for s in pipeline.stages]
        for pipeline in plan.pipelines
    ]


def test_where_it_takes_no_longer_a_replica_stands_in() -> None:
    """With two pipelines, one peer computes all that is left of the lost layers either way."""
    failure = Failure(2, 2, {1})
    plan, replay = failure.chosen(failure.closed())
    assert places(plan) == [["0", "(3)"], ["2", "3"]]
    assert [pipeline.microbatch_count for pipeline in plan.pipelines] == [4, 4]
    assert plan.spares == () and plan.stage_holders() == tuple(map(name_of, (0, 2, 3)))
    assert replay is not None and replay.stage(plan, name_of(0)).forwards == 2
    assert replay.kept_forwards == 6


def test_of_many_pipelines_the_others_are_sooner_done() -> None:
    """One stand-in would replay alone what three pipelines can share out."""
    failure = Failure(4, 2, {1})
    for pipeline in failure.plan.pipelines:
        for stage in pipeline.stages:
            failure.begun[stage.peer_id] = (pipeline.microbatches, 2)
    closed = failure.closed()
    assert failure.chosen(closed)[0] is closed


def test_rather_than_wait_for_states_a_replica_stands_in() -> None:
    failure = Failure(4, 2, {1})
    spread = fixed_plan(msgspec.structs.replace(failure.snapshot, planned=True), (1, 2, 2, 2))
    plan, _ = failure.chosen(spread)
    assert places(plan)[0] == ["0", "(3)"]
    counts = [pipeline.microbatch_count for pipeline in plan.pipelines]
    assert counts == [2, 1, 3, 2], "who stands in has about as much to do as others"


def test_where_nothing_is_begun_or_nothing_more_is_kept_the_planner_decides() -> None:
    failure = Failure(2, 2, {1})
    begun, failure.begun = failure.begun, {}
    assert failure.chosen(closed := failure.closed())[0] is closed
    failure.begun = {name_of(2): begun[name_of(2)], name_of(3): begun[name_of(3)]}
    assert failure.chosen(closed)[0] is closed, "the survivor of the broken one has done nothing"


def test_without_a_replica_that_may_and_can_there_are_no_stand_ins() -> None:
    both = Failure(2, 2, {1, 3})
    alone = fixed_plan(msgspec.structs.replace(both.snapshot, planned=True), (2,))
    assert both.chosen(alone)[0] is alone, "nobody has the layers"
    gone = Failure(2, 2, {0, 1})
    assert gone.chosen(closed := gone.closed())[0] is closed, "nobody has begun anything to keep"
    behind = Failure(2, 2, {1})
    behind.held[name_of(0)] = set()
    assert behind.chosen(closed := behind.closed())[0] is closed, "the survivor lacks its state"
    leaves = Failure(2, 2, {1})
    closed = leaves.closed()
    leaves.records = tuple(
        msgspec.structs.replace(r, intent=Intent.SPARE) if r.peer_id == name_of(0) else r
        for r in leaves.records
    )
    assert leaves.chosen(closed)[0] is closed, "who pauses computes nothing"


def test_the_fastest_replica_stands_in() -> None:
    failure = Failure(3, 2, {1}, [Peer()] * 5 + [Peer(block_ns=1_000_000)])
    plan, _ = failure.chosen(failure.closed())
    assert places(plan) == [["0", "(5)"], ["2", "3"], ["4", "5"]]


def test_where_a_stand_in_dies_others_take_both_its_places() -> None:
    failure = Failure(4, 2, {1})
    stage = msgspec.structs.replace(
        failure.plan.pipelines[0].stages[1], peer_id=name_of(3), stands_in=True
    )
    first = msgspec.structs.replace(
        failure.plan.pipelines[0], stages=(failure.plan.pipelines[0].stages[0], stage)
    )
    failure.plan = Plan((first, *failure.plan.pipelines[1:]), (), 1)
    spread = fixed_plan(msgspec.structs.replace(failure.snapshot, planned=True), (1, 2, 2, 2))
    plan, _ = failure.chosen(spread)
    assert places(plan)[:2] == [["0", "(3)"], ["2", "3"]], "it goes on"
    failure.lost.add(name_of(3))
    failure.records = tuple(r for r in failure.records if r.peer_id != name_of(3))
    failure.held.pop(name_of(3))
    spread = fixed_plan(msgspec.structs.replace(failure.snapshot, planned=True), (2, 2, 2))
    plan, replay = failure.chosen(spread)
    assert places(plan) == [["0", "(5)"], ["2", "(7)"], ["4", "5"], ["6", "7"]]
    assert replay is not None and replay.kept_forwards == 6
    vacated = plan.vacated()
    empty = [s for p in vacated.pipelines for s in p.stages if not s.peer_id]
    assert len(empty) == 2 and not vacated.stand_ins, "planning sees nobody in their places"


def test_a_place_that_is_its_peers_own_counts_once() -> None:
    plan = Plan(
        (
            Pipeline((Stage("a", 0, 4, 1), Stage("d", 4, 8, 1, stands_in=True)), 0, 4),
            Pipeline((Stage("c", 0, 4, 1), Stage("d", 4, 8, 1)), 4, 4),
        ),
        (),
        1,
    )
    assert plan.place_of("d") == (1, 1) and plan.places_of("d") == ((1, 1), (0, 1))
    assert plan.holders(5) == ("d",) and plan.stage_holders() == ("a", "c", "d")
    assert [segment.holders for segment in plan.segments()] == [("a", "c"), ("d",)]


def test_links_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand peers have a million links, and each survivor would look at all of them."""

    def look(*_: object) -> None:
        raise AssertionError("a link was looked at")

    failure = Failure(2, 2, {3})
    planned = failure.closed()
    monkeypatch.setattr(SwarmLinks, "way", look)
    plan, _ = failure.chosen(planned)
    assert plan.stand_ins
