"""What audits cost an honest swarm: time and bytes of a step, with them and without, in pairs.

    unshare -rn sh -c 'ip link set lo up; python -m benchmarks.liars.cost --bytes'
    python -m benchmarks.liars.cost [--pairs 3] [--rate 0.02] [--peers 4] [--run tiny] [--json]

Real daemons run on loopback, each with all layers and one thread. The two swarms of a pair run one
after the other, and take turns in being first. Steps after the first one of a view are compared, as
all are audited in that first step. `--bytes` counts what passes loopback. Nothing else may use
loopback then: hence a network of its own. A machine with fewer cores than daemons shows the work of
audits twice over.

`cpu_s` are the processor seconds of a step, of all daemons and their p2pd together. The difference
is what audits compute, and the least by which a step grows where all cores are busy. Other programs
that use caches and cores raise `cpu_s` by a fifth and more. With `--at-once` the two swarms of a
pair run beside each other, and the same disturbs both.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.sim.scenario.files import read_run_spec
from p2p_dtfm.testbed.lies.played import MODULE, OPTIONS
from p2p_dtfm.testbed.local_swarm import Child, LocalSwarm
from p2p_dtfm.testbed.plain_losses import comparable
from p2p_dtfm.testbed.recovery.times import commits_of, steps_of

WARM_STEPS = 5
LIMIT_S = 300.0
POLL_S = 0.05
TARGET = 0.03
NEVER = 1 << 30


def loopback_bytes() -> int:
    """Bytes that loopback has carried since it is up."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == "lo":
            return int(counts.split()[0])
    return 0


def processor_s(roots: set[int]) -> tuple[float, float]:
    """Processor seconds so far of these processes, and of their children."""
    ticks, parents = {}, {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        parents[int(entry.name)] = int(fields[1])
        ticks[int(entry.name)] = int(fields[11]) + int(fields[12])
    own = sum(ticks[pid] for pid in ticks if pid in roots)
    others = sum(ticks[pid] for pid in ticks if parents[pid] in roots)
    per_s = os.sysconf("SC_CLK_TCK")
    return own / per_s, others / per_s


def spec_of(run: str, global_batch: int | None) -> RunSpec:
    spec = comparable(read_run_spec(run), NEVER)
    if global_batch is None:
        return spec
    batch = spec.batch.model_copy(update={"global_batch": global_batch})
    return spec.model_copy(update={"batch": batch})


def audited(spec: RunSpec, rate: float) -> RunSpec:
    return spec.model_copy(update={"audit": spec.audit.model_copy(update={"rate": rate})})


def step_of(child: Child) -> int:
    return max((event["step"] for event in steps_of(child.events())), default=-1)


def until(child: Child, step: int) -> int:
    end_s = time.monotonic() + LIMIT_S
    while (reached := step_of(child)) < step:
        if time.monotonic() > end_s or not child.running:
            raise SystemExit(f"no step {step}, the last lines of a daemon:\n{child.log_tail()}")
        time.sleep(POLL_S)
    return reached


class Mark(NamedTuple):
    """The counters of a swarm so far."""

    step: int
    own_s: float
    """Processor seconds of its daemons."""
    others_s: float
    """Processor seconds of their p2pd."""
    bytes: int
    audits: int


@dataclass(frozen=True)
class Played:
    """A swarm under way."""

    swarm: LocalSwarm
    first: Child

    @classmethod
    @contextmanager
    def begun(cls, spec: RunSpec, rate: float, peers: int) -> Iterator["Played"]:
        with tempfile.TemporaryDirectory(prefix="p2p-dtfm-cost-") as name:
            directory = Path(name)
            (directory / "run.json").write_text(audited(spec, rate).model_dump_json())
            with LocalSwarm(directory, OPTIONS, MODULE) as swarm:
                founding = ["--run", str(directory / "run.json"), "--expect-peers", str(peers)]
                first, address = swarm.found(founding)
                for _ in range(peers - 1):
                    swarm.join(address)
                yield cls(swarm, first)

    def mark(self) -> Mark:
        own_s, others_s = processor_s({child.process.pid for child in self.swarm.children})
        audits = sum((child.status() or {}).get("audits", 0) for child in self.swarm.children)
        return Mark(step_of(self.first), own_s, others_s, loopback_bytes(), audits)

    def figures(self, before: Mark, after: Mark) -> dict[str, float]:
        """Seconds and bytes of a step, and all audits between the two marks."""
        begun, done = before.step, after.step
        commits = [it for it in commits_of({"": self.first.events()}) if begun <= it[0] <= done]
        times_s = [after[1] - before[1] for before, after in pairwise(commits)]
        return {
            "step_s": statistics.median(times_s),
            "mean_step_s": statistics.fmean(times_s),
            "cpu_s": (after.own_s + after.others_s - before.own_s - before.others_s)
            / (done - begun),
            "p2pd_cpu_s": (after.others_s - before.others_s) / (done - begun),
            "step_bytes": (after.bytes - before.bytes) / (done - begun),
            "audits": after.audits - before.audits,
            "steps": done - begun,
        }


def played(spec: RunSpec, rates: Sequence[float], peers: int, steps: int) -> list[dict[str, float]]:
    """Figures of swarms beside each other, from when all are warm until each has taken so many
    steps."""
    with ExitStack() as stack:
        swarms = [stack.enter_context(Played.begun(spec, rate, peers)) for rate in rates]
        for it in swarms:
            until(it.first, WARM_STEPS)
        begun = [it.mark() for it in swarms]
        for it, mark in zip(swarms, begun, strict=True):
            until(it.first, mark.step + steps)
        done = [it.mark() for it in swarms]
        return [it.figures(*ends) for it, *ends in zip(swarms, begun, done, strict=True)]


def measure(
    spec: RunSpec, rate: float, peers: int, steps: int, pairs: int, at_once: bool
) -> list[dict[str, Any]]:
    found = []
    for number in range(pairs):
        rates = (0.0, rate) if number % 2 == 0 else (rate, 0.0)
        if at_once:
            figures = played(spec, rates, peers, steps)
        else:
            figures = [it for each in rates for it in played(spec, [each], peers, steps)]
        of = dict(zip(rates, figures, strict=True))
        found.append({"without": of[0.0], "with": of[rate]})
        print(json.dumps(found[-1]), file=sys.stderr, flush=True)  # should the rest be cut off
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--rate", type=float, default=0.02)
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--run", default="tiny")
    parser.add_argument("--batch", type=int, help="sequences in a step, instead of the run's")
    parser.add_argument("--bytes", action="store_true", help="nothing else uses loopback")
    parser.add_argument("--at-once", action="store_true", help="the two of a pair, no bytes")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    spec = spec_of(asked.run, asked.batch)
    pairs = measure(spec, asked.rate, asked.peers, asked.steps, asked.pairs, asked.at_once)
    kinds = ["step_s", "mean_step_s", "cpu_s", "p2pd_cpu_s"]
    kinds += ["step_bytes"] if asked.bytes else []
    ratios = {
        kind: statistics.median(it["with"][kind] / it["without"][kind] for it in pairs)
        for kind in kinds
    }
    met = all(ratio <= 1 + TARGET for kind, ratio in ratios.items() if kind != "p2pd_cpu_s")
    if asked.json:
        report = {"rate": asked.rate, "pairs": pairs, "ratios": ratios, "target": 1 + TARGET}
        print(json.dumps(report | {"met": met}))
        return 0 if met else 1
    for kind, ratio in ratios.items():
        without = statistics.median(it["without"][kind] for it in pairs)
        print(f"{kind:12} {without:14.4f} without audits, times {ratio:.3f} at {asked.rate}")
    print(f"{'met' if met else 'MISSED'}: at most {1 + TARGET} times")
    return 0 if met else 1


if __name__ == "__main__":
    raise SystemExit(main())
