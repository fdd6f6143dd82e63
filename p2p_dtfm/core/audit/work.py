"""What one stage-holder has made of a step, as one digest: whoever replays it comes to the same."""

from collections.abc import Iterable, Mapping, Sequence

from p2p_dtfm.core.messages.prepared import Prepared
from p2p_dtfm.core.protocol.canonical import digest_bytes, encode
from p2p_dtfm.core.protocol.plan import Plan, Segment

WORK_BYTES = 16
PART_BYTES = 32
"""Of a chunk: names a blob."""


def combined(digests: Iterable[bytes]) -> bytes:
    """Of several digests in order; empty for none."""
    joined = b"".join(digests)
    return short_digest(joined) if joined else b""


def short_digest(payload: bytes) -> bytes:
    return bytes.fromhex(digest_bytes(payload))[:WORK_BYTES]


def by_owner(
    digests: Sequence[bytes], owners: Sequence[str], holders: Sequence[str]
) -> tuple[bytes, ...]:
    """The digests of a segment's chunks as one for each holder that sums some of them."""
    chunks = list(zip(digests, owners, strict=True))
    return tuple(combined(d for d, owner in chunks if owner == holder) for holder in holders)


def work_digest(
    parts: Mapping[int, tuple[bytes, ...]], sums: Mapping[int, bytes], loss_sum: float
) -> bytes:
    """`parts` as in an `Account`; `sums` by segment of what this peer has added up itself."""
    return short_digest(encode([sorted(parts.items()), sorted(sums.items()), loss_sum.hex()]))


def work_of(prepared: Prepared, segments: Sequence[Segment]) -> bytes:
    """What a Prepared with an account states."""
    assert prepared.audit is not None
    me = prepared.peer_id
    sums = {n: s[segments[n].holders.index(me)] for n, s in prepared.sums.items()}
    return work_digest(prepared.audit.parts, sums, prepared.loss_sum)


def can_replay(judge: str, peer_id: str, plan: Plan, arithmetics: Mapping[str, str]) -> bool:
    """Whether a member has all that the other's work is made from, and computes as it does.

    A stage that is not the whole model has been sent tensors by its neighbours, which nobody else
    has: its work is not replayed.
    """
    if judge == peer_id or not arithmetics.get(peer_id):
        return False
    if arithmetics.get(judge) != arithmetics[peer_id]:
        return False
    everything = range(plan.pipelines[0].stages[-1].end_layer)
    return plan.layers_of(judge) == everything == plan.layers_of(peer_id)
