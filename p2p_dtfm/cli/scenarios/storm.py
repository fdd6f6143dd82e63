"""`p2p-dtfm chaos --storm`: daemons are killed one after another, each as soon as the last one is
replaced, and the curve is judged."""

import math
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from p2p_dtfm.cli.scenarios.compared import LOSSES, tell_end
from p2p_dtfm.cli.scenarios.played_run import bring_weights, run_to_play
from p2p_dtfm.cli.scenarios.told_to_end import handled
from p2p_dtfm.core.protocol.facts.in_words import counted, duration
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.testbed.chaos_verdict import judge
from p2p_dtfm.testbed.kill_storm import KillStorm, StormReport, peer_id_of
from p2p_dtfm.testbed.local_swarm import Child, LocalSwarm
from p2p_dtfm.testbed.plain_losses import NOTHING_SAVED, comparable, plain_run, why_not_plain
from p2p_dtfm.testbed.swarm_directory import kept_directory, processes_left

PEERS = 8
KILLS = 1_000
STEPS_FOR_EACH_KILL = 1_000
"""Steps of the run spec for each kill: far more than are committed while a daemon is replaced."""
MEMORY_GROWTH_LIMIT = 0.05
TOLD_EVERY_S = 10.0


@dataclass(frozen=True)
class StormCase:
    run: str
    seed: int
    peers: int
    kills: int


def play_storm(case: StormCase, keep: Path | None, console: Console) -> dict[str, Any]:
    """The report. If a signal interrupts the storm, the report covers what was done until then."""
    timeline: list[dict[str, Any]] = []

    def say(time_s: float, step: int, what: str) -> None:
        timeline.append({"time_s": round(time_s, 2), "step": step, "what": what})
        console.print(f"{time_s:8.1f} s  step {step:5}  {what}", highlight=False)

    with kept_directory(keep) as directory:
        spec = comparable(run_to_play(case.run), (case.kills + 1) * STEPS_FOR_EACH_KILL)
        bring_weights(case.run, spec, directory)
        report = _storm_in(directory, case, spec, say)
        if left := processes_left(directory):
            report["violations"].append(f"{counted(left, 'process')} left")
    report["not_looked_at"] = not_looked_at(report)
    return report | {"timeline": timeline, "ok": not report["violations"]}


def _storm_in(
    directory: Path, case: StormCase, spec: RunSpec, say: Callable[[float, int, str], None]
) -> dict[str, Any]:
    (directory / "run.json").write_text(spec.model_dump_json())
    began_s = time.time()
    with LocalSwarm(directory, ["--threads", "1"]) as swarm:

        def start_again(name: str, addresses: tuple[str, ...]) -> Child:
            first, *others = addresses
            more = [part for address in others for part in ("--initial-peers", address)]
            return swarm.join(first, more, name, directory / name)

        peer_ids = _start_all(swarm, case)
        storm = KillStorm(swarm, peer_ids, start_again, say, case.seed, spec.total_steps)
        with _stops_at_a_signal(storm):
            done = storm.run(case.kills)
            steps = storm.watched.step + 1
            homes = [directory / name for name in storm.watched.histories]
            losses: list[float] = []
            if not (reason := why_not_plain(spec)):
                losses = _plain_losses(homes, steps, lambda: storm.is_stopped, say, began_s)
        histories = storm.watched.histories
    samples, expected = spec.batch.global_batch, _expected(losses, steps)
    verdict = judge(histories, done.inflicted, steps, samples, expected, done.ends_s)
    verdict.violations[:0] = done.wrong
    verdict.violations += _left_behind(done)
    growth = done.facts.growth()
    return {
        **asdict(verdict),
        "run": case.run,
        "seed": case.seed,
        "peers": case.peers,
        "kills": done.kills,
        "wanted_kills": case.kills,
        "same_home": done.same_home,
        "whole_s": _times(done.whole_s),
        "memory": asdict(growth) if growth is not None else None,
        "compared_steps": len(losses),
        "not_compared": None if losses else reason or NOTHING_SAVED,
        "total_steps": steps,
        "took_s": round(time.time() - began_s, 1),
    }


def _start_all(swarm: LocalSwarm, case: StormCase) -> dict[str, str]:
    """Start all daemons; returns their peer ids by name, which are made before any daemon runs."""
    directory = swarm.directory
    names = [f"peer-{number}" for number in range(case.peers)]
    peer_ids = {name: peer_id_of(directory / name) for name in names}
    run = ["--run", str(directory / "run.json"), "--expect-peers", str(case.peers)]
    _, address = swarm.found(run, names[0], directory / names[0])
    for name in names[1:]:
        swarm.join(address, (), name, directory / name)
    return peer_ids


@contextmanager
def _stops_at_a_signal(storm: KillStorm) -> Iterator[None]:
    """Handles signals: the first ends the storm, which is then judged; the second ends the
    program."""

    def stop(number: int, frame: Any) -> None:
        if storm.is_stopped:
            raise KeyboardInterrupt
        storm.stop()

    with handled((signal.SIGINT, signal.SIGTERM), stop):
        yield


def _plain_losses(
    homes: list[Path],
    steps: int,
    is_stopped: Callable[[], bool],
    say: Callable[[float, int, str], None],
    began_s: float,
) -> list[float]:
    """The losses of one process that trains alone. They cover as many steps as there was time for:
    a signal ends this, too."""
    running = next((found for home in homes if (found := plain_run(home, steps))), None)
    if running is None:
        return []
    compared = f"compares {counted(steps, 'step')} with one process's"
    say(time.time() - began_s, steps - 1, compared)
    from p2p_dtfm.train.stage.timed import use_one_thread

    use_one_thread()  # several threads wait for one another if the machine is busy otherwise
    losses: list[float] = []
    was_stopped, told_s = is_stopped(), time.monotonic()
    for loss in running:
        losses.append(loss)
        if is_stopped() and not was_stopped:
            break
        if time.monotonic() - told_s > TOLD_EVERY_S:
            told_s = time.monotonic()
            say(time.time() - began_s, len(losses) - 1, f"compared {len(losses)} of {steps} steps")
    return losses


def _expected(losses: list[float], steps: int) -> Callable[[int], float] | None:
    """The expected loss by step; NaN for a step that was not computed, so is not compared."""
    if not losses:
        return None
    known = losses + [math.nan] * (steps - len(losses))
    return known.__getitem__


def _left_behind(done: StormReport) -> Iterator[str]:
    growth = done.facts.growth()
    if growth is not None and growth.total > MEMORY_GROWTH_LIMIT:
        yield (
            f"the memory of {growth.survivors} daemons that survived grew by {growth.total:.1%}, "
            f"more than {MEMORY_GROWTH_LIMIT:.0%}"
        )
    elif growth is not None and growth.longest > MEMORY_GROWTH_LIMIT:
        yield (
            f"the memory of the daemon that was spared grew by {growth.longest:.1%}, "
            f"more than {MEMORY_GROWTH_LIMIT:.0%}"
        )
    if left := done.facts.files_left():
        yield f"{counted(len(left), 'file')} left, {left[0]} first"


def _times(times_s: list[float]) -> dict[str, float] | None:
    if not times_s:
        return None
    return {"median": round(statistics.median(times_s), 2), "worst": round(max(times_s), 2)}


def not_looked_at(report: dict[str, Any]) -> list[str]:
    """The invariants of which nothing was seen, or less than was wanted."""
    compared, steps = report["compared_steps"], report["total_steps"]
    missing = []
    if not compared:
        missing.append(LOSSES)
    elif compared < steps:
        missing.append(f"{LOSSES} of {counted(steps - compared, 'step')}")
    if report["memory"] is None:
        missing.append("how memory grows")
    if report["kills"] < report["wanted_kills"]:
        missing.append(f"{counted(report['wanted_kills'] - report['kills'], 'kill')}")
    return missing


def storm_summary(console: Console, report: dict[str, Any]) -> None:
    whole, memory, held_up = report["whole_s"], report["memory"], report["recovery_s"].get("kill")
    lines = [
        f"{report['kills']} of {report['wanted_kills']} kills of {report['peers']} daemons in "
        f"{duration(report['took_s'])}; {report['same_home']} started again in their homes"
    ]
    if whole is not None:
        lines.append(f"whole again after {whole['median']:.1f} s (median), {whole['worst']:.1f} s")
    if held_up is not None:
        lines.append(
            f"steps were held up for {held_up['median']:.1f} s (median), {held_up['worst']:.1f} s"
        )
    lines.append(
        f"{report['committed_steps']} of {report['total_steps']} steps committed in "
        f"{counted(report['views'], 'view')}; samples lost {report['lost_samples']}, counted twice "
        f"{report['duplicated_samples']}; most repeated after a failure {report['repeated_steps']}"
    )
    difference = report["max_loss_difference"]
    lines.append(
        f"losses were not compared: {report['not_compared']}"
        if difference is None
        else f"{report['compared_steps']} losses compared with one process's: at most "
        f"{difference:.1e} off"
    )
    lines.append(
        "nobody survived long enough to tell how memory grows"
        if memory is None
        else f"memory of {memory['survivors']} daemons that survived: {memory['total']:+.1%}, at "
        f"most {memory['worst']:+.1%}, "
        f"the one that was spared {memory['longest']:+.1%}"
    )
    for line in lines:
        console.print(line, highlight=False)
    tell_end(console, report)
