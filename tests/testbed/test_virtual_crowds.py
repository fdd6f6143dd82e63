"""Seeds in which dozens of peers come at once, and which of them the judge looks at."""

from types import SimpleNamespace
from typing import Any

import pytest

from p2p_dtfm.core.protocol.plan import Pipeline, Plan, Stage
from p2p_dtfm.core.protocol.snapshot import ViewId
from p2p_dtfm.testbed.virtual.seeds.deeds import Deeds
from p2p_dtfm.testbed.virtual.seeds.player import Player
from p2p_dtfm.testbed.virtual.seeds.schedules.crowds import COMES_WITHIN_S, CROWD, LARGE_CROWD
from p2p_dtfm.testbed.virtual.seeds.schedules.draw import draw
from p2p_dtfm.testbed.virtual.seeds.schedules.first_seeds import CROWDS, LARGE_CROWDS
from p2p_dtfm.testbed.virtual.seeds.schedules.schedule import Fault
from p2p_dtfm.testbed.virtual.seeds.watching import crowd
from p2p_dtfm.testbed.virtual.seeds.watching.crowd import Crowd
from p2p_dtfm.testbed.virtual.swarm import Swarm, play

VIEW = ViewId(3, "one")
PLAN = Plan((Pipeline((Stage("a", 0, 6, 1),), 0, 4),), ("b",), 1)


def test_from_960000_on_dozens_come_within_two_seconds_and_a_part_goes_at_once() -> None:
    schedules = [draw(seed) for seed in range(CROWDS, CROWDS + 40)]
    assert all(it.is_crowd and it.is_small and it.is_slow and it.roomy for it in schedules)
    assert {len(it.begun) for it in schedules} == set(range(3, 9))
    for it in schedules:
        comes_s = [fault.at_s for fault in it.faults if fault.kind == "join"]
        assert CROWD[0] <= len(comes_s) == len(it.joiners) <= CROWD[1]
        assert max(comes_s) - min(comes_s) <= COMES_WITHIN_S[1]
        at_once = [f.whom[0] for f in it.faults if f.kind in ("kill", "go home") and f.at_s >= 26]
        assert len(at_once) >= (len(it.begun) - 1 + len(it.joiners)) // 4
        assert it.begun[0] not in at_once, "the founder stays"
    assert any(f.lasts_s and not f.at_s for it in schedules for f in it.faults), "old homes"


def test_from_969000_on_two_hundred_come() -> None:
    assert len(draw(LARGE_CROWDS).joiners) == LARGE_CROWD[1]
    assert len(draw(LARGE_CROWDS - 1).joiners) <= CROWD[1]


def _member(name: str, view: ViewId | None, state: str = "spare", why: str = "slow") -> Any:
    agreement = SimpleNamespace(view=SimpleNamespace(plan=PLAN))
    participant = SimpleNamespace(membership=SimpleNamespace(agreement=agreement))
    daemon = SimpleNamespace(
        status_api=SimpleNamespace(participant=participant),
        status_json=lambda: {"state": state, "reason": why},
    )
    return SimpleNamespace(
        name=name,
        peer_id=name,
        is_running=True,
        is_in_a_view=view is not None,
        process=SimpleNamespace(takes_turns=True),
        daemon=daemon,
        standing=lambda: f"{state}: {why}",
    )


@pytest.mark.parametrize(
    ("peer", "leaving", "limit_s", "said"),
    [
        (_member("b", None), (), crowd.LET_IN_WITHIN_S, "is let in by nobody"),
        (_member("b", VIEW), ("b",), crowd.GONE_WITHIN_S, "is on its way home"),
        (_member("b", VIEW, why=""), (), crowd.TOLD_WITHIN_S, "has no stage"),
        (_member("b", VIEW, crowd.TRAINS), (), crowd.TOLD_WITHIN_S, "has no stage"),
    ],
)
def test_what_is_so_for_too_long_of_one_of_a_crowd_is_told(
    peer: Any, leaving: tuple[str, ...], limit_s: float, said: str
) -> None:
    watch = Crowd(lambda: [_member("a", VIEW, crowd.TRAINS), peer], leaving)
    assert watch.look(0.0) == watch.look(limit_s) == ""
    assert watch.look(limit_s + 1).startswith(f"b {said}")


def test_who_waits_for_a_view_that_nobody_has_or_stands_still_is_not_asked() -> None:
    out = _member("b", None)
    watch = Crowd(lambda: [out], ())
    assert watch.look(0.0) == watch.look(2 * crowd.LET_IN_WITHIN_S) == ""
    stopped = _member("b", None)
    stopped.process.takes_turns = False
    watch = Crowd(lambda: [_member("a", VIEW), stopped], ())
    assert watch.look(0.0) == watch.look(2 * crowd.LET_IN_WITHIN_S) == ""
    spare = Crowd(lambda: [_member("a", VIEW, crowd.TRAINS), _member("b", VIEW)], ())
    assert spare.look(0.0) == spare.look(100.0) == ""


def test_who_was_held_up_by_a_crash_has_time_from_then_on() -> None:
    crashes_s = [0.0]
    watch = Crowd(lambda: [_member("a", VIEW), _member("b", None)], (), crashes_s)
    assert watch.look(0.0) == watch.look(crowd.LET_IN_WITHIN_S) == ""
    crashes_s.append(crowd.LET_IN_WITHIN_S)
    assert watch.look(2 * crowd.LET_IN_WITHIN_S) == ""
    assert watch.look(2 * crowd.LET_IN_WITHIN_S + 1).startswith("b is let in by nobody")


def test_who_has_gone_home_nobody_starts_again(tmp_path: Any) -> None:
    async def scene(swarm: Swarm) -> tuple[bool, bool]:
        peer = swarm.peer("a")
        deeds = Deeds(swarm)
        deeds.gone_home_s["a"] = swarm.now_s
        started = deeds.begin(Fault(0.0, 0.0, "join", ("a",), 0.0))
        deeds.mend_all()
        return started, peer.is_running

    assert play(0, tmp_path, scene) == (False, False)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", [CROWDS + 2, CROWDS + 3, CROWDS + 6])
def test_a_crowd_trains(seed: int, tmp_path: Any) -> None:
    assert Player(tmp_path).play(seed).problem == ""
