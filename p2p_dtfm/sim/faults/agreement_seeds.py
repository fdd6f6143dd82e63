"""Simulated runs of many seeds: every fault the world knows, and what must hold all the same.

python -m p2p_dtfm.sim.faults.agreement_seeds --seeds 0-199
python -m p2p_dtfm.sim.faults.agreement_seeds --seeds 17 --story
"""

import argparse
import multiprocessing
import random
import statistics
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial

from p2p_dtfm.core.consensus.actions import AgreementTiming
from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.protocol.records import (
    PROTOCOL_VERSION,
    Device,
    Intent,
    LayerTiming,
    PeerRecord,
    Reachability,
)
from p2p_dtfm.core.protocol.snapshot import ViewId
from p2p_dtfm.core.protocol.workload import LayerCost, Workload
from p2p_dtfm.core.units import SECOND_NS
from p2p_dtfm.sim.faults.agreement_world import AgreementWorld
from p2p_dtfm.sim.faults.drawn_plans import any_plan
from p2p_dtfm.sim.faults.fault_schedule import Faults
from p2p_dtfm.sim.faults.invariants import Violation
from p2p_dtfm.sim.faults.lossy_network import LossyNetwork
from p2p_dtfm.sim.faults.simulated_peer import SimulatedPeer

FAULTS = (12, 19)
FAULTS_BEGIN_NS = 8 * SECOND_NS
FAULTS_END_NS = 100 * SECOND_NS
PROGRESS_SEEDS = 100
SETTLE_LIMIT_S = 180
SETTLE_VIEWS = 12
SETTLE_VIEWS_AFTER_LOSSES = 24
"""After the last fault, all that can come back must be in one view again and have committed three
steps. That has to happen within this (virtual) time and this number of views. The larger number
holds for seeds in which layers may be lost or the swarm may be split."""
TIMING = AgreementTiming(
    gather_ns=3 * SECOND_NS,
    ready_ns=6 * SECOND_NS,
    retry_ns=2 * SECOND_NS,
    lost_layers_ns=30 * SECOND_NS,
    orphan_ns=20 * SECOND_NS,
)

_COST = LayerCost(1, 1, 1, 1)
_TIME = LayerTiming(1, 1)
_TEMPLATE = PeerRecord(
    peer_id="template",
    life=1,
    sequence=1,
    protocol_version=PROTOCOL_VERSION,
    run_digest="simulated",
    device=Device("cpu", "simulated", 1 << 30, _TIME, _TIME, _TIME),
    uplink_bytes_per_s=0,
    downlink_bytes_per_s=0,
    links={},
    addresses=(),
    reachability=Reachability.DIRECT,
    intent=Intent.TRAIN,
)


@dataclass
class Result:
    """How one seed ended. `violation` is empty if every invariant held."""

    seed: int
    violation: str = ""
    story: list[str] = field(default_factory=list)
    faults: int = 0
    inflicted: dict[str, int] = field(default_factory=dict)
    only_holders: int = 0
    """Crashes and stops of the only holder of some layer, in runs that must lose no step."""
    messages: tuple[int, int, int] = (0, 0, 0)
    """Lost, repeated and late messages."""
    steps: int = 0
    views: int = 0
    settle_s: float = 0.0
    settle_views: int = 0
    given_up_steps: int = 0
    whole_cuts: int = 0
    repeated_steps: int = 0
    """The most steps that a view went back by to a cut."""
    kept_forwards: int = 0
    redone_forwards: int = 0
    """Forwards of microbatches through stages that failures caused to be computed again: see
    `core.recovery.partial_replay.PartialReplay`."""
    mended_views: int = 0
    """Views in which peers stand in for others."""
    mended_again: int = 0
    """Mended views that an unplanned view followed: something failed once more."""
    mended_forwards: int = 0
    """The part of `kept_forwards` that was kept in mended views."""
    provisional_views: int = 0
    """Views that others follow at once, so that a better plan takes over."""
    recoveries_ns: list[int] = field(default_factory=list)
    watched_crashes: int = 0
    """Crashes after which the next commit was waited for, a minute at most."""


class SeededRun:
    """One seed: 4 to 16 peers, at least ten faults, then peace."""

    def __init__(
        self,
        seed: int,
        peer_type: type[SimulatedPeer] = SimulatedPeer,
        timing: AgreementTiming = TIMING,
    ) -> None:
        chance = random.Random(seed)
        count = chance.choice((4, 4, 4, 4, 5, 5, 5, 6, 6, 6, 7, 7, 8, 8, 10, 16))
        min_members = chance.choice((1, 1, 1, 2, count // 2 + 1))
        workload = Workload(2, 8, 0, 1, _COST, _COST, _COST, min_members)
        network = LossyNetwork(
            delay_ns=(1_000_000, 150_000_000),
            loss=chance.choice((0.0, 0.02)),
            repeat=chance.choice((0.0, 0.05)),
            late=chance.choice((0.0, 0.01)),
        )
        world = AgreementWorld(seed, workload, _TEMPLATE, any_plan, network, timing)
        world.peer_type = peer_type
        world.rejoins = True
        world.compute_ns = (SECOND_NS // 2, 2 * SECOND_NS)
        self.seed, self.world = seed, world
        self.careful = chance.random() < 0.4
        world.invariants.keeps_steps = self.careful
        for number in range(count):
            peer = world.add_peer(f"p{number:02}")
            peer.clock_rate = chance.uniform(0.97, 1.03)
            peer.clock_offset_ns = chance.randrange(1 << 50)
            peer.agreement.wants_view()
        world.after(3 * SECOND_NS, lambda: world.found("p00") if self._nobody_yet() else None)
        for_good = self.careful and chance.random() < 0.5
        self.faults = Faults(world, chance, self.careful, for_good)
        self.faults.schedule(chance.randrange(*FAULTS), FAULTS_BEGIN_NS, FAULTS_END_NS)

    def _nobody_yet(self) -> bool:
        agreement = self.world.peers["p00"].agreement
        return agreement.view is None and not agreement.attempting

    def run(self) -> Result:
        result = Result(self.seed)
        world = self.world
        try:
            world.run_to(FAULTS_END_NS)
            world.tell("world", "NO MORE FAULTS")
            self.faults.end()
            began_ns = world.now_ns
            world.run_until(self._look, SETTLE_LIMIT_S)
            result.settle_s = (world.now_ns - began_ns) / SECOND_NS
            result.settle_views = self._views_since(began_ns)
            if result.settle_views > (SETTLE_VIEWS if self.careful else SETTLE_VIEWS_AFTER_LOSSES):
                raise Violation(f"{result.settle_views} views were needed to settle")
        except (Violation, AssertionError) as error:
            result.violation = str(error) or repr(error)
        except Exception as error:  # noqa: BLE001 - other seeds go on, whatever it is
            result.violation = problem_of(error)
        result.story = world.story
        result.faults = sum(self.faults.inflicted.values())
        result.inflicted = dict(self.faults.inflicted)
        result.only_holders = self.faults.only_holders if self.careful else 0
        network = world.network
        result.messages = (network.lost_count, network.repeated_count, network.late_count)
        result.steps = world.invariants.furthest
        result.given_up_steps = world.invariants.given_up_steps
        result.whole_cuts = world.invariants.cut_count
        result.repeated_steps = world.invariants.most_repeated
        result.views = len(world.invariants.views)
        result.kept_forwards = sum(replay.kept_forwards for replay in world.redone.values())
        result.redone_forwards = sum(replay.redone_forwards for replay in world.redone.values())
        self._count_mended(result)
        result.recoveries_ns = self.faults.recoveries_ns
        result.watched_crashes = self.faults.watched_crashes
        return result

    def _count_mended(self, result: Result) -> None:
        views, redone = self.world.invariants.views, self.world.redone
        mended = {id for id, v in views.items() if isinstance(v.plan, Plan) and v.plan.stand_ins}
        unplanned = [view.snapshot for view in views.values() if not view.snapshot.planned]
        result.mended_views = len(mended)
        plans = [view.plan for view in views.values() if isinstance(view.plan, Plan)]
        result.provisional_views = sum(plan.provisional for plan in plans)
        result.mended_again = len(mended & {snapshot.previous for snapshot in unplanned})
        result.mended_forwards = sum(redone[id].kept_forwards for id in mended & redone.keys())

    _goal: tuple[ViewId, int] | None = None

    def _look(self) -> bool:
        return self.world.event_count % 16 == 0 and self._settled()

    def _settled(self) -> bool:
        """Whether all are in one view that has committed three steps since."""
        lost = self.faults.lost
        peers = self.world.peers.values()
        present = [peer for peer in peers if not peer.left and peer.name not in lost]
        if not present:
            return True
        view = _whole_view(present)
        if view is None:
            self._goal = None
            return False
        step = min(peer.agreement.step for peer in present)
        if self._goal is None or self._goal[0] != view:
            self._goal = (view, step)
        return step >= self._goal[1] + 3

    def _views_since(self, began_ns: int) -> int:
        taken_over = {
            view.id
            for peer in self.world.peers.values()
            for view, at_ns in zip(peer.views, peer.taken_over_ns, strict=True)
            if at_ns > began_ns
        }
        return len(taken_over)


def _whole_view(peers: list[SimulatedPeer]) -> ViewId | None:
    """The one view with a plan that all these peers are in, and no other peer; None if there is
    none."""
    view = peers[0].view
    if view is None or not isinstance(view.plan, Plan):
        return None
    if any(peer.view is None or peer.view.id != view.id for peer in peers):
        return None
    return view.id if set(view.member_ids) == {peer.name for peer in peers} else None


def run_seed(seed: int, timing: AgreementTiming = TIMING) -> Result:
    return SeededRun(seed, timing=timing).run()


def _run_all(seeds: range, timing: AgreementTiming, jobs: int) -> Iterator[Result]:
    """Results in the order of the seeds, `jobs` at a time in processes of their own."""
    if jobs <= 1:
        yield from (run_seed(seed, timing) for seed in seeds)
        return
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        yield from pool.imap(partial(run_seed, timing=timing), seeds)


def problem_of(error: Exception) -> str:
    """What a seed raises: a first line, and then where it comes from."""
    told = "".join(traceback.format_exception(error))
    return f"{type(error).__name__}: {error}\n{told}"


def seeds_of(text: str) -> range:
    """The seeds of "A" or "A-B". Raises `argparse.ArgumentTypeError` for anything else."""
    first, _, last = text.partition("-")
    if not first.isdecimal() or not (last or first).isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not A or A-B, with whole numbers")
    seeds = range(int(first), int(last or first) + 1)
    if not seeds:
        raise argparse.ArgumentTypeError(f"there is no seed from {first} to {last}")
    return seeds


def main() -> int:
    parser = argparse.ArgumentParser(description="Simulate peers that fail, one run for each seed.")
    parser.add_argument("--seeds", required=True, type=seeds_of, help="A or A-B, both included")
    parser.add_argument(
        "--wide-above",
        type=int,
        default=TIMING.wide_above,
        help="views of more members speak along the overlay (default: %(default)s)",
    )
    parser.add_argument("--story", action="store_true", help="print what happened")
    parser.add_argument(
        "--jobs", type=int, default=1, help="so many at once (default: %(default)s)"
    )
    arguments = parser.parse_args()
    began_s = time.monotonic()
    timing = replace(TIMING, wide_above=arguments.wide_above)
    results: list[Result] = []
    failures = 0
    for result in _run_all(arguments.seeds, timing, arguments.jobs):
        results.append(result)
        failures += bool(result.violation)
        _print_story(result, arguments.story)
        result.story = []
        if len(results) % PROGRESS_SEEDS == 0:
            print(f"{len(results)} seeds, {failures} failed", file=sys.stderr, flush=True)
    seconds = time.monotonic() - began_s
    print(f"{len(results)} seeds, {failures} failed, in {seconds:.1f} s: {_counts(results)}")
    if told := recoveries_text(results):
        print(told)
    return 1 if failures else 0


def recoveries_text(results: list[Result]) -> str:
    """How long crashes held up the next commit, and how many held it up beyond the watched time."""
    recoveries = sorted(ns / SECOND_NS for r in results for ns in r.recoveries_ns)
    unseen = sum(r.watched_crashes for r in results) - len(recoveries)
    if not recoveries:
        return f"crash to next commit: none in a minute, {unseen} times" if unseen else ""
    return (
        f"crash to next commit: median {statistics.median(recoveries):.1f} s, "
        f"worst {recoveries[-1]:.1f} s of {len(recoveries)} (virtual); of {unseen} more none came "
        "in a minute, or before the end"
    )


def _print_story(result: Result, is_wanted: bool) -> None:
    """Print the whole story where it is wanted, else how a failed seed ended."""
    if is_wanted or result.violation:
        print("\n".join(result.story if is_wanted else result.story[-30:]))
    if result.violation:
        print(f"seed {result.seed}: {result.violation}")
        print(
            f"replay: python -m p2p_dtfm.sim.faults.agreement_seeds --seeds {result.seed} --story"
        )


def _counts(results: list[Result]) -> str:
    good = [r for r in results if not r.violation]

    def total(name: str, of: list[Result] = results) -> int:
        return sum(getattr(result, name) for result in of)

    return (
        f"{total('faults')} faults, {total('views')} views, {total('steps')} steps; "
        f"settled in at most {max((r.settle_s for r in good), default=0):.0f} s and "
        f"{max((r.settle_views for r in good), default=0)} views; "
        f"{total('given_up_steps', good)} steps given up after splits and losses; "
        f"{total('kept_forwards')} forwards of failed steps kept, "
        f"{total('redone_forwards')} redone; "
        f"{total('mended_views')} views with stand-ins kept "
        f"{total('mended_forwards')} of them, and "
        f"{total('mended_again')} failed once more; "
        f"{total('provisional_views')} with provisional plans; "
        f"{total('whole_cuts')} whole cuts, "
        f"{sum(r.repeated_steps > 0 for r in results)} seeds went back to one, by at most "
        f"{max(r.repeated_steps for r in results)} steps"
    )


if __name__ == "__main__":
    sys.exit(main())
