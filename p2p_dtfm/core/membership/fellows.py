"""Who comes back after all of a swarm have ended: for whom it waits before it goes on by itself,
who of another version keeps it from that, and when it goes on from its own disk though somebody
trains already."""

from collections.abc import Collection, Sequence

from p2p_dtfm.core.messages.agreement_messages import KnownView
from p2p_dtfm.core.units import SECOND_NS

FELLOWS_WAIT_NS = 15 * SECOND_NS
"""For those it trained with last: one of them may have newer states than it has itself."""


def missing_fellows(
    history: Sequence[KnownView], me: str, here: Collection[str]
) -> tuple[str, ...]:
    """Of the newest view that this peer was in (`history`, oldest first), who is not `here`."""
    last = history[-1].peer_ids if history else frozenset()
    return tuple(sorted(last - {me, *here}))


def hold_back(others: Collection[str], unlike: Collection[str], alike: Collection[str]) -> bool:
    """Whether those of another version keep this peer from going on by itself: they may train on
    where they are half of the `others` that it remembers of its last view, or more. Where they are
    half the other half may be with them, but for those that were heard in this version.

    One that was forgotten, or lies, would keep all that are updated out for good.
    """
    theirs = set(others) & set(unlike)
    ours = set(others) & set(alike) - theirs
    return 2 * len(theirs) >= len(others) and len(theirs) > len(ours)


def is_worth_a_return(own_step: int, their_step: int, members: int, every_steps: int) -> bool:
    """Whether to go on from a whole checkpoint of one's own, of `own_step`, where a fellow trains
    already at `their_step`, from an older one.

    Only where it is alone: where parts of a swarm meet, more members count before more steps, and
    it comes over. And only for more steps than lie between two checkpoints, which any crash may
    cost.
    """
    return members == 1 and own_step - their_step > every_steps
