"""The first connections of a peer: to those that it was told of, or those that it remembers."""

import asyncio
import logging
import re
from collections.abc import Sequence
from typing import Protocol

from p2p_dtfm.core.protocol.errors import UNREACHABLE, UserError
from p2p_dtfm.net.contacts.addresses import parse_address, why_uncallable
from p2p_dtfm.net.errors import Unreachable, in_plain_words, one_line

FIRST_CONNECT_DEADLINE_S = 10.0
GRACE_S = 0.3
"""How long further connections are waited for once the first is there."""
_NOTHING_TO_CALL = "no good addresses"
_SOMEBODY_ELSE = re.compile(r"but remote key matches (\w+)")
_ASK_AGAIN = "ask for the line anew: that daemon has another port or another home now"

log = logging.getLogger(__name__)


class Connects(Protocol):
    """What is needed of a `Host` here."""

    @property
    def peer_id(self) -> str: ...

    async def connect(
        self, peer_id: str, addresses: Sequence[str], deadline_s: float, is_chosen: bool = False
    ) -> None: ...


async def reach_first_peers(
    host: Connects, addresses: Sequence[str], deadline_s: float = FIRST_CONNECT_DEADLINE_S
) -> tuple[str, ...]:
    """Connect to all of them at once, and return those that were reached.

    Raises `UserError`, with exit code 6 when there is none.
    """
    peers = [parse_address(address) for address in addresses]
    others = [(peer_id, address) for peer_id, address in peers if peer_id != host.peer_id]
    if not others:
        raise UserError(
            "every initial peer given is this peer itself",
            "give the address of another daemon, or leave out --initial-peers to start a swarm",
        )
    results = await asyncio.gather(
        *(host.connect(peer, [at], deadline_s, is_chosen=True) for peer, at in others),
        return_exceptions=True,
    )
    causes, fixes, reached = [], [], []
    for (peer_id, address), result in zip(others, results, strict=True):
        if isinstance(result, Unreachable):
            cause, fix = _why(address, result.cause)
            causes.append(f"{address}/p2p/{peer_id} ({cause})")
            fixes += [fix] if fix else []
        elif isinstance(result, BaseException):
            raise result
        else:
            reached.append(f"{address}/p2p/{peer_id}")
    for cause in causes:
        log.warning("initial peer not reached: %s", cause)
    if not reached:
        raise UserError(
            "no initial peer could be reached: " + "; ".join(causes),
            (
                *dict.fromkeys(fixes),
                "see that the other daemon is running, and prints this very address",
                "see that its port is open: no firewall or router in between may drop it",
                "copy the address whole, up to its last character",
            ),
            exit_code=UNREACHABLE,
        )
    return tuple(reached)


def _why(address: str, cause: str) -> tuple[str, str]:
    """The cause in plain words, and what can be done besides the usual."""
    if _NOTHING_TO_CALL in cause:
        return why_uncallable(address)
    if (other := _SOMEBODY_ELSE.search(cause)) is not None:
        return f"{one_line(other[1])} answers there: another peer", _ASK_AGAIN
    return in_plain_words(cause), ""


async def reach_any(host: Connects, addresses: Sequence[str], deadline_s: float) -> tuple[str, ...]:
    """Connect to all of them at once. Once some are reached, wait for others only `GRACE_S`."""
    reached: list[str] = []

    async def reach(address: str) -> None:
        try:
            peer_id, where = parse_address(address)
        except UserError as error:  # a peer said this of itself; the user did not type it
            log.debug("not called: %s", error.cause)
            return
        if peer_id == host.peer_id:
            return
        try:
            await host.connect(peer_id, [where], deadline_s, is_chosen=True)
            reached.append(address)
        except Unreachable as error:
            log.debug("not there any more: %s", error)
        except Exception:  # one remembered peer must not keep this one from all others
            log.exception("bug while calling %s", one_line(address))

    tasks = {asyncio.create_task(reach(address)) for address in addresses}
    waiting = set(tasks)
    try:
        while waiting:
            patience_s = GRACE_S if reached else deadline_s + GRACE_S
            done, waiting = await asyncio.wait(
                waiting, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED
            )
            if not done:
                break
            for task in done:
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return tuple(reached)
