"""Newcomers that wait to be let in, and those that were not let in lately."""

from collections.abc import Iterable

from p2p_dtfm.core.membership.roster import newer
from p2p_dtfm.core.protocol.records import PeerRecord
from p2p_dtfm.core.protocol.signed import Signed
from p2p_dtfm.core.protocol.snapshot import Member
from p2p_dtfm.core.units import SECOND_NS

REFUSED_NS = 10 * SECOND_NS
REFUSALS_LIMIT = 4
"""The wait grows so often: a newcomer that some member cannot reach is heard again after 10, 20,
40, then 80 seconds."""
FORGIVEN_AFTER = 4
"""Refusals are forgotten after this many times the last wait. Being let in does not clear them: the
newcomer may be cut off again at once."""
REMEMBERED = 1024
WAITING_LIMIT = 32
"""At most this many wait at once; whoever else asks has to ask again."""
WAITING_WIDE_ABOVE = 64
"""With more members than this, a view lets more newcomers wait. They may be so many that they would
be most of the next view."""
WAITING_WIDE_LIMIT = 128
WAITING_WIDE_LIMIT_BYTES = 768 * 1024
"""The same limit in such a large view, where records are brief: a storm should come in with one
view. Their records together must fit in a message with what else it says."""
FOUNDING_LIMIT = 1023
"""The same limit where nobody is in a view yet, as at a run's founder: waiting keeps nobody from
training there."""
FREE_AGAIN_NS = FORGIVEN_AFTER * (REFUSED_NS << (REFUSALS_LIMIT - 1))
"""A newcomer that fails to come though others count on it is excused once in this time: it may have
been cut off, or started again."""
NUMBERS_PASSED_LIMIT = 64
"""How far all newcomers together may raise the number of the next attempt above the last one. Else
many messages to one member would take it to numbers that the others do not follow."""
SILENT_ONCE = 1
"""A newcomer that does not answer is heard again at once so many times: a message may get lost."""


def most_waiting(member_count: int) -> int:
    """How many newcomers a view of so many members may let in at once, and each member name."""
    return WAITING_LIMIT if member_count <= WAITING_WIDE_ABOVE else WAITING_WIDE_LIMIT


class Newcomers:
    """Kept by a member, or by a newcomer where nobody has a view yet."""

    def __init__(self) -> None:
        self._asked: dict[str, tuple[PeerRecord, Signed]] = {}
        self._first_ns = 0
        self._refused: dict[str, tuple[int, int]] = {}
        self._silent: dict[str, int] = {}
        self._tries: dict[str, tuple[int, int]] = {}

    @property
    def count(self) -> int:
        return len(self._asked)

    @property
    def waiting(self) -> tuple[str, ...]:
        return tuple(sorted(self._asked))

    @property
    def waiting_bytes(self) -> int:
        """Bytes of the records of those that wait."""
        return sum(len(signed.payload) for _, signed in self._asked.values())

    @property
    def members(self) -> dict[Member, Signed]:
        """Those that wait, each with its record as signed."""
        items = (self._asked[peer_id] for peer_id in self.waiting)
        return {Member(record.peer_id, record.life): signed for record, signed in items}

    @property
    def opened(self) -> tuple[PeerRecord, ...]:
        """The records of those that wait, sorted by peer id."""
        return tuple(self._asked[peer_id][0] for peer_id in self.waiting)

    def due(self, now_ns: int, window_ns: int) -> bool:
        """Whether the first to ask has waited for others long enough."""
        return bool(self._asked) and now_ns - self._first_ns >= window_ns

    def ask(
        self, record: PeerRecord, signed: Signed, now_ns: int, limit: int = WAITING_LIMIT
    ) -> bool:
        """A newcomer asks; True if that is news."""
        held = self._asked.get(record.peer_id)
        is_full = len(self._asked) >= limit
        if self.is_refused(record.peer_id, now_ns) or (held is None and is_full):
            return False
        if not self._asked:
            self._first_ns = now_ns
        if held is None or newer(held[0], record) is record:
            self._asked[record.peer_id] = (record, signed)
        return held is None

    def is_refused(self, peer_id: str, now_ns: int) -> bool:
        count, refused_ns = self._refused.get(peer_id, (0, 0))
        return bool(count) and now_ns - refused_ns < REFUSED_NS << (count - 1)

    def refusals(self, peer_id: str) -> int:
        """How often in a row the newcomer was refused."""
        return self._refused.get(peer_id, (0, 0))[0]

    def forget(self, peer_id: str) -> None:
        self._asked.pop(peer_id, None)

    def note_silent(self, peer_id: str, now_ns: int) -> None:
        """The newcomer was asked for an answer, and none came."""
        count = self._silent.pop(peer_id, 0)
        if count >= SILENT_ONCE:
            self.refuse(peer_id, now_ns)
            return
        self.forget(peer_id)
        if len(self._silent) >= REMEMBERED:
            self._silent.clear()
        self._silent[peer_id] = count + 1

    def tried(self, peer_ids: Iterable[str], now_ns: int) -> None:
        """A planned attempt with these newcomers has ended, as a view or not: all members know."""
        for peer_id in peer_ids:
            count = self.tries(peer_id, now_ns)
            if len(self._tries) >= REMEMBERED:
                self._tries.clear()
            self._tries[peer_id] = (count + 1, now_ns)

    def tries(self, peer_id: str, now_ns: int) -> int:
        """How many attempts there were with the newcomer, each within `FREE_AGAIN_NS` of the one
        before; 0 once that time has passed."""
        count, tried_ns = self._tries.get(peer_id, (0, 0))
        return count if now_ns - tried_ns <= FREE_AGAIN_NS else 0

    def refuse(self, peer_id: str, now_ns: int) -> None:
        """Some member could not reach the newcomer, or it did not get its states, or did not come.
        It is refused for longer each time. A refusal during another counts as the same one: the
        member that finds it out first hears of it again when all have, and would otherwise refuse
        the newcomer for longer than they do."""
        self._asked.pop(peer_id, None)
        count, refused_ns = self._refused.get(peer_id, (0, 0))
        if count and now_ns - refused_ns > FORGIVEN_AFTER * (REFUSED_NS << (count - 1)):
            count = 0
        if not self.is_refused(peer_id, now_ns):
            count = min(count + 1, REFUSALS_LIMIT)
        if len(self._refused) >= REMEMBERED:
            self._refused.clear()
        self._refused[peer_id] = (count, now_ns)

    def let_in(self, peer_ids: tuple[str, ...]) -> None:
        for peer_id in peer_ids:
            self._asked.pop(peer_id, None)
            self._silent.pop(peer_id, None)
