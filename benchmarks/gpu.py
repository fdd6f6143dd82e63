"""What a CUDA device makes of our stages, kernels and states, in under ten minutes.

    python -m benchmarks.gpu [--device cuda:0] [--quick] [--json]
    python -m benchmarks.gpu --device cpu --quick

Stages of `gpt2-small` (all of it) and `gpt3-xl` (four blocks) in tokens per second beside a plain
compiled loop on the same device, and as a share of what the device makes of two large matrices;
codecs and AdamW against their torch twins, in bits and in time; a replica there and one on the
processor over 1,000 steps; recorded microbatches against plain ones, in bits; a daemon there among
three on the processor, against the plain loop; the cap of memory. With `--device cpu --quick` tiny
sizes go through the same script on the processor: that shows that it runs, and nothing else.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_audits import audit_figures
from benchmarks.gpu_bits import (
    adam_w_figures,
    codec_figures,
    recording_figures,
    replica_figures,
)
from benchmarks.gpu_stages import StageWork, stage_figures
from benchmarks.gpu_swarm import swarm_figures
from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.sim.scenario.files import read_run_spec
from p2p_dtfm.train.kernels import choice
from p2p_dtfm.train.model.gpt import layer_count
from p2p_dtfm.train.stage.measure import cap_device_memory, release_memory, select_device

NO_DEVICE = 2
"""Exit code where there is nothing to measure."""
WITHIN_S = 540.0
CONFIGS = Path(__file__).parent.parent / "configs"
SWARM_STEPS = 10
_CAP_BYTES = 1 << 30
_STAGE_BLOCKS = 4
_MICROBATCHES = 4


def tiny(name: str) -> RunSpec:
    """A packaged run in the least sizes, for trying this script."""
    spec = read_run_spec(CONFIGS / name)
    small = {"layers": 4, "width": 32, "heads": 2, "context": 16, "vocabulary": 64}
    model = spec.model.model_copy(update=small)
    return spec.model_copy(update={"model": model})


def stage_works(quick: bool) -> dict[str, StageWork]:
    """The stages to measure, by the run's name."""
    names = ("gpt2-small.toml", "gpt3-xl.toml")
    small, large = (tiny(name) if quick else read_run_spec(CONFIGS / name) for name in names)
    return {
        "gpt2-small": StageWork(small, range(layer_count(small)), _MICROBATCHES),
        "gpt3-xl": StageWork(large, range(1, 1 + _STAGE_BLOCKS), _MICROBATCHES),
    }


def cap_figures(device: torch.device) -> dict[str, Any]:
    """Whether torch keeps to a cap; only a device has one. This measurement comes last, as the cap
    stays."""
    if device.type != "cuda":
        return {"skipped": "the processor's memory has no cap"}
    release_memory()
    cap_device_memory(device, torch.cuda.memory_reserved(device) + _CAP_BYTES)
    held = torch.empty(_CAP_BYTES // 2, dtype=torch.uint8, device=device)
    try:
        torch.empty(_CAP_BYTES, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError:
        return {"held_bytes": held.numel(), "refused": True}
    return {"held_bytes": held.numel(), "refused": False}


def measure(device: torch.device, quick: bool) -> dict[str, Any]:
    """Measure everything, one after the other, and how long each has taken."""
    end_s = time.monotonic() + WITHIN_S
    finish = (lambda: torch.cuda.synchronize(device)) if device.type == "cuda" else (lambda: None)
    works, rounds = stage_works(quick), 1 if quick else 10
    spec = works["gpt2-small"].spec
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        name: (
            lambda work=work: stage_figures(
                work, device, finish, rounds, min(end_s, time.monotonic() + WITHIN_S / 4)
            )
        )
        for name, work in works.items()
    }
    parts |= {
        "codecs": lambda: codec_figures(spec, device, finish, 1 << (12 if quick else 25)),
        "adam_w": lambda: adam_w_figures(spec, device, finish),
        "replica": lambda: replica_figures(tiny("gpt2-small.toml"), device, 20 if quick else 1000),
        "recordings": lambda: recording_figures(works.values(), device),
    }
    if device.type == "cuda":
        for kind in ("fp32", "bf16"):
            parts[f"swarm_{kind}"] = lambda kind=kind: swarm_figures(device, kind, SWARM_STEPS)
        parts["audits"] = lambda: audit_figures(device)
    parts["memory_cap"] = lambda: cap_figures(device)
    found: dict[str, Any] = {}
    for name, part in parts.items():
        began_s = time.monotonic()
        if began_s > end_s:
            found[name] = {"skipped": f"{WITHIN_S:g} s were over"}
            continue
        try:
            rows = part()
        except torch.OutOfMemoryError:
            rows = {"skipped": "it does not fit into the device's memory"}
        found[name] = {**rows, "took_s": round(time.monotonic() - began_s, 1)}
        release_memory()
    return found


def faults_in(found: dict[str, Any]) -> list[str]:
    """The faults among these figures, in words."""
    faults = [
        f"codec {name}: other {what} than on the processor"
        for name, row in found["codecs"].items()
        if isinstance(row, dict)
        for what in ("bytes", "values")
        if not row[f"same_{what}"]
    ]
    if not found["adam_w"].get("same_bits", True):
        faults.append("AdamW: other bits than its torch twin")
    if found["replica"].get("differ_by_step") is not None:
        faults.append("replicas on the device and on the processor drift apart")
    if not found["recordings"].get("same_bits", True):
        faults.append("recorded microbatches: other bits than those that are not")
    if not found["recordings"].get("repeats_bits", True):
        faults.append("audited work: other bits each time")
    faults += [f"{name}: {row['fault']}" for name, row in found.items() if "fault" in row]
    if not found["memory_cap"].get("refused", True):
        faults.append("the cap of memory does not hold")
    return faults


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: tries the script")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    try:
        device = select_device(options.device)
    except UserError as error:
        print(f"{error.cause}: nothing was measured")
        return NO_DEVICE
    if device.type == "cpu" and not options.quick:
        parser.error("a processor is no CUDA device: with --quick it shows that this script runs")
    if device.type == "cpu":
        torch.set_num_threads(1)  # more would wait for one another over such small sizes
    found = measure(device, options.quick)
    faults = faults_in(found)
    about = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "processor",
        "kernels": choice.launcher_for(device) is not None,
        "figures": device.type == "cuda" and not options.quick,
    }
    if options.json:
        print(json.dumps({**about, **found, "faults": faults, "met": not faults}))
        return 1 if faults else 0
    print(f"{about['device']}, {'our kernels' if about['kernels'] else 'torch twins'}")
    if not about["figures"]:
        print("TRIED ONLY, in tiny sizes: no figure below says anything about a device")
    for name, rows in found.items():
        print(f"{name}: {json.dumps(rows)}")
    print("; ".join(faults) or "bits: as they should be")
    return 1 if faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
