"""Another daemon with this peer's own identity, elsewhere: a home was copied, and both run."""

from collections.abc import Iterable
from pathlib import Path

from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.core.protocol.snapshot import Member
from p2p_dtfm.net.directory.directory import PRESENCE_TTL_S
from p2p_dtfm.net.directory.values import Presence

DOUBT_S = 10.0
"""A presence published so soon after this daemon began may be its predecessor's last word. Clocks
differ, and a life whose number was lost may be followed by a lower one."""


class Twin:
    """Ends this daemon if a newer one speaks with its identity.

    Two that speak as one peer tear a swarm apart. Each is taken for the other, and members agree
    with one and send to the other. All hear the newest life only, so the older daemon goes. A
    presence is signed, so only a holder of the key can make this daemon end.
    """

    def __init__(self, identity: Path) -> None:
        self._identity = identity
        self._first_ms: dict[int, int] = {}
        """By life: when the presence ends that this daemon has seen first of that life."""

    def require_none(
        self, present: Iterable[Presence], me: Member, began_s: float, now_s: float
    ) -> None:
        """Raises `UserError`, exit code 3, if a newer daemon speaks as this peer. `me`: with the
        life that this daemon speaks in. `began_s`: Unix time when it began."""
        for presence in present:
            if presence.peer_id != me.peer_id or presence.life <= me.life:
                continue
            if not self._is_alive(presence, began_s, now_s):
                continue
            where = next(iter(presence.addresses), "an unknown address")
            raise UserError(
                f"another daemon speaks as this very peer (at {where}, begun later): one of the "
                "two homes is a copy",
                (
                    f"to be another peer here: remove {self._identity}, and start again",
                    "if the daemon was moved there: nothing, it goes on there",
                ),
                exit_code=3,
            )

    def _is_alive(self, presence: Presence, began_s: float, now_s: float) -> bool:
        """Whether a presence is of a daemon that lives. One from the future was published while a
        clock was ahead, perhaps by a predecessor whose home is gone. There a daemon only counts as
        alive once it publishes again."""
        published_s = presence.expires_ms / 1000 - PRESENCE_TTL_S
        first_ms = self._first_ms.setdefault(presence.life, presence.expires_ms)
        is_of_now = published_s <= now_s + DOUBT_S or presence.expires_ms > first_ms
        return published_s > began_s + DOUBT_S and is_of_now
