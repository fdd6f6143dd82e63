"""How a peer comes back after all of a swarm have ended.

It waits for some before it goes on by itself, and peers of another version may keep it from that.
It may go on from its own disk though somebody trains already.
"""

from collections.abc import Collection, Sequence

from p2p_dtfm.core.messages.agreement_messages import KnownView
from p2p_dtfm.core.units import SECOND_NS

FELLOWS_WAIT_NS = 15 * SECOND_NS
"""It waits so long for those that it trained with last: one of them may have newer states."""


def missing_fellows(
    history: Sequence[KnownView], me: str, here: Collection[str]
) -> tuple[str, ...]:
    """Members of the newest view that this peer was in (`history`, oldest first) that are not
    `here`."""
    last = history[-1].peer_ids if history else frozenset()
    return tuple(sorted(last - {me, *here}))


def hold_back(others: Collection[str], unlike: Collection[str], alike: Collection[str]) -> bool:
    """Whether peers of another version (`unlike`) keep this one from going on by itself.

    They may train on if they are at least half of the `others`, which this peer remembers of its
    last view. If they are half the other half may be with them, but for those that were heard in
    this version (`alike`). Fewer do not count: one that was forgotten, or lies, would keep all that
    are updated out for good.
    """
    theirs = set(others) & set(unlike)
    ours = set(others) & set(alike) - theirs
    return 2 * len(theirs) >= len(others) and len(theirs) > len(ours)


def is_worth_a_return(own_step: int, their_step: int, members: int, every_steps: int) -> bool:
    """Whether to go on from this peer's own whole checkpoint, of `own_step`, though a fellow trains
    already at `their_step`, from an older one.

    Only if the fellow is alone: where parts of a swarm meet, more members count before more steps,
    and the fellow comes over. And only for more steps than lie between two checkpoints, which any
    crash may cost.
    """
    return members == 1 and own_step - their_step > every_steps
