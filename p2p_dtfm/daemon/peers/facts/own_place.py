"""Where this peer is among the others: what it answers to a probe, and what it learns from each
answer.

In a small swarm all links are measured and nobody asks for places. Nothing is said of them then.
"""

import logging
from collections.abc import Iterable, Sequence

import msgspec

from p2p_dtfm.core.cost_model.links.coordinates import Vivaldi, round_trip_us
from p2p_dtfm.core.protocol.canonical import decode, encode
from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.core.protocol.facts.brief_links import (
    BRIEF_FROM_MEMBERS,
    BriefLinks,
    Coordinate,
    fault_of_brief,
)
from p2p_dtfm.core.protocol.records import PeerRecord

PLACES_FROM_MEMBERS = BRIEF_FROM_MEMBERS // 2
"""Smaller than where places are needed, so that peers know theirs in time."""
UNSURE_PPM = 300_000
UNSURE_REFRESH_S = 1.0
REFRESH_S = 10.0
"""How often one other peer is asked for a round trip: a call of some hundred bytes."""
OTHERS_LIMIT = 2048
_ANSWER_LIMIT_BYTES = 256

log = logging.getLogger("p2p_dtfm")


class OwnPlace:
    """This peer's place. The probes call `said` and `hear`."""

    def __init__(self, me: str) -> None:
        self._me = me
        self._vivaldi = Vivaldi(me)
        self._others: dict[str, Coordinate] = {}
        self._asked = 0
        self.is_asked_for = False
        """Whether the swarm is so large that places count."""

    @property
    def coordinate(self) -> Coordinate:
        return self._vivaldi.coordinate

    @property
    def refresh_s(self) -> float:
        """How long after one peer it is worth asking another."""
        is_unsure = self.coordinate.error_ppm > UNSURE_PPM
        return UNSURE_REFRESH_S if is_unsure else REFRESH_S

    def said(self) -> bytes:
        """The answer to a probe; empty in a small swarm."""
        return encode(self.coordinate) if self.is_asked_for else b""

    def hear(self, peer_id: str, answer: bytes, round_trip_ns: int) -> None:
        """Learn from what a probed peer has answered, and after how long."""
        if not answer:
            return
        try:
            there = decode(answer, Coordinate, _ANSWER_LIMIT_BYTES)
        except PeerFault as fault:
            log.debug("place of %s: %s", peer_id, fault)
            return
        if fault_of_brief(BriefLinks(there, b"")) is None:
            self._note(peer_id, there)
            self._vivaldi.observe(there, round_trip_ns)

    def learn(self, records: Iterable[PeerRecord]) -> None:
        """Learn the places that others state in their records."""
        for record in records:
            if record.brief is not msgspec.UNSET and record.peer_id != self._me:
                self._note(record.peer_id, record.brief.at)

    def _note(self, peer_id: str, there: Coordinate) -> None:
        self._others.pop(peer_id, None)
        self._others[peer_id] = there
        if len(self._others) > OTHERS_LIMIT:
            del self._others[next(iter(self._others))]

    def by_nearness(self, peers: Sequence[str]) -> list[str]:
        """The peers that seem near come first, then those of which nothing is known, in the order
        given."""
        here = self.coordinate
        known = [peer for peer in peers if peer in self._others]
        known.sort(key=lambda peer: round_trip_us(here, self._others[peer]))
        return known + [peer for peer in peers if peer not in self._others]

    def next_to_ask(self, peers: Sequence[str]) -> str | None:
        """The peer to ask next. All take turns in the order of their ids."""
        others = sorted(peer for peer in peers if peer != self._me)
        if not others:
            return None
        self._asked += 1
        return others[self._asked % len(others)]
