"""What a stage keeps of the open step, with a real stage: layers 2 and 3 of six."""

import pytest
import torch
from torch import Tensor

from p2p_dtfm.core.messages.stage_progress import StageProgress
from p2p_dtfm.daemon.step.pipeline.open_step_work import OpenStepWork, Outgoing
from p2p_dtfm.net.streams.frames import FrameKind
from p2p_dtfm.train.model.layer_state import LayerState
from p2p_dtfm.train.stage.finite import NotFinite
from p2p_dtfm.train.stage.stage_runner import StageRunner
from tests.core.builders import run_spec

SPEC = run_spec()
STEP = 4
SHAPE = (2, 32, 32)


class Stage:
    def __init__(self, limit_bytes: int = 1 << 20) -> None:
        self.states = {layer: LayerState.genesis(SPEC, layer) for layer in (2, 3)}
        self.work = OpenStepWork(StageRunner(SPEC, self.states), limit_bytes)
        self.work.begin(STEP)

    def forward(self, number: int) -> None:
        result = self.work.runner.forward(number, tensor(number))
        assert isinstance(result, Tensor)
        self.work.forward_done(number, sent(result), None)

    def backward(self, number: int) -> None:
        result = self.work.runner.input_backward(number, tensor(100 + number))
        self.work.backward_done(number, sent(result))

    def gradients(self) -> list[Tensor]:
        for number in self.work.forwarded[: self.work.backwards]:
            self.work.runner.weight_backward(number)
        return [state.gradient_vector() for state in self.states.values()]


def tensor(seed: int) -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))


def sent(values: Tensor) -> Outgoing:
    return Outgoing("fp32", memoryview(values.numpy()).cast("B"))


def test_it_goes_on_with_what_it_has_and_drops_what_is_others() -> None:
    """Two forwards and a backward were said, and one more of each may be there."""
    stage = Stage()
    for number in (0, 1, 2):
        stage.forward(number)
    stage.backward(0)
    assert stage.work.progress == StageProgress(2, 4, ((0, 3),), 1)
    stage.work.go_on(STEP, (0, 1, 7, 8), forwards=2, backwards=0)
    assert stage.work.forwarded == [0, 1]
    assert stage.work.runner.in_flight == 2, "1, and what 0 owes"
    for number in (7, 8):
        stage.forward(number)
    for number in (1, 7, 8):
        stage.backward(number)
    other = Stage()
    for number in (0, 1, 7, 8):
        other.forward(number)
        other.backward(number)
    for kept, anew in zip(stage.gradients(), other.gradients(), strict=True):
        assert torch.equal(kept, anew) and kept.abs().sum() > 0
    assert stage.work.kept(FrameKind.ACTIVATION, 1) is not None
    with pytest.raises(KeyError):
        stage.work.kept(FrameKind.ACTIVATION, 2)


def test_it_does_not_go_on_with_gradients_of_others_microbatches() -> None:
    stage = Stage()
    for number in (0, 1):
        stage.forward(number)
        stage.backward(number)
    with pytest.raises(AssertionError):
        stage.work.go_on(STEP, (0, 7), forwards=1, backwards=1)
    with pytest.raises(AssertionError):
        stage.work.go_on(STEP + 1, (0, 1), forwards=2, backwards=2)
    stage.work.begin(STEP)
    assert stage.work.progress is None and stage.work.runner.in_flight == 0
    assert not any(state.gradient_vector().any() for state in stage.states.values())


def test_a_stage_that_begins_to_recompute_owes_nothing() -> None:
    stage, other = Stage(), Stage()
    for one in (stage, other):
        for number in (0, 1):
            one.forward(number)
        one.backward(0)
    stage.work.use_recompute(True)
    assert stage.work.weights == 1 and other.work.weights == 0
    stage.work.backward_done(1, sent(stage.work.runner.backward(1, tensor(101))))
    other.backward(1)
    for kept, split in zip(stage.gradients(), other.gradients(), strict=True):
        assert torch.equal(kept, split)


def test_too_much_is_not_kept_but_first_unsaid() -> None:
    """What the stage said before counts until its next word."""
    size_bytes = 4 * 2 * 32 * 32
    stage = Stage(limit_bytes=2 * size_bytes)
    for number in (0, 1):
        stage.forward(number)
    assert stage.work.progress is not None
    stage.forward(2)
    assert stage.work.progress is None
    assert all(stage.work.kept(FrameKind.ACTIVATION, n) for n in (0, 1, 2))
    stage.work.drop_if_too_large()
    with pytest.raises(KeyError):
        stage.work.kept(FrameKind.ACTIVATION, 0)
    stage.work.begin(STEP + 1)
    stage.forward(0)
    assert stage.work.progress is not None, "another step may be kept again"


def test_what_is_dropped_does_not_count_as_kept() -> None:
    """A step may fail often. What other pipelines then take over is computed anew each time."""
    size_bytes = 4 * 2 * 32 * 32
    stage = Stage(limit_bytes=3 * size_bytes)
    for others in (7, 8, 9, 1):
        for number in (0, 1)[len(stage.work.forwarded) :]:
            stage.forward(number)
        stage.work.go_on(STEP, (0, others), forwards=1, backwards=0)
    assert stage.work.forwarded == [0, 1] and stage.work.progress is not None


def test_what_came_to_no_finite_number_does_not_go_on() -> None:
    def diverge() -> None:
        stage.work.runner.forward(1, tensor(1))
        raise NotFinite("the loss of microbatch 1 is not finite")

    stage = Stage()
    stage.forward(0)
    with pytest.raises(NotFinite):
        stage.work.do(diverge)
    with pytest.raises(NotFinite, match="microbatch 1"):
        stage.work.go_on(STEP, (0, 1), forwards=1, backwards=0)
    stage.work.begin(STEP)
    assert stage.work.do(lambda: 5) == 5
    stage.forward(0)
    stage.work.go_on(STEP, (0, 1), forwards=1, backwards=0)


def test_what_is_sent_to_be_evaluated_is_shown_until_the_step_commits() -> None:
    """These tensors are shown beside the tensors that train, and are no progress of the step."""
    work = Stage().work
    work.edges = {}
    values = tensor(1)
    work.evaluated(9, sent(values))
    digest = work.edges[FrameKind.ACTIVATION, 9, True]
    assert work.find(digest) == bytes(memoryview(values.numpy()).cast("B"))
    assert work.progress is None and work.forwarded == []
    work.end()
    assert work.find(digest) is None and work.edges == {}
