"""A member as a row of a table: its device, its layers and its links."""

from typing import Any

from p2p_dtfm.cli.terminal.plain import SHORT_CHARACTERS, plain
from p2p_dtfm.core.protocol.facts.in_words import bytes_text, rate_text

COLUMNS = ("peer", "device", "memory", "block fwd+bwd", "layers", "links")


def row_of(member: dict[str, Any], ids: bool) -> tuple[str, ...]:
    """`ids`: peers by their ids, not their names."""
    device, links = member["device"], member["links"].values()
    block_ms = (device["block"]["forward_ns"] + device["block"]["backward_ns"]) / 1e6
    layers = member["layers"]
    rates = [link["bytes_per_s"] for link in links]
    return (
        member["peer_id"] if ids else plain(member["name"], SHORT_CHARACTERS),
        plain(f"{device['kind']}, {device['name']}", SHORT_CHARACTERS),
        bytes_text(device["memory_bytes"]),
        f"{block_ms:.1f} ms",
        f"{layers[0]}-{layers[-1]}" if layers else "spare",
        _rates_text(rates),
    )


def _rates_text(rates: list[int]) -> str:
    """The slowest and the fastest."""
    if not rates:
        return "none measured"
    slowest, fastest = rate_text(min(rates)), rate_text(max(rates))
    return slowest if slowest == fastest else f"{slowest} to {fastest}"
