"""A stage that counts what it has computed: for whoever judges what a daemon says to have given."""

from collections import Counter

from torch import Tensor

from p2p_dtfm.core.protocol.records import Device
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.train.model.gpt import Told
from p2p_dtfm.train.model.layer_state import LayerState
from p2p_dtfm.train.stage.timed import TimedStageRunner


class CountedStageRunner(TimedStageRunner):
    """`taken`: tokens through one layer each, by peer, in all lives."""

    def __init__(
        self,
        taken: Counter[str],
        peer_id: str,
        device: Device,
        spec: RunSpec,
        layer_states: dict[int, LayerState],
        recompute: bool = False,
    ) -> None:
        super().__init__(device, spec, layer_states, recompute)
        self._taken = taken
        self._peer_id = peer_id

    def _run(self, layer: int, entry: Tensor, targets: Tensor | None, told: Told) -> Tensor:
        self._taken[self._peer_id] += entry.shape[0] * entry.shape[1]
        return super()._run(layer, entry, targets, told)
