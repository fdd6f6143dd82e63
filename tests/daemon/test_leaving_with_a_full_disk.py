"""A peer's disk is full when the peer leaves, or when its run ends: nothing is lost without a
word."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from p2p_dtfm.daemon.machine.life import Life
from p2p_dtfm.daemon.node.coming_and_going import departure
from p2p_dtfm.daemon.node.coming_and_going.departure import Departure
from p2p_dtfm.daemon.node.daemon import _until_end
from p2p_dtfm.daemon.node.participation import end_of_run
from p2p_dtfm.daemon.node.participation.end_of_run import EndOfRun
from p2p_dtfm.ports import now
from tests.daemon.test_endings import in_quick_time
from tests.daemon.trainer_parts import view_of


class FullDisk:
    """Checkpoints that a disk takes from the `after`-th attempt on."""

    def __init__(self, after: int) -> None:
        self.whole_step = 100
        self.attempts, self._after = 0, after

    async def save(self, step: int, states: object, lineage: str) -> None:
        self.attempts += 1

    def refused(self, step: int) -> bool:
        return self.attempts < self._after


def leaves_with(checkpoints: FullDisk, members: int) -> Departure:
    """The parts of a daemon that ends at step 140. It is the first of the view's members."""

    async def nothing() -> None:
        pass

    view = view_of(1, members)
    participant = SimpleNamespace(
        membership=SimpleNamespace(
            agreement=SimpleNamespace(view=view),
            me=SimpleNamespace(peer_id=view.member_ids[0]),
            run=SimpleNamespace(spec=SimpleNamespace(total_steps=140)),
        ),
        local=SimpleNamespace(
            life=Life(lambda: None), status=SimpleNamespace(say=lambda state, what: None)
        ),
        trainer=SimpleNamespace(
            states={0: SimpleNamespace(version=140)}, settled=nothing, hand_over=nothing
        ),
        lineage_at=lambda step: "lineage",
        checkpoints=checkpoints,
    )
    return Departure(participant)  # type: ignore[arg-type]


def test_what_only_it_has_waits_for_room_on_its_disk_before_it_leaves(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The peer left, and said that training goes on. On the next start it began at step 0."""
    for after, members, attempts in ((4, 1, 4), (1, 1, 1), (4, 2, 1)):
        caplog.clear()
        full = FullDisk(after)
        leaves = leaves_with(full, members)
        in_quick_time(lambda passes, leaves=leaves: leaves.end())
        assert full.attempts == attempts, (after, members)
        assert ("step 140 is nowhere else" in caplog.text) is (attempts > 1)
        assert "is lost" not in caplog.text


def test_what_a_full_disk_never_takes_is_said_to_be_lost(caplog: pytest.LogCaptureFixture) -> None:
    full, began_s = FullDisk(10**6), []

    async def ends(passes: Callable[[float], Awaitable[None]]) -> None:
        began_s.append(now.monotonic_s())
        await leaves_with(full, 1).end()
        began_s.append(now.monotonic_s())

    in_quick_time(ends)
    assert "what was trained from step 100 to 140 is lost" in caplog.text
    assert departure.LEAVE_LIMIT_S <= began_s[1] - began_s[0] < departure.LEAVE_LIMIT_S + 5


def test_a_finished_model_that_only_it_has_waits_for_room_as_well(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The daemon ended with 0, and no disk had the trained model."""
    for members, attempts in ((1, 4), (2, 0)):
        full, codes = FullDisk(4), []
        leaves = leaves_with(full, members)
        leaves.participant.trainer.done = asyncio.Event()
        leaves.participant.trainer.done.set()
        leaves.participant.local.life.leaving.set()
        leaves.participant.network = SimpleNamespace(  # type: ignore[assignment]
            host=SimpleNamespace(lost=asyncio.Event())
        )
        monkeypatch.setattr(leaves, "run_ended", asyncio.Event().wait)

        async def ends(leaves: Departure = leaves, codes: list[int] = codes) -> None:
            codes.append(await _until_end(leaves))

        in_quick_time(lambda passes, ends=ends: ends())
        assert codes == [0] and full.attempts == attempts


@pytest.mark.parametrize(("after", "members", "code"), [(10**6, 1, 2), (4, 1, 0), (10**6, 2, 0)])
def test_who_ends_with_its_run_and_loses_the_model_says_so_to_what_began_it(
    after: int, members: int, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `--exit-when-done` a script went on, as after a run whose model is there."""
    codes: list[int] = []
    leaves = leaves_with(FullDisk(after), members)
    leaves.participant.trainer.done = asyncio.Event()
    leaves.participant.network = SimpleNamespace(  # type: ignore[assignment]
        host=SimpleNamespace(lost=asyncio.Event())
    )

    async def at_once() -> None:
        pass

    monkeypatch.setattr(leaves, "run_ended", at_once)

    async def ends(passes: Callable[[float], Awaitable[None]]) -> None:
        codes.append(await _until_end(leaves))

    in_quick_time(ends)
    assert codes == [code]


def test_nobody_is_told_to_use_a_model_that_is_not_here(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The disk was full, and `generate` then said that there is no checkpoint. The same happened
    where there was room for this peer's own layers alone."""
    monkeypatch.setattr(end_of_run, "write_report", lambda *of: True)
    told: list[tuple[str, ...]] = []
    monkeypatch.setattr(end_of_run, "last_words", lambda state, path, commands: ())
    home = SimpleNamespace(root=Path("home"), run_directory=lambda digest: Path("run"))
    state = SimpleNamespace(samples=SimpleNamespace(prompt="def "))
    observer = SimpleNamespace(state=lambda: state, ends_with=told.append)
    local: Any = SimpleNamespace(home=home, observer=observer)
    run: Any = SimpleNamespace(spec=SimpleNamespace(total_steps=40, layers=()), digest="ab")

    async def scene(passes: Callable[[float], Awaitable[None]]) -> None:
        for whole_step, has_room in ((20, True), (20, False), (40, True)):
            checkpoints: Any = SimpleNamespace(
                whole_step=whole_step,
                withheld=frozenset(),
                refused=lambda step, is_it=has_room, here=whole_step: is_it and here < step,
                has_no_room=lambda step, is_it=has_room: not is_it,
            )
            done = asyncio.Event()
            done.set()
            await EndOfRun(local, run, done, checkpoints, None).tell()

    in_quick_time(scene)
    assert told[:2] == [(), ()] and len(told[2]) == 2
    assert caplog.text.count("the model of step 40 is not on this disk") == 2


@pytest.mark.parametrize("is_full", [True, False], ids=["no room", "a slow line"])
def test_what_can_be_typed_is_told_once_the_model_is_here(
    is_full: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The last word was that the model is not on this disk, also when its user had made room. Who
    still fetched it was told to export it ten seconds after the last step, and exported an older
    one, or left and never had it."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(end_of_run, "write_report", lambda *of: True)
    monkeypatch.setattr(end_of_run, "last_words", lambda state, path, commands: ())
    shown: list[tuple[str, ...]] = []
    home = SimpleNamespace(root=Path("home"), run_directory=lambda digest: Path("run"))
    state = SimpleNamespace(samples=SimpleNamespace(prompt="def "))
    local: Any = SimpleNamespace(
        home=home, observer=SimpleNamespace(state=lambda: state, ends_with=shown.append)
    )
    run: Any = SimpleNamespace(spec=SimpleNamespace(total_steps=40, layers=()), digest="ab")
    checkpoints: Any = SimpleNamespace(
        whole_step=20,
        withheld=frozenset(),
        refused=lambda step: is_full and checkpoints.whole_step < step,
        has_no_room=lambda step: False,
    )

    async def scene(passes: Callable[[float], Awaitable[None]]) -> None:
        done = asyncio.Event()
        done.set()
        ends = asyncio.create_task(EndOfRun(local, run, done, checkpoints, None).when_done())
        await passes(600.0)
        assert ("is not on this disk" in caplog.text) is is_full
        assert ("is not whole on this disk yet" in caplog.text) is not is_full
        assert "next: " not in caplog.text and shown == [()] and not ends.done()
        checkpoints.whole_step = 40
        await asyncio.wait_for(ends, 20.0)

    in_quick_time(scene)
    assert "the model of step 40 is on this disk now" in caplog.text
    assert caplog.text.count("next: ") == 2 and len(shown[-1]) == 2
