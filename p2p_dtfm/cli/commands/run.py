"""The daemon in the foreground."""

import logging
import sys
from collections.abc import Sequence
from typing import TextIO

from rich.console import Console

from p2p_dtfm.cli.terminal.live_view import live_view
from p2p_dtfm.cli.terminal.logs import set_up_logging
from p2p_dtfm.cli.terminal.mistyped import fault_of_path
from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.daemon.machine.away import Away, StepAside
from p2p_dtfm.daemon.machine.devices.shares import devices_of, is_several
from p2p_dtfm.daemon.machine.home import fault_of_home, is_full, require_made
from p2p_dtfm.daemon.machine.life import code_of_what_may_pass, is_begun_by_systemd
from p2p_dtfm.daemon.machine.owner.allowed import left_out
from p2p_dtfm.daemon.machine.settings import Settings, given_zeros
from p2p_dtfm.daemon.node.resident import Resident
from p2p_dtfm.daemon.peers.guests.pasted_line import with_invitation
from p2p_dtfm.net import event_loop

_FIXES_OF_HOME = (
    "see that it is what the daemon made, is yours and may be written to: ls -ld on it and above",
    "if it is in the way, move it aside and start again",
    "choose another --home",
)


def run_daemon(settings: Settings) -> int:
    """Run until the end; returns the exit code: 1 for an unforeseen error, which is logged
    whole."""
    given, settings = settings, with_invitation(settings)
    forgotten = left_out(given)
    if is_begun_by_systemd():
        require_made(settings.home)
    if is_several(settings.device):
        from p2p_dtfm.daemon.machine.devices.several import SeveralDevices
        from p2p_dtfm.daemon.peers.recall import recall  # a return from a pause needs neither

        recall(settings)  # what is mistyped is told before anything is begun
        devices = devices_of(settings.device)
        if len(devices) > 1:
            if forgotten:
                print(forgotten, file=sys.stderr)
            return SeveralDevices(given, devices, sys.stdout, sys.stderr).run()
        settings = settings.model_copy(update={"device": devices[0]})
    resident = Resident(settings, steps_aside=True)
    return _run(resident, settings, given_zeros(settings), forgotten)


def go_on(away: Away) -> int:
    """Take the place of a daemon that has paused; returns the exit code."""
    settings = Settings.model_validate(away.settings)
    return _run(Resident(settings, steps_aside=True, away=away), settings)


def _run(
    resident: Resident, settings: Settings, remarks: Sequence[str] = (), forgotten: str = ""
) -> int:
    handler = set_up_logging(settings.log, str if settings.ids else resident.named)
    if forgotten:
        logging.getLogger("p2p_dtfm").warning("%s", forgotten)
    for remark in remarks:
        logging.getLogger("p2p_dtfm").info("%s", remark)
    try:
        return _to_the_end(resident, settings, handler)
    except UserError:
        raise
    except KeyboardInterrupt:
        return 130
    except Exception as error:  # the daemon's last resort: say what happened, and end with code 1
        if isinstance(error, OSError) and is_full(error):
            raise UserError(
                f"a disk is full: {error}",
                f"free space on the disk of {settings.home}",
                code_of_what_may_pass(),
            ) from error
        if isinstance(error, OSError) and (cause := fault_of_home(error, settings.home)):
            raise UserError(cause, _FIXES_OF_HOME, code_of_what_may_pass()) from error
        if isinstance(error, OSError) and (mistyped := fault_of_path(error)):
            raise mistyped from error
        logging.getLogger("p2p_dtfm").exception("this is a bug; please report it with this text")
        return 1


def _to_the_end(
    resident: Resident, settings: Settings, handler: "logging.StreamHandler[TextIO]"
) -> int:
    try:
        return _live(resident, settings, handler)
    except StepAside as pause:
        if pause.is_told_to_leave():
            return 0
        try:
            pause.take_place()
        except OSError as error:
            log = logging.getLogger("p2p_dtfm")
            log.warning("the memory of the program itself stays in use while paused: %s", error)
        stays = Resident(settings, away=pause.away)
        return _live(stays, settings, handler)


def _live(resident: Resident, settings: Settings, handler: "logging.StreamHandler[TextIO]") -> int:
    seen = _seen(resident, settings, handler)
    return event_loop.run(seen)


async def _seen(
    resident: Resident, settings: Settings, handler: "logging.StreamHandler[TextIO]"
) -> int:
    if settings.log == "json" or not sys.stderr.isatty():
        return await resident.run()
    async with live_view(resident.state, Console(stderr=True), handler):
        return await resident.run()
