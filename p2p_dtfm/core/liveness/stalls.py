"""Who holds up a step, judged from who owes what to whom.

A peer that is owed something and can do nothing without it follows the chain of waits
(`core.liveness.chains`): to the peer that owes it, to what that peer says it lacks, and so on. The
chain ends in a peer that waits for nobody, or whose wait is no reason. The plan may know no such
wait, or the peer has accepted what it says it lacks of this one.

Time counts against the peer at the end. While it completes nothing, it has the time that one piece
of its work may take. While its work gets on, it has the time of a whole step
(`core.liveness.pace`). So a slow peer is waited for as long as it takes, and those who wait for it
are not blamed. A peer that is stuck, or lies, is suspected after seconds. One that is late with its
word alone, by less than that in each step, is suspected after some steps (`core.liveness.drips`).

Pure: time is an argument. Only time in which this peer was awake, and waited, counts. In a crowd a
peer that runs late itself is patient with others, as when it judges silence
(`core.liveness.lateness`).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import msgspec

from p2p_dtfm.core.liveness.chains import ChainEnd, Chains, Handed, WorkSaid
from p2p_dtfm.core.liveness.drips import JOINING_DIVISOR, LEAST_NS, Drips
from p2p_dtfm.core.liveness.lateness import Lateness
from p2p_dtfm.core.liveness.liveness import Suspect
from p2p_dtfm.core.liveness.news import HEARD_WITHIN_NS
from p2p_dtfm.core.liveness.pace import FLOOR_NS, Patience
from p2p_dtfm.core.liveness.waits import TENSORS, PossibleWaits
from p2p_dtfm.core.messages.work import LACKS_LIMIT, Kind, Lack, Work
from p2p_dtfm.core.protocol.snapshot import ViewId
from p2p_dtfm.core.units import SECOND_NS

PatienceOf = Callable[[str, int], Patience]
FELLOWS_THAT_JUDGE = 2
"""At least so many others must be there for drips to be judged. Of two members neither knows which
one is slow, and each would go on alone."""


@dataclass
class _End:
    """What is held against a peer in which chains end, during one step of this peer."""

    progress: int
    stuck_ns: int = 0
    held_ns: int = 0
    word_ns: int = 0
    """Nanoseconds of `held_ns` spent waiting for a word of the peer's own, which needs nobody
    else."""
    fetch_ns: int = 0
    """Nanoseconds of `held_ns` in which it fetched. What it did before has a time of its own."""
    false_ns: dict[Lack, int] = field(default_factory=dict)
    """By tensor that the peer says it lacks of this one, and has accepted: for how long."""
    found: ChainEnd | None = None
    """How the peer stood when a chain ended there last: that says how much time it has."""


class Stalls:
    """Call `heard` with what peers say of their work; `tick` gives suspicions, each once in a
    step."""

    def __init__(self, me: str, sleep_ns: int) -> None:
        """A longer time than `sleep_ns` between two ticks does not count: this peer slept."""
        self._me = me
        self._sleep_ns = sleep_ns
        self._said: dict[str, WorkSaid] = {}
        self._ends: dict[str, _End] = {}
        self._untold_ns: dict[str, int] = {}
        """By peer that has said nothing of this step: for how long it has owed its word in it."""
        self._at: tuple[object, int] | None = None
        self._ticked_ns: int | None = None
        self._suspected: set[str] = set()
        self._lateness = Lateness()
        self._drips = Drips()
        self._watched: frozenset[str] | None = None
        self._is_of_two = False
        """At most one of the peers that this one watches is in the view with it."""

    def watch(self, peers: Iterable[str]) -> None:
        """Forget all others. In a large view only these tell this peer what they do, and whoever
        watches the others judges those. Until this is called everybody is watched."""
        self._watched = frozenset(peers)
        self._said = {peer: said for peer, said in self._said.items() if peer in self._watched}
        self._drips.keep(self._watched)

    def heard(self, peer_id: str, progress: int, work: Work | None) -> None:
        """What a peer says of its work: a counter that grows, and where it stands."""
        if work is not None:
            lacks, sends_to = work.lacks[:LACKS_LIMIT], work.sends_to[:LACKS_LIMIT]
            work = msgspec.structs.replace(work, lacks=lacks, sends_to=sends_to)
        self._said[peer_id] = WorkSaid(progress, work)

    def tick(
        self,
        mine: Work | None,
        possible: PossibleWaits,
        handed: Handed,
        patience: PatienceOf,
        now_ns: int,
    ) -> list[Suspect]:
        """`mine`: where this peer stands; None while it takes no steps."""
        gap_ns = 0 if self._ticked_ns is None else now_ns - self._ticked_ns
        self._ticked_ns = now_ns
        self._lateness.ticked(now_ns)
        gap_ns = gap_ns if gap_ns <= self._sleep_ns else 0
        if mine is None:
            return []
        found: list[Suspect] = []
        self._is_of_two = self._watched is not None and (
            len(possible.members & self._watched - {self._me}) < FELLOWS_THAT_JUDGE
        )
        if self._at != (mine.view, mine.step):
            found = self._step_over(mine, now_ns)
            self._at, self._ends, self._untold_ns = (mine.view, mine.step), {}, {}
            self._suspected = {suspicion.peer_id for suspicion in found}
        for end in self._chains(mine, possible, handed, gap_ns):
            reason = self._judge(end, self._stretched(patience(end.peer_id, mine.step)), gap_ns)
            if reason and end.peer_id not in self._suspected:
                self._suspected.add(end.peer_id)
                found.append(Suspect(end.peer_id, reason))
        return found

    def _step_over(self, mine: Work, now_ns: int) -> list[Suspect]:
        """The step is over: suspects peers that let the others wait in it, as in those before."""
        if self._at is None or self._at[0] != mine.view:
            self._drips.begins(now_ns)
            return []
        waited_ns = {peer_id: end.word_ns for peer_id, end in self._ends.items() if end.word_ns}
        heard_within_ns = self._stretched_ns(HEARD_WITHIN_NS)
        for peer_id, untold_ns in self._untold_ns.items():
            if untold_ns >= heard_within_ns:
                waited_ns[peer_id] = waited_ns.get(peer_id, 0) + untold_ns
        found = self._drips.step_over(waited_ns, self._stretched_ns(LEAST_NS), now_ns)
        return [] if self._is_of_two else found

    def join(
        self, doubted: Iterable[str], patience: PatienceOf, view: ViewId | None
    ) -> list[Suspect]:
        """The step is stopped, since one of the `doubted` accuses another. Suspects now which of
        them were about to be suspected here. Half of their time is enough, by the same measure: who
        fetches, or has something on its way, still has more. `view`: the one in force; what was
        held against somebody in another view's step does not count."""
        found = []
        if view is None:
            return []
        ends = self._ends if self._at is not None and self._at[0] == view else {}
        for peer_id in sorted(set(doubted) & ends.keys() - self._suspected):
            end, step = ends[peer_id], self._at[1] if self._at else 0
            limits = self._stretched(patience(peer_id, step))
            if self._reason(end, limits, JOINING_DIVISOR):
                self._suspected.add(peer_id)
                found.append(Suspect(peer_id, "is waited for, and one of those in doubt"))
        return found + self._join_drips(doubted)

    def _join_drips(self, doubted: Iterable[str]) -> list[Suspect]:
        if self._is_of_two:
            return []
        asked = set(doubted) - self._suspected
        found = self._drips.join(asked, self._stretched_ns(LEAST_NS))
        self._suspected |= {suspicion.peer_id for suspicion in found}
        return found

    def _stretched(self, patience: Patience) -> Patience:
        return Patience(
            self._stretched_ns(patience.stuck_ns),
            self._stretched_ns(patience.step_ns),
            self._stretched_ns(patience.fetch_ns),
            self._stretched_ns(patience.given_ns),
            self._stretched_ns(patience.fetch_all_ns),
            self._stretched_ns(patience.given_all_ns),
        )

    def _stretched_ns(self, patience_ns: int) -> int:
        """The patience, longer while this peer is late: others on its slow machine are as late."""
        fellows = len(self._watched - {self._me}) if self._watched is not None else 0
        return self._lateness.stretched_ns(patience_ns, fellows)

    # chains -----------------------------------------------------------------------------------

    def _chains(
        self, mine: Work, possible: PossibleWaits, handed: Handed, gap_ns: int
    ) -> list[ChainEnd]:
        """Where the waits of this peer end, each peer once."""
        if mine.computes or mine.fetches:
            return []
        walk = Chains(self._me, mine, self._said, self._watched, possible, handed)
        for lack in sorted(mine.lacks, key=lambda lack: lack.kind is not Kind.PART):
            walk.follow(lack, mine.step)
        for peer_id in walk.untold:
            self._untold_ns[peer_id] = self._untold_ns.get(peer_id, 0) + gap_ns
        if not walk.found and not walk.leads_away:
            return [ChainEnd(peer_id, in_circle=True) for peer_id in sorted(walk.owing)]
        return [walk.found[peer_id] for peer_id in sorted(walk.found)]

    def _judge(self, found: ChainEnd, patience: Patience, gap_ns: int) -> str:
        """Why a peer in which a chain ends is suspected; nothing while it has time."""
        said = self._said.get(found.peer_id)
        progress = -1 if said is None else said.progress
        end = self._ends.setdefault(found.peer_id, _End(progress))
        if found.fetches and not end.fetch_ns:
            end.stuck_ns = 0
        end.held_ns += gap_ns
        end.stuck_ns += gap_ns
        end.word_ns += gap_ns * found.owes_word
        end.fetch_ns += gap_ns * found.fetches
        if progress != end.progress:
            end.progress, end.stuck_ns = progress, 0
        end.false_ns = {lack: end.false_ns.get(lack, 0) + gap_ns for lack in found.denied}
        end.found = found
        return self._reason(end, patience)

    def _reason(self, end: _End, patience: Patience, divisor: int = 1) -> str:
        """Why the peer is suspected if it has one part in `divisor` of its time; empty if it is
        not."""
        found = end.found
        if found is None:
            return ""

        def late(waited_ns: int, limit_ns: int, text: str) -> str:
            is_late = divisor * waited_ns >= limit_ns
            return f"{text} for {waited_ns / SECOND_NS:.1f} s" if is_late else ""

        if found.fetches:
            limit_ns, all_ns = _time_of_fetch(found, patience)
            nothing = late(end.stuck_ns, limit_ns, "fetches, and nothing comes of it")
            return nothing or late(end.fetch_ns, all_ns, "fetches, and it does not come to an end")
        for lack, false_ns in end.false_ns.items():
            if divisor * false_ns >= self._stretched_ns(FLOOR_NS):
                return f"says that it lacks {_named(lack)} of this peer, and has accepted it"
        if found.by_word_of:
            # a liar would have all others take its side against one guardian after the other
            is_joining = divisor > 1
            owes = f"owes {found.by_word_of} a receipt, as that one says,"
            return "" if is_joining else late(end.held_ns, 2 * patience.step_ns, owes)
        if found.in_circle:
            return late(end.held_ns, 2 * patience.step_ns, "waits in a circle with others")
        if not found.travels and divisor * end.stuck_ns >= patience.stuck_ns:
            return late(end.stuck_ns, patience.stuck_ns, "is waited for, and completes nothing")
        return late(end.held_ns, max(patience.step_ns, patience.stuck_ns), "is waited for")


def _time_of_fetch(found: ChainEnd, patience: Patience) -> tuple[int, int]:
    """How long a fetch may bring nothing, and how long it may take in all: a peer may read many
    files in a step, one after the other."""
    limit_ns, all_ns = patience.fetch_ns, patience.fetch_all_ns
    if found.is_given:
        limit_ns = max(limit_ns, patience.given_ns)
        all_ns = max(all_ns, patience.given_all_ns)
    return limit_ns, max(limit_ns, all_ns)


def _named(lack: Lack) -> str:
    if lack.kind in TENSORS:
        return f"{lack.kind} {lack.index} of layer {lack.layer}"
    return f"{lack.kind}"
