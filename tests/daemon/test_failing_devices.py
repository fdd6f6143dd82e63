"""A device that is gone or out of memory is no bug of the daemon that computed on it."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from p2p_dtfm.core.protocol.errors import UNREACHABLE, DeviceFault, UserError
from p2p_dtfm.daemon.dashboard.dashboard_host import DashboardHost
from p2p_dtfm.daemon.machine.life import Life
from p2p_dtfm.daemon.machine.settings import Settings
from p2p_dtfm.daemon.node.daemon import Daemon, _until_end, cause_of_end
from p2p_dtfm.daemon.node.returning import TRY_AGAIN_S
from p2p_dtfm.net.errors import Unreachable
from p2p_dtfm.train.stage.device import failures
from tests.daemon.test_residents import EVER, TOO_LARGE, Acting, Staged, Told, ends, pauses

SHORT = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


class Gone(RuntimeError):
    """PyTorch's error for a device that has failed. Older versions of PyTorch have no class for
    it."""


@pytest.fixture(autouse=True)
def a_device_may_be_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failures, "_FAILED", (Gone,))


GONE = Gone("CUDA error: unspecified launch failure\nCUDA kernel errors might be reported later")


def daemon_whose_task_raises(error: Exception) -> Any:
    async def computes() -> None:
        raise error

    async def goes_on() -> None:
        await asyncio.Event().wait()

    life = Life(lambda: None)
    life.spawn(computes())
    local = SimpleNamespace(life=life)
    host = SimpleNamespace(lost=asyncio.Event())
    participant = SimpleNamespace(local=local, network=SimpleNamespace(host=host))
    return SimpleNamespace(participant=participant, run_ended=goes_on)


@pytest.mark.parametrize(
    ("error", "cause"),
    [(SHORT, "the device has no memory left"), (GONE, "unspecified launch failure")],
)
def test_a_device_that_fails_in_a_step_is_told_of_with_what_helps(
    error: Exception, cause: str
) -> None:
    """The failure was called a bug to be reported, also by webhook."""
    in_a_step = ExceptionGroup("step", [error, Unreachable("x", "stream reset")])

    async def ended() -> None:
        await _until_end(daemon_whose_task_raises(in_a_step))

    with pytest.raises(UserError, match=cause) as caught:
        asyncio.run(ended())
    assert caught.value.exit_code == 1 and caught.value.fixes
    assert "bug" not in caught.value.render() and "reported later" not in caught.value.cause


@pytest.mark.parametrize(
    "error",
    [
        Gone("CUDA error: device-side assert triggered"),
        Gone("CUDA error: an illegal memory access was encountered"),
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        ExceptionGroup("step", [SHORT, ValueError("ours")]),
    ],
)
def test_what_this_program_did_wrong_on_a_device_stays_a_bug(error: Exception) -> None:
    assert cause_of_end(error) is error


def fails(error: Exception) -> Callable[[Acting], Any]:
    async def act(daemon: Acting) -> int:
        daemon.has_begun = True
        told = cause_of_end(error)
        assert isinstance(told, DeviceFault)
        raise told

    return act


@pytest.mark.parametrize("error", [SHORT, GONE])
def test_it_makes_way_and_takes_part_again_later(tmp_path: Path, error: Exception) -> None:
    """A daemon makes way as for any program of its owner's. A service had started it again in half
    a minute: the memory was still taken, and it ended for good."""
    resident = Told(tmp_path, (fails(error), fails(error), ends))
    assert asyncio.run(resident.run()) == 0
    assert all("the device has" in reason for reason in resident.away_for)
    assert len(resident.away_for) == 2 and all(resident.away_until_s)
    (notice,) = resident.notices
    assert "the device has" in notice.text and "bug" not in notice.text


def test_who_has_taken_part_for_long_tells_the_next_fault(tmp_path: Path) -> None:
    """The daemon may have told of an earlier fault weeks before these."""
    faults = [fails(SHORT) for _ in range(2)]

    async def fails_after_long(daemon: Acting) -> int:
        resident._began_s -= TRY_AGAIN_S
        return await fails(SHORT)(daemon)

    resident = Told(tmp_path, (*faults, fails_after_long, ends))
    assert asyncio.run(resident.run()) == 0
    assert len(resident.away_for) == 3 and len(resident.notices) == 2


def test_a_device_that_fails_at_a_first_start_ends_it(tmp_path: Path) -> None:
    """The user watches a first start."""

    async def fails_as_it_measures(daemon: Acting) -> int:
        told = cause_of_end(SHORT)
        assert isinstance(told, DeviceFault)
        raise told

    settings = Settings(home=tmp_path, run="tiny", **EVER)
    with pytest.raises(UserError, match="no memory left"):
        asyncio.run(Staged(settings, (fails_as_it_measures,)).run())


def leaves_as(act: Callable[[Acting], Any]) -> Callable[[Acting], Any]:
    """The daemon was told to leave before `act` happens to it."""

    async def leaves(daemon: Acting) -> int:
        daemon.is_to_leave = True
        return int(await act(daemon))

    return leaves


@pytest.mark.parametrize("acts", [(leaves_as(fails(SHORT)),), (pauses, leaves_as(fails(GONE)))])
def test_who_is_told_to_leave_does_so_whatever_fails_meanwhile(
    tmp_path: Path, acts: tuple[Callable[[Acting], Any], ...]
) -> None:
    """The owner wanted the memory for something else, but the daemon stayed, and joined again 5
    minutes later. A service also starts a program again that ends with the code of a fault."""
    resident = Told(tmp_path, acts)
    assert asyncio.run(resident.run()) == 0
    assert len(resident.away_for) == len(acts) - 1 and not resident.notices


def test_so_does_who_was_told_before_a_daemon_that_starts_in_vain_listened(tmp_path: Path) -> None:
    async def is_in_vain(daemon: Acting) -> int:
        resident._told_to_leave.set()  # by the page of the time away
        raise TOO_LARGE

    resident = Told(tmp_path, (pauses, is_in_vain))
    assert asyncio.run(resident.run()) == 0
    assert resident.away_for == ["asked for"] and not resident.notices


def test_nor_does_who_is_cut_off_as_it_leaves_try_elsewhere(tmp_path: Path) -> None:
    async def is_cut_off(daemon: Acting) -> int:
        raise UserError("a peer is gone", exit_code=UNREACHABLE)

    async def pauses_in_a_run(daemon: Acting) -> int:
        daemon.run_digest = "ab" * 32
        return await pauses(daemon)

    resident = Told(tmp_path, (pauses_in_a_run, leaves_as(is_cut_off), ends))
    with pytest.raises(UserError, match="a peer is gone"):
        asyncio.run(resident.run())


def test_the_last_word_of_its_user_tells_whether_it_is_to_leave(tmp_path: Path) -> None:
    daemon = Daemon(Settings(home=tmp_path, run="tiny", **EVER), DashboardHost())
    assert not daemon.is_to_leave
    daemon.pause("asked for")
    assert not daemon.is_to_leave, "it is to come back"
    daemon.leave()
    assert daemon.is_to_leave
