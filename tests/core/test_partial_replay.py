"""What is kept of a failed step, so that each microbatch counts once at each layer."""

from dataclasses import dataclass

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from p2p_dtfm.core.messages.agreement_messages import Contribution, PendingStep
from p2p_dtfm.core.messages.stage_progress import StageProgress, as_runs, from_runs
from p2p_dtfm.core.protocol.plan import Pipeline, Plan, Stage, check_plan
from p2p_dtfm.core.protocol.signed import Signed
from p2p_dtfm.core.protocol.snapshot import Member
from p2p_dtfm.core.recovery.complete_steps import Target
from p2p_dtfm.core.recovery.partial_replay import (
    NOTHING,
    Kept,
    PartialReplay,
    StageReplay,
    replay_of,
    whole_step,
)

STEP, BASE = 5, "base"
TARGET = Target(STEP, BASE)
LAYERS = 4


def plan(*pipelines: tuple[int, str]) -> Plan:
    """A plan of pipelines given as (microbatches, names of stages in even cuts)."""
    built, first = [], 0
    for count, names in pipelines:
        cuts = [LAYERS * n // len(names) for n in range(len(names) + 1)]
        stages = tuple(Stage(p, cuts[n], cuts[n + 1], 2) for n, p in enumerate(names))
        built.append(Pipeline(stages, first, count))
        first += count
    return Plan(tuple(built), (), 0)


def brings(
    name: str,
    of: Plan,
    forwarded: range | tuple[int, ...],
    backwards: int,
    base: str = BASE,
    version: int = STEP,
) -> Contribution:
    layers = of.layers_of(name)
    progress = StageProgress(layers.start, layers.stop, as_runs(tuple(forwarded)), backwards)
    return Contribution(
        member=Member(name, 1),
        number=3,
        record=Signed(name, "", b"", b""),
        present=None,
        step=STEP,
        held=dict.fromkeys(layers, version),
        joiners=(),
        pending=PendingStep(STEP, base, (), (), progress),
    )


OLD = plan((4, "ab"), (4, "cd"))
WELL = [brings("a", OLD, range(3), 1), brings("c", OLD, range(4, 8), 3)]


def test_where_nobody_has_begun_all_is_to_do() -> None:
    assert replay_of(OLD, TARGET, []) is None
    assert replay_of(OLD, TARGET, [brings("a", OLD, (), 0)]) is None


def test_a_spare_replays_from_what_its_neighbours_have_kept() -> None:
    new = plan((4, "ax"), (4, "cd"))
    parts = [*WELL, brings("d", OLD, range(4, 8), 4)]
    replay = replay_of(new, TARGET, parts)
    assert replay is not None
    assert replay.stage(new, "a") == StageReplay((0, 1, 2, 3), 3, 1)
    assert replay.stage(new, "x") == StageReplay((0, 1, 2, 3), 0, 0, previous_has=frozenset({0}))
    assert replay.stage(new, "c") == StageReplay((4, 5, 6, 7), 4, 3, frozenset({4, 5, 6, 7}))
    assert replay.stage(new, "d") == StageReplay(
        (4, 5, 6, 7), 4, 4, previous_has=frozenset({4, 5, 6})
    )
    assert (replay.kept_forwards, replay.redone_forwards) == (11, 1), "b had one gradient sent back"
    assert replay.progress(new, "x") is None
    assert replay.progress(new, "a") == parts[0].pending.progress


def test_all_who_compute_the_same_layers_as_before_keep_all() -> None:
    parts = [*WELL, brings("b", OLD, range(2), 2), brings("d", OLD, range(4, 8), 4)]
    replay = replay_of(OLD, TARGET, parts)
    assert replay is not None and replay.redone_forwards == 0 and replay.kept_forwards == 13


def test_microbatches_of_a_lost_pipeline_go_to_the_one_that_stands() -> None:
    new = plan((8, "cd"))
    replay = replay_of(new, TARGET, [*WELL, brings("d", OLD, range(4, 7), 3)])
    assert replay is not None
    assert replay.pipelines[0].microbatches == (4, 5, 6, 7, 0, 1, 2, 3)
    assert replay.pipelines[0].kept == (Kept(4, 3), Kept(3, 3))
    assert replay.redone_forwards == 3, "what a had done is given up"


def test_a_replica_stands_in_beside_its_own_place() -> None:
    """b is lost: d first does what it has begun itself, then replays what a had of b's work."""
    new = with_stand_in(OLD, 0, 1, "d")
    replay = replay_of(new, TARGET, [*WELL, brings("d", OLD, range(4, 7), 3)])
    assert replay is not None
    assert replay.order == (4, 5, 6, 0, 1, 2, 3, 7)
    assert replay.stage(new, "d") == StageReplay(
        replay.order, 3, 3, previous_has=frozenset({4, 5, 6, 0}), stood_in=(frozenset(range(4)),)
    )
    assert replay.stage(new, "a") == StageReplay((0, 1, 2, 3), 3, 1)
    assert replay.stage(new, "c") == StageReplay((4, 5, 6, 7), 4, 3, next_has=frozenset({4, 5, 6}))
    assert (replay.kept_forwards, replay.redone_forwards) == (10, 1), "b had sent back one gradient"
    progress = replay.progress(new, "d")
    assert progress is not None and progress.forwarded == ((4, 3),)


def test_what_a_stand_in_has_of_both_pipelines_is_kept_when_a_frame_is_lost() -> None:
    new = with_stand_in(OLD, 0, 1, "d")
    merged = (4, 5, 6, 0, 1, 2, 7)
    parts = [brings("a", OLD, range(4), 3), brings("c", OLD, range(4, 8), 3)]
    replay = replay_of(new, TARGET, [*parts, brings("d", OLD, merged, 5)])
    assert replay is not None and replay.redone_forwards == 0 and replay.kept_forwards == 4 + 4 + 7
    assert replay.stage(new, "d") == StageReplay(
        (*merged, 3), 7, 5, previous_has=frozenset({4, 5, 6, 0, 1, 2}),
        stood_in=(frozenset(range(4)),),
    )  # fmt: skip
    assert replay.stage(new, "a").next_has == frozenset({0, 1, 2})


def test_a_whole_step_with_stand_ins_lets_both_pipelines_advance_alike() -> None:
    new = with_stand_in(plan((4, "ab"), (2, "cd")), 0, 1, "d")
    assert whole_step(new, "d").microbatches == (0, 4, 1, 2, 5, 3)
    assert whole_step(new, "a") == StageReplay((0, 1, 2, 3))


def with_stand_in(of: Plan, number: int, position: int, peer: str) -> Plan:
    pipelines = list(of.pipelines)
    stages = list(pipelines[number].stages)
    stages[position] = msgspec.structs.replace(stages[position], peer_id=peer, stands_in=True)
    pipelines[number] = msgspec.structs.replace(pipelines[number], stages=tuple(stages))
    return msgspec.structs.replace(of, pipelines=tuple(pipelines))


def test_other_layers_keep_nothing() -> None:
    new = plan((8, "abcd"))
    replay = replay_of(new, TARGET, [*WELL, brings("b", OLD, range(2), 2)])
    assert replay is not None
    assert replay.pipelines[0].kept == (NOTHING,) * 4
    assert replay.pipelines[0].microbatches == tuple(range(8))


def test_what_two_pipelines_have_begun_counts_for_one_of_them() -> None:
    """Each new pipeline has stages of both old ones; the old one with more to lose goes on."""
    new = plan((4, "ad"), (4, "cb"))
    parts = [*WELL, brings("b", OLD, range(2), 2), brings("d", OLD, range(4, 8), 4)]
    replay = replay_of(new, TARGET, parts)
    assert replay is not None
    assert replay.pipelines[0].kept == (NOTHING, Kept(4, 4))
    assert replay.pipelines[1].kept == (NOTHING, Kept(2, 2))
    assert replay.pipelines[0].microbatches == (4, 5, 6, 7)
    assert replay.pipelines[1].microbatches == (0, 1, 2, 3)


def test_a_backward_that_was_not_said_is_counted_in() -> None:
    """After two forwards that all have, a's next forward is of another microbatch, which may yet be
    in a's buffers."""
    long = brings("b", OLD, (0, 1, 5), 0)
    for backwards, kept in ((0, Kept(2, 0)), (1, Kept(2, 1)), (2, NOTHING)):
        short = brings("a", OLD, (0, 1, 2), backwards)
        replay = replay_of(OLD, TARGET, [short, msgspec.structs.replace(long)])
        assert replay is not None
        if replay.pipelines[0].microbatches[:3] == (0, 1, 5):
            assert replay.pipelines[0].kept[0] == kept
        else:
            assert replay.pipelines[0].kept[0].backwards == backwards


def test_claims_that_cannot_be_true_count_for_nothing() -> None:
    bad = [
        brings("a", OLD, range(3), 4),
        brings("a", OLD, (7, 8), 0),
        brings("a", OLD, (1, 1), 0),
        brings("a", OLD, range(3), 1, base="another"),
        brings("a", OLD, range(3), 1, version=STEP - 1),
    ]
    for part in bad:
        assert replay_of(OLD, TARGET, [part]) is None
    assert replay_of(OLD, Target(STEP + 1, BASE), WELL) is None, "the step was rolled forward"


@given(st.permutations(range(12)), st.integers(0, 12))
def test_runs_say_the_same(numbers: list[int], count: int) -> None:
    assert from_runs(as_runs(numbers[:count]), 12) == tuple(numbers[:count])
    assert from_runs(as_runs(range(13)), 12) is None
    assert from_runs(((0, 3), (2, 1)), 12) is None


@dataclass
class Machine:
    """A stage-holder that does exactly what the redo tells it."""

    layers: range
    forwarded: list[int]
    buffers: list[int]


def partitions(count: int) -> st.SearchStrategy[list[str]]:
    names = "abcdefgh"[:count]
    return st.permutations(names).flatmap(
        lambda order: st.lists(st.integers(1, 3), min_size=8, max_size=8).map(
            lambda sizes: cut("".join(order), sizes)
        )
    )


def cut(names: str, sizes: list[int]) -> list[str]:
    groups = []
    for size in sizes:
        if names:
            groups.append(names[:size])
            names = names[size:]
    return groups


def shared(groups: list[str], total: int = 12) -> Plan:
    ends = [total * (n + 1) // len(groups) for n in range(len(groups))]
    counts = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    return plan(*zip(counts, groups, strict=True))


@settings(max_examples=200, deadline=None)
@given(st.lists(partitions(8), min_size=2, max_size=4), st.data())
def test_whatever_fails_again_each_microbatch_counts_once_at_each_layer(
    views: list[list[str]], data: st.DataObject
) -> None:
    """One attempt after another fails, with other plans, peers that begin with nothing, and peers
    that stand in for others."""
    machines: dict[str, Machine] = {}
    replay: PartialReplay | None = None
    new = shared(views[0])
    for number, groups in enumerate(views):
        if not number or not data.draw(st.booleans(), label="the same plan again"):
            new = with_stand_ins(shared(groups), data)
        if number:
            replay = replay_of(new, TARGET, [said(name, machines[name], data) for name in machines])
        for name in new.stage_holders():
            mine = replay.stage(new, name) if replay is not None else None
            begin(machines, name, new, mine)
        last = number == len(views) - 1
        run(new, machines, replay, data if not last else None)
        lost = data.draw(st.sets(st.sampled_from("abcdefgh"), max_size=2)) if not last else ()
        for name in lost:
            machines.pop(name, None)
    for layer in range(LAYERS):
        counted = [n for name in new.holders(layer) for n in machines[name].buffers]
        assert sorted(counted) == list(range(12)), (layer, counted)


def with_stand_ins(of: Plan, data: st.DataObject) -> Plan:
    """Any replicas stand in for any others, far more of them than where few are lost."""
    gone, used = set[str](), set[str]()
    pipelines = []
    for pipeline in of.pipelines:
        stages = []
        for stage in pipeline.stages:
            own = (s for other in of.pipelines for s in other.stages if other is not pipeline)
            able = [s.peer_id for s in own if s.layers == stage.layers]
            able = [name for name in able if name not in gone | used]
            if stage.peer_id not in used and able and data.draw(st.booleans(), label="stood in"):
                gone.add(stage.peer_id)
                used.add(able[0])
                stage = msgspec.structs.replace(stage, peer_id=able[0], stands_in=True)
            stages.append(stage)
        pipelines.append(msgspec.structs.replace(pipeline, stages=tuple(stages)))
    plan = Plan(tuple(pipelines), tuple(sorted(gone)), 0)
    check_plan(plan, LAYERS, 12, {*plan.stage_holders(), *gone})
    return plan


def said(name: str, machine: Machine, data: st.DataObject) -> Contribution:
    """What this peer has done, possibly without its last backward or forward."""
    forwarded, backwards = list(machine.forwarded), len(machine.buffers)
    unsaid = data.draw(st.sampled_from(["", "forward", "backward"]))
    if unsaid == "backward" and backwards:
        backwards -= 1
    elif unsaid == "forward" and len(forwarded) > backwards:
        forwarded.pop()
    part = brings(name, plan((12, name)), forwarded, backwards)
    progress = msgspec.structs.replace(
        part.pending.progress,
        first_layer=machine.layers.start,
        end_layer=machine.layers.stop,
    )
    pending = msgspec.structs.replace(part.pending, progress=progress)
    return msgspec.structs.replace(part, pending=pending)


def begin(machines: dict[str, Machine], name: str, new: Plan, mine: StageReplay | None) -> None:
    if mine is None or not mine.forwards:
        machines[name] = Machine(new.layers_of(name), [], [])
        return
    machine = machines[name]
    assert machine.layers == new.layers_of(name)
    same = 0
    for had, due in zip(machine.forwarded, mine.microbatches, strict=False):
        if had != due:
            break
        same += 1
    assert max(mine.forwards, len(machine.buffers)) <= same and mine.backwards <= same
    machine.forwarded = machine.forwarded[:same]


def run(
    of: Plan, machines: dict[str, Machine], replay: PartialReplay | None, data: st.DataObject | None
) -> None:
    """Run forwards and backwards as far as `data` says, or to the end. Tensors come only from the
    peer that is to send them, and nobody holds more in flight than it may."""
    parts: dict[str, StageReplay] = {}
    for name in of.stage_holders():
        mine = replay.stage(of, name) if replay is not None else whole_step(of, name)
        assert mine is not None
        parts[name] = mine
    budget = data.draw(st.integers(0, 60)) if data is not None else 10**6
    while budget and (moves := possible(of, machines, parts)):
        name, forward = moves[0] if data is None else data.draw(st.sampled_from(moves))
        machine, due = machines[name], parts[name].microbatches
        if forward:
            machine.forwarded.append(due[len(machine.forwarded)])
        else:
            machine.buffers.append(due[len(machine.buffers)])
        budget -= 1
    if data is None:
        for name, part in parts.items():
            assert machines[name].buffers == list(part.microbatches), (name, part)


def possible(
    of: Plan, machines: dict[str, Machine], parts: dict[str, StageReplay]
) -> list[tuple[str, bool]]:
    moves = []
    for name, part in parts.items():
        machine, stage = machines[name], of.stage_of(name)
        assert stage is not None
        forwards, backwards = len(machine.forwarded), len(machine.buffers)
        if forwards < len(part.microbatches) and forwards - backwards < stage.in_flight:
            number = part.microbatches[forwards]
            before = neighbour(of, name, part.place(number), -1)
            sent = before is None or number in machines[before].forwarded
            if sent and (before is None or number not in parts[before].next_has):
                moves.append((name, True))
        if backwards < forwards:
            number = machine.forwarded[backwards]
            after = neighbour(of, name, part.place(number), 1)
            sent = after is None or number in machines[after].buffers
            if sent and (after is None or number not in parts[after].previous_has):
                moves.append((name, False))
    return moves


def neighbour(of: Plan, name: str, place: int, way: int) -> str | None:
    pipeline, position = of.places_of(name)[place]
    stages = of.pipelines[pipeline].stages
    return stages[position + way].peer_id if 0 <= position + way < len(stages) else None
