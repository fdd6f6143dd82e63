"""What can go wrong between two peers that is nobody's bug: silence, and refusal."""

import re

from p2p_dtfm.core.protocol.errors import PeerFault


class Unreachable(Exception):
    """A peer did not answer in time, or the way to it broke. This is evidence about a link, no
    fault."""

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


def in_plain_words(cause: str) -> str:
    """Why each address of a peer could not be dialled, without p2pd's words around it."""
    reasons = dict.fromkeys(_DIALLED.findall(cause))
    return "; ".join(reason.strip() for reason in reasons) or cause


NO_ANSWER = "no answer within"
NO_CONTENT = "an answer without content"
P2PD_HAS_ENDED = "the libp2p daemon of this peer has ended"


def is_unanswered(cause: str) -> bool:
    """Whether a call only took too long: nothing broke, and the called peer may only be slow."""
    return cause.startswith(NO_ANSWER)


def nobody_listens(cause: str) -> bool:
    """Whether each address of a peer could be called, and refused it: its process has ended."""
    return {reason.strip() for reason in _DIALLED.findall(cause)} == {"connection refused"}


def no_relay_has_it(cause: str) -> bool:
    """Whether a relay answers that it has lost the peer. Then the peer is gone, or has lost its
    relays, and a way through another relay is not worth waiting for."""
    return _NOT_AT_RELAY.search(cause) is not None


_NOT_AT_RELAY = re.compile(r"error opening relay circuit: (CONNECTION_FAILED|NO_RESERVATION)\b")
_DIALLED = re.compile(r"\[/[^\]]+\] [^*]*?([^:*]+)(?=\*|$)")
