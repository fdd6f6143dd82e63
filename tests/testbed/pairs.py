"""Plans of pipelines of two stages, whatever machines there are. Each half of the model then has as
many replicas as there are pairs. Other plans have a single pipeline."""

from typing import Any

import pytest

from p2p_dtfm.core.planner.planner import standing_plan
from p2p_dtfm.core.protocol.canonical import digest_bytes
from p2p_dtfm.core.protocol.plan import Pipeline, Plan, Stage
from p2p_dtfm.core.protocol.snapshot import Snapshot
from p2p_dtfm.net.contacts.identity import identity_of_seed
from p2p_dtfm.testbed.virtual import worlds
from p2p_dtfm.testbed.virtual.peer import Peer

CUT = 3
"""The layer with which each second stage begins."""


def planned_in_pairs(
    monkeypatch: pytest.MonkeyPatch, seed: int, firsts: str, lasts: str, evens_out: bool = False
) -> None:
    """The present peers of `firsts` and of `lasts` are paired in this order, and the others are
    spares. With `evens_out` the last peers of the longer side go over to the other side instead.
    Nobody has room for the whole model."""
    ids = {name: peer_id_of(seed, name) for name in firsts + lasts}
    honest = worlds.compute_plan

    def compute_plan(snapshot: Snapshot) -> Any:
        if (standing := standing_plan(snapshot)) is not None:
            return standing
        here = {record.peer_id for record in snapshot.records}
        halves = [[ids[it] for it in names if ids[it] in here] for names in (firsts, lasts)]
        if evens_out:
            many, few = sorted(halves, key=len, reverse=True)
            while len(many) - len(few) > 1:
                few.append(many.pop())
        pairs = list(zip(*halves, strict=False))
        if not pairs:
            return honest(snapshot)
        total, pipelines, at = snapshot.workload.microbatch_count, [], 0
        for place, (first, last) in enumerate(pairs):
            end = total * (place + 1) // len(pairs)
            stages = Stage(first, 0, CUT, 2), Stage(last, CUT, snapshot.workload.layer_count, 1)
            pipelines.append(Pipeline(stages, at, end - at))
            at = end
        spares = here - {peer_id for pair in pairs for peer_id in pair}
        return Plan(tuple(pipelines), tuple(sorted(spares)), 1_000_000)

    monkeypatch.setattr(worlds, "compute_plan", compute_plan)


def planned_in_rows(
    monkeypatch: pytest.MonkeyPatch, seed: int, rows: tuple[str, ...], cuts: tuple[int, ...]
) -> None:
    """While all of these peers are there, each row is a pipeline, with the same stages, from their
    cuts on. In a single row each peer alone holds its layers."""
    ids = [[peer_id_of(seed, name) for name in names] for names in rows]
    honest = worlds.compute_plan

    def compute_plan(snapshot: Snapshot) -> Any:
        standing = standing_plan(snapshot)
        here = {record.peer_id for record in snapshot.records}
        if standing is not None or any(not here.issuperset(row) for row in ids):
            return standing or honest(snapshot)
        workload, pipelines, at = snapshot.workload, [], 0
        ends = (*cuts[1:], workload.layer_count)
        for number, row in enumerate(ids):
            stages = tuple(
                Stage(peer_id, first, end, len(row) - place)
                for place, (peer_id, first, end) in enumerate(zip(row, cuts, ends, strict=True))
            )
            until = workload.microbatch_count * (number + 1) // len(ids)
            pipelines.append(Pipeline(stages, at, until - at))
            at = until
        spares = tuple(sorted(here.difference(*ids)))
        return Plan(tuple(pipelines), spares, 1_000_000)

    monkeypatch.setattr(worlds, "compute_plan", compute_plan)


def has_evaluated(peer: Peer, step: int) -> bool:
    """Whether the evaluation of this step's states is committed."""
    return any(it["event"] == "step" and it["step"] == step for it in peer.events())


def peer_id_of(seed: int, name: str) -> str:
    return identity_of_seed(bytes.fromhex(digest_bytes(f"{seed} {name}".encode()))).peer_id
