"""A stage whose microbatches are recorded once, and then only started again.

The first microbatches run as any other. From the next step on each microbatch is given a *slot*:
memory for its input and output, with recordings of the stage's forward, of each layer's backward
and of what that leaves for later. There are as many slots as microbatches were ever in flight
together. Kernels and their order are those of the plain runner. Only a stage with the embedding
differs: here it leaves its matrices' gradients for later as well.
"""

import contextlib
import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.train.model.deferred_gradients import WeightGradients, leave_weight_gradients
from p2p_dtfm.train.model.gpt import layer_count
from p2p_dtfm.train.model.layer_state import LayerState
from p2p_dtfm.train.stage.device.recorder import Recorder, Recording, recorder_of
from p2p_dtfm.train.stage.device.repeatable import repeating_kernels, repeats_bits
from p2p_dtfm.train.stage.device.rounded_parameters import RoundedParameters, rounded_type
from p2p_dtfm.train.stage.stage_runner import InFlight, StageRunner

_log = logging.getLogger(__name__)

PLAIN_PASSES = 4
"""Microbatches before anything is recorded: in them libraries choose kernels."""

_Shapes = tuple[object, ...]


@dataclass
class _Slot:
    """Memory and recordings for one microbatch at a time."""

    entry: Tensor
    kept: InFlight
    """Targets and tokens, to be written before a forward; entries and results by layer."""
    recompute: bool
    places: list[int]
    result: Tensor | None = None
    """Result of the forward."""
    seed: Tensor | None = None
    """Gradient of the result. It is written before the first backward."""
    gradients: dict[int, Tensor | None] = field(default_factory=dict)
    """Gradient of each layer's input, after the layer's backward."""
    forward: Recording | None = None
    backwards: dict[int, Recording] = field(default_factory=dict)
    weights: dict[int, Recording] = field(default_factory=dict)
    owed: list[WeightGradients] = field(default_factory=list)
    """What `weights` read: it must stay where it is in memory."""
    due: set[int] = field(default_factory=set)
    """Layers whose `weights` must still be started before the slot is free."""

    @property
    def shapes(self) -> _Shapes:
        return _shapes(self.entry, self.kept.targets, self.kept.tokens, self.recompute)


def is_recorded(spec: RunSpec) -> bool:
    """Whether a run's passes are recorded. Those of local steps are not: they compute with other
    memory in each round. Nor are layers of kinds that may not be known here."""
    return spec.sync.mode != "local" and not spec.layers


class RecordedStageRunner(StageRunner):
    """Records a run that `is_recorded`; any other run it computes as a plain runner does."""

    def __init__(
        self,
        spec: RunSpec,
        layer_states: dict[int, LayerState],
        recompute: bool = False,
        recorder: Recorder | None = None,
        records: bool = True,
    ) -> None:
        """`records`: False for a runner through which only a few microbatches go. Their bits are
        the same."""
        super().__init__(spec, layer_states, recompute)
        self.repeats_bits = repeats_bits(spec, self.device)
        self._asks_for_repeats = self.repeats_bits and self.device.type != "cpu"
        self._recorder = recorder or recorder_of(self.device)
        self._records = records and is_recorded(spec)
        self._plain_passes = 0
        self._free: list[_Slot] = []
        self._taken: dict[int, _Slot] = {}
        self._weights_room: Any = None
        self._rounded = RoundedParameters((), torch.float32)
        if not (spec.trains_adapters or spec.layers):
            kind = rounded_type(spec, self.device)
            self._rounded = RoundedParameters(self.layer_states.values(), kind)
            self._weight_gradients = WeightGradients(self._rounded.by_parameter)
            for state in self.layer_states.values():  # a product that adds spares a sum
                leave_weight_gradients(state.module, self._weight_gradients)

    @property
    def slots(self) -> int:
        """How many microbatches are recorded: 0 before the first, and where none can be."""
        return len(self._free) + len(self._taken)

    def _aside(self) -> contextlib.AbstractContextManager[None]:
        """Around a pass like those that will be recorded. A runner that never records computes in
        the stream from which all of its memory is. It may run in a thread beside a runner that
        records. Until two streams have met, one may overwrite memory that the other has freed."""
        return self._recorder.aside() if self._records else contextlib.nullcontext()

    def _given(self, microbatch: int) -> tuple[Tensor | None, ...]:
        """The microbatch's tensors that came from outside. Whoever lets go of them in the
        recorder's stream, while they are still read, lets the next copy overwrite them."""
        kept = self._in_flight.get(microbatch)
        return (kept.entries[0], kept.targets, kept.tokens) if kept is not None else ()

    def _kernels(self) -> contextlib.AbstractContextManager[None]:
        return repeating_kernels() if self._asks_for_repeats else contextlib.nullcontext()

    def _forward(
        self,
        microbatch: int,
        stream: Tensor,
        targets: Tensor | None,
        tokens: Tensor | None,
    ) -> Tensor | float:
        self._rounded.refresh()
        slot = self._slot_for(stream, targets, tokens)
        if slot is None:
            with self._aside():
                result = super()._forward(microbatch, stream, targets, tokens)
            return result.clone() if isinstance(result, Tensor) else result
        assert slot.forward is not None and slot.result is not None
        _write(slot.entry, stream)
        _write(slot.kept.targets, targets)
        _write(slot.kept.tokens, tokens)
        slot.forward.replay()
        slot.due = set(self.layer_states)
        self._taken[microbatch] = slot
        kept = slot.kept
        self._in_flight[microbatch] = InFlight(
            list(kept.entries), list(kept.results), kept.targets, kept.tokens
        )
        result = self._outward(slot.result)
        return result.clone() if isinstance(result, Tensor) else result

    def _layer_backward(
        self, microbatch: int, layer: int, gradient: Tensor | None
    ) -> Tensor | None:
        slot = self._taken.get(microbatch)
        if slot is None:
            held = self._given(microbatch)
            with self._aside():
                back = super()._layer_backward(microbatch, layer, gradient)
            del held
            is_last = layer == min(self.layer_states)
            self._plain_passes += is_last
            return back.clone() if back is not None and is_last else back
        self._next_layer(microbatch, layer)
        last = max(self.layer_states)
        above = slot.seed if layer == last else slot.gradients[layer + 1]
        assert above is not None
        if layer == layer_count(self.spec) - 1:
            assert gradient is None, "no stage follows the head"
            above.fill_(self._slope_of_loss(microbatch))
        else:
            assert gradient is not None and gradient.shape == above.shape
            _write(above, self.copies.to_device(gradient))
        assert slot.places == self._places_now(), "its states have moved"
        slot.backwards[layer].replay()
        self._weight_gradients.owe_work(lambda: self._start_weights(microbatch, slot, layer))
        back = slot.gradients[layer]
        return back.clone() if back is not None and layer == min(self.layer_states) else back

    def _start_weights(self, microbatch: int, slot: _Slot, layer: int) -> None:
        if layer in slot.weights:
            slot.weights[layer].replay()
        slot.due.discard(layer)
        if not slot.due:
            self._give_back(microbatch)

    def evaluate(
        self, entry: Tensor, targets: Tensor | None = None, tokens: Tensor | None = None
    ) -> Tensor | float:
        """See `StageRunner.evaluate`."""
        self._rounded.refresh()  # an evaluation comes before the step's first forward
        return super().evaluate(entry, targets, tokens)

    def weight_backward_layer(self, microbatch: int, layer: int) -> None:
        """See `StageRunner.weight_backward_layer`."""
        with self._aside():
            super().weight_backward_layer(microbatch, layer)

    def forget(self, microbatch: int) -> None:
        """See `StageRunner.forget`."""
        super().forget(microbatch)
        self._give_back(microbatch)

    def discard(self) -> None:
        """See `StageRunner.discard`."""
        super().discard()
        for microbatch in list(self._taken):
            self._give_back(microbatch)

    def _give_back(self, microbatch: int) -> None:
        slot = self._taken.pop(microbatch, None)
        if slot is not None and self._records:
            self._free.append(slot)

    def _places_now(self) -> list[int]:
        """How often each state has moved: a recording is valid for one place only."""
        return [state.moves for state in self.layer_states.values()]

    # recording ----------------------------------------------------------------------------------

    def _slot_for(
        self, entry: Tensor, targets: Tensor | None, tokens: Tensor | None
    ) -> _Slot | None:
        """A free slot, or a new one. None: this microbatch runs without a recording."""
        if not self._records or self._plain_passes < PLAIN_PASSES:
            return None
        if not (self._in_flight.keys() | self._owed.keys()) <= self._taken.keys():
            return None  # some microbatches began without a slot
        wanted = _shapes(entry, targets, tokens, self.recompute), self._places_now()
        self._free = [slot for slot in self._free if (slot.shapes, slot.places) == wanted]
        if self._free:
            return self._free.pop()
        try:
            return self._recorded(entry, targets, tokens)
        except AssertionError:
            raise
        except Exception as error:  # noqa: BLE001 - what a device cannot record, it runs unrecorded
            _log.warning("microbatches are not recorded on %s: %s", self.device, error)
            _log.debug("what could not be recorded", exc_info=True)
            self._records = False
            self._free = []
            self._weight_gradients.take()
            return None

    def _recorded(self, entry: Tensor, targets: Tensor | None, tokens: Tensor | None) -> _Slot:
        """A new slot. Backwards are recorded from the last layer to the first. What they leave for
        later is recorded after them all: it may be started in any order, and has memory of its
        own."""
        kept = InFlight([], [], _alike(targets), _alike(tokens))
        slot = _Slot(torch.empty_like(entry), kept, self.recompute, self._places_now())
        room = self._recorder.room()
        self._weights_room = self._weights_room or self._recorder.room()
        for place in (slot.entry, kept.targets, kept.tokens):
            if place is not None:
                place.zero_()

        def forward() -> None:
            slot.result = self._through(slot.entry, kept)

        slot.forward = self._recorder.record(forward, room)
        assert slot.result is not None
        slot.result = slot.result.detach()
        slot.seed = torch.zeros_like(slot.result)
        above: Tensor | None = slot.seed
        for layer in reversed(self.layer_states):
            assert above is not None
            slot.backwards[layer] = self._backward_recorded(slot, layer, above, room)
            above = slot.gradients[layer]
            slot.owed.append(self._weight_gradients.take())
        for layer, owed in zip(reversed(self.layer_states), slot.owed, strict=True):
            if not owed.is_empty:
                slot.weights[layer] = self._recorder.record(owed.add, self._weights_room)
        kept.results[:] = [None] * len(kept.results)  # their graphs are used up
        return slot

    def _backward_recorded(self, slot: _Slot, layer: int, above: Tensor, room: Any) -> Recording:
        place = layer - min(self.layer_states)
        entry, result = slot.kept.entries[place], slot.kept.results[place]

        def backward() -> None:
            slot.gradients[layer] = self._back(layer, slot.kept, entry, result, above)

        return self._recorder.record(backward, room)


def runner_on(kind: str) -> type[StageRunner]:
    """The class of runners for a device of this kind: "cpu" or "cuda"."""
    return RecordedStageRunner if kind == "cuda" else StageRunner


def runner_once(
    spec: RunSpec, layer_states: dict[int, LayerState], recompute: bool = False
) -> StageRunner:
    """Gives the bits of `runner_on`'s, for a few microbatches that are computed again."""
    if next(iter(layer_states.values())).device.type == "cuda":
        return RecordedStageRunner(spec, layer_states, recompute, records=False)
    return StageRunner(spec, layer_states, recompute)


def _alike(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else torch.empty_like(tensor)


def _write(place: Tensor | None, values: Tensor | None) -> None:
    """Copy the values to their place, unless they are there already."""
    if place is not None and values is not None and place.data_ptr() != values.data_ptr():
        place.copy_(values)


def _shapes(
    entry: Tensor, targets: Tensor | None, tokens: Tensor | None, recompute: bool
) -> _Shapes:
    given: Iterable[Tensor | None] = (entry, targets, tokens)
    return (*(None if each is None else tuple(each.shape) for each in given), recompute)
