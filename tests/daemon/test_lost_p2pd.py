"""A daemon comes back after its p2pd has ended, as when strangers' data filled the memory."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.daemon.machine.life import Life
from p2p_dtfm.daemon.node import resident as resident_module
from p2p_dtfm.daemon.node.coming_and_going.departure import Departure
from p2p_dtfm.daemon.node.daemon import _until_end
from p2p_dtfm.daemon.node.network import p2pd_has_ended
from p2p_dtfm.ports import now
from tests.daemon.test_residents import Acting, Told, ends


def daemon_without_p2pd(saved: list[Any]) -> Any:
    """The parts of a daemon that holds a layer after 140 steps, and another layer that lags."""
    done: list[str] = []

    async def settled() -> None:
        done.append("settled")

    async def save(step: int, states: dict[int, Any], lineage: str) -> None:
        saved.append((done, step, sorted(states), lineage))

    states = {2: SimpleNamespace(version=140), 3: SimpleNamespace(version=139)}
    lost = asyncio.Event()
    lost.set()
    participant = SimpleNamespace(
        membership=None,
        local=SimpleNamespace(life=Life(lambda: None)),
        network=SimpleNamespace(host=SimpleNamespace(lost=lost)),
        trainer=SimpleNamespace(
            states=states, settled=settled, leave_views=lambda: done.append("left"), done=lost
        ),
        lineage_at=lambda step: "aa",
        checkpoints=SimpleNamespace(save=save),
    )
    departure: Any = Departure(participant)  # type: ignore[arg-type]
    departure.run_ended = asyncio.Event().wait
    return departure


def test_it_saves_what_it_holds_before_it_ends() -> None:
    """Where it alone had a layer, all steps since the last checkpoint were lost."""
    saved: list[Any] = []

    async def ended() -> None:
        departure = daemon_without_p2pd(saved)
        beats = departure.participant.local.life.spawn(asyncio.sleep(60))
        try:
            await _until_end(departure)
        finally:
            assert beats.cancelling() or beats.cancelled(), "others would hear that it lives"

    with pytest.raises(UserError, match="has ended by itself"):
        asyncio.run(ended())
    assert saved == [(["left", "settled"], 140, [2], "aa")]


def loses_p2pd(took_part_s: float, monkeypatch: pytest.MonkeyPatch) -> Callable[[Acting], Any]:
    async def act(daemon: Acting) -> int:
        daemon.has_begun = True
        began_s = now.monotonic_s()
        later = SimpleNamespace(**{**vars(now), "monotonic_s": lambda: began_s + took_part_s})
        monkeypatch.setattr(resident_module, "now", later)
        raise p2pd_has_ended()

    return act


@pytest.mark.parametrize(
    ("took_part_s", "when", "away_s"), [(3600.0, "at once", 3.0), (60.0, "in 5 minutes", 300.0)]
)
def test_it_comes_back_at_once_or_a_while_later_if_that_was_soon(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    took_part_s: float,
    when: str,
    away_s: float,
) -> None:
    """The daemon ended for good, with code 1."""
    resident = Told(tmp_path, (loses_p2pd(took_part_s, monkeypatch), ends))
    began_s = now.wall_s()
    assert asyncio.run(resident.run()) == 0
    ((reason,), (until_s,)) = resident.away_for, resident.away_until_s
    assert "libp2p daemon of this peer has ended" in reason and f"tries again {when}" in reason
    assert until_s is not None and away_s <= until_s - began_s < away_s + 60
    (notice,) = resident.notices
    assert "has ended by itself" in notice.text and "bug" not in notice.text


def test_who_was_told_to_leave_does_not_come_back(tmp_path: Path) -> None:
    async def leaves(daemon: Acting) -> int:
        daemon.has_begun = daemon.is_to_leave = True
        raise p2pd_has_ended()

    resident = Told(tmp_path, (leaves,))
    assert asyncio.run(resident.run()) == 0 and not resident.away_for
