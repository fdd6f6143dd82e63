"""One seed: daemons begin, faults are done, all is mended, and what came of it is judged."""

import asyncio
import contextlib
import math
import traceback
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from p2p_dtfm.daemon.node.acquaintances import SHOWS_END
from p2p_dtfm.ports import rarely
from p2p_dtfm.sim.faults.agreement_seeds import problem_of
from p2p_dtfm.testbed.virtual.lies.lying import Lying
from p2p_dtfm.testbed.virtual.lies.putting import put_in
from p2p_dtfm.testbed.virtual.peer import Peer
from p2p_dtfm.testbed.virtual.routers.beginning import (
    first_addresses,
    founders_contacts,
    run_by_name,
    settings_behind_routers,
)
from p2p_dtfm.testbed.virtual.routers.sockets import no_sockets_of_this_machine
from p2p_dtfm.testbed.virtual.seeds import judge, verdict
from p2p_dtfm.testbed.virtual.seeds.deeds import Deeds
from p2p_dtfm.testbed.virtual.seeds.invited import by_invitation, line_of
from p2p_dtfm.testbed.virtual.seeds.judge import Broken, Reference
from p2p_dtfm.testbed.virtual.seeds.rarer import Rarer
from p2p_dtfm.testbed.virtual.seeds.run import layer_count_of, steps_of, with_named_ends
from p2p_dtfm.testbed.virtual.seeds.saved import has_saved_all
from p2p_dtfm.testbed.virtual.seeds.schedules.schedule import Fault, Schedule
from p2p_dtfm.testbed.virtual.seeds.tight_rooms import tight_rooms
from p2p_dtfm.testbed.virtual.seeds.watching.endings import Endings
from p2p_dtfm.testbed.virtual.seeds.watching.kept_out import KeptOut
from p2p_dtfm.testbed.virtual.seeds.watching.moments import PATIENCE_S as MOMENT_S
from p2p_dtfm.testbed.virtual.seeds.watching.moments import Moments
from p2p_dtfm.testbed.virtual.seeds.watching.nudges import Nudges
from p2p_dtfm.testbed.virtual.seeds.watching.suspicions import Suspicions
from p2p_dtfm.testbed.virtual.seeds.watching.together import Together
from p2p_dtfm.testbed.virtual.seeds.watching.waits import Waits
from p2p_dtfm.testbed.virtual.seeds.watching.words import Blames
from p2p_dtfm.testbed.virtual.swarm import HOURS, NeverHappened, Swarm, play

PATIENCE_S = 300.0
"""Of virtual time, once all is mended: then nobody waits any more."""
STARTS_AGAIN_S = 2.0
SMALL_GIB = 0.7 / 1024
"""Half of what a peer alone needs for the whole model."""
SAVES_WITHIN_S = 10.0
"""After the last step somebody has the whole model."""
FIRST_STEP_WITHIN_S = 20.0
"""Of whoever is given time for it before its faults begin."""
CALM_S = 100.0
"""A step comes within that where nothing is done to anybody."""
IN_PAIRS = 0.3
"""Of so many of a calm seed's faults the next one begins with it."""
LOOKS_EVERY_S = 1.0


@dataclass
class Played:
    """What came of a seed."""

    schedule: Schedule
    done: list[str] = field(default_factory=list)
    faults: int = 0
    ended_s: float = 0.0
    settled_s: float = 0.0
    """After the last fault had ended."""
    digest: str = ""
    steps: int = 0
    """That all peers together have told of."""
    lies: int = 0
    """That were told."""
    stayed: int = 0
    """Steps with a lie that were committed, since nobody honest was drawn for them."""
    problem: str = ""
    """Empty where all invariants hold."""
    is_of_the_world: bool = False
    """What is wrong was raised by the world, or by who judges: it says nothing of a daemon."""
    reports: list[str] = field(default_factory=list)
    """Of honest ones: whom they have left out of a view, and why."""
    rarer: Counter[str] = field(default_factory=Counter)
    """How often all daemons together went each of the rarer ways."""


class Play:
    """One seed's faults, on one swarm."""

    def __init__(self, swarm: Swarm, run: Path, schedule: Schedule) -> None:
        self.lying = Lying(
            {it: swarm.identity_of(it).peer_id for it in schedule.liars}, schedule.lie_together
        )
        self.lying.steps = steps_of(run)
        self.deeds = Deeds(swarm, self.lying)
        self._swarm = swarm
        self._run = run
        self._steps = steps_of(run)
        self._schedule = schedule
        self._due: list[tuple[float, int, Fault]] = []
        """When, the number of the fault or, for its end, one less than none."""
        self._in_turn: list[tuple[int, Fault]] = []
        """Those that wait for the one before, with their numbers,"""
        self._turn_at = 0
        """and for so many steps."""
        self._begun: set[Fault] = set()
        self._moments = Moments(swarm, self._begin_in_its_moment)
        self._hastened_for = 0
        """So many steps."""
        self._starts_s: dict[str, float] = {}
        self._told_of_end = set[str]()
        self._looks_s = 0.0
        self._stood: tuple[object, ...] = ()
        """What was done by then, and how far all were,"""
        self._stands_since_s = 0.0
        self.mended_s = 0.0
        """At the latest, until it is known."""
        self._was_mended = False
        self.rarer: Rarer | None = None
        self._nudges = Nudges(swarm.loop, self.honest)
        self._waits = Waits(schedule.liars)
        together, kept_out = Together(self.honest), KeptOut(self.honest)
        self._gathered = (kept_out, together) if schedule.is_slow else (together,)
        """What must be once all is mended."""
        self._endings = Endings(self.honest, swarm.peers, self._steps)
        self.suspicions = Suspicions(swarm)

    def honest(self) -> list[Peer]:
        """Those of whom anything is asked."""
        return [peer for peer in self._swarm.peers if peer.name not in self.lying.ids]

    async def play(self) -> None:
        swarm, schedule = self._swarm, self._schedule
        # they stay for those that come back after the last step
        stays: dict[str, object] = {"exit_when_done": False, "samples": schedule.writes_samples}
        if schedule.is_small:
            swarm.memory_gib, swarm.network.links.are_near = SMALL_GIB, True
        swarm.network.links.are_narrow = schedule.is_narrow
        swarm.network.links.are_soon_measured = schedule.is_quick
        swarm.network.links.are_apart = schedule.lanes_are_apart
        if schedule.liars:
            swarm.are_equal = swarm.network.links.are_near = True
        swarm.stays_resident, swarm.are_slow = schedule.stays_resident, schedule.is_slow
        run = self._run
        stays |= settings_behind_routers(swarm, schedule)
        if schedule.stays_resident:
            stays["hours"] = HOURS
        if schedule.is_invited:
            run = by_invitation(run, swarm.identity_of(schedule.begun[0]), swarm.folder)
        if schedule.is_private:
            named = [swarm.identity_of(name).peer_id for name in schedule.begun[:-1]]
            run = with_named_ends(run, named, swarm.folder)
        expected = len(schedule.begun)
        founder = swarm.peer(
            schedule.begun[0],
            run=str(run),
            expect_peers=expected,
            initial_peers=founders_contacts(swarm),
            **stays,
        )
        known = first_addresses(swarm, founder)
        swarm.start(founder)
        await swarm.until(lambda: founder.has_run, "the run is founded", 60)
        if schedule.is_slow:  # who starts it again expects nobody
            founder.settings = founder.settings.model_copy(update={"expect_peers": 1})
        stays |= run_by_name(swarm, founder)
        if schedule.is_invited:
            stays |= line_of(founder, swarm.identity_of(founder.name), known[0])
        for name in schedule.begun[1:] + schedule.joiners:  # each is given all that begin before it
            peer = swarm.peer(name, initial_peers=tuple(known), **stays)
            if name in schedule.callable_first:
                known.append(swarm.address(peer))
        for name in schedule.begun[1:]:
            swarm.start(swarm.named(name))
        self.begin_at(swarm.now_s)
        limit_s = self.mended_s - swarm.now_s + PATIENCE_S
        await swarm.until(self._is_over, "all have come to the end of the run", limit_s)

    def begin_at(self, began_s: float) -> None:
        """When all that begin the run were started."""
        if self._schedule.is_calm:
            self._in_turn = list(enumerate(self._schedule.faults))
            self.mended_s = began_s + CALM_S * len(self._in_turn)
            return
        if self._schedule.waits_for_a_step:
            began_s += FIRST_STEP_WITHIN_S
        self.mended_s = began_s
        for number, fault in enumerate(self._schedule.faults):
            self._put(began_s + fault.at_s, number, fault)
            later_s = MOMENT_S + fault.after_s if fault.at_message else 0.0
            lasts_s = fault.lasts_s if math.isfinite(fault.lasts_s) else 0.0
            self.mended_s = max(self.mended_s, began_s + fault.at_s + later_s + lasts_s)

    def _put(self, at_s: float, number: int, fault: Fault) -> None:
        """With its end, unless it is for a message to say when it begins."""
        self._due.append((at_s, number, fault))
        if math.isfinite(fault.lasts_s) and not fault.at_message:
            self._due.append((at_s + fault.lasts_s, -1 - number, fault))
        self._due.sort(key=lambda due: due[:2])

    def _take_turns(self) -> None:
        """The next one of a calm seed. After the last step only those that are meant for it."""
        if self._is_complete():
            last = self._steps
            self._in_turn = [it for it in self._in_turn if (it[1].at_step or 0) >= last]
        if self._due or not self._moments.is_idle:
            return
        self.deeds.call_back()
        if self._most_steps() < self._turn_at:
            return
        while self._in_turn:
            number, fault = self._in_turn.pop(0)
            self._put(self._swarm.now_s, number, fault)
            self._turn_at = min(self._most_steps() + 1, self._steps)
            if fault.draw >= IN_PAIRS:
                return

    def _is_over(self) -> bool:
        swarm, due_before = self._swarm, len(self._due)
        if problem := self._endings.look(swarm.now_s):  # before anybody starts it again
            raise Broken(problem)
        self.do_what_is_due()
        self.deeds.end_lies_that_were_told()
        for peer in swarm.peers:
            if judge.starts_again(peer):
                due_s = self._starts_s.setdefault(peer.name, swarm.now_s + STARTS_AGAIN_S)
                if swarm.now_s >= due_s:
                    del self._starts_s[peer.name]
                    swarm.start(peer)
        if swarm.now_s >= self._looks_s:
            self._looks_s = swarm.now_s + LOOKS_EVERY_S
            self._look()
        if len(self._due) == due_before:  # what a cut held up may arrive in this very instant
            self._nudges.look()
        if self._nudges.problem:
            raise Broken(self._nudges.problem)
        return self._is_mended() and all(self._is_done(peer) for peer in self.honest())

    def _look(self) -> None:
        """Now and then: what must hold at any time. Raises `Broken`."""
        judge.require_bounds(self._swarm, self._schedule.liars)
        if problem := self._waits.look(self._swarm.now_s):
            raise Broken(problem)
        self._told_of_end = {
            it.name for it in self.honest() if not it.has_run and SHOWS_END in it.standing()
        }
        if self._schedule.is_private:
            for peer in self._swarm.peers[len(self._schedule.begun) - 1 :]:
                judge.require_ends_elsewhere(peer, layer_count_of(self._run))
        if self._schedule.is_watched:
            self._ask_all()
        if self.suspicions.problem:
            raise Broken(self.suspicions.problem)
        if self._schedule.is_calm:
            self._require_steps()
        self._require_nobody_apart()

    def _hasten(self) -> None:
        """What waits for a step that is committed by now, and its end, come so much sooner; and
        all, where the first one was waited for."""
        step, now_s = self._most_steps(), self._swarm.now_s
        if step <= self._hastened_for or not self._due:
            return
        sooner_s = 0.0
        if self._schedule.waits_for_a_step and not self._hastened_for:
            sooner_s = max(0.0, self._due[0][0] - now_s)
        self._hastened_for = step
        due = [(at_s - sooner_s, number, fault) for at_s, number, fault in self._due]
        by_fault = {
            number: max(0.0, at_s - now_s - fault.after_s)
            for at_s, number, fault in due
            if number >= 0 and fault.at_step is not None and fault.at_step <= step
        }
        self._due = [
            (at_s - by_fault.get(number if number >= 0 else -1 - number, 0.0), number, fault)
            for at_s, number, fault in due
        ]
        self._due.sort(key=lambda it: it[:2])

    def _most_steps(self) -> int:
        return max((peer.told_step() for peer in self.honest() if peer.is_running), default=0)

    def do_what_is_due(self) -> None:
        if self._schedule.is_calm:
            self._take_turns()
        elif self._schedule.is_quick:
            self._hasten()
        self._moments.give_up()
        while self._due and self._due[0][0] <= self._swarm.now_s:
            _, number, fault = self._due.pop(0)
            if number >= 0 and fault.at_message:
                self._moments.wait(number, fault)
            else:
                self._do(fault, is_end=number < 0)
            if self._is_mended():
                self.deeds.mend_all()
        self._note_mended()
        if self._is_mended() and not self._is_complete():
            self.deeds.call_back()

    def _note_mended(self) -> None:
        """When the last fault is over, or is left out: also of those whose word nobody has said, or
        that were in turn as the last step was committed."""
        was_mended, self._was_mended = self._was_mended, self._is_mended()
        if self._was_mended and not was_mended:
            self.mended_s = self._swarm.now_s
        if self.rarer is not None:
            self.rarer.is_over = self._was_mended

    def _require_steps(self) -> None:
        """Nothing is done to anybody, and nobody gets on: raises `Broken`."""
        told = [peer.told_step() for peer in self._swarm.peers if peer.is_running]
        stands = (len(self.deeds.done), *told)
        if stands != self._stood or self._is_complete():
            self._stood, self._stands_since_s = stands, self._swarm.now_s
        if self._swarm.now_s - self._stands_since_s > CALM_S:
            raise Broken(f"no step for {CALM_S:.0f} s, though nothing was done to anybody")

    def _require_nobody_apart(self) -> None:
        """Once all is mended, and before the last step. Who lies to the end may have an honest one
        out for a while, again and again."""
        is_asked = self._is_mended() and not self._is_complete() and not self._schedule.liars
        for watch in self._gathered:
            if not is_asked:
                watch.disturb()
            elif problem := watch.look(self._swarm.now_s):
                raise Broken(problem)

    def _is_mended(self) -> bool:
        """No fault is under way, and none will begin."""
        return not self._due and not self._in_turn and self._moments.is_idle

    def _begin_in_its_moment(self, number: int, fault: Fault) -> None:
        """Its end is a fault's like any other's."""
        self._due.append((self._swarm.now_s + fault.lasts_s, -1 - number, fault))
        self._due.sort(key=lambda due: due[:2])
        self._do(fault, is_end=False)

    def _ask_all(self) -> None:
        for peer in self._swarm.peers:
            if peer.is_running and peer.process is not None and peer.process.takes_turns:
                self._swarm.ask(peer)

    def _do(self, fault: Fault, is_end: bool) -> None:
        """In most seeds none begins after the last step."""
        if is_end:
            if fault in self._begun:
                self.deeds.end(fault)
            return
        goes_on = self._schedule.goes_on_after_the_end or fault.kind == "join"
        if (goes_on or not self._is_complete()) and self.deeds.begin(fault):
            self._begun.add(fault)

    def _is_complete(self) -> bool:
        return self._most_steps() == self._steps

    async def all_is_saved(self) -> None:
        """Nothing is said of what is saved later; in a quick seed what all have by now suffices,
        unless somebody was asked something just now, and has yet to answer."""
        ends_s = self._swarm.now_s + SAVES_WITHIN_S
        looks = self._schedule.is_quick and not self._schedule.is_watched
        while (left_s := ends_s - self._swarm.now_s) > 0:
            await asyncio.sleep(min(left_s, LOOKS_EVERY_S if looks else left_s))
            running = [peer for peer in self.honest() if peer.is_running]
            has_ended = judge.has_last_evaluation(self._swarm.peers, self._steps)
            is_saved = all(has_saved_all(peer, self._steps) for peer in running)
            if running and is_saved and has_ended:
                return

    def _is_done(self, peer: Peer) -> bool:
        """It has all steps, or was told that there are none to come, if only by one that it never
        met, or has failed: `check` sees; or was never to begin, since its joining was left out."""
        if peer.process is None:
            return True
        if peer.was_killed or judge.starts_again(peer) or peer.ended is None:
            return False
        is_told = peer.name in self._told_of_end
        return peer.ended.done() or peer.told_step() == self._steps or is_told


def play_seed(
    seed: int, schedule: Schedule, run: Path, folder: Path, reference: Reference | None
) -> Played:
    """What came of it; `problem` says what does not hold. Without a reference nobody judges."""
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
                only = schedule.has_only_crashes
                judge.check(peers, reference, crashes_s, only, own_steps, liars)
                if own_steps == len(reference.losses):
                    judge.require_states(peers, reference)
                if schedule.liars:
                    verdict.require(
                        peers, lies, len(reference.losses), schedule, one.deeds.disturbed_s
                    )
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
        with contextlib.ExitStack() as stack:
            if schedule.liars:
                stack.enter_context(put_in(one.lying, schedule.lies))
            if schedule.rooms_are_tight:
                stack.enter_context(tight_rooms())
            if schedule.behind:
                stack.enter_context(no_sockets_of_this_machine())
            if schedule.goes_rarer_ways:  # whom a daemon does not hear it may well suspect
                one.rarer = Rarer(seed)
                rarely.live_by(one.rarer)
            elif schedule.has_only_crashes:
                stack.enter_context(one.suspicions.heard())
            await scene(swarm, one)

    with blames.heard():
        try:
            play(seed, folder, whole_scene)
        except Exception as error:  # noqa: BLE001 - of whatever kind, other seeds go on
            played.problem, played.is_of_the_world = problem_of(error), True
    return played


def _with_cause(error: BaseException) -> str:
    if error.__cause__ is None:
        return str(error)
    return f"{error}\n{''.join(traceback.format_exception(error.__cause__))}"
