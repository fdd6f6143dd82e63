"""What Muon in step costs: a step of `tiny` with it against one with AdamW, by tokens in the step.

    python -m benchmarks.muon [--steps N] [--quick] [--json]

One stage that holds all layers, on one thread: forward and backward of each microbatch, the norm,
and the update, with either optimizer in turn. Every holder makes the same update, whatever the
step's length, so the ratio falls with the tokens that a replica computes. Products of Muon's
matrices are exact, in float64 (`docs/decisions/0051-muon-and-signs.md`).

`by updates`, which is judged: what its update takes longer, over AdamW's step. All else is the
same work, and of long steps the noise alone is more than two percent. Lower bound: the same
products in fp32, at the rate of the step's own. Replicas that shared them evenly would come to the
same: each computes so many fewer tokens too. Target: 1.02 of AdamW's step at the most tokens.
"""

import math
import statistics
import time

import torch
from torch import Tensor

from benchmarks.command_line import conclude, parse_options
from p2p_dtfm.core.protocol.run_spec import BatchSpec, RunSpec
from p2p_dtfm.core.protocol.sections.optimizer_spec import OptimizerSpec
from p2p_dtfm.sim.scenario.files import read_run_spec
from p2p_dtfm.train.model.gpt import layer_count
from p2p_dtfm.train.model.layer_state import LayerState
from p2p_dtfm.train.model.optimizer import apply_outcome
from p2p_dtfm.train.stage.stage_runner import StageRunner
from p2p_dtfm.train.updates.exact_sums import squared_norm

TARGET = 1.02
SEQUENCES = (32, 256, 2048)
"""Sequences in a step: as many as `tiny` has, and more."""
SEQUENCES_QUICK = (32, 128)
KINDS = ("adamw", "muon")
ITERATIONS = 5


def spec_of(kind: str, sequences: int) -> RunSpec:
    tiny = read_run_spec("tiny")
    said = tiny.optimizer.model_dump(exclude={"muon"}) | {"kind": kind}
    batch = BatchSpec(global_batch=sequences, microbatch=tiny.batch.microbatch)
    return tiny.model_copy(update={"optimizer": OptimizerSpec.model_validate(said), "batch": batch})


class Trainer:
    """A trainer with all layers in one place."""

    def __init__(self, spec: RunSpec) -> None:
        self.spec = spec
        self.states = [LayerState.genesis(spec, layer) for layer in range(layer_count(spec))]
        self.runner = StageRunner(spec, {state.layer: state for state in self.states})

    def step(self, number: int) -> tuple[float, float]:
        """Seconds of the whole step, and of its update alone."""
        began_s = time.perf_counter()
        for microbatch in range(self.spec.microbatches_per_step):
            self.runner.forward(microbatch, *random_batch(self.spec, number, microbatch))
            self.runner.backward(microbatch)
        reduced = [state.gradient.clone() for state in self.states]
        norm = math.sqrt(math.fsum(map(squared_norm, reduced)))
        updates_s = time.perf_counter()
        for state, gradient in zip(self.states, reduced, strict=True):
            apply_outcome(self.spec, state, gradient, number, norm)
        ended_s = time.perf_counter()
        return ended_s - began_s, ended_s - updates_s


def random_batch(spec: RunSpec, step: int, microbatch: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of one microbatch: int64 [sequences, tokens] each."""
    generator = torch.Generator().manual_seed(step * 4096 + microbatch)
    shape = (spec.batch.microbatch, spec.model.context + 1)
    tokens = torch.randint(spec.model.vocabulary, shape, generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def least_ratio(spec: RunSpec) -> float:
    """The least ratio by operations alone, with Muon's products in fp32."""
    states = [LayerState.genesis(spec, layer) for layer in range(layer_count(spec))]
    tokens = spec.batch.global_batch * spec.model.context
    parameters = sum(state.parameter_count for state in states)
    products = 0
    width, inner = spec.model.width, 4 * spec.model.width
    for rows, columns in ((width, width),) * 4 + ((width, inner),) * 2:
        products += spec.model.layers * ITERATIONS * (4 * rows * rows * columns + 2 * rows**3)
    return 1 + products / (6 * parameters * tokens)


def measured(sequences: int, steps: int) -> dict[str, float]:
    """Medians of so many steps of either optimizer in turn, after one that warms up."""
    trainers = {kind: Trainer(spec_of(kind, sequences)) for kind in KINDS}
    took: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
    for number in range(steps + 1):
        for kind, trainer in trainers.items():
            took[kind].append(trainer.step(number))
    step_s = {kind: [whole for whole, _ in rows[1:]] for kind, rows in took.items()}
    update_s = {kind: [update for _, update in rows[1:]] for kind, rows in took.items()}
    pairs = zip(step_s["muon"], step_s["adamw"], strict=True)
    adamw_s = statistics.median(step_s["adamw"])
    longer_s = statistics.median(update_s["muon"]) - statistics.median(update_s["adamw"])
    return {
        "tokens": sequences * trainers["muon"].spec.model.context,
        "adamw_s": adamw_s,
        "muon_s": statistics.median(step_s["muon"]),
        "muon_update_s": statistics.median(update_s["muon"]),
        "by_updates": 1 + longer_s / adamw_s,
        "ratio": statistics.median(ours / theirs for ours, theirs in pairs),
        "least": least_ratio(trainers["muon"].spec),
    }


def main() -> int:
    options = parse_options(__doc__, steps=5, quick="few tokens, where the target is not met")
    torch.set_num_threads(1)
    sizes = SEQUENCES_QUICK if options.quick else SEQUENCES
    rows = [measured(sequences, options.steps) for sequences in sizes]
    lines = ["tokens a step   AdamW      Muon     its update   ratio   by updates   at least"]
    for row in rows:
        lines.append(
            f"{row['tokens']:>13,.0f} {row['adamw_s']:7.3f} s {row['muon_s']:7.3f} s"
            f" {row['muon_update_s']:9.3f} s {row['ratio']:8.3f}"
            f" {row['by_updates']:11.3f} {row['least']:10.3f}"
        )
    verdict = f"Muon's step over AdamW's with {rows[-1]['tokens']:,.0f} tokens, at most {TARGET}"
    return conclude({"rows": rows}, lines, verdict, rows[-1]["by_updates"] <= TARGET, options.json)


if __name__ == "__main__":
    raise SystemExit(main())
