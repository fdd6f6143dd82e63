"""Faults that begin with a message, and seeds that leave each fault time to show."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from google.protobuf.wrappers_pb2 import BytesValue

from p2p_dtfm.core.liveness.liveness import Suspect
from p2p_dtfm.core.liveness.stalls import Stalls
from p2p_dtfm.core.messages.agreement_messages import Active
from p2p_dtfm.core.protocol.snapshot import Member, ViewId
from p2p_dtfm.daemon.peers.wire import _KINDS, Knock, pack
from p2p_dtfm.testbed.virtual.process import PROCESS
from p2p_dtfm.testbed.virtual.seeds.deeds import Deeds
from p2p_dtfm.testbed.virtual.seeds.judge import Broken
from p2p_dtfm.testbed.virtual.seeds.playing import CALM_S, Play
from p2p_dtfm.testbed.virtual.seeds.run import make_run
from p2p_dtfm.testbed.virtual.seeds.schedules.draw import draw
from p2p_dtfm.testbed.virtual.seeds.schedules.first_seeds import MOMENTS
from p2p_dtfm.testbed.virtual.seeds.schedules.moments import MESSAGES
from p2p_dtfm.testbed.virtual.seeds.schedules.schedule import (
    CALM_STEPS,
    QUICK_STEPS,
    Fault,
    Schedule,
)
from p2p_dtfm.testbed.virtual.seeds.watching.moments import PATIENCE_S, Moments
from p2p_dtfm.testbed.virtual.seeds.watching.suspicions import Suspicions

KILL = Fault(0.0, 1.0, "kill", ("a",), 0.0, at_message="active")


def test_from_800000_on_faults_wait_for_messages_that_there_are() -> None:
    schedules = [draw(seed) for seed in range(MOMENTS, MOMENTS + 100)]
    assert set(MESSAGES) <= set(_KINDS)
    for it in schedules:
        waiting = [fault for fault in it.faults if fault.at_message]
        assert len(waiting) >= 16 and it.is_quick
        assert not it.goes_on_after_the_end or it.has_only_crashes
    assert {it.is_calm for it in schedules} == {it.is_small for it in schedules} == {True, False}
    ahead = [it for it in schedules if any(f.kind == "life ahead" for f in it.faults)]
    assert len(ahead) in (12, 13), "one of eight"
    ends = {it.at_step for each in schedules for it in each.faults if not it.at_message}
    assert {QUICK_STEPS, CALM_STEPS} <= ends, "what is lost then has to be made once more"
    joining = [it for each in schedules for it in each.faults if it.kind == "join"]
    assert joining and not any(fault.at_message for fault in joining)


class World:
    """Peers, and the faults that are done to them."""

    def __init__(self, names: str = "ab") -> None:
        self.now_s = 10.0
        self.later: list[tuple[float, Callable[..., None], tuple[Any, ...]]] = []
        self.begun: list[Fault] = []
        self.network = SimpleNamespace(on_said=None)
        self.peers = [
            SimpleNamespace(name=name, peer_id=f"id {name}", is_running=True) for name in names
        ]
        self.loop = SimpleNamespace(call_later=self._call_later)
        self.moments = Moments(self, self._begin)  # type: ignore[arg-type]

    def _begin(self, number: int, fault: Fault) -> None:
        self.begun.append(fault)
        self.named(fault.whom[0]).is_running = fault.kind != "kill"

    def named(self, name: str) -> Any:
        return next(peer for peer in self.peers if peer.name == name)

    def _call_later(self, delay_s: float, call: Any, *args: Any, context: object) -> None:
        self.later.append((delay_s, call, args))

    def say(self, message: Any, origin: str = "a", goal: str = "b") -> bool:
        return self.seconds(message, origin, goal) is not None

    def seconds(self, message: Any, origin: str = "a", goal: str = "b") -> float | None:
        """How many seconds late the message leaves; None: never."""
        request = BytesValue(value=pack(1, message)).SerializeToString()
        late_s: float | None = self.network.on_said(f"id {origin}", f"id {goal}", request)
        return late_s

    def go_on(self) -> None:
        for _, call, args in self.later:
            call(*args)
        self.later.clear()


ACTIVE = Active(Member("id a", 1), ViewId(1, "digest"), 3)


@pytest.mark.parametrize("is_of_goal, whom", [(False, "a"), (True, "b")])
def test_a_fault_begins_with_its_message_and_is_done_to_an_end_of_its_way(
    is_of_goal: bool, whom: str
) -> None:
    world = World()
    world.moments.wait(0, replace(KILL, is_of_goal=is_of_goal, after_s=0.02))
    world.say(Knock("run"))
    assert not world.later and not world.moments.is_idle, "that is another one"
    world.say(ACTIVE)
    assert not world.begun and not world.moments.is_idle, "it has to leave first"
    assert [delay_s for delay_s, *_ in world.later] == [0.02]
    world.go_on()
    assert [fault.whom for fault in world.begun] == [(whom,)] and world.moments.is_idle
    world.say(ACTIVE)
    assert not world.later, "once"


def test_what_parts_them_is_done_before_the_message_leaves() -> None:
    world = World()
    world.moments.wait(0, replace(KILL, kind="one-way cut", is_of_goal=True))
    world.say(ACTIVE)
    assert [fault.whom for fault in world.begun] == [("b", "a")] and not world.later


@pytest.mark.parametrize("kind, is_said", [("kill", False), ("leave", True)])
def test_who_dies_between_two_words_does_not_say_the_second(kind: str, is_said: bool) -> None:
    world = World("abc")
    world.moments.wait(0, replace(KILL, kind=kind, comes_before=True))
    assert world.say(ACTIVE) and not world.begun, "the first one"
    assert world.say(ACTIVE, origin="b", goal="c") and not world.begun, "another one's"
    assert world.say(ACTIVE) and not world.begun, "the first one once more"
    assert world.say(ACTIVE, goal="c") is is_said, "nobody else may have been left to die"
    assert [fault.whom for fault in world.begun] == [("a",)] and not world.later


def test_a_fault_whose_message_nobody_sends_is_done_as_it_was_drawn() -> None:
    world = World()
    world.moments.wait(0, KILL)
    world.now_s += PATIENCE_S - 0.1
    world.moments.give_up()
    assert not world.begun
    world.now_s += 0.1
    world.moments.give_up()
    assert world.begun == [KILL] and world.moments.is_idle


def test_what_is_no_message_begins_nothing() -> None:
    world = World()
    world.moments.wait(0, KILL)
    for request in (b"", b"\xff\xff", BytesValue(value=b"\xc1").SerializeToString()):
        world.network.on_said("id a", "id b", request)
    assert not world.later and not world.begun


def test_all_that_have_a_layer_lose_power_and_come_back_together() -> None:
    layers = {"a": {0, 1}, "b": {1, 2}, "c": {0, 1}}
    done = list[str]()
    peers = [
        SimpleNamespace(
            name=name,
            is_running=True,
            is_away=False,
            is_leaving_for_a_pause=False,
            ended=None,
            layers=lambda name=name: layers[name],
        )
        for name in layers
    ]

    def cut_power(peer: Any) -> None:
        peer.is_running = False
        done.append(f"-{peer.name}")

    swarm: Any = SimpleNamespace(
        peers=peers, now_s=1.0, cut_power=cut_power, start=lambda it: done.append(f"+{it.name}")
    )
    deeds, first = Deeds(swarm), Fault(0.0, 1.0, "lost layer", ("a",), 0.0)
    assert deeds.begin(first) and done == ["-a", "-c"], "somebody has no layer 0"
    assert deeds.crashes_s == [1.0, 1.0]
    deeds.end(first)
    assert done == ["-a", "-c", "+a", "+c"]
    done.clear()
    for peer in peers:
        peer.is_running = True
    assert deeds.begin(replace(first, draw=0.99)) and done == ["-b"], "nobody else has layer 2"
    peers[0].is_running, peers[0].ended = False, SimpleNamespace(done=lambda: True)
    deeds.end(replace(first, draw=0.99))
    assert done == ["-b", "+b", "+a"], "the founder had gone by itself"
    for peer in peers:
        peer.is_running = peer.name != "c"
    layers["b"] = {0, 1}
    assert not deeds.begin(first), "whoever stays has all there is"


def test_who_works_is_not_held_to_be_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [Suspect("id b", "is waited for")]
    monkeypatch.setattr(Stalls, "tick", lambda stalls, *args: found)
    monkeypatch.setattr(Stalls, "join", lambda stalls, *args: found)
    peer = SimpleNamespace(
        name="b", peer_id="id b", is_running=True, awake_since_s=100.0, told_step=lambda: 1
    )
    peer.disk = SimpleNamespace(is_full=False)
    swarm: Any = SimpleNamespace(peers=[peer], now_s=105.0)
    suspicions = Suspicions(swarm)
    process: Any = SimpleNamespace(name="a.0")
    token = PROCESS.set(process)
    try:
        with suspicions.heard():
            stalls: Any = Stalls.__new__(Stalls)
            assert stalls.tick() == found and not suspicions.problem, "it began just now"
            peer.awake_since_s, swarm.now_s = math.inf, 120.0
            assert stalls.tick() == found and not suspicions.problem, "it is dead, or sleeps"
            peer.awake_since_s = 100.0
            assert stalls.join() == found and not suspicions.problem, "it has waited half as long"
            peer.disk.is_full = True
            assert stalls.tick() == found and not suspicions.problem, "it cannot keep its data"
            peer.disk.is_full = False
            assert stalls.tick() == found
            assert "a.0 says of b that it is waited for" in suspicions.problem
    finally:
        PROCESS.reset(token)


def scene(tmp_path: Path, faults: tuple[Fault, ...]) -> tuple[Play, Any, list[int], list[str]]:
    told, seen = [0], list[str]()
    peer = SimpleNamespace(name="a", is_running=True, told_step=lambda: told[0])
    swarm: Any = SimpleNamespace(loop=None, peers=[peer], now_s=100.0)
    schedule = Schedule(("a",), (), faults, is_quick=True, is_calm=True)
    one = Play(swarm, make_run(tmp_path, 16), schedule)
    one.deeds = SimpleNamespace(  # type: ignore[assignment]
        begin=lambda fault: not seen.append(fault.kind),
        end=lambda fault: seen.append(f"end of {fault.kind}"),
        mend_all=lambda: None,
        call_back=lambda: None,
        done=seen,
    )
    one.begin_at(100.0)
    return one, swarm, told, seen


def test_each_fault_of_a_calm_seed_has_time_to_show_what_it_does(tmp_path: Path) -> None:
    kill, pause, cut = (Fault(0.0, 2.0, kind, ("a",), 0.9) for kind in ("kill", "pause", "leave"))
    one, swarm, told, seen = scene(tmp_path, (kill, pause, cut))
    expected = [
        (100.0, 0, ["kill"]),
        (102.5, 0, ["kill", "end of kill"]),
        (130.0, 0, ["kill", "end of kill"]),
        (131.0, 1, ["kill", "end of kill", "pause"]),
        (131.1, 2, ["kill", "end of kill", "pause"]),
        (133.5, 2, ["kill", "end of kill", "pause", "end of pause"]),
        (133.6, 2, ["kill", "end of kill", "pause", "end of pause", "leave"]),
        (139.0, 3, ["kill", "end of kill", "pause", "end of pause", "leave", "end of leave"]),
    ]
    for now_s, step, so_far in expected:
        swarm.now_s, told[0] = now_s, step
        one.do_what_is_due()
        assert seen == so_far, now_s
    assert one.mended_s == 139.0


def test_after_the_last_step_of_a_calm_seed_only_what_is_meant_for_it_comes(
    tmp_path: Path,
) -> None:
    kill = Fault(0.0, 2.0, "kill", ("a",), 0.9, at_step=3)
    one, _, told, seen = scene(tmp_path, (kill, replace(kill, at_step=16, kind="pause")))
    one._schedule = replace(one._schedule, goes_on_after_the_end=True)
    told[0] = 16
    one.do_what_is_due()
    assert seen == ["pause"]


def test_a_calm_seed_in_which_no_step_comes_is_broken(tmp_path: Path) -> None:
    one, swarm, told, _ = scene(tmp_path, (Fault(0.0, 1.0, "kill", ("a",), 0.9),))
    one._require_steps()
    swarm.now_s += CALM_S - 1
    one._require_steps()
    told[0] = 1
    one._require_steps()
    swarm.now_s += CALM_S + 1
    with pytest.raises(Broken, match="no step for 100 s"):
        one._require_steps()
