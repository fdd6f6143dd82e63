"""Who holds up a step, judged from who owes what to whom.

A peer that is owed something and can do nothing without it follows the chain of waits: of whoever
owes it, what that peer says it lacks, and so on. The chain ends in a peer that waits for nobody, or
whose wait is no reason: the plan knows no such wait, or what it says it lacks of this peer it has
accepted. There time counts: while it completes nothing, against what one piece of its work may
take; while its work gets on, against what a whole step may take (`core.liveness.pace`). So a slow
peer is waited for as long as it takes, and those who wait for it are not blamed; who is stuck, or
lies, is suspected after seconds; who is late with its word alone, by less than that in each step,
after some steps (`core.liveness.drips`).

Pure: time is an argument. Only time in which this peer was awake, and waited, counts. In a crowd
who runs late itself is patient with others, as in judging silence (`core.liveness.lateness`).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import msgspec

from p2p_dtfm.core.liveness.drips import JOINING_DIVISOR, LEAST_NS, Drips
from p2p_dtfm.core.liveness.lateness import Lateness
from p2p_dtfm.core.liveness.liveness import Suspicion
from p2p_dtfm.core.liveness.news import HEARD_WITHIN_NS
from p2p_dtfm.core.liveness.pace import FLOOR_NS, SECOND_NS, Patience
from p2p_dtfm.core.liveness.waits import TENSORS, WORDS, PossibleWaits, may_wait
from p2p_dtfm.core.messages.work import LACKS_LIMIT, Kind, Lack, Work
from p2p_dtfm.core.protocol.snapshot import ViewId

Handed = Callable[[str, Lack], bool]
"""`handed(peer, lack)`: this peer has given `peer` what it says it lacks, and it was accepted."""
PatienceOf = Callable[[str, int], Patience]
FELLOWS_THAT_JUDGE = 2
"""Beside this peer. Of two members neither knows which one is slow, and each would go on alone."""


@dataclass
class _Said:
    progress: int
    work: Work | None


@dataclass
class _End:
    """What is held against a peer in which chains end, in one step of this peer's."""

    progress: int
    stuck_ns: int = 0
    held_ns: int = 0
    word_ns: int = 0
    """Of that, for a word of its own, which needs nobody else."""
    false_ns: dict[Lack, int] = field(default_factory=dict)
    """By what it says it lacks of this peer, and has accepted."""
    found: "_Found | None" = None
    """How it stood when a chain ended there last: that says how much time it has."""


@dataclass(frozen=True)
class _Found:
    """A chain ends here."""

    peer_id: str
    denied: tuple[Lack, ...] = ()
    travels: bool = False
    """Something is on its way from it or to it: nobody sees it complete anything."""
    fetches: bool = False
    is_given: bool = False
    """What it fetches: somebody says that it gives it something."""
    owes_word: bool = False
    """Its claim or its Prepared alone: it says that it does nothing else, or what it may have to
    compute first is here."""
    in_circle: bool = False
    """There is no end: peers say that they wait for one another. Those of them that do not lie know
    who does, and are given the time to say so."""


class Stalls:
    """`heard` whatever peers say of their work; `tick` gives suspicions, each once in a step."""

    def __init__(self, me: str, sleep_ns: int) -> None:
        """A longer time than `sleep_ns` between two ticks does not count: this peer slept."""
        self._me = me
        self._sleep_ns = sleep_ns
        self._said: dict[str, _Said] = {}
        self._ends: dict[str, _End] = {}
        self._untold_ns: dict[str, int] = {}
        """For how long each has owed its word in this step of which it has said nothing."""
        self._at: tuple[object, int] | None = None
        self._ticked_ns: int | None = None
        self._suspected: set[str] = set()
        self._lateness = Lateness()
        self._drips = Drips()
        self._watched: frozenset[str] | None = None
        self._is_of_two = False
        """Of those that it watches one at most is in the view with it."""

    def watch(self, peers: Iterable[str]) -> None:
        """Forget all others: of many these tell what they do, and who watches the rest judges it.
        Until this is called everybody is watched."""
        self._watched = frozenset(peers)
        self._said = {peer: said for peer, said in self._said.items() if peer in self._watched}
        self._drips.keep(self._watched)

    def heard(self, peer_id: str, progress: int, work: Work | None) -> None:
        """What a peer says of its work: a counter that grows, and where it stands."""
        if work is not None:
            lacks, sends_to = work.lacks[:LACKS_LIMIT], work.sends_to[:LACKS_LIMIT]
            work = msgspec.structs.replace(work, lacks=lacks, sends_to=sends_to)
        self._said[peer_id] = _Said(progress, work)

    def tick(
        self,
        mine: Work | None,
        possible: PossibleWaits,
        handed: Handed,
        patience: PatienceOf,
        now_ns: int,
    ) -> list[Suspicion]:
        """`mine`: where this peer stands; None while it takes no steps."""
        gap_ns = 0 if self._ticked_ns is None else now_ns - self._ticked_ns
        self._ticked_ns = now_ns
        self._lateness.ticked(now_ns)
        gap_ns = gap_ns if gap_ns <= self._sleep_ns else 0
        if mine is None:
            return []
        found: list[Suspicion] = []
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
                found.append(Suspicion(end.peer_id, reason))
        return found

    def _step_over(self, mine: Work, now_ns: int) -> list[Suspicion]:
        """Who has done no more in its step than let the others wait, as in those before."""
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
    ) -> list[Suspicion]:
        """The step is stopped, since one of these accuses another: who was about to be suspected
        here is so now. Half of the time is enough, and that by the same measure: who fetches, or
        has something on its way, is given as much more. `view`: in force; what was held against
        somebody in another one's step is over."""
        found = []
        if view is None:
            return []
        ends = self._ends if self._at is not None and self._at[0] == view else {}
        for peer_id in sorted(set(doubted) & ends.keys() - self._suspected):
            end, step = ends[peer_id], self._at[1] if self._at else 0
            limits = self._stretched(patience(peer_id, step))
            if self._reason(end, limits, JOINING_DIVISOR):
                self._suspected.add(peer_id)
                found.append(Suspicion(peer_id, "is waited for, and one of those in doubt"))
        return found + self._join_drips(doubted)

    def _join_drips(self, doubted: Iterable[str]) -> list[Suspicion]:
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
        """Those who share a slow machine with this peer are as late as it is."""
        fellows = len(self._watched - {self._me}) if self._watched is not None else 0
        return self._lateness.stretched_ns(patience_ns, fellows)

    # chains -----------------------------------------------------------------------------------

    def _chains(
        self, mine: Work, possible: PossibleWaits, handed: Handed, gap_ns: int
    ) -> list[_Found]:
        """Where the waits of this peer end, each peer once."""
        if mine.computes or mine.fetches:
            return []
        walk = _Walk(self._me, mine, self._said, self._watched, possible, handed)
        for lack in sorted(mine.lacks, key=lambda lack: lack.kind is not Kind.PART):
            walk.follow(lack, mine.step)
        for peer_id in walk.untold:
            self._untold_ns[peer_id] = self._untold_ns.get(peer_id, 0) + gap_ns
        if not walk.found and not walk.leads_away:
            return [_Found(peer_id, in_circle=True) for peer_id in sorted(walk.owing)]
        return [walk.found[peer_id] for peer_id in sorted(walk.found)]

    def _judge(self, found: _Found, patience: Patience, gap_ns: int) -> str:
        """Why a peer in which a chain ends is suspected; nothing while it has time."""
        said = self._said.get(found.peer_id)
        progress = -1 if said is None else said.progress
        end = self._ends.setdefault(found.peer_id, _End(progress))
        end.held_ns += gap_ns
        end.stuck_ns += gap_ns
        end.word_ns += gap_ns * found.owes_word
        if progress != end.progress:
            end.progress, end.stuck_ns = progress, 0
        end.false_ns = {lack: end.false_ns.get(lack, 0) + gap_ns for lack in found.denied}
        end.found = found
        return self._reason(end, patience)

    def _reason(self, end: _End, patience: Patience, divisor: int = 1) -> str:
        """The same with such a part of the time that it has."""
        found = end.found
        if found is None:
            return ""

        def late(waited_ns: int, limit_ns: int, text: str) -> str:
            is_late = divisor * waited_ns >= limit_ns
            return f"{text} for {waited_ns / SECOND_NS:.1f} s" if is_late else ""

        if found.fetches:
            limit_ns, all_ns = _time_of_fetch(found, patience)
            nothing = late(end.stuck_ns, limit_ns, "fetches, and nothing comes of it")
            return nothing or late(end.held_ns, all_ns, "fetches, and it does not come to an end")
        for lack, false_ns in end.false_ns.items():
            if divisor * false_ns >= self._stretched_ns(FLOOR_NS):
                return f"says that it lacks {_named(lack)} of this peer, and has accepted it"
        if found.in_circle:
            return late(end.held_ns, 2 * patience.step_ns, "waits in a circle with others")
        if not found.travels and divisor * end.stuck_ns >= patience.stuck_ns:
            return late(end.stuck_ns, patience.stuck_ns, "is waited for, and completes nothing")
        return late(end.held_ns, max(patience.step_ns, patience.stuck_ns), "is waited for")


def _time_of_fetch(found: _Found, patience: Patience) -> tuple[int, int]:
    """It may read many files in a step, one after the other: of each, by what comes, and of all of
    them together."""
    limit_ns, all_ns = patience.fetch_ns, patience.fetch_all_ns
    if found.is_given:
        limit_ns = max(limit_ns, patience.given_ns)
        all_ns = max(all_ns, patience.given_all_ns)
    return limit_ns, max(limit_ns, all_ns)


_HEARD_BEFORE = {Kind.CLAIM: (Kind.AUDIT, Kind.PREPARED), Kind.AUDIT: (Kind.PREPARED,)}
"""Who lacks one of these last ones has heard all of that kind."""


def _lacks_a_tensor(work: Work, of: str) -> bool:
    return any(lack.peer_id == of and lack.kind in TENSORS for lack in work.lacks)


def _named(lack: Lack) -> str:
    if lack.kind in TENSORS:
        return f"{lack.kind} {lack.index} of layer {lack.layer}"
    return f"{lack.kind}"


class _Walk:
    """Along the waits, from this peer on; each peer is visited once."""

    def __init__(
        self,
        me: str,
        mine: Work,
        said: dict[str, _Said],
        watched: frozenset[str] | None,
        possible: PossibleWaits,
        handed: Handed,
    ) -> None:
        self._me = me
        self._mine = mine
        self._said = said
        self._watched = watched
        self._possible = possible
        self._handed = handed
        self._visited: set[str] = set()
        self._words_count = self._all_have_begun()
        self.found: dict[str, _Found] = {}
        self.owing: set[str] = set()
        """Those who owe this peer itself something."""
        self.untold: set[str] = set()
        """Those who owe their word, and have said nothing of the step yet."""
        self.leads_away = False
        """To one of whom this peer hears nothing: it owes this one its word at most, as it owes it
        to all, and others watch it."""

    def follow(self, owed: Lack, step: int) -> None:
        """`owed` is lacked in `step`: why has it not come?"""
        self.owing.add(owed.peer_id)
        waiting = [(owed, step)]
        while waiting:
            owed, step = waiting.pop()
            if owed.peer_id not in self._visited:
                self._visited.add(owed.peer_id)
                waiting += self._visit(owed, step)
                self._note_untold(owed, step)

    def _note_untold(self, owed: Lack, step: int) -> None:
        work, end = self._work_of(owed.peer_id), self.found.get(owed.peer_id)
        has_told = work is None or work.step >= step
        if self._is_due_word(owed) and not has_told and not (end is not None and end.owes_word):
            self.untold.add(owed.peer_id)

    def _visit(self, owed: Lack, step: int) -> list[tuple[Lack, int]]:
        """The waits that excuse who owes this; if there are none, the chain ends there."""
        peer_id, work = owed.peer_id, self._work_of(owed.peer_id)
        if owed.kind is Kind.RECEIPT:  # whatever else it does
            self.found[peer_id] = _Found(peer_id, travels=True)
        elif self._watched is not None and peer_id not in self._watched:
            self.leads_away = True
        elif work is None:
            self.found[peer_id] = _Found(peer_id)
        elif work.step > step:
            if self._possible.has_stage(self._me):
                self.found[peer_id] = _Found(peer_id)
            else:  # a step may end without a spare, which learns of it later
                self.owing.discard(peer_id)
        elif work.computes or work.fetches:
            fetches = work.fetches and not work.computes
            is_given = fetches and self._is_given(peer_id)
            is_done = owed.kind in WORDS and self._possible.are_fellows(self._me, peer_id)
            is_done = is_done and not self._has_told_most(owed)
            self.found[peer_id] = _Found(
                peer_id, fetches=fetches, is_given=is_given, owes_word=is_done and not fetches
            )
        else:
            return self._excuses(owed, work, step)
        return []

    def _excuses(self, owed: Lack, work: Work, step: int) -> list[tuple[Lack, int]]:
        """Of a peer that says it can do nothing: what it waits for."""
        is_known = work.step == step and owed.kind is Kind.PART and owed in self._mine.lacks
        lacks = [lack for lack in work.lacks if self._may_wait(owed, lack, work.step == step)]
        if is_known:  # this peer needs nobody's word for it, and no reduction holds up a part of it
            lacks = [lack for lack in lacks if lack.kind not in (Kind.PART, Kind.SUM)]
        of_others = [lack for lack in lacks if self._is_reason(lack, work.step)]
        if not of_others:
            of_me = tuple(lack for lack in lacks if lack.peer_id == self._me)
            self.found[owed.peer_id] = self._found_idle(owed, of_me, work)
        return [(lack, work.step) for lack in of_others]

    def _found_idle(self, owed: Lack, of_me: tuple[Lack, ...], work: Work) -> _Found:
        """Of one that says it can do nothing, and waits for nobody else: `of_me` it lacks."""
        denied = tuple(lack for lack in of_me if self._handed(owed.peer_id, lack))
        on_its_way = owed.peer_id in self._mine.sends_to
        comes = bool(of_me and on_its_way)
        travels = self._sends_work(work) or comes
        is_free = not comes and denied == of_me and not self._is_wanted(owed.peer_id, work)
        is_told = any(self._has_heard_all(lack.kind) for lack in work.lacks)  # but not at once
        owes_word = self._is_due_word(owed) and is_free and not is_told
        return _Found(owed.peer_id, denied, travels, owes_word=owes_word)

    def _is_due_word(self, owed: Lack) -> bool:
        return owed.kind in WORDS and self._words_count and not self._has_told_most(owed)

    def _has_told_most(self, owed: Lack) -> bool:
        """Its claim, since they wait for what comes later: these tell it to who has not heard it,
        and whoever blamed it for that would be the only one."""
        later, passed = _HEARD_BEFORE.get(owed.kind, ()), list[bool]()
        for peer_id in self._said.keys() - {owed.peer_id} if later else ():
            work = self._work_of(peer_id)
            if work is not None and self._possible.has_stage(peer_id):
                are_later = all(lack.kind in later for lack in work.lacks)
                passed.append(work.step == self._mine.step and bool(work.lacks) and are_later)
        return 0 < len(passed) <= 2 * sum(passed)

    def _all_have_begun(self) -> bool:
        """This step. Who has a stage, and lacks no more tensors, has got what rests on all others'
        work: how far away somebody is makes no difference then. A spare waits for all words from a
        step's first moment on, and what is done of it far away it hears late: until somebody has
        said Prepared, for which all were needed as well."""
        if self._possible.has_stage(self._me):
            return True
        most = min(self._possible.stage_count, LACKS_LIMIT)
        return len(self._mine.lacks) < most

    def _is_given(self, peer_id: str) -> bool:
        """Whether anybody says that it gives this one what it may fetch."""
        others = (self._work_of(each) for each in self._said if each != peer_id)
        said = (self._mine, *others)
        return any(work is not None and peer_id in work.sends_to for work in said)

    def _sends_work(self, work: Work) -> bool:
        """What is given to those that fetch excuses nobody: anybody may ask for it."""
        theirs = map(self._work_of, work.sends_to)
        return any(each is None or not each.fetches for each in theirs)

    def _is_wanted(self, peer_id: str, work: Work) -> bool:
        """Whether one of those to whom it gives something says that it lacks a tensor of it, or has
        not come so far. What else it gives, to whom computes works again, holds up no word."""
        theirs = (self._mine if each == self._me else self._work_of(each) for each in work.sends_to)
        return any(
            each is None or each.step < work.step or _lacks_a_tensor(each, peer_id)
            for each in theirs
        )

    def _may_wait(self, owed: Lack, lack: Lack, in_one_step: bool) -> bool:
        if in_one_step and self._has_heard_all(lack.kind):
            return False
        is_due = may_wait(owed.kind, lack.kind, both_in_one_step=in_one_step)
        return is_due and self._possible.allow(owed.peer_id, lack)

    def _has_heard_all(self, kind: Kind) -> bool:
        """All claims, or audits, of this step: whoever has not heard one is told it by others that
        have. So nobody waits for one that this peer has heard, nor is who has said it the first,
        and the only one, to say so."""
        later = _HEARD_BEFORE.get(kind, ())
        has_stage = bool(later) and self._possible.has_stage(self._me)
        return has_stage and all(lack.kind in later for lack in self._mine.lacks)

    def _is_reason(self, lack: Lack, step: int) -> bool:
        """Who has gone on to a later step has given everybody all of this one."""
        if lack.peer_id == self._me:
            return False
        work = self._work_of(lack.peer_id)
        return work is None or work.step <= step

    def _work_of(self, peer_id: str) -> Work | None:
        """Where a peer says that it stands in this view."""
        said = self._said.get(peer_id)
        work = said.work if said is not None else None
        return work if work is not None and work.view == self._mine.view else None
