"""Which tasklet a stage computes next: one forward, one backward, with a planned number in flight.

A stage holds at most `in_flight` microbatches between forward and backward. It takes turns: after a
backward a forward comes first, after a forward a backward; whichever cannot run lets the other go.
(With backwards always first, as 1F1B is often told, a stage to which many return at once starves
those after it of forwards: simulated pipelines of like stages took 2 to 8% longer, or needed twice
as many microbatches in flight.) Backwards run in the order of their microbatches, so that gradient
sums are the same in every run. With every limit at least one this order cannot deadlock: the last
stage always turns its oldest forward around.

A stage that splits its backwards (Qi et al. 2023) leaves the gradients of matrices for when nothing
else can run: while it waits, or when all it may hold is held. What is owed counts as held.
"""

from collections.abc import Container
from enum import StrEnum
from typing import NamedTuple

from p2p_dtfm.core.protocol.errors import PeerFault


class TaskletKind(StrEnum):
    FORWARD = "forward"
    BACKWARD = "backward"
    """Of a stage that splits: the input's gradient."""
    WEIGHT = "weight"
    """Of a stage that splits: the rest of a backward."""


class Tasklet(NamedTuple):
    kind: TaskletKind
    microbatch: int


class StageOrder:
    """Inputs arrive in any order; `next` says what to compute now, or None to wait."""

    def __init__(
        self,
        microbatches: range,
        in_flight: int,
        *,
        makes_inputs: bool,
        makes_losses: bool,
        splits: bool = False,
        forwards_done: int = 0,
        backwards_done: int = 0,
        weights_done: int = 0,
        done_next: Container[int] = (),
    ) -> None:
        """So many of the first microbatches are done already, and at the next stage the forwards of
        `done_next`; more than `in_flight` may be held, as after a change of plan."""
        assert in_flight >= 1
        assert 0 <= weights_done <= backwards_done <= forwards_done <= len(microbatches)
        self.splits = splits
        self._microbatches = microbatches
        self._in_flight = in_flight
        self._makes_losses = makes_losses
        self._inputs = set(microbatches) if makes_inputs else set[int]()
        self._gradients = set[int]()
        self._next_forward = microbatches.start + forwards_done
        self._next_backward = microbatches.start + backwards_done
        self._next_weight = microbatches.start + weights_done
        self._done_next = done_next
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
        if self._forward_can_run and (self._backward_was_last or not self._backward_can_run):
            self._backward_was_last = False
            self._next_forward += 1
            return Tasklet(TaskletKind.FORWARD, self._next_forward - 1)
        if self._backward_can_run:
            self._backward_was_last = True
            self._next_backward += 1
            return Tasklet(TaskletKind.BACKWARD, self._next_backward - 1)
        if self.splits and self._next_weight < self._next_backward:
            self._next_weight += 1
            return Tasklet(TaskletKind.WEIGHT, self._next_weight - 1)
        return None

    def next_for_sure(self, *, only_weight: bool = False) -> Tasklet | None:
        """Take the tasklet that comes after those taken so far, if nothing that may still arrive
        can change which one it is; so it can be begun without asking again. `only_weight`: if it is
        a WEIGHT."""
        if self.only_weights_are_left:
            return None
        forward, backward = self._forward_can_run, self._backward_can_run
        if self._no_forward_comes and self._no_backward_comes:
            return self.next()
        if self._backward_was_last:
            is_sure = forward or (backward and self._no_forward_comes)
        else:
            is_sure = backward or (forward and self._no_backward_comes)
        return self.next() if is_sure and not only_weight else None

    @property
    def _no_forward_comes(self) -> bool:
        """None can run before another tasklet has, whatever arrives."""
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
        """Microbatches of which anything is kept."""
        return self._next_forward - self._first_held

    @property
    def only_weights_are_left(self) -> bool:
        """All inputs' gradients are done, so the rest can be done in any order of layers."""
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
        """The tasklet that this stage waits to begin: the backward of what it holds, if it holds
        any, and so each wait for a gradient leads on to later stages, until one holds nothing and
        waits for an activation, which is then under way or being computed."""
        if self._next_forward > self._next_backward:
            return Tasklet(TaskletKind.BACKWARD, self._next_backward)
        return Tasklet(TaskletKind.FORWARD, self._next_forward)

    @property
    def waits_for(self) -> str:
        """What would let this stage go on, in words."""
        kind, microbatch = self.lacks
        if kind is TaskletKind.BACKWARD:
            return f"the gradient of microbatch {microbatch} from the next stage"
        return f"the activation of microbatch {microbatch} from the stage before"
