"""In virtual time all members are honest, so a member that is blamed shows a fault of the
daemon's."""

import logging

import pytest

from p2p_dtfm.daemon.node.network import DISCONNECTED
from p2p_dtfm.daemon.node.participation.participant import BLAMED, NO_PLACE
from p2p_dtfm.testbed.virtual.seeds.judge import Broken
from p2p_dtfm.testbed.virtual.seeds.schedules.crashes import STORM_OF
from p2p_dtfm.testbed.virtual.seeds.schedules.draw import draw
from p2p_dtfm.testbed.virtual.seeds.schedules.first_seeds import STORMS
from p2p_dtfm.testbed.virtual.seeds.watching.words import Blames

log = logging.getLogger("p2p_dtfm.somewhere")


@pytest.mark.parametrize("words", [BLAMED, DISCONNECTED])
def test_a_blame_is_heard_whatever_else_is_logged(words: str) -> None:
    blames = Blames()
    with blames.heard():
        log.warning("something else of %s: %s", "x", "y")
        log.warning(words, "x", NO_PLACE)  # who has not heard of it yet (seed 501257)
        blames.require_none()
        log.warning(words, "x", "a gradient that is not due")
    with pytest.raises(Broken, match="gradient that is not due"):
        blames.require_none()


def test_whose_memory_changes_bytes_is_told_so_by_who_gets_them() -> None:
    blames = Blames()
    blames.damaged = {"x"}
    with blames.heard():
        log.warning(DISCONNECTED, "x", "a checksum that is wrong")
        blames.require_none()
        log.warning(DISCONNECTED, "y", "a checksum that is wrong")
    with pytest.raises(Broken, match="y: a checksum"):
        blames.require_none()


def test_afterwards_the_log_is_as_it_was() -> None:
    top = logging.getLogger("p2p_dtfm")
    before = (top.level, top.propagate, list(top.handlers))
    with Blames().heard():
        assert not top.propagate
    assert (top.level, top.propagate, list(top.handlers)) == before


def test_a_storm_kills_one_after_the_other_and_brings_all_back() -> None:
    storms = [draw(seed) for seed in range(STORMS, STORMS + 20)]
    assert draw(STORMS) == storms[0] != storms[1]
    for storm in storms:
        assert "".join(storm.begun) == STORM_OF and len(storm.faults) >= 6
        assert {fault.kind for fault in storm.faults} == {"kill"}
        assert all(0.3 <= fault.lasts_s <= 2.0 for fault in storm.faults)
    assert {storm.is_small for storm in storms} == {True, False}


def test_a_daemon_that_tells_of_its_own_mistake_has_made_one() -> None:
    blames = Blames()
    with blames.heard():
        log.error("the libp2p daemon of this peer has ended unexpectedly")
        blames.require_none()
        log.error("bug while telling %s", "x", exc_info=RuntimeError("no such queue"))
    with pytest.raises(Broken, match="a bug, as it says itself"):
        blames.require_none()
