"""The optimizers of a run as anyone would write them with PyTorch, for the plain loop."""

import math
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from p2p_dtfm.core.protocol.model_spec import ModelSpec
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.core.protocol.sections.optimizer_spec import MuonSpec
from p2p_dtfm.train.model.block import Block


class PlainOptimizer:
    """AdamW, and Muon for the matrices of blocks if the run says so."""

    def __init__(self, spec: RunSpec, model: nn.Module) -> None:
        matrices: list[tuple[nn.Parameter, list[int]]] = []
        if spec.optimizer.kind == "muon":
            blocks = (module for module in model.modules() if isinstance(module, Block))
            matrices = [each for block in blocks for each in _matrices(spec.model, block)]
        taken = {id(parameter) for parameter, _ in matrices}
        self.rest = [p for p in model.parameters() if id(p) not in taken]
        """The parameters that AdamW updates."""
        spared = set()
        if not spec.optimizer.decay_embeddings:
            tables = (module for module in model.modules() if isinstance(module, nn.Embedding))
            spared = {id(parameter) for table in tables for parameter in table.parameters()}
        self._adam_w = torch_adam_w(spec, self.rest, spared)
        self._muon = _PlainMuon(matrices, spec.optimizer.muon)
        self._peaks = spec.optimizer.muon.peak_learning_rate / spec.optimizer.peak_learning_rate

    def zero_grad(self) -> None:
        for optimizer in (self._adam_w, self._muon):
            optimizer.zero_grad(set_to_none=True)

    def step(self, learning_rate: float) -> None:
        """One step with AdamW's rate; Muon's rate has the same schedule."""
        for optimizer, times in ((self._adam_w, 1.0), (self._muon, self._peaks)):
            for group in optimizer.param_groups:
                group["lr"] = times * learning_rate
            optimizer.step()


def torch_adam_w(
    spec: RunSpec, parameters: list[nn.Parameter], spared: Collection[int] = ()
) -> torch.optim.AdamW:
    """`spared`: ids of matrices that do not decay."""
    settings = spec.optimizer
    decaying = [p for p in parameters if p.dim() >= 2 and id(p) not in spared]
    rest = [p for p in parameters if p.dim() < 2 or id(p) in spared]
    return torch.optim.AdamW(
        [
            {"params": decaying, "weight_decay": settings.weight_decay},
            {"params": rest, "weight_decay": 0.0},
        ],
        betas=(settings.beta1, settings.beta2),
        eps=settings.epsilon,
    )


def _matrices(model: ModelSpec, block: Block) -> Iterator[tuple[nn.Parameter, list[int]]]:
    """Each tensor of a block that holds matrices, with the rows of each matrix in it."""
    hidden = 1 if model.feed_forward == "gelu" else 2
    queries, keys = model.query_width, model.key_width
    yield block.get_parameter("attention_input.weight"), [queries, keys, keys]
    yield block.get_parameter("attention_output.weight"), [model.boundary_width]
    yield block.get_parameter("feed_forward_input.weight"), [model.hidden_width] * hidden
    yield block.get_parameter("feed_forward_output.weight"), [model.boundary_width]


class _PlainMuon(torch.optim.Optimizer):
    """Muon in fp32, as its authors describe it."""

    def __init__(self, matrices: list[tuple[nn.Parameter, list[int]]], settings: MuonSpec) -> None:
        self._rows = {id(parameter): rows for parameter, rows in matrices}
        self._settings = settings
        nothing = nn.Parameter(torch.empty(0))  # an optimizer needs one
        super().__init__([nothing, *(parameter for parameter, _ in matrices)], {"lr": 0.0})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        (group,) = self.param_groups
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            before = state.get("momentum", torch.zeros_like(parameter))
            momentum = state["momentum"] = self._settings.momentum * before + parameter.grad
            wanted = parameter.grad + self._settings.momentum * momentum
            parts = wanted.split(self._rows[id(parameter)])
            change = torch.cat([_direction(part) for part in parts])
            decay = group["lr"] * self._settings.weight_decay
            parameter.copy_((1 - decay) * parameter - group["lr"] * change)


def _direction(wanted: Tensor) -> Tensor:
    rows, columns = wanted.shape
    x: Tensor = wanted / (wanted.norm() + 1e-7)
    for _ in range(5):
        x = 3.4445 * x - 4.7750 * (x @ x.T @ x) + 2.0315 * (x @ x.T @ x @ x.T @ x)
    return x * math.sqrt(max(1.0, rows / columns))
