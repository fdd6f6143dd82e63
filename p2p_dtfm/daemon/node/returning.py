"""Of a daemon that is away: what is shown, with what it comes back, and when it cannot yet."""

import asyncio
import contextlib
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from p2p_dtfm.core.protocol.errors import UNREACHABLE, DeviceFault, P2pdLost, UserError
from p2p_dtfm.daemon.dashboard.seen import Seen
from p2p_dtfm.daemon.machine.home import Home, fault_of_disk, require_made
from p2p_dtfm.daemon.machine.life import is_a_service, is_begun_by_systemd
from p2p_dtfm.daemon.machine.settings import Settings
from p2p_dtfm.daemon.telemetry.status import State, Status
from p2p_dtfm.ports import now
from p2p_dtfm.web.state import DashboardState, Live

Result = TypeVar("Result")

TRY_AGAIN_S = 300.0
"""To load the program and to come to the others' view costs both: not all the time."""
AT_ONCE_S = 3.0
TOOK_PART_S = 600.0
"""Whose p2pd has ended after less did not gain by coming back at once."""
IN_VAIN = "cannot take part now: "
_OF_NO_USE = 5
"""Exit code: another run is trained there, or none any more."""


def shown_while_away(shown: DashboardState, status: Status, seen: Seen) -> DashboardState:
    """The same, with the present time, day and state, without figures that only training has."""
    before, is_paused = shown.live, status.state is State.PAUSED
    comes_back = "p2p-dtfm resume, or the dashboard's Resume, takes part again"
    live = Live(
        time_s=round(now.wall_s(), 3),
        version=before.version,
        peer_id=before.peer_id,
        name=before.name,
        state=status.state.value,
        reason=status.reason,
        since_s=round(status.since_s, 3),
        step=before.step,
        loss=before.loss,
        held_out_loss=before.held_out_loss,
        committed_here=before.committed_here,
        undone_here=before.undone_here,
        marks=before.marks,
        next=(comes_back,) if is_paused else (),
    )
    return msgspec.structs.replace(shown, live=live, contribution=seen.given())


def away_s(error: UserError | OSError, took_part_s: float) -> float:
    """For how long it stays away."""
    is_at_once = isinstance(error, P2pdLost) and took_part_s >= TOOK_PART_S
    return AT_ONCE_S if is_at_once else TRY_AGAIN_S


def in_vain(
    error: UserError | OSError, home: Path, has_begun: bool, is_watched: bool, pause_s: float
) -> str:
    """Why it stays away once more, where what was in the way may pass: memory that others have, a
    full disk, a port or a device in use, nobody who answers. Empty where another try would come to
    the same, or somebody watches; and for who has begun, perhaps hours ago, unless its device makes
    way, or its p2pd has ended, which is a matter of a new one."""
    if is_watched or (has_begun and not isinstance(error, DeviceFault | P2pdLost)):
        return ""
    if isinstance(error, OSError):
        cause = fault_of_disk(error, home) or str(error)
    else:
        cause = "" if error.exit_code == _OF_NO_USE else error.cause
    when = "at once" if pause_s == AT_ONCE_S else "in 5 minutes, or with p2p-dtfm resume"
    return cause and f"{IN_VAIN}{cause}; tries again {when}"


async def once_home_may_be_used(
    attempt: Callable[[], Awaitable[Result]],
    told_to_leave: asyncio.Event,
    held_up: Callable[[str], None],
) -> Result | None:
    """What comes of it; None for who is told to leave before. A service whose home cannot be used,
    as where its disk is away, says so once, and tries again: systemd would begin it anew twice a
    minute, and its owner be told each time. Raises `UserError`."""
    has_said = False
    while not told_to_leave.is_set():
        try:
            return await attempt()
        except UserError as error:
            if error.exit_code != UNREACHABLE or not is_a_service():
                raise
            if not has_said:
                held_up(f"{IN_VAIN}{error.cause}; tries again every 5 minutes")
            has_said = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(TRY_AGAIN_S):
                await told_to_leave.wait()
    return None


async def acquire(home: Home) -> bool:
    """True, once it is held. Raises `UserError`."""
    if is_begun_by_systemd():  # its disk may have been taken away
        require_made(home.root)
    home.acquire()
    return True


def release_memory() -> None:
    """Where torch was never loaded there is nothing to give back."""
    if "torch" in sys.modules:
        from p2p_dtfm.train.stage import measure

        measure.release_memory()


def to_come_back(settings: Settings, met: tuple[str, ...], run_digest: str) -> Settings:
    """To the run that it was in, which it finds by what its home remembers, or as a newcomer to
    those who were met; a founder's file may be another one by then."""
    if not run_digest or not (settings.run or met or not settings.initial_peers):
        return settings
    changes: dict[str, Any] = {"new": False, "run_digest": run_digest}
    if settings.run:
        changes["run"] = "" if _is_remembered(settings, run_digest) else settings.run
    elif settings.initial_peers:
        changes["initial_peers"] = tuple(dict.fromkeys((*settings.initial_peers, *met)))
    return settings.model_copy(update=changes)


def _is_remembered(settings: Settings, run_digest: str) -> bool:
    from p2p_dtfm.daemon.peers.home_memory import read_memory  # loaded by whoever took part

    return read_memory(Home(settings.home).run_directory(run_digest)) is not None
