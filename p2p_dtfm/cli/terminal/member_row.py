"""A member as a row of a table: its device, its layers and its links."""

from typing import Any

from p2p_dtfm.cli.terminal.plain import SHORT_CHARACTERS, plain

COLUMNS = ("peer", "device", "memory", "block fwd+bwd", "layers", "links")


def row_of(member: dict[str, Any], ids: bool) -> tuple[str, ...]:
    """`ids`: peers by their ids, not their names."""
    device, links = member["device"], member["links"].values()
    block_ms = (device["block"]["forward_ns"] + device["block"]["backward_ns"]) / 1e6
    layers = member["layers"]
    rates = [link["bytes_per_s"] / 1e6 for link in links]
    return (
        member["peer_id"] if ids else plain(member["name"], SHORT_CHARACTERS),
        plain(f"{device['kind']}, {device['name']}", SHORT_CHARACTERS),
        f"{device['memory_bytes'] / (1 << 30):.1f} GiB",
        f"{block_ms:.1f} ms",
        f"{layers[0]}-{layers[-1]}" if layers else "spare",
        f"{min(rates):.0f}-{max(rates):.0f} MB/s" if rates else "none measured",
    )
