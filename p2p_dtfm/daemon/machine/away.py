"""What a process hands to the one that takes its place for the time of a pause.

A process that has trained keeps what torch and libp2p have loaded for as long as it lives. So it
makes room for a small one: the same process, by its number and for whoever started it, with another
program in it, that keeps the home and answers until it is told to take part again.
"""

import contextlib
import os
import sys
import tempfile
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
"""For what a process steps aside that would load the rest of another version than it is of."""


def _stamp(program: Path = Path(p2p_dtfm.__file__)) -> tuple[int, int] | None:
    """An upgrade writes all files anew; None while it has not got to this one."""
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
    """All that outlives the exchange."""

    settings: dict[str, Any]
    """As the daemon was started."""
    come_back: dict[str, Any]
    """The settings to take part again with."""
    reason: str
    by_itself: bool
    """It ends when the hours begin again, or the owner of the machine needs it no more."""
    status: dict[str, Any]
    """What the daemon told last."""
    shown: DashboardState
    port: int | None
    """The dashboard's: open pages find it again."""
    listener: int | None = None
    """A descriptor that listens there all the time."""
    until_s: float | None = None
    """When the pause ends by itself, by the clock on the wall."""


class StepAside(Exception):
    """A pause begins, and everything but this is closed."""

    def __init__(self, away: Away) -> None:
        self.away = away
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
    """The home stands there for people who look for the process."""
    return python_command("-m", MODULE, str(descriptor), "--home", home)


class _OfAnyVersion(msgspec.Struct, frozen=True):
    """What matters of an `Away`: not what was shown."""

    settings: dict[str, Any]
    come_back: dict[str, Any]
    reason: str
    by_itself: bool
    port: int | None = None
    listener: int | None = None
    until_s: float | None = None


def received(descriptor: int) -> Away:
    """What the process before this one has left; it may have been one of another version."""
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
    """To be validated again on the other side, where what nobody has set is not set either."""
    return {"home": str(settings.home), **settings.model_dump(mode="json", exclude_unset=True)}
