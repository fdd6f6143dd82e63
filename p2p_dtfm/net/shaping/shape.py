"""What all peers of a shaped swarm are told: who plays whom, and the links between them."""

from pathlib import Path

import msgspec

from p2p_dtfm.core.protocol.errors import UserError

PEERS_LIMIT = 1024
FILE_LIMIT_BYTES = 64 << 20


class ShapedPeer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A peer of a scenario and the identity that plays it. A rate of 0 is no limit."""

    name: str
    peer_id: str
    uplink_bytes_per_s: int = 0
    downlink_bytes_per_s: int = 0


class ShapedLink(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The way from one peer to another, by their ids. `latency_ns` is one way; a rate of 0 is no
    limit. What is sent while the way is `cut` waits. When `corrupted` grows, one byte of what is
    sent next over a stream arrives changed. This happens once for each number among all ways of an
    origin, and only if something is sent soon."""

    origin: str
    to: str
    latency_ns: int
    bytes_per_s: int
    cut: bool = False
    corrupted: int = 0


class Shape(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What all peers of a shaped swarm are told: one file, the same for each of them."""

    scenario: str
    peers: tuple[ShapedPeer, ...]
    links: tuple[ShapedLink, ...]

    def save(self, path: Path) -> Path:
        """Write the file. Daemons that follow it see the old shape or the new one, never half of
        it."""
        temporary = path.with_suffix(".new")
        temporary.write_bytes(msgspec.json.encode(self))
        temporary.replace(path)
        return path

    @classmethod
    def load(cls, path: Path) -> "Shape":
        """Read the file. Raises `UserError`."""
        fix = "give a file that `p2p-dtfm demo --scenario` wrote"
        try:
            if path.stat().st_size > FILE_LIMIT_BYTES:
                raise UserError(f"{path} is larger than {FILE_LIMIT_BYTES} bytes", fix)
            shape = msgspec.json.decode(path.read_bytes(), type=cls)
        except OSError as error:
            raise UserError(f"cannot read the shape file {path}: {error.strerror}", fix) from error
        except msgspec.MsgspecError as error:
            raise UserError(f"{path} is no shape file: {error}", fix) from error
        wrong = any(link.latency_ns < 0 or link.bytes_per_s < 0 for link in shape.links)
        if wrong or len(shape.peers) > PEERS_LIMIT:
            raise UserError(f"{path} is no shape file: a number in it is out of range", fix)
        return shape
