"""What was claimed of a step that was stopped, held against what the same work is when the step is
done again.

Whoever is drawn knows it from the claims, before anybody has computed its work again. One that lied
could have all agree anew then, as may who has lost a tensor, or start again: the step was done
again, rightly, since the first step of a view is audited whole, and it lied in the next ones until
it was drawn again. At any rate below one nobody ever convicted it.

But what is computed from the same states, by the same plan and as many threads is the same bits. So
who has claimed, or sent, two things for one work lies in one of them, also where it has sent one
thing and claimed another before the step was stopped; and of who is gone, or
computes in another way now, the others compute the work again that it did. Where only chunks are
others, as records tell of other links, what does not depend on them is compared. Each goes by what
it has heard and got itself: it may be that a few alone were told. So whom more than half of all
stage-holders name is convicted, and of whom fewer say so nothing follows, for them neither
(`accounts.findings`).
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from p2p_dtfm.core.audit.boundaries import TRAINING, Due, beside, other_frames
from p2p_dtfm.core.audit.work import OWN_BYTES, WORK_BYTES, fit, made_in
from p2p_dtfm.core.messages.audit_messages import Claimed, Parts, Share
from p2p_dtfm.core.protocol.canonical import digest_bytes, encode
from p2p_dtfm.core.protocol.plan import Plan

STAYING_LIMIT = 8
"""Works of those that are still there: all compute them, while nobody goes on."""


class WayOfWork(NamedTuple):
    """In which a work was computed."""

    arithmetic: str
    threads: int


def way_of(share: Share) -> WayOfWork:
    return WayOfWork(share.arithmetic, share.threads)


class Alike(NamedTuple):
    """What is now as it was then of how tensors travel, besides who has which stage."""

    chunks: bool = True
    codecs: bool = True
    """Of what goes from stage to stage."""


ALL_ALIKE = Alike()


@dataclass(frozen=True)
class StoppedStep:
    """In a view that has ended before it was committed, as this peer has heard it."""

    me: str
    step: int
    base: str
    """The lineage of the states from which it starts."""
    plan: Plan
    claims: Mapping[str, Claimed]
    not_audited: frozenset[str]
    """Of whom a work was to be computed again, as far as it is known here, and nobody has said that
    it comes to what was claimed: of all where somebody has opened what is not so, and of who names
    another arithmetic than in the step before."""
    ways: Mapping[str, WayOfWork]
    """In which each computed last."""
    earlier_ways: Mapping[str, WayOfWork] = field(default_factory=dict)
    """In which each computed the steps before, of that view."""
    was_drawn: bool = False
    """It was not its view's first one, in which all is audited and whoever has come got its states:
    whoever lies there has to do it rightly before anything commits."""
    lives: Mapping[str, int] = field(default_factory=dict)
    """Of the members of that view."""
    sums: Mapping[str, bytes] = field(default_factory=dict)
    """`work.sums_of_others`, as they had come here."""
    due: Due = TRAINING
    """What its claims are of."""

    def is_done_again(self, step: int, base: str) -> bool:
        return (self.step, self.base) == (step, base)

    def changed(
        self,
        claims: Mapping[str, Claimed],
        alike: Alike = ALL_ALIKE,
        got_states: Collection[str] = (),
    ) -> list[str]:
        """Whose work is another now, by the same pipelines; not this peer itself. `got_states`: who
        may have had its states from others since."""
        others = sorted(claims.keys() - {self.me})
        changed = partial(self._is_other, alike=alike, got_states=got_states)
        return [peer_id for peer_id in others if changed(peer_id, claims[peer_id])]

    def _is_other(
        self, peer_id: str, said: Claimed, alike: Alike, got_states: Collection[str]
    ) -> bool:
        before = self.claims.get(peer_id)
        if before is not None:
            if before.share.parameters != said.share.parameters:
                # in a first step, as since then, others may have given it false states
                return self.was_drawn and peer_id not in got_states
            if _given(before.share) != _given(said.share) or not said.share.arithmetic:
                return False
            then, now = (self._made(peer_id, it.share, alike) for it in (before, said))
            if then != now or alike != ALL_ALIKE:
                return then != now
            # of the same parts it makes the same sums
            got_others = self._got_otherwise(peer_id, before.share, said.share)
            length = OWN_BYTES if got_others else WORK_BYTES
            return before.work[:length] != said.work[:length]
        # it knew the draw from the others' claims, and has kept its own to itself; as far as is
        # known it computed then as it does now, and so that bits repeat
        is_alike = bool(said.share.arithmetic) and self.ways.get(peer_id) == way_of(said.share)
        is_whole = is_alike and alike.chunks and not beside(self.plan, peer_id)
        losses = said.share.losses.get(peer_id, b"")
        return is_whole and self.has_sent_other(peer_id, said.share.parts, losses)

    def got_states(
        self, plan: Plan, lives: Mapping[str, int], since: Iterable[Plan]
    ) -> frozenset[str]:
        """Whose states need not be those of then: who has begun a new life, or had other layers in
        a plan `since`."""
        return frozenset(
            it
            for it in plan.stage_holders()
            if lives.get(it) != self.lives.get(it)
            or any(each.layers_of(it) != self.plan.layers_of(it) for each in since)
        )

    def excused(self, claims: Mapping[str, Claimed], alike: Alike = ALL_ALIKE) -> dict[str, str]:
        """Who says that something else came to it then, so that nobody can hold it to what it made
        of that, and from whom: that one has claimed the same both times, so one of the two says
        what is not so. Who could say so for nothing would lie until it is drawn."""
        both = self.claims, claims
        then, now = ({it: claim.share for it, claim in each.items()} for each in both)
        pairs = other_frames(then, now, self.plan, self.due) if alike.codecs else set()
        pairs |= self._other_parts(then, now) if alike.chunks else set()
        in_turn = sorted(pairs, reverse=True)
        return {receiver: sender for receiver, sender in in_turn if receiver != self.me}

    def _other_parts(
        self, then: Mapping[str, Share], now: Mapping[str, Share]
    ) -> set[tuple[str, str]]:
        """As `other_frames` of what is added up."""
        found = set()
        for peer_id in then.keys() & now.keys():
            for number, holder, chunk in self._got_otherwise(peer_id, then[peer_id], now[peer_id]):
                sent = [it[holder].parts[number] for it in (then, now) if holder in it]
                if len(sent) == 2 and len({parts[chunk : chunk + 1] for parts in sent}) == 1:
                    found.add((peer_id, holder))
        return found

    def _got_otherwise(self, peer_id: str, then: Share, now: Share) -> list[tuple[int, str, int]]:
        """(segment, holder, chunk) of which it says that it has got two unlike parts. Who states
        none, or one of its own, says of nobody that it has sent it something else."""
        found = []
        for number, segment in enumerate(self.plan.segments()):
            both = zip(then.got.get(number, ()), now.got.get(number, ()), strict=False)
            for holder, parts in zip(segment.holders, both, strict=False):
                pairs = enumerate(zip(*parts, strict=False)) if holder != peer_id else ()
                found += [(number, holder, n) for n, (a, b) in pairs if a and b and a != b]
        return found

    def _made(self, peer_id: str, share: Share, alike: Alike) -> tuple[object, ...]:
        """Of a work what its maker's gradients and frames come to however these travel now. Of a
        segment that it holds alone all is one chunk."""
        alone = [n for n, it in enumerate(self.plan.segments()) if it.holders == (peer_id,)]
        parts = share.parts if alike.chunks else {n: share.parts.get(n, ()) for n in alone}
        edges = share.edges if alike.codecs else {}
        return made_in(parts, edges, share.losses.get(peer_id, b""))

    def in_other_ways(self, claims: Mapping[str, Claimed], barred: Collection[str]) -> list[str]:
        """Who was to be audited, and computes in another way now, though nothing else is another:
        it cannot be held to what it claims. How it did compute its claim says; who has kept that to
        itself did as in the steps before of that view, in which nobody's threads change."""
        others = sorted(claims.keys() - {self.me, *barred})
        return [it for it in others if self._is_in_another_way(it, claims[it].share)]

    def _is_in_another_way(self, peer_id: str, share: Share) -> bool:
        if beside(self.plan, peer_id):
            return False
        is_told = peer_id in self.claims
        if is_told and self._named_another(peer_id):
            return share.arithmetic == self._arithmetic_here
        is_due = peer_id in self.not_audited and self._can_judge(peer_id)
        # a device whose bits do not repeat may have been found out in that very step
        return (
            is_due and self.ways[peer_id] != way_of(share) and (is_told or share.arithmetic != "")
        )

    def _named_another(self, peer_id: str) -> bool:
        """Arithmetic in that step than in the steps before, so that nobody could be drawn for it.
        Who has the same again as before lies in one of them."""
        earlier, here = self.earlier_ways.get(peer_id), self._arithmetic_here
        had_mine = earlier is not None and bool(here) and earlier.arithmetic == here
        return had_mine and self.ways[peer_id].arithmetic != here

    @property
    def _arithmetic_here(self) -> str:
        mine = self.ways.get(self.me)
        return mine.arithmetic if mine is not None else ""

    def has_sent_other(self, peer_id: str, parts: Parts, losses: bytes) -> bool:
        """What came here from this peer is no part of such gradients, or it has told of other
        losses."""
        mine = self.claims.get(self.me)
        told = mine.share.losses.get(peer_id, b"") if mine is not None else b""
        if told and told != losses:
            return True
        for number, segment in enumerate(self.plan.segments()):
            got = mine.share.got.get(number) if mine is not None else None
            if got is None or peer_id not in segment.holders:
                continue
            came = got[segment.holders.index(peer_id)]
            if came and not fit(came, parts.get(number, ())):
                return True
        return False

    def sent_other(self) -> list[str]:
        """Who has claimed something else than it had sent: it knew that it was drawn, and its work
        is right by its claim."""
        others = sorted(self.claims.keys() - {self.me})
        return [it for it in others if self._has_claimed_other(it, self.claims[it])]

    def _has_claimed_other(self, peer_id: str, said: Claimed) -> bool:
        sums, share = said.work[OWN_BYTES:], said.share
        if self.sums.get(peer_id, sums) != sums:
            return True
        return self.has_sent_other(peer_id, share.parts, share.losses.get(peer_id, b""))

    def unjudged(self, plan: Plan, barred: Collection[str], view: str = "") -> list[str]:
        """Who was to be audited, and cannot be held to what it claims now: who has no stage any
        more, or all, where only chunks are others. Where one is gone the others have other
        microbatches: of these as many as one has time for, or a colluder would go whenever somebody
        is drawn; of more, those that `view`, the snapshot's digest, chooses, which says whose is
        the first, too, after those that are gone. Of those that computed the whole model: what has
        come into a stage in a pipeline is gone with the view."""
        missing = {it for it in self.not_audited - {self.me, *barred} if self._can_judge(it)}
        stay = missing & set(plan.stage_holders())
        chosen = sorted(stay, key=lambda it: digest_bytes(encode([view, it])))
        if plan.pipelines != self.plan.pipelines:
            chosen = chosen[: STAYING_LIMIT if self.was_drawn else 0]
        return [*sorted(missing - stay), *chosen]

    def _can_judge(self, peer_id: str) -> bool:
        """By the arithmetic that it had in the steps before, if there were any: in a view nobody's
        is another all of a sudden."""
        theirs = self.earlier_ways.get(peer_id) or self.ways.get(peer_id)
        if theirs is None or beside(self.plan, peer_id):
            return False
        return bool(self._arithmetic_here) and self._arithmetic_here == theirs.arithmetic

    def denies(self, peer_id: str, own: bytes, parts: Parts, losses: bytes) -> bool:
        """Whether what its work comes to here, `own`, `parts` and `losses`, is not what it has
        claimed, or has sent."""
        claim = self.claims.get(peer_id)
        if claim is not None and (claim.work[:OWN_BYTES], claim.share.parts) != (own, parts):
            return True
        return self.has_sent_other(peer_id, parts, losses)


def _given(share: Share) -> tuple[object, ...]:
    """All from which a work follows, besides the states, the data and the plan."""
    came = {n: (it.activation_in, it.gradient_in) for n, it in share.edges.items()}
    return way_of(share), came
