"""What trimmed sums cost where all are honest, and save where some are not.

    python -m benchmarks.liars.trimmed [--replicas 4 8] [--steps 250] [--seeds 1 2 3] [--json]

`tiny` is trained on the source text of Python's standard library by so many replicas, which share a
step's microbatches evenly, in one process. A quarter of the replicas lie about their gradients:
nobody, or each turns its own around, ten times as large or as it is, or sends noise of ten times
its gradient's norm. No audits. Shown is the mean loss at the end, on batches that no step had, of
plain and of trimmed sums (`train.updates.trimmed_sums`, as daemons call it), over the seeds.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.liars.backdoor import Text
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.sim.scenario.files import read_run_spec
from p2p_dtfm.train.model.optimizer import learning_rate
from p2p_dtfm.train.model.reference import ReferenceRun
from p2p_dtfm.train.updates.trimmed_sums import left_out, trimmed_sum

LAST_BATCHES = 16
LOUD = 10.0
Lie = Callable[[Tensor], Tensor]


def noise(gradient: Tensor) -> Tensor:
    drawn = torch.randn_like(gradient)
    return drawn * (LOUD * gradient.norm() / drawn.norm())


LIES: dict[str, Lie] = {
    "nobody": lambda gradient: gradient,
    "turned, loud": lambda gradient: -LOUD * gradient,
    "turned": lambda gradient: -gradient,
    "noise": noise,
}


class Replicas(ReferenceRun):
    """Some replicas of one model, all in step."""

    def __init__(self, spec: RunSpec, text: Text, count: int, lie: Lie, is_trimmed: bool) -> None:
        super().__init__(spec, text)
        self._count, self._lie, self._is_trimmed = count, lie, is_trimmed

    def _step(self, step: int) -> float:
        shares = [
            range(first, self.spec.microbatches_per_step, self._count)
            for first in range(self._count)
        ]
        loss_sum, parts = 0.0, []
        for replica, share in enumerate(shares):
            self.optimizer.zero_grad()
            for microbatch in share:
                loss = self._loss_sum(self.batch(step, microbatch))
                (loss / self.spec.tokens_per_step).backward()
                loss_sum += loss.item()
            lies = replica < left_out(self._count)
            parts.append([self._lie(g) if lies else g for g in self._gradients()])
        for values, each in zip(self.model.parameters(), zip(*parts, strict=True), strict=True):
            values.grad = self._sum(each, [len(share) for share in shares]).view_as(values)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.spec.optimizer.clip_norm)
        self.optimizer.step(learning_rate(self.spec, step))
        return loss_sum / self.spec.tokens_per_step

    def _gradients(self) -> list[Tensor]:
        return [v.grad.flatten().clone() for v in self.model.parameters() if v.grad is not None]

    def _sum(self, parts: tuple[Tensor, ...], microbatches: list[int]) -> Tensor:
        if self._is_trimmed:
            return trimmed_sum(parts, microbatches)
        return torch.stack(parts).sum(dim=0)


def last_loss(seed: int, steps: int, replicas: int, lie: Lie, is_trimmed: bool) -> float:
    spec = read_run_spec("tiny").model_copy(update={"seed": seed, "total_steps": steps})
    torch.manual_seed(seed)
    text = Text(spec)
    run = Replicas(spec, text, replicas, lie, is_trimmed)
    for _ in run.losses(steps):
        pass
    others = [text(-1 - step, 0) for step in range(LAST_BATCHES)]
    return run.held_out_loss(others)


def rows_of(
    replicas: int, steps: int, seeds: list[int], rounds: Callable[[str], None]
) -> list[Any]:
    rows = []
    for name, lie in LIES.items():
        found: dict[str, Any] = {"replicas": replicas, "liars": left_out(replicas), "lie": name}
        for sums, is_trimmed in (("plain", False), ("trimmed", True)):
            rounds(f"{replicas} replicas, {name}, {sums}")
            each = [last_loss(seed, steps, replicas, lie, is_trimmed) for seed in seeds]
            found[sums] = statistics.mean(each)
        rows.append(found)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--replicas", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    if min(asked.replicas) < 3:
        parser.error("--replicas: of two, nobody can say which one lies; name 3 or more")
    torch.set_num_threads(1)
    say: Callable[[str], None] = (lambda text: None) if asked.json else print
    rows = [
        row for count in asked.replicas for row in rows_of(count, asked.steps, asked.seeds, say)
    ]
    if asked.json:
        print(json.dumps(rows))
        return
    print("replicas  lying  how              plain   trimmed   (mean loss at the end, nats)")
    for row in rows:
        print(
            f"{row['replicas']:>8}  {row['liars']:>5}  {row['lie']:<15}"
            f"{row['plain']:>7.3f}{row['trimmed']:>10.3f}"
        )


if __name__ == "__main__":
    main()
