"""What can go wrong between two peers that is nobody's bug: silence, and refusal."""

from p2p_dtfm.core.errors import PeerFault


class Unreachable(Exception):
    """A peer did not answer in time, or the way to it broke. Evidence about a link, no fault."""

    def __init__(self, peer_id: str, cause: str) -> None:
        self.peer_id = peer_id
        self.cause = cause
        super().__init__(f"{peer_id}: {cause}")


class Refused(PeerFault):
    """The other side answered, and its answer is no. `cause` is its reason, cut to a line."""


def one_line(text: str, limit: int = 300) -> str:
    """Text that a stranger chose, made safe for a log line: printable and short."""
    cleaned = "".join(char if char.isprintable() else " " for char in text)
    return cleaned if len(cleaned) <= limit else cleaned[: limit - 1] + "…"
