"""Members as a table: as much of each as the terminal has room for."""

from collections.abc import Callable, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from p2p_dtfm.cli.terminal.plain import SHORT_CHARACTERS, plain
from p2p_dtfm.core.protocol.facts.in_words import bytes_text, rate_text, span_text

NARROW_BELOW = 90
"""Columns of a terminal. On a narrower one a table leaves out what it can, and cuts no word."""
LISTED_BELOW = 60
"""Columns of a terminal. A narrower one would cut a table, so members are listed."""
SPARE, NONE = "spare", "none"
"""What stands for the layers of a member that has none: where nobody has, there is no plan, and
nobody is a spare."""
NAME_WIDTH = 18
"""Least width of names, if a name is as long. It fits the longest name that an identity makes, and
a third of an id."""
NAME_PART = 5
"""On a wide terminal names get this part of all columns."""


def member_table(
    members: Sequence[dict[str, Any]],
    last: tuple[str, Callable[[dict[str, Any]], str]],
    ids: bool,
    width: int,
) -> Table:
    """`last`: the heading of one more column, and a function that gives its text for a member.
    `ids`: show peers by id, not by name. `width`: columns of the terminal."""
    idle = SPARE if any(member["layers"] for member in members) else NONE
    rows = [(*_row_of(member, ids, idle), last[1](member)) for member in members]
    if width < LISTED_BELOW:
        return _listed(rows)
    widest = max((len(row[0]) for row in rows), default=len("peer"))
    name_width = min(widest, max(NAME_WIDTH, width // NAME_PART))
    is_narrow = width < NARROW_BELOW
    table = _narrow(name_width) if is_narrow else _wide(name_width)
    table.add_column("memory", no_wrap=True)
    table.add_column("block\nfwd+bwd" if is_narrow else "block fwd+bwd", no_wrap=is_narrow)
    table.add_column("layers", no_wrap=True)
    table.add_column("links")
    if not is_narrow:
        table.add_column(last[0])
    for name, device, *others, rest in rows:
        cells = (name, *others) if is_narrow else (name, device, *others, rest)
        table.add_row(*map(Text, cells))
    return table


def _listed(rows: Sequence[tuple[str, ...]]) -> Table:
    """The members as a list, as for a phone: it needs no room for columns."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(overflow="fold")
    for name, _, memory, block, layers, links, _ in rows:
        held = layers if layers == SPARE else "no layers" if layers == NONE else f"layers {layers}"
        lines = (name, f"  {memory}, {held}", f"  block fwd+bwd {block}", f"  links {links}")
        table.add_row(Text("\n".join(lines)))
    return table


def _narrow(name_width: int) -> Table:
    """A table without devices: only the links may need a second line."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("peer", width=name_width, overflow="fold")
    return table


def _wide(name_width: int) -> Table:
    table = Table()
    table.add_column("peer", width=name_width, overflow="fold")
    table.add_column("device")
    return table


def _row_of(member: dict[str, Any], ids: bool, idle: str) -> tuple[str, ...]:
    device, links = member["device"], member["links"].values()
    block_ms = (device["block"]["forward_ns"] + device["block"]["backward_ns"]) / 1e6
    layers = member["layers"]
    rates = [link["bytes_per_s"] for link in links]
    return (
        member["peer_id"] if ids else plain(member["name"], SHORT_CHARACTERS),
        plain(f"{device['kind']}, {device['name']}", SHORT_CHARACTERS),
        bytes_text(device["memory_bytes"]),
        f"{block_ms:,.1f} ms",
        span_text(layers[0], layers[-1] + 1) if layers else idle,
        _rates_text(rates),
    )


def _rates_text(rates: list[int]) -> str:
    """The slowest and the fastest rate, as text."""
    if not rates:
        return "none measured"
    slowest, fastest = rate_text(min(rates)), rate_text(max(rates))
    return slowest if slowest == fastest else f"{slowest} to {fastest}"
