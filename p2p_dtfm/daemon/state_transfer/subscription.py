"""What one follower asks of a donor, and what it has been given of that."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

from p2p_dtfm.daemon.peers.wire import FollowLayers


@dataclass
class Subscription:
    request: FollowLayers
    is_known: bool
    """Whether its view is known, and the follower needs the layers in it."""
    offered: set[int] = field(default_factory=set)
    fed: dict[int, int] = field(default_factory=dict)
    """By layer: the last step whose gradient is queued."""
    blobs: set[str] = field(default_factory=set)
    queue: asyncio.Queue[Any] = field(default_factory=asyncio.Queue)
    queued_bytes: int = 0
    step_bytes: int = 0
    """The size of one step's gradients of what is offered."""
    lacks_room: bool = False
    """Whether there is no room for the rest, until the follower has what it was offered, and says
    so or asks anew."""
    closed: bool = False

    @property
    def pending(self) -> list[int]:
        """Layers whose state has not been offered yet; first those of which the follower has
        none."""
        layers = self.request.layers
        return sorted(layers.keys() - self.offered, key=lambda n: (layers[n] != -1, n))
