"""A line as a QR code, for a phone or a camera to read."""

import functools
import shutil
import sys

import msgspec
import segno

TEXT_LIMIT = 2900
"""The most characters that fit into the largest code."""
TOO_LONG = "the line is too long for a QR code"
QUIET_ZONE = 4
"""Modules of white around the code, without which readers do not find it."""


class QrPicture(msgspec.Struct, frozen=True):
    """A QR code. `path` draws the dark modules in a square of `size`, its white rim included.
    Without a picture `path` is empty, and `why` says why."""

    size: int = 0
    path: str = ""
    why: str = ""


@functools.lru_cache(maxsize=8)
def qr_picture(text: str) -> QrPicture:
    """The text's QR code, as runs of dark modules, a row at a time."""
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
    """Print the text's QR code in half blocks, or why that cannot be. No camera can read a code
    whose rows the terminal breaks in two."""
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
