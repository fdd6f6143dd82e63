"""What states come and go by."""

from dataclasses import dataclass

from p2p_dtfm.core.protocol.signed import Sign
from p2p_dtfm.daemon.peers.messenger import Messenger
from p2p_dtfm.daemon.state_transfer.checkpoints import Checkpoints
from p2p_dtfm.daemon.state_transfer.donor import Donor
from p2p_dtfm.daemon.state_transfer.initial_states import InitialStates
from p2p_dtfm.net.streams.blobs import BlobExchange
from p2p_dtfm.net.streams.bulk import BulkPlane


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
