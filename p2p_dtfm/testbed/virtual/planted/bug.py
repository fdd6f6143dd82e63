"""One bug, and how it is put in."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from p2p_dtfm.testbed.virtual.patches import Patches
from p2p_dtfm.testbed.virtual.seeds.schedules.first_seeds import QUICK


@dataclass(frozen=True)
class Planted:
    """One bug: `plant` puts it in."""

    name: str
    what: str
    plant: Callable[[Patches], None]
    first: int = QUICK
    """The first seed with which the bug is looked for."""


@contextlib.contextmanager
def planted(bug: Planted) -> Iterator[None]:
    """Meanwhile the bug is put in."""
    patches = Patches()
    try:
        bug.plant(patches)
        yield
    finally:
        patches.undo()
