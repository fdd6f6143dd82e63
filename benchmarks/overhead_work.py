"""The work of `benchmarks.overhead`, the same for all."""

import json
from dataclasses import dataclass

import psutil
import torch
from torch import Tensor

from p2p_dtfm.core.protocol.plan import Pipeline, Plan, Stage
from p2p_dtfm.core.protocol.run_spec import (
    BatchSpec,
    EvaluationSpec,
    ModelSpec,
    RunSpec,
)
from p2p_dtfm.core.protocol.sections.optimizer_spec import OptimizerSpec
from p2p_dtfm.train.stage.measure import measure_device

STAGES = 4
WIDTH = 768
HEADS = 12
VOCABULARY = 256
"""A small vocabulary, or the head's stage would take as long as all the others together."""


@dataclass(frozen=True)
class Work:
    """One step: blocks of `gpt2-small`'s width, one for each stage."""

    context: int
    microbatches: int

    @property
    def spec(self) -> RunSpec:
        return RunSpec(
            name="overhead",
            seed=1,
            total_steps=1 << 20,
            model=ModelSpec(
                layers=STAGES,
                width=WIDTH,
                heads=HEADS,
                context=self.context,
                vocabulary=VOCABULARY,
            ),
            batch=BatchSpec(global_batch=self.microbatches, microbatch=1),
            optimizer=OptimizerSpec(peak_learning_rate=1e-4),
            evaluation=EvaluationSpec(every_steps=1 << 20, sequences=1),
        )


WORK = Work(context=256, microbatches=8)
WORK_QUICK = Work(context=128, microbatches=4)


def work_of(arguments: list[str]) -> Work:
    return WORK_QUICK if "--quick" in arguments else WORK


def layers_of(stage: int) -> range:
    """The embedding joins the first stage and the head the last."""
    first = 0 if stage == 0 else stage + 1
    return range(first, STAGES + 2 if stage == STAGES - 1 else stage + 2)


def pipeline_plan(peers: list[str], work: Work) -> Plan:
    """The peers in order, with the depth of textbook 1F1B."""
    stages = tuple(
        Stage(peer, layers_of(n).start, layers_of(n).stop, len(peers) - n)
        for n, peer in enumerate(peers)
    )
    return Plan((Pipeline(stages, 0, work.microbatches),), (), 0)


def alone_plan(peer: str, work: Work) -> Plan:
    stage = Stage(peer, 0, STAGES + 2, 1)
    return Plan((Pipeline((stage,), 0, work.microbatches),), (), 0)


def batch_of(work: Work, step: int, microbatch: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets, int64 [1, tokens]: the same in every process."""
    generator = torch.Generator().manual_seed(step * 4096 + microbatch)
    tokens = torch.randint(VOCABULARY, (1, work.context + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def compute_bound_s(work: Work, cores: int) -> float:
    """All forwards and backwards of a step, shared evenly by so many cores of this machine."""
    device = measure_device(work.spec, "cpu", threads=1)
    layers = [device.embedding, *[device.block] * STAGES, device.head]
    each_ns = sum(layer.forward_ns + layer.backward_ns for layer in layers)
    return each_ns * work.microbatches / cores / 1e9


def processor_s() -> float:
    """Processor seconds of this process and its p2pd."""
    me = psutil.Process()
    times = [each.cpu_times() for each in (me, *me.children(recursive=True))]
    return float(sum(each.user + each.system for each in times))


def say(**facts: object) -> None:
    print(json.dumps(facts), flush=True)
