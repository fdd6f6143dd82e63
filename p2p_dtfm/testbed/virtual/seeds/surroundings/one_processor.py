"""The processor of all daemons of a seed: the same one on every machine.

Losses and gradients are in messages, and an arithmetic's name is in claims. By the machine's own
vector unit a seed had other bytes on another machine, and sometimes another course: a broken seed
could not be played again there. `train.stage.replay.any_processor` has the bits alike.
"""

import contextlib
from collections.abc import Iterator

from p2p_dtfm.testbed.virtual.patches import Patches
from p2p_dtfm.train.stage.replay import arithmetic

FACTS = ("a virtual machine's",)


@contextlib.contextmanager
def one_name() -> Iterator[None]:
    """Gives the arithmetic of all daemons of this process the same name on every machine."""
    patches = Patches()
    try:
        patches.put(arithmetic, "processor_facts", lambda: list(FACTS))
        yield
    finally:
        patches.undo()
