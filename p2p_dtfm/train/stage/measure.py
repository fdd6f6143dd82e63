"""What this machine computes with, and how fast it is at the run's microbatch shape."""

import contextlib
import ctypes
import gc
import math
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch
from torch import Tensor, nn

from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.core.protocol.layers.gpt_sizes import block_flops
from p2p_dtfm.core.protocol.records import NAME_LIMIT, PROCESSOR, Device, LayerTiming
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.core.protocol.workload import workload_of
from p2p_dtfm.ports.granted import granted_memory, offered_bytes
from p2p_dtfm.train.model.deferred_gradients import WeightGradients, leave_weight_gradients
from p2p_dtfm.train.model.gpt import build_timed_layer, layer_count
from p2p_dtfm.train.model.kinds.registry import loss_sum_of_last, require_stated_shape
from p2p_dtfm.train.model.precision import autocast
from p2p_dtfm.train.stage.device.facts import device_facts
from p2p_dtfm.train.stage.device.given_gradient import backward_from
from p2p_dtfm.train.stage.device.recorded_runner import is_recorded
from p2p_dtfm.train.stage.device.recorder import Recorder, recorder_of
from p2p_dtfm.train.stage.device.repeatable import kernels_for, let_cublas_repeat
from p2p_dtfm.train.stage.device.rounded_parameters import rounded_type
from p2p_dtfm.train.stage.device.trial import TrialShape, trial_pass
from p2p_dtfm.train.stage.emulated import emulated_device, emulated_flops_per_s
from p2p_dtfm.train.stage.room_to_train import require_room, too_large

TorchDevice = torch.device

LIBRARIES_BYTES = 512 << 20
"""Memory of an accelerator beside layers and what is kept for their backwards. Libraries work in
it, some with 32 MiB for each thread and stream, and part lies unused between blocks."""
_REPETITIONS = 5
_FEWEST_REPETITIONS = 3
_LAYER_BUDGET_NS = 600_000_000
_CARD_SHARE = 0.8
"""The usable share of a card's free memory. Recorded passes lie in the rest, uncounted."""
_FIRST_TOKENS = 128


def select_device(text: str) -> torch.device:
    """ "cpu", "cuda", "cuda:1" or "auto" (the first CUDA device if there is one, else the CPU).

    An emulated device's tensors are the CPU's.

    Raises `UserError` if there is no such device here.
    """
    name = text.strip().lower()
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu" or emulated_flops_per_s(name) is not None:
        return torch.device("cpu")
    kind, _, number = name.partition(":")
    if kind != "cuda" or not (number.isdecimal() or name == "cuda"):
        raise UserError(
            f"unknown device {text!r}",
            'use "cpu", "cuda", "cuda:1", "auto", or "all" for each of them',
        )
    if not torch.cuda.is_available():
        raise UserError(
            f"device {text!r}: no CUDA device can be used here",
            (
                'use --device cpu, or "auto"',
                "install the NVIDIA driver and a build of torch with CUDA",
            ),
        )
    device_count = torch.cuda.device_count()
    if int(number or 0) >= device_count:
        raise UserError(
            f"device {text!r}: this machine has {device_count} CUDA device(s)",
            f'use "cuda:0" to "cuda:{device_count - 1}"',
        )
    let_cublas_repeat()
    return torch.device("cuda", int(number or 0))


def cap_device_memory(device: torch.device, limit_bytes: int) -> None:
    """Let torch take no more than `limit_bytes` of an accelerator's memory; it gives back unused
    blocks before it refuses. The processor's memory has no such cap."""
    if device.type == "cuda":
        total_bytes = torch.cuda.mem_get_info(device)[1]
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / total_bytes), device)


def exclusive_name(device: torch.device) -> str | None:
    """A name that tells an accelerator from all others of this machine. None for the processor,
    which several daemons may share."""
    if device.type != "cuda":
        return None
    index = torch.cuda.current_device() if device.index is None else device.index
    return f"cuda-{torch.cuda.get_device_properties(index).uuid}"


def release_memory() -> None:
    """Give memory that nothing holds any more back to the device and to the operating system."""
    gc.collect()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        with contextlib.suppress(RuntimeError):  # whatever is asked of a device that has failed
            torch.cuda.empty_cache()
    with contextlib.suppress(OSError, AttributeError):  # a C library other than GNU's
        ctypes.CDLL(None).malloc_trim(0)


def use_threads(count: int) -> None:
    """Set the threads that compute, for the calling thread and those that have computed nothing
    yet."""
    torch.set_num_threads(count)


def measure_device(
    spec: RunSpec,
    device: torch.device | str = "cpu",
    threads: int | None = None,
    memory_limit_bytes: int | None = None,
    emulated_flops_per_s: int | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Device:
    """Median forward and backward times of the three kinds of layers, memory and name.

    Takes about two seconds; longer only if touching a layer's parameters takes longer. A layer too
    slow for that is measured on fewer tokens, and its times are extrapolated. `threads` sets
    torch's thread count for the whole process. With `emulated_flops_per_s` nothing is timed: the
    device is one of that speed, and has the memory of the limit. `progress(done, total)` is called
    for each kind of layer that is done.

    Raises `UserError` where this machine has no memory for any part of the run.
    """
    device = torch.device(device)
    if threads is not None:
        use_threads(threads)
    if emulated_flops_per_s is not None:
        memory_bytes = memory_limit_bytes or int(free_bytes(device) * _CARD_SHARE)
        return emulated_device(spec, emulated_flops_per_s, memory_bytes)
    require_room(spec, _memory_bytes(device, None), device.type)
    memory_bytes = _memory_bytes(device, memory_limit_bytes)
    try:
        timings = _timings(spec, device, progress)
    except torch.OutOfMemoryError as error:
        raise too_large(spec, "timing its layers", "more", memory_bytes) from error
    name = _device_name(device)[:NAME_LIMIT]
    embedding, block, head = _as_a_gpt(spec, timings) if spec.layers else timings
    return Device(
        device.type,
        name,
        memory_bytes,
        embedding,
        block,
        head,
        device_facts(device),
        tuple(timings) if spec.layers else msgspec.UNSET,
    )


def _timings(
    spec: RunSpec, device: TorchDevice, progress: Callable[[int, int], None]
) -> list[LayerTiming]:
    """The times of each kind of layer."""
    kinds = _layers_to_time(spec)
    timings = []
    for done, layer in enumerate(kinds):
        progress(done, len(kinds))
        measure = _measure_listed if spec.layers else _measure_layer
        timings.append(measure(spec, layer, device))
    progress(len(kinds), len(kinds))
    return timings


def _layers_to_time(spec: RunSpec) -> list[int]:
    """The first layer of each kind; if the run lists its layers, of each distinct one."""
    unlike = workload_of(spec).unlike
    if unlike is None:
        return [0, 1, layer_count(spec) - 1]
    return [unlike.order.index(number) for number in range(len(unlike.costs))]


def _as_a_gpt(spec: RunSpec, timings: list[LayerTiming]) -> tuple[LayerTiming, ...]:
    """The times of a run that lists its layers, as of a GPT: of the first layer, the mean of those
    between, and of the last. `timings`: of distinct layers."""
    unlike = workload_of(spec).unlike
    assert unlike is not None
    first, *between, last = (timings[number] for number in unlike.order)
    mean = LayerTiming(
        sum(timing.forward_ns for timing in between) // len(between),
        sum(timing.backward_ns for timing in between) // len(between),
    )
    return first, mean, last


def _memory_bytes(device: torch.device, limit_bytes: int | None) -> int:
    """The usable part of the memory that is free now, or the limit if that is less."""
    free = free_bytes(device)
    usable_bytes = offered_bytes(free) if device.type == PROCESSOR else int(free * _CARD_SHARE)
    return usable_bytes if limit_bytes is None else min(limit_bytes, usable_bytes)


def free_bytes(device: torch.device) -> int:
    """Free memory of the device; of a card, with what PyTorch keeps of it and does not use."""
    if device.type == "cuda":
        kept_bytes = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + int(kept_bytes)
    return granted_memory().free_bytes


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return (names or [platform.processor() or platform.machine()])[0][:128]


def _measure_layer(spec: RunSpec, layer: int, device: torch.device) -> LayerTiming:
    """Times at the microbatch shape, extrapolated from two smaller ones if that takes too long.

    Times are extrapolated by a straight line, since part of them (gradients of the whole
    vocabulary, say) does not depend on the number of tokens.
    """
    module = build_timed_layer(spec, layer, device)
    with torch.no_grad():
        for values in (*module.parameters(), *module.buffers()):
            values.fill_(0.01)
    whole = TrialShape(spec.batch.microbatch, spec.model.context)
    large = _affordable(spec, layer, module, whole, device)
    large_runs = _time_often(spec, layer, module, large, device)
    if large == whole:
        forward_ns, backward_ns = _each(statistics.median, large_runs)
    else:
        small = TrialShape(1, min(whole.tokens, _FIRST_TOKENS) // 8)
        small_runs = _time_often(spec, layer, module, small, device)
        operations = [_operations(spec, layer, shape) for shape in (small, large, whole)]
        reach = (operations[2] - operations[1]) / (operations[1] - operations[0])
        forward_ns, backward_ns = (  # fastest times: noise would bend the line
            there + max(0, there - here) * reach
            for here, there in zip(_each(min, small_runs), _each(min, large_runs), strict=True)
        )
    return LayerTiming(max(1, round(forward_ns)), max(1, round(backward_ns)))


def _measure_listed(spec: RunSpec, layer: int, device: torch.device) -> LayerTiming:
    """Times of a layer that the run lists, at the microbatch shape. If that takes too long, they
    are extrapolated by the straight line through one sequence and two."""
    module = build_timed_layer(spec, layer, device)
    with torch.no_grad():
        for values in module.parameters():
            values.fill_(0.01)
    whole = spec.batch.microbatch
    once_ns = sum(_time_listed(spec, layer, module, 1, device))  # and chooses kernels
    once_ns = min(once_ns, sum(_time_listed(spec, layer, module, 1, device)))
    if whole * once_ns * _FEWEST_REPETITIONS <= 2 * _LAYER_BUDGET_NS:
        runs = [_time_listed(spec, layer, module, whole, device) for _ in range(_REPETITIONS + 1)]
        forward_ns, backward_ns = _each(statistics.median, runs[1:])
    else:
        one, two = (
            [_time_listed(spec, layer, module, count, device) for _ in range(_FEWEST_REPETITIONS)]
            for count in (1, 2)
        )
        forward_ns, backward_ns = (
            here + max(0, there - here) * (whole - 1)
            for here, there in zip(_each(min, one), _each(min, two), strict=True)
        )
    return LayerTiming(max(1, round(forward_ns)), max(1, round(backward_ns)))


def _time_listed(
    spec: RunSpec, layer: int, module: nn.Module, sequences: int, device: torch.device
) -> tuple[int, int]:
    """(forward, backward) nanoseconds that so many sequences take through a listed layer."""
    is_last = layer == layer_count(spec) - 1
    tokens = torch.zeros((sequences, spec.model.context), dtype=torch.int64, device=device)
    entry = tokens
    if layer > 0:
        shape = (sequences, *spec.boundary_shape(layer)[1:])
        values = torch.linspace(-1.0, 1.0, math.prod(shape), device=device)
        entry = values.view(shape).requires_grad_()

    def run() -> Tensor:
        if is_last:
            return loss_sum_of_last(spec, module, entry, tokens)
        answer: Tensor = module(entry).float()
        require_stated_shape(spec, layer, answer)
        return answer

    return _time_passes(spec, run, device, WeightGradients())


def _each(choose: Callable[[list[int]], float], runs: list[tuple[int, int]]) -> tuple[float, float]:
    """`choose` applied to the forward times and to the backward times."""
    return choose([forward for forward, _ in runs]), choose([backward for _, backward in runs])


def _time_often(
    spec: RunSpec, layer: int, module: nn.Module, shape: TrialShape, device: torch.device
) -> list[tuple[int, int]]:
    """(forward, backward) nanoseconds after a warm-up: three runs, more if there is time."""
    _time_once(spec, layer, module, shape, device)
    started_ns = time.perf_counter_ns()
    runs: list[tuple[int, int]] = []
    while len(runs) < _REPETITIONS:
        runs.append(_time_once(spec, layer, module, shape, device))
        late = time.perf_counter_ns() - started_ns > _LAYER_BUDGET_NS
        if late and len(runs) >= _FEWEST_REPETITIONS:
            break
    return runs


def _affordable(
    spec: RunSpec, layer: int, module: nn.Module, whole: TrialShape, device: torch.device
) -> TrialShape:
    """The largest shape, found by doubling, whose warm-up and three repetitions fit the budget."""
    repetition_ns = _LAYER_BUDGET_NS // (_FEWEST_REPETITIONS + 1)
    shape = TrialShape(1, min(whole.tokens, _FIRST_TOKENS))
    _time_once(spec, layer, module, shape, device)  # first use allocates and chooses kernels
    while shape != whole:
        if 2 * sum(_time_once(spec, layer, module, shape, device)) > repetition_ns:
            break
        if shape.tokens < whole.tokens:
            shape = TrialShape(1, min(whole.tokens, 2 * shape.tokens))
        else:
            shape = TrialShape(min(whole.sequences, 2 * shape.sequences), shape.tokens)
    return shape


def _operations(spec: RunSpec, layer: int, shape: TrialShape) -> float:
    """Forward operations, up to a factor common to all shapes (as in `core.protocol.workload`)."""
    tokens = shape.sequences * shape.tokens
    is_block = 0 < layer <= spec.model.layers
    # only blocks cost more for each token of a longer sequence
    return float(block_flops(spec.model, tokens, shape.tokens if is_block else 0))


def _time_once(
    spec: RunSpec, layer: int, module: nn.Module, shape: TrialShape, device: torch.device
) -> tuple[int, int]:
    """(forward, backward) nanoseconds of one microbatch of that shape."""
    owed = WeightGradients()
    if device.type == "cuda" and not spec.trains_adapters:  # as `RecordedStageRunner` has it
        for parameter in module.parameters():
            parameter.grad = torch.zeros_like(parameter)
        kind = rounded_type(spec, device)
        owed = WeightGradients({each: each.detach().to(kind) for each in module.parameters()})
        leave_weight_gradients(module, owed)
    return _time_passes(spec, trial_pass(spec, layer, module, shape, device), device, owed)


def _time_passes(
    spec: RunSpec, run: Callable[[], Tensor], device: torch.device, owed: WeightGradients
) -> tuple[int, int]:
    """(forward, backward) nanoseconds; on a card, started as `RecordedStageRunner` does."""
    with kernels_for(spec, device):
        return _time_parts(spec, run, device, owed)


def _time_parts(
    spec: RunSpec, run: Callable[[], Tensor], device: torch.device, owed: WeightGradients
) -> tuple[int, int]:
    results: list[Tensor] = []

    def forward() -> None:
        with autocast(spec, device):
            results.append(run())

    def backward() -> None:
        result = results.pop()
        if result.requires_grad:
            backward_from(result, torch.ones_like(result))
        owed.settle()

    parts: list[Callable[[], None]] = [forward, backward]
    if device.type == "cuda" and is_recorded(spec):
        with contextlib.suppress(RuntimeError):  # then it also trains without recordings
            parts = _recorded(parts, recorder_of(device))
    spent_ns = []
    for part in parts:
        _finish(device)
        started_ns = time.perf_counter_ns()
        part()
        _finish(device)
        spent_ns.append(time.perf_counter_ns() - started_ns)
    return spent_ns[0], spent_ns[1]


def _recorded(parts: list[Callable[[], None]], recorder: Recorder) -> list[Callable[[], None]]:
    """Functions that start the recorded parts again, one after another."""
    with recorder.aside():
        for part in parts:
            part()
    room = recorder.room()
    return [recorder.record(part, room).replay for part in parts]


def _finish(device: torch.device) -> None:
    """Wait until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
