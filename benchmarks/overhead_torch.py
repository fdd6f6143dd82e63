"""One stage of `torch.distributed.pipelining` in `benchmarks.overhead`."""

import logging
import os
import sys
import time
import warnings
from pathlib import Path

import torch
import torch.distributed
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from benchmarks.overhead_work import STAGES, batch_of, layers_of, processor_s, say, work_of
from p2p_dtfm.train.model.gpt import build_layer, initialise_layer, token_loss_sum
from p2p_dtfm.train.model.optimizer import learning_rate


def _stage(number: int, folder: Path, arguments: list[str]) -> None:
    torch.set_num_threads(1)
    work = work_of(arguments)
    spec = work.spec
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/gloo", rank=number, world_size=STAGES
    )
    layers = [build_layer(spec, layer) for layer in layers_of(number)]
    for layer, module in zip(layers_of(number), layers, strict=True):
        initialise_layer(module, spec, layer)
    model = nn.Sequential(*layers)
    stage = PipelineStage(model, number, STAGES, torch.device("cpu"))
    schedule = Schedule1F1B(
        stage,
        work.microbatches,
        loss_fn=lambda logits, targets: token_loss_sum(logits, targets) / spec.tokens_per_step,
        scale_grads=False,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)
    say(ready=True)
    for step, _ in enumerate(sys.stdin):
        began_s, computed_s = time.monotonic(), processor_s()
        optimizer.zero_grad(set_to_none=True)
        batches = [batch_of(work, step, index) for index in range(work.microbatches)]
        inputs = torch.cat([inputs for inputs, _ in batches])
        targets = torch.cat([targets for _, targets in batches])
        losses: list[torch.Tensor] = []
        if number == 0:
            schedule.step(inputs)
        elif number == STAGES - 1:
            schedule.step(target=targets, losses=losses)
        else:
            schedule.step()
        norms = [parameter.grad.norm() for parameter in model.parameters()]
        squared = torch.stack(norms).square().sum()
        torch.distributed.all_reduce(squared)
        scale = min(1.0, spec.optimizer.clip_norm / (squared.sqrt().item() + 1e-6))
        for parameter in model.parameters():
            parameter.grad.mul_(scale)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(spec, step)
        optimizer.step()
        say(
            elapsed_s=time.monotonic() - began_s,
            processor_s=processor_s() - computed_s,
            loss=float(sum(loss.item() for loss in losses)),
        )
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.getLogger("torch").setLevel(logging.ERROR)
    _stage(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
