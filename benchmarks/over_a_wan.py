"""Over a real wide-area network: is a swarm as fast as its best member, and what does a kill cost?

    python -m benchmarks.over_a_wan --wanem PATH/wanem.c [--rounds 2] [--seconds 40] [--json]

Four daemons with `tiny`, each in a network namespace of its own; `wanem` (see `benchmarks.links`)
carries their packets: 80 ms round trip, 200 Mbit/s, to and from the last of them 50 Mbit/s, 0.05%
of packets lost. By turns the founder trains alone, and with the three others; what counts is the
median of the rounds' ratios of committed tokens a second, once a first cut is whole. A second ratio
leaves out the time in which the computing peer was ready and other processes had the processors:
here four daemons share one machine, and elsewhere each has its own. In the last round the peer that
trains is killed. The others say how many steps they repeat, and their losses are compared with the
plain loop's in one process. Where root, /dev/net/tun, gcc or ip is missing the program says so and
ends with code 0. Bounds: what a machine computes alone; steps since the newest whole cut.
"""

import contextlib
import itertools
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.links import ADDRESS, MTU, processor_s
from benchmarks.wide_area import Missing, options_of, tell_skipped, tell_verdict, wide_area
from p2p_dtfm.sim.scenario.files import read_run_spec
from p2p_dtfm.testbed.local_swarm import Child, started, stop_all
from p2p_dtfm.testbed.plain_losses import plain_losses

PEERS = 4
ONE_WAY_MS = 40.0
RATE_MBPS = 200.0
SLOW_MBPS = 50.0
LOSS = 0.0005
TARGET = 0.97
LOSS_TOLERANCE = 1e-4
START_S = 180.0
GOES_ON_STEPS = 5
ENDLESS = 100_000


def links() -> str:
    """The matrix of links, for `wanem`."""
    lines = [str(PEERS)]
    for origin in range(PEERS):
        for to in range(PEERS):
            if origin != to:
                rate = SLOW_MBPS if PEERS - 1 in (origin, to) else RATE_MBPS
                lines.append(f"{origin} {to} {ONE_WAY_MS} {rate} {LOSS}")
    return "\n".join(lines) + "\n"


class Swarm:
    """Daemons in namespaces, of which the first founds."""

    def __init__(self, folder: Path, spec: Path) -> None:
        self.children: list[Child] = []
        self._folder = folder
        self._spec = spec

    def start(self) -> Child:
        number = len(self.children)
        home = self._folder / f"peer-{number}"
        home.mkdir(parents=True)
        more = ["--run", str(self._spec)]
        if number:
            invitation = self.children[0].invitation()
            assert invitation is not None
            more = ["--initial-peers", invitation]
        ip = ADDRESS.format(number + 1)
        command = ["ip", "netns", "exec", f"wan{number}", sys.executable, "-m", "p2p_dtfm"]
        command += ["--home", str(home), "--listen", f"/ip4/{ip}/tcp/0", "--until-stdin-closes"]
        child = started([*command, "--threads", "1", "--log", "human", *more], home)
        self.children.append(child)
        return child

    def members(self) -> int:
        views = [event for event in self.children[0].events() if event["event"] == "view"]
        return len(views[-1]["members"]) if views else 0


def until(condition: Callable[[], bool], what: str, limit_s: float = START_S) -> None:
    end_s = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > end_s:
            raise SystemExit(f"not within {limit_s:.0f} s: {what}")
        time.sleep(0.2)


def ended(child: Child) -> bool:
    """Whether the child has ended. Raises `SystemExit` with its last words if it has."""
    if child.running:
        return False
    raise SystemExit(f"{child.name} has ended:\n{child.log_tail()}")


def steps_of(child: Child) -> list[dict[str, Any]]:
    found = [event for event in child.events() if event["event"] == "step"]
    return [event for event in found if event["loss"] is not None]


def saved(child: Child) -> bool:
    return bool(list(child.home.glob("runs/*/checkpoints/*/manifest.json")))


@contextlib.contextmanager
def swarm_of(count: int, folder: Path, spec: Path) -> Iterator[Swarm]:
    """A swarm in which all are members and have committed some steps. With others, a first cut is
    whole."""
    swarm = Swarm(folder, spec)
    try:
        founder = swarm.start()
        until(lambda: founder.invitation() is not None or ended(founder), "the founder's address")
        for _ in range(count - 1):
            swarm.start()
        until(lambda: swarm.members() == count, f"a view of {count}")
        begun = len(steps_of(founder))
        until(lambda: len(steps_of(founder)) >= begun + 20, "twenty steps")
        if count > 1:
            until(
                lambda: steps_of(founder)[-1].get("safe_step") is not None,
                "a whole cut, or guardians with every step",
            )
        yield swarm
    finally:
        stop_all(swarm.children)


def computing(pid: int) -> tuple[float, float]:
    """For the computing thread of a process: seconds on a processor, and seconds ready while
    another process had the processor."""
    threads = []
    for file in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with contextlib.suppress(OSError):  # it has ended
            on_ns, ready_ns, _ = map(int, file.read_text().split())
            threads.append((on_ns / 1e9, ready_ns / 1e9))
    return max(threads)


def waited_share(pid: int, seconds: float) -> float:
    """The share of the next seconds in which the computing thread was ready and did not run."""
    began_s = time.monotonic()
    _, before_s = computing(pid)
    time.sleep(seconds)
    return (computing(pid)[1] - before_s) / (time.monotonic() - began_s)


def trainer_of(swarm: Swarm) -> Child:
    """The holder of all layers; the founder where several hold some."""
    trainers = [child for child in swarm.children if (child.status() or {}).get("stage")]
    return trainers[0] if len(trainers) == 1 else swarm.children[0]


def measured(swarm: Swarm, tokens_per_step: int, seconds: float) -> dict[str, Any]:
    """Tokens a second that the swarm commits, and processor seconds of each daemon.

    `own_step_s` is a step less the time in which who computes was ready, and other processes had
    the processors: what it would take where each daemon has a machine of its own. None where
    another peer computes in the end.
    """
    trainer = trainer_of(swarm)
    before = [processor_s(child.process.pid) for child in swarm.children]
    began = len(steps_of(trainer))
    waited = waited_share(trainer.process.pid, seconds)
    events = steps_of(trainer)[began:]
    spent_s = [
        {kind: round((now[kind] - then[kind]) / seconds, 3) for kind in now}
        for now, then in zip(
            [processor_s(child.process.pid) for child in swarm.children], before, strict=True
        )
    ]
    step_s = (events[-1]["time_s"] - events[0]["time_s"]) / (len(events) - 1)
    gaps_s = [b["time_s"] - a["time_s"] for a, b in itertools.pairwise(events)]
    return {
        "tokens_per_s": round(tokens_per_step / step_s),
        "own_step_s": step_s * (1 - waited) if trainer_of(swarm) is trainer else None,
        "longest_gap_s": round(max(gaps_s), 2),
        "processors": spent_s,
    }


def killed(swarm: Swarm) -> dict[str, Any]:
    """Kill the peer that trains. Returns what the others repeat, and how far their losses are
    off."""
    founder = swarm.children[0]
    victim = trainer_of(swarm)
    views = [event for event in founder.events() if event["event"] == "view"]
    said = views[-1].get("may_repeat_steps")
    os.killpg(victim.process.pid, signal.SIGKILL)
    at, killed_s = steps_of(victim)[-1]["step"], time.time()
    rest = [child for child in swarm.children if child is not victim]
    until(
        lambda: min(steps_of(child)[-1]["step"] for child in rest) >= at + GOES_ON_STEPS,
        "the others go on beyond where it was killed",
    )
    survivor = rest[0]
    later = [event for event in steps_of(survivor) if event["time_s"] > killed_s]
    first = later[0]
    count = at + GOES_ON_STEPS
    until(lambda: any(map(saved, rest)), "one of them has saved")  # spares save nothing
    expected = plain_losses(next(filter(saved, rest)).home, count)
    assert expected is not None
    found = [e for e in steps_of(survivor) if e["step"] < len(expected)]
    return {
        "killed_at_step": at,
        "goes_on_from_step": first["step"],
        "repeated_steps": at + 1 - first["step"],
        "may_repeat_steps": said,
        "first_commit_after_s": round(first["time_s"] - killed_s, 1),
        "caught_up_after_s": round(
            next(e["time_s"] for e in later if e["step"] > at) - killed_s, 1
        ),
        "max_loss_difference": max(abs(e["loss"] - expected[e["step"]]) for e in found),
    }


def measure(source: Path | None, rounds: int, seconds: float) -> dict[str, Any]:
    """Raises `Missing`."""
    spec = read_run_spec("tiny")
    endless = spec.model_copy(
        update={
            "total_steps": ENDLESS,
            # gentle steps: else rounding differences grow tenfold every ten steps, as chaos does
            "optimizer": spec.optimizer.model_copy(update={"peak_learning_rate": 3e-4}),
        }
    )
    found: list[dict[str, Any]] = []
    own_ratios: list[float] = []
    with tempfile.TemporaryDirectory(prefix="p2p-dtfm-wan-") as name:
        folder = Path(name)
        run = folder / "run.json"
        run.write_text(endless.model_dump_json())
        with wide_area(source, folder, links(), PEERS, MTU):
            for number in range(rounds):
                with swarm_of(1, folder / f"alone-{number}", run) as swarm:
                    alone = measured(swarm, spec.tokens_per_step, seconds)
                with swarm_of(PEERS, folder / f"four-{number}", run) as swarm:
                    four = measured(swarm, spec.tokens_per_step, seconds)
                    loss = killed(swarm) if number == rounds - 1 else {}
                ratio = round(four["tokens_per_s"] / alone["tokens_per_s"], 3)
                found.append({"alone": alone, "four": four, "ratio": ratio, "kill": loss})
                if four["own_step_s"] is not None:
                    own_ratios.append(alone["own_step_s"] / four["own_step_s"])
                print(json.dumps(found[-1]), file=sys.stderr, flush=True)
    ratio = statistics.median(each["ratio"] for each in found)
    kill = found[-1]["kill"]
    return {
        "rounds": found,
        "ratio": ratio,
        "own_ratio": statistics.median(own_ratios) if own_ratios else None,
        "target": TARGET,
        "kill": kill,
        "met": ratio >= TARGET and kill["max_loss_difference"] <= LOSS_TOLERANCE,
    }


def main() -> int:
    parser = options_of(__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=40.0, help="of each measurement")
    options = parser.parse_args()
    try:
        result = measure(options.wanem, options.rounds, options.seconds)
    except Missing as missing:
        return tell_skipped(missing, options.json)
    if options.json:
        print(json.dumps(result))
        return 0 if result["met"] else 1
    for number, each in enumerate(result["rounds"], 1):
        print(
            f"round {number}: alone {each['alone']['tokens_per_s']} tokens/s, four "
            f"{each['four']['tokens_per_s']}: {each['ratio']:.1%}"
        )
    kill = result["kill"]
    print(
        f"killed at step {kill['killed_at_step']}: goes on from {kill['goes_on_from_step']}, "
        f"{kill['repeated_steps']} steps repeated of {kill['may_repeat_steps']} said; caught up "
        f"after {kill['caught_up_after_s']} s; losses {kill['max_loss_difference']:.1e} off"
    )
    return tell_verdict(result)


if __name__ == "__main__":
    raise SystemExit(main())
