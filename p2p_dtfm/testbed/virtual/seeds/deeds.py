"""Faults as they are done to a swarm, and undone."""

import logging
import math
from collections.abc import Callable, Iterable
from pathlib import Path

from p2p_dtfm.testbed.virtual.lies.lying import Lying
from p2p_dtfm.testbed.virtual.peer import Peer
from p2p_dtfm.testbed.virtual.routers.lost_relays import (
    NO_MEETING_POINT,
    bring_back_meeting_point,
    lose_meeting_point,
    loss_of_relay,
)
from p2p_dtfm.testbed.virtual.seeds.lies_on_time import LiesOnTime
from p2p_dtfm.testbed.virtual.seeds.schedules.schedule import (
    AHEAD_S,
    BACK_S,
    OF_LINKS,
    UNDISTURBED,
    Fault,
)
from p2p_dtfm.testbed.virtual.swarm import Swarm
from p2p_dtfm.testbed.virtual.wires.links import VirtualLink

LOSS = 0.2
DOUBLED = 0.3
DAMAGED = 0.1
BY_HOURS, FOR_A_WHILE = 0.25, 0.5
"""Below the first draw a resident's hours end, and begin again after a while. From the second draw
on its owner says for how long. Both times it comes back by itself."""
OF_SIDES = frozenset({"partition", "swizzle"})
OF_MACHINES = frozenset({"lying disk", "full disk", "slow disk", "clock", "damaged bytes", "lie"})
"""Done to machines and lines whether or not daemons run there, and not felt where none does."""

log = logging.getLogger("p2p_dtfm")


class Deeds:
    """`begin` does a fault, if it is possible now; `done` tells a reader what was done."""

    def __init__(self, swarm: Swarm, lying: Lying | None = None) -> None:
        """`lying`: the liars, where some lie."""
        self.lies = LiesOnTime(lying)
        self.done: list[str] = []
        self.begun_count = 0
        """How many faults were done to somebody who runs."""
        self.crashes_s: list[float] = []
        """When somebody lost what it had in memory."""
        self.disturbed_s = math.inf
        """When the first fault began that is no lie and no join."""
        self.gone_home_s: dict[str, float] = {}
        """When peers were told to go for good, by name."""
        self._swarm = swarm
        self._copies: dict[str, Path] = {}
        """Copies of homes, from which an old disk comes back."""
        self._lost: dict[Fault, tuple[Peer, ...]] = {}
        """The peers that had a lost layer."""
        self._relays: dict[Fault, Fault] = {}
        """What was done to the busiest relay of that time."""
        self._holding: dict[tuple[str, str], set[Fault]] = {}
        """Faults that keep each way cut, by its ends' names. It opens with the last of them."""
        self._closed: dict[str, Fault] = {}
        """The fault that closed a lid, by the name of its peer."""
        self.parted_s: dict[str, float] = {}
        """When each peer was last out of others' reach for another reason than a lid."""
        self._begin: dict[str, Callable[[Fault], bool]] = {
            "kill": lambda fault: self._kill(fault, swarm.kill),
            "power cut": lambda fault: self._kill(fault, swarm.cut_power),
            "lying disk": lambda fault: self._disk(fault, "lies", is_so=True),
            "old disk": self._copy_home,
            "pause": self._pause,
            "lid": self._close_lid,
            "leave": self._leave,
            "go home": self._go_home,
            "join": lambda fault: self._start(self._one(fault)),
            "cut": lambda fault: self._cut(fault, both_ways=True),
            "one-way cut": lambda fault: self._cut(fault, both_ways=False),
            "partition": self._part,
            "slow link": lambda fault: self._links(fault, "is_slow", True),
            "lossy link": lambda fault: self._links(fault, "loss", LOSS),
            "doubled calls": lambda fault: self._links(fault, "doubled", DOUBLED),
            "damaged bytes": lambda fault: self._damage(fault, DAMAGED),
            "full disk": lambda fault: self._disk(fault, "is_full", is_so=True),
            "slow disk": lambda fault: self._disk(fault, "is_slow", is_so=True),
            "busy machine": lambda fault: self._busy(fault, is_so=True),
            "clock": self._set_clock,
            "outage": self._cut_all_power,
            "lost memory": self._lose_memory,
            "lost layer": self._lose_layer,
            "life ahead": lambda fault: self._live_again(fault, fault.draw * AHEAD_S),
            "late word": lambda fault: True,
            "dumb p2pd": lambda fault: self._silence_p2pd(fault, is_so=True),
            "dead relay": self._lose_relay,
            NO_MEETING_POINT: lambda fault: lose_meeting_point(swarm),
            "swizzle": self._part,
            "lie": self.lies.begin,
        }
        self._end: dict[str, Callable[[Fault], object]] = {
            "kill": lambda fault: self._start(self._one(fault)),
            "power cut": lambda fault: self._start(self._one(fault)),
            "lying disk": self._end_of_lies,
            "old disk": self._come_back_old,
            "pause": self._resume,
            "lid": self._open_lid,
            "leave": self._come_back,
            "go home": lambda fault: None,
            "join": lambda fault: None,
            "cut": self._mend,
            "one-way cut": self._mend,
            "partition": self._mend,
            "slow link": lambda fault: self._links(fault, "is_slow", False),
            "lossy link": lambda fault: self._links(fault, "loss", 0.0),
            "doubled calls": lambda fault: self._links(fault, "doubled", 0.0),
            "damaged bytes": lambda fault: self._damage(fault, 0.0),
            "full disk": lambda fault: self._disk(fault, "is_full", is_so=False),
            "slow disk": lambda fault: self._disk(fault, "is_slow", is_so=False),
            "busy machine": lambda fault: self._busy(fault, is_so=False),
            "clock": lambda fault: swarm.set_clock(self._one(fault), 0.0),
            "outage": self._come_back_first,
            "lost memory": lambda fault: self._start(self._one(fault)),
            "lost layer": self._bring_back,
            "life ahead": lambda fault: self._live_again(fault, 0.0),
            "late word": lambda fault: None,
            "dumb p2pd": lambda fault: self._silence_p2pd(fault, is_so=False),
            "dead relay": lambda fault: self.end(self._relays.pop(fault)),
            NO_MEETING_POINT: lambda fault: bring_back_meeting_point(swarm),
            "swizzle": self._mend,
            "lie": self.lies.end,
        }

    def begin(self, fault: Fault) -> bool:
        """Does a fault; False if it is impossible now."""
        if not self._begin[fault.kind](fault):
            return False
        self.begun_count += self._is_felt(fault)
        if fault.kind not in UNDISTURBED:
            self.disturbed_s = min(self.disturbed_s, self._swarm.now_s)
        self._tell(str(fault))
        return True

    def _is_felt(self, fault: Fault) -> bool:
        """Whether it is felt: its peer runs, or both ends of a line, or somebody on each side."""
        whom = [peer.is_running for peer in self._swarm.peers if peer.name in fault.whom]
        if fault.kind in OF_LINKS:
            return all(whom)
        if fault.kind in OF_SIDES:
            rest = [it.is_running for it in self._swarm.peers if it.name not in fault.whom]
            return any(whom) and any(rest)
        return any(whom) or fault.kind not in OF_MACHINES

    def end(self, fault: Fault) -> None:
        """Ends a fault that was begun."""
        self._end[fault.kind](fault)
        self._tell(f"end of {fault}")

    def mend_all(self) -> None:
        """Ends what another fault has kept from ending."""
        for peer in self._swarm.peers:
            if peer.process is not None and peer.process.is_paused:
                self._swarm.resume(peer)
            if self.has_gone_home(peer):
                continue
            if peer.is_outside_hours:
                self._swarm.set_hours(peer, are_over=False)
            if peer.is_away or peer.is_leaving_for_a_pause:
                self._swarm.come_back(peer)
            elif peer.was_killed or self._has_left(peer):
                self._swarm.start(peer)

    def has_gone_home(self, peer: Peer) -> bool:
        """It was told to go for good, perhaps is still on its way: nobody starts it again."""
        return peer.name in self.gone_home_s

    def call_back(self) -> None:
        """Starts peers whose leave took longer than all faults."""
        for peer in self._swarm.peers:
            if self._has_left(peer):
                self._swarm.start(peer)

    def _tell(self, what: str) -> None:
        self.done.append(f"{self._swarm.now_s:.2f} s: {what}")
        log.info("--- %s", what)

    # peers ---------------------------------------------------------------------------------------

    def _one(self, fault: Fault) -> Peer:
        return self._swarm.named(fault.whom[0])

    def _may_go(self, peer: Peer) -> bool:
        """It runs, and somebody else stays."""
        living = [item for item in self._swarm.peers if item.is_running]
        return peer.is_running and not peer.is_away and len(living) > 1

    def _kill(self, fault: Fault, how: Callable[[Peer], None]) -> bool:
        peer = self._one(fault)
        if may := self._may_go(peer):
            self.crashes_s.append(self._swarm.now_s)
            how(peer)
        return may

    def _live_again(self, fault: Fault, ahead_s: float) -> bool:
        """It begins another life at once, with its clock so far ahead."""
        peer = self._one(fault)
        self._swarm.set_clock(peer, ahead_s)
        if may := self._kill(fault, self._swarm.kill):
            self._swarm.start(peer)
        return may

    def _lose_memory(self, fault: Fault) -> bool:
        """Kills the peer and deletes its memory of the run. All others still remember it."""
        peer = self._one(fault)
        may = peer.has_run and self._kill(fault, self._swarm.kill)
        if may:
            for path in peer.home.glob("runs/*/memory*"):
                path.unlink()
        return may

    def _lose_relay(self, fault: Fault) -> bool:
        """Does one of several faults to the busiest relay."""
        done = loss_of_relay(self._swarm, fault)
        if done is None or not self._begin[done.kind](done):
            return False
        self._relays[fault] = done
        self._tell(f"{done}, which relays")
        return True

    def _lose_layer(self, fault: Fault) -> bool:
        """Cuts the power of all that have one layer, which not everybody has."""
        living = self._living()
        having = {peer.name: peer.layers() for peer in living}
        all_layers = set[int]().union(*having.values())
        lost = {it for it in all_layers if any(it not in layers for layers in having.values())}
        if not lost:
            return False
        layer = sorted(lost)[int(fault.draw * len(lost))]
        self._lost[fault] = tuple(peer for peer in living if layer in having[peer.name])
        self._cut_power_of(self._lost[fault])
        return True

    def _bring_back(self, fault: Fault) -> None:
        """Starts them again, and a founder that ended by itself as the run was complete: the
        others, who were told so, wait for it (decision 38)."""
        for peer in self._lost.pop(fault):
            self._start(peer)
        founder = self._swarm.peers[0]
        if founder.ended is not None and founder.ended.done():
            self._start(founder)

    def _cut_all_power(self, fault: Fault) -> bool:
        """Cuts everybody's power: what is not on a disk is gone."""
        living = self._living()
        may = any(item.has_run for item in living)
        self._cut_power_of(living if may else ())
        return may

    def _living(self) -> list[Peer]:
        return [item for item in self._swarm.peers if item.is_running and not item.is_away]

    def _cut_power_of(self, peers: Iterable[Peer]) -> None:
        for peer in peers:
            self.crashes_s.append(self._swarm.now_s)
            self._swarm.cut_power(peer)

    def _come_back_first(self, fault: Fault) -> None:
        """The others come back when all is mended, or when faults of their own end."""
        for name in fault.whom:
            self._start(self._swarm.named(name))

    def _start(self, peer: Peer) -> bool:
        may = not peer.is_running and not self.has_gone_home(peer)
        if may:
            if (lid := self._closed.pop(peer.name, None)) is not None:
                self._mend(lid)
            self._swarm.start(peer)
        elif peer.is_away or peer.is_leaving_for_a_pause:
            self._swarm.come_back(peer)
        return may

    def _pause(self, fault: Fault) -> bool:
        peer = self._one(fault)
        may = peer.is_running and peer.process is not None and not peer.process.is_paused
        if may:
            self._swarm.pause(peer)
        return may

    def _resume(self, fault: Fault) -> None:
        process = self._one(fault).process
        if process is not None and process.is_paused and not process.is_dead:
            self._swarm.resume(self._one(fault))

    def _close_lid(self, fault: Fault) -> bool:
        """Its machine sleeps, whatever else is done to it, and nobody reaches it."""
        peer, process = self._one(fault), self._one(fault).process
        may = peer.is_running and process is not None and not process.is_asleep
        if may:
            self.crashes_s.append(self._swarm.now_s)  # its states are out of reach
            for other in self._others(peer):
                self._hold(fault, peer, other)
            self._closed[peer.name] = fault
            self._swarm.fall_asleep(peer)
        return may

    def _open_lid(self, fault: Fault) -> None:
        """Wakes the machine, unless it died asleep and was started again, which opened the lid."""
        peer, links = self._one(fault), self._swarm.network.links
        if self._closed.get(peer.name) is not fault:
            return
        del self._closed[peer.name]
        if peer.is_asleep:
            self._swarm.wake(peer)
        self._mend(fault)
        for other in self._others(peer):
            if links.of(peer.peer_id, other.peer_id).is_cut:  # by its own clock it began just now
                self._swarm.network.give_up_if_still_cut(peer.peer_id, other.peer_id)

    def _others(self, peer: Peer) -> list[Peer]:
        return [other for other in self._swarm.peers if other is not peer]

    def _leave(self, fault: Fault) -> bool:
        peer = self._one(fault)
        may = self._may_go(peer) and peer.has_run
        if may and peer.resident is not None and fault.draw < BY_HOURS:
            self._swarm.set_hours(peer, are_over=True)
        elif may:
            is_short = peer.resident is not None and fault.draw >= FOR_A_WHILE
            self._swarm.leave(peer, fault.lasts_s if is_short else None)
        return may

    def _go_home(self, fault: Fault) -> bool:
        """Tells it to go for good, perhaps before it is let in."""
        peer = self._one(fault)
        may = self._may_go(peer) and peer.daemon is not None
        if may:
            self.gone_home_s[peer.name] = self._swarm.now_s
            self._swarm.end(peer)
        return may

    def _has_left(self, peer: Peer) -> bool:
        """Its owner has paused it, and wants it to come back."""
        is_over = peer.ended is not None and peer.ended.done() and not peer.was_killed
        has_left = is_over and peer.daemon is not None and peer.daemon.pause_reason is not None
        return has_left and not self.has_gone_home(peer)

    def _come_back(self, fault: Fault) -> None:
        peer = self._one(fault)
        if peer.is_outside_hours:
            self._swarm.set_hours(peer, are_over=False)
        else:
            self._start(peer)

    # links ---------------------------------------------------------------------------------------

    def _both(self, fault: Fault) -> tuple[Peer, Peer]:
        one, other = fault.whom
        return self._swarm.named(one), self._swarm.named(other)

    def _cut(self, fault: Fault, both_ways: bool) -> bool:
        self._hold(fault, *self._both(fault), both_ways)
        return True

    def _hold(self, fault: Fault, one: Peer, other: Peer, both_ways: bool = True) -> None:
        ways = [(one.name, other.name)]
        for way in [*ways, ways[0][::-1]] if both_ways else ways:
            self._holding.setdefault(way, set()).add(fault)
        self._swarm.cut(one, other, both_ways=both_ways)

    def _mend(self, fault: Fault) -> None:
        """Opens ways that no other fault keeps cut. Of peers that are cut off in turns, the one
        that is back does not reach those that are still out."""
        if fault.kind != "lid":
            self.parted_s |= dict.fromkeys(fault.whom, self._swarm.now_s)
        for way, faults in self._holding.items():
            if fault in faults:
                faults.discard(fault)
                if not faults:
                    one, other = map(self._swarm.named, way)
                    self._swarm.mend(one, other, both_ways=False)

    def _links(self, fault: Fault, name: str, value: object) -> bool:
        one, other = self._both(fault)
        for here, there in ((one, other), (other, one)):
            link: VirtualLink = self._swarm.network.links.of(here.peer_id, there.peer_id)
            setattr(link, name, value)
        return True

    def _damage(self, fault: Fault, share: float) -> bool:
        """Changes bytes in this share of what the peer sends to anybody."""
        here, links = self._one(fault), self._swarm.network.links
        for peer in self._others(here):
            links.of(here.peer_id, peer.peer_id).damaged = share
        return True

    def _sides(self, fault: Fault) -> list[tuple[Peer, Peer]]:
        side = [self._swarm.named(name) for name in fault.whom]
        rest = [peer for peer in self._swarm.peers if peer not in side]
        return [(one, other) for one in side for other in rest]

    def _part(self, fault: Fault) -> bool:
        for one, other in self._sides(fault):
            self._hold(fault, one, other)
        return True

    # machines ------------------------------------------------------------------------------------

    def _disk(self, fault: Fault, name: str, is_so: bool) -> bool:
        setattr(self._one(fault).disk, name, is_so)
        return True

    def _busy(self, fault: Fault, is_so: bool) -> bool:
        process = self._one(fault).process
        if process is not None:
            process.is_busy = is_so
        return process is not None and not process.is_dead

    def _silence_p2pd(self, fault: Fault, is_so: bool) -> bool:
        peer = self._one(fault)
        if peer.host is None:  # it has not joined yet
            return False
        peer.has_dumb_p2pd = peer.host.is_dumb = is_so
        return True

    def _end_of_lies(self, fault: Fault) -> None:
        """The machine loses power: whoever believed its disk loses what was promised."""
        peer = self._one(fault)
        if self._may_go(peer):
            self._swarm.cut_power(peer)
            self._swarm.start(peer)
        peer.disk.lies = False

    def _set_clock(self, fault: Fault) -> bool:
        self._swarm.set_clock(self._one(fault), BACK_S + fault.draw * (AHEAD_S - BACK_S))
        return True

    def _copy_home(self, fault: Fault) -> bool:
        peer = self._one(fault)
        may = peer.has_run and peer.name not in self._copies
        if may:
            self._copies[peer.name] = peer.copy_home()
        return may

    def _come_back_old(self, fault: Fault) -> None:
        peer = self._one(fault)
        copy = self._copies.pop(peer.name)
        if self._may_go(peer):
            self._swarm.kill(peer)
            peer.put_home_back(copy)
            self._swarm.start(peer)
