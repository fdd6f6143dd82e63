"""The demo beside what two loops of plain PyTorch come to on the same cores.

    python -m benchmarks.demo [--rounds N] [--steps N] [--against DIR] [--json]

In each round three kinds take turns. The first is four daemons of `p2p-dtfm demo` from the first
step to the last. The second is a loop of the same run in one process, with as many threads as there
are cores. The third is one loop for each core, on one thread each. These loops share a step's
microbatches, never talk, and so learn nothing together. No swarm on this machine can be faster than
they are, as it computes no less. `--against DIR` plays the demo of another checkout as well, in the
same rounds.

Reported are medians of tokens per second, and of the rounds' ratios. Nothing is shaped, and nothing
emulated. Target, against an earlier build: 1.3 times.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.muon import random_batch
from p2p_dtfm.core.protocol.run_spec import BatchSpec, RunSpec
from p2p_dtfm.sim.scenario.files import read_run_spec
from p2p_dtfm.train.model.reference import ReferenceRun

TARGET = 1.3
PEERS = 4
WARM_UP_STEPS = 3
HERE = Path(__file__).resolve().parents[1]
ALONE, BOUND, OURS, OTHER = "plain", "bound", "ours", "other"
"""A loop with all cores' threads, a loop for each core, this build's demo, and the other
build's."""


def demo_tokens_per_s(checkout: Path, steps: int) -> float:
    """Tokens per second of four daemons, from their first step to their last. Raises
    `CalledProcessError`."""
    arguments = ("--peers", str(PEERS), "--steps", str(steps), "--late", "0", "--json")
    command = (sys.executable, "-m", "p2p_dtfm", "demo", *arguments)
    environment = os.environ | {"PYTHONPATH": str(checkout)}
    played = subprocess.run(
        command, cwd=checkout, env=environment, stdout=subprocess.PIPE, check=True, text=True
    )
    return float(json.loads(played.stdout)["tokens_per_s"])


def loops_tokens_per_s(loops: int, steps: int) -> float:
    """Tokens per second of so many plain loops at once. They share the cores' threads and a step's
    microbatches."""
    threads = len(os.sched_getaffinity(0)) // loops
    command = (sys.executable, "-m", "benchmarks.demo", "--loop", str(loops), str(threads))
    children = [
        subprocess.Popen(
            (*command, "--steps", str(steps)),
            cwd=HERE,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(loops)
    ]
    for child in children:  # all are warm before one of them begins
        assert child.stdout is not None
        child.stdout.readline()
    found = [child.communicate("go\n") for child in children]
    return sum(float(out) for out, _ in found)


def plain_loop(share: int, threads: int, steps: int) -> None:
    """One of `share` equal loops: says that it is warm, waits for a line, says tokens/s."""
    spec = _shared(read_run_spec("tiny"), share)
    torch.set_num_threads(threads)
    losses = ReferenceRun(spec, partial(random_batch, spec)).losses(WARM_UP_STEPS + steps)
    for _ in range(WARM_UP_STEPS):
        next(losses)
    print("warm", flush=True)
    sys.stdin.readline()
    began_s = time.perf_counter()
    done = sum(1 for _ in losses)
    print(done * spec.tokens_per_step / (time.perf_counter() - began_s))


def _shared(spec: RunSpec, share: int) -> RunSpec:
    batch = BatchSpec(
        global_batch=spec.batch.global_batch // share, microbatch=spec.batch.microbatch
    )
    return spec.model_copy(update={"batch": batch})


def play(rounds: int, steps: int, against: Path | None) -> dict[str, list[float]]:
    """Tokens per second of each kind, by rounds."""
    cores = len(os.sched_getaffinity(0))
    kinds = {
        OURS: lambda: demo_tokens_per_s(HERE, steps),
        ALONE: lambda: loops_tokens_per_s(1, steps),
        BOUND: lambda: loops_tokens_per_s(cores, steps),
    }
    if against is not None:
        kinds[OTHER] = lambda: demo_tokens_per_s(against, steps)
    found: dict[str, list[float]] = {kind: [] for kind in kinds}
    for number in range(rounds):
        order = list(kinds)[number % len(kinds) :] + list(kinds)[: number % len(kinds)]
        for kind in order:
            found[kind].append(kinds[kind]())
    return found


def report(found: dict[str, list[float]], as_json: bool) -> int:
    """0 unless a target is missed; without another build there is none."""
    median = {kind: round(statistics.median(rates)) for kind, rates in found.items()}
    ratio = {
        kind: round(statistics.median(a / b for a, b in zip(found[OURS], rates, strict=True)), 3)
        for kind, rates in found.items()
        if kind != OURS
    }
    met = ratio[OTHER] >= TARGET if OTHER in ratio else None
    if as_json:
        figures: dict[str, Any] = {"tokens_per_s": median, "ours_of": ratio, "rounds": found}
        print(json.dumps(figures | {"met": met}))
    else:
        for kind, rate in median.items():
            beside = f"   ours is {ratio[kind]:.3f} of it" if kind in ratio else ""
            print(f"{kind:8s} {rate:8,.0f} tokens/s{beside}")
        if met is not None:
            print(f"{TARGET} times the other build: {'met' if met else 'MISSED'}")
    return 1 if met is False else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--against", type=Path, help="another checkout of this project")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--loop", type=int, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.loop:
        plain_loop(*options.loop, options.steps)
        return 0
    return report(play(options.rounds, options.steps, options.against), options.json)


if __name__ == "__main__":
    raise SystemExit(main())
