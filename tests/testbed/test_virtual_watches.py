"""What is watched while a seed is played, and what the run's result does not show: copies that
nobody sends, daemons outside of their hours, what a replica forgets, and offers that stay."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from p2p_dtfm.testbed.virtual.process import PROCESS
from p2p_dtfm.testbed.virtual.seeds import judge
from p2p_dtfm.testbed.virtual.seeds.watching.copies import Copies
from p2p_dtfm.testbed.virtual.seeds.watching.hours import SEES_WITHIN_S, OutsideHours
from p2p_dtfm.testbed.virtual.seeds.watching.owed import Owed
from p2p_dtfm.train.stage.private_memory import PrivateMemory
from p2p_dtfm.train.stage.replica_memory import ReplicaMemory

STATES: Any = [SimpleNamespace(layer=0, version=1, parameter_count=2)]
"""The states as of step 1, which begins."""


def one_that_holds(clock: object, sending: object) -> Any:
    cuts = SimpleNamespace(_clock=clock, _sending=sending)
    participant = SimpleNamespace(trainer=SimpleNamespace(cuts=cuts))
    api = SimpleNamespace(participant=participant)
    process = SimpleNamespace(takes_turns=True)
    daemon = SimpleNamespace(status_api=api)
    return SimpleNamespace(name="a", is_running=True, daemon=daemon, process=process)


def test_a_copy_that_nobody_sends_is_seen_when_it_is_looked_at_again() -> None:
    clock = SimpleNamespace(travels=True)
    peer = one_that_holds(clock, SimpleNamespace(done=lambda: False))
    cuts, copies = peer.daemon.status_api.participant.trainer.cuts, Copies(lambda: [peer])
    assert not any(copies.look(at_s) for at_s in (1.0, 2.0)), "it is on its way"
    cuts._sending = SimpleNamespace(done=lambda: True)
    assert not copies.look(3.0), "another one may begin in this very moment"
    assert "a's layers" in copies.look(4.0)
    cuts._clock = SimpleNamespace(travels=True)
    assert not copies.look(5.0), "of another view"
    peer.process.takes_turns = False
    assert not copies.look(6.0), "its machine stands still"
    peer.process.takes_turns, clock.travels, cuts._clock = True, False, clock
    assert not any(copies.look(at_s) for at_s in (7.0, 8.0)), "guardians have it"


def one_that_takes_part() -> Any:
    return SimpleNamespace(
        name="a",
        is_running=True,
        is_away=False,
        takes_part=True,
        is_outside_hours=False,
        process=SimpleNamespace(takes_turns=True),
        daemon=SimpleNamespace(is_to_leave=False, pause_reason=None),
    )


def test_who_takes_part_outside_its_hours_is_seen() -> None:
    peer = one_that_takes_part()
    hours, late_s = OutsideHours(lambda: [peer]), SEES_WITHIN_S + 0.1
    assert not hours.look(1.0)
    peer.is_outside_hours = True
    assert not hours.look(2.0) and not hours.look(2.0 + SEES_WITHIN_S)
    assert "a takes part" in hours.look(2.0 + late_s)
    peer.daemon.pause_reason = "its hours are over"
    assert not hours.look(3.0 + late_s), "it leaves"
    peer.daemon = SimpleNamespace(is_to_leave=False, pause_reason=None)
    assert not any(hours.look(at_s) for at_s in (20.0, 20.0 + late_s)), "it was called back"


@pytest.mark.parametrize(
    ("what_happens", "is_wrong"),
    [
        (lambda memory: memory.commit(0), False),
        (lambda memory: memory.moments.commit(0), True),
        (lambda memory: memory.owed.discard(), True),
        (lambda memory: memory.forget([0]), False),
        (lambda memory: memory.keep_only([1]), False),
    ],
)
def test_a_replica_goes_on_with_what_it_owes_unless_the_state_is_anothers(
    what_happens: Any, is_wrong: bool
) -> None:
    owed, memory = Owed(), ReplicaMemory()
    before, propose = PROCESS.set(SimpleNamespace(name="a.0")), PrivateMemory.propose  # type: ignore[arg-type]
    try:
        with owed.heard():
            memory.propose_owed(0, STATES, torch.ones(2))
            what_happens(memory)
            memory.owed_of(STATES)
    finally:
        PROCESS.reset(before)
    assert ("a.0 does not go on in step 1" in owed.look(1.0)) == is_wrong
    assert PrivateMemory.propose is propose


def test_offers_of_who_took_part_to_its_end_are_gone(tmp_path: Path) -> None:
    offers = tmp_path / "runs" / "a" / "offers"
    offers.mkdir(parents=True)
    peer: Any = SimpleNamespace(
        home=tmp_path, was_ever_killed=True, was_killed=False, takes_part=True
    )
    assert not judge._files_left(peer)
    (offers / "0123").write_bytes(b"")
    (tmp_path / "half.partial").write_bytes(b"")
    assert [path.name for path in judge._files_left(peer)] == ["0123"]
    peer.was_killed = True
    assert not judge._files_left(peer)
    peer.was_killed = peer.was_ever_killed = False
    assert [path.name for path in judge._files_left(peer)] == ["half.partial", "0123"]
