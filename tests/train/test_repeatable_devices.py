"""Cards whose work may be computed again are made to repeat their bits."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import torch
from torch import Tensor

from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.core.protocol.sections.audit_spec import AuditSpec
from p2p_dtfm.train.model.layer_state import LayerState
from p2p_dtfm.train.stage.device import repeatable
from p2p_dtfm.train.stage.device.recorded_runner import RecordedStageRunner, runner_on, runner_once
from p2p_dtfm.train.stage.replay.arithmetic import arithmetic_name
from p2p_dtfm.train.stage.stage_runner import InFlight
from tests.train.recorded_operations import ProcessorRecorder

Batch = Callable[[int, int], tuple[Tensor, Tensor]]
CARD = torch.device("cuda", 0)
PROCESSOR = torch.device("cpu")


@pytest.fixture
def audited(spec: RunSpec) -> Iterator[RunSpec]:
    repeatable.repeats_bits.cache_clear()
    yield spec.model_copy(update={"audit": AuditSpec(rate=0.1)})
    repeatable.repeats_bits.cache_clear()


def test_a_card_is_asked_for_kernels_that_repeat_in_audited_runs_alone(
    spec: RunSpec, audited: RunSpec
) -> None:
    tried = []

    def passes(run: RunSpec, layer: int, device: torch.device) -> None:
        assert torch.are_deterministic_algorithms_enabled()
        tried.append(layer)

    with mock.patch.object(repeatable, "_pass", passes):
        assert not repeatable.repeats_bits(spec, CARD) and not tried
        assert repeatable.repeats_bits(audited, CARD)
        with repeatable.kernels_for(audited, CARD):
            assert torch.are_deterministic_algorithms_enabled()
        with repeatable.kernels_for(spec, CARD), repeatable.kernels_for(audited, PROCESSOR):
            assert not torch.are_deterministic_algorithms_enabled()
    assert tried == [0, 1, 4], "each kind of layer, once"
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_card_without_such_kernels_says_so_and_trains_on(
    audited: RunSpec, caplog: pytest.LogCaptureFixture
) -> None:
    def passes(run: RunSpec, layer: int, device: torch.device) -> None:
        raise RuntimeError("kthvalue CUDA does not have a deterministic implementation")

    with mock.patch.object(repeatable, "_pass", passes):
        assert not repeatable.repeats_bits(audited, CARD)
        with repeatable.kernels_for(audited, CARD):
            assert not torch.are_deterministic_algorithms_enabled()
    assert "no work of cuda:0 can be audited: kthvalue" in caplog.text


def test_its_passes_run_with_them(audited: RunSpec, toy_batch: Batch) -> None:
    """The passes run on the processor, which is told to be a card."""
    seen: set[str] = set()

    class Watched(RecordedStageRunner):
        def _run(
            self, layer: int, entry: Tensor, targets: Tensor | None, documents: Tensor | None
        ) -> Tensor:
            seen.add(f"forward {torch.are_deterministic_algorithms_enabled()}")
            return super()._run(layer, entry, targets, documents)

        def _back(
            self,
            layer: int,
            kept: InFlight,
            entry: Tensor,
            result: Tensor | None,
            gradient: Tensor,
        ) -> Tensor | None:
            seen.add(f"backward {torch.are_deterministic_algorithms_enabled()}")
            return super()._back(layer, kept, entry, result, gradient)

    states = {layer: LayerState.genesis(audited, layer) for layer in range(5)}
    runner = Watched(audited, states, recorder=ProcessorRecorder())
    runner._asks_for_repeats = True
    for number in range(6):
        runner.forward(number, *toy_batch(0, number))
        runner.backward(number)
    runner.evaluate(*toy_batch(0, 7))
    assert runner.slots and seen == {"forward True", "backward True"}
    assert not torch.are_deterministic_algorithms_enabled()


def test_cards_of_one_kind_have_one_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def card(name: str, processors: int) -> str:
        about = mock.Mock(major=9, minor=0, multi_processor_count=processors)
        about.name = name
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: about)
        return arithmetic_name(CARD)

    names = [card("H100", 132), card("H100", 132), card("H100", 114), card("H200", 132)]
    assert names[0] == names[1] and len(set(names)) == 3
    assert all(name.startswith("cuda-") for name in names)
    assert arithmetic_name(PROCESSOR).startswith("cpu-")


def test_what_somebody_has_chosen_for_cublas_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    repeatable.let_cublas_repeat()
    assert repeatable.os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    repeatable.let_cublas_repeat()
    assert repeatable.os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


def test_one_thread_does_not_end_what_another_has_asked_for() -> None:
    """A stage trains in one thread, and computes another stage's work again in the other."""
    first, second = repeatable.repeating_kernels(), repeatable.repeating_kernels()
    with first:
        with second:
            pass
        assert torch.are_deterministic_algorithms_enabled()
    first, second = repeatable.repeating_kernels(), repeatable.repeating_kernels()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert torch.are_deterministic_algorithms_enabled(), "the second one is still at it"
    second.__exit__(None, None, None)
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_card_repeats_its_bits(audited: RunSpec, toy_batch: Batch) -> None:
    repeatable.let_cublas_repeat()
    assert runner_on("cuda") is RecordedStageRunner
    expected = trained_on_card(audited, toy_batch, once=True)
    for once in (False, False, True):
        assert trained_on_card(audited, toy_batch, once) == expected


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_card_repeats_its_bits_while_another_thread_uses_it(
    audited: RunSpec, toy_batch: Batch
) -> None:
    repeatable.let_cublas_repeat()
    expected = trained_on_card(audited, toy_batch, once=True)
    kinds = [False, True] * 8
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(lambda once: trained_on_card(audited, toy_batch, once), kinds))
    assert [each == expected for each in found] == [True] * len(kinds)


def trained_on_card(run: RunSpec, batch: Batch, once: bool) -> list[bytes]:
    """The sums of gradients of each layer, for a stage that has all of them."""
    states = {layer: LayerState.genesis(run, layer, CARD) for layer in range(5)}
    runner = (runner_once if once else RecordedStageRunner)(run, states)
    assert runner.repeats_bits
    for number in range(40):
        runner.forward(number, *batch(0, number))
        runner.backward(number)
    return [state.gradient_vector().cpu().numpy().tobytes() for state in states.values()]
