"""One daemon on a device among daemons on processors in `benchmarks.gpu`."""

import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from p2p_dtfm.core.protocol.run_spec import (
    BatchSpec,
    ComputeSpec,
    EvaluationSpec,
    ModelSpec,
    RunSpec,
)
from p2p_dtfm.core.protocol.sections.checkpoint_spec import CheckpointSpec
from p2p_dtfm.core.protocol.sections.data_spec import DataSpec
from p2p_dtfm.core.protocol.sections.optimizer_spec import OptimizerSpec
from p2p_dtfm.testbed.local_swarm import Child, LocalSwarm
from p2p_dtfm.testbed.plain_losses import plain_losses
from p2p_dtfm.train.data import prepare

PEERS = 4
WIDTH, CONTEXT = 256, 64
FITS_TWO_THIRDS_GIB = 0.09
"""Too little for all layers, so that the device is a stage of a pipeline."""
TOLERANCES = {"fp32": 1e-4, "bf16": 2e-2}
LIMIT_S = 120.0
_POLL_S = 0.1
_MOST_LINES = 4000


def swarm_figures(device: torch.device, precision: str, steps: int) -> dict[str, Any]:
    """Four daemons over loopback: the second computes on `device` in `precision`, and the others on
    the processor. Their commits are compared with the plain loop in one process."""
    with tempfile.TemporaryDirectory(prefix="p2p-dtfm-gpu-") as name:
        directory = Path(name)
        spec = _spec(directory, precision, steps)
        (directory / "run.json").write_text(spec.model_dump_json())
        shared = ("--threads", "1", "--dashboard", "off")
        limit = ("--memory-gib", f"{FITS_TWO_THIRDS_GIB:g}")
        with LocalSwarm(directory, (*shared, *limit)) as swarm:
            run = ("--run", str(directory / "run.json"), "--expect-peers", str(PEERS))
            founder, address = swarm.found((*run, "--device", "cpu"))
            for number in range(1, PEERS):
                swarm.join(address, ("--device", str(device) if number == 1 else "cpu"))
            stages = _until_done(swarm.children, steps)
            losses = {
                event["step"]: event["loss"]
                for event in founder.events()
                if event["event"] == "step" and event["loss"] is not None
            }
        expected = plain_losses(founder.home, steps)
    if expected is None:
        return {"fault": "no checkpoint was saved"}
    if sorted(losses) != list(range(steps)):
        return {"fault": f"{len(losses)} of {steps} steps are in the founder's history"}
    worst = max(abs(losses[step] - expected[step]) for step in range(steps))
    found: dict[str, Any] = {"steps": steps, "stages": stages, "worst_off": worst}
    if worst > TOLERANCES[precision]:
        found["fault"] = f"a loss is {worst:.2g} off the plain loop's"
    elif not stages[1] or len(stages[1]) == spec.model.layer_count:
        found["fault"] = "the device was no stage of a pipeline"
    return found


def _spec(directory: Path, precision: str, steps: int) -> RunSpec:
    text = directory / "text.txt"
    text.write_text("\n".join(f"{n} times {n} is {n * n}." for n in range(_MOST_LINES)))
    prepare([text], directory / "data", context=CONTEXT)
    return RunSpec(
        name="one-device",
        seed=1,
        total_steps=steps,
        model=ModelSpec(layers=8, width=WIDTH, heads=4, context=CONTEXT, vocabulary=256),
        batch=BatchSpec(global_batch=16, microbatch=2),
        compute=ComputeSpec(precision="fp32" if precision == "fp32" else "auto"),
        optimizer=OptimizerSpec(peak_learning_rate=3e-4, final_learning_rate=3e-4),
        data=DataSpec(source=str(directory / "data")),
        evaluation=EvaluationSpec(every_steps=1 << 20, sequences=4),
        checkpoint=CheckpointSpec(every_steps=steps),
    )


def _until_done(children: list[Child], steps: int, limit_s: float = LIMIT_S) -> list[list[int]]:
    """The layers of each child while it trained. Raises `SystemExit`."""
    stages: list[list[int]] = [[] for _ in children]
    end_s = time.monotonic() + limit_s
    while True:
        facts = [child.status() or {} for child in children]
        for number, each in enumerate(facts):
            if each.get("state") == "training":
                stages[number] = list(each.get("stage") or stages[number])
        if facts[0].get("state") == "done":
            return stages
        ended = [child.name for child in children if not child.running]
        if ended or time.monotonic() > end_s:
            what = f"{ended[0]} ended" if ended else f"{steps} steps took over {limit_s:g} s"
            told = "\n".join(f"{child.name}:\n{child.log_tail()}" for child in children)
            raise SystemExit(f"{what}:\n{told}")
        time.sleep(_POLL_S)
