"""Chains of waits: from a peer that is owed something to one that waits for nobody, or without a
reason.

A wait counts only if the plan knows it (`core.liveness.waits`), and if the peer has not accepted
what it says it lacks. What is held against the peer at the end is for `core.liveness.stalls`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from p2p_dtfm.core.liveness.waits import (
    COMPUTED_AGAIN_FOR,
    TENSORS,
    WORDS,
    PossibleWaits,
    may_wait,
)
from p2p_dtfm.core.messages.work import LACKS_LIMIT, Kind, Lack, Work

Handed = Callable[[str, Lack], bool]
"""`handed(peer, lack)`: this peer has given `peer` what it says it lacks, and it was accepted."""
_HEARD_BEFORE = {Kind.CLAIM: (Kind.AUDIT, Kind.PREPARED), Kind.AUDIT: (Kind.PREPARED,)}
"""By kind: a peer that lacks nothing but these has heard all of that kind."""


@dataclass
class WorkSaid:
    """What a peer has said of itself last."""

    progress: int
    work: Work | None


@dataclass(frozen=True)
class ChainEnd:
    """A peer in which a chain ends, and how it stands there."""

    peer_id: str
    denied: tuple[Lack, ...] = ()
    travels: bool = False
    """Something is on its way from the peer or to it: nobody sees it complete anything."""
    fetches: bool = False
    is_given: bool = False
    """Somebody says that it gives the peer something, which may be what it fetches."""
    owes_word: bool = False
    """The peer owes its claim or its Prepared alone. It says that it does nothing else, or all that
    it may have to compute first is here."""
    in_circle: bool = False
    """There is no end: peers say that they wait for one another. The honest ones among them know
    who lies, and are given time to say so."""
    by_word_of: str = ""
    """The holder that says it lacks this guardian's receipt. Nobody else sees receipts, so one of
    these two lies, and the other one knows it; empty where this peer lacks the receipt itself."""


class Chains:
    """All chains that begin at one peer; each peer is visited once. `mine`: where this peer says
    that it stands itself."""

    def __init__(
        self,
        me: str,
        mine: Work,
        said: Mapping[str, WorkSaid],
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
        self.found: dict[str, ChainEnd] = {}
        self.owing: set[str] = set()
        """Those who owe this peer itself something."""
        self.untold: set[str] = set()
        """Those who owe their word, and have said nothing of the step yet."""
        self.leads_away = False
        """A chain leads to a peer that this one does not watch. Such a peer owes this one its word
        at most, as it owes it to all, and others watch it."""

    def follow(self, owed: Lack, step: int) -> None:
        """Follows the chains that explain why `owed`, which is lacked in `step`, has not come."""
        if self._is_over_elsewhere():
            return
        self.owing.add(owed.peer_id)
        waiting = [(owed, step, self._me)]
        while waiting:
            owed, step, by = waiting.pop()
            if owed.peer_id not in self._visited:
                if owed.kind is Kind.RECEIPT and by != self._me:
                    # what all see the guardian owe, if anything, weighs more than one's word
                    end = ChainEnd(owed.peer_id, travels=True, by_word_of=by)
                    self.found.setdefault(owed.peer_id, end)
                elif not self._denies(owed, by):  # or another wait may lead there
                    self._visited.add(owed.peer_id)
                    found = self._visit(owed, step)
                    waiting += [(lack, at, owed.peer_id) for lack, at in found]
                self._note_untold(owed, step)

    def _is_over_elsewhere(self) -> bool:
        """Whether this peer is a spare, and somebody with a stage is beyond its step.

        A step ends without a spare, which learns of it later. It needed the work and the word of
        all that have a stage. So whatever the spare has not heard yet is on its way, or was lost.
        """
        if self._possible.has_stage(self._me):
            return False
        holders = (each for each in self._said if self._possible.has_stage(each))
        works = map(self._work_of, holders)
        return any(work is not None and work.step > self._mine.step for work in works)

    def _denies(self, owed: Lack, by: str) -> bool:
        """Whether the peer that owes this denies that `by` needs it to compute a work again.

        All have claimed. The peer says that it waits for the word of `by`, and gives it nothing.
        One of the two lies, and they know which: they wait in a circle. Else a liar could name a
        peer that it asks for nothing, and have all others accuse that peer.
        """
        work = self._work_of(owed.peer_id)
        if not self._possible.audits or work is None or by in (self._me, *work.sends_to):
            return False
        of_word = [it for it in work.lacks if it.peer_id == by and it.kind in COMPUTED_AGAIN_FOR]
        return owed.kind in TENSORS and bool(of_word)

    def _note_untold(self, owed: Lack, step: int) -> None:
        work, end = self._work_of(owed.peer_id), self.found.get(owed.peer_id)
        has_told = work is None or work.step >= step
        if self._is_due_word(owed) and not has_told and not (end is not None and end.owes_word):
            self.untold.add(owed.peer_id)

    def _visit(self, owed: Lack, step: int) -> list[tuple[Lack, int]]:
        """The waits that excuse the peer that owes this; without any, the chain ends there."""
        peer_id, work = owed.peer_id, self._work_of(owed.peer_id)
        if owed.kind is Kind.RECEIPT:  # whatever else the peer does
            self.found[peer_id] = ChainEnd(peer_id, travels=True)
        elif self._watched is not None and peer_id not in self._watched:
            self.leads_away = True
        elif work is None:
            self.found[peer_id] = ChainEnd(peer_id)
        elif work.step > step:
            if self._possible.has_stage(self._me):
                self.found[peer_id] = ChainEnd(peer_id)
            else:  # a step may end without a spare, which learns of it later
                self.owing.discard(peer_id)
        elif work.computes or work.fetches:
            fetches = work.fetches and not work.computes
            is_given = fetches and self._is_given(peer_id)
            is_done = owed.kind in WORDS and self._possible.sees_to_the_end(self._me, peer_id)
            is_done = is_done and not self._has_told_most(owed)
            self.found[peer_id] = ChainEnd(
                peer_id, fetches=fetches, is_given=is_given, owes_word=is_done and not fetches
            )
        else:
            return self._excuses(owed, work, step)
        return []

    def _excuses(self, owed: Lack, work: Work, step: int) -> list[tuple[Lack, int]]:
        """What a peer waits for that says it can do nothing."""
        is_known = work.step == step and owed.kind is Kind.PART and owed in self._mine.lacks
        lacks = [lack for lack in work.lacks if self._may_wait(owed, lack, work.step == step)]
        if is_known:  # this peer lacks the part itself, and no reduction holds up a part
            lacks = [lack for lack in lacks if lack.kind not in (Kind.PART, Kind.SUM)]
        of_others = [lack for lack in lacks if self._is_reason(lack, work.step)]
        if not of_others:
            of_me = tuple(lack for lack in lacks if lack.peer_id == self._me)
            self.found[owed.peer_id] = self._found_idle(owed, of_me, work)
        return [(lack, work.step) for lack in of_others]

    def _found_idle(self, owed: Lack, of_me: tuple[Lack, ...], work: Work) -> ChainEnd:
        """The end at a peer that says it can do nothing, and waits for nobody else. `of_me`: what
        it lacks of this peer."""
        denied = tuple(lack for lack in of_me if self._handed(owed.peer_id, lack))
        on_its_way = owed.peer_id in self._mine.sends_to
        comes = bool(of_me and on_its_way)
        travels = self._sends_work(work) or comes
        is_free = not comes and denied == of_me and not self._is_wanted(owed.peer_id, work)
        # others tell it what it lacks, but not at once
        is_told = any(self._has_heard_all(lack.kind) for lack in work.lacks)
        owes_word = self._is_due_word(owed) and is_free and not is_told
        return ChainEnd(owed.peer_id, denied, travels, owes_word=owes_word)

    def _is_due_word(self, owed: Lack) -> bool:
        return owed.kind in WORDS and self._words_count and not self._has_told_most(owed)

    def _has_told_most(self, owed: Lack) -> bool:
        """Whether the peer has told at least half of the others its claim: they wait for what comes
        later. They pass the claim on to those that have not heard it. A peer that blamed the maker
        for that would be the only one."""
        later, passed = _HEARD_BEFORE.get(owed.kind, ()), list[bool]()
        for peer_id in self._said.keys() - {owed.peer_id} if later else ():
            work = self._work_of(peer_id)
            if work is not None and self._possible.has_stage(peer_id):
                are_later = all(lack.kind in later for lack in work.lacks)
                passed.append(work.step == self._mine.step and bool(work.lacks) and are_later)
        return 0 < len(passed) <= 2 * sum(passed)

    def _all_have_begun(self) -> bool:
        """Whether all have begun this step, so that words that are late count.

        A stage-holder that lacks only words has got what rests on all others' work: then it makes
        no difference how far away somebody is. A spare waits for all words from a step's first
        moment on, and hears late what is done far away. For a spare words count once somebody has
        said Prepared: that needed all others as well.
        """
        if self._possible.has_stage(self._me):
            return True
        most = min(self._possible.stage_count, LACKS_LIMIT)
        return len(self._mine.lacks) < most

    def _is_given(self, peer_id: str) -> bool:
        """Whether anybody says that it gives `peer_id` something, which it may be fetching."""
        others = (self._work_of(each) for each in self._said if each != peer_id)
        said = (self._mine, *others)
        return any(work is not None and peer_id in work.sends_to for work in said)

    def _sends_work(self, work: Work) -> bool:
        """Whether the peer sends to somebody that does not fetch. What it gives to those that fetch
        is no excuse: anybody may ask for it."""
        theirs = map(self._work_of, work.sends_to)
        return any(each is None or not each.fetches for each in theirs)

    def _is_wanted(self, peer_id: str, work: Work) -> bool:
        """Whether a receiver of `peer_id` says that it lacks a tensor of it, or has not come so
        far. What the peer gives to those that compute works again holds up no word."""
        theirs = (self._mine if each == self._me else self._work_of(each) for each in work.sends_to)
        return any(
            each is None or each.step < work.step or _lacks_a_tensor(each, peer_id)
            for each in theirs
        )

    def _may_wait(self, owed: Lack, lack: Lack, in_one_step: bool) -> bool:
        if in_one_step and self._has_heard_all(lack.kind):
            return False
        is_due = may_wait(owed.kind, lack.kind, both_in_one_step=in_one_step)
        return is_due and self._possible.allow(owed.kind, owed.peer_id, lack)

    def _has_heard_all(self, kind: Kind) -> bool:
        """Whether this peer has heard all claims, or all audits, of this step. Others that have
        heard one tell it to a peer that has not. So to wait for one is no reason then, and its
        maker need not be the only one to say that it has told it."""
        later = _HEARD_BEFORE.get(kind, ())
        has_stage = bool(later) and self._possible.has_stage(self._me)
        return has_stage and all(lack.kind in later for lack in self._mine.lacks)

    def _is_reason(self, lack: Lack, step: int) -> bool:
        """Whether `lack` is a reason to wait. A peer that has gone on to a later step has given
        everybody all of this one. What is lacked of this peer itself is judged apart."""
        if lack.peer_id == self._me:
            return False
        work = self._work_of(lack.peer_id)
        return work is None or work.step <= step

    def _work_of(self, peer_id: str) -> Work | None:
        """Where a peer says that it stands, if that is in this view."""
        said = self._said.get(peer_id)
        work = said.work if said is not None else None
        return work if work is not None and work.view == self._mine.view else None


def _lacks_a_tensor(work: Work, of: str) -> bool:
    return any(lack.peer_id == of and lack.kind in TENSORS for lack in work.lacks)
