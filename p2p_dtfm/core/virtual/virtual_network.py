"""Directed links in virtual time: latency, rate, and uplinks and downlinks that links share.

A link carries its messages one after the other (a stream keeps their order). Links that are busy
at the same time share an uplink or downlink max-min fairly, as long-lived TCP flows of like round
trip do. None gets more than its own rate, and the others divide what one cannot use (Bertsekas and
Gallager 1992, section 6.5.2). Each uplink and downlink is divided for itself, and a link goes at
the lower of its two shares. Capacity that is left unused because the other end is slower is not
dealt out again, so the network is never faster here than real max-min sharing. FIFO at the uplink
instead would let a gradient shard of 60 MB hold up an activation for seconds, while separate
streams do not. Urgent messages (activations and their gradients) share among themselves first; the
rest share what they leave.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from p2p_dtfm.core.units import SECOND_NS
from p2p_dtfm.core.virtual.virtual_time import VirtualTime

Delivered = Callable[[Any], None]


class NetworkLines(NamedTuple):
    """The lines of a network; peers are numbers."""

    link: Callable[[int, int], tuple[int, int]]
    """(latency in ns, bytes/s) of the way from one peer to another. It may raise any exception."""
    uplinks: Sequence[int]
    """Bytes/s that all links from a peer share; 0: not limited."""
    downlinks: Sequence[int]

    def latency_ns(self, origin: int, to: int) -> int:
        return self.link(origin, to)[0]


class _Link:
    """One direction between two peers. Work is counted in bytes x 1e9, so rate x ns is exact."""

    __slots__ = (
        "busy_ns",
        "busy_until_ns",
        "changed_at_ns",
        "latency_ns",
        "origin",
        "queue",
        "rate",
        "sent_bytes",
        "share",
        "shared",
        "to",
        "urgent",
        "version",
        "work",
    )

    def __init__(self, origin: int, to: int, latency_ns: int, rate: int, shared: bool) -> None:
        self.origin = origin
        self.to = to
        self.latency_ns = latency_ns
        self.rate = rate
        self.shared = shared
        self.busy_until_ns = 0
        self.busy_ns = 0
        self.sent_bytes = 0
        self.queue: deque[tuple[int, Delivered, Any]] = deque()
        self.urgent = False
        self.share = 0
        self.work = 0
        self.changed_at_ns = 0
        self.version = 0


class TransferNetwork:
    """Links that open when they are first used."""

    def __init__(self, time: VirtualTime, lines: NetworkLines, overhead_ns: int) -> None:
        self._time = time
        self._lines = lines
        self._overhead_ns = overhead_ns
        self._uplink = lines.uplinks
        self._downlink = lines.downlinks
        self._links: dict[tuple[int, int], _Link] = {}
        self._sending: list[dict[_Link, None]] = [{} for _ in lines.uplinks]
        self._receiving: list[dict[_Link, None]] = [{} for _ in lines.downlinks]
        self._stale: dict[_Link, None] = {}
        self._changed: set[tuple[bool, int]] = set()

    def send(
        self,
        origin: int,
        to: int,
        size: int,
        delivered: Delivered,
        argument: Any,
        urgent: bool = False,
    ) -> None:
        """Call `delivered(argument)` when the last byte has arrived.

        At one time a link carries urgent messages or others, not both: neighbours in a pipeline
        hold no layer in common, and what goes to a guardian goes last.
        """
        link = self._links.get((origin, to))
        if link is None:
            link = self._links[origin, to] = self._open(origin, to)
        link.sent_bytes += size
        if not link.shared:
            now = self._time.now_ns
            duration = -(-size * SECOND_NS // link.rate) + self._overhead_ns
            start = link.busy_until_ns if link.busy_until_ns > now else now
            link.busy_until_ns = start + duration
            link.busy_ns += duration
            self._time.at(link.busy_until_ns + link.latency_ns, delivered, argument)
            return
        link.urgent = urgent
        link.queue.append((size, delivered, argument))
        if len(link.queue) == 1:
            self._begin(link)

    def links(self) -> dict[tuple[int, int], tuple[int, int]]:
        """(bytes sent, ns busy) of every link that was used."""
        return {ends: (link.sent_bytes, link.busy_ns) for ends, link in self._links.items()}

    def _open(self, origin: int, to: int) -> _Link:
        latency_ns, bytes_per_s = self._lines.link(origin, to)
        limits = [limit for limit in (self._uplink[origin], self._downlink[to]) if limit]
        return _Link(origin, to, latency_ns, min([bytes_per_s, *limits]), bool(limits))

    def _begin(self, link: _Link) -> None:
        size = link.queue[0][0]
        link.work = size * SECOND_NS + self._overhead_ns * link.rate
        link.share = 0
        link.changed_at_ns = self._time.now_ns
        self._sending[link.origin][link] = None
        self._receiving[link.to][link] = None
        self._touch(link)

    def _touch(self, link: _Link) -> None:
        """Sets the shares of this link and those beside it anew, at the end of the instant."""
        if self._uplink[link.origin]:
            self._changed.add((True, link.origin))
        if self._downlink[link.to]:
            self._changed.add((False, link.to))
        self._stale[link] = None
        self._time.settle(self._share_anew)

    def _share_anew(self, now_ns: int) -> None:
        stale = self._stale
        for up, peer in sorted(self._changed):
            stale.update((self._sending if up else self._receiving)[peer])
        self._changed.clear()
        self._stale = {}
        uplinks: dict[int, dict[_Link, int]] = {}
        downlinks: dict[int, dict[_Link, int]] = {}
        for link in stale:
            if not link.queue:
                continue
            share = link.rate
            for capacity, busy, shares, peer in (
                (self._uplink, self._sending, uplinks, link.origin),
                (self._downlink, self._receiving, downlinks, link.to),
            ):
                if capacity[peer]:
                    if peer not in shares:
                        shares[peer] = _fair_shares(capacity[peer], busy[peer])
                    share = min(share, shares[peer][link])
            self._set_share(link, share, now_ns)

    def _set_share(self, link: _Link, share: int, now_ns: int) -> None:
        if share == link.share:
            return
        link.work -= link.share * (now_ns - link.changed_at_ns)
        link.busy_ns += now_ns - link.changed_at_ns if link.share else 0
        link.share = share
        link.changed_at_ns = now_ns
        link.version += 1
        end = now_ns + max(0, -(-link.work // share))
        self._time.at(end, self._end, (link, link.version))

    def _end(self, ended: tuple[_Link, int]) -> None:
        link, version = ended
        if version != link.version:
            return
        now = self._time.now_ns
        link.busy_ns += now - link.changed_at_ns
        _, delivered, argument = link.queue.popleft()
        self._time.at(now + link.latency_ns, delivered, argument)
        link.version += 1
        if link.queue:
            link.share, link.changed_at_ns = 0, now
            link.work = link.queue[0][0] * SECOND_NS + self._overhead_ns * link.rate
            self._stale[link] = None
            self._time.settle(self._share_anew)
            return
        del self._sending[link.origin][link]
        del self._receiving[link.to][link]
        self._touch(link)


def _fair_shares(capacity: int, links: dict[_Link, None]) -> dict[_Link, int]:
    """Max-min shares of one capacity among links, none above its own rate; at least 1 each.

    Urgent links are served first.
    """
    shares: dict[_Link, int] = {}
    left = capacity
    for urgent in (True, False):
        served = [link for link in links if link.urgent is urgent]
        served.sort(key=lambda link: (link.rate, link.origin, link.to))
        for done, link in enumerate(served):
            shares[link] = max(1, min(link.rate, left // (len(served) - done)))
            left = max(0, left - shares[link])
    return shares
