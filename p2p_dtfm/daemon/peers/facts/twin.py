"""Another daemon with this peer's own identity, elsewhere: a home was copied, and both run."""

from collections.abc import Iterable
from pathlib import Path

from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.core.protocol.snapshot import Member
from p2p_dtfm.net.directory.directory import PRESENCE_TTL_S
from p2p_dtfm.net.directory.values import Presence

DOUBT_S = 10.0
"""What was published so soon after this daemon began may be its predecessor's last word: clocks
differ, and a life whose number was lost may be followed by a lower one."""


def require_no_twin(
    present: Iterable[Presence], me: Member, began_s: float, identity: Path
) -> None:
    """Two that speak as one peer tear a swarm apart: each is taken for the other, and members come
    to agree with one and send to the other. All hear the newest life only, so the older one goes.
    A presence is signed, so nobody but a holder of the key can make this one end.

    `began_s`: Unix time when this daemon began. Raises `UserError` with exit code 3.
    """
    for presence in present:
        published_s = presence.expires_ms / 1000 - PRESENCE_TTL_S
        is_alive = published_s > began_s + DOUBT_S
        if presence.peer_id == me.peer_id and presence.life > me.life and is_alive:
            where = next(iter(presence.addresses), "an unknown address")
            raise UserError(
                f"another daemon speaks as this very peer (at {where}, begun later): one of the "
                "two homes is a copy",
                (
                    f"to be another peer here: remove {identity}, and start again",
                    "if the daemon was moved there: nothing, it goes on there",
                ),
                exit_code=3,
            )
