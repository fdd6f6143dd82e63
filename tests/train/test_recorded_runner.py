"""Recorded microbatches come to the bits of microbatches that are not recorded."""

import random
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from p2p_dtfm.core.protocol.run_spec import ComputeSpec, RunSpec
from p2p_dtfm.train.model.kinds import registry
from p2p_dtfm.train.model.layer_state import LayerState
from p2p_dtfm.train.model.optimizer import learning_rate
from p2p_dtfm.train.stage.device.recorded_runner import PLAIN_PASSES, RecordedStageRunner
from p2p_dtfm.train.stage.stage_runner import StageRunner
from tests.train.recorded_operations import ProcessorRecorder

Batch = Callable[[int, int], tuple[Tensor, Tensor]]
STEPS = 4
MICROBATCHES = 4


def states_of(spec: RunSpec, layers: range) -> dict[int, LayerState]:
    return {number: LayerState.genesis(spec, number) for number in layers}


def gradients(runner: StageRunner) -> list[bytes]:
    return [s.gradient_vector().numpy().tobytes() for s in runner.layer_states.values()]


class Pair:
    """A plain runner and a recorded one of the same layers, which get the same input."""

    def __init__(
        self, spec: RunSpec, layers: range, recompute: bool = False, fails_at: int = 0
    ) -> None:
        self.spec = spec
        self.recorder = ProcessorRecorder(fails_at)
        self.plain = StageRunner(spec, states_of(spec, layers), recompute)
        self.recorded = RecordedStageRunner(
            spec, states_of(spec, layers), recompute, recorder=self.recorder
        )
        self.both = (self.plain, self.recorded)

    def forward(self, number: int, batch: tuple[Tensor, Tensor]) -> None:
        tokens, targets = batch
        generator = torch.Generator().manual_seed(number)
        width = self.spec.model.width
        entry = tokens
        if not self.plain.has_embedding:
            entry = torch.randn(*tokens.shape, width, generator=generator)
        given = (entry, targets if self.plain.has_head else None, tokens)
        first, second = (runner.forward(number, *given) for runner in self.both)
        same(first, second)

    def slope(self, number: int) -> Tensor | None:
        if self.plain.has_head:
            return None
        generator = torch.Generator().manual_seed(1000 + number)
        model = self.spec.model
        shape = (self.spec.batch.microbatch, model.context, model.width)
        return torch.randn(*shape, generator=generator)

    def update(self, step: int, records: bool = True) -> None:
        assert self.recorded._records is records
        assert gradients(self.plain) == gradients(self.recorded)
        for runner in self.both:
            for state in runner.layer_states.values():
                state.apply(state.gradient_vector(), 0.5, learning_rate(self.spec, step))


def same(first: object, second: object) -> None:
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        assert torch.equal(first, second)
    else:
        assert first == second


@pytest.mark.parametrize("layers", [range(5), range(2), range(1, 4), range(2, 5)])
@pytest.mark.parametrize("recompute", [False, True])
def test_steps_have_the_same_bits(
    spec: RunSpec, toy_batch: Batch, layers: range, recompute: bool
) -> None:
    pair = Pair(spec, layers, recompute)
    for step in range(STEPS):
        waiting: list[int] = []
        for number in range(MICROBATCHES):
            pair.forward(number, toy_batch(step, number))
            for runner in pair.both:
                runner.weigh(number, 1.0 + number if runner.has_head else 1.0)
            waiting.append(number)
            if len(waiting) == 2:
                first = waiting.pop(0)
                same(*(runner.backward(first, pair.slope(first)) for runner in pair.both))
        for number in waiting:
            slope = pair.slope(number)
            backs: list[Tensor | None] = [slope, slope]
            for layer in reversed(layers):
                backs = [
                    runner.backward_layer(number, layer, back)
                    for runner, back in zip(pair.both, backs, strict=True)
                ]
                same(*backs)
        pair.update(step)
    assert pair.recorder.recordings > 0 and pair.recorded.in_flight == 0


def test_what_is_left_for_later_is_done_in_any_order(spec: RunSpec, toy_batch: Batch) -> None:
    chance = random.Random(3)
    pair = Pair(spec, range(2, 5))
    for step in range(STEPS):
        for number in range(MICROBATCHES):
            pair.forward(number, toy_batch(step, number))
        for number in range(MICROBATCHES):
            same(*(runner.input_backward(number) for runner in pair.both))
        assert pair.recorded.in_flight == MICROBATCHES
        layers = list(pair.plain.layer_states)
        chance.shuffle(layers)
        for layer in layers:
            for number in range(MICROBATCHES):
                for runner in pair.both:
                    runner.weight_backward_layer(number, layer)
        assert pair.recorded.in_flight == 0
        pair.update(step)
    assert pair.recorder.recordings > 0


def test_what_is_forgotten_or_discarded_leaves_no_trace(spec: RunSpec, toy_batch: Batch) -> None:
    pair = Pair(spec, range(5))
    for step in range(STEPS):
        for number in range(MICROBATCHES):
            pair.forward(number, toy_batch(step, number))
        for runner in pair.both:
            runner.forget(MICROBATCHES - 1)
            runner.backward(0)
            runner.discard()
            runner.zero_gradients()
        made = pair.recorder.recordings
        for number in range(MICROBATCHES):
            pair.forward(number, toy_batch(step, number))
            for runner in pair.both:
                runner.backward(number)
        assert not made or pair.recorder.recordings == made, "slots are used again"
        pair.update(step)


def test_another_way_of_keeping_is_recorded_anew(spec: RunSpec, toy_batch: Batch) -> None:
    pair = Pair(spec, range(2, 5))
    for step in range(2 * STEPS):
        for number in range(MICROBATCHES):
            pair.forward(number, toy_batch(step, number))
            if step % 2 and number == 1:
                for runner in pair.both:
                    runner.recompute = step % 4 == 1
        for number in range(MICROBATCHES):
            same(*(runner.backward(number) for runner in pair.both))
        pair.update(step)


@pytest.mark.parametrize("fails_at", [1, 2, 4, 7, 12])
def test_a_device_that_cannot_record_runs_without(
    spec: RunSpec, toy_batch: Batch, fails_at: int, caplog: pytest.LogCaptureFixture
) -> None:
    pair = Pair(spec, range(2, 5), fails_at=fails_at)
    for step in range(STEPS):
        for number in range(MICROBATCHES):
            pair.forward(number, toy_batch(step, number))
        for number in range(MICROBATCHES):
            same(*(runner.backward(number) for runner in pair.both))
        pair.update(step, records=pair.recorder.recordings < fails_at)
    assert pair.recorder.recordings == fails_at and pair.recorded.slots == 0
    assert "not recorded on cpu: none is left" in caplog.text


def test_the_first_ones_run_plainly(spec: RunSpec, toy_batch: Batch) -> None:
    pair = Pair(spec, range(5))
    for number in range(PLAIN_PASSES):
        pair.forward(number, toy_batch(0, number))
        assert not pair.recorder.recordings
        for runner in pair.both:
            runner.backward(number)
    pair.forward(PLAIN_PASSES, toy_batch(0, 3))
    assert pair.recorder.recordings == 1 + 5 + len(pair.recorded._taken[PLAIN_PASSES].weights)


def test_what_is_given_stays_until_the_streams_have_met(spec: RunSpec, toy_batch: Batch) -> None:
    """Memory that is let go of while it is still read is where the next copy from the host goes."""
    recorder = ProcessorRecorder()
    runner = RecordedStageRunner(spec, states_of(spec, range(5)), recorder=recorder)
    given = [each.clone() for each in toy_batch(0, 0)]
    alive = [weakref.ref(each) for each in given]
    seen: list[bool] = []
    recorder.at_end_of_aside.append(lambda: seen.append(all(ref() is not None for ref in alive)))
    runner.forward(0, *given)
    del given
    runner.backward(0)
    assert seen == [True] * 6, "a forward and five layers"
    assert not any(ref() is not None for ref in alive), "nobody keeps them for longer"


def test_what_leaves_a_stage_is_not_of_the_recorders_memory(
    spec: RunSpec, toy_batch: Batch
) -> None:
    recorder = ProcessorRecorder()
    runner = RecordedStageRunner(spec, states_of(spec, range(2)), recorder=recorder)
    result = runner.forward(0, toy_batch(0, 0)[0])
    assert isinstance(result, Tensor)
    kept = runner._in_flight[0].results[-1]
    assert kept is not None and kept.data_ptr() != result.data_ptr()


def test_states_that_move_are_recorded_anew(spec: RunSpec, toy_batch: Batch) -> None:
    pair = Pair(spec, range(2, 5))
    made = []
    for step in range(2 * STEPS):
        for number in range(MICROBATCHES):
            pair.forward(number, toy_batch(step, number))
        for number in range(MICROBATCHES):
            same(*(runner.backward(number) for runner in pair.both))
        pair.update(step)
        made.append(pair.recorder.recordings)
        if step == STEPS:
            for runner in pair.both:
                for state in runner.layer_states.values():
                    state.move(torch.device("cpu", 0))
    assert 0 < made[1] == made[STEPS], "one recording serves all steps"
    assert 2 * made[STEPS] == made[STEPS + 1] == made[-1]


@pytest.mark.parametrize("layers", [range(1, 4), range(2, 5)])
def test_rounded_parameters_have_the_bits_of_autocasts(
    spec: RunSpec, toy_batch: Batch, layers: range
) -> None:
    """The stages are such that leave their matrices' gradients for later, wherever they are."""
    narrow = spec.model_copy(update={"compute": ComputeSpec(precision="bf16")})
    pair = Pair(narrow, layers)
    for step in range(STEPS):
        for number in range(MICROBATCHES):
            pair.forward(number, toy_batch(step, number))
        for number in range(MICROBATCHES):
            same(*(runner.backward(number, pair.slope(number)) for runner in pair.both))
        pair.update(step)
    rounded = pair.recorded._rounded.by_parameter
    for parameter, values in rounded.items():  # the values are of the step before the last update
        assert values.dtype == torch.bfloat16
        assert values.shape == parameter.shape
    assert len(rounded) == sum(len(s.shapes) for s in pair.recorded.layer_states.values())


def test_who_computes_again_records_nothing(spec: RunSpec, toy_batch: Batch) -> None:
    pair = Pair(spec, range(5))
    recorder = ProcessorRecorder()
    recorder.at_end_of_aside.append(lambda: pytest.fail("others are recording there"))
    once = RecordedStageRunner(spec, states_of(spec, range(5)), recorder=recorder, records=False)
    pair.both = (*pair.both, once)
    for number in range(2 * PLAIN_PASSES):
        tokens, targets = toy_batch(0, number)
        losses = [runner.forward(number, tokens, targets) for runner in pair.both]
        assert len(set(losses)) == 1
        for runner in pair.both:
            runner.backward(number)
    assert pair.recorded.slots > 0 and once.slots == 0
    assert gradients(once) == gradients(pair.recorded)


def test_held_out_losses_are_of_the_newest_parameters(
    spec: RunSpec, toy_batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They come before a step's first forward, from the rounded matrix of a head in chunks."""
    monkeypatch.setattr(registry, "head_in_chunks", lambda spec: True)
    narrow = spec.model_copy(update={"compute": ComputeSpec(precision="bf16")})
    pair = Pair(narrow, range(2, 5))
    tokens, targets = toy_batch(9, 9)
    entry = torch.randn(*tokens.shape, narrow.model.width)
    for step in range(2):
        same(*(runner.evaluate(entry, targets) for runner in pair.both))
        for number in range(MICROBATCHES):
            pair.forward(number, toy_batch(step, number))
        for number in range(MICROBATCHES):
            same(*(runner.backward(number) for runner in pair.both))
        for runner in pair.both:
            for state in runner.layer_states.values():
                state.apply(state.gradient_vector(), 1.0, 0.1)
