"""Colluders say together that they do not hear others, and wait until the time is right. Fewer than
a third never have so many members out that they are most, and not one after the other."""

import pytest

from p2p_dtfm.core.consensus.actions import LAN, SECOND_NS
from p2p_dtfm.core.liveness.liveness import LAN_LIVENESS
from p2p_dtfm.core.recovery.view import View
from p2p_dtfm.sim.faults.agreement_world import AgreementWorld
from tests.core.builders import record
from tests.sim.sim_support import found_together
from tests.sim.test_lying_members import MANY_MICROBATCHES, replicas

WATCHED_NS = 40 * SECOND_NS


class Colluders:
    """Each half second the colluders look at the newest view, and accuse `at_once` of its honest
    members. They choose those that they have accused fewest times."""

    def __init__(self, members: str, liars: str, at_once: int, wait_for_all: bool) -> None:
        self._members, self._liars, self._wait_for_all = members, liars, wait_for_all
        self._at_once, self._accused = at_once, dict.fromkeys(sorted(set(members) - set(liars)), 0)
        self.views: dict[int, View] = {}
        self.world = world = AgreementWorld(1, MANY_MICROBATCHES, record("t"), replicas, timing=LAN)
        world.liars, world.liveness_timing = frozenset(liars), LAN_LIVENESS
        found_together(world, list(members))
        world.rejoins = True
        world.after(SECOND_NS, self._look)

    def honest_in(self, view: View) -> set[str]:
        return self._accused.keys() & set(view.member_ids)

    def liars_in(self, view: View) -> set[str]:
        return set(self._liars) & set(view.member_ids)

    @property
    def out_ever(self) -> set[str]:
        return {name for view in self.views.values() for name in self._accused} - set.intersection(
            *(self.honest_in(view) for view in self.views.values())
        )

    def _look(self) -> None:
        self.world.after(SECOND_NS // 2, self._look)
        peers = self.world.peers
        found = [view for name in self._accused if (view := peers[name].view) is not None]
        view = max(found, key=lambda it: it.id, default=None)
        if view is None:
            return
        self.views[view.id.number] = view
        here = self.honest_in(view)
        if any(peers[name].agreement.attempting for name in here):
            return
        if self._wait_for_all and len(view.member_ids) < len(self._members):
            return
        for name in sorted(here, key=lambda it: (self._accused[it], it))[: self._at_once]:
            self._accused[name] += 1
            for liar in self.liars_in(view):
                peer = peers[liar]
                peer.do(peer.agreement.suspect(name, "says so", peer.now_ns))
        self._at_once = max(1, self._at_once - 1)


@pytest.mark.parametrize(
    ("members", "liars", "at_once"), [("abcd", "a", 1), ("abcdefg", "ab", 1), ("abcdefgh", "gh", 1)]
)
def test_who_waits_for_all_to_be_back_has_no_second_one_out(
    members: str, liars: str, at_once: int
) -> None:
    """A member that is let in again knows what most of the others know of before."""
    colluders = Colluders(members, liars, at_once, wait_for_all=True)
    colluders.world.run_to(2 * WATCHED_NS)
    assert len(colluders.out_ever) == 1
    assert sum(not colluders.liars_in(view) for view in colluders.views.values()) >= 2


@pytest.mark.parametrize("liars", ["abcd", "jklm"])
def test_four_of_thirteen_that_accuse_several_at_once_do_not_have_all_out(liars: str) -> None:
    """The four are in doubt with three each, and with those that they accuse next."""
    colluders = Colluders("abcdefghijklm", liars, 3, wait_for_all=False)
    colluders.world.run_to(WATCHED_NS)
    assert len(colluders.out_ever) <= 3
    assert all(len(colluders.honest_in(view)) >= 6 for view in colluders.views.values())
    assert not all(colluders.liars_in(view) for view in colluders.views.values())
