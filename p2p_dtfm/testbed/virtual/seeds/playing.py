"""One seed: daemons begin, faults are done, all is mended, and the outcome is judged."""

import asyncio
import math
from collections.abc import Iterator
from pathlib import Path

from p2p_dtfm.daemon.node.acquaintances import SHOWS_END
from p2p_dtfm.testbed.virtual.lies.lying import Lying
from p2p_dtfm.testbed.virtual.peer import Peer
from p2p_dtfm.testbed.virtual.seeds import judge
from p2p_dtfm.testbed.virtual.seeds.beginning import begin
from p2p_dtfm.testbed.virtual.seeds.deeds import Deeds
from p2p_dtfm.testbed.virtual.seeds.judge import Broken
from p2p_dtfm.testbed.virtual.seeds.run import (
    layer_count_of,
    steps_of,
)
from p2p_dtfm.testbed.virtual.seeds.saved import has_saved_all
from p2p_dtfm.testbed.virtual.seeds.schedules.schedule import Fault, Schedule
from p2p_dtfm.testbed.virtual.seeds.surroundings.rarer import RarerWays
from p2p_dtfm.testbed.virtual.seeds.told.told import Comparison
from p2p_dtfm.testbed.virtual.seeds.watching.copies import Copies
from p2p_dtfm.testbed.virtual.seeds.watching.crowd import Crowd
from p2p_dtfm.testbed.virtual.seeds.watching.endings import Endings
from p2p_dtfm.testbed.virtual.seeds.watching.hours import OutsideHours
from p2p_dtfm.testbed.virtual.seeds.watching.kept_out import ALONE_S, OUTSIDE_S, KeptOut
from p2p_dtfm.testbed.virtual.seeds.watching.moments import PATIENCE_S as MOMENT_S
from p2p_dtfm.testbed.virtual.seeds.watching.moments import Moments
from p2p_dtfm.testbed.virtual.seeds.watching.nudges import Nudges
from p2p_dtfm.testbed.virtual.seeds.watching.owed import Owed
from p2p_dtfm.testbed.virtual.seeds.watching.suspicions import Suspicions
from p2p_dtfm.testbed.virtual.seeds.watching.together import Together
from p2p_dtfm.testbed.virtual.seeds.watching.waits import Waits
from p2p_dtfm.testbed.virtual.seeds.watching.wakers import Wakers
from p2p_dtfm.testbed.virtual.swarm import Swarm

PATIENCE_S = 300.0
"""Virtual time after all is mended: nobody waits for longer."""
LONG_PATIENCE_S = 600.0
"""The same for slow machines that have slept from their first step on. Three may take seven seconds
for each of forty steps."""
STARTS_AGAIN_S = 2.0
SAVES_WITHIN_S = 10.0
"""Somebody has saved the whole model so soon after the last step."""
FIRST_STEP_WITHIN_S = 20.0
"""Where faults wait for a first step, they begin at the latest after this time."""
CALM_S = 100.0
"""A step commits within this time if nothing is done to anybody."""
IN_PAIRS = 0.3
"""The share of a calm seed's faults with which the next fault begins."""
LOOKS_EVERY_S = 1.0


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
        """When, the fault's number (-1 minus that at its end), and the fault."""
        self._in_turn: list[tuple[int, Fault]] = []
        """Faults that wait for the one before, with their numbers."""
        self._turn_at = 0
        """How many steps the next one waits for."""
        self._begun: set[Fault] = set()
        self._moments = Moments(swarm, self._begin_in_its_moment)
        self._hastened_for = 0
        """For how many steps faults were brought forward."""
        self._starts_s: dict[str, float] = {}
        self._told_of_end = set[str]()
        self._looks_s = 0.0
        self._stood: tuple[object, ...] = ()
        """How much was done, and how far all were, when either last changed."""
        self._stands_since_s = 0.0
        self.mended_s = 0.0
        """When all was mended. Until that is known, the latest time that it can be."""
        self._was_mended = False
        self.rarer: RarerWays | None = None
        self._nudges = Nudges(swarm.loop, self.honest)
        self.owed = Owed()
        of_peers = Copies(self.honest), OutsideHours(self.honest)
        self._watches = (Waits(schedule.liars), self.owed, *of_peers)
        outside_s = ALONE_S if schedule.has_sleepers else OUTSIDE_S
        together, kept_out = Together(self._staying), KeptOut(self._staying, outside_s)
        self._gathered = (kept_out, together) if schedule.is_slow else (together,)
        """Watches of what must hold once all is mended."""
        self.told = Comparison(swarm, self._steps, schedule.liars)
        self.wakers = Wakers(swarm, self.deeds.parted_s)
        of_deeds = self.deeds.gone_home_s.keys(), self.deeds.crashes_s
        self._crowd = Crowd(self.honest, *of_deeds)
        self._endings = Endings(self.honest, swarm.peers, self._steps)
        self.suspicions = Suspicions(swarm)

    def honest(self) -> list[Peer]:
        """The peers of which anything is asked."""
        return [peer for peer in self._swarm.peers if peer.name not in self.lying.ids]

    def _staying(self) -> list[Peer]:
        return [peer for peer in self.honest() if not self.deeds.has_gone_home(peer)]

    async def play(self) -> None:
        swarm = self._swarm
        await begin(swarm, self._schedule, self._run)
        self.begin_at(swarm.now_s)
        patience_s = LONG_PATIENCE_S if self._schedule.has_sleepers else PATIENCE_S
        limit_s = self.mended_s - swarm.now_s + patience_s
        await swarm.until(self._is_over, "all have come to the end of the run", limit_s)

    def begin_at(self, began_s: float) -> None:
        """Sets the times of all faults, when all that begin the run were started."""
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
        """Puts in a fault and its end, unless a message says when it begins."""
        self._due.append((at_s, number, fault))
        if math.isfinite(fault.lasts_s) and not fault.at_message:
            self._due.append((at_s + fault.lasts_s, -1 - number, fault))
        self._due.sort(key=lambda due: due[:2])

    def _take_turns(self) -> None:
        """Puts in a calm seed's next fault. After the last step only those for that time are
        left."""
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
        self.deeds.lies.end_those_that_were_told()
        for peer in swarm.peers:
            if judge.starts_again(peer) and not self.deeds.has_gone_home(peer):
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
        """Checks now and then what must hold at any time. Raises `Broken`."""
        judge.require_bounds(self._swarm, self._schedule.liars)
        self._told_of_end = {
            it.name for it in self.honest() if not it.has_run and SHOWS_END in it.standing()
        }
        if self._schedule.is_private:
            for peer in self._swarm.peers[len(self._schedule.begun) - 1 :]:
                judge.require_ends_elsewhere(peer, layer_count_of(self._run))
        if self._schedule.is_watched:
            self._ask_all()
        for problem in self._seen_by_watches():
            if problem:
                raise Broken(problem)
        if self._schedule.is_calm:
            self._require_steps()
        self._require_nobody_apart()

    def _seen_by_watches(self) -> Iterator[str]:
        """What each watch that looks now has seen, one after the other."""
        now_s = self._swarm.now_s
        for watch in self._watches:
            yield watch.look(now_s)
        if self._schedule.is_compared:
            yield self.told.look(now_s)
        yield self.suspicions.problem
        yield self.wakers.look()
        if self._schedule.is_crowd and not self._is_complete():
            yield self._crowd.look(now_s)

    def _hasten(self) -> None:
        """Brings forward faults that wait for a step, and their ends, once that step is committed.
        With the first step all faults come forward, if they waited for it."""
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
        """Notes when the last fault is over or left out. Some are left out as nobody said their
        word, or as the last step came before their turn."""
        was_mended, self._was_mended = self._was_mended, self._is_mended()
        if self._was_mended and not was_mended:
            self.mended_s = self._swarm.now_s
        if self.rarer is not None:
            self.rarer.is_over = self._was_mended

    def _require_steps(self) -> None:
        """Raises `Broken` if nobody gets on though nothing is done to anybody."""
        told = [peer.told_step() for peer in self._swarm.peers if peer.is_running]
        stands = (len(self.deeds.done), *told)
        if stands != self._stood or self._is_complete():
            self._stood, self._stands_since_s = stands, self._swarm.now_s
        if self._swarm.now_s - self._stands_since_s > CALM_S:
            raise Broken(f"no step for {CALM_S:.0f} s, though nothing was done to anybody")

    def _require_nobody_apart(self) -> None:
        """Nobody stays apart once all is mended and before the last step. It is not asked where
        some lie: a liar may have an honest member out for a while, again and again."""
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
        """Begins the fault, and puts in its end like any other fault's."""
        self._due.append((self._swarm.now_s + fault.lasts_s, -1 - number, fault))
        self._due.sort(key=lambda due: due[:2])
        self._do(fault, is_end=False)

    def _ask_all(self) -> None:
        for peer in self._swarm.peers:
            if peer.is_running and peer.process is not None and peer.process.takes_turns:
                self._swarm.ask(peer)

    def _do(self, fault: Fault, is_end: bool) -> None:
        """Begins or ends a fault. In most seeds none begins after the last step."""
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
        """Waits for saves of the last step; later ones are not judged. In a quick seed it waits
        only until all have saved. Where somebody asks daemons all they tell, an answer may be due:
        then it waits to the end."""
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
        """It has all steps, or was told that none are to come, perhaps by a peer that it never met.
        Or it has failed, which `check` sees. Or it was never to begin, as its joining was left
        out."""
        if peer.process is None or (not peer.is_running and self.deeds.has_gone_home(peer)):
            return True
        if peer.was_killed or judge.starts_again(peer) or peer.ended is None:
            return False
        is_told = peer.name in self._told_of_end
        return peer.ended.done() or peer.told_step() == self._steps or is_told
