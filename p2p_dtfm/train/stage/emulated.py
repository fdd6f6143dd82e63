"""A device that takes the time of another one. It lets small machines run large swarms with real
protocol, real bytes and real waiting. It computes nothing, so what it trains is worth nothing.

Its activations and gradients are zeros of the right shapes, and its loss is that of a uniform
guess, `log(vocabulary)` for each token. Parameters and optimizer are the real ones: they take real
memory, and move as in a real swarm.
"""

import contextlib
import math
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import msgspec
import torch
from torch import Tensor

from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.core.protocol.layers.timings import timing_of
from p2p_dtfm.core.protocol.records import Device, LayerTiming
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.core.protocol.workload import LayerCost, workload_of
from p2p_dtfm.core.schedule.tasklets import weight_part_ns
from p2p_dtfm.ports import now
from p2p_dtfm.train.model.gpt import Told, layer_count
from p2p_dtfm.train.model.layer_state import LayerState
from p2p_dtfm.train.stage.stage_runner import StageRunner

KIND = "emulated"
BACKWARD_FORWARDS = 2
"""How many times longer a backward takes than a forward (Kaplan et al. 2020)."""
_LARGEST_TFLOPS = 1e6
_LATE_LIMIT_NS = 50_000_000


def emulated_flops_per_s(text: str) -> int | None:
    """The rate in "emulated:TFLOPS"; None for any other device. Raises `UserError`."""
    kind, colon, number = text.strip().lower().partition(":")
    if kind != KIND:
        return None
    try:
        tflops = float(number) if colon else math.nan
    except ValueError:
        tflops = math.nan
    if not 0 < tflops <= _LARGEST_TFLOPS:
        raise UserError(
            f"unknown device {text!r}",
            'say how many TFLOPS it sustains, for example "emulated:40"',
        )
    return max(1, round(tflops * 1e12))


def emulated_timing(cost: LayerCost, flops_per_s: int) -> LayerTiming:
    """A layer's time for one microbatch, as a scenario's planner takes it."""
    forward_ns = max(1, -(-cost.forward_flops * 1_000_000_000 // flops_per_s))
    backward_ns = BACKWARD_FORWARDS * forward_ns
    if cost.backward_flops:
        backward_ns = max(1, -(-cost.backward_flops * 1_000_000_000 // flops_per_s))
    return LayerTiming(forward_ns, backward_ns)


def emulated_device(spec: RunSpec, flops_per_s: int, memory_bytes: int) -> Device:
    """The device as its peer's record says it."""
    workload = workload_of(spec)
    unlike = workload.unlike
    return Device(
        kind=KIND,
        name=f"{flops_per_s / 1e12:g} TFLOPS",
        memory_bytes=memory_bytes,
        embedding=emulated_timing(workload.embedding, flops_per_s),
        block=emulated_timing(workload.block, flops_per_s),
        head=emulated_timing(workload.head, flops_per_s),
        listed=tuple(
            emulated_timing(cost, flops_per_s) for cost in (unlike.costs if unlike else ())
        )
        or msgspec.UNSET,
    )


def timings_of(device: Device, spec: RunSpec, layers: Iterable[int]) -> dict[int, LayerTiming]:
    """The times of these layers of the model, as the device's record says them."""
    workload = workload_of(spec)
    return {layer: timing_of(device, workload, layer) for layer in layers}


class EmulatedStageRunner(StageRunner):
    """A `StageRunner` whose passes take the time of its device. Blocks its thread meanwhile.

    What else a pass costs on this machine (tensors of zeros, autograd) is not the device's time, so
    it is taken off the sleeps that follow, as far as each lasts. The first stage's norms and update
    are taken off as well: they are a thousandth of a device's operations, but all emulated devices
    make theirs at once on the processors that they share. (Other stages wait for the first one
    meanwhile, so there they would be taken off twice.)
    """

    repeats_bits = False

    def __init__(
        self,
        device: Device,
        spec: RunSpec,
        layer_states: dict[int, LayerState],
        recompute: bool = False,
    ) -> None:
        assert device.kind == KIND, device.kind
        super().__init__(spec, layer_states, recompute)
        self._timings = timings_of(device, spec, self.layer_states)
        self._anchor = torch.zeros((), requires_grad=True)
        self._late_ns = 0
        self._slept_ns = 0

    def forward(
        self,
        microbatch: int,
        entry: Tensor,
        targets: Tensor | None = None,
        tokens: Tensor | None = None,
    ) -> Tensor | float:
        with self._in_time():
            return super().forward(microbatch, entry, targets, tokens)

    def _layer_backward(
        self, microbatch: int, layer: int, gradient: Tensor | None
    ) -> Tensor | None:
        with self._in_time():
            return super()._layer_backward(microbatch, layer, gradient)

    def beside_passes(self) -> contextlib.AbstractContextManager[None]:
        return self._in_time() if self.has_embedding else super().beside_passes()

    @contextlib.contextmanager
    def _in_time(self) -> Iterator[None]:
        """The time that the body takes beyond its sleeps counts as late."""
        began_ns, slept_ns = now.monotonic_ns(), self._slept_ns
        yield
        took_ns = now.monotonic_ns() - began_ns - (self._slept_ns - slept_ns)
        self._late_ns = min(self._late_ns + took_ns, _LATE_LIMIT_NS)

    def _run(self, layer: int, entry: Tensor, targets: Tensor | None, told: Told) -> Tensor:
        is_head = layer == layer_count(self.spec) - 1
        timing = self._timings[layer]
        answer = None if is_head else (len(entry), *self.spec.boundary_shape(layer + 1)[1:])
        parts = (timing, targets if is_head else None, answer, self)
        result: Tensor = _EmulatedPass.apply(  # type: ignore[no-untyped-call]
            self._anchor, entry, *parts
        )
        return result

    def backward_pass(self, timing: LayerTiming) -> None:
        """Sleep for the input's gradient, and later, or at once, for the matrices' gradients."""
        later_ns = weight_part_ns(timing.forward_ns, timing.backward_ns) if self.splits else 0
        self.pass_time(timing.backward_ns - later_ns)
        if later_ns:
            self._weight_gradients.owe_work(partial(self.pass_time, later_ns))

    def pass_time(self, duration_ns: int) -> None:
        """Sleep. What one sleep takes too long is taken off the next one."""
        began_ns = now.monotonic_ns()
        now.block_ns(max(0, duration_ns - self._late_ns))
        slept_ns = now.monotonic_ns() - began_ns
        self._slept_ns += slept_ns
        self._late_ns = min(max(0, self._late_ns + slept_ns - duration_ns), _LATE_LIMIT_NS)


class _EmulatedPass(torch.autograd.Function):
    """A pass in autograd's graph: it follows whatever order of passes the engine chooses."""

    @staticmethod
    def forward(
        context: Any,
        anchor: Tensor,
        entry: Tensor,
        timing: LayerTiming,
        targets: Tensor | None,
        answer: tuple[int, ...] | None,
        runner: EmulatedStageRunner,
    ) -> Tensor:
        runner.pass_time(timing.forward_ns)
        context.runner, context.timing = runner, timing
        context.entry_shape = entry.shape if entry.is_floating_point() else None
        if targets is not None:
            return torch.tensor(targets.numel() * math.log(runner.spec.model.vocabulary))
        assert answer is not None
        return torch.zeros(answer)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        context.runner.backward_pass(context.timing)
        shape = context.entry_shape
        entry = None if shape is None else torch.zeros(shape)
        return torch.zeros(()), entry, None, None, None, None
