"""An auditor fetches what came into a stage from the stage's neighbours, to compute its work
again."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from p2p_dtfm.core.audit.boundaries import TRAINING, boundary_bytes
from p2p_dtfm.core.messages.audit_messages import Boundary
from p2p_dtfm.core.messages.work import Kind, Lack
from p2p_dtfm.core.protocol.plan import Pipeline, Plan, Stage
from p2p_dtfm.daemon.step import stage_account
from p2p_dtfm.daemon.step.stage_account import FRAMES_AT_ONCE, Judge
from p2p_dtfm.net.streams.blobs import BlobUnavailable
from tests.core.builders import run_spec

COUNT = 20
SPEC: Any = run_spec().model_copy(
    update={"batch": run_spec().batch.model_copy(update={"global_batch": COUNT, "microbatch": 1})}
)
STAGES = Stage("a", 0, 1, 2), Stage("b", 1, 2, 1), Stage("c", 2, 3, 1)
PLAN = Plan((Pipeline(STAGES, 0, COUNT),), (), 1)
EDGES = {
    number: Boundary(bytes([1, number]) * 16, b"", bytes([2, number]) * 16, b"")
    for number in range(COUNT)
}


def edges_by(fetch: Any) -> Any:
    """The edges of the stage in the middle."""
    line = SimpleNamespace(activation="fp32", gradient="fp32")
    wire: Any = SimpleNamespace(boundaries={("a", "b"): line, ("b", "c"): line})
    nothing: Any = None
    judge = Judge(SPEC, PLAN, wire, {}, nothing, fetch)
    claims: Any = {"b": SimpleNamespace(share=SimpleNamespace(edges=EDGES))}
    return judge._edges("b", claims, TRAINING)


@pytest.mark.parametrize("are_large", [False, True])
def test_small_ones_come_several_at_a_time_and_are_told_apart(
    monkeypatch: pytest.MonkeyPatch, are_large: bool
) -> None:
    """In the middle of a pipeline, 64 microbatches are 128 frames, and each took a trip of its own.
    At 200 ms that is 26 seconds, for which nobody waits."""
    if are_large:
        monkeypatch.setattr(stage_account, "FRAMES_AT_ONCE_BYTES", 2 * boundary_bytes(SPEC))
    asked, under_way, most = set[Lack](), [0], [0]

    async def fetch(due: Lack, blob: str, size_bytes: int) -> bytes:
        asked.add(due)
        under_way[0] += 1
        most[0] = max(most[0], under_way[0])
        await asyncio.sleep(0.001 * (COUNT - due.index))
        under_way[0] -= 1
        return bytes.fromhex(blob)

    found = asyncio.run(edges_by(fetch))
    assert most[0] == (2 if are_large else FRAMES_AT_ONCE)
    assert list(found) == list(range(COUNT))
    for number, edge in found.items():
        assert edge.activation.payload == EDGES[number].activation_in
        assert edge.gradient.payload == EDGES[number].gradient_in
    of = ("a", Kind.ACTIVATION, 1), ("c", Kind.GRADIENT, 2)
    assert asked == {Lack(*it, number) for it in of for number in range(COUNT)}


def test_once_one_is_not_to_be_had_the_others_are_not_waited_for() -> None:
    """After that the auditor names nobody who owes a frame."""
    waiting = set[Lack]()

    async def fetch(due: Lack, blob: str, size_bytes: int) -> bytes:
        if due.index == 3:
            raise BlobUnavailable(blob, {due.peer_id: "is not here"}, {due.peer_id})
        waiting.add(due)
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            waiting.discard(due)
        return b""

    async def scene() -> None:
        with pytest.raises(BlobUnavailable):
            await asyncio.wait_for(edges_by(fetch), 5)
        await asyncio.sleep(0)
        assert not waiting

    asyncio.run(scene())
