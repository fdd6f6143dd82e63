"""A stage that really computes, and takes the time that its device's record says.

For daemons in virtual time: there the processor's own time counts for nothing.
"""

import torch
from torch import Tensor

from p2p_dtfm.core.protocol.records import Device
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.ports import now
from p2p_dtfm.train.model.gpt import Told
from p2p_dtfm.train.model.layer_state import LayerState
from p2p_dtfm.train.stage.emulated import timings_of
from p2p_dtfm.train.stage.stage_runner import StageRunner


def use_one_thread() -> None:
    """One thread of torch: small layers gain nothing by more, and sums come in one order."""
    torch.set_num_threads(1)


class TimedStageRunner(StageRunner):
    """A `StageRunner` in virtual time, where a backward's first part takes the time of all."""

    def __init__(
        self,
        device: Device,
        spec: RunSpec,
        layer_states: dict[int, LayerState],
        recompute: bool = False,
    ) -> None:
        super().__init__(spec, layer_states, recompute)
        self._timings = timings_of(device, spec, self.layer_states)

    def _run(self, layer: int, entry: Tensor, targets: Tensor | None, told: Told) -> Tensor:
        now.block_ns(self._timings[layer].forward_ns)
        return super()._run(layer, entry, targets, told)

    def _layer_backward(
        self, microbatch: int, layer: int, gradient: Tensor | None
    ) -> Tensor | None:
        now.block_ns(self._timings[layer].backward_ns)
        return super()._layer_backward(microbatch, layer, gradient)
