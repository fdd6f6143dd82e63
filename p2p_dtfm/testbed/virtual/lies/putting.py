"""Lies in the place of functions of the daemon's, for as long as a seed is played."""

from collections.abc import Iterator
from contextlib import contextmanager

from p2p_dtfm.testbed.virtual.lies import words, work
from p2p_dtfm.testbed.virtual.lies.lying import Lying
from p2p_dtfm.testbed.virtual.planted.patches import Patches


@contextmanager
def put_in(lying: Lying) -> Iterator[None]:
    """All functions that lies need to be in the place of; each is honest where nobody lies."""
    patches = Patches()
    try:
        for lie in (*work.LIES, *words.LIES):
            lie(patches, lying)
        yield
    finally:
        patches.undo()
