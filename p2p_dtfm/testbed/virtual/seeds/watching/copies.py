"""Whether copies for which guardians wait are on their way.

Where guardians lag, the next cut begins when the one before is whole. A cut that nobody sends holds
up all later ones: steps go on, but what outlives a crash stays as it was. The outcome of a run does
not show that, unless somebody dies much later.
"""

from collections.abc import Callable, Sequence

from p2p_dtfm.testbed.virtual.peer import Peer


class Copies:
    """Watches one seed, now and then. `peers` are those that are watched."""

    def __init__(self, peers: Callable[[], Sequence[Peer]]) -> None:
        self._peers = peers
        self._unsent: dict[str, object] = {}
        """By name: the clock of a peer's cut that was not being sent at the last look."""

    def look(self, now_s: float) -> str:
        """Names a peer that others wait for, and that sends its cut to nobody at two looks; or
        empty."""
        found = {peer.name: clock for peer in self._peers() if (clock := _unsent_at(peer))}
        again = [name for name, clock in found.items() if self._unsent.get(name) is clock]
        self._unsent = found
        if not again:
            return ""
        return f"guardians wait for a copy of {min(again)}'s layers, and it sends none"


def _unsent_at(peer: Peer) -> object | None:
    """The clock of a cut that guardians still lack, and that nothing brings them."""
    api = peer.daemon.status_api if peer.is_running and peer.daemon is not None else None
    if api is None or api.participant is None or peer.process is None:
        return None
    cuts = api.participant.trainer.cuts
    clock, sending = cuts._clock, cuts._sending
    waits = clock is not None and clock.travels and peer.process.takes_turns
    return clock if waits and (sending is None or sending.done()) else None
