"""A view of four replicas of all layers, and what each states of a step."""

import hashlib
from collections import Counter

from p2p_dtfm.core.audit.told_losses import losses_digest
from p2p_dtfm.core.audit.work import claim_digest, own_digest, sums_digest
from p2p_dtfm.core.commit.judgement import SUM_DIGEST_BYTES
from p2p_dtfm.core.messages.audit_messages import Account, Got, HeardClaim, Parts, Share
from p2p_dtfm.core.messages.prepared import Prepared
from p2p_dtfm.core.protocol.plan import Pipeline, Plan, Stage
from p2p_dtfm.core.protocol.snapshot import ViewId

NAMES = "abcd"
VIEW = ViewId(3, "ab" * 32)
PLAN = Plan(tuple(Pipeline((Stage(n, 0, 3, 1),), 2 * i, 2) for i, n in enumerate(NAMES)), (), 1)
OPENINGS = bytes(16)
"""These openings draw nobody."""
LOSS = 30.0
LOSSES = losses_digest(LOSS, 0.0)
SUMS = tuple(name.encode() * SUM_DIGEST_BYTES for name in NAMES)


def part(name: str, chunk: int, word: str = "") -> bytes:
    return hashlib.sha256(f"{name}{chunk}{word}".encode()).digest()


def share_of(name: str, arithmetic: str = "cpu-1", word: str = "") -> Share:
    """A share of one chunk for each peer; a different `word` stands for another gradient."""
    mine = NAMES.index(name)
    parts: Parts = {0: tuple(part(name, chunk, word) for chunk in range(len(NAMES)))}
    got: Got = {
        0: tuple(
            ()
            if other == name
            else tuple(part(other, n) if n == mine else b"" for n in range(len(NAMES)))
            for other in NAMES
        )
    }
    return Share(arithmetic, 1, parts, got, losses=dict.fromkeys(NAMES, LOSSES))


def work_of_share(share: Share, name: str, sums: bytes = b"", loss: float = LOSS) -> bytes:
    return own_digest(share.parts, loss) + sums_digest({0: sums or SUMS[NAMES.index(name)]})


def step_of(
    shares: dict[str, Share],
    found: dict[str, dict[str, bytes]],
    heard: dict[str, dict[str, HeardClaim]] | None = None,
    told: str | None = None,
) -> dict[str, Prepared]:
    """Everybody's Prepared of a step. `heard`: where a peer has heard something else than is
    accounted for. `told`: the peers whose work an auditor has told everybody it doubts, by
    default those whose work two peers have computed."""
    works = {name: work_of_share(share, name) for name, share in shares.items()}
    of = Counter(peer for each in found.values() for peer in each)
    doubted = [
        it for it, count in sorted(of.items()) if (count > 1 if told is None else it in told)
    ]
    claims = {
        name: HeardClaim(claim_digest(share, work_of_share(share, name), OPENINGS), b"")
        for name, share in shares.items()
    }
    said = {}
    for name, share in shares.items():
        mine = found.get(name, {})
        disputed = {it: mine.get(it, works[it]) != works[it] for it in doubted}
        account = Account(share, claims | (heard or {}).get(name, {}), mine, disputed, OPENINGS)
        said[name] = Prepared(
            VIEW, 7, name, {0: 4.0}, LOSS, 10, 0.0, 0, None, "", {0: SUMS}, audit=account
        )
    return said


def few_others(plan: Plan) -> list[str]:
    """The peers of whose layers fewer than two others have all."""
    held = {peer: set(plan.layers_of(peer)) for peer in plan.stage_holders()}
    return [peer for peer, mine in held.items() if sum(mine <= it for it in held.values()) < 3]


def two_by_two() -> Plan:
    """Two pipelines of two stages: a and c hold the first stage, b and d the last."""
    pairs = enumerate(("ab", "cd"))
    return Plan(
        tuple(Pipeline((Stage(x, 0, 1, 1), Stage(y, 1, 3, 1)), 2 * i, 2) for i, (x, y) in pairs),
        (),
        1,
    )
