"""Any pipeline, any limits, any order of arrival: no deadlock, and the order that sums rely on."""

import copy
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.core.schedule.pipeline_order import StageOrder
from p2p_dtfm.core.schedule.tasklets import Tasklet, TaskletKind

FORWARD, BACKWARD, WEIGHT = TaskletKind.FORWARD, TaskletKind.BACKWARD, TaskletKind.WEIGHT


class Line:
    """Stages connected by messages that arrive whenever, and in whatever order, `choose` says."""

    def __init__(self, microbatches: range, in_flight: list[int], splits: bool = False) -> None:
        last = len(in_flight) - 1
        self.microbatches = microbatches
        self.in_flight = in_flight
        self.stages = [
            StageOrder(
                microbatches,
                limit,
                makes_inputs=n == 0,
                makes_losses=n == last,
                splits=splits and n > 0,
            )
            for n, limit in enumerate(in_flight)
        ]
        self.ran: list[list[Tasklet]] = [[] for _ in in_flight]
        self.travelling: list[tuple[int, Tasklet]] = []

    def deliver(self, index: int) -> None:
        number, tasklet = self.travelling.pop(index)
        stage = self.stages[number]
        arrive = stage.input_arrived if tasklet.kind is FORWARD else stage.gradient_arrived
        arrive(tasklet.microbatch)

    def compute(self, number: int) -> bool:
        """Compute one tasklet of a stage, if it has one."""
        tasklet = self.stages[number].next()
        if tasklet is None:
            return False
        self.ran[number].append(tasklet)
        target = number + {FORWARD: 1, BACKWARD: -1, WEIGHT: len(self.stages)}[tasklet.kind]
        if 0 <= target < len(self.stages):
            self.travelling.append((target, tasklet))
        kinds = [item.kind for item in self.ran[number]]
        ended = WEIGHT if self.stages[number].splits else BACKWARD
        open_count = kinds.count(FORWARD) - kinds.count(ended)
        assert open_count == self.stages[number].held
        assert 0 <= open_count <= self.in_flight[number]
        return True

    def run(self, choose) -> None:
        while not all(stage.done for stage in self.stages):
            moves = [("deliver", n) for n in range(len(self.travelling))]
            moves += [("compute", n) for n, stage in enumerate(self.stages) if not stage.done]
            kind, number = moves[choose(len(moves))]
            if kind == "deliver":
                self.deliver(number)
            elif not self.compute(number) and not self.travelling:
                assert any(self.compute(n) for n in range(len(self.stages))), (
                    "deadlock: " + "; ".join(stage.waits_for for stage in self.stages)
                )


@settings(deadline=None)
@given(
    st.integers(0, 5),
    st.integers(1, 6),
    st.lists(st.integers(1, 5), min_size=1, max_size=5),
    st.booleans(),
    st.data(),
)
def test_every_pipeline_ends_with_each_microbatch_once_each_way(
    first: int, count: int, in_flight: list[int], splits: bool, data: st.DataObject
) -> None:
    random = data.draw(st.randoms(use_true_random=False))
    line = Line(range(first, first + count), in_flight, splits)
    line.run(random.randrange)
    for number, ran in enumerate(line.ran):
        for kind in (FORWARD, BACKWARD, WEIGHT)[: 3 if splits and number else 2]:
            numbers = [tasklet.microbatch for tasklet in ran if tasklet.kind is kind]
            assert numbers == list(line.microbatches), "in order: else sums differ between runs"
    assert not line.travelling


@given(st.integers(1, 8), st.integers(1, 4))
def test_a_single_stage_turns_each_microbatch_around_at_once(count: int, in_flight: int) -> None:
    line = Line(range(count), [in_flight])
    line.run(lambda moves: 0)
    assert line.ran[0] == [
        Tasklet(kind, number) for number in range(count) for kind in (FORWARD, BACKWARD)
    ]


def test_the_first_stage_fills_its_limit_and_then_waits() -> None:
    order = StageOrder(range(8), 3, makes_inputs=True, makes_losses=False)
    assert [order.next() for _ in range(4)] == [*(Tasklet(FORWARD, n) for n in range(3)), None]
    assert order.waits_for == "the gradient of microbatch 0 from the next stage"
    order.gradient_arrived(0)
    assert order.next() == Tasklet(BACKWARD, 0), "a backward that can run comes first"
    assert order.next() == Tasklet(FORWARD, 3)


def test_gradients_out_of_order_wait_for_their_turn() -> None:
    order = StageOrder(range(2), 2, makes_inputs=True, makes_losses=False)
    order.next(), order.next()
    order.gradient_arrived(1)
    assert order.next() is None
    order.gradient_arrived(0)
    assert [order.next(), order.next()] == [Tasklet(BACKWARD, 0), Tasklet(BACKWARD, 1)]
    assert order.done


def test_a_middle_stage_says_what_it_waits_for() -> None:
    order = StageOrder(range(4, 6), 1, makes_inputs=False, makes_losses=False)
    assert order.next() is None
    assert order.waits_for == "the activation of microbatch 4 from the stage before"


@pytest.mark.parametrize("number", [-1, 3, 6])
def test_an_activation_outside_the_range_is_a_fault(number: int) -> None:
    order = StageOrder(range(4, 6), 1, makes_inputs=False, makes_losses=False)
    with pytest.raises(PeerFault, match="not due"):
        order.input_arrived(number)


def test_an_activation_twice_is_a_fault_even_after_it_was_used() -> None:
    order = StageOrder(range(2), 1, makes_inputs=False, makes_losses=True)
    order.input_arrived(0)
    order.next(), order.next()
    with pytest.raises(PeerFault, match="not due"):
        order.input_arrived(0)


def test_whoever_makes_its_own_inputs_takes_none() -> None:
    order = StageOrder(range(2), 1, makes_inputs=True, makes_losses=False)
    with pytest.raises(PeerFault):
        order.input_arrived(1)


def test_a_gradient_is_due_between_its_forward_and_its_backward_once() -> None:
    order = StageOrder(range(2), 2, makes_inputs=True, makes_losses=False)
    with pytest.raises(PeerFault, match="not due"):
        order.gradient_arrived(0)
    order.next()
    order.gradient_arrived(0)
    with pytest.raises(PeerFault, match="not due"):
        order.gradient_arrived(0)
    order.next()
    with pytest.raises(PeerFault, match="not due"):
        order.gradient_arrived(0)


def test_a_faulty_arrival_changes_nothing() -> None:
    order = StageOrder(range(2), 1, makes_inputs=False, makes_losses=True)
    with pytest.raises(PeerFault):
        order.input_arrived(7)
    assert order.next() is None
    order.input_arrived(0)
    assert order.next() == Tasklet(FORWARD, 0)


def test_forwards_and_backwards_take_turns_where_both_can_run() -> None:
    """Otherwise a stage to which many gradients return at once starves the stages after it."""
    order = StageOrder(range(8), 6, makes_inputs=True, makes_losses=False)
    for _ in range(4):
        order.next()
    for number in range(4):
        order.gradient_arrived(number)
    kinds = [order.next() for _ in range(6)]
    assert [tasklet.kind for tasklet in kinds if tasklet] == [BACKWARD, FORWARD] * 3


def test_a_split_backward_s_rest_waits_until_nothing_else_can_run() -> None:
    order = StageOrder(range(3), 2, makes_inputs=False, makes_losses=True, splits=True)
    for number in range(3):
        order.input_arrived(number)
    ran = [order.next() for _ in range(6)]
    kinds = [(item.kind, item.microbatch) for item in ran if item]
    assert kinds[:4] == [(FORWARD, 0), (BACKWARD, 0), (FORWARD, 1), (BACKWARD, 1)]
    assert kinds[4:] == [(WEIGHT, 0), (FORWARD, 2)], "what is owed takes a place in flight"
    assert not order.only_weights_are_left
    assert order.next() == Tasklet(BACKWARD, 2) and order.only_weights_are_left
    assert order.held == 2 and not order.done
    assert order.take_weights() == range(1, 3)
    assert order.done and order.held == 0 and order.next() is None


@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 7),
    st.integers(1, 5),
    st.booleans(),
    st.booleans(),
    st.integers(0, 1 << 30),
)
def test_what_is_sure_to_come_next_comes_whatever_arrives(
    count: int, in_flight: int, makes_losses: bool, splits: bool, seed: int
) -> None:
    chance = random.Random(seed)
    order = StageOrder(
        range(count), in_flight, makes_inputs=False, makes_losses=makes_losses, splits=splits
    )
    coming = [(order.input_arrived, number) for number in range(count)]
    while not order.done:
        if order.only_weights_are_left:
            assert copy.deepcopy(order).next_for_sure() is None, "layer by layer, not one by one"
            order.take_weights()
            break
        sure = copy.deepcopy(order).next_for_sure()
        weight = copy.deepcopy(order).next_for_sure(only_weight=True)
        assert weight is None or (weight == sure and weight.kind is WEIGHT)
        for _ in range(chance.randint(0, len(coming))):
            arrive, number = coming.pop(chance.randrange(len(coming)))
            arrive(number)
        tasklet = order.next()
        assert sure is None or tasklet == sure
        if tasklet is not None and tasklet.kind is FORWARD and not makes_losses:
            coming.append((order.gradient_arrived, tasklet.microbatch))


def test_a_last_stage_that_holds_one_microbatch_is_always_sure() -> None:
    order = StageOrder(range(3), 1, makes_inputs=False, makes_losses=True, splits=True)
    for number in range(3):
        order.input_arrived(number)
    found = [order.next()]
    while (tasklet := order.next_for_sure()) is not None:
        found.append(tasklet)
    kinds = [FORWARD, BACKWARD, WEIGHT] * 3
    assert [item.kind for item in found if item is not None] == kinds[:-1], "the last by layers"
