"""The commands; all but the daemon itself are thin clients."""

import contextlib
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

OLDEST_PYTHON = (3, 11)


def python_fault(version: "Sequence[Any]", oldest: "tuple[int, int]" = OLDEST_PYTHON) -> str:
    """In one sentence, why this Python will not do; empty if it will. Older versions of Python must
    be able to read this file."""
    if tuple(version[:2]) >= oldest:
        return ""
    needed, found = ".".join(map(str, oldest)), ".".join(map(str, version[:3]))
    return (
        f"error: p2p-dtfm needs Python {needed} or later and this is {found}: install it, then "
        f"type pipx install --python python{needed} FILE.whl, with the wheel that you were given"
    )


def system_fault(system: str) -> str:
    """In one sentence, why this system will not do; empty if it will. A daemon needs from its first
    second on what other systems lack."""
    if system == "linux":
        return ""
    return (
        f"error: p2p-dtfm needs Linux and this is {system}: start it on a machine with Linux; on "
        "Windows, WSL2 may do, and has not been tested"
    )


def open_closed_streams() -> None:
    """Open standard input, output and errors where whoever starts this program has closed them.
    Otherwise the next file that is opened, such as a checkpoint, would get what is meant for them.
    Letters that the terminal does not have are written as their numbers."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free descriptor
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, mode, closefd=False))
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    has_all_letters = "utf" in str(sys.stdout.encoding).lower()
    if reconfigure is not None and (sys.stdout.errors == "strict" or not has_all_letters):
        reconfigure(errors="backslashreplace")


def main() -> None:
    """The program. A `UserError` is shown as its cause and fixes, never as a traceback."""
    fault = python_fault(sys.version_info) or system_fault(sys.platform)
    if fault:
        print(fault, file=sys.stderr)
        raise SystemExit(2)
    open_closed_streams()
    from p2p_dtfm.core.protocol.errors import UserError
    from p2p_dtfm.ports.ctrl_c import ends_at_once, heed_as_the_first

    heed_as_the_first()
    try:
        with ends_at_once():
            from p2p_dtfm.cli.app import app
        app(prog_name="p2p-dtfm")
    except UserError as error:
        _end_with(error)
    except (ImportError, OSError) as error:  # a command imports what it needs when it runs
        from p2p_dtfm.ports.packages import of_an_import

        if (not_there := of_an_import(error)) is None:
            raise
        _end_with(not_there)


def _end_with(error: Any) -> NoReturn:
    from p2p_dtfm.cli.terminal.plain import harmless_lines

    with contextlib.suppress(OSError):  # whoever reads no words still has the exit code
        print(harmless_lines(f"error: {error.render()}"), file=sys.stderr)
    _drop_what_nobody_takes()
    raise SystemExit(error.exit_code) from None


def _drop_what_nobody_takes() -> None:
    """Drop what is left to print where it cannot be printed, as on a full disk. Python would try
    again at the end, print an exception of its own, and end with another exit code."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)
