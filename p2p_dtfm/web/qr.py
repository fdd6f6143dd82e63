"""A line as a QR code, for a phone or a camera to read."""

import functools
import shutil
import sys

import msgspec
import segno

TEXT_LIMIT = 2900
"""More does not fit into the largest code."""
TOO_LONG = "the line is too long for a QR code"
QUIET_ZONE = 4
"""Modules of white around it, without which readers do not find it."""


class QrPicture(msgspec.Struct, frozen=True):
    """`path` draws the dark modules in a square of `size`, its white rim included; empty where
    there is no picture, and `why` says so."""

    size: int = 0
    path: str = ""
    why: str = ""


@functools.lru_cache(maxsize=8)
def qr_picture(text: str) -> QrPicture:
    """Runs of dark modules, a row at a time."""
    if len(text) > TEXT_LIMIT:
        return QrPicture(why=TOO_LONG)
    rows = [bytes(row) for row in segno.make(text, error="l", micro=False).matrix]
    parts = []
    for y, row in enumerate(rows):
        x = 0
        while x < len(row):
            dark = len(row[x:]) - len(row[x:].lstrip(b"\1"))
            if dark:
                parts.append(f"M{x + QUIET_ZONE} {y + QUIET_ZONE}h{dark}v1h-{dark}z")
            x += dark + 1
    return QrPicture(len(rows) + 2 * QUIET_ZONE, "".join(parts))


def qr_in_terminal(text: str) -> None:
    """Printed with half blocks, or why it cannot be: of a row that the terminal breaks in two no
    camera makes sense."""
    if len(text) > TEXT_LIMIT:
        print(TOO_LONG)
        return
    code = segno.make(text, error="l")
    needed, columns = code.symbol_size()[0], shutil.get_terminal_size().columns
    if sys.stdout.isatty() and needed > columns:
        print(
            f"its QR code is {needed} columns wide, and this terminal has {columns}: make it "
            "wider, or its letters smaller, and type this again"
        )
        return
    code.terminal(compact=True)
