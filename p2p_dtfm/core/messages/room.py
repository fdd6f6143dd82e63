"""Which of what others have said fits into a message."""

from collections.abc import Iterable, Sequence


def fitting(
    sizes: Sequence[int], limit_bytes: int, order: Iterable[int] | None = None
) -> list[bool]:
    """Which things of these sizes fit into `limit_bytes`, taken in `order`, or the shortest first.
    A peer that says much must not make others say more than anybody hears."""
    fits = [False] * len(sizes)
    for at in order or sorted(range(len(sizes)), key=sizes.__getitem__):
        fits[at] = sizes[at] <= limit_bytes
        limit_bytes -= fits[at] * sizes[at]
    return fits


def order_from(makers: Sequence[str], sizes: Sequence[int], me: str) -> list[int]:
    """The order in which `me` passes on what these makers have said, as indexes. Many peers
    together pass on all of it, though none of them has room for all.

    First come the statements of `me` and of the next maker in the ring, so that two peers know of
    each where both fit. Then shorter ones come before those twice as long, so that a peer that says
    much keeps out nobody who says little. Among similar lengths the order begins at the place of
    `me`: if all began with the same statements, all would leave out the same ones.
    """
    ring = list(dict.fromkeys(makers))
    is_one = me in ring
    begin = ring.index(me) if is_one else sum(it < me for it in ring)
    turns = {maker: (at - begin) % len(ring) for at, maker in enumerate(ring)}

    def rank(at: int) -> tuple[bool, int, int]:
        turn = turns[makers[at]]
        return not is_one or turn > 1, sizes[at].bit_length(), turn

    return sorted(range(len(makers)), key=rank)
