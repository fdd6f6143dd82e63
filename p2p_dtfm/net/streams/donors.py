"""How long a donor may take for what it was asked for, and which of several is asked first.

The fetcher leaves a donor for the next one as soon as it gives less than others would allow. A
donor that was left is asked again only once all others have been, each time with more patience. So
a slow donor is not given up where nobody better is there. And nobody holds up a fetch for longer
than it takes to see that it is slow.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from p2p_dtfm.core.liveness.pace import FETCH_BYTES_PER_S
from p2p_dtfm.ports import now

CHUNK_LIMIT_BYTES = 512 << 10
CHUNK_LEAST_BYTES = 32 << 10
CHUNK_FIRST_BYTES = 64 << 10
"""The first chunk of a donor that was not asked before. It comes in time over the slowest lines."""
QUICK_S = 1.0
LONG_S = 3.0
"""A chunk that took longer than this is followed by smaller ones, and one that came within
`QUICK_S` by larger ones. So one request asks for what the line carries in about as much time."""
CHUNK_DEADLINE_S = 30.0
CREDIT = 4
"""What a donor gave before counts for at most this many times the wait for one chunk."""
SLOW_ONES_TRIED = 4
"""After this many donors that give something, but too slowly, the fetch goes on with the best of
them."""
LAST_S = 180.0
"""How long a donor that was too slow is asked last."""
DONORS_REMEMBERED = 1024


class DonorPatience(NamedTuple):
    """The patience that a fetch has with one donor."""

    wait_s: float
    """The longest wait from one chunk to the next."""
    bytes_per_s: int
    """The rate that all its chunks must come to, after a first `wait_s`; 0 for any rate."""


PATIENCES = (
    DonorPatience(3.0, FETCH_BYTES_PER_S),
    DonorPatience(10.0, FETCH_BYTES_PER_S // 8),
    DonorPatience(CHUNK_DEADLINE_S, 0),
)
"""The first holds while others are left, the second for donors that were too slow, and the third
for those that still are."""


class TooSlow(Exception):
    """A donor gives too slowly, so others are asked first."""

    def __init__(self, bytes_per_s: int) -> None:
        self.bytes_per_s = bytes_per_s
        super().__init__(f"gives {bytes_per_s} bytes a second")


class DonorTurn:
    """What comes from one donor, until the end of the blob or the next donor's turn."""

    def __init__(self, patience: DonorPatience, length_bytes: int) -> None:
        self.length_bytes = length_bytes
        """Bytes to ask for in the next request."""
        self._patience = patience
        self._began_s = self._last_s = now.monotonic_s()
        self._due_s = self._began_s + patience.wait_s
        """By when the donor's rate demands another chunk, not counting that chunk's own time."""
        self._came_bytes = 0

    @property
    def bytes_per_s(self) -> int:
        return int(self._came_bytes / max(0.001, now.monotonic_s() - self._began_s))

    def left_s(self, asked_s: float, length_bytes: int) -> float:
        """How long the next chunk may still take."""
        wait_s, bytes_per_s = self._patience
        ends_s = max(asked_s, self._last_s) + wait_s
        if bytes_per_s:
            ends_s = min(ends_s, self._due_s + length_bytes / bytes_per_s)
        return ends_s - now.monotonic_s()

    def came(self, asked_s: float, size_bytes: int) -> None:
        """Note a chunk that came, and choose the length of the next ones."""
        now_s, (wait_s, bytes_per_s) = now.monotonic_s(), self._patience
        self._came_bytes += size_bytes
        self._last_s = now_s
        if bytes_per_s:
            due_s = self._due_s + size_bytes / bytes_per_s
            self._due_s = min(due_s, now_s + CREDIT * wait_s)
        if now_s - asked_s < QUICK_S and size_bytes >= self.length_bytes:
            self.length_bytes = min(2 * self.length_bytes, CHUNK_LIMIT_BYTES)
        elif now_s - asked_s > LONG_S:
            self.length_bytes = max(self.length_bytes // 2, CHUNK_LEAST_BYTES)


@dataclass(frozen=True)
class _KnownDonor:
    length_bytes: int
    bytes_per_s: int
    last_until_s: float


class Donors:
    """Donors that were asked lately, and what came of it."""

    def __init__(self) -> None:
        self._known: dict[str, _KnownDonor] = {}

    def is_slow(self, peer_id: str) -> bool:
        """Whether the donor was too slow a while ago."""
        known = self._known.get(peer_id)
        return known is not None and now.monotonic_s() < known.last_until_s

    def gives(self, peer_id: str) -> bool:
        """Whether anything came from the donor lately."""
        return peer_id in self._known and self._known[peer_id].bytes_per_s > 0

    def fastest_first(self, peers: Iterable[str]) -> list[str]:
        return sorted(
            peers, key=lambda it: -self._known[it].bytes_per_s if it in self._known else 0
        )

    def turn(self, peer_id: str, patience: DonorPatience) -> DonorTurn:
        known = self._known.get(peer_id)
        return DonorTurn(patience, CHUNK_FIRST_BYTES if known is None else known.length_bytes)

    def note_late(self, peer_id: str, turn: DonorTurn) -> None:
        self._note(peer_id, turn, CHUNK_LEAST_BYTES, now.monotonic_s() + LAST_S)

    def note_in_time(self, peer_id: str, turn: DonorTurn) -> None:
        """Note a donor that gave all. If it needed much patience, it counts as slow as it did
        before."""
        known, is_fast = self._known.get(peer_id), turn.bytes_per_s >= FETCH_BYTES_PER_S
        until_s = known.last_until_s if known is not None and not is_fast else 0.0
        self._note(peer_id, turn, turn.length_bytes, until_s)

    def _note(self, peer_id: str, turn: DonorTurn, length_bytes: int, until_s: float) -> None:
        self._known.pop(peer_id, None)
        self._known[peer_id] = _KnownDonor(length_bytes, turn.bytes_per_s, until_s)
        if len(self._known) > DONORS_REMEMBERED:
            del self._known[next(iter(self._known))]


class DonorTurns:
    """The donors of one blob: whose turn it is, and how much patience there is for it."""

    def __init__(self, donors: Donors, peers: Sequence[str]) -> None:
        """`peers`: without those that have said that they do not have the blob."""
        self._donors = donors
        self._late = [peer for peer in peers if donors.is_slow(peer)]
        self._left = [peer for peer in peers if peer not in self._late]
        self._gave_some = min(sum(map(donors.gives, self._late)), SLOW_ONES_TRIED - 1)
        self._round = 0

    @property
    def _is_last_round(self) -> bool:
        return self._round == len(PATIENCES) - 1

    def next(self) -> tuple[str, DonorPatience] | None:
        """The next donor and its patience; None once all were asked with all patience."""
        if len(self._left) + len(self._late) == 1:  # no other donor is there
            self._round = len(PATIENCES) - 1
            self._left, self._late = [*self._left, *self._late], []
        while not self._left or (self._gave_some >= SLOW_ONES_TRIED and not self._is_last_round):
            if self._is_last_round:
                return None
            self._round, self._gave_some = self._round + 1, 0
            self._left, self._late = [*self._donors.fastest_first(self._late), *self._left], []
        return self._left.pop(0), PATIENCES[self._round]

    def note_late(self, peer: str, error: TooSlow) -> bool:
        """Note a slow donor, and say whether it will be asked again, should nobody be better."""
        if not self._is_last_round:
            self._late.append(peer)
            self._gave_some += error.bytes_per_s > 0
        return not self._is_last_round
