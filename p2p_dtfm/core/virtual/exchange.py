"""The two ways in which holders exchange gradients over the virtual network."""

from collections.abc import Callable

from p2p_dtfm.core.schedule.pieces import divide
from p2p_dtfm.core.virtual.virtual_network import TransferNetwork

CHUNK_BYTES = 1 << 20
MOST_CHUNKS = 32

Then = Callable[[int], None]


def chunk_count(part_bytes: int) -> int:
    """The number of chunks, each a message, in which a part travels."""
    return max(1, min(MOST_CHUNKS, part_bytes // CHUNK_BYTES))


class ShardedExchange:
    """Each holder owns a part, receives it from all others and sends them its sum.

    Parts travel in chunks, so that sums go back while later chunks still come in. `has_all(peer)`
    is called when a holder has every part's sum.
    """

    def __init__(
        self,
        network: TransferNetwork,
        holders: tuple[int, ...],
        weights: tuple[int, ...],
        size: int,
        has_all: Then,
    ) -> None:
        self._network = network
        self._holders = holders
        self._has_all = has_all
        self._chunks: list[tuple[int, int]] = []
        """(owner, bytes), chunk by chunk across owners: the order in which a holder sends."""
        parts = divide(size, weights)
        counts = map(chunk_count, parts)
        cut = [
            divide(part, (1,) * count) if count > 1 else (part,)
            for part, count in zip(parts, counts, strict=True)
        ]
        for number in range(max(map(len, cut))):
            for owner, chunks in zip(holders, cut, strict=True):
                if number < len(chunks) and chunks[number]:
                    self._chunks.append((owner, chunks[number]))
        self._missing = [len(holders)] * len(self._chunks)
        self._incomplete = dict.fromkeys(holders, len(self._chunks))

    def contribute(self, peer: int) -> None:
        """This holder's own gradient is whole."""
        for number, (owner, size) in enumerate(self._chunks):
            if owner == peer:
                self._came(number)
            else:
                self._network.send(peer, owner, size, self._came, number)

    def _came(self, number: int) -> None:
        self._missing[number] -= 1
        if self._missing[number] == 0:
            owner, size = self._chunks[number]
            for peer in self._holders:
                if peer != owner:
                    self._network.send(owner, peer, size, self._sum_arrived, peer)
            self._sum_arrived(owner)

    def _sum_arrived(self, peer: int) -> None:
        self._incomplete[peer] -= 1
        if self._incomplete[peer] == 0:
            self._has_all(peer)


class StarExchange:
    """One holder receives all gradients whole; `gathered(centre)` is called when it has them."""

    def __init__(
        self,
        network: TransferNetwork,
        centre: int,
        members: tuple[int, ...],
        size: int,
        gathered: Then,
    ) -> None:
        self._network = network
        self._centre = centre
        self._members = members
        self._size = size
        self._gathered = gathered
        self._missing = len(members)

    def contribute(self, peer: int) -> None:
        """This holder's own gradient is whole."""
        if peer == self._centre:
            self._came(peer)
        else:
            self._network.send(peer, self._centre, self._size, self._came, peer)

    def broadcast(self, sum_arrived: Then) -> None:
        """The centre sends the sum to all; `sum_arrived(peer)` for each, itself included."""
        for peer in self._members:
            if peer != self._centre:
                self._network.send(self._centre, peer, self._size, sum_arrived, peer)
        sum_arrived(self._centre)

    def _came(self, _: int) -> None:
        self._missing -= 1
        if self._missing == 0:
            self._gathered(self._centre)
