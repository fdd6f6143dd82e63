"""The tools by which states come and go."""

from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field

from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.core.protocol.signed import Sign
from p2p_dtfm.daemon.machine.compute import Compute
from p2p_dtfm.daemon.peers.messenger import Messenger
from p2p_dtfm.daemon.state_transfer.checkpoints.checkpoints import Checkpoints
from p2p_dtfm.daemon.state_transfer.donor import Donor
from p2p_dtfm.daemon.state_transfer.initial_states import InitialStates
from p2p_dtfm.net.streams.blobs import BlobExchange
from p2p_dtfm.net.streams.bulk import BulkPlane
from p2p_dtfm.train.model.layer_state import LayerState


@dataclass(frozen=True)
class TowardsOthers:
    """How this peer speaks with other members, and signs what it says."""

    messenger: Messenger
    bulk: BulkPlane
    blobs: BlobExchange
    sign: Sign


@dataclass(frozen=True)
class StateStores:
    """Where layers' states are made, kept, and given to others."""

    initial: InitialStates
    checkpoints: Checkpoints
    donor: Donor


@dataclass(frozen=True)
class FollowerTools:
    """What a follower works with."""

    me: str
    spec: RunSpec
    states: dict[int, LayerState]
    """Gets each layer as it arrives."""
    net: TowardsOthers
    compute: Compute
    numbers: Iterator[int]
    """Names for requests, none used twice in this life."""
    keep_frozen: Callable[[int], Awaitable[None]]
    """Brings what a layer has besides its state, where anything is frozen."""
    slow: Counter[str] = field(default_factory=Counter)
    """How often a donor was left for being too slow, in this life: it is not the first again."""
