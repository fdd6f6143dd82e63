"""What was claimed of a step that was stopped, held against the same work when it is done again.

A peer that is drawn knows that from the claims, before anybody has computed its work again. A liar
could then have all agree anew, as a peer that has lost a tensor may, or start again. The step was
done again, rightly, since the first step of a view is audited whole. The liar lied in the next
ones until it was drawn again. At any rate of audits below one nobody ever convicted it.

But the same states, the same plan and as many threads give the same bits. So who has claimed, or
sent, two things for one work lies in one of them. The same goes for who sent one thing and claimed
another before the step was stopped. If a peer is gone, or computes in another way now, the others
compute again the work that it did. Where only chunks differ, as records tell of other links, what
does not depend on them is compared.

Each member goes by what it has heard and got itself, and it may be that a few alone were told. So
a peer is convicted if more than half of all stage-holders name it. If fewer do, nothing follows,
for them neither (`accounts.findings`).
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
"""At most so many works of peers that are still there are computed again: all compute them, and
nobody goes on meanwhile."""


class WayOfWork(NamedTuple):
    """How a work was computed."""

    arithmetic: str
    threads: int


def way_of(share: Share) -> WayOfWork:
    return WayOfWork(share.arithmetic, share.threads)


class Alike(NamedTuple):
    """Which parts of how tensors travel are now as they were then, if all have the same stages."""

    chunks: bool = True
    codecs: bool = True
    """Codecs of what goes from stage to stage."""


ALL_ALIKE = Alike()


@dataclass(frozen=True)
class StoppedStep:
    """A step whose view ended before the step was committed, as this peer has heard it."""

    me: str
    step: int
    base: str
    """The lineage of the states from which the step starts."""
    plan: Plan
    claims: Mapping[str, Claimed]
    not_audited: frozenset[str]
    """Peers whose work was still to be confirmed by an audit, as far as is known here. Those are
    all peers where somebody has made a false opening. A peer that names another arithmetic than in
    the step before is always one of them."""
    ways: Mapping[str, WayOfWork]
    """By peer: how it computed last."""
    earlier_ways: Mapping[str, WayOfWork] = field(default_factory=dict)
    """By peer: how it computed the earlier steps of that view."""
    was_drawn: bool = False
    """The step was not its view's first one. In a first step all is audited, and whoever has come
    got its states. Who lies there has to do the step rightly before anything commits."""
    lives: Mapping[str, int] = field(default_factory=dict)
    """By peer: the life of that view's member."""
    sums: Mapping[str, bytes] = field(default_factory=dict)
    """`work.sums_of_others`, as they had come here."""
    due: Due = TRAINING
    """What the step's claims are of."""

    def is_done_again(self, step: int, base: str) -> bool:
        return (self.step, self.base) == (step, base)

    def changed(
        self,
        claims: Mapping[str, Claimed],
        alike: Alike = ALL_ALIKE,
        got_states: Collection[str] = (),
    ) -> list[str]:
        """The other peers whose work is another now, though the pipelines are the same.
        `got_states`: peers that may have got their states from others since."""
        others = sorted(claims.keys() - {self.me})
        changed = partial(self._is_other, alike=alike, got_states=got_states)
        return [peer_id for peer_id in others if changed(peer_id, claims[peer_id])]

    def _is_other(
        self, peer_id: str, said: Claimed, alike: Alike, got_states: Collection[str]
    ) -> bool:
        before = self.claims.get(peer_id)
        if before is not None:
            if before.share.parameters != said.share.parameters:
                # others may have given it false states: before a first step, or since then
                return self.was_drawn and peer_id not in got_states
            if _given(before.share) != _given(said.share) or not said.share.arithmetic:
                return False
            then, now = (self._made(peer_id, it.share, alike) for it in (before, said))
            if then != now or alike != ALL_ALIKE:
                return then != now
            # from the same parts come the same sums
            got_others = self._got_otherwise(peer_id, before.share, said.share)
            length = OWN_BYTES if got_others else WORK_BYTES
            return before.work[:length] != said.work[:length]
        # the peer knew the draw from the others' claims, and has kept its own to itself; as far as
        # is known it computed then as it does now, and so that bits repeat
        is_alike = bool(said.share.arithmetic) and self.ways.get(peer_id) == way_of(said.share)
        is_whole = is_alike and alike.chunks and not beside(self.plan, peer_id)
        losses = said.share.losses.get(peer_id, b"")
        return is_whole and self.has_sent_other(peer_id, said.share.parts, losses)

    def got_states(
        self, plan: Plan, lives: Mapping[str, int], since: Iterable[Plan]
    ) -> frozenset[str]:
        """Stage-holders whose states need not be those of then: they have begun a new life, or had
        other layers in a plan `since`."""
        return frozenset(
            it
            for it in plan.stage_holders()
            if lives.get(it) != self.lives.get(it)
            or any(each.layers_of(it) != self.plan.layers_of(it) for each in since)
        )

    def excused(self, claims: Mapping[str, Claimed], alike: Alike = ALL_ALIKE) -> dict[str, str]:
        """By peer that says that something else came to it then: from whom. Nobody can hold it to
        what it made of that. But the sender has claimed the same both times, so one of the two
        does not say what is so. If saying so cost nothing, a liar would lie until it is drawn."""
        both = self.claims, claims
        then, now = ({it: claim.share for it, claim in each.items()} for each in both)
        pairs = other_frames(then, now, self.plan, self.due) if alike.codecs else set()
        pairs |= self._other_parts(then, now) if alike.chunks else set()
        in_turn = sorted(pairs, reverse=True)
        return {receiver: sender for receiver, sender in in_turn if receiver != self.me}

    def _other_parts(
        self, then: Mapping[str, Share], now: Mapping[str, Share]
    ) -> set[tuple[str, str]]:
        """Like `other_frames`, for the parts that are added up."""
        found = set()
        for peer_id in then.keys() & now.keys():
            for number, holder, chunk in self._got_otherwise(peer_id, then[peer_id], now[peer_id]):
                sent = [it[holder].parts[number] for it in (then, now) if holder in it]
                if len(sent) == 2 and len({parts[chunk : chunk + 1] for parts in sent}) == 1:
                    found.add((peer_id, holder))
        return found

    def _got_otherwise(self, peer_id: str, then: Share, now: Share) -> list[tuple[int, str, int]]:
        """(segment, holder, chunk) where `peer_id` says that it got two unlike parts from the
        holder. A part that it did not state, or its own, says nothing of anybody."""
        found = []
        for number, segment in enumerate(self.plan.segments()):
            both = zip(then.got.get(number, ()), now.got.get(number, ()), strict=False)
            for holder, parts in zip(segment.holders, both, strict=False):
                pairs = enumerate(zip(*parts, strict=False)) if holder != peer_id else ()
                found += [(number, holder, n) for n, (a, b) in pairs if a and b and a != b]
        return found

    def _made(self, peer_id: str, share: Share, alike: Alike) -> tuple[object, ...]:
        """What a work came to that can be compared however gradients and frames travel now. A
        segment that the maker holds alone is always one chunk."""
        alone = [n for n, it in enumerate(self.plan.segments()) if it.holders == (peer_id,)]
        parts = share.parts if alike.chunks else {n: share.parts.get(n, ()) for n in alone}
        edges = share.edges if alike.codecs else {}
        return made_in(parts, edges, share.losses.get(peer_id, b""))

    def in_other_ways(self, claims: Mapping[str, Claimed], barred: Collection[str]) -> list[str]:
        """Peers that were to be audited and compute in another way now, though nothing else has
        changed: they cannot be held to what they claim. A peer's claim says how it computed. Who
        has kept its claim to itself computed as in that view's earlier steps: nobody's threads
        change within a view."""
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
        """Whether the peer named another arithmetic in that step than in those before, so that
        nobody could be drawn for it. If it names the earlier one again it lied in one of them."""
        earlier, here = self.earlier_ways.get(peer_id), self._arithmetic_here
        had_mine = earlier is not None and bool(here) and earlier.arithmetic == here
        return had_mine and self.ways[peer_id].arithmetic != here

    @property
    def _arithmetic_here(self) -> str:
        mine = self.ways.get(self.me)
        return mine.arithmetic if mine is not None else ""

    def has_sent_other(self, peer_id: str, parts: Parts, losses: bytes) -> bool:
        """Whether what came here from `peer_id` does not fit these gradients, or it told this peer
        of other losses."""
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
        """Peers that claimed something else than they had sent: they knew that they were drawn, and
        by their claim their work is right."""
        others = sorted(self.claims.keys() - {self.me})
        return [it for it in others if self._has_claimed_other(it, self.claims[it])]

    def _has_claimed_other(self, peer_id: str, said: Claimed) -> bool:
        sums, share = said.work[OWN_BYTES:], said.share
        if self.sums.get(peer_id, sums) != sums:
            return True
        return self.has_sent_other(peer_id, share.parts, share.losses.get(peer_id, b""))

    def unjudged(self, plan: Plan, barred: Collection[str], view: str = "") -> list[str]:
        """Peers that were to be audited, and cannot be held to what they claim now: those without
        a stage now, or all, where only chunks differ.

        Where a peer is gone the others have other microbatches. Of these as many are judged as
        there is time for, or a colluder would go whenever somebody is drawn. Peers that are gone
        come first. `view`, the snapshot's digest, orders the others, and chooses if there are too
        many. Only peers that had the whole model can be judged: what came into a stage of a
        pipeline is gone with the view.
        """
        missing = {it for it in self.not_audited - {self.me, *barred} if self._can_judge(it)}
        stay = missing & set(plan.stage_holders())
        chosen = sorted(stay, key=lambda it: digest_bytes(encode([view, it])))
        if plan.pipelines != self.plan.pipelines:
            chosen = chosen[: STAYING_LIMIT if self.was_drawn else 0]
        return [*sorted(missing - stay), *chosen]

    def _can_judge(self, peer_id: str) -> bool:
        """Whether this peer computes by the arithmetic that `peer_id` had in the steps before, if
        there were any: nobody's changes within a view."""
        theirs = self.earlier_ways.get(peer_id) or self.ways.get(peer_id)
        if theirs is None or beside(self.plan, peer_id):
            return False
        return bool(self._arithmetic_here) and self._arithmetic_here == theirs.arithmetic

    def denies(self, peer_id: str, own: bytes, parts: Parts, losses: bytes) -> bool:
        """Whether the peer claimed, or sent, something else than `own`, `parts` and `losses`, which
        its work comes to here."""
        claim = self.claims.get(peer_id)
        if claim is not None and (claim.work[:OWN_BYTES], claim.share.parts) != (own, parts):
            return True
        return self.has_sent_other(peer_id, parts, losses)


def _given(share: Share) -> tuple[object, ...]:
    """What a work follows from, besides the states, the data and the plan."""
    came = {n: (it.activation_in, it.gradient_in) for n, it in share.edges.items()}
    return way_of(share), came
