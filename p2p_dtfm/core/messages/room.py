"""Which of what others have said fits into a message."""

from collections.abc import Iterable, Sequence


def fitting(
    sizes: Sequence[int], limit_bytes: int, order: Iterable[int] | None = None
) -> list[bool]:
    """Of things of these bytes, as many as there is room for: in an order of their places, or the
    shortest first, since who says much must not make others say more than anybody hears."""
    fits = [False] * len(sizes)
    for at in order or sorted(range(len(sizes)), key=sizes.__getitem__):
        fits[at] = sizes[at] <= limit_bytes
        limit_bytes -= fits[at] * sizes[at]
    return fits


def order_from(makers: Sequence[str], sizes: Sequence[int], me: str) -> list[int]:
    """Of what these have said, places in the order in which one of many passes it on, so that
    together they pass on all, though none has room for it.

    First its own and what the next one has said, so that, where both fit, two know of each; then
    the shorter before those twice as long, so that who says much keeps out nobody who says little,
    and of like lengths from its own place on: all that begin with the same ones would end before
    the same ones.
    """
    ring = list(dict.fromkeys(makers))
    is_one = me in ring
    begin = ring.index(me) if is_one else sum(it < me for it in ring)
    turns = {maker: (at - begin) % len(ring) for at, maker in enumerate(ring)}

    def rank(at: int) -> tuple[bool, int, int]:
        turn = turns[makers[at]]
        return not is_one or turn > 1, sizes[at].bit_length(), turn

    return sorted(range(len(makers)), key=rank)
