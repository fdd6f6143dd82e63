"""Text that the model writes as it learns: the same each time, and never beyond its time budget."""

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from p2p_dtfm.daemon.dashboard.observer import Observer
from p2p_dtfm.daemon.machine.compute import Compute
from p2p_dtfm.daemon.machine.settings import Settings
from p2p_dtfm.daemon.node.participation.sampling import sample_writer_of
from p2p_dtfm.daemon.telemetry.status import Status
from p2p_dtfm.daemon.trainer.sample_writer import (
    KEPT,
    PART_OF_TIME,
    TOKENS,
    ModelSource,
    SampleWriter,
)
from p2p_dtfm.train.data.tokenizer import ByteTokenizer, starting_with
from p2p_dtfm.train.model.gpt import layer_count
from p2p_dtfm.train.model.layer_state import LayerState
from p2p_dtfm.web.state import Sample, Samples
from tests.core.builders import run_spec

SPEC = run_spec(total_steps=1000)


@pytest.fixture
def compute() -> Iterator[Compute]:
    made = Compute()
    yield made
    made.close()


class Case:
    """A peer that has some layers, and perhaps a whole checkpoint."""

    def __init__(self, compute: Compute) -> None:
        layers = range(layer_count(SPEC))
        self.states = {layer: LayerState.genesis(SPEC, layer) for layer in layers}
        self.saved: int | None = None
        self.told: list[Samples] = []
        model = ModelSource(SPEC, lambda: self.states, lambda: self.saved, self.load, 4)
        self.writer = SampleWriter(model, ByteTokenizer(), compute, self.told.append)

    async def load(self, layer: int, step: int) -> LayerState:
        state = LayerState.genesis(SPEC, layer)
        state.version = step
        return state

    def evaluated(self, step: int) -> Samples:
        async def live() -> None:
            self.writer.evaluated(step, 5.0)
            if self.writer._writing is not None:
                await self.writer._writing

        self.writer._budget.begun_s -= 1e6  # time enough
        asyncio.run(live())
        return self.told[-1]


def test_who_has_the_whole_model_writes(compute: Compute) -> None:
    case = Case(compute)
    first = case.evaluated(0)
    (sample,) = first.written
    assert 0 < len(sample.text) <= TOKENS and sample.held_out_loss == 5.0 and not first.note
    assert case.evaluated(0).written == first.written, "the same model writes the same, once"
    for state in case.states.values():
        state.parameters.mul_(1.5)
        state.version = 7
    both = case.evaluated(7).written
    assert [it.step for it in both] == [0, 7] and both[0].text != both[1].text


def test_who_has_a_part_writes_with_the_newest_whole_checkpoint(compute: Compute) -> None:
    case = Case(compute)
    whole = case.evaluated(0).written[0].text
    del case.states[1]
    assert "no peer here has the whole model" in case.evaluated(50).note
    case.saved = 40
    found = case.evaluated(50)
    assert found.written[-1] == Sample(40, whole, None), "its loss then is not known"
    assert "nor is there a new whole" in case.evaluated(100).note, "once is enough"
    case.states[1] = LayerState.genesis(SPEC, 1)
    case.states[1].version = 99
    assert case.evaluated(150).note, "layers of unlike ages are no model"


def test_time_is_bounded_and_what_is_left_out_is_said(compute: Compute) -> None:
    case = Case(compute)
    budget = case.writer._budget
    spent = case.evaluated(0), budget.spent_s
    assert spent[1] > 0
    budget.begun_s = asyncio.new_event_loop().time()
    case.writer.evaluated(50, 4.0)
    assert "a hundredth of the time" in case.told[-1].note
    assert case.told[-1].written == spent[0].written, "what there is stays"
    assert budget.may_begin(budget.begun_s + spent[1] / PART_OF_TIME + 0.01)


def test_a_long_run_keeps_every_second_text(compute: Compute) -> None:
    case = Case(compute)
    case.writer.samples = Samples("", tuple(Sample(-n, "x") for n in range(KEPT, 0, -1)))
    found = case.evaluated(0)
    assert len(found.written) == KEPT // 2 + 1 and found.written[-1].step == 0


@pytest.mark.parametrize(
    ("settings", "withheld", "why"),
    [
        ({"samples": False}, (), "--no-samples"),
        ({"device": "emulated:40"}, (), "emulated"),
        ({}, (0, 5), "members that it names"),
    ],
)
def test_where_nobody_will_write_the_page_says_why(
    settings: dict[str, Any], withheld: tuple[int, ...], why: str
) -> None:
    """The page promised a text after each evaluation."""
    observer = Observer(Status())
    local = SimpleNamespace(settings=Settings(**settings), observer=observer)
    membership: Any = SimpleNamespace(local=local, run=None)
    checkpoints: Any = SimpleNamespace(withheld=withheld)
    assert sample_writer_of(membership, None, checkpoints) is None  # type: ignore[arg-type]
    note = observer.seen.samples.note
    observer.close()
    assert note.startswith("none is written here: ") and why in note


def test_texts_begin_as_the_manifest_says(compute: Compute) -> None:
    """In a run whose documents begin with a token of their own, texts began without it."""
    observer = Observer(Status())
    tokenizer = starting_with(ByteTokenizer(), 7)
    run = SimpleNamespace(spec=SPEC, tokenizer=tokenizer, blobs=None)
    local = SimpleNamespace(settings=Settings(), observer=observer, compute=compute)
    membership: Any = SimpleNamespace(local=local, run=run)
    checkpoints: Any = SimpleNamespace(withheld=())
    writer = sample_writer_of(membership, None, checkpoints)  # type: ignore[arg-type]
    observer.close()
    assert writer is not None and writer.tokenizer.start_of_document == 7
