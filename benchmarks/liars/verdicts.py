"""Whether an honest member is ever convicted by what all account for.

    python -m benchmarks.liars.verdicts [--steps 1000] [--pipelines 3] [--stages 2] [--json]

Each step has one liar, or none, in one of the ways below; what all others claim and find is what
they would. A verdict against an honest member falsifies the rules, and so does a doubt without the
liar. Audits, members that a verdict left out, and doubts are counted.
"""

import argparse
import json
import random
from collections import Counter
from dataclasses import asdict, dataclass

from p2p_dtfm.core.audit.accounts import Findings, findings
from p2p_dtfm.core.audit.boundaries import beside
from p2p_dtfm.core.audit.draw import draw, seed_of
from p2p_dtfm.core.audit.judging import judges_of, states_parameters
from p2p_dtfm.core.audit.work import (
    WORK_BYTES,
    claim_digest,
    norms_alone,
    norms_made,
    own_digest,
    sums_digest,
)
from p2p_dtfm.core.commit.judgement import SUM_DIGEST_BYTES
from p2p_dtfm.core.messages.audit_messages import Account, Boundary, Edges, HeardClaim, Share
from p2p_dtfm.core.messages.prepared import Prepared
from p2p_dtfm.core.protocol.canonical import digest_bytes
from p2p_dtfm.core.protocol.plan import Pipeline, Plan, Stage
from p2p_dtfm.core.protocol.snapshot import ViewId

WAYS = ("nothing", "gradient", "sent", "edge", "edgein", "accuse")
ALL = 1_000_000
KEPT = 1 << 20
VIEW = ViewId(1, "ab" * 32)


@dataclass
class Told:
    """The counts of all steps in which a member lied in one way."""

    steps: int = 0
    audits: int = 0
    liars_out: int = 0
    doubts: int = 0
    honest_out: int = 0
    liars_barred: int = 0
    """Barred by more than half of all: the others come back."""
    honest_barred: int = 0
    honest_pairs: int = 0


def plan_of(pipelines: int, stages: int) -> Plan:
    return Plan(
        tuple(
            Pipeline(
                tuple(Stage(f"p{row}s{column}", column, column + 1, 1) for column in range(stages)),
                2 * row,
                2,
            )
            for row in range(pipelines)
        ),
        (),
        1,
    )


def _digest(*words: object) -> bytes:
    return bytes.fromhex(digest_bytes(repr(words).encode()))


def _sum(peer: str, number: int) -> bytes:
    return _digest(peer, number)[:SUM_DIGEST_BYTES]


def shares_of(plan: Plan, step: int, liar: str, way: str) -> dict[str, Share]:
    """The claims of the members: the liar's as it likes, the others' as they have computed and
    got."""
    segments, shares = plan.segments(), {}
    for peer in plan.stage_holders():
        parts, got, norms = {}, {}, {}
        for number, segment in enumerate(segments):
            if peer not in segment.holders:
                continue
            chunks, mine = range(len(segment.holders)), segment.holders.index(peer)
            parts[number] = tuple(_part(peer, step, n, liar, way) for n in chunks)
            if len(segment.holders) > 1 and states_parameters(plan):
                norms[number] = (1.0,) * len(segment.holders)
            got[number] = tuple(
                ()
                if it == peer
                else tuple(_part(it, step, n, liar, way) if n == mine else b"" for n in chunks)
                for it in segment.holders
            )
        edges = _edges(plan, step, peer, liar, way)
        layers = plan.layers_of(peer) if states_parameters(plan) else ()
        parameters = {layer: _digest("layer", step, layer) for layer in layers}
        got = got if len(plan.pipelines) > 1 else {}
        shares[peer] = Share("cpu-1", 1, parts, got, edges, parameters, norms=norms)
    return shares


def _part(peer: str, step: int, chunk: int, liar: str, way: str) -> bytes:
    return _digest("part", peer, step, chunk, way == "gradient" and peer == liar)


def _edges(plan: Plan, step: int, peer: str, liar: str, way: str) -> Edges:
    found = {}
    for number, (before, after) in beside(plan, peer).items():

        def frame(sender: str, is_forward: bool, number: int = number) -> bytes:
            return _digest(step, number, sender, is_forward, way == "sent" and sender == liar)

        lies = peer == liar
        found[number] = Boundary(
            _turned(frame(before, True), lies and way == "edgein") if before else b"",
            _turned(frame(peer, True), lies and way == "edge") if after else b"",
            _turned(frame(after, False), lies and way == "edgein") if after else b"",
            _turned(frame(peer, False), lies and way == "edge") if before else b"",
        )
    return found


def _turned(digest: bytes, lies: bool) -> bytes:
    return digest[::-1] if lies else digest


def works_of(plan: Plan, shares: dict[str, Share]) -> dict[str, bytes]:
    segments = plan.segments()
    return {
        peer: own_digest(
            share.parts,
            1.0,
            share.edges,
            alone=norms_alone(peer, segments, dict.fromkeys(share.parts, 1.0), is_mixed=False),
        )
        + sums_digest(
            {number: _sum(peer, number) for number in share.parts},
            norms_made(peer, segments, share.norms),
        )
        for peer, share in shares.items()
    }


def one_step(plan: Plan, step: int, liar: str, way: str) -> tuple[int, Findings]:
    """The number of audits that were done, and what comes of them."""
    shares, right = shares_of(plan, step, liar, way), shares_of(plan, step, "", "nothing")
    claimed = works_of(plan, shares)
    # what a replay comes to: the sums, and what is computed from what has come, as it should be
    true = works_of(plan, right)
    judges = {peer: judges_of(peer, plan, shares, KEPT).all for peer in shares}
    seed = seed_of("1", step, {peer: _digest(peer, step) for peer in shares})
    drawn = draw(seed, plan.stage_holders(), judges.__getitem__, ALL)
    found: dict[str, dict[str, bytes]] = {peer: {} for peer in shares}
    for peer, judge in drawn.items():
        found[judge][peer] = _found(claimed, true, judge, peer, liar, way)
    disputed = [peer for peer, judge in drawn.items() if found[judge][peer] != claimed[peer]]
    for peer in disputed:
        for judge in judges[peer]:
            found[judge].setdefault(peer, _found(claimed, true, judge, peer, liar, way))
    heard = {
        peer: HeardClaim(claim_digest(share, claimed[peer]), b"") for peer, share in shares.items()
    }
    said = {}
    for peer, share in shares.items():
        segments = plan.segments()
        sums = {
            n: tuple(_digest(it, n)[:SUM_DIGEST_BYTES] for it in segments[n].holders)
            for n in share.parts
        }
        mine = found[peer]
        doubted = {it: mine.get(it, claimed[it]) != claimed[it] for it in disputed}
        account = Account(share, heard, mine, doubted)
        norms = dict.fromkeys(share.parts, 1.0)
        said[peer] = Prepared(
            VIEW, step, peer, norms, 1.0, 1, 0.0, 0, None, "", sums, audit=account
        )
    return sum(map(len, found.values())), findings(said, plan, plan.segments(), True, KEPT)


def _found(
    claimed: dict[str, bytes], true: dict[str, bytes], judge: str, peer: str, liar: str, way: str
) -> bytes:
    if judge == liar:
        return bytes(WORK_BYTES) if way == "accuse" else claimed[peer]
    return true[peer] if peer == liar else claimed[peer]


def played(plan: Plan, steps: int) -> dict[str, Told]:
    told = {way: Told() for way in WAYS}
    holders, chance = plan.stage_holders(), random.Random(1)
    for step in range(steps):
        way = WAYS[step % len(WAYS)]
        liar = "" if way == "nothing" else chance.choice(holders)
        audits, found = one_step(plan, step, liar, way)
        it, out = told[way], Counter(peer == liar for peer in found.liars)
        it.steps, it.audits = it.steps + 1, it.audits + audits
        it.liars_out, it.honest_out = it.liars_out + out[True], it.honest_out + out[False]
        barred = Counter(peer == liar for peer in found.convicted)
        it.liars_barred += barred[True]
        it.honest_barred += barred[False]
        it.doubts += len(found.doubts)
        it.honest_pairs += sum(liar not in pair for pair in found.doubts)
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--pipelines", type=int, default=3)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    told = played(plan_of(arguments.pipelines, arguments.stages), arguments.steps)
    if arguments.json:
        print(json.dumps({way: asdict(it) for way, it in told.items()}))
        return
    print(
        f"{'way':9} {'steps':>6} {'audits':>7} {'liar out':>8} {'barred':>6} {'doubts':>6} "
        f"{'honest out':>10} {'barred':>6}"
    )
    for way, it in told.items():
        liar = f"{it.liars_out:8} {it.liars_barred:6} {it.doubts:6}"
        row = f"{it.steps:6} {it.audits:7} {liar} {it.honest_out:10} {it.honest_barred:6}"
        print(f"{way:9} {row}")
    if any(it.honest_out or it.honest_barred or it.honest_pairs for it in told.values()):
        raise SystemExit("an honest member was convicted, or two were in doubt")


if __name__ == "__main__":
    main()
