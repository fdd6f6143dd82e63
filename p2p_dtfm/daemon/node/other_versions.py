"""Members that answer in another protocol: what the owner is told of them, and whether to wait for
them or go on without them."""

import logging
from collections.abc import Callable

from p2p_dtfm.core.membership.fellows import hold_back
from p2p_dtfm.daemon.machine.life import is_a_service
from p2p_dtfm.daemon.machine.settings import Settings
from p2p_dtfm.daemon.node.local import Local
from p2p_dtfm.daemon.node.network import Network
from p2p_dtfm.daemon.peers.home_memory import Memory
from p2p_dtfm.daemon.peers.messenger import PEERS_LIMIT
from p2p_dtfm.daemon.peers.run_source import OtherProtocol
from p2p_dtfm.net.contacts.addresses import peer_ids_of
from p2p_dtfm.net.contacts.calling import put_newest
from p2p_dtfm.ports import now

UNLIKE_TOLD = 16
GREETED_WITHIN_S = 60.0
"""A member that looks for others asks every sixteen seconds at least."""
SERVICE_FILE = "~/.config/p2p-dtfm/service.toml"
"""Where `p2p-dtfm service install` usually writes its settings."""

log = logging.getLogger("p2p_dtfm")


class OtherVersions:
    """`is_known`: whether the user has named a peer, or this home has met it in the run."""

    def __init__(self, local: Local, network: Network, is_known: Callable[[str], bool]) -> None:
        self._local = local
        self._network = network
        self._is_known = is_known
        self._told: dict[str, None] = {}
        """Peers that the log has said to speak another protocol."""
        self._strangers_told = 0

    def say(self) -> None:
        """Log each such peer once, and only a few strangers: any number of them can claim it."""
        for peer_id, why in self._network.messenger.passed_over.items():
            if not isinstance(why, OtherProtocol) or peer_id in self._told:
                continue
            is_stranger = not self._is_known(peer_id)
            if is_stranger and self._strangers_told >= UNLIKE_TOLD:
                continue
            self._strangers_told += is_stranger
            put_newest(self._told, peer_id, None, PEERS_LIMIT)
            log.warning("%s: %s", why.cause, why.fixes[0])

    def known(self) -> dict[str, OtherProtocol]:
        """Known peers that were lately found to be of another version."""
        passed_over = self._network.messenger.passed_over.items()
        unlike = {peer: why for peer, why in passed_over if isinstance(why, OtherProtocol)}
        return {peer: why for peer, why in unlike.items() if self._is_known(peer)}

    def held_back_by(self, memory: Memory | None) -> OtherProtocol | None:
        """One of the members that this peer waits for; None if its user has said that it goes on
        apart."""
        return None if self._local.settings.apart else self._would_wait_for(memory)

    def say_apart(self, memory: Memory | None) -> None:
        """Warn that this peer goes on apart. The user who once said so may not mean it any more."""
        if self._local.settings.apart and (unlike := self._would_wait_for(memory)) is not None:
            log.warning(
                "%s: goes on apart, as --apart says; take apart out of a service's file, or it "
                "does so again where versions differ the next time",
                unlike.cause,
            )

    def _would_wait_for(self, memory: Memory | None) -> OtherProtocol | None:
        """A reason to wait: half of the last fellows speak otherwise, or all given peers that
        answer do."""
        unlike, settings = self.known(), self._local.settings
        if not unlike or settings.new:  # a run that is founded afresh has no members
            return None
        since_s, messenger = now.monotonic_s() - GREETED_WITHIN_S, self._network.messenger
        alike = {peer for peer, at_s in messenger.greeted_s.items() if at_s >= since_s}
        alike = alike.union(messenger.passed_over).difference(unlike)
        given = set(peer_ids_of(settings.initial_peers))
        all_given = not given.isdisjoint(unlike) and given.isdisjoint(alike)
        waits = all_given or hold_back(_fellows(memory), unlike, alike)
        return next(iter(unlike.values())) if waits else None


def _fellows(memory: Memory | None) -> set[str]:
    """The others of the last view in which this peer was not alone. They were last seen at one and
    the same time."""
    members = memory.members if memory is not None else ()
    return {it.peer_id for it in members if it.seen_s == members[0].seen_s}


def how_alone(settings: Settings, usual: str) -> str:
    """What to do so that the daemon is told of no peers. `usual` names the option where nobody has
    typed one."""
    name = _told_by(settings) or usual.removeprefix("--")
    if is_a_service():
        return f"take {name} out of {SERVICE_FILE} and type systemctl --user restart p2p-dtfm"
    return f"start this one again without --{name.replace('_', '-')}"


def how_apart(settings: Settings) -> str:
    """What to do to go on from this home's own disk, whatever version others are."""
    name = _told_by(settings)
    if is_a_service():
        without = f"take {name} out of {SERVICE_FILE}, " if name else ""
        service = f"put apart = true into {SERVICE_FILE} and type systemctl --user restart"
        return f"{without}{service} p2p-dtfm, and take that out again once it trains"
    without = f" without --{name.replace('_', '-')} and" if name else ""
    return f"start this one again{without} with --apart"


def _told_by(settings: Settings) -> str:
    """The setting by which the daemon was told of peers. An invitation gives addresses as well."""
    told = (name for name in ("invite", "initial_peers") if getattr(settings, name))
    return next(told, "")
