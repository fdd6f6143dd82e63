"""What one stage-holder made of a step, as digests. Who computes it again comes to the same."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

import msgspec

from p2p_dtfm.core.audit.boundaries import states_held_out
from p2p_dtfm.core.messages.audit_messages import (
    Audited,
    Claimed,
    Edges,
    HeardAudit,
    HeardClaim,
    Parts,
    Share,
    SquaredNorms,
    audit_text,
    claim_text,
    is_audit_by,
    is_claim_of,
)
from p2p_dtfm.core.messages.prepared import Prepared
from p2p_dtfm.core.protocol.canonical import digest_bytes, encode
from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.core.protocol.plan import Plan, Segment
from p2p_dtfm.core.protocol.signed import Sign, Verify

OWN_BYTES = 16
"""The first bytes of a work's digest cover what its maker computes from the data and from what its
neighbours in the pipelines sent. The others cover what it adds up from all holders' parts."""
WORK_BYTES = 2 * OWN_BYTES
CLAIM_BYTES = 16
OPENINGS_BYTES = 16
OPENING_BYTES = 32
GONE_WORK = bytes(WORK_BYTES)
"""A mark in an account, for a peer without a stage now: its work was not what it had claimed."""
SENT_OTHER = b"\xff" * WORK_BYTES
"""A mark in an account, in place of what a work comes to. The work's maker sent the account's maker
something other than it claims: parts or sums, now or when the step was done before. The mark is the
same for all works, so members that have not computed the work again can say it, too."""
EXCUSED = b"\xfe" * OWN_BYTES
"""The first half of `excused_by`."""
NO_MICROBATCH_LIMIT = 1 << 30
"""The inputs of any number of microbatches are kept."""
PART_BYTES = 32
"""Length of a chunk's digest, which names a blob."""
NormsAlone = Mapping[int, str]
"""By segment that nobody else holds: its squared norm in full, which nobody else states."""
NormsMade = Mapping[int, str]
"""By segment that others, but not all, hold as well: the squared norm, in full, of what this peer
has summed of it."""
NO_NORMS: NormsAlone = MappingProxyType({})


def _digest(payload: bytes) -> bytes:
    return bytes.fromhex(digest_bytes(payload))


def own_digest(
    parts: Parts,
    loss_sum: float,
    edges: Edges | None = None,
    held_out_loss_sum: float = 0.0,
    alone: NormsAlone = NO_NORMS,
) -> bytes:
    """Digest of what the maker computes itself. Of `edges` only what it sent is a part of that.
    `held_out_loss_sum`: see `stated_work`."""
    sent = [(n, it.activation_out, it.gradient_out) for n, it in sorted((edges or {}).items())]
    losses = loss_sum.hex(), held_out_loss_sum.hex()
    made = [sorted(parts.items()), *losses, sent]
    if alone:
        made.append(sorted(alone.items()))
    return _digest(encode(made))[:OWN_BYTES]


def made_in(parts: Parts, edges: Edges, losses: bytes) -> tuple[object, ...]:
    """What others have got of a work: gradients, frames and, from a holder of the head, what it
    tells of its losses. `own_digest` covers these, too, but nobody can compute it from a claim: no
    claim has the losses themselves or the norms."""
    sent = {n: (it.activation_out, it.gradient_out) for n, it in edges.items()}
    return dict(parts), sent, losses


def norms_alone(
    peer_id: str,
    segments: Sequence[Segment],
    squared_norms: Mapping[int, float],
    *,
    is_mixed: bool,
) -> NormsAlone:
    """`is_mixed`: the norm of the first layer's segment has another peer's sum of a tied matrix in
    it, and is left out. In runs with audits no plan brings that about (`Workload.one_stage`)."""
    return {
        number: squared_norms.get(number, 0.0).hex()
        for number, segment in enumerate(segments)
        if segment.holders == (peer_id,) and not (is_mixed and 0 in segment.layers)
    }


def norms_made(peer_id: str, segments: Sequence[Segment], norms: SquaredNorms) -> NormsMade:
    """Of `norms`, those of the peer's own sums."""
    return {
        number: each[segments[number].holders.index(peer_id)].hex()
        for number, each in norms.items()
        if peer_id in segments[number].holders
    }


def sums_digest(sums: Mapping[int, bytes], norms: NormsMade = NO_NORMS) -> bytes:
    """`sums`: by segment, the digest of what this peer has added up itself."""
    made = sorted(sums.items())
    return _digest(encode([made, sorted(norms.items())] if norms else made))[:OWN_BYTES]


def sums_of_others(
    me: str,
    segments: Sequence[Segment],
    sums: Mapping[int, tuple[bytes, ...]],
    norms: SquaredNorms,
) -> dict[str, bytes]:
    """`sums_digest` of each other holder, by what came to this peer. Holders are left out unless
    all their sums come here. `sums`: by segment, the digest of each holder's; nothing for a segment
    where nothing was reduced."""
    found = {}
    for peer_id in sorted({it for n in sums for it in segments[n].holders} - {me}):
        shared = {
            n: it.holders.index(peer_id)
            for n, it in enumerate(segments)
            if peer_id in it.holders and len(it.holders) > 1
        }
        if shared.keys() <= sums.keys():
            theirs = {n: sums[n][place] for n, place in shared.items()}
            found[peer_id] = sums_digest(theirs, norms_made(peer_id, segments, norms))
    return found


def work_of(prepared: Prepared, segments: Sequence[Segment]) -> bytes:
    """The work that a Prepared with an account states."""
    assert prepared.audit is not None
    me = prepared.peer_id
    sums = {n: s[segments[n].holders.index(me)] for n, s in prepared.sums.items()}
    is_mixed = bool(prepared.tied)
    alone = norms_alone(me, segments, prepared.squared_norms, is_mixed=is_mixed)
    losses, share = (prepared.loss_sum, prepared.held_out_loss_sum), prepared.audit.share
    return stated_work(share, *losses, sums, alone, norms_made(me, segments, share.norms))


def stated_work(
    share: Share,
    loss_sum: float,
    held_out_loss_sum: float,
    sums: Mapping[int, bytes],
    alone: NormsAlone = NO_NORMS,
    norms: NormsMade = NO_NORMS,
) -> bytes:
    """The digest of its own work that a stage-holder states in its claim, and again in its
    Prepared. `sums` and `norms`: as in `sums_digest`.

    Evaluation is a part of the work where it can be computed again. That is not so for a stage
    whose neighbours could not keep what they send for it.
    """
    held_out = held_out_loss_sum if states_held_out(share.edges) else 0.0
    own = own_digest(share.parts, loss_sum, share.edges, held_out, alone)
    return own + sums_digest(sums, norms)


def changed_work(work: bytes) -> bytes:
    """A mark in an account, in place of what a work comes to: the maker claimed another work when
    the step was done before."""
    return _digest(b"changed\0" + work)


def excused_by(peer_id: str) -> bytes:
    """A mark in an account, in place of what a work comes to: nobody need deny that work. Its maker
    says that something else came to it from `peer_id` when the step was done before; `peer_id` says
    that it sent the same. The mark is the same for all works."""
    return EXCUSED + _digest(b"excused\0" + peer_id.encode())[:OWN_BYTES]


def claim_digest(share: Share, work: bytes, openings: bytes = b"") -> bytes:
    """Digest of what a claim and the account that follows it must have alike. It covers what the
    draw is made from: a peer that tells some another opening would have them draw other auditors.
    """
    shared = [
        share.arithmetic,
        share.threads,
        sorted(share.parts.items()),
        sorted(share.got.items()),
        sorted(share.edges.items()),
        work,
    ]
    if share.parameters:
        shared.append(sorted(share.parameters.items()))
    if share.losses:
        shared.append(sorted(share.losses.items()))
    if share.norms:
        shared.append([(n, [it.hex() for it in each]) for n, each in sorted(share.norms.items())])
    if openings:
        shared.append(openings)
    return _digest(encode(shared))[:CLAIM_BYTES]


def openings_digest(opening: bytes, commitment: bytes) -> bytes:
    """Digest of what a claim opens and of what it commits its maker to."""
    return _digest(encode([opening, commitment]))[:OPENINGS_BYTES]


def signed_claim(claim: Claimed, peer_id: str, signer: Sign) -> Claimed:
    text = claim_text(peer_id, claim.view, claim.step, heard_claim(claim).claim)
    return msgspec.structs.replace(claim, signature=signer(text))


def require_signed(claim: Claimed, peer_id: str, verify: Verify) -> None:
    """Raises `PeerFault` for a claim that its maker has not signed: none could hold it to that."""
    if not is_claim_of(peer_id, claim.view, claim.step, heard_claim(claim), verify):
        raise PeerFault("a claim that it has not signed", peer_id)


def signed_audit(said: Audited, auditor: str, signer: Sign) -> Audited:
    text = audit_text(auditor, said.view, said.step, said.peer_id, said.work)
    return msgspec.structs.replace(said, signature=signer(text))


def require_signed_audit(said: Audited, auditor: str, verify: Verify) -> None:
    """Raises `PeerFault` for words that the auditor has not signed: none could hold it to them."""
    heard = HeardAudit(0, 0, said.work, said.signature)
    if not is_audit_by(auditor, said.view, said.step, said.peer_id, heard, verify):
        raise PeerFault("an audit that it has not signed", auditor)


def heard_claim(claim: Claimed) -> HeardClaim:
    """The digest and signature by which a claim's maker can be held to it."""
    openings = openings_digest(claim.opening, claim.commitment)
    return HeardClaim(claim_digest(claim.share, claim.work, openings), claim.signature)


def heard_of(claims: Mapping[str, Claimed]) -> dict[str, HeardClaim]:
    """`heard_claim` of each, as an account has it."""
    return {peer: heard_claim(claim) for peer, claim in sorted(claims.items())}


def unlike_parts(
    shares: Mapping[str, Share],
    segments: Sequence[Segment],
    owners: Collection[str] | None = None,
) -> set[tuple[str, str]]:
    """(who sums, who sent) where what came is not what was sent: nobody can say what such a sum
    should be. `owners`: only those that these peers sum."""
    found = set()
    for number, segment in enumerate(segments):
        for owner in segment.holders if len(segment.holders) > 1 else ():
            if owners is not None and owner not in owners:
                continue
            for holder, theirs in zip(segment.holders, shares[owner].got[number], strict=True):
                if holder != owner and not fit(theirs, shares[holder].parts[number]):
                    found.add((owner, holder))
    return found


def unlike_sums(said: Mapping[str, Prepared], segments: Sequence[Segment]) -> list[tuple[str, str]]:
    """(who got the sums, who made them) where the maker states other sums than came. Such pairs are
    in doubt whether there are audits or not (`core.commit.judgement`)."""
    found = []
    for number, segment in enumerate(segments):
        sums = {peer: p.sums[number] for peer, p in said.items() if p.sums.get(number)}
        for place, owner in enumerate(segment.holders):
            for peer, digests in sums.items():
                if owner in sums and digests[place] != sums[owner][place]:
                    found.append((peer, owner))
    return found


def unlike_norms(shares: Mapping[str, Share], segments: Sequence[Segment]) -> set[tuple[str, str]]:
    """(who states a norm, who has summed) where the two state unlike norms of a sum: one of them
    lies, or has been given something else."""
    found = set()
    for number, segment in enumerate(segments):
        for peer_id in segment.holders:
            stated = shares[peer_id].norms.get(number, ())
            for place, (maker, norm) in enumerate(zip(segment.holders, stated, strict=False)):
                if shares[maker].norms[number][place] != norm:
                    found.add((peer_id, maker))
    return found


def odd_norms(
    maker: str,
    shares: Mapping[str, Share],
    segments: Sequence[Segment],
    others: Collection[tuple[str, str]],
) -> set[str]:
    """Who states another norm of what `maker` has summed than more than half of the segment's
    holders do. `others`: pairs (who got other sums, from whom); who got other sums from `maker` has
    no say."""
    odd = set[str]()
    for number, segment in enumerate(segments):
        if maker not in segment.holders or number not in shares[maker].norms:
            continue
        place, without = segment.holders.index(maker), {it for it, by in others if by == maker}
        stated = {
            it: shares[it].norms[number][place] for it in segment.holders if it not in without
        }
        value, count = Counter(stated.values()).most_common(1)[0]
        if 2 * count > len(segment.holders):
            odd |= {peer for peer, norm in stated.items() if norm != value}
    return odd


def fit(got: Sequence[bytes], sent: Sequence[bytes]) -> bool:
    """Whether what came of each chunk, if anything, is what was sent."""
    pairs = zip(got, sent, strict=False)
    return len(got) == len(sent) and all(not mine or mine == theirs for mine, theirs in pairs)


def computes_alike(judge: str, peer_id: str, arithmetics: Mapping[str, str]) -> bool:
    """Whether `judge` is another peer, and one that comes to the same bits."""
    name = arithmetics.get(peer_id, "")
    return judge != peer_id and bool(name) and arithmetics.get(judge) == name


def has_layers_of(judge: str, peer_id: str, plan: Plan) -> bool:
    """Whether `judge` has all layers of `peer_id`, or more."""
    mine, layers = plan.layers_of(judge), plan.layers_of(peer_id)
    return bool(layers) and mine.start <= layers.start and layers.stop <= mine.stop
