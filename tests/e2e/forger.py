"""A forger has the keys of all members and writes another history than there was, signed anew
throughout. Only a reader that computes the works again can tell."""

from collections.abc import Callable, Collection
from pathlib import Path

import msgspec

from p2p_dtfm.core.audit.told_losses import stated_losses
from p2p_dtfm.core.audit.work import claim_digest, work_of
from p2p_dtfm.core.messages.audit_messages import HeardClaim, Share, claim_text
from p2p_dtfm.core.messages.prepared import Prepared, sign_prepared
from p2p_dtfm.core.protocol.canonical import decode, digest_bytes
from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.protocol.signed import Sign, signing_in
from p2p_dtfm.core.transcript.entries import Began, Committed, Entry, TookOver, entry_of, line_of
from p2p_dtfm.net.contacts.identity import Identity

Change = Callable[[Share], Share]


def entries_in(path: Path) -> list[Entry]:
    return [entry_of(line) for line in path.read_bytes().splitlines()]


def write_entries(path: Path, entries: list[Entry]) -> Path:
    path.write_text("".join(line_of(entry) + "\n" for entry in entries))
    return path


def keys_of(homes: Collection[Path]) -> dict[str, Identity]:
    found = [Identity.load_or_create(home / "identity.key") for home in homes]
    return {identity.peer_id: identity for identity in found}


def other_gradients(share: Share) -> Share:
    """Other gradients of the first segment, as if their signs were flipped: the norms are the
    same."""
    first = min(share.parts)
    other = tuple(bytes(byte ^ 255 for byte in part) for part in share.parts[first])
    return msgspec.structs.replace(share, parts={**share.parts, first: other})


def forged(
    entries: list[Entry],
    keys: dict[str, Identity],
    works: Collection[tuple[int, str]],
    change: Change = other_gradients,
    state: Callable[[Prepared], Prepared] = lambda prepared: prepared,
) -> list[Entry]:
    """The history with other works of these stage-holders in these steps, to which all have sworn.
    `state`: what these stage-holders say of their works besides."""
    plan, found = None, list[Entry]()
    (run_digest,) = (digest_bytes(it.run_spec) for it in entries if isinstance(it, Began))
    signers = {it: signing_in(run_digest, key.sign) for it, key in keys.items()}
    for entry in entries:
        if isinstance(entry, TookOver):
            plan = entry.plan
        if isinstance(entry, Committed) and isinstance(plan, Plan):
            entry = _step(entry, plan, signers, works, change, state)
        found.append(entry)
    return found


def _step(
    entry: Committed,
    plan: Plan,
    signers: dict[str, Sign],
    works: Collection[tuple[int, str]],
    change: Change,
    state: Callable[[Prepared], Prepared],
) -> Committed:
    said = [decode(signed.payload, Prepared) for signed in entry.signed]
    liars = {it.peer_id for it in said if (it.step, it.peer_id) in works and it.audit is not None}
    said = [state(it) if it.peer_id in liars else it for it in said]
    if not liars:
        return entry
    shares = {it.peer_id: it.audit.share for it in said if it.audit is not None}
    shares |= {peer: change(shares[peer]) for peer in liars}
    shares = {peer: _got_that(peer, shares, liars, plan) for peer in shares}
    losses = {it.peer_id: _losses_of(it) for it in said if it.peer_id in liars}
    shares = {peer: _told_that(share, losses) for peer, share in shares.items()}
    placed = sorted(shares)
    told = [_with(it, shares[it.peer_id]) for it in said]
    heard = {it.peer_id: _heard(it, shares[it.peer_id], plan, signers) for it in told}
    signed = []
    for prepared in told:
        assert prepared.audit is not None
        found = {it: work for it, work in prepared.audit.found.items() if it not in liars}
        words = tuple(it for it in prepared.audit.audits if placed[it.of] not in liars)
        account = msgspec.structs.replace(prepared.audit, heard=heard, found=found, audits=words)
        sworn = msgspec.structs.replace(prepared, audit=account)
        signed.append(sign_prepared(sworn, signers[prepared.peer_id]))
    return Committed(tuple(signed))


def _heard(prepared: Prepared, share: Share, plan: Plan, signers: dict[str, Sign]) -> HeardClaim:
    assert prepared.audit is not None
    work, openings = work_of(prepared, plan.segments()), prepared.audit.openings
    peer, claim = prepared.peer_id, claim_digest(share, work, openings)
    text = claim_text(peer, prepared.view, prepared.step, claim)
    return HeardClaim(claim, signers[peer](text))


def _got_that(peer: str, shares: dict[str, Share], liars: Collection[str], plan: Plan) -> Share:
    """The peer that has summed those gradients says that it got exactly them."""
    mine = shares[peer]
    got = dict(mine.got)
    for number, each in mine.got.items():
        holders = plan.segments()[number].holders
        got[number] = tuple(
            tuple(
                came and sent for came, sent in zip(theirs, shares[it].parts[number], strict=True)
            )
            if it in liars and theirs
            else theirs
            for it, theirs in zip(holders, each, strict=True)
        )
    return msgspec.structs.replace(mine, got=got)


def _losses_of(prepared: Prepared) -> bytes:
    assert prepared.audit is not None
    held_out = prepared.held_out_loss_sum
    return stated_losses(prepared.audit.share.edges, prepared.loss_sum, held_out)


def _told_that(share: Share, losses: dict[str, bytes]) -> Share:
    """The holder of the head told exactly what it states, and those that were told have heard
    it."""
    told = {it: was and losses.get(it, was) for it, was in share.losses.items()}
    return msgspec.structs.replace(share, losses=told)


def _with(prepared: Prepared, share: Share) -> Prepared:
    assert prepared.audit is not None
    account = msgspec.structs.replace(prepared.audit, share=share)
    return msgspec.structs.replace(prepared, audit=account)
