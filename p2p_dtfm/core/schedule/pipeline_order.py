"""Which tasklet a stage computes next: forwards and backwards in turn, with a planned number in
flight.

A stage holds at most `in_flight` microbatches between forward and backward, and takes turns between
the two (`tasklets`). Backwards run in the order of their microbatches, so that gradient sums are
the same in every run. If every limit is at least one, this order cannot deadlock: the last stage
always turns its oldest forward around. Where a stage splits its backwards, a microbatch counts as
held until its WEIGHT is done.
"""

from collections.abc import Container
from typing import NamedTuple

from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.core.schedule.tasklets import (
    BACKWARD,
    FORWARD,
    WEIGHT,
    Tasklet,
    TaskletKind,
    next_tasklet,
)


class Done(NamedTuple):
    """What is already done of a step that goes on: the forwards, backwards and weights of so many
    first microbatches. The next stage may have done the forwards of `forwards_next`."""

    forwards: int = 0
    backwards: int = 0
    weights: int = 0
    forwards_next: Container[int] = ()


NOTHING = Done()


class StageOrder:
    """The order of one stage. Inputs arrive in any order; `next` says what to compute now, or None
    to wait."""

    def __init__(
        self,
        microbatches: range,
        in_flight: int,
        *,
        makes_inputs: bool,
        makes_losses: bool,
        splits: bool = False,
        done: Done = NOTHING,
    ) -> None:
        """`done` may hold more than `in_flight` allows, as after a change of plan."""
        assert in_flight >= 1
        assert 0 <= done.weights <= done.backwards <= done.forwards <= len(microbatches)
        self.splits = splits
        self._microbatches = microbatches
        self._in_flight = in_flight
        self._makes_losses = makes_losses
        self._inputs = set(microbatches) if makes_inputs else set[int]()
        self._gradients = set[int]()
        self._next_forward = microbatches.start + done.forwards
        self._next_backward = microbatches.start + done.backwards
        self._next_weight = microbatches.start + done.weights
        self._done_next = done.forwards_next
        self._backward_was_last = False

    def input_arrived(self, microbatch: int) -> None:
        """The activation of `microbatch` is here. Raises `PeerFault` for one that is not due."""
        if microbatch not in self._microbatches or microbatch in self._inputs:
            raise PeerFault(f"activation of microbatch {microbatch}, which is not due")
        self._inputs.add(microbatch)

    def gradient_arrived(self, microbatch: int) -> None:
        """The output's gradient of `microbatch` is here. Raises `PeerFault` if it is not due."""
        is_forwarded = microbatch < self._next_forward or microbatch in self._done_next
        is_due = self._next_backward <= microbatch and is_forwarded
        if not is_due or microbatch in self._gradients:
            raise PeerFault(f"gradient of microbatch {microbatch}, which is not due")
        self._gradients.add(microbatch)

    def next(self) -> Tasklet | None:
        """Take the tasklet to compute now. None: wait for an arrival, or all is done."""
        return self._take(self._choice(self._forward_can_run, self._backward_can_run))

    def next_for_sure(self, *, only_weight: bool = False) -> Tasklet | None:
        """Take the next tasklet, if nothing that may still arrive can change which one it is. It
        can then be begun without asking again. With `only_weight`, take it only if it is a WEIGHT.
        """
        if self.only_weights_are_left:
            return None
        forward, backward = self._forward_can_run, self._backward_can_run
        choices = {
            self._choice(forward or another, backward or a_gradient)
            for another in (False, not self._no_forward_comes)
            for a_gradient in (False, not self._no_backward_comes)
        }
        kind = choices.pop()
        is_wanted = kind is WEIGHT or not only_weight
        return self._take(kind) if is_wanted and not choices else None

    def _choice(self, forward: bool, backward: bool) -> TaskletKind | None:
        owes = self.splits and self._next_weight < self._next_backward
        return next_tasklet(forward, backward, owes, self._backward_was_last)

    def _take(self, kind: TaskletKind | None) -> Tasklet | None:
        if kind is None:
            return None
        if kind is WEIGHT:
            self._next_weight += 1
            return Tasklet(kind, self._next_weight - 1)
        self._backward_was_last = kind is BACKWARD
        if kind is FORWARD:
            self._next_forward += 1
            return Tasklet(kind, self._next_forward - 1)
        self._next_backward += 1
        return Tasklet(kind, self._next_backward - 1)

    @property
    def _no_forward_comes(self) -> bool:
        """No forward can run before another tasklet has, whatever arrives."""
        return self._next_forward == self._microbatches.stop or not self._has_room

    @property
    def _no_backward_comes(self) -> bool:
        return self._next_backward == self._next_forward

    @property
    def _has_room(self) -> bool:
        return self._next_forward - self._first_held < self._in_flight

    @property
    def _forward_can_run(self) -> bool:
        forward = self._next_forward
        return forward < self._microbatches.stop and self._has_room and forward in self._inputs

    @property
    def _backward_can_run(self) -> bool:
        backward = self._next_backward
        there = self._makes_losses or backward in self._gradients
        return backward < self._next_forward and there

    @property
    def _first_held(self) -> int:
        return self._next_weight if self.splits else self._next_backward

    @property
    def held(self) -> int:
        """How many microbatches the stage keeps anything of."""
        return self._next_forward - self._first_held

    @property
    def only_weights_are_left(self) -> bool:
        """All inputs' gradients are done, so the weights can be done in any order of layers."""
        return self._next_backward == self._microbatches.stop

    def take_weights(self) -> range:
        """The microbatches whose WEIGHT is left; the caller computes them all."""
        owed = range(self._first_held, self._next_backward)
        self._next_weight = self._next_backward
        return owed

    @property
    def done(self) -> bool:
        return self._first_held == self._microbatches.stop

    @property
    def lacks(self) -> Tasklet:
        """The tasklet that this stage waits to begin: a backward, if it holds any microbatch.

        So each wait for a gradient leads on to a later stage. The last of them holds nothing and
        waits for an activation, which is then under way or being computed."""
        if self._next_forward > self._next_backward:
            return Tasklet(BACKWARD, self._next_backward)
        return Tasklet(FORWARD, self._next_forward)

    @property
    def waits_for(self) -> str:
        """What would let this stage go on, in words."""
        kind, microbatch = self.lacks
        if kind is BACKWARD:
            return f"the gradient of microbatch {microbatch} from the next stage"
        return f"the activation of microbatch {microbatch} from the stage before"
