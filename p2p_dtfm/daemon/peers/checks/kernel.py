"""What this kernel lets one connection carry over a long way."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from p2p_dtfm.core.protocol.facts.in_words import bytes_text, rate_text
from p2p_dtfm.daemon.peers.checks.check import Check, Grade

SETTINGS = Path("/proc/sys/net/ipv4")
PAYLOAD = 0.5
"""Share of a buffer that holds data, about. The rest is what the kernel keeps of each packet."""
GROWTH = 2
"""How much more than measured a link may carry: a small buffer holds back its measurement too."""
WANTED_BYTES_PER_S, WANTED_S = 125_000_000, 0.1
"""A wanted way: 1 Gbit/s over 100 ms. Few have more."""
BUFFER_LIMIT_BYTES = 256 << 20
BBR = "bbr"


@dataclass(frozen=True)
class MeasuredWay:
    """The way to another member, as this machine measured it."""

    bytes_per_s: int
    round_trip_s: float

    @property
    def in_flight_bytes(self) -> float:
        return self.bytes_per_s * self.round_trip_s


def check_kernel(ways: Sequence[MeasuredWay], settings: Path = SETTINGS) -> Check:
    """Check the kernel's buffers. Too small for a measured way is worth a warning; too small for
    the wanted one, a hint."""
    try:
        control = (settings / "tcp_congestion_control").read_text().strip()
        controls = (settings / "tcp_available_congestion_control").read_text().split()
        buffers = {
            name: [int(size) for size in (settings / name).read_text().split()]
            for name in ("tcp_rmem", "tcp_wmem")
        }
        largest_bytes = min(sizes[2] for sizes in buffers.values())
    except (OSError, ValueError, IndexError):
        return Check("kernel", Grade.SKIPPED, "this system does not say how it sends over TCP")
    way = max(ways, key=lambda way: way.in_flight_bytes, default=None)
    wanted_bytes = WANTED_BYTES_PER_S * WANTED_S
    needed_bytes = _buffer_bytes(wanted_bytes if way is None else way.in_flight_bytes * GROWTH)
    carries = int(largest_bytes * PAYLOAD / WANTED_S)
    found = (
        f"congestion control {control}; a buffer of {bytes_text(largest_bytes)} carries "
        f"{rate_text(carries)} over {WANTED_S * 1e3:.0f} ms in one connection"
    )
    line = _sysctl(buffers, needed_bytes, BBR if control != BBR and BBR in controls else "")
    facts: dict[str, object] = {
        "congestion_control": control,
        "largest_buffer_bytes": largest_bytes,
        "needed_buffer_bytes": needed_bytes,
    }
    fix = f"{line}  (in a file of /etc/sysctl.d it lasts)" if line else ""
    if largest_bytes >= needed_bytes:
        return Check("kernel", Grade.OK, found, fix, facts)
    if way is None:
        aim = f"{rate_text(WANTED_BYTES_PER_S)}, if your line has it: {line}"
        return Check("kernel", Grade.OK, f"{found}; for {aim}", fix, facts)
    found += (
        f"; a way of yours has {rate_text(way.bytes_per_s)} over {way.round_trip_s * 1e3:.0f} ms "
        "and may be held back"
    )
    return Check("kernel", Grade.WARNING, found, fix, facts)


def ways_of(members: object, peer_id: object) -> list[MeasuredWay]:
    """Ways to members that this machine has measured itself, out of what a daemon says of its
    members."""
    own = [it for it in members if it["peer_id"] == peer_id] if isinstance(members, list) else []
    links = own[0]["links"].values() if own else ()
    return [MeasuredWay(link["bytes_per_s"], link["round_trip_ns"] / 1e9) for link in links]


def _buffer_bytes(in_flight_bytes: float) -> int:
    """The buffer that holds so much in flight, as a power of two."""
    needed = min(in_flight_bytes / PAYLOAD, BUFFER_LIMIT_BYTES)
    return 1 << max(0, int(needed) - 1).bit_length()


def _sysctl(buffers: dict[str, list[int]], needed_bytes: int, control: str) -> str:
    """The sysctl line to type; empty where nothing is to be changed."""
    changes = [
        f"net.ipv4.{name}='{sizes[0]} {sizes[1]} {needed_bytes}'"
        for name, sizes in buffers.items()
        if sizes[2] < needed_bytes
    ]
    changes += [f"net.ipv4.tcp_congestion_control={control}"] if control else []
    return f"sudo sysctl -w {' '.join(changes)}" if changes else ""
