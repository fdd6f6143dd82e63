"""What a process hands to the one that takes its place for the time of a pause.

A process that has trained keeps what torch and libp2p have loaded for as long as it lives. So it
makes room for a small program. That runs in the same process, under its number and for whoever
started it. It keeps the home and answers until it is told to take part again.
"""

import contextlib
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import msgspec

import p2p_dtfm
from p2p_dtfm.daemon.machine.life import RESUMED_S
from p2p_dtfm.daemon.machine.settings import Settings
from p2p_dtfm.ports import now
from p2p_dtfm.ports.packages import python_command
from p2p_dtfm.web.state import DashboardState, Live

MODULE = "p2p_dtfm.cli.commands.away"
AFRESH: dict[str, Any] = {"reason": "its program was replaced: begins afresh", "until_s": RESUMED_S}
"""Why and until when a process steps aside that would still load code of another version."""


def _stamp(program: Path = Path(p2p_dtfm.__file__)) -> tuple[int, int] | None:
    """A mark of the program's files, which an upgrade writes anew; None while an upgrade has not
    got to this one."""
    try:
        status = program.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino


_BEGUN_AS = _stamp()


def is_replaced() -> bool:
    """Whether the program on disk is another one than this process was begun with."""
    stamp = _stamp()
    return stamp is not None and stamp != _BEGUN_AS


class Away(msgspec.Struct, frozen=True):
    """What outlives the change of program."""

    settings: dict[str, Any]
    """The settings that the daemon was started with."""
    come_back: dict[str, Any]
    """The settings to take part again with."""
    reason: str
    by_itself: bool
    """Whether the pause ends once the hours begin again, or the machine's owner no longer needs
    it."""
    status: dict[str, Any]
    """The last status that the daemon told."""
    shown: DashboardState
    port: int | None
    """The dashboard's port, where open pages find it again."""
    listener: int | None = None
    """A descriptor that listens at that port all the time."""
    until_s: float | None = None
    """When the pause ends by itself, by the wall clock."""


class StepAside(Exception):
    """A pause begins, and all but the process itself is closed."""

    def __init__(self, away: Away, is_told_to_leave: Callable[[], bool] = lambda: False) -> None:
        """`is_told_to_leave`: whether the process was told to end since. Closing takes a while."""
        self.away = away
        self.is_told_to_leave = is_told_to_leave
        super().__init__(away.reason)

    def take_place(self) -> NoReturn:
        """Go on as the small program. Raises `OSError` where that cannot be."""
        with tempfile.TemporaryFile() as file:
            file.write(msgspec.json.encode(self.away))
            file.flush()
            os.set_inheritable(file.fileno(), True)
            if self.away.listener is not None:
                os.set_inheritable(self.away.listener, True)
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError):  # its terminal may be closed by now
                    stream.flush()
            os.execv(sys.executable, _command(file.fileno(), str(self.away.settings["home"])))


def _command(descriptor: int, home: str) -> list[str]:
    """The command of the small program. It names the home for people who look for the process."""
    return python_command("-m", MODULE, str(descriptor), "--home", home)


class _OfAnyVersion(msgspec.Struct, frozen=True):
    """What matters of an `Away` of another version: not what was shown."""

    settings: dict[str, Any]
    come_back: dict[str, Any]
    reason: str
    by_itself: bool
    port: int | None = None
    listener: int | None = None
    until_s: float | None = None


def received(descriptor: int) -> Away:
    """What the process before this one has left, which may be of another version."""
    with os.fdopen(descriptor, "rb") as file:
        file.seek(0)
        payload = file.read()
    try:
        return msgspec.json.decode(payload, type=Away)
    except msgspec.ValidationError:
        left = msgspec.json.decode(payload, type=_OfAnyVersion)
    live = Live(now.wall_s(), p2p_dtfm.__version__, "", "paused", left.reason, now.wall_s())
    return Away(
        settings=_known(left.settings),
        come_back=_known(left.come_back),
        reason=left.reason,
        by_itself=left.by_itself,
        status={},
        shown=DashboardState(live),
        port=left.port,
        listener=left.listener,
        until_s=left.until_s,
    )


def _known(settings: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name in Settings.model_fields}


def as_plain(settings: Settings) -> dict[str, Any]:
    """The settings as plain data. Another version validates them again, and what nobody has set
    stays unset."""
    return {"home": str(settings.home), **settings.model_dump(mode="json", exclude_unset=True)}
