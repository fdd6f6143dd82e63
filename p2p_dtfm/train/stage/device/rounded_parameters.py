"""A stage's parameters in the type of its products, rounded once for each step.

Autocast would round them in each microbatch, and each recorded microbatch would keep the result.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.train.model.layer_state import LayerState
from p2p_dtfm.train.model.precision import compute_type


def rounded_type(spec: RunSpec, device: torch.device) -> torch.dtype:
    """The type to which a stage on the device may round its parameters. It is fp32, so nothing is
    rounded, if parameters change within a step."""
    return torch.float32 if spec.sync.mode == "local" else compute_type(spec, device)


class RoundedParameters:
    """The rounded parameters of states that change only between steps; none if products are
    fp32."""

    def __init__(self, states: Iterable[LayerState], kind: torch.dtype) -> None:
        self._states = [] if kind is torch.float32 else list(states)
        self._kind = kind
        self.by_parameter: dict[nn.Parameter, Tensor] = {}
        """Shaped as the parameter. A view of memory that stays where it is until a state moves."""
        self._flat: dict[int, Tensor] = {}
        self._seen: dict[int, tuple[int, int]] = {}

    def refresh(self) -> None:
        """Call it before computing with the parameters. It rounds only after an update."""
        for state in self._states:
            now = state.version, state.moves
            if self._seen.get(state.layer) != now:
                self._round(state)
                self._seen[state.layer] = now

    def _round(self, state: LayerState) -> None:
        flat = self._flat.get(state.layer)
        if flat is None or flat.device != state.device:
            flat = torch.empty_like(state.parameters, dtype=self._kind)
            self._flat[state.layer] = flat
            start = 0
            for parameter in state.module.parameters():
                here = slice(start, start + parameter.numel())
                self.by_parameter[parameter] = flat[here].view(parameter.shape)
                start = here.stop
        flat.copy_(state.parameters)
