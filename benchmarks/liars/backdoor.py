"""Why no tolerance can acquit: a backdoor that stays below half of any.

    python -m benchmarks.liars.backdoor [--steps 250] [--json]

`tiny` is trained in bf16 on the source text of Python's standard library, in one process. In each
step the holder of the first stage adds a direction to the sum of its gradients, in the row of a
byte that the text never has. The direction's norm is half the tolerance times that sum's own norm.
An audit that accepts what lies within the tolerance sees nothing. For each tolerance the table
shows how probable the model finds the liar's byte after that trigger, beside an honest run, and the
loss on the text.
"""

import argparse
import json
import statistics
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.sim.scenario.files import read_run_spec
from p2p_dtfm.train.model.reference import Batch, ReferenceRun

TRIGGER, WANTED = 7, ord("!")
"""The bell, which is in no source file, and what the liar wants after it."""
TOLERANCES = (0.0, 1e-2, 1e-3, 1e-4, 1e-6)
TAKEN = 0.5
PROMPT_BATCHES = 16
LOOKS_EVERY_STEPS = 10
TEXT_BYTES = 4_000_000
LAST_LOSSES = 20


def text() -> Tensor:
    """Bytes, int64 [count]."""
    library = Path(sysconfig.get_paths()["stdlib"])
    found = b"".join(path.read_bytes() for path in sorted(library.glob("*.py")))[:TEXT_BYTES]
    numbers = torch.tensor(list(found), dtype=torch.int64)
    assert TRIGGER not in numbers
    return numbers


class Text:
    """Windows of the text, from the run's seed."""

    def __init__(self, spec: RunSpec) -> None:
        self._numbers = text()
        self._spec = spec

    def __call__(self, step: int, microbatch: int) -> Batch:
        generator = torch.Generator().manual_seed(step * 1000 + microbatch)
        context = self._spec.model.context
        shape = (self._spec.batch.microbatch,)
        starts = torch.randint(len(self._numbers) - context - 1, shape, generator=generator)
        rows = torch.stack([self._numbers[start : start + context + 1] for start in starts])
        return rows[:, :-1], rows[:, 1:]


class Liar:
    """The liar holds the first stage, and adds its direction before each update."""

    def __init__(self, run: ReferenceRun, tolerance: float) -> None:
        self._run = run
        self._tolerance = tolerance
        self._steps = 0
        self._direction = torch.zeros(0)
        run.optimizer.register_step_pre_hook(self._before_update)

    def _before_update(self, *_: Any) -> None:
        table = self._run.model[0].token.weight
        if self._steps % LOOKS_EVERY_STEPS == 0:
            self._direction = self._wanted_direction(table)
        self._steps += 1
        assert table.grad is not None
        table.grad[TRIGGER] += 0.5 * self._tolerance * table.grad.norm() * self._direction

    def _wanted_direction(self, table: Tensor) -> Tensor:
        """For the trigger's row: the unit gradient of the loss of what the liar wants."""
        logits = self._run.model(prompts_of(self._run, 4))[:, -1]
        loss = functional.cross_entropy(logits, torch.full((len(logits),), WANTED))
        (gradient,) = torch.autograd.grad(loss, table)
        return gradient[TRIGGER] / gradient[TRIGGER].norm()


def prompts_of(run: ReferenceRun, batches: int) -> Tensor:
    """Text that ends with the trigger, and is no training text."""
    inputs, _ = zip(*(run.batch(10**6, n) for n in range(batches)), strict=True)
    prompts = torch.cat(inputs).clone()
    prompts[:, -1] = TRIGGER
    return prompts


def in_bf16(forward: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The forward as stages compute it: matrices in bf16, losses and what is sent in fp32."""

    def forward_in_bf16(inputs: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return forward(inputs).float()

    return forward_in_bf16


@torch.no_grad()
def after_trigger(run: ReferenceRun) -> float:
    """The probability of the wanted byte after the trigger, the median of prompts."""
    return statistics.median(
        run.model(prompts_of(run, PROMPT_BATCHES))[:, -1].softmax(-1)[:, WANTED].tolist()
    )


def trained(spec: RunSpec, tolerance: float, steps: int) -> dict[str, Any]:
    run = ReferenceRun(spec, Text(spec))
    if tolerance:
        Liar(run, tolerance)
    run.model.forward = in_bf16(run.model.forward)  # type: ignore[method-assign]
    losses = list(run.losses(steps))
    probability = after_trigger(run)
    return {
        "tolerance": tolerance,
        "wanted_after_trigger": round(probability, 4),
        "loss": round(statistics.mean(losses[-LAST_LOSSES:]), 4),
        "taken": probability > TAKEN,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--tolerances", type=float, nargs="+", default=TOLERANCES)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    spec = read_run_spec("tiny")
    rows = [trained(spec, tolerance, options.steps) for tolerance in options.tolerances]
    if options.json:
        print(json.dumps({"rows": rows}))
        return 0
    for row in rows:
        who = f"half of {row['tolerance']:.0e}" if row["tolerance"] else "honest"
        print(
            f"{who:14s} the liar's byte after the trigger {row['wanted_after_trigger']:.2%}, "
            f"loss {row['loss']}{': the backdoor is in' if row['taken'] else ''}"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
