"""Machines that also do other things: event loops stand still for a second and more, and messages
come late. Nobody calls a living peer dead, and a dead peer is missed all the same."""

import dataclasses

import pytest

from p2p_dtfm.core.consensus.actions import LAN, SECOND_NS
from p2p_dtfm.core.liveness.liveness import LAN_LIVENESS, LivenessTiming
from p2p_dtfm.sim.faults.agreement_world import AgreementWorld
from tests.core.builders import record
from tests.sim.test_lying_members import MANY_MICROBATCHES, replicas

NAMES = ("a", "b", "c", "d", "e")
LONGEST_S = 1.3
"""How long a loop stands still. A peer that is heard twice a second is then silent for less than
two."""
AS_BEFORE = dataclasses.replace(
    LAN_LIVENESS,
    least_silence_ns=LAN_LIVENESS.silence_ns,
    calm_silence_ns=LAN_LIVENESS.silence_ns,
)
HASTY = dataclasses.replace(
    LAN_LIVENESS, least_silence_ns=2 * SECOND_NS, calm_silence_ns=2 * SECOND_NS
)
WITHOUT_DOUBT = dataclasses.replace(HASTY, punctual_ns=HASTY.sleep_ns)
"""A timing without doubt in a peer's own loop."""
EASY_S, LOADED_S = 20, 120


class Loaded:
    """A world in which all are in one view, on quiet machines. From `EASY_S` on other programs run
    beside them."""

    def __init__(self, seed: int, timing: LivenessTiming, longest_s: float) -> None:
        self.world = world = AgreementWorld(
            seed, MANY_MICROBATCHES, record("template"), replicas, timing=LAN
        )
        world.liveness_timing, world.rejoins = timing, True
        world.tick_ns = SECOND_NS // 10
        for name in NAMES:
            world.add_peer(name)
            world.peers[name].agreement.wants_view()
        world.after(2 * SECOND_NS, lambda: world.found("a"))
        world.run_until(lambda: all(peer.agreement.step >= 3 for peer in world.peers.values()))
        self.longest_ns = int(longest_s * SECOND_NS)
        self.began_ns = world.now_ns
        for name in NAMES:
            self._next(name)

    def _next(self, name: str) -> None:
        """Half of the time something else runs for about a tenth of a second, now and then for
        long."""
        world = self.world
        load = world.now_ns - self.began_ns > EASY_S * SECOND_NS
        world.after(
            world.chance.randrange(SECOND_NS // 5, 3 * SECOND_NS),
            lambda: self._stand_still(name) if load else self._next(name),
        )

    def _stand_still(self, name: str) -> None:
        world = self.world
        share = world.chance.random() ** 3
        still_ns = SECOND_NS // 10 + int(share * (self.longest_ns - SECOND_NS // 10))
        if not world.peers[name].stopped:
            world.stop(name)
            world.after(still_ns, lambda: world.go_on(name))
        world.after(still_ns, lambda: self._next(name))

    def called_dead(self) -> list[str]:
        """Run to the end. Returns each line of the story in which a peer is called dead."""
        self.world.run_to(self.began_ns + (EASY_S + LOADED_S) * SECOND_NS)
        return [line for line in self.world.story if "nothing heard" in line]


class OneOfThem(Loaded):
    """Only the machine of `c` does other things, so no other peer is late and doubts itself."""

    def _next(self, name: str) -> None:
        world = self.world
        load = world.now_ns - self.began_ns > EASY_S * SECOND_NS
        if name == "c":
            world.after(
                world.chance.randrange(SECOND_NS, 15 * SECOND_NS),
                lambda: self._stand_still(name) if load else self._next(name),
            )

    def _stand_still(self, name: str) -> None:
        world = self.world
        still_ns = world.chance.randrange(SECOND_NS // 2, self.longest_ns)
        if not world.peers[name].stopped:
            world.stop(name)
            world.after(still_ns, lambda: world.go_on(name))
        world.after(still_ns, lambda: self._next(name))


def seeds(count: int, nightly: int) -> list[object]:
    """Some seeds for each day; the others for each night, ten in a test. On two busy cores each
    takes up to nine seconds, and hundreds in one test said nothing for most of an hour."""
    nights = (range(first, min(first + 10, nightly)) for first in range(count, nightly, 10))
    return [
        range(count),
        *(pytest.param(it, marks=pytest.mark.nightly, id=str(it)) for it in nights),
    ]


@pytest.mark.parametrize("drawn", seeds(1, 300))
def test_who_stands_still_now_and_then_is_not_called_dead(drawn: range) -> None:
    """Each stands still for half a second to a second and a half, on a machine of its own."""
    for seed in drawn:
        assert OneOfThem(seed, LAN_LIVENESS, 1.5).called_dead() == [], seed


@pytest.mark.parametrize("drawn", seeds(1, 200))
def test_nobody_is_called_dead_where_all_stand_still_now_and_then(drawn: range) -> None:
    for seed in drawn:
        assert Loaded(seed, LAN_LIVENESS, 1.5).called_dead() == [], seed


def test_who_stands_still_for_longer_is() -> None:
    """Otherwise the schedule would test nothing."""
    assert any(OneOfThem(seed, LAN_LIVENESS, 4.0).called_dead() for seed in range(1, 4))


@pytest.mark.parametrize("seed", range(1))
def test_nobody_is_called_dead_because_machines_are_loaded(seed: int) -> None:
    for timing in (AS_BEFORE, LAN_LIVENESS, HASTY):
        assert Loaded(seed, timing, LONGEST_S).called_dead() == []


def test_without_doubt_in_their_own_loops_they_would_accuse() -> None:
    """Otherwise the schedule would test nothing."""
    assert any(Loaded(seed, WITHOUT_DOUBT, LONGEST_S).called_dead() for seed in range(9, 12))


def test_who_stops_for_good_is_missed_within_five_seconds() -> None:
    loaded = Loaded(1, LAN_LIVENESS, longest_s=0.2)
    world = loaded.world
    world.run_to(world.now_ns + 10 * SECOND_NS)
    stopped_ns, others = world.now_ns, [world.peers[name] for name in NAMES if name != "c"]
    world.peers["c"].stopped = True
    loaded.longest_ns = 0
    world.run_until(lambda: all(peer.view and "c" not in peer.view.member_ids for peer in others))
    assert world.now_ns - stopped_ns < 5 * SECOND_NS


def test_who_stops_after_calm_times_is_missed_two_seconds_sooner() -> None:
    loaded = Loaded(1, LAN_LIVENESS, longest_s=0.2)
    loaded.longest_ns = 0
    world = loaded.world
    world.run_to(loaded.began_ns + (EASY_S + 10) * SECOND_NS)
    stopped_ns, others = world.now_ns, [world.peers[name] for name in NAMES if name != "c"]
    world.peers["c"].stopped = True
    world.run_until(lambda: all(peer.view and "c" not in peer.view.member_ids for peer in others))
    assert world.now_ns - stopped_ns < 3 * SECOND_NS


def test_who_stops_is_missed_within_three_seconds_of_load_that_all_bear() -> None:
    """Loops that stand still for up to half a second make the finding later, not twice as late."""
    loaded = Loaded(3, LAN_LIVENESS, longest_s=0.5)
    world = loaded.world
    world.run_to(loaded.began_ns + (EASY_S + 40) * SECOND_NS)
    stopped_ns, others = world.now_ns, [world.peers[name] for name in NAMES if name != "c"]
    world.peers["c"].alive = False  # nobody is told that its connections have ended
    world.run_until(lambda: any("by others neither" in line for line in world.story))
    assert world.now_ns - stopped_ns < 3 * SECOND_NS
    world.run_until(lambda: all(peer.view and "c" not in peer.view.member_ids for peer in others))
    assert world.now_ns - stopped_ns < 4 * SECOND_NS


def test_both_ends_of_a_cut_are_told_at_once_what_they_lack() -> None:
    """Both ends waited for half a second, until all that is known was sent again."""
    loaded = Loaded(2, LAN_LIVENESS, longest_s=0.2)
    loaded.longest_ns = 0
    world = loaded.world
    world.plan_ns, world.network.delay_ns = 2, (1_000_000, 2_000_000)
    world.run_to(world.now_ns + 10 * SECOND_NS)
    world.cut({("a", "b"), ("b", "a")}, "between a and b")
    world.run_until(lambda: any("while others hear it" in line for line in world.story))
    suspected_ns = world.now_ns
    in_two = [peer for name, peer in world.peers.items() if name in "cde"]
    world.run_until(lambda: all(it.view and len(it.view.members) < 5 for it in in_two))
    assert world.now_ns - suspected_ns < SECOND_NS // 5


def test_a_cut_between_two_is_told_from_a_machine_that_stands_still() -> None:
    """All the others hear both ends, so nobody waits as long as for a silent peer."""
    loaded = Loaded(2, LAN_LIVENESS, longest_s=0.2)
    world = loaded.world
    world.run_to(world.now_ns + 10 * SECOND_NS)
    cut_ns, peers = world.now_ns, list(world.peers.values())
    world.cut({("a", "b"), ("b", "a")}, "between a and b")
    loaded.longest_ns = 0
    world.run_until(lambda: any(peer.view and len(peer.view.members) < 5 for peer in peers))
    assert world.now_ns - cut_ns < 3 * SECOND_NS
    assert any("while others hear it" in line for line in world.story)
