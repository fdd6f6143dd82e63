"""The rarer of two ways, where a daemon has both.

Queues are full, words come late and what was kept is gone: on machines this happens now and then,
with small models in small swarms hardly ever. At each point of this table a daemon asks whether to
act as if it happened, though nothing causes it. On a machine the answer is always no. A world of
seeds may say yes, so that what is rare is common there.
"""

import asyncio
import errno
import os
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Protocol

POINTS: Mapping[str, str] = {
    # what is refused, lost or gone
    "busy": "a call is refused, as by a peer that answers as many as it may",
    "oldest lost": "what was to be told first is dropped, as of a queue that is full",
    "shard unreadable": "a data shard cannot be read, as by a disk that fails for a moment",
    "part unreadable": "nor can a part of a file that another peer asks for",
    "layer unreadable": "nor a layer of a checkpoint",
    "nobody there": "the directory names nobody, as one whose nodes have all gone",
    "few lanes": "lanes that stand idle end, as in a swarm of a hundred",
    "no early word": "a Prepared of a view to come is not kept, as where there are many megabytes",
    "no early tensor": "a small tensor of a view to come waits on its lane, as a large one does",
    "offer gone": "what is on offer is not found, as by a disk that has lost it",
    "far behind": "a follower is fed no more, as one that does not keep up",
    "not asked": "who asked what layers are is forgotten, as where too many ask",
    "nothing kept": "what a step has sent is not kept, as where it is more than there is room for",
    "guardian given up": "a step goes on without a guardian, as after its patience",
    # what takes long
    "read late": "a message is looked at later than what came after it",
    "tick late": "the clock of the agreement ticks late, as in a busy event loop",
    "plan late": "a plan takes long, as for many peers",
    "step late": "a step begins late",
    "data late": "a step's data are late, as from a slow disk",
    "Prepared late": "what a step has computed is said late",
    "update late": "a committed step is applied late",
    "copy late": "what is sent to guardians that lag is copied late",
    "receipt late": "that a copy is whole is said late",
    "states late": "who takes over a view has its states late",
    "offer late": "states are offered late",
    "save late": "a checkpoint is begun late, as on a disk that is being written to",
}
"""What each point stands for."""


class Rarer(Protocol):
    """A world in which daemons take the rarer ways."""

    def happens(self, point: str) -> bool:
        """Whether the point happens this time."""

    def lingers_s(self, point: str) -> float:
        """For how long the point lingers this time; mostly 0."""


_RARER: ContextVar[Rarer | None] = ContextVar("rarer", default=None)


def live_by(rarer: Rarer) -> None:
    """Use this world's chances from here on in this task, and in all tasks that it begins."""
    _RARER.set(rarer)


def happens(point: str) -> bool:
    """Whether the rarer way is to be taken at this point; never on a machine."""
    rarer = _RARER.get()
    if rarer is None:
        return False
    assert point in POINTS, point
    return rarer.happens(point)


def fails(point: str) -> None:
    """Raises `OSError` where the point happens, as a failing read from a disk does."""
    if happens(point):
        raise OSError(errno.EIO, os.strerror(errno.EIO))


async def lingers(point: str) -> None:
    """Waits as long as the world says. On a machine it returns without a turn of the event loop."""
    rarer = _RARER.get()
    if rarer is None:
        return
    assert point in POINTS, point
    if (pause_s := rarer.lingers_s(point)) > 0:
        await asyncio.sleep(pause_s)
