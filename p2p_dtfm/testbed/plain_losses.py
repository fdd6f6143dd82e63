"""The losses of an undisturbed run in one process, on the data that a daemon has trained on."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.daemon.machine.settings import Settings

GENTLE_LEARNING_RATE = 3e-4
"""Losses are compared to 1e-4. At the demo's 3e-3 training is chaotic: the plain loop with its
microbatches in another order is 4e-4 off after 300 steps. At this rate it stays within 2e-7."""
CHECKPOINT_EVERY_STEPS = 20
NOTHING_SAVED = "nobody has saved a checkpoint yet"


def comparable(spec: RunSpec, total_steps: int) -> RunSpec:
    """The run with so many steps, gentle enough for its losses to be compared."""
    gentle = min(spec.optimizer.peak_learning_rate, GENTLE_LEARNING_RATE)
    final = min(spec.optimizer.final_learning_rate, gentle)
    calm = spec.optimizer.muon.peak_learning_rate * gentle / spec.optimizer.peak_learning_rate
    rates: dict[str, Any] = {"peak_learning_rate": gentle, "final_learning_rate": final}
    if spec.optimizer.kind == "muon":
        rates["muon"] = spec.optimizer.muon.model_copy(update={"peak_learning_rate": calm})
    changes = {
        "total_steps": total_steps,
        "checkpoint": spec.checkpoint.model_copy(update={"every_steps": CHECKPOINT_EVERY_STEPS}),
        "optimizer": spec.optimizer.model_copy(update=rates),
    }
    return spec.model_copy(update=changes)


def why_not_plain(spec: RunSpec) -> str:
    """Why the run's losses cannot be the plain loop's, which knows no replicas and nothing that
    travels; "" if they are."""
    codecs = spec.codecs
    found = {
        'sync.mode = "local"': spec.sync.mode == "local",
        f'sync.sums = "{spec.sync.sums}"': spec.sync.sums != "plain",
        f'codecs.reduction = "{codecs.reduction}"': codecs.reduction != "fp32",
        "lossy codecs.activations": set(codecs.activations) != {"fp32"},
        "lossy codecs.gradients": set(codecs.gradients) != {"fp32"},
        'compute.precision = "bf16"': spec.compute.precision == "bf16",
    }
    named = [name for name, is_so in found.items() if is_so]
    return f"with {' and '.join(named)} they are not those of one process" if named else ""


def plain_losses(home: Path, steps: int) -> list[float] | None:
    """The losses of the first `steps` steps of the run at `home`; None if it has saved no
    checkpoint."""
    running = plain_run(home, steps)
    return None if running is None else list(running)


def plain_run(home: Path, steps: int) -> Iterator[float] | None:
    """The same, each loss when it is computed. It takes as many threads as a daemon: a small
    model's threads wait for one another, spinning, and beside any load all of them are slower."""
    from p2p_dtfm.train.data import Dataset, blobs_in, parse_manifest
    from p2p_dtfm.train.model.checkpoint import read_manifest, run_directory_of
    from p2p_dtfm.train.model.lora.frozen_base import base_path
    from p2p_dtfm.train.model.reference import ReferenceRun
    from p2p_dtfm.train.stage.batches import Batches

    manifests = sorted(home.glob("runs/*/checkpoints/*/manifest.json"))
    if not manifests:
        return None
    spec = read_manifest(manifests[-1].parent).spec()
    blobs = blobs_in(run_directory_of(manifests[-1].parent))
    held = blobs.path(spec.data.manifest) if blobs is not None else None
    if blobs is None or held is None:
        return None
    manifest = parse_manifest(held.read_bytes(), spec.data.manifest)
    dataset = Dataset(manifest, blobs.path, spec.model.context)
    given = partial(base_path, spec, path_of=blobs.path) if spec.model.initial else None
    batches = Batches(dataset, spec)
    run = ReferenceRun(spec, batches, given=given, weight=batches.weight)
    return run.losses(steps, Settings().compute_threads)
