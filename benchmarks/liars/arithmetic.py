"""Which settings of one machine compute equal bits, so that an audit can replay a stage's step.

    python -m benchmarks.liars.arithmetic [--stage-steps 200] [--run tiny] [--json]

A stage-step is everything that a stage claims in a step: what it sent forwards and backwards, its
losses, and its sums of gradients. The same stage-steps, from the same seeds, are computed by
processes of their own: one thread to four, with and without recomputation, with split backwards,
begun anew in the middle (as a stand-in does), and by each of the vector units that torch can be
told to use. Within a vector unit one unequal bit falsifies the design: an audit there judges by
equality. Between them bits differ, and how far says why no tolerance can judge.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.sim.scenario.files import read_run_spec
from p2p_dtfm.train.model.gpt import layer_count
from p2p_dtfm.train.model.layer_state import LayerState
from p2p_dtfm.train.stage.stage_runner import StageRunner

UNITS = ("default", "avx2", "avx512")
MICROBATCHES = 3
SHOWN = 5
"""Stage-steps whose whole gradients are compared between vector units."""


@dataclass(frozen=True)
class Setting:
    """How one process computes."""

    unit: str
    threads: int = 1
    recompute: bool = False
    splits: bool = False
    begins_anew: bool = False
    """A first try at each step is given up after a microbatch."""

    @property
    def name(self) -> str:
        words = [f"{self.threads} thread{'s' * (self.threads > 1)}"]
        words += ["recomputed"] * self.recompute + ["split"] * self.splits
        return ", ".join([*words, *["begun anew"] * self.begins_anew])


def settings_of(unit: str) -> list[Setting]:
    threads = [Setting(unit, threads=count) for count in (1, 2, 3, 4)]
    return [
        *threads,
        Setting(unit, recompute=True),
        Setting(unit, threads=2, recompute=True),
        Setting(unit, splits=True),
        Setting(unit, begins_anew=True),
    ]


def stages_of(spec: RunSpec) -> list[range]:
    """A first, a middle and a last stage."""
    count = layer_count(spec)
    third = max(1, count // 3)
    return [range(third), range(third, count - third), range(count - third, count)]


def stage_step(spec: RunSpec, layers: range, seed: int, setting: Setting) -> list[Tensor]:
    """The claims of the stage, in order."""
    states = {layer: LayerState.genesis(spec, layer) for layer in layers}
    runner = StageRunner(spec, states, setting.recompute)
    if setting.begins_anew:
        _pass(runner, _inputs(spec, runner, seed, 0), 0, splits=False)
        runner.discard()
        runner.zero_gradients()
    claimed: list[Tensor] = []
    for microbatch in range(MICROBATCHES):
        given = _inputs(spec, runner, seed, microbatch)
        claimed += _pass(runner, given, microbatch, splits=setting.splits and runner.splits)
    return [*claimed, *(state.gradient_vector().clone() for state in states.values())]


def _inputs(
    spec: RunSpec, runner: StageRunner, seed: int, microbatch: int
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Entry, targets, and the gradient of the output, as a neighbour's frames would hold them."""
    generator = torch.Generator().manual_seed(seed * 1000 + microbatch)
    shape = (spec.batch.microbatch, spec.model.context)
    tokens = torch.randint(0, spec.model.vocabulary, (2, *shape), generator=generator)
    stream = torch.randn(*shape, spec.model.boundary_width, generator=generator)
    gradient = torch.randn(*shape, spec.model.boundary_width, generator=generator) * 1e-4
    entry = tokens[0] if runner.has_embedding else stream
    return (entry, tokens[1], None) if runner.has_head else (entry, None, gradient)


def _pass(
    runner: StageRunner,
    given: tuple[Tensor, Tensor | None, Tensor | None],
    microbatch: int,
    splits: bool,
) -> list[Tensor]:
    entry, targets, gradient = given
    sent = runner.forward(microbatch, entry, targets)
    if splits:
        back: Tensor | None = runner.input_backward(microbatch, gradient)
        runner.weight_backward(microbatch)
    else:
        back = runner.backward(microbatch, gradient)
    forwards = torch.tensor([sent]) if isinstance(sent, float) else sent
    return [forwards, *([] if back is None else [back])]


def computed(setting: Setting, run: str, stage_steps: int) -> dict[str, Any]:
    """A digest of each stage-step, and the sums of the first few as numbers."""
    torch.set_num_threads(setting.threads)
    spec = read_run_spec(run)
    stages = stages_of(spec)
    digests, shown = [], []
    for number in range(stage_steps):
        claimed = stage_step(spec, stages[number % len(stages)], number, setting)
        digest = hashlib.blake2b(digest_size=16)
        for tensor in claimed:
            digest.update(tensor.detach().contiguous().numpy().tobytes())
        digests.append(digest.hexdigest())
        if number < SHOWN:
            shown.append(torch.cat([each.flatten() for each in claimed[-1:]]).tolist())
    return {"unit": torch.backends.cpu.get_cpu_capability(), "digests": digests, "shown": shown}


def in_a_process(setting: Setting, run: str, stage_steps: int) -> dict[str, Any]:
    """Compute in a process of its own, as a vector unit is chosen when torch is loaded."""
    told = json.dumps([asdict(setting), run, stage_steps])
    command = [sys.executable, "-m", "benchmarks.liars.arithmetic", "--compute", told]
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": setting.unit}
    if setting.unit == "avx2":
        environment["MKL_ENABLE_INSTRUCTIONS"] = "AVX2"
        environment["ONEDNN_MAX_CPU_ISA"] = "AVX2"
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def distance(one: list[list[float]], other: list[list[float]]) -> float:
    """The largest norm of a difference over the norm, among the sums that were kept as numbers."""
    pairs = zip(map(torch.tensor, one), map(torch.tensor, other), strict=True)
    return max(float((a - b).norm() / a.norm()) for a, b in pairs)


def measure(run: str, stage_steps: int) -> dict[str, Any]:
    units: dict[str, dict[str, Any]] = {}
    first: dict[str, dict[str, Any]] = {}
    for unit in UNITS:
        rows = []
        for setting in settings_of(unit):
            found = in_a_process(setting, run, stage_steps)
            first.setdefault(unit, found)
            pairs = zip(found["digests"], first[unit]["digests"], strict=True)
            rows.append({"setting": setting.name, "unequal": sum(a != b for a, b in pairs)})
        units[unit] = {"is": first[unit]["unit"], "rows": rows}
    between = {
        f"{one} and {other}": {
            "equal": sum(
                a == b for a, b in zip(first[one]["digests"], first[other]["digests"], strict=True)
            ),
            "distance": distance(first[one]["shown"], first[other]["shown"]),
        }
        for one, other in (("default", "avx2"), ("avx2", "avx512"), ("default", "avx512"))
    }
    return {
        "run": run,
        "stage_steps": stage_steps,
        "units": units,
        "between": between,
        "holds": not any(row["unequal"] for unit in units.values() for row in unit["rows"]),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stage-steps", type=int, default=200)
    parser.add_argument("--run", default="tiny")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--compute", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.compute:
        setting, run, stage_steps = json.loads(options.compute)
        print(json.dumps(computed(Setting(**setting), run, stage_steps)))
        return 0
    result = measure(options.run, options.stage_steps)
    if options.json:
        print(json.dumps(result))
        return 0 if result["holds"] else 1
    for unit, found in result["units"].items():
        print(f"{unit} (torch says {found['is']}):")
        for row in found["rows"]:
            print(f"  {row['setting']:26s} {row['unequal']} of {result['stage_steps']} unequal")
    for pair, found in result["between"].items():
        print(f"{pair}: {found['equal']} equal; sums differ by {found['distance']:.1e} of the norm")
    print("equal within each vector unit" if result["holds"] else "FALSIFIED: bits differ")
    return 0 if result["holds"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
