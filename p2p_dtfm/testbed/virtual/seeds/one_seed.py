"""One seed from its beginning to its end, and what came of it."""

import contextlib
import traceback
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from p2p_dtfm.ports import rarely
from p2p_dtfm.sim.faults.agreement_seeds import problem_of
from p2p_dtfm.testbed.virtual.lies.putting import put_in
from p2p_dtfm.testbed.virtual.routers.sockets import no_sockets_of_this_machine
from p2p_dtfm.testbed.virtual.seeds import judge, verdict
from p2p_dtfm.testbed.virtual.seeds.judge import Broken, Reference
from p2p_dtfm.testbed.virtual.seeds.playing import Play
from p2p_dtfm.testbed.virtual.seeds.run import (
    RECIPES,
)
from p2p_dtfm.testbed.virtual.seeds.schedules.schedule import Schedule
from p2p_dtfm.testbed.virtual.seeds.surroundings.one_processor import one_name
from p2p_dtfm.testbed.virtual.seeds.surroundings.rarer import OF_DISKS_THAT_LOSE, RarerWays
from p2p_dtfm.testbed.virtual.seeds.surroundings.tight_rooms import small_probes, tight_rooms
from p2p_dtfm.testbed.virtual.seeds.watching.words import Blames
from p2p_dtfm.testbed.virtual.swarm import NeverHappened, Swarm, play


@dataclass
class Played:
    """What came of a seed."""

    schedule: Schedule
    done: list[str] = field(default_factory=list)
    faults: int = 0
    ended_s: float = 0.0
    settled_s: float = 0.0
    """How long after the last fault had ended."""
    digest: str = ""
    steps: int = 0
    """How many steps all peers together have told of."""
    lies: int = 0
    """How many lies were told."""
    stayed: int = 0
    """Committed steps with a lie, for which no honest peer was drawn."""
    problem: str = ""
    """Empty if all invariants hold."""
    is_of_the_world: bool = False
    """The world or the judge has raised the error: it says nothing of a daemon."""
    reports: list[str] = field(default_factory=list)
    """What honest peers report: whom they left out of a view, and why."""
    rarer: Counter[str] = field(default_factory=Counter)
    """How often all daemons together went each rarer way."""


def play_seed(
    seed: int, schedule: Schedule, run: Path, folder: Path, reference: Reference | None
) -> Played:
    """Plays a seed. `problem` of the result says what does not hold. Without a reference nobody
    judges."""
    played = Played(schedule)

    blames = Blames()

    async def scene(swarm: Swarm, one: Play) -> None:
        blames.lying = one.lying
        blames.damaged = {swarm.identity_of(it).peer_id for it in schedule.send_damaged}
        try:
            await one.play()
            played.ended_s, played.digest = swarm.now_s, swarm.trace.digest()
            played.settled_s = max(0.0, swarm.now_s - one.mended_s)
            if reference is not None:
                await one.all_is_saved()
                peers, lies = one.honest(), one.lying
                crashes_s = one.deeds.crashes_s
                own_steps = verdict.own_steps(lies, len(reference.losses))
                liars = [peer for peer in swarm.peers if peer not in peers]
                judge.check(peers, reference, crashes_s, schedule, own_steps, liars)
                if own_steps == len(reference.losses):
                    judge.require_states(peers, reference)
                if schedule.liars:
                    disturbed_s = 0.0 if schedule.goes_rarer_ways else one.deeds.disturbed_s
                    verdict.require(peers, lies, len(reference.losses), schedule, disturbed_s)
                await judge.require_clean_ends(swarm, peers)
                blames.require_none()
        except (Broken, NeverHappened) as error:
            played.problem = _with_cause(error)
        finally:
            played.done, played.faults = one.deeds.done, one.deeds.begun_count
            played.lies, played.stayed = one.lying.count, len(one.lying.stayed())
            played.reports = one.lying.reports
            if one.rarer is not None:
                played.rarer = one.rarer.taken
            played.steps = sum(len(peer.losses()) for peer in swarm.peers)

    async def whole_scene(swarm: Swarm) -> None:
        one = Play(swarm, run, schedule)
        one.told.world.reference = reference
        with contextlib.ExitStack() as stack:
            stack.enter_context(one_name())
            if schedule.liars:
                stack.enter_context(put_in(one.lying, schedule.lies))
            if schedule.rooms_are_tight:
                stack.enter_context(tight_rooms())
            if schedule.is_crowd:
                stack.enter_context(small_probes())
            if schedule.behind:
                stack.enter_context(no_sockets_of_this_machine())
            if schedule.goes_rarer_ways:  # a daemon may suspect a peer that it does not hear
                never = OF_DISKS_THAT_LOSE if schedule.has_only_crashes else ()
                one.rarer = RarerWays(seed, never)
                rarely.live_by(one.rarer)
            elif schedule.has_only_crashes:
                stack.enter_context(one.suspicions.heard())
            if schedule.has_sleepers:
                stack.enter_context(one.wakers.heard())
            if schedule.model in RECIPES:
                stack.enter_context(one.owed.heard())
            await scene(swarm, one)

    with blames.heard():
        try:
            play(seed, folder, whole_scene)
        except Exception as error:  # noqa: BLE001 - whatever it is, other seeds go on
            played.problem, played.is_of_the_world = problem_of(error), True
    return played


def _with_cause(error: BaseException) -> str:
    if error.__cause__ is None:
        return str(error)
    return f"{error}\n{''.join(traceback.format_exception(error.__cause__))}"
