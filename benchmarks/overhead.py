"""Overhead: what our engine costs beside plain PyTorch, with real computing and nothing shaped.

    python -m benchmarks.overhead [--rounds N] [--quick] [--json]

Four stages: four processes on loopback, one block of `gpt2-small`'s width each, one thread each;
1F1B with textbook depth, optimizer included. Ours is `daemon.step.step_engine` over
`net.streams.bulk`, by direct lines; theirs `torch.distributed.pipelining`'s Schedule1F1B over
Gloo with the same layers. Alone: one process, in which our engine with one stage and a plain loop
(`train.model.reference`) take turns. Rounds of the two take turns everywhere, so that a busy
machine slows both; compared are the fastest rounds, which other programs disturbed least. Lower
bound beside them: the layers' own forwards and backwards, as `train.stage.measure` times them,
shared by the cores that there are.
"""

import argparse
import asyncio
import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.overhead_work import STAGES, WORK, WORK_QUICK, Work, compute_bound_s
from benchmarks.peer_processes import PeerProcesses

PIPELINE_TARGET = 0.95
ALONE_TARGET = 0.98


def _step(peers: PeerProcesses) -> dict[str, float]:
    """One step of all peers: how long the slowest took, and the processor time of all."""
    peers.tell("go")
    heard = peers.hear_all()
    return {
        "elapsed_s": max(each["elapsed_s"] for each in heard),
        "processor_s": sum(each["processor_s"] for each in heard),
        "loss": sum(each["loss"] for each in heard),
    }


def measure_pipeline(rounds: int, quick: bool) -> dict[str, list[dict[str, float]]]:
    """Steps of both in turn. The first of each warms up and is left out."""
    arguments = ("--quick",) * quick
    with (
        tempfile.TemporaryDirectory(prefix="p2p-dtfm-overhead-") as name,
        PeerProcesses("overhead_engine", STAGES, Path(name), arguments) as ours,
        PeerProcesses("overhead_torch", STAGES, Path(name), arguments) as theirs,
    ):
        ours.introduce()
        ours.hear_all()
        theirs.hear_all()
        pairs = [(_step(ours), _step(theirs)) for _ in range(rounds + 1)][1:]
    return {"ours": [a for a, _ in pairs], "torch": [b for _, b in pairs]}


def measure_alone(rounds: int, work: Work) -> dict[str, list[dict[str, float]]]:
    from benchmarks.overhead_engine import alone

    return asyncio.run(alone(rounds, work))


def row_of(name: str, found: dict[str, list[dict[str, float]]], target: float) -> dict[str, Any]:
    """`found` has our rounds and those of one other engine, in turn."""
    other = next(kind for kind in found if kind != "ours")
    best = {kind: min(each["elapsed_s"] for each in rows) for kind, rows in found.items()}
    pairs = zip(found["ours"], found[other], strict=True)
    ratios = [theirs["elapsed_s"] / ours["elapsed_s"] for ours, theirs in pairs]
    losses = {kind: rows[-1]["loss"] for kind, rows in found.items()}
    ratio = best[other] / best["ours"]
    return {
        "claim": name,
        "other": other,
        "best_s": {kind: round(value, 4) for kind, value in best.items()},
        "median_ratio": round(statistics.median(ratios), 3),
        "processor_s": {
            kind: round(statistics.median(each["processor_s"] for each in rows), 3)
            for kind, rows in found.items()
        },
        "loss": losses,
        "ratio": round(ratio, 3),
        "target": target,
        "met": ratio >= target,
    }


def report(rows: list[dict[str, Any]], as_json: bool) -> int:
    """Print; 0 if the targets are met."""
    met = all(row["met"] for row in rows)
    if as_json:
        print(json.dumps({"claims": rows, "met": met}))
        return 0 if met else 1
    print(f"{'':12s} {'bound s':>8s} {'ours s':>8s} {'theirs s':>9s} {'speed':>6s} {'target':>7s}")
    for row in rows:
        ours, theirs = row["best_s"]["ours"], row["best_s"][row["other"]]
        verdict = "met" if row["met"] else "MISSED"
        print(
            f"{row['claim']:12s} {row['bound_s']:8.3f} {ours:8.3f} {theirs:9.3f} "
            f"{row['ratio']:6.3f} {row['target']:7.2f} {verdict}  (median of pairs "
            f"{row['median_ratio']:.3f}; processor {row['processor_s']['ours']:.2f} and "
            f"{row['processor_s'][row['other']]:.2f} s)"
        )
    return 0 if met else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rounds, work = (3, WORK_QUICK) if options.quick else (options.rounds, WORK)
    cores = len(os.sched_getaffinity(0))
    pipeline = row_of("four stages", measure_pipeline(rounds, options.quick), PIPELINE_TARGET)
    alone = row_of("one alone", measure_alone(rounds, work), ALONE_TARGET)
    pipeline["bound_s"] = compute_bound_s(work, min(cores, STAGES))
    alone["bound_s"] = compute_bound_s(work, 1)
    return report([pipeline, alone], options.json)


if __name__ == "__main__":
    raise SystemExit(main())
