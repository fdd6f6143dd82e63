"""Which of what others have said fits into a message."""

from collections.abc import Sequence


def fitting(sizes: Sequence[int], limit_bytes: int) -> list[bool]:
    """Of things of these bytes, as many as there is room for, the shortest first: who says much
    must not make others say more than anybody hears."""
    fits = [False] * len(sizes)
    for at in sorted(range(len(sizes)), key=sizes.__getitem__):
        limit_bytes -= sizes[at]
        if limit_bytes < 0:
            break
        fits[at] = True
    return fits
