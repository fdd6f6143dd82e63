"""What the accounts in the Prepared of a step, together, say of their makers.

While one account is missing, next to nothing is judged: the other findings are those of a few.
"""

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from functools import partial
from itertools import combinations
from typing import NamedTuple

from p2p_dtfm.core.audit.auditors_words import (
    UNLIKE_AUDITS,
    AuditorsWords,
    WorksWords,
    auditors_words,
    is_mark,
)
from p2p_dtfm.core.audit.boundaries import TRAINING, Due, fault_of_edges, unlike_boundaries
from p2p_dtfm.core.audit.judging import fault_of_norms, fault_of_parameters, judges_of
from p2p_dtfm.core.audit.told_losses import fault_of_losses, other_losses, unlike_losses
from p2p_dtfm.core.audit.work import (
    CLAIM_BYTES,
    EXCUSED,
    NO_MICROBATCH_LIMIT,
    OPENING_BYTES,
    OPENINGS_BYTES,
    OWN_BYTES,
    PART_BYTES,
    SENT_OTHER,
    WORK_BYTES,
    changed_work,
    claim_digest,
    excused_by,
    odd_norms,
    unlike_norms,
    unlike_parts,
    unlike_sums,
    work_of,
)
from p2p_dtfm.core.messages.audit_messages import COULD_NOT, Account, Claimed, Share
from p2p_dtfm.core.messages.prepared import Prepared
from p2p_dtfm.core.protocol.canonical import digest_bytes, encode
from p2p_dtfm.core.protocol.plan import Plan, Segment

THREADS_LIMIT = 1024
ARITHMETIC_LIMIT = 64
UNLIKE_SENT = "has sent most of the others other gradients, sums or losses than it claims"
GONE_LIMIT = 8
"""An account may speak of at most so many peers without a stage: they had one when the step was
done before."""
NAME_LIMIT = 128
CHUNKS_LIMIT = 1 << 13
"""A claim of so many chunks, with what came of each from the others, still fits in a message."""


class Findings(NamedTuple):
    """`liars`: by peer, why it is left out. `doubts`: by pair, why one of the two does not say
    what is so. `convicted`: liars by the word of more than half of all stage-holders, or by their
    own signatures. `even`: pairs of which both go, one from either side."""

    liars: dict[str, str]
    doubts: dict[tuple[str, str], str]
    convicted: set[str]
    even: dict[tuple[str, str], str]

    def doubt(self, one: str, other: str, reason: str) -> None:
        self.doubts.setdefault((one, other) if one < other else (other, one), reason)

    def convict(self, reasons: Mapping[str, str]) -> None:
        self.liars.update(reasons)
        self.convicted.update(reasons)


def fault_of_claim(
    said: Claimed, plan: Plan, segments: Sequence[Segment], peer_id: str, due: Due = TRAINING
) -> str:
    """Why no correct peer makes this claim; empty if one may."""
    if len(said.work) != WORK_BYTES or len(said.commitment) != OPENING_BYTES:
        return "a claim with a digest of another length"
    if len(said.opening) != OPENING_BYTES:
        return "a claim with an opening of another length"
    return fault_of_share(said.share, plan, segments, peer_id, due)


def fault_of_share(
    share: Share, plan: Plan, segments: Sequence[Segment], peer_id: str, due: Due = TRAINING
) -> str:
    """Why no correct peer states this share; empty if one may."""
    if not 1 <= share.threads <= THREADS_LIMIT or len(share.arithmetic) > ARITHMETIC_LIMIT:
        return "a claim by threads or an arithmetic that there are not"
    reduced = segments if due.trains else ()
    held = {n: it.holders for n, it in enumerate(reduced) if peer_id in it.holders}
    shared = {number for number, holders in held.items() if len(holders) > 1}
    if set(share.parts) != set(held) or set(share.got) != shared:
        return "a claim that is not of its segments"
    if sum(map(len, share.parts.values())) > CHUNKS_LIMIT:
        return "a claim of more chunks than there are"
    if any(len(part) != PART_BYTES for parts in share.parts.values() for part in parts):
        return "a claim with a part's digest of another length"
    if not all(_is_of(got, share.parts[n], held[n]) for n, got in share.got.items()):
        return "a claim of other holders or chunks than its segments have"
    return _fault_of_the_rest(share, plan, peer_id, due)


def _fault_of_the_rest(share: Share, plan: Plan, peer_id: str, due: Due) -> str:
    edges = fault_of_edges(share.edges, plan, peer_id, due)
    parameters = edges or fault_of_parameters(share, plan, peer_id)
    norms = parameters or fault_of_norms(share, plan, peer_id, due)
    return norms or fault_of_losses(share, plan, peer_id, due)


def _is_of(got: Sequence[Sequence[bytes]], parts: Sequence[bytes], holders: Sequence[str]) -> bool:
    """Whether `got` says of each holder either nothing or one thing for each chunk."""
    lengths = {len(part) for each in got for part in each}
    counts = {len(each) for each in got}
    return len(got) == len(holders) and counts <= {0, len(parts)} and lengths <= {0, PART_BYTES}


def fault_of_account(
    account: Account | None,
    plan: Plan,
    segments: Sequence[Segment],
    peer_id: str,
    due: Due = TRAINING,
) -> str:
    """Why the account cannot be true; empty if it may be, or there is none."""
    if account is None:
        return ""
    holders = {holder for segment in segments for holder in segment.holders}
    if set(account.heard) != holders or not set(account.unlike) <= holders:
        return "Prepared with an account of other peers than have a stage"
    if any(len(heard.claim) != CLAIM_BYTES for heard in account.heard.values()):
        return "Prepared with a claim's digest of another length"
    if len(account.openings) != OPENINGS_BYTES:
        return "Prepared with a digest of openings of another length"
    fault = _fault_of_findings(account, holders)
    return fault or fault_of_share(account.share, plan, segments, peer_id, due)


def _fault_of_findings(account: Account, holders: set[str]) -> str:
    gone = account.found.keys() - holders
    if len(gone) > GONE_LIMIT or any(len(it) > NAME_LIMIT for it in gone):
        return "Prepared with an account of more peers that are gone than can be"
    if not set(account.disputed) <= holders | gone:
        return "Prepared with a dispute about a peer without a stage"
    if any(is_denied and it not in account.found for it, is_denied in account.disputed.items()):
        return "Prepared denies a work that its maker has not computed again"
    works = [*account.found.values(), *(it.work for it in account.audits if it.work != COULD_NOT)]
    if any(len(work) != WORK_BYTES for work in works):
        return "Prepared with an audit's digest of another length"
    return ""


def findings(
    said: Mapping[str, Prepared],
    plan: Plan,
    segments: Sequence[Segment],
    one_arithmetic: bool = False,
    kept_microbatches: int = NO_MICROBATCH_LIMIT,
    due: Due = TRAINING,
) -> Findings:
    """Judges by all stage-holders' Prepared, each with an account.

    While one account is missing, only this is judged: who has claimed two things, or said two of a
    work that it was drawn for, and what more than half of all stage-holders deny. Those cannot save
    themselves by withholding their own account.

    A peer whose input at a boundary is not what was sent is not judged: nobody can say what it
    should have computed. Its sender is judged: that may show which of the two is wrong.
    """
    found = Findings({}, {}, set(), {})
    accounts = {peer: p.audit for peer, p in said.items() if p.audit is not None}
    works = {peer: work_of(said[peer], segments) for peer in accounts}
    found.convict(unlike_claims(accounts, works) | other_losses(said))
    if found.liars:
        return found  # from unlike claims follow unlike audits, and nobody else need have lied
    told = auditors_words(accounts)
    found.convict(dict.fromkeys(told.convicted, UNLIKE_AUDITS))
    _convict_gone(accounts, plan.stage_holders(), found)
    if set(plan.stage_holders()) != set(accounts):
        _convict_denied(accounts, plan.stage_holders(), found)
        return found
    shares = {peer: account.share for peer, account in accounts.items()}
    unlike = unlike_parts(shares, segments if due.trains else ())
    misled = _doubt_parts(unlike, found)
    sums, norms = set(unlike_sums(said, segments)), unlike_norms(shares, segments)
    unlike |= _doubt_losses(shares, found) | sums
    _convict_by_receivers(unlike | norms, len(accounts), found)
    without_input = _doubt_boundaries(shares, plan, due, found)
    _convict_changed(accounts, works, without_input, found)
    _doubt_excused(accounts, found)
    judged = {peer: works[peer] for peer in works if peer not in without_input}
    may_judge = partial(judges_of, plan=plan, shares=shares, kept_microbatches=kept_microbatches)
    words = WorksWords(accounts, works, told, may_judge)
    for peer_id, length in _denied(judged, accounts, misled, told).items():
        were_told = _most_were_told(peer_id, accounts)
        if not were_told and told.unlike:
            continue  # nobody waited for audits any more: the doubter may have told all, too late
        stated = words.of(peer_id, length)
        is_secret = words.can_be_judged(peer_id) and not were_told
        _judge(peer_id, stated, is_secret=is_secret, found=found)
        _convict(stated, len(accounts), found)
    if one_arithmetic:
        _judge_arithmetics({peer: share.arithmetic for peer, share in shares.items()}, found)
    odd = partial(odd_norms, shares=shares, segments=segments, others=sums)
    _judge_norms(norms - sums, judged.keys() - misled, words, odd, found)
    return found


def _denied(
    works: Mapping[str, bytes],
    accounts: Mapping[str, Account],
    misled: Collection[str],
    told: AuditorsWords,
) -> dict[str, int]:
    """By maker whose work somebody has found to be another: how many bytes of the work count."""
    denied = {}
    for peer_id, work in works.items():
        length = OWN_BYTES if peer_id in misled else WORK_BYTES
        found = [it.found[peer_id] for it in accounts.values() if peer_id in it.found]
        found = [it for it in found if not is_mark(it, work)] + [*told.of(peer_id).values()]
        if any(it[:length] != work[:length] for it in found):
            denied[peer_id] = length
    return denied


def _most_were_told(peer_id: str, accounts: Mapping[str, Account]) -> bool:
    """Whether most were told that an auditor doubts this peer's work."""
    told = sum(peer_id in account.disputed for account in accounts.values())
    return 2 * told > len(accounts)


def _doubt_parts(unlike: Collection[tuple[str, str]], found: Findings) -> set[str]:
    """Returns the peers that say that other gradients came to them than were claimed."""
    for owner, holder in sorted(unlike):
        reason = f"the gradients of {holder} are not those that {owner} has got from it"
        found.doubt(owner, holder, reason)
    return {owner for owner, _ in unlike}


def _doubt_losses(shares: Mapping[str, Share], found: Findings) -> set[tuple[str, str]]:
    """Returns (who was told, who told it) where the teller claims another loss. The work of the
    peer that was told is judged all the same: nothing in it comes of that loss."""
    unlike = unlike_losses(shares)
    for told, teller in sorted(unlike):
        found.doubt(told, teller, f"the losses of {teller} are not those that {told} was told of")
    return unlike


def _convict_by_receivers(
    unlike: Collection[tuple[str, str]], holders: int, found: Findings
) -> None:
    """Convicts a sender if more than half of all say that it sent them something else than it
    claims. Doubts with each of them would not do: it would be back soon. Such a sender sees that
    it is drawn, and then claims what it should have sent."""
    receivers = Counter(sender for _, sender in set(unlike))
    for sender, count in sorted(receivers.items()):
        if 2 * count > holders:
            found.liars.setdefault(sender, UNLIKE_SENT)
            found.convicted.add(sender)


def _doubt_boundaries(
    shares: Mapping[str, Share], plan: Plan, due: Due, found: Findings
) -> set[str]:
    """Returns who says that something else came to it than was sent."""
    unlike = unlike_boundaries(shares, plan, due)
    for receiver, sender in sorted(unlike):
        reason = f"the tensors of {sender} are not those that {receiver} has got from it"
        found.doubt(receiver, sender, reason)
    return {receiver for receiver, _ in unlike}


def _judge_arithmetics(arithmetics: Mapping[str, str], found: Findings) -> None:
    """Leaves out who computes unlike most: else a liar would claim an arithmetic of its own. Who
    goes for its work has no say: it may have named that of others, to make these most."""
    counts = Counter(name for peer, name in arithmetics.items() if peer not in found.liars)
    name, count = max(counts.items(), key=lambda it: it[1], default=("", 0))
    if name and 2 * count > len(arithmetics):
        for peer_id in sorted(peer for peer, other in arithmetics.items() if other != name):
            found.liars.setdefault(peer_id, "computes by another arithmetic than most")


def unlike_claims(accounts: Mapping[str, Account], works: Mapping[str, bytes]) -> dict[str, str]:
    """Who has claimed two things, and why that is known. Some accounts may be missing.

    A peer has to account for what it claimed before the draw, to everybody. It has signed each
    claim, so no vote is needed: its own signatures convict it.
    """
    found: dict[str, str] = {}
    for peer_id in sorted({peer for account in accounts.values() for peer in account.heard}):
        claims = {account.heard[peer_id].claim for account in accounts.values()}
        claims |= {it.unlike[peer_id].claim for it in accounts.values() if peer_id in it.unlike}
        if len(claims) > 1:
            found[peer_id] = "has claimed one thing to some and another to others"
        elif peer_id in accounts:
            mine = accounts[peer_id]
            stated = claim_digest(mine.share, works[peer_id], mine.openings)
            if claims != {stated}:
                found[peer_id] = "accounts for another work than it has claimed"
    return found


def _judge(peer_id: str, stated: Mapping[str, bytes], *, is_secret: bool, found: Findings) -> None:
    """Judges one work: what most come to is what it is. `is_secret`: most were not told that
    anybody doubts it. An auditor that finds something else has to tell all, and all that can do so
    compute the work again. Else a few colluders would be most of those that have."""
    value, count = Counter(stated.values()).most_common(1)[0]
    accusers = sorted(peer for peer, work in stated.items() if work != stated[peer_id])
    if not accusers:
        return
    agreeing = sum(work == stated[peer_id] for work in stated.values())
    if is_secret and 2 * agreeing <= len(stated):
        for judge in accusers:
            found.liars.setdefault(judge, f"blames {peer_id}, and has told nobody")
    elif 2 * count > len(stated):
        for peer in sorted(peer for peer, work in stated.items() if work != value):
            why = "works" if peer == peer_id else f"says that {peer_id} works"
            found.liars.setdefault(peer, f"{why} otherwise than those who computed it again")
    elif not are_even(stated):
        for one, other in combinations(sorted(stated), 2):
            if stated[one] != stated[other]:
                found.doubt(one, other, f"{one} and {other} come to unlike works of {peer_id}")
    elif not found.even:  # once a pair goes, the sides are smaller than they were
        seed = stated[peer_id].hex()  # not the same one each time
        accuser = min(accusers, key=lambda it: digest_bytes(encode([seed, it])))
        one, other = sorted((peer_id, accuser))
        found.even[one, other] = f"come to unlike works of {peer_id}, and as many with either"


def _judge_norms(
    unlike: Collection[tuple[str, str]],
    judged: Collection[str],
    words: WorksWords,
    odd: Callable[[str], set[str]],
    found: Findings,
) -> None:
    """Judges pairs (who states another norm, who has summed). All have computed the work of some
    makers in `judged` again, and the norm that a maker states is a part of that work. What most
    come to is so, however many holders of the segment lie. Who states another norm is convicted
    whatever else it goes for: it may have brought that about to be back soon. Once somebody goes,
    other pairs are judged when the step is done again. `odd`: who states another norm than most of
    the segment's holders, which counts for works that too few others can judge."""
    makers, doubted = set(found.liars), list[tuple[str, str]]()
    for peer_id, maker in sorted(unlike):
        if maker in makers:
            continue
        if agreeing := words.agreeing(maker) if maker in judged else 0:
            why = f"states another norm of what {maker} has summed than those who computed it again"
            found.liars.setdefault(peer_id, why)
            if 2 * agreeing > len(words.accounts):
                found.convicted.add(peer_id)
        else:
            doubted.append((peer_id, maker))
    for maker in sorted({it for _, it in doubted if not words.can_be_judged(it)}):
        for peer_id in sorted(odd(maker)):
            why = f"states another norm of what {maker} has summed than most who hold the same"
            found.liars.setdefault(peer_id, why)
    if found.liars.keys().isdisjoint(it for pair in unlike for it in pair):
        for peer_id, maker in doubted:
            why = f"{peer_id} and {maker} state unlike norms of what {maker} has summed"
            found.doubt(peer_id, maker, why)


def are_even(stated: Mapping[str, Hashable]) -> bool:
    """Whether two sides of several peers say unlike things, as many on either.

    Both sides have equally many links in doubt. By these one side would go as a whole, maybe the
    honest one: then colluders that are half of a layer's holders would be most of them. So one
    goes from either side, and with those that take their places colluders are fewer than half.
    """
    counts = Counter(stated.values()).values()
    return len(counts) == 2 and min(counts) == max(counts) >= 2


def _convict_denied(
    accounts: Mapping[str, Account], holders: Sequence[str], found: Findings
) -> None:
    """Convicts the maker of a work if more than half of all heard the same claim of it and deny it.
    They come to the same other work, or have got from the maker what is not of that claim. No
    Prepared of the maker is needed: it is barred though it says none."""
    for peer_id in holders:
        denied: dict[bytes, Counter[bytes]] = {}
        for account in accounts.values():
            if account.disputed.get(peer_id):
                works = denied.setdefault(account.heard[peer_id].claim, Counter())
                works[account.found[peer_id]] += 1
        for works in denied.values():
            sent = works.pop(SENT_OTHER, 0)
            computed = max(works.values(), default=0)
            if 2 * (sent + computed) > len(holders):
                why = "works otherwise than those who computed it again"
                found.liars.setdefault(peer_id, UNLIKE_SENT if sent > computed else why)
                found.convicted.add(peer_id)


def _convict_changed(
    accounts: Mapping[str, Account],
    works: Mapping[str, bytes],
    without_input: Collection[str],
    found: Findings,
) -> None:
    """Convicts a maker if more than half of all deny its work in one of three ways: when the step
    was done before they heard another work of it (`earlier_claims`); now or then they got something
    else from it than it claims; or they come to another work. From the word of fewer nothing
    follows: the maker may have told a few alone."""
    for peer_id, work in works.items():
        named = Counter(it.found[peer_id] for it in accounts.values() if it.disputed.get(peer_id))
        changed, sent = named.pop(changed_work(work), 0), named.pop(SENT_OTHER, 0)
        computed = 0 if peer_id in without_input else max(named.values(), default=0)
        if changed + sent and 2 * (changed + sent + computed) > len(accounts):
            why = "claims another work of the step than it did before"
            found.liars.setdefault(peer_id, UNLIKE_SENT if sent > changed else why)
            found.convicted.add(peer_id)


def _doubt_excused(accounts: Mapping[str, Account], found: Findings) -> None:
    """Puts two in doubt if most of all have heard them contradict each other. One says that it got
    something else from the other when the step was done before; the other says that it sent the
    same both times. Nobody denies the first one's work for that."""
    for peer_id in accounts:
        marks = Counter(it.found.get(peer_id, b"") for it in accounts.values())
        for other in accounts if any(it[:OWN_BYTES] == EXCUSED for it in marks) else ():
            if 2 * marks[excused_by(other)] > len(accounts):
                why = f"{peer_id} has got two things from {other} for one that was sent twice"
                found.doubt(peer_id, other, why)


def _convict_gone(accounts: Mapping[str, Account], holders: Sequence[str], found: Findings) -> None:
    """Convicts peers without a stage now, if more than half of all come to another work than such a
    peer had claimed, or sent, before it went."""
    denied = Counter(
        peer_id
        for account in accounts.values()
        for peer_id, is_denied in account.disputed.items()
        if is_denied and peer_id not in holders
    )
    for peer_id in sorted(it for it, count in denied.items() if 2 * count > len(holders)):
        why = "was gone when its work was to be computed again, which comes to another one"
        found.liars.setdefault(peer_id, why)
        found.convicted.add(peer_id)


def _convict(stated: Mapping[str, bytes], holders: int, found: Findings) -> None:
    """Convicts by the word of more than half of all: it is so while fewer than that lie. Of few
    that can compute a work again most may be colluders, and whom those leave out comes back."""
    value, count = Counter(stated.values()).most_common(1)[0]
    if 2 * count > holders:
        found.convicted.update(peer for peer, work in stated.items() if work != value)
