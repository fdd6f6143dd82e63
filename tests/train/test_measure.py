"""Devices are named, chosen and measured on this machine."""

import time

import pytest
import torch

from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.core.protocol.run_spec import RunSpec, parse_run_spec
from p2p_dtfm.train.model.deferred_gradients import WeightGradients
from p2p_dtfm.train.stage import measure
from p2p_dtfm.train.stage.device.trial import TrialShape, trial_pass
from p2p_dtfm.train.stage.measure import cap_device_memory, measure_device, select_device
from tests.train.recorded_operations import ProcessorRecorder

CPU = torch.device("cpu")


def test_measured_record_is_sane(spec: RunSpec) -> None:
    device = measure_device(spec, "cpu", threads=1, memory_limit_bytes=1 << 20)
    assert (device.kind, device.memory_bytes) == ("cpu", 1 << 20) and device.name
    for timing in (device.embedding, device.block, device.head):
        assert 0 < timing.forward_ns < 10**9 and 0 < timing.backward_ns < 10**9
    assert device.block.forward_ns > device.embedding.forward_ns
    assert measure_device(spec).memory_bytes > 1 << 20


def test_a_large_model_is_measured_on_a_part(spec: RunSpec) -> None:
    """Operations grow 64-fold between these two. Neither takes long, and the ratio shows."""

    def block_ns(sequences: int) -> int:
        values = spec.model_dump()
        values["model"] = {**values["model"], "width": 512, "heads": 8, "context": 512}
        values["batch"] = {"global_batch": sequences, "microbatch": sequences}
        values["evaluation"]["sequences"] = sequences
        started = time.monotonic()
        block = measure_device(parse_run_spec(values, "test"), threads=1).block
        assert time.monotonic() - started < 30, "bounded, though this machine may be busy"
        return block.forward_ns + block.backward_ns

    ratios = (block_ns(64) / block_ns(1) for _ in range(3))  # a busy machine may spoil one
    assert any(16 < ratio < 256 for ratio in ratios)


def test_devices_are_chosen_by_name() -> None:
    assert select_device("cpu") == torch.device("cpu")
    best = "cuda" if torch.cuda.is_available() else "cpu"
    assert select_device("auto").type == best


@pytest.mark.parametrize("name", ["tpu", "cuda:x", "cuda:99", "", "cpu:1", "cuda:"])
def test_a_device_that_is_not_there_says_what_to_do(name: str) -> None:
    with pytest.raises(UserError) as caught:
        select_device(name)
    assert caught.value.fixes


def test_a_device_that_has_failed_gives_nothing_back_and_ends_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A peer that stayed away because its device had failed ended there, as by a bug."""
    asked: list[str] = []

    def empty_cache() -> None:
        asked.append("cache")
        raise RuntimeError("CUDA error: unspecified launch failure")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", empty_cache)
    measure.release_memory()
    assert asked


def test_an_accelerators_memory_is_capped_for_torch() -> None:
    cap_device_memory(torch.device("cpu"), 1)  # there is nothing to cap
    if not torch.cuda.is_available():
        return
    limit_bytes = 256 << 20
    cap_device_memory(torch.device("cuda", 0), limit_bytes)
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(2 * limit_bytes, dtype=torch.uint8, device="cuda:0")
    torch.cuda.set_per_process_memory_fraction(1.0, 0)


def test_no_cuda_says_so() -> None:
    if torch.cuda.is_available():
        assert select_device("cuda").index == 0
        return
    with pytest.raises(UserError, match="no CUDA device"):
        select_device("cuda")


def test_a_cards_passes_are_timed_as_they_are_recorded(
    spec: RunSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = ProcessorRecorder()
    monkeypatch.setattr(measure, "recorder_of", lambda device: recorder)
    monkeypatch.setattr(measure, "_finish", lambda device: None)
    for layer in range(5):
        module = measure.build_timed_layer(spec, layer, CPU)
        run = trial_pass(spec, layer, module, TrialShape(2, 12), CPU)
        owed = WeightGradients()
        forward_ns, backward_ns = measure._time_passes(spec, run, torch.device("cuda"), owed)
        assert forward_ns > 0 and backward_ns > 0
    assert recorder.recordings == 10
