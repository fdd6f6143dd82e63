"""Many real daemons on one machine: they found a swarm, train, lose some and gain as many.

    python -m benchmarks.many_daemons [--peers 32] [--changes 3] [--steps 10] [--plan-each] [--json]

The daemons, libp2p, states and the agreement are the real thing; the devices are *emulated* (they
take the time and compute nothing) and the model is small, as 32 computing ones would only show how
two cores are shared. The report has seconds until the first commit, until the first commit without
the killed daemons, and until the first commit with those that joined. It also has the most memory
that daemons and their p2pd had together, as the proportional set size (pages that several share are
divided among them). The lower bound of memory is one daemon's own memory, times their number. Each
phase is printed as it ends (unless as JSON): a run that is cut off has reported what it has seen.

All daemons compute the same plan from the same snapshot, each on a computer of its own. Here they
share two cores or so, and the first that has computed a plan leaves it to the others
(`daemon_with_plans`); `--plan-each` has all of them compute it.
"""

import argparse
import json
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import psutil

from benchmarks.emulated_swarm import LABEL, NEVER
from p2p_dtfm.core.protocol.run_spec import BatchSpec, EvaluationSpec, ModelSpec, RunSpec
from p2p_dtfm.core.protocol.sections.checkpoint_spec import CheckpointSpec
from p2p_dtfm.core.protocol.sections.data_spec import DataSpec
from p2p_dtfm.core.protocol.sections.optimizer_spec import OptimizerSpec
from p2p_dtfm.sim.scenario.scenario import load_scenario
from p2p_dtfm.testbed.local_swarm import Child, LocalSwarm
from p2p_dtfm.testbed.scenario_swarm import SHAPE_FILE, cast_scenario
from p2p_dtfm.train.data import prepare

SCENARIO = """
name = "many"
description = "Like machines in one room"

[[group]]
name = "desk"
count = {count}
forward_tflops = 0.0002
memory_gb = 0.004

[[link]]
from = "*"
to = "*"
latency_ms = 1.0
bandwidth_mbps = 160.0
"""
DEADLINE_S = 400.0
POLL_S = 2.0
PLANS_VARIABLE = "BENCHMARK_PLANS"
"""The folder of the plans that this machine has computed."""
LIMIT_BYTES = 10 << 30
Tell = Callable[[str], None]


def run_spec(directory: Path, pipelines: int) -> Path:
    """A small model, with a batch of a microbatch for each pipeline. Nobody can hold half of the
    model."""
    data = directory / "data"
    prepare([Path(__file__).parent.parent / "README.md"], data, context=64)
    spec = RunSpec(
        name="many",
        seed=7,
        total_steps=NEVER,
        model=ModelSpec(layers=6, width=64, heads=2, context=64, vocabulary=256),
        batch=BatchSpec(global_batch=4 * pipelines, microbatch=4),
        optimizer=OptimizerSpec(peak_learning_rate=2e-4, warmup_steps=20),
        data=DataSpec(source=str(data)),
        evaluation=EvaluationSpec(every_steps=NEVER, sequences=4),
        checkpoint=CheckpointSpec(every_steps=NEVER),
    )
    path = directory / "run.json"
    path.write_text(spec.model_dump_json())
    return path


def proportional_bytes(children: Iterable[Child]) -> int:
    """Memory of the daemons and of all that they started."""
    total = 0
    for child in children:
        try:
            daemon = psutil.Process(child.process.pid)
            for process in (daemon, *daemon.children(recursive=True)):
                total += process.memory_full_info().pss
        except psutil.Error:
            continue  # it ended meanwhile
    return total


class Watched:
    """A swarm, and the most memory that it had. `tell` is given a line as each phase ends."""

    def __init__(self, swarm: LocalSwarm, tell: Tell) -> None:
        self.swarm = swarm
        self.most_bytes = 0
        self._tell = tell

    def seconds_until(self, condition: Callable[[], bool], what: str) -> float:
        began_s = time.monotonic()
        phase_bytes = self._weigh()
        while not condition():
            ended = [it for it in self.swarm.children if (it.process.poll() or 0) > 0]
            assert not ended, f"{ended[0].name} ended by itself: {ended[0].log_tail()}"
            assert time.monotonic() < began_s + DEADLINE_S, f"not within {DEADLINE_S:g} s: {what}"
            time.sleep(POLL_S)
            phase_bytes = max(phase_bytes, self._weigh())
        took_s = time.monotonic() - began_s
        self._tell(f"{what}: {took_s:.1f} s, at most {phase_bytes / (1 << 20):.0f} MiB together")
        return took_s

    def _weigh(self) -> int:
        """The present memory of the daemons that live."""
        now_bytes = proportional_bytes(child for child in self.swarm.children if child.running)
        self.most_bytes = max(self.most_bytes, now_bytes)
        return now_bytes


def say_at_once(line: str) -> None:
    """Print at once, as the output may be a pipe, and the run may be cut off before its end."""
    print(line, flush=True)


def say_nothing(line: str) -> None:
    """Print nothing, as the report says it all."""


def committed_with(child: Child, members: int, steps: int, after: int = 0) -> bool:
    """Whether the child has committed so many steps in a view of so many members, numbered above
    `after`."""
    view, done = None, 0
    for event in child.events():
        if event["event"] == "view":
            view, done = event, 0
        if event["event"] == "step" and view is not None and view["view"] > after:
            done += len(view["members"]) == members
            if done >= steps:
                return True
    return False


def newest_view(child: Child) -> int:
    return max((event["view"] for event in child.events() if event["event"] == "view"), default=0)


def play(
    directory: Path,
    peers: int,
    changes: int,
    steps: int,
    plan_each: bool = False,
    tell: Tell = say_nothing,
) -> dict[str, Any]:
    """Found, train, lose, gain: seconds and bytes. `tell` is given a line for each phase."""
    spec = run_spec(directory, peers)
    described = directory / "many.toml"
    described.write_text(SCENARIO.format(count=peers + changes))
    options, module = ("--threads", "1", "--dashboard", "off"), "p2p_dtfm"
    if not plan_each:
        plans = directory / "plans"
        plans.mkdir()
        os.environ[PLANS_VARIABLE], module = str(plans), "benchmarks.daemon_with_plans"
    with LocalSwarm(directory, options, module) as swarm:
        watched = Watched(swarm, tell)
        homes = [swarm.home(number) for number in range(peers + changes)]
        players = cast_scenario(load_scenario(described), homes, directory / SHAPE_FILE)
        expected = ["--expect-peers", str(peers), "--expect-wait-s", str(DEADLINE_S)]
        arguments = ["--run", str(spec), *expected, *players[0].arguments]
        founder, address = swarm.found(arguments, players[0].name)
        for player in players[1:peers]:
            swarm.join(address, player.arguments, player.name)
        found_s = watched.seconds_until(
            lambda: committed_with(founder, peers, steps), f"found and {steps} steps of {peers}"
        )
        before = newest_view(founder)
        for child in swarm.children[-changes:]:
            os.kill(child.process.pid, signal.SIGKILL)
        lost_s = watched.seconds_until(
            lambda: committed_with(founder, peers - changes, steps, before),
            f"{changes} killed, {steps} steps of the rest",
        )
        before = newest_view(founder)
        for player in players[peers:]:
            swarm.join(address, player.arguments, player.name)
        gained_s = watched.seconds_until(
            lambda: committed_with(founder, peers, steps, before),
            f"as many joined, {steps} steps of all",
        )
        return {
            "label": LABEL,
            "peers": peers,
            "changes": changes,
            "steps": steps,
            "plans": "each its own" if plan_each else "one for all of this machine",
            "found_s": round(found_s, 1),
            "lost_s": round(lost_s, 1),
            "gained_s": round(gained_s, 1),
            "views": newest_view(founder),
            "most_gib": round(watched.most_bytes / (1 << 30), 2),
            "most_mib_each": round(watched.most_bytes / peers / (1 << 20), 1),
            "within_limit": watched.most_bytes <= LIMIT_BYTES,
        }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", type=int, default=32)
    parser.add_argument("--changes", type=int, default=3, help="killed, and then joined")
    parser.add_argument(
        "--steps", type=int, default=10, help="committed in each of the three views"
    )
    parser.add_argument(
        "--plan-each", action="store_true", help="each daemon computes the plan, as in real life"
    )
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="many-daemons-") as directory:
        tell = say_nothing if given.json else say_at_once
        result = play(
            Path(directory), given.peers, given.changes, given.steps, given.plan_each, tell
        )
    if given.json:
        print(json.dumps(result))
        return
    print(f"{result['peers']} daemons ({result['label']}), {result['views']} views")
    print(f"planned by {result['plans']}")
    print(
        f"memory: {result['most_gib']} GiB, {result['most_mib_each']} MiB each (aim 10 GiB of 32)"
    )


if __name__ == "__main__":
    main()
