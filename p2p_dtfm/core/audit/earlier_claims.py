"""What was claimed of a step that was stopped, held against what the same work is when the step is
done again.

Whoever is drawn knows it from the claims, before anybody has computed its work again. One that lied
could have all agree anew then, as may who has lost a tensor, or start again: the step was done
again, rightly, since the first step of a view is audited whole, and it lied in the next ones until
it was drawn again. At any rate below one nobody ever convicted it.

But what is computed from the same states, by the same plan and as many threads is the same bits. So
who has claimed, or sent, two things for one work lies in one of them; and whose claim was heard and
who is gone, of that one the others compute the work again that it did. Each goes by what it has
heard and got itself: it may be that a few alone were told. So whom more than half of all
stage-holders name is convicted, and of whom fewer say so nothing follows, for them neither
(`accounts.findings`).
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from p2p_dtfm.core.audit.boundaries import beside
from p2p_dtfm.core.audit.work import OWN_BYTES, fit
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
    it comes to what was claimed."""
    ways: Mapping[str, WayOfWork]
    """In which each computed last."""
    was_drawn: bool = False
    """It was not its view's first one, in which all is audited: whoever lies there has to do it
    rightly before anything commits."""

    def is_done_again(self, step: int, base: str) -> bool:
        return (self.step, self.base) == (step, base)

    def changed(self, claims: Mapping[str, Claimed]) -> list[str]:
        """Whose work is another now, by the same plan, cut into the same chunks; not this peer
        itself."""
        others = sorted(claims.keys() - {self.me})
        return [peer_id for peer_id in others if self._is_other(peer_id, claims[peer_id])]

    def _is_other(self, peer_id: str, said: Claimed) -> bool:
        before = self.claims.get(peer_id)
        if before is not None:
            are_alike = _given(before.share) == _given(said.share) and bool(said.share.arithmetic)
            return are_alike and before.work[:OWN_BYTES] != said.work[:OWN_BYTES]
        # it knew the draw from the others' claims, and has kept its own to itself; as far as is
        # known it computed then as it does now, and so that bits repeat
        is_alike = bool(said.share.arithmetic) and self.ways.get(peer_id) == way_of(said.share)
        is_whole = is_alike and not beside(self.plan, peer_id)
        losses = said.share.losses.get(peer_id, b"")
        return is_whole and self.has_sent_other(peer_id, said.share.parts, losses)

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

    def unjudged(self, plan: Plan, barred: Collection[str], view: str = "") -> list[str]:
        """Who was to be audited, and cannot be held to what it claims now: who has no stage any
        more, or all, where only chunks are others. Where one is gone the others have other
        microbatches: of these as many as one has time for, or a fellow would go whenever somebody
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
        mine, theirs = self.ways.get(self.me), self.ways.get(peer_id)
        if mine is None or theirs is None or beside(self.plan, peer_id):
            return False
        return bool(mine.arithmetic) and mine.arithmetic == theirs.arithmetic

    def denies(self, peer_id: str, own: bytes, parts: Parts, losses: bytes) -> bool:
        """Whether what its work comes to here, `own`, `parts` and `losses`, is not what it has
        claimed, or has sent."""
        claim = self.claims.get(peer_id)
        if claim is not None and claim.work[:OWN_BYTES] != own:
            return True
        return self.has_sent_other(peer_id, parts, losses)


def _given(share: Share) -> tuple[object, ...]:
    """All from which a work follows, besides the states, the data and the plan."""
    came = {n: (it.activation_in, it.gradient_in) for n, it in share.edges.items()}
    return way_of(share), came, dict(share.parameters)
