"""Layers that have come while training went on, and that gradients of their donors have moved on.

The state that a donor gives counts once the other holders confirm it (`witnesses`). Nobody else
sees the gradients after it. A peer that gets false ones would compute from a state of its own, and
the others would take it for a liar. So in the first step of its place it asks once more.

It does so, too, where nobody but the donor had spoken of the version that it gave. A donor that
names the step to come, where steps take long, has nobody beside it that could speak of that yet.
"""

import asyncio
from collections.abc import Mapping, Sequence
from itertools import compress

from p2p_dtfm.core.recovery.view import View
from p2p_dtfm.daemon.state_transfer.following.donor_choice import donors_of
from p2p_dtfm.daemon.state_transfer.state_tools import FollowerTools
from p2p_dtfm.daemon.state_transfer.witnesses import WITNESSES_LIMIT, StateVotes, drawn

ENOUGH = 3
"""If so many others hold the layer, the one that gave the gradients is left out."""


async def unlike_layers(
    view: View, tools: FollowerTools, votes: StateVotes, givers: Mapping[int, str], version: int
) -> set[int]:
    """Layers that are not what the holders of the view before have at `version`, at which they wait
    for this peer. `givers`: by layer, who gave the gradients, or the state that nobody confirmed.

    A layer that is to be guarded is left out while its last gradient is on its way. To take it for
    false would throw away what may be the only other copy.
    """
    here = (layer for layer in sorted(givers) if tools.states[layer].version == version)
    holders = {layer: _asked_of(view, layer, tools.me, givers[layer]) for layer in here}
    for peer in sorted({peer for each in holders.values() for peer in each}):
        asked = [layer for layer, peers in holders.items() if peer in peers]
        said = votes.ask(peer, view.id, next(tools.numbers), asked)
        tools.net.messenger.tell(peer, said)
    own = {layer: await tools.compute.run(tools.states[layer].file_digest) for layer in holders}
    odd = (votes.is_odd(peers, layer, version, own[layer]) for layer, peers in holders.items())
    return set(compress(holders, await asyncio.gather(*odd)))  # all silent ones cost one wait


def _asked_of(view: View, layer: int, me: str, giver: str) -> Sequence[str]:
    """Whom to ask, drawn again: colluders that are most of those that were asked about the state
    itself are seldom most of these, too."""
    holders = donors_of(view, layer, me)
    return witnesses_of(drawn(holders, f"again {view.id} {me} {layer}", len(holders)), giver)


def witnesses_of(holders: Sequence[str], giver: str) -> Sequence[str]:
    """Whom to ask. Of more than two it is an odd number, so that colluders that are fewer than the
    others are no half of them."""
    others = [peer for peer in holders if peer != giver]
    asked = others if len(others) >= ENOUGH else holders
    count = min(len(asked), WITNESSES_LIMIT + 1)
    return asked[: count - (count > 2 and count % 2 == 0)]
