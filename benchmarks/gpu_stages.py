"""Stages of a run on one device in `benchmarks.gpu`, ours beside a plain compiled loop."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.train.model.gpt import build_layer, initialise_layer, layer_count, token_loss_sum
from p2p_dtfm.train.model.layer_state import LayerState
from p2p_dtfm.train.model.optimizer import learning_rate
from p2p_dtfm.train.model.plain_optimizers import torch_adam_w
from p2p_dtfm.train.model.precision import autocast, compute_type
from p2p_dtfm.train.stage.device.facts import product_mflops
from p2p_dtfm.train.stage.device.recorded_runner import runner_on

Step = Callable[[], None]
_PASSES = 3
"""A backward takes two products for each product of a forward."""


@dataclass(frozen=True)
class StageWork:
    """Contiguous layers of a run, and how many microbatches make a step here."""

    spec: RunSpec
    layers: range
    microbatches: int

    @property
    def tokens(self) -> int:
        return self.microbatches * self.spec.batch.microbatch * self.spec.model.context

    def operations(self, parameters: int) -> int:
        """Operations of a step's matrix products: of the weights, and of the attention of all its
        blocks."""
        model = self.spec.model
        blocks = len([n for n in self.layers if 0 < n < layer_count(self.spec) - 1])
        attention = 2 * 2 * model.context * model.query_width * blocks
        return _PASSES * self.tokens * (2 * parameters + attention)

    def states_on(self, device: torch.device) -> dict[int, LayerState]:
        """The states before the first step."""
        return {layer: LayerState.genesis(self.spec, layer, device) for layer in self.layers}

    def input_for(self, device: torch.device) -> tuple[Tensor, Tensor | None]:
        """The input of the stage, and the targets of a stage with the head."""
        generator = torch.Generator().manual_seed(self.spec.seed)
        model = self.spec.model
        shape = (self.spec.batch.microbatch, model.context)
        tokens = torch.randint(model.vocabulary, shape, generator=generator)
        entry = tokens if 0 in self.layers else torch.randn(*shape, model.boundary_width)
        targets = tokens if layer_count(self.spec) - 1 in self.layers else None
        return entry.to(device), None if targets is None else targets.to(device)


def our_step(work: StageWork, device: torch.device) -> Step:
    """A stage as a daemon runs it, one microbatch after the other. Nothing is sent."""
    states = work.states_on(device)
    runner = runner_on(device.type)(work.spec, states)
    entry, targets = work.input_for(device)
    slope = None if targets is not None else torch.full(entry.shape, 1e-3, device=device)
    if 0 in work.layers and targets is None:
        slope = torch.full((*entry.shape, work.spec.model.boundary_width), 1e-3, device=device)

    def step() -> None:
        for number in range(work.microbatches):
            runner.forward(number, entry, targets)
            runner.backward(number, slope)
        for state in states.values():
            state.apply(state.gradient_vector(), 1.0, learning_rate(work.spec, state.version))

    return step


def plain_step(work: StageWork, device: torch.device, compiles: bool) -> Step:
    """The same layers in a loop that anyone would write, compiled, with PyTorch's own AdamW."""
    layers = []
    for number in work.layers:
        module = build_layer(work.spec, number)
        initialise_layer(module, work.spec, number)
        layers.append(module)
    model: Any = nn.Sequential(*layers).to(device)
    optimizer = torch_adam_w(work.spec, list(model.parameters()))
    called = torch.compile(model) if compiles else model
    entry, targets = work.input_for(device)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        for _ in range(work.microbatches):
            with autocast(work.spec, device):
                result = called(entry).float()
                loss = result.mean() if targets is None else token_loss_sum(result, targets)
            (loss / work.spec.tokens_per_step).backward()
        optimizer.step()

    return step


def in_turn(
    steps: dict[str, Step], finish: Callable[[], None], rounds: int, until_s: float
) -> dict[str, float]:
    """Median seconds of each; the first round of each warms up. There are fewer rounds once
    `until_s` (of the monotonic clock) is past."""
    found: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds + 1):
        for name, step in steps.items():
            finish()
            began_s = time.monotonic()
            step()
            finish()
            found[name].append(time.monotonic() - began_s)
        if number and time.monotonic() > until_s:
            break
    return {name: statistics.median(times[1:]) for name, times in found.items()}


def stage_figures(
    work: StageWork,
    device: torch.device,
    finish: Callable[[], None],
    rounds: int,
    until_s: float,
) -> dict[str, Any]:
    """Tokens per second of our stage and the plain loop. Also the share of the rate that this
    device reaches with two large matrices alone."""
    steps = {
        "ours": our_step(work, device),
        "plain": plain_step(work, device, compiles=device.type == "cuda"),
    }
    found = in_turn(steps, finish, rounds, until_s)
    kind = compute_type(work.spec, device)
    most_per_s = product_mflops(device, kind, finish) * 1e6
    modules = [build_layer(work.spec, n, "meta") for n in work.layers if n]
    parameters = sum(p.numel() for module in modules for p in module.parameters())
    operations = work.operations(parameters)
    return {
        "layers": [work.layers.start, work.layers.stop],
        "type": str(kind).removeprefix("torch."),
        "tokens_per_s": {name: round(work.tokens / spent) for name, spent in found.items()},
        "share_of_products": {
            name: round(operations / spent / most_per_s, 3) for name, spent in found.items()
        },
        "over_plain": round(found["plain"] / found["ours"], 3),
    }
