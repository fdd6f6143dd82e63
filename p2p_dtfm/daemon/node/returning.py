"""For a daemon that is away: what is shown, with which settings it comes back, and when it cannot
yet."""

import asyncio
import contextlib
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from p2p_dtfm.core.protocol.errors import UNREACHABLE, DeviceFault, P2pdLost, UserError
from p2p_dtfm.daemon.dashboard.seen import Seen
from p2p_dtfm.daemon.machine.home import Home, fault_of_disk, place_of_run, require_made
from p2p_dtfm.daemon.machine.life import is_a_service, is_begun_by_systemd
from p2p_dtfm.daemon.machine.settings import Settings
from p2p_dtfm.daemon.telemetry.status import State, Status
from p2p_dtfm.ports import now
from p2p_dtfm.web.state import DashboardState, Live, Problem

Result = TypeVar("Result")

TRY_AGAIN_S = 300.0
"""The pause after a try in vain. Each try loads the program and costs the others a view, so tries
are rare."""
AT_ONCE_S = 3.0
TOOK_PART_S = 600.0
"""How long a daemon must have taken part to come back at once after its p2pd ended. After less,
another return at once would gain nothing."""
IN_VAIN = "cannot take part now: "
AGAIN = "; tries again "
_OF_NO_USE = 5
"""Exit code of a run that cannot be joined: another run is trained there, or none any more."""


def shown_while_away(shown: DashboardState, status: Status, seen: Seen) -> DashboardState:
    """What was shown before, with the present time, day and state, and without figures that only
    training has."""
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
        problems=problems_while_away(status),
    )
    return msgspec.structs.replace(shown, live=live, contribution=seen.given())


def problems_while_away(status: Status) -> tuple[Problem, ...]:
    """What keeps the daemon away, where it would take part. A pause that somebody wants is no
    problem."""
    if status.state is not State.PAUSED or not status.reason.startswith(IN_VAIN):
        return ()
    what, _, when = status.reason.rpartition(AGAIN)
    fix = f"nothing, if it passes; else see to that: it tries again {when}"
    return (Problem(what, fix, IN_VAIN),)


def away_s(error: UserError | OSError, took_part_s: float) -> float:
    """How long the daemon stays away after this error."""
    is_at_once = isinstance(error, P2pdLost) and took_part_s >= TOOK_PART_S
    return AT_ONCE_S if is_at_once else TRY_AGAIN_S


def in_vain(
    error: UserError | OSError, home: Path, has_begun: bool, is_watched: bool, pause_s: float
) -> str:
    """Why the daemon stays away once more, in words; empty if it does not. It does where the fault
    may pass: memory that others use, a full disk, a port or a device in use, nobody who answers.

    The text is empty where another try would fail alike, or where somebody watches. It is also
    empty if the daemon had begun, perhaps hours ago. The exceptions are a device that failed or
    has no memory left, and a p2pd that has ended: either may pass.
    """
    if is_watched or (has_begun and not isinstance(error, DeviceFault | P2pdLost)):
        return ""
    if isinstance(error, OSError):
        cause = fault_of_disk(error, home) or str(error)
    else:
        cause = "" if error.exit_code == _OF_NO_USE else error.cause
    when = "at once" if pause_s == AT_ONCE_S else "in 5 minutes, or with p2p-dtfm resume"
    return cause and f"{IN_VAIN}{cause}{AGAIN}{when}"


async def once_home_may_be_used(
    attempt: Callable[[], Awaitable[Result]],
    told_to_leave: asyncio.Event,
    held_up: Callable[[str], None],
) -> Result | None:
    """The result of `attempt`; None if the daemon is told to leave before. A service whose home
    cannot be used, as where its disk is away, says so once and tries again. Otherwise systemd would
    begin it anew twice a minute, and tell its owner each time. Raises `UserError`."""
    has_said = False
    while not told_to_leave.is_set():
        try:
            return await attempt()
        except UserError as error:
            if error.exit_code != UNREACHABLE or not is_a_service():
                raise
            if not has_said:
                held_up(f"{IN_VAIN}{error.cause}{AGAIN}every 5 minutes")
            has_said = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(TRY_AGAIN_S):
                await told_to_leave.wait()
    return None


async def acquire(home: Home, was_held: bool) -> bool:
    """Take the home's lock; returns True. `was_held`: this process had it before. Raises
    `UserError`."""
    if was_held or is_begun_by_systemd():  # the disk may have been taken away
        require_made(home.root, was_held)
    home.acquire()
    return True


def release_memory() -> None:
    """Give memory back, where torch was loaded."""
    if "torch" in sys.modules:
        from p2p_dtfm.train.stage import measure

        measure.release_memory()


def to_come_back(settings: Settings, met: tuple[str, ...], run_digest: str) -> Settings:
    """The settings to come back to the same run. The home's memory leads there, or the peers that
    were met, where this one is a newcomer. A founder's file may be another one by then."""
    if not run_digest or not (settings.run or met or not settings.initial_peers):
        return settings
    changes: dict[str, Any] = {"new": False, "run_digest": run_digest}
    if settings.run:
        changes["run"] = "" if _is_remembered(settings, run_digest) else settings.run
    elif settings.initial_peers:
        changes["initial_peers"] = tuple(dict.fromkeys((*settings.initial_peers, *met)))
    return settings.model_copy(update=changes)


def _is_remembered(settings: Settings, run_digest: str) -> bool:
    from p2p_dtfm.daemon.peers.home_memory import read_memory  # loaded before, by taking part

    return read_memory(place_of_run(Home(settings.home).root, run_digest)) is not None
