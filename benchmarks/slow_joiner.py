"""What a founder loses to one joiner with a slow line, over a real wide-area network.

    python -m benchmarks.slow_joiner --wanem PATH/wanem.c [--tries 1] [--seconds 300] [--json]

A founder with 40 Mbit/s up and 80 down trains 11 million parameters alone; then a peer with 5
Mbit/s up joins, 80 ms away. What counts is the median of the tries' ratios: tokens a second that
the swarm commits in the given time from the joiner's start on, against the founder's own just
before and, once the joiner has left, just after. The report also has the longest span without a
commit, and the founder's processor time for each step, alone and not. A second ratio leaves out the
time in which the founder's computing was ready and other processes had the processors. Where root,
/dev/net/tun, gcc or ip is missing the program says so and ends with code 0.
"""

import itertools
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.links import MTU, processor_s
from benchmarks.over_a_wan import ENDLESS, Swarm, steps_of, until, waited_share
from benchmarks.wide_area import Missing, options_of, tell_skipped, tell_verdict, wide_area
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.sim.scenario.files import read_run_spec
from p2p_dtfm.testbed.local_swarm import Child, stop_all

ONE_WAY_MS = 40.0
FOUNDER_UP_MBPS = 40.0
JOINER_UP_MBPS = 5.0
TARGET = 0.95
LONGEST_SPAN_S = 10.0
WARM_STEPS = 10
ALONE_S = 30.0
"""Seconds before the joiner comes, and again when it has left."""


def links() -> str:
    """The matrix of links, for `wanem`."""
    there = f"0 1 {ONE_WAY_MS} {FOUNDER_UP_MBPS} 0"
    return f"2\n{there}\n1 0 {ONE_WAY_MS} {JOINER_UP_MBPS} 0\n"


def run_spec() -> RunSpec:
    spec = read_run_spec("tiny")
    return spec.model_copy(
        update={
            "name": "eleven-million",
            "total_steps": ENDLESS,
            "model": spec.model.model_copy(
                update={"layers": 6, "width": 384, "heads": 6, "context": 64}
            ),
            "batch": spec.batch.model_copy(update={"global_batch": 8, "microbatch": 4}),
            "optimizer": spec.optimizer.model_copy(update={"peak_learning_rate": 3e-4}),
        }
    )


def commits(child: Child) -> list[float]:
    """When this peer saw each step commit for the first time."""
    at_s: dict[int, float] = {}
    for event in steps_of(child):
        at_s.setdefault(event["step"], event["time_s"])
    return sorted(at_s.values())


def watched(founder: Child, tokens_per_step: int, seconds: float) -> dict[str, Any]:
    """Tokens a second over the next seconds, by whole steps, and their cost for the founder."""
    spent_s, began_s = processor_s(founder.process.pid), time.time()
    waited = waited_share(founder.process.pid, seconds)
    spent_s = {kind: now - spent_s[kind] for kind, now in processor_s(founder.process.pid).items()}
    found = commits(founder)
    before = [at_s for at_s in found if at_s < began_s][-1:]
    span = [*before, *(at_s for at_s in found if began_s <= at_s <= began_s + seconds)]
    longest_s = max((b - a for a, b in itertools.pairwise([*span, began_s + seconds])), default=0)
    count = len(span) - 1
    step_s = (span[-1] - span[0]) / count
    return {
        "tokens_per_s": round(tokens_per_step / step_s),
        "own_step_s": round(step_s * (1 - waited), 4),
        "steps": count,
        "longest_span_s": round(longest_s, 2),
        "processor_s_per_step": round(sum(spent_s.values()) / count, 3),
    }


def one_try(folder: Path, run: Path, tokens_per_step: int, seconds: float) -> dict[str, Any]:
    swarm = Swarm(folder, run)
    try:
        founder = swarm.start()
        until(lambda: len(commits(founder)) >= WARM_STEPS, "the founder's first steps")
        before = watched(founder, tokens_per_step, ALONE_S)
        joiner = swarm.start()
        joined = watched(founder, tokens_per_step, seconds)
        status = founder.status() or {}
        views = [event for event in founder.events() if event["event"] == "view"]
        stop_all([joiner])
        swarm.children.remove(joiner)
        until(lambda: swarm.members() == 1, "the joiner has left")
        after = watched(founder, tokens_per_step, ALONE_S)
    finally:
        stop_all(swarm.children)
    alone = statistics.mean(each["tokens_per_s"] for each in (before, after))
    own_s = statistics.mean(each["own_step_s"] for each in (before, after))
    return {
        "before": before,
        "joined": joined,
        "after": after,
        "ratio": round(joined["tokens_per_s"] / alone, 3),
        "own_ratio": round(own_s / joined["own_step_s"], 3) if status.get("stage") else None,
        "views": len(views),
        "members": max(len(event["members"]) for event in views),
        "safe_step": status.get("safe_step"),
    }


def measure(
    source: Path | None, tries: int, seconds: float, homes: Path | None = None
) -> dict[str, Any]:
    """Raises `Missing`."""
    spec, found = run_spec(), []
    with tempfile.TemporaryDirectory(prefix="p2p-dtfm-slow-") as name:
        folder = homes or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        run = folder / "run.json"
        run.write_text(spec.model_dump_json())
        with wide_area(source, folder, links(), 2, MTU):
            for number in range(tries):
                found.append(one_try(folder / f"try-{number}", run, spec.tokens_per_step, seconds))
                print(json.dumps(found[-1]), file=sys.stderr, flush=True)
    ratio = statistics.median(each["ratio"] for each in found)
    own_ratios = [each["own_ratio"] for each in found if each["own_ratio"] is not None]
    longest_s = max(each["joined"]["longest_span_s"] for each in found)
    return {
        "tries": found,
        "ratio": ratio,
        "own_ratio": statistics.median(own_ratios) if own_ratios else None,
        "target": TARGET,
        "longest_span_s": longest_s,
        "met": ratio >= TARGET and longest_s <= LONGEST_SPAN_S,
    }


def main() -> int:
    parser = options_of(__doc__)
    parser.add_argument("--tries", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=300.0, help="from the joiner's start on")
    parser.add_argument("--homes", type=Path, help="where homes and logs stay")
    options = parser.parse_args()
    try:
        result = measure(options.wanem, options.tries, options.seconds, options.homes)
    except Missing as missing:
        return tell_skipped(missing, options.json)
    if options.json:
        print(json.dumps(result))
        return 0 if result["met"] else 1
    for number, each in enumerate(result["tries"], 1):
        print(
            f"try {number}: alone {each['before']['tokens_per_s']} and "
            f"{each['after']['tokens_per_s']} tokens/s, with the joiner "
            f"{each['joined']['tokens_per_s']}: {each['ratio']:.1%}; longest span without a commit "
            f"{each['joined']['longest_span_s']} s"
        )
    return tell_verdict(result)


if __name__ == "__main__":
    raise SystemExit(main())
