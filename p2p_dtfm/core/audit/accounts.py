"""What the accounts in the Prepared of a step, together, say of their makers.

Nothing is judged while one is missing: the others' findings would be of few.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from p2p_dtfm.core.audit.work import WORK_BYTES, can_replay, work_of
from p2p_dtfm.core.messages.audit_messages import Account
from p2p_dtfm.core.messages.prepared import Prepared
from p2p_dtfm.core.protocol.plan import Plan, Segment

FEWEST_JUDGES = 3
"""With the one that is judged: of two nobody knows who is wrong."""


class Findings(NamedTuple):
    """`liars`: why each is left out; `doubts`: pairs of which one says what is not so."""

    liars: dict[str, str]
    doubts: dict[tuple[str, str], str]


def fault_of_account(account: Account, due: Mapping[int, Segment], plan: Plan) -> str:
    """Why it cannot be true; empty if it may be. `due` are its maker's segments."""
    shared = {number for number, segment in due.items() if len(segment.holders) > 1}
    if set(account.parts) != set(due) or set(account.got) != shared:
        return "Prepared does not account for its segments"
    for stated in (account.parts, account.got):
        for number, digests in stated.items():
            if len(digests) != len(due[number].holders):
                return "Prepared accounts for more holders than there are"
            if any(len(digest) not in (0, WORK_BYTES) for digest in digests):
                return "Prepared with an account's digest of another length"
    if not set(account.found) <= set(plan.stage_holders()):
        return "Prepared with an audit of a peer without a stage"
    if any(len(work) != WORK_BYTES for work in account.found.values()):
        return "Prepared with an audit's digest of another length"
    return ""


def findings(said: Mapping[str, Prepared], plan: Plan, segments: Sequence[Segment]) -> Findings:
    """Of all stage-holders' Prepared, each with an account."""
    found = Findings({}, {})
    if set(plan.stage_holders()) - set(said) or any(p.audit is None for p in said.values()):
        return found
    for one, other in _unlike_edges(said, segments):
        reason = f"the gradients of {other} are not those that {one} has got from it"
        found.doubts.setdefault((one, other) if one < other else (other, one), reason)
    arithmetics = {peer: p.audit.arithmetic for peer, p in said.items() if p.audit is not None}
    for peer_id, prepared in said.items():
        stated = {peer_id: work_of(prepared, segments)}
        for judge, theirs in said.items():
            if judge != peer_id and theirs.audit is not None and peer_id in theirs.audit.found:
                stated[judge] = theirs.audit.found[peer_id]
        able = sum(can_replay(judge, peer_id, plan, arithmetics) for judge in said) + 1
        _judge(peer_id, stated, able, found)
    return found


def _unlike_edges(
    said: Mapping[str, Prepared], segments: Sequence[Segment]
) -> Iterator[tuple[str, str]]:
    """(who sums, who sent) where what was sent is not what has come."""
    for number, segment in enumerate(segments):
        if len(segment.holders) < 2:
            continue
        for place, owner in enumerate(segment.holders):
            for at, holder in enumerate(segment.holders):
                got, sent = said[owner].audit, said[holder].audit
                assert got is not None and sent is not None
                if holder != owner and got.got[number][at] != sent.parts[number][place]:
                    yield owner, holder


def _judge(peer_id: str, stated: Mapping[str, bytes], able: int, found: Findings) -> None:
    """Of one work: what most come to is what it is."""
    value, count = Counter(stated.values()).most_common(1)[0]
    odd = sorted(peer for peer, work in stated.items() if work != value)
    if not odd:
        return
    if 2 * count > len(stated):
        for peer in odd:
            why = "works" if peer == peer_id else f"says that {peer_id} works"
            found.liars.setdefault(peer, f"{why} otherwise than those who computed it again")
    elif len(stated) < FEWEST_JUDGES <= able:
        # whoever is drawn and finds something else tells all, and all that can compute it again
        for judge in sorted(stated.keys() - {peer_id}):
            found.liars.setdefault(judge, f"blames {peer_id}, and has told nobody")
    else:
        for one in sorted(stated):
            for other in sorted(stated):
                if one < other and stated[one] != stated[other]:
                    reason = f"{one} and {other} come to unlike works of {peer_id}"
                    found.doubts.setdefault((one, other), reason)
